// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// waits measures pods that start before the agent of their network.
func waits(ctx context.Context, o options) error {
	if err := gateOpens(ctx, o.renames); err != nil {
		return err
	}
	if err := boots(ctx, o.rounds); err != nil {
		return err
	}
	return statusWithWaiters(ctx, o.status)
}

// one starts a patched daemon without a sandbox image.
func one(ctx context.Context, o harness.Options, prepare func(*harness.Daemon) error) (*harness.Daemon, error) {
	o.Side, o.NoImage = harness.Patched, true
	d, err := harness.New(o)
	if err != nil {
		return nil, err
	}
	if err := prepare(d); err != nil {
		return nil, errors.Join(err, d.Destroy())
	}
	if err := d.Start(ctx); err != nil {
		return nil, errors.Join(err, d.Destroy())
	}
	return d, nil
}

// useCalico has a daemon use the list with that nodename file.
func useCalico(d *harness.Daemon, nodename string) error {
	path := filepath.Join(d.ConfDir, "10-calico.conflist")
	if err := os.WriteFile(path+".tmp", []byte(harness.CalicoList(nodename)), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// gateOpens measures from a gate's file to NetworkReady.
func gateOpens(ctx context.Context, count int) (err error) {
	var nodename string
	d, err := one(ctx, harness.Options{}, func(d *harness.Daemon) (err error) {
		nodename, err = d.InstallCalico()
		return err
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Destroy()) }()
	var took []time.Duration
	for i := range count {
		// A gate that is open stays open: each time another file is needed.
		file := fmt.Sprintf("%s-%d", nodename, i)
		if err := useCalico(d, file); err != nil {
			return err
		}
		if err := harness.Poll(ctx, 10*time.Second, func() error {
			c, err := d.Network(ctx)
			if err == nil && !strings.Contains(c.Message, file+" ") {
				err = fmt.Errorf("want a closed gate for %s, got %v", file, c)
			}
			return err
		}); err != nil {
			return err
		}
		// At any moment between two looks at the gate.
		time.Sleep(time.Duration(i%10) * 53 * time.Millisecond)
		if err := os.WriteFile(file, []byte("here"), 0o644); err != nil {
			return err
		}
		t, err := waitReady(ctx, d, true)
		if err != nil {
			return err
		}
		took = append(took, t)
	}
	fmt.Printf("gate's file to NetworkReady, patched: median %s, largest %s of %d\n", ms(quantile(took, 0.5)), ms(slices.Max(took)), count)
	return nil
}

const bootPods = 60

// boots runs many pods at once, on stock with their agent up and with their
// agent away, on patched with an agent that comes up while they wait.
func boots(ctx context.Context, rounds int) (err error) {
	var nodename [2]string
	p, end, err := both(ctx, harness.Options{ReadyWait: "5m"}, func(i int, d *harness.Daemon) (err error) {
		if nodename[i], err = d.InstallCalico(); err != nil {
			return err
		}
		return useCalico(d, nodename[i])
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	for _, d := range p {
		// The first pod warms caches.
		if _, err := d.RunPod(ctx, harness.Pod{Name: "warm", HostNetwork: true}); err != nil {
			return err
		}
	}

	const pairs = 200
	var healthy, waited, opened, storms []time.Duration
	var idle, during [2][]time.Duration // metadata writes
	write := func(d *harness.Daemon, into *[]time.Duration) error {
		took, err := d.WriteMetadata(ctx, pairs)
		*into = append(*into, took...)
		return err
	}
	for round := range rounds {
		for i := range p {
			// Stock first and patched first in turns.
			i = (i + round) % 2
			d := p[i]
			if err := write(d, &idle[i]); err != nil {
				return err
			}
			file := fmt.Sprintf("%s-%d", nodename[i], round)
			if err := useCalico(d, file); err != nil {
				return err
			}
			if i == 0 {
				if err := os.WriteFile(file, []byte("here"), 0o644); err != nil {
					return err
				}
				begin := time.Now()
				if err := allPods(ctx, d, uint32(2*round), true); err != nil {
					return err
				}
				healthy = append(healthy, time.Since(begin))
				if err := errors.Join(d.RemovePods(ctx), useCalico(d, file+"-absent")); err != nil {
					return err
				}
				time.Sleep(time.Second)
				// One round of failures, as in the first seconds of a node.
				storm := make(chan error, 1)
				begin = time.Now()
				go func() { storm <- allPods(ctx, d, uint32(2*round+1), false) }()
				time.Sleep(100 * time.Millisecond)
				took, err := d.WriteMetadata(ctx, 20)
				if err := errors.Join(err, <-storm); err != nil {
					return err
				}
				during[i] = append(during[i], took...)
				storms = append(storms, time.Since(begin))
			} else {
				if _, err := waitReady(ctx, d, false); err != nil {
					return err
				}
				all := make(chan error, 1)
				go func() { all <- allPods(ctx, d, uint32(round), true) }()
				if err := held(ctx, d, bootPods); err != nil {
					return err
				}
				if err := write(d, &during[i]); err != nil {
					return err
				}
				if err := os.WriteFile(file, []byte("here"), 0o644); err != nil {
					return err
				}
				begin := time.Now()
				t, err := waitReady(ctx, d, true)
				if err := errors.Join(err, <-all); err != nil {
					return err
				}
				opened = append(opened, t)
				waited = append(waited, time.Since(begin))
			}
			if err := d.RemovePods(ctx); err != nil {
				return err
			}
			// Their shims end a moment after them.
			time.Sleep(time.Second)
		}
	}
	stock, patched := quantile(healthy, 0.5), quantile(waited, 0.5)
	fmt.Printf("%d pods all running: healthy on stock %s; held on patched, after their agent's file %s, ratio %.2f (medians of %d rounds; stock %s, patched %s)\n",
		bootPods, ms(stock), ms(patched), ratio(patched, stock), rounds, each(healthy), each(waited))
	fmt.Printf("  NetworkReady after the file: %s\n", each(opened))
	for i, what := range []string{fmt.Sprintf("while %d pods fail (%s)", bootPods, each(storms)), fmt.Sprintf("while %d pods wait", bootPods)} {
		id, du := quantile(idle[i], 0.5), quantile(during[i], 0.5)
		fmt.Printf("metadata write, %s, p50: idle %s, %s %s, ratio %.2f (p99 %s, %s)\n",
			names[i], ms(id), what, ms(du), ratio(du, id), ms(quantile(idle[i], 0.99)), ms(quantile(during[i], 0.99)))
	}
	return nil
}

func each(took []time.Duration) string {
	var all []string
	for _, t := range took {
		all = append(all, ms(t))
	}
	return strings.Join(all, ", ")
}

// allPods runs the pods at once. Each must run, or must fail as Calico's plugin does.
func allPods(ctx context.Context, d *harness.Daemon, attempt uint32, run bool) error {
	errs := make([]error, bootPods)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			_, err := d.RunPod(ctx, harness.Pod{Name: fmt.Sprintf("p%d", i), Attempt: attempt, Timeout: 5 * time.Minute})
			switch {
			case !run && err == nil:
				errs[i] = errors.New("a pod runs without its agent")
			case !run && strings.Contains(err.Error(), "calico/node container"):
			default:
				errs[i] = err
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// held waits until so many pods wait for their network.
func held(ctx context.Context, d *harness.Daemon, pods int) error {
	return harness.Poll(ctx, 30*time.Second, func() error {
		_, inside, err := d.Goroutines(ctx, ".(*Network).Admit")
		if err == nil && inside != pods {
			err = fmt.Errorf("%d pods wait, want %d", inside, pods)
		}
		return err
	})
}

// statusWithWaiters measures Status while a thousand pods wait for a plugin
// whose STATUS hangs.
func statusWithWaiters(ctx context.Context, count int) (err error) {
	d, err := one(ctx, harness.Options{ReadyWait: "10m"}, func(d *harness.Daemon) error {
		list := `{"cniVersion":"1.1.0","name":"bench","plugins":[{"type":"fakenet"},{"type":"portmap"}]}`
		return errors.Join(d.InstallFake("fakenet", "portmap", "loopback"),
			os.WriteFile(filepath.Join(d.ConfDir, "10-bench.conflist"), []byte(list), 0o644))
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Destroy()) }()
	if _, err := waitReady(ctx, d, true); err != nil {
		return err
	}
	if _, _, err := calls(ctx, d, 200); err != nil {
		return err
	}
	idle, blocked, err := calls(ctx, d, count)
	if err != nil || blocked > 0 {
		return errors.Join(err, fmt.Errorf("%d Status calls were blocked when idle", blocked))
	}

	if err := d.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"STATUS": {Mode: fake.Hang}}}); err != nil {
		return err
	}
	if _, err := waitReady(ctx, d, false); err != nil {
		return err
	}
	const waiters = 1000
	waitCtx, leave := context.WithCancel(ctx)
	defer leave()
	var group sync.WaitGroup
	for i := range waiters {
		group.Go(func() {
			_, err := d.RunPod(waitCtx, harness.Pod{Name: fmt.Sprintf("w%d", i), Timeout: 10 * time.Minute})
			if status.Code(err) != codes.Canceled {
				fmt.Fprintf(os.Stderr, "bench: a pod that waits ended: %v\n", err)
			}
		})
	}
	if err := held(ctx, d, waiters); err != nil {
		return err
	}
	loaded, blocked, err := calls(ctx, d, count)
	if err != nil {
		return err
	}
	for _, q := range []float64{0.5, 0.99} {
		l, id := quantile(loaded, q), quantile(idle, q)
		fmt.Printf("Status with %d waiters and a hung STATUS, patched, p%.0f of %d (%d blocked): %s, idle %s, ratio %.2f\n",
			waiters, q*100, len(loaded), blocked, ms(l), ms(id), ratio(l, id))
	}
	leave()
	group.Wait()
	return held(ctx, d, 0)
}
