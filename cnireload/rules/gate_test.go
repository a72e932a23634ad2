// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package rules

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/internal/testenv"
)

// conflist returns a list of entries, or of types that stand for entries.
func conflist(version string, plugins ...string) []byte {
	entries := make([]string, len(plugins))
	for i, p := range plugins {
		if entries[i] = p; !strings.HasPrefix(p, "{") {
			entries[i] = fmt.Sprintf(`{"type":%q}`, p)
		}
	}
	return fmt.Appendf(nil, `{"cniVersion":%q,"name":"a","plugins":[%s]}`, version, strings.Join(entries, ","))
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// line writes a gate as a line, for tables.
func (g Gate) line() string {
	s := fmt.Sprintf("%s: %s %s", g.Plugin, g.Kind, g.Target)
	if g.Instead != "" {
		s += " or " + g.Instead
	}
	if g.Key != "" {
		s += " (" + g.Key + ")"
	}
	return s + ", " + string(g.Mode) + ", " + strings.Join(g.Ops(), "+")
}

func lines(gates []Gate) []string {
	var s []string
	for _, g := range gates {
		s = append(s, g.line())
	}
	return s
}

// Each kind of gate, against what is really there.
func TestGateChecks(t *testing.T) {
	t.Parallel()
	// Not t.TempDir: paths of sockets are short.
	dir, err := os.MkdirTemp("", "gate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	at := func(name string) string { return filepath.Join(dir, name) }
	put := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(at(name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, name string) {
		t.Helper()
		if err := os.Symlink(target, at(name)); err != nil {
			t.Fatal(err)
		}
	}
	put("empty", "")
	put("full", "x")
	for name, age := range map[string]time.Duration{"long-empty": emptyFor, "future-empty": -time.Hour} {
		put(name, "")
		if err := os.Chtimes(at(name), time.Now(), time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	link("full", "link")
	link("nowhere", "dangling")
	put("flannel", "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n")
	put("flannel6", "FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=\n")
	put("flannel-empty", "FLANNEL_NETWORK=\nFLANNEL_SUBNET=\nFLANNEL_MTU=\nFLANNEL_IPMASQ=\n")
	put("flannel-half", "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\nFLANNEL_M")
	put("flannel-none", "FLANNEL_NETWORK=10.1.0.0/16\n")
	if err := syscall.Mkfifo(at("fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	testenv.Listen(t, "unix", at("live"))
	_, stop := testenv.Listen(t, "unix", at("dead"))
	stop()
	datagram, err := net.ListenPacket("unixgram", at("datagram"))
	if err != nil {
		t.Fatal(err)
	}
	defer datagram.Close()
	open, _ := testenv.Listen(t, "tcp", "127.0.0.1:0")
	closed, stop := testenv.Listen(t, "tcp", "127.0.0.1:0")
	stop()
	for _, tt := range []struct {
		kind   Kind
		target string
		want   string
	}{
		{File, at("full"), ""},
		{File, at("empty"), ""},
		{File, at("link"), ""},
		{File, at("fifo"), ""},
		{File, dir, ""},
		{File, at("none"), "does not exist"},
		{File, at("no/such/dir"), "does not exist"},
		{File, at("dangling"), "does not exist"},
		{File, at("full/x"), "cannot be looked at: stat " + at("full/x") + ": not a directory"},
		{FileNotEmpty, at("full"), ""},
		{FileNotEmpty, at("empty"), "is empty"},
		{FileNotEmpty, at("long-empty"), ErrLongEmpty.Error()},
		{FileNotEmpty, at("future-empty"), ErrLongEmpty.Error()},
		{FileNotEmpty, at("fifo"), ""},
		{FileNotEmpty, at("none"), "does not exist"},
		{FlannelEnv, at("flannel"), ""},
		{FlannelEnv, at("flannel6"), ""},
		{FlannelEnv, at("flannel-half"), "lacks FLANNEL_MTU, FLANNEL_IPMASQ"},
		{FlannelEnv, at("flannel-none"), "lacks FLANNEL_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ"},
		{FlannelEnv, at("flannel-empty"), "lacks FLANNEL_NETWORK, FLANNEL_SUBNET, FLANNEL_MTU"},
		{FlannelEnv, at("full"), "lacks FLANNEL_NETWORK, FLANNEL_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ"},
		{FlannelEnv, at("empty"), "is empty"},
		{FlannelEnv, at("none"), "does not exist"},
		{FlannelEnv, at("fifo"), "is not a regular file but a FIFO"},
		{UnixSocket, at("live"), ""},
		{UnixSocket, at("dead"), "does not accept connections: connect: connection refused"},
		{UnixSocket, at("full"), "does not accept connections: connect: connection refused"},
		{UnixSocket, at("none"), "does not exist"},
		{UnixSocket, at("datagram"), "does not accept connections: connect: protocol wrong type for socket"},
		{TCPPort, open.Addr().String(), ""},
		{TCPPort, closed.Addr().String(), "does not accept connections: connect: connection refused"},
		{Configuration, "subnet or ranges", "is not set"},
	} {
		c := Checker{Gate: Gate{Kind: tt.kind, Target: tt.target}}
		for _, err := range []error{c.Check(t.Context()), c.Gate.Check(t.Context())} {
			if errorText(err) != tt.want {
				t.Errorf("%s %s: %q, want %q", tt.kind, tt.target, errorText(err), tt.want)
			}
		}
	}

	// Either will do.
	for _, tt := range []struct {
		target, instead, want string
	}{
		{at("live"), closed.Addr().String(), ""},
		{at("none"), open.Addr().String(), ""},
		{at("none"), closed.Addr().String(), "does not exist"},
	} {
		g := Gate{Kind: UnixSocket, Target: tt.target, Instead: tt.instead}
		if err := g.Check(t.Context()); errorText(err) != tt.want {
			t.Errorf("%+v: %v", g, err)
		}
	}
}

// Something that takes connections in but has no room for more: a dial waits.
func fullTCP(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for range 8 {
		c, err := net.DialTimeout("tcp", address, 300*time.Millisecond)
		if err != nil {
			return address
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Skip("this system always has room for another connection")
	return ""
}

// A check on something that does not answer ends by its bound, in the same words
// each time, and the next does not start another look beside it.
func TestGateCheckIsBounded(t *testing.T) {
	t.Parallel()
	c := Checker{Gate: Gate{Kind: TCPPort, Target: fullTCP(t)}}
	for i := range 5 {
		check := c.Check
		if i == 4 {
			check = c.Gate.Check
		}
		start := time.Now()
		err := check(t.Context())
		if errorText(err) != "has not answered within 1s" {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took > Bound+time.Second {
			t.Errorf("took %s", took)
		}
	}
	// A look that hangs for ever is one look.
	hanging := make(chan error, 1)
	c.pending = hanging
	for range 2 {
		if err := c.Check(t.Context()); err != ErrNoAnswer || c.pending != hanging {
			t.Errorf("%v", err)
		}
	}
	hanging <- nil
	if err := c.Check(t.Context()); err != nil || c.pending != nil {
		t.Errorf("%v, %v", err, c.pending)
	}
	// The caller goes away.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.pending = make(chan error)
	start := time.Now()
	if err := c.Check(ctx); err == nil || time.Since(start) > Bound/2 {
		t.Errorf("%v after %s", err, time.Since(start))
	}
}

// FuzzGates has rules look at any configuration that libcni lets through.
func FuzzGates(f *testing.F) {
	for _, row := range ruleRows {
		f.Add(conflist("1.0.0", row.plugins...))
	}
	for _, seed := range []string{
		`{"type":"calico","kubernetes":null}`, `{"type":"azure-vnet","cnsurl":"http://[::1","ipam":{"type":"azure-cns"}}`,
		`{"type":"multus","delegates":[` + strings.Repeat(`{"type":"multus","delegates":[`, 30) + strings.Repeat(`]}`, 30) + `]}`,
		`{"type":"flannel","delegate":` + strings.Repeat(`{"type":"flannel","delegate":`, 30) + `1` + strings.Repeat(`}`, 30) + `}`,
		`{"type":"bridge","IPAM":{"Type":"dhcp"},"ipam":{"type":"host-local"}}`, `{"type":"calico","a":1,"A":2,"NODENAME_FILE":"/x","Nodename_file":"/y"}`,
	} {
		f.Add(conflist("1.0.0", seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := libcni.ConfListFromBytes(b)
		if err != nil {
			return
		}
		for _, p := range Of(list) {
			if p.Version == "" && p.Role == RolePlugin {
				t.Errorf("%+v needs no version", p)
			}
			if !p.Counts && (p.Role == RolePlugin || p.Gates != nil) {
				t.Errorf("%+v", p)
			}
		}
		gates := Gates(list)
		for _, g := range gates {
			if g.Plugin == "" || g.Target == "" || g.Kind == "" || g.Mode != Enforce && g.Mode != Report {
				t.Errorf("%+v", g)
			}
			if g.Kind == TCPPort {
				if _, _, err := net.SplitHostPort(g.Target); err != nil {
					t.Errorf("%s: %v", g.Target, err)
				}
			}
		}
		// Whether gates are the same ones is told by comparing them.
		for range 3 {
			if again := Gates(list); !slices.Equal(again, gates) {
				t.Fatalf("%q, then %q", lines(gates), lines(again))
			}
		}
	})
}
