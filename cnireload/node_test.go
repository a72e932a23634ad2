// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cnireload/cnireload/cnireload/gc"
	"github.com/cnireload/cnireload/internal/testenv"
)

// node is a node's directories, with fake plugins that log every call and answer
// what they are told to.
type node struct {
	t       testing.TB
	conf    string
	bin     string
	cache   string
	log     string
	answers string
}

func newNode(t testing.TB) *node {
	t.Helper()
	root := t.TempDir()
	d := &node{
		t:       t,
		conf:    filepath.Join(root, "net.d"),
		bin:     filepath.Join(root, "bin"),
		cache:   filepath.Join(root, "cache"),
		log:     filepath.Join(root, "log"),
		answers: filepath.Join(root, "answers"),
	}
	for _, dir := range []string{d.conf, d.bin, d.log, d.answers} {
		d.must(os.MkdirAll(dir, 0o755))
	}
	return d
}

// in returns the node for use by t, another test than that which made it.
func (d *node) in(t testing.TB) *node {
	other := *d
	other.t = t
	return &other
}

func (d *node) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// write puts a file into the conf dir in one step and returns its path.
func (d *node) write(name, content string) string {
	d.t.Helper()
	path := filepath.Join(d.conf, name)
	d.replace(path, content, 0o644)
	return path
}

// replace puts a file in place by rename. The temporary file is outside the
// directory, so that there is one event and no other name.
func (d *node) replace(path, content string, mode os.FileMode) {
	d.t.Helper()
	d.must(os.MkdirAll(filepath.Dir(path), 0o755))
	testenv.Replace(d.t, d.answers, path, content, mode)
}

// overwrite rewrites a file of the conf dir in place.
func (d *node) overwrite(name, content string) {
	d.t.Helper()
	d.must(os.WriteFile(filepath.Join(d.conf, name), []byte(content), 0o644))
}

func (d *node) remove(name string) {
	d.t.Helper()
	d.must(os.RemoveAll(filepath.Join(d.conf, name)))
}

// script is a fake plugin: it logs its type, environment and input, and then
// answers from files named after the verb. It uses what the shell has built in:
// hundreds of them are run.
func (d *node) script(typ string) string {
	return fmt.Sprintf(`#!/bin/sh
echo "$CNI_COMMAND $CNI_IFNAME %[1]s" >>'%[2]s/order'
IFS= read -r input
{ export CNI_TYPE=%[1]s; export -p; echo ====; printf '%%s\n' "$input"; echo ----; } >>"%[2]s/$CNI_COMMAND-$CNI_IFNAME-%[1]s"
a="%[3]s/%[1]s-$CNI_COMMAND"
code=0
[ -f "$a.sh" ] && . "$a.sh"
[ -f "$a.err" ] && cat "$a.err" >&2
[ -f "$a.code" ] && read -r code <"$a.code"
[ -f "$a.out" ] && cat "$a.out"
exit "$code"
`, typ, d.log, d.answers)
}

// install puts fake plugins into the bin dir.
func (d *node) install(types ...string) {
	d.t.Helper()
	for _, typ := range types {
		d.installIn(d.bin, typ)
	}
}

func (d *node) installIn(dir, typ string) {
	d.t.Helper()
	if _, err := os.Stat(filepath.Join(d.answers, typ+"-VERSION.out")); err != nil {
		d.answer(typ, "VERSION", reply{out: versionAnswer("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")})
	}
	d.replace(filepath.Join(dir, typ), d.script(typ), 0o755)
}

