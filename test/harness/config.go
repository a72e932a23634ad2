// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Handler is a runtime handler with a CNI conf dir of its own.
type Handler struct {
	ConfDir string
	// MaxConfNum is not set when it is nil.
	MaxConfNum *int
}

// Options describe one private containerd. Zero values mean containerd's own
// defaults, and folders under the daemon's base folder.
type Options struct {
	Side Side
	// Base is the folder everything lives in; empty makes a temporary one.
	Base string

	BinDirs          []string
	ConfDir          string
	Template         string
	MaxConfNum       int
	InternalLoopback bool
	// CNI holds more lines for the cni section, such as `readiness = "parse"`.
	CNI      []string
	Handlers map[string]Handler
	// ReadyWait is how long pods of the patched side wait for their network.
	// Empty means not at all: a test that expects a refusal wants it promptly.
	ReadyWait string
	// Metrics is the address that metrics are served on; empty means nowhere.
	Metrics string
	// Timeouts are entries of [timeouts], such as
	// "io.containerd.timeout.cri.cni.add": "5s".
	Timeouts map[string]string

	// Runc replaces runc; the real one is what Runc tells.
	Runc string
	// NRI lets NRI plugins connect to NRISocket.
	NRI bool
	// HoldMetadata prepares for Daemon.HoldMetadata.
	HoldMetadata bool
	// RegistryDir has a hosts.toml for each registry that must be looked for
	// elsewhere; empty means no mirrors.
	RegistryDir string
	// AppArmor leaves profiles on where the machine has them.
	AppArmor bool

	// Mounts are argument lists of mount(8), run in the daemon's namespace
	// before it starts.
	Mounts [][]string
	// Private gives the daemon folders of its own in the place of /run, /var/lib and
	// /opt, for lists whose paths are compiled into their plugins. Inside is where
	// they are.
	Private bool
	// PrivateNet gives the daemon a network of its own, for plugins that
	// change the one they run in.
	PrivateNet bool
	// UserSysctls are names and values under /proc/sys/user. The daemon then
	// runs in a user namespace of its own, where they bind nobody else, with
	// the first 65536 users mapped to themselves.
	UserSysctls map[string]string
	// Wrap is a program with arguments that becomes the daemon, see SlowSync.
	Wrap []string
	// NoImage leaves the sandbox image out, for tests that look at CNI only:
	// a pod then fails, but after its ADD and with NoImage in the error.
	NoImage bool
	// Detached lets the daemon outlive the program that started it.
	Detached bool
	// LogLevel is containerd's; empty means info.
	LogLevel string
}

// config renders containerd's configuration, version 4.
func (d *Daemon) config() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	quote := func(s string) string { return "'" + s + "'" }
	quoteAll := func(in []string) string {
		out := make([]string, len(in))
		for i, s := range in {
			out[i] = quote(s)
		}
		return "[" + strings.Join(out, ", ") + "]"
	}
	const runtime = "plugins.'io.containerd.cri.v1.runtime'"
	o := d.Options

	line("version = 4")
	line("root = %s", quote(d.path("root")))
	line("state = %s", quote(d.State))
	line("imports = []")
	line("[debug]\n  level = %s", quote(o.LogLevel))
	if o.NoImage {
		// Nobody listens there: the image is missing at once, without a look
		// at any network.
		line("[plugins.'io.containerd.cri.v1.images'.pinned_images]\n  sandbox = %s", quote(NoImage))
	}
	line("[%s]", runtime)
	// The first two are not available on every test machine; the third keeps
	// network namespaces out of the machine's own folder.
	line("  restrict_oom_score_adj = true\n  disable_apparmor = %t\n  netns_mounts_under_state_dir = true", !o.AppArmor)
	line("  enable_unprivileged_ports = false\n  enable_unprivileged_icmp = false")
	line("  cdi_spec_dirs = []")
	line("[%s.cni]", runtime)
	line("  bin_dirs = %s", quoteAll(o.BinDirs))
	line("  conf_dir = %s", quote(o.ConfDir))
	if o.Template != "" {
		line("  conf_template = %s", quote(o.Template))
	}
	if o.MaxConfNum != 0 {
		line("  max_conf_num = %d", o.MaxConfNum)
	}
	line("  use_internal_loopback = %t", o.InternalLoopback)
	if o.Side == Patched {
		// Stock does not know the key.
		line("  ready_wait = %s", quote(cmp.Or(o.ReadyWait, "0s")))
	}
	for _, l := range o.CNI {
		line("  %s", l)
	}
	handlers := map[string]Handler{"runc": {}}
	maps.Copy(handlers, o.Handlers)
	for _, name := range slices.Sorted(maps.Keys(handlers)) {
		h := handlers[name]
		section := runtime + ".containerd.runtimes." + name
		line("[%s]\n  runtime_type = 'io.containerd.runc.v2'", section)
		if h.ConfDir != "" {
			line("  cni_conf_dir = %s", quote(h.ConfDir))
		}
		if h.MaxConfNum != nil {
			line("  cni_max_conf_num = %d", *h.MaxConfNum)
		}
		line("[%s.options]\n  BinaryName = %s\n  Root = %s", section, quote(d.runc), quote(filepath.Join(d.State, "runc")))
	}
	if o.RegistryDir != "" {
		line("[plugins.'io.containerd.cri.v1.images'.registry]\n  config_path = %s", quote(o.RegistryDir))
	}
	line("[plugins.'io.containerd.nri.v1.nri']\n  disable = %t", !o.NRI)
	if o.NRI {
		line("  socket_path = %s\n  plugin_path = %s\n  plugin_config_path = %s", quote(d.NRISocket()), quote(d.path("nri")), quote(d.path("nri")))
	}
	if o.HoldMetadata {
		line("[proxy_plugins.held]\n  type = 'snapshot'\n  address = %s", quote(d.holdSocket()))
	}
	line("[plugins.'io.containerd.internal.v1.opt']\n  path = %s", quote(d.path("opt")))
	line("[plugins.'io.containerd.shim.v1.manager']\n  socket_dir = %s", quote(filepath.Join(d.State, "s")))
	line("[plugins.'io.containerd.server.v1.grpc']\n  address = %s", quote(d.Socket()))
	line("[plugins.'io.containerd.server.v1.ttrpc']\n  address = %s", quote(d.Socket()+".ttrpc"))
	line("[plugins.'io.containerd.server.v1.debug']\n  address = %s", quote(d.debugSocket()))
	if o.Metrics != "" {
		line("[plugins.'io.containerd.server.v1.metrics']\n  address = %s", quote(o.Metrics))
	}
	line("[timeouts]")
	for _, key := range slices.Sorted(maps.Keys(o.Timeouts)) {
		line("  %s = %s", quote(key), quote(o.Timeouts[key]))
	}
	return b.String()
}
