// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/diskfile"
)

const (
	// maxTombstones bounds the removals that are owed at one time, by all
	// networks that keep them in one directory.
	maxTombstones = 256
	// maxOfFailed is how many of them may be of pods whose ADD had failed: these
	// come by the dozen a minute while an API server is away, and are not to keep
	// pods that ran from being let go.
	maxOfFailed = maxTombstones / 2
	// maxOwedAge is how long a removal is owed. By then its agent, or what the
	// plugin kept, is gone for good.
	maxOwedAge = 24 * time.Hour
	// maxRetries is how many removals that are owed are tried beside each other.
	maxRetries = 4
	// firstReplay and lastReplay are the pauses before a removal that has
	// failed is tried again; each is twice the one before.
	firstReplay = 10 * time.Second
	lastReplay  = 10 * time.Minute
	// maxTombstone is the largest file read as a tombstone.
	maxTombstone = 4 * confdir.MaxSize
)

// Tombstone is the removal of a pod from its networks that could not be done
// while the pod existed. It is not changed after it was made.
type Tombstone struct {
	ID       string
	Networks []string
	// Since is when the pod was let go.
	Since time.Time
	// Cause is why the removal failed the last time.
	Cause string
	// Attempts counts the tries since, in this process.
	Attempts int
}

// grave is a tombstone with what is needed to do the removal, as it is stored.
type grave struct {
	Handler        string            `json:"handler"`
	ID             string            `json:"id"`
	NetNS          string            `json:"netns"`
	Args           map[string]string `json:"args,omitempty"`
	CapabilityArgs map[string]any    `json:"capabilityArgs,omitempty"`
	Networks       []owed            `json:"networks"`
	Since          time.Time         `json:"since"`
	Cause          string            `json:"cause"`
	// Released is whether the caller was told that the pod is removed. If not,
	// it may ask again.
	Released bool `json:"released"`
}

// owed is a network that a pod is to be removed from.
type owed struct {
	Interface string          `json:"interface"`
	List      json.RawMessage `json:"list"`
	// Cache is libcni's cache entry, which has the result of ADD; empty when
	// there was none.
	Cache     json.RawMessage `json:"cache,omitempty"`
	CacheFile string          `json:"cacheFile,omitempty"`
}

// tombstones keeps what is owed on disk, one file for each pod, where it
// survives restarts. The lock is not held while a file is written.
type tombstones struct {
	dir     string // empty: nothing is kept
	handler string
	shared  *owedDir

	loading sync.Once
	loaded  chan struct{} // closed when what was stored is known
	closing sync.Once

	mu     sync.Mutex
	graves map[string]*mound
	wake   chan struct{} // holds a token when something was added, or a retry has ended
}

// mound is a grave and how its replays went. It is immutable but for what the
// lock of tombstones protects.
type mound struct {
	grave
	attempts int
	cause    string
	next     time.Time // not before
	closed   bool      // what DEL needs was missing at the last look
	trying   bool      // a retry is under way
	lists    func() ([]attachment, error)
}

// owedDir is what the networks of this process share that keep what they owe in
// one directory.
type owedDir struct {
	mu       sync.Mutex
	handlers map[string]int  // networks of each runtime handler
	places   map[string]bool // by pod, whether its ADD had failed
	trying   bool            // a removal of a pod whose ADD had failed
	next     time.Time       // for these: not before
}

var owedDirs = struct {
	sync.Mutex
	byPath map[string]*owedDir
}{byPath: make(map[string]*owedDir)}

// defaultHandlers are the names of the network that serves every runtime handler
// which has none of its own.
var defaultHandlers = []string{"", "default"}

func newTombstones(dir, handler string) *tombstones {
	t := &tombstones{dir: dir, handler: handler, graves: make(map[string]*mound), wake: make(chan struct{}, 1), loaded: make(chan struct{})}
	owedDirs.Lock()
	defer owedDirs.Unlock()
	if t.shared = owedDirs.byPath[dir]; t.shared == nil {
		t.shared = &owedDir{handlers: make(map[string]int), places: make(map[string]bool)}
		if dir != "" {
			owedDirs.byPath[dir] = t.shared
		}
	}
	t.shared.handlers[handler]++
	return t
}

// close gives up the network's part in the directory.
func (t *tombstones) close() {
	t.closing.Do(func() {
		t.mu.Lock()
		ids := slices.Collect(maps.Keys(t.graves))
		t.mu.Unlock()
		owedDirs.Lock()
		defer owedDirs.Unlock()
		d := t.shared
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, id := range ids {
			delete(d.places, id)
		}
		if d.handlers[t.handler]--; d.handlers[t.handler] == 0 {
			delete(d.handlers, t.handler)
		}
		if len(d.handlers) == 0 && owedDirs.byPath[t.dir] == d {
			delete(owedDirs.byPath, t.dir)
		}
	})
}

