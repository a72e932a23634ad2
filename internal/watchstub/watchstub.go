// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package watchstub stands in for the operating system in tests of what watches
// directories.
package watchstub

import (
	"maps"
	"slices"
	"sync"

	"github.com/fsnotify/fsnotify"
)

// Notifier brings what tests send. Its methods can be called concurrently.
type Notifier struct {
	Event chan fsnotify.Event
	Err   chan error

	mu     sync.Mutex
	refuse error
	list   map[string]bool
	closed bool
}

// New returns one that watches nothing.
func New() *Notifier {
	return &Notifier{Event: make(chan fsnotify.Event), Err: make(chan error), list: make(map[string]bool)}
}

// Refuse has Add fail from now on, unless err is nil.
func (n *Notifier) Refuse(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refuse = err
}

// Add notes a path.
func (n *Notifier) Add(path string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse != nil {
		return n.refuse
	}
	n.list[path] = true
	return nil
}

// Remove forgets a path.
func (n *Notifier) Remove(path string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.list, path)
	return nil
}

// WatchList returns the paths.
func (n *Notifier) WatchList() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.list))
}

// Close closes the channels.
func (n *Notifier) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.closed = true
		close(n.Event)
		close(n.Err)
	}
	return nil
}

// Events returns what tests send.
func (n *Notifier) Events() <-chan fsnotify.Event { return n.Event }

// Errors returns what tests send.
func (n *Notifier) Errors() <-chan error { return n.Err }
