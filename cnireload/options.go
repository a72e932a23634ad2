// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	gocni "github.com/containerd/go-cni"

	"github.com/cnireload/cnireload/cnireload/confdir"
	"github.com/cnireload/cnireload/cnireload/plugin"
)

// Keys in the [timeouts] table of containerd's configuration, see package plugin.
const (
	TimeoutAdd     = plugin.TimeoutAdd
	TimeoutDel     = plugin.TimeoutDel
	TimeoutCheck   = plugin.TimeoutCheck
	TimeoutStatus  = plugin.TimeoutStatus
	TimeoutVersion = plugin.TimeoutVersion
	TimeoutGC      = plugin.TimeoutGC
)

// Readiness says what a network must be before it counts as ready.
type Readiness string

const (
	// ReadinessStrict: every plugin of the list is there, can be executed and
	// speaks the list's version.
	ReadinessStrict Readiness = "strict"
	// ReadinessParse: the list parses, as in go-cni. Problems with plugins are
	// still reported. For nodes whose plugins mis-answer VERSION.
	ReadinessParse Readiness = "parse"
)

// config is everything that options set. It is not changed after New, but for
// the recipe, which Load may replace.
type config struct {
	recipe
	confDir     string
	binDirs     []string
	maxConf     int
	prefix      string
	minNetworks int
	cacheDir    string
	handler     string
	readiness   Readiness
	networkName string
	required    []string
	template    templateConfig
	gates       Gates
	readyFiles  []string
	readyWait   time.Duration

	owedDir   string
	delGrace  time.Duration
	sandboxes func(context.Context) ([]Sandbox, error)
	collect   bool
}

// recipe says what Load puts together.
type recipe struct {
	loopback bool
	scan     bool
	all      bool
}

// Opt configures a [Network].
type Opt func(*config) error

// WithInterfacePrefix sets the prefix of interface names, "eth" by default.
func WithInterfacePrefix(prefix string) Opt {
	return func(c *config) error {
		c.prefix = prefix
		return nil
	}
}

// WithPluginDir sets the directories that hold plugin executables, searched in
// order.
func WithPluginDir(dirs []string) Opt {
	return func(c *config) error {
		c.binDirs = slices.Clone(dirs)
		return nil
	}
}

// WithPluginConfDir sets the directory that holds network configuration. It
// need not exist.
func WithPluginConfDir(dir string) Opt {
	return func(c *config) error {
		c.confDir = dir
		return nil
	}
}

// WithPluginMaxConfNum sets how many lists of the directory are used, 1 by
// default; 0 or less means all.
func WithPluginMaxConfNum(n int) Opt {
	return func(c *config) error {
		c.maxConf = n
		return nil
	}
}

// WithMinNetworkCount sets how many networks, loopback included, must be
// loaded before the network can be ready; 1 by default.
func WithMinNetworkCount(n int) Opt {
	return func(c *config) error {
		c.minNetworks = n
		return nil
	}
}

// WithLoNetwork adds a list that runs the loopback plugin on "lo".
func WithLoNetwork(c *config) error {
	c.loopback = true
	return nil
}

// WithDefaultConf loads the first lists of the configuration directory, as many
// as WithPluginMaxConfNum says.
func WithDefaultConf(c *config) error {
	c.scan = true
	return nil
}

// WithAllConf loads every list of the configuration directory.
func WithAllConf(c *config) error {
	c.scan, c.all = true, true
	return nil
}

// WithCacheDir sets the directory of libcni's attachment cache; empty means
// libcni's default.
func WithCacheDir(dir string) Opt {
	return func(c *config) error {
		c.cacheDir = dir
		return nil
	}
}

// WithHandler names the runtime handler that uses the network, for log lines and
// for what is stored. "default", or none, names the network of all that have none
// of their own: it also does what removed handlers owe.
func WithHandler(name string) Opt {
	return func(c *config) error {
		c.handler = name
		return nil
	}
}

// WithReadiness sets what ready means: "strict" (also for the empty string) or
// "parse".
func WithReadiness(r string) Opt {
	return func(c *config) error {
		switch Readiness(r) {
		case ReadinessStrict, "":
			c.readiness = ReadinessStrict
		case ReadinessParse:
			c.readiness = ReadinessParse
		default:
			return fmt.Errorf("invalid readiness = %q: must be %q or %q", r, ReadinessStrict, ReadinessParse)
		}
		return nil
	}
}

// WithNetworkName uses the first valid list with that name instead of the first
// valid list. Empty means any name.
func WithNetworkName(name string) Opt {
	return func(c *config) error {
		if name == "" {
			return nil
		}
		if err := confdir.ValidateName(name); err != nil {
			return fmt.Errorf("invalid network_name = %q: %w", name, err)
		}
		c.networkName = name
		return nil
	}
}

