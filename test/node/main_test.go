// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node runs a real kubelet, without a cluster, on stock and on patched
// containerd, and shows what becomes of its pods when their network is late,
// hangs, goes or is replaced.
package node

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
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
	os.Exit(m.Run())
}

// eventually bounds everything that kubelet does in its own time on a machine
// that may be busy. Nothing is measured by it.
const eventually = 4 * time.Minute

// sides runs a scenario on both binaries. It returns what was measured, in
// words.
func sides(t *testing.T, run func(t *testing.T, side harness.Side) string) {
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		t.Run(string(side), func(t *testing.T) {
			preflight(t, side)
			if seen := run(t, side); !t.Failed() {
				t.Logf("%s: %s", side, seen)
			}
		})
	}
}

func preflight(t *testing.T, sides ...harness.Side) {
	t.Helper()
	if err := harness.Preflight("make test-node", sides...); err != nil {
		t.Fatal(err)
	}
	kubelet, err := harness.KubeletPath()
	assert.NilError(t, err)
	if _, err := os.Stat(kubelet); err != nil {
		t.Fatalf("%s is missing: \"make test-node\" builds it", kubelet)
	}
}

// node is a node in a test.
type node struct {
	*harness.Node
	t *testing.T
}

// prepare lays out a node with the usual fake plugins, not yet started.
func prepare(t *testing.T, o harness.Options) *node {
	t.Helper()
	if o.ReadyWait == "" {
		// containerd's default.
		o.ReadyWait = "30s"
	}
	d, err := harness.NewNode(o)
	assert.NilError(t, err)
	n := &node{d, t}
	t.Cleanup(n.finish)
	assert.NilError(t, n.InstallFake("fakenet", "portmap", "loopback"))
	return n
}

func (n *node) finish() {
	if n.t.Failed() {
		n.t.Logf("end of containerd's log:\n%s", n.LogTail(30))
		n.t.Logf("end of kubelet's log:\n%s", n.KubeletTail(30))
		if dir := os.Getenv("CNIRELOAD_NODE_LOGS"); dir != "" {
			name := filepath.Join(dir, strings.ReplaceAll(n.t.Name(), "/", "-"))
			_ = os.MkdirAll(dir, 0o755)
			for suffix, path := range map[string]string{".containerd.log": n.LogPath(), ".kubelet.log": n.KubeletLogPath()} {
				if b, err := os.ReadFile(path); err == nil {
					_ = os.WriteFile(name+suffix, b, 0o644)
				}
			}
		}
	}
	if err := n.Destroy(); err != nil {
		n.t.Errorf("end of the node: %v", err)
	}
}

// real puts real plugins into the first bin dir.
func (n *node) real(names ...string) {
	n.t.Helper()
	for _, name := range names {
		src, err := harness.Plugin(name)
		assert.NilError(n.t, err)
		assert.NilError(n.t, harness.Install(src, filepath.Join(n.BinDirs[0], name)))
	}
}

func (n *node) conf(name string) string { return filepath.Join(n.ConfDir, name) }

// write writes a whole file and renames it into place.
func (n *node) write(path, content string) {
	n.t.Helper()
	assert.NilError(n.t, os.WriteFile(path+".tmp", []byte(content), 0o644))
	assert.NilError(n.t, os.Rename(path+".tmp", path))
}

// boot starts daemon and kubelet.
func (n *node) boot() {
	n.t.Helper()
	assert.NilError(n.t, n.Start(n.t.Context()))
	assert.NilError(n.t, n.StartKubelet())
}

