// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command walkthrough starts the patched containerd beside whatever runs on
// the machine and shows, with crictl, runc and real CNI plugins, when the node
// says that its network is ready and why not.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cnireload/cnireload/test/harness"
)

func main() {
	keep := flag.Bool("keep", os.Getenv("KEEP") == "1", "leave the daemon running at the end")
	stop := flag.Bool("stop", os.Getenv("STOP") == "1", "stop a daemon that was left running, and clean up")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, *keep, *stop); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted, everything is cleaned up")
		}
		fmt.Fprintln(os.Stderr, "walkthrough:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, keep, stop bool) (err error) {
	if err := harness.Preflight("make run", harness.Patched); err != nil {
		return err
	}
	w := &walk{}
	if err := w.place(); err != nil {
		return err
	}
	unlock, err := w.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(w.base); err == nil {
		say("cleaning up what an earlier run left in %s", w.base)
		if err := w.clean(); err != nil {
			return err
		}
	}
	if stop {
		return nil
	}
	for _, name := range []string{"ptp", "host-local", "loopback"} {
		path, err := harness.Plugin(name)
		if err != nil {
			return err
		}
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%s is missing: \"make run\" builds it", path)
		}
	}

	if err = w.walk(ctx); err == nil && keep {
		w.tell()
		return nil
	}
	if err != nil && ctx.Err() == nil && w.d != nil {
		fmt.Fprintf(os.Stderr, "end of containerd's log:\n%s\n", w.d.LogTail(20))
	}
	if cerr := w.clean(); cerr != nil {
		return errors.Join(err, cerr)
	}
	if err == nil {
		say("\nleft behind: no process, no mount, no network namespace, no interface, no file")
	}
	return err
}

type walk struct {
	base   string
	crictl string
	cidr   netip.Prefix
	d      *harness.Daemon
	step   int
}

// place chooses folders that belong to this checkout, so that two checkouts
// do not meet, and that a later run finds.
func (w *walk) place() error {
	root, err := harness.Root()
	if err != nil {
		return err
	}
	// Short, because the names of unix sockets are bounded.
	w.base = fmt.Sprintf("/run/%srun-%.4x", harness.Prefix, sha256.Sum256([]byte(root)))
	if w.crictl, err = harness.Crictl(); err != nil {
		return err
	}
	if _, err := os.Stat(w.crictl); err != nil {
		return fmt.Errorf("%s is missing: \"make run\" builds it", w.crictl)
	}
	return nil
}

func (w *walk) lock() (unlock func(), err error) {
	f, err := os.OpenFile(w.base+".lock", os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.New("another \"make run\" of this checkout is going on: wait for it or end it")
	}
	return func() { _ = os.Remove(f.Name()); _ = f.Close() }, nil
}

func (w *walk) hostNetPath() string    { return filepath.Join(w.base, "hostnet.json") }
func (w *walk) crictlConfPath() string { return filepath.Join(w.base, "crictl.yaml") }

// clean ends the daemon and its pods, whoever started them, and checks that
// nothing is left.
func (w *walk) clean() error {
	// Pods first and in order, if the daemon still answers.
	if _, err := os.Stat(w.crictlConfPath()); err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_, _ = w.run(ctx, "rmp", "--all", "--force")
	}
	hostNet, err := harness.LoadHostNet(w.hostNetPath())
	errs := []error{err}
	if w.d != nil {
		errs = append(errs, w.d.Stop())
	}
	errs = append(errs, harness.Clean(w.base), hostNet.Restore())
	return errors.Join(errs...)
}

// tell explains how to use the daemon that is left running.
func (w *walk) tell() {
	say("\nleft running (KEEP=1), containerd is process %d, its log is %s", w.d.PID(), w.d.LogPath())
	say("  talk to it:  %s --config %s info", w.crictl, w.crictlConfPath())
	say("  conf dir:    %s", w.d.ConfDir)
	say("  plugins:     %s", w.d.BinDirs[0])
	say("  stop it:     make run STOP=1")
}

const readyWait = "1s"

const template = `{
  "cniVersion": "1.0.0",
  "name": "walkthrough",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "ranges": [{{range $i, $range := .PodCIDRRanges}}{{if $i}}, {{end}}[{"subnet": "{{$range}}"}]{{end}}],
        "routes": [{{range $i, $route := .Routes}}{{if $i}}, {{end}}{"dst": "{{$route}}"}{{end}}]
      }
    }
  ]
}
`

