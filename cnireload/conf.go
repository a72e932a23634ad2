// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
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
)

const (
	// maxConfSize is the largest file read as configuration.
	maxConfSize = 1 << 20
	// racyWindow is how old a file must have been when it was read before its
	// stat data alone can prove that it has not changed since: a file written
	// twice within one tick of the file system's clock looks the same.
	racyWindow = 2 * time.Second
	// maxName is how long a network's name can be for libcni to cache an
	// attachment, in a file called <name>-<64 digits>-eth0. libcni finds out
	// after the plugins have run.
	maxName = 255 - 1 - 64 - 1 - 4
)

// content is one file as it was read. It is not changed after it was made.
type content struct {
	path   string
	id     fileID
	readAt time.Time
	bytes  []byte
	sum    string // hex SHA-256
	err    error  // why the file cannot be used; bytes is nil then
	// known is set if id stands for the outcome, good or bad. A file that could
	// not be read may be readable the next time with the same stat data.
	known bool
}

// fresh tells whether c still is what the file with identity id holds.
func (c *content) fresh(id fileID) bool {
	return c.known && c.id.same(id) && c.readAt.Sub(id.changed()) > racyWindow
}

// same tells whether reading a file again brought nothing new.
func (c *content) same(other *content) bool {
	return c == other || c.path == other.path && c.sum == other.sum && errorText(c.err) == errorText(other.err)
}

// dropIn is a plugin configuration from <conf dir>/<network name>/*.conf
// (CNI spec 1.1, section 1, loadOnlyInlinedPlugins).
type dropIn struct {
	Path   string
	SHA256 string
}

// confFile is a parsed configuration file. It is not changed after it was made.
type confFile struct {
	path    string
	sum     string // of the file alone
	list    *libcni.NetworkConfigList
	dropIns []dropIn
	err     error // why it cannot be used; list is nil then
}

// identity names what the file and its drop-ins hold.
func (f *confFile) identity() string {
	id := f.path + "\x00" + f.sum
	for _, d := range f.dropIns {
		id += "\x00" + d.Path + "\x00" + d.SHA256
	}
	return id
}

// dirScan is what one look at the configuration directory found.
type dirScan struct {
	files []*confFile // lexical order of path, good ones and bad ones
	err   error       // why the directory could not be read
	// watch lists directories beyond the configuration directory whose changes
	// matter: drop-in directories and those of symlink targets.
	watch []string
}

func (s *dirScan) file(path string) *confFile {
	for _, f := range s.files {
		if f.path == path {
			return f
		}
	}
	return nil
}

// scanner reads a configuration directory and remembers what it read. It
// belongs to one goroutine.
type scanner struct {
	dir      string
	contents map[string]*lastRead
	parsed   map[string]*parsedFile
	now      func() time.Time
	count    int // of scans
}

// lastRead is what a path held when it was last looked at, and in which scan.
type lastRead struct {
	*content
	scan int
}

// parsedFile is a file with what it was made of, to be kept for as long as that
// stays the same.
type parsedFile struct {
	content *content
	list    *libcni.NetworkConfigList // without drop-ins
	err     error

	drops   []*content // of the drop-ins
	dropErr error
	file    *confFile
	scan    int
}

func newScanner(dir string) *scanner {
	return &scanner{
		dir:      dir,
		contents: make(map[string]*lastRead),
		parsed:   make(map[string]*parsedFile),
		now:      time.Now,
	}
}

// scan looks at the directory. It costs one stat for each file that has not
// changed: a node can have hundreds of them, and this is done every few seconds.
func (s *scanner) scan() dirScan {
	var result dirScan
	if s.dir == "" {
		result.err = errors.New("no cni conf dir is configured")
		return result
	}
	dir := cleanPath(s.dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		result.err = err
		return result
	}
	s.count++
	files := confEntries(entries, true, ".conf", ".conflist", ".json")
	result.files = make([]*confFile, 0, len(files))
	for _, e := range files {
		path := filepath.Join(dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			result.watch = withTargets(result.watch, path)
		}
		result.files = append(result.files, s.parse(path, entries, &result))
	}
	maps.DeleteFunc(s.contents, func(_ string, h *lastRead) bool { return h.scan != s.count })
	maps.DeleteFunc(s.parsed, func(_ string, p *parsedFile) bool { return p.scan != s.count })
	return result
}

