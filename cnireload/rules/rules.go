// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rules knows what single CNI plugins run and need, from one table that
// was written from their sources ([Table]).
//
//   - [Of] returns the plugins that a list runs: its entries, and the IPAM plugins
//     and delegates that these run themselves.
//   - [Gates] returns their gates. A gate is something that a plugin's own code
//     needs before ADD or DEL can succeed, and that usually its agent provides: a
//     file, a socket on which somebody listens, a key of the configuration. The
//     gate is open while that is there, and closed otherwise.
//   - [Gate.Check] and [Checker.Check] look at one gate.
//
// A rule is never stricter than the plugin: a node on which pods would run must
// not be lost because a rule is wrong. So what a plugin is not known to run does
// not count ([Plugin]), and what may move with a release of the plugin is only
// reported ([Mode]).
//
// Everything but [Checker.Check] can be called at the same time by many. Nothing
// but the checks looks at the machine. Nothing here runs a plugin, logs, keeps a
// gate's state, or decides whether a network is ready.
//
// To add a plugin, see "Add a plugin" in docs/readiness.md.
package rules

import (
	"cmp"
	"encoding/json"
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

// Role says who runs a plugin.
type Role string

const (
	// RolePlugin is an entry of the list itself.
	RolePlugin Role = "plugin"
	// RoleIPAM is run by an entry as its "ipam".
	RoleIPAM Role = "ipam"
	// RoleDelegate is run by an entry as its "delegate" or one of "delegates".
	RoleDelegate Role = "delegate"
)

// Plugin is one executable that a list names.
type Plugin struct {
	Role Role
	Type string
	// Version is the CNI version that it must speak; empty when that is its own
	// affair.
	Version string
	// Counts is false for what an entry names but is not known to run on the host.
	// Such a plugin has no gates.
	Counts bool
	Dirs   []string // searched for it before the usual directories
	Gates  []Gate
	// Conf is its configuration. It is set for entries of the list only.
	Conf *libcni.PluginConfig
}

// Of returns the plugins that a list names, each entry followed by what it runs.
// It does not change the list.
func Of(list *libcni.NetworkConfigList) []Plugin {
	var plugins []Plugin
	for _, entry := range list.Plugins {
		var c conf
		_ = json.Unmarshal(entry.Bytes, &c) // what is not an object names nothing
		p := Plugin{Role: RolePlugin, Type: entry.Network.Type, Counts: true, Conf: entry}
		// libcni takes a missing cniVersion for the oldest.
		plugins = appendPlugins(plugins, child{p, c}, cmp.Or(list.CNIVersion, "0.1.0"), nil, 0)
	}
	return plugins
}

// Gates returns the gates of a list's plugins and of what they run.
func Gates(list *libcni.NetworkConfigList) []Gate {
	var gates []Gate
	for _, p := range Of(list) {
		gates = append(gates, p.Gates...)
	}
	return gates
}

// child is a plugin that another one names. Its Version is empty where that of
// the other one holds, and anyVersion where its version is its own affair. Its
// Dirs come before those of the other one.
type child struct {
	Plugin
	conf conf // its entry; the entry around it for RoleIPAM
}

const anyVersion = "any"

// maxNesting bounds the depth of delegates within delegates.
const maxNesting = 8

// appendPlugins adds one plugin and what it names. version and dirs are its
// parent's.
func appendPlugins(plugins []Plugin, c child, version string, dirs []string, depth int) []Plugin {
	p := c.Plugin
	if p.Version = cmp.Or(p.Version, version); p.Version == anyVersion {
		p.Version = ""
	}
	p.Dirs = slices.Concat(p.Dirs, dirs)
	row := rowOf(p.Role, p.Type)
	if p.Counts {
		for _, n := range row.Needs {
			p.Gates = append(p.Gates, n.gates(p.Type, c.conf)...)
		}
	}
	plugins = append(plugins, p)
	if p.Role == RoleIPAM || depth == maxNesting {
		return plugins
	}
	runs := row.runs
	if runs == nil {
		runs = names
	}
	for _, next := range runs(c.conf) {
		next.Counts = next.Counts && p.Counts
		plugins = appendPlugins(plugins, next, p.Version, p.Dirs, depth+1)
	}
	return plugins
}

// rowOf returns what is known of a type of plugin, which can be nothing.
func rowOf(role Role, typ string) Row {
	for _, r := range table {
		if r.IPAM == (role == RoleIPAM) && slices.Contains(r.Types, typ) {
			return r
		}
	}
	return Row{}
}

// names returns what an entry names under the usual keys. Nothing of it counts.
func names(c conf) []child {
	children := ipam(c, false)
	if d := c.object("delegate"); d.text("type") != "" {
		children = append(children, child{Plugin{Role: RoleDelegate, Type: d.text("type")}, d})
	}
	return append(children, delegates(c)...)
}

// ipam returns the IPAM plugin that an entry names, if any.
func ipam(c conf, counts bool) []child {
	typ := c.text("ipam.type")
	if typ == "" {
		return nil
	}
	return []child{{Plugin{Role: RoleIPAM, Type: typ, Counts: counts}, c}}
}

// delegates returns what an entry names as "delegates": entries, and lists of
// them, which have no type.
func delegates(c conf) []child {
	var children []child
	for _, d := range c.objects("delegates") {
		entries := []conf{d}
		if d.text("type") == "" {
			entries = d.objects("plugins")
		}
		for _, e := range entries {
			if typ := e.text("type"); typ != "" {
				children = append(children, child{Plugin{Role: RoleDelegate, Type: typ, Version: cmp.Or(d.text("cniVersion"), anyVersion)}, e})
			}
		}
	}
	return children
}

func runsIPAM(c conf) []child { return ipam(c, true) }

// runsFlannel completes the delegate as flannel does. What the ranges are does
// not matter.
func runsFlannel(c conf) []child {
	own := c.object("ipam").with("type", cmp.Or(c.text("ipam.type"), "host-local")).with("ranges", []any{"flannel's"})
	bridge := "bridge"
	if runtime.GOOS == "windows" {
		bridge = "win-bridge"
	}
	d := c.object("delegate").with("ipam", map[string]any(own))
	return []child{{Plugin{Role: RoleDelegate, Type: cmp.Or(d.text("type"), bridge), Counts: true}, d}}
}

func runsMultus(c conf) []child {
	if c.text("clusterNetwork") != "" {
		return names(c)
	}
	children := delegates(c)
	for i := range children {
		children[i].Counts = true
		children[i].Dirs = []string{cmp.Or(c.text("binDir"), "/opt/cni/bin")}
	}
	return children
}

// conf is a plugin's configuration, or an object in it. Keys with dots lead into
// objects.
type conf map[string]any

// value returns what a key holds, or nil. Plugins decode their keys without
// regard to case, so a key in another case counts; the exact one goes first, and
// among others always the same.
func (c conf) value(key string) any {
	key, inner, nested := strings.Cut(key, ".")
	v, ok := c[key]
	if !ok {
		for _, k := range slices.Sorted(maps.Keys(c)) {
			if strings.EqualFold(k, key) {
				v = c[k]
				break
			}
		}
	}
	if nested {
		m, _ := v.(map[string]any)
		return conf(m).value(inner)
	}
	return v
}

func (c conf) text(key string) string {
	s, _ := c.value(key).(string)
	return s
}

func (c conf) isTrue(key string) bool { return c.value(key) == true }

func (c conf) object(key string) conf {
	m, _ := c.value(key).(map[string]any)
	return m
}

func (c conf) list(key string) []any {
	l, _ := c.value(key).([]any)
	return l
}

// objects returns the objects in a list.
func (c conf) objects(key string) []conf {
	var objects []conf
	for _, e := range c.list(key) {
		if m, ok := e.(map[string]any); ok {
			objects = append(objects, m)
		}
	}
	return objects
}

// with returns a copy that has another value for a key.
func (c conf) with(key string, value any) conf {
	other := make(conf, len(c)+1)
	maps.Copy(other, c)
	other[key] = value
	return other
}
