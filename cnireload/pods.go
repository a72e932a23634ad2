// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"slices"
	"sync"
	"time"
)

// podState is what is remembered of a pod between calls.
type podState struct {
	// failedADD are the lists of an ADD that has failed.
	failedADD []attachment
	// failingSince is when the removal of the pod failed first; zero if it has not.
	failingSince time.Time
	// interfaces are those that the pod is removed from, while others fail.
	interfaces []string
	// removed says that the removal is done. CRI asks for it a second time.
	removed bool
}

// maxPodStates is how many pods are remembered.
const maxPodStates = 1024

// podStates remembers pods, without those that have changed longest ago when they
// are too many. Its methods can be called concurrently, and the zero value is ready
// for use.
type podStates struct {
	mu     sync.Mutex
	states map[string]podState
	order  []string // ids; the latest change is last
}

func (p *podStates) get(id string) podState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.states[id]
}

func (p *podStates) put(id string, s podState) {
	p.forget(id)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.states == nil {
		p.states = make(map[string]podState)
	}
	p.states[id] = s
	p.order = append(p.order, id)
	if len(p.order) > maxPodStates {
		delete(p.states, p.order[0])
		p.order = p.order[1:]
	}
}

func (p *podStates) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.states[id]; ok {
		delete(p.states, id)
		p.order = slices.DeleteFunc(p.order, func(o string) bool { return o == id })
	}
}
