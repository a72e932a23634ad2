// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
	"github.com/containerd/log"
	"github.com/sirupsen/logrus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/cnireload/cnireload/internal/testenv"
)

func TestInvalidOptions(t *testing.T) {
	for _, tt := range []struct {
		opt   Opt
		words []string
	}{
		{WithReadiness("maybe"), []string{`invalid readiness = "maybe"`, `"strict" or "parse"`}},
		{WithNetworkName("bad name!"), []string{`invalid network_name = "bad name!"`}},
		{WithRequiredPlugins([]string{"ok", ""}), []string{`invalid required_plugins entry ""`}},
		{WithRequiredPlugins([]string{"/opt/cni/bin/x"}), []string{`invalid required_plugins entry "/opt/cni/bin/x"`, "without a path"}},
		{WithTemplate("/etc/t", ""), []string{"conf_template /etc/t", "record"}},
	} {
		n, err := New(tt.opt)
		if wrong := testenv.MissingWords(err, tt.words); wrong != "" || n != nil {
			t.Errorf("%s (%v)", wrong, n)
		}
	}
	for _, opt := range []Opt{WithReadiness(""), WithNetworkName(""), WithTemplate("", ""), WithRequiredPlugins(nil)} {
		n, err := New(opt)
		if err != nil {
			t.Error(err)
		} else if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, verb := range []string{"ADD", "DEL", "CHECK", "STATUS", "VERSION", "GC"} {
		key := testenv.BoundKey(verb)
		if d := timeout.Get(key); d < time.Second*5 {
			t.Errorf("%s has no default: %s", verb, d)
		}
		old := timeout.Get(key)
		timeout.Set(key, -time.Second)
		if _, err := New(); testenv.MissingWords(err, []string{"invalid [timeouts]", key, "-1s"}) != "" {
			t.Errorf("%s = -1s: %v", key, err)
		}
		timeout.Set(key, old)
	}
}

func TestOptionsAreCopied(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	dirs, required := []string{d.bin}, []string{"fakenet"}
	n := d.network(WithPluginDir(dirs), WithRequiredPlugins(required))
	dirs[0], required[0] = "/elsewhere", "elsewhere"
	d.install("fakenet")
	d.write("10-a.conflist", good)
	d.must(n.Load())
	d.must(n.Status())
}

// Before anything was loaded the network is not ready and says so, and nothing
// runs.
func TestBeforeLoad(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	n := d.network()
	for name, err := range map[string]error{
		"Status": n.Status(),
		"Check":  n.Check(t.Context(), "c", "/ns"),
		"Remove": n.Remove(t.Context(), "c", "/ns"),
		"Setup": func() error {
			_, err := n.Setup(t.Context(), "c", "/ns")
			return err
		}(),
	} {
		if !IsCNINotInitialized(err) || !strings.Contains(err.Error(), "still being loaded") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if c := n.GetConfig(); len(c.Networks) != 0 || c.PluginConfDir != d.conf || c.Prefix != "eth" || c.PluginMaxConfNum != 1 {
		t.Errorf("%+v", c)
	}
	if s := n.Snapshot(); s.Generation != 0 || !s.LoadedAt.IsZero() || s.Ready() {
		t.Errorf("%+v", s)
	}
}

// Load alone looks once and follows nothing.
func TestLoadWithoutStart(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	n := d.network()
	err := n.Load()
	if !errors.Is(err, ErrLoad) || !IsCNINotInitialized(err) || testenv.MissingWords(err, []string{"cni config load failed", "no network config found in " + d.conf}) != "" {
		t.Errorf("empty dir: %v", err)
	}
	d.write("10-a.conflist", good)
	time.Sleep(3 * n.pace.poll)
	if err := n.Status(); err == nil {
		t.Error("a change was noticed without Start")
	}
	d.must(n.Load())
	d.must(n.Status())
	if w := n.Snapshot().Watch; w.Mode != WatchPolling || w.Cause != "not started" {
		t.Errorf("watch is %+v", w)
	}
	// Options replace those given before.
	d.install("loopback")
	d.must(n.Load(WithLoNetwork))
	if s := n.Snapshot(); len(s.Networks) != 1 || s.Networks[0].Interface != "lo" {
		t.Errorf("%+v", s.Networks)
	}
	d.must(n.Load(WithLoNetwork, WithDefaultConf))
	d.must(n.Load())
	if s := n.Snapshot(); len(s.Networks) != 2 {
		t.Errorf("%+v", s.Networks)
	}
	bad := errors.New("bad option")
	if err := n.Load(func(*config) error { return bad }); !errors.Is(err, bad) || !errors.Is(err, ErrLoad) {
		t.Errorf("bad option: %v", err)
	}
}

// After Close every call that needs the loop says so, always in the same words,
// and what was last known stays known.
func TestAfterClose(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	for _, start := range []func(n *Network){
		func(*Network) {},
		func(n *Network) { d.must(n.Load()) },
		func(n *Network) { n.Start() },
	} {
		n := d.network(WithTemplate(filepath.Join(d.answers, "t"), filepath.Join(d.cache, "r")))
		start(n)
		ready := n.Status() == nil
		d.must(n.Close())
		d.must(n.Close())
		for range 20 {
			if err := n.Load(); !errors.Is(err, ErrClosed) || !errors.Is(err, ErrLoad) {
				t.Fatalf("Load after Close: %v", err)
			}
			if err := n.Render(t.Context(), "10.1.0.0/24"); !errors.Is(err, ErrClosed) {
				t.Fatalf("Render after Close: %v", err)
			}
		}
		n.Start()
		if (n.Status() == nil) != ready {
			t.Errorf("Status after Close: %v", n.Status())
		}
	}
}

// Close ends the VERSION and STATUS processes that belong to the network.
func TestCloseEndsProbes(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	pid := filepath.Join(d.log, "pid")
	d.answer("fakenet", "VERSION", reply{sh: fmt.Sprintf("echo $$ >'%s'; exec sleep 300", pid)})
	d.write("10-a.conflist", good)
	n := d.network()
	loaded := make(chan error, 1)
	go func() { loaded <- n.Load() }()
	p := testenv.ReadPID(t, within, pid)
	start := time.Now()
	d.must(n.Close())
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("Close took %s", took)
	}
	if testenv.Alive(p) {
		t.Error("the plugin still runs")
	}
	if err := <-loaded; !errors.Is(err, ErrClosed) {
		t.Errorf("Load that was waiting: %v", err)
	}
}

// A plugin that does not answer holds up nobody: Start returns by its bound.
func TestStartIsBounded(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.answer("fakenet", "VERSION", reply{sh: "exec sleep 300"})
	d.write("10-a.conflist", good)
	n := d.network()
	start := time.Now()
	n.Start()
	if took := time.Since(start); took > startBound+2*time.Second {
		t.Errorf("took %s", took)
	}
	if n.Status() == nil {
		t.Error("ready")
	}
}

// One ADD hangs and the conf dir is written to (L1): Status and another pod are
// as quick as ever, and the new config serves new pods.
func TestNothingWaitsForAPlugin(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "other")
	go1 := filepath.Join(d.log, "go")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2"), sh: fmt.Sprintf("while [ ! -e '%s' ]; do sleep 0.05; done", go1)})
	d.answer("other", "ADD", reply{out: result("1.0.0", "10.2.0.2")})
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	type outcome struct {
		r   *Result
		err error
	}
	hanging := make(chan outcome, 1)
	go func() {
		r, err := n.Setup(t.Context(), "c1", "/ns")
		hanging <- outcome{r, err}
	}()
	eventually(t, func() string {
		if d.count("fakenet", "ADD") == 0 {
			return "ADD has not started"
		}
		return ""
	})
	d.write("unrelated", "x")
	d.write("10-a.conflist", conflist("1.0.0", "b", "other"))
	eventually(t, func() string {
		start := time.Now()
		s := n.Snapshot()
		_ = n.Status()
		_ = n.GetConfig()
		if took := time.Since(start); took > 2*time.Second {
			t.Fatalf("Status took %s", took)
		}
		if s.Networks[0].Name != "b" {
			return "the old list is still in use"
		}
		return ""
	})
	r, err := n.Setup(t.Context(), "c2", "/ns")
	if err != nil || r.Interfaces["eth0"].IPConfigs[0].IP.String() != "10.2.0.2" {
		t.Errorf("%+v, %v", r, err)
	}
	// The call that began before ends with the list it began with.
	d.must(os.WriteFile(go1, nil, 0o644))
	o := <-hanging
	if o.err != nil || o.r.Interfaces["eth0"].IPConfigs[0].IP.String() != "10.1.0.2" {
		t.Errorf("%+v, %v", o.r, o.err)
	}
}

