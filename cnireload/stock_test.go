// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cnireload

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
)

// TestNeverWorseThanStockAtRemoval brings a node into all kinds of states after
// two pods were added, one by go-cni, and has each library remove its own.
// Wherever go-cni does, the other pod goes at once, too; and where go-cni's DELs
// have freed the address, the same plugins are run, and have freed the other.
func TestNeverWorseThanStockAtRemoval(t *testing.T) {
	t.Parallel()
	type state struct {
		name string
		do   func(*removalNode)
		// needsAgent says that nothing else is to be seen while the agent is away.
		needsAgent bool
	}
	lists := []state{
		{name: "same list", do: func(*removalNode) {}},
		{name: "other MTU", do: func(d *removalNode) {
			d.write("10-a.conflist", conflist("0.4.0", d.name, d.agent("agent", `,"mtu":1400`), "mesh"))
		}},
		{name: "without mesh", do: func(d *removalNode) { d.write("10-a.conflist", conflist("0.4.0", d.name, d.agent("agent", ""))) }},
		{name: "other network", do: func(d *removalNode) { d.write("10-a.conflist", conflist("1.0.0", d.name+"next", "next")) }},
		{name: "other name", do: func(d *removalNode) {
			d.write("10-a.conflist", conflist("0.4.0", d.name+"next", d.agent("agent", ""), "mesh"))
		}},
		{name: "other version", do: func(d *removalNode) {
			d.write("10-a.conflist", conflist("1.0.0", d.name, d.agent("agent", ""), "mesh"))
		}},
		{name: "agent moved", do: func(d *removalNode) {
			d.write("10-a.conflist", conflist("0.4.0", d.name, d.agent("moved", ""), "mesh"))
			d.must(os.Rename(filepath.Join(d.answers, "agent"), filepath.Join(d.answers, "moved")))
		}},
		{name: "another one around it", do: func(d *removalNode) {
			d.write("10-a.conflist", conflist("1.0.0", d.name, fmt.Sprintf(`{"type":"next","delegates":[%s]}`, d.agent("agent", ""))))
		}},
		{name: "no list", do: func(d *removalNode) { d.remove("10-a.conflist") }},
	}
	uninstall := func(types ...string) func(*removalNode) {
		return func(d *removalNode) {
			for _, typ := range types {
				d.must(os.Remove(filepath.Join(d.bin, typ)))
			}
		}
	}
	plugins := []state{
		{name: "all plugins", do: func(*removalNode) {}},
		{name: "mesh uninstalled", do: uninstall("mesh")},
		{name: "main uninstalled", do: uninstall("calico"), needsAgent: true},
		{name: "main and mesh uninstalled", do: uninstall("calico", "mesh"), needsAgent: true},
		{name: "all uninstalled", do: uninstall("calico", "mesh", "next", "loopback"), needsAgent: true},
		{name: "version refused", do: func(d *removalNode) { d.must(os.WriteFile(filepath.Join(d.answers, "refuse"), nil, 0o644)) }},
		{name: "mesh fails", do: func(d *removalNode) {
			d.answer("mesh", "DEL", reply{out: `{"code":100,"msg":"no more"}`, code: 1})
		}, needsAgent: true},
	}
	agents := []state{
		{name: "agent there", do: func(*removalNode) {}},
		{name: "agent away", do: func(d *removalNode) {
			_ = os.Remove(filepath.Join(d.answers, "agent"))
			_ = os.Remove(filepath.Join(d.answers, "moved"))
		}},
	}
	caches := []state{
		{name: "cache whole", do: func(*removalNode) {}},
		{name: "cache emptied", do: func(d *removalNode) { d.must(os.Truncate(d.cached("ours"), 0)) }},
		{name: "cache gone", do: func(d *removalNode) { d.must(os.Remove(d.cached("ours"))) }},
	}
	for _, list := range lists {
		for _, plugin := range plugins {
			for _, agent := range agents {
				for _, cache := range caches {
					if agent.name != agents[0].name && plugin.needsAgent {
						continue
					}
					if cache.name != caches[0].name && (plugin.name != plugins[0].name || agent.name != agents[0].name) {
						continue // the lists in use are run whatever the list of ADD was
					}
					t.Run(strings.Join([]string{list.name, plugin.name, agent.name, cache.name}, ", "), func(t *testing.T) {
						t.Parallel()
						d := newRemovalNode(t)
						d.addBoth()
						list.do(d)
						plugin.do(d)
						agent.do(d)
						cache.do(d)
						d.compare()
					})
				}
			}
		}
	}
}

// removalNode is a node whose main plugin frees the address of a pod if the agent
// that its list names is there.
type removalNode struct {
	*node
	name   string // of the network
	stock  gocni.CNI
	ours   *Network
	suffix string
}

