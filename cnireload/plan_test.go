// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// attachmentTo makes an attachment out of "interface network plugin ...". A plugin
// "x(y)" delegates to y.
func attachmentTo(t *testing.T, text string) attachment {
	t.Helper()
	words := strings.Fields(text)
	var plugins []string
	for _, word := range words[2:] {
		typ, delegate, ok := strings.Cut(strings.TrimSuffix(word, ")"), "(")
		if ok {
			plugins = append(plugins, fmt.Sprintf(`{"type":%q,"delegate":{"type":%q}}`, typ, delegate))
		} else {
			plugins = append(plugins, fmt.Sprintf(`{"type":%q}`, typ))
		}
	}
	list, err := libcni.ConfListFromBytes(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":%q,"plugins":[%s]}`, words[1], strings.Join(plugins, ",")))
	if err != nil {
		t.Fatal(err)
	}
	return attachment{list: list, ifName: words[0]}
}

func TestPlanDEL(t *testing.T) {
	t.Parallel()
	type want struct {
		run        []int
		missing    string
		inUse      string // name of the network
		inUseLacks string
		needsInUse bool
		waitsFor   string
		known      bool
	}
	for _, c := range []struct {
		name   string
		added  string
		inUse  []string
		gone   string // plugins without an executable
		closed string // plugins whose gate is closed
		retry  bool
		want   want
	}{
		{name: "same list", added: "eth0 pods main mesh", inUse: []string{"lo loop loopback", "eth0 pods main mesh"},
			want: want{run: []int{0, 1}, known: true}},
		{name: "same list, agent away", added: "eth0 pods main mesh", inUse: []string{"eth0 pods main mesh"}, closed: "main",
			want: want{run: []int{0, 1}, missing: "gate of main", waitsFor: "gate of main", known: true}},
		{name: "same list, executable missing", added: "eth0 pods main mesh", inUse: []string{"eth0 pods main mesh"}, gone: "mesh",
			want: want{run: []int{0, 1}, missing: "no mesh", waitsFor: "no mesh", known: true}},
		{name: "no list in use", added: "eth0 pods main", gone: "main",
			want: want{run: []int{0}, missing: "no main", waitsFor: "no main"}},
		{name: "only loopback in use", added: "eth0 pods main", inUse: []string{"lo loop loopback"}, gone: "main",
			want: want{run: []int{0}, missing: "no main", waitsFor: "no main"}},
		{name: "loopback missing", added: "lo loop loopback", inUse: []string{"lo loop loopback", "eth0 pods main"}, gone: "loopback",
			want: want{known: true}},
		{name: "later plugin uninstalled", added: "eth0 pods main mesh", inUse: []string{"eth0 pods main"}, gone: "mesh",
			want: want{run: []int{0}, inUse: "pods", known: true}},
		{name: "first plugin uninstalled", added: "eth0 pods main mesh", inUse: []string{"eth0 pods next"}, gone: "main",
			want: want{run: []int{1}, inUse: "pods", needsInUse: true, known: true}},
		{name: "first plugin uninstalled, the next one's agent away", added: "eth0 pods main mesh", inUse: []string{"eth0 pods next"}, gone: "main", closed: "next",
			want: want{run: []int{1}, inUse: "pods", inUseLacks: "gate of next", needsInUse: true, waitsFor: "gate of next", known: true}},
		{name: "named as a delegate only", added: "eth0 pods main", inUse: []string{"eth0 pods next(main)"}, gone: "main",
			want: want{run: []int{0}, missing: "no main", inUse: "pods", known: true}},
		{name: "gate of an uninstalled plugin", added: "eth0 pods main mesh", inUse: []string{"eth0 pods main"}, gone: "mesh", closed: "mesh",
			want: want{run: []int{0}, inUse: "pods", known: true}},
		{name: "plugin was added to the list", added: "eth0 pods main", inUse: []string{"eth0 pods main mesh"},
			want: want{run: []int{0}, inUse: "pods", known: true}},
		{name: "both agents away", added: "eth0 pods main", inUse: []string{"eth0 pods next"}, closed: "main next",
			want: want{run: []int{0}, missing: "gate of main", inUse: "pods", inUseLacks: "gate of next", waitsFor: "gate of main", known: true}},
		{name: "only the other agent away", added: "eth0 pods main", inUse: []string{"eth0 pods next"}, closed: "next",
			want: want{run: []int{0}, inUse: "pods", inUseLacks: "gate of next", known: true}},
		{name: "other network on the interface", added: "eth0 pods main", inUse: []string{"eth0 next next", "eth1 pods main"}, closed: "main",
			want: want{run: []int{0}, missing: "gate of main", inUse: "next", known: true}},
		{name: "network moved to another interface", added: "eth0 pods main", inUse: []string{"eth1 pods main mesh"}, closed: "main",
			want: want{run: []int{0}, missing: "gate of main", inUse: "pods", inUseLacks: "gate of main", waitsFor: "gate of main", known: true}},
		{name: "network and interface before interface", added: "eth0 pods main mesh", inUse: []string{"eth0 next next", "eth0 pods main"}, closed: "mesh",
			want: want{run: []int{0, 1}, missing: "gate of mesh", inUse: "pods", known: true}},
		{name: "loopback replaces nothing", added: "eth0 loop main", inUse: []string{"lo loop loopback"}, closed: "main",
			want: want{run: []int{0}, missing: "gate of main", waitsFor: "gate of main"}},
		{name: "owed, other list names the same plugins", added: "eth0 pods main", inUse: []string{"eth0 pods main mesh"}, retry: true,
			want: want{run: []int{0}, inUse: "pods", known: true}},
		{name: "owed, other list does less", added: "eth0 pods main mesh", inUse: []string{"eth0 pods main"}, closed: "mesh", retry: true,
			want: want{run: []int{0, 1}, missing: "gate of mesh", waitsFor: "gate of mesh", known: true}},
		{name: "owed, other network", added: "eth0 pods main", inUse: []string{"eth0 next main"}, closed: "main", retry: true,
			want: want{run: []int{0}, missing: "gate of main", waitsFor: "gate of main", known: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var inUse []attachment
			for _, text := range c.inUse {
				inUse = append(inUse, attachmentTo(t, text))
			}
			executable := func(typ string) error {
				if strings.Contains(" "+c.gone+" ", " "+typ+" ") {
					return errors.New("no " + typ)
				}
				return nil
			}
			closed := func(list *libcni.NetworkConfigList) error {
				for _, p := range list.Plugins {
					if strings.Contains(" "+c.closed+" ", " "+p.Network.Type+" ") {
						return errors.New("gate of " + p.Network.Type)
					}
				}
				return nil
			}
			p := planDEL(attachmentTo(t, c.added), inUse, executable, closed, c.retry)
			got := want{run: p.run, missing: errorText(p.missing), inUseLacks: errorText(p.inUseMissing), needsInUse: p.needsInUse,
				waitsFor: errorText(p.waitsFor()), known: p.known}
			if p.inUse != nil {
				got.inUse = p.inUse.list.Name
				if p.inUse.ifName != strings.Fields(c.added)[0] {
					t.Errorf("the list in use is run for %s", p.inUse.ifName)
				}
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}
