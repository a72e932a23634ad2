// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Criintegration runs upstream's CRI integration tests against a stock and a patched daemon, each in
// namespaces of its own on a throw-away copy of the machine's files, and compares the results.
package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// setup makes the place that a side runs in. It is process 1 there and so collects what shims leave.
//
//go:embed setup.sh
var setup string

//go:embed tests.txt
var testList string

func main() {
	inside := flag.Bool("inside", false, "used by the program itself")
	work := flag.String("work", "", "folder with stock/ and patched/, each with upstream's test programs")
	busybox := flag.String("busybox", "", "a static busybox")
	only := flag.String("run", "", "only the tests whose name matches")
	label := flag.String("label", "", "used by the program itself: added to the names of the logs")
	flag.Parse()
	err := errors.New("which side?")
	if *inside {
		if flag.NArg() > 0 {
			err = runInside(harness.Side(flag.Arg(0)), *work, *busybox, *label, flag.Args()[1:])
		}
	} else {
		err = compareSides(*work, *busybox, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "criintegration:", err)
		os.Exit(1)
	}
}

var bothSides = []harness.Side{harness.Stock, harness.Patched}

func compareSides(work, busybox, only string) error {
	list, err := parseList(testList)
	if err != nil {
		return fmt.Errorf("tests.txt: %w", err)
	}
	match, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	var names []string
	for name, t := range list {
		if t.what != "skip" && match.MatchString(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	results, left := map[harness.Side]map[string]string{}, map[harness.Side]map[string]int{}
	for _, side := range bothSides {
		if err := harness.Preflight("make test-cri", side); err != nil {
			return err
		}
		if err := complete(filepath.Join(work, string(side), "cri-integration.test"), list); err != nil {
			return err
		}
		if results[side], left[side], err = runSide(side, work, busybox, "", names); err != nil {
			return fmt.Errorf("%s: %w", side, err)
		}
	}
	// Some of the tests do not wait for what they have started, and depend on the machine's speed.
	for try := 1; try <= 2; try++ {
		again := suspects(results[harness.Stock], results[harness.Patched], list)
		if len(again) == 0 {
			break
		}
		for _, side := range bothSides {
			fmt.Printf("    %s: alone, again: %s\n", side, strings.Join(again, " "))
			r, _, err := runSide(side, work, busybox, fmt.Sprintf("-again%d", try), again)
			if err != nil {
				return fmt.Errorf("%s: %w", side, err)
			}
			replace(results[side], again, r)
		}
	}
	faults := append(compare(results[harness.Stock], results[harness.Patched], list), leftMore(left[harness.Stock], left[harness.Patched])...)
	for _, f := range faults {
		fmt.Println(f)
	}
	skipped := 0
	for _, name := range slices.Sorted(maps.Keys(list)) {
		if what := map[string]string{"skip": "left out", "fail": "fails on both", "differs": "passes on stock alone"}[list[name].what]; what != "" {
			fmt.Printf("%s: %s: %s\n", what, name, list[name].reason)
		}
		if list[name].what == "skip" {
			skipped++
		}
	}
	for _, side := range bothSides {
		pass, fail, skip := count(results[side])
		fmt.Printf("%s: %d passed, %d failed, %d skipped by themselves, of %d; left behind: %v\n", side, pass, fail, skip, len(names), left[side])
	}
	pass, _, skip := count(results[harness.Patched])
	fmt.Printf("%d passed, %d failed, %d skipped\n", pass, len(faults), skipped+skip)
	if len(faults) > 0 {
		return fmt.Errorf("%d results are not as they must be: the daemons' logs are in %s", len(faults), work)
	}
	return nil
}

// listed is what tests.txt says of a test.
type listed struct{ what, reason string }

// parseList reads "run TEST", and "fail", "differs" or "skip" with "TEST REASON".
func parseList(text string) (map[string]listed, error) {
	list := map[string]listed{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		what, rest, _ := strings.Cut(line, " ")
		name, reason, _ := strings.Cut(rest, " ")
		if _, ok := list[name]; ok {
			return nil, fmt.Errorf("%s is listed twice", name)
		}
		switch {
		case what == "run" && name != "" && reason == "", slices.Contains([]string{"fail", "differs", "skip"}, what) && reason != "":
			list[name] = listed{what, reason}
		default:
			return nil, fmt.Errorf("%q is none of run TEST, fail TEST REASON, differs TEST REASON, skip TEST REASON", line)
		}
	}
	return list, nil
}

// complete checks that the list names the program's tests and no others.
func complete(program string, list map[string]listed) error {
	// It connects before it lists its tests, so they are read from the program's symbols instead.
	b, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var missing []string
	for name := range list {
		if !bytes.Contains(b, []byte("/integration."+name)) {
			missing = append(missing, name)
		}
	}
	for _, m := range testSymbol.FindAllSubmatch(b, -1) {
		if name := string(m[1]); name != "TestMain" {
			if _, ok := list[name]; !ok && !slices.Contains(missing, name) {
				missing = append(missing, name)
			}
		}
	}
	if missing != nil {
		slices.Sort(missing)
		return fmt.Errorf("these are in %s and not in tests.txt, or in tests.txt alone: %s", filepath.Base(program), strings.Join(missing, ", "))
	}
	return nil
}

// The name of a function in the program's table of functions ends with a zero byte.
var testSymbol = regexp.MustCompile(`containerd/v2/integration\.(Test[A-Z][A-Za-z0-9_]*)\x00`)

// runSide runs the tests in namespaces of their own and returns their results, and what they left.
func runSide(side harness.Side, work, busybox, label string, names []string) (results map[string]string, left map[string]int, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	root, err := harness.Root()
	if err != nil {
		return nil, nil, err
	}
	base, err := os.MkdirTemp("", harness.Prefix)
	if err != nil {
		return nil, nil, err
	}
	defer os.Remove(base)
	args := []string{"--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "--",
		"/bin/bash", "-c", setup, "setup", base, root, self, "-inside", "-work", work, "-busybox", busybox, "-label", label, string(side)}
	cmd := exec.Command("unshare", append(args, names...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	results, left = map[string]string{}, map[string]int{}
	for in := bufio.NewScanner(out); in.Scan(); {
		result, name, ok := strings.Cut(in.Text(), " ")
		if !ok {
			continue
		}
		name, took, _ := strings.Cut(name, " ")
		if result == "LEFT" {
			if left[name], err = strconv.Atoi(took); err != nil {
				return nil, nil, err
			}
			continue
		}
		results[name] = result
		if !strings.Contains(name, "/") {
			fmt.Printf("    %s: %s %s %s\n", side, result, name, took)
		}
	}
	if err := cmd.Wait(); err != nil {
		return nil, nil, err
	}
	return results, left, nil
}

// wrong tells what is not as it must be with the results of a test or subtest.
func wrong(name, stock, patched string, list map[string]listed) string {
	top, _, isSub := strings.Cut(name, "/")
	what := list[top].what
	switch {
	case what == "differs":
		if !isSub && (stock != "PASS" || patched != "FAIL") {
			return fmt.Sprintf("%s: %q on stock, %q on the patched daemon, and is listed as passing on stock alone", name, stock, patched)
		}
	case stock != patched:
		return fmt.Sprintf("%s: %q on stock, %q on the patched daemon", name, stock, patched)
	case stock == "FAIL" && what != "fail":
		return name + " fails on both and is not listed so"
	}
	return ""
}

// both are the names of all tests and subtests.
func both(stock, patched map[string]string) []string {
	all := maps.Clone(stock)
	maps.Copy(all, patched)
	return slices.Sorted(maps.Keys(all))
}

// suspects are the tests with a result, or a subtest's, that is not as it must be.
func suspects(stock, patched map[string]string, list map[string]listed) []string {
	found := map[string]bool{}
	for _, name := range both(stock, patched) {
		if wrong(name, stock[name], patched[name], list) != "" {
			top, _, _ := strings.Cut(name, "/")
			found[top] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// replace puts the new results of the tests in the place of the old ones.
func replace(results map[string]string, names []string, by map[string]string) {
	maps.DeleteFunc(results, func(name, _ string) bool {
		top, _, _ := strings.Cut(name, "/")
		return slices.Contains(names, top)
	})
	maps.Copy(results, by)
}

// compare returns a line for each result that is not as it must be.
func compare(stock, patched map[string]string, list map[string]listed) []string {
	var faults []string
	for _, name := range both(stock, patched) {
		if f := wrong(name, stock[name], patched[name], list); f != "" {
			faults = append(faults, f)
		}
	}
	return faults
}

// leftMore returns a line for each kind of which the patched daemon has more left than stock.
func leftMore(stock, patched map[string]int) []string {
	var faults []string
	for _, kind := range slices.Sorted(maps.Keys(patched)) {
		if patched[kind] > stock[kind] {
			faults = append(faults, fmt.Sprintf("the tests leave %d %s on the patched daemon, %d on stock", patched[kind], kind, stock[kind]))
		}
	}
	return faults
}

func count(results map[string]string) (pass, fail, skip int) {
	for name, r := range results {
		switch {
		case strings.Contains(name, "/"):
		case r == "PASS":
			pass++
		case r == "SKIP":
			skip++
		default:
			fail++
		}
	}
	return pass, fail, skip
}

// runInside starts the daemon and runs one test after the other, each in a process of its own: one
// that ends its process ends no other. It prints "RESULT TEST TIME" lines.
func runInside(side harness.Side, work, busybox, label string, names []string) error {
	bin, err := harness.BinDir(side)
	if err != nil {
		return err
	}
	tools, err := harness.ToolsDir()
	if err != nil {
		return err
	}
	dir := filepath.Join(work, string(side))
	os.Setenv("PATH", strings.Join([]string{bin, dir, filepath.Join(tools, "bin"), os.Getenv("PATH")}, ":"))
	if err := layOut(filepath.Join(tools, "cni"), dir); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "containerd"+label+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	// Tests end the daemon and expect that it comes back by itself.
	go func() {
		for {
			cmd := exec.Command("containerd", "--log-level=debug", "--config", configFile)
			cmd.Stdout, cmd.Stderr = log, log
			if err := cmd.Run(); err != nil {
				fmt.Fprintf(log, "ended: %v\n", err)
			}
			// They look for its absence every second.
			time.Sleep(2500 * time.Millisecond)
		}
	}()
	if err := harness.Poll(context.Background(), 60*time.Second, func() error {
		b, err := exec.Command("ctr", "version").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, b)
		}
		return nil
	}); err != nil {
		return fmt.Errorf("containerd does not answer: %w", err)
	}
	if err := importImages(busybox); err != nil {
		return err
	}
	text, err := os.Create(filepath.Join(dir, "tests"+label+".log"))
	if err != nil {
		return err
	}
	defer text.Close()
	for _, name := range names {
		begin := time.Now()
		cmd := exec.Command(filepath.Join(dir, "cri-integration.test"), "-test.v", "-test.timeout=5m", "-test.run=^"+name+"$",
			"-cri-endpoint=unix:///run/containerd/containerd.sock", "-containerd-bin=containerd", "-build-dir="+bin)
		cmd.Dir = "/tmp"
		out, err := cmd.CombinedOutput()
		fmt.Fprintf(log, "######## %s ended: %v\n", name, err)
		fmt.Fprintf(text, "######## %s\n%s\n", name, out)
		found := ""
		for _, m := range ended.FindAllSubmatch(out, -1) {
			if string(m[2]) == name {
				found = string(m[1])
			} else {
				fmt.Printf("%s %s\n", m[1], m[2])
			}
		}
		if found == "" || (err != nil && found == "PASS") {
			found = "FAIL"
		}
		fmt.Printf("%s %s %s\n", found, name, time.Since(begin).Round(100*time.Millisecond))
	}
	left, err := leftBehind()
	if err != nil {
		return err
	}
	for kind, n := range left {
		fmt.Printf("LEFT %s %d\n", kind, n)
	}
	return nil
}

// leftBehind counts what is there of sandboxes once all tests are done.
func leftBehind() (map[string]int, error) {
	left := map[string]int{}
	for kind, args := range map[string][]string{"containers": {"containers", "ls", "-q"}, "tasks": {"tasks", "ls", "-q"}} {
		out, err := exec.Command("ctr", append([]string{"-n", "k8s.io"}, args...)...).Output()
		if err != nil {
			return nil, fmt.Errorf("ctr %s: %w", strings.Join(args, " "), err)
		}
		left[kind] = len(strings.Fields(string(out)))
	}
	for kind, pattern := range map[string]string{"netns": "/run/netns/*", "addresses": "/var/lib/cni/networks/*/*.*.*.*", "attachments": "/var/lib/cni/results/*"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		left[kind] = len(files)
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	left["shims"] = 0
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(stat), " (containerd-shim") && !strings.Contains(string(stat), ") Z ") {
			left["shims"]++
		}
	}
	return left, nil
}

var ended = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
