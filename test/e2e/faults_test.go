// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

const (
	addKey     = "io.containerd.timeout.cri.cni.add"
	delKey     = "io.containerd.timeout.cri.cni.del"
	cleanupKey = "io.containerd.timeout.cri.defercleanup"
	// busy is for what takes a moment on a machine that has one to spare.
	busy = time.Minute
	// childLives is far longer than anybody waits, in milliseconds.
	childLives = 120000
)

// bounds are [timeouts] that stock does not know.
func bounds(side harness.Side, keys map[string]string) map[string]string {
	if side == harness.Stock {
		return nil
	}
	return keys
}

// fakes lists the processes of fake plugins and of their children that run a
// verb; "" means any.
func (n *node) fakes(verb string) (pids []int) {
	n.t.Helper()
	all, err := harness.Processes(n.Base)
	assert.NilError(n.t, err)
	for _, pid := range all {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && strings.Contains(string(b), "CNI_COMMAND="+verb) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// noFakes waits until no plugin runs.
func (n *node) noFakes(within time.Duration) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		if pids := n.fakes(""); len(pids) > 0 {
			return fmt.Errorf("plugins still run: %v", pids)
		}
		return nil
	}))
}

// endFakes ends plugins and their children.
func (n *node) endFakes() {
	n.t.Helper()
	for _, pid := range n.fakes("") {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			n.t.Errorf("kill %d: %v", pid, err)
		}
	}
}

// called waits until a plugin has been called with a verb.
func (n *node) called(plugin, verb string) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), busy, func() error {
		if n.calls(plugin, verb) == 0 {
			return fmt.Errorf("no %s of %s yet", verb, plugin)
		}
		return nil
	}))
}

// runs runs a pod until it works, as the kubelet does, and tells how long that took.
func (n *node) runs(name string, within time.Duration) time.Duration {
	n.t.Helper()
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		_, err := n.RunPod(n.t.Context(), harness.Pod{Name: name})
		return err
	}))
	return time.Since(begin)
}

// A plugin whose STATUS hangs.
// https://github.com/siderolabs/talos/issues/9984
// https://github.com/containerd/go-cni/pull/123
func TestL2(t *testing.T) {
	sides(t, "talos#9984, go-cni#123", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true,
			Timeouts: bounds(side, map[string]string{"io.containerd.timeout.cri.cni.status": "3s"})})
		n.answers("fakenet", "STATUS", fake.Behavior{Mode: fake.Hang})
		path := n.conf("10-c11.conflist")
		n.write(path, c11("c11"))
		n.start()
		all, _, err := n.Goroutines(t.Context(), "none")
		assert.NilError(t, err)

		if side == harness.Stock {
			const polls = 5
			poll := func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				_, err := n.Network(ctx)
				assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			}
			for range polls {
				poll()
			}
			after, _, err := n.Goroutines(t.Context(), "none")
			assert.NilError(t, err)
			assert.Assert(t, after >= all+polls, "%d goroutines, then %d", all, after)
			processes := len(n.fakes(""))
			assert.Assert(t, processes >= polls, "%d", processes)
			n.write(path, c10("c10"))
			time.Sleep(quiet)
			poll()
			n.untidy = true
			return fmt.Sprintf("Status never answers; after %d polls %d goroutines more and %d processes; mending the config does not help", polls, after-all, processes)
		}

		most := 0
		for end := time.Now().Add(7 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			c := n.network()
			assert.Assert(t, !c.Ready, "%v", c)
			most = max(most, len(n.fakes("STATUS")))
		}
		// One that is killed may be seen for a moment beside the next one.
		assert.Assert(t, most <= 2, "%d processes", most)
		message := n.notReady(busy, `"fakenet"`, "STATUS")
		slowest := n.statusLatency(100)
		assert.Assert(t, slowest < 4*time.Second, "%v", slowest)
		after, _, err := n.Goroutines(t.Context(), "none")
		assert.NilError(t, err)
		assert.Assert(t, after < all+15, "%d goroutines, then %d", all, after)
		n.write(path, c10("c10"))
		took := n.using("c10", busy)
		n.waitReady(true, busy)
		n.added(harness.Pod{Name: "a"})
		return fmt.Sprintf("Status p99 %s, false: %s; %d process(es) of STATUS at most; mended config in use after %s",
			slowest.Round(10*time.Microsecond), n.cause(message), most, short(took))
	})
}

