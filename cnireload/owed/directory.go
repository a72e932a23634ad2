// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package owed

import (
	"sync"
	"time"
)

// directory is what the stores of this process share that keep their files in one
// directory.
type directory struct {
	mu       sync.Mutex
	handlers map[string]int  // open stores of each runtime handler
	failed   map[string]bool // for each pod whose removal is owed, whether its ADD has failed
	trying   bool            // a retry for a pod whose ADD has failed is under way
	next     time.Time       // the next of these is not tried before
}

var directories = struct {
	sync.Mutex
	byPath map[string]*directory
}{byPath: make(map[string]*directory)}

func openDirectory(dir, handler string) *directory {
	directories.Lock()
	defer directories.Unlock()
	d := directories.byPath[dir]
	if d == nil || dir == "" {
		d = &directory{handlers: make(map[string]int), failed: make(map[string]bool)}
		directories.byPath[dir] = d
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.handlers[handler]++
	return d
}

// close ends one store of the handler, which has owed removals of these pods.
func (d *directory) close(dir, handler string, ids []string) {
	directories.Lock()
	defer directories.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		delete(d.failed, id)
	}
	if d.handlers[handler]--; d.handlers[handler] == 0 {
		delete(d.handlers, handler)
	}
	if len(d.handlers) == 0 && directories.byPath[dir] == d {
		delete(directories.byPath, dir)
	}
}

// has tells whether a network of the handler is there.
func (d *directory) has(handler string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.handlers[handler] > 0
}

// take counts a pod, if the limits allow it.
func (d *directory) take(id string, failedADD bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	was, counted := d.failed[id]
	if !counted && len(d.failed) >= Max {
		return ErrTooMany
	}
	if failedADD && !was {
		count := 0
		for _, f := range d.failed {
			if f {
				count++
			}
		}
		if count >= MaxFailedADD {
			return ErrTooManyFailedADD
		}
	}
	d.failed[id] = failedADD
	return nil
}

func (d *directory) leave(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.failed, id)
}

// begin tells whether a retry for a pod whose ADD has failed may begin: one is
// tried at a time, and after one that fails there is a pause. It ends with end.
func (d *directory) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.trying || time.Now().Before(d.next) {
		return false
	}
	d.trying = true
	return true
}

func (d *directory) end(err error, pause time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trying = false
	if err != nil {
		d.next = time.Now().Add(pause)
	}
}
