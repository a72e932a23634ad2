// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/conftemplate"
	"github.com/cnireload/cnireload/cnireload/rules"
)

// loopbackList is the list that brings up "lo", with go-cni's name and version.
var loopbackList = func() *libcni.NetworkConfigList {
	list, err := libcni.ConfListFromBytes([]byte(`{"cniVersion":"0.3.1","name":"cni-loopback","plugins":[{"type":"loopback"}]}`))
	if err != nil {
		panic(err) // a constant
	}
	return list
}()

// choose picks the lists to use by go-cni's rules: files in lexical order, the
// first ones that are good, up to the maximum. err says why there are too few.
func (l *loop) choose(scan confdir.Scan, now time.Time) (nets []*network, skipped []SkippedFile, err error) {
	c := &l.n.config
	if l.recipe.loopback {
		nets = append(nets, &network{attachment: attachment{list: loopbackList, ifName: "lo"}})
	}
	lists := len(nets)
	notNeeded := "" // the same for every file behind the last one in use
	limit := c.max()
	if l.recipe.all {
		limit = 0
	}
	switch {
	case !l.recipe.scan:
	case scan.Err != nil && !errors.Is(scan.Err, fs.ErrNotExist) && len(l.inUse) > 0:
		// The directory is there but cannot be read: not a reason to drop what
		// is in use.
		for _, prev := range l.n.Snapshot().Networks {
			if n := l.inUse[prev.File]; n != nil {
				nets = append(nets, l.stale(n.file, n.ifName, scan.Err, now))
			}
		}
	default:
		for _, f := range scan.Files {
			use := f
			prev := l.inUse[f.Path]
			if f.Err != nil {
				if prev == nil || errors.Is(f.Err, fs.ErrNotExist) {
					skipped = append(skipped, SkippedFile{File: f.Path, Reason: f.Err.Error()})
					continue
				}
				use = prev.file
			}
			i := len(nets) - lists
			switch {
			case c.networkName != "" && use.List.Name != c.networkName:
				skipped = append(skipped, SkippedFile{File: f.Path, Reason: fmt.Sprintf("is network %q; network_name asks for %q", use.List.Name, c.networkName)})
				continue
			case limit > 0 && i >= limit:
				if notNeeded == "" {
					notNeeded = fmt.Sprintf("is not needed: max_conf_num = %d and %s sorts before it", limit, nets[len(nets)-1].file.Path)
				}
				skipped = append(skipped, SkippedFile{File: f.Path, Reason: notNeeded})
				continue
			}
			ifName := fmt.Sprintf("%s%d", c.prefix, i)
			if f.Err != nil {
				nets = append(nets, l.stale(use, ifName, f.Err, now))
			} else {
				nets = append(nets, &network{attachment: attachment{list: use.List, ifName: ifName, dropIns: len(use.DropIns) > 0}, file: use})
			}
		}
	}
	for _, n := range nets {
		n.plugins = rules.Of(n.list)
	}
	if l.recipe.scan && len(nets) == lists {
		err = l.nothingToUse(scan, skipped)
	} else if len(nets) < c.minNetworks || len(nets) == 0 {
		err = fmt.Errorf("%d of the %d networks that are needed are loaded", len(nets), max(1, c.minNetworks))
	}
	return nets, skipped, err
}

// stale makes a network of content that is no longer what the disk holds.
func (l *loop) stale(f *confdir.File, ifName string, cause error, now time.Time) *network {
	n := &network{attachment: attachment{list: f.List, ifName: ifName, dropIns: len(f.DropIns) > 0}, file: f, staleError: cause, staleSince: now}
	if prev := l.inUse[f.Path]; prev != nil && prev.staleError != nil {
		n.staleSince = prev.staleSince
	}
	return n
}

// nothingToUse says why no list of the directory can be used.
func (l *loop) nothingToUse(scan confdir.Scan, skipped []SkippedFile) error {
	dir := l.n.config.confDir
	var err error
	switch {
	case errors.Is(scan.Err, fs.ErrNotExist):
		err = fmt.Errorf("conf dir %s does not exist", dir)
	case scan.Err != nil && dir == "":
		err = scan.Err
	case scan.Err != nil:
		err = fmt.Errorf("conf dir %s cannot be read: %w", dir, scan.Err)
	case len(skipped) == 0:
		err = fmt.Errorf("no network config found in %s", dir)
	case len(skipped) == 1:
		err = fmt.Errorf("no usable network config in %s: %s %s", dir, skipped[0].File, skipped[0].Reason)
	default:
		err = fmt.Errorf("no usable network config in %s: %s %s (and %d more files)", dir, skipped[0].File, skipped[0].Reason, len(skipped)-1)
	}
	if l.renderer != nil && l.renderer.Err() != nil {
		err = fmt.Errorf("%w; %w", err, l.renderer.Err())
	} else if t := l.n.config.template; l.renderer != nil && l.renderer.Waiting() {
		err = fmt.Errorf("%w; conf_template %s is %s", err, t.path, conftemplate.StateWaiting)
	}
	return err
}

// lastsOver tells whether the networks in use can stay while new ones are being
// checked: not if the file of one is gone.
func (l *loop) lastsOver(scan confdir.Scan) bool {
	for path := range l.inUse {
		if f := scan.File(path); f == nil && (scan.Err == nil || errors.Is(scan.Err, fs.ErrNotExist)) ||
			f != nil && errors.Is(f.Err, fs.ErrNotExist) {
			return false
		}
	}
	return true
}

// foreign names the list in the directory that would be used before ours is
// there, if any.
func (l *loop) foreign() string {
	nets, _, _ := l.choose(l.scanner.Scan(), time.Now())
	return l.foreignIn(nets)
}

// foreignIn names the first list that is not ours.
func (l *loop) foreignIn(nets []*network) string {
	for _, n := range nets {
		if n.file != nil && n.file.Path != l.renderer.Target() {
			return n.describe()
		}
	}
	return ""
}
