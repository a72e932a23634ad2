// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const (
	// pipeGrace is how long the pipes of a plugin stay open after it has ended
	// or was killed. Children that it left behind may hold them for ever.
	pipeGrace = 500 * time.Millisecond
	// abandonGrace is how long a killed plugin has to die before the call
	// returns without it (a process in uninterruptible sleep cannot die).
	abandonGrace = time.Second
	// KillGrace is how long a call may outlast the end of its context.
	KillGrace = pipeGrace + abandonGrace
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

// Exec runs plugins for libcni in place of libcni's own RawExec. Each call ends by
// the bound of its verb, with the plugin's whole process group killed. A bounded
// part of what the plugin prints is kept. The zero value is ready for use, and it can
// be used concurrently.
type Exec struct {
	version.PluginDecoder
	Processes Processes // that were started, or found
	Calls     Calls     // that have ended
}

var _ invoke.Exec = (*Exec)(nil)

// FindInPath returns the first regular executable file called plugin. libcni's
// own search takes any regular file, and then fails to execute it.
func (*Exec) FindInPath(plugin string, dirs []string) (string, error) {
	path, _, err := Find(plugin, dirs, true)
	var missing *notFound
	if errors.As(err, &missing) {
		// libcni's words. The error must not contain "not found": a DEL that
		// fails with that counts as done.
		err = fmt.Errorf("failed to find plugin %q in path %s%s", plugin, dirs, missing.reasons())
	}
	return path, err
}

// ExecPlugin runs the plugin at path and returns what it printed.
//
// An error that the plugin reported itself is a *types.Error with libcni's
// text. A call that was ended from outside wraps the context's cause, and also an
// [AbandonedError] if the plugin could not be killed.
func (e *Exec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	start := time.Now()
	out, err := e.call(ctx, path, stdin, environ)
	e.Calls.add(Call{Plugin: filepath.Base(path), Verb: verbOf(environ), Outcome: outcomeIn(ctx, err)}, time.Since(start))
	return out, err
}

// call runs the plugin, again while its executable is being written.
func (e *Exec) call(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	verb := verbOf(environ)
	if _, ok := timeoutKeys[verb]; ok {
		var cancel context.CancelFunc
		ctx, cancel = WithBound(ctx, verb)
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

func (e *Exec) run(ctx context.Context, path, verb string, stdin []byte, environ []string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("plugin %s was not run: %w", path, context.Cause(ctx))
	}
	stdout, err := newOutput()
	if err != nil {
		return nil, Errorf("plugin %s cannot be executed: %w", path, err)
	}
	stderr, err := newOutput()
	if err != nil {
		stdout.discard()
		return nil, Errorf("plugin %s cannot be executed: %w", path, err)
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
		return nil, Errorf("plugin %s cannot be executed: %w", path, err)
	}
	process := e.Processes.Begin(path, environ, cmd.Process.Pid)
	stdout.collect()
	stderr.collect()
	done := make(chan ended, 1)
	go func() {
		err := cmd.Wait()
		e.Processes.End(process)
		// ErrWaitDelay: a child of the plugin still holds its input.
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
		abandon := time.NewTimer(KillGrace)
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
			e.Processes.Abandon(process)
			return nil, &AbandonedError{Path: path, PID: cmd.Process.Pid, Cause: context.Cause(ctx), Gone: process.gone}
		}
	}
	// A plugin that ended well has succeeded, even if a child that it left
	// behind still holds its output (containerd#7832 takes the same view).
	switch {
	case cmd.ProcessState == nil:
		// Somebody else reaped it. What it printed may be a result or an error.
		return nil, Errorf("plugin %s has ended, but how is not known: %w%s", path, end.err, stderr.note())
	case end.err != nil && !(end.lingers && succeeded(cmd)):
		return nil, pluginError(end.err, &stdout.capture, &stderr.capture)
	}
	if stderr.total() > 0 {
		log.G(ctx).WithField("plugin", path).WithField("verb", verb).Debugf("cni plugin printed: %s", stderr.text())
	}
	// Other verbs have no result: whatever it printed, it has succeeded.
	if n := stdout.total(); n > maxOutput && (verb == "ADD" || verb == "VERSION") {
		return nil, Errorf("plugin %s printed %d bytes, the limit is %d", path, n, maxOutput)
	}
	return stdout.bytes(), nil
}

// succeeded tells whether the plugin ended well. Its state is not known if waiting
// for it has failed.
func succeeded(cmd *exec.Cmd) bool { return cmd.ProcessState != nil && cmd.ProcessState.Success() }

// ended is how a plugin ended.
type ended struct {
	err     error // of its exit status
	lingers bool  // a child of it holds its input or output
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
