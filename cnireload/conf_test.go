// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/internal/diskfile"
	"github.com/cnireload/cnireload/internal/testenv"
)

const good = `{"cniVersion":"1.0.0","name":"good","plugins":[{"type":"fakenet"}]}`

// A bad file beside a good one is passed over, with a reason that names what is
// wrong with it.
func TestSkippedFiles(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		file  string // "00-bad.conflist" if empty
		text  string
		make  func(d *node, path string)
		words []string
	}{
		{name: "empty", text: "", words: []string{"is empty"}},
		{name: "white space", text: " \n\t\r\n", words: []string{"is empty"}},
		{name: "garbage", text: "{ not json", words: []string{"cannot be parsed", "invalid character"}},
		{name: "cut off", text: good[:len(good)-3], words: []string{"cannot be parsed", "unexpected end of JSON input"}},
		{name: "null", text: "null", words: []string{"cannot be parsed", "no name"}},
		{name: "array", text: "[]", words: []string{"cannot be parsed", "array"}},
		{name: "number", text: "3", words: []string{"cannot be parsed", "number"}},
		{name: "string", text: `"x"`, words: []string{"cannot be parsed", "string"}},
		{name: "two values", text: good + good, words: []string{"cannot be parsed"}},
		{name: "no name", text: `{"cniVersion":"1.0.0","plugins":[{"type":"fakenet"}]}`, words: []string{"no name"}},
		{name: "name of another kind", text: `{"name":7,"plugins":[{"type":"fakenet"}]}`, words: []string{"invalid name type"}},
		{name: "empty name", text: conflist("1.0.0", "", "fakenet"), words: []string{"is not valid", "network name is missing"}},
		{name: "invalid name", text: conflist("1.0.0", "bad name!", "fakenet"), words: []string{"is not valid", `"bad name!"`}},
		{name: "name too long to be cached", text: conflist("1.0.0", strings.Repeat("a", confdir.MaxName+1), "fakenet"), words: []string{"is too long: 186 bytes, the limit is 185"}},
		{name: "name leads out of the directory", text: conflist("1.0.0", "../x", "fakenet"), words: []string{"is not valid"}},
		{name: "unknown version", text: conflist("7.7.7", "a", "fakenet"), words: []string{`cniVersion "7.7.7" is not one of 0.1.0`}},
		{name: "no version at all", text: conflist("garbage", "a", "fakenet"), words: []string{`cniVersion "garbage" is not one of`}},
		{name: "version of another kind", text: `{"cniVersion":1,"name":"a","plugins":[{"type":"fakenet"}]}`, words: []string{"invalid cniVersion type"}},
		{name: "no plugins key", text: `{"cniVersion":"1.0.0","name":"a"}`, words: []string{"has no plugins"}},
		{name: "no plugins", text: `{"cniVersion":"1.0.0","name":"a","plugins":[]}`, words: []string{"no plugins"}},
		{name: "plugins of another kind", text: `{"cniVersion":"1.0.0","name":"a","plugins":{}}`, words: []string{"invalid 'plugins' type"}},
		{name: "plugin without type", text: `{"cniVersion":"1.0.0","name":"a","plugins":[{"x":1}]}`, words: []string{"missing 'type'"}},
		{name: "list in a conf", file: "00-bad.conf", text: good, words: []string{"must be named *.conflist"}},
		{name: "list in a json", file: "00-bad.json", text: good, words: []string{"must be named *.conflist"}},
		{name: "conf without name", file: "00-bad.conf", text: `{"cniVersion":"1.0.0","type":"fakenet"}`, words: []string{"network name is missing"}},
		{name: "conf without type", file: "00-bad.conf", text: `{"cniVersion":"1.0.0","name":"a"}`, words: []string{"missing 'type'"}},
		{name: "conf in a conflist", text: `{"cniVersion":"1.0.0","name":"a","type":"fakenet"}`, words: []string{"has no plugins"}},
		{name: "too big", text: `{"name":"a"}` + strings.Repeat(" ", confdir.MaxSize), words: []string{"is too big", "1048576"}},
		{name: "FIFO", make: func(d *node, path string) { d.must(syscall.Mkfifo(path, 0o644)) }, words: []string{"is not a regular file but a FIFO"}},
		{name: "socket", make: func(d *node, path string) {
			// The path of a socket is short, that of a test's directory may not be.
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			d.must(err)
			d.must(syscall.Close(fd))
			dir, err := os.MkdirTemp("", "s")
			d.must(err)
			defer os.RemoveAll(dir)
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s")})
			d.must(err)
			l.SetUnlinkOnClose(false)
			defer l.Close()
			d.must(os.Rename(filepath.Join(dir, "s"), path))
		}, words: []string{"is not a regular file but a socket"}},
		{name: "device", make: func(d *node, path string) { d.must(os.Symlink("/dev/zero", path)) }, words: []string{"is not a regular file but a device"}},
		{name: "symlink to a directory", make: func(d *node, path string) { d.must(os.Symlink(d.bin, path)) }, words: []string{"is not a regular file but a directory"}},
		{name: "dangling symlink", make: func(d *node, path string) { d.must(os.Symlink("nowhere", path)) }, words: []string{"is a symlink whose target does not exist"}},
		{name: "symlink to itself", make: func(d *node, path string) { d.must(os.Symlink(filepath.Base(path), path)) }, words: []string{"cannot be read", "too many levels of symbolic links"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet")
			if tt.file == "" {
				tt.file = "00-bad.conflist"
			}
			if tt.make != nil {
				tt.make(d, filepath.Join(d.conf, tt.file))
			} else {
				d.write(tt.file, tt.text)
			}
			n := d.network()
			// Alone it is the cause.
			err := n.Load()
			if wrong := testenv.MissingWords(err, append(tt.words, tt.file, "no usable network config in "+d.conf)); wrong != "" {
				t.Errorf("alone: %s", wrong)
			}
			if err := n.Status(); !IsCNINotInitialized(err) {
				t.Errorf("alone: Status is %v", err)
			}
			d.write("10-good.conflist", good)
			if err := n.Load(); err != nil {
				t.Fatal(err)
			}
			s := n.Snapshot()
			if got := inUse(s); len(got) != 1 || got["10-good.conflist"] != "eth0" {
				t.Errorf("in use are %v", got)
			}
			if wrong := testenv.MissingWords(fmt.Errorf("%s", reasons(s)[tt.file]), tt.words); wrong != "" {
				t.Error(wrong)
			}
			if !s.Ready() {
				t.Errorf("not ready: %v", s.Err())
			}
		})
	}
}

