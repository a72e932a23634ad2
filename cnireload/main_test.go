// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"go.uber.org/goleak"
)

// TestMain gives go-cni, whose libcni has one cache for the whole process, a
// cache of its own, and proves that no test leaves a goroutine behind.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cnireload-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	libcni.CacheDir = dir
	// Tests read log lines where they matter, see recordLog.
	if err := log.SetLevel("panic"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Most tests wait for a process or for time to pass.
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}))
}