// WithRequiredPlugins names plugin types that the lists in use must run between
// them before the network is ready.
func WithRequiredPlugins(types []string) Opt {
	return func(c *config) error {
		for _, t := range types {
			if t == "" || strings.ContainsRune(t, filepath.Separator) {
				return fmt.Errorf("invalid required_plugins entry %q: must be the type of a plugin, without a path", t)
			}
		}
		c.required = slices.Clone(types)
		return nil
	}
}

// WithTemplate has the network render its configuration from a template when
// [Network.Render] is called, and again when the template changes. record is a
// file, outside the configuration directory, that remembers across restarts
// what was rendered. An empty path means no template.
func WithTemplate(path, record string) Opt {
	return func(c *config) error {
		if path == "" {
			return nil
		}
		if record == "" {
			return fmt.Errorf("conf_template %s: no record file given", path)
		}
		c.template = templateConfig{path: path, record: record}
		return nil
	}
}

// WithGates sets what closed gates do: "auto" (also for the empty string),
// "report" or "off".
func WithGates(mode string) Opt {
	return func(c *config) error {
		switch g := Gates(mode); g {
		case "":
			c.gates = GatesAuto
		case GatesAuto, GatesReport, GatesOff:
			c.gates = g
		default:
			return fmt.Errorf("invalid gates = %q: must be %q, %q or %q", mode, GatesAuto, GatesReport, GatesOff)
		}
		return nil
	}
}

// WithReadyFiles names files without which the network is not ready, whatever
// its plugins are.
func WithReadyFiles(paths []string) Opt {
	return func(c *config) error {
		for _, p := range paths {
			if !filepath.IsAbs(p) {
				return fmt.Errorf("invalid ready_files entry %q: must be an absolute path", p)
			}
		}
		c.readyFiles = slices.Clone(paths)
		return nil
	}
}

// WithReadyWait sets how long [Network.Admit] waits, as a duration such as
// "30s". Empty means 30 seconds, zero not to wait.
func WithReadyWait(wait string) Opt {
	return func(c *config) error {
		return setDuration(&c.readyWait, wait, defaultReadyWait, "ready_wait", `"30s", or "0s" not to wait`)
	}
}

// WithDelGrace sets for how long the removal of a pod may fail because what a
// plugin needs is away, as a duration such as "3m", before the pod is let go and
// the removal done later. Empty means 3 minutes, zero at the first failure.
func WithDelGrace(grace string) Opt {
	return func(c *config) error {
		return setDuration(&c.delGrace, grace, defaultDelGrace, "del_grace", `"3m", or "0s" to let pods go at once`)
	}
}

// setDuration sets what a key says, or the default if it is empty.
func setDuration(to *time.Duration, value string, otherwise time.Duration, key, such string) error {
	if value == "" {
		*to = otherwise
		return nil
	}
	d, err := time.ParseDuration(value)
	if err != nil || d < 0 {
		return fmt.Errorf("invalid %s = %q: must be a duration such as %s", key, value, such)
	}
	*to = d
	return nil
}

// WithOwedRemovals sets the directory that keeps the removals that are owed.
// Networks can share one. Without it nothing is kept, and no pod is let go before
// it is removed.
func WithOwedRemovals(dir string) Opt {
	return func(c *config) error {
		c.owedDir = dir
		return nil
	}
}

// WithSandboxes has the network find out, once it is started, what an earlier
// process left undone: plugins that still run, and attachments of pods that are
// gone. list returns all pod sandboxes that exist, including those that are
// being made or removed, of all networks.
func WithSandboxes(list func(context.Context) ([]Sandbox, error)) Opt {
	return func(c *config) error {
		c.sandboxes = list
		return nil
	}
}

// WithGC sets whether plugins are told from time to time which attachments exist
// (GC, CNI spec 1.1), so that they free what others have held. It needs
// WithSandboxes.
func WithGC(on bool) Opt {
	return func(c *config) error {
		c.collect = on
		return nil
	}
}

const (
	defaultReadyWait = 30 * time.Second
	defaultDelGrace  = 3 * time.Minute
)

func newConfig(opts []Opt) (config, error) {
	c := config{
		confDir:     gocni.DefaultNetDir,
		binDirs:     []string{gocni.DefaultCNIDir},
		maxConf:     gocni.DefaultMaxConfNum,
		prefix:      gocni.DefaultPrefix,
		minNetworks: 1,
		readiness:   ReadinessStrict,
		gates:       GatesAuto,
		readyWait:   defaultReadyWait,
		delGrace:    defaultDelGrace,
	}
	for _, o := range opts {
		if err := o(&c); err != nil {
			return config{}, err
		}
	}
	return c, plugin.CheckBounds()
}

// max returns how many lists of the directory are used; 0 means all.
func (c *config) max() int {
	if c.all || c.maxConf < 0 {
		return 0
	}
	return c.maxConf
}
