// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"encoding/json"
	"maps"
	"net"
	"net/url"
	"runtime"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

// This file is all that is known of single plugins: what each runs by itself,
// and what it needs before ADD or DEL can succeed. Readiness, gates and the
// table in docs/readiness.md come from it.
//
// To add a plugin, read its source and add a rule that says where, a row to
// ruleRows in rules_test.go and, if a project ships a list with it, a file to
// test/vendors. Then
//
//	go test ./cnireload -run TestRulesInDocs -update
//
// A rule must never be stricter than the plugin: what may be wrong is shown and
// does not count, because a node on which pods would run must not be lost.

// rule is what is known of the plugins of some types.
type rule struct {
	types []string
	// runs returns what the plugin itself has run on the host. It is nil for a
	// plugin that is not known to run anything: what such a plugin has as
	// "ipam", "delegate" or "delegates" can be a word for its own code, or be
	// run by its agent elsewhere.
	runs func(conf) []child
	// running says the same in the words of the documentation.
	running string
	needs   []need
	// note stands in the documentation in place of needs.
	note string
}

// child is an executable that an entry of a list names.
type child struct {
	role Role
	// conf is what the executable is given. That of RoleIPAM is the entry
	// around it.
	conf conf
	typ  string
	// counts is false for one that is named but not run on the host, as far as
	// is known.
	counts bool
	// version is the CNI version that it has to speak in place of its parent's;
	// anyVersion where that is its own affair.
	version string
	// dirs are searched for it, and for what it runs, before bin_dirs.
	dirs []string
}

const anyVersion = "any"

// need is one thing that a plugin's own code needs.
type need struct {
	what     string          // in the words of the documentation
	key      string          // the configuration key that names it, with dots; empty when compiled in
	fallback string          // the key's default, or what is compiled in
	when     func(conf) bool // nil means always
	// targets makes what is to be looked at of the key's value, or of its
	// default. It is nil where that is the value itself.
	targets func(c conf, value string) []string
	instead string // see gate
	kind    gateKind
	mode    GateMode
	del     bool
	silent  bool   // DEL without it succeeds and removes nothing
	why     string // in the words of the documentation
}

// gates returns the gates of one entry.
func (n need) gates(plugin string, c conf) []gate {
	if n.when != nil && !n.when(c) {
		return nil
	}
	value := c.at(n.key)
	if value == "" {
		value = n.fallback
	}
	var targets []string
	switch {
	case n.targets != nil:
		targets = n.targets(c, value)
	case value != "":
		targets = []string{value}
	}
	var gates []gate
	for _, target := range targets {
		gates = append(gates, gate{plugin: plugin, kind: n.kind, target: target, instead: n.instead, key: n.key, mode: n.mode, del: n.del, silent: n.silent})
	}
	return gates
}

