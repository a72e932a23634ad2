// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/owed"
)

// agentNode is a node whose plugin "calico" fails as the real one does while its
// nodename file is missing, after "first", which never fails.
type agentNode struct {
	*node
	nodename string
	owedDir  string
}

func newAgentNode(t *testing.T) *agentNode {
	t.Helper()
	d := &agentNode{node: newNode(t)}
	d.nodename = filepath.Join(d.answers, "nodename")
	d.owedDir = filepath.Join(d.answers, "owed")
	d.install("first", "calico")
	d.answer("first", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.answer("calico", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	words := "stat " + d.nodename + ": no such file or directory: check that the calico/node container is running"
	d.answer("calico", "DEL", reply{sh: fmt.Sprintf(`if [ ! -e '%s' ]; then echo '{"code":999,"msg":"%s"}'; exit 1; fi`, d.nodename, words)})
	d.write("10-calico.conflist", conflist("1.0.0", "pods", "first", fmt.Sprintf(`{"type":"calico","nodename":"x","nodename_file":%q}`, d.nodename)))
	d.agentThere(true)
	return d
}

func (d *agentNode) agentThere(there bool) {
	d.t.Helper()
	if there {
		d.must(os.WriteFile(d.nodename, []byte("node"), 0o644))
	} else {
		d.must(os.Remove(d.nodename))
	}
}

func (d *agentNode) withGrace(grace string, opts ...Opt) *Network {
	d.t.Helper()
	n := d.started(append([]Opt{WithOwedRemovals(d.owedDir), WithDelGrace(grace)}, opts...)...)
	return n
}

func (d *agentNode) add(n *Network, ids ...string) {
	d.t.Helper()
	becomesReady(d.t, n)
	for _, id := range ids {
		_, err := n.Setup(context.Background(), id, "/ns", WithArgs("K8S_POD_NAME", id), WithCapability("portMappings", []any{map[string]any{"hostPort": 80}}))
		d.must(err)
	}
}

// files returns the removals that are owed, and the records of ADDs, on disk.
func (d *agentNode) files() []string {
	d.t.Helper()
	files, err := filepath.Glob(filepath.Join(d.owedDir, "*"))
	d.must(err)
	begun, err := filepath.Glob(filepath.Join(d.owedDir, "begun", "*"))
	d.must(err)
	return append(slices.DeleteFunc(files, func(f string) bool { return filepath.Base(f) == "begun" }), begun...)
}

// calico#13884: a pod that cannot be removed while the agent is away is let go
// after the grace, and removed when the agent is back, with what was used at
// ADD, also by the next process.
func TestOwedRemoval(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %t", restart), func(t *testing.T) {
			t.Parallel()
			d := newAgentNode(t)
			n := d.withGrace("400ms")
			d.add(n, "pod-1")
			d.agentThere(false)
			start := time.Now()
			err := n.Remove(context.Background(), "pod-1", "/ns", WithArgs("K8S_POD_NAME", "pod-1"))
			if err == nil || !strings.Contains(err.Error(), "check that the calico/node container is running") ||
				!strings.Contains(err.Error(), `plugin "calico" needs `+d.nodename+` (nodename_file), which does not exist`) {
				t.Fatalf("within the grace: got %v, want the agent's absence", err)
			}
			if took := time.Since(start); took < n.pace.agent {
				t.Errorf("gave up after %s, before %s", took, n.pace.agent)
			}
			if f := d.files(); len(f) > 0 {
				t.Errorf("within the grace: %q", f)
			}
			eventually(t, func() string {
				return errorText(n.Remove(context.Background(), "pod-1", "/ns", WithArgs("K8S_POD_NAME", "pod-1")))
			})
			if took := time.Since(start); took < 400*time.Millisecond {
				t.Errorf("let go after %s", took)
			}
			owed := n.OwedRemovals()
			if len(owed) != 1 || owed[0].ID != "pod-1" || !reflect.DeepEqual(owed[0].Networks, []string{"pods"}) || !strings.Contains(owed[0].Cause, d.nodename) {
				t.Fatalf("owed: %+v", owed)
			}
			d.take("DEL")
			// CRI comes again when it removes what it has stopped.
			d.must(n.Remove(context.Background(), "pod-1", ""))
			if got := d.take("DEL"); len(got.All) > 0 {
				t.Errorf("a pod that is let go was removed again: %q", got.All)
			}
			d.write("10-calico.conflist", conflist("1.0.0", "other", "first"))
			if restart {
				d.must(n.Close())
				n = d.withGrace("1h")
				if owed := n.OwedRemovals(); len(owed) != 1 {
					eventually(t, func() string {
						if len(n.OwedRemovals()) != 1 {
							return "not known after a restart"
						}
						return ""
					})
				}
			}
			stays(t, 200*time.Millisecond, func() string {
				if len(n.OwedRemovals()) != 1 || d.count("calico", "DEL") > 0 {
					return "DEL was run without the agent"
				}
				return ""
			})
			d.agentThere(true)
			eventually(t, func() string {
				if len(n.OwedRemovals()) > 0 {
					return fmt.Sprint(n.OwedRemovals())
				}
				return ""
			})
			got := d.take("DEL")
			if want := []string{"DEL eth0 calico", "DEL eth0 first"}; !reflect.DeepEqual(got.All, want) {
				t.Fatalf("DEL ran %q, want %q", got.All, want)
			}
			c := got.Calls["DEL-eth0-calico"][0]
			if stdin := c.Stdin.(map[string]any); stdin["prevResult"] == nil || stdin["nodename"] != "x" {
				t.Errorf("calico was given %v", stdin)
			}
			if _, ok := c.Args["K8S_POD_NAME=pod-1"]; !ok || c.Env["CNI_NETNS"] != "" || c.Env["CNI_CONTAINERID"] != "pod-1" {
				t.Errorf("calico was called with %v, %v", c.Args, c.Env)
			}
			if f := d.files(); len(f) > 0 {
				t.Errorf("left behind: %q", f)
			}
			if left := readCache(t, d.cache, "pod-1"); len(left) != 0 {
				t.Errorf("still cached: %v", left)
			}
		})
	}
}

