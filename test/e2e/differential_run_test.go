// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
	"github.com/cnireload/cnireload/test/vendors"
)

// The bounds of the patched side in a differential run are short: its plugins
// answer in milliseconds or never, no rule compares two of these bounds, and what
// takes minutes on a node takes as many seconds here. What is not configurable is
// waited for: the poll, the pause between two tries, the grace of an upgrade.
var (
	shortDel   = harness.Slow(4 * time.Second)
	shortGrace = harness.Slow(2 * time.Second)
	shortWait  = harness.Slow(time.Second)
	// patience is a caller's. Stock has no other bound.
	patience = harness.Slow(4 * time.Second)
	// better is how long the patched side may be behind: three failures of STATUS
	// in a row, a gate that is shown after some seconds, a poll.
	better = harness.Slow(20 * time.Second)
	// removable is how long a pod may stay that stock has removed.
	removable = shortGrace + 2*shortDel + soon
)

func shortBounds() (cni []string, timeouts map[string]string) {
	timeouts = map[string]string{}
	for verb, bound := range map[string]time.Duration{"add": 3 * time.Second, "check": 3 * time.Second, "status": 2 * time.Second, "version": 3 * time.Second, "gc": 4 * time.Second} {
		timeouts["io.containerd.timeout.cri.cni."+verb] = harness.Slow(bound).String()
	}
	timeouts["io.containerd.timeout.cri.cni.del"] = shortDel.String()
	return []string{fmt.Sprintf("del_grace = '%v'", shortGrace)}, timeouts
}

// violation is a way in which the patched side is worse than stock.
type violation struct {
	kind   string // the same for the same fault, or nearly
	detail string
}

func (v *violation) Error() string { return v.kind + ": " + v.detail }

// contender is one side of a differential run.
type contender struct {
	*harness.Daemon
	agents map[string]net.Listener // by path
	pods   map[string]string       // ids by name
	tries  uint32
	deaths int // ends that nobody asked for
}

// pastPod is a pod that both sides have removed.
type pastPod struct {
	name           string
	stock, patched string   // ids
	kept           []string // what stock did not free
}

// duel is a script that is run on both sides.
type duel struct {
	script
	stock, patched *contender
	log            func(format string, args ...any)
	past           []pastPod
	probes         int
	compared       map[string]int // comparisons made, by what is compared
}

func newDuel(ctx context.Context, s script, log func(format string, args ...any)) (d *duel, err error) {
	d = &duel{script: s, log: log, compared: map[string]int{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.destroy())
		}
	}()
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		o := harness.Options{Side: side, Private: true}
		if o.Base, err = os.MkdirTemp("", harness.Prefix); err != nil {
			return d, err
		}
		o.BinDirs = []string{filepath.Join(o.Base, "bin"), filepath.Join(o.Base, "bin2")}
		if side == harness.Patched {
			o.ReadyWait = shortWait.String()
			o.CNI, o.Timeouts = shortBounds()
		}
		daemon, err := harness.New(o)
		if err != nil {
			return d, err
		}
		c := &contender{Daemon: daemon, agents: map[string]net.Listener{}, pods: map[string]string{}}
		if side == harness.Stock {
			d.stock = c
		} else {
			d.patched = c
		}
	}
	if i := slices.IndexFunc(s.steps, func(s step) bool { return s.do == "begin" }); i >= 0 {
		if err := d.patched.Become(harness.Stock); err != nil {
			return d, err
		}
	}
	if err := d.both(func(c *contender) error { return d.tidy(c) }); err != nil {
		return d, err
	}
	return d, d.both(func(c *contender) error { return c.Start(ctx) })
}

func (d *duel) destroy() error {
	return d.both(func(c *contender) error {
		for _, l := range c.agents {
			_ = l.Close()
		}
		return c.Destroy()
	})
}

