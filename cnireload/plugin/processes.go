// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"
)

// ProcessState says how a plugin's process stands to this program.
type ProcessState string

const (
	// ProcessRunning: somebody waits for it.
	ProcessRunning ProcessState = "running"
	// ProcessAbandoned: it was killed, but has not ended, and nobody waits for
	// it any more. A process in uninterruptible sleep cannot end.
	ProcessAbandoned ProcessState = "abandoned"
	// ProcessLeftOver: a program that ran before this one started it. It is
	// killed when the bound of its verb has passed.
	ProcessLeftOver ProcessState = "left over"
)

// Process is a process of a plugin that has not ended.
type Process struct {
	Plugin string       `json:"plugin"`            // name of the executable
	Verb   string       `json:"verb"`              // as in CNI_COMMAND
	ID     string       `json:"sandbox,omitempty"` // as in CNI_CONTAINERID; empty for verbs without one
	PID    int          `json:"pid"`
	Since  time.Time    `json:"since"`
	State  ProcessState `json:"-"` // a report has a list for each
}

// leftOverCheck is how often processes that were found are looked at.
const leftOverCheck = time.Second

// evictGrace is how long a removal waits for the killed processes of its pod.
const evictGrace = time.Second

// Processes keeps track of plugins' processes. The zero value is ready for use, and
// it can be used concurrently. Its lock is never held during a call or while
// anything is read.
type Processes struct {
	mu        sync.Mutex
	processes map[*Tracked]struct{}
	timer     *time.Timer // of the next look at what was found; nil without
	closed    bool
}

// Tracked is a process that [Processes] keeps track of.
type Tracked struct {
	Process
	found *foundPlugin  // nil if it was started here
	gone  chan struct{} // closed when it has ended
}

// Begin notes that the plugin at path was started with environ. It is to be followed
// by End.
func (r *Processes) Begin(path string, environ []string, pid int) *Tracked {
	p := &Tracked{
		Process: Process{
			Plugin: filepath.Base(path),
			Verb:   verbOf(environ),
			ID:     containerOf(environ),
			PID:    pid,
			Since:  time.Now(),
			State:  ProcessRunning,
		},
		gone: make(chan struct{}),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(p)
	return p
}

// add notes a process; the lock is held.
func (r *Processes) add(p *Tracked) {
	if r.processes == nil {
		r.processes = make(map[*Tracked]struct{})
	}
	r.processes[p] = struct{}{}
}

// Abandon notes that nobody waits for a process any more.
func (r *Processes) Abandon(p *Tracked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.State = ProcessAbandoned
}

// End notes that a process has ended.
func (r *Processes) End(p *Tracked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.processes[p]; ok {
		delete(r.processes, p)
		close(p.gone)
	}
}

// adopt notes processes that were found, and looks after them until they have
// ended or the registry is closed.
func (r *Processes) adopt(processes []*Tracked) {
	if len(processes) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range processes {
		r.add(p)
	}
	r.schedule()
}

// schedule sees to the next look at what was found; the lock is held.
func (r *Processes) schedule() {
	if !r.closed && r.timer == nil {
		r.timer = time.AfterFunc(leftOverCheck, r.check)
	}
}

// check takes note of found processes that have ended, and ends those whose
// bound has passed.
func (r *Processes) check() {
	for _, p := range r.all(func(p *Tracked) bool { return p.found != nil }) {
		if !p.found.alive() {
			r.End(p)
		}
	}
	for _, p := range r.all(func(p *Tracked) bool {
		return p.found != nil && p.State == ProcessLeftOver && time.Since(p.Since) > Bound(p.Verb)
	}) {
		r.kill(p)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = nil
	for p := range r.processes {
		if p.found != nil {
			r.schedule()
			return
		}
	}
}

// kill kills a found process. If it can end, the next look finds it gone.
func (r *Processes) kill(p *Tracked) {
	logger := log.L.WithField("plugin", p.Plugin).WithField("pid", p.PID)
	if err := p.found.kill(); err != nil {
		logger.WithError(err).Warn("cni: a plugin that an earlier containerd left running cannot be killed")
		return
	}
	logger.Warnf("cni: killed %s for pod %s, which an earlier containerd left running since %s", p.Verb, p.ID, p.Since.UTC().Format(time.RFC3339))
	r.Abandon(p)
}

// all returns the processes for which ok is true, oldest first. ok must not
// block.
func (r *Processes) all(ok func(*Tracked) bool) []*Tracked {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*Tracked
	for p := range r.processes {
		if ok(p) {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b *Tracked) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.PID, b.PID))
	})
	return list
}

// List describes the processes that have not ended, oldest first.
func (r *Processes) List() []Process {
	processes := r.all(func(*Tracked) bool { return true })
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]Process, len(processes))
	for i, p := range processes {
		list[i] = p.Process
	}
	return list
}

// Evict kills the left-over processes of the pod id, and waits for them and for those
// that were abandoned, a second at most: what they do must not come after the
// removal of the pod. It returns whether an ADD of the pod has not ended even so.
func (r *Processes) Evict(id string) (adding bool) {
	strays := r.all(func(p *Tracked) bool {
		return p.ID == id && (p.State == ProcessLeftOver || p.State == ProcessAbandoned)
	})
	if len(strays) == 0 {
		return false
	}
	for _, p := range strays {
		if p.found != nil && p.found.alive() {
			r.kill(p)
		}
	}
	grace := time.NewTimer(evictGrace)
	defer grace.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		strays = slices.DeleteFunc(strays, func(p *Tracked) bool {
			if p.found != nil && !p.found.alive() {
				r.End(p)
			}
			select {
			case <-p.gone:
				return true
			default:
				return false
			}
		})
		if len(strays) == 0 {
			return false
		}
		select {
		case <-tick.C:
		case <-grace.C:
			return slices.ContainsFunc(strays, func(p *Tracked) bool { return p.Verb == "ADD" })
		}
	}
}

// Busy tells whether there is an ADD of the pod id that nobody waits for and that has
// not ended.
func (r *Processes) Busy(id string) bool {
	return len(r.all(func(p *Tracked) bool {
		return p.ID == id && p.Verb == "ADD" && (p.State == ProcessAbandoned || p.State == ProcessLeftOver)
	})) > 0
}

// Close stops looking after left-over processes; they go on.
func (r *Processes) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.timer != nil {
		r.timer.Stop()
	}
}
