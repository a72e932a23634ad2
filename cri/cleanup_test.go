// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// minute is a DeferContext as containerd has it.
func minute() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

// Every step runs into its deadline, and an unmount in between into its bound.
func TestCleanupStepsEndWithCaller(t *testing.T) {
	const steps = 4
	for _, tt := range []struct {
		name string
		// left is what is left of the caller's time; zero means no deadline.
		left time.Duration
		gone bool
		// first is what the first step has, and all what they all may take.
		first, all time.Duration
	}{
		{name: "all the time", left: 235 * time.Second, first: time.Minute, all: 130 * time.Second},
		{name: "ADD used its bound", left: 40 * time.Second, first: 22500 * time.Millisecond, all: 43 * time.Second},
		{name: "in between", left: time.Minute, first: 37500 * time.Millisecond, all: 63 * time.Second},
		{name: "nearly gone", left: time.Second, first: 22500 * time.Millisecond, all: 43 * time.Second},
		{name: "gone", left: time.Hour, gone: true, first: time.Minute, all: 130 * time.Second},
		{name: "no deadline", first: time.Minute, all: 130 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				caller, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.left != 0 {
					caller, cancel = context.WithTimeout(caller, tt.left)
					defer cancel()
				}
				if tt.gone {
					cancel()
				}
				next := CleanupSteps(caller, minute)
				begin := time.Now()
				for i := range steps {
					if i == 2 {
						time.Sleep(unmountBound)
					}
					ctx, cancel := next()
					if ctx.Err() != nil {
						t.Errorf("step %d is not tried", i)
					}
					stepBegin := time.Now()
					<-ctx.Done()
					cancel()
					if took := time.Since(stepBegin); i == 0 && (took > tt.first+time.Second || took < tt.first-time.Second) {
						t.Errorf("the first step had %s, want %s", took, tt.first)
					} else if took > time.Minute || took < leastStep {
						t.Errorf("step %d had %s", i, took)
					}
				}
				if took := time.Since(begin); took > tt.all {
					t.Errorf("all steps took %s, want at most %s", took, tt.all)
				}
			})
		})
	}
}

// A step that is quick leaves its time to the next.
func TestCleanupStepsQuick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := CleanupSteps(t.Context(), minute)
		for range 3 {
			ctx, cancel := next()
			if d, ok := ctx.Deadline(); !ok || time.Until(d) != time.Minute {
				t.Errorf("a step has until %s", d)
			}
			cancel()
			if ctx.Err() == nil {
				t.Error("cancel does not end the step")
			}
		}
	})
}

// hangingNamespace cannot be unmounted until release is closed.
type hangingNamespace struct {
	release chan struct{}
	begun   chan struct{}
	err     error
}

func (hangingNamespace) GetPath() string { return "/run/netns/cni-a" }

func (h hangingNamespace) Remove() error {
	h.begun <- struct{}{}
	<-h.release
	return h.err
}

func TestRemoveNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hangingNamespace{release: make(chan struct{}), begun: make(chan struct{}, 10), err: errors.New("busy")}
		begin := time.Now()
		err := RemoveNamespace(h)
		if took := time.Since(begin); took != unmountBound {
			t.Errorf("returned after %s", took)
		}
		if err == nil || !strings.Contains(err.Error(), h.GetPath()) || !strings.Contains(err.Error(), "still being unmounted") {
			t.Errorf("error is %v", err)
		}
		// Further tries wait for the same unmount.
		results := make(chan error)
		for range 3 {
			go func() { results <- RemoveNamespace(h) }()
		}
		time.Sleep(time.Second)
		if n := len(h.begun); n != 1 {
			t.Errorf("%d unmounts run at once", n)
		}
		close(h.release)
		for range 3 {
			if err := <-results; !errors.Is(err, h.err) {
				t.Errorf("a try that waited got %v", err)
			}
		}
		// The next one is a new one.
		h.err = nil
		if err := RemoveNamespace(h); err != nil || len(h.begun) != 2 {
			t.Errorf("after that %v, %d unmounts", err, len(h.begun))
		}
		if n := len(unmounts.running); n != 0 {
			t.Errorf("%d unmounts are remembered", n)
		}
	})
}
