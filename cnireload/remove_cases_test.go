// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/admission"
	"github.com/cnireload/cnireload/cnireload/owed"
	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/cnireload/rules"
	"github.com/cnireload/cnireload/internal/testenv"
)

// namespaceThere is a network namespace that exists.
const namespaceThere = "/proc/self/ns/net"

// istio#59846, istio.io#16748: a mesh is uninstalled, which takes its entry out of
// the list and its executable away; also for pods that stock added.
func TestUninstalledPluginKeepsNoPod(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("main", "mesh")
	for _, typ := range []string{"main", "mesh"} {
		d.answer(typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	}
	name := "uninstalled" + filepath.Base(d.log)
	d.write("10-a.conflist", conflist("1.0.0", name, "main", "mesh"))
	theirs, err := gocni.New(gocni.WithPluginConfDir(d.conf), gocni.WithPluginDir([]string{d.bin}), gocni.WithDefaultConf)
	d.must(err)
	stock := fmt.Sprintf("uninstalled-%d", os.Getpid())
	_, err = theirs.Setup(t.Context(), stock, "/ns")
	d.must(err)
	n := d.started(WithCacheDir(libcni.CacheDir), WithDelGrace("1h"))
	becomesReady(t, n)
	ours := fmt.Sprintf("uninstalled-ours-%d", os.Getpid())
	_, err = n.Setup(t.Context(), ours, "/ns")
	d.must(err)
	d.must(os.Remove(filepath.Join(d.bin, "mesh")))
	d.take("DEL")

	// While the list still names it, it is only away, and the others are run.
	if err := n.Remove(t.Context(), ours, "/ns"); err == nil || !strings.Contains(err.Error(), `plugin "mesh" is missing from `+d.bin) {
		t.Errorf("still listed: got %v", err)
	}
	if got, want := d.take("DEL").All, []string{"DEL eth0 main"}; !reflect.DeepEqual(got, want) {
		t.Errorf("still listed: DEL ran %q, want %q", got, want)
	}
	d.write("10-a.conflist", conflist("1.0.0", name, "main"))
	d.must(n.Load())
	for _, id := range []string{ours, stock} {
		d.must(n.Remove(t.Context(), id, "/ns"))
		if got, want := d.take("DEL").All, []string{"DEL eth0 main"}; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: DEL ran %q, want %q", id, got, want)
		}
		if left := readCache(t, libcni.CacheDir, id); len(left) > 0 {
			t.Errorf("%s: still cached: %v", id, left)
		}
	}
}

