// Package localsock listens on unix sockets that only processes of the same user, and root, can reach. A socket is
// bound under a hidden name first, so that a path on which nothing can listen is found early, and gets its own name
// when there is something to be asked for.
package localsock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPath is how long the path of a socket may be, in bytes: what sun_path holds before its NUL.
const MaxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// The reasons that a caller tells apart with errors.Is.
var (
	ErrTaken  = errors.New("another process listens there")
	ErrFolder = errors.New("not a folder for this user alone")
	ErrPath   = errors.New("no socket can have that path")
)

// Limits on waiting for other processes that are at work on the names of the folder.
const (
	lockPause   = 10 * time.Millisecond
	closingTime = 2 * time.Second
)

// mode is that of the sockets.
const mode = 0o600

// Names of sockets that have not got their own yet.
const hiddenStart, hiddenEnd = ".kiln-", ".new"

// Socket listens. It is a net.Listener. Methods other than Accept are called from one goroutine.
type Socket struct {
	*net.UnixListener
	folder       *os.File
	path         string // of the folder
	hidden, name string // name is empty until Publish
	file         unix.Stat_t
	close        func() error
}

// CheckPath says whether a socket can have a path: ErrPath.
func CheckPath(path string) error {
	if strings.HasPrefix(path, "@") {
		return fmt.Errorf("%w: %s would be in no folder, open to every user; a file is written ./%s", ErrPath, path, path)
	}
	if len(path) > MaxPath {
		return fmt.Errorf("%w: %s has %d bytes, at most %d go", ErrPath, path, len(path), MaxPath)
	}
	return nil
}

// Listen binds a socket in a folder, under a hidden name. The folder is made if only it is missing, with mode 0700.
// One of another user, or that others can enter, is ErrFolder, as is a link. What dead processes left unfinished
// there is removed. While another process is at work on the names of the folder it waits, until ctx ends.
func Listen(ctx context.Context, folder string) (_ *Socket, err error) {
	folder = filepath.Clean(folder)
	s := &Socket{path: folder, hidden: hiddenStart + rand.Text() + hiddenEnd}
	s.close = sync.OnceValue(s.end)
	if s.folder, err = open(folder); err != nil {
		return nil, err
	}
	if err = s.locked(ctx, s.bind); err != nil {
		return nil, errors.Join(fmt.Errorf("listen in %s: %w", folder, err), s.folder.Close())
	}
	return s, nil
}

