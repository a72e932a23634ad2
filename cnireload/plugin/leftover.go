// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"path/filepath"
	"time"

	"github.com/containerd/log"
)

// searchBound is how long left-over plugins are looked for. Reading the
// command line of a process that is stuck in the kernel can hang.
const searchBound = 10 * time.Second

// FindLeftOvers looks in dirs for plugins that an earlier program started and that
// have outlived it, and gives those that work for one of the pods their bound to
// end in. Nobody else would ever end them, and they may hold a lock that all other
// plugins wait for. Their environment says what they do for whom. What a plugin
// has left on purpose, such as a DHCP client for its pod, is no plugin.
//
// pods returns the ids, as in CNI_CONTAINERID, of the pods that are the caller's.
// It is called if anything is found.
func (r *Processes) FindLeftOvers(ctx context.Context, dirs []string, pods func(context.Context) map[string]bool) {
	ctx, cancel := context.WithTimeout(ctx, searchBound)
	defer cancel()
	search := make(chan []*foundPlugin, 1)
	go func() { search <- foundPlugins(dirs) }()
	var found []*foundPlugin
	select {
	case found = <-search:
	case <-ctx.Done():
		log.G(ctx).Warnf("cni: plugins that an earlier containerd left are not known: looking for them takes longer than %s; find processes with CNI_COMMAND in their environment by hand", searchBound)
	}
	if len(found) == 0 {
		return
	}
	own := pods(ctx)
	var adopted []*Tracked
	for _, f := range found {
		if !own[containerOf(f.environ)] && !(idless[f.verb()] && f.sameMounts()) {
			continue
		}
		p := f.process()
		log.G(ctx).WithField("plugin", p.Plugin).WithField("pid", p.PID).Warnf(
			"cni: %s for pod %q still runs, started by an earlier containerd; it is given its bound of %s", p.Verb, p.ID, Bound(p.Verb))
		adopted = append(adopted, p)
	}
	r.adopt(adopted)
}

// idless are the verbs that are not about a pod.
var idless = map[string]bool{"VERSION": true, "STATUS": true, "GC": true}

func (f *foundPlugin) verb() string { return verbOf(f.environ) }

func (f *foundPlugin) process() *Tracked {
	return &Tracked{
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
