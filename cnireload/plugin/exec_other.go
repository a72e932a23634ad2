//go:build !unix

// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
)

// errTextBusy does not occur here.
var errTextBusy = errors.New("text file busy")

// errNotDir is not told apart here.
var errNotDir = fs.ErrNotExist

func isolate(*exec.Cmd) {}

// killAll kills the plugin alone: there are no process groups here.
func killAll(cmd *exec.Cmd) error { return cmd.Process.Kill() }

// readReady reads nothing: the pipe is closed by then.
func readReady(*os.File, []byte, io.Writer) {}

// executable is decided by the file's name here, see invoke.ExecutableFileExtensions.
func executable(fs.FileInfo) bool { return true }
