// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// A file renamed in from another folder makes only a Create event.
// https://github.com/containerd/containerd/issues/11715
// https://github.com/containerd/containerd/issues/5225
// https://github.com/containerd/containerd/issues/8419
func TestS1(t *testing.T) {
	sides(t, "containerd#11715, #5225, #8419", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side}).start()
		n.waitReady(false, soon)
		inside, outside := n.conf("10-a.conflist"), n.aside("a")
		assert.NilError(t, os.WriteFile(outside, []byte(c10("a")), 0o644))
		assert.NilError(t, os.Rename(outside, inside))

		if side == harness.Stock {
			n.stays(false, quiet)
			// Any other write makes stock look.
			assert.NilError(t, os.WriteFile(n.conf("unrelated"), []byte("x"), 0o644))
			n.waitReady(true, soon)
			// Moving out is noticed, moving back in is not.
			assert.NilError(t, os.Rename(inside, outside))
			n.waitReady(false, soon)
			assert.NilError(t, os.Rename(outside, inside))
			n.stays(false, quiet)
			return "renamed in, and out and back in: never noticed"
		}

		_, first := n.waitReady(true, atOnce)
		n.pod("a")
		assert.NilError(t, os.Rename(inside, outside))
		_, out := n.waitReady(false, atOnce)
		assert.NilError(t, os.Rename(outside, inside))
		_, back := n.waitReady(true, atOnce)

		// One that sorts first takes over.
		assert.NilError(t, os.WriteFile(outside, []byte(c10("first")), 0o644))
		assert.NilError(t, os.Rename(outside, n.conf("05-first.conflist")))
		n.using("first", atOnce)
		n.pod("b")
		last, err := n.Fake.Calls()
		assert.NilError(t, err)
		assert.Equal(t, networkOf(last, "b"), "first")

		// A hard link makes the same single event.
		assert.NilError(t, os.WriteFile(outside, []byte(c10("linked")), 0o644))
		assert.NilError(t, os.Link(outside, n.conf("01-linked.conflist")))
		n.using("linked", atOnce)
		return fmt.Sprintf("in use %s after rename in, dropped %s after rename out, in use %s after rename back; also one that sorts first",
			short(first), short(out), short(back))
	})
}

// The folder of the configuration is an installer's to remove and make again.
// https://github.com/containerd/containerd/issues/11209
// https://github.com/containerd/containerd/issues/6490
// https://github.com/containerd/containerd/issues/7196
// https://github.com/projectcalico/calico/issues/8694
func TestS3(t *testing.T) {
	variants := []struct {
		name    string
		handler bool
		do      func(dir string) error
	}{
		{"removed", false, os.RemoveAll},
		{"renamed", false, func(dir string) error { return os.Rename(dir, dir+".old") }},
		{"handler's removed", true, os.RemoveAll},
		{"handler's renamed", true, func(dir string) error { return os.Rename(dir, dir+".old") }},
	}
	sides(t, "containerd#11209, #6490, #7196, calico#8694", func(t *testing.T, side harness.Side) string {
		var observed string
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side})
				own := filepath.Join(n.Base, "handler.d")
				n.Handlers = map[string]harness.Handler{"other": {ConfDir: own}}
				assert.NilError(t, os.MkdirAll(own, 0o755))
				n.write(n.conf("10-a.conflist"), c10("a"))
				n.write(filepath.Join(own, "10-h.conflist"), c10("h"))
				n.start()
				n.waitReady(true, soon)
				n.podOf("before", "other")

				dir := n.ConfDir
				if v.handler {
					dir = own
				}
				assert.NilError(t, v.do(dir))

				if side == harness.Stock {
					select {
					case <-n.Ended():
					case <-time.After(soon):
						t.Fatal("stock containerd still runs")
					}
					assert.Assert(t, cmp.Contains(n.LogTail(10), "cni conf dir is removed"))
					observed = "the daemon exits: cni conf dir is removed, stop watching"
					return
				}

				gone := "conf dir " + dir + " does not exist"
				if v.handler {
					assert.NilError(t, harness.Poll(t.Context(), soon, func() error { return n.handlerSays("other", gone) }))
					assert.Assert(t, n.network().Ready, "the node must stay ready")
					assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "held", Handler: "other"}), gone))
					n.pod("default")
				} else {
					message := n.notReady(soon, gone)
					observed = "alive, " + strings.ReplaceAll(message, n.Base, "…")
					assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "held"}), gone))
					n.podOf("still", "other")
				}
				n.stillMissing(dir, quiet)

				// Made again, first empty.
				assert.NilError(t, os.MkdirAll(dir, 0o755))
				if !v.handler {
					n.notReady(polled, "no network config found in "+dir)
				}
				n.write(filepath.Join(dir, "10-new.conflist"), c10("new"))
				if v.handler {
					assert.NilError(t, harness.Poll(t.Context(), polled, func() error { return n.handlerSays("other", "") }))
					n.podOf("after", "other")
				} else {
					_, back := n.waitReady(true, polled)
					observed += "; ready " + short(back) + " after it is back"
					n.pod("after")
				}

				// A second time, to see that the watch was really set again.
				assert.NilError(t, os.RemoveAll(dir))
				assert.NilError(t, os.MkdirAll(dir, 0o755))
				n.write(filepath.Join(dir, "10-again.conflist"), c10("again"))
				if !v.handler {
					n.using("again", polled)
				}
				assert.Assert(t, n.Alive())
			})
		}
		return observed
	})
}

