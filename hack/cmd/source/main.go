// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Source lays out a module's sources in a folder after checking the hash of its zip.
//
// The zip comes through the ordinary Go client, so any GOPROXY serves. The hash is computed
// here from the zip itself: the module cache's own record of it could be stale or edited.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/zip"
)

func main() {
	mod := flag.String("module", "", "module path")
	version := flag.String("version", "", "module version")
	sum := flag.String("sum", "", "expected h1 sum of the module's zip")
	dir := flag.String("dir", "", "folder to make")
	flag.Parse()
	if err := run(*mod, *version, *sum, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "source:", err)
		os.Exit(1)
	}
}

func run(mod, version, sum, dir string) error {
	if mod == "" || version == "" || sum == "" || dir == "" {
		return fmt.Errorf("-module, -version, -sum and -dir are all needed")
	}
	archive, err := download(mod, version)
	if err != nil {
		return err
	}
	got, err := dirhash.HashZip(archive, dirhash.Hash1)
	if err != nil {
		return fmt.Errorf("hash %s: %w", archive, err)
	}
	if got != sum {
		return fmt.Errorf("%s %s has sum %s but BASE says %s: do not build from it; compare with sum.golang.org", mod, version, got, sum)
	}
	if err := zip.Unzip(dir, module.Version{Path: mod, Version: version}, archive); err != nil {
		return fmt.Errorf("unpack %s: %w", archive, err)
	}
	return makeWritable(dir)
}

// download returns the path of the module's zip in the module cache.
func download(mod, version string) (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", mod+"@"+version)
	// Outside of any module, so that no go.mod or go.sum of ours is read or changed.
	cmd.Dir = os.TempDir()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, runErr := cmd.Output()
	var info struct{ Zip, Error string }
	if err := json.Unmarshal(stdout, &info); err != nil {
		if runErr != nil {
			return "", fmt.Errorf("go mod download %s@%s: %s", mod, version, firstLine(stderr.String()))
		}
		return "", fmt.Errorf("read go mod download's answer for %s@%s: %w", mod, version, err)
	}
	if info.Error != "" {
		return "", fmt.Errorf("cannot download %s@%s: %s (is the network there, is GOPROXY right?)", mod, version, firstLine(info.Error))
	}
	return info.Zip, nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// makeWritable undoes the read-only modes that module zips are unpacked with; a zip records none.
func makeWritable(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if d.IsDir() {
			mode = 0o755
		}
		return os.Chmod(path, mode)
	})
}
