// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/cnireload/cnireload/test/harness"
)

// TestTemplateCrash kills the daemon at any moment while the pod CIDR goes to
// and fro.
func TestTemplateCrash(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	kills := 20
	if os.Getenv("CNIRELOAD_LONG") != "" {
		kills = 100
	}
	n := templated(t, harness.Patched, goodTemplate)
	n.NoImage = true
	n.start()
	cidrs := []string{"10.50.0.0/16", "10.60.0.0/16"}
	assert.Equal(t, n.cidr(cidrs[0]), "")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	found := map[string]int{}
	var calls atomic.Int64
	for kill := range kills {
		// Calls until the daemon is gone: the last one to answer and the one
		// that was under way.
		var answered atomic.Int64
		answered.Store(-1)
		wait := parallel(func() {
			for i := 0; n.SetCIDR(t.Context(), cidrs[i%2]) == nil; i++ {
				answered.Store(int64(i))
				calls.Add(1)
			}
		})
		time.Sleep(time.Duration(random.Int64N(int64(60 * time.Millisecond))))
		assert.NilError(t, syscall.Kill(n.PID(), syscall.SIGKILL))
		<-n.Ended()
		wait()
		assert.NilError(t, n.Stop())

		b, err := os.ReadFile(n.conf(rendered))
		assert.NilError(t, err)
		subnet, err := renderedSubnet(b)
		assert.NilError(t, err, "after kill %d", kill)
		last := answered.Load()
		if last >= 0 && subnet != cidrs[last%2] && subnet != cidrs[(last+1)%2] {
			t.Fatalf("kill %d: the file has %s after call %d", kill, subnet, last)
		}
		want := strings.Replace(goodTemplate, "{{.PodCIDR}}", subnet, 1)
		assert.Equal(t, string(b), want, "after kill %d", kill)
		switch {
		case last < 0:
			found["before the first answer"]++
		case subnet == cidrs[last%2]:
			found["old"]++
		default:
			found["new"]++
		}

		// What is on disk is in use at once and still ours.
		n.start()
		n.serves(subnet, soon)
		state := n.report().Template.State
		assert.Equal(t, state, "rendered", "after kill %d", kill)
		other := fmt.Sprintf("10.%d.0.0/16", 100+kill)
		assert.Equal(t, n.cidr(other), "")
		assert.Equal(t, n.subnetOnDisk(), other)
		n.serves(other, 0)
		assert.Equal(t, n.cidr(cidrs[0]), "")
	}
	junk := len(n.confDir()) - 1
	t.Logf("%d kills during %d calls: the file was whole each time: %v; %d temporary files of killed writes", kills, calls.Load(), found, junk)
	assert.NilError(t, n.add("p"))
}

// TestTemplateDiskFull has no room for a new file: the old one and the network
// stay.
func TestTemplateDiskFull(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make test-e2e", harness.Patched); err != nil {
		t.Fatal(err)
	}
	const room = "size=64k"
	fill := func(n *node, dir string) error {
		return n.InNamespace("/bin/sh", "-c", `head -c 1000000 /dev/zero > "$0/fill" 2>/dev/null; [ -s "$0/fill" ]`, dir)
	}
	for _, where := range []string{"conf dir", "record"} {
		t.Run(where, func(t *testing.T) {
			n := templated(t, harness.Patched, goodTemplate)
			n.NoImage = true
			dir := n.ConfDir
			if where == "record" {
				// Known from a first run.
				n.start()
				assert.Equal(t, n.cidr("10.40.0.0/16"), "")
				dir = filepath.Dir(n.recordPath())
				assert.NilError(t, n.Stop())
				assert.NilError(t, os.Remove(n.conf(rendered)))
			}
			n.Mounts = [][]string{{"-t", "tmpfs", "-o", room, "none", dir}}
			n.start()
			assert.Equal(t, n.cidr("10.50.0.0/16"), "")
			n.serves("10.50.0.0/16", 0)
			assert.NilError(t, fill(n, dir))
			err := n.cidr("10.60.0.0/16")
			assert.Assert(t, cmp.Contains(err, "no space left on device"))
			assert.Assert(t, cmp.Contains(n.report().Template.State, "failed"))
			n.serves("10.50.0.0/16", 0)
			assert.NilError(t, n.add("p"))
			// The template changes meanwhile: tried, and given up for now.
			lines := n.logLines("conf_template cannot be rendered")
			n.write(n.Template, strings.Replace(goodTemplate, `"rendered"`, `"later"`, 1))
			time.Sleep(quiet)
			assert.Equal(t, n.logLines("conf_template cannot be rendered"), lines)
			n.serves("10.50.0.0/16", 0)
			// With room again the next call renders.
			assert.NilError(t, n.InNamespace("rm", filepath.Join(dir, "fill")))
			assert.Equal(t, n.cidr("10.70.0.0/16"), "")
			n.serves("10.70.0.0/16", 0)
			n.inUse("later", 0)
			n.restart()
			t.Logf("%s full: %s", where, strings.ReplaceAll(err, n.Base, "…"))
		})
	}
}

// recordPath is where the daemon remembers what it rendered.
func (n *node) recordPath() string {
	n.t.Helper()
	var found string
	assert.NilError(n.t, filepath.WalkDir(filepath.Join(n.Base, "root"), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && e.Name() != "meta.db" {
			if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), rendered) && strings.Contains(string(b), "sha256") {
				found = path
			}
		}
		return nil
	}))
	assert.Assert(n.t, found != "", "no record found")
	return found
}
