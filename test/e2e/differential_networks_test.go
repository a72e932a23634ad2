// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/vendors"
)

// shipped is a network of test/vendors on a node whose fake plugins have the real
// ones' names, and need and run what the real ones do.
type shipped struct {
	vendors.Vendor
	text string
	// types are the executables of the list that the project installs.
	types []string
	// states are how they behave.
	states map[string]fake.State
}

// shippedNetworks are all of them.
var shippedNetworks = sync.OnceValue(func() []shipped {
	all, err := vendors.All()
	if err != nil {
		panic(err)
	}
	var networks []shipped
	for _, v := range all {
		b, err := v.Config()
		if err != nil {
			panic(err)
		}
		s := shipped{Vendor: v, text: elsewhere.Replace(string(b)), states: map[string]fake.State{}}
		s.walk(s.conf())
		slices.Sort(s.types)
		s.types = slices.Compact(s.types)
		for _, a := range v.Agent {
			state := s.states[a.Plugin]
			state.Needs = append(state.Needs, needsOf(a)...)
			s.states[a.Plugin] = state
		}
		networks = append(networks, s)
	}
	return networks
})

// elsewhere moves folders that a private daemon shares with the machine.
var elsewhere = strings.NewReplacer("/etc/cni/net.d", "/run/cni-net.d", "/var/snap", "/run/snap")

// conf decodes the configuration.
func (s shipped) conf() map[string]any {
	var conf map[string]any
	if err := json.Unmarshal([]byte(s.text), &conf); err != nil {
		panic(fmt.Sprintf("%s: %v", s.File, err))
	}
	// What kube-router's agent writes into the list once it is up.
	for _, a := range s.Agent {
		if a.Kind == "configuration" {
			for _, p := range conf["plugins"].([]any) {
				if ipam, ok := p.(map[string]any)["ipam"].(map[string]any); ok {
					ipam["subnet"] = "10.250.0.0/16"
				}
			}
		}
	}
	completeFlannel(conf)
	return conf
}

// completeFlannel writes out what flannel's plugin runs without being told, for the
// fake one.
func completeFlannel(v any) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			completeFlannel(e)
		}
	case map[string]any:
		for _, e := range v {
			completeFlannel(e)
		}
		if v["type"] != "flannel" {
			return
		}
		delegate, ok := v["delegate"].(map[string]any)
		if !ok {
			delegate = map[string]any{}
			v["delegate"] = delegate
		}
		if delegate["type"] == nil {
			delegate["type"] = "bridge"
		}
		if v["ipam"] == nil {
			v["ipam"] = map[string]any{"type": "host-local"}
		}
	}
}

// walk notes which executables are named, and who runs them.
func (s *shipped) walk(v any) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			s.walk(e)
		}
	case map[string]any:
		for _, e := range v {
			s.walk(e)
		}
		name, _ := v["type"].(string)
		if !slices.Contains(s.Installed, name) || slices.Contains(s.Shown, name) {
			return
		}
		s.types = append(s.types, name)
		state := s.states[name]
		for _, key := range []string{"ipam", "delegate", "delegates"} {
			nested, one := v[key].(map[string]any)
			typ, _ := nested["type"].(string)
			if runs := !one && v[key] != nil || one && typ != "" && slices.Contains(s.Installed, typ) && !slices.Contains(s.Shown, typ); runs && !slices.Contains(state.Runs, key) {
				state.Runs = append(state.Runs, key)
			}
		}
		if name == "multus" {
			state.BinDir = "/opt/cni/bin"
		}
		s.states[name] = state
	}
}

// needsAtDEL are the plugins that need their agent at DEL, too, from the sources that
// the rules of cnireload name.
var needsAtDEL = []string{"calico", "antrea", "ovn-k8s-cni-overlay", "terway", "kube-ovn", "hybridnet", "coil", "opflex-agent-cni", "dhcp", "spiderpool"}