// both does the same on both sides at once.
func (d *duel) both(do func(*contender) error) error {
	var errs [2]error
	var run []func()
	for i, c := range []*contender{d.stock, d.patched} {
		if c != nil {
			run = append(run, func() { errs[i] = do(c) })
		}
	}
	parallel(run...)()
	return errors.Join(errs[:]...)
}

// run takes the steps up to the first at which the patched side is worse. It
// returns how many it has taken.
func (d *duel) run(ctx context.Context) (taken int, err error) {
	for _, s := range d.steps {
		taken++
		begin := time.Now()
		err := d.take(ctx, s)
		if took := time.Since(begin); err == nil && took > patience {
			d.log("  step %d took %v: %v", taken, took.Round(100*time.Millisecond), s)
		}
		if err != nil {
			return taken, err
		}
		if err := d.survive(ctx); err != nil {
			return taken, err
		}
	}
	return taken, nil
}

// survive starts again what has ended by itself.
func (d *duel) survive(ctx context.Context) error {
	if !d.patched.Alive() {
		return &violation{"the daemon ended", d.patched.LogTail(20)}
	}
	if d.stock.Alive() {
		return nil
	}
	d.stock.deaths++
	return errors.Join(d.stock.Stop(), d.stock.Start(ctx))
}

// take takes one step.
func (d *duel) take(ctx context.Context, s step) error {
	switch s.do {
	case "begin": // see newDuel
	case "put":
		return d.change(func(c *contender) error { return d.put(c, s) })
	case "break":
		return d.change(func(c *contender) error {
			return os.WriteFile(c.slot(s.what), []byte(brokens[s.how]), 0o644)
		})
	case "loopback":
		return d.change(func(c *contender) error {
			return os.WriteFile(filepath.Join(c.ConfDir, s.what+".conf"), []byte(`{"cniVersion":"0.4.0","name":"lo","type":"loopback"}`), 0o644)
		})
	case "drop":
		return d.change(func(c *contender) error { return os.RemoveAll(c.slot(s.what)) })
	case "wipe":
		return d.change(func(c *contender) error {
			return errors.Join(c.empty(c.ConfDir), d.uninstall(c, executables(d.networks)...))
		})
	case "agent":
		return d.both(func(c *contender) error { return c.agent(d.network(s.what), s.how) })
	case "uninstall":
		return d.both(func(c *contender) error { return d.uninstall(c, s.what) })
	case "install":
		return d.both(func(c *contender) error { return d.install(c, s.what, s.how) })
	case "mend":
		return d.both(func(c *contender) error { return errors.Join(d.tidy(c), c.agent(d.network(s.what), "up")) })
	case "supports", "behave":
		return d.both(func(c *contender) error { return d.behave(c, s) })
	case "restart":
		return d.restart(ctx, s)
	case "upgrade":
		if d.patched.Side == harness.Patched {
			return nil
		}
		return errors.Join(d.patched.Stop(), d.patched.Become(harness.Patched), d.patched.Start(ctx))
	case "run":
		return d.runPod(ctx, s.what)
	case "remove":
		return d.removePod(ctx, s.what)
	case "settle":
		return d.settle(ctx)
	case "heal":
		return d.heal(ctx)
	default:
		return fmt.Errorf("unknown step %q", s.do)
	}
	return nil
}

func (d *duel) network(number string) shipped {
	i, _ := strconv.Atoi(number)
	return d.networks[i%len(d.networks)]
}

// change does something to both conf dirs and has stock, which does not notice all
// of it, look at its own again: what is compared is what each makes of the files.
func (d *duel) change(do func(*contender) error) error {
	return errors.Join(d.both(do), os.WriteFile(filepath.Join(d.stock.ConfDir, "poke"), nil, 0o644))
}

// slot is the file in the conf dir that begins with a name, whatever its extension.
func (c *contender) slot(name string) string {
	for _, ext := range []string{".conf", ".conflist"} {
		if _, err := os.Lstat(filepath.Join(c.ConfDir, name+ext)); err == nil {
			return filepath.Join(c.ConfDir, name+ext)
		}
	}
	return filepath.Join(c.ConfDir, name+".conflist")
}

