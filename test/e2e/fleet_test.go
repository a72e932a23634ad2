// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

var (
	// selector is a metric of ours in an expression, with its matchers.
	selector = regexp.MustCompile(networkMetric + `([a-z_]+)(?:\{([^}]*)\})?`)
	// matcher compares a label with a value as it is.
	matcher = regexp.MustCompile(`([a-z]+)(=~|!=|!~|=)\\?"([^"\\]*)\\?"`)
)

// The alert rules and the dashboard name what the daemon serves: metrics, labels, and
// the values that labels are compared with.
func TestFleet(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	root, err := harness.Root()
	assert.NilError(t, err)
	address, err := harness.FreeAddress()
	assert.NilError(t, err)
	n, nodename := calicoNode(t, harness.Options{Side: harness.Patched, NoImage: true, Metrics: address})
	touch(t, nodename)
	n.start()
	n.waitReady(true, soon)
	n.added(harness.Pod{Name: "a"})
	served := n.scrape().value

	// serves tells whether there is a sample of a metric whose label has that value, or any.
	serves := func(metric, label, value string) bool {
		for sample := range served {
			name, labels, _ := strings.Cut(sample, "{")
			switch {
			case name != metric:
			case label == "":
				return true
			case value == "":
				if strings.Contains(","+labels, ","+label+"=") {
					return true
				}
			case strings.Contains(","+labels, fmt.Sprintf(",%s=%q", label, value)):
				return true
			}
		}
		return false
	}
	for _, name := range []string{"alerts.yaml", "dashboard.json"} {
		text, err := os.ReadFile(filepath.Join(root, "docs", "fleet", name))
		assert.NilError(t, err)
		found := selector.FindAllStringSubmatch(string(text), -1)
		assert.Assert(t, len(found) >= 8, "%s names %d metrics", name, len(found))
		for _, s := range found {
			assert.Assert(t, serves(s[1], "", ""), "%s: no metric %s among %v", name, s[0], served)
			for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
				value := m[3]
				if m[2] != "=" {
					value = ""
				}
				if m[1] != "instance" { // Prometheus' own
					assert.Assert(t, serves(s[1], m[1], value), "%s: no %s with %s", name, s[1], m[0])
				}
			}
		}
	}
}
