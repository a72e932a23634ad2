// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/conftemplate"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

// loop keeps a network in step with the disk. It is the only writer of the
// network's snapshot, and all its state belongs to its one goroutine; processes
// that answer VERSION and STATUS run beside it.
type loop struct {
	n        *Network
	recipe   recipe
	scanner  *confdir.Scanner
	prober   *plugin.Prober
	renderer *conftemplate.Renderer // nil without a template
	watcher  *confdir.Watcher
	watching bool
	watch    WatchState
	named    []string // directories that the content last read names

	waiters []waiter
	refused []refusal // to be told after the next refresh
	// inUse holds the last good content of each file in use.
	inUse      map[string]*network
	unchecked  bool   // it was put into use before all its plugins had answered
	generation string // keys of the networks in use
	history    map[string]*pluginHistory
	// gates are known by set, which is the ids of all gates of the networks, and
	// by id. Other sets than the last are those of networks that stay in use
	// while that is being looked at.
	gates     map[string]map[string]*gateHistory
	gateSet   string    // the last
	next      time.Time // when to look again without being told
	published string    // digest of the snapshot
	logged    loggedState
}

// waiter is a request that is answered when what is on disk is in use, or with
// what is known by then.
type waiter struct {
	reply chan<- error
	until time.Time
}

// settleBound is how long a request waits for plugins to answer. Their STATUS may
// take longer than the caller of UpdateRuntimeConfig should be kept.
const settleBound = 10 * time.Second

// refusal is the answer to a request that has failed.
type refusal struct {
	reply chan<- error
	err   error
}

func newLoop(n *Network) *loop {
	l := &loop{
		n:       n,
		recipe:  n.config.recipe,
		scanner: confdir.NewScanner(n.config.confDir),
		prober:  plugin.NewProber(n.exec, n.cni, plugin.Pace{Version: n.pace.poll, Status: n.pace.status, Retry: n.pace.statusRetry, Grace: n.pace.upgradeGrace}),
		watcher: confdir.NewWatcher(n.notifier),
		watch:   n.Snapshot().Watch,
		inUse:   make(map[string]*network),
		history: make(map[string]*pluginHistory),
		gates:   make(map[string]map[string]*gateHistory),
	}
	if n.config.template.path != "" {
		l.renderer = conftemplate.New(n.config.template.path, n.config.template.record, n.config.confDir)
	}
	return l
}

// run looks at the disk whenever something asks for it, until the network is
// closed.
func (l *loop) run() {
	ctx := l.n.ctx
	defer close(l.n.ended)
	defer l.prober.Wait()
	defer l.watcher.Close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case req := <-l.n.requests:
			l.accept(req)
		case store := <-l.prober.Results():
			store()
		case <-l.watcher.Dirty():
		case <-timer.C:
			if !l.watching && len(l.waiters) == 0 {
				continue // what is to be looked at will be asked for
			}
		}
		l.takeMore()
		l.refresh(ctx)
		// Whoever is told of a failure finds it in the snapshot.
		for _, r := range l.refused {
			r.reply <- r.err
		}
		l.refused = nil
		if l.watching || len(l.waiters) > 0 {
			timer.Reset(time.Until(l.next))
		}
	}
}

// takeMore takes in what else has come up by now, so that a storm of events
// costs one refresh.
func (l *loop) takeMore() {
	for {
		select {
		case req := <-l.n.requests:
			l.accept(req)
		case store := <-l.prober.Results():
			store()
		case <-l.watcher.Dirty():
		default:
			return
		}
	}
}

// accept takes in a request. It is answered by the first refresh that leaves
// nothing pending, or after the next refresh if it fails.
func (l *loop) accept(req request) {
	if req.recipe != nil {
		l.recipe = *req.recipe
	}
	if req.watch && !l.watching {
		// As stock does, so that a plain copy of a list into it works, and never
		// again: one that is removed was removed on purpose. An error is none:
		// what comes in its place is waited for.
		if dir := l.n.config.confDir; dir != "" {
			_ = os.MkdirAll(dir, 0o755)
		}
		l.watching = true
	}
	if req.cidrs != nil {
		if err := l.renderer.Render(req.cidrs, l.foreign()); err != nil {
			l.refused = append(l.refused, refusal{req.reply, err})
			return
		}
	}
	l.waiters = append(l.waiters, waiter{req.reply, time.Now().Add(settleBound)})
}

