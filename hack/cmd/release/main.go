// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Release writes what goes with the binaries of a release: the licences of all that is linked into
// them, their bills of materials, and a statement of what they were made from.
package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

const usage = "usage: release licenses -main DIR -own DIR BINARY, release sbom -base MODULE@VERSION PATCH <CycloneDX, or release provenance -line LINE -base MODULE@VERSION -sum SUM -commit COMMIT -go VERSION FILE"

func run(args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	dir := flags.String("main", "", "the sources of the main module")
	own := flags.String("own", "", "this project's checkout")
	base := flags.String("base", "", "upstream's module, as MODULE@VERSION")
	line := flags.String("line", "", "the release line")
	sum := flags.String("sum", "", "the h1 sum of upstream's module")
	commit := flags.String("commit", "", "this project's commit")
	goVersion := flags.String("go", "", "the Go version")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch args[0] {
	case "licenses":
		return licenses(*dir, *own, flags.Args(), out)
	case "sbom":
		return sbom(*base, flags.Args(), in, out)
	case "provenance":
		return provenance(*line, *base, *sum, *commit, *goVersion, flags.Args(), out)
	}
	return errors.New(usage)
}

var licenseName = regexp.MustCompile(`(?i)^(licen[sc]e|copying|notice|copyright|patents)([._-].*)?$`)

// licenses writes the licence files of every module that is linked into the programs, of the main module,
// of this project and of Go.
func licenses(mainDir, ownDir string, binaries []string, out io.Writer) error {
	seen := map[string]bool{}
	var wanted []string
	for _, name := range binaries {
		info, err := buildinfo.ReadFile(name)
		if err != nil {
			return fmt.Errorf("read what is linked into %s: %w", name, err)
		}
		for _, m := range info.Deps {
			// One that was replaced by a directory is this project's own.
			if m.Replace != nil {
				m = m.Replace
			}
			if m.Version != "(devel)" && !seen[m.Path] {
				seen[m.Path] = true
				wanted = append(wanted, m.Path+"@"+m.Version)
			}
		}
	}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	if err := licensesIn(mainDir, "containerd", out); err != nil {
		return err
	}
	if err := licensesIn(ownDir, "cnireload", out); err != nil {
		return err
	}
	if err := licensesIn(strings.TrimSpace(string(goroot)), "the Go standard library", out); err != nil {
		return err
	}
	if wanted == nil {
		return nil
	}
	cmd := exec.Command("go", append([]string{"mod", "download", "-json"}, wanted...)...)
	cmd.Dir = os.TempDir() // of no module
	cmd.Stderr = os.Stderr
	list, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("find the modules that are linked: %w", err)
	}
	for d := json.NewDecoder(bytes.NewReader(list)); ; {
		var m struct{ Path, Version, Dir string }
		if err := d.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := licensesIn(m.Dir, m.Path+" "+m.Version, out); err != nil {
			return err
		}
	}
}

func licensesIn(dir, title string, out io.Writer) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("licence of %s: %w", title, err)
	}
	found := false
	for _, e := range entries {
		if e.IsDir() || !licenseName.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return fmt.Errorf("licence of %s: %w", title, err)
		}
		found = true
		fmt.Fprintf(out, "==== %s: %s\n\n%s\n\n", title, e.Name(), bytes.TrimSpace(text))
	}
	if !found {
		return fmt.Errorf("%s has no licence file in %s", title, dir)
	}
	return nil
}

var bug = regexp.MustCompile(`(?m)^Bug: (\S+)$`)

// sbom adds upstream and the patches to the main component of a CycloneDX bill of materials.
func sbom(base string, patches []string, in io.Reader, out io.Writer) error {
	var doc map[string]any
	if err := json.NewDecoder(in).Decode(&doc); err != nil {
		return fmt.Errorf("read the bill of materials: %w", err)
	}
	metadata, _ := doc["metadata"].(map[string]any)
	component, _ := metadata["component"].(map[string]any)
	if component == nil {
		return errors.New("the bill of materials has no main component")
	}
	module, version, ok := strings.Cut(base, "@")
	if !ok {
		return fmt.Errorf("-base %q is not MODULE@VERSION", base)
	}
	var list []any
	for _, name := range patches {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		p := map[string]any{"type": "unofficial", "diff": map[string]any{"url": path.Join("patches", filepath.Base(filepath.Dir(name)), filepath.Base(name))}}
		var resolves []any
		for _, m := range bug.FindAllStringSubmatch(string(text), -1) {
			resolves = append(resolves, map[string]any{"type": "defect", "references": []any{m[1]}})
		}
		if resolves != nil {
			p["resolves"] = resolves
		}
		list = append(list, p)
	}
	component["pedigree"] = map[string]any{
		"ancestors": []any{map[string]any{"type": "application", "name": module, "version": version, "purl": "pkg:golang/" + module + "@" + version}},
		"patches":   list,
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

// provenance writes an unsigned in-toto statement on how the files were made.
func provenance(line, base, sum, commit, goVersion string, files []string, out io.Writer) error {
	var subjects []any
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		h := sha256.New()
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			return err
		}
		subjects = append(subjects, map[string]any{"name": filepath.Base(name), "digest": map[string]any{"sha256": hex.EncodeToString(h.Sum(nil))}})
	}
	const repo = "https://github.com/cnireload/cnireload"
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]any{
		"_type":         "https://in-toto.io/Statement/v1",
		"subject":       subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": map[string]any{
			"buildDefinition": map[string]any{
				"buildType":          repo + "/blob/main/hack/dist.sh",
				"externalParameters": map[string]any{"line": line},
				"internalParameters": map[string]any{"go": goVersion},
				"resolvedDependencies": []any{
					map[string]any{"uri": "pkg:golang/" + base, "annotations": map[string]any{"h1": sum}},
					map[string]any{"uri": "git+" + repo, "digest": map[string]any{"gitCommit": commit}},
				},
			},
			"runDetails": map[string]any{"builder": map[string]any{"id": repo}},
		},
	})
}
