// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
)

// Call names one kind of call to a plugin and how it went.
type Call struct {
	Plugin string // type, as in a list
	Verb   string // as in CNI_COMMAND
	// Outcome is "ok", "error" (the plugin said so), "timeout" (its bound or
	// its caller's deadline), "canceled" (its caller went away) or "abandoned"
	// (it was killed and does not die).
	Outcome string
}

// CallCount is how many calls of one kind there were.
type CallCount struct {
	Count   uint64
	Seconds float64 // all of them together
}

// callLog counts calls. Its lock is held to count, never during a call.
type callLog struct {
	mu     sync.Mutex
	counts map[Call]CallCount
}

func (l *callLog) add(c Call, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.counts == nil {
		l.counts = make(map[Call]CallCount)
	}
	n := l.counts[c]
	n.Count++
	n.Seconds += d.Seconds()
	l.counts[c] = n
}

// Calls returns how many calls to plugins have ended, by kind, since New. What
// a plugin runs by itself, such as its IPAM, is not seen.
func (n *Network) Calls() map[Call]CallCount {
	n.calls.mu.Lock()
	defer n.calls.mu.Unlock()
	return maps.Clone(n.calls.counts)
}

// countedExec counts the calls of an Exec.
type countedExec struct {
	invoke.Exec
	calls *callLog
}

// ExecPlugin runs the plugin and counts the call.
func (e *countedExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	start := time.Now()
	out, err := e.Exec.ExecPlugin(ctx, path, stdin, environ)
	e.calls.add(Call{Plugin: filepath.Base(path), Verb: verbOf(environ), Outcome: outcomeOf(err)}, time.Since(start))
	return out, err
}

// errAbandoned is wrapped by the error of a call whose plugin does not die.
var errAbandoned = errors.New("it does not die")

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errAbandoned):
		return "abandoned"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled), errors.Is(err, ErrClosed):
		return "canceled"
	default:
		return "error"
	}
}
