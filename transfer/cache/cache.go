// Package cache keeps verified files by digest in a folder of a machine, for all pulls there: what one of them received,
// the others link or copy.
//
//	DIR/sha256/ab/HEX            a file, mode 0444, there only once its digest was verified
//	DIR/sha256/ab/HEX.json       what it was like then; changed when it is used
//	DIR/sha256/ab/HEX.midstates  those of a large file that came with some or was hashed here
//	DIR/partial/.HEX.kiln/       the area of a file on its way in; see package staging
//
// A file that came in part from an earlier process is read once more and hashed before it gets its name.
//
// A file is used without reading it as long as it is the one of its record: same device, inode, size, mode and time of
// modification. The change time is not looked at, as each link to a file changes it. What differs in one of them is
// hashed again, and is dropped if it is not what its name says. So a write to a file of a cache, through any of its
// names, is found, unless its writer puts the time of modification back; Verify finds that too.
//
// A Cache may be used by any number of goroutines and processes at a time. No lock of the filesystem is used.
package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	filesName    = "sha256"
	partialName  = "partial"
	recordSuffix = ".json"
	statesSuffix = ".midstates"
)

var (
	// ErrForeign: a cache, or a folder in it, is not one of this user or of root, or others may write to it.
	ErrForeign = errors.New("the cache is not this user's alone")
	// ErrNone: a folder is no cache.
	ErrNone = errors.New("not a cache")
)

// Options says how to use a cache. The zero value is ready to use.
type Options struct {
	Notify   func(string)  // told what was found wrong or taken over, from any goroutine; nil: nobody
	Poll     time.Duration // between two looks at what another process receives; zero: 100 ms
	Patience time.Duration // for which another process may receive nothing; zero: two minutes
	Staging  staging.Options
}

// Cache is a folder of verified files.
type Cache struct {
	dir  string
	o    Options
	said sync.Map // of what is foreign, by error text: it is told once
}

// Entry is a file of a cache that may be used.
type Entry struct {
	Path     string
	Size     int64
	Verified time.Time // when its bytes were last read and matched, or received and matched

	record record
}

