// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// answers has a fake plugin answer one verb in that way.
func (n *node) answers(plugin, verb string, b fake.Behavior) {
	n.t.Helper()
	assert.NilError(n.t, n.Fake.Set(plugin, fake.State{Verbs: map[string]fake.Behavior{verb: b}}))
}

// masked shortens folders that differ in every run.
func (n *node) masked(s string) string { return strings.ReplaceAll(s, n.Base, "…") }

// cause is a condition's message without the words that all have.
func (n *node) cause(message string) string {
	return n.masked(strings.TrimPrefix(message, notInitialized+": "))
}

// bin is the path of a plugin in the first bin dir.
func (n *node) bin(name string) string { return filepath.Join(n.BinDirs[0], name) }

// added checks that a pod got past its ADD: in a daemon without an image only
// that stops it then.
func (n *node) added(p harness.Pod) {
	n.t.Helper()
	assert.Assert(n.t, cmp.Contains(n.refused(p), harness.NoImage))
}

// A plugin that does not speak the list's version cannot be used.
// https://github.com/containerd/containerd/issues/6876
// https://github.com/k0sproject/k0s/issues/1776
func TestR4(t *testing.T) {
	sides(t, "containerd#6876, k0s#1776", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Versions: []string{"0.3.0", "0.3.1"}}))
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()

		if side == harness.Stock {
			n.waitReady(true, soon)
			err := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(err, "incompatible CNI versions"))
			return "NetworkReady true; pod fails: incompatible CNI versions"
		}
		message := n.notReady(soon, `"fakenet"`, n.bin("fakenet"), "cniVersion 1.0.0", "0.3.0, 0.3.1")
		err := n.refused(harness.Pod{Name: "a"})
		assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
		assert.Equal(t, n.calls("fakenet", "ADD"), 0)

		// A list that suits the plugin, or a plugin that suits the list, will do.
		n.write(n.conf("10-c10.conflist"), conflist("c03", "0.3.1", []string{"fakenet", "portmap"}))
		n.waitReady(true, atOnce)
		n.added(harness.Pod{Name: "b"})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.notReady(soon, "cniVersion 1.0.0")
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.NilError(t, n.InstallFake("fakenet"))
		n.waitReady(true, atOnce)
		n.added(harness.Pod{Name: "c"})
		return n.cause(message)
	})
}

// A plugin that is there and answers VERSION with anything but versions is
// told from one that is missing: neighbours of R4.
func TestR4Neighbours(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		name   string
		answer fake.Behavior
		causes []string
	}{
		{"nothing", fake.Behavior{Mode: fake.Silent}, nil},
		{"garbage", fake.Behavior{Mode: fake.Print, Msg: "usage: fakenet \x1b[31m[flags]\n"}, nil},
		{"an error", fake.Behavior{Mode: fake.Fail, Code: 7, Msg: "no such agent"}, []string{"no such agent"}},
		{"fails silently", fake.Behavior{Mode: fake.Silent, Exit: 3}, []string{"exit status 3"}},
		{"hangs", fake.Behavior{Mode: fake.Hang}, []string{"did not finish within 1s"}},
		{"megabytes", fake.Behavior{Mode: fake.Print, Msg: strings.Repeat("x", 3<<20)}, []string{"bytes, the limit is"}},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true,
				Timeouts: map[string]string{"io.containerd.timeout.cri.cni.version": "1s"}})
			n.answers("fakenet", "VERSION", v.answer)
			n.write(n.conf("10-c10.conflist"), c10("c10"))
			n.start()
			message := n.notReady(soon, append(v.causes, `"fakenet"`, n.bin("fakenet"), "mis-answers VERSION")...)
			assert.Assert(t, !strings.Contains(message, "not found"), message)
			assert.Assert(t, len(message) <= 1<<10, "%d bytes", len(message))
			assert.Assert(t, !strings.ContainsAny(message, "\n\x1b"), "%q", message)
			t.Logf("%s", n.cause(message))

			// It is asked again without any change on disk.
			assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
			n.waitReady(true, 2*soon)
			n.agree()
		})
	}
	t.Run("readiness parse", func(t *testing.T) {
		n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true, CNI: []string{`readiness = "parse"`}})
		n.answers("fakenet", "VERSION", fake.Behavior{Mode: fake.Silent})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		n.start()
		n.waitReady(true, soon)
		n.agree()
		n.added(harness.Pod{Name: "a"})
	})
	t.Run("ipam", func(t *testing.T) {
		n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
		assert.NilError(t, n.InstallFake("bridge", "fakeipam"))
		assert.NilError(t, n.Fake.Set("fakeipam", fake.State{Versions: []string{"0.4.0"}}))
		n.write(n.conf("10-a.conflist"), `{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"bridge","ipam":{"type":"fakeipam"}}]}`)
		n.start()
		n.notReady(soon, `"fakeipam"`, "cniVersion 1.0.0", "0.4.0")
	})
}

