// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// shippedOn lays out a node for a network of test/vendors, with what its project
// installs and nothing else but loopback. Its agent is not up.
func shippedOn(t *testing.T, o harness.Options, name string) (*node, *contender, shipped) {
	t.Helper()
	all := shippedNetworks()
	i := slices.IndexFunc(all, func(s shipped) bool { return s.Name == name })
	assert.Assert(t, i >= 0, "no network %q", name)
	s := all[i]
	o.Private = true
	agents := map[string]net.Listener{}
	t.Cleanup(func() { // after the node's own, which removes the pods
		for _, l := range agents {
			_ = l.Close()
		}
	})
	n := prepare(t, o)
	assert.NilError(t, n.InstallFake(s.types...))
	for plugin, state := range states([]shipped{s}) {
		assert.NilError(t, n.Fake.Set(plugin, state))
	}
	n.write(n.conf(s.As), string(s.file("", false, false)))
	return n, &contender{Daemon: n.Daemon, agents: agents}, s
}

// asShipped is a case in which the node is ready and a pod runs once the agent is up.
func asShipped(name string) func(*testing.T, harness.Side) string {
	return func(t *testing.T, side harness.Side) string {
		n, c, s := shippedOn(t, harness.Options{Side: side}, name)
		assert.NilError(t, c.agent(s, "up"))
		n.start()
		n.waitReady(true, soon)
		n.pod("a")
		return "ready, pod runs"
	}
}

// The agent fills in the ranges and runs host-local in its own container.
// https://github.com/antrea-io/antrea/issues/1957
func TestN1(t *testing.T) { alike(t, "antrea#1957", asShipped("antrea")) }

// azure-cns is a case of a switch in azure-vnet.
// https://github.com/Azure/AKS/issues/3998
func TestN2(t *testing.T) { alike(t, "AKS#3998", asShipped("azure-overlay")) }

// opflex-agent-cni-ipam is a word that opflex-agent-cni knows.
func TestN3(t *testing.T) { alike(t, "Cisco ACI's list", asShipped("aci")) }

// Multus looks for delegates in its own binDir first, and its default is
// /opt/cni/bin wherever bin_dirs points.
// https://github.com/k8snetworkplumbingwg/multus-cni/issues/376
func TestN4(t *testing.T) {
	alike(t, "multus-cni#376", func(t *testing.T, side harness.Side) string {
		for _, byDefault := range []bool{false, true} {
			n := prepare(t, harness.Options{Side: side, Private: true})
			dir, key := filepath.Join(n.Base, "delegates"), fmt.Sprintf(`"binDir": %q, `, filepath.Join(n.Base, "delegates"))
			if byDefault {
				dir, key = n.Inside("/opt/cni/bin"), ""
			}
			src, err := harness.Fakenet()
			assert.NilError(t, err)
			assert.NilError(t, os.MkdirAll(dir, 0o755))
			for _, plugin := range []string{"bridge", "host-local"} {
				assert.NilError(t, harness.Install(src, filepath.Join(dir, plugin)))
			}
			assert.NilError(t, n.InstallFake("multus"))
			assert.NilError(t, n.Fake.Set("multus", fake.State{Runs: []string{"delegates"}, BinDir: "/opt/cni/bin"}))
			assert.NilError(t, n.Fake.Set("bridge", fake.State{Runs: []string{"ipam"}}))
			n.write(n.conf("00-multus.conf"), `{"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus", `+key+`"delegates": [
  {"cniVersion": "0.3.1", "name": "default", "type": "bridge", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}}]}`)
			n.start()
			n.waitReady(true, soon)
			n.pod("a")
		}
		return "ready, pod runs; with the default of binDir, too"
	})
}

// An empty nodename file may be one that its writer has just truncated, or one that
// stays so: Calico then takes the list's hostname or the machine's name.
func TestN5(t *testing.T) {
	alike(t, "calico, empty nodename file", func(t *testing.T, side harness.Side) string {
		try := func(instead string, within time.Duration) time.Duration {
			n, nodename := calicoNode(t, harness.Options{Side: side})
			n.write(n.conf("10-calico.conflist"), strings.Replace(harness.CalicoList(nodename), `"nodename": "here", `, instead, 1))
			touch(t, nodename)
			n.start()
			_, took := n.waitReady(true, within)
			n.pod("a")
			return took
		}
		held := try("", better)
		named := try(`"hostname": "here", `, soon)
		return fmt.Sprintf("ready after %s, pod runs; with hostname in the list after %s", tenth(held), tenth(named))
	})
}

// Stock makes a conf dir that is not there when it starts, so a plain cp works.
// https://github.com/containerd/cri/issues/589
func TestN11(t *testing.T) {
	alike(t, "containerd/cri#589", func(t *testing.T, side harness.Side) string {
		base, err := os.MkdirTemp("", harness.Prefix)
		assert.NilError(t, err)
		n := prepare(t, harness.Options{Side: side, Base: base, ConfDir: filepath.Join(base, "etc", "cni", "net.d")})
		assert.NilError(t, os.RemoveAll(filepath.Join(base, "etc")))
		n.start()
		n.waitReady(false, soon)
		// What cp does: it makes the file and writes it, and no directory.
		assert.NilError(t, os.WriteFile(n.conf("10-a.conflist"), []byte(c10("a")), 0o644))
		_, took := n.waitReady(true, soon)
		n.pod("a")
		return "ready " + short(took) + " after cp"
	})
}

// The examples of CRI's documentation install 99-loopback.conf, which makes no pod
// network.
func TestN12(t *testing.T) {
	sides(t, "only 99-loopback.conf", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		real, err := harness.Plugin("loopback")
		assert.NilError(t, err)
		assert.NilError(t, harness.Install(real, n.bin("loopback")))
		n.write(n.conf("99-loopback.conf"), `{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}`)
		n.start()
		if side == harness.Stock {
			n.waitReady(true, soon)
			err := n.refused(harness.Pod{Name: "a"})
			return "NetworkReady true; pod fails: " + err[strings.LastIndex(err, ": ")+2:]
		}
		message := n.notReady(soon, "99-loopback.conf", "loopback")
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "cni plugin not initialized"))
		return n.cause(message)
	})
}

// crictl takes no answer of more than 16 MiB.
func TestN13(t *testing.T) {
	alike(t, "13,000 bad files", func(t *testing.T, side harness.Side) string {
		const files, most = 13000, 16 << 20
		n := prepare(t, harness.Options{Side: side})
		for i := range files {
			assert.NilError(t, os.WriteFile(n.conf(fmt.Sprintf("50-bad%05d.conflist", i)), []byte("{"), 0o644))
		}
		n.start()
		var size int
		var info map[string]string
		assert.NilError(t, harness.Poll(t.Context(), soon, func() (err error) {
			if _, info, err = n.Info(t.Context()); err != nil {
				return err
			}
			size = 0
			for k, v := range info {
				size += len(k) + len(v)
			}
			if side == harness.Patched && !strings.Contains(info["cniReload"], fmt.Sprint(files)) {
				err = fmt.Errorf("the report does not say that %d files are skipped: %.300s", files, info["cniReload"])
			}
			return err
		}))
		assert.Assert(t, size < most/8, "%d bytes", size)
		begin := time.Now()
		_, _, err := n.Info(t.Context())
		assert.NilError(t, err)
		return fmt.Sprintf("info answers in %s, %d KiB", short(time.Since(begin)), size>>10)
	})
}
