// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// parallel runs functions until they end and returns what waits for them.
func parallel(run ...func()) (wait func()) {
	var group sync.WaitGroup
	for _, f := range run {
		group.Go(f)
	}
	return group.Wait
}

// touch makes an empty file, which is a Create event and no Write.
func touch(t *testing.T, path string) {
	t.Helper()
	assert.NilError(t, os.WriteFile(path, nil, 0o644))
}

func mkfifo(path string) error { return unix.Mkfifo(path, 0o644) }

// networkOf is the network a pod was last added to.
func networkOf(calls []fake.Call, pod string) (network string) {
	for _, c := range calls {
		if c.Pod == pod && c.Command == "ADD" && c.IfName == "eth0" {
			network = c.Network
		}
	}
	return network
}

// networkIndex is the place of a network in a report.
func networkIndex(r harness.Report, name string) int {
	for i, n := range r.Networks {
		if n.Name == name {
			return i
		}
	}
	return -1
}
