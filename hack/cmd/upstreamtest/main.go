// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Upstreamtest runs upstream's own tests on the stock and on the patched tree and compares the
// results test by test: the patched tree must pass, skip and fail exactly what stock does.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cnireload/cnireload/hack/internal/gotest"
)

// packages are those that the patches lean on. Those whose tests link what the patches change come
// from the trees; the test program of any other package is the same on both.
var packages = []string{"./internal/cri/...", "./plugins/cri/...", "./core/metadata/..."}

// The flags are those of hack/build.sh, so that what is compiled there is used here.
const tags = "-tags=urfave_cli_no_docs,static_build,netgo,osusergo"

func main() {
	stock := flag.String("stock", "", "the stock tree")
	patched := flag.String("patched", "", "the patched tree")
	known := flag.String("known", "", "file that lists the differences that are meant")
	run := flag.String("run", "", "run only these tests, as in go test -run")
	race := flag.Bool("race", false, "with the race detector")
	flag.Parse()
	if err := compareTrees(*stock, *patched, *known, *run, *race); err != nil {
		fmt.Fprintln(os.Stderr, "upstreamtest:", err)
		os.Exit(1)
	}
}

func compareTrees(stockDir, patchedDir, knownFile, only string, race bool) error {
	text, err := os.ReadFile(knownFile)
	if err != nil {
		return fmt.Errorf("read the list of known differences: %w", err)
	}
	known, err := parseKnown(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", knownFile, err)
	}
	more, err := reached(patchedDir)
	if err != nil {
		return err
	}
	args := slices.Concat(packages, more)
	if only != "" {
		args = slices.Insert(args, 0, "-run="+only)
	}
	stock, err := runTests("stock", stockDir, race, args)
	if err != nil {
		return err
	}
	patched, err := runTests("patched", patchedDir, race, args)
	if err != nil {
		return err
	}
	faults := compare(stock, patched, known, only == "")
	for _, f := range faults {
		fmt.Println(f)
	}
	fmt.Printf("stock: %d passed, %d failed, %d skipped\n", stock.Count(gotest.Pass), stock.Count(gotest.Fail), stock.Count(gotest.Skip))
	fmt.Printf("patched: %d passed, %d failed, %d skipped\n", patched.Count(gotest.Pass), patched.Count(gotest.Fail), patched.Count(gotest.Skip))
	// What hack/cmd/ci reads: the reasons, and the last line.
	skipped := patched.Skipped()
	for _, why := range slices.Sorted(maps.Keys(skipped)) {
		fmt.Printf("%d skipped: %s\n", skipped[why], why)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", patched.Count(gotest.Pass), len(faults), patched.Count(gotest.Skip))
	if len(faults) > 0 {
		return fmt.Errorf("%d results are neither the same on both trees nor listed in %s", len(faults), filepath.Base(knownFile))
	}
	return nil
}

// reached returns the packages whose tests link a package that the patches change.
func reached(patchedDir string) ([]string, error) {
	diff := exec.Command("git", "diff", "--name-only", "refs/cnireload/base", "--", "*.go")
	diff.Dir = patchedDir
	files, err := diff.Output()
	if err != nil {
		return nil, fmt.Errorf("ask git what the patches change: %w", err)
	}
	list := exec.Command("go", "list", "-mod=mod", tags, "-test", "-json=ImportPath,Deps", "./...")
	list.Dir = patchedDir
	list.Env = append(os.Environ(), "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in the patched tree: %w, see above", err)
	}
	return linking(strings.Fields(string(files)), out)
}

// linking returns those of go list's packages whose test programs link one of the changed files.
func linking(files []string, list []byte) ([]string, error) {
	const module = "github.com/containerd/containerd/v2/"
	changed := map[string]bool{}
	for _, f := range files {
		changed[module+path.Dir(f)] = true
	}
	var found []string
	for dec := json.NewDecoder(bytes.NewReader(list)); ; {
		var p struct {
			ImportPath string
			Deps       []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, fmt.Errorf("read what go list says: %w", err)
		}
		pkg, ok := strings.CutSuffix(p.ImportPath, ".test")
		// These run against a daemon (see hack/cri-integration.sh), or are targets for a fuzzing service.
		if !ok || strings.HasPrefix(pkg, module+"integration") || strings.HasPrefix(pkg, module+"contrib/") {
			continue
		}
		if slices.ContainsFunc(p.Deps, func(dep string) bool {
			// "PACKAGE [TEST]" is a package built for a test.
			dep, _, _ = strings.Cut(dep, " ")
			return changed[dep]
		}) {
			found = append(found, pkg)
		}
	}
}

