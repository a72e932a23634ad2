// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// A plugin that a killed containerd has left holds a lock that the next pods need.
func TestLeftOverLock(t *testing.T) {
	sides(t, "containerd killed during DEL", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, Timeouts: bounds(side, map[string]string{delKey: "8s"})})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, busy)
		id, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
		assert.NilError(t, err)
		lock := filepath.Join(n.Base, "plugin.lock")
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Lock: lock},
			"DEL": {Mode: fake.Hang, Lock: lock, Pod: "a"},
		}}))
		gone := make(chan error, 1)
		go func() { gone <- n.RemovePod(t.Context(), id) }()
		n.called("fakenet", "DEL")
		// It is called before it has the lock.
		assert.NilError(t, harness.Poll(t.Context(), busy, func() error {
			f, err := os.OpenFile(lock, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				return errors.New("the lock is not held")
			}
			return nil
		}))
		begin := time.Now()
		assert.NilError(t, syscall.Kill(n.PID(), syscall.SIGKILL))
		<-n.Ended()
		<-gone
		n.start()
		n.waitReady(true, busy)
		timeout := time.Minute
		if side == harness.Stock {
			timeout = 12 * time.Second
		}
		errs, _ := n.together(2, "new", 0, timeout)
		took := time.Since(begin)
		if side == harness.Stock {
			for _, err := range errs {
				assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			}
			n.untidy = true
			return "both new pods hang on the lock, past their deadline of 12 s"
		}
		for _, err := range errs {
			assert.NilError(t, err)
		}
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.NilError(t, n.RemovePod(t.Context(), id))
		return fmt.Sprintf("both new pods run %s after the kill (DEL's bound 8s)", short(took))
	})
}
