// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// pluginHistory is what one plugin of a list in use was like before now.
type pluginHistory struct {
	good     PluginState
	badSince time.Time // zero while it is good
}

// judge finds out what each plugin of the networks is like and adds that to the
// snapshot. cause is the first reason why the networks cannot be used, waiting
// why that cannot be told yet.
func (l *loop) judge(ctx context.Context, s *Snapshot, nets []*network, now time.Time) (cause, waiting error) {
	strict := l.n.config.readiness == ReadinessStrict
	paths, statuses := make(map[string]bool), make(map[string]bool)
	for _, n := range l.inUse {
		for i := range n.plugins {
			statuses[questionKey(n, i)] = true
		}
	}
	var loopbackCause error
	for _, n := range nets {
		var states []PluginState
		for i := range n.plugins {
			v := l.prober.judge(ctx, l.n.config.binDirs, n, i, strict)
			key := questionKey(n, i)
			statuses[key] = true
			switch {
			case v.pending == "":
				l.allowUpgrade(key, &v, now)
			case v.Problem == nil:
				waiting = &waitingError{fmt.Errorf("%s: waiting for plugin %q (%s) to answer %s", n.describe(), v.Type, v.Path, v.pending)}
			case waiting == nil:
				waiting = fmt.Errorf("%s: %w", n.describe(), v.Problem)
			}
			if v.Path != "" {
				paths[v.Path] = true
			}
			if !v.next.IsZero() && v.next.Before(l.next) {
				l.next = v.next
			}
			states = append(states, v.PluginState)
			var status *statusError
			if v.Problem != nil && v.Counts && (strict || errors.As(v.Problem, &status)) {
				problem := fmt.Errorf("%s: %w", n.describe(), v.Problem)
				if n.file == nil && loopbackCause == nil {
					loopbackCause = problem
				} else if n.file != nil && cause == nil {
					cause = problem
				}
			}
		}
		s.Networks = append(s.Networks, n.state(states))
		s.attachments = append(s.attachments, n.attachment)
	}
	if cause == nil && strict {
		cause = l.noPodNetwork(nets)
	}
	if cause == nil {
		cause = l.missingRequired(nets)
	}
	gateCause, gateWaiting := l.judgeGates(ctx, s, nets, now)
	if cause == nil {
		cause = gateCause
	}
	if waiting == nil && gateWaiting != nil {
		waiting = &waitingError{gateWaiting}
	}
	if cause == nil {
		cause = loopbackCause
	}
	l.prober.forget(paths, statuses)
	maps.DeleteFunc(l.history, func(key string, _ *pluginHistory) bool { return !statuses[key] })
	if waiting == nil {
		maps.DeleteFunc(l.gates, func(set string, _ map[string]*gateHistory) bool { return set != l.gateSet })
	}
	return cause, waiting
}

// allowUpgrade passes over a problem of a plugin that was good before, for as
// long as an installer needs to put a new executable in the old one's place.
func (l *loop) allowUpgrade(key string, v *verdict, now time.Time) {
	h := l.history[key]
	switch {
	case v.Problem == nil:
		l.history[key] = &pluginHistory{good: v.PluginState}
	case v.final:
		// An executable that goes now is no longer that of a good plugin.
		delete(l.history, key)
	case h == nil:
	default:
		if h.badSince.IsZero() {
			h.badSince = now
		}
		if end := h.badSince.Add(l.n.pace.upgradeGrace); now.Before(end) {
			v.PluginState, v.next = h.good, end
		} else {
			delete(l.history, key)
		}
	}
}

// noPodNetwork says why the list that is to give pods their address cannot: it
// runs nothing but loopback.
func (l *loop) noPodNetwork(nets []*network) error {
	for _, n := range nets {
		if n.file == nil {
			continue
		}
		if slices.ContainsFunc(n.list.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Type != "loopback" }) {
			return nil
		}
		return fmt.Errorf("%s: it runs only loopback, which connects no pod: install the list of a pod network, and remove this one if it sorts before it", n.describe())
	}
	return nil
}

// missingRequired names the first required plugin that no list runs.
func (l *loop) missingRequired(nets []*network) error {
	types := make(map[string]bool)
	for _, n := range nets {
		for _, p := range n.plugins {
			types[p.typ] = true
		}
	}
	for _, r := range l.n.config.required {
		if !types[r] {
			return fmt.Errorf("required plugin %q is in none of the networks in use", r)
		}
	}
	return nil
}

// waitingError is why it cannot be told yet whether networks can be used.
type waitingError struct{ error }
