// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/testenv"
)

// asked is a fake plugin of CNI 1.1 whose answers to one verb are scripted, and
// which is good otherwise.
type asked struct {
	mu     sync.Mutex
	verb   string
	next   []func(context.Context) error // the answers to come
	always func(context.Context) error   // when there are none; nil is good
	times  int
}

func (a *asked) exec(ctx context.Context, verb, _ string) ([]byte, error) {
	a.mu.Lock()
	var answer func(context.Context) error
	if verb == a.verb {
		a.times++
		if answer = a.always; len(a.next) > 0 {
			answer, a.next = a.next[0], a.next[1:]
		}
	}
	a.mu.Unlock()
	if answer != nil {
		if err := answer(ctx); err != nil {
			return nil, err
		}
	}
	return []byte(versionAnswer("1.1.0")), nil
}

func (a *asked) set(always func(context.Context) error, next ...func(context.Context) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.always, a.next = always, next
}

// count returns how often the verb was asked since the last time.
func (a *asked) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.times
	a.times = 0
	return n
}

// Ways not to answer, as the executor reports them.
var (
	hangs = func(ctx context.Context) error {
		bounded, cancel := plugin.WithBound(ctx, "STATUS")
		defer cancel()
		<-bounded.Done()
		return fmt.Errorf("plugin was killed: %w", context.Cause(bounded))
	}
	cannotFork = func(context.Context) error {
		return plugin.Errorf("plugin cannot be executed: %w", errors.New("fork/exec: resource temporarily unavailable"))
	}
	isBusy  = func(context.Context) error { return fmt.Errorf("plugin is being written: %w", syscall.ETXTBSY) }
	babbles = func(context.Context) error {
		return &types.Error{Msg: `netplugin failed but error parsing its diagnostic message "boom"`}
	}
)

// speaks answers with a code of the plugin's own.
func speaks(code uint) func(context.Context) error {
	return func(context.Context) error { return &types.Error{Code: code, Msg: "not now"} }
}

// readyFor fails the test if the network is not ready at any moment of that time.
func readyFor(t *testing.T, n *Network, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		synctest.Wait()
		if err := n.Status(); err != nil {
			t.Fatalf("not ready: %v", err)
		}
	}
}

// readyAfter returns how long it takes until the network is ready, or is not.
func readyAfter(t *testing.T, n *Network, want bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for {
		synctest.Wait()
		if (n.Status() == nil) == want {
			return time.Since(begin)
		}
		if time.Since(begin) > 10*time.Minute {
			t.Fatalf("ready is not %t: %v", want, n.Status())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// A STATUS that was slow, a fork that failed, an executable that is being written
// and an answer that is none are not the plugin's word.
func TestProbeIsNotThePluginsWord(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]func(context.Context) error{"slow": hangs, "no fork": cannotFork, "text busy": isBusy, "garbage": babbles} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet")
			d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
			synctest.Test(t, func(t *testing.T) {
				n := d.in(t).network()
				a := &asked{verb: "STATUS"}
				d.fakeTime(n, a.exec)
				n.Start()
				if err := n.Status(); err != nil {
					t.Fatal(err)
				}
				for times := 1; times < plugin.MaxFailures; times++ {
					a.set(nil, []func(context.Context) error{fails, fails}[:times]...)
					readyFor(t, n, 2*time.Minute)
				}
				// What it says itself counts at once, however often it was silent.
				a.set(speaks(50), fails)
				readyAfter(t, n, false)
				if wrong := testenv.MissingWords(n.Status(), []string{"answers STATUS with code 50", "not now"}); wrong != "" {
					t.Error(wrong)
				}
				// And its silence does not take it back.
				a.set(speaks(50), fails, fails)
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if wrong := testenv.MissingWords(n.Status(), []string{"answers STATUS with code 50"}); wrong != "" {
					t.Error(wrong)
				}
				a.set(nil)
				readyAfter(t, n, true)

				// Silence for long counts too, and is said to be that.
				a.count()
				a.set(fails)
				took := readyAfter(t, n, false)
				if took < defaultPace.upgradeGrace || a.count() < plugin.MaxFailures {
					t.Errorf("not ready after %s", took)
				}
				if wrong := testenv.MissingWords(n.Status(), []string{`plugin "fakenet" (`, "does not answer STATUS"}); wrong != "" {
					t.Error(wrong)
				}
				if p := n.Snapshot().Networks[0].Plugins[0]; p.Status != "no answer" || p.Problem == nil {
					t.Errorf("%+v", p)
				}
				a.set(nil)
				if took := readyAfter(t, n, true); took > 40*time.Second {
					t.Errorf("ready %s after it answers again", took)
				}
			})
		})
	}
}

