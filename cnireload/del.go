// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cnireload/cnireload/cnireload/plugin"
	"github.com/cnireload/cnireload/internal/oneline"
)

// del runs DEL of these plugins of a list, last to first, each even when another
// one fails, and returns which have failed. The attachment stays in libcni's cache.
func (n *Network) del(ctx context.Context, a attachment, run []int, ns *Namespace) (failed []int, err error) {
	every := &everyPlugin{Exec: n.exec, left: len(a.list.Plugins), run: run}
	every.done = func(err error) bool {
		text := err.Error()
		return strings.Contains(text, "not found") ||
			// Of the namespace, unless it can be the agent's file.
			ns.path == "" && strings.Contains(text, "no such file or directory") && n.newDELNeeds().closed(ctx, a.list, allGates) == nil
	}
	c := libcni.NewCNIConfigWithCacheDir(n.config.binDirs, n.config.cacheDir, every)
	err = c.DelNetworkList(ctx, a.list, ns.runtimeConf(a.ifName))
	if every.left > 0 {
		return run, err // libcni has failed before it ran them
	}
	return every.failed, oneline.Join(every.errs)
}

// delWithinBound runs DEL of one list within the bound of DEL.
func (n *Network) delWithinBound(ctx context.Context, a attachment, ns *Namespace) error {
	ctx, cancel := plugin.WithBound(ctx, "DEL")
	defer cancel()
	_, err := n.del(ctx, a, n.newDELNeeds().plan(ctx, a, allGates, true).run, ns)
	if err == nil {
		n.uncache(ctx, a, ns)
	}
	return err
}

// uncache removes an attachment from libcni's cache.
func (n *Network) uncache(ctx context.Context, a attachment, ns *Namespace) {
	// DEL of a list without plugins does nothing else.
	none := &libcni.NetworkConfigList{Name: cmp.Or(a.cachedAs, a.list.Name), CNIVersion: "0.3.1"}
	_ = n.cni.DelNetworkList(ctx, none, ns.runtimeConf(a.ifName))
}

// refused tells whether a plugin did not take the version of its list.
func refused(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && e.Code == types.ErrIncompatibleCNIVersion
}

// shareOfOthers is what each plugin that comes later keeps of a bound, at least, if
// that is not more than an equal part: one that hangs must not keep the others
// from being run, and one that is slow should not be ended for it.
const shareOfOthers = 10 * time.Second

// share derives a context for the first of several that share the deadline of ctx.
func share(ctx context.Context, several int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok || several <= 1 {
		return context.WithCancel(ctx)
	}
	left := time.Until(deadline)
	d := max(left/time.Duration(several), left-shareOfOthers*time.Duration(several-1))
	return context.WithTimeoutCause(ctx, d, &shareError{after: d.Round(time.Millisecond)})
}

// shareError is why a plugin was ended before the bound of DEL had passed. It is
// a deadline error to errors.Is.
type shareError struct{ after time.Duration }

func (e *shareError) Error() string {
	return fmt.Sprintf("DEL did not finish within %s, its share of the bound (%s)", e.after, TimeoutDel)
}
func (e *shareError) Is(target error) bool { return target == context.DeadlineExceeded }

// everyPlugin has libcni go on to the next plugin of a list when one fails, each
// with its share of the deadline. For the last one it always returns an error to
// libcni, which then leaves the attachment in its cache: whether that may go is
// decided elsewhere. It serves one DEL.
type everyPlugin struct {
	invoke.Exec
	left   int              // plugins that are still to come
	run    []int            // indexes of the plugins that are to be run
	done   func(error) bool // tells whether an error means that nothing is left to remove
	failed []int
	errs   []error
}

var errKeepEntry = errors.New("the attachment stays in the cache")

// FindInPath returns an empty path for a plugin that is not to be run or cannot
// be found.
func (e *everyPlugin) FindInPath(plugin string, dirs []string) (string, error) {
	if !slices.Contains(e.run, e.left-1) {
		return "", nil
	}
	path, err := e.Exec.FindInPath(plugin, dirs)
	if err != nil {
		e.fail(plugin, err)
		return "", nil
	}
	return path, nil
}

// ExecPlugin runs the plugin and keeps its error.
func (e *everyPlugin) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var out []byte
	if path != "" {
		ctx, cancel := share(ctx, e.left)
		defer cancel()
		var err error
		if out, err = e.Exec.ExecPlugin(ctx, path, stdin, environ); err != nil && !e.done(err) {
			var conf struct {
				Type string `json:"type"`
			}
			_ = json.Unmarshal(stdin, &conf)
			e.fail(conf.Type, err)
		}
	}
	e.left--
	if e.left == 0 {
		return nil, errKeepEntry
	}
	return out, nil
}

// fail notes the failure of the present plugin, worded as libcni does.
func (e *everyPlugin) fail(plugin string, err error) {
	e.failed = append(e.failed, e.left-1)
	e.errs = append(e.errs, fmt.Errorf("plugin type=%q failed (delete): %w", plugin, err))
}
