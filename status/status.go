// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package status turns what is known of CNI networks into what CRI clients see:
// the NetworkReady condition and the entries of "crictl info".
//
// Everything in one [View] comes from one look at each network, so that the
// condition, lastCNILoadStatus and the report cannot contradict each other. The
// package does no I/O and runs no plugin.
package status

import (
	"encoding/json"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
	"github.com/containerd/containerd/v2/version"

	"github.com/cnireload/cnireload/cnireload"
	"github.com/cnireload/cnireload/internal/oneline"
)

// ReasonNotReady is the reason of a NetworkReady condition that is false.
const ReasonNotReady = "NetworkPluginNotReady"

// Condition is the NetworkReady condition.
type Condition struct {
	Ready   bool
	Reason  string
	Message string
}

// View is what is known of a set of networks at one moment. It is immutable.
type View struct {
	defaultName string
	networks    map[string]look
}

// look is one network at that moment.
type look struct {
	err      error // nil when ready
	config   func() *cnireload.ConfigResult
	work     func() work
	snapshot *cnireload.Snapshot // nil for an implementation other than *cnireload.Network
}

// work is what a network's plugins have done, are at and are still to do. It is
// no part of what the network is like.
type work struct {
	calls     map[cnireload.Call]cnireload.CallCount
	processes []cnireload.Process
	owed      []cnireload.OwedRemoval
	sweep     *cnireload.Sweep // nil before the first
	trial     *cnireload.Trial // nil unless pods are held back
}

func workOf(n *cnireload.Network) work {
	return work{calls: n.Calls(), processes: n.Processes(), owed: n.OwedRemovals(), sweep: n.LastSweep(), trial: n.Trial()}
}

// Of looks at each network once. The keys are names of runtime handlers,
// defaultName that of the network all others fall back to. It does not wait.
func Of[N cnireload.CNI](networks map[string]N, defaultName string) View {
	v := View{defaultName: defaultName, networks: make(map[string]look, len(networks))}
	for name, n := range networks {
		if network, ok := any(n).(*cnireload.Network); ok {
			s := network.Snapshot()
			v.networks[name] = look{err: s.Err(), config: s.Config, work: func() work { return workOf(network) }, snapshot: s}
		} else {
			v.networks[name] = look{err: n.Status(), config: n.GetConfig}
		}
	}
	return v
}

// Condition returns the NetworkReady condition, which is that of the default
// network; without one there is nothing to wait for.
func (v View) Condition() Condition {
	l, ok := v.networks[v.defaultName]
	if !ok || l.err == nil {
		return Condition{Ready: true}
	}
	return Condition{Reason: ReasonNotReady, Message: message(l.err)}
}

// message is the text of a condition. It starts with containerd's own words.
func message(err error) string {
	return printable(fmt.Sprintf("Network plugin returns error: %v", err))
}

// Info returns the entries of a verbose status. Each value is a plain string or
// a JSON object: crictl fails on anything else that looks like JSON.
func (v View) Info() (map[string]string, error) {
	info := map[string]string{"lastCNILoadStatus": "OK"}
	for name, l := range v.networks {
		isDefault := name == v.defaultName
		load := l.loadStatus()
		info["lastCNILoadStatus."+name] = load
		key := "cniReload." + name
		if isDefault {
			key = "cniReload"
			info["lastCNILoadStatus"] = load
			b, err := json.Marshal(l.config())
			if err != nil {
				return nil, fmt.Errorf("cannot show the cni config of %s: %w", name, err)
			}
			info["cniconfig"] = string(b)
		}
		if l.snapshot == nil {
			continue
		}
		b, err := json.Marshal(l.report())
		if err != nil {
			return nil, fmt.Errorf("cannot show the state of cni network %s: %w", name, err)
		}
		info[key] = string(b)
	}
	return info, nil
}

// loadStatus is "OK" exactly when the network is ready, and the cause otherwise.
func (l look) loadStatus() string {
	switch {
	case l.err == nil:
		return "OK"
	case l.snapshot != nil && l.snapshot.LoadError != nil:
		return printable(fmt.Sprintf("cni config load failed: %v", l.err))
	default:
		return printable(l.err.Error())
	}
}

// Report is the value of cniReload in "crictl info".
type Report struct {
	Version    string     `json:"version"`
	Ready      bool       `json:"ready"`
	Reason     string     `json:"reason,omitempty"`
	Message    string     `json:"message,omitempty"`
	Generation uint64     `json:"generation"`
	LoadedAt   *time.Time `json:"loadedAt,omitempty"`
	Stale      bool       `json:"stale"`
	StaleSince *time.Time `json:"staleSince,omitempty"`
	LastError  string     `json:"lastError,omitempty"`
	ConfDir    string     `json:"confDir"`
	Watch      Watch      `json:"watch"`
	Networks   []Network  `json:"networks"`
	// Skipped has no more than maxEntries of SkippedCount files, in the order of
	// their names.
	Skipped      []Skipped         `json:"skipped"`
	SkippedCount int               `json:"skippedCount"`
	Template     *Template         `json:"template,omitempty"`
	Gates        []Gate            `json:"gates"`
	Calls        Calls             `json:"calls"`
	Trial        *Trial            `json:"trial,omitempty"`
	GC           *GC               `json:"gc,omitempty"`
	Timeouts     map[string]string `json:"timeouts"`
}

