// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"
)

func TestRunAllGoesOnAndSkipsWhatNeedsAFailedStage(t *testing.T) {
	ran := ""
	mk := func(name string, c counts, err error, needs ...string) stage {
		return stage{name: name, needs: needs, run: func(io.Writer) (counts, error) { ran += name + " "; return c, err }}
	}
	var w strings.Builder
	ok := runAll([]stage{
		mk("a", counts{passed: 3, skipped: 1, why: map[string]int{"no arm64": 1}}, nil),
		mk("b", counts{}, errors.New("no\nmore")),
		mk("c", counts{passed: 1}, nil, "b"),
		mk("d", counts{passed: 1}, nil, "c"),
		mk("e", counts{passed: 2}, nil, "a"),
	}, &w)
	if ok {
		t.Error("a run with a failed stage is called good")
	}
	if ran != "a b e " {
		t.Errorf("ran %q", ran)
	}
	out := w.String()
	if !strings.HasSuffix(out, "\n5 passed, 1 failed, 3 skipped\n") {
		t.Errorf("ends with %q", out[max(0, len(out)-80):])
	}
	if !strings.Contains(out, "\na: 1 skipped: no arm64\n") {
		t.Errorf("%q does not say why a test was skipped", out)
	}
	if !strings.Contains(out, "not run: b failed") {
		t.Errorf("table %q does not say why c did not run", out)
	}
}

func TestRunAllGood(t *testing.T) {
	var w strings.Builder
	if !runAll([]stage{{name: "a", run: func(io.Writer) (counts, error) { return counts{passed: 1}, nil }}}, &w) {
		t.Error("a good run is called failed")
	}
}

// Stages that may run beside each other do, each one's output stays together, and
// the table has the order of the list.
func TestRunAllBeside(t *testing.T) {
	var both sync.WaitGroup
	both.Add(2)
	mk := func(name string) stage {
		return stage{name: name, beside: true, run: func(w io.Writer) (counts, error) {
			fmt.Fprintf(w, "%s begins\n", name)
			both.Done()
			both.Wait() // the other one runs, too
			if _, err := command("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo out; echo err >&2; done")(w); err != nil {
				t.Error(err)
			}
			fmt.Fprintf(w, "%s ends\n", name)
			return counts{passed: 1}, nil
		}}
	}
	failing := stage{name: "c", beside: true, run: func(io.Writer) (counts, error) { return counts{}, errors.New("no") }}
	last := stage{name: "d", needs: []string{"c"}, run: func(io.Writer) (counts, error) { return counts{passed: 1}, nil }}
	var w strings.Builder
	if runAll([]stage{mk("a"), mk("b"), failing, last}, &w) {
		t.Error("a run with a failed stage is called good")
	}
	out := w.String()
	for _, name := range []string{"a", "b"} {
		_, rest, _ := strings.Cut(out, "=== "+name+"\n"+name+" begins\n")
		said, _, ok := strings.Cut(rest, name+" ends\n")
		if !ok || strings.Contains(said, "=== ") || strings.Count(said, "out\n") != 9 || strings.Count(said, "err\n") != 9 {
			t.Errorf("output of stage %s: %q", name, said)
		}
	}
	for _, want := range []string{"not run: c failed", "\n2 passed, 1 failed, 1 skipped\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	_, table, _ := strings.Cut(out, "\nstage ")
	if a, b, c := strings.Index(table, "\na "), strings.Index(table, "\nb "), strings.Index(table, "\nc "); a < 0 || b < a || c < b {
		t.Errorf("order of the table:\n%s", table)
	}
}

func TestChoose(t *testing.T) {
	all := stages([]string{"v2.3", "v2.4"}, "v2.4", false)
	list, err := choose(all, "unit,verify")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range list {
		names = append(names, s.name)
	}
	if got := strings.Join(names, ","); got != "unit,verify v2.3,verify v2.4" {
		t.Errorf("chose %s", got)
	}
	if _, err := choose(all, "nonsense"); err == nil {
		t.Error("an unknown stage was accepted")
	}
}

func TestStagesNeedStagesThatExist(t *testing.T) {
	seen, beside := map[string]bool{}, map[string]bool{}
	for _, s := range append(stages([]string{"v2.3", "v2.4"}, "v2.4", false), long("v2.4")...) {
		for _, n := range s.needs {
			if !seen[n] {
				t.Errorf("stage %s needs %s, which is not before it", s.name, n)
			}
			if s.beside && beside[n] {
				t.Errorf("stage %s needs %s and may run beside it", s.name, n)
			}
		}
		seen[s.name], beside[s.name] = true, s.beside
	}
}

func TestCommandReadsItsCount(t *testing.T) {
	c, err := command("sh", "-c", "echo x; echo 1 skipped: a: b; echo 1 skipped: c; echo 4 passed, 1 failed, 2 skipped; exit 1")(io.Discard)
	if want := (counts{4, 1, 2, map[string]int{"a: b": 1, "c": 1}}); err == nil || !reflect.DeepEqual(c, want) {
		t.Errorf("got %+v, %v", c, err)
	}
	if c, err = command("true")(io.Discard); err != nil || !reflect.DeepEqual(c, counts{passed: 1}) {
		t.Errorf("got %+v, %v", c, err)
	}
}
