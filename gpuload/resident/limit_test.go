package resident

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// TestLimit opens more connections than a socket takes. One that was closed makes room.
func TestLimit(t *testing.T) {
	s, err := localsock.Listen(filepath.Join(t.TempDir(), "s"))
	if err == nil {
		err = s.Publish("x")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := &limited{s, make(chan struct{}, 2)}
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
