// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// sideLines is what go test prints of one side of a case.
func sideLines(test, report, side string, right, pass bool) string {
	result, _ := json.Marshal(map[string]any{"case": strings.TrimPrefix(test, "Test"), "report": report, "side": side, "observed": side + " of " + test, "right": right})
	line := func(e event) string { b, _ := json.Marshal(e); return string(b) + "\n" }
	action := "fail"
	if pass {
		action = "pass"
	}
	name := test + "/" + side
	return line(event{Action: "output", Test: name, Output: "    main_test.go:1: case-result " + string(result) + "\n"}) + line(event{Action: action, Test: name})
}

func TestWorse(t *testing.T) {
	for _, c := range []struct {
		name                string
		stockRight, patched bool // patched: whether it passes
		worse               bool
	}{
		{"R1", false, true, false},  // as reported, and mended
		{"R2", false, false, false}, // as reported, and not mended: no worse
		{"N1", true, true, false},   // alike
		{"N2", true, false, true},
	} {
		test := "Test" + c.name
		top := "fail"
		if c.patched {
			top = "pass"
		}
		text := sideLines(test, "a#1", "stock", c.stockRight, true) + sideLines(test, "a#1", "patched", c.patched, c.patched) +
			fmt.Sprintf("{\"Action\":%q,\"Test\":%q}\n", top, test)
		rows, failures, err := collect(strings.NewReader(text))
		assert.NilError(t, err)
		assert.Equal(t, len(rows), 1)
		assert.Equal(t, rows[0].worse(), c.worse, "%s", c.name)
		assert.Equal(t, rows[0].ok, c.patched)
		assert.Equal(t, len(failures) > 0, !c.patched)
		want := "1 cases tried, 1 of them public reports; the patched daemon is worse than stock in none"
		if c.worse {
			want = "1 cases tried, 1 of them public reports; the patched daemon is worse than stock in 1: " + c.name
		}
		assert.Equal(t, total(rows), want)
	}
}

// One way of several in which a case is run counts.
func TestWorseInOneWay(t *testing.T) {
	text := sideLines("TestN6", "a#1", "stock", true, true) + sideLines("TestN6", "a#1", "patched", false, false) +
		sideLines("TestN6", "a#1", "stock", true, true) + sideLines("TestN6", "a#1", "patched", true, true)
	rows, _, err := collect(strings.NewReader(text))
	assert.NilError(t, err)
	assert.Assert(t, rows[0].worse())
}

// What is found wrong after the result counts, such as something left behind.
func TestWorseAfterwards(t *testing.T) {
	text := sideLines("TestN6", "a#1", "stock", true, true) + sideLines("TestN6", "a#1", "patched", true, false)
	rows, _, err := collect(strings.NewReader(text))
	assert.NilError(t, err)
	assert.Assert(t, rows[0].worse())
	assert.Equal(t, rows[0].patched, failed)
}

func TestTotalTellsReportsFromOurOwn(t *testing.T) {
	rows := []*row{{name: "R1", report: "go-cni#116"}, {name: "L5", report: "(new)"}, {name: "R1Neighbours"}}
	if got, want := total(rows), "2 cases tried, 1 of them public reports; the patched daemon is worse than stock in none"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
