// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Typecheck tells whether the patched tree compiles for other systems as far as the stock one does, or,
// with -library, whether all of the library does. It checks the types of the packages from source: a
// build proves little more and takes many times as long, because every package below must be compiled
// for every system.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	stock := flag.String("stock", "", "the stock tree")
	patched := flag.String("patched", "", "the patched tree")
	library := flag.String("library", "", "the library's module, in place of the trees")
	flag.Parse()
	passed, failed := 0, 0
	for _, platform := range flag.Args() {
		var was, is result
		var err error
		if *library != "" {
			is, err = check(*library, platform, "readonly", "./...")
		} else if was, err = check(*stock, platform, "readonly", trees...); err == nil {
			is, err = check(*patched, platform, "mod", trees...)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "typecheck: %s: %v\n", platform, err)
			os.Exit(1)
		}
		var faults []string
		for pkg, e := range is.bad {
			if was.bad[pkg] == "" {
				faults = append(faults, pkg+": "+e)
			}
		}
		slices.Sort(faults)
		if *library != "" {
			fmt.Printf("    %s: %d packages, %d do not compile\n", platform, is.count, len(is.bad))
		} else {
			fmt.Printf("    %s: %d packages, %d do not compile on stock, %d on patched\n", platform, is.count, len(was.bad), len(is.bad))
		}
		for _, f := range faults {
			fmt.Printf("FAIL %s %s\n", platform, f)
		}
		if len(faults) > 0 {
			failed++
		} else {
			passed++
		}
	}
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}

// result counts the packages of the tree and has the first error of each that does not compile.
type result struct {
	count int
	bad   map[string]string
}

// listed is what go list says of a package.
type listed struct {
	ImportPath, Dir  string
	GoFiles, Imports []string
	ImportMap        map[string]string
	Module           *struct {
		Main      bool
		GoVersion string
	}
	Error *struct{ Err string }
}

// trees names the packages that containerd and its shim are made of.
var trees = []string{"./cmd/...", "./internal/cri/...", "./plugins/cri/..."}

// check checks the named packages of a tree.
func check(tree, platform, mod string, packages ...string) (result, error) {
	goos, goarch, ok := strings.Cut(platform, "/")
	if !ok {
		return result{}, errors.New(`want "SYSTEM/PROCESSOR"`)
	}
	cmd := exec.Command("go", append([]string{"list", "-mod=" + mod, "-e", "-deps", "-tags=urfave_cli_no_docs,static_build,netgo,osusergo",
		"-json=ImportPath,Dir,GoFiles,Imports,ImportMap,Module,Error"}, packages...)...)
	cmd.Dir = tree
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return result{}, fmt.Errorf("go list: %w: %s", err, stderr.Bytes())
	}
	r := result{bad: map[string]string{}}
	done := importer{"unsafe": types.Unsafe}
	fset := token.NewFileSet()
	// Each package comes after those that it imports.
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return r, nil
		} else if err != nil {
			return r, fmt.Errorf("read what go list says: %w", err)
		}
		if p.ImportPath == "unsafe" {
			continue
		}
		// Bodies matter where the patches are; of the rest only what it declares does.
		ours := p.Module != nil && (p.Module.Main || strings.HasPrefix(p.ImportPath, "github.com/cnireload/"))
		if ours {
			r.count++
		}
		conf := types.Config{Importer: mapped{done, p.ImportMap}, IgnoreFuncBodies: !ours, FakeImportC: true, Sizes: types.SizesFor("gc", goarch)}
		if p.Module != nil && p.Module.GoVersion != "" {
			conf.GoVersion = "go" + p.Module.GoVersion
		}
		first := ""
		if p.Error != nil {
			first = p.Error.Err
		}
		conf.Error = func(err error) {
			// A body that is not looked at uses imports that then seem unused.
			if te := (types.Error{}); errors.As(err, &te) && te.Soft && !ours {
				return
			}
			if first == "" {
				first = err.Error()
			}
		}
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil && first == "" {
				first = err.Error()
			}
			if f != nil {
				files = append(files, f)
			}
		}
		done[p.ImportPath], _ = conf.Check(p.ImportPath, fset, files, nil)
		if first != "" && ours {
			r.bad[p.ImportPath] = strings.ReplaceAll(first, tree+"/", "")
		}
	}
}

type importer map[string]*types.Package

type mapped struct {
	done importer
	as   map[string]string
}

// Import returns a package that was checked before.
func (m mapped) Import(path string) (*types.Package, error) {
	if to, ok := m.as[path]; ok {
		path = to
	}
	if p := m.done[path]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("package %s was not listed", path)
}
