// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
)

const forwardPath = "/proc/sys/net/ipv4/ip_forward"

// HostNet is how the machine was before real network plugins changed it: ptp
// makes interfaces and switches forwarding on.
type HostNet struct {
	Forward    string       `json:"forward"`
	Interfaces []string     `json:"interfaces"`
	CIDR       netip.Prefix `json:"cidr"`
}

// NewHostNet notes how the machine is and picks a pod CIDR for the plugins.
func NewHostNet() (*HostNet, error) {
	names, err := interfaceNames()
	if err != nil {
		return nil, err
	}
	forward, err := os.ReadFile(forwardPath)
	if err != nil {
		return nil, err
	}
	cidr, err := freeCIDR()
	return &HostNet{strings.TrimSpace(string(forward)), names, cidr}, err
}

// Save writes the note, so that a later run can undo what a killed one left.
func (h *HostNet) Save(path string) error {
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// LoadHostNet reads a note; without one there is nothing to restore.
func LoadHostNet(path string) (*HostNet, error) {
	b, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var h HostNet
	if err := json.Unmarshal(b, &h); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &h, nil
}

// Restore is called when the pods are gone. It waits for their interfaces to
// go, which the kernel does a moment after their network namespaces, and
// switches forwarding off again if it was off, unless somebody else has made
// interfaces since and may count on it.
func (h *HostNet) Restore() error {
	if h == nil {
		return nil
	}
	err := Poll(context.Background(), 10*time.Second, func() error {
		left, err := InterfacesIn(h.CIDR)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left behind: interfaces %s", strings.Join(left, ", "))
		}
		return err
	})
	if err != nil || h.Forward != "0" {
		return err
	}
	now, err := interfaceNames()
	if err != nil || slices.ContainsFunc(now, func(name string) bool { return !slices.Contains(h.Interfaces, name) }) {
		return err
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

// freeCIDR picks a pod CIDR that no interface of the machine uses.
func freeCIDR() (netip.Prefix, error) {
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
