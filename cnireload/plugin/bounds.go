// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"
)

// Keys in the [timeouts] table of containerd's configuration, one for each
// verb. Each bounds one operation on one network list, in addition to the
// deadline of the caller; the shorter one wins.
const (
	TimeoutAdd     = "io.containerd.timeout.cri.cni.add"
	TimeoutDel     = "io.containerd.timeout.cri.cni.del"
	TimeoutCheck   = "io.containerd.timeout.cri.cni.check"
	TimeoutStatus  = "io.containerd.timeout.cri.cni.status"
	TimeoutVersion = "io.containerd.timeout.cri.cni.version"
	TimeoutGC      = "io.containerd.timeout.cri.cni.gc"
)

// timeoutKeys maps a verb, as in CNI_COMMAND, to its key.
var timeoutKeys = map[string]string{
	"ADD":     TimeoutAdd,
	"DEL":     TimeoutDel,
	"CHECK":   TimeoutCheck,
	"STATUS":  TimeoutStatus,
	"VERSION": TimeoutVersion,
	"GC":      TimeoutGC,
}

// The defaults are set at init time, before containerd reads its
// configuration, so that they show in "containerd config default" and lose
// against the file. A key that nobody sets would be bounded to one second.
func init() {
	timeout.Set(TimeoutAdd, 200*time.Second)
	timeout.Set(TimeoutDel, 75*time.Second)
	timeout.Set(TimeoutCheck, 30*time.Second)
	timeout.Set(TimeoutStatus, 30*time.Second)
	timeout.Set(TimeoutVersion, 5*time.Second)
	timeout.Set(TimeoutGC, time.Minute)
}

// CheckBounds returns an error that names a bound that would end every call at
// once, if there is one.
func CheckBounds() error {
	for _, key := range timeoutKeys {
		if d := timeout.Get(key); d <= 0 {
			return fmt.Errorf("invalid [timeouts] %s = %q: must be longer than zero", key, d)
		}
	}
	return nil
}

// Bound returns how long a call of the verb, as in CNI_COMMAND, may take. What is
// not a verb has the bound of ADD.
func Bound(verb string) time.Duration {
	if key, ok := timeoutKeys[verb]; ok {
		return timeout.Get(key)
	}
	return timeout.Get(TimeoutAdd)
}

// WithBound derives a context that ends by the bound of the verb.
func WithBound(ctx context.Context, verb string) (context.Context, context.CancelFunc) {
	return WithBoundOf(ctx, verb, Bound(verb))
}

// WithBoundOf derives a context that ends after d. Its cause is then an error that
// names the verb, d and the key of the bound.
func WithBoundOf(ctx context.Context, verb string, d time.Duration) (context.Context, context.CancelFunc) {
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
