// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package status

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/timeout"

	"github.com/cnireload/cnireload/cnireload"
	"github.com/cnireload/cnireload/internal/oneline"
)

// place is a node's directories, under a short path: sockets have a limit.
type place struct {
	t    testing.TB
	dir  string
	conf string
	bin  string
}

func newPlace(t testing.TB) *place {
	t.Helper()
	dir, err := os.MkdirTemp("", "place")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &place{t: t, dir: dir, conf: filepath.Join(dir, "net.d"), bin: filepath.Join(dir, "bin")}
	for _, d := range []string{p.conf, p.bin} {
		p.must(os.Mkdir(d, 0o755))
	}
	return p
}

func (p *place) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// put writes a file, by rename so that it is never seen half written.
func (p *place) put(name, content string, mode os.FileMode) {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	// A process that is forked meanwhile must not hold the file open: it could
	// not be executed.
	syscall.ForkLock.RLock()
	err := os.WriteFile(path+".tmp", []byte(content), mode)
	syscall.ForkLock.RUnlock()
	p.must(err)
	p.must(os.Chmod(path+".tmp", mode))
	p.must(os.Rename(path+".tmp", path))
}

// install puts in place plugins that answer VERSION and, with the script given,
// STATUS and everything else.
func (p *place) install(script string, types ...string) {
	p.t.Helper()
	for _, typ := range types {
		p.put("bin/"+typ, fmt.Sprintf(`#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}' ;;
*) %s ;;
esac
`, script), 0o755)
	}
}

func (p *place) list(version string, plugins ...string) {
	p.t.Helper()
	p.put("net.d/10-a.conflist", conflist(version, plugins...), 0o644)
}

func conflist(version string, plugins ...string) string {
	entries := make([]string, len(plugins))
	for i, e := range plugins {
		if entries[i] = e; !strings.HasPrefix(e, "{") {
			entries[i] = fmt.Sprintf(`{"type":%q}`, e)
		}
	}
	return fmt.Sprintf(`{"cniVersion":%q,"name":"a","plugins":[%s]}`, version, strings.Join(entries, ","))
}

func (p *place) network(opts ...cnireload.Opt) *cnireload.Network {
	p.t.Helper()
	n, err := cnireload.New(append([]cnireload.Opt{
		cnireload.WithPluginConfDir(p.conf),
		cnireload.WithPluginDir([]string{p.bin}),
		cnireload.WithCacheDir(filepath.Join(p.dir, "cache")),
		cnireload.WithDefaultConf,
	}, opts...)...)
	p.must(err)
	p.t.Cleanup(func() { _ = n.Close() })
	return n
}

