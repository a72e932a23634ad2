// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"github.com/containernetworking/cni/libcni"
)

const (
	// maxTombstones bounds the removals that are owed at one time.
	maxTombstones = 256
	// firstReplay and lastReplay are the pauses before a removal that has
	// failed is tried again; each is twice the one before.
	firstReplay = 10 * time.Second
	lastReplay  = 10 * time.Minute
	// maxTombstone is the largest file read as a tombstone.
	maxTombstone = 4 * maxConfSize
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

	mu     sync.Mutex
	graves map[string]*mound
	wake   chan struct{} // holds a token when something was added
}

// mound is a grave and how its replays went. It is immutable but for what the
// lock of tombstones protects.
type mound struct {
	grave
	attempts int
	cause    string
	next     time.Time // not before
	closed   bool      // what DEL needs was missing at the last look
}

func newTombstones(dir, handler string) *tombstones {
	return &tombstones{dir: dir, handler: handler, graves: make(map[string]*mound), wake: make(chan struct{}, 1)}
}

var errTooMany = fmt.Errorf("%d removals are owed already, which is the limit", maxTombstones)

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
			err = writeFile(t.path(g.ID), b, 0o600)
		}
	}
	if err != nil {
		err = fmt.Errorf("cannot remember the removal of pod %s: %w", g.ID, err)
		t.mu.Lock()
		delete(t.graves, g.ID)
		t.mu.Unlock()
		return err
	}
	select {
	case t.wake <- struct{}{}:
	default:
	}
	return nil
}

// reserve takes a place for a grave before it is stored.
func (t *tombstones) reserve(g *grave) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.graves[g.ID] == nil && len(t.graves) >= maxTombstones {
		return errTooMany
	}
	t.graves[g.ID] = &mound{grave: *g, cause: g.Cause, next: time.Now().Add(firstReplay)}
	return nil
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
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.graves, id)
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

// load reads what an earlier process left, so that it is done now.
func (t *tombstones) load(ctx context.Context) {
	if t.dir == "" {
		return
	}
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.G(ctx).WithError(err).Warnf("cni: cannot read the removals that are owed in %s", t.dir)
		}
		return
	}
	for _, e := range entries {
		path := filepath.Join(t.dir, e.Name())
		if filepath.Ext(path) != ".json" {
			// What a crash left of a file that was being written.
			if info, err := e.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > time.Minute {
				_ = os.Remove(path)
			}
			continue
		}
		g, err := readGrave(path)
		if err != nil {
			log.G(ctx).WithError(err).Warn("cni: a removal that is owed cannot be read; remove the file when nothing of its pod is left")
			continue
		}
		if g.Handler != t.handler {
			continue
		}
		t.mu.Lock()
		if t.graves[g.ID] == nil {
			t.graves[g.ID] = &mound{grave: *g, cause: g.Cause}
		}
		t.mu.Unlock()
	}
}

func readGrave(path string) (*grave, error) {
	c := readBounded(path, time.Now(), maxTombstone)
	if c.err != nil {
		return nil, fmt.Errorf("%s %w", path, c.err)
	}
	var g grave
	if err := json.Unmarshal(c.bytes, &g); err != nil {
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
		// Where and in which form libcni keeps it is its own affair; a copy is
		// put back as it was.
		file := fmt.Sprintf("%s-%s-%s", a.list.Name, ns.id, a.ifName)
		if c := readBounded(filepath.Join(n.cacheDir(), file), time.Now(), maxTombstone/2); c.err == nil && json.Valid(c.bytes) {
			o.Cache, o.CacheFile = c.bytes, file
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

// replay tries the removals that are owed and whose time has come.
func (n *Network) replay(ctx context.Context) {
	for _, m := range n.tombstones.all() {
		if ctx.Err() != nil {
			return
		}
		attachments, err := m.attachments()
		if err != nil {
			n.tombstones.failed(m, err)
			continue
		}
		if n.running.busy(m.ID) {
			continue // or it would have to be done again
		}
		// A gate that is compiled into a plugin may have moved: DEL tells.
		if away := n.gateOfDel(ctx, attachments, GateEnforce); away != nil {
			n.tombstones.waits(m, away)
			continue
		}
		if !n.tombstones.due(m) {
			continue
		}
		f := n.removals.join(m.ID, func() error {
			n.turnstile.enter()
			defer n.turnstile.leave()
			return n.exhume(ctx, m, attachments)
		})
		<-f.done
		if f.err != nil && !errors.Is(f.err, ErrClosed) {
			n.tombstones.failed(m, f.err)
			log.G(ctx).WithError(f.err).Debugf("cni: the removal of pod %s is still owed", m.ID)
		}
	}
}

// exhume does a removal that is owed.
func (n *Network) exhume(ctx context.Context, m *mound, attachments []attachment) error {
	ns := &Namespace{id: m.ID, path: m.NetNS, args: m.Args, capabilityArgs: m.CapabilityArgs}
	if _, err := os.Stat(ns.path); err != nil {
		ns.path = "" // gone; DEL can do without (CNI spec 1.1, section 4, DEL)
	}
	m.restoreCache(n.cacheDir())
	_, err := n.detachAll(ctx, attachments, ns)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return err
	}
	n.tombstones.clear(m.ID)
	n.tried.forget(m.ID)
	log.G(ctx).Infof("cni: the removal of pod %s, owed since %s, is done", m.ID, m.Since.UTC().Format(time.RFC3339))
	return nil
}

func (m *mound) attachments() ([]attachment, error) {
	var attachments []attachment
	for _, o := range m.Networks {
		list, err := libcni.ConfListFromBytes(o.List)
		if err != nil {
			return nil, fmt.Errorf("tombstone of pod %s: %w", m.ID, err)
		}
		attachments = append(attachments, attachment{list: list, ifName: o.Interface})
	}
	return attachments, nil
}

// restoreCache puts back what libcni knew of the attachments, if that is gone.
func (m *mound) restoreCache(dir string) {
	for _, o := range m.Networks {
		if o.CacheFile == "" || strings.ContainsRune(o.CacheFile, filepath.Separator) {
			continue
		}
		path := filepath.Join(dir, o.CacheFile)
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && os.MkdirAll(dir, 0o700) == nil {
			// Without it plugins do without the result of ADD.
			_ = writeFile(path, o.Cache, 0o600)
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
