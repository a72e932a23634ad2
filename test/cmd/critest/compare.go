// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/cnireload/cnireload/test/harness"
)

// entry of the table of specs that cannot pass.
type entry struct {
	outcome outcome // failed, skipped or either
	// condition is what a machine must lack or be for the entry to apply.
	condition string
	// name is a spec's, or the beginning of several when it ends in a star.
	name, reason string
}

func (e entry) matches(name string) bool {
	if prefix, ok := strings.CutSuffix(e.name, "*"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return name == e.name
}

// either is said of a spec that passes or skips itself, as a race in
// containerd goes.
const either outcome = "either"

// parseKnown reads lines of OUTCOME CONDITION NAME, each followed by the
// reason on lines that begin with a tab.
func parseKnown(text string) ([]entry, error) {
	var list []entry
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, " \n")
		switch reason, isReason := strings.CutPrefix(l, "\t"); {
		case l == "" || strings.HasPrefix(l, "#"):
		case isReason && len(list) > 0:
			last := &list[len(list)-1]
			last.reason = strings.TrimSpace(last.reason + " " + strings.TrimSpace(reason))
		default:
			f := strings.SplitN(l, " ", 3)
			if len(f) != 3 || !slices.Contains([]outcome{failed, skipped, either}, outcome(f[0])) {
				return nil, fmt.Errorf(`%q is not "fail", "skip" or "either", then CONDITION NAME`, l)
			}
			list = append(list, entry{outcome: outcome(f[0]), condition: f[1], name: f[2]})
		}
	}
	for _, e := range list {
		if e.reason == "" {
			return nil, fmt.Errorf("%q has no reason below it", e.name)
		}
	}
	return list, nil
}

// conditions tells which of the conditions of the table hold on this machine.
func conditions() map[string]bool {
	read := func(path string) string {
		b, _ := os.ReadFile(path)
		return string(b)
	}
	exists := func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	}
	caps := regexp.MustCompile(`(?m)^CapEff:\s*([0-9a-f]+)`).FindStringSubmatch(read("/proc/self/status"))
	var effective uint64
	if caps != nil {
		fmt.Sscanf(caps[1], "%x", &effective)
	}
	const capSysResource = 24
	return map[string]bool{
		"always":              true,
		"no-apparmor":         !strings.HasPrefix(read("/sys/module/apparmor/parameters/enabled"), "Y"),
		"no-selinux":          !exists("/sys/fs/selinux/enforce"),
		"no-cap-sys-resource": effective>>capSysResource&1 == 0,
		"cgroup-v1":           !exists("/sys/fs/cgroup/cgroup.controllers"),
	}
}

// applying returns the entries that apply under these conditions.
func applying(list []entry, holds map[string]bool) ([]entry, error) {
	var apply []entry
	for _, e := range list {
		yes, ok := holds[e.condition]
		if !ok {
			return nil, fmt.Errorf("%q: no condition %q: there are %s", e.name, e.condition,
				strings.Join(slices.Sorted(maps.Keys(holds)), ", "))
		}
		if yes {
			apply = append(apply, e)
		}
	}
	return apply, nil
}

// comparison of the two runs.
type comparison struct {
	results map[harness.Side]map[string]spec
	// retried are the outcomes of specs that ran again by themselves.
	retried map[string]map[harness.Side][]outcome
	// left is what a side's run left behind.
	left map[harness.Side][]string
	// partial is true when only some specs were asked for.
	partial bool
}

func newComparison(stock, patched map[string]spec, partial bool) *comparison {
	c := &comparison{
		results: map[harness.Side]map[string]spec{harness.Stock: maps.Clone(stock), harness.Patched: maps.Clone(patched)},
		retried: map[string]map[harness.Side][]outcome{},
		left:    map[harness.Side][]string{},
		partial: partial,
	}
	if partial {
		for _, specs := range c.results {
			maps.DeleteFunc(specs, func(_ string, s spec) bool { return s.filtered })
		}
	}
	return c
}

func (c *comparison) names() []string {
	all := maps.Clone(c.results[harness.Stock])
	maps.Copy(all, c.results[harness.Patched])
	return slices.Sorted(maps.Keys(all))
}

// outcome of a spec: what it did first, or that it passed when it ran again.
func (c *comparison) outcome(s harness.Side, name string) outcome {
	r, ok := c.results[s][name]
	if !ok {
		return missing
	}
	if slices.Contains(c.retried[name][s], passed) {
		return passed
	}
	return r.outcome
}

func (c *comparison) again(name string, stock, patched spec) {
	if c.retried[name] == nil {
		c.retried[name] = map[harness.Side][]outcome{}
	}
	r := c.retried[name]
	r[harness.Stock] = append(r[harness.Stock], stock.outcome)
	r[harness.Patched] = append(r[harness.Patched], patched.outcome)
}

