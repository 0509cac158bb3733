package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/sdnotify"
)

// started is a kiln-pull in a process of its own.
type started struct {
	*exec.Cmd
	lines  *bufio.Scanner // of stdout
	stderr *bytes.Buffer
}

// command makes a process of kiln-pull, for the command line tests of which this binary stands in.
func command(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...) // which another user can run, too
	cmd.Args[0] = "kiln-pull"
	return cmd
}

func begin(t *testing.T, env []string, args ...string) *started {
	t.Helper()
	return beginAs(t, env, nil, args...)
}

func beginAs(t *testing.T, env []string, attr *syscall.SysProcAttr, args ...string) *started {
	t.Helper()
	cmd := command(args...)
	cmd.Env, cmd.SysProcAttr = append(os.Environ(), env...), attr
	return startCommand(t, cmd)
}

func startCommand(t *testing.T, cmd *exec.Cmd) *started {
	t.Helper()
	p := &started{Cmd: cmd, stderr: new(bytes.Buffer)}
	p.Stderr = p.stderr
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Process.Kill()
		p.Wait()
	})
	p.lines = bufio.NewScanner(out)
	return p
}

// line reads the next line of stdout.
func (p *started) line(t *testing.T) string {
	t.Helper()
	if !p.lines.Scan() {
		t.Fatalf("%q ended: %v\n%s", p.Args, p.Wait(), p.stderr)
	}
	return p.lines.Text()
}

// code waits for the end and returns the exit code.
func (p *started) code() int {
	for p.lines.Scan() {
	}
	p.Wait()
	return p.ProcessState.ExitCode()
}

// keeper is a process that holds a model.
type keeper struct {
	*started
	announcement
	client attach.Client
}

// hold starts kiln-pull resident on a socket, and waits until it says that it holds the model.
func hold(t *testing.T, env []string, dir, socket string, args ...string) *keeper {
	t.Helper()
	return holdAs(t, env, nil, dir, socket, args...)
}

func holdAs(t *testing.T, env []string, attr *syscall.SysProcAttr, dir, socket string, args ...string) *keeper {
	t.Helper()
	h := &keeper{client: attach.Client{Socket: socket}}
	args = append([]string{"resident", dir, "--json", "--listen", "127.0.0.1:0", "--socket", socket}, args...)
	h.started = beginAs(t, env, attr, args...)
	for h.Event != "resident" {
		if err := json.Unmarshal([]byte(h.line(t)), &h.announcement); err != nil {
			t.Fatal(err)
		}
	}
	if h.Socket != socket {
		t.Errorf("announced the socket %q, want %q", h.Socket, socket)
	}
	return h
}

func (h *keeper) leases(t *testing.T) int {
	t.Helper()
	s, err := h.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Leases
}

// ends runs a command on the socket of a holder and checks its exit code and what it says.
func (h *keeper) ends(t *testing.T, env []string, code int, says string, args ...string) {
	t.Helper()
	p := begin(t, env, append(args, "--socket", h.client.Socket)...)
	var out strings.Builder
	for p.lines.Scan() {
		out.WriteString(p.lines.Text())
	}
	if got := p.code(); got != code || !strings.Contains(out.String()+p.stderr.String(), says) {
		t.Errorf("%q: exit code %d, want %d and %q\n%s\n%s", args, got, code, says, out.String(), p.stderr)
	}
}

func waitFor(t *testing.T, is func() bool) {
	t.Helper()
	for !is() {
		runtime.Gosched()
		if t.Context().Err() != nil {
			t.Fatal("waited in vain")
		}
	}
}

// socketIn is the path of a socket in a folder that is made for it.
func socketIn(t *testing.T) string { return filepath.Join(t.TempDir(), "s", "kiln.sock") }

const otherBase = "sha256:1111111111111111111111111111111111111111111111111111111111111111"

