// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/harness"
	"github.com/cnireload/cnireload/test/slowsync"
)

// The databases that a pod's start writes: containerd's metadata, and the one
// of its snapshotter.
const (
	metadataDB    = "/io.containerd.metadata.v1.bolt/meta.db"
	snapshotterDB = "/io.containerd.snapshotter.v1.overlayfs/metadata.db"
)

// crowd is what one daemon does on one disk.
type crowd struct {
	run, remove, single time.Duration
	// syncs are fdatasyncs of one pod among many, of all files and of the two
	// databases.
	runSyncs, removeSyncs syncs
	// Metadata writes of somebody else: beside nothing, and while the pods
	// start and go.
	idle, running, removing []time.Duration
}

type syncs struct{ all, metadata, snapshotter float64 }

// crowds measures healthy pods that all start at once, and are all removed at
// once, on disks whose fdatasync takes that much longer, and what others who
// write metadata wait meanwhile.
func crowds(ctx context.Context, o options) (err error) {
	var slow [2]*slowsync.Server
	p, end, err := both(ctx, harness.Options{}, func(i int, d *harness.Daemon) (err error) {
		if slow[i], err = d.SlowSync(); err != nil {
			return err
		}
		// No interfaces: with 60 of ptp's the kernel is what takes the time.
		nodename, err := d.InstallCalico()
		if err != nil {
			return err
		}
		return errors.Join(useCalico(d, nodename), os.WriteFile(nodename, []byte("here"), 0o644))
	})
	if err != nil {
		return err
	}
	defer func() {
		for _, s := range slow {
			s.SetDelay(0)
		}
		err = errors.Join(err, end(), slow[0].Close(), slow[1].Close())
	}()
	for _, d := range p {
		if _, err := waitReady(ctx, d, true); err != nil {
			return err
		}
		if err := podBlock(ctx, d, "warm", 3); err != nil {
			return err
		}
	}

	fmt.Printf("%d healthy pods at once, %d rounds (%s)\n\n", o.crowd, o.rounds, load())
	fmt.Println("| fdatasync + | side | all run | syncs a pod (metadata, snapshotter) | lease meanwhile p50/p99 | all removed | syncs a pod | lease meanwhile p50/p99 | one pod alone | lease idle p50/p99 |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|---|")
	var ratios []string
	for _, delay := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond} {
		var all [2][]crowd
		for round := range o.rounds {
			for _, s := range slow {
				s.SetDelay(delay)
			}
			var c [2]crowd
			// Beside nothing, in turns.
			for b := range 20 {
				i := (b + round) % 2
				took, err := p[i].WriteMetadata(ctx, 10)
				if err != nil {
					return err
				}
				c[i].idle = append(c[i].idle, took...)
			}
			for b := range 10 {
				i := (b + round) % 2
				begin := time.Now()
				if err := podBlock(ctx, p[i], fmt.Sprintf("single-%d-", round), 1); err != nil {
					return err
				}
				c[i].single += time.Since(begin) / 5
			}
			for i := range p {
				i = (i + round) % 2
				if err := c[i].measure(ctx, p[i], slow[i], o.crowd); err != nil {
					return fmt.Errorf("%s, fdatasync + %v: %w", names[i], delay, err)
				}
				all[i] = append(all[i], c[i])
				// Their shims end a moment after them.
				if err := pause(ctx, 2*time.Second); err != nil {
					return err
				}
			}
		}
		var m [2]crowd
		for i := range p {
			m[i] = median(all[i])
			fmt.Println(m[i].row(delay, names[i]))
		}
		r := func(what string, of func(crowd) time.Duration, most float64) {
			got := ratio(of(m[1]), of(m[0]))
			verdict := "met"
			if got > most {
				verdict = "MISSED"
			}
			ratios = append(ratios, fmt.Sprintf("fdatasync + %v, %s: ratio %.2f (at most %.2f: %s)", delay, what, got, most, verdict))
		}
		most := map[time.Duration]float64{0: 1, 5 * time.Millisecond: 0.6, 20 * time.Millisecond: 0.35}[delay]
		r("all run", func(c crowd) time.Duration { return c.run }, most)
		r("all removed", func(c crowd) time.Duration { return c.remove }, most)
		r("one pod alone", func(c crowd) time.Duration { return c.single }, 1.02)
		r("idle write", func(c crowd) time.Duration { return quantile(c.idle, 0.5) }, 1.05)
		if delay == 20*time.Millisecond {
			for _, q := range []float64{0.5, 0.99} {
				r(fmt.Sprintf("write while they start, p%.0f", q*100), func(c crowd) time.Duration { return quantile(c.running, q) }, 0.2)
				r(fmt.Sprintf("write while they go, p%.0f", q*100), func(c crowd) time.Duration { return quantile(c.removing, q) }, 0.2)
			}
		}
	}
	fmt.Printf("\n%s\n", strings.Join(ratios, "\n"))
	return nil
}

