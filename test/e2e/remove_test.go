// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// A pod can be removed after its configuration has gone.
// https://github.com/containerd/containerd/issues/8774
// https://github.com/kubernetes-sigs/cri-tools/issues/1687
// https://github.com/containerd/containerd/issues/6565
func TestL7(t *testing.T) {
	sides(t, "containerd#8774, cri-tools#1687, containerd#6565", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		path := n.conf("10-a.conflist")
		n.write(path, c10("a"))
		n.start()
		n.waitReady(true, soon)
		id, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
		assert.NilError(t, err)
		assert.NilError(t, os.Remove(path))
		n.waitReady(false, soon)

		err = n.RemovePod(t.Context(), id)
		if side == harness.Stock {
			assert.Assert(t, cmp.ErrorContains(err, "cni plugin not initialized"))
			assert.Equal(t, n.leases(), 1)
			n.untidy = true
			return "cannot be removed: cni plugin not initialized"
		}
		assert.NilError(t, err)
		assert.Equal(t, n.calls("fakenet", "DEL"), 1)
		assert.Equal(t, n.calls("portmap", "DEL"), 1)
		assert.Equal(t, n.leases(), 0)
		return "removed by the list of its ADD, 0 addresses leaked"
	})
}

// A pod is removed from the network it was added to.
// https://github.com/containernetworking/cni/issues/660
// https://github.com/containerd/go-cni/issues/57
func TestL8(t *testing.T) {
	for name, restart := range map[string]func(*node, harness.Side){
		"": nil,
		"/restart": func(n *node, side harness.Side) {
			n.restart()
			n.waitReady(true, soon)
		},
	} {
		run := func(t *testing.T, side harness.Side, added harness.Side) string {
			n := prepare(t, harness.Options{Side: added})
			path := n.conf("10-a.conflist")
			n.write(path, c10("a"))
			n.start()
			n.waitReady(true, soon)
			id, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
			assert.NilError(t, err)
			if added != side {
				assert.NilError(t, n.Stop())
				assert.NilError(t, n.Become(side))
				n.start()
			}
			n.write(path, c10("b"))
			assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
				_, info, err := n.Info(t.Context())
				if err == nil && !strings.Contains(info["cniconfig"], `"Name":"b"`) {
					err = fmt.Errorf("list b is not in use: %s", info["cniconfig"])
				}
				return err
			}))
			if restart != nil {
				restart(n, side)
			}
			assert.NilError(t, n.RemovePod(t.Context(), id))
			if side == harness.Stock {
				assert.Equal(t, n.leases(), 1)
				return "DEL on the new list, 1 address leaked"
			}
			assert.Equal(t, n.leases(), 0)
			return "DEL on the list of ADD, 0 addresses leaked"
		}
		t.Run("list replaced"+name, func(t *testing.T) {
			sides(t, "cni#660, go-cni#57", func(t *testing.T, side harness.Side) string { return run(t, side, side) })
		})
		t.Run("added by stock"+name, func(t *testing.T) {
			sides(t, "cni#660, go-cni#57", func(t *testing.T, side harness.Side) string { return run(t, side, harness.Stock) })
		})
	}
}

// One plugin's failure must not keep what another has allocated.
// https://github.com/containerd/containerd/issues/12130
// https://github.com/containerd/go-cni/issues/60
func TestL9(t *testing.T) {
	sides(t, "containerd#12130, go-cni#60", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		assert.NilError(t, n.InstallFake("third"))
		assert.NilError(t, n.Fake.Set("portmap", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Mode: fake.Fail, Code: 100, Msg: "portmap says no"},
			"DEL": {Mode: fake.Fail, Code: 100, Msg: "portmap says no"},
		}}))
		n.write(n.conf("10-a.conflist"), conflist("a", "1.0.0", []string{"fakenet", "portmap", "third"}))
		n.start()
		n.waitReady(true, soon)
		const tries = 20
		for i := range tries {
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a", Attempt: uint32(i)}), "portmap says no"))
		}
		leaked := n.leases()
		if side == harness.Stock {
			assert.Equal(t, leaked, tries)
		} else {
			assert.Equal(t, leaked, 0)
			// Once for each of them; what is owed is tried again, if this takes long.
			all, err := n.Fake.Calls()
			assert.NilError(t, err)
			removed := map[string]bool{}
			for _, c := range all {
				if c.Plugin == "fakenet" && c.Command == "DEL" {
					removed[c.ContainerID] = true
				}
			}
			assert.Equal(t, len(removed), tries)
		}
		return fmt.Sprintf("%d tries, %d addresses leaked", tries, leaked)
	})
}
