// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

// delPlan is what DEL of one attachment runs, and what that needs.
type delPlan struct {
	// run are the indexes of the plugins of ADD's list that are run. The others
	// have been uninstalled.
	run []int
	// missing is what these need that is not there; nil if nothing is.
	missing error
	// inUse is the list in use that stock would run; nil if it is ADD's list, or
	// there is none.
	inUse *attachment
	// inUseMissing is what it needs that is not there.
	inUseMissing error
	// needsInUse says that the first plugin of ADD's list has been uninstalled, so
	// that the list in use has to be run for it.
	needsInUse bool
	// known says that there is a list in use for the network or the interface.
	known bool
}

// planDEL decides what DEL runs for the attachment, given the lists in use.
// executable tells why a plugin cannot be run, closed why a gate of a list is
// closed. retry says that the removal is owed: the list in use has been run then,
// and replaces ADD's list only if it names the same plugins.
func planDEL(a attachment, inUse []attachment, executable func(string) error, closed func(*libcni.NetworkConfigList) error, retry bool) delPlan {
	var p delPlan
	for i, plugin := range a.list.Plugins {
		err := executable(plugin.Network.Type)
		// What loopback does goes with the namespace.
		if err != nil && (a.ifName == loopbackName || uninstalled(plugin.Network.Type, inUse)) {
			continue
		}
		p.run = append(p.run, i)
		if p.missing == nil {
			p.missing = err
		}
	}
	if p.missing == nil {
		p.missing = closed(a.only(p.run).list)
	}
	i := replacement(a, inUse)
	p.known = i >= 0
	if !p.known || inUse[i].same(a) {
		return p
	}
	b := inUse[i]
	b.ifName = a.ifName
	if retry && len(b.leaves(a, p.run)) > 0 {
		return p
	}
	p.inUse, p.needsInUse = &b, !slices.Contains(p.run, 0)
	for _, plugin := range b.list.Plugins {
		if p.inUseMissing = executable(plugin.Network.Type); p.inUseMissing != nil {
			return p
		}
	}
	p.inUseMissing = closed(b.list)
	return p
}

// canRunInUse tells whether the list in use can be run.
func (p delPlan) canRunInUse() bool { return p.inUse != nil && p.inUseMissing == nil }

// waitsFor returns what DEL has to wait for; nil if it can be run.
func (p delPlan) waitsFor() error {
	switch {
	case p.canRunInUse():
		return nil
	case p.missing == nil && p.needsInUse:
		return p.inUseMissing
	}
	return p.missing
}

// mayComeBack returns what the DEL that has failed with err lacks and may have
// later; nil if it lacks nothing, and the pod stays, as in stock.
func (p delPlan) mayComeBack(a attachment, err error) error {
	switch {
	case p.missing != nil:
		return p.missing
	case p.inUseMissing != nil:
		return p.inUseMissing
	case refused(err):
		return fmt.Errorf("network %q: its cniVersion %s is refused", a.list.Name, a.list.CNIVersion)
	case !p.known:
		return fmt.Errorf("no list is in use for network %q, interface %s", a.list.Name, a.ifName)
	}
	return nil
}

// loopbackName is the interface of the loopback list.
const loopbackName = "lo"

// replacement returns which list in use a pod would be attached with today, or -1:
// the one of the same network and interface, else of the same interface, which is
// what stock runs, else of the same network.
func replacement(a attachment, inUse []attachment) int {
	best, rank := -1, 0
	for i, b := range inUse {
		r := 0
		if b.list.Name == a.list.Name {
			r++
		}
		if b.ifName == a.ifName {
			r += 2
		}
		if r > rank && (a.ifName == loopbackName) == (b.ifName == loopbackName) {
			best, rank = i, r
		}
	}
	return best
}

// same tells whether both are the same list.
func (a attachment) same(b attachment) bool {
	return a.list == b.list || bytes.Equal(a.forCache().Bytes, b.forCache().Bytes)
}

// leaves returns which of these plugins of ADD's list are not done when DEL of a,
// a list in use, has succeeded: those that it does not name, or all if it is of
// another network, whose plugins may look for what they keep by its name.
func (a attachment) leaves(added attachment, plugins []int) []int {
	if a.list.Name != added.list.Name {
		return plugins
	}
	return slices.DeleteFunc(slices.Clone(plugins), func(i int) bool {
		return slices.ContainsFunc(a.list.Plugins, func(p *libcni.PluginConfig) bool {
			return p.Network.Type == added.list.Plugins[i].Network.Type
		})
	})
}

// plugins returns the indexes of all plugins of the list.
func (a attachment) plugins() []int {
	all := make([]int, len(a.list.Plugins))
	for i := range all {
		all[i] = i
	}
	return all
}

// only returns the list with the plugins of these indexes alone.
func (a attachment) only(plugins []int) attachment {
	if len(plugins) == len(a.list.Plugins) {
		return a
	}
	part := *a.list
	part.Plugins = nil
	for _, i := range slices.Sorted(slices.Values(plugins)) {
		part.Plugins = append(part.Plugins, a.list.Plugins[i])
	}
	a.list, a.dropIns = &part, true // its bytes are not those of the list
	return a
}

// uninstalled tells whether a plugin that is not there has been uninstalled: no
// list in use names it. Without a list in use nobody can tell.
func uninstalled(typ string, inUse []attachment) bool {
	types := make(map[string]bool)
	for _, a := range inUse {
		if a.ifName == loopbackName {
			continue
		}
		for _, p := range a.list.Plugins {
			var conf any
			if json.Unmarshal(p.Bytes, &conf) == nil {
				addTypes(conf, types)
			}
		}
	}
	return len(types) > 0 && !types[typ]
}

// addTypes adds the values of all keys "type" in a configuration, at any depth:
// plugins name so what they run themselves.
func addTypes(conf any, types map[string]bool) {
	switch conf := conf.(type) {
	case map[string]any:
		for key, value := range conf {
			if t, ok := value.(string); ok && strings.EqualFold(key, "type") {
				types[t] = true
			}
			addTypes(value, types)
		}
	case []any:
		for _, value := range conf {
			addTypes(value, types)
		}
	}
}
