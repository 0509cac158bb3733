package attach_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// holder answers one connection after the other with what a test makes of it.
func holder(t *testing.T, answer func(*net.UnixConn, *bufio.Reader)) attach.Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			r := bufio.NewReader(c)
			if _, err := http.ReadRequest(r); err == nil {
				answer(c, r)
			}
			c.Close()
		}
	})
	t.Cleanup(func() {
		l.Close()
		done.Wait()
	})
	return attach.Client{Socket: path}
}

const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: kiln-attach\r\n\r\n"

// memory makes a file in memory with such bytes and seals.
func memory(t *testing.T, text string, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("attach-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "attach-test")
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK

// hostDocument is that of one shard with data in host memory.
func hostDocument(t *testing.T) attach.Document {
	t.Helper()
	d := document(t)
	zero := 0
	s := d.Shards[1]
	s.IPC = &attach.IPC{Kind: attach.KindFile, Descriptor: &zero}
	m, err := identity.New([]identity.Shard{{Filename: s.Name, Size: uint64(s.Size), Digest: s.Digest}})
	if err != nil {
		t.Fatal(err)
	}
	d.Shards, d.Aggregate, d.Tensors = []attach.Shard{s}, m.Aggregate, d.Tensors[:1]
	return d
}

// give answers a line that asks for descriptors with a line and files.
func give(c *net.UnixConn, r *bufio.Reader, line string, files ...*os.File) {
	if _, err := r.ReadString('\n'); err != nil {
		return
	}
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	c.WriteMsgUnix([]byte(line+"\n"), unix.UnixRights(fds...), nil)
}

const first = `{"descriptors":{"first":0,"count":1}}`

// TestAttachRefuses gives a client memory and lines that it must not take.
func TestAttachRefuses(t *testing.T) {
	d := hostDocument(t)
	text := encode(t, d)
	good := memory(t, "0123456789abcdef", sealed)
	plain, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plain.Close() })
	for name, tt := range map[string]struct {
		document, line string
		files          []*os.File
		want           error
		says           string
	}{
		"no seal":         {text, first, []*os.File{memory(t, "0123456789abcdef", 0)}, attach.ErrSeal, ""},
		"may be cut":      {text, first, []*os.File{memory(t, "0123456789abcdef", unix.F_SEAL_WRITE)}, attach.ErrSeal, ""},
		"may be written":  {text, first, []*os.File{memory(t, "0123456789abcdef", unix.F_SEAL_SHRINK)}, attach.ErrSeal, ""},
		"a file":          {text, first, []*os.File{plain}, attach.ErrSeal, "no file in memory"},
		"short":           {text, first, []*os.File{memory(t, "0123456789abcde", sealed)}, nil, "15 bytes"},
		"no descriptor":   {text, first, nil, nil, "with 0"},
		"two descriptors": {text, first, []*os.File{good, good}, nil, "with 2"},
		"others":          {text, `{"descriptors":{"first":1,"count":1}}`, []*os.File{good}, nil, "1+1"},
		"no JSON":         {text, `nonsense`, []*os.File{good}, nil, "invalid"},
		"an error":        {text, `{"error":"no","code":"RESIDENT_FAILED"}`, nil, attach.Refuse("RESIDENT_FAILED", ""), "no"},
		"a long line":     {text, strings.Repeat("x", 80<<10), nil, nil, "more than"},
		"no document":     {`{}`, "", nil, attach.ErrDocument, ""},
		"other base":      {encode(t, document(t)), "", nil, attach.ErrDocument, d.Aggregate.String()},
		"no lease": {strings.NewReplacer(`"lease":{"id":"x","mode":"zero_copy"}`, `"lease":null`,
			`"ipc":{"kind":"memfd","descriptor":0,"offset":0}`, `"ipc":null`).Replace(text), "", nil, attach.ErrDocument, "no lease"},
	} {
		c := holder(t, func(c *net.UnixConn, r *bufio.Reader) {
			fmt.Fprint(c, switching, tt.document, "\n")
			give(c, r, tt.line, tt.files...)
		})
		a, err := c.Attach(t.Context(), d.Aggregate)
		if err == nil {
			t.Errorf("%s: attached", name)
			a.Close()
		} else if tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %v and %q", name, err, tt.want, tt.says)
		}
	}
}