// Open opens the file, if it is still the one that was found; else the error is fs.ErrNotExist.
func (e Entry) Open() (*os.File, error) {
	f, err := durable.OpenRegular(e.Path, os.O_RDONLY, 0)
	if errors.Is(err, durable.ErrNotRegular) {
		return nil, fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && (!e.record.same(fi) || owned(e.Path, fi, 0) != nil) {
		err = fmt.Errorf("%s: %w: another file is there by now", e.Path, fs.ErrNotExist)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Open uses the folder at dir, and makes it if there is none: of the user's alone. ErrForeign.
func Open(dir string, o Options) (*Cache, error) {
	if o.Notify == nil {
		o.Notify = func(string) {}
	}
	if o.Poll == 0 {
		o.Poll = 100 * time.Millisecond
	}
	if o.Patience == 0 {
		o.Patience = 2 * time.Minute
	}
	if o.Staging.Hashes == nil {
		o.Staging.Hashes = staging.Hashes()
	}
	o.Staging.Notify = o.Notify
	real, err := staging.Target(dir)
	if err != nil {
		return nil, fmt.Errorf("open cache %s: %w", dir, err)
	}
	c := &Cache{dir: real, o: o}
	for _, path := range []string{real, filepath.Join(real, filesName), filepath.Join(real, partialName)} {
		err := c.disk().MkdirAll(path, 0o755)
		if _, there := os.Stat(path); there == nil { // of a cache that can only be read
			err = own(path, fs.ModeDir)
		}
		if err != nil {
			return nil, fmt.Errorf("open cache %s: %w", dir, err)
		}
	}
	return c, nil
}

// OpenOld is Open, but makes nothing: a folder that is not there, or is no cache, is ErrNone.
func OpenOld(dir string, o Options) (*Cache, error) {
	for _, name := range []string{filesName, partialName} {
		if fi, err := os.Stat(filepath.Join(dir, name)); err != nil || !fi.IsDir() {
			return nil, fmt.Errorf("%s: %w: it has no folder %s", dir, ErrNone, name)
		}
	}
	return Open(dir, o)
}

// Dir returns the folder, without links in its path.
func (c *Cache) Dir() string { return c.dir }

func (c *Cache) disk() durable.Disk { return c.o.Staging.Disk }

func (c *Cache) path(d identity.Digest) string {
	return filepath.Join(c.dir, filesName, d.Hex()[:2], d.Hex())
}

// target is what the area of a file on its way in belongs to; nothing is ever there.
func (c *Cache) target(d identity.Digest) string { return filepath.Join(c.dir, partialName, d.Hex()) }

// Uses says whether the cache is used for a file: not if the folder that the file would be in is foreign, which is told
// once.
func (c *Cache) Uses(d identity.Digest) bool { return c.usable(c.path(d)) == nil }

// usable returns ErrForeign if the folder of a file is, and tells of it.
func (c *Cache) usable(path string) error {
	err := own(filepath.Dir(path), fs.ModeDir)
	if !errors.Is(err, ErrForeign) {
		return nil
	}
	if _, before := c.said.LoadOrStore(err.Error(), true); !before {
		c.o.Notify("not used: " + err.Error())
	}
	return err
}

// ready makes the folder of a file, if there is none. ErrForeign.
func (c *Cache) ready(path string) error {
	if err := c.usable(path); err != nil { // which may be a link to somewhere
		return err
	}
	if err := c.disk().MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return c.usable(path)
}

// own refuses what others than this user and root could have written, or is of another kind.
func own(path string, kind fs.FileMode) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return owned(path, fi, kind)
}

func owned(path string, fi fs.FileInfo, kind fs.FileMode) error {
	switch uid := fi.Sys().(*syscall.Stat_t).Uid; {
	case fi.Mode().Type() != kind:
		return fmt.Errorf("%s: %w: it is neither a folder nor a file", path, ErrForeign)
	case uid != 0 && int(uid) != os.Geteuid():
		return fmt.Errorf("%s: %w: it belongs to user %d", path, ErrForeign, uid)
	case fi.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s: %w: its mode is %v", path, ErrForeign, fi.Mode().Perm())
	}
	return nil
}

// record is what a file was like when it was verified. The time of modification of its own file is when it was last used.
type record struct {
	Size     int64       `json:"size_bytes"`
	Dev      uint64      `json:"dev"`
	Ino      uint64      `json:"ino"`
	Mtime    int64       `json:"mtime_ns"`
	Mode     fs.FileMode `json:"mode"`
	Verified time.Time   `json:"verified_at"`
}

func recordOf(fi fs.FileInfo, then time.Time) record {
	s := staging.StatOf(fi)
	return record{s.Size, s.Dev, s.Ino, s.Mtime, fi.Mode().Perm(), then.UTC().Truncate(time.Second)}
}

func (r record) same(fi fs.FileInfo) bool {
	return r == recordOf(fi, r.Verified) && r.Mode == staging.Shared
}

// read returns the zero record where there is none that can be used.
func read(path string) (r record) {
	if own(path+recordSuffix, 0) != nil {
		return record{}
	}
	b, err := os.ReadFile(path + recordSuffix)
	if err != nil || json.Unmarshal(b, &r) != nil {
		return record{}
	}
	return r
}

// keep records that the file that lies at a path now, to have the name of the entry at another, is verified. Its time of
// modification is made one that no later write gives it again.
func (c *Cache) keep(at, entry string) (record, error) {
	now := time.Now()
	fi, err := os.Lstat(at)
	if err == nil && now.Sub(fi.ModTime()) < time.Second {
		err = os.Chtimes(at, time.Time{}, now.Truncate(time.Second))
	}
	if err == nil {
		fi, err = os.Lstat(at)
	}
	if err != nil {
		return record{}, err
	}
	r := recordOf(fi, now)
	b, err := json.Marshal(r)
	if err != nil {
		return record{}, err
	}
	return r, c.disk().WriteFile(entry+recordSuffix, append(b, '\n'), 0o644)
}

// Find looks for the file with a digest and a size. One that was touched since it was verified is read and hashed, and
// dropped if it does not match.
func (c *Cache) Find(ctx context.Context, d identity.Digest, size int64) (e Entry, ok bool, err error) {
	e, ok, err = c.find(ctx, d, size)
	if err != nil {
		return e, false, fmt.Errorf("look for %s in cache %s: %w", d, c.dir, err)
	}
	if ok { // as good as can be: a cache that can only be read is used too
		_ = os.Chtimes(e.Path+recordSuffix, time.Time{}, time.Now())
	}
	return e, ok, nil
}

func (c *Cache) find(ctx context.Context, d identity.Digest, size int64) (e Entry, ok bool, err error) {
	path := c.path(d)
	if c.usable(path) != nil {
		return e, false, nil
	}
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return e, false, nil
	}
	if err != nil {
		return e, false, err
	}
	if foreign := owned(path, fi, 0); foreign != nil {
		c.o.Notify("not used: " + foreign.Error())
		return e, false, c.drop(path)
	}
	if fi.Size() != size {
		c.o.Notify(fmt.Sprintf("dropped from the cache: %s has %d bytes, want %d", d, fi.Size(), size))
		return e, false, c.drop(path)
	}
	r := read(path)
	if !r.same(fi) {
		c.o.Notify("touched since it was verified, or not recorded; hashed again: " + path)
		if r, ok, err = c.again(ctx, d, path); err != nil || !ok {
			return e, false, err
		}
	}
	return Entry{path, size, r.Verified, r}, true, nil
}

// Drop removes the file with a digest. It is no error if there is none. In a folder that is foreign nothing is removed.
func (c *Cache) Drop(d identity.Digest) error {
	if !c.Uses(d) {
		return nil
	}
	return c.drop(c.path(d))
}

// drop removes a file and what lies beside it. In a cache that can only be read nothing happens, and it is not used.
func (c *Cache) drop(path string) error {
	err := c.remove(path)
	if ReadOnly(err) {
		return nil
	}
	return err
}

// remove removes a file and what lies beside it.
func (c *Cache) remove(path string) error {
	return errors.Join(c.disk().Remove(path), c.disk().Remove(path+recordSuffix), c.disk().Remove(path+statesSuffix))
}

// ReadOnly says whether an error means that this user may not write to a cache.
func ReadOnly(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)
}

// Is says whether the file at a path, which is known not to have a digest, is the one in the cache: one file with two
// names.
func (c *Cache) Is(path string, d identity.Digest) bool {
	a, err := os.Lstat(path)
	b, berr := os.Lstat(c.path(d))
	return err == nil && berr == nil && os.SameFile(a, b) && c.Uses(d)
}

// parse returns the digest that the name of a file of the cache stands for, and what the name has beside it.
func parse(name string) (d identity.Digest, suffix string, ok bool) {
	hex, suffix, _ := strings.Cut(name, ".")
	if suffix != "" {
		suffix = "." + suffix
	}
	d, err := identity.ParseDigest("sha256:" + hex)
	return d, suffix, err == nil && (suffix == "" || suffix == recordSuffix || suffix == statesSuffix)
}