func TestDirectoriesAndOtherNames(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.must(os.Mkdir(filepath.Join(d.conf, "00-dir.conflist"), 0o755))
	d.write("00-backup.conflist.bak", "garbage")
	d.write("00-kubeconfig", "garbage")
	d.write("10-good.conflist", good)
	// Among drop-ins a directory is nothing, as to libcni.
	d.must(os.MkdirAll(filepath.Join(d.conf, "good", "10-dir.conf"), 0o755))
	n := d.network()
	d.must(n.Load())
	s := n.Snapshot()
	if r := reasons(s); len(r) != 1 || r["00-dir.conflist"] != "is not a regular file but a directory" {
		t.Errorf("skipped %v", s.Skipped)
	}
	if !s.Ready() || len(s.Networks) != 1 || len(s.Networks[0].Plugins) != 1 {
		t.Errorf("%v, %+v", s.Err(), s.Networks)
	}
}

// A file that the process may not read is skipped like any other. Root may read
// everything, so another user's view is taken for the read alone.
func TestUnreadableFile(t *testing.T) {
	d := newNode(t)
	path := d.write("10-a.conflist", good)
	d.must(os.Chmod(path, 0))
	if os.Geteuid() == 0 {
		t.Skip("root can read every file")
	}
	c := diskfile.Read(path, time.Now(), confdir.MaxSize)
	if wrong := testenv.MissingWords(c.Err, []string{"cannot be read", "permission denied"}); wrong != "" {
		t.Error(wrong)
	}
}

func TestSymlinkedFile(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.replace(filepath.Join(d.bin, "target"), good, 0o644)
	d.must(os.Symlink(filepath.Join(d.bin, "target"), filepath.Join(d.conf, "10-a.conflist")))
	n := d.network()
	d.must(n.Load())
	s := n.Snapshot()
	if len(s.Networks) != 1 || s.Networks[0].File != filepath.Join(d.conf, "10-a.conflist") {
		t.Errorf("in use: %+v", s.Networks)
	}
}