// put writes a list.
func (d *duel) put(c *contender, s step) error {
	n := d.network(strings.Fields(s.how)[0])
	version := ""
	for _, v := range versions {
		if s.has(v) {
			version = v
		}
	}
	text := n.file(version, s.has("short"), s.has("moved"))
	path := filepath.Join(c.ConfDir, s.what+n.ext())
	if old := c.slot(s.what); old != path {
		if err := os.RemoveAll(old); err != nil {
			return err
		}
	}
	outside := filepath.Join(c.Base, "outside")
	switch {
	case s.has("inplace"):
		return os.WriteFile(path, text, 0o644)
	case s.has("outside"):
		return errors.Join(os.WriteFile(outside, text, 0o644), os.Rename(outside, path))
	case s.has("symlink"):
		target := filepath.Join(c.Base, "target-"+s.what)
		return errors.Join(os.WriteFile(target, text, 0o644), os.Symlink(target, outside), os.Rename(outside, path))
	}
	return errors.Join(os.WriteFile(path+".tmp", text, 0o644), os.Rename(path+".tmp", path))
}

func (c *contender) empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// agent has the agent of a network come, go, die without taking its sockets away,
// or come at the other place where the lists may look for it.
func (c *contender) agent(n shipped, how string) error {
	for _, moved := range []bool{false, true} {
		for _, a := range n.provides(moved) {
			if moved && !strings.HasSuffix(a.Target, movedSuffix) {
				continue // the same as before
			}
			here := how == "all" || how == "up" && !moved || how == "moved" && (moved || !n.movable(a))
			if err := c.provide(a, here, how == "dead"); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *contender) provide(a vendors.Agent, here, leave bool) error {
	path := c.Inside(a.Target)
	if a.Kind != "unix socket" {
		if !here {
			return os.RemoveAll(path)
		}
		content := "here"
		if a.Kind == "flannel env file" {
			content = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
		}
		return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644))
	}
	l := c.agents[path]
	if here == (l != nil) {
		return nil
	}
	if !here {
		l.(*net.UnixListener).SetUnlinkOnClose(!leave)
		delete(c.agents, path)
		return l.Close()
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.RemoveAll(path)); err != nil {
		return err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	c.agents[path] = l
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	return nil
}

// places are where executables are installed: the two bin dirs, and where multus
// looks for its delegates.
func (c *contender) places() map[string]string {
	return map[string]string{"first": c.BinDirs[0], "second": c.BinDirs[1], "opt": c.Inside("/opt/cni/bin")}
}

func (d *duel) install(c *contender, plugin, place string) error {
	src, err := harness.Fakenet()
	if err != nil {
		return err
	}
	for name, dir := range c.places() {
		path := filepath.Join(dir, plugin)
		if name != place {
			err = errors.Join(err, os.RemoveAll(path))
			continue
		}
		// A hard link is as good as a copy, and much faster; an upgrade's new inode
		// is what "supports" stands for. A rename to another link of the same file
		// leaves both.
		tmp := path + ".new"
		err = errors.Join(err, os.RemoveAll(tmp), copyOrLink(src, tmp), os.Rename(tmp, path), os.RemoveAll(tmp))
	}
	return err
}

func copyOrLink(src, dst string) error {
	if os.Link(src, dst) == nil {
		return nil
	}
	b, err := os.ReadFile(src)
	return errors.Join(err, os.WriteFile(dst, b, 0o755))
}

func (d *duel) uninstall(c *contender, plugins ...string) (err error) {
	for _, p := range plugins {
		for _, dir := range c.places() {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, p)))
		}
	}
	return err
}

