// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
)

// Remove detaches the network namespace from the networks it was attached to,
// which need not be those in use now: libcni's attachment cache holds the list
// that ADD used, for pods that go-cni attached too. Without an entry there, for
// an ADD that failed, it is the list that the failed ADD used, or those in use;
// without any there is nothing to remove.
// Readiness does not matter: it is about new pods.
//
// Every plugin of a list is run, last to first, even when one fails, so that
// none keeps what it allocated because of another (containerd#12130); the error
// joins what failed. A plugin that says "not found" has nothing left to do; so
// has one that says "no such file or directory" when path is empty because the
// namespace is gone (both as go-cni), unless that is its agent's file.
//
// While the agent of a plugin is away, the call waits for as long as a DEL may
// take, unless ADD has failed, and then fails with that cause. A pod whose removal has failed so for as
// long as [WithDelGrace] says is let go: the removal is stored, nil returned,
// and DEL run when the agent is back, see [Network.Tombstones]. DEL after a
// failed ADD that fails is stored at once.
//
// A second call for the same id while one runs joins it. The work goes on to
// its own bound when a caller gives up.
func (n *Network) Remove(ctx context.Context, id string, path string, opts ...NamespaceOpts) error {
	ctx, span := startSpan(ctx, "cni.Remove", id, path)
	defer span.End()
	ns, err := newNamespace(id, path, opts)
	if err != nil {
		return err
	}
	f := n.removals.join(id, func() error {
		n.turnstile.enter()
		defer n.turnstile.leave()
		return n.detach(context.WithoutCancel(ctx), ns)
	})
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return fmt.Errorf("DEL goes on in the background: %w", context.Cause(ctx))
	}
}

// flights makes calls for the same id one.
type flights struct {
	mu      sync.Mutex
	flights map[string]*flight
}

type flight struct {
	done chan struct{}
	err  error // once done
}

// join returns the flight of id, which do is run for if there is none.
func (f *flights) join(id string, do func() error) *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl := f.flights[id]; fl != nil {
		return fl
	}
	fl := &flight{done: make(chan struct{})}
	if f.flights == nil {
		f.flights = make(map[string]*flight)
	}
	f.flights[id] = fl
	go func() {
		fl.err = do()
		f.mu.Lock()
		delete(f.flights, id)
		f.mu.Unlock()
		close(fl.done)
	}()
	return fl
}

// detach runs DEL for every network that the namespace may be attached to.
func (n *Network) detach(ctx context.Context, ns *Namespace) error {
	if n.tombstones.released(ns.id) {
		return nil // its caller was told so before
	}
	n.awaitSearch()
	adding := n.running.evict(ns.id)
	attachments, err := n.attached(ns.id)
	if err != nil {
		return err
	}
	since, failing := n.failing.get(ns.id)
	overdue := failing && time.Since(since) >= n.config.delGrace
	_, neverAdded := n.tried.get(ns.id)
	if !overdue && !neverAdded {
		n.awaitAgent(ctx, attachments)
	}
	left, err := n.detachAll(ctx, attachments, ns)
	switch {
	case err == nil && adding:
		// What it allocates from now on is not removed yet (cni#550).
		err := errors.New("an ADD that was given up may still go on")
		if berr := n.tombstones.bury(n.grave(ns, attachments, err, true)); berr != nil {
			log.G(ctx).WithError(berr).Warnf("cni: pod %s: %v, and no DEL will follow it", ns.id, err)
		}
		n.forget(ns.id)
		return nil
	case err == nil:
		n.tombstones.clear(ns.id)
		n.forget(ns.id)
		return nil
	case neverAdded:
		// CRI does not come back for a pod that was never attached
		// (containerd#12130).
		if berr := n.tombstones.bury(n.grave(ns, left, err, false)); berr != nil {
			log.G(ctx).WithError(berr).Warnf("cni: pod %s: DEL after a failed ADD has failed and will not be tried again", ns.id)
			return err
		}
		return fmt.Errorf("%w; it will be tried again", err)
	default:
		return n.letGo(ctx, ns, left, err)
	}
}

// detachAll runs DEL for one list after the other, whatever the others brought,
// and returns those for which it failed.
func (n *Network) detachAll(ctx context.Context, attachments []attachment, ns *Namespace) (left []attachment, err error) {
	var errs []error
	for _, a := range attachments {
		if err := n.detachOne(ctx, a, ns); err != nil {
			errs = append(errs, err)
			left = append(left, a)
		}
	}
	if len(errs) > 0 {
		err = oneLine(errs)
	}
	return left, err
}

// awaitSearch waits, for a moment after the start, until left-over plugins have
// been looked for: an ADD among them could end after the pod's DEL.
func (n *Network) awaitSearch() {
	if n.config.sandboxes == nil {
		return
	}
	bound := time.NewTimer(startBound)
	defer bound.Stop()
	select {
	case <-n.searched:
	case <-n.ctx.Done():
	case <-bound.C:
	}
}