// podOf runs a pod of a runtime handler that must work.
func (n *node) podOf(name, handler string) {
	n.t.Helper()
	id, err := n.RunPod(n.t.Context(), harness.Pod{Name: name, Handler: handler})
	assert.NilError(n.t, err)
	assert.NilError(n.t, n.RemovePod(n.t.Context(), id))
}

// handlerSays checks a handler's own status: not ready with that text, or
// ready when the text is empty.
func (n *node) handlerSays(handler, text string) error {
	_, info, err := n.Info(n.t.Context())
	if err != nil {
		return err
	}
	r, err := harness.ReportFrom(info, handler)
	if err != nil {
		return err
	}
	load := info["lastCNILoadStatus."+handler]
	if r.Ready != (text == "") || !strings.Contains(r.Message, text) {
		return fmt.Errorf("handler %s: want %q, got ready %t %q", handler, text, r.Ready, r.Message)
	}
	if r.Ready != (load == "OK") || !strings.Contains(load, text) {
		return fmt.Errorf("handler %s: want %q, got lastCNILoadStatus %q", handler, text, load)
	}
	return nil
}

// stillMissing checks that nobody makes a folder behind the installer's back.
func (n *node) stillMissing(dir string, during time.Duration) {
	n.t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		_, err := os.Lstat(dir)
		assert.Assert(n.t, errors.Is(err, os.ErrNotExist), "%s was made again", dir)
	}
}

// A file that is being written is not an outage.
// https://github.com/aws/amazon-vpc-cni-k8s/issues/1437
// https://github.com/containerd/containerd/issues/8662
func TestS5(t *testing.T) {
	sides(t, "amazon-vpc-cni-k8s#1437, containerd#8662", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		path := n.conf("10-a.conflist")
		content := func(subnet string) string {
			return conflist("a", "1.0.0", []string{"fakenet", "portmap"}, "subnet", subnet)
		}
		n.write(path, content("10.10.0.0/16"))
		n.start()
		n.waitReady(true, soon)
		assert.Assert(t, strings.HasPrefix(n.pod("before"), "10.10."))

		// In two halves, 2 s apart.
		text := content("10.20.0.0/16")
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
		assert.NilError(t, err)
		defer f.Close()
		_, err = f.WriteString(text[:len(text)/2])
		assert.NilError(t, err)
		half := time.Now()
		if side == harness.Stock {
			n.waitReady(false, soon)
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "half"}), "cni plugin not initialized"))
		} else {
			n.stays(true, time.Second)
			// The file is bad now: its last good content serves, visibly.
			assert.Assert(t, strings.HasPrefix(n.pod("half"), "10.10."))
			r := n.report()
			assert.Assert(t, r.Stale, "report does not say that the content is stale: %+v", r)
			assert.Assert(t, r.LastError != "")
			n.stays(true, time.Until(half.Add(2*time.Second)))
		}
		_, err = f.WriteString(text[len(text)/2:])
		assert.NilError(t, err)
		assert.NilError(t, f.Close())
		n.waitReady(true, soon)
		if side == harness.Patched {
			assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
				if r := n.report(); r.Stale {
					return errors.New("still stale after the write was complete")
				}
				return nil
			}))
		}
		assert.Assert(t, strings.HasPrefix(n.pod("whole"), "10.20."))

		return fmt.Sprintf("2 s half: %s; %s",
			map[harness.Side]string{harness.Stock: "false, pods fail", harness.Patched: "stays true"}[side], rewrites(t, side, content))
	})
}

