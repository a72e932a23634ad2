// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// calicoNode lays out a node with the fake calico and the real host-local. The
// file that calico's agent writes is not there.
func calicoNode(t *testing.T, o harness.Options) (n *node, nodename string) {
	t.Helper()
	n = prepare(t, o)
	nodename, err := n.InstallCalico()
	assert.NilError(t, err)
	n.write(n.conf("10-calico.conflist"), harness.CalicoList(nodename))
	return n, nodename
}

// together runs so many pods at once and returns their errors and how long all
// of them took.
func (n *node) together(pods int, name string, attempt uint32, timeout time.Duration) (errs []error, took time.Duration) {
	begin := time.Now()
	errs = make([]error, pods)
	var group sync.WaitGroup
	for i := range pods {
		group.Go(func() {
			_, errs[i] = n.RunPod(n.t.Context(), harness.Pod{Name: fmt.Sprintf("%s%d", name, i), Attempt: attempt, Timeout: timeout})
		})
	}
	group.Wait()
	return errs, time.Since(begin)
}

// metadataLatency is the median and the 99th percentile of a small metadata write.
func (n *node) metadataLatency(pairs int) (p50, p99 time.Duration) {
	n.t.Helper()
	took, err := n.WriteMetadata(n.t.Context(), pairs)
	assert.NilError(n.t, err)
	return took[len(took)/2], took[len(took)*99/100]
}

// admitted is what shows in a stack of a pod that waits for its network.
const admitted = ".(*Network).Admit"

// waiting waits until so many pods wait for their network, and returns how many
// goroutines the daemon has then.
func (n *node) waiting(pods int, within time.Duration) (goroutines int) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		all, inside, err := n.Goroutines(n.t.Context(), admitted)
		if goroutines = all; err == nil && inside != pods {
			err = fmt.Errorf("%d pods wait, want %d", inside, pods)
		}
		return err
	}))
	return goroutines
}

// Pods that start before the agent of their network wait for it instead of
// failing over and over.
// https://github.com/projectcalico/calico/issues/13884
func TestL10(t *testing.T) {
	const pods = 60
	away := 8 * time.Second
	if os.Getenv("CNIRELOAD_LONG") == "1" {
		away = 20 * time.Second
	}
	var healthy time.Duration // on stock, what the patched side is compared with
	inTurn(t, "calico#13884", func(t *testing.T, side harness.Side) string {
		n, nodename := calicoNode(t, harness.Options{Side: side, ReadyWait: "1m"})
		n.start()
		// What the first pod costs more than others is paid, and metadata is
		// written to as when idle.
		begin := time.Now()
		_, err := n.RunPod(t.Context(), harness.Pod{Name: "host", HostNetwork: true})
		assert.NilError(t, err)
		hostPod := time.Since(begin)
		idle, _ := n.metadataLatency(100)

		if side == harness.Stock {
			n.waitReady(true, soon)
			assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
			errs, took := n.together(pods, "h", 0, 5*time.Minute)
			for _, err := range errs {
				assert.NilError(t, err)
			}
			healthy = took
			n.untidy = true // taking them away as they came would double the time
			assert.NilError(t, os.Remove(nodename))
			end := time.Now().Add(away)
			written := make(chan []time.Duration, 1)
			go func() {
				var all []time.Duration
				for time.Now().Before(end) {
					took, err := n.WriteMetadata(t.Context(), 1)
					if err != nil {
						break
					}
					all = append(all, took...)
				}
				written <- all
			}()
			failures, rounds := 0, 0
			for ; time.Now().Before(end); rounds++ {
				errs, _ := n.together(pods, "p", uint32(rounds), 5*time.Minute)
				for _, err := range errs {
					assert.ErrorContains(t, err, "check that the calico/node container is running")
					failures++
				}
			}
			assert.Equal(t, n.network().Ready, true)
			storm := median(<-written)
			assert.Assert(t, storm > 2*idle, "metadata write %v in the storm, %v idle", storm, idle)
			return fmt.Sprintf("NetworkReady true; %d failures in %d round(s); metadata write p50 %s idle, %s in the storm (%.0f x); %d healthy pods take %s",
				failures, rounds, short(idle), short(storm), float64(storm)/float64(idle), pods, short(took))
		}

		message := n.notReady(soon, `plugin "calico" needs `+nodename+" (nodename_file), which does not exist, since ")
		assert.Assert(t, hostPod < soon, "a host-network pod took %v", hostPod)
		type outcome struct {
			errs []error
			end  time.Time
		}
		done := make(chan outcome, 1)
		begin = time.Now()
		go func() {
			errs, _ := n.together(pods, "p", 0, 3*time.Minute)
			done <- outcome{errs, time.Now()}
		}()
		n.waiting(pods, soon)
		during, _ := n.metadataLatency(100)
		// The pod of the agent itself has the host's network, and does not wait.
		hostBegin := time.Now()
		_, err = n.RunPod(t.Context(), harness.Pod{Name: "agent", HostNetwork: true})
		assert.NilError(t, err)
		hostPod = time.Since(hostBegin)
		assert.Assert(t, hostPod < soon, "a host-network pod took %v", hostPod)
		for time.Since(begin) < away {
			c := n.network()
			assert.Assert(t, !c.Ready && strings.Contains(c.Message, nodename), "%v", c)
			time.Sleep(20 * time.Millisecond)
		}
		assert.Equal(t, n.calls("calico", "ADD")+n.calls("loopback", "ADD")+n.calls("portmap", "ADD"), 0)
		n.waiting(pods, soon)

		appeared := time.Now()
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		_, opened := n.waitReady(true, soon)
		result := <-done
		running := result.end.Sub(appeared)
		for _, err := range result.errs {
			assert.NilError(t, err)
		}
		n.agree()
		assert.Equal(t, n.calls("calico", "ADD"), pods)
		g := n.report().Gates
		assert.Equal(t, len(g), 1, "%+v", g)
		assert.Assert(t, g[0].Open && g[0].Target == nodename && g[0].Mode == "enforce", "%+v", g[0])
		assert.Assert(t, during <= 3*idle, "metadata write %v during the wait, %v idle", during, idle)

		compared := "healthy time not measured"
		if healthy > 0 {
			ratio := float64(running) / float64(healthy)
			compared = fmt.Sprintf("%.2f x the %s of %d healthy pods on stock", ratio, short(healthy), pods)
			assert.Assert(t, ratio < 2, "all running after %v: %s", running, compared)
		}

		// An agent that restarts, or a file that is removed, does not take the
		// network away: pods run on.
		assert.NilError(t, os.Remove(nodename))
		n.stays(true, quiet)
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		return fmt.Sprintf("%s; no failure, no ADD before; NetworkReady %s after the file, all %d running after %s (%s); metadata write p50 %s idle, %s during the wait (%.2f x); a host-network pod %s meanwhile",
			n.cause(message), short(opened), pods, short(running), compared, idle.Round(10*time.Microsecond), during.Round(10*time.Microsecond), float64(during)/float64(idle), short(hostPod))
	})
}