// TestAttachProcesses goes through the life of a model in memory: it is attached to, checked, audited and released.
func TestAttachProcesses(t *testing.T) {
	dir, m := residentModel(t)
	notify := filepath.Join(t.TempDir(), "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	h := hold(t, []string{sdnotify.EnvSocket + "=" + notify}, dir, socketIn(t), "--device", "host")
	base := m.Aggregate.String()
	h.ends(t, nil, cli.CodeOK, "intact: "+base, "attach", base, "--check")
	h.ends(t, nil, cli.CodeOK, `"bytes":`, "attach", base, "--check", "--json")
	h.ends(t, nil, cli.CodeOK, "intact: "+base, "audit", base)
	h.ends(t, nil, cli.CodeNo, attach.CodeOtherBase, "attach", otherBase)
	h.ends(t, nil, cli.CodeNo, attach.CodeOtherBase, "audit", otherBase)
	h.ends(t, nil, cli.CodeNo, attach.CodeOtherBase, "release", otherBase)
	h.ends(t, nil, cli.CodeUsage, "no aggregate", "attach", "model")
	none := &keeper{client: attach.Client{Socket: socketIn(t)}}
	for _, name := range []string{"attach", "audit", "release"} {
		none.ends(t, nil, cli.CodeNotFound, "hint: ", name, base)
	}

	killed := begin(t, nil, "attach", base, "--socket", h.Socket)
	if line := killed.line(t); !strings.HasPrefix(line, "attached: "+base) {
		t.Errorf("%q", line)
	}
	if n := h.leases(t); n != 1 {
		t.Errorf("%d leases, want 1", n)
	}
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return h.leases(t) == 0 })

	kept := begin(t, nil, "attach", base, "--json", "--socket", h.Socket)
	if d, err := attach.Parse([]byte(kept.line(t))); err != nil || d.Aggregate != m.Aggregate || d.Lease == nil {
		t.Errorf("%+v, %v", d, err)
	}
	resp, err := http.Get(h.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if err != nil || !strings.Contains(string(text), "kiln_resident_leases 1\n") ||
		!strings.Contains(string(text), `kiln_resident_refusals_total{code="RESIDENT_OTHER_BASE"} 3`) {
		t.Errorf("metrics: %v\n%s", err, text)
	}
	h.ends(t, nil, cli.CodeOK, "released: "+base, "release", base)
	if code := kept.code(); code != cli.CodeOK || !strings.Contains(kept.stderr.String(), "about to end") {
		t.Errorf("the one who was attached: exit code %d\n%s", code, kept.stderr)
	}
	if code := h.code(); code != cli.CodeOK {
		t.Errorf("the holder: exit code %d\n%s", code, h.stderr)
	}
	b := make([]byte, 1000)
	for _, want := range []string{"STATUS=loading", "READY=1\nSTATUS=holding " + base, "STOPPING=1\nSTATUS=draining"} {
		if n, err := told.Read(b); err != nil || string(b[:n]) != want {
			t.Errorf("systemd is told %q, %v; want %q", b[:n], err, want)
		}
	}
}

