// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
)

// ruleRows say what rules make of entries: the gates, and what else is shown.
// Each plugin that gets a rule gets a row. The lists that projects ship are in
// test/vendors.
var ruleRows = []struct {
	name    string
	plugins []string
	want    []string
}{
	{"calico as shipped", []string{
		`{"type":"calico","nodename":"n1","datastore_type":"kubernetes","kubernetes":{"kubeconfig":"/etc/cni/net.d/calico-kubeconfig"},"ipam":{"type":"calico-ipam"}}`, `portmap`,
	}, []string{
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
		"calico: file /etc/cni/net.d/calico-kubeconfig (kubernetes.kubeconfig), enforce, ADD+DEL",
	}},
	// Without a name the content of the file is used.
	{"calico with hostname", []string{`{"type":"calico","hostname":"n1"}`}, []string{
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	{"calico without a name", []string{`{"type":"calico"}`}, []string{
		"calico: file not empty /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	{"calico, all keys", []string{
		`{"type":"calico","nodename":"n1","nodename_file":"/run/n","require_mtu_file":true,"kubernetes":{"kubeconfig":""}}`,
	}, []string{
		"calico: file /run/n (nodename_file), enforce, ADD+DEL",
		"calico: file /var/lib/calico/mtu (require_mtu_file), enforce, ADD",
	}},
	{"calico, file optional", []string{`{"type":"calico","nodename_file_optional":true,"nodename_file":"/run/n","kubernetes":{"kubeconfig":"/k"}}`}, []string{
		"calico: file /k (kubernetes.kubeconfig), enforce, ADD",
	}},
	{"calico with etcd", []string{`{"type":"calico","nodename_file_optional":true,"datastore_type":"etcdv3","kubernetes":{"kubeconfig":"/k"}}`}, []string{
		"calico: file /k (kubernetes.kubeconfig), enforce, ADD",
	}},
	{"calico with VPP", []string{`{"type":"calico","nodename":"n","nodename_file_optional":true,"dataplane_options":{"type":"grpc","socket":"unix:///var/run/calico/cni-server.sock"}}`}, []string{
		"calico: unix socket /var/run/calico/cni-server.sock (dataplane_options.socket), enforce, ADD+DEL",
	}},
	{"calico with other dataplanes", []string{
		`{"type":"calico","nodename_file_optional":true,"dataplane_options":{"type":"grpc","socket":"127.0.0.1:99"}}`,
		`{"type":"calico","nodename_file_optional":true,"dataplane_options":{"type":"grpc","socket":"unix:relative"}}`,
		`{"type":"calico","nodename_file_optional":true,"dataplane_options":{"type":"grpc","socket":"unix-abstract:x"}}`,
		`{"type":"calico","nodename_file_optional":true,"dataplane_options":{"type":"grpc"}}`,
		`{"type":"calico","nodename_file_optional":true,"dataplane_options":{"socket":"unix:///x"}}`,
	}, nil},
	// Only what is on this node is asked.
	{"calico, readiness_gates", []string{
		`{"type":"calico","nodename_file_optional":true,"readiness_gates":["http://localhost:9099/readiness","https://[::1]/x","http://10.0.0.1:80",7,"ftp://localhost/x","%zz"]}`,
	}, []string{
		"calico: tcp port localhost:9099 (readiness_gates), report, ADD",
		"calico: tcp port [::1]:443 (readiness_gates), report, ADD",
	}},
	{"calico, file not optional", []string{`{"type":"calico","nodename":"n","nodename_file_optional":false,"require_mtu_file":false}`}, []string{
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	// Plugins decode their keys whatever the case.
	{"calico, other case", []string{`{"type":"calico","nodeName":"n1","Nodename_File":"/run/n","kubernetes":{"kubeConfig":"/k"}}`}, []string{
		"calico: file /run/n (nodename_file), enforce, ADD+DEL",
		"calico: file /k (kubernetes.kubeconfig), enforce, ADD",
	}},
	{"canal", []string{`{"type":"calico","nodename":"n","ipam":{"type":"host-local","subnet":"usePodCidr"}}`}, []string{
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	{"canal, ranges", []string{`{"type":"calico","nodename":"n","ipam":{"type":"host-local","ranges":[[{"subnet":"usePodCidr"}]]}}`}, []string{
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	{"canal-etcd", []string{`{"type":"flannel","delegate":{"type":"calico","nodename":"n","etcd_endpoints":"https://x"}}`}, []string{
		"flannel: flannel env file /run/flannel/subnet.env (subnetFile), enforce, ADD",
		"calico: file /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
	{"flannel", []string{`{"type":"flannel","delegate":{"hairpinMode":true,"isDefaultGateway":true}}`, `portmap`}, []string{
		"flannel: flannel env file /run/flannel/subnet.env (subnetFile), enforce, ADD",
	}},
	{"flannel, own file", []string{`{"type":"flannel","subnetFile":"/run/s"}`}, []string{
		"flannel: flannel env file /run/s (subnetFile), enforce, ADD",
	}},
	// Flannel puts the subnet into what it has as ipam, and that into its delegate.
	{"flannel, own ipam", []string{`{"type":"flannel","ipam":{"type":"host-local","dataDir":"/d"},"delegate":{"type":"macvlan","ipam":{"type":"dhcp"}}}`}, []string{
		"flannel: flannel env file /run/flannel/subnet.env (subnetFile), enforce, ADD",
	}},
	{"flannel, dhcp", []string{`{"type":"flannel","ipam":{"type":"dhcp"}}`}, []string{
		"flannel: flannel env file /run/flannel/subnet.env (subnetFile), enforce, ADD",
		"dhcp: unix socket /run/cni/dhcp.sock (ipam.daemonSocketPath), enforce, ADD+DEL",
	}},
	{"multus", []string{
		`{"type":"multus","readinessindicatorfile":"/run/ready","delegates":[
			{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"type":"flannel"},{"type":"portmap"}]},
			{"type":"macvlan","ipam":{"type":"dhcp"}},
			{"type":"bridge","ipam":{"type":"host-local"}}]}`,
	}, []string{
		"multus: file /run/ready (readinessindicatorfile), report, ADD",
		"flannel: flannel env file /run/flannel/subnet.env (subnetFile), enforce, ADD",
		"dhcp: unix socket /run/cni/dhcp.sock (ipam.daemonSocketPath), enforce, ADD+DEL",
		"host-local: configuration subnet or ranges (ipam.ranges), enforce, ADD",
	}},
	{"multus without indicator", []string{`{"type":"multus","kubeconfig":"/k"}`}, nil},
	{"multus-shim", []string{`{"type":"multus-shim"}`}, []string{"multus-shim: unix socket /run/multus/multus.sock (daemonSocketDir), enforce, ADD+DEL"}},
	{"multus-shim, own dir", []string{`{"type":"multus-shim","daemonSocketDir":"/host/run/multus/"}`}, []string{
		"multus-shim: unix socket /host/run/multus/multus.sock (daemonSocketDir), enforce, ADD+DEL",
	}},
	{"kube-ovn", []string{`{"type":"kube-ovn","server_socket":"/run/openvswitch/kube-ovn-daemon.sock"}`}, []string{
		"kube-ovn: unix socket /run/openvswitch/kube-ovn-daemon.sock (server_socket), enforce, ADD+DEL",
	}},
	// Its daemon has them run, in its own container.
	{"multus-shim with delegates", []string{`{"type":"multus-shim","delegates":[{"type":"kube-ovn","server_socket":"/x"}]}`}, []string{
		"multus-shim: unix socket /run/multus/multus.sock (daemonSocketDir), enforce, ADD+DEL",
	}},
	{"multus with a cluster network", []string{`{"type":"multus","clusterNetwork":"/etc/cni/net.d/10-x.conflist","delegates":[{"type":"kube-ovn","server_socket":"/x"}]}`}, nil},
	// With a type it is no list, whatever else it has.
	{"multus, a delegate that is both", []string{`{"type":"multus","delegates":[{"type":"bridge","plugins":[{"type":"kube-ovn","server_socket":"/x"}]}]}`}, nil},
	{"hybridnet", []string{`{"type":"hybridnet","server_socket":"/run/cni/hybridnet.sock"}`}, []string{
		"hybridnet: unix socket /run/cni/hybridnet.sock (server_socket), enforce, ADD+DEL",
	}},
	{"coil", []string{`{"type":"coil"}`}, []string{
		"coil: unix socket /run/coild.sock or 127.0.0.1:9383 (socket), enforce, ADD+DEL",
	}},
	{"coil, own socket", []string{`{"type":"coil","socket":"/tmp/coild.sock"}`}, []string{
		"coil: unix socket /tmp/coild.sock or 127.0.0.1:9383 (socket), enforce, ADD+DEL",
	}},
	{"aci", []string{`{"type":"opflex-agent-cni","ipam":{"type":"opflex-agent-cni-ipam"}}`}, []string{
		"opflex-agent-cni: unix socket /var/run/aci-containers-ep-rpc.sock or 127.0.0.1:4242 (ep-rpc-sock), enforce, ADD+DEL",
	}},
	{"aci with another ipam", []string{`{"type":"opflex-agent-cni","ep-rpc-sock":"/run/x","ipam":{"type":"dhcp"}}`}, []string{
		"opflex-agent-cni: unix socket /run/x or 127.0.0.1:4242 (ep-rpc-sock), enforce, ADD+DEL",
		"dhcp: unix socket /run/cni/dhcp.sock (ipam.daemonSocketPath), enforce, ADD+DEL",
	}},
	{"kube-ovn without the key", []string{`{"type":"kube-ovn"}`}, nil},
	{"kube-ovn as ipam", []string{`{"type":"macvlan","ipam":{"type":"kube-ovn","server_socket":"/run/o.sock"}}`}, []string{
		"kube-ovn: unix socket /run/o.sock (ipam.server_socket), enforce, ADD+DEL",
	}},
	{"spiderpool", []string{`{"type":"macvlan","ipam":{"type":"spiderpool"}}`, `coordinator`}, []string{
		"spiderpool: unix socket /var/run/spidernet/spiderpool.sock (ipam.ipam_unix_socket_path), enforce, ADD+DEL",
	}},
	{"spiderpool, own socket", []string{`{"type":"ipvlan","ipam":{"type":"spiderpool","ipam_unix_socket_path":"/run/s"}}`}, []string{
		"spiderpool: unix socket /run/s (ipam.ipam_unix_socket_path), enforce, ADD+DEL",
	}},
	{"dhcp", []string{`{"type":"macvlan","ipam":{"type":"dhcp"}}`}, []string{
		"dhcp: unix socket /run/cni/dhcp.sock (ipam.daemonSocketPath), enforce, ADD+DEL",
	}},
	{"dhcp, own socket", []string{`{"type":"macvlan","ipam":{"type":"dhcp","daemonSocketPath":"/run/d"}}`}, []string{
		"dhcp: unix socket /run/d (ipam.daemonSocketPath), enforce, ADD+DEL",
	}},
	{"host-local, subnet", []string{`{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`}, nil},
	{"host-local, ranges", []string{`{"type":"ptp","ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.0.0/24"}]]}}`}, nil},
	{"host-local, ranges from the runtime", []string{`{"type":"bridge","capabilities":{"ipRanges":true},"ipam":{"type":"host-local"}}`}, nil},
	{"host-local, empty ranges", []string{`{"type":"bridge","ipam":{"type":"host-local","ranges":[],"subnet":""}}`}, []string{
		"host-local: configuration subnet or ranges (ipam.ranges), enforce, ADD",
	}},
	{"kube-router as installed", []string{`{"name":"kubernetes","type":"bridge","bridge":"kube-bridge","isDefaultGateway":true,"ipam":{"type":"host-local"}}`}, []string{
		"host-local: configuration subnet or ranges (ipam.ranges), enforce, ADD",
	}},
	{"kindnet", []string{`{"type":"ptp","ipMasq":false,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state","ranges":[[{"subnet":"10.1.0.0/24"}]]}}`, `portmap`}, nil},
	{"cilium", []string{`{"type":"cilium-cni","log-file":"/var/run/cilium/cilium-cni.log"}`}, []string{
		"cilium-cni: unix socket /var/run/cilium/cilium.sock, report, ADD",
	}},
	{"gke with cilium chained", []string{`{"type":"ptp","ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.0.0/24"}]]}}`, `portmap`, `cilium-cni`}, []string{
		"cilium-cni: unix socket /var/run/cilium/cilium.sock, report, ADD",
	}},
	{"ovn-kubernetes", []string{`{"type":"ovn-k8s-cni-overlay"}`}, []string{
		"ovn-k8s-cni-overlay: unix socket /var/run/ovn-kubernetes/cni/ovn-cni-server.sock, report, ADD+DEL",
	}},
	{"antrea", []string{`{"type":"antrea","ipam":{"type":"host-local"}}`, `bandwidth`}, []string{
		"antrea: unix socket /var/run/antrea/cni.sock, report, ADD+DEL",
	}},
	{"terway", []string{`terway`}, []string{"terway: unix socket /var/run/eni/eni.socket, report, ADD+DEL"}},
	{"aws", []string{`{"type":"aws-cni","vethPrefix":"eni"}`, `egress-cni`, `portmap`}, []string{
		"aws-cni: unix socket /var/run/aws-node/ipamd.sock or 127.0.0.1:50051, report, ADD",
	}},
	{"azure with CNS", []string{`{"type":"azure-vnet","ipam":{"type":"azure-cns"}}`}, []string{
		"azure-vnet: tcp port localhost:10090 (cnsurl), report, ADD",
	}},
	{"azure with its own CNS address", []string{`{"type":"azure-vnet","cnsurl":"http://127.0.0.2:99","ipam":{"type":"azure-cns"}}`}, []string{
		"azure-vnet: tcp port 127.0.0.2:99 (cnsurl), report, ADD",
	}},
	{"azure with CNS on IPv6", []string{`{"type":"azure-vnet","cnsurl":"http://[::1]:99/x","ipam":{"type":"azure-cns"}}`}, []string{
		"azure-vnet: tcp port [::1]:99 (cnsurl), report, ADD",
	}},
	// It does not read cnsurl.
	{"azure-ipam", []string{`{"type":"azure-vnet","cnsurl":"http://127.0.0.2:99","ipam":{"type":"azure-ipam"}}`}, []string{
		"azure-ipam: tcp port localhost:10090, report, ADD",
	}},
	{"azure with cilium", []string{`{"type":"cilium-cni","ipam":{"type":"azure-ipam"}}`}, []string{
		"cilium-cni: unix socket /var/run/cilium/cilium.sock, report, ADD",
		"cilium-cni: tcp port localhost:10090, report, ADD",
	}},
	{"azure with CNS elsewhere", []string{`{"type":"azure-vnet","cnsurl":"http://10.0.0.1:10090","ipam":{"type":"azure-cns"}}`}, nil},
	{"azure with CNS by a name", []string{`{"type":"azure-vnet","cnsurl":"http://localhost.evil.example:10090","ipam":{"type":"azure-cns"}}`}, nil},
	{"azure with no address", []string{`{"type":"azure-vnet","cnsurl":"%zz","ipam":{"type":"azure-cns"}}`, `{"type":"azure-vnet","cnsurl":"localhost:10090","ipam":{"type":"azure-cns"}}`}, nil},
	{"azure without CNS", []string{`{"type":"azure-vnet","ipam":{"type":"azure-vnet-ipam"}}`}, nil},
	{"weave", []string{`{"type":"weave-net","hairpinMode":true}`, `portmap`}, []string{"weave-net: tcp port 127.0.0.1:6784, report, ADD+DEL"}},
	{"weave as ipam", []string{`{"type":"bridge","ipam":{"type":"weave-ipam"}}`}, []string{"weave-ipam: tcp port 127.0.0.1:6784, report, ADD+DEL"}},
	// Its agent can be a pod of the pod network: it would wait for itself.
	{"istio", []string{`{"type":"istio-cni","cni_agent_run_dir":"/var/run/istio-cni","kubernetes":{"kubeconfig":"/k"}}`}, nil},
	{"needs nothing", []string{`portmap`, `bandwidth`, `tuning`, `firewall`, `sbr`, `loopback`, `{"type":"bridge","ipam":{"type":"static"}}`}, nil},
	{"unknown", []string{`{"type":"somebodys","nodename_file":"/x","server_socket":"/y","readinessindicatorfile":"/z","ipam":{"type":"theirs","server_socket":"/y"}}`}, nil},
	// Nobody knows who runs these, and where.
	{"delegates of an unknown plugin", []string{
		`{"type":"somebodys","ipam":{"type":"dhcp"},"delegate":{"type":"calico"},"delegates":[{"type":"bridge","ipam":{"type":"dhcp"}}]}`,
		`{"type":"flannel","delegate":{"type":"somebodys"},"ipam":{"type":"dhcp"},"subnetFile":"/s"}`,
		`{"type":"bridge","delegate":{"type":"calico"}}`,
	}, []string{"flannel: flannel env file /s (subnetFile), enforce, ADD"}},
	{"egress-cni, off and on", []string{
		`{"type":"egress-cni","enabled":"false","ipam":{"type":"host-local"}}`,
		`{"type":"egress-cni","enabled":"true","ipam":{"type":"host-local"}}`,
	}, []string{"host-local: configuration subnet or ranges (ipam.ranges), enforce, ADD"}},
	{"delegate without ranges", []string{`{"type":"somebodys","delegate":{"type":"bridge","ipam":{"type":"host-local"}}}`}, nil},
	{"nested", []string{`{"type":"multus","delegates":[{"type":"multus","delegates":[{"plugins":[{"type":"antrea"}]}],"delegate":{"type":"terway"}}]}`}, []string{
		"antrea: unix socket /var/run/antrea/cni.sock, report, ADD+DEL",
	}},
	// It is the plugin's affair what it makes of these; nothing is to be waited for.
	{"bad shapes", []string{
		`{"type":"calico","nodename":7,"nodename_file":["x"],"nodename_file_optional":"true","kubernetes":"k","delegate":3,"delegates":{"type":"antrea"}}`,
		`{"type":"multus","delegates":[1,null,"x",[],{"plugins":7},{"plugins":[null,{"type":7}]},{"type":"x","ipam":[]},{"type":"x","ipam":{"type":["dhcp"]}}]}`,
		`{"type":"bridge","ipam":{"type":"host-local","ranges":{"a":1},"subnet":"10.1.0.0/24"}}`,
	}, []string{
		"calico: file not empty /var/lib/calico/nodename (nodename_file), enforce, ADD+DEL",
	}},
}

// What rules make of a list is one walk: where they say that something counts,
// its gates are there, and nowhere else.
func TestRules(t *testing.T) {
	t.Parallel()
	ruled := make(map[string]bool)
	for _, tt := range ruleRows {
		list, err := libcni.ConfListFromBytes([]byte(conflist("1.0.0", "a", tt.plugins...)))
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		gates := gatesOf(list)
		for _, p := range pluginsOf(list) {
			if p.counts {
				ruled[string(p.role)+" "+p.typ] = true
			} else if p.gates != nil {
				t.Errorf("%s: %s does not count, but has gates", tt.name, p.typ)
			}
		}
		if got := lines(gates); !slices.Equal(got, tt.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", tt.name, got, tt.want)
		}
		for _, g := range gates {
			// Readiness is held back only by what the configuration names: what
			// is compiled in may move with a release of the plugin.
			if g.mode == GateEnforce && g.key == "" {
				t.Errorf("%s: %s is enforced, but no key leads to it", tt.name, g.line())
			}
		}
	}
	for role, rules := range map[Role][]rule{RolePlugin: mainRules, RoleIPAM: ipamRules} {
		seen := make(map[string]bool)
		for _, r := range rules {
			for _, typ := range r.types {
				if seen[typ] {
					t.Errorf("%s %s has two rules", role, typ)
				}
				seen[typ] = true
				if key := string(role) + " " + typ; !ruled[key] && r.needs != nil {
					t.Errorf("%s has a rule with needs, but no row", key)
				}
			}
		}
	}
}

// What a list names, whether it counts, and where it is looked for.
func TestPluginsOf(t *testing.T) {
	t.Parallel()
	list, err := confdir.ParseList("a.conflist", []byte(`{"cniVersion":"1.0.0","name":"a","plugins":[
		{"type":"bridge","ipam":{"type":"host-local"}},
		{"type":"flannel","delegate":{"type":"ptp","ipam":{"type":"dhcp"}}},
		{"type":"flannel","delegate":{"hairpinMode":true},"ipam":{"type":"own"}},
		{"type":"multus","delegates":[
			{"type":"macvlan","cniVersion":"0.3.1"},
			{"type":"ipvlan","ipam":{"type":"static"}},
			{"cniVersion":"0.4.0","name":"x","plugins":[{"type":"calico","ipam":{"type":"calico-ipam"}},{"type":"portmap"}]},
			{"cniVersion":"0.4.0","type":"multus","binDir":"/b","delegates":[{"type":"tap","ipam":{"type":"dhcp"}}]},
			"not an object"]},
		{"type":"multus","clusterNetwork":"x","delegates":[{"type":"tap"}]},
		{"type":"multus-shim","delegates":[{"type":"tap","ipam":{"type":"dhcp"}}]},
		{"type":"antrea","ipam":{"type":"host-local"}},
		{"type":"azure-vnet","ipam":{"type":"azure-cns"}},
		{"type":"azure-vnet","ipam":{"type":"azure-vnet-ipam"}},
		{"type":"azure-vnet","multiTenancy":true,"ipam":{"type":"azure-vnet-ipam"}},
		{"type":"azure-vnet","executionMode":"baremetal","ipam":{"type":"azure-vnet-ipam"}},
		{"type":"opflex-agent-cni","ipam":{"type":"opflex-agent-cni-ipam"}},
		{"type":"opflex-agent-cni","chaining-mode":true,"ipam":{"type":"static"}},
		{"type":"cilium-cni","ipam":{"type":"azure-ipam"}},
		{"type":"egress-cni","enabled":"false","ipam":{"type":"host-local"}},
		{"type":"somebodys","ipam":{"type":"theirs"},"delegate":{"type":"bridge","ipam":{"type":"dhcp"}}},
		{"type":"odd","ipam":{"type":""},"delegate":7,"delegates":{"type":"no list"}},
		{"type":"bridge","ipam":{}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range pluginsOf(list) {
		s := fmt.Sprintf("%s %s %s", p.role, p.typ, p.version)
		if !p.counts {
			s = "(" + s + ")"
		}
		if p.dirs != nil {
			s += " " + strings.Join(p.dirs, ":")
		}
		got = append(got, s)
	}
	want := []string{
		"plugin bridge 1.0.0", "ipam host-local 1.0.0",
		"plugin flannel 1.0.0", "delegate ptp 1.0.0", "ipam host-local 1.0.0",
		"plugin flannel 1.0.0", "delegate bridge 1.0.0", "ipam own 1.0.0",
		"plugin multus 1.0.0", "delegate macvlan 0.3.1 /opt/cni/bin",
		"delegate ipvlan  /opt/cni/bin", "ipam static  /opt/cni/bin",
		"delegate calico 0.4.0 /opt/cni/bin", "ipam calico-ipam 0.4.0 /opt/cni/bin", "delegate portmap 0.4.0 /opt/cni/bin",
		"delegate multus 0.4.0 /opt/cni/bin", "delegate tap  /b:/opt/cni/bin", "ipam dhcp  /b:/opt/cni/bin",
		"plugin multus 1.0.0", "(delegate tap )",
		"plugin multus-shim 1.0.0", "(delegate tap )", "(ipam dhcp )",
		"plugin antrea 1.0.0", "(ipam host-local 1.0.0)",
		"plugin azure-vnet 1.0.0", "(ipam azure-cns 1.0.0)",
		"plugin azure-vnet 1.0.0", "ipam azure-vnet-ipam 1.0.0",
		"plugin azure-vnet 1.0.0", "(ipam azure-vnet-ipam 1.0.0)",
		"plugin azure-vnet 1.0.0", "(ipam azure-vnet-ipam 1.0.0)",
		"plugin opflex-agent-cni 1.0.0", "(ipam opflex-agent-cni-ipam 1.0.0)",
		"plugin opflex-agent-cni 1.0.0", "(ipam static 1.0.0)",
		"plugin cilium-cni 1.0.0", "(ipam azure-ipam 1.0.0)",
		"plugin egress-cni 1.0.0", "(ipam host-local 1.0.0)",
		"plugin somebodys 1.0.0", "(ipam theirs 1.0.0)", "(delegate bridge 1.0.0)", "(ipam dhcp 1.0.0)",
		"plugin odd 1.0.0", "plugin bridge 1.0.0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	// Delegates within delegates come to an end.
	for _, nested := range [][2]string{{`{"type":"d","delegate":`, `}`}, {`{"type":"flannel","delegate":`, `}`}, {`{"type":"multus","delegates":[`, `]}`}} {
		deep := strings.Repeat(nested[0], 1000) + "{}" + strings.Repeat(nested[1], 1000)
		list, err := confdir.ParseList("a.conflist", []byte(`{"name":"a","plugins":[`+deep+`]}`))
		if err != nil {
			t.Fatal(err)
		}
		if n := len(pluginsOf(list)); n > 2*maxNesting {
			t.Errorf("%d plugins in nested delegates", n)
		}
	}
}

var update = flag.Bool("update", false, "write the table of rules to docs/readiness.md")

// rulesTable is the table of rules in docs/readiness.md.
func rulesTable() string {
	var b strings.Builder
	b.WriteString("| plugin | runs on the host | needs | from | mode | for | why |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	row := func(cells ...string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	for _, role := range []Role{RolePlugin, RoleIPAM} {
		rules, suffix := mainRules, ""
		if role == RoleIPAM {
			rules, suffix = ipamRules, " (IPAM)"
		}
		for _, r := range rules {
			name, running := strings.Join(r.types, ", ")+suffix, r.running
			if len(r.needs) == 0 {
				row(name, running, cmp.Or(r.note, "nothing"), "", "", "", "")
			}
			for _, n := range r.needs {
				var from []string
				if n.key != "" {
					from = append(from, "`"+n.key+"`")
				}
				if n.fallback != "" {
					from = append(from, "`"+n.fallback+"`")
				}
				if n.key == "" {
					from = append(from, "compiled in")
				}
				row(name, running, n.what, strings.Join(from, ", "), map[GateMode]string{GateEnforce: "enforced", GateReport: "reported"}[n.mode],
					strings.Join(gate{del: n.del}.ops(), ", "), n.why)
				name, running = "", ""
			}
		}
	}
	row("any other", "what it names is shown and does not count", "nothing", "", "", "", "")
	return b.String()
}

// The documentation says what the rules say.
func TestRulesInDocs(t *testing.T) {
	t.Parallel()
	const (
		path  = "../docs/readiness.md"
		begin = "<!-- made from cnireload/rules.go by: go test ./cnireload -run TestRulesInDocs -update -->\n\n"
		end   = "\n<!-- end of what is made -->\n"
	)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	table, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the table", path)
	}
	want := rulesTable()
	if table == want {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the rules; run go test ./cnireload -run TestRulesInDocs -update", path)
	}
	if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Each rule has the words that its row in the documentation needs.
func TestRulesHaveWords(t *testing.T) {
	t.Parallel()
	for _, r := range slices.Concat(mainRules, ipamRules) {
		if (r.runs == nil) != (r.running == "") {
			t.Errorf("%s: runs something, or says so, but not both", r.types)
		}
		if r.runs == nil && r.needs == nil && r.note == "" {
			t.Errorf("%s: the rule says nothing", r.types)
		}
		for _, n := range r.needs {
			if n.what == "" || n.why == "" || n.kind == "" || n.mode == "" || n.key == "" && n.fallback == "" {
				t.Errorf("%s: %+v", r.types, n)
			}
		}
	}
}
