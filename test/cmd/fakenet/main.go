// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command fakenet is a CNI plugin that answers every verb, records every call
// and misbehaves on request. Linked under other names it stands in for them:
// as a chained plugin it hands the previous result on, as loopback it answers
// for lo, as calico it needs its agent's nodename file and runs the IPAM it is
// told to, and so does any other that the test describes so. It makes no interface: the runtime only looks at the result.
package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cnireload/cnireload/test/fake"
)

var allVersions = []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// config is the part of a plugin's configuration this plugin reads.
type config struct {
	CNIVersion string          `json:"cniVersion"`
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Subnet     string          `json:"subnet"`
	PrevResult json.RawMessage `json:"prevResult"`
}

type plugin struct {
	name string
	dir  fake.Dir
	call fake.Call
	conf config
	// resultVersion is the cniVersion of a result; empty means the list's.
	resultVersion string
	lock          *os.File
}

// childMillis is how a child is told that it is one.
const childMillis = "FAKENET_CHILD_MILLIS"

func main() {
	// What runs is the first thread. Of a process that was killed in a call that cannot be interrupted, no
	// environment can be read if that is another thread's.
	runtime.LockOSThread()
	if millis, err := strconv.Atoi(os.Getenv(childMillis)); err == nil {
		time.Sleep(time.Duration(millis) * time.Millisecond)
		return
	}
	p := plugin{name: filepath.Base(os.Args[0]), dir: fake.Of(os.Args[0])}
	if err := p.run(); err != nil {
		p.fail(100, err.Error())
	}
}

func (p *plugin) run() error {
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(stdin)
	// A plugin asked for its version may be given nothing to read.
	_ = json.Unmarshal(stdin, &p.conf)
	p.call = fake.Call{
		Time:        time.Now(),
		PID:         os.Getpid(),
		Plugin:      p.name,
		Command:     os.Getenv("CNI_COMMAND"),
		Network:     p.conf.Name,
		ContainerID: os.Getenv("CNI_CONTAINERID"),
		IfName:      os.Getenv("CNI_IFNAME"),
		NetNS:       os.Getenv("CNI_NETNS"),
		Args:        os.Getenv("CNI_ARGS"),
		StdinSHA256: hex.EncodeToString(sum[:]),
		Stdin:       string(stdin),
	}
	for arg := range strings.SplitSeq(p.call.Args, ";") {
		if pod, ok := strings.CutPrefix(arg, "K8S_POD_NAME="); ok {
			p.call.Pod = pod
		}
	}
	state, err := p.dir.State(p.name)
	if err != nil {
		return err
	}
	nth, err := p.record()
	if err != nil {
		return err
	}
	// What the runtime was killed before it wrote is no configuration, and
	// nothing that plugins are made with allocates without one.
	if p.call.Command == "ADD" && p.conf.Name == "" {
		p.fail(6, "the configuration has no name")
	}

	b := state.Of(p.call.Command, p.call.Pod, nth)
	if err := p.burden(b); err != nil {
		return err
	}
	if b.ResultVersion != "" {
		p.resultVersion = b.ResultVersion
	}
	switch b.Mode {
	case fake.Fail:
		p.fail(b.Code, b.Msg)
	case fake.Hang:
		time.Sleep(time.Hour)
	case fake.Slow:
		time.Sleep(time.Duration(b.Millis) * time.Millisecond)
	case fake.Silent:
		os.Exit(b.Exit)
	case fake.Print:
		fmt.Print(b.Msg)
		os.Exit(b.Exit)
	case fake.Flood:
		flood(b)
		os.Exit(b.Exit)
	}
	if len(state.Versions) > 0 && p.call.Command != "VERSION" && !slices.Contains(state.Versions, p.conf.CNIVersion) {
		// As the library that most plugins are made with says it.
		p.fail(1, fmt.Sprintf("incompatible CNI versions: config is %q, plugin supports %q", p.conf.CNIVersion, state.Versions))
	}
	if p.name == "calico" && len(state.Needs) == 0 {
		state.Needs, state.Runs = calicoNeeds, []string{"ipam"}
	}
	if p.call.Command == "ADD" || p.call.Command == "DEL" {
		p.need(state.Needs)
		if ran, err := p.runOthers(state); ran || err != nil {
			return err
		}
	}

	switch p.call.Command {
	case "VERSION":
		versions := state.Versions
		if len(versions) == 0 {
			versions = allVersions
		}
		return p.print(map[string]any{"cniVersion": "1.1.0", "supportedVersions": versions})
	case "ADD":
		return p.add()
	case "DEL":
		return p.leases(func(m map[string]string) { delete(m, p.key()) })
	case "CHECK", "STATUS", "GC":
		return nil
	}
	p.fail(4, fmt.Sprintf("unknown CNI_COMMAND %q", p.call.Command))
	return nil
}

