// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// loss is one way to lose the conf dir or the watch on it.
type loss struct {
	name string
	do   func(n *node)
	// state is what the report says of the watch then.
	state string
	// cause is what the condition names then; empty: the network stays ready.
	cause string
	// lasting is whether the last good content serves although the directory
	// cannot be read.
	lasting bool
	// back undoes it. A list of the given name is in the directory afterwards.
	back func(n *node, list string)
}

const (
	byInotify = "inotify"
	byPoll    = "polling"
	noDir     = "waiting for directory"
)

func (n *node) must(err error) {
	n.t.Helper()
	assert.NilError(n.t, err)
}

// list writes the conf dir's list.
func (n *node) list(name string) {
	n.t.Helper()
	n.write(n.conf("10-a.conflist"), c10(name))
}

// again makes the conf dir anew, with a list.
func again(n *node, name string) {
	n.must(os.MkdirAll(n.ConfDir, 0o755))
	n.list(name)
}

// swapDir has something else at the conf dir's place, and back, with no moment
// in between at which nothing is there.
func swapDir(make func(n *node, path string)) (do func(n *node), back func(n *node, list string)) {
	exchange := func(n *node) {
		n.must(unix.Renameat2(unix.AT_FDCWD, n.ConfDir, unix.AT_FDCWD, n.aside("other"), unix.RENAME_EXCHANGE))
	}
	return func(n *node) {
			make(n, n.aside("other"))
			exchange(n)
		}, func(n *node, list string) {
			exchange(n)
			n.list(list)
		}
}

