// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
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

// renderedSubnet is the subnet in a whole rendered file.
func renderedSubnet(b []byte) (string, error) {
	var list struct {
		Plugins []struct {
			Subnet string `json:"subnet"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return "", fmt.Errorf("%w: %q", err, b)
	}
	if len(list.Plugins) != 2 || list.Plugins[0].Subnet == "" {
		return "", fmt.Errorf("not the whole list: %q", b)
	}
	return list.Plugins[0].Subnet, nil
}

// subnetOnDisk is the subnet of the rendered file.
func (n *node) subnetOnDisk() string {
	n.t.Helper()
	b, err := os.ReadFile(n.conf(rendered))
	assert.NilError(n.t, err)
	subnet, err := renderedSubnet(b)
	assert.NilError(n.t, err)
	return subnet
}

// serves waits until the list in use contains a text.
func (n *node) serves(text string, within time.Duration) time.Duration {
	n.t.Helper()
	begin := time.Now()
	assert.NilError(n.t, harness.Poll(n.t.Context(), within, func() error {
		c, info, err := n.Info(n.t.Context())
		if err == nil && (!c.Ready || !strings.Contains(info["cniconfig"], text)) {
			err = fmt.Errorf("want %q in use, got %v and %s", text, c, info["cniconfig"])
		}
		return err
	}))
	return time.Since(begin)
}

// Renders at the same time must not mix.
// https://github.com/containerd/containerd/issues/8607
func TestT4(t *testing.T) {
	sides(t, "containerd#8607", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, goodTemplate)
		n.NoImage = true
		n.start()
		// Somebody reads the file all the while.
		var done atomic.Bool
		var reads, torn atomic.Int64
		var firstTorn atomic.Value
		stop := parallel(func() {
			for ; !done.Load(); time.Sleep(200 * time.Microsecond) {
				b, err := os.ReadFile(n.conf(rendered))
				if err != nil {
					continue
				}
				reads.Add(1)
				if _, err := renderedSubnet(b); err != nil {
					torn.Add(1)
					firstTorn.CompareAndSwap(nil, err.Error())
				}
			}
		})
		render := func(first int) func() {
			return func() {
				for i := range 25 {
					if err := n.cidr(fmt.Sprintf("10.%d.0.0/16", first+i)); err != "" {
						t.Errorf("render: %s", err)
						return
					}
				}
			}
		}
		parallel(render(50), render(150))()
		assert.Equal(t, n.cidr("10.250.0.0/16"), "")
		done.Store(true)
		stop()
		assert.Equal(t, torn.Load(), int64(0), "%v", firstTorn.Load())
		n.waitReady(true, soon)
		last := n.subnetOnDisk()
		if side == harness.Stock {
			assert.Assert(t, last != "10.250.0.0/16")
			return "one of the first two wins, " + last + " is kept after 51 calls"
		}
		assert.Equal(t, last, "10.250.0.0/16")
		n.serves("10.250.0.0/16", 0)
		assert.DeepEqual(t, n.confDir(), []string{rendered})
		return fmt.Sprintf("the last of 51 calls wins; the file was whole in each of %d reads", reads.Load())
	})
}

// A list that is not ours has precedence, if it is one.
// https://github.com/containernetworking/cni/issues/878
func TestT5(t *testing.T) {
	sides(t, "cni#878", func(t *testing.T, side harness.Side) string {
		var seen []string
		t.Run("foreign list", func(t *testing.T) {
			n := templated(t, side, goodTemplate)
			n.NoImage = true
			n.write(n.conf("20-foreign.conflist"), c10("foreign"))
			n.start()
			n.inUse("foreign", soon)
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.keeps("foreign", quiet/3)
			assert.DeepEqual(t, n.confDir(), []string{"20-foreign.conflist"})
			if side == harness.Stock {
				seen = append(seen, "foreign list: not rendered, and nothing says so")
				return
			}
			r := n.report()
			assert.Assert(t, r.Template != nil)
			assert.Assert(t, cmp.Contains(r.Template.State, "20-foreign.conflist has precedence"))
			seen = append(seen, "foreign list: "+strings.ReplaceAll(r.Template.State, n.Base, "…"))
			// What is wrong with the template is no error meanwhile.
			assert.NilError(t, os.Rename(n.Template, n.aside("tmpl")))
			assert.Equal(t, n.cidr("10.51.0.0/16"), "")
			assert.Assert(t, cmp.Contains(n.report().Template.Error, "no such file"))
			assert.NilError(t, os.Rename(n.aside("tmpl"), n.Template))
			// It goes while nobody looks, and what was told last is rendered.
			assert.NilError(t, n.Stop())
			assert.NilError(t, os.Remove(n.conf("20-foreign.conflist")))
			n.start()
			n.serves("10.51.0.0/16", soon)
		})
		t.Run("broken foreign file", func(t *testing.T) {
			n := templated(t, side, goodTemplate)
			n.NoImage = true
			n.write(n.conf("05-broken.conflist"), "}garbage{")
			n.start()
			n.waitReady(false, soon)
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			assert.Equal(t, n.subnetOnDisk(), "10.50.0.0/16")
			if side == harness.Stock {
				n.stays(false, quiet/2)
				seen = append(seen, "broken foreign file: rendered but never loaded")
				return
			}
			n.serves("10.50.0.0/16", 0)
			n.skipped(n.conf("05-broken.conflist"))
			assert.NilError(t, n.add("p"))
			seen = append(seen, "broken foreign file: rendered and in use")
		})
		return strings.Join(seen, "; ")
	})
}

// The template is configuration, too.
func TestT6(t *testing.T) {
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, goodTemplate)
		n.NoImage = true
		n.start()
		assert.Equal(t, n.cidr("10.50.0.0/16"), "")
		n.serves("10.50.0.0/16", soon)
		n.write(n.Template, strings.Replace(goodTemplate, `"rendered"`, `"changed"`, 1))
		if side == harness.Stock {
			n.keeps("rendered", quiet)
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.restart()
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.inUse("rendered", soon)
			return "never seen, not by the next call nor after a restart"
		}
		took := n.inUse("changed", atOnce)
		assert.Equal(t, n.subnetOnDisk(), "10.50.0.0/16")

		// In place and in two halves: the half is not rendered.
		text := strings.Replace(goodTemplate, `"rendered"`, `"pieces"`, 1)
		f, err := os.Create(n.Template)
		assert.NilError(t, err)
		defer f.Close()
		_, err = f.WriteString(text[:len(text)/2])
		assert.NilError(t, err)
		n.keeps("changed", quiet/3)
		_, err = f.WriteString(text[len(text)/2:])
		assert.NilError(t, err)
		n.inUse("pieces", atOnce)

		// While the daemon is down.
		assert.NilError(t, n.Stop())
		n.write(n.Template, strings.Replace(goodTemplate, `"rendered"`, `"down"`, 1))
		n.start()
		n.inUse("down", soon)
		assert.NilError(t, n.add("p"))

		// Through a link, as a ConfigMap volume has it.
		n.write(n.aside("tmpl"), strings.Replace(goodTemplate, `"rendered"`, `"linked"`, 1))
		assert.NilError(t, os.Symlink(n.aside("tmpl"), n.aside("link")))
		assert.NilError(t, os.Rename(n.aside("link"), n.Template))
		n.inUse("linked", atOnce)
		n.write(n.aside("tmpl"), strings.Replace(goodTemplate, `"rendered"`, `"target"`, 1))
		target := n.inUse("target", atOnce)
		return fmt.Sprintf("rendered again and in use after %s; also written in halves, while the daemon is down, through a link (its target edited: after %s)",
			short(took), short(target))
	})
}

const dualTemplate = `{
  "cniVersion": "1.0.0",
  "name": "rendered",
  "plugins": [
    {"type": "fakenet", "ipam": {"type": "fakeipam",
      "ranges": [{{range $i, $range := .PodCIDRRanges}}{{if $i}}, {{end}}[{"subnet": "{{$range}}"}]{{end}}],
      "routes": [{{range $i, $route := .Routes}}{{if $i}}, {{end}}{"dst": "{{$route}}"}{{end}}]}}
  ]
}
`

// Dual stack, from the start and later.
// https://github.com/containerd/cri/issues/1274
func TestT7(t *testing.T) {
	sides(t, "containerd/cri#1274", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, dualTemplate)
		n.NoImage = true
		assert.NilError(t, n.InstallFake("fakeipam"))
		n.start()
		const (
			v4, v6  = "10.50.0.0/16", "fd00:50::/64"
			single4 = `"ranges":[[{"subnet":"10.50.0.0/16"}]],"routes":[{"dst":"0.0.0.0/0"}]`
			single6 = `"ranges":[[{"subnet":"fd00:50::/64"}]],"routes":[{"dst":"::/0"}]`
			both46  = `"ranges":[[{"subnet":"10.50.0.0/16"}],[{"subnet":"fd00:50::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]`
			both64  = `"ranges":[[{"subnet":"fd00:50::/64"}],[{"subnet":"10.50.0.0/16"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]`
		)
		pods := 0
		// is checks what a pod's ADD is given.
		is := func(want string) {
			t.Helper()
			n.waitReady(true, soon)
			pods++
			pod := fmt.Sprintf("p%d", pods)
			assert.NilError(t, n.add(pod))
			calls, err := n.Fake.Calls()
			assert.NilError(t, err)
			var stdin string
			for _, c := range calls {
				if c.Pod == pod && c.Plugin == "fakenet" && c.Command == "ADD" {
					stdin = c.Stdin
				}
			}
			assert.Assert(t, cmp.Contains(strings.Join(strings.Fields(stdin), ""), want))
		}
		if side == harness.Stock {
			assert.Equal(t, n.cidr(v4+","+v6), "")
			is(both46)
			assert.Equal(t, n.cidr(v4), "")
			is(both46)
			return "first render good, later ones ignored"
		}
		for _, step := range []struct{ cidrs, want string }{
			{v4, single4}, {v4 + "," + v6, both46}, {v6, single6}, {v6 + "," + v4, both64}, {v4 + ", " + v6, both46}, {v4, single4},
		} {
			assert.Equal(t, n.cidr(step.cidrs), "")
			is(step.want)
		}
		assert.Equal(t, n.cidr(v4+","+v6), "")
		n.restart()
		is(both46)
		return "single, dual in both orders, and back; across a restart"
	})
}

// A rendered file that was edited belongs to its editor.
func TestT8(t *testing.T) {
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := templated(t, side, goodTemplate)
		n.NoImage = true
		n.start()
		assert.Equal(t, n.cidr("10.50.0.0/16"), "")
		n.serves("10.50.0.0/16", soon)
		edited := c10("edited")
		assert.NilError(t, os.WriteFile(n.conf(rendered), []byte(edited), 0o644))
		n.inUse("edited", atOnce)
		stays := func(when string) {
			t.Helper()
			b, err := os.ReadFile(n.conf(rendered))
			assert.NilError(t, err)
			assert.Equal(t, string(b), edited, when)
			n.inUse("edited", soon)
		}
		assert.Equal(t, n.cidr("10.60.0.0/16"), "")
		stays("new CIDR")
		if side == harness.Stock {
			return "not overwritten (nothing ever is), and nothing says so"
		}
		state := n.report().Template.State
		assert.Assert(t, cmp.Contains(state, "edited since"))
		n.write(n.Template, strings.Replace(goodTemplate, `"rendered"`, `"changed"`, 1))
		time.Sleep(quiet / 2)
		stays("new template")
		n.restart()
		stays("restart")
		assert.Equal(t, n.cidr("10.70.0.0/16"), "")
		stays("new CIDR after a restart")
		assert.Assert(t, cmp.Contains(n.report().Template.State, "edited since"))

		// Removed, it is ours to render again at the next call, not before.
		assert.NilError(t, os.Remove(n.conf(rendered)))
		n.waitReady(false, atOnce)
		time.Sleep(quiet / 3)
		_, err := os.Lstat(filepath.Join(n.ConfDir, rendered))
		assert.Assert(t, os.IsNotExist(err), "a removed file came back by itself: %v", err)
		assert.Equal(t, n.cidr("10.80.0.0/16"), "")
		n.serves("10.80.0.0/16", 0)
		return "not overwritten by CIDR, template or restart: " + strings.ReplaceAll(state, n.Base, "…")
	})
}
