// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// WorkloadImage is the image of the containers of static pods. It is made here
// and never pulled.
const WorkloadImage = "cnireload.invalid/workload:1"

// NodeName is the name of the node, which ends the names of its static pods.
const NodeName = "node"

// Node is a daemon and a kubelet without a cluster: the pods are files.
type Node struct {
	*Daemon
	Home *Namespace
	// PodCIDR is what kubelet tells the daemon; empty is nothing.
	PodCIDR string
	// TextLog has kubelet write its log for people. KubeletLog reads none then.
	TextLog bool

	kubelet     *exec.Cmd
	kubeletDone chan struct{}
}

// NewNode lays out a node without starting anything.
func NewNode(o Options) (*Node, error) {
	o.PrivateNet = true
	d, err := New(o)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{"manifests", "kubelet"} {
		if err := os.MkdirAll(d.path(dir), 0o755); err != nil {
			return nil, err
		}
	}
	return &Node{Daemon: d}, nil
}

// Start runs the daemon, on the machine within that it makes the first time.
func (n *Node) Start(ctx context.Context) error {
	if n.Home == nil {
		home, err := newNamespace(ctx, n.Base)
		if err != nil {
			return err
		}
		n.Home, n.home = home, home
	}
	if err := n.Daemon.Start(ctx); err != nil {
		return err
	}
	workload, err := Workload()
	if err != nil {
		return err
	}
	return n.importImage(ctx, WorkloadImage, workload)
}

// Kill ends the daemon as a power cut would, and leaves its pods.
func (n *Node) Kill() error {
	if err := n.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-n.done
	return n.Stop()
}

// ManifestDir is the folder that kubelet takes its pods from.
func (n *Node) ManifestDir() string { return n.path("manifests") }

// KubeletLogPath is where kubelet's output goes.
func (n *Node) KubeletLogPath() string { return n.path("kubelet.log") }

// VarLog is what is /var/log on the machine within: the pods' logs are in it.
func (n *Node) VarLog() string { return n.path("varlog") }

// StartKubelet runs the kubelet in standalone mode.
func (n *Node) StartKubelet() error {
	binary, err := KubeletPath()
	if err != nil {
		return err
	}
	format := "json"
	if n.TextLog {
		format = "text"
	}
	config, err := json.MarshalIndent(map[string]any{
		"kind":                     "KubeletConfiguration",
		"apiVersion":               "kubelet.config.k8s.io/v1beta1",
		"staticPodPath":            n.ManifestDir(),
		"podCIDR":                  n.PodCIDR,
		"containerRuntimeEndpoint": "unix://" + n.Socket(),
		"podLogsDir":               filepath.Join(n.VarLog(), "pods"), // the same path inside and outside
		"volumePluginDir":          n.path("kubelet", "plugins"),
		"resolvConf":               "",
		"maxPods":                  250,
		// No server: nobody could tell it apart from the machine's own.
		"enableServer": false,
		"healthzPort":  0,
		"address":      "127.0.0.1",
		// There is no API server to ask; and nobody to be let in.
		"authentication": map[string]any{"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": false}},
		"authorization":  map[string]any{"mode": "AlwaysAllow"},
		// Pods go under the cgroup that is this node's.
		"cgroupDriver":           "cgroupfs",
		"cgroupRoot":             cgroupParent(n.Base),
		"cgroupsPerQOS":          false,
		"enforceNodeAllocatable": []string{},
		"failCgroupV1":           false,
		"failSwapOn":             false,
		"oomScoreAdj":            0,
		// The machine may be full; that is not what is looked at.
		"localStorageCapacityIsolation": false,
		"imageGCHighThresholdPercent":   100,
		"evictionHard":                  map[string]string{"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"},
		"makeIPTablesUtilChains":        false,
		// Events are in the log from 3 on, each Status from 4 on.
		"logging": map[string]any{"format": format, "verbosity": 4},
	}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.path("kubelet.json"), config, 0o644); err != nil {
		return err
	}
	log, err := os.OpenFile(n.KubeletLogPath(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := n.Home.command(binary, "--config", n.path("kubelet.json"), "--root-dir", n.path("kubelet"),
		"--cert-dir", n.path("kubelet", "pki"), "--hostname-override", NodeName, "--node-ip", nodeAddress)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = n.Base
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	n.Home.know(cmd.Process.Pid)
	done := make(chan struct{})
	n.kubelet, n.kubeletDone = cmd, done
	go func() { _ = cmd.Wait(); close(done) }()
	return nil
}

// KubeletEnded is closed when the kubelet has ended.
func (n *Node) KubeletEnded() <-chan struct{} { return n.kubeletDone }

// StopKubelet ends the kubelet; its pods stay.
func (n *Node) StopKubelet() error {
	if n.kubelet == nil {
		return nil
	}
	if err := n.kubelet.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-n.kubeletDone:
	case <-time.After(10 * time.Second):
		_ = n.kubelet.Process.Kill()
		<-n.kubeletDone
	}
	n.kubelet = nil
	return nil
}

