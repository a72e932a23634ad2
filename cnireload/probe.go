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
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cnireload/cnireload/cnireload/rules"
	"github.com/cnireload/cnireload/internal/diskfile"
)

const (
	// maxProbes bounds the VERSION and STATUS processes of one network.
	maxProbes = 8
	// maxAnswers is how many executables' versions are remembered, at least.
	maxAnswers = 64
	// maxVersions is how many versions a plugin can list; there are seven.
	maxVersions = 100
)

const (
	// maxFailures is how often in a row a plugin may give no answer, over the
	// upgrade grace at least, before that counts. A probe is not the plugin's
	// word: the machine may be out of processes for a moment, a disk slow, the
	// executable being written.
	maxFailures = 3
	// maxStuck bounds the processes of one executable and verb that do not die.
	// A question is never asked again while its own last process is there; this
	// is for lists that are rewritten meanwhile, each of which asks its own.
	maxStuck = 4
)

// errObsolete is why a question is given up that nobody asks any more.
var errObsolete = errors.New("the list in use does not ask it any more")

// answer is the outcome of a look at a gate.
type answer struct {
	at      time.Time
	pending bool
	asked   bool // whether at and err hold something
	err     error
}

// probe is a question that is asked of one executable again and again. It holds
// the plugin's last word, and how often it gave none since.
type probe struct {
	verb, path string
	id         diskfile.ID // of the executable that is asked
	current    bool        // whether there is an outcome, good or bad, of that executable
	pending    bool
	cancel     context.CancelCauseFunc // of what is pending
	at         time.Time               // of the last outcome

	heard    bool     // whether versions and err hold a word of the plugin
	versions []string // VERSION
	err      error    // what it said; nil if all is well

	failures int       // in a row that brought no word
	since    time.Time // of the first of them
	failed   error     // why the first of them did not
	// stuck is closed when the process of the last asking has ended, which was
	// killed and did not die; nil if it did.
	stuck <-chan struct{}
}

// prober knows what executables answered. The answers belong to one goroutine,
// the owner; the processes run in goroutines of their own, one at most for each
// question, and send to results.
type prober struct {
	exec    invoke.Exec
	cni     *libcni.CNIConfig
	pace    pace
	slots   chan struct{}
	results chan func() // run by the owner, these store an answer
	running sync.WaitGroup

	versions map[string]*probe // by path
	statuses map[string]*probe // by network key and index
	stuck    map[string][]<-chan struct{}
}

func newProber(exec invoke.Exec, cni *libcni.CNIConfig, pace pace) *prober {
	return &prober{
		exec:     exec,
		cni:      cni,
		pace:     pace,
		slots:    make(chan struct{}, maxProbes),
		results:  make(chan func()),
		versions: make(map[string]*probe),
		statuses: make(map[string]*probe),
		stuck:    make(map[string][]<-chan struct{}),
	}
}

// run runs work in a goroutine and has the owner run what it returns.
func (p *prober) run(ctx context.Context, work func() (store func())) {
	p.running.Go(func() {
		store := work()
		select {
		case p.results <- store:
		case <-ctx.Done():
		}
	})
}

// ask has a gate looked at.
func (p *prober) ask(ctx context.Context, a *answer, question func(context.Context) ([]string, error)) {
	a.pending = true
	p.run(ctx, func() func() {
		_, err := question(ctx)
		return func() { a.pending, a.asked, a.at, a.err = false, true, time.Now(), err }
	})
}

// inquire asks a question if it is due: a while after the last outcome, or at
// once if the executable is another one than was asked. What the earlier one
// said stands until there is a word of the new one, or until it has failed to
// give one for too long.
func (p *prober) inquire(ctx context.Context, q *probe, info os.FileInfo, due func() bool, question func(context.Context) ([]string, error)) {
	if id := diskfile.Identify(info); !q.id.Same(id) {
		q.current = false
		if q.pending {
			q.cancel(errObsolete)
			return
		}
		q.id, q.stuck, q.failures, q.failed = id, nil, 0, nil
	}
	if q.pending || q.current && !due() || isStuck(q.stuck) {
		return
	}
	q.stuck = nil
	key := q.verb + "\x00" + q.path
	p.stuck[key] = slices.DeleteFunc(p.stuck[key], func(gone <-chan struct{}) bool { return !isStuck(gone) })
	if n := len(p.stuck[key]); n >= maxStuck {
		q.store(nil, fmt.Errorf("it is not asked, because %d of its processes do not die", n))
		return
	}
	asking, cancel := context.WithCancelCause(ctx)
	q.pending, q.cancel = true, cancel
	p.run(ctx, func() func() {
		defer cancel(nil)
		versions, err := p.oneOfFew(asking, question)
		obsolete := errors.Is(context.Cause(asking), errObsolete)
		return func() {
			q.pending = false
			if abandoned := (*abandonedError)(nil); errors.As(err, &abandoned) {
				q.stuck = abandoned.gone
				p.stuck[key] = append(p.stuck[key], abandoned.gone)
			}
			if !obsolete {
				q.store(versions, err)
			}
		}
	})
}

