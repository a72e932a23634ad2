// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/gc"
)

// exists returns an option with sandboxes of these ids.
func exists(ids ...string) Opt {
	return WithSandboxes(func(context.Context) ([]Sandbox, error) {
		var list []Sandbox
		for _, id := range ids {
			list = append(list, Sandbox{ID: id})
		}
		return list, nil
	})
}

// swept waits until a GC is done.
func swept(t *testing.T, n *Network) *Sweep {
	t.Helper()
	eventually(t, func() string {
		if n.LastSweep() == nil {
			return "no GC"
		}
		return ""
	})
	return n.LastSweep()
}

func crashedNode(t *testing.T, version string) *node {
	t.Helper()
	d := newNode(t)
	d.install("a", "b")
	d.answer("a", "ADD", reply{out: result(version, "10.1.0.2")})
	d.answer("b", "ADD", reply{out: result(version, "10.1.0.2")})
	d.write("10-pods.conflist", conflist(version, "pods", "a", "b"))
	n := d.started()
	becomesReady(t, n)
	unmounted := filepath.Join(d.answers, "netns")
	d.must(os.WriteFile(unmounted, nil, 0o644))
	for id, netns := range map[string]string{"lives": "/gone/1", "leaked": unmounted, "mounted": "/proc/self/ns/net"} {
		_, err := n.Setup(context.Background(), id, netns, WithArgs("K8S_POD_INFRA_CONTAINER_ID", id))
		d.must(err)
	}
	_, err := n.Setup(context.Background(), "nerdctl", "/gone/3")
	d.must(err)
	d.must(n.Close())
	d.take("ADD", "DEL", "GC")
	return d
}

// CNI spec 1.1, section 4, GC: what a crash leaked is freed, and nothing else.
func TestGC(t *testing.T) {
	t.Parallel()
	d := crashedNode(t, "1.1.0")
	// One that does not know the verb is no reason for anything.
	d.answer("b", "GC", reply{out: `{"code":4,"msg":"unknown CNI_COMMAND: GC"}`, code: 1})
	n := d.started(exists("lives", "young"), WithGC(true), WithLoNetwork)
	d.install("loopback")
	s := swept(t, n)
	if s.Err != nil || s.Stale != 1 || s.At.IsZero() {
		t.Errorf("got %+v", s)
	}
	got := d.take("DEL", "GC")
	if want := []string{"DEL eth0 b", "DEL eth0 a", "GC a", "GC b"}; !reflect.DeepEqual(trim(got.All), want) {
		t.Fatalf("ran %q, want %q", got.All, want)
	}
	del := got.Calls["DEL-eth0-a"][0]
	if del.Env["CNI_CONTAINERID"] != "leaked" || del.Env["CNI_NETNS"] != "" {
		t.Errorf("DEL was called with %v", del.Env)
	}
	var ids []string
	for _, a := range got.Calls["GC--a"][0].Stdin.(map[string]any)["cni.dev/valid-attachments"].([]any) {
		m := a.(map[string]any)
		ids = append(ids, fmt.Sprintf("%v %v", m["containerID"], m["ifname"]))
	}
	if want := []string{"lives eth0", "mounted eth0", "nerdctl eth0", "young eth0"}; !reflect.DeepEqual(ids, want) {
		t.Errorf("valid are %q, want %q", ids, want)
	}
	// Once is enough for hours.
	time.Sleep(100 * time.Millisecond)
	if again := d.take("GC"); len(again.All) > 0 {
		t.Errorf("again: %q", again.All)
	}
}

// trim makes "GC  a" of a call without an interface "GC a".
func trim(calls []string) []string {
	var t []string
	for _, c := range calls {
		t = append(t, strings.Join(strings.Fields(c), " "))
	}
	return t
}

