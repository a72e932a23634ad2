// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
)

// TestSoak changes everything the network depends on, at random, and checks
// after each change that what the daemon uses is what a small model says. Pods
// come and go meanwhile and Status is polled. CNIRELOAD_SOAK is how long, a
// minute if not set; CNIRELOAD_SEED repeats a run.
func TestSoak(t *testing.T) {
	t.Parallel()
	if err := harness.Preflight("make soak", harness.Patched); err != nil {
		t.Fatal(err)
	}
	during, seed := soakOptions(t)
	t.Logf("seed %d: CNIRELOAD_SEED=%d repeats the run", seed, seed)
	ops := generate(seed, 50000)
	ran, err := soak(t, ops, during)
	if err == nil {
		return
	}
	t.Errorf("seed %d, after %d operations: %v", seed, len(ran), err)
	failing := shortest(t, ran, func(part []op) error {
		_, err := soak(t, part, 0)
		return err
	})
	var text []string
	for i, o := range failing {
		text = append(text, fmt.Sprintf("%4d %v", i, o))
	}
	t.Errorf("the shortest run found to fail:\n%s", strings.Join(text, "\n"))
}

// soakOptions is how long a soak goes on, and its seed.
func soakOptions(t *testing.T) (during time.Duration, seed uint64) {
	during, seed = time.Minute, uint64(time.Now().UnixNano())
	var err error
	if v := os.Getenv("CNIRELOAD_SOAK"); v != "" {
		during, err = time.ParseDuration(v)
		assert.NilError(t, err)
	}
	if v := os.Getenv("CNIRELOAD_SEED"); v != "" {
		seed, err = strconv.ParseUint(v, 10, 64)
		assert.NilError(t, err)
	}
	return during, seed
}

// shortest leaves out as much as it can of a run whose last operation fails:
// halves first, then smaller and smaller parts, until it takes too long.
func shortest[T any](t *testing.T, ops []T, run func([]T) error) []T {
	until := time.Now().Add(3 * time.Minute)
	for size := (len(ops) + 1) / 2; size > 0; size /= 2 {
		for at := 0; at+size < len(ops); {
			if time.Now().After(until) {
				t.Logf("there was no time to leave out more")
				return ops
			}
			part := slices.Concat(ops[:at], ops[at+size:])
			if err := run(part); err != nil {
				t.Logf("%d operations fail: %v", len(part), err)
				ops = part
			} else {
				at += size
			}
		}
	}
	return ops
}

// op is one operation. What its numbers mean is the kind's affair; one that
// makes no sense where it comes does nothing.
type op struct {
	kind string
	file string // of which file
	way  int    // in which way
	mark int    // a number that no other operation has
}

func (o op) String() string {
	return fmt.Sprintf("%s %s way %d mark m%dz", o.kind, o.file, o.way, o.mark)
}

func (o op) text() string { return fmt.Sprintf("m%dz", o.mark) }

// soakFiles are the lists; the rendered one is among them in sort order.
var soakFiles = []string{"10-a", "20-b", "30-c"}

func generate(seed uint64, count int) []op {
	random := rand.New(rand.NewPCG(seed, 1))
	kinds := []struct {
		name   string
		weight int
	}{
		{"write", 30}, {"break", 10}, {"remove", 8}, {"dangle", 2}, {"out", 4}, {"in", 4}, {"noise", 3}, {"target", 6},
		{"burst", 3}, {"drop-in", 6}, {"drop-in broken", 3}, {"drop-in removed", 3}, {"binary removed", 1}, {"binary installed", 6},
		{"template", 5}, {"template broken", 1}, {"cidr", 6}, {"rendered edited", 1}, {"rendered removed", 2},
		{"dir away", 2}, {"dir removed", 1}, {"dir covered", 1}, {"restart", 1},
	}
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	ops := make([]op, count)
	for i := range ops {
		pick, kind := random.IntN(total), 0
		for ; pick >= kinds[kind].weight; kind++ {
			pick -= kinds[kind].weight
		}
		ops[i] = op{kinds[kind].name, soakFiles[random.IntN(len(soakFiles))], random.IntN(1000), i}
	}
	return ops
}

// content is what a file holds: a list with a mark, or nothing of use.
type content struct {
	good bool
	mark string
}

// model is what must be in use.
type model struct {
	files map[string]content // in the conf dir, without extension
	out   map[string]content // moved out of it
	drops map[string]content // drop-ins by the list's file

	used  string // the file, "" for none
	marks []string
	drop  bool // whether a drop-in is among the marks
	stale bool

	noBinary bool
	template content
	owned    bool // the rendered file is the daemon's
	// wanted is set while CIDRs were told and are not rendered, and recorded if
	// the daemon knows that after a restart.
	wanted, recorded bool
}

