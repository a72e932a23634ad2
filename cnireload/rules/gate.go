// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

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

	"github.com/cnireload/cnireload/internal/diskfile"
)

// Mode says what a closed gate does.
type Mode string

const (
	// Enforce: the network is not ready while the gate is closed. Only for targets
	// that a key of the configuration, or its default, leads to.
	Enforce Mode = "enforce"
	// Report: the network is ready, but pods wait for the gate for a while. For
	// targets that are compiled into the plugin, or that it waits for itself.
	Report Mode = "report"
)

// Kind is what has to be true of a gate's target.
type Kind string

const (
	File          Kind = "file"             // it exists
	FileNotEmpty  Kind = "file not empty"   // it exists and has not just been emptied
	FlannelEnv    Kind = "flannel env file" // it has flannel's keys
	UnixSocket    Kind = "unix socket"      // somebody accepts connections
	TCPPort       Kind = "tcp port"         // somebody accepts connections
	Configuration Kind = "configuration"    // never: the target names what is missing in it
)

// Gate is something that a plugin's own code needs before an operation can
// succeed. Gates can be compared, and be keys of maps.
type Gate struct {
	Plugin    string // type of the plugin that needs it
	Kind      Kind
	Target    string // path, host and port, or what is missing in the configuration
	Instead   string // host and port where a listener is as good; or empty
	Key       string // of the configuration, that Target comes from; empty when compiled in
	Mode      Mode
	DEL       bool // DEL needs it, as ADD does
	SilentDEL bool // DEL without it reports success, and removes nothing
}

// Ops returns the verbs that need the gate.
func (g Gate) Ops() []string {
	if g.DEL {
		return []string{"ADD", "DEL"}
	}
	return []string{"ADD"}
}

// Describe names the target and the key that it comes from, for messages.
func (g Gate) Describe() string {
	if g.Key == "" {
		return g.Target
	}
	return g.Target + " (" + g.Key + ")"
}

// Bound is how long one check of a gate waits for an answer.
const Bound = time.Second

// emptyFor is how long a FileNotEmpty that is empty keeps its gate closed.
const emptyFor = 10 * time.Second

var (
	// ErrLongEmpty says that a gate is open although its file is empty: nobody is
	// about to write it, and the plugin does without its content.
	ErrLongEmpty = fmt.Errorf("it has been empty for more than %s, and the plugin does without its content", emptyFor)
	// ErrNoAnswer says that a check was given up after [Bound].
	ErrNoAnswer = fmt.Errorf("has not answered within %s", Bound)
)

// Check returns nil or [ErrLongEmpty] if the gate is open, and otherwise what its
// target lacks, which completes a sentence that starts with the target. It gives a
// connection up after [Bound]. It cannot give up a file on a disk that does not
// answer: it returns when the disk does. [Checker.Check] does not wait for that.
func (g Gate) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Bound)
	defer cancel()
	err := g.look(ctx)
	if err != nil && g.Instead != "" && dial(ctx, "tcp", g.Instead) == nil {
		return nil
	}
	return err
}

// Checker checks one gate again and again. It is used by one goroutine at a time.
type Checker struct {
	Gate    Gate
	pending chan error // gets the outcome of a check that was not waited for
}

// Check is like [Gate.Check], but returns [ErrNoAnswer] after [Bound] even if the
// disk does not answer. That check keeps a thread until it ends, so the next call
// waits for it and starts no other.
func (c *Checker) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Bound)
	defer cancel()
	if c.pending == nil {
		outcome := make(chan error, 1)
		c.pending = outcome
		go func() { outcome <- c.Gate.Check(ctx) }()
	}
	select {
	case err := <-c.pending:
		c.pending = nil
		return err
	case <-ctx.Done():
		return ErrNoAnswer
	}
}

func (g Gate) look(ctx context.Context) error {
	switch g.Kind {
	case File, FileNotEmpty:
		info, err := os.Stat(g.Target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return errors.New("does not exist")
		case err != nil:
			return fmt.Errorf("cannot be looked at: %w", err)
		case g.Kind == FileNotEmpty && info.Mode().IsRegular() && info.Size() == 0:
			// A time in the future is from before the clock was set back.
			if age := time.Since(info.ModTime()); age < 0 || age >= emptyFor {
				return ErrLongEmpty
			}
			return errors.New("is empty")
		}
		return nil
	case FlannelEnv:
		return lookFlannel(g.Target)
	case UnixSocket:
		return dial(ctx, "unix", g.Target)
	case TCPPort:
		return dial(ctx, "tcp", g.Target)
	default:
		return errors.New("is not set")
	}
}

// lookFlannel makes the checks of flannel's plugin on its environment file.
func lookFlannel(path string) error {
	file := diskfile.Read(path, time.Now(), 1<<20)
	switch {
	case errors.Is(file.Err, fs.ErrNotExist):
		return errors.New("does not exist")
	case file.Err != nil:
		return file.Err
	}
	// The plugin parses networks, subnets and MTU, and refuses what is empty.
	has := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(file.Bytes)); lines.Scan(); {
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

// dial tells whether somebody accepts connections. That a socket is there does
// not say so: it stays when its owner has gone.
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
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("does not exist")
	case ctx.Err() != nil, os.IsTimeout(err):
		return ErrNoAnswer
	}
	return fmt.Errorf("does not accept connections: %w", err)
}