// A child of the plugin outlives it and holds its output.
// https://github.com/containernetworking/cni/issues/550
// https://github.com/containernetworking/cni/issues/567
// https://github.com/containerd/containerd/pull/9627
func TestL3(t *testing.T) {
	sides(t, "cni#550, cni#567, containerd#9627", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, Timeouts: bounds(side, map[string]string{delKey: "2s"})})
		const lives = 40 * time.Second
		hang := fake.Behavior{Mode: fake.Hang, Child: "fork", ChildMillis: int(lives / time.Millisecond), Pod: "a"}
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"ADD": hang, "DEL": hang}}))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, busy)
		_, err := n.RunPod(t.Context(), harness.Pod{Name: "a", Timeout: 5 * time.Second})
		assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
		gaveUp := time.Now()
		if side == harness.Stock {
			for time.Since(gaveUp) < 15*time.Second {
				assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "is reserved for"))
				time.Sleep(200 * time.Millisecond)
			}
			n.untidy = true
			return fmt.Sprintf("name reserved 15 s after the caller gave up, the plugin's child lives on (%d processes)", len(n.fakes("")))
		}
		var reserved error
		assert.NilError(t, harness.Poll(t.Context(), busy, func() error {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "a", Timeout: time.Second})
			if strings.Contains(fmt.Sprint(err), "is reserved for") {
				reserved = err
				return err
			}
			return nil
		}))
		free := time.Since(gaveUp)
		assert.Assert(t, free < lives/2, "name reserved for %v: %v", free, reserved)
		n.noFakes(busy)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		n.runs("a", busy)
		return fmt.Sprintf("name free %s after the caller gave up (DEL's bound 2s), process group dead, the retry runs", short(free))
	})
}

// The removal after a failed ADD hangs.
// https://github.com/containerd/containerd/issues/5768
// https://github.com/kubernetes/kubernetes/issues/141599
func TestL4(t *testing.T) {
	sides(t, "containerd#5768, k8s#141599", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, Timeouts: bounds(side, map[string]string{delKey: "5s"})})
		assert.NilError(t, n.Fake.Set("portmap", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Mode: fake.Fail, Code: 100, Msg: "portmap says no"},
			"DEL": {Mode: fake.Hang},
		}}))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, busy)
		if side == harness.Stock {
			// containerd's own bound for cleaning up is a minute.
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "a", Timeout: 10 * time.Second})
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "is reserved for"))
			n.untidy = true
			return `no answer within 10 s, then "name is reserved"`
		}
		begin := time.Now()
		message := n.refused(harness.Pod{Name: "a"})
		took := time.Since(begin)
		assert.Assert(t, cmp.Contains(message, "portmap says no"))
		assert.Assert(t, took < 45*time.Second, "%v", took)
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "portmap says no"))
		// What fakenet has allocated is not forgotten.
		owed := n.owed(2, busy)
		assert.NilError(t, n.Fake.Set("portmap", fake.State{}))
		n.owed(0, 2*time.Minute)
		assert.Equal(t, n.leases(), 0)
		n.runs("a", busy)
		return fmt.Sprintf("ADD's own error after %s (DEL's bound 5s), the next try says the same; %d removals owed, done when DEL works, 0 addresses leaked", short(took), owed.Counts["tombstones"])
	})
}

