// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/watchstub"
)

// The watch works but reports nothing: polls find every change.
func TestPollFindsWhatNoEventTells(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("20-b.conflist", conflist("1.0.0", "b", "fakenet"))
	d.write("30-c.conflist", conflist("1.0.0", "c", "fakenet"))
	n := d.network()
	n.notifier = func() (confdir.Notifier, error) { return watchstub.New(), nil }
	n.Start()
	uses := func(name string) {
		t.Helper()
		eventually(t, func() string {
			s := n.Snapshot()
			if len(s.Networks) == 0 || s.Networks[0].Name != name || !s.Ready() {
				return "not in use: " + name
			}
			return ""
		})
	}
	uses("b")
	for _, step := range []struct {
		what string
		do   func()
		use  string
	}{
		{"a file behind changes", func() { d.write("30-c.conflist", conflist("1.0.0", "d", "fakenet")) }, "b"},
		{"the file in use goes", func() { d.remove("20-b.conflist") }, "d"},
		{"a file comes before it", func() { d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet")) }, "a"},
		{"it changes", func() { d.write("10-a.conflist", conflist("1.0.0", "e", "fakenet")) }, "e"},
		{"both change at once", func() {
			d.write("30-c.conflist", "{")
			d.write("20-b.conflist", conflist("1.0.0", "f", "fakenet"))
			d.remove("10-a.conflist")
		}, "f"},
		{"a drop-in comes", func() {
			d.must(os.Mkdir(filepath.Join(d.conf, "f"), 0o755))
			d.write("f/10.conf", `{"type":"absent"}`)
		}, ""},
		{"and goes", func() { d.remove("f") }, "f"},
	} {
		step.do()
		if step.use == "" {
			becomesUnready(t, n, `"absent"`)
		} else {
			uses(step.use)
		}
		// Polls with nothing new in between.
		time.Sleep(3 * n.pace.poll)
	}
	// Also of a file that is not in use.
	d.write("30-c.conflist", conflist("7.7.7", "c", "fakenet"))
	eventually(t, func() string {
		for _, s := range n.Snapshot().Skipped {
			if s.File == filepath.Join(d.conf, "30-c.conflist") && strings.Contains(s.Reason, "7.7.7") {
				return ""
			}
		}
		return "the reason is an old one"
	})
}
