// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command slowsync SOCKET PROGRAM ARG... becomes the program, with each
// fdatasync of it and of what it starts announced to the slowsync.Server at the
// socket.
package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: slowsync SOCKET PROGRAM ARG...")
		os.Exit(2)
	}
	fmt.Fprintln(os.Stderr, "slowsync:", become(os.Args[1], os.Args[2:]))
	os.Exit(1)
}

func become(socket string, args []string) error {
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	// The filter is this thread's, and goes with it to the program.
	runtime.LockOSThread()
	const number = 0 // offset of nr in struct seccomp_data
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FDATASYNC, Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(fd)), nil); err != nil {
		return err
	}
	// The listener is close-on-exec: what it announces is the server's alone.
	return syscall.Exec(path, args, os.Environ())
}
