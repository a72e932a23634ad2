// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cniCache is where libcni and host-local keep what they remember. Each
// daemon sees a private folder there.
const cniCache = "/var/lib/cni"

// Processes lists the processes that belong to the daemon with this base
// folder: those in its mount namespace (it is the only one that has the
// base's folder mounted over the CNI cache), those in its pods' cgroups, and
// those in its containers, whose root is an overlay in the base's folder.
func Processes(base string) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	mine, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A process that ends while it is looked at is not of interest.
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil && ns != mine && mountsBase(pid, base) || inCgroup(pid, base) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func mountsBase(pid int, base string) bool {
	for _, m := range mountsOf(pid) {
		if m.point == "/" && m.fstype == "overlay" && strings.Contains(m.options, "="+base+"/") {
			return true
		}
		if m.point == cniCache && strings.HasSuffix(m.root, filepath.Join(filepath.Base(base), "libcni")) {
			return true
		}
	}
	return false
}

func inCgroup(pid int, base string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && strings.Contains(string(b), cgroupParent(base)+"/")
}

// cgroupParent is the cgroup the pods of one daemon go under.
func cgroupParent(base string) string { return "/" + filepath.Base(base) }

type mountPoint struct{ root, point, fstype, options string }

func mountsOf(pid int) []mountPoint {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil
	}
	defer f.Close()
	var all []mountPoint
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 8 {
			continue
		}
		m := mountPoint{root: fields[3], point: fields[4]}
		for i, s := range fields {
			if s == "-" && i+1 < len(fields) {
				m.fstype, m.options = fields[i+1], fields[len(fields)-1]
			}
		}
		all = append(all, m)
	}
	return all
}

// startTime tells a process from a later one with the same number.
func startTime(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	if fields := strings.Fields(rest); len(fields) > 19 && fields[0] != "Z" {
		return fields[19]
	}
	return ""
}

// end kills every process of a base folder, each by its number, and waits
// until they are gone.
func end(base string) error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		pids, err := Processes(base)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v of %s do not end", pids, base)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Residue names everything a daemon left on the machine after its end:
// processes, mounts, cgroups.
func Residue(base string) []string {
	var left []string
	pids, err := Processes(base)
	if err != nil {
		left = append(left, err.Error())
	}
	for _, pid := range pids {
		left = append(left, describe(pid))
	}
	for _, m := range mountsOf(os.Getpid()) {
		if m.point == base || strings.HasPrefix(m.point, base+"/") {
			left = append(left, "mount "+m.point)
		}
	}
	for _, dir := range cgroupDirs(base) {
		left = append(left, "cgroup "+dir)
	}
	return left
}

func describe(pid int) string {
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return fmt.Sprintf("process %d %s", pid, strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " ")))
}

func cgroupDirs(base string) []string {
	v1, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent(base))
	v2, _ := filepath.Glob("/sys/fs/cgroup" + cgroupParent(base))
	return append(v1, v2...)
}

// removeCgroups removes the emptied cgroups of a base folder, which nobody
// else does without systemd.
func removeCgroups(base string) {
	for _, dir := range cgroupDirs(base) {
		_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() && path != dir {
				_ = os.Remove(path)
			}
			return nil
		})
		_ = os.Remove(dir)
	}
}
