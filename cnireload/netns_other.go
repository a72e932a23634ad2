//go:build !linux

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import "os"

// isNamespace tells whether path is there: what it is differs by platform.
func isNamespace(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
