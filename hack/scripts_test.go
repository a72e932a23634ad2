// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hack holds tests of the scripts beside it. They run in a copy of the checkout whose one
// line has a small module as its upstream, so that they take seconds.
package hack

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// base pins a module that hack/go.mod requires too, so that it is in the module cache, and the Go at hand.
var base = `MODULE=github.com/bluekeyes/go-gitdiff
VERSION=v0.9.0
SUM=h1:w+O6lkRBOqfGcwF0Lf6FFHQrhmxM0hCJW5+rbilGuSs=
COMMIT=
GO=` + strings.TrimPrefix(runtime.Version(), "go") + `
RELEASE=1
`

const trailers = `
A user saw something wrong.

Origin: vendor
Bug: https://github.com/containerd/containerd/issues/1
Forwarded: no
Upstream-Status: Pending
Carry: carry
Applies-To: v0.9
Drop-When: it is fixed upstream
Last-Update: 2026-11-30
Signed-off-by: A Developer <dev@example.org>`

// checkout is a copy of this one with the line v0.9.
type checkout struct {
	t    *testing.T
	dir  string
	tree string
}

func newCheckout(t *testing.T) *checkout {
	t.Helper()
	if testing.Short() {
		t.Skip("runs git and the go command")
	}
	for _, prog := range []string{"git", "flock"} {
		if _, err := exec.LookPath(prog); err != nil {
			t.Skipf("%s is not installed: run hack/deps.sh as root", prog)
		}
	}
	dir := t.TempDir()
	c := &checkout{t, dir, filepath.Join(dir, "_output/src/v0.9")}
	c.write("patches/v0.9/BASE", base)
	c.write("patches/v0.9/series", "# a comment that stays\n")
	for _, name := range []string{"lib.sh", "fetch.sh", "apply.sh", "refresh.sh", "verify.sh", "build.sh", "bump.sh", "new-line.sh", "go.mod", "go.sum", "cmd", "internal"} {
		if out, err := exec.Command("cp", "-r", name, filepath.Join(c.mkdir("hack"), name)).CombinedOutput(); err != nil {
			t.Fatalf("copy %s: %v: %s", name, err, out)
		}
	}
	if out, err := exec.Command("bash", "-c", `. "$0/lib.sh"; matrix >"$root/patches/README.md"`, filepath.Join(dir, "hack")).CombinedOutput(); err != nil {
		t.Fatalf("patches/README.md: %v: %s", err, out)
	}
	return c
}

