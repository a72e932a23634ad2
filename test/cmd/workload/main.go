// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command workload is what the containers of static pods run: it says who it is
// and where, in its log, until it is told to end.
package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	name, _ := os.Hostname()
	addresses, _ := net.InterfaceAddrs()
	fmt.Printf("%s started with addresses %v\n", name, addresses)
	for tick := time.NewTicker(10 * time.Second); ; {
		select {
		case s := <-end:
			fmt.Printf("%s ends: %v\n", name, s)
			return
		case now := <-tick.C:
			fmt.Printf("%s runs at %s\n", name, now.UTC().Format(time.TimeOnly))
		}
	}
}
