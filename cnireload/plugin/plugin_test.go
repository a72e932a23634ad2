// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/log"
	"go.uber.org/goleak"
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
	tmp := filepath.Join(d.tmp, fmt.Sprintf("tmp-%d", time.Now().UnixNano()))
	// A process that is forked while the file is open for writing would hold it
	// open, and executing it would fail with "text file busy".
	syscall.ForkLock.RLock()
	err := os.WriteFile(tmp, []byte(content), mode)
	syscall.ForkLock.RUnlock()
	d.must(err)
	d.must(os.Chmod(tmp, mode)) // whatever the umask
	d.must(os.Rename(tmp, path))
}

// eventually waits until ok returns an empty string.
func eventually(t testing.TB, ok func() string) {
	t.Helper()
	const within = time.Minute
	for end := time.Now().Add(within); ; time.Sleep(2 * time.Millisecond) {
		wrong := ok()
		if wrong == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %s still: %s", within, wrong)
		}
	}
}

// missingWords says which of the words err lacks, if it lacks any.
func missingWords(err error, words []string) string {
	if err == nil {
		return "no error"
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			return fmt.Sprintf("%q does not say %q", err, w)
		}
	}
	return ""
}
