// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import "syscall"

// Types of file systems that namespaces are on, as in statfs(2).
const (
	nsfsMagic = 0x6e736673
	procMagic = 0x9fa0
)

// isNamespace tells whether path is a namespace. Of one that was mounted an empty
// file remains.
func isNamespace(path string) bool {
	var st syscall.Statfs_t
	if syscall.Statfs(path, &st) != nil {
		return false
	}
	return int64(st.Type) == nsfsMagic || int64(st.Type) == procMagic
}
