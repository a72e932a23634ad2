// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
)

// attached returns the lists that the pod was attached with: those of a removal
// that is owed, of libcni's cache, of an ADD that has not succeeded, or, if there
// are none, those in use. neverAdded says that its ADD has failed, or that the
// caller was never told that it succeeded, so that nobody asks for its removal
// again.
func (n *Network) attached(ns *Namespace) (attachments []attachment, neverAdded bool, err error) {
	s := n.Snapshot()
	failed, neverAdded := n.failedADD(ns.id)
	if r := n.owed.Get(ns.id); r != nil {
		attachments, _ = attachmentsOf(r)
	}
	parsed := slices.Concat(s.attachments, failed, attachments)
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
		if i := slices.IndexFunc(parsed, func(a attachment) bool { return a.ifName == c.IfName && a.wrote(c.Config) }); i >= 0 {
			add(parsed[i])
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
	// A failed ADD is in no cache, but may have allocated something.
	for _, a := range failed {
		add(a)
	}
	if len(attachments) > 0 && !neverAdded {
		for _, a := range n.lostByCache(s, ns, attachments) {
			add(a)
		}
	}
	// In the order of the lists in use, which is the order of ADD.
	slices.SortStableFunc(attachments, func(a, b attachment) int { return cmp.Compare(s.position(a), s.position(b)) })
	switch {
	case len(attachments) > 0:
		return attachments, neverAdded, nil
	case errors.Is(s.LoadError, errLoading):
		return nil, false, &notReady{cause: s.LoadError}
	case s.LoadError != nil:
		// Not an error: it would keep the pod for ever (containerd#8774). CRI
		// also comes here a second time, after all has been removed.
		log.L.Warnf("cni: pod %s: no attachment is cached and no network is in use: nothing to remove", ns.id)
		return nil, false, nil
	}
	return s.attachments, false, nil
}

// lostByCache returns the lists in use for interfaces that libcni's cache has lost
// while it knows others: a crash leaves files empty. Stock, which does not look
// into the cache, would run them.
func (n *Network) lostByCache(s *Snapshot, ns *Namespace, attachments []attachment) (lost []attachment) {
	podThere := ns.path != "" && isNamespace(ns.path)
	removed := n.pods.get(ns.id).interfaces
	for _, a := range s.attachments {
		if slices.Contains(removed, a.ifName) || slices.ContainsFunc(attachments, func(b attachment) bool { return a.ifName == b.ifName }) {
			continue
		}
		// Where libcni keeps its cache is its own affair: if it is elsewhere some
		// day, no file is found here.
		_, err := os.Lstat(filepath.Join(n.cacheDir(), fmt.Sprintf("%s-%s-%s", a.list.Name, ns.id, a.ifName)))
		if podThere || err == nil {
			lost = append(lost, a)
		}
	}
	return lost
}

// cacheDir is where libcni keeps its cache entries.
func (n *Network) cacheDir() string {
	return filepath.Join(cmp.Or(n.config.cacheDir, libcni.CacheDir), "results")
}

// position is where the snapshot has a list for the same interface.
func (s *Snapshot) position(a attachment) int {
	if i := slices.IndexFunc(s.attachments, func(b attachment) bool { return a.ifName == b.ifName }); i >= 0 {
		return i
	}
	return len(s.attachments)
}

// forCache returns the list in the form that libcni is to cache, which includes
// the plugins that drop-ins have added to it.
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

// cachedList parses the list of a cached attachment. Others than go-cni cache a
// plain *.conf.
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