// poll is harness.Poll at a kubelet's pace. It ends at once when kubelet does.
func (n *node) poll(within time.Duration, check func() error) time.Duration {
	n.t.Helper()
	begin := time.Now()
	for {
		err := check()
		if err == nil {
			return time.Since(begin)
		}
		select {
		case <-n.KubeletEnded():
			n.t.Fatalf("kubelet ended: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		if time.Since(begin) > within {
			n.t.Fatalf("not within %v: %v", within, err)
		}
	}
}

// running waits until these pods run, and returns all that do.
func (n *node) running(pods []harness.StaticPod) (all map[string]harness.PodState, took time.Duration) {
	n.t.Helper()
	took = n.poll(eventually, func() (err error) {
		if all, err = n.Running(n.t.Context()); err != nil {
			return err
		}
		var missing []string
		for _, p := range pods {
			if _, ok := all[p.Name]; !ok {
				missing = append(missing, p.Name)
			}
		}
		if missing != nil {
			return fmt.Errorf("pods that do not run: %s", strings.Join(missing, " "))
		}
		return nil
	})
	return all, took
}

// gone takes all pods away and waits until they do not run. It returns how long
// that took and what is left of them then.
func (n *node) gone(network string) (took time.Duration, left []string) {
	n.t.Helper()
	assert.NilError(n.t, n.Take())
	took = n.poll(eventually, func() error {
		running, err := n.Running(n.t.Context())
		ready, _, err2 := n.Sandboxes(n.t.Context())
		if err = errors.Join(err, err2); err == nil && len(running)+ready > 0 {
			err = fmt.Errorf("%d containers and %d sandboxes run", len(running), ready)
		}
		return err
	})
	// Kubelet leaves stopped sandboxes to its own garbage collection, which
	// would be minutes.
	assert.NilError(n.t, n.StopKubelet())
	assert.NilError(n.t, n.RemovePods(n.t.Context()))
	left = n.Leaks()
	if network == "" {
		return took, left
	}
	var rest []string
	_ = harness.Poll(n.t.Context(), 10*time.Second, func() error {
		used, err := n.HostLocal(network)
		assert.NilError(n.t, err)
		interfaces, err := n.Home.Interfaces()
		assert.NilError(n.t, err)
		rest = nil
		for _, a := range used {
			rest = append(rest, "address "+a)
		}
		for _, i := range interfaces {
			rest = append(rest, "interface "+i)
		}
		if rest != nil {
			return errors.New("left behind")
		}
		return nil
	})
	return took, append(left, rest...)
}

// none checks that nothing is left.
func (n *node) none(left []string) {
	n.t.Helper()
	if len(left) > 0 {
		n.t.Errorf("left behind with no pods: %s", strings.Join(left, ", "))
	}
}

func (n *node) events(reason string) []time.Time {
	n.t.Helper()
	all, err := n.Events(reason)
	assert.NilError(n.t, err)
	return all
}

// failures counts kubelet's events of sandboxes that failed.
func (n *node) failures() int {
	n.t.Helper()
	return len(n.events("FailedCreatePodSandBox"))
}

func (n *node) said(text string) int {
	n.t.Helper()
	all, err := n.Said(text)
	assert.NilError(n.t, err)
	return len(all)
}

// calls counts the calls of one verb to one fake plugin.
func (n *node) calls(plugin, verb string) (count int) {
	n.t.Helper()
	all, err := n.Fake.Calls()
	assert.NilError(n.t, err)
	for _, c := range all {
		if c.Plugin == plugin && c.Command == verb {
			count++
		}
	}
	return count
}

// down is what kubelet says when it has had no good Status for 30s. It starts
// no pods then.
const down = "container runtime is down"

func pods(prefix string, count int) []harness.StaticPod {
	var all []harness.StaticPod
	for i := range count {
		all = append(all, harness.StaticPod{Name: fmt.Sprintf("%s%02d", prefix, i)})
	}
	return all
}

// ptpList is a list of real plugins.
func ptpList(name, subnet string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": %q,
  "plugins": [
    {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}}
  ]
}
`, name, subnet)
}

// long tells whether the whole is wanted; make test runs a short set.
func long(short, whole int) int {
	if testing.Short() {
		return short
	}
	return whole
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }

func ms(d time.Duration) string { return fmt.Sprintf("%dms", d.Milliseconds()) }
