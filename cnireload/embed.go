// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import "context"

// Options makes several options one.
func Options(opts ...Opt) Opt {
	return func(c *config) error {
		for _, o := range opts {
			if err := o(c); err != nil {
				return err
			}
		}
		return nil
	}
}

// Prime does the first half of Start: it loads the configuration, follows the
// disk, and returns when the first load is done or after two seconds without it.
// Nothing is done yet for which pod sandboxes must be known.
func (n *Network) Prime() {
	ctx, cancel := context.WithTimeout(n.ctx, startBound)
	defer cancel()
	// What went wrong is in the snapshot.
	_ = n.request(ctx, request{watch: true})
}

// Done is closed by Close.
func (n *Network) Done() <-chan struct{} { return n.ctx.Done() }

// Handler returns the name given by WithHandler.
func (n *Network) Handler() string { return n.config.handler }
