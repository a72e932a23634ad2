// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package status

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload"
)

// checkConsistent checks that nothing in a view contradicts anything else in it.
func checkConsistent(t testing.TB, v View, name string) {
	t.Helper()
	c := v.Condition()
	info, err := v.Info()
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal([]byte(info["cniReload"]), &r); err != nil {
		t.Fatal(err)
	}
	wrong := func(format string, args ...any) {
		t.Helper()
		t.Errorf(format+"\ncondition %+v\nload status %q\nreport %s", append(args, c, info["lastCNILoadStatus"], info["cniReload"])...)
	}
	load := info["lastCNILoadStatus"]
	switch {
	case load != info["lastCNILoadStatus."+name]:
		wrong("load status is also %q", info["lastCNILoadStatus."+name])
	case c.Ready != (load == "OK") || c.Ready != r.Ready:
		wrong("ready or not")
	case c.Reason != r.Reason || c.Message != r.Message:
		wrong("other words")
	case c.Ready != (c.Message == ""):
		wrong("a message or none")
	case !c.Ready && !cut(c.Message) && !strings.Contains(c.Message, load) && !strings.HasPrefix(load, "cni config load failed: "):
		wrong("other causes")
	}
	var config struct{ Networks []json.RawMessage }
	if err := json.Unmarshal([]byte(info["cniconfig"]), &config); err != nil || len(config.Networks) != len(r.Networks) {
		wrong("cniconfig has %d networks, %v", len(config.Networks), err)
	}
	// What the report says in detail is what it says in short.
	for _, g := range r.Gates {
		if !g.Open && g.Mode == "enforce" && r.Ready {
			wrong("ready behind %s", g.Target)
		}
		if !g.Open && g.Cause == "" || g.Since.IsZero() {
			wrong("no cause or no time of %s", g.Target)
		}
	}
	for _, n := range r.Networks {
		for _, p := range n.Plugins {
			if p.Counts && p.Status != "ok" && r.Ready {
				wrong("ready with plugin %s %s", p.Type, p.Status)
			}
			if (p.Status == "ok") != (p.Problem == "") {
				wrong("plugin %s is %s: %s", p.Type, p.Status, p.Problem)
			}
		}
	}
	if r.Ready && len(r.Networks) == 0 {
		wrong("ready without a network")
	}
	if r.Stale != (r.StaleSince != nil) || r.Stale && r.LastError == "" || (r.LoadedAt == nil) != (r.Generation == 0) {
		wrong("stale or not, loaded or not")
	}
	// The message names what the report shows.
	switch {
	case c.Ready, cut(c.Message):
	case strings.Contains(c.Message, " needs "):
		named := false
		for _, g := range r.Gates {
			named = named || !g.Open && g.Mode == "enforce" && strings.Contains(c.Message, g.Target)
		}
		if !named {
			wrong("a gate that is not in the report")
		}
	case strings.Contains(c.Message, "not found in"), strings.Contains(c.Message, "answers STATUS"):
		named := false
		for _, n := range r.Networks {
			for _, p := range n.Plugins {
				named = named || p.Problem != "" && strings.Contains(c.Message, p.Problem)
			}
		}
		if !named {
			wrong("a plugin that is not in the report")
		}
	}
	checkMetrics(t, v.Metrics())
	for _, m := range v.Metrics() {
		if m.Name == "network_ready" && m.Labels[0].Value == name && m.Value != number(c.Ready) {
			wrong("network_ready is %v", m.Value)
		}
	}
}

// cut tells whether the end of a text is missing.
func cut(s string) bool { return strings.HasSuffix(s, " ...") }

var (
	sampleSeed = flag.Uint64("sample.seed", 0, "seed of the changes that TestSamples makes; 0 takes the time")
	sampleTime = flag.Duration("sample.time", 2*time.Second, "how long TestSamples makes changes")
)