// withTargets adds to dirs those of a symlink's targets, one for each link on
// the way: a ConfigMap volume re-points the one in the middle.
func withTargets(dirs []string, path string) []string {
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
			dirs = withTargets(append(dirs, dir), dir)
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
func (s *scanner) parse(path string, entries []fs.DirEntry, result *dirScan) *confFile {
	c := s.read(path)
	p := s.parsed[path]
	changed := p == nil || p.content != c
	if p == nil || !c.same(p.content) {
		p = &parsedFile{err: c.err}
		if p.err == nil {
			p.list, p.err = parseList(path, c.bytes)
		}
		s.parsed[path] = p
	}
	p.content, p.scan = c, s.count
	var drops []*content
	var dropErr error
	if p.err == nil && filepath.Ext(path) == ".conflist" && !p.list.LoadOnlyInlinedPlugins {
		// The listing may be older than what was just read.
		if dir := filepath.Dir(path); changed || has(entries, p.list.Name) {
			drops, dropErr = s.dropIns(filepath.Join(dir, p.list.Name), result)
		}
	}
	f := p.file
	if f == nil || errorText(dropErr) != errorText(p.dropErr) || !slices.EqualFunc(drops, p.drops, (*content).same) {
		f = p.with(path, drops, dropErr)
	}
	p.drops, p.dropErr = drops, dropErr
	if old := p.file; old == nil || old.identity() != f.identity() || errorText(old.err) != errorText(f.err) {
		p.file = f
	}
	return p.file
}

// has tells whether the entries, which are sorted, have that name.
func has(entries []fs.DirEntry, name string) bool {
	_, found := slices.BinarySearchFunc(entries, name, func(e fs.DirEntry, name string) int { return strings.Compare(e.Name(), name) })
	return found
}

// with makes the file with those drop-ins, which are appended to its plugins.
func (p *parsedFile) with(path string, drops []*content, dropErr error) *confFile {
	f := &confFile{path: path, sum: p.content.sum, err: p.err}
	if f.err != nil {
		return f
	}
	list := *p.list
	list.Plugins = slices.Clone(list.Plugins)
	f.err = dropErr
	for _, c := range drops {
		f.dropIns = append(f.dropIns, dropIn{Path: c.path, SHA256: c.sum})
		if f.err != nil {
			continue
		}
		if c.err != nil {
			// Not wrapped: only a list whose own file does not exist counts as
			// removed.
			f.err = fmt.Errorf("drop-in %s %v", c.path, c.err)
		} else if conf, err := libcni.NetworkPluginConfFromBytes(c.bytes); err != nil {
			f.err = fmt.Errorf("drop-in %s: %w", c.path, err)
		} else {
			list.Plugins = append(list.Plugins, conf)
		}
	}
	if f.err == nil && len(list.Plugins) == 0 {
		f.err = errors.New("has no plugins")
	}
	if f.err == nil {
		f.list = &list
	}
	return f
}

// dropIns reads <dir>/<name>/*.conf, whose plugins libcni appends to a conflist
// that does not set loadOnlyInlinedPlugins.
func (s *scanner) dropIns(dir string, result *dirScan) ([]*content, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		// That it comes is seen in the configuration directory, unless it is a
		// link whose target comes.
		if _, lerr := os.Lstat(dir); lerr == nil {
			result.watch = withTargets(append(result.watch, dir), dir)
		}
		return nil, nil
	}
	result.watch = append(result.watch, dir)
	if err != nil {
		return nil, fmt.Errorf("drop-in dir cannot be read: %w", err)
	}
	var drops []*content
	for _, e := range confEntries(entries, false, ".conf") {
		path := filepath.Join(dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			result.watch = withTargets(result.watch, path)
		}
		c := s.read(path)
		if errors.Is(c.err, fs.ErrNotExist) {
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				continue // removed since it was listed
			}
		}
		drops = append(drops, c)
	}
	return drops, nil
}

