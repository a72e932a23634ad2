// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plugin deals with one CNI plugin: it finds the executable, runs it
// within a bound, asks it VERSION and STATUS, and keeps track of its processes
// and of those that an earlier program left behind. It knows nothing of networks,
// nor of which lists are in use.
//
// It promises that a call ends by the bound of its verb, even if the process
// cannot be killed; that at the bound the whole process group is killed; that a
// plugin that ended well has succeeded, whoever still holds its output; and that
// a bounded part of what a plugin prints is kept.
//
// [Exec], [Processes] and [Calls] can be used concurrently; their locks are never
// held while a plugin runs or a file is read. A [Prober] belongs to one goroutine.
//
// It never kills a process that it has neither started nor found to be a plugin
// without a runtime, and never decides what an answer means for a node.
package plugin
