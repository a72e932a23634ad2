// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"io/fs"
	"os"
	"time"
)

// fileID tells one state of one file from another by stat data alone.
type fileID struct {
	info  fs.FileInfo
	ctime time.Time
}

func newFileID(info fs.FileInfo) fileID {
	return fileID{info: info, ctime: statusChanged(info)}
}

// same tells whether both are the same file in the same state, as far as stat
// data can tell.
func (a fileID) same(b fileID) bool {
	return a.info != nil && b.info != nil &&
		os.SameFile(a.info, b.info) &&
		a.info.Size() == b.info.Size() &&
		a.info.Mode() == b.info.Mode() &&
		a.info.ModTime().Equal(b.info.ModTime()) &&
		a.ctime.Equal(b.ctime)
}

// changed returns the later of the file's two times.
func (a fileID) changed() time.Time {
	if m := a.info.ModTime(); m.After(a.ctime) {
		return m
	}
	return a.ctime
}
