// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const goodBase = `# comment
MODULE=example.org/containerd/v2
VERSION=v2.4.2
SUM=h1:p6Qg+xbEz8lvwdhHDx0U469xENvp4LgGBx+E7djXkGw=
COMMIT=
GO=1.26.6
RELEASE=1
`

const goodPatch = `From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Developer <dev@example.org>
Date: Mon, 30 Nov 2026 10:00:00 +0000
Subject: [PATCH] cri: say why the network is not ready

A node says Ready and every pod fails.

The risk is small.

Origin: vendor
Bug: https://github.com/containerd/go-cni/issues/116
Bug: https://github.com/containerd/containerd/issues/12130
Forwarded: no
Upstream-Status: Inappropriate [needs the
 module]
Carry: carry
Applies-To: v2.3, v2.4
Drop-When: upstream looks at binaries
Last-Update: 2026-11-30
Signed-off-by: A Developer <dev@example.org>
---
 internal/cri/a.go | 3 +--
 1 file changed, 1 insertion(+), 2 deletions(-)

diff --git a/internal/cri/a.go b/internal/cri/a.go
index 111111111111..222222222222 100644
--- a/internal/cri/a.go
+++ b/internal/cri/a.go
@@ -1,3 +1,2 @@
 package cri
-one
-two
+three
`

// folder writes a line's folder v2.4 with the given files.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "v2.4")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func good() map[string]string {
	return map[string]string{
		"BASE":         goodBase,
		"series":       "# comment\n0001-a.patch # why\n\n0003-c.patch\n",
		"0001-a.patch": goodPatch,
		"0003-c.patch": goodPatch,
	}
}

func TestGoodFolder(t *testing.T) {
	report, err := lintFolder(folder(t, good()))
	if err != nil {
		t.Fatal(err)
	}
	if want := "v2.4: 2 of at most 9 patches, 6 of at most 400 carried lines\n"; !strings.HasSuffix(report, want) {
		t.Errorf("report %q does not end with %q", report, want)
	}
}

func TestEmptySeries(t *testing.T) {
	if _, err := lintFolder(folder(t, map[string]string{"BASE": goodBase, "series": "# none yet\n"})); err != nil {
		t.Error(err)
	}
}

func TestCarriedLinesLeaveOutTestsAndRemovedFiles(t *testing.T) {
	files := good()
	files["0003-c.patch"] = strings.ReplaceAll(goodPatch, "cri/a.go", "cri/a_test.go")
	report, err := lintFolder(folder(t, files))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(report, ", 3 of at most") {
		t.Errorf("report %q counts the test's lines as carried", report)
	}
}

func TestBadFolders(t *testing.T) {
	// edit changes the first patch.
	edit := func(old, new string) func(map[string]string) {
		return func(f map[string]string) {
			if !strings.Contains(goodPatch, old) {
				panic("the good patch does not contain " + old)
			}
			f["0001-a.patch"] = strings.Replace(goodPatch, old, new, 1)
		}
	}
	set := func(name, text string) func(map[string]string) {
		return func(f map[string]string) { f[name] = text }
	}
	for name, tc := range map[string]struct {
		change func(map[string]string)
		want   string
	}{
		"base without sum":       {set("BASE", strings.Replace(goodBase, "SUM=", "#", 1)), "BASE: SUM is missing"},
		"base with bad sum":      {set("BASE", strings.Replace(goodBase, "h1:p6", "h1:", 1)), "BASE: SUM="},
		"base with unknown key":  {set("BASE", goodBase+"TAG=x\n"), `BASE: "TAG=x"`},
		"base with key twice":    {set("BASE", goodBase+"RELEASE=2\n"), "RELEASE is there twice"},
		"base with short commit": {set("BASE", strings.Replace(goodBase, "COMMIT=", "COMMIT=abc", 1)), "BASE: COMMIT="},
		"number twice":           {set("series", "0001-a.patch\n0001-a.patch\n0003-c.patch\n"), "number 0001 is used twice"},
		"wrong order":            {set("series", "0003-c.patch\n0001-a.patch\n"), "the order must be that of the numbers"},
		"unlisted patch":         {set("series", "0001-a.patch\n"), "does not list 0003-c.patch"},
		"listed but missing":     {set("series", "0001-a.patch\n0003-c.patch\n0004-d.patch\n"), "0004-d.patch"},
		"bad name":               {set("series", "0001-a.patch\n0003-c.patch\n4-d.patch\n"), "is not named NNNN-subject.patch"},
		"too many": {set("series", "0001-a.patch\n0002-a.patch\n0003-c.patch\n0004-a.patch\n0005-a.patch\n0006-a.patch\n0007-a.patch\n0008-a.patch\n0009-a.patch\n0010-a.patch\n"),
			"10 patches, at most 9"},
		"too many lines": {edit("@@ -1,3 +1,2 @@\n package cri\n-one\n-two\n+three\n", "@@ -1,1 +1,399 @@\n package cri\n"+strings.Repeat("+line\n", 398)),
			"401 carried lines, at most 400"},
		"no body":   {edit("A node says Ready and every pod fails.\n\nThe risk is small.\n\n", ""), "has no text"},
		"long text": {edit("The risk is small.\n", strings.Repeat("The risk is small.\n", 24)), "26 lines of text, at most 25"},
		"real commit id": {edit("From 0000000000000000000000000000000000000000", "From 1111111111111111111111111111111111111111"),
			"zero commit line"},
		"no patch prefix":      {edit("[PATCH] ", ""), "Subject: [PATCH]"},
		"origin":               {edit("Origin: vendor", "Origin: upstream"), "Origin: \"upstream\" must be"},
		"bug":                  {edit("Bug: https://github.com/containerd/go-cni/issues/116", "Bug: 116"), `Bug: "116" must be a URL`},
		"forwarded":            {edit("Forwarded: no", "Forwarded: maybe"), "Forwarded:"},
		"status without why":   {edit(" [needs the\n module]", ""), "Upstream-Status: \"Inappropriate\" must be"},
		"carry":                {edit("Carry: carry", "Carry: keep"), `Carry: "keep"`},
		"other line":           {edit("Applies-To: v2.3, v2.4", "Applies-To: v2.3"), "does not name v2.4"},
		"no such date":         {edit("2026-11-30", "2026-11-31"), "is no date"},
		"date not iso":         {edit("2026-11-30", "30.11.2026"), "Last-Update:"},
		"signed-off-by":        {edit("Signed-off-by: A Developer <dev@example.org>", "Signed-off-by: A Developer"), "Signed-off-by:"},
		"missing drop-when":    {edit("Drop-When: upstream looks at binaries\n", ""), "trailer Drop-When is missing"},
		"carry twice":          {edit("Carry: carry", "Carry: carry\nCarry: drop"), "trailer Carry is there 2 times"},
		"misspelled trailer":   {edit("Upstream-Status:", "Upstream-status:"), "unknown trailer \"Upstream-status\": write Upstream-Status"},
		"unknown trailer":      {edit("Carry: carry", "Carry: carry\nPriority: high"), `unknown trailer "Priority"`},
		"prose among trailers": {edit("Carry: carry", "Carry: carry\nand more"), `unknown trailer "and more"`},
		"trailer in prose":     {edit("The risk is small.\n", "Carry: drop\n"), "stands above the last paragraph"},
		"go.mod":               {edit("diff --git a/internal/cri/a.go b/internal/cri/a.go\nindex 111111111111..222222222222 100644\n--- a/internal/cri/a.go\n+++ b/internal/cri/a.go", "diff --git a/go.mod b/go.mod\nindex 111111111111..222222222222 100644\n--- a/go.mod\n+++ b/go.mod"), "touches go.mod"},
		"vendor":               {edit("diff --git a/internal/cri/a.go b/internal/cri/a.go\nindex 111111111111..222222222222 100644\n--- a/internal/cri/a.go\n+++ b/internal/cri/a.go", "diff --git a/vendor/x.go b/vendor/x.go\nindex 111111111111..222222222222 100644\n--- a/vendor/x.go\n+++ b/vendor/x.go"), "touches vendor/x.go"},
		"no diff":              {func(f map[string]string) { f["0001-a.patch"], _, _ = strings.Cut(goodPatch, "diff --git") }, "changes no file"},
		"broken hunk":          {edit("@@ -1,3 +1,2 @@", "@@ -1,9 +1,2 @@"), "0001-a.patch: parse diff"},
	} {
		t.Run(name, func(t *testing.T) {
			files := good()
			tc.change(files)
			_, err := lintFolder(folder(t, files))
			if err == nil {
				t.Fatal("no fault found")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want one that contains %q", err, tc.want)
			}
		})
	}
}
