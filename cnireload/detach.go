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
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/cnireload/cnireload/cnireload/plugin"
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
	n.tombstones.load(ctx)
	if n.tombstones.released(id) {
		return nil // its caller was told so before
	}
	if _, ok := n.removed.get(id); ok {
		return nil
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
		return nil // while this call waited for another one to end
	}
	n.awaitSearch()
	adding := n.plugins.Processes.Evict(ns.id)
	if _, err := os.Stat(ns.path); err == nil && !isNamespace(ns.path) {
		// The mount point that is left of one is a plain file, and plugins fail
		// on it for ever.
		ns = ns.without()
	}
	known, err := n.attached(ns)
	if err != nil {
		return err
	}
	failure, failing := n.failing.get(ns.id)
	overdue := failing && time.Since(failure.since) >= n.config.delGrace
	bound := plugin.Bound("DEL")
	switch {
	case known.neverAdded:
		bound = min(bound, cleanUpDEL)
	case !overdue:
		n.awaitAgent(ctx, known.attachments)
	}
	r := n.detachAll(ctx, known.attachments, ns, bound, false)
	err = r.err()
	switch {
	case err == nil && adding:
		// What it allocates from now on is not removed yet (cni#550).
		err := errors.New("an ADD that was given up may still go on")
		if berr := n.tombstones.bury(n.grave(ns, known.attachments, err, true)); berr != nil {
			log.G(ctx).WithError(berr).Warnf("cni: pod %s: %v, and no DEL will follow it", ns.id, err)
		}
		n.forget(ns.id)
		return nil
	case err == nil:
		n.finish(ctx, ns, known.attachments, r)
		return nil
	case known.neverAdded:
		// CRI does not come back for a pod that was never attached
		// (containerd#12130).
		if berr := n.tombstones.bury(n.grave(ns, r.unfinished(), err, false)); berr != nil {
			log.G(ctx).WithError(berr).Warnf("cni: pod %s: DEL after a failed ADD has failed and will not be tried again", ns.id)
			return err
		}
		n.tombstones.ended(ns.id)
		return fmt.Errorf("%w; it will be tried again", err)
	default:
		return n.letGo(ctx, ns, r)
	}
}

// finish notes that a pod is removed. What it still owes is left to a retry.
func (n *Network) finish(ctx context.Context, ns *Namespace, attachments []attachment, r removal) {
	if len(r.owed) > 0 {
		if err := n.tombstones.bury(n.grave(ns, r.owed, r.owedFor, true)); err != nil {
			log.G(ctx).WithError(err).Warnf("cni: pod %s is removed by the lists in use; DEL of the list of its ADD has failed and will not be tried again: %v", ns.id, r.owedFor)
		}
	} else {
		n.tombstones.clear(ns.id)
	}
	for _, a := range r.owed {
		n.uncache(ctx, a, ns)
	}
	n.forget(ns.id)
	if len(attachments) > 0 && len(r.owed) == 0 {
		n.removed.put(ns.id, struct{}{})
	}
}

// removal is what came of the DELs for one pod.
type removal struct {
	done []string     // interfaces of networks that it is removed from
	left []attachment // networks that it is not removed from
	errs []error      // why
	// away is what the DEL of one that is left needs and is not there, so that
	// it can be done later; nil if that would not help.
	away error
	// owed are lists of ADD that could not be run in whole while a list in use
	// could, as in stock.
	owed    []attachment
	owedFor error
}

func (r *removal) err() error {
	if len(r.errs) == 0 {
		return nil
	}
	return oneLine(r.errs)
}

// unfinished are the lists that are to be run again.
func (r *removal) unfinished() []attachment { return append(slices.Clone(r.left), r.owed...) }

