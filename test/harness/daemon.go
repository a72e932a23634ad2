// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cnireload/cnireload/test/fake"
)

// SandboxImage is the image name in containerd's default configuration.
const SandboxImage = "registry.k8s.io/pause:3.10.2"

// NoImage is the sandbox image of a daemon that was given none.
const NoImage = "127.0.0.1:1/none:1"

// Prefix starts the name of every temporary base folder.
const Prefix = "cnireload-"

// Daemon is one private containerd.
type Daemon struct {
	Options
	// State is containerd's state folder; sockets are in it.
	State string
	// Fake is the folder of the fake plugins in the first bin dir.
	Fake fake.Dir
	// Runtime and Images are the CRI clients while the daemon runs.
	Runtime runtimeapi.RuntimeServiceClient
	Images  runtimeapi.ImageServiceClient

	bin  string
	runc string
	conn *grpc.ClientConn
	cmd  *exec.Cmd
	home *Namespace    // where the process runs, if not in one of its own
	done chan struct{} // closed when the process has ended
	exit error
}

// New lays out the folders of a daemon without starting it.
func New(o Options) (*Daemon, error) {
	bin, err := BinDir(o.Side)
	if err != nil {
		return nil, err
	}
	runc, err := Runc()
	if err != nil {
		return nil, err
	}
	if o.Base == "" {
		// Short, because the names of unix sockets are bounded.
		if o.Base, err = os.MkdirTemp("", Prefix); err != nil {
			return nil, err
		}
	}
	if o.Runc != "" {
		runc = o.Runc
	}
	d := &Daemon{Options: o, bin: bin, runc: runc}
	d.State = d.path("state")
	if d.ConfDir == "" {
		d.ConfDir = d.path("net.d")
	}
	if len(d.BinDirs) == 0 {
		d.BinDirs = []string{d.path("bin")}
	}
	if d.LogLevel == "" {
		d.LogLevel = "info"
	}
	d.Fake = fake.Dir(d.path("fake"))
	dirs := append([]string{string(d.Fake), d.path("libcni"), d.State, d.ConfDir}, d.BinDirs...)
	for _, h := range d.Handlers {
		if h.ConfDir != "" {
			dirs = append(dirs, h.ConfDir)
		}
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if d.Private {
		if err := d.layOut(); err != nil {
			return nil, err
		}
	}
	// The owner's number lets a later run tell a leftover from a test that
	// is still going on.
	owner := strconv.Itoa(os.Getpid()) + " " + startTime(os.Getpid())
	return d, os.WriteFile(d.path("owner"), []byte(owner), 0o644)
}

func (d *Daemon) path(elem ...string) string {
	return filepath.Join(append([]string{d.Base}, elem...)...)
}

// Socket is the daemon's gRPC socket.
func (d *Daemon) Socket() string { return filepath.Join(d.State, "c.sock") }

// NRISocket is where NRI is served, if it is.
func (d *Daemon) NRISocket() string { return filepath.Join(d.State, "nri.sock") }

// LogPath is where the daemon's output goes, over restarts too.
func (d *Daemon) LogPath() string { return d.path("log") }

// BoltPath is the metadata database.
func (d *Daemon) BoltPath() string {
	return d.path("root", "io.containerd.metadata.v1.bolt", "meta.db")
}

// Become has the next Start run the binary of the other side on what this one
// leaves.
func (d *Daemon) Become(side Side) error {
	bin, err := BinDir(side)
	if err != nil {
		return err
	}
	d.Side, d.bin = side, bin
	return nil
}

// AttachmentCache is what libcni and the plugins see as /var/lib/cni.
func (d *Daemon) AttachmentCache() string { return d.path("libcni") }

// NetNSDir is where the daemon mounts its network namespaces.
func (d *Daemon) NetNSDir() string {
	return filepath.Join(d.State, "io.containerd.grpc.v1.cri", "netns")
}

// PID is the daemon's process.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// InstallFake puts the fake plugin into the first bin dir under these names.
// Each is complete before it appears, as a careful installer does it.
func (d *Daemon) InstallFake(names ...string) error {
	src, err := Fakenet()
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := Install(src, filepath.Join(d.BinDirs[0], name)); err != nil {
			return err
		}
	}
	return nil
}

// Install copies a file to a new inode beside dst and renames it into place.
func Install(src, dst string) error {
	b, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	tmp := dst + ".new"
	if err := os.WriteFile(tmp, b, 0o755); err != nil {
		return err
	}
	return os.Rename(tmp, dst)
}