// TestWatchdog: a holder of which systemd asks it says that it is alive, from when it is ready.
func TestWatchdog(t *testing.T) {
	dir, _ := residentModel(t)
	notify := filepath.Join(t.TempDir(), "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	next := func() string {
		b := make([]byte, 1000)
		n, err := told.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	h := hold(t, []string{sdnotify.EnvSocket + "=" + notify, sdnotify.EnvWatchdog + "=2000"}, dir, socketIn(t), "--device",
		"host")
	for _, want := range []string{"STATUS=loading", "READY=1\n", "WATCHDOG=1", "WATCHDOG=1"} {
		if got := next(); !strings.HasPrefix(got, want) {
			t.Errorf("systemd is told %q, want %q", got, want)
		}
	}
	if err := h.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for got := ""; !strings.HasPrefix(got, "STOPPING=1"); got = next() {
	}
	p := begin(t, []string{sdnotify.EnvWatchdog + "=soon"}, "resident", dir, "--listen", "127.0.0.1:0")
	if code := p.code(); code != cli.CodeUsage || !strings.Contains(p.stderr.String(), `WATCHDOG_USEC="soon"`) {
		t.Errorf("exit code %d\n%s", code, p.stderr)
	}
}

// TestHolderKilled kills a holder: who was attached keeps the memory, and the next holder takes the name.
func TestHolderKilled(t *testing.T) {
	dir, m := residentModel(t)
	socket := socketIn(t)
	h := hold(t, nil, dir, socket, "--device", "host")
	a, err := h.client.Attach(t.Context(), m.Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	waits := begin(t, nil, "attach", m.Aggregate.String(), "--socket", socket)
	waits.line(t)
	if err := h.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for range a.Events() { // until the holder has gone
	}
	if code := waits.code(); code != cli.CodeUnreachable {
		t.Errorf("the one who waited: exit code %d\n%s", code, waits.stderr)
	}
	intact := func() {
		t.Helper()
		for i, tensor := range a.Document.Tensors {
			if got, want := a.Bytes(tensor), bytes.Repeat([]byte{byte(i + 1)}, 16); !bytes.Equal(got, want) {
				t.Errorf("tensor %s holds %v, want %v", tensor.Name, got, want)
			}
		}
	}
	intact()
	if _, err := os.Lstat(socket); err != nil {
		t.Errorf("no name is left to be taken over: %v", err)
	}
	next := hold(t, nil, dir, socket, "--device", "host")
	next.ends(t, nil, cli.CodeOK, "intact", "attach", m.Aggregate.String(), "--check")
	next.ends(t, nil, cli.CodeUsage, "another process listens there", "resident", dir, "--listen", "127.0.0.1:0")
	intact()
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := next.code(); code != cli.CodeOK {
		t.Errorf("exit code %d\n%s", code, next.stderr)
	}
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name is left: %v", err)
	}
}

// TestOtherUser attaches as another user, where there is one to become: to a folder that only the holder can enter,
// and to one that was opened to everybody.
func TestOtherUser(t *testing.T) {
	dir, m := residentModel(t)
	folder, err := os.MkdirTemp("/tmp", "kiln") // the parents of t.TempDir are closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	h := hold(t, nil, dir, filepath.Join(folder, "s", "kiln.sock"), "--device", "host")
	want, said := cli.CodeOK, []string{"intact", "intact"}
	attr := new(syscall.SysProcAttr)
	if os.Geteuid() == 0 {
		want, said = cli.CodeDenied, []string{"permission denied", attach.CodeOtherUser}
		attr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	for i, says := range said {
		if i == 1 {
			err := errors.Join(os.Chmod(filepath.Dir(h.Socket), 0o755), os.Chmod(h.Socket, 0o666))
			if err != nil {
				t.Fatal(err)
			}
		}
		cmd := command("attach", m.Aggregate.String(), "--check", "--socket", h.Socket)
		cmd.SysProcAttr = attr
		out, _ := cmd.CombinedOutput() // the exit code is looked at
		if code := cmd.ProcessState.ExitCode(); code != want || !strings.Contains(string(out), says) {
			t.Errorf("exit code %d, want %d and %q\n%s", code, want, says, out)
		}
	}
}

// TestAuditDevice holds a model on a device, which the stand-in for the driver has, with and without a bit that
// changes on its way there.
func TestAuditDevice(t *testing.T) {
	lib, err := fakecuda.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, m := residentModel(t)
	base := m.Aggregate.String()
	env := []string{cuda.EnvLibrary + "=" + lib}
	good := hold(t, env, dir, socketIn(t), "--device", "cuda:0")
	good.ends(t, env, cli.CodeOK, "intact", "attach", base, "--check")
	good.ends(t, nil, cli.CodeOK, "intact", "audit", base)
	good.ends(t, []string{cuda.EnvLibrary + "=/no/such/library"}, cli.CodeDevice, "library", "attach", base, "--check")

	bad := hold(t, append(env, "FAKECUDA_FLIP_COPY=2"), dir, socketIn(t), "--device", "cuda:0")
	a, err := bad.client.Attach(t.Context(), m.Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if len(a.Blocks) != 2 || a.Blocks[0].Data != nil || a.Blocks[0].Handle.Kind != attach.KindIPC {
		t.Errorf("%+v", a.Blocks)
	}
	bad.ends(t, env, cli.CodeNo, "not what was published", "attach", base, "--check")
	bad.ends(t, nil, cli.CodeNo, attach.CodeDamaged, "audit", base)
	if e := <-a.Events(); e.Kind != attach.EventDamaged {
		t.Errorf("event %+v", e)
	}
	bad.ends(t, nil, cli.CodeNo, attach.CodeDamaged, "attach", base)
	bad.ends(t, nil, cli.CodeNo, attach.CodeDamaged, "audit", base)
	for _, path := range []string{"/health", "/readyz"} {
		var body json.RawMessage
		if status := ask(t, bad.URL+path, &body); status != http.StatusServiceUnavailable {
			t.Errorf("%s of damaged weights: %d %s", path, status, body)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	if s, err := bad.client.Status(t.Context()); err != nil || !s.Damaged || s.Leases != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := bad.client.Header(t.Context(), m.Aggregate, identity.Digest{}); err == nil {
		t.Error("a header of no shard")
	}
}
