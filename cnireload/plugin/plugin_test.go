// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/log"
	"go.uber.org/goleak"

	"github.com/cnireload/cnireload/internal/testenv"
)

func TestMain(m *testing.M) {
	if err := log.SetLevel("panic"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// node is a bin dir and a place for what fake plugins write.
type node struct {
	t        testing.TB
	bin, log string
	tmp      string
}

func newNode(t testing.TB) *node {
	t.Helper()
	root := t.TempDir()
	d := &node{t: t, bin: filepath.Join(root, "bin"), log: filepath.Join(root, "log"), tmp: filepath.Join(root, "tmp")}
	for _, dir := range []string{d.bin, d.log, d.tmp} {
		d.must(os.Mkdir(dir, 0o755))
	}
	return d
}

func (d *node) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// replace puts a file in place by rename.
func (d *node) replace(path, content string, mode os.FileMode) {
	d.t.Helper()
	testenv.Replace(d.t, d.tmp, path, content, mode)
}

// within is how long something may take that is expected to happen soon.
const within = time.Minute

// eventually waits until ok returns an empty string.
func eventually(t testing.TB, ok func() string) {
	t.Helper()
	testenv.Eventually(t, within, ok)
}
