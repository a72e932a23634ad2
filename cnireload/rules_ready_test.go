// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/rules"
	"github.com/cnireload/cnireload/internal/testenv"
)

// What a list names but its plugin is not known to run on the host is shown with
// its problem and does not count (N1 to N3: antrea#1957, AKS#3998, Cisco ACI).
func TestNamedButNotRun(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, entry, typ string }{
		{"antrea", `{"type":"antrea","ipam":{"type":"host-local"}}`, "host-local"},
		{"azure", `{"type":"azure-vnet","mode":"transparent","ipam":{"type":"azure-cns","mode":"overlay"}}`, "azure-cns"},
		{"aci", `{"type":"opflex-agent-cni","ep-rpc-sock":"SOCKET","ipam":{"type":"opflex-agent-cni-ipam"}}`, "opflex-agent-cni-ipam"},
		{"unknown", `{"type":"somebodys","delegate":{"type":"theirs"}}`, "theirs"},
		{"multus' daemon", `{"type":"multus-shim","daemonSocketDir":"DIR","delegates":[{"type":"theirs"}]}`, "theirs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("antrea", "azure-vnet", "opflex-agent-cni", "multus-shim", "somebodys")
			dir, err := os.MkdirTemp("", "named") // paths of sockets are short
			d.must(err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			socket := filepath.Join(dir, "multus.sock")
			testenv.Listen(t, "unix", socket)
			d.write("10-a.conflist", conflist("0.3.1", "a", strings.NewReplacer("SOCKET", socket, "DIR", dir).Replace(tt.entry)))
			n := d.network()
			d.must(n.Load())
			d.must(n.Status())
			p := n.Snapshot().Networks[0].Plugins
			if len(p) != 2 || p[1].Type != tt.typ || p[1].Counts || p[1].Path != "" || testenv.MissingWords(p[1].Problem, []string{`plugin "` + tt.typ + `" not found in `}) != "" {
				t.Errorf("%+v", p)
			}
			if !p[0].Counts || p[0].Problem != nil {
				t.Errorf("%+v", p[0])
			}

			// Where it happens to be there it is not asked: it may hang.
			d.answer(tt.typ, "VERSION", reply{sh: "exec sleep 300"})
			d.install(tt.typ)
			n = d.network()
			d.must(n.Load())
			d.must(n.Status())
			if p := n.Snapshot().Networks[0].Plugins[1]; p.Path != filepath.Join(d.bin, tt.typ) || p.Problem != nil || d.count(tt.typ, "VERSION") != 0 {
				t.Errorf("%+v", p)
			}
		})
	}
}

// multus looks in its binDir before bin_dirs, and so does what it delegates to
// (N4: multus-cni#376). What is installed there is noticed.
func TestMultusBinDir(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	own := filepath.Join(d.answers, "own")
	d.must(os.Mkdir(own, 0o755))
	d.install("multus")
	d.write("00-multus.conf", fmt.Sprintf(`{"cniVersion":"0.3.1","name":"m","type":"multus","binDir":%q,"delegates":[
		{"cniVersion":"0.3.1","name":"d","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}},{"type":"portmap"}]}]}`, own))
	n := d.started()
	becomesUnready(t, n, `plugin "bridge" not found in `+own+":"+d.bin)
	d.installIn(own, "bridge")
	becomesUnready(t, n, `plugin "host-local" not found in `+own+":"+d.bin)
	d.installIn(own, "host-local")
	becomesUnready(t, n, `plugin "portmap" not found in `+own+":"+d.bin)
	d.install("portmap")
	s := becomesReady(t, n)
	for _, p := range s.Networks[0].Plugins {
		want := filepath.Join(own, p.Type)
		if p.Type == "multus" || p.Type == "portmap" {
			want = filepath.Join(d.bin, p.Type)
		}
		if p.Path != want || !p.Counts {
			t.Errorf("%+v, want %s", p, want)
		}
	}
	// The first that is there is the one that is run.
	d.installIn(own, "portmap")
	eventually(t, func() string {
		plugins := n.Snapshot().Networks[0].Plugins
		if p := plugins[len(plugins)-1]; p.Path != filepath.Join(own, "portmap") {
			return p.Path
		}
		return ""
	})
}

// A file that Calico's agent has just emptied is about to be written. One that
// stays empty keeps nobody: the plugin goes on with the host's name (N5).
func TestEmptyNodenameFile(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("calico")
	file := filepath.Join(d.answers, "nodename")
	entry := func(more string) string {
		return conflist("1.0.0", "a", fmt.Sprintf(`{"type":"calico","nodename_file":%q%s}`, file, more))
	}
	d.must(os.WriteFile(file, nil, 0o644))
	for _, named := range []string{`,"nodename":"n"`, `,"hostname":"n"`} {
		d.write("10-a.conflist", entry(named))
		n := d.network()
		d.must(n.Load())
		d.must(n.Status())
	}
	d.write("10-a.conflist", entry(""))
	d.must(os.Chtimes(file, time.Now(), time.Now()))
	n := d.started()
	s := becomesUnready(t, n, file+" (nodename_file), which is empty, since ")
	if delGatesOpen(t, s) {
		t.Error("DEL does not wait for what is about to be written")
	}
	d.must(os.Chtimes(file, time.Now(), time.Now().Add(-time.Minute)))
	s = becomesReady(t, n)
	if g := s.Gates[0]; !g.Open || g.Mode != GateReport || g.Cause != rules.ErrLongEmpty.Error() {
		t.Errorf("%+v", g)
	}
	if !delGatesOpen(t, s) {
		t.Error("DEL waits for a file that stays empty")
	}
	if err := n.Admit(t.Context(), ""); err != nil {
		t.Error(err)
	}
}

