// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e shows, on real daemons, what public bug reports describe: each
// case runs against stock containerd, where it must show the reported
// behaviour, and against the patched one, where it must show the other.
package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

func TestMain(m *testing.M) {
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-interrupted
		if err := harness.DestroyAll(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(130)
	}()
	if os.Geteuid() == 0 {
		if err := harness.Sweep(); err != nil {
			fmt.Fprintln(os.Stderr, "clean up after an earlier run:", err)
			os.Exit(1)
		}
	}
	// Cases mostly wait. -parallel says otherwise.
	if err := flag.Set("test.parallel", strconv.Itoa(runtime.NumCPU()+1)); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// Bounds used by many cases.
var (
	// soon is for what happens without anything to wait for, and is what case
	// S14 allows. CNIRELOAD_SLOW is for machines that are busy with other things.
	soon = harness.Slow(5 * time.Second)
	// graced is for a plugin in use that goes: it is given 15 s to come back.
	graced = harness.Slow(20 * time.Second)
	// atOnce is for a change that an event announces: well below the slow poll
	// that would find it as well. How soon it really is, TestArrival measures.
	atOnce = harness.Slow(2 * time.Second)
	// quiet is how long a change that must not be noticed is given.
	quiet = harness.Slow(1500 * time.Millisecond)
)

// result is printed as one line, for cmd/cases to collect.
type result struct {
	Case     string `json:"case"`
	Report   string `json:"report"`
	Side     string `json:"side"`
	Observed string `json:"observed"`
	// Right says that this is what must be.
	Right bool `json:"right"`
}

const failed = "FAILED"

// sides runs a case on both binaries: stock must show what was reported, the
// patched one what must be. The case returns one line on what was seen. The sides
// run beside each other, and beside those of other cases: each has daemon, folders
// and namespaces of its own, and waits most of the time.
func sides(t *testing.T, report string, run func(t *testing.T, side harness.Side) string) {
	eachSide(t, report, false, true, run)
}

// inTurn is sides for a case that compares what it saw on stock with what it sees
// on patched, or keeps the machine busy: first stock, then patched, and nothing
// beside them.
func inTurn(t *testing.T, report string, run func(t *testing.T, side harness.Side) string) {
	eachSide(t, report, false, false, run)
}

// alike runs a case on both binaries in which stock does what must be, and so must
// the patched one.
func alike(t *testing.T, report string, run func(t *testing.T, side harness.Side) string) {
	eachSide(t, report, true, true, run)
}

// eachSide runs a case on both sides. A side that is seen by itself may run beside
// others, and what was seen on stock need not be seen again.
func eachSide(t *testing.T, report string, stockRight, byItself bool, run func(t *testing.T, side harness.Side) string) {
	if byItself {
		t.Parallel()
	}
	var both sync.WaitGroup
	defer both.Wait()
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		both.Go(func() { oneSide(t, report, stockRight, byItself, side, run) })
		if !byItself {
			both.Wait()
		}
	}
}

func oneSide(t *testing.T, report string, stockRight, byItself bool, side harness.Side, run func(t *testing.T, side harness.Side) string) {
	t.Run(string(side), func(t *testing.T) {
		if err := harness.Preflight("make test-e2e", side); err != nil {
			t.Fatal(err)
		}
		id := strings.TrimPrefix(strings.SplitN(t.Name(), "/", 2)[0], "Test")
		line := func(observed string) {
			right := observed != failed && (side == harness.Patched || stockRight)
			b, err := json.Marshal(result{id, report, string(side), observed, right})
			assert.NilError(t, err)
			t.Logf("case-result %s", b)
		}
		defer func() {
			if t.Failed() {
				line(failed)
			}
		}()
		var observed string
		if byItself && side == harness.Stock {
			observed = onStock(t, run)
		} else {
			observed = run(t, side)
		}
		if !t.Failed() {
			line(observed)
		}
	})
}

// onStock runs a case on stock, unless the same program has seen what it does there.
func onStock(t *testing.T, run func(t *testing.T, side harness.Side) string) (observed string) {
	seen, err := harness.OpenSeen()
	assert.NilError(t, err)
	ok, err := seen.Get(t.Name(), &observed)
	assert.NilError(t, err)
	if ok {
		t.Log("seen before: the test program and stock's are the same")
		return observed
	}
	observed = run(t, harness.Stock)
	if !t.Failed() {
		assert.NilError(t, seen.Put(t.Name(), observed))
	}
	return observed
}