// measure runs and removes so many pods at once.
func (c *crowd) measure(ctx context.Context, d *harness.Daemon, s *slowsync.Server, pods int) (err error) {
	ids := make([]string, pods)
	if c.run, c.running, c.runSyncs, err = atOnce(ctx, d, s, pods, func(i int) (err error) {
		ids[i], err = d.RunPod(ctx, harness.Pod{Name: fmt.Sprintf("p%d", i), Timeout: 10 * time.Minute})
		return err
	}); err != nil {
		return err
	}
	c.remove, c.removing, c.removeSyncs, err = atOnce(ctx, d, s, pods, func(i int) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
		defer cancel()
		if _, err := d.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: ids[i]}); err != nil {
			return err
		}
		_, err := d.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: ids[i]})
		return err
	})
	return err
}

// atOnce calls do for all at once, and writes metadata beside them. A write
// that has not ended when they have counts with the time that it takes.
func atOnce(ctx context.Context, d *harness.Daemon, s *slowsync.Server, pods int, do func(i int) error) (took time.Duration, others []time.Duration, n syncs, err error) {
	probed := make(chan error, 1)
	stop := make(chan struct{})
	before := countSyncs(s)
	begin := time.Now()
	go func() {
		for {
			t, err := d.WriteMetadata(ctx, 1)
			others = append(others, t...)
			if err != nil {
				probed <- err
				return
			}
			select {
			case <-stop:
				probed <- nil
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	errs := make([]error, pods)
	var group sync.WaitGroup
	for i := range pods {
		group.Go(func() { errs[i] = do(i) })
	}
	group.Wait()
	took = time.Since(begin)
	after := countSyncs(s)
	close(stop)
	err = errors.Join(append(errs, <-probed)...)
	each := func(a, b float64) float64 { return (a - b) / float64(pods) }
	return took, others, syncs{each(after.all, before.all), each(after.metadata, before.metadata), each(after.snapshotter, before.snapshotter)}, err
}

func countSyncs(s *slowsync.Server) syncs {
	return syncs{float64(s.Count()), float64(s.CountOf(metadataDB)), float64(s.CountOf(snapshotterDB))}
}

// median is of each figure by itself; the writes of others are put together.
func median(rounds []crowd) (m crowd) {
	pick := func(of func(crowd) time.Duration) time.Duration {
		var list []time.Duration
		for _, c := range rounds {
			list = append(list, of(c))
		}
		return quantile(list, 0.5)
	}
	m.run = pick(func(c crowd) time.Duration { return c.run })
	m.remove = pick(func(c crowd) time.Duration { return c.remove })
	m.single = pick(func(c crowd) time.Duration { return c.single })
	m.runSyncs, m.removeSyncs = rounds[len(rounds)/2].runSyncs, rounds[len(rounds)/2].removeSyncs
	for _, c := range rounds {
		m.idle = append(m.idle, c.idle...)
		m.running = append(m.running, c.running...)
		m.removing = append(m.removing, c.removing...)
	}
	return m
}

func (c crowd) row(delay time.Duration, side harness.Side) string {
	s := func(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
	two := func(d []time.Duration) string { return ms(quantile(d, 0.5)) + " / " + ms(quantile(d, 0.99)) }
	count := func(n syncs) string { return fmt.Sprintf("%.1f (%.1f, %.1f)", n.all, n.metadata, n.snapshotter) }
	return fmt.Sprintf("| %v | %s | %s | %s | %s | %s | %s | %s | %s | %s |", delay, side,
		s(c.run), count(c.runSyncs), two(c.running), s(c.remove), count(c.removeSyncs), two(c.removing), ms(c.single), two(c.idle))
}
