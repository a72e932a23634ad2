// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// keyPaths adds the path of each key of a JSON value to set; elements of lists
// are all the same.
func keyPaths(set map[string]bool, prefix string, value any) {
	switch v := value.(type) {
	case map[string]any:
		for k, inner := range v {
			path := prefix + "." + k
			set[path] = true
			keyPaths(set, path, inner)
		}
	case []any:
		for _, inner := range v {
			keyPaths(set, prefix+"[]", inner)
		}
	}
}

// Whatever stock tells by "crictl info", by name.
func TestInfoKeys(t *testing.T) {
	stock := make(map[string]bool)
	inTurn(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		n.Handlers = map[string]harness.Handler{"other": {ConfDir: filepath.Join(n.Base, "other.d"), MaxConfNum: new(0)}}
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		_, info, err := n.Info(t.Context())
		assert.NilError(t, err)
		keys := make(map[string]bool)
		for k, v := range info {
			keys[k] = true
			var value any
			if json.Unmarshal([]byte(v), &value) == nil {
				keyPaths(keys, k, value)
			}
		}
		for _, k := range []string{"config.containerd.runtimes.runc.cniMaxConfNum", "cniconfig.Networks[].Config.Plugins[].Network.type"} {
			assert.Assert(t, keys[k], "no %s", k)
		}
		if side == harness.Stock {
			stock = keys
			return fmt.Sprintf("%d keys", len(keys))
		}
		var lost []string
		for k := range stock {
			if !keys[k] {
				lost = append(lost, k)
			}
		}
		slices.Sort(lost)
		assert.Equal(t, len(lost), 0, "stock has, and the patched daemon has not: %s", strings.Join(lost, ", "))
		return fmt.Sprintf("%d keys, all of stock's %d among them", len(keys), len(stock))
	})
}

// A pod of a runtime handler that does not exist, on a node that is not ready.
func TestUnknownHandler(t *testing.T) {
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true, ReadyWait: "20s"})
		n.start()
		n.waitReady(false, soon)
		begin := time.Now()
		message := n.refused(harness.Pod{Name: "a", Handler: "none"})
		took := time.Since(begin)
		assert.Assert(t, cmp.Contains(message, `no runtime for "none" is configured`))
		assert.Assert(t, took < 10*time.Second, "after %s", took)
		// Nothing is left of it.
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a", Handler: "none"}), `no runtime for "none" is configured`))
		return message
	})
}
