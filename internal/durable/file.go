package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// PieceSize is the number of bytes of one read or write of bulk data: 256 KiB fits the second-level cache, and larger
// writes were seen to cost several times the system time.
const PieceSize = 256 << 10

// File is an open file whose changes go through its Disk. Reads and writes at offsets, Sync and Size may run
// concurrently.
type File struct {
	d Disk
	f *os.File
}

// OpenFile opens a file as os.OpenFile does, if it is a regular one: neither a link nor what could make a reader wait,
// as a pipe does.
func (d Disk) OpenFile(path string, flag int, mode fs.FileMode) (*File, error) {
	var f *os.File
	open := func() (err error) {
		f, err = OpenRegular(path, flag, mode)
		return err
	}
	var err error
	if flag&os.O_CREATE != 0 {
		err = d.do(OpCreate, path, open)
	} else {
		err = open()
	}
	if err != nil {
		if f != nil {
			f.Close()
		}
		return nil, err
	}
	return &File{d, f}, nil
}

// ErrNotRegular: something else is where a regular file should be.
var ErrNotRegular = errors.New("no regular file")

const openFiles = "/proc/self/fd/"

// Path is a path of this process to an open file itself, whatever the name that it was opened with means by now: for
// OpenRegular and Disk.Link, until f is closed.
func Path(f *os.File) string { return openFiles + strconv.Itoa(int(f.Fd())) }

// OpenRegular opens a regular file; anything else in its place, links included, is ErrNotRegular.
func OpenRegular(path string, flag int, mode fs.FileMode) (*os.File, error) {
	if !strings.HasPrefix(path, openFiles) {
		flag |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, flag|syscall.O_NONBLOCK, mode)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("open %s: %w: a link", path, ErrNotRegular)
	}
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("open %s: %w", path, ErrNotRegular)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// ReadRegular reads a file that OpenRegular opens.
func ReadRegular(path string) ([]byte, error) {
	f, err := OpenRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// Name returns the path that the file was opened with.
func (f *File) Name() string { return f.f.Name() }

// Size returns the number of bytes in the file.
func (f *File) Size() (int64, error) {
	st, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// Read reads from the file's own position.
func (f *File) Read(b []byte) (int, error) { return f.f.Read(b) }

// ReadAt reads at an offset.
func (f *File) ReadAt(b []byte, off int64) (int, error) { return f.f.ReadAt(b, off) }

// Write writes at the file's own position.
func (f *File) Write(b []byte) (n int, err error) {
	if f.d.faults() == nil {
		return f.f.Write(b)
	}
	return f.write(b, f.f.Write)
}

// WriteAt writes at an offset.
func (f *File) WriteAt(b []byte, off int64) (n int, err error) {
	if f.d.faults() == nil {
		return f.f.WriteAt(b, off)
	}
	return f.write(b, func(b []byte) (int, error) { return f.f.WriteAt(b, off) })
}

// write writes b, or the half of it, as the fault says.
func (f *File) write(b []byte, write func([]byte) (int, error)) (n int, err error) {
	err = f.d.do(OpWrite, f.Name(), func() (err error) { n, err = write(b); return err })
	if short := (ShortWrite{}); errors.As(err, &short) {
		n, err = write(b[:len(b)/2])
		err = errors.Join(err, short.Err)
	}
	return n, err
}

// Truncate cuts the file to size bytes and gives back what was reserved behind them.
func (f *File) Truncate(size int64) error {
	return f.d.do(OpTruncate, f.Name(), func() error { return f.f.Truncate(size) })
}

// Reserve takes the disk space for the file's first size bytes now and leaves its size as it is. An error is the
// system's, ENOSPC for example; where the filesystem can't reserve, it does nothing.
func (f *File) Reserve(size int64) error { return reserve(f.f, 0, size) }

// ReserveNext is Reserve for the n bytes at off, which may lie behind the file's end. Bytes that are written to space
// taken before cost less, as it is in one piece.
func (f *File) ReserveNext(off, n int64) error { return reserve(f.f, off, n) }

// Sync makes the data durable, and the size. After an error nothing is known about what was written since the last Sync
// that succeeded, and another Sync does not tell: write it again, elsewhere, or drop it.
func (f *File) Sync() error {
	return f.d.do(OpSync, f.Name(), func() error { return dataSync(f.f) })
}

// Chmod sets the mode.
func (f *File) Chmod(mode fs.FileMode) error { return f.f.Chmod(mode) }

// SetNote keeps a short text with the file, in place of one of that name, if the filesystem can and has room for it. It
// is durable when the file's next name is.
func (f *File) SetNote(name, text string) { setNote(f.f, name, text) }

// Close closes the file. It does not sync.
func (f *File) Close() error { return f.f.Close() }

// Publish syncs the file, names it path in place of what has that name, closes it and syncs the folder. It is durable on
// return. On an error the file is discarded, unless only the last sync failed. path must be in the folder it is in.
func (f *File) Publish(path string) error { return f.publish(path, f.d.Rename) }

// PublishNew is Publish, but returns an error that is fs.ErrExist if something has that name already.
func (f *File) PublishNew(path string) error { return f.publish(path, f.d.RenameNew) }

func (f *File) publish(path string, rename func(old, new string) error) error {
	err := f.Sync()
	if err == nil {
		err = rename(f.Name(), path)
	}
	if err != nil {
		f.Discard()
		return fmt.Errorf("publish %s: %w", path, err)
	}
	err = f.d.SyncDir(filepath.Dir(path))
	return errors.Join(err, f.Close())
}

// Discard closes the file and removes it.
func (f *File) Discard() error { return errors.Join(f.Close(), f.d.Remove(f.Name())) }

// Clone makes a new file at path with the bytes that src has now, sharing its blocks where the filesystem can and
// copying them where it can't. It is not synced. src is read from its start and need not be at it.
func (d Disk) Clone(src *os.File, path string, mode fs.FileMode) (*File, error) {
	f, err := d.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.fill(src, mode); err != nil {
		f.Discard()
		return nil, fmt.Errorf("copy %s to %s: %w", src.Name(), path, err)
	}
	return f, nil
}

// Reflink makes a new file at path that shares the blocks of src. It is not synced. errors.ErrUnsupported: the filesystem
// can't, and nothing is at path.
func (d Disk) Reflink(src *os.File, path string, mode fs.FileMode) (*File, error) {
	f, err := d.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	err = d.do(OpWrite, path, func() error { return clone(f.f, src) })
	if err == nil {
		err = f.Chmod(mode)
	}
	if err != nil {
		return nil, errors.Join(err, f.Discard())
	}
	return f, nil
}

func (f *File) fill(src *os.File, mode fs.FileMode) error {
	if err := f.d.do(OpWrite, f.Name(), func() error { return clone(f.f, src) }); err != nil {
		if !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
		st, err := src.Stat()
		if err != nil {
			return err
		}
		// The struct hides ReadFrom and WriteTo, which would choose a piece size of their own.
		from := struct{ io.Reader }{io.NewSectionReader(src, 0, st.Size())}
		if _, err := io.CopyBuffer(struct{ io.Writer }{f}, from, make([]byte, PieceSize)); err != nil {
			return err
		}
	}
	return f.Chmod(mode)
}
