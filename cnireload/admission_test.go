// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/admission"
)

// trialNode is a network whose plugin does what is said here.
type trialNode struct {
	*node
	n     *Network
	lines *logLines

	mu    sync.Mutex
	add   error // that ADD returns, after some time
	takes time.Duration
	bad   map[string]bool // pods for which it fails at once
	done  []string        // pods that were admitted, and when
}

// podName is the key of a pod's name in the context of its ADD.
type podName struct{}

// says sets what ADD returns, and after what time.
func (d *trialNode) says(err error, takes time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.add, d.takes = err, takes
}

func (d *trialNode) behaviour(ctx context.Context) (takes time.Duration, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if name, _ := ctx.Value(podName{}).(string); d.bad[name] {
		return 0, &types.Error{Code: 999, Msg: "no such definition"}
	}
	return d.takes, d.add
}

// pod runs a pod of that name as CRI does it, and returns what became of it.
func (d *trialNode) pod(ctx context.Context, name string) error {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, podName{}, name))
	defer cancel() // as gRPC does
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

// waves says how many were admitted when, and forgets it.
func (d *trialNode) waves() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	counts := make(map[time.Duration]int)
	for _, line := range d.done {
		_, after, _ := strings.Cut(line, " ")
		at, err := time.ParseDuration(after)
		d.must(err)
		counts[at]++
	}
	var waves []string
	for _, at := range slices.Sorted(maps.Keys(counts)) {
		waves = append(waves, fmt.Sprintf("%d after %s", counts[at], at))
	}
	d.done = nil
	return strings.Join(waves, ", ")
}

// many returns names of pods.
func many(prefix string, count int) (names []string) {
	for i := range count {
		names = append(names, fmt.Sprint(prefix, i))
	}
	return names
}

