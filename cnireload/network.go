// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"golang.org/x/sync/singleflight"

	"github.com/cnireload/cnireload/cnireload/admission"
	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/gc"
	"github.com/cnireload/cnireload/cnireload/owed"
	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/oneline"
)

// Data types are go-cni's own, so that sandbox metadata written by either is
// read by the other.
type (
	Result          = gocni.Result
	Config          = gocni.Config
	IPConfig        = gocni.IPConfig
	PortMapping     = gocni.PortMapping
	IPRanges        = gocni.IPRanges
	BandWidth       = gocni.BandWidth
	DNS             = gocni.DNS
	ConfigResult    = gocni.ConfigResult
	ConfNetwork     = gocni.ConfNetwork
	NetworkConfList = gocni.NetworkConfList
	NetworkConf     = gocni.NetworkConf
)

// CNI is the method set of go-cni's interface of that name. Options differ in
// type, which is why code changes from one to the other by its import.
type CNI interface {
	// Setup attaches the network namespace at path to every network, in parallel.
	Setup(ctx context.Context, id string, path string, opts ...NamespaceOpts) (*Result, error)
	// SetupSerially does the same, one network after the other.
	SetupSerially(ctx context.Context, id string, path string, opts ...NamespaceOpts) (*Result, error)
	// Remove detaches the network namespace from every network.
	Remove(ctx context.Context, id string, path string, opts ...NamespaceOpts) error
	// Check tells whether the attachments still are as they should be.
	Check(ctx context.Context, id string, path string, opts ...NamespaceOpts) error
	// Load brings what is in use in line with the disk.
	Load(opts ...Opt) error
	// Status returns nil if pods can be attached, and otherwise why not.
	Status() error
	// GetConfig returns what is in use.
	GetConfig() *ConfigResult
}

var _ CNI = (*Network)(nil)

const (
	// startBound is how long Start waits for the first load.
	startBound = 2 * time.Second
	// closeBound is how long Close waits.
	closeBound = 5 * time.Second
	// loadBound is how long Load waits.
	loadBound = 30 * time.Second
)

// pace is how often things are looked at again.
type pace struct {
	// poll is how long a change that no event announced goes unnoticed.
	poll time.Duration
	// upgradeGrace is how long a plugin of a list in use may be missing or
	// broken before that counts: installers replace executables in two steps.
	upgradeGrace time.Duration
	// status is how often a list that implements STATUS is asked, which is as
	// often as the kubelet makes go-cni ask.
	status time.Duration
	// statusRetry is the same while the answer is "not ready", and how soon a
	// plugin that gave no answer is asked again.
	statusRetry time.Duration
	// gate is how often a closed gate is looked at.
	gate time.Duration
	// agent is how long a removal waits for an agent, at most.
	agent time.Duration
	// owed is how often the removals that are owed are looked at.
	owed time.Duration
	// gc is the first pause after a GC that did not finish.
	gc time.Duration
}

var defaultPace = pace{
	poll:         5 * time.Second,
	upgradeGrace: 15 * time.Second,
	status:       5 * time.Second,
	statusRetry:  time.Second,
	gate:         500 * time.Millisecond,
	agent:        30 * time.Second,
	owed:         time.Second,
	gc:           time.Minute,
}

// Network is the networks of one configuration directory. Its methods can be
// called concurrently; Status, Snapshot and GetConfig never wait.
type Network struct {
	config    config
	cni       *libcni.CNIConfig
	convert   resultConverter
	snapshot  atomic.Pointer[Snapshot]
	plugins   plugin.Exec
	removals  singleflight.Group // by pod
	pods      podStates
	owed      *owed.Store
	gateLooks singleflight.Group // by gate
	// uninstalled holds the types of plugins that are said to be so.
	uninstalled sync.Map
	admission   *admission.Limit

	// What tests replace between New and Start.
	exec     invoke.Exec // for VERSION and, through cni, everything else
	notifier func() (confdir.Notifier, error)
	// disproved holds the ids of closed gates without which an ADD succeeded.
	disproved atomic.Pointer[map[string]bool]
	pace      pace
	gc        *gc.Collector // and its Guard

	requests chan request
	ctx      context.Context // ends with Close
	cancel   func()
	start    sync.Once
	ended    chan struct{} // closed when the loop has ended
	keeping  sync.Once
	kept     chan struct{} // closed when keep has ended
	searched chan struct{} // closed when left-over plugins have been looked for
	made     time.Time
}

