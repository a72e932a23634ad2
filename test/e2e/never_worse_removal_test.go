// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// briefly has the patched side wait no longer for an agent than a test does.
func briefly(side harness.Side) harness.Options {
	o := harness.Options{Side: side}
	if side == harness.Patched {
		o.CNI, o.Timeouts = shortBounds()
	}
	return o
}

// configHas waits until the lists in use hold a text.
func (n *node) configHas(text string) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), soon, func() error {
		_, info, err := n.Info(n.t.Context())
		if err == nil && !strings.Contains(info["cniconfig"], text) {
			err = fmt.Errorf("%q is not in use: %s", text, info["cniconfig"])
		}
		return err
	}))
}

// goes removes a pod within a bound and returns how long it took.
func (n *node) goes(id string, within time.Duration) time.Duration {
	n.t.Helper()
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error { return n.RemovePod(n.t.Context(), id) }))
	return time.Since(begin)
}

// A mesh's chained plugin is uninstalled, its entry and then its executable.
// https://github.com/istio/istio/issues/59846
// https://github.com/istio/istio.io/issues/16748
func TestN6(t *testing.T) {
	alike(t, "istio#59846, istio.io#16748", func(t *testing.T, side harness.Side) string {
		var took [2]time.Duration
		for i, added := range []harness.Side{side, harness.Stock} {
			n := prepare(t, harness.Options{Side: added})
			assert.NilError(t, n.InstallFake("istio-cni"))
			path := n.conf("10-a.conflist")
			n.write(path, conflist("a", "1.0.0", []string{"fakenet", "portmap", "istio-cni"}))
			n.start()
			n.waitReady(true, soon)
			id := n.run(harness.Pod{Name: "a"})
			if added != side {
				assert.NilError(t, n.Stop())
				assert.NilError(t, n.Become(side))
				n.start()
			}
			n.write(path, c10("a"))
			assert.NilError(t, os.Remove(n.bin("istio-cni")))
			n.waitReady(true, soon)
			n.configHas(`"Name":"a"`)
			took[i] = n.goes(id, 2*soon)
			assert.Assert(t, n.calls("fakenet", "DEL") >= 1)
			assert.Assert(t, n.calls("portmap", "DEL") >= 1)
			assert.Equal(t, n.leases(), 0)
		}
		return fmt.Sprintf("removed in %s, one that stock added in %s; the others' DEL run", tenth(took[0]), tenth(took[1]))
	})
}

// The agent's socket moves with an upgrade of its network.
func TestN7(t *testing.T) {
	alike(t, "an agent's socket moves", func(t *testing.T, side harness.Side) string {
		n, agent, s := shippedOn(t, harness.Options{Side: side}, "kube-ovn")
		assert.NilError(t, agent.agent(s, "up"))
		n.start()
		n.waitReady(true, soon)
		id := n.run(harness.Pod{Name: "a"})
		assert.NilError(t, agent.agent(s, "moved"))
		n.write(n.conf(s.As), string(s.file("", false, true)))
		n.configHas(movedSuffix)
		n.waitReady(true, soon)
		took := n.goes(id, harness.Slow(10*time.Second))
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("removed in %s, the agent that is there was told", tenth(took))
	})
}

// kubeadm reset: the lists and all executables go before the pods do.
// https://github.com/cri-o/cri-o/issues/4084
func TestN8(t *testing.T) {
	sides(t, "cri-o#4084, kubeadm reset", func(t *testing.T, side harness.Side) string {
		n := prepare(t, briefly(side))
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		id := n.run(harness.Pod{Name: "a"})
		assert.NilError(t, os.Remove(n.conf("10-a.conflist")))
		for _, plugin := range []string{"fakenet", "portmap", "loopback"} {
			assert.NilError(t, os.Remove(n.bin(plugin)))
		}
		n.waitReady(false, soon)
		if side == harness.Stock {
			for range 3 {
				assert.Assert(t, cmp.ErrorContains(n.RemovePod(t.Context(), id), "cni plugin not initialized"))
			}
			n.untidy = true
			return "cannot be removed: cni plugin not initialized"
		}
		return fmt.Sprintf("removed after %s (del_grace = %v)", tenth(n.goes(id, removable)), shortGrace)
	})
}

