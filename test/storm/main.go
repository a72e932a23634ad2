// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command storm has many pods fail at once, again and again, on stock and on
// patched containerd, and measures what that costs all others, how soon the
// pods run once all is well again, and what is left. See docs/storms.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

type options struct {
	only    string
	disks   string
	pods    int
	idle    time.Duration
	seconds time.Duration
	scale   int
	delay   time.Duration
	flood   int
	heal    time.Duration
}

func main() {
	var o options
	var names []string
	for _, s := range scenarios(0) {
		names = append(names, s.name)
	}
	flag.StringVar(&o.only, "only", "", "comma separated: "+strings.Join(names, ", "))
	flag.StringVar(&o.disks, "disks", "fast,slow", "fast: as it is; slow: with a delay of each fdatasync")
	flag.IntVar(&o.pods, "pods", 60, "pods that fail")
	flag.DurationVar(&o.idle, "idle", 5*time.Second, "how long the idle daemon is measured")
	flag.DurationVar(&o.seconds, "storm", 20*time.Second, "how long pods fail")
	flag.IntVar(&o.scale, "scale", 6, "divides the times of kubelet and containerd: retries, deadlines, bounds")
	flag.DurationVar(&o.delay, "delay", 20*time.Millisecond, "what each fdatasync takes longer on the slow disk")
	flag.IntVar(&o.flood, "flood", 1<<20, "bytes that a flooding plugin prints")
	flag.DurationVar(&o.heal, "heal", 4*time.Minute, "how long pods may take to run when all is well again")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, o); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if o.pods < 1 || o.pods > 200 || o.scale < 1 || o.idle <= 0 || o.seconds <= 0 || o.flood < 0 || o.heal <= 0 {
		return errors.New("want 1 to 200 pods, a scale of 1 or more, and times above 0")
	}
	if err := harness.Preflight("make bench-storm", harness.Stock, harness.Patched); err != nil {
		return err
	}
	if err := harness.Sweep(); err != nil {
		return err
	}
	var all []outcome
	fmt.Printf("%d pods, storms of %v, times of kubelet and containerd divided by %d; %s\n", o.pods, o.seconds, o.scale, load())
	for _, disk := range strings.Split(o.disks, ",") {
		var delay time.Duration
		switch disk {
		case "fast":
		case "slow":
			delay = o.delay
		default:
			return fmt.Errorf("-disks %q: want fast, slow or both", o.disks)
		}
		for _, s := range scenarios(o.flood) {
			if o.only != "" && !slices.Contains(strings.Split(o.only, ","), s.name) {
				continue
			}
			var pair outcome
			pair.scenario, pair.disk = s, disk
			for i, side := range []harness.Side{harness.Stock, harness.Patched} {
				begin := time.Now()
				m, err := storm(ctx, o, s, side, delay)
				if err != nil {
					// What is done is worth seeing.
					report(all)
					return fmt.Errorf("%s, %s disk, %s: %w", s.name, disk, side, err)
				}
				pair.sides[i] = m
				fmt.Fprintf(os.Stderr, "storm: %s, %s disk, %s: done in %v; %s\n", s.name, disk, side, time.Since(begin).Round(time.Second), load())
			}
			pair.print(os.Stdout)
			all = append(all, pair)
		}
	}
	if len(all) == 0 {
		return fmt.Errorf("nothing to do for -only %q", o.only)
	}
	report(all)
	fmt.Println(load())
	return nil
}

func report(all []outcome) {
	if len(all) > 0 {
		printTable(os.Stdout, all)
		printTargets(os.Stdout, all)
	}
}

// load tells how busy the machine is.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	return "load average " + strings.Join(strings.Fields(string(b))[:3], " ")
}

// measured is what one storm on one side brought.
type measured struct {
	idle phase
	// first is the time until each pod was tried once: all of them start at the
	// same moment, which on a small machine costs more than what goes wrong.
	first phase
	storm phase // after that
	// writes is the number of metadata's write transactions of one failed
	// attempt, on its own.
	writes float64
	// fails counts the attempts that failed in the storm, by kind.
	fails       map[string]int
	lasted      time.Duration
	firstLasted time.Duration
	// failsAfter are those after the cure.
	failsAfter map[string]int
	// running is how many pods ran when the time was over, and healed how long
	// that took them.
	running int
	healed  time.Duration
	// goroutines and rss before the storm, and after it with no pods.
	goroutinesBefore, goroutinesAfter int
	rssBefore                         int64
	leaked                            int
	removal                           error
}