func newRemovalNode(t *testing.T) *removalNode {
	d := &removalNode{node: newNode(t)}
	d.suffix = fmt.Sprintf("%d-%d", os.Getpid(), removalNodes.Add(1)) // go-cni's cache is the machine's
	d.name = "stock-" + d.suffix
	d.install("loopback", "calico", "mesh", "next")
	d.must(os.WriteFile(filepath.Join(d.answers, "agent"), []byte("node"), 0o644))
	d.answer("loopback", "ADD", reply{out: `{"cniVersion":"0.3.1"}`})
	address := fmt.Sprintf(`a='%s'/address-"$CNI_CONTAINERID"`, d.answers)
	refuse := fmt.Sprintf(`if [ -e '%s' ]; then case "$input" in *'"cniVersion":"0.4.0"'*) echo '{"code":1,"msg":"incompatible CNI versions"}'; exit 1;; esac; fi`, filepath.Join(d.answers, "refuse"))
	needs := `f=${input#*nodename_file\":\"}; f=${f%%\"*}; [ -e "$f" ] || { echo '{"code":100,"msg":"the agent is away"}'; exit 1; }`
	d.answer("calico", "ADD", reply{sh: fmt.Sprintf("(%s; : >\"$a\")", address), out: result("0.4.0", "10.1.0.2")})
	d.answer("calico", "DEL", reply{sh: fmt.Sprintf("%s\n%s\n(%s; rm -f \"$a\")", refuse, needs, address)})
	d.answer("mesh", "ADD", reply{out: result("0.4.0", "10.1.0.2")})
	// A meta plugin tells the agent of what it delegates to.
	d.answer("next", "DEL", reply{sh: fmt.Sprintf(`case "$input" in *calico*) %s; (%s; rm -f "$a");; esac`, needs, address)})
	d.write("10-a.conflist", conflist("0.4.0", d.name, d.agent("agent", ""), "mesh"))
	t.Cleanup(func() {
		left, _ := filepath.Glob(filepath.Join(libcni.CacheDir, "results", "*-"+d.id("theirs")+"-*"))
		for _, file := range left {
			_ = os.Remove(file)
		}
	})
	return d
}

var removalNodes atomic.Int32

// agent is the main plugin's entry, with the agent's file and more keys.
func (d *removalNode) agent(file, more string) string {
	return fmt.Sprintf(`{"type":"calico","nodename":"x","nodename_file":%q%s}`, filepath.Join(d.answers, file), more)
}

func (d *removalNode) id(whose string) string {
	return whose + "-" + d.suffix
}

func (d *removalNode) cached(whose string) string {
	return filepath.Join(d.cache, "results", fmt.Sprintf("%s-%s-eth0", d.name, d.id(whose)))
}

func (d *removalNode) freed(whose string) bool {
	_, err := os.Stat(filepath.Join(d.answers, "address-"+d.id(whose)))
	return os.IsNotExist(err)
}

// addBoth adds a pod with each library.
func (d *removalNode) addBoth() {
	d.t.Helper()
	var err error
	d.stock, err = gocni.New(gocni.WithPluginConfDir(d.conf), gocni.WithPluginDir([]string{d.bin}), gocni.WithMinNetworkCount(2))
	d.must(err)
	d.must(d.stock.Load(gocni.WithLoNetwork, gocni.WithDefaultConf))
	_, err = d.stock.Setup(d.t.Context(), d.id("theirs"), namespaceThere)
	d.must(err)
	d.ours = d.network(WithLoNetwork, WithMinNetworkCount(2), WithOwedRemovals(filepath.Join(d.answers, "owed")), WithDelGrace("100ms"))
	d.ours.pace.poll, d.ours.pace.agent = time.Hour, 30*time.Millisecond
	d.ours.Start()
	becomesReady(d.t, d.ours)
	_, err = d.ours.Setup(d.t.Context(), d.id("ours"), namespaceThere)
	d.must(err)
	if d.freed("theirs") || d.freed("ours") {
		d.t.Fatal("no addresses")
	}
}

// compare removes both pods and compares.
func (d *removalNode) compare() {
	t := d.t
	t.Helper()
	_ = d.stock.Load(gocni.WithLoNetwork, gocni.WithDefaultConf)
	_ = d.ours.Load()
	d.take("DEL")
	theirs := d.stock.Remove(t.Context(), d.id("theirs"), namespaceThere)
	want := d.take("DEL").All
	begin := time.Now()
	ours := d.ours.Remove(t.Context(), d.id("ours"), namespaceThere)
	got := d.take("DEL").All
	switch {
	case theirs == nil && ours != nil:
		t.Errorf("stock removes the pod at once, with %q; here: %v, with %q", want, ours, got)
	case theirs == nil && d.freed("theirs"):
		if !d.freed("ours") {
			t.Errorf("stock frees the address with %q; here it is kept after %q", want, got)
		}
		for _, call := range want {
			// A plugin that was not there at ADD holds nothing.
			if !slices.Contains(got, call) && call != "DEL eth0 next" {
				t.Errorf("stock has run %q, here was run %q", want, got)
			}
		}
	}
	// What is only away keeps no pod for longer than the grace. What the list in
	// use fails at by itself keeps it in stock, too.
	for ours != nil && time.Since(begin) < within {
		if ours = d.ours.Remove(t.Context(), d.id("ours"), namespaceThere); ours != nil && strings.Contains(ours.Error(), "no more") && !strings.Contains(ours.Error(), "missing") {
			if theirs == nil {
				t.Errorf("kept: %v", ours)
			}
			return
		}
	}
	if ours != nil {
		t.Errorf("after %s: %v; stock: %v", within, ours, theirs)
	}
}