// read returns what path holds, from memory if that is sure to be the same.
func (s *scanner) read(path string) *content {
	h := s.contents[path]
	if h == nil {
		h = new(lastRead)
		s.contents[path] = h
	}
	h.scan = s.count
	if h.content != nil && h.known {
		if info, err := os.Stat(path); err == nil && h.fresh(newFileID(info)) {
			return h.content
		}
	}
	h.content = readContent(path, s.now())
	return h.content
}

// readContent reads a configuration file.
func readContent(path string, now time.Time) *content { return readBounded(path, now, maxConfSize) }

// readBounded reads a file. It cannot block on a FIFO or a device, and reads no
// more than limit. The error completes a sentence that starts with the path.
func readBounded(path string, now time.Time, limit int64) *content {
	c := &content{path: path, readAt: now}
	fail := func(err error) *content {
		c.err = err
		return c
	}
	// The file is opened without blocking and its kind asked of the open file,
	// so that it cannot be exchanged in between. A device is not even opened:
	// that alone can have effects.
	if info, err := os.Stat(path); err != nil {
		if _, lerr := os.Lstat(path); lerr == nil && errors.Is(err, fs.ErrNotExist) {
			return fail(fmt.Errorf("is a symlink whose target does not exist: %w", fs.ErrNotExist))
		}
		return fail(fmt.Errorf("cannot be read: %w", err))
	} else if !info.Mode().IsRegular() {
		return fail(fmt.Errorf("is not a regular file but %s", kindOf(info.Mode())))
	}
	file, err := os.OpenFile(path, os.O_RDONLY|openNonblock, 0)
	if err != nil {
		return fail(fmt.Errorf("cannot be read: %w", err))
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return fail(fmt.Errorf("cannot be read: %w", err))
	}
	if !info.Mode().IsRegular() {
		return fail(fmt.Errorf("is not a regular file but %s", kindOf(info.Mode())))
	}
	c.id = newFileID(info)
	if info.Size() > limit {
		c.known = true
		return fail(fmt.Errorf("is too big: %d bytes, the limit is %d", info.Size(), limit))
	}
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return fail(fmt.Errorf("cannot be read: %w", err))
	}
	sum := sha256.Sum256(b)
	c.sum, c.known = hex.EncodeToString(sum[:]), true
	switch {
	case int64(len(b)) > limit:
		return fail(fmt.Errorf("is too big: the limit is %d bytes", limit))
	case len(bytes.TrimSpace(b)) == 0:
		return fail(errors.New("is empty"))
	}
	c.bytes = b
	return c
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case m&fs.ModeSocket != 0:
		return "a socket"
	default:
		return "a device"
	}
}

// parseList parses the content of a file by its extension, without drop-ins,
// and refuses what libcni would refuse only at ADD.
func parseList(path string, b []byte) (*libcni.NetworkConfigList, error) {
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
	if err := validateName(list.Name); err != nil {
		return nil, fmt.Errorf("is not valid: %w", err)
	}
	// libcni takes an empty cniVersion for 0.1.0.
	if v := list.CNIVersion; v != "" && !slices.Contains(version.All.SupportedVersions(), v) {
		return nil, fmt.Errorf("is not valid: cniVersion %q is not one of %s", v, strings.Join(version.All.SupportedVersions(), ", "))
	}
	return list, nil
}

// validateName applies the rule for network names (CNI spec 1.1, section 1),
// which libcni applies only at ADD.
func validateName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("network name %q... is too long: %d bytes, the limit is %d", name[:32], len(name), maxName)
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

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