// Destroy ends everything of the node and removes its folders.
func (n *Node) Destroy() error {
	return errors.Join(n.StopKubelet(), n.Daemon.Destroy())
}

// StaticPod is a pod with one container of the workload.
type StaticPod struct {
	Name        string
	HostNetwork bool
}

// Manifest is the file that kubelet reads.
func (p StaticPod) Manifest() ([]byte, error) {
	return json.MarshalIndent(map[string]any{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   map[string]any{"name": p.Name, "namespace": "default"},
		"spec": map[string]any{
			"hostNetwork":                   p.HostNetwork,
			"automountServiceAccountToken":  false,
			"enableServiceLinks":            false,
			"dnsPolicy":                     "Default",
			"terminationGracePeriodSeconds": 5,
			"containers": []any{map[string]any{
				"name": "main", "image": WorkloadImage, "imagePullPolicy": "Never",
			}},
		},
	}, "", "  ")
}

// Put gives kubelet pods to run. Each file is whole when it appears.
func (n *Node) Put(pods ...StaticPod) error {
	for _, p := range pods {
		b, err := p.Manifest()
		if err != nil {
			return err
		}
		// Kubelet does not look at names that begin with a dot.
		tmp := filepath.Join(n.ManifestDir(), "."+p.Name)
		if err := os.WriteFile(tmp, b, 0o644); err != nil {
			return err
		}
		if err := os.Rename(tmp, filepath.Join(n.ManifestDir(), p.Name+".json")); err != nil {
			return err
		}
	}
	return nil
}

// Take takes pods away again; without names, all.
func (n *Node) Take(names ...string) error {
	if len(names) == 0 {
		entries, err := os.ReadDir(n.ManifestDir())
		if err != nil {
			return err
		}
		for _, e := range entries {
			names = append(names, strings.TrimSuffix(e.Name(), ".json"))
		}
	}
	for _, name := range names {
		if err := os.Remove(filepath.Join(n.ManifestDir(), name+".json")); err != nil {
			return err
		}
	}
	return nil
}

// PodState is a running container of a static pod.
type PodState struct {
	Sandbox   string
	Container string
	Created   int64
	Attempt   uint32
}

// Running tells which static pods have a running container, by name.
func (n *Node) Running(ctx context.Context) (map[string]PodState, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := n.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, err
	}
	running := map[string]PodState{}
	for _, c := range r.GetContainers() {
		name := strings.TrimSuffix(c.GetLabels()["io.kubernetes.pod.name"], "-"+NodeName)
		if c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			running[name] = PodState{c.GetPodSandboxId(), c.GetId(), c.GetCreatedAt(), c.GetMetadata().GetAttempt()}
		}
	}
	return running, nil
}

// Sandboxes counts sandboxes, those that are ready and the others.
func (n *Node) Sandboxes(ctx context.Context) (ready, other int, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	for _, s := range r.GetItems() {
		if s.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY {
			ready++
		} else {
			other++
		}
	}
	return ready, other, err
}

// LogLine is a line of kubelet's log.
type LogLine struct {
	Time   time.Time
	Msg    string
	Err    string
	Pod    string
	Reason string // of an event
	Text   string // the line as it is
}

// KubeletLog reads kubelet's log so far.
func (n *Node) KubeletLog() ([]LogLine, error) {
	b, err := os.ReadFile(n.KubeletLogPath())
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	var all []LogLine
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var l struct {
			TS     float64         `json:"ts"`
			Msg    string          `json:"msg"`
			Err    string          `json:"err"`
			Reason string          `json:"reason"`
			Object json.RawMessage `json:"object"`
		}
		// What comes before logging is set up is plain text.
		if json.Unmarshal(lines.Bytes(), &l) != nil {
			continue
		}
		line := LogLine{Time: time.UnixMilli(int64(l.TS)), Msg: l.Msg, Err: l.Err, Text: lines.Text()}
		if l.Msg == "Event occurred" {
			var object struct{ Name string }
			var name string
			if json.Unmarshal(l.Object, &object) == nil {
				name = object.Name
			} else if json.Unmarshal(l.Object, &name) == nil {
				name = filepath.Base(name)
			}
			line.Reason, line.Pod = l.Reason, strings.TrimSuffix(name, "-"+NodeName)
		}
		all = append(all, line)
	}
	return all, lines.Err()
}

// Events are the times of kubelet's events with one of these reasons.
func (n *Node) Events(reasons ...string) ([]time.Time, error) {
	log, err := n.KubeletLog()
	var times []time.Time
	for _, l := range log {
		if slices.Contains(reasons, l.Reason) {
			times = append(times, l.Time)
		}
	}
	return times, err
}

// Said are the times at which kubelet's log has this text.
func (n *Node) Said(text string) ([]time.Time, error) {
	log, err := n.KubeletLog()
	var times []time.Time
	for _, l := range log {
		if strings.Contains(l.Text, text) {
			times = append(times, l.Time)
		}
	}
	return times, err
}

// KubeletTail is the end of kubelet's log.
func (n *Node) KubeletTail(lines int) string {
	b, err := os.ReadFile(n.KubeletLogPath())
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
