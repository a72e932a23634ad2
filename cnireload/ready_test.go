// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/testenv"
	"github.com/cnireload/cnireload/internal/watchstub"
)

// Each way in which an executable cannot be used is told apart, in the condition
// and in the plugin's state.
func TestPluginProblems(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		list   string
		break_ func(d *node)
		words  []string
		path   bool // whether an executable was found
	}{
		{
			name:   "missing",
			break_: func(d *node) { d.must(os.Remove(filepath.Join(d.bin, "portmap"))) },
			words:  []string{`plugin "portmap" not found in `},
		},
		{
			name:   "not executable",
			break_: func(d *node) { d.must(os.Chmod(filepath.Join(d.bin, "portmap"), 0o644)) },
			words:  []string{`plugin "portmap" cannot be executed`, "portmap is not executable (mode 0644)"},
		},
		{
			name: "directory",
			break_: func(d *node) {
				d.must(os.Remove(filepath.Join(d.bin, "portmap")))
				d.must(os.Mkdir(filepath.Join(d.bin, "portmap"), 0o755))
			},
			words: []string{`plugin "portmap" cannot be executed`, "is not a regular file but a directory"},
		},
		{
			name: "dangling symlink",
			break_: func(d *node) {
				d.must(os.Remove(filepath.Join(d.bin, "portmap")))
				d.must(os.Symlink("nowhere", filepath.Join(d.bin, "portmap")))
			},
			words: []string{`plugin "portmap" cannot be executed`, "is a symlink that leads nowhere"},
		},
		{
			name:   "wrong version",
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{out: versionAnswer("0.3.0", "0.3.1")}) },
			words:  []string{`plugin "portmap" (`, "does not support cniVersion 1.0.0, only 0.3.0, 0.3.1"},
			path:   true,
		},
		{
			name:   "no JSON to VERSION",
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{out: "v1.2.3\n"}) },
			words:  []string{`plugin "portmap" (`, "mis-answers VERSION", "invalid character 'v'"},
			path:   true,
		},
		{
			name:   "error to VERSION",
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{err: "usage: portmap", code: 2}) },
			words:  []string{"mis-answers VERSION", "usage: portmap", "exit status 2"},
			path:   true,
		},
		{
			name:   "nothing to VERSION",
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{}) },
			words:  []string{"mis-answers VERSION"},
			path:   true,
		},
		{
			name: "VERSION is unknown, as in 0.1.0",
			break_: func(d *node) {
				d.answer("portmap", "VERSION", reply{out: `{"code":100,"msg":"unknown CNI_COMMAND: VERSION"}`, code: 1})
			},
			words: []string{"does not support cniVersion 1.0.0, only 0.1.0"},
			path:  true,
		},
		{
			name: "a very long list of versions",
			break_: func(d *node) {
				d.answer("portmap", "VERSION", reply{out: versionAnswer(strings.Split(strings.Repeat("9.9.9 ", 50000), " ")...)})
			},
			words: []string{"mis-answers VERSION", "it lists 50001 versions"},
			path:  true,
		},
		{
			name:   "no executable format",
			break_: func(d *node) { d.replace(filepath.Join(d.bin, "portmap"), "\x7fELF", 0o755) },
			words:  []string{"mis-answers VERSION", "cannot be executed", "exec format error"},
			path:   true,
		},
		{
			name:   "address management",
			list:   conflist("1.0.0", "a", "fakenet", `{"type":"bridge","ipam":{"type":"portmap"}}`),
			break_: func(d *node) { d.must(os.Remove(filepath.Join(d.bin, "portmap"))) },
			words:  []string{`plugin "portmap" not found in `},
		},
		{
			name:   "delegate",
			list:   conflist("1.0.0", "a", "fakenet", `{"type":"multus","binDir":"/nowhere","delegates":[{"cniVersion":"1.0.0","type":"bridge","ipam":{"type":"portmap"}}]}`),
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{out: versionAnswer("0.4.0")}) },
			words:  []string{`plugin "portmap"`, "does not support cniVersion 1.0.0, only 0.4.0"},
			path:   true,
		},
		{
			name:   "one of several delegates",
			list:   conflist("1.0.0", "a", "fakenet", `{"type":"multus","binDir":"/nowhere","delegates":[{"type":"bridge"},{"cniVersion":"0.4.0","plugins":[{"type":"portmap"}]}]}`),
			break_: func(d *node) { d.answer("portmap", "VERSION", reply{out: versionAnswer("1.0.0")}) },
			words:  []string{`plugin "portmap"`, "does not support cniVersion 0.4.0, only 1.0.0"},
			path:   true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet", "portmap", "bridge", "multus")
			if tt.list == "" {
				tt.list = conflist("1.0.0", "c10", "fakenet", "portmap")
			}
			d.write("10-a.conflist", tt.list)
			tt.break_(d)
			n := d.network()
			// Loading is about lists; whether they can be used is Status's to say.
			d.must(n.Load())
			err := n.Status()
			words := append(tt.words, "cni plugin not initialized: network ", filepath.Join(d.conf, "10-a.conflist"))
			if wrong := testenv.MissingWords(err, words); wrong != "" {
				t.Error(wrong)
			}
			if err != nil && len(err.Error()) > 4<<10 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			found := false
			for _, p := range n.Snapshot().Networks[0].Plugins {
				if p.Type != "portmap" {
					if !p.Counts || p.Problem != nil || p.Path != filepath.Join(d.bin, p.Type) || len(p.Versions) == 0 {
						t.Errorf("a good one is %+v", p)
					}
					continue
				}
				found = true
				if !p.Counts || p.Problem == nil || (p.Path != "") != tt.path {
					t.Errorf("the bad one is %+v", p)
				}
			}
			if !found {
				t.Error("no state of the bad plugin")
			}
			// Nothing is run for a pod, and what would be removed still is.
			if _, err := n.Setup(t.Context(), "c", "/ns"); !IsCNINotInitialized(err) || testenv.MissingWords(err, tt.words) != "" {
				t.Errorf("Setup: %v", err)
			}
			if _, err := n.SetupSerially(t.Context(), "c", "/ns"); !IsCNINotInitialized(err) {
				t.Errorf("SetupSerially: %v", err)
			}
			if got := d.count("fakenet", "ADD"); got != 0 {
				t.Errorf("%d ADD", got)
			}

			// Readiness by parsing alone: usable, and the missing is still told.
			n = d.network(WithReadiness("parse"))
			d.must(n.Load())
			if err := n.Status(); err != nil {
				t.Errorf("readiness = parse: %v", err)
			}
		})
	}
}

