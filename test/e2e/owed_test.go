// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
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

// held counts the addresses that the real host-local has given out for a network.
func (n *node) held(network string) int {
	n.t.Helper()
	held, err := n.HostLocal(network)
	assert.NilError(n.t, err)
	return len(held)
}

// owed waits until so many removals are owed.
func (n *node) owed(want int, within time.Duration) harness.Calls {
	n.t.Helper()
	var c harness.Calls
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		r, err := n.Report(n.t.Context(), "")
		if c = r.Calls; err == nil && c.Counts["tombstones"] != want {
			err = fmt.Errorf("%d removals are owed, want %d: %+v", c.Counts["tombstones"], want, c.Tombstones)
		}
		return err
	}))
	return c
}

// Pods that are removed while the agent of their network is away.
// https://github.com/projectcalico/calico/issues/13884
func TestL11(t *testing.T) {
	sides(t, "calico#13884", func(t *testing.T, side harness.Side) string {
		const pods = 3
		o := harness.Options{Side: side}
		if side == harness.Patched {
			o.CNI = []string{"del_grace = '5s'"}
			o.Timeouts = map[string]string{"io.containerd.timeout.cri.cni.del": "1s"}
		}
		n, nodename := calicoNode(t, o)
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		n.start()
		n.waitReady(true, soon)
		var ids []string
		for i := range pods {
			id, err := n.RunPod(t.Context(), harness.Pod{Name: fmt.Sprint("p", i)})
			assert.NilError(t, err)
			ids = append(ids, id)
		}
		assert.Equal(t, n.held("k8s-pod-network"), pods)
		assert.NilError(t, os.Remove(nodename))
		const missing = "check that the calico/node container is running"

		if side == harness.Stock {
			for range 3 {
				for _, id := range ids {
					assert.Assert(t, cmp.ErrorContains(n.RemovePod(t.Context(), id), missing))
				}
			}
			// After a restart the namespaces are gone, as after a reboot, and
			// then the missing file is taken for a removal that is done.
			n.restart()
			for _, id := range ids {
				assert.NilError(t, n.RemovePod(t.Context(), id))
			}
			assert.Equal(t, n.held("k8s-pod-network"), pods)
			return fmt.Sprintf("cannot be removed in 3 tries; after a restart dropped with %d addresses leaked", pods)
		}

		begin := time.Now()
		for _, id := range ids {
			err := n.RemovePod(t.Context(), id)
			assert.Assert(t, cmp.ErrorContains(err, missing))
			assert.Assert(t, cmp.ErrorContains(err, `plugin "calico" needs `+nodename+" (nodename_file), which does not exist"))
		}
		assert.Equal(t, n.owed(0, soon).Counts["tombstones"], 0)
		for _, id := range ids {
			assert.NilError(t, harness.Poll(t.Context(), time.Minute, func() error { return n.RemovePod(t.Context(), id) }))
		}
		released := time.Since(begin)
		assert.Assert(t, released > 5*time.Second, "%v", released)
		list, err := n.Runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		assert.NilError(t, err)
		assert.Equal(t, len(list.GetItems()), 0)
		if left := n.Leaks(); len(left) > 0 {
			t.Errorf("left behind by pods that were let go: %s", strings.Join(left, ", "))
		}
		c := n.owed(pods, soon)
		assert.Assert(t, cmp.Contains(c.Tombstones[0].Cause, nodename))
		assert.Equal(t, n.held("k8s-pod-network"), pods)

		n.restart()
		n.owed(pods, polled)
		dels := n.calls("calico", "DEL")
		time.Sleep(2 * time.Second)
		assert.Equal(t, n.calls("calico", "DEL"), dels, "DEL was run without the agent")
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		begin = time.Now()
		n.owed(0, polled)
		replayed := time.Since(begin)
		assert.Equal(t, n.held("k8s-pod-network"), 0)
		return fmt.Sprintf("fails with the cause; let go after %s (del_grace = 5s); %d owed, also after a restart; done %s after the file is back, 0 addresses leaked",
			short(released), pods, short(replayed))
	})
}

