// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/trace"

	"github.com/cnireload/cnireload/internal/testenv"
)

// executable writes a shell script and returns its path.
func (d *node) executable(name, body string) string {
	d.t.Helper()
	path := filepath.Join(d.bin, name)
	d.replace(path, "#!/bin/sh\n"+body+"\n", 0o755)
	return path
}

// The texts are those of libcni 1.3.1, word for word.
func TestExecErrorTexts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, body, want string
		code             uint
	}{
		{"silent", "exit 3", "netplugin failed with no error message: exit status 3", 0},
		{"killed", "kill -9 $$", "netplugin failed with no error message: signal: killed", 0},
		{"stderr", `echo "it's \"broken\"" >&2; exit 1`, `netplugin failed: "it's \"broken\"\n": exit status 1`, 0},
		{"cni error", `echo '{"cniVersion":"1.0.0","code":11,"msg":"busy","details":"try again"}'; exit 1`, "busy; try again", 11},
		{"cni error without details", `echo '{"code":7,"msg":"busy"}'; echo noise >&2; exit 1`, "busy", 7},
		{"garbage", `printf 'boom\n'; exit 1`, `netplugin failed but error parsing its diagnostic message "boom\n": invalid character 'b' looking for beginning of value`, 0},
		{"wrong type", `printf '{"code":"x","msg":"m"}'; exit 1`, `netplugin failed but error parsing its diagnostic message "{\"code\":\"x\",\"msg\":\"m\"}": json: cannot unmarshal string into Go struct field Error.code of type uint`, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			path := d.executable("plugin", tt.body)
			_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
			var ours, theirs *types.Error
			if !errors.As(err, &ours) {
				t.Fatalf("%T is not a *types.Error: %v", err, err)
			}
			if err.Error() != tt.want || ours.Code != tt.code {
				t.Errorf("got %q code %d\nwant %q code %d", err, ours.Code, tt.want, tt.code)
			}
			_, err = (&invoke.RawExec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
			if !errors.As(err, &theirs) {
				t.Fatalf("%T is not a *types.Error: %v", err, err)
			}
			// libcni before 1.3.1 leaves the exit status out.
			if !strings.HasPrefix(ours.Error(), theirs.Error()) || ours.Code != theirs.Code {
				t.Errorf("got %+v, libcni %+v", ours, theirs)
			}
		})
	}
}

func TestExecDeliversInputAndEnvironment(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := d.executable("plugin", `printf '{%s|%s|' "$CNI_COMMAND" "$X"; cat; echo noise >&2`)
	input := strings.Repeat("0123456789", 50000) // more than a pipe holds
	out, err := (&Exec{}).ExecPlugin(context.Background(), path, []byte(input), []string{"X=y", "CNI_COMMAND=ADD"})
	if err != nil {
		t.Fatal(err)
	}
	if want := "{ADD|y|" + input; string(out) != want {
		t.Errorf("got %.40q of %d bytes, want %.40q of %d", out, len(out), want, len(want))
	}
	// A plugin need not read what it is given.
	path = d.executable("deaf", `echo '{}'`)
	if out, err := (&Exec{}).ExecPlugin(context.Background(), path, []byte(input), nil); err != nil || string(out) != "{}\n" {
		t.Errorf("a plugin that does not read its input: %q, %v", out, err)
	}
}

func TestExecKillsTheWholeGroup(t *testing.T) {
	d := newNode(t)
	testenv.SetBound(t, "DEL", 2*time.Second)
	pids := filepath.Join(d.log, "grandchild")
	path := d.executable("plugin", fmt.Sprintf(`(sleep 300 & echo $! >'%s'; wait) & echo partial >&2; wait`, pids))
	start := time.Now()
	_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=DEL"})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v is not a deadline error", err)
	}
	for _, w := range []string{path, "was killed", "DEL did not finish within 2s", TimeoutDel, "partial"} {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %s", took)
	}
	pid := testenv.ReadPID(t, within, pids)
	eventually(t, func() string {
		if testenv.Alive(pid) {
			return fmt.Sprintf("the plugin's grandchild %d still runs", pid)
		}
		return ""
	})
}

// leavesItsGroup is set for a run of this program as a plugin, see below.
const leavesItsGroup = "CNIRELOAD_TEST_LEAVES_ITS_GROUP"

