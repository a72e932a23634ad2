// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cri

import "github.com/cnireload/cnireload/cnireload"

// Settings are the keys of cnireload in the CNI table of the CRI plugin's
// configuration, which embeds it. docs/configuration.md says what each means.
type Settings struct {
	Readiness       string   `toml:"readiness" json:"readiness"`
	NetworkName     string   `toml:"network_name" json:"networkName"`
	RequiredPlugins []string `toml:"required_plugins" json:"requiredPlugins"`
	Gates           string   `toml:"gates" json:"gates"`
	ReadyFiles      []string `toml:"ready_files" json:"readyFiles"`
	ReadyWait       string   `toml:"ready_wait" json:"readyWait"`
	DelGrace        string   `toml:"del_grace" json:"delGrace"`
	GC              bool     `toml:"gc" json:"gc"`
}

// DefaultSettings need no thought.
func DefaultSettings() Settings {
	return Settings{
		Readiness:       "strict",
		RequiredPlugins: []string{},
		Gates:           "auto",
		ReadyFiles:      []string{},
		ReadyWait:       "30s",
		DelGrace:        "3m",
		GC:              true,
	}
}

// options of a network with s. What names lists, plugins and files is meant for
// the default network.
func (s Settings) options(isDefault bool) []cnireload.Opt {
	opts := []cnireload.Opt{
		cnireload.WithReadiness(s.Readiness),
		cnireload.WithGates(s.Gates),
		cnireload.WithReadyWait(s.ReadyWait),
		cnireload.WithDelGrace(s.DelGrace),
		cnireload.WithGC(s.GC),
	}
	if isDefault {
		opts = append(opts,
			cnireload.WithNetworkName(s.NetworkName),
			cnireload.WithRequiredPlugins(s.RequiredPlugins),
			cnireload.WithReadyFiles(s.ReadyFiles))
	}
	return opts
}