func TestNoGC(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(d *node) *Network{
		"switched off":         func(d *node) *Network { return d.started(exists("lives")) },
		"no list of sandboxes": func(d *node) *Network { return d.started(WithGC(true)) },
		"disableGC": func(d *node) *Network {
			d.write("10-pods.conflist", `{"cniVersion":"1.1.0","name":"pods","disableGC":true,"plugins":[{"type":"a"}]}`)
			return d.started(exists(), WithGC(true))
		},
		"an earlier version": func(d *node) *Network {
			d.write("10-pods.conflist", conflist("1.0.0", "pods", "a", "b"))
			return d.started(exists(), WithGC(true))
		},
		"not ready": func(d *node) *Network {
			d.must(os.Remove(filepath.Join(d.bin, "b")))
			return d.started(exists(), WithGC(true))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := crashedNode(t, "1.1.0")
			run(d)
			time.Sleep(300 * time.Millisecond)
			if got := d.take("DEL", "GC"); len(got.All) > 0 {
				t.Errorf("ran %q", got.All)
			}
		})
	}
}

// Without a list of what exists everything would look stale.
func TestGCNeedsTheSandboxes(t *testing.T) {
	t.Parallel()
	d := crashedNode(t, "1.1.0")
	n := d.started(WithGC(true), WithSandboxes(func(context.Context) ([]Sandbox, error) { return nil, errors.New("store is closed") }))
	if s := swept(t, n); s.Err == nil || !strings.Contains(s.Err.Error(), "store is closed") {
		t.Errorf("got %+v", s)
	}
	if got := d.take("DEL", "GC"); len(got.All) > 0 {
		t.Errorf("ran %q", got.All)
	}
}

func TestGCReportsFailures(t *testing.T) {
	t.Parallel()
	d := crashedNode(t, "1.1.0")
	d.answer("a", "GC", reply{out: `{"code":100,"msg":"cannot free"}`, code: 1})
	d.answer("b", "DEL", reply{out: `{"code":100,"msg":"cannot remove"}`, code: 1})
	n := d.started(exists("lives"), WithGC(true))
	s := swept(t, n)
	if s.Err == nil || !strings.Contains(s.Err.Error(), "cannot free") || !strings.Contains(s.Err.Error(), "cannot remove") {
		t.Errorf("got %+v", s)
	}
}

// A stale attachment whose list cannot be used is removed with the list in use.
func TestGCWithoutTheListOfADD(t *testing.T) {
	t.Parallel()
	d := crashedNode(t, "1.1.0")
	files, err := filepath.Glob(filepath.Join(d.cache, "results", "*-leaked-*"))
	if d.must(err); len(files) != 1 {
		t.Fatal(files)
	}
	b, err := os.ReadFile(files[0])
	d.must(err)
	var cached map[string]any
	d.must(json.Unmarshal(b, &cached))
	cached["config"] = []byte("no list")
	b, err = json.Marshal(cached)
	d.must(err)
	d.must(os.WriteFile(files[0], b, 0o600))
	n := d.started(exists("lives"), WithGC(true))
	if s := swept(t, n); s.Err != nil || s.Stale != 1 {
		t.Errorf("got %+v", s)
	}
	if got := d.take("DEL", "GC"); !slices.Equal(trim(got.All), []string{"DEL eth0 b", "DEL eth0 a", "GC a", "GC b"}) {
		t.Errorf("ran %q", got.All)
	}
}

// gcNode is a network in fake time that runs GC.
type gcNode struct {
	*node
	n     *Network
	lines *logLines

	mu    sync.Mutex
	takes map[string]time.Duration // of GC and DEL
	err   error                    // of GC
	begun map[string][]time.Duration
	ended int // GCs that were not killed
}