const soakRendered = "10-containerd-net"

// settle finds what is in use, by the rules: the first good file in sort
// order, and a bad one where it is in use already.
func (m *model) settle(files map[string]content) {
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		f, drop := files[name], m.drops[name]
		_, dropped := m.drops[name]
		if f.good && (!dropped || drop.good) {
			m.used, m.marks, m.drop, m.stale = name, []string{f.mark}, dropped, false
			if dropped {
				m.marks = append(m.marks, drop.mark)
			}
			return
		}
		if m.used == name {
			m.stale = true
			return
		}
	}
	m.forget()
}

// settled finds what is in use once CIDRs that wait are rendered, which is when no
// other list has precedence.
func (m *model) settled() {
	m.settle(m.files)
	if m.wanted && m.template.good && !m.foreign() {
		m.files[soakRendered], m.owned = m.template, true
		m.settle(m.files)
	}
	if _, there := m.files[soakRendered]; there && m.owned && m.template.good {
		m.wanted, m.recorded = false, false
	}
}

// foreign tells whether a list is in use that is not the daemon's.
func (m *model) foreign() bool { return m.used != "" && !(m.used == soakRendered && m.owned) }

func (m *model) forget() { m.used, m.marks, m.drop, m.stale = "", nil, false, false }

// agrees compares what the daemon says with the model.
func (m *model) agrees(c harness.Condition, config string, r harness.Report) error {
	ready := m.used != "" && !m.noBinary
	if c.Ready != ready || r.Ready != ready {
		return fmt.Errorf("want ready %t, got %v (report %t)", ready, c, r.Ready)
	}
	file, drop := "", false
	for _, n := range r.Networks {
		if n.File.File != "" {
			file, drop = strings.TrimSuffix(filepath.Base(n.File.File), ".conflist"), len(n.DropIns) > 0
		}
	}
	if file != m.used || drop != m.drop || r.Stale != m.stale {
		return fmt.Errorf("want %q in use, drop-in %t, stale %t, got %q, %t, %t (%s)", m.used, m.drop, m.stale, file, drop, r.Stale, r.LastError)
	}
	for _, mark := range m.marks {
		if !strings.Contains(config, mark) {
			return fmt.Errorf("want %q of %q in use, got %s", mark, file, config)
		}
	}
	return nil
}

// soaker runs operations on one daemon.
type soaker struct {
	*node
	model
	// alive is held for reading by who talks to the daemon, for writing while
	// there is none.
	alive sync.RWMutex
	took  []time.Duration
	pods  int
}

func (s *soaker) text(name, mark string) string {
	return conflist(name, "1.0.0", []string{"fakenet", "portmap"}, "mark", mark)
}

func (s *soaker) path(file string) string { return s.conf(file + ".conflist") }

func (s *soaker) rename(path string, text string) error {
	tmp := s.aside("tmp")
	return errors.Join(os.WriteFile(tmp, []byte(text), 0o644), os.Rename(tmp, path))
}

// put has a file hold a text, in one of many ways.
func (s *soaker) put(o op, text string) error {
	path := s.path(o.file)
	switch o.way % 7 {
	case 0:
		return os.WriteFile(path, []byte(text), 0o644)
	case 1:
		return errors.Join(os.WriteFile(path+".tmp", []byte(text), 0o644), os.Rename(path+".tmp", path))
	case 2: // a hard link
		tmp := s.aside("tmp")
		return errors.Join(os.WriteFile(tmp, []byte(text), 0o644), os.RemoveAll(tmp+"2"), os.Link(tmp, tmp+"2"), os.Rename(tmp+"2", path), os.Remove(tmp))
	case 3: // in pieces
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		_, err1 := f.WriteString(text[:len(text)/2])
		time.Sleep(time.Duration(o.way%20) * time.Millisecond)
		_, err2 := f.WriteString(text[len(text)/2:])
		return errors.Join(err1, err2, f.Close())
	case 4: // a symlink
		target := s.aside("target" + o.text())
		return errors.Join(os.WriteFile(target, []byte(text), 0o644), os.Symlink(target, s.aside("link")), os.Rename(s.aside("link"), path))
	case 5: // without truncation
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			return err
		}
		_, err1 := f.WriteString(text)
		return errors.Join(err1, f.Truncate(int64(len(text))), f.Close())
	}
	return s.rename(path, text)
}

