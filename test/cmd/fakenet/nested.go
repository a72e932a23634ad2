// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cnireload/cnireload/test/fake"
)

// calicoNeeds is what Calico's plugin does first: nothing without the file that
// its agent writes, at ADD and at DEL. Addresses are its IPAM's affair.
var calicoNeeds = []fake.Need{{
	Key: "nodename_file", Target: "/var/lib/calico/nodename",
	Advice: "check that the calico/node container is running and has mounted /var/lib/calico/",
}}

// need ends the call if something is missing.
func (p *plugin) need(needs []fake.Need) {
	for _, n := range needs {
		if n.Verb != "" && n.Verb != p.call.Command {
			continue
		}
		target := cmp.Or(p.text(n.Key), n.Target)
		if target == "" {
			continue
		}
		var err error
		if n.Socket {
			var c net.Conn
			if c, err = net.Dial("unix", target); err == nil {
				_ = c.Close()
			}
		} else {
			_, err = os.Stat(target)
		}
		if err != nil && n.Quiet {
			os.Exit(0)
		}
		if err != nil {
			p.fail(999, strings.TrimSuffix(fmt.Sprintf("%v: %s", err, n.Advice), ": "))
		}
	}
}

// object is the configuration, or what it has under a key with dots.
func (p *plugin) object(key string) any {
	var v any
	if json.Unmarshal([]byte(p.call.Stdin), &v) != nil || key == "" {
		return nil
	}
	for part := range strings.SplitSeq(key, ".") {
		m, _ := v.(map[string]any)
		v = m[part]
	}
	return v
}

func (p *plugin) text(key string) string {
	s, _ := p.object(key).(string)
	return s
}

// runOthers runs what the configuration delegates to, if anything, as ADD and DEL
// of the plugin itself. A chained plugin has its address already.
func (p *plugin) runOthers(state fake.State) (ran bool, err error) {
	var confs []map[string]any
	for _, key := range state.Runs {
		switch v := p.object(key).(type) {
		case map[string]any:
			if key == "ipam" {
				var whole map[string]any
				if err := json.Unmarshal([]byte(p.call.Stdin), &whole); err != nil {
					return false, err
				}
				confs = append(confs, whole)
				confs[len(confs)-1]["type"] = v["type"]
			} else {
				confs = append(confs, p.delegate(v)...)
			}
		case []any:
			for _, d := range v {
				if m, ok := d.(map[string]any); ok {
					confs = append(confs, p.delegate(m)...)
				}
			}
		}
	}
	// At DEL the previous result is that of the whole list.
	if len(confs) == 0 || p.call.Command == "ADD" && len(p.conf.PrevResult) > 0 {
		return false, nil
	}
	if p.call.Command == "DEL" {
		slices.Reverse(confs)
	}
	dirs := filepath.SplitList(os.Getenv("CNI_PATH"))
	if dir := cmp.Or(p.text("binDir"), state.BinDir); dir != "" {
		dirs = append([]string{dir}, dirs...)
	}
	var first []byte
	for _, conf := range confs {
		out, err := p.runOther(conf, dirs)
		if err != nil {
			return true, err
		}
		if first == nil {
			first = out
		}
	}
	if p.call.Command == "DEL" {
		return true, nil
	}
	var result map[string]any
	if err := json.Unmarshal(first, &result); err != nil {
		return true, err
	}
	result["interfaces"] = []any{map[string]any{"name": p.call.IfName, "sandbox": p.call.NetNS}}
	if ips, ok := result["ips"].([]any); ok {
		for _, ip := range ips {
			if m, ok := ip.(map[string]any); ok {
				m["interface"] = 0
			}
		}
	}
	return true, p.print(result)
}

// delegate is the configuration of a delegate, or of each plugin of one that is a
// list, as the delegating plugin completes it.
func (p *plugin) delegate(d map[string]any) []map[string]any {
	confs := []map[string]any{d}
	if list, ok := d["plugins"].([]any); ok {
		confs = nil
		for _, e := range list {
			if m, ok := e.(map[string]any); ok {
				confs = append(confs, m)
			}
		}
	}
	for _, c := range confs {
		c["cniVersion"], c["name"] = p.conf.CNIVersion, p.conf.Name
	}
	return confs
}

func (p *plugin) runOther(conf map[string]any, dirs []string) ([]byte, error) {
	name, _ := conf["type"].(string)
	path := ""
	for _, dir := range dirs {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() {
			path = filepath.Join(dir, name)
			break
		}
	}
	if name == "" || path == "" {
		p.fail(100, fmt.Sprintf("failed to find plugin %q in path %s", name, dirs))
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path)
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Env = append(os.Environ(), "CNI_PATH="+strings.Join(dirs, string(filepath.ListSeparator)))
	out, err := cmd.Output()
	if err != nil {
		_, _ = os.Stdout.Write(out) // its own error
		os.Exit(1)
	}
	return out, nil
}