// owns tells whether what a network of the handler has stored is this one's. The
// default network takes care of that of handlers which are no longer configured.
func (t *tombstones) owns(handler string) bool {
	if handler == t.handler {
		return true
	}
	t.shared.mu.Lock()
	defer t.shared.mu.Unlock()
	return slices.Contains(defaultHandlers, t.handler) && t.shared.handlers[handler] == 0
}

var errTooMany = fmt.Errorf("%d removals are owed already, which is the limit", maxTombstones)
var errTooManyFailed = fmt.Errorf("%d removals of pods whose ADD had failed are owed already, which is the limit", maxOfFailed)

// take takes a place for a pod.
func (d *owedDir) take(id string, failed bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.places[id]; !ok && len(d.places) >= maxTombstones {
		return errTooMany
	}
	if was := d.places[id]; failed && !was {
		count := 0
		for _, f := range d.places {
			if f {
				count++
			}
		}
		if count >= maxOfFailed {
			return errTooManyFailed
		}
	}
	d.places[id] = failed
	return nil
}

func (d *owedDir) leave(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.places, id)
}

// turn tells whether a removal of a pod whose ADD had failed may be tried now:
// one at a time, and after one that has failed not before the pace has passed.
// It ends with done.
func (d *owedDir) turn() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.trying || time.Now().Before(d.next) {
		return false
	}
	d.trying = true
	return true
}

func (d *owedDir) done(failed bool, pace time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trying = false
	if failed {
		d.next = time.Now().Add(pace)
	}
}

// bury stores a removal that is owed from now on.
func (t *tombstones) bury(g grave) error {
	if t.dir == "" {
		return errors.New("there is no place to remember it")
	}
	g.Handler = t.handler
	if err := t.reserve(&g); err != nil {
		return err
	}
	b, err := json.MarshalIndent(g, "", "  ")
	if err == nil {
		if err = os.MkdirAll(t.dir, 0o700); err == nil {
			err = diskfile.Write(t.path(g.ID), b, 0o600)
		}
	}
	if err != nil {
		err = fmt.Errorf("cannot remember the removal of pod %s: %w", g.ID, err)
		t.drop(g.ID)
		return err
	}
	t.lookAgain()
	return nil
}

// lookAgain has what is owed looked at now.
func (t *tombstones) lookAgain() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// reserve takes a place for a grave before it is stored.
func (t *tombstones) reserve(g *grave) error {
	if err := t.shared.take(g.ID, !g.Released); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.graves[g.ID] = newMound(g, time.Now().Add(firstReplay))
	return nil
}

func newMound(g *grave, next time.Time) *mound {
	return &mound{grave: *g, cause: g.Cause, next: next, lists: sync.OnceValues(g.attachments)}
}

// drop forgets a grave.
func (t *tombstones) drop(id string) {
	t.mu.Lock()
	delete(t.graves, id)
	t.mu.Unlock()
	t.shared.leave(id)
}

func (t *tombstones) path(id string) string { return filepath.Join(t.dir, url.PathEscape(id)+".json") }

// clear forgets the removal of a pod, which is done.
func (t *tombstones) clear(id string) {
	if !t.has(id) {
		return
	}
	if err := os.Remove(t.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.L.WithError(err).Warnf("cni: the removal of pod %s is done but cannot be forgotten, and will be done again", id)
	}
	t.drop(id)
}

func (t *tombstones) has(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.graves[id] != nil
}

// released tells whether the pod's removal is owed and its caller was told that
// it is done.
func (t *tombstones) released(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.graves[id]
	return m != nil && m.Released
}

// load has what an earlier process left read, so that it is done now, and waits
// until that is known, for a moment: a disk may not answer.
func (t *tombstones) load(ctx context.Context) {
	t.loading.Do(func() {
		go func() {
			defer close(t.loaded)
			t.read(context.WithoutCancel(ctx))
		}()
	})
	select {
	case <-t.loaded:
		return
	default:
	}
	bound := time.NewTimer(startBound)
	defer bound.Stop()
	select {
	case <-t.loaded:
	case <-ctx.Done():
	case <-bound.C:
	}
}

func (t *tombstones) read(ctx context.Context) {
	for _, g := range t.stored(ctx, t.dir) {
		if !t.owns(g.Handler) {
			continue
		}
		// What is stored is not more than there may be, or was written by hand.
		_ = t.shared.take(g.ID, !g.Released)
		t.mu.Lock()
		if t.graves[g.ID] == nil {
			t.graves[g.ID] = newMound(g, time.Time{})
		}
		t.mu.Unlock()
	}
}

