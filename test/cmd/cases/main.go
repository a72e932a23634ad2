// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cases runs the end-to-end cases and prints what was seen on stock
// and on patched containerd, one row per public report.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

func main() {
	only := flag.String("case", "", "run only this case, such as S3")
	width := flag.Int("width", 38, "width of the columns of text")
	markdown := flag.Bool("markdown", false, "print a Markdown table, without wrapping")
	flag.Parse()
	// The interrupt of the terminal reaches the tests as well: they clean up,
	// this command waits for them.
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, *only, *width, *markdown); err != nil {
		fmt.Fprintln(os.Stderr, "cases:", err)
		os.Exit(1)
	}
}

// failed is what is shown of a side whose test fails.
const failed = "FAILED"

// row is one case.
type row struct {
	name, report   string
	stock, patched string
	// stockRight and patchedRight say whether that is what must be. A case that runs
	// a side in several ways is right if all are.
	stockRight, patchedRight bool
	ok                       bool
}

// worse tells whether the patched daemon fails where stock does what must be.
func (r *row) worse() bool { return r.stockRight && !r.patchedRight }

func run(ctx context.Context, only string, width int, markdown bool) error {
	if err := harness.Preflight("make cases", harness.Stock, harness.Patched); err != nil {
		return err
	}
	root, err := harness.Root()
	if err != nil {
		return err
	}
	args := []string{"test", "-count=1", "-json"}
	if only != "" {
		args = append(args, "-run", "^Test"+only+"$")
	}
	goTest := exec.Command("go", append(args, "./e2e/...")...)
	goTest.Dir = filepath.Join(root, "test")
	goTest.Stderr = os.Stderr
	out, err := goTest.StdoutPipe()
	if err != nil {
		return err
	}
	if err := goTest.Start(); err != nil {
		return err
	}
	rows, failures, rerr := collect(out)
	err = goTest.Wait()
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if rerr != nil {
		return rerr
	}
	if len(rows) == 0 {
		return fmt.Errorf("no case ran (%v): %s", err, strings.Join(failures, ""))
	}
	if markdown {
		printMarkdown(os.Stdout, rows)
	} else {
		printTable(os.Stdout, rows, width)
	}
	fmt.Println(total(rows))
	bad := 0
	for _, r := range rows {
		if !r.ok {
			bad++
		}
	}
	if bad > 0 || err != nil {
		return fmt.Errorf("%d of %d cases are not as they must be; see \"make test-e2e CASE=...\":\n%s", bad, len(rows), strings.Join(failures, ""))
	}
	return nil
}

// event is one line of go test -json.
type event struct {
	Action  string
	Test    string
	Output  string
	Elapsed float64
}

// collect reads the tests' results and shows progress on stderr.
func collect(r io.Reader) (rows []*row, failures []string, err error) {
	byName := map[string]*row{}
	get := func(test string) *row {
		name := strings.TrimPrefix(strings.SplitN(test, "/", 2)[0], "Test")
		if byName[name] == nil {
			byName[name] = &row{name: name}
			rows = append(rows, byName[name])
		}
		return byName[name]
	}
	output := map[string][]string{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		output[e.Test] = append(output[e.Test], e.Output)
		if _, text, ok := strings.Cut(e.Output, "case-result "); ok {
			var res struct {
				Case, Report, Side, Observed string
				Right                        bool
			}
			if err := json.Unmarshal([]byte(text), &res); err != nil {
				return rows, failures, fmt.Errorf("%s: %w", e.Test, err)
			}
			c := get(e.Test)
			c.report = res.Report
			if res.Side == string(harness.Stock) {
				c.stockRight = res.Right && (c.stockRight || c.stock == "")
				c.stock = res.Observed
			} else {
				c.patchedRight = res.Right && (c.patchedRight || c.patched == "")
				c.patched = res.Observed
			}
		}
		top := !strings.Contains(e.Test, "/")
		switch e.Action {
		case "pass", "fail", "skip":
			if e.Action == "fail" {
				failures = append(failures, strings.Join(output[e.Test], ""))
				// It may have left something behind after what it saw.
				switch side := e.Test[strings.LastIndexByte(e.Test, '/')+1:]; side {
				case string(harness.Stock):
					get(e.Test).stockRight, get(e.Test).stock = false, failed
				case string(harness.Patched):
					get(e.Test).patchedRight, get(e.Test).patched = false, failed
				}
			}
			if top {
				elapsed := time.Duration(e.Elapsed * float64(time.Second)).Round(100 * time.Millisecond)
				fmt.Fprintf(os.Stderr, "%-16s %s %s\n", strings.TrimPrefix(e.Test, "Test"), e.Action, elapsed)
				c := get(e.Test)
				c.ok = e.Action == "pass"
			}
		}
	}
	// Tests of neighbours that have no row of their own count for the run's
	// result and are left out of the table.
	kept := rows[:0]
	for _, c := range rows {
		if c.report != "" || !c.ok {
			kept = append(kept, c)
		}
	}
	slices.SortStableFunc(kept, func(a, b *row) int {
		return cmp.Or(cmp.Compare(a.group(), b.group()), cmp.Compare(a.number(), b.number()))
	})
	return kept, failures, lines.Err()
}

