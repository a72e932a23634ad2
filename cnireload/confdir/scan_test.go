// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package confdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cnireload/cnireload/internal/diskfile"
)

// write makes a file, and its directory, and returns its path.
func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// Unchanged lists are the same object for ever: a generation shares them.
func TestUnchangedFilesAreNotParsedAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "10-a.conflist", `{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"fakenet"}]}`)
	dropIn := write(t, dir, "a/10-one.conf", `{"type":"portmap"}`)
	bad := write(t, dir, "20-bad.conflist", "{")
	s := NewScanner(dir)
	one := s.Scan()
	two := s.Scan()
	for i := range one.Files {
		if one.Files[i] != two.Files[i] {
			t.Errorf("%s was made anew", one.Files[i].Path)
		}
	}
	for _, path := range []string{bad, filepath.Dir(dropIn)} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	three := s.Scan()
	if len(three.Files) != 1 || three.Files[0] == one.Files[0] || len(three.Files[0].DropIns) != 0 {
		t.Errorf("%+v", three.Files)
	}
	if len(s.contents) != 1 || len(s.parsed) != 1 {
		t.Errorf("what is gone is remembered: %d, %d", len(s.contents), len(s.parsed))
	}
	if len(one.Files[0].List.Plugins) != 2 {
		t.Error("an older scan was changed")
	}
}

// Only a file that was old when it was read is taken from memory: two writes
// within one tick of the clock leave the same stat data behind.
func TestOldFilesAreReadOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := write(t, dir, "10-a.conflist", "{}")
	now := time.Now()
	c := diskfile.Read(path, now, MaxSize)
	if c.Fresh(c.ID) {
		t.Error("a file written just now is trusted by its stat data")
	}
	c = diskfile.Read(path, now.Add(diskfile.RacyWindow+time.Second), MaxSize)
	if !c.Fresh(c.ID) {
		t.Error("a file written long ago is read again each time")
	}
	s := NewScanner(dir)
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	if one, two := s.read(path), s.read(path); one != two {
		t.Error("an unchanged old file is read twice")
	}
}

// A file that is removed after it was listed is not there: there is nothing to
// report.
func TestFileVanishesWhileScanning(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stop := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := 0; ; i++ {
			path := filepath.Join(dir, fmt.Sprintf("%d.conflist", i)) // none comes back
			select {
			case <-stop:
				return
			default:
				if err := errors.Join(os.WriteFile(path, []byte("{}"), 0o644), os.Remove(path)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	s := NewScanner(dir)
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		for _, f := range s.Scan().Files {
			if errors.Is(f.Err, fs.ErrNotExist) {
				t.Errorf("%s %v", f.Path, f.Err)
			}
		}
	}
	close(stop)
	writer.Wait()
}

// BenchmarkScan is what the poll costs while nothing changes.
func BenchmarkScan(b *testing.B) {
	for _, files := range []int{300, 1000} {
		b.Run(strconv.Itoa(files), func(b *testing.B) {
			dir := b.TempDir()
			for i := range files {
				path := filepath.Join(dir, fmt.Sprintf("%04d.conflist", i))
				if err := os.WriteFile(path, fmt.Appendf(nil, `{"name":"n%d","plugins":[{"type":"fakenet"}]}`, i), 0o644); err != nil {
					b.Fatal(err)
				}
			}
			s := NewScanner(dir)
			s.now = func() time.Time { return time.Now().Add(time.Hour) }
			s.Scan()
			for b.Loop() {
				s.Scan()
			}
		})
	}
}