// inGCNode calls f for a node with attachments of two pods that are gone.
func inGCNode(t *testing.T, f func(t *testing.T, d *gcNode)) {
	t.Parallel()
	base := newNode(t)
	base.install("fakenet")
	base.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		d := &gcNode{node: base.in(t), takes: make(map[string]time.Duration), begun: make(map[string][]time.Duration)}
		start := time.Now()
		answer := func(ctx context.Context, verb, _ string) ([]byte, error) {
			switch verb {
			case "VERSION":
				return []byte(versionAnswer("1.1.0")), nil
			case "ADD":
				return []byte(result("1.1.0", "10.1.0.2")), nil
			case "STATUS":
				return nil, nil
			}
			d.mu.Lock()
			d.begun[verb] = append(d.begun[verb], time.Since(start))
			takes, err := d.takes[verb], d.err
			d.mu.Unlock()
			select {
			case <-time.After(takes):
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			if verb == "DEL" {
				return nil, nil
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			d.ended++
			return nil, err
		}
		before := d.network()
		d.fakeTime(before, answer)
		before.Start()
		for _, id := range []string{"gone1", "gone2"} {
			_, err := before.Setup(t.Context(), id, "/gone", WithLabels(map[string]string{
				"K8S_POD_INFRA_CONTAINER_ID": id, "K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": "web-" + id}))
			d.must(err)
		}
		d.must(before.Close())
		d.n = d.network(WithGC(true), exists(), WithHandler("runc"))
		d.fakeTime(d.n, answer)
		d.n.pace.poll, d.n.pace.status = 24*time.Hour, 24*time.Hour // cost real time
		d.lines = recordLog(d.n)
		f(t, d)
		d.must(d.n.Close())
	})
}

// busy lets a pod come every 1.1 s and returns how long they waited for GC.
func (d *gcNode) busy(for_ time.Duration) (most, all time.Duration) {
	for begin := time.Now(); time.Since(begin) < for_; {
		time.Sleep(time.Second)
		came := time.Now()
		d.n.gc.Guard.Enter()
		waited := time.Since(came)
		most, all = max(most, waited), all+waited
		time.Sleep(100 * time.Millisecond)
		d.n.gc.Guard.Leave()
	}
	return most, all
}

// began returns the minutes at which GCs were begun, and how many of them were
// not killed.
func (d *gcNode) began() (minutes []int, ended int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, at := range d.begun["GC"] {
		minutes = append(minutes, int(at.Minutes()))
	}
	return minutes, d.ended
}

// said returns the log lines about GC.
func (d *gcNode) said() []string {
	return slices.DeleteFunc(d.lines.take(), func(l string) bool { return !strings.HasPrefix(l, "cni: GC ") })
}

// Where pods come and go all the time GC finishes all the same.
func TestGCBesidePods(t *testing.T) {
	inGCNode(t, func(t *testing.T, d *gcNode) {
		d.takes["GC"] = 3 * time.Second
		d.n.Start()
		_, waited := d.busy(time.Hour)
		minutes, ended := d.began()
		if want := []int{0, 1, 3, 7, 15}; !slices.Equal(minutes, want) || ended != 1 {
			t.Errorf("begun in minutes %v, %d ended, want %v", minutes, ended, want)
		}
		if waited > 5*time.Second {
			t.Errorf("pods waited for %s in all", waited)
		}
		if s := d.n.LastSweep(); s == nil || s.Err != nil {
			t.Errorf("%+v", s)
		}
	})
}

// One that hangs is killed, however often it was tried.
func TestGCThatHangsBesidePods(t *testing.T) {
	inGCNode(t, func(t *testing.T, d *gcNode) {
		d.takes["GC"] = time.Hour
		d.n.Start()
		most, waited := d.busy(3 * time.Hour)
		minutes, ended := d.began()
		if want := []int{0, 1, 3, 7, 15, 31, 61, 91, 121, 151}; !slices.Equal(minutes, want) || ended != 0 {
			t.Errorf("begun in minutes %v, %d ended, want %v", minutes, ended, want)
		}
		if most > 5*time.Second || waited > 30*time.Second {
			t.Errorf("pods waited for %s, %s in all", most, waited)
		}
		if s := d.n.LastSweep(); s == nil || !errors.Is(s.Err, gc.ErrGaveWay) {
			t.Errorf("%+v", s)
		}
		if got := d.said(); len(got) > 0 {
			t.Errorf("%q", got)
		}
	})
}