func versionAnswer(versions ...string) string {
	b, err := json.Marshal(versions)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"cniVersion":"1.0.0","supportedVersions":%s}`, b)
}

// reply is what a fake plugin answers to one verb.
type reply struct {
	out  string // standard output
	err  string // standard error
	code int    // exit status
	sh   string // run before anything is printed
}

// answer has a fake plugin answer r to verb from now on.
func (d *node) answer(typ, verb string, r reply) {
	d.t.Helper()
	put := func(ext, content string) {
		path := filepath.Join(d.answers, typ+"-"+verb+ext)
		if content == "" {
			d.must(os.RemoveAll(path))
			return
		}
		d.replace(path, content, 0o644)
	}
	put(".out", r.out)
	put(".err", r.err)
	put(".sh", r.sh)
	code := ""
	if r.code != 0 {
		code = fmt.Sprintln(r.code)
	}
	put(".code", code)
}

// call is one run of a fake plugin.
type call struct {
	Env   map[string]string   // what CNI defines, except the arguments
	Args  map[string]struct{} // CNI_ARGS, whose order go-cni leaves to chance
	Stdin any
}

// calls is what fake plugins were asked.
type calls struct {
	// Order is the sequence of "verb interface type", for each interface where
	// networks are handled in parallel.
	Order map[string][]string
	// All is the same sequence as it was, whatever the interface.
	All []string
	// Calls are the details, by verb, interface and type.
	Calls map[string][]call
}

// take returns the calls of the verbs since the last time, and forgets them.
func (d *node) take(verbs ...string) calls {
	d.t.Helper()
	c := calls{Order: map[string][]string{}, Calls: map[string][]call{}}
	b, err := os.ReadFile(filepath.Join(d.log, "order"))
	if err != nil && !os.IsNotExist(err) {
		d.t.Fatal(err)
	}
	var keep []string
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		f := strings.Fields(line)
		if !slices.Contains(verbs, f[0]) {
			keep = append(keep, line+"\n")
			continue
		}
		c.Order[f[1]] = append(c.Order[f[1]], line)
		c.All = append(c.All, line)
	}
	d.must(os.WriteFile(filepath.Join(d.log, "order"), []byte(strings.Join(keep, "")), 0o644))
	for _, verb := range verbs {
		files, err := filepath.Glob(filepath.Join(d.log, verb+"-*"))
		d.must(err)
		for _, file := range files {
			b, err := os.ReadFile(file)
			d.must(err)
			d.must(os.Remove(file))
			for entry := range strings.SplitSeq(strings.TrimSuffix(string(b), "\n----\n"), "\n----\n") {
				c.Calls[filepath.Base(file)] = append(c.Calls[filepath.Base(file)], d.parseCall(entry))
			}
		}
	}
	return c
}

// count returns how often the verb was asked of a plugin so far.
func (d *node) count(typ, verb string) int {
	b, err := os.ReadFile(filepath.Join(d.log, "order"))
	if err != nil {
		return 0
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 1 && f[0] == verb && f[len(f)-1] == typ {
			n++
		}
	}
	return n
}

func (d *node) parseCall(entry string) call {
	d.t.Helper()
	environ, stdin, ok := strings.Cut(entry, "\n====\n")
	if !ok {
		d.t.Fatalf("plugin log entry is torn: %q", entry)
	}
	c := call{Env: map[string]string{}, Args: map[string]struct{}{}}
	for line := range strings.Lines(environ) {
		k, v, _ := strings.Cut(strings.TrimPrefix(strings.TrimSuffix(line, "\n"), "export "), "=")
		v = strings.Trim(v, `'"`) // the shell's quotes
		switch {
		case k == "CNI_ARGS":
			for pair := range strings.SplitSeq(v, ";") {
				c.Args[pair] = struct{}{}
			}
		case strings.HasPrefix(k, "CNI_"), k == "TRACEPARENT", k == "TRACESTATE", k == "BAGGAGE":
			c.Env[k] = v
		}
	}
	if err := json.Unmarshal([]byte(stdin), &c.Stdin); err != nil {
		c.Stdin = stdin
	}
	return c
}

// network returns a network of the node that is not started. Waits are short.
func (d *node) network(opts ...Opt) *Network {
	d.t.Helper()
	n, err := New(append([]Opt{
		WithPluginConfDir(d.conf),
		WithPluginDir([]string{d.bin}),
		WithCacheDir(d.cache),
		WithDefaultConf,
	}, opts...)...)
	d.must(err)
	n.pace = pace{poll: 100 * time.Millisecond, upgradeGrace: 300 * time.Millisecond, status: 100 * time.Millisecond, statusRetry: 50 * time.Millisecond, gate: 50 * time.Millisecond,
		agent: 100 * time.Millisecond, owed: 20 * time.Millisecond, gc: 20 * time.Millisecond}
	n.gc.Guard = &gc.Guard{EndBound: gcGuard.EndBound} // other tests' pods are no reason to give way
	d.t.Cleanup(func() { _ = n.Close() })
	return n
}