// isStuck tells whether there is a process that has not ended.
func isStuck(gone <-chan struct{}) bool {
	if gone == nil {
		return false
	}
	select {
	case <-gone:
		return false
	default:
		return true
	}
}

// store notes an outcome. The text of an error stays that of its first time, for
// as long as its code is the same: one with a time or a counter in it would be
// another condition each time.
func (q *probe) store(versions []string, err error) {
	q.current, q.at = true, time.Now()
	if err == nil || spoken(err) || verbUnsupported(err, q.verb) {
		if !q.heard || !sameCode(q.err, err) {
			q.err = err
		}
		q.heard, q.versions, q.failures, q.failed = true, versions, 0, nil
		return
	}
	if q.failures == 0 {
		q.since, q.failed = q.at, err
	}
	q.failures++
}

func sameCode(a, b error) bool {
	var ea, eb *types.Error
	return errors.As(a, &ea) && errors.As(b, &eb) && ea.Code == eb.Code
}

// exhausted tells whether the plugin has had its tries, and lost whether it has
// also had its time, so that its silence counts.
func (q *probe) exhausted() bool {
	return q.failures >= maxFailures || q.failures > 0 && q.stuck != nil
}

func (q *probe) lost(grace time.Duration) bool {
	return q.exhausted() && time.Since(q.since) >= grace
}

// next is when to look at the question again, which is asked every interval; zero
// if its outcome will tell.
func (q *probe) next(interval, grace time.Duration) time.Time {
	var next time.Time
	if !q.pending && q.stuck == nil {
		next = q.at.Add(interval)
	}
	if end := q.since.Add(grace); q.exhausted() && time.Now().Before(end) && (next.IsZero() || end.Before(next)) {
		next = end
	}
	return next
}

// spoken tells whether an error is what the plugin itself said: an error object
// that it printed, with a code of its own (CNI spec 1.1, section 5). What libcni
// makes of other output has the code 0.
func spoken(err error) bool {
	var own *ownError
	var e *types.Error
	return errors.As(err, &e) && e.Code != types.ErrUnknown && !errors.As(err, &own)
}

// oneOfFew has a question that runs a process wait for one of the slots. Gates,
// which run none, must not wait behind plugins that hang.
func (p *prober) oneOfFew(ctx context.Context, question func(context.Context) ([]string, error)) ([]string, error) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
		return question(ctx)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// version returns what is known of the executable's answer to VERSION, asking if
// it was never asked, has changed, or failed a while ago. next is when to look
// again.
func (p *prober) version(ctx context.Context, path string, info os.FileInfo) (q *probe, next time.Time) {
	q = p.versions[path]
	if q == nil {
		q = &probe{verb: "VERSION", path: path}
		p.versions[path] = q
	}
	interval := func() time.Duration {
		if q.failures > 0 && q.failures < maxFailures {
			return p.pace.statusRetry
		}
		return p.pace.poll
	}
	good := func() bool { return q.err == nil && q.failures == 0 }
	p.inquire(ctx, q, info, func() bool { return !good() && time.Since(q.at) >= interval() }, func(ctx context.Context) ([]string, error) {
		info, err := invoke.GetVersionInfo(ctx, path, p.exec)
		if err != nil {
			return nil, err
		}
		versions := info.SupportedVersions()
		if len(versions) > maxVersions {
			return nil, fmt.Errorf("it lists %d versions", len(versions))
		}
		return versions, nil
	})
	if !good() {
		next = q.next(interval(), p.pace.upgradeGrace)
	}
	return q, next
}

// status returns what is known of the answer of one entry of a list to STATUS,
// asking again when that is due. next is when to look again.
func (p *prober) status(ctx context.Context, n *network, index int, pl rules.Plugin, path string, info os.FileInfo) (q *probe, next time.Time) {
	key := questionKey(n, index)
	q = p.statuses[key]
	if q == nil {
		q = &probe{verb: "STATUS", path: path}
		p.statuses[key] = q
	}
	interval := func() time.Duration {
		if q.failures > 0 || q.err != nil && !verbUnsupported(q.err, "STATUS") {
			return p.pace.statusRetry
		}
		return p.pace.status
	}
	p.inquire(ctx, q, info, func() bool { return time.Since(q.at) >= interval() }, func(ctx context.Context) ([]string, error) {
		return nil, p.cni.GetStatusNetworkList(ctx, &libcni.NetworkConfigList{
			Name:       n.list.Name,
			CNIVersion: n.list.CNIVersion,
			Plugins:    []*libcni.PluginConfig{pl.Conf},
		})
	})
	return q, q.next(interval(), p.pace.upgradeGrace)
}