// The socket that the list names has moved to another path: the agent that is
// there now is told.
func TestRemoveTellsTheAgentThatIsThere(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("kube-ovn", "portmap")
	for _, typ := range []string{"kube-ovn", "portmap"} {
		d.answer(typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	}
	d.answer("kube-ovn", "DEL", reply{sh: `f=${input#*server_socket\":\"}; f=${f%%\"*}; [ -S "$f" ] || { echo '{"code":100,"msg":"dial unix"}'; exit 1; }`})
	entry := func(socket string) string { return fmt.Sprintf(`{"type":"kube-ovn","server_socket":%q}`, socket) }
	old, moved := filepath.Join(d.answers, "old.sock"), filepath.Join(d.answers, "new.sock")
	agent, err := net.Listen("unix", old)
	d.must(err)
	d.write("10-a.conflist", conflist("1.0.0", "pods", entry(old), "portmap"))
	n := d.network(WithOwedRemovals(t.TempDir()))
	n.pace.poll, n.pace.agent = time.Hour, time.Minute
	n.Start()
	becomesReady(t, n)
	_, err = n.Setup(t.Context(), "pod-1", "/ns")
	d.must(err)
	d.must(agent.Close())
	agent, err = net.Listen("unix", moved)
	d.must(err)
	defer agent.Close()
	d.write("10-a.conflist", conflist("1.0.0", "pods", entry(moved)))
	d.must(n.Load())
	becomesReady(t, n)
	d.take("DEL")
	begin := time.Now()
	d.must(n.Remove(t.Context(), "pod-1", "/ns"))
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("removed after %s", took)
	}
	// What the list in use does not name any more is run as well.
	got := d.take("DEL")
	if want := []string{"DEL eth0 kube-ovn", "DEL eth0 portmap"}; !reflect.DeepEqual(got.All, want) {
		t.Errorf("DEL ran %q, want %q", got.All, want)
	}
	if stdin := got.Calls["DEL-eth0-kube-ovn"][0].Stdin.(map[string]any); stdin["server_socket"] != moved || stdin["prevResult"] == nil {
		t.Errorf("kube-ovn was given %v", stdin)
	}
	if owed := n.OwedRemovals(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
	if left := readCache(t, d.cache, "pod-1"); len(left) > 0 {
		t.Errorf("still cached: %v", left)
	}
}

// multus-cni, pkg/server/api/shim.go: DEL answers 0 although its daemon is away. The
// pod goes, as in stock, and the daemon is told when it is back.
func TestDELThatNobodyHeardIsOwed(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("multus-shim")
	d.answer("multus-shim", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	dir := t.TempDir()
	daemon := func() net.Listener {
		l, err := net.Listen("unix", filepath.Join(dir, "multus.sock"))
		d.must(err)
		return l
	}
	first := daemon()
	d.write("10-a.conflist", conflist("1.0.0", "pods", `{"type":"multus-shim","daemonSocketDir":"`+dir+`"}`))
	n := d.network(WithOwedRemovals(t.TempDir()))
	n.pace.agent = 200 * time.Millisecond
	n.Start()
	becomesReady(t, n)
	_, err := n.Setup(t.Context(), "pod-1", "/ns")
	d.must(err)
	d.must(first.Close())
	d.must(n.Remove(t.Context(), "pod-1", "/ns"))
	if owed := n.OwedRemovals(); len(owed) != 1 || !strings.Contains(owed[0].Cause, "multus.sock") {
		t.Fatalf("owed: %+v", owed)
	}
	d.take("DEL")
	defer daemon().Close()
	owesNothing(t, n)
	if got, want := d.take("DEL").All, []string{"DEL eth0 multus-shim"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

// A plugin was upgraded and refuses the version of the list of ADD.
func TestRemoveWithARefusedVersion(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("main")
	d.answer("main", "ADD", reply{out: result("0.4.0", "10.1.0.2")})
	d.write("10-a.conflist", conflist("0.4.0", "pods", "main"))
	n := d.started(WithOwedRemovals(t.TempDir()), WithDelGrace("300ms"))
	becomesReady(t, n)
	for _, id := range []string{"pod-1", "pod-2"} {
		_, err := n.Setup(t.Context(), id, "/ns")
		d.must(err)
	}
	d.answer("main", "VERSION", reply{out: versionAnswer("1.0.0", "1.1.0")})
	d.answer("main", "DEL", reply{sh: `case "$input" in *'"cniVersion":"0.4.0"'*) echo '{"code":1,"msg":"incompatible CNI versions"}'; exit 1;; esac`})
	// Nothing else is in use: the pod goes after the grace.
	if err := n.Remove(t.Context(), "pod-1", "/ns"); err == nil || !strings.Contains(err.Error(), "its cniVersion 0.4.0 is refused") {
		t.Errorf("got %v", err)
	}
	eventually(t, func() string { return errorText(n.Remove(t.Context(), "pod-1", "/ns")) })
	if owed := n.OwedRemovals(); len(owed) != 1 {
		t.Errorf("owed: %v", owed)
	}
	// The list in use takes its place, also in what is owed.
	d.write("10-a.conflist", conflist("1.0.0", "pods", "main"))
	d.must(n.Load())
	d.must(n.Remove(t.Context(), "pod-2", "/ns"))
	n.owed.RetryNow("pod-1")
	owesNothing(t, n)
}

// The network was replaced by another one whose DEL knows nothing of the pod: it
// goes, as in stock, and the DEL of its own network, which fails, is owed.
func TestReplacedNetworkThatFailsIsOwed(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "unused")
	d.must(n.Close())
	n = d.started(WithOwedRemovals(t.TempDir()), WithDelGrace("1h"))
	becomesReady(t, n)
	_, err := n.Setup(t.Context(), "pod-1", "/ns")
	d.must(err)
	d.answer("b", "DEL", reply{out: `{"code":100,"msg":"its API is gone"}`, code: 1})
	d.write("10-pods.conflist", conflist("1.0.0", "next", "other"))
	d.must(n.Load())
	d.take("DEL")
	d.must(n.Remove(t.Context(), "pod-1", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a", "DEL eth0 other"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
	if owed := n.OwedRemovals(); len(owed) != 1 || !strings.Contains(owed[0].Cause, "its API is gone") {
		t.Fatalf("owed: %+v", owed)
	}
	// CRI's second call does nothing.
	d.must(n.Remove(t.Context(), "pod-1", ""))
	if got := d.take("DEL").All; len(got) > 0 {
		t.Errorf("DEL ran %q", got)
	}
	d.answer("b", "DEL", reply{})
	n.owed.RetryNow("pod-1")
	owesNothing(t, n)
	got := d.take("DEL")
	if want := []string{"DEL eth0 b"}; !reflect.DeepEqual(got.All, want) {
		t.Fatalf("DEL ran %q, want %q", got.All, want)
	}
	if stdin := got.Calls["DEL-eth0-b"][0].Stdin.(map[string]any); stdin["prevResult"] == nil || stdin["name"] != "pods" {
		t.Errorf("b was given %v", stdin)
	}
	if left := readCache(t, d.cache, "pod-1"); len(left) > 0 {
		t.Errorf("still cached: %v", left)
	}
}

// cri-o#4084, kubeadm reset: lists and executables are wiped before the pods.
func TestRemoveWhenAllIsWiped(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "unused")
	d.must(n.Close())
	d.install("loopback")
	d.answer("loopback", "ADD", reply{out: `{"cniVersion":"0.3.1"}`})
	n = d.started(WithLoNetwork, WithOwedRemovals(t.TempDir()), WithDelGrace("300ms"))
	becomesReady(t, n)
	_, err := n.Setup(t.Context(), "pod-1", "/ns")
	d.must(err)
	d.remove("10-pods.conflist")
	for _, typ := range []string{"a", "b", "c", "loopback"} {
		d.must(os.Remove(filepath.Join(d.bin, typ)))
	}
	_ = n.Load()
	begin := time.Now()
	if err := n.Remove(t.Context(), "pod-1", "/ns"); err == nil || !strings.Contains(err.Error(), `plugin "a" is missing from `) {
		t.Errorf("within the grace: got %v", err)
	}
	eventually(t, func() string { return errorText(n.Remove(t.Context(), "pod-1", "/ns")) })
	if took := time.Since(begin); took < 300*time.Millisecond {
		t.Errorf("let go after %s", took)
	}
	if owed := n.OwedRemovals(); len(owed) != 1 {
		t.Fatalf("owed: %+v", owed)
	}
	// Another network comes into use: they have been uninstalled.
	d.write("20-next.conflist", conflist("1.0.0", "next", "other"))
	owesNothing(t, n)
}

// containerd#8197, cni#1055: the attachment cache has lost an entry in a crash.
func TestRemoveKnowsWhatTheCacheHasLost(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*node, string){
		"emptied": func(d *node, file string) { d.must(os.Truncate(file, 0)) },
		"gone":    func(d *node, file string) { d.must(os.Remove(file)) },
		"torn":    func(d *node, file string) { d.must(os.WriteFile(file, []byte(`{"kind":"cniCa`), 0o600)) },
	} {
		for _, ns := range []string{namespaceThere, ""} {
			t.Run(name+" "+ns, func(t *testing.T) {
				t.Parallel()
				d := newNode(t)
				d.install("loopback", "a")
				d.answer("loopback", "ADD", reply{out: `{"cniVersion":"0.3.1"}`})
				d.answer("a", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
				d.write("10-pods.conflist", conflist("1.0.0", "pods", "a"))
				n := d.started(WithLoNetwork)
				becomesReady(t, n)
				_, err := n.Setup(t.Context(), "pod-1", namespaceThere)
				d.must(err)
				d.must(n.Close())
				lose(d, filepath.Join(d.cache, "results", "pods-pod-1-eth0"))
				n = d.started(WithLoNetwork)
				becomesReady(t, n)
				d.take("DEL")
				d.must(n.Remove(t.Context(), "pod-1", ns))
				want := []string{"DEL lo loopback", "DEL eth0 a"}
				if name == "gone" && ns == "" {
					want = want[:1] // it was removed before, for all that anybody knows
				}
				if got := d.take("DEL").All; !reflect.DeepEqual(got, want) {
					t.Errorf("DEL ran %q, want %q", got, want)
				}
			})
		}
	}
}

// A plain configuration in the cache is made a list; what cannot be parsed leaves
// the interface to the list in use.
func TestCachedAttachmentThatIsNoList(t *testing.T) {
	t.Parallel()
	for content, want := range map[string]string{
		`{"cniVersion":"1.0.0","name":"pods","type":"a","mark":"x"}`:    "DEL eth0 a",
		`{"cniVersion":"1.0.0","name":"pods","plugins":7}`:              "DEL eth0 other",
		`{"cniVersion":"1.0.0","name":"pods","plugins":[{"no":"one"}]}`: "DEL eth0 other",
	} {
		t.Run(content, func(t *testing.T) {
			t.Parallel()
			d, n := attachedNode(t, "pod-1")
			file := filepath.Join(d.cache, "results", "pods-pod-1-eth0")
			b, err := os.ReadFile(file)
			d.must(err)
			cached := decode(t, b)
			cached["config"] = []byte(content)
			d.must(os.WriteFile(file, encode(t, cached), 0o600))
			d.write("10-pods.conflist", conflist("1.0.0", "next", "other"))
			d.must(n.Load())
			d.take("DEL")
			d.must(n.Remove(t.Context(), "pod-1", "/ns"))
			if got := d.take("DEL").All; !reflect.DeepEqual(got, []string{want}) {
				t.Errorf("DEL ran %q, want %q", got, want)
			}
			if left := readCache(t, d.cache, "pod-1"); len(left) > 0 {
				t.Errorf("still cached: %v", left)
			}
		})
	}
}

// containerd#12923: the daemon is killed during ADD, and the list is replaced
// before the pod is removed.
func TestListOfADDIsOnDiskBeforeIt(t *testing.T) {
	t.Parallel()
	for _, known := range []bool{true, false} {
		t.Run(fmt.Sprintf("sandbox known %t", known), func(t *testing.T) {
			t.Parallel()
			d, n := attachedNode(t, "unused")
			d.must(n.Close())
			owedDir := filepath.Join(d.answers, "owed")
			n = d.started(WithOwedRemovals(owedDir))
			becomesReady(t, n)
			gate := filepath.Join(d.answers, "go")
			d.answer("c", "ADD", reply{sh: fmt.Sprintf("until [ -e '%s' ]; do sleep 0.05; done", gate), out: result("1.0.0", "10.1.0.2")})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = n.Setup(context.Background(), "pod-1", "/ns")
			}()
			defer func() {
				d.must(os.WriteFile(gate, nil, 0o644))
				<-ended
			}()
			eventually(t, func() string {
				if d.count("c", "ADD") != 2 {
					return "ADD does not run"
				}
				return ""
			})
			d.write("10-pods.conflist", conflist("1.0.0", "next", "other"))
			// The next process.
			m := d.started(WithOwedRemovals(owedDir), WithSandboxes(func(context.Context) ([]Sandbox, error) {
				if known {
					return []Sandbox{{ID: "pod-1"}}, nil
				}
				return nil, nil
			}))
			becomesReady(t, m)
			d.take("DEL")
			if known {
				d.must(m.Remove(t.Context(), "pod-1", "/ns"))
			} else {
				// Nobody asks for it.
				eventually(t, func() string {
					if d.count("a", "DEL") == 0 {
						m.owed.RetryNow("pod-1")
						return "no DEL"
					}
					return ""
				})
				eventually(t, func() string {
					if owed := m.OwedRemovals(); len(owed) > 0 {
						return fmt.Sprintf("%+v", owed)
					}
					return ""
				})
			}
			if got, want := d.take("DEL").All, []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
				t.Errorf("DEL ran %q, want %q", got, want)
			}
			if left, _ := filepath.Glob(filepath.Join(owedDir, "begun", "*")); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// The record of an ADD goes when it has succeeded, and stays until DEL otherwise.
func TestRecordOfADD(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	n := d.withGrace("1h")
	d.add(n, "pod-1")
	if f := d.files(); len(f) > 0 {
		t.Errorf("after ADD: %q", f)
	}
	d.answer("calico", "ADD", reply{out: `{"code":100,"msg":"no"}`, code: 1})
	if _, err := n.Setup(t.Context(), "pod-2", "/ns"); err == nil {
		t.Fatal("ADD has succeeded")
	}
	if f := d.files(); len(f) != 1 {
		t.Errorf("after a failed ADD: %q", f)
	}
	d.must(n.Remove(t.Context(), "pod-2", "/ns"))
	if f := d.files(); len(f) > 0 {
		t.Errorf("after its DEL: %q", f)
	}
	// It keeps no pod from being added.
	d.must(os.RemoveAll(d.owedDir))
	d.must(os.WriteFile(d.owedDir, nil, 0o600))
	d.answer("calico", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.add(n, "pod-3")
}

// One that hangs must not keep what the others have allocated.
func TestHungDELKeepsNoOtherFromBeingRun(t *testing.T) {
	testenv.SetBound(t, "DEL", 3*time.Second)
	d, n := attachedNode(t, "pod-1")
	for _, typ := range []string{"b", "c"} {
		d.answer(typ, "DEL", reply{sh: "exec sleep 300"})
	}
	err := n.Remove(t.Context(), "pod-1", "/ns")
	if err == nil || !strings.Contains(err.Error(), "its share of the bound ("+TimeoutDel+")") || strings.Contains(err.Error(), `type="a"`) {
		t.Errorf("got %v", err)
	}
	if got, want := d.take("DEL").All, []string{"DEL eth0 c", "DEL eth0 b", "DEL eth0 a"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
}

func TestShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			bound   time.Duration
			several int
			want    time.Duration
		}{
			{75 * time.Second, 1, 75 * time.Second},
			{75 * time.Second, 2, 65 * time.Second},
			{75 * time.Second, 4, 45 * time.Second},
			{75 * time.Second, 20, 3750 * time.Millisecond},
			{time.Second, 2, 500 * time.Millisecond},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), c.bound)
			own, done := share(ctx, c.several)
			deadline, _ := own.Deadline()
			if got := time.Until(deadline); got != c.want {
				t.Errorf("the first of %d within %s has %s, want %s", c.several, c.bound, got, c.want)
			}
			done()
			cancel()
		}
	})
}

// ADD leaves its caller time to clean up.
func TestBoundOfADD(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for deadline, want := range map[time.Duration]time.Duration{
			0:                 200 * time.Second,
			10 * time.Minute:  200 * time.Second,
			4 * time.Minute:   200 * time.Second,
			210 * time.Second: 170 * time.Second,
			time.Minute:       48 * time.Second,
		} {
			ctx := t.Context()
			if deadline > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, deadline)
				defer cancel()
			}
			bounded, cancel := addBound(ctx)
			defer cancel()
			end, _ := bounded.Deadline()
			if got := time.Until(end); got != want {
				t.Errorf("caller's deadline %s: ADD has %s, want %s", deadline, got, want)
			}
			<-bounded.Done()
			if err := context.Cause(bounded); plugin.Outcome(err) != "timeout" || !strings.HasPrefix(err.Error(), "ADD did not finish within "+want.String()) {
				t.Errorf("caller's deadline %s: %v", deadline, err)
			}
		}
	})
}