// mainRules are the rules of entries of lists, and of delegates.
var mainRules = []rule{
	{
		// containernetworking/plugins, plugins/main/*: each calls ipam.ExecAdd
		// and ipam.ExecDel with ipam.type, most only if there is one.
		// k8snetworkplumbingwg: sriov-cni pkg/cnicommands/cni.go, ib-sriov-cni
		// cmd/ib-sriov-cni/main.go, bond-cni bond/bond.go, ovs-cni pkg/plugin;
		// kubevirt/macvtap-cni; intel/userspace-cni-network-plugin. The same.
		types:   []string{"bridge", "ptp", "macvlan", "ipvlan", "vlan", "host-device", "dummy", "tap", "win-bridge", "win-overlay", "sriov", "ib-sriov", "bond", "ovs", "macvtap", "userspace"},
		runs:    runsIPAM,
		running: "its `ipam`",
	},
	{
		// projectcalico/calico, cni-plugin/pkg/plugin/plugin.go: cmdAdd and
		// cmdDel stat nodename_file and fail unless nodename_file_optional;
		// cmdAdd reads the mtu file if require_mtu_file. internal/pkg/utils:
		// AddIPAM and DeleteIPAM run ipam.type; DetermineNodename reads the
		// file only without "nodename" and passes over an empty one, for
		// "hostname" and then the name of the host. pkg/k8s/k8s.go: ADD makes a
		// Kubernetes client, DEL only Calico's, which opens the kubeconfig with
		// the Kubernetes datastore; libcalico-go/lib/apiconfig: the default is
		// etcdv3. pkg/dataplane/grpc: both verbs dial dataplane_options.socket.
		types:   []string{"calico"},
		runs:    runsIPAM,
		running: "its `ipam`",
		needs: []need{
			{
				what: "the nodename file, unless `nodename_file_optional`", key: "nodename_file", fallback: "/var/lib/calico/nodename",
				when: func(c conf) bool { return !c.isTrue("nodename_file_optional") && namesNode(c) },
				kind: gateFile, mode: GateEnforce, del: true, why: "ADD and DEL fail without it",
			},
			{
				what: "with neither `nodename` nor `hostname` also: not just emptied", key: "nodename_file", fallback: "/var/lib/calico/nodename",
				when: func(c conf) bool { return !c.isTrue("nodename_file_optional") && !namesNode(c) },
				kind: gateFilled, mode: GateEnforce, del: true, why: "its agent empties the file before it writes it; a pod would get another node's name. After 10 s an empty file is only shown: the plugin takes the host's name",
			},
			{
				what: "`/var/lib/calico/mtu`, with `require_mtu_file`", key: "require_mtu_file",
				when:    func(c conf) bool { return c.isTrue("require_mtu_file") },
				targets: func(conf, string) []string { return []string{"/var/lib/calico/mtu"} },
				kind:    gateFile, mode: GateEnforce, why: "ADD reads it",
			},
			{
				what: "the kubeconfig, if set, with `datastore_type` `kubernetes`", key: "kubernetes.kubeconfig",
				when: func(c conf) bool { return c.text("datastore_type") == "kubernetes" },
				kind: gateFile, mode: GateEnforce, del: true, why: "ADD and DEL load it",
			},
			{
				what: "the kubeconfig, if set, with etcd, which is the default", key: "kubernetes.kubeconfig",
				when: func(c conf) bool { return c.text("datastore_type") != "kubernetes" },
				kind: gateFile, mode: GateEnforce, why: "ADD loads it",
			},
			{
				what: "a listener, with the type `grpc` and a `unix:` socket", key: "dataplane_options.socket",
				when:    func(c conf) bool { return c.object("dataplane_options").text("type") == "grpc" },
				targets: unixTarget, kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
			},
			{
				what: "a listener for each URL on this node", key: "readiness_gates",
				targets: func(c conf, _ string) []string {
					var addresses []string
					urls, _ := c.value("readiness_gates").([]any)
					for _, u := range urls {
						u, _ := u.(string)
						addresses = append(addresses, localAddress(c, u)...)
					}
					return addresses
				},
				kind: gateTCP, mode: GateReport, why: "ADD waits for them by itself",
			},
		},
	},
	{
		// flannel-io/cni-plugin, flannel.go and flannel_linux.go: ADD reads
		// subnetFile, puts its own ipam, host-local by default and with
		// flannel's ranges, into its delegate and runs that. DEL uses what ADD
		// stored.
		types:   []string{"flannel"},
		runs:    runsFlannel,
		running: "its `delegate`, a bridge by default, with the `ipam` of flannel, `host-local` by default",
		needs: []need{{
			what: "an env file with a network, a subnet, MTU and IPMASQ", key: "subnetFile", fallback: "/run/flannel/subnet.env",
			kind: gateFlannel, mode: GateEnforce, why: "ADD reads it; it is gone after each boot",
		}},
	},
	{
		// k8snetworkplumbingwg/multus-cni, pkg/multus/multus.go: delegates are
		// looked for in binDir and then in CNI_PATH, which together become
		// their CNI_PATH. pkg/types/conf.go: clusterNetwork takes the place of
		// delegates; a delegate without a type is a list; the file is waited
		// for, up to 45 s.
		types:   []string{"multus"},
		runs:    runsMultus,
		running: "its `delegates`, unless it has a `clusterNetwork`. They and what they run are looked for in `binDir`, `/opt/cni/bin` by default, and then in `bin_dirs`",
		needs: []need{{
			what: "the file, if set", key: "readinessindicatorfile",
			kind: gateFile, mode: GateReport, why: "ADD waits for it by itself; from CNI 1.1 on STATUS does, too",
		}},
	},
	{
		// multus-cni, pkg/server/api/shim.go: ADD posts to the daemon's socket.
		// DEL answers 0 even if nobody is there, and then nothing is removed.
		types: []string{"multus-shim"},
		needs: []need{{
			what: "a listener on `multus.sock`", key: "daemonSocketDir", fallback: "/run/multus",
			targets: func(_ conf, dir string) []string { return []string{strings.TrimSuffix(dir, "/") + "/multus.sock"} },
			kind:    gateUnix, mode: GateEnforce, del: true, silent: true, why: "ADD and DEL are calls to it; DEL says that it succeeded without it, and removes nothing",
		}},
	},
	{
		// kubeovn/kube-ovn, cmd/cni, and alibaba/hybridnet, cmd/cni: both verbs
		// post to server_socket, a required key.
		types: []string{"kube-ovn", "hybridnet"},
		needs: []need{{
			what: "a listener", key: "server_socket",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
		}},
	},
	{
		// cybozu-go/coil, v2: both verbs call coild. Version 1 calls a port.
		types: []string{"coil"},
		needs: []need{{
			what: "a listener, or one on `127.0.0.1:9383`", key: "socket", fallback: "/run/coild.sock", instead: "127.0.0.1:9383",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
		}},
	},
	{
		// noironetworks/aci-containers, cmd/opflexagentcni/main.go: an ipam
		// plugin is run unless its type is this word, and not when chained.
		// Both verbs call the agent; before there was the key that was a port.
		types: []string{"opflex-agent-cni"},
		runs: func(c conf) []child {
			return ipamIf(c, c.object("ipam").text("type") != "opflex-agent-cni-ipam" && !c.isTrue("chaining-mode"))
		},
		running: "its `ipam`, unless that is `opflex-agent-cni-ipam` or `chaining-mode` is set",
		needs: []need{{
			what: "a listener, or one on `127.0.0.1:4242`", key: "ep-rpc-sock", fallback: "/var/run/aci-containers-ep-rpc.sock", instead: "127.0.0.1:4242",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
		}},
	},
	{
		// cilium/cilium, plugins/cilium-cni: ADD waits 30 s by itself; DEL is
		// queued when the agent is away. Whether ipam is run is the agent's to
		// say (IpamMode); azure-ipam is what AKS has there.
		types: []string{"cilium-cni"},
		needs: []need{
			{
				what: "a listener", fallback: "/var/run/cilium/cilium.sock",
				kind: gateUnix, mode: GateReport, why: "ADD waits for it by itself; whether its `ipam` is run is the agent's to say",
			},
			{
				what: "a listener, with the `ipam` `azure-ipam`", fallback: "localhost:10090",
				when: func(c conf) bool { return c.object("ipam").text("type") == "azure-ipam" },
				kind: gateTCP, mode: GateReport, why: "ADD is a call to it",
			},
		},
	},
	{
		// ovn-org/ovn-kubernetes, go-controller/pkg/cni: both verbs post to it.
		types: []string{"ovn-k8s-cni-overlay"},
		needs: []need{compiledIn("/var/run/ovn-kubernetes/cni/ovn-cni-server.sock")},
	},
	{
		// antrea-io/antrea, pkg/cni: both verbs call the agent's socket.
		// pkg/agent/cniserver: the agent completes ipam and runs it in its own
		// container.
		types: []string{"antrea"},
		needs: []need{compiledIn("/var/run/antrea/cni.sock")},
	},
	{
		// AliyunContainerService/terway, plugin/terway: both verbs call it.
		types: []string{"terway"},
		needs: []need{compiledIn("/var/run/eni/eni.socket")},
	},
	{
		// aws/amazon-vpc-cni-k8s, cmd/routed-eni-cni-plugin: a socket since July
		// 2026, a port before. DEL succeeds without the daemon.
		types: []string{"aws-cni"},
		needs: []need{{
			what: "a listener, or one on `127.0.0.1:50051`", fallback: "/var/run/aws-node/ipamd.sock", instead: "127.0.0.1:50051",
			kind: gateUnix, mode: GateReport, why: "ADD is a call to it",
		}},
	},
	{
		// amazon-vpc-cni-k8s, cmd/egress-cni-plugin/main.go: it returns at once
		// unless it is enabled, which is a text.
		types:   []string{"egress-cni"},
		runs:    func(c conf) []child { return ipamIf(c, c.text("enabled") == "true") },
		running: "its `ipam`, if `enabled` is `\"true\"`",
	},
	{
		// Azure/azure-container-networking, cni/network/network.go: azure-cns is
		// a case of a switch, and no other is run with multitenancy or by an
		// agent on bare metal. DEL is queued without CNS.
		types: []string{"azure-vnet"},
		runs: func(c conf) []child {
			return ipamIf(c, c.object("ipam").text("type") != "azure-cns" && !c.isTrue("multiTenancy") && c.text("executionMode") != "baremetal")
		},
		running: "its `ipam`, unless that is `azure-cns`, `multiTenancy` is set or `executionMode` is `baremetal`",
		needs: []need{{
			what: "a listener, if on this node, with the `ipam` `azure-cns`", key: "cnsurl", fallback: "http://localhost:10090",
			when:    func(c conf) bool { return c.object("ipam").text("type") == "azure-cns" },
			targets: localAddress, kind: gateTCP, mode: GateReport, why: "ADD is a call to it",
		}},
	},
	{
		// weaveworks/weave, plugin/net/cni.go: ipam is its own unless one is
		// named; HTTP to the router on a fixed port.
		types:   []string{"weave-net"},
		runs:    runsIPAM,
		running: "its `ipam`",
		needs:   []need{weaveRouter},
	},
	{
		// istio/istio, cni/pkg/plugin/plugin.go (isCNIPod).
		types: []string{"istio-cni"},
		note:  "never gated: its agent can be a pod of the pod network, and would wait for itself",
	},
}

