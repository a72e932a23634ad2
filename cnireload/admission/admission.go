// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package admission limits how often pods are tried again while many fail for a
// reason that nobody knows: dozens that are retried together keep each other and
// everything else on the node from getting anywhere (projectcalico/calico#13884).
//
// A pod that has failed gets a place before it is tried again, once [Many] pods
// have failed. There is one place a second, and more while pods succeed. A pod that
// has not failed never waits. A pod counts once, however often it fails, so that
// one bad pod changes nothing for others.
//
// The methods of a [Limit] can be called concurrently and wait for nothing. This
// package runs no pod and keeps no goroutine.
package admission

import (
	"fmt"
	"maps"
	"sync"
	"time"
)

const (
	// Many is how many pods must have failed for others to wait: fewer may be
	// broken themselves.
	Many = 10
	// Pace is how long a place is taken.
	Pace = time.Second
	// placesPerSuccess is how many more places there are for each success, until
	// a pod fails, and maxPlaces how many at most: all go on within seconds if all
	// is well, and no crowd is let loose if only some are.
	placesPerSuccess = 2
	maxPlaces        = 2 * Many
	// Fast is how soon a pod must fail for that to count: a plugin that takes its
	// time does not wear the node out, and one that hangs says nothing about the
	// next pod.
	Fast = 10 * time.Second
	// memory is how long it is remembered that a pod has failed.
	memory = 5 * time.Minute
)

// Limit is the limit of one network. [New] makes one.
type Limit struct {
	mu         sync.Mutex
	generation uint64               // of the lists that failed
	failed     map[string]time.Time // pods whose last attempt failed, and when
	since      time.Time            // when Many pods had failed
	cause      error                // of the last failure
	waiting    int
	logged     bool // that pods wait

	want, places int           // places there should be, and are
	free         chan struct{} // a token for each place that is not taken
}

// New returns a limit of a network whose pods have not failed.
func New() *Limit {
	l := &Limit{failed: make(map[string]time.Time), free: make(chan struct{}, maxPlaces)}
	l.resize(1)
	return l
}

// State says that pods which have failed wait for a place.
type State struct {
	Failures int       `json:"failures"` // pods whose last attempt has failed
	Since    time.Time `json:"since"`    // when these were Many
	Held     int       `json:"held"`     // pods that wait
	Cause    string    `json:"cause"`    // of the last failure
}

// State returns nil unless many pods have failed with the lists of that generation.
func (l *Limit) State(generation uint64) *State {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renew(generation)
	if !l.many() {
		return nil
	}
	return &State{Failures: len(l.failed), Since: l.since, Held: l.waiting, Cause: l.cause.Error()}
}

// Place returns nil if the pod need not wait, and otherwise a channel from which
// it gets a place. Who got one calls Take. An empty name is that of a pod which has
// not failed.
func (l *Limit) Place(pod string, generation uint64) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renew(generation)
	if _, failed := l.failed[pod]; !failed || !l.many() {
		return nil
	}
	return l.free
}

// Take has a place that was got be free again after the pace.
func (l *Limit) Take() {
	time.AfterFunc(Pace, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.places > l.want {
			l.places--
		} else {
			l.free <- struct{}{}
		}
	})
}

// Wait counts a pod that waits until done is called, and tells whether it is the
// first one.
func (l *Limit) Wait() (first bool, done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting++
	first, l.logged = !l.logged, true
	return first, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.waiting--
	}
}

// Failed notes that a pod has failed with the lists of that generation, after some
// time.
func (l *Limit) Failed(pod string, generation uint64, err error, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renew(generation)
	if pod == "" || took > Fast || generation < l.generation {
		return
	}
	many := l.many()
	l.failed[pod], l.cause = time.Now(), err
	if !many {
		l.since = l.failed[pod]
	}
	l.resize(1)
}

// Succeeded notes that a pod has its network, and tells whether that ends the
// waiting of pods that the log was told of.
func (l *Limit) Succeeded(pod string) (over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, failed := l.failed[pod]; failed {
		delete(l.failed, pod)
		l.resize(l.want + placesPerSuccess)
	}
	if l.many() {
		return false
	}
	l.resize(maxPlaces) // for those that still wait
	over, l.logged = l.logged, false
	return over
}

// Err is the error of a pod that has got no place in time.
func (l *Limit) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil {
		return fmt.Errorf("held back because %d pods had failed", Many)
	}
	return fmt.Errorf("held back because %d pods have failed, of which one is tried every %s; the last failed with: %w", len(l.failed), Pace, l.cause)
}

// many tells whether many pods have failed. l is locked.
func (l *Limit) many() bool {
	maps.DeleteFunc(l.failed, func(_ string, at time.Time) bool { return time.Since(at) >= memory })
	return len(l.failed) >= Many
}

// renew forgets the failures of earlier generations. l is locked.
func (l *Limit) renew(generation uint64) {
	if generation > l.generation {
		l.generation = generation
		clear(l.failed)
		l.resize(1)
	}
}

// resize sets how many places there should be. Those that are taken go when they
// would be free. l is locked.
func (l *Limit) resize(want int) {
	l.want = min(want, maxPlaces)
	for ; l.places < l.want; l.places++ {
		l.free <- struct{}{}
	}
	for ; l.places > l.want; l.places-- {
		select {
		case <-l.free:
		default:
			return
		}
	}
}
