// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

const (
	rendered     = "10-containerd-net.conflist"
	goodTemplate = `{
  "cniVersion": "1.0.0",
  "name": "rendered",
  "plugins": [
    {"type": "fakenet", "subnet": "{{.PodCIDR}}"},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`
	badTemplate = `{
  "cniVersion": "1.0.0",
  "name": "rendered",
  "plugins": [{"type": "fakenet", "subnet": "{{.PodCIDR}}", "x": "{{.NoSuch}}"}]
}
`
)

// templated lays out a daemon with a conf_template.
func templated(t *testing.T, side harness.Side, template string) *node {
	t.Helper()
	n := prepare(t, harness.Options{Side: side})
	n.Template = filepath.Join(n.Base, "net.tmpl")
	assert.NilError(t, os.WriteFile(n.Template, []byte(template), 0o644))
	return n
}

// cidr tells the pod CIDR and returns the error's text, "" if none.
func (n *node) cidr(cidr string) string {
	n.t.Helper()
	if err := n.SetCIDR(n.t.Context(), cidr); err != nil {
		return err.Error()
	}
	return ""
}

// addressIn runs a pod and checks where its address comes from.
func (n *node) addressIn(prefix, pod string) {
	n.t.Helper()
	ip := n.pod(pod)
	assert.Assert(n.t, strings.HasPrefix(ip, prefix), "pod %s has %s, want one in %s", pod, ip, prefix)
}

// A template that cannot be written must not end the daemon.
// https://github.com/containerd/containerd/pull/13507
func TestT1(t *testing.T) {
	variants := []struct {
		name   string
		mounts func(n *node) [][]string
		cause  string
	}{
		{"read-only", func(n *node) [][]string {
			return [][]string{{"--bind", n.ConfDir, n.ConfDir}, {"-o", "remount,bind,ro", n.ConfDir}}
		}, "read-only file system"},
		{"full", func(n *node) [][]string {
			// As many inodes as are in use, so that nothing more can be made.
			return [][]string{{"-t", "tmpfs", "-o", "size=16k,nr_inodes=1", "none", n.ConfDir}}
		}, "no space left on device"},
	}
	sides(t, "containerd PR 13507", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := templated(t, side, goodTemplate)
				n.Mounts = v.mounts(n)
				n.start()
				n.waitReady(false, soon)
				err := n.cidr("10.50.0.0/16")
				assert.Assert(t, err != "", "UpdateRuntimeConfig succeeded")
				if side == harness.Stock {
					select {
					case <-n.Ended():
					case <-time.After(soon):
						t.Fatal("stock containerd still runs")
					}
					log, readErr := os.ReadFile(n.LogPath())
					assert.NilError(t, readErr)
					assert.Assert(t, strings.Contains(string(log), "nil pointer dereference"), n.LogTail(20))
					seen = []string{"nil pointer dereference, the daemon dies"}
					return
				}
				assert.Assert(t, cmp.Contains(err, v.cause))
				assert.Assert(t, n.Alive())
				n.notReady(soon, n.ConfDir)
				seen = append(seen, v.name+": "+strings.ReplaceAll(err, n.Base, "…"))
			})
		}
		if side == harness.Patched {
			// A network that is in use stays in use.
			t.Run("read-only later", func(t *testing.T) {
				n := templated(t, side, goodTemplate).start()
				assert.Equal(t, n.cidr("10.50.0.0/16"), "")
				n.addressIn("10.50.", "a")
				assert.NilError(t, n.InNamespace("mount", "--bind", n.ConfDir, n.ConfDir))
				assert.NilError(t, n.InNamespace("mount", "-o", "remount,bind,ro", n.ConfDir))
				before, err := os.ReadFile(n.conf(rendered))
				assert.NilError(t, err)
				assert.Assert(t, cmp.Contains(n.cidr("10.60.0.0/16"), "read-only file system"))
				after, err := os.ReadFile(n.conf(rendered))
				assert.NilError(t, err)
				assert.Equal(t, string(after), string(before))
				assert.Assert(t, n.network().Ready)
				n.addressIn("10.50.", "b")
				// Writable again, the next call renders.
				assert.NilError(t, n.InNamespace("umount", n.ConfDir))
				assert.Equal(t, n.cidr("10.60.0.0/16"), "")
				n.addressIn("10.60.", "c")
			})
		}
		return strings.Join(seen, "; ")
	})
}