// burden does what a behaviour asks for before its mode.
func (p *plugin) burden(b fake.Behavior) error {
	if b.IgnoreTerm {
		signal.Ignore(syscall.SIGTERM)
	}
	if b.Child != "" {
		millis := b.ChildMillis
		if millis == 0 {
			millis = int(time.Hour / time.Millisecond)
		}
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), childMillis+"="+strconv.Itoa(millis))
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: b.Child == "setsid"}
		if err := child.Start(); err != nil {
			return err
		}
	}
	if b.Lock != "" {
		// Never closed: the lock is held until the process ends.
		f, err := os.OpenFile(b.Lock, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		p.lock = f
		if err := flock(f); err != nil {
			return err
		}
	}
	if b.Write != "" {
		if err := os.WriteFile(b.Write, []byte(p.call.Command), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// flood prints without holding all of it in memory.
func flood(b fake.Behavior) {
	to := os.Stdout
	if b.Stream == "stderr" {
		to = os.Stderr
	}
	chunk := []byte(strings.Repeat(fake.Garbage, 64<<10/len(fake.Garbage)))
	for left := b.Bytes; left > 0; left -= len(chunk) {
		// Who reads it may have gone.
		if _, err := to.Write(chunk[:min(left, len(chunk))]); err != nil {
			return
		}
	}
}

// flock waits for the lock of a file. Go's runtime interrupts system calls.
func flock(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// key names an address: another network or plugin does not give it back.
func (p *plugin) key() string {
	return strings.Join([]string{p.call.ContainerID, p.call.IfName, p.conf.Name, p.name}, "/")
}

func (p *plugin) add() error {
	if len(p.conf.PrevResult) > 0 {
		if p.resultVersion == "" {
			return p.print(p.conf.PrevResult)
		}
		var result map[string]any
		if err := json.Unmarshal(p.conf.PrevResult, &result); err != nil {
			return err
		}
		result["cniVersion"] = p.resultVersion
		return p.print(result)
	}
	address := "127.0.0.1/8"
	if p.conf.Type != "loopback" {
		subnet, err := netip.ParsePrefix("10.199.0.0/16")
		if p.conf.Subnet != "" {
			subnet, err = netip.ParsePrefix(p.conf.Subnet)
		}
		if err != nil {
			return err
		}
		if err := p.leases(func(m map[string]string) {
			used := map[string]bool{}
			for _, a := range m {
				used[a] = true
			}
			ip := subnet.Masked().Addr().Next()
			for ok := true; ok; ok = used[address] {
				ip = ip.Next()
				address = netip.PrefixFrom(ip, subnet.Bits()).String()
			}
			m[p.key()] = address
		}); err != nil {
			return err
		}
	}
	return p.print(map[string]any{
		"cniVersion": cmp.Or(p.resultVersion, p.conf.CNIVersion),
		"interfaces": []any{map[string]any{"name": p.call.IfName, "sandbox": p.call.NetNS}},
		"ips":        []any{map[string]any{"address": address, "interface": 0}},
		"dns":        map[string]any{},
	})
}

// record logs the call and counts it: it returns how many calls with this verb
// this plugin has now seen.
func (p *plugin) record() (nth int, err error) {
	line, err := json.Marshal(p.call)
	if err != nil {
		return 0, err
	}
	err = p.locked(func() error {
		f, err := os.OpenFile(p.dir.CallsPath(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := f.Write(append(line, '\n')); err != nil {
			return err
		}
		counts := map[string]int{}
		if err := p.update("counts.json", &counts, func() {
			counts[p.name+" "+p.call.Command]++
			nth = counts[p.name+" "+p.call.Command]
		}); err != nil {
			return err
		}
		return nil
	})
	return nth, err
}

func (p *plugin) leases(change func(map[string]string)) error {
	return p.locked(func() error {
		m := map[string]string{}
		return p.update(filepath.Base(p.dir.LeasesPath()), &m, func() { change(m) })
	})
}

// update rewrites one JSON file of the plugin's folder; the lock is held.
func (p *plugin) update(name string, v any, change func()) error {
	path := filepath.Join(string(p.dir), name)
	if b, err := os.ReadFile(path); err == nil {
		if err := json.Unmarshal(b, v); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	change()
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (p *plugin) locked(do func() error) error {
	f, err := os.OpenFile(p.dir.LockPath(), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := flock(f); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return do()
}

func (p *plugin) print(v any) error {
	return json.NewEncoder(os.Stdout).Encode(v)
}

func (p *plugin) fail(code uint, msg string) {
	version := p.conf.CNIVersion
	if version == "" {
		version = "1.1.0"
	}
	_ = p.print(map[string]any{"cniVersion": version, "code": code, "msg": msg})
	os.Exit(1)
}