// forget forgets what only concerns a pod that is not removed yet.
func (n *Network) forget(id string) {
	n.tried.forget(id)
	n.failing.forget(id)
}

// letGo lets a pod go whose removal has failed for del_grace because a plugin's
// agent is away. It is an error as long as the pod has to stay.
func (n *Network) letGo(ctx context.Context, ns *Namespace, left []attachment, cause error) error {
	since, failing := n.failing.get(ns.id)
	if !failing {
		since = time.Now()
		n.failing.put(ns.id, since)
	}
	away := n.agentAway(ctx, left)
	if away == nil {
		return cause
	}
	if time.Since(since) < n.config.delGrace {
		return fmt.Errorf("%w (%w)", cause, away)
	}
	if err := n.tombstones.bury(n.grave(ns, left, away, true)); err != nil {
		return fmt.Errorf("%w (%w, and the pod cannot be let go: %w)", cause, away, err)
	}
	n.forget(ns.id)
	log.G(ctx).Warnf("cni: pod %s is let go after %s; its removal is owed: %v", ns.id, n.config.delGrace, away)
	return nil
}

// awaitAgent waits, for as long as a DEL may take, until what the plugins of the
// lists need for DEL is there. Plugins whose needs are compiled in are not
// waited for: DEL tells better.
func (n *Network) awaitAgent(ctx context.Context, attachments []attachment) {
	ctx, cancel := context.WithTimeout(ctx, min(n.pace.agent, boundOf("DEL")))
	defer cancel()
	var pause *time.Ticker
	for n.gateOfDel(ctx, attachments, GateEnforce) != nil {
		if pause == nil {
			pause = time.NewTicker(n.pace.gate)
			defer pause.Stop()
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		case <-n.ctx.Done():
			return
		}
	}
}

// agentAway tells what DEL of the lists needs that is not there.
func (n *Network) agentAway(ctx context.Context, attachments []attachment) error {
	return n.gateOfDel(ctx, attachments, "")
}

// gateOfDel returns why one of the gates that DEL needs is closed; of that mode,
// if one is given. With gates off there is nothing to be waited for.
func (n *Network) gateOfDel(ctx context.Context, attachments []attachment, mode GateMode) error {
	if n.config.gates == GatesOff {
		return nil
	}
	for _, a := range attachments {
		if err := closedForDel(ctx, a.list, mode); err != nil {
			return err
		}
	}
	return nil
}

// attached returns the lists that the namespace id was attached with, as far as
// anybody knows.
func (n *Network) attached(id string) ([]attachment, error) {
	s := n.Snapshot()
	tried, _ := n.tried.get(id)
	known := append(slices.Clone(s.attachments), tried...)
	cached, err := n.cni.GetCachedAttachments(id)
	if err != nil {
		return nil, fmt.Errorf("cannot read the attachment cache for %s: %w", id, err)
	}
	var attachments []attachment
	for _, c := range cached {
		i := slices.IndexFunc(known, func(a attachment) bool { return a.ifName == c.IfName && a.wrote(c.Config) })
		if i >= 0 {
			attachments = append(attachments, known[i])
			continue
		}
		list, err := cachedList(c)
		if err != nil {
			return nil, fmt.Errorf("cached attachment of %s to network %q, interface %s: %w", id, c.Network, c.IfName, err)
		}
		attachments = append(attachments, attachment{list: list, ifName: c.IfName})
	}
	// In the order of the lists in use, which is the order of ADD.
	slices.SortStableFunc(attachments, func(a, b attachment) int { return cmp.Compare(s.position(a), s.position(b)) })
	// An attachment that failed is in no cache, but has perhaps allocated.
	for _, a := range tried {
		if !slices.ContainsFunc(attachments, func(b attachment) bool { return a.ifName == b.ifName && a.list.Name == b.list.Name }) {
			attachments = append(attachments, a)
		}
	}
	if len(attachments) > 0 {
		return attachments, nil
	}
	switch {
	case errors.Is(s.LoadError, errLoading):
		return nil, &notReady{cause: s.LoadError}
	case s.LoadError != nil:
		// Not an error: it would keep the pod for ever (containerd#8774). CRI
		// also comes here a second time, after all has been removed.
		log.L.Warnf("cni: pod %s: no attachment is cached and no network is in use: nothing to remove", id)
		return nil, nil
	}
	return s.attachments, nil
}

// position is where the snapshot has a list for the same interface.
func (s *Snapshot) position(a attachment) int {
	if i := slices.IndexFunc(s.attachments, func(b attachment) bool { return a.ifName == b.ifName }); i >= 0 {
		return i
	}
	return len(s.attachments)
}

// forCache returns the list in the form that libcni is to cache: what drop-ins
// added to it is part of what ADD used, but not of the list's file.
func (a attachment) forCache() *libcni.NetworkConfigList {
	if !a.dropIns {
		return a.list
	}
	var raw map[string]any
	if json.Unmarshal(a.list.Bytes, &raw) != nil {
		return a.list
	}
	var plugins []json.RawMessage
	for _, p := range a.list.Plugins {
		plugins = append(plugins, p.Bytes)
	}
	raw["plugins"], raw["loadOnlyInlinedPlugins"] = plugins, true
	b, err := json.Marshal(raw)
	if err != nil {
		return a.list
	}
	whole := *a.list
	whole.Bytes = b
	return &whole
}

