// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/log"
)

const (
	// unmountBound is how long an unmount is waited for. It takes milliseconds.
	unmountBound = 10 * time.Second
	// leastCleanup is how long the steps of a clean-up may take together at
	// least, also if the caller does not wait for that long.
	leastCleanup = 30 * time.Second
	// leastStep is how long one of them may take at least.
	leastStep = 2 * time.Second
)

// DeferContext returns the context of one step of a clean-up.
type DeferContext = func() (context.Context, context.CancelFunc)

// CleanupSteps returns a DeferContext for several steps that follow each other,
// each also when another has failed; one is what a single step has. Together
// they end while the caller, whose context is ctx, still waits, less the time
// that an unmount may take, and take no longer than two: until then the next try
// finds the name of the pod in use. A step may use three quarters of the time
// that is left, so that each is really tried.
//
// A caller that has gone, or has no deadline, is not waiting for a moment: then
// only the second bound holds. What is returned is for one goroutine.
func CleanupSteps(ctx context.Context, one DeferContext) DeferContext {
	var end time.Time
	return func() (context.Context, context.CancelFunc) {
		step, cancel := one()
		bound, ok := step.Deadline()
		if !ok {
			return step, cancel
		}
		if end.IsZero() {
			end = bound.Add(time.Until(bound))
			if patience, ok := ctx.Deadline(); ok && ctx.Err() == nil {
				left := max(time.Until(patience)-unmountBound, leastCleanup)
				end = earlier(end, time.Now().Add(left))
			}
		}
		share, cancelShare := context.WithTimeout(step, max(time.Until(end)*3/4, leastStep))
		return share, func() { cancelShare(); cancel() }
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// namespace is what RemoveNamespace needs of a network namespace.
type namespace interface {
	GetPath() string
	Remove() error
}

// unmounts holds what RemoveNamespace has begun and what has not ended, by path.
var unmounts = struct {
	sync.Mutex
	running map[string]*unmount
}{running: make(map[string]*unmount)}

type unmount struct {
	done chan struct{} // closed when err is set
	err  error
	left bool // whether somebody has given up waiting; guarded by unmounts
}

// RemoveNamespace removes a network namespace and returns when that is done, or
// after ten seconds with an error: nothing can interrupt an unmount that the
// kernel does not carry out. It ends by itself when the kernel lets go of it,
// which is logged; until then a further call for the same path waits for it and
// begins no other.
func RemoveNamespace(ns namespace) error {
	path := ns.GetPath()
	unmounts.Lock()
	u := unmounts.running[path]
	if u == nil {
		u = &unmount{done: make(chan struct{})}
		unmounts.running[path] = u
		go u.run(path, ns)
	}
	unmounts.Unlock()

	bound := time.NewTimer(unmountBound)
	defer bound.Stop()
	select {
	case <-u.done:
		return u.err
	case <-bound.C:
		unmounts.Lock()
		u.left = true
		unmounts.Unlock()
		return fmt.Errorf("network namespace %s is still being unmounted after %s; look for a mount that hangs", path, unmountBound)
	}
}

func (u *unmount) run(path string, ns namespace) {
	begin := time.Now()
	u.err = ns.Remove()
	unmounts.Lock()
	delete(unmounts.running, path)
	left := u.left
	unmounts.Unlock()
	close(u.done)
	if left {
		log.L.WithError(u.err).Warnf("cni: removal of network namespace %s has ended after %s", path, time.Since(begin).Round(time.Second))
	}
}
