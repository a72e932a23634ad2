// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"sync"

	"github.com/fsnotify/fsnotify"
)

// stubNotifier stands in for the operating system.
type stubNotifier struct {
	event chan fsnotify.Event
	err   chan error

	mu     sync.Mutex
	fail   error // of Add
	list   map[string]bool
	closed bool
}

func newStubNotifier() *stubNotifier {
	return &stubNotifier{event: make(chan fsnotify.Event), err: make(chan error), list: make(map[string]bool)}
}

func (s *stubNotifier) Add(path string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	s.list[path] = true
	return nil
}

func (s *stubNotifier) Remove(path string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.list, path)
	return nil
}

func (s *stubNotifier) WatchList() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []string
	for path := range s.list {
		list = append(list, path)
	}
	return list
}

func (s *stubNotifier) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		close(s.event)
		close(s.err)
	}
	return nil
}

func (s *stubNotifier) events() <-chan fsnotify.Event { return s.event }
func (s *stubNotifier) errors() <-chan error          { return s.err }
