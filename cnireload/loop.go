// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/internal/oneline"
)

// loop keeps a network in step with the disk. It is the only writer of the
// network's snapshot, and all its state belongs to its one goroutine; processes
// that answer VERSION and STATUS run beside it.
type loop struct {
	n        *Network
	recipe   recipe
	scanner  *scanner
	prober   *prober
	renderer *renderer // nil without a template
	watcher  *watcher
	watching bool
	watch    WatchState
	named    []string // directories that the content last read names
	// enough is the path of the last file in use if no further one would be
	// used, and allAt when files behind it were last looked at.
	enough string
	allAt  time.Time

	waiters []waiter
	refused []refusal // to be told after the next look
	// inUse holds the last good content of each file in use.
	inUse      map[string]*network
	unchecked  bool   // it was put into use before all its plugins had answered
	generation string // keys of the networks in use
	known      map[string]*pluginHistory
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

// pluginHistory is what one plugin of a list in use was like before now.
type pluginHistory struct {
	good     PluginState
	badSince time.Time // zero while it is good
}

// loggedState is what the log was last told.
type loggedState struct {
	generation uint64
	cause      string
	judged     bool // there was a cause, or none, for the log
	watch      WatchState
	skipped    map[string]string
	stale      map[string]bool // by file
}

func newLoop(n *Network) *loop {
	l := &loop{
		n:       n,
		recipe:  n.config.recipe,
		scanner: newScanner(n.config.confDir),
		prober:  newProber(n.exec, n.cni, n.pace),
		watcher: newWatcher(n.notifier),
		watch:   n.Snapshot().Watch,
		inUse:   make(map[string]*network),
		known:   make(map[string]*pluginHistory),
		gates:   make(map[string]map[string]*gateHistory),
	}
	if n.config.template.path != "" {
		l.renderer = newRenderer(n.config.template, n.config.confDir)
	}
	return l
}

// run looks at the disk whenever something asks for it, until the network is
// closed.
func (l *loop) run() {
	ctx := l.n.ctx
	defer close(l.n.ended)
	defer l.prober.running.Wait()
	defer l.watcher.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		told := false // that something may have changed
		select {
		case <-ctx.Done():
			return
		case req := <-l.n.requests:
			l.accept(req)
			told = true
		case store := <-l.prober.results:
			store()
		case <-l.watcher.dirty:
			told = true
		case <-timer.C:
			if !l.watching && len(l.waiters) == 0 {
				continue // what is to be looked at will be asked for
			}
		}
		l.look(ctx, l.takeMore() || told)
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
// costs one look. It returns whether anything told of a change.
func (l *loop) takeMore() (told bool) {
	for {
		select {
		case req := <-l.n.requests:
			l.accept(req)
			told = true
		case store := <-l.prober.results:
			store()
		case <-l.watcher.dirty:
			told = true
		default:
			return told
		}
	}
}

// accept takes in a request. It is answered by the first look that leaves
// nothing pending, or after the next look if it fails.
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
		if err := l.renderer.render(req.cidrs, l.foreign()); err != nil {
			l.refused = append(l.refused, refusal{req.reply, err})
			return
		}
	}
	l.waiters = append(l.waiters, waiter{req.reply, time.Now().Add(settleBound)})
}

// foreign names the list in the directory that would be used before ours is
// there, if any.
func (l *loop) foreign() string {
	nets, _, _ := l.choose(l.scanner.scan(), time.Now())
	l.enough = ""
	return l.foreignIn(nets)
}

// foreignIn names the first list that is not ours.
func (l *loop) foreignIn(nets []*network) string {
	for _, n := range nets {
		if n.file != nil && n.file.path != l.renderer.target {
			return n.describe()
		}
	}
	return ""
}