func TestLaterBinDirIsUsed(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	second := filepath.Join(d.bin, "second")
	d.must(os.MkdirAll(second, 0o755))
	d.must(os.MkdirAll(filepath.Join(d.bin, "fakenet"), 0o755))
	d.installIn(second, "fakenet")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-a.conflist", good)
	n := d.network(WithPluginDir([]string{d.bin, filepath.Join(d.bin, "no-such-dir"), second}))
	d.must(n.Load())
	d.must(n.Status())
	if p := n.Snapshot().Networks[0].Plugins[0]; p.Path != filepath.Join(second, "fakenet") {
		t.Errorf("%+v", p)
	}
	// What runs is what was looked at.
	if _, err := n.Setup(t.Context(), "c", "/ns"); err != nil {
		t.Error(err)
	}
}

func TestParseModeStillRespectsStatus(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.answer("fakenet", "STATUS", reply{out: `{"code":50,"msg":"agent is down"}`, code: 1})
	d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	n := d.network(WithReadiness("parse"))
	d.must(n.Load())
	if wrong := testenv.MissingWords(n.Status(), []string{"code 50", "agent is down"}); wrong != "" {
		t.Error(wrong) // go-cni asks for STATUS too
	}
	if got := d.count("fakenet", "VERSION"); got != 0 {
		t.Errorf("%d VERSION", got)
	}
}

func TestLoopbackMissing(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	n := d.started(WithLoNetwork, WithMinNetworkCount(2))
	becomesUnready(t, n, `network "cni-loopback": plugin "loopback" not found in`, "use_internal_loopback = true")
	d.install("loopback")
	s := becomesReady(t, n)
	if s.Networks[0].Interface != "lo" || s.Networks[0].File != "" || s.Networks[1].Interface != "eth0" {
		t.Errorf("%+v", s.Networks)
	}
	if v := s.Networks[0].Plugins[0].Versions; len(v) == 0 {
		t.Error("loopback was not asked for its VERSION")
	}
	// The pod network's cause comes before the loopback's.
	d.must(os.Remove(filepath.Join(d.bin, "loopback")))
	d.must(os.Remove(filepath.Join(d.bin, "fakenet")))
	becomesUnready(t, n, `plugin "fakenet" not found`)
}

