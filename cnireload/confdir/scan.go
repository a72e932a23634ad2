// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package confdir reads a directory of CNI configuration and notices changes of it.
//
// A [Scanner] returns what the directory holds now: each file with its list, or
// with the reason why it cannot be used. It reads only files whose stat data has
// changed, and what it returns is immutable. A [Watcher] says that something may
// have changed, never what: the next scan tells. A watch that fails or is lost is
// an error of [Watcher.Arm], for the caller to show; the caller scans now and then
// in any case.
//
// A Scanner and a Watcher each belong to one goroutine. This package does not know
// which list is in use, and runs no plugin.
package confdir

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cnireload/cnireload/internal/diskfile"
)

const (
	// MaxSize is the largest file read as configuration.
	MaxSize = 1 << 20
	// MaxName is how long a network's name can be for libcni to cache an
	// attachment, in a file called <name>-<64 digits>-eth0. libcni finds out
	// after the plugins have run.
	MaxName = 255 - 1 - 64 - 1 - 4
)

// DropIn is a plugin configuration from <conf dir>/<network name>/*.conf
// (CNI spec 1.1, section 1, loadOnlyInlinedPlugins).
type DropIn struct {
	Path   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// File is a parsed configuration file. It is not changed after it was made.
type File struct {
	Path    string
	Sum     string // hex SHA-256 of the file alone
	List    *libcni.NetworkConfigList
	DropIns []DropIn
	Err     error // why it cannot be used; List is nil then
}

// Identity names what the file and its drop-ins hold.
func (f *File) Identity() string {
	id := f.Path + "\x00" + f.Sum
	for _, d := range f.DropIns {
		id += "\x00" + d.Path + "\x00" + d.SHA256
	}
	return id
}

// Scan is what one look at the configuration directory found.
type Scan struct {
	Files []*File // lexical order of path, good ones and bad ones
	Err   error   // why the directory could not be read
	// Watch lists directories beyond the configuration directory whose changes
	// matter: drop-in directories and those of symlink targets.
	Watch []string
}

// File returns the file at path, nil if there was none.
func (s *Scan) File(path string) *File {
	for _, f := range s.Files {
		if f.Path == path {
			return f
		}
	}
	return nil
}

// Scanner reads a configuration directory and remembers what it read. It
// belongs to one goroutine.
type Scanner struct {
	dir      string
	contents map[string]*lastRead
	parsed   map[string]*parsedFile
	now      func() time.Time
	count    int // of scans
}

// lastRead is what a path held when it was last looked at, and in which scan.
type lastRead struct {
	*diskfile.Content
	scan int
}

// parsedFile is a file with what it was made of, to be kept for as long as that
// stays the same.
type parsedFile struct {
	content *diskfile.Content
	list    *libcni.NetworkConfigList // without drop-ins
	err     error

	drops   []*diskfile.Content // of the drop-ins
	dropErr error
	file    *File
	scan    int
}

// NewScanner returns one that has read nothing yet.
func NewScanner(dir string) *Scanner {
	return &Scanner{
		dir:      dir,
		contents: make(map[string]*lastRead),
		parsed:   make(map[string]*parsedFile),
		now:      time.Now,
	}
}

// Scan looks at the directory. It costs one stat for each file that has not
// changed: a node can have hundreds of them, and this is done every few seconds.
func (s *Scanner) Scan() Scan {
	var result Scan
	if s.dir == "" {
		result.Err = errors.New("no cni conf dir is configured")
		return result
	}
	dir := CleanPath(s.dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		result.Err = err
		return result
	}
	s.count++
	files := confEntries(entries, true, ".conf", ".conflist", ".json")
	result.Files = make([]*File, 0, len(files))
	for _, e := range files {
		path := filepath.Join(dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			result.Watch = WithTargets(result.Watch, path)
		}
		if c := s.read(path); !vanished(c) {
			result.Files = append(result.Files, s.parse(c, entries, &result))
		}
	}
	maps.DeleteFunc(s.contents, func(_ string, h *lastRead) bool { return h.scan != s.count })
	maps.DeleteFunc(s.parsed, func(_ string, p *parsedFile) bool { return p.scan != s.count })
	return result
}

// WithTargets adds to dirs those of a symlink's targets, one for each link on
// the way: a ConfigMap volume re-points the one in the middle.
func WithTargets(dirs []string, path string) []string {
	for range 8 {
		target, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		// The directory part may itself lead through a link, as in
		// "..data/10-a.conflist".
		if dir := filepath.Dir(target); !slices.Contains(dirs, dir) {
			dirs = WithTargets(append(dirs, dir), dir)
		}
		path = target
	}
	return dirs
}

// confEntries returns those with one of the extensions, in lexical order as
// they are given. Directories are passed over, as libcni does, unless they are
// asked for.
func confEntries(entries []fs.DirEntry, dirs bool, extensions ...string) []fs.DirEntry {
	var matching []fs.DirEntry
	for _, e := range entries {
		if (dirs || !e.IsDir()) && slices.Contains(extensions, filepath.Ext(e.Name())) {
			matching = append(matching, e)
		}
	}
	return matching
}

// parse returns the parsed form of one file, from memory if neither it nor a
// drop-in has changed: the lists of a generation are shared, and comparing
// pointers is cheap.
func (s *Scanner) parse(c *diskfile.Content, entries []fs.DirEntry, result *Scan) *File {
	path := c.Path
	p := s.parsed[path]
	changed := p == nil || p.content != c
	if p == nil || !c.Same(p.content) {
		p = &parsedFile{err: c.Err}
		if p.err == nil {
			p.list, p.err = ParseList(path, c.Bytes)
		}
		s.parsed[path] = p
	}
	p.content, p.scan = c, s.count
	var drops []*diskfile.Content
	var dropErr error
	if p.err == nil && filepath.Ext(path) == ".conflist" && !p.list.LoadOnlyInlinedPlugins {
		// The listing may be older than what was just read.
		if dir := filepath.Dir(path); changed || has(entries, p.list.Name) {
			drops, dropErr = s.dropIns(filepath.Join(dir, p.list.Name), result)
		}
	}
	f := p.file
	if f == nil || !sameText(dropErr, p.dropErr) || !slices.EqualFunc(drops, p.drops, (*diskfile.Content).Same) {
		f = p.with(path, drops, dropErr)
	}
	p.drops, p.dropErr = drops, dropErr
	if old := p.file; old == nil || old != f && (old.Identity() != f.Identity() || !sameText(old.Err, f.Err)) {
		p.file = f
	}
	return p.file
}

// sameText tells whether two errors, or none, read the same.
func sameText(a, b error) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Error() == b.Error()
}