// A plugin that prints a lot, and fails.
func TestL5(t *testing.T) {
	const printed = 100 << 20
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, busy)
		n.added(harness.Pod{Name: "warm"})
		logged := func() int64 {
			info, err := os.Stat(n.LogPath())
			assert.NilError(t, err)
			return info.Size()
		}
		before, log := n.peakRSS(), logged()
		const attempts = 3
		longest := 0
		for _, stream := range []string{"stdout", "stderr"} {
			n.answers("fakenet", "ADD", fake.Behavior{Mode: fake.Flood, Bytes: printed, Stream: stream, Exit: 1})
			for i := range attempts {
				_, err := n.RunPod(t.Context(), harness.Pod{Name: "a", Attempt: uint32(i), Timeout: 2 * time.Minute})
				assert.Assert(t, err != nil)
				if side == harness.Stock {
					more := n.peakRSS() - before
					assert.Assert(t, more > printed, "RSS %+d MiB", more>>20)
					n.untidy = true
					text := err.Error()
					return fmt.Sprintf("RSS %+d MiB, containerd's log %+d MiB; the caller sees: %s", more>>20, (logged()-log)>>20, text[:min(len(text), 60)])
				}
				longest = max(longest, len(status.Convert(err).Message()))
			}
		}
		more := n.peakRSS() - before
		assert.Assert(t, more <= 20<<20, "RSS %+d MiB", more>>20)
		assert.Assert(t, longest <= 4<<10, "an error has %d bytes", longest)
		assert.Assert(t, logged()-log < 1<<20, "containerd's log grew by %d bytes", logged()-log)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		n.added(harness.Pod{Name: "a"})
		return fmt.Sprintf("RSS %+d MiB after %d floods of stdout and of stderr, errors of at most %d bytes", more>>20, attempts, longest)
	})
}

// peakRSS is the daemon's largest resident set so far.
func (n *node) peakRSS() int64 {
	n.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.PID()))
	assert.NilError(n.t, err)
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	var kib int64
	_, err = fmt.Sscan(rest, &kib)
	assert.NilError(n.t, err)
	return kib << 10
}

// Everything at once.
// https://github.com/containerd/containerd/issues/11186
func TestL12(t *testing.T) {
	during := 10 * time.Second
	if os.Getenv("CNIRELOAD_LONG") == "1" {
		during = 30 * time.Second
	}
	sides(t, "containerd#11186", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		path := n.conf("10-c10.conflist")
		n.write(path, c10("c10"))
		n.start()
		n.waitReady(true, busy)
		ctx, cancel := context.WithTimeout(t.Context(), during)
		defer cancel()
		var writes, statuses, pods, refused atomic.Int64
		var mu sync.Mutex
		var errs []error
		fail := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}
		// The calls themselves are not cut off when the time is over: each must answer.
		whole := t.Context()
		pod := func(worker int) func() {
			return func() {
				for i := 0; ctx.Err() == nil; i++ {
					id, err := n.RunPod(whole, harness.Pod{Name: fmt.Sprintf("w%d-%d", worker, i), Timeout: time.Minute})
					if err != nil {
						// Stock has no network while it reads the file.
						if side == harness.Stock && strings.Contains(err.Error(), "cni plugin not initialized") {
							refused.Add(1)
							continue
						}
						fail(fmt.Errorf("run a pod: %w", err))
						return
					}
					for {
						err = n.RemovePod(whole, id)
						if side == harness.Stock && err != nil && strings.Contains(err.Error(), "cni plugin not initialized") {
							refused.Add(1)
							continue
						}
						break
					}
					if err != nil {
						fail(fmt.Errorf("remove a pod: %w", err))
						return
					}
					pods.Add(1)
				}
			}
		}
		parallel(
			func() {
				for i := 0; ctx.Err() == nil; i++ {
					content := conflist("c10", "1.0.0", []string{"fakenet", "portmap"}, "n", fmt.Sprint(i))
					if err := errors.Join(os.WriteFile(path+".tmp", []byte(content), 0o644), os.Rename(path+".tmp", path)); err != nil {
						fail(err)
						return
					}
					writes.Add(1)
					time.Sleep(during / 250)
				}
			},
			func() {
				for ctx.Err() == nil {
					c, err := n.Network(whole)
					if err == nil && !c.Ready && side == harness.Patched {
						err = errors.New(c.String())
					}
					if err != nil {
						fail(fmt.Errorf("status: %w", err))
						return
					}
					statuses.Add(1)
					time.Sleep(5 * time.Millisecond)
				}
			},
			pod(0), pod(1), pod(2),
		)()
		assert.NilError(t, errors.Join(errs...))
		assert.Assert(t, writes.Load() > 20 && pods.Load() > 0, "%d writes, %d pods", writes.Load(), pods.Load())
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("%d writes, %d pods run and removed, %d Status calls, all answered; %d times no network", writes.Load(), pods.Load(), statuses.Load(), refused.Load())
	})
}

