// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// output is a pipe for what a plugin prints, and what was read from it.
type output struct {
	capture
	r, w *os.File
	done chan struct{} // closed when nothing more is read
	held bool          // some process still had the other end then
}

func newOutput() (*output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return &output{r: r, w: w, done: make(chan struct{})}, nil
}

// discard closes the pipe of a plugin that could not be started.
func (o *output) discard() {
	_ = o.r.Close()
	_ = o.w.Close()
}

// collect begins to read what a plugin prints that was started.
func (o *output) collect() {
	_ = o.w.Close() // the plugin has a copy
	go func() {
		defer close(o.done)
		defer o.r.Close()
		buf := make([]byte, 8<<10)
		for {
			n, err := o.r.Read(buf)
			_, _ = o.Write(buf[:n])
			if err != nil {
				if o.held = !errors.Is(err, io.EOF); o.held {
					// The deadline has passed, but what the plugin printed may
					// still be in the pipe: on a busy machine this can run late.
					readReady(o.r, buf, &o.capture)
				}
				return
			}
		}
	}()
}

// expire has the reading end after the grace, even if the pipe is still open then.
func (o *output) expire() {
	if err := o.r.SetReadDeadline(time.Now().Add(pipeGrace)); err != nil && !errors.Is(err, os.ErrClosed) {
		// This platform has no deadlines for pipes.
		time.AfterFunc(pipeGrace, func() { _ = o.r.Close() })
	}
}

// wait returns whether the pipe was still held when the reading ended.
func (o *output) wait() bool {
	<-o.done
	return o.held
}

// capture keeps what is written to it, up to maxOutput bytes, and of more than
// that, or of what cannot be a JSON object, the first and the last maxErrorText
// only: many plugins may print a lot at once. Its lock is held for the copy
// alone: an abandoned plugin may still write while the caller reads.
type capture struct {
	mu   sync.Mutex
	head []byte
	tail []byte
	n    int64
	cut  bool // only head and tail are kept
}

func (c *capture) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += int64(len(p))
	if c.cut {
		c.tail = append(c.tail, p[max(0, len(p)-maxErrorText):]...)
		c.tail = append(c.tail[:0], c.tail[max(0, len(c.tail)-maxErrorText):]...)
		return len(p), nil
	}
	c.head = append(c.head, p...)
	if len(c.head) > maxOutput || len(c.head) > maxErrorText && !bytes.HasPrefix(bytes.TrimSpace(c.head[:maxErrorText]), []byte("{")) {
		c.cut = true
		over := c.head[maxErrorText:]
		c.head = bytes.Clone(c.head[:maxErrorText])
		c.tail = bytes.Clone(over[max(0, len(over)-maxErrorText):])
	}
	return len(p), nil
}

func (c *capture) total() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// bytes returns what was written, or its first part, which nobody may change.
func (c *capture) bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clip(c.head)
}

// text returns at most maxErrorText of what was written, head and tail.
func (c *capture) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.tail) == 0 {
		return shorten(c.head, maxErrorText)
	}
	half := maxErrorText/2 - 16
	return fmt.Sprintf("%s ...(%d bytes)... %s", c.head[:half], c.n-2*int64(half), c.tail[max(0, len(c.tail)-half):])
}

// note returns what was written as a supplement to an error, or nothing.
func (c *capture) note() string {
	if t := strings.TrimSpace(c.text()); t != "" {
		return shorten(fmt.Sprintf(" (it printed: %q)", t), maxErrorText)
	}
	return ""
}
