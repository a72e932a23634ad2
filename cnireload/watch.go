// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

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

// notifier is the part of fsnotify's Watcher that is used, so that tests can
// stand in for the operating system.
type notifier interface {
	Add(path string) error
	Remove(path string) error
	WatchList() []string
	Close() error
	events() <-chan fsnotify.Event
	errors() <-chan error
}

type fsnotifier struct{ *fsnotify.Watcher }

func (f fsnotifier) events() <-chan fsnotify.Event { return f.Events }
func (f fsnotifier) errors() <-chan error          { return f.Errors }

func newFSNotifier() (notifier, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return fsnotifier{w}, nil
}

// wish is a directory whose changes matter: all of them, or only those of one
// name in it.
type wish struct {
	dir  string
	name string // empty: every name
}

// watcher turns changes in a set of directories into "look again". Losing a
// watch, or never getting one, is a state of it and not an error.
//
// It belongs to one goroutine, except for dirty.
type watcher struct {
	open    func() (notifier, error)
	backend notifier
	pumped  chan struct{} // closed when the backend's pump has ended
	armed   map[string]os.FileInfo
	filter  atomic.Pointer[map[string][]string]
	// dirty holds one token while something has changed since it was last
	// taken out.
	dirty chan struct{}
}

func newWatcher(open func() (notifier, error)) *watcher {
	return &watcher{open: open, armed: make(map[string]os.FileInfo), dirty: make(chan struct{}, 1)}
}

// arm watches what the wishes name, and nothing else. It returns whether a
// watch was added, in which case what was read before may be out of date, and
// why changes may go unnoticed until the next poll, if so.
func (w *watcher) arm(wishes []wish) (added bool, failures error) {
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
func gather(wishes []wish) []directory {
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
func (w *watcher) ensure() error {
	if w.backend != nil {
		select {
		case <-w.pumped:
			w.close()
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
func (w *watcher) pump(backend notifier, done chan<- struct{}) {
	defer close(done)
	events, errs := backend.events(), backend.errors()
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
func (w *watcher) relevant(path string) bool {
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

func (w *watcher) mark() {
	select {
	case w.dirty <- struct{}{}:
	default:
	}
}

func (w *watcher) close() {
	if w.backend == nil {
		return
	}
	_ = w.backend.Close()
	<-w.pumped // the backend closes its channels
	w.backend = nil
	clear(w.armed)
}

// existing turns a wish for a directory that does not exist into one for the
// name that is missing in its nearest existing parent.
func existing(wi wish) (dir, name string, info os.FileInfo) {
	dir, name = cleanPath(wi.dir), wi.name
	for {
		info, err := os.Stat(dir)
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return dir, name, info
		}
		dir, name = filepath.Dir(dir), filepath.Base(dir)
	}
}

// cleanPath is filepath.Clean by the kernel's rules: ".." behind a symlink is
// the parent of what the link leads to. Other links stay as they are, because
// where they lead can change.
func cleanPath(path string) string {
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
