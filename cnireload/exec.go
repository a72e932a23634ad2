// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
	"github.com/containerd/log"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/cnireload/cnireload/internal/diskfile"
)

const (
	// pipeGrace is how long the pipes of a plugin stay open after it has ended
	// or was killed. Children that it left behind may hold them for ever.
	pipeGrace = 500 * time.Millisecond
	// abandonGrace is how long a killed plugin has to die before the call
	// returns without it (a process in uninterruptible sleep cannot die).
	abandonGrace = time.Second
	// busyRetry is the pause before an executable that is being written is
	// tried again.
	busyRetry = 50 * time.Millisecond
	// busyLimit bounds all such tries of one call.
	busyLimit = 5 * time.Second
	// maxOutput is how much of a plugin's standard output is kept. A result is
	// a few KiB; a plugin that prints more is drained, but not believed.
	maxOutput = 1 << 20
	// maxErrorText is how much of a plugin's own words an error carries, after
	// quoting. What callers put in front must fit in 4 KiB as well.
	maxErrorText = 4<<10 - 512
)

// boundedExec runs plugins for libcni in place of libcni's own RawExec: each
// call ends by the bound of its verb, with the plugin's whole process group
// killed, and keeps a bounded part of what the plugin prints. It can be used
// concurrently.
type boundedExec struct {
	version.PluginDecoder
	running *running // may be nil
}

var _ invoke.Exec = (*boundedExec)(nil)

// FindInPath returns the first regular executable file called plugin. libcni's
// own search takes any regular file, and then fails to execute it.
func (*boundedExec) FindInPath(plugin string, dirs []string) (string, error) {
	path, _, err := resolve(plugin, dirs, true)
	var missing *pluginNotFound
	if errors.As(err, &missing) {
		// libcni's words. The error must not contain "not found": a DEL that
		// fails with that counts as done, see [Network.Remove].
		err = fmt.Errorf("failed to find plugin %q in path %s%s", plugin, dirs, missing.reasons())
	}
	return path, err
}

// withBound derives a context that ends by the bound of the verb.
func withBound(ctx context.Context, verb string) (context.Context, context.CancelFunc) {
	d := timeout.Get(timeoutKeys[verb])
	return context.WithTimeoutCause(ctx, d, &boundError{verb: verb, after: d})
}

// boundError is why a plugin was ended. It is a deadline error to errors.Is.
type boundError struct {
	verb  string
	after time.Duration
}

func (e *boundError) Error() string {
	return fmt.Sprintf("%s did not finish within %s (%s)", e.verb, e.after, timeoutKeys[e.verb])
}
func (e *boundError) Is(target error) bool { return target == context.DeadlineExceeded }

// ExecPlugin runs the plugin at path and returns what it printed.
//
// An error that the plugin reported itself is a *types.Error with libcni's
// text. A call that was ended from outside wraps the context's cause.
func (e *boundedExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	verb := verbOf(environ)
	if _, ok := timeoutKeys[verb]; ok {
		var cancel context.CancelFunc
		ctx, cancel = withBound(ctx, verb)
		defer cancel()
	}
	environ = injectTraceContext(ctx, environ)
	for start := time.Now(); ; {
		out, err := e.run(ctx, path, verb, stdin, environ)
		if !errors.Is(err, errTextBusy) || time.Since(start) > busyLimit {
			return out, err
		}
		// Somebody is writing the executable. A command can be started only
		// once, so the next try needs a new one (cni#1183).
		select {
		case <-time.After(busyRetry):
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return nil, err
		}
	}
}

