// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/testenv"
)

// FuzzScan puts any bytes into a file of each kind and into a drop-in. Looking at
// them must never fail, and what it lets through libcni must let through as well
// and have what an attachment needs.
func FuzzScan(f *testing.F) {
	for _, seed := range []string{
		"", " \n", "{", "null", "[]", "3", `"x"`, "{}", good, good[:len(good)-1],
		`{"cniVersion":"0.4.0","name":"a","type":"fakenet","ipam":{"type":"host-local"}}`,
		`{"name":"a","plugins":[{"type":"m","delegates":[{"type":"d","plugins":[{"type":"e"}]}],"delegate":{"type":"f","ipam":{"type":"g"}}}]}`,
		`{"name":"../../etc","plugins":[{"type":"../x"}]}`,
		`{"name":"a","cniVersion":"7.7.7","plugins":[{"type":"x"}]}`,
		`{"name":"a","cniVersions":["1.0.0","9.9.9"],"cniVersion":"0.3.1","plugins":[{"type":"x"}]}`,
		`{"name":"a","cniVersions":["1.0.0","x"],"plugins":[{"type":"x"}]}`,
		`{"name":"a","loadOnlyInlinedPlugins":"TRUE","plugins":[{"type":"x","capabilities":{"portMappings":true}}]}`,
		`{"name":"a","disableCheck":3,"plugins":[{"type":"x"}]}`,
		`{"name":"a","plugins":[null,{"type":"x"}]}`,
		"\xef\xbb\xbf" + good, "\x00\xff", strings.Repeat("[", 20000),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := testenv.Memory(t)
		conf := filepath.Join(dir, "net.d")
		if err := os.MkdirAll(filepath.Join(conf, "drop"), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string][]byte{
			"10-a.conflist": b, "20-b.conf": b, "30-c.json": b, "drop/10.conf": b,
			"40-d.conflist": []byte(`{"name":"drop","plugins":[{"type":"fakenet"}]}`),
		} {
			if err := os.WriteFile(filepath.Join(conf, name), content, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		scan := confdir.NewScanner(conf).Scan()
		if scan.Err != nil || len(scan.Files) != 4 {
			t.Fatalf("%d files, %v", len(scan.Files), scan.Err)
		}
		l := &loop{n: &Network{config: config{confDir: conf, maxConf: 0, prefix: "eth"}}, recipe: recipe{scan: true}}
		nets, skipped, _ := l.choose(scan, time.Now())
		if len(nets)+len(skipped) != 4 {
			t.Errorf("%d in use and %d skipped", len(nets), len(skipped))
		}
		for _, s := range skipped {
			if s.Reason == "" {
				t.Errorf("%s is skipped for no reason", s.File)
			}
		}
		for _, n := range nets {
			if err := confdir.ValidateName(n.list.Name); err != nil || len(n.list.Plugins) == 0 {
				t.Errorf("in use: %q with %d plugins", n.list.Name, len(n.list.Plugins))
			}
			for _, p := range n.plugins {
				if p.Version == "" && p.Role == RolePlugin {
					t.Errorf("%+v needs no version", p)
				}
			}
			// What go-cni would have refused is refused.
			var theirs *libcni.NetworkConfigList
			var err error
			if filepath.Ext(n.file.Path) == ".conflist" {
				theirs, err = libcni.ConfListFromFile(n.file.Path)
			} else {
				var c *libcni.NetworkConfig
				//lint:ignore SA1019 what go-cni calls is what to compare with
				if c, err = libcni.ConfFromFile(n.file.Path); err == nil {
					//lint:ignore SA1019 likewise
					theirs, err = libcni.ConfListFromConf(c)
				}
			}
			if err != nil || theirs.Name != n.list.Name || theirs.CNIVersion != n.list.CNIVersion || len(theirs.Plugins) != len(n.list.Plugins) {
				t.Fatalf("%s: ours %+v, libcni's %+v, %v", n.file.Path, n.list, theirs, err)
			}
			for i, p := range theirs.Plugins {
				if !bytes.Equal(p.Bytes, n.list.Plugins[i].Bytes) {
					t.Errorf("%s: plugin %d is %s, libcni's %s", n.file.Path, i, n.list.Plugins[i].Bytes, p.Bytes)
				}
			}
		}
	})
}
