// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package harness runs a private containerd, stock or patched, for tests, the
// benchmark and the walkthrough: its own root, state, sockets, CNI folders and
// attachment cache, in a mount namespace of its own, and nothing left behind.
package harness

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// Side names one of the two binaries that are compared.
type Side string

// The two sides.
const (
	Stock   Side = "stock"
	Patched Side = "patched"
)

// Line is the containerd line the tests run: that of the environment variable LINE.
var Line = cmp.Or(os.Getenv("LINE"), "v2.4")

// Root finds the repository from the working directory.
var Root = sync.OnceValues(func() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "test", "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("no cnireload checkout at or above %s: run this from inside one", dir)
		}
	}
})

// place resolves a folder under _output; an environment variable names
// another, to test binaries that were built elsewhere.
func place(env string, elem ...string) (string, error) {
	if v := os.Getenv(env); v != "" {
		return v, nil
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	return filepath.Join(append([]string{root, "_output"}, elem...)...), nil
}

// BinDir is where a side's containerd, ctr and shim are.
func BinDir(s Side) (string, error) {
	platform := "linux-" + runtime.GOARCH
	if s == Stock {
		return place("CNIRELOAD_STOCK_BIN", "stock", Line, platform, "bin")
	}
	return place("CNIRELOAD_PATCHED_BIN", Line, platform, "bin")
}

// ToolsDir holds runc, crictl and others in bin, the CNI plugins in cni.
func ToolsDir() (string, error) { return place("CNIRELOAD_TOOLS", "tools") }

// Plugin is the path of a real CNI plugin.
func Plugin(name string) (string, error) {
	dir, err := ToolsDir()
	return filepath.Join(dir, "cni", name), err
}

// Crictl is the path of crictl.
func Crictl() (string, error) {
	dir, err := ToolsDir()
	return filepath.Join(dir, "bin", "crictl"), err
}

// Runc is the path of runc.
func Runc() (string, error) {
	dir, err := ToolsDir()
	return filepath.Join(dir, "bin", "runc"), err
}

// KubeletPath is the path of the kubelet.
func KubeletPath() (string, error) {
	dir, err := ToolsDir()
	return filepath.Join(dir, "bin", "kubelet"), err
}

// Preflight says in one line what is missing to run the given sides, and how
// to get it.
func Preflight(hint string, sides ...Side) error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("needs Linux, this is %s", runtime.GOOS)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("needs root for namespaces and mounts: run %q as root", hint)
	}
	for _, tool := range []string{"unshare", "nsenter", "mount"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s not found in PATH: install util-linux and mount", tool)
		}
	}
	runc, err := Runc()
	if err != nil {
		return err
	}
	need := []string{runc}
	for _, s := range sides {
		dir, err := BinDir(s)
		if err != nil {
			return err
		}
		for _, name := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
			need = append(need, filepath.Join(dir, name))
		}
	}
	for _, path := range need {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%s is missing: %q builds it", path, hint)
		}
	}
	return nil
}

// Build compiles one of this module's commands, static, and returns its path.
// It is cheap when nothing changed.
func Build(name string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	out := filepath.Join(root, "_output", "test", "bin", name)
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out, "./cmd/"+name)
	cmd.Dir = filepath.Join(root, "test")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+runtime.GOARCH, "GOWORK=off")
	if b, err := cmd.CombinedOutput(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return "", errors.New("go not found in PATH: install Go")
		}
		return "", fmt.Errorf("build %s: %w: %s", name, err, strings.TrimSpace(string(b)))
	}
	return out, nil
}

// Fakenet is the path of the built fake plugin.
var Fakenet = sync.OnceValues(func() (string, error) { return Build("fakenet") })

// Pause is the path of the built pause binary.
var Pause = sync.OnceValues(func() (string, error) { return Build("pause") })

// Workload is the path of the built binary that test containers run.
var Workload = sync.OnceValues(func() (string, error) { return Build("workload") })
