//go:build race

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import "github.com/sasha-s/go-deadlock"

// With the race detector go-cni's mutex is go-deadlock's. The version that it
// asks for cannot tell goroutines apart under this Go ("goroutine 0"), takes
// the locks of parallel tests for one goroutine's, and ends the process.
func init() { deadlock.Opts.Disable = true }
