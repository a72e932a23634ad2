// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// One slow plugin and one write in the conf dir must not stop the node.
// https://github.com/containerd/containerd/issues/4666
// https://github.com/containerd/cri/issues/1078
// https://github.com/projectcalico/calico/issues/2902
// https://github.com/containerd/containerd/issues/11275
func TestL1(t *testing.T) {
	sides(t, "containerd#4666, cri#1078, calico#2902, containerd#11275", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		path := n.conf("10-a.conflist")
		n.write(path, conflist("a", "1.0.0", []string{"fakenet", "portmap"}, "subnet", "10.10.0.0/16"))
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Mode: fake.Hang, Pod: "hangs"},
		}}))
		n.start()
		n.waitReady(true, soon)

		// Idle: what the loaded calls are compared with.
		idleStatus := n.statusLatency(200)
		idlePod := n.podLatency("idle")

		hung := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			_, err := n.RunPod(ctx, harness.Pod{Name: "hangs", Timeout: time.Minute})
			hung <- err
		}()
		assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
			calls, err := n.Fake.Calls()
			if err == nil && !slices.ContainsFunc(calls, func(c fake.Call) bool { return c.Pod == "hangs" && c.Command == "ADD" }) {
				err = fmt.Errorf("the hanging ADD has not begun")
			}
			return err
		}))

		if side == harness.Stock {
			// Without a write in the conf dir a hung ADD hurts nobody.
			n.statusLatency(10)
			assert.NilError(t, os.WriteFile(n.conf("anything"), []byte("x"), 0o644))
			assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := n.Network(ctx); status.Code(err) != codes.DeadlineExceeded {
					return fmt.Errorf("want Status to exceed its deadline, got %v", err)
				}
				return nil
			}))
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "other", Timeout: 2 * time.Second})
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			n.untidy = true
			return "Status and another pod: DeadlineExceeded while the ADD hangs"
		}

		assert.NilError(t, os.WriteFile(n.conf("anything"), []byte("x"), 0o644))
		loadedStatus := n.statusLatency(200)
		assert.Assert(t, loadedStatus < time.Second, "Status took %v", loadedStatus)
		// Idle answers take well under a millisecond, where ten times is noise
		// on a busy machine.
		assert.Assert(t, loadedStatus < max(10*idleStatus, 100*time.Millisecond), "Status took %v, idle %v", loadedStatus, idleStatus)
		loadedPod := n.podLatency("other")
		assert.Assert(t, loadedPod < max(10*idlePod, time.Second), "a pod took %v, idle %v", loadedPod, idlePod)

		// The new config serves new pods while the old call still hangs.
		n.write(path, conflist("b", "1.0.0", []string{"fakenet", "portmap"}, "subnet", "10.20.0.0/16"))
		n.using("b", atOnce)
		ip := n.pod("new")
		assert.Equal(t, ip[:6], "10.20.")
		select {
		case err := <-hung:
			t.Fatalf("the hanging ADD ended: %v", err)
		default:
		}

		// The caller goes away: the call ends, the plugin's process with it,
		// and the name is free again.
		cancel()
		select {
		case <-hung:
		case <-time.After(soon):
			t.Fatal("the hanging pod did not end with its caller")
		}
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.NilError(t, harness.Poll(t.Context(), 10*time.Second, func() error {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "hangs"})
			return err
		}))
		return fmt.Sprintf("Status p99 %s (idle %s), another pod %s (idle %s), new config serves new pods",
			loadedStatus.Round(10*time.Microsecond), idleStatus.Round(10*time.Microsecond), short(loadedPod), short(idlePod))
	})
}

// statusLatency is the 99th percentile of so many Status calls.
func (n *node) statusLatency(calls int) time.Duration {
	n.t.Helper()
	took := make([]time.Duration, calls)
	for i := range took {
		begin := time.Now()
		n.network()
		took[i] = time.Since(begin)
	}
	slices.Sort(took)
	return took[calls*99/100]
}

// podLatency is the median time of three pods.
func (n *node) podLatency(name string) time.Duration {
	n.t.Helper()
	took := make([]time.Duration, 3)
	for i := range took {
		begin := time.Now()
		n.pod(fmt.Sprintf("%s%d", name, i))
		took[i] = time.Since(begin)
	}
	slices.Sort(took)
	return took[1]
}
