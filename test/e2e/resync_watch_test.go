// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// polled is how long a change that only the slow poll finds may take.
var polled = harness.Slow(10 * time.Second)

// uses tells, on either side, whether a list of that name is in use. On the
// patched side the condition must have been true, too.
func (n *node) uses(name string) error {
	c, info, err := n.Info(n.t.Context())
	if err != nil {
		return err
	}
	if !c.Ready || !strings.Contains(info["cniconfig"], `"Name":"`+name+`"`) {
		return fmt.Errorf("want network %q in use, got %v and %s", name, c, info["cniconfig"])
	}
	return nil
}

// inUse waits until a list of that name is in use, on either side.
func (n *node) inUse(name string, within time.Duration) time.Duration {
	n.t.Helper()
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error { return n.uses(name) }))
	return time.Since(begin)
}

// keeps checks that a list stays in use.
func (n *node) keeps(name string, during time.Duration) {
	n.t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		assert.NilError(n.t, n.uses(name))
	}
}

// watched waits until the report says that the conf dir is watched that way.
func (n *node) watched(state string, within time.Duration) string {
	n.t.Helper()
	var cause string
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		r, err := n.Report(n.t.Context(), "")
		if err == nil && r.Watch.State != state {
			err = fmt.Errorf("want watch state %q, got %+v", state, r.Watch)
		}
		cause = r.Watch.Cause
		return err
	}))
	return cause
}

// sees is inUse on the patched side; on stock the list must not be seen. It
// returns words for the table.
func (n *node) sees(was, name string, within time.Duration) string {
	n.t.Helper()
	if n.Side == harness.Stock {
		n.keeps(was, quiet/2)
		return "never"
	}
	return "after " + short(n.inUse(name, within))
}

// A link is an entry of the folder like any other, and its target is what
// counts. The neighbour of S1.
// https://github.com/containerd/containerd/issues/11715
func TestS2(t *testing.T) {
	sides(t, "containerd#11715", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		n.write(n.conf("50-base.conflist"), c10("base"))
		n.start()
		n.waitReady(true, soon)

		link := n.conf("10-a.conflist")
		n.write(n.aside("a"), c10("a"))
		assert.NilError(t, os.Symlink(n.aside("a"), link))
		seen := []string{"linked: " + n.sees("base", "a", atOnce)}
		was := "a"
		if side == harness.Stock {
			n.write(n.conf("unrelated"), "x") // makes stock look
			n.inUse("a", soon)
			time.Sleep(100 * time.Millisecond)
		}

		assert.NilError(t, os.WriteFile(n.aside("a"), []byte(c10("edited")), 0o644))
		seen = append(seen, "target edited: "+n.sees(was, "edited", atOnce))
		n.write(n.aside("a"), c10("replaced"))
		seen = append(seen, "target replaced: "+n.sees(was, "replaced", atOnce))
		n.write(n.aside("b"), c10("repointed"))
		assert.NilError(t, os.Symlink(n.aside("b"), n.aside("link")))
		assert.NilError(t, os.Rename(n.aside("link"), link))
		seen = append(seen, "re-pointed: "+n.sees(was, "repointed", atOnce))
		assert.NilError(t, os.Remove(n.aside("b")))
		seen = append(seen, "target removed: "+n.sees(was, "base", atOnce))
		if side == harness.Patched {
			n.skipped(link)
			assert.NilError(t, n.add("p"))
		}
		return strings.Join(seen, "; ")
	})
}

