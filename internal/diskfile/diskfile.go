// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package diskfile reads and writes small files that others write, too. A read
// blocks on nothing but the disk and returns no more than asked for; a write puts
// a whole file in place or leaves the old one. The functions can be called
// concurrently; nothing is kept between calls.
package diskfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/containerd/containerd/v2/pkg/atomicfile"
)

// RacyWindow is how old a file must have been when it was read before its stat
// data alone can prove that it has not changed since: a file written twice within
// one tick of the file system's clock looks the same.
const RacyWindow = 2 * time.Second

// Content is one file as it was read. It is not changed after it was made.
type Content struct {
	Path   string
	ID     ID
	ReadAt time.Time
	Bytes  []byte
	Sum    string // hex SHA-256
	Err    error  // why the file cannot be used; Bytes is nil then
	// Known is set if ID stands for the outcome, good or bad. A file that could
	// not be read may be readable the next time with the same stat data.
	Known bool
}

// Fresh tells whether c still is what the file holds that now has the identity id.
func (c *Content) Fresh(id ID) bool {
	return c.Known && c.ID.Same(id) && c.ReadAt.Sub(id.changed()) > RacyWindow
}

// Same tells whether reading a file again brought nothing new.
func (c *Content) Same(other *Content) bool {
	return c == other || c.Path == other.Path && c.Sum == other.Sum && fmt.Sprint(c.Err) == fmt.Sprint(other.Err)
}

// Read reads a file. It cannot block on a FIFO or a device, and reads no
// more than limit. The error completes a sentence that starts with the path.
func Read(path string, now time.Time, limit int64) *Content {
	c := &Content{Path: path, ReadAt: now}
	fail := func(err error) *Content {
		c.Err = err
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
		return fail(fmt.Errorf("is not a regular file but %s", Kind(info.Mode())))
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
		return fail(fmt.Errorf("is not a regular file but %s", Kind(info.Mode())))
	}
	c.ID = Identify(info)
	if info.Size() > limit {
		c.Known = true
		return fail(fmt.Errorf("is too big: %d bytes, the limit is %d", info.Size(), limit))
	}
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return fail(fmt.Errorf("cannot be read: %w", err))
	}
	sum := sha256.Sum256(b)
	c.Sum, c.Known = hex.EncodeToString(sum[:]), true
	switch {
	case int64(len(b)) > limit:
		return fail(fmt.Errorf("is too big: the limit is %d bytes", limit))
	case len(bytes.TrimSpace(b)) == 0:
		return fail(errors.New("is empty"))
	}
	c.Bytes = b
	return c
}

// Kind says what a file is that is not regular.
func Kind(m fs.FileMode) string {
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

// ID tells one state of one file from another by stat data alone.
type ID struct {
	info  fs.FileInfo
	ctime time.Time
}

// Identify returns the identity of a file in its present state.
func Identify(info fs.FileInfo) ID {
	return ID{info: info, ctime: statusChanged(info)}
}

// Same tells whether both are the same file in the same state, as far as stat
// data can tell.
func (a ID) Same(b ID) bool {
	return a.info != nil && b.info != nil &&
		os.SameFile(a.info, b.info) &&
		a.info.Size() == b.info.Size() &&
		a.info.Mode() == b.info.Mode() &&
		a.info.ModTime().Equal(b.info.ModTime()) &&
		a.ctime.Equal(b.ctime)
}

// changed returns the later of the file's two times.
func (a ID) changed() time.Time {
	if m := a.info.ModTime(); m.After(a.ctime) {
		return m
	}
	return a.ctime
}

// Write puts b in place of the file at path, as a whole and synced, with the
// permissions mode.
func Write(path string, b []byte, mode os.FileMode) error {
	f, err := atomicfile.New(path, mode)
	if err == nil {
		if _, err = f.Write(b); err != nil {
			_ = f.Cancel()
		} else {
			err = f.Close()
		}
	}
	if err == nil {
		return nil
	}
	// It names the temporary file, otherwise each time.
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	return fmt.Errorf("cannot write %s: %w", path, err)
}