// needsOf is what a plugin fails without.
func needsOf(a vendors.Agent) []fake.Need {
	n := fake.Need{Target: elsewhere.Replace(a.Target), Key: a.Key, Socket: a.Kind == "unix socket", Verb: "ADD"}
	switch {
	case a.Kind == "tcp port" || a.Kind == "configuration":
		return nil // a daemon's ports are the machine's
	case a.Key == "daemonSocketDir" || a.Key == "dataplane_options.socket":
		n.Key = "" // no path of a socket
	}
	if slices.Contains(needsAtDEL, a.Plugin) {
		n.Verb = ""
	}
	if a.Plugin == "multus-shim" {
		// Its DEL succeeds whether or not the daemon is there.
		quiet := n
		quiet.Verb, quiet.Quiet = "DEL", true
		return []fake.Need{n, quiet}
	}
	return []fake.Need{n}
}

// provides are the files and sockets of the agent. A socket that the list names is at
// another path if it has moved.
func (s shipped) provides(moved bool) (provided []vendors.Agent) {
	for _, a := range s.Agent {
		if a.Kind == "tcp port" || a.Kind == "configuration" {
			continue
		}
		a.Target = elsewhere.Replace(a.Target)
		if moved && s.movable(a) {
			a.Target += movedSuffix
		}
		provided = append(provided, a)
	}
	return provided
}

const movedSuffix = ".moved"

func (s shipped) movable(a vendors.Agent) bool {
	return a.Kind == "unix socket" && a.Key != "" && strings.Contains(s.text, `"`+a.Target+`"`)
}

// file is the configuration in a form that can differ from the shipped one: another
// cniVersion, without the last of its plugins, with the agent's socket elsewhere.
func (s shipped) file(version string, short, moved bool) []byte {
	conf := s.conf()
	if version != "" {
		conf["cniVersion"] = version
	}
	if plugins, _ := conf["plugins"].([]any); short && len(plugins) > 1 {
		conf["plugins"] = plugins[:len(plugins)-1]
	}
	b, err := json.MarshalIndent(conf, "", "  ")
	if err != nil {
		panic(err)
	}
	for _, a := range s.Agent {
		if moved && s.movable(a) {
			b = []byte(strings.ReplaceAll(string(b), `"`+a.Target+`"`, `"`+a.Target+movedSuffix+`"`))
		}
	}
	return append(b, '\n')
}

// ext is that of the file's name on a node.
func (s shipped) ext() string { return filepath.Ext(s.As) }

// states is how the fake plugins of some networks behave when all is well.
func states(networks []shipped) map[string]fake.State {
	all := map[string]fake.State{"loopback": {}}
	for _, n := range networks {
		for plugin, state := range n.states {
			old := all[plugin]
			for _, r := range state.Runs {
				if !slices.Contains(old.Runs, r) {
					old.Runs = append(old.Runs, r)
				}
			}
			for _, need := range state.Needs {
				if !slices.Contains(old.Needs, need) {
					old.Needs = append(old.Needs, need)
				}
			}
			old.BinDir = state.BinDir
			all[plugin] = old
		}
	}
	return all
}

// executables are those of some networks, sorted, with the loopback plugin.
func executables(networks []shipped) []string {
	set := map[string]bool{"loopback": true}
	for _, n := range networks {
		for _, e := range n.types {
			set[e] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// The fake plugins do what the lists ask for: those that are known to run others do.
func TestShippedNetworks(t *testing.T) {
	runs := map[string][]string{}
	for _, s := range shippedNetworks() {
		assert.Assert(t, len(s.types) > 0, "%s names no executable of its own", s.Name)
		for plugin, state := range s.states {
			runs[plugin] = append(runs[plugin], state.Runs...)
		}
	}
	for plugin, keys := range map[string][]string{"bridge": {"ipam"}, "flannel": {"delegate", "ipam"}, "multus": {"delegates"}, "calico": {"ipam"}, "antrea": nil, "azure-vnet": {"ipam"}, "opflex-agent-cni": nil} {
		slices.Sort(runs[plugin])
		assert.DeepEqual(t, append([]string(nil), slices.Compact(runs[plugin])...), keys)
	}
}
