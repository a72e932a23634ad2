// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// Run is what was seen of a node while it started its pods. Times are seconds
// since its begin.
type Run struct {
	Side  Side      `json:"side"`
	Pods  int       `json:"pods"`
	Host  int       `json:"host"`
	Began time.Time `json:"began"`
	// File is when the file appeared that the network waited for.
	File float64 `json:"file"`
	// End is when all pods ran.
	End float64 `json:"end"`

	Status   []StatusSample `json:"status"`
	Metadata []Latency      `json:"metadata"`
	Count    []PodCount     `json:"count"`
	// Failed are kubelet's events of sandboxes that failed, Adds and Dels the
	// runs of the plugin.
	Failed []float64 `json:"failed"`
	Adds   []float64 `json:"adds"`
	Dels   []float64 `json:"dels"`
}

// StatusSample is one CRI Status.
type StatusSample struct {
	At    float64 `json:"at"`
	Took  float64 `json:"took"`
	Ready bool    `json:"ready"`
	Error string  `json:"error,omitempty"`
	// Gate is "open" or "closed" on the side that has gates.
	Gate    string `json:"gate,omitempty"`
	Message string `json:"message,omitempty"`
}

// Latency is how long one small write of the metadata took.
type Latency struct {
	At   float64 `json:"at"`
	Took float64 `json:"took"`
}

// PodCount is how many pods ran.
type PodCount struct {
	At   float64 `json:"at"`
	Pods int     `json:"pods"`
	Host int     `json:"host"`
}

// Recorder samples a node until it is stopped.
type Recorder struct {
	Run
	n       *Node
	isHost  func(name string) bool
	mu      sync.Mutex
	stop    context.CancelFunc
	stopped sync.WaitGroup
}

// Record begins to sample. Each kind of sample has its own pace, so that one
// that hangs does not keep the others.
func (n *Node) Record(ctx context.Context, pods []StaticPod) *Recorder {
	host := map[string]bool{}
	for _, p := range pods {
		host[p.Name] = p.HostNetwork
	}
	r := &Recorder{n: n, isHost: func(name string) bool { return host[name] }}
	r.Side, r.Began = n.Side, time.Now()
	for _, p := range pods {
		if p.HostNetwork {
			r.Host++
		} else {
			r.Pods++
		}
	}
	ctx, r.stop = context.WithCancel(ctx)
	every := func(pause time.Duration, sample func()) {
		r.stopped.Go(func() {
			for ctx.Err() == nil {
				sample()
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	every(200*time.Millisecond, func() {
		s := StatusSample{At: r.Since(time.Now())}
		begin := time.Now()
		c, info, err := n.Info(ctx)
		s.Took, s.Ready, s.Message = time.Since(begin).Seconds(), c.Ready, c.Message
		if err != nil {
			s.Error = err.Error()
		} else if report, err := ReportFrom(info, ""); err == nil && len(report.Gates) > 0 {
			s.Gate = "open"
			if !report.Gates[0].Open {
				s.Gate = "closed"
			}
		}
		if ctx.Err() == nil {
			r.add(func() { r.Run.Status = append(r.Run.Status, s) })
		}
	})
	every(100*time.Millisecond, func() {
		at := r.Since(time.Now())
		if took, err := n.WriteMetadata(ctx, 1); err == nil {
			r.add(func() { r.Metadata = append(r.Metadata, Latency{at, took[0].Seconds()}) })
		}
	})
	every(250*time.Millisecond, func() {
		at := r.Since(time.Now())
		running, err := n.Running(ctx)
		if err != nil {
			return
		}
		c := PodCount{At: at}
		for name := range running {
			if r.isHost(name) {
				c.Host++
			} else {
				c.Pods++
			}
		}
		r.add(func() { r.Count = append(r.Count, c) })
	})
	return r
}

func (r *Recorder) add(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do()
}

// Since is a time in seconds since the begin.
func (r *Recorder) Since(t time.Time) float64 { return t.Sub(r.Began).Seconds() }

// Counted is the latest count.
func (r *Recorder) Counted() PodCount {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.Count) == 0 {
		return PodCount{}
	}
	return r.Count[len(r.Count)-1]
}

// Finish stops sampling and reads what kubelet and the plugin wrote.
func (r *Recorder) Finish(plugin string) (*Run, error) {
	r.stop()
	r.stopped.Wait()
	r.End = r.Since(time.Now())
	for _, c := range r.Count {
		if c.Pods == r.Pods && c.Host == r.Host {
			r.End = c.At
			break
		}
	}
	failed, err := r.n.Events("FailedCreatePodSandBox")
	if err != nil {
		return nil, err
	}
	for _, t := range failed {
		r.Failed = append(r.Failed, r.Since(t))
	}
	calls, err := r.n.Fake.Calls()
	if err != nil {
		return nil, err
	}
	for _, c := range calls {
		if c.Plugin != plugin {
			continue
		}
		switch c.Command {
		case "ADD":
			r.Adds = append(r.Adds, r.Since(c.Time))
		case "DEL":
			r.Dels = append(r.Dels, r.Since(c.Time))
		}
	}
	return &r.Run, nil
}

// Quantiles are the median, the 99th percentile and the largest of the metadata
// latencies between two times.
func (r *Run) Quantiles(from, to float64) (p50, p99, most time.Duration) {
	var took []float64
	for _, m := range r.Metadata {
		if m.At >= from && m.At < to {
			took = append(took, m.Took)
		}
	}
	if len(took) == 0 {
		return 0, 0, 0
	}
	slices.Sort(took)
	d := func(i int) time.Duration { return time.Duration(took[i] * float64(time.Second)) }
	return d(len(took) / 2), d(len(took) * 99 / 100), d(len(took) - 1)
}

// Save writes a run for cmd/timeline.
func (r *Run) Save(path string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// LoadRun reads one.
func LoadRun(path string) (*Run, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Run
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &r, nil
}
