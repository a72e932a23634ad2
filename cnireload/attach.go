// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/cnireload/cnireload/cnireload/plugin"
)

// tracerName is the scope of the spans; their names and attributes are go-cni's.
const tracerName = "github.com/cnireload/cnireload"

// Namespace is a network namespace in the course of being attached.
type Namespace struct {
	id             string
	path           string
	capabilityArgs map[string]any
	args           map[string]string
}

// NamespaceOpts adds to what plugins are told about a namespace.
type NamespaceOpts func(*Namespace) error

// WithCapability passes a capability to plugins that declare it
// (https://www.cni.dev/docs/conventions/).
func WithCapability(name string, capability any) NamespaceOpts {
	return func(ns *Namespace) error {
		ns.capabilityArgs[name] = capability
		return nil
	}
}

// WithCapabilityPortMap passes port mappings.
func WithCapabilityPortMap(portMapping []PortMapping) NamespaceOpts {
	return WithCapability("portMappings", portMapping)
}

// WithCapabilityIPRanges passes address ranges.
func WithCapabilityIPRanges(ipRanges []IPRanges) NamespaceOpts {
	return WithCapability("ipRanges", ipRanges)
}

// WithCapabilityBandWidth passes bandwidth limits.
func WithCapabilityBandWidth(bandWidth BandWidth) NamespaceOpts {
	return WithCapability("bandwidth", bandWidth)
}

// WithCapabilityDNS passes DNS settings.
func WithCapabilityDNS(dns DNS) NamespaceOpts { return WithCapability("dns", dns) }

// WithCapabilityCgroupPath passes the path of the pod's cgroup.
func WithCapabilityCgroupPath(cgroupPath string) NamespaceOpts {
	return WithCapability("cgroupPath", cgroupPath)
}

// WithLabels adds to CNI_ARGS.
func WithLabels(labels map[string]string) NamespaceOpts {
	return func(ns *Namespace) error {
		for k, v := range labels {
			ns.args[k] = v
		}
		return nil
	}
}

// WithArgs adds one pair to CNI_ARGS.
func WithArgs(k, v string) NamespaceOpts {
	return func(ns *Namespace) error {
		ns.args[k] = v
		return nil
	}
}

// without returns the namespace without its path.
func (ns *Namespace) without() *Namespace {
	gone := *ns
	gone.path = ""
	return &gone
}

func newNamespace(id, path string, opts []NamespaceOpts) (*Namespace, error) {
	ns := &Namespace{id: id, path: path, capabilityArgs: make(map[string]any), args: make(map[string]string)}
	for _, o := range opts {
		if err := o(ns); err != nil {
			return nil, err
		}
	}
	return ns, nil
}

// runtimeConf returns libcni's form. go-cni leaves the order of CNI_ARGS to
// chance; here it is that of the keys.
func (ns *Namespace) runtimeConf(ifName string) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{
		ContainerID:    ns.id,
		NetNS:          ns.path,
		IfName:         ifName,
		CapabilityArgs: ns.capabilityArgs,
	}
	for k, v := range ns.args {
		rt.Args = append(rt.Args, [2]string{k, v})
	}
	slices.SortFunc(rt.Args, func(a, b [2]string) int { return strings.Compare(a[0], b[0]) })
	return rt
}