// A plugin that has joined another process group is not reached by the end of its
// own.
func TestExecKillsAPluginThatLeftItsGroup(t *testing.T) {
	if path := os.Getenv(leavesItsGroup); path != "" {
		group, err := syscall.Getpgid(os.Getppid())
		if err == nil {
			err = syscall.Setpgid(0, group)
		}
		if err == nil {
			err = os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
	}
	d := newNode(t)
	testenv.SetBound(t, "DEL", 4*time.Second)
	pids := filepath.Join(d.log, "pid")
	path := d.executable("plugin", fmt.Sprintf("%s='%s' exec '%s' -test.run '^%s$'", leavesItsGroup, pids, os.Args[0], t.Name()))
	_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=DEL"})
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrAbandoned) {
		t.Errorf("got %v", err)
	}
	if pid := testenv.ReadPID(t, within, pids); testenv.Alive(pid) {
		t.Error("it still runs")
	}
}

// Somebody else reaps the plugin, or nobody does: how it ended is not known then,
// which is an error of the call and not the end of the program.
func TestExecExitStatusIsLost(t *testing.T) {
	const child = "CNIRELOAD_TEST_IGNORES_CHILDREN"
	if os.Getenv(child) == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), child+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	d := newNode(t)
	path := d.executable("plugin", `echo '{"cniVersion":"1.0.0"}'`)
	signal.Ignore(syscall.SIGCHLD) // has the kernel reap, for all of this process
	_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
	if wrong := testenv.MissingWords(err, []string{path, "has ended, but how is not known"}); wrong != "" {
		t.Error(wrong)
	}
	if Spoken(err) {
		t.Error("it counts as the plugin's word")
	}
	testenv.SetBound(t, "DEL", 500*time.Millisecond)
	path = d.executable("plugin", "exec sleep 300")
	if _, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=DEL"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

// Verbs without a result succeed whatever the plugin prints.
func TestExecFloodOfAVerbWithoutResult(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := d.executable("plugin", `head -c 3000000 /dev/zero`)
	for verb, fails := range map[string]bool{"STATUS": false, "DEL": false, "ADD": true, "VERSION": true} {
		_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=" + verb})
		if (err != nil) != fails {
			t.Errorf("%s: %v", verb, err)
		}
	}
}

func TestExecCallerDeadlineAndCancel(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := d.executable("plugin", "exec sleep 300")
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := (&Exec{}).ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=ADD"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("caller's deadline: %v", err)
	}
	ctx, cancel = context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := (&Exec{}).ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=ADD"}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancel: %v", err)
	}
	// Nothing is run for a caller that has gone.
	mark := filepath.Join(d.log, "ran")
	path = d.executable("plugin", "touch "+mark)
	if _, err := (&Exec{}).ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=ADD"}); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "was not run") {
		t.Errorf("after cancel: %v", err)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("the plugin was run although its caller had gone")
	}
}

// A plugin may leave a daemon behind that holds its output.
func TestExecChildHoldsOutput(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	pids := filepath.Join(d.log, "daemon")
	path := d.executable("plugin", fmt.Sprintf(`sleep 300 & echo $! >'%s'; echo '{"cniVersion":"1.0.0"}'`, pids))
	start := time.Now()
	out, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
	if err != nil || string(out) != "{\"cniVersion\":\"1.0.0\"}\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
	pid := testenv.ReadPID(t, within, pids)
	if !testenv.Alive(pid) {
		t.Error("the daemon was killed although its plugin succeeded")
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)

	// The same with a plugin that fails: its own words count.
	path = d.executable("plugin", fmt.Sprintf(`sleep 300 & echo $! >'%s'; echo '{"code":7,"msg":"bad"}'; exit 1`, pids))
	d.must(os.Remove(pids))
	if _, err = (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"}); err == nil || err.Error() != "bad" {
		t.Errorf("got %v, want the plugin's error", err)
	}
	_ = syscall.Kill(testenv.ReadPID(t, within, pids), syscall.SIGKILL)
}