// Each verb ends by its bound, whatever the caller's deadline.
func TestCallsAreBounded(t *testing.T) {
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	for verb, run := range map[string]func(*Network) error{
		"ADD":   func(n *Network) error { _, err := n.Setup(t.Context(), "c", "/ns"); return err },
		"DEL":   func(n *Network) error { return n.Remove(t.Context(), "c", "/ns") },
		"CHECK": func(n *Network) error { return n.Check(t.Context(), "c", "/ns") },
	} {
		t.Run(verb, func(t *testing.T) {
			testenv.SetBound(t, verb, 200*time.Millisecond)
			d.answer("fakenet", verb, reply{sh: "sleep 300 & wait"})
			n := d.network()
			d.must(n.Load())
			start := time.Now()
			err := run(n)
			if !errors.Is(err, context.DeadlineExceeded) || testenv.MissingWords(err, []string{verb + " did not finish within 200ms", testenv.BoundKey(verb), filepath.Join(d.bin, "fakenet")}) != "" {
				t.Errorf("%v", err)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

// digestOf names everything in a snapshot, to prove that it is not changed after
// it was published.
func digestOf(s *Snapshot) string {
	b, err := json.Marshal(s.Config())
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("%s\x00%s\x00%v\x00%v\x00%v\x00%v\x00%+v", s.digest(), b, s.Skipped, s.LoadedAt, s.ConfDir, s.BinDirs, s.attachments)
}

// Everything at once, for the race detector. No snapshot that anybody got is
// changed later, and every one is consistent in itself.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap", "loopback")
	for _, typ := range []string{"fakenet", "portmap", "loopback"} {
		d.answer(typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	}
	tmpl := filepath.Join(d.answers, "template")
	d.replace(tmpl, `{"cniVersion":"1.1.0","name":"r","plugins":[{"type":"fakenet","subnet":"{{.PodCIDR}}"}]}`, 0o644)
	n := d.started(WithLoNetwork, WithTemplate(tmpl, filepath.Join(d.cache, "record")))
	d.must(n.Render(t.Context(), "10.0.0.0/24"))
	becomesReady(t, n)

	var mu sync.Mutex
	seen := map[*Snapshot]string{}
	var stop atomic.Bool
	var wg sync.WaitGroup
	loop := func(f func(i int)) {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				f(i)
			}
		})
	}
	for range 2 {
		loop(func(int) {
			s := n.Snapshot()
			mu.Lock()
			if _, ok := seen[s]; !ok {
				seen[s] = digestOf(s)
			}
			mu.Unlock()
			if s.Ready() != (s.Err() == nil) || s.Ready() && (s.LoadError != nil || len(s.Networks) != 2 || len(s.attachments) != 2) {
				t.Errorf("inconsistent: %+v", s)
			}
			for i, l := range s.Networks {
				if s.Ready() && len(l.Plugins) == 0 || l.Name != s.attachments[i].list.Name {
					t.Errorf("inconsistent: %+v", s)
				}
			}
			_ = n.Status()
			_ = n.GetConfig()
			time.Sleep(100 * time.Microsecond)
		})
	}
	// The rendered list is never not there (R13).
	loop(func(i int) {
		if _, err := n.Setup(t.Context(), fmt.Sprintf("c%d", i), "/ns", WithArgs("a", "b")); err != nil {
			t.Errorf("Setup: %v", err)
		}
		if err := n.Remove(t.Context(), fmt.Sprintf("c%d", i), "/ns"); err != nil {
			t.Errorf("Remove: %v", err)
		}
	})
	loop(func(int) { _ = n.Load(); time.Sleep(time.Millisecond) })
	loop(func(i int) {
		if err := n.Render(t.Context(), fmt.Sprintf("10.%d.0.0/24", i%250)); err != nil {
			t.Errorf("Render: %v", err)
		}
		time.Sleep(5 * time.Millisecond)
	})
	loop(func(i int) {
		d.write("20-other.conflist", conflist("1.0.0", fmt.Sprintf("o%d", i), "portmap"))
		d.write("noise", "x")
		time.Sleep(3 * time.Millisecond)
	})
	time.Sleep(700 * time.Millisecond)
	first := n.Snapshot()
	eventually(t, func() string {
		if n.Snapshot() == first {
			return "the snapshot is the same"
		}
		return ""
	})
	time.Sleep(100 * time.Millisecond)
	stop.Store(true)
	wg.Wait()
	var closers sync.WaitGroup
	for range 4 {
		closers.Go(func() { _ = n.Close() })
		closers.Go(func() { _ = n.Load() })
		closers.Go(func() { _ = n.Render(t.Context(), "10.0.0.0/24") })
		closers.Go(func() { _ = n.Status() })
	}
	closers.Wait()
	for s, digest := range seen {
		if digestOf(s) != digest {
			t.Errorf("a snapshot was changed:\n%q\n%q", digest, digestOf(s))
		}
	}
	if len(seen) < 2 {
		t.Errorf("only %d snapshots were seen", len(seen))
	}
}

// Generations count sets of lists, not what is known of their plugins.
func TestGenerations(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.write("10-a.conflist", good)
	n := d.network()
	step := func(want uint64) *Snapshot {
		t.Helper()
		_ = n.Load()
		s := n.Snapshot()
		if s.Generation != want {
			t.Errorf("generation %d, want %d", s.Generation, want)
		}
		return s
	}
	first := step(1)
	d.install("fakenet")
	if s := step(1); !s.LoadedAt.Equal(first.LoadedAt) || s == first {
		t.Errorf("%+v", s)
	}
	if a, b := step(1), step(1); a != b {
		t.Error("a snapshot was published with nothing new in it")
	}
	d.overwrite("10-a.conflist", good+"\n")
	step(2)
	d.write("00-bad.conflist", "{")
	step(2)
	d.remove("10-a.conflist")
	step(2)
	d.write("10-a.conflist", good+"\n")
	step(3)
}

// logLines collects what a network logs.
type logLines struct {
	mu    sync.Mutex
	lines []string
}

func (l *logLines) Levels() []logrus.Level { return logrus.AllLevels }
func (l *logLines) Fire(e *logrus.Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := e.Message
	for _, k := range slices.Sorted(maps.Keys(e.Data)) {
		line += fmt.Sprintf(" %s=%v", k, e.Data[k])
	}
	l.lines = append(l.lines, line)
	return nil
}

func (l *logLines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = nil
	return lines
}

// recordLog has a network that is not started yet log to the returned lines.
func recordLog(n *Network) *logLines {
	l := &logLines{}
	logger := logrus.New()
	logger.SetOutput(discard{})
	logger.SetLevel(logrus.InfoLevel)
	logger.AddHook(l)
	n.ctx = log.WithLogger(n.ctx, logrus.NewEntry(logger))
	return l
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// One line for each transition, none for noise (S9).
func TestLogLines(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	d.write("20-b.conflist", "{")
	n := d.network(WithHandler("runc"))
	n.pace.poll = time.Hour
	lines := recordLog(n)
	n.Start()
	becomesReady(t, n)
	expect := func(want ...string) {
		t.Helper()
		var got []string
		eventually(t, func() string {
			got = append(got, lines.take()...)
			for _, w := range want {
				if !slices.ContainsFunc(got, func(l string) bool { return strings.Contains(l, w) }) {
					return fmt.Sprintf("%q is not in %q", w, got)
				}
			}
			return ""
		})
		if len(got) != len(want) {
			t.Errorf("%d lines, want %d: %q", len(got), len(want), got)
		}
		for _, l := range got {
			if !strings.HasSuffix(l, " handler=runc") {
				t.Errorf("%q does not name the handler", l)
			}
		}
	}
	expect("watching "+d.conf, `network "good" in use from `+d.conf+"/10-a.conflist, sha256 ", "file not in use: "+d.conf+"/20-b.conflist", "network ready")
	snapshot := n.Snapshot()
	for i := range 100 {
		d.write("calico-kubeconfig", fmt.Sprint(i))
		d.overwrite("10-a.conflist", good)
	}
	_ = n.Load()
	if got := lines.take(); len(got) != 0 {
		// A file that is rewritten in place is empty for a moment: it may be
		// seen as stale, which is silent as well.
		t.Errorf("noise is logged: %q", got)
	}
	if s := n.Snapshot(); s.Generation != snapshot.Generation {
		t.Errorf("noise made generation %d", s.Generation)
	}
	d.remove("10-a.conflist")
	expect("network not ready: no usable network config")
	d.write("10-a.conflist", good)
	expect(`network "good" in use`, "network ready")
}

// A file in use that turns bad for longer than a rewrite takes is one line, and
// one when that is over.
func TestStaleIsLogged(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	synctest.Test(t, func(t *testing.T) {
		d := d.in(t)
		n := d.network(WithHandler("kata"))
		d.fakeTime(n, answersVersions)
		lines := recordLog(n)
		n.Start()
		synctest.Wait()
		step := func(want ...string) {
			t.Helper()
			lines.take()
			time.Sleep(time.Minute)
			synctest.Wait()
			got := lines.take()
			if len(got) != len(want) {
				t.Errorf("logged %q, want %q", got, want)
				return
			}
			for i, w := range want {
				if !strings.Contains(got[i], w) || !strings.HasSuffix(got[i], " handler=kata") {
					t.Errorf("logged %q, want %q", got[i], w)
				}
			}
		}
		step()
		d.overwrite("10-a.conflist", "")
		step("10-a.conflist is empty; its last good content stays in use")
		step()
		d.overwrite("10-a.conflist", "{")
		step() // still the same period
		d.overwrite("10-a.conflist", good)
		step("10-a.conflist is no longer used with its last good content")
		step()
	})
}

// Something in the background does not end: Close does.
func TestCloseIsBounded(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	synctest.Test(t, func(t *testing.T) {
		n := d.in(t).network()
		release := make(chan struct{})
		d.fakeTime(n, func(context.Context, string, string) ([]byte, error) {
			<-release
			return nil, nil
		})
		n.Start()
		start := time.Now()
		err := n.Close()
		if wrong := testenv.MissingWords(err, []string{d.conf, "has not ended after 5s"}); wrong != "" {
			t.Error(wrong)
		}
		if took := time.Since(start); took != closeBound {
			t.Errorf("took %s", took)
		}
		close(release)
		if err := n.Close(); err != nil {
			t.Errorf("later: %v", err)
		}
	})
}

// spans records spans without an SDK.
type spans struct {
	embedded.TracerProvider
	off   atomic.Bool // otel keeps delegating to the first provider for ever
	mu    sync.Mutex
	ended []*span
}

type spanTracer struct {
	embedded.Tracer
	to *spans
}

type span struct {
	noop.Span
	to      *spans
	context trace.SpanContext
	name    string
	attrs   []attribute.KeyValue
	status  codes.Code
}

func (s *spans) Tracer(name string, _ ...trace.TracerOption) trace.Tracer {
	if name != tracerName {
		return noop.NewTracerProvider().Tracer(name)
	}
	return spanTracer{to: s}
}

func (t spanTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	if t.to.off.Load() {
		return noop.Tracer{}.Start(ctx, name, opts...)
	}
	c := trace.NewSpanStartConfig(opts...)
	s := &span{to: t.to, name: name, attrs: c.Attributes(), context: trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{9}, SpanID: trace.SpanID{byte(len(name))}, TraceFlags: trace.FlagsSampled,
	})}
	return trace.ContextWithSpan(ctx, s), s
}

func (s *span) SpanContext() trace.SpanContext       { return s.context }
func (s *span) IsRecording() bool                    { return true }
func (s *span) SetStatus(code codes.Code, _ string)  { s.status = code }
func (s *span) TracerProvider() trace.TracerProvider { return s.to }
func (s *span) End(...trace.SpanEndOption) {
	s.to.mu.Lock()
	defer s.to.mu.Unlock()
	s.to.ended = append(s.to.ended, s)
}

func (s *spans) take() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sp := range s.ended {
		text := sp.name
		for _, a := range sp.attrs {
			text += fmt.Sprintf(" %s=%s", a.Key, a.Value.Emit())
		}
		if sp.status == codes.Error {
			text += " error"
		}
		names = append(names, text)
	}
	s.ended = nil
	return names
}

