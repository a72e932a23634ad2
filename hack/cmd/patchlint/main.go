// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Patchlint checks a line's folder of patches: BASE, series, and the header of every patch.
//
// With -matrix it prints the text of patches/README.md: which line carries which patch.
//
// Whether the patches apply is hack/verify.sh's business; this program reads only the folder.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/bluekeyes/go-gitdiff/gitdiff"
)

const (
	// maxPatches leaves room for one reason each.
	maxPatches = 9
	// maxHeader is how many lines of text a patch may have above its trailers, blank ones included: more is
	// not read.
	maxHeader = 25
	// lineBudget is how much code the patches of a line may carry: added and removed lines outside of
	// tests, and without files that are removed whole.
	lineBudget = 400
)

func main() {
	if len(os.Args) >= 4 && os.Args[1] == "-matrix" {
		text, err := matrix(os.Args[2], os.Args[3:])
		if err != nil {
			fmt.Fprintln(os.Stderr, "patchlint:", err)
			os.Exit(1)
		}
		fmt.Print(text)
		return
	}
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: patchlint patches/LINE, or patchlint -matrix patches LINE...")
		os.Exit(2)
	}
	report, err := lintFolder(os.Args[1])
	fmt.Print(report)
	if err != nil {
		for _, e := range strings.Split(err.Error(), "\n") {
			fmt.Fprintln(os.Stderr, "patchlint:", e)
		}
		os.Exit(1)
	}
}

// patch is a parsed patch file.
type patch struct {
	name     string
	title    string
	body     string
	raw      string
	files    []*gitdiff.File
	trailers []trailer
}

type trailer struct{ key, value string }

// lintFolder checks a folder and returns a table of its patches, and every fault joined.
func lintFolder(dir string) (string, error) {
	line := filepath.Base(dir)
	errs := lintBase(filepath.Join(dir, "BASE"))
	names, err := readSeries(filepath.Join(dir, "series"))
	if err != nil {
		return "", errors.Join(append(errs, err)...)
	}
	errs = append(errs, lintSeries(dir, names)...)

	var report strings.Builder
	total := 0
	for _, name := range names {
		p, err := readPatch(filepath.Join(dir, name))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, e := range p.lint(line) {
			errs = append(errs, fmt.Errorf("%s: %w", name, e))
		}
		carried, all := p.changedLines()
		total += carried
		fmt.Fprintf(&report, "%-64s %4d lines carried, %4d with tests and removed files\n", name, carried, all)
	}
	fmt.Fprintf(&report, "%s: %d of at most %d patches, %d of at most %d carried lines\n", line, len(names), maxPatches, total, lineBudget)
	if total > lineBudget {
		errs = append(errs, fmt.Errorf("series: %d carried lines, at most %d are allowed: move logic into the module", total, lineBudget))
	}
	return report.String(), errors.Join(errs...)
}

