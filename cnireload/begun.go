// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/log"
)

// begunDir holds, below the directory of what is owed, a record of each ADD that
// has begun and whose caller was not told that it has succeeded. It has the
// lists: should this process be killed, they may be others when the pod is
// removed. libcni's own cache, which has them once ADD has succeeded, is not
// used: its users take an entry for an attachment.
const begunDir = "begun"

// begin records that an ADD begins. It is not synced: that would cost what the
// pod waits for on a slow disk, and the page cache outlives the process.
func (n *Network) begin(ctx context.Context, ns *Namespace, attachments []attachment) {
	t := n.tombstones
	if t.dir == "" {
		return
	}
	g := n.grave(ns, attachments, errors.New("ADD has begun"), false)
	g.Handler = t.handler
	b, err := json.Marshal(g)
	if err == nil {
		path := t.begunPath(ns.id)
		if err = writeUnsynced(path, b); errors.Is(err, fs.ErrNotExist) {
			if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
				err = writeUnsynced(path, b)
			}
		}
	}
	if err != nil {
		log.G(ctx).WithError(err).Debugf("cni: the lists of pod %s are not recorded before ADD", ns.id)
	}
}

// writeUnsynced puts a file in place in one step.
func writeUnsynced(path string, b []byte) error {
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

func (t *tombstones) begunPath(id string) string {
	return filepath.Join(t.dir, begunDir, url.PathEscape(id)+".json")
}

// ended forgets the record of an ADD.
func (t *tombstones) ended(id string) {
	if t.dir != "" {
		_ = os.Remove(t.begunPath(id))
	}
}

// begun returns the lists of an ADD of the pod that did not succeed, or whose
// caller was not told so, and whether there was one.
func (n *Network) begun(id string) ([]attachment, bool) {
	if tried, ok := n.tried.get(id); ok || n.tombstones.dir == "" {
		return tried, ok
	}
	g, err := readGrave(n.tombstones.begunPath(id))
	if err != nil || g.ID != id {
		return nil, false
	}
	attachments, err := g.attachments()
	return attachments, err == nil
}

// oweBegun takes over ADDs that an earlier process has begun for pods that nobody
// knows any more, and whose DEL nobody will ask for.
func (n *Network) oweBegun(ctx context.Context) {
	if n.config.sandboxes == nil {
		return
	}
	var lost []*grave
	for _, g := range n.tombstones.stored(ctx, filepath.Join(n.tombstones.dir, begunDir)) {
		if g.Since.Before(n.made) && n.tombstones.owns(g.Handler) {
			lost = append(lost, g)
		}
	}
	if len(lost) == 0 {
		return
	}
	sandboxes, err := n.config.sandboxes(ctx)
	if err != nil {
		log.G(ctx).WithError(err).Warn("cni: cannot list the pod sandboxes")
		return
	}
	known := make(map[string]bool)
	for _, s := range sandboxes {
		known[s.ID] = true
	}
	for _, g := range lost {
		if known[g.ID] {
			continue
		}
		g.Cause, g.Since = "an earlier containerd was killed during ADD", time.Now()
		if err := n.tombstones.bury(*g); err != nil {
			log.G(ctx).WithError(err).Warnf("cni: no DEL will follow the ADD of pod %s, which an earlier containerd has begun", g.ID)
		}
		n.tombstones.ended(g.ID)
	}
}
