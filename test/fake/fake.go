// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fake is what the fake CNI plugin and the tests that drive it agree
// on: where its files are, how it is told to behave, what it records.
//
// The plugin finds its folder from its own path (<bin dir>/../fake) and not
// from its configuration, because libcni hands VERSION no configuration.
package fake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"
)

// Mode is what the plugin does with a call.
type Mode string

// The modes. The zero Mode is OK.
const (
	OK     Mode = ""
	Fail   Mode = "fail"   // answer a CNI error with Code and Msg
	Hang   Mode = "hang"   // sleep in the process itself until killed
	Slow   Mode = "slow"   // sleep Millis, then succeed
	Silent Mode = "silent" // end with Exit and print nothing
	Print  Mode = "print"  // print Msg as it is and end with Exit
	Flood  Mode = "flood"  // print Bytes of garbage to Stream and end with Exit
)

// Garbage is what Flood repeats, and no JSON.
const Garbage = "\x00garbage \x1b[31m\"{]\n"

// Behavior is how one verb is answered.
type Behavior struct {
	Mode   Mode   `json:"mode,omitempty"`
	Code   uint   `json:"code,omitempty"`
	Msg    string `json:"msg,omitempty"`
	Millis int    `json:"millis,omitempty"`
	Exit   int    `json:"exit,omitempty"`
	// Bytes and Stream ("stdout" if empty, or "stderr") are Flood's.
	Bytes  int    `json:"bytes,omitempty"`
	Stream string `json:"stream,omitempty"`

	// What follows happens first, whatever the mode, in this order.

	// IgnoreTerm has the process not end on SIGTERM.
	IgnoreTerm bool `json:"ignoreTerm,omitempty"`
	// Child starts a child that holds stdout and stderr and lives for
	// ChildMillis, or an hour: in the process group ("fork") or in a session of
	// its own ("setsid").
	Child       string `json:"child,omitempty"`
	ChildMillis int    `json:"childMillis,omitempty"`
	// Lock is a file that is flocked, waiting for it, until the process ends.
	Lock string `json:"lock,omitempty"`
	// Write is a file that is written to. On a frozen file system that puts the
	// process into a sleep in which nothing can kill it.
	Write string `json:"write,omitempty"`

	// ResultVersion is the cniVersion of a result, instead of the list's.
	ResultVersion string `json:"resultVersion,omitempty"`

	// Pod limits the behaviour to pods of that name, which may be a pattern of
	// path.Match; others succeed.
	Pod string `json:"pod,omitempty"`
	// First limits the behaviour to the first so many calls.
	First int `json:"first,omitempty"`
}

// State is the whole behaviour of one plugin, kept in <fake>/<name>.json.
type State struct {
	// Verbs is keyed by ADD, DEL, CHECK, STATUS, GC and VERSION.
	Verbs map[string]Behavior `json:"verbs,omitempty"`
	// Rules are looked at before Verbs; the first that is for the call counts.
	Rules []Rule `json:"rules,omitempty"`
	// Versions is what VERSION says is supported, and all that is accepted;
	// empty means all.
	Versions []string `json:"versions,omitempty"`
	// Needs is what ADD and DEL cannot do without.
	Needs []Need `json:"needs,omitempty"`
	// Runs are the keys of the configuration that name other plugins for this one
	// to run at ADD and DEL: "ipam", "delegate", "delegates". Whoever is run gives
	// out the address.
	Runs []string `json:"runs,omitempty"`
	// BinDir is where those are looked for before CNI_PATH, unless the
	// configuration has a binDir.
	BinDir string `json:"binDir,omitempty"`
}

// Need is what a plugin's agent provides.
type Need struct {
	// Target is a file that must exist, or with Socket a unix socket on which
	// somebody must accept connections. Key is the key of the configuration, with
	// dots, that names another one.
	Target string `json:"target,omitempty"`
	Key    string `json:"key,omitempty"`
	Socket bool   `json:"socket,omitempty"`
	// Verb limits the need to ADD or DEL.
	Verb string `json:"verb,omitempty"`
	// Advice ends the error.
	Advice string `json:"advice,omitempty"`
	// Quiet has the call succeed without doing anything in place of failing.
	Quiet bool `json:"quiet,omitempty"`
}

// Rule is how one verb is answered for some pods.
type Rule struct {
	Verb string `json:"verb"`
	Behavior
}

// Of is how a call is answered: the nth with this verb to this plugin.
func (s State) Of(verb, pod string, nth int) Behavior {
	of := func(b Behavior) bool {
		match, _ := path.Match(b.Pod, pod)
		return (b.Pod == "" || match) && (b.First == 0 || nth <= b.First)
	}
	for _, r := range s.Rules {
		if r.Verb == verb && of(r.Behavior) {
			return r.Behavior
		}
	}
	if b := s.Verbs[verb]; of(b) {
		return b
	}
	return Behavior{}
}

// Call is one line of <fake>/calls.jsonl, written when a call begins.
type Call struct {
	Time        time.Time `json:"time"`
	PID         int       `json:"pid"`
	Plugin      string    `json:"plugin"`
	Command     string    `json:"command"`
	Network     string    `json:"network,omitempty"`
	ContainerID string    `json:"containerID,omitempty"`
	IfName      string    `json:"ifName,omitempty"`
	NetNS       string    `json:"netns,omitempty"`
	Pod         string    `json:"pod,omitempty"`
	Args        string    `json:"args,omitempty"`
	StdinSHA256 string    `json:"stdinSHA256,omitempty"`
	Stdin       string    `json:"stdin,omitempty"`
}

// Dir is the plugin's folder, shared by all plugins under one base folder.
type Dir string

// Of returns the folder that belongs to a plugin binary.
func Of(binary string) Dir {
	return Dir(filepath.Join(filepath.Dir(filepath.Dir(binary)), "fake"))
}

// LockPath is flocked around every read-modify-write below.
func (d Dir) LockPath() string { return filepath.Join(string(d), "lock") }

// CallsPath is the call log.
func (d Dir) CallsPath() string { return filepath.Join(string(d), "calls.jsonl") }

// LeasesPath holds the addresses given out and not yet returned.
func (d Dir) LeasesPath() string { return filepath.Join(string(d), "leases.json") }

// StatePath is the behaviour of one plugin.
func (d Dir) StatePath(plugin string) string { return filepath.Join(string(d), plugin+".json") }

// State reads a plugin's behaviour; without a file everything succeeds.
func (d Dir) State(plugin string) (State, error) {
	var s State
	return s, readJSON(d.StatePath(plugin), &s)
}

// Set replaces a plugin's behaviour in one step.
func (d Dir) Set(plugin string, s State) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := d.StatePath(plugin) + ".new"
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, d.StatePath(plugin))
}

// Leases are the addresses given out by ADD and not returned by DEL, keyed by
// container id and interface.
func (d Dir) Leases() (map[string]string, error) {
	m := map[string]string{}
	return m, readJSON(d.LeasesPath(), &m)
}

// Calls reads the call log. A line without its end is one that a plugin is still writing, and is left
// out: a reader can see the half of a write that crosses a page.
func (d Dir) Calls() ([]Call, error) {
	b, err := os.ReadFile(d.CallsPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var calls []Call
	for line := range bytes.Lines(b) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break
		}
		var c Call
		if err := json.Unmarshal(line, &c); err != nil {
			return calls, fmt.Errorf("%s: %w", d.CallsPath(), err)
		}
		calls = append(calls, c)
	}
	return calls, nil
}

func readJSON(path string, into any) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(b) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