// wrote tells whether a cached attachment holds the list, as this package or
// go-cni caches it.
func (a attachment) wrote(config []byte) bool {
	return bytes.Equal(config, a.list.Bytes) || a.dropIns && bytes.Equal(config, a.forCache().Bytes)
}

// cachedList parses the list of a cached attachment. go-cni's loopback list and
// lists made of a *.conf are cached as lists too.
func cachedList(c *libcni.NetworkAttachment) (*libcni.NetworkConfigList, error) {
	list, err := libcni.ConfListFromBytes(c.Config)
	if err != nil {
		return nil, fmt.Errorf("cannot be parsed: %w", err)
	}
	if len(list.Plugins) == 0 {
		return nil, errors.New("has no plugins")
	}
	return list, nil
}

// detachOne runs DEL for one list within the bound of DEL.
func (n *Network) detachOne(ctx context.Context, a attachment, ns *Namespace) error {
	ctx, cancel := withBound(ctx, "DEL")
	defer cancel()
	every := &everyPlugin{Exec: n.exec, left: len(a.list.Plugins)}
	every.pass = func(err error) bool {
		text := err.Error()
		switch {
		case strings.Contains(text, "not found"):
			return true
		case ns.path == "" && strings.Contains(text, "no such file or directory"):
			return closedForDel(ctx, a.list, "") == nil
		}
		return false
	}
	c := libcni.NewCNIConfigWithCacheDir(n.config.binDirs, n.config.cacheDir, every)
	err := c.DelNetworkList(ctx, a.list, ns.runtimeConf(a.ifName))
	if every.errs != nil {
		return oneLine(every.errs)
	}
	return err
}

// closedForDel tells which of the things that DEL of a list needs is missing; of
// the mode, if one is given.
func closedForDel(ctx context.Context, list *libcni.NetworkConfigList, mode GateMode) error {
	for _, g := range gatesOf(list) {
		if !g.del || mode != "" && g.mode != mode {
			continue
		}
		var unanswered chan error
		if err := g.check(ctx, &unanswered); err != nil {
			return fmt.Errorf("plugin %q needs %s, which %w", g.plugin, g.what(), err)
		}
	}
	return nil
}

// everyPlugin has libcni go on to the next plugin of a list when one fails. It
// returns an error to libcni for the last one only, so that the attachment stays
// in the cache for another try if any has failed. It serves one DEL.
type everyPlugin struct {
	invoke.Exec
	left int // plugins still to be run
	pass func(error) bool
	errs []error
}

var errPluginFailed = errors.New("a plugin failed")

// FindInPath returns an empty path for a plugin that cannot be found.
func (e *everyPlugin) FindInPath(plugin string, dirs []string) (string, error) {
	path, err := e.Exec.FindInPath(plugin, dirs)
	if err != nil {
		e.errs = append(e.errs, deleteFailed(plugin, err))
		return "", nil
	}
	return path, nil
}

// ExecPlugin runs the plugin and keeps its error.
func (e *everyPlugin) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	e.left--
	var out []byte
	if path != "" {
		var err error
		if out, err = e.Exec.ExecPlugin(ctx, path, stdin, environ); err != nil && !e.pass(err) {
			var conf struct {
				Type string `json:"type"`
			}
			_ = json.Unmarshal(stdin, &conf)
			e.errs = append(e.errs, deleteFailed(conf.Type, err))
		}
	}
	if e.left == 0 && e.errs != nil {
		return nil, errPluginFailed
	}
	return out, nil
}

// deleteFailed words the failure of one plugin as libcni does.
func deleteFailed(plugin string, err error) error {
	return fmt.Errorf("plugin type=%q failed (delete): %w", plugin, err)
}

// maxRemembered bounds what is remembered of pods that are not removed yet.
const maxRemembered = 1024

// recollection remembers something of pods, until they are removed: the latest
// maxRemembered. The zero value is ready for use.
type recollection[V any] struct {
	mu     sync.Mutex
	values map[string]V
	order  []string // oldest first
}

func (m *recollection[V]) put(id string, v V) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.values == nil {
		m.values = make(map[string]V)
	}
	if _, ok := m.values[id]; !ok {
		m.order = append(m.order, id)
	}
	m.values[id] = v
	if len(m.order) > maxRemembered {
		delete(m.values, m.order[0])
		m.order = m.order[1:]
	}
}

func (m *recollection[V]) get(id string) (V, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.values[id]
	return v, ok
}

func (m *recollection[V]) forget(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.values[id]; ok {
		delete(m.values, id)
		m.order = slices.DeleteFunc(m.order, func(o string) bool { return o == id })
	}
}