// ipamRules are the rules of what an entry runs as its ipam. They are given the
// entry around it.
var ipamRules = []rule{
	{
		// containernetworking/plugins, plugins/ipam/host-local: "no IP ranges
		// specified". The runtime passes no ipRanges, but may some day.
		types: []string{"host-local"},
		needs: []need{{
			what: "`subnet` or `ranges`", key: "ipam.ranges",
			when: func(c conf) bool {
				ipam := c.object("ipam")
				ranges, _ := ipam.value("ranges").([]any)
				return ipam.text("subnet") == "" && len(ranges) == 0 && !c.object("capabilities").isTrue("ipRanges")
			},
			targets: func(conf, string) []string { return []string{"subnet or ranges"} },
			kind:    gateConf, mode: GateEnforce, why: "ADD fails after the bridge has been made; kube-router adds them later",
		}},
	},
	{
		// containernetworking/plugins, plugins/ipam/dhcp: both verbs call the daemon.
		types: []string{"dhcp"},
		needs: []need{{
			what: "a listener", key: "ipam.daemonSocketPath", fallback: "/run/cni/dhcp.sock",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
		}},
	},
	{
		// kube-ovn, cmd/cni: the same executable.
		types: []string{"kube-ovn"},
		needs: []need{{
			what: "a listener", key: "ipam.server_socket",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL are calls to it",
		}},
	},
	{
		// spidernet-io/spiderpool, cmd/spiderpool: both verbs ask for the agent's
		// health first.
		types: []string{"spiderpool"},
		needs: []need{{
			what: "a listener", key: "ipam.ipam_unix_socket_path", fallback: "/var/run/spidernet/spiderpool.sock",
			kind: gateUnix, mode: GateEnforce, del: true, why: "ADD and DEL ask for its health",
		}},
	},
	{
		// Azure/azure-container-networking, azure-ipam: CNS on a fixed port.
		types: []string{"azure-ipam"},
		needs: []need{{
			what: "a listener", fallback: "localhost:10090",
			kind: gateTCP, mode: GateReport, why: "ADD is a call to it",
		}},
	},
	{
		types: []string{"weave-ipam"},
		needs: []need{weaveRouter},
	},
}