// What libcni has cached is lost in a crash.
// https://github.com/containerd/containerd/issues/8197
// https://github.com/containernetworking/cni/issues/1055
func TestN9(t *testing.T) {
	alike(t, "containerd#8197, cni#1055", func(t *testing.T, side harness.Side) string {
		for _, lose := range []func(string) error{
			func(path string) error { return os.WriteFile(path, nil, 0o600) },
			os.Remove,
		} {
			n := prepare(t, harness.Options{Side: side})
			n.write(n.conf("10-a.conflist"), c10("a"))
			n.start()
			n.waitReady(true, soon)
			id := n.run(harness.Pod{Name: "a"})
			assert.NilError(t, n.Kill())
			cached, err := filepath.Glob(filepath.Join(n.AttachmentCache(), "results", "*"+id+"*"))
			assert.NilError(t, err)
			assert.Assert(t, len(cached) > 0)
			for _, path := range cached {
				assert.NilError(t, lose(path))
			}
			n.start()
			n.waitReady(true, soon)
			n.goes(id, 2*soon)
			assert.Assert(t, n.calls("fakenet", "DEL") >= 1)
			assert.Equal(t, n.leases(), 0)
		}
		return "removed with the lists in use, 0 addresses leaked; emptied or gone"
	})
}

// The daemon is killed while ADD runs, and the list is another one afterwards.
// https://github.com/containerd/containerd/pull/12923
func TestN10(t *testing.T) {
	sides(t, "containerd#12923", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-a.conflist"), c10("a"))
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"ADD": {Mode: fake.Slow, Millis: 700}}}))
		n.start()
		n.waitReady(true, soon)
		ended := make(chan error, 1)
		go func() {
			_, err := n.RunPod(context.WithoutCancel(t.Context()), harness.Pod{Name: "a"})
			ended <- err
		}()
		n.begun("ADD", "a")
		assert.NilError(t, n.Kill())
		assert.Assert(t, <-ended != nil)
		// The plugin goes on without it.
		assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
			if n.leases() == 0 {
				return errors.New("no address yet")
			}
			return nil
		}))
		n.write(n.conf("10-a.conflist"), c10("b"))
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, n.RemovePods(t.Context()))
		if side == harness.Stock {
			assert.Equal(t, n.leases(), 1)
			n.untidy = true
			return "DEL on the new list, 1 address leaked"
		}
		assert.NilError(t, harness.Poll(t.Context(), 2*polled, func() error {
			if left := n.leases(); left > 0 {
				return fmt.Errorf("%d addresses are held", left)
			}
			return nil
		}))
		return "DEL on the list of ADD, 0 addresses leaked"
	})
}

