// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cnireload/cnireload/test/fake"
)

// shipped is a network in the shape in which its project ships it, with what its
// plugins and its agent do. It is for a node on which the fake plugins have the
// real ones' names.
type shipped struct {
	name    string
	version string // the cniVersion that the project ships
	// plugins are the entries of its list, in JSON. A socket that a key names is
	// written as SOCKET, and moves.
	plugins []string
	// needs is what the project's own plugins cannot do without, by plugin.
	needs map[string][]fake.Need
	// provides is what the agent makes while it is up.
	provides []provided
	// executables are what the project installs; its list names others, too.
	executables []string
}

// provided is a file with its content, or a socket.
type provided struct {
	path    string // as plugins see it
	content string
	socket  bool
}

const (
	socketHere  = "/run/agent/a.sock"
	socketMoved = "/run/agent/b.sock"
)

// pluginKinds is what plugins of no network in particular run, wherever they are used.
var pluginKinds = map[string]fake.State{
	"bridge":      {Runs: []string{"ipam"}},
	"ptp":         {Runs: []string{"ipam"}},
	"flannel":     {Runs: []string{"delegate"}},
	"multus":      {Runs: []string{"delegates"}, BinDir: "/opt/cni/bin"},
	"multus-shim": {},
	"calico":      {Runs: []string{"ipam"}},
}

func socket(key string) []fake.Need { return []fake.Need{{Key: key, Socket: true}} }

// both needs are those of ADD and DEL.
func compiledIn(path string) []fake.Need { return []fake.Need{{Target: path, Socket: true}} }

// shippedNetworks are those that the differential soak picks from.
var shippedNetworks = []shipped{
	{
		name: "cbr0", version: "0.3.1",
		plugins:     []string{`{"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.88.0.0/16"}]]}}`, `{"type":"portmap","capabilities":{"portMappings":true}}`, `{"type":"firewall"}`},
		executables: []string{"bridge", "host-local", "portmap", "firewall"},
	},
	{
		// antrea-io/antrea, build/charts/antrea/conf/antrea-cni.conflist and
		// build/images/scripts/install_cni.
		name: "antrea", version: "0.3.0",
		plugins:     []string{`{"type":"antrea","ipam":{"type":"host-local"}}`, `{"type":"portmap","capabilities":{"portMappings":true}}`, `{"type":"bandwidth","capabilities":{"bandwidth":true}}`},
		needs:       map[string][]fake.Need{"antrea": compiledIn("/var/run/antrea/cni.sock")},
		provides:    []provided{{path: "/var/run/antrea/cni.sock", socket: true}},
		executables: []string{"antrea", "portmap", "bandwidth"},
	},
	{
		// Azure/azure-container-networking, cni/azure-linux-swift-overlay.conflist.
		name: "azure", version: "0.3.0",
		plugins:     []string{`{"type":"azure-vnet","mode":"transparent","ipsToRouteViaHost":["169.254.20.10"],"ipam":{"type":"azure-cns","mode":"overlay"}}`, `{"type":"portmap","capabilities":{"portMappings":true},"snat":true}`},
		executables: []string{"azure-vnet", "portmap"},
	},
	{
		// noironetworks/aci-containers, docker/launch-hostagent.sh.
		name: "k8s-pod-network", version: "0.3.1",
		plugins:     []string{`{"type":"opflex-agent-cni","wait-for-network":true,"wait-for-network-duration":210,"ipam":{"type":"opflex-agent-cni-ipam"}}`},
		needs:       map[string][]fake.Need{"opflex-agent-cni": {{Key: "ep-rpc-sock", Target: "/var/run/aci-containers-ep-rpc.sock", Socket: true}}},
		provides:    []provided{{path: "/var/run/aci-containers-ep-rpc.sock", socket: true}},
		executables: []string{"opflex-agent-cni"},
	},
	{
		// projectcalico/calico, manifests/calico.yaml.
		name: "calico", version: "0.3.1",
		plugins:     []string{`{"type":"calico","log_level":"info","datastore_type":"kubernetes","mtu":0,"ipam":{"type":"calico-ipam"},"policy":{"type":"k8s"},"kubernetes":{"kubeconfig":"/run/calico/kubeconfig"}}`, `{"type":"portmap","snat":true,"capabilities":{"portMappings":true}}`, `{"type":"bandwidth","capabilities":{"bandwidth":true}}`},
		needs:       map[string][]fake.Need{"calico": {{Key: "nodename_file", Target: "/var/lib/calico/nodename"}, {Key: "kubernetes.kubeconfig"}}},
		provides:    []provided{{path: "/var/lib/calico/nodename", content: "here"}, {path: "/run/calico/kubeconfig", content: "{}"}},
		executables: []string{"calico", "calico-ipam", "portmap", "bandwidth"},
	},
	{
		// flannel-io/flannel, Documentation/kube-flannel.yml.
		name: "cbr0", version: "0.3.1",
		plugins:     []string{`{"type":"flannel","delegate":{"type":"bridge","hairpinMode":true,"isDefaultGateway":true,"ipam":{"type":"host-local","subnet":"10.244.1.0/24"}}}`, `{"type":"portmap","capabilities":{"portMappings":true}}`},
		needs:       map[string][]fake.Need{"flannel": {{Key: "subnetFile", Target: "/run/flannel/subnet.env", Verb: "ADD"}}},
		provides:    []provided{{path: "/run/flannel/subnet.env", content: "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"}},
		executables: []string{"flannel", "bridge", "host-local", "portmap"},
	},
	{
		// k8snetworkplumbingwg/multus-cni, docs/configuration.md.
		name: "multus-cni-network", version: "0.3.1",
		plugins:     []string{`{"type":"multus","binDir":"/opt/cni/bin","delegates":[{"cniVersion":"0.3.1","name":"default","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.9.0.0/24"}},{"type":"portmap","capabilities":{"portMappings":true}}]}]}`},
		executables: []string{"multus", "bridge", "host-local", "portmap"},
	},
	{
		// k8snetworkplumbingwg/multus-cni, deployments/multus-daemonset-thick.yml: its
		// DEL succeeds whether or not the daemon is there.
		name: "multus-thick", version: "0.3.1",
		plugins:     []string{`{"type":"multus-shim","logLevel":"verbose","daemonSocketDir":"/run/multus"}`},
		needs:       map[string][]fake.Need{"multus-shim": {{Target: "/run/multus/multus.sock", Socket: true, Verb: "ADD"}, {Target: "/run/multus/multus.sock", Socket: true, Verb: "DEL", Quiet: true}}},
		provides:    []provided{{path: "/run/multus/multus.sock", socket: true}},
		executables: []string{"multus-shim"},
	},
	{
		// kubeovn/kube-ovn, dist/images/01-kube-ovn.conflist.
		name: "kube-ovn", version: "0.3.1",
		plugins:     []string{`{"type":"kube-ovn","server_socket":"SOCKET"}`, `{"type":"portmap","capabilities":{"portMappings":true}}`},
		needs:       map[string][]fake.Need{"kube-ovn": socket("server_socket")},
		provides:    []provided{{path: "SOCKET", socket: true}},
		executables: []string{"kube-ovn", "portmap"},
	},
	{
		// istio/istio, cni/pkg/install: an entry at the end of another network's list.
		name: "kindnet", version: "0.3.1",
		plugins:     []string{`{"type":"ptp","ipMasq":false,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state","routes":[{"dst":"0.0.0.0/0"}],"ranges":[[{"subnet":"10.244.0.0/24"}]]},"mtu":1500}`, `{"type":"portmap","capabilities":{"portMappings":true}}`, `{"type":"istio-cni","log_level":"info","kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-istio-cni-kubeconfig"}}`},
		executables: []string{"ptp", "host-local", "portmap", "istio-cni"},
	},
	{
		// aws/amazon-vpc-cni-k8s, misc/10-aws.conflist.
		name: "aws-cni", version: "0.4.0",
		plugins:     []string{`{"name":"aws-cni","type":"aws-cni","vethPrefix":"eni","mtu":"9001","pluginLogFile":"/var/log/aws-routed-eni/plugin.log"}`, `{"name":"egress-cni","type":"egress-cni","enabled":"false","ipam":{"type":"host-local","ranges":[[{"subnet":"fd00::ac:00/118"}]],"routes":[{"dst":"::/0"}],"dataDir":"/run/cni/v4pd/egress-v6-ipam"}}`, `{"type":"portmap","capabilities":{"portMappings":true},"snat":true}`},
		needs:       map[string][]fake.Need{"aws-cni": {{Target: "/var/run/aws-node/ipamd.sock", Socket: true, Verb: "ADD"}}},
		provides:    []provided{{path: "/var/run/aws-node/ipamd.sock", socket: true}},
		executables: []string{"aws-cni", "egress-cni", "host-local", "portmap"},
	},
	{
		// cilium/cilium, plugins/cilium-cni, chained behind aws-cni.
		name: "aws-cni-cilium", version: "1.0.0",
		plugins:     []string{`{"name":"aws-cni","type":"aws-cni","vethPrefix":"eni"}`, `{"name":"cilium","type":"cilium-cni","chaining-mode":"aws-cni","enable-debug":false}`},
		needs:       map[string][]fake.Need{"aws-cni": {{Target: "/var/run/aws-node/ipamd.sock", Socket: true, Verb: "ADD"}}, "cilium-cni": {{Target: "/var/run/cilium/cilium.sock", Socket: true, Verb: "ADD"}}},
		provides:    []provided{{path: "/var/run/aws-node/ipamd.sock", socket: true}, {path: "/var/run/cilium/cilium.sock", socket: true}},
		executables: []string{"aws-cni", "cilium-cni"},
	},
}

