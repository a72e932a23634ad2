// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestParseList(t *testing.T) {
	list, err := parseList("# all\nrun TestA\nfail TestB no such kernel\nskip TestC pulls\n")
	if err != nil {
		t.Fatal(err)
	}
	if !list["TestA"].run || !list["TestB"].run || !list["TestB"].fails || list["TestC"].run || list["TestC"].reason != "pulls" {
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
		{"TestA", "FAIL", "TestA: PASS on stock, \"FAIL\""},
		{"TestA/sub", "", "TestA/sub: SKIP on stock, \"\""},
		{"TestA/more", "PASS", "on the patched daemon alone"},
		{"TestB", "PASS", "TestB: FAIL on stock"},
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
