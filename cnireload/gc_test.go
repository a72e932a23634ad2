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
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
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
	if took := time.Since(start); took > giveWayBound+5*time.Second {
		t.Errorf("ADD took %s", took)
	}
	eventually(t, func() string {
		if s := n.LastSweep(); s == nil || s.Err != nil {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}

func TestTurnstile(t *testing.T) {
	t.Parallel()
	var ts turnstile
	ts.enter()
	if ts.alone(context.Background(), func(context.Context) { t.Error("not alone") }) {
		t.Error("said to be alone")
	}
	ts.leave()
	var order []string
	inside := make(chan struct{})
	var entered atomic.Bool
	done := make(chan struct{})
	go func() {
		<-inside
		ts.enter()
		entered.Store(true)
		ts.leave()
		close(done)
	}()
	if !ts.alone(context.Background(), func(ctx context.Context) {
		order = append(order, "begin")
		if ts.alone(ctx, func(context.Context) {}) {
			t.Error("two at once")
		}
		close(inside)
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), errGaveWay) || entered.Load() {
			t.Errorf("ended by %v, entered %t", context.Cause(ctx), entered.Load())
		}
		order = append(order, "end")
	}) {
		t.Error("not alone")
	}
	<-done
	if !slices.Equal(order, []string{"begin", "end"}) {
		t.Errorf("order %q", order)
	}
	// One that does not end is not waited for.
	release := make(chan struct{})
	began := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		ts.alone(context.Background(), func(context.Context) { close(began); <-release })
	}()
	<-began
	start := time.Now()
	ts.enter()
	if took := time.Since(start); took < giveWayBound {
		t.Errorf("entered after %s", took)
	}
	ts.leave()
	close(release)
	<-ended
}
