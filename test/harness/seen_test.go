// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

func TestSeen(t *testing.T) {
	t.Setenv("CNIRELOAD_SEEN", "")
	dir := t.TempDir()
	s := &Seen{filepath.Join(dir, "new")}
	assert.NilError(t, os.MkdirAll(filepath.Join(dir, "old"), 0o755))
	assert.NilError(t, s.Put("case/stock", "3 leaked"))
	assert.NilError(t, s.Put("other", "none"))

	var saw string
	ok, err := s.Get("case/stock", &saw)
	assert.NilError(t, err)
	assert.Assert(t, !ok, "it was not asked for")
	t.Setenv("CNIRELOAD_SEEN", "1")
	ok, err = s.Get("case/stock", &saw)
	assert.NilError(t, err)
	assert.Assert(t, ok)
	assert.Equal(t, saw, "3 leaked")
	ok, err = s.Get("never seen", &saw)
	assert.NilError(t, err)
	assert.Assert(t, !ok)
	_, err = os.Stat(filepath.Join(dir, "old"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}

// Another content or name of a file is another program.
func TestSeenHoldsForTheSameFiles(t *testing.T) {
	sum := func(dir string) string {
		h := sha256.New()
		assert.NilError(t, addFiles(h, dir))
		return string(h.Sum(nil))
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "bin", "containerd")
	assert.NilError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	assert.NilError(t, os.WriteFile(path, []byte("a"), 0o755))
	a := sum(dir)
	assert.Equal(t, sum(dir), a)
	assert.NilError(t, os.WriteFile(path, []byte("b"), 0o755))
	b := sum(dir)
	assert.Assert(t, a != b)
	assert.NilError(t, os.Rename(path, path+"-x"))
	assert.Assert(t, sum(dir) != b)
}
