// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// NewClient is a second connection to the daemon's CRI: what breaks it leaves
// the daemon's own alone.
func (d *Daemon) NewClient() (client runtimeapi.RuntimeServiceClient, end func() error, err error) {
	conn, err := grpc.NewClient("unix://"+d.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, nil, err
	}
	return runtimeapi.NewRuntimeServiceClient(conn), conn.Close, nil
}

// Events is a subscription to events that are published through it.
type Events struct {
	d      *Daemon
	ctx    context.Context
	cancel context.CancelFunc
	n      int

	mu       sync.Mutex
	arrivals map[string]chan time.Time // by topic
}

// Events subscribes to the daemon's events.
func (d *Daemon) Events(ctx context.Context) (*Events, error) {
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "cnireload-test")
	e := &Events{d: d, arrivals: map[string]chan time.Time{}}
	e.ctx, e.cancel = context.WithCancel(ctx)
	s, err := d.conn.NewStream(e.ctx, &grpc.StreamDesc{ServerStreams: true}, "/containerd.services.events.v1.Events/Subscribe")
	if err != nil {
		e.cancel()
		return nil, err
	}
	// As with leases: the request's one field is a string, its first.
	if err := errors.Join(s.SendMsg(wrapperspb.String(`topic~="^/cnireload/"`)), s.CloseSend()); err != nil {
		e.cancel()
		return nil, err
	}
	go func() {
		for {
			var envelope emptypb.Empty
			if s.RecvMsg(&envelope) != nil {
				return
			}
			now := time.Now()
			topic := stringField(envelope.ProtoReflect().GetUnknown(), 3)
			e.mu.Lock()
			if c := e.arrivals[topic]; c != nil {
				c <- now
				delete(e.arrivals, topic)
			}
			e.mu.Unlock()
		}
	}()
	// The subscription is there a moment after the stream.
	return e, Poll(ctx, 10*time.Second, func() error {
		_, err := e.Delay(time.Second)
		return err
	})
}

// Close ends the subscription.
func (e *Events) Close() { e.cancel() }

// Delay publishes an event and tells when it has come back.
func (e *Events) Delay(within time.Duration) (time.Duration, error) {
	event, err := anypb.New(wrapperspb.String("probe"))
	if err != nil {
		return 0, err
	}
	b, err := proto.Marshal(event)
	if err != nil {
		return 0, err
	}
	e.n++
	topic := fmt.Sprintf("/cnireload/n%d", e.n)
	arrived := make(chan time.Time, 1)
	e.mu.Lock()
	e.arrivals[topic] = arrived
	e.mu.Unlock()
	// PublishRequest: the topic, and the event as google.protobuf.Any.
	var request []byte
	request = protowire.AppendTag(request, 1, protowire.BytesType)
	request = protowire.AppendString(request, topic)
	request = protowire.AppendTag(request, 2, protowire.BytesType)
	request = protowire.AppendBytes(request, b)
	m := new(emptypb.Empty)
	m.ProtoReflect().SetUnknown(request)
	ctx, cancel := context.WithTimeout(e.ctx, within)
	defer cancel()
	begin := time.Now()
	if err := e.d.conn.Invoke(ctx, "/containerd.services.events.v1.Events/Publish", m, new(emptypb.Empty)); err != nil {
		return 0, fmt.Errorf("publish: %w", err)
	}
	select {
	case at := <-arrived:
		return at.Sub(begin), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("event %s has not arrived within %v", topic, within)
	}
}

// stringField is a field of an encoded message.
func stringField(b []byte, field protowire.Number) string {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return ""
		}
		b = b[n:]
		if number == field && kind == protowire.BytesType {
			s, _ := protowire.ConsumeString(b)
			return strings.Clone(s)
		}
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return ""
		}
		b = b[n:]
	}
	return ""
}

// BoltTx is the number of the last write transaction of the metadata database,
// from the two pages that begin its file and are written in turns.
func (d *Daemon) BoltTx() (tx uint64, err error) {
	f, err := os.Open(d.BoltPath())
	if err != nil {
		return 0, err
	}
	defer f.Close()
	const (
		header   = 16 // of a page
		magic    = 0xED0CDAED
		pageSize = header + 8
		txid     = header + 48
	)
	page := make([]byte, 128)
	if _, err := f.ReadAt(page, 0); err != nil {
		return 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	size := int64(binary.NativeEndian.Uint32(page[pageSize:]))
	for _, at := range []int64{0, size} {
		if _, err := f.ReadAt(page, at); err != nil {
			return 0, fmt.Errorf("%s: %w", f.Name(), err)
		}
		if binary.NativeEndian.Uint32(page[header:]) != magic {
			return 0, fmt.Errorf("%s: no bolt database", f.Name())
		}
		tx = max(tx, binary.NativeEndian.Uint64(page[txid:]))
	}
	return tx, nil
}
