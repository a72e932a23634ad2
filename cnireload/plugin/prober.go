// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

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

	"github.com/cnireload/cnireload/internal/diskfile"
)

const (
	// maxProbes bounds the processes of one prober.
	maxProbes = 8
	// maxAnswers is how many executables' versions are remembered, at least.
	maxAnswers = 64
	// maxVersions is how many versions a plugin can list; there are seven.
	maxVersions = 100
)

const (
	// MaxFailures is how often in a row a plugin may give no answer, over the
	// grace at least, before that counts. A probe is not the plugin's
	// word: the machine may be out of processes for a moment, a disk slow, the
	// executable being written.
	MaxFailures = 3
	// MaxStuck bounds the processes of one executable and verb that do not die.
	// A question is never asked again while its own last process is there; this
	// is for lists that are rewritten meanwhile, each of which asks its own.
	MaxStuck = 4
)

// errObsolete is why a question is given up that nobody asks any more.
var errObsolete = errors.New("the list in use does not ask it any more")

// Pace is how often questions are asked again.
type Pace struct {
	// Version is how long after an answer to VERSION that is an error, or was
	// missing too often, the executable is asked again. A good answer holds for
	// as long as the executable is the same file.
	Version time.Duration
	// Status is how long after an answer to STATUS it is asked again.
	Status time.Duration
	// Retry is the same where there was no answer, or "not ready".
	Retry time.Duration
	// Grace is how long a plugin may give no answer before that counts.
	Grace time.Duration
}

// Answer is what is known of a plugin's answer to a question.
type Answer struct {
	// Heard is whether Versions and Err are a word of the plugin: its last one,
	// which can be that of an executable that was replaced since.
	Heard    bool
	Versions []string // VERSION: what it supports
	Err      error    // what it said; nil if all is well
	// Current is whether the executable that is there now was asked, and has
	// answered or failed to.
	Current bool
	// Silence is why there was no answer, if there was none since the last one.
	Silence error
	// Lost is whether there was none for so long that it counts.
	Lost bool
	// Next is when to look again; zero if a result will tell.
	Next time.Time
}

// Supported is the text of Versions, of a bounded length.
func (a Answer) Supported() string { return shorten(strings.Join(a.Versions, ", "), maxErrorText/4) }

// probe is a question that is asked of one executable again and again.
type probe struct {
	Answer     // but for Lost and Next
	verb, path string
	id         diskfile.ID // of the executable that is asked
	pending    bool
	cancel     context.CancelCauseFunc // of what is pending
	at         time.Time               // of the last outcome

	failures int       // in a row that brought no word; Silence is why the first did not
	since    time.Time // of the first of them
	// stuck is closed when the process of the last asking has ended, which was
	// killed and did not die; nil if it did.
	stuck <-chan struct{}
}

// Prober asks executables VERSION and STATUS and knows what they answered. It
// belongs to one goroutine, its owner. Plugins run in goroutines of their own, one
// at most for each question; their answers come by [Prober.Results].
type Prober struct {
	exec    invoke.Exec
	cni     *libcni.CNIConfig
	pace    Pace
	slots   chan struct{}
	results chan func() // run by the owner, these store an answer
	running sync.WaitGroup

	versions map[string]*probe // by path
	statuses map[string]*probe // by the caller's key
	stuck    map[string][]<-chan struct{}
}