func losses() []loss {
	all := []loss{
		{name: "removed", do: func(n *node) { n.must(os.RemoveAll(n.ConfDir)) },
			state: noDir, cause: "does not exist", back: again},
		{name: "renamed, and back", do: func(n *node) { n.must(os.Rename(n.ConfDir, n.ConfDir+".old")) },
			state: noDir, cause: "does not exist", back: func(n *node, list string) {
				n.must(os.Rename(n.ConfDir+".old", n.ConfDir))
				n.list(list)
			}},
		{name: "removed with its parents", do: func(n *node) { n.must(os.RemoveAll(filepath.Dir(filepath.Dir(n.ConfDir)))) },
			state: noDir, cause: "does not exist", back: again},
		{name: "made anew with other permissions", do: func(n *node) {
			n.must(os.RemoveAll(n.ConfDir))
			n.must(os.Mkdir(n.ConfDir, 0o700))
			n.list("private")
			// In between there is no directory, and then no list, and the
			// daemon may have seen either.
			n.inUse("private", polled)
		}, state: byInotify, back: func(n *node, list string) {
			info, err := os.Stat(n.ConfDir)
			n.must(err)
			assert.Equal(n.t, info.Mode().Perm(), os.FileMode(0o700), "changed behind the installer's back")
			n.must(os.Chmod(n.ConfDir, 0))
			n.must(os.Chmod(n.ConfDir, 0o755))
			n.list(list)
		}},
		{name: "parent replaced", do: func(n *node) {
			n.must(os.Rename(filepath.Dir(n.ConfDir), n.aside("parent")))
		}, state: noDir, cause: "does not exist", back: again},
		{name: "grandparent replaced at once", do: func(n *node) {
			etc := filepath.Dir(filepath.Dir(n.ConfDir))
			n.must(os.MkdirAll(n.aside("etc/cni/net.d"), 0o755))
			n.must(os.Rename(etc, n.aside("etc.old")))
			n.must(os.Rename(n.aside("etc"), etc))
		}, state: byInotify, cause: "no network config found", back: again},
		{name: "mounted over", do: func(n *node) { n.must(n.InNamespace("mount", "-t", "tmpfs", "none", n.ConfDir)) },
			state: byInotify, cause: "no network config found", back: func(n *node, list string) {
				n.must(n.InNamespace("umount", n.ConfDir))
				n.list(list)
			}},
		{name: "unmounted", do: func(n *node) {
			n.must(n.InNamespace("mount", "-t", "tmpfs", "none", n.ConfDir))
			n.write(n.aside("mounted"), c10("mounted"))
			n.must(n.InNamespace("cp", n.aside("mounted"), n.conf("10-a.conflist")))
			n.inUse("mounted", polled)
			n.watched(byInotify, polled)
			n.must(os.Remove(n.conf("10-a.conflist"))) // the one below
			n.must(n.InNamespace("umount", n.ConfDir))
		}, state: byInotify, cause: "no network config found", back: again},
		{name: "read-only", do: func(n *node) {
			n.must(n.InNamespace("mount", "--bind", n.ConfDir, n.ConfDir))
			n.must(n.InNamespace("mount", "-o", "remount,bind,ro", n.ConfDir))
			// Its writers are elsewhere.
			n.list("below")
			n.inUse("below", atOnce)
		}, state: byInotify, back: func(n *node, list string) {
			n.must(n.InNamespace("umount", n.ConfDir))
			n.list(list)
		}},
		{name: "overlay written from below", do: func(n *node) {
			for _, dir := range []string{"lower", "upper", "work"} {
				n.must(os.MkdirAll(n.aside(dir), 0o755))
			}
			n.write(filepath.Join(n.aside("lower"), "90-z.conflist"), c10("lower"))
			n.write(filepath.Join(n.aside("upper"), "20-b.conflist"), c10("upper"))
			n.must(n.InNamespace("mount", "-t", "overlay", "-o",
				"lowerdir="+n.aside("lower")+",upperdir="+n.aside("upper")+",workdir="+n.aside("work"), "overlay", n.ConfDir))
			n.inUse("upper", polled)
			n.must(os.WriteFile(filepath.Join(n.aside("upper"), "20-b.conflist"), []byte(c10("edited")), 0o644))
			n.inUse("edited", polled)
		}, state: byInotify, back: func(n *node, list string) {
			n.must(n.InNamespace("umount", n.ConfDir))
			n.list(list)
		}},
		{name: "events lost", do: func(n *node) {
			// While the daemon is stopped, more happens than the kernel keeps.
			queued, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
			n.must(err)
			limit, err := strconv.Atoi(strings.TrimSpace(string(queued)))
			n.must(err)
			n.must(syscall.Kill(n.PID(), syscall.SIGSTOP))
			for range limit/2 + 500 {
				n.must(os.WriteFile(n.conf("burst"), nil, 0o644))
				n.must(os.Remove(n.conf("burst")))
			}
			n.list("overflow")
			n.must(syscall.Kill(n.PID(), syscall.SIGCONT))
			n.inUse("overflow", atOnce)
			n.calm(atOnce)
		}, state: byInotify, back: func(n *node, list string) { n.list(list) }},
	}
	for _, other := range []struct {
		name, state, cause string
		lasting            bool
		make               func(n *node, path string)
		then               func(n *node)
	}{
		{name: "a symlink in its place, re-pointed", state: byInotify, make: func(n *node, path string) {
			for _, name := range []string{"one", "two"} {
				n.must(os.MkdirAll(n.aside(name), 0o755))
				n.write(filepath.Join(n.aside(name), "10-a.conflist"), c10(name))
			}
			n.must(os.Symlink(n.aside("one"), path))
		}, then: func(n *node) {
			n.inUse("one", atOnce)
			n.must(os.Symlink(n.aside("two"), n.ConfDir+".new"))
			n.must(os.Rename(n.ConfDir+".new", n.ConfDir))
			n.inUse("two", atOnce)
			n.write(filepath.Join(n.aside("two"), "10-a.conflist"), c10("edited"))
			n.inUse("edited", atOnce)
		}},
		{name: "a dangling symlink in its place", state: noDir, cause: "does not exist", make: func(n *node, path string) {
			n.must(os.Symlink("/nowhere/net.d", path))
		}},
		{name: "a file in its place", lasting: true, make: func(n *node, path string) { n.must(os.WriteFile(path, nil, 0o644)) }},
		{name: "a FIFO in its place", lasting: true, make: func(n *node, path string) { n.must(mkfifo(path)) }},
		{name: "a link to itself in its place", lasting: true, make: func(n *node, path string) {
			n.must(os.Symlink(n.ConfDir, path))
		}},
	} {
		do, back := swapDir(other.make)
		all = append(all, loss{name: other.name, back: back, state: other.state, cause: other.cause, lasting: other.lasting, do: func(n *node) {
			do(n)
			if other.then != nil {
				other.then(n)
			}
		}})
	}
	return all
}

// idle checks that the daemon does nothing for a while: no loop, no flood of
// the log.
func (n *node) idle(during time.Duration) {
	n.t.Helper()
	lines := n.logLines("")
	used := n.cpuDuring(during)
	assert.Assert(n.t, used < during/20, "the daemon used %v of CPU in %v of doing nothing", used, during)
	if more := n.logLines("") - lines; more > 0 {
		n.t.Errorf("%d log lines about nothing new:\n%s", more, n.LogTail(more))
	}
}

