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
	"strings"
	"sync"
	"testing"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
)

// attachedNode is a node with a pod that was attached to a list of plugins a, b
// and c.
func attachedNode(t *testing.T, id string) (*node, *Network) {
	t.Helper()
	d := newNode(t)
	d.install("a", "b", "c", "other")
	for _, typ := range []string{"a", "b", "c", "other"} {
		d.answer(typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	}
	d.write("10-pods.conflist", conflist("1.0.0", "pods", "a", "b", "c"))
	n := d.started()
	becomesReady(t, n)
	if _, err := n.Setup(context.Background(), id, "/ns"); err != nil {
		t.Fatal(err)
	}
	d.take()
	return d, n
}

// containerd#8774, cni#660: what is removed is what was added, whatever the
// configuration says now.
func TestRemoveUsesTheListOfADD(t *testing.T) {
	t.Parallel()
	all := []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a"}
	for name, change := range map[string]func(*node){
		"config removed":   func(d *node) { d.remove("10-pods.conflist") },
		"conf dir removed": func(d *node) { d.must(os.RemoveAll(d.conf)) },
		"list replaced":    func(d *node) { d.write("10-pods.conflist", conflist("1.0.0", "other", "other")) },
		"plugin dropped":   func(d *node) { d.write("10-pods.conflist", conflist("1.0.0", "pods", "a", "c")) },
		"version changed":  func(d *node) { d.write("10-pods.conflist", conflist("0.4.0", "pods", "a", "b", "c")) },
		"turned bad":       func(d *node) { d.write("10-pods.conflist", "{") },
		"same":             func(*node) {},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %t", name, restart), func(t *testing.T) {
				t.Parallel()
				d, n := attachedNode(t, "pod-1")
				change(d)
				if restart {
					d.must(n.Close())
					n = d.started()
				} else if err := n.Load(); err != nil {
					t.Logf("Load: %v", err)
				}
				d.take()
				d.must(n.Remove(context.Background(), "pod-1", "/ns"))
				got := d.take("DEL")
				if !reflect.DeepEqual(got.All, all) {
					t.Errorf("DEL ran %q, want %q", got.All, all)
				}
				stdin := got.Calls["DEL-eth0-a"][0].Stdin.(map[string]any)
				if stdin["cniVersion"] != "1.0.0" || stdin["prevResult"] == nil {
					t.Errorf("plugin a was given %v", stdin)
				}
				if left := readCache(t, d.cache, "pod-1"); len(left) != 0 {
					t.Errorf("still cached: %v", left)
				}
			})
		}
	}
}