// New returns a network that has loaded nothing yet and runs nothing. Load or
// Start begin its work, Close ends it.
func New(opts ...Opt) (*Network, error) {
	c, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	convert, err := newResultConverter(c.prefix)
	if err != nil {
		return nil, err
	}
	n := &Network{
		config:    c,
		convert:   convert,
		notifier:  confdir.NewNotifier,
		pace:      defaultPace,
		requests:  make(chan request),
		ended:     make(chan struct{}),
		kept:      make(chan struct{}),
		searched:  make(chan struct{}),
		made:      time.Now(),
		admission: admission.New(),

		owed: owed.Open(c.owedDir, c.handler),
	}
	n.gc = n.newCollector()
	n.exec = &n.plugins
	n.cni = libcni.NewCNIConfigWithCacheDir(c.binDirs, c.cacheDir, n.exec)
	ctx, cancel := context.WithCancelCause(context.Background())
	n.ctx, n.cancel = ctx, func() { cancel(ErrClosed) }
	n.snapshot.Store(&Snapshot{
		Cause:     errLoading,
		LoadError: errLoading,
		ConfDir:   c.confDir,
		BinDirs:   c.binDirs,
		Watch:     WatchState{Mode: WatchPolling, Cause: "not started"},
		maxConf:   c.maxConf,
		prefix:    c.prefix,

		superseded: make(chan struct{}),
	})
	return n, nil
}

// Start loads the configuration and then follows the disk until Close. It
// returns when the first load is done, or after two seconds without it: a
// plugin that does not answer holds up nobody else.
func (n *Network) Start() {
	n.Prime()
	n.keeping.Do(func() { go n.keep() })
}

// Close ends all work in the background, and the plugins that belong to it.
// Calls to plugins for pods go on. It is safe to call more than once. It returns
// when the work has ended, or after five seconds: a disk that does not answer
// must not keep the caller from ending.
func (n *Network) Close() error {
	n.cancel()
	// A loop that was never started must not be started any more.
	n.start.Do(func() { close(n.ended) })
	n.keeping.Do(func() { close(n.kept); close(n.searched) })
	n.plugins.Processes.Close()
	defer n.owed.Close()
	bound := time.NewTimer(closeBound)
	defer bound.Stop()
	for _, work := range []chan struct{}{n.ended, n.kept} {
		select {
		case <-work:
		case <-bound.C:
			return fmt.Errorf("cnireload: the work on conf dir %s has not ended after %s", n.config.confDir, closeBound)
		}
	}
	return nil
}

// Processes returns the processes of plugins that have not ended, oldest first.
// What a plugin runs by itself is not among them, unless it has outlived the
// plugin in a process group of its own.
func (n *Network) Processes() []Process { return n.plugins.Processes.List() }

// Calls returns how many calls to plugins have ended, by kind, since New. What
// a plugin runs by itself, such as its IPAM, is not seen.
func (n *Network) Calls() map[Call]CallCount { return n.plugins.Calls.Counts() }

// What is said of plugins' calls and processes, see package plugin.
type (
	Call         = plugin.Call
	CallCount    = plugin.CallCount
	Process      = plugin.Process
	ProcessState = plugin.ProcessState
)

// States of a process, see package plugin.
const (
	ProcessRunning   = plugin.ProcessRunning
	ProcessAbandoned = plugin.ProcessAbandoned
	ProcessLeftOver  = plugin.ProcessLeftOver
)

// Load brings what is in use in line with the disk and returns when that is
// done. Options that say what to load, such as WithDefaultConf, replace those
// given before; without options it loads the same again. The error wraps
// ErrLoad and says why too few lists could be loaded; whether their plugins can
// be used is Status's to say.
func (n *Network) Load(opts ...Opt) error {
	var req request
	if len(opts) > 0 {
		var c config
		for _, o := range opts {
			if err := o(&c); err != nil {
				return loadError(err)
			}
		}
		req.recipe = &c.recipe
	}
	ctx, cancel := context.WithTimeout(n.ctx, loadBound)
	defer cancel()
	if err := n.request(ctx, req); err != nil {
		return loadError(err)
	}
	if err := n.Snapshot().LoadError; err != nil {
		return loadError(err)
	}
	return nil
}