var baseKeys = map[string]*regexp.Regexp{
	"MODULE":  regexp.MustCompile(`^[a-z0-9./-]+$`),
	"VERSION": regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`),
	"SUM":     regexp.MustCompile(`^h1:[A-Za-z0-9+/]{43}=$`),
	"COMMIT":  regexp.MustCompile(`^([0-9a-f]{40})?$`),
	"GO":      regexp.MustCompile(`^1\.\d+\.\d+$`),
	"RELEASE": regexp.MustCompile(`^[1-9]\d*$`),
}

// lintBase checks that BASE holds each key once, with a value of the right form.
func lintBase(file string) (errs []error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return []error{fmt.Errorf("read BASE: %w", err)}
	}
	seen := map[string]bool{}
	for l := range strings.Lines(string(data)) {
		l = strings.TrimSuffix(l, "\n")
		if l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		key, value, ok := strings.Cut(l, "=")
		form := baseKeys[key]
		switch {
		case !ok || form == nil:
			errs = append(errs, fmt.Errorf("BASE: %q is not KEY=VALUE with a known key", l))
		case seen[key]:
			errs = append(errs, fmt.Errorf("BASE: %s is there twice", key))
		case !form.MatchString(value):
			errs = append(errs, fmt.Errorf("BASE: %s=%q must match %s", key, value, form))
		}
		seen[key] = true
	}
	for key := range baseKeys {
		if !seen[key] {
			errs = append(errs, fmt.Errorf("BASE: %s is missing", key))
		}
	}
	return errs
}

// readSeries returns the file names in a series file, without its comments.
func readSeries(file string) ([]string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read series: %w", err)
	}
	var names []string
	for l := range strings.Lines(string(data)) {
		l, _, _ = strings.Cut(l, "#")
		if l = strings.TrimSpace(l); l != "" {
			names = append(names, l)
		}
	}
	return names, nil
}

var patchName = regexp.MustCompile(`^\d{4}-[A-Za-z0-9._-]+\.patch$`)

// lintSeries checks names, numbers and that series and folder list the same files.
func lintSeries(dir string, names []string) (errs []error) {
	if len(names) > maxPatches {
		errs = append(errs, fmt.Errorf("series: %d patches, at most %d are allowed: move logic into the module", len(names), maxPatches))
	}
	last := ""
	for _, name := range names {
		if !patchName.MatchString(name) {
			errs = append(errs, fmt.Errorf("series: %q is not named NNNN-subject.patch", name))
			continue
		}
		number := name[:4]
		switch {
		case number == "0000":
			errs = append(errs, fmt.Errorf("series: %s: numbers start at 0001", name))
		case number == last:
			errs = append(errs, fmt.Errorf("series: number %s is used twice", number))
		case number < last:
			errs = append(errs, fmt.Errorf("series: %s comes after %s: the order must be that of the numbers", name, last))
		}
		last = number
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.patch"))
	for _, f := range files {
		if !slices.Contains(names, filepath.Base(f)) {
			errs = append(errs, fmt.Errorf("series does not list %s: add it or remove the file", filepath.Base(f)))
		}
	}
	return errs
}

func readPatch(file string) (*patch, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read patch: %w", err)
	}
	name := filepath.Base(file)
	files, preamble, err := gitdiff.Parse(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("%s: parse diff: %w", name, err)
	}
	header, err := gitdiff.ParsePatchHeader(preamble)
	if err != nil {
		return nil, fmt.Errorf("%s: parse header: %w", name, err)
	}
	p := &patch{name: name, title: header.Title, body: header.Body, raw: preamble, files: files}
	p.trailers = parseTrailers(p.body)
	return p, nil
}

// changedLines counts added and removed lines: those carried (see lineBudget), and all.
func (p *patch) changedLines() (carried, all int) {
	for _, f := range p.files {
		n := 0
		for _, frag := range f.TextFragments {
			n += int(frag.LinesAdded + frag.LinesDeleted)
		}
		all += n
		if !f.IsDelete && !strings.HasSuffix(f.NewName, "_test.go") {
			carried += n
		}
	}
	return carried, all
}

const zeroFrom = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"

func (p *patch) lint(line string) (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	if !strings.HasPrefix(p.raw, zeroFrom) {
		fail("does not start with the zero commit line: let hack/refresh.sh write it")
	}
	if !strings.Contains(p.raw, "\nSubject: [PATCH] ") || p.title == "" {
		fail(`needs a "Subject: [PATCH] ..." line`)
	}
	if prose, _ := splitTrailers(p.body); strings.TrimSpace(prose) == "" {
		fail("has no text between subject and trailers: say what a user saw, why, and the risk")
	}
	errs = append(errs, p.lintTrailers(line)...)

	if len(p.files) == 0 {
		fail("changes no file")
	}
	for _, f := range p.files {
		for _, name := range []string{f.OldName, f.NewName} {
			base, _, _ := strings.Cut(name, "/")
			if b := path.Base(name); b == "go.mod" || b == "go.sum" || base == "vendor" || strings.Contains(name, "/vendor/") {
				fail("touches %s: hack/apply.sh makes such edits, patches do not carry them", name)
				break
			}
		}
		if f.IsBinary {
			fail("changes the binary file %s", f.NewName)
		}
		if f.IsRename || f.IsCopy {
			fail("renames or copies %s: patches are written with --no-renames", f.OldName)
		}
	}
	return errs
}

// rule says what the values of a trailer look like.
type rule struct {
	form *regexp.Regexp
	want string
	many bool
}

const urlForm = `https?://\S+`

// rules are the trailers that every patch must have.
var rules = map[string]rule{
	"Origin": {form: regexp.MustCompile(`^(vendor|(upstream|backport|other), (` + urlForm + `|commit:[0-9a-f]{7,40}))$`),
		want: `"vendor", or "upstream", "backport" or "other" with ", URL" or ", commit:HASH"`},
	"Bug":             {form: regexp.MustCompile(`^` + urlForm + `$`), want: "a URL", many: true},
	"Forwarded":       {form: regexp.MustCompile(`^(no|not-needed|` + urlForm + `)$`), want: `"no", "not-needed" or a URL`},
	"Upstream-Status": {form: regexp.MustCompile(`^(Pending|(Submitted|Backport|Inappropriate|Denied) \[[^\[\]]+\])$`), want: `"Pending", or "Submitted", "Backport", "Inappropriate" or "Denied" with the reason in [brackets]`},
	"Carry":           {form: regexp.MustCompile(`^(carry|drop|backport)$`), want: `"carry", "drop" or "backport"`},
	"Applies-To":      {form: regexp.MustCompile(`^v\d+\.\d+(, v\d+\.\d+)*$`), want: `lines, as in "v2.3, v2.4"`},
	"Drop-When":       {form: regexp.MustCompile(`\S`), want: "the condition under which the patch goes"},
	"Last-Update":     {form: regexp.MustCompile(`^\d{4}-\d\d-\d\d$`), want: "a date YYYY-MM-DD"},
	"Signed-off-by":   {form: regexp.MustCompile(`^[^<>]+ <[^<> ]+@[^<> ]+>$`), want: "Name <address>", many: true},
}

// otherTrailers may stand beside them.
var otherTrailers = []string{"Acked-by", "Applied-Upstream", "Co-authored-by", "Reported-by", "Reviewed-by", "Tested-by"}

func (p *patch) lintTrailers(line string) (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	count := map[string]int{}
	for _, t := range p.trailers {
		r, ok := rules[t.key]
		if !ok {
			if !slices.Contains(otherTrailers, t.key) {
				fail("unknown trailer %q%s", t.key, nearest(t.key))
			}
			continue
		}
		count[t.key]++
		if !r.form.MatchString(t.value) {
			fail("%s: %q must be %s", t.key, t.value, r.want)
			continue
		}
		switch t.key {
		case "Last-Update":
			if _, err := time.Parse(time.DateOnly, t.value); err != nil {
				fail("Last-Update: %q is no date", t.value)
			}
		case "Applies-To":
			if !slices.Contains(strings.Split(t.value, ", "), line) {
				fail("Applies-To: %q does not name %s, whose patch this is", t.value, line)
			}
		}
	}
	for key, r := range rules {
		switch n := count[key]; {
		case n == 0:
			fail("trailer %s is missing (it must be %s)", key, r.want)
		case n > 1 && !r.many:
			fail("trailer %s is there %d times", key, n)
		}
	}
	// A trailer above the last paragraph is one that no tool reads.
	prose, _ := splitTrailers(p.body)
	if n := strings.Count(strings.TrimSpace(prose), "\n") + 1; n > maxHeader {
		fail("%d lines of text, at most %d are read: say what a user saw, why, what it does and the risk", n, maxHeader)
	}
	for l := range strings.Lines(prose) {
		key, _, ok := strings.Cut(l, ":")
		if _, known := rules[key]; ok && known {
			fail("trailer %s stands above the last paragraph", key)
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errs
}

// nearest is a hint for a trailer that differs from a known one in case or in - and _ only.
func nearest(key string) string {
	plain := func(s string) string {
		return strings.ToLower(strings.NewReplacer("-", "", "_", "", " ", "").Replace(s))
	}
	for known := range rules {
		if plain(known) == plain(key) {
			return fmt.Sprintf(": write %s", known)
		}
	}
	return ""
}

// splitTrailers cuts a message before its last paragraph if that is made of trailers.
func splitTrailers(body string) (prose, block string) {
	body = strings.TrimRight(body, "\n")
	i := strings.LastIndex(body, "\n\n")
	prose, block = "", body
	if i >= 0 {
		prose, block = body[:i], body[i+2:]
	}
	first, _, _ := strings.Cut(block, "\n")
	if !trailerLine.MatchString(first) {
		return body, ""
	}
	return prose, block
}

var trailerLine = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9_-]*):\s+(.*)$`)

// parseTrailers returns the trailers of a message; an indented line goes on with the one above.
func parseTrailers(body string) []trailer {
	_, block := splitTrailers(body)
	var list []trailer
	sc := bufio.NewScanner(strings.NewReader(block))
	for sc.Scan() {
		l := sc.Text()
		switch m := trailerLine.FindStringSubmatch(l); {
		case m != nil:
			list = append(list, trailer{m[1], strings.TrimSpace(m[2])})
		case strings.HasPrefix(l, " ") && len(list) > 0:
			list[len(list)-1].value += " " + strings.TrimSpace(l)
		default:
			list = append(list, trailer{key: l})
		}
	}
	return list
}
