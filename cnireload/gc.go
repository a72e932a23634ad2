// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/plugin"
)

const (
	// sweepEvery is how often plugins are told which attachments exist. What GC
	// frees was leaked by a crash, which is rare.
	sweepEvery = 6 * time.Hour
	// maxSweepAgain is how long after one that did not finish GC is tried again, at
	// most: the pace doubles from a minute.
	maxSweepAgain = 30 * time.Minute
	// patientAfter is how many GCs in a row give way at once. Where pods come and go
	// all the time none would ever finish: further ones are ended only when a pod
	// has waited for gcPatience.
	patientAfter = 4
	gcPatience   = 3 * time.Second
	// giveWayBound is how long a pod waits for a GC that was told to end. Killing a
	// plugin takes no longer.
	giveWayBound = plugin.KillGrace + 500*time.Millisecond
	// staleBound bounds the DELs of stale attachments of one network. They are no
	// part of GC's own bound.
	staleBound = 2 * time.Minute
)

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
// way: it is not begun while one of the others runs, and ended when one comes, at
// once or when that has waited for a moment. The lock is not held while anything
// runs.
type turnstile struct {
	mu     sync.Mutex
	inside int
	gc     *sweeping // nil while none runs
}

type sweeping struct {
	patience time.Duration // of the first pod that comes
	giveWay  func()        // has it end after that; safe to call again
	done     chan struct{}
}

// exclusive is one for all networks: they may share plugins and what these keep.
var exclusive turnstile

// errGaveWay is why a GC was ended.
var errGaveWay = errors.New("GC gave way to a pod")

// enter lets an ADD or DEL begin. It ends with leave.
func (t *turnstile) enter() {
	t.mu.Lock()
	t.inside++
	gc := t.gc
	t.mu.Unlock()
	if gc == nil {
		return
	}
	gc.giveWay()
	bound := time.NewTimer(gc.patience + giveWayBound)
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
// it did. The first one that comes then waits for so long before sweep is told to
// end.
func (t *turnstile) alone(ctx context.Context, patience time.Duration, sweep func(context.Context)) bool {
	t.mu.Lock()
	if t.inside > 0 || t.gc != nil {
		t.mu.Unlock()
		return false
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gc := &sweeping{patience: patience, done: make(chan struct{}), giveWay: sync.OnceFunc(func() {
		time.AfterFunc(patience, func() { cancel(errGaveWay) })
	})}
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
	defer n.retries.running.Wait()
	ctx := n.ctx
	n.tombstones.load(ctx)
	if n.config.sandboxes != nil {
		n.findLeftOvers(ctx)
	}
	n.oweBegun(ctx)
	close(n.searched)
	var group sync.WaitGroup
	defer group.Wait()
	if n.config.collect && n.config.sandboxes != nil {
		// By itself: a round of replays may take long.
		group.Go(n.keepSweeping)
	}
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
		if len(n.tombstones.all()) > 0 {
			timer.Reset(n.pace.replay)
		}
	}
}

// keepSweeping runs GC until the network is closed.
func (n *Network) keepSweeping() {
	var unfinished, gaveWay int // since one has finished
	failing := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-timer.C:
		}
		var patience time.Duration
		if gaveWay >= patientAfter {
			patience = gcPatience
		}
		if !n.Snapshot().Ready() || !n.turnstile.alone(n.ctx, patience, n.sweep) {
			timer.Reset(n.pace.replay)
			continue
		}
		err := n.LastSweep().Err
		if err == nil {
			if failing {
				n.logger(n.ctx).Info("cni: GC has finished again")
			}
			unfinished, gaveWay, failing = 0, 0, false
			timer.Reset(sweepEvery)
			continue
		}
		again := min(n.pace.sweep<<min(unfinished, 5), maxSweepAgain)
		timer.Reset(again)
		unfinished++
		switch {
		case errors.Is(err, errGaveWay):
			gaveWay++
		case !failing && n.ctx.Err() == nil:
			failing = true
			n.logger(n.ctx).Warnf("cni: GC has failed, and is tried again, at first after %s: %v", again, err)
		}
	}
}

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
	}
	result.At = time.Now()
	n.swept.Store(result)
}

