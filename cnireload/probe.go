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
)

const (
	// maxProbes bounds the VERSION and STATUS processes of one network.
	maxProbes = 8
	// maxAnswers is how many executables' versions are remembered, at least.
	maxAnswers = 64
	// maxVersions is how many versions a plugin can list; there are seven.
	maxVersions = 100
)

// orOldest applies libcni's rule for a missing cniVersion.
func orOldest(v string) string {
	if v == "" {
		return "0.1.0"
	}
	return v
}

// answer is the outcome of asking one executable one thing.
type answer struct {
	id       fileID
	at       time.Time
	pending  bool
	asked    bool     // whether at, err and versions hold something
	versions []string // VERSION
	err      error
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

	versions map[string]*answer // by path
	statuses map[string]*answer // by network key and index
}

func newProber(exec invoke.Exec, cni *libcni.CNIConfig, pace pace) *prober {
	return &prober{
		exec:     exec,
		cni:      cni,
		pace:     pace,
		slots:    make(chan struct{}, maxProbes),
		results:  make(chan func()),
		versions: make(map[string]*answer),
		statuses: make(map[string]*answer),
	}
}

// ask runs question in a goroutine and has the owner store what it returns.
func (p *prober) ask(ctx context.Context, a *answer, question func(context.Context) ([]string, error)) {
	a.pending = true
	p.running.Go(func() {
		versions, err := question(ctx)
		select {
		case p.results <- func() {
			a.pending, a.asked, a.at = false, true, time.Now()
			a.versions, a.err = versions, err
		}:
		case <-ctx.Done():
		}
	})
}

// oneOfFew has a question that runs a process wait for one of the slots. Gates,
// which run none, must not wait behind plugins that hang.
func (p *prober) oneOfFew(question func(context.Context) ([]string, error)) func(context.Context) ([]string, error) {
	return func(ctx context.Context) ([]string, error) {
		select {
		case p.slots <- struct{}{}:
			defer func() { <-p.slots }()
			return question(ctx)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// version returns what the executable at path answered to VERSION, asking if it
// was never asked, has changed, or failed a while ago. ok is false while there
// is no answer yet.
func (p *prober) version(ctx context.Context, path string, info os.FileInfo) (versions []string, err error, ok bool) {
	id := newFileID(info)
	a := p.versions[path]
	if a == nil || !a.id.same(id) {
		a = &answer{id: id}
		p.versions[path] = a
	}
	if !a.pending && (!a.asked || a.err != nil && time.Since(a.at) >= p.pace.poll) {
		p.ask(ctx, a, p.oneOfFew(func(ctx context.Context) ([]string, error) {
			info, err := invoke.GetVersionInfo(ctx, path, p.exec)
			if err != nil {
				return nil, err
			}
			versions := info.SupportedVersions()
			if len(versions) > maxVersions {
				return nil, fmt.Errorf("it lists %d versions", len(versions))
			}
			return versions, nil
		}))
	}
	return a.versions, a.err, a.asked
}

// status returns the last answer of one entry of a list to STATUS, asking again
// when that is due. next is when it will be due.
func (p *prober) status(ctx context.Context, n *network, index int, pl plugin, info os.FileInfo) (ok bool, next time.Time, err error) {
	id := newFileID(info)
	key := fmt.Sprintf("%s\x00%d", n.key(), index)
	a := p.statuses[key]
	if a == nil || !a.id.same(id) {
		a = &answer{id: id}
		p.statuses[key] = a
	}
	interval := p.pace.status
	if a.err != nil && !verbUnsupported(a.err, "STATUS") {
		interval = p.pace.statusRetry
	}
	if !a.pending && (!a.asked || time.Since(a.at) >= interval) {
		single := &libcni.NetworkConfigList{
			Name:       n.list.Name,
			CNIVersion: n.list.CNIVersion,
			Plugins:    []*libcni.PluginConfig{pl.conf},
		}
		p.ask(ctx, a, p.oneOfFew(func(ctx context.Context) ([]string, error) {
			return nil, p.cni.GetStatusNetworkList(ctx, single)
		}))
	}
	if !a.pending {
		next = a.at.Add(interval)
	}
	return a.asked, next, a.err
}

// forget drops answers that no list in use needs any more. What an executable
// answered to VERSION holds for as long as it is the same file, so it is kept,
// up to a bound, for a list that comes back; STATUS is about the moment.
func (p *prober) forget(paths, statuses map[string]bool) {
	for path, a := range p.versions {
		if len(p.versions) > maxAnswers && !paths[path] && !a.pending {
			delete(p.versions, path)
		}
	}
	for key, a := range p.statuses {
		if !statuses[key] && !a.pending {
			delete(p.statuses, key)
		}
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
	pending bool      // an answer is being waited for
	next    time.Time // when to look again; zero if an event will tell
}

// judge says whether a plugin of n can be used. checkVersion is false where
// readiness is only parsing.
func (p *prober) judge(ctx context.Context, dirs []string, n *network, index int, checkVersion bool) verdict {
	pl := n.plugins[index]
	v := verdict{PluginState: PluginState{Role: pl.role, Type: pl.typ, Counts: pl.counts}}
	for _, dir := range slices.Backward(pl.dirs) {
		if !slices.Contains(dirs, dir) {
			dirs = slices.Concat([]string{dir}, dirs)
		}
	}
	path, info, err := resolve(pl.typ, dirs, pl.role == RolePlugin)
	if err != nil {
		v.Problem = err
		if n.file == nil && pl.typ == "loopback" {
			v.Problem = fmt.Errorf("%w; install it, or set use_internal_loopback = true", err)
		}
		return v
	}
	v.Path = path
	if checkVersion && pl.counts {
		versions, err, ok := p.version(ctx, path, info)
		v.Versions = versions
		switch {
		case !ok:
			v.pending = true
			return v
		case err != nil:
			v.Problem = fmt.Errorf("plugin %q (%s) mis-answers VERSION: %w", pl.typ, path, err)
		case pl.version != "" && !slices.Contains(versions, pl.version):
			v.Problem = fmt.Errorf("plugin %q (%s) does not support cniVersion %s, only %s", pl.typ, path, pl.version, shorten(strings.Join(versions, ", "), maxErrorText/4))
		}
		if v.Problem != nil {
			return v
		}
	}
	if pl.conf != nil && hasNewVerbs(n.list.CNIVersion) {
		ok, next, err := p.status(ctx, n, index, pl, info)
		v.next = next
		switch {
		case !ok:
			v.pending = true
		case err == nil:
			v.Status = "ok"
		case verbUnsupported(err, "STATUS"):
			v.Status = "not supported"
		default:
			v.Status = "not ready"
			v.Problem = &statusError{plugin: pl.typ, path: path, err: err}
		}
	}
	return v
}

// statusError is a plugin's own word that it is not ready. Unlike a missing
// executable it is not given time: the plugin knows.
type statusError struct {
	plugin, path string
	err          error
}

func (e *statusError) Error() string {
	var te *types.Error
	if errors.As(e.err, &te) {
		return fmt.Sprintf("plugin %q (%s) answers STATUS with code %d: %s", e.plugin, e.path, te.Code, te.Error())
	}
	return fmt.Sprintf("plugin %q (%s) does not answer STATUS: %v", e.plugin, e.path, e.err)
}
func (e *statusError) Unwrap() error { return e.err }
