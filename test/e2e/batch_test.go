// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

// Metadata writes of many callers share transactions. A daemon that is killed
// in a sync of one has, when it is back, all that it acknowledged.
func TestKilledInSharedTransaction(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
	slow, err := n.SlowSync()
	assert.NilError(t, err)
	t.Cleanup(func() { _ = slow.Close() })
	n.start()
	slow.Only("/meta.db")
	const callers, steps = 30, 5
	var acked []string
	for step := range steps {
		// The one that comes first has a transaction of its own; the others wait
		// for its two syncs, and then share one. Killed in each sync, and after.
		before := slow.Count()
		slow.Hold()
		var mu sync.Mutex
		var group sync.WaitGroup
		create := func(i int) {
			name := fmt.Sprintf("batch-%d-%d", step, i)
			if n.CreateLease(t.Context(), name) == nil {
				mu.Lock()
				defer mu.Unlock()
				acked = append(acked, name)
			}
		}
		wait := func(sync int64) {
			assert.NilError(t, harness.Poll(t.Context(), harness.Slow(30*time.Second), func() error {
				if slow.Count()-before < sync || slow.Waiting() != 1 {
					return errors.New("no sync waits")
				}
				return nil
			}))
		}
		group.Go(func() { create(0) })
		wait(1)
		for i := range callers - 1 {
			group.Go(func() { create(i + 1) })
		}
		n.within("groupcommit.(*Queue).wait", func(i int) bool { return i >= callers-1 })
		for s := range step {
			slow.Step()
			if s < steps-2 {
				wait(int64(s) + 2)
			} else {
				slow.Hold()() // lets go
				group.Wait()
			}
		}
		assert.NilError(t, n.Kill())
		group.Wait()
		slow.Hold()()
		n.start()
		there, err := n.MetadataLeases(t.Context())
		assert.NilError(t, err)
		for _, name := range acked {
			assert.Assert(t, slices.Contains(there, name), "step %d: %s was acknowledged and is not there: %v", step, name, there)
		}
		shared := 0
		for i := range callers - 1 {
			if slices.Contains(there, fmt.Sprintf("batch-%d-%d", step, i+1)) {
				shared++
			}
		}
		assert.Assert(t, shared == 0 || shared == callers-1, "step %d: %d of %d writes of one transaction", step, shared, callers-1)
		assert.Assert(t, step < steps-1 || shared == callers-1)
		t.Logf("step %d: %d writes acknowledged so far, %d of the last transaction there", step, len(acked), shared)
	}
}
