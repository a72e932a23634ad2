// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// list is two fake plugins; the number makes its content differ.
func list(n int) []byte {
	return fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"bench","plugins":[{"type":"fakenet","n":%d},{"type":"portmap"}]}`, n)
}

// statuses measures Status idle, and while one ADD hangs and the conf dir is
// written ten times a second.
func statuses(ctx context.Context, o options) (err error) {
	p, end, err := both(ctx, harness.Options{NoImage: true}, func(_ int, d *harness.Daemon) error {
		if err := d.InstallFake("fakenet", "portmap", "loopback"); err != nil {
			return err
		}
		return errors.Join(
			os.WriteFile(filepath.Join(d.ConfDir, "10-bench.conflist"), list(0), 0o644),
			d.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"ADD": {Mode: fake.Hang}}}))
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()

	const blocks = 10
	var idle [2][]time.Duration
	for _, d := range p {
		if _, err := waitReady(ctx, d, true); err != nil {
			return err
		}
		if _, _, err := calls(ctx, d, 200); err != nil {
			return err
		}
	}
	for range blocks {
		for i, d := range p {
			took, _, err := calls(ctx, d, o.status/blocks)
			if err != nil {
				return err
			}
			idle[i] = append(idle[i], took...)
		}
	}
	for _, q := range []float64{0.5, 0.99} {
		stock, patched := quantile(idle[0], q), quantile(idle[1], q)
		fmt.Printf("Status idle, p%.0f of %d: stock %s, patched %s, ratio %.2f\n", q*100, len(idle[0]), ms(stock), ms(patched), ratio(patched, stock))
	}

	// One after the other: the load of one side must not slow the other.
	for i, d := range p {
		took, blocked, writes, err := loaded(ctx, d, o.status)
		if err != nil {
			return err
		}
		if blocked > 0 {
			fmt.Printf("Status loaded, %s: blocked: %d of %d calls did not answer within %v\n", names[i], blocked, len(took)+blocked, callDeadline)
			continue
		}
		for _, q := range []float64{0.5, 0.99} {
			l, id := quantile(took, q), quantile(idle[i], q)
			fmt.Printf("Status loaded, %s, p%.0f of %d: %s, idle %s, ratio loaded/idle %.2f (%d writes)\n",
				names[i], q*100, len(took), ms(l), ms(id), ratio(l, id), writes)
		}
	}
	return nil
}

// loaded measures Status with a hanging ADD and writes in the conf dir.
func loaded(ctx context.Context, d *harness.Daemon, count int) (took []time.Duration, blocked, writes int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	hung, written := make(chan struct{}), make(chan int, 1)
	defer func() { cancel(); <-hung }()
	go func() {
		defer close(hung)
		_, _ = d.RunPod(ctx, harness.Pod{Name: "hangs", Timeout: 10 * time.Minute})
	}()
	if err := harness.Poll(ctx, 10*time.Second, func() error {
		calls, err := d.Fake.Calls()
		if err == nil && (len(calls) == 0 || !added(calls)) {
			err = errors.New("the hanging ADD has not begun")
		}
		return err
	}); err != nil {
		return nil, 0, 0, err
	}
	stop := make(chan struct{})
	go func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		n := 0
		for ; ; n++ {
			// The list in use and a file that means nothing, in turns.
			if n%2 == 0 {
				_ = os.WriteFile(filepath.Join(d.ConfDir, "10-bench.conflist"), list(n), 0o644)
			} else {
				_ = os.WriteFile(filepath.Join(d.ConfDir, "unrelated"), []byte("x"), 0o644)
			}
			select {
			case <-stop:
				written <- n + 1
				return
			case <-tick.C:
			}
		}
	}()
	time.Sleep(500 * time.Millisecond)
	took, blocked, err = calls(ctx, d, count)
	close(stop)
	return took, blocked, <-written, err
}

func added(calls []fake.Call) bool {
	for _, c := range calls {
		if c.Plugin == "fakenet" && c.Command == "ADD" {
			return true
		}
	}
	return false
}

const callDeadline = 2 * time.Second

// calls measures so many Status calls. It gives up after three that did not
// answer.
func calls(ctx context.Context, d *harness.Daemon, count int) (took []time.Duration, blocked int, err error) {
	for range count {
		call, cancel := context.WithTimeout(ctx, callDeadline)
		begin := time.Now()
		_, err := d.Network(call)
		cancel()
		switch {
		case status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil:
			if blocked++; blocked == 3 {
				return took, blocked, nil
			}
		case err != nil:
			return took, blocked, err
		default:
			took = append(took, time.Since(begin))
		}
	}
	return took, blocked, nil
}
