// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// series are the samples of a metrics page by name and labels, as written
// there, and the type of each metric.
type series struct {
	value map[string]float64
	kind  map[string]string
}

// scrape reads the metrics of CNI networks.
func (n *node) scrape() series {
	n.t.Helper()
	page, err := n.Scrape(n.t.Context())
	assert.NilError(n.t, err)
	s := series{map[string]float64{}, map[string]string{}}
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, networkMetric+"plugin_operations_") {
			continue // containerd's own, on both sides
		}
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			if strings.HasPrefix(name, networkMetric) {
				s.kind[strings.TrimPrefix(name, networkMetric)] = kind
			}
			continue
		}
		rest, ok := strings.CutPrefix(line, networkMetric)
		if !ok {
			continue
		}
		i := strings.LastIndex(rest, " ")
		assert.Assert(n.t, i > 0, line)
		v, err := strconv.ParseFloat(rest[i+1:], 64)
		assert.NilError(n.t, err, line)
		s.value[rest[:i]] = v
	}
	return s
}

const networkMetric = "containerd_cri_network_"

// metrics waits until these samples have these values.
func (n *node) metrics(want map[string]float64) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), 2*soon, func() error {
		got := n.scrape().value
		for name, v := range want {
			if g, ok := got[name]; !ok || g != v {
				return fmt.Errorf("want %s %v, got %v (there: %t) among %v", name, v, g, ok, slices.Sorted(maps.Keys(got)))
			}
		}
		return nil
	}))
}

