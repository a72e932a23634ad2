// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/plugin"
)

// look is one look at what DEL needs: each gate is asked once, each list parsed
// once. It is used by one goroutine.
type look struct {
	n       *Network
	s       *Snapshot
	listed  map[string]bool // types that the lists in use name; nil: not known
	gates   map[*libcni.NetworkConfigList][]gate
	before  map[*libcni.NetworkConfigList][]gate // of the last look
	answers map[string]error                     // of gates, by id
}

// newLook begins a look. It takes over what the last one, if any, has parsed.
func (n *Network) newLook(last *look) *look {
	l := &look{n: n, s: n.Snapshot(), gates: make(map[*libcni.NetworkConfigList][]gate), answers: make(map[string]error)}
	if last != nil {
		l.before = last.gates
	}
	return l
}

// outlook is what can be run for one attachment.
type outlook struct {
	// skip marks the plugins that are not run: they have been uninstalled.
	skip []bool
	// headless says that the list's first plugin is among them, and that the
	// list in use has another one for it.
	headless bool
	// away is what the others need that is not there.
	away error
	// instead is the list in use that covers the network, if it is another one
	// and what it needs is there. Otherwise other is, and otherAway is what it
	// needs.
	instead   *attachment
	other     *attachment
	otherAway error
	// covered says that a list in use is, or covers, the attachment's.
	covered bool
}

// outlook finds out what can be run for the attachment. Only gates of the mode
// count, if one is given. again says that the pod is gone: the list in use was
// run then, and takes the place of another one only if it does the same.
func (l *look) outlook(ctx context.Context, a attachment, mode GateMode, again bool) outlook {
	o := outlook{skip: make([]bool, len(a.list.Plugins))}
	for i, p := range a.list.Plugins {
		typ := p.Network.Type
		err := l.executable(typ)
		switch {
		case err == nil:
		case a.ifName == loopbackName, l.uninstalled(typ):
			// What loopback does goes with the namespace.
			o.skip[i] = true
		case o.away == nil:
			o.away = err
		}
	}
	if o.away == nil {
		o.away = l.gate(ctx, a.only(a.indexes(o.skip)).list, mode)
	}
	i := l.s.covers(a)
	if o.covered = i >= 0; !o.covered || l.s.attachments[i].same(a) {
		return o
	}
	b := l.s.attachments[i]
	b.ifName = a.ifName
	if again && len(unsettled(b, a, a.indexes(o.skip))) > 0 {
		return o
	}
	o.headless = o.skip[0]
	if o.otherAway = l.missing(b); o.otherAway == nil {
		o.otherAway = l.gate(ctx, b.list, mode)
	}
	if o.otherAway != nil {
		o.other = &b
	} else {
		o.instead = &b
	}
	return o
}

// waits returns what the attachment's DEL has to wait for.
func (o outlook) waits() error {
	switch {
	case o.instead != nil:
		return nil
	case o.away == nil && o.headless:
		return o.otherAway
	}
	return o.away
}

// loopbackName is the interface of the loopback list.
const loopbackName = "lo"

// covers returns which list in use a pod with the attachment would have in its
// place, or -1: the one of the same network name and interface, of the same
// interface (which is what stock runs), or of the same name.
func (s *Snapshot) covers(a attachment) int {
	best, rank := -1, 0
	for i, b := range s.attachments {
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

// same tells whether it is the same list.
func (a attachment) same(b attachment) bool {
	return a.list == b.list || bytes.Equal(a.forCache().Bytes, b.forCache().Bytes)
}

// unsettled returns which of the plugins of the attachment are not done when DEL
// of the list in use has succeeded: those that it does not name, or all if it is
// of another network, whose plugins may look for what they keep by its name.
func unsettled(instead, a attachment, plugins []int) []int {
	if instead.list.Name != a.list.Name {
		return plugins
	}
	return slices.DeleteFunc(slices.Clone(plugins), func(i int) bool {
		return slices.ContainsFunc(instead.list.Plugins, func(p *libcni.PluginConfig) bool {
			return p.Network.Type == a.list.Plugins[i].Network.Type
		})
	})
}

// missing returns which executable of the list is not there.
func (l *look) missing(a attachment) error {
	for _, p := range a.list.Plugins {
		if err := l.executable(p.Network.Type); err != nil {
			return err
		}
	}
	return nil
}

// executable returns why a plugin cannot be run.
func (l *look) executable(typ string) error {
	if _, _, err := plugin.Find(typ, l.n.config.binDirs, true); err != nil {
		return fmt.Errorf("plugin %q is missing from %s", typ, strings.Join(l.n.config.binDirs, ", "))
	}
	return nil
}

// uninstalled tells whether no list in use names a plugin type. Where no list is
// in use nobody can tell.
func (l *look) uninstalled(typ string) bool {
	if l.listed == nil {
		l.listed = make(map[string]bool)
		for _, a := range l.s.attachments {
			if a.ifName == loopbackName {
				continue
			}
			for _, p := range a.list.Plugins {
				var v any
				if json.Unmarshal(p.Bytes, &v) == nil {
					noteTypes(v, l.listed)
				}
			}
		}
	}
	if len(l.listed) == 0 || l.listed[typ] {
		return false
	}
	if _, said := l.n.uninstalled.LoadOrStore(typ, true); !said {
		l.n.logger(l.n.ctx).Warnf("cni: plugin %q is in no bin dir and in no list in use: it has been uninstalled, and its DEL is left out", typ)
	}
	return true
}

// noteTypes notes what is called "type" anywhere in a configuration: plugins name
// so what they run themselves.
func noteTypes(v any, found map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if t, ok := value.(string); ok && strings.EqualFold(key, "type") {
				found[t] = true
			}
			noteTypes(value, found)
		}
	case []any:
		for _, value := range v {
			noteTypes(value, found)
		}
	}
}

