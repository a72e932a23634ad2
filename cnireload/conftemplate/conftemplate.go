// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conftemplate renders containerd's conf_template to a list in the conf dir.
//
// A [Renderer] renders in memory, checks that the outcome is a list, and puts it in
// place as a whole. It replaces only a file that it has written itself, which it
// remembers across restarts; a file that somebody else wrote or edited stays. On an
// error nothing on disk has changed. A Renderer belongs to one goroutine. This
// package does not know which list is in use: its caller names the one that has
// precedence.
package conftemplate

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/diskfile"
)

// RenderedFile is the name of the file that a template is rendered to, in the
// configuration directory.
const RenderedFile = "10-containerd-net.conflist"

// State describes the template and what became of it.
type State struct {
	Path  string   `json:"path"`
	File  string   `json:"file"`  // what it is rendered to
	CIDRs []string `json:"cidrs"` // those it was last rendered with
	State string   `json:"state"`
	Err   error    `json:"-"` // why the last attempt failed; nil otherwise
}

// data is what a template can refer to. The names are containerd's
// (docs/cri/config.md, "CNI Config Template").
type data struct {
	PodCIDR       string
	PodCIDRRanges []string
	Routes        []string
}

// Record is what the record file holds: what was rendered, and so which file is
// ours to replace after a restart.
type Record struct {
	File     string   `json:"file"`
	Template string   `json:"template"` // SHA-256 of the template
	CIDRs    []string `json:"cidrs"`
	// Waiting are CIDRs that were reported while another list had precedence,
	// and that are rendered when that list goes.
	Waiting []string `json:"waiting,omitempty"`
	// SHA256 lists the contents that are ours. Two only while a new one is
	// being put in the old one's place.
	SHA256 []string `json:"sha256"`
}

// Renderer renders a template. It belongs to one goroutine.
type Renderer struct {
	path, target string
	recordPath   string

	record  Record
	wanted  []string          // CIDRs that were reported and are not rendered yet
	asked   []string          // CIDRs that were looked at last
	other   string            // the list that had precedence when that was last looked at
	content *diskfile.Content // of the template
	failed  *diskfile.Content // of a template that could not be rendered; nil if the last could
	state   string
	err     error
}

// Values of State.State. Other values name the file that has precedence.
const (
	StateWaiting  = "waiting for the pod CIDR from UpdateRuntimeConfig"
	StateRendered = "rendered"
	StateDeferred = "not rendered: another list had precedence when the pod CIDR was reported"
	StateFailed   = "failed"
)

// New returns the renderer of the template at path for a conf dir. record is the
// file that remembers what was rendered.
func New(path, record, confDir string) *Renderer {
	r := &Renderer{path: path, recordPath: record, target: filepath.Join(confdir.CleanPath(confDir), RenderedFile), state: StateWaiting}
	b, err := os.ReadFile(record)
	switch {
	case err == nil:
		var known Record
		if err := json.Unmarshal(b, &known); err != nil {
			r.err = fmt.Errorf("record %s is damaged, %s counts as foreign: %w", record, r.target, err)
		} else if known.File == r.target {
			r.record, r.wanted = known, known.Waiting
			if r.state = StateRendered; r.wanted != nil {
				r.state = StateDeferred
			}
		}
	case !errors.Is(err, fs.ErrNotExist):
		r.err = fmt.Errorf("record cannot be read, %s counts as foreign: %w", r.target, err)
	}
	return r
}

// Target returns the path of the rendered file.
func (r *Renderer) Target() string { return r.target }

// Err returns why the last attempt failed; nil otherwise.
func (r *Renderer) Err() error { return r.err }

// Waiting tells whether no CIDRs have been reported yet.
func (r *Renderer) Waiting() bool { return r.state == StateWaiting }

// Pending tells whether CIDRs were reported that are not rendered yet.
func (r *Renderer) Pending() bool { return r.wanted != nil }

// Describe returns what became of the template. It looks at the rendered file.
func (r *Renderer) Describe() *State {
	state := r.state
	if state == StateRendered {
		if _, err := os.Lstat(r.target); errors.Is(err, fs.ErrNotExist) {
			state = "rendered, but the file has been removed since"
		} else if !r.owns(diskfile.Read(r.target, time.Now(), confdir.MaxSize)) {
			state = "rendered, but the file has been edited since, and stays"
		}
	}
	return &State{Path: r.path, File: r.target, CIDRs: r.record.CIDRs, State: state, Err: r.err}
}

// owns tells whether the content is one that we wrote.
func (r *Renderer) owns(c *diskfile.Content) bool {
	return c.Sum != "" && slices.Contains(r.record.SHA256, c.Sum)
}

