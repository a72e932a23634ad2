// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Ci runs the stages of "make test", goes on after a failed one where what follows does not need
// it, and ends with one table and one line of totals.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/cnireload/cnireload/hack/internal/gotest"
)

func main() {
	root := flag.String("root", "", "the checkout")
	only := flag.String("stages", "", "comma-separated stages to run instead of all, with no regard to what they need")
	line := flag.String("line", os.Getenv("LINE"), "the line that is tested whole (default: the newest); the others are verified and built")
	short := flag.Bool("short", false, "leave out the slow tests of the stages unit and hack")
	all := flag.Bool("all", false, `run what takes hours, too, and on stock what was seen before ("make test-all")`)
	flag.Parse()
	if err := os.Chdir(*root); err != nil {
		fmt.Fprintln(os.Stderr, "ci:", err)
		os.Exit(2)
	}
	supported := lines()
	if *line == "" {
		*line = supported[len(supported)-1]
	}
	if !slices.Contains(supported, *line) {
		fmt.Fprintf(os.Stderr, "ci: no line %q: supported are %s\n", *line, strings.Join(supported, ", "))
		os.Exit(2)
	}
	list, seen := stages(supported, *line, *short), "1"
	if *all {
		list, seen = append(list, long(*line)...), ""
	}
	_ = os.Setenv("CNIRELOAD_SEEN", seen)
	if *all && os.Getenv("CNIRELOAD_ROUNDS") == "" {
		_ = os.Setenv("CNIRELOAD_ROUNDS", "3")
	}
	list, err := choose(list, *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "ci:", err)
		os.Exit(2)
	}
	if !runAll(list, os.Stdout) {
		os.Exit(1)
	}
}

// counts is how many tests of a stage ended how, and for which reasons how many were skipped. A stage
// that is one command is one test.
type counts struct {
	passed, failed, skipped int
	why                     map[string]int
}

func (c *counts) add(d counts) {
	c.passed += d.passed
	c.failed += d.failed
	c.skipped += d.skipped
	for reason, n := range d.why {
		if c.why == nil {
			c.why = map[string]int{}
		}
		c.why[reason] += n
	}
}

// stage is one row of the table.
type stage struct {
	name  string
	needs []string
	root  bool
	// beside says that it may run at the same time as those before it that have it, too.
	beside bool
	run    step
}

// step does some of a stage and prints what it does.
type step func(io.Writer) (counts, error)

