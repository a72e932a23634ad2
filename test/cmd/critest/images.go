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
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cnireload/cnireload/test/harness"
)

// image stands in for one of the images that critest asks for.
type image struct {
	// refs are repository and tag, without the registry's host.
	refs   []string
	layers []layer
	config imageConfig
}

type imageConfig struct {
	User       string   `json:"User,omitempty"`
	Env        []string `json:"Env,omitempty"`
	Entrypoint []string `json:"Entrypoint,omitempty"`
	Cmd        []string `json:"Cmd,omitempty"`
}

// layer is a tar file.
type layer []byte

const (
	// The ports on which critest looks for the web servers.
	webPort     = 80
	hostNetPort = 12003
	staging     = "k8s-staging-cri-tools/"
	endToEnd    = "e2e-test-images/"
)

// makeImages makes every image out of the unpacked packages and our own pause.
func makeImages(debs string) ([]image, error) {
	busybox, err := busyboxLayer(filepath.Join(debs, "busybox"))
	if err != nil {
		return nil, err
	}
	nginx, err := nginxLayer(filepath.Join(debs, "nginx"))
	if err != nil {
		return nil, err
	}
	pauseBinary, err := harness.Pause()
	if err != nil {
		return nil, err
	}
	pauseFile, err := os.ReadFile(pauseBinary)
	if err != nil {
		return nil, err
	}
	nonewprivs, err := harness.Build("nonewprivs")
	if err != nil {
		return nil, err
	}
	setuid, err := os.ReadFile(nonewprivs)
	if err != nil {
		return nil, err
	}
	page := map[string]string{"srv/www/index.html": "<html><body>It works.</body></html>\n"}
	sh := imageConfig{Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Cmd: []string{"sh"}}
	with := func(change func(*imageConfig)) imageConfig {
		c := sh
		change(&c)
		return c
	}
	// nginx is process 1, as in the image that it stands in for.
	web := with(func(c *imageConfig) { c.Cmd = []string{"nginx", "-g", "daemon off;"} })
	list := []image{
		{[]string{endToEnd + "busybox:1.29-2"}, []layer{busybox}, sh},
		{[]string{endToEnd + "nginx:1.14-2"}, []layer{busybox, nginx, files(page), files(nginxConf(webPort))}, web},
		{[]string{staging + "hostnet-nginx-" + runtime.GOARCH + ":latest"}, []layer{busybox, nginx, files(page), files(nginxConf(hostNetPort))}, web},
		// Apache writes its command line to its log when it starts; busybox's httpd says nothing.
		{[]string{endToEnd + "httpd:2.4.39-4"}, []layer{busybox, files(page)}, with(func(c *imageConfig) {
			c.Cmd = []string{"sh", "-c", fmt.Sprintf("echo \"Command line: 'httpd -f'\"; exec httpd -f -p %d -h /srv/www", webPort)}
		})},
		{[]string{endToEnd + "nonewprivs:1.3"}, []layer{tarOf(func(t *tree) { t.file("nonewprivs", 0o4755, setuid) })}, imageConfig{Entrypoint: []string{"/nonewprivs"}}},
		// Not the same image as the daemon's sandbox image, which would then have one more name.
		{[]string{"pause:3.9"}, []layer{tarOf(func(t *tree) { t.file("pause", 0o755, pauseFile) })}, imageConfig{Env: []string{"PATH=/"}, Entrypoint: []string{"/pause"}}},
		{[]string{staging + "test-image-predefined-group:latest"}, []layer{busybox, files(map[string]string{
			"etc/passwd": passwd + "default-user:x:1000:1000::/home/default-user:/bin/sh\n",
			"etc/group":  group + "default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
		})}, with(func(c *imageConfig) { c.User = "1000" })},
	}
	for name, user := range map[string]string{
		"uid": "1002", "username": "www-data", "uid-group": "1003:1004", "username-group": "www-data:1004",
	} {
		list = append(list, image{[]string{staging + "test-image-user-" + name + ":latest"}, []layer{busybox}, with(func(c *imageConfig) { c.User = user })})
	}
	for _, refs := range [][]string{
		{"test-image-latest:latest"}, {"test-image-tag:test"}, {"test-image-tag:all"},
		{"test-image-tags:1", "test-image-tags:2", "test-image-tags:3"},
		{"test-image-1:latest"}, {"test-image-2:latest"}, {"test-image-3:latest"},
	} {
		im := image{layers: []layer{busybox, files(map[string]string{"TEST": refs[0] + "\n"})}, config: sh}
		for _, ref := range refs {
			im.refs = append(im.refs, staging+ref)
		}
		list = append(list, im)
	}
	return list, nil
}

const (
	passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n"
	group  = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"
)

// Both read what the kernel tells, as the real ones do.
const (
	pgrep = `#!/bin/sh
# pgrep -f PATTERN or pgrep NAME
file=comm
[ "$1" != -f ] || { file=cmdline; shift; }
found=1
for d in /proc/[0-9]*; do
	[ "$d" != /proc/$$ ] || continue
	if tr '\\0' ' ' 2>/dev/null <"$d/$file" | grep -q -e "$1"; then
		echo "${d#/proc/}"
		found=0
	fi
done
exit $found
`
	ipcs = `#!/bin/sh
# ipcs -m: key, id, owner, permissions, size and attachments of the shared memory segments
awk 'NR > 1 { printf "0x%08x %s %s %s %s %s\n", $1, $2, $8, $3, $4, $7 }' /proc/sysvipc/shm
`
)

func nginxConf(port int) map[string]string {
	return map[string]string{"etc/nginx/nginx.conf": fmt.Sprintf(`user www-data;
pid /var/run/nginx.pid;
error_log /dev/stderr;
events {}
http {
	access_log /dev/stdout;
	default_type text/html;
	server {
		listen %d;
		root /srv/www;
	}
}
`, port)}
}

