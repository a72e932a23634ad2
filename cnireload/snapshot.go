// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/rules"
)

// Snapshot is everything known about a network at one moment. It is immutable:
// share it freely, change nothing in it.
type Snapshot struct {
	// Generation counts the sets of lists that came into use. It does not change
	// when only their readiness does.
	Generation uint64
	// LoadedAt is when that generation came into use; zero before the first.
	LoadedAt time.Time
	// Failures counts the times that files in use turned bad or that nothing
	// could be loaded.
	Failures uint64
	// Cause is why the network is not ready; nil when it is.
	Cause error
	// LoadError is why no list, or too few, could be loaded; nil otherwise.
	LoadError error

	ConfDir  string
	BinDirs  []string
	Networks []NetworkState
	Skipped  []SkippedFile
	Watch    WatchState
	Template *TemplateState // nil without a template
	Gates    []GateState

	maxConf     int
	prefix      string
	attachments []attachment
	superseded  chan struct{} // closed once there is a newer snapshot
}

// Ready tells whether pods can be attached.
func (s *Snapshot) Ready() bool { return s.Cause == nil }

// Err returns nil when the network is ready, and otherwise an error that wraps
// ErrCNINotInitialized and names the cause.
func (s *Snapshot) Err() error {
	if s.Cause == nil {
		return nil
	}
	return &notReady{cause: s.Cause}
}

// admits tells whether a pod need not wait: not for readiness, and not for a
// gate that is only reported either.
func (s *Snapshot) admits() bool {
	return s.Ready() && s.closedReported() == nil
}

// closedReported returns the closed gates that do not keep the network from
// being ready.
func (s *Snapshot) closedReported() []GateState {
	var closed []GateState
	for _, g := range s.Gates {
		if !g.Open && g.Mode == GateReport {
			closed = append(closed, g)
		}
	}
	return closed
}

// NetworkState describes one list in use.
type NetworkState struct {
	Name       string        `json:"name"`
	CNIVersion string        `json:"cniVersion"`
	Interface  string        `json:"interface"`
	File       string        `json:"file"`             // empty for loopback, which comes from no file
	SHA256     string        `json:"sha256,omitempty"` // of the file
	DropIns    []DropInState `json:"dropIns,omitempty"`
	Plugins    []PluginState `json:"plugins"`
	// StaleError is set while the file on disk cannot be used and the content
	// that was read before stays in use.
	StaleError error     `json:"-"`
	StaleSince time.Time `json:"-"`
}

// DropInState names a drop-in file that is part of a list.
type DropInState = confdir.DropIn

// Role says who runs a plugin.
type Role = rules.Role

// The roles are explained in package rules.
const (
	RolePlugin   = rules.RolePlugin
	RoleIPAM     = rules.RoleIPAM
	RoleDelegate = rules.RoleDelegate
)

// PluginState describes one plugin of a list in use.
type PluginState struct {
	Role Role   `json:"role"`
	Type string `json:"type"`
	// Counts is false for what an entry names as its ipam or delegate when it
	// is not known to run that on the host: it is shown, with its problem, and
	// says nothing about readiness. Nothing is asked of it.
	Counts   bool     `json:"counts"`
	Path     string   `json:"path"`                        // empty when it was not found
	Versions []string `json:"supportedVersions,omitempty"` // what it answered to VERSION; empty when not asked
	// Status is what STATUS (CNI spec 1.1) last brought: "ok", "not supported",
	// "not ready", or empty when the list's version does not have the verb.
	Status string `json:"statusVerb,omitempty"`
	// Problem is why the plugin cannot be used; nil when it can.
	Problem error `json:"-"`
}

// SkippedFile is a file that looks like configuration but is not in use.
type SkippedFile struct {
	File   string `json:"file"`
	Reason string `json:"reason"`
}

// WatchMode says how changes on disk are noticed.
type WatchMode string

const (
	// WatchInotify: at once, by the operating system's notification.
	WatchInotify WatchMode = "inotify"
	// WatchPolling: within the poll interval.
	WatchPolling WatchMode = "polling"
	// WatchWaiting: the configuration directory does not exist; its nearest
	// parent is watched, and polled.
	WatchWaiting WatchMode = "waiting for directory"
)

// WatchState is the watch and, unless it is WatchInotify, why.
type WatchState struct {
	Mode  WatchMode `json:"state"`
	Cause string    `json:"cause,omitempty"`
}

// attachment is a list together with the interface it serves.
type attachment struct {
	list    *libcni.NetworkConfigList
	ifName  string
	dropIns bool // the list's plugins are not those of its bytes
	// cachedAs is the network's name in libcni's cache; empty if it is the list's.
	cachedAs string
}

// network is a list in the course of being put into use.
type network struct {
	attachment
	file       *confdir.File // nil for loopback
	plugins    []rules.Plugin
	staleError error
	staleSince time.Time
}

// key names the network's content for comparison across generations.
func (n *network) key() string {
	if n.file == nil {
		return n.ifName + "\x00" + n.list.Name
	}
	return n.ifName + "\x00" + n.file.Identity()
}

// describe names the network and where it comes from, for messages.
func (n *network) describe() string {
	if n.file == nil {
		return fmt.Sprintf("network %q", n.list.Name)
	}
	return fmt.Sprintf("network %q in %s", n.list.Name, n.file.Path)
}

// state describes the network with what is known of its plugins.
func (n *network) state(plugins []PluginState) NetworkState {
	s := NetworkState{
		Name:       n.list.Name,
		CNIVersion: n.list.CNIVersion,
		Interface:  n.ifName,
		Plugins:    plugins,
		StaleError: n.staleError,
		StaleSince: n.staleSince,
	}
	if n.file != nil {
		s.File, s.SHA256, s.DropIns = n.file.Path, n.file.Sum, n.file.DropIns
	}
	return s
}

// errLoading is the cause before the first look at the disk is finished.
var errLoading = errors.New("the network configuration is still being loaded")