// gate returns why a gate that DEL of the list needs is closed; of the mode, if
// one is given. With gates off there is nothing to be waited for.
func (l *look) gate(ctx context.Context, list *libcni.NetworkConfigList, mode GateMode) error {
	return l.closedGate(ctx, list, func(g gate) bool { return mode == "" || g.mode == mode })
}

// unheard returns why DEL of the list has not removed anything although it has
// succeeded: a plugin whose agent is away said so.
func (l *look) unheard(ctx context.Context, list *libcni.NetworkConfigList) error {
	return l.closedGate(ctx, list, func(g gate) bool { return g.silent })
}

func (l *look) closedGate(ctx context.Context, list *libcni.NetworkConfigList, concerns func(gate) bool) error {
	if l.n.config.gates == GatesOff {
		return nil
	}
	gates, ok := l.gates[list]
	if !ok {
		if gates, ok = l.before[list]; !ok {
			gates = slices.DeleteFunc(gatesOf(list), func(g gate) bool { return !g.del })
		}
		l.gates[list] = gates
	}
	for _, g := range gates {
		if !concerns(g) {
			continue
		}
		err, ok := l.answers[g.id()]
		if !ok {
			err = l.n.lookAt(g.id(), func() error {
				var pending chan error
				err := g.check(context.WithoutCancel(ctx), &pending)
				if pending != nil {
					err = <-pending
				}
				return err
			})
			l.answers[g.id()] = err
		}
		if err != nil {
			return fmt.Errorf("plugin %q needs %s, which %w", g.plugin, g.what(), err)
		}
	}
	return nil
}

// closed returns what DEL of one of the lists has to wait for.
func (l *look) closed(ctx context.Context, attachments []attachment, again bool) error {
	for _, a := range attachments {
		if away := l.outlook(ctx, a, GateEnforce, again).waits(); away != nil {
			return away
		}
	}
	return nil
}

// runnable has run called with those of the plugins of which all that they need
// is there, and returns those that are left.
func (l *look) runnable(ctx context.Context, a attachment, plugins []int, run func([]int) []int) []int {
	var now, later []int
	for _, i := range plugins {
		one := a.only([]int{i})
		if l.missing(one) == nil && l.gate(ctx, one.list, "") == nil {
			now = append(now, i)
		} else {
			later = append(later, i)
		}
	}
	if len(now) > 0 {
		later = append(later, run(now)...)
	}
	return later
}

// blame tells what DEL of the attachment wants that may come back; nil if that is
// not why it has failed, and the pod stays as in stock.
func (l *look) blame(o outlook, a attachment, err error) error {
	switch {
	case o.away != nil:
		return o.away
	case o.otherAway != nil:
		return o.otherAway
	case refused(err):
		return fmt.Errorf("network %q: its cniVersion %s is refused", a.list.Name, a.list.CNIVersion)
	case !o.covered && !errors.Is(l.s.LoadError, errLoading):
		return fmt.Errorf("no list is in use for network %q, interface %s", a.list.Name, a.ifName)
	}
	return nil
}

// refused tells whether a plugin did not take the version of its list.
func refused(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && e.Code == types.ErrIncompatibleCNIVersion
}

// lookAt returns why the gate of that id is closed, which check finds out. Looks
// at the same gate are one: a file on a disk that does not answer keeps a thread,
// and removals and their retries look again and again. It waits no longer than one
// look may take; check goes on.
func (n *Network) lookAt(id string, check func() error) error {
	f := n.gateLooks.join(id, check)
	bound := time.NewTimer(gateBound + gateBound/10)
	defer bound.Stop()
	select {
	case <-f.done:
		return f.err
	case <-bound.C:
		return errSilent
	}
}