var bads = []string{"", " \n", "{", "}garbage{", "[]", `{"cniVersion":"1.0.0","name":"x"}`, `{"cniVersion":"7.7.7","name":"x","plugins":[{"type":"fakenet"}]}`}

// do carries out an operation on the disk and on the model. Where the daemon
// must have seen a state in between, it waits for that.
func (s *soaker) do(ctx context.Context, o op) error {
	m := &s.model
	path, name := s.path(o.file), o.file[3:]
	f, exists := m.files[o.file]
	switch o.kind {
	case "write":
		m.files[o.file] = content{true, o.text()}
		return s.put(o, s.text(name, o.text()))
	case "burst":
		m.files[o.file] = content{true, o.text()}
		for i := range 20 {
			if err := os.WriteFile(path, []byte(s.text(name, fmt.Sprintf("burst%d", i))), 0o644); err != nil {
				return err
			}
		}
		return s.put(o, s.text(name, o.text()))
	case "break":
		m.files[o.file] = content{}
		return s.rename(path, bads[o.way%len(bads)])
	case "remove":
		delete(m.files, o.file)
		return os.RemoveAll(path)
	case "dangle":
		// The same as none.
		delete(m.files, o.file)
		return errors.Join(os.Symlink(s.aside("dangling"+o.text()), s.aside("link")), os.Rename(s.aside("link"), path))
	case "out":
		if _, there := m.out[o.file]; there || !exists {
			return nil
		}
		m.out[o.file] = f
		delete(m.files, o.file)
		return os.Rename(path, s.aside("out"+o.file))
	case "in":
		was, there := m.out[o.file]
		if !there {
			return nil
		}
		m.files[o.file] = was
		delete(m.out, o.file)
		return os.Rename(s.aside("out"+o.file), path)
	case "noise":
		if !exists {
			return nil
		}
		return errors.Join(os.Chmod(path, 0o600|os.FileMode(o.way%2)*0o44), os.Chtimes(path, time.Now(), time.Now()),
			os.WriteFile(s.conf("unrelated"), []byte(o.text()), 0o644))
	case "target":
		target, err := os.Readlink(path)
		if err != nil || !exists {
			return nil
		}
		m.files[o.file] = content{true, o.text()}
		if o.way%2 == 0 {
			return s.rename(target, s.text(name, o.text()))
		}
		return os.WriteFile(target, []byte(s.text(name, o.text())), 0o644)
	case "drop-in", "drop-in broken":
		text := `{"type":"portmap","mark":"` + o.text() + `"}`
		m.drops[o.file] = content{true, o.text()}
		if o.kind == "drop-in broken" {
			text, m.drops[o.file] = "{", content{}
		}
		return errors.Join(os.MkdirAll(s.conf(name), 0o755), s.rename(filepath.Join(s.conf(name), "10.conf"), text))
	case "drop-in removed":
		delete(m.drops, o.file)
		return os.RemoveAll(s.conf(name))
	case "binary removed":
		m.noBinary = true
		return os.RemoveAll(filepath.Join(s.BinDirs[0], "portmap"))
	case "binary installed":
		m.noBinary = false
		return s.InstallFake("portmap")
	case "template":
		m.template = content{true, o.text()}
		m.follow()
		return s.rename(s.Template, s.text("rendered", o.text()))
	case "template broken":
		m.template = content{}
		return s.rename(s.Template, "{{")
	case "cidr":
		return s.render(ctx, o)
	case "rendered edited":
		if _, there := m.files[soakRendered]; !there || m.wanted {
			return nil
		}
		m.files[soakRendered], m.owned = content{true, o.text()}, false
		return s.rename(s.path(soakRendered), s.text("rendered", o.text()))
	case "rendered removed":
		delete(m.files, soakRendered)
		m.owned = false
		return os.RemoveAll(s.path(soakRendered))
	case "dir away":
		return s.without(ctx, func() error { return os.Rename(s.ConfDir, s.aside("away")) },
			func() error { return os.Rename(s.aside("away"), s.ConfDir) })
	case "dir removed":
		clear(m.files)
		clear(m.drops)
		m.owned = false
		remove := func() error { return os.RemoveAll(s.ConfDir) }
		if m.wanted {
			// Once the list that has precedence is removed, the template is rendered:
			// into a directory that is being removed.
			remove = func() error { return errors.Join(os.Rename(s.ConfDir, s.aside("gone")), os.RemoveAll(s.aside("gone"))) }
		}
		return s.without(ctx, remove, func() error { return os.Mkdir(s.ConfDir, 0o755) })
	case "dir covered":
		if o.way%4 != 0 || m.wanted {
			return nil // only the poll finds it: it would take most of the time
		}
		return s.without(ctx, func() error { return s.InNamespace("mount", "-t", "tmpfs", "none", s.ConfDir) },
			func() error { return s.InNamespace("umount", s.ConfDir) })
	case "restart":
		if o.way%4 != 0 {
			return nil // rarer than the others
		}
		return s.again(o.way%8 == 0)
	}
	return fmt.Errorf("unknown operation %q", o.kind)
}

