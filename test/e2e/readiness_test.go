// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/sha256"
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

// A list whose chained plugin is not installed is not a network.
// https://github.com/containerd/go-cni/issues/116
// https://github.com/cilium/cilium/issues/11497
func TestR1(t *testing.T) {
	sides(t, "go-cni#116, cilium#11497", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		portmap := filepath.Join(n.BinDirs[0], "portmap")
		assert.NilError(t, os.Remove(portmap))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()

		if side == harness.Stock {
			n.waitReady(true, soon)
			assert.Equal(t, n.loadStatus(), "OK")
			err := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(err, `failed to find plugin "portmap"`))
			n.stays(true, quiet)
			return "NetworkReady true, load OK; pod fails: failed to find plugin \"portmap\""
		}

		message := n.notReady(soon, `network "c10"`, n.conf("10-c10.conflist"), `"portmap"`, n.BinDirs[0])
		err := n.refused(harness.Pod{Name: "a"})
		assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
		assert.Assert(t, cmp.Contains(err, "portmap"))

		// The binary arrives: no write in the conf dir is needed.
		assert.NilError(t, n.InstallFake("portmap"))
		_, arrived := n.waitReady(true, soon)
		n.agree()
		n.pod("a")

		// An upgrade takes the old binary away and puts a new one there.
		assert.NilError(t, os.Remove(portmap))
		gap := time.AfterFunc(300*time.Millisecond, func() { _ = n.InstallFake("portmap") })
		defer gap.Stop()
		n.stays(true, 4*time.Second)
		n.pod("b")

		// It goes for good.
		gone := time.Now()
		assert.NilError(t, os.Remove(portmap))
		n.notReady(graced, `"portmap"`, n.BinDirs[0])
		lasted := time.Since(gone)
		// The pods that run need it once more to be removed.
		assert.NilError(t, n.InstallFake("portmap"))
		return fmt.Sprintf("%s; true %s after the binary arrived, kept over an upgrade, false %s after it was removed",
			strings.ReplaceAll(message, n.Base, "…"), short(arrived), short(lasted))
	})
}

// The same for IPAM and for a plugin in a later bin dir: neighbours of R1.
func TestR1Neighbours(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	t.Run("ipam", func(t *testing.T) {
		n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
		n.write(n.conf("10-ipam.conflist"), `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"fakeipam"}}]}`)
		assert.NilError(t, n.InstallFake("bridge"))
		n.start()
		n.notReady(soon, `"fakeipam"`, n.BinDirs[0])
		assert.NilError(t, n.InstallFake("fakeipam"))
		n.waitReady(true, soon)
	})
	t.Run("second bin dir", func(t *testing.T) {
		n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
		second := filepath.Join(n.Base, "bin2")
		n.BinDirs = append(n.BinDirs, second)
		assert.NilError(t, os.Remove(filepath.Join(n.BinDirs[0], "portmap")))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.notReady(soon, `"portmap"`, n.BinDirs[0], second)
		// The dir itself appears later, as on a fresh node.
		src, err := harness.Fakenet()
		assert.NilError(t, err)
		assert.NilError(t, os.MkdirAll(second, 0o755))
		assert.NilError(t, harness.Install(src, filepath.Join(second, "portmap")))
		n.waitReady(true, soon)
	})
}

// A pod that cannot get its whole network must not get half of it.
// https://github.com/containerd/containerd/issues/12130
// https://github.com/containerd/go-cni/issues/60
// https://github.com/containernetworking/cni/issues/924
func TestR2(t *testing.T) {
	sides(t, "containerd#12130, go-cni#60, cni#924", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		assert.NilError(t, os.Remove(filepath.Join(n.BinDirs[0], "portmap")))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		if side == harness.Patched {
			n.notReady(soon, "portmap")
		}

		before := n.settledBolt()
		for i := range 3 {
			err := n.refused(harness.Pod{Name: "a", Attempt: uint32(i)})
			if side == harness.Patched {
				assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
			}
		}
		add, del, leaked := n.calls("fakenet", "ADD"), n.calls("fakenet", "DEL"), n.leases()
		observed := fmt.Sprintf("3 tries: %d ADD, %d DEL, %d addresses leaked", add, del, leaked)
		if side == harness.Stock {
			assert.Equal(t, add, 3)
			assert.Equal(t, del, 0)
			assert.Equal(t, leaked, 3)
			assert.Assert(t, n.bolt() != before, "stock wrote nothing to the metadata database")
			return observed
		}
		assert.Equal(t, add, 0)
		assert.Equal(t, leaked, 0)
		assert.Equal(t, n.calls("loopback", "ADD"), 0)
		assert.Equal(t, n.bolt(), before, "the metadata database was written")
		netns, _ := os.ReadDir(n.NetNSDir())
		assert.Equal(t, len(netns), 0, "network namespaces made")

		// A host-network pod needs no network and is not held: only the
		// missing image stops it in this test.
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "host", HostNetwork: true}), harness.NoImage))
		return observed + ", no metadata write"
	})
}

// bolt is a hash of the metadata database.
func (n *node) bolt() string {
	n.t.Helper()
	b, err := os.ReadFile(n.BoltPath())
	assert.NilError(n.t, err)
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// settledBolt waits until start-up work has stopped writing metadata.
func (n *node) settledBolt() string {
	n.t.Helper()
	last, since := n.bolt(), time.Now()
	for time.Since(since) < 500*time.Millisecond {
		time.Sleep(20 * time.Millisecond)
		if now := n.bolt(); now != last {
			last, since = now, time.Now()
		}
	}
	return last
}

// Without a loopback plugin no pod starts, however good the pod network is.
// https://github.com/containerd/containerd/issues/8006
// https://github.com/rancher/rke2/issues/7981
func TestR3(t *testing.T) {
	sides(t, "containerd#8006, rke2#7981", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		loopback := filepath.Join(n.BinDirs[0], "loopback")
		assert.NilError(t, os.Remove(loopback))
		n.write(n.conf("10-c11.conflist"), c11("c11"))
		n.start()

		var observed string
		if side == harness.Stock {
			n.waitReady(true, soon)
			err := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(err, `failed to find plugin "loopback"`))
			observed = `NetworkReady true; pod fails: failed to find plugin "loopback"`
		} else {
			observed = n.notReady(soon, `"loopback"`, n.BinDirs[0], "use_internal_loopback")
			n.refused(harness.Pod{Name: "a"})
			assert.NilError(t, n.InstallFake("loopback"))
			n.waitReady(true, soon)
			assert.NilError(t, os.Remove(loopback))
			n.notReady(graced, `"loopback"`)
		}

		n.InternalLoopback = true
		n.restart()
		n.waitReady(true, soon)
		n.pod("b")
		return strings.ReplaceAll(observed, n.Base, "…") + "; with use_internal_loopback ready and working"
	})
}
