//go:build !linux

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import "time"

// foundPlugin is never found on this platform.
type foundPlugin struct {
	pid, group int
	since      time.Time
	path       string
	environ    []string
}

func foundPlugins() []*foundPlugin { return nil }

func (*foundPlugin) alive() bool  { return false }
func (*foundPlugin) kill() error  { return nil }
func (*foundPlugin) ours() bool   { return false }
func (*foundPlugin) orphan() bool { return false }
