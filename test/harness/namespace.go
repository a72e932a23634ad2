// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Namespace is a machine within the machine for a daemon and a kubelet: mount
// and network namespaces that outlive the processes in them, so that a daemon
// that is started again finds the mounts of the pods that run.
type Namespace struct {
	base   string
	holder *exec.Cmd

	mu    sync.Mutex
	known []int
}

// nodeAddress is the address of the machine within, and the one that kubelet
// takes for the node's. Nobody outside sees it.
const nodeAddress = "192.0.2.10"

// kubeletSysctls are what kubelet sets to its liking when it starts. The
// kernel's own stay as they are: kubelet sees files over them.
var kubeletSysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// newNamespace makes the namespaces for a base folder. /var/lib and /var/log
// are private in it, and it has an interface with a default route, which
// kubelet looks for.
func newNamespace(ctx context.Context, base string) (*Namespace, error) {
	pause, err := Pause()
	if err != nil {
		return nil, err
	}
	at := func(elem ...string) string { return filepath.Join(append([]string{base}, elem...)...) }
	script := "mount -t tmpfs none " + filepath.Dir(cniCache) + "\nmkdir " + cniCache + " /var/lib/kubelet\n"
	script += "mount --bind " + shellQuote(at("libcni")) + " " + cniCache + "\n"
	script += "mount --bind " + shellQuote(at("varlog")) + " /var/log\n"
	for name, value := range kubeletSysctls {
		path := at("sysctl", filepath.Base(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(value+"\n"), 0o644)); err != nil {
			return nil, err
		}
		script += "[ ! -e /proc/sys/" + name + " ] || mount --bind " + shellQuote(path) + " /proc/sys/" + name + "\n"
	}
	script += "ip link set lo up\nip link add eth0 type veth peer name peer0\nip link set peer0 up\nip addr add " + nodeAddress + "/24 dev eth0\n"
	script += "ip link set eth0 up\nip route add default via 192.0.2.1\n"
	script += "touch " + shellQuote(at("machine")) + "\nexec " + shellQuote(pause)
	for _, dir := range []string{at("libcni"), at("varlog")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}

	var said strings.Builder
	cmd := exec.Command("unshare", "--mount", "--net", "--propagation", "private", "--", "/bin/sh", "-ec", script)
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("make namespaces: %w", err)
	}
	n := &Namespace{base: base, holder: cmd, known: []int{cmd.Process.Pid}}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	var ended error
	err = Poll(ctx, 30*time.Second, func() error {
		if _, err := os.Stat(at("machine")); err == nil {
			return nil
		}
		select {
		case err := <-done:
			ended = fmt.Errorf("make namespaces: %w: %s", err, strings.TrimSpace(said.String()))
			return nil
		default:
			return errors.New("namespaces are being made")
		}
	})
	return n, errors.Join(err, ended)
}

// command is a command inside.
func (n *Namespace) command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--target", strconv.Itoa(n.holder.Process.Pid), "--mount", "--net", "--"}, args...)...)
}

// know notes a process that is part of the machine and of no pod.
func (n *Namespace) know(pid int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.known = append(n.known, pid)
}

func (n *Namespace) knows(pid int) bool {
	if n == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Contains(n.known, pid)
}

// Interfaces names the interfaces inside that the machine did not begin with:
// the pods' ends.
func (n *Namespace) Interfaces() ([]string, error) {
	path := fmt.Sprintf("/proc/%d/net/dev", n.holder.Process.Pid)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(string(b)) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), ":")
		// Kernels make tunnels of their own in every namespace.
		if ok && strings.HasPrefix(name, "veth") {
			names = append(names, name)
		}
	}
	return names, nil
}