// started returns a network that follows the node's disk. Changes that no event
// announces stay unnoticed for as long as a test lasts.
func (d *node) started(opts ...Opt) *Network {
	d.t.Helper()
	n := d.network(opts...)
	n.pace.poll = time.Hour
	n.Start()
	return n
}

// conflist returns a list of plugins, each given as a type or as JSON.
func conflist(version, name string, plugins ...string) string {
	entries := make([]string, len(plugins))
	for i, p := range plugins {
		if entries[i] = p; !strings.HasPrefix(p, "{") {
			entries[i] = fmt.Sprintf(`{"type":%q}`, p)
		}
	}
	return fmt.Sprintf(`{"cniVersion":%q,"name":%q,"plugins":[%s]}`, version, name, strings.Join(entries, ","))
}

// result is a good result of ADD.
func result(version, ip string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"interfaces":[{"name":"eth0","mac":"00:11:22:33:44:55","sandbox":"/ns"}],`+
		`"ips":[{"address":"%s/24","gateway":"10.1.0.1","interface":0}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{"nameservers":["10.1.0.1"]}}`, version, ip)
}

// within is how long something may take that is expected to happen soon: long
// enough for a machine that is busy with other things.
const within = 15 * time.Second

// eventually waits until ok returns an empty string, which otherwise says what
// is wrong.
func eventually(t testing.TB, ok func() string) {
	t.Helper()
	testenv.Eventually(t, within, ok)
}

// becomesReady waits until the network is ready.
func becomesReady(t testing.TB, n *Network) *Snapshot {
	t.Helper()
	eventually(t, func() string { return errorText(n.Status()) })
	return n.Snapshot()
}

// becomesUnready waits until the network is not ready because of something whose
// description contains all of the words.
func becomesUnready(t testing.TB, n *Network, words ...string) *Snapshot {
	t.Helper()
	var s *Snapshot
	eventually(t, func() string {
		s = n.Snapshot()
		return testenv.MissingWords(s.Err(), words)
	})
	return s
}

// stays checks that ok keeps returning an empty string for a while.
func stays(t testing.TB, d time.Duration, ok func() string) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if wrong := ok(); wrong != "" {
			t.Fatalf("no longer: %s", wrong)
		}
	}
}

// inUse names the files in use and the interface each serves.
func inUse(s *Snapshot) map[string]string {
	m := make(map[string]string)
	for _, n := range s.Networks {
		m[filepath.Base(n.File)] = n.Interface
	}
	return m
}

// usesOnly waits until exactly these files are in use.
func usesOnly(t testing.TB, n *Network, files ...string) *Snapshot {
	t.Helper()
	var s *Snapshot
	eventually(t, func() string {
		s = n.Snapshot()
		if got := slices.Sorted(maps.Keys(inUse(s))); !slices.Equal(got, slices.Sorted(slices.Values(files))) {
			return fmt.Sprintf("in use are %q, not %q", got, files)
		}
		return ""
	})
	return s
}

// reasons returns why files are not in use, by base name.
func reasons(s *Snapshot) map[string]string {
	m := make(map[string]string)
	for _, f := range s.Skipped {
		m[filepath.Base(f.File)] = f.Reason
	}
	return m
}

// without returns the calls but for one that must be the last, which go-cni does
// not make.
func (c calls) without(t *testing.T, entry string) calls {
	t.Helper()
	if len(c.All) == 0 || c.All[len(c.All)-1] != entry {
		t.Errorf("the calls are %q, want %q as the last", c.All, entry)
		return c
	}
	fewer := calls{Order: maps.Clone(c.Order), All: c.All[:len(c.All)-1], Calls: maps.Clone(c.Calls)}
	ifName := strings.Fields(entry)[1]
	fewer.Order[ifName] = c.Order[ifName][:len(c.Order[ifName])-1]
	if len(fewer.Order[ifName]) == 0 {
		delete(fewer.Order, ifName)
	}
	if len(fewer.All) == 0 {
		fewer.All = nil
	}
	delete(fewer.Calls, strings.ReplaceAll(entry, " ", "-"))
	return fewer
}