// has tells whether the entries, which are sorted, have that name.
func has(entries []fs.DirEntry, name string) bool {
	_, found := slices.BinarySearchFunc(entries, name, func(e fs.DirEntry, name string) int { return strings.Compare(e.Name(), name) })
	return found
}

// with makes the file with those drop-ins, which are appended to its plugins.
func (p *parsedFile) with(path string, drops []*diskfile.Content, dropErr error) *File {
	f := &File{Path: path, Sum: p.content.Sum, Err: p.err}
	if f.Err != nil {
		return f
	}
	list := *p.list
	list.Plugins = slices.Clone(list.Plugins)
	f.Err = dropErr
	for _, c := range drops {
		f.DropIns = append(f.DropIns, DropIn{Path: c.Path, SHA256: c.Sum})
		if f.Err != nil {
			continue
		}
		if c.Err != nil {
			// Not wrapped: only a list whose own file does not exist counts as
			// removed.
			f.Err = fmt.Errorf("drop-in %s %v", c.Path, c.Err)
		} else if conf, err := libcni.NetworkPluginConfFromBytes(c.Bytes); err != nil {
			f.Err = fmt.Errorf("drop-in %s: %w", c.Path, err)
		} else {
			list.Plugins = append(list.Plugins, conf)
		}
	}
	if f.Err == nil && len(list.Plugins) == 0 {
		f.Err = errors.New("has no plugins")
	}
	if f.Err == nil {
		f.List = &list
	}
	return f
}

