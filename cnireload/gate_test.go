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
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/rules"
	"github.com/cnireload/cnireload/internal/testenv"
)

func TestGateModes(t *testing.T) {
	t.Parallel()
	list, err := libcni.ConfListFromBytes([]byte(conflist("1.0.0", "a", `{"type":"calico","nodename":"n"}`, "cilium-cni")))
	if err != nil {
		t.Fatal(err)
	}
	nets := []*network{{attachment: attachment{list: list, ifName: "eth0"}, file: &confdir.File{Path: "/d/10-a.conflist"}}}
	for _, tt := range []struct {
		mode string
		want string
	}{
		{"", "enforce report enforce"},
		{"auto", "enforce report enforce"},
		{"report", "report report enforce"},
		{"off", "enforce"},
	} {
		c, err := newConfig([]Opt{WithGates(tt.mode), WithReadyFiles([]string{"/run/flag"})})
		if err != nil {
			t.Fatal(err)
		}
		gates := c.gatesOf(nets)
		var modes []string
		for _, g := range gates {
			modes = append(modes, string(g.Mode))
			if (g.Plugin == "") != (g.network == "") || g.network != "" && g.network != `network "a" in /d/10-a.conflist` {
				t.Errorf("%q: %+v", tt.mode, g)
			}
		}
		if got := strings.Join(modes, " "); got != tt.want {
			t.Errorf("gates = %q: %s, want %s", tt.mode, got, tt.want)
		}
		if last := gates[len(gates)-1]; last.Gate != (rules.Gate{Kind: rules.File, Target: "/run/flag", Key: "ready_files", Mode: GateEnforce}) {
			t.Errorf("%q: %+v", tt.mode, last)
		}
	}
}

func TestInvalidGateOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		opt   Opt
		words []string
	}{
		{WithGates("on"), []string{`invalid gates = "on"`, `"auto", "report" or "off"`}},
		{WithReadyFiles([]string{"/ok", "flag"}), []string{`invalid ready_files entry "flag"`, "absolute path"}},
		{WithReadyFiles([]string{""}), []string{`invalid ready_files entry ""`}},
		{WithReadyWait("30"), []string{`invalid ready_wait = "30"`, `"30s"`}},
		{WithReadyWait("-1s"), []string{`invalid ready_wait = "-1s"`, `"0s" not to wait`}},
	} {
		if _, err := New(tt.opt); testenv.MissingWords(err, tt.words) != "" {
			t.Errorf("%v", err)
		}
	}
	for wait, want := range map[string]time.Duration{"": 30 * time.Second, "0s": 0, "0": 0, "1m": time.Minute} {
		if c, err := newConfig([]Opt{WithReadyWait(wait)}); err != nil || c.readyWait != want {
			t.Errorf("ready_wait = %q: %s, %v", wait, c.readyWait, err)
		}
	}
}

const goodFlannel = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"

// held is a list whose plugin, a fake, needs a file.
func held(name, file string) string {
	return conflist("1.0.0", name, fmt.Sprintf(`{"type":"calico","nodename":"n","nodename_file":%q}`, file))
}

// publishes records every snapshot that a network publishes until the returned
// function is called.
func publishes(n *Network) func() []*Snapshot {
	var all []*Snapshot
	done, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for s := n.Snapshot(); ; s = n.Snapshot() {
			if len(all) == 0 || all[len(all)-1] != s {
				all = append(all, s)
			}
			select {
			case <-s.superseded:
			case <-stop:
				return
			}
		}
	}()
	return func() []*Snapshot {
		close(stop)
		<-done
		return all
	}
}