func median(took []time.Duration) time.Duration {
	if len(took) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(took))[len(took)/2]
}

// What else happens at a closed gate: neighbours of L10.
func TestL10Neighbours(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	t.Run("client cancels", func(t *testing.T) {
		n, _ := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1m"})
		n.start()
		n.notReady(soon, "nodename")
		before := n.settledBolt()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := n.RunPod(ctx, harness.Pod{Name: "a"})
			done <- err
		}()
		n.waiting(1, soon)
		cancel()
		assert.Equal(t, status.Code(<-done), codes.Canceled)
		n.waiting(0, soon)
		assert.Equal(t, n.bolt(), before, "the metadata database was written")
		// Its name is free: the next one of that name waits for its own turn.
		_, err := n.RunPod(t.Context(), harness.Pod{Name: "a", Timeout: time.Second})
		assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
		n.waiting(0, soon)
	})
	t.Run("ready_wait ends", func(t *testing.T) {
		n, nodename := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1500ms"})
		n.start()
		n.notReady(soon, "nodename")
		begin := time.Now()
		err := n.refused(harness.Pod{Name: "a"})
		took := time.Since(begin)
		assert.Assert(t, took > 1400*time.Millisecond && took < soon, "%v", took)
		assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
		assert.Assert(t, cmp.Contains(err, nodename+" (nodename_file), which does not exist"))
		assert.Equal(t, n.calls("calico", "ADD"), 0)
	})
	t.Run("the list is replaced", func(t *testing.T) {
		// Pods that wait for one network go on with the one that is there.
		n, _ := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1m"})
		n.start()
		n.notReady(soon, "nodename")
		done := make(chan []error, 1)
		go func() {
			errs, _ := n.together(5, "p", 0, time.Minute)
			done <- errs
		}()
		n.waiting(5, soon)
		n.write(n.conf("05-c10.conflist"), c10("c10"))
		for _, err := range <-done {
			assert.ErrorContains(t, err, harness.NoImage)
		}
		assert.Equal(t, n.calls("calico", "ADD"), 0)
	})
	t.Run("nodename_file_optional", func(t *testing.T) {
		n, nodename := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true})
		n.write(n.conf("10-calico.conflist"), strings.Replace(harness.CalicoList(nodename), `"nodename": `, `"nodename_file_optional": true, "nodename": `, 1))
		n.start()
		n.waitReady(true, soon)
		assert.Equal(t, len(n.report().Gates), 0)
	})
	t.Run("gates report", func(t *testing.T) {
		// Not enforced: the pod waits for a while, then the plugin decides.
		n, nodename := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1s", CNI: []string{`gates = "report"`}})
		n.start()
		n.waitReady(true, soon)
		n.agree()
		g := n.report().Gates
		assert.Equal(t, len(g), 1)
		assert.Assert(t, !g[0].Open && g[0].Mode == "report", "%+v", g[0])
		begin := time.Now()
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "check that the calico/node container is running"))
		assert.Assert(t, time.Since(begin) > 900*time.Millisecond)
		time.AfterFunc(300*time.Millisecond, func() { _ = os.WriteFile(nodename, nil, 0o644) })
		n.added(harness.Pod{Name: "b"})
	})
	t.Run("gates off", func(t *testing.T) {
		n, _ := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1m", CNI: []string{`gates = "off"`}})
		n.start()
		n.waitReady(true, soon)
		assert.Equal(t, len(n.report().Gates), 0)
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "check that the calico/node container is running"))
	})
	t.Run("ready_files", func(t *testing.T) {
		n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
		flag := filepath.Join(n.Base, "flag")
		n.CNI = []string{fmt.Sprintf("ready_files = [%q]", flag)}
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.notReady(soon, flag+" (ready_files) does not exist, since ")
		touch(t, flag)
		n.waitReady(true, soon)
		n.added(harness.Pod{Name: "a"})
	})
}

