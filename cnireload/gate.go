// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/diskfile"
)

// Gates says what closed gates do.
type Gates string

const (
	// GatesAuto: a gate is enforced where its target comes from a key of the
	// plugin's configuration, or that key's default, and reported where it is
	// compiled into the plugin and may move with a release of it.
	GatesAuto Gates = "auto"
	// GatesReport: no gate of a plugin is enforced.
	GatesReport Gates = "report"
	// GatesOff: plugins have no gates.
	GatesOff Gates = "off"
)

// GateMode says what one closed gate does.
type GateMode string

const (
	// GateEnforce: the network is not ready while the gate is closed.
	GateEnforce GateMode = "enforce"
	// GateReport: the network is ready, but pods wait for the gate for a while.
	GateReport GateMode = "report"
)

// gateKind is what has to be true of a gate's target.
type gateKind string

const (
	gateFile    gateKind = "file"             // it exists
	gateFilled  gateKind = "file not empty"   // it exists and has not just been emptied
	gateFlannel gateKind = "flannel env file" // it has flannel's keys
	gateUnix    gateKind = "unix socket"      // somebody accepts connections
	gateTCP     gateKind = "tcp port"         // somebody accepts connections
	gateConf    gateKind = "configuration"    // target says what is missing in it
)

// gate is a condition that a plugin's own code needs before an operation can
// succeed. It is never stricter than the plugin itself: a network that is held
// back wrongly has no way out.
type gate struct {
	plugin string
	kind   gateKind
	target string
	// instead is another target whose presence will do, of kind gateTCP.
	instead string
	key     string // of the configuration; empty when compiled in
	mode    GateMode
	del     bool   // DEL needs it too
	silent  bool   // DEL without it succeeds and removes nothing
	network string // that it belongs to, for messages; empty for ready_files
}

// GateState describes a gate of the networks in use.
type GateState struct {
	Plugin string
	Kind   string
	Target string
	Key    string // configuration key that the target comes from; empty when compiled in
	Mode   GateMode
	Ops    []string // verbs that need it
	Open   bool
	Since  time.Time // when it was found to be so
	Cause  string    // why it is closed, or open against appearances

	id string
}

// id names the gate for comparison.
func (g gate) id() string { return fmt.Sprintf("%+v", g) }

func (g gate) ops() []string {
	if g.del {
		return []string{"ADD", "DEL"}
	}
	return []string{"ADD"}
}

// gateBound is how long one look at a gate may take.
const gateBound = time.Second

// emptyFor is how long a file that must not be empty is waited for once it is.
const emptyFor = 10 * time.Second

// errLongEmpty says that a gate is open although its file is empty: nobody is
// about to write it, and the plugin does without its content.
var errLongEmpty = fmt.Errorf("it has been empty for more than %s, and the plugin does without its content", emptyFor)

// check returns nil if the gate is open, and otherwise what its target lacks. A
// file on a disk that does not answer cannot be given up on, and keeps a thread:
// the look goes on in pending, which the next check takes up.
func (g gate) check(ctx context.Context, pending *chan error) error {
	err := g.examine(ctx, pending)
	if errors.Is(err, errLongEmpty) {
		return nil
	}
	return err
}

// examine is check, which tells in addition what is amiss with an open gate:
// that is errLongEmpty.
func (g gate) examine(ctx context.Context, pending *chan error) error {
	ctx, cancel := context.WithTimeout(ctx, gateBound)
	defer cancel()
	if *pending == nil {
		done := make(chan error, 1)
		*pending = done
		go func() {
			err := g.look(ctx)
			if err != nil && g.instead != "" && dial(ctx, "tcp", g.instead) == nil {
				err = nil
			}
			done <- err
		}()
	}
	select {
	case err := <-*pending:
		*pending = nil
		return err
	case <-ctx.Done():
		return errSilent
	}
}

var errSilent = fmt.Errorf("has not answered within %s", gateBound)

func (g gate) look(ctx context.Context) error {
	switch g.kind {
	case gateFile, gateFilled:
		info, err := os.Stat(g.target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return errors.New("does not exist")
		case err != nil:
			return fmt.Errorf("cannot be looked at: %w", err)
		case g.kind == gateFilled && info.Mode().IsRegular() && info.Size() == 0:
			// A time to come is that of a clock which was set back since.
			if age := time.Since(info.ModTime()); age < 0 || age >= emptyFor {
				return errLongEmpty
			}
			return errors.New("is empty")
		}
		return nil
	case gateFlannel:
		return lookFlannel(g.target)
	case gateUnix:
		return dial(ctx, "unix", g.target)
	case gateTCP:
		return dial(ctx, "tcp", g.target)
	default:
		return errors.New("is not set")
	}
}

// lookFlannel makes the checks of flannel's plugin on its environment file.
func lookFlannel(path string) error {
	c := diskfile.Read(path, time.Now(), confdir.MaxSize)
	if errors.Is(c.Err, fs.ErrNotExist) {
		return errors.New("does not exist")
	}
	if c.Err != nil {
		return c.Err
	}
	// The plugin parses networks, subnets and MTU, and refuses what is empty.
	has := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(c.Bytes)); lines.Scan(); {
		key, value, ok := strings.Cut(lines.Text(), "=")
		key = strings.TrimSpace(key)
		has[key] = ok && (strings.TrimSpace(value) != "" || key == "FLANNEL_IPMASQ")
	}
	var missing []string
	for _, keys := range [][]string{
		{"FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"}, {"FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"}, {"FLANNEL_MTU"}, {"FLANNEL_IPMASQ"},
	} {
		if !slices.ContainsFunc(keys, func(key string) bool { return has[key] }) {
			missing = append(missing, keys[0])
		}
	}
	if missing != nil {
		return fmt.Errorf("lacks %s", strings.Join(missing, ", "))
	}
	return nil
}

