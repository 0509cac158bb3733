package resident_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
)

// connect opens a connection and sends the start of a request.
func connect(t *testing.T, network, address, text string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestSilentConnections stops a server to which others have connected who say nothing, or half of something.
func TestSilentConnections(t *testing.T) {
	s := &resident.Server{}
	r, c := attached(t, s)
	s.Drain = time.Millisecond
	address := strings.TrimPrefix(r.url, "http://")
	for i := range 100 {
		half := [3]string{"", "GET /v1/res", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"}[i%3]
		connect(t, "unix", c.Socket, half)
		connect(t, "tcp", address, half)
	}
	found, err := c.Free(t.Context(), r.aggregate())
	if err != nil || found != (attach.Released{State: gpuload.Freed}) {
		t.Errorf("%+v, %v", found, err)
	}
	if err := r.wait(); err != nil {
		t.Error(err)
	}
}

// TestNoTimeToDrain stops servers that nobody is attached to, without a moment to wait.
func TestNoTimeToDrain(t *testing.T) {
	load := loadModel(t)
	for range 10 {
		s := &resident.Server{}
		r, c := attachedTo(t, s, load)
		s.Drain = 0
		if err := c.Release(t.Context(), r.aggregate()); err != nil {
			t.Error(err)
		}
		if err := r.wait(); err != nil {
			t.Error(err)
		}
	}
}

// TestFreeTells says how many leases were cut off.
func TestFreeTells(t *testing.T) {
	s := &resident.Server{}
	r, c := attached(t, s)
	s.Drain = time.Millisecond
	for range 2 {
		a, err := c.Attach(t.Context(), r.aggregate())
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
	}
	found, err := c.Free(t.Context(), r.aggregate())
	if err != nil || found != (attach.Released{State: gpuload.Freed, CutOff: 2}) {
		t.Errorf("%+v, %v", found, err)
	}
	if err := r.wait(); !errors.Is(err, resident.ErrLeased) || err.Error() != "drain: 2 leases were cut off after 1ms" {
		t.Errorf("%v", err)
	}
}

// TestManyProbes connects to the address for probes more often than it takes.
func TestManyProbes(t *testing.T) {
	s := &resident.Server{}
	r, c := attached(t, s)
	address := strings.TrimPrefix(r.url, "http://")
	var last net.Conn
	for range 300 {
		last = connect(t, "tcp", address, "")
	}
	answer, err := io.ReadAll(last)
	if err != nil || !strings.Contains(string(answer), " 503 ") || s.Snapshot().Refused[attach.CodeBusy] == 0 {
		t.Errorf("%q, %v", answer, err)
	}
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// TestMethods asks by methods that are not meant.
func TestMethods(t *testing.T) {
	s := &resident.Server{Metrics: http.NotFoundHandler()}
	r, c := attached(t, s)
	if a := r.ask(t, "POST", "/metrics", ""); a.status != http.StatusMethodNotAllowed || a.header.Get("Allow") != "GET, HEAD" {
		t.Errorf("POST /metrics: %d", a.status)
	}
	conn := connect(t, "unix", c.Socket, fmt.Sprintf(
		"HEAD %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: kiln-attach\r\n\r\n", attach.Path(r.aggregate())))
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 200 ") || s.Snapshot().Attaches != 0 {
		t.Errorf("HEAD with Upgrade: %q, %v", answer, err)
	}
}