func open(folder string) (*os.File, error) {
	if err := os.Mkdir(folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	fd, err := unix.Open(folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s: %w: it is a link, or no folder", folder, ErrFolder)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: folder, Err: err}
	}
	f := os.NewFile(uintptr(fd), folder)
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err != nil {
		err = &fs.PathError{Op: "stat", Path: folder, Err: err}
	} else {
		err = private(folder, st, []int{os.Geteuid()})
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// CheckFolder says whether a folder is as Listen wants it, and belongs to one of such user IDs: ErrFolder.
func CheckFolder(folder string, users ...int) error {
	folder = filepath.Clean(folder)
	var st unix.Stat_t
	if err := unix.Lstat(folder, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: folder, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%s: %w: it is a link, or no folder", folder, ErrFolder)
	}
	return private(folder, st, users)
}

func private(folder string, st unix.Stat_t, users []int) error {
	switch {
	case !slices.Contains(users, int(st.Uid)):
		return fmt.Errorf("%s: %w: it belongs to the user ID %d", folder, ErrFolder, st.Uid)
	case st.Mode&0o077 != 0:
		return fmt.Errorf("%s: %w: its mode is %04o, want 0700", folder, ErrFolder, st.Mode&0o7777)
	}
	return nil
}

// locked calls f while no other process is at work on the names of the folder.
func (s *Socket) locked(ctx context.Context, f func() error) error {
	fd := int(s.folder.Fd())
	for {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EWOULDBLOCK) {
			return os.NewSyscallError("flock", err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is locked by another process: %w", s.path, context.Cause(ctx))
		case <-time.After(lockPause):
		}
	}
	err := f()
	return errors.Join(err, os.NewSyscallError("flock", unix.Flock(fd, unix.LOCK_UN)))
}

// at is a path that leads to a name in the folder, whatever becomes of the folder's own path, and is short.
func (s *Socket) at(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", s.folder.Fd(), name)
}

func (s *Socket) bind() error {
	if err := s.sweep(); err != nil {
		return err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.at(s.hidden), Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	s.UnixListener = l
	if err = os.Chmod(s.at(s.hidden), mode); err == nil {
		err = unix.Fstatat(int(s.folder.Fd()), s.hidden, &s.file, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return errors.Join(err, os.Remove(s.at(s.hidden)), l.Close())
	}
	return nil
}

// sweep removes the hidden names of processes that ended before they published.
func (s *Socket) sweep() error {
	names, err := os.ReadDir(s.at("."))
	if err != nil {
		return err
	}
	for _, e := range names {
		if !strings.HasPrefix(e.Name(), hiddenStart) || !strings.HasSuffix(e.Name(), hiddenEnd) {
			continue
		}
		if alive, err := s.alive(e.Name()); err == nil && !alive {
			_ = os.Remove(s.at(e.Name())) // the next one tries again
		}
	}
	return nil
}

// alive says whether a process listens on a name. A name that is there and no socket is an error.
func (s *Socket) alive(name string) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstatat(int(s.folder.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, err
	case st.Mode&unix.S_IFMT != unix.S_IFSOCK:
		return false, fmt.Errorf("%w: what is there is no socket", ErrPath)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: s.at(name)})
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return true, nil
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, os.NewSyscallError("connect", err)
}

// Free says whether Publish could take a name now: ErrTaken where a process listens on it, ErrPath where no socket
// can have it. What a dead process left does not count.
func (s *Socket) Free(name string) error {
	path := filepath.Join(s.path, name)
	if err := CheckPath(path); err != nil {
		return err
	}
	alive, err := s.alive(name)
	switch {
	case err != nil:
		return fmt.Errorf("listen on %s: %w", path, err)
	case alive:
		return fmt.Errorf("listen on %s: %w", path, ErrTaken)
	}
	return nil
}

// Publish gives the socket its name, in place of one that a dead process left. Errors are those of Free, and that ctx
// has ended while another process was at work on the names of the folder.
func (s *Socket) Publish(ctx context.Context, name string) error {
	return s.locked(ctx, func() error {
		if err := s.Free(name); err != nil {
			return err
		}
		if err := os.Rename(s.at(s.hidden), s.at(name)); err != nil {
			return fmt.Errorf("listen on %s: %w", filepath.Join(s.path, name), err)
		}
		s.name = name
		return nil
	})
}

// Path is the path of the socket, empty before Publish.
func (s *Socket) Path() string {
	if s.name == "" {
		return ""
	}
	return filepath.Join(s.path, s.name)
}

// Close removes the name, if it is still this socket's, and ends listening. A second Close does nothing. It leaves the
// name, which is an error, when another process is at work on the names of the folder for longer than two seconds.
func (s *Socket) Close() error { return s.close() }

func (s *Socket) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), closingTime)
	defer cancel()
	err := s.locked(ctx, s.remove)
	return errors.Join(err, s.UnixListener.Close(), s.folder.Close())
}

func (s *Socket) remove() error {
	name := s.hidden
	if s.name != "" {
		name = s.name
	}
	var st unix.Stat_t
	err := unix.Fstatat(int(s.folder.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || err == nil && (st.Ino != s.file.Ino || st.Dev != s.file.Dev) {
		return nil
	}
	if err == nil {
		err = os.Remove(s.at(name))
	}
	return err
}

// Peer returns the user ID of the process at the other end of a connection: on the side that accepted it that of who
// connected, on the other that of who listens.
func Peer(c syscall.Conn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var fault error
	err = raw.Control(func(fd uintptr) {
		cred, fault = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, fault); err != nil {
		return 0, fmt.Errorf("read who is at the other end of the socket: %w", err)
	}
	return int(cred.Uid), nil
}

// Unread returns 0 once the other end of a connection has read all that was sent to it, descriptors included.
func Unread(c syscall.Conn) (n int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	fault := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	if err = errors.Join(err, fault); err != nil {
		return 0, fmt.Errorf("read what lies on the socket: %w", err)
	}
	return n, nil
}