// node is a private daemon in a test.
type node struct {
	*harness.Daemon
	t *testing.T
	// untidy is set by cases whose point is that something is left behind.
	untidy bool
}

// prepare lays out a daemon with the usual fake plugins, not yet started.
func prepare(t *testing.T, o harness.Options) *node {
	t.Helper()
	d, err := harness.New(o)
	assert.NilError(t, err)
	n := &node{Daemon: d, t: t}
	t.Cleanup(n.finish)
	assert.NilError(t, n.InstallFake("fakenet", "portmap", "loopback"))
	return n
}

func (n *node) finish() {
	if n.Runtime != nil && n.Alive() && !n.untidy && !n.t.Failed() {
		if err := n.RemovePods(context.Background()); err != nil {
			n.t.Errorf("remove pods: %v", err)
		} else if left := n.Leaks(); len(left) > 0 {
			n.t.Errorf("left behind with no pods: %s", strings.Join(left, ", "))
		}
	}
	if n.t.Failed() {
		n.t.Logf("end of containerd's log:\n%s", n.LogTail(40))
	}
	if err := n.Destroy(); err != nil {
		n.t.Errorf("end of the daemon: %v", err)
	}
}

// start starts a prepared daemon, or starts it again.
func (n *node) start() *node {
	n.t.Helper()
	assert.NilError(n.t, n.Start(n.t.Context()))
	return n
}

// restart stops the daemon, keeping its pods and folders, and starts it again.
func (n *node) restart() {
	n.t.Helper()
	assert.NilError(n.t, n.Stop())
	n.start()
}

// conf is the path of a file in the default conf dir.
func (n *node) conf(name string) string { return filepath.Join(n.ConfDir, name) }

// aside is the path of a file on the same filesystem that nobody watches.
func (n *node) aside(name string) string { return filepath.Join(n.Base, "aside-"+name) }

// write writes a whole file in one step beside its place, then renames it.
func (n *node) write(path, content string) {
	n.t.Helper()
	tmp := path + ".tmp"
	assert.NilError(n.t, os.WriteFile(tmp, []byte(content), 0o644))
	assert.NilError(n.t, os.Rename(tmp, path))
}

func (n *node) network() harness.Condition {
	n.t.Helper()
	c, err := n.Network(n.t.Context())
	assert.NilError(n.t, err)
	return c
}

// waitReady waits until NetworkReady has that value and returns the condition
// and how long it took.
func (n *node) waitReady(ready bool, within time.Duration) (harness.Condition, time.Duration) {
	n.t.Helper()
	var c harness.Condition
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() (err error) {
		if c, err = n.Network(n.t.Context()); err == nil && c.Ready != ready {
			err = fmt.Errorf("want NetworkReady %t, got %v", ready, c)
		}
		return err
	}))
	return c, time.Since(begin)
}

// stays checks that NetworkReady keeps that value for a while.
func (n *node) stays(ready bool, during time.Duration) {
	n.t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if c := n.network(); c.Ready != ready {
			n.t.Fatalf("want NetworkReady to stay %t, got %v", ready, c)
		}
	}
}

// notReady waits for a false condition whose message has stock's words first
// and then names these.
func (n *node) notReady(within time.Duration, causes ...string) string {
	n.t.Helper()
	var c harness.Condition
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() (err error) {
		if c, err = n.Network(n.t.Context()); err != nil {
			return err
		}
		if c.Ready || !strings.HasPrefix(c.Message, notInitialized) || !containsAll(c.Message, causes) {
			return fmt.Errorf("want a message starting with %q and naming %q, got %v", notInitialized, causes, c)
		}
		return nil
	}))
	assert.Equal(n.t, c.Reason, "NetworkPluginNotReady")
	n.agree()
	return c.Message
}

const notInitialized = "Network plugin returns error: cni plugin not initialized"

func containsAll(s string, parts []string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}

// loadStatus is lastCNILoadStatus.
func (n *node) loadStatus() string {
	n.t.Helper()
	_, info, err := n.Info(n.t.Context())
	assert.NilError(n.t, err)
	return info["lastCNILoadStatus"]
}