// compiledIn is the need of a socket whose path may move with a release of the
// plugin: a node must not be lost over that.
func compiledIn(path string) need {
	return need{what: "a listener", fallback: path, kind: gateUnix, mode: GateReport, del: true, why: "ADD and DEL are calls to it"}
}

var weaveRouter = need{what: "a listener", fallback: "127.0.0.1:6784", kind: gateTCP, mode: GateReport, del: true, why: "ADD and DEL are calls to it"}

// namesNode tells whether Calico does without the content of its nodename file.
func namesNode(c conf) bool { return c.text("nodename") != "" || c.text("hostname") != "" }

// unixTarget returns the path of a gRPC target that is a socket on disk.
func unixTarget(_ conf, target string) []string {
	path, ok := strings.CutPrefix(target, "unix:")
	if !ok || !strings.HasPrefix(path, "/") {
		return nil
	}
	return []string{"/" + strings.TrimLeft(path, "/")}
}

// localAddress returns host and port of a URL on this node. An address elsewhere
// is not ours to call every half second.
func localAddress(_ conf, target string) []string {
	u, err := url.Parse(target)
	if err != nil {
		return nil
	}
	if ip := net.ParseIP(u.Hostname()); u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil
	}
	port := u.Port()
	switch {
	case port != "":
	case u.Scheme == "http":
		port = "80"
	case u.Scheme == "https":
		port = "443"
	default:
		return nil
	}
	return []string{net.JoinHostPort(u.Hostname(), port)}
}

