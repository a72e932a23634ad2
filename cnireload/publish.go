// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// publish puts a snapshot in place, unless nothing in it is new.
func (l *loop) publish(ctx context.Context, s *Snapshot, nets []*network, now time.Time) {
	clear(l.inUse)
	var keys []string
	for _, n := range nets {
		keys = append(keys, n.key())
		if n.file != nil {
			l.inUse[n.file.Path] = n
		}
	}
	previous := l.n.Snapshot()
	s.Generation, s.LoadedAt, s.Failures = previous.Generation, previous.LoadedAt, previous.Failures
	if failure := s.failure(); failure != "" && failure != previous.failure() {
		s.Failures++
	}
	if key := strings.Join(keys, "\x01"); key != l.generation && len(l.inUse) > 0 {
		l.generation = key
		s.Generation++
		s.LoadedAt = now
	} else if len(l.inUse) == 0 {
		l.generation = ""
	}
	digest := s.digest()
	if digest == l.published && slices.Equal(s.Skipped, previous.Skipped) {
		return
	}
	l.published = digest
	l.n.snapshot.Store(s)
	close(previous.superseded)
	l.report(ctx, s)
}

// failure names what keeps the disk's content from being used, if anything.
func (s *Snapshot) failure() string {
	failure := errorText(s.LoadError)
	for _, n := range s.Networks {
		if n.StaleError != nil {
			failure += "\x00" + n.File + "\x00" + n.StaleError.Error()
		}
	}
	return failure
}

// digest names everything in the snapshot that somebody could notice, except for
// the skipped files, of which there can be many.
func (s *Snapshot) digest() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d\x00%v\x00%v\x00%v\x00", s.Generation, s.Cause, s.LoadError, s.Watch)
	for _, n := range s.Networks {
		fmt.Fprintf(&b, "%s\x00%s\x00%s\x00%v\x00%v\x00%v\x01", n.Name, n.File, n.SHA256, n.DropIns, n.StaleError, n.Plugins)
	}
	if s.Template != nil {
		fmt.Fprintf(&b, "%v", *s.Template)
	}
	fmt.Fprintf(&b, "%v", s.Gates)
	return b.String()
}
