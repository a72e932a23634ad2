// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cnireload/cnireload/internal/testenv"
)

// leave starts a plugin that no runtime waits for, as a killed one leaves it.
// Its parent is a shell of its own, which has ended unless alive is set.
func (d *node) leave(typ, verb, id string) (pid int) {
	d.t.Helper()
	pids := filepath.Join(d.log, "left-"+verb+"-"+id)
	path := d.executable(typ, fmt.Sprintf(`echo $$ >'%s.tmp'; mv '%[1]s.tmp' '%[1]s'; sleep 300 & echo $! >'%s'; wait`, pids, filepath.Join(d.log, "child-"+verb+"-"+id)))
	cmd := exec.Command("setsid", "-f", path)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_PATH=" + d.bin}
	d.must(cmd.Run())
	pid = testenv.ReadPID(d.t, within, pids)
	d.t.Cleanup(func() { _ = syscall.Kill(-pid, syscall.SIGKILL) })
	return pid
}

func processesOf(n *Network, state ProcessState) []string {
	var list []string
	for _, p := range n.Processes() {
		if p.State == state {
			list = append(list, fmt.Sprintf("%s %s %s", p.Plugin, p.Verb, p.ID))
		}
	}
	return list
}

// A plugin that a killed containerd left may hold a lock for ever.
func TestLeftOverIsFoundAndEnded(t *testing.T) {
	testenv.SetBound(t, "DEL", 3*time.Second)
	d := newNode(t)
	id, stranger := fmt.Sprintf("pod-%d", time.Now().UnixNano()), fmt.Sprintf("stranger-%d", time.Now().UnixNano())
	mine, other := d.leave("locker", "DEL", id), d.leave("strange", "DEL", stranger)
	n := d.started(exists(id))
	eventually(t, func() string {
		if got := processesOf(n, ProcessLeftOver); len(got) != 1 || got[0] != "locker DEL "+id {
			return fmt.Sprintf("found %q", got)
		}
		return ""
	})
	if !testenv.Alive(mine) {
		t.Error("ended before its bound")
	}
	if since := n.Processes()[0].Since; time.Since(since) > time.Minute || time.Until(since) > time.Second {
		t.Errorf("runs since %s", since)
	}
	eventually(t, func() string {
		if testenv.Alive(mine) || len(n.Processes()) > 0 {
			return fmt.Sprintf("alive %t, %v", testenv.Alive(mine), n.Processes())
		}
		return ""
	})
	if !testenv.Alive(other) {
		t.Error("a plugin that belongs to somebody else was ended")
	}
	if child := testenv.ReadPID(t, within, filepath.Join(d.log, "child-DEL-"+id)); testenv.Alive(child) {
		t.Errorf("its child %d still runs", child)
	}
}

// A verb without a pod says nothing of whose it is: its executable does, if its
// parent has gone.
func TestLeftOverWithoutAPod(t *testing.T) {
	testenv.SetBound(t, "STATUS", 3*time.Second)
	d, other := newNode(t), newNode(t)
	mine, others := d.leave("asked", "STATUS", ""), other.leave("asked", "STATUS", "")
	n := d.started(exists())
	eventually(t, func() string {
		if got := processesOf(n, ProcessLeftOver); len(got) != 1 || got[0] != "asked STATUS " {
			return fmt.Sprintf("found %q", got)
		}
		return ""
	})
	eventually(t, func() string {
		if testenv.Alive(mine) {
			return "still runs"
		}
		return ""
	})
	if !testenv.Alive(others) {
		t.Error("a plugin of another bin dir was ended")
	}
}

// What a plugin leaves for its pod, such as a DHCP client, inherits the plugin's
// environment. It goes on after a restart, wherever its executable is, and so does
// what a program runs that is still there.
func TestHelperOfALivePodIsLeftAlone(t *testing.T) {
	testenv.SetBound(t, "ADD", time.Second)
	d := newNode(t)
	d.install("fakenet")
	d.executable("client", `while :; do sleep 1; done`)
	id := fmt.Sprintf("pod-%d", time.Now().UnixNano())
	elsewhere, ours := filepath.Join(d.log, "elsewhere"), filepath.Join(d.log, "ours")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2"), sh: fmt.Sprintf(
		`setsid -f sh -c 'echo $$ >%[1]s; exec sleep 300' </dev/null >/dev/null 2>&1
setsid -f sh -c 'echo $$ >%[2]s; exec %[3]s/client --for-pod' </dev/null >/dev/null 2>&1`, elsewhere, ours, d.bin)})
	d.write("10-a.conflist", conflist("1.0.0", "pods", "fakenet"))
	n := d.started()
	becomesReady(t, n)
	if _, err := n.Setup(t.Context(), id, "/ns"); err != nil {
		t.Fatal(err)
	}
	pids := []int{testenv.ReadPID(t, within, elsewhere), testenv.ReadPID(t, within, ours)}
	d.must(n.Close())
	// Another runtime's, which waits for it.
	cmd := exec.Command(d.executable("adder", "exec sleep 300"))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=ADD", "CNI_CONTAINERID=" + id}
	d.must(cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	pids = append(pids, cmd.Process.Pid)
	for _, pid := range pids {
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	}
	// So that what is found can be told from what is not looked for.
	left := d.leave("left", "ADD", id)
	n = d.started(exists(id))
	eventually(t, func() string {
		if testenv.Alive(left) {
			return "what an earlier containerd left still runs"
		}
		return ""
	})
	for i, pid := range pids {
		if !testenv.Alive(pid) {
			t.Errorf("helper %d was killed", i)
		}
	}
	d.must(n.Remove(context.Background(), id, "/ns"))
	for i, pid := range pids {
		if !testenv.Alive(pid) {
			t.Errorf("helper %d was killed by the removal", i)
		}
	}
}

