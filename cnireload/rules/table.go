// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"net"
	"net/url"
	"slices"
	"strings"
)

// Row is what is known of the plugins of some types. Its texts are Markdown.
type Row struct {
	Types []string
	IPAM  bool // they are run as the ipam of an entry
	// Runs says what the plugin itself runs on the host. It is empty if nothing
	// is known of that: what an entry has as "ipam", "delegate" or "delegates"
	// can be meant for the plugin's own code, or for an agent that runs it
	// elsewhere.
	Runs  string
	Needs []Need
	Note  string // in place of Needs

	runs func(conf) []child // nil if Runs is empty
}

// Need is one thing that a plugin's own code needs.
type Need struct {
	What, Why string
	// Gate is the gate that is made of it. Its Target is the default of its Key,
	// or what is compiled in.
	Gate Gate

	when   func(conf) bool     // nil means always
	list   bool                // the key holds a list of texts
	target func(string) string // makes the target of a text, or nothing; nil: it is the text
}

// gates returns the gates of one entry.
func (n Need) gates(plugin string, c conf) []Gate {
	if n.when != nil && !n.when(c) {
		return nil
	}
	values := []any{cmp.Or(c.text(n.Gate.Key), n.Gate.Target)}
	if n.list {
		values = c.list(n.Gate.Key)
	}
	var gates []Gate
	for _, v := range values {
		g := n.Gate
		g.Plugin = plugin
		g.Target, _ = v.(string)
		if n.target != nil {
			g.Target = n.target(g.Target)
		}
		if g.Target != "" {
			gates = append(gates, g)
		}
	}
	return gates
}

// Table returns what is known of plugins, one row for each or for several that
// are alike: what readiness, gates and the table in docs/readiness.md are made
// from. The rows are shared: change nothing in them.
func Table() []Row { return slices.Clone(table) }