// A list whose gate is closed is never ready, from the moment it comes into use;
// the gate opens by itself, and then stays open (L10).
func TestGateLifecycle(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "calico")
	d.answer("calico", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	file, other := filepath.Join(d.answers, "nodename"), filepath.Join(d.answers, "other")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	all := publishes(n)
	d.write("10-a.conflist", held("a", file))
	s := becomesUnready(t, n, `network "a" in `+d.conf+`/10-a.conflist: plugin "calico" needs `+file+` (nodename_file), which does not exist, since 2`)
	if len(s.Gates) != 1 || s.Gates[0].Open || s.Gates[0].Cause != "does not exist" || !slices.Equal(s.Gates[0].Ops, []string{"ADD", "DEL"}) {
		t.Errorf("%+v", s.Gates)
	}
	for i := range 50 {
		d.write("unrelated", fmt.Sprint(i))
	}
	// Nothing new is nothing new, however often it is looked at.
	stays(t, 4*n.pace.gate, func() string {
		if n.Snapshot() != s {
			return fmt.Sprintf("published again: %v", n.Status())
		}
		return ""
	})
	if _, err := n.Setup(t.Context(), "c", "/ns"); !IsCNINotInitialized(err) || d.count("calico", "ADD") != 0 {
		t.Errorf("Setup behind a closed gate: %v", err)
	}
	if err := n.Remove(t.Context(), "c", "/ns"); err != nil {
		t.Errorf("DEL is not gated: %v", err)
	}

	d.must(os.WriteFile(file, nil, 0o644))
	s = becomesReady(t, n)
	if len(s.Gates) != 1 || !s.Gates[0].Open || s.Gates[0].Cause != "" || s.Gates[0].Since.IsZero() {
		t.Errorf("%+v", s.Gates)
	}
	if _, err := n.Setup(t.Context(), "c", "/ns"); err != nil {
		t.Error(err)
	}
	// Open, it stays open, whatever becomes of the file, also in a generation
	// with the same gates.
	d.must(os.Remove(file))
	stays(t, 4*n.pace.gate, func() string { return errorText(n.Status()) })
	generation := n.Snapshot().Generation
	d.write("10-a.conflist", held("a", file)+"\n")
	eventually(t, func() string {
		if s := n.Snapshot(); s.Generation == generation {
			return "the new content is not in use"
		}
		return ""
	})
	stays(t, 4*n.pace.gate, func() string { return errorText(n.Status()) })

	// Another set of gates is looked at anew.
	d.write("10-a.conflist", held("b", other))
	becomesUnready(t, n, `network "b"`, other)
	d.write("10-a.conflist", held("a", file))
	becomesUnready(t, n, `network "a"`, file)
	// So is the same one after its file was gone.
	d.must(os.WriteFile(file, nil, 0o644))
	becomesReady(t, n)
	d.remove("10-a.conflist")
	becomesUnready(t, n, "no network config found")
	d.must(os.Remove(file))
	d.write("10-a.conflist", held("a", file))
	becomesUnready(t, n, file)

	for _, s := range all() {
		closed := slices.ContainsFunc(s.Gates, func(g GateState) bool { return !g.Open })
		uses := slices.ContainsFunc(s.Networks, func(n NetworkState) bool { return n.Plugins[0].Type == "calico" })
		if s.Ready() && (closed || uses && len(s.Gates) == 0) {
			t.Errorf("ready with %+v", s.Gates)
		}
	}
}

// While a list with other gates is only looked at, those of the list in use are
// not forgotten: it may be the next one again.
func TestGateStaysOpenWhileAnotherListIsLookedAt(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("calico", "slow")
	file := filepath.Join(d.answers, "nodename")
	d.must(os.WriteFile(file, nil, 0o644))
	d.answer("slow", "VERSION", reply{sh: "exec sleep 300"})
	d.write("10-a.conflist", held("a", file))
	n := d.started()
	becomesReady(t, n)
	d.must(os.Remove(file))
	all := publishes(n)
	for range 3 {
		d.write("10-a.conflist", conflist("1.0.0", "a", "slow"))
		eventually(t, func() string {
			if d.count("slow", "VERSION") == 0 {
				return "the other list is not looked at"
			}
			return ""
		})
		d.write("10-a.conflist", held("a", file))
		d.must(n.Load())
	}
	stays(t, 2*n.pace.gate, func() string { return errorText(n.Status()) })
	for _, s := range all() {
		if !s.Ready() {
			t.Errorf("not ready: %v", s.Err())
		}
	}
}

