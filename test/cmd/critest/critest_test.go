// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

const junit = `<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="7" failures="1"><testsuite name="CRI validation">
<testcase name="[BeforeSuite]" status="passed" time="0.1"></testcase>
<testcase name="[It] [k8s.io] Networking works" status="passed" time="1.5"></testcase>
<testcase name="[It] [k8s.io] Networking fails" status="failed"><failure message="no page" type="failed">long</failure></testcase>
<testcase name="[It] [k8s.io] Networking hangs" status="timedout"><error message="too long" type="timedout">long</error></testcase>
<testcase name="[It] [k8s.io] AppArmor" status="skipped"><skipped message="skipped - AppArmor is disabled"></skipped></testcase>
<testcase name="[It] [k8s.io] benchmark" status="skipped"><skipped message="skipped"></skipped></testcase>
<testcase name="[AfterSuite]" status="failed"><failure message="not tidy"></failure></testcase>
</testsuite></testsuites>`

func TestParseJUnit(t *testing.T) {
	specs, err := parseJUnit([]byte(junit))
	assert.NilError(t, err)
	for name, want := range map[string]spec{
		"[k8s.io] Networking works": {outcome: passed},
		"[k8s.io] Networking fails": {outcome: failed, message: "no page"},
		"[k8s.io] Networking hangs": {outcome: failed, message: "too long"},
		"[k8s.io] AppArmor":         {outcome: skipped, message: "AppArmor is disabled"},
		"[k8s.io] benchmark":        {outcome: skipped, message: "skipped", filtered: true},
		"[AfterSuite]":              {outcome: failed, message: "not tidy"},
	} {
		assert.Equal(t, specs[name], want, name)
	}
	assert.Equal(t, len(specs), 6)
	for _, bad := range []string{"", "<testsuites></testsuites>", junit[:400],
		strings.Replace(junit, "Networking fails", "Networking works", 1)} {
		_, err := parseJUnit([]byte(bad))
		assert.Assert(t, err != nil, "accepted %q", bad)
	}
}

func TestParseKnown(t *testing.T) {
	list, err := parseKnown("# a remark\n\nfail always one two\n\tbecause\n\tof this\nskip no-apparmor AppArmor*\n\tno AppArmor\n")
	assert.NilError(t, err)
	assert.DeepEqual(t, list, []entry{
		{failed, "always", "one two", "because of this"},
		{skipped, "no-apparmor", "AppArmor*", "no AppArmor"},
	}, gocmp.AllowUnexported(entry{}))
	apply, err := applying(list, map[string]bool{"always": true, "no-apparmor": false})
	assert.NilError(t, err)
	assert.Equal(t, len(apply), 1)
	_, err = applying(list, map[string]bool{"always": true})
	assert.ErrorContains(t, err, `no condition "no-apparmor"`)
	for _, bad := range []string{"fail always", "pass always x\n\tr", "fail always x\nfail always y\n\tr", "\treason of nothing", "fail always x\n"} {
		_, err := parseKnown(bad)
		assert.Assert(t, err != nil, "accepted %q", bad)
	}
}

func TestTheTableOfKnownSpecsIsGood(t *testing.T) {
	text, err := os.ReadFile("specs.txt")
	assert.NilError(t, err)
	list, err := parseKnown(string(text))
	assert.NilError(t, err)
	_, err = applying(list, conditions())
	assert.NilError(t, err)
}

func TestFaults(t *testing.T) {
	p, f, s := spec{outcome: passed}, spec{outcome: failed, message: "why\nand where"}, spec{outcome: skipped}
	known := []entry{{failed, "always", "x", "r"}}
	for name, c := range map[string]struct {
		stock, patched spec
		known          []entry
		want           string // empty when all is well
	}{
		"pass on both":                  {stock: p, patched: p},
		"known failure":                 {stock: f, patched: f, known: known},
		"unknown failure on both":       {stock: f, patched: f, want: "not in the list"},
		"unknown skip on both":          {stock: s, patched: s, want: "not in the list"},
		"only patched fails":            {stock: p, patched: f, want: "stock: pass, patched: fail"},
		"only patched fails, but known": {stock: p, patched: f, known: known, want: "stock: pass, patched: fail"},
		"only patched skips":            {stock: p, patched: s, want: "stock: pass, patched: skip"},
		"patched skips what fails":      {stock: f, patched: s, known: known, want: "stock: fail, patched: skip"},
		"only stock fails":              {stock: f, patched: p, want: "stock: fail, patched: pass"},
		"known failure passes":          {stock: p, patched: p, known: known, want: "take it out"},
		"known failure skips":           {stock: s, patched: s, known: known, want: "says fail"},
		"a race passes or skips":        {stock: s, patched: p, known: []entry{{either, "always", "x", "r"}}},
		"a race fails":                  {stock: p, patched: f, known: []entry{{either, "always", "x", "r"}}, want: "patched: fail"},
		"a race fails on both":          {stock: f, patched: f, known: []entry{{either, "always", "x", "r"}}, want: "says either"},
		"known failure of no spec":      {stock: p, patched: p, known: []entry{{failed, "always", "y*", "r"}}, want: "none of that name: y*"},
	} {
		t.Run(name, func(t *testing.T) {
			faults := newComparison(map[string]spec{"x": c.stock}, map[string]spec{"x": c.patched}, false).faults(c.known)
			if c.want == "" {
				assert.Equal(t, len(faults), 0, "%q", faults)
				return
			}
			assert.Equal(t, len(faults), 1, "%q", faults)
			assert.Assert(t, cmp.Contains(faults[0], c.want))
		})
	}
}