// suspects are the specs with a result that is not the same on both sides, or
// that fail and should not. They deserve another run: critest waits for a
// bounded time.
func (c *comparison) suspects(known []entry) []string {
	return slices.DeleteFunc(c.names(), func(name string) bool {
		stock, patched := c.outcome(harness.Stock, name), c.outcome(harness.Patched, name)
		return c.fault(name, known) == "" || stock == patched && stock != failed || stock == missing || patched == missing
	})
}

func lookUp(known []entry, name string) (entry, bool) {
	i := slices.IndexFunc(known, func(e entry) bool { return e.matches(name) })
	if i < 0 {
		return entry{}, false
	}
	return known[i], true
}

// fault says what is wrong with a spec's results, if anything is.
func (c *comparison) fault(name string, known []entry) string {
	stock, patched := c.outcome(harness.Stock, name), c.outcome(harness.Patched, name)
	e, listed := lookUp(known, name)
	oneOf := func(o outcome) bool { return o == passed || o == skipped }
	switch {
	case listed && e.outcome == either && oneOf(stock) && oneOf(patched):
		return ""
	case stock != patched:
		return fmt.Sprintf("stock: %s, patched: %s: %s", stock, patched, name)
	case listed && stock == passed:
		return fmt.Sprintf("passes now: take it out of the list of known specs: %s", name)
	case stock != passed && !listed:
		return fmt.Sprintf("%s on both sides and not in the list of known specs: %s", stock, name)
	case stock != passed && stock != e.outcome:
		return fmt.Sprintf("%s on both sides, the list of known specs says %s: %s", stock, e.outcome, name)
	}
	return ""
}

// faults are the reasons why the run is not good.
func (c *comparison) faults(known []entry) []string {
	var list []string
	for _, name := range c.names() {
		if f := c.fault(name, known); f != "" {
			for _, s := range bothSides {
				if m := c.results[s][name].message; m != "" {
					f += fmt.Sprintf("\n      %s: %s", s, firstLines(m, 4))
				}
			}
			list = append(list, f)
		}
	}
	if !c.partial {
		for _, e := range known {
			if !slices.ContainsFunc(c.names(), e.matches) {
				list = append(list, "in the list of known specs, but critest has none of that name: "+e.name)
			}
		}
	}
	if left := c.left[harness.Patched]; len(left) > 0 {
		list = append(list, "patched left behind "+strings.Join(left, ", "))
	}
	return list
}

func firstLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[:min(n, len(lines))], " ")
}

// count is how many specs of a side ended how.
func (c *comparison) count(s harness.Side) map[outcome]int {
	n := map[outcome]int{}
	for _, name := range c.names() {
		n[c.outcome(s, name)]++
	}
	return n
}

// table compares the sides' figures.
func (c *comparison) table() string {
	var b bytes.Buffer
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "side\tspecs\tpassed\tfailed\tskipped")
	for _, s := range bothSides {
		n := c.count(s)
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%d\n", s, len(c.results[s]), n[passed], n[failed], n[skipped])
	}
	tw.Flush()
	return b.String()
}

// notes are what a reader must know about a run that may be good: specs that
// ran more than once, and those that do not pass, with the reasons.
func (c *comparison) notes(known []entry) []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(c.retried)) {
		var parts []string
		for _, s := range bothSides {
			parts = append(parts, fmt.Sprintf("%s %v, then alone %v", s, c.results[s][name].outcome, c.retried[name][s]))
		}
		list = append(list, fmt.Sprintf("ran again: %s: %s", name, strings.Join(parts, "; ")))
	}
	for _, name := range c.names() {
		e, ok := lookUp(known, name)
		stock, patched := c.outcome(harness.Stock, name), c.outcome(harness.Patched, name)
		switch {
		case !ok || c.fault(name, known) != "" || stock == passed && patched == passed:
		case stock == patched:
			list = append(list, fmt.Sprintf("%s on both: %s: %s", stock, name, e.reason))
		default:
			list = append(list, fmt.Sprintf("stock: %s, patched: %s: %s: %s", stock, patched, name, e.reason))
		}
	}
	return list
}

// bypassed counts, by reason, the specs that do not pass and need not.
func (c *comparison) bypassed(known []entry) map[string]int {
	reasons := map[string]int{}
	for _, name := range c.names() {
		if e, ok := lookUp(known, name); ok && c.outcome(harness.Patched, name) != passed && c.fault(name, known) == "" {
			why := e.reason
			if e.outcome == failed {
				why = "fails on stock, too: " + why
			}
			reasons[why]++
		}
	}
	return reasons
}