func TestBadDropIns(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, text string
		make       func(d *node, path string)
		words      []string
	}{
		{name: "garbage", text: "{", words: []string{"drop-in", "unexpected end"}},
		{name: "empty", text: "", words: []string{"drop-in", "is empty"}},
		{name: "without type", text: `{"x":1}`, words: []string{"drop-in", "missing 'type'"}},
		{name: "FIFO", make: func(d *node, path string) { d.must(syscall.Mkfifo(path, 0o644)) }, words: []string{"drop-in", "is not a regular file but a FIFO"}},
		{name: "dangling symlink", make: func(d *node, path string) { d.must(os.Symlink("nowhere", path)) }, words: []string{"drop-in", "target does not exist"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet", "portmap")
			d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
			d.write("a/10-one.conf", `{"type":"portmap"}`)
			n := d.network()
			d.must(n.Load())
			s := n.Snapshot()
			if l := s.Networks[0]; len(l.Plugins) != 2 || len(l.DropIns) != 1 || l.DropIns[0].Path != filepath.Join(d.conf, "a/10-one.conf") {
				t.Errorf("%+v", l)
			}
			bad := filepath.Join(d.conf, "a", "20-two.conf")
			if tt.make != nil {
				tt.make(d, bad)
			} else {
				d.replace(bad, tt.text, 0o644)
			}
			// The list is in use: what it was before the drop-in turned bad stays.
			d.must(n.Load())
			s = n.Snapshot()
			if l := s.Networks[0]; len(l.Plugins) != 2 || !s.Ready() {
				t.Errorf("ready %v, %+v", s.Ready(), l)
			}
			if wrong := testenv.MissingWords(s.Networks[0].StaleError, append(tt.words, bad)); wrong != "" {
				t.Error(wrong)
			}
			// To one that comes new it is no list.
			n = d.network()
			if wrong := testenv.MissingWords(n.Load(), append(tt.words, bad, "10-a.conflist")); wrong != "" {
				t.Error(wrong)
			}
			d.remove("a")
			d.must(n.Load())
			if s = n.Snapshot(); len(s.Networks) != 1 || len(s.Networks[0].Plugins) != 1 {
				t.Errorf("without the drop-ins: %+v", s.Networks)
			}
		})
	}
}

// A drop-in that goes away between being listed and being read has gone, which
// is nothing wrong with the list.
func TestDropInVanishesWhileReading(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	d.write("a/10-one.conf", `{"type":"portmap"}`)
	n := d.started()
	becomesReady(t, n)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		tmp := filepath.Join(d.answers, "drop-in")
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.WriteFile(tmp, []byte(`{"type":"portmap"}`), 0o644)
			_ = os.Rename(tmp, filepath.Join(d.conf, "a", "20-two.conf"))
			_ = os.Remove(filepath.Join(d.conf, "a", "20-two.conf"))
		}
	}()
	stays(t, 500*time.Millisecond, func() string { return errorText(n.Status()) })
	close(stop)
	<-done
}

// A file in use that turns bad stays in use as it was.
func TestLastGoodContent(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	d.write("20-b.conflist", conflist("1.0.0", "b", "portmap"))
	n := d.started()
	first := becomesReady(t, n)
	if got := inUse(first); len(got) != 1 || got["10-a.conflist"] == "" {
		t.Fatalf("in use are %v", got)
	}
	if r := reasons(first)["20-b.conflist"]; !strings.Contains(r, "10-a.conflist sorts before it") {
		t.Errorf("the other file is skipped because it %q", r)
	}

	d.overwrite("10-a.conflist", "{ half")
	eventually(t, func() string {
		if n.Snapshot().Networks[0].StaleError == nil {
			return "not stale"
		}
		return ""
	})
	s := n.Snapshot()
	l := s.Networks[0]
	if !s.Ready() || s.Generation != first.Generation || l.SHA256 != first.Networks[0].SHA256 || len(s.Networks) != 1 {
		t.Errorf("stale: ready %v, generation %d, %+v", s.Ready(), s.Generation, s.Networks)
	}
	if time.Since(l.StaleSince) > time.Minute || l.StaleSince.IsZero() {
		t.Errorf("stale since %s", l.StaleSince)
	}
	// Another kind of bad is the same period.
	since := l.StaleSince
	d.overwrite("10-a.conflist", "")
	eventually(t, func() string {
		if text := errorText(n.Snapshot().Networks[0].StaleError); text != "is empty" {
			return fmt.Sprintf("stale because %q", text)
		}
		return ""
	})
	if got := n.Snapshot().Networks[0].StaleSince; !got.Equal(since) {
		t.Errorf("stale since %s, before %s", got, since)
	}
	// Calls still use it.
	if _, err := n.Setup(t.Context(), "c1", "/ns"); err == nil || !strings.Contains(err.Error(), "unmarshal") {
		t.Errorf("Setup while stale: %v", err) // the fake plugin answers nothing
	}
	if got := d.count("fakenet", "ADD"); got != 1 {
		t.Errorf("%d ADD while stale", got)
	}

	// Mended with other content: a new generation.
	d.overwrite("10-a.conflist", conflist("1.0.0", "a", "portmap"))
	eventually(t, func() string {
		s = n.Snapshot()
		if s.Networks[0].StaleError != nil || s.Networks[0].Plugins[0].Type != "portmap" {
			return fmt.Sprintf("%+v", s.Networks[0])
		}
		return ""
	})
	if s.Generation != first.Generation+1 {
		t.Errorf("generation %d", s.Generation)
	}

	// Bad again, and removed: the next one takes over at once.
	d.overwrite("10-a.conflist", "{ half")
	eventually(t, func() string {
		if n.Snapshot().Networks[0].StaleError == nil {
			return "not stale"
		}
		return ""
	})
	d.remove("10-a.conflist")
	usesOnly(t, n, "20-b.conflist")
	d.remove("20-b.conflist")
	becomesUnready(t, n, "no network config found in "+d.conf)
}