// types are the plugins of the list's own entries.
func (s shipped) types() []string {
	var types []string
	for _, p := range s.plugins {
		var c struct{ Type string }
		if err := json.Unmarshal([]byte(p), &c); err != nil {
			panic(fmt.Sprintf("%s: %v: %s", s.name, err, p))
		}
		types = append(types, c.Type)
	}
	return types
}

// list writes the list with its first so many plugins, all when it is 0.
func (s shipped) list(version string, first int, socket string) string {
	plugins := s.plugins
	if first > 0 && first < len(plugins) {
		plugins = plugins[:first]
	}
	raw := make([]json.RawMessage, len(plugins))
	for i, p := range plugins {
		raw[i] = json.RawMessage(strings.ReplaceAll(p, "SOCKET", socket))
	}
	b, err := json.MarshalIndent(map[string]any{"cniVersion": cmp.Or(version, s.version), "name": s.name, "plugins": raw}, "", "  ")
	if err != nil {
		panic(err)
	}
	return string(b) + "\n"
}

// states is how the fake plugins of some networks behave when all is well.
func states(networks []shipped) map[string]fake.State {
	all := map[string]fake.State{"loopback": {}}
	for _, n := range networks {
		for _, p := range slices.Concat(n.executables, n.types()) {
			state, known := all[p]
			if !known {
				state = pluginKinds[p]
			}
			if needs := n.needs[p]; needs != nil {
				state.Needs = needs
			}
			all[p] = state
		}
	}
	return all
}

// executables are those of some networks, sorted, with the loopback plugin.
func executables(networks []shipped) []string {
	set := map[string]bool{"loopback": true}
	for _, n := range networks {
		for _, e := range n.executables {
			set[e] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}
