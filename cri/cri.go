// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cri is what containerd's CRI plugin calls: what would otherwise be
// lines of a patch. It knows nothing of containerd's own types.
package cri

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/cnireload"
	"github.com/cnireload/cnireload/status"
)

// Network says how the CRI plugin wants the network of a runtime handler,
// beside go-cni's options.
type Network struct {
	Handler string
	Default bool // whether handlers without a network use this one
	// Load is what is loaded, as in [cnireload.Network.Load].
	Load     []cnireload.Opt
	Settings Settings
	Template string // conf_template
	Root     string // the CRI plugin's directory for what outlives a restart
	// Sandboxes lists those that exist, see [cnireload.WithSandboxes]. It may list
	// one twice.
	Sandboxes func(context.Context) ([]cnireload.Sandbox, error)
}

// Option is n as one option of [cnireload.New].
func (n Network) Option() cnireload.Opt {
	opts := append([]cnireload.Opt{cnireload.WithHandler(n.Handler)}, n.Load...)
	opts = append(opts, n.Settings.options(n.Default)...)
	if n.Default {
		opts = append(opts, cnireload.WithTemplate(n.Template, filepath.Join(n.Root, "cni-conf-template.json")))
	}
	if n.Sandboxes != nil {
		opts = append(opts,
			cnireload.WithOwedRemovals(filepath.Join(n.Root, "cni-tombstones")),
			cnireload.WithSandboxes(n.Sandboxes))
	}
	return cnireload.Options(opts...)
}

// Prime loads the configuration of c, for two seconds at most, and goes on in
// the background.
func Prime(c cnireload.CNI) {
	if n, ok := c.(*cnireload.Network); ok {
		n.Prime()
	}
}

// Run has c follow the disk, and do what is owed, until Close.
func Run(c cnireload.CNI) {
	if n, ok := c.(*cnireload.Network); ok {
		n.Start()
		<-n.Done()
	}
}

// Close ends Run.
func Close(c cnireload.CNI) error {
	if n, ok := c.(*cnireload.Network); ok {
		return n.Close()
	}
	return nil
}

// Metrics returns the series of c at this moment.
func Metrics(c cnireload.CNI) []status.Metric {
	n, ok := c.(*cnireload.Network)
	if !ok {
		return nil
	}
	return status.Of(map[string]cnireload.CNI{n.Handler(): n}, n.Handler()).Metrics()
}

// Status returns the NetworkReady condition, and sets the entries of networks
// in info unless that is nil. Both come from one look, which waits for nothing,
// so that nothing in a response contradicts anything else in it.
func Status(networks map[string]cnireload.CNI, defaultName string, info map[string]string) (ready bool, reason, message string) {
	look := status.Of(networks, defaultName)
	if info != nil {
		entries, err := look.Info()
		if err != nil {
			log.L.WithError(err).Error("cni: cannot show the networks")
		}
		maps.Copy(info, entries)
	}
	c := look.Condition()
	return c.Ready, c.Reason, c.Message
}

// Render has c render its template, see [cnireload.Network.Render]. It does not
// do so, and returns false, if c is one that knows nothing of templates.
func Render(ctx context.Context, c cnireload.CNI, podCIDRs string) (bool, error) {
	n, ok := c.(*cnireload.Network)
	if !ok {
		return false, nil
	}
	if err := n.Render(ctx, podCIDRs); err != nil {
		return true, fmt.Errorf("failed to generate cni config: %w", err)
	}
	return true, nil
}

// Admit waits until a pod can be attached to c, see [cnireload.Network.Admit].
// Without a network it is for Setup to say so.
func Admit(ctx context.Context, c cnireload.CNI, pod string) error {
	switch n := c.(type) {
	case nil:
		return nil
	case *cnireload.Network:
		return n.Admit(ctx, pod)
	default:
		return n.Status()
	}
}