// socket accepts connections, or leaves behind what a dead listener does.
func (p *place) socket(name string, live bool) {
	p.t.Helper()
	l, err := net.Listen("unix", filepath.Join(p.dir, name))
	p.must(err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if live {
		p.t.Cleanup(func() { _ = l.Close() })
	} else {
		p.must(l.Close())
	}
}

var (
	sinceTime = regexp.MustCompile(`since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`)
	inA       = `network "a" in DIR/net.d/10-a.conflist: `
)

// The words of each cause, as people see and search for them. docs/readiness.md
// says what to do about each.
func TestMessages(t *testing.T) {
	// A plugin that answers has all the time it needs on a busy machine; one
	// that hangs has little.
	bound := func(key string, d time.Duration) (undo func()) {
		old := timeout.Get(key)
		timeout.Set(key, d)
		return func() { timeout.Set(key, old) }
	}
	hostile := strings.Repeat("long ", 1000)
	for _, tt := range []struct {
		name string
		make func(p *place)
		opts func(p *place) []cnireload.Opt
		want string // DIR is the place's, TIME any
	}{
		{name: "not loaded", want: "the network configuration is still being loaded"},
		{name: "empty", make: func(*place) {}, want: "no network config found in DIR/net.d"},
		{name: "dir missing", make: func(p *place) { p.must(os.Remove(p.conf)) }, want: "conf dir DIR/net.d does not exist"},
		{name: "dir unreadable", make: func(p *place) {
			p.must(os.Remove(p.conf))
			p.put("net.d", "", 0o644)
		}, want: "conf dir DIR/net.d cannot be read: open DIR/net.d: not a directory"},
		{name: "no dir", make: func(*place) {}, opts: func(*place) []cnireload.Opt { return []cnireload.Opt{cnireload.WithPluginConfDir("")} },
			want: "no cni conf dir is configured"},
		{name: "file empty", make: func(p *place) { p.put("net.d/00-a.conflist", "", 0o644) },
			want: "no usable network config in DIR/net.d: DIR/net.d/00-a.conflist is empty"},
		{name: "files bad", make: func(p *place) {
			p.put("net.d/00-a.conf", `{"type":"x"}`, 0o644)
			p.put("net.d/01-a.conflist", "{", 0o644)
			p.put("net.d/02-a.conflist", "", 0o644)
		}, want: "no usable network config in DIR/net.d: DIR/net.d/00-a.conf is not valid: network name is missing (and 2 more files)"},
		{name: "dangling", make: func(p *place) { p.must(os.Symlink("nowhere", filepath.Join(p.conf, "10-a.conflist"))) },
			want: "no usable network config in DIR/net.d: DIR/net.d/10-a.conflist is a symlink whose target does not exist: file does not exist"},
		{name: "network_name", make: func(p *place) { p.list("1.0.0", "x") },
			opts: func(*place) []cnireload.Opt { return []cnireload.Opt{cnireload.WithNetworkName("other")} },
			want: `no usable network config in DIR/net.d: DIR/net.d/10-a.conflist is network "a"; network_name asks for "other"`},
		{name: "too few", make: func(p *place) {
			p.install("exit 0", "x")
			p.list("1.0.0", "x")
		}, opts: func(*place) []cnireload.Opt { return []cnireload.Opt{cnireload.WithMinNetworkCount(3)} },
			want: "1 of the 3 networks that are needed are loaded"},
		{name: "template waits", make: func(p *place) { p.put("template", conflist("1.0.0", "x"), 0o644) },
			opts: func(p *place) []cnireload.Opt {
				return []cnireload.Opt{cnireload.WithTemplate(filepath.Join(p.dir, "template"), filepath.Join(p.dir, "record"))}
			},
			want: "no network config found in DIR/net.d; conf_template DIR/template is waiting for the pod CIDR from UpdateRuntimeConfig"},
		{name: "plugin missing", make: func(p *place) { p.list("1.0.0", "x") }, want: inA + `plugin "x" not found in DIR/bin`},
		{name: "plugin not executable", make: func(p *place) {
			p.put("bin/x", "", 0o644)
			p.list("1.0.0", "x")
		}, want: inA + `plugin "x" cannot be executed: DIR/bin/x is not executable (mode 0644)`},
		{name: "ipam missing", make: func(p *place) {
			p.install("exit 0", "bridge")
			p.list("1.0.0", `{"type":"bridge","ipam":{"type":"y"}}`)
		}, want: inA + `plugin "y" not found in DIR/bin`},
		{name: "only loopback", make: func(p *place) {
			p.install("exit 0", "loopback")
			p.list("1.0.0", "loopback")
		}, want: inA + `it runs only loopback, which connects no pod: install the list of a pod network, and remove this one if it sorts before it`},
		{name: "loopback missing", make: func(p *place) {
			p.install("exit 0", "x")
			p.list("1.0.0", "x")
		}, opts: func(*place) []cnireload.Opt { return []cnireload.Opt{cnireload.WithLoNetwork} },
			want: `network "cni-loopback": plugin "loopback" not found in DIR/bin; install it, or set use_internal_loopback = true`},
		{name: "version", make: func(p *place) {
			p.put("bin/x", `#!/bin/sh
echo '{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0"]}'`, 0o755)
			p.list("1.0.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) does not support cniVersion 1.0.0, only 0.3.1, 0.4.0`},
		{name: "mis-answers", make: func(p *place) {
			p.put("bin/x", "#!/bin/sh\necho v1", 0o755)
			p.list("1.0.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) mis-answers VERSION: decoding version info: invalid character 'v' looking for beginning of value`},
		{name: "VERSION hangs", make: func(p *place) {
			p.put("bin/x", "#!/bin/sh\nexec sleep 300", 0o755)
			p.list("1.0.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) mis-answers VERSION: plugin DIR/bin/x was killed: VERSION did not finish within 200ms (io.containerd.timeout.cri.cni.version)`},
		{name: "STATUS", make: func(p *place) {
			p.install(`echo '{"code":50,"msg":"not available","details":"agent starts"}'; exit 1`, "x")
			p.list("1.1.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) answers STATUS with code 50: not available; agent starts`},
		{name: "STATUS hangs", make: func(p *place) {
			p.install("exec sleep 300", "x")
			p.list("1.1.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) does not answer STATUS: plugin DIR/bin/x was killed: STATUS did not finish within 200ms (io.containerd.timeout.cri.cni.status)`},
		{name: "STATUS is hostile", make: func(p *place) {
			p.put("answer", fmt.Sprintf(`{"code":50,"msg":"two\nlines \u001b[31m %s"}`, hostile), 0o644)
			p.install("cat "+filepath.Join(p.dir, "answer")+"; exit 1", "x")
			p.list("1.1.0", "x")
		}, want: inA + `plugin "x" (DIR/bin/x) answers STATUS with code 50: two lines ` + "\uFFFD[31m " + hostile},
		{name: "required", make: func(p *place) {
			p.install("exit 0", "x")
			p.list("1.0.0", "x")
		}, opts: func(*place) []cnireload.Opt {
			return []cnireload.Opt{cnireload.WithRequiredPlugins([]string{"portmap"})}
		},
			want: `required plugin "portmap" is in none of the networks in use`},
		{name: "gate: file", make: func(p *place) {
			p.install("exit 0", "calico")
			p.list("1.0.0", `{"type":"calico","nodename":"n","nodename_file":"`+p.dir+`/nodename"}`)
		}, want: inA + `plugin "calico" needs DIR/nodename (nodename_file), which does not exist, since TIME`},
		{name: "gate: file empty", make: func(p *place) {
			p.install("exit 0", "calico")
			p.put("nodename", "", 0o644)
			p.list("1.0.0", `{"type":"calico","nodename_file":"`+p.dir+`/nodename"}`)
		}, want: inA + `plugin "calico" needs DIR/nodename (nodename_file), which is empty, since TIME`},
		{name: "gate: file unreadable", make: func(p *place) {
			p.install("exit 0", "calico")
			p.put("f", "", 0o644)
			p.list("1.0.0", `{"type":"calico","nodename_file_optional":true,"kubernetes":{"kubeconfig":"`+p.dir+`/f/k"}}`)
		}, want: inA + `plugin "calico" needs DIR/f/k (kubernetes.kubeconfig), which cannot be looked at: stat DIR/f/k: not a directory, since TIME`},
		{name: "gate: flannel", make: func(p *place) {
			p.install("exit 0", "flannel", "bridge", "host-local")
			p.put("subnet.env", "FLANNEL_SUBNET=10.1.0.1/24\n", 0o644)
			p.list("1.0.0", `{"type":"flannel","subnetFile":"`+p.dir+`/subnet.env"}`)
		}, want: inA + `plugin "flannel" needs DIR/subnet.env (subnetFile), which lacks FLANNEL_NETWORK, FLANNEL_MTU, FLANNEL_IPMASQ, since TIME`},
		{name: "gate: no socket", make: func(p *place) {
			p.install("exit 0", "multus-shim")
			p.list("1.0.0", `{"type":"multus-shim","daemonSocketDir":"`+p.dir+`"}`)
		}, want: inA + `plugin "multus-shim" needs DIR/multus.sock (daemonSocketDir), which does not exist, since TIME`},
		{name: "gate: dead socket", make: func(p *place) {
			p.install("exit 0", "macvlan", "dhcp")
			p.socket("d", false)
			p.list("1.0.0", `{"type":"macvlan","ipam":{"type":"dhcp","daemonSocketPath":"`+p.dir+`/d"}}`)
		}, want: inA + `plugin "dhcp" needs DIR/d (ipam.daemonSocketPath), which does not accept connections: connect: connection refused, since TIME`},
		{name: "gate: configuration", make: func(p *place) {
			p.install("exit 0", "bridge", "host-local")
			p.list("1.0.0", `{"type":"bridge","ipam":{"type":"host-local"}}`)
		}, want: inA + `plugin "host-local" needs subnet or ranges (ipam.ranges), which is not set, since TIME`},
		{name: "gate: hostile", make: func(p *place) {
			p.install("exit 0", "calico")
			p.list("1.0.0", `{"type":"calico","nodename":"n","nodename_file":"/no\nwhere\u001b/`+hostile+`"}`)
		}, want: inA + `plugin "calico" needs /no where` + "\uFFFD/" + hostile},
		{name: "ready_files", make: func(p *place) {
			p.install("exit 0", "x")
			p.list("1.0.0", "x")
		}, opts: func(p *place) []cnireload.Opt {
			return []cnireload.Opt{cnireload.WithReadyFiles([]string{p.bin, filepath.Join(p.dir, "flag")})}
		},
			want: `DIR/flag (ready_files) does not exist, since TIME`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for verb, key := range map[string]string{"STATUS": cnireload.TimeoutStatus, "VERSION": cnireload.TimeoutVersion} {
				d := 30 * time.Second
				if tt.name == verb+" hangs" {
					d = 200 * time.Millisecond
				}
				defer bound(key, d)()
			}
			p := newPlace(t)
			var opts []cnireload.Opt
			if tt.opts != nil {
				opts = tt.opts(p)
			}
			n := p.network(opts...)
			if tt.make != nil {
				tt.make(p)
				_ = n.Load()
			}
			v := Of(map[string]*cnireload.Network{"default": n}, "default")
			c := v.Condition()
			checkText(t, c.Message)
			got := strings.ReplaceAll(c.Message, p.dir, "DIR")
			got = sinceTime.ReplaceAllString(got, "since TIME")
			want := prefix + ": " + tt.want
			if strings.Contains(want, hostile) {
				// What matters is how it begins, and that it ends.
				want = want[:300]
				if len(c.Message) != oneline.Max {
					t.Errorf("%d bytes", len(c.Message))
				}
				got = got[:min(len(got), len(want))]
			}
			if got != want || c.Ready || c.Reason != ReasonNotReady {
				t.Errorf("%v %s\ngot  %q\nwant %q", c.Ready, c.Reason, got, want)
			}
			checkConsistent(t, v, "default")
		})
	}
}

// The list in use is gone, and what the next one needs is not known yet.
func TestWaitingMessage(t *testing.T) {
	p := newPlace(t)
	p.install("exit 0", "x")
	p.put("bin/y", "#!/bin/sh\nexec sleep 300", 0o755)
	p.list("1.0.0", "x")
	n := p.network()
	n.Start()
	// A busy machine may not have answered for x by now.
	for end := time.Now().Add(time.Minute); n.Status() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(n.Status())
		}
	}
	p.put("net.d/20-b.conflist", conflist("1.0.0", "y"), 0o644)
	p.must(os.Remove(filepath.Join(p.conf, "10-a.conflist")))
	want := prefix + `: network "a" in ` + p.conf + `/20-b.conflist: waiting for plugin "y" (` + p.bin + `/y) to answer VERSION`
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		v := Of(map[string]*cnireload.Network{"default": n}, "default")
		checkConsistent(t, v, "default")
		got := v.Condition().Message
		if got == want {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("got  %q\nwant %q", got, want)
		}
	}
}
