// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cnireload/cnireload/internal/testenv"
)

// A bin dir can be a symlink, and so can what is in it.
func TestLeftOverBehindSymlinks(t *testing.T) {
	testenv.SetBound(t, "DEL", time.Second)
	d := newNode(t)
	id := fmt.Sprintf("pod-%d", time.Now().UnixNano())
	sleep, err := exec.LookPath("sleep")
	d.must(err)
	d.must(os.Symlink(d.bin, d.bin+".link"))
	// One that takes no arguments, and sleeps: "cat" of a pipe.
	cat, err := exec.LookPath("cat")
	d.must(err)
	d.must(os.Symlink(cat, filepath.Join(d.bin, "linked")))
	pids := filepath.Join(d.log, "pid")
	cmd := exec.Command("setsid", "-f", "sh", "-c", fmt.Sprintf(`%s 300 | { sh -c 'echo $PPID' >%s; exec %s.link/linked; }`, sleep, pids, d.bin))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=DEL", "CNI_CONTAINERID=" + id}
	d.must(cmd.Run())
	pid := testenv.ReadPID(t, within, pids)
	var parent int
	eventually(t, func() string {
		f := &foundPlugin{pid: pid}
		if !f.readStat() || f.name != "linked" {
			return "not yet executed"
		}
		parent = f.parent
		return ""
	})
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL); _ = syscall.Kill(-parent, syscall.SIGKILL) })
	d.must(syscall.Kill(parent, syscall.SIGKILL)) // its shell
	eventually(t, func() string {
		if f := (&foundPlugin{pid: pid}); !f.readStat() || f.parent == parent {
			return "its parent is still there"
		}
		return ""
	})
	var r Processes
	defer r.Close()
	r.FindLeftOvers(t.Context(), []string{d.bin + ".link"}, func(context.Context) map[string]bool { return map[string]bool{id: true} })
	eventually(t, func() string {
		if testenv.Alive(pid) {
			return fmt.Sprintf("still runs: %v", r.List())
		}
		return ""
	})
}