// What a node's network is like, for those who watch many nodes.
// https://github.com/containerd/containerd/issues/7801
func TestI4(t *testing.T) {
	sides(t, "containerd#7801", func(t *testing.T, side harness.Side) string {
		address, err := harness.FreeAddress()
		assert.NilError(t, err)
		n, nodename := calicoNode(t, harness.Options{Side: side, NoImage: true, Metrics: address})
		other := filepath.Join(n.Base, "other.d")
		assert.NilError(t, os.Mkdir(other, 0o755))
		n.Handlers = map[string]harness.Handler{"other": {ConfDir: other}}
		n.start()
		if side == harness.Stock {
			n.waitReady(true, soon)
			page, err := n.Scrape(t.Context())
			assert.NilError(t, err)
			assert.Assert(t, strings.Contains(page, "# TYPE"))
			assert.Equal(t, len(n.scrape().value), 0)
			return "none for readiness or reload"
		}

		// A closed gate.
		gate := fmt.Sprintf(`gate_open{handler="default",mode="enforce",plugin="calico",target=%q}`, nodename)
		n.metrics(map[string]float64{
			`ready{handler="default"}`:                            0,
			`ready{handler="other"}`:                              0,
			gate:                                                  0,
			`stale{handler="default"}`:                            0,
			`skipped_files{handler="default"}`:                    0,
			`watch{handler="default",mode="inotify"}`:             1,
			`watch{handler="default",mode="polling"}`:             0,
			`reloads_total{handler="default",result="success"}`:   1,
			`reloads_total{handler="default",result="failure"}`:   0,
			`reloads_total{handler="other",result="failure"}`:     1,
			`watch{handler="other",mode="inotify"}`:               1,
			`watch{handler="other",mode="waiting_for_directory"}`: 0,
		})
		touch(t, nodename)
		n.metrics(map[string]float64{`ready{handler="default"}`: 1, gate: 1})

		// Calls by outcome.
		call := func(plugin, verb, outcome string) string {
			return fmt.Sprintf(`plugin_calls_total{handler="default",outcome=%q,plugin=%q,verb=%q}`, outcome, plugin, verb)
		}
		n.added(harness.Pod{Name: "a"})
		n.metrics(map[string]float64{
			call("calico", "ADD", "ok"): 1, call("loopback", "ADD", "ok"): 1, call("portmap", "ADD", "ok"): 1,
			call("calico", "VERSION", "ok"): 1, call("calico", "DEL", "ok"): 1,
		})
		n.answers("portmap", "ADD", fake.Behavior{Mode: fake.Fail, Code: 11, Msg: "try again"})
		n.refused(harness.Pod{Name: "b"})
		n.metrics(map[string]float64{call("calico", "ADD", "ok"): 2, call("portmap", "ADD", "error"): 1})
		seconds := strings.Replace(call("calico", "ADD", "ok"), "calls_total", "call_duration_seconds_sum", 1)
		s := n.scrape()
		assert.Assert(t, s.value[seconds] > 0 && s.value[seconds] < 60, "%s %v", seconds, s.value[seconds])
		n.metrics(map[string]float64{
			strings.Replace(call("calico", "ADD", "ok"), "calls_total", "call_duration_seconds_count", 1):                                         2,
			strings.Replace(strings.Replace(call("calico", "ADD", "ok"), "calls_total", "call_duration_seconds_bucket", 1), "}", `,le="300"}`, 1): 2,
		})

		// A file that is skipped, one that is stale.
		good := harness.CalicoList(nodename)
		n.write(n.conf("20-other.conflist"), c10("c10"))
		n.metrics(map[string]float64{`skipped_files{handler="default"}`: 1, `reloads_total{handler="default",result="success"}`: 1})
		// In one step: what is written in place is empty first, another failure.
		n.write(n.conf("10-calico.conflist"), good[:30])
		n.metrics(map[string]float64{`ready{handler="default"}`: 1, `stale{handler="default"}`: 1, `reloads_total{handler="default",result="failure"}`: 1})
		assert.NilError(t, os.WriteFile(n.conf("10-calico.conflist"), []byte(good), 0o644))
		n.metrics(map[string]float64{`stale{handler="default"}`: 0})
		// By the conventions: counters end in _total, and nothing else does.
		s = n.scrape()
		assert.Assert(t, len(s.kind) >= 8, "%v", s.kind)
		for name, kind := range s.kind {
			assert.Equal(t, kind == "counter", strings.HasSuffix(name, "_total"), "%s is a %s", name, kind)
			assert.Assert(t, kind == "counter" || kind == "gauge" || kind == "histogram", "%s is a %s", name, kind)
		}
		// The dir is gone.
		assert.NilError(t, os.RemoveAll(n.ConfDir))
		n.metrics(map[string]float64{`ready{handler="default"}`: 0, `watch{handler="default",mode="waiting_for_directory"}`: 1, `watch{handler="default",mode="inotify"}`: 0})
		return fmt.Sprintf("%d metrics: %s", len(s.kind), networkMetric+"{"+strings.Join(slices.Sorted(maps.Keys(s.kind)), ",")+"}")
	})
}

