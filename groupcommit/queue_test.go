// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package groupcommit

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if child() {
		return
	}
	goleak.VerifyTestMain(m)
}

// counted is a database that tells how many transactions were begun and how
// many committed.
type counted struct {
	*bolt.DB
	mu               sync.Mutex
	began, committed int
	fail             error // what commits fail with
}

func (c *counted) Update(fn func(*bolt.Tx) error) error {
	c.mu.Lock()
	c.began++
	fail := c.fail
	c.mu.Unlock()
	err := c.DB.Update(func(tx *bolt.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return fail
	})
	if err == nil {
		c.mu.Lock()
		c.committed++
		c.mu.Unlock()
	}
	return err
}

func (c *counted) failWith(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = err
}

func (c *counted) counts() (began, committed int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.began, c.committed
}

func open(t testing.TB) *counted {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "test.db"), 0o600, &bolt.Options{NoSync: true, NoFreelistSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return &counted{DB: db}
}

var bucket = []byte("log")

// appendTo adds a value to the log in the database.
func appendTo(tx *bolt.Tx, value string) error {
	b, err := tx.CreateBucketIfNotExists(bucket)
	if err != nil {
		return err
	}
	n, err := b.NextSequence()
	if err != nil {
		return err
	}
	return b.Put(fmt.Appendf(nil, "%08d", n), []byte(value))
}

func entries(tx *bolt.Tx) (list []string) {
	if b := tx.Bucket(bucket); b != nil {
		_ = b.ForEach(func(_, v []byte) error {
			list = append(list, string(v))
			return nil
		})
	}
	return list
}

func stored(t testing.TB, db *counted) (list []string) {
	t.Helper()
	if err := db.View(func(tx *bolt.Tx) error {
		list = entries(tx)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

// await polls until so many wait in the queue.
func await(t testing.TB, q *Queue, n int) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		q.mu.Lock()
		got := len(q.waiting)
		q.mu.Unlock()
		if got == n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d wait, want %d", got, n)
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// row enqueues functions one after the other while the queue is locked.
type row struct {
	t    testing.TB
	q    *Queue
	n    int
	errs []*error
	wg   sync.WaitGroup
}

func newRow(t testing.TB, q *Queue) *row {
	q.Lock()
	return &row{t: t, q: q}
}

func (r *row) add(ctx context.Context, fn func(*bolt.Tx) error, opts ...Option) {
	err := errors.New("its goroutine ended")
	r.errs = append(r.errs, &err)
	r.wg.Go(func() { err = r.q.Update(ctx, fn, opts...) })
	r.n++
	await(r.t, r.q, r.n)
}

// run unlocks the queue and returns what each got.
func (r *row) run() (errs []error) {
	r.q.Unlock()
	r.wg.Wait()
	for _, err := range r.errs {
		errs = append(errs, *err)
	}
	return errs
}

func put(value string) func(*bolt.Tx) error {
	return func(tx *bolt.Tx) error { return appendTo(tx, value) }
}

func want(t *testing.T, what string, got, want any) {
	t.Helper()
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		t.Errorf("%s: got %s, want %s", what, g, w)
	}
}

func TestWhoWaitsSharesATransaction(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	var all []string
	for i := range 20 {
		all = append(all, fmt.Sprint(i))
		r.add(t.Context(), put(all[i]))
	}
	want(t, "errors", errors.Join(r.run()...), error(nil))
	want(t, "log", stored(t, db), all)
	_, committed := db.counts()
	want(t, "transactions", committed, 1)
}

// Who comes while a transaction runs is not part of it, and does not wait for
// anybody once it has ended.
func TestWhoComesLaterJoinsTheNext(t *testing.T) {
	db := open(t)
	q := New(db)
	var wg sync.WaitGroup
	began, end := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		if err := q.Update(t.Context(), func(tx *bolt.Tx) error {
			close(began)
			<-end
			return appendTo(tx, "first")
		}); err != nil {
			t.Error(err)
		}
	})
	<-began
	for i := range 3 {
		wg.Go(func() {
			if err := q.Update(t.Context(), put("next")); err != nil {
				t.Error(err)
			}
		})
		await(t, q, i+1)
	}
	close(end)
	wg.Wait()
	want(t, "log", stored(t, db), []string{"first", "next", "next", "next"})
	_, committed := db.counts()
	want(t, "transactions", committed, 2)
}

