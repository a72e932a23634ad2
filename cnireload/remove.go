// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/oneline"
)

// Remove detaches the network namespace from the networks it was attached to,
// which need not be those in use now: libcni's attachment cache holds the list
// that ADD used, for pods that go-cni attached too. Without an entry there, for
// an ADD that failed, it is the list that the failed ADD used, or those in use;
// without any there is nothing to remove.
// Readiness does not matter: it is about new pods.
//
// Every plugin of a list is run, last to first, even when one fails, so that
// none keeps what it allocated because of another (containerd#12130); the error
// joins what failed. A plugin that says "not found" has nothing left to do; so
// has one that says "no such file or directory" when path is empty because the
// namespace is gone (both as go-cni), unless that is its agent's file.
//
// While the agent of a plugin is away, the call waits for as long as a DEL may
// take, unless ADD has failed, and then fails with that cause. A pod whose removal
// has failed so for as long as [WithDelGrace] says is let go: the removal is owed
// from then on, nil returned, and DEL run when the agent is back, see
// [Network.OwedRemovals]. DEL after a failed ADD that fails is owed at once.
//
// A second call for the same id while one runs joins it. The work goes on to
// its own bound when a caller gives up.
func (n *Network) Remove(ctx context.Context, id string, path string, opts ...NamespaceOpts) error {
	ctx, span := startSpan(ctx, "cni.Remove", id, path)
	defer span.End()
	ns, err := newNamespace(id, path, opts)
	if err != nil {
		return err
	}
	n.owed.Load(ctx, startBound)
	if n.released(id) || n.pods.get(id).removed {
		return nil // its caller was told so before
	}
	return n.once(ctx, id, func() error { return n.remove(context.WithoutCancel(ctx), ns) })
}

// once runs a removal of the pod, unless one runs already, and returns the result
// of that which runs. The removal goes on when ctx ends.
func (n *Network) once(ctx context.Context, id string, remove func() error) error {
	result := n.removals.DoChan(id, func() (any, error) {
		n.gc.Guard.Enter()
		defer n.gc.Guard.Leave()
		return nil, remove()
	})
	select {
	case r := <-result:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("DEL goes on in the background: %w", context.Cause(ctx))
	}
}

// released tells whether the pod's removal is owed and its caller was told that
// the pod is removed.
func (n *Network) released(id string) bool {
	r := n.owed.Get(id)
	return r != nil && r.Released
}

// remove runs DEL for every network that the namespace may be attached to, and
// decides what becomes of the pod.
func (n *Network) remove(ctx context.Context, ns *Namespace) error {
	if n.released(ns.id) {
		return nil // while this call waited for another one to end
	}
	n.awaitSearch()
	addGoesOn := n.plugins.Processes.Evict(ns.id)
	if _, err := os.Stat(ns.path); err == nil && !isNamespace(ns.path) {
		// The mount point that is left of one is a plain file, and plugins fail
		// on it for ever.
		ns = ns.without()
	}
	attachments, neverAdded, err := n.attached(ns)
	if err != nil {
		return err
	}
	since := n.pods.get(ns.id).failingSince
	bound := plugin.Bound("DEL")
	switch {
	case neverAdded:
		bound = min(bound, cleanUpDEL)
	case since.IsZero() || time.Since(since) < n.config.delGrace:
		n.awaitAgent(ctx, attachments)
	}
	r := n.removeFromAll(ctx, attachments, ns, bound, false)
	err = r.err()
	switch {
	case err == nil && addGoesOn:
		// What the ADD allocates from now on is not removed yet (cni#550).
		err := errors.New("an ADD that was given up may still go on")
		if oerr := n.owe(ns, attachments, err, true); oerr != nil {
			log.G(ctx).WithError(oerr).Warnf("cni: pod %s: %v, and no DEL will follow it", ns.id, err)
		}
		n.forget(ns.id)
		return nil
	case err == nil:
		n.finish(ctx, ns, attachments, r)
		return nil
	case neverAdded:
		// CRI does not come back for a pod that was never attached
		// (containerd#12130).
		if oerr := n.owe(ns, r.unfinished(), err, false); oerr != nil {
			log.G(ctx).WithError(oerr).Warnf("cni: pod %s: DEL after a failed ADD has failed and will not be tried again", ns.id)
			return err
		}
		n.owed.EndADD(ns.id)
		return fmt.Errorf("%w; it will be tried again", err)
	default:
		return n.letGo(ctx, ns, r)
	}
}

// finish notes that a pod is removed. What it still owes is left to a retry.
func (n *Network) finish(ctx context.Context, ns *Namespace, attachments []attachment, r removal) {
	if len(r.owed) > 0 {
		if err := n.owe(ns, r.owed, r.owedFor, true); err != nil {
			log.G(ctx).WithError(err).Warnf("cni: pod %s is removed by the lists in use; DEL of the list of its ADD has failed and will not be tried again: %v", ns.id, r.owedFor)
			for _, a := range r.owed {
				n.uncache(ctx, a, ns)
			}
		}
		n.forget(ns.id)
		return
	}
	n.owed.Done(ns.id)
	n.forget(ns.id)
	if len(attachments) > 0 {
		n.pods.put(ns.id, podState{removed: true})
	}
}

// letGo lets a pod go whose removal has failed for del_grace because what it
// needs is away. It returns an error as long as the pod has to stay.
func (n *Network) letGo(ctx context.Context, ns *Namespace, r removal) error {
	p := n.pods.get(ns.id)
	if p.failingSince.IsZero() {
		p.failingSince = time.Now()
	}
	p.interfaces = append(slices.Clone(p.interfaces), r.interfaces...)
	n.pods.put(ns.id, p)
	cause := r.err()
	if r.missing == nil {
		return cause
	}
	cause = because(cause, r.missing)
	if time.Since(p.failingSince) < n.config.delGrace {
		return cause
	}
	if err := n.owe(ns, r.unfinished(), r.missing, true); err != nil {
		return fmt.Errorf("%w (the pod cannot be let go: %w)", cause, err)
	}
	n.forget(ns.id)
	log.G(ctx).Warnf("cni: pod %s is let go after %s; its removal is owed: %v", ns.id, n.config.delGrace, r.missing)
	return nil
}

