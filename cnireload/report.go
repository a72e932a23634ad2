// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/internal/oneline"
)

// loggedState is what the log was last told.
type loggedState struct {
	generation uint64
	cause      string
	judged     bool // there was a cause, or none, for the log
	watch      WatchState
	skipped    map[string]string
	stale      map[string]bool // by file
}

// logger names the runtime handler, if it has a network of its own.
func (n *Network) logger(ctx context.Context) *log.Entry {
	if n.config.handler == "" {
		return log.G(ctx)
	}
	return log.G(ctx).WithField("handler", n.config.handler)
}

// report logs one line for each transition.
func (l *loop) report(ctx context.Context, s *Snapshot) {
	logger := l.n.logger(ctx)
	skipped := make(map[string]string, len(s.Skipped))
	fresh := 0
	for _, f := range s.Skipped {
		skipped[f.File] = f.Reason
		if l.logged.skipped[f.File] == f.Reason {
			continue
		}
		if fresh++; fresh <= maxSkippedLines {
			logger.Infof("cni: file not in use: %s %s", f.File, oneline.Of(f.Reason))
		}
	}
	if more := fresh - maxSkippedLines; more > 0 {
		logger.Infof("cni: %d more files of %s are not in use", more, s.ConfDir)
	}
	if s.Watch != l.logged.watch {
		if s.Watch.Mode == WatchInotify {
			logger.Infof("cni: watching %s", s.ConfDir)
		} else {
			logger.Warnf("cni: %s for changes of %s: %s", s.Watch.Mode, s.ConfDir, s.Watch.Cause)
		}
	}
	if s.Generation != l.logged.generation {
		for _, n := range s.Networks {
			if n.File != "" {
				logger.Infof("cni: network %q in use from %s, sha256 %.12s, generation %d", n.Name, n.File, n.SHA256, s.Generation)
			}
		}
	}
	cause := errorText(s.Cause)
	var waits *waitingError
	waiting := errors.As(s.Cause, &waits)
	switch {
	case waiting:
		// The answer, or its absence, is logged: the question is asked at each
		// start.
		cause = l.logged.cause
	case cause == l.logged.cause && l.logged.judged:
	case cause == "":
		logger.Info("cni: network ready")
	default:
		logger.Warnf("cni: network not ready: %s", oneline.Of(cause))
	}
	l.logged = loggedState{generation: s.Generation, cause: cause, judged: l.logged.judged || !waiting, watch: s.Watch, skipped: skipped, stale: l.logged.stale}
}

// reportStale logs that a file in use has turned bad, unless that passes within
// a second: a file that is rewritten in place is empty for a moment.
func (l *loop) reportStale(ctx context.Context, s *Snapshot, now time.Time) {
	stale := make(map[string]bool)
	for _, n := range s.Networks {
		if n.StaleError == nil {
			continue
		}
		due := n.StaleSince.Add(staleSilence)
		switch {
		case l.logged.stale[n.File]:
		case now.Before(due):
			if due.Before(l.next) {
				l.next = due
			}
			continue
		default:
			l.n.logger(ctx).Warnf("cni: %s %s; its last good content stays in use", n.File, oneline.Of(n.StaleError.Error()))
		}
		stale[n.File] = true
	}
	for file := range l.logged.stale {
		if !stale[file] {
			l.n.logger(ctx).Infof("cni: %s is no longer used with its last good content", file)
		}
	}
	l.logged.stale = stale
}

// maxSkippedLines is how many files that are not in use are logged at a time.
const maxSkippedLines = 64

// staleSilence is how long a file in use may be bad before that is logged.
const staleSilence = time.Second