func TestASpecThatOneSideLacksIsAFault(t *testing.T) {
	c := newComparison(map[string]spec{"x": {outcome: passed}}, map[string]spec{}, false)
	assert.Equal(t, len(c.faults(nil)), 1)
	assert.Equal(t, len(c.suspects(nil)), 0, "it cannot run again")
}

func TestLeftoversOfPatchedAreAFault(t *testing.T) {
	c := newComparison(map[string]spec{"x": {outcome: passed}}, map[string]spec{"x": {outcome: passed}}, false)
	c.left[harness.Patched] = []string{"netns cni-1"}
	assert.Equal(t, len(c.faults(nil)), 1)
}

func TestASpecThatPassesAloneHasPassed(t *testing.T) {
	p, f := spec{outcome: passed}, spec{outcome: failed}
	c := newComparison(map[string]spec{"x": p, "y": p}, map[string]spec{"x": f, "y": f}, false)
	assert.DeepEqual(t, c.suspects(nil), []string{"x", "y"})
	assert.Equal(t, len(c.suspects([]entry{{failed, "always", "x", "r"}})), 2, "a known failure that only one side has")
	c.again("x", p, p)
	c.again("y", p, f)
	assert.DeepEqual(t, c.suspects(nil), []string{"y"})
	assert.Equal(t, len(c.faults(nil)), 1)
	// It is told all the same.
	notes := strings.Join(c.notes(nil), "\n")
	assert.Assert(t, cmp.Contains(notes, "ran again: x: stock pass, then alone [pass]; patched fail, then alone [pass]"))
	assert.Assert(t, cmp.Contains(c.table(), "patched  2      1       1       0"))
}

func TestWhatWasNotAskedForDoesNotCount(t *testing.T) {
	run := map[string]spec{"x": {outcome: passed}, "y": {outcome: skipped, message: "skipped", filtered: true}}
	known := []entry{{failed, "always", "z", "r"}}
	assert.Equal(t, len(newComparison(run, run, true).faults(known)), 0)
	assert.Equal(t, len(newComparison(run, run, false).faults(known)), 2)
}

func TestBypassedSpecsAreCountedByReason(t *testing.T) {
	p, f, sk := spec{outcome: passed}, spec{outcome: failed}, spec{outcome: skipped}
	run := map[string]spec{"a1": sk, "a2": sk, "b": f, "c": p, "d": f}
	known := []entry{{skipped, "always", "a*", "no a"}, {failed, "always", "b", "no b"}, {either, "always", "c", "race"}}
	assert.DeepEqual(t, newComparison(run, run, false).bypassed(known), map[string]int{"no a": 2, "fails on stock, too: no b": 1})
}

func TestAlarms(t *testing.T) {
	log := "time=x level=info msg=\"panic: is only a word\"\npanic: boom\n\ngoroutine 7 [running]:\nmain.x()\nWARNING: DATA RACE\nfatal error: concurrent map writes\n"
	assert.DeepEqual(t, alarms([]byte(log)), []string{"panic: boom", "goroutine 7 [running]:", "WARNING: DATA RACE", "fatal error: concurrent map writes"})
}

func TestLayersHaveFoldersFirstAndNothingTwice(t *testing.T) {
	l := tarOf(func(t *tree) {
		t.file("a/b/c", 0o644, []byte("x"))
		t.link("a/d", "/a/b/c")
		t.dir("a", 0o700)
	})
	var names []string
	for r := tar.NewReader(bytes.NewReader(l)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		assert.NilError(t, err)
		names = append(names, h.Name)
	}
	assert.DeepEqual(t, names, []string{"a/", "a/b/", "a/b/c", "a/d"})
}