// forget forgets what only concerns a pod that is not removed yet.
func (n *Network) forget(id string) {
	n.pods.forget(id)
	n.owed.EndADD(id)
}

// removal is what came of the DELs for one pod.
type removal struct {
	interfaces []string     // of networks that the pod is removed from
	left       []attachment // of networks that it is not removed from
	errs       []error      // why
	// missing is what the DEL of one that is left lacks and may have later; nil if
	// a later DEL would be no better.
	missing error
	// owed are lists of ADD that have failed, while a list in use has removed the
	// pod as it would in stock.
	owed    []attachment
	owedFor error
}

func (r *removal) err() error { return oneline.Join(r.errs) }

// unfinished are the lists that have to be run again.
func (r *removal) unfinished() []attachment { return append(slices.Clone(r.left), r.owed...) }

// removeFromAll runs DEL for one attachment after the other, all of them within
// bound, each even when another one fails. retry says that the pod is gone and its
// removal owed.
func (n *Network) removeFromAll(ctx context.Context, attachments []attachment, ns *Namespace, bound time.Duration, retry bool) removal {
	ctx, cancel := plugin.WithBoundOf(ctx, "DEL", bound)
	defer cancel()
	var r removal
	for i, a := range attachments {
		func() {
			ctx, cancel := share(ctx, len(attachments)-i)
			defer cancel()
			n.removeFrom(ctx, a, ns, retry, &r)
		}()
	}
	return r
}

// removeFrom removes a pod from one network. It runs the list of ADD first, unless
// something for that is missing. Where that does not do, it runs the list in use,
// which is all that stock would run: a pod that stock removes must go. What the
// list in use does not do is owed then.
func (n *Network) removeFrom(ctx context.Context, a attachment, ns *Namespace, retry bool, r *removal) {
	needs, asking := n.newDELNeeds(), context.WithoutCancel(ctx) // gates have a bound of their own
	p := needs.plan(asking, a, allGates, retry)
	failed, err := p.run, p.missing
	runOwn := func(plugins []int, several int) {
		ctx, cancel := share(ctx, several)
		defer cancel()
		failed, err = n.del(ctx, a, plugins, ns)
	}
	gone := func(owed []int, cause error) {
		r.interfaces = append(r.interfaces, a.ifName)
		if owed == nil {
			n.uncache(ctx, a, ns)
			return
		}
		r.owed, r.owedFor = append(r.owed, a.only(owed)), cause
	}
	useOther := p.canRunInUse()
	ownFirst := p.missing == nil || !useOther
	if ownFirst {
		several := 1
		if useOther {
			several = 2
		}
		runOwn(p.run, several)
		if err == nil && !p.needsInUse {
			if unheard := needs.closed(asking, a.only(p.run).list, silentGates); unheard != nil {
				gone(a.plugins(), unheard) // as in stock; the agent is told when it is back
			} else {
				gone(nil, nil)
			}
			return
		}
		if retry && err != nil && !refused(err) {
			useOther = false // ADD's list can be run, and is tried again
		}
	}
	if useOther {
		_, otherErr := n.del(ctx, *p.inUse, p.inUse.plugins(), ns)
		if otherErr == nil {
			left := p.inUse.leaves(a, failed)
			if !ownFirst {
				can, cannot := needs.divide(asking, a, left)
				if left = cannot; len(can) > 0 {
					runOwn(can, 1)
					left = append(left, failed...)
				}
			}
			if len(left) == 0 {
				left = nil
			}
			gone(left, because(err, p.missing))
			return
		}
		if !ownFirst {
			if runOwn(p.run, 1); err == nil && !p.needsInUse {
				gone(nil, nil)
				return
			}
		}
		if err == nil {
			a, err = *p.inUse, otherErr // ADD's list is done
		} else {
			err = oneline.Join([]error{err, otherErr})
		}
	} else if err == nil {
		a, err = *p.inUse, p.inUseMissing // ADD's list is done
	}
	r.left = append(r.left, a)
	r.errs = append(r.errs, err)
	if r.missing == nil {
		r.missing = p.mayComeBack(a, err)
	}
}

// because adds the reason, if there is one, to an error that does not name it.
func because(err, reason error) error {
	switch {
	case err == nil:
		return reason
	case reason == nil, strings.Contains(err.Error(), reason.Error()):
		return err
	}
	return fmt.Errorf("%w (%w)", err, reason)
}

// awaitSearch waits, for a moment after the start, until left-over plugins have
// been looked for: an ADD among them could end after the pod's DEL.
func (n *Network) awaitSearch() {
	if n.config.sandboxes == nil {
		return
	}
	select {
	case <-n.searched:
	case <-n.ctx.Done():
	case <-time.After(startBound):
	}
}

// awaitAgent waits, for as long as a DEL may take, until what the plugins of the
// lists need for DEL is there, or a list in use can be run instead.
func (n *Network) awaitAgent(ctx context.Context, attachments []attachment) {
	ctx, cancel := context.WithTimeout(ctx, min(n.pace.agent, plugin.Bound("DEL")))
	defer cancel()
	for n.newDELNeeds().waitFor(ctx, attachments, false) != nil {
		select {
		case <-time.After(n.pace.gate):
		case <-ctx.Done():
			return
		case <-n.ctx.Done():
			return
		}
	}
}
