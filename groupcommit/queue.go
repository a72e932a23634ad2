// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package groupcommit has those who write to a bolt database at the same
// moment share a transaction, and with it the two syncs that each costs.
//
// It never waits to gather others: who comes while nobody writes goes at once,
// and who comes while a transaction runs joins the next one. Writes are made in
// the order in which they came, each by its caller's own goroutine, and a
// caller returns when its own write is on disk. The result is the one of the
// writes made one after the other, each in a transaction of its own:
//
//   - A function that fails in a transaction with others has that rolled back.
//     Those before it are committed first, then it runs as the first of a
//     transaction. Only that run counts, so no caller gets an error, a panic or
//     a result that comes from a write which is not on disk.
//   - If a commit fails, all whose functions were part of it get its error.
//
// bolt's own Batch waits for others to come, cannot be left, and changes the
// order after a failure.
package groupcommit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	bolt "go.etcd.io/bbolt"
)

// maxBatch is how many writes at most share a transaction. It bounds what one
// caller waits for the functions of others, and the memory of a transaction.
const maxBatch = 128

// Updater runs a function in a write transaction, as bolt.DB does.
type Updater interface {
	Update(fn func(*bolt.Tx) error) error
}

// Queue is where writers of one database, and those who keep them away, wait
// for their turn. Its methods may be called from any goroutine, but not by the
// functions that it runs.
type Queue struct {
	db Updater

	mu      sync.Mutex
	busy    bool     // somebody writes or has the lock
	arrived uint64   // how many have ever waited
	waiting []*entry // in order of arrival; empty unless busy
}

// entry is one caller of Update or Lock.
type entry struct {
	fn      func(*bolt.Tx) error
	alone   bool // shares its turn with nobody
	arrival uint64
	wake    chan message // holds two, which is as many as can be unread
}

// message is what a caller that waits is told.
type message struct {
	kind  kind
	tx    *bolt.Tx     // of run
	reply chan outcome // of run
	err   error        // of done
}

type kind int

const (
	lead  kind = iota // it is your turn
	run               // run your function now, as part of my transaction
	again             // that transaction was rolled back: you wait as before
	done              // it has ended
)

// outcome is how a function ended that was part of another's transaction.
type outcome int

const (
	exited outcome = iota // its goroutine has ended
	left                  // did not run: its caller had gone
	failed
	ran
)

// Option changes how Update runs a function.
type Option int

// Once is for a function that does more than to read and write the transaction,
// and must not run twice. It gets a transaction of its own.
const Once Option = 1

// New returns the queue of a database. All who write to it should go through
// the one queue; those who do not are waited for in bolt.
func New(db Updater) *Queue { return &Queue{db: db} }

// Update runs fn in a write transaction, which it may share with others, and
// returns when that is on disk. If ctx ends before fn has begun, Update returns
// an error that wraps the context's and nothing is written; what has begun is
// not interrupted. Otherwise the error is fn's or that of the commit.
//
// Without Once, fn may run several times, of which all but the last are rolled
// back: it must not change anything but the transaction, and variables that it
// sets on every run. It must not use its transaction after it has returned.
// When it panics, or ends its goroutine, its write is not made, and nobody else
// notices.
func (q *Queue) Update(ctx context.Context, fn func(*bolt.Tx) error, opts ...Option) error {
	w := &entry{fn: fn, alone: slices.Contains(opts, Once)}
	if !q.enter(w) {
		if leads, err := q.wait(ctx, w); !leads {
			return err
		}
	}
	defer q.next()
	for others := maxBatch - 1; ; {
		if ctx.Err() != nil {
			return gaveUp(ctx)
		}
		n, err := q.transact(w, others)
		if n < 0 {
			return err
		}
		// Those before the one that failed, and then it is its own turn.
		others = n
	}
}

// Lock waits for its turn and then keeps all writers away until Unlock.
func (q *Queue) Lock() {
	w := &entry{alone: true}
	if !q.enter(w) {
		<-w.wake
	}
}

// Unlock undoes Lock.
func (q *Queue) Unlock() { q.next() }

func gaveUp(ctx context.Context) error {
	return fmt.Errorf("gave up waiting for the turn to write: %w", ctx.Err())
}

