// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/gc"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

// gcGuard is one for all networks: they may share plugins and what these keep.
// Killing a plugin takes no longer than its bound.
var gcGuard = gc.Guard{EndBound: plugin.KillGrace + 500*time.Millisecond}

// Sweep is how the last GC of a network went.
type Sweep = gc.Result

// LastSweep returns how the last GC went; nil before the first.
func (n *Network) LastSweep() *Sweep { return n.gc.Last() }

// keep does what has to be done for pods that are gone: it looks for plugins and
// ADDs that an earlier process has left, tries the removals that are owed, and
// runs GC. It ends when the network is closed.
func (n *Network) keep() {
	defer close(n.kept)
	defer n.owed.Wait()
	ctx := n.ctx
	n.owed.Load(ctx, startBound)
	if n.config.sandboxes != nil {
		n.findLeftOvers(ctx)
		n.oweLostADDs(ctx)
	}
	close(n.searched)
	var group sync.WaitGroup
	defer group.Wait()
	if n.config.collect && n.config.sandboxes != nil {
		n.gc.Poll, n.gc.Again = n.pace.owed, n.pace.gc
		group.Go(func() { n.gc.Run(ctx) })
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.owed.Wake():
		case <-timer.C:
		}
		if n.retryOwed(ctx) {
			timer.Reset(n.pace.owed)
		}
	}
}

// existingPods returns the ids of the pods that exist.
func (n *Network) existingPods(ctx context.Context) (map[string]bool, error) {
	sandboxes, err := n.config.sandboxes(ctx)
	pods := make(map[string]bool, len(sandboxes))
	for _, s := range sandboxes {
		pods[s.ID] = true
	}
	return pods, err
}

// newCollector returns what runs GC for the network.
func (n *Network) newCollector() *gc.Collector {
	return &gc.Collector{
		Guard: &gcGuard,
		Log:   func() *log.Entry { return n.logger(n.ctx) },
		Networks: func() (networks []gc.Network, ready bool) {
			s := n.Snapshot()
			for _, a := range s.attachments {
				// The loopback list has an earlier version.
				if hasNewVerbs(a.list.CNIVersion) && !a.list.DisableGC {
					networks = append(networks, gc.Network{List: a.list, Interface: a.ifName})
				}
			}
			return networks, s.Ready()
		},
		Pods: func(ctx context.Context) (map[string]bool, error) {
			ctx, cancel := plugin.WithBound(ctx, "GC")
			defer cancel()
			return n.existingPods(ctx)
		},
		Cached: func() ([]*libcni.NetworkAttachment, error) { return n.cni.GetCachedAttachments("") },
		Needed: func(c *libcni.NetworkAttachment) bool {
			return n.owed.Get(c.ContainerID) != nil || isNamespace(c.NetNS)
		},
		Remove: func(ctx context.Context, c *libcni.NetworkAttachment, inUse gc.Network) error {
			list, err := cachedList(c)
			if err != nil {
				list = inUse.List
			}
			ns := &Namespace{id: c.ContainerID, capabilityArgs: c.CapabilityArgs, args: make(map[string]string)}
			for _, pair := range c.CniArgs {
				ns.args[pair[0]] = pair[1]
			}
			return n.delWithinBound(ctx, attachment{list: list, ifName: c.IfName}, ns)
		},
		GC: func(ctx context.Context, network gc.Network, valid []types.GCAttachment) error {
			// If libcni found its cache, it would run the DELs that have failed once
			// more.
			uncached := libcni.NewCNIConfigWithCacheDir(n.config.binDirs, filepath.Join(n.cacheDir(), "no attachments"), n.exec)
			err := uncached.GCNetworkList(ctx, network.List, &libcni.GCArgs{ValidAttachments: valid})
			if err != nil && gcUnsupported(err) {
				return nil
			}
			return err
		},
	}
}

// gcUnsupported tells whether all that plugins had to say is that they do not know
// the verb.
func gcUnsupported(err error) bool {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(many.Unwrap(), func(err error) bool { return !gcUnsupported(err) })
	}
	return plugin.VerbUnsupported(err, "GC")
}
