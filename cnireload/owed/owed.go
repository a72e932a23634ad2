// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package owed keeps the removals of pods that are owed: a pod's DEL could not
// be done while the pod existed, and has to be done later.
//
// It promises that a removal for which Add has returned nil survives a restart
// of this program and a crash of the machine, and is tried again until it is
// done or [MaxAge] old. It also records ADDs that have begun, so that the next
// process knows which lists a pod was being added with.
//
// All methods can be called concurrently, except Retry, which is for one
// goroutine. No lock is held while a file is read or written, or while a
// function of the caller runs.
//
// The package never runs a plugin and knows nothing of networks, snapshots or
// gates: it takes and gives plain records.
package owed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
)

const (
	// Max is how many removals can be owed at one time, by all networks of this
	// process that keep them in one directory.
	Max = 256
	// MaxFailedADD is how many of them can be of pods whose ADD has failed. While
	// an API server is away these come by the dozen a minute, and must leave room
	// for pods that ran.
	MaxFailedADD = Max / 2
	// MaxAge is how long a removal is owed. By then the agent, or what the plugin
	// kept, is gone for good.
	MaxAge = 24 * time.Hour
)

// ErrTooMany and ErrTooManyFailedADD are what Add returns at the two limits.
var (
	ErrTooMany          = fmt.Errorf("%d removals are owed already, which is the limit", Max)
	ErrTooManyFailedADD = fmt.Errorf("%d removals of pods whose ADD had failed are owed already, which is the limit", MaxFailedADD)
)

// Removal is what is needed to do the removal of one pod, in the form that is on
// disk. A Removal that a Store returns must not be changed.
type Removal struct {
	Handler        string            `json:"handler"` // set by the store
	ID             string            `json:"id"`
	NetNS          string            `json:"netns"`
	Args           map[string]string `json:"args,omitempty"`
	CapabilityArgs map[string]any    `json:"capabilityArgs,omitempty"`
	Networks       []Network         `json:"networks"`
	Since          time.Time         `json:"since"`
	Cause          string            `json:"cause"`
	// Released is whether the caller was told that the pod is removed. If not, it
	// is a pod whose ADD has failed, and the caller may ask again.
	Released bool `json:"released"`
}

// Network is a network that a pod is to be removed from.
type Network struct {
	Interface string          `json:"interface"`
	List      json.RawMessage `json:"list"` // the conflist
}

// Summary describes a removal that is owed.
type Summary struct {
	ID       string   `json:"sandbox"`
	Networks []string `json:"networks"` // names; not nil
	// Since is when the removal was stored.
	Since time.Time `json:"since"`
	// Cause is why the removal failed the last time.
	Cause string `json:"cause"`
	// Attempts counts the tries since, in this process.
	Attempts int `json:"attempts"`
}

// Store is what one network owes. Open makes one.
type Store struct {
	dir     string // empty: nothing is kept
	handler string
	*directory

	loading sync.Once
	loaded  chan struct{} // closed when what an earlier process left is known

	// The directory's lock protects these.
	removals map[string]*removal
	retrying int // how many retries are under way
	retries  sync.WaitGroup
	wake     chan struct{} // holds at most one token
}

// removal is a Removal and how its retries went. The directory's lock protects all
// but the Removal.
type removal struct {
	*Removal
	attempts int
	cause    string
	next     time.Time // it is not tried before
	waiting  bool      // what its DEL needs was missing at the last look
	trying   bool      // a retry is under way
}

// Open returns the store of a runtime handler's network in dir. It reads nothing
// yet. If dir is empty, the store keeps nothing and Add fails. Networks can share
// a directory. What a handler has left there that has no network any more belongs
// to the default network, whose handler is "" or "default".
func Open(dir, handler string) *Store {
	s := &Store{dir: dir, handler: handler, removals: make(map[string]*removal), wake: make(chan struct{}, 1), loaded: make(chan struct{})}
	s.open()
	return s
}

// Load reads what an earlier process has left, once, and waits until that is
// done, but no longer than bound: a disk may not answer.
func (s *Store) Load(ctx context.Context, bound time.Duration) {
	s.loading.Do(func() {
		go func() {
			defer close(s.loaded)
			for _, r := range s.read(context.WithoutCancel(ctx), s.dir) {
				if !s.owns(r.Handler) {
					continue
				}
				s.mu.Lock()
				if s.removals[r.ID] == nil {
					s.removals[r.ID] = &removal{Removal: r, cause: r.Cause}
				}
				s.mu.Unlock()
			}
		}()
	})
	select {
	case <-s.loaded:
	case <-ctx.Done():
	case <-time.After(bound):
	}
}

// Add stores a removal. It replaces one of the same pod. It fails when too many
// are owed, and when the file cannot be written: then the removal is not owed.
func (s *Store) Add(r Removal) error {
	if s.dir == "" {
		return errors.New("there is no place to remember it")
	}
	r.Handler = s.handler
	s.mu.Lock()
	before := s.removals[r.ID]
	delete(s.removals, r.ID) // it does not count twice
	if err := s.room(!r.Released); err != nil {
		if before != nil {
			s.removals[r.ID] = before
		}
		s.mu.Unlock()
		return err
	}
	s.removals[r.ID] = &removal{Removal: &r, cause: r.Cause, next: time.Now().Add(firstPause)}
	s.mu.Unlock()
	if err := write(s.path(r.ID), &r, true); err != nil {
		s.forget(r.ID)
		return fmt.Errorf("cannot remember the removal of pod %s: %w", r.ID, err)
	}
	s.lookAgain()
	return nil
}

// Get returns the removal of a pod that is owed; nil if none is.
func (s *Store) Get(id string) *Removal {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.removals[id]; r != nil {
		return r.Removal
	}
	return nil
}

// Done forgets the removal of a pod.
func (s *Store) Done(id string) {
	if s.Get(id) == nil {
		return
	}
	if err := os.Remove(s.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.L.WithError(err).Warnf("cni: the removal of pod %s is done but cannot be forgotten, and will be done again", id)
	}
	s.forget(id)
}

func (s *Store) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.removals, id)
}

// List describes what is owed, oldest first.
func (s *Store) List() []Summary {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Summary
	for _, r := range s.removals {
		d := Summary{ID: r.ID, Networks: []string{}, Since: r.Since, Cause: r.cause, Attempts: r.attempts}
		for _, o := range r.Networks {
			var conf struct {
				Name string `json:"name"`
			}
			_ = json.Unmarshal(o.List, &conf)
			d.Networks = append(d.Networks, conf.Name)
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b Summary) int {
		if c := a.Since.Compare(b.Since); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}