// failing has as many pods fail as it takes, and one of them once more, which
// uses the turn that is free at once.
func (d *trialNode) failing() {
	d.t.Helper()
	d.says(&types.Error{Code: 999, Msg: "agent away"}, 0)
	for i := range admission.Many {
		if d.n.Trial() != nil {
			d.t.Fatalf("held back after %d failures: %+v", i, d.n.Trial())
		}
		if err := d.pod(d.t.Context(), fmt.Sprintf("old%d", i)); err == nil {
			d.t.Fatal("works")
		}
	}
	if tr := d.n.Trial(); tr == nil || tr.Failures != admission.Many || tr.Held != 0 || tr.Since != time.Now() || !strings.Contains(tr.Cause, "agent away") {
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
		{"one that has failed each second, new ones at once", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			wait := d.pods(t.Context(), "old1", "old2", "new1", "old3", "new2", "new3")
			if tr := d.n.Trial(); tr.Held != 3 || tr.Failures != admission.Many+3 {
				t.Errorf("%+v", tr)
			}
			wait()
			d.admitted("new1 0s", "new2 0s", "new3 0s", "old1 1s", "old2 2s", "old3 3s")
			if tr := d.n.Trial(); tr.Held != 0 || tr.Failures != admission.Many+3 {
				t.Errorf("%+v", tr)
			}
			if got := d.lines.take(); len(got) != 1 || !strings.Contains(got[0], "a pod is held back because 10 pods have failed, of which one is tried every 1s; the last failed with") ||
				!strings.Contains(got[0], "agent away") {
				t.Errorf("%q", got)
			}
		}},
		{"ever more of those that have failed while they succeed", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			d.says(&types.Error{Code: 999, Msg: "agent away"}, 0)
			d.pods(t.Context(), "old10", "old11", "old12", "old13")()
			d.done = nil
			var names []string
			for i := range 14 {
				names = append(names, fmt.Sprintf("old%d", i))
			}
			d.says(nil, 100*time.Millisecond)
			wait := d.pods(t.Context(), names...)
			for name, err := range wait() {
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			// The fifth success leaves nine that have failed.
			d.admitted("old0 1s", "old1 1.1s", "old2 1.1s", "old3 1.2s", "old4 1.2s", "old5 1.2s", "old6 1.2s", "old10 1.3s", "old11 1.3s", "old12 1.3s", "old13 1.3s", "old7 1.3s", "old8 1.3s", "old9 1.3s")
			if tr := d.n.Trial(); tr != nil {
				t.Errorf("%+v", tr)
			}
			if got := d.lines.take(); len(got) != 2 || !strings.Contains(got[1], "pods have their network again") {
				t.Errorf("%q", got)
			}
			// Afterwards there is one place again.
			time.Sleep(admission.Pace)
			d.failing()
			d.pods(t.Context(), "old1", "old2")()
			d.admitted("old1 1s", "old2 2s")
		}},
		{"some that succeed let no crowd loose", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			for i := admission.Many; i < 3*admission.Many; i++ {
				_ = d.pod(t.Context(), fmt.Sprintf("old%d", i))
			}
			d.done = nil
			names := make([]string, 30)
			for i := range names {
				names[i] = fmt.Sprintf("old%d", i)
			}
			d.says(&types.Error{Code: 999, Msg: "late"}, 20*time.Second) // says nothing
			wait := d.pods(t.Context(), names...)
			held := func(want int) {
				t.Helper()
				synctest.Wait()
				d.mu.Lock()
				went := len(d.done)
				d.mu.Unlock()
				if tr := d.n.Trial(); tr == nil || tr.Held != want || went != 30-want {
					t.Errorf("%d of 30, %+v, want %d held", went, tr, want)
				}
			}
			held(30)
			time.Sleep(admission.Pace)
			held(29)
			d.n.admission.Succeeded("old0")
			held(27)
			time.Sleep(admission.Pace)
			held(24) // three at each beat
			d.n.admission.Failed("old1", d.n.Snapshot().Generation, &types.Error{Code: 999, Msg: "x"}, 0)
			time.Sleep(admission.Pace)
			held(23)
			// That others succeed says nothing about them.
			for range 2 * admission.Many {
				d.n.admission.Succeeded("new")
			}
			held(23)
			wait()
		}},
		{"all go on when ten have succeeded in a row", nil, func(t *testing.T, d *trialNode) {
			d.failing()
			for _, name := range many("old", 60) {
				d.n.admission.Failed(name, d.n.Snapshot().Generation, &types.Error{Code: 999, Msg: "agent away"}, 0)
			}
			d.says(nil, 5*time.Second)
			wait := d.pods(t.Context(), many("old", 60)...)
			time.Sleep(admission.Pace)
			for _, name := range many("old", admission.Many) {
				if tr := d.n.Trial(); tr == nil || tr.Held < 40 {
					t.Errorf("before %s: %+v", name, tr)
				}
				d.n.admission.Succeeded(name)
			}
			time.Sleep(2 * admission.Pace)
			synctest.Wait()
			if tr := d.n.Trial(); tr == nil || tr.Held != 0 {
				t.Errorf("%+v", tr)
			}
			wait()
			d.done = nil
		}},
		{"new ones never wait, and none is refused", nil, func(t *testing.T, d *trialNode) {
			for what, says := range map[string]struct {
				err   error
				takes time.Duration
			}{
				"work": {nil, 20 * time.Second},
				"fail": {&types.Error{Code: 999, Msg: "agent away"}, 3 * time.Second},
				"hang": {fmt.Errorf("ended: %w", context.DeadlineExceeded), 2 * time.Minute},
			} {
				d.write("10-a.conflist", conflist("1.0.0", "to-"+what, "fakenet"))
				d.must(d.n.Load())
				d.failing()
				d.says(says.err, says.takes)
				for name, err := range d.pods(t.Context(), many(what, 40)...)() {
					if says.err == nil && err != nil || err != nil && strings.Contains(err.Error(), "held back") {
						t.Errorf("%s: %v", name, err)
					}
				}
				if got, want := d.waves(), "40 after 0s"; got != want {
					t.Errorf("%s: %s, want %s", what, got, want)
				}
				// Those that had failed are not known to be well.
				if d.n.Trial() == nil {
					t.Errorf("%s: it has ended", what)
				}
			}
		}},
		{"one bad pod changes nothing for others", nil, func(t *testing.T, d *trialNode) {
			d.bad = map[string]bool{"bad": true}
			retry := func(times int) {
				for range times {
					if err := d.pod(t.Context(), "bad"); err == nil || strings.Contains(err.Error(), "held back") {
						t.Error(err)
					}
					time.Sleep(13 * time.Second)
				}
			}
			retry(3 * admission.Many)
			d.done = nil
			d.says(nil, 20*time.Second)
			wait := d.pods(t.Context(), many("new", 110)...)
			retry(3)
			for name, err := range wait() {
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if got, want := d.waves(), "113 after 0s"; got != want {
				t.Errorf("%s, want %s", got, want)
			}
			if got := d.lines.take(); len(got) > 0 || d.n.Trial() != nil {
				t.Errorf("%q, %+v", got, d.n.Trial())
			}
		}},
		{"pods without a UID are not taken for one", nil, func(t *testing.T, d *trialNode) {
			d.says(&types.Error{Code: 999, Msg: "agent away"}, 0)
			for range 2 * admission.Many {
				_ = d.pod(t.Context(), "")
			}
			if d.n.Trial() != nil {
				t.Errorf("%+v", d.n.Trial())
			}
			d.failing()
			_ = d.pod(t.Context(), "")
			d.pods(t.Context(), "", "", "")()
			if got, want := d.waves(), "4 after 0s"; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		}},
		{"a late failure of lists that are gone says nothing", nil, func(t *testing.T, d *trialNode) {
			before := d.n.Snapshot().Generation
			d.write("10-a.conflist", conflist("1.0.0", "b", "fakenet"))
			d.must(d.n.Load())
			d.failing()
			for i := range 2 * admission.Many {
				d.n.admission.Failed(fmt.Sprint("late", i), before, &types.Error{Code: 999, Msg: "x"}, 0)
			}
			if tr := d.n.Trial(); tr == nil || tr.Failures != admission.Many || !strings.Contains(tr.Cause, "agent away") {
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
				if strings.Contains(err.Error(), "held back because 10 pods have failed") && strings.Contains(err.Error(), "agent away") && !IsCNINotInitialized(err) {
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
			if tr := d.n.Trial(); tr.Held != 0 {
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
			time.Sleep(5 * time.Minute)
			if d.n.Trial() != nil {
				t.Errorf("%+v", d.n.Trial())
			}
			d.pods(t.Context(), "old1", "old2")()
			d.admitted("old1 0s", "old2 0s")
		}},
		{"a plugin that fails late or is ended does not count", nil, func(t *testing.T, d *trialNode) {
			d.says(&types.Error{Code: 999, Msg: "slow"}, admission.Fast+time.Second)
			d.pods(t.Context(), many("slow", 2*admission.Many)...)()
			d.says(fmt.Errorf("ended: %w", context.DeadlineExceeded), time.Second)
			d.pods(t.Context(), many("ended", 2*admission.Many)...)()
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
					takes, err := d.behaviour(ctx)
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