// A file that no plugin can be called with is not a network.
// https://github.com/containerd/containerd/issues/4012
// https://github.com/containernetworking/cni/issues/882
func TestR5(t *testing.T) {
	variants := []struct{ name, file, content, reason string }{
		{"no name", "10-bad.conf", `{"cniVersion":"1.0.0","type":"fakenet"}`, "network name is missing"},
		{"cniVersion 7.7.7", "10-bad.conflist", conflist("bad", "7.7.7", []string{"fakenet"}), `"7.7.7"`},
		{"cniVersion garbage", "10-bad.conflist", conflist("bad", "garbage", []string{"fakenet"}), `"garbage"`},
		{"bad name!", "10-bad.conflist", conflist("bad name!", "1.0.0", []string{"fakenet"}), `"bad name!"`},
	}
	sides(t, "containerd#4012, cni#882", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				n.write(n.conf(v.file), v.content)
				n.start()
				if side == harness.Stock {
					n.waitReady(true, soon)
					assert.Equal(t, n.loadStatus(), "OK")
					err := n.refused(harness.Pod{Name: "a"})
					if strings.Contains(err, harness.NoImage) {
						err = "the plugin is called with it"
					} else {
						_, err, _ = strings.Cut(err, `": `)
					}
					seen = append(seen, v.name+": true; "+n.masked(err))
					return
				}
				message := n.notReady(soon, n.conf(v.file), v.reason)
				assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), v.reason))
				assert.Equal(t, n.calls("fakenet", "ADD"), 0)

				// The next good file is used instead, and the bad one named.
				n.write(n.conf("20-good.conflist"), c10("good"))
				n.waitReady(true, atOnce)
				n.using("good", atOnce)
				r := n.report()
				assert.Equal(t, len(r.Skipped), 1, "%+v", r.Skipped)
				assert.Equal(t, r.Skipped[0].File, n.conf(v.file))
				assert.Assert(t, cmp.Contains(r.Skipped[0].Reason, v.reason))
				n.added(harness.Pod{Name: "b"})
				_, reason, _ := strings.Cut(n.cause(message), n.masked(n.conf(v.file))+" ")
				seen = append(seen, v.name+": skipped: "+reason)
			})
		}
		return strings.Join(seen, "; ")
	})
}

// A plugin's file that is there but cannot be executed.
// https://github.com/k3s-io/k3s/issues/12846
// https://github.com/cri-o/cri-o/issues/9439
func TestR6(t *testing.T) {
	variants := []struct {
		name   string
		place  func(path string) error
		reason string
		stock  string
	}{
		{"no execute bit", func(path string) error { return os.Chmod(path, 0o644) }, "is not executable (mode 0644)", "netplugin failed with no error message"},
		{"a directory", func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Mkdir(path, 0o755)
		}, "is not a regular file but a directory", "failed to find plugin"},
		{"a dangling link", func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Symlink("nowhere", path)
		}, "is a symlink that leads nowhere", "failed to find plugin"},
	}
	sides(t, "k3s#12846, cri-o#9439", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range variants {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				second := filepath.Join(n.Base, "bin2")
				assert.NilError(t, os.Mkdir(second, 0o755))
				n.BinDirs = append(n.BinDirs, second)
				assert.NilError(t, v.place(n.bin("portmap")))
				n.write(n.conf("10-c10.conflist"), c10("c10"))
				n.start()
				if side == harness.Stock {
					n.waitReady(true, soon)
					err := n.refused(harness.Pod{Name: "a"})
					assert.Assert(t, cmp.Contains(err, v.stock))
					seen = append(seen, v.name+": true; "+v.stock)
					return
				}
				message := n.notReady(soon, `"portmap"`, n.bin("portmap")+" "+v.reason)
				assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), v.reason))

				// A good one in a later bin dir is used.
				src, err := harness.Fakenet()
				assert.NilError(t, err)
				assert.NilError(t, harness.Install(src, filepath.Join(second, "portmap")))
				n.waitReady(true, atOnce)
				r := n.report()
				i := networkIndex(r, "c10")
				assert.Assert(t, i >= 0)
				assert.Equal(t, r.Networks[i].Plugins[1].Path, filepath.Join(second, "portmap"))
				n.added(harness.Pod{Name: "b"})
				seen = append(seen, v.name+": "+n.cause(message))

				// And the first one, once it is as it should be.
				assert.NilError(t, os.RemoveAll(n.bin("portmap")))
				assert.NilError(t, n.InstallFake("portmap"))
				assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
					r := n.report()
					if got := r.Networks[networkIndex(r, "c10")].Plugins[1].Path; got != n.bin("portmap") {
						return fmt.Errorf("%s in use", got)
					}
					return nil
				}))
			})
		}
		if side == harness.Patched {
			t.Run("chmod alone", func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				assert.NilError(t, os.Chmod(n.bin("portmap"), 0o600))
				n.write(n.conf("10-c10.conflist"), c10("c10"))
				n.start()
				n.notReady(soon, "mode 0600")
				assert.NilError(t, os.Chmod(n.bin("portmap"), 0o755))
				_, took := n.waitReady(true, atOnce)
				seen = append(seen, fmt.Sprintf("true %s after chmod; a good one in a later bin dir is used", short(took)))
			})
		}
		return strings.Join(seen, "; ")
	})
}

