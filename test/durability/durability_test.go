// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package durability kills a program that writes through groupcommit at each
// sync of a transaction that it shares among writers, takes its power, and stops
// its disk. What was acknowledged is there afterwards, and of all else the whole
// or nothing. The program is groupcommit's test binary, see its crash_test.go.
package durability

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/cnireload/cnireload/test/harness"
	"github.com/cnireload/cnireload/test/slowsync"
)

const (
	batchSize = 4 // of the program
	pageSize  = 4096
	waitFor   = time.Minute
)

// program is the writer.
type program struct {
	t     *testing.T
	exe   string
	file  string
	slow  *slowsync.Server
	cmd   *exec.Cmd
	in    io.Writer
	lines chan string
	acked map[string]bool
}

func start(t *testing.T, exe, wrapper, file, socket string, slow *slowsync.Server) *program {
	p := &program{t: t, exe: exe, file: file, slow: slow, acked: map[string]bool{}}
	p.cmd = exec.Command(wrapper, socket, exe)
	p.cmd.Env = append(os.Environ(), "CNIRELOAD_GROUPCOMMIT=write "+file)
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	assert.NilError(t, err)
	out, err := p.cmd.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, p.cmd.Start())
	p.lines = make(chan string, 100)
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	assert.Equal(t, p.line(), "ready")
	return p
}

func (p *program) line() string {
	p.t.Helper()
	select {
	case l := <-p.lines:
		return l
	case <-time.After(waitFor):
		p.t.Fatal("the program says nothing")
		return ""
	}
}

func (p *program) order(format string, args ...any) {
	_, err := fmt.Fprintf(p.in, format+"\n", args...)
	assert.NilError(p.t, err)
}

// answers reads what all writes of a batch got.
func (p *program) answers() {
	p.t.Helper()
	for range batchSize {
		id, ok := strings.CutPrefix(p.line(), "ack ")
		assert.Assert(p.t, ok, id)
		p.acked[id] = true
	}
}

// silent fails if anything is said.
func (p *program) silent() {
	p.t.Helper()
	select {
	case l := <-p.lines:
		p.t.Fatalf("%q was said before the sync had ended", l)
	case <-time.After(100 * time.Millisecond):
	}
}

// atSync waits until the program waits in the nth sync since before.
func (p *program) atSync(before, n int64) {
	p.t.Helper()
	assert.NilError(p.t, harness.Poll(p.t.Context(), waitFor, func() error {
		if begun, waiting := p.slow.Count()-before, p.slow.Waiting(); begun != n || waiting != 1 {
			return fmt.Errorf("%d syncs have begun and %d wait, want %d and 1", begun, waiting, n)
		}
		return nil
	}))
}

// kill ends the program and takes in what it has said.
func (p *program) kill() {
	assert.NilError(p.t, p.cmd.Process.Kill())
	for l := range p.lines {
		if id, ok := strings.CutPrefix(l, "ack "); ok {
			p.acked[id] = true
		}
	}
	_ = p.cmd.Wait()
}

// check opens a database and compares it with what was acknowledged. Of the
// named batch all writes must be there or none, and it tells which.
func (p *program) check(file, batch string) (there bool) {
	p.t.Helper()
	stored := map[string]bool{}
	n := 0
	for _, id := range strings.Fields(p.stored(file)) {
		stored[id] = true
		if strings.HasPrefix(id, batch+"-") {
			n++
		}
	}
	for id := range p.acked {
		assert.Assert(p.t, stored[id], "%s was acknowledged and is not there", id)
	}
	assert.Assert(p.t, n == 0 || n == batchSize, "%d of the %d writes of one transaction are there", n, batchSize)
	return n > 0
}

// stored names the writes in a database, which must be sound.
func (p *program) stored(file string) string {
	p.t.Helper()
	cmd := exec.Command(p.exe)
	cmd.Env = append(os.Environ(), "CNIRELOAD_GROUPCOMMIT=show "+file)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	assert.NilError(p.t, err, said.String())
	return string(out)
}

