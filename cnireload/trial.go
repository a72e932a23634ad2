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
	// tried one after the other, and how many must succeed to end that.
	trialAfter = 10
	// trialsPerSuccess is how many waiters go on when a pod has succeeded. If all
	// is well that doubles their number each time; if only some pods are, it
	// lets no crowd of others loose.
	trialsPerSuccess = 2
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
// One is tried at each beat, and each that succeeds lets two more go on. Pods
// that have not failed before have a queue of their own: they are not to wait for
// those that have, and that they succeed says nothing about those.
//
// Its lock is never held while something is waited for.
type trials struct {
	mu         sync.Mutex
	generation uint64 // that has failed
	failures   int    // in a row, and once pods are held back, all since
	successes  int    // in a row, of pods that had failed
	since      time.Time
	last       time.Time // failure
	cause      error
	failed     map[string]bool // pods
	fresh      trialQueue      // pods that have not failed before
	again      trialQueue
	said       bool // that pods are held back
}

// trialQueue is pods whose turn has not come, each with what is closed when it
// has. It belongs to trials.
type trialQueue struct {
	waiters []chan struct{}
	next    time.Time   // when the next one may be tried
	timer   *time.Timer // runs while there are waiters
}

// Trial says that pods are tried one after the other, because all have failed.
type Trial struct {
	Failures int       // since the first of ten in a row
	Since    time.Time // when that was
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
	return &Trial{Failures: t.failures, Since: t.since, Held: t.held(), Cause: t.cause.Error()}
}

// active tells whether pods are held back. t is locked.
func (t *trials) active(now time.Time, generation uint64) bool {
	return t.failures >= trialAfter && t.generation == generation && now.Sub(t.last) < trialMemory
}

// queue is the one that the pod belongs to. t is locked.
func (t *trials) queue(pod string) *trialQueue {
	if t.failed[pod] {
		return &t.again
	}
	return &t.fresh
}

// held is how many pods wait. t is locked.
func (t *trials) held() int { return len(t.fresh.waiters) + len(t.again.waiters) }

// enter returns nil if the pod can go on at once, and otherwise what is closed
// when it can.
func (t *trials) enter(logger *log.Entry, pod string, generation uint64, pace time.Duration) chan struct{} {
	turn, cause := t.place(pod, generation, pace)
	if cause != nil {
		logger.Warnf("cni: at least %d pods in a row have failed; one is tried every %s until they succeed: %s", trialAfter, pace, oneline.Of(cause.Error()))
	}
	return turn
}

// place also returns the last failure if nobody was held back before.
func (t *trials) place(pod string, generation uint64, pace time.Duration) (turn chan struct{}, cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if !t.active(now, generation) {
		return nil, nil
	}
	q := t.queue(pod)
	if len(q.waiters) == 0 && !now.Before(q.next) {
		q.next = now.Add(pace)
		return nil, nil
	}
	turn = make(chan struct{})
	q.waiters = append(q.waiters, turn)
	if len(q.waiters) == 1 {
		q.timer = time.AfterFunc(q.next.Sub(now), func() { t.beat(q, pace) })
	}
	if t.said {
		return turn, nil
	}
	t.said = true
	return turn, t.cause
}

// beat lets the first waiter go on.
func (t *trials) beat(q *trialQueue, pace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if len(q.waiters) == 0 || now.Before(q.next) {
		return // of a timer that was stopped too late
	}
	q.release(1)
	q.next = now.Add(pace)
	if len(q.waiters) > 0 {
		q.timer.Reset(pace)
	}
}

// release lets the first waiters go on.
func (q *trialQueue) release(count int) {
	count = min(count, len(q.waiters))
	for _, turn := range q.waiters[:count] {
		close(turn)
	}
	q.waiters = q.waiters[count:]
	q.rest()
}

// rest stops the timer if nobody waits.
func (q *trialQueue) rest() {
	if len(q.waiters) == 0 && q.timer != nil {
		q.timer.Stop()
	}
}

// leave gives up a place.
func (t *trials) leave(turn chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range []*trialQueue{&t.fresh, &t.again} {
		if i := slices.Index(q.waiters, turn); i >= 0 {
			q.waiters = slices.Delete(q.waiters, i, i+1)
			q.rest()
		}
	}
}

// reset forgets all failures and lets everybody go on. t is locked.
func (t *trials) reset() {
	t.fresh.release(len(t.fresh.waiters))
	t.again.release(len(t.again.waiters))
	t.failures, t.successes, t.failed, t.cause, t.said = 0, 0, nil, nil, false
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
func (t *trials) succeeded(logger *log.Entry, pod string) {
	if said, failures := t.success(pod); said {
		logger.Infof("cni: pods have their network again after %d have failed", failures)
	}
}

// success tells whether to say that nobody is held back any more.
func (t *trials) success(pod string) (said bool, failures int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	said, failures = t.said, t.failures
	if failures >= trialAfter {
		q := t.queue(pod)
		if q == &t.again {
			t.successes++
		}
		if q == &t.fresh || t.held() > 0 && t.successes < trialAfter {
			q.release(trialsPerSuccess)
			return false, 0
		}
	}
	t.reset()
	return said, failures
}

// failedWith notes that a pod of that generation has none.
func (t *trials) failedWith(pod string, generation uint64, err error, took time.Duration) {
	if outcomeOf(err) != "error" || took > fastFailure {
		return
	}
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
	t.successes = 0
	t.last, t.cause = now, err
	if pod != "" && len(t.failed) < maxTrialPods {
		t.failed[pod] = true
	}
}

// heldBack is the error of a pod whose turn has not come in time.
func (t *trials) heldBack(pace time.Duration) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cause == nil {
		return errors.New("held back until now because other pods had failed")
	}
	return fmt.Errorf("held back because %d pods have failed; one is tried every %s; the last failed with: %w", t.failures, pace, t.cause)
}