var table = []Row{
	{
		// containernetworking/plugins, plugins/main/*: each calls ipam.ExecAdd
		// and ipam.ExecDel with ipam.type, most only if there is one.
		// k8snetworkplumbingwg: sriov-cni pkg/cnicommands/cni.go, ib-sriov-cni
		// cmd/ib-sriov-cni/main.go, bond-cni bond/bond.go, ovs-cni pkg/plugin;
		// kubevirt/macvtap-cni; intel/userspace-cni-network-plugin. The same.
		Types: []string{"bridge", "ptp", "macvlan", "ipvlan", "vlan", "host-device", "dummy", "tap", "win-bridge", "win-overlay", "sriov", "ib-sriov", "bond", "ovs", "macvtap", "userspace"},
		Runs:  "its `ipam`", runs: runsIPAM,
	},
	{
		// projectcalico/calico, cni-plugin/pkg/plugin/plugin.go: cmdAdd and
		// cmdDel stat nodename_file and fail unless nodename_file_optional;
		// cmdAdd reads the MTU file if require_mtu_file. internal/pkg/utils:
		// AddIPAM and DeleteIPAM run ipam.type; DetermineNodename reads the
		// file only without "nodename". If the file is empty it takes "hostname"
		// and then the name of the host. pkg/k8s/k8s.go: ADD makes a Kubernetes
		// client. DEL makes only Calico's, which opens the kubeconfig with the
		// Kubernetes datastore; libcalico-go/lib/apiconfig: the default is
		// etcdv3. pkg/dataplane/grpc: both verbs dial dataplane_options.socket.
		Types: []string{"calico"},
		Runs:  "its `ipam`", runs: runsIPAM,
		Needs: []Need{
			{
				What: "the nodename file, unless `nodename_file_optional`", Why: "ADD and DEL fail without it",
				when: func(c conf) bool { return !c.isTrue("nodename_file_optional") && hasNodeName(c) },
				Gate: Gate{Kind: File, Key: "nodename_file", Target: "/var/lib/calico/nodename", Mode: Enforce, DEL: true},
			},
			{
				What: "with neither `nodename` nor `hostname` also: not just emptied", Why: "its agent empties the file before it writes it; a pod would get another node's name. After 10 s an empty file is only shown: the plugin takes the host's name",
				when: func(c conf) bool { return !c.isTrue("nodename_file_optional") && !hasNodeName(c) },
				Gate: Gate{Kind: FileNotEmpty, Key: "nodename_file", Target: "/var/lib/calico/nodename", Mode: Enforce, DEL: true},
			},
			{
				What: "the MTU file, with `require_mtu_file`", Why: "ADD reads it",
				when: func(c conf) bool { return c.isTrue("require_mtu_file") },
				Gate: Gate{Kind: File, Key: "require_mtu_file", Target: "/var/lib/calico/mtu", Mode: Enforce},
			},
			{
				What: "the kubeconfig, if set, with `datastore_type` `kubernetes`", Why: "ADD and DEL load it",
				when: func(c conf) bool { return c.text("datastore_type") == "kubernetes" },
				Gate: Gate{Kind: File, Key: "kubernetes.kubeconfig", Mode: Enforce, DEL: true},
			},
			{
				What: "the kubeconfig, if set, with etcd, which is the default", Why: "ADD loads it",
				when: func(c conf) bool { return c.text("datastore_type") != "kubernetes" },
				Gate: Gate{Kind: File, Key: "kubernetes.kubeconfig", Mode: Enforce},
			},
			{
				What: "a listener, with the type `grpc` and a `unix:` socket", Why: "ADD and DEL are calls to it",
				when: func(c conf) bool { return c.text("dataplane_options.type") == "grpc" }, target: unixPath,
				Gate: Gate{Kind: UnixSocket, Key: "dataplane_options.socket", Mode: Enforce, DEL: true},
			},
			{
				What: "a listener for each URL on this node", Why: "ADD waits for them by itself", list: true, target: localAddress,
				Gate: Gate{Kind: TCPPort, Key: "readiness_gates", Mode: Report},
			},
		},
	},
	{
		// flannel-io/cni-plugin, flannel.go and flannel_linux.go: ADD reads
		// subnetFile, puts its own ipam, host-local by default and with
		// flannel's ranges, into its delegate and runs that. DEL uses what ADD
		// stored.
		Types: []string{"flannel"},
		Runs:  "its `delegate`, a bridge by default, with the `ipam` of flannel, `host-local` by default", runs: runsFlannel,
		Needs: []Need{{
			What: "an env file with a network, a subnet, MTU and IPMASQ", Why: "ADD reads it; it is gone after each boot",
			Gate: Gate{Kind: FlannelEnv, Key: "subnetFile", Target: "/run/flannel/subnet.env", Mode: Enforce},
		}},
	},
	{
		// k8snetworkplumbingwg/multus-cni, pkg/multus/multus.go: delegates are
		// looked for in binDir and then in CNI_PATH, which together become
		// their CNI_PATH. pkg/types/conf.go: clusterNetwork takes the place of
		// delegates; a delegate without a type is a list; the file is waited
		// for, up to 45 s.
		Types: []string{"multus"},
		Runs:  "its `delegates`, unless it has a `clusterNetwork`. They and what they run are looked for in `binDir`, `/opt/cni/bin` by default, and then in `bin_dirs`", runs: runsMultus,
		Needs: []Need{{
			What: "the file, if set", Why: "ADD waits for it by itself; from CNI 1.1 on STATUS does, too",
			Gate: Gate{Kind: File, Key: "readinessindicatorfile", Mode: Report},
		}},
	},
	{
		// multus-cni, pkg/server/api/shim.go: ADD posts to the daemon's socket.
		// DEL answers 0 even if nobody is there, and then nothing is removed.
		Types: []string{"multus-shim"},
		Needs: []Need{{
			What: "a listener on `multus.sock`", Why: "ADD and DEL are calls to it; DEL says that it succeeded without it, and removes nothing",
			target: func(dir string) string { return strings.TrimSuffix(dir, "/") + "/multus.sock" },
			Gate:   Gate{Kind: UnixSocket, Key: "daemonSocketDir", Target: "/run/multus", Mode: Enforce, DEL: true, SilentDEL: true},
		}},
	},
	// kubeovn/kube-ovn, cmd/cni, and alibaba/hybridnet, cmd/cni: both verbs post
	// to server_socket, a required key.
	{Types: []string{"kube-ovn", "hybridnet"}, Needs: []Need{agent("server_socket", "")}},
	// cybozu-go/coil, v2: both verbs call coild. Version 1 calls a port.
	{Types: []string{"coil"}, Needs: []Need{agent("socket", "/run/coild.sock").or("127.0.0.1:9383")}},
	{
		// noironetworks/aci-containers, cmd/opflexagentcni/main.go: an ipam
		// plugin is run unless it has this type, and not when chained. Both
		// verbs call the agent. Releases without the key call a port.
		Types: []string{"opflex-agent-cni"},
		Runs:  "its `ipam`, unless that is `opflex-agent-cni-ipam` or `chaining-mode` is set",
		runs: func(c conf) []child {
			return ipam(c, c.text("ipam.type") != "opflex-agent-cni-ipam" && !c.isTrue("chaining-mode"))
		},
		Needs: []Need{agent("ep-rpc-sock", "/var/run/aci-containers-ep-rpc.sock").or("127.0.0.1:4242")},
	},
	{
		// cilium/cilium, plugins/cilium-cni: ADD waits 30 s by itself; DEL is
		// queued when the agent is away. The agent says whether ipam is run
		// (IpamMode); azure-ipam is what AKS has there.
		Types: []string{"cilium-cni"},
		Needs: []Need{
			{
				What: "a listener", Why: "ADD waits for it by itself; whether its `ipam` is run is the agent's to say",
				Gate: Gate{Kind: UnixSocket, Target: "/var/run/cilium/cilium.sock", Mode: Report},
			},
			{
				What: "a listener, with the `ipam` `azure-ipam`", Why: "ADD is a call to it",
				when: func(c conf) bool { return c.text("ipam.type") == "azure-ipam" },
				Gate: Gate{Kind: TCPPort, Target: azureCNS, Mode: Report},
			},
		},
	},
	// ovn-org/ovn-kubernetes, go-controller/pkg/cni: both verbs post to it.
	{Types: []string{"ovn-k8s-cni-overlay"}, Needs: []Need{agent("", "/var/run/ovn-kubernetes/cni/ovn-cni-server.sock")}},
	// antrea-io/antrea, pkg/cni: both verbs call the agent's socket.
	// pkg/agent/cniserver: the agent completes ipam and runs it in its own
	// container.
	{Types: []string{"antrea"}, Needs: []Need{agent("", "/var/run/antrea/cni.sock")}},
	// AliyunContainerService/terway, plugin/terway: both verbs call it.
	{Types: []string{"terway"}, Needs: []Need{agent("", "/var/run/eni/eni.socket")}},
	// aws/amazon-vpc-cni-k8s, cmd/routed-eni-cni-plugin: a socket since July 2026,
	// a port before. DEL succeeds without the daemon.
	{Types: []string{"aws-cni"}, Needs: []Need{Need{
		What: "a listener", Why: "ADD is a call to it",
		Gate: Gate{Kind: UnixSocket, Target: "/var/run/aws-node/ipamd.sock", Mode: Report},
	}.or("127.0.0.1:50051")}},
	{
		// amazon-vpc-cni-k8s, cmd/egress-cni-plugin/main.go: it returns at once
		// unless it is enabled, which is a text.
		Types: []string{"egress-cni"},
		Runs:  "its `ipam`, if `enabled` is `\"true\"`",
		runs:  func(c conf) []child { return ipam(c, c.text("enabled") == "true") },
	},
	{
		// Azure/azure-container-networking, cni/network/network.go: azure-cns is
		// code of the plugin. Any other ipam is run, but not with multitenancy
		// and not by an agent on bare metal. DEL is queued without CNS.
		Types: []string{"azure-vnet"},
		Runs:  "its `ipam`, unless that is `azure-cns`, `multiTenancy` is set or `executionMode` is `baremetal`",
		runs: func(c conf) []child {
			return ipam(c, c.text("ipam.type") != "azure-cns" && !c.isTrue("multiTenancy") && c.text("executionMode") != "baremetal")
		},
		Needs: []Need{{
			What: "a listener, if on this node, with the `ipam` `azure-cns`", Why: "ADD is a call to it",
			when: func(c conf) bool { return c.text("ipam.type") == "azure-cns" }, target: localAddress,
			Gate: Gate{Kind: TCPPort, Key: "cnsurl", Target: "http://" + azureCNS, Mode: Report},
		}},
	},
	// weaveworks/weave, plugin/net/cni.go: ipam is its own unless one is named;
	// HTTP to the router on a fixed port.
	{Types: []string{"weave-net"}, Runs: "its `ipam`", runs: runsIPAM, Needs: []Need{weaveRouter}},
	// istio/istio, cni/pkg/plugin/plugin.go (isCNIPod).
	{Types: []string{"istio-cni"}, Note: "never gated: its agent can be a pod of the pod network, and would wait for itself"},

	// What entries run as their ipam. Keys are those of the entry.
	{
		// containernetworking/plugins, plugins/ipam/host-local: "no IP ranges
		// specified". A runtime can pass ranges where the entry has the capability.
		IPAM: true, Types: []string{"host-local"},
		Needs: []Need{{
			What: "`subnet` or `ranges`", Why: "ADD fails after the bridge has been made; kube-router adds them later",
			when: func(c conf) bool {
				return c.text("ipam.subnet") == "" && len(c.list("ipam.ranges")) == 0 && !c.isTrue("capabilities.ipRanges")
			},
			target: func(string) string { return "subnet or ranges" },
			Gate:   Gate{Kind: Configuration, Key: "ipam.ranges", Mode: Enforce},
		}},
	},
	// containernetworking/plugins, plugins/ipam/dhcp: both verbs call the daemon.
	{IPAM: true, Types: []string{"dhcp"}, Needs: []Need{agent("ipam.daemonSocketPath", "/run/cni/dhcp.sock")}},
	// kube-ovn, cmd/cni: the same executable.
	{IPAM: true, Types: []string{"kube-ovn"}, Needs: []Need{agent("ipam.server_socket", "")}},
	// spidernet-io/spiderpool, cmd/spiderpool: both verbs ask for the agent's
	// health first.
	{IPAM: true, Types: []string{"spiderpool"}, Needs: []Need{agent("ipam.ipam_unix_socket_path", "/var/run/spidernet/spiderpool.sock")}},
	// Azure/azure-container-networking, azure-ipam: CNS on a fixed port.
	{IPAM: true, Types: []string{"azure-ipam"}, Needs: []Need{{
		What: "a listener", Why: "ADD is a call to it",
		Gate: Gate{Kind: TCPPort, Target: azureCNS, Mode: Report},
	}}},
	{IPAM: true, Types: []string{"weave-ipam"}, Needs: []Need{weaveRouter}},
}