// Snapshot returns what is known at this moment.
func (n *Network) Snapshot() *Snapshot { return n.snapshot.Load() }

// Status returns nil if pods can be attached. The error otherwise wraps
// ErrCNINotInitialized and names the first cause. It runs no plugin, takes no
// lock and reads no file.
func (n *Network) Status() error { return n.Snapshot().Err() }

// Admit waits until a pod can be attached, for as long as WithReadyWait says, and
// returns nil as soon as that is so. Otherwise it returns Status's error. It
// gives up with ctx, and then says so too.
//
// It also waits for gates that are only reported, but when the time is up it
// leaves these to the plugin, which knows best.
//
// When many pods have failed, see [Network.Trial], one that has failed itself also
// waits for its turn, and for no longer either; then it is refused. pod tells pods
// from each other, by their UID for example. A network that does not wait tries
// every pod at once.
//
// A waiting call costs no goroutine beside the caller's.
func (n *Network) Admit(ctx context.Context, pod string) error {
	wait := time.NewTimer(n.config.readyWait)
	defer wait.Stop()
	held := false
	for {
		s := n.Snapshot()
		var place <-chan struct{} // if only that is waited for
		if s.admits() {
			if place = n.admission.Place(pod, s.Generation); place == nil || n.config.readyWait == 0 {
				return nil
			}
			if !held {
				held = true
				first, done := n.admission.Wait()
				defer done()
				if first {
					n.logger(n.ctx).Warn("cni: a pod is " + oneline.Of(n.admission.Err().Error()))
				}
			}
		}
		select {
		case <-place:
			n.admission.Take()
			return nil
		case <-s.superseded:
		case <-wait.C:
			if place != nil {
				return n.admission.Err()
			}
			return n.Status()
		case <-ctx.Done():
			if place != nil {
				return fmt.Errorf("%w while %w", context.Cause(ctx), n.admission.Err())
			}
			if err := n.Status(); err != nil {
				return fmt.Errorf("%w while waiting for the network: %w", context.Cause(ctx), err)
			}
			return fmt.Errorf("%w while waiting for the agent of a plugin", context.Cause(ctx))
		case <-n.ctx.Done():
			return context.Cause(n.ctx)
		}
	}
}

// Trial says that many pods have failed, so that those are tried again one after
// the other.
type Trial = admission.State

// Trial returns nil unless pods that have failed are tried one after the other.
func (n *Network) Trial() *Trial { return n.admission.State(n.Snapshot().Generation) }

// GetConfig returns the lists in use, loopback included.
func (n *Network) GetConfig() *ConfigResult { return n.Snapshot().Config() }

// Config returns the lists of the snapshot in go-cni's form.
func (s *Snapshot) Config() *ConfigResult {
	r := &ConfigResult{
		PluginDirs:       s.BinDirs,
		PluginConfDir:    s.ConfDir,
		PluginMaxConfNum: s.maxConf,
		Prefix:           s.prefix,
	}
	for _, a := range s.attachments {
		list := &NetworkConfList{Name: a.list.Name, CNIVersion: a.list.CNIVersion, Source: string(a.list.Bytes)}
		for _, p := range a.list.Plugins {
			list.Plugins = append(list.Plugins, &NetworkConf{Network: p.Network, Source: string(p.Bytes)})
		}
		r.Networks = append(r.Networks, &ConfNetwork{Config: list, IFName: a.ifName})
	}
	return r
}

// request asks the loop for something.
type request struct {
	recipe *recipe  // what to load from now on
	watch  bool     // follow the disk from now on
	cidrs  []string // render the template for these
	reply  chan error
}

// request hands req to the loop, which it starts if need be, and waits until it
// is done.
func (n *Network) request(ctx context.Context, req request) error {
	// Making the loop reads the template's record: not here, others wait.
	n.start.Do(func() { go func() { newLoop(n).run() }() })
	req.reply = make(chan error, 1)
	select {
	case n.requests <- req:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-n.ended:
		return ErrClosed
	}
	select {
	case err := <-req.reply:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-n.ended:
		return ErrClosed
	}
}