// NewProber returns a prober that asks VERSION through exec and STATUS through cni.
func NewProber(exec invoke.Exec, cni *libcni.CNIConfig, pace Pace) *Prober {
	return &Prober{
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

// Results has functions that the owner must run for as long as anything is asked.
// Each stores what a question has brought.
func (p *Prober) Results() <-chan func() { return p.results }

// Wait waits until nothing is being asked. The contexts of all questions must
// have ended.
func (p *Prober) Wait() { p.running.Wait() }

// Go runs work in a goroutine. The owner gets what it returns by [Prober.Results],
// unless ctx has ended. It can be called concurrently.
func (p *Prober) Go(ctx context.Context, work func() (store func())) {
	p.running.Go(func() {
		store := work()
		select {
		case p.results <- store:
		case <-ctx.Done():
		}
	})
}

// inquire asks a question if it is due: a while after the last outcome, or at
// once if the executable is another one than was asked. What the earlier one
// said stands until there is a word of the new one, or until it has failed to
// give one for too long.
func (p *Prober) inquire(ctx context.Context, q *probe, info os.FileInfo, due func() bool, question func(context.Context) ([]string, error)) {
	if id := diskfile.Identify(info); !q.id.Same(id) {
		q.Current = false
		if q.pending {
			q.cancel(errObsolete)
			return
		}
		q.id, q.stuck, q.failures, q.Silence = id, nil, 0, nil
	}
	if q.pending || q.Current && !due() || isStuck(q.stuck) {
		return
	}
	q.stuck = nil
	key := q.verb + "\x00" + q.path
	p.stuck[key] = slices.DeleteFunc(p.stuck[key], func(gone <-chan struct{}) bool { return !isStuck(gone) })
	if n := len(p.stuck[key]); n >= MaxStuck {
		q.store(nil, fmt.Errorf("it is not asked, because %d of its processes do not die", n))
		return
	}
	asking, cancel := context.WithCancelCause(ctx)
	q.pending, q.cancel = true, cancel
	p.Go(ctx, func() func() {
		defer cancel(nil)
		versions, err := p.oneOfFew(asking, question)
		obsolete := errors.Is(context.Cause(asking), errObsolete)
		return func() {
			q.pending = false
			if abandoned := (*AbandonedError)(nil); errors.As(err, &abandoned) {
				q.stuck = abandoned.Gone
				p.stuck[key] = append(p.stuck[key], abandoned.Gone)
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
	q.Current, q.at = true, time.Now()
	if err == nil || Spoken(err) || VerbUnsupported(err, q.verb) {
		if !q.Heard || !sameCode(q.Err, err) {
			q.Err = err
		}
		q.Heard, q.Versions, q.failures, q.Silence = true, versions, 0, nil
		return
	}
	if q.failures == 0 {
		q.since, q.Silence = q.at, err
	}
	q.failures++
}

func sameCode(a, b error) bool {
	var ea, eb *types.Error
	return errors.As(a, &ea) && errors.As(b, &eb) && ea.Code == eb.Code
}

func (q *probe) answer(grace time.Duration, next time.Time) Answer {
	a := q.Answer
	a.Lost, a.Next = q.lost(grace), next
	return a
}

// exhausted tells whether the plugin has had its tries, and lost whether it has
// also had its time, so that its silence counts.
func (q *probe) exhausted() bool {
	return q.failures >= MaxFailures || q.failures > 0 && q.stuck != nil
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

// oneOfFew has a question wait for one of the slots. What [Prober.Go] runs does not
// wait: it must not stand behind plugins that hang.
func (p *Prober) oneOfFew(ctx context.Context, question func(context.Context) ([]string, error)) ([]string, error) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
		return question(ctx)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Version returns what is known of the answer to VERSION of the executable at path,
// whose stat data is info. It is asked if it never was, has changed, or failed a
// while ago.
func (p *Prober) Version(ctx context.Context, path string, info os.FileInfo) Answer {
	q := p.versions[path]
	if q == nil {
		q = &probe{verb: "VERSION", path: path}
		p.versions[path] = q
	}
	interval := func() time.Duration {
		if q.failures > 0 && q.failures < MaxFailures {
			return p.pace.Retry
		}
		return p.pace.Version
	}
	good := func() bool { return q.Err == nil && q.failures == 0 }
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
	var next time.Time
	if !good() {
		next = q.next(interval(), p.pace.Grace)
	}
	return q.answer(p.pace.Grace, next)
}

// Status returns what is known of the answer to STATUS of the executable at path,
// whose stat data is info, when it is run with the list, which has one plugin. It
// is asked again when that is due. key names the question, see [Prober.Forget].
func (p *Prober) Status(ctx context.Context, key, path string, info os.FileInfo, list *libcni.NetworkConfigList) Answer {
	q := p.statuses[key]
	if q == nil {
		q = &probe{verb: "STATUS", path: path}
		p.statuses[key] = q
	}
	interval := func() time.Duration {
		if q.failures > 0 || q.Err != nil && !VerbUnsupported(q.Err, "STATUS") {
			return p.pace.Retry
		}
		return p.pace.Status
	}
	p.inquire(ctx, q, info, func() bool { return time.Since(q.at) >= interval() }, func(ctx context.Context) ([]string, error) {
		return nil, p.cni.GetStatusNetworkList(ctx, list)
	})
	return q.answer(p.pace.Grace, q.next(interval(), p.pace.Grace))
}

// Forget gives up questions that are not among those given, the paths asked for
// VERSION and the keys asked for STATUS, and drops their answers. A question that
// nobody asks any more must not hold up another. An answer to VERSION holds for as
// long as the executable is the same file, so it is kept, up to a bound, for a list
// that comes back.
func (p *Prober) Forget(paths, statuses map[string]bool) {
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
