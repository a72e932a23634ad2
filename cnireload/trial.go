// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/internal/oneline"
)

const (
	// trialAfter is how many pods in a row must fail for the next ones to be
	// tried one after the other.
	trialAfter = 10
	// fastFailure is how soon a plugin must fail for that to count: one that
	// takes its time does not wear the node out, and one that hangs says nothing
	// about the next pod.
	fastFailure = 10 * time.Second
	// trialMemory is how long failures are remembered without another one.
	trialMemory = time.Minute
	// maxTrialPods bounds the pods of which it is remembered that they failed.
	maxTrialPods = 1024
)

// trials holds pods back while every pod of a network fails, for a reason that
// no gate knows of: dozens of pods that are retried at once keep each other and
// everything else on the node from getting anywhere (projectcalico/calico#13884).
// One is tried at each beat, pods that have not failed before first, and the
// first that succeeds lets all others go on.
//
// Its lock is never held while something is waited for.
type trials struct {
	mu         sync.Mutex
	generation uint64 // that has failed
	failures   int    // in a row
	since      time.Time
	last       time.Time
	cause      error
	failed     map[string]bool // pods
	next       time.Time       // when the next one may be tried
	timer      *time.Timer     // runs while there are waiters
	waiters    []*trialWaiter  // pods that have not failed first, then as they came
}

// trialWaiter is a pod whose turn has not come. turn is closed when it has.
type trialWaiter struct {
	again bool // it has failed before
	turn  chan struct{}
}

// Trial says that pods are tried one after the other, because all have failed.
type Trial struct {
	Failures int       // in a row
	Since    time.Time // when the first of them was
	Held     int       // pods that wait for their turn
	Cause    string    // of the last failure
}

// Trial returns nil unless pods are tried one after the other.
func (n *Network) Trial() *Trial {
	t := &n.trials
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.active(time.Now(), n.Snapshot().Generation) {
		return nil
	}
	return &Trial{Failures: t.failures, Since: t.since, Held: len(t.waiters), Cause: t.cause.Error()}
}

// active tells whether pods are held back. t is locked.
func (t *trials) active(now time.Time, generation uint64) bool {
	return t.failures >= trialAfter && t.generation == generation && now.Sub(t.last) < trialMemory
}

// enter returns nil if the pod can go on at once, and otherwise its place.
func (t *trials) enter(pod string, generation uint64, pace time.Duration) *trialWaiter {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if !t.active(now, generation) {
		return nil
	}
	if len(t.waiters) == 0 && !now.Before(t.next) {
		t.next = now.Add(pace)
		return nil
	}
	w := &trialWaiter{again: t.failed[pod], turn: make(chan struct{})}
	at := len(t.waiters)
	if !w.again {
		if i := slices.IndexFunc(t.waiters, func(w *trialWaiter) bool { return w.again }); i >= 0 {
			at = i
		}
	}
	t.waiters = slices.Insert(t.waiters, at, w)
	if len(t.waiters) == 1 {
		t.timer = time.AfterFunc(t.next.Sub(now), func() { t.beat(pace) })
	}
	return w
}

// beat lets the first waiter go on.
func (t *trials) beat(pace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if len(t.waiters) == 0 || now.Before(t.next) {
		return // of a timer that was stopped too late
	}
	close(t.waiters[0].turn)
	t.waiters = t.waiters[1:]
	t.next = now.Add(pace)
	if len(t.waiters) > 0 {
		t.timer.Reset(pace)
	}
}

// leave gives up the waiter's place.
func (t *trials) leave(w *trialWaiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.waiters, w); i >= 0 {
		t.waiters = slices.Delete(t.waiters, i, i+1)
	}
	if len(t.waiters) == 0 && t.timer != nil {
		t.timer.Stop()
	}
}

// reset forgets all failures and lets everybody go on. t is locked.
func (t *trials) reset() (held int) {
	held = len(t.waiters)
	for _, w := range t.waiters {
		close(w.turn)
	}
	t.waiters, t.failures, t.failed, t.cause = nil, 0, nil, nil
	if t.timer != nil {
		t.timer.Stop()
	}
	return held
}

// renew forgets the failures of another generation than this one.
func (t *trials) renew(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.generation != generation {
		t.reset()
	}
}

// succeeded notes that a pod has its network.
func (t *trials) succeeded(logger *log.Entry) {
	t.mu.Lock()
	failures, active := t.failures, t.failures >= trialAfter
	held := t.reset()
	t.mu.Unlock()
	if active {
		logger.Infof("cni: a pod has its network after %d in a row had failed; %d that were held back go on", failures, held)
	}
}

// failedWith notes that a pod of that generation has none.
func (t *trials) failedWith(logger *log.Entry, pod string, generation uint64, err error, took, pace time.Duration) {
	if outcomeOf(err) != "error" || took > fastFailure {
		return
	}
	if t.count(pod, generation, err) == trialAfter {
		logger.Warnf("cni: %d pods in a row have failed; one is tried every %s until one succeeds: %s", trialAfter, pace, oneline.Of(err.Error()))
	}
}

// count returns how many have failed in a row.
func (t *trials) count(pod string, generation uint64, err error) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.generation != generation || now.Sub(t.last) >= trialMemory {
		t.reset()
	}
	if t.failures == 0 {
		t.generation, t.since, t.failed = generation, now, make(map[string]bool)
	}
	t.failures++
	t.last, t.cause = now, err
	if pod != "" && len(t.failed) < maxTrialPods {
		t.failed[pod] = true
	}
	return t.failures
}

// heldBack is the error of a pod whose turn has not come in time.
func (t *trials) heldBack(pace time.Duration) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cause == nil {
		return errors.New("held back until now because other pods had failed")
	}
	return fmt.Errorf("held back because the last %d pods have failed; one is tried every %s until one succeeds; the last failed with: %w", t.failures, pace, t.cause)
}
