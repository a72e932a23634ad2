// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import "github.com/cnireload/cnireload/test/slowsync"

// SlowSync has the daemon, from its next Start on, ask the returned server
// before each fdatasync, which is how its metadata gets to the disk. The server
// must be closed after the daemon's end, and lasts over restarts.
func (d *Daemon) SlowSync() (*slowsync.Server, error) {
	wrapper, err := Build("slowsync")
	if err != nil {
		return nil, err
	}
	socket := d.path("slow.sock")
	s, err := slowsync.Listen(socket)
	if err != nil {
		return nil, err
	}
	d.Wrap = []string{wrapper, socket}
	return s, nil
}