// dropIns reads <dir>/<name>/*.conf, whose plugins libcni appends to a conflist
// that does not set loadOnlyInlinedPlugins.
func (s *Scanner) dropIns(dir string, result *Scan) ([]*diskfile.Content, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		// That it comes is seen in the configuration directory, unless it is a
		// link whose target comes.
		if _, lerr := os.Lstat(dir); lerr == nil {
			result.Watch = WithTargets(append(result.Watch, dir), dir)
		}
		return nil, nil
	}
	result.Watch = append(result.Watch, dir)
	if err != nil {
		return nil, fmt.Errorf("drop-in dir cannot be read: %w", err)
	}
	var drops []*diskfile.Content
	for _, e := range confEntries(entries, false, ".conf") {
		path := filepath.Join(dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			result.Watch = WithTargets(result.Watch, path)
		}
		if c := s.read(path); !vanished(c) {
			drops = append(drops, c)
		}
	}
	return drops, nil
}

// vanished tells whether a file was removed after it was listed, which is nothing
// wrong with it. A symlink whose target does not exist has not vanished.
func vanished(c *diskfile.Content) bool {
	if !errors.Is(c.Err, fs.ErrNotExist) {
		return false
	}
	_, err := os.Lstat(c.Path)
	return errors.Is(err, fs.ErrNotExist)
}

// read returns what path holds, from memory if that is sure to be the same.
func (s *Scanner) read(path string) *diskfile.Content {
	h := s.contents[path]
	if h == nil {
		h = new(lastRead)
		s.contents[path] = h
	}
	h.scan = s.count
	if h.Content != nil && h.Known {
		if info, err := os.Stat(path); err == nil && h.Fresh(diskfile.Identify(info)) {
			return h.Content
		}
	}
	h.Content = diskfile.Read(path, s.now(), MaxSize)
	return h.Content
}

// ParseList parses the content of a file by its extension, without drop-ins,
// and refuses what libcni would refuse only at ADD.
func ParseList(path string, b []byte) (*libcni.NetworkConfigList, error) {
	var list *libcni.NetworkConfigList
	var err error
	if filepath.Ext(path) == ".conflist" {
		list, err = libcni.ConfListFromBytes(b)
	} else {
		var conf *libcni.NetworkConfig
		if conf, err = libcni.NetworkPluginConfFromBytes(b); err == nil {
			//lint:ignore SA1019 single plugins in *.conf are in use, and go-cni takes them
			list, err = libcni.ConfListFromConf(conf)
		} else if bytes.Contains(b, []byte(`"plugins"`)) {
			err = fmt.Errorf("%w; a file with a list of plugins must be named *.conflist", err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot be parsed: %w", err)
	}
	if err := ValidateName(list.Name); err != nil {
		return nil, fmt.Errorf("is not valid: %w", err)
	}
	// libcni takes an empty cniVersion for 0.1.0.
	if v := list.CNIVersion; v != "" && !slices.Contains(version.All.SupportedVersions(), v) {
		return nil, fmt.Errorf("is not valid: cniVersion %q is not one of %s", v, strings.Join(version.All.SupportedVersions(), ", "))
	}
	return list, nil
}

// ValidateName applies the rule for network names (CNI spec 1.1, section 1),
// which libcni applies only at ADD.
func ValidateName(name string) error {
	if len(name) > MaxName {
		return fmt.Errorf("network name %q... is too long: %d bytes, the limit is %d", name[:32], len(name), MaxName)
	}
	// The concrete pointer type must not become a non-nil error.
	if err := utils.ValidateNetworkName(name); err != nil {
		if name == "" {
			return errors.New("network name is missing")
		}
		return fmt.Errorf("network name %q: %w", name, err)
	}
	return nil
}
