// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package confdir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fsnotify/fsnotify"

	"github.com/cnireload/cnireload/internal/watchstub"
)

// The kernel has one watch for a directory, whatever its names. What any of the
// wishes asks for must be heard through it.
func TestOneDirectoryUnderTwoNames(t *testing.T) {
	t.Parallel()
	// Which name is watched is up to the order of a map.
	for range 20 {
		root := t.TempDir()
		dir, link := filepath.Join(root, "dir"), filepath.Join(root, "link")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(dir, link); err != nil {
			t.Fatal(err)
		}
		stub := watchstub.New()
		w := NewWatcher(func() (Notifier, error) { return stub, nil })
		if _, err := w.Arm([]Wish{{Dir: dir, Name: "net.d"}, {Dir: link}}); err != nil {
			t.Fatal(err)
		}
		list := stub.WatchList()
		if len(list) != 1 {
			t.Errorf("watched are %q", list)
		}
		if !w.relevant(filepath.Join(list[0], "portmap")) {
			t.Errorf("a change of %s/portmap is not heard", list[0])
		}
		w.Close()
	}
}

func TestRelevant(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	all, some := filepath.Join(root, "all"), filepath.Join(root, "some")
	for _, dir := range []string{all, some} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	stub := watchstub.New()
	w := NewWatcher(func() (Notifier, error) { return stub, nil })
	defer w.Close()
	if !w.relevant("/anything") {
		t.Error("before there is a filter everything matters")
	}
	if _, err := w.Arm([]Wish{{Dir: all}, {Dir: some, Name: "a"}, {Dir: some, Name: "b"}, {Dir: filepath.Join(some, "missing", "deep")}}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		filepath.Join(all, "x"):        true,
		all:                            true,
		some:                           true,
		filepath.Join(some, "a"):       true,
		filepath.Join(some, "b"):       true,
		filepath.Join(some, "c"):       false,
		filepath.Join(some, "missing"): true,
		"/somewhere/else":              true, // not asked for: better look
	} {
		if got := w.relevant(path); got != want {
			t.Errorf("relevant(%s) = %v", path, got)
		}
	}
	// Noise leaves no mark, the rest one, however much there is.
	stub.Event <- fsnotify.Event{Name: filepath.Join(some, "c"), Op: fsnotify.Write}
	stub.Event <- fsnotify.Event{Name: filepath.Join(some, "c"), Op: fsnotify.Write}
	if len(w.dirty) != 0 {
		t.Error("noise is marked")
	}
	for range 3 {
		stub.Event <- fsnotify.Event{Name: filepath.Join(some, "a"), Op: fsnotify.Chmod}
	}
	stub.Err <- errors.New("overflow")
	if len(w.dirty) != 1 {
		t.Error("a change is not marked")
	}
}

func TestExistingParent(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "a", "real"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(root, "a", "real"), filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(root, "dangling")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		in        Wish
		dir, name string
	}{
		{Wish{Dir: root}, root, ""},
		{Wish{Dir: root, Name: "x"}, root, "x"},
		{Wish{Dir: filepath.Join(root, "a") + "/"}, filepath.Join(root, "a"), ""},
		{Wish{Dir: filepath.Join(root, "no", "such")}, root, "no"},
		{Wish{Dir: filepath.Join(root, "no", "such"), Name: "x"}, root, "no"},
		{Wish{Dir: filepath.Join(root, "dangling", "x")}, root, "dangling"},
		// ".." behind a symlink is the target's parent.
		{Wish{Dir: root + "/link/.."}, filepath.Join(root, "a"), ""},
	} {
		dir, name, _ := existing(tt.in)
		if dir != tt.dir || name != tt.name {
			t.Errorf("%+v: %s, %q, want %s, %q", tt.in, dir, name, tt.dir, tt.name)
		}
	}
	// Relative paths and the root come to an end.
	for _, dir := range []string{"no-such-dir/x", "/", "/no-such-dir-at-all/x"} {
		if got, _, _ := existing(Wish{Dir: dir}); strings.Contains(got, "no-such") {
			t.Errorf("%s: %s", dir, got)
		}
	}
}

func TestCleanPath(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "deep", "er"), 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(root, "link")
	if err := os.Symlink(filepath.Join(root, "deep", "er"), link); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		link + "/../x": filepath.Join(root, "deep", "x"), link + "/x": link + "/x", link + "/./": link,
		"/../a": "/a", "a/../b": "b", "../a": "../a", "": ".", "/nowhere/a/../b": "/nowhere/b",
	} {
		if got := CleanPath(path); got != want {
			t.Errorf("%q becomes %q, want %q", path, got, want)
		}
	}
}
