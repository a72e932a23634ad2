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
	flag.Parse()
	err := errors.New("which side?")
	if *inside {
		if flag.NArg() > 0 {
			err = runInside(harness.Side(flag.Arg(0)), *work, *busybox, flag.Args()[1:])
		}
	} else {
		err = compareSides(*work, *busybox, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "criintegration:", err)
		os.Exit(1)
	}
}

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
		if t.run && match.MatchString(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	results := map[harness.Side]map[string]string{}
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		if err := harness.Preflight("make test-cri", side); err != nil {
			return err
		}
		if err := complete(filepath.Join(work, string(side), "cri-integration.test"), list); err != nil {
			return err
		}
		if results[side], err = runSide(side, work, busybox, names); err != nil {
			return fmt.Errorf("%s: %w", side, err)
		}
	}
	faults := compare(results[harness.Stock], results[harness.Patched], list)
	for _, f := range faults {
		fmt.Println(f)
	}
	fmt.Println("left out:")
	skipped := 0
	for _, name := range slices.Sorted(maps.Keys(list)) {
		if !list[name].run {
			skipped++
			fmt.Printf("    %s: %s\n", name, list[name].reason)
		}
	}
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		pass, fail, skip := count(results[side])
		fmt.Printf("%s: %d passed, %d failed, %d skipped by themselves, of %d\n", side, pass, fail, skip, len(names))
	}
	pass, _, skip := count(results[harness.Patched])
	fmt.Printf("%d passed, %d failed, %d skipped\n", pass, len(faults), skipped+skip)
	if len(faults) > 0 {
		return fmt.Errorf("%d results are not as they must be: the daemons' logs are in %s", len(faults), work)
	}
	return nil
}

// listed is what tests.txt says of a test.
type listed struct {
	run, fails bool
	reason     string
}

// parseList reads "run TEST", "fail TEST REASON" and "skip TEST REASON".
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
		case what == "run" && name != "" && reason == "":
			list[name] = listed{run: true}
		case (what == "fail" || what == "skip") && reason != "":
			list[name] = listed{run: what == "fail", fails: what == "fail", reason: reason}
		default:
			return nil, fmt.Errorf("%q is none of run TEST, fail TEST REASON, skip TEST REASON", line)
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

// runSide runs the tests in namespaces of their own and returns their results.
func runSide(side harness.Side, work, busybox string, names []string) (map[string]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	root, err := harness.Root()
	if err != nil {
		return nil, err
	}
	base, err := os.MkdirTemp("", harness.Prefix)
	if err != nil {
		return nil, err
	}
	defer os.Remove(base)
	args := []string{"--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "--",
		"/bin/bash", "-c", setup, "setup", base, root, self, "-inside", "-work", work, "-busybox", busybox, string(side)}
	cmd := exec.Command("unshare", append(args, names...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	results := map[string]string{}
	for in := bufio.NewScanner(out); in.Scan(); {
		result, name, ok := strings.Cut(in.Text(), " ")
		if !ok {
			continue
		}
		name, took, _ := strings.Cut(name, " ")
		results[name] = result
		if !strings.Contains(name, "/") {
			fmt.Printf("    %s: %s %s %s\n", side, result, name, took)
		}
	}
	if err := cmd.Wait(); err != nil {
		return nil, err
	}
	return results, nil
}

// compare returns a line for each result that is not as it must be.
func compare(stock, patched map[string]string, list map[string]listed) []string {
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(stock)) {
		s, p := stock[name], patched[name]
		top, _, _ := strings.Cut(name, "/")
		if s == "FAIL" && !list[top].fails {
			faults = append(faults, name+" fails on stock and is not listed so")
		}
		if p != s {
			faults = append(faults, fmt.Sprintf("%s: %s on stock, %q on the patched daemon", name, s, p))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(patched)) {
		if _, ok := stock[name]; !ok {
			faults = append(faults, fmt.Sprintf("%s: %s on the patched daemon alone", name, patched[name]))
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
func runInside(side harness.Side, work, busybox string, names []string) error {
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
	log, err := os.Create(filepath.Join(dir, "containerd.log"))
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
	text, err := os.Create(filepath.Join(dir, "tests.log"))
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
	return nil
}

var ended = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