// detachAll runs DEL for one list after the other, whatever the others brought,
// all of them within bound. again says that the pod is gone already.
func (n *Network) detachAll(ctx context.Context, attachments []attachment, ns *Namespace, bound time.Duration, again bool) removal {
	ctx, cancel := plugin.WithBoundOf(ctx, "DEL", bound)
	defer cancel()
	var r removal
	for i, a := range attachments {
		func() {
			ctx, cancel := share(ctx, len(attachments)-i)
			defer cancel()
			n.detachFrom(ctx, a, ns, again, &r)
		}()
	}
	return r
}

// detachFrom removes a pod from one network. The list of its ADD is run. Where
// that fails, or needs what is not there, the list in use for the network, which
// is all that stock would run, takes its place: a pod that stock removes must
// go. What the list in use does not do is owed then.
func (n *Network) detachFrom(ctx context.Context, a attachment, ns *Namespace, again bool, r *removal) {
	look, looking := n.newLook(nil), context.WithoutCancel(ctx) // each look has its bound
	o := look.outlook(looking, a, "", again)
	done := func() {
		r.done = append(r.done, a.ifName)
		n.uncache(ctx, a, ns)
	}
	failed, err := a.indexes(o.skip), o.away
	run := func(plugins []int, of int) {
		ctx, cancel := share(ctx, of)
		defer cancel()
		failed, err = n.del(ctx, a, a.allBut(plugins), ns)
	}
	own := o.away == nil || o.instead == nil // it is run first
	if own {
		of := 1
		if o.instead != nil {
			of = 2
		}
		if run(failed, of); err == nil && !o.headless {
			if lost := look.unheard(looking, a.only(a.indexes(o.skip)).list); lost != nil {
				// The pod goes, as in stock, and the agent is told when it is back.
				r.done = append(r.done, a.ifName)
				r.owed, r.owedFor = append(r.owed, a), lost
				return
			}
			done()
			return
		}
		if again && err != nil && !refused(err) {
			o.instead = nil // it can be run, and is tried again
		}
	}
	if o.instead != nil {
		_, ierr := n.del(ctx, *o.instead, nil, ns)
		switch {
		case ierr == nil:
			failed = unsettled(*o.instead, a, failed)
			if !own && len(failed) > 0 {
				failed = look.runnable(looking, a, failed, func(plugins []int) []int {
					run(plugins, 1)
					return failed
				})
			}
			if len(failed) == 0 {
				done()
				return
			}
			r.done = append(r.done, a.ifName)
			r.owed, r.owedFor = append(r.owed, a.only(failed)), because(err, o.away)
			return
		case !own:
			if run(failed, 1); err == nil && !o.headless {
				done()
				return
			}
		}
		if err == nil {
			a, err = *o.instead, ierr // nothing else is left of the list of ADD
		} else {
			err = oneLine([]error{err, ierr})
		}
	}
	if err == nil {
		a, err = *o.other, o.otherAway // the same, but that is not there
	}
	r.left = append(r.left, a)
	r.errs = append(r.errs, err)
	if r.away == nil {
		r.away = look.blame(o, a, err)
	}
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
	n.tombstones.ended(id)
}

// failure is how the removal of a pod stands that has failed.
type failure struct {
	since time.Time
	done  []string // interfaces that it is removed from
}

// letGo lets a pod go whose removal has failed for del_grace because what it
// needs is away. It is an error as long as the pod has to stay.
func (n *Network) letGo(ctx context.Context, ns *Namespace, r removal) error {
	f, failing := n.failing.get(ns.id)
	if !failing {
		f.since = time.Now()
	}
	f.done = append(slices.Clone(f.done), r.done...)
	n.failing.put(ns.id, f)
	cause := r.err()
	if r.away == nil {
		return cause
	}
	cause = because(cause, r.away)
	if time.Since(f.since) < n.config.delGrace {
		return cause
	}
	if err := n.tombstones.bury(n.grave(ns, r.unfinished(), r.away, true)); err != nil {
		return fmt.Errorf("%w (the pod cannot be let go: %w)", cause, err)
	}
	n.forget(ns.id)
	log.G(ctx).Warnf("cni: pod %s is let go after %s; its removal is owed: %v", ns.id, n.config.delGrace, r.away)
	return nil
}

