package folder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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
// Its mode is 0700, its files' is 0400 and they are synced. remove deletes it, and must be called.
func (f *Folder) Snapshot(ctx context.Context) (snapshot *Folder, remove func() error, err error) {
	dir, err := f.snapshotDir()
	if err != nil {
		return nil, nil, fmt.Errorf("snapshot of %s: %w", f.Dir, err)
	}
	remove = func() error { return os.RemoveAll(dir) }
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

func (f *Folder) snapshotDir() (string, error) {
	if chosen := os.Getenv("KILN_SNAPSHOT_DIR"); chosen != "" {
		return os.MkdirTemp(chosen, snapshotName)
	}
	if beside := filepath.Dir(f.Dir); beside != f.Dir && unix.Access(beside, unix.W_OK) == nil {
		if dir, err := os.MkdirTemp(beside, snapshotName); err == nil {
			return dir, nil
		}
	}
	return os.MkdirTemp("", snapshotName)
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
	c.path = filepath.Join(dir, f.Name)
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
