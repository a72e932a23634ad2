// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/testenv"
	"github.com/cnireload/cnireload/internal/watchstub"
)

// isWatching waits until the network is told of changes at once.
func isWatching(t *testing.T, n *Network) {
	t.Helper()
	watchBecomes(t, n, WatchInotify)
}

func watchBecomes(t *testing.T, n *Network, mode WatchMode, words ...string) {
	t.Helper()
	eventually(t, func() string {
		w := n.Snapshot().Watch
		if w.Mode != mode {
			return fmt.Sprintf("watch is %+v, not %s", w, mode)
		}
		if len(words) > 0 {
			return testenv.MissingWords(errors.New(w.Cause), words)
		}
		return ""
	})
}

// Each way in which a file can come, change and go is noticed at once: the
// network under test does not poll.
func TestEveryChangeIsNoticed(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	n := d.started()
	isWatching(t, n)
	becomesUnready(t, n, "no network config found in "+d.conf)
	path := filepath.Join(d.conf, "10-a.conflist")
	elsewhere := filepath.Join(d.answers, "elsewhere")
	list := func(name string) string { return conflist("1.0.0", name, "fakenet") }
	called := func(name string) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); len(s.Networks) != 1 || s.Networks[0].Name != name || !s.Ready() {
				return fmt.Sprintf("%s is not in use but %+v", name, s.Networks)
			}
			return ""
		})
	}
	gone := func() {
		t.Helper()
		becomesUnready(t, n, "no network config found")
	}

	// Moved in from another directory, out and back (S1).
	d.must(os.WriteFile(elsewhere, []byte(list("moved")), 0o644))
	d.must(os.Rename(elsewhere, path))
	called("moved")
	d.must(os.Rename(path, elsewhere))
	gone()
	d.must(os.Rename(elsewhere, path))
	called("moved")
	// Hard link.
	d.must(os.Remove(path))
	gone()
	d.must(os.WriteFile(elsewhere, []byte(list("linked")), 0o644))
	d.must(os.Link(elsewhere, path))
	called("linked")
	// Written in place, in two halves (S5).
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	d.must(err)
	text := list("halves")
	_, err = f.WriteString(text[:20])
	d.must(err)
	stays(t, 50*time.Millisecond, func() string { return errorText(n.Status()) })
	_, err = f.WriteString(text[20:])
	d.must(err)
	d.must(f.Close())
	called("halves")
	// Temporary name in the same directory, then renamed.
	d.must(os.WriteFile(path+".tmp", []byte(list("renamed")), 0o644))
	d.must(os.Rename(path+".tmp", path))
	called("renamed")
	// One that sorts first.
	first := filepath.Join(d.conf, "05-first.conflist")
	d.must(os.WriteFile(first, []byte(list("first")), 0o644))
	called("first")
	d.must(os.Rename(first, filepath.Join(d.conf, "50-first.conflist")))
	called("renamed")
	d.must(os.Remove(filepath.Join(d.conf, "50-first.conflist")))
	// Made unreadable and back: to root it stays readable.
	d.must(os.Chmod(path, 0))
	d.must(os.Chmod(path, 0o644))
	called("renamed")
	d.must(os.Remove(path))
	gone()

	// A symlink; its target edited, replaced, removed and made again; re-pointed (S2).
	target := filepath.Join(d.bin, "target.json")
	d.must(os.WriteFile(target, []byte(list("target")), 0o644))
	d.must(os.Symlink(target, path))
	called("target")
	d.must(os.WriteFile(target, []byte(list("edited")), 0o644))
	called("edited")
	d.replace(target, list("replaced"), 0o644)
	called("replaced")
	d.must(os.Remove(target))
	becomesUnready(t, n, "is a symlink whose target does not exist")
	d.replace(target, list("again"), 0o644)
	called("again")
	other := filepath.Join(d.log, "other.json")
	d.must(os.WriteFile(other, []byte(list("other")), 0o644))
	d.must(os.Symlink(other, path+".new"))
	d.must(os.Rename(path+".new", path))
	called("other")
	d.must(os.WriteFile(other, []byte(list("edited-other")), 0o644))
	called("edited-other")
	d.must(os.Remove(path))
	gone()
}