// A template that cannot be rendered leaves everything as it was.
// https://github.com/containerd/containerd/pull/13507
func TestT2(t *testing.T) {
	sides(t, "containerd PR 13507", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, badTemplate).start()
		err := n.cidr("10.50.0.0/16")
		assert.Assert(t, cmp.Contains(err, "NoSuch"))
		left, readErr := os.ReadFile(n.conf(rendered))
		if side == harness.Stock {
			assert.NilError(t, readErr)
			assert.Assert(t, !strings.HasSuffix(string(left), badTemplate[len(badTemplate)-4:]), "the file is whole: %s", left)
			n.stays(false, 200*time.Millisecond)
			return fmt.Sprintf("error, and a conflist cut off after %d bytes left behind", len(left))
		}
		assert.Assert(t, os.IsNotExist(readErr), "a file was left behind: %s", left)
		assert.DeepEqual(t, n.confDir(), []string{})

		// A good one, then bad again: the old file and network stay.
		n.write(n.Template, goodTemplate)
		assert.Equal(t, n.cidr("10.50.0.0/16"), "")
		n.addressIn("10.50.", "a")
		before, readErr := os.ReadFile(n.conf(rendered))
		assert.NilError(t, readErr)
		breakings := []struct {
			name, want string
			do         func() error
		}{
			{"unknown field", "NoSuch", func() error { return os.WriteFile(n.Template, []byte(badTemplate), 0o644) }},
			{"no template", n.Template, func() error {
				return os.WriteFile(n.Template, []byte(`{{if}`), 0o644)
			}},
			{"no conflist", n.Template, func() error { return os.WriteFile(n.Template, []byte("{"), 0o644) }},
			{"missing", n.Template, func() error { return os.Remove(n.Template) }},
		}
		for i, b := range breakings {
			assert.NilError(t, b.do())
			assert.Assert(t, cmp.Contains(n.cidr(fmt.Sprintf("10.%d.0.0/16", 60+i)), b.want), b.name)
			after, err := os.ReadFile(n.conf(rendered))
			assert.NilError(t, err)
			assert.Equal(t, string(after), string(before), b.name)
			assert.Assert(t, n.network().Ready, b.name)
			assert.DeepEqual(t, n.confDir(), []string{rendered})
			n.addressIn("10.50.", fmt.Sprintf("b%d", i))
		}
		assert.Assert(t, n.cidr("not a cidr") != "")
		assert.Assert(t, n.network().Ready)
		return "error naming NoSuch, nothing left behind; later the old file and network stay"
	})
}

// confDir is what is in the conf dir.
func (n *node) confDir() []string {
	n.t.Helper()
	entries, err := os.ReadDir(n.ConfDir)
	assert.NilError(n.t, err)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// The node's CIDR changes; the file follows.
// https://github.com/cri-o/cri-o/issues/9931
// https://github.com/cloudnativelabs/kube-router/issues/2164
func TestT3(t *testing.T) {
	sides(t, "cri-o#9931, kube-router#2164", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, goodTemplate).start()
		assert.Equal(t, n.cidr("10.50.0.0/16"), "")
		if side == harness.Stock {
			n.waitReady(true, soon)
		}
		n.addressIn("10.50.", "a")

		assert.Equal(t, n.cidr("10.60.0.0/16"), "")
		if side == harness.Stock {
			n.addressIn("10.50.", "b")
			n.restart()
			assert.Equal(t, n.cidr("10.60.0.0/16"), "")
			n.addressIn("10.50.", "c")
			return "old file kept, in process and across a restart"
		}
		n.addressIn("10.60.", "b")
		r := n.report()
		assert.Assert(t, r.Template != nil, "no template in the report")
		assert.DeepEqual(t, r.Template.CIDRs, []string{"10.60.0.0/16"})
		assert.Equal(t, r.Template.Path, n.Template)
		assert.Equal(t, r.Template.File, n.conf(rendered))

		// Across a restart the file is there and ready before any call.
		n.restart()
		n.waitReady(true, soon)
		n.addressIn("10.60.", "c")
		assert.Equal(t, n.cidr("10.70.0.0/16"), "")
		n.addressIn("10.70.", "d")
		// The same CIDR again changes nothing.
		before, err := os.Stat(n.conf(rendered))
		assert.NilError(t, err)
		assert.Equal(t, n.cidr("10.70.0.0/16"), "")
		after, err := os.Stat(n.conf(rendered))
		assert.NilError(t, err)
		assert.Assert(t, os.SameFile(before, after) && before.ModTime().Equal(after.ModTime()), "the file was written again")
		return "rendered and in use before the RPC returns, in process and across a restart"
	})
}

