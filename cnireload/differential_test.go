// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
)

// attachArgs is what a caller passes for a namespace, for both libraries.
type attachArgs struct {
	labels       map[string]string
	args         map[string]string
	portMappings []PortMapping
	ipRanges     []IPRanges
	bandwidth    *BandWidth
	dns          *DNS
	cgroupPath   string
	capabilities map[string]any
}

func (a attachArgs) ours() (opts []NamespaceOpts) {
	if a.labels != nil {
		opts = append(opts, WithLabels(a.labels))
	}
	for k, v := range a.args {
		opts = append(opts, WithArgs(k, v))
	}
	if a.portMappings != nil {
		opts = append(opts, WithCapabilityPortMap(a.portMappings))
	}
	if a.ipRanges != nil {
		opts = append(opts, WithCapabilityIPRanges(a.ipRanges))
	}
	if a.bandwidth != nil {
		opts = append(opts, WithCapabilityBandWidth(*a.bandwidth))
	}
	if a.dns != nil {
		opts = append(opts, WithCapabilityDNS(*a.dns))
	}
	if a.cgroupPath != "" {
		opts = append(opts, WithCapabilityCgroupPath(a.cgroupPath))
	}
	for k, v := range a.capabilities {
		opts = append(opts, WithCapability(k, v))
	}
	return opts
}

func (a attachArgs) theirs() (opts []gocni.NamespaceOpts) {
	if a.labels != nil {
		opts = append(opts, gocni.WithLabels(a.labels))
	}
	for k, v := range a.args {
		opts = append(opts, gocni.WithArgs(k, v))
	}
	if a.portMappings != nil {
		opts = append(opts, gocni.WithCapabilityPortMap(a.portMappings))
	}
	if a.ipRanges != nil {
		opts = append(opts, gocni.WithCapabilityIPRanges(a.ipRanges))
	}
	if a.bandwidth != nil {
		opts = append(opts, gocni.WithCapabilityBandWidth(*a.bandwidth))
	}
	if a.dns != nil {
		opts = append(opts, gocni.WithCapabilityDNS(*a.dns))
	}
	if a.cgroupPath != "" {
		opts = append(opts, gocni.WithCapabilityCgroupPath(a.cgroupPath))
	}
	for k, v := range a.capabilities {
		opts = append(opts, gocni.WithCapability(k, v))
	}
	return opts
}

