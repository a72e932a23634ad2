//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"path/filepath"
)

// executable writes a shell script and returns its path.
func (d *node) executable(name, body string) string {
	d.t.Helper()
	path := filepath.Join(d.bin, name)
	d.replace(path, "#!/bin/sh\n"+body+"\n", 0o755)
	return path
}
