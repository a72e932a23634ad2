//go:build unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// What the plugin printed is told from what this program makes of it, although
// both can have the code of an internal error.
func TestSpoken(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	for _, tt := range []struct {
		name, body string
		want       bool
	}{
		{"not available", `echo '{"code":50,"msg":"not available"}'; exit 1`, true},
		{"code of its own", `echo '{"code":100,"msg":"x"}'; exit 1`, true},
		{"anything that failed in it", `echo '{"code":999,"msg":"x"}'; exit 1`, true},
		{"no code", `echo '{"msg":"x"}'; exit 1`, false},
		{"no object", `echo x; exit 1`, false},
		{"nothing", `exit 1`, false},
		{"standard error", `echo '{"code":50,"msg":"x"}' >&2; exit 1`, false},
		{"killed", `kill -9 $$`, false},
	} {
		path := d.executable("plugin", tt.body)
		_, err := (&Exec{}).ExecPlugin(t.Context(), path, nil, []string{"CNI_COMMAND=STATUS"})
		if err == nil || Spoken(err) != tt.want || Spoken(fmt.Errorf("wrapped: %w", err)) != tt.want {
			t.Errorf("%s: %v: %t", tt.name, err, !tt.want)
		}
	}
	d.replace(filepath.Join(d.bin, "plugin"), "\x7fELF nonsense", 0o755)
	_, err := (&Exec{}).ExecPlugin(t.Context(), filepath.Join(d.bin, "plugin"), nil, []string{"CNI_COMMAND=STATUS"})
	var te *types.Error
	if !errors.As(err, &te) || te.Code != types.ErrInternal || Spoken(err) {
		t.Errorf("%v: %t", err, Spoken(err))
	}
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	gone := errors.New("the caller has gone for a reason of its own")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	for _, tt := range []struct {
		err  error
		want string
	}{
		{nil, "ok"},
		{errors.New("no"), "error"},
		{fmt.Errorf("plugin x was killed: %w", &boundError{verb: "ADD", after: time.Second}), "timeout"},
		{fmt.Errorf("plugin x was killed: %w", context.DeadlineExceeded), "timeout"},
		{fmt.Errorf("plugin x was killed: %w", context.Canceled), "canceled"},
		{fmt.Errorf("plugin x was killed: %w", gone), "canceled"},
		{fmt.Errorf("plugin x, pid 1, was killed but %w: %w", ErrAbandoned, context.DeadlineExceeded), "abandoned"},
		{fmt.Errorf("plugin x, pid 1, was killed but %w: %w", ErrAbandoned, context.Canceled), "abandoned"},
	} {
		if got := outcomeIn(ctx, tt.err); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.err, got, tt.want)
		}
	}
	if got := outcomeIn(t.Context(), gone); got != "error" {
		t.Errorf("an error like that of a caller that is there: %s", got)
	}
}

// Every call is counted, also one that runs nothing.
func TestCallsAreCounted(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	e := &Exec{}
	path := d.executable("x.y", `echo x`)
	if out, err := e.ExecPlugin(t.Context(), path, nil, []string{"CNI_COMMAND=DEL"}); string(out) != "x\n" || err != nil {
		t.Errorf("%q, %v", out, err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("gone"))
	if _, err := e.ExecPlugin(ctx, path, nil, []string{"CNI_COMMAND=DEL"}); err == nil {
		t.Error("no error")
	}
	counts := e.Calls.Counts()
	for _, outcome := range []string{"ok", "canceled"} {
		if counts[Call{"x.y", "DEL", outcome}].Count != 1 || len(counts) != 2 {
			t.Errorf("%v, want one of %s", counts, outcome)
		}
	}
	if counts[Call{"x.y", "DEL", "ok"}].Seconds <= 0 {
		t.Errorf("%v", counts)
	}
}

func TestStatusVerbUnsupported(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{&types.Error{Code: 4, Msg: "unknown CNI_COMMAND: STATUS"}, true},
		{&types.Error{Code: 100, Msg: "unknown CNI_COMMAND: STATUS"}, true},
		{&types.Error{Code: 1, Msg: "config version does not allow STATUS"}, true},
		{&types.Error{Code: 1, Msg: "incompatible CNI versions"}, false},
		{&types.Error{Code: 50, Msg: "not ready"}, false},
		{&types.Error{Code: 51, Msg: "limited"}, false},
		{&types.Error{Msg: "netplugin failed with no error message: exit status 1"}, false},
		{context.DeadlineExceeded, false},
		{fmt.Errorf("wrapped: %w", &types.Error{Code: 4}), true},
	} {
		if got := VerbUnsupported(tt.err, "STATUS"); got != tt.want {
			t.Errorf("%v: %v", tt.err, got)
		}
	}
}
