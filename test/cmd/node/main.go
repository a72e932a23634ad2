// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command node leaves a one-machine node running, a kubelet without a cluster
// on the patched containerd (or stock), for a person to play with, until it is
// interrupted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

func main() {
	side := flag.String("side", string(harness.Patched), "patched or stock")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, harness.Side(*side)); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted, everything is cleaned up")
		}
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
}

const template = `{
  "cniVersion": "1.0.0",
  "name": "node",
  "plugins": [
    {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "subnet": "{{.PodCIDR}}", "routes": [{"dst": "0.0.0.0/0"}]}}
  ]
}
`

func run(ctx context.Context, side harness.Side) (err error) {
	if side != harness.Patched && side != harness.Stock {
		return fmt.Errorf("no side %q: there are patched and stock", side)
	}
	if err := harness.Preflight("make node", side); err != nil {
		return err
	}
	if err := harness.Sweep(); err != nil {
		return fmt.Errorf("clean up after an earlier run: %w", err)
	}
	crictl, err := harness.Crictl()
	if err != nil {
		return err
	}
	n, err := harness.NewNode(harness.Options{Side: side, ReadyWait: "30s"})
	if err != nil {
		return err
	}
	defer func() {
		fmt.Println("\nthe node ends")
		if derr := n.Destroy(); derr != nil {
			err = errors.Join(err, derr)
		} else {
			fmt.Println("left behind: no process, no mount, no cgroup, no file")
		}
	}()
	n.TextLog, n.PodCIDR = true, "10.177.0.0/24"
	n.Template = filepath.Join(n.Base, "net.tmpl")
	wrapper := filepath.Join(n.Base, "crictl")
	config := filepath.Join(n.Base, "crictl.yaml")
	for path, content := range map[string]string{
		n.Template: template,
		config:     fmt.Sprintf("runtime-endpoint: unix://%s\nimage-endpoint: unix://%[1]s\ntimeout: 30\n", n.Socket()),
		wrapper:    fmt.Sprintf("#!/bin/sh\nexec '%s' --config '%s' \"$@\"\n", crictl, config),
	} {
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"ptp", "bridge", "portmap", "host-local", "loopback"} {
		src, err := harness.Plugin(name)
		if err != nil {
			return err
		}
		if err := harness.Install(src, filepath.Join(n.BinDirs[0], name)); err != nil {
			return err
		}
	}
	pods := []harness.StaticPod{{Name: "web"}, {Name: "db"}, {Name: "agent", HostNetwork: true}}
	if err := n.Put(pods...); err != nil {
		return err
	}
	fmt.Printf("starting %s containerd and kubelet in %s\n", side, n.Base)
	if err := n.Start(ctx); err != nil {
		return err
	}
	if err := n.StartKubelet(); err != nil {
		return err
	}
	if err := harness.Poll(ctx, 3*time.Minute, func() error {
		select {
		case <-n.KubeletEnded():
			return errors.New("kubelet ended")
		default:
		}
		running, err := n.Running(ctx)
		if err == nil && len(running) < len(pods) {
			err = fmt.Errorf("%d of %d pods run", len(running), len(pods))
		}
		return err
	}); err != nil {
		return fmt.Errorf("%w; end of kubelet's log:\n%s", err, n.KubeletTail(20))
	}
	tell(n, wrapper)
	select {
	case <-ctx.Done():
	case <-n.KubeletEnded():
		return fmt.Errorf("kubelet ended; end of its log:\n%s", n.KubeletTail(20))
	case <-n.Ended():
		return fmt.Errorf("containerd ended; end of its log:\n%s", n.LogTail(20))
	}
	return nil
}

func tell(n *harness.Node, crictl string) {
	rows := [][2]string{
		{"pods", crictl + " pods"},
		{"containers", crictl + " ps"},
		{"the network, and why it is not ready", crictl + " info | jq .cniReload"},
		{"a container's log", crictl + " logs $(" + crictl + " ps -q --name main | head -n 1)"},
		{"all pods' logs", "ls " + filepath.Join(n.VarLog(), "pods")},
		{"kubelet's log", "tail -f " + n.KubeletLogPath()},
		{"containerd's log", "tail -f " + n.LogPath()},
		{"one more pod", fmt.Sprintf("sed s/web/more/ %s/web.json > %[1]s/more.json", n.ManifestDir())},
		{"take it away", "rm " + filepath.Join(n.ManifestDir(), "more.json")},
		{"network config", n.ConfDir + ", rendered from " + n.Template},
		{"a plugin goes", fmt.Sprintf("mv %s/ptp %s/ptp.aside", n.BinDirs[0], n.Base)},
		{"and comes back", fmt.Sprintf("mv %[2]s/ptp.aside %[1]s/ptp", n.BinDirs[0], n.Base)},
	}
	fmt.Println("\nThe node runs. As root, in another terminal:")
	for _, r := range rows {
		fmt.Printf("  %-38s %s\n", r[0], r[1])
	}
	fmt.Println(strings.TrimSpace("\nCtrl-C ends it and removes everything."))
}