// Watch says how changes on disk are noticed, and why not better.
type Watch struct {
	State string `json:"state"`
	Cause string `json:"cause,omitempty"`
}

// Network is a list in use. File is empty for loopback.
type Network struct {
	Name       string   `json:"name"`
	CNIVersion string   `json:"cniVersion"`
	Interface  string   `json:"interface"`
	File       string   `json:"file"`
	SHA256     string   `json:"sha256,omitempty"`
	Stale      bool     `json:"stale"`
	DropIns    []DropIn `json:"dropIns,omitempty"`
	Plugins    []Plugin `json:"plugins"`
}

// DropIn is a file that adds a plugin to a list.
type DropIn struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// Plugin is an executable that a list names. Status is "ok" or says in a word
// what Problem says in full. Counts tells whether readiness depends on it.
type Plugin struct {
	Role              string   `json:"role"`
	Type              string   `json:"type"`
	Counts            bool     `json:"counts"`
	Path              string   `json:"path"`
	SupportedVersions []string `json:"supportedVersions,omitempty"`
	Status            string   `json:"status"`
	StatusVerb        string   `json:"statusVerb,omitempty"`
	Problem           string   `json:"problem,omitempty"`
}

// Skipped is a file that is not in use.
type Skipped struct {
	File   string `json:"file"`
	Reason string `json:"reason"`
}

// Template is the conf_template and what became of it.
type Template struct {
	Path  string   `json:"path"`
	File  string   `json:"file"`
	CIDRs []string `json:"cidrs"`
	State string   `json:"state"`
	Error string   `json:"error,omitempty"`
}

// Gate is a condition that a plugin's own code needs. Key is the configuration
// key that Target comes from, empty where it is compiled into the plugin.
type Gate struct {
	Plugin string    `json:"plugin,omitempty"`
	Kind   string    `json:"kind"`
	Target string    `json:"target"`
	Key    string    `json:"key,omitempty"`
	Mode   string    `json:"mode"`
	Ops    []string  `json:"ops"`
	Open   bool      `json:"open"`
	Since  time.Time `json:"since"`
	Cause  string    `json:"cause,omitempty"`
}

// Calls is what plugins are at, and what is still to be asked of them. Each list
// has its oldest entries, and no more than maxEntries.
type Calls struct {
	InFlight   []Process     `json:"inFlight"`
	Abandoned  []Process     `json:"abandoned"`
	LeftOver   []Process     `json:"leftOver"`
	Tombstones []OwedRemoval `json:"tombstones"`
	// Counts has the length of each list before it was cut.
	Counts map[string]int `json:"counts"`
}

