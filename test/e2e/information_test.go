// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// Which file is in use, and why not the others?
// https://github.com/containerd/cri/issues/979
// https://github.com/containerd/cri/issues/1564
func TestI1(t *testing.T) {
	sides(t, "cri#979, cri#1564", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		inUse := conflist("a", "1.0.0", []string{"fakenet", "portmap"})
		n.write(n.conf("10-a.conflist"), inUse)
		n.write(n.conf("20-b.conflist"), c10("b"))
		dropIn := filepath.Join(n.ConfDir, "a", "extra.conf")
		if side == harness.Patched {
			// Stock would be brought down by the broken one: see S7.
			n.write(n.conf("00-broken.conflist"), "{")
			assert.NilError(t, os.MkdirAll(filepath.Dir(dropIn), 0o755))
			n.write(n.conf("10-a.conflist"), strings.Replace(inUse, `"name"`, `"loadOnlyInlinedPlugins": false, "name"`, 1))
			n.write(dropIn, `{"type":"extra"}`)
			assert.NilError(t, n.InstallFake("extra"))
		}
		n.start()
		n.waitReady(true, soon)
		_, info, err := n.Info(t.Context())
		assert.NilError(t, err)
		assert.Assert(t, cmp.Contains(info["cniconfig"], `"a"`))

		if side == harness.Stock {
			for key, value := range info {
				if key != "config" {
					assert.Assert(t, !strings.Contains(value, "10-a.conflist"), "%s has the path: %s", key, value)
				}
			}
			assert.Equal(t, info["cniReload"], "")
			return "contents only, no path"
		}

		n.agree()
		r := n.report()
		assert.Equal(t, r.ConfDir, n.ConfDir)
		i := networkIndex(r, "a")
		assert.Assert(t, i >= 0, "network a not in %+v", r.Networks)
		network := r.Networks[i]
		assert.Equal(t, network.File.File, n.conf("10-a.conflist"))
		assert.Equal(t, network.SHA256, fileHash(t, n.conf("10-a.conflist")))
		assert.Equal(t, network.Interface, "eth0")
		assert.Equal(t, network.CNIVersion, "1.0.0")
		assert.Equal(t, len(network.DropIns), 1, "%+v", network)
		assert.Equal(t, network.DropIns[0].File, dropIn)
		assert.Equal(t, network.DropIns[0].SHA256, fileHash(t, dropIn))
		var types []string
		for _, p := range network.Plugins {
			types = append(types, p.Type)
			assert.Equal(t, p.Path, filepath.Join(n.BinDirs[0], p.Type))
			assert.Assert(t, len(p.SupportedVersions) > 0, "%+v", p)
			assert.Equal(t, p.Problem, "")
			assert.Equal(t, p.Status, "ok")
		}
		assert.DeepEqual(t, types, []string{"fakenet", "portmap", "extra"})
		lo := networkIndex(r, "cni-loopback")
		assert.Assert(t, lo >= 0, "loopback not in %+v", r.Networks)
		assert.Equal(t, r.Networks[lo].File.File, "")

		skipped := map[string]string{}
		for _, s := range r.Skipped {
			skipped[s.File] = s.Reason
		}
		assert.Assert(t, skipped[n.conf("00-broken.conflist")] != "", "%v", skipped)
		assert.Assert(t, skipped[n.conf("20-b.conflist")] != "", "%v", skipped)
		assert.Equal(t, len(skipped), 2, "%v", skipped)
		assert.Equal(t, r.Watch.State, "inotify")
		assert.Assert(t, r.Version != "" && r.Generation > 0 && !r.LoadedAt.IsZero())
		n.pod("a")
		return fmt.Sprintf("file, hash, drop-in; skipped: 00-broken: %s; 20-b: %s",
			strings.ReplaceAll(skipped[n.conf("00-broken.conflist")], n.Base, "…"), strings.ReplaceAll(skipped[n.conf("20-b.conflist")], n.Base, "…"))
	})
}

