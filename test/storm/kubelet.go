// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/harness"
)

// The times of a kubelet and of containerd, before they are divided by -scale.
const (
	// A pod whose sandbox failed is tried again after so long, and up to half
	// as long again.
	retryAfter = 10 * time.Second
	// runtimeRequestTimeout, which is doubled for RunPodSandbox.
	runDeadline  = 4 * time.Minute
	stopDeadline = 2 * time.Minute
	// containerd's bounds: their defaults.
	addBound     = 2 * time.Minute
	delBound     = 30 * time.Second
	cleanupBound = time.Minute
	readyWait    = 30 * time.Second
)

// kubelet runs pods as a kubelet does: each by itself, over and over until it
// runs. What a failed attempt has left listed is stopped and removed before the
// next one, whose number is one more; if nothing is listed, the attempt has the
// same name as the one before.
type kubelet struct {
	d      *harness.Daemon
	client runtimeapi.RuntimeServiceClient
	scale  time.Duration
	churn  bool

	healed  chan struct{} // closed when all is well again
	pods    sync.WaitGroup
	mu      sync.Mutex
	running map[string]time.Time // by pod, since when
	fails   map[string]int       // by kind
	once    map[string]bool      // pods of which an attempt has ended
}

func (k *kubelet) isHealed() bool {
	select {
	case <-k.healed:
		return true
	default:
		return false
	}
}

// start runs so many pods.
func (k *kubelet) start(ctx context.Context, pods int) {
	for i := range pods {
		k.pods.Go(func() { k.pod(ctx, podName(i)) })
	}
}

func podName(i int) string { return fmt.Sprintf("p%d", i) }

func (k *kubelet) pod(ctx context.Context, name string) {
	for ctx.Err() == nil {
		// What there is of it is what the kubelet goes by.
		attempt := uint32(0)
		for id, a := range k.listed(ctx, name) {
			attempt = max(attempt, a+1)
			if err := k.remove(ctx, id); err != nil {
				k.count("remove: " + kind(err))
				k.pause(ctx)
			}
		}
		id, err := k.run(ctx, name, attempt)
		k.mu.Lock()
		k.once[name] = true
		k.mu.Unlock()
		if err != nil {
			k.count(kind(err))
			k.pause(ctx)
			continue
		}
		if !k.churn || k.isHealed() {
			k.mu.Lock()
			k.running[name] = time.Now()
			k.mu.Unlock()
			return
		}
		// Its work is done, another takes its place.
		wait(ctx, time.Second)
		for ctx.Err() == nil {
			err := k.remove(ctx, id)
			if err == nil {
				break
			}
			k.count("remove: " + kind(err))
			k.pause(ctx)
		}
	}
}

func (k *kubelet) run(ctx context.Context, name string, attempt uint32) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, runDeadline/k.scale)
	defer cancel()
	r, err := k.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: k.d.SandboxConfig(harness.Pod{Name: name, Attempt: attempt})})
	return r.GetPodSandboxId(), err
}

func (k *kubelet) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, stopDeadline/k.scale)
	defer cancel()
	if _, err := k.client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return err
	}
	_, err := k.client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// listed are the sandboxes of a pod and the numbers of their attempts.
func (k *kubelet) listed(ctx context.Context, name string) map[string]uint32 {
	ctx, cancel := context.WithTimeout(ctx, stopDeadline/k.scale)
	defer cancel()
	r, err := k.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil
	}
	found := map[string]uint32{}
	for _, p := range r.GetItems() {
		if p.GetMetadata().GetName() == name {
			found[p.GetId()] = p.GetMetadata().GetAttempt()
		}
	}
	return found
}

func (k *kubelet) pause(ctx context.Context) {
	base := retryAfter / k.scale
	wait(ctx, base+rand.N(base/2))
}

func (k *kubelet) count(what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fails[what]++
}

// failed returns how many attempts have failed, by kind, and forgets them.
func (k *kubelet) failed() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	fails := k.fails
	k.fails = map[string]int{}
	return fails
}

// state is how many pods run, and how many attempts have failed.
func (k *kubelet) state() (running, failed int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.running), sum(k.fails)
}

// tried is how many pods have run, or failed, once.
func (k *kubelet) tried() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.once)
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// removeAll removes every pod, a few at a time, until none is listed.
func (k *kubelet) removeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		r, err := k.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		if err != nil {
			return err
		}
		if len(r.GetItems()) == 0 {
			return nil
		}
		ids := make(chan string)
		var group sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			group.Go(func() {
				for id := range ids {
					errs[i] = errors.Join(errs[i], k.remove(ctx, id))
				}
			})
		}
		for _, p := range r.GetItems() {
			ids <- p.GetId()
		}
		close(ids)
		group.Wait()
		if err := errors.Join(errs...); err != nil {
			if ctx.Err() != nil {
				return err
			}
			wait(ctx, time.Second)
		}
	}
}

// kind sorts errors.
func kind(err error) string {
	text := err.Error()
	// An error may quote another.
	for _, k := range []struct{ part, kind string }{
		{"is reserved", "name reserved"},
		{"cni plugin not initialized", "not ready"},
		{"held back because", "held back"},
		{"did not finish within", "bound"},
		{"DeadlineExceeded", "deadline"},
		{"deadline exceeded", "deadline"},
		{"the agent is away", "plugin failed"},
		{"calico/node container", "plugin failed"},
		{"error parsing its diagnosti", "plugin flooded"},
		{"Unavailable", "connection broken"},
		{"ResourceExhausted", "connection broken"},
	} {
		if strings.Contains(text, k.part) {
			return k.kind
		}
	}
	if len(text) > 200 {
		text = text[:100] + "..." + text[len(text)-100:]
	}
	return text
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