// stages returns all that "make test" runs. One line is tested whole; of the others it is shown that their
// patches apply and build.
func stages(lines []string, line string, short bool) []stage {
	speed := "-short=" + strconv.FormatBool(short)
	list := []stage{
		{name: "deps", run: command("hack/deps.sh")},
		{name: "format", run: format},
		{name: "vet", run: inModules("go", "vet", "./...")},
		{name: "platforms", run: command("hack/platforms.sh")},
		{name: "staticcheck", run: sequence(command("hack/tools.sh", "dev"), inModules("_output/tools/bin/staticcheck", "./..."))},
		{name: "shellcheck", needs: []string{"deps"}, run: shellcheck},
		{name: "actionlint", run: sequence(command("hack/tools.sh", "dev"), actionlint)},
	}
	for _, l := range lines {
		list = append(list, stage{name: "verify " + l, run: command("hack/verify.sh", l)})
		if l != line {
			list = append(list, stage{name: "build " + l, needs: []string{"verify " + l}, run: sequence(command("hack/build.sh", l), command("hack/checksums.sh", l))})
		}
	}
	list = append(list,
		stage{name: "portable " + line, needs: []string{"verify " + line}, run: command("hack/platforms.sh", line)},
		stage{name: "unit", needs: []string{"deps"}, run: goTest(".", false, "-race", speed, "./...")},
		// One at a time: go test takes one fuzz target. Minimizing an input that is merely new would
		// take most of the time.
		stage{name: "fuzz", needs: []string{"unit"}, run: sequence(fuzz("cnireload", "FuzzScan", 20000), fuzz("cnireload/conftemplate", "FuzzTemplate", 20000),
			fuzz("cnireload/rules", "FuzzGates", 20000), fuzz("groupcommit", "FuzzQueue", 1000, "-race"))},
		stage{name: "tools", needs: []string{"deps"}, run: command("hack/tools.sh")},
	)
	build := "build " + line
	return append(list,
		stage{name: build, needs: []string{"verify " + line}, run: sequence(command("hack/build.sh", line), command("hack/build.sh", "--stock", line), command("hack/checksums.sh", line))},
		// critest mostly waits, and nothing of it is measured.
		stage{name: "hack", beside: true, run: goTest("hack", false, "-count=1", speed, "./...")},
		stage{name: "upstream " + line, beside: true, needs: []string{build}, run: command("hack/upstream-tests.sh", line)},
		stage{name: "package " + line, beside: true, needs: []string{build}, root: true, run: command("hack/package-test.sh", line)},
		stage{name: "critest", beside: true, needs: []string{"tools", build}, root: true, run: command("hack/test.sh", "critest", line)},
		stage{name: "e2e", needs: []string{"tools", build}, root: true,
			run: goTest("test", true, "-count=1", "-timeout=60m", "./bench/...", "./cmd/...", "./durability/...", "./e2e/...", "./fake/...", "./harness/...", "./slowsync/...", "./storm/...", "./vendors/...")},
	)
}

// long returns what "make test-all" runs after that. It takes hours.
func long(line string) []stage {
	build := "build " + line
	return []stage{
		{name: "cri " + line, needs: []string{build}, root: true, run: command("hack/cri-integration.sh", line)},
		{name: "upstream race " + line, needs: []string{build}, run: command("hack/upstream-tests.sh", "--race", line)},
		{name: "node", needs: []string{"tools", build}, root: true, run: command("hack/test.sh", "test-node", line)},
		{name: "race", needs: []string{"tools", build}, root: true, run: command("hack/test.sh", "race", line)},
		{name: "soak", needs: []string{"tools", build}, root: true, run: command("hack/test.sh", "soak", line)},
		{name: "arm64", needs: []string{"deps"}, root: true, run: command("hack/arm64.sh")},
	}
}

// fuzz runs a fuzz target of a package of the library for a fixed number of inputs. One of the queue is many
// writes to a disk.
func fuzz(name, target string, inputs int, flags ...string) step {
	args := append(flags, "-run=^$", "-fuzz=^"+target+"$", fmt.Sprintf("-fuzztime=%dx", inputs), "-fuzzminimizetime=10x", "./"+name)
	return goTest(".", true, args...)
}

// lines returns the supported lines, those with patches/LINE/BASE.
func lines() []string {
	bases, _ := filepath.Glob("patches/*/BASE")
	var list []string
	for _, b := range bases {
		list = append(list, filepath.Base(filepath.Dir(b)))
	}
	return list
}

// choose returns the named stages, without what they need; all when none is named. A name stands
// for its stage of every line.
func choose(all []stage, only string) ([]stage, error) {
	if only == "" {
		return all, nil
	}
	var list []stage
	for _, name := range strings.Split(only, ",") {
		n := len(list)
		for _, s := range all {
			if s.name == name || strings.HasPrefix(s.name, name+" ") {
				s.needs = nil
				list = append(list, s)
			}
		}
		if len(list) == n {
			var names []string
			for _, s := range all {
				names = append(names, s.name)
			}
			return nil, fmt.Errorf("no stage %q: there are %s", name, strings.Join(names, ", "))
		}
	}
	return list, nil
}

// row is what became of a stage.
type row struct {
	counts
	bad  bool
	note string
	took time.Duration
}

