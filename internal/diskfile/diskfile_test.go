// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package diskfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Opening a FIFO without a writer blocks for ever when it is done plainly. Even
// one that takes a file's place between two looks must not.
func TestFIFOTakesTheFilesPlace(t *testing.T) {
	t.Parallel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	path, fifo, file := filepath.Join(dir, "10-a.conflist"), filepath.Join(dir, "fifo"), filepath.Join(dir, "file")
	must(syscall.Mkfifo(fifo, 0o644))
	must(os.WriteFile(file, []byte("{}"), 0o644))
	stop := time.Now().Add(300 * time.Millisecond)
	var all sync.WaitGroup
	all.Go(func() {
		tmp := filepath.Join(dir, "tmp")
		for time.Now().Before(stop) {
			for _, source := range []string{fifo, file} {
				if err := errors.Join(os.Link(source, tmp), os.Rename(tmp, path)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for range 4 {
		all.Go(func() {
			for time.Now().Before(stop) {
				Read(path, time.Now(), 1<<20)
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(15 * time.Second):
		t.Error("reading is blocked")
		// Let it go, or it blocks the end of the test as well.
		for {
			f, err := os.OpenFile(fifo, os.O_RDWR, 0)
			must(err)
			select {
			case <-ended:
				must(f.Close())
				return
			case <-time.After(10 * time.Millisecond):
				must(f.Close())
			}
		}
	}
}

// What is tried again and again is logged once because it says the same.
func TestWriteSaysTheSame(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "absent", "file")
	first, second := Write(path, nil, 0o600), Write(path, nil, 0o600)
	if !errors.Is(first, os.ErrNotExist) || first.Error() != second.Error() || !strings.Contains(first.Error(), path) {
		t.Errorf("%v, then %v", first, second)
	}
}
