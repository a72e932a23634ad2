// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// Gates says what closed gates do.
type Gates string

const (
	// GatesAuto: a gate is enforced where its target comes from a key of the
	// plugin's configuration, or that key's default, and reported where it is
	// compiled into the plugin and may move with a release of it.
	GatesAuto Gates = "auto"
	// GatesReport: no gate of a plugin is enforced.
	GatesReport Gates = "report"
	// GatesOff: plugins have no gates.
	GatesOff Gates = "off"
)

// GateMode says what one closed gate does.
type GateMode string

const (
	// GateEnforce: the network is not ready while the gate is closed.
	GateEnforce GateMode = "enforce"
	// GateReport: the network is ready, but pods wait for the gate for a while.
	GateReport GateMode = "report"
)

// gateKind is what has to be true of a gate's target.
type gateKind string

const (
	gateFile    gateKind = "file"             // it exists
	gateFilled  gateKind = "file not empty"   // it exists and is not empty
	gateFlannel gateKind = "flannel env file" // it has flannel's keys
	gateUnix    gateKind = "unix socket"      // somebody accepts connections
	gateTCP     gateKind = "tcp port"         // somebody accepts connections
	gateConf    gateKind = "configuration"    // target says what is missing in it
)

// gate is a condition that a plugin's own code needs before an operation can
// succeed. It is never stricter than the plugin itself: a network that is held
// back wrongly has no way out.
type gate struct {
	plugin string
	kind   gateKind
	target string
	// instead is another target whose presence will do, of kind gateTCP.
	instead string
	key     string // of the configuration; empty when compiled in
	mode    GateMode
	del     bool   // DEL needs it too
	network string // that it belongs to, for messages; empty for ready_files
}

// GateState describes a gate of the networks in use.
type GateState struct {
	Plugin string
	Kind   string
	Target string
	Key    string // configuration key that the target comes from; empty when compiled in
	Mode   GateMode
	Ops    []string // verbs that need it
	Open   bool
	Since  time.Time // when it was found to be so
	Cause  string    // why it is closed, or open against appearances

	id string
}

// id names the gate for comparison.
func (g gate) id() string { return fmt.Sprintf("%+v", g) }