// What an ADD allocates after the pod's removal would be leaked.
func TestRemoveEndsLeftOverFirst(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a")
	d.write("10-pods.conflist", conflist("1.0.0", "pods", "a"))
	id := fmt.Sprintf("pod-%d", time.Now().UnixNano())
	pid := d.leave("adder", "ADD", id)
	n := d.started(exists(id))
	becomesReady(t, n)
	eventually(t, func() string {
		if len(processesOf(n, ProcessLeftOver)) == 0 {
			return "not found"
		}
		return ""
	})
	d.answer("a", "DEL", reply{sh: fmt.Sprintf(`case "$(cut -d' ' -f3 /proc/%d/stat 2>/dev/null)" in ''|Z) ;; *) echo 'ADD still runs' >>'%s/beside' ;; esac`, pid, d.log)})
	d.must(n.Remove(context.Background(), id, "/ns"))
	if b, err := os.ReadFile(filepath.Join(d.log, "beside")); err == nil {
		t.Errorf("DEL ran beside ADD: %s", b)
	}
	if testenv.Alive(pid) || len(n.Processes()) > 0 {
		t.Errorf("alive %t, %v", testenv.Alive(pid), n.Processes())
	}
	if d.count("a", "DEL") != 1 {
		t.Error("no DEL")
	}
}

// An ADD that cannot be killed may allocate after its DEL: that is done again.
func TestAbandonedADDIsFollowedByDEL(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.withGrace("1h")
	becomesReady(t, n)
	// A process in uninterruptible sleep cannot be made here.
	stuck := n.plugins.Processes.Begin("/bin/first", []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=pod-1"}, 1)
	n.plugins.Processes.Abandon(stuck)
	if got := processesOf(n, ProcessAbandoned); len(got) != 1 || got[0] != "first ADD pod-1" {
		t.Errorf("shown are %q", got)
	}
	d.must(n.Remove(context.Background(), "pod-1", "/ns"))
	if owed := n.OwedRemovals(); len(owed) != 1 || !strings.Contains(owed[0].Cause, "ADD") {
		t.Fatalf("owed: %+v", owed)
	}
	n.owed.RetryNow("pod-1")
	before := d.count("first", "DEL")
	stays(t, 150*time.Millisecond, func() string {
		if d.count("first", "DEL") != before {
			return "DEL beside ADD"
		}
		return ""
	})
	n.plugins.Processes.End(stuck)
	eventually(t, func() string {
		if len(n.OwedRemovals()) > 0 {
			return fmt.Sprint(n.OwedRemovals())
		}
		return ""
	})
	if got := d.count("first", "DEL"); got != before+1 {
		t.Errorf("%d times DEL after the ADD has ended", got-before)
	}
}

func TestRunningIsShown(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a")
	d.write("10-pods.conflist", conflist("1.0.0", "pods", "a"))
	d.answer("a", "ADD", reply{out: result("1.0.0", "10.1.0.2"), sh: fmt.Sprintf("while [ ! -e '%s/go' ]; do sleep 0.02; done", d.answers)})
	n := d.started()
	becomesReady(t, n)
	done := make(chan error, 1)
	go func() {
		_, err := n.Setup(context.Background(), "pod-1", "/ns")
		done <- err
	}()
	eventually(t, func() string {
		if got := processesOf(n, ProcessRunning); len(got) != 1 || got[0] != "a ADD pod-1" {
			return fmt.Sprintf("shown are %q", got)
		}
		return ""
	})
	if p := n.Processes()[0]; !testenv.Alive(p.PID) || time.Since(p.Since) > time.Minute {
		t.Errorf("shown is %+v", p)
	}
	d.must(os.WriteFile(filepath.Join(d.answers, "go"), nil, 0o644))
	d.must(<-done)
	if p := n.Processes(); len(p) > 0 {
		t.Errorf("still shown: %v", p)
	}
}