// Each enforced kind of gate closes the network, a reported one does not.
func TestGateEffects(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		plugins []string
		opts    []Opt
		words   []string // why it is not ready; nil if it is
		gates   int
	}{
		{"socket", []string{`{"type":"multus-shim","daemonSocketDir":"/nowhere"}`}, nil,
			[]string{`plugin "multus-shim" needs /nowhere/multus.sock (daemonSocketDir), which does not exist, since `}, 1},
		{"configuration", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, nil,
			[]string{`plugin "host-local" needs subnet or ranges (ipam.ranges), which is not set, since `}, 1},
		{"configuration, parse", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, []Opt{WithReadiness("parse")},
			[]string{`plugin "host-local" needs subnet or ranges`}, 1},
		{"reported by mode", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, []Opt{WithGates("report")}, nil, 1},
		{"off", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, []Opt{WithGates("off")}, nil, 0},
		{"reported", []string{"terway"}, nil, nil, 1},
		{"ready_files", []string{"fakenet"}, []Opt{WithReadyFiles([]string{"/nowhere/flag"})},
			[]string{"cni plugin not initialized: /nowhere/flag (ready_files) does not exist, since "}, 1},
		{"ready_files, gates off", []string{"terway"}, []Opt{WithReadyFiles([]string{"/nowhere/flag"}), WithGates("off")},
			[]string{"/nowhere/flag (ready_files) does not exist"}, 1},
		{"ready_files, gates reported", []string{"fakenet"}, []Opt{WithReadyFiles([]string{"/nowhere/flag"}), WithGates("report")},
			[]string{"/nowhere/flag (ready_files) does not exist"}, 1},
		{"ready_files that are there", []string{"fakenet"}, []Opt{WithReadyFiles([]string{"/", "/proc"})}, nil, 2},
		{"a plugin's gate comes before ready_files", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, []Opt{WithReadyFiles([]string{"/nowhere"})},
			[]string{`plugin "host-local" needs`}, 2},
		{"an executable comes before a gate", []string{`{"type":"kube-ovn","server_socket":"/nowhere"}`}, nil, []string{`plugin "kube-ovn" not found`}, 1},
		{"a required plugin comes before a gate", []string{`{"type":"bridge","ipam":{"type":"host-local"}}`}, []Opt{WithRequiredPlugins([]string{"portmap"})},
			[]string{`required plugin "portmap" is in none of the networks in use`}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet", "bridge", "host-local", "multus-shim", "terway")
			d.write("10-a.conflist", conflist("1.0.0", "a", tt.plugins...))
			n := d.network(tt.opts...)
			d.must(n.Load())
			if tt.words == nil {
				d.must(n.Status())
			} else if wrong := testenv.MissingWords(n.Status(), tt.words); wrong != "" {
				t.Error(wrong)
			}
			if got := len(n.Snapshot().Gates); got != tt.gates {
				t.Errorf("%d gates: %+v", got, n.Snapshot().Gates)
			}
		})
	}
}

// Agents that are seen from both sides: not there, there, gone again.
func TestSocketGateOpens(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	dir, err := os.MkdirTemp("", "gate") // paths of sockets are short
	d.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "multus.sock")
	d.install("multus-shim")
	_, stop := testenv.Listen(t, "unix", socket)
	stop()
	d.write("10-a.conflist", conflist("1.0.0", "a", fmt.Sprintf(`{"type":"multus-shim","daemonSocketDir":%q}`, dir)))
	n := d.started()
	becomesUnready(t, n, socket+" (daemonSocketDir), which does not accept connections: connect: connection refused, since ")
	d.must(os.Remove(socket))
	becomesUnready(t, n, socket+" (daemonSocketDir), which does not exist, since ")
	_, stop = testenv.Listen(t, "unix", socket)
	becomesReady(t, n)
	stop()
	stays(t, 3*n.pace.gate, func() string { return errorText(n.Status()) })
}

// At the pace of a real network: looked at twice a second, told in words that do
// not change, open within the pace.
func TestGatePace(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("calico")
	file := filepath.Join(d.answers, "nodename")
	d.write("10-a.conflist", held("a", file))
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		d.fakeTime(n, answersVersions)
		n.Start()
		closed := n.Snapshot()
		if wrong := testenv.MissingWords(closed.Err(), []string{"nodename"}); wrong != "" {
			t.Fatal(wrong)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if s := n.Snapshot(); s != closed {
			t.Errorf("published again after ten minutes: %v", s.Err())
		}
		for range 5 {
			d.must(os.WriteFile(file, nil, 0o644))
			start := time.Now()
			for n.Status() != nil {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
			}
			if took := time.Since(start); took > defaultPace.gate+10*time.Millisecond {
				t.Fatalf("open after %s", took)
			}
			open := n.Snapshot()
			time.Sleep(10 * time.Minute)
			d.must(os.Remove(file))
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if s := n.Snapshot(); s != open {
				t.Errorf("published again while open: %+v", s)
			}
			// An odd while, so that looks are not in step.
			d.remove("10-a.conflist")
			_ = n.Load()
			d.write("10-a.conflist", held("a", file))
			d.must(n.Load())
			time.Sleep(1234 * time.Millisecond)
			synctest.Wait()
			if n.Status() == nil {
				t.Fatal("ready")
			}
		}
	})
}

