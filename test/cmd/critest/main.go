// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command critest runs the pinned, unmodified critest against stock and
// patched containerd, each on a private node, and judges the difference.
package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

var bothSides = []harness.Side{harness.Stock, harness.Patched}

func main() {
	debs := flag.String("debs", "", "folder that hack/debs.sh has made")
	known := flag.String("known", "", "file that lists the specs that cannot pass, with the reasons")
	focus := flag.String("focus", "", "run only the specs that match this regular expression")
	parallel := flag.Int("parallel", 1, "specs of one side that run at a time")
	seed := flag.Int64("seed", time.Now().Unix(), "order of the specs, the same on both sides")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		// A second one ends the program at once.
		stop()
	}()
	ok, err := run(ctx, *debs, *known, *focus, *parallel, *seed)
	if err != nil {
		if err := harness.DestroyAll(); err != nil {
			fmt.Fprintln(os.Stderr, "critest:", err)
		}
		fmt.Fprintln(os.Stderr, "critest:", err)
		os.Exit(1)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(ctx context.Context, debs, knownFile, focus string, parallel int, seed int64) (bool, error) {
	if err := harness.Preflight("make critest", bothSides...); err != nil {
		return false, err
	}
	if err := harness.Sweep(); err != nil {
		return false, fmt.Errorf("clean up after an earlier run: %w", err)
	}
	text, err := os.ReadFile(knownFile)
	if err != nil {
		return false, err
	}
	known, err := parseKnown(string(text))
	if err != nil {
		return false, fmt.Errorf("%s: %w", knownFile, err)
	}
	known, err = applying(known, conditions())
	if err != nil {
		return false, fmt.Errorf("%s: %w", knownFile, err)
	}
	root, err := harness.Root()
	if err != nil {
		return false, err
	}
	dir := filepath.Join(root, "_output", "critest")
	layouts, err := layOut(debs, filepath.Join(dir, "images"))
	if err != nil {
		return false, err
	}

	ctx, cancel := context.WithTimeoutCause(ctx, 40*time.Minute, fmt.Errorf("not done within 40 minutes"))
	defer cancel()
	defer removeCgroups(cgroups())
	begin := time.Now()
	nodes := map[harness.Side]*node{}
	var mu sync.Mutex
	if err := each(func(s harness.Side) error {
		n, err := start(ctx, s, layouts)
		mu.Lock()
		defer mu.Unlock()
		nodes[s] = n
		return err
	}); err != nil {
		return false, err
	}
	fmt.Printf("both sides run critest at once, seed %d, %d specs at a time; output in %s\n", seed, parallel, rel(root, dir))

	report := func(s harness.Side, what string) string { return filepath.Join(dir, string(s)+what) }
	suite := func(what, focus string, parallel int) (map[harness.Side]map[string]spec, error) {
		results := map[harness.Side]map[string]spec{}
		return results, each(func(s harness.Side) error {
			if err := nodes[s].critest(ctx, report(s, what), seed, parallel, focus); err != nil {
				return err
			}
			specs, err := readJUnit(report(s, what) + ".xml")
			mu.Lock()
			defer mu.Unlock()
			results[s] = specs
			return err
		})
	}
	first, err := suite("", focus, parallel)
	if err != nil {
		return false, err
	}
	took := time.Since(begin).Round(time.Second)
	c := newComparison(first[harness.Stock], first[harness.Patched], focus != "")
	for try := 1; try <= 2; try++ {
		for i, name := range c.suspects(known) {
			fmt.Printf("    alone, again: %s\n", name)
			again, err := suite(fmt.Sprintf("-again%d-%d", try, i), alone(name), 1)
			if err != nil {
				return false, err
			}
			if again[harness.Stock][name].filtered || again[harness.Patched][name].filtered {
				return false, fmt.Errorf("critest does not find %q by its name", name)
			}
			c.again(name, again[harness.Stock][name], again[harness.Patched][name])
		}
	}

	var faults []string
	for _, s := range bothSides {
		pods, leaks, err := nodes[s].finish(ctx, report(s, "-containerd.log"))
		if err != nil {
			return false, err
		}
		fmt.Printf("%s: critest left %d pods; left when they were removed: %s\n", s, len(pods), orNothing(leaks))
		c.left[s] = leaks
		log, err := os.ReadFile(report(s, "-containerd.log"))
		if err != nil {
			return false, err
		}
		for _, line := range alarms(log) {
			faults = append(faults, fmt.Sprintf("%s containerd's log has %q", s, line))
		}
	}
	faults = append(faults, c.faults(known)...)
	fmt.Printf("\n%s\n", c.table())
	for _, line := range c.notes(known) {
		fmt.Println(line)
	}
	for _, f := range faults {
		fmt.Println("FAULT", f)
	}
	fmt.Printf("both sides done in %s\n", took)
	// What hack/cmd/ci reads: the reasons, and the last line. A known failure counts as skipped.
	bypassed := 0
	reasons := c.bypassed(known)
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		fmt.Printf("%d skipped: %s\n", reasons[why], why)
		bypassed += reasons[why]
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", c.count(harness.Patched)[passed], len(faults), bypassed)
	return len(faults) == 0, nil
}

// alone is the regular expression that finds a spec by its name in the report,
// which has one of ginkgo's labels added. The suite's name comes before it.
func alone(name string) string {
	return regexp.QuoteMeta(strings.TrimSuffix(name, " [Serial]"))
}

// each does something for both sides at once and returns the first error.
func each(do func(harness.Side) error) error {
	errs := make(chan error, len(bothSides))
	for _, s := range bothSides {
		go func() { errs <- do(s) }()
	}
	var first error
	for range bothSides {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// layOut writes every image and returns the folders by reference.
func layOut(debs, dir string) (map[string]string, error) {
	images, err := makeImages(debs)
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	layouts := map[string]string{}
	for i, im := range images {
		layout := filepath.Join(dir, strconv.Itoa(i))
		if err := im.writeLayout(layout); err != nil {
			return nil, err
		}
		for _, ref := range im.refs {
			layouts[ref] = layout
		}
	}
	return layouts, nil
}

func rel(root, path string) string {
	if r, err := filepath.Rel(root, path); err == nil {
		return r
	}
	return path
}

func orNothing(list []string) string {
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, ", ")
}