// A list that runs only loopback is no pod network (N12). Stock says ready, and
// each pod fails.
func TestOnlyLoopback(t *testing.T) {
	t.Parallel()
	const why = "it runs only loopback, which connects no pod"
	d := newNode(t)
	d.install("fakenet", "loopback")
	d.write("99-loopback.conf", `{"cniVersion":"0.4.0","name":"lo","type":"loopback"}`)
	n := d.started()
	becomesUnready(t, n, `network "lo" in `+d.conf+"/99-loopback.conf: "+why)
	// Another list comes first.
	d.write("10-a.conflist", good)
	becomesReady(t, n)
	// One that serves another interface does no harm.
	all := d.network(WithPluginMaxConfNum(0))
	d.must(all.Load())
	d.must(all.Status())
	if got := len(all.Snapshot().Networks); got != 2 {
		t.Errorf("%d networks", got)
	}
	d.write("00-lo.conflist", conflist("1.0.0", "lo", "loopback", "loopback"))
	becomesUnready(t, n, "00-lo.conflist: "+why, "remove this one if it sorts before it")
	d.write("00-lo.conflist", conflist("1.0.0", "lo", "loopback", "fakenet"))
	becomesReady(t, n)
	// Stock's rule, for who asks for it.
	d.remove("00-lo.conflist")
	d.remove("10-a.conflist")
	parse := d.network(WithReadiness("parse"))
	d.must(parse.Load())
	d.must(parse.Status())
}

// delGatesOpen looks at the gates that DEL of the lists in use needs.
func delGatesOpen(t *testing.T, s *Snapshot) bool {
	t.Helper()
	open, gates := true, 0
	for _, a := range s.attachments {
		for _, g := range rules.Gates(a.list) {
			if g.DEL {
				gates++
				err := g.Check(t.Context())
				open = open && (err == nil || errors.Is(err, rules.ErrLongEmpty))
			}
		}
	}
	if gates == 0 {
		t.Error("DEL needs nothing")
	}
	return open
}

// DEL waits for what it needs, and for nothing else: multus-shim says that it
// succeeded while nobody was there to do anything (N16), Calico needs its
// kubeconfig only with the Kubernetes datastore (N17).
func TestDELNeeds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, typ, entry string
		unix             bool
		waits            bool
	}{
		{"multus-shim", "multus-shim", `{"type":"multus-shim","daemonSocketDir":"DIR"}`, true, true},
		{"calico with etcd", "calico", `{"type":"calico","nodename_file_optional":true,"kubernetes":{"kubeconfig":"DIR/k"}}`, false, false},
		{"calico with Kubernetes", "calico", `{"type":"calico","nodename_file_optional":true,"datastore_type":"kubernetes","kubernetes":{"kubeconfig":"DIR/k"}}`, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install(tt.typ)
			d.answer(tt.typ, "ADD", reply{out: result("1.0.0", "10.1.0.2")})
			dir, err := os.MkdirTemp("", "del") // paths of sockets are short
			d.must(err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			stop := func() { d.must(os.Remove(filepath.Join(dir, "k"))) }
			start := func() { d.must(os.WriteFile(filepath.Join(dir, "k"), nil, 0o644)) }
			if tt.unix {
				start = func() {
					_, closed := testenv.Listen(t, "unix", filepath.Join(dir, "multus.sock"))
					stop = func() { closed(); d.must(os.Remove(filepath.Join(dir, "multus.sock"))) }
				}
			}
			start()
			d.write("10-a.conflist", conflist("1.0.0", "a", strings.ReplaceAll(tt.entry, "DIR", dir)))
			n := d.network()
			d.must(n.Load())
			_, err = n.Setup(t.Context(), "c", "/ns")
			d.must(err)
			stop()
			n.pace.agent = within
			removed := make(chan error, 1)
			go func() { removed <- n.Remove(t.Context(), "c", "/ns") }()
			if tt.waits {
				stays(t, 300*time.Millisecond, func() string {
					if got := d.count(tt.typ, "DEL"); got != 0 {
						return fmt.Sprintf("%d DEL", got)
					}
					return ""
				})
				start()
			}
			began := time.Now()
			if err := <-removed; err != nil || d.count(tt.typ, "DEL") != 1 || time.Since(began) > within/2 {
				t.Errorf("%d DEL after %s, %v", d.count(tt.typ, "DEL"), time.Since(began), err)
			}
		})
	}
}
