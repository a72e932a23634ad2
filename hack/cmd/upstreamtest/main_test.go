// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/cnireload/cnireload/hack/internal/gotest"
)

func TestCompare(t *testing.T) {
	k, err := parseKnown("# comment\nfail p TestFlaky # slow disk\ngone p TestSyncer\n")
	if err != nil {
		t.Fatal(err)
	}
	base := map[string]gotest.Result{"p TestA": "pass", "p TestA/sub": "pass", "p TestB": "skip", "p TestFlaky": "fail", "p TestSyncer": "pass", "p TestSyncer/sub": "pass"}
	same := map[string]gotest.Result{"p TestA": "pass", "p TestA/sub": "pass", "p TestB": "skip", "p TestFlaky": "fail"}
	with := func(m map[string]gotest.Result, key string, r gotest.Result) map[string]gotest.Result {
		c := map[string]gotest.Result{}
		for k, v := range m {
			c[k] = v
		}
		c[key] = r
		if r == "" {
			delete(c, key)
		}
		return c
	}
	for name, tc := range map[string]struct {
		stock, patched map[string]gotest.Result
		want           string
	}{
		"same":                   {base, same, ""},
		"known failure passes":   {base, with(same, "p TestFlaky", "pass"), ""},
		"new test passes":        {base, with(same, "p TestNew", "pass"), ""},
		"new test fails":         {base, with(same, "p TestNew", "fail"), "which stock has not, fails"},
		"breaks":                 {base, with(same, "p TestA/sub", "fail"), "p TestA/sub: pass on stock, fail on the patched tree"},
		"skipped instead of run": {base, with(same, "p TestA", "skip"), "p TestA: pass on stock, skip"},
		"vanished":               {base, with(same, "p TestA", ""), "p TestA does not run on the patched tree"},
		"gone one is back":       {base, with(same, "p TestSyncer", "pass"), "listed as gone and runs"},
		"stock fails unlisted":   {with(base, "p TestA", "fail"), same, "p TestA fails on stock and is not listed"},
		"listed does not exist":  {with(base, "p TestFlaky", ""), with(same, "p TestFlaky", ""), "does not exist on stock"},
		"package does not build": {base, map[string]gotest.Result{"p": "fail"}, "p, which stock has not, fails"},
	} {
		t.Run(name, func(t *testing.T) {
			faults := compare(&gotest.Run{Tests: tc.stock}, &gotest.Run{Tests: tc.patched}, k, true)
			got := strings.Join(faults, "\n")
			if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("faults %q, want %q", got, tc.want)
			}
		})
	}
}

func TestParseKnownRefusesOtherLines(t *testing.T) {
	for _, text := range []string{"skip p TestA", "fail TestA", "fail p TestA because", "plain p TestA"} {
		if _, err := parseKnown(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestChoose(t *testing.T) {
	const m = "github.com/containerd/containerd/v2/"
	list := `{"ImportPath": "` + m + `a"}
{"ImportPath": "` + m + `a.test", "Deps": ["` + m + `b [` + m + `a.test]"]}
{"ImportPath": "` + m + `c", "Deps": ["` + m + `b"]}
{"ImportPath": "` + m + `core/metadata/boltutil.test", "Deps": ["fmt", "` + m + `pkg/testutil"]}
{"ImportPath": "` + m + `core/metadatax.test", "Deps": ["fmt"]}
{"ImportPath": "` + m + `d.test", "Deps": ["` + m + `bb", "fmt"]}
{"ImportPath": "` + m + `integration/client.test", "Deps": ["` + m + `b"]}`
	got, err := choose([]string{"b/x.go", "b/y.go"}, []byte(list))
	if want := []program{{m + "a", false}, {m + "core/metadata/boltutil", true}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if _, err := choose(nil, []byte("{")); err == nil {
		t.Error("half a list was accepted")
	}
}