// admitted is what a call of Admit returned, and how long it took.
type admitted struct {
	err  error
	took time.Duration
}

// admitting starts calls of Admit. The function that it returns waits for them.
func admitting(ctx context.Context, n *Network, count int) func() []admitted {
	results := make([]admitted, count)
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() {
			start := time.Now()
			err := n.Admit(ctx, "")
			results[i] = admitted{err, time.Since(start)}
		})
	}
	return func() []admitted {
		wg.Wait()
		return results
	}
}

func TestAdmit(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("calico", "terway", "fakenet")
	file := filepath.Join(d.answers, "nodename")
	// Each step starts with a list that is held by a file that is not there.
	for _, tt := range []struct {
		name string
		list string
		opts []Opt
		run  func(t *testing.T, n *Network)
	}{
		{"ready", conflist("1.0.0", "a", "fakenet"), nil, func(t *testing.T, n *Network) {
			for _, a := range admitting(t.Context(), n, 3)() {
				if a.err != nil || a.took != 0 {
					t.Errorf("%+v", a)
				}
			}
		}},
		{"wakes at once", held("a", file), nil, func(t *testing.T, n *Network) {
			wait := admitting(t.Context(), n, 1000)
			time.Sleep(20 * time.Second)
			d.must(os.WriteFile(file, nil, 0o644))
			for _, a := range wait() {
				if a.err != nil || a.took > 20*time.Second+defaultPace.gate {
					t.Fatalf("%+v", a)
				}
			}
		}},
		{"gives up by itself", held("a", file), nil, func(t *testing.T, n *Network) {
			for _, a := range admitting(t.Context(), n, 2)() {
				if !IsCNINotInitialized(a.err) || !strings.Contains(a.err.Error(), file) || a.took != 30*time.Second {
					t.Errorf("%+v", a)
				}
			}
		}},
		{"as long as it is told", held("a", file), []Opt{WithReadyWait("7s")}, func(t *testing.T, n *Network) {
			if a := admitting(t.Context(), n, 1)()[0]; !IsCNINotInitialized(a.err) || a.took != 7*time.Second {
				t.Errorf("%+v", a)
			}
		}},
		{"not at all", held("a", file), []Opt{WithReadyWait("0s")}, func(t *testing.T, n *Network) {
			if a := admitting(t.Context(), n, 1)()[0]; !IsCNINotInitialized(a.err) || !strings.Contains(a.err.Error(), file) || a.took != 0 {
				t.Errorf("%+v", a)
			}
		}},
		{"gives up with its caller", held("a", file), nil, func(t *testing.T, n *Network) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			a := admitting(ctx, n, 1)()[0]
			if !errors.Is(a.err, context.DeadlineExceeded) || !IsCNINotInitialized(a.err) || !strings.Contains(a.err.Error(), file) || a.took != 3*time.Second {
				t.Errorf("%+v", a)
			}
			ctx, stop := context.WithCancel(t.Context())
			wait := admitting(ctx, n, 1)
			time.Sleep(time.Second)
			stop()
			if a := wait()[0]; !errors.Is(a.err, context.Canceled) || !IsCNINotInitialized(a.err) || a.took != time.Second {
				t.Errorf("%+v", a)
			}
		}},
		{"is woken by Close", held("a", file), nil, func(t *testing.T, n *Network) {
			wait := admitting(t.Context(), n, 10)
			time.Sleep(time.Second)
			d.must(n.Close())
			for _, a := range wait() {
				if !errors.Is(a.err, ErrClosed) || a.took != time.Second {
					t.Errorf("%+v", a)
				}
			}
		}},
		{"waits for a reported gate, then lets go", conflist("1.0.0", "a", "terway"), nil, func(t *testing.T, n *Network) {
			if err := n.Status(); err != nil {
				t.Errorf("a reported gate: %v", err)
			}
			if a := admitting(t.Context(), n, 1)()[0]; a.err != nil || a.took != 30*time.Second {
				t.Errorf("%+v", a)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if a := admitting(ctx, n, 1)()[0]; !errors.Is(a.err, context.DeadlineExceeded) || a.took != time.Second {
				t.Errorf("%+v", a)
			}
		}},
		{"does not wait for a reported gate that is not minded", conflist("1.0.0", "a", "terway"), []Opt{WithReadyWait("0")}, func(t *testing.T, n *Network) {
			if a := admitting(t.Context(), n, 1)()[0]; a.err != nil || a.took != 0 {
				t.Errorf("%+v", a)
			}
		}},
		{"waits for a gate that was made reported", held("a", file), []Opt{WithGates("report")}, func(t *testing.T, n *Network) {
			wait := admitting(t.Context(), n, 2)
			time.Sleep(10 * time.Second)
			d.must(os.WriteFile(file, nil, 0o644))
			for _, a := range wait() {
				if a.err != nil || a.took < 10*time.Second || a.took > 10*time.Second+defaultPace.gate {
					t.Errorf("%+v", a)
				}
			}
		}},
		{"needs no configuration to begin with", "", nil, func(t *testing.T, n *Network) {
			wait := admitting(t.Context(), n, 2)
			time.Sleep(10 * time.Second)
			d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
			d.must(n.Load())
			for _, a := range wait() {
				if a.err != nil || a.took != 10*time.Second {
					t.Errorf("%+v", a)
				}
			}
		}},
	} {
		d.must(os.RemoveAll(file))
		d.remove("10-a.conflist")
		if tt.list != "" {
			d.write("10-a.conflist", tt.list)
		}
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := d.in(t)
				n := d.network(tt.opts...)
				d.fakeTime(n, answersVersions)
				n.Start()
				tt.run(t, n)
				d.must(n.Close())
			})
		})
	}
}

