package resident

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// limitedSocket is a socket that takes two connections at a time.
func limitedSocket(t *testing.T) (*localsock.Socket, *limited) {
	t.Helper()
	s, err := localsock.Listen(t.Context(), filepath.Join(t.TempDir(), "s"))
	if err == nil {
		err = s.Publish(t.Context(), "x")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, new(Server).limit(s, 2)
}

// TestLimit opens more connections than a socket takes. One that was closed makes room.
func TestLimit(t *testing.T) {
	s, l := limitedSocket(t)
	dial := func() net.Conn {
		c, err := net.Dial("unix", s.Path())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	accept := func() net.Conn {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	first := accept()
	dial()
	accept()
	third := dial()
	accepted := make(chan net.Conn)
	go func() { accepted <- accept() }()
	resp, err := http.ReadResponse(bufio.NewReader(third), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), attach.CodeBusy) {
		t.Errorf("%d %s, %v", resp.StatusCode, body, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	first.Close() // counts once
	dial()
	<-accepted
	if n := len(l.places); n != 2 {
		t.Errorf("%d connections count, want 2", n)
	}
}

// TestDamage tells what an audit found from what kept it from finding anything.
func TestDamage(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{&gpuload.Error{Shard: "a", Expected: "x", Got: "y", Err: gpuload.ErrDevice}, true},
		{&gpuload.Error{Shard: "a", Err: gpuload.ErrDevice}, false},
		{&gpuload.Error{Shard: "a", Err: gpuload.ErrHung}, false},
		{fmt.Errorf("audit: %w", &gpuload.Error{Shard: "a", Err: &cuda.Error{Call: "cuMemcpyDtoHAsync", Code: 214}}), true},
		{&gpuload.Error{Shard: "a", Err: &cuda.Error{Call: "cuMemcpyDtoHAsync", Code: 700}}, true},
		{&gpuload.Error{Shard: "a", Err: &cuda.Error{Call: "cuMemcpyDtoHAsync", Code: 2}}, false},
		{syscall.ENOMEM, false},
		{gpuload.ErrState, false},
	} {
		if got := isDamage(tt.err); got != tt.want {
			t.Errorf("%v: %t", tt.err, got)
		}
	}
}

// TestPatience writes to a client that takes nothing: the lease ends, at last or when too many events wait.
func TestPatience(t *testing.T) {
	s, l := limitedSocket(t)
	open := func() *stream {
		c, err := net.Dial("unix", s.Path())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		return &stream{conn: a.(*connection), events: make(chan attach.Event, waiting), patience: time.Millisecond}
	}
	if err := open().line(make([]byte, 64<<20), nil); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a line that nobody takes: %v", err)
	}
	var all leases
	slow := open()
	if !all.add(slow) {
		t.Fatal("no lease")
	}
	for range waiting {
		all.tell(attach.Event{Kind: attach.EventDamaged})
	}
	if err := slow.conn.SetDeadline(time.Time{}); err != nil {
		t.Errorf("the lease has ended early: %v", err)
	}
	all.tell(attach.Event{Kind: attach.EventDamaged})
	if err := slow.conn.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the lease has not ended: %v", err)
	}
	all.remove(slow)
	all.refuse()
	if all.add(slow) {
		t.Error("a lease after the last one")
	}
}

// TestDescriptorsLieAround asks for descriptors and does not take them: the lease ends. None goes twice.
func TestDescriptorsLieAround(t *testing.T) {
	sock, err := localsock.Listen(t.Context(), filepath.Join(t.TempDir(), "s"))
	if err == nil {
		err = sock.Publish(t.Context(), "x")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	l := new(Server).limit(sock, 2)
	open := func(patience time.Duration) (*net.UnixConn, *stream) {
		c, err := net.Dial("unix", sock.Path())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		return c.(*net.UnixConn), &stream{
			conn: a.(*connection), r: bufio.NewReader(a), patience: patience,
			files: []*os.File{os.Stdout, os.Stderr}, asked: make([]bool, 2),
		}
	}
	const both = `{"descriptors":{"first":0,"count":2}}` + "\n"
	lazy, t1 := open(time.Millisecond)
	if _, err := io.WriteString(lazy, both); err != nil {
		t.Fatal(err)
	}
	if e := t1.serve(); e != nil { // which ends although the connection is open
		t.Errorf("%v", e)
	}
	taking, t2 := open(time.Minute)
	if _, err := io.WriteString(taking, both+`{"descriptors":{"first":1,"count":1}}`+"\n"); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, taking)
	if e := t2.serve(); e == nil || e.Code != attach.CodeBadRequest {
		t.Errorf("a descriptor was sent twice: %v", e)
	}
}

// TestAttachAsItEnds has a request come between the last lease and the end of the socket.
func TestAttachAsItEnds(t *testing.T) {
	sock, err := localsock.Listen(t.Context(), filepath.Join(t.TempDir(), "s"))
	if err == nil {
		err = sock.Publish(t.Context(), "x")
	}
	if err != nil {
		t.Fatal(err)
	}
	s := new(Server)
	s.leases.refuse()
	server := s.localServer(t.Context())
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.answer(w, r, func(w http.ResponseWriter, r *http.Request, _ *Held) error {
			return s.lease(w, r, new(granted))
		})
	})
	ended := make(chan error)
	go func() { ended <- server.Serve(s.limit(sock, 2)) }()
	_, err = attach.Client{Socket: sock.Path()}.Attach(t.Context(), identity.Aggregate{1})
	if !errors.Is(err, attach.Refuse(attach.CodeDraining, "")) || s.Snapshot().Refused[attach.CodeDraining] != 1 {
		t.Errorf("%v", err)
	}
	server.Close()
	<-ended
	if err := sock.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
