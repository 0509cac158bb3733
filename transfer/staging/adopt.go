package staging

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
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

// Found is a file that lies on the disk already, and may be one that is wanted.
type Found struct {
	File
	Path string
}

// Adopt takes files that are on the disk already, those that have their digests, and returns which do. They are linked
// where the filesystem can, and hashed as they then are, several at a time; one of which midstates lie beside the target
// in segments. One that is changed meanwhile does not match. What was received of a digest before stays, if the file
// does not match. moved, which may be nil, is told how many bytes of a file were hashed, from several goroutines.
func (a *Area) Adopt(ctx context.Context, files []Found, moved func(i int, done int64)) (ok []bool, err error) {
	all := make([]*adoption, len(files))
	var jobs []*adopted
	for i, f := range files {
		all[i] = &adoption{Found: f, area: a, temp: fmt.Sprintf("%s.adopt%d", a.part(f.Digest), i), moved: func(n int64) {
			if moved != nil {
				moved(i, n)
			}
		}}
		some, err := all[i].begin()
		if err != nil {
			return nil, errors.Join(err, dropAll(all[:i+1]))
		}
		jobs = append(jobs, some...)
	}
	for _, x := range all { // only now: a link to one may be a link to another
		x.look()
	}
	if err := hashing.Run(ctx, jobs, hashing.Options{}); err != nil {
		return nil, errors.Join(err, dropAll(all))
	}
	for _, x := range all {
		x.check()
	}
	ok = make([]bool, len(files))
	for i, x := range all {
		if ok[i], err = x.end(); err != nil {
			return nil, errors.Join(err, dropAll(all[i:]))
		}
	}
	return ok, nil
}

func dropAll(all []*adoption) (err error) {
	for _, x := range all {
		err = errors.Join(err, x.area.drop(x.temp))
	}
	return err
}

// adoption is one file that may be adopted.
type adoption struct {
	Found
	area  *Area
	temp  string
	moved func(int64)
	was   *Stat // of the file at Path before it was hashed, or copied to be hashed; nil: not looked at
	here  *Stat // of the one at temp, which is the same or a copy

	mu   sync.Mutex // guards the rest
	done int64
	left int  // parts that are not hashed
	bad  bool // one of them does not match, or the file can't be the one that is wanted
}

// begin takes the file to where nobody else writes, and returns the parts that are to be hashed.
func (x *adoption) begin() ([]*adopted, error) {
	err := x.area.drop(x.temp)
	if err == nil && x.area.disk.Link(x.Path, x.temp) != nil {
		err = x.copy()
	}
	if err != nil {
		return nil, err
	}
	fi, err := os.Lstat(x.temp)
	if x.bad = err == nil && (!fi.Mode().IsRegular() || fi.Size() != x.Size); err != nil || x.bad {
		return nil, err
	}
	s := Midstates(x.area.target, x.File)
	if s == nil {
		x.left = 1
		return []*adopted{{x: x, end: x.Size}}, nil
	}
	parts := make([]*adopted, s.Len())
	for i := range parts {
		off, n := s.Range(i)
		parts[i] = &adopted{x: x, off: off, end: off + n, check: s.Check(i)}
	}
	x.left = len(parts)
	return parts, nil
}

func (x *adoption) copy() error {
	src, err := durable.OpenRegular(x.Path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer src.Close()
	fi, err := src.Stat()
	if err != nil {
		return err
	}
	x.was = lasting(fi)
	return x.area.copyOf(src, x.temp)
}

// look notes the file as it is before a byte of it is hashed.
func (x *adoption) look() {
	fi, err := os.Lstat(x.temp)
	if err != nil {
		return
	}
	x.here = lasting(fi)
	if x.was == nil {
		x.was = x.here
	}
}

// check finds out whether the file was changed, or replaced, since then.
func (x *adoption) check() {
	x.bad = x.bad || x.here == nil || !still(x.Path, *x.was) || !still(x.temp, *x.here)
}

func still(path string, was Stat) bool {
	fi, err := os.Lstat(path)
	return err == nil && *lasting(fi) == was
}

// end makes the file a part of the area if all of it matched, or drops it.
func (x *adoption) end() (bool, error) {
	if x.bad || x.left > 0 {
		return false, x.area.drop(x.temp)
	}
	f, err := x.area.disk.OpenFile(x.temp, os.O_RDONLY, 0)
	if err != nil {
		return false, err
	}
	part := x.area.part(x.Digest)
	err = errors.Join(f.Sync(), f.Close())
	if err == nil {
		err = x.area.drop(part)
	}
	if err == nil {
		err = x.area.disk.Rename(x.temp, part)
	}
	if err != nil {
		return false, err
	}
	x.area.mu.Lock()
	defer x.area.mu.Unlock()
	x.area.verified[x.Digest] = true
	x.area.seen[x.Path] = *x.was
	x.area.seen[part] = *x.here
	return true, nil
}

// adopted is a part of a file that is hashed: all of it, or a segment.
type adopted struct {
	x        *adoption
	off, end int64
	check    *lanes.Check // nil: the part is the file
	hash     identity.Hash
	in       *os.File
	done     int64
}

// Open implements hashing.Job.
func (p *adopted) Open() (part hashing.Part, err error) {
	part = hashing.Part{Off: p.off, End: p.end, To: p.check}
	if p.check == nil {
		p.hash = identity.NewHash()
		part.To = p.hash
	}
	p.in, err = durable.OpenRegular(p.x.temp, os.O_RDONLY, 0)
	part.File = p.in
	return part, err
}

// Moved implements hashing.Job.
func (p *adopted) Moved(n int64) {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	p.x.done += n - p.done
	p.done = n
	p.x.moved(p.x.done)
}

// Close implements hashing.Job.
func (p *adopted) Close(err error) error {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	p.x.left--
	if p.check != nil {
		p.x.bad = p.x.bad || p.check.Err() != nil
	} else {
		p.x.bad = p.done != p.end || identity.DigestOf(p.hash) != p.x.Digest
	}
	return errors.Join(err, p.in.Close())
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
