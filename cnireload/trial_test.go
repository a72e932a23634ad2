// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// trialNode is a network whose plugin does what is said here.
type trialNode struct {
	*node
	n     *Network
	lines *logLines

	mu    sync.Mutex
	add   error // that ADD returns, after some time
	takes time.Duration
	done  []string // pods that were admitted, and when
}

// says sets what ADD returns, and after what time.
func (d *trialNode) says(err error, takes time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.add, d.takes = err, takes
}

func (d *trialNode) behaviour() (takes time.Duration, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takes, d.add
}

// pod runs a pod of that name as CRI does it, and returns what became of it.
func (d *trialNode) pod(ctx context.Context, name string) error {
	begin := time.Now()
	if err := d.n.Admit(ctx, name); err != nil {
		return err
	}
	d.mu.Lock()
	d.done = append(d.done, fmt.Sprintf("%s %s", name, time.Since(begin)))
	d.mu.Unlock()
	_, err := d.n.Setup(ctx, "sandbox-"+name, "/proc/self/ns/net", WithLabels(map[string]string{"K8S_POD_UID": name}))
	return err
}

// pods runs several at once.
func (d *trialNode) pods(ctx context.Context, names ...string) (wait func() map[string]error) {
	errs := make(map[string]error)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, name := range names {
		wg.Go(func() {
			err := d.pod(ctx, name)
			mu.Lock()
			errs[name] = err
			mu.Unlock()
		})
		synctest.Wait() // so that they queue in this order
	}
	return func() map[string]error { wg.Wait(); return errs }
}

// admitted checks who was, and when; who is in the same moment comes in any order.
func (d *trialNode) admitted(want ...string) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	slices.SortStableFunc(d.done, func(a, b string) int {
		nameA, after, _ := strings.Cut(a, " ")
		nameB, other, _ := strings.Cut(b, " ")
		if after != other {
			return 0
		}
		return strings.Compare(nameA, nameB)
	})
	if !slices.Equal(d.done, want) {
		d.t.Errorf("admitted %q, want %q", d.done, want)
	}
	d.done = nil
}

// failing has as many pods fail as it takes, and one more that uses the turn
// that is free at once.
func (d *trialNode) failing() {
	d.t.Helper()
	d.says(&types.Error{Code: 999, Msg: "agent away"}, 0)
	for i := range trialAfter {
		if d.n.Trial() != nil {
			d.t.Fatalf("held back after %d failures: %+v", i, d.n.Trial())
		}
		if err := d.pod(d.t.Context(), fmt.Sprintf("old%d", i)); err == nil {
			d.t.Fatal("works")
		}
	}
	if tr := d.n.Trial(); tr == nil || tr.Failures != trialAfter || tr.Held != 0 || !strings.Contains(tr.Cause, "agent away") {
		d.t.Fatalf("%+v", tr)
	}
	if err := d.pod(d.t.Context(), "old0"); err == nil {
		d.t.Fatal("works")
	}
	d.done = nil
}

