// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gc frees what pods have left that are gone: it removes attachments in
// libcni's cache that belong to no pod, and tells plugins which attachments exist
// (GC, CNI spec 1.1), so that they free the rest.
//
// It promises that no GC runs beside an ADD or DEL that uses the same [Guard], and
// that GC holds up a pod for no longer than a few seconds. An attachment is never
// removed unless the list of the pods that exist could be read.
//
// A Guard and [Collector.Last] can be used concurrently. Run is for one goroutine.
//
// The package runs no plugin and reads no file. The functions of a Collector do.
package gc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/internal/oneline"
)

const (
	// every is how often GC runs. It frees what a crash leaked, which is rare.
	every = 6 * time.Hour
	// maxAgain is the longest pause after a GC that did not finish.
	maxAgain = 30 * time.Minute
	// patientAfter is after how many GCs in a row that gave way a pod waits for
	// patience first. Where pods come and go all the time no GC would ever finish
	// otherwise.
	patientAfter = 4
	patience     = 3 * time.Second
	// StaleBound is how long the DELs of one network's stale attachments take at
	// most. GC has its own bound.
	StaleBound = 2 * time.Minute
)

// Result is how a GC went.
type Result struct {
	At time.Time `json:"at"`
	// Stale counts the attachments that were found to belong to no pod.
	Stale int `json:"stale"`
	// Err is what did not work; nil if all did.
	Err error `json:"-"`
}

// Network is a list in use that GC runs for.
type Network struct {
	List      *libcni.NetworkConfigList
	Interface string
}

// Collector runs GC for the networks of one conf dir. All fields have to be set
// before Run.
type Collector struct {
	Guard *Guard
	Log   func() *log.Entry
	// Networks returns the lists in use that know GC, and whether they can be used.
	// GC waits until they can.
	Networks func() (networks []Network, ready bool)
	// Pods returns the ids of all pods that exist.
	Pods func(context.Context) (map[string]bool, error)
	// Cached returns the attachments in libcni's cache.
	Cached func() ([]*libcni.NetworkAttachment, error)
	// Needed tells whether the attachment of a pod that does not exist has to
	// stay all the same.
	Needed func(*libcni.NetworkAttachment) bool
	// Remove runs DEL for an attachment, with its own list or, if that cannot be
	// used, with the one in use.
	Remove func(context.Context, *libcni.NetworkAttachment, Network) error
	// GC has the plugins of a list run GC. Plugins that do not know it are no
	// error.
	GC func(context.Context, Network, []types.GCAttachment) error
	// Poll is how often to see whether GC can run, Again the first pause after a
	// GC that did not finish. Each further pause is twice the one before.
	Poll, Again time.Duration

	last atomic.Pointer[Result]
}

// Last returns how the last GC went; nil before the first.
func (c *Collector) Last() *Result { return c.last.Load() }

// Run runs GC from time to time until ctx ends.
func (c *Collector) Run(ctx context.Context) {
	var unfinished, gaveWay int // since the last GC that finished
	failing := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		var wait time.Duration
		if gaveWay >= patientAfter {
			wait = patience
		}
		networks, ready := c.Networks()
		if !ready || !c.Guard.Alone(ctx, wait, func(ctx context.Context) { c.collect(ctx, networks) }) {
			timer.Reset(c.Poll)
			continue
		}
		err := c.Last().Err
		if err == nil {
			if failing {
				c.Log().Info("cni: GC has finished again")
			}
			unfinished, gaveWay, failing = 0, 0, false
			timer.Reset(every)
			continue
		}
		again := min(c.Again<<min(unfinished, 5), maxAgain)
		timer.Reset(again)
		unfinished++
		switch {
		case errors.Is(err, ErrGaveWay):
			gaveWay++
		case !failing && ctx.Err() == nil:
			failing = true
			c.Log().Warnf("cni: GC has failed, and is tried again, at first after %s: %v", again, err)
		}
	}
}

