//go:build !linux

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import "time"

// foundPlugin is never found on this platform.
type foundPlugin struct {
	pid     int
	since   time.Time
	path    string
	environ []string
}

func foundPlugins([]string) []*foundPlugin { return nil }

func (*foundPlugin) alive() bool      { return false }
func (*foundPlugin) kill() error      { return nil }
func (*foundPlugin) sameMounts() bool { return false }
