// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

func TestGuard(t *testing.T) {
	t.Parallel()
	g := Guard{EndBound: 2 * time.Second}
	g.Enter()
	if g.Alone(context.Background(), 0, func(context.Context) { t.Error("not alone") }) {
		t.Error("said to be alone")
	}
	g.Leave()
	var order []string
	inside := make(chan struct{})
	var entered atomic.Bool
	done := make(chan struct{})
	go func() {
		<-inside
		g.Enter()
		entered.Store(true)
		g.Leave()
		close(done)
	}()
	if !g.Alone(context.Background(), 0, func(ctx context.Context) {
		order = append(order, "begin")
		if g.Alone(ctx, 0, func(context.Context) {}) {
			t.Error("two at once")
		}
		close(inside)
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), ErrGaveWay) || entered.Load() {
			t.Errorf("ended by %v, entered %t", context.Cause(ctx), entered.Load())
		}
		order = append(order, "end")
	}) {
		t.Error("not alone")
	}
	<-done
	if !slices.Equal(order, []string{"begin", "end"}) {
		t.Errorf("order %q", order)
	}
	// One that does not end is not waited for.
	release := make(chan struct{})
	began := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		g.Alone(context.Background(), 0, func(context.Context) { close(began); <-release })
	}()
	<-began
	start := time.Now()
	g.Enter()
	if took := time.Since(start); took < g.EndBound {
		t.Errorf("entered after %s", took)
	}
	g.Leave()
	close(release)
	<-ended
}