// refresh compares the disk with what is in use and publishes what has changed.
func (l *loop) refresh(ctx context.Context) {
	now := time.Now()
	l.next = now.Add(l.n.pace.poll)
	if l.renderer != nil && l.renderer.Changed() {
		l.renew(ctx, "")
	}
	scan := l.scan()
	nets, skipped, loadErr := l.choose(scan, now)
	if l.renderer != nil && scan.Err == nil {
		if foreign := l.foreignIn(nets); l.renderer.Due(foreign) && l.renew(ctx, foreign) {
			scan = l.scan()
			nets, skipped, loadErr = l.choose(scan, now)
		}
	}
	s := &Snapshot{
		LoadError: loadErr,
		ConfDir:   l.n.config.confDir,
		BinDirs:   l.n.config.binDirs,
		Skipped:   skipped,
		Watch:     l.watch,
		maxConf:   l.n.config.maxConf,
		prefix:    l.n.config.prefix,

		superseded: make(chan struct{}),
	}
	if l.renderer != nil {
		s.Template = l.renderer.Describe()
	}
	cause, waiting := l.judge(ctx, s, nets, now)
	var waits *waitingError
	unheard := errors.As(waiting, &waits)
	if waiting != nil && len(l.inUse) > 0 && !l.unchecked && (unheard || l.n.Snapshot().Ready()) && l.lastsOver(scan) {
		// What is in use stays until the new networks are known to be usable
		// or not: there is no moment at which a list is in use unchecked. A ready
		// network is not given up for one that could not be asked either.
		l.answer(false, now)
		return
	}
	switch {
	case loadErr != nil:
		s.Cause = loadErr
	case waiting != nil:
		s.Cause = waiting
	default:
		s.Cause = cause
	}
	l.unchecked = waiting != nil
	l.publish(ctx, s, nets, now)
	l.reportStale(ctx, s, now)
	l.answer(!unheard, now)
}

// answer answers the requests that need not wait any longer: all of them if what
// is on disk is in use.
func (l *loop) answer(inUse bool, now time.Time) {
	l.waiters = slices.DeleteFunc(l.waiters, func(w waiter) bool {
		if inUse || !now.Before(w.until) {
			w.reply <- nil
			return true
		}
		if w.until.Before(l.next) {
			l.next = w.until
		}
		return false
	})
}

// renew renders the template again and tells whether all that was reported is
// rendered now. It is tried at each refresh and logged once: the disk may be full for
// a while.
func (l *loop) renew(ctx context.Context, foreign string) bool {
	before := errorText(l.renderer.Err())
	if err := l.renderer.Renew(foreign); err != nil && err.Error() != before {
		l.n.logger(ctx).WithError(err).Warn("cni: conf_template cannot be rendered; what was rendered before stays")
	}
	return !l.renderer.Pending()
}

// scan reads the directory with the watch in place before, so that no change
// falls in between.
func (l *loop) scan() confdir.Scan {
	if !l.recipe.scan {
		return confdir.Scan{}
	}
	if !l.watching {
		return l.scanner.Scan()
	}
	added, err := l.watcher.Arm(l.wishes())
	scan := l.scanner.Scan()
	// The content names more directories. What was read from one before it was
	// watched may be old: read again. Content that keeps naming new ones is
	// left to the poll.
	for range 3 {
		if !added && slices.Equal(l.named, scan.Watch) {
			// All of it was watched before it was read. If a watch was added,
			// what came into a new directory before that has told nobody.
			break
		}
		l.named = scan.Watch
		if added, err = l.watcher.Arm(l.wishes()); !added {
			break
		}
		scan = l.scanner.Scan()
	}
	l.watch = WatchState{Mode: WatchInotify}
	switch {
	case errors.Is(scan.Err, fs.ErrNotExist):
		l.watch = WatchState{Mode: WatchWaiting, Cause: errorText(scan.Err)}
	case err != nil:
		l.watch = WatchState{Mode: WatchPolling, Cause: errorText(err)}
	}
	return scan
}

// wishes names the directories whose changes matter.
func (l *loop) wishes() []confdir.Wish {
	dir := confdir.CleanPath(l.n.config.confDir)
	wishes := []confdir.Wish{
		{Dir: dir},
		// The directory itself, or the link that leads to it, is an entry of
		// its parent.
		{Dir: filepath.Dir(dir), Name: filepath.Base(dir)},
	}
	for _, named := range l.named {
		wishes = append(wishes, confdir.Wish{Dir: named})
	}
	for _, bin := range l.n.config.binDirs {
		wishes = append(wishes, confdir.Wish{Dir: bin})
	}
	for _, n := range l.inUse {
		for _, p := range n.plugins {
			for _, dir := range p.Dirs {
				wishes = append(wishes, confdir.Wish{Dir: dir})
			}
		}
	}
	if l.renderer != nil {
		path := confdir.CleanPath(l.n.config.template.path)
		wishes = append(wishes, confdir.Wish{Dir: filepath.Dir(path), Name: filepath.Base(path)})
		for _, dir := range confdir.WithTargets(nil, path) {
			wishes = append(wishes, confdir.Wish{Dir: dir})
		}
	}
	return wishes
}
