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

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// What readiness makes of the plugins that people run, and whether a pod can be
// added when it says ready. Run with -v it prints the rows of the table in
// docs/readiness.md.
func TestRealPlugins(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true, PrivateNet: true})
	install := func(names ...string) {
		t.Helper()
		for _, name := range names {
			src, err := harness.Plugin(name)
			assert.NilError(t, err)
			assert.NilError(t, harness.Install(src, n.bin(name)))
		}
	}
	install("loopback", "bridge", "ptp", "macvlan", "host-local", "dhcp", "static", "portmap", "bandwidth", "tuning", "firewall")
	n.start()

	const (
		hostLocal = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.176.%d.0/24"}]]}`
		bridge    = `{"type": "bridge", "bridge": "cr0", %s}`
	)
	pods := 0
	use := func(plugins ...string) {
		t.Helper()
		// Files that were there are gone first, so that each row starts anew.
		_ = os.Remove(n.conf("10-real.conflist"))
		n.notReady(soon, "no network config found")
		n.write(n.conf("10-real.conflist"), `{"cniVersion": "1.1.0", "name": "real", "plugins": [`+strings.Join(plugins, ", ")+`]}`)
	}
	ranges := func() string { return fmt.Sprintf(hostLocal, pods%200) }
	ready := func() string {
		t.Helper()
		n.waitReady(true, soon)
		n.agree()
		return "ready"
	}
	pod := func() string {
		t.Helper()
		pods++
		n.added(harness.Pod{Name: fmt.Sprintf("p%d", pods)})
		return "pod added and removed"
	}
	// fails runs a pod that the plugin itself cannot add.
	fails := func(cause string) string {
		t.Helper()
		pods++
		err := n.refused(harness.Pod{Name: fmt.Sprintf("p%d", pods)})
		assert.Assert(t, cmp.Contains(err, cause))
		return "pod fails: " + cause
	}
	not := func(causes ...string) string {
		t.Helper()
		message := n.cause(n.notReady(graced, causes...))
		_, message, _ = strings.Cut(message, "10-real.conflist: ")
		if i := strings.Index(message, ", since "); i > 0 {
			message = message[:i] + ", since …"
		}
		return "not ready: `" + message + "`"
	}
	// verb is what STATUS brought for a plugin of the list.
	verb := func(plugin string) string {
		t.Helper()
		r := n.report()
		for _, p := range r.Networks[networkIndex(r, "real")].Plugins {
			if p.Type == plugin {
				return p.StatusVerb
			}
		}
		t.Fatalf("no plugin %q in %+v", plugin, r.Networks)
		return ""
	}
	row := func(plugin, checks string, observed ...string) {
		t.Logf("| %s | %s | %s |", plugin, checks, strings.Join(observed, "; "))
	}
	gone := func(plugin string) {
		t.Helper()
		assert.NilError(t, os.Remove(n.bin(plugin)))
	}

	use(fmt.Sprintf(bridge, ranges()))
	observed := []string{ready(), pod(), "STATUS " + verb("bridge")}
	gone("bridge")
	observed = append(observed, "without the binary "+not(`"bridge"`))
	install("bridge")
	row("bridge", "binary, VERSION, STATUS (asks its IPAM)", observed...)

	use(`{"type": "ptp", ` + ranges() + `}`)
	row("ptp", "binary, VERSION, STATUS (asks its IPAM)", ready(), pod(), "STATUS "+verb("ptp"))

	// The bridge made above is an interface to put macvlan on.
	use(`{"type": "macvlan", "master": "cr0", ` + ranges() + `}`)
	observed = []string{ready(), pod(), "STATUS " + verb("macvlan")}
	use(`{"type": "macvlan", "master": "absent0", ` + ranges() + `}`)
	row("macvlan", "binary, VERSION, STATUS (asks its IPAM); not that `master` exists", append(observed, "with an absent master "+ready(), fails("Link not found"))...)

	use(fmt.Sprintf(bridge, ranges()))
	ready()
	gone("host-local")
	observed = []string{"without the binary " + not(`"host-local"`)}
	install("host-local")
	observed = append(observed, "with it "+ready())
	use(fmt.Sprintf(bridge, `"ipam": {"type": "host-local"}`))
	row("host-local", "binary, VERSION; gate: the list has `subnet` or `ranges`", append(observed, "without a range "+not(`"host-local"`, "ranges"))...)

	socket := filepath.Join(n.Base, "dhcp.sock")
	use(`{"type": "macvlan", "master": "cr0", "ipam": {"type": "dhcp", "daemonSocketPath": "` + socket + `"}}`)
	observed = []string{"without its daemon " + not(`"dhcp"`, socket, "ipam.daemonSocketPath")}
	daemon := func() (end func()) {
		t.Helper()
		cmd := n.CommandInside(n.bin("dhcp"), "daemon", "-socketpath", socket)
		assert.NilError(t, cmd.Start())
		return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	}
	end := daemon()
	begin := time.Now()
	n.waitReady(true, soon)
	observed = append(observed, fmt.Sprintf("ready %s after it is started", short(time.Since(begin))))
	end()
	_, err := os.Stat(socket)
	assert.NilError(t, err, "the daemon leaves its socket behind")
	n.stays(true, quiet)
	observed = append(observed, "stays ready when it is killed, "+fails("connection refused"))
	use(`{"type": "macvlan", "master": "cr0", "ipam": {"type": "dhcp", "daemonSocketPath": "` + socket + `"}}`)
	observed = append(observed, "with a dead daemon's socket "+not("does not accept connections"))
	row("dhcp", "binary, VERSION; gate: its daemon accepts connections on `ipam.daemonSocketPath`, default /run/cni/dhcp.sock", observed...)

	use(fmt.Sprintf(bridge, `"ipam": {"type": "static", "addresses": [{"address": "10.176.250.2/24"}]}`))
	row("static", "binary, VERSION", ready(), pod())

	for _, p := range []struct{ name, conf string }{
		{"portmap", `{"type": "portmap", "capabilities": {"portMappings": true}}`},
		{"bandwidth", `{"type": "bandwidth", "capabilities": {"bandwidth": true}}`},
		{"tuning", `{"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}}`},
		{"firewall", `{"type": "firewall", "backend": "iptables"}`},
	} {
		use(fmt.Sprintf(bridge, ranges()), p.conf)
		observed := []string{"chained to bridge " + ready(), pod(), "STATUS " + verb(p.name)}
		gone(p.name)
		observed = append(observed, "without the binary "+not(`"`+p.name+`"`))
		install(p.name)
		observed = append(observed, "again "+ready())
		row(p.name, "binary, VERSION, STATUS", observed...)
	}

	use(fmt.Sprintf(bridge, ranges()))
	ready()
	gone("loopback")
	message := n.notReady(graced, `"loopback"`)
	install("loopback")
	row("loopback", "binary, VERSION", "without the binary not ready: `"+n.cause(message)+"`", "with it "+ready(), pod())

	// Plugins whose modules do not build here: the list and the gate are real,
	// the plugin is the fake one under its name.
	assert.NilError(t, n.InstallFake("flannel", "multus", "multus-shim"))
	env := filepath.Join(n.Base, "subnet.env")
	flannel := `{"type": "flannel", "subnetFile": "` + env + `", "delegate": {"hairpinMode": true, "isDefaultGateway": true}}`
	assert.NilError(t, n.Fake.Set("flannel", fake.State{}))
	use(flannel, `{"type": "portmap", "capabilities": {"portMappings": true}}`)
	observed = []string{"without subnet.env " + not(`"flannel"`, env, "subnetFile")}
	n.write(env, "FLANNEL_NETWORK=10.176.0.0/16\nFLANNEL_SUBNET=10.176.251.1/24\n")
	observed = append(observed, "half of it "+not("lacks FLANNEL_MTU, FLANNEL_IPMASQ"))
	n.write(env, "FLANNEL_NETWORK=10.176.0.0/16\nFLANNEL_SUBNET=10.176.251.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n")
	observed = append(observed, "whole "+ready(), pod())
	gone("bridge")
	observed = append(observed, "without its delegate "+not(`"bridge"`))
	install("bridge")
	ready()
	row("flannel (list and gate; the plugin is a stand-in)", "binary, VERSION; gate: `subnetFile`, default /run/flannel/subnet.env, has the keys flannel needs; the binaries of its delegate (bridge) and IPAM (host-local)", observed...)

	indicator := filepath.Join(n.Base, "indicator")
	use(`{"type": "multus", "readinessindicatorfile": "` + indicator + `", "delegates": [{"cniVersion": "1.0.0", "name": "default", "plugins": [` + flannel + `]}]}`)
	observed = []string{"without the file " + ready()}
	g := n.report().Gates
	assert.Equal(t, len(g), 2, "%+v", g)
	assert.Assert(t, g[0].Plugin == "multus" && !g[0].Open && g[0].Mode == "report", "%+v", g[0])
	observed = append(observed, "the report says `"+n.masked(g[0].Target)+" "+g[0].Cause+"`, mode report")
	touch(t, indicator)
	assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
		if g := n.report().Gates[0]; !g.Open {
			return fmt.Errorf("closed: %+v", g)
		}
		return nil
	}))
	assert.NilError(t, os.Remove(env))
	use(`{"type": "multus", "delegates": [{"cniVersion": "1.0.0", "name": "default", "plugins": [` + flannel + `]}]}`)
	observed = append(observed, "its delegate flannel without subnet.env "+not(`"flannel"`, env))
	row("multus (list and gate; the plugin is a stand-in)", "binary, VERSION, STATUS; `readinessindicatorfile` reported, pods wait for it; binaries and gates of `delegates[]`", observed...)

	use(`{"type": "multus-shim", "daemonSocketDir": "` + n.Base + `/"}`)
	row("multus-shim (list and gate; the plugin is a stand-in)", "binary, VERSION, STATUS; gate: its daemon accepts connections on `daemonSocketDir`/multus.sock, default /run/multus", not(`"multus-shim"`, filepath.Join(n.Base, "multus.sock")))

	// Nothing of all these pods is left.
	held, err := n.HostLocal("real")
	assert.NilError(t, err)
	assert.Equal(t, len(held), 0, "addresses held by host-local: %v", held)
}
