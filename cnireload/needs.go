// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/cnireload/rules"
)

// delNeeds finds out whether what plugins need for DEL is there. It asks each gate
// once, and keeps to one snapshot. It is for one goroutine.
type delNeeds struct {
	n       *Network
	s       *Snapshot
	answers map[rules.Gate]error
}

func (n *Network) newDELNeeds() *delNeeds {
	return &delNeeds{n: n, s: n.Snapshot(), answers: make(map[rules.Gate]error)}
}

// plan decides what DEL runs for an attachment; see planDEL. Of the gates only
// those count that concerns selects.
func (d *delNeeds) plan(ctx context.Context, a attachment, concerns func(rules.Gate) bool, retry bool) delPlan {
	closed := func(list *libcni.NetworkConfigList) error { return d.closed(ctx, list, concerns) }
	p := planDEL(a, d.s.attachments, d.executable, closed, retry)
	p.known = p.known || errors.Is(d.s.LoadError, errLoading) // nobody knows yet
	for i, plugin := range a.list.Plugins {
		typ := plugin.Network.Type
		if slices.Contains(p.run, i) || a.ifName == loopbackName {
			continue
		}
		if _, logged := d.n.uninstalled.LoadOrStore(typ, true); !logged {
			d.n.logger(d.n.ctx).Warnf("cni: plugin %q is in no bin dir and in no list in use: it has been uninstalled, and its DEL is left out", typ)
		}
	}
	return p
}

// waitFor returns what the DELs of these attachments have to wait for. Gates whose
// target is compiled into a plugin do not count: it may have moved, and DEL tells.
func (d *delNeeds) waitFor(ctx context.Context, attachments []attachment, retry bool) error {
	for _, a := range attachments {
		if missing := d.plan(ctx, a, enforcedGates, retry).waitsFor(); missing != nil {
			return missing
		}
	}
	return nil
}

// divide tells which of these plugins have all that they need, and which do not.
func (d *delNeeds) divide(ctx context.Context, a attachment, plugins []int) (can, cannot []int) {
	for _, i := range plugins {
		if d.executable(a.list.Plugins[i].Network.Type) == nil && d.closed(ctx, a.only([]int{i}).list, allGates) == nil {
			can = append(can, i)
		} else {
			cannot = append(cannot, i)
		}
	}
	return can, cannot
}

// executable returns why a plugin cannot be run.
func (d *delNeeds) executable(typ string) error {
	if _, _, err := plugin.Find(typ, d.n.config.binDirs, true); err != nil {
		return fmt.Errorf("plugin %q is missing from %s", typ, strings.Join(d.n.config.binDirs, ", "))
	}
	return nil
}

func allGates(rules.Gate) bool        { return true }
func enforcedGates(g rules.Gate) bool { return g.Mode == rules.Enforce }

// silentGates are those without which DEL succeeds and removes nothing.
func silentGates(g rules.Gate) bool { return g.SilentDEL }

// closed returns why a gate that DEL of the list needs is closed. With gates off
// DEL waits for nothing.
func (d *delNeeds) closed(ctx context.Context, list *libcni.NetworkConfigList, concerns func(rules.Gate) bool) error {
	if d.n.config.gates == GatesOff {
		return nil
	}
	for _, g := range rules.Gates(list) {
		if !g.DEL || !concerns(g) {
			continue
		}
		err, ok := d.answers[g]
		if !ok {
			err = d.n.lookAt(fmt.Sprintf("%+v", g), func() error {
				err := g.Check(context.WithoutCancel(ctx))
				if errors.Is(err, rules.ErrLongEmpty) {
					return nil
				}
				return err
			})
			d.answers[g] = err
		}
		if err != nil {
			return fmt.Errorf("plugin %q needs %s, which %w", g.Plugin, g.Describe(), err)
		}
	}
	return nil
}

// lookAt returns why the gate of that id is closed, which check finds out. Calls
// for the same gate share one check: a file on a disk that does not answer keeps a
// thread. A call waits no longer than one check may take; the check goes on.
func (n *Network) lookAt(id string, check func() error) error {
	result := n.gateLooks.DoChan(id, func() (any, error) { return nil, check() })
	select {
	case r := <-result:
		return r.Err
	case <-time.After(rules.Bound + rules.Bound/10):
		return rules.ErrNoAnswer
	}
}