func fileHash(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Three places tell about the network; they must tell the same.
// https://github.com/containerd/containerd/issues/7196
func TestI2(t *testing.T) {
	sides(t, "containerd#7196", func(t *testing.T, side harness.Side) string {
		var seen []string
		t.Run("status fails", func(t *testing.T) {
			n := prepare(t, harness.Options{Side: side, NoImage: true})
			assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
				"STATUS": {Mode: fake.Fail, Code: 50, Msg: "agent is away"},
			}}))
			n.write(n.conf("10-c11.conflist"), c11("c11"))
			n.start()
			n.waitReady(false, soon)
			if side == harness.Stock {
				assert.Equal(t, n.loadStatus(), "OK")
				seen = append(seen, "load OK beside NetworkReady false")
				return
			}
			n.notReady(soon, "fakenet", "agent is away")
		})
		t.Run("loaded by a render", func(t *testing.T) {
			n := templated(t, side, goodTemplate)
			n.start()
			n.waitReady(false, soon)
			if side == harness.Patched {
				n.agree()
			}
			// Stock does not notice this file, but the next call loads it.
			outside := n.aside("a")
			assert.NilError(t, os.WriteFile(outside, []byte(c10("a")), 0o644))
			assert.NilError(t, os.Rename(outside, n.conf("20-a.conflist")))
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.waitReady(true, soon)
			if side == harness.Stock {
				load := n.loadStatus()
				assert.Assert(t, load != "OK")
				seen = append(seen, "load error beside NetworkReady true: "+strings.ReplaceAll(load, n.Base, "…"))
				return
			}
			n.agree()
		})
		if side == harness.Stock {
			return strings.Join(seen, "; ")
		}
		t.Run("through many states", func(t *testing.T) {
			n := prepare(t, harness.Options{Side: side, NoImage: true}).start()
			steps := []struct {
				name  string
				do    func() error
				ready bool
				cause string
			}{
				{"empty", func() error { return nil }, false, "no network config found"},
				{"garbage", func() error { return os.WriteFile(n.conf("10-a.conflist"), []byte("{"), 0o644) }, false, "10-a.conflist"},
				{"good", func() error { return os.WriteFile(n.conf("10-a.conflist"), []byte(c10("a")), 0o644) }, true, ""},
				{"half written", func() error { return os.WriteFile(n.conf("10-a.conflist"), []byte(c10("a")[:30]), 0o644) }, true, ""},
				{"good again", func() error { return os.WriteFile(n.conf("10-a.conflist"), []byte(c10("a")), 0o644) }, true, ""},
				{"binary gone", func() error { return os.Remove(filepath.Join(n.BinDirs[0], "portmap")) }, false, "portmap"},
				{"binary back", func() error { return n.InstallFake("portmap") }, true, ""},
				{"no such version", func() error {
					return os.WriteFile(n.conf("10-a.conflist"), []byte(conflist("a", "7.7.7", []string{"fakenet"})), 0o644)
				}, true, ""},
				{"removed", func() error { return os.Remove(n.conf("10-a.conflist")) }, false, "no network config found"},
				{"dir removed", func() error { return os.RemoveAll(n.ConfDir) }, false, "does not exist"},
			}
			for _, s := range steps {
				assert.NilError(t, s.do(), s.name)
				if s.ready {
					n.waitReady(true, soon)
					n.stays(true, quiet/5)
					n.agree()
				} else {
					n.notReady(graced, s.cause)
				}
			}
			seen = append(seen, fmt.Sprintf("condition, lastCNILoadStatus and report agree in %d states", len(steps)+4))
		})
		return strings.Join(seen, "; ")
	})
}

// "cni plugin not initialized" alone helps nobody.
// https://github.com/containernetworking/cni/issues/628
// https://github.com/aws/karpenter-provider-aws/issues/1391
// https://github.com/kubernetes-sigs/kind/issues/4012
func TestI3(t *testing.T) {
	sides(t, "cni#628, karpenter#1391, kind#4012", func(t *testing.T, side harness.Side) string {
		var seen []string
		variants := []struct {
			name  string
			place func(n *node)
			cause func(n *node) string
		}{
			{"empty", func(*node) {}, func(n *node) string { return "no network config found in " + n.ConfDir }},
			{"garbage only", func(n *node) { n.write(n.conf("10-a.conflist"), "{") }, func(n *node) string { return n.conf("10-a.conflist") }},
			{"no plugins", func(n *node) { n.write(n.conf("10-a.conflist"), `{"cniVersion":"1.0.0","name":"a","plugins":[]}`) },
				func(n *node) string { return n.conf("10-a.conflist") }},
		}
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				v.place(n)
				n.start()
				c, _ := n.waitReady(false, soon)
				err := n.refused(harness.Pod{Name: "a"})
				assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
				if side == harness.Stock {
					assert.Equal(t, c.Message, notInitialized)
					seen = []string{c.Message}
					return
				}
				message := n.notReady(soon, v.cause(n))
				assert.Assert(t, cmp.Contains(err, v.cause(n)))
				seen = append(seen, v.name+": "+strings.ReplaceAll(strings.TrimPrefix(message, notInitialized+": "), n.Base, "…"))
			})
		}
		if side == harness.Patched {
			return "same words first, then " + strings.Join(seen, "; ")
		}
		return strings.Join(seen, "; ")
	})
}
