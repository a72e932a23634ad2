// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package gotest

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
)

func TestRead(t *testing.T) {
	const events = `{"ImportPath":"p/broken [p/broken.test]","Action":"build-output","Output":"x.go:1: no\n"}
{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"said\n"}
{"Action":"fail","Package":"p","Test":"TestA","Elapsed":0}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"run","Package":"p","Test":"TestB/sub"}
{"Action":"pass","Package":"p","Test":"TestB/sub"}
{"Action":"pass","Package":"p","Test":"TestB"}
{"Action":"run","Package":"p","Test":"TestCutOff"}
not json
{"Action":"fail","Package":"p","Elapsed":1.25}
{"Action":"fail","Package":"p/broken","Elapsed":0}
{"Action":"skip","Package":"p/none","Elapsed":0}`
	var ended []string
	run, err := Read(strings.NewReader(events), func(r Result, pkg, test string, took time.Duration) {
		ended = append(ended, fmt.Sprint(r, " ", pkg, " ", test, " ", took))
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Result{"p TestA": Fail, "p TestB": Pass, "p TestB/sub": Pass, "p TestCutOff": Fail, "p/broken": Fail}
	if !maps.Equal(run.Tests, want) {
		t.Errorf("got %v, want %v", run.Tests, want)
	}
	if run.Count(Pass) != 1 || run.Count(Fail) != 3 {
		t.Errorf("%d passed, %d failed, want 1 and 3", run.Count(Pass), run.Count(Fail))
	}
	if got := run.Output["p/broken"] + run.Output["p TestA"]; got != "x.go:1: no\nsaid\n" {
		t.Errorf("output %q", got)
	}
	if len(ended) != 6 || ended[3] != "fail p  1.25s" {
		t.Errorf("progress %q", ended)
	}
}

func TestSkipped(t *testing.T) {
	run := &Run{
		Tests: map[string]Result{"p TestA": Skip, "p TestB": Skip, "p TestC": Skip, "p TestD": Pass, "p TestD/sub": Skip},
		Output: map[string]string{
			"p TestA":     "=== RUN   TestA\n    a_test.go:12: needs arm64: this is amd64\n--- SKIP: TestA (0.00s)\n",
			"p TestB":     "=== RUN   TestB\n    b_test.go:7: needs arm64: this is amd64\n--- SKIP: TestB (0.00s)\n",
			"p TestD/sub": "    d_test.go:1: not this one\n",
		},
	}
	if got, want := run.Skipped(), (map[string]int{"needs arm64: this is amd64": 2, "no reason given": 1}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
