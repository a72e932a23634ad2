// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/log"
	"go.uber.org/goleak"

	"github.com/cnireload/cnireload/cnireload"
)

func TestMain(m *testing.M) {
	if err := log.SetLevel("panic"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// view makes a View of snapshots as if they came from networks.
func view(snapshots map[string]*cnireload.Snapshot, defaultName string) View {
	v := View{defaultName: defaultName, networks: map[string]look{}}
	for name, s := range snapshots {
		v.networks[name] = look{err: s.Err(), config: s.Config, work: func() work { return work{} }, snapshot: s}
	}
	return v
}

const prefix = "Network plugin returns error: cni plugin not initialized"

// kinds are snapshots of every kind of state.
func kinds() map[string]*cnireload.Snapshot {
	since := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	good := cnireload.PluginState{Role: cnireload.RolePlugin, Type: "fakenet", Counts: true, Path: "/opt/cni/bin/fakenet", Versions: []string{"1.0.0"}, Status: "ok"}
	list := cnireload.NetworkState{Name: "c10", CNIVersion: "1.0.0", Interface: "eth0", File: "/etc/cni/net.d/10-c10.conflist", SHA256: "abc", Plugins: []cnireload.PluginState{good}}
	ready := cnireload.Snapshot{
		Generation: 3, LoadedAt: since, ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin"},
		Networks: []cnireload.NetworkState{{Name: "cni-loopback", CNIVersion: "0.3.1", Interface: "lo", Plugins: []cnireload.PluginState{good}}, list},
		Skipped:  []cnireload.SkippedFile{{File: "/etc/cni/net.d/00-bad.conflist", Reason: "is empty"}},
		Watch:    cnireload.WatchState{Mode: cnireload.WatchInotify},
	}
	with := func(change func(s *cnireload.Snapshot)) *cnireload.Snapshot {
		s := ready
		s.Networks = slices.Clone(s.Networks)
		change(&s)
		return &s
	}
	return map[string]*cnireload.Snapshot{
		"ready": &ready,
		"loading": {
			Cause: errors.New("the network configuration is still being loaded"), LoadError: errors.New("the network configuration is still being loaded"),
			ConfDir: "/etc/cni/net.d", Watch: cnireload.WatchState{Mode: cnireload.WatchPolling, Cause: "not started"},
		},
		"empty": {
			Cause: errors.New("no network config found in /etc/cni/net.d"), LoadError: errors.New("no network config found in /etc/cni/net.d"),
			ConfDir: "/etc/cni/net.d", Watch: cnireload.WatchState{Mode: cnireload.WatchInotify},
		},
		"directory missing": {
			Generation: 3, LoadedAt: since,
			Cause: errors.New("conf dir /etc/cni/net.d does not exist"), LoadError: errors.New("conf dir /etc/cni/net.d does not exist"),
			ConfDir: "/etc/cni/net.d", Watch: cnireload.WatchState{Mode: cnireload.WatchWaiting, Cause: "open /etc/cni/net.d: no such file or directory"},
		},
		"plugin missing": with(func(s *cnireload.Snapshot) {
			s.Cause = errors.New(`network "c10" in /etc/cni/net.d/10-c10.conflist: plugin "portmap" not found in /opt/cni/bin`)
			s.Networks[1].Plugins = []cnireload.PluginState{good, {Role: cnireload.RolePlugin, Type: "portmap", Counts: true, Problem: errors.New(`plugin "portmap" not found in /opt/cni/bin`)}}
		}),
		"plugin unusable": with(func(s *cnireload.Snapshot) {
			s.Cause = errors.New("bad version")
			s.Networks[1].Plugins = []cnireload.PluginState{{Role: cnireload.RoleIPAM, Type: "x", Counts: true, Path: "/x", Versions: []string{"0.4.0"}, Problem: errors.New("bad version")}}
		}),
		"status not ready": with(func(s *cnireload.Snapshot) {
			s.Cause = errors.New("code 50")
			s.Networks[1].Plugins = []cnireload.PluginState{{Role: cnireload.RolePlugin, Type: "x", Counts: true, Path: "/x", Status: "not ready", Problem: errors.New("code 50")}}
		}),
		"problem in parse mode": with(func(s *cnireload.Snapshot) {
			s.Networks[1].Plugins = []cnireload.PluginState{{Role: cnireload.RoleDelegate, Type: "x", Problem: errors.New("gone")}}
		}),
		"named but not run": with(func(s *cnireload.Snapshot) {
			s.Networks[1].Plugins = []cnireload.PluginState{good, {Role: cnireload.RoleIPAM, Type: "azure-cns", Problem: errors.New(`plugin "azure-cns" not found in /opt/cni/bin`)}}
		}),
		"stale": with(func(s *cnireload.Snapshot) {
			s.Networks[1].StaleError, s.Networks[1].StaleSince = errors.New("is empty"), since
		}),
		"stale and not ready": with(func(s *cnireload.Snapshot) {
			s.Cause = errors.New("plugin gone")
			s.Networks[0].StaleError, s.Networks[0].StaleSince = errors.New("is big"), since.Add(time.Minute)
			s.Networks[1].StaleError, s.Networks[1].StaleSince = errors.New("is empty"), since
			third := s.Networks[0]
			third.StaleSince = since.Add(time.Hour)
			s.Networks = append(s.Networks, third)
		}),
		"polling": with(func(s *cnireload.Snapshot) {
			s.Watch = cnireload.WatchState{Mode: cnireload.WatchPolling, Cause: "too many open files"}
		}),
		"drop-ins": with(func(s *cnireload.Snapshot) {
			s.Networks[1].DropIns = []cnireload.DropInState{{Path: "/etc/cni/net.d/c10/1.conf", SHA256: "def"}}
		}),
		"template waiting": with(func(s *cnireload.Snapshot) {
			s.Template = &cnireload.TemplateState{Path: "/t", File: "/f", State: "waiting"}
		}),
		"template failed": with(func(s *cnireload.Snapshot) {
			s.Template = &cnireload.TemplateState{Path: "/t", File: "/f", CIDRs: []string{"10.1.0.0/24"}, State: "failed", Err: errors.New("cannot be parsed")}
		}),
		"hostile texts": with(func(s *cnireload.Snapshot) {
			bad := "{\"x\": \x1b[31m\x00\xff\u202e\n" + strings.Repeat("é", 3000)
			s.Cause, s.LoadError = errors.New(bad), errors.New(bad)
			s.Networks[1].Plugins = []cnireload.PluginState{{Type: bad, Path: "", Versions: []string{bad}, Problem: errors.New(bad)}}
			s.Networks[1].StaleError = errors.New(bad)
			s.Networks[1].File = "/etc/cni/net.d/" + bad
			s.Skipped = []cnireload.SkippedFile{{File: bad, Reason: bad}}
			s.Watch.Cause = bad
			s.Template = &cnireload.TemplateState{State: bad, Err: errors.New(bad)}
		}),
	}
}

// Whatever the state: the condition, lastCNILoadStatus and the report agree, every
// value is a plain string or a JSON object, and texts are short and printable.
func TestNothingContradicts(t *testing.T) {
	for name, s := range kinds() {
		t.Run(name, func(t *testing.T) {
			v := view(map[string]*cnireload.Snapshot{"default": s, "kata": kinds()["ready"]}, "default")
			c := v.Condition()
			info, err := v.Info()
			if err != nil {
				t.Fatal(err)
			}
			checkValues(t, info)
			wantKeys := []string{"cniReload", "cniReload.kata", "cniconfig", "lastCNILoadStatus", "lastCNILoadStatus.default", "lastCNILoadStatus.kata"}
			var keys []string
			for k := range info {
				keys = append(keys, k)
			}
			if slices.Sort(keys); !slices.Equal(keys, wantKeys) {
				t.Errorf("keys are %q", keys)
			}
			var r Report
			if err := json.Unmarshal([]byte(info["cniReload"]), &r); err != nil {
				t.Fatal(err)
			}
			ok := info["lastCNILoadStatus"] == "OK"
			if c.Ready != ok || c.Ready != r.Ready || c.Ready != s.Ready() || info["lastCNILoadStatus"] != info["lastCNILoadStatus.default"] {
				t.Errorf("condition %v, load status %q, report %v", c, info["lastCNILoadStatus"], r.Ready)
			}
			if c.Reason != r.Reason || c.Message != r.Message {
				t.Errorf("condition %+v, report %q %q", c, r.Reason, r.Message)
			}
			if c.Ready != (c.Reason == "") || c.Ready != (c.Message == "") {
				t.Errorf("%+v", c)
			}
			if !c.Ready {
				if c.Reason != "NetworkPluginNotReady" || !strings.HasPrefix(c.Message, prefix+": ") {
					t.Errorf("%+v", c)
				}
				if name != "hostile texts" && !strings.Contains(info["lastCNILoadStatus"], s.Cause.Error()) {
					t.Errorf("load status %q does not name %q", info["lastCNILoadStatus"], s.Cause)
				}
			}
			if info["lastCNILoadStatus.kata"] != "OK" {
				t.Errorf("the other handler is %q", info["lastCNILoadStatus.kata"])
			}
			for _, text := range []string{c.Message, info["lastCNILoadStatus"], r.LastError, r.Watch.Cause} {
				checkText(t, text)
			}
			for _, n := range r.Networks {
				checkText(t, n.File)
				for _, p := range n.Plugins {
					checkText(t, p.Problem)
					for _, version := range p.Versions {
						checkText(t, version)
					}
					if (p.Status == "ok") != (p.Problem == "") {
						t.Errorf("%+v", p)
					}
				}
			}
			for _, f := range r.Skipped {
				checkText(t, f.File)
				checkText(t, f.Reason)
			}
			if r.Networks == nil || r.Skipped == nil {
				t.Error("a list is null")
			}
			if len(r.Networks) != len(s.Networks) || len(r.Skipped) != len(s.Skipped) || r.SkippedCount != len(s.Skipped) {
				t.Errorf("%d networks, %d skipped of %d", len(r.Networks), len(r.Skipped), r.SkippedCount)
			}
			stale := slices.ContainsFunc(s.Networks, func(n cnireload.NetworkState) bool { return n.StaleError != nil })
			if r.Stale != stale || (r.StaleSince != nil) != stale {
				t.Errorf("stale %v since %v", r.Stale, r.StaleSince)
			}
			// A list that stays in use although its file is bad is an error that
			// is told, ready or not.
			if (stale || s.LoadError != nil) != (r.LastError != "") {
				t.Errorf("last error %q", r.LastError)
			}
		})
	}
}

// checkValues applies what crictl expects of the values.
func checkValues(t *testing.T, info map[string]string) {
	t.Helper()
	for k, v := range info {
		switch {
		case strings.HasPrefix(v, "{"):
			var object map[string]any
			if err := json.Unmarshal([]byte(v), &object); err != nil {
				t.Errorf("%s is no JSON object: %v: %.100s", k, err, v)
			}
		case json.Valid([]byte(v)):
			t.Errorf("%s is JSON, but no object: %.100s", k, v)
		}
	}
}

func checkText(t testing.TB, s string) {
	t.Helper()
	if len(s) > 1<<10 {
		t.Errorf("%d bytes: %.50q", len(s), s)
	}
	if !utf8.ValidString(s) {
		t.Errorf("not UTF-8: %.50q", s)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			t.Errorf("%q in %.50q", r, s)
			break
		}
	}
}

// shown is the report as it is shown.
func shown(t *testing.T, l look) (r Report) {
	t.Helper()
	b, err := encode(l.report())
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReport(t *testing.T) {
	k := kinds()
	report := func(s *cnireload.Snapshot) Report {
		return shown(t, view(map[string]*cnireload.Snapshot{"d": s}, "d").networks["d"])
	}

	r := report(k["stale and not ready"])
	if r.LastError != "/etc/cni/net.d/10-c10.conflist is empty; its last good content stays in use" {
		t.Errorf("last error %q", r.LastError)
	}
	if !r.StaleSince.Equal(k["stale"].Networks[1].StaleSince) {
		t.Errorf("stale since %s, want the earlier", r.StaleSince)
	}
	if !r.Networks[0].Stale || !r.Networks[1].Stale {
		t.Error("networks are not marked stale")
	}

	r = report(k["plugin missing"])
	want := []Plugin{
		{PluginState: cnireload.PluginState{Role: "plugin", Type: "fakenet", Counts: true, Path: "/opt/cni/bin/fakenet", Versions: []string{"1.0.0"}}, Status: "ok", StatusVerb: "ok"},
		{PluginState: cnireload.PluginState{Role: "plugin", Type: "portmap", Counts: true}, Status: "missing", Problem: `plugin "portmap" not found in /opt/cni/bin`},
	}
	if !reflect.DeepEqual(r.Networks[1].Plugins, want) {
		t.Errorf("%+v", r.Networks[1].Plugins)
	}
	if p := report(k["named but not run"]).Networks[1].Plugins[1]; p.Counts || p.Status != "missing" || p.Problem == "" {
		t.Errorf("%+v", p)
	}
	if p := report(k["plugin unusable"]).Networks[1].Plugins[0]; p.Status != "unusable" || p.Role != "ipam" {
		t.Errorf("%+v", p)
	}
	if p := report(k["status not ready"]).Networks[1].Plugins[0]; p.Status != "unusable" || p.StatusVerb != "not ready" {
		t.Errorf("%+v", p)
	}
	if d := report(k["drop-ins"]).Networks[1].DropIns; !reflect.DeepEqual(d, []cnireload.DropInState{{Path: "/etc/cni/net.d/c10/1.conf", SHA256: "def"}}) {
		t.Errorf("%+v", d)
	}
	if w := report(k["directory missing"]).Watch; w.Mode != "waiting for directory" || w.Cause == "" {
		t.Errorf("%+v", w)
	}
	if r := report(k["loading"]); r.LoadedAt != nil || r.Generation != 0 {
		t.Errorf("%+v", r)
	}
	if tm := report(k["template failed"]).Template; !reflect.DeepEqual(tm, &Template{cnireload.TemplateState{Path: "/t", File: "/f", CIDRs: []string{"10.1.0.0/24"}, State: "failed"}, "cannot be parsed"}) {
		t.Errorf("%+v", tm)
	}
	if tm := report(k["template waiting"]).Template; tm.CIDRs == nil {
		t.Error("cidrs are null")
	}
	for _, verb := range []string{"add", "del", "check", "status", "version", "gc"} {
		if d, err := time.ParseDuration(r.Timeouts[verb]); err != nil || d <= 0 {
			t.Errorf("timeout of %s is %q", verb, r.Timeouts[verb])
		}
	}
	if r.Version == "" {
		t.Error("no version")
	}
}

// The keys are an interface: scripts read them.
func TestReportKeys(t *testing.T) {
	s := kinds()["template failed"]
	s.Networks[1].StaleError = errors.New("x")
	s.Cause = errors.New("y")
	b, err := encode(view(map[string]*cnireload.Snapshot{"d": s}, "d").networks["d"].report())
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	if got, want := strings.Join(keys, " "), "calls confDir gates generation lastError loadedAt message networks ready reason skipped skippedCount stale staleSince template timeouts version watch"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestPrintable(t *testing.T) {
	long := strings.Repeat("é", 2000)
	for _, tt := range []struct{ in, want string }{
		{"", ""},
		{"plain text: ü \"quoted\" 日本", "plain text: ü \"quoted\" 日本"},
		{"two\nlines\tand\r\nmore\u00a0space\u2028", "two lines and  more space "},
		{"\x1b[31mred\x07\x00", "\uFFFD[31mred\uFFFD\uFFFD"},
		{"bad \xff\xfe bytes", "bad \uFFFD bytes"},
		{"right-to-left \u202e", "right-to-left \uFFFD"},
		{strings.Repeat("a", 1<<10), strings.Repeat("a", 1<<10)},
		{strings.Repeat("a", 1<<10+1), strings.Repeat("a", 1<<10-4) + " ..."},
		{long, strings.Repeat("é", 510) + " ..."},
		{"x" + long, "x" + strings.Repeat("é", 509) + " ..."},
		{strings.Repeat("\x00", 5000), strings.Repeat("\uFFFD", 340) + " ..."},
	} {
		got := printable(tt.in)
		if got != tt.want {
			t.Errorf("printable(%.30q) is %.60q, %d bytes, want %.60q, %d", tt.in, got, len(got), tt.want, len(tt.want))
		}
		checkText(t, got)
	}
}

// other is an implementation that knows nothing of snapshots, as CRI's tests have.
type other struct {
	cnireload.CNI
	err    error
	config *cnireload.ConfigResult
}

func (o *other) Status() error                      { return o.err }
func (o *other) GetConfig() *cnireload.ConfigResult { return o.config }

func TestOtherImplementations(t *testing.T) {
	bad := &other{err: cnireload.ErrCNINotInitialized, config: &cnireload.ConfigResult{Prefix: "eth"}}
	good := &other{config: &cnireload.ConfigResult{}}
	v := Of(map[string]cnireload.CNI{"default": bad, "kata": good}, "default")
	if c := v.Condition(); c != (Condition{Reason: ReasonNotReady, Message: prefix}) {
		t.Errorf("%+v", c)
	}
	info, err := v.Info()
	if err != nil {
		t.Fatal(err)
	}
	checkValues(t, info)
	want := map[string]string{
		"lastCNILoadStatus": "cni plugin not initialized", "lastCNILoadStatus.default": "cni plugin not initialized", "lastCNILoadStatus.kata": "OK",
		"cniconfig": `{"PluginDirs":null,"PluginConfDir":"","PluginMaxConfNum":0,"Prefix":"eth","Networks":null}`,
	}
	if !reflect.DeepEqual(info, want) {
		t.Errorf("%q", info)
	}
	// A concrete type of theirs will do as well.
	if c := Of(map[string]*other{"default": good}, "default").Condition(); !c.Ready {
		t.Errorf("%+v", c)
	}
}

// Without a default network there is nothing to wait for (Windows, and CRI's own
// tests).
func TestNoNetworks(t *testing.T) {
	v := Of(map[string]*cnireload.Network{}, "default")
	if c := v.Condition(); c != (Condition{Ready: true}) {
		t.Errorf("%+v", c)
	}
	info, err := v.Info()
	if err != nil || !reflect.DeepEqual(info, map[string]string{"lastCNILoadStatus": "OK"}) {
		t.Errorf("%q, %v", info, err)
	}
}

// Real networks, each handler under its own keys; the condition is the default's
// alone (R10).
func TestHandlers(t *testing.T) {
	dir := t.TempDir()
	write := func(path, text string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "good", "10-a.conflist"), `{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"fakenet"}]}`, 0o644)
	write(filepath.Join(dir, "broken", "10-a.conflist"), `{`, 0o644)
	write(filepath.Join(dir, "bin", "fakenet"), "", 0o755)
	networks := map[string]*cnireload.Network{}
	for _, name := range []string{"good", "broken", "missing"} {
		n, err := cnireload.New(
			cnireload.WithPluginConfDir(filepath.Join(dir, name)),
			cnireload.WithPluginDir([]string{filepath.Join(dir, "bin")}),
			cnireload.WithReadiness("parse"),
			cnireload.WithDefaultConf)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		_ = n.Load()
		networks[name] = n
	}
	for _, name := range []string{"good", "broken", "missing"} {
		v := Of(networks, name)
		c := v.Condition()
		if c.Ready != (name == "good") {
			t.Errorf("%s: %+v", name, c)
		}
		info, err := v.Info()
		if err != nil {
			t.Fatal(err)
		}
		checkValues(t, info)
		if len(info) != 8 || info["lastCNILoadStatus.good"] != "OK" || info["lastCNILoadStatus"] != info["lastCNILoadStatus."+name] ||
			!strings.Contains(info["lastCNILoadStatus.broken"], "10-a.conflist cannot be parsed") ||
			!strings.Contains(info["lastCNILoadStatus.missing"], "conf dir "+filepath.Join(dir, "missing")+" does not exist") {
			t.Errorf("%q", info)
		}
		if info["cniReload"] == "" || info["cniReload."+name] != "" {
			t.Errorf("%s: keys of the default's report are wrong", name)
		}
		for other := range networks {
			if other != name && info["cniReload."+other] == "" {
				t.Errorf("%s: no report of %s", name, other)
			}
		}
	}
	// A view is what it was when it was made.
	v := Of(networks, "good")
	if err := os.RemoveAll(filepath.Join(dir, "good")); err != nil {
		t.Fatal(err)
	}
	_ = networks["good"].Load()
	if c := v.Condition(); !c.Ready {
		t.Errorf("an older view changed: %+v", c)
	}
	if c := Of(networks, "good").Condition(); c.Ready {
		t.Error("a newer view does not show the change")
	}
}

// A report is a gRPC message, however many bad files there are.
func TestManySkippedFiles(t *testing.T) {
	s := kinds()["ready"]
	s.Skipped = nil
	for i := range 13_000 {
		s.Skipped = append(s.Skipped, cnireload.SkippedFile{File: fmt.Sprintf("/etc/cni/net.d/%05d.conflist", i), Reason: strings.Repeat("x", 1<<10)})
	}
	info, err := view(map[string]*cnireload.Snapshot{"default": s, "kata": s}, "default").Info()
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for key, value := range info {
		size += len(key) + len(value)
	}
	if size > 1<<20 {
		t.Errorf("the answer has %d bytes", size)
	}
	var r Report
	if err := json.Unmarshal([]byte(info["cniReload"]), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Skipped) != maxEntries || r.SkippedCount != 13_000 || r.Skipped[0].File != "/etc/cni/net.d/00000.conflist" {
		t.Errorf("%d files of %d, the first is %+v", len(r.Skipped), r.SkippedCount, r.Skipped[0])
	}
}

// What plugins are at is shown, and a storm of it does not fill the report.
func TestCalls(t *testing.T) {
	bad := "\x1b[31m\xff\n" + strings.Repeat("é", 3000)
	v := view(map[string]*cnireload.Snapshot{"default": kinds()["ready"]}, "default")
	l := v.networks["default"]
	at := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	l.work = func() work {
		w := work{processes: someProcesses(100), sweep: &cnireload.Sweep{At: at, Stale: 2, Err: errors.New(bad)},
			trial: &cnireload.Trial{Failures: 12, Since: at, Held: 3, Cause: bad}}
		w.processes = append(w.processes, cnireload.Process{Plugin: bad, Verb: "DEL", ID: bad, State: cnireload.ProcessLeftOver})
		for range 256 {
			w.owed = append(w.owed, cnireload.OwedRemoval{ID: bad, Networks: []string{bad}, Since: at, Cause: bad, Attempts: 4})
		}
		return w
	}
	v.networks["default"] = l
	r := shown(t, l)
	c := r.Calls
	if len(c.InFlight) != maxEntries || len(c.Abandoned) != maxEntries || len(c.LeftOver) != 1 || len(c.Tombstones) != maxEntries {
		t.Errorf("%d in flight, %d abandoned, %d left over, %d tombstones",
			len(c.InFlight), len(c.Abandoned), len(c.LeftOver), len(c.Tombstones))
	}
	want := map[string]int{"inFlight": 100, "abandoned": 100, "leftOver": 1, "tombstones": 256}
	if !reflect.DeepEqual(c.Counts, want) {
		t.Errorf("counts %v, want %v", c.Counts, want)
	}
	if p := c.InFlight[0]; p.Plugin != "ptp" || p.Verb != "ADD" || p.ID != "pod-0" || p.PID != 100 || !strings.HasPrefix(p.Age, "1m0") {
		t.Errorf("in flight is %+v", p)
	}
	if r.GC == nil || !r.GC.At.Equal(at) || r.GC.Stale != 2 {
		t.Errorf("gc is %+v", r.GC)
	}
	if r.Trial == nil || r.Trial.Failures != 12 || !r.Trial.Since.Equal(at) || r.Trial.Held != 3 {
		t.Errorf("trial is %+v", r.Trial)
	}
	for _, text := range []string{r.Trial.Cause, c.LeftOver[0].Plugin, c.LeftOver[0].ID, c.Tombstones[0].ID, c.Tombstones[0].Networks[0], c.Tombstones[0].Cause, r.GC.Error} {
		if text == "" || len(text) > 1024 || strings.ContainsFunc(text, unicode.IsControl) || !utf8.ValidString(text) {
			t.Errorf("%q", text)
		}
	}
}