func TestRemoveOfAPodAddedByGoCNI(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a", "b", "other")
	d.answer("a", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.answer("b", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-pods.conflist", conflist("1.0.0", "pods", "a", "b"))
	theirs, err := gocni.New(gocni.WithPluginDir([]string{d.bin}), gocni.WithPluginConfDir(d.conf))
	d.must(err)
	d.must(theirs.Load(gocni.WithDefaultConf))
	id := fmt.Sprintf("stock-%d", os.Getpid())
	_, err = theirs.Setup(context.Background(), id, "/ns")
	d.must(err)
	d.write("10-pods.conflist", conflist("1.0.0", "other", "other"))
	n := d.started(WithCacheDir(libcni.CacheDir))
	becomesReady(t, n)
	d.take()
	d.must(n.Remove(context.Background(), id, "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

// containerd#12130: one plugin's failure must not keep what another allocated.
func TestRemoveTriesEveryPlugin(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "pod-1")
	d.answer("c", "DEL", reply{out: `{"code":100,"msg":"c is stuck"}`, code: 1})
	d.answer("b", "DEL", reply{out: `{"code":100,"msg":"b is stuck"}`, code: 1})
	err := n.Remove(context.Background(), "pod-1", "/ns")
	want := `plugin type="c" failed (delete): c is stuck; plugin type="b" failed (delete): b is stuck`
	if errorText(err) != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
	if got, want := d.take("DEL").All, []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
	// The attachment is not forgotten, and the next try is whole again.
	if len(readCache(t, d.cache, "pod-1")) != 1 {
		t.Error("the attachment has left the cache though DEL failed")
	}
	d.answer("c", "DEL", reply{})
	d.answer("b", "DEL", reply{})
	d.must(n.Remove(context.Background(), "pod-1", "/ns"))
	if got := d.take("DEL").All; len(got) != 3 {
		t.Errorf("the second DEL ran %q", got)
	}
	if left := readCache(t, d.cache, "pod-1"); len(left) != 0 {
		t.Errorf("still cached: %v", left)
	}
}

func TestRemoveWithoutAPlugin(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "pod-1")
	d.must(os.Remove(filepath.Join(d.bin, "c")))
	err := n.Remove(context.Background(), "pod-1", "/ns")
	if err == nil || !strings.Contains(err.Error(), `failed to find plugin "c" in path [`) {
		t.Errorf("got %v", err)
	}
	if got, want := d.take("DEL").All, []string{"DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

// After a failed ADD, which is in no cache, DEL runs the list that it used.
func TestRemoveAfterAFailedADD(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "pod-1")
	d.answer("b", "ADD", reply{out: `{"code":100,"msg":"no"}`, code: 1})
	if _, err := n.Setup(context.Background(), "pod-2", "/ns"); err == nil {
		t.Fatal("ADD has succeeded")
	}
	d.write("10-pods.conflist", conflist("1.0.0", "other", "other"))
	d.must(n.Load())
	d.take()
	d.must(n.Remove(context.Background(), "pod-2", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
	// That is over now: CRI asks again when it removes what it has stopped.
	d.must(n.Remove(context.Background(), "pod-2", ""))
	if got := d.take("DEL").All; len(got) > 0 {
		t.Errorf("a pod that was removed completely was removed again: %q", got)
	}
	// What nobody knows is removed from what is in use.
	d.must(n.Remove(context.Background(), "pod-3", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 other"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
	// An id that is attached anew is removed anew.
	if _, err := n.Setup(context.Background(), "pod-2", "/ns"); err != nil {
		t.Fatal(err)
	}
	d.must(n.Remove(context.Background(), "pod-2", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 other"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

func TestRemoveKnowsDropIns(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a", "b")
	d.answer("a", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.answer("b", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-pods.conflist", conflist("1.0.0", "pods", "a"))
	d.write("pods/b.conf", `{"type":"b"}`)
	n := d.started()
	becomesReady(t, n)
	_, err := n.Setup(context.Background(), "pod-1", "/ns")
	d.must(err)
	d.remove("pods/b.conf")
	d.must(n.Load())
	d.take()
	d.must(n.Remove(context.Background(), "pod-1", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

func TestRemoveIsOneForEachPod(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "pod-1")
	gate := filepath.Join(d.answers, "go")
	d.answer("c", "DEL", reply{sh: fmt.Sprintf("until [ -e '%s' ]; do sleep 0.05; done", gate)})

	// A caller that gives up is let go; the work goes on, and others join it.
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := n.Remove(ctx, "pod-1", "/ns"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = n.Remove(context.Background(), "pod-1", "/ns") })
	}
	time.Sleep(100 * time.Millisecond) // the others have joined, or will find nothing left to do
	d.must(os.WriteFile(gate, nil, 0o644))
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Errorf("a call that joined got %v", err)
		}
	}
	if got := d.take("DEL").All; len(got) != 3 {
		t.Errorf("DEL ran %q, want each plugin once", got)
	}
}

// A DEL that fails for want of its agent's file has not removed anything, even
// when the namespace is gone (calico#13884).
func TestRemoveDoesNotTakeAClosedGateForDone(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("calico")
	nodename := filepath.Join(d.answers, "nodename")
	d.must(os.WriteFile(nodename, []byte("node"), 0o644))
	d.answer("calico", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-calico.conflist", conflist("1.0.0", "pods", fmt.Sprintf(`{"type":"calico","nodename":"x","nodename_file":%q}`, nodename)))
	n := d.started()
	becomesReady(t, n)
	_, err := n.Setup(context.Background(), "pod-1", "/ns")
	d.must(err)
	d.must(os.Remove(nodename))
	words := "stat " + nodename + ": no such file or directory: check that the calico/node container is running"
	d.answer("calico", "DEL", reply{out: fmt.Sprintf(`{"code":999,"msg":%q}`, words), code: 1})
	if err := n.Remove(context.Background(), "pod-1", ""); err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("got %v, want the agent's absence", err)
	}
	// The same words about something else mean that it is gone.
	d.must(os.WriteFile(nodename, []byte("node"), 0o644))
	d.must(n.Remove(context.Background(), "pod-1", ""))
}
