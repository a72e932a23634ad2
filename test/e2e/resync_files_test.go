// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// A distribution's file sorts before the one that is meant.
// https://github.com/kubernetes/kubernetes/issues/100309
// https://github.com/containernetworking/cni/issues/878
// https://github.com/kubernetes/minikube/issues/11194
func TestS8(t *testing.T) {
	sides(t, "kubernetes#100309, cni#878, minikube#11194", func(t *testing.T, side harness.Side) string {
		lay := func(t *testing.T, lines ...string) *node {
			n := prepare(t, harness.Options{Side: side, NoImage: true, CNI: lines})
			n.write(n.conf("87-podman.conflist"), c10("podman"))
			n.write(n.conf("99-real.conflist"), c10("real"))
			n.start()
			n.waitReady(true, soon)
			return n
		}
		n := lay(t)
		n.inUse("podman", soon)
		assert.NilError(t, n.add("p"))
		calls, err := n.Fake.Calls()
		assert.NilError(t, err)
		assert.Equal(t, networkOf(calls, "p"), "podman")
		if side == harness.Stock {
			return "podman's wins, and nothing says so"
		}
		// Still the default, and the report says why.
		why := n.skipped(n.conf("99-real.conflist"))
		assert.Assert(t, cmp.Contains(why, "87-podman.conflist sorts before it"))

		var whyNot string
		t.Run("network_name", func(t *testing.T) {
			n := lay(t, `network_name = "real"`)
			n.inUse("real", soon)
			whyNot = n.skipped(n.conf("87-podman.conflist"))
			assert.Assert(t, cmp.Contains(whyNot, `network_name asks for "real"`))
			// Podman's alone is not what was asked for.
			assert.NilError(t, os.Remove(n.conf("99-real.conflist")))
			n.notReady(soon, "87-podman.conflist", `network_name asks for "real"`)
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "held"}), "cni plugin not initialized"))
			// The name counts, not the file it is in.
			n.write(n.conf("00-moved.conflist"), c10("real"))
			n.inUse("real", atOnce)
			assert.NilError(t, n.add("p"))
		})
		return fmt.Sprintf("default: podman's, real %s; with network_name: real, podman's %s",
			strings.ReplaceAll(why, n.Base, "…"), whyNot)
	})
}

// Agents keep their credentials in the conf dir and rewrite them.
// https://github.com/aojea/kindnet/issues/42
// https://github.com/rancher/rke2/issues/4742
func TestS9(t *testing.T) {
	sides(t, "kindnet#42, rke2#4742", func(t *testing.T, side harness.Side) string {
		level := map[harness.Side]string{harness.Stock: "debug", harness.Patched: "info"}[side]
		n := prepare(t, harness.Options{Side: side, NoImage: true, LogLevel: level})
		n.write(n.conf("10-calico.conflist"), c10("calico"))
		n.start()
		n.inUse("calico", soon)
		rewrite := func() {
			for i := range 100 {
				assert.NilError(t, os.WriteFile(n.conf("calico-kubeconfig"), []byte(fmt.Sprintf("token: %d\n", i)), 0o600))
				time.Sleep(5 * time.Millisecond)
			}
			time.Sleep(300 * time.Millisecond)
		}
		time.Sleep(300 * time.Millisecond)
		if side == harness.Stock {
			before := n.logLines("receiving change event")
			rewrite()
			reloads := n.logLines("receiving change event") - before
			assert.Assert(t, reloads >= 100, "%d reloads", reloads)
			// Without a list each of them is an error line.
			assert.NilError(t, os.Remove(n.conf("10-calico.conflist")))
			n.waitReady(false, soon)
			before = n.logLines("failed to reload cni configuration")
			rewrite()
			lines := n.logLines("failed to reload cni configuration") - before
			assert.Assert(t, lines >= 100, "%d error lines", lines)
			return fmt.Sprintf("%d reloads; without a list %d error lines", reloads, lines)
		}
		generation, lines := n.report().Generation, n.logLines("")
		rewrite()
		n.stays(true, 100*time.Millisecond)
		assert.Equal(t, n.report().Generation, generation)
		assert.Equal(t, n.logLines(""), lines, "%s", n.LogTail(5))

		// The same while there is no list.
		assert.NilError(t, os.Remove(n.conf("10-calico.conflist")))
		n.notReady(soon, "no network config found")
		lines = n.logLines("")
		rewrite()
		assert.Equal(t, n.logLines(""), lines, "%s", n.LogTail(5))
		return "no reload, no log line, with a list and without"
	})
}