// Ready must mean that the next pod gets the pod network, whatever is being
// rendered or reloaded.
// https://github.com/containerd/cri/issues/1033
func TestR13(t *testing.T) {
	loop := 20 * time.Second
	if os.Getenv("CNIRELOAD_LONG") != "" {
		loop = time.Minute
	}
	sides(t, "containerd/cri#1033", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, goodTemplate)
		// Without the image a pod costs a few milliseconds: its ADD and DEL.
		n.NoImage = true
		n.start()
		assert.Equal(t, n.cidr("10.50.0.0/16"), "")
		n.waitReady(true, soon)

		ctx, stop := context.WithTimeout(t.Context(), loop)
		defer stop()
		var renders, reloads, polls, falses, pods, broken atomic.Int64
		var firstBroken atomic.Value
		render := func(second int) func() {
			return func() {
				for i := 0; ctx.Err() == nil; i++ {
					if err := n.SetCIDR(t.Context(), fmt.Sprintf("10.%d.0.0/16", second+i%20)); err != nil {
						t.Errorf("render: %v", err)
						return
					}
					renders.Add(1)
					time.Sleep(3 * time.Millisecond)
				}
			}
		}
		run := func(worker string) func() {
			return func() {
				for i := 0; ctx.Err() == nil; i++ {
					c, err := n.Network(t.Context())
					if err != nil {
						t.Errorf("status: %v", err)
						return
					}
					polls.Add(1)
					if !c.Ready {
						falses.Add(1)
						continue
					}
					pods.Add(1)
					err = n.add(fmt.Sprintf("%s%d", worker, i))
					switch {
					case err == nil:
					case podNetworkMissing(err.Error()):
						broken.Add(1)
						firstBroken.CompareAndSwap(nil, err.Error())
					default:
						t.Errorf("pod: %v", err)
						return
					}
				}
			}
		}
		reload := func() {
			// A list that sorts first comes, changes and goes, written in place
			// and in two halves as some agents do it.
			other := n.conf("05-other.conflist")
			for i := 0; ctx.Err() == nil; i++ {
				text := c10(fmt.Sprintf("other%d", i%2))
				_ = os.WriteFile(other, []byte(text[:len(text)/2]), 0o644)
				time.Sleep(10 * time.Millisecond)
				_ = os.WriteFile(other, []byte(text), 0o644)
				time.Sleep(10 * time.Millisecond)
				if i%4 == 3 {
					_ = os.Remove(other)
					time.Sleep(5 * time.Millisecond)
				}
				reloads.Add(2)
			}
		}
		parallel(render(100), render(150), reload, run("p"), run("q"), run("r"))()

		observed := fmt.Sprintf("%d of %d pods failed for want of the pod network right after Status was true (%d renders, %d reloads, %d of %d Status false)",
			broken.Load(), pods.Load(), renders.Load(), reloads.Load(), falses.Load(), polls.Load())
		t.Log(observed)
		if first := firstBroken.Load(); first != nil {
			t.Log(first)
		}
		assert.Assert(t, pods.Load() > 5 && renders.Load() > 50 && reloads.Load() > 50, observed)
		if side == harness.Stock {
			assert.Assert(t, broken.Load() > 0, observed)
			return observed
		}
		assert.Equal(t, broken.Load(), int64(0), "%v", firstBroken.Load())
		assert.Equal(t, falses.Load(), int64(0), "never without a network, yet Status was false")
		return observed
	})
}

// podNetworkMissing tells a pod that failed for want of the pod network.
func podNetworkMissing(err string) bool {
	return strings.Contains(err, "cni plugin not initialized") || strings.Contains(err, "failed to find network info")
}