// collect runs GC once for each network.
func (c *Collector) collect(ctx context.Context, networks []Network) {
	result := &Result{}
	var errs []error
	for _, n := range networks {
		stale, err := c.collectOne(ctx, n)
		result.Stale += stale
		if err != nil {
			errs = append(errs, fmt.Errorf("GC of network %q: %w", n.List.Name, err))
		}
	}
	if err := context.Cause(ctx); err != nil {
		errs = []error{err}
	}
	result.At, result.Err = time.Now(), oneline.Join(errs)
	c.last.Store(result)
}

// collectOne runs GC for one network, after DEL of its stale attachments, which
// it counts.
func (c *Collector) collectOne(ctx context.Context, n Network) (int, error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return 0, fmt.Errorf("cannot list the pod sandboxes: %w", err)
	}
	cached, err := c.Cached()
	if err != nil {
		return 0, fmt.Errorf("cannot read the attachment cache: %w", err)
	}
	valid, stale := c.divide(n, pods, cached)
	errs := c.remove(ctx, n, stale)
	if context.Cause(ctx) == nil {
		if err := c.GC(ctx, n, valid); err != nil {
			errs = append(errs, err)
		}
	}
	return len(stale), oneline.Join(errs)
}

// divide returns which attachments plugins have to keep, and which cached ones
// are stale.
func (c *Collector) divide(n Network, pods map[string]bool, cached []*libcni.NetworkAttachment) (valid []types.GCAttachment, stale []*libcni.NetworkAttachment) {
	valid = []types.GCAttachment{} // not null in JSON
	known := make(map[string]bool)
	for _, a := range cached {
		if a.Network != n.List.Name {
			continue
		}
		known[a.ContainerID] = true
		if pods[a.ContainerID] || !ofPod(a) || c.Needed(a) {
			valid = append(valid, types.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName})
		} else {
			stale = append(stale, a)
		}
	}
	for id := range pods {
		if !known[id] {
			valid = append(valid, types.GCAttachment{ContainerID: id, IfName: n.Interface})
		}
	}
	slices.SortFunc(valid, func(a, b types.GCAttachment) int {
		return strings.Compare(a.ContainerID+"\x00"+a.IfName, b.ContainerID+"\x00"+b.IfName)
	})
	return valid, stale
}

// ofPod tells whether an attachment was made for a pod. Others that use libcni's
// cache, and perhaps the same list, look after their own.
func ofPod(a *libcni.NetworkAttachment) bool {
	return slices.Contains(a.CniArgs, [2]string{"K8S_POD_INFRA_CONTAINER_ID", a.ContainerID})
}

// remove runs DEL for stale attachments. Their order is random, so that the ones
// behind one that hangs have their turn another time.
func (c *Collector) remove(ctx context.Context, n Network, stale []*libcni.NetworkAttachment) (errs []error) {
	ctx, cancel := context.WithTimeoutCause(ctx, StaleBound, fmt.Errorf("the DELs of stale attachments did not finish within %s", StaleBound))
	defer cancel()
	rand.Shuffle(len(stale), func(i, j int) { stale[i], stale[j] = stale[j], stale[i] })
	for i, a := range stale {
		if ctx.Err() != nil {
			return append(errs, fmt.Errorf("%d stale attachments are left: %w", len(stale)-i, context.Cause(ctx)))
		}
		args := make(map[string]string)
		for _, pair := range a.CniArgs {
			args[pair[0]] = pair[1]
		}
		pod := fmt.Sprintf("%s/%s (sandbox %s)", args["K8S_POD_NAMESPACE"], args["K8S_POD_NAME"], a.ContainerID)
		if err := c.Remove(ctx, a, n); err != nil {
			errs = append(errs, fmt.Errorf("stale attachment of pod %s: %w", pod, err))
			continue
		}
		c.Log().Infof("cni: pod %s is gone, but was attached to network %q by interface %s: removed", pod, a.Network, a.IfName)
	}
	return errs
}