func (e *boundedExec) run(ctx context.Context, path, verb string, stdin []byte, environ []string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("plugin %s was not run: %w", path, context.Cause(ctx))
	}
	stdout, err := newOutput()
	if err != nil {
		return nil, ownErrorf("plugin %s cannot be executed: %w", path, err)
	}
	stderr, err := newOutput()
	if err != nil {
		stdout.discard()
		return nil, ownErrorf("plugin %s cannot be executed: %w", path, err)
	}
	cmd := exec.Command(path)
	cmd.Env = environ
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Stdout, cmd.Stderr = stdout.w, stderr.w
	cmd.WaitDelay = pipeGrace
	isolate(cmd)
	if err := cmd.Start(); err != nil {
		stdout.discard()
		stderr.discard()
		if errors.Is(err, errTextBusy) {
			return nil, fmt.Errorf("plugin %s is being written: %w", path, err)
		}
		return nil, ownErrorf("plugin %s cannot be executed: %w", path, err)
	}
	process := e.running.begin(path, environ, cmd.Process.Pid)
	stdout.collect()
	stderr.collect()
	done := make(chan ended, 1)
	go func() {
		err := cmd.Wait()
		e.running.end(process)
		// Its input is still held, as its output may be.
		end := ended{err: err, lingers: errors.Is(err, exec.ErrWaitDelay)}
		stdout.expire()
		stderr.expire()
		end.lingers = stdout.wait() || end.lingers
		end.lingers = stderr.wait() || end.lingers
		done <- end
	}()
	var end ended
	select {
	case end = <-done:
	case <-ctx.Done():
		if kerr := killAll(cmd); kerr != nil {
			log.G(ctx).WithError(kerr).Warnf("cannot kill cni plugin %s, pid %d", path, cmd.Process.Pid)
		}
		abandon := time.NewTimer(pipeGrace + abandonGrace)
		defer abandon.Stop()
		select {
		case end = <-done:
			// It may have ended well just before, with a child of its own
			// holding its output.
			if !succeeded(cmd) {
				return nil, fmt.Errorf("plugin %s was killed: %w%s", path, context.Cause(ctx), stderr.note())
			}
		case <-abandon.C:
			// The goroutine above reaps it if it ever ends.
			e.running.abandon(process)
			return nil, &abandonedError{path: path, pid: cmd.Process.Pid, cause: context.Cause(ctx), gone: process.gone}
		}
	}
	// A plugin that ended well has succeeded, even if a child that it left
	// behind still holds its output (containerd#7832 takes the same view).
	switch {
	case cmd.ProcessState == nil:
		// Somebody else reaped it. What it printed may be a result or an error.
		return nil, ownErrorf("plugin %s has ended, but how is not known: %w%s", path, end.err, stderr.note())
	case end.err != nil && !(end.lingers && succeeded(cmd)):
		return nil, pluginError(end.err, &stdout.capture, &stderr.capture)
	}
	if stderr.total() > 0 {
		log.G(ctx).WithField("plugin", path).WithField("verb", verb).Debugf("cni plugin printed: %s", stderr.text())
	}
	// Other verbs have no result: whatever it printed, it has succeeded.
	if n := stdout.total(); n > maxOutput && (verb == "ADD" || verb == "VERSION") {
		return nil, ownErrorf("plugin %s printed %d bytes, the limit is %d", path, n, maxOutput)
	}
	return stdout.bytes(), nil
}

// succeeded tells whether the plugin ended well. Its state is not known if waiting
// for it has failed.
func succeeded(cmd *exec.Cmd) bool { return cmd.ProcessState != nil && cmd.ProcessState.Success() }

// ownError is an error of this package in the form of a plugin's, which callers
// of libcni expect, with the code that plugins use for whatever goes wrong in
// them. The plugin has not said it.
type ownError struct {
	as    types.Error
	cause error
}

func ownErrorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &ownError{as: types.Error{Code: types.ErrInternal, Msg: err.Error()}, cause: err}
}

func (e *ownError) Error() string   { return e.as.Msg }
func (e *ownError) Unwrap() []error { return []error{&e.as, e.cause} }

// abandonedError is the error of a call whose plugin was killed and does not die.
type abandonedError struct {
	path  string
	pid   int
	cause error           // why it was killed
	gone  <-chan struct{} // closed when it has ended all the same
}