// The first answer is waited for, as stock does, and asked for again until there
// is one: stock asks at each Status.
func TestFirstAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"STATUS", "VERSION"} {
		for name, fails := range map[string]func(context.Context) error{"slow": hangs, "no fork": cannotFork} {
			t.Run(verb+" "+name, func(t *testing.T) {
				t.Parallel()
				d := newNode(t)
				d.install("fakenet")
				d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
				synctest.Test(t, func(t *testing.T) {
					n := d.in(t).network()
					a := &asked{verb: verb, next: []func(context.Context) error{fails, fails, fails, fails, fails}}
					d.fakeTime(n, a.exec)
					n.Start()
					if n.Status() == nil {
						t.Fatal("ready before there was a word")
					}
					readyAfter(t, n, true)
					if got := a.count(); got < 6 {
						t.Errorf("asked %d times", got)
					}
				})
			})
		}
	}
}

// A ready network is not given up for one whose plugin could not be asked.
func TestOldListStaysWhileTheNewOneIsUnheard(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "old", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		a := &asked{verb: "STATUS"}
		d.fakeTime(n, a.exec)
		n.Start()
		readyFor(t, n, time.Second)
		a.set(nil, cannotFork, hangs)
		d.write("10-a.conflist", conflist("1.1.0", "new", "fakenet"))
		readyFor(t, n, time.Minute)
		if got := n.Snapshot().Networks[0].Name; got != "new" {
			t.Errorf("in use is %s", got)
		}
		// But not for ever.
		a.set(cannotFork)
		d.write("10-a.conflist", conflist("1.1.0", "silent", "fakenet"))
		readyAfter(t, n, false)
		if wrong := testenv.MissingWords(n.Status(), []string{`network "silent"`, "does not answer STATUS", "resource temporarily"}); wrong != "" {
			t.Error(wrong)
		}
	})
}

// An installer replaces the executable of a list in use, and the first questions
// to the new one bring nothing.
func TestReplacedExecutableThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		a := &asked{verb: "VERSION"}
		d.fakeTime(n, a.exec)
		n.Start()
		readyFor(t, n, time.Second)
		a.set(nil, cannotFork, isBusy)
		d.installIn(d.bin, "fakenet")
		readyFor(t, n, time.Minute)
		a.set(isBusy)
		d.installIn(d.bin, "fakenet")
		if took := readyAfter(t, n, false); took < defaultPace.upgradeGrace {
			t.Errorf("not ready after %s", took)
		}
		if wrong := testenv.MissingWords(n.Status(), []string{"mis-answers VERSION", "being written"}); wrong != "" {
			t.Error(wrong)
		}
		a.set(nil)
		readyAfter(t, n, true)
	})
}

// A plugin that said that it is not ready does not become good by being removed.
func TestNoGraceForAPluginThatWasNotReady(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		a := &asked{verb: "STATUS"}
		d.fakeTime(n, a.exec)
		n.Start()
		readyFor(t, n, time.Second)
		a.set(speaks(51))
		readyAfter(t, n, false)
		d.must(os.Remove(filepath.Join(d.bin, "fakenet")))
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			if n.Status() == nil {
				t.Fatal("ready without the plugin")
			}
		}
	})
}