func (g gate) ops() []string {
	if g.del {
		return []string{"ADD", "DEL"}
	}
	return []string{"ADD"}
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

// pluginRules are the gates of plugins by type. To add a plugin, add its rule
// here or in ipamRules, with the source of what it says, and a row to the test.
var pluginRules = map[string]func(conf) []gate{
	// projectcalico/calico, cni-plugin/pkg/plugin/plugin.go: cmdAdd and cmdDel
	// stat nodename_file and fail unless nodename_file_optional; cmdAdd reads
	// the mtu file if require_mtu_file; both load kubernetes.kubeconfig.
	// The file's content is read only without "nodename" in the configuration,
	// and the writer truncates it first.
	"calico": func(c conf) []gate {
		var gates []gate
		if !c.isTrue("nodename_file_optional") {
			kind := gateFile
			if c.text("nodename") == "" {
				kind = gateFilled
			}
			gates = append(gates, gate{kind: kind, target: c.textOr("nodename_file", "/var/lib/calico/nodename"), key: "nodename_file", mode: GateEnforce, del: true})
		}
		if c.isTrue("require_mtu_file") {
			gates = append(gates, gate{kind: gateFile, target: "/var/lib/calico/mtu", key: "require_mtu_file", mode: GateEnforce})
		}
		if k := c.object("kubernetes").text("kubeconfig"); k != "" {
			gates = append(gates, gate{kind: gateFile, target: k, key: "kubernetes.kubeconfig", mode: GateEnforce, del: true})
		}
		return gates
	},
	// flannel-io/cni-plugin, flannel.go: loadFlannelSubnetEnv at ADD. DEL uses
	// what ADD stored.
	"flannel": func(c conf) []gate {
		return []gate{{kind: gateFlannel, target: c.textOr("subnetFile", "/run/flannel/subnet.env"), key: "subnetFile", mode: GateEnforce}}
	},
	// k8snetworkplumbingwg/multus-cni, pkg/types/conf.go: waits for the file
	// by itself, up to 45 s.
	"multus": func(c conf) []gate {
		if f := c.text("readinessindicatorfile"); f != "" {
			return []gate{{kind: gateFile, target: f, key: "readinessindicatorfile", mode: GateReport}}
		}
		return nil
	},
	// multus-cni, pkg/server/api: the shim posts to the daemon's socket.
	"multus-shim": func(c conf) []gate {
		return []gate{{kind: gateUnix, target: strings.TrimSuffix(c.textOr("daemonSocketDir", "/run/multus"), "/") + "/multus.sock", key: "daemonSocketDir", mode: GateEnforce}}
	},
	// kubeovn/kube-ovn, cmd/cni: both verbs post to server_socket.
	"kube-ovn": func(c conf) []gate { return unixGate(c.text("server_socket"), "server_socket", GateEnforce, true) },
	// cilium/cilium, plugins/cilium-cni: ADD waits 30 s by itself; DEL is
	// queued when the agent is away.
	"cilium-cni": func(conf) []gate { return unixGate("/var/run/cilium/cilium.sock", "", GateReport, false) },
	// ovn-org/ovn-kubernetes, go-controller/pkg/cni: both verbs post to it.
	"ovn-k8s-cni-overlay": func(conf) []gate {
		return unixGate("/var/run/ovn-kubernetes/cni/ovn-cni-server.sock", "", GateReport, true)
	},
	// antrea-io/antrea, pkg/cni: both verbs call the agent's socket.
	"antrea": func(conf) []gate { return unixGate("/var/run/antrea/cni.sock", "", GateReport, true) },
	// AliyunContainerService/terway, plugin/terway: both verbs call it.
	"terway": func(conf) []gate { return unixGate("/var/run/eni/eni.socket", "", GateReport, true) },
	// aws/amazon-vpc-cni-k8s, cmd/routed-eni-cni-plugin: a socket since July
	// 2026, a port before. DEL succeeds without the daemon.
	"aws-cni": func(conf) []gate {
		return []gate{{kind: gateUnix, target: "/var/run/aws-node/ipamd.sock", instead: "127.0.0.1:50051", mode: GateReport}}
	},
	// weaveworks/weave: HTTP to the router on a fixed port.
	"weave-net": func(conf) []gate { return tcpGate("127.0.0.1:6784", true) },
}

// ipamRules are the gates of what entries run as their IPAM, by its type. They
// are given the ipam object and the entry around it.
var ipamRules = map[string]func(ipam, entry conf) []gate{
	// containernetworking/plugins, plugins/ipam/host-local: "no IP ranges
	// specified". The runtime passes no ipRanges, but may some day.
	"host-local": func(ipam, entry conf) []gate {
		ranges, _ := ipam.value("ranges").([]any)
		if ipam.text("subnet") != "" || len(ranges) > 0 || entry.object("capabilities").isTrue("ipRanges") {
			return nil
		}
		return []gate{{kind: gateConf, target: "subnet or ranges", key: "ipam.ranges", mode: GateEnforce}}
	},
	// containernetworking/plugins, plugins/ipam/dhcp: both verbs call the daemon.
	"dhcp": func(ipam, _ conf) []gate {
		return unixGate(ipam.textOr("daemonSocketPath", "/run/cni/dhcp.sock"), "ipam.daemonSocketPath", GateEnforce, true)
	},
	"kube-ovn": func(ipam, _ conf) []gate {
		return unixGate(ipam.text("server_socket"), "ipam.server_socket", GateEnforce, true)
	},
	// spidernet-io/spiderpool, cmd/spiderpool: both verbs ask for the agent's
	// health first.
	"spiderpool": func(ipam, _ conf) []gate {
		return unixGate(ipam.textOr("ipam_unix_socket_path", "/var/run/spidernet/spiderpool.sock"), "ipam.ipam_unix_socket_path", GateEnforce, true)
	},
	// Azure/azure-container-networking: HTTP to CNS; DEL is queued without it.
	"azure-cns":  azureGate,
	"azure-ipam": azureGate,
	"weave-ipam": func(conf, conf) []gate { return tcpGate("127.0.0.1:6784", true) },
}

func unixGate(path, key string, mode GateMode, del bool) []gate {
	if path == "" {
		return nil
	}
	return []gate{{kind: gateUnix, target: path, key: key, mode: mode, del: del}}
}

func tcpGate(address string, del bool) []gate {
	return []gate{{kind: gateTCP, target: address, mode: GateReport, del: del}}
}

func azureGate(_, entry conf) []gate {
	u, err := url.Parse(entry.textOr("cnsurl", "http://localhost:10090"))
	if err != nil || u.Port() == "" {
		return nil
	}
	// Only what is on this node is asked; an address elsewhere is not ours to
	// call every half second.
	if ip := net.ParseIP(u.Hostname()); u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil
	}
	gates := tcpGate(u.Host, false)
	gates[0].key = "cnsurl"
	return gates
}