func (w *walk) walk(ctx context.Context) error {
	hostNet, err := harness.NewHostNet()
	if err != nil {
		return err
	}
	w.cidr = hostNet.CIDR
	if w.d, err = harness.New(harness.Options{
		Side:     harness.Patched,
		Base:     w.base,
		Template: filepath.Join(w.base, "net.tmpl"),
		Detached: true,
		// The default is 30s, in which most pods of a booting node need no
		// second try.
		ReadyWait: readyWait,
	}); err != nil {
		return err
	}
	d := w.d
	crictlConf := fmt.Sprintf("runtime-endpoint: unix://%s\nimage-endpoint: unix://%[1]s\ntimeout: 30\n", d.Socket())
	for path, content := range map[string]string{w.crictlConfPath(): crictlConf, d.Template: template} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := hostNet.Save(w.hostNetPath()); err != nil {
		return err
	}
	for _, name := range []string{"host-local", "loopback"} {
		if err := w.install(name); err != nil {
			return err
		}
	}

	w.title("start the patched containerd; the conf dir %s is empty", d.ConfDir)
	if err := d.Start(ctx); err != nil {
		return err
	}
	if err := w.show(ctx, false, "no network config found"); err != nil {
		return err
	}

	w.title("crictl update-runtime-config --pod-cidr %s renders conf_template, but the ptp plugin is not installed", w.cidr)
	if _, err := w.run(ctx, "update-runtime-config", "--pod-cidr", w.cidr.String()); err != nil {
		return err
	}
	if err := w.show(ctx, false, `"ptp"`); err != nil {
		return err
	}
	w.title("a pod waits for its network, here for ready_wait = %q (default 30s), and is refused before anything is run or written for it", readyWait)
	if err := os.WriteFile(w.podPath(), []byte(w.podJSON()), 0o644); err != nil {
		return err
	}
	out, err := w.run(ctx, "runp", w.podPath())
	if err == nil {
		return fmt.Errorf("pod %s ran without a network", strings.TrimSpace(out))
	}
	say("      %s", lastLine(err.Error()))

	w.title("the ptp binary arrives in %s; nothing else is touched", d.BinDirs[0])
	if err := w.install("ptp"); err != nil {
		return err
	}
	if err := w.show(ctx, true, ""); err != nil {
		return err
	}

	w.title("crictl runp: a sandbox with runc, ptp and host-local")
	if out, err = w.run(ctx, "runp", w.podPath()); err != nil {
		return err
	}
	pod := strings.TrimSpace(out)
	ip, err := w.inspect(ctx, pod)
	if err != nil {
		return err
	}
	if a, err := netip.ParseAddr(ip); err != nil || !w.cidr.Contains(a) {
		return fmt.Errorf("pod address %q is not in %s", ip, w.cidr)
	}
	used, err := w.addresses()
	if err != nil {
		return err
	}
	host, err := harness.InterfacesIn(w.cidr)
	if err != nil {
		return err
	}
	say("      pod %.13s has address %s; host-local holds %v; interface on the node: %s", pod, ip, used, strings.Join(host, ", "))
	if len(used) != 1 || used[0] != ip || len(host) == 0 {
		return fmt.Errorf("want %s held by host-local and an interface for it", ip)
	}

	w.title("the conf dir is removed (stock containerd exits here)")
	aside := d.ConfDir + ".aside"
	if err := errors.Join(os.CopyFS(aside, os.DirFS(d.ConfDir)), os.RemoveAll(d.ConfDir)); err != nil {
		return err
	}
	if err := w.show(ctx, false, "does not exist"); err != nil {
		return err
	}
	if !d.Alive() {
		return errors.New("containerd ended when its conf dir was removed")
	}
	say("      containerd is alive, process %d", d.PID())

	w.title("the conf dir is made again")
	if err := os.Rename(aside, d.ConfDir); err != nil {
		return err
	}
	if err := w.show(ctx, true, ""); err != nil {
		return err
	}

	w.title("the pod is removed")
	if _, err := w.run(ctx, "stopp", pod); err != nil {
		return err
	}
	if _, err := w.run(ctx, "rmp", pod); err != nil {
		return err
	}
	if used, err = w.addresses(); err != nil {
		return err
	}
	say("      addresses held by host-local: %v", used)
	if len(used) > 0 {
		return fmt.Errorf("addresses %v were not freed", used)
	}
	if left := d.Leaks(); len(left) > 0 {
		return fmt.Errorf("left of the pod: %s", strings.Join(left, ", "))
	}
	say("      left of it: no shim, no mount, no network namespace")
	return nil
}

func (w *walk) install(name string) error {
	src, err := harness.Plugin(name)
	if err != nil {
		return err
	}
	return harness.Install(src, filepath.Join(w.d.BinDirs[0], name))
}

// addresses are those host-local has given out.
func (w *walk) addresses() ([]string, error) { return w.d.HostLocal("walkthrough") }

// run runs crictl and returns what it printed.
func (w *walk) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, w.crictl, append([]string{"--config", w.crictlConfPath()}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("crictl %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

func (w *walk) title(format string, args ...any) {
	w.step++
	say("\n[%d/8] %s", w.step, fmt.Sprintf(format, args...))
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}
