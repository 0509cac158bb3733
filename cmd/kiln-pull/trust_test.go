package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// TestHolderOfOther attaches to the holder of another user, where there is one to become: also root does so only when
// it names that user.
func TestHolderOfOther(t *testing.T) {
	model, m := residentModel(t)
	open, err := os.MkdirTemp("/tmp", "kiln") // the parents of t.TempDir are closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(open)
	dir, folder := filepath.Join(open, "model"), filepath.Join(open, "s")
	if err := os.CopyFS(dir, os.DirFS(model)); err != nil {
		t.Fatal(err)
	}
	code, attr := cli.CodeOK, new(syscall.SysProcAttr)
	other := os.Geteuid()
	if other == 0 {
		code, other = cli.CodeDenied, 65534
		attr.Credential = &syscall.Credential{Uid: uint32(other), Gid: uint32(other)}
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{open, dir} {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(folder, other, -1); err != nil {
		t.Fatal(err)
	}
	base := m.Aggregate.String()
	socket := filepath.Join(folder, m.Aggregate.Hex()+".sock")
	h := holdAs(t, nil, attr, dir, socket, "--device", "host")
	for _, command := range []string{"attach", "audit", "release"} {
		for _, env := range []string{"", "RUNTIME_DIRECTORY=" + folder} {
			args := []string{command, base}
			if env == "" {
				args = append(args, "--socket", socket)
			}
			if code == cli.CodeOK {
				break // there is no other user
			}
			p := begin(t, []string{env}, args...)
			if got := p.code(); got != code || !strings.Contains(p.stderr.String(), "65534") {
				t.Errorf("%q: exit code %d, want %d\n%s", args, got, code, p.stderr)
			}
		}
	}
	for _, args := range [][]string{{"attach", base, "--check"}, {"audit", base}, {"release", base}} {
		p := begin(t, []string{"RUNTIME_DIRECTORY=" + folder}, append(args, "--holder-uid", strconv.Itoa(other))...)
		if got := p.code(); got != cli.CodeOK {
			t.Errorf("%q: exit code %d\n%s", args, got, p.stderr)
		}
	}
	if got := h.code(); got != cli.CodeOK {
		t.Errorf("the holder: exit code %d\n%s", got, h.stderr)
	}
}

// TestReleaseCutsOff releases a model while a process that does not hear of it has it attached.
func TestReleaseCutsOff(t *testing.T) {
	dir, m := residentModel(t)
	base := m.Aggregate.String()
	h := hold(t, nil, dir, socketIn(t), "--device", "host", "--drain-timeout", "10ms")
	kept := begin(t, nil, "attach", base, "--socket", h.Socket)
	kept.line(t)
	if err := kept.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	h.ends(t, nil, cli.CodeOK, "released; 1 lease was cut off: "+base, "release", base)
	const said = "drain: 1 lease was cut off after 10ms\n"
	if got := h.code(); got != cli.CodeNo || !strings.Contains(h.stderr.String(), said) {
		t.Errorf("the holder: exit code %d\n%s", got, h.stderr)
	}
}

// TestStoppedHolder asks a holder that does not answer.
func TestStoppedHolder(t *testing.T) {
	dir, m := residentModel(t)
	h := hold(t, nil, dir, socketIn(t), "--device", "host")
	if err := h.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	base := m.Aggregate.String()
	for _, args := range [][]string{
		{"attach", base}, {"attach", base, "--check"}, {"audit", base}, {"release", base}, {"adapter", "list", base},
		{"adapter", "load", base, "x"},
	} {
		h.ends(t, nil, cli.CodeUnreachable, "no answer within 20ms", append(args, "--timeout", "20ms")...)
	}
}

// TestDescriptorsNotTaken has clients leave so many descriptors lying that the kernel passes no more on, which binds
// users without privileges: another one is told so, and is let in once they are gone.
func TestDescriptorsNotTaken(t *testing.T) {
	from, m := residentModel(t)
	dir := t.TempDir()
	attr := new(syscall.SysProcAttr)
	if os.Geteuid() == 0 {
		attr.Credential = &syscall.Credential{Uid: 65533, Gid: 65533}
		var err error
		if dir, err = os.MkdirTemp("/tmp", "kiln"); err != nil { // the parents of t.TempDir are closed to others
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		if err := os.Chown(dir, 65533, -1); err != nil {
			t.Fatal(err)
		}
	}
	model, program := filepath.Join(dir, "model"), filepath.Join(dir, "kiln-pull")
	self, err := os.ReadFile("/proc/self/exe")
	err = errors.Join(err, os.CopyFS(model, os.DirFS(from)), os.Chmod(model, 0o755), os.WriteFile(program, self, 0o755))
	if err != nil {
		t.Fatal(err)
	}
	h := &keeper{client: attach.Client{Socket: filepath.Join(dir, "s", "x.sock"), HolderUID: 65533}}
	cmd := exec.Command("sh", "-c", `ulimit -n 100; exec "$0" "$@"`, program, "resident", model, "--device", "host",
		"--listen", "127.0.0.1:0", "--socket", h.client.Socket)
	cmd.SysProcAttr = attr
	h.started = startCommand(t, cmd)
	h.line(t)
	var lazy []net.Conn
	for range 60 { // two descriptors each
		c, err := net.Dial("unix", h.client.Socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		lazy = append(lazy, c)
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: kiln-attach\r\n\r\n",
			attach.Path(m.Aggregate))
		lines := bufio.NewReader(c)
		for line := ""; !strings.HasPrefix(line, "{"); {
			if line, err = lines.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range lazy {
		if _, err := io.WriteString(c, `{"descriptors":{"first":0,"count":2}}`+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"attach", m.Aggregate.String(), "--check", "--holder-uid", "65533"}
	h.ends(t, nil, cli.CodeTryAgain, attach.CodeBusy, args...)
	for _, c := range lazy {
		c.Close()
	}
	waitFor(t, func() bool { return h.leases(t) == 0 })
	h.ends(t, nil, cli.CodeOK, "intact", args...)
}

// TestPlaces names sockets and addresses in ways that are refused, or changed.
func TestPlaces(t *testing.T) {
	dir, _ := residentModel(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Chdir(t.TempDir())
	for _, tt := range []struct{ flag, value, says string }{
		{"--socket", "@x", "abstract socket"},
		{"--listen", l.Addr().String(), "hint: another process has it: name another --listen"},
		{"--listen", "nonsense", "hint: --listen names"},
		{"--socket", "s/" + strings.Repeat("x", 100), "hint: --socket"},
	} {
		p := begin(t, nil, "resident", dir, "--device", "host", "--listen", "127.0.0.1:0", tt.flag, tt.value)
		got := p.code()
		said := p.stderr.String()
		if got != cli.CodeUsage || !strings.Contains(said, tt.says) || strings.Contains(said, "registry") ||
			strings.Contains(said, "listen: listen") {
			t.Errorf("%s %s: exit code %d\n%s", tt.flag, tt.value, got, said)
		}
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	p := startResident(t, dir, "--device", "host", "--socket", "s/x.sock")
	if p.Socket != filepath.Join(here, "s", "x.sock") {
		t.Errorf("announced %s", p.Socket)
	}
}