func TestBatchIsBounded(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	for range 2*maxBatch + 1 {
		r.add(t.Context(), put("x"))
	}
	want(t, "errors", errors.Join(r.run()...), error(nil))
	_, committed := db.counts()
	want(t, "transactions", committed, 3)
}

var errOwn = errors.New("its own error")

func TestFailureIsItsOwn(t *testing.T) {
	for _, at := range []int{0, 1, 4} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			db := open(t)
			q := New(db)
			r := newRow(t, q)
			var all []string
			for i := range 5 {
				r.add(t.Context(), func(tx *bolt.Tx) error {
					if err := appendTo(tx, fmt.Sprint(i)); err != nil {
						return err
					}
					if i == at {
						return errOwn
					}
					return nil
				})
				if i != at {
					all = append(all, fmt.Sprint(i))
				}
			}
			for i, err := range r.run() {
				if want := i == at; errors.Is(err, errOwn) != want || (err != nil) != want {
					t.Errorf("%d: got %v", i, err)
				}
			}
			want(t, "log", stored(t, db), all)
		})
	}
}

// An error that comes from what another has written is not returned before that
// is on disk, and not at all if it never is.
func TestErrorComesFromWhatIsOnDisk(t *testing.T) {
	db := open(t)
	q := New(db)
	ctx, leave := context.WithCancel(t.Context())
	r := newRow(t, q)
	runs := 0
	r.add(ctx, func(tx *bolt.Tx) error {
		if runs++; runs == 1 {
			defer leave() // gone by the time it would run again
		}
		return appendTo(tx, "name")
	})
	reserve := func(tx *bolt.Tx) error {
		if slices.Contains(entries(tx), "name") {
			return errOwn
		}
		return appendTo(tx, "name")
	}
	r.add(t.Context(), reserve)
	r.add(t.Context(), reserve)
	errs := r.run()
	if !errors.Is(errs[0], context.Canceled) || errs[1] != nil || !errors.Is(errs[2], errOwn) {
		t.Error(errs)
	}
	want(t, "log", stored(t, db), []string{"name"})
}

func TestPanicIsItsOwn(t *testing.T) {
	for _, at := range []int{0, 2} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			db := open(t)
			q := New(db)
			var value any
			var stack string
			r := newRow(t, q)
			var group sync.WaitGroup
			for i := range 4 {
				if i != at {
					r.add(t.Context(), put("x"))
					continue
				}
				group.Go(func() {
					defer func() { value, stack = recover(), string(debug.Stack()) }()
					_ = q.Update(t.Context(), explode)
				})
				r.n++
				await(t, q, r.n)
			}
			want(t, "errors of others", errors.Join(r.run()...), error(nil))
			group.Wait()
			want(t, "panic", value, "bang")
			if !strings.Contains(stack, "groupcommit.explode(") {
				t.Errorf("the stack does not show the function:\n%s", stack)
			}
			want(t, "log", stored(t, db), []string{"x", "x", "x"})
		})
	}
}

func explode(tx *bolt.Tx) error {
	_ = appendTo(tx, "never")
	panic("bang")
}

// A function that ends its goroutine, as t.FailNow does, ends nobody else's.
func TestExitIsItsOwn(t *testing.T) {
	for _, at := range []int{0, 2} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			db := open(t)
			q := New(db)
			r := newRow(t, q)
			for i := range 4 {
				r.add(t.Context(), func(tx *bolt.Tx) error {
					if err := appendTo(tx, fmt.Sprint(i)); err != nil {
						return err
					}
					if i == at {
						runtime.Goexit()
					}
					return nil
				})
			}
			for i, err := range r.run() {
				if (err != nil) != (i == at) {
					t.Errorf("%d: %v", i, err)
				}
			}
			want(t, "entries", len(stored(t, db)), 3)
		})
	}
}

