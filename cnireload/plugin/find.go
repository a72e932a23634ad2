// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/cnireload/cnireload/internal/diskfile"
)

// Find returns the path of the executable of a plugin, the first in dirs, and its
// stat data. With skip it passes over what cannot be executed, as a runtime does.
// Without, the first regular file decides, as where a plugin looks for those that
// it runs itself. The error says what was passed over and why.
func Find(plugin string, dirs []string, skip bool) (string, os.FileInfo, error) {
	if plugin == "" {
		return "", nil, errors.New("no plugin name provided")
	}
	if strings.ContainsAny(plugin, "/"+string(os.PathSeparator)) {
		return "", nil, fmt.Errorf("invalid plugin name %q: must not be a path", plugin)
	}
	missing := &notFound{plugin: plugin, dirs: dirs}
	for _, dir := range dirs {
		for _, ext := range invoke.ExecutableFileExtensions {
			path := filepath.Join(dir, plugin) + ext
			info, err := os.Stat(path)
			switch {
			case err != nil:
				switch _, lerr := os.Lstat(path); {
				case lerr == nil && errors.Is(err, fs.ErrNotExist):
					missing.rejected = append(missing.rejected, path+" is a symlink that leads nowhere")
				case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNotDir):
					missing.rejected = append(missing.rejected, fmt.Sprintf("%s cannot be looked at: %v", path, errors.Unwrap(err)))
				}
				continue
			case !info.Mode().IsRegular():
				missing.rejected = append(missing.rejected, fmt.Sprintf("%s is not a regular file but %s", path, diskfile.Kind(info.Mode())))
				continue
			case !executable(info):
				missing.rejected = append(missing.rejected, fmt.Sprintf("%s is not executable (mode %04o)", path, info.Mode().Perm()))
				if skip {
					continue
				}
				return "", nil, missing
			}
			return path, info, nil
		}
	}
	return "", nil, missing
}

// notFound is the error of a plugin that no bin dir offers.
type notFound struct {
	plugin   string
	dirs     []string
	rejected []string // "path: why", in the order the dirs were searched
}

func (e *notFound) Error() string {
	if len(e.rejected) > 0 {
		return fmt.Sprintf("plugin %q cannot be executed%s", e.plugin, e.reasons())
	}
	return fmt.Sprintf("plugin %q not found in %s", e.plugin, strings.Join(e.dirs, string(filepath.ListSeparator)))
}

func (e *notFound) reasons() string {
	if len(e.rejected) == 0 {
		return ""
	}
	return ": " + strings.Join(e.rejected, "; ")
}
