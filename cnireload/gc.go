// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

// sweepEvery is how often plugins are told which attachments exist. What GC
// frees was leaked by a crash, which is rare.
const sweepEvery = 6 * time.Hour

// Sweep is how the last GC of a network went.
type Sweep struct {
	At time.Time
	// Stale counts the attachments that were found to belong to no pod.
	Stale int
	// Err is what did not work; nil if all did.
	Err error
}

// LastSweep returns how the last GC went; nil before the first.
func (n *Network) LastSweep() *Sweep { return n.swept.Load() }

// turnstile keeps GC apart from ADD and DEL, which may run beside each other
// but not beside GC (CNI spec 1.1, section 2, "Lifecycle & Ordering"). GC gives
// way: it is not begun while one of the others runs, and ended when one comes.
// The lock is not held while anything runs.
type turnstile struct {
	mu     sync.Mutex
	inside int
	gc     *sweeping // nil while none runs
}

type sweeping struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// exclusive is one for all networks: they may share plugins and what these keep.
var exclusive turnstile

// errGaveWay is why a GC was ended.
var errGaveWay = errors.New("GC gave way to a pod")

// giveWayBound is how long a pod waits for a GC that was told to end. Killing a
// plugin takes no longer.
const giveWayBound = pipeGrace + abandonGrace + 500*time.Millisecond

// enter lets an ADD or DEL begin. It ends with leave.
func (t *turnstile) enter() {
	t.mu.Lock()
	t.inside++
	gc := t.gc
	t.mu.Unlock()
	if gc == nil {
		return
	}
	gc.cancel(errGaveWay)
	bound := time.NewTimer(giveWayBound)
	defer bound.Stop()
	select {
	case <-gc.done:
	case <-bound.C:
	}
}

func (t *turnstile) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inside--
}

// alone runs sweep unless an ADD, a DEL or another sweep runs, and tells whether
// it did.
func (t *turnstile) alone(ctx context.Context, sweep func(context.Context)) bool {
	t.mu.Lock()
	if t.inside > 0 || t.gc != nil {
		t.mu.Unlock()
		return false
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gc := &sweeping{cancel: cancel, done: make(chan struct{})}
	t.gc = gc
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		t.gc = nil
		t.mu.Unlock()
		close(gc.done)
	}()
	sweep(ctx)
	return true
}

// keep does what is owed for pods that are gone, until the network is closed.
// What earlier processes left comes first.
func (n *Network) keep() {
	defer close(n.kept)
	ctx := n.ctx
	n.tombstones.load(ctx)
	if n.config.sandboxes != nil {
		n.findLeftOvers(ctx)
	}
	close(n.searched)
	sweeps := n.config.collect && n.config.sandboxes != nil
	var due time.Time // of the next GC
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.tombstones.wake:
		case <-timer.C:
		}
		n.replay(ctx)
		if sweeps && !time.Now().Before(due) && n.Snapshot().Ready() {
			if n.turnstile.alone(ctx, n.sweep) && !gaveWay(n.swept.Load()) {
				due = time.Now().Add(sweepEvery)
			}
		}
		switch {
		case len(n.tombstones.all()) > 0, sweeps && !time.Now().Before(due):
			timer.Reset(n.pace.replay)
		case sweeps:
			timer.Reset(time.Until(due))
		}
	}
}

func gaveWay(s *Sweep) bool { return s != nil && errors.Is(s.Err, errGaveWay) }

// sweep tells the plugins of every list in use that knows the verb which
// attachments exist, after removing those that are known to be stale.
func (n *Network) sweep(ctx context.Context) {
	result := &Sweep{}
	var errs []error
	for _, a := range n.Snapshot().attachments {
		// The loopback list, and others below, are left alone.
		if !hasNewVerbs(a.list.CNIVersion) || a.list.DisableGC {
			continue
		}
		stale, err := n.collect(ctx, a)
		result.Stale += stale
		if err != nil {
			errs = append(errs, fmt.Errorf("GC of network %q: %w", a.list.Name, err))
		}
	}
	if err := context.Cause(ctx); err != nil {
		errs = []error{err}
	}
	if len(errs) > 0 {
		result.Err = oneLine(errs)
		log.G(ctx).WithError(result.Err).Debug("cni: GC did not finish")
	}
	if result.Stale > 0 {
		log.G(ctx).Infof("cni: %d attachments belonged to no pod", result.Stale)
	}
	result.At = time.Now()
	n.swept.Store(result)
}

// collect runs GC for one list, within its bound.
func (n *Network) collect(ctx context.Context, a attachment) (stale int, err error) {
	ctx, cancel := withBound(ctx, "GC")
	defer cancel()
	sandboxes, err := n.config.sandboxes(ctx)
	if err != nil {
		return 0, fmt.Errorf("cannot list the pod sandboxes: %w", err)
	}
	exists := make(map[string]bool, len(sandboxes))
	for _, s := range sandboxes {
		exists[s.ID] = true
	}
	cached, err := n.cni.GetCachedAttachments("")
	if err != nil {
		return 0, fmt.Errorf("cannot read the attachment cache: %w", err)
	}
	valid := []types.GCAttachment{} // not null in JSON
	known := make(map[string]bool)
	var errs []error
	for _, c := range cached {
		if c.Network != a.list.Name {
			continue
		}
		known[c.ContainerID] = true
		// A namespace that is still there may be in use.
		if exists[c.ContainerID] || n.tombstones.has(c.ContainerID) || !belongsToCRI(c) || isNamespace(c.NetNS) {
			valid = append(valid, types.GCAttachment{ContainerID: c.ContainerID, IfName: c.IfName})
			continue
		}
		stale++
		if err := n.discard(ctx, c); err != nil {
			errs = append(errs, err)
		}
	}
	for id := range exists {
		if !known[id] {
			valid = append(valid, types.GCAttachment{ContainerID: id, IfName: a.ifName})
		}
	}
	slices.SortFunc(valid, func(a, b types.GCAttachment) int {
		return strings.Compare(a.ContainerID+"\x00"+a.IfName, b.ContainerID+"\x00"+b.IfName)
	})
	if context.Cause(ctx) == nil {
		if err := n.cni.GCNetworkList(ctx, a.list, &libcni.GCArgs{ValidAttachments: valid}); err != nil && !unsupported(err) {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return stale, oneLine(errs)
	}
	return stale, nil
}

// belongsToCRI tells whether an attachment was made for a pod. Others that use
// libcni's cache, and perhaps the same list, look after their own.
func belongsToCRI(c *libcni.NetworkAttachment) bool {
	return slices.Contains(c.CniArgs, [2]string{"K8S_POD_INFRA_CONTAINER_ID", c.ContainerID})
}

// discard removes an attachment of a pod that is gone, with the list of its ADD.
func (n *Network) discard(ctx context.Context, c *libcni.NetworkAttachment) error {
	list, err := cachedList(c)
	if err != nil {
		return fmt.Errorf("stale attachment of %s: %w", c.ContainerID, err)
	}
	ns := &Namespace{id: c.ContainerID, capabilityArgs: c.CapabilityArgs, args: make(map[string]string)}
	for _, pair := range c.CniArgs {
		ns.args[pair[0]] = pair[1]
	}
	return n.detachOne(ctx, attachment{list: list, ifName: c.IfName}, ns)
}

// unsupported tells whether all that plugins had to say is that they do not know
// the verb.
func unsupported(err error) bool {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(many.Unwrap(), func(err error) bool { return !unsupported(err) })
	}
	return verbUnsupported(err, "GC")
}