// follow has the model's rendered file follow the template.
func (m *model) follow() {
	if _, there := m.files[soakRendered]; there && m.owned {
		m.files[soakRendered] = m.template
	}
}

// render tells a CIDR.
func (s *soaker) render(ctx context.Context, o op) error {
	m := &s.model
	err := s.SetCIDR(ctx, fmt.Sprintf("10.%d.0.0/16", o.mark%200))
	// What is in the file's place by somebody else is not replaced when it goes.
	if _, there := m.files[soakRendered]; !there || m.owned {
		m.wanted, m.recorded = true, m.recorded || m.foreign()
	} else {
		m.wanted, m.recorded = false, false
	}
	if !m.template.good {
		if (err == nil) != m.foreign() {
			return fmt.Errorf("a broken template, with another list %t: %w", m.foreign(), err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	_, there := m.files[soakRendered]
	if !there && m.used == "" {
		m.files[soakRendered], m.owned = m.template, true
	}
	m.follow()
	return nil
}

// without has the conf dir gone until the daemon has seen that.
func (s *soaker) without(ctx context.Context, take, back func() error) error {
	if err := take(); err != nil {
		return err
	}
	s.forget()
	if err := s.converge(ctx); err != nil {
		return errors.Join(fmt.Errorf("without the conf dir: %w", err), back())
	}
	return back()
}

// again restarts the daemon, which then knows of no last good content.
func (s *soaker) again(kill bool) error {
	s.alive.Lock()
	defer s.alive.Unlock()
	if kill {
		if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
			return err
		}
		<-s.Ended()
	}
	if err := s.Stop(); err != nil {
		return err
	}
	s.forget()
	s.wanted = s.recorded
	return s.Start(s.t.Context())
}

// converge waits until the daemon agrees with the model.
func (s *soaker) converge(ctx context.Context) error {
	begin := time.Now()
	err := harness.Poll(ctx, graced+soon, func() error {
		c, info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		r, err := harness.ReportFrom(info, "")
		if err != nil {
			return err
		}
		return s.agrees(c, info["cniconfig"], r)
	})
	s.took = append(s.took, time.Since(begin))
	return err
}

// try runs a pod and checks how it ends against the model.
func (s *soaker) try() error {
	s.pods++
	name := fmt.Sprintf("model%d", s.pods)
	err := s.add(name)
	if s.used == "" || s.noBinary {
		if err == nil || !strings.Contains(err.Error(), "cni plugin not initialized") {
			return fmt.Errorf("not ready, but a pod got: %v", err)
		}
		return nil
	}
	return err
}

// soak runs operations on a new daemon until the first that fails, or the time
// is over; zero is time for all. It returns those that it ran.
func soak(t *testing.T, ops []op, during time.Duration) (ran []op, err error) {
	n := prepare(t, harness.Options{Side: harness.Patched, NoImage: true})
	s := &soaker{node: n, model: model{
		files: map[string]content{}, out: map[string]content{}, drops: map[string]content{}, template: content{true, "m0z"},
	}}
	n.Template = filepath.Join(n.Base, "net.tmpl")
	n.write(n.Template, s.text("rendered", "m0z"))
	n.start()
	ctx, stop := context.WithCancel(t.Context())
	// What a first pod leaves behind for good is no leak.
	if err := s.bare(ctx); err != nil {
		stop()
		return nil, err
	}
	before := s.holdings()

	var failed atomic.Value
	var polls, pods, refused atomic.Int64
	wait := parallel(func() {
		for ; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			s.alive.RLock()
			_, err := s.Network(t.Context())
			s.alive.RUnlock()
			if err != nil {
				failed.CompareAndSwap(nil, fmt.Errorf("status: %w", err))
			}
			polls.Add(1)
		}
	}, func() {
		for i := 0; ctx.Err() == nil; i++ {
			s.alive.RLock()
			err := s.add(fmt.Sprintf("pod%d", i))
			s.alive.RUnlock()
			pods.Add(1)
			switch {
			case err == nil:
			case strings.Contains(err.Error(), "cni plugin not initialized") || strings.Contains(err.Error(), "failed to find plugin"),
				// The binary was removed after it was found.
				strings.Contains(err.Error(), "portmap cannot be executed") && strings.Contains(err.Error(), "no such file or directory"):
				refused.Add(1)
			default:
				failed.CompareAndSwap(nil, fmt.Errorf("pod: %w", err))
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	begin := time.Now()
	for _, o := range ops {
		past := time.Since(begin)
		if err != nil || during > 0 && past > during {
			break
		}
		if o.kind == "restart" && during > 0 && past > during/2 {
			continue // so that a leak has time to grow
		}
		ran = append(ran, o)
		if err = s.do(ctx, o); err == nil {
			s.settled()
			err = s.converge(ctx)
		}
		if err == nil && o.way%10 == 0 {
			err = s.try()
		}
		if background, _ := failed.Load().(error); err == nil {
			err = background
		}
		if err != nil {
			err = fmt.Errorf("%v: %w", o, err)
		}
	}
	stop()
	wait()
	if err != nil {
		return ran, err
	}
	slices.Sort(s.took)
	t.Logf("%d operations in %v, from done to seen in use: median %s, p99 %s, at most %s; %d Status calls, %d pods of which %d not ready",
		len(ran), time.Since(begin).Round(time.Second), tenth(s.took[len(s.took)/2]), tenth(s.took[len(s.took)*99/100]), tenth(s.took[len(s.took)-1]),
		polls.Load(), pods.Load(), refused.Load())
	if err := s.bare(t.Context()); err != nil {
		return ran, err
	}
	return ran, s.leaked(before)
}

// bare brings the daemon to a state that can be compared: it has run pods, and
// has none and no network.
func (s *soaker) bare(ctx context.Context) error {
	empty := func() error {
		entries, err := os.ReadDir(s.ConfDir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(s.conf(e.Name())); err != nil {
				return err
			}
		}
		clear(s.files)
		clear(s.drops)
		s.owned, s.noBinary = false, false
		return s.InstallFake("portmap")
	}
	// CIDRs that wait are rendered no more.
	s.template = content{}
	if err := errors.Join(s.rename(s.Template, "{{"), empty()); err != nil {
		return err
	}
	// A pod whose DEL failed for want of a list or a plugin is still there.
	if err := s.rename(s.path("10-a"), s.text("a", "bare")); err != nil {
		return err
	}
	s.files["10-a"] = content{true, "bare"}
	s.settle(s.files)
	if err := errors.Join(s.converge(ctx), s.try(), s.try(), s.RemovePods(ctx)); err != nil {
		return err
	}
	if err := empty(); err != nil {
		return err
	}
	s.settle(s.files)
	return s.converge(ctx)
}

// holdings counts what a daemon can leak.
func (s *soaker) holdings() map[string]int {
	s.t.Helper()
	h := map[string]int{}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.PID()))
	assert.NilError(s.t, err)
	h["descriptors"] = len(fds)
	for _, fd := range fds {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", s.PID(), fd.Name()))
		if err == nil {
			h["inotify watches"] += strings.Count("\n"+string(b), "\ninotify wd:")
		}
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", s.PID()))
	assert.NilError(s.t, err)
	h["mounts"] = strings.Count(string(mounts), "\n")
	netns, _ := os.ReadDir(s.NetNSDir())
	h["network namespaces"] = len(netns)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(s.State, "debug.sock"))
	}}}
	resp, err := client.Get("http://debug/debug/pprof/goroutine?debug=1")
	assert.NilError(s.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	assert.NilError(s.t, err)
	var goroutines int
	_, err = fmt.Sscanf(string(b), "goroutine profile: total %d", &goroutines)
	assert.NilError(s.t, err, "%.200s", b)
	h["goroutines"] = goroutines
	return h
}

// leaked compares with what was held before, once things had time to end.
func (s *soaker) leaked(before map[string]int) error {
	// A connection or a timer more or less is no leak.
	slack := map[string]int{"goroutines": 8, "descriptors": 4}
	var now map[string]int
	err := harness.Poll(context.Background(), 15*time.Second, func() error {
		now = s.holdings()
		for what, count := range now {
			if count > before[what]+slack[what] {
				time.Sleep(200 * time.Millisecond)
				return fmt.Errorf("leak: %d %s, %d before", count, what, before[what])
			}
		}
		return nil
	})
	s.t.Logf("held before %v, after %v", before, now)
	return err
}