// stored reads what a directory holds.
func (t *tombstones) stored(ctx context.Context, dir string) []*grave {
	if t.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.G(ctx).WithError(err).Warnf("cni: cannot read the removals that are owed in %s", dir)
		}
		return nil
	}
	var graves []*grave
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if filepath.Ext(path) != ".json" {
			// What a crash left of a file that was being written.
			if info, err := e.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > time.Minute {
				_ = os.Remove(path)
			}
			continue
		}
		g, err := readGrave(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // done meanwhile
		}
		if err != nil {
			log.G(ctx).WithError(err).Warn("cni: a removal that is owed cannot be read; remove the file when nothing of its pod is left")
			continue
		}
		graves = append(graves, g)
	}
	return graves
}

func readGrave(path string) (*grave, error) {
	c := diskfile.Read(path, time.Now(), maxTombstone)
	if c.Err != nil {
		return nil, fmt.Errorf("%s %w", path, c.Err)
	}
	var g grave
	if err := json.Unmarshal(c.Bytes, &g); err != nil {
		return nil, fmt.Errorf("%s cannot be parsed: %w", path, err)
	}
	if g.ID == "" || len(g.Networks) == 0 {
		return nil, fmt.Errorf("%s names no pod or no network", path)
	}
	return &g, nil
}