// The folder goes on under its name while the watch holds on to another.
// https://github.com/rancher/rke2/issues/8356
func TestS4(t *testing.T) {
	variants := []struct {
		name string
		// lay sets conf_dir and returns what has its content exchanged.
		lay func(t *testing.T, n *node) (exchange func())
	}{
		{"symlink re-pointed", func(t *testing.T, n *node) func() {
			one, two := filepath.Join(n.Base, "one"), filepath.Join(n.Base, "two")
			n.ConfDir = filepath.Join(n.Base, "link.d")
			assert.NilError(t, os.Mkdir(one, 0o755))
			assert.NilError(t, os.Mkdir(two, 0o755))
			assert.NilError(t, os.Symlink(one, n.ConfDir))
			n.write(n.conf("10-a.conflist"), c10("old"))
			n.write(filepath.Join(two, "10-a.conflist"), c10("new"))
			return func() {
				assert.NilError(t, os.Symlink(two, n.ConfDir+".new"))
				assert.NilError(t, os.Rename(n.ConfDir+".new", n.ConfDir))
			}
		}},
		{"parent made anew", func(t *testing.T, n *node) func() {
			etc := filepath.Join(n.Base, "etc")
			n.ConfDir = filepath.Join(etc, "cni", "net.d")
			assert.NilError(t, os.MkdirAll(n.ConfDir, 0o755))
			n.write(n.conf("10-a.conflist"), c10("old"))
			return func() {
				assert.NilError(t, os.Rename(etc, etc+".old"))
				assert.NilError(t, os.MkdirAll(n.ConfDir, 0o755))
				n.write(n.conf("10-a.conflist"), c10("new"))
			}
		}},
		{"overlay written from below", func(t *testing.T, n *node) func() {
			dirs := map[string]string{}
			for _, d := range []string{"lower", "upper", "work"} {
				dirs[d] = filepath.Join(n.Base, d)
				assert.NilError(t, os.Mkdir(dirs[d], 0o755))
			}
			n.write(filepath.Join(dirs["lower"], "10-a.conflist"), c10("old"))
			n.Mounts = [][]string{{"-t", "overlay", "-o",
				"lowerdir=" + dirs["lower"] + ",upperdir=" + dirs["upper"] + ",workdir=" + dirs["work"], "overlay", n.ConfDir}}
			return func() { n.write(filepath.Join(dirs["upper"], "05-b.conflist"), c10("new")) }
		}},
	}
	sides(t, "rke2#8356", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				exchange := v.lay(t, n)
				n.start()
				n.inUse("old", soon)
				if side == harness.Patched {
					n.watched("inotify", soon)
				}
				exchange()
				if side == harness.Stock {
					n.keeps("old", 3*time.Second)
					assert.Equal(t, n.loadStatus(), "OK")
					seen = append(seen, v.name+": OK with the old config")
					return
				}
				seen = append(seen, v.name+": in use after "+short(n.inUse("new", polled)))
				n.watched("inotify", polled)
				assert.NilError(t, n.add("p"))
			})
		}
		return strings.Join(seen, "; ")
	})
}

// The machine has no inotify left, for a start or for a while. The limits are
// lowered in a user namespace of the daemon's own.
// https://github.com/containerd/containerd/issues/10468
// https://github.com/containerd/containerd/issues/10308
func TestS11(t *testing.T) {
	sides(t, "containerd#10468, #10308", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, limit := range []string{"max_inotify_instances", "max_inotify_watches"} {
			t.Run(limit, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true, UserSysctls: map[string]string{limit: "0"}})
				n.write(n.conf("10-a.conflist"), c10("a"))
				if side == harness.Stock {
					log := n.neverAnswers()
					assert.Assert(t, cmp.Contains(log, map[string]string{
						"max_inotify_instances": "initialize inotify: too many open files",
						"max_inotify_watches":   "no space left on device",
					}[limit]))
					seen = append(seen, limit+": CRI never comes up")
					return
				}
				n.start()
				n.inUse("a", soon)
				cause := n.watched("polling", soon)
				assert.NilError(t, n.add("first"))
				// Changes are found all the same.
				n.write(n.conf("10-a.conflist"), c10("b"))
				took := n.inUse("b", polled)
				assert.Assert(t, n.logLines("polling") == 1, "lines about polling: %d", n.logLines("polling"))

				assert.NilError(t, n.SetUserSysctl(limit, "100"))
				back := time.Now()
				n.watched("inotify", polled)
				seen = append(seen, fmt.Sprintf("%s: polling (%s), a change in use after %s; back to inotify %s after there is room",
					limit, strings.ReplaceAll(cause, n.Base, "…"), short(took), short(time.Since(back))))
				n.write(n.conf("10-a.conflist"), c10("c"))
				n.inUse("c", atOnce)
				assert.NilError(t, n.add("second"))
			})
		}
		return strings.Join(seen, "; ")
	})
}

// neverAnswers starts a daemon whose CRI must not come up and returns its log.
func (n *node) neverAnswers() string {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 10*time.Second)
	defer cancel()
	go func() {
		_ = harness.Poll(ctx, 10*time.Second, func() error {
			log, err := os.ReadFile(n.LogPath())
			if err == nil && !strings.Contains(string(log), "successfully booted") {
				err = errors.New("not up")
			}
			return err
		})
		time.Sleep(500 * time.Millisecond)
		cancel()
	}()
	err := n.Start(ctx)
	assert.Assert(n.t, err != nil, "CRI answers")
	// Nothing to clean up through CRI.
	n.untidy = true
	log, readErr := os.ReadFile(n.LogPath())
	assert.NilError(n.t, readErr)
	return string(log)
}