// Render brings the rendered file in line with the template and the CIDRs. On
// error nothing on disk has changed. foreign names the list in use that is not
// ours, if there is one: then nothing is rendered, and what is wrong is shown in
// [State] instead of returned.
func (r *Renderer) Render(cidrs []string, foreign string) error {
	r.wanted = cidrs
	return r.outcome(r.update(cidrs, foreign, true))
}

// Renew renders again when the template has changed, and renders CIDRs that could
// not be rendered when they were reported. It does not bring back a file or a
// directory that has been removed.
func (r *Renderer) Renew(foreign string) error {
	cidrs := r.asked
	switch {
	case r.wanted != nil:
		cidrs = r.wanted
	case r.record.CIDRs != nil:
		cidrs = r.record.CIDRs
	}
	return r.outcome(r.update(cidrs, foreign, false))
}

// outcome keeps what a report says of the last rendering.
func (r *Renderer) outcome(err error) error {
	if err != nil {
		r.err, r.state = err, StateFailed
	}
	return err
}

// update makes a directory that is missing only if create is set, and a file
// only then or if the CIDRs were reported and never rendered.
func (r *Renderer) update(cidrs []string, foreign string, create bool) error {
	r.readTemplate()
	r.err, r.failed, r.other, r.asked = nil, nil, foreign, cidrs
	out, err := r.execute(cidrs)
	if err != nil {
		r.failed = r.content
	}
	sum := sha256.Sum256(out)
	next := Record{File: r.target, Template: r.content.Sum, CIDRs: cidrs, SHA256: []string{hex.EncodeToString(sum[:])}}

	_, statErr := os.Lstat(r.target)
	absent := errors.Is(statErr, fs.ErrNotExist)
	var current *diskfile.Content
	if statErr == nil {
		current = diskfile.Read(r.target, r.content.ReadAt, confdir.MaxSize)
	}
	switch {
	case absent && foreign != "":
		r.state, r.err = "not rendered: "+foreign+" has precedence", err
		return r.postpone(cidrs)
	case current != nil && err == nil && current.Sum == next.SHA256[0]:
		// Also how a file that containerd without us rendered becomes ours.
		return r.remember(next)
	case current != nil && !r.owns(current):
		bad := current.Err
		if bad == nil {
			_, bad = confdir.ParseList(r.target, current.Bytes)
		}
		if bad == nil {
			// Nor is it rendered again when that file goes.
			r.state, r.err, r.wanted = "not rendered: "+r.target+" was not written by containerd, or was edited since, and stays", err, nil
			return r.postpone(nil)
		}
		if err == nil {
			err = fmt.Errorf("%s was not written by containerd and %w; remove it to have it rendered from conf_template %s", r.target, bad, r.path)
		}
		if foreign != "" {
			r.state, r.err = "not rendered: "+foreign+" has precedence", err
			return r.postpone(cidrs)
		}
		return err
	case err != nil && foreign != "":
		r.state, r.err = "not rendered again: "+foreign+" has precedence", err
		return r.postpone(cidrs)
	case err != nil:
		return err
	case absent && !create && r.wanted == nil:
		// It was removed on purpose.
		r.state = StateRendered
		return nil
	case statErr != nil && !absent:
		return fmt.Errorf("conf_template %s cannot be rendered: %w", r.path, statErr)
	}
	return r.write(out, next, create)
}

// postpone remembers CIDRs for when the list that has precedence now is removed,
// also after a restart; nil forgets them. If they cannot be recorded, that is shown
// and no error: the kubelet reports them again when it starts.
func (r *Renderer) postpone(cidrs []string) error {
	next := r.record
	next.File, next.Waiting = r.target, cidrs
	if slices.Equal(next.Waiting, r.record.Waiting) {
		return nil
	}
	if err := r.store(next); err != nil {
		r.err = err
		return nil
	}
	r.record = next
	return nil
}

// write puts out in place of the rendered file. A crash at any point leaves a
// whole file, old or new, that the record calls ours.
func (r *Renderer) write(out []byte, next Record, create bool) error {
	both := next
	both.SHA256 = slices.Clone(r.record.SHA256)
	if !slices.Contains(both.SHA256, next.SHA256[0]) {
		both.SHA256 = append(both.SHA256, next.SHA256[0])
	}
	if err := r.store(both); err != nil {
		return err
	}
	r.record.SHA256 = both.SHA256
	if create {
		// As containerd does. Nothing else creates the directory later.
		if err := os.MkdirAll(filepath.Dir(r.target), 0o755); err != nil {
			return fmt.Errorf("cannot create the cni conf dir for %s: %w", RenderedFile, err)
		}
	}
	if err := diskfile.Write(r.target, out, 0o644); err != nil {
		// Best effort: a record that names one content too many does no harm.
		_ = r.store(r.record)
		return err
	}
	return r.remember(next)
}

