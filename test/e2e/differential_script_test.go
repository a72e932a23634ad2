// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
)

// step is one step of a script. All that it does is in its words; one that makes
// no sense where it comes does nothing, so that any step can be left out.
type step struct {
	do   string // what
	what string // to which file, network, plugin or pod
	how  string // further words
}

func (s step) String() string {
	return strings.TrimSpace(fmt.Sprintf("%-9s %-20s %s", s.do, s.what, s.how))
}

// has tells whether a word is among the further ones.
func (s step) has(word string) bool { return slices.Contains(strings.Fields(s.how), word) }

// script is what both sides are put through.
type script struct {
	seed uint64
	// networks are those of the script, two of those of test/vendors.
	networks []shipped
	steps    []step
}

// Words of steps. The first slot sorts before the second, which holds what is on
// the node besides.
var (
	slots    = []string{"10-net", "20-net"}
	versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}
	writings = []string{"rename", "inplace", "outside", "symlink"}
	brokens  = map[string]string{"empty": "", "half": `{"cniVersion":"1.0.0","name":"half","plugi`, "garbage": "}{", "nameless": `{"cniVersion":"1.0.0","plugins":[{"type":"bridge"}]}`}
)

// scriptLength is how many steps a script has, without its begin and end.
const scriptLength = 24

// newScript makes the script of a seed, and nothing else decides it.
func newScript(seed uint64) script {
	random := rand.New(rand.NewPCG(seed, 2))
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	all := shippedNetworks()
	first := random.IntN(len(all))
	second := (first + 1 + random.IntN(len(all)-1)) % len(all)
	s := script{seed: seed, networks: []shipped{all[first], all[second]}}
	add := func(do, what string, how ...string) {
		s.steps = append(s.steps, step{do, what, strings.Join(how, " ")})
	}

	if random.IntN(3) == 0 {
		// The pods of the begin are then stock's on both sides.
		add("begin", "patched", "as stock")
	}
	add("agent", "0", "up")
	add("put", slots[0], "0", "rename")
	add("settle", "")
	add("run", "p0")
	pods := 1

	plugins := executables(s.networks)
	plugin := func() string { return pick(plugins...) }
	kinds := []struct {
		weight int
		make   func()
	}{
		{7, func() {
			how := []string{pick("0", "1"), pick(writings...)}
			if random.IntN(3) == 0 {
				how = append(how, pick(versions...))
			}
			if random.IntN(4) == 0 {
				how = append(how, "short") // without its last plugin
			}
			if random.IntN(3) == 0 {
				how = append(how, "moved") // the agent's socket is at its other place
			}
			add("put", pick(slots...), how...)
			if random.IntN(2) == 0 {
				add("agent", how[0], pick("up", "up", "moved"))
			}
		}},
		{1, func() { add("break", pick(slots...), pick("empty", "half", "garbage", "nameless")) }},
		{2, func() { add("drop", pick(slots...)) }},
		{1, func() { add("loopback", "99-loopback") }},
		{6, func() { add("agent", pick("0", "1"), pick("up", "up", "away", "away", "dead", "moved")) }},
		{4, func() { add("uninstall", plugin()) }},
		{5, func() { add("install", plugin(), pick("first", "second", "opt")) }},
		{1, func() { add("wipe", "") }},
		{2, func() {
			add("supports", plugin(), pick("0.3.1 0.4.0", "0.3.0 0.3.1 0.4.0 1.0.0", "1.0.0 1.1.0", "all", "all"))
		}},
		{6, func() {
			add("behave", plugin(), pick("ADD fail", "ADD hang", "DEL fail", "DEL hang", "STATUS fail", "STATUS hang", "STATUS unknown"))
		}},
		{5, func() { add("behave", plugin(), "well") }},
		// Without this most of a script would be about a network that is down.
		{7, func() { add("mend", pick("0", "1")) }},
		{2, func() { add("restart", "", pick("stop", "kill")) }},
		{1, func() { add("restart", "", pick("kill", "kill empty", "kill gone")) }},
		{1, func() { add("upgrade", "patched") }},
		{7, func() {
			add("run", fmt.Sprint("p", pods))
			pods++
		}},
		{8, func() { add("remove", fmt.Sprint("p", random.IntN(pods))) }},
		{8, func() { add("settle", "") }},
	}
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	for range scriptLength {
		at, kind := random.IntN(total), 0
		for ; at >= kinds[kind].weight; kind++ {
			at -= kinds[kind].weight
		}
		kinds[kind].make()
	}
	add("settle", "")
	// All is well again: what is left of pods is removed, and what is owed is done.
	add("heal", "")
	return s
}

// A seed decides the whole script, and different seeds make different ones.
func TestSeedDecidesScript(t *testing.T) {
	kinds := map[string]bool{}
	for seed := range uint64(200) {
		a, b := newScript(seed), newScript(seed)
		assert.DeepEqual(t, a.steps, b.steps, gocmp.AllowUnexported(step{}))
		for _, s := range a.steps {
			kinds[s.do] = true
		}
		assert.Assert(t, fmt.Sprint(a.steps) != fmt.Sprint(newScript(seed+1).steps), "seeds %d and %d", seed, seed+1)
	}
	for _, do := range []string{"begin", "put", "break", "drop", "loopback", "agent", "uninstall", "install", "wipe", "supports", "behave", "mend", "restart", "upgrade", "run", "remove", "settle", "heal"} {
		assert.Assert(t, kinds[do], "no script has a step %q", do)
	}
}
