// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command pause is the only file of the test sandbox image: it does nothing
// until it is told to end.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	<-end
}
