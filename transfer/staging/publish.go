package staging

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// ErrUnverified: a file was to be published whose bytes were not all received and matched.
var ErrUnverified = errors.New("not verified")

// ErrChanged: a file was written to or replaced after it had been hashed, so that nobody knows what is in it.
var ErrChanged = errors.New("changed since it was hashed")

// Check finds out whether the filesystem can hold files of these names beside one another: names that differ only in
// case are one name on some. ErrCollides.
func (a *Area) Check(r Record) (err error) {
	stage := filepath.Join(a.dir, stagePrefix+a.id)
	if err := os.Mkdir(stage, 0o777); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(stage)) }()
	for _, file := range r.Files {
		f, err := a.place(stage, file.Name)
		if err == nil {
			err = f.Close()
		}
		for _, no := range []error{fs.ErrExist, syscall.ENOTDIR, syscall.EISDIR, syscall.ENAMETOOLONG, syscall.EILSEQ,
			syscall.EINVAL} {
			if errors.Is(err, no) {
				return fmt.Errorf("%w: %q: %w", ErrCollides, file.Name, no)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *Area) place(stage, name string) (*os.File, error) {
	path := filepath.Join(stage, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
}

// Publish puts the folder in place, whole, then records it. Every file of r must have been verified in this area. A folder
// that is at the target is replaced if replace is set: in one step where the filesystem can exchange two folders, else
// with an instant in which there is none. Without replace it is an error that is fs.ErrExist, unless it is empty. On an
// error the target is as it was, unless only the last steps failed: then the new folder is there and Known calls the pull
// started.
func (a *Area) Publish(r Record, replace bool) (Record, error) {
	stage := filepath.Join(a.dir, stagePrefix+a.id)
	for _, f := range r.Files {
		if !a.verified[f.Digest] {
			return r, fmt.Errorf("publish %s: %s: %w", a.target, f.Name, ErrUnverified)
		}
	}
	if err := a.fill(stage, r); err != nil {
		return r, errors.Join(fmt.Errorf("publish %s: %w", a.target, err), os.RemoveAll(stage))
	}
	if err := a.swap(stage, replace); err != nil {
		return r, errors.Join(fmt.Errorf("publish %s: %w", a.target, err), os.RemoveAll(stage))
	}
	return a.Confirm(r)
}

// Confirm records that the folder at the target is r, and was verified just now, or when the oldest of what was taken
// was. Parts are removed: what they hold is in that folder, or not needed any more. ErrChanged: one of the files that
// were adopted is not as it was then, and nothing is recorded.
func (a *Area) Confirm(r Record) (Record, error) {
	err := errors.Join(a.removeAll(oldPrefix, ""), a.removeAll(stagePrefix, ""), a.removeAll(partsPrefix, ""),
		a.pruneStates(r))
	if err != nil {
		return r, err
	}
	r.Files = slices.Clone(r.Files)
	for i, f := range r.Files {
		path := a.final(f)
		fi, err := os.Lstat(path)
		if err == nil {
			err = a.unchanged(path, fi)
		}
		if err != nil {
			return r, err
		}
		r.Files[i].Stat = lasting(fi)
	}
	r.Verified = time.Now().UTC().Truncate(time.Second)
	if !a.since.IsZero() && a.since.Before(r.Verified) {
		r.Verified = a.since
	}
	if err := a.Held(); err != nil {
		return r, err
	}
	if err := writeRecord(a.disk, filepath.Join(a.dir, completeName), r); err != nil {
		return r, err
	}
	return r, a.disk.Remove(filepath.Join(a.dir, startedName))
}

func (a *Area) final(f File) string { return filepath.Join(a.target, filepath.FromSlash(f.Name)) }

// unchanged compares a file with what it was when it was adopted, but for the change time: this area gave it other names
// since.
func (a *Area) unchanged(path string, fi fs.FileInfo) error {
	a.mu.Lock()
	was, ok := a.seen[path]
	a.mu.Unlock()
	now := StatOf(fi)
	if was.Ctime = now.Ctime; ok && was != now {
		return fmt.Errorf("%s: %w", path, ErrChanged)
	}
	return nil
}

// publishes notes that the file at the target will be the one at from. It returns ErrChanged as unchanged does.
func (a *Area) publishes(f File, from string) error {
	fi, err := os.Lstat(from)
	if err == nil {
		err = a.unchanged(from, fi)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.seen, a.final(f))
	if was, ok := a.seen[from]; ok {
		a.seen[a.final(f)] = was
	}
	return err
}

// fill makes the folder as it will be. Its files keep their parts until it is in place; where the filesystem has no hard
// links they are moved.
func (a *Area) fill(stage string, r Record) error {
	if err := os.Mkdir(stage, 0o777); err != nil {
		return err
	}
	first := map[identity.Digest]string{}
	for _, f := range r.Files {
		path := filepath.Join(stage, filepath.FromSlash(f.Name))
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return err
		}
		if err := a.fillFile(path, f, first); err != nil {
			return err
		}
	}
	return filepath.WalkDir(stage, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			err = a.disk.SyncDir(path)
		}
		return err
	})
}