// list describes what is owed, oldest first.
func (t *tombstones) list() []Tombstone {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []Tombstone
	for _, m := range t.graves {
		d := Tombstone{ID: m.ID, Since: m.Since, Cause: m.cause, Attempts: m.attempts}
		for _, o := range m.Networks {
			d.Networks = append(d.Networks, o.name())
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b Tombstone) int {
		if c := a.Since.Compare(b.Since); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

func (o owed) name() string {
	var list struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(o.List, &list)
	return list.Name
}

// all returns what is owed, oldest first.
func (t *tombstones) all() []*mound {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []*mound
	for _, m := range t.graves {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b *mound) int { return a.Since.Compare(b.Since) })
	return all
}

// Tombstones returns the removals that are owed, oldest first.
func (n *Network) Tombstones() []Tombstone { return n.tombstones.list() }

// grave makes a tombstone of a removal.
func (n *Network) grave(ns *Namespace, attachments []attachment, cause error, released bool) grave {
	g := grave{
		ID:             ns.id,
		NetNS:          ns.path,
		Args:           ns.args,
		CapabilityArgs: ns.capabilityArgs,
		Since:          time.Now(),
		Cause:          cause.Error(),
		Released:       released,
	}
	for _, a := range attachments {
		o := owed{Interface: a.ifName, List: json.RawMessage(a.forCache().Bytes)}
		// Plugins want the result of ADD, and the cache may be on a tmpfs.
		file := a.cacheFile(ns.id)
		if c := diskfile.Read(filepath.Join(n.cacheDir(), file), time.Now(), maxTombstone/2); c.Err == nil && json.Valid(c.Bytes) {
			o.Cache, o.CacheFile = c.Bytes, file
		}
		g.Networks = append(g.Networks, o)
	}
	return g
}

func (n *Network) cacheDir() string {
	dir := n.config.cacheDir
	if dir == "" {
		dir = libcni.CacheDir
	}
	return filepath.Join(dir, "results")
}

// replay begins to try the removals that are owed and whose time has come, some
// beside each other: one that hangs does not hold up the others. last is the look
// of the time before.
func (n *Network) replay(ctx context.Context) {
	look := n.newLook(n.retries.look)
	n.retries.look = look
	for _, m := range n.tombstones.all() {
		if ctx.Err() != nil {
			return
		}
		if n.tombstones.trying(m) || n.plugins.Processes.Busy(m.ID) {
			continue // or it would have to be done again
		}
		attachments, err := m.lists()
		if time.Since(m.Since) > maxOwedAge {
			n.giveUp(ctx, m, attachments)
			continue
		}
		if err != nil {
			n.tombstones.failed(m, err)
			continue
		}
		// A gate that is compiled into a plugin may have moved: DEL tells.
		if away := look.closed(ctx, attachments, true); away != nil {
			n.tombstones.waits(m, away)
			continue
		}
		if !n.tombstones.due(m) {
			continue
		}
		n.retry(ctx, m, attachments)
	}
}

// retries are the removals that are being tried again. All but what runs is the
// keeping goroutine's.
type retries struct {
	look    *look
	slots   chan struct{} // holds a token for each that is under way
	running sync.WaitGroup
}

// retry begins to try one removal again, if there is room for it now.
func (n *Network) retry(ctx context.Context, m *mound, attachments []attachment) {
	select {
	case n.retries.slots <- struct{}{}:
	default:
		return
	}
	failedADD := !m.Released
	if failedADD && !n.tombstones.shared.turn() {
		<-n.retries.slots
		return
	}
	n.tombstones.try(m, true)
	n.retries.running.Go(func() {
		f := n.removals.join(m.ID, func() error {
			n.turnstile.enter()
			defer n.turnstile.leave()
			return n.exhume(ctx, m, attachments)
		})
		err := ErrClosed // if it is a caller's own that goes on after Close
		select {
		case <-f.done:
			err = f.err
		case <-ctx.Done():
		}
		if err != nil && !errors.Is(err, ErrClosed) {
			n.tombstones.failed(m, err)
			log.G(ctx).WithError(err).Debugf("cni: the removal of pod %s is still owed", m.ID)
		}
		n.tombstones.try(m, false)
		if failedADD {
			n.tombstones.shared.done(err != nil, trialPace)
		}
		<-n.retries.slots
		n.tombstones.lookAgain() // there is room for the next one
	})
}

// exhume does a removal that is owed, with the lists that it was stored with.
func (n *Network) exhume(ctx context.Context, m *mound, attachments []attachment) error {
	ns := m.namespace()
	if !isNamespace(ns.path) {
		ns.path = "" // gone; DEL can do without (CNI spec 1.1, section 4, DEL)
	}
	m.restoreCache(n.cacheDir())
	r := n.detachAll(ctx, attachments, ns, plugin.Bound("DEL"), true)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err := r.err(); err != nil {
		return err
	}
	n.tombstones.clear(m.ID)
	n.forget(m.ID)
	log.G(ctx).Infof("cni: the removal of pod %s, owed since %s, is done", m.ID, m.Since.UTC().Format(time.RFC3339))
	return nil
}

// giveUp drops a removal that has been owed for too long.
func (n *Network) giveUp(ctx context.Context, m *mound, attachments []attachment) {
	log.G(ctx).Warnf("cni: the removal of pod %s, owed since %s, is given up; what its plugins hold for it may have to be freed by hand: %s",
		m.ID, m.Since.UTC().Format(time.RFC3339), m.cause)
	for _, a := range attachments {
		n.uncache(ctx, a, m.namespace())
	}
	n.tombstones.clear(m.ID)
}

func (g *grave) namespace() *Namespace {
	return &Namespace{id: g.ID, path: g.NetNS, args: g.Args, capabilityArgs: g.CapabilityArgs}
}

func (g *grave) attachments() ([]attachment, error) {
	var attachments []attachment
	for _, o := range g.Networks {
		list, err := libcni.ConfListFromBytes(o.List)
		if err != nil {
			return nil, fmt.Errorf("tombstone of pod %s: %w", g.ID, err)
		}
		attachments = append(attachments, attachment{list: list, ifName: o.Interface})
	}
	return attachments, nil
}

// restore returns the lists of a removal that is owed, and puts back what libcni
// knew of them; none if there is none, or it cannot be used.
func (t *tombstones) restore(id, cacheDir string) []attachment {
	t.mu.Lock()
	m := t.graves[id]
	t.mu.Unlock()
	if m == nil {
		return nil
	}
	attachments, err := m.lists()
	if err != nil {
		return nil
	}
	m.restoreCache(cacheDir)
	return slices.Clone(attachments)
}

// restoreCache puts back what libcni knew of the attachments, if that is gone.
func (g *grave) restoreCache(dir string) {
	for _, o := range g.Networks {
		if o.CacheFile == "" || strings.ContainsRune(o.CacheFile, filepath.Separator) {
			continue
		}
		path := filepath.Join(dir, o.CacheFile)
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && os.MkdirAll(dir, 0o700) == nil {
			// Without it plugins do without the result of ADD.
			_ = diskfile.Write(path, o.Cache, 0o600)
		}
	}
}

// due tells whether a removal is to be tried now: when its pause is over, or
// when what it needs has just come.
func (t *tombstones) due(m *mound) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m.closed {
		m.closed, m.next = false, time.Time{}
	}
	return !time.Now().Before(m.next)
}

func (t *tombstones) waits(m *mound, cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m.closed, m.cause = true, cause.Error()
}

func (t *tombstones) trying(m *mound) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return m.trying
}

func (t *tombstones) try(m *mound, begins bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m.trying = begins
}

func (t *tombstones) failed(m *mound, cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m.attempts++
	m.cause = cause.Error()
	pause := lastReplay
	if shift := m.attempts - 1; shift < 6 {
		pause = min(firstReplay<<shift, lastReplay)
	}
	m.next = time.Now().Add(pause)
}
