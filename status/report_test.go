// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload"
)

// full is a network of which everything is known, and nothing good. bad is its
// every text.
func full(bad string) look {
	at := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	process := func(state cnireload.ProcessState) cnireload.Process {
		return cnireload.Process{Plugin: bad, Verb: "ADD", ID: bad, PID: 7, Since: at, State: state}
	}
	s := &cnireload.Snapshot{
		Generation: 3, LoadedAt: at, Failures: 4, Cause: errors.New(bad), LoadError: errors.New(bad),
		ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin"},
		Networks: []cnireload.NetworkState{{Name: "lo", CNIVersion: "0.3.1", Interface: "lo"}, {
			Name: "c10", CNIVersion: "1.1.0", Interface: "eth0", File: bad, SHA256: "abc",
			DropIns: []cnireload.DropInState{{Path: bad, SHA256: "def"}},
			Plugins: []cnireload.PluginState{
				{Role: cnireload.RolePlugin, Type: bad, Counts: true, Path: "/x", Versions: []string{bad, "1.1.0"}, Status: "ok"},
				{Role: cnireload.RoleIPAM, Type: bad, Counts: true, Path: "/x", Status: "not ready", Problem: errors.New(bad)},
				{Role: cnireload.RoleDelegate, Type: bad, Problem: errors.New(bad)},
			},
			StaleError: errors.New(bad), StaleSince: at,
		}},
		Skipped:  []cnireload.SkippedFile{{File: bad, Reason: bad}},
		Watch:    cnireload.WatchState{Mode: cnireload.WatchPolling, Cause: bad},
		Template: &cnireload.TemplateState{Path: "/t", File: "/f", CIDRs: []string{"10.1.0.0/24"}, State: bad, Err: errors.New(bad)},
		Gates: []cnireload.GateState{
			{Plugin: bad, Kind: "file", Target: bad, Key: "nodename_file", Mode: cnireload.GateEnforce, Ops: []string{"ADD", "DEL"}, Since: at, Cause: bad},
			{Kind: "unix", Target: bad, Mode: cnireload.GateReport, Ops: []string{"ADD"}, Open: true, Since: at},
		},
	}
	return look{err: s.Err(), config: s.Config, snapshot: s, work: func() work {
		return work{
			processes: []cnireload.Process{process(cnireload.ProcessRunning), process(cnireload.ProcessAbandoned), process(cnireload.ProcessLeftOver)},
			owed:      []cnireload.OwedRemoval{{ID: bad, Networks: []string{bad}, Since: at, Cause: bad, Attempts: 4}},
			sweep:     &cnireload.Sweep{At: at, Stale: 2, Err: errors.New(bad)},
			trial:     &cnireload.Trial{Failures: 12, Since: at, Held: 3, Cause: bad},
		}
	}}
}

// update has TestGoldenReport write what it would compare with.
var update = flag.Bool("update", false, "write the files of TestGoldenReport")

// varies matches what differs from run to run, or with the version of a dependency.
var varies = regexp.MustCompile(`(?m)^(  "version"| +"age"): ".*"`)

// The whole report, byte for byte: scripts read it.
func TestGoldenReport(t *testing.T) {
	for name, l := range map[string]look{
		"full.json":  full("\x1b[31m\xff\n<\"\u00e9\"> \u202e" + strings.Repeat("x", 20)),
		"empty.json": view(map[string]*cnireload.Snapshot{"d": {Cause: errors.New("x"), Template: &cnireload.TemplateState{}}}, "d").networks["d"],
	} {
		info, err := View{defaultName: "d", networks: map[string]look{"d": l}}.Info()
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := json.Indent(&b, []byte(info["cniReload"]), "", "  "); err != nil {
			t.Fatal(err)
		}
		got := varies.ReplaceAll(append(b.Bytes(), '\n'), []byte(`$1: ""`))
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, got\n%s", name, err, got)
		}
	}
}

// Whatever text a plugin or a file brings, and wherever: what is shown of it is
// short and printable.
func TestEveryTextIsPrintable(t *testing.T) {
	bad := "\x1b[31m\xff\xfe\u202e\n\\\" \\u0000\u2028" + strings.Repeat("é", 3000)
	r := full(bad).report()
	r.Version, r.ConfDir, r.Timeouts = bad, bad, map[string]string{"add": bad}
	n := &r.Networks[1]
	n.Name, n.CNIVersion, n.Interface, n.SHA256, n.Plugins[0].Path = bad, bad, bad, bad, bad
	g := &r.Gates[0]
	g.Kind, g.Key, g.Mode, g.Ops = bad, bad, cnireload.GateMode(bad), []string{bad}
	r.Template.Path, r.Template.File, r.Template.CIDRs = bad, bad, []string{bad}
	b, err := encode(r)
	if err != nil {
		t.Fatal(err)
	}
	texts := 0
	d := json.NewDecoder(bytes.NewReader(b))
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		s, ok := token.(string)
		if !ok {
			continue
		}
		checkText(t, s)
		if strings.HasPrefix(s, "\uFFFD[31m\uFFFD") && strings.HasSuffix(s, " ...") {
			texts++
		}
	}
	if texts != 44 {
		t.Errorf("%d texts, want 44", texts)
	}
}