// An installer that still writes the executable is waited for.
// https://github.com/containernetworking/cni/issues/1183
// https://github.com/containernetworking/cni/issues/855
func TestR7(t *testing.T) {
	sides(t, "cni#1183, cni#855", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		n.write(n.conf("10-c10.conflist"), c10("c10"))
		hold := func() (release func()) {
			f, err := os.OpenFile(n.bin("fakenet"), os.O_WRONLY, 0)
			assert.NilError(t, err)
			return func() { _ = f.Close() }
		}

		if side == harness.Stock {
			n.start()
			n.waitReady(true, soon)
			release := hold()
			time.AfterFunc(700*time.Millisecond, release)
			err := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(err, "exec: already started"))
			return "pod fails: exec: already started"
		}

		// While the daemon asks it for its versions.
		release := hold()
		n.start()
		n.stays(false, 700*time.Millisecond)
		waiting := n.network()
		release()
		_, took := n.waitReady(true, atOnce)

		// While a pod is added, for a moment.
		release = hold()
		time.AfterFunc(700*time.Millisecond, release)
		n.added(harness.Pod{Name: "a"})
		// And for longer than anybody waits.
		release = hold()
		err := n.refused(harness.Pod{Name: "b"})
		release()
		assert.Assert(t, cmp.Contains(err, "text file busy"))
		assert.Assert(t, !strings.Contains(err, "already started"), err)
		n.stays(true, quiet)
		n.added(harness.Pod{Name: "c"})

		// Longer than anybody waits, when it is asked for its versions.
		release = hold()
		n.restart()
		message := n.notReady(2*soon, `"fakenet"`, "mis-answers VERSION", "is being written")
		release()
		n.waitReady(true, 2*soon)
		return fmt.Sprintf("false (%s), true %s after the writer is done; a pod in between runs; one that cannot fails with %q; after 5s: %s",
			n.cause(waiting.Message), short(took), "text file busy", n.cause(message))
	})
}

// A plugin's own word that it is not ready.
// https://github.com/cilium/cilium/issues/37477
// https://github.com/rancher/rke2/issues/10360
func TestR8(t *testing.T) {
	sides(t, "cilium#37477, rke2#10360", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true, ReadyWait: "10s"})
		n.answers("fakenet", "STATUS", fake.Behavior{Mode: fake.Fail, Code: 50, Msg: "agent is away"})
		n.write(n.conf("10-c11.conflist"), c11("c11"))
		n.start()
		if side == harness.Stock {
			c, _ := n.waitReady(false, soon)
			n.stays(false, quiet)
			err := n.refused(harness.Pod{Name: "a"})
			assert.Assert(t, cmp.Contains(err, harness.NoImage))
			return fmt.Sprintf("false: %s; a pod is added all the same, %d ADD", c.Message, n.calls("fakenet", "ADD"))
		}
		message := n.notReady(soon, `"fakenet"`, n.bin("fakenet"), "STATUS", "50", "agent is away")
		n.stays(false, quiet)

		// A pod is held, and goes on when the plugin is ready.
		done := make(chan string, 1)
		go func() {
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "a"})
			done <- fmt.Sprint(err)
		}()
		time.Sleep(700 * time.Millisecond)
		assert.Equal(t, n.calls("fakenet", "ADD"), 0)
		assert.Equal(t, n.calls("loopback", "ADD"), 0)
		begin := time.Now()
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		assert.Assert(t, cmp.Contains(<-done, harness.NoImage))
		held := time.Since(begin)
		assert.Assert(t, held < soon, "%v", held)
		assert.Equal(t, n.calls("fakenet", "ADD"), 1)
		n.agree()

		// It says so again, later.
		n.answers("fakenet", "STATUS", fake.Behavior{Mode: fake.Fail, Code: 51, Msg: "no connectivity"})
		n.notReady(8*time.Second, "51", "no connectivity")
		return fmt.Sprintf("%s; ADD held, done %s after STATUS is good", n.cause(message), short(held))
	})
}

