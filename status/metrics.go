// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cnireload/cnireload/cnireload"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

// Metric is one time series at one moment, for whatever library exports it.
type Metric struct {
	Name    string // without the exporter's prefix
	Help    string
	Counter bool // it only grows; otherwise it is a gauge
	Labels  []Label
	Value   float64 // of a histogram the sum
	// Buckets makes it a histogram, if it is not nil: how many values were no larger
	// than the key, of Count values.
	Buckets map[float64]uint64
	Count   uint64
}

// Label is the name and the value of a label.
type Label struct{ Name, Value string }

// Metrics returns the metrics of all networks, in a stable order. The label
// handler is the runtime handler's name. A network that is not a
// *cnireload.Network has only its readiness.
func (v View) Metrics() []Metric {
	var metrics []Metric
	// A series must not come twice, or nothing at all is exported. Two lists may
	// need the same thing, and texts may differ in what cannot be printed.
	series := make(map[string]int)
	for _, name := range slices.Sorted(maps.Keys(v.networks)) {
		l := v.networks[name]
		add := func(metric, help string, counter bool, value float64, labels ...Label) int {
			labels = append([]Label{{"handler", printable(name)}}, labels...)
			id := fmt.Sprintf("%s%q", metric, labels)
			if i, ok := series[id]; ok {
				if counter {
					metrics[i].Value += value
				} else {
					metrics[i].Value = min(metrics[i].Value, value)
				}
				return i
			}
			series[id] = len(metrics)
			metrics = append(metrics, Metric{Name: metric, Help: help, Counter: counter, Labels: labels, Value: value})
			return len(metrics) - 1
		}
		add("network_ready", "Whether pods of the runtime handler can be attached to their network.", false, number(l.err == nil))
		s := l.snapshot
		if s == nil {
			continue
		}
		add("network_build_info", "The version of this patched containerd.", false, 1, Label{"version", printable(Version())})
		reloads := "How often the content of the conf dir came into use, or could not."
		add("network_reloads_total", reloads, true, float64(s.Generation), Label{"result", "success"})
		add("network_reloads_total", reloads, true, float64(s.Failures), Label{"result", "failure"})
		stale := slices.ContainsFunc(s.Networks, func(n cnireload.NetworkState) bool { return n.StaleError != nil })
		add("network_stale", "Whether a list in use is the last good content of a file that cannot be used now.", false, number(stale))
		add("network_skipped_files", "How many files of the conf dir are not in use.", false, float64(len(s.Skipped)))
		for _, mode := range []cnireload.WatchMode{cnireload.WatchInotify, cnireload.WatchPolling, cnireload.WatchWaiting} {
			add("network_watch", "How changes of the conf dir are noticed; 1 for the mode in force.", false, number(s.Watch.Mode == mode),
				Label{"mode", plain(string(mode))})
		}
		for _, g := range s.Gates {
			add("network_gate_open", "Whether what a plugin needs from its agent is there.", false, number(g.Open),
				Label{"plugin", printable(g.Plugin)}, Label{"target", printable(g.Target)}, Label{"mode", string(g.Mode)})
		}
		w := l.work()
		counts := w.calls
		calls := slices.SortedFunc(maps.Keys(counts), func(a, b cnireload.Call) int {
			return cmp.Or(cmp.Compare(a.Plugin, b.Plugin), cmp.Compare(a.Verb, b.Verb), cmp.Compare(a.Outcome, b.Outcome))
		})
		for _, c := range calls {
			labels := []Label{{"plugin", printable(c.Plugin)}, {"verb", c.Verb}, {"outcome", c.Outcome}}
			add("network_plugin_calls_total", "How many calls to CNI plugins have ended, by how.", true, float64(counts[c].Count), labels...)
			i := add("network_plugin_call_duration_seconds", "How long calls to CNI plugins took.", true, counts[c].Seconds, labels...)
			histogram := &metrics[i]
			histogram.Counter = false
			histogram.Count += counts[c].Count
			if histogram.Buckets == nil {
				histogram.Buckets = make(map[float64]uint64)
			}
			for b, bound := range plugin.CallBounds {
				histogram.Buckets[bound] += counts[c].Within[b]
			}
		}
		processes := map[cnireload.ProcessState]int{}
		for _, p := range w.processes {
			processes[p.State]++
		}
		for _, state := range []cnireload.ProcessState{cnireload.ProcessRunning, cnireload.ProcessAbandoned, cnireload.ProcessLeftOver} {
			add("network_plugin_processes", "How many processes of CNI plugins have not ended, by how they stand.", false, float64(processes[state]),
				Label{"state", plain(string(state))})
		}
		held := 0
		if w.trial != nil {
			held = w.trial.Held
		}
		add("network_held_pods", "How many pods wait for their turn because many have failed.", false, float64(held))
		add("network_tombstones", "How many removals of pods are owed because they could not be done.", false, float64(len(w.owed)))
	}
	return metrics
}

// plain is a label value without blanks.
func plain(s string) string { return strings.ReplaceAll(s, " ", "_") }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
