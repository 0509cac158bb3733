package durable

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrLocked: another process, or this one, holds the lock.
var ErrLocked = errors.New("in use")

// Lock is held by at most one process of the machine, and given back by the kernel when that process dies.
type Lock struct{ f *os.File }

// Acquire takes the lock that the file at path stands for, and makes the file if there is none. It does not wait: if
// the lock is taken, the error is ErrLocked and names the process. The file stays when the lock is released. Not for
// network filesystems.
func Acquire(path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	err = control(f, func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w by %s", ErrLocked, holder(f))
	}
	if err == nil {
		err = sign(f)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &Lock{f}, nil
}

func holder(f *os.File) string {
	b, err := io.ReadAll(io.LimitReader(f, 32))
	pid := strings.TrimSpace(string(b))
	if _, bad := strconv.Atoi(pid); err != nil || bad != nil {
		return "another process"
	}
	return "pid " + pid
}

func sign(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// Release gives the lock back. It is called once. The unlock is explicit because a child of this process that is being
// started at this moment may hold the file open for a while longer.
func (l *Lock) Release() error {
	err := control(l.f, func(fd int) error { return unix.Flock(fd, unix.LOCK_UN) })
	return errors.Join(err, l.f.Close())
}
