//go:build !unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package diskfile

const openNonblock = 0