func TestWhoLeavesWritesNothing(t *testing.T) {
	db := open(t)
	q := New(db)
	ctx, leave := context.WithCancel(t.Context())
	gone, leaveWhenRun := context.WithCancel(t.Context())
	r := newRow(t, q)
	r.add(ctx, put("left while it waits"))
	r.add(gone, func(*bolt.Tx) error { leaveWhenRun(); return nil })
	leave()
	await(t, q, 1)
	r.n = 1
	r.add(t.Context(), func(tx *bolt.Tx) error { return appendTo(tx, "stays") })
	// Its context ends while the one before it runs.
	r.add(gone, put("left when called"))
	errs := r.run()
	for i, wantErr := range []bool{true, false, false, true} {
		if errors.Is(errs[i], context.Canceled) != wantErr || (errs[i] != nil) != wantErr {
			t.Errorf("%d: %v", i, errs[i])
		}
	}
	if err := q.Update(ctx, put("late")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	want(t, "log", stored(t, db), []string{"stays"})
}

func TestOnceIsAlone(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	runs := 0
	r.add(t.Context(), put("a"))
	r.add(t.Context(), func(tx *bolt.Tx) error { runs++; return appendTo(tx, "alone") }, Once)
	r.add(t.Context(), put("b"))
	r.add(t.Context(), func(*bolt.Tx) error { return errOwn })
	r.add(t.Context(), func(*bolt.Tx) error { runs++; return errOwn }, Once)
	errs := r.run()
	want(t, "errors", errs, []error{nil, nil, nil, errOwn, errOwn})
	want(t, "runs", runs, 2)
	want(t, "log", stored(t, db), []string{"a", "alone", "b"})
	_, committed := db.counts()
	want(t, "transactions", committed, 3)
}

func TestFailedCommitIsEverybodys(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	for range 3 {
		r.add(t.Context(), put("x"))
	}
	db.failWith(errOwn)
	want(t, "errors", r.run(), []error{errOwn, errOwn, errOwn})
	db.failWith(nil)
	want(t, "log", stored(t, db), []string(nil))
	if err := q.Update(t.Context(), put("y")); err != nil {
		t.Error(err)
	}
}

// A panic in the commit is the leader's; the others are not left waiting.
func TestPanicInCommit(t *testing.T) {
	db := open(t)
	q := New(db)
	var value any
	r := newRow(t, q)
	var group sync.WaitGroup
	group.Go(func() {
		defer func() { value = recover() }()
		_ = q.Update(t.Context(), func(tx *bolt.Tx) error {
			tx.OnCommit(func() { panic("bang") })
			return nil
		})
	})
	r.n++
	await(t, q, 1)
	r.add(t.Context(), put("x"))
	errs := r.run()
	group.Wait()
	want(t, "panic", value, "bang")
	if errs[0] == nil {
		t.Error("want an error where it is not known what has become of the write")
	}
	if err := q.Update(t.Context(), put("y")); err != nil {
		t.Error(err)
	}
}

// Lock waits for its turn like a writer: neither it nor writers starve.
func TestLockKeepsOrder(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	r.add(t.Context(), put("before"))
	var seen []string
	var group sync.WaitGroup
	group.Go(func() {
		q.Lock()
		defer q.Unlock()
		seen = stored(t, db)
		time.Sleep(time.Millisecond)
		want(t, "log while locked", stored(t, db), seen)
	})
	r.n++
	await(t, q, r.n)
	r.add(t.Context(), put("after"))
	want(t, "errors", errors.Join(r.run()...), error(nil))
	group.Wait()
	want(t, "log seen by the lock", seen, []string{"before"})
}

func TestUnlockOfUnlocked(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("want a panic")
		}
	}()
	New(open(t)).Unlock()
}