// rewrites writes the list in use 400 times in place, while Status is polled
// and pods are added, and returns what was seen.
func rewrites(t *testing.T, side harness.Side, content func(subnet string) string) string {
	// Without the image a pod costs its ADD and DEL only: more of them.
	n := prepare(t, harness.Options{Side: side, NoImage: true})
	path := n.conf("10-a.conflist")
	n.write(path, content("10.20.0.0/16"))
	n.start()
	n.waitReady(true, soon)

	var notReady, asked, failed, added atomic.Int64
	var firstErr atomic.Value
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	pods := func(worker string) func() {
		return func() {
			for i := 0; ctx.Err() == nil; i++ {
				added.Add(1)
				if err := n.add(fmt.Sprintf("%s%d", worker, i)); err != nil {
					failed.Add(1)
					firstErr.CompareAndSwap(nil, err.Error())
				}
			}
		}
	}
	wait := parallel(pods("p"), pods("q"), pods("r"), func() {
		for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if c, err := n.Network(t.Context()); err != nil || !c.Ready {
				notReady.Add(1)
			}
			asked.Add(1)
		}
	})
	var final string
	for i := range 400 {
		final = fmt.Sprintf("10.%d.0.0/16", 30+i%200)
		assert.NilError(t, os.WriteFile(path, []byte(content(final)), 0o644))
		// Spread, so that pods and polls fall between the writes and into them.
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	wait()
	observed := fmt.Sprintf("400 rewrites: %d of %d polls not ready, %d of %d pods failed", notReady.Load(), asked.Load(), failed.Load(), added.Load())
	t.Log(observed)
	if side == harness.Stock {
		// How often stock is caught here is luck; the two halves have shown it.
		return observed
	}
	assert.Equal(t, notReady.Load(), int64(0))
	assert.Equal(t, failed.Load(), int64(0), "%v", firstErr.Load())
	assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
		if r := n.report(); r.Stale || r.LastError != "" {
			return fmt.Errorf("want the last content in use, got stale %t, last error %q", r.Stale, r.LastError)
		}
		return nil
	}))
	assert.NilError(t, n.add("last"))
	calls, err := n.Fake.Calls()
	assert.NilError(t, err)
	var subnet string
	for _, c := range calls {
		if c.Pod == "last" && c.Command == "ADD" && c.Plugin == "fakenet" {
			subnet = c.Stdin
		}
	}
	assert.Assert(t, cmp.Contains(subnet, final))
	return observed + ", last content in use"
}

// add runs a pod on a daemon without an image: its ADD must work.
func (n *node) add(pod string) error {
	_, err := n.RunPod(n.t.Context(), harness.Pod{Name: pod})
	switch {
	case err == nil:
		return fmt.Errorf("pod %s ran without an image", pod)
	case strings.Contains(err.Error(), harness.NoImage):
		return nil
	}
	return err
}

// An empty file that another agent will fill later is nobody's outage.
// https://github.com/k8snetworkplumbingwg/multus-cni/issues/1155
// https://github.com/istio/istio/issues/44167
func TestS6(t *testing.T) {
	sides(t, "multus#1155, istio#44167", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		empty := n.conf("00-multus.conf")
		touch(t, empty)
		if side == harness.Stock {
			n.stays(true, quiet/2)
			assert.NilError(t, os.WriteFile(n.conf("unrelated"), []byte("x"), 0o644))
			c, _ := n.waitReady(false, soon)
			return "drops at the next unrelated write: " + c.String()
		}
		assert.NilError(t, os.WriteFile(n.conf("unrelated"), []byte("x"), 0o644))
		n.stays(true, quiet)
		n.agree()
		n.pod("a")
		reason := n.skipped(empty)
		assert.Assert(t, cmp.Contains(n.report().Networks[networkIndex(n.report(), "a")].File.File, "10-a.conflist"))

		// It is there at start, and later it becomes a list.
		n.restart()
		n.waitReady(true, soon)
		n.skipped(empty)
		assert.NilError(t, os.WriteFile(empty, []byte(`{"cniVersion":"1.0.0","name":"multus","type":"fakenet"}`), 0o644))
		n.using("multus", atOnce)
		n.stays(true, 100*time.Millisecond)
		return "stays true, 00-multus.conf skipped: " + strings.ReplaceAll(reason, n.Base, "…") + "; 10-a in use"
	})
}