// busyboxLayer is a small system: busybox under the names of its applets.
func busyboxLayer(dir string) (layer, error) {
	var binary string
	for _, p := range []string{"bin/busybox", "usr/bin/busybox"} {
		if _, err := os.Stat(filepath.Join(dir, p)); err == nil {
			binary = filepath.Join(dir, p)
		}
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("no busybox in %s: run hack/debs.sh again: %w", dir, err)
	}
	out, err := exec.Command(binary, "--list-full").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list-full: %w", binary, err)
	}
	return tarOf(func(t *tree) {
		// As distributions have it, so that packages of both layouts fit on top.
		for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
			t.dir("usr/"+d, 0o755)
			t.link(d, "usr/"+d)
		}
		for _, d := range []string{"dev", "proc", "sys", "etc", "home", "run", "var/log", "var/www", "srv"} {
			t.dir(d, 0o755)
		}
		t.dir("root", 0o700)
		t.dir("tmp", 0o1777)
		t.link("var/run", "/run")
		t.file("usr/bin/busybox", 0o755, content)
		for _, applet := range strings.Fields(string(out)) {
			// Hard links, because a spec masks one of them and runs another. Some
			// are in two folders; the first is as good as the second.
			t.add(&tar.Header{Typeflag: tar.TypeLink, Linkname: "usr/bin/busybox",
				Name: path.Join("usr", path.Base(path.Dir(applet)), path.Base(applet)), Mode: 0o755}, nil)
		}
		// Debian's busybox lacks two applets that critest runs in a container.
		t.file("usr/bin/pgrep", 0o755, []byte(pgrep))
		t.file("usr/bin/ipcs", 0o755, []byte(ipcs))
		t.file("etc/passwd", 0o644, []byte(passwd))
		t.file("etc/group", 0o644, []byte(group))
	}), nil
}

// nginxLayer is nginx with its libraries.
func nginxLayer(dir string) (layer, error) {
	var failed error
	l := tarOf(func(t *tree) {
		for _, d := range []string{"var/lib/nginx", "var/log/nginx"} {
			t.dir(d, 0o755)
		}
		failed = filepath.WalkDir(dir, func(file string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			name, _ := filepath.Rel(dir, file)
			if top, _, _ := strings.Cut(name, "/"); slices.Contains([]string{"bin", "sbin", "lib", "lib64"}, top) {
				name = "usr/" + name
			}
			if !strings.HasPrefix(name, "usr/lib") && name != "usr/sbin/nginx" || strings.Contains(name, "/gconv/") {
				return nil
			}
			if e.Type() == fs.ModeSymlink {
				target, err := os.Readlink(file)
				t.link(name, target)
				return err
			}
			content, err := os.ReadFile(file)
			t.file(name, 0o755, content)
			return err
		})
		if failed == nil && !t.has("usr/sbin/nginx") {
			failed = fmt.Errorf("no usr/sbin/nginx in %s: run hack/debs.sh again", dir)
		}
	})
	return l, failed
}

func files(content map[string]string) layer {
	return tarOf(func(t *tree) {
		for _, name := range slices.Sorted(maps.Keys(content)) {
			t.file(name, 0o644, []byte(content[name]))
		}
	})
}

// tree collects a layer's files; the folders above them come by themselves.
type tree struct {
	w    *tar.Writer
	seen map[string]bool
}

func tarOf(fill func(*tree)) layer {
	var b bytes.Buffer
	t := &tree{tar.NewWriter(&b), map[string]bool{}}
	fill(t)
	// Writing to memory cannot fail, and sizes are those of the content.
	if err := t.w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func (t *tree) has(name string) bool { return t.seen[name] }

func (t *tree) add(h *tar.Header, content []byte) {
	if t.seen[h.Name] {
		return
	}
	if up := path.Dir(h.Name); up != "." {
		t.dir(up, 0o755)
	}
	t.seen[h.Name] = true
	h.ModTime = time.Unix(0, 0)
	h.Size = int64(len(content))
	if h.Typeflag == tar.TypeDir {
		h.Name += "/"
	}
	if err := t.w.WriteHeader(h); err != nil {
		panic(err)
	}
	if _, err := t.w.Write(content); err != nil {
		panic(err)
	}
}

func (t *tree) dir(name string, mode int64) {
	t.add(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil)
}

func (t *tree) file(name string, mode int64, content []byte) {
	t.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (t *tree) link(name, target string) {
	t.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

// writeLayout writes the image as an OCI layout, which crane pushes.
func (im image) writeLayout(dir string) error {
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return err
	}
	put := func(mediaType string, data []byte) (map[string]any, error) {
		sum := sha256.Sum256(data)
		name := hex.EncodeToString(sum[:])
		return map[string]any{"mediaType": mediaType, "digest": "sha256:" + name, "size": len(data)},
			os.WriteFile(filepath.Join(blobs, name), data, 0o644)
	}
	putJSON := func(mediaType string, v any) (map[string]any, error) {
		data, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		return put(mediaType, data)
	}
	var layers, diffs []any
	for _, l := range im.layers {
		d, err := put("application/vnd.oci.image.layer.v1.tar", l)
		if err != nil {
			return err
		}
		layers, diffs = append(layers, d), append(diffs, d["digest"])
	}
	config, err := putJSON("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": im.config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	})
	if err != nil {
		return err
	}
	const manifestType = "application/vnd.oci.image.manifest.v1+json"
	manifest, err := putJSON(manifestType, map[string]any{"schemaVersion": 2, "mediaType": manifestType, "config": config, "layers": layers})
	if err != nil {
		return err
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []any{manifest}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644)
}
