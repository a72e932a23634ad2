// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package conftemplate

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/diskfile"
	"github.com/cnireload/cnireload/internal/testenv"
)

const dualTemplate = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"fakenet","ipam":{"type":"host-local",
"ranges":[{{range $i, $r := .PodCIDRRanges}}{{if $i}},{{end}}[{"subnet":"{{$r}}"}]{{end}}],
"routes":[{{range $i, $r := .Routes}}{{if $i}},{{end}}{"dst":"{{$r}}"}{{end}}],"first":"{{.PodCIDR}}"}}]}`

// place is where a template and what is made of it are.
type place struct {
	t                                    *testing.T
	template, record, conf, target, away string
}

func newPlace(t *testing.T, text string) place {
	t.Helper()
	dir := t.TempDir()
	d := place{t, filepath.Join(dir, "cni.template"), filepath.Join(dir, "deep", "record.json"), filepath.Join(dir, "net.d"),
		filepath.Join(dir, "net.d", RenderedFile), filepath.Join(dir, "away")}
	d.replace(d.template, text, 0o644)
	return d
}

func (d place) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// replace puts a file in place by rename.
func (d place) replace(path, text string, mode os.FileMode) {
	d.t.Helper()
	d.must(os.WriteFile(path+".tmp", []byte(text), mode))
	d.must(os.Rename(path+".tmp", path))
}

func (d place) read() string {
	d.t.Helper()
	b, err := os.ReadFile(d.target)
	d.must(err)
	return string(b)
}

// The directory is moved away just when the template has changed: rendering it
// again must not make another one in its place.
func TestRenewBringsNothingBack(t *testing.T) {
	t.Parallel()
	for _, away := range []string{"directory", "file"} {
		d := newPlace(t, dualTemplate)
		r := New(d.template, d.record, d.conf)
		d.must(r.Render([]string{"10.1.0.0/24"}, ""))
		d.replace(d.template, dualTemplate+" ", 0o644)
		if !r.Changed() {
			t.Fatal("the template has not changed")
		}
		path := d.target
		if away == "directory" {
			path = d.conf
		}
		d.must(os.Rename(path, d.away))
		d.must(r.Renew(""))
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("the %s is there again: %v", away, err)
		}
		// Gone after it was looked for, too.
		if away == "directory" {
			if err := r.write([]byte(dualTemplate), r.record, false); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%v", err)
			}
			if _, err := os.Lstat(path); !os.IsNotExist(err) {
				t.Errorf("the %s is there again: %v", away, err)
			}
		}
		// Back again, it is rendered.
		d.must(os.Rename(d.away, path))
		if !r.Changed() {
			t.Errorf("the %s is back, and its content is old", away)
		}
		d.must(r.Renew(""))
		if !strings.HasSuffix(d.read(), " ") || r.Changed() {
			t.Errorf("%q", d.read())
		}
	}
}

// Writing fails halfway, and it cannot be told whether the file got in place:
// either content counts as ours, in this process as after a restart.
func TestWritingFailsHalfway(t *testing.T) {
	t.Parallel()
	d := newPlace(t, dualTemplate)
	r := New(d.template, d.record, d.conf)
	d.must(r.Render([]string{"10.1.0.0/24"}, ""))
	d.must(os.Rename(d.conf, d.conf+".away"))
	d.must(os.Symlink("nowhere", d.conf))
	for range 3 {
		if err := r.Render([]string{"10.2.0.0/24"}, ""); err == nil {
			t.Fatal("no error")
		}
	}
	if len(r.record.SHA256) != 2 {
		t.Errorf("%q", r.record.SHA256)
	}
	d.must(os.Remove(d.conf))
	d.must(os.Rename(d.conf+".away", d.conf))
	text, err := r.execute([]string{"10.2.0.0/24"})
	d.must(err)
	d.replace(d.target, string(text), 0o644)
	d.must(r.Render([]string{"10.3.0.0/24"}, ""))
	if !strings.Contains(d.read(), "10.3.0.0/24") {
		t.Errorf("%s, %s", d.read(), r.state)
	}
}

// FuzzTemplate renders any text for any CIDRs. It must end, with an error or with
// a list that can be used.
func FuzzTemplate(f *testing.F) {
	for _, text := range []string{
		dualTemplate, "", "{{", "{{.PodCIDR}}", `{"cniVersion":"1.0.0","name":"good","plugins":[{"type":"fakenet"}]}`, "{{.NoSuch}}", "{{range .Routes}}",
		`{"name":"{{.PodCIDR | printf "%.3s"}}","plugins":[{"type":"x"}]}`,
		`{"name":"a","plugins":[{{range $i, $r := .PodCIDRRanges}}{{if $i}},{{end}}{"type":"x","s":"{{$r}}"}{{end}}]}`,
		`{{index .PodCIDRRanges 7}}`, `{{printf "%1000000000d" 1}}`, `{{len .Routes | slice .PodCIDR}}`, `{{call .PodCIDR}}`,
	} {
		for _, cidrs := range []string{"10.1.0.0/24", "fd00::/64,10.1.0.0/24", "", ",", "x", "10.0.0.0/33"} {
			f.Add([]byte(text), cidrs)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, podCIDRs string) {
		dir := testenv.Memory(t)
		path := filepath.Join(dir, "template")
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		r := New(path, filepath.Join(dir, "record"), filepath.Join(dir, "net.d"))
		cidrs, refused := ParseCIDRs(podCIDRs)
		err := r.Render(cidrs, "")
		if refused != nil && err == nil {
			t.Errorf("rendered %q, which is %v", podCIDRs, refused)
		}
		b, rerr := os.ReadFile(r.target)
		if (err == nil) != (rerr == nil) {
			t.Fatalf("render: %v, but the file: %v", err, rerr)
		}
		if err != nil {
			if r.state != "failed" || r.err == nil {
				t.Errorf("%s, %v", r.state, r.err)
			}
			return
		}
		if c := diskfile.Read(r.target, time.Now(), confdir.MaxSize); c.Err != nil || !r.owns(c) {
			t.Errorf("what was rendered cannot be read back: %v", c.Err)
		}
		if _, err := confdir.ParseList(r.target, b); err != nil {
			t.Errorf("rendered %s, which %v", b, err)
		}
		if routes, err := defaultRoutes(cidrs); err != nil || len(routes) == 0 || len(routes) > 2 {
			t.Errorf("%q, %v", routes, err)
		}
		again := New(path, r.recordPath, filepath.Join(dir, "net.d"))
		if again.Changed() || again.Render(cidrs, "") != nil {
			t.Error("the same again is a change")
		}
	})
}