// The binary arrives: ready by itself. It goes: not ready after a grace (R1).
func TestBinaryComesAndGoes(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-c10.conflist", conflist("1.0.0", "c10", "fakenet", "portmap"))
	n := d.network()
	n.pace = pace{poll: time.Hour, upgradeGrace: time.Second, status: time.Hour, statusRetry: time.Hour}
	n.Start()
	becomesUnready(t, n, `network "c10" in `+d.conf+`/10-c10.conflist: plugin "portmap" not found in `+d.bin)
	generation := n.Snapshot().Generation
	d.install("portmap")
	s := becomesReady(t, n)
	if s.Generation != generation {
		t.Errorf("generation %d, was %d", s.Generation, generation)
	}

	// Removed and put back within the grace: nobody notices.
	d.must(os.Remove(filepath.Join(d.bin, "portmap")))
	stays(t, n.pace.upgradeGrace/5, func() string { return errorText(n.Status()) })
	d.install("portmap")
	stays(t, n.pace.upgradeGrace, func() string { return errorText(n.Status()) })

	gone := time.Now()
	d.must(os.Remove(filepath.Join(d.bin, "portmap")))
	becomesUnready(t, n, `plugin "portmap" not found`)
	if took := time.Since(gone); took < n.pace.upgradeGrace*9/10 {
		t.Errorf("not ready after %s, the grace is %s", took, n.pace.upgradeGrace)
	}
	// And a plugin that answers otherwise is asked again when it is replaced.
	d.answer("portmap", "VERSION", reply{out: versionAnswer("0.4.0")})
	d.install("portmap")
	becomesUnready(t, n, "does not support cniVersion 1.0.0")
	d.answer("portmap", "VERSION", reply{out: versionAnswer("1.0.0")})
	d.install("portmap")
	becomesReady(t, n)
}

// While a new list is checked the old one stays in use: there is no moment at
// which a list is in use unchecked, and none without a network.
func TestOldListStaysWhileNewIsChecked(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "slow")
	d.answer("slow", "VERSION", reply{out: versionAnswer("1.0.0"), sh: "sleep 0.5"})
	d.write("10-a.conflist", conflist("1.0.0", "old", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	d.write("10-a.conflist", conflist("1.0.0", "new", "fakenet", "slow"))
	eventually(t, func() string {
		s := n.Snapshot()
		switch {
		case !s.Ready():
			t.Fatalf("not ready: %v", s.Err())
		case s.Networks[0].Name == "old":
			return "the old list is still in use"
		}
		for _, p := range s.Networks[0].Plugins {
			if len(p.Versions) == 0 {
				t.Fatalf("in use, but not asked for VERSION: %+v", p)
			}
		}
		return ""
	})
	if got := d.count("slow", "VERSION"); got != 1 {
		t.Errorf("%d VERSION", got)
	}
}

func TestStatusVerb(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "chained")
	d.write("10-a.conflist", conflist("1.1.0", "c11", "fakenet", "chained"))
	d.answer("fakenet", "STATUS", reply{out: `{"code":50,"msg":"not available","details":"agent starts"}`, code: 1})
	d.answer("chained", "STATUS", reply{out: `{"code":4,"msg":"unknown CNI_COMMAND: STATUS"}`, code: 1})
	n := d.started()
	s := becomesUnready(t, n, `network "c11"`, `plugin "fakenet" (`, "answers STATUS with code 50", "not available; agent starts")
	if p := s.Networks[0].Plugins; p[0].Status != "not ready" || p[1].Status != "not supported" || p[1].Problem != nil {
		t.Errorf("%+v", p)
	}
	// ADD is held too.
	if _, err := n.Setup(t.Context(), "c", "/ns"); !IsCNINotInitialized(err) {
		t.Errorf("Setup: %v", err)
	}
	var te *types.Error
	if err := n.Status(); !errors.As(err, &te) || te.Code != 50 {
		t.Errorf("the plugin's error cannot be got at: %v", err)
	}
	d.answer("fakenet", "STATUS", reply{})
	s = becomesReady(t, n)
	if p := s.Networks[0].Plugins; p[0].Status != "ok" {
		t.Errorf("%+v", p)
	}
	// A plugin's word that it is not ready is not given time.
	d.answer("fakenet", "STATUS", reply{out: `{"code":51,"msg":"limited"}`, code: 1})
	becomesUnready(t, n, "code 51", "limited")

	// Each list in use is asked with its own configuration.
	var asked []call
	for key, list := range d.take("STATUS").Calls {
		if strings.HasSuffix(key, "-fakenet") {
			asked = append(asked, list...)
		}
	}
	for _, c := range asked {
		if m, ok := c.Stdin.(map[string]any); !ok || m["name"] != "c11" || m["cniVersion"] != "1.1.0" || m["type"] != "fakenet" {
			t.Errorf("STATUS was given %v", c.Stdin)
		}
	}
}

