// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// Seen keeps what a test program has seen on stock. It holds as long as nothing
// that could change it does: the test program itself, stock's binaries, the tools
// and plugins beside them, and the kernel. CNIRELOAD_SEEN=1 asks for it; what was
// seen is noted in any case. Safe for concurrent use.
type Seen struct{ dir string }

// OpenSeen returns what this program has seen.
var OpenSeen = sync.OnceValues(func() (*Seen, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	stock, err := BinDir(Stock)
	if err != nil {
		return nil, err
	}
	tools, err := ToolsDir()
	if err != nil {
		return nil, err
	}
	fakenet, err := Fakenet()
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	var kernel syscall.Utsname
	if err := syscall.Uname(&kernel); err != nil {
		return nil, err
	}
	fmt.Fprintln(sum, kernel.Release, kernel.Version)
	for _, path := range []string{program, stock, tools, filepath.Dir(fakenet)} {
		if err := addFiles(sum, path); err != nil {
			return nil, fmt.Errorf("what stock was seen to do: %w", err)
		}
	}
	name := strings.TrimSuffix(filepath.Base(program), ".test")
	return &Seen{filepath.Join(root, "_output", "stock", Line, "seen", name, hex.EncodeToString(sum.Sum(nil))[:32])}, nil
})

// addFiles adds the content of a file, or of all files under a folder.
func addFiles(w io.Writer, path string) error {
	return filepath.Walk(path, func(path string, info os.FileInfo, err error) error {
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		fmt.Fprintln(w, filepath.Base(path), info.Size())
		_, err = io.Copy(w, f)
		return err
	})
}

func (s *Seen) path(name string) string {
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(s.dir, hex.EncodeToString(sum[:8])+".json")
}

// Get reads what was noted under a name; false if nothing was, or if it is not
// asked for.
func (s *Seen) Get(name string, into any) (bool, error) {
	if os.Getenv("CNIRELOAD_SEEN") == "" {
		return false, nil
	}
	b, err := os.ReadFile(s.path(name))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	return err == nil, err
}

// Put notes it, and forgets what no longer holds.
func (s *Seen) Put(name string, what any) error {
	others, err := filepath.Glob(filepath.Join(filepath.Dir(s.dir), "*"))
	if err != nil {
		return err
	}
	for _, dir := range others {
		if dir != s.dir {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
		}
	}
	b, err := json.Marshal(what)
	if err != nil {
		return err
	}
	path := s.path(name)
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	return errors.Join(os.MkdirAll(s.dir, 0o755), os.WriteFile(tmp, b, 0o644), os.Rename(tmp, path))
}
