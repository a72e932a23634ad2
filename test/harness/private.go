// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"path/filepath"
	"strings"
)

// privateDirs are what Options.Private replaces. All are there on every machine,
// so that no mount point has to be made.
var privateDirs = []string{"/run", "/var/lib", "/opt"}

// Inside is the path on the machine of what a Private daemon and its plugins see
// at a path: that of an agent's socket, for example. Paths that they share with
// the machine stay as they are.
func (d *Daemon) Inside(path string) string {
	if rest, ok := strings.CutPrefix(path, "/var/run/"); ok {
		path = "/run/" + rest // a link on every machine
	}
	for _, dir := range privateDirs {
		if d.Private && strings.HasPrefix(path, dir+"/") {
			return d.path("node", path)
		}
	}
	return path
}

// layOut makes the folders that a Private daemon sees.
func (d *Daemon) layOut() error {
	for _, dir := range append([]string{cniCache, "/opt/cni/bin"}, privateDirs...) {
		if err := os.MkdirAll(d.path("node", dir), 0o755); err != nil {
			return err
		}
	}
	// Fake plugins find their folder beside the folder that they are run from.
	return os.Symlink(string(d.Fake), filepath.Join(d.path("node"), "opt", "cni", "fake"))
}

// mountPrivate is the part of a shell script that puts them into place.
func (d *Daemon) mountPrivate() string {
	if !d.Private {
		return ""
	}
	var script strings.Builder
	for _, dir := range privateDirs {
		script.WriteString("mount --bind " + shellQuote(d.path("node", dir)) + " " + dir + "\n")
	}
	return script.String()
}