// setUp starts the program.
func setUp(t *testing.T) *program {
	if err := harness.Preflight("make test-e2e"); err != nil {
		t.Fatal(err)
	}
	root, err := harness.Root()
	assert.NilError(t, err)
	wrapper, err := harness.Build("slowsync")
	assert.NilError(t, err)
	dir := t.TempDir()
	exe := filepath.Join(dir, "writer")
	build := exec.Command("go", "test", "-c", "-o", exe, "./groupcommit")
	build.Dir = root
	out, err := build.CombinedOutput()
	assert.NilError(t, err, string(out))
	socket := filepath.Join(dir, "s")
	slow, err := slowsync.Listen(socket)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, slow.Close()) })
	return start(t, exe, wrapper, filepath.Join(dir, "test.db"), socket, slow)
}

// A transaction has two syncs: of its pages, and of the page that makes them
// count. The program is killed in the first, in the second, right after it, and
// after the answers. In each sync the power may go, too: of the pages that were
// written since the one before, each is then there or not by itself.
func TestEachSync(t *testing.T) {
	for step, name := range []string{"in the first sync", "in the second sync", "after the second sync", "after the answers"} {
		t.Run(name, func(t *testing.T) {
			p := setUp(t)
			for i := range 3 {
				p.order("batch before%d", i)
				p.answers()
			}
			durable, before := read(t, p.file), p.slow.Count()
			// powerLoss makes what may be on disk while a sync runs, and tells in
			// how many of the images the batch is there.
			powerLoss := func() (there int) {
				written := read(t, p.file)
				for i := range 12 {
					if p.check(mixed(t, p.file+".image", durable, written, i), "last") {
						there++
					}
				}
				durable = written
				return there
			}
			release := p.slow.Hold()
			p.order("batch last")
			p.atSync(before, 1)
			p.silent()
			assert.Equal(t, powerLoss(), 0)
			if step > 0 {
				p.slow.Step()
				p.atSync(before, 2)
				p.silent()
				n := powerLoss()
				assert.Assert(t, n > 0 && n < 12, "there in %d images of 12", n)
				release = p.slow.Hold()
			}
			if step > 1 {
				release()
			}
			if step > 2 {
				p.answers()
			}
			p.kill()
			there := p.check(p.file, "last")
			assert.Assert(t, there || step < 3, "what was acknowledged is not there")
			assert.Assert(t, !there || step > 0, "what was not committed is there")
			release()
		})
	}
}

// While the disk does not answer, nothing is acknowledged, and who waits can
// leave. When it does again, all go on; when it never does, what was not
// acknowledged is there as a whole or not at all.
func TestDiskStops(t *testing.T) {
	for _, again := range []bool{true, false} {
		t.Run(fmt.Sprintf("again=%t", again), func(t *testing.T) {
			p := setUp(t)
			p.order("batch before")
			p.answers()
			before := p.slow.Count()
			release := p.slow.Hold()
			defer release()
			p.order("batch last")
			p.atSync(before, 1)
			p.silent()
			p.order("leave left")
			said := p.line()
			assert.Assert(t, strings.HasPrefix(said, "no left ") && strings.Contains(said, "deadline"), said)
			p.silent()
			if again {
				release()
				p.answers()
			}
			p.kill()
			assert.Equal(t, p.check(p.file, "last"), again)
			assert.Assert(t, !p.acked["left"] && !strings.Contains(p.stored(p.file), "left"))
		})
	}
}

func read(t *testing.T, file string) []byte {
	b, err := os.ReadFile(file)
	assert.NilError(t, err)
	return b
}

// mixed writes a file of which each page is, by chance, what was on disk for
// certain, or what has been written since; the first two are all of one.
func mixed(t *testing.T, file string, durable, written []byte, i int) string {
	image := bytes.Clone(written)
	for at := 0; at < len(durable); at += pageSize {
		if i == 0 || i > 1 && rand.IntN(2) == 0 {
			copy(image[at:at+pageSize], durable[at:at+pageSize])
		}
	}
	assert.NilError(t, os.WriteFile(file, image, 0o600))
	return file
}