func (c *checkout) mkdir(name string) string {
	c.t.Helper()
	dir := filepath.Join(c.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	return dir
}

func (c *checkout) write(name, text string) {
	c.t.Helper()
	c.mkdir(filepath.Dir(name))
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

func (c *checkout) read(name string) string {
	c.t.Helper()
	data, err := os.ReadFile(filepath.Join(c.dir, name))
	if err != nil {
		c.t.Fatal(err)
	}
	return string(data)
}

// try runs a script.
func (c *checkout) try(script string, args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(c.dir, "hack", script), args...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// must runs a script that has to succeed.
func (c *checkout) must(script string, args ...string) {
	c.t.Helper()
	if out, err := c.try(script, args...); err != nil {
		c.t.Fatalf("%s %v: %v:\n%s", script, args, err, out)
	}
}

// refuse runs a script that has to fail, with one line that names what is wanted.
func (c *checkout) refuse(want, script string, args ...string) {
	c.t.Helper()
	out, err := c.try(script, args...)
	if err == nil {
		c.t.Fatalf("%s %v succeeded, want an error with %q:\n%s", script, args, want, out)
	}
	last := out[strings.LastIndexByte(strings.TrimSpace(out), '\n')+1:]
	if !strings.Contains(last, want) {
		c.t.Errorf("%s %v: last line %q does not contain %q", script, args, last, want)
	}
}

// commit changes a file of the patched tree and commits it.
func (c *checkout) commit(file, old, new, subject string) {
	c.t.Helper()
	name := "_output/src/v0.9/" + file
	text := c.read(name)
	if !strings.Contains(text, old) {
		c.t.Fatalf("%s does not contain %q", file, old)
	}
	c.write(name, strings.Replace(text, old, new, 1))
	c.git("commit", "-qam", subject+"\n"+trailers)
}

func (c *checkout) git(args ...string) string {
	c.t.Helper()
	cmd := exec.Command("git", append([]string{"-C", c.tree, "-c", "user.name=A Developer", "-c", "user.email=dev@example.org"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// patches returns the names and contents of the line's patches and series.
func (c *checkout) patches() map[string]string {
	c.t.Helper()
	files, err := filepath.Glob(filepath.Join(c.dir, "patches/v0.9/*"))
	if err != nil {
		c.t.Fatal(err)
	}
	m := map[string]string{}
	for _, f := range files {
		rel, _ := filepath.Rel(c.dir, f)
		m[filepath.Base(f)] = c.read(rel)
	}
	return m
}

func TestPatchesGoRound(t *testing.T) {
	t.Parallel()
	c := newCheckout(t)
	c.must("verify.sh", "v0.9")
	c.must("apply.sh", "v0.9")
	c.refuse("has no commit beyond upstream's", "refresh.sh", "v0.9")

	c.commit("README.md", "# go-gitdiff", "# one", "readme: change the title")
	c.commit("gitdiff/apply.go", "package gitdiff", "package gitdiff // two", "apply: add a comment with a rather long subject that is cut")
	c.write("_output/src/v0.9/README.md", "# not committed\n")
	c.refuse("changes that are in no commit", "refresh.sh", "v0.9")
	c.git("checkout", "-q", "README.md")
	c.must("refresh.sh", "v0.9")
	first := c.patches()
	if want := "# a comment that stays\n0001-readme-change-the-title.patch\n0002-apply-add-a-comment-with-a-rather-long-subject-that-.patch\n"; first["series"] != want {
		t.Errorf("series is %q, want %q", first["series"], want)
	}
	c.must("verify.sh", "v0.9")

	// The same commits give the same bytes, and so do those that the patches make.
	head := c.git("rev-parse", "HEAD^{tree}")
	for range 2 {
		c.must("refresh.sh", "v0.9")
		if !maps.Equal(first, c.patches()) {
			t.Error("refresh changed patches without a change in the tree")
		}
		c.must("apply.sh", "--force", "v0.9")
	}
	if got := c.git("rev-parse", "HEAD^{tree}"); got != head {
		t.Errorf("applied patches make tree %s, want %s", got, head)
	}
	commits := c.git("rev-parse", "HEAD")
	c.must("apply.sh", "--force", "v0.9")
	if got := c.git("rev-parse", "HEAD"); got != commits {
		t.Errorf("the same patches made commit %s and then %s", commits, got)
	}

	// A number that was chosen by hand stays.
	const chosen = "0005-apply-add-a-comment-with-a-rather-long-subject-that-.patch"
	old := filepath.Join(c.dir, "patches/v0.9/0002"+chosen[4:])
	if err := os.Rename(old, filepath.Join(c.dir, "patches/v0.9", chosen)); err != nil {
		t.Fatal(err)
	}
	c.write("patches/v0.9/series", strings.Replace(first["series"], "0002-", "0005-", 1))
	c.must("refresh.sh", "v0.9")
	c.must("verify.sh", "v0.9")
	if _, ok := c.patches()[chosen]; !ok {
		t.Errorf("refresh did not keep number 0005: %q", c.patches()["series"])
	}
}

func TestApplyKeepsEdits(t *testing.T) {
	t.Parallel()
	c := newCheckout(t)
	c.must("apply.sh", "v0.9")
	c.commit("README.md", "# go-gitdiff", "# one", "readme: change the title")
	c.must("apply.sh", "v0.9")
	if !strings.HasPrefix(c.read("_output/src/v0.9/README.md"), "# one") {
		t.Fatal("apply threw a commit away though no patch had changed")
	}
	c.must("refresh.sh", "v0.9")
	c.commit("README.md", "# one", "# two", "readme: change it again")
	name := "patches/v0.9/0001-readme-change-the-title.patch"
	c.write(name, strings.Replace(c.read(name), "+# one", "+# three", 1))
	c.refuse("hack/refresh.sh v0.9", "apply.sh", "v0.9")
	c.must("apply.sh", "--force", "--loose", "v0.9")
	if !strings.HasPrefix(c.read("_output/src/v0.9/README.md"), "# three") {
		t.Error("apply --force did not apply the changed patch")
	}
}

func TestOffsetAndConflictAreRefused(t *testing.T) {
	t.Parallel()
	c := newCheckout(t)
	c.must("apply.sh", "v0.9")
	c.commit("gitdiff/apply.go", "package gitdiff", "package gitdiff // two", "apply: add a comment")
	c.must("refresh.sh", "v0.9")
	const name = "patches/v0.9/0001-apply-add-a-comment.patch"
	good := c.read(name)
	before := c.git("rev-parse", "HEAD")

	c.write(name, strings.Replace(good, "@@ -1,4 +1,4 @@", "@@ -3,4 +3,4 @@", 1))
	c.refuse("0001-apply-add-a-comment.patch", "apply.sh", "v0.9")
	c.refuse("0001-apply-add-a-comment.patch", "verify.sh", "v0.9")
	c.write(name, strings.Replace(good, "-package gitdiff\n", "-package other\n", 1))
	c.refuse("does not apply", "apply.sh", "v0.9")
	c.write("patches/v0.9/series", "0001-absent.patch\n")
	c.refuse("0001-absent.patch", "apply.sh", "v0.9")

	if got := c.git("rev-parse", "HEAD"); got != before {
		t.Error("a failed apply replaced the good tree")
	}
	if left, _ := filepath.Glob(filepath.Join(c.dir, "_output/tmp/*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// What upstream's v0.8.1 has otherwise in README.md: the line after the title's, and the end of this one.
const tool = "standard GNU `diff` tool."

// The line moves to another version of upstream: what git am does not apply is merged, a conflict is the
// developer's, and the patches keep their numbers.
func TestBump(t *testing.T) {
	t.Parallel()
	c := newCheckout(t)
	c.must("apply.sh", "v0.9")
	c.commit("README.md", "# go-gitdiff", "# one", "readme: change the title")
	c.commit("gitdiff/apply.go", "package gitdiff", "package gitdiff // two", "apply: add a comment")
	c.must("refresh.sh", "v0.9")
	before := c.patches()

	c.must("bump.sh", "v0.9", "v0.8.1")
	c.must("verify.sh", "v0.9")
	after := c.patches()
	if !strings.Contains(after["BASE"], "\nVERSION=v0.8.1\n") || after["series"] != before["series"] {
		t.Errorf("BASE %q, series %q", after["BASE"], after["series"])
	}
	if !strings.Contains(c.read("patches/README.md"), "| v0.9 (v0.8.1) |") {
		t.Errorf("patches/README.md: %s", c.read("patches/README.md"))
	}

	c.refuse("which version of github.com/bluekeyes/go-gitdiff? This line is at v0.8.1", "bump.sh", "v0.9")
	c.refuse("no move of v0.9 is under way", "bump.sh", "--continue", "v0.9")
	old := strings.Replace(tool, "GNU ", "", 1)
	c.commit("README.md", old, "tool of ours.", "readme: name another tool")
	c.refuse("holds edits of yours", "bump.sh", "v0.9", "v0.9.0")
	c.must("refresh.sh", "v0.9")
	if out, err := c.try("bump.sh", "v0.9", "v0.9.0"); err == nil || !strings.Contains(out, "these files conflict: README.md") {
		t.Fatalf("a patch that conflicts: %v: %s", err, out)
	}
	text := c.read("_output/src/v0.9/README.md")
	head, rest, _ := strings.Cut(text, "<<<<<<<")
	_, tail, ok := strings.Cut(rest, ">>>>>>>")
	if !ok {
		t.Fatalf("no conflict in\n%s", text)
	}
	_, tail, _ = strings.Cut(tail, "\n")
	c.write("_output/src/v0.9/README.md", head+"tool of ours.\n"+tail)
	c.git("add", "README.md")
	c.git("-c", "core.editor=true", "rebase", "--continue")
	c.must("bump.sh", "--continue", "v0.9")
	c.must("verify.sh", "v0.9")
	if after = c.patches(); !strings.Contains(after["BASE"], "\nVERSION=v0.9.0\n") || !strings.Contains(after["series"], "0003-readme-name-another-tool.patch") {
		t.Errorf("BASE %q, series %q", after["BASE"], after["series"])
	}
}

// A line begins with the patches of another one, and each patch says that it is for both.
func TestNewLine(t *testing.T) {
	t.Parallel()
	c := newCheckout(t)
	c.must("apply.sh", "v0.9")
	c.commit("README.md", "# go-gitdiff", "# one", "readme: change the title")
	c.commit("gitdiff/apply.go", "package gitdiff", "package gitdiff // two", "apply: add a comment")
	c.must("refresh.sh", "v0.9")

	c.refuse("name a version of v0.8", "new-line.sh", "v0.8", "v0.9.0")
	c.refuse("patches/v0.9 exists", "new-line.sh", "v0.9", "v0.9.0")
	c.must("new-line.sh", "v0.8", "v0.8.1", "v0.9")
	c.must("verify.sh", "v0.8")
	c.must("verify.sh", "v0.9")
	for _, line := range []string{"v0.8", "v0.9"} {
		patch := c.read("patches/" + line + "/0001-readme-change-the-title.patch")
		if !strings.Contains(patch, "\nApplies-To: v0.8, v0.9\n") {
			t.Errorf("%s: %s", line, patch)
		}
	}
	if m := c.read("patches/README.md"); !strings.Contains(m, "| 0002 apply: add a comment | [2, same](v0.8/0002-apply-add-a-comment.patch) | [2](v0.9/") ||
		!strings.Contains(m, "| all | 4 | 4 |") {
		t.Errorf("patches/README.md: %s", m)
	}
}

func TestBadInput(t *testing.T) {
	c := newCheckout(t)
	for _, script := range []string{"fetch.sh", "apply.sh", "refresh.sh", "verify.sh", "build.sh"} {
		c.refuse(`no line "v9.9": supported are v0.9`, script, "v9.9")
		c.refuse(`supported are v0.9`, script, "../v0.9")
		c.refuse("which line? supported: v0.9", script)
	}
	c.refuse("no _output/src/v0.9: run hack/apply.sh v0.9 first", "refresh.sh", "v0.9")
	c.write("patches/v0.9/BASE", strings.Replace(base, "h1:w+O", "h1:O+w", 1))
	c.refuse("do not build from it", "fetch.sh", "v0.9")
	c.write("patches/v0.9/BASE", strings.Replace(base, "\nGO=1.", "\nGO=1.999.", 1))
	t.Setenv("GOTOOLCHAIN", "local")
	c.refuse("is too old: install Go 1.999.", "fetch.sh", "v0.9")
}

func TestNoNetwork(t *testing.T) {
	c := newCheckout(t)
	c.write("patches/v0.9/BASE", strings.Replace(base, "v0.9.0", "v0.9.999", 1))
	// The programs of hack/cmd are built before, they are not what this test is about.
	c.refuse("", "fetch.sh", "v0.9")
	t.Setenv("GOPROXY", "off")
	c.refuse("is the network there, is GOPROXY right?", "fetch.sh", "v0.9")
	if _, err := os.Stat(filepath.Join(c.dir, "_output/src/stock/v0.9")); err == nil {
		t.Error("a failed fetch left a tree")
	}
}
