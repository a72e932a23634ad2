// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package diskfile

import (
	"io/fs"
	"syscall"
	"time"
)

// statusChanged returns the time of the inode's last change. Unlike the
// modification time it cannot be set by those who copy files with their times.
func statusChanged(info fs.FileInfo) time.Time {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(int64(st.Ctim.Sec), int64(st.Ctim.Nsec)) //nolint:unconvert // 32-bit platforms
	}
	return info.ModTime()
}