func TestSpans(t *testing.T) {
	old := otel.GetTracerProvider()
	recorder := &spans{}
	otel.SetTracerProvider(recorder)
	defer otel.SetTracerProvider(old)
	defer recorder.off.Store(true)
	d := newNode(t)
	d.install("fakenet")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-a.conflist", good)
	n := d.network()
	d.must(n.Load())
	check := func(want ...string) {
		t.Helper()
		if got := recorder.take(); !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
	if _, err := n.Setup(t.Context(), "c", "/ns"); err != nil {
		t.Fatal(err)
	}
	check("cni.asynchAttach cni.index=0 cni.ifname=eth0 cni.name=good", "cni.Setup cni.id=c cni.path=/ns")
	// The plugin is told which span it works for.
	for _, c := range d.take("ADD").Calls {
		if want := "00-09000000000000000000000000000000-1000000000000000-01"; c[0].Env["TRACEPARENT"] != want {
			t.Errorf("TRACEPARENT %q, want %q", c[0].Env["TRACEPARENT"], want)
		}
	}
	if _, err := n.SetupSerially(t.Context(), "c", "/ns"); err != nil {
		t.Fatal(err)
	}
	check("cni.attachNetworksSerially cni.ifname=eth0 cni.name=good", "cni.SetupSerially cni.id=c cni.path=/ns")
	d.must(n.Check(t.Context(), "c", "/ns"))
	check("cni.Check cni.id=c cni.path=/ns")
	d.must(n.Remove(t.Context(), "c", "/ns"))
	check("cni.Remove cni.id=c cni.path=/ns")
	d.answer("fakenet", "ADD", reply{code: 1})
	if _, err := n.Setup(t.Context(), "c", "/ns"); err == nil {
		t.Fatal("no error")
	}
	check("cni.asynchAttach cni.index=0 cni.ifname=eth0 cni.name=good error", "cni.Setup cni.id=c cni.path=/ns")
}

func TestNamespaceOptionError(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", good)
	n := d.network()
	d.must(n.Load())
	bad := errors.New("bad option")
	opt := func(*Namespace) error { return bad }
	if _, err := n.Setup(t.Context(), "c", "/ns", opt); !errors.Is(err, bad) {
		t.Error(err)
	}
	if err := n.Remove(t.Context(), "c", "/ns", opt); !errors.Is(err, bad) {
		t.Error(err)
	}
}
