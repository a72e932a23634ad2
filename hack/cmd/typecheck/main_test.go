// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                         "module m\n\ngo 1.24\n",
		"cmd/a/main.go":                  "package main\n\nfunc main() { x() }\n",
		"cmd/a/x_linux.go":               "package main\n\nimport \"os\"\n\nfunc x() { _ = os.Args }\n",
		"internal/cri/cri.go":            "package cri\n",
		"plugins/cri/cri.go":             "package cri\n",
		"internal/cri/server/windows.go": "//go:build windows\n\npackage server\n\nfunc f() int { return \"\" }\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for platform, bad := range map[string][]string{
		"linux/arm64":   nil,
		"freebsd/amd64": {"m/cmd/a"},
		"windows/amd64": {"m/cmd/a", "m/internal/cri/server"},
	} {
		r, err := check(dir, platform, "mod", trees...)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.bad) != len(bad) || r.count < 3 {
			t.Errorf("%s: %d packages, %v, want errors in %v", platform, r.count, r.bad, bad)
		}
		for _, p := range bad {
			if r.bad[p] == "" {
				t.Errorf("%s: no error in %s", platform, p)
			}
		}
	}
}
