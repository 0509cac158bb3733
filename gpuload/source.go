package gpuload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Source is where the shard files are read from. Open is called from several goroutines at once.
type Source interface {
	Open(ctx context.Context, name string) (File, error)
}

// File is one open shard file, used by one goroutine at a time. A File that also has Align() int64 is read at offsets
// that are multiples of it, into buffers that start at such an address and have such a length. Align is a power of two
// of at most 4096.
type File interface {
	io.ReaderAt
	Stamp() (Stamp, error)
	Close() error
}

// Stamp tells one state of a file from another. A source that knows only the size leaves the rest at zero. The time of
// the last status change is left out: it changes when somebody makes another link to the file.
type Stamp struct {
	Size          int64
	Device, Inode uint64
	Modified      int64 // nanoseconds since 1970
}

// directAlign is the alignment that O_DIRECT is given: the largest logical block size of common disks, and a page.
const directAlign = 4096

// Dir reads shard files that lie directly in one directory. It follows no link but the one that its own path may be.
// Safe for concurrent use. Made by OpenDir.
type Dir struct {
	dir     *os.File
	notify  func(string)
	direct  atomic.Bool
	refused atomic.Bool
}

// OpenDir opens the directory path. direct asks for reads past the page cache (O_DIRECT); where the filesystem has
// none, files are read the usual way and notify, which may be nil, is told once.
func OpenDir(path string, direct bool, notify func(string)) (*Dir, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open the model directory: %w", err)
	}
	d := &Dir{dir: f, notify: notify}
	d.direct.Store(direct)
	return d, nil
}

// Close closes the directory. Files opened before stay open.
func (d *Dir) Close() error { return d.dir.Close() }

// Open opens a regular file of the directory. A link, folder, pipe or device is refused.
func (d *Dir) Open(_ context.Context, name string) (File, error) {
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	if d.direct.Load() {
		if err := setDirect(f); err == nil {
			return &directFile{plainFile{f}}, nil
		} else {
			d.withoutDirect(err)
		}
	}
	// Advice only: a filesystem that takes none reads as well.
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_SEQUENTIAL)
	return &plainFile{f}, nil
}

// setDirect turns O_DIRECT on and tries one read, because some filesystems take the flag and refuse the read.
func setDirect(f *os.File) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFL, flags|unix.O_DIRECT); err != nil {
		return err
	}
	b, err := mapBuffer(directAlign)
	if err != nil {
		return err
	}
	_, err = f.ReadAt(b, 0)
	if err = errors.Join(ignoreEOF(err), unix.Munmap(b)); err == nil {
		return nil
	}
	_, back := unix.FcntlInt(f.Fd(), unix.F_SETFL, flags)
	return errors.Join(err, back)
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (d *Dir) withoutDirect(err error) {
	d.direct.Store(false)
	if d.refused.CompareAndSwap(false, true) && d.notify != nil {
		d.notify(fmt.Sprintf("%s: no direct I/O here, reading through the page cache (%v)", d.dir.Name(), err))
	}
}

func (d *Dir) open(name string) (*os.File, error) {
	fd, err := unix.Openat(int(d.dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("open shard %s: is a symbolic link, want a regular file", name)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open shard", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(&os.PathError{Op: "stat shard", Path: name, Err: err}, f.Close())
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.Join(fmt.Errorf("open shard %s: is no regular file", name), f.Close())
	}
	return f, nil
}

type plainFile struct{ *os.File }

func (f *plainFile) Stamp() (Stamp, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Stamp{}, &os.PathError{Op: "stat shard", Path: f.Name(), Err: err}
	}
	return Stamp{st.Size, uint64(st.Dev), st.Ino, st.Mtim.Nano()}, nil
}

type directFile struct{ plainFile }

func (f *directFile) Align() int64 { return directAlign }

// ReadAt asks no more once a read ended between two multiples of the alignment: that is the end of the file.
func (f *directFile) ReadAt(b []byte, off int64) (n int, err error) {
	for n < len(b) {
		m, err := unix.Pread(int(f.Fd()), b[n:], off+int64(n))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return n, &os.PathError{Op: "read shard", Path: f.Name(), Err: err}
		case m == 0 || m%directAlign != 0:
			return n + m, io.EOF
		default:
			n += m
		}
	}
	return n, nil
}