// dial tells whether somebody accepts connections: a socket's file stays behind
// when its owner has gone.
func dial(ctx context.Context, network, address string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if err == nil {
		return c.Close()
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	switch timeout, _ := err.(interface{ Timeout() bool }); {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("does not exist")
	case ctx.Err() != nil, timeout != nil && timeout.Timeout():
		// In the same words as check, which gives up at the same time.
		return errSilent
	}
	return fmt.Errorf("does not accept connections: %w", err)
}

// gateError is why a network is not ready that has a closed gate. Its text is
// the same for as long as the gate is closed: a message that changes with each
// look would have the node's status written each time.
type gateError struct {
	gate  gate
	cause string
	since time.Time
}

// what names what the gate looks at.
func (g gate) what() string {
	if g.key == "" {
		return g.target
	}
	return g.target + " (" + g.key + ")"
}

func (e *gateError) Error() string {
	what := e.gate.what()
	if e.gate.plugin == "" {
		return fmt.Sprintf("%s %s, since %s", what, e.cause, e.since.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("plugin %q needs %s, which %s, since %s", e.gate.plugin, what, e.cause, e.since.UTC().Format(time.RFC3339))
}

// gateHistory is what is known of one gate.
type gateHistory struct {
	answer  answer
	pending chan error // of a look that has not come to its end; the asking goroutine's
	open    bool       // latched: an agent that restarts does not close it again
	cause   string
	since   time.Time
}

// gatesOf returns the gates of the networks as they are to be treated.
func (c *config) gatesOf(nets []*network) []gate {
	var gates []gate
	if c.gates != GatesOff {
		for _, n := range nets {
			for _, g := range gatesOf(n.list) {
				g.network = n.describe()
				if c.gates == GatesReport {
					g.mode = GateReport
				}
				gates = append(gates, g)
			}
		}
	}
	for _, path := range c.readyFiles {
		gates = append(gates, gate{kind: gateFile, target: path, key: "ready_files", mode: GateEnforce})
	}
	return gates
}

// judgeGates adds the state of each gate to the snapshot. A gate stays open
// until the networks bring another set of gates.
func (l *loop) judgeGates(ctx context.Context, s *Snapshot, nets []*network, now time.Time) (cause, waiting error) {
	gates := l.n.config.gatesOf(nets)
	var ids strings.Builder
	for _, g := range gates {
		ids.WriteString(g.id() + "\x00")
	}
	l.gateSet = ids.String()
	known := l.gates[l.gateSet]
	if known == nil {
		known = make(map[string]*gateHistory)
		l.gates[l.gateSet] = known
		l.n.disproved.Store(nil)
	}
	for _, g := range gates {
		h := known[g.id()]
		if h == nil {
			h = &gateHistory{since: now}
			known[g.id()] = h
		}
		l.observe(ctx, g, h, now)
		if !h.open && !h.answer.asked {
			waiting = g.within(fmt.Errorf("looking for %s", g.target))
			continue
		}
		state := GateState{Plugin: g.plugin, Kind: string(g.kind), Target: g.target, Key: g.key, Mode: g.mode,
			Ops: g.ops(), Open: h.open, Since: h.since, Cause: h.cause, id: g.id()}
		if errors.Is(h.answer.err, errLongEmpty) {
			state.Mode = GateReport // it no longer keeps anybody
		}
		s.Gates = append(s.Gates, state)
		if !h.open && g.mode == GateEnforce && cause == nil {
			cause = g.within(&gateError{gate: g, cause: h.cause, since: h.since})
		}
	}
	return cause, waiting
}

// within puts the gate's network in front of what is said of it.
func (g gate) within(err error) error {
	if g.network == "" {
		return err
	}
	return fmt.Errorf("%s: %w", g.network, err)
}

// observe brings what is known of one gate up to date and has it looked at again
// when that is due.
func (l *loop) observe(ctx context.Context, g gate, h *gateHistory, now time.Time) {
	if h.open {
		return
	}
	a := &h.answer
	if a.asked && !a.pending {
		h.cause = errorText(a.err)
		if a.err == nil || errors.Is(a.err, errLongEmpty) {
			h.open, h.since = true, now
			return
		}
	}
	if d := l.n.disproved.Load(); a.asked && d != nil && (*d)[g.id()] {
		h.open, h.since, h.cause = true, now, "it "+h.cause+", but an ADD has succeeded without it"
		return
	}
	if !a.pending {
		due := a.at.Add(l.n.pace.gate)
		if !a.asked || !now.Before(due) {
			l.ask(ctx, a, func(ctx context.Context) ([]string, error) { return nil, g.examine(ctx, &h.pending) })
			due = now.Add(l.n.pace.gate)
		}
		if due.Before(l.next) {
			l.next = due
		}
	}
}
