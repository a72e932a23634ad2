// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

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

// foundPlugin is a process of the machine that is a plugin whose runtime has gone.
// What a plugin runs by itself goes with it.
type foundPlugin struct {
	pid, parent, group int
	name               string // of what was executed, the first 15 bytes
	started            uint64 // in ticks since boot: together with pid, this process and no other
	since              time.Time
	path               string
	environ            []string
}

// foundPlugins looks for the plugins of the bin dirs that have no parent any more.
// What cannot be looked at is passed over: it has ended, or is somebody else's.
//
// What a process was started with is read of those only that may be plugins by
// their name: the read waits for a lock of the process.
func foundPlugins(binDirs []string) []*foundPlugin {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	bins := readBins(binDirs)
	uptime := readUptime()
	var found []*foundPlugin
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		f := &foundPlugin{pid: pid}
		if f.readStat() && f.orphan() && f.isPlugin(bins) {
			f.since = time.Now().Add(time.Duration(f.started)*time.Second/ticksPerSecond - uptime)
			found = append(found, f)
		}
	}
	return found
}

// bins is what is known of the bin dirs.
type bins struct {
	dirs  map[string]bool // by all their names
	names map[string]bool // the first 15 bytes of the executables'
}

// maxComm is how much of its name the kernel keeps of a process.
const maxComm = 15

func readBins(dirs []string) bins {
	b := bins{make(map[string]bool), make(map[string]bool)}
	for _, dir := range dirs {
		b.dirs[filepath.Clean(dir)] = true
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			b.dirs[real] = true
		}
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			b.names[e.Name()[:min(len(e.Name()), maxComm)]] = true
		}
	}
	return b
}

// isPlugin tells whether the process is an executable of a bin dir, or a script
// there, that runs as plugins are run: without arguments, and told what to do by
// its environment.
func (f *foundPlugin) isPlugin(b bins) bool {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", f.pid))
	exe = strings.TrimSuffix(exe, " (deleted)")
	if !b.names[f.name] && !b.dirs[filepath.Dir(exe)] {
		return false
	}
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", f.pid))
	args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
	// Of a script the last argument: its interpreter and what that is told
	// come before.
	if f.path = args[len(args)-1]; !b.dirs[filepath.Dir(f.path)] || !strings.HasPrefix(filepath.Base(f.path), f.name) {
		if f.path = exe; !b.dirs[filepath.Dir(exe)] || len(args) > 1 {
			return false
		}
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", f.pid))
	if err != nil {
		return false
	}
	f.environ = strings.Split(strings.TrimRight(string(environ), "\x00"), "\x00")
	_, ok := timeoutKeys[f.verb()]
	return ok
}

// readStat reads what proc(5) has in stat; false means that the process has
// ended.
func (f *foundPlugin) readStat() bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", f.pid))
	if err != nil {
		return false
	}
	// The name between the parentheses may contain anything.
	begin, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if begin < 0 || end < begin {
		return false
	}
	f.name = string(b[begin+1 : end])
	_, rest, _ := strings.Cut(string(b[end:]), " ")
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

// alive tells whether it has not ended. Another process of the same number is not
// mistaken for it.
func (f *foundPlugin) alive() bool {
	now := &foundPlugin{pid: f.pid}
	return now.readStat() && now.started == f.started
}

// kill kills it, with its process group if it leads one.
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

// orphan tells whether who started it is gone. Who adopts orphans is the first
// process, or one that said so, such as a user's service manager, which then is
// our parent too.
func (f *foundPlugin) orphan() bool { return f.parent == 1 || f.parent == os.Getppid() }

// sameMounts tells whether it has our view of the file system: a runtime in a
// container has plugins of its own. Of one that names a pod of ours nothing
// follows from that: a service can have another view after each start.
func (f *foundPlugin) sameMounts() bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", f.pid))
	return err == nil && own == other
}
