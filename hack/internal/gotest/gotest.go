// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gotest runs "go test -json" and reads what it says, test by test.
package gotest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Result is how a test ended: "pass", "fail" or "skip".
type Result string

// The results of a test. A test that never ended counts as failed.
const (
	Pass Result = "pass"
	Fail Result = "fail"
	Skip Result = "skip"
)

// Run holds the results of one "go test". The key of Tests is "package test", or "package" alone
// for a package that failed without a failing test: it did not build, or its process died.
type Run struct {
	Tests  map[string]Result
	Output map[string]string
}

// Count returns how many top-level tests ended with the result.
func (r *Run) Count(want Result) int {
	n := 0
	for key, got := range r.Tests {
		_, test, _ := strings.Cut(key, " ")
		if got == want && !strings.Contains(test, "/") {
			n++
		}
	}
	return n
}

// Skipped returns why top-level tests were skipped, and how many for each reason.
func (r *Run) Skipped() map[string]int {
	reasons := map[string]int{}
	for key, got := range r.Tests {
		_, test, _ := strings.Cut(key, " ")
		if got == Skip && !strings.Contains(test, "/") {
			reasons[reason(r.Output[key])]++
		}
	}
	return reasons
}

// at is where a test says something.
var at = regexp.MustCompile(`^[^ :]+\.go:\d+: `)

// reason is what a skipped test said last.
func reason(output string) string {
	text := strings.TrimSpace(Said(output))
	if text == "" {
		return "no reason given"
	}
	last := text[strings.LastIndexByte(text, '\n')+1:]
	return at.ReplaceAllString(strings.TrimSpace(last), "")
}

// Said drops the lines of a test's output in which go test tells which test runs: when a process dies,
// hundreds of tests end with nothing else.
func Said(output string) string {
	var b strings.Builder
	for l := range strings.Lines(output) {
		if !strings.HasPrefix(strings.TrimSpace(l), "=== ") && !strings.HasPrefix(strings.TrimSpace(l), "--- ") {
			b.WriteString(l)
		}
	}
	return b.String()
}

// Failed returns the keys of what failed, in order.
func (r *Run) Failed() []string {
	var list []string
	for key, got := range r.Tests {
		if got == Fail {
			list = append(list, key)
		}
	}
	slices.Sort(list)
	return list
}

// Progress is told about each test that ends and, with an empty test, about each package.
type Progress func(result Result, pkg, test string, took time.Duration)

// Do runs cmd, a "go test -json", and tells progress what has ended.
// The error is about the run itself; failed tests are in Run alone.
func Do(cmd *exec.Cmd, progress Progress) (*Run, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start go test: %w", err)
	}
	run, readErr := Read(stdout, progress)
	waitErr := cmd.Wait()
	if readErr != nil {
		return nil, readErr
	}
	if waitErr != nil {
		if exit := (*exec.ExitError)(nil); !errors.As(waitErr, &exit) {
			return nil, fmt.Errorf("go test: %w", waitErr)
		}
		if len(run.Failed()) == 0 {
			return nil, fmt.Errorf("go test ended with %w and names no failed test: %s", waitErr, strings.TrimSpace(stderr.String()))
		}
	}
	if len(run.Tests) == 0 {
		return nil, fmt.Errorf("go test ran no test: %s", strings.TrimSpace(stderr.String()))
	}
	return run, nil
}

// Read reads the events of "go test -json".
func Read(r io.Reader, progress Progress) (*Run, error) {
	run := &Run{Tests: map[string]Result{}, Output: map[string]string{}}
	failedIn := map[string]bool{}
	in := bufio.NewReader(r)
	for {
		data, err := in.ReadBytes('\n')
		if len(data) > 0 {
			var ev struct {
				Action, Package, ImportPath, Test, Output string
				Elapsed                                   float64
			}
			if json.Unmarshal(data, &ev) != nil {
				// The go command mixes plain lines in when it fails early.
				run.Output[""] += string(data)
				continue
			}
			key := strings.TrimSpace(ev.Package + " " + ev.Test)
			switch ev.Action {
			case "build-output":
				pkg, _, _ := strings.Cut(ev.ImportPath, " ")
				run.Output[pkg] += ev.Output
			case "run":
				// Until it ends: a test that a panic or a timeout cuts off has failed.
				run.Tests[key] = Fail
			case "output":
				run.Output[key] += ev.Output
			case "pass", "fail", "skip":
				if ev.Test != "" {
					run.Tests[key] = Result(ev.Action)
					failedIn[ev.Package] = failedIn[ev.Package] || ev.Action == "fail"
				} else if ev.Action == "fail" && !failedIn[ev.Package] {
					run.Tests[key] = Fail
				}
				if progress != nil {
					progress(Result(ev.Action), ev.Package, ev.Test, time.Duration(ev.Elapsed*float64(time.Second)))
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return run, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read go test's events: %w", err)
		}
	}
}
