//go:build !linux

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package diskfile

import (
	"io/fs"
	"time"
)

// statusChanged falls back to the modification time where the inode's change
// time is not to be had in a portable way.
func statusChanged(info fs.FileInfo) time.Time { return info.ModTime() }