// A result that CRI takes for a failure, which ignores the DEL after it then.
func TestResultThatCRIRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		out  string
		fail bool
	}{
		"cannot be converted": {`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[{"address":"10.1.0.2/24","interface":7}]}`, true},
		"no address":          {`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}]}`, false},
		"address elsewhere":   {`{"cniVersion":"1.0.0","interfaces":[{"name":"net1"}],"ips":[{"address":"10.1.0.2/24","interface":0}]}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet")
			d.answer("fakenet", "ADD", reply{out: c.out})
			d.write("10-a.conflist", conflist("1.0.0", "pods", "fakenet"))
			n := d.started(WithOwedRemovals(t.TempDir()))
			becomesReady(t, n)
			r, err := n.Setup(t.Context(), "pod-1", "/ns", WithArgs("K8S_POD_UID", "u-1"))
			if (err != nil) != c.fail || (r == nil) != c.fail {
				t.Fatalf("got %v, %v", r, err)
			}
			// It counts: with as many others as it takes, it is one too many.
			for i := range admission.Many - 1 {
				n.admission.Failed(fmt.Sprint("other", i), n.Snapshot().Generation, errors.New("x"), 0)
			}
			if tr := n.Trial(); tr == nil || tr.Failures != admission.Many {
				t.Errorf("%+v", tr)
			}
			d.answer("fakenet", "DEL", reply{out: `{"code":11,"msg":"try again later"}`, code: 1})
			if err := n.Remove(t.Context(), "pod-1", "/ns"); err == nil {
				t.Error("the failure of DEL is not said")
			}
			if owed := n.OwedRemovals(); len(owed) != 1 {
				t.Errorf("owed: %v", owed)
			}
		})
	}
}

// A removal that is owed is done with the lists it was stored with, also when its
// caller comes back to another process.
func TestOwedListsSurviveARestart(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("old", "new")
	d.write("10-a.conflist", conflist("1.0.0", "pods", "old"))
	owedDir := t.TempDir()
	n := d.started(WithOwedRemovals(owedDir))
	becomesReady(t, n)
	d.answer("old", "ADD", reply{out: `{"code":100,"msg":"allocated, then failed"}`, code: 1})
	d.answer("old", "DEL", reply{out: `{"code":11,"msg":"busy"}`, code: 1})
	_, _ = n.Setup(t.Context(), "pod-1", "/ns")
	if err := n.Remove(t.Context(), "pod-1", "/ns"); err == nil {
		t.Fatal("DEL has succeeded")
	}
	d.must(n.Close())
	d.write("10-a.conflist", conflist("1.0.0", "pods", "old", "new"))
	d.answer("old", "DEL", reply{})
	// Even before it is started, or what was stored is loaded.
	m := d.network(WithOwedRemovals(owedDir))
	d.take("DEL")
	d.must(m.Remove(t.Context(), "pod-1", "/ns"))
	if got, want := d.take("DEL").All, []string{"DEL eth0 old"}; !reflect.DeepEqual(got, want) {
		t.Errorf("DEL ran %q, want %q", got, want)
	}
	if owed := m.OwedRemovals(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
}

// A pod that was let go is gone for its caller, whatever runs beside, and right
// after a start.
func TestLetGoPodIsReleasedAtOnce(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("10-a.conflist", conflist("1.0.0", "pods", "fakenet"))
	owedDir := t.TempDir()
	n := d.started(WithOwedRemovals(owedDir))
	becomesReady(t, n)
	d.answer("fakenet", "DEL", reply{sh: "sleep 0.5", out: `{"code":11,"msg":"busy"}`, code: 1})
	d.must(n.owed.Add(owed.Removal{ID: "pod-1", Networks: []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", "fakenet"))}}, Since: time.Now(), Released: true}))
	n.owed.RetryNow("pod-1")
	eventually(t, func() string {
		if d.count("fakenet", "DEL") == 0 {
			return "not tried"
		}
		return ""
	})
	d.must(n.Remove(t.Context(), "pod-1", ""))
	d.must(n.Close())
	blocked := make(chan struct{})
	defer close(blocked)
	m := d.network(WithOwedRemovals(owedDir), WithSandboxes(func(context.Context) ([]Sandbox, error) { <-blocked; return nil, nil }))
	before, begin := d.count("fakenet", "DEL"), time.Now()
	d.must(m.Remove(t.Context(), "pod-1", ""))
	if c := d.count("fakenet", "DEL"); c != before {
		t.Errorf("%d more DELs", c-before)
	}
	if took := time.Since(begin); took >= startBound {
		t.Errorf("it took %s", took)
	}
}

// The mount point that is left of a namespace is a plain file.
func TestPlainFileIsNoNamespace(t *testing.T) {
	t.Parallel()
	d, n := attachedNode(t, "pod-1")
	file := filepath.Join(d.answers, "cni-1")
	d.must(os.WriteFile(file, nil, 0o644))
	d.must(n.Remove(t.Context(), "pod-1", file))
	if got := d.take("DEL").Calls["DEL-eth0-a"]; len(got) != 1 || got[0].Env["CNI_NETNS"] != "" {
		t.Errorf("plugin a was called with %v", got)
	}
	_, err := n.Setup(t.Context(), "pod-2", namespaceThere)
	d.must(err)
	d.must(n.Remove(t.Context(), "pod-2", namespaceThere))
	if got := d.take("DEL").Calls["DEL-eth0-a"]; len(got) != 1 || got[0].Env["CNI_NETNS"] != namespaceThere {
		t.Errorf("plugin a was called with %v", got)
	}
}

// A disk that does not answer costs one thread, and each asker one look's time.
func TestLooksAtOneGateAreOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Network
		var asked atomic.Int32
		answer := make(chan error)
		check := func() error { asked.Add(1); return <-answer }
		begin := time.Now()
		errs := make(chan error)
		for range 5 {
			go func() { errs <- n.lookAt("one", check) }()
		}
		for range 5 {
			if err := <-errs; err != rules.ErrNoAnswer {
				t.Errorf("got %v", err)
			}
		}
		if took := time.Since(begin); took > 2*rules.Bound || asked.Load() != 1 {
			t.Errorf("%d looks, which took %s", asked.Load(), took)
		}
		if err := n.lookAt("other", func() error { return nil }); err != nil {
			t.Errorf("another gate: %v", err)
		}
		// A check that goes on is joined, and over when it has answered.
		closed := errors.New("closed")
		for i, want := range []error{closed, nil} {
			go func() { errs <- n.lookAt("one", check) }()
			synctest.Wait()
			answer <- want
			if err := <-errs; err != want || int(asked.Load()) != 1+i {
				t.Errorf("got %v after %d looks", err, asked.Load())
			}
			synctest.Wait()
		}
	})
}

// What is owed for too long is given up.
func TestOwedRemovalsAge(t *testing.T) {
	t.Parallel()
	d := newAgentNode(t)
	d.agentThere(false)
	list := []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", fmt.Sprintf(`{"type":"calico","nodename":"x","nodename_file":%q}`, d.nodename)))}}
	d.must(os.MkdirAll(d.owedDir, 0o700))
	for id, age := range map[string]time.Duration{"old": owed.MaxAge + time.Second, "young": owed.MaxAge - time.Hour} {
		d.must(os.WriteFile(filepath.Join(d.owedDir, id+".json"), encode(t, owed.Removal{ID: id, Networks: list, Since: time.Now().Add(-age), Released: true}), 0o600))
	}
	n := d.withGrace("1h")
	eventually(t, func() string {
		if owed := n.OwedRemovals(); len(owed) != 1 || owed[0].ID != "young" {
			return fmt.Sprintf("%+v", owed)
		}
		return ""
	})
	if f := d.files(); len(f) != 1 {
		t.Errorf("on disk: %q", f)
	}
}

// What a handler owes that is not configured any more, the default network does;
// of one that is, only that handler's network.
func TestOwedRemovalsOfAHandlerThatIsGone(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("a")
	d.write("10-a.conflist", conflist("1.0.0", "pods", "a"))
	owedDir := filepath.Join(d.answers, "owed")
	store := func(handler, id string) {
		n := d.network(WithOwedRemovals(owedDir), WithHandler(handler))
		d.must(n.owed.Add(owed.Removal{ID: id, Networks: []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", "a"))}}, Since: time.Now(), Released: true}))
		d.must(n.Close())
	}
	store("kata", "pod-kata")
	store("gone", "pod-gone")
	store("default", "pod-default")
	kata := d.network(WithOwedRemovals(owedDir), WithHandler("kata"))
	n := d.network(WithOwedRemovals(owedDir), WithHandler("default"))
	n.pace.owed = time.Hour
	n.owed.Load(t.Context(), startBound)
	kata.owed.Load(t.Context(), startBound)
	var ids []string
	for _, o := range n.OwedRemovals() {
		ids = append(ids, o.ID)
	}
	slices.Sort(ids)
	if want := []string{"pod-default", "pod-gone"}; !slices.Equal(ids, want) {
		t.Errorf("the default network has %q, want %q", ids, want)
	}
	if owed := kata.OwedRemovals(); len(owed) != 1 || owed[0].ID != "pod-kata" {
		t.Errorf("kata has %+v", owed)
	}
}

// One that hangs does not hold up the others; of pods whose ADD had failed one
// is tried at a time, at the pace of the trial.
func TestOwedRemovalsBesideEachOther(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("hung", "good", "bad")
	d.write("10-a.conflist", conflist("1.0.0", "next", "hung", "good", "bad"))
	gate := filepath.Join(d.answers, "go")
	d.answer("hung", "DEL", reply{sh: fmt.Sprintf("until [ -e '%s' ]; do sleep 0.05; done", gate)})
	d.answer("bad", "DEL", reply{out: `{"code":11,"msg":"busy"}`, code: 1})
	n := d.network(WithOwedRemovals(t.TempDir()))
	store := func(typ, id string, released bool) {
		d.must(n.owed.Add(owed.Removal{ID: id, Networks: []owed.Network{{Interface: "eth0", List: []byte(conflist("1.0.0", "pods", typ))}}, Since: time.Now(), Released: released}))
		n.owed.RetryNow(id)
	}
	for i := range owed.MaxRetries - 1 {
		store("hung", fmt.Sprint("a-hung-", i), true)
	}
	for i := range 8 {
		store("good", fmt.Sprint("good-", i), true)
	}
	for i := range 20 {
		store("bad", fmt.Sprint("bad-", i), false)
	}
	begin := time.Now()
	n.Start()
	eventually(t, func() string {
		if done := d.count("good", "DEL"); done < 8 {
			return fmt.Sprintf("%d of 8 done", done)
		}
		return ""
	})
	if c := d.count("hung", "DEL"); c != owed.MaxRetries-1 {
		t.Errorf("%d hang", c)
	}
	time.Sleep(3 * admission.Pace)
	tries, limit := d.count("bad", "DEL"), int(time.Since(begin)/admission.Pace)+1
	if tries == 0 || tries > limit {
		t.Errorf("%d tries of pods whose ADD had failed in %s, want at most %d", tries, time.Since(begin), limit)
	}
	d.must(os.WriteFile(gate, nil, 0o644))
}

func decode(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
