// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

// Kubelet's podCIDR becomes a list, and pods get addresses out of it.
func TestTemplate(t *testing.T) {
	const template = `{
  "cniVersion": "1.0.0",
  "name": "rendered",
  "plugins": [
    {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "subnet": "{{.PodCIDR}}", "routes": [{"dst": "0.0.0.0/0"}]}}
  ]
}
`
	cidr := netip.MustParsePrefix("10.177.7.0/24")
	sides(t, func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.Template = filepath.Join(n.Base, "net.tmpl")
		n.write(n.Template, template)
		n.PodCIDR = cidr.String()
		n.real("ptp", "host-local", "loopback")
		want := pods("p", 5)
		assert.NilError(t, n.Put(want...))
		n.boot()
		all, took := n.running(want)
		for name, p := range all {
			ip, err := n.PodIP(t.Context(), p.Sandbox)
			assert.NilError(t, err)
			a, err := netip.ParseAddr(ip)
			assert.NilError(t, err)
			assert.Assert(t, cidr.Contains(a), "pod %s has address %s, which is not in %s", name, ip, cidr)
		}
		failures := n.failures()
		if side == harness.Patched {
			assert.Equal(t, failures, 0)
		}
		removed, left := n.gone("rendered")
		n.none(left)
		return fmt.Sprintf("%d pods run %s after kubelet's start with addresses of its podCIDR, %d sandboxes failed; removed in %s", len(want), seconds(took), failures, seconds(removed))
	})
}

// A node boots: the list is there, and the file that the network's agent writes
// comes later. Kubelet starts what needs no network, and lets the others wait.
func TestBootWindow(t *testing.T) {
	count, away := long(20, 50), time.Duration(long(12, 20))*time.Second
	lay := func(t *testing.T, side harness.Side) (n *node, want []harness.StaticPod, nodename string) {
		n = prepare(t, harness.Options{Side: side})
		nodename, err := n.InstallCalico()
		assert.NilError(t, err)
		n.write(n.conf("10-calico.conflist"), harness.CalicoList(nodename))
		want = append(pods("p", count), harness.StaticPod{Name: "h00", HostNetwork: true}, harness.StaticPod{Name: "h01", HostNetwork: true})
		assert.NilError(t, n.Put(want...))
		return n, want, nodename
	}
	allRun := func(rec *harness.Recorder) func() error {
		return func() error {
			if c := rec.Counted(); c.Pods != count {
				return fmt.Errorf("%d of %d pods run", c.Pods, count)
			}
			return nil
		}
	}
	// How long so many pods take on this machine when nothing is late.
	var healthy time.Duration
	t.Run("healthy", func(t *testing.T) {
		preflight(t, harness.Stock)
		n, want, nodename := lay(t, harness.Stock)
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		assert.NilError(t, n.Start(t.Context()))
		rec := n.Record(context.WithoutCancel(t.Context()), want)
		assert.NilError(t, n.StartKubelet())
		n.poll(eventually, allRun(rec))
		run, err := rec.Finish("calico")
		assert.NilError(t, err)
		assert.Assert(t, len(run.Adds) > 0)
		healthy = time.Duration((run.End - slices.Min(run.Adds)) * float64(time.Second))
		t.Logf("stock, the file is there: all %d pods run %s after the first ADD", count, seconds(healthy))
	})
	sides(t, func(t *testing.T, side harness.Side) string {
		n, want, nodename := lay(t, side)
		assert.NilError(t, n.Start(t.Context()))
		idle, err := n.WriteMetadata(t.Context(), 100)
		assert.NilError(t, err)

		rec := n.Record(context.WithoutCancel(t.Context()), want)
		begin := time.Now()
		assert.NilError(t, n.StartKubelet())
		// The bar: they run while the file is away, however long kubelet takes.
		host := func() error {
			if c := rec.Counted(); c.Host != 2 {
				return fmt.Errorf("%d host-network pods run", c.Host)
			}
			return nil
		}
		if side == harness.Patched {
			n.poll(eventually, host)
		}
		time.Sleep(time.Until(begin.Add(away)))
		failedBefore, addsBefore := n.failures(), n.calls("calico", "ADD")
		rec.File = rec.Since(time.Now())
		assert.NilError(t, os.WriteFile(nodename, []byte("here"), 0o644))
		after := n.poll(eventually, allRun(rec))
		n.poll(eventually, host)
		run, err := rec.Finish("calico")
		assert.NilError(t, err)
		if dir := os.Getenv("CNIRELOAD_TIMELINE"); dir != "" {
			assert.NilError(t, os.MkdirAll(dir, 0o755))
			assert.NilError(t, run.Save(filepath.Join(dir, string(side)+".json")))
		}

		idle50, idle99 := idle[len(idle)/2], idle[len(idle)*99/100]
		window50, window99, windowMax := run.Quantiles(0, run.File)
		start50, start99, _ := run.Quantiles(run.File, run.End)
		hosts := slices.IndexFunc(run.Count, func(c harness.PodCount) bool { return c.Host == 2 })
		told := n.said("Container runtime network not ready")
		switch side {
		case harness.Patched:
			assert.Equal(t, len(run.Failed), 0, "sandboxes failed")
			assert.Equal(t, addsBefore, 0, "the plugin ran before it could work")
			assert.Equal(t, len(run.Adds), count, "the plugin ran more often than there are pods")
			assert.Assert(t, told > 0, "kubelet was not told that the network is not ready")
			assert.Equal(t, n.said(down), 0)
			// Kubelet looks every five seconds, and then again after a second or so.
			assert.Assert(t, healthy > 0 && after <= healthy+10*time.Second, "all pods run %v after the file, and %v after the first ADD when it is there", after, healthy)
			// Flat: waiting pods write nothing.
			assert.Assert(t, window50 < 2*idle50+5*time.Millisecond, "a write of metadata takes %v while pods wait, %v before", window50, idle50)
			for _, s := range run.Status {
				assert.Assert(t, s.Error == "" && (!s.Ready || s.At >= run.File), "Status at %.1fs: ready %t %s", s.At, s.Ready, s.Error)
			}
		case harness.Stock:
			assert.Assert(t, failedBefore >= count/2, "want sandboxes to fail on stock, %d did", failedBefore)
			assert.Assert(t, addsBefore >= count/2, "want the plugin to run in vain on stock, it ran %d times", addsBefore)
			for _, s := range run.Status {
				assert.Assert(t, s.Ready || s.Error != "", "stock was not ready at %.1fs", s.At)
			}
		}
		return fmt.Sprintf("2 host-network pods run after %s, %d others %s after the file, which came at %s; failed sandboxes %d, %d of them before the file; ADD %d, %d before the file; DEL %d; "+
			"kubelet found the network not ready %d times; metadata p50/p99 idle %s/%s, until the file %s/%s (most %s), from then %s/%s",
			fmt.Sprintf("%.1fs", run.Count[hosts].At), count, seconds(after), seconds(time.Duration(run.File*float64(time.Second))), len(run.Failed), failedBefore, len(run.Adds), addsBefore, len(run.Dels),
			told, ms(idle50), ms(idle99), ms(window50), ms(window99), ms(windowMax), ms(start50), ms(start99))
	})
}