// gatesOf returns the gates of a list's plugins and of what they delegate to.
func gatesOf(list *libcni.NetworkConfigList) []gate {
	var gates []gate
	for _, p := range list.Plugins {
		var c conf
		if json.Unmarshal(p.Bytes, &c) == nil {
			gates = append(gates, entryGates(c, false, 0)...)
		}
	}
	return gates
}

// entryGates returns the gates of one entry. completed says that the plugin
// which delegates to it fills in its IPAM.
func entryGates(c conf, completed bool, depth int) []gate {
	if depth > maxNesting {
		return nil
	}
	var gates []gate
	name := c.text("type")
	if rule := pluginRules[name]; rule != nil {
		gates = append(gates, named(name, rule(c))...)
	}
	if ipam := c.object("ipam"); ipam != nil && !completed {
		// flannel-io/cni-plugin, flannel_linux.go: what flannel has as ipam is
		// its delegate's, and gets the subnet at ADD.
		filled := name == "flannel" && ipam.text("type") == "host-local"
		if rule := ipamRules[ipam.text("type")]; rule != nil && !filled {
			gates = append(gates, named(ipam.text("type"), rule(ipam, c))...)
		}
	}
	if d := c.object("delegate"); d != nil {
		// flannel puts its own ipam in the place of its delegate's, and others
		// are built after it.
		gates = append(gates, entryGates(d, true, depth+1)...)
	}
	for _, d := range c.objects("delegates") {
		entries := d.objects("plugins")
		if len(entries) == 0 {
			entries = []conf{d}
		}
		for _, e := range entries {
			gates = append(gates, entryGates(e, false, depth+1)...)
		}
	}
	return gates
}

func named(plugin string, gates []gate) []gate {
	for i := range gates {
		gates[i].plugin = plugin
	}
	return gates
}

// gateBound is how long one look at a gate may take.
const gateBound = time.Second

// check returns nil if the gate is open, and otherwise what its target lacks. A
// file on a disk that does not answer cannot be given up on, and keeps a thread:
// the look goes on in pending, which the next check takes up.
func (g gate) check(ctx context.Context, pending *chan error) error {
	ctx, cancel := context.WithTimeout(ctx, gateBound)
	defer cancel()
	if *pending == nil {
		done := make(chan error, 1)
		*pending = done
		go func() {
			err := g.look(ctx)
			if err != nil && g.instead != "" && dial(ctx, "tcp", g.instead) == nil {
				err = nil
			}
			done <- err
		}()
	}
	select {
	case err := <-*pending:
		*pending = nil
		return err
	case <-ctx.Done():
		return errSilent
	}
}

var errSilent = fmt.Errorf("has not answered within %s", gateBound)

func (g gate) look(ctx context.Context) error {
	switch g.kind {
	case gateFile, gateFilled:
		info, err := os.Stat(g.target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return errors.New("does not exist")
		case err != nil:
			return fmt.Errorf("cannot be looked at: %w", err)
		case g.kind == gateFilled && info.Size() == 0:
			return errors.New("is empty")
		}
		return nil
	case gateFlannel:
		return lookFlannel(g.target)
	case gateUnix:
		return dial(ctx, "unix", g.target)
	case gateTCP:
		return dial(ctx, "tcp", g.target)
	default:
		return errors.New("is not set")
	}
}

// lookFlannel makes the checks of flannel's plugin on its environment file.
func lookFlannel(path string) error {
	c := readContent(path, time.Now())
	if errors.Is(c.err, fs.ErrNotExist) {
		return errors.New("does not exist")
	}
	if c.err != nil {
		return c.err
	}
	has := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(c.bytes)); lines.Scan(); {
		key, _, ok := strings.Cut(lines.Text(), "=")
		has[strings.TrimSpace(key)] = ok
	}
	var missing []string
	if !has["FLANNEL_SUBNET"] && !has["FLANNEL_IPV6_SUBNET"] {
		missing = append(missing, "FLANNEL_SUBNET")
	}
	for _, key := range []string{"FLANNEL_MTU", "FLANNEL_IPMASQ"} {
		if !has[key] {
			missing = append(missing, key)
		}
	}
	if missing != nil {
		return fmt.Errorf("lacks %s", strings.Join(missing, ", "))
	}
	return nil
}