// remember records that what next names is in place.
func (r *Renderer) remember(next Record) error {
	if err := r.store(next); err != nil {
		return err
	}
	r.record, r.state, r.wanted = next, StateRendered, nil
	return nil
}

func (r *Renderer) store(record Record) error {
	b, err := json.Marshal(record)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(r.recordPath), 0o700); err != nil {
		return fmt.Errorf("cannot record what is rendered from conf_template %s: %w", r.path, err)
	}
	return diskfile.Write(r.recordPath, b, 0o600)
}

// readTemplate has the template's present content in r.content.
func (r *Renderer) readTemplate() {
	if r.content != nil && r.content.Err == nil {
		if info, err := os.Stat(r.path); err == nil && r.content.Fresh(diskfile.Identify(info)) {
			return
		}
	}
	r.content = diskfile.Read(r.path, time.Now(), confdir.MaxSize)
}

// Changed tells whether the template on disk has changed, so that Renew should be
// called.
func (r *Renderer) Changed() bool {
	if len(r.record.CIDRs) == 0 && r.failed == nil {
		return false
	}
	r.readTemplate()
	c := r.content
	switch {
	case c.Err != nil:
		return false
	case r.failed != nil:
		// What is wanted is looked at when it is known what has precedence.
		return r.wanted == nil && !c.Same(r.failed)
	case c.Sum == r.record.Template:
		return false
	}
	// A file that somebody removed or edited is left alone.
	return r.owns(diskfile.Read(r.target, c.ReadAt, confdir.MaxSize))
}

// Due tells whether Renew should be called for CIDRs that were reported and are not
// rendered: they can perhaps be rendered now, or the reason in [State] is no longer
// true. foreign is as in Render.
func (r *Renderer) Due(foreign string) bool {
	if r.wanted == nil {
		return false
	}
	r.readTemplate()
	switch {
	case r.failed != nil:
		return !r.content.Same(r.failed)
	case foreign != "":
		return foreign != r.other
	}
	return r.content.Err == nil
}

// execute renders the template in memory and checks that the outcome is a list.
func (r *Renderer) execute(cidrs []string) ([]byte, error) {
	if r.content.Err != nil {
		return nil, fmt.Errorf("conf_template %s %w", r.path, r.content.Err)
	}
	routes, err := defaultRoutes(cidrs)
	if err != nil {
		return nil, err
	}
	t, err := template.New(filepath.Base(r.path)).Parse(string(r.content.Bytes))
	if err != nil {
		return nil, fmt.Errorf("conf_template %s cannot be parsed: %w", r.path, err)
	}
	var out limited
	if err := t.Execute(&out, data{PodCIDR: cidrs[0], PodCIDRRanges: cidrs, Routes: routes}); err != nil {
		return nil, fmt.Errorf("conf_template %s cannot be rendered: %w", r.path, err)
	}
	if list, err := confdir.ParseList(r.target, out.Bytes()); err != nil {
		return nil, fmt.Errorf("conf_template %s renders a list that %w", r.path, err)
	} else if len(list.Plugins) == 0 {
		return nil, fmt.Errorf("conf_template %s renders a list that has no plugins", r.path)
	}
	return out.Bytes(), nil
}

// limited is a buffer that refuses to grow beyond what would be read back.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	if l.Len()+len(p) > confdir.MaxSize {
		return 0, fmt.Errorf("the outcome is longer than %d bytes", confdir.MaxSize)
	}
	return l.Buffer.Write(p)
}

// defaultRoutes returns the default route of each family among the CIDRs, IPv4
// first.
func defaultRoutes(cidrs []string) ([]string, error) {
	if len(cidrs) == 0 {
		return nil, errors.New("no pod CIDR is given")
	}
	var v4, v6 bool
	for _, c := range cidrs {
		ip, _, err := net.ParseCIDR(c)
		if err != nil {
			return nil, fmt.Errorf("invalid pod CIDR %q: %w", c, err)
		}
		if ip.To4() != nil {
			v4 = true
		} else {
			v6 = true
		}
	}
	var routes []string
	if v4 {
		routes = append(routes, "0.0.0.0/0")
	}
	if v6 {
		routes = append(routes, "::/0")
	}
	return routes, nil
}

// ParseCIDRs splits a comma-separated list as in the CRI, and refuses what is no
// CIDR.
func ParseCIDRs(podCIDRs string) ([]string, error) {
	var cidrs []string
	for c := range strings.SplitSeq(podCIDRs, ",") {
		cidrs = append(cidrs, strings.TrimSpace(c))
	}
	_, err := defaultRoutes(cidrs)
	return cidrs, err
}