// The file in use is removed while another, invalid one remains (S15).
func TestRemovedWhileAnInvalidOneRemains(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("05-bad.conflist", "{")
	d.write("10-a.conflist", good)
	n := d.started()
	becomesReady(t, n)
	d.remove("10-a.conflist")
	s := becomesUnready(t, n, "no usable network config", "05-bad.conflist")
	if len(s.Networks) != 0 || s.LoadError == nil {
		t.Errorf("%+v, load error %v", s.Networks, s.LoadError)
	}
	// Nothing is known of the pod: it must not stay for ever (containerd#8774).
	if err := n.Remove(t.Context(), "c", "/ns"); err != nil {
		t.Errorf("Remove without a list: %v", err)
	}
}

// Two writes within one tick of the file system's clock leave the same stat data
// behind. Content decides.
func TestRewriteThatStatCannotTell(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmapp")
	path := d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	at := time.Now().Add(-time.Hour)
	d.must(os.Chtimes(path, at, at))
	n := d.network()
	d.must(n.Load())
	before, err := os.Stat(path)
	d.must(err)
	// As long as the other name: same size. The time is put back.
	other := strings.Replace(conflist("1.0.0", "a", "fakenet"), `"a"`, `"b"`, 1)
	d.overwrite("10-a.conflist", other)
	d.must(os.Chtimes(path, at, at))
	after, err := os.Stat(path)
	d.must(err)
	if before.Size() != after.Size() || !before.ModTime().Equal(after.ModTime()) {
		t.Fatal("the rewrite can be told by its size or time")
	}
	d.must(n.Load())
	if s := n.Snapshot(); s.Networks[0].Name != "b" {
		t.Errorf("in use is still %q", s.Networks[0].Name)
	}
}

func TestNetworkName(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("87-podman.conflist", conflist("1.0.0", "podman", "fakenet"))
	d.write("99-real.conflist", conflist("1.0.0", "real", "fakenet"))
	n := d.started(WithNetworkName("real"))
	becomesReady(t, n)
	s := n.Snapshot()
	if got := inUse(s); len(got) != 1 || got["99-real.conflist"] != "eth0" {
		t.Errorf("in use are %v", got)
	}
	if r := reasons(s)["87-podman.conflist"]; r != `is network "podman"; network_name asks for "real"` {
		t.Errorf("skipped because it %s", r)
	}
	d.remove("99-real.conflist")
	becomesUnready(t, n, `network_name asks for "real"`, "87-podman.conflist")
}

func TestRequiredPlugins(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet", "portmap")
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	n := d.started(WithRequiredPlugins([]string{"portmap"}))
	becomesUnready(t, n, `required plugin "portmap" is in none of the networks in use`)
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet", "portmap"))
	becomesReady(t, n)
	d.write("10-a.conflist", conflist("1.0.0", "a", "fakenet"))
	becomesUnready(t, n, `required plugin "portmap"`)
}

func TestMaxConfNum(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	for _, name := range []string{"a", "b", "c"} {
		d.write(name+".conflist", conflist("1.0.0", name, "fakenet"))
	}
	d.write("aa.conflist", "{")
	for limit, want := range map[int]int{1: 1, 2: 2, 3: 3, 5: 3, 0: 3, -1: 3} {
		n := d.network(WithPluginMaxConfNum(limit))
		d.must(n.Load())
		s := n.Snapshot()
		if len(s.Networks) != want || len(s.Skipped) != 4-want {
			t.Errorf("max %d: %v in use, %v skipped", limit, inUse(s), s.Skipped)
		}
		for i, l := range s.Networks {
			if l.Interface != fmt.Sprintf("eth%d", i) {
				t.Errorf("max %d: %s on %s", limit, l.Name, l.Interface)
			}
		}
	}
}