// STATUS hangs (L2): Status answers at once, one process runs at most, and a new
// list is in use as soon as the hanging one is given up.
func TestStatusVerbHangs(t *testing.T) {
	d := newNode(t)
	testenv.SetBound(t, "STATUS", 300*time.Millisecond)
	d.install("fakenet", "fine")
	d.write("10-a.conflist", conflist("1.1.0", "c11", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	pids := filepath.Join(d.log, "pids")
	d.answer("fakenet", "STATUS", reply{sh: fmt.Sprintf("echo $$ >>'%s'; exec sleep 300", pids)})
	becomesUnready(t, n, `plugin "fakenet" (`, "does not answer STATUS", TimeoutStatus)
	running := 0
	stays(t, time.Second, func() string {
		start := time.Now()
		err := n.Status()
		if took := time.Since(start); took > 2*time.Second {
			return fmt.Sprintf("Status took %s", took)
		}
		if err == nil {
			return "ready"
		}
		b, _ := os.ReadFile(pids)
		alivePids := 0
		for p := range strings.FieldsSeq(string(b)) {
			var pid int
			if _, err := fmt.Sscan(p, &pid); err == nil && testenv.Alive(pid) {
				alivePids++
			}
		}
		running = max(running, alivePids)
		return ""
	})
	if running > 1 {
		t.Errorf("%d STATUS processes at once", running)
	}
	d.write("10-a.conflist", conflist("1.1.0", "c11", "fine"))
	becomesReady(t, n)
	if got := n.Snapshot().Networks[0].Plugins[0].Type; got != "fine" {
		t.Errorf("in use is %s", got)
	}
}

// VERSION hangs: Start waits no longer than its bound, Load until the plugin is
// given up, and the cause names it.
func TestVersionHangs(t *testing.T) {
	d := newNode(t)
	testenv.SetBound(t, "VERSION", 300*time.Millisecond)
	d.install("fakenet")
	d.answer("fakenet", "VERSION", reply{sh: "exec sleep 300"})
	d.write("10-a.conflist", good)
	n := d.network()
	d.must(n.Load())
	if wrong := testenv.MissingWords(n.Status(), []string{`plugin "fakenet"`, "mis-answers VERSION", TimeoutVersion}); wrong != "" {
		t.Error(wrong)
	}
}

// fakeExec answers for plugins without a process, so that time can be faked.
type fakeExec struct {
	version.PluginDecoder
	answer func(ctx context.Context, verb, path string) ([]byte, error)
}

func (f *fakeExec) FindInPath(typ string, dirs []string) (string, error) {
	return (&plugin.Exec{}).FindInPath(typ, dirs)
}

func (f *fakeExec) ExecPlugin(ctx context.Context, path string, _ []byte, environ []string) ([]byte, error) {
	var verb string
	for _, e := range environ {
		if v, ok := strings.CutPrefix(e, "CNI_COMMAND="); ok {
			verb = v
		}
	}
	return f.answer(ctx, verb, path)
}

// fakeTime has the network take its answers from answer and its events from
// nowhere, with the pace of a real one.
func (d *node) fakeTime(n *Network, answer func(ctx context.Context, verb, path string) ([]byte, error)) {
	var exec invoke.Exec = &fakeExec{answer: answer}
	n.exec = exec
	n.cni = libcni.NewCNIConfigWithCacheDir(n.config.binDirs, n.config.cacheDir, exec)
	n.pace = defaultPace
	n.notifier = func() (confdir.Notifier, error) { return watchstub.New(), nil }
}

// answersVersions knows VERSION alone.
func answersVersions(context.Context, string, string) ([]byte, error) {
	return []byte(versionAnswer("1.0.0", "1.1.0")), nil
}

// STATUS is asked every 5 s, and every second while the answer is "not ready".
func TestStatusCadence(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.1.0", "a", "fakenet"))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		var asked atomic.Int64
		var failing atomic.Bool
		d.fakeTime(n, func(_ context.Context, verb, _ string) ([]byte, error) {
			if verb == "VERSION" {
				return []byte(versionAnswer("1.1.0")), nil
			}
			asked.Add(1)
			if failing.Load() {
				return nil, &types.Error{Code: 50, Msg: "no"}
			}
			return nil, nil
		})
		n.Start()
		count := func(d time.Duration) int64 {
			asked.Store(0)
			time.Sleep(d)
			synctest.Wait()
			return asked.Load()
		}
		if err := n.Status(); err != nil {
			t.Fatal(err)
		}
		if got := count(time.Minute); got < 11 || got > 13 {
			t.Errorf("asked %d times in a minute", got)
		}
		failing.Store(true)
		count(10 * time.Second)
		if err := n.Status(); err == nil {
			t.Error("ready")
		}
		if got := count(time.Minute); got < 55 || got > 61 {
			t.Errorf("asked %d times in a minute while not ready", got)
		}
		failing.Store(false)
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		if err := n.Status(); err != nil {
			t.Errorf("still not ready: %v", err)
		}
	})
}

