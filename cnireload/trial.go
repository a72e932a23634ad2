// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/cnireload/plugin"
)

const (
	// trialAfter is how many pods must have failed for pods to be held back: fewer
	// may be broken themselves. As many new ones are then tried at once.
	trialAfter = 10
	// trialPace is how often one of the pods that have failed is tried then.
	trialPace = time.Second
	// trialsPerSuccess is how many more are tried at each pace when one of them has
	// succeeded, until one fails; after ten all are. So all go on within seconds if
	// all is well, and no crowd is let loose if only some are.
	trialsPerSuccess = 2
	// fastFailure is how soon a plugin must fail for that to count: one that takes
	// its time does not wear the node out, and one that hangs says nothing about
	// the next pod.
	fastFailure = 10 * time.Second
	// trialMemory is how long it is remembered that a pod has failed.
	trialMemory = 5 * time.Minute
)

// trials limits how many pods are tried at once while pods of a network fail for
// a reason that no gate knows of: dozens that are retried together keep each
// other and everything else on the node from getting anywhere
// (projectcalico/calico#13884). It tells two kinds of pods apart:
//
//   - One that has failed waits for its turn, one each second, once ten pods have
//     failed.
//   - Any other goes at once, unless the last ten of its kind have all failed:
//     then no more than ten at once until a pod succeeds. An attempt counts until
//     its caller's context ends, or a failure would not count any more.
//
// A pod counts once, however often it fails, so that one bad pod changes nothing
// for others. Pods without a UID are never counted and never of the first kind.
//
// The lock is never held while something is waited for.
type trials struct {
	mu         sync.Mutex
	generation uint64               // of the lists that failed
	failed     map[string]time.Time // pods whose last attempt failed, and when
	newFailed  int                  // pods that failed for the first time, since one succeeded
	since      time.Time            // when trialAfter pods had failed
	cause      error                // of the last failure
	said       bool                 // that pods are held back
	fresh      trialQueue
	again      trialQueue // pods that have failed
}

// trialQueue is pods that wait, and attempts that others have to wait for.
type trialQueue struct {
	extra    int // attempts at once above the least
	attempts int
	waiting  []*trialTurn
}

// trialTurn is a pod's place in a queue.
type trialTurn struct {
	queue *trialQueue
	ctx   context.Context // of the attempt
	come  chan struct{}   // closed when the pod can go on
}

// Trial says that pods which have failed are tried one after the other, because
// they are many.
type Trial struct {
	Failures int       // pods whose last attempt has failed
	Since    time.Time // when these were ten
	Held     int       // pods that wait for their turn
	Cause    string    // of the last failure
}

// Trial returns nil unless pods that have failed are tried one after the other.
func (n *Network) Trial() *Trial {
	t := &n.trials
	t.renew(n.Snapshot().Generation)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.many() {
		return nil
	}
	return &Trial{Failures: len(t.failed), Since: t.since, Held: t.held(), Cause: t.cause.Error()}
}

// many tells whether so many pods have failed that some are held back. t is locked.
func (t *trials) many() bool {
	maps.DeleteFunc(t.failed, func(_ string, at time.Time) bool { return time.Since(at) >= trialMemory })
	return len(t.failed) >= trialAfter
}

// held is how many pods wait. t is locked.
func (t *trials) held() int { return len(t.fresh.waiting) + len(t.again.waiting) }

// full tells whether a pod has to wait in the queue. t is locked.
func (t *trials) full(q *trialQueue) bool {
	if q == &t.fresh {
		return t.many() && t.newFailed >= trialAfter && q.attempts >= trialAfter
	}
	return t.many() && q.attempts > q.extra && q.extra < trialAfter*trialsPerSuccess
}

// enter returns nil if the pod can go on at once, and otherwise its turn, and
// whether it is the first one to wait. The attempt ends with ctx.
func (t *trials) enter(ctx context.Context, pod string, generation uint64) (turn *trialTurn, first bool) {
	t.renew(generation)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.many() {
		return nil, false
	}
	turn = &trialTurn{queue: &t.fresh, ctx: ctx, come: make(chan struct{})}
	if _, failed := t.failed[pod]; failed {
		// However soon it ends, the next one's turn is a pace later.
		turn.queue, turn.ctx = &t.again, context.WithoutCancel(ctx)
	}
	if !t.full(turn.queue) {
		t.begin(turn)
		return nil, false
	}
	turn.queue.waiting = append(turn.queue.waiting, turn)
	first, t.said = !t.said, true
	return turn, first
}

// begin counts an attempt until it has ended or lasted long enough, and then lets
// others go on. t is locked.
func (t *trials) begin(turn *trialTurn) {
	lasts := fastFailure
	if turn.queue == &t.again {
		lasts = trialPace
	}
	turn.queue.attempts++
	ctx, cancel := context.WithTimeout(turn.ctx, lasts)
	context.AfterFunc(ctx, func() {
		cancel()
		t.mu.Lock()
		defer t.mu.Unlock()
		turn.queue.attempts--
		t.advance()
	})
}

// advance lets those go on who need not wait any more. t is locked.
func (t *trials) advance() {
	for _, q := range []*trialQueue{&t.fresh, &t.again} {
		for len(q.waiting) > 0 && !t.full(q) {
			turn := q.waiting[0]
			q.waiting = q.waiting[1:]
			t.begin(turn)
			close(turn.come)
		}
	}
}

// leave gives up a turn that has not come.
func (t *trials) leave(turn *trialTurn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	turn.queue.waiting = slices.DeleteFunc(turn.queue.waiting, func(other *trialTurn) bool { return other == turn })
}

// renew forgets the failures of earlier generations.
func (t *trials) renew(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if generation > t.generation {
		t.generation, t.newFailed = generation, 0
		clear(t.failed)
		t.advance()
	}
}

// succeeded notes that a pod has its network.
func (t *trials) succeeded(logger *log.Entry, pod string) {
	t.mu.Lock()
	t.newFailed = 0
	if _, failed := t.failed[pod]; failed {
		delete(t.failed, pod)
		t.again.extra += trialsPerSuccess
	}
	t.advance()
	over := t.said && !t.many()
	t.said = t.said && !over
	t.mu.Unlock()
	if over {
		logger.Info("cni: pods have their network again, and none is held back any more")
	}
}

// failedWith notes that a pod of that generation has none.
func (t *trials) failedWith(pod string, generation uint64, err error, took time.Duration) {
	if pod == "" || errors.Is(err, ErrClosed) || plugin.Outcome(err) != "error" || took > fastFailure {
		return
	}
	t.renew(generation)
	t.mu.Lock()
	defer t.mu.Unlock()
	if generation < t.generation {
		return
	}
	many := t.many()
	if t.failed == nil {
		t.failed = make(map[string]time.Time)
	}
	if _, failed := t.failed[pod]; !failed {
		t.newFailed++
	}
	t.failed[pod] = time.Now()
	t.cause, t.again.extra = err, 0
	if !many {
		t.since = t.failed[pod]
	}
}

// heldBack is the error of a pod whose turn has not come in time.
func (t *trials) heldBack() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.many() {
		return errors.New("held back until now because other pods had failed")
	}
	return fmt.Errorf("held back because %d pods have failed, of which one is tried every %s; the last failed with: %w", len(t.failed), trialPace, t.cause)
}
