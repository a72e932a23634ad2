// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// A failed attempt writes the record of its sandbox and deletes it.
func TestWritesOfFailedAttempt(t *testing.T) {
	sides(t, "", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		n.write(n.conf("10-a.conflist"), c10("a"))
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Mode: fake.Fail, Code: 100, Msg: "fakenet says no"},
		}}))
		n.start()
		n.waitReady(true, soon)
		const tries = 10
		before, err := n.MetadataWrites()
		assert.NilError(t, err)
		for i := range tries {
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a", Attempt: uint32(i)}), "says no"))
		}
		after, err := n.MetadataWrites()
		assert.NilError(t, err)
		// Garbage collections write, too; there are few.
		writes := float64(after-before) / tries
		if side == harness.Stock {
			assert.Assert(t, writes >= 5, "%v writes", writes)
		} else {
			assert.Assert(t, writes < 2.5, "%v writes", writes)
		}
		return fmt.Sprintf("%.1f writes per failed attempt", writes)
	})
}

// crash is one way to lose the daemon.
type crash struct {
	name string
	// arrange has the next call come to a halt where it is to be lost, and
	// reached waits until it is there.
	arrange func(*node)
	reached func(*node)
	// stops is set if the call is not RunPodSandbox but the end of a pod.
	stops bool
}

// crashes are the places where a call can be made to wait, and some chosen by
// chance.
func crashes(held *[]func() error) []crash {
	behave := func(verb string, b fake.Behavior) func(*node) {
		return func(n *node) {
			assert.NilError(n.t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{verb: b}}))
		}
	}
	slow := fake.Behavior{Mode: fake.Slow, Millis: 1500}
	writing := func(n *node) { n.within("metadata.(*DB).Update", func(i int) bool { return i >= 2 }) }
	hold := func(n *node) {
		release, err := n.HoldMetadata(n.t.Context())
		assert.NilError(n.t, err)
		*held = append(*held, release)
	}
	runc := func(verb string) (func(*node), func(*node)) {
		return func(n *node) { touch(n.t, filepath.Join(n.Base, "runc-waits-"+verb)) },
			func(n *node) {
				assert.NilError(n.t, harness.Poll(n.t.Context(), 30*time.Second, func() error {
					_, err := os.Stat(filepath.Join(n.Base, "runc-reached-"+verb))
					return err
				}))
			}
	}
	create, created := runc("create")
	startTask, started := runc("start")
	kill, killed := runc("kill")
	all := []crash{
		{name: "first write", arrange: hold, reached: writing},
		{name: "ADD", arrange: behave("ADD", slow), reached: func(n *node) { n.begun("ADD", "a") }},
		{name: "write after ADD", arrange: behave("ADD", slow), reached: func(n *node) {
			n.begun("ADD", "a")
			hold(n)
			writing(n)
		}},
		{name: "create", arrange: create, reached: created},
		{name: "start", arrange: startTask, reached: started},
		{name: "clean-up DEL", arrange: func(n *node) {
			assert.NilError(n.t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
				"ADD": {Mode: fake.Fail, Code: 100, Msg: "says no"}, "DEL": slow,
			}}))
		}, reached: func(n *node) { n.begun("DEL", "a") }},
		{name: "clean-up write", arrange: func(n *node) {
			assert.NilError(n.t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
				"ADD": {Mode: fake.Fail, Code: 100, Msg: "says no"}, "DEL": slow,
			}}))
		}, reached: func(n *node) {
			n.begun("DEL", "a")
			hold(n)
			writing(n)
		}},
		{name: "kill of the end", stops: true, arrange: kill, reached: killed},
		{name: "DEL of the end", stops: true, arrange: behave("DEL", slow), reached: func(n *node) { n.begun("DEL", "a") }},
		{name: "write of the end", stops: true, arrange: hold, reached: writing},
	}
	for i := range 12 {
		at := time.Duration(rand.Int64N(int64(400 * time.Millisecond)))
		all = append(all, crash{name: fmt.Sprintf("after %v", at.Round(time.Millisecond)), stops: i%2 == 1,
			arrange: func(*node) {}, reached: func(*node) { time.Sleep(at) }})
	}
	return all
}

