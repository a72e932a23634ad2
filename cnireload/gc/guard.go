// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"context"
	"errors"
	"sync"
	"time"
)

// ErrGaveWay is why a GC was ended for a pod.
var ErrGaveWay = errors.New("GC gave way to a pod")

// Guard keeps GC apart from ADD and DEL, which may run beside each other but not
// beside GC (CNI spec 1.1, section 2, "Lifecycle & Ordering"). GC gives way: it is
// not begun while an ADD or DEL runs, and is ended when one comes. The zero value
// is ready for use.
type Guard struct {
	// EndBound is how long an ADD or DEL waits for a GC that was told to end.
	EndBound time.Duration

	mu   sync.Mutex
	pods int      // ADDs and DELs that run
	gc   *running // nil while no GC runs
}

type running struct {
	patience time.Duration
	end      func() // ends it when patience has passed; can be called again
	done     chan struct{}
}

// Enter lets an ADD or DEL begin, after the end of a GC that runs. Leave has to
// follow.
func (g *Guard) Enter() {
	g.mu.Lock()
	g.pods++
	gc := g.gc
	g.mu.Unlock()
	if gc == nil {
		return
	}
	gc.end()
	select {
	case <-gc.done:
	case <-time.After(gc.patience + g.EndBound):
	}
}

// Leave ends an ADD or DEL.
func (g *Guard) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pods--
}

// Alone calls run, unless an ADD, a DEL or another GC runs, and tells whether it
// did. When an ADD or DEL comes, run's context ends after patience.
func (g *Guard) Alone(ctx context.Context, patience time.Duration, run func(context.Context)) bool {
	g.mu.Lock()
	if g.pods > 0 || g.gc != nil {
		g.mu.Unlock()
		return false
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gc := &running{patience: patience, done: make(chan struct{}), end: sync.OnceFunc(func() {
		time.AfterFunc(patience, func() { cancel(ErrGaveWay) })
	})}
	g.gc = gc
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.gc = nil
		g.mu.Unlock()
		close(gc.done)
	}()
	run(ctx)
	return true
}