// azureCNS is where Azure's container networking service listens.
const azureCNS = "localhost:10090"

var weaveRouter = Need{
	What: "a listener", Why: "ADD and DEL are calls to it",
	Gate: Gate{Kind: TCPPort, Target: "127.0.0.1:6784", Mode: Report, DEL: true},
}

// agent is the need of a plugin whose ADD and DEL are calls to a socket. Without a
// key its path is compiled in.
func agent(key, path string) Need {
	mode := Enforce
	if key == "" {
		mode = Report
	}
	return Need{
		What: "a listener", Why: "ADD and DEL are calls to it",
		Gate: Gate{Kind: UnixSocket, Key: key, Target: path, Mode: mode, DEL: true},
	}
}

// or says that a listener at a TCP address is as good.
func (n Need) or(address string) Need {
	n.What += ", or one on `" + address + "`"
	n.Gate.Instead = address
	return n
}

// hasNodeName tells whether the configuration has a name that Calico uses when
// its nodename file is empty.
func hasNodeName(c conf) bool { return c.text("nodename") != "" || c.text("hostname") != "" }

// unixPath returns the path of a gRPC target that is a socket on disk.
func unixPath(target string) string {
	path, ok := strings.CutPrefix(target, "unix:")
	if !ok || !strings.HasPrefix(path, "/") {
		return ""
	}
	return "/" + strings.TrimLeft(path, "/")
}

// localAddress returns host and port of a URL on this node. Other nodes are not
// called: a gate is looked at twice a second.
func localAddress(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return ""
	}
	if ip := net.ParseIP(u.Hostname()); u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return ""
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	if port == "" {
		return ""
	}
	return net.JoinHostPort(u.Hostname(), port)
}