// A daemon that is killed at any step of a pod's life leaves what its
// successor lists and can remove, and nothing else.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	base, err := os.MkdirTemp("", harness.Prefix)
	assert.NilError(t, err)
	n := prepare(t, harness.Options{Side: harness.Patched, Base: base, Runc: filepath.Join(base, "runc"), HoldMetadata: true})
	n.brokenRunc()
	n.write(n.conf("10-a.conflist"), c10("a"))
	n.start()
	n.waitReady(true, soon)
	var held []func() error
	listed, orphans, all := 0, 0, crashes(&held)
	for _, c := range all {
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.NilError(t, os.RemoveAll(n.Fake.CallsPath()))
		var id string
		if c.stops {
			id = n.run(harness.Pod{Name: "a"})
		}
		c.arrange(n)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if c.stops {
				_ = n.RemovePod(ctx, id)
			} else {
				_, _ = n.RunPod(ctx, harness.Pod{Name: "a", Timeout: time.Minute})
			}
		}()
		c.reached(n)
		assert.NilError(t, n.Kill(), c.name)
		cancel()
		<-ended
		for _, release := range held {
			_ = release() // what held it has been killed
		}
		held = nil
		for _, f := range []string{"create", "start", "kill"} {
			assert.NilError(t, os.RemoveAll(filepath.Join(n.Base, "runc-waits-"+f)))
			assert.NilError(t, os.RemoveAll(filepath.Join(n.Base, "runc-reached-"+f)))
		}
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))

		n.start()
		n.waitReady(true, 30*time.Second)
		// What the old one has left running comes to its end.
		assert.NilError(t, harness.Poll(t.Context(), 30*time.Second, func() error { return n.noPlugins() }), c.name)
		pods, err := n.Runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		assert.NilError(t, err)
		assert.Assert(t, len(pods.GetItems()) <= 1, "%s: %v", c.name, pods)
		listed += len(pods.GetItems())
		assert.NilError(t, n.RemovePods(t.Context()), c.name)
		left, shims := n.Leaks(), 0
		for _, l := range left {
			if strings.Contains(l, "/containerd-shim-runc-v2 ") {
				shims++
			}
		}
		if shims > 0 {
			// A shim that was being started when the daemon was killed: containerd
			// has no record of it yet, on stock neither.
			orphans += shims
			n.endShims()
			left = n.Leaks()
		}
		assert.Equal(t, len(left), 0, "%s: %q", c.name, left)
		leases, err := n.MetadataLeases(t.Context())
		assert.NilError(t, err)
		assert.Equal(t, len(leases), 0, "%s: leases %q", c.name, leases)
		assert.NilError(t, harness.Poll(t.Context(), 30*time.Second, func() error {
			if left := n.leases(); left != 0 {
				held, _ := n.Fake.Leases()
				calls, _ := n.Fake.Calls()
				for i := range calls {
					calls[i].Stdin = ""
				}
				return fmt.Errorf("%d addresses are still in use: %v after %d pods listed and the calls %+v", left, held, len(pods.GetItems()), calls)
			}
			return nil
		}), c.name)
		// The name is free, and the pod works.
		n.pod("a")
		assert.NilError(t, n.RemovePods(t.Context()), c.name)
	}
	t.Logf("%d crashes left %d listed sandboxes, all removable, %d shims that were just being started, and nothing else", len(all), listed, orphans)
}

// endShims ends the shims that are left with no pods.
func (n *node) endShims() {
	pids, err := harness.Processes(n.Base)
	assert.NilError(n.t, err)
	for _, pid := range pids {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && filepath.Base(exe) == "containerd-shim-runc-v2" {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// noPlugins returns nil if no plugin of the daemon runs.
func (n *node) noPlugins() error {
	pids, err := harness.Processes(n.Base)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && filepath.Dir(exe) == n.BinDirs[0] {
			return errors.New("a plugin is still running: " + exe)
		}
	}
	return nil
}
