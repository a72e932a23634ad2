// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

// arrival is one run of one way in which a change can arrive. Its two marks
// are network names that appear nowhere else.
type arrival struct {
	*node
	path     string // the file of the change
	old, new string // marks of what is there before, if anything, and after
	begin    time.Time
}

// now marks the moment at which the change is complete: just before the call
// that completes it.
func (a *arrival) now() { a.begin = time.Now() }

func (a *arrival) must(err error) {
	a.t.Helper()
	assert.NilError(a.t, err)
}

// list is a configuration with that mark.
func (a *arrival) list(mark string) string { return c10(mark) }

// put writes a file in one go, in place.
func (a *arrival) put(path, mark string) {
	a.t.Helper()
	a.must(os.WriteFile(path, []byte(a.list(mark)), 0o644))
}

// sight is what the daemon says at one moment.
type sight struct {
	ready  bool
	config string // the lists in use
	report harness.Report
}

func (a *arrival) look() sight {
	a.t.Helper()
	c, info, err := a.Info(a.t.Context())
	a.must(err)
	s := sight{ready: c.Ready, config: info["cniconfig"]}
	if a.Side == harness.Patched {
		s.report, err = harness.ReportFrom(info, "")
		a.must(err)
	}
	return s
}

// What tells that a change is in use.
var (
	newInUse = func(a *arrival, s sight) bool { return strings.Contains(s.config, a.new) }
	oldGone  = func(a *arrival, s sight) bool { return !strings.Contains(s.config, a.old) }
)

// stockDoes is what stock containerd does about a way.
type stockDoes int

const (
	never   stockDoes = iota // it never notices
	notices                  // it notices
	absent                   // it does not look at this at all
)

// way is one way in which a change can arrive.
type way struct {
	name  string
	stock stockDoes
	// given prepares; the old mark is in use afterwards if it is in a file.
	given func(a *arrival)
	do    func(a *arrival)
	seen  func(a *arrival, s sight) bool
	// within is more than usual where no event tells, or something has to time
	// out first.
	within time.Duration
	// noise is a change that must not be taken for one.
	noise bool
}

// before has a file with the old mark in use.
func before(a *arrival) { a.put(a.path, a.old) }

// linked has a symlink to a file elsewhere in use.
func linked(a *arrival) {
	a.put(a.aside("target"), a.old)
	a.must(os.Symlink(a.aside("target"), a.path))
}

// volume has files laid out in dir as the kubelet does for a ConfigMap.
func volume(a *arrival, dir, version, mark string) {
	a.must(os.MkdirAll(filepath.Join(dir, version), 0o755))
	a.put(filepath.Join(dir, version, "10-x.conflist"), mark)
}

