// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"strings"
	"testing"
)

func TestRaces(t *testing.T) {
	d := &Daemon{Options: Options{Base: t.TempDir(), Side: Patched}}
	if err := d.Races(); err != nil {
		t.Errorf("a daemon that never started: %v", err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(d.LogPath(), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("level=info msg=fine\n")
	if err := d.Races(); err != nil {
		t.Errorf("a good log: %v", err)
	}
	race := "==================\nWARNING: DATA RACE\nWrite at 0x1 by goroutine 2:\n  main.a()\n==================\n"
	write("level=info msg=fine\n" + race + "level=info msg=more\n" + race)
	err := d.Races()
	if err == nil || !strings.HasPrefix(err.Error(), "2 reports") || !strings.Contains(err.Error(), "main.a()") || strings.Contains(err.Error(), "msg=") {
		t.Errorf("two reports between other lines: %v", err)
	}
}