// questionKey names the question of one plugin of a network for its STATUS.
func questionKey(n *network, index int) string { return fmt.Sprintf("%s\x00%d", n.key(), index) }

// forget gives up questions that neither the lists on disk nor those in use ask,
// so that they hold up no other, and drops their answers. What an executable
// answered to VERSION holds for as long as it is the same file, so it is kept, up
// to a bound, for a list that comes back; STATUS is about the moment.
func (p *prober) forget(paths, statuses map[string]bool) {
	for path, q := range p.versions {
		if !paths[path] && (q.pending || len(p.versions) > maxAnswers) {
			q.giveUp()
			delete(p.versions, path)
		}
	}
	for key, q := range p.statuses {
		if !statuses[key] {
			q.giveUp()
			delete(p.statuses, key)
		}
	}
}

func (q *probe) giveUp() {
	if q.pending {
		q.cancel(errObsolete)
	}
}

// verbUnsupported tells whether the answer to a verb of CNI 1.1 says that the
// plugin does not know it, which says nothing about readiness: an unknown
// command is error 4, a version without the verb error 1 (CNI spec 1.1, section
// 5; istio#53160).
func verbUnsupported(err error, verb string) bool {
	var e *types.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Code {
	case types.ErrInvalidEnvironmentVariables:
		return true
	case types.ErrIncompatibleCNIVersion:
		return strings.Contains(e.Msg, verb)
	}
	return strings.Contains(e.Msg, "unknown CNI_COMMAND")
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

// judge says whether a plugin of n can be used. checkVersion is false where
// readiness is only parsing.
//
// Until the plugin's first word nothing is known of it. go-cni waits for STATUS
// for as long as it takes, and then is not ready either, whatever the error was:
// no node that it would run is lost by waiting, as long as the question is asked
// again. It is, until there is an answer.
func (p *prober) judge(ctx context.Context, dirs []string, n *network, index int, checkVersion bool) verdict {
	pl := n.plugins[index]
	v := verdict{PluginState: PluginState{Role: pl.Role, Type: pl.Type, Counts: pl.Counts}}
	for _, dir := range slices.Backward(pl.Dirs) {
		if !slices.Contains(dirs, dir) {
			dirs = slices.Concat([]string{dir}, dirs)
		}
	}
	path, info, err := resolve(pl.Type, dirs, pl.Role == RolePlugin)
	if err != nil {
		v.Problem = err
		if n.file == nil && pl.Type == "loopback" {
			v.Problem = fmt.Errorf("%w; install it, or set use_internal_loopback = true", err)
		}
		return v
	}
	v.Path = path
	if checkVersion && pl.Counts {
		q, next := p.version(ctx, path, info)
		v.sooner(next)
		v.Versions = q.versions
		misanswers := func(err error) error {
			return fmt.Errorf("plugin %q (%s) mis-answers VERSION: %w", pl.Type, path, err)
		}
		first := !q.heard || !q.current && q.failures == 0
		switch {
		case first && q.failures == 0:
			v.pending = q.verb
			return v
		case q.lost(p.pace.upgradeGrace):
			v.Problem, v.final = misanswers(q.failed), true
		case first:
			v.Problem, v.pending = misanswers(q.failed), q.verb
		case q.err != nil:
			v.Problem = misanswers(q.err)
		case pl.Version != "" && !slices.Contains(q.versions, pl.Version):
			v.Problem = fmt.Errorf("plugin %q (%s) does not support cniVersion %s, only %s", pl.Type, path, pl.Version, shorten(strings.Join(q.versions, ", "), maxErrorText/4))
		}
		if v.Problem != nil {
			return v
		}
	}
	if pl.Conf != nil && hasNewVerbs(n.list.CNIVersion) {
		q, next := p.status(ctx, n, index, pl, path, info)
		v.sooner(next)
		silent := &statusError{plugin: pl.Type, path: path, err: q.failed}
		switch {
		case q.lost(p.pace.upgradeGrace):
			v.Status, v.Problem, v.final = "no answer", silent, true
		case !q.heard && q.failures == 0:
			v.pending = q.verb
		case !q.heard:
			v.Status, v.Problem, v.pending = "no answer", silent, q.verb
		case q.err == nil:
			v.Status = "ok"
		case verbUnsupported(q.err, "STATUS"):
			v.Status = "not supported"
		default:
			// Unlike a missing executable it is not given time: the plugin knows.
			v.Status = "not ready"
			v.Problem, v.final = &statusError{plugin: pl.Type, path: path, err: q.err}, true
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
	if te := (*types.Error)(nil); spoken(e.err) && errors.As(e.err, &te) {
		return fmt.Sprintf("plugin %q (%s) answers STATUS with code %d: %s", e.plugin, e.path, te.Code, te.Error())
	}
	return fmt.Sprintf("plugin %q (%s) does not answer STATUS: %v", e.plugin, e.path, e.err)
}
func (e *statusError) Unwrap() error { return e.err }
