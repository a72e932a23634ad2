// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/log"
)

// Sandbox is a pod sandbox that exists, or is being made or removed.
type Sandbox struct {
	ID string
	// Handler names the network that its pod is attached to, as in
	// [WithHandler].
	Handler string
}

// findLeftOvers looks for plugins that an earlier containerd started and that
// have outlived it: nobody would ever end them, and they may hold a lock that
// all other plugins wait for. Their environment says what they do for whom.
func (n *Network) findLeftOvers(ctx context.Context) {
	found := foundPlugins()
	if len(found) == 0 {
		return
	}
	own := make(map[string]bool)
	for _, s := range n.sandboxes(ctx) {
		if s.Handler == n.config.handler {
			own[s.ID] = true
		}
	}
	for _, t := range n.tombstones.list() {
		own[t.ID] = true
	}
	var adopted []*process
	for _, f := range found {
		id := containerOf(f.environ)
		if f.ours() || !own[id] && !(idless[f.verb()] && f.orphan() && n.fromBinDir(f.path)) {
			continue
		}
		p := f.process(ProcessLeftOver)
		log.G(ctx).WithField("plugin", p.Plugin).WithField("pid", p.PID).Warnf(
			"cni: %s for pod %q still runs, started by an earlier containerd; it is given its bound of %s", p.Verb, p.ID, boundOf(p.Verb))
		adopted = append(adopted, p)
	}
	n.running.adopt(adopted)
}

// idless are the verbs that are not about a pod.
var idless = map[string]bool{"VERSION": true, "STATUS": true, "GC": true}

func (n *Network) fromBinDir(path string) bool {
	return slices.Contains(n.config.binDirs, filepath.Dir(path))
}

// sandboxes returns the sandboxes that exist; none if nobody can tell.
func (n *Network) sandboxes(ctx context.Context) []Sandbox {
	if n.config.sandboxes == nil {
		return nil
	}
	list, err := n.config.sandboxes(ctx)
	if err != nil {
		log.G(ctx).WithError(err).Warn("cni: cannot list the pod sandboxes")
	}
	return list
}

// noteEscaped looks for processes that a plugin started in a group of its own,
// which the end of the plugin's group does not reach.
func (r *running) noteEscaped(ctx context.Context, path string, environ []string, group int) {
	id, verb := containerOf(environ), verbOf(environ)
	if r == nil || id == "" {
		return
	}
	var escaped []*process
	for _, f := range foundPlugins() {
		if f.verb() == verb && containerOf(f.environ) == id && f.group != group && !f.ours() {
			p := f.process(ProcessEscaped)
			log.G(ctx).WithField("plugin", path).Warnf("cni: %s for pod %s left a process behind, pid %d, %s", verb, id, p.PID, p.Plugin)
			escaped = append(escaped, p)
		}
	}
	r.adopt(escaped)
}

func (f *foundPlugin) verb() string { return verbOf(f.environ) }

func (f *foundPlugin) process(state ProcessState) *process {
	return &process{
		Process: Process{
			Plugin: filepath.Base(strings.TrimSuffix(f.path, " (deleted)")),
			Verb:   f.verb(),
			ID:     containerOf(f.environ),
			PID:    f.pid,
			Since:  f.since,
			State:  state,
		},
		found: f,
		gone:  make(chan struct{}),
	}
}