// A plugin that does not know STATUS has not said that it is not ready.
// https://github.com/istio/istio/issues/53160
// https://github.com/antrea-io/antrea/issues/6348
func TestR9(t *testing.T) {
	sides(t, "istio#53160, antrea#6348", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range []struct {
			name   string
			answer fake.Behavior
		}{
			{"code 4", fake.Behavior{Mode: fake.Fail, Code: 4, Msg: "unknown CNI_COMMAND: STATUS"}},
			{"code 1", fake.Behavior{Mode: fake.Fail, Code: 1, Msg: "plugin version does not allow STATUS"}},
		} {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				n.answers("portmap", "STATUS", v.answer)
				n.write(n.conf("10-c11.conflist"), c11("c11"))
				n.start()
				if side == harness.Stock {
					c, _ := n.waitReady(false, soon)
					n.stays(false, quiet)
					assert.Assert(t, !strings.Contains(c.Message, "portmap"), c.Message)
					seen = append(seen, v.name+": "+c.String())
					return
				}
				n.waitReady(true, soon)
				n.stays(true, quiet)
				n.agree()
				r := n.report()
				i := networkIndex(r, "c11")
				assert.Assert(t, i >= 0)
				assert.Equal(t, r.Networks[i].Plugins[0].StatusVerb, "ok")
				p := r.Networks[i].Plugins[1]
				assert.Equal(t, p.Type, "portmap")
				assert.Equal(t, p.StatusVerb, "not supported")
				assert.Equal(t, p.Status, "ok")
				n.added(harness.Pod{Name: "a"})
				seen = append(seen, v.name+": ready; the report says STATUS of portmap is not supported")
			})
		}
		return strings.Join(seen, "; ")
	})
}

// The network of another runtime handler has a state of its own.
// https://github.com/containerd/containerd/pull/4695
func TestR10(t *testing.T) {
	sides(t, "containerd PR 4695", func(t *testing.T, side harness.Side) string {
		var seen []string
		for _, v := range []struct {
			name  string
			place func(n *node, dir string)
			cause func(n *node, dir string) string
		}{
			{"empty", func(*node, string) {}, func(_ *node, dir string) string { return "no network config found in " + dir }},
			{"broken", func(n *node, dir string) {
				n.write(filepath.Join(dir, "10-o.conflist"), conflist("o", "1.0.0", []string{"fakenet", "absent"}))
			}, func(n *node, _ string) string { return `plugin "absent" not found in ` + n.BinDirs[0] }},
		} {
			t.Run(v.name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				dir := filepath.Join(n.Base, "other.d")
				assert.NilError(t, os.Mkdir(dir, 0o755))
				n.Handlers = map[string]harness.Handler{"other": {ConfDir: dir}}
				n.write(n.conf("10-c10.conflist"), c10("c10"))
				v.place(n, dir)
				n.start()
				n.waitReady(true, soon)
				n.added(harness.Pod{Name: "a"})
				before := n.calls("fakenet", "ADD")
				err := n.refused(harness.Pod{Name: "o", Handler: "other"})
				assert.Assert(t, !strings.Contains(err, harness.NoImage), err)
				_, info, ierr := n.Info(t.Context())
				assert.NilError(t, ierr)
				load := info["lastCNILoadStatus.other"]
				if side == harness.Stock {
					assert.Equal(t, info["cniReload.other"], "")
					seen = append(seen, fmt.Sprintf("%s: node ready, lastCNILoadStatus.other %q, pod fails after %d ADD", v.name, n.masked(load), n.calls("fakenet", "ADD")-before))
					return
				}
				cause := v.cause(n, dir)
				assert.Assert(t, cmp.Contains(err, "cni plugin not initialized"))
				assert.Assert(t, cmp.Contains(err, cause))
				assert.Equal(t, n.calls("fakenet", "ADD"), before)
				assert.Assert(t, cmp.Contains(load, cause))
				r, rerr := harness.ReportFrom(info, "other")
				assert.NilError(t, rerr)
				assert.Assert(t, !r.Ready)
				assert.Equal(t, r.Reason, "NetworkPluginNotReady")
				assert.Assert(t, cmp.Contains(r.Message, cause))
				assert.Equal(t, r.ConfDir, dir)
				n.stays(true, quiet/3)
				n.agree()

				// Its own file mends it; the default network is not concerned.
				generation := n.report().Generation
				n.write(filepath.Join(dir, "10-o.conflist"), conflist("o", "1.0.0", []string{"fakenet"}))
				assert.NilError(t, harness.Poll(t.Context(), atOnce, func() error {
					r, err := n.Report(t.Context(), "other")
					if err == nil && !r.Ready {
						err = fmt.Errorf("not ready: %s", r.Message)
					}
					return err
				}))
				n.added(harness.Pod{Name: "o2", Handler: "other"})
				calls, cerr := n.Fake.Calls()
				assert.NilError(t, cerr)
				assert.Equal(t, networkOf(calls, "o2"), "o")
				assert.Equal(t, n.report().Generation, generation)
				seen = append(seen, v.name+": node ready, cniReload.other and the pod: "+n.masked(cause))
			})
		}
		return strings.Join(seen, "; ")
	})
}