// With no event at all a change is noticed by the poll, and a plugin that
// mis-answered VERSION is asked again at the same pace.
func TestPollNoticesEverything(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		var versions atomic.Int64
		var broken atomic.Bool
		broken.Store(true)
		d.fakeTime(n, func(_ context.Context, verb, _ string) ([]byte, error) {
			versions.Add(1)
			if broken.Load() {
				return nil, errors.New("not now")
			}
			return []byte(versionAnswer("1.0.0")), nil
		})
		n.Start()
		step := func(words ...string) {
			t.Helper()
			time.Sleep(defaultPace.poll + time.Second)
			synctest.Wait()
			if len(words) == 0 {
				if err := n.Status(); err != nil {
					t.Error(err)
				}
			} else if wrong := testenv.MissingWords(n.Status(), words); wrong != "" {
				t.Error(wrong)
			}
		}
		step("no network config found")
		d.write("10-a.conflist", good)
		step(`plugin "fakenet" not found`)
		d.install("fakenet")
		step("mis-answers VERSION", "not now")
		before := versions.Load()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := versions.Load() - before; got < 6 || got > 13 {
			t.Errorf("asked %d times in a minute", got)
		}
		broken.Store(false)
		step()
		before = versions.Load()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := versions.Load() - before; got != 0 {
			t.Errorf("a good plugin was asked %d more times", got)
		}
		d.must(os.Remove(filepath.Join(d.bin, "fakenet")))
		step()
		time.Sleep(defaultPace.upgradeGrace)
		synctest.Wait()
		step(`plugin "fakenet" not found`)
		d.must(os.RemoveAll(d.conf))
		step("does not exist")
	})
}

// Before anything is in use there is nothing to keep: what is waited for is said.
func TestFirstLoadNamesThePluginItWaitsFor(t *testing.T) {
	d := newNode(t)
	d.install("slow")
	d.answer("slow", "VERSION", reply{sh: "exec sleep 300"})
	testenv.SetBound(t, "VERSION", 4*time.Second)
	d.write("10-a.conflist", conflist("1.0.0", "a", "slow"))
	n := d.network()
	lines := recordLog(n)
	n.Start()
	becomesUnready(t, n, `waiting for plugin "slow"`, "to answer")
	becomesUnready(t, n, `plugin "slow"`, "mis-answers VERSION", "did not finish within 4s")
	for _, line := range lines.take() {
		if strings.Contains(line, "waiting for plugin") {
			t.Errorf("logged: %s", line)
		}
	}
}
