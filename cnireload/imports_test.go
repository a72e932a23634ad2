// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/cnireload/cnireload/"

// mayImport says which packages of this module each package of the library may
// import. What stands alone knows nothing of its user.
var mayImport = map[string][]string{
	"internal/diskfile":      nil,
	"internal/oneline":       nil,
	"internal/testenv":       nil,
	"internal/watchstub":     nil,
	"groupcommit":            nil,
	"cnireload/admission":    nil,
	"cnireload/confdir":      {"internal/diskfile"},
	"cnireload/conftemplate": {"cnireload/confdir", "internal/diskfile"},
	"cnireload/gc":           {"internal/oneline"},
	"cnireload/owed":         {"internal/diskfile"},
	"cnireload/plugin":       {"internal/diskfile"},
	"cnireload/rules":        {"internal/diskfile"},
	"cnireload": {
		"cnireload/admission", "cnireload/confdir", "cnireload/conftemplate", "cnireload/gc", "cnireload/owed", "cnireload/plugin", "cnireload/rules",
		"internal/diskfile", "internal/oneline",
	},
	"status": {"cnireload", "cnireload/plugin", "internal/oneline"},
	"cri":    {"cnireload", "status"},
}

func TestImports(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the go command")
	}
	var stderr strings.Builder
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...")
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	seen := make(map[string]bool)
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		allowed, known := mayImport[name]
		if !known {
			t.Errorf("package %s is not in mayImport: say what it may import", name)
			continue
		}
		seen[name] = true
		for _, i := range p.Imports {
			if own, ok := strings.CutPrefix(i, module); ok && !slices.Contains(allowed, own) {
				t.Errorf("package %s imports %s", name, own)
			}
		}
	}
	for name := range mayImport {
		if !seen[name] {
			t.Errorf("package %s in mayImport does not exist", name)
		}
	}
}
