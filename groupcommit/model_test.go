// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package groupcommit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// view is what a function sees and changes: the database, or the model of it.
type view interface {
	log(id string)
	names() map[string]bool
	set(name string, there bool)
}

type inTx struct{ tx *bolt.Tx }

var nameBucket = []byte("names")

func (v inTx) log(id string) { must(appendTo(v.tx, id)) }
func (v inTx) names() map[string]bool {
	all := map[string]bool{}
	if b := v.tx.Bucket(nameBucket); b != nil {
		must(b.ForEach(func(k, _ []byte) error { all[string(k)] = true; return nil }))
	}
	return all
}
func (v inTx) set(name string, there bool) {
	b, err := v.tx.CreateBucketIfNotExists(nameBucket)
	must(err)
	if there {
		must(b.Put([]byte(name), []byte{}))
	} else {
		must(b.Delete([]byte(name)))
	}
}

func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("no error of the test's: %v", err))
	}
}

// model is the database if all writes were made one after the other.
type model struct {
	entries []string
	taken   map[string]bool
}

func (m *model) log(id string)          { m.entries = append(m.entries, id) }
func (m *model) names() map[string]bool { return m.taken }
func (m *model) set(name string, there bool) {
	if there {
		m.taken[name] = true
	} else {
		delete(m.taken, name)
	}
}
func (m *model) clone() *model {
	return &model{slices.Clone(m.entries), maps.Clone(m.taken)}
}

// result is how a write ended for its caller.
type result string

const (
	wrote     result = "wrote"
	own       result = "its own error"
	panicked  result = "panicked"
	ended     result = "its goroutine ended"
	gave      result = "gave up"
	notStored result = "the commit failed"
)

type kindOfWrite int

const (
	plain kindOfWrite = iota
	take              // a name: fails if it is taken
	free              // a name: fails if it is not
	panicIfTaken
	fails
	panics
	exits
	collects // takes the lock, frees the name
	kinds
)

type write struct {
	id, name string
	kind     kindOfWrite
	once     bool
	ctx      context.Context
	leave    context.CancelFunc
	leaves   bool
	runs     atomic.Int32
	meets    func() // called when the function runs
	got      result
}

// do is the write's function, on the database or on the model.
func (w *write) do(v view) result {
	v.log(w.id)
	switch w.kind {
	case take:
		if v.names()[w.name] {
			return own
		}
		v.set(w.name, true)
	case free:
		if !v.names()[w.name] {
			return own
		}
		v.set(w.name, false)
	case panicIfTaken:
		if v.names()[w.name] {
			return panicked
		}
	case fails:
		return own
	case panics:
		return panicked
	case exits:
		return ended
	case collects:
		v.set(w.name, false)
	}
	return wrote
}

var errCommit = errors.New("commit failed")

// call makes the write as its caller.
func (w *write) call(q *Queue, db *bolt.DB) {
	w.got = ended
	defer func() {
		if r := recover(); r == w.id {
			w.got = panicked
		} else if r != nil {
			panic(r)
		}
	}()
	if w.kind == collects {
		q.Lock()
		defer q.Unlock()
		must(db.Update(func(tx *bolt.Tx) error { w.do(inTx{tx}); return nil }))
		w.got = wrote
		return
	}
	var opts []Option
	if w.once {
		opts = append(opts, Once)
	}
	err := q.Update(w.ctx, func(tx *bolt.Tx) error {
		w.runs.Add(1)
		w.meets()
		switch w.do(inTx{tx}) {
		case own:
			return errOwn
		case panicked:
			panic(w.id)
		case ended:
			runtime.Goexit()
		}
		return nil
	}, opts...)
	switch {
	case err == nil:
		w.got = wrote
	case errors.Is(err, errOwn):
		w.got = own
	case errors.Is(err, context.Canceled):
		w.got = gave
	case errors.Is(err, errCommit):
		w.got = notStored
	default:
		panic(err)
	}
}