// Setup attaches the network namespace at path to every network in use, in
// parallel. A network that is not ready runs nothing and returns Status's error.
func (n *Network) Setup(ctx context.Context, id string, path string, opts ...NamespaceOpts) (*Result, error) {
	return n.setup(ctx, "cni.Setup", id, path, opts, func(ctx context.Context, attachments []attachment, ns *Namespace) ([]*types100.Result, error) {
		results := make([]*types100.Result, len(attachments))
		errs := make([]error, len(attachments))
		var wg sync.WaitGroup
		for i, a := range attachments {
			wg.Go(func() {
				results[i], errs[i] = n.attach(ctx, "cni.asynchAttach", a, ns, attribute.Int("cni.index", i))
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return nil, err
			}
		}
		return results, nil
	})
}

// SetupSerially attaches the network namespace to one network after the other
// and stops at the first that fails.
func (n *Network) SetupSerially(ctx context.Context, id string, path string, opts ...NamespaceOpts) (*Result, error) {
	return n.setup(ctx, "cni.SetupSerially", id, path, opts, func(ctx context.Context, attachments []attachment, ns *Namespace) ([]*types100.Result, error) {
		var results []*types100.Result
		for _, a := range attachments {
			r, err := n.attach(ctx, "cni.attachNetworksSerially", a, ns)
			if err != nil {
				return nil, err
			}
			results = append(results, r)
		}
		return results, nil
	})
}

func (n *Network) setup(ctx context.Context, name, id, path string, opts []NamespaceOpts,
	attach func(context.Context, []attachment, *Namespace) ([]*types100.Result, error)) (*Result, error) {
	ctx, span := startSpan(ctx, name, id, path)
	defer span.End()
	s := n.Snapshot()
	if err := s.Err(); err != nil {
		return nil, err
	}
	ns, err := newNamespace(id, path, opts)
	if err != nil {
		return nil, err
	}
	n.gc.Guard.Enter()
	defer n.gc.Guard.Leave()
	begin := time.Now()
	n.pods.forget(id)
	n.beginADD(ctx, ns, s.attachments)
	var result *Result
	results, err := attach(ctx, s.attachments, ns)
	if err == nil {
		result, err = n.convert(results)
	}
	failure := err
	if failure == nil {
		failure = n.lacksAddress(s.attachments, result)
	}
	if failure != nil {
		n.pods.put(id, podState{failedADD: s.attachments})
		// One that was ended says nothing about the next pod.
		if !errors.Is(failure, ErrClosed) && plugin.Outcome(failure) == "error" {
			n.admission.Failed(ns.args["K8S_POD_UID"], s.Generation, failure, time.Since(begin))
		}
		return result, err
	}
	n.owed.EndADD(id)
	if n.admission.Succeeded(ns.args["K8S_POD_UID"]) {
		n.logger(n.ctx).Info("cni: pods have their network again, and none is held back any more")
	}
	n.disprove(s.closedReported())
	return result, nil
}

// lacksAddress returns why CRI takes a result that go-cni accepts for a failure
// (containerd, internal/cri/server/sandbox_run.go, setupPodNetwork). It is CRI's
// to say so; here the pod counts as one whose ADD has failed.
func (n *Network) lacksAddress(attachments []attachment, r *Result) error {
	ifName := n.config.prefix + "0"
	if !slices.ContainsFunc(attachments, func(a attachment) bool { return a.ifName == ifName }) {
		return nil
	}
	if c := r.Interfaces[ifName]; c != nil && len(c.IPConfigs) > 0 {
		return nil
	}
	return fmt.Errorf("the result has no address for %s", ifName)
}

const (
	// cleanUp is what the caller of ADD keeps of its deadline at most, for the
	// removal of a pod whose ADD does not end, and a fifth of shorter ones.
	cleanUp = 40 * time.Second
	// cleanUpDEL is what DEL may take of it. If it fails it is tried again.
	cleanUpDEL = 30 * time.Second
)

// addBound derives the context of ADD.
func addBound(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if left := time.Until(deadline); ok {
		keep := min(cleanUp, left/5)
		if d := left - keep; d < plugin.Bound("ADD") {
			return context.WithTimeoutCause(ctx, d, &addError{after: d.Round(time.Second / 10), keep: keep.Round(time.Second / 10)})
		}
	}
	return plugin.WithBound(ctx, "ADD")
}

// addError is why an ADD was ended before its caller gave up. It is a deadline
// error to errors.Is.
type addError struct{ after, keep time.Duration }

func (e *addError) Error() string {
	return fmt.Sprintf("ADD did not finish within %s, which leaves its caller %s to clean up", e.after, e.keep)
}
func (e *addError) Is(target error) bool { return target == context.DeadlineExceeded }

// disprove notes that an ADD has succeeded although these gates were closed, so
// that no pod waits for them again: what they look at is compiled into a plugin,
// and has moved.
func (n *Network) disprove(gates []GateState) {
	if len(gates) == 0 {
		return
	}
	ids := make(map[string]bool, len(gates))
	for _, g := range gates {
		ids[g.id] = true
	}
	n.disproved.Store(&ids)
}

// attach runs ADD for one list within the bound of ADD.
func (n *Network) attach(ctx context.Context, name string, a attachment, ns *Namespace, attrs ...attribute.KeyValue) (*types100.Result, error) {
	ctx, span := otel.Tracer(tracerName).Start(ctx, name, trace.WithAttributes(append(attrs,
		attribute.String("cni.ifname", a.ifName),
		attribute.String("cni.name", a.list.Name))...))
	defer span.End()
	bounded, cancel := addBound(ctx)
	defer cancel()
	r, err := n.cni.AddNetworkList(bounded, a.forCache(), ns.runtimeConf(a.ifName))
	if err == nil {
		return types100.NewResultFromResult(r)
	}
	span.SetStatus(codes.Error, err.Error())
	return nil, err
}

// Check runs CHECK for every network in use and returns the first failure.
func (n *Network) Check(ctx context.Context, id string, path string, opts ...NamespaceOpts) error {
	return n.each(ctx, "cni.Check", "CHECK", id, path, opts, func(ctx context.Context, a attachment, ns *Namespace) error {
		return n.cni.CheckNetworkList(ctx, a.list, ns.runtimeConf(a.ifName))
	})
}

// each runs one verb for one list after the other, each within the verb's
// bound, until one fails.
func (n *Network) each(ctx context.Context, name, verb, id, path string, opts []NamespaceOpts,
	run func(context.Context, attachment, *Namespace) error) error {
	ctx, span := startSpan(ctx, name, id, path)
	defer span.End()
	s := n.Snapshot()
	if s.LoadError != nil {
		return &notReady{cause: s.LoadError}
	}
	ns, err := newNamespace(id, path, opts)
	if err != nil {
		return err
	}
	for _, a := range s.attachments {
		if err := func() error {
			bounded, cancel := plugin.WithBound(ctx, verb)
			defer cancel()
			return run(bounded, a, ns)
		}(); err != nil {
			return err
		}
	}
	return nil
}

func startSpan(ctx context.Context, name, id, path string) (context.Context, trace.Span) {
	return otel.Tracer(tracerName).Start(ctx, name, trace.WithAttributes(
		attribute.String("cni.id", id),
		attribute.String("cni.path", path)))
}

// resultConverter makes one Result of the results of all networks.
type resultConverter func([]*types100.Result) (*Result, error)

// newResultConverter borrows go-cni's own conversion, so that there is no second
// one to differ from it. It depends on the interface prefix alone.
func newResultConverter(prefix string) (resultConverter, error) {
	c, err := gocni.New(gocni.WithInterfacePrefix(prefix))
	if err != nil {
		return nil, err
	}
	converter, ok := c.(interface {
		GetCNIResultFromResults([]*types100.Result) (*gocni.Result, error)
	})
	if !ok {
		return nil, errors.New("cnireload: this version of go-cni cannot convert results")
	}
	return converter.GetCNIResultFromResults, nil
}