// A GC that has failed is said once, and tried again after minutes.
func TestGCThatFails(t *testing.T) {
	inGCNode(t, func(t *testing.T, d *gcNode) {
		d.err = &types.Error{Code: 999, Msg: "datastore away"}
		d.n.Start()
		time.Sleep(2*time.Hour + 2*time.Minute)
		if minutes, _ := d.began(); !slices.Equal(minutes, []int{0, 1, 3, 7, 15, 31, 61, 91, 121}) {
			t.Errorf("begun in minutes %v", minutes)
		}
		if s := d.n.LastSweep(); s.Err == nil || !strings.Contains(s.Err.Error(), "datastore away") {
			t.Errorf("%+v", s)
		}
		d.mu.Lock()
		d.err, d.begun["GC"] = nil, nil
		d.mu.Unlock()
		time.Sleep(6 * time.Hour)
		if minutes, _ := d.began(); !slices.Equal(minutes, []int{151}) || d.n.LastSweep().Err != nil {
			t.Errorf("begun in minutes %v, %+v", minutes, d.n.LastSweep())
		}
		if got := d.said(); len(got) != 2 || !strings.Contains(got[0], "GC has failed") || !strings.Contains(got[0], "datastore away") || !strings.Contains(got[1], "GC has finished again") {
			t.Errorf("%q", got)
		}
	})
}

// The removal of what is stale, and that it hangs, keeps no GC from being run.
func TestGCAfterStaleAttachments(t *testing.T) {
	for name, takes := range map[string]time.Duration{"removed": time.Second, "hang": time.Hour} {
		t.Run(name, func(t *testing.T) {
			inGCNode(t, func(t *testing.T, d *gcNode) {
				d.takes["DEL"] = takes
				d.n.Start()
				time.Sleep(gc.StaleBound + time.Second)
				synctest.Wait()
				s, got := d.n.LastSweep(), d.lines.take()
				if s == nil || s.Stale != 2 {
					t.Fatalf("%+v", s)
				}
				// Each time there is one DEL for each, and no second one by libcni.
				d.mu.Lock()
				if dels := len(d.begun["DEL"]); d.ended < 1 || dels < 2 || dels > 2*d.ended+1 {
					t.Errorf("GC has ended %d times after DEL at %v", d.ended, d.begun["DEL"])
				}
				d.mu.Unlock()
				for _, id := range []string{"gone1", "gone2"} {
					pod := "pod default/web-" + id + " (sandbox " + id + ")"
					said := slices.ContainsFunc(got, func(l string) bool {
						return strings.Contains(l, pod+` is gone, but was attached to network "a"`) && strings.Contains(l, "runc")
					})
					if failed := takes > gc.StaleBound; said == failed || failed != (s.Err != nil && strings.Contains(s.Err.Error(), pod)) {
						t.Errorf("%s: said %t in %q, %v", pod, said, got, s.Err)
					}
				}
			})
		})
	}
}

// CNI spec 1.1, section 2: GC runs beside no ADD and no DEL; it must not hold up
// a pod either.
func TestGCGivesWay(t *testing.T) {
	d := crashedNode(t, "1.1.0")
	d.answer("a", "GC", reply{sh: "touch " + filepath.Join(d.answers, "began") + "; exec sleep 60"})
	n := d.started(exists("lives"), WithGC(true))
	eventually(t, func() string {
		_, err := os.Stat(filepath.Join(d.answers, "began"))
		return errorText(err)
	})
	d.answer("a", "GC", reply{})
	start := time.Now()
	if _, err := n.Setup(context.Background(), "new", "/ns"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > gcGuard.EndBound+5*time.Second {
		t.Errorf("ADD took %s", took)
	}
	eventually(t, func() string {
		if s := n.LastSweep(); s == nil || s.Err != nil {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}
