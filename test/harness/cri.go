// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// callTimeout bounds calls that a healthy daemon answers in milliseconds.
const callTimeout = 10 * time.Second

// Condition is NetworkReady as CRI Status tells it.
type Condition struct {
	Ready   bool
	Reason  string
	Message string
}

func (c Condition) String() string {
	if c.Ready {
		return "NetworkReady true"
	}
	return "NetworkReady false: " + c.Message
}

// Network asks for the NetworkReady condition.
func (d *Daemon) Network(ctx context.Context) (Condition, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := d.Runtime.Status(ctx, &runtimeapi.StatusRequest{})
	if err != nil {
		return Condition{}, err
	}
	return condition(r)
}

func condition(r *runtimeapi.StatusResponse) (Condition, error) {
	for _, c := range r.GetStatus().GetConditions() {
		if c.GetType() == runtimeapi.NetworkReady {
			return Condition{c.GetStatus(), c.GetReason(), c.GetMessage()}, nil
		}
	}
	return Condition{}, errors.New("status has no NetworkReady condition")
}

// Info asks for the verbose status, which is what crictl info prints.
func (d *Daemon) Info(ctx context.Context) (Condition, map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := d.Runtime.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return Condition{}, nil, err
	}
	c, err := condition(r)
	return c, r.GetInfo(), err
}

// File is a file that is in use.
type File struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// Report is the cniReload object of the verbose status.
type Report struct {
	Version    string    `json:"version"`
	Ready      bool      `json:"ready"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message"`
	Generation int       `json:"generation"`
	LoadedAt   time.Time `json:"loadedAt"`
	Stale      bool      `json:"stale"`
	LastError  string    `json:"lastError"`
	ConfDir    string    `json:"confDir"`
	// Trial is set while pods that have failed are tried one at a time because they are many.
	Trial *struct {
		Failures int       `json:"failures"`
		Since    time.Time `json:"since"`
		Held     int       `json:"held"`
		Cause    string    `json:"cause"`
	} `json:"trial"`
	Watch struct {
		State string `json:"state"`
		Cause string `json:"cause"`
	} `json:"watch"`
	Networks []struct {
		File
		Name       string `json:"name"`
		CNIVersion string `json:"cniVersion"`
		Interface  string `json:"interface"`
		Stale      bool   `json:"stale"`
		DropIns    []File `json:"dropIns"`
		Plugins    []struct {
			Role              string   `json:"role"`
			Type              string   `json:"type"`
			Path              string   `json:"path"`
			SupportedVersions []string `json:"supportedVersions"`
			Status            string   `json:"status"`
			StatusVerb        string   `json:"statusVerb"`
			Problem           string   `json:"problem"`
		} `json:"plugins"`
	} `json:"networks"`
	Skipped []struct {
		File   string `json:"file"`
		Reason string `json:"reason"`
	} `json:"skipped"`
	Template *struct {
		Path  string   `json:"path"`
		File  string   `json:"file"`
		CIDRs []string `json:"cidrs"`
		State string   `json:"state"`
		Error string   `json:"error"`
	} `json:"template"`
	Gates []Gate `json:"gates"`
	Calls Calls  `json:"calls"`
	GC    *struct {
		At    time.Time `json:"at"`
		Stale int       `json:"stale"`
		Error string    `json:"error"`
	} `json:"gc"`
	Timeouts map[string]string `json:"timeouts"`
}

// Calls is what plugins are at, and what is still to be asked of them.
type Calls struct {
	InFlight   []Process `json:"inFlight"`
	Abandoned  []Process `json:"abandoned"`
	LeftOver   []Process `json:"leftOver"`
	Tombstones []struct {
		Sandbox  string    `json:"sandbox"`
		Networks []string  `json:"networks"`
		Since    time.Time `json:"since"`
		Cause    string    `json:"cause"`
		Attempts int       `json:"attempts"`
	} `json:"tombstones"`
	Counts map[string]int `json:"counts"`
}

// Process is a process of a plugin that has not ended.
type Process struct {
	Plugin  string    `json:"plugin"`
	Verb    string    `json:"verb"`
	Sandbox string    `json:"sandbox"`
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
}

// Gate is what a plugin needs from its agent, as the report tells it.
type Gate struct {
	Plugin string    `json:"plugin"`
	Kind   string    `json:"kind"`
	Target string    `json:"target"`
	Key    string    `json:"key"`
	Mode   string    `json:"mode"`
	Ops    []string  `json:"ops"`
	Open   bool      `json:"open"`
	Since  time.Time `json:"since"`
	Cause  string    `json:"cause"`
}

// Report reads the cniReload report of a runtime handler; the empty name is
// the default network's.
func (d *Daemon) Report(ctx context.Context, handler string) (Report, error) {
	_, info, err := d.Info(ctx)
	if err != nil {
		return Report{}, err
	}
	return ReportFrom(info, handler)
}

// ReportFrom decodes the report out of a verbose status.
func ReportFrom(info map[string]string, handler string) (Report, error) {
	key := "cniReload"
	if handler != "" {
		key += "." + handler
	}
	var r Report
	text, ok := info[key]
	if !ok {
		return r, fmt.Errorf("status has no %s", key)
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, fmt.Errorf("%s: %w: %s", key, err, text)
	}
	return r, nil
}

// Pod describes a sandbox to run.
type Pod struct {
	Name        string
	Handler     string
	HostNetwork bool
	Attempt     uint32
	// Timeout is the caller's deadline; zero means a generous one.
	Timeout time.Duration
}

// SandboxConfig is the CRI form of a pod.
func (d *Daemon) SandboxConfig(p Pod) *runtimeapi.PodSandboxConfig {
	network := runtimeapi.NamespaceMode_POD
	if p.HostNetwork {
		network = runtimeapi.NamespaceMode_NODE
	}
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: p.Name, Uid: "uid-" + p.Name, Namespace: "default", Attempt: p.Attempt},
		LogDirectory: d.path("podlogs"),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: cgroupParent(d.Base),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: network},
			},
		},
	}
}

// RunPod runs a sandbox and returns its id.
func (d *Daemon) RunPod(ctx context.Context, p Pod) (string, error) {
	if p.Timeout == 0 {
		p.Timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	r, err := d.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{
		Config:         d.SandboxConfig(p),
		RuntimeHandler: p.Handler,
	})
	return r.GetPodSandboxId(), err
}

// PodIP is the pod's address as CRI tells it.
func (d *Daemon) PodIP(ctx context.Context, id string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := d.Runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	return r.GetStatus().GetNetwork().GetIp(), err
}

// RemovePod stops and removes a sandbox.
func (d *Daemon) RemovePod(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if _, err := d.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return err
	}
	_, err := d.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// SetCIDR tells the daemon the pod CIDR, as kubelet does.
func (d *Daemon) SetCIDR(ctx context.Context, cidr string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := d.Runtime.UpdateRuntimeConfig(ctx, &runtimeapi.UpdateRuntimeConfigRequest{
		RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}},
	})
	return err
}

// ContainerPID is the first process of a container.
func (d *Daemon) ContainerPID(ctx context.Context, id string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := d.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return 0, err
	}
	var info struct {
		PID int `json:"pid"`
	}
	return info.PID, json.Unmarshal([]byte(r.GetInfo()["info"]), &info)
}