// crictl prints the node's state whatever that is: a value that looks like JSON
// and is no object would make it fail.
// https://github.com/kubernetes-sigs/cri-tools
func TestI5(t *testing.T) {
	crictl, err := harness.Crictl()
	assert.NilError(t, err)
	// info runs crictl and returns the JSON kind of each value, nested objects
	// one level deep.
	info := func(n *node, state string) map[string]string {
		n.t.Helper()
		cmd := exec.Command(crictl, "--runtime-endpoint", "unix://"+n.Socket(), "--timeout", "10s", "info")
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		assert.NilError(n.t, err, "%s: %s", state, stderr.String())
		var values map[string]any
		assert.NilError(n.t, json.Unmarshal(out, &values), "%s: %s", state, out)
		kinds := map[string]string{}
		for key, v := range values {
			kinds[key] = fmt.Sprintf("%T", v)
			if m, ok := v.(map[string]any); ok && key == "cniconfig" {
				for k, v := range m {
					kinds[key+"."+k] = fmt.Sprintf("%T", v)
				}
			}
		}
		return kinds
	}
	stock := map[string]map[string]string{} // by state
	inTurn(t, "cri-tools", func(t *testing.T, side harness.Side) string {
		seen := map[string]bool{}
		check := func(n *node, state string, reports ...string) {
			n.t.Helper()
			seen[state] = true
			kinds := info(n, state)
			if side == harness.Stock {
				stock[state] = kinds
				return
			}
			n.agree()
			for key, kind := range stock[state] {
				assert.Equal(n.t, kinds[key], kind, "%s: key %s", state, key)
			}
			for _, key := range append(reports, "cniReload") {
				assert.Equal(n.t, kinds[key], "map[string]interface {}", "%s: key %s", state, key)
			}
		}
		t.Run("states", func(t *testing.T) {
			n := prepare(t, harness.Options{Side: side, NoImage: true})
			other := filepath.Join(n.Base, "other.d")
			assert.NilError(t, os.Mkdir(other, 0o755))
			n.Handlers = map[string]harness.Handler{"other": {ConfDir: other}}
			n.start()
			n.waitReady(false, soon)
			check(n, "empty dir", "cniReload.other")
			n.write(n.conf("10-a.conflist"), "{")
			if side == harness.Patched {
				n.notReady(soon, "10-a.conflist")
			}
			check(n, "bad file")
			// Text of plugins and files that wants to be JSON, or more than a line.
			n.write(n.conf("10-a.conflist"), conflist("a", "1.0.0", []string{"{\"x\":\n[\x01"}))
			if side == harness.Patched {
				n.notReady(soon, "10-a.conflist")
			}
			check(n, "hostile name")
			n.write(n.conf("10-a.conflist"), conflist("a", "1.0.0", []string{"fakenet", "absent"}))
			if side == harness.Patched {
				n.notReady(soon, `"absent"`)
			}
			check(n, "missing plugin")
			n.write(n.conf("10-a.conflist"), c10("a"))
			n.waitReady(true, soon)
			check(n, "ready", "cniReload.other")
			n.write(filepath.Join(other, "10-o.conflist"), c10("o"))
			check(n, "handler ready", "cniReload.other")
			if side == harness.Stock {
				return
			}
			assert.NilError(t, os.WriteFile(n.conf("10-a.conflist"), []byte(c10("a")[:40]), 0o644))
			assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
				if r := n.report(); !r.Stale {
					return fmt.Errorf("not stale: %+v", r)
				}
				return nil
			}))
			check(n, "stale")
			n.write(n.conf("10-a.conflist"), harness.CalicoList("/nonexistent/nodename"))
			assert.NilError(t, n.InstallFake("calico", "host-local"))
			n.notReady(soon, "/nonexistent/nodename")
			check(n, "gate closed")
			n.answers("fakenet", "STATUS", fake.Behavior{Mode: fake.Fail, Code: 50, Msg: "[1]\n{\"a\":1}\t\x1b[1m"})
			n.write(n.conf("10-a.conflist"), c11("a"))
			n.notReady(soon, "50")
			check(n, "STATUS not ready")
			assert.NilError(t, os.RemoveAll(n.ConfDir))
			n.notReady(soon, "does not exist")
			check(n, "dir removed")
			assert.NilError(t, os.RemoveAll(other))
			check(n, "handler's dir removed", "cniReload.other")
		})
		t.Run("template", func(t *testing.T) {
			n := templated(t, side, goodTemplate)
			n.start()
			n.waitReady(false, soon)
			check(n, "template waiting")
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.waitReady(true, soon)
			check(n, "template rendered")
			if side == harness.Stock {
				return
			}
			n.write(n.Template, badTemplate)
			assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
				if err := n.cidr("10.60.0.0/16"); err == "" {
					return fmt.Errorf("a bad template is rendered")
				}
				return nil
			}))
			check(n, "template failed")
			assert.NilError(t, os.Remove(n.Template))
			check(n, "template missing")
		})
		extra := "existing keys have their shape"
		if side == harness.Stock {
			extra = "what the other is compared with"
		}
		return fmt.Sprintf("crictl info parses in %d states; %s", len(seen), extra)
	})
}
