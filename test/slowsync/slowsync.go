// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package slowsync makes the fdatasync of one program slow, or stops it, as a
// slow or a dying disk does, and counts it. The program is started through
// cmd/slowsync, which has the kernel ask a Server of this package before each
// fdatasync (seccomp user notification). All else runs at full speed.
package slowsync

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Server delays the fdatasyncs of the programs started through it.
type Server struct {
	listener *net.UnixListener
	count    atomic.Int64
	closing  context.CancelFunc
	ctx      context.Context

	mu      sync.Mutex
	delay   time.Duration
	hold    chan struct{} // closed to let go of what is held
	only    string
	waiting int
	counts  map[string]int64 // by path
}

// Listen serves programs that are started with Wrap of the same path. Its
// delay is 0 at first.
func Listen(socket string) (*Server, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l, counts: map[string]int64{}}
	s.ctx, s.closing = context.WithCancel(context.Background())
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			fd, err := receive(conn)
			_ = conn.Close()
			if err != nil {
				fmt.Fprintln(os.Stderr, "slowsync:", err)
				continue
			}
			go s.serve(fd)
		}
	}()
	return s, nil
}

// Close ends the server. Programs that still run get an error from fdatasync.
func (s *Server) Close() error {
	s.closing()
	return s.listener.Close()
}

// SetDelay has each fdatasync that begins from now on take longer by that much.
func (s *Server) SetDelay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = d
}

// Only limits delays to files whose path ends like that; "" means all. Others
// are counted, too.
func (s *Server) Only(suffix string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.only = suffix
}

// Hold has each fdatasync wait from now on until release is called.
func (s *Server) Hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold == nil {
		s.hold = make(chan struct{})
	}
	hold := s.hold
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hold == hold {
			close(hold)
			s.hold = nil
		}
	}
}

// Step lets go of what is held and holds what comes next.
func (s *Server) Step() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold != nil {
		close(s.hold)
	}
	s.hold = make(chan struct{})
}

// Count is how many fdatasyncs have begun.
func (s *Server) Count() int64 { return s.count.Load() }

// CountOf is how many have begun of files whose path ends like that.
func (s *Server) CountOf(suffix string) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for path, count := range s.counts {
		if strings.HasSuffix(path, suffix) {
			n += count
		}
	}
	return n
}

// Waiting is how many are being delayed or held.
func (s *Server) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting
}

// The ioctls and structures of linux/seccomp.h.
const (
	ioctlRecv = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	ioctlSend = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
	goOn      = 1          // SECCOMP_USER_NOTIF_FLAG_CONTINUE
)

type notification struct {
	id    uint64
	pid   uint32
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

type response struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

func (s *Server) serve(fd int) {
	defer unix.Close(fd)
	for s.ctx.Err() == nil {
		// The kernel wakes nobody who waits in the ioctl when the program has
		// ended; poll says so.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		switch n, err := unix.Poll(p, 200); {
		case errors.Is(err, unix.EINTR) || n == 0:
			continue
		case err != nil || p[0].Revents&unix.POLLHUP != 0 && p[0].Revents&unix.POLLIN == 0:
			return
		}
		var n notification
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlRecv, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // its thread was killed meanwhile, or a signal came
		}
		s.count.Add(1)
		delay, hold := s.begin(&n)
		if delay == 0 && hold == nil {
			answer(fd, n.id)
			continue
		}
		// A copy of the descriptor outlives this loop.
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			answer(fd, n.id)
			continue
		}
		go func() {
			defer unix.Close(dup)
			select {
			case <-time.After(delay):
			case <-s.ctx.Done():
			}
			if hold != nil {
				select {
				case <-hold:
				case <-s.ctx.Done():
				}
			}
			s.mu.Lock()
			s.waiting--
			s.mu.Unlock()
			answer(dup, n.id)
		}()
	}
}

// begin tells what is to be done with a call.
func (s *Server) begin(n *notification) (time.Duration, chan struct{}) {
	path, err := os.Readlink(filepath.Join("/proc", fmt.Sprint(n.pid), "fd", fmt.Sprint(int32(n.args[0]))))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[path]++
	if s.only != "" && (err != nil || !strings.HasSuffix(path, s.only)) {
		return 0, nil
	}
	if s.delay > 0 || s.hold != nil {
		s.waiting++
	}
	return s.delay, s.hold
}

// answer has the kernel go on with the call.
func answer(fd int, id uint64) {
	r := response{id: id, flags: goOn}
	// It fails when the caller has been killed, which is of no interest.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlSend, uintptr(unsafe.Pointer(&r)))
}

func receive(conn *net.UnixConn) (fd int, err error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) == 0 {
		return -1, fmt.Errorf("no descriptor was sent: %w", err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("want one descriptor: %w", err)
	}
	return fds[0], nil
}