// A thousand pods that wait are cheap while they do, and gone when they give up.
func TestWaiters(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	const waiters = 1000
	n, _ := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, ReadyWait: "1m"})
	n.start()
	n.notReady(soon, "nodename")

	type cost struct {
		rss, heap, stacks float64 // MiB
		goroutines        int
	}
	measure := func() (c cost) {
		t.Helper()
		const mib = 1 << 20
		heap, stacks, err := n.Live(t.Context())
		assert.NilError(t, err)
		rss, err := n.RSS()
		assert.NilError(t, err)
		c.goroutines, _, err = n.Goroutines(t.Context(), admitted)
		assert.NilError(t, err)
		c.rss, c.heap, c.stacks = float64(rss)/mib, float64(heap)/mib, float64(stacks)/mib
		return c
	}
	burst := func(timeout time.Duration) (leave func()) {
		done := make(chan []error, 1)
		go func() {
			errs, _ := n.together(waiters, "w", 0, timeout)
			done <- errs
		}()
		return func() {
			for _, err := range <-done {
				assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			}
			n.waiting(0, soon)
		}
	}
	bolt := n.settledBolt()
	statusIdle := n.statusLatency(500)
	before := measure()
	leave := burst(30 * time.Second)
	n.waiting(waiters, 25*time.Second)
	during := measure()
	statusLoaded := n.statusLatency(500)
	leave()
	var after cost
	assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
		if after = measure(); after.goroutines > before.goroutines+5 {
			return fmt.Errorf("%d goroutines before, %d after", before.goroutines, after.goroutines)
		}
		return nil
	}))
	t.Logf("%d waiters: heap in use %+.1f MiB, stacks %+.1f MiB, RSS %+.1f MiB; goroutines %d before, %d during, %d after; Status p99 %v before, %v during; after: heap %+.1f, stacks %+.1f, RSS %+.1f",
		waiters, during.heap-before.heap, during.stacks-before.stacks, during.rss-before.rss, before.goroutines, during.goroutines, after.goroutines,
		statusIdle, statusLoaded, after.heap-before.heap, after.stacks-before.stacks, after.rss-before.rss)

	// The same again, when the garbage of the requests themselves has its place.
	leave = burst(30 * time.Second)
	n.waiting(waiters, 25*time.Second)
	again := measure()
	leave()
	t.Logf("again: RSS %+.1f MiB", again.rss-after.rss)

	assert.Equal(t, n.bolt(), bolt, "the metadata database was written")
	assert.Equal(t, n.calls("calico", "ADD"), 0)
	netns, _ := os.ReadDir(n.NetNSDir())
	assert.Equal(t, len(netns), 0, "network namespaces made")
	assert.Assert(t, during.goroutines-before.goroutines <= waiters+10, "%d goroutines for %d waiters", during.goroutines-before.goroutines, waiters)
	assert.Assert(t, during.heap-before.heap < 8, "%d waiters hold %.1f MiB, want less than 8", waiters, during.heap-before.heap)
	assert.Assert(t, again.rss-after.rss < 8, "%d waiters cost %.1f MiB, want less than 8", waiters, again.rss-after.rss)
}