func TestTooFewNetworks(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("a.conflist", good)
	n := d.network(WithMinNetworkCount(2))
	if wrong := testenv.MissingWords(n.Load(), []string{"1 of the 2 networks that are needed"}); wrong != "" {
		t.Error(wrong)
	}
	if wrong := testenv.MissingWords(n.Status(), []string{"cni plugin not initialized: 1 of the 2"}); wrong != "" {
		t.Error(wrong)
	}
	n = d.network(WithPluginConfDir(""))
	if wrong := testenv.MissingWords(n.Load(), []string{"no cni conf dir is configured"}); wrong != "" {
		t.Error(wrong)
	}
}

// What a file quotes in its own error does not flood whoever is told.
func TestLongTextsInFiles(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", confdir.MaxSize/2)
	for name, text := range map[string]string{
		"version": conflist(long, "a", "fakenet"),
		"name":    conflist("1.0.0", long, "fakenet"),
		"plugin":  conflist("1.0.0", "a", long),
		"number":  `{"name":"a","plugins":[{"type":"x","capabilities":` + strings.Repeat("1", confdir.MaxSize/2) + `}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.write("10-a.conflist", text)
			n := d.network()
			lines := recordLog(n)
			_ = n.Load()
			err := n.Status()
			if wrong := testenv.MissingWords(err, []string{"10-a.conflist"}); wrong != "" {
				t.Errorf("%.200s", wrong)
			}
			for _, s := range append(lines.take(), err.Error()) {
				if len(s) > 4<<10 {
					t.Errorf("%d bytes: %.80q", len(s), s)
				}
			}
		})
	}
}

// Whatever a file is called, it is used like any other, and what is said of it is
// one line that a CRI message can carry: protobuf refuses text that is not UTF-8.
func TestOddFileNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		".conflist", "-rf.conflist", "10 a.conflist", "10-%s%n.conflist", "10-\n\t\x1b[2J.conflist", "10-\xff\xfe.conflist",
		"10-\u00e9\u4e16\u754c.conflist", "10-\u202egpj.conflist", `10-"}\.conflist`, strings.Repeat("a", 255-len(".conflist")) + ".conflist",
	} {
		t.Run(strconv.Quote(name), func(t *testing.T) {
			t.Parallel()
			d := newNode(t)
			d.install("fakenet")
			path := d.write(name, good)
			n := d.network()
			d.must(n.Load())
			if s := n.Snapshot(); !s.Ready() || len(s.Networks) != 1 || s.Networks[0].File != path {
				t.Errorf("%v, %+v", s.Err(), s.Networks)
			}
			d.write(name, conflist("7.7.7", "good", "fakenet"))
			n = d.network()
			_ = n.Load()
			text := n.Status().Error()
			if wrong := testenv.MissingWords(n.Status(), []string{"cni plugin not initialized", "7.7.7"}); wrong != "" {
				t.Error(wrong)
			}
			if i := strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 || !utf8.ValidString(text) {
				t.Errorf("%q", text)
			}
			if b, err := json.Marshal(n.Snapshot().Config()); err != nil || !utf8.Valid(b) {
				t.Errorf("%v, %q", err, b)
			}
		})
	}
}

// The longest name that is let through can be cached.
func TestLongestName(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.answer("fakenet", "ADD", reply{out: result("1.0.0", "10.1.0.2")})
	d.write("10-a.conflist", conflist("1.0.0", strings.Repeat("a", confdir.MaxName), "fakenet"))
	n := d.network()
	d.must(n.Load())
	if _, err := n.Setup(t.Context(), strings.Repeat("0", 64), "/ns"); err != nil {
		t.Error(err)
	}
}

// The directory cannot be read, but was not removed: what is in use stays.
func TestUnreadableDirectory(t *testing.T) {
	t.Parallel()
	d := newNode(t)
	d.install("fakenet")
	d.write("a.conflist", good)
	n := d.network()
	d.must(n.Load())
	// A file in its place is the one such error that root gets too.
	d.must(os.Rename(d.conf, d.conf+".away"))
	d.must(os.WriteFile(d.conf, nil, 0o644))
	d.must(n.Load())
	s := n.Snapshot()
	if !s.Ready() || len(s.Networks) != 1 || s.Networks[0].StaleError == nil {
		t.Errorf("%v, %+v", s.Err(), s.Networks)
	}
	n = d.network()
	if wrong := testenv.MissingWords(n.Load(), []string{"conf dir " + d.conf + " cannot be read", "not a directory"}); wrong != "" {
		t.Error(wrong)
	}
}