// An ADD that succeeds although a reported gate is closed shows that the plugin
// does not need it: no pod waits for it any more, until there is another list.
func TestGateIsDisproved(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("terway")
	list := conflist("1.0.0", "a", "terway")
	d.write("10-a.conflist", list)
	synctest.Test(t, func(t *testing.T) {
		d := d.in(t)
		n := d.network()
		var fails atomic.Bool
		d.fakeTime(n, func(_ context.Context, verb, _ string) ([]byte, error) {
			switch {
			case verb == "VERSION":
				return []byte(versionAnswer("1.0.0")), nil
			case fails.Load():
				return nil, errors.New("no agent")
			}
			return []byte(result("1.0.0", "10.1.0.2")), nil
		})
		n.Start()
		closed := func() bool {
			synctest.Wait()
			s := n.Snapshot()
			return len(s.Gates) == 1 && !s.Gates[0].Open && s.Ready()
		}
		setup := func() error {
			_, err := n.Setup(t.Context(), "c", "/ns")
			time.Sleep(time.Second)
			return err
		}
		fails.Store(true)
		if err := setup(); err == nil || !closed() {
			t.Fatalf("%v; %+v", err, n.Snapshot().Gates)
		}
		fails.Store(false)
		waiting := admitting(t.Context(), n, 5)
		time.Sleep(time.Second)
		if err := setup(); err != nil || closed() {
			t.Fatalf("%v; %+v", err, n.Snapshot().Gates)
		}
		for _, a := range waiting() {
			if a.err != nil || a.took > time.Second+defaultPace.gate {
				t.Errorf("%+v", a)
			}
		}
		if g := n.Snapshot().Gates[0]; g.Cause != "it does not exist, but an ADD has succeeded without it" {
			t.Errorf("%+v", g)
		}
		if a := admitting(t.Context(), n, 1)()[0]; a.err != nil || a.took != 0 {
			t.Errorf("%+v", a)
		}
		// The same gate in a new generation stays open, that of another is not.
		d.overwrite("10-a.conflist", list+" ")
		d.must(n.Load())
		if closed() {
			t.Error("closed again")
		}
		for _, name := range []string{"b", "a"} {
			d.overwrite("10-a.conflist", conflist("1.0.0", name, "terway"))
			d.must(n.Load())
			if !closed() {
				t.Errorf("%s: %+v", name, n.Snapshot().Gates)
			}
		}
	})
}

