package attach_test

import (
	"bufio"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

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