// agree checks that the condition, lastCNILoadStatus and the report of one
// answer say the same.
func (n *node) agree() {
	n.t.Helper()
	c, info, err := n.Info(n.t.Context())
	assert.NilError(n.t, err)
	r, err := harness.ReportFrom(info, "")
	assert.NilError(n.t, err)
	assert.Equal(n.t, r.Ready, c.Ready, "report against condition %v", c)
	assert.Equal(n.t, info["lastCNILoadStatus"] == "OK", c.Ready, "lastCNILoadStatus %q against condition %v", info["lastCNILoadStatus"], c)
	assert.Equal(n.t, info["lastCNILoadStatus.default"], info["lastCNILoadStatus"])
	if !c.Ready {
		cause := strings.TrimPrefix(strings.TrimPrefix(c.Message, notInitialized), ": ")
		assert.Assert(n.t, cause != "", "no cause in %q", c.Message)
		assert.Assert(n.t, strings.Contains(info["lastCNILoadStatus"], cause), "lastCNILoadStatus %q against condition %v", info["lastCNILoadStatus"], c)
		assert.Assert(n.t, strings.Contains(r.Message, cause), "report message %q against condition %v", r.Message, c)
		assert.Equal(n.t, r.Reason, c.Reason)
	}
}

// pod runs a pod that must work and returns its address.
func (n *node) pod(name string) string {
	n.t.Helper()
	id, err := n.RunPod(n.t.Context(), harness.Pod{Name: name})
	assert.NilError(n.t, err)
	ip, err := n.PodIP(n.t.Context(), id)
	assert.NilError(n.t, err)
	assert.Assert(n.t, ip != "", "pod %s has no address", name)
	return ip
}

// refused runs a pod that must not work and returns the error.
func (n *node) refused(p harness.Pod) string {
	n.t.Helper()
	_, err := n.RunPod(n.t.Context(), p)
	assert.Assert(n.t, err != nil, "pod %s ran", p.Name)
	return err.Error()
}

// calls counts the calls of one verb to one fake plugin.
func (n *node) calls(plugin, verb string) int {
	n.t.Helper()
	all, err := n.Fake.Calls()
	assert.NilError(n.t, err)
	count := 0
	for _, c := range all {
		if c.Plugin == plugin && c.Command == verb {
			count++
		}
	}
	return count
}

// leases counts the addresses of the fake plugin that are in use.
func (n *node) leases() int {
	n.t.Helper()
	m, err := n.Fake.Leases()
	assert.NilError(n.t, err)
	return len(m)
}

// report reads the cniReload report of the default network.
func (n *node) report() harness.Report {
	n.t.Helper()
	r, err := n.Report(n.t.Context(), "")
	assert.NilError(n.t, err)
	return r
}

// using waits until pods get addresses from the list of that name.
func (n *node) using(name string, within time.Duration) time.Duration {
	n.t.Helper()
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		r, err := n.Report(n.t.Context(), "")
		if err != nil {
			return err
		}
		var names []string
		for _, network := range r.Networks {
			if network.Name == name {
				return nil
			}
			names = append(names, network.Name)
		}
		return fmt.Errorf("want network %q in use, got %q", name, names)
	}))
	return time.Since(begin)
}

// conflist is a list of fake plugins. The extra pairs go into its first
// plugin's configuration.
func conflist(name, version string, plugins []string, extra ...string) string {
	var list []map[string]any
	for i, p := range plugins {
		conf := map[string]any{"type": p}
		if p == "portmap" {
			conf["capabilities"] = map[string]bool{"portMappings": true}
		}
		for j := 0; i == 0 && j+1 < len(extra); j += 2 {
			conf[extra[j]] = extra[j+1]
		}
		list = append(list, conf)
	}
	b, err := json.MarshalIndent(map[string]any{"cniVersion": version, "name": name, "plugins": list}, "", "  ")
	if err != nil {
		panic(err)
	}
	return string(b) + "\n"
}

// c10 and c11 are the lists most cases speak of.
func c10(name string) string { return conflist(name, "1.0.0", []string{"fakenet", "portmap"}) }
func c11(name string) string { return conflist(name, "1.1.0", []string{"fakenet", "portmap"}) }

func short(d time.Duration) string { return d.Round(time.Millisecond).String() }
