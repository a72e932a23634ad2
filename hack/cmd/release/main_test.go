// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The test program links nothing but Go: the licences are Go's and the main module's.
func TestLicenses(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "LICENSE"), []byte("do what is right\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run([]string{"licenses", "-main", dir, "-own", dir, exe}, nil, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"==== containerd: LICENSE\n\ndo what is right\n", "==== the Go standard library: LICENSE\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%.2000s", want, out.String())
		}
	}
	if err := run([]string{"licenses", "-main", t.TempDir(), "-own", dir, exe}, nil, &out); err == nil || !strings.Contains(err.Error(), "has no licence file") {
		t.Errorf("a module without a licence: %v", err)
	}
	if err := run([]string{"licenses", "-main", dir, "-own", dir, filepath.Join(dir, "LICENSE")}, nil, &out); err == nil {
		t.Error("a text was taken for a program")
	}
}

func TestSBOM(t *testing.T) {
	patch := filepath.Join(t.TempDir(), "v2.4", "0001-a.patch")
	if err := os.MkdirAll(filepath.Dir(patch), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(patch, []byte("Subject: [PATCH] a\n\nBug: https://example.org/1\nBug: https://example.org/2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	in := strings.NewReader(`{"bomFormat":"CycloneDX","metadata":{"component":{"name":"containerd"}},"components":[{"name":"x"}]}`)
	if err := run([]string{"sbom", "-base", "example.org/c/v2@v2.4.2", patch}, in, &out); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		BOMFormat string
		Metadata  struct {
			Component struct {
				Name     string
				Pedigree struct {
					Ancestors []struct{ Version, PURL string }
					Patches   []struct {
						Type     string
						Diff     struct{ URL string }
						Resolves []struct{ References []string }
					}
				}
			}
		}
		Components []struct{ Name string }
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	c := doc.Metadata.Component
	if doc.BOMFormat != "CycloneDX" || c.Name != "containerd" || len(doc.Components) != 1 {
		t.Errorf("what was there is lost: %s", out.String())
	}
	if len(c.Pedigree.Ancestors) != 1 || c.Pedigree.Ancestors[0].PURL != "pkg:golang/example.org/c/v2@v2.4.2" {
		t.Errorf("ancestors: %+v", c.Pedigree.Ancestors)
	}
	if p := c.Pedigree.Patches; len(p) != 1 || p[0].Diff.URL != "patches/v2.4/0001-a.patch" || len(p[0].Resolves) != 2 || p[0].Resolves[1].References[0] != "https://example.org/2" {
		t.Errorf("patches: %+v", p)
	}
	for _, bad := range []string{"", "{}", `{"metadata":{}}`} {
		if err := run([]string{"sbom", "-base", "a@b"}, strings.NewReader(bad), &out); err == nil {
			t.Errorf("%q was taken for a bill of materials", bad)
		}
	}
}

func TestProvenance(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.deb")
	if err := os.WriteFile(file, []byte("abc"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run([]string{"provenance", "-line", "v2.4", "-base", "m@v1", "-sum", "h1:x", "-commit", "c0ffee", "-go", "1.26.8", file}, nil, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"name": "a.deb"`, `"sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"`, `"gitCommit": "c0ffee"`, `"line": "v2.4"`, `"uri": "pkg:golang/m@v1"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in\n%s", want, out.String())
		}
	}
	if err := run([]string{"provenance", filepath.Join(t.TempDir(), "absent")}, nil, &out); err == nil {
		t.Error("a file that does not exist was stated")
	}
}
