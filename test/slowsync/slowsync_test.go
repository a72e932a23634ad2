// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package slowsync_test

import (
	"context"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

// What the server says it does to a daemon's metadata writes is what happens.
func TestSlowSync(t *testing.T) {
	if err := harness.Preflight("make test-e2e", harness.Stock); err != nil {
		t.Fatal(err)
	}
	d, err := harness.New(harness.Options{Side: harness.Stock, NoImage: true})
	assert.NilError(t, err)
	s, err := d.SlowSync()
	assert.NilError(t, err)
	defer func() { assert.NilError(t, d.Destroy()); assert.NilError(t, s.Close()) }()
	assert.NilError(t, d.Start(t.Context()))

	before := s.Count()
	_, err = d.WriteMetadata(t.Context(), 5)
	assert.NilError(t, err)
	// Two writes a pair, two syncs a write, at least: collection writes, too.
	assert.Assert(t, s.Count()-before >= 20, "%d", s.Count()-before)

	const delay = 20 * time.Millisecond
	s.SetDelay(delay)
	took, err := d.WriteMetadata(t.Context(), 5)
	assert.NilError(t, err)
	assert.Assert(t, took[0] >= 4*delay, "%v", took)
	s.Only("/other.db")
	_, err = d.WriteMetadata(t.Context(), 1)
	assert.NilError(t, err)
	assert.Equal(t, s.Waiting(), 0)
	s.Only("/meta.db")
	took, err = d.WriteMetadata(t.Context(), 1)
	assert.NilError(t, err)
	assert.Assert(t, took[0] >= 4*delay, "%v", took)
	s.SetDelay(0)

	release := s.Hold()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = d.WriteMetadata(ctx, 1)
	assert.Assert(t, err != nil)
	assert.Assert(t, s.Waiting() > 0)
	release()
	_, err = d.WriteMetadata(t.Context(), 1)
	assert.NilError(t, err)

	// Also after a restart.
	assert.NilError(t, d.Stop())
	assert.NilError(t, d.Start(t.Context()))
	s.SetDelay(delay)
	took, err = d.WriteMetadata(t.Context(), 1)
	assert.NilError(t, err)
	assert.Assert(t, took[0] >= 4*delay, "%v", took)
}