// FuzzQueue makes random writes: some fail, panic, end their goroutine or leave
// at any moment, some are alone or keep others away, and some commits fail. What
// each caller gets and what is stored is what the writes bring that are made one
// after the other in the order in which they came.
func FuzzQueue(f *testing.F) {
	for seed := range uint64(30) {
		f.Add(seed, seed%4 == 3)
	}
	f.Fuzz(func(t *testing.T, seed uint64, commitsFail bool) {
		random := rand.New(rand.NewPCG(seed, 0))
		db := open(t)
		m := &model{taken: map[string]bool{}}
		n := 0
		var commits *rand.Rand
		if commitsFail {
			commits = rand.New(rand.NewPCG(seed, 1))
		}
		q := New(updater(func(fn func(*bolt.Tx) error) error {
			// One transaction at a time: commits needs no lock.
			return db.Update(func(tx *bolt.Tx) error {
				if err := fn(tx); err != nil {
					return err
				}
				if commits != nil && commits.IntN(4) == 0 {
					return errCommit
				}
				return nil
			})
		}))
		for range 6 {
			list := make([]*write, 1+random.IntN(14))
			for i := range list {
				n++
				w := &write{id: fmt.Sprint(n), name: fmt.Sprint("name", random.IntN(3)), meets: func() {}}
				w.ctx, w.leave = context.WithCancel(t.Context())
				defer w.leave()
				// Most write something.
				w.kind = kindOfWrite(random.IntN(int(2 * kinds)))
				if w.kind >= kinds {
					w.kind = kindOfWrite(random.IntN(int(fails)))
				}
				w.once = random.IntN(8) == 0
				list[i] = w
			}
			// Who leaves: while all wait, when the function of another or its own
			// runs, or at any moment.
			var atOnce, anyTime []*write
			for range random.IntN(4) {
				w := list[random.IntN(len(list))]
				w.leaves = true
				switch random.IntN(3) {
				case 0:
					atOnce = append(atOnce, w)
				case 1:
					list[random.IntN(len(list))].meets = w.leave
				default:
					anyTime = append(anyTime, w)
				}
			}

			var group sync.WaitGroup
			ordered := random.IntN(4) > 0
			if ordered {
				q.Lock()
			}
			for i, w := range list {
				group.Add(1)
				go func() {
					defer group.Done()
					w.call(q, db.DB)
				}()
				if ordered {
					await(t, q, i+1)
				}
			}
			for _, w := range atOnce {
				w.leave()
			}
			if ordered {
				q.Unlock()
			}
			for _, w := range anyTime {
				time.Sleep(time.Duration(random.IntN(200)) * time.Microsecond)
				w.leave()
			}
			group.Wait()

			var acked []string
			for _, w := range list {
				runs := w.runs.Load()
				switch {
				case w.once && runs > 1:
					t.Errorf("%s ran %d times", w.id, runs)
				case w.got == gave && !w.leaves || w.got == notStored && !commitsFail:
					t.Errorf("%s: %s", w.id, w.got)
				}
				if w.got == wrote {
					acked = append(acked, w.id)
				}
				if !ordered || w.got == gave || w.got == notStored {
					continue
				}
				next := m.clone()
				if want := w.do(next); w.got != want {
					t.Errorf("seed %d: %s of kind %d: %s, want %s", seed, w.id, w.kind, w.got, want)
				}
				if w.got == wrote {
					m = next
				}
			}
			got := &model{taken: map[string]bool{}}
			must(db.View(func(tx *bolt.Tx) error {
				got.entries, got.taken = entries(tx), inTx{tx}.names()
				return nil
			}))
			if !ordered {
				// The order is not known. What was acknowledged is there, once.
				fresh := slices.Sorted(slices.Values(got.entries[len(m.entries):]))
				slices.Sort(acked)
				if !slices.Equal(fresh, acked) {
					t.Errorf("seed %d: stored %v, acknowledged %v", seed, fresh, acked)
				}
				m = got
				continue
			}
			if !slices.Equal(got.entries, m.entries) || !maps.Equal(got.taken, m.taken) {
				t.Fatalf("seed %d: stored %v, want %v", seed, got, m)
			}
		}
	})
}

type updater func(func(*bolt.Tx) error) error

func (u updater) Update(fn func(*bolt.Tx) error) error { return u(fn) }