// ipamIf returns the ipam of an entry, if it names one, and whether it counts.
func ipamIf(c conf, counts bool) []child {
	if typ := c.object("ipam").text("type"); typ != "" {
		return []child{{role: RoleIPAM, typ: typ, conf: c, counts: counts}}
	}
	return nil
}

func runsIPAM(c conf) []child { return ipamIf(c, true) }

// runsFlannel completes the delegate as flannel does.
func runsFlannel(c conf) []child {
	ipam := c.object("ipam").with("ranges", []any{"flannel's"})
	ipam = ipam.with("type", c.object("ipam").textOr("type", "host-local"))
	bridge := "bridge"
	if runtime.GOOS == "windows" {
		bridge = "win-bridge"
	}
	delegate := c.object("delegate").with("ipam", map[string]any(ipam))
	return []child{{role: RoleDelegate, typ: delegate.textOr("type", bridge), conf: delegate, counts: true}}
}

func runsMultus(c conf) []child {
	if c.text("clusterNetwork") != "" {
		return named(c)
	}
	children := delegatesOf(c)
	for i := range children {
		children[i].counts = true
		children[i].dirs = []string{c.textOr("binDir", "/opt/cni/bin")}
	}
	return children
}

// delegatesOf returns the entries of "delegates", each of which is an entry or a
// list of them.
func delegatesOf(c conf) []child {
	var children []child
	for _, d := range c.objects("delegates") {
		entries := []conf{d}
		if d.text("type") == "" {
			entries = d.objects("plugins")
		}
		for _, e := range entries {
			if typ := e.text("type"); typ != "" {
				children = append(children, child{role: RoleDelegate, typ: typ, conf: e, version: d.textOr("cniVersion", anyVersion)})
			}
		}
	}
	return children
}

// named returns what an entry names under the usual keys. Nothing of it counts.
func named(c conf) []child {
	children := ipamIf(c, false)
	if d := c.object("delegate"); d.text("type") != "" {
		children = append(children, child{role: RoleDelegate, typ: d.text("type"), conf: d})
	}
	return append(children, delegatesOf(c)...)
}