// Pods that all fail are tried one after the other until one succeeds.
func TestTrials(t *testing.T) {
	t.Parallel()
	base := newNode(t)
	base.install("fakenet", "calico")
	file := base.answers + "/nodename"
	for _, tt := range []struct {
		name string
		opts []Opt
		run  func(t *testing.T, d *trialNode)
	}{
		{"a pod at each beat, and those that have not failed do not wait for the others", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1", "old2", "new1", "old3", "new2", "new3")
			if tr := d.n.Trial(); tr.Held != 5 {
				t.Errorf("%+v", tr)
			}
			wait()
			d.admitted("new1 0s", "new2 1s", "old1 1s", "new3 2s", "old2 2s", "old3 3s")
			if tr := d.n.Trial(); tr.Held != 0 || tr.Failures != trialAfter+7 {
				t.Errorf("%+v", tr)
			}
			if got := d.lines.take(); len(got) != 1 || !strings.Contains(got[0], "at least 10 pods in a row have failed; one is tried every 1s until they succeed") ||
				!strings.Contains(got[0], "agent away") {
				t.Errorf("%q", got)
			}
		}},
		{"each that succeeds frees two", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1", "old2", "old3", "old4")
			d.says(nil, 0)
			for name, err := range wait() {
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			d.admitted("old1 1s", "old2 1s", "old3 1s", "old4 1s")
			if tr := d.n.Trial(); tr != nil {
				t.Errorf("%+v", tr)
			}
			if got := d.lines.take(); len(got) != 2 || !strings.Contains(got[1], "again after 11 have failed") {
				t.Errorf("%q", got)
			}
			// Nothing is left of it.
			d.says(&types.Error{Code: 999, Msg: "again"}, 0)
			for range trialAfter - 1 {
				_ = d.pod(t.Context(), "old1")
			}
			if d.n.Trial() != nil {
				t.Error("failures were not forgotten")
			}
		}},
		{"some that succeed let no crowd loose", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			names := make([]string, 30)
			for i := range names {
				names[i] = fmt.Sprintf("old%d", i%trialAfter)
			}
			d.says(&types.Error{Code: 999, Msg: "late"}, 20*time.Second) // says nothing
			wait := d.pods(t.Context(), names...)
			for i := range 3 {
				d.n.trials.succeeded(d.n.logger(t.Context()), "old1")
				synctest.Wait()
				if want := 2 * (i + 1); len(d.done) != want || d.n.Trial().Held != 30-want {
					t.Errorf("%d of 30 after %d have succeeded, %+v", len(d.done), i+1, d.n.Trial())
				}
			}
			// That others do says nothing about them.
			for range 2 * trialAfter {
				d.n.trials.succeeded(d.n.logger(t.Context()), "new")
			}
			synctest.Wait()
			if len(d.done) != 6 || d.n.Trial() == nil {
				t.Errorf("%d of 30, %+v", len(d.done), d.n.Trial())
			}
			// Ten in a row end it.
			for range trialAfter - 3 {
				d.n.trials.succeeded(d.n.logger(t.Context()), "old1")
			}
			synctest.Wait()
			if len(d.done) != 30 || d.n.Trial() != nil {
				t.Errorf("%d of 30, %+v", len(d.done), d.n.Trial())
			}
			wait()
		}},
		{"new pods are let in ever faster while they succeed", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			d.says(nil, time.Millisecond)
			d.pods(t.Context(), "new1", "new2", "new3", "new4", "new5")()
			d.admitted("new1 0s", "new2 1ms", "new3 1ms", "new4 2ms", "new5 2ms")
			// Those that had failed are not known to be well.
			if d.n.Trial() == nil {
				t.Error("it has ended")
			}
			d.pods(t.Context(), "old1")()
			if tr := d.n.Trial(); tr != nil {
				t.Errorf("%+v", tr)
			}
		}},
		{"no longer than ready_wait", []Opt{WithReadyWait("4s")}, func(t *testing.T, d *trialNode) {
			d.failing()
			names := make([]string, 7)
			for i := range names {
				names[i] = fmt.Sprintf("old%d", i)
			}
			begin := time.Now()
			errs := d.pods(t.Context(), names...)()
			if took := time.Since(begin); took != 4*time.Second {
				t.Errorf("took %s", took)
			}
			var refused int
			for _, err := range errs {
				if strings.Contains(err.Error(), "held back because 1") && strings.Contains(err.Error(), "agent away") && !IsCNINotInitialized(err) {
					refused++
				}
			}
			// The turn at 4 s may be taken or not.
			if n := len(d.done); n < 3 || n > 4 || refused != 7-n {
				t.Errorf("%q admitted, %d refused: %v", d.done, refused, errs)
			}
			if tr := d.n.Trial(); tr.Held != 0 {
				t.Errorf("%+v", tr)
			}
		}},
		{"not with ready_wait = 0", []Opt{WithReadyWait("0s")}, func(t *testing.T, d *trialNode) {
			d.failing()
			d.pods(t.Context(), "old1", "old2", "old3")()
			d.admitted("old1 0s", "old2 0s", "old3 0s")
		}},
		{"gives up its place with its caller", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			first := d.pods(ctx, "old1")
			second := d.pods(t.Context(), "old2")
			if err := first()["old1"]; !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "while held back") {
				t.Error(err)
			}
			second()
			d.admitted("old2 1s")
			// Nobody waits: the next turn is free when its time has come.
			time.Sleep(time.Second)
			d.pods(t.Context(), "old3")()
			d.admitted("old3 0s")
		}},
		{"ends with Close", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1")
			d.must(d.n.Close())
			if err := wait()["old1"]; !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			if d.n.trials.held() != 0 {
				t.Error("still waits")
			}
		}},
		{"another list is tried at once", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1", "old2", "old3")
			d.write("10-a.conflist", conflist("1.0.0", "b", "fakenet"))
			d.must(d.n.Load())
			synctest.Wait()
			d.admitted("old1 0s", "old2 0s", "old3 0s")
			wait()
			if d.n.Trial() != nil {
				t.Errorf("%+v", d.n.Trial())
			}
		}},
		{"a gate that closes meanwhile is waited for", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1")
			d.write("10-a.conflist", held("b", file))
			d.must(d.n.Load())
			time.Sleep(3 * time.Second)
			d.admitted()
			d.write("10-a.conflist", conflist("1.0.0", "b", "fakenet"))
			d.must(d.n.Load())
			wait()
			d.admitted("old1 3s")
		}},
		{"failures are forgotten", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			time.Sleep(trialMemory)
			if d.n.Trial() != nil {
				t.Errorf("%+v", d.n.Trial())
			}
			d.pods(t.Context(), "old1", "old2")()
			d.admitted("old1 0s", "old2 0s")
		}},
		{"a plugin that fails late or is ended does not count", nil, func(t *testing.T, d *trialNode) {
			d.says(&types.Error{Code: 999, Msg: "slow"}, fastFailure+time.Second)
			for range trialAfter + 1 {
				_ = d.pod(t.Context(), "p")
			}
			d.says(fmt.Errorf("ended: %w", context.DeadlineExceeded), time.Second)
			for range trialAfter + 1 {
				_ = d.pod(t.Context(), "p")
			}
			if d.n.Trial() != nil {
				t.Errorf("%+v", d.n.Trial())
			}
		}},
		{"a trial that hangs holds up nobody", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			d.says(&types.Error{Code: 999, Msg: "late"}, time.Minute)
			wait := d.pods(t.Context(), "old1", "old2", "old3")
			time.Sleep(3 * time.Second)
			synctest.Wait()
			d.admitted("old1 1s", "old2 2s", "old3 3s")
			wait()
		}},
	} {
		base.remove("10-a.conflist")
		base.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &trialNode{node: base.in(t)}
				d.n = d.network(tt.opts...)
				d.fakeTime(d.n, func(ctx context.Context, verb, path string) ([]byte, error) {
					if verb == "VERSION" {
						return answersVersions(ctx, verb, path)
					}
					takes, err := d.behaviour()
					time.Sleep(takes)
					return []byte(result("1.0.0", "10.1.0.2")), err
				})
				d.lines = recordLog(d.n)
				d.n.Start()
				d.lines.take()
				tt.run(t, d)
				d.must(d.n.Close())
			})
		})
	}
}
