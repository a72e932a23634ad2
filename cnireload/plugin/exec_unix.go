//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// errTextBusy is what starting an executable fails with while somebody holds it
// open for writing.
var errTextBusy error = syscall.ETXTBSY

// errNotDir is the error of a path that leads through something else than a
// directory.
var errNotDir error = syscall.ENOTDIR

// isolate gives the plugin a process group of its own, so that all of it can be
// killed.
func isolate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

// killAll kills the plugin's process group, and the plugin, which may have left it.
func killAll(cmd *exec.Cmd) error {
	group := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	plugin := cmd.Process.Kill()
	switch {
	case plugin != nil && !errors.Is(plugin, os.ErrProcessDone):
		return plugin
	case group != nil && !errors.Is(group, syscall.ESRCH):
		return group
	}
	return nil
}

// readReady reads what is in a pipe at this moment.
func readReady(r *os.File, buf []byte, to io.Writer) {
	_ = r.SetReadDeadline(time.Time{}) // or nothing is read at all
	raw, err := r.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		// No more than a pipe can hold: who still writes is not waited for.
		for left := 1 << 20; left > 0; {
			n, err := syscall.Read(int(fd), buf)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if n <= 0 {
				break
			}
			_, _ = to.Write(buf[:n])
			left -= n
		}
		return true
	})
}

// executable tells whether somebody may execute the file. Root can execute what
// has any execute bit.
func executable(info fs.FileInfo) bool { return info.Mode()&0o111 != 0 }
