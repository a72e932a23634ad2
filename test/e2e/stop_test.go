// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// nriPlugin notes what it is told, such as "pod a", "stop a", "remove a".
type nriPlugin struct {
	mu   sync.Mutex
	told []string
}

func (p *nriPlugin) note(what ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = append(p.told, what...)
}

func (p *nriPlugin) knows(what string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.told, what) {
		return fmt.Errorf("the NRI plugin was not told %q but %q", what, p.told)
	}
	return nil
}

func (p *nriPlugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	p.note("synchronized")
	for _, pod := range pods {
		p.note("pod " + pod.GetName())
	}
	for _, container := range containers {
		p.note("container " + container.GetName())
	}
	return nil, nil
}

func (p *nriPlugin) StopContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) ([]*api.ContainerUpdate, error) {
	p.note("stop container " + container.GetName())
	return nil, nil
}

func (p *nriPlugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) error {
	p.note("remove container " + container.GetName())
	return nil
}

func (p *nriPlugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.note("stop " + pod.GetName())
	return nil
}

func (p *nriPlugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.note("remove " + pod.GetName())
	return nil
}

// connectNRI connects a plugin to the daemon and does not wait for it to be
// synchronized.
func (n *node) connectNRI() *nriPlugin {
	n.t.Helper()
	p := &nriPlugin{}
	s, err := stub.New(p, stub.WithPluginName("test"), stub.WithPluginIdx("10"), stub.WithSocketPath(n.NRISocket()),
		stub.WithOnClose(func() {}))
	assert.NilError(n.t, err)
	assert.NilError(n.t, s.Start(n.t.Context()))
	n.t.Cleanup(s.Stop)
	return p
}

// begun waits until the fake plugin has been called with a verb for a pod.
func (n *node) begun(verb, pod string) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), 30*time.Second, func() error {
		calls, err := n.Fake.Calls()
		if err == nil && !slices.ContainsFunc(calls, func(c fake.Call) bool { return c.Pod == pod && c.Command == verb }) {
			err = fmt.Errorf("%s of pod %s has not begun", verb, pod)
		}
		return err
	}))
}

// within waits until so many goroutines of the daemon are in a function.
func (n *node) within(function string, enough func(int) bool) {
	n.t.Helper()
	assert.NilError(n.t, harness.Poll(n.t.Context(), 30*time.Second, func() error {
		_, inside, err := n.Goroutines(n.t.Context(), function)
		if err == nil && !enough(inside) {
			err = fmt.Errorf("%d goroutines in %s", inside, function)
		}
		return err
	}))
}

func (n *node) stopPod(id string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	_, err := n.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func (n *node) removePod(id string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	_, err := n.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// run runs a pod that must work and returns its id.
func (n *node) run(p harness.Pod) string {
	n.t.Helper()
	id, err := n.RunPod(n.t.Context(), p)
	assert.NilError(n.t, err)
	return id
}

// One DEL that hangs, and an NRI plugin that connects meanwhile.
func TestL6(t *testing.T) {
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		o := harness.Options{Side: side, NRI: true}
		if side == harness.Patched {
			o.Timeouts = map[string]string{"io.containerd.timeout.cri.cni.del": "20s"}
		}
		n := prepare(t, o)
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		a, b := n.run(harness.Pod{Name: "a"}), n.run(harness.Pod{Name: "b"})
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"DEL": {Mode: fake.Hang, Pod: "a"}}}))

		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stopped := make(chan error, 1)
		go func() {
			_, err := n.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: a})
			stopped <- err
		}()
		n.begun("DEL", "a")
		plugin := n.connectNRI()

		if side == harness.Stock {
			n.within("requestPluginSync", func(i int) bool { return i == 1 })
			err := n.stopPod(b, 3*time.Second)
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			n.untidy = true
			return "StopPodSandbox of another pod: DeadlineExceeded while the DEL hangs"
		}

		assert.NilError(t, harness.Poll(t.Context(), 30*time.Second, func() error { return plugin.knows("synchronized") }))
		begin := time.Now()
		assert.NilError(t, n.stopPod(b, 20*time.Second))
		took := time.Since(begin)
		select {
		case err := <-stopped:
			t.Fatalf("the hanging DEL has ended: %v", err)
		default:
		}
		// What the plugin was told fits together: it saw both pods and then the
		// end of each.
		for _, what := range []string{"pod a", "pod b", "stop b"} {
			assert.NilError(t, plugin.knows(what))
		}
		cancel()
		<-stopped
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{}))
		// The next try joins the DEL that still hangs, until its bound.
		assert.NilError(t, harness.Poll(t.Context(), time.Minute, func() error { return n.removePod(a, time.Minute) }))
		assert.NilError(t, n.RemovePod(t.Context(), b))
		for _, what := range []string{"remove a", "remove b"} {
			assert.NilError(t, plugin.knows(what))
		}
		assert.Equal(t, n.leases(), 0)
		return fmt.Sprintf("StopPodSandbox of another pod took %s, the plugin was told all", short(took))
	})
}