// behave changes how a plugin answers, or which versions its executable supports.
func (d *duel) behave(c *contender, s step) error {
	state, err := c.Fake.State(s.what)
	if err != nil {
		return err
	}
	words := strings.Fields(s.how)
	switch {
	case s.do == "supports":
		state.Versions = words
		if s.how == "all" {
			state.Versions = nil
		}
		// An upgrade is a new file.
		for _, dir := range c.places() {
			path := filepath.Join(dir, s.what)
			if b, err := os.ReadFile(path); err == nil {
				if err := errors.Join(os.WriteFile(path+".new", b, 0o755), os.Rename(path+".new", path)); err != nil {
					return err
				}
			}
		}
	case s.how == "well":
		state.Verbs = nil
	default:
		b := fake.Behavior{Mode: fake.Fail, Code: 100, Msg: s.what + " says no"}
		switch {
		case words[1] == "hang":
			b = fake.Behavior{Mode: fake.Hang}
		case words[1] == "unknown":
			b = fake.Behavior{Mode: fake.Fail, Code: 4, Msg: "unknown CNI_COMMAND: STATUS"}
		case words[0] == "STATUS":
			b.Code = 50
		}
		state.Verbs = maps.Clone(state.Verbs)
		if state.Verbs == nil {
			state.Verbs = map[string]fake.Behavior{}
		}
		state.Verbs[words[0]] = b
	}
	return c.Fake.Set(s.what, state)
}

// tidy puts the plugins into their place, all of them well.
func (d *duel) tidy(c *contender) error {
	for plugin, state := range states(d.networks) {
		if err := c.Fake.Set(plugin, state); err != nil {
			return err
		}
	}
	for _, e := range executables(d.networks) {
		if err := d.install(c, e, "first"); err != nil {
			return err
		}
	}
	return nil
}

// restart ends and starts both daemons. What libcni has cached may be lost with it.
func (d *duel) restart(ctx context.Context, s step) error {
	return d.both(func(c *contender) error {
		end := c.Stop
		if s.has("kill") {
			end = c.Kill
		}
		if err := end(); err != nil && c.Side == harness.Patched {
			return err
		}
		cached, err := filepath.Glob(filepath.Join(c.AttachmentCache(), "results", "*"))
		for _, path := range cached {
			switch {
			case s.has("empty"):
				err = errors.Join(err, os.WriteFile(path, nil, 0o600))
			case s.has("gone"):
				err = errors.Join(err, os.Remove(path))
			}
		}
		return errors.Join(err, c.Stop(), c.Start(ctx))
	})
}

// condition is NetworkReady as an impatient caller sees it.
func (c *contender) condition(ctx context.Context) harness.Condition {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := c.Network(ctx)
	if err != nil {
		return harness.Condition{Message: err.Error()}
	}
	return r
}

func (c *contender) tryRun(ctx context.Context, name string) error {
	c.tries++
	id, err := c.RunPod(ctx, harness.Pod{Name: name, Attempt: c.tries, Timeout: patience})
	if err == nil {
		c.pods[name] = id
	}
	return err
}

// tryRemove stops and removes a pod, as kubelet does.
func (c *contender) tryRemove(ctx context.Context, name string) error {
	id, ok := c.pods[name]
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, shortDel+patience)
	defer cancel()
	if c.Side == harness.Stock {
		// It has no bound but its caller's.
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	if _, err := c.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	if _, err := c.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	delete(c.pods, name)
	return nil
}

// held is what plugins have given out for a sandbox: interface, network, plugin.
func (c *contender) held(id string) ([]string, error) {
	leases, err := c.Fake.Leases()
	var held []string
	for key := range leases {
		if rest, ok := strings.CutPrefix(key, id+"/"); ok {
			held = append(held, rest)
		}
	}
	slices.Sort(held)
	return held, err
}

// settle compares readiness, and a pod's whole life.
func (d *duel) settle(ctx context.Context) error {
	d.probes++
	name := fmt.Sprint("probe", d.probes)
	if err := d.runPod(ctx, name); err != nil {
		return err
	}
	return d.removePod(ctx, name)
}

