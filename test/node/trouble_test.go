// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

const fakeList = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "fakenet"}, {"type": "portmap", "capabilities": {"portMappings": true}}]}` + "\n"

// One pod's plugin hangs while somebody writes to the conf dir. That is this
// pod's affair and nobody else's.
func TestHungPlugin(t *testing.T) {
	hang := time.Duration(long(50, 60)) * time.Second
	sides(t, func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-pods.conflist"), fakeList)
		early := pods("early", 2)
		assert.NilError(t, n.Put(early...))
		n.boot()
		n.running(early)

		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{
			"ADD": {Mode: fake.Slow, Millis: int(hang.Milliseconds()), Pod: "stuck-" + harness.NodeName},
		}}))
		stuck := harness.StaticPod{Name: "stuck"}
		before := n.calls("fakenet", "ADD")
		assert.NilError(t, n.Put(stuck))
		n.poll(eventually, func() error {
			if n.calls("fakenet", "ADD") == before {
				return errors.New("the plugin was not run")
			}
			return nil
		})
		begin := time.Now()
		others := pods("other", 5)
		rec := n.Record(context.WithoutCancel(t.Context()), append(early, others...))
		// An editor's files, on and on.
		writing, stop := context.WithCancel(t.Context())
		written := make(chan struct{})
		go func() {
			defer close(written)
			for i := 0; writing.Err() == nil; i++ {
				_ = os.WriteFile(n.conf(".scratch"), []byte(strconv.Itoa(i)), 0o644)
				time.Sleep(500 * time.Millisecond)
			}
		}()
		time.Sleep(time.Second)
		assert.NilError(t, n.Put(others...))
		_, took := n.running(append(early, others...))
		others1 := time.Since(begin)
		n.running([]harness.StaticPod{stuck})
		stuckTook := time.Since(begin)
		stop()
		<-written
		run, err := rec.Finish("fakenet")
		assert.NilError(t, err)
		downs := n.said(down)
		var slowest float64
		errs := 0
		for _, s := range run.Status {
			slowest = max(slowest, s.Took)
			if s.Error != "" {
				errs++
			}
			if side == harness.Patched {
				assert.Assert(t, s.Ready && s.Error == "", "Status at %.1fs: ready %t %s", s.At, s.Ready, s.Error)
			}
		}
		if side == harness.Patched {
			assert.Equal(t, downs, 0, "kubelet says that the %s", down)
			assert.Equal(t, n.failures(), 0, "sandboxes failed")
			assert.Assert(t, others1 < hang, "other pods ran only after %v", others1)
		} else {
			assert.Assert(t, downs > 0, "want kubelet to say on stock that the %s", down)
			assert.Assert(t, errs > 0, "want Status to fail on stock")
			assert.Assert(t, others1 > hang/2, "want other pods to wait on stock, they ran after %v", others1)
		}
		return fmt.Sprintf("a plugin hangs for %s: kubelet says %d times that the %s; Status fails %d times of %d, slowest %.2fs; 5 other pods run %s after they were put, the pod itself after %s; failed sandboxes %d",
			seconds(hang), downs, down, errs, len(run.Status), slowest, seconds(took), seconds(stuckTook), n.failures())
	})
}

// The conf dir goes and comes back, as a reinstalled network makes it.
func TestConfDirRemoved(t *testing.T) {
	sides(t, func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-pods.conflist"), fakeList)
		early := pods("early", 3)
		assert.NilError(t, n.Put(early...))
		n.boot()
		before, _ := n.running(early)
		early1 := map[string]harness.PodState{}
		for _, p := range early {
			early1[p.Name] = before[p.Name]
		}

		assert.NilError(t, os.RemoveAll(n.ConfDir))
		restore := func() {
			t.Helper()
			aside := n.ConfDir + ".aside"
			assert.NilError(t, os.Mkdir(aside, 0o755))
			assert.NilError(t, os.WriteFile(filepath.Join(aside, "10-pods.conflist"), []byte(fakeList), 0o644))
			assert.NilError(t, os.Rename(aside, n.ConfDir))
		}
		late := harness.StaticPod{Name: "late"}
		if side == harness.Stock {
			select {
			case <-n.Ended():
			case <-time.After(eventually):
				t.Fatal("want stock to end when its conf dir is removed")
			}
			n.poll(eventually, func() error {
				if n.said(down) == 0 {
					return fmt.Errorf("kubelet does not say that the %s", down)
				}
				return nil
			})
			// What an init system does, which can be of use only now.
			restore()
			assert.NilError(t, n.Stop())
			assert.NilError(t, n.Start(t.Context()))
			assert.NilError(t, n.Put(late))
			_, took := n.running(append(early, late))
			return fmt.Sprintf("containerd ends; kubelet says that the %s; a pod runs %s after the dir is there and containerd is started again", down, seconds(took))
		}

		n.poll(eventually, func() error {
			if n.said("conf dir "+n.ConfDir+" does not exist") == 0 {
				return errors.New("kubelet does not say that the network is not ready and why")
			}
			return nil
		})
		host := harness.StaticPod{Name: "host", HostNetwork: true}
		assert.NilError(t, n.Put(late, host))
		_, hostTook := n.running([]harness.StaticPod{host})
		time.Sleep(3 * time.Second)
		all, err := n.Running(t.Context())
		assert.NilError(t, err)
		_, ok := all["late"]
		assert.Assert(t, !ok, "a pod runs without a network")
		restore()
		all, took := n.running(append(early, late, host))
		for name, p := range early1 {
			assert.Equal(t, all[name], p, "pod %s was started again", name)
		}
		assert.Assert(t, n.Alive())
		assert.Equal(t, n.said(down), 0)
		assert.Equal(t, n.failures(), 0, "sandboxes failed")
		_, left := n.gone("")
		n.none(left)
		return fmt.Sprintf("containerd runs on; kubelet names the cause; a host-network pod runs after %s, a pod that waited %s after the dir is there; failed sandboxes 0", seconds(hostTook), seconds(took))
	})
}

// A daemon is replaced by the other one while pods run.
func TestUpgrade(t *testing.T) {
	for _, way := range [][2]harness.Side{{harness.Stock, harness.Patched}, {harness.Patched, harness.Stock}} {
		t.Run(fmt.Sprintf("%s to %s", way[0], way[1]), func(t *testing.T) {
			preflight(t, way[0], way[1])
			n := prepare(t, harness.Options{Side: way[0]})
			n.real("ptp", "host-local", "loopback")
			n.write(n.conf("10-pods.conflist"), ptpList("pods", "10.177.8.0/24"))
			want := pods("p", 5)
			assert.NilError(t, n.Put(append(want, harness.StaticPod{Name: "host", HostNetwork: true})...))
			n.boot()
			before, _ := n.running(append(want, harness.StaticPod{Name: "host"}))
			pids := map[string]int{}
			for name, p := range before {
				pid, err := n.ContainerPID(t.Context(), p.Container)
				assert.NilError(t, err)
				pids[name] = pid
			}
			addresses, err := n.HostLocal("pods")
			assert.NilError(t, err)
			assert.Equal(t, len(addresses), len(want))

			begin := time.Now()
			assert.NilError(t, n.Stop())
			assert.NilError(t, n.Become(way[1]))
			assert.NilError(t, n.Start(t.Context()))
			away := time.Since(begin)
			// New pods run, so kubelet has looked at everything again.
			next := pods("new", 2)
			assert.NilError(t, n.Put(next...))
			_, took := n.running(next)
			after, err := n.Running(t.Context())
			assert.NilError(t, err)
			for name, p := range before {
				assert.Equal(t, after[name], p, "pod %s was started again", name)
				pid, err := n.ContainerPID(t.Context(), p.Container)
				assert.NilError(t, err)
				assert.Equal(t, pid, pids[name], "process of pod %s", name)
			}
			removed, left := n.gone("pods")
			n.none(left)
			t.Logf("%s to %s: containerd away for %s; %d pods keep container and process; 2 new ones run after %s; all removed in %s, addresses freed, nothing left",
				way[0], way[1], seconds(away), len(before), seconds(took), seconds(removed))
		})
	}
}

// The daemon is killed in the middle of starts.
func TestKill(t *testing.T) {
	if testing.Short() {
		t.Skip("run by make test-node")
	}
	const count = 50
	sides(t, func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.real("ptp", "host-local", "loopback")
		n.write(n.conf("10-pods.conflist"), ptpList("pods", "10.177.9.0/24"))
		want := pods("p", count)
		n.boot()
		assert.NilError(t, n.Put(want...))
		var ran int
		n.poll(eventually, func() error {
			running, err := n.Running(t.Context())
			if err != nil {
				return err
			}
			if ran = len(running); ran < count/5 {
				return fmt.Errorf("%d pods run", ran)
			}
			return nil
		})
		assert.NilError(t, n.Kill())
		assert.NilError(t, n.Start(t.Context()))
		_, took := n.running(want)
		failures := n.failures()
		ready, other, err := n.Sandboxes(t.Context())
		assert.NilError(t, err)
		addresses, err := n.HostLocal("pods")
		assert.NilError(t, err)
		removed, left := n.gone("pods")
		if side == harness.Patched {
			n.none(left)
		}
		return fmt.Sprintf("killed when %d of %d pods ran: all run %s after the daemon is back; failed sandboxes %d; sandboxes then %d ready, %d not, %d addresses held; removed in %s; left behind: %d %v",
			ran, count, seconds(took), failures, ready, other, len(addresses), seconds(removed), len(left), left)
	})
}

// A plugin is upgraded by rename, again and again, while pods start.
func TestPluginRename(t *testing.T) {
	if testing.Short() {
		t.Skip("run by make test-node")
	}
	const count = 30
	sides(t, func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-pods.conflist"), fakeList)
		want := pods("p", count)
		n.boot()
		assert.NilError(t, n.Put(want...))
		renaming, stop := context.WithCancel(t.Context())
		done := make(chan int, 1)
		go func() {
			renamed := 0
			for renaming.Err() == nil {
				if n.InstallFake("fakenet") == nil {
					renamed++
				}
				time.Sleep(100 * time.Millisecond)
			}
			done <- renamed
		}()
		_, took := n.running(want)
		stop()
		renamed := <-done
		failures := n.failures()
		adds := n.calls("fakenet", "ADD")
		if side == harness.Patched {
			assert.Equal(t, failures, 0, "sandboxes failed")
			assert.Equal(t, adds, count)
		}
		_, left := n.gone("")
		n.none(left)
		return fmt.Sprintf("%d pods run after %s while the plugin is renamed %d times; failed sandboxes %d, ADD %d", count, seconds(took), renamed, failures, adds)
	})
}
