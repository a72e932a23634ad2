// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// TestDifferentialSoak puts stock and patched daemons through the same random
// scripts, step by step and side by side: lists of the networks of test/vendors written, broken
// and removed, plugins that fail, hang, vanish and come back elsewhere or in
// another version, agents that come and go, restarts and crashes. It fails where
// the patched side is worse: not ready, or its pod refused, where stock is ready
// and its pod runs; a pod or an address kept that stock lets go. CNIRELOAD_SOAK is
// how long; CNIRELOAD_SEED is the seed of the first script, and each that follows
// has the next. With neither, the same scripts run for a minute.
func TestDifferentialSoak(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make soak", harness.Stock, harness.Patched); err != nil {
		t.Fatal(err)
	}
	during, seed := soakOptions(t)
	if os.Getenv("CNIRELOAD_SOAK") == "" && os.Getenv("CNIRELOAD_SEED") == "" {
		seed = 1000 // a red run of "make test" is to mean a change; "make soak" draws new scripts
	}
	begin, first, steps := time.Now(), seed, 0
	compared := map[string]int{}
	for ; time.Since(begin) < during; seed++ {
		s := newScript(seed)
		t.Logf("seed %d: %s and %s, %d steps; CNIRELOAD_SEED=%d repeats it", seed, s.networks[0].title(), s.networks[1].title(), len(s.steps), seed)
		taken, state, err := fight(t, s, compared)
		steps += taken
		if err == nil {
			continue
		}
		var worse *violation
		if !errors.As(err, &worse) {
			t.Fatalf("seed %d, after %d steps: %v", seed, taken, err)
		}
		t.Errorf("seed %d, after %d steps: the patched daemon is worse than stock: %v\n%s", seed, taken, err, state)
		s.steps = shortest(t, s.steps[:taken], func(part []step) error {
			_, text, err := fight(t, script{s.seed, s.networks, part}, map[string]int{})
			var again *violation
			if !errors.As(err, &again) || again.kind != worse.kind {
				return nil // something else
			}
			state = fmt.Sprintf("%v\n%s", err, text)
			return err
		})
		var text []string
		for i, s := range s.steps {
			text = append(text, fmt.Sprintf("%4d %v", i, s))
		}
		t.Fatalf("the shortest script found to fail, with 0 = %s and 1 = %s:\n%s\n%s\nCNIRELOAD_SEED=%d repeats the whole",
			s.networks[0].title(), s.networks[1].title(), strings.Join(text, "\n"), state, seed)
	}
	var counts []string
	for _, what := range slices.Sorted(maps.Keys(compared)) {
		counts = append(counts, fmt.Sprintf("%s %d", what, compared[what]))
	}
	t.Logf("seeds %d to %d, %d steps in %v; compared: %s; the patched daemon is worse in none", first, seed-1, steps, time.Since(begin).Round(time.Second), strings.Join(counts, ", "))
	if compared["ready and runs"] == 0 || compared["removed"] == 0 {
		t.Errorf("nothing was compared: %v", compared)
	}
}

func (s shipped) title() string { return fmt.Sprintf("%s (%s)", s.Name, strings.Join(s.types, ", ")) }

// fight runs a script on new daemons. It returns what both sides say where it ended.
func fight(t *testing.T, s script, compared map[string]int) (taken int, state string, err error) {
	d, err := newDuel(t.Context(), s, t.Logf)
	if err != nil {
		return 0, "", err
	}
	taken, err = d.run(t.Context())
	for what, n := range d.compared {
		compared[what] += n
	}
	if err != nil {
		state = d.stock.says(t) + d.patched.says(t)
	}
	return taken, state, errors.Join(err, d.destroy())
}

// says is what a side says about itself, as far as it helps to see why.
func (c *contender) says(t *testing.T) string {
	var b strings.Builder
	fmt.Fprintf(&b, "--- %s\n", c.Side)
	condition, info, err := c.Info(t.Context())
	if err != nil {
		fmt.Fprintf(&b, "no answer: %v\n", err)
	} else {
		fmt.Fprintf(&b, "%v\nlastCNILoadStatus: %s\n", condition, info["lastCNILoadStatus"])
	}
	if r, err := harness.ReportFrom(info, ""); err == nil {
		for _, n := range r.Networks {
			for _, p := range n.Plugins {
				if p.Problem != "" {
					fmt.Fprintf(&b, "network %s: %s\n", n.Name, p.Problem)
				}
			}
		}
		for _, g := range r.Gates {
			if !g.Open {
				fmt.Fprintf(&b, "gate: %+v\n", g)
			}
		}
		fmt.Fprintf(&b, "skipped %+v, trial %+v, owed %+v, calls %v\n", r.Skipped, r.Trial, r.Calls.Tombstones, r.Calls.Counts)
	}
	leases, _ := c.Fake.Leases()
	fmt.Fprintf(&b, "addresses: %v\nend of the log:\n", leases)
	for line := range strings.Lines(c.LogTail(100) + "\n") {
		if strings.Contains(line, "level=error") || strings.Contains(line, "level=warning") {
			b.WriteString(line)
		}
	}
	return b.String()
}
