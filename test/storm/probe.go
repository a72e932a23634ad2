// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// samples is how long something took, and how often it was not answered: then
// what counts is how long was waited.
type samples struct {
	took   []time.Duration
	failed int
	why    string
}

// probes measure a daemon beside what else it does, one call of a kind at a
// time with a pause between, and keep what each phase brought.
type probes struct {
	d           *harness.Daemon
	hostNetwork bool // the other pod's
	stop        context.CancelFunc
	group       sync.WaitGroup

	mu         sync.Mutex
	by         map[string]*samples
	pending    map[string]time.Time
	goroutines int   // most
	rss        int64 // most
	lastCount  int   // latest
}

const (
	metadataWrite = "metadata write"
	statusCall    = "Status"
	eventDelivery = "event"
	otherPod      = "other pod"

	// A probe waits so long for an answer.
	statusWait = 5 * time.Second
	eventWait  = 5 * time.Second
	writeWait  = time.Minute
	podWait    = 20 * time.Second
	probePause = 20 * time.Millisecond
)

func startProbes(ctx context.Context, d *harness.Daemon, hostNetwork bool) (*probes, error) {
	ctx, cancel := context.WithCancel(ctx)
	p := &probes{d: d, hostNetwork: hostNetwork, stop: cancel, by: map[string]*samples{}, pending: map[string]time.Time{}}
	events, err := d.Events(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	p.every(ctx, probePause, metadataWrite, func() (time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, writeWait)
		defer cancel()
		took, err := d.WriteMetadata(ctx, 1)
		if err != nil {
			return 0, err
		}
		return took[0], nil
	})
	p.every(ctx, probePause, statusCall, func() (time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, statusWait)
		defer cancel()
		begin := time.Now()
		_, err := d.Network(ctx)
		return time.Since(begin), err
	})
	p.every(ctx, 5*probePause, eventDelivery, func() (time.Duration, error) { return events.Delay(eventWait) })
	n, unique := 0, time.Now().UnixMilli() // an earlier one may be listed still
	p.every(ctx, time.Second/2, otherPod, func() (time.Duration, error) {
		n++
		begin := time.Now()
		id, err := d.RunPod(ctx, harness.Pod{Name: fmt.Sprintf("other-%d-%d", unique, n), HostNetwork: hostNetwork, Timeout: podWait})
		took := time.Since(begin)
		if err == nil {
			// That it cannot be removed is another matter.
			_ = d.RemovePod(ctx, id)
		}
		return took, err
	})
	p.group.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if rss, err := d.RSS(); err == nil {
				p.mu.Lock()
				p.rss = max(p.rss, rss)
				p.mu.Unlock()
			}
			if i%5 == 0 {
				if all, _, err := d.Goroutines(ctx, "none"); err == nil {
					p.mu.Lock()
					p.goroutines, p.lastCount = max(p.goroutines, all), all
					p.mu.Unlock()
				}
			}
			wait(ctx, 100*time.Millisecond)
		}
	})
	return p, nil
}

func (p *probes) every(ctx context.Context, pause time.Duration, what string, probe func() (time.Duration, error)) {
	p.group.Go(func() {
		for ctx.Err() == nil {
			begin := time.Now()
			p.mu.Lock()
			p.pending[what] = begin
			p.mu.Unlock()
			took, err := probe()
			if ctx.Err() != nil {
				return
			}
			p.mu.Lock()
			delete(p.pending, what)
			s := p.by[what]
			if s == nil {
				s = new(samples)
				p.by[what] = s
			}
			if err != nil {
				took = time.Since(begin)
				s.failed++
				s.why = kind(err)
			}
			s.took = append(s.took, took)
			p.mu.Unlock()
			wait(ctx, pause)
		}
	})
}

// count is how often a probe was answered in this phase.
func (p *probes) count(what string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.by[what]; s != nil {
		return len(s.took)
	}
	return 0
}

// phase is what the probes found in one.
type phase struct {
	by         map[string]samples
	goroutines int
	rss        int64
}

// next ends a phase and begins another. A probe that is not answered yet counts
// with what it has waited for if it is the slowest.
func (p *probes) next() phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := phase{by: map[string]samples{}, goroutines: p.goroutines, rss: p.rss}
	for what, s := range p.by {
		f.by[what] = *s
	}
	for what, begin := range p.pending {
		s := f.by[what]
		if waited := time.Since(begin); len(s.took) == 0 || waited > slices.Max(s.took) {
			s.took = append(slices.Clone(s.took), waited)
			s.failed++
			s.why = "no answer before the end"
			f.by[what] = s
		}
	}
	p.by, p.goroutines, p.rss = map[string]*samples{}, 0, 0
	return f
}

func (p *probes) end() {
	p.stop()
	p.group.Wait()
}
