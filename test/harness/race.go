// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Slow stretches a bound by CNIRELOAD_SLOW, which says how many times slower
// than usual the daemon is: one with the race detector is.
func Slow(d time.Duration) time.Duration {
	if n, err := strconv.Atoi(os.Getenv("CNIRELOAD_SLOW")); err == nil && n > 1 {
		return d * time.Duration(n)
	}
	return d
}

// raceMarks start what a daemon built with -race writes when it finds something
// wrong: the race detector, the lock detector that go-cni has in such a build,
// and the Go runtime. Nothing else writes them.
var raceMarks = []string{"WARNING: DATA RACE", "POTENTIAL DEADLOCK", "\nfatal error: "}

// Races returns an error with the reports of the race detector that the daemon
// has written, over all its starts. A daemon without the detector writes none.
func (d *Daemon) Races() error {
	b, err := os.ReadFile(d.LogPath())
	if os.IsNotExist(err) {
		return nil // never started
	}
	if err != nil {
		return err
	}
	log := string(b)
	var reports []string
	for _, mark := range raceMarks {
		rest := log
		for {
			i := strings.Index(rest, mark)
			if i < 0 {
				break
			}
			rest = rest[i:]
			reports = append(reports, report(rest))
			rest = rest[len(mark):]
		}
	}
	if reports == nil {
		return nil
	}
	return fmt.Errorf("%d reports in the log of %s containerd:\n%s", len(reports), d.Side, strings.Join(reports, "\n"))
}

// report is the text up to the line that closes it.
func report(text string) string {
	const most = 200
	lines := strings.SplitN(text, "\n", most+1)
	for i, l := range lines {
		if strings.HasPrefix(l, "==================") || i == most {
			return strings.Join(lines[:i], "\n")
		}
	}
	return text
}