// A ConfigMap volume: the file is a symlink through "..data", which is
// re-pointed to a new directory.
func TestConfigMapVolume(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	volume := filepath.Join(d.answers, "volume")
	publish := func(dir, name string) {
		d.replace(filepath.Join(volume, dir, "10-a.conflist"), conflist("1.0.0", name, "fakenet"), 0o644)
		d.must(os.Symlink(dir, filepath.Join(volume, "..data_tmp")))
		d.must(os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")))
	}
	publish("..one", "one")
	d.must(os.Symlink("..data/10-a.conflist", filepath.Join(volume, "10-a.conflist")))
	d.must(os.Symlink(filepath.Join(volume, "10-a.conflist"), filepath.Join(d.conf, "10-a.conflist")))
	n := d.started()
	for _, name := range []string{"two", "three", "four"} {
		becomesReady(t, n)
		publish(".."+name, name)
		eventually(t, func() string {
			if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != name {
				return fmt.Sprintf("%s is not in use, %v", name, s.Err())
			}
			return ""
		})
	}
}

func TestDropInsAreWatched(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	isWatching(t, n)
	plugins := func(want int) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); len(s.Networks) != 1 || len(s.Networks[0].Plugins) != want {
				return fmt.Sprintf("%+v", s.Networks)
			}
			return ""
		})
	}
	one := filepath.Join(d.conf, "a", "10-one.conf")
	d.replace(one, `{"type":"portmap"}`, 0o644) // makes the directory as well
	plugins(2)
	d.replace(filepath.Join(d.conf, "a", "20-two.conf"), `{"type":"portmap","x":1}`, 0o644)
	plugins(3)
	d.must(os.WriteFile(one, []byte("{"), 0o644))
	eventually(t, func() string { return testenv.MissingWords(n.Snapshot().Networks[0].StaleError, []string{one}) })
	plugins(3)
	d.must(os.Remove(one))
	plugins(2)
	d.remove("a")
	plugins(1)
	d.replace(one, `{"type":"portmap"}`, 0o644)
	plugins(2)
}

// The conf dir is missing, comes, goes, is replaced: a state, never an end (S3,
// S4, S12). The library never makes it.
func TestConfDirComesAndGoes(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.must(os.Remove(d.conf)) // made at start, and never again
	n := d.started()
	fill := func(name string) {
		t.Helper()
		d.write("10-a.conflist", conflist("1.0.0", name, "fakenet"))
	}
	called := func(name string) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != name {
				return fmt.Sprintf("%s is not in use: %v", name, s.Err())
			}
			return ""
		})
		isWatching(t, n)
	}
	missing := func() {
		t.Helper()
		becomesUnready(t, n, "conf dir "+d.conf+" does not exist")
		watchBecomes(t, n, WatchWaiting, "no such file or directory")
		if _, err := os.Stat(d.conf); err == nil {
			t.Error("the conf dir was made")
		}
	}
	fill("made")
	called("made")

	d.must(os.RemoveAll(d.conf))
	missing()
	fill("made-again")
	called("made-again")

	d.must(os.Rename(d.conf, d.conf+".away"))
	missing()
	d.must(os.WriteFile(filepath.Join(d.conf+".away", "10-a.conflist"), []byte(conflist("1.0.0", "back", "fakenet")), 0o644))
	d.must(os.Rename(d.conf+".away", d.conf))
	called("back")
	fill("still-watched")
	called("still-watched")

	// Another directory in its place, in one step.
	d.must(os.Rename(d.conf, d.conf+".old"))
	next := d.conf + ".next"
	d.replace(filepath.Join(next, "10-a.conflist"), conflist("1.0.0", "next", "fakenet"), 0o644)
	d.must(os.Rename(next, d.conf))
	called("next")
	fill("in-the-next")
	called("in-the-next")
	// The old one no longer matters.
	d.must(os.WriteFile(filepath.Join(d.conf+".old", "10-a.conflist"), []byte("{"), 0o644))
	stays(t, 50*time.Millisecond, func() string { return errorText(n.Status()) })

	// A symlink in its place, re-pointed.
	d.must(os.Rename(d.conf, d.conf+".one"))
	missing()
	d.must(os.Symlink(d.conf+".one", d.conf))
	called("in-the-next")
	d.replace(filepath.Join(d.conf+".two", "10-a.conflist"), conflist("1.0.0", "two", "fakenet"), 0o644)
	d.must(os.Symlink(d.conf+".two", d.conf+".link"))
	d.must(os.Rename(d.conf+".link", d.conf))
	called("two")
	fill("in-two")
	called("in-two")
	d.must(os.Remove(d.conf))
	missing()
}