func (e *abandonedError) Error() string {
	return fmt.Sprintf("plugin %s, pid %d, was killed but %v: %v", e.path, e.pid, errAbandoned, e.cause)
}
func (e *abandonedError) Unwrap() []error { return []error{errAbandoned, e.cause} }

// ended is how a plugin ended.
type ended struct {
	err     error // of its exit status
	lingers bool  // a child of it holds its input or output
}

// output is what a plugin prints, on its way through a pipe.
type output struct {
	capture
	r, w *os.File
	done chan struct{} // closed when nothing more is read
	held bool          // somebody still has the other end then
}

func newOutput() (*output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return &output{r: r, w: w, done: make(chan struct{})}, nil
}

// discard gives up an output of a plugin that was not started.
func (o *output) discard() {
	_ = o.r.Close()
	_ = o.w.Close()
}

// collect reads the output of a plugin that was started.
func (o *output) collect() {
	_ = o.w.Close() // it has its own
	go func() {
		defer close(o.done)
		defer o.r.Close()
		buf := make([]byte, 8<<10)
		for {
			n, err := o.r.Read(buf)
			_, _ = o.Write(buf[:n])
			if err != nil {
				if o.held = !errors.Is(err, io.EOF); o.held {
					// What it printed before it ended is in the pipe, however
					// late this comes to read it on a machine that is busy.
					readReady(o.r, buf, &o.capture)
				}
				return
			}
		}
	}()
}

// expire ends the reading when the pipe is still held after the grace.
func (o *output) expire() {
	if err := o.r.SetReadDeadline(time.Now().Add(pipeGrace)); err != nil && !errors.Is(err, os.ErrClosed) {
		// Not on every platform.
		time.AfterFunc(pipeGrace, func() { _ = o.r.Close() })
	}
}

// wait returns whether the pipe was still held when the reading ended.
func (o *output) wait() bool {
	<-o.done
	return o.held
}

// pluginError turns a plugin's exit status and output into the error libcni
// makes of them, word for word, because people match on it, with the plugin's
// own words cut to a bounded length.
func pluginError(err error, stdout, stderr *capture) error {
	var e types.Error
	switch {
	case stdout.total() == 0 && stderr.total() == 0:
		e.Msg = fmt.Sprintf("netplugin failed with no error message: %v", err)
	case stdout.total() == 0:
		e.Msg = fmt.Sprintf("netplugin failed: %q: %v", stderr.text(), err)
	default:
		if perr := json.Unmarshal(stdout.bytes(), &e); perr != nil {
			e = types.Error{Msg: fmt.Sprintf("netplugin failed but error parsing its diagnostic message %q: %v", stdout.text(), perr)}
		}
	}
	if len(e.Msg)+len(e.Details) > maxErrorText {
		e.Msg = shorten(e.Msg, maxErrorText*3/4)
		e.Details = shorten(e.Details, maxErrorText-len(e.Msg))
	}
	return &e
}

// shorten keeps the head and the tail of a text.
func shorten[T string | []byte](s T, limit int) string {
	if len(s) <= limit {
		return string(s)
	}
	half := limit/2 - 16
	return strings.ToValidUTF8(string(s[:half]), "") +
		fmt.Sprintf(" ...(%d bytes)... ", len(s)-2*half) +
		strings.ToValidUTF8(string(s[len(s)-half:]), "")
}

func verbOf(environ []string) string      { return environValue(environ, "CNI_COMMAND") }
func containerOf(environ []string) string { return environValue(environ, "CNI_CONTAINERID") }

// environValue returns the last value of a variable.
func environValue(environ []string, name string) string {
	for i := len(environ) - 1; i >= 0; i-- {
		if value, ok := strings.CutPrefix(environ[i], name+"="); ok {
			return value
		}
	}
	return ""
}

