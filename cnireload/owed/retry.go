// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package owed

import (
	"context"
	"slices"
	"time"

	"github.com/containerd/log"
)

const (
	// MaxRetries is how many removals are tried beside each other, so that one
	// that hangs does not hold up the others.
	MaxRetries = 4
	// firstPause and lastPause are the pauses before a removal is tried again.
	// Each is twice the one before.
	firstPause = 10 * time.Second
	lastPause  = 10 * time.Minute
)

// Work is how removals are done. Busy, Missing and Expired are called by the
// goroutine that calls Retry, Remove by others.
type Work struct {
	// Busy tells whether the pod cannot be removed yet.
	Busy func(id string) bool
	// Missing returns what DEL needs that is not there. The removal waits for it,
	// and is tried at once when Missing returns nil again.
	Missing func(*Removal) error
	// Remove does the removal and calls Done, or tells why it could not be done.
	Remove func(context.Context, *Removal) error
	// Expired is told of a removal that is given up because of its age.
	Expired func(*Removal)
	// Pause follows a failed try for a pod whose ADD has failed. Of these one is
	// tried at a time.
	Pause time.Duration
}

// Wake has a token when Retry should be called before its time: a removal was
// added, or a retry has ended, which makes room for the next one.
func (s *Store) Wake() <-chan struct{} { return s.wake }

func (s *Store) lookAgain() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Wait returns when the retries that are under way have ended. Retry must not be
// called any more.
func (s *Store) Wait() { s.retries.Wait() }

// Retry begins to try the removals whose time has come, oldest first, and does
// not wait for them. It gives up those that are too old. It tells whether any are
// owed, so that it has to be called again. When ctx ends, so do the retries.
func (s *Store) Retry(ctx context.Context, w Work) bool {
	s.mu.Lock()
	var all []*removal
	for _, r := range s.removals {
		if !r.trying {
			all = append(all, r)
		}
	}
	owes := len(s.removals) > 0
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b *removal) int { return a.Since.Compare(b.Since) })
	for _, r := range all {
		switch {
		case ctx.Err() != nil:
			return owes
		case w.Busy(r.ID):
		case time.Since(r.Since) > MaxAge:
			log.G(ctx).Warnf("cni: the removal of pod %s, owed since %s, is given up; what its plugins hold for it may have to be freed by hand: %s",
				r.ID, r.Since.UTC().Format(time.RFC3339), r.cause)
			w.Expired(r.Removal)
			s.Done(r.ID)
		case s.begin(r, w.Missing(r.Removal)):
			s.retries.Go(func() {
				err := w.Remove(ctx, r.Removal)
				s.end(ctx, r, err, w.Pause)
			})
		}
	}
	return owes
}

// begin tells whether a removal is to be tried now. If so, end has to be called.
func (s *Store) begin(r *removal, missing error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if missing != nil {
		r.waiting, r.cause = true, missing.Error()
		return false
	}
	if r.waiting {
		r.waiting, r.next = false, time.Time{}
	}
	if time.Now().Before(r.next) || s.retrying >= MaxRetries {
		return false
	}
	if !r.Released {
		if s.trying || time.Now().Before(s.next) {
			return false
		}
		s.trying = true
	}
	s.retrying++
	r.trying = true
	return true
}

func (s *Store) end(ctx context.Context, r *removal, err error, pause time.Duration) {
	if err != nil && ctx.Err() == nil {
		log.G(ctx).WithError(err).Debugf("cni: the removal of pod %s is still owed", r.ID)
	}
	s.mu.Lock()
	s.retrying--
	r.trying = false
	if !r.Released {
		s.trying = false
		if err != nil {
			s.next = time.Now().Add(pause)
		}
	}
	if err != nil {
		r.next = time.Now().Add(min(firstPause<<min(r.attempts, 6), lastPause))
		r.attempts++
		r.cause = err.Error()
	}
	s.mu.Unlock()
	s.lookAgain()
}

// RetryNow has a removal tried without the pause that is left.
func (s *Store) RetryNow(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.removals[id]; r != nil {
		r.next = time.Time{}
	}
}
