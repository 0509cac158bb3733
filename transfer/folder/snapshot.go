package folder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const (
	snapshotName = ".kiln-model-snapshot-*"
	leastReserve = 64 << 20 // bytes that stay free, or one part in reservePart of the copy if that is more; Kiln's rule
	reservePart  = 100
)

// Snapshot copies the files of f into a private directory, sharing their blocks where the filesystem can, and returns a
// Folder that reads the copies: what happens to the source afterwards does not matter. The directory is made in
// $KILN_SNAPSHOT_DIR, else beside the source where that can be written, else in the system's place for temporary files.
// Its mode is 0700, its files' is 0400 and they are synced. remove deletes it, and must be called; what a process that
// was killed has left there is deleted by the next Snapshot.
func (f *Folder) Snapshot(ctx context.Context) (snapshot *Folder, remove func() error, err error) {
	dir, lock, err := f.snapshotDir()
	if err != nil {
		return nil, nil, fmt.Errorf("snapshot of %s: %w", f.Dir, err)
	}
	remove = func() error {
		err := os.RemoveAll(dir)
		if lock != nil {
			err = errors.Join(err, lock.Close())
		}
		return err
	}
	s := *f
	s.Shards, err = copyAll(ctx, f.Shards, dir)
	if err == nil {
		s.Others, err = copyAll(ctx, f.Others, dir)
	}
	if err == nil {
		err = durable.Disk{}.SyncDir(dir)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("snapshot of %s: %w", f.Dir, errors.Join(err, remove()))
	}
	return &s, remove, nil
}

func (f *Folder) snapshotDir() (dir string, lock *os.File, err error) {
	if chosen := os.Getenv("KILN_SNAPSHOT_DIR"); chosen != "" {
		return privateDir(chosen)
	}
	if beside := filepath.Dir(f.Dir); beside != f.Dir && unix.Access(beside, unix.W_OK) == nil {
		if dir, lock, err := privateDir(beside); err == nil {
			return dir, lock, nil
		}
	}
	return privateDir(os.TempDir())
}

// privateDir makes a directory in parent and locks it for as long as this process lives, or lock, which may be nil, is open. Leftovers of
// processes that are gone are removed first: their locks are free.
func privateDir(parent string) (dir string, lock *os.File, err error) {
	left, _ := filepath.Glob(filepath.Join(globbed(parent), snapshotName)) // the pattern is well formed
	for _, old := range left {
		if err := removeLeftover(old); err != nil {
			return "", nil, err
		}
	}
	for {
		if dir, err = os.MkdirTemp(parent, snapshotName); err != nil {
			return "", nil, err
		}
		if lock, err = lockDir(dir); !errors.Is(err, errTaken) {
			return dir, lock, nil // without a lock where the filesystem has none: nobody else gets one there either
		}
	}
}

// globbed is a pattern that matches path alone.
func globbed(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// removeLeftover removes a directory of this user's that no process has locked.
func removeLeftover(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return nil
	}
	if sys, ok := info.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() {
		return nil
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil // it is in use, or gone, or there are no locks here
	}
	defer lock.Close()
	return os.RemoveAll(dir)
}

// errTaken: another process has locked a directory, or has removed it.
var errTaken = errors.New("directory is taken")

func lockDir(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil, errTaken
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	lock := os.NewFile(uintptr(fd), dir)
	err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil && isNamed(lock, dir) {
		return lock, nil
	}
	if err == nil || err == unix.EWOULDBLOCK {
		err = errTaken
	}
	return nil, errors.Join(err, lock.Close())
}

// isNamed says whether path still names an open file.
func isNamed(file *os.File, path string) bool {
	is, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Lstat(path)
	return err == nil && os.SameFile(is, named)
}

func copyAll(ctx context.Context, files []File, dir string) ([]File, error) {
	copies := make([]File, 0, len(files))
	for _, file := range files {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c, err := file.copy(dir)
		if err != nil {
			return nil, err
		}
		copies = append(copies, c)
	}
	return copies, nil
}

func (f File) copy(dir string) (File, error) {
	if err := room(dir, f.Size); err != nil {
		return File{}, err
	}
	in, err := open(f)
	if err != nil {
		return File{}, err
	}
	defer in.Close()
	c := f
	c.path = filepath.Join(dir, filepath.FromSlash(f.Name))
	if err := (durable.Disk{}).MkdirAll(filepath.Dir(c.path), 0o700); err != nil {
		return File{}, err
	}
	out, err := durable.Disk{}.Clone(in, c.path, 0o400)
	if err != nil {
		return File{}, err
	}
	if err := errors.Join(out.Sync(), out.Close(), unchanged(in, f)); err != nil {
		return File{}, err
	}
	info, err := os.Lstat(c.path)
	if err != nil {
		return File{}, err
	}
	c.seen = stampOf(info)
	if info.Size() != f.Size {
		return File{}, fmt.Errorf("%s: %w: %d of %d bytes were copied", f.Name, ErrChanged, info.Size(), f.Size)
	}
	return c, nil
}

func room(dir string, size int64) error {
	free, err := durable.Free(dir)
	if err != nil {
		return err
	}
	if need := size + max(leastReserve, size/reservePart); free < need {
		return fmt.Errorf("%s: %d bytes are needed and %d are free: %w", dir, need, free, unix.ENOSPC)
	}
	return nil
}
