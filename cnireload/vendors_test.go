// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/rules"
	"github.com/cnireload/cnireload/internal/testenv"
)

// vendor and vendorAgent are entries of test/vendors/vendors.json, which package
// vendors describes.
type vendor struct {
	Name, File, As   string
	Installed, Shown []string
	Agent            []vendorAgent
}

type vendorAgent struct {
	Plugin, Kind, Target, Key, Entry, Mode string
}

// gate identifies what the agent provides among the gates of a snapshot.
func (a vendorAgent) gate() string {
	return fmt.Sprintf("%s %s %s (%s) %s", a.Plugin, a.Kind, a.Target, a.Key, a.Mode)
}

// Every network that people run is ready with what its project installs, and
// nothing else, and its agent up. Without any one thing that the agent provides
// it says what docs/readiness.md says: not ready, naming it, or ready and
// reporting it.
func TestVendors(t *testing.T) {
	t.Parallel()
	const dir = "../test/vendors/"
	b, err := os.ReadFile(dir + "vendors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vendors []vendor
	if err := json.Unmarshal(b, &vendors); err != nil {
		t.Fatal(err)
	}
	if len(vendors) < 35 {
		t.Errorf("%d vendors", len(vendors))
	}
	for _, v := range vendors {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			content, err := os.ReadFile(dir + v.File)
			if err != nil {
				t.Fatal(err)
			}
			// Under their real names first: what is compiled in, and defaults.
			var gates []string
			for _, g := range rules.Gates(vendorList(t, v, content)) {
				gates = append(gates, fmt.Sprintf("%s %s %s (%s) %s", g.Plugin, g.Kind, g.Target, g.Key, g.Mode))
			}
			var want []string
			for _, a := range v.Agent {
				want = append(want, a.gate())
			}
			if !slices.Equal(gates, want) {
				t.Errorf("gates\n%q, want\n%q", gates, want)
			}

			d := newNode(t)
			d.install(v.Installed...)
			place, err := os.MkdirTemp("", "agent") // paths of sockets are short
			d.must(err)
			t.Cleanup(func() { _ = os.RemoveAll(place) })
			// load returns the network with all that the agent provides but
			// for one. The first time the executables are asked, later their
			// answers are known.
			executed := true
			load := func(without int) (*Network, vendorAgent) {
				t.Helper()
				var conf map[string]any
				d.must(json.Unmarshal(content, &conf))
				setKey(conf, "multus", "binDir", filepath.Join(place, "no-bin"))
				var missing vendorAgent
				for i, a := range v.Agent {
					if a.Key == "" {
						continue // compiled in: as it is on this machine
					}
					moved, value := a, any(nil)
					if a.Kind == "configuration" {
						value = []any{[]any{map[string]any{"subnet": "10.1.0.0/24"}}}
					} else {
						moved.Target, value = provide(t, a, filepath.Join(place, fmt.Sprint(i)), i != without)
					}
					if i == without {
						missing = moved
					}
					if a.Kind == "configuration" && i == without {
						continue
					}
					entry := a.Entry
					if entry == "" {
						entry = a.Plugin
					}
					if !setKey(conf, entry, a.Key, value) {
						t.Fatalf("no %s in %s", entry, v.File)
					}
				}
				b, err := json.Marshal(conf)
				d.must(err)
				d.write(v.As, string(b))
				n := d.network()
				if !executed {
					d.fakeTime(n, func(context.Context, string, string) ([]byte, error) {
						return []byte(versionAnswer("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")), nil
					})
				}
				d.must(n.Load())
				executed = false
				return n, missing
			}

			n, _ := load(-1)
			d.must(n.Status())
			var shown []string
			for _, p := range n.Snapshot().Networks[0].Plugins {
				if !p.Counts {
					shown = append(shown, p.Type)
				} else if p.Problem != nil || len(p.Versions) == 0 {
					t.Errorf("%+v", p)
				}
			}
			if !slices.Equal(shown, v.Shown) {
				t.Errorf("shown are %q, want %q", shown, v.Shown)
			}
			for i, a := range v.Agent {
				if a.Key == "" {
					// Compiled in: it can be there or not on this machine.
					if !slices.ContainsFunc(n.Snapshot().Gates, func(g GateState) bool {
						return g.Plugin == a.Plugin && g.Target == a.Target && g.Key == "" && g.Mode == GateReport
					}) {
						t.Errorf("%+v", n.Snapshot().Gates)
					}
					continue
				}
				n, missing := load(i)
				cause := "does not exist"
				switch a.Kind {
				case "configuration":
					cause = "is not set"
				case "tcp port":
					cause = "does not accept connections"
				}
				if a.Mode == "report" {
					d.must(n.Status())
				} else if wrong := testenv.MissingWords(n.Status(), []string{fmt.Sprintf("plugin %q needs %s (%s), which %s", a.Plugin, missing.Target, a.Key, cause)}); wrong != "" {
					t.Error(wrong)
				}
				for _, g := range n.Snapshot().Gates {
					if open := g.Target != missing.Target; open != g.Open && g.Key != "" || !open && (string(g.Mode) != a.Mode || !strings.HasPrefix(g.Cause, cause)) {
						t.Errorf("without %s: %+v", a.Target, g)
					}
				}
			}
			// Each executable that counts is needed.
			needed := make(map[string]bool)
			for _, p := range n.Snapshot().Networks[0].Plugins {
				needed[p.Type] = needed[p.Type] || p.Counts
			}
			for typ, counts := range needed {
				if !counts {
					continue
				}
				d.must(os.Rename(filepath.Join(d.bin, typ), filepath.Join(d.answers, typ)))
				n, _ := load(-1)
				if wrong := testenv.MissingWords(n.Status(), []string{fmt.Sprintf("plugin %q not found in ", typ)}); wrong != "" {
					t.Error(wrong)
				}
				d.must(os.Rename(filepath.Join(d.answers, typ), filepath.Join(d.bin, typ)))
			}
		})
	}
}

