// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"strings"
	"testing"
)

func TestParseList(t *testing.T) {
	list, err := parseList("# all\nrun TestA\nfail TestB no such kernel\nskip TestC pulls\ndiffers TestD is mended\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := (map[string]listed{"TestA": {"run", ""}, "TestB": {"fail", "no such kernel"}, "TestC": {"skip", "pulls"}, "TestD": {"differs", "is mended"}}); !maps.Equal(list, want) {
		t.Errorf("got %+v", list)
	}
	for _, bad := range []string{"skip TestA", "run TestA why", "maybe TestA", "run TestA\nskip TestA x"} {
		if _, err := parseList(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if _, err := parseList(testList); err != nil {
		t.Error(err)
	}
}

func TestCompare(t *testing.T) {
	list, err := parseList("run TestA\nfail TestB no such kernel\n")
	if err != nil {
		t.Fatal(err)
	}
	good := map[string]string{"TestA": "PASS", "TestA/sub": "SKIP", "TestB": "FAIL", "TestB/sub": "FAIL"}
	if f := compare(good, good, list); f != nil {
		t.Errorf("equal results: %q", f)
	}
	for _, change := range []struct{ name, result, says string }{
		{"TestA", "FAIL", `TestA: "PASS" on stock, "FAIL"`},
		{"TestA/sub", "", `TestA/sub: "SKIP" on stock, ""`},
		{"TestA/more", "PASS", `TestA/more: "" on stock, "PASS"`},
		{"TestB", "PASS", `TestB: "FAIL" on stock`},
	} {
		other := map[string]string{}
		for k, v := range good {
			other[k] = v
		}
		if other[change.name] = change.result; change.result == "" {
			delete(other, change.name)
		}
		if f := compare(good, other, list); len(f) != 1 || !strings.Contains(f[0], change.says) {
			t.Errorf("%v: %q", change, f)
		}
	}
	if f := compare(map[string]string{"TestA": "FAIL"}, map[string]string{"TestA": "FAIL"}, list); len(f) != 1 {
		t.Errorf("an unlisted failure on both: %q", f)
	}
}

func TestADifferenceThatIsMeant(t *testing.T) {
	list, err := parseList("differs TestA is mended\n")
	if err != nil {
		t.Fatal(err)
	}
	stock := map[string]string{"TestA": "PASS", "TestA/sub": "PASS"}
	if f := compare(stock, map[string]string{"TestA": "FAIL", "TestA/sub": "FAIL"}, list); f != nil {
		t.Errorf("faults %q", f)
	}
	if f := compare(stock, stock, list); len(f) != 1 {
		t.Errorf("it passes on both and is listed: %q", f)
	}
	if f := compare(map[string]string{"TestA": "FAIL"}, map[string]string{"TestA": "FAIL"}, list); len(f) != 1 {
		t.Errorf("it fails on stock, too: %q", f)
	}
}

func TestLeftMore(t *testing.T) {
	f := leftMore(map[string]int{"netns": 2, "shims": 1}, map[string]int{"netns": 1, "shims": 2})
	if len(f) != 1 || !strings.Contains(f[0], "2 shims on the patched daemon, 1 on stock") {
		t.Errorf("faults %q", f)
	}
}

func TestWhatIsNotAsItMustBeRunsAgain(t *testing.T) {
	list, err := parseList("run TestA\nrun TestC\nrun TestD\nfail TestB no such kernel\n")
	if err != nil {
		t.Fatal(err)
	}
	stock := map[string]string{"TestA": "PASS", "TestA/x": "PASS", "TestB": "FAIL", "TestC": "FAIL", "TestD": "PASS"}
	patched := map[string]string{"TestA": "PASS", "TestA/y": "PASS", "TestB": "FAIL", "TestC": "FAIL", "TestD": "PASS"}
	again := suspects(stock, patched, list)
	if got := strings.Join(again, " "); got != "TestA TestC" {
		t.Fatalf("runs again: %s", got)
	}
	replace(stock, again, map[string]string{"TestA": "PASS", "TestC": "PASS"})
	replace(patched, again, map[string]string{"TestA": "PASS", "TestC": "FAIL"})
	if got := strings.Join(suspects(stock, patched, list), " "); got != "TestC" {
		t.Errorf("after that: %s", got)
	}
	if f := compare(stock, patched, list); len(f) != 1 || !strings.Contains(f[0], `TestC: "PASS" on stock`) {
		t.Errorf("faults %q", f)
	}
}