// calm waits until the daemon has gone through what happened: the queue that was full is handed over in
// pieces, of which the first one is enough to read the dir again.
func (n *node) calm(within time.Duration) {
	n.t.Helper()
	begin, during := time.Now(), 200*time.Millisecond
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		if used := n.cpuDuring(during); used >= during/20 {
			return fmt.Errorf("the daemon uses %v of CPU in %v", used, during)
		}
		return nil
	}))
	n.t.Logf("calm after %s", short(time.Since(begin)))
}

// cpuDuring is what the daemon itself uses while that time passes.
func (n *node) cpuDuring(during time.Duration) time.Duration {
	n.t.Helper()
	before := n.cpu()
	time.Sleep(during)
	return n.cpu() - before
}

// cpu is what the daemon itself has used.
func (n *node) cpu() time.Duration {
	n.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.PID()))
	assert.NilError(n.t, err)
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	var ticks time.Duration
	for _, f := range fields[11:13] {
		v, err := strconv.Atoi(f)
		assert.NilError(n.t, err)
		ticks += time.Duration(v)
	}
	return ticks * 10 * time.Millisecond // the unit is the same on every machine
}

// serving waits until a runtime handler, "" for the default one, is ready with
// the list of that name.
func (n *node) serving(handler, name string, within time.Duration) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		r, err := n.Report(n.t.Context(), handler)
		if err == nil && (!r.Ready || networkIndex(r, name) < 0) {
			err = fmt.Errorf("handler %q: want %q, got ready %t %q, %+v", handler, name, r.Ready, r.Message, r.Networks)
		}
		return err
	}))
}

// TestWatchLoss loses the conf dir in every way there is, one after the other
// on one daemon, with a second handler that shares the dir.
func TestWatchLoss(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
	n.ConfDir = filepath.Join(n.Base, "etc", "cni", "net.d")
	n.Handlers = map[string]harness.Handler{"shared": {ConfDir: n.ConfDir}}
	n.start()
	// A short look is enough to see a busy loop.
	look := time.Second
	if os.Getenv("CNIRELOAD_LONG") != "" {
		look = 5 * time.Second
	}
	t.Run("missing at start", func(t *testing.T) {
		n := n.in(t)
		// It is made, as by stock: a plain copy into it works.
		n.notReady(soon, "no network config found in "+n.ConfDir)
		n.watched(byInotify, soon)
		n.idle(look)
		n.write(n.conf("10-first.conflist"), c10("first"))
		n.inUse("first", atOnce)
		n.watched(byInotify, polled)
	})
	for i, l := range losses() {
		t.Run(l.name, func(t *testing.T) {
			n := n.in(t)
			lines := n.logLines("")
			l.do(n)
			switch {
			case l.lasting:
				assert.NilError(t, harness.Poll(t.Context(), polled, func() error {
					r := n.report()
					if !r.Ready || !r.Stale || !strings.Contains(r.LastError, n.ConfDir) {
						return fmt.Errorf("want the last good content in use, got ready %t, stale %t, last error %q", r.Ready, r.Stale, r.LastError)
					}
					return nil
				}))
				// What is said a second later is said once.
				time.Sleep(1200 * time.Millisecond)
			case l.cause != "":
				n.notReady(polled, l.cause, n.ConfDir)
				assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "held"}), l.cause))
			default:
				n.stays(true, 100*time.Millisecond)
			}
			if l.state != "" {
				n.watched(l.state, polled)
			}
			assert.Assert(t, n.Alive())
			time.Sleep(100 * time.Millisecond)
			n.idle(look)

			name := fmt.Sprintf("back%d", i)
			l.back(n, name)
			begin := time.Now()
			n.inUse(name, polled)
			took := time.Since(begin)
			n.watched(byInotify, polled)
			n.serving("shared", name, polled)
			if r := n.report(); r.Stale {
				t.Errorf("still stale: %s", r.LastError)
			}
			assert.NilError(t, n.add(name))
			// The watch works again: this is sooner than any poll.
			n.list(name + "x")
			n.inUse(name+"x", atOnce)
			n.serving("shared", name+"x", atOnce)
			time.Sleep(100 * time.Millisecond)
			said := n.logLines("") - lines
			t.Logf("in use %s after it is back, %d log lines of two networks", short(took), said)
			assert.Assert(t, said < 40, "%s", n.LogTail(said))
			leftovers, err := filepath.Glob(n.aside("*"))
			assert.NilError(t, err)
			for _, path := range leftovers {
				n.must(os.RemoveAll(path))
			}
		})
	}
	n.idle(5 * time.Second)
}

