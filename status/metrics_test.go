// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

var metricName = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

// checkMetrics applies what Prometheus demands, and its conventions.
func checkMetrics(t testing.TB, metrics []Metric) {
	t.Helper()
	series := make(map[string]bool)
	kinds := make(map[string]string)
	for _, m := range metrics {
		id := fmt.Sprintf("%s%q", m.Name, m.Labels)
		if series[id] {
			t.Errorf("%s comes twice", id)
		}
		series[id] = true
		var names []string
		for _, l := range m.Labels {
			names = append(names, l.Name)
			if !metricName.MatchString(l.Name) || l.Name == "le" {
				t.Errorf("%s has a label %q", m.Name, l.Name)
			}
			checkText(t, l.Value)
		}
		if slices.Sort(names); len(slices.Compact(names)) != len(m.Labels) {
			t.Errorf("%s has a label twice: %q", m.Name, m.Labels)
		}
		// One help, one kind and one set of labels for each name.
		kind := fmt.Sprintf("%v %q %q", m.Counter, names, m.Help)
		if old, ok := kinds[m.Name]; ok && old != kind {
			t.Errorf("%s is %s and %s", m.Name, old, kind)
		}
		kinds[m.Name] = kind
		if !metricName.MatchString(m.Name) || m.Counter != strings.HasSuffix(m.Name, "_total") {
			t.Errorf("bad name %s", m.Name)
		}
		if !strings.HasSuffix(m.Help, ".") || strings.Contains(m.Help, "\n") {
			t.Errorf("%s: help %q", m.Name, m.Help)
		}
		if m.Value < 0 {
			t.Errorf("%s is %v", id, m.Value)
		}
	}
}

// lines writes metrics the way they are scraped.
func lines(metrics []Metric) []string {
	var s []string
	for _, m := range metrics {
		var labels []string
		for _, l := range m.Labels {
			labels = append(labels, fmt.Sprintf("%s=%q", l.Name, l.Value))
		}
		value := fmt.Sprint(m.Value)
		if m.Buckets != nil {
			value += fmt.Sprintf(" of %d, %d within 0.5", m.Count, m.Buckets[0.5])
		}
		s = append(s, fmt.Sprintf("%s{%s} %s", m.Name, strings.Join(labels, ","), value))
	}
	return s
}

// metricsOf are the metrics of snapshots that come with these calls.
func metricsOf(snapshots map[string]*cnireload.Snapshot, calls map[cnireload.Call]cnireload.CallCount) []Metric {
	v := view(snapshots, "default")
	for name, l := range v.networks {
		l.work = func() work {
			return work{calls: calls, processes: someProcesses(2), owed: make([]cnireload.OwedRemoval, 3),
				trial: &cnireload.Trial{Failures: 20, Held: 7}}
		}
		v.networks[name] = l
	}
	return v.Metrics()
}

// someProcesses are n of every state but the one that only others leave behind.
func someProcesses(n int) []cnireload.Process {
	var list []cnireload.Process
	for i := range n {
		for _, state := range []cnireload.ProcessState{cnireload.ProcessRunning, cnireload.ProcessAbandoned} {
			list = append(list, cnireload.Process{Plugin: "ptp", Verb: "ADD", ID: fmt.Sprint("pod-", i), PID: 100 + i, Since: time.Now().Add(-time.Minute), State: state})
		}
	}
	return list
}

// within are buckets of which those from 0.5 s on hold other counts than those below.
func within(half, more uint64) (counts [len(plugin.CallBounds)]uint64) {
	for i, bound := range plugin.CallBounds {
		if bound == 0.5 {
			counts[i] = half
		} else if bound > 0.5 {
			counts[i] = more
		}
	}
	return counts
}