func TestRemoveWaitsForTheAgent(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.network(WithOwedRemovals(d.owedDir), WithDelGrace("1h"))
	n.pace.agent = time.Minute
	n.Start()
	d.add(n, "pod-1")
	d.agentThere(false)
	removed := make(chan error, 1)
	go func() { removed <- n.Remove(context.Background(), "pod-1", "/ns") }()
	stays(t, 150*time.Millisecond, func() string {
		select {
		case err := <-removed:
			return fmt.Sprint(err)
		default:
			return ""
		}
	})
	if c := d.count("calico", "DEL"); c > 0 {
		t.Error("DEL was run without the agent")
	}
	d.agentThere(true)
	select {
	case err := <-removed:
		d.must(err)
	case <-time.After(within):
		t.Fatal("not removed although the agent is back")
	}
}

// What is wrong with a plugin other than its agent's absence keeps the pod.
func TestNotLetGoForOtherReasons(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.withGrace("0s")
	d.add(n, "pod-1")
	d.answer("first", "DEL", reply{out: `{"code":100,"msg":"no idea"}`, code: 1})
	for range 2 {
		if err := n.Remove(context.Background(), "pod-1", "/ns"); err == nil || !strings.Contains(err.Error(), "no idea") {
			t.Errorf("got %v", err)
		}
	}
	if owed := n.OwedRemovals(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
	d.answer("first", "DEL", reply{})
	d.must(n.Remove(context.Background(), "pod-1", "/ns"))

	// Nor is a pod let go with gates off, or with no place to remember it.
	for name, n := range map[string]*Network{"gates off": d.withGrace("0s", WithGates("off")), "no place": d.started(WithDelGrace("0s"))} {
		d.agentThere(true)
		d.add(n, "pod-2")
		d.agentThere(false)
		if err := n.Remove(context.Background(), "pod-2", "/ns"); err == nil {
			t.Errorf("%s: the pod was let go", name)
		}
		d.agentThere(true)
		d.must(n.Remove(context.Background(), "pod-2", "/ns"))
	}
}

// containerd#12130: nobody comes back for a pod that was never attached.
func TestFailedDELOfFailedADDIsOwed(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.network(WithOwedRemovals(d.owedDir))
	n.Start()
	becomesReady(t, n)
	d.answer("calico", "ADD", reply{out: `{"code":100,"msg":"add failed"}`, code: 1})
	d.answer("first", "DEL", reply{out: `{"code":100,"msg":"del failed"}`, code: 1})
	if _, err := n.Setup(context.Background(), "pod-1", "/ns"); err == nil {
		t.Fatal("ADD succeeded")
	}
	if err := n.Remove(context.Background(), "pod-1", "/ns"); err == nil || !strings.Contains(err.Error(), "del failed; it will be tried again") {
		t.Errorf("got %v", err)
	}
	if owed := n.OwedRemovals(); len(owed) != 1 || owed[0].Cause == "" {
		t.Fatalf("owed: %+v", owed)
	}
	// Another try fails too, and the pause grows.
	later := func() { n.owed.RetryNow("pod-1") }
	later()
	eventually(t, func() string {
		if owed := n.OwedRemovals(); owed[0].Attempts != 1 || !strings.Contains(owed[0].Cause, "del failed") {
			return fmt.Sprintf("%+v", owed)
		}
		return ""
	})
	d.answer("first", "DEL", reply{})
	later()
	owesNothing(t, n)
	if f := d.files(); len(f) > 0 {
		t.Errorf("left behind: %q", f)
	}
	// Nor is an agent waited for: the pod's next attempt is.
	n.pace.agent = time.Minute
	d.agentThere(false)
	_, _ = n.Setup(context.Background(), "pod-3", "/ns")
	if err := n.Remove(context.Background(), "pod-3", "/ns"); err == nil || len(n.OwedRemovals()) != 1 {
		t.Errorf("got %v, owed %v", err, n.OwedRemovals())
	}
	d.agentThere(true)
	owesNothing(t, n)
	// A caller that does come back does it at once.
	d.answer("first", "DEL", reply{out: `{"code":100,"msg":"del failed"}`, code: 1})
	_, _ = n.Setup(context.Background(), "pod-2", "/ns")
	_ = n.Remove(context.Background(), "pod-2", "/ns")
	d.answer("first", "DEL", reply{})
	d.must(n.Remove(context.Background(), "pod-2", "/ns"))
	if owed := n.OwedRemovals(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
}

// A socket that is compiled into a plugin may have moved with a release of it.
func TestReportedGateDoesNotHoldUpWhatIsOwed(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	d.install("antrea")
	n := d.withGrace("0s")
	list := []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", "antrea"))}}
	d.must(n.owed.Add(owed.Removal{ID: "pod-1", Networks: list, Since: time.Now()}))
	n.owed.RetryNow("pod-1")
	owesNothing(t, n)
	if d.count("antrea", "DEL") != 1 {
		t.Error("no DEL")
	}
}

func TestOwedRemovalsAreBounded(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.withGrace("0s")
	d.add(n, "pod-x")
	d.agentThere(false)
	list := []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", fmt.Sprintf(`{"type":"calico","nodename":"x","nodename_file":%q}`, d.nodename)))}}
	owe := func(id string, released bool) error {
		return n.owed.Add(owed.Removal{ID: id, Networks: list, Since: time.Now(), Released: released})
	}
	// Those of pods whose ADD had failed leave room for the others.
	for i := range owed.MaxFailedADD {
		d.must(owe(fmt.Sprint("failed-", i), false))
	}
	if err := owe("failed", false); !errors.Is(err, owed.ErrTooManyFailedADD) {
		t.Errorf("got %v, want the limit of pods whose ADD had failed", err)
	}
	d.must(owe("failed-7", false))
	// The limit is one for all networks that share the directory.
	other := d.withGrace("1h", WithHandler("other"))
	for i := range owed.Max - owed.MaxFailedADD {
		at := n
		if i%2 == 1 {
			at = other
		}
		d.must(at.owed.Add(owed.Removal{ID: fmt.Sprint("pod-", i), Networks: list, Since: time.Now(), Released: true}))
	}
	err := n.Remove(context.Background(), "pod-x", "/ns")
	if !errors.Is(err, owed.ErrTooMany) || !strings.Contains(err.Error(), "needs "+d.nodename) {
		t.Errorf("got %v, want the limit and the cause", err)
	}
	// One more for the same pod replaces the one before.
	d.must(owe("pod-8", true))
	// There is room again when some are done.
	d.agentThere(true)
	eventually(t, func() string {
		if left := len(n.OwedRemovals()) + len(other.OwedRemovals()); left >= owed.Max-5 {
			return fmt.Sprintf("%d are owed", left)
		}
		return ""
	})
	d.must(owe("pod-y", true))
}

// What cannot be read, or belongs to another handler, is passed over and kept.
func TestOwedRemovalsOnDisk(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	d.must(os.MkdirAll(d.owedDir, 0o700))
	put := func(name, content string) {
		d.must(os.WriteFile(filepath.Join(d.owedDir, name), []byte(content), 0o600))
	}
	put("garbage.json", "{")
	put("empty.json", "")
	put("nothing.json", `{"id":"x"}`)
	put("other.json", `{"id":"other","handler":"kata","networks":[{"interface":"eth0","list":{}}]}`)
	put("bad.json", fmt.Sprintf(`{"id":"bad","since":%q,"networks":[{"interface":"eth0","list":{"cniVersion":7}}]}`, time.Now().Format(time.RFC3339)))
	put("123456", "torn")
	old := time.Now().Add(-time.Hour)
	d.must(os.Chtimes(filepath.Join(d.owedDir, "123456"), old, old))
	kata := d.network(WithOwedRemovals(d.owedDir), WithHandler("kata"))
	n := d.withGrace("1h")
	eventually(t, func() string {
		owed := n.OwedRemovals()
		if len(owed) != 1 || owed[0].ID != "bad" || owed[0].Attempts == 0 || !strings.Contains(owed[0].Cause, "owed removal of pod bad") {
			return fmt.Sprintf("%+v", owed)
		}
		return ""
	})
	var names []string
	for _, f := range d.files() {
		names = append(names, filepath.Base(f))
	}
	if want := []string{"bad.json", "empty.json", "garbage.json", "nothing.json", "other.json"}; !reflect.DeepEqual(names, want) {
		t.Errorf("left are %q, want %q", names, want)
	}
	d.must(kata.Close())
	// A directory that cannot be made keeps the pod.
	d.must(os.RemoveAll(d.owedDir))
	d.must(os.WriteFile(d.owedDir, nil, 0o600))
	n = d.withGrace("0s")
	d.add(n, "pod-1")
	d.agentThere(false)
	if err := n.Remove(context.Background(), "pod-1", "/ns"); err == nil || !strings.Contains(err.Error(), "cannot remember the removal of pod pod-1") {
		t.Errorf("got %v", err)
	}
	if owed := n.OwedRemovals(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
}

func TestDelGraceOption(t *testing.T) {
	t.Parallel()
	for grace, want := range map[string]time.Duration{"": 3 * time.Minute, "0s": 0, "90s": 90 * time.Second} {
		n, err := New(WithDelGrace(grace))
		if err != nil || n.config.delGrace != want {
			t.Errorf("del_grace = %q: got %s, %v", grace, n.config.delGrace, err)
		}
	}
	for _, bad := range []string{"10", "-1s", "soon"} {
		if _, err := New(WithDelGrace(bad)); err == nil || !strings.Contains(err.Error(), "del_grace") {
			t.Errorf("del_grace = %q: got %v", bad, err)
		}
	}
}

// owesNothing waits until all removals that were owed are done.
func owesNothing(t *testing.T, n *Network) {
	t.Helper()
	eventually(t, func() string {
		if owed := n.OwedRemovals(); len(owed) > 0 {
			return fmt.Sprintf("owed: %+v", owed)
		}
		return ""
	})
}