// in is the same node in another test.
func (n *node) in(t *testing.T) *node {
	inner := *n
	inner.t = t
	return &inner
}

// TestOddPaths has conf dirs whose names are not clean.
func TestOddPaths(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
	// The link leads into deep/er, so that link/.. is deep.
	n.must(os.MkdirAll(filepath.Join(n.Base, "deep", "er"), 0o755))
	n.must(os.Symlink(filepath.Join("deep", "er"), filepath.Join(n.Base, "link")))
	dirs := map[string]struct{ name, real string }{
		"slash": {n.Base + "/slash.d/", n.Base + "/slash.d"},
		"twice": {n.Base + "//twice.d//.", n.Base + "/twice.d"},
		"dots":  {n.Base + "/bin/../dots.d", n.Base + "/dots.d"},
		"link":  {n.Base + "/link/../link.d", n.Base + "/deep/link.d"},
	}
	n.Handlers = map[string]harness.Handler{}
	for handler, dir := range dirs {
		n.Handlers[handler] = harness.Handler{ConfDir: dir.name}
		n.must(os.MkdirAll(dir.real, 0o755))
		n.write(filepath.Join(dir.real, "10-a.conflist"), c10(handler))
	}
	n.list("default")
	n.start()
	for handler, dir := range dirs {
		t.Run(handler, func(t *testing.T) {
			n := n.in(t)
			n.serving(handler, handler, soon)
			file := filepath.Join(dir.real, "10-a.conflist")
			n.write(file, c10("changed"))
			n.serving(handler, "changed", atOnce)
			n.must(os.RemoveAll(dir.real))
			assert.NilError(t, harness.Poll(t.Context(), polled, func() error { return n.handlerSays(handler, "does not exist") }))
			n.must(os.MkdirAll(dir.real, 0o755))
			n.write(file, c10("again"))
			n.serving(handler, "again", polled)
			n.write(file, c10("more"))
			n.serving(handler, "more", atOnce)
		})
	}
	n.idle(time.Second)
}

// TestUnreadableDir takes the conf dir's permissions from a daemon that is
// root only in a user namespace; real root can read everything.
func TestUnreadableDir(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true, UserSysctls: map[string]string{}})
	n.list("a")
	n.start()
	n.inUse("a", soon)
	n.watched(byInotify, soon)
	const stranger = 100000 // not a user of that namespace
	hide := func() {
		n.must(os.Chown(n.ConfDir, stranger, stranger))
		n.must(os.Chmod(n.ConfDir, 0o700))
	}
	show := func() {
		n.must(os.Chown(n.ConfDir, 0, 0))
		n.must(os.Chmod(n.ConfDir, 0o755))
	}
	hide()
	assert.NilError(t, harness.Poll(t.Context(), polled, func() error {
		r := n.report()
		if !r.Ready || !r.Stale || !strings.Contains(r.LastError, "permission denied") {
			return fmt.Errorf("want the last good content in use, got ready %t, stale %t, last error %q", r.Ready, r.Stale, r.LastError)
		}
		return nil
	}))
	assert.NilError(t, n.add("p"))
	time.Sleep(1200 * time.Millisecond)
	n.idle(time.Second)

	// After a restart nothing is known of it.
	n.restart()
	n.notReady(soon, n.ConfDir, "permission denied")
	cause := n.watched(byPoll, soon)
	assert.Assert(t, cmp.Contains(cause, "permission denied"))
	n.idle(time.Second)
	show()
	n.inUse("a", polled)
	n.watched(byInotify, polled)

	// The file alone.
	n.must(os.Chown(n.conf("10-a.conflist"), stranger, stranger))
	n.must(os.Chmod(n.conf("10-a.conflist"), 0))
	assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
		if r := n.report(); !r.Ready || !r.Stale || !strings.Contains(r.LastError, "permission denied") {
			return fmt.Errorf("want the last good content in use, got ready %t, stale %t, last error %q", r.Ready, r.Stale, r.LastError)
		}
		return nil
	}))
	n.must(os.Chmod(n.conf("10-a.conflist"), 0o644))
	assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
		if r := n.report(); r.Stale {
			return fmt.Errorf("still stale: %s", r.LastError)
		}
		return nil
	}))
}