// Plugins that others add to a list in files of their own.
// https://github.com/containernetworking/cni/issues/1052
// https://github.com/containernetworking/cni/pull/1164
func TestS10(t *testing.T) {
	sides(t, "cni#1052, cni#1164", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		assert.NilError(t, n.InstallFake("extra"))
		dir := n.conf("a")
		drop := func(name string) string { return filepath.Join(dir, name) }
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.inUse("a", soon)
		time.Sleep(quiet / 5)

		runs := func(pod string) int {
			assert.NilError(t, n.add(pod))
			calls, err := n.Fake.Calls()
			assert.NilError(t, err)
			count := 0
			for _, c := range calls {
				if c.Pod == pod && c.Plugin == "extra" && c.Command == "ADD" {
					count++
				}
			}
			return count
		}
		assert.NilError(t, os.MkdirAll(dir, 0o755))
		assert.NilError(t, os.WriteFile(drop("20.conf"), []byte(`{"type":"extra","note":"one"}`), 0o644))
		if side == harness.Stock {
			time.Sleep(quiet)
			assert.Equal(t, runs("added"), 0)
			n.write(n.conf("unrelated"), "x")
			assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
				if _, info, err := n.Info(t.Context()); err != nil || !strings.Contains(info["cniconfig"], "extra") {
					return fmt.Errorf("the drop-in is not in use: %v", err)
				}
				return nil
			}))
			time.Sleep(quiet / 5)
			assert.NilError(t, os.WriteFile(drop("20.conf"), []byte("{"), 0o644))
			n.keeps("a", quiet)
			assert.Equal(t, n.loadStatus(), "OK")
			// And then, for an unrelated reason, the whole network is gone.
			n.write(n.conf("unrelated"), "y")
			c, _ := n.waitReady(false, soon)
			return "added and broken: unseen; broken, then an unrelated write: " + c.String()
		}
		with := func(names ...string) {
			t.Helper()
			assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
				r, err := n.Report(t.Context(), "")
				if err != nil {
					return err
				}
				var got []string
				for _, network := range r.Networks {
					for _, d := range network.DropIns {
						got = append(got, filepath.Base(d.File))
						if d.SHA256 == "" {
							return fmt.Errorf("%s has no hash", d.File)
						}
					}
				}
				if strings.Join(got, " ") != strings.Join(names, " ") || r.Stale {
					return fmt.Errorf("want drop-ins %q, got %q, stale %t", names, got, r.Stale)
				}
				return nil
			}))
		}
		with("20.conf")
		assert.Equal(t, runs("added"), 1)
		assert.NilError(t, os.WriteFile(drop("10.conf"), []byte(`{"type":"extra","note":"two"}`), 0o644))
		with("10.conf", "20.conf")
		assert.Equal(t, runs("two"), 2)
		generation := n.report().Generation
		assert.NilError(t, os.WriteFile(drop("10.conf"), []byte(`{"type":"extra","note":"changed"}`), 0o644))
		assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
			if g := n.report().Generation; g == generation {
				return fmt.Errorf("still generation %d", g)
			}
			return nil
		}))

		// Broken: named, and what was good stays in use.
		assert.NilError(t, os.WriteFile(drop("20.conf"), []byte("{"), 0o644))
		var named string
		assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
			r, err := n.Report(t.Context(), "")
			if named = r.LastError; err == nil && (!r.Stale || !strings.Contains(named, drop("20.conf"))) {
				err = fmt.Errorf("the broken drop-in is not named: stale %t, %q", r.Stale, named)
			}
			return err
		}))
		n.stays(true, quiet/5)
		assert.Equal(t, runs("broken"), 2)
		// After a restart there is no last good content.
		n.restart()
		n.notReady(soon, drop("20.conf"))
		assert.NilError(t, os.Remove(drop("20.conf")))
		n.waitReady(true, atOnce)
		with("10.conf")
		assert.NilError(t, os.RemoveAll(dir))
		with()
		assert.Equal(t, runs("removed"), 0)
		// The folder renamed in as a whole.
		assert.NilError(t, os.Mkdir(n.aside("a"), 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(n.aside("a"), "30.conf"), []byte(`{"type":"extra"}`), 0o644))
		assert.NilError(t, os.Rename(n.aside("a"), dir))
		with("30.conf")
		return "loaded at once; broken: " + strings.ReplaceAll(named, n.Base, "…") + ", its last good content serves"
	})
}