// An NRI plugin that connects during RemovePodSandbox of a pod that has a
// container.
func TestNRIPluginDuringRemove(t *testing.T) {
	sides(t, "", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NRI: true})
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		pod := harness.Pod{Name: "a"}
		id := n.run(pod)
		n.container(id, pod)
		assert.NilError(t, n.Fake.Set("fakenet", fake.State{Verbs: map[string]fake.Behavior{"DEL": {Mode: fake.Slow, Millis: 4000, Pod: "a"}}}))

		removed := make(chan error, 1)
		go func() { removed <- n.removePod(id, 40*time.Second) }()
		n.begun("DEL", "a")
		plugin := n.connectNRI()
		if side == harness.Stock {
			n.within("requestPluginSync", func(i int) bool { return i == 1 })
			// The DEL ends and the container is to be removed: a reader waits for
			// a writer that waits for this reader.
			n.within("RemoveContainer", func(i int) bool { return i == 1 })
			err := n.stopPod(id, 3*time.Second)
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			n.untidy = true
			assert.NilError(t, n.Kill())
			return "a deadlock: nothing of any pod works until the daemon is restarted"
		}
		assert.NilError(t, <-removed)
		assert.NilError(t, plugin.knows("remove a"))
		return "removed"
	})
}

// container creates a container in a pod, with the name "c".
func (n *node) container(sandbox string, pod harness.Pod) (id string) {
	n.t.Helper()
	r, err := n.Runtime.CreateContainer(n.t.Context(), &runtimeapi.CreateContainerRequest{
		PodSandboxId:  sandbox,
		SandboxConfig: n.SandboxConfig(pod),
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "c"},
			Image:    &runtimeapi.ImageSpec{Image: harness.SandboxImage},
			LogPath:  "c.log",
			Linux:    &runtimeapi.LinuxContainerConfig{},
		},
	})
	assert.NilError(n.t, err)
	return r.GetContainerId()
}

// An NRI plugin connects while a container has its time to stop, or does not
// die when it is killed.
// https://github.com/containerd/containerd/issues/14083
func TestNRIPluginDuringStopContainer(t *testing.T) {
	sides(t, "containerd#14083", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, NRI: true})
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		pod := harness.Pod{Name: "a"}
		a, b := n.run(pod), n.run(harness.Pod{Name: "b"})
		c := n.container(a, pod)
		_, err := n.Runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c})
		assert.NilError(t, err)
		pid, err := n.ContainerPID(t.Context(), c)
		assert.NilError(t, err)
		// It does not get to handle SIGTERM.
		assert.NilError(t, unix.Kill(pid, unix.SIGSTOP))

		stopped := make(chan error, 1)
		go func() {
			_, err := n.Runtime.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: c, Timeout: 600})
			stopped <- err
		}()
		n.within("waitContainerStop", func(i int) bool { return i == 1 })
		plugin := n.connectNRI()
		if side == harness.Stock {
			n.within("requestPluginSync", func(i int) bool { return i == 1 })
			err := n.stopPod(b, 3*time.Second)
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			assert.NilError(t, unix.Kill(pid, unix.SIGCONT))
			assert.NilError(t, <-stopped)
			return "StopPodSandbox of another pod: DeadlineExceeded until the container has stopped"
		}

		assert.NilError(t, harness.Poll(t.Context(), 30*time.Second, func() error { return plugin.knows("synchronized") }))
		begin := time.Now()
		assert.NilError(t, n.stopPod(b, 20*time.Second))
		took := time.Since(begin)
		n.run(harness.Pod{Name: "d"})
		select {
		case err := <-stopped:
			t.Fatalf("the container has stopped: %v", err)
		default:
		}
		for _, what := range []string{"pod a", "container c", "stop b"} {
			assert.NilError(t, plugin.knows(what))
		}
		assert.NilError(t, unix.Kill(pid, unix.SIGCONT))
		assert.NilError(t, <-stopped)
		// It is told of the end of what it was shown, once, by the time the call returns.
		assert.NilError(t, plugin.knows("stop container c"))
		assert.NilError(t, n.removePod(a, time.Minute))
		for _, what := range []string{"remove container c", "remove a"} {
			assert.NilError(t, plugin.knows(what))
		}
		plugin.mu.Lock()
		defer plugin.mu.Unlock()
		count := 0
		for _, what := range plugin.told {
			if what == "stop container c" {
				count++
			}
		}
		assert.Equal(t, count, 1, "%q", plugin.told)
		return fmt.Sprintf("StopPodSandbox of another pod took %s, the plugin was told all", short(took))
	})
}