// A parent of the conf dir is renamed and the path made anew. Only the nearest
// parent is watched, so this is the poll's to notice.
func TestParentIsReplaced(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	parent := filepath.Join(d.answers, "etc")
	d.conf = filepath.Join(parent, "cni", "net.d")
	d.write("10-a.conflist", conflist("1.0.0", "old", "fakenet"))
	n := d.network()
	n.Start()
	becomesReady(t, n)
	d.must(os.Rename(parent, parent+".old"))
	becomesUnready(t, n, "does not exist")
	d.write("10-a.conflist", conflist("1.0.0", "new", "fakenet"))
	becomesReady(t, n)
	d.must(os.Rename(parent, parent+".older"))
	d.must(os.Rename(parent+".old", parent))
	eventually(t, func() string {
		if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != "old" {
			return fmt.Sprintf("%+v, %v", s.Networks, s.Err())
		}
		return ""
	})
	// Watched again, without the poll.
	isWatching(t, n)
}

// No watch can be had (S11): the network works by polling, says why, and goes
// back to being told when that is possible.
func TestNoNotifier(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	n := d.network()
	var refuse atomic.Bool
	refuse.Store(true)
	n.notifier = func() (confdir.Notifier, error) {
		if refuse.Load() {
			return nil, errors.New("too many open files")
		}
		return confdir.NewNotifier()
	}
	n.Start()
	watchBecomes(t, n, WatchPolling, "cannot be notified of changes", "too many open files")
	d.write("10-a.conflist", good)
	becomesReady(t, n)
	d.must(os.RemoveAll(d.conf))
	becomesUnready(t, n, "does not exist")
	d.write("10-a.conflist", good)
	becomesReady(t, n)
	refuse.Store(false)
	isWatching(t, n)
	if s := n.Snapshot(); s.Watch.Cause != "" || !s.Ready() {
		t.Errorf("%+v, %v", s.Watch, s.Err())
	}
}

// One directory cannot be watched, the others can.
func TestOneWatchIsRefused(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	stub := watchstub.New()
	stub.Refuse(errors.New("no space left on device"))
	n := d.network()
	n.notifier = func() (confdir.Notifier, error) { return stub, nil }
	n.Start()
	watchBecomes(t, n, WatchPolling, "cannot watch ", "no space left on device")
	if cause := n.Snapshot().Watch.Cause; strings.Contains(cause, "\n") || strings.Count(cause, "cannot watch") < 2 {
		t.Errorf("more than one line, or not all: %q", cause)
	}
	stub.Refuse(nil)
	isWatching(t, n)
}

// The backend says that it missed something, or ends.
func TestNotifierFails(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	n := d.network()
	n.pace.poll = time.Hour
	var mu sync.Mutex
	var stubs []*watchstub.Notifier
	last := func() *watchstub.Notifier {
		mu.Lock()
		defer mu.Unlock()
		return stubs[len(stubs)-1]
	}
	n.notifier = func() (confdir.Notifier, error) {
		mu.Lock()
		defer mu.Unlock()
		stubs = append(stubs, watchstub.New())
		return stubs[len(stubs)-1], nil
	}
	n.Start()
	becomesUnready(t, n, "no network config found")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	stays(t, 50*time.Millisecond, func() string {
		if n.Status() == nil {
			return "a change was noticed without an event"
		}
		return ""
	})
	last().Err <- fsnotify.ErrEventOverflow
	becomesReady(t, n)

	// The backend ends by itself: looked at once, and there is a new one.
	d.write("10-a.conflist", conflist("1.0.0", "b", "fakenet"))
	first := last()
	d.must(first.Close())
	eventually(t, func() string {
		if s := n.Snapshot(); s.Networks[0].Name != "b" {
			return "the change that came with the end was not noticed"
		}
		return ""
	})
	if last() == first {
		t.Fatal("no new backend")
	}
	if list := last().WatchList(); len(list) < 3 {
		t.Errorf("the new backend watches %q", list)
	}
	d.write("10-a.conflist", conflist("1.0.0", "c", "fakenet"))
	last().Event <- fsnotify.Event{Name: filepath.Join(d.conf, "10-a.conflist"), Op: fsnotify.Create}
	eventually(t, func() string {
		if s := n.Snapshot(); s.Networks[0].Name != "c" {
			return "the new backend's event was not noticed"
		}
		return ""
	})
}

