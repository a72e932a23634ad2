// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"

	gocni "github.com/containerd/go-cni"

	"github.com/cnireload/cnireload/internal/oneline"
)

// Errors are go-cni's own values, so that code written against go-cni keeps
// matching them with errors.Is.
var (
	// ErrCNINotInitialized is wrapped by every error that says a network is not
	// ready. Its text, "cni plugin not initialized", is what operators grep.
	ErrCNINotInitialized = gocni.ErrCNINotInitialized
	// ErrInvalidConfig is wrapped by errors about the content of a file.
	ErrInvalidConfig = gocni.ErrInvalidConfig
	// ErrRead is wrapped by errors about reading the configuration directory.
	ErrRead = gocni.ErrRead
	// ErrLoad is wrapped by what [Network.Load] returns.
	ErrLoad = gocni.ErrLoad
	// ErrInvalidResult is wrapped by errors about what a plugin returned.
	ErrInvalidResult = gocni.ErrInvalidResult
)

// ErrClosed is returned by calls that need a running [Network] after Close.
var ErrClosed = errors.New("cnireload: network is closed")

// IsCNINotInitialized tells whether err says that a network is not ready.
func IsCNINotInitialized(err error) bool {
	return errors.Is(err, ErrCNINotInitialized)
}

// notReady is the error of a network that cannot be used. It prints go-cni's
// text first, then the cause (kubernetes/kubernetes users grep the former).
type notReady struct{ cause error }

// The cause may quote a file of a megabyte.
func (e *notReady) Error() string {
	return oneline.Of(ErrCNINotInitialized.Error() + ": " + e.cause.Error())
}
func (e *notReady) Unwrap() []error { return []error{ErrCNINotInitialized, e.cause} }

// loadError wraps the reason why too little could be loaded the way go-cni does.
func loadError(cause error) error {
	return fmt.Errorf("cni config load failed: %w: %w", &notReady{cause: cause}, ErrLoad)
}
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