// runAll runs the stages and prints the table. It tells whether all is well.
func runAll(list []stage, w io.Writer) bool {
	rows := map[string]row{}
	for rest := list; len(rest) > 0; {
		// Those that may run beside each other and do not need each other.
		n := 1
		for n < len(rest) && rest[n-1].beside && rest[n].beside {
			n++
		}
		if n == 1 {
			rows[rest[0].name] = rest[0].do(rows, w)
		} else {
			maps.Copy(rows, together(rest[:n], rows, w))
		}
		rest = rest[n:]
	}

	var total counts
	var table, reasons bytes.Buffer
	tw := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "stage\tpassed\tfailed\tskipped\ttime\t")
	good := true
	for _, s := range list {
		r := rows[s.name]
		good = good && !r.bad
		total.add(r.counts)
		for _, reason := range slices.Sorted(maps.Keys(r.why)) {
			fmt.Fprintf(&reasons, "%s: %d skipped: %s\n", s.name, r.why[reason], reason)
		}
		note, _, _ := strings.Cut(r.note, "\n")
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%s\t%s\n", s.name, r.passed, r.failed, r.skipped, r.took.Round(time.Second), note)
	}
	tw.Flush()
	fmt.Fprintf(w, "\n%s\n", table.String())
	if reasons.Len() > 0 {
		fmt.Fprintf(w, "%s\n", reasons.String())
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return good
}

// together runs stages at the same time. What each prints is shown when it has ended.
func together(list []stage, before map[string]row, w io.Writer) map[string]row {
	rows := map[string]row{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, s := range list {
		all.Go(func() {
			var out output
			r := s.do(before, &out)
			mu.Lock()
			defer mu.Unlock()
			rows[s.name] = r
			_, _ = w.Write(out.text.Bytes())
		})
	}
	all.Wait()
	return rows
}

// output keeps what is printed. A command's stdout and stderr are written at the same time.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

// do runs the stage, unless one that it needs has failed.
func (s stage) do(before map[string]row, w io.Writer) row {
	start := time.Now()
	var r row
	if i := slices.IndexFunc(s.needs, func(n string) bool { return before[n].bad }); i >= 0 {
		r.note, r.skipped, r.bad = "not run: "+s.needs[i]+" failed", 1, true
	} else if s.root && os.Getuid() != 0 {
		r.note, r.failed, r.bad = "needs root: run make test as root", 1, true
	} else {
		fmt.Fprintf(w, "=== %s\n", s.name)
		var err error
		if r.counts, err = s.run(w); err != nil {
			r.note = err.Error()
			r.failed = max(r.failed, 1)
		}
		r.bad = r.failed > 0
	}
	if r.bad {
		fmt.Fprintf(w, "--- %s: %s\n", s.name, r.note)
	}
	r.took = time.Since(start)
	return r
}

var (
	totals = regexp.MustCompile(`^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$`)
	skips  = regexp.MustCompile(`(?m)^(\d+) skipped: (.+)$`)
)

// command runs a program of the checkout. What it prints last may be its own count, with a line before
// it for each reason to skip.
func command(name string, args ...string) step {
	return func(w io.Writer) (counts, error) {
		var out bytes.Buffer
		cmd := exec.Command(name, args...)
		cmd.Stdout = io.MultiWriter(w, &out)
		cmd.Stderr = w
		err := cmd.Run()
		if err != nil {
			err = fmt.Errorf("%s: %w, see above", strings.Join(append([]string{name}, args...), " "), err)
		}
		last := strings.TrimSpace(out.String())
		last = last[strings.LastIndexByte(last, '\n')+1:]
		if m := totals.FindStringSubmatch(last); m != nil {
			n := func(s string) int { i, _ := strconv.Atoi(s); return i }
			c := counts{passed: n(m[1]), failed: n(m[2]), skipped: n(m[3])}
			for _, s := range skips.FindAllStringSubmatch(out.String(), -1) {
				c.add(counts{why: map[string]int{s[2]: n(s[1])}})
			}
			return c, err
		}
		return one(err)
	}
}

// one counts a step that is one test.
func one(err error) (counts, error) {
	if err != nil {
		return counts{failed: 1}, err
	}
	return counts{passed: 1}, nil
}

// sequence runs steps up to the first that fails.
func sequence(steps ...step) step {
	return func(w io.Writer) (counts, error) {
		var sum counts
		for _, step := range steps {
			c, err := step(w)
			sum.add(c)
			if err != nil {
				return sum, err
			}
		}
		return sum, nil
	}
}

// inModules runs a command in each of the checkout's Go modules.
func inModules(name string, args ...string) step {
	return func(w io.Writer) (counts, error) {
		var c counts
		var failed []string
		for _, dir := range []string{".", "hack", "test"} {
			prog := name
			if strings.Contains(name, "/") {
				prog, _ = filepath.Abs(name)
			}
			cmd := exec.Command(prog, args...)
			cmd.Dir = dir
			cmd.Stdout, cmd.Stderr = w, w
			if err := cmd.Run(); err != nil {
				failed = append(failed, fmt.Sprintf("%s (%v)", dir, err))
				c.failed++
				continue
			}
			c.passed++
		}
		if failed != nil {
			return c, fmt.Errorf("%s failed in %s, see above", filepath.Base(name), strings.Join(failed, ", "))
		}
		return c, nil
	}
}

// format finds Go files that gofmt would change.
func format(io.Writer) (counts, error) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return one(fmt.Errorf("go env GOROOT: %w", err))
	}
	gofmt := filepath.Join(strings.TrimSpace(string(goroot)), "bin", "gofmt")
	out, err := exec.Command(gofmt, "-l", "cnireload", "groupcommit", "internal", "status", "hack", "test").CombinedOutput()
	if err == nil && len(out) > 0 {
		err = fmt.Errorf("gofmt would change %s", strings.Join(strings.Fields(string(out)), ", "))
	} else if err != nil {
		err = fmt.Errorf("gofmt: %w: %s", err, out)
	}
	return one(err)
}

