// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/admission"
	"github.com/cnireload/cnireload/cnireload/owed"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

// OwedRemoval describes the removal of a pod from its networks that could not be
// done while the pod existed.
type OwedRemoval = owed.Summary

// OwedRemovals returns the removals that are owed, oldest first.
func (n *Network) OwedRemovals() []OwedRemoval { return n.owed.List() }

// owe stores the removal of a pod. released says whether the caller is told that
// the pod is removed.
func (n *Network) owe(ns *Namespace, attachments []attachment, cause error, released bool) error {
	return n.owed.Add(recordOf(ns, attachments, cause, released))
}

func recordOf(ns *Namespace, attachments []attachment, cause error, released bool) owed.Removal {
	r := owed.Removal{ID: ns.id, NetNS: ns.path, Args: ns.args, CapabilityArgs: ns.capabilityArgs,
		Since: time.Now(), Cause: cause.Error(), Released: released}
	for _, a := range attachments {
		r.Networks = append(r.Networks, owed.Network{Interface: a.ifName, List: json.RawMessage(a.forCache().Bytes)})
	}
	return r
}

func namespaceOf(r *owed.Removal) *Namespace {
	return &Namespace{id: r.ID, path: r.NetNS, args: r.Args, capabilityArgs: r.CapabilityArgs}
}

// attachmentsOf returns the lists of a removal that is owed.
func attachmentsOf(r *owed.Removal) ([]attachment, error) {
	var attachments []attachment
	for _, o := range r.Networks {
		list, err := libcni.ConfListFromBytes(o.List)
		if err != nil {
			return nil, fmt.Errorf("owed removal of pod %s: %w", r.ID, err)
		}
		attachments = append(attachments, attachment{list: list, ifName: o.Interface})
	}
	return attachments, nil
}

// retryOwed begins to try the removals that are owed and whose time has come. It
// tells whether any are owed.
func (n *Network) retryOwed(ctx context.Context) bool {
	needs, missing := n.newDELNeeds(), make(map[string]error) // most pods have the same lists
	return n.owed.Retry(ctx, owed.Work{
		Busy: n.plugins.Processes.Busy, // or it would have to be done again
		Missing: func(r *owed.Removal) error {
			var lists strings.Builder
			for _, o := range r.Networks {
				fmt.Fprintf(&lists, "%s %s\n", o.Interface, o.List)
			}
			err, ok := missing[lists.String()]
			if !ok {
				attachments, _ := attachmentsOf(r) // removeOwed tells the error
				err = needs.waitFor(ctx, attachments, true)
				missing[lists.String()] = err
			}
			return err
		},
		Remove: n.removeOwed,
		Expired: func(r *owed.Removal) {
			attachments, _ := attachmentsOf(r)
			for _, a := range attachments {
				n.uncache(ctx, a, namespaceOf(r))
			}
		},
		Pause: admission.Pace,
	})
}

// removeOwed does a removal that is owed, with the lists that it was stored with.
// If a caller asks for the removal of the pod at the same time, both are one.
func (n *Network) removeOwed(ctx context.Context, r *owed.Removal) error {
	return n.once(ctx, r.ID, func() error {
		attachments, err := attachmentsOf(r)
		if err != nil {
			return err
		}
		ns := namespaceOf(r)
		if !isNamespace(ns.path) {
			ns.path = "" // gone; DEL can do without (CNI spec 1.1, section 4, DEL)
		}
		done := n.removeFromAll(ctx, attachments, ns, plugin.Bound("DEL"), true)
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if err := done.err(); err != nil {
			return err
		}
		n.owed.Done(r.ID)
		n.forget(r.ID)
		log.G(ctx).Infof("cni: the removal of pod %s, owed since %s, is done", r.ID, r.Since.UTC().Format(time.RFC3339))
		return nil
	})
}

// beginADD records that an ADD begins, with its lists: should this process be
// killed, others may be in use when the pod is removed.
func (n *Network) beginADD(ctx context.Context, ns *Namespace, attachments []attachment) {
	if err := n.owed.BeginADD(recordOf(ns, attachments, errors.New("ADD has begun"), false)); err != nil {
		log.G(ctx).WithError(err).Debugf("cni: the lists of pod %s are not recorded before ADD", ns.id)
	}
}

// failedADD returns the lists of an ADD of the pod that has failed, or whose
// caller was not told that it has succeeded, and whether there was one. What this
// process remembers is enough where nothing can be stored.
func (n *Network) failedADD(id string) ([]attachment, bool) {
	if lists := n.pods.get(id).failedADD; lists != nil {
		return lists, true
	}
	r := n.owed.BegunADD(id)
	if r == nil {
		return nil, false
	}
	attachments, err := attachmentsOf(r)
	return attachments, err == nil
}

// oweLostADDs stores the removal of pods that an earlier process was adding and
// that nobody knows any more: nobody will ask for their DEL.
func (n *Network) oweLostADDs(ctx context.Context) {
	begun := n.owed.BegunADDs(ctx, n.made)
	if len(begun) == 0 {
		return
	}
	pods, err := n.existingPods(ctx)
	if err != nil {
		log.G(ctx).WithError(err).Warn("cni: cannot list the pod sandboxes")
		return
	}
	for _, r := range begun {
		if pods[r.ID] {
			continue
		}
		lost := *r
		lost.Cause, lost.Since = "an earlier containerd was killed during ADD", time.Now()
		if err := n.owed.Add(lost); err != nil {
			log.G(ctx).WithError(err).Warnf("cni: no DEL will follow the ADD of pod %s, which an earlier containerd has begun", r.ID)
		}
		n.owed.EndADD(r.ID)
	}
}