func TestExecFlood(t *testing.T) {
	d := newNode(t)
	flood := func(mib int, char, to, end string) string {
		return fmt.Sprintf(`head -c %d /dev/zero | tr '\0' '%s' >&%s; %s`, mib<<20, char, to, end)
	}
	for _, tt := range []struct{ name, body string }{
		{"standard error", flood(100, "x", "2", "exit 1")},
		{"standard output", flood(100, "x", "1", "exit 1")},
		{"both", flood(40, "x", "2", flood(40, "y", "1", "exit 1"))},
		{"standard output and success", flood(40, "x", "1", "exit 0")},
		{"bytes that need quoting", flood(2, `\001`, "2", "exit 1")},
		{"bytes that need quoting, in output", flood(2, `\377`, "1", "exit 1")},
		{"a long message", `printf '{"code":1,"msg":"'; head -c 500000 /dev/zero | tr '\0' 'm'; printf '","details":"'; head -c 500000 /dev/zero | tr '\0' 'd'; printf '"}'; exit 1`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := d.executable("plugin", tt.body)
			runtime.GC()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
			runtime.ReadMemStats(&after)
			if err == nil {
				t.Fatal("no error")
			}
			if n := len(err.Error()); n > 4<<10 {
				t.Errorf("the error text has %d bytes: %.80q...", n, err)
			}
			// Everything allocated on the way, freed or not.
			if n := after.TotalAlloc - before.TotalAlloc; n > 20<<20 {
				t.Errorf("%d MiB allocated", n>>20)
			}
		})
	}
}

func TestExecTextBusy(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := d.executable("plugin", `echo '{}'`)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	d.must(err)
	time.AfterFunc(200*time.Millisecond, func() { _ = f.Close() })
	start := time.Now()
	out, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
	if err != nil || string(out) != "{}\n" {
		t.Errorf("after the writer closed: %q, %v", out, err)
	}
	if time.Since(start) < 150*time.Millisecond {
		t.Skip("this kernel lets a file be executed while it is being written")
	}

	g, err := os.OpenFile(path, os.O_WRONLY, 0)
	d.must(err)
	defer g.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err = (&Exec{}).ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=ADD"})
	if err == nil || !strings.Contains(err.Error(), "text file busy") || !strings.Contains(err.Error(), path) {
		t.Errorf("while it is being written: %v", err)
	}
}

func TestExecCannotStart(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := filepath.Join(d.bin, "plugin")
	d.replace(path, "\x7fELF nonsense", 0o755)
	for _, path := range []string{path, path + "-gone", d.bin} {
		_, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
		var e *types.Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), path) {
			t.Errorf("got %v", err)
		}
	}
}