// brokenRunc is a runc whose commands fail or wait while a file says so.
func (n *node) brokenRunc() (path string) {
	n.t.Helper()
	runc, err := harness.Runc()
	assert.NilError(n.t, err)
	script := "#!/bin/sh\nfor arg; do\n  [ ! -e '" + n.Base + "/runc-fails-'\"$arg\" ] || { echo \"broken $arg\" >&2; exit 1; }\n" +
		"  [ ! -e '" + n.Base + "/runc-waits-'\"$arg\" ] || { : >'" + n.Base + "/runc-reached-'\"$arg\"; sleep 2; }\ndone\nexec '" + runc + "' \"$@\"\n"
	path = filepath.Join(n.Base, "runc")
	assert.NilError(n.t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// A sandbox's start fails after ADD, and so does the shim's clean-up.
// https://github.com/containerd/containerd/pull/13563
// https://github.com/containerd/containerd/issues/13609
func TestL14(t *testing.T) {
	sides(t, "containerd#13563, #13609", func(t *testing.T, side harness.Side) string {
		base, err := os.MkdirTemp("", harness.Prefix)
		assert.NilError(t, err)
		n := prepare(t, harness.Options{Side: side, Base: base, Runc: filepath.Join(base, "runc")})
		n.brokenRunc()
		for _, verb := range []string{"start", "delete"} {
			touch(t, filepath.Join(n.Base, "runc-fails-"+verb))
		}
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)

		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "broken start"))
		netns, err := os.ReadDir(n.NetNSDir())
		assert.NilError(t, err)
		leases := n.leases()
		observed := fmt.Sprintf("%d DEL, %d netns and %d addresses left", n.calls("fakenet", "DEL"), len(netns), leases)
		if side == harness.Stock {
			assert.Equal(t, observed, "0 DEL, 1 netns and 1 addresses left")
			n.untidy = true
			return observed
		}
		assert.Equal(t, observed, "1 DEL, 0 netns and 0 addresses left")
		// What could not be cleaned up is listed, its name is taken.
		pods, err := n.Runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		assert.NilError(t, err)
		assert.Equal(t, len(pods.GetItems()), 1)
		assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "a"}), "is reserved"))
		// It can be removed when the shim can be.
		for _, verb := range []string{"start", "delete"} {
			assert.NilError(t, os.Remove(filepath.Join(n.Base, "runc-fails-"+verb)))
		}
		assert.NilError(t, n.RemovePod(t.Context(), pods.GetItems()[0].GetId()))
		n.run(harness.Pod{Name: "a"})
		return observed + ", listed and removable"
	})
}

// Callers give up while metadata cannot be written.
func TestL13(t *testing.T) {
	sides(t, "(new)", func(t *testing.T, side harness.Side) string {
		n := prepare(t, harness.Options{Side: side, HoldMetadata: true})
		n.write(n.conf("10-a.conflist"), c10("a"))
		n.start()
		n.waitReady(true, soon)
		n.pod("before")
		release, err := n.HoldMetadata(t.Context())
		assert.NilError(t, err)
		defer func() { _ = release() }()
		before, err := n.MetadataWrites()
		assert.NilError(t, err)

		const callers = 12
		var calls []func()
		errs := make([]error, callers)
		for i := range callers {
			calls = append(calls, func() {
				if i%4 == 3 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					_, errs[i] = n.WriteMetadata(ctx, 1)
					return
				}
				_, errs[i] = n.RunPod(t.Context(), harness.Pod{Name: fmt.Sprintf("p%d", i), HostNetwork: i%2 == 0, Timeout: time.Second})
			})
		}
		parallel(calls...)()
		for _, err := range errs {
			// Whoever notices first words it.
			assert.Assert(t, status.Code(err) == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded), "%v", err)
		}

		const holder = 1
		if side == harness.Stock {
			n.within("metadata.(*DB).Update", func(i int) bool { return i == holder+callers })
			assert.Assert(t, cmp.Contains(n.refused(harness.Pod{Name: "p1", Timeout: time.Second}), "is reserved"))
		} else {
			n.within("metadata.(*DB).Update", func(i int) bool { return i == holder })
			_, err := n.RunPod(t.Context(), harness.Pod{Name: "p1", Timeout: time.Second})
			assert.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
			n.within("metadata.(*DB).Update", func(i int) bool { return i == holder })
		}
		assert.NilError(t, release())
		n.within("metadata.(*DB).Update", func(i int) bool { return i == 0 })
		if side == harness.Stock {
			var after uint64
			assert.NilError(t, harness.Poll(t.Context(), 30*time.Second, func() error {
				if after, err = n.MetadataWrites(); err == nil && after < before+callers {
					err = fmt.Errorf("%d writes", after-before)
				}
				return err
			}))
			n.untidy = true
			return fmt.Sprintf("%d of %d dead callers still in the queue, names reserved; at least %d writes when it goes on", callers, callers, callers)
		}
		after, err := n.MetadataWrites()
		assert.NilError(t, err)
		// A garbage collection may have waited as well.
		assert.Assert(t, after <= before+1, "%d writes", after-before)
		n.pod("p1")
		leases, err := n.MetadataLeases(t.Context())
		assert.NilError(t, err)
		assert.Assert(t, len(leases) <= 2, "leases %q", leases)
		return fmt.Sprintf("0 of %d dead callers still in the queue, names free, nothing of theirs written when it goes on", callers)
	})
}