// runTests runs the packages' tests. What fails runs once more by itself: some of upstream's
// tests depend on the machine's speed.
func runTests(label, dir string, race bool, args []string) (*gotest.Run, error) {
	do := func(args ...string) (*gotest.Run, error) {
		cgo, limit := "CGO_ENABLED=0", "-timeout=10m"
		if race {
			cgo, limit = "CGO_ENABLED=1", "-timeout=30m"
			args = slices.Insert(slices.Clone(args), 0, "-race")
		}
		cmd := exec.Command("go", append([]string{"test", "-json", "-mod=mod", "-trimpath", limit, tags}, args...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), cgo)
		run, err := gotest.Do(cmd, func(r gotest.Result, pkg, test string, took time.Duration) {
			if test == "" && r != gotest.Skip {
				fmt.Printf("    %s: %s %s %s\n", label, r, pkg, took.Round(100*time.Millisecond))
			}
		})
		if err != nil {
			return nil, fmt.Errorf("%s tree: %w", label, err)
		}
		return run, nil
	}
	run, err := do(args...)
	if err != nil {
		return nil, err
	}
	for _, key := range run.Failed() {
		pkg, test, _ := strings.Cut(key, " ")
		if test == "" || strings.Contains(test, "/") {
			continue
		}
		again, err := do("-count=1", "-run=^"+test+"$", pkg)
		if err != nil {
			return nil, err
		}
		if again.Tests[key] == gotest.Pass {
			fmt.Printf("    %s: %s passed when run again by itself\n", label, key)
		}
		for k, result := range again.Tests {
			run.Tests[k] = result
		}
	}
	return run, nil
}

// known is what hack/upstream-tests.txt lists: tests that fail on stock too, tests that the
// patches remove with the code they test.
type known struct{ fail, gone map[string]bool }

func parseKnown(text string) (known, error) {
	k := known{map[string]bool{}, map[string]bool{}}
	for l := range strings.Lines(text) {
		l, _, _ = strings.Cut(l, "#")
		f := strings.Fields(l)
		if len(f) == 0 {
			continue
		}
		if len(f) != 3 || f[0] != "fail" && f[0] != "gone" {
			return k, fmt.Errorf(`%q is not "fail PACKAGE TEST" or "gone PACKAGE TEST"`, strings.TrimSpace(l))
		}
		set := k.fail
		if f[0] == "gone" {
			set = k.gone
		}
		set[f[1]+" "+f[2]] = true
	}
	return k, nil
}

// listed tells whether the set holds the test or the one that it is a subtest of.
func listed(set map[string]bool, key string) bool {
	for key != "" {
		if set[key] {
			return true
		}
		i := strings.LastIndexByte(key, '/')
		if i < strings.IndexByte(key, ' ') {
			return false
		}
		key = key[:i]
	}
	return false
}

// compare returns a line for each result that is not as it must be.
func compare(stock, patched *gotest.Run, k known, all bool) []string {
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for key, s := range stock.Tests {
		p, ok := patched.Tests[key]
		switch {
		case s == gotest.Fail && !listed(k.fail, key):
			fault("%s fails on stock and is not listed:\n%s", key, stock.Output[key])
		case !ok && !listed(k.gone, key):
			fault("%s does not run on the patched tree", key)
		case ok && p != s && (s != gotest.Fail || p == gotest.Skip):
			fault("%s: %s on stock, %s on the patched tree:\n%s", key, s, p, patched.Output[key])
		case ok && listed(k.gone, key):
			fault("%s is listed as gone and runs on the patched tree", key)
		}
	}
	for key, p := range patched.Tests {
		if _, ok := stock.Tests[key]; !ok && p == gotest.Fail {
			fault("%s, which stock has not, fails on the patched tree:\n%s", key, patched.Output[key])
		}
	}
	if all {
		for key := range k.fail {
			if s, ok := stock.Tests[key]; !ok {
				fault("%s is listed and does not exist on stock", key)
			} else if s == gotest.Pass {
				// Not a fault: such a test may depend on the machine.
				fmt.Printf("    %s is listed as failing on stock and passed here\n", key)
			}
		}
	}
	slices.Sort(faults)
	return faults
}
