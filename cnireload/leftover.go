// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"path/filepath"
	"time"

	"github.com/containerd/log"
)

// Sandbox is a pod sandbox that exists, or is being made or removed.
type Sandbox struct {
	ID string
	// Handler names the network that its pod is attached to, as in
	// [WithHandler].
	Handler string
}

// searchBound is how long left-over plugins are looked for. Reading what a process
// was started with can hang beside one that is stuck in the kernel.
const searchBound = 10 * time.Second

// findLeftOvers looks for plugins that an earlier containerd started and that
// have outlived it: nobody would ever end them, and they may hold a lock that
// all other plugins wait for. Their environment says what they do for whom. What
// a plugin has left on purpose, such as a DHCP client for its pod, is no plugin.
func (n *Network) findLeftOvers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, searchBound)
	defer cancel()
	search := make(chan []*foundPlugin, 1)
	go func() { search <- foundPlugins(n.config.binDirs) }()
	var found []*foundPlugin
	select {
	case found = <-search:
	case <-ctx.Done():
		log.G(ctx).Warnf("cni: plugins that an earlier containerd left are not known: looking for them takes longer than %s; find processes with CNI_COMMAND in their environment by hand", searchBound)
	}
	if len(found) == 0 {
		return
	}
	own := make(map[string]bool)
	for _, s := range n.sandboxes(ctx) {
		if s.Handler == n.config.handler {
			own[s.ID] = true
		}
	}
	for _, o := range n.owed.List() {
		own[o.ID] = true
	}
	var adopted []*process
	for _, f := range found {
		if !own[containerOf(f.environ)] && !(idless[f.verb()] && f.sameMounts()) {
			continue
		}
		p := f.process()
		log.G(ctx).WithField("plugin", p.Plugin).WithField("pid", p.PID).Warnf(
			"cni: %s for pod %q still runs, started by an earlier containerd; it is given its bound of %s", p.Verb, p.ID, boundOf(p.Verb))
		adopted = append(adopted, p)
	}
	n.running.adopt(adopted)
}

// idless are the verbs that are not about a pod.
var idless = map[string]bool{"VERSION": true, "STATUS": true, "GC": true}

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

func (f *foundPlugin) verb() string { return verbOf(f.environ) }

func (f *foundPlugin) process() *process {
	return &process{
		Process: Process{
			Plugin: filepath.Base(f.path),
			Verb:   f.verb(),
			ID:     containerOf(f.environ),
			PID:    f.pid,
			Since:  f.since,
			State:  ProcessLeftOver,
		},
		found: f,
		gone:  make(chan struct{}),
	}
}