// provide puts in place what an agent provides, or nothing but a name for it,
// and returns its target and what the configuration key has to be for that.
func provide(t *testing.T, a vendorAgent, path string, there bool) (target string, value any) {
	t.Helper()
	content := map[string]string{"file": "x", "file not empty": "x", "flannel env file": goodFlannel}
	if a.Kind == "tcp port" {
		l, stop := testenv.Listen(t, "tcp", "127.0.0.1:0")
		if !there {
			stop()
		}
		return l.Addr().String(), "http://" + l.Addr().String()
	}
	target, value = path, path
	switch {
	case a.Key == "daemonSocketDir":
		target = filepath.Join(path, "multus.sock")
	case a.Key == "dataplane_options.socket":
		value = "unix://" + path
	}
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if !there {
		return target, value
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		t.Fatal(err)
	}
	if a.Kind == "unix socket" {
		_, stop := testenv.Listen(t, "unix", target)
		t.Cleanup(stop)
	} else if err := os.WriteFile(target, []byte(content[a.Kind]), 0o644); err != nil {
		t.Fatal(err)
	}
	return target, value
}

// setKey sets a key with dots in each object of that type within v, and tells
// whether there is one.
func setKey(v any, typ, key string, value any) (found bool) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			found = setKey(e, typ, key, value) || found
		}
	case map[string]any:
		for _, e := range v {
			found = setKey(e, typ, key, value) || found
		}
		if v["type"] == typ {
			at, path := v, strings.Split(key, ".")
			for _, outer := range path[:len(path)-1] {
				if _, ok := at[outer].(map[string]any); !ok {
					at[outer] = make(map[string]any)
				}
				at = at[outer].(map[string]any)
			}
			at[path[len(path)-1]] = value
			return true
		}
	}
	return found
}

// vendorList parses a vendor's configuration.
func vendorList(t *testing.T, v vendor, content []byte) *libcni.NetworkConfigList {
	t.Helper()
	list, err := confdir.ParseList(v.As, content)
	if err != nil {
		t.Fatal(err)
	}
	return list
}
