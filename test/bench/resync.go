// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// idleFiles is how many files are in the conf dir of a daemon with nothing to do. The
// patched one may then use 0.2 % of a core more than stock.
const idleFiles = 1000

// idle measures the CPU that the daemons use while nothing happens, both at the
// same time.
func idle(ctx context.Context, o options) (err error) {
	p, end, err := both(ctx, harness.Options{NoImage: true}, func(_ int, d *harness.Daemon) error {
		for i := range idleFiles {
			text := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"bench%d","plugins":[{"type":"fakenet"},{"type":"portmap"}]}`, i)
			if err := os.WriteFile(filepath.Join(d.ConfDir, fmt.Sprintf("%03d-bench.conflist", i)), []byte(text), 0o644); err != nil {
				return err
			}
		}
		return d.InstallFake("fakenet", "portmap", "loopback")
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	for _, d := range p {
		if _, err := waitReady(ctx, d, true); err != nil {
			return err
		}
	}
	// What starting has left to do is over by then.
	if err := pause(ctx, 15*time.Second); err != nil {
		return err
	}
	var used [2]time.Duration
	before, err := cpuTimes(p)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := pause(ctx, o.idle); err != nil {
		return err
	}
	during := time.Since(begin)
	after, err := cpuTimes(p)
	if err != nil {
		return err
	}
	for i := range p {
		used[i] = after[i] - before[i]
	}
	percent := func(d time.Duration) float64 { return 100 * float64(d) / float64(during) }
	fmt.Printf("idle for %s with %d files: stock %.2f %% of a core, patched %.2f %%, difference %+.2f points, ratio %.2f (%s)\n",
		during.Round(time.Second), idleFiles, percent(used[0]), percent(used[1]), percent(used[1]-used[0]), ratio(used[1], used[0]), load())
	return nil
}

// cpuTimes is what each daemon has used, to the nanosecond.
func cpuTimes(p pair) (t [2]time.Duration, err error) {
	for i, d := range p {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.PID()))
		if err != nil {
			return t, err
		}
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			if errors.Is(err, os.ErrNotExist) {
				continue // a thread that has ended
			} else if err != nil {
				return t, err
			}
			first, _, _ := strings.Cut(string(b), " ")
			n, err := strconv.ParseInt(first, 10, 64)
			if err != nil {
				return t, fmt.Errorf("%s: %w", task, err)
			}
			t[i] += time.Duration(n)
		}
		if len(tasks) == 0 || t[i] == 0 {
			// A kernel without scheduler statistics.
			if t[i], err = cpuTime(d.PID()); err != nil {
				return t, err
			}
		}
	}
	return t, nil
}

// load says how busy the machine is, which is to be known beside a figure.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(b))
	if err != nil || len(fields) < 1 {
		return "load unknown"
	}
	return "load of the machine " + fields[0]
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// arrivals has the end-to-end test of every way in which a change can arrive
// run often, and prints its table.
func arrivals(ctx context.Context, o options) error {
	root, err := harness.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-v", "-timeout=60m", "-run=^TestArrival$", "./e2e")
	cmd.Dir = filepath.Join(root, "test")
	cmd.Env = append(os.Environ(), fmt.Sprintf("CNIRELOAD_ROUNDS=%d", o.arrivals))
	cmd.Stderr = os.Stderr
	// An interrupt reaches the test by itself, which then cleans up.
	cmd.Cancel = func() error { return nil }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Printf("from change to use (%s):\n", load())
	var all []string
	table := false
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := lines.Text()
		all = append(all, line)
		table = table && strings.Contains(line, " | ")
		if table {
			fmt.Println(strings.TrimSpace(line))
		}
		table = table || strings.Contains(line, "from change to use:")
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("TestArrival: %w:\n%s", err, strings.Join(all, "\n"))
	}
	return nil
}
