// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"

	"github.com/containerd/log"
)

// Sandbox is a pod sandbox that exists, or is being made or removed.
type Sandbox struct {
	ID string
	// Handler names the network that its pod is attached to, as in
	// [WithHandler].
	Handler string
}

// findLeftOvers looks for plugins that an earlier containerd left running for pods
// of this network.
func (n *Network) findLeftOvers(ctx context.Context) {
	n.plugins.Processes.FindLeftOvers(ctx, n.config.binDirs, func(ctx context.Context) map[string]bool {
		own := make(map[string]bool)
		sandboxes, err := n.config.sandboxes(ctx)
		if err != nil {
			log.G(ctx).WithError(err).Warn("cni: cannot list the pod sandboxes")
		}
		for _, s := range sandboxes {
			if s.Handler == n.config.handler {
				own[s.ID] = true
			}
		}
		for _, o := range n.owed.List() {
			own[o.ID] = true
		}
		return own
	})
}