// Condition, load status and report are looked at together while everything
// changes at random: they never contradict each other, nor what was true when
// they were made (I2).
func TestSamples(t *testing.T) {
	seed := *sampleSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	p := newPlace(t)
	status := filepath.Join(p.dir, "status")
	p.install("[ -e "+status+" ] || { echo '{\"code\":50,\"msg\":\"no\"}'; exit 1; }", "x", "portmap")
	p.install("exit 0", "calico", "macvlan", "dhcp", "terway", "bridge", "host-local")
	template := filepath.Join(p.dir, "template")
	put := func(name, content string) func() { return func() { p.put(name, content, 0o644) } }
	drop := func(name string) func() { return func() { _ = os.RemoveAll(filepath.Join(p.dir, name)) } }
	rendered := `{"cniVersion":"1.0.0","name":"t","plugins":[{"type":"x","s":"{{.PodCIDR}}","n":%d}]}`
	n := p.network(cnireload.WithTemplate(template, filepath.Join(p.dir, "record")),
		cnireload.WithReadyFiles([]string{filepath.Join(p.dir, "flag")}), cnireload.WithPluginMaxConfNum(0))
	handler := p.network(cnireload.WithNetworkName("a"), cnireload.WithGates("report"), cnireload.WithRequiredPlugins([]string{"portmap"}))
	calico := `{"type":"calico","nodename":"n","nodename_file":"` + p.dir + `/nodename"}`
	dhcp := `{"type":"macvlan","ipam":{"type":"dhcp","daemonSocketPath":"` + p.dir + `/s"}}`
	changes := []func(){
		func() { p.list("1.1.0", "x", "portmap") }, func() { p.list("1.1.0", "x") }, func() { p.list("1.0.0", "x", calico) },
		func() { p.list("1.0.0", dhcp, "portmap") }, func() { p.list("1.0.0", "terway") },
		func() { p.list("1.0.0", `{"type":"bridge","ipam":{"type":"host-local"}}`) },
		put("net.d/10-a.conflist", "{"), put("net.d/10-a.conflist", ""), drop("net.d/10-a.conflist"),
		put("net.d/20-b.conflist", strings.Replace(conflist("1.0.0", "x", calico), `"a"`, `"b"`, 1)), put("net.d/20-b.conflist", "garbage"), drop("net.d/20-b.conflist"),
		put("nodename", ""), drop("nodename"), put("flag", ""), drop("flag"), put("status", ""), drop("status"),
		func() { drop("s")(); p.socket("s", true) }, drop("s"),
		func() { p.install("exit 0", "portmap") }, drop("bin/portmap"),
		put("template", fmt.Sprintf(rendered, 1)), put("template", fmt.Sprintf(rendered, 2)), put("template", "{{"), drop("template"),
		func() { _ = n.Render(t.Context(), fmt.Sprintf("10.%d.0.0/24", random.IntN(9))) },
		func() { _ = n.Load() },
		func() { _ = os.RemoveAll(p.conf); time.Sleep(time.Millisecond); p.must(os.MkdirAll(p.conf, 0o755)) },
	}
	// Lists that can be used are to be there most of the time.
	changes = append(changes, changes[:6]...)
	changes = append(changes, changes[:6]...)
	networks := map[string]*cnireload.Network{"default": n, "kata": handler}
	done := make(chan struct{})
	var samplers sync.WaitGroup
	var mu sync.Mutex
	seen := make(map[string]bool)
	counters := make(map[string]float64)
	for name := range networks {
		samplers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				time.Sleep(100 * time.Microsecond)
				v := Of(networks, name)
				checkConsistent(t, v, name)
				if t.Failed() {
					return
				}
				mu.Lock()
				message := sinceTime.ReplaceAllString(v.Condition().Message, "")
				seen[name+message] = true
				mu.Unlock()
				if name == "default" {
					for _, m := range v.Metrics() {
						id := fmt.Sprint(m.Name, m.Labels)
						if m.Counter && m.Value < counters[id] {
							t.Errorf("%s went from %v to %v", id, counters[id], m.Value)
						}
						counters[id] = m.Value
					}
				}
			}
		})
	}
	n.Start()
	handler.Start()
	// Longer where the machine is so busy that little has happened by then.
	states := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(seen)
	}
	for end := time.Now().Add(*sampleTime); (time.Now().Before(end) || states() < 10 && time.Since(end) < time.Minute) && !t.Failed(); {
		changes[random.IntN(len(changes))]()
		if random.IntN(3) == 0 {
			time.Sleep(time.Duration(random.IntN(30)) * time.Millisecond)
		}
	}
	close(done)
	samplers.Wait()
	t.Logf("%d different states", len(seen))
	if len(seen) < 10 {
		t.Errorf("only %d different states: %v", len(seen), seen)
	}
}
