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

const module = "github.com/containerd/containerd/v2/"

// packages begin the names of those that the patches lean on. Those whose tests link what the patches
// change come from the trees; the test program of any other package is the same on both.
var packages = []string{module + "internal/cri", module + "plugins/cri", module + "core/metadata"}

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
	changed, err := changes(patchedDir)
	if err != nil {
		return err
	}
	stock, err := runTests("stock", stockDir, changed, known, only, race)
	if err != nil {
		return err
	}
	patched, err := runTests("patched", patchedDir, changed, known, only, race)
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

// changes returns the Go files that the patches change.
func changes(patchedDir string) ([]string, error) {
	diff := exec.Command("git", "diff", "--name-only", "refs/cnireload/base", "--", "*.go")
	diff.Dir = patchedDir
	files, err := diff.Output()
	if err != nil {
		return nil, fmt.Errorf("ask git what the patches change: %w", err)
	}
	return strings.Fields(string(files)), nil
}

// program is the test program of a package.
type program struct {
	pkg string
	// Those that take -test.root have tests that mount, and skip them without it.
	takesRoot bool
}

// programs returns the test programs of a tree that are to run.
func programs(dir string, changed []string) ([]program, error) {
	list := exec.Command("go", "list", "-mod=readonly", tags, "-test", "-json=ImportPath,Deps", "./...")
	list.Dir = dir
	list.Env = append(os.Environ(), "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w, see above", dir, err)
	}
	return choose(changed, out)
}

// choose returns those of go list's packages that have tests and are one of packages or link one of
// the changed files.
func choose(files []string, list []byte) ([]program, error) {
	changed := map[string]bool{}
	for _, f := range files {
		changed[module+path.Dir(f)] = true
	}
	var found []program
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
		wanted := slices.ContainsFunc(packages, func(base string) bool { return pkg == base || strings.HasPrefix(pkg, base+"/") })
		takesRoot := false
		for _, dep := range p.Deps {
			// "PACKAGE [TEST]" is a package built for a test.
			dep, _, _ = strings.Cut(dep, " ")
			wanted = wanted || changed[dep]
			takesRoot = takesRoot || dep == module+"pkg/testutil"
		}
		if wanted {
			found = append(found, program{pkg, takesRoot})
		}
	}
}

// runTests runs the tests of a tree. What fails runs once more by itself: some of upstream's tests
// depend on the machine's speed.
func runTests(label, dir string, changed []string, k known, only string, race bool) (*gotest.Run, error) {
	list, err := programs(dir, changed)
	if err != nil {
		return nil, err
	}
	do := func(list []program, args ...string) (*gotest.Run, error) {
		cgo, limit := "CGO_ENABLED=0", "-timeout=10m"
		if race {
			cgo, limit = "CGO_ENABLED=1", "-timeout=30m"
			args = append(args, "-race")
		}
		all := &gotest.Run{Tests: map[string]gotest.Result{}, Output: map[string]string{}}
		for _, root := range []bool{false, true} {
			cmd := exec.Command("go", append([]string{"test", "-json", "-mod=readonly", "-trimpath", limit, tags}, args...)...)
			if root {
				// What a test mounts, or leaves mounted, ends with it.
				cmd.Args = append(cmd.Args, "-exec=unshare --mount --propagation private")
			}
			n := len(cmd.Args)
			for _, p := range list {
				if root == (p.takesRoot && os.Getuid() == 0 && !k.plain[p.pkg]) {
					cmd.Args = append(cmd.Args, p.pkg)
				}
			}
			if len(cmd.Args) == n {
				continue
			}
			if root {
				cmd.Args = append(cmd.Args, "-test.root")
			}
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
			maps.Copy(all.Tests, run.Tests)
			maps.Copy(all.Output, run.Output)
		}
		return all, nil
	}
	var args []string
	if only != "" {
		args = append(args, "-run="+only)
	}
	run, err := do(list, args...)
	if err != nil {
		return nil, err
	}
	for _, key := range run.Failed() {
		pkg, test, _ := strings.Cut(key, " ")
		i := slices.IndexFunc(list, func(p program) bool { return p.pkg == pkg })
		if test == "" || strings.Contains(test, "/") || i < 0 {
			continue
		}
		again, err := do(list[i:i+1], "-count=1", "-run=^"+test+"$")
		if err != nil {
			return nil, err
		}
		if again.Tests[key] == gotest.Pass {
			fmt.Printf("    %s: %s passed when run again by itself\n", label, key)
		}
		maps.Copy(run.Tests, again.Tests)
	}
	return run, nil
}

// known is what hack/upstream-tests.txt lists: tests that fail on stock too, tests that the patches
// remove with the code they test, and packages whose tests for root are left out.
type known struct{ fail, gone, plain map[string]bool }

func parseKnown(text string) (known, error) {
	k := known{map[string]bool{}, map[string]bool{}, map[string]bool{}}
	for l := range strings.Lines(text) {
		l, _, _ = strings.Cut(l, "#")
		f := strings.Fields(l)
		if len(f) == 0 {
			continue
		}
		switch {
		case len(f) == 3 && f[0] == "fail":
			k.fail[f[1]+" "+f[2]] = true
		case len(f) == 3 && f[0] == "gone":
			k.gone[f[1]+" "+f[2]] = true
		case len(f) == 2 && f[0] == "plain":
			k.plain[f[1]] = true
		default:
			return k, fmt.Errorf(`%q is not "fail PACKAGE TEST", "gone PACKAGE TEST" or "plain PACKAGE"`, strings.TrimSpace(l))
		}
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