// Other things that a plugin can do: neighbours of L3 to L5.
func TestFaults(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	begin := func(t *testing.T, o harness.Options) *node {
		o.Side, o.NoImage = harness.Patched, true
		n := prepare(t, o)
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, busy)
		return n
	}
	// well checks that the node is as it should be: the name is free, pods get
	// their network, nothing is left.
	well := func(t *testing.T, n *node) {
		t.Helper()
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		n.added(harness.Pod{Name: "a"})
		n.owed(0, 2*time.Minute)
		assert.Equal(t, n.leases(), 0)
		n.noFakes(busy)
	}

	// Enough for calls that work, on a busy machine too.
	bounded := harness.Options{Timeouts: map[string]string{addKey: "8s", delKey: "8s"}}
	for name, v := range map[string]struct {
		add  fake.Behavior
		want string
	}{
		"garbage, status 0":  {fake.Behavior{Mode: fake.Print, Msg: fake.Garbage}, "invalid character"},
		"garbage, status 1":  {fake.Behavior{Mode: fake.Print, Msg: fake.Garbage, Exit: 1}, "error parsing its diagnostic message"},
		"half a result":      {fake.Behavior{Mode: fake.Print, Msg: `{"cniVersion": "1.0.0", "ips": [`}, "unexpected end of JSON input"},
		"nothing, status 1":  {fake.Behavior{Mode: fake.Silent, Exit: 1}, "netplugin failed with no error message"},
		"version of no list": {fake.Behavior{ResultVersion: "9.9.9"}, "9.9.9"},
		"flood, status 0":    {fake.Behavior{Mode: fake.Flood, Bytes: 3 << 20}, "bytes, the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			n := begin(t, harness.Options{})
			n.answers("fakenet", "ADD", v.add)
			message := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(message, v.want))
			assert.Assert(t, len(message) < 4<<10, "%d bytes", len(message))
			well(t, n)
		})
	}
	t.Run("SIGTERM ignored", func(t *testing.T) {
		n := begin(t, bounded)
		n.answers("fakenet", "ADD", fake.Behavior{Mode: fake.Hang, IgnoreTerm: true})
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "ADD did not finish within 8s"))
		n.noFakes(busy)
		well(t, n)
	})
	t.Run("child holds output of a success", func(t *testing.T) {
		n := begin(t, harness.Options{})
		n.answers("fakenet", "ADD", fake.Behavior{Child: "fork", ChildMillis: childLives})
		started := time.Now()
		n.added(harness.Pod{Name: "a"})
		assert.Assert(t, time.Since(started) < childLives/2*time.Millisecond, "%v", time.Since(started))
		assert.Equal(t, n.calls("portmap", "ADD"), 1)
		n.endFakes()
		well(t, n)
	})
	t.Run("child holds output of a failure", func(t *testing.T) {
		n := begin(t, harness.Options{})
		n.answers("fakenet", "ADD", fake.Behavior{Mode: fake.Fail, Code: 100, Msg: "fakenet says no", Child: "fork", ChildMillis: childLives})
		started := time.Now()
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "fakenet says no"))
		assert.Assert(t, time.Since(started) < childLives/2*time.Millisecond, "%v", time.Since(started))
		n.endFakes()
		well(t, n)
	})
	t.Run("child in a session of its own", func(t *testing.T) {
		n := begin(t, bounded)
		n.answers("fakenet", "ADD", fake.Behavior{Mode: fake.Hang, Child: "setsid", ChildMillis: childLives, Pod: "a"})
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "ADD did not finish within 8s"))
		// It is left alone: it may be meant to stay.
		assert.Equal(t, len(n.fakes("")), 1)
		n.endFakes()
		well(t, n)
	})
	t.Run("fails the first times", func(t *testing.T) {
		n := begin(t, harness.Options{})
		n.answers("fakenet", "ADD", fake.Behavior{Mode: fake.Fail, Code: 11, Msg: "try again later", First: 3})
		for range 3 {
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "try again later"))
		}
		n.added(harness.Pod{Name: "a"})
		well(t, n)
	})
	t.Run("lock held by another pod's call", func(t *testing.T) {
		n := begin(t, bounded)
		lock := filepath.Join(n.Base, "plugin.lock")
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Rules: []fake.Rule{
			{Verb: "ADD", Behavior: fake.Behavior{Mode: fake.Hang, Lock: lock, Pod: "holds"}},
			{Verb: "ADD", Behavior: fake.Behavior{Lock: lock}},
		}}))
		held := make(chan error, 1)
		go func() {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "holds"})
			held <- err
		}()
		n.called("fakenet", "ADD")
		// It waits for the lock within its own bound, and may not get it before
		// the other is ended; the kubelet tries again.
		assert.NilError(t, harness.Poll(t.Context(), busy, func() error {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
			if !strings.Contains(fmt.Sprint(err), harness.NoImage) {
				return err
			}
			return nil
		}))
		assert.Assert(t, cmp.ErrorContains(<-held, "ADD did not finish within 8s"))
		well(t, n)
	})
	t.Run("uninterruptible sleep", func(t *testing.T) {
		image := filepath.Join(t.TempDir(), "disk")
		for _, tool := range []string{"mkfs.ext4", "fsfreeze"} {
			if _, err := exec.LookPath(tool); err != nil {
				t.Skipf("%s not found in PATH: a plugin in uninterruptible sleep cannot be tried", tool)
			}
		}
		assert.NilError(t, os.WriteFile(image, nil, 0o644))
		assert.NilError(t, os.Truncate(image, 16<<20))
		out, err := exec.Command("mkfs.ext4", "-q", image).CombinedOutput()
		assert.NilError(t, err, "%s", out)
		if out, err := exec.Command("unshare", "--mount", "mount", "-o", "loop", image, "/mnt").CombinedOutput(); err != nil {
			t.Skipf("no loop mounts here (%v: %s): a plugin in uninterruptible sleep cannot be tried", err, strings.TrimSpace(string(out)))
		}
		dir := t.TempDir()
		o := bounded
		o.Mounts = [][]string{{"-o", "loop", image, dir}}
		n := begin(t, o)
		assert.NilError(t, n.InNamespace("fsfreeze", "--freeze", dir))
		thaw := sync.OnceValue(func() error { return n.InNamespace("fsfreeze", "--unfreeze", dir) })
		t.Cleanup(func() { _ = thaw() }) // before the daemon is ended
		n.answers("fakenet", "ADD", fake.Behavior{Write: filepath.Join(dir, "file"), Pod: "a"})
		started := time.Now()
		message := n.refused(harness.Pod{Name: "a"})
		took := time.Since(started)
		assert.Assert(t, cmp.Contains(message, "it does not die"))
		assert.Assert(t, took < 45*time.Second, "%v", took)
		abandoned := n.report().Calls.Abandoned
		assert.Equal(t, len(abandoned), 1)
		assert.Assert(t, slices.Contains(n.fakes(""), abandoned[0].PID))
		assert.Equal(t, abandoned[0].Verb, "ADD")

		// Nobody else notices, and the name is free.
		n.added(harness.Pod{Name: "other"})
		assert.Assert(t, n.statusLatency(50) < 4*time.Second)
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a", Attempt: 1}), "it does not die"))
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "it does not die"))
		dels := n.calls("fakenet", "DEL")

		assert.NilError(t, thaw())
		assert.NilError(t, harness.Poll(t.Context(), busy, func() error {
			if c := n.report().Calls; c.Counts["abandoned"] != 0 {
				return fmt.Errorf("still shown: %+v", c.Abandoned)
			}
			return nil
		}))
		// What the abandoned ADD may have done after all is undone.
		assert.NilError(t, harness.Poll(t.Context(), busy, func() error {
			if got := n.calls("fakenet", "DEL"); got < dels+3 {
				return fmt.Errorf("%d DEL, %d before", got, dels)
			}
			return nil
		}))
		well(t, n)
	})
}