// TestAttachEvents attaches to a holder that tells of more than the client reads, before and after the descriptors.
func TestAttachEvents(t *testing.T) {
	d := hostDocument(t)
	d.Shards[0].IPC.Offset = int64(os.Getpagesize())
	good := memory(t, strings.Repeat("x", os.Getpagesize())+"0123456789abcdef", sealed)
	sent := make(chan struct{})
	c := holder(t, func(c *net.UnixConn, r *bufio.Reader) {
		fmt.Fprint(c, switching, encode(t, d), "\n", `{"event":"generation","generation":2}`, "\n")
		give(c, r, first, good)
		for i := range 100 {
			fmt.Fprintf(c, `{"event":"generation","generation":%d}`+"\n", 3+i)
		}
		fmt.Fprint(c, `{"event":"new"}`+"\n"+`{"event":"draining","grace_seconds":2.5}`+"\n")
		close(sent)
	})
	a, err := c.Attach(t.Context(), d.Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if got := string(a.Bytes(d.Tensors[0])); got != "0123456789abcdef" {
		t.Errorf("%q", got)
	}
	<-sent
	var last attach.Event
	n := 0
	for e := range a.Events() { // ends as the holder has gone
		last = e
		n++
	}
	if last != (attach.Event{Kind: attach.EventDraining, Grace: 2.5}) || n == 0 {
		t.Errorf("the last of %d events is %+v", n, last)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

// TestDescriptorsDoNotFit attaches in a process that may have no more descriptors.
func TestDescriptorsDoNotFit(t *testing.T) {
	d := hostDocument(t)
	good := memory(t, "0123456789abcdef", sealed)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: old.Cur, Max: old.Max})
	c := holder(t, func(c *net.UnixConn, r *bufio.Reader) {
		fmt.Fprint(c, switching, encode(t, d), "\n")
		next, err := unix.Dup(0)
		if err != nil {
			return
		}
		unix.Close(next)
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(next), Max: old.Max})
		give(c, r, first, good)
		r.ReadByte() // until the client has gone
	})
	a, err := c.Attach(t.Context(), d.Aggregate)
	if err == nil {
		a.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("%v", err)
	}
}

func TestAttachEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := holder(t, func(c *net.UnixConn, r *bufio.Reader) {
		fmt.Fprint(c, switching)
		cancel()
		r.ReadByte() // until the client has gone
	})
	if _, err := c.Attach(ctx, hostDocument(t).Aggregate); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestRequestsRefused(t *testing.T) {
	a := hostDocument(t).Aggregate
	body, err := json.Marshal(attach.Refuse(attach.CodeDraining, "it ends"))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		answer string
		want   error
		says   string
	}{
		"refused": {"HTTP/1.1 503 X\r\nConnection: close\r\n\r\n" + string(body), attach.Refuse(attach.CodeDraining, ""), "it ends"},
		"a page":  {"HTTP/1.1 404 X\r\nConnection: close\r\n\r\n<html>", nil, "<html>"},
		"no HTTP": {"hello\r\n", nil, "malformed"},
		"nothing": {"", nil, "EOF"},
	} {
		c := holder(t, func(c *net.UnixConn, _ *bufio.Reader) { fmt.Fprint(c, tt.answer) })
		_, attached := c.Attach(t.Context(), a)
		_, audited := c.Audit(t.Context(), a)
		for _, err := range []error{attached, audited} {
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := (attach.Client{Socket: filepath.Join(t.TempDir(), "none")}).Attach(t.Context(), a); !errors.Is(err, attach.ErrNone) {
		t.Errorf("%v", err)
	}
	if _, err := (attach.Client{Socket: "/" + strings.Repeat("x", 107)}).Status(t.Context()); !errors.Is(err, localsock.ErrPath) {
		t.Errorf("%v", err)
	}
}

func TestFolder(t *testing.T) {
	t.Setenv("RUNTIME_DIRECTORY", "/run/kiln:/run/other")
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	if got := attach.Folder(); got != "/run/kiln" {
		t.Error(got)
	}
	t.Setenv("RUNTIME_DIRECTORY", "")
	if got := attach.Folder(); got != "/run/user/7/kiln" {
		t.Error(got)
	}
	t.Setenv("RUNTIME_DIRECTORY", "run/kiln")
	t.Setenv("XDG_RUNTIME_DIR", "run")
	if got, want := attach.Folder(), fmt.Sprintf("/tmp/kiln-%d", os.Getuid()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
