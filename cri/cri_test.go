// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload"
)

// other is an implementation of CNI that CRI's own tests use.
type other struct {
	cnireload.CNI
	err error
}

func (o other) Status() error                      { return o.err }
func (o other) GetConfig() *cnireload.ConfigResult { return &cnireload.ConfigResult{} }

func network(t *testing.T, n Network, opts ...cnireload.Opt) *cnireload.Network {
	t.Helper()
	c, err := cnireload.New(append([]cnireload.Opt{n.Option()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestSettings(t *testing.T) {
	set := func(change func(*Settings)) Settings {
		s := DefaultSettings()
		change(&s)
		return s
	}
	for _, tt := range []struct {
		settings Settings
		words    []string // of the error
		other    bool     // whether it is one also for other handlers than the default
	}{
		{settings: DefaultSettings()},
		{settings: Settings{}},
		{settings: set(func(s *Settings) { s.Readiness = "lax" }), words: []string{"readiness", "lax", "strict", "parse"}, other: true},
		{settings: set(func(s *Settings) { s.Gates = "on" }), words: []string{"gates", "on", "auto", "report", "off"}, other: true},
		{settings: set(func(s *Settings) { s.ReadyWait = "30" }), words: []string{"ready_wait", `"30"`, "30s"}, other: true},
		{settings: set(func(s *Settings) { s.DelGrace = "-1m" }), words: []string{"del_grace", `"-1m"`, "duration"}, other: true},
		{settings: set(func(s *Settings) { s.NetworkName = "a/b" }), words: []string{"network_name", `"a/b"`}},
		{settings: set(func(s *Settings) { s.RequiredPlugins = []string{"/x"} }), words: []string{"required_plugins", `"/x"`}},
		{settings: set(func(s *Settings) { s.ReadyFiles = []string{"x"} }), words: []string{"ready_files", `"x"`, "absolute"}},
	} {
		for _, isDefault := range []bool{true, false} {
			_, err := cnireload.New(Network{Handler: "h", Default: isDefault, Settings: tt.settings, Root: t.TempDir()}.Option())
			if want := tt.words != nil && (isDefault || tt.other); (err != nil) != want {
				t.Errorf("%+v, default %t: error %v", tt.settings, isDefault, err)
			}
			for _, w := range tt.words {
				if err != nil && !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not name %q", err, w)
				}
			}
		}
	}
}

// A network is loaded by Prime, asks for sandboxes only in Run, and ends with
// Close.
func TestLifecycle(t *testing.T) {
	asked := make(chan struct{}, 100)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "10-a.conflist"),
		[]byte(`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"missing"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	n := network(t, Network{
		Handler:  "h",
		Load:     []cnireload.Opt{cnireload.WithDefaultConf},
		Settings: DefaultSettings(),
		Root:     t.TempDir(),
		Sandboxes: func(context.Context) ([]cnireload.Sandbox, error) {
			asked <- struct{}{}
			return nil, nil
		},
	}, cnireload.WithPluginConfDir(dir))
	Prime(n)
	if got := n.Snapshot(); len(got.Networks) != 1 || got.Networks[0].Name != "a" {
		t.Errorf("after Prime these are loaded: %+v", got.Networks)
	}
	if len(Metrics(n)) == 0 {
		t.Error("no metrics")
	}
	// Nothing is asked before Run.
	time.Sleep(10 * time.Millisecond)
	if len(asked) != 0 {
		t.Error("sandboxes are asked for before Run")
	}
	ended := make(chan struct{})
	go func() { Run(n); close(ended) }()
	select {
	case <-ended:
		t.Error("Run has ended before Close")
	case <-time.After(50 * time.Millisecond):
	}
	if err := Close(n); err != nil {
		t.Error(err)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("Run goes on after Close")
	}
}

func TestStatus(t *testing.T) {
	away := errors.New("agent is away")
	networks := map[string]cnireload.CNI{"default": other{err: away}, "h": other{}}
	info := map[string]string{"lastCNILoadStatus": "stale", "golang": "kept"}
	ready, reason, message := Status(networks, "default", info)
	if ready || reason != "NetworkPluginNotReady" || message != "Network plugin returns error: agent is away" {
		t.Errorf("got %t, %q, %q", ready, reason, message)
	}
	if info["lastCNILoadStatus"] != "agent is away" || info["lastCNILoadStatus.h"] != "OK" || info["golang"] != "kept" || info["cniconfig"] == "" {
		t.Errorf("info is %v", info)
	}
	if ready, reason, message := Status(networks, "h", nil); !ready || reason != "" || message != "" {
		t.Errorf("got %t, %q, %q", ready, reason, message)
	}
}

func TestOtherNetworks(t *testing.T) {
	away := errors.New("agent is away")
	if err := Admit(t.Context(), nil, "p"); err != nil {
		t.Errorf("without a network: %v", err)
	}
	if err := Admit(t.Context(), other{err: away}, "p"); !errors.Is(err, away) {
		t.Errorf("not ready: %v", err)
	}
	if done, err := Render(t.Context(), other{}, "10.0.0.0/24"); done || err != nil {
		t.Errorf("rendered: %t, %v", done, err)
	}
	Prime(other{})
	Run(other{})
	if err := Close(other{}); err != nil || Metrics(other{}) != nil {
		t.Errorf("close: %v", err)
	}
}

func TestRender(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	template := filepath.Join(root, "template")
	n := network(t, Network{Handler: "default", Default: true, Load: []cnireload.Opt{cnireload.WithDefaultConf},
		Settings: DefaultSettings(), Template: template, Root: root}, cnireload.WithPluginConfDir(dir))
	done, err := Render(t.Context(), n, "10.0.0.0/24")
	if !done || err == nil || !strings.HasPrefix(err.Error(), "failed to generate cni config: ") {
		t.Errorf("without the template: %t, %v", done, err)
	}
	if err := os.WriteFile(template, []byte(`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"x","subnet":"{{.PodCIDR}}"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if done, err = Render(t.Context(), n, "10.0.0.0/24"); !done || err != nil {
		t.Errorf("with it: %t, %v", done, err)
	}
	if _, err := os.Stat(filepath.Join(dir, cnireload.RenderedFile)); err != nil {
		t.Error(err)
	}
}