// What a crash has leaked is freed by GC (CNI spec 1.1), and nothing else.
func TestGC(t *testing.T) {
	sides(t, "CNI spec 1.1, GC", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-a.conflist"), conflist("a", "1.1.0", []string{"fakenet", "portmap"}))
		n.start()
		n.waitReady(true, soon)
		for i := range 2 {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: fmt.Sprint("lost", i)})
			assert.NilError(t, err)
		}
		// The node is made anew, as images do that keep /var/lib/cni.
		assert.NilError(t, n.Stop())
		assert.NilError(t, os.RemoveAll(filepath.Dir(filepath.Dir(n.BoltPath()))))
		n.start()
		n.waitReady(true, soon)
		kept, err := n.RunPod(t.Context(), harness.Pod{Name: "kept"})
		assert.NilError(t, err)
		if side == harness.Stock {
			time.Sleep(2 * time.Second)
			assert.Equal(t, n.calls("fakenet", "GC"), 0)
			assert.Equal(t, n.leases(), 3)
			n.untidy = true
			return "no GC, 2 addresses leaked for ever"
		}
		// It may have given way to the pod, and then is tried again after a minute.
		assert.NilError(t, harness.Poll(t.Context(), 2*polled+time.Minute, func() error {
			if r := n.report(); r.GC == nil || r.GC.Error != "" || n.leases() != 1 {
				return fmt.Errorf("%d addresses are held, GC %+v", n.leases(), r.GC)
			}
			return nil
		}))
		assert.Assert(t, n.calls("fakenet", "GC") >= 1)
		for i := range 2 {
			assert.Equal(t, n.logLines(fmt.Sprintf(`cni: pod default/lost%d (sandbox `, i)), 1)
		}
		assert.Equal(t, n.leases(), 1)
		n.untidy = true // the lost pods' shims and namespaces are still there
		assert.NilError(t, n.RemovePod(t.Context(), kept))
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("2 of 3 addresses freed, GC run %d times", n.calls("fakenet", "GC"))
	})
}

// A plugin that a killed containerd has left behind holds a lock that every
// other call waits for.
func TestLeftOver(t *testing.T) {
	sides(t, "containerd killed during DEL", func(t *testing.T, side harness.Side) string {
		o := harness.Options{Side: side}
		if side == harness.Patched {
			o.Timeouts = map[string]string{"io.containerd.timeout.cri.cni.del": "8s"}
		}
		n := prepare(t, o)
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		id, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
		assert.NilError(t, err)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"DEL": {Mode: fake.Hang}}}))
		gone := make(chan error, 1)
		go func() { gone <- n.RemovePod(t.Context(), id) }()
		assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
			if n.calls("fakenet", "DEL") == 0 {
				return fmt.Errorf("no DEL yet")
			}
			return nil
		}))
		all, err := n.Fake.Calls()
		assert.NilError(t, err)
		plugin := all[len(all)-1].PID
		begin := time.Now()
		assert.NilError(t, syscall.Kill(n.PID(), syscall.SIGKILL))
		<-n.Ended()
		<-gone
		n.start()
		n.waitReady(true, polled)
		if side == harness.Stock {
			time.Sleep(10 * time.Second)
			assert.Assert(t, running(plugin), "stock ended what it had left")
			n.untidy = true
			return "still runs 10 s after the restart, for ever"
		}
		r := n.report()
		if len(r.Calls.LeftOver) != 1 || r.Calls.LeftOver[0].PID != plugin || r.Calls.LeftOver[0].Verb != "DEL" || r.Calls.LeftOver[0].Sandbox != id {
			assert.Assert(t, time.Since(begin) > 8*time.Second, "not shown: %+v", r.Calls)
		}
		assert.NilError(t, harness.Poll(t.Context(), time.Minute, func() error {
			if running(plugin) {
				return fmt.Errorf("pid %d still runs", plugin)
			}
			return nil
		}))
		took := time.Since(begin)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.NilError(t, n.RemovePod(t.Context(), id))
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("shown, and ended %s after it was left (bound 8s)", short(took))
	})
}

// running tells whether a process has not ended.
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ")
	return err == nil && !strings.HasPrefix(rest, "Z")
}