// Start runs the daemon and returns when CRI answers.
func (d *Daemon) Start(ctx context.Context) error {
	if err := os.WriteFile(d.path("config.toml"), []byte(d.config()), 0o644); err != nil {
		return err
	}
	log, err := os.OpenFile(d.LogPath(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()

	// Where the folder does not exist, its parent is covered too: a mount point
	// made on the machine would stay behind.
	script := d.mountPrivate()
	script += "[ -d " + cniCache + " ] || { mount -t tmpfs none " + filepath.Dir(cniCache) + " && mkdir " + cniCache + "; }\n"
	script += "mount --bind " + shellQuote(d.AttachmentCache()) + " " + cniCache + "\n"
	for _, m := range d.Mounts {
		script += "mount"
		for _, arg := range m {
			script += " " + shellQuote(arg)
		}
		script += "\n"
	}
	for name, value := range d.UserSysctls {
		script += "echo " + shellQuote(value) + " > " + userSysctl(name) + "\n"
	}
	script += `exec "$@"`
	unshare := []string{"--mount", "--propagation", "private"}
	if d.PrivateNet {
		unshare = append(unshare, "--net")
	}
	daemon := append(slices.Clone(d.Wrap), filepath.Join(d.bin, "containerd"), "--config", d.path("config.toml"))
	if d.home != nil {
		d.cmd = d.home.command(daemon...)
	} else {
		d.cmd = exec.Command("unshare", append(append(unshare, "--", "/bin/sh", "-ec", script, "sh"), daemon...)...)
	}
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.Dir = d.Base
	d.cmd.Env = append(os.Environ(), "PATH="+d.bin+":"+os.Getenv("PATH"))
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if d.Detached {
		d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	}
	if d.UserSysctls != nil {
		same := []syscall.SysProcIDMap{{Size: 65536}}
		d.cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		d.cmd.SysProcAttr.UidMappings, d.cmd.SysProcAttr.GidMappings = same, same
		d.cmd.SysProcAttr.GidMappingsEnableSetgroups = true
	}
	if err := d.cmd.Start(); err != nil {
		return fmt.Errorf("start containerd: %w", err)
	}
	track(d)
	d.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		d.exit = cmd.Wait()
		close(done)
	}(d.cmd, d.done)

	d.conn, err = grpc.NewClient("unix://"+d.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The socket appears a moment later: the usual second of back-off
		// would be most of a start.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1, MaxDelay: 50 * time.Millisecond}}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return err
	}
	d.Runtime = runtimeapi.NewRuntimeServiceClient(d.conn)
	d.Images = runtimeapi.NewImageServiceClient(d.conn)
	if err := d.waitAnswer(ctx); err != nil {
		return err
	}
	if d.NoImage {
		return nil
	}
	pause, err := Pause()
	if err != nil {
		return err
	}
	return d.importImage(ctx, SandboxImage, pause)
}

func (d *Daemon) waitAnswer(ctx context.Context) error {
	// Much more than it takes, for machines that do much else.
	ctx, cancel := context.WithTimeout(ctx, Slow(2*time.Minute))
	defer cancel()
	for {
		_, err := d.Runtime.Version(ctx, &runtimeapi.VersionRequest{})
		if err == nil {
			return nil
		}
		select {
		case <-d.done:
			return fmt.Errorf("containerd ended while starting: %w\n%s", d.exit, d.LogTail(20))
		case <-ctx.Done():
			return fmt.Errorf("containerd did not answer: %w\n%s", err, d.LogTail(20))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// importImage makes an image of that name of one binary, unless it is there.
func (d *Daemon) importImage(ctx context.Context, name, binary string) error {
	status := &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: name}}
	if r, err := d.Images.ImageStatus(ctx, status); err == nil && r.GetImage() != nil {
		return nil
	}
	archive := d.path(filepath.Base(binary) + ".tar")
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	if err := errors.Join(writeImage(f, name, binary), f.Close()); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(d.bin, "ctr"), "-a", d.Socket(), "-n", "k8s.io", "images", "import", archive)
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import image %s: %w: %s", name, err, b)
	}
	return Poll(ctx, 10*time.Second, func() error {
		r, err := d.Images.ImageStatus(ctx, status)
		if err == nil && r.GetImage() == nil {
			err = fmt.Errorf("image %s imported but not seen by CRI", name)
		}
		return err
	})
}

// Poll calls check until it returns nil, and returns its last error when the
// time is over. Between two calls pass 2 to 100 ms, a twentieth of the time so
// far: many cases that wait at once would keep the machine busy.
func Poll(ctx context.Context, within time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for begin := time.Now(); ; {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %v: %w", within, err)
		case <-time.After(min(max(time.Since(begin)/20, 2*time.Millisecond), 100*time.Millisecond)):
		}
	}
}

// Ended is closed when the daemon's process has ended.
func (d *Daemon) Ended() <-chan struct{} { return d.done }

// Alive tells whether the daemon's process runs.
func (d *Daemon) Alive() bool {
	select {
	case <-d.done:
		return false
	default:
		return d.cmd != nil
	}
}

// Stop ends the daemon and leaves its pods and folders, as a restart does.
func (d *Daemon) Stop() error {
	if d.conn != nil {
		_ = d.conn.Close()
		d.conn = nil
	}
	if d.cmd == nil || !d.Alive() {
		return nil
	}
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-d.done:
		return nil
	case <-time.After(15 * time.Second):
	}
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-d.done
	return errors.New("containerd did not end within 15s of SIGTERM and was killed")
}