// collect runs GC for one list, after DEL for what is known to be stale. Each
// plugin has the bound of GC.
func (n *Network) collect(ctx context.Context, a attachment) (stale int, err error) {
	listing, cancel := plugin.WithBound(ctx, "GC")
	sandboxes, err := n.config.sandboxes(listing)
	cancel()
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
	var discarded []*libcni.NetworkAttachment
	for _, c := range cached {
		if c.Network != a.list.Name {
			continue
		}
		known[c.ContainerID] = true
		// A namespace that is still there may be in use.
		if exists[c.ContainerID] || n.tombstones.has(c.ContainerID) || !belongsToCRI(c) || isNamespace(c.NetNS) {
			valid = append(valid, types.GCAttachment{ContainerID: c.ContainerID, IfName: c.IfName})
		} else {
			discarded = append(discarded, c)
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
	errs := n.discard(ctx, a, discarded)
	if context.Cause(ctx) == nil {
		// Without a cache: libcni would run the DELs that have failed once more.
		c := libcni.NewCNIConfigWithCacheDir(n.config.binDirs, filepath.Join(n.cacheDir(), "no attachments"), n.exec)
		if err := c.GCNetworkList(ctx, a.list, &libcni.GCArgs{ValidAttachments: valid}); err != nil && !unsupported(err) {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return len(discarded), oneLine(errs)
	}
	return len(discarded), nil
}

// belongsToCRI tells whether an attachment was made for a pod. Others that use
// libcni's cache, and perhaps the same list, look after their own.
func belongsToCRI(c *libcni.NetworkAttachment) bool {
	return slices.Contains(c.CniArgs, [2]string{"K8S_POD_INFRA_CONTAINER_ID", c.ContainerID})
}

// discard removes attachments of pods that are gone, each with the list of its
// ADD or, if that cannot be used, with the one in use. They come in any order, so
// that those behind one that hangs have their turn another time.
func (n *Network) discard(ctx context.Context, inUse attachment, stale []*libcni.NetworkAttachment) (errs []error) {
	ctx, cancel := context.WithTimeoutCause(ctx, staleBound, fmt.Errorf("the DELs of stale attachments did not finish within %s", staleBound))
	defer cancel()
	rand.Shuffle(len(stale), func(i, j int) { stale[i], stale[j] = stale[j], stale[i] })
	for i, c := range stale {
		if ctx.Err() != nil {
			return append(errs, fmt.Errorf("%d stale attachments are left: %w", len(stale)-i, context.Cause(ctx)))
		}
		list, err := cachedList(c)
		if err != nil {
			list = inUse.list
		}
		ns := &Namespace{id: c.ContainerID, capabilityArgs: c.CapabilityArgs, args: make(map[string]string)}
		for _, pair := range c.CniArgs {
			ns.args[pair[0]] = pair[1]
		}
		pod := fmt.Sprintf("%s/%s (sandbox %s)", ns.args["K8S_POD_NAMESPACE"], ns.args["K8S_POD_NAME"], c.ContainerID)
		if err := n.detachOne(ctx, attachment{list: list, ifName: c.IfName}, ns); err != nil {
			errs = append(errs, fmt.Errorf("stale attachment of pod %s: %w", pod, err))
			continue
		}
		n.logger(n.ctx).Infof("cni: pod %s is gone, but was attached to network %q by interface %s: removed", pod, c.Network, c.IfName)
	}
	return errs
}

// unsupported tells whether all that plugins had to say is that they do not know
// the verb.
func unsupported(err error) bool {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(many.Unwrap(), func(err error) bool { return !unsupported(err) })
	}
	return plugin.VerbUnsupported(err, "GC")
}
