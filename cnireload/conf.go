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
	id     fileID
	readAt time.Time
	bytes  []byte
	sum    string // hex SHA-256
	err    error  // why the file cannot be used; bytes is nil then
}

// fresh tells whether c still is what the file with identity id holds.
func (c *content) fresh(id fileID) bool {
	return c.id.same(id) && c.readAt.Sub(id.changed()) > racyWindow
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
	contents map[string]*content
	bases    map[string]base
	parsed   map[string]*confFile
	now      func() time.Time
}

// base is a parsed file without its drop-ins.
type base struct {
	content *content
	list    *libcni.NetworkConfigList
	err     error
}

func newScanner(dir string) *scanner {
	return &scanner{
		dir:      dir,
		contents: make(map[string]*content),
		bases:    make(map[string]base),
		parsed:   make(map[string]*confFile),
		now:      time.Now,
	}
}

// scan looks at the directory. Unchanged files are not read again.
func (s *scanner) scan() dirScan {
	var result dirScan
	if s.dir == "" {
		result.err = errors.New("no cni conf dir is configured")
		return result
	}
	seen := make(map[string]bool)
	names, err := confNames(cleanPath(s.dir), true, ".conf", ".conflist", ".json")
	if err != nil {
		result.err = err
		return result
	}
	for _, path := range names {
		seen[path] = true
		result.watch = withTargets(result.watch, path)
		result.files = append(result.files, s.parse(path, seen, &result))
	}
	for path := range s.contents {
		if !seen[path] {
			delete(s.contents, path)
			delete(s.bases, path)
			delete(s.parsed, path)
		}
	}
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

// confNames lists the paths in dir with one of the extensions, in lexical
// order. Directories are passed over, as libcni does, unless they are asked for.
func confNames(dir string, dirs bool, extensions ...string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if (dirs || !e.IsDir()) && slices.Contains(extensions, filepath.Ext(e.Name())) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	slices.Sort(paths)
	return paths, nil
}

// parse returns the parsed form of one file, from memory if it has not changed.
func (s *scanner) parse(path string, seen map[string]bool, result *dirScan) *confFile {
	c := s.read(path)
	b := s.bases[path]
	if b.content != c {
		b = base{content: c, err: c.err}
		if b.err == nil {
			b.list, b.err = parseList(path, c.bytes)
		}
		s.bases[path] = b
	}
	f := &confFile{path: path, sum: c.sum, err: b.err}
	if f.err == nil {
		list := *b.list // drop-ins are appended to a copy
		list.Plugins = slices.Clone(list.Plugins)
		f.list = &list
	}
	if f.err == nil && filepath.Ext(path) == ".conflist" && !f.list.LoadOnlyInlinedPlugins {
		s.addDropIns(f, seen, result)
	}
	if f.err == nil && len(f.list.Plugins) == 0 {
		f.err = errors.New("has no plugins")
	}
	if f.err != nil {
		f.list = nil
	}
	// Keep the object of an unchanged file: the lists of a generation are
	// shared, and comparing pointers is cheap.
	if old := s.parsed[path]; old != nil && old.identity() == f.identity() && errorText(old.err) == errorText(f.err) {
		return old
	}
	s.parsed[path] = f
	return f
}

// addDropIns appends the plugins of <dir>/<name>/*.conf, as libcni does for a
// conflist that does not set loadOnlyInlinedPlugins.
func (s *scanner) addDropIns(f *confFile, seen map[string]bool, result *dirScan) {
	dir := filepath.Join(filepath.Dir(f.path), f.list.Name)
	result.watch = append(result.watch, dir)
	paths, err := confNames(dir, false, ".conf")
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			f.err = fmt.Errorf("drop-in dir cannot be read: %w", err)
		}
		return
	}
	for _, path := range paths {
		seen[path] = true
		c := s.read(path)
		if errors.Is(c.err, fs.ErrNotExist) {
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				continue // removed since it was listed
			}
		}
		f.dropIns = append(f.dropIns, dropIn{Path: path, SHA256: c.sum})
		if c.err != nil {
			// Not wrapped: only a list whose own file does not exist counts as
			// removed.
			f.err = fmt.Errorf("drop-in %s %v", path, c.err)
			return
		}
		p, err := libcni.NetworkPluginConfFromBytes(c.bytes)
		if err != nil {
			f.err = fmt.Errorf("drop-in %s: %w", path, err)
			return
		}
		f.list.Plugins = append(f.list.Plugins, p)
	}
}

// read returns what path holds, from memory if that is sure to be the same.
func (s *scanner) read(path string) *content {
	info, err := os.Stat(path)
	if err == nil {
		if c := s.contents[path]; c != nil && c.err == nil && c.fresh(newFileID(info)) {
			return c
		}
	}
	c := readContent(path, s.now())
	s.contents[path] = c
	return c
}

// readContent reads a configuration file.
func readContent(path string, now time.Time) *content { return readBounded(path, now, maxConfSize) }

// readBounded reads a file. It cannot block on a FIFO or a device, and reads no
// more than limit. The error completes a sentence that starts with the path.
func readBounded(path string, now time.Time, limit int64) *content {
	c := &content{readAt: now}
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
		return fail(fmt.Errorf("is too big: %d bytes, the limit is %d", info.Size(), limit))
	}
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return fail(fmt.Errorf("cannot be read: %w", err))
	}
	sum := sha256.Sum256(b)
	c.sum = hex.EncodeToString(sum[:])
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
