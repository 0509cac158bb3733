package attach_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// TestFolderOfOthers puts a holder where the client looks by itself, in folders that are not one user's alone.
func TestFolderOfOthers(t *testing.T) {
	d := hostDocument(t)
	c := holder(t, func(c *net.UnixConn, r *bufio.Reader) { c.Write([]byte("HTTP/1.1 404 X\r\n\r\n")) })
	parent, err := os.MkdirTemp("/tmp", "kiln") // short enough for the name of a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(parent)
	folder, link := filepath.Join(parent, "f"), filepath.Join(parent, "l")
	err = errors.Join(os.Mkdir(folder, 0o700), os.Symlink(folder, link),
		os.Symlink(c.Socket, filepath.Join(folder, attach.SocketName(d.Aggregate))))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		folder string
		mode   os.FileMode
		want   error
	}{
		{folder, 0o700, nil},
		{folder, 0o750, localsock.ErrFolder},
		{folder, 0o777, localsock.ErrFolder},
		{link, 0o700, localsock.ErrFolder},
		{filepath.Join(parent, "none"), 0o700, attach.ErrNone},
	} {
		if err := os.Chmod(folder, tt.mode); err != nil {
			t.Fatal(err)
		}
		t.Setenv("RUNTIME_DIRECTORY", tt.folder)
		_, attached := attach.Client{}.Attach(t.Context(), d.Aggregate)
		for i, err := range []error{attached, attach.Client{}.Release(t.Context(), d.Aggregate)} {
			asked := !errors.Is(err, localsock.ErrFolder) && !errors.Is(err, attach.ErrNone)
			if err == nil || asked != (tt.want == nil) || !asked && !errors.Is(err, tt.want) {
				t.Errorf("request %d in %s of mode %o: %v, want %v", i, tt.folder, tt.mode, err, tt.want)
			}
		}
	}
}

// TestBusy has a holder answer before it is asked, and hang up.
func TestBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			const body = `{"error":"many","code":"RESIDENT_BUSY"}`
			fmt.Fprintf(c, "HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			c.Close()
		}
	}()
	c, a := attach.Client{Socket: path}, hostDocument(t).Aggregate
	for range 100 { // the client is sometimes faster, sometimes slower
		_, attached := c.Attach(t.Context(), a)
		for i, err := range []error{attached, c.Release(t.Context(), a)} {
			if !errors.Is(err, attach.Refuse(attach.CodeBusy, "")) || !strings.Contains(err.Error(), path) {
				t.Fatalf("request %d: %v", i, err)
			}
		}
	}
	l.Close()
	<-done
}

// TestFlood has a holder send descriptors that nobody asked for.
func TestFlood(t *testing.T) {
	d := hostDocument(t)
	good := memory(t, "0123456789abcdef", sealed)
	fds := make([]int, attach.MaxDescriptors)
	for i := range fds {
		fds[i] = int(good.Fd())
	}
	c := holder(t, func(c *net.UnixConn, _ *bufio.Reader) {
		fmt.Fprint(c, switching, encode(t, d), "\n")
		for range 10 {
			c.WriteMsgUnix([]byte(`{"event":"x"}`+"\n"), unix.UnixRights(fds...), nil)
		}
		io.Copy(io.Discard, c) // until the client has gone
	})
	if _, err := c.Attach(t.Context(), d.Aggregate); err == nil || !strings.Contains(err.Error(), "sent 128 descriptors") {
		t.Errorf("%v", err)
	}
}