// because adds the reason, if there is one, to an error that does not name it.
func because(err, reason error) error {
	switch {
	case err == nil:
		return reason
	case reason == nil, strings.Contains(err.Error(), reason.Error()):
		return err
	}
	return fmt.Errorf("%w (%w)", err, reason)
}

// awaitAgent waits, for as long as a DEL may take, until what the plugins of the
// lists need for DEL is there, or a list in use can take their place. Plugins
// whose needs are compiled in are not waited for: DEL tells better.
func (n *Network) awaitAgent(ctx context.Context, attachments []attachment) {
	ctx, cancel := context.WithTimeout(ctx, min(n.pace.agent, plugin.Bound("DEL")))
	defer cancel()
	var pause *time.Ticker
	for n.newLook(nil).closed(ctx, attachments, false) != nil {
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

// knowledge is what is known of a pod that is to be removed.
type knowledge struct {
	attachments []attachment
	// neverAdded says that its ADD has failed, or that CRI was never told that
	// it succeeded, so that nobody comes back for it.
	neverAdded bool
}

// attached returns the lists that the namespace was attached with, as far as
// anybody knows: those of a removal that is owed, of the attachment cache, of an
// ADD that did not succeed, and last those in use.
func (n *Network) attached(ns *Namespace) (knowledge, error) {
	s := n.Snapshot()
	begun, neverAdded := n.begun(ns.id)
	attachments := n.tombstones.restore(ns.id, n.cacheDir())
	known := slices.Concat(s.attachments, begun, attachments)
	cached, err := n.cni.GetCachedAttachments(ns.id)
	if err != nil {
		// Stock removes pods without it.
		log.L.WithError(err).Warnf("cni: cannot read the attachment cache; pod %s is removed from the lists in use", ns.id)
	}
	add := func(a attachment) {
		if !slices.ContainsFunc(attachments, func(b attachment) bool {
			return a.ifName == b.ifName && cmp.Or(a.cachedAs, a.list.Name) == cmp.Or(b.cachedAs, b.list.Name)
		}) {
			attachments = append(attachments, a)
		}
	}
	for _, c := range cached {
		if i := slices.IndexFunc(known, func(a attachment) bool { return a.ifName == c.IfName && a.wrote(c.Config) }); i >= 0 {
			add(known[i])
			continue
		}
		list, err := cachedList(c)
		if err == nil {
			add(attachment{list: list, ifName: c.IfName})
			continue
		}
		i := slices.IndexFunc(s.attachments, func(a attachment) bool { return a.ifName == c.IfName })
		if i < 0 {
			log.L.WithError(err).Warnf("cni: the cached attachment of pod %s to network %q, interface %s, cannot be used, and no list is in use for it", ns.id, c.Network, c.IfName)
			continue
		}
		a := s.attachments[i]
		a.cachedAs = c.Network
		add(a)
	}
	// An attachment that failed is in no cache, but has perhaps allocated.
	for _, a := range begun {
		add(a)
	}
	if len(attachments) > 0 && !neverAdded {
		n.addLost(s, ns, add, attachments)
	}
	// In the order of the lists in use, which is the order of ADD.
	slices.SortStableFunc(attachments, func(a, b attachment) int { return cmp.Compare(s.position(a), s.position(b)) })
	if len(attachments) > 0 {
		return knowledge{attachments, neverAdded}, nil
	}
	switch {
	case errors.Is(s.LoadError, errLoading):
		return knowledge{}, &notReady{cause: s.LoadError}
	case s.LoadError != nil:
		// Not an error: it would keep the pod for ever (containerd#8774). CRI
		// also comes here a second time, after all has been removed.
		log.L.Warnf("cni: pod %s: no attachment is cached and no network is in use: nothing to remove", ns.id)
		return knowledge{}, nil
	}
	return knowledge{attachments: s.attachments}, nil
}

// addLost adds the lists in use for interfaces that the cache has lost while it
// knows others: a crash leaves files empty. Stock, which does not look there,
// would run them.
func (n *Network) addLost(s *Snapshot, ns *Namespace, add func(attachment), attachments []attachment) {
	there := ns.path != "" && isNamespace(ns.path)
	f, _ := n.failing.get(ns.id)
	for _, a := range s.attachments {
		if slices.Contains(f.done, a.ifName) || slices.ContainsFunc(attachments, func(b attachment) bool { return a.ifName == b.ifName }) {
			continue
		}
		_, err := os.Lstat(filepath.Join(n.cacheDir(), a.cacheFile(ns.id)))
		if there || err == nil {
			add(a)
		}
	}
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

// only returns the list with the plugins of these indexes alone.
func (a attachment) only(plugins []int) attachment {
	if len(plugins) == len(a.list.Plugins) {
		return a
	}
	part := *a.list
	part.Plugins = nil
	for _, i := range slices.Sorted(slices.Values(plugins)) {
		part.Plugins = append(part.Plugins, a.list.Plugins[i])
	}
	a.list, a.dropIns = &part, true // its bytes are not those of the list
	return a
}

// allBut says which plugins to skip so that these are run.
func (a attachment) allBut(plugins []int) []bool {
	skip := make([]bool, len(a.list.Plugins))
	for i := range skip {
		skip[i] = !slices.Contains(plugins, i)
	}
	return skip
}

// indexes are those of the plugins that are not skipped.
func (a attachment) indexes(skip []bool) []int {
	var indexes []int
	for i := range a.list.Plugins {
		if skip == nil || !skip[i] {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// cacheFile is the name of libcni's cache entry. Where and in which form libcni
// keeps it is its own affair: a file that is not there is nothing that fails.
func (a attachment) cacheFile(id string) string {
	return fmt.Sprintf("%s-%s-%s", cmp.Or(a.cachedAs, a.list.Name), id, a.ifName)
}

// uncache has libcni forget an attachment that another list was run for.
func (n *Network) uncache(ctx context.Context, a attachment, ns *Namespace) {
	// A list without plugins has nothing else done.
	none := &libcni.NetworkConfigList{Name: cmp.Or(a.cachedAs, a.list.Name), CNIVersion: "0.3.1"}
	_ = n.cni.DelNetworkList(ctx, none, ns.runtimeConf(a.ifName))
}

// cachedList parses the list of a cached attachment. go-cni's loopback list and
// lists made of a *.conf are cached as lists too; others cache a plain *.conf.
func cachedList(c *libcni.NetworkAttachment) (*libcni.NetworkConfigList, error) {
	list, err := libcni.ConfListFromBytes(c.Config)
	if err == nil && len(list.Plugins) == 0 {
		err = errors.New("it has no plugins")
	}
	if err == nil {
		return list, nil
	}
	conf, cerr := libcni.NetworkPluginConfFromBytes(c.Config)
	if cerr != nil || conf.Network.Name == "" {
		return nil, fmt.Errorf("cannot be used: %w", err)
	}
	//lint:ignore SA1019 as where files are parsed
	return libcni.ConfListFromConf(conf)
}

// detachOne runs DEL for one list within the bound of DEL.
func (n *Network) detachOne(ctx context.Context, a attachment, ns *Namespace) error {
	ctx, cancel := plugin.WithBound(ctx, "DEL")
	defer cancel()
	_, err := n.del(ctx, a, n.newLook(nil).outlook(ctx, a, "", true).skip, ns)
	if err == nil {
		n.uncache(ctx, a, ns)
	}
	return err
}

// del runs DEL of each plugin of a list that is not skipped, last to first, and
// returns which of them have failed. The attachment stays in libcni's cache.
func (n *Network) del(ctx context.Context, a attachment, skip []bool, ns *Namespace) (failed []int, err error) {
	every := &everyPlugin{Exec: n.exec, left: len(a.list.Plugins), skip: skip}
	every.pass = func(err error) bool {
		text := err.Error()
		switch {
		case strings.Contains(text, "not found"):
			return true
		case ns.path == "" && strings.Contains(text, "no such file or directory"):
			return n.newLook(nil).gate(ctx, a.list, "") == nil
		}
		return false
	}
	c := libcni.NewCNIConfigWithCacheDir(n.config.binDirs, n.config.cacheDir, every)
	err = c.DelNetworkList(ctx, a.list, ns.runtimeConf(a.ifName))
	if every.left > 0 {
		return a.indexes(skip), err // libcni did not come to run them
	}
	if every.errs != nil {
		return every.failed, oneLine(every.errs)
	}
	return nil, nil
}

// shareOfOthers is what each of those that come later keeps of a bound, at
// least, if that is not more than an equal part: one that hangs must not keep
// the others from being run, and one that is slow should not be ended for it.
const shareOfOthers = 10 * time.Second

// share derives a context for the first of several that have to get by with the
// deadline of ctx.
func share(ctx context.Context, several int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok || several <= 1 {
		return context.WithCancel(ctx)
	}
	left := time.Until(deadline)
	d := max(left/time.Duration(several), left-shareOfOthers*time.Duration(several-1))
	return context.WithTimeoutCause(ctx, d, &shareError{after: d.Round(time.Millisecond)})
}

// shareError is why a plugin was ended before the bound of DEL had passed. It is
// a deadline error to errors.Is.
type shareError struct{ after time.Duration }

func (e *shareError) Error() string {
	return fmt.Sprintf("DEL did not finish within %s, its share of the bound (%s)", e.after, TimeoutDel)
}
func (e *shareError) Is(target error) bool { return target == context.DeadlineExceeded }

// everyPlugin has libcni go on to the next plugin of a list when one fails, each
// with its share of the deadline. It returns an error to libcni for the last one
// always, so that the attachment stays in the cache: whether it may go is not
// libcni's to say. It serves one DEL.
type everyPlugin struct {
	invoke.Exec
	left   int    // plugins still to be run
	skip   []bool // plugins that are not to be run; nil: none
	pass   func(error) bool
	failed []int
	errs   []error
}

var errKeepEntry = errors.New("the attachment stays in the cache")

// FindInPath returns an empty path for a plugin that is not to be run or cannot
// be found.
func (e *everyPlugin) FindInPath(plugin string, dirs []string) (string, error) {
	if e.skip != nil && e.skip[e.left-1] {
		return "", nil
	}
	path, err := e.Exec.FindInPath(plugin, dirs)
	if err != nil {
		e.fail(e.left-1, plugin, err)
		return "", nil
	}
	return path, nil
}

// ExecPlugin runs the plugin and keeps its error.
func (e *everyPlugin) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var out []byte
	if path != "" {
		ctx, cancel := share(ctx, e.left)
		defer cancel()
		var err error
		if out, err = e.Exec.ExecPlugin(ctx, path, stdin, environ); err != nil && !e.pass(err) {
			var conf struct {
				Type string `json:"type"`
			}
			_ = json.Unmarshal(stdin, &conf)
			e.fail(e.left-1, conf.Type, err)
		}
	}
	e.left--
	if e.left == 0 {
		return nil, errKeepEntry
	}
	return out, nil
}

// fail notes the failure of one plugin, worded as libcni does.
func (e *everyPlugin) fail(index int, plugin string, err error) {
	e.failed = append(e.failed, index)
	e.errs = append(e.errs, fmt.Errorf("plugin type=%q failed (delete): %w", plugin, err))
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