// A thousand waiting pods cost nothing but their own goroutines, and these end.
func TestManyWaiters(t *testing.T) {
	d := newNode(t)
	d.install("calico")
	file := filepath.Join(d.answers, "nodename")
	d.write("10-a.conflist", held("a", file))
	n := d.started()
	becomesUnready(t, n, file)
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()
	const waiters = 1000
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wait := admitting(ctx, n, waiters)
	eventually(t, func() string {
		if g := runtime.NumGoroutine(); g < goroutines+waiters {
			return fmt.Sprintf("%d goroutines", g)
		}
		return ""
	})
	// Looks that come and go do not add to them.
	time.Sleep(3 * n.pace.gate)
	if g := runtime.NumGoroutine(); g > goroutines+waiters+10 {
		t.Errorf("%d goroutines for %d waiters, %d before", g, waiters, goroutines)
	}
	runtime.ReadMemStats(&during)
	used := int64(during.HeapAlloc+during.StackInuse) - int64(before.HeapAlloc+before.StackInuse)
	t.Logf("%d waiters use %d KiB", waiters, used>>10)
	if used > 8<<20 {
		t.Errorf("%d waiters use %d KiB", waiters, used>>10)
	}
	// Status is what it was.
	for range 100 {
		start := time.Now()
		if n.Status() == nil || time.Since(start) > 2*time.Second {
			t.Fatalf("Status: %v after %s", n.Status(), time.Since(start))
		}
	}
	d.must(os.WriteFile(file, nil, 0o644))
	for _, a := range wait() {
		if a.err != nil {
			t.Fatal(a.err)
		}
	}
	eventually(t, func() string {
		if g := runtime.NumGoroutine(); g > goroutines {
			return fmt.Sprintf("%d goroutines, %d before", g, goroutines)
		}
		return ""
	})
}

// Calls are counted by how they ended.
func TestCallsAreCounted(t *testing.T) {
	d := newNode(t)
	d.install("fakenet")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-a.conflist", good)
	n := d.network()
	d.must(n.Load())
	check := func(verb, outcome string, want uint64) {
		t.Helper()
		c := n.Calls()[Call{Plugin: "fakenet", Verb: verb, Outcome: outcome}]
		if c.Count != want || want > 0 && c.Seconds <= 0 {
			t.Errorf("%s %s: %+v, want %d", verb, outcome, c, want)
		}
	}
	check("VERSION", "ok", 1)
	for range 3 {
		_, err := n.Setup(t.Context(), "c", "/ns")
		d.must(err)
	}
	check("ADD", "ok", 3)
	d.answer("fakenet", "ADD", reply{out: `{"code":11,"msg":"no"}`, code: 1})
	_, _ = n.Setup(t.Context(), "c", "/ns")
	check("ADD", "error", 1)
	d.answer("fakenet", "ADD", reply{sh: "exec sleep 300"})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	_, _ = n.Setup(ctx, "c", "/ns")
	cancel()
	check("ADD", "timeout", 1)
	testenv.SetBound(t, "ADD", 50*time.Millisecond)
	_, _ = n.Setup(t.Context(), "c", "/ns")
	check("ADD", "timeout", 2)
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, _ = n.Setup(ctx, "c", "/ns")
	check("ADD", "canceled", 1)
	d.must(n.Remove(t.Context(), "c", "/ns"))
	check("DEL", "ok", 1)
	// What is returned is the caller's own.
	n.Calls()[Call{Plugin: "fakenet", Verb: "DEL", Outcome: "ok"}] = CallCount{Count: 99}
	check("DEL", "ok", 1)
	if got := len(n.Calls()); got != 6 {
		t.Errorf("%d kinds of calls: %v", got, n.Calls())
	}
}

// Reloads are counted: successes are generations, failures the times that
// something turned bad, not how long it stayed so.
func TestReloadsAreCounted(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	n := d.network()
	step := func(generation, failures uint64) {
		t.Helper()
		for range 3 {
			_ = n.Load()
		}
		if s := n.Snapshot(); s.Generation != generation || s.Failures != failures {
			t.Errorf("generation %d, want %d; %d failures, want %d", s.Generation, generation, s.Failures, failures)
		}
	}
	step(0, 1)
	d.write("10-a.conflist", good)
	step(1, 1)
	d.write("10-a.conflist", "{")
	step(1, 2)
	d.write("20-b.conflist", "") // not in use
	step(1, 2)
	d.write("10-a.conflist", good)
	step(1, 2)
	d.write("10-a.conflist", good+" ")
	step(2, 2)
	d.must(os.RemoveAll(d.conf))
	step(2, 3)
}
