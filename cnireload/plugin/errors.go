// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// ErrAbandoned is wrapped by the error of a call whose plugin does not die.
var ErrAbandoned = errors.New("it does not die")

// ownError is an error of this package in the form of a plugin's, which callers
// of libcni expect, with the code that plugins use for whatever goes wrong in
// them. The plugin has not said it.
type ownError struct {
	as    types.Error
	cause error
}

// Errorf returns an error of this program in the form of a plugin's, as [Exec]
// returns it for what it could not run.
func Errorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &ownError{as: types.Error{Code: types.ErrInternal, Msg: err.Error()}, cause: err}
}

func (e *ownError) Error() string   { return e.as.Msg }
func (e *ownError) Unwrap() []error { return []error{&e.as, e.cause} }

// AbandonedError is the error of a call whose plugin was killed and does not die.
type AbandonedError struct {
	Path  string
	PID   int
	Cause error           // why it was killed
	Gone  <-chan struct{} // closed when it has ended all the same
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("plugin %s, pid %d, was killed but %v: %v", e.Path, e.PID, ErrAbandoned, e.Cause)
}
func (e *AbandonedError) Unwrap() []error { return []error{ErrAbandoned, e.Cause} }

// Outcome says in one word how a call ended, see [Call].
func Outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrAbandoned):
		return "abandoned"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "canceled"
	default:
		return "error"
	}
}

// outcomeIn is Outcome for a call whose caller may have gone for a reason of its
// own.
func outcomeIn(ctx context.Context, err error) string {
	o := Outcome(err)
	if o == "error" && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return "canceled"
	}
	return o
}

// Spoken tells whether an error is what the plugin itself said: an error object
// that it printed, with a code of its own (CNI spec 1.1, section 5). What libcni
// makes of other output has the code 0.
func Spoken(err error) bool {
	var own *ownError
	var e *types.Error
	return errors.As(err, &e) && e.Code != types.ErrUnknown && !errors.As(err, &own)
}

// VerbUnsupported tells whether the answer to a verb of CNI 1.1 says that the
// plugin does not know it, which says nothing about readiness: an unknown
// command is error 4, a version without the verb error 1 (CNI spec 1.1, section
// 5; istio#53160).
func VerbUnsupported(err error, verb string) bool {
	var e *types.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Code {
	case types.ErrInvalidEnvironmentVariables:
		return true
	case types.ErrIncompatibleCNIVersion:
		return strings.Contains(e.Msg, verb)
	}
	return strings.Contains(e.Msg, "unknown CNI_COMMAND")
}
