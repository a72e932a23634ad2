// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// holdSocket is outside of the state folder, which is the daemon's.
func (d *Daemon) holdSocket() string { return d.path("hold.sock") }

// Kill ends the daemon as a crash does.
func (d *Daemon) Kill() error {
	if err := syscall.Kill(d.PID(), syscall.SIGKILL); err != nil {
		return err
	}
	<-d.done
	if d.conn != nil {
		_ = d.conn.Close()
		d.conn = nil
	}
	return nil
}

// ctr runs the daemon's ctr in a namespace.
func (d *Daemon) ctr(ctx context.Context, namespace string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(d.bin, "ctr"), append([]string{"-a", d.Socket(), "-n", namespace}, args...)...)
	var said strings.Builder
	cmd.Stderr = &said // warnings, too
	b, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	return string(b), nil
}

// MetadataLeases names the leases of CRI's namespace that stay until they are
// deleted. Containerd takes others for a moment, while it makes a container; if
// it is killed then they stay until they expire, on stock, too.
func (d *Daemon) MetadataLeases(ctx context.Context) ([]string, error) {
	out, err := d.ctr(ctx, "k8s.io", "leases", "list")
	return lasting(out), err
}

// lasting picks the leases that do not expire from "ctr leases list".
func lasting(list string) []string {
	var names []string
	for i, line := range strings.Split(strings.TrimSpace(list), "\n") {
		if f := strings.Fields(line); i > 0 && len(f) > 0 && !strings.Contains(line, "containerd.io/gc.expire=") {
			names = append(names, f[0])
		}
	}
	return names
}

// HoldMetadata takes the write lock of the metadata database, as a disk does
// that does not answer, until release is called. Nothing is written by it.
//
// The lock is held over the label of a snapshot: containerd asks the
// snapshotter to note it within a transaction, and the snapshotter is this
// program and takes its time.
func (d *Daemon) HoldMetadata(ctx context.Context) (release func() error, err error) {
	if err := os.Remove(d.holdSocket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", d.holdSocket())
	if err != nil {
		return nil, err
	}
	held, end := make(chan struct{}), make(chan struct{})
	signal := sync.OnceFunc(func() { close(held) })
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		var message emptypb.Empty // whatever it is
		if err := stream.RecvMsg(&message); err != nil {
			return err
		}
		switch method, _ := grpc.MethodFromServerStream(stream); filepath.Base(method) {
		case "Prepare":
			return stream.SendMsg(new(emptypb.Empty))
		case "Update":
			signal()
			<-end
			return status.Error(codes.Aborted, "released")
		default:
			return status.Error(codes.Unimplemented, method)
		}
	}))
	go func() { _ = server.Serve(l) }()

	const namespace, snapshotter = "cnireload-hold", "--snapshotter=held"
	label := make(chan error, 1)
	release = sync.OnceValue(func() error {
		close(end)
		// The transaction has been rolled back when its caller is told.
		err := <-label
		server.Stop()
		if err != nil && !strings.Contains(err.Error(), "released") {
			return err
		}
		return nil
	})
	name := fmt.Sprintf("h-%d", time.Now().UnixNano())
	if _, err := d.ctr(ctx, namespace, "snapshots", snapshotter, "prepare", name); err != nil {
		server.Stop()
		return nil, err
	}
	go func() {
		_, err := d.ctr(context.WithoutCancel(ctx), namespace, "snapshots", snapshotter, "label", name, "a=b")
		label <- err
	}()
	select {
	case <-held:
		return release, nil
	case err := <-label:
		server.Stop()
		return nil, fmt.Errorf("metadata is not held: %w", err)
	}
}

// MetadataWrites counts the transactions that have been committed to the
// metadata database since it was made.
func (d *Daemon) MetadataWrites() (uint64, error) {
	f, err := os.Open(d.BoltPath())
	if err != nil {
		return 0, err
	}
	defer f.Close()
	// Two pages hold the state of the last two transactions in turn. Behind a
	// page's header of 16 bytes come magic, version, page size and flags, the
	// root (16 bytes), the free list and the end (8 each), then the number.
	var last uint64
	page := int64(os.Getpagesize())
	for _, at := range []int64{0, page} {
		b := make([]byte, 72)
		if _, err := f.ReadAt(b, at); err != nil {
			return 0, err
		}
		if magic := binary.NativeEndian.Uint32(b[16:]); magic != 0xED0CDAED {
			return 0, fmt.Errorf("%s: page at %d starts with %#x", d.BoltPath(), at, magic)
		}
		last = max(last, binary.NativeEndian.Uint64(b[64:]))
	}
	return last, nil
}