// swap re-points ..data in dir, as the kubelet does.
func swap(a *arrival, dir, version string) {
	a.must(os.Symlink(version, filepath.Join(dir, "..data_tmp")))
	a.now()
	a.must(os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
}

func dropIn(mark string) []byte {
	return []byte(`{"type": "portmap", "note": "` + mark + `"}`)
}

// withDropIn has a list in use whose name, and so whose drop-in folder, is the
// old mark, with a drop-in that carries the new one.
func withDropIn(mark func(a *arrival) string) func(a *arrival) {
	return func(a *arrival) {
		name := "drop" + a.old
		a.must(os.MkdirAll(a.conf(name), 0o755))
		a.must(os.WriteFile(filepath.Join(a.conf(name), "10.conf"), dropIn(mark(a)), 0o644))
		a.put(a.path, name)
	}
}

func (a *arrival) dropIn() string { return filepath.Join(a.conf("drop"+a.old), "10.conf") }

func ways() []way {
	return []way{
		{name: "written in place, once", stock: notices,
			do: func(a *arrival) { a.put(a.path, a.new) }, seen: newInUse},
		{name: "written in place, in pieces", stock: notices,
			do: func(a *arrival) { pieces(a, 4, 20*time.Millisecond) }, seen: newInUse},
		{name: "written in place, slowly", stock: notices,
			do: func(a *arrival) { pieces(a, 20, 60*time.Millisecond) }, seen: newInUse},
		{name: "truncated and written", stock: notices, given: before,
			do: func(a *arrival) { a.put(a.path, a.new) }, seen: newInUse},
		{name: "overwritten, same size and time", stock: notices, given: before, do: func(a *arrival) {
			info, err := os.Stat(a.path)
			a.must(err)
			f, err := os.OpenFile(a.path, os.O_WRONLY, 0)
			a.must(err)
			a.now()
			_, err = f.WriteString(a.list(a.new))
			a.must(err)
			a.must(f.Close())
			a.must(os.Chtimes(a.path, info.ModTime(), info.ModTime()))
		}, seen: newInUse},
		{name: "temp + rename in the same dir", stock: notices, do: func(a *arrival) {
			a.put(a.path+".tmp", a.new)
			a.now()
			a.must(os.Rename(a.path+".tmp", a.path))
		}, seen: newInUse},
		{name: "temp + rename over the old file", stock: notices, given: before, do: func(a *arrival) {
			a.put(a.path+".tmp", a.new)
			a.now()
			a.must(os.Rename(a.path+".tmp", a.path))
		}, seen: newInUse},
		{name: "renamed in from elsewhere", stock: never, do: func(a *arrival) {
			a.put(a.aside("x"), a.new)
			a.now()
			a.must(os.Rename(a.aside("x"), a.path))
		}, seen: newInUse},
		{name: "renamed in over the old file", stock: never, given: before, do: func(a *arrival) {
			a.put(a.aside("x"), a.new)
			a.now()
			a.must(os.Rename(a.aside("x"), a.path))
		}, seen: newInUse},
		{name: "hard link", stock: never, do: func(a *arrival) {
			a.put(a.aside("x"), a.new)
			a.now()
			a.must(os.Link(a.aside("x"), a.path))
		}, seen: newInUse},
		{name: "hard link, written through the other name", stock: never, given: func(a *arrival) {
			a.put(a.aside("x"), a.old)
			a.must(os.Link(a.aside("x"), a.path))
		}, do: func(a *arrival) { a.put(a.aside("x"), a.new) }, seen: newInUse,
			// inotify tells the folder of the name that was used: left to the poll.
			within: 7 * time.Second},
		{name: "symlink", stock: never, do: func(a *arrival) {
			a.put(a.aside("target"), a.new)
			a.now()
			a.must(os.Symlink(a.aside("target"), a.path))
		}, seen: newInUse},
		{name: "symlink, target edited", stock: never, given: linked,
			do: func(a *arrival) { a.put(a.aside("target"), a.new) }, seen: newInUse},
		{name: "symlink, target replaced by rename", stock: never, given: linked, do: func(a *arrival) {
			a.put(a.aside("target.tmp"), a.new)
			a.now()
			a.must(os.Rename(a.aside("target.tmp"), a.aside("target")))
		}, seen: newInUse},
		{name: "symlink, target removed", stock: never, given: linked,
			do: func(a *arrival) { a.must(os.Remove(a.aside("target"))) }, seen: oldGone},
		{name: "symlink re-pointed by rename in the dir", stock: notices, given: linked, do: func(a *arrival) {
			a.put(a.aside("other"), a.new)
			a.must(os.Symlink(a.aside("other"), a.path+".tmp"))
			a.now()
			a.must(os.Rename(a.path+".tmp", a.path))
		}, seen: newInUse},
		{name: "symlink re-pointed by rename from elsewhere", stock: never, given: linked, do: func(a *arrival) {
			a.put(a.aside("other"), a.new)
			a.must(os.Symlink(a.aside("other"), a.aside("link")))
			a.now()
			a.must(os.Rename(a.aside("link"), a.path))
		}, seen: newInUse},
		{name: "..data swapped in the dir itself", stock: notices, given: func(a *arrival) {
			volume(a, a.ConfDir, "..1", a.old)
			a.must(os.Symlink("..1", a.conf("..data")))
			a.must(os.Symlink("..data/10-x.conflist", a.path))
		}, do: func(a *arrival) {
			volume(a, a.ConfDir, "..2", a.new)
			swap(a, a.ConfDir, "..2")
		}, seen: newInUse},
		{name: "..data swapped in a volume linked to", stock: never, given: func(a *arrival) {
			volume(a, a.aside("volume"), "..1", a.old)
			a.must(os.Symlink("..1", filepath.Join(a.aside("volume"), "..data")))
			a.must(os.Symlink("..data/10-x.conflist", filepath.Join(a.aside("volume"), "10-x.conflist")))
			a.must(os.Symlink(filepath.Join(a.aside("volume"), "10-x.conflist"), a.path))
		}, do: func(a *arrival) {
			volume(a, a.aside("volume"), "..2", a.new)
			swap(a, a.aside("volume"), "..2")
		}, seen: newInUse},
		{name: "moved in from another file system", stock: notices, do: func(a *arrival) {
			dir, err := os.MkdirTemp("/dev/shm", harness.Prefix)
			a.must(err)
			defer os.RemoveAll(dir)
			a.put(filepath.Join(dir, "x"), a.new)
			out, err := exec.Command("mv", filepath.Join(dir, "x"), a.path).CombinedOutput()
			assert.NilError(a.t, err, "%s", out)
		}, seen: newInUse},
		{name: "touched", noise: true, given: before, do: func(a *arrival) {
			a.must(os.Chtimes(a.path, time.Now(), time.Now()))
		}},
		{name: "mode changed", noise: true, given: before, do: func(a *arrival) {
			a.must(os.Chmod(a.path, 0o600))
		}},
		{name: "removed", stock: notices, given: before,
			do: func(a *arrival) { a.must(os.Remove(a.path)) }, seen: oldGone},
		{name: "moved out", stock: notices, given: before, do: func(a *arrival) {
			a.must(os.Rename(a.path, a.aside("x")))
		}, seen: oldGone},
		{name: "moved out and back", stock: never, given: func(a *arrival) {
			before(a)
			a.settled(a.old)
			a.must(os.Rename(a.path, a.aside("x")))
			a.gone(a.old)
			a.new = a.old
		}, do: func(a *arrival) { a.must(os.Rename(a.aside("x"), a.path)) }, seen: newInUse},
		{name: "renamed so that it is no list any more", stock: notices, given: before, do: func(a *arrival) {
			a.must(os.Rename(a.path, a.path+".disabled"))
		}, seen: oldGone},
		{name: "drop-in added with its dir", stock: never, given: func(a *arrival) {
			a.put(a.path, "drop"+a.old)
		}, do: func(a *arrival) {
			a.must(os.MkdirAll(filepath.Dir(a.dropIn()), 0o755))
			a.must(os.WriteFile(a.dropIn(), dropIn(a.new), 0o644))
		}, seen: newInUse},
		{name: "drop-in changed", stock: never, given: withDropIn(func(a *arrival) string { return a.old }),
			do: func(a *arrival) { a.must(os.WriteFile(a.dropIn(), dropIn(a.new), 0o644)) }, seen: newInUse},
		{name: "drop-in removed", stock: never, given: withDropIn(func(a *arrival) string { return "note" + a.new }),
			do:   func(a *arrival) { a.must(os.Remove(a.dropIn())) },
			seen: func(a *arrival, s sight) bool { return !strings.Contains(s.config, "note"+a.new) }},
		{name: "drop-in broken (named, last good stays)", stock: never, given: withDropIn(func(a *arrival) string { return a.new }),
			do: func(a *arrival) { a.must(os.WriteFile(a.dropIn(), []byte("{"), 0o644)) },
			seen: func(a *arrival, s sight) bool {
				return s.report.Stale && strings.Contains(s.report.LastError, a.dropIn()) && s.ready && newInUse(a, s)
			}},
		{name: "binary arrives", stock: absent, given: func(a *arrival) {
			a.must(os.WriteFile(a.path, []byte(conflist(a.old, "1.0.0", []string{"fakenet", "late"})), 0o644))
		}, do: func(a *arrival) { a.must(a.InstallFake("late")) },
			seen: func(a *arrival, s sight) bool { return s.ready }},
		{name: "binary removed (15 s of grace)", stock: absent, given: func(a *arrival) {
			a.must(a.InstallFake("late"))
			a.must(os.WriteFile(a.path, []byte(conflist(a.old, "1.0.0", []string{"fakenet", "late"})), 0o644))
		}, do: func(a *arrival) { a.must(os.Remove(filepath.Join(a.BinDirs[0], "late"))) },
			seen:   func(a *arrival, s sight) bool { return !s.ready },
			within: 20 * time.Second},
		{name: "template file changed", stock: never, given: func(a *arrival) {
			// A list that is not ours has precedence.
			a.must(os.Remove(a.conf(base)))
			a.gone("base")
			a.must(os.WriteFile(a.Template, []byte(a.list("tmpl"+a.old)), 0o644))
			assert.Equal(a.t, a.cidr("10.50.0.0/16"), "")
			a.settled("tmpl" + a.old)
		}, do: func(a *arrival) {
			a.must(os.WriteFile(a.Template+".tmp", []byte(a.list("tmpl"+a.new)), 0o644))
			a.now()
			a.must(os.Rename(a.Template+".tmp", a.Template))
		}, seen: newInUse},
	}
}

// base is the list that serves when no other is there.
const base = "50-base.conflist"

// pieces writes the file in so many pieces.
func pieces(a *arrival, count int, pause time.Duration) {
	text := a.list(a.new)
	f, err := os.Create(a.path)
	a.must(err)
	defer f.Close()
	size := (len(text) + count - 1) / count
	for piece := range slices.Chunk([]byte(text), size) {
		time.Sleep(pause)
		a.now()
		_, err := f.Write(piece)
		a.must(err)
	}
}

// nudge makes stock look: a plain write of any file in the conf dir does.
func (a *arrival) nudge() {
	a.t.Helper()
	if a.Side == harness.Stock {
		a.must(os.WriteFile(a.conf("unrelated"), []byte("x"), 0o644))
	}
}

func (a *arrival) settled(mark string) {
	a.t.Helper()
	a.nudge()
	a.must(harness.Poll(a.t.Context(), soon, func() error {
		if s := a.look(); !strings.Contains(s.config, mark) {
			return fmt.Errorf("want %q in use, got %s", mark, s.config)
		}
		return nil
	}))
}

func (a *arrival) gone(mark string) {
	a.t.Helper()
	a.must(harness.Poll(a.t.Context(), soon, func() error {
		if s := a.look(); strings.Contains(s.config, mark) {
			return fmt.Errorf("%q is still in use: %s", mark, s.config)
		}
		return nil
	}))
}

// reset empties the conf dir and puts the base list back.
func (a *arrival) reset() {
	a.t.Helper()
	a.must(os.WriteFile(a.conf(base), []byte(c10("base")), 0o644))
	entries, err := os.ReadDir(a.ConfDir)
	a.must(err)
	for _, e := range entries {
		if e.Name() != base {
			a.must(os.RemoveAll(a.conf(e.Name())))
		}
	}
	others, err := filepath.Glob(a.aside("*"))
	a.must(err)
	for _, path := range append(others, filepath.Join(a.BinDirs[0], "late")) {
		a.must(os.RemoveAll(path))
	}
	a.settled(`"base"`)
	a.gone(a.old)
	a.gone(a.new)
}

// once lets a change arrive and returns how long it took to be in use; false
// if it was not within the time.
func (a *arrival) once(w way, within time.Duration) (time.Duration, bool) {
	a.t.Helper()
	if w.given != nil {
		w.given(a)
		if strings.Contains(a.all(), a.old) {
			a.settled(a.old)
		}
		if a.Side == harness.Stock {
			time.Sleep(100 * time.Millisecond) // its last look is over
		}
		if w.seen(a, a.look()) {
			a.t.Fatal("seen before it was done")
		}
	}
	a.now()
	w.do(a)
	for {
		s := a.look()
		took := time.Since(a.begin)
		if w.seen(a, s) {
			return took, true
		}
		if took > within {
			if a.Side == harness.Patched {
				a.t.Logf("ready %t, in use %s", s.ready, s.config)
			}
			return took, false
		}
		time.Sleep(time.Millisecond)
	}
}

// all is the content of the whole conf dir, links followed.
func (a *arrival) all() string {
	var b bytes.Buffer
	paths, err := filepath.Glob(a.conf("*"))
	a.must(err)
	for _, path := range paths {
		if f, err := os.Open(path); err == nil {
			_, _ = io.Copy(&b, f)
			f.Close()
		}
	}
	return b.String()
}

// unmoved lets noise arrive and checks that nothing is made of it.
func (a *arrival) unmoved(w way) string {
	a.t.Helper()
	w.given(a)
	a.settled(a.old)
	time.Sleep(100 * time.Millisecond) // stock's last look is over
	// Stock says at debug level when it looks.
	text := map[harness.Side]string{harness.Stock: "receiving change event"}[a.Side]
	was, lines := a.look(), a.logLines(text)
	w.do(a)
	time.Sleep(quiet / 2)
	is := a.look()
	assert.Equal(a.t, is.config, was.config)
	assert.Equal(a.t, is.report.Generation, was.report.Generation)
	assert.Equal(a.t, a.logLines(text), lines, "log:\n%s", a.LogTail(5))
	return "no reload"
}

// logLines counts the lines of the daemon's log that contain a text.
func (n *node) logLines(text string) int {
	n.t.Helper()
	b, err := os.ReadFile(n.LogPath())
	assert.NilError(n.t, err)
	count := 0
	for line := range strings.SplitSeq(string(b), "\n") {
		if line != "" && strings.Contains(line, text) {
			count++
		}
	}
	return count
}

// TestArrival lets changes arrive in every way there is, on both sides, and
// prints how long each takes to be in use. CNIRELOAD_ROUNDS is how often; without
// it, ways that wait for a timer come once.
func TestArrival(t *testing.T) {
	rounds, slow := 3, 1
	if v := os.Getenv("CNIRELOAD_ROUNDS"); v != "" {
		var err error
		rounds, err = strconv.Atoi(v)
		assert.NilError(t, err)
		slow = rounds
	}
	cells := map[string]map[harness.Side]string{}
	for _, w := range ways() {
		cells[w.name] = map[harness.Side]string{harness.Stock: "not looked at"}
	}
	marks := 0
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		t.Run(string(side), func(t *testing.T) {
			if err := harness.Preflight("make test-e2e", side); err != nil {
				t.Fatal(err)
			}
			level := map[harness.Side]string{harness.Stock: "debug", harness.Patched: "info"}[side]
			n := prepare(t, harness.Options{Side: side, NoImage: true, LogLevel: level})
			n.Template = filepath.Join(n.Base, "net.tmpl")
			n.write(n.Template, c10("unused"))
			n.write(n.conf(base), c10("base"))
			n.start()
			n.waitReady(true, soon)
			for _, w := range ways() {
				if side == harness.Stock && w.stock == absent {
					continue
				}
				t.Run(w.name, func(t *testing.T) {
					run := func() *arrival {
						marks += 2
						inner := *n
						inner.t = t
						return &arrival{node: &inner, path: n.conf("10-x.conflist"), old: fmt.Sprintf("m%da", marks), new: fmt.Sprintf("m%da", marks+1)}
					}
					if w.noise {
						a := run()
						cells[w.name][side] = a.unmoved(w)
						a.reset()
						return
					}
					if side == harness.Stock && w.stock == never {
						a := run()
						took, noticed := a.once(w, quiet*2/3)
						cells[w.name][side] = "NO"
						if noticed {
							cells[w.name][side] = "yes, after " + short(took)
							t.Errorf("stock noticed after %v", took)
						}
						a.reset()
						return
					}
					// One round can be slow because the machine is busy; when most
					// are, nothing tells the daemon but its poll.
					within, usually, times := max(w.within, soon), 3*time.Second, rounds
					if w.within > 0 {
						usually, times = w.within, slow
					}
					var all []time.Duration
					for range times {
						a := run()
						took, noticed := a.once(w, within)
						if !noticed {
							cells[w.name][side] = "NO, not within " + short(within)
							t.Fatalf("not in use within %v", within)
						}
						all = append(all, took)
						a.reset()
					}
					slices.Sort(all)
					if usual := all[len(all)/2]; usual > usually {
						t.Errorf("usually in use after %v, want %v", usual, usually)
					}
					cells[w.name][side] = fmt.Sprintf("yes, median %s, p99 %s of %d", tenth(all[len(all)/2]), tenth(all[(len(all)*99+99)/100-1]), len(all))
				})
			}
			assert.Assert(t, n.Alive())
		})
	}
	var table bytes.Buffer
	tw := tabwriter.NewWriter(&table, 0, 0, 1, ' ', 0)
	fmt.Fprintln(tw, "way\t| stock\t| patched\t")
	for _, w := range ways() {
		fmt.Fprintf(tw, "%s\t| %s\t| %s\t\n", w.name, cells[w.name][harness.Stock], cells[w.name][harness.Patched])
	}
	assert.NilError(t, tw.Flush())
	t.Logf("from change to use:\n%s", table.String())
}

func tenth(d time.Duration) string { return d.Round(100 * time.Microsecond).String() }