func TestExecTraceContext(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	path := d.executable("plugin", `echo "$TRACEPARENT $TRACESTATE $BAGGAGE"`)
	run := func(ctx context.Context) string {
		out, err := (&Exec{}).ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=ADD"})
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	if got := run(context.Background()); got != "" {
		t.Errorf("without a span: %q", got)
	}
	state, err := trace.ParseTraceState("vendor=1")
	d.must(err)
	member, err := baggage.NewMember("tenant", "a")
	d.must(err)
	bag, err := baggage.New(member)
	d.must(err)
	ctx := trace.ContextWithSpanContext(context.Background(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled, TraceState: state,
	}))
	ctx = baggage.ContextWithBaggage(ctx, bag)
	if got, want := run(ctx), "00-01000000000000000000000000000000-0200000000000000-01 vendor=1 tenant=a"; got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestFindInPath(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	second := filepath.Join(d.bin, "second")
	d.must(os.MkdirAll(filepath.Join(d.bin, "dir"), 0o755))
	d.must(os.MkdirAll(second, 0o755))
	d.replace(filepath.Join(d.bin, "plain"), "x", 0o644)
	d.replace(filepath.Join(second, "plain"), "x", 0o755)
	d.replace(filepath.Join(second, "dir"), "x", 0o755)
	d.replace(filepath.Join(d.bin, "only-plain"), "x", 0o640)
	d.must(os.Symlink("nowhere", filepath.Join(d.bin, "dangling")))
	d.must(os.Symlink("circle", filepath.Join(d.bin, "circle")))
	dirs := []string{d.bin, second}
	e := &Exec{}
	for _, typ := range []string{"plain", "dir"} {
		if path, err := e.FindInPath(typ, dirs); err != nil || path != filepath.Join(second, typ) {
			t.Errorf("%s: got %s, %v; want the one in the later directory", typ, path, err)
		}
	}
	for _, tt := range []struct {
		plugin string
		words  []string
	}{
		{"", []string{"no plugin name provided"}},
		{"../x", []string{"must not be a path"}},
		{"nothing", []string{fmt.Sprintf(`failed to find plugin "nothing" in path [%s %s]`, d.bin, second)}},
		{"only-plain", []string{"only-plain is not executable (mode 0640)", "failed to find plugin"}},
		{"dangling", []string{"dangling is a symlink that leads nowhere"}},
		{"circle", []string{"circle cannot be looked at: too many levels of symbolic links"}},
	} {
		_, err := e.FindInPath(tt.plugin, dirs)
		if wrong := testenv.MissingWords(err, tt.words); wrong != "" {
			t.Errorf("%q: %s", tt.plugin, wrong)
		}
		// A DEL that fails with these words counts as done.
		if err != nil && strings.Contains(err.Error(), "not found") {
			t.Errorf("%q: error says not found: %v", tt.plugin, err)
		}
	}
}

func TestExecEndedWellBeforeItsBound(t *testing.T) {
	d := newNode(t)
	path := d.executable("p", `(sleep 20) & echo '{}'; sleep 0.1`)
	testenv.SetBound(t, "ADD", 3*time.Second)
	out, err := (&Exec{}).ExecPlugin(context.Background(), path, nil, []string{"CNI_COMMAND=ADD"})
	if err != nil || string(out) != "{}\n" {
		t.Errorf("got %q, %v: the plugin ended before its bound, only its child holds the output", out, err)
	}
}

// On a machine that is busy what a plugin printed may be read long after it has
// ended; nothing of it may be lost then, or a success is a failure.
func TestOutputIsReadHoweverLate(t *testing.T) {
	t.Parallel()
	want := "{" + strings.Repeat("0123456789", 5000) // less than a pipe holds
	for _, held := range []bool{false, true} {
		o, err := newOutput()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.w.WriteString(want); err != nil {
			t.Fatal(err)
		}
		if held {
			fd, err := syscall.Dup(int(o.w.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			defer syscall.Close(fd)
		}
		if err := o.r.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		o.collect()
		if got := o.wait(); !got {
			t.Errorf("held %t: the deadline has passed, but reading came to the end", held)
		}
		if got := string(o.bytes()); got != want {
			t.Errorf("held %t: %d bytes were read of %d", held, len(got), len(want))
		}
	}
}

// What is too much is not kept: many plugins may print it at once.
func TestCaptureLetsGoOfTooMuch(t *testing.T) {
	t.Parallel()
	var c capture
	for i := range 40 {
		_, _ = c.Write(fmt.Appendf(nil, "%06d%s", i, strings.Repeat("x", 1<<15)))
	}
	if size := cap(c.head) + cap(c.tail); size > 64<<10 {
		t.Errorf("%d bytes are kept of %d", size, c.total())
	}
	text := c.text()
	if !strings.HasPrefix(text, "000000xxx") || len(text) > maxErrorText || !strings.Contains(text, "bytes)... ") {
		t.Errorf("%d bytes: %.40s", len(text), text)
	}
	for _, tt := range []struct {
		text string
		keep int
	}{
		{"\n {" + strings.Repeat("y", maxOutput-3), maxOutput},
		{"{" + strings.Repeat("y", maxOutput), maxErrorText},
		// This can be no result, however long it is.
		{"y{" + strings.Repeat("y", 64<<10), maxErrorText},
		{strings.Repeat(" ", maxErrorText+1), maxErrorText},
		{"[" + strings.Repeat("y", maxErrorText), maxErrorText},
		{strings.Repeat("y", maxErrorText), maxErrorText},
	} {
		for _, size := range []int{len(tt.text), 1 << 13, 100} {
			var c capture
			for chunk := range slices.Chunk([]byte(tt.text), size) {
				_, _ = c.Write(chunk)
			}
			if len(c.bytes()) != tt.keep || !strings.HasPrefix(tt.text, string(c.bytes())) || !strings.HasSuffix(tt.text, string(c.tail)) || c.total() != int64(len(tt.text)) {
				t.Errorf("%.10q, %d bytes in pieces of %d: %d are kept, then %d", tt.text, len(tt.text), size, len(c.head), len(c.tail))
			}
		}
	}
}

// lateWriter is read into late, as on a machine that is busy.
type lateWriter struct {
	capture
	late sync.Once
}

func (w *lateWriter) Write(p []byte) (int, error) {
	w.late.Do(func() { time.Sleep(3 * pipeGrace) })
	return w.capture.Write(p)
}

// This is why the pipes are our own. With [exec.Cmd.WaitDelay] what a plugin printed
// is lost if nobody came to read it in time, although the plugin has succeeded and
// left nothing behind. If this fails, os/exec does what [output] is for.
func TestWaitDelayLosesOutput(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	cmd := exec.CommandContext(t.Context(), d.executable("plugin", `head -c 60000 /dev/zero`))
	var out lateWriter
	cmd.Stdout, cmd.WaitDelay = &out, pipeGrace
	if err := cmd.Run(); !errors.Is(err, exec.ErrWaitDelay) {
		t.Errorf("got %v", err)
	}
	if got := out.total(); got >= 60000 {
		t.Errorf("all %d bytes were read", got)
	}
}
