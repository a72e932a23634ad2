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
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cnireload/cnireload/cnireload/plugin"
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
			v := l.verdictOf(ctx, n, i, strict)
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
	l.prober.Forget(paths, statuses)
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
			types[p.Type] = true
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

// questionKey names the question of one plugin of a network for its STATUS.
func questionKey(n *network, index int) string { return fmt.Sprintf("%s\x00%d", n.key(), index) }

// answer is the outcome of a look at a gate.
type answer struct {
	at      time.Time
	pending bool
	asked   bool // whether at and err hold something
	err     error
}

// ask has a gate looked at.
func (l *loop) ask(ctx context.Context, a *answer, check func(context.Context) error) {
	a.pending = true
	l.prober.Go(ctx, func() func() {
		err := check(ctx)
		return func() { a.pending, a.asked, a.at, a.err = false, true, time.Now(), err }
	})
}

// hasNewVerbs tells whether lists of that version know STATUS and GC, which came
// with CNI 1.1.
func hasNewVerbs(cniVersion string) bool {
	ok, err := version.GreaterThanOrEqualTo(cniVersion, "1.1.0")
	return err == nil && ok
}

// verdict is what is known of one plugin.
type verdict struct {
	PluginState
	// pending is the verb to which the plugin's first word is being waited for,
	// if so. Problem is why there is none yet, if it was asked.
	pending string
	final   bool      // Problem counts at once, or has been given its time
	next    time.Time // when to look again; zero if an event will tell
}

// sooner has the plugin looked at by then.
func (v *verdict) sooner(next time.Time) {
	if !next.IsZero() && (v.next.IsZero() || next.Before(v.next)) {
		v.next = next
	}
}

// verdictOf says whether a plugin of n can be used. checkVersion is false where
// readiness is only parsing.
//
// Until the plugin's first word nothing is known of it. go-cni waits for STATUS
// for as long as it takes, and then is not ready either, whatever the error was:
// no node that it would run is lost by waiting, as long as the question is asked
// again. It is, until there is an answer.
func (l *loop) verdictOf(ctx context.Context, n *network, index int, checkVersion bool) verdict {
	pl := n.plugins[index]
	v := verdict{PluginState: PluginState{Role: pl.Role, Type: pl.Type, Counts: pl.Counts}}
	dirs := l.n.config.binDirs
	for _, dir := range slices.Backward(pl.Dirs) {
		if !slices.Contains(dirs, dir) {
			dirs = slices.Concat([]string{dir}, dirs)
		}
	}
	path, info, err := plugin.Find(pl.Type, dirs, pl.Role == RolePlugin)
	if err != nil {
		v.Problem = err
		if n.file == nil && pl.Type == "loopback" {
			v.Problem = fmt.Errorf("%w; install it, or set use_internal_loopback = true", err)
		}
		return v
	}
	v.Path = path
	if checkVersion && pl.Counts {
		a := l.prober.Version(ctx, path, info)
		v.sooner(a.Next)
		v.Versions = a.Versions
		misanswers := func(err error) error {
			return fmt.Errorf("plugin %q (%s) mis-answers VERSION: %w", pl.Type, path, err)
		}
		first := !a.Heard || !a.Current && a.Silence == nil
		switch {
		case first && a.Silence == nil:
			v.pending = "VERSION"
			return v
		case a.Lost:
			v.Problem, v.final = misanswers(a.Silence), true
		case first:
			v.Problem, v.pending = misanswers(a.Silence), "VERSION"
		case a.Err != nil:
			v.Problem = misanswers(a.Err)
		case pl.Version != "" && !slices.Contains(a.Versions, pl.Version):
			v.Problem = fmt.Errorf("plugin %q (%s) does not support cniVersion %s, only %s", pl.Type, path, pl.Version, a.Supported())
		}
		if v.Problem != nil {
			return v
		}
	}
	if pl.Conf != nil && hasNewVerbs(n.list.CNIVersion) {
		a := l.prober.Status(ctx, questionKey(n, index), path, info, &libcni.NetworkConfigList{
			Name:       n.list.Name,
			CNIVersion: n.list.CNIVersion,
			Plugins:    []*libcni.PluginConfig{pl.Conf},
		})
		v.sooner(a.Next)
		silent := &statusError{plugin: pl.Type, path: path, err: a.Silence}
		switch {
		case a.Lost:
			v.Status, v.Problem, v.final = "no answer", silent, true
		case !a.Heard && a.Silence == nil:
			v.pending = "STATUS"
		case !a.Heard:
			v.Status, v.Problem, v.pending = "no answer", silent, "STATUS"
		case a.Err == nil:
			v.Status = "ok"
		case plugin.VerbUnsupported(a.Err, "STATUS"):
			v.Status = "not supported"
		default:
			// Unlike a missing executable it is not given time: the plugin knows.
			v.Status = "not ready"
			v.Problem, v.final = &statusError{plugin: pl.Type, path: path, err: a.Err}, true
		}
	}
	return v
}

// statusError is why a plugin is not ready by its STATUS: its own word, or that
// it has not given any for too long.
type statusError struct {
	plugin, path string
	err          error
}

func (e *statusError) Error() string {
	if te := (*types.Error)(nil); plugin.Spoken(e.err) && errors.As(e.err, &te) {
		return fmt.Sprintf("plugin %q (%s) answers STATUS with code %d: %s", e.plugin, e.path, te.Code, te.Error())
	}
	return fmt.Sprintf("plugin %q (%s) does not answer STATUS: %v", e.plugin, e.path, e.err)
}
func (e *statusError) Unwrap() error { return e.err }
