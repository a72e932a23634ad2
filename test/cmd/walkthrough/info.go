// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// info is the part of `crictl info` that is shown.
type info struct {
	Status struct {
		Conditions []struct {
			Type    string `json:"type"`
			Status  bool   `json:"status"`
			Reason  string `json:"reason"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
	LastCNILoadStatus string         `json:"lastCNILoadStatus"`
	CNIReload         harness.Report `json:"cniReload"`
}

func (i info) network() (ready bool, text string) {
	for _, c := range i.Status.Conditions {
		if c.Type == "NetworkReady" {
			if c.Status {
				return true, "true"
			}
			return false, fmt.Sprintf("false  %s\n%s", c.Reason, c.Message)
		}
	}
	return false, "no such condition"
}

// show waits until the node says what is expected and prints a compact
// crictl info.
func (w *walk) show(ctx context.Context, ready bool, cause string) error {
	begin := time.Now()
	err := harness.Poll(ctx, 10*time.Second, func() error {
		c, err := w.d.Network(ctx)
		if err == nil && (c.Ready != ready || !strings.Contains(c.Message, cause)) {
			err = fmt.Errorf("want NetworkReady %t %s, got %v", ready, cause, c)
		}
		return err
	})
	if err != nil {
		return err
	}
	took := time.Since(begin)
	out, err := w.run(ctx, "info")
	if err != nil {
		return err
	}
	var i info
	if err := json.Unmarshal([]byte(out), &i); err != nil {
		return fmt.Errorf("crictl info: %w", err)
	}
	say("      crictl info, %s later:", took.Round(time.Millisecond))
	_, condition := i.network()
	line("NetworkReady", condition)
	line("lastCNILoadStatus", i.LastCNILoadStatus)
	r := i.CNIReload
	watch := r.Watch.State
	if r.Watch.Cause != "" {
		watch += " (" + r.Watch.Cause + ")"
	}
	line("cniReload", fmt.Sprintf("ready=%t generation=%d", r.Ready, r.Generation))
	if !strings.Contains(condition, r.Message) {
		line("  message", r.Message)
	}
	line("  watch", watch)
	for _, n := range r.Networks {
		var plugins []string
		for _, p := range n.Plugins {
			state := p.Status
			if p.Problem != "" {
				state = p.Problem
			}
			plugins = append(plugins, p.Type+" ("+state+")")
		}
		from := ""
		if n.File.File != "" {
			from = " from " + filepath.Base(n.File.File)
		}
		line("  network", fmt.Sprintf("%s on %s%s: %s", n.Name, n.Interface, from, strings.Join(plugins, ", ")))
	}
	for _, s := range r.Skipped {
		line("  skipped", s.File+": "+s.Reason)
	}
	if t := r.Template; t != nil {
		line("  template", strings.TrimSpace(fmt.Sprintf("%s %s %s", t.State, strings.Join(t.CIDRs, ","), t.File)))
	}
	return nil
}

func line(key, value string) {
	for n, part := range strings.Split(value, "\n") {
		if n > 0 {
			key = ""
		}
		if part != "" {
			say("        %-18s %s", key, part)
		}
	}
}

func (w *walk) podPath() string { return filepath.Join(w.base, "pod.json") }

func (w *walk) podJSON() string {
	return fmt.Sprintf(`{
  "metadata": {"name": "walkthrough", "uid": "walkthrough-1", "namespace": "default", "attempt": 0},
  "log_directory": %q,
  "linux": {"cgroup_parent": %q}
}
`, filepath.Join(w.base, "podlogs"), "/"+filepath.Base(w.base))
}

// inspect reads the pod's address out of crictl inspectp.
func (w *walk) inspect(ctx context.Context, pod string) (string, error) {
	out, err := w.run(ctx, "inspectp", pod)
	if err != nil {
		return "", err
	}
	var p struct {
		Status struct {
			Network struct {
				IP string `json:"ip"`
			} `json:"network"`
		} `json:"status"`
	}
	if err := json.Unmarshal([]byte(out), &p); err != nil {
		return "", fmt.Errorf("crictl inspectp: %w", err)
	}
	return p.Status.Network.IP, nil
}
