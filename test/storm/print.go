// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// outcome is a scenario on one disk, stock first.
type outcome struct {
	scenario scenario
	disk     string
	sides    [2]measured
}

func (o outcome) name() string { return o.scenario.name + ", " + o.disk + " disk" }

func quantile(s samples, q float64) time.Duration {
	if len(s.took) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.took))
	return sorted[min(len(sorted)-1, int(float64(len(sorted))*q))]
}

func ratio(a, b time.Duration) string {
	if a == 0 || b == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(a)/float64(b))
}

func ms(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
	case d < 10*time.Second:
		return fmt.Sprintf("%.0f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

const mib = 1 << 20

// print tells all of a scenario.
func (o outcome) print(w io.Writer) {
	fmt.Fprintf(w, "\n== %s\n", o.name())
	for _, what := range []string{metadataWrite, statusCall, eventDelivery, otherPod} {
		for i, m := range o.sides {
			idle, first, storm := m.idle.by[what], m.first.by[what], m.storm.by[what]
			fmt.Fprintf(w, "%-15s %-8s idle p50 %s, p99 %s; first round p50 %s, p99 %s; storm p50 %s, p99 %s; storm/idle %s, %s (%d and %d samples%s)\n", what, names[i],
				ms(quantile(idle, 0.5)), ms(quantile(idle, 0.99)), ms(quantile(first, 0.5)), ms(quantile(first, 0.99)), ms(quantile(storm, 0.5)), ms(quantile(storm, 0.99)),
				ratio(quantile(storm, 0.5), quantile(idle, 0.5)), ratio(quantile(storm, 0.99), quantile(idle, 0.99)),
				len(idle.took), len(storm.took), unanswered(storm))
		}
	}
	for i, m := range o.sides {
		fmt.Fprintf(w, "%-15s %-8s goroutines %d before, %d peak, %d after; RSS %.0f MiB before, %.0f peak\n", "daemon", names[i],
			m.goroutinesBefore, m.storm.goroutines, m.goroutinesAfter, float64(m.rssBefore)/mib, float64(m.storm.rss)/mib)
	}
	for i, m := range o.sides {
		fmt.Fprintf(w, "%-15s %-8s first round %s; then %s in %s; %.1f write transactions each; %d pods running %s after the cure (%s meanwhile); %d addresses leaked\n", "pods", names[i],
			ms(m.firstLasted), attempts(m.fails), ms(m.lasted), m.writes, m.running, ms(m.healed), attempts(m.failsAfter), m.leaked)
		if m.removal != nil {
			fmt.Fprintf(w, "%-15s %-8s could not be removed: %v\n", "pods", names[i], m.removal)
		}
	}
}

func attempts(fails map[string]int) string {
	if len(fails) == 0 {
		return "no failed attempts"
	}
	var kinds []string
	for _, kind := range slices.Sorted(maps.Keys(fails)) {
		kinds = append(kinds, fmt.Sprintf("%d %s", fails[kind], kind))
	}
	return fmt.Sprintf("%d failed attempts: %s", sum(fails), strings.Join(kinds, ", "))
}

var names = [2]string{"stock", "patched"}

func unanswered(s samples) string {
	if s.failed == 0 {
		return ""
	}
	return fmt.Sprintf("; %d not answered: %s", s.failed, s.why)
}

// printTable prints one row for each scenario and side, in Markdown.
func printTable(w io.Writer, all []outcome) {
	fmt.Fprintln(w, "\n| storm | side | metadata write p50/p99, x idle | Status p50/p99, x idle | event p99 | other pod p50, x idle | goroutines before/peak/after | RSS before/peak MiB | failed attempts | writes each | all running after | leaked |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|---|---|---|---|")
	pair := func(m measured, what string) string {
		i, s := m.idle.by[what], m.storm.by[what]
		return fmt.Sprintf("%s / %s, %s / %s", ms(quantile(s, 0.5)), ms(quantile(s, 0.99)),
			ratio(quantile(s, 0.5), quantile(i, 0.5)), ratio(quantile(s, 0.99), quantile(i, 0.99)))
	}
	for _, o := range all {
		for i, m := range o.sides {
			pod := m.storm.by[otherPod]
			other := fmt.Sprintf("%s, %s", ms(quantile(pod, 0.5)), ratio(quantile(pod, 0.5), quantile(m.idle.by[otherPod], 0.5)))
			if pod.failed > 0 {
				other += fmt.Sprintf(" (%d of %d failed)", pod.failed, len(pod.took))
			}
			status := pair(m, statusCall)
			if f := m.storm.by[statusCall].failed; f > 0 {
				status += fmt.Sprintf(" (%d of %d blocked)", f, len(m.storm.by[statusCall].took))
			}
			writes, healed := "-", ms(m.healed)
			if o.scenario.failsFast {
				writes = fmt.Sprintf("%.1f", m.writes)
			}
			if want := max(o.sides[0].running, o.sides[1].running); m.running < want {
				healed = fmt.Sprintf("%d of %d after %s", m.running, want, healed)
			}
			fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %d/%d/%d | %.0f/%.0f | %d | %s | %s | %d |\n", o.name(), names[i],
				pair(m, metadataWrite), status, ms(quantile(m.storm.by[eventDelivery], 0.99)), other,
				m.goroutinesBefore, m.storm.goroutines, m.goroutinesAfter, float64(m.rssBefore)/mib, float64(m.storm.rss)/mib,
				sum(m.fails), writes, healed, m.leaked)
		}
	}
	fmt.Fprintln(w, "\nThe first round, in which all pods start at once:")
	fmt.Fprintln(w, "\n| storm | side | lasts | metadata write p50/p99 | Status p50/p99 | other pod p50 |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|")
	for _, o := range all {
		for i, m := range o.sides {
			q := func(what string, q float64) string { return ms(quantile(m.first.by[what], q)) }
			fmt.Fprintf(w, "| %s | %s | %s | %s / %s | %s / %s | %s |\n", o.name(), names[i], ms(m.firstLasted),
				q(metadataWrite, 0.5), q(metadataWrite, 0.99), q(statusCall, 0.5), q(statusCall, 0.99), q(otherPod, 0.5))
		}
	}
	fmt.Fprintln(w, "\nRatio patched to stock:")
	fmt.Fprintln(w, "\n| storm | metadata write p50 | p99 | Status p50 | p99 | event p99 | other pod p50 | peak RSS | all running after |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|---|")
	for _, o := range all {
		r := func(what string, q float64) string {
			return ratio(quantile(o.sides[1].storm.by[what], q), quantile(o.sides[0].storm.by[what], q))
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %s | %.2f | %s |\n", o.name(), r(metadataWrite, 0.5), r(metadataWrite, 0.99),
			r(statusCall, 0.5), r(statusCall, 0.99), r(eventDelivery, 0.99), r(otherPod, 0.5),
			float64(o.sides[1].storm.rss)/float64(o.sides[0].storm.rss), ratio(o.sides[1].healed, o.sides[0].healed))
	}
}

// printTargets says of each target whether it is met.
func printTargets(w io.Writer, all []outcome) {
	fmt.Fprintln(w, "\nTargets, for the patched side:")
	for _, o := range all {
		stock, patched := o.sides[0], o.sides[1]
		say := func(met bool, format string, args ...any) {
			word := "MISSED"
			if met {
				word = "met"
			}
			fmt.Fprintf(w, "  %-6s  %s: %s\n", word, o.name(), fmt.Sprintf(format, args...))
		}
		atMost := func(what string, q float64, of time.Duration, limit float64, than string) {
			got := quantile(patched.storm.by[what], q)
			say(float64(got) <= limit*float64(of) && of > 0, "%s p%.0f %s, %s x %s (at most %.1f)", what, q*100, ms(got), ratio(got, of), than, limit)
		}
		switch o.scenario.name {
		case "gate":
			atMost(metadataWrite, 0.5, quantile(patched.idle.by[metadataWrite], 0.5), 1.2, "idle")
		case "fail":
			say(patched.writes <= 2 || sum(patched.fails)*2 < sum(stock.fails), "%.1f write transactions per failed attempt, stock %.1f (at most 2), or fewer attempts: %d, stock %d",
				patched.writes, stock.writes, sum(patched.fails), sum(stock.fails))
			atMost(metadataWrite, 0.5, quantile(stock.storm.by[metadataWrite], 0.5), 0.4, "stock")
		case "hang", "flood":
			atMost(statusCall, 0.99, quantile(patched.idle.by[statusCall], 0.99), 2, "idle")
			atMost(otherPod, 0.5, quantile(patched.idle.by[otherPod], 0.5), 2, "idle")
			more := float64(patched.storm.rss-patched.rssBefore) / mib
			say(more <= 20, "RSS %+.0f MiB (at most +20)", more)
			say(patched.goroutinesAfter <= patched.goroutinesBefore+5, "goroutines %d before, %d after", patched.goroutinesBefore, patched.goroutinesAfter)
		}
		if o.disk == "slow" {
			atMost(otherPod, 0.5, quantile(stock.storm.by[otherPod], 0.5), 0.4, "stock")
		}
		say(patched.leaked == 0, "%d addresses leaked, stock %d", patched.leaked, stock.leaked)
	}
}
