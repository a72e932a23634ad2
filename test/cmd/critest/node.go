// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/harness"
)

// registryPort is free: each daemon has a network of its own.
const registryPort = 5000

// mirrored are the registries that critest pulls from.
var mirrored = []string{"registry.k8s.io", "k8s.gcr.io", "gcr.io"}

const network = `{"cniVersion": "1.0.0", "name": "critest", "plugins": [
	{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "promiscMode": true,
	 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}
]}
`

// node is a side's daemon with all that critest needs around it, in a mount
// and a network namespace of its own.
type node struct {
	*harness.Daemon
	tools    string
	registry *exec.Cmd
}

// start starts the daemon, a registry beside it, and fills that with images,
// which are OCI layouts by their reference.
func start(ctx context.Context, side harness.Side, layouts map[string]string) (_ *node, err error) {
	tools, err := harness.ToolsDir()
	if err != nil {
		return nil, err
	}
	// The name makes the folder one that harness.Sweep knows.
	base, err := os.MkdirTemp("", harness.Prefix)
	if err != nil {
		return nil, err
	}
	// Root of a pod's user namespace must get through to its files.
	if err := os.Chmod(base, 0o711); err != nil {
		return nil, err
	}
	certs := filepath.Join(base, "certs.d")
	d, err := harness.New(harness.Options{
		Side: side, Base: base, PrivateNet: true, NRI: true, AppArmor: true, RegistryDir: certs,
		BinDirs: []string{filepath.Join(tools, "cni")},
		// What a node has by default; the harness's own is for tests of refusals.
		ReadyWait: "30s",
		LogLevel:  "debug",
	})
	if err != nil {
		return nil, err
	}
	n := &node{Daemon: d, tools: tools}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", side, err), n.Destroy())
		}
	}()
	for _, host := range mirrored {
		dir := filepath.Join(certs, host)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return n, err
		}
		hosts := fmt.Sprintf("server = 'http://127.0.0.1:%d'\n", registryPort)
		if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644); err != nil {
			return n, err
		}
	}
	if err := os.Mkdir(n.temp(), 0o755); err != nil {
		return n, err
	}
	if err := os.WriteFile(filepath.Join(n.ConfDir, "10-critest.conflist"), []byte(network), 0o644); err != nil {
		return n, err
	}
	if err := n.Start(ctx); err != nil {
		return n, err
	}
	if err := n.InNamespace("ip", "link", "set", "lo", "up"); err != nil {
		return n, err
	}
	if err := harness.Poll(ctx, time.Minute, func() error {
		c, err := n.Network(ctx)
		if err == nil && !c.Ready {
			err = errors.New(c.String())
		}
		return err
	}); err != nil {
		return n, err
	}
	return n, n.serve(ctx, layouts)
}

func (n *node) temp() string { return filepath.Join(n.Base, "tmp") }

