// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// The agent of the network is away, and no gate knows it: pods fail and are
// retried until it is back. A neighbour of L10.
// https://github.com/projectcalico/calico/issues/13884
func TestTrials(t *testing.T) {
	const pods = 30
	storm := 6 * time.Second
	// One each second on the patched side; what comes to an end from before counts, too.
	limit := 2 * int(storm/time.Second)
	inTurn(t, "calico#13884", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true, ReadyWait: "30s"})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, n.Fake.Set("portmap", fake.State{Rules: []fake.Rule{{Verb: "ADD",
			Behavior: fake.Behavior{Mode: fake.Fail, Code: 999, Msg: "the agent is away", Pod: "p*"}}}}))

		// Each pod by itself, retried a second after it has failed.
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		var group sync.WaitGroup
		errs := make([]error, pods)
		for i := range pods {
			group.Go(func() {
				for {
					_, err := n.RunPod(ctx, harness.Pod{Name: fmt.Sprintf("p%d", i)})
					if err == nil || strings.Contains(err.Error(), harness.NoImage) {
						return // it had its network
					}
					if !strings.Contains(err.Error(), "the agent is away") {
						errs[i] = err
						return
					}
					select {
					case <-time.After(time.Second):
					case <-ctx.Done():
						errs[i] = ctx.Err()
						return
					}
				}
			})
		}
		assert.NilError(t, harness.Poll(t.Context(), polled, func() error {
			if n.calls("portmap", "ADD") < pods {
				return errors.New("not every pod was tried")
			}
			return nil
		}))
		before, begin := n.calls("portmap", "ADD"), time.Now()
		time.Sleep(storm)
		tried := n.calls("portmap", "ADD") - before
		perSecond := float64(tried) / time.Since(begin).Seconds()
		assert.Equal(t, n.network().Ready, true)

		text := "pods fail and are retried"
		if side == harness.Patched {
			r := n.report()
			assert.Assert(t, r.Trial != nil, "no trial in the report")
			assert.Assert(t, r.Trial.Held > 0 && r.Trial.Failures >= 10, "%+v", r.Trial)
			assert.Assert(t, cmp.Contains(r.Trial.Cause, "the agent is away"))
			assert.Equal(t, n.logLines("a pod is held back because"), 1)
			// One that has not failed waits for none of them.
			other := time.Now()
			assert.NilError(t, n.add("other"))
			assert.Assert(t, time.Since(other) < soon, "another pod took %v", time.Since(other))
			text = "one of those that have failed is tried at a time"
		}
		cured := time.Now()
		assert.NilError(t, n.Fake.Set("portmap", fake.State{}))
		group.Wait()
		for _, err := range errs {
			assert.NilError(t, err)
		}
		healed := time.Since(cured)
		if side == harness.Patched {
			assert.Assert(t, tried <= limit, "%d pods were tried in %v", tried, storm)
			assert.Assert(t, n.report().Trial == nil)
			assert.Assert(t, n.logLines("pods have their network again") > 0)
		} else {
			assert.Assert(t, tried > limit, "%d pods were tried in %v", tried, storm)
		}
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("%s: %.1f tries a second of %d pods, all have their network %s after the agent is back", text, perSecond, pods, short(healed))
	})
}

// One pod asks for what is not there, such as a NetworkAttachmentDefinition, and
// is retried for ever. That is its own affair: pods that come beside it all run.
func TestOneBadPod(t *testing.T) {
	const pods = 20
	sides(t, "pod with a missing NetworkAttachmentDefinition", func(t *testing.T, side harness.Side) string {
		// Less than ADD takes: who has to wait for others is refused.
		n := prepare(t, harness.Options{Side: side, ReadyWait: "2s"})
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Rules: []fake.Rule{
			{Verb: "ADD", Behavior: fake.Behavior{Mode: fake.Fail, Code: 999, Msg: "no such definition", Pod: "bad"}},
			{Verb: "ADD", Behavior: fake.Behavior{Mode: fake.Slow, Millis: 4000}},
		}}))
		tried := 0
		retry := func(ctx context.Context) {
			_, err := n.RunPod(ctx, harness.Pod{Name: "bad"})
			if ctx.Err() == nil {
				tried++
				assert.Check(t, cmp.ErrorContains(err, "no such definition"))
				assert.Check(t, err == nil || !strings.Contains(err.Error(), "held back"), "%v", err)
			}
		}
		for range 12 {
			retry(t.Context())
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := parallel(func() {
			for ctx.Err() == nil {
				retry(ctx)
			}
		})
		begin := time.Now()
		errs := make([]error, pods)
		var group sync.WaitGroup
		for i := range pods {
			group.Go(func() { _, errs[i] = n.RunPod(t.Context(), harness.Pod{Name: fmt.Sprint("good", i)}) })
		}
		group.Wait()
		took := time.Since(begin)
		cancel()
		ended()
		for _, err := range errs {
			assert.NilError(t, err)
		}
		assert.Equal(t, n.leases(), pods)
		if side == harness.Patched {
			assert.Assert(t, n.report().Trial == nil)
			assert.Equal(t, n.logLines("held back"), 0)
		}
		return fmt.Sprintf("a pod fails %d times; %d others beside it all run, after %s", tried, pods, short(took))
	})
}
