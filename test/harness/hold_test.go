// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"testing"

	"gotest.tools/v3/assert"
)

func TestLastingLeases(t *testing.T) {
	const list = `ID            CREATED AT           LABELS
240142326-cyY3 2026-11-30T15:12:37Z containerd.io/gc.expire=2026-12-01T15:12:37Z
pod           2026-11-30T15:12:37Z -
other         2026-11-30T15:12:37Z a=b
`
	assert.DeepEqual(t, lasting(list), []string{"pod", "other"})
	assert.Equal(t, len(lasting("ID CREATED AT LABELS\n")), 0)
}