// storm measures one scenario on one side.
func storm(ctx context.Context, o options, s scenario, side harness.Side, delay time.Duration) (m measured, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	scale := time.Duration(o.scale)
	options := harness.Options{
		Side:       side,
		PrivateNet: true, // ptp makes interfaces
		ReadyWait:  (readyWait / scale).String(),
		Timeouts:   map[string]string{"io.containerd.timeout.cri.defercleanup": (cleanupBound / scale).String()},
	}
	if side == harness.Patched {
		options.Timeouts["io.containerd.timeout.cri.cni.add"] = (addBound / scale).String()
		options.Timeouts["io.containerd.timeout.cri.cni.del"] = (delBound / scale).String()
	}
	d, err := harness.New(options)
	if err != nil {
		return m, err
	}
	slow, err := d.SlowSync()
	if err != nil {
		return m, errors.Join(err, d.Destroy())
	}
	defer func() {
		slow.SetDelay(0)
		err = errors.Join(err, d.Destroy(), slow.Close())
	}()
	if err := s.install(d); err != nil {
		return m, err
	}
	if err := d.Start(ctx); err != nil {
		return m, err
	}
	if err := harness.Poll(ctx, 20*time.Second, func() error {
		c, err := d.Network(ctx)
		if err == nil && !c.Ready {
			err = errors.New(c.String())
		}
		return err
	}); err != nil {
		return m, err
	}
	client, end, err := d.NewClient()
	if err != nil {
		return m, err
	}
	defer end()
	k := &kubelet{d: d, client: client, scale: scale, churn: s.churn, healed: make(chan struct{}), running: map[string]time.Time{}, fails: map[string]int{}, once: map[string]bool{}}

	// Idle, once what the first pod costs is paid.
	if _, err := d.RunPod(ctx, harness.Pod{Name: "warm"}); err != nil {
		return m, err
	}
	if err := k.removeAll(ctx); err != nil {
		return m, err
	}
	slow.SetDelay(delay)
	p, err := startProbes(ctx, d, s.gate)
	if err != nil {
		return m, err
	}
	defer p.end()
	wait(ctx, o.idle)
	// A few pods, on a machine that is busy otherwise, too.
	for begin := time.Now(); p.count(otherPod) < 5 && time.Since(begin) < time.Minute; {
		wait(ctx, 100*time.Millisecond)
	}
	m.idle = p.next()
	p.end()
	slow.SetDelay(0)
	if err := k.removeAll(ctx); err != nil {
		return m, err
	}
	slow.SetDelay(delay)
	if m.goroutinesBefore, m.rssBefore, err = still(ctx, d); err != nil {
		return m, err
	}

	if err := s.hurt(d); err != nil {
		return m, err
	}
	if s.failsFast {
		wait(ctx, 2*time.Second) // until the new list is in use
		if m.writes, err = k.writes(ctx, 5); err != nil {
			return m, err
		}
	}
	if p, err = startProbes(ctx, d, s.gate); err != nil {
		return m, err
	}
	defer p.end()
	podCtx, stopPods := context.WithCancel(ctx)
	defer stopPods()
	k.start(podCtx, o.pods)
	stormBegin, first := time.Now(), true
	for n := 0; ; n++ {
		if first && (k.tried() >= o.pods || s.tried(d) >= o.pods && k.tried() >= s.ending(o.pods) || time.Since(stormBegin) >= 10*o.seconds) {
			m.first, m.firstLasted = p.next(), time.Since(stormBegin)
			k.failed()
			stormBegin, first = time.Now(), false
		}
		if !first && time.Since(stormBegin) >= o.seconds {
			break
		}
		if s.touch {
			if err := os.WriteFile(filepath.Join(d.ConfDir, "unrelated"), fmt.Append(nil, n), 0o644); err != nil {
				return m, err
			}
		}
		wait(ctx, time.Second)
		if ctx.Err() != nil {
			return m, ctx.Err()
		}
	}
	m.storm = p.next()
	m.fails, m.lasted = k.failed(), time.Since(stormBegin)

	if err := s.heal(d); err != nil {
		return m, err
	}
	begin := time.Now()
	close(k.healed)
	for m.running < o.pods && time.Since(begin) < o.heal && ctx.Err() == nil {
		wait(ctx, 10*time.Millisecond)
		m.running, _ = k.state()
	}
	m.healed, m.failsAfter = time.Since(begin), k.failed()
	peak := p.next()
	for _, f := range []phase{m.first, peak} {
		m.storm.goroutines, m.storm.rss = max(m.storm.goroutines, f.goroutines), max(m.storm.rss, f.rss)
	}
	p.end()
	if ctx.Err() != nil {
		return m, ctx.Err()
	}

	// What is left when there are no pods any more.
	slow.SetDelay(0)
	stopPods()
	k.pods.Wait()
	m.removal = k.removeAll(ctx)
	_ = harness.Poll(ctx, 15*time.Second, func() error {
		if m.leaked, err = s.leaked(d); err == nil && m.leaked > 0 {
			err = fmt.Errorf("%d addresses are held", m.leaked)
		}
		return err
	})
	m.goroutinesAfter, _, err = still(ctx, d)
	return m, err
}

// still waits until the daemon's goroutines become no fewer.
func still(ctx context.Context, d *harness.Daemon) (goroutines int, rss int64, err error) {
	last := time.Now()
	for begin := time.Now(); time.Since(last) < 3*time.Second && time.Since(begin) < 20*time.Second; wait(ctx, 200*time.Millisecond) {
		all, _, err := d.Goroutines(ctx, "none")
		if err != nil {
			return 0, 0, err
		}
		if goroutines == 0 || all < goroutines {
			goroutines, last = all, time.Now()
		}
	}
	rss, err = d.RSS()
	return goroutines, rss, err
}

// writes tells how many write transactions one failed attempt takes, from a few
// that are made beside nothing else.
func (k *kubelet) writes(ctx context.Context, attempts int) (float64, error) {
	before, err := k.d.BoltTx()
	if err != nil {
		return 0, err
	}
	errs := make(chan error, attempts)
	for i := range attempts {
		go func() {
			_, err := k.run(ctx, fmt.Sprint(alonePods, i), 0)
			errs <- err
		}()
	}
	for range attempts {
		if err := <-errs; err == nil {
			return 0, errors.New("a pod runs that should fail")
		}
	}
	// What is written a moment later counts, too.
	wait(ctx, time.Second)
	after, err := k.d.BoltTx()
	return float64(after-before) / float64(attempts), err
}
