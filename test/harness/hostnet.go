// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
)

const forwardPath = "/proc/sys/net/ipv4/ip_forward"

// HostNet is what real network plugins change on the machine: the ptp plugin
// makes interfaces and switches forwarding on.
type HostNet struct {
	Forward    string   `json:"forward"`
	Interfaces []string `json:"interfaces"`
}

// RecordHostNet notes how the machine is now in a file, so that a later run
// can undo what a killed one has left.
func RecordHostNet(path string) error {
	names, err := interfaceNames()
	if err != nil {
		return err
	}
	forward, err := os.ReadFile(forwardPath)
	if err != nil {
		return err
	}
	b, err := json.Marshal(HostNet{strings.TrimSpace(string(forward)), names})
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// RestoreHostNet switches forwarding off again if it was off, unless somebody
// else has made interfaces since and may count on it.
func RestoreHostNet(path string) error {
	b, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var was HostNet
	if err := json.Unmarshal(b, &was); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	now, err := interfaceNames()
	if err != nil {
		return err
	}
	others := slices.ContainsFunc(now, func(name string) bool { return !slices.Contains(was.Interfaces, name) })
	if was.Forward != "0" || others {
		return nil
	}
	return os.WriteFile(forwardPath, []byte("0\n"), 0o644)
}

func interfaceNames() ([]string, error) {
	all, err := net.Interfaces()
	var names []string
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names, err
}

// InterfacesIn lists the machine's interfaces with an address in the CIDR.
func InterfacesIn(cidr netip.Prefix) ([]string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue // gone meanwhile
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Overlaps(cidr) {
				found = append(found, i.Name+" "+a.String())
			}
		}
	}
	return found, nil
}

// FreeCIDR picks a pod CIDR that no interface of the machine uses.
func FreeCIDR() (netip.Prefix, error) {
	for third := 77; third < 110; third++ {
		cidr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 88, byte(third), 0}), 24)
		used, err := InterfacesIn(cidr)
		if err != nil {
			return cidr, err
		}
		if len(used) == 0 {
			return cidr, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("no free pod CIDR in 10.88.77.0/24 to 10.88.109.0/24: remove interfaces that use them")
}
