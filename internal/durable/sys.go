package durable

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Free returns the number of bytes that a process without privileges may still store on the filesystem of path.
func Free(path string) (int64, error) {
	var st unix.Statfs_t
	if err := again(func() error { return unix.Statfs(path, &st) }); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// noteMax is how long a note may be.
const noteMax = 64

func setNote(f *os.File, name, text string) {
	_ = control(f, func(fd int) error { return unix.Fsetxattr(fd, "user."+name, []byte(text), 0) })
}

// Note returns what File.SetNote keeps with the file at path, empty: nothing, or more than a note.
func Note(path, name string) string {
	var b [noteMax]byte
	n, err := unix.Lgetxattr(path, "user."+name, b[:])
	if err != nil {
		return ""
	}
	return string(b[:n])
}

// again calls fn until it is not interrupted by a signal.
func again(fn func() error) error {
	for {
		if err := fn(); err != unix.EINTR {
			return err
		}
	}
}

// control runs fn on the descriptor of f, which stays open meanwhile.
func control(f *os.File, fn func(fd int) error) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	err = c.Control(func(fd uintptr) { ferr = again(func() error { return fn(int(fd)) }) })
	return errors.Join(err, ferr)
}

func dataSync(f *os.File) error {
	if err := control(f, unix.Fdatasync); err != nil {
		return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return nil
}

func reserve(f *os.File, off, n int64) error {
	err := control(f, func(fd int) error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, off, n) })
	if err == nil || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return &os.PathError{Op: "fallocate", Path: f.Name(), Err: err}
}

func link(old, new string) error {
	if !strings.HasPrefix(old, openFiles) {
		return os.Link(old, new)
	}
	err := again(func() error { return unix.Linkat(unix.AT_FDCWD, old, unix.AT_FDCWD, new, unix.AT_SYMLINK_FOLLOW) })
	if err != nil {
		return &os.LinkError{Op: "link", Old: old, New: new, Err: err}
	}
	return nil
}

func renameat2(old, new string, flags uint) error {
	err := again(func() error { return unix.Renameat2(unix.AT_FDCWD, old, unix.AT_FDCWD, new, flags) })
	switch err {
	case nil:
		return nil
	case unix.EINVAL, unix.ENOSYS:
		err = fmt.Errorf("%w by this filesystem (%w)", errors.ErrUnsupported, err)
	}
	return &os.LinkError{Op: "rename", Old: old, New: new, Err: err}
}

// clone shares the blocks of src with dst; an error that is errors.ErrUnsupported says that dst is as it was.
func clone(dst, src *os.File) error {
	err := control(dst, func(d int) error {
		return control(src, func(s int) error { return unix.IoctlFileClone(d, s) })
	})
	for _, no := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EXDEV, unix.EINVAL, unix.ENOSYS, unix.EPERM} {
		if errors.Is(err, no) {
			return fmt.Errorf("%w by this filesystem (%w)", errors.ErrUnsupported, err)
		}
	}
	return err
}