// enter tells whether it is w's turn at once. If not, w waits.
func (q *Queue) enter(w *entry) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.busy {
		q.busy = true
		return true
	}
	q.arrived++
	w.arrival = q.arrived
	w.wake = make(chan message, 2)
	q.waiting = append(q.waiting, w)
	return false
}

// next gives the turn to who has waited longest.
func (q *Queue) next() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.busy {
		panic("groupcommit: Unlock of a queue that is not locked")
	}
	if len(q.waiting) == 0 {
		q.busy = false
		return
	}
	q.pop().wake <- message{kind: lead}
}

// pop takes the first out of the queue. q.mu must be held.
func (q *Queue) pop() *entry {
	w := q.waiting[0]
	q.waiting[0] = nil
	q.waiting = q.waiting[1:]
	return w
}

// wait returns when it is w's turn, or when that is no longer needed.
func (q *Queue) wait(ctx context.Context, w *entry) (leads bool, err error) {
	gone := ctx.Done()
	for {
		select {
		case m := <-w.wake:
			switch m.kind {
			case lead:
				return true, nil
			case run:
				if ctx.Err() != nil {
					m.reply <- left
					return false, gaveUp(ctx)
				}
				w.run(m)
			case again:
				gone = ctx.Done()
			case done:
				return false, m.err
			}
		case <-gone:
			if q.leave(w) {
				return false, gaveUp(ctx)
			}
			// It was just called, or is part of a transaction. A message comes.
			gone = nil
		}
	}
}

// leave takes w out of the queue, if it is still there.
func (q *Queue) leave(w *entry) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.Index(q.waiting, w)
	if i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
	}
	return i >= 0
}

// run runs w's function as part of another's transaction, on w's goroutine. A
// panic is not passed on from here: if it was not caused by what others have
// written, it comes again when the function runs as the first of a transaction.
func (w *entry) run(m message) {
	o := exited
	defer func() {
		if o == exited && recover() != nil {
			o = failed
		}
		m.reply <- o
	}()
	if w.fn(m.tx) != nil {
		o = failed
	} else {
		o = ran
	}
}

// call takes the first out of the queue if it may be part of a transaction that
// began when the given number had arrived.
func (q *Queue) call(arrived uint64) *entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 || q.waiting[0].alone || q.waiting[0].arrival > arrived {
		return nil
	}
	return q.pop()
}

// errOther ends a transaction in which the function of another than the leader
// has failed.
var errOther = errors.New("a function that shares the transaction failed")

// transact runs in one transaction w's function and those of up to so many who
// wait. When one of these fails, all are back where they were, and before is
// how many ran before it. Otherwise before is negative, and w is done.
func (q *Queue) transact(w *entry, others int) (before int, err error) {
	var (
		members []*entry
		reply   chan outcome
	)
	// Members wait for what becomes of the transaction. It may end in a panic
	// of bolt's, too.
	before, err = -1, errors.New("the commit panicked: it is not known whether this write is on disk")
	defer func() { q.settle(members, before >= 0, err) }()

	err = q.db.Update(func(tx *bolt.Tx) error {
		q.mu.Lock()
		arrived := q.arrived
		q.mu.Unlock()
		if err := w.fn(tx); err != nil || w.alone {
			return err
		}
		for len(members) < others {
			m := q.call(arrived)
			if m == nil {
				break
			}
			if reply == nil {
				reply = make(chan outcome)
			}
			m.wake <- message{kind: run, tx: tx, reply: reply}
			o := <-reply
			if o == failed || o == exited {
				before = len(members)
			}
			if o == ran || o == failed {
				members = append(members, m)
			}
			if before >= 0 {
				return errOther
			}
		}
		return nil
	})
	return before, err
}

// settle tells the members of a transaction what has become of it.
func (q *Queue) settle(members []*entry, rolledBack bool, err error) {
	m := message{kind: done, err: err}
	if rolledBack {
		m = message{kind: again}
		q.mu.Lock()
		q.waiting = slices.Concat(members, q.waiting) // a copy: who leaves moves the others in it
		q.mu.Unlock()
	}
	for _, w := range members {
		w.wake <- m
	}
}
