// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
)

// InstallCalico puts the fake calico with the real host-local into the first
// bin dir, and makes the folder of the file that its agent would write. It
// returns that file's path; the file is not there.
func (d *Daemon) InstallCalico() (nodename string, err error) {
	if err := d.InstallFake("calico", "portmap", "loopback"); err != nil {
		return "", err
	}
	src, err := Plugin("host-local")
	if err != nil {
		return "", err
	}
	if err := Install(src, filepath.Join(d.BinDirs[0], "host-local")); err != nil {
		return "", err
	}
	nodename = d.path("calico", "nodename")
	return nodename, os.MkdirAll(filepath.Dir(nodename), 0o755)
}

// CalicoList is a list like the one that Calico installs.
func CalicoList(nodename string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "k8s-pod-network",
  "plugins": [
    {"type": "calico", "nodename": "here", "nodename_file": %q, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.177.0.0/24"}]]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, nodename)
}

// HostLocal lists the addresses that host-local has given out for a network.
func (d *Daemon) HostLocal(network string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(d.AttachmentCache(), "networks", network))
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	used := []string{}
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err == nil {
			used = append(used, e.Name())
		}
	}
	return used, nil
}
