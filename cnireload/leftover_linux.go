// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ticksPerSecond is the unit of process times in /proc, the same on every
// architecture.
const ticksPerSecond = 100

// foundPlugin is a process of the machine whose environment is that of a plugin
// and whose parent's is not that of the same call: what a plugin runs by itself
// goes with it.
type foundPlugin struct {
	pid, parent, group int
	started            uint64 // in ticks since boot: together with pid, this process and no other
	since              time.Time
	path               string
	environ            []string
}

// foundPlugins looks at every process of the machine. What cannot be looked at
// is passed over: it has ended, or is somebody else's.
func foundPlugins() []*foundPlugin {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	uptime := readUptime()
	byPID := make(map[int]*foundPlugin)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil || !bytes.Contains(environ, []byte("CNI_COMMAND=")) {
			continue
		}
		f := &foundPlugin{pid: pid, environ: strings.Split(strings.TrimRight(string(environ), "\x00"), "\x00")}
		if _, ok := timeoutKeys[f.verb()]; !ok || !f.readStat() {
			continue
		}
		f.path = executableOf(pid)
		f.since = time.Now().Add(time.Duration(f.started)*time.Second/ticksPerSecond - uptime)
		byPID[pid] = f
	}
	var top []*foundPlugin
	for _, f := range byPID {
		parent := byPID[f.parent]
		// A child in a group of its own is not reached through its parent.
		if parent != nil && parent.group == f.group && parent.verb() == f.verb() &&
			containerOf(parent.environ) == containerOf(f.environ) {
			continue
		}
		top = append(top, f)
	}
	return top
}

// executableOf returns what was executed: of a script, not its interpreter.
func executableOf(pid int) string {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	name := strings.TrimSpace(string(comm)) // of the first 15 bytes
	for i, arg := range strings.Split(string(cmdline), "\x00") {
		if i < 2 && filepath.IsAbs(arg) && strings.HasPrefix(filepath.Base(arg), name) {
			return arg
		}
	}
	return exe
}

// readStat reads what proc(5) has in stat; false means that the process has
// ended.
func (f *foundPlugin) readStat() bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", f.pid))
	if err != nil {
		return false
	}
	// The name before the last parenthesis may contain anything.
	_, rest, _ := strings.Cut(string(b[max(0, bytes.LastIndexByte(b, ')')):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return false
	}
	var errs [3]error
	f.parent, errs[0] = strconv.Atoi(fields[1])
	f.group, errs[1] = strconv.Atoi(fields[2])
	f.started, errs[2] = strconv.ParseUint(fields[19], 10, 64)
	return errors.Join(errs[:]...) == nil
}

func readUptime() time.Duration {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(b), " ")
	seconds, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return time.Duration(seconds * float64(time.Second))
}

func (f *foundPlugin) alive() bool {
	now := &foundPlugin{pid: f.pid}
	return now.readStat() && now.started == f.started
}

func (f *foundPlugin) kill() error {
	if !f.alive() {
		return nil
	}
	target := f.pid
	if f.group == f.pid {
		target = -f.pid
	}
	if err := syscall.Kill(target, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}

// ours tells whether this program started it.
func (f *foundPlugin) ours() bool { return f.parent == os.Getpid() }

// orphan tells whether who started it is gone, and it is of our file system
// view: a runtime in a container has plugins of its own.
func (f *foundPlugin) orphan() bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", f.pid))
	return err == nil && own == other && f.parent == 1
}

// Types of file systems that namespaces are on, as in statfs(2).
const (
	nsfsMagic = 0x6e736673
	procMagic = 0x9fa0
)

// isNamespace tells whether path is a namespace. Of one that was mounted an empty
// file remains.
func isNamespace(path string) bool {
	var st syscall.Statfs_t
	if syscall.Statfs(path, &st) != nil {
		return false
	}
	return int64(st.Type) == nsfsMagic || int64(st.Type) == procMagic
}
