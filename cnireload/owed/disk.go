// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package owed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/log"

	"github.com/cnireload/cnireload/internal/diskfile"
)

// begunDir holds, below a store's directory, a record of each ADD that has begun
// and whose caller was not told that it has succeeded. libcni's own cache is no
// place for it: whoever reads that takes an entry for an attachment.
const begunDir = "begun"

// maxFile is the largest file that is read, in bytes.
const maxFile = 4 << 20

func (s *Store) path(id string) string { return filepath.Join(s.dir, url.PathEscape(id)+".json") }

func (s *Store) begunPath(id string) string {
	return filepath.Join(s.dir, begunDir, url.PathEscape(id)+".json")
}

// BeginADD records that an ADD begins, with the lists that would have to be
// removed. The record survives this process, but is not synced: the pod would
// have to wait for a slow disk.
func (s *Store) BeginADD(r Removal) error {
	if s.dir == "" {
		return nil
	}
	r.Handler = s.handler
	return write(s.begunPath(r.ID), &r, false)
}

// EndADD forgets the record of an ADD: its caller knows that it has succeeded, or
// the pod is removed.
func (s *Store) EndADD(id string) {
	if s.dir != "" {
		_ = os.Remove(s.begunPath(id))
	}
}

// BegunADD returns the record of an ADD; nil if there is none.
func (s *Store) BegunADD(id string) *Removal {
	if s.dir == "" {
		return nil
	}
	r, err := readFile(s.begunPath(id))
	if err != nil || r.ID != id {
		return nil
	}
	return r
}

// BegunADDs returns the records of ADDs that began before that time.
func (s *Store) BegunADDs(ctx context.Context, before time.Time) (begun []*Removal) {
	for _, r := range s.read(ctx, filepath.Join(s.dir, begunDir)) {
		if r.Since.Before(before) && s.owns(r.Handler) {
			begun = append(begun, r)
		}
	}
	return begun
}

// read returns the records in a directory.
func (s *Store) read(ctx context.Context, dir string) (all []*Removal) {
	if s.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.G(ctx).WithError(err).Warnf("cni: cannot read the removals that are owed in %s", dir)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if filepath.Ext(path) != ".json" {
			// A crash has left it while a file was written.
			if info, err := e.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > time.Minute {
				_ = os.Remove(path)
			}
			continue
		}
		r, err := readFile(path)
		switch {
		case err == nil:
			all = append(all, r)
		case !errors.Is(err, fs.ErrNotExist): // it would be done meanwhile
			log.G(ctx).WithError(err).Warn("cni: a removal that is owed cannot be read; remove the file when nothing of its pod is left")
		}
	}
	return all
}

func readFile(path string) (*Removal, error) {
	c := diskfile.Read(path, time.Now(), maxFile)
	if c.Err != nil {
		return nil, fmt.Errorf("%s %w", path, c.Err)
	}
	var r Removal
	if err := json.Unmarshal(c.Bytes, &r); err != nil {
		return nil, fmt.Errorf("%s cannot be parsed: %w", path, err)
	}
	if r.ID == "" || len(r.Networks) == 0 {
		return nil, fmt.Errorf("%s names no pod or no network", path)
	}
	return &r, nil
}

// write puts a record in place in one step.
func write(path string, r *Removal, sync bool) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if !sync {
		if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
			return err
		}
		return os.Rename(path+".tmp", path)
	}
	return diskfile.Write(path, b, 0o600)
}
