// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cnireload/cnireload/test/fake"
	"github.com/cnireload/cnireload/test/harness"
)

// stormPods are the pods that the fault plugin wrongs.
const stormPods = "p*"

// alonePods begins the names of those whose writes are counted before the storm.
const alonePods = "p-alone-"

// scenario is one thing that goes wrong, and how it is mended.
type scenario struct {
	name string
	// rules are the fault plugin's behaviour during the storm.
	rules []fake.Rule
	// gate has the list need a file of an agent that is away.
	gate bool
	// touch writes a file that means nothing into the conf dir every second.
	touch bool
	// churn has pods that run be removed and run again during the storm.
	churn bool
	// attempts are counted on their own: each fails at once.
	failsFast bool
}

func scenarios(flood int) []scenario {
	fail := fake.Behavior{Mode: fake.Fail, Code: 999, Msg: "the agent is away", Pod: stormPods}
	hang := fake.Behavior{Mode: fake.Hang, Pod: stormPods}
	print := fake.Behavior{Mode: fake.Flood, Bytes: flood, Exit: 1, Pod: stormPods}
	add := func(b fake.Behavior) fake.Rule { return fake.Rule{Verb: "ADD", Behavior: b} }
	del := func(b fake.Behavior) fake.Rule { return fake.Rule{Verb: "DEL", Behavior: b} }
	of := func(pods string, b fake.Behavior) fake.Behavior { b.Pod = pods; return b }
	return []scenario{
		{name: "gate", gate: true, failsFast: true},
		{name: "fail", rules: []fake.Rule{add(fail)}, failsFast: true},
		{name: "hang", rules: []fake.Rule{add(hang)}, touch: true},
		{name: "flood", rules: []fake.Rule{add(print)}},
		{name: "del-hang", rules: []fake.Rule{del(hang)}, touch: true, churn: true},
		{name: "mixed", touch: true, churn: true, rules: []fake.Rule{
			add(of("p*[048]", fail)),
			add(of("p*[159]", hang)), del(of("p*[159]", hang)),
			add(of("p*[26]", print)),
			del(of("p*[37]", hang)),
		}},
	}
}

// network is the name of the list, and of host-local's folder.
func (s scenario) network() string {
	if s.gate {
		return "k8s-pod-network"
	}
	return "storm"
}

// install lays out plugins and list. The fault plugin is last in the list, so
// that ptp and host-local have done their work when it fails.
func (s scenario) install(d *harness.Daemon) error {
	list := `{"cniVersion": "1.0.0", "name": "storm", "plugins": [
  {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.177.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "fault"}
]}
`
	if s.gate {
		nodename, err := d.InstallCalico()
		if err != nil {
			return err
		}
		list = harness.CalicoList(nodename)
	}
	for _, name := range []string{"ptp", "host-local"} {
		src, err := harness.Plugin(name)
		if err != nil {
			return err
		}
		if err := harness.Install(src, filepath.Join(d.BinDirs[0], name)); err != nil {
			return err
		}
	}
	return errors.Join(
		d.InstallFake("fault", "loopback"),
		os.WriteFile(filepath.Join(d.ConfDir, "10-storm.conflist"), []byte(list), 0o644),
		s.heal(d)) // all is well at first
}

// agentFile is the file that calico's agent writes, and stormFile the one of a
// list that the agent has not seen: a gate that was open stays open.
func agentFile(d *harness.Daemon) string { return filepath.Join(d.Base, "calico", "nodename") }
func stormFile(d *harness.Daemon) string { return agentFile(d) + "-storm" }

// hurt begins what goes wrong.
func (s scenario) hurt(d *harness.Daemon) error {
	if !s.gate {
		return d.Fake.Set("fault", fake.State{Rules: s.rules})
	}
	if err := os.Remove(stormFile(d)); err != nil {
		return err
	}
	path := filepath.Join(d.ConfDir, "10-storm.conflist")
	if err := os.WriteFile(path+".tmp", []byte(harness.CalicoList(stormFile(d))), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// tried is how many of the pods that are to fail have come as far as the fault
// plugin.
func (s scenario) tried(d *harness.Daemon) int {
	calls, err := d.Fake.Calls()
	if err != nil {
		return 0
	}
	pods := make(map[string]bool)
	for _, c := range calls {
		if match, _ := path.Match(stormPods, c.Pod); match && c.Plugin == "fault" && c.Command == "ADD" && !strings.HasPrefix(c.Pod, alonePods) {
			pods[c.Pod] = true
		}
	}
	return len(pods)
}

// ending is how many of the pods have something to end by before the storm can
// be measured: where pods are to be removed, all whose ADD does not hang run or
// have failed once, because that they start is no part of the storm.
func (s scenario) ending(pods int) (count int) {
	if !s.churn {
		return 0
	}
	for i := range pods {
		hangs := slices.ContainsFunc(s.rules, func(r fake.Rule) bool {
			match, _ := path.Match(r.Pod, podName(i))
			return match && r.Verb == "ADD" && r.Mode == fake.Hang
		})
		if !hangs {
			count++
		}
	}
	return count
}

// heal mends it.
func (s scenario) heal(d *harness.Daemon) error {
	if s.gate {
		return errors.Join(os.WriteFile(agentFile(d), []byte("here"), 0o644), os.WriteFile(stormFile(d), []byte("here"), 0o644))
	}
	return d.Fake.Set("fault", fake.State{})
}

// leaked counts the addresses that host-local holds for the list.
func (s scenario) leaked(d *harness.Daemon) (int, error) {
	held, err := d.HostLocal(s.network())
	return len(held), err
}
