//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package diskfile

import "syscall"

// openNonblock keeps open from waiting for the writer of a FIFO.
const openNonblock = syscall.O_NONBLOCK