// total is the last line: how many cases were tried, how many of them are public reports, and in how many the
// patched daemon is worse than stock.
func total(rows []*row) string {
	tried, public, worse := 0, 0, []string{}
	for _, r := range rows {
		if r.report == "" {
			continue // a neighbour, listed because it failed
		}
		tried++
		if r.report != "(new)" {
			public++
		}
		if r.worse() {
			worse = append(worse, r.name)
		}
	}
	line := fmt.Sprintf("%d cases tried, %d of them public reports; the patched daemon is worse than stock in ", tried, public)
	if len(worse) == 0 {
		return line + "none"
	}
	return line + fmt.Sprintf("%d: %s", len(worse), strings.Join(worse, ", "))
}

// group orders the cases as they are documented: readiness, re-sync, locks and
// bounds, template, information, never worse than stock.
func (r *row) group() int { return strings.IndexByte("RSLTIN", r.name[0]) }

func (r *row) number() int {
	n, _ := strconv.Atoi(r.name[1:])
	return n
}

var header = []string{"case", "report", "stock", "patched", "ok"}

func (r *row) cells() []string {
	ok := "NO"
	if r.ok {
		ok = "ok"
	}
	return []string{r.name, r.report, r.stock, r.patched, ok}
}

func printMarkdown(w io.Writer, rows []*row) {
	print := func(cells []string) {
		for i := range cells {
			cells[i] = strings.ReplaceAll(cells[i], "|", `\|`)
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
	}
	print(append([]string{}, header...))
	print([]string{"---", "---", "---", "---", "---"})
	for _, r := range rows {
		print(r.cells())
	}
}

func printTable(w io.Writer, rows []*row, width int) {
	widths := []int{5, 18, width, width, 2}
	print := func(cells []string) {
		var columns [][]string
		height := 0
		for i, c := range cells {
			columns = append(columns, wrap(c, widths[i]))
			height = max(height, len(columns[i]))
		}
		for n := range height {
			var b strings.Builder
			for i, c := range columns {
				part := ""
				if n < len(c) {
					part = c[n]
				}
				if i > 0 {
					b.WriteString(" | ")
				}
				fmt.Fprintf(&b, "%-*s", widths[i], part)
			}
			fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
		}
	}
	rule := func() {
		var parts []string
		for _, n := range widths {
			parts = append(parts, strings.Repeat("-", n))
		}
		fmt.Fprintln(w, strings.Join(parts, "-+-"))
	}
	print(header)
	for _, r := range rows {
		rule()
		print(r.cells())
	}
}

// wrap breaks a text into lines; a word that is too long is cut.
func wrap(text string, width int) []string {
	var lines []string
	line := []rune{}
	for _, word := range strings.Fields(text) {
		runes := []rune(word)
		if len(line) > 0 && len(line)+1+len(runes) > width {
			lines, line = append(lines, string(line)), nil
		}
		if len(line) > 0 {
			line = append(line, ' ')
		}
		line = append(line, runes...)
		for len(line) > width {
			lines, line = append(lines, string(line[:width])), line[width:]
		}
	}
	return append(lines, string(line))
}
