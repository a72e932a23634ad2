// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/conftemplate"
	"github.com/cnireload/cnireload/internal/testenv"
)

// Both families, as in containerd's documentation.
const dualTemplate = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"fakenet","ipam":{"type":"host-local",
"ranges":[{{range $i, $r := .PodCIDRRanges}}{{if $i}},{{end}}[{"subnet":"{{$r}}"}]{{end}}],
"routes":[{{range $i, $r := .Routes}}{{if $i}},{{end}}{"dst":"{{$r}}"}{{end}}],"first":"{{.PodCIDR}}"}}]}`

// templated is a node with a template.
type templated struct {
	*node
	template string
	record   string
	target   string
}

func newTemplated(t *testing.T, text string) templated {
	t.Helper()
	d := newNode(t)
	d.install("fakenet", "host-local")
	td := templated{
		node:     d,
		template: filepath.Join(d.answers, "cni.template"),
		record:   filepath.Join(d.cache, "deep", "record.json"),
		target:   filepath.Join(d.conf, RenderedFile),
	}
	d.replace(td.template, text, 0o644)
	return td
}

// restarted returns a network as a daemon that starts has it.
func (d templated) restarted(opts ...Opt) *Network {
	d.t.Helper()
	return d.started(append([]Opt{WithTemplate(d.template, d.record)}, opts...)...)
}

func (d templated) read() string {
	d.t.Helper()
	b, err := os.ReadFile(d.target)
	if os.IsNotExist(err) {
		return ""
	}
	d.must(err)
	return string(b)
}

// subnets returns those that the list in use was rendered with.
func subnets(t *testing.T, s *Snapshot) (ranges, routes []string) {
	t.Helper()
	if len(s.attachments) == 0 {
		return nil, nil
	}
	var list struct {
		Plugins []struct {
			IPAM struct {
				Ranges [][]struct{ Subnet string }
				Routes []struct{ Dst string }
			}
		}
	}
	if err := json.Unmarshal(s.attachments[0].list.Bytes, &list); err != nil {
		t.Fatal(err)
	}
	for _, r := range list.Plugins[0].IPAM.Ranges {
		ranges = append(ranges, r[0].Subnet)
	}
	for _, r := range list.Plugins[0].IPAM.Routes {
		routes = append(routes, r.Dst)
	}
	return ranges, routes
}

// No temporary file is left behind, whatever happened.
func (d templated) checkTidy() {
	d.t.Helper()
	for _, dir := range []string{d.conf, filepath.Dir(d.record)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			d.t.Fatal(err)
		}
		for _, e := range entries {
			if name := e.Name(); name != RenderedFile && name != filepath.Base(d.record) && !strings.HasSuffix(name, ".conflist") {
				d.t.Errorf("%s was left behind in %s", name, dir)
			}
		}
	}
}

func TestRender(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		cidrs          string
		ranges, routes []string
	}{
		{"10.1.0.0/24", []string{"10.1.0.0/24"}, []string{"0.0.0.0/0"}},
		{"fd00::/64", []string{"fd00::/64"}, []string{"::/0"}},
		{"10.1.0.0/24,fd00::/64", []string{"10.1.0.0/24", "fd00::/64"}, []string{"0.0.0.0/0", "::/0"}},
		{" fd00::/64 , 10.1.0.0/24 ", []string{"fd00::/64", "10.1.0.0/24"}, []string{"0.0.0.0/0", "::/0"}},
	} {
		t.Run(tt.cidrs, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			n := d.restarted()
			if wrong := testenv.MissingWords(n.Status(), []string{"no network config found", "conf_template " + d.template + " is waiting for the pod CIDR"}); wrong != "" {
				t.Error(wrong)
			}
			if s := n.Snapshot().Template; s == nil || s.State != conftemplate.StateWaiting || s.File != d.target || s.Path != d.template {
				t.Errorf("%+v", s)
			}
			d.must(n.Render(t.Context(), tt.cidrs))
			// In use before the call returns.
			s := n.Snapshot()
			ranges, routes := subnets(t, s)
			if !s.Ready() || !slices.Equal(ranges, tt.ranges) || !slices.Equal(routes, tt.routes) {
				t.Errorf("%v, %q, %q", s.Err(), ranges, routes)
			}
			if st := s.Template; st.State != "rendered" || st.Err != nil || !slices.Equal(st.CIDRs, tt.ranges) {
				t.Errorf("%+v", st)
			}
			if info, err := os.Stat(d.target); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("%v, %v", info.Mode(), err)
			}
			d.checkTidy()
		})
	}
}

// What containerd makes of a template and what this makes of it is the same
// text, so that a node can change from one to the other without a rewrite.
func TestRenderedTextIsTheTemplates(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, "{\"cniVersion\": \"1.0.0\",\n \"name\": \"pods\",\n\t\"plugins\": [{\"type\": \"fakenet\", \"x\": \"{{.PodCIDR}}\"}]}\n\n")
	n := d.restarted()
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	if want := "{\"cniVersion\": \"1.0.0\",\n \"name\": \"pods\",\n\t\"plugins\": [{\"type\": \"fakenet\", \"x\": \"10.1.0.0/24\"}]}\n\n"; d.read() != want {
		t.Errorf("%q", d.read())
	}
}

func TestRenderWithoutTemplate(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	n := d.network()
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	if wrong := testenv.MissingWords(n.Render(t.Context(), "garbage"), []string{`invalid pod CIDR "garbage"`}); wrong != "" {
		t.Error(wrong) // stock looks at the CIDRs first
	}
	if n.Snapshot().Template != nil {
		t.Error("there is no template")
	}
}

// Whatever is wrong, the caller gets the cause, and the file and the network stay
// as they were (T1, T2).
func TestRenderFails(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		template string
		cidrs    string
		break_   func(d templated)
		mend     func(d templated)
		words    []string
		inReport bool
	}{
		{name: "no CIDR", cidrs: " ", words: []string{`invalid pod CIDR ""`}},
		{name: "bad CIDR", cidrs: "10.1.0.0/24,10.2.0.0/99", words: []string{`invalid pod CIDR "10.2.0.0/99"`}},
		{name: "unknown field", template: `{"name":"{{.NoSuch}}"}`, words: []string{"cannot be rendered", "NoSuch"}, inReport: true},
		{name: "does not parse", template: `{{range`, words: []string{"cannot be parsed"}, inReport: true},
		{name: "renders no JSON", template: `{"name":"pods","plugins":[{{.PodCIDR}}]}`, words: []string{"renders a list that cannot be parsed"}, inReport: true},
		{name: "renders no plugins", template: `{"name":"pods","cniVersion":"1.0.0"}`, words: []string{"renders a list that has no plugins"}, inReport: true},
		{name: "renders a bad name", template: `{"name":"po ds","plugins":[{"type":"fakenet"}]}`, words: []string{"renders a list that is not valid"}, inReport: true},
		{name: "renders too much", template: `{"name":"` + strings.Repeat(`{{range $.PodCIDRRanges}}{{range $.PodCIDRRanges}}`, 8) + strings.Repeat("x", 4000) + strings.Repeat(`{{end}}{{end}}`, 8) + `"}`,
			cidrs: strings.Repeat("10.1.0.0/24,", 9) + "fd00::/64", words: []string{"longer than 1048576 bytes"}, inReport: true},
		{name: "missing", break_: func(d templated) { d.must(os.Remove(d.template)) }, words: []string{"cannot be read", "no such file"}, inReport: true},
		{name: "empty", template: " ", words: []string{"is empty"}, inReport: true},
		{name: "directory", break_: func(d templated) {
			d.must(os.Remove(d.template))
			d.must(os.Mkdir(d.template, 0o755))
		}, words: []string{"is not a regular file but a directory"}, inReport: true},
		{
			// What root gets for a directory that cannot be written to.
			name: "conf dir cannot be made",
			break_: func(d templated) {
				d.must(os.Rename(d.conf, d.conf+".away"))
				d.must(os.WriteFile(d.conf, nil, 0o644))
			},
			mend: func(d templated) {
				d.must(os.Remove(d.conf))
				d.must(os.Rename(d.conf+".away", d.conf))
			},
			words: []string{RenderedFile, "not a directory"}, inReport: true,
		},
		{
			name: "record cannot be written",
			break_: func(d templated) {
				d.must(os.RemoveAll(filepath.Dir(d.record)))
				d.must(os.MkdirAll(d.cache, 0o755))
				d.must(os.WriteFile(filepath.Dir(d.record), nil, 0o644))
			},
			mend:  func(d templated) { d.must(os.Remove(filepath.Dir(d.record))) },
			words: []string{"not a directory"}, inReport: true,
		},
		{
			name: "something else is in the file's place",
			break_: func(d templated) {
				d.must(os.Remove(d.target))
				d.must(os.Mkdir(d.target, 0o755))
			},
			mend:  func(d templated) { d.must(os.Remove(d.target)) },
			words: []string{RenderedFile, "was not written by containerd and is not a regular file but a directory; remove it"}, inReport: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			old, snapshot := d.read(), n.Snapshot()
			record, err := os.ReadFile(d.record)
			d.must(err)
			// The list in use must not be stale or gone for reasons that are not
			// the template's.
			placed := tt.mend == nil

			if tt.break_ != nil {
				tt.break_(d)
			} else if tt.template != "" {
				d.replace(d.template, tt.template, 0o644)
			}
			if tt.cidrs == "" {
				tt.cidrs = "10.2.0.0/24"
			}
			if wrong := testenv.MissingWords(n.Render(t.Context(), tt.cidrs), tt.words); wrong != "" {
				t.Error(wrong)
			}
			s := n.Snapshot()
			if placed {
				if d.read() != old {
					t.Errorf("the file was changed: %q", d.read())
				}
				if !s.Ready() || s.Generation != snapshot.Generation {
					t.Errorf("the network was changed: %v, generation %d", s.Err(), s.Generation)
				}
				if now, _ := os.ReadFile(d.record); string(now) != string(record) {
					t.Errorf("the record was changed: %s", now)
				}
			}
			// The report has it by the time the caller has.
			if st := s.Template; tt.inReport && (st.State != "failed" || testenv.MissingWords(st.Err, tt.words) != "") {
				t.Errorf("%+v", st)
			}
			d.checkTidyUnlessBroken(placed)

			// Mended, it works.
			if tt.mend != nil {
				tt.mend(d)
			}
			d.must(os.RemoveAll(d.template))
			d.replace(d.template, dualTemplate, 0o644)
			d.must(n.Render(t.Context(), "10.3.0.0/24"))
			if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{"10.3.0.0/24"}) {
				t.Errorf("%q", ranges)
			}
			if st := n.Snapshot().Template; st.State != "rendered" || st.Err != nil {
				t.Errorf("%+v", st)
			}
			d.checkTidy()
		})
	}
}

func (d templated) checkTidyUnlessBroken(placed bool) {
	d.t.Helper()
	if placed {
		d.checkTidy()
	}
}

// Nothing there yet and no template: the cause of the network says so.
func TestTemplateIsMissingFromTheStart(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, "x")
	d.must(os.Remove(d.template))
	n := d.restarted()
	if err := n.Render(t.Context(), "10.1.0.0/24"); err == nil {
		t.Error("no error")
	}
	becomesUnready(t, n, "no network config found", "conf_template "+d.template+" cannot be read")
	if d.read() != "" {
		t.Errorf("%q", d.read())
	}
}

// The directory that conf_template asks for is made, that of a plain conf dir is
// not.
func TestRenderMakesTheConfDir(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	d.must(os.RemoveAll(d.conf))
	becomesUnready(t, n, "does not exist")
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	d.must(n.Status())
	isWatching(t, n)
}

// CIDRs change, in process and across a restart (T3); and from one family to two (T7).
func TestRenderAgain(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	for i, cidrs := range []string{"10.1.0.0/24", "10.2.0.0/24", "10.2.0.0/24,fd00::/64", "10.2.0.0/24", "10.2.0.0/24"} {
		if i%2 == 1 {
			d.must(n.Close())
			n = d.restarted()
			// What is on disk is in use before anybody asks.
			d.must(n.Status())
			if st := n.Snapshot().Template; st.State != "rendered" || len(st.CIDRs) == 0 {
				t.Errorf("after a restart: %+v", st)
			}
		}
		d.must(n.Render(t.Context(), cidrs))
		ranges, _ := subnets(t, n.Snapshot())
		if got := strings.Join(ranges, ","); got != cidrs {
			t.Errorf("rendered with %s: %s", cidrs, got)
		}
	}
	// The same again writes nothing.
	before, err := os.Stat(d.target)
	d.must(err)
	d.must(n.Render(t.Context(), "10.2.0.0/24"))
	after, err := os.Stat(d.target)
	d.must(err)
	if !os.SameFile(before, after) {
		t.Error("the file was written again")
	}
	d.checkTidy()
}

// Concurrent renders are carried out one after the other, and the file is whole
// at every moment (T4).
func TestConcurrentRenders(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	d.must(n.Render(t.Context(), "10.0.0.0/24"))
	var stop atomic.Bool
	var reader, writers sync.WaitGroup
	reader.Go(func() {
		for !stop.Load() {
			b, err := os.ReadFile(d.target)
			if err != nil || !json.Valid(b) {
				t.Errorf("%q, %v", b, err)
			}
			if err := n.Status(); err != nil {
				t.Errorf("not ready: %v", err)
			}
			time.Sleep(200 * time.Microsecond)
		}
	})
	for w := range 2 {
		writers.Go(func() {
			for i := range 25 {
				if err := n.Render(t.Context(), fmt.Sprintf("10.%d.%d.0/24", w+1, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	reader.Wait()
	d.must(n.Render(t.Context(), "10.9.9.0/24"))
	if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{"10.9.9.0/24"}) || !strings.Contains(d.read(), "10.9.9.0/24") {
		t.Errorf("%q, %s", ranges, d.read())
	}
	d.checkTidy()
}

// A caller that gives up gets its own error, and the rendering goes on.
func TestRenderCallerGone(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	d.answer("fakenet", "VERSION", reply{out: versionAnswer("1.0.0"), sh: "sleep 0.4"})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := n.Render(ctx, "10.1.0.0/24"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	becomesReady(t, n)
}

// A template in a ConfigMap volume is a symlink, and it is the target that
// changes.
func TestTemplateIsASymlink(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, "")
	d.must(os.Remove(d.template))
	target := filepath.Join(d.log, "target.template")
	text := func(name string) string { return strings.Replace(dualTemplate, `"pods"`, `"`+name+`"`, 1) }
	d.replace(target, text("first"), 0o644)
	d.must(os.Symlink(target, d.template))
	n := d.restarted()
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	called := func(name string) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != name {
				return fmt.Sprintf("%s is not in use but %+v, %v", name, s.Networks, s.Err())
			}
			return ""
		})
	}
	called("first")
	d.must(os.WriteFile(target, []byte(text("edited")), 0o644))
	called("edited")
	d.replace(target, text("replaced"), 0o644)
	called("replaced")
	other := filepath.Join(d.answers, "other.template")
	d.replace(other, text("other"), 0o644)
	d.must(os.Symlink(other, d.template+".new"))
	d.must(os.Rename(d.template+".new", d.template))
	called("other")
}

// The template changes: rendered again, in use without a call (T6).
func TestTemplateChanges(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	// Before there are CIDRs nothing is rendered.
	d.replace(d.template, dualTemplate+" ", 0o644)
	stays(t, 50*time.Millisecond, func() string { return d.read() })
	d.must(n.Render(t.Context(), "10.1.0.0/24"))

	named := func(name string) string { return strings.Replace(dualTemplate, `"pods"`, `"`+name+`"`, 1) }
	inUseIs := func(name string) {
		t.Helper()
		eventually(t, func() string {
			if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != name || s.Template.State != "rendered" {
				return fmt.Sprintf("%s is not in use: %v, %+v", name, s.Err(), s.Template)
			}
			return ""
		})
	}
	d.replace(d.template, named("two"), 0o644)
	inUseIs("two")
	d.must(os.WriteFile(d.template, []byte(named("three")), 0o644))
	inUseIs("three")
	// A bad one is named and does not hurt; it is tried once.
	d.replace(d.template, "{{", 0o644)
	eventually(t, func() string { return testenv.MissingWords(n.Snapshot().Template.Err, []string{"cannot be parsed"}) })
	if s := n.Snapshot(); !s.Ready() || s.Networks[0].Name != "three" || s.Template.State != "failed" {
		t.Errorf("%v, %+v", s.Err(), s.Template)
	}
	d.replace(d.template, named("four"), 0o644)
	inUseIs("four")
	// And while nobody was there.
	d.must(n.Close())
	d.replace(d.template, named("five"), 0o644)
	n = d.restarted()
	inUseIs("five")
	if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{"10.1.0.0/24"}) {
		t.Errorf("%q", ranges)
	}
	// The rendered file was removed on purpose: a change of the template does not
	// bring it back.
	d.must(os.Remove(d.target))
	becomesUnready(t, n, "no network config found")
	d.replace(d.template, named("six"), 0o644)
	stays(t, 100*time.Millisecond, func() string { return d.read() })
}

// An operator edits the rendered file: theirs from then on (T8).
func TestRenderedFileIsEdited(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	edited := strings.Replace(d.read(), `"pods"`, `"mine"`, 1)
	d.replace(d.target, edited, 0o644)
	eventually(t, func() string {
		s := n.Snapshot()
		if !s.Ready() || s.Networks[0].Name != "mine" {
			return "the edited list is not in use"
		}
		if !strings.Contains(s.Template.State, "has been edited since") {
			return "the report says " + s.Template.State
		}
		return ""
	})
	check := func(words ...string) {
		t.Helper()
		if d.read() != edited {
			t.Errorf("overwritten: %s", d.read())
		}
		s := n.Snapshot()
		if !s.Ready() || s.Networks[0].Name != "mine" {
			t.Errorf("%v", s.Err())
		}
		if wrong := testenv.MissingWords(errors.New(s.Template.State), words); wrong != "" || s.Template.Err != nil {
			t.Errorf("%s; %+v", wrong, s.Template)
		}
	}
	d.must(n.Render(t.Context(), "10.2.0.0/24"))
	check("not rendered", d.target, "was edited since, and stays")
	d.replace(d.template, dualTemplate+"\n", 0o644)
	d.must(n.Load())
	check("not rendered")
	d.must(n.Close())
	n = d.restarted()
	d.must(n.Render(t.Context(), "10.2.0.0/24"))
	check("not rendered")
	// Removed, it is ours to render again, when somebody asks for it.
	d.must(os.Remove(d.target))
	becomesUnready(t, n, "no network config found")
	stays(t, 100*time.Millisecond, func() string { return d.read() })
	d.must(n.Render(t.Context(), "10.2.0.0/24"))
	if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{"10.2.0.0/24"}) {
		t.Errorf("%q", ranges)
	}
}

// Files of others (T5): a list that parses has precedence, a broken one does not.
func TestForeignFiles(t *testing.T) {
	t.Parallel()
	foreign := conflist("1.0.0", "theirs", "fakenet")
	for _, tt := range []struct {
		name, file, text string
		rendered         bool
		words            []string // of the state, or of the error
		fails            bool
		inUse            string
	}{
		{"sorts before", "05-theirs.conflist", foreign, false, []string{"not rendered", `network "theirs"`, "05-theirs.conflist has precedence"}, false, "theirs"},
		{"sorts after", "99-theirs.conf", `{"cniVersion":"1.0.0","name":"theirs","type":"fakenet"}`, false, []string{"99-theirs.conf has precedence"}, false, "theirs"},
		{"broken", "05-theirs.conflist", "{", true, []string{"rendered"}, false, "pods"},
		{"in our place", RenderedFile, foreign, false, []string{"not rendered", "was not written by containerd"}, false, "theirs"},
		{"broken, in our place", RenderedFile, "{", false, []string{RenderedFile + " was not written by containerd and cannot be parsed", "; remove it to have it rendered"}, true, ""},
		{"empty, in our place", RenderedFile, "", false, []string{"and is empty; remove it"}, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			d.write(tt.file, tt.text)
			n := d.restarted()
			err := n.Render(t.Context(), "10.1.0.0/24")
			if tt.fails {
				if wrong := testenv.MissingWords(err, tt.words); wrong != "" {
					t.Error(wrong)
				}
			} else {
				d.must(err)
				if wrong := testenv.MissingWords(errors.New(n.Snapshot().Template.State), tt.words); wrong != "" {
					t.Error(wrong)
				}
			}
			_, err = os.Stat(d.target)
			if got := err == nil && tt.file != RenderedFile; got != tt.rendered {
				t.Errorf("rendered: %v", got)
			}
			if b, err := os.ReadFile(filepath.Join(d.conf, tt.file)); err != nil || string(b) != tt.text {
				t.Errorf("the foreign file holds %q, %v", b, err)
			}
			s := n.Snapshot()
			if tt.inUse == "" {
				if s.Ready() {
					t.Error("ready")
				}
			} else if !s.Ready() || s.Networks[0].Name != tt.inUse {
				t.Errorf("%v, %+v", s.Err(), s.Networks)
			}
		})
	}
}

// The template is mended: what was said of it is out of date, also when it holds
// again what is rendered already, and whatever the call was that failed.
func TestTemplateIsMended(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		break_ func(d templated, n *Network)
	}{
		{"changed", func(d templated, n *Network) {
			d.replace(d.template, "{{", 0o644)
			eventually(t, func() string { return testenv.MissingWords(n.Snapshot().Template.Err, []string{"cannot be parsed"}) })
		}},
		{"the same CIDRs again", func(d templated, n *Network) {
			d.replace(d.template, "{{", 0o644)
			if err := n.Render(t.Context(), "10.1.0.0/24"); err == nil {
				t.Error("no error")
			}
		}},
		{"missing at a call", func(d templated, n *Network) {
			d.must(os.Remove(d.template))
			if err := n.Render(t.Context(), "10.1.0.0/24"); err == nil {
				t.Error("no error")
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			tt.break_(d, n)
			if st := n.Snapshot().Template; st.State != conftemplate.StateFailed || st.Err == nil || !n.Snapshot().Ready() {
				t.Errorf("%+v", st)
			}
			d.replace(d.template, dualTemplate, 0o644)
			eventually(t, func() string {
				if st := n.Snapshot().Template; st.State != conftemplate.StateRendered || st.Err != nil {
					return fmt.Sprintf("%+v", st)
				}
				return ""
			})
		})
	}
}

// CIDRs that could not be rendered when they were reported are rendered when that
// is possible: nobody reports them again.
func TestReportedCIDRsAreNotForgotten(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, "{{")
	n := d.restarted()
	if err := n.Render(t.Context(), "10.1.0.0/24"); err == nil {
		t.Error("no error")
	}
	d.replace(d.template, dualTemplate, 0o644)
	rendered := func(cidrs string) {
		t.Helper()
		eventually(t, func() string {
			s := n.Snapshot()
			if ranges, _ := subnets(t, s); !s.Ready() || !slices.Equal(ranges, []string{cidrs}) || s.Template.State != conftemplate.StateRendered || s.Template.Err != nil {
				return fmt.Sprintf("%q, %v, %+v", ranges, s.Err(), s.Template)
			}
			return ""
		})
	}
	rendered("10.1.0.0/24")
	// What was rendered and then removed stays away.
	d.must(os.Remove(d.target))
	becomesUnready(t, n, "no network config found")
	d.replace(d.template, dualTemplate+"\n", 0o644)
	stays(t, 100*time.Millisecond, func() string { return d.read() })
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	// Other CIDRs, with a template that is mended in place.
	d.replace(d.template, "{{", 0o644)
	if err := n.Render(t.Context(), "10.2.0.0/24"); err == nil {
		t.Error("no error")
	}
	d.replace(d.template, dualTemplate, 0o644)
	rendered("10.2.0.0/24")
}

// A list that is not ours has precedence when CIDRs are reported. When it goes, in
// this process or another, they are rendered.
func TestForeignListGoes(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %t", restart), func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			d.write("05-theirs.conflist", conflist("1.0.0", "theirs", "fakenet"))
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			d.must(n.Render(t.Context(), "10.2.0.0/24")) // the latest counts
			said := func(words ...string) {
				t.Helper()
				eventually(t, func() string {
					s := n.Snapshot()
					if d.read() != "" {
						t.Fatalf("rendered: %q", d.read())
					}
					if !s.Ready() || s.Networks[0].Name != "theirs" {
						return fmt.Sprintf("%v, %+v", s.Err(), s.Networks)
					}
					return testenv.MissingWords(errors.New(s.Template.State), words)
				})
			}
			said("not rendered", "05-theirs.conflist has precedence")
			if restart {
				d.must(n.Close())
				n = d.restarted()
				said("not rendered", "05-theirs.conflist has precedence")
			}
			// Renamed, it is still theirs.
			d.must(os.Rename(filepath.Join(d.conf, "05-theirs.conflist"), filepath.Join(d.conf, "06-theirs.conflist")))
			said("06-theirs.conflist has precedence")
			// The directory that goes with it is not made again.
			d.must(os.Rename(d.conf, d.conf+".away"))
			becomesUnready(t, n, "does not exist")
			stays(t, 50*time.Millisecond, func() string {
				if _, err := os.Stat(d.conf); err == nil {
					return "the conf dir is there"
				}
				return ""
			})
			d.must(os.Rename(d.conf+".away", d.conf))
			said("06-theirs.conflist has precedence")

			d.remove("06-theirs.conflist")
			eventually(t, func() string {
				s := n.Snapshot()
				if ranges, _ := subnets(t, s); !s.Ready() || !slices.Equal(ranges, []string{"10.2.0.0/24"}) || s.Template.State != conftemplate.StateRendered {
					return fmt.Sprintf("%q, %v, %+v", ranges, s.Err(), s.Template)
				}
				return ""
			})
			// It was rendered once, and is not a second time.
			d.must(os.Remove(d.target))
			becomesUnready(t, n, "no network config found")
			d.must(n.Close())
			n = d.restarted()
			stays(t, 100*time.Millisecond, func() string { return d.read() })
			d.checkTidy()
		})
	}
}

// While a foreign list is in use, stock answers UpdateRuntimeConfig without a look
// at the template. What is wrong with it is shown, until it is mended.
func TestBadTemplateBesideAForeignList(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file string
		break_     func(d templated)
		word       string
	}{
		{"missing", "05-theirs.conflist", func(d templated) { d.must(os.Remove(d.template)) }, "no such file"},
		{"broken", "05-theirs.conflist", func(d templated) { d.replace(d.template, "{{", 0o644) }, "cannot be parsed"},
		{"renders no list", "99-theirs.conflist", func(d templated) { d.replace(d.template, `{"name":"x",}`, 0o644) }, "renders a list that cannot be parsed"},
		{"broken, theirs in our place", RenderedFile, func(d templated) { d.replace(d.template, "{{", 0o644) }, "cannot be parsed"},
		{"record cannot be written", "05-theirs.conflist", func(d templated) {
			d.must(os.MkdirAll(d.cache, 0o755))
			d.must(os.WriteFile(filepath.Dir(d.record), nil, 0o644))
		}, "not a directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			d.write(tt.file, conflist("1.0.0", "theirs", "fakenet"))
			tt.break_(d)
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			s := n.Snapshot()
			if wrong := testenv.MissingWords(s.Template.Err, []string{tt.word}); wrong != "" || !strings.HasPrefix(s.Template.State, "not rendered") || !s.Ready() || s.Networks[0].Name != "theirs" {
				t.Errorf("%s: %v, %+v", wrong, s.Err(), s.Template)
			}
			if tt.word == "not a directory" {
				return
			}
			d.replace(d.template, dualTemplate, 0o644)
			eventually(t, func() string {
				if st := n.Snapshot().Template; st.Err != nil || !strings.HasPrefix(st.State, "not rendered") {
					return fmt.Sprintf("%+v", st)
				}
				return ""
			})
			d.remove(tt.file)
			if tt.file == RenderedFile {
				// Its editor took it away.
				becomesUnready(t, n, "no network config found")
				stays(t, 100*time.Millisecond, func() string { return d.read() })
				return
			}
			eventually(t, func() string {
				if ranges, _ := subnets(t, n.Snapshot()); n.Status() != nil || !slices.Equal(ranges, []string{"10.1.0.0/24"}) {
					return fmt.Sprintf("%q, %v, %+v", ranges, n.Status(), n.Snapshot().Template)
				}
				return ""
			})
		})
	}
}

// A file that containerd without us rendered has the text that we would render:
// it becomes ours.
func TestAdopt(t *testing.T) {
	t.Parallel()
	d := newTemplated(t, dualTemplate)
	n := d.restarted()
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	d.must(n.Close())
	d.must(os.Remove(d.record))

	n = d.restarted()
	if st := n.Snapshot().Template; st.State != conftemplate.StateWaiting {
		t.Errorf("%+v", st)
	}
	d.must(n.Render(t.Context(), "10.1.0.0/24"))
	if st := n.Snapshot().Template; st.State != "rendered" {
		t.Errorf("%+v", st)
	}
	d.must(n.Render(t.Context(), "10.2.0.0/24"))
	if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{"10.2.0.0/24"}) {
		t.Errorf("%q", ranges)
	}
}

// A record that is damaged or about another file makes what is there foreign.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(d templated){
		"garbage":   func(d templated) { d.must(os.WriteFile(d.record, []byte("{"), 0o600)) },
		"empty":     func(d templated) { d.must(os.WriteFile(d.record, nil, 0o600)) },
		"directory": func(d templated) { d.must(os.Remove(d.record)); d.must(os.Mkdir(d.record, 0o755)) },
		"other": func(d templated) {
			d.must(os.WriteFile(d.record, []byte(`{"file":"/elsewhere","cidrs":["10.7.0.0/24"]}`), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			d.must(n.Close())
			damage(d)
			n = d.restarted()
			becomesReady(t, n)
			if st := n.Snapshot().Template; (st.Err == nil) != (name == "other") || len(st.CIDRs) != 0 {
				t.Errorf("%+v", st)
			}
			old := d.read()
			d.must(n.Render(t.Context(), "10.2.0.0/24"))
			if d.read() != old || !strings.HasPrefix(n.Snapshot().Template.State, "not rendered") {
				t.Errorf("%s, %+v", d.read(), n.Snapshot().Template)
			}
		})
	}
}

// A crash between the record and the file, either side: the file is ours, and the
// next call puts it right.
func TestCrashWhileRendering(t *testing.T) {
	t.Parallel()
	for _, written := range []bool{false, true} {
		t.Run(fmt.Sprintf("file written %v", written), func(t *testing.T) {
			t.Parallel()
			d := newTemplated(t, dualTemplate)
			n := d.restarted()
			d.must(n.Render(t.Context(), "10.1.0.0/24"))
			old := d.read()
			d.must(n.Close())
			var before conftemplate.Record
			b, err := os.ReadFile(d.record)
			d.must(err)
			d.must(json.Unmarshal(b, &before))

			// What is on disk in the middle of rendering for 10.2.0.0/24.
			n = d.restarted()
			d.must(n.Render(t.Context(), "10.2.0.0/24"))
			d.must(n.Close())
			var between conftemplate.Record
			b, err = os.ReadFile(d.record)
			d.must(err)
			d.must(json.Unmarshal(b, &between))
			between.SHA256 = append(before.SHA256, between.SHA256...)
			b, err = json.Marshal(between)
			d.must(err)
			d.must(os.WriteFile(d.record, b, 0o600))
			if !written {
				d.replace(d.target, old, 0o644)
			}

			n = d.restarted()
			d.must(n.Status())
			for _, cidrs := range []string{"10.2.0.0/24", "10.3.0.0/24"} {
				d.must(n.Render(t.Context(), cidrs))
				if ranges, _ := subnets(t, n.Snapshot()); !slices.Equal(ranges, []string{cidrs}) {
					t.Errorf("%q", ranges)
				}
			}
			b, err = os.ReadFile(d.record)
			d.must(err)
			var after conftemplate.Record
			d.must(json.Unmarshal(b, &after))
			if len(after.SHA256) != 1 {
				t.Errorf("%+v", after)
			}
		})
	}
}
