// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package confdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/fsnotify/fsnotify"
)

// Notifier is the part of fsnotify's Watcher that is used, so that tests can
// stand in for the operating system.
type Notifier interface {
	Add(path string) error
	Remove(path string) error
	WatchList() []string
	Close() error
	Events() <-chan fsnotify.Event
	Errors() <-chan error
}

type fsnotifier struct{ *fsnotify.Watcher }

func (f fsnotifier) Events() <-chan fsnotify.Event { return f.Watcher.Events }
func (f fsnotifier) Errors() <-chan error          { return f.Watcher.Errors }

// NewNotifier returns fsnotify's.
func NewNotifier() (Notifier, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return fsnotifier{w}, nil
}

// Wish is a directory whose changes matter: all of them, or only those of one
// name in it.
type Wish struct {
	Dir  string
	Name string // empty: every name
}

// Watcher turns changes in a set of directories into "look again". Losing a
// watch, or never getting one, is a state of it and not an error.
//
// It belongs to one goroutine, except for Dirty.
type Watcher struct {
	open    func() (Notifier, error)
	backend Notifier
	pumped  chan struct{} // closed when the backend's pump has ended
	armed   map[string]os.FileInfo
	filter  atomic.Pointer[map[string][]string]
	// dirty holds one token while something has changed since it was last
	// taken out.
	dirty chan struct{}
}

// NewWatcher returns one that watches nothing yet. open is called for a notifier
// when one is needed.
func NewWatcher(open func() (Notifier, error)) *Watcher {
	return &Watcher{open: open, armed: make(map[string]os.FileInfo), dirty: make(chan struct{}, 1)}
}

// Arm watches what the wishes name, and nothing else. It returns whether a
// watch was added, in which case what was read before may be out of date, and
// why changes may go unnoticed until the next poll, if so.
func (w *Watcher) Arm(wishes []Wish) (added bool, failures error) {
	if err := w.ensure(); err != nil {
		return false, err
	}
	wanted := gather(wishes)
	filter := make(map[string][]string, len(wanted))
	for _, d := range wanted {
		filter[d.path] = d.names
	}
	// The filter is in place before a new watch can bring an event.
	w.filter.Store(&filter)
	listed := w.backend.WatchList()
	for path, info := range w.armed {
		if slices.ContainsFunc(wanted, func(d directory) bool { return d.path == path && os.SameFile(d.info, info) }) &&
			slices.Contains(listed, path) {
			continue
		}
		// Not wanted, replaced by another directory of that name, or dropped
		// by the kernel. Removing what is not there is harmless.
		_ = w.backend.Remove(path)
		delete(w.armed, path)
	}
	for _, d := range wanted {
		if w.armed[d.path] != nil {
			continue
		}
		if err := w.backend.Add(d.path); err != nil {
			failure := fmt.Errorf("cannot watch %s: %w", d.path, err)
			if failures != nil {
				// On one line, unlike errors.Join: it ends up in the log.
				failure = fmt.Errorf("%w; %w", failures, failure)
			}
			failures = failure
			continue
		}
		w.armed[d.path] = d.info
		added = true
	}
	return added, failures
}

// directory is a directory to watch, and the names in it that matter; an empty
// one stands for all.
type directory struct {
	path  string
	info  os.FileInfo
	names []string
}

// gather finds the directories that the wishes come down to. One that goes by
// several names appears once, because the kernel has one watch for it.
func gather(wishes []Wish) []directory {
	var dirs []directory
	for _, wi := range wishes {
		path, name, info := existing(wi)
		if info == nil {
			continue // not to be looked into
		}
		i := slices.IndexFunc(dirs, func(d directory) bool { return os.SameFile(d.info, info) })
		if i < 0 {
			dirs = append(dirs, directory{path: path, info: info})
			i = len(dirs) - 1
		}
		dirs[i].names = append(dirs[i].names, name)
	}
	return dirs
}

// ensure has a working backend in place, a new one if the last has ended.
func (w *Watcher) ensure() error {
	if w.backend != nil {
		select {
		case <-w.pumped:
			w.Close()
		default:
			return nil
		}
	}
	backend, err := w.open()
	if err != nil {
		return fmt.Errorf("cannot be notified of changes: %w", err)
	}
	w.backend = backend
	w.pumped = make(chan struct{})
	go w.pump(backend, w.pumped)
	return nil
}

// pump turns events into the dirty token, so that the backend never waits for
// the owner, who may be calling it. It ends when the backend is closed.
func (w *Watcher) pump(backend Notifier, done chan<- struct{}) {
	defer close(done)
	events, errs := backend.Events(), backend.Errors()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				w.mark()
				return
			}
			if w.relevant(e.Name) {
				w.mark()
			}
		case _, ok := <-errs:
			// Overflow or a failed read: something was missed, so look.
			w.mark()
			if !ok {
				return
			}
		}
	}
}

// relevant tells whether a change of that path can matter.
func (w *Watcher) relevant(path string) bool {
	filter := w.filter.Load()
	if filter == nil {
		return true
	}
	if _, self := (*filter)[path]; self {
		return true
	}
	names, ok := (*filter)[filepath.Dir(path)]
	if !ok {
		return true
	}
	return slices.Contains(names, "") || slices.Contains(names, filepath.Base(path))
}

// Dirty holds one token while something has changed since it was last taken out.
func (w *Watcher) Dirty() <-chan struct{} { return w.dirty }

func (w *Watcher) mark() {
	select {
	case w.dirty <- struct{}{}:
	default:
	}
}

// Close ends the watch. Arm begins it again.
func (w *Watcher) Close() {
	if w.backend == nil {
		return
	}
	_ = w.backend.Close()
	<-w.pumped // the backend closes its channels
	w.backend = nil
	clear(w.armed)
}

// existing turns a Wish for a directory that does not exist into one for the
// name that is missing in its nearest existing parent.
func existing(wi Wish) (dir, name string, info os.FileInfo) {
	dir, name = CleanPath(wi.Dir), wi.Name
	for {
		info, err := os.Stat(dir)
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return dir, name, info
		}
		dir, name = filepath.Dir(dir), filepath.Base(dir)
	}
}

// CleanPath is filepath.Clean by the kernel's rules: ".." behind a symlink is
// the parent of what the link leads to. Other links stay as they are, because
// where they lead can change.
func CleanPath(path string) string {
	clean := filepath.VolumeName(path)
	parts := strings.Split(filepath.ToSlash(path[len(clean):]), "/")
	if !slices.Contains(parts, "..") {
		return filepath.Clean(path)
	}
	if filepath.IsAbs(path) {
		clean += string(filepath.Separator)
	}
	for _, part := range parts {
		if part == ".." {
			if real, err := filepath.EvalSymlinks(clean); err == nil {
				clean = real
			}
		}
		clean = filepath.Join(clean, part)
	}
	return clean
}