// A plugin that does not die is asked once, however long it stays, and again when
// it has ended.
func TestUnkillablePluginIsAskedOnce(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"STATUS", "VERSION"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet", "fine")
			d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
			synctest.Test(t, func(t *testing.T) {
				n := d.in(t).network()
				gone := make(chan struct{})
				stuck := func(ctx context.Context) error {
					err := hangs(ctx)
					return &plugin.AbandonedError{Path: "p", PID: 7, Cause: err, Gone: gone}
				}
				a := &asked{verb: verb}
				d.fakeTime(n, a.exec)
				n.Start()
				readyFor(t, n, time.Second)
				a.count()
				a.set(stuck)
				d.installIn(d.bin, "fakenet")
				if took := readyAfter(t, n, false); took < defaultPace.upgradeGrace {
					t.Errorf("not ready after %s", took)
				}
				if wrong := testenv.MissingWords(n.Status(), []string{"does not die", "pid 7", verb}); wrong != "" {
					t.Error(wrong)
				}
				time.Sleep(time.Hour)
				synctest.Wait()
				if got := a.count(); got != 1 {
					t.Errorf("asked %d times", got)
				}
				// Lists that are rewritten meanwhile ask for themselves, but not
				// without end.
				for i := range 50 {
					d.write("10-a.conflist", conflist("1.1.0", fmt.Sprint("b", i), "fakenet"))
					time.Sleep(time.Minute)
				}
				if got := a.count(); got > plugin.MaxStuck {
					t.Errorf("asked %d times more", got)
				}
				a.set(nil)
				close(gone)
				if took := readyAfter(t, n, true); took > 2*defaultPace.poll {
					t.Errorf("ready %s after its end", took)
				}
			})
		})
	}
}

// Questions of lists that were replaced meanwhile do not hold up the one that
// mends them (L2).
func TestObsoleteQuestionsAreGivenUp(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "fine")
	d.write("10-a.conflist", conflist("1.1.0", "first", "fine"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		var mu sync.Mutex
		running, most := 0, 0
		d.fakeTime(n, func(ctx context.Context, verb, path string) ([]byte, error) {
			if verb == "STATUS" && strings.HasSuffix(path, "fakenet") {
				mu.Lock()
				running++
				most = max(most, running)
				mu.Unlock()
				err := hangs(ctx)
				mu.Lock()
				running--
				mu.Unlock()
				return nil, err
			}
			return []byte(versionAnswer("1.1.0")), nil
		})
		n.Start()
		readyFor(t, n, time.Second)
		look := func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_ = n.request(ctx, request{})
		}
		for i := range 100 {
			d.write("10-a.conflist", conflist("1.1.0", fmt.Sprint("bad", i), "fakenet"))
			look()
			time.Sleep(20 * time.Millisecond)
		}
		d.write("10-a.conflist", conflist("1.1.0", "mended", "fine"))
		look()
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if got := n.Snapshot().Networks[0].Name; got != "mended" || n.Status() != nil {
			t.Errorf("in use is %s, %v", got, n.Status())
		}
		mu.Lock()
		defer mu.Unlock()
		if running > 0 || most > 2 {
			t.Errorf("%d still run, %d at most", running, most)
		}
	})
}

// A request waits for plugins for a while only: the kubelet's node status waits
// for UpdateRuntimeConfig.
func TestRequestsDoNotWaitForSTATUSWithoutEnd(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "old", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		a := &asked{verb: "STATUS"}
		d.fakeTime(n, a.exec)
		n.Start()
		readyFor(t, n, time.Second)
		a.set(hangs)
		d.write("10-a.conflist", conflist("1.1.0", "new", "fakenet"))
		begin := time.Now()
		if err := n.Load(); err != nil || time.Since(begin) > settleBound+time.Second {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
		readyFor(t, n, time.Second)
	})
}

// A text with a counter or a time in it is no other condition each time: it would
// be a line in the log, and a write of the node's status.
func TestTextThatVariesIsToldOnce(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]uint{"word": 50, "silence": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet")
			d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
			synctest.Test(t, func(t *testing.T) {
				n := d.in(t).network()
				lines := recordLog(n)
				times := 0
				a := &asked{verb: "STATUS"}
				d.fakeTime(n, a.exec)
				n.Start()
				readyFor(t, n, time.Second)
				lines.take()
				a.set(func(context.Context) error {
					times++
					return &types.Error{Code: code, Msg: fmt.Sprintf("agent not ready (attempt %d)", times)}
				})
				readyAfter(t, n, false)
				s := n.Snapshot()
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if n.Snapshot() != s {
					t.Error("there is another snapshot")
				}
				if got := lines.take(); len(got) != 1 || !strings.Contains(got[0], "agent not ready (attempt 1)") {
					t.Errorf("%d lines: %q", len(got), got)
				}
				if code == 0 {
					return
				}
				// Another code is another matter.
				a.set(speaks(51))
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := lines.take(); len(got) != 1 || !strings.Contains(got[0], "code 51") {
					t.Errorf("%d lines: %q", len(got), got)
				}
			})
		})
	}
}
