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
	"regexp"
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
		b, err := encode(l.report())
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

// Report is the value of cniReload in "crictl info". The types of package cnireload
// have the JSON keys. The types here that embed one of them add what it holds as an
// error, or in a form that is not shown.
type Report struct {
	Version    string               `json:"version"`
	Ready      bool                 `json:"ready"`
	Reason     string               `json:"reason,omitempty"`
	Message    string               `json:"message,omitempty"`
	Generation uint64               `json:"generation"`
	LoadedAt   *time.Time           `json:"loadedAt,omitempty"`
	Stale      bool                 `json:"stale"`
	StaleSince *time.Time           `json:"staleSince,omitempty"`
	LastError  string               `json:"lastError,omitempty"`
	ConfDir    string               `json:"confDir"`
	Watch      cnireload.WatchState `json:"watch"`
	Networks   []Network            `json:"networks"`
	// Skipped has no more than maxEntries of SkippedCount files, in the order of
	// their names.
	Skipped      []cnireload.SkippedFile `json:"skipped"`
	SkippedCount int                     `json:"skippedCount"`
	Template     *Template               `json:"template,omitempty"`
	Gates        []cnireload.GateState   `json:"gates"`
	Calls        Calls                   `json:"calls"`
	Trial        *cnireload.Trial        `json:"trial,omitempty"`
	GC           *GC                     `json:"gc,omitempty"`
	Timeouts     map[string]string       `json:"timeouts"`
}

// Network is a list in use.
type Network struct {
	cnireload.NetworkState
	Stale   bool                    `json:"stale"`
	DropIns []cnireload.DropInState `json:"dropIns,omitempty"` // here for the order
	Plugins []Plugin                `json:"plugins"`
}

// Plugin is an executable that a list names. Status is "ok" or says in a word
// what Problem says in full.
type Plugin struct {
	cnireload.PluginState
	Status     string `json:"status"`
	StatusVerb string `json:"statusVerb,omitempty"` // here for the order
	Problem    string `json:"problem,omitempty"`
}

// Template is the conf_template and what became of it.
type Template struct {
	cnireload.TemplateState
	Error string `json:"error,omitempty"`
}

// GC is how the last GC went.
type GC struct {
	cnireload.Sweep
	Error string `json:"error,omitempty"`
}

// Calls is what plugins are at, and what is still to be asked of them. Each list
// has its oldest entries, and no more than maxEntries.
type Calls struct {
	InFlight   []Process               `json:"inFlight"`
	Abandoned  []Process               `json:"abandoned"`
	LeftOver   []Process               `json:"leftOver"`
	Tombstones []cnireload.OwedRemoval `json:"tombstones"`
	// Counts has the length of each list before it was cut.
	Counts map[string]int `json:"counts"`
}

// Process is a process of a plugin that has not ended.
type Process struct {
	cnireload.Process
	Age string `json:"age"`
}

// maxEntries bounds each list of Calls, and Skipped: a report is a gRPC message.
const maxEntries = 64

// first returns no more than max entries of a list, and never null in JSON.
func first[T any](list []T, max int) []T {
	return append([]T{}, list[:min(len(list), max)]...)
}

// calls describes the plugins' processes and the removals that are owed.
func calls(w work) Calls {
	byState := make(map[cnireload.ProcessState][]Process)
	for _, p := range w.processes {
		age := time.Since(p.Since).Round(time.Millisecond).String()
		byState[p.State] = append(byState[p.State], Process{Process: p, Age: age})
	}
	running, abandoned, leftOver := byState[cnireload.ProcessRunning], byState[cnireload.ProcessAbandoned], byState[cnireload.ProcessLeftOver]
	return Calls{
		InFlight: first(running, maxEntries), Abandoned: first(abandoned, maxEntries), LeftOver: first(leftOver, maxEntries),
		Tombstones: first(w.owed, maxEntries),
		Counts:     map[string]int{"inFlight": len(running), "abandoned": len(abandoned), "leftOver": len(leftOver), "tombstones": len(w.owed)},
	}
}

// report describes the network. Its texts are as they came.
func (l look) report() Report {
	s, w := l.snapshot, l.work()
	r := Report{
		Version:      Version(),
		Ready:        s.Ready(),
		Generation:   s.Generation,
		LastError:    text(s.LoadError),
		ConfDir:      s.ConfDir,
		Watch:        s.Watch,
		Networks:     []Network{},
		Skipped:      first(s.Skipped, maxEntries),
		SkippedCount: len(s.Skipped),
		Gates:        first(s.Gates, len(s.Gates)),
		Calls:        calls(w),
		Trial:        w.trial,
		Timeouts:     timeouts(),
	}
	if w.sweep != nil {
		r.GC = &GC{*w.sweep, text(w.sweep.Err)}
	}
	if l.err != nil {
		r.Reason, r.Message = ReasonNotReady, message(l.err)
	}
	if !s.LoadedAt.IsZero() {
		r.LoadedAt = &s.LoadedAt
	}
	for _, n := range s.Networks {
		d := Network{NetworkState: n, Stale: n.StaleError != nil, DropIns: n.DropIns, Plugins: []Plugin{}}
		for _, p := range n.Plugins {
			d.Plugins = append(d.Plugins, Plugin{p, word(p), p.Status, text(p.Problem)})
		}
		r.Networks = append(r.Networks, d)
		if !d.Stale {
			continue
		}
		if !r.Stale || n.StaleSince.Before(*r.StaleSince) {
			r.StaleSince = &n.StaleSince
			r.LastError = fmt.Sprintf("%s %v; its last good content stays in use", n.File, n.StaleError)
		}
		r.Stale = true
	}
	if s.Template != nil {
		r.Template = &Template{*s.Template, text(s.Template.Err)}
		r.Template.CIDRs = first(s.Template.CIDRs, len(s.Template.CIDRs))
	}
	return r
}

// word says in a word whether a plugin can be used.
func word(p cnireload.PluginState) string {
	switch {
	case p.Problem == nil:
		return "ok"
	case p.Path == "":
		return "missing"
	default:
		return "unusable"
	}
}

// text returns the text of an error that may be nil.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// jsonString matches a string in JSON.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// encode returns a report as JSON, with every text in it printable.
func encode(r Report) ([]byte, error) {
	b, err := json.Marshal(r)
	return jsonString.ReplaceAllFunc(b, func(quoted []byte) []byte {
		var s string
		// Neither fails: it is a string that json.Marshal has made.
		_ = json.Unmarshal(quoted, &s)
		quoted, _ = json.Marshal(printable(s))
		return quoted
	}), err
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
