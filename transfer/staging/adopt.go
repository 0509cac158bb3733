package staging

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Shared is the mode of a file that several folders have as one: nobody writes to it.
const Shared fs.FileMode = 0o444

// Take makes the file at path the one with digest d, without reading it: the caller says that it was verified then, and
// that it was not written since. The record of the folder is then not younger than that. With alone the file gets blocks
// in common with path and no other name, else it is a link, of mode Shared. What was received of that digest is dropped.
// Where the filesystem can't, the error is errors.ErrUnsupported and all is as it was.
func (a *Area) Take(path string, d identity.Digest, alone bool, then time.Time) error {
	temp := a.part(d) + ".take"
	if err := a.drop(temp); err != nil {
		return err
	}
	err := a.take(path, temp, alone)
	if err == nil {
		err = errors.Join(a.drop(a.part(d)), a.disk.Rename(temp, a.part(d)))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("take %s: %w", path, err), a.drop(temp))
	}
	a.verify(d)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.since.IsZero() || then.Before(a.since) {
		a.since = then
	}
	return nil
}

func (a *Area) take(path, temp string, alone bool) error {
	if !alone {
		return unsupported(a.disk.Link(path, temp))
	}
	f, err := durable.OpenRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	twin, err := a.disk.Reflink(f, temp, 0o666&^umask())
	if err != nil {
		return err
	}
	return errors.Join(twin.Sync(), twin.Close())
}

// unsupported names the errors of a filesystem that can't link two files.
func unsupported(err error) error {
	for _, no := range []error{syscall.EXDEV, syscall.EPERM, syscall.EMLINK, syscall.EOPNOTSUPP, syscall.ENOSYS} {
		if errors.Is(err, no) {
			return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
	}
	return err
}

// Give moves the file with digest d, which must have been verified in this area, out of it to a path on the same
// filesystem, in place of what is there, with mode Shared. keep is called with its path before that, when no byte of it
// changes any more. It is durable on return. ErrUnverified, ErrLost.
func (a *Area) Give(d identity.Digest, path string, keep func(path string) error) error {
	a.mu.Lock()
	ok := a.verified[d]
	delete(a.verified, d)
	a.mu.Unlock()
	if !ok {
		return fmt.Errorf("move %s to %s: %w", d, path, ErrUnverified)
	}
	part := a.part(d)
	if err := errors.Join(a.Held(), os.Chmod(part, Shared)); err != nil {
		return err
	}
	if err := keep(part); err != nil {
		return err
	}
	if err := a.disk.Move(part, path); err != nil {
		return err
	}
	return a.drop(part)
}

// Begun says whether something of the file with digest d and a size is kept for whoever continues it.
func (a *Area) Begun(d identity.Digest, size int64) bool {
	return partly(a.part(d), size, a.boot) > 0
}

// Kept is what an area holds of a file on its way in.
type Kept struct {
	Bytes   int64     // up to the last point that was saved
	Space   int64     // that it takes on the disk, which may be more: what will come is reserved
	Changed time.Time // when something of it was written last, by the clock of the filesystem
}

// Progress says how far a file in the area of a target is, whoever is at work there.
func Progress(target string, f File) (k Kept, err error) {
	dir := dirOf(target)
	if k.Bytes, err = received(dir, Record{Files: []File{f}}); err != nil {
		return k, err
	}
	parts, err := others(dir, partsPrefix, "")
	for _, p := range parts {
		if fi, err := os.Lstat(filepath.Join(p, f.Digest.Hex())); err == nil {
			k.Space += fi.Sys().(*syscall.Stat_t).Blocks * 512
			k.Changed = fi.ModTime()
		}
	}
	return k, ignoreNone(err)
}

func ignoreNone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// writable undoes what Give did to a part, if it did not come to its end.
func writable(part string) error {
	fi, err := os.Lstat(part)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm() != Shared || fi.Sys().(*syscall.Stat_t).Nlink > 1 {
		return err
	}
	return os.Chmod(part, 0o666&^umask())
}

func partly(path string, size int64, boot string) int64 {
	return max(bestPoint(path, size, boot).Offset, bestSegments(path, size, boot).have())
}

// Sweep removes what a pull received into the area of a target and did not end, if nothing of it changed after a time
// and its owner is gone. What was published and its record stay. It returns how many bytes it removed. ErrBusy.
func Sweep(target string, after time.Time, open func() (*Area, error)) (freed int64, err error) {
	dir := dirOf(target)
	parts, err := others(dir, partsPrefix, "")
	if err != nil || len(parts) == 0 {
		return 0, err
	}
	last, err := changed(dir)
	if err != nil || last.After(after) {
		return 0, err
	}
	a, err := open()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	mine := filepath.Join(dir, partsPrefix+a.id)
	entries, err := os.ReadDir(mine)
	for _, e := range entries {
		if fi, ierr := e.Info(); ierr == nil && fi.Sys().(*syscall.Stat_t).Nlink == 1 {
			freed += fi.Sys().(*syscall.Stat_t).Blocks * 512
		}
		err = errors.Join(err, a.disk.Remove(filepath.Join(mine, e.Name())))
	}
	return freed, errors.Join(err, a.disk.Remove(filepath.Join(dir, startedName)))
}

// changed returns when something below a folder was changed last. The beat of a live owner counts.
func changed(dir string) (last time.Time, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err == nil && !e.IsDir() && fi.ModTime().After(last) {
			last = fi.ModTime()
		}
		return err
	})
	return last, err
}