// shellcheck reads every script.
func shellcheck(w io.Writer) (counts, error) {
	scripts, _ := filepath.Glob("hack/*.sh")
	return command("shellcheck", append(scripts, ".ci/run")...)(w)
}

// actionlint reads the workflows.
func actionlint(w io.Writer) (counts, error) {
	files, _ := filepath.Glob(".github/workflows/*.yml")
	return command("_output/tools/bin/actionlint", files...)(w)
}

// goTest runs the tests of the module in dir. With each, it prints every test that ends.
func goTest(dir string, each bool, args ...string) step {
	return func(w io.Writer) (counts, error) {
		cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
		cmd.Dir = dir
		run, err := gotest.Do(cmd, func(r gotest.Result, pkg, test string, took time.Duration) {
			if (test == "" && r != gotest.Skip) || (each && test != "" && strings.Count(test, "/") < 2) {
				fmt.Fprintf(w, "    %s %s %s %s\n", r, pkg, test, took.Round(10*time.Millisecond))
			}
		})
		if err != nil {
			return counts{}, err
		}
		failed := run.Failed()
		for _, key := range failed {
			if text := gotest.Said(run.Output[key]); text != "" {
				fmt.Fprintf(w, "FAIL %s\n%s", key, text)
			}
		}
		c := counts{run.Count(gotest.Pass), run.Count(gotest.Fail), run.Count(gotest.Skip), run.Skipped()}
		if len(failed) > 0 {
			const most = 5
			more := ""
			if n := len(failed) - most; n > 0 {
				more, failed = fmt.Sprintf(" and %d more", n), failed[:most]
			}
			return c, fmt.Errorf("failed: %s%s", strings.ReplaceAll(strings.Join(failed, ", "), modulePath, ""), more)
		}
		return c, nil
	}
}

const modulePath = "github.com/cnireload/cnireload/"
