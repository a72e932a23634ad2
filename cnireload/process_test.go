//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
)

// executable writes a shell script and returns its path.
func (d *node) executable(name, body string) string {
	d.t.Helper()
	path := filepath.Join(d.bin, name)
	d.replace(path, "#!/bin/sh\n"+body+"\n", 0o755)
	return path
}

// setBound sets the bound of a verb for one test, which cannot be parallel.
func setBound(t *testing.T, verb string, d time.Duration) {
	t.Helper()
	key := timeoutKeys[verb]
	old := timeout.Get(key)
	timeout.Set(key, d)
	t.Cleanup(func() { timeout.Set(key, old) })
}

// timeoutKeys has the key of each verb.
var timeoutKeys = map[string]string{
	"ADD": TimeoutAdd, "DEL": TimeoutDel, "CHECK": TimeoutCheck,
	"STATUS": TimeoutStatus, "VERSION": TimeoutVersion, "GC": TimeoutGC,
}

// alive tells whether a process still runs; a zombie does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return syscall.Kill(pid, 0) == nil && !errors.Is(err, os.ErrNotExist)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func readPid(t *testing.T, path string) int {
	t.Helper()
	var pid int
	eventually(t, func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
			return err.Error()
		}
		return ""
	})
	return pid
}