// Calico's API server is away: ADD fails at once, and so does the DEL after it.
func TestN15(t *testing.T) {
	sides(t, "calico, API server away", func(t *testing.T, side harness.Side) string {
		o := briefly(side)
		n, nodename := calicoNode(t, o)
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		n.start()
		n.waitReady(true, soon)
		id := n.run(harness.Pod{Name: "before"})
		refuse := fake.Behavior{Mode: fake.Fail, Code: 100, Msg: "dial tcp 10.96.0.1:443: connect: connection refused"}
		assert.NilError(t, n.Fake.Set("calico", fake.State{Verbs: map[string]fake.Behavior{"ADD": refuse, "DEL": refuse}}))
		// More than the 256 removals that can be owed. Each is another pod, so none
		// is held back for having failed.
		pods := 270
		if side == harness.Stock {
			pods = 30
		}
		for i := 0; i < pods; i += 30 {
			errs, _ := n.together(30, fmt.Sprintf("p%d-", i), 0, time.Minute)
			for _, err := range errs {
				assert.Assert(t, err != nil)
			}
		}
		n.untidy = true
		if side == harness.Stock {
			// Its own pace is that of whoever asks.
			assert.Assert(t, n.calls("calico", "DEL") >= pods)
			assert.Assert(t, cmp.ErrorContains(n.RemovePod(t.Context(), id), refuse.Msg))
			return fmt.Sprintf("%d ADD, %d DEL for %d pods; a pod of before cannot be removed", n.calls("calico", "ADD")-1, n.calls("calico", "DEL")-1, pods)
		}
		const during = 5 * time.Second
		before := n.calls("calico", "DEL")
		time.Sleep(during)
		dels := n.calls("calico", "DEL") - before
		assert.Assert(t, dels <= 2*int(during/time.Second), "%d DEL in %v for pods that never got anything", dels, during)
		owed := n.report().Calls.Counts["tombstones"]
		assert.NilError(t, os.Remove(nodename))
		took := n.goes(id, 2*removable)
		return fmt.Sprintf("%d removals owed after %d pods, %d DEL in %v; a pod of before is removed after %s (del_grace = %v)", owed, pods, dels, during, tenth(took), shortGrace)
	})
}

// multus-shim's DEL answers 0 whether or not the daemon is there.
func TestN16(t *testing.T) {
	sides(t, "multus-shim, its daemon away", func(t *testing.T, side harness.Side) string {
		o := harness.Options{Side: side}
		n, agent, s := shippedOn(t, o, "multus-thick")
		assert.NilError(t, agent.agent(s, "up"))
		n.start()
		n.waitReady(true, soon)
		id := n.run(harness.Pod{Name: "a"})
		assert.NilError(t, agent.agent(s, "away"))
		removed := make(chan error, 1)
		go func() { removed <- n.RemovePod(t.Context(), id) }()
		if side == harness.Stock {
			assert.NilError(t, <-removed)
			assert.NilError(t, agent.agent(s, "up"))
			time.Sleep(quiet)
			assert.Equal(t, n.leases(), 1)
			return "removed at once, DEL lost, 1 address leaked"
		}
		select {
		case err := <-removed:
			t.Fatalf("removal ended without the daemon: %v", err)
		case <-time.After(quiet):
		}
		assert.Equal(t, n.calls("multus-shim", "DEL"), 0)
		assert.NilError(t, agent.agent(s, "up"))
		begin := time.Now()
		assert.NilError(t, <-removed)
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("waits; removed %s after the daemon is back, 0 addresses leaked", tenth(time.Since(begin)))
	})
}

// With etcd Calico's DEL makes no Kubernetes client.
func TestN17(t *testing.T) {
	alike(t, "calico with etcd, kubeconfig away", func(t *testing.T, side harness.Side) string {
		n, nodename := calicoNode(t, harness.Options{Side: side})
		kubeconfig := filepath.Join(filepath.Dir(nodename), "kubeconfig")
		for _, path := range []string{nodename, kubeconfig} {
			assert.NilError(t, os.WriteFile(path, []byte("here"), 0o644))
		}
		n.write(n.conf("10-calico.conflist"), strings.Replace(harness.CalicoList(nodename), `"nodename": "here", `,
			fmt.Sprintf(`"nodename": "here", "datastore_type": "etcdv3", "etcd_endpoints": "http://127.0.0.1:2379", "kubernetes": {"kubeconfig": %q}, `, kubeconfig), 1))
		n.start()
		n.waitReady(true, soon)
		id := n.run(harness.Pod{Name: "a"})
		assert.NilError(t, os.Remove(kubeconfig))
		begin := time.Now()
		assert.NilError(t, n.stopPod(id, time.Minute))
		took := time.Since(begin)
		assert.Assert(t, took < soon, "%v", took)
		assert.Equal(t, n.held("k8s-pod-network"), 0)
		return "stopped in " + tenth(took)
	})
}