// skipped waits until the report lists a file as skipped and returns why.
func (n *node) skipped(path string) string {
	n.t.Helper()
	var reason string
	assert.NilError(n.t, harness.Poll(n.t.Context(), soon, func() error {
		r, err := n.Report(n.t.Context(), "")
		if err != nil {
			return err
		}
		for _, s := range r.Skipped {
			if s.File == path && s.Reason != "" {
				reason = s.Reason
				return nil
			}
		}
		return fmt.Errorf("%s is not among the skipped files %+v", path, r.Skipped)
	}))
	return reason
}

// One bad file must not hide the good one beside it.
// https://github.com/containerd/containerd/issues/8514
// https://github.com/flannel-io/flannel/issues/1082
func TestS7(t *testing.T) {
	variants := []struct {
		name  string
		place func(path string) error
	}{
		{"garbage", func(path string) error { return os.WriteFile(path, []byte("}garbage{\n"), 0o644) }},
		{"list in a .conf", func(path string) error { return os.WriteFile(path, []byte(c10("b")), 0o644) }},
		{"dangling symlink", func(path string) error { return os.Symlink("/nowhere/b.conf", path) }},
	}
	// Kinds of file stock would even wait for, so only for the patched side.
	neighbours := []struct {
		name  string
		place func(path string) error
	}{
		{"directory", func(path string) error { return os.Mkdir(path, 0o755) }},
		{"fifo", mkfifo},
		{"no name", func(path string) error {
			return os.WriteFile(path, []byte(`{"cniVersion":"1.0.0","type":"fakenet"}`), 0o644)
		}},
		{"too big", func(path string) error { return os.WriteFile(path, make([]byte, 64<<20), 0o644) }},
	}
	sides(t, "containerd#8514, flannel#1082", func(t *testing.T, side harness.Side) string {
		var seen []string
		all := variants
		if side == harness.Patched {
			all = append(all, neighbours...)
		}
		for _, v := range all {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side})
				bad := n.conf("05-b.conf")
				n.write(n.conf("10-a.conflist"), c10("a"))
				assert.NilError(t, v.place(bad))
				n.start()
				if side == harness.Stock {
					c, _ := n.waitReady(false, soon)
					assert.Assert(t, n.loadStatus() != "OK")
					assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "cni plugin not initialized"))
					seen = []string{c.String()}
					return
				}
				n.waitReady(true, soon)
				n.agree()
				reason := n.skipped(bad)
				n.pod("a")
				calls, err := n.Fake.Calls()
				assert.NilError(t, err)
				assert.Equal(t, networkOf(calls, "a"), "a")
				if len(seen) < len(variants) {
					seen = append(seen, v.name+": "+strings.ReplaceAll(reason, n.Base, "…"))
				}
				// Gone bad while running is the same as bad from the start.
				assert.NilError(t, os.RemoveAll(bad))
				assert.NilError(t, harness.Poll(t.Context(), soon, func() error {
					if r := n.report(); len(r.Skipped) > 0 {
						return fmt.Errorf("still skipped: %+v", r.Skipped)
					}
					return nil
				}))
				assert.NilError(t, v.place(bad))
				n.skipped(bad)
				n.stays(true, 200*time.Millisecond)
			})
		}
		return strings.Join(seen, "; ")
	})
}

// Removing the file in use is how vendors say "not ready".
// https://github.com/containerd/cri/issues/979
func TestS15(t *testing.T) {
	sides(t, "cri#979", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side})
		path := n.conf("10-a.conflist")
		n.write(path, c10("a"))
		n.start()
		n.waitReady(true, soon)
		assert.NilError(t, os.Remove(path))
		c, took := n.waitReady(false, atOnce)
		observed := fmt.Sprintf("false %s after the removal: %s", short(took), strings.ReplaceAll(c.Message, n.Base, "…"))
		n.refused(harness.Pod{Name: "a"})
		if side == harness.Stock {
			return observed
		}
		n.notReady(soon, "no network config found in "+n.ConfDir)

		// The same beside another file that is no network.
		bad := n.conf("20-bad.conflist")
		n.write(bad, "}garbage{")
		n.write(path, c10("a"))
		n.waitReady(true, atOnce)
		assert.NilError(t, os.Remove(path))
		n.waitReady(false, atOnce)
		n.notReady(soon, bad)

		// A file gone bad first and then removed: its last good content goes too.
		n.write(path, c10("a"))
		n.waitReady(true, atOnce)
		assert.NilError(t, os.WriteFile(path, []byte("{"), 0o644))
		n.stays(true, 300*time.Millisecond)
		assert.NilError(t, os.Remove(path))
		n.waitReady(false, atOnce)
		n.refused(harness.Pod{Name: "b"})
		return observed + "; also beside an invalid file"
	})
}
