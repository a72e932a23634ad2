//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package testenv has what tests of several packages need: processes, files,
// listeners, and waiting for them.
package testenv

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
)

// Eventually waits until ok returns an empty string, which otherwise says what is
// wrong.
func Eventually(t testing.TB, within time.Duration, ok func() string) {
	t.Helper()
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

// MissingWords says which of the words err lacks, if it lacks any.
func MissingWords(err error, words []string) string {
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

// Replace puts a file in place by rename from the directory tmp.
func Replace(t testing.TB, tmp, path, content string, mode os.FileMode) {
	t.Helper()
	from := filepath.Join(tmp, fmt.Sprintf("tmp-%d", time.Now().UnixNano()))
	// A process that is forked while the file is open for writing would hold it
	// open, and executing it would fail with "text file busy".
	syscall.ForkLock.RLock()
	err := os.WriteFile(from, []byte(content), mode)
	syscall.ForkLock.RUnlock()
	// Whatever the umask.
	if err := errors.Join(err, os.Chmod(from, mode), os.Rename(from, path)); err != nil {
		t.Fatal(err)
	}
}

// Memory is a new folder, in memory where that can be had: most of what an input of
// a fuzz target costs is files made and removed.
func Memory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "cnireload-fuzz-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Listen accepts connections at address until the test ends, or until stop.
func Listen(t testing.TB, network, address string) (l net.Listener, stop func()) {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // as after a crash
	}
	stop = func() { _ = l.Close() }
	t.Cleanup(stop)
	return l, stop
}

// BoundKey is the key of a verb's bound.
func BoundKey(verb string) string { return "io.containerd.timeout.cri.cni." + strings.ToLower(verb) }

// SetBound sets the bound of a verb for one test, which cannot be parallel.
func SetBound(t testing.TB, verb string, d time.Duration) {
	t.Helper()
	key := BoundKey(verb)
	old := timeout.Get(key)
	timeout.Set(key, d)
	t.Cleanup(func() { timeout.Set(key, old) })
}

// Alive tells whether a process still runs; a zombie does not.
func Alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return syscall.Kill(pid, 0) == nil && !errors.Is(err, os.ErrNotExist)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// ReadPID waits for a file that holds the number of a process.
func ReadPID(t testing.TB, within time.Duration, path string) (pid int) {
	t.Helper()
	Eventually(t, within, func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
			return err.Error()
		}
		return ""
	})
	return pid
}