// dial tells whether somebody accepts connections: a socket's file stays behind
// when its owner has gone.
func dial(ctx context.Context, network, address string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if err == nil {
		return c.Close()
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	switch timeout, _ := err.(interface{ Timeout() bool }); {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("does not exist")
	case ctx.Err() != nil, timeout != nil && timeout.Timeout():
		// In the same words as check, which gives up at the same time.
		return errSilent
	}
	return fmt.Errorf("does not accept connections: %w", err)
}

// gateError is why a network is not ready that has a closed gate. Its text is
// the same for as long as the gate is closed: a message that changes with each
// look would have the node's status written each time.
type gateError struct {
	gate  gate
	cause string
	since time.Time
}

// what names what the gate looks at.
func (g gate) what() string {
	if g.key == "" {
		return g.target
	}
	return g.target + " (" + g.key + ")"
}

func (e *gateError) Error() string {
	what := e.gate.what()
	if e.gate.plugin == "" {
		return fmt.Sprintf("%s %s, since %s", what, e.cause, e.since.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("plugin %q needs %s, which %s, since %s", e.gate.plugin, what, e.cause, e.since.UTC().Format(time.RFC3339))
}

// gateHistory is what is known of one gate.
type gateHistory struct {
	answer  answer
	pending chan error // of a look that has not come to its end; the asking goroutine's
	open    bool       // latched: an agent that restarts does not close it again
	cause   string
	since   time.Time
}

// gatesOf returns the gates of the networks as they are to be treated.
func (c *config) gatesOf(nets []*network) []gate {
	var gates []gate
	if c.gates != GatesOff {
		for _, n := range nets {
			for _, g := range gatesOf(n.list) {
				g.network = n.describe()
				if c.gates == GatesReport {
					g.mode = GateReport
				}
				gates = append(gates, g)
			}
		}
	}
	for _, path := range c.readyFiles {
		gates = append(gates, gate{kind: gateFile, target: path, key: "ready_files", mode: GateEnforce})
	}
	return gates
}

// judgeGates adds the state of each gate to the snapshot. A gate stays open
// until the networks bring another set of gates.
func (l *loop) judgeGates(ctx context.Context, s *Snapshot, nets []*network, now time.Time) (cause, waiting error) {
	gates := l.n.config.gatesOf(nets)
	var ids strings.Builder
	for _, g := range gates {
		ids.WriteString(g.id() + "\x00")
	}
	l.gateSet = ids.String()
	known := l.gates[l.gateSet]
	if known == nil {
		known = make(map[string]*gateHistory)
		l.gates[l.gateSet] = known
		l.n.disproved.Store(nil)
	}
	for _, g := range gates {
		h := known[g.id()]
		if h == nil {
			h = &gateHistory{since: now}
			known[g.id()] = h
		}
		l.observe(ctx, g, h, now)
		if !h.open && !h.answer.asked {
			waiting = g.within(fmt.Errorf("looking for %s", g.target))
			continue
		}
		state := GateState{Plugin: g.plugin, Kind: string(g.kind), Target: g.target, Key: g.key, Mode: g.mode,
			Ops: g.ops(), Open: h.open, Since: h.since, Cause: h.cause, id: g.id()}
		s.Gates = append(s.Gates, state)
		if !h.open && g.mode == GateEnforce && cause == nil {
			cause = g.within(&gateError{gate: g, cause: h.cause, since: h.since})
		}
	}
	return cause, waiting
}

// within puts the gate's network in front of what is said of it.
func (g gate) within(err error) error {
	if g.network == "" {
		return err
	}
	return fmt.Errorf("%s: %w", g.network, err)
}

// observe brings what is known of one gate up to date and has it looked at again
// when that is due.
func (l *loop) observe(ctx context.Context, g gate, h *gateHistory, now time.Time) {
	if h.open {
		return
	}
	a := &h.answer
	if a.asked && !a.pending {
		h.cause = errorText(a.err)
		if a.err == nil {
			h.open, h.since = true, now
			return
		}
	}
	if d := l.n.disproved.Load(); a.asked && d != nil && (*d)[g.id()] {
		h.open, h.since, h.cause = true, now, "it "+h.cause+", but an ADD has succeeded without it"
		return
	}
	if !a.pending {
		due := a.at.Add(l.n.pace.gate)
		if !a.asked || !now.Before(due) {
			l.prober.ask(ctx, a, func(ctx context.Context) ([]string, error) { return nil, g.check(ctx, &h.pending) })
			due = now.Add(l.n.pace.gate)
		}
		if due.Before(l.next) {
			l.next = due
		}
	}
}