// injectTraceContext hands the caller's trace on to the plugin the way libcni
// 1.3.1 does.
func injectTraceContext(ctx context.Context, environ []string) []string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return environ
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	for _, key := range []string{"traceparent", "tracestate"} {
		if v := carrier.Get(key); v != "" {
			environ = append(environ, strings.ToUpper(key)+"="+v)
		}
	}
	if b := baggage.FromContext(ctx).String(); b != "" {
		environ = append(environ, "BAGGAGE="+b)
	}
	return environ
}

// capture keeps what is written to it, up to maxOutput bytes, and of more than
// that, or of what cannot be a JSON object, the first and the last maxErrorText
// only: many plugins may print a lot at once. Its lock is held for the copy
// alone: an abandoned plugin may still write while the caller reads.
type capture struct {
	mu   sync.Mutex
	head []byte
	tail []byte
	n    int64
	cut  bool // only head and tail are kept
}

func (c *capture) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += int64(len(p))
	if c.cut {
		c.tail = append(c.tail, p[max(0, len(p)-maxErrorText):]...)
		c.tail = append(c.tail[:0], c.tail[max(0, len(c.tail)-maxErrorText):]...)
		return len(p), nil
	}
	c.head = append(c.head, p...)
	if len(c.head) > maxOutput || len(c.head) > maxErrorText && !bytes.HasPrefix(bytes.TrimSpace(c.head[:maxErrorText]), []byte("{")) {
		c.cut = true
		over := c.head[maxErrorText:]
		c.head = bytes.Clone(c.head[:maxErrorText])
		c.tail = bytes.Clone(over[max(0, len(over)-maxErrorText):])
	}
	return len(p), nil
}

func (c *capture) total() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// bytes returns what was written, or its first part, which nobody may change.
func (c *capture) bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clip(c.head)
}

// text returns at most maxErrorText of what was written, head and tail.
func (c *capture) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.tail) == 0 {
		return shorten(c.head, maxErrorText)
	}
	half := maxErrorText/2 - 16
	return fmt.Sprintf("%s ...(%d bytes)... %s", c.head[:half], c.n-2*int64(half), c.tail[max(0, len(c.tail)-half):])
}

// note returns what was written as a supplement to an error, or nothing.
func (c *capture) note() string {
	if t := strings.TrimSpace(c.text()); t != "" {
		return shorten(fmt.Sprintf(" (it printed: %q)", t), maxErrorText)
	}
	return ""
}

// resolve finds the executable of a plugin in dirs. With skip it passes over
// what cannot be executed and goes on; without, the first regular file decides,
// which is how a plugin looks for its delegates.
func resolve(plugin string, dirs []string, skip bool) (string, os.FileInfo, error) {
	if plugin == "" {
		return "", nil, errors.New("no plugin name provided")
	}
	if strings.ContainsAny(plugin, "/"+string(os.PathSeparator)) {
		return "", nil, fmt.Errorf("invalid plugin name %q: must not be a path", plugin)
	}
	missing := &pluginNotFound{plugin: plugin, dirs: dirs}
	for _, dir := range dirs {
		for _, ext := range invoke.ExecutableFileExtensions {
			path := filepath.Join(dir, plugin) + ext
			info, err := os.Stat(path)
			switch {
			case err != nil:
				switch _, lerr := os.Lstat(path); {
				case lerr == nil && errors.Is(err, fs.ErrNotExist):
					missing.rejected = append(missing.rejected, path+" is a symlink that leads nowhere")
				case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNotDir):
					missing.rejected = append(missing.rejected, fmt.Sprintf("%s cannot be looked at: %v", path, errors.Unwrap(err)))
				}
				continue
			case !info.Mode().IsRegular():
				missing.rejected = append(missing.rejected, fmt.Sprintf("%s is not a regular file but %s", path, diskfile.Kind(info.Mode())))
				continue
			case !executable(info):
				missing.rejected = append(missing.rejected, fmt.Sprintf("%s is not executable (mode %04o)", path, info.Mode().Perm()))
				if skip {
					continue
				}
				return "", nil, missing
			}
			return path, info, nil
		}
	}
	return "", nil, missing
}
