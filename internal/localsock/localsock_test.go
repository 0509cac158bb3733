package localsock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

func listen(t *testing.T, folder string) *localsock.Socket {
	t.Helper()
	s, err := localsock.Listen(t.Context(), folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func names(t *testing.T, folder string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// dead leaves a socket of a process that has ended: a name on which nobody listens.
func dead(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestPublish(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	s := listen(t, folder)
	if got := names(t, folder); len(got) != 1 || !strings.HasPrefix(got[0], ".") || s.Path() != "" {
		t.Errorf("before publication: %q, path %q", got, s.Path())
	}
	dead(t, filepath.Join(folder, "name"))
	if err := s.Publish(t.Context(), "name"); err != nil {
		t.Fatal(err)
	}
	if got := names(t, folder); len(got) != 1 || got[0] != "name" || s.Path() != filepath.Join(folder, "name") {
		t.Errorf("%q, path %q", got, s.Path())
	}
	for path, want := range map[string]os.FileMode{folder: 0o700, s.Path(): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.Path(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	a, err := s.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, end := range []syscall.Conn{c, a.(*net.UnixConn)} {
		if uid, err := localsock.Peer(end); err != nil || uid != os.Geteuid() {
			t.Errorf("user ID %d, %v", uid, err)
		}
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if got := names(t, folder); len(got) != 0 {
		t.Errorf("left: %q", got)
	}
}

// TestOnePublishes has many sockets of one folder ask for one name at once.
func TestOnePublishes(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	var work sync.WaitGroup
	errs := make([]error, 20)
	for i := range errs {
		s := listen(t, folder)
		work.Go(func() { errs[i] = s.Publish(t.Context(), "name") })
	}
	work.Wait()
	published := 0
	for _, err := range errs {
		if err == nil {
			published++
		} else if !errors.Is(err, localsock.ErrTaken) {
			t.Error(err)
		}
	}
	if published != 1 {
		t.Errorf("%d have the name", published)
	}
}

// TestOnlyItsOwn closes a socket whose name another one has by now, and leaves that alone.
func TestOnlyItsOwn(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	s := listen(t, folder)
	if err := s.Publish(t.Context(), "name"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.Path()); err != nil {
		t.Fatal(err)
	}
	next := listen(t, folder)
	if err := next.Publish(t.Context(), "name"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if got := names(t, folder); len(got) != 1 || got[0] != "name" {
		t.Errorf("%q", got)
	}
}

func TestSweep(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	living := listen(t, folder)
	dead(t, filepath.Join(folder, ".kiln-1-1.new"))
	if err := os.WriteFile(filepath.Join(folder, ".kiln-x.new"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	next := listen(t, folder)
	got := names(t, folder)
	if len(got) != 3 || strings.Contains(strings.Join(got, " "), ".kiln-1-1.new") {
		t.Errorf("%q: want two sockets that live, and the file", got)
	}
	for _, s := range []*localsock.Socket{living, next} {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	s := listen(t, filepath.Join(dir, "s"))
	if err := os.WriteFile(filepath.Join(dir, "s", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "wide"), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"file", strings.Repeat("x", localsock.MaxPath)} {
		if err := s.Publish(t.Context(), name); !errors.Is(err, localsock.ErrPath) {
			t.Errorf("%.20s: %v", name, err)
		}
	}
	for _, folder := range []string{filepath.Join(dir, "wide"), filepath.Join(dir, "s", "file"), "/"} {
		if _, err := localsock.Listen(t.Context(), folder); !errors.Is(err, localsock.ErrFolder) {
			t.Errorf("%s: %v", folder, err)
		}
	}
	if _, err := localsock.Listen(t.Context(), filepath.Join(dir, "no", "such")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(filepath.Join(dir, "wide"), 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if _, err := localsock.Listen(t.Context(), filepath.Join(dir, "wide")); !errors.Is(err, localsock.ErrFolder) ||
			!strings.Contains(err.Error(), "65534") {
			t.Errorf("a folder of another user: %v", err)
		}
	}
}

// TestHiddenNames has processes of another PID namespace, which have the same numbers, load into the same folder.
func TestHiddenNames(t *testing.T) {
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		path := filepath.Join(folder, fmt.Sprintf(".kiln-%d-%d.new", os.Getpid(), i))
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	listen(t, folder)
	if n := len(names(t, folder)); n != 101 {
		t.Errorf("%d names, want 101", n)
	}
}

// TestLocked has another process keep the lock of the folder: who waits for it hears of an end.
func TestLocked(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	s := listen(t, folder)
	f, err := os.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	over := errors.New("over")
	go cancel(over)
	if _, err := localsock.Listen(ctx, folder); !errors.Is(err, over) {
		t.Errorf("listen: %v", err)
	}
	if err := s.Publish(ctx, "name"); !errors.Is(err, over) || s.Path() != "" {
		t.Errorf("publish: %v", err)
	}
}