// A caller returns when its own write is on disk: the next transaction is made
// by somebody who is part of it.
func TestLeaderHandsOver(t *testing.T) {
	db := open(t)
	q := New(db)
	began, returned := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		defer close(returned)
		if err := q.Update(t.Context(), func(*bolt.Tx) error {
			close(began)
			await(t, q, 1)
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	<-began
	if err := q.Update(t.Context(), func(*bolt.Tx) error {
		select {
		case <-returned:
			return nil
		case <-time.After(30 * time.Second):
			return errors.New("the caller before still waits")
		}
	}); err != nil {
		t.Error(err)
	}
	group.Wait()
}

// Who was part of a transaction that was rolled back can leave again.
func TestLeavesAfterRollback(t *testing.T) {
	db := open(t)
	q := New(db)
	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan struct{})
	r := newRow(t, q)
	runs := 0
	r.add(t.Context(), func(tx *bolt.Tx) error {
		if runs++; runs > 1 {
			leave()
			select {
			case <-gone:
			case <-time.After(30 * time.Second):
				return errors.New("a caller whose context has ended still waits")
			}
		}
		return appendTo(tx, "stays")
	})
	var left error
	go func() {
		defer close(gone)
		left = q.Update(ctx, put("left"))
	}()
	r.n++
	await(t, q, r.n)
	r.add(t.Context(), func(*bolt.Tx) error { return errOwn })
	errs := r.run()
	<-gone
	if errs[0] != nil || !errors.Is(left, context.Canceled) || !errors.Is(errs[1], errOwn) {
		t.Error(errs, left)
	}
	want(t, "log", stored(t, db), []string{"stays"})
}

// over is a context that has ended and tells nobody, as one that ends between
// the moment when its owner is called and that when its function begins.
type over struct{ context.Context }

func (over) Done() <-chan struct{} { return nil }
func (over) Err() error            { return context.Canceled }

func TestContextEndsBeforeFunctionBegins(t *testing.T) {
	db := open(t)
	q := New(db)
	r := newRow(t, q)
	r.add(t.Context(), put("stays"))
	r.add(over{t.Context()}, put("left"))
	errs := r.run()
	if errs[0] != nil || !errors.Is(errs[1], context.Canceled) {
		t.Error(errs)
	}
	want(t, "log", stored(t, db), []string{"stays"})
}

// BenchmarkIdle compares a write beside no other with one of bolt's own, on a
// database that syncs and on one that does not, which shows the queue's own cost.
func BenchmarkIdle(b *testing.B) {
	for _, sync := range []bool{true, false} {
		db, err := bolt.Open(filepath.Join(b.TempDir(), "b.db"), 0o600, &bolt.Options{NoSync: !sync, NoFreelistSync: true})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { db.Close() })
		q := New(db)
		write := func(tx *bolt.Tx) error {
			bkt, err := tx.CreateBucketIfNotExists(bucket)
			if err != nil {
				return err
			}
			return bkt.Put([]byte("k"), []byte("v"))
		}
		name := map[bool]string{true: "sync", false: "nosync"}[sync]
		b.Run(name, func(b *testing.B) {
			// In turns, so that a disk that gets slower favours nobody.
			var took [2]time.Duration
			for b.Loop() {
				for i, update := range []func(func(*bolt.Tx) error) error{db.Update, func(fn func(*bolt.Tx) error) error { return q.Update(b.Context(), fn) }} {
					begin := time.Now()
					if err := update(write); err != nil {
						b.Fatal(err)
					}
					took[i] += time.Since(begin)
				}
			}
			b.ReportMetric(float64(took[1])/float64(took[0]), "ratio")
			b.ReportMetric(float64(took[0])/float64(b.N), "ns/bolt")
			b.ReportMetric(float64(took[1])/float64(b.N), "ns/queue")
		})
	}
}

// BenchmarkTogether is the cost of a write of many at once.
func BenchmarkTogether(b *testing.B) {
	for _, writers := range []int{1, 8, 60} {
		b.Run(fmt.Sprint(writers), func(b *testing.B) {
			db := open(b)
			db.NoSync = false // without, nobody would wait for long
			q := New(db)
			b.SetParallelism((writers + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := q.Update(context.Background(), func(tx *bolt.Tx) error {
						bkt, err := tx.CreateBucketIfNotExists(bucket)
						if err != nil {
							return err
						}
						return bkt.Put([]byte("k"), []byte("v"))
					}); err != nil {
						b.Error(err)
					}
				}
			})
			_, committed := db.counts()
			b.ReportMetric(float64(b.N)/float64(committed), "writes/tx")
		})
	}
}