// look compares the disk with what is in use and publishes what has changed.
// told is whether something told of a change, or it is only time.
func (l *loop) look(ctx context.Context, told bool) {
	now := time.Now()
	l.next = now.Add(l.n.pace.poll)
	if l.renderer != nil && l.renderer.changed() {
		l.renew(ctx, "")
	}
	// While the watch works and is silent, files that would not be used whatever
	// they hold are looked at now and then only: what could be outdated of them
	// is the reason why they are not in use.
	if spare := l.enough; !told && l.watch.Mode == WatchInotify && now.Before(l.allAt.Add(spareFor*l.n.pace.poll)) {
		l.scanner.spareAfter = spare
	}
	scan := l.scan()
	nets, skipped, loadErr := l.choose(scan, now)
	if spare := l.scanner.spareAfter; spare != "" && l.enough != spare {
		l.scanner.spareAfter = ""
		scan = l.scan()
		nets, skipped, loadErr = l.choose(scan, now)
	}
	if l.renderer != nil && scan.err == nil && l.renderer.due(l.foreignIn(nets)) && l.renew(ctx, l.foreignIn(nets)) {
		l.scanner.spareAfter = ""
		scan = l.scan()
		nets, skipped, loadErr = l.choose(scan, now)
	}
	if l.scanner.spareAfter == "" {
		l.allAt = now
	}
	l.scanner.spareAfter = ""
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
		s.Template = l.renderer.describe()
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
// rendered now. It is tried at each look and said once: the disk may be full for
// a while.
func (l *loop) renew(ctx context.Context, foreign string) bool {
	before := errorText(l.renderer.err)
	if err := l.renderer.renew(foreign); err != nil && err.Error() != before {
		l.n.logger(ctx).WithError(err).Warn("cni: conf_template cannot be rendered; what was rendered before stays")
	}
	return l.renderer.wanted == nil
}

// scan reads the directory with the watch in place before, so that no change
// falls in between.
func (l *loop) scan() dirScan {
	if !l.recipe.scan {
		return dirScan{}
	}
	if !l.watching {
		return l.scanner.scan()
	}
	added, err := l.watcher.arm(l.wishes())
	if added || err != nil {
		l.scanner.spareAfter = ""
	}
	scan := l.scanner.scan()
	// The content names more directories. What was read from one before it was
	// watched may be old: read again. Content that keeps naming new ones is
	// left to the poll.
	for range 3 {
		if !added && slices.Equal(l.named, scan.watch) {
			// All of it was watched before it was read. If a watch was added,
			// what came into a new directory before that has told nobody.
			break
		}
		l.named = scan.watch
		if added, err = l.watcher.arm(l.wishes()); !added {
			break
		}
		l.scanner.spareAfter = ""
		scan = l.scanner.scan()
	}
	l.watch = WatchState{Mode: WatchInotify}
	switch {
	case errors.Is(scan.err, fs.ErrNotExist):
		l.watch = WatchState{Mode: WatchWaiting, Cause: errorText(scan.err)}
	case err != nil:
		l.watch = WatchState{Mode: WatchPolling, Cause: errorText(err)}
	}
	return scan
}

// wishes names the directories whose changes matter.
func (l *loop) wishes() []wish {
	dir := cleanPath(l.n.config.confDir)
	wishes := []wish{
		{dir: dir},
		// The directory itself, or the link that leads to it, is an entry of
		// its parent.
		{dir: filepath.Dir(dir), name: filepath.Base(dir)},
	}
	for _, named := range l.named {
		wishes = append(wishes, wish{dir: named})
	}
	for _, bin := range l.n.config.binDirs {
		wishes = append(wishes, wish{dir: bin})
	}
	for _, n := range l.inUse {
		for _, p := range n.plugins {
			for _, dir := range p.dirs {
				wishes = append(wishes, wish{dir: dir})
			}
		}
	}
	if l.renderer != nil {
		path := cleanPath(l.renderer.path)
		wishes = append(wishes, wish{dir: filepath.Dir(path), name: filepath.Base(path)})
		for _, dir := range withTargets(nil, path) {
			wishes = append(wishes, wish{dir: dir})
		}
	}
	return wishes
}

// loopbackList is the list that brings up "lo", with go-cni's name and version.
var loopbackList = func() *libcni.NetworkConfigList {
	list, err := libcni.ConfListFromBytes([]byte(`{"cniVersion":"0.3.1","name":"cni-loopback","plugins":[{"type":"loopback"}]}`))
	if err != nil {
		panic(err) // a constant
	}
	return list
}()

// choose picks the lists to use by go-cni's rules: files in lexical order, the
// first ones that are good, up to the maximum. err says why there are too few.
func (l *loop) choose(scan dirScan, now time.Time) (nets []*network, skipped []SkippedFile, err error) {
	c := &l.n.config
	l.enough = ""
	if l.recipe.loopback {
		nets = append(nets, &network{attachment: attachment{list: loopbackList, ifName: "lo"}})
	}
	lists := len(nets)
	notNeeded := "" // the same for every file behind the last one in use
	limit := c.max()
	if l.recipe.all {
		limit = 0
	}
	switch {
	case !l.recipe.scan:
	case scan.err != nil && !errors.Is(scan.err, fs.ErrNotExist) && len(l.inUse) > 0:
		// The directory is there but cannot be read: not a reason to drop what
		// is in use.
		for _, prev := range l.n.Snapshot().Networks {
			if n := l.inUse[prev.File]; n != nil {
				nets = append(nets, l.stale(n.file, n.ifName, scan.err, now))
			}
		}
	default:
		for _, f := range scan.files {
			use := f
			prev := l.inUse[f.path]
			if f.err != nil {
				if prev == nil || errors.Is(f.err, fs.ErrNotExist) {
					skipped = append(skipped, SkippedFile{File: f.path, Reason: f.err.Error()})
					continue
				}
				use = prev.file
			}
			i := len(nets) - lists
			switch {
			case c.networkName != "" && use.list.Name != c.networkName:
				skipped = append(skipped, SkippedFile{File: f.path, Reason: fmt.Sprintf("is network %q; network_name asks for %q", use.list.Name, c.networkName)})
				continue
			case limit > 0 && i >= limit:
				if notNeeded == "" {
					notNeeded = fmt.Sprintf("is not needed: max_conf_num = %d and %s sorts before it", limit, nets[len(nets)-1].file.path)
				}
				l.enough = nets[len(nets)-1].file.path
				skipped = append(skipped, SkippedFile{File: f.path, Reason: notNeeded})
				continue
			}
			ifName := fmt.Sprintf("%s%d", c.prefix, i)
			if f.err != nil {
				nets = append(nets, l.stale(use, ifName, f.err, now))
			} else {
				nets = append(nets, &network{attachment: attachment{list: use.list, ifName: ifName, dropIns: len(use.dropIns) > 0}, file: use})
			}
		}
	}
	for _, n := range nets {
		n.plugins = pluginsOf(n.list)
	}
	if l.recipe.scan && len(nets) == lists {
		err = l.nothingToUse(scan, skipped)
	} else if len(nets) < c.minNetworks || len(nets) == 0 {
		err = fmt.Errorf("%d of the %d networks that are needed are loaded", len(nets), max(1, c.minNetworks))
	}
	return nets, skipped, err
}

// stale makes a network of content that is no longer what the disk holds.
func (l *loop) stale(f *confFile, ifName string, cause error, now time.Time) *network {
	n := &network{attachment: attachment{list: f.list, ifName: ifName, dropIns: len(f.dropIns) > 0}, file: f, staleError: cause, staleSince: now}
	if prev := l.inUse[f.path]; prev != nil && prev.staleError != nil {
		n.staleSince = prev.staleSince
	}
	return n
}

// nothingToUse says why no list of the directory can be used.
func (l *loop) nothingToUse(scan dirScan, skipped []SkippedFile) error {
	dir := l.n.config.confDir
	var err error
	switch {
	case errors.Is(scan.err, fs.ErrNotExist):
		err = fmt.Errorf("conf dir %s does not exist", dir)
	case scan.err != nil && dir == "":
		err = scan.err
	case scan.err != nil:
		err = fmt.Errorf("conf dir %s cannot be read: %w", dir, scan.err)
	case len(skipped) == 0:
		err = fmt.Errorf("no network config found in %s", dir)
	case len(skipped) == 1:
		err = fmt.Errorf("no usable network config in %s: %s %s", dir, skipped[0].File, skipped[0].Reason)
	default:
		err = fmt.Errorf("no usable network config in %s: %s %s (and %d more files)", dir, skipped[0].File, skipped[0].Reason, len(skipped)-1)
	}
	if l.renderer != nil && l.renderer.err != nil {
		err = fmt.Errorf("%w; %w", err, l.renderer.err)
	} else if l.renderer != nil && l.renderer.state == stateWaiting {
		err = fmt.Errorf("%w; conf_template %s is %s", err, l.renderer.path, l.renderer.state)
	}
	return err
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
	maps.DeleteFunc(l.known, func(key string, _ *pluginHistory) bool { return !statuses[key] })
	if waiting == nil {
		maps.DeleteFunc(l.gates, func(set string, _ map[string]*gateHistory) bool { return set != l.gateSet })
	}
	return cause, waiting
}

// allowUpgrade passes over a problem of a plugin that was good before, for as
// long as an installer needs to put a new executable in the old one's place.
func (l *loop) allowUpgrade(key string, v *verdict, now time.Time) {
	h := l.known[key]
	switch {
	case v.Problem == nil:
		l.known[key] = &pluginHistory{good: v.PluginState}
	case v.final:
		// An executable that goes now is no longer that of a good plugin.
		delete(l.known, key)
	case h == nil:
	default:
		if h.badSince.IsZero() {
			h.badSince = now
		}
		if end := h.badSince.Add(l.n.pace.upgradeGrace); now.Before(end) {
			v.PluginState, v.next = h.good, end
		} else {
			delete(l.known, key)
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

// lastsOver tells whether the networks in use can stay while new ones are being
// checked: not if the file of one is gone.
func (l *loop) lastsOver(scan dirScan) bool {
	for path := range l.inUse {
		if f := scan.file(path); f == nil && (scan.err == nil || errors.Is(scan.err, fs.ErrNotExist)) ||
			f != nil && errors.Is(f.err, fs.ErrNotExist) {
			return false
		}
	}
	return true
}

// publish puts a snapshot in place, unless nothing in it is new.
func (l *loop) publish(ctx context.Context, s *Snapshot, nets []*network, now time.Time) {
	clear(l.inUse)
	var keys []string
	for _, n := range nets {
		keys = append(keys, n.key())
		if n.file != nil {
			l.inUse[n.file.path] = n
		}
	}
	previous := l.n.Snapshot()
	s.Generation, s.LoadedAt, s.Failures = previous.Generation, previous.LoadedAt, previous.Failures
	if failure := s.failure(); failure != "" && failure != previous.failure() {
		s.Failures++
	}
	if key := strings.Join(keys, "\x01"); key != l.generation && len(l.inUse) > 0 {
		l.generation = key
		s.Generation++
		s.LoadedAt = now
	} else if len(l.inUse) == 0 {
		l.generation = ""
	}
	digest := s.digest()
	if digest == l.published && slices.Equal(s.Skipped, previous.Skipped) {
		return
	}
	l.published = digest
	l.n.snapshot.Store(s)
	close(previous.superseded)
	l.report(ctx, s)
}

// failure names what keeps the disk's content from being used, if anything.
func (s *Snapshot) failure() string {
	failure := errorText(s.LoadError)
	for _, n := range s.Networks {
		if n.StaleError != nil {
			failure += "\x00" + n.File + "\x00" + n.StaleError.Error()
		}
	}
	return failure
}

// digest names everything in the snapshot that somebody could notice, except for
// the skipped files, of which there can be many.
func (s *Snapshot) digest() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d\x00%v\x00%v\x00%v\x00", s.Generation, s.Cause, s.LoadError, s.Watch)
	for _, n := range s.Networks {
		fmt.Fprintf(&b, "%s\x00%s\x00%s\x00%v\x00%v\x00%v\x01", n.Name, n.File, n.SHA256, n.DropIns, n.StaleError, n.Plugins)
	}
	if s.Template != nil {
		fmt.Fprintf(&b, "%v", *s.Template)
	}
	fmt.Fprintf(&b, "%v", s.Gates)
	return b.String()
}

// logger names the runtime handler, if it has a network of its own.
func (n *Network) logger(ctx context.Context) *log.Entry {
	if n.config.handler == "" {
		return log.G(ctx)
	}
	return log.G(ctx).WithField("handler", n.config.handler)
}

// report logs one line for each transition.
func (l *loop) report(ctx context.Context, s *Snapshot) {
	logger := l.n.logger(ctx)
	skipped := make(map[string]string, len(s.Skipped))
	fresh := 0
	for _, f := range s.Skipped {
		skipped[f.File] = f.Reason
		if l.logged.skipped[f.File] == f.Reason {
			continue
		}
		if fresh++; fresh <= maxSkippedLines {
			logger.Infof("cni: file not in use: %s %s", f.File, oneline.Of(f.Reason))
		}
	}
	if more := fresh - maxSkippedLines; more > 0 {
		logger.Infof("cni: %d more files of %s are not in use", more, s.ConfDir)
	}
	if s.Watch != l.logged.watch {
		if s.Watch.Mode == WatchInotify {
			logger.Infof("cni: watching %s", s.ConfDir)
		} else {
			logger.Warnf("cni: %s for changes of %s: %s", s.Watch.Mode, s.ConfDir, s.Watch.Cause)
		}
	}
	if s.Generation != l.logged.generation {
		for _, n := range s.Networks {
			if n.File != "" {
				logger.Infof("cni: network %q in use from %s, sha256 %.12s, generation %d", n.Name, n.File, n.SHA256, s.Generation)
			}
		}
	}
	cause := errorText(s.Cause)
	var waits *waitingError
	waiting := errors.As(s.Cause, &waits)
	switch {
	case waiting:
		// The answer, or its absence, is logged: the question is asked at each
		// start.
		cause = l.logged.cause
	case cause == l.logged.cause && l.logged.judged:
	case cause == "":
		logger.Info("cni: network ready")
	default:
		logger.Warnf("cni: network not ready: %s", oneline.Of(cause))
	}
	l.logged = loggedState{generation: s.Generation, cause: cause, judged: l.logged.judged || !waiting, watch: s.Watch, skipped: skipped, stale: l.logged.stale}
}

// reportStale logs that a file in use has turned bad, unless that passes within
// a second: a file that is rewritten in place is empty for a moment.
func (l *loop) reportStale(ctx context.Context, s *Snapshot, now time.Time) {
	stale := make(map[string]bool)
	for _, n := range s.Networks {
		if n.StaleError == nil {
			continue
		}
		due := n.StaleSince.Add(staleSilence)
		switch {
		case l.logged.stale[n.File]:
		case now.Before(due):
			if due.Before(l.next) {
				l.next = due
			}
			continue
		default:
			l.n.logger(ctx).Warnf("cni: %s %s; its last good content stays in use", n.File, oneline.Of(n.StaleError.Error()))
		}
		stale[n.File] = true
	}
	for file := range l.logged.stale {
		if !stale[file] {
			l.n.logger(ctx).Infof("cni: %s is no longer used with its last good content", file)
		}
	}
	l.logged.stale = stale
}

// spareFor is for how many polls files that cannot come into use are spared.
const spareFor = 12

// maxSkippedLines is how many files that are not in use are logged at a time.
const maxSkippedLines = 64

// staleSilence is how long a file in use may be bad before that is logged.
const staleSilence = time.Second
