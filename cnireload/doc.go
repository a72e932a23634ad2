// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cnireload loads CNI networks from a directory, keeps them in step
// with the disk, knows whether they can be used, and runs their plugins with
// a bound on every call.
//
// It takes the place of [github.com/containerd/go-cni] in containerd's CRI
// service: [Network] has the method set of go-cni's CNI interface, chooses the
// same lists, makes the same plugin calls and returns the same results. What
// differs is what happens when something is wrong:
//
//   - State is an immutable [Snapshot] behind an atomic pointer. No lock is held
//     while a plugin runs or a file is read, so [Network.Status] never waits.
//   - A network is ready only once each of its plugins is there, can be executed
//     and speaks the list's version. The error of Status names the first cause.
//   - A bad file is skipped and named; a file in use that turns bad keeps its
//     last good content in use.
//   - A lost watch is a state that is shown and mended, never an error that ends
//     the caller.
//   - A plugin that hangs, floods or leaves children behind costs a bounded time
//     and a bounded amount of memory.
//
// # Use
//
//	n, err := cnireload.New(
//		cnireload.WithPluginConfDir("/etc/cni/net.d"),
//		cnireload.WithPluginDir([]string{"/opt/cni/bin"}),
//		cnireload.WithLoNetwork,
//		cnireload.WithDefaultConf,
//		cnireload.WithMinNetworkCount(2))
//	if err != nil {
//		return err
//	}
//	n.Start() // loads, then follows the disk until Close
//	defer n.Close()
//	if err := n.Status(); err != nil {
//		log.Print(err) // cni plugin not initialized: network "pods" in ...: plugin "portmap" not found in /opt/cni/bin
//	}
//
// # When not to use it
//
// A program that loads a fixed list from bytes and runs it once is better
// served by libcni or go-cni.
package cnireload
