// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/cnireload/cnireload/test/harness"
)

const (
	configFile   = "/etc/containerd/config.toml"
	failpointDir = "/tmp/failpoint-cni-net.d"
)

// The handler runc-fp, the second network and NRI's socket are what upstream's tests ask for.
const config = `version = 4
[plugins.'io.containerd.cri.v1.runtime']
  drain_exec_sync_io_timeout = '10s'
  cdi_spec_dirs = []
  # Not available on every test machine.
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc-fp]
  cni_conf_dir = '` + failpointDir + `'
  cni_max_conf_num = 1
  pod_annotations = ['io.containerd.runtime.v2.shim.failpoint.*']
  runtime_type = 'runc-fp.v1'
[plugins.'io.containerd.snapshotter.v1.overlayfs']
  slow_chown = true
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = '/var/run/nri-test.sock'
  plugin_path = '/no/pre-launched/nri/plugins'
`

func network(name, plugin, bridge, subnet4, subnet6, more string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
  {"type": %q, "bridge": %q, "isGateway": true, "ipMasq": true, "promiscMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}], [{"subnet": %q}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}%s},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`, name, plugin, bridge, subnet4, subnet6, more)
}

// layOut puts the configuration and the plugins where containerd looks for them by default.
func layOut(plugins, failpoints string) error {
	files := map[string]string{
		configFile:                         config,
		"/etc/cni/net.d/10-test.conflist":  network("test", "bridge", "cni0", "10.88.0.0/16", "fd00:88::/64", ""),
		failpointDir + "/10-test.conflist": network("test-failpoint", "cni-bridge-fp", "cni-fp", "10.89.0.0/16", "fd00:89::/64", `, "capabilities": {"io.kubernetes.cri.pod-annotations": true}`),
	}
	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	list, err := filepath.Glob(filepath.Join(plugins, "*"))
	if err != nil {
		return err
	}
	for _, p := range append(list, filepath.Join(failpoints, "cni-bridge-fp")) {
		if err := harness.Install(p, filepath.Join("/opt/cni/bin", filepath.Base(p))); err != nil {
			return err
		}
	}
	return nil
}

// importImages makes images with the names and, as far as the tests look at it, the content of
// those that they would pull.
func importImages(busybox string) error {
	pause, err := harness.Pause()
	if err != nil {
		return err
	}
	shell := func(t *tree) error {
		out, err := exec.Command(busybox, "--list").Output()
		if err != nil {
			return fmt.Errorf("%s --list: %w", busybox, err)
		}
		t.dir("tmp", 0o1777, 0)
		t.copy("bin/busybox", busybox)
		for _, applet := range strings.Fields(string(out)) {
			if applet != "busybox" {
				t.link("bin/"+applet, "busybox")
			}
		}
		// The groups of root and daemon are what TestAdditionalGids asks for.
		t.file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n")
		t.file("etc/group", "root:x:0:\ndaemon:x:1:\nwheel:x:10:root\nnogroup:x:65534:\n")
		return nil
	}
	sh := map[string]any{"Env": []string{"PATH=/bin"}, "Cmd": []string{"sh"}}
	volumes := func(list ...string) map[string]any {
		v := map[string]any{}
		for _, l := range list {
			v[l] = struct{}{}
		}
		return map[string]any{"Env": []string{"PATH=/bin"}, "Cmd": []string{"sh"}, "Volumes": v}
	}
	images := []struct {
		name   string
		config map[string]any
		fill   func(*tree) error
	}{
		{harness.SandboxImage, map[string]any{"Entrypoint": []string{"/pause"}}, func(t *tree) error { t.copy("pause", pause); return nil }},
		{"ghcr.io/containerd/busybox:1.36", sh, shell},
		{"ghcr.io/containerd/alpine:3.14.0", sh, func(t *tree) error { t.file("etc/os-release", "NAME=test\n"); return shell(t) }},
		{"ghcr.io/containerd/volume-copy-up:2.2", volumes("/test_dir", "C:/weird_test_dir", "/:colon_prefixed"), func(t *tree) error {
			t.file("test_dir/test_file", "test_content\n")
			t.file("C:/weird_test_dir/weird_test_file", "test_content\n")
			t.file(":colon_prefixed/colon_prefixed_file", "test_content\n")
			return shell(t)
		}},
		{"ghcr.io/containerd/volume-ownership:2.1", volumes("/test_dir"), func(t *tree) error { t.dir("test_dir", 0o755, 65534); return shell(t) }},
	}
	for _, im := range images {
		t := &tree{seen: map[string]bool{}}
		t.w = tar.NewWriter(&t.buf)
		err := im.fill(t)
		if t.err == nil {
			t.err = err
		}
		if t.err == nil {
			t.err = t.w.Close()
		}
		if t.err != nil {
			return fmt.Errorf("image %s: %w", im.name, t.err)
		}
		archive := filepath.Join("/tmp", "image.tar")
		if err := os.WriteFile(archive, dockerArchive(im.name, im.config, t.buf.Bytes()), 0o644); err != nil {
			return err
		}
		if b, err := exec.Command("ctr", "-n", "k8s.io", "images", "import", archive).CombinedOutput(); err != nil {
			return fmt.Errorf("import %s: %w: %s", im.name, err, b)
		}
	}
	return nil
}

// dockerArchive is the image as "docker save" writes it: one layer.
func dockerArchive(name string, config map[string]any, layer []byte) []byte {
	sum := sha256.Sum256(layer)
	conf := encode(map[string]any{"architecture": runtime.GOARCH, "os": "linux", "config": config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}}})
	t := &tree{seen: map[string]bool{}}
	t.w = tar.NewWriter(&t.buf)
	t.file("config.json", string(conf))
	t.file("layer.tar", string(layer))
	t.file("manifest.json", string(encode([]any{map[string]any{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})))
	if err := t.w.Close(); err != nil {
		panic(err) // writing to memory cannot fail
	}
	return t.buf.Bytes()
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings
	}
	return b
}

// tree collects the files of a layer. The first error stays.
type tree struct {
	buf  bytes.Buffer
	w    *tar.Writer
	seen map[string]bool
	err  error
}

func (t *tree) add(h tar.Header, content []byte) {
	for dir := filepath.Dir(h.Name); dir != "." && !t.seen[dir]; dir = filepath.Dir(dir) {
		if up := filepath.Dir(dir); up == "." || t.seen[up] {
			t.dir(dir, 0o755, 0)
			dir = h.Name
		}
	}
	h.Size = int64(len(content))
	if t.err == nil {
		t.err = t.w.WriteHeader(&h)
	}
	if t.err == nil {
		_, t.err = t.w.Write(content)
	}
}

func (t *tree) dir(name string, mode int64, owner int) {
	t.seen[name] = true
	t.add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode, Uid: owner, Gid: owner}, nil)
}

func (t *tree) file(name, content string) {
	t.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, []byte(content))
}

func (t *tree) link(name, target string) {
	t.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (t *tree) copy(name, from string) {
	b, err := os.ReadFile(from)
	if t.err == nil {
		t.err = err
	}
	t.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755}, b)
}
