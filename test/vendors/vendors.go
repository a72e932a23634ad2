// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package vendors has the CNI configuration of each network that people run, in
// the shape in which its project ships or writes it, and what that project puts
// on a node beside it. The files are written by hand from public documentation
// and sources: vendors.json, the index, says for each where, because JSON has no
// comments.
//
// Everything is data, so that both modules can use it: this package embeds it for
// tests of daemons and for tools, and the library's own test of readiness
// (TestVendors in cnireload) reads vendors.json by its path, because the root
// module cannot import this one.
package vendors

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
)

// Vendor is one network.
type Vendor struct {
	Name string `json:"name"`
	// File is the name of its configuration in this directory, As the name that
	// it has in a node's conf dir.
	File string `json:"file"`
	As   string `json:"as"`
	// Source is where its shape is documented.
	Source string `json:"source"`
	// Installed are the executables that the project puts, or expects, in the
	// node's bin dir, and no others.
	Installed []string `json:"installed"`
	// Agent is what the network's agent provides while it is up.
	Agent []Agent `json:"agent"`
	// Shown are the types that the configuration names as ipam or delegates and
	// that are not run on the host: they need not be installed.
	Shown []string `json:"shown"`
}

// Agent is one thing that a plugin needs from its agent, as a gate of cnireload
// describes it.
type Agent struct {
	Plugin string `json:"plugin"` // that needs it
	Kind   string `json:"kind"`   // "file", "file not empty", "flannel env file", "unix socket", "tcp port" or "configuration"
	Target string `json:"target"` // path or address
	// Key is the configuration key, with dots, that can move Target elsewhere;
	// empty if Target is compiled into the plugin. It is a key of the entry
	// whose type is Entry or, if that is empty, Plugin.
	Key   string `json:"key"`
	Entry string `json:"entry"`
	// Mode is "enforce" or "report".
	Mode string `json:"mode"`
}

//go:embed vendors.json *.conf *.conflist
var files embed.FS

// All returns the vendors in the order of the index.
func All() ([]Vendor, error) {
	index, err := files.ReadFile("vendors.json")
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(index))
	d.DisallowUnknownFields()
	var all []Vendor
	if err := d.Decode(&all); err != nil {
		return nil, fmt.Errorf("vendors.json: %w", err)
	}
	return all, nil
}

// Config returns the content of the vendor's configuration.
func (v Vendor) Config() ([]byte, error) { return files.ReadFile(v.File) }