// Process is a process of a plugin that has not ended.
type Process struct {
	Plugin  string    `json:"plugin"`
	Verb    string    `json:"verb"`
	Sandbox string    `json:"sandbox,omitempty"`
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`
	Age     string    `json:"age"`
}

// OwedRemoval is the removal of a pod that has to be done later.
type OwedRemoval struct {
	Sandbox  string    `json:"sandbox"`
	Networks []string  `json:"networks"`
	Since    time.Time `json:"since"`
	Cause    string    `json:"cause"`
	Attempts int       `json:"attempts"`
}

// Trial says that many pods have failed, so that one of them is tried at a time.
type Trial struct {
	Failures int       `json:"failures"` // pods whose last attempt has failed
	Since    time.Time `json:"since"`    // when these were ten
	Held     int       `json:"held"`     // pods that wait for their turn
	Cause    string    `json:"cause"`
}

// GC is how the last GC went.
type GC struct {
	At    time.Time `json:"at"`
	Stale int       `json:"stale"`
	Error string    `json:"error,omitempty"`
}

// maxEntries bounds each list of Calls, and Skipped: a report is a gRPC message.
const maxEntries = 64

// calls describes the plugins' processes and the removals that are owed.
func calls(w work) Calls {
	c := Calls{InFlight: []Process{}, Abandoned: []Process{}, LeftOver: []Process{}, Tombstones: []OwedRemoval{},
		Counts: make(map[string]int)}
	lists := map[cnireload.ProcessState]struct {
		name string
		list *[]Process
	}{
		cnireload.ProcessRunning:   {"inFlight", &c.InFlight},
		cnireload.ProcessAbandoned: {"abandoned", &c.Abandoned},
		cnireload.ProcessLeftOver:  {"leftOver", &c.LeftOver},
	}
	for _, l := range lists {
		c.Counts[l.name] = 0
	}
	for _, p := range w.processes {
		l := lists[p.State]
		c.Counts[l.name]++
		if len(*l.list) < maxEntries {
			*l.list = append(*l.list, Process{Plugin: printable(p.Plugin), Verb: p.Verb, Sandbox: printable(p.ID), PID: p.PID,
				Since: p.Since, Age: time.Since(p.Since).Round(time.Millisecond).String()})
		}
	}
	c.Counts["tombstones"] = len(w.owed)
	for _, t := range w.owed[:min(len(w.owed), maxEntries)] {
		networks := []string{}
		for _, name := range t.Networks {
			networks = append(networks, printable(name))
		}
		c.Tombstones = append(c.Tombstones, OwedRemoval{Sandbox: printable(t.ID), Networks: networks, Since: t.Since,
			Cause: printable(t.Cause), Attempts: t.Attempts})
	}
	return c
}

// report describes the network.
func (l look) report() Report {
	s, w := l.snapshot, l.work()
	r := Report{
		Version:    Version(),
		Ready:      s.Ready(),
		Generation: s.Generation,
		ConfDir:    s.ConfDir,
		Watch:      Watch{State: string(s.Watch.Mode), Cause: printable(s.Watch.Cause)},
		Networks:   []Network{},
		Skipped:    []Skipped{},
		Gates:      []Gate{},
		Calls:      calls(w),
		Timeouts:   timeouts(),
	}
	if t := w.trial; t != nil {
		r.Trial = &Trial{Failures: t.Failures, Since: t.Since, Held: t.Held, Cause: printable(t.Cause)}
	}
	if sweep := w.sweep; sweep != nil {
		r.GC = &GC{At: sweep.At, Stale: sweep.Stale}
		if sweep.Err != nil {
			r.GC.Error = printable(sweep.Err.Error())
		}
	}
	if l.err != nil {
		r.Reason, r.Message = ReasonNotReady, message(l.err)
	}
	if !s.LoadedAt.IsZero() {
		r.LoadedAt = &s.LoadedAt
	}
	if s.LoadError != nil {
		r.LastError = printable(s.LoadError.Error())
	}
	for _, n := range s.Networks {
		r.Networks = append(r.Networks, describe(n))
		if n.StaleError == nil {
			continue
		}
		if !r.Stale || n.StaleSince.Before(*r.StaleSince) {
			r.StaleSince = &n.StaleSince
			r.LastError = printable(fmt.Sprintf("%s %v; its last good content stays in use", n.File, n.StaleError))
		}
		r.Stale = true
	}
	r.SkippedCount = len(s.Skipped)
	for _, f := range s.Skipped[:min(len(s.Skipped), maxEntries)] {
		r.Skipped = append(r.Skipped, Skipped{File: printable(f.File), Reason: printable(f.Reason)})
	}
	for _, g := range s.Gates {
		r.Gates = append(r.Gates, Gate{Plugin: printable(g.Plugin), Kind: g.Kind, Target: printable(g.Target), Key: g.Key,
			Mode: string(g.Mode), Ops: g.Ops, Open: g.Open, Since: g.Since, Cause: printable(g.Cause)})
	}
	if t := s.Template; t != nil {
		r.Template = &Template{Path: t.Path, File: t.File, CIDRs: append([]string{}, t.CIDRs...), State: printable(t.State)}
		if t.Err != nil {
			r.Template.Error = printable(t.Err.Error())
		}
	}
	return r
}

func describe(n cnireload.NetworkState) Network {
	d := Network{
		Name:       n.Name,
		CNIVersion: n.CNIVersion,
		Interface:  n.Interface,
		File:       printable(n.File),
		SHA256:     n.SHA256,
		Stale:      n.StaleError != nil,
		Plugins:    []Plugin{},
	}
	for _, f := range n.DropIns {
		d.DropIns = append(d.DropIns, DropIn{File: printable(f.Path), SHA256: f.SHA256})
	}
	for _, p := range n.Plugins {
		plugin := Plugin{
			Role:       string(p.Role),
			Type:       printable(p.Type),
			Counts:     p.Counts,
			Path:       p.Path,
			Status:     "ok",
			StatusVerb: p.Status,
		}
		for _, v := range p.Versions {
			plugin.SupportedVersions = append(plugin.SupportedVersions, printable(v))
		}
		switch {
		case p.Problem == nil:
		case p.Path == "":
			plugin.Status, plugin.Problem = "missing", printable(p.Problem.Error())
		default:
			plugin.Status, plugin.Problem = "unusable", printable(p.Problem.Error())
		}
		d.Plugins = append(d.Plugins, plugin)
	}
	return d
}

func timeouts() map[string]string {
	const prefix = "io.containerd.timeout.cri.cni."
	m := make(map[string]string)
	for key, d := range timeout.All() {
		if verb, ok := strings.CutPrefix(key, prefix); ok {
			m[verb] = d.String()
		}
	}
	return m
}

// Version is the version of this module in the running program or, where it was
// built in without one, that of the containerd it was built into.
var Version = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/cnireload/cnireload" && m.Replace == nil {
				return m.Version
			}
		}
	}
	return version.Version
})

// printable makes one line of bounded length, without control characters, of
// text that comes from plugins and files.
func printable(s string) string { return oneline.Of(s) }