func TestMetrics(t *testing.T) {
	s := *kinds()["stale"]
	s.Failures = 2
	s.Gates = []cnireload.GateState{
		{Plugin: "calico", Target: "/var/lib/calico/nodename", Mode: cnireload.GateEnforce, Open: true},
		{Target: "/run/flag", Mode: cnireload.GateEnforce},
	}
	calls := map[cnireload.Call]cnireload.CallCount{
		{Plugin: "ptp", Verb: "ADD", Outcome: "ok"}:        {Count: 3, Seconds: 1.5, Within: within(2, 3)},
		{Plugin: "ptp", Verb: "ADD", Outcome: "timeout"}:   {Count: 1, Seconds: 120},
		{Plugin: "bridge", Verb: "VERSION", Outcome: "ok"}: {Count: 1, Seconds: 0.25, Within: within(1, 1)},
	}
	metrics := metricsOf(map[string]*cnireload.Snapshot{"default": &s}, calls)
	checkMetrics(t, metrics)
	want := []string{
		`network_ready{handler="default"} 1`,
		fmt.Sprintf(`network_build_info{handler="default",version=%q} 1`, Version()),
		`network_reloads_total{handler="default",result="success"} 3`,
		`network_reloads_total{handler="default",result="failure"} 2`,
		`network_stale{handler="default"} 1`,
		`network_skipped_files{handler="default"} 1`,
		`network_watch{handler="default",mode="inotify"} 1`,
		`network_watch{handler="default",mode="polling"} 0`,
		`network_watch{handler="default",mode="waiting_for_directory"} 0`,
		`network_gate_open{handler="default",plugin="calico",target="/var/lib/calico/nodename",mode="enforce"} 1`,
		`network_gate_open{handler="default",plugin="",target="/run/flag",mode="enforce"} 0`,
		`network_plugin_calls_total{handler="default",plugin="bridge",verb="VERSION",outcome="ok"} 1`,
		`network_plugin_call_duration_seconds{handler="default",plugin="bridge",verb="VERSION",outcome="ok"} 0.25 of 1, 1 within 0.5`,
		`network_plugin_calls_total{handler="default",plugin="ptp",verb="ADD",outcome="ok"} 3`,
		`network_plugin_call_duration_seconds{handler="default",plugin="ptp",verb="ADD",outcome="ok"} 1.5 of 3, 2 within 0.5`,
		`network_plugin_calls_total{handler="default",plugin="ptp",verb="ADD",outcome="timeout"} 1`,
		`network_plugin_call_duration_seconds{handler="default",plugin="ptp",verb="ADD",outcome="timeout"} 120 of 1, 0 within 0.5`,
		`network_plugin_processes{handler="default",state="running"} 2`,
		`network_plugin_processes{handler="default",state="abandoned"} 2`,
		`network_plugin_processes{handler="default",state="left_over"} 0`,
		`network_held_pods{handler="default"} 7`,
		`network_tombstones{handler="default"} 3`,
	}
	if got := lines(metrics); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// In every kind of state, and whatever plugins and files are called.
func TestMetricsAlways(t *testing.T) {
	for name, s := range kinds() {
		t.Run(name, func(t *testing.T) {
			bad := "\x1b[31m\xff\n" + strings.Repeat("é", 3000)
			s.Gates = append(s.Gates,
				cnireload.GateState{Plugin: bad, Target: bad, Mode: cnireload.GateReport, Open: true},
				// The same, but for what is cut.
				cnireload.GateState{Plugin: bad, Target: bad + "x", Mode: cnireload.GateReport},
				cnireload.GateState{Plugin: bad, Target: bad, Mode: cnireload.GateReport, Open: true})
			calls := map[cnireload.Call]cnireload.CallCount{
				{Plugin: bad, Verb: "ADD", Outcome: "ok"}:       {Count: 1, Seconds: 2},
				{Plugin: bad + "x", Verb: "ADD", Outcome: "ok"}: {Count: 3, Seconds: 4},
			}
			metrics := metricsOf(map[string]*cnireload.Snapshot{"default": s, bad: s, bad + "x": kinds()["empty"]}, calls)
			checkMetrics(t, metrics)
			for _, m := range metrics {
				switch {
				case m.Name == "network_gate_open" && m.Value != 0:
					t.Error("a gate that is closed is hidden by one that is open")
				case m.Name == "network_plugin_calls_total" && m.Labels[0].Value == "default" && m.Value != 4:
					t.Errorf("%v calls", m.Value)
				case m.Name == "network_ready" && m.Labels[0].Value == "default" && m.Value != number(s.Ready()):
					t.Errorf("network_ready is %v", m.Value)
				case m.Name == "network_ready" && m.Labels[0].Value != "default" && m.Value != 0:
					t.Error("a network that is not ready is hidden by one that is")
				}
			}
		})
	}
}

func TestMetricsOfOthers(t *testing.T) {
	v := Of(map[string]cnireload.CNI{"default": &other{err: errors.New("no")}, "kata": &other{}}, "default")
	if got, want := lines(v.Metrics()), []string{`network_ready{handler="default"} 0`, `network_ready{handler="kata"} 1`}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if got := Of(map[string]cnireload.CNI{}, "default").Metrics(); got != nil {
		t.Errorf("%q", lines(got))
	}
}

// Each series of a handler comes with every other's, in the same order.
func TestMetricsAreStable(t *testing.T) {
	calls := make(map[cnireload.Call]cnireload.CallCount)
	for i := range 50 {
		calls[cnireload.Call{Plugin: fmt.Sprint("p", i%7), Verb: fmt.Sprint("V", i%3), Outcome: fmt.Sprint("o", i)}] = cnireload.CallCount{Count: 1}
	}
	first := lines(metricsOf(kinds(), calls))
	for range 5 {
		if again := lines(metricsOf(kinds(), maps.Clone(calls))); !slices.Equal(again, first) {
			t.Fatal("another order")
		}
	}
}
