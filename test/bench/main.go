// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench compares the patched containerd with the stock one, both
// running at the same time and measured in turns: how soon a new network is
// ready, how long Status takes, what sandboxes cost one by one and all at once, what
// being idle costs, and how soon a change is in use by the way in which it arrives.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

type options struct {
	renames int
	status  int
	pods    int
	blocks  int
	rounds  int
	crowd   int

	arrivals int
	idle     time.Duration
	only     string
}

func main() {
	var o options
	flag.IntVar(&o.renames, "renames", 50, "renames to ready, each way and side")
	flag.IntVar(&o.status, "status", 10000, "Status calls, idle and loaded, each side")
	flag.IntVar(&o.pods, "pods", 200, "sandboxes, each side")
	flag.IntVar(&o.blocks, "blocks", 40, "blocks the sandboxes are run in, the sides taking turns")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds of many pods that wait, or fail, or start at once, each side")
	flag.IntVar(&o.crowd, "crowd", 60, "healthy pods that start at once")
	flag.IntVar(&o.arrivals, "arrivals", 30, "times that a change arrives in each way")
	flag.DurationVar(&o.idle, "idle", time.Minute, "how long the daemons have nothing to do")
	flag.StringVar(&o.only, "only", "", "comma separated: rename, status, pods, crowd, wait, idle, arrival")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, o); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.renames < 1 || o.status < 100 || o.blocks < 1 || o.pods < o.blocks || o.rounds < 1 || o.crowd < 1 || o.crowd > 200 || o.arrivals < 1 || o.idle <= 0 {
		return errors.New("want at least 1 rename, 100 Status calls, 1 round, 1 to 200 pods at once, 1 arrival, some idle time and one pod in each of at least 1 block")
	}
	if err := harness.Preflight("make bench", harness.Stock, harness.Patched); err != nil {
		return err
	}
	if err := harness.Sweep(); err != nil {
		return err
	}
	parts := []struct {
		name string
		run  func(context.Context, options) error
	}{{"rename", renames}, {"status", statuses}, {"pods", sandboxes}, {"crowd", crowds}, {"wait", waits}, {"idle", idle}, {"arrival", arrivals}}
	ran := false
	for _, p := range parts {
		if o.only != "" && !slices.Contains(strings.Split(o.only, ","), p.name) {
			continue
		}
		ran = true
		if err := p.run(ctx, o); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	if !ran {
		return fmt.Errorf("nothing to do for -only %q: want rename, status, pods, crowd, wait, idle or arrival", o.only)
	}
	return nil
}

// pair is both daemons, stock first.
type pair [2]*harness.Daemon

var names = [2]harness.Side{harness.Stock, harness.Patched}

// both starts a daemon of each side; end stops them.
func both(ctx context.Context, o harness.Options, prepare func(side int, d *harness.Daemon) error) (p pair, end func() error, err error) {
	end = func() error {
		var errs []error
		for _, d := range p {
			if d != nil {
				errs = append(errs, d.Destroy())
			}
		}
		return errors.Join(errs...)
	}
	for i, side := range names {
		o.Side = side
		d, err := harness.New(o)
		if err != nil {
			return p, end, errors.Join(err, end())
		}
		p[i] = d
		if err := prepare(i, d); err != nil {
			return p, end, errors.Join(err, end())
		}
		if err := d.Start(ctx); err != nil {
			return p, end, errors.Join(err, end())
		}
	}
	return p, end, nil
}

// realPlugins copies plugins to new inodes in the daemon's bin dir.
func realPlugins(d *harness.Daemon, plugins ...string) error {
	for _, name := range plugins {
		src, err := harness.Plugin(name)
		if err != nil {
			return err
		}
		if err := harness.Install(src, filepath.Join(d.BinDirs[0], name)); err != nil {
			return err
		}
	}
	return nil
}

