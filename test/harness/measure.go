// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func (d *Daemon) debugSocket() string { return filepath.Join(d.State, "debug.sock") }

// get fetches a page of the daemon's, over a unix socket if one is given.
func get(ctx context.Context, url, socket string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true}
	if socket != "" {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, b)
	}
	return string(b), err
}

// Goroutines counts the daemon's goroutines, all of them and those that are
// inside a function whose name contains the given text.
func (d *Daemon) Goroutines(ctx context.Context, in string) (all, inside int, err error) {
	text, err := get(ctx, "http://debug/debug/pprof/goroutine?debug=1", d.debugSocket())
	if err != nil {
		return 0, 0, err
	}
	for group := range strings.SplitSeq(text, "\n\n") {
		for line := range strings.SplitSeq(group, "\n") {
			count, _, ok := strings.Cut(line, " @ ")
			if !ok {
				continue
			}
			n, err := strconv.Atoi(count)
			if err != nil {
				continue
			}
			all += n
			if strings.Contains(group, in) {
				inside += n
			}
		}
	}
	return all, inside, nil
}

// Live has the daemon collect its garbage and tells what is left, in bytes: the
// objects it holds on the heap, and the stacks of its goroutines.
func (d *Daemon) Live(ctx context.Context) (heap, stacks int64, err error) {
	text, err := get(ctx, "http://debug/debug/pprof/heap?gc=1&debug=1", d.debugSocket())
	if err != nil {
		return 0, 0, err
	}
	for name, into := range map[string]*int64{"HeapAlloc": &heap, "Stack": &stacks} {
		value := "absent"
		for line := range strings.SplitSeq(text, "\n") {
			if v, ok := strings.CutPrefix(line, "# "+name+" = "); ok {
				value, _, _ = strings.Cut(v, " ")
			}
		}
		if *into, err = strconv.ParseInt(value, 10, 64); err != nil {
			return 0, 0, fmt.Errorf("heap profile: %s: %w", name, err)
		}
	}
	return heap, stacks, nil
}

// RSS is the daemon's resident set in bytes.
func (d *Daemon) RSS() (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no VmRSS", d.PID())
}

// FreeAddress is a loopback address that nobody listens on.
func FreeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// Scrape fetches the metrics page.
func (d *Daemon) Scrape(ctx context.Context) (string, error) {
	return get(ctx, "http://"+d.Metrics+"/v1/metrics", "")
}

// WriteMetadata makes and deletes so many leases, which are two small writes
// of the metadata database each, and tells how long each pair took, sorted.
func (d *Daemon) WriteMetadata(ctx context.Context, pairs int) ([]time.Duration, error) {
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "cnireload-test")
	took := make([]time.Duration, 0, pairs)
	for i := range pairs {
		// Both requests begin with the lease's name as field 1, and nothing
		// else is needed of them: on the wire that is a StringValue.
		name := wrapperspb.String(fmt.Sprintf("l-%d-%d", time.Now().UnixNano(), i))
		begin := time.Now()
		for _, method := range []string{"Create", "Delete"} {
			if err := d.conn.Invoke(ctx, "/containerd.services.leases.v1.Leases/"+method, name, new(emptypb.Empty)); err != nil {
				return nil, fmt.Errorf("lease %s: %w", method, err)
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return took, nil
}

// CreateLease makes a lease in CRI's namespace that stays until it is deleted.
func (d *Daemon) CreateLease(ctx context.Context, name string) error {
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
	// See WriteMetadata.
	return d.conn.Invoke(ctx, "/containerd.services.leases.v1.Leases/Create", wrapperspb.String(name), new(emptypb.Empty))
}
