// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package owed

import (
	"slices"
	"sync"
	"time"
)

// directory is what the open stores of this process share that keep their files
// in one directory. Its lock protects them, too.
type directory struct {
	mu     sync.Mutex
	stores []*Store
	trying bool      // a retry for a pod whose ADD has failed is under way
	next   time.Time // the next of these is not tried before
}

var directories = struct {
	sync.Mutex
	byPath map[string]*directory
}{byPath: make(map[string]*directory)}

// open adds the store to those of its directory.
func (s *Store) open() {
	directories.Lock()
	defer directories.Unlock()
	d := directories.byPath[s.dir]
	if d == nil || s.dir == "" {
		d = &directory{}
		directories.byPath[s.dir] = d
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.directory, d.stores = d, append(d.stores, s)
}

// Close gives up the network's part in the directory. What is stored stays. It
// can be called again.
func (s *Store) Close() {
	directories.Lock()
	defer directories.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stores = slices.DeleteFunc(s.stores, func(o *Store) bool { return o == s })
	if len(s.stores) == 0 && directories.byPath[s.dir] == s.directory {
		delete(directories.byPath, s.dir)
	}
}

// owns tells whether what a network of the handler has stored is this store's.
func (s *Store) owns(handler string) bool {
	if handler == s.handler {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return (s.handler == "" || s.handler == "default") && !slices.ContainsFunc(s.stores, func(o *Store) bool { return o.handler == handler })
}

// room returns which limit keeps one more pod from being owed; the lock is held.
func (d *directory) room(failedADD bool) error {
	all, failed := 0, 0
	for _, s := range d.stores {
		all += len(s.removals)
		for _, r := range s.removals {
			if !r.Released {
				failed++
			}
		}
	}
	switch {
	case all >= Max:
		return ErrTooMany
	case failedADD && failed >= MaxFailedADD:
		return ErrTooManyFailedADD
	}
	return nil
}
