// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cnireload/cnireload/cnireload/rules"
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
type GateMode = rules.Mode

const (
	// GateEnforce: the network is not ready while the gate is closed.
	GateEnforce = rules.Enforce
	// GateReport: the network is ready, but pods wait for the gate for a while.
	GateReport = rules.Report
)

// gate is a gate of a network in use.
type gate struct {
	rules.Gate
	network string // that it belongs to, for messages; empty for ready_files
}

// GateState describes a gate of the networks in use.
type GateState struct {
	Plugin string    `json:"plugin,omitempty"`
	Kind   string    `json:"kind"`
	Target string    `json:"target"`
	Key    string    `json:"key,omitempty"` // configuration key that the target comes from; empty when compiled in
	Mode   GateMode  `json:"mode"`
	Ops    []string  `json:"ops"` // verbs that need it
	Open   bool      `json:"open"`
	Since  time.Time `json:"since"`           // when it was first found open, or closed
	Cause  string    `json:"cause,omitempty"` // why it is closed, or why it counts as open although something is amiss

	id string
}

// id tells gates from one another.
func (g gate) id() string { return fmt.Sprintf("%+v", g) }

// gateError says that a closed gate keeps a network from being ready. Its text
// stays the same while the gate is closed: the kubelet would write the node's
// status each time that it changes.
type gateError struct {
	gate  gate
	cause string
	since time.Time
}

func (e *gateError) Error() string {
	what := e.gate.Describe()
	if e.gate.Plugin == "" {
		return fmt.Sprintf("%s %s, since %s", what, e.cause, e.since.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("plugin %q needs %s, which %s, since %s", e.gate.Plugin, what, e.cause, e.since.UTC().Format(time.RFC3339))
}

// gateHistory is what the loop knows of one gate.
type gateHistory struct {
	checker rules.Checker // used by one check at a time
	answer  answer
	open    bool // it stays open: an agent that restarts does not close it again
	cause   string
	since   time.Time
}

// gatesOf returns the gates of the networks and of ready_files, with the modes
// that the configuration asks for.
func (c *config) gatesOf(nets []*network) []gate {
	var gates []gate
	if c.gates != GatesOff {
		for _, n := range nets {
			for _, g := range rules.Gates(n.list) {
				if c.gates == GatesReport {
					g.Mode = GateReport
				}
				gates = append(gates, gate{g, n.describe()})
			}
		}
	}
	for _, path := range c.readyFiles {
		gates = append(gates, gate{Gate: rules.Gate{Kind: rules.File, Target: path, Key: "ready_files", Mode: GateEnforce}})
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
			h = &gateHistory{checker: rules.Checker{Gate: g.Gate}, since: now}
			known[g.id()] = h
		}
		l.observe(ctx, g, h, now)
		if !h.open && !h.answer.asked {
			waiting = g.within(fmt.Errorf("looking for %s", g.Target))
			continue
		}
		state := GateState{Plugin: g.Plugin, Kind: string(g.Kind), Target: g.Target, Key: g.Key, Mode: g.Mode,
			Ops: g.Ops(), Open: h.open, Since: h.since, Cause: h.cause, id: g.id()}
		if errors.Is(h.answer.err, rules.ErrLongEmpty) {
			state.Mode = GateReport // the file is still empty, but nothing waits for it
		}
		s.Gates = append(s.Gates, state)
		if !h.open && g.Mode == GateEnforce && cause == nil {
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

// observe takes over the last check of a gate that is not open yet, and starts the
// next one when it is due.
func (l *loop) observe(ctx context.Context, g gate, h *gateHistory, now time.Time) {
	if h.open {
		return
	}
	a := &h.answer
	if a.asked && !a.pending {
		h.cause = errorText(a.err)
		if a.err == nil || errors.Is(a.err, rules.ErrLongEmpty) {
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
			l.ask(ctx, a, h.checker.Check)
			due = now.Add(l.n.pace.gate)
		}
		if due.Before(l.next) {
			l.next = due
		}
	}
}