// The kernel drops the watch of a directory that is removed, also when another
// takes its name and even its inode before anybody looks.
func TestDroppedWatchIsRenewed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stub := watchstub.New()
	w := confdir.NewWatcher(func() (confdir.Notifier, error) { return stub, nil })
	defer w.Close()
	arm := func() bool {
		t.Helper()
		added, err := w.Arm([]confdir.Wish{{Dir: dir}})
		if err != nil {
			t.Fatal(err)
		}
		return added
	}
	if !arm() || arm() {
		t.Error("the first time adds a watch, the second does not")
	}
	if err := stub.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if !arm() {
		t.Error("a watch that the backend no longer has was not renewed")
	}
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if !arm() {
		t.Error("another directory of that name is not watched")
	}
	if added, err := w.Arm(nil); added || err != nil || len(stub.WatchList()) != 0 {
		t.Errorf("what is no longer wanted is watched: %q, %v", stub.WatchList(), err)
	}
}

// A storm of events costs few looks, and the last content wins.
func TestEventStorm(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.0.0", "n0", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	before := n.Snapshot().Generation
	for i := range 400 {
		d.overwrite("10-a.conflist", conflist("1.0.0", fmt.Sprintf("n%d", i), "fakenet"))
		if err := n.Status(); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
	}
	eventually(t, func() string {
		if s := n.Snapshot(); s.Networks[0].Name != "n399" || s.Networks[0].StaleError != nil || !s.Ready() {
			return fmt.Sprintf("%+v", s.Networks)
		}
		return ""
	})
	if got := n.Snapshot().Generation - before; got > 400 {
		t.Errorf("%d generations for 400 writes", got)
	}
	if got := d.count("fakenet", "VERSION"); got != 1 {
		t.Errorf("%d VERSION for a plugin that did not change", got)
	}
}

// With nothing to notice, the loop only polls.
func TestIdle(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		d.fakeTime(n, answersVersions)
		lines := recordLog(n)
		n.Start()
		synctest.Wait()
		lines.take()
		s := n.Snapshot()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := lines.take(); len(got) != 0 {
			t.Errorf("%q", got)
		}
		if n.Snapshot() != s {
			t.Error("a snapshot was published with nothing new in it")
		}
	})
}

// The conf dir is reached through ".." behind a symlink: what is listed there
// is read there, and watched there.
func TestDotsBehindASymlink(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap")
	d.must(os.MkdirAll(filepath.Join(d.conf, "deep", "er"), 0o755))
	link := filepath.Join(d.answers, "link")
	d.must(os.Symlink(filepath.Join(d.conf, "deep", "er"), link))
	file := filepath.Join(d.conf, "deep", "10-a.conflist")
	list := func(name string) string { return conflist("1.0.0", name, "fakenet") }
	d.replace(file, list("a"), 0o644)
	n := d.started(WithPluginConfDir(link + "/.."))
	becomesReady(t, n)
	isWatching(t, n)
	uses := func(name string, dropIns int) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != name || len(s.Networks[0].DropIns) != dropIns {
				return fmt.Sprintf("want %s, got %+v, %v", name, s.Networks, s.Err())
			}
			return ""
		})
	}
	d.replace(file, list("b"), 0o644)
	uses("b", 0)
	d.replace(filepath.Join(d.conf, "deep", "b", "10.conf"), `{"type":"portmap"}`, 0o644)
	uses("b", 1)
}

// lateNotifier makes something of a directory just before it is watched, when
// nobody is told of it.
type lateNotifier struct {
	confdir.Notifier
	before func(path string)
}

func (l lateNotifier) Add(path string) error {
	l.before(path)
	return l.Notifier.Add(path)
}

// The conf dir comes after it was missed and before its parent is watched: it
// is read, so it must be watched, too.
func TestWatchOfDirThatComesMeanwhile(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a")
	parent := filepath.Join(d.answers, "etc")
	d.conf = filepath.Join(parent, "net.d")
	list := func(name string) { d.write("10-a.conflist", conflist("1.0.0", name, "a")) }
	uses := func(n *Network, name string) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); len(s.Networks) != 1 || s.Networks[0].Name != name || s.Cause != nil {
				return fmt.Sprintf("in use is %+v, want %s", s.Networks, name)
			}
			return ""
		})
	}
	list("zeroth")
	n := d.network()
	n.pace.poll = time.Hour
	var late atomic.Bool
	n.notifier = func() (confdir.Notifier, error) {
		inner, err := confdir.NewNotifier()
		return lateNotifier{inner, func(path string) {
			if path == parent && late.CompareAndSwap(true, false) {
				list("first")
			}
		}}, err
	}
	n.Start()
	uses(n, "zeroth")
	d.must(os.Rename(parent, parent+".old"))
	becomesUnready(t, n, "does not exist")
	late.Store(true)
	d.must(os.Mkdir(parent, 0o755))
	uses(n, "first")
	list("second")
	uses(n, "second")
}