// How many lists a runtime handler with its own directory uses: 0, which "containerd config default" writes
// out, means the global number, and a negative one means all.
func TestR11(t *testing.T) {
	sides(t, "containerd config default", func(t *testing.T, side harness.Side) string {
		adds := func(max *int) (networks []string) {
			name := "unset"
			if max != nil {
				name = fmt.Sprint(*max)
			}
			t.Run(name, func(t *testing.T) {
				n := prepare(t, harness.Options{Side: side, NoImage: true})
				dir := filepath.Join(n.Base, "other.d")
				assert.NilError(t, os.Mkdir(dir, 0o755))
				n.Handlers = map[string]harness.Handler{"other": {ConfDir: dir, MaxConfNum: max}}
				n.write(n.conf("10-c10.conflist"), c10("c10"))
				for _, name := range []string{"a", "b", "c"} {
					n.write(filepath.Join(dir, "10-"+name+".conflist"), conflist(name, "1.0.0", []string{"fakenet"}))
				}
				n.start()
				n.waitReady(true, soon)
				n.added(harness.Pod{Name: "p", Handler: "other"})
				calls, err := n.Fake.Calls()
				assert.NilError(t, err)
				for _, c := range calls {
					if c.Pod == "p" && c.Command == "ADD" && c.Plugin == "fakenet" {
						networks = append(networks, c.Network)
					}
				}
			})
			return networks
		}
		unset, two, zero, all := adds(nil), adds(new(2)), adds(new(0)), adds(new(-1))
		assert.Equal(t, len(unset), 1, "%v", unset)
		assert.Equal(t, len(two), 2, "%v", two)
		assert.Equal(t, len(zero), 1, "%v", zero)
		assert.Equal(t, len(all), 3, "%v", all)
		return fmt.Sprintf("of 3 lists: unset %d ADD, 2: %d, 0: %d, -1: %d", len(unset), len(two), len(zero), len(all))
	})
}

// A plugin that another program inserts into the list, and that pods must not
// start without.
// https://github.com/istio/istio/issues/11037
// https://github.com/istio/istio/issues/55968
// https://github.com/cilium/cilium/issues/30614
func TestR12(t *testing.T) {
	sides(t, "istio#11037, #55968, cilium#30614", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NoImage: true})
		if side == harness.Patched {
			n.CNI = []string{`required_plugins = ["portmap"]`}
		}
		with, without := c10("c10"), conflist("c10", "1.0.0", []string{"fakenet"})
		n.write(n.conf("10-c10.conflist"), with)
		n.start()
		n.waitReady(true, soon)
		n.added(harness.Pod{Name: "a"})

		n.write(n.conf("10-c10.conflist"), without)
		if side == harness.Stock {
			n.stays(true, quiet)
			before := n.calls("portmap", "ADD")
			n.added(harness.Pod{Name: "b"})
			assert.Equal(t, n.calls("portmap", "ADD"), before)
			return "NetworkReady true; pods start without portmap"
		}
		message := n.notReady(atOnce, `required plugin "portmap"`)
		before := n.calls("fakenet", "ADD")
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "b"}), `required plugin "portmap"`))
		assert.Equal(t, n.calls("fakenet", "ADD"), before)
		n.write(n.conf("10-c10.conflist"), with)
		_, took := n.waitReady(true, atOnce)
		n.added(harness.Pod{Name: "c"})
		return fmt.Sprintf("%s; true %s after it is back", n.cause(message), short(took))
	})
}