// serve starts the registry and pushes the images.
func (n *node) serve(ctx context.Context, layouts map[string]string) error {
	log, err := os.Create(filepath.Join(n.Base, "registry.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	// It goes at the end with all else in the daemon's mount namespace, also
	// when this program is interrupted.
	n.registry = n.CommandInside(filepath.Join(n.tools, "bin", "registry"), "-port", strconv.Itoa(registryPort))
	n.registry.Stdout, n.registry.Stderr = log, log
	if err := n.registry.Start(); err != nil {
		return err
	}
	var begun []byte
	if err := harness.Poll(ctx, time.Minute, func() (err error) {
		if begun, err = os.ReadFile(log.Name()); err == nil && !strings.Contains(string(begun), "serving on port") {
			err = fmt.Errorf("the registry does not start: %s", begun)
		}
		return err
	}); err != nil {
		return err
	}
	for ref, layout := range layouts {
		to := net.JoinHostPort("127.0.0.1", strconv.Itoa(registryPort)) + "/" + ref
		if err := n.InNamespace(filepath.Join(n.tools, "bin", "crane"), "push", "--insecure", layout, to); err != nil {
			return err
		}
	}
	return nil
}

// critest runs the suite; what it prints goes to report.log, its results to
// report.xml. That specs fail is no error.
func (n *node) critest(ctx context.Context, report string, seed int64, parallel int, focus string) error {
	log, err := os.Create(report + ".log")
	if err != nil {
		return err
	}
	defer log.Close()
	socket := "unix://" + n.Socket()
	args := []string{
		"env", "TMPDIR=" + n.temp(), "PATH=" + filepath.Join(n.tools, "bin") + ":" + os.Getenv("PATH"),
		filepath.Join(n.tools, "bin", "critest"),
		"-runtime-endpoint=" + socket, "-image-endpoint=" + socket, "-nri-socket=" + n.NRISocket(),
		"-ginkgo.no-color", "-ginkgo.junit-report=" + report + ".xml", fmt.Sprintf("-ginkgo.seed=%d", seed),
	}
	if parallel > 1 {
		args = append(args, fmt.Sprintf("-parallel=%d", parallel))
	}
	if focus != "" {
		args = append(args, "-ginkgo.focus="+focus)
	}
	if err := os.RemoveAll(report + ".xml"); err != nil {
		return err
	}
	cmd := n.CommandInside(args...)
	cmd.Dir = n.temp()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err = <-done:
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		<-done
		return fmt.Errorf("%s: critest: %w: see %s", n.Side, context.Cause(ctx), log.Name())
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		return nil
	}
	return err
}

// finish looks at what the run has left, ends the node and keeps its log. The
// first list is what critest itself did not remove; the second is what is left
// when every pod has been removed, and has to be empty.
func (n *node) finish(ctx context.Context, logTo string) (pods, leaks []string, err error) {
	defer func() { err = errors.Join(err, n.Destroy()) }()
	if n.registry != nil {
		if err := n.registry.Process.Signal(syscall.SIGTERM); err != nil {
			return nil, nil, err
		}
		_ = n.registry.Wait()
	}
	if !n.Alive() {
		return nil, nil, fmt.Errorf("%s: containerd ended during the run:\n%s", n.Side, n.LogTail(20))
	}
	list, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, nil, err
	}
	for _, p := range list.GetItems() {
		pods = append(pods, "pod "+p.GetMetadata().GetName())
	}
	if err := n.RemovePods(ctx); err != nil {
		return pods, nil, err
	}
	leaks = append(n.Leaks(), n.addresses()...)
	links, err := n.CommandInside("ip", "-o", "link", "show", "type", "veth").Output()
	if err != nil {
		return pods, leaks, fmt.Errorf("ip link: %w", err)
	}
	for l := range strings.Lines(string(links)) {
		leaks = append(leaks, "interface "+strings.Fields(l)[1])
	}
	log, err := os.ReadFile(n.LogPath())
	if err != nil {
		return pods, leaks, err
	}
	return pods, leaks, os.WriteFile(logTo, log, 0o644)
}

// addresses are those that host-local holds, and what libcni remembers.
func (n *node) addresses() []string {
	var held []string
	for _, dir := range []string{"networks/critest", "results"} {
		entries, err := os.ReadDir(filepath.Join(n.AttachmentCache(), dir))
		if err != nil {
			continue // no pod had a network
		}
		for _, e := range entries {
			if _, err := netip.ParseAddr(e.Name()); err == nil {
				held = append(held, "address "+e.Name())
			} else if dir == "results" {
				held = append(held, "attachment "+e.Name())
			}
		}
	}
	return held
}

// defaultCgroup is where containerd puts pods without a parent cgroup, which
// is what critest's are; it and critest leave the emptied ones to systemd.
const defaultCgroup = "/sys/fs/cgroup/*/k8s.io"

func cgroups() []string {
	v1, _ := filepath.Glob(defaultCgroup)
	v2, _ := filepath.Glob(filepath.Dir(filepath.Dir(defaultCgroup)) + "/k8s.io")
	return append(v1, v2...)
}

// removeCgroups removes the empty ones that were not there before.
func removeCgroups(before []string) {
	for _, dir := range cgroups() {
		if !slices.Contains(before, dir) {
			// One with somebody's pods in it stays, the kernel sees to that.
			_ = os.Remove(dir)
		}
	}
}

var alarm = regexp.MustCompile(`(?m)^(panic: |fatal error: |WARNING: DATA RACE|goroutine \d+ \[).*`)

// alarms are the lines of a daemon's log that no run may have.
func alarms(log []byte) []string {
	var lines []string
	for _, m := range alarm.FindAll(log, -1) {
		lines = append(lines, string(m))
	}
	return lines
}
