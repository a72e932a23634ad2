// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package hack

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// Prometheus reads the alert rules. That the daemon serves what they name is a test of test/e2e.
func TestAlertRules(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.Parse(text, false, model.LegacyValidation)
	for _, err := range errs {
		t.Error(err)
	}
	if groups == nil || len(groups.Groups) != 1 {
		t.Fatalf("groups: %+v", groups)
	}
	for _, r := range groups.Groups[0].Rules {
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.For == 0 {
			t.Errorf("alert %s lacks severity, summary or for", r.Alert)
		}
	}
}

// So it does the expressions of the dashboard, with Grafana's variables filled in.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		UID    string
		Panels []struct {
			ID      int
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if d.UID == "" || len(d.Panels) == 0 {
		t.Fatalf("%+v", d)
	}
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := taken[at]; other != "" || at[0] >= 24 {
					t.Fatalf("panel %q lies over %q or beyond the edge", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
		if len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			if _, err := parser.ParseExpr(strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")); err != nil {
				t.Errorf("panel %q: %v", p.Title, err)
			}
		}
	}
}
