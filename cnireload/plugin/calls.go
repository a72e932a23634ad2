// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"sync"
	"time"
)

// Call names one kind of call to a plugin and how it went.
type Call struct {
	Plugin string // type, as in a list
	Verb   string // as in CNI_COMMAND
	// Outcome is "ok", "error" (the plugin said so), "timeout" (its bound or
	// its caller's deadline), "canceled" (its caller went away) or "abandoned"
	// (it was killed and does not die).
	Outcome string
}

// CallBounds are the upper bounds of the buckets of a [CallCount], in seconds.
var CallBounds = [...]float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// CallCount is how many calls of one kind there were.
type CallCount struct {
	Count   uint64
	Seconds float64 // all of them together
	// Within counts the calls that took no longer than the bound of that index.
	Within [len(CallBounds)]uint64
}

// Calls counts calls that have ended. The zero value is ready for use, and it can
// be used concurrently.
type Calls struct {
	mu     sync.Mutex
	counts map[Call]CallCount
}

func (l *Calls) add(c Call, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.counts == nil {
		l.counts = make(map[Call]CallCount)
	}
	n := l.counts[c]
	n.Count++
	n.Seconds += d.Seconds()
	for i, bound := range CallBounds {
		if d.Seconds() <= bound {
			n.Within[i]++
		}
	}
	l.counts[c] = n
}

// Counts returns how many calls have ended, by kind.
func (l *Calls) Counts() map[Call]CallCount {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.counts)
}