func (a *Area) fillFile(path string, f File, first map[identity.Digest]string) error {
	from, ok := first[f.Digest]
	if !ok {
		from = a.part(f.Digest)
	}
	if err := a.publishes(f, from); err != nil {
		return err
	}
	if ok {
		return a.twin(from, path, f.Digest)
	}
	first[f.Digest] = path
	err := a.disk.Link(a.part(f.Digest), path)
	if err == nil || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return a.disk.Rename(a.part(f.Digest), path)
}

// twin makes a second file of the same bytes, so that writing to one does not change the other.
func (a *Area) twin(from, to string, d identity.Digest) error {
	if err := a.copy(from, to); err != nil {
		return err
	}
	f, err := a.disk.OpenFile(to, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	h := identity.NewHash()
	if _, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{f}, make([]byte, durable.PieceSize)); err != nil {
		return err
	}
	if got := identity.DigestOf(h); got != d {
		return fmt.Errorf("copy %s to %s: got %s, want %s", from, to, got, d)
	}
	return f.Sync()
}

// swap puts the folder in place. Meanwhile there is no record of the old one, which could be taken for one of the new.
func (a *Area) swap(stage string, replace bool) error {
	if err := a.Held(); err != nil {
		return err
	}
	path := filepath.Join(a.dir, completeName)
	old, err := readRecord(path)
	if err != nil {
		return err
	}
	mine, err := os.Lstat(stage)
	if err != nil {
		return err
	}
	if err := a.disk.Remove(path); err != nil {
		return err
	}
	if err = a.exchange(stage, replace); err != nil && old != nil {
		if now, serr := os.Lstat(a.target); serr == nil && !os.SameFile(now, mine) { // only the last sync may have failed
			err = errors.Join(err, writeRecord(a.disk, path, *old))
		}
	}
	return err
}

func (a *Area) exchange(stage string, replace bool) error {
	if err := syscall.Rmdir(a.target); err == nil || errors.Is(err, fs.ErrNotExist) || !replace {
		return a.disk.Move(stage, a.target) // replaces nothing
	}
	if err := a.disk.Exchange(stage, a.target); !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	old := filepath.Join(a.dir, oldPrefix+a.id)
	if err := a.disk.Move(a.target, old); err != nil {
		return err
	}
	if err := a.disk.Move(stage, a.target); err != nil {
		return errors.Join(err, a.disk.Move(old, a.target))
	}
	return nil
}

// Walk calls fn for every file below a folder that is not a folder itself, in ascending order of name. Names are
// relative to it and have forward slashes. Symbolic links are not followed.
func Walk(dir string, fn func(name string, e fs.DirEntry) error) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel := strings.TrimPrefix(path[len(dir):], string(filepath.Separator))
		return fn(filepath.ToSlash(rel), e)
	})
}