// RemovePods stops and removes every pod over CRI.
func (d *Daemon) RemovePods(ctx context.Context) error {
	pods, err := d.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range pods.GetItems() {
		if err := d.RemovePod(ctx, p.GetId()); err != nil {
			return err
		}
	}
	return nil
}

// Leaks names what is left of pods while the daemon runs and has none. Shims
// end a moment after their pod, so it looks again for a while.
func (d *Daemon) Leaks() []string {
	var left []string
	_ = Poll(context.Background(), 5*time.Second, func() error {
		left = nil
		pids, err := Processes(d.Base)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			if pid != d.PID() && !d.home.knows(pid) {
				left = append(left, describe(pid))
			}
		}
		for _, m := range mountsOf(d.PID()) {
			if strings.HasPrefix(m.point, d.State+"/") {
				left = append(left, "mount "+m.point)
			}
		}
		if netns, err := os.ReadDir(d.NetNSDir()); err == nil {
			for _, n := range netns {
				left = append(left, "netns "+n.Name())
			}
		}
		if len(left) > 0 {
			return errors.New("leaks")
		}
		return nil
	})
	return left
}

// Destroy ends everything of the daemon and removes its folders. What could
// not be removed is in the error, and what the race detector has reported.
func (d *Daemon) Destroy() error {
	untrack(d)
	stopped := d.Stop()
	return errors.Join(stopped, d.Races(), Clean(d.Base))
}

// Clean ends whatever still belongs to a base folder and removes it. The
// daemon's mounts and network namespaces go with its mount namespace.
func Clean(base string) error {
	if err := end(base); err != nil {
		return err
	}
	removeCgroups(base)
	if left := Residue(base); len(left) > 0 {
		return fmt.Errorf("left behind: %s", strings.Join(left, ", "))
	}
	if err := os.RemoveAll(base); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Sweep cleans what earlier runs that were killed have left.
func Sweep() error {
	bases, err := filepath.Glob(filepath.Join(os.TempDir(), Prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, base := range bases {
		owner, err := os.ReadFile(filepath.Join(base, "owner"))
		if err != nil {
			continue // not ours, or being made right now
		}
		pid, start, _ := strings.Cut(string(owner), " ")
		if n, err := strconv.Atoi(pid); err == nil && startTime(n) == start {
			continue
		}
		errs = append(errs, Clean(base))
	}
	return errors.Join(errs...)
}

var running struct {
	sync.Mutex
	daemons []*Daemon
}

func track(d *Daemon) {
	running.Lock()
	defer running.Unlock()
	if !d.Detached && !slices.Contains(running.daemons, d) {
		running.daemons = append(running.daemons, d)
	}
}

func untrack(d *Daemon) {
	running.Lock()
	defer running.Unlock()
	running.daemons = slices.DeleteFunc(running.daemons, func(o *Daemon) bool { return o == d })
}

// DestroyAll ends every daemon of this program that is not detached, for use
// when the program is interrupted.
func DestroyAll() error {
	running.Lock()
	daemons := slices.Clone(running.daemons)
	running.Unlock()
	var errs []error
	for _, d := range daemons {
		errs = append(errs, Clean(d.Base))
	}
	return errors.Join(errs...)
}

// LogTail is the end of the daemon's log, without the lines every start has.
func (d *Daemon) LogTail(lines int) string {
	b, err := os.ReadFile(d.LogPath())
	if err != nil {
		return err.Error()
	}
	all := slices.DeleteFunc(strings.Split(strings.TrimSpace(string(b)), "\n"), func(line string) bool {
		return strings.Contains(line, `msg="loading plugin"`) || strings.Contains(line, `msg="skip loading plugin"`) ||
			strings.Contains(line, `msg="starting cri plugin"`)
	})
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// userSysctl is the file of a limit of the user namespace that opens it.
func userSysctl(name string) string { return "/proc/sys/user/" + name }

// SetUserSysctl changes one of UserSysctls while the daemon runs.
func (d *Daemon) SetUserSysctl(name, value string) error {
	return d.InNamespace("/bin/sh", "-ec", "echo "+shellQuote(value)+" > "+userSysctl(name))
}

// InNamespace runs a command in the daemon's namespaces.
func (d *Daemon) InNamespace(args ...string) error {
	cmd := d.CommandInside(args...)
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, b)
	}
	return nil
}

func (d *Daemon) nsenter() []string {
	enter := []string{"--target", strconv.Itoa(d.PID()), "--mount"}
	if d.PrivateNet {
		enter = append(enter, "--net")
	}
	if d.UserSysctls != nil {
		enter = append(enter, "--user")
	}
	return append(enter, "--")
}

// CommandInside is a command in the daemon's namespaces.
func (d *Daemon) CommandInside(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append(d.nsenter(), args...)...)
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
