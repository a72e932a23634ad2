// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bluekeyes/go-gitdiff/gitdiff"
)

const matrixIntro = `# Patches

One folder for each supported release line of containerd. ` + "`BASE`" + ` pins upstream's version, ` + "`series`" + ` is the order.
A patch has the same number in every line. Each begins with what a user saw, why, what it does and the risk.

` + "`hack/refresh.sh LINE`" + ` writes this table and ` + "`hack/verify.sh LINE`" + ` checks it. The numbers are lines added and removed,
without tests and removed files; "same" means the same lines as in the newest line.

`

// matrix is the text of patches/README.md: a row for each patch, a column for each line. Lines are compared
// with the last one, the newest.
func matrix(dir string, lines []string) (string, error) {
	type cell struct {
		carried int
		change  string
	}
	cells := map[string]map[string]cell{}
	titles := map[string]string{}
	totals := map[string]int{}
	versions := map[string]string{}
	for _, line := range lines {
		base, err := os.ReadFile(filepath.Join(dir, line, "BASE"))
		if err != nil {
			return "", err
		}
		for l := range strings.Lines(string(base)) {
			if v, ok := strings.CutPrefix(l, "VERSION="); ok {
				versions[line] = strings.TrimSpace(v)
			}
		}
		names, err := readSeries(filepath.Join(dir, line, "series"))
		if err != nil {
			return "", err
		}
		for _, name := range names {
			p, err := readPatch(filepath.Join(dir, line, name))
			if err != nil {
				return "", err
			}
			carried, _ := p.changedLines()
			totals[line] += carried
			if cells[name] == nil {
				cells[name] = map[string]cell{}
			}
			cells[name][line] = cell{carried, p.change()}
			titles[name] = p.title
		}
	}

	var b strings.Builder
	b.WriteString(matrixIntro + "| patch |")
	for _, line := range lines {
		fmt.Fprintf(&b, " %s (%s) |", line, versions[line])
	}
	b.WriteString("\n| --- |" + strings.Repeat(" --- |", len(lines)) + "\n")
	newest := lines[len(lines)-1]
	var names []string
	for name := range cells {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "| %s %s |", name[:4], titles[name])
		for _, line := range lines {
			c, ok := cells[name][line]
			switch {
			case !ok:
				b.WriteString(" - |")
			case line != newest && c.change == cells[name][newest].change:
				fmt.Fprintf(&b, " [%d, same](%s/%s) |", c.carried, line, name)
			default:
				fmt.Fprintf(&b, " [%d](%s/%s) |", c.carried, line, name)
			}
		}
		b.WriteString("\n")
	}
	b.WriteString("| all |")
	for _, line := range lines {
		fmt.Fprintf(&b, " %d |", totals[line])
	}
	b.WriteString("\n")
	return b.String(), nil
}

// change is what a patch adds and removes, without where and between which lines.
func (p *patch) change() string {
	var b strings.Builder
	for _, f := range p.files {
		fmt.Fprintln(&b, f.OldName, f.NewName)
		if f.IsDelete {
			continue // what upstream had in it is upstream's
		}
		for _, frag := range f.TextFragments {
			for _, l := range frag.Lines {
				if l.Op != gitdiff.OpContext {
					b.WriteString(l.String())
				}
			}
		}
	}
	return b.String()
}