// maxNesting bounds the depth of delegates within delegates.
const maxNesting = 8

// pluginsOf lists the executables that a list names, with the gates of those
// that count: its entries, and what they run, as far as is known.
func pluginsOf(list *libcni.NetworkConfigList) []listPlugin {
	var plugins []listPlugin
	for _, p := range list.Plugins {
		var c conf
		_ = json.Unmarshal(p.Bytes, &c) // what is no object names nothing
		entry := child{role: RolePlugin, typ: p.Network.Type, conf: c, counts: true}
		first := len(plugins)
		plugins = appendPlugins(plugins, entry, orOldest(list.CNIVersion), nil, 0)
		plugins[first].conf = p
	}
	return plugins
}

// gatesOf returns the gates of a list's plugins and of what they run.
func gatesOf(list *libcni.NetworkConfigList) []gate {
	var gates []gate
	for _, p := range pluginsOf(list) {
		gates = append(gates, p.gates...)
	}
	return gates
}

// appendPlugins adds one executable and what it names. version is its parent's,
// and dirs are searched before bin_dirs.
func appendPlugins(plugins []listPlugin, e child, version string, dirs []string, depth int) []listPlugin {
	switch e.version {
	case "":
	case anyVersion:
		version = ""
	default:
		version = e.version
	}
	dirs = slices.Concat(e.dirs, dirs)
	r := ruleOf(e.role, e.typ)
	p := listPlugin{role: e.role, typ: e.typ, version: version, counts: e.counts, dirs: dirs}
	if e.counts {
		for _, n := range r.needs {
			p.gates = append(p.gates, n.gates(e.typ, e.conf)...)
		}
	}
	plugins = append(plugins, p)
	if e.role == RoleIPAM || depth == maxNesting {
		return plugins
	}
	runs := r.runs
	if runs == nil {
		runs = named
	}
	for _, c := range runs(e.conf) {
		c.counts = c.counts && e.counts
		plugins = appendPlugins(plugins, c, version, dirs, depth+1)
	}
	return plugins
}

// ruleOf returns the rule of a type of plugin, or one that says nothing.
func ruleOf(role Role, typ string) rule {
	rules := mainRules
	if role == RoleIPAM {
		rules = ipamRules
	}
	for _, r := range rules {
		if slices.Contains(r.types, typ) {
			return r
		}
	}
	return rule{}
}

// conf is a plugin's configuration, decoded as far as rules look into it.
type conf map[string]any

// value finds a key the way the plugins' decoder does, which does not mind its
// case: a gate on the default of a key that is spelled otherwise would never
// open. The outcome must be the same each time.
func (c conf) value(key string) any {
	if v, ok := c[key]; ok {
		return v
	}
	for _, k := range slices.Sorted(maps.Keys(c)) {
		if strings.EqualFold(k, key) {
			return c[k]
		}
	}
	return nil
}

// with returns a copy that has another value for a key.
func (c conf) with(key string, value any) conf {
	other := maps.Clone(c)
	if other == nil {
		other = make(conf)
	}
	other[key] = value
	return other
}

func (c conf) text(key string) string {
	s, _ := c.value(key).(string)
	return s
}

func (c conf) textOr(key, otherwise string) string {
	if s := c.text(key); s != "" {
		return s
	}
	return otherwise
}

// at returns the text at a key with dots.
func (c conf) at(key string) string {
	if outer, inner, nested := strings.Cut(key, "."); nested {
		return c.object(outer).at(inner)
	}
	return c.text(key)
}

func (c conf) isTrue(key string) bool {
	b, _ := c.value(key).(bool)
	return b
}

func (c conf) object(key string) conf {
	m, _ := c.value(key).(map[string]any)
	return m
}

func (c conf) objects(key string) []conf {
	list, _ := c.value(key).([]any)
	var objects []conf
	for _, e := range list {
		if m, ok := e.(map[string]any); ok {
			objects = append(objects, m)
		}
	}
	return objects
}