// TestSameAsGoCNI runs the same conf dir and the same plugins through go-cni and
// through this package. Where go-cni works, every call of a plugin, every result
// and every error must be the same.
func TestSameAsGoCNI(t *testing.T) {
	full := attachArgs{
		labels: map[string]string{
			"K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": "web-0", "K8S_POD_INFRA_CONTAINER_ID": "abc", "K8S_POD_UID": "u-1", "IgnoreUnknown": "1",
		},
		args:         map[string]string{"odd key": "v=w,x y", "K8S_POD_NAME": "web-1"},
		portMappings: []PortMapping{{HostPort: 8080, ContainerPort: 80, Protocol: "tcp", HostIP: "127.0.0.1"}, {HostPort: 53, ContainerPort: 53, Protocol: "udp"}},
		ipRanges:     []IPRanges{{Subnet: "10.9.0.0/24", RangeStart: "10.9.0.5", RangeEnd: "10.9.0.9", Gateway: "10.9.0.1"}},
		bandwidth:    &BandWidth{IngressRate: 1000, IngressBurst: 2000, EgressRate: 3000, EgressBurst: 4000},
		dns:          &DNS{Servers: []string{"10.0.0.10"}, Searches: []string{"svc.cluster.local"}, Options: []string{"ndots:5"}},
		cgroupPath:   "/kubepods/burstable/pod1",
		capabilities: map[string]any{"io.kubernetes.cri.pod-annotations": map[string]string{"a/b": "c"}, "ioPortMaps": []int{1, 2}},
	}
	allCapabilities := `"capabilities":{"portMappings":true,"ipRanges":true,"bandwidth":true,"dns":true,"cgroupPath":true,"ioPortMaps":true,"io.kubernetes.cri.pod-annotations":true,"other":true}`

	for i, tt := range []struct {
		name      string
		files     map[string]string
		replies   map[string]reply // by "type verb"
		missing   []string         // plugins that are not installed
		max       int              // 0: the default, which is 1
		all       bool             // WithAllConf
		noLimit   bool             // max conf num 0
		loopback  bool
		prefix    string
		args      attachArgs
		noNetns   bool // the namespace is gone when the network is removed
		wantFiles map[string]string
		wantErr   string // of Setup
		wantDel   string // error of Remove
		// Where stock does not work, the library differs on purpose: a DEL goes
		// on to the plugins that go-cni leaves out after a failure, and one that
		// finds nothing counts as done in the cache too.
		wantMoreDel string
		wantDone    bool
		// How many plugins the cached list has where go-cni leaves out those
		// from drop-ins.
		wantCached int
	}{
		{
			name:      "conflist",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "conf",
			files:     map[string]string{"10-a.conf": `{"cniVersion":"0.4.0","name":"a","type":"fakenet","extra":{"b":[1,2.5,"x"]}}`},
			replies:   map[string]reply{"fakenet ADD": {out: result("0.4.0", "10.1.0.2")}},
			wantFiles: map[string]string{"10-a.conf": "eth0"},
		},
		{
			name:      "json is a conf",
			files:     map[string]string{"10-a.json": `{"cniVersion":"1.0.0","name":"a","type":"fakenet"}`},
			wantFiles: map[string]string{"10-a.json": "eth0"},
		},
		{
			name: "first in lexical order",
			files: map[string]string{
				"20-b.conflist": conflist("1.0.0", "b", "portmap"),
				"10-a.conf":     `{"cniVersion":"1.0.0","name":"a","type":"fakenet"}`,
				"100.conflist":  conflist("1.0.0", "c", "portmap"),
				"ignored.txt":   "no", "10-a.conflist~": "no", ".hidden": "no",
			},
			wantFiles: map[string]string{"10-a.conf": "eth0"},
		},
		{
			name:      "hidden file and odd names",
			files:     map[string]string{".10-ü ñ'\"$x.conflist": conflist("1.0.0", "a.b_c-d", "fakenet"), "zz.conflist": conflist("1.0.0", "z", "fakenet")},
			wantFiles: map[string]string{".10-ü ñ'\"$x.conflist": "eth0"},
		},
		{
			name: "two networks",
			files: map[string]string{
				"10-a.conflist": conflist("1.0.0", "a", "fakenet"),
				"20-b.json":     `{"cniVersion":"0.3.1","name":"b","type":"second"}`,
				"30-c.conflist": conflist("1.0.0", "c", "portmap"),
			},
			replies:   map[string]reply{"second ADD": {out: `{"cniVersion":"0.3.1","interfaces":[{"name":"eth1"}],"ips":[{"version":"4","address":"10.2.0.9/24","interface":0}]}`}},
			max:       2,
			wantFiles: map[string]string{"10-a.conflist": "eth0", "20-b.json": "eth1"},
		},
		{
			name: "no limit, with loopback and another prefix",
			files: map[string]string{
				"10-a.conflist": conflist("1.0.0", "a", "fakenet"),
				"20-b.conflist": conflist("1.0.0", "b", "fakenet"),
				"30-c.conf":     `{"name":"c","type":"second","cniVersion":"0.4.0"}`,
			},
			replies: map[string]reply{
				"loopback ADD": {out: `{"cniVersion":"0.3.1","interfaces":[{"name":"lo","mac":"00:00:00:00:00:00","sandbox":"/ns"}],"ips":[{"version":"4","address":"127.0.0.1/8","interface":0}]}`},
				"second ADD":   {out: `{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.3.0.9/24"}]}`},
				"fakenet ADD":  {out: `{"cniVersion":"1.0.0","interfaces":[{"name":"net0"}],"ips":[{"address":"10.1.0.9/24","interface":0}]}`},
			},
			noLimit:   true,
			loopback:  true,
			prefix:    "net",
			wantFiles: map[string]string{"10-a.conflist": "net0", "20-b.conflist": "net1", "30-c.conf": "net2", ".": "lo"},
		},
		{
			name: "all conf",
			files: map[string]string{
				"10-a.conflist": conflist("1.0.0", "a", "fakenet"),
				"20-b.conflist": conflist("1.0.0", "b", "fakenet"),
			},
			all:       true,
			wantFiles: map[string]string{"10-a.conflist": "eth0", "20-b.conflist": "eth1"},
		},
		{
			name:      "loopback",
			files:     map[string]string{"10-a.conflist": conflist("1.1.0", "a", "fakenet")},
			replies:   map[string]reply{"loopback ADD": {out: `{"cniVersion":"0.3.1","interfaces":[{"name":"lo","sandbox":"/ns"}]}`}},
			loopback:  true,
			wantFiles: map[string]string{"10-a.conflist": "eth0", ".": "lo"},
		},
		{
			name: "chain with previous result",
			files: map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet",
				`{"type":"portmap","capabilities":{"portMappings":true},"snat":true}`, `{"type":"bandwidth","capabilities":{"bandwidth":true}}`)},
			replies: map[string]reply{
				"fakenet ADD":   {out: result("1.0.0", "10.1.0.2")},
				"portmap ADD":   {out: result("1.0.0", "10.1.0.3")},
				"bandwidth ADD": {out: result("1.0.0", "10.1.0.4")},
			},
			args:      full,
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "all capabilities and arguments",
			files:     map[string]string{"10-a.conflist": conflist("1.1.0", "a", `{"type":"fakenet",`+allCapabilities+`}`, `{"type":"portmap","capabilities":{"dns":false}}`)},
			args:      full,
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "0.1.0",
			files:     map[string]string{"10-a.conf": `{"cniVersion":"0.1.0","name":"a","type":"fakenet"}`},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"0.1.0","ip4":{"ip":"10.1.0.5/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]},"dns":{"nameservers":["10.1.0.1"]}}`}},
			wantFiles: map[string]string{"10-a.conf": "eth0"},
		},
		{
			name:      "no version",
			files:     map[string]string{"10-a.conf": `{"name":"a","type":"fakenet"}`},
			replies:   map[string]reply{"fakenet ADD": {out: `{"ip4":{"ip":"10.1.0.5/24"}}`}},
			wantFiles: map[string]string{"10-a.conf": "eth0"},
		},
		{
			name:      "0.2.0",
			files:     map[string]string{"10-a.conflist": conflist("0.2.0", "a", "fakenet", "portmap")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/24"},"ip6":{"ip":"fd00::5/64"}}`}, "portmap ADD": {out: `{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.6/24"}}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "0.3.0",
			files:     map[string]string{"10-a.conflist": conflist("0.3.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"0.3.0","ips":[{"version":"4","address":"10.1.0.5/24"}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "0.3.1 has no CHECK",
			files:     map[string]string{"10-a.conflist": conflist("0.3.1", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"0.3.1","ips":[{"version":"4","address":"10.1.0.5/24"}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "several versions offered",
			files:     map[string]string{"10-a.conflist": `{"cniVersion":"0.3.1","cniVersions":["0.4.0","1.0.0","9.0.0"],"name":"a","plugins":[{"type":"fakenet"}]}`},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "1.1.0 with STATUS",
			files:     map[string]string{"10-a.conflist": conflist("1.1.0", "a", `{"type":"fakenet","mtu":1400}`, "portmap")},
			replies:   map[string]reply{"fakenet ADD": {out: result("1.1.0", "10.1.0.2")}, "portmap ADD": {out: result("1.1.0", "10.1.0.2")}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			wantCached: 3,
			name:       "drop-ins",
			files: map[string]string{
				"10-a.conflist":  conflist("1.1.0", "a", "fakenet"),
				"a/20-two.conf":  `{"type":"bandwidth","x":2}`,
				"a/10-one.conf":  `{"type":"portmap","x":1}`,
				"a/30-not.json":  `{"type":"second"}`,
				"a/40-not.confl": `garbage`,
				"b/10-one.conf":  `{"type":"second"}`,
			},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			wantCached: 1,
			name:       "drop-ins alone",
			files: map[string]string{
				"10-a.conflist": `{"cniVersion":"1.1.0","name":"a"}`,
				"a/10-one.conf": `{"type":"fakenet"}`,
			},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name: "only inlined plugins",
			files: map[string]string{
				"10-a.conflist": `{"cniVersion":"1.1.0","name":"a","loadOnlyInlinedPlugins":true,"plugins":[{"type":"fakenet"}]}`,
				"a/10-one.conf": `garbage`,
			},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name: "a conf has no drop-ins",
			files: map[string]string{
				"10-a.conf":     `{"cniVersion":"1.0.0","name":"a","type":"fakenet"}`,
				"a/10-one.conf": `{"type":"portmap"}`,
			},
			wantFiles: map[string]string{"10-a.conf": "eth0"},
		},
		{
			name:      "result without version",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet", "portmap")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"ips":[{"address":"10.1.0.5/24"}]}`}, "portmap ADD": {out: `{"cniVersion":"","ips":[{"address":"10.1.0.6/24"}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "result of an older version",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"0.3.1","ips":[{"version":"4","address":"10.1.0.5/24"}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "two addresses, no interfaces",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"fd00::5/64"}],"routes":[{"dst":"::/0","gw":"fd00::1","mtu":1400}],"dns":{"domain":"d","search":["s"],"options":["o"]}}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "interfaces with everything",
			files:     map[string]string{"10-a.conflist": conflist("1.1.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"1.1.0","interfaces":[{"name":"cni0","mac":"aa:bb:cc:dd:ee:ff"},{"name":"eth0","mac":"aa:bb:cc:dd:ee:00","sandbox":"/ns","socketPath":"/s","pciID":"0000:00:1f.6","mtu":1500}],"ips":[{"address":"10.1.0.5/24","interface":1},{"address":"10.1.0.6/24","interface":0}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "address on an interface that does not exist",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[{"address":"10.1.0.5/24","interface":7}]}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "invalid interface config",
		},
		{
			name:      "null result",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `null`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "no result",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "failed to unmarshal raw result",
		},
		{
			name:      "result of an unknown version",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: `{"cniVersion":"7.7.7"}`}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "7.7.7",
		},
		{
			name:      "second plugin fails",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet", "portmap", "bandwidth")},
			replies:   map[string]reply{"portmap ADD": {out: `{"cniVersion":"1.0.0","code":11,"msg":"no port","details":"8080 is taken"}`, err: "some noise", code: 1}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "no port; 8080 is taken",
		},
		{
			name:      "plugin fails without a word",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {code: 3}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "netplugin failed with no error message: exit status 3",
		},
		{
			name:      "plugin fails and prints no JSON",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet ADD": {out: "panic: \"oops\"\n\tat x", code: 2}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   "error parsing its diagnostic message",
		},
		{
			name:      "second network fails",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet"), "20-b.conflist": conflist("1.0.0", "b", "second")},
			replies:   map[string]reply{"second ADD": {out: `{"code":100,"msg":"no"}`, code: 1}},
			max:       2,
			wantFiles: map[string]string{"10-a.conflist": "eth0", "20-b.conflist": "eth1"},
			wantErr:   "no",
		},
		{
			name:      "CHECK fails",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet", "portmap")},
			replies:   map[string]reply{"portmap CHECK": {out: `{"code":101,"msg":"rule is gone"}`, code: 1}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "CHECK is disabled",
			files:     map[string]string{"10-a.conflist": `{"cniVersion":"1.0.0","name":"a","disableCheck":true,"plugins":[{"type":"fakenet"}]}`},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
		},
		{
			name:      "DEL fails",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet", "portmap")},
			replies:   map[string]reply{"portmap DEL": {out: `{"code":102,"msg":"iptables is locked"}`, code: 1}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantDel:   "iptables is locked",

			wantMoreDel: "DEL eth0 fakenet",
		},
		{
			name:      "DEL finds nothing",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet"), "20-b.conflist": conflist("1.0.0", "b", "second")},
			replies:   map[string]reply{"fakenet DEL": {out: `{"code":103,"msg":"container not found"}`, code: 1}},
			max:       2,
			wantFiles: map[string]string{"10-a.conflist": "eth0", "20-b.conflist": "eth1"},
			wantDone:  true,
		},
		{
			name:      "DEL without a namespace, no such file",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet DEL": {out: `{"code":103,"msg":"open /x: no such file or directory"}`, code: 1}},
			noNetns:   true,
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantDone:  true,
		},
		{
			name:      "DEL with a namespace, no such file",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet")},
			replies:   map[string]reply{"fakenet DEL": {out: `{"code":103,"msg":"open /x: no such file or directory"}`, code: 1}},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantDel:   "no such file or directory",
		},
		{
			name:      "DEL without the plugin",
			files:     map[string]string{"10-a.conflist": conflist("1.0.0", "a", "fakenet", "gone")},
			missing:   []string{"gone"},
			wantFiles: map[string]string{"10-a.conflist": "eth0"},
			wantErr:   `failed to find plugin "gone" in path [`,
			wantDel:   `failed to find plugin "gone" in path [`,

			wantMoreDel: "DEL eth0 fakenet",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			d := newNode(t)
			for name, content := range tt.files {
				d.write(name, content)
			}
			for _, typ := range []string{"fakenet", "second", "portmap", "bandwidth", "loopback"} {
				d.install(typ)
				d.answer(typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
			}
			for key, r := range tt.replies {
				typ, verb, _ := strings.Cut(key, " ")
				d.answer(typ, verb, r)
			}
			theirs, ours := bothFor(t, d, tt.max, tt.noLimit, tt.prefix, tt.loopback, tt.all, tt.missing)

			if got := inUse(ours.Snapshot()); !reflect.DeepEqual(got, tt.wantFiles) {
				t.Errorf("in use are %v, want %v", got, tt.wantFiles)
			}
			same(t, "GetConfig", compactLoopback(t, theirs.GetConfig()), compactLoopback(t, ours.GetConfig()))
			same(t, "Status", errorText(theirs.Status()), errorText(ours.Status()))
			same(t, "STATUS calls", distinct(d.take("STATUS")), distinct(ours.status))

			// The container's id appears in the cache that go-cni's libcni keeps
			// for the whole process.
			id := fmt.Sprintf("pod-%d-of-%d", i, os.Getpid())
			for _, serially := range []bool{false, true} {
				if serially && len(tt.wantFiles) == 1 {
					continue // no difference with one network
				}
				path := "/var/run/netns/pod"
				setup := func(name string, err error, r *Result) setupOutcome {
					if (err == nil) != (tt.wantErr == "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
						t.Errorf("%s: Setup error is %v, want %q", name, err, tt.wantErr)
					}
					return newSetupOutcome(t, r, err)
				}
				var r1, r2 *Result
				var err1, err2 error
				if serially {
					r1, err1 = theirs.SetupSerially(ctx, id, path, tt.args.theirs()...)
				} else {
					r1, err1 = theirs.Setup(ctx, id, path, tt.args.theirs()...)
				}
				calls1 := d.take("ADD", "DEL", "CHECK")
				cache1 := readCache(t, libcni.CacheDir, id)
				if serially {
					r2, err2 = ours.SetupSerially(ctx, id, path, tt.args.ours()...)
				} else {
					r2, err2 = ours.Setup(ctx, id, path, tt.args.ours()...)
				}
				calls2 := d.take("ADD", "DEL", "CHECK")
				cache2 := readCache(t, d.cache, id)
				same(t, "Setup", setup("go-cni", err1, r1), setup("cnireload", err2, r2))
				if !serially {
					calls1.All, calls2.All = nil, nil
				}
				sameCalls(t, "Setup", calls1, calls2)
				if tt.wantCached > 0 {
					if list := cachedConfig(t, cache2); len(list.Plugins) != tt.wantCached {
						t.Errorf("the cached list has %d plugins, want %d", len(list.Plugins), tt.wantCached)
					}
					continueFrom(cache1, cache2)
				}
				same(t, "attachment cache", cache1, cache2)

				err1 = theirs.Check(ctx, id, path, tt.args.theirs()...)
				calls1 = d.take("ADD", "DEL", "CHECK")
				err2 = ours.Check(ctx, id, path, tt.args.ours()...)
				same(t, "Check", errorText(err1), errorText(err2))
				sameCalls(t, "Check", calls1, d.take("ADD", "DEL", "CHECK"))

				if tt.noNetns {
					path = ""
				}
				err1 = theirs.Remove(ctx, id, path, tt.args.theirs()...)
				calls1 = d.take("ADD", "DEL", "CHECK")
				err2 = ours.Remove(ctx, id, path, tt.args.ours()...)
				same(t, "Remove", errorText(err1), errorText(err2))
				calls2 = d.take("ADD", "DEL", "CHECK")
				if tt.wantMoreDel != "" {
					calls2 = calls2.without(t, tt.wantMoreDel)
				}
				sameCalls(t, "Remove", calls1, calls2)
				if (err2 == nil) != (tt.wantDel == "") || err2 != nil && !strings.Contains(err2.Error(), tt.wantDel) {
					t.Errorf("Remove error is %v, want %q", err2, tt.wantDel)
				}
				if tt.wantDone {
					same(t, "attachment cache after Remove", map[string]any{}, readCache(t, d.cache, id))
					continue
				}
				same(t, "attachment cache after Remove", readCache(t, libcni.CacheDir, id), readCache(t, d.cache, id))
			}
		})
	}
}

// ourNetwork is a Network whose STATUS calls were logged apart.
type ourNetwork struct {
	*Network
	status calls
}

// bothFor loads the node's configuration with both libraries.
func bothFor(t *testing.T, d *node, maxConf int, noLimit bool, prefix string, loopback, all bool, missing []string) (gocni.CNI, *ourNetwork) {
	t.Helper()
	theirOpts := []gocni.Opt{gocni.WithPluginDir([]string{d.bin}), gocni.WithPluginConfDir(d.conf)}
	ourOpts := []Opt{WithPluginDir([]string{d.bin}), WithPluginConfDir(d.conf), WithCacheDir(d.cache)}
	if len(missing) > 0 {
		// Strictly such a network is not ready. What plugins are asked when an
		// executable disappears later must still be the same.
		ourOpts = append(ourOpts, WithReadiness("parse"))
	}
	if maxConf != 0 || noLimit {
		theirOpts, ourOpts = append(theirOpts, gocni.WithPluginMaxConfNum(maxConf)), append(ourOpts, WithPluginMaxConfNum(maxConf))
	}
	if prefix != "" {
		theirOpts, ourOpts = append(theirOpts, gocni.WithInterfacePrefix(prefix)), append(ourOpts, WithInterfacePrefix(prefix))
	}
	var theirLoad []gocni.Opt
	var ourLoad []Opt
	if loopback {
		theirOpts, ourOpts = append(theirOpts, gocni.WithMinNetworkCount(2)), append(ourOpts, WithMinNetworkCount(2))
		theirLoad, ourLoad = append(theirLoad, gocni.WithLoNetwork), append(ourLoad, WithLoNetwork)
	}
	if all {
		theirLoad, ourLoad = append(theirLoad, gocni.WithAllConf), append(ourLoad, WithAllConf)
	} else {
		theirLoad, ourLoad = append(theirLoad, gocni.WithDefaultConf), append(ourLoad, WithDefaultConf)
	}
	theirs, err := gocni.New(theirOpts...)
	d.must(err)
	d.must(theirs.Load(theirLoad...))
	ours, err := New(ourOpts...)
	d.must(err)
	t.Cleanup(func() { _ = ours.Close() })
	d.must(ours.Load(ourLoad...))
	// Load has asked for STATUS, once; go-cni asks within Status.
	return theirs, &ourNetwork{Network: ours, status: d.take("STATUS", "VERSION")}
}

// distinct returns the STATUS calls in a form that does not depend on their
// order or number.
func distinct(c calls) map[string]call {
	m := make(map[string]call)
	for key, list := range c.Calls {
		if strings.HasPrefix(key, "STATUS") {
			m[key] = list[0]
		}
	}
	return m
}

// setupOutcome is everything that a caller of Setup sees.
type setupOutcome struct {
	Err    string
	Result *Result
	Raw    string
}

func newSetupOutcome(t *testing.T, r *Result, err error) setupOutcome {
	t.Helper()
	o := setupOutcome{Err: errorText(err), Result: r}
	if r != nil {
		b, err := json.Marshal(r.Raw())
		if err != nil {
			t.Fatal(err)
		}
		o.Raw = string(b)
	}
	return o
}

// compactLoopback takes the white space out of the loopback list, which is a
// constant of either library.
func compactLoopback(t *testing.T, r *ConfigResult) *ConfigResult {
	for _, n := range r.Networks {
		if n.IFName == "lo" {
			n.Config.Source = compact(t, n.Config.Source)
		}
	}
	return r
}

func compact(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, []byte(s)); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func same(t *testing.T, what string, theirs, ours any) {
	t.Helper()
	if !reflect.DeepEqual(theirs, ours) {
		t.Errorf("%s differs\ngo-cni:    %s\ncnireload: %s", what, show(theirs), show(ours))
	}
}

func sameCalls(t *testing.T, what string, theirs, ours calls) {
	t.Helper()
	same(t, what+" order", theirs.Order, ours.Order)
	same(t, what+" sequence", theirs.All, ours.All)
	same(t, what+" calls", theirs.Calls, ours.Calls)
}

func show(v any) string {
	if b, err := json.Marshal(v); err == nil {
		return string(b)
	}
	return fmt.Sprintf("%+v", v)
}

// readCache returns libcni's cached attachments of a container. Either library
// must be able to go on from the other's.
func readCache(t *testing.T, dir, id string) map[string]any {
	t.Helper()
	m := make(map[string]any)
	files, err := filepath.Glob(filepath.Join(dir, "results", "*-"+id+"-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		if err := json.Unmarshal(b, &v); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(filepath.Base(file), "cni-loopback-") {
			conf, err := base64.StdEncoding.DecodeString(v["config"].(string))
			if err != nil {
				t.Fatal(err)
			}
			v["config"] = compact(t, string(conf))
		}
		if args, ok := v["cniArgs"].([]any); ok {
			slices.SortFunc(args, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		}
		m[filepath.Base(file)] = v
	}
	return m
}

// cachedConfig returns the list of the one attachment in a cache.
func cachedConfig(t *testing.T, cache map[string]any) *libcni.NetworkConfigList {
	t.Helper()
	for _, entry := range cache {
		config, err := base64.StdEncoding.DecodeString(entry.(map[string]any)["config"].(string))
		if err != nil {
			t.Fatal(err)
		}
		list, err := libcni.NetworkConfFromBytes(config)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	t.Fatal("the cache is empty")
	return nil
}

// continueFrom takes the lists out of both caches, whose other content is to be
// the same.
func continueFrom(caches ...map[string]any) {
	for _, cache := range caches {
		for _, entry := range cache {
			delete(entry.(map[string]any), "config")
		}
	}
}