// runPod runs a pod on stock and then on the patched side, which may take a while
// longer but must not fail where stock is ready and its pod runs.
func (d *duel) runPod(ctx context.Context, name string) error {
	if d.patched.Side == harness.Stock {
		return d.both(func(c *contender) error {
			_ = c.tryRun(ctx, name)
			return nil
		})
	}
	time.Sleep(100 * time.Millisecond) // stock has seen the last change
	err := errors.New("stock is not ready")
	ready := d.stock.condition(ctx).Ready
	if ready {
		err = d.stock.tryRun(ctx, name)
	}
	if err != nil {
		_ = d.patched.tryRun(ctx, name)
		return nil
	}
	d.compared["ready and runs"]++
	var kind string
	worse := harness.Poll(ctx, better, func() error {
		if c := d.patched.condition(ctx); !c.Ready {
			kind = "not ready"
			return errors.New(c.String())
		}
		kind = "pod refused"
		return d.patched.tryRun(ctx, name)
	})
	if worse == nil {
		return nil
	}
	// It may have had luck.
	again := name + "-again"
	if c := d.stock.condition(ctx); !c.Ready || d.stock.tryRun(ctx, again) != nil {
		return nil
	}
	_ = d.stock.tryRemove(ctx, again)
	return &violation{kind, fmt.Sprintf("stock is ready and its pod %s runs, for %v the patched side says: %v", name, better, worse)}
}

// removePod removes a pod from both sides. What stock removes must go.
func (d *duel) removePod(ctx context.Context, name string) error {
	ids := [2]string{d.stock.pods[name], d.patched.pods[name]}
	if ids[0] == "" || ids[1] == "" || d.patched.Side == harness.Stock {
		return d.both(func(c *contender) error {
			_ = c.tryRemove(ctx, name)
			return nil
		})
	}
	begin := time.Now()
	if err := d.stock.tryRemove(ctx, name); err != nil {
		_ = d.patched.tryRemove(ctx, name)
		return nil
	}
	took := time.Since(begin)
	kept, err := d.stock.held(ids[0])
	if err != nil {
		return err
	}
	d.compared["removed"]++
	worse := harness.Poll(ctx, removable, func() error { return d.patched.tryRemove(ctx, name) })
	if worse != nil {
		return &violation{"not removed", fmt.Sprintf("stock has removed pod %s in %v and kept %q, for %v the patched side says: %v", name, took.Round(time.Millisecond), kept, removable, worse)}
	}
	d.past = append(d.past, pastPod{name, ids[0], ids[1], kept})
	return nil
}

// heal mends everything, and then stock's pods and the other side's go, and what
// stock has freed the other side has freed, too.
func (d *duel) heal(ctx context.Context) error {
	if d.patched.Side == harness.Stock {
		if err := d.take(ctx, step{do: "upgrade"}); err != nil {
			return err
		}
	}
	err := d.both(func(c *contender) error {
		for _, n := range d.networks {
			if err := c.agent(n, "all"); err != nil {
				return err
			}
		}
		return errors.Join(d.tidy(c), c.empty(c.ConfDir))
	})
	if err != nil {
		return err
	}
	if err := d.take(ctx, step{"put", slots[0], "0 rename"}); err != nil {
		return err
	}
	if err := d.settle(ctx); err != nil {
		return err
	}
	names := slices.Concat(slices.Collect(maps.Keys(d.stock.pods)), slices.Collect(maps.Keys(d.patched.pods)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if err := d.removePod(ctx, name); err != nil {
			return err
		}
	}
	for _, p := range d.past {
		d.compared["freed"]++
		if err := harness.Poll(ctx, 2*better, func() error {
			held, err := d.patched.held(p.patched)
			for _, lease := range held {
				if !slices.Contains(p.kept, lease) {
					err = errors.Join(err, fmt.Errorf("%s is held", lease))
				}
			}
			return err
		}); err != nil {
			return &violation{"not freed", fmt.Sprintf("pod %s (%s) has been removed, stock keeps %q of it, the patched side: %v", p.name, p.patched, p.kept, err)}
		}
	}
	return nil
}
