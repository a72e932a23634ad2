// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package fake

import (
	"os"
	"testing"

	"gotest.tools/v3/assert"
)

func TestCalls(t *testing.T) {
	for _, c := range []struct {
		name, log string
		want      []string
		err       string
	}{
		{name: "none"},
		{name: "whole", log: `{"command":"ADD"}` + "\n" + `{"command":"DEL"}` + "\n", want: []string{"ADD", "DEL"}},
		{name: "the last is being written", log: `{"command":"ADD"}` + "\n" + `{"command":"DE`, want: []string{"ADD"}},
		{name: "torn in the middle", log: `{"comm` + "\n" + `{"command":"DEL"}` + "\n", err: "calls.jsonl"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := Dir(t.TempDir())
			if c.log != "" {
				assert.NilError(t, os.WriteFile(d.CallsPath(), []byte(c.log), 0o644))
			}
			calls, err := d.Calls()
			if c.err != "" {
				assert.ErrorContains(t, err, c.err)
				return
			}
			assert.NilError(t, err)
			var got []string
			for _, call := range calls {
				got = append(got, call.Command)
			}
			assert.DeepEqual(t, got, c.want)
		})
	}
}
