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
// A second call for the same id while one runs joins it. The work goes on to
// its own bound when a caller gives up.
func (n *Network) Remove(ctx context.Context, id string, path string, opts ...NamespaceOpts) error {
	ctx, span := startSpan(ctx, "cni.Remove", id, path)
	defer span.End()
	ns, err := newNamespace(id, path, opts)
	if err != nil {
		return err
	}
	f := n.removals.join(id, func() error { return n.detach(context.WithoutCancel(ctx), ns) })
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
	attachments, err := n.attached(ns.id)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range attachments {
		if err := n.detachOne(ctx, a, ns); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return oneLine(errs)
	}
	n.tried.forget(ns.id)
	return nil
}

// attached returns the lists that the namespace id was attached with, as far as
// anybody knows.
func (n *Network) attached(id string) ([]attachment, error) {
	s := n.Snapshot()
	known := append(slices.Clone(s.attachments), n.tried.get(id)...)
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
	for _, a := range n.tried.get(id) {
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
			return !closedForDel(ctx, a.list)
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

// closedForDel tells whether something that a plugin's DEL needs is missing.
func closedForDel(ctx context.Context, list *libcni.NetworkConfigList) bool {
	return slices.ContainsFunc(gatesOf(list), func(g gate) bool {
		var unanswered chan error
		return g.del && g.check(ctx, &unanswered) != nil
	})
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

// maxTried bounds the failed attachments that are remembered.
const maxTried = 1024

// tries remembers the lists of attachments that failed, until they are removed.
type tries struct {
	mu    sync.Mutex
	lists map[string][]attachment
	order []string // oldest first
}

func (t *tries) remember(id string, attachments []attachment) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lists == nil {
		t.lists = make(map[string][]attachment)
	}
	if _, ok := t.lists[id]; !ok {
		t.order = append(t.order, id)
	}
	t.lists[id] = attachments
	if len(t.order) > maxTried {
		delete(t.lists, t.order[0])
		t.order = t.order[1:]
	}
}

func (t *tries) get(id string) []attachment {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.lists[id]
}

func (t *tries) forget(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.lists[id]; ok {
		delete(t.lists, id)
		t.order = slices.DeleteFunc(t.order, func(o string) bool { return o == id })
	}
}