// A conf dir that cannot be made is a node without a network, not without CRI.
// https://github.com/containerd/containerd/issues/9139
// https://github.com/containerd/containerd/issues/9163
func TestS12(t *testing.T) {
	sides(t, "containerd#9139, #9163", func(t *testing.T, side harness.Side) string {
		etc, err := os.MkdirTemp("", harness.Prefix)
		assert.NilError(t, err)
		defer os.RemoveAll(etc)
		n := prepare(t, harness.Options{Side: side, NoImage: true, ConfDir: filepath.Join(etc, "cni", "net.d")})
		assert.NilError(t, os.RemoveAll(filepath.Join(etc, "cni")))
		n.Mounts = [][]string{{"--bind", etc, etc}, {"-o", "remount,bind,ro", etc}}
		if side == harness.Stock {
			log := n.neverAnswers()
			assert.Assert(t, cmp.Contains(log, "read-only file system"))
			return "CRI never comes up: read-only file system"
		}
		n.start()
		message := n.notReady(soon, "conf dir "+n.ConfDir+" does not exist")
		assert.Equal(t, n.report().Watch.State, "waiting for directory")
		n.stillMissing(n.ConfDir, quiet/2)

		// From outside the daemon's view of it, the directory comes.
		assert.NilError(t, os.MkdirAll(n.ConfDir, 0o755))
		n.write(n.conf("10-a.conflist"), c10("a"))
		took := n.inUse("a", polled)
		n.watched("inotify", polled)
		assert.NilError(t, n.add("p"))
		return "up, " + strings.ReplaceAll(message, etc, "…") + "; in use " + short(took) + " after it is there"
	})
}

// The end of the daemon is an end, not an error of the watch.
// https://github.com/containerd/containerd/issues/5041
// https://github.com/containerd/containerd/issues/4852
func TestS13(t *testing.T) {
	alike(t, "containerd#5041, #4852", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		own := filepath.Join(n.Base, "handler.d")
		n.Handlers = map[string]harness.Handler{"other": {ConfDir: own}}
		assert.NilError(t, os.MkdirAll(own, 0o755))
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.write(filepath.Join(own, "10-h.conflist"), c10("h"))
		n.start()
		n.waitReady(true, soon)
		before := n.logLines("")
		begin := time.Now()
		assert.NilError(t, n.Stop())
		took := time.Since(begin)
		assert.Assert(t, took < soon, "it took %v to end", took)
		log, err := os.ReadFile(n.LogPath())
		assert.NilError(t, err)
		var about []string
		for _, line := range strings.Split(strings.TrimSpace(string(log)), "\n")[before:] {
			if strings.Contains(line, "cni") {
				about = append(about, line)
			}
		}
		assert.Assert(t, len(about) <= 2, "%s", strings.Join(about, "\n"))
		after := n.logLines("") - before
		assert.Assert(t, after < 20, "%d lines after the signal", after)

		// Killed, it starts as if nothing had been.
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, syscall.Kill(n.PID(), syscall.SIGKILL))
		<-n.Ended()
		assert.NilError(t, n.Stop())
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, n.add("p"))
		return fmt.Sprintf("ends within %s, %d lines about cni for two conf dirs", short(took), len(about))
	})
}

// The configuration is there first and the binaries last, and nothing more
// happens in the conf dir.
// https://github.com/cri-o/cri-o/issues/4276
// https://github.com/cri-o/ocicni/issues/107
func TestS14(t *testing.T) {
	sides(t, "cri-o#4276, ocicni#107", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		for _, name := range []string{"fakenet", "portmap"} {
			assert.NilError(t, os.Remove(filepath.Join(n.BinDirs[0], name)))
		}
		// The second bin dir does not exist yet.
		late := filepath.Join(n.Base, "late")
		n.BinDirs = append(n.BinDirs, late)
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		if side == harness.Stock {
			n.waitReady(true, soon)
			err := n.add("p")
			assert.Assert(t, err != nil, "the pod has a network")
			return "true without any binary; pods fail"
		}
		n.notReady(soon, "fakenet", n.BinDirs[0])
		assert.NilError(t, n.InstallFake("fakenet"))
		n.notReady(soon, "portmap")
		n.stays(false, quiet/2)
		assert.NilError(t, n.InstallFake("portmap"))
		_, took := n.waitReady(true, soon)
		assert.NilError(t, n.add("p"))

		// Into a bin dir that is made only now; the plugin is found by its folder,
		// so it must stand beside the fake's files, as late does.
		n.write(n.conf("10-a.conflist"), conflist("b", "1.0.0", []string{"fakenet", "later"}))
		n.notReady(soon, "later", late)
		src, err := harness.Fakenet()
		assert.NilError(t, err)
		begin := time.Now()
		assert.NilError(t, os.Mkdir(late, 0o755))
		assert.NilError(t, harness.Install(src, filepath.Join(late, "later")))
		n.waitReady(true, soon)
		assert.NilError(t, n.add("q"))
		return fmt.Sprintf("ready %s after the last binary; %s when its bin dir comes with it", short(took), short(time.Since(begin)))
	})
}