// ptp is a list with two plugins: ptp and its IPAM host-local.
func ptp(cidr netip.Prefix) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "bench",
  "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}}]
}
`, cidr)
}

// waitReady polls Status every millisecond, as a client that is in a hurry.
func waitReady(ctx context.Context, d *harness.Daemon, ready bool) (time.Duration, error) {
	begin := time.Now()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		c, err := d.Network(ctx)
		if err != nil {
			return 0, err
		}
		if c.Ready == ready {
			return time.Since(begin), nil
		}
		if time.Since(begin) > 30*time.Second {
			return 0, fmt.Errorf("%s: want NetworkReady %t, got %v", d.Side, ready, c)
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
		}
	}
}

// renames measures from the rename of a good list to NetworkReady true.
func renames(ctx context.Context, o options) (err error) {
	hostNet, err := harness.NewHostNet()
	if err != nil {
		return err
	}
	list := []byte(ptp(hostNet.CIDR))
	p, end, err := both(ctx, harness.Options{NoImage: true}, func(_ int, d *harness.Daemon) error {
		return realPlugins(d, "loopback", "ptp", "host-local")
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()

	for _, fresh := range []bool{true, false} {
		var took [2][]time.Duration
		for range o.renames {
			for i, d := range p {
				if fresh {
					if err := realPlugins(d, "ptp", "host-local"); err != nil {
						return err
					}
				}
				path := filepath.Join(d.ConfDir, "10-bench.conflist")
				if err := os.WriteFile(path+".tmp", list, 0o644); err != nil {
					return err
				}
				// What the write of the temporary file causes is over before
				// the clock starts.
				time.Sleep(50 * time.Millisecond)
				if _, err := waitReady(ctx, d, false); err != nil {
					return err
				}
				if err := os.Rename(path+".tmp", path); err != nil {
					return err
				}
				t, err := waitReady(ctx, d, true)
				if err != nil {
					return err
				}
				took[i] = append(took[i], t)
				if err := os.Remove(path); err != nil {
					return err
				}
				if _, err := waitReady(ctx, d, false); err != nil {
					return err
				}
			}
		}
		what := "plugins known"
		if fresh {
			what = "two plugins never probed"
		}
		stock, patched := quantile(took[0], 0.5), quantile(took[1], 0.5)
		fmt.Printf("rename to NetworkReady, %s: stock %s, patched %s, difference %s, ratio %.2f (median of %d)\n",
			what, ms(stock), ms(patched), ms(patched-stock), ratio(patched, stock), o.renames)
	}
	return nil
}

// sandboxes measures pods run and removed one after the other.
func sandboxes(ctx context.Context, o options) (err error) {
	hostNet, err := harness.NewHostNet()
	if err != nil {
		return err
	}
	// Two halves of one free range, so that the sides do not meet.
	var cidrs [2]netip.Prefix
	cidrs[0] = netip.PrefixFrom(hostNet.CIDR.Addr(), 25)
	second := hostNet.CIDR.Addr().As4()
	second[3] = 128
	cidrs[1] = netip.PrefixFrom(netip.AddrFrom4(second), 25)

	p, end, err := both(ctx, harness.Options{}, func(i int, d *harness.Daemon) error {
		if err := os.WriteFile(filepath.Join(d.ConfDir, "10-bench.conflist"), []byte(ptp(cidrs[i])), 0o644); err != nil {
			return err
		}
		return realPlugins(d, "loopback", "ptp", "host-local")
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end(), hostNet.Restore()) }()

	for _, d := range p {
		if _, err := waitReady(ctx, d, true); err != nil {
			return err
		}
		// The first pods warm caches on both sides.
		if err := podBlock(ctx, d, "warm", 3); err != nil {
			return err
		}
	}
	var wall, cpu [2][]time.Duration
	for b := range o.blocks {
		// Who goes first changes, so that a machine that gets slower or faster
		// favours nobody.
		for _, i := range [][]int{{0, 1}, {1, 0}}[b%2] {
			d := p[i]
			before, err := cpuTime(d.PID())
			if err != nil {
				return err
			}
			begin := time.Now()
			if err := podBlock(ctx, d, fmt.Sprintf("b%d-", b), o.pods/o.blocks); err != nil {
				return err
			}
			wall[i] = append(wall[i], time.Since(begin))
			after, err := cpuTime(d.PID())
			if err != nil {
				return err
			}
			cpu[i] = append(cpu[i], after-before)
		}
	}
	for _, m := range []struct {
		what string
		took [2][]time.Duration
	}{{"wall", wall}, {"CPU of containerd and its plugins", cpu}} {
		stock, patched := quantile(m.took[0], 0.5), quantile(m.took[1], 0.5)
		var ratios []float64
		for b := range m.took[0] {
			ratios = append(ratios, ratio(m.took[1][b], m.took[0][b]))
		}
		slices.Sort(ratios)
		fmt.Printf("%d sandboxes, %s: stock %s, patched %s (medians of %d blocks of %d), ratio %.3f (median of neighbouring blocks, half of them in %.3f to %.3f), of the sums %.3f\n",
			o.pods/o.blocks*o.blocks, m.what, ms(stock), ms(patched), o.blocks, o.pods/o.blocks,
			ratios[len(ratios)/2], ratios[len(ratios)/4], ratios[len(ratios)*3/4], ratio(sum(m.took[1]), sum(m.took[0])))
	}
	var rss [2]float64
	for i, d := range p {
		if rss[i], err = peakRSS(d.PID()); err != nil {
			return err
		}
	}
	fmt.Printf("%d sandboxes, peak RSS: stock %.1f MiB, patched %.1f MiB, difference %+.1f MiB, ratio %.3f\n",
		o.pods/o.blocks*o.blocks, rss[0], rss[1], rss[1]-rss[0], rss[1]/rss[0])
	return nil
}

func podBlock(ctx context.Context, d *harness.Daemon, name string, pods int) error {
	for i := range pods {
		id, err := d.RunPod(ctx, harness.Pod{Name: fmt.Sprintf("%s%d", name, i)})
		if err != nil {
			return err
		}
		if err := d.RemovePod(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// cpuTime is what a process and the children it has waited for have used.
func cpuTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return 0, fmt.Errorf("/proc/%d/stat: want more fields: %s", pid, b)
	}
	var ticks, n int64
	for _, f := range fields[11:15] {
		if _, err := fmt.Sscan(f, &n); err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		ticks += n
	}
	hz, err := ticksPerSecond()
	return time.Duration(ticks) * time.Second / time.Duration(hz), err
}

func ticksPerSecond() (int64, error) {
	out, err := exec.Command("getconf", "CLK_TCK").Output()
	if err != nil {
		return 100, nil // what every Linux has told user space for decades
	}
	var hz int64
	_, err = fmt.Sscan(string(out), &hz)
	return hz, err
}

// peakRSS is the largest resident set of a process so far, in MiB.
func peakRSS(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			var kib float64
			_, err := fmt.Sscan(value, &kib)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no VmHWM", pid)
}

func quantile(in []time.Duration, q float64) time.Duration {
	s := slices.Sorted(slices.Values(in))
	return s[min(len(s)-1, int(float64(len(s))*q))]
}

func sum(in []time.Duration) (total time.Duration) {
	for _, d := range in {
		total += d
	}
	return total
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond)) }
