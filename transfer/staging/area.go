// Package staging keeps what belongs to a pulled folder but must not lie in it: the parts of a pull under way, and the
// record of a pull that ended. Both are in a hidden folder beside the target, on the same filesystem, so that a finished
// folder is put in place by one rename. For a target /models/NAME it is /models/.NAME.kiln:
//
//	owner          who is at work; see ErrBusy
//	started.json   the Record of the pull under way
//	parts-ID/      files by digest, with the points up to which they are written and hashed
//	stage-ID/      the folder as it will be; only while it is put in place
//	old-ID/        the folder that was replaced; only until it is removed
//	complete.json  the Record of the folder at the target, written last
//	midstates/     those of the files of that folder that came with some, by digest
//
// At most one Area of a target is open at a time, over all processes and machines.
package staging

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const (
	ownerName    = "owner"
	startedName  = "started.json"
	completeName = "complete.json"
	statesName   = "midstates"
	partsPrefix  = "parts-"
	stagePrefix  = "stage-"
	oldPrefix    = "old-"
)

// ErrCollides: the filesystem holds two of the names for one, or can't hold a name at all.
var ErrCollides = errors.New("the file names do not fit this filesystem")

// ErrForeign: what lies beside the target, where an area should be, is not a folder or is somebody else's, or something
// in it is a link, of another kind than its name says, or somebody else's.
var ErrForeign = errors.New("not a folder of this user")

// Options says how to open an Area. The zero value is ready to use.
type Options struct {
	Notify func(string)  // told what was taken over, one line each; nil: nobody
	Beat   time.Duration // time between two signs of life; zero: one second
	Hashes *lanes.Pool   // from Hashes: for every area that is used at the same time; nil: the area has one of its own
	Disk   durable.Disk
}

func (o Options) notify(s string) {
	if o.Notify != nil {
		o.Notify(s)
	}
}

// Area is the place of one pull. Partial files of different digests may be used concurrently, and Has; all else is done by one
// goroutine.
type Area struct {
	target string
	dir    string
	id     string
	boot   string
	disk   durable.Disk
	owner  *owner
	hashes *lanes.Pool

	mu       sync.Mutex // guards the rest
	verified map[identity.Digest]bool
	since    time.Time       // when the oldest of the files that were taken was verified; zero: none was
	seen     map[string]Stat // by path: files that others may write to, as they were when they were hashed
}

// Target returns the canonical form of the path that a folder shall have: absolute, with no symbolic link in it. If the
// path is itself a link to a folder, that folder is meant.
func Target(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		return real, nil
	}
	if fi, err := os.Lstat(abs); err == nil && fi.Mode()&fs.ModeSymlink != 0 {
		return "", fmt.Errorf("%s is a symbolic link to nowhere", abs)
	}
	parent := filepath.Dir(abs)
	if parent == abs {
		return abs, nil
	}
	parent, err = Target(parent)
	return filepath.Join(parent, filepath.Base(abs)), err
}

func dirOf(target string) string {
	return filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".kiln")
}

// Trust says whether what lies beside a target may be believed and written to: nil if there is nothing, or a real folder
// that belongs to this user, or to root or the owner of the folder above, who can replace it anyway, and in which each
// name of an area is a real folder or file of one of these; else ErrForeign.
func Trust(target string) error {
	dir := dirOf(target)
	fi, err := realDir(dir)
	if err != nil || fi == nil {
		return err
	}
	up, err := os.Stat(filepath.Dir(dir))
	if err != nil {
		return err
	}
	above := ownerOf(up)
	if owner := ownerOf(fi); foreign(owner, above, uint32(os.Geteuid())) {
		return fmt.Errorf("%s: %w: it belongs to user %d", dir, ErrForeign, owner)
	}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if err == nil {
			err = trustEntry(dir, e, above)
		}
	}
	return ignoreNone(err)
}

// trustEntry is Trust for what has a name in the folder of an area. Folders that were or will be the target may belong
// to anybody, as nothing in them is read. What an area has no name for is left alone.
func trustEntry(dir string, e fs.DirEntry, above uint32) error {
	name := e.Name()
	folder, anybody := false, false
	switch {
	case name == statesName, strings.HasPrefix(name, partsPrefix):
		folder = true
	case strings.HasPrefix(name, stagePrefix), strings.HasPrefix(name, oldPrefix):
		folder, anybody = true, true
	case name != ownerName && name != startedName && name != completeName:
		return nil
	}
	fi, err := e.Info()
	if err != nil {
		return ignoreNone(err) // a pull at work has removed it
	}
	why := ""
	switch owner := ownerOf(fi); {
	case fi.Mode()&fs.ModeSymlink != 0:
		why = "is a symbolic link"
	case folder && !fi.IsDir():
		why = "is not a folder"
	case !folder && !fi.Mode().IsRegular():
		why = "is not a regular file"
	case !anybody && foreign(owner, above, uint32(os.Geteuid())):
		why = fmt.Sprintf("belongs to user %d", owner)
	default:
		return nil
	}
	return fmt.Errorf("%s: %w: %s in it %s", dir, ErrForeign, name, why)
}

// readFile reads a file of an area and follows no link. ErrForeign: something else has its name.
func readFile(path string) ([]byte, error) {
	b, err := durable.ReadRegular(path)
	if errors.Is(err, durable.ErrNotRegular) {
		err = fmt.Errorf("%s: %w: %s in it is not a regular file", filepath.Dir(path), ErrForeign, filepath.Base(path))
	}
	return b, err
}

func ownerOf(fi fs.FileInfo) uint32 { return fi.Sys().(*syscall.Stat_t).Uid }

func foreign(owner, above, me uint32) bool { return owner != me && owner != above && owner != 0 }

// realDir looks at the folder of an area without following a link. It is nil where there is nothing.
func realDir(dir string) (fs.FileInfo, error) {
	switch fi, err := os.Lstat(dir); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil, nil
	case err != nil:
		return nil, err
	case fi.Mode()&fs.ModeSymlink != 0:
		return nil, fmt.Errorf("%s: %w: it is a symbolic link", dir, ErrForeign)
	case !fi.IsDir():
		return nil, fmt.Errorf("%s: %w: it is a file", dir, ErrForeign)
	default:
		return fi, nil
	}
}

// Open takes the area of a target, which must be in the form that Target returns, and makes the folders above it. What
// an earlier pull left is kept: also that of a process that is gone, which Open finds out at once on this machine, and
// within about twelve beats on another. ErrBusy: a pull is at work. ErrForeign: see Trust.
func Open(ctx context.Context, target string, o Options) (*Area, error) {
	if o.Beat == 0 {
		o.Beat = time.Second
	}
	boot, err := o.Disk.BootID()
	if err != nil {
		return nil, err
	}
	if o.Hashes == nil {
		o.Hashes = Hashes()
	}
	a := &Area{target: target, dir: dirOf(target), id: rand.Text(), boot: boot, disk: o.Disk, hashes: o.Hashes,
		verified: map[identity.Digest]bool{}, seen: map[string]Stat{}}
	me, err := self(a.id, boot)
	if err != nil {
		return nil, err
	}
	if err := Trust(target); err != nil { // before a link is followed
		return nil, err
	}
	if err := a.disk.MkdirAll(a.dir, 0o777); err != nil {
		return nil, err
	}
	if err := Trust(target); err != nil { // somebody else may have been quicker
		return nil, err
	}
	if a.owner, err = claim(ctx, filepath.Join(a.dir, ownerName), me, o); err != nil {
		return nil, fmt.Errorf("open %s: %w", a.dir, err)
	}
	if err := a.inherit(); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", a.dir, err), a.Close())
	}
	return a, nil
}

// inherit takes over what earlier pulls left: their parts, and a folder that was moved away and not replaced.
func (a *Area) inherit() error {
	if err := a.removeAll(stagePrefix, ""); err != nil {
		return err
	}
	if err := a.restore(); err != nil {
		return err
	}
	mine := filepath.Join(a.dir, partsPrefix+a.id)
	found, err := others(a.dir, partsPrefix, "")
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return os.Mkdir(mine, 0o777)
	}
	if err := a.disk.Rename(found[0], mine); err != nil {
		return err
	}
	if _, err := realDir(mine); err != nil { // it may have been replaced since others saw it
		return err
	}
	for _, dir := range found[1:] {
		if err := a.merge(dir, mine); err != nil {
			return err
		}
	}
	// What was removed there must not come back once other bytes are written.
	if err := a.disk.SyncDir(mine, a.dir); err != nil {
		return err
	}
	return eachEntry(mine, func(name string) error { return writable(filepath.Join(mine, name)) })
}

// merge moves the parts of one folder to another, but of each digest only from one: a record says nothing of a file
// that it did not lie beside.
func (a *Area) merge(dir, mine string) error {
	there := map[string]bool{}
	err := eachEntry(mine, func(name string) error { there[digestIn(name)] = true; return nil })
	if err == nil {
		err = eachEntry(dir, func(name string) error {
			if there[digestIn(name)] {
				return a.disk.Remove(filepath.Join(dir, name))
			}
			return a.disk.Rename(filepath.Join(dir, name), filepath.Join(mine, name))
		})
	}
	if err != nil {
		return err
	}
	return a.disk.Remove(dir)
}

// digestIn returns the hex digits that the name of a part, or of what belongs to it, begins with.
func digestIn(name string) string {
	hex, _, _ := strings.Cut(name, ".")
	return hex
}

func eachEntry(dir string, fn func(name string) error) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if err == nil {
			err = fn(e.Name())
		}
	}
	return err
}

// restore puts a folder back that a pull had moved away when it died, where folders can't be exchanged. Folders that
// were replaced are removed.
func (a *Area) restore() error {
	olds, err := others(a.dir, oldPrefix, "")
	if err != nil || len(olds) == 0 {
		return err
	}
	if _, err := os.Lstat(a.target); errors.Is(err, fs.ErrNotExist) {
		return a.disk.Move(olds[0], a.target)
	} else if err != nil {
		return err
	}
	return a.removeAll(oldPrefix, "")
}

func (a *Area) removeAll(prefix, but string) error {
	found, err := others(a.dir, prefix, but)
	for _, path := range found {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// patience is how long a piece of one file waits for those of others, that they may be hashed together: about as long
// as four of them take alone.
const patience = 2 * time.Millisecond

// Hashes returns what hashes the bytes of files that come in at the same time.
func Hashes() *lanes.Pool {
	return &lanes.Pool{Soon: func(late func()) func() bool { return time.AfterFunc(patience, late).Stop }}
}

// hash writes a piece of what is there already to what hashes its stream.
func (a *Area) hash(stream io.Writer, b []byte) { a.hashes.Write(stream, b) }

// coming is a stream that is hashed as it comes in. It has a place among the others only between a write and a flush.
type coming struct {
	hashes *lanes.Pool
	feed   *lanes.Feed
}

// write has b hashed, maybe later: until the next write or flush returns, b must stay as it is.
func (c *coming) write(stream io.Writer, b []byte) {
	if c.feed == nil {
		c.feed = c.hashes.Feed(stream)
	}
	c.feed.Write(b)
}

// flush returns when all that was written is hashed.
func (c *coming) flush() {
	if c.feed != nil {
		c.feed.Close()
		c.feed = nil
	}
}

// verify notes that the file with a digest is there, whole and right.
func (a *Area) verify(d identity.Digest) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.verified[d] = true
}

// Has says whether the file with a digest is there, whole and right.
func (a *Area) Has(d identity.Digest) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.verified[d]
}

// Held returns nil as long as no other pull has taken the area over, else ErrLost.
func (a *Area) Held() error { return a.owner.held() }

// Close gives the area free. What is there stays for the next pull; an area with nothing in it is removed.
func (a *Area) Close() error {
	os.Remove(filepath.Join(a.dir, partsPrefix+a.id)) // stays unless it is empty
	err := a.owner.release()
	os.Remove(a.dir) // as above
	return err
}

func (a *Area) part(d identity.Digest) string { return filepath.Join(a.dir, partsPrefix+a.id, d.Hex()) }

// Begin records what will be pulled, and drops the parts of anything else.
func (a *Area) Begin(r Record) error {
	want := map[string]bool{}
	for _, f := range r.Files {
		want[f.Digest.Hex()] = true
	}
	dir := filepath.Dir(a.part(identity.Digest{}))
	removed := false
	err := eachEntry(dir, func(name string) error {
		if want[digestIn(name)] {
			return nil
		}
		removed = true
		return a.disk.Remove(filepath.Join(dir, name))
	})
	if err == nil && removed { // for good: other bytes may come under the same names
		err = a.disk.SyncDir(dir)
	}
	if err != nil {
		return err
	}
	return writeRecord(a.disk, filepath.Join(a.dir, startedName), r)
}

// Missing returns how much disk space files still need that shall have a size in bytes, at most.
func (a *Area) Missing(d identity.Digest, size int64) int64 {
	fi, err := os.Lstat(a.part(d))
	if err != nil {
		return size
	}
	return max(0, size-fi.Sys().(*syscall.Stat_t).Blocks*512)
}

// Free returns the number of bytes that can be stored beside the target.
func (a *Area) Free() (int64, error) { return durable.Free(a.dir) }

func (a *Area) copy(from, to string) error {
	src, err := durable.OpenRegular(from, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(a.copyOf(src, to), src.Close())
}

func (a *Area) copyOf(src *os.File, to string) error {
	dst, err := a.disk.Clone(src, to, 0o666&^umask())
	if err != nil {
		return err
	}
	return dst.Close()
}

// umask returns the file mode creation mask of this process without changing it.
func umask() fs.FileMode {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0o022
	}
	for line := range strings.Lines(string(b)) {
		var m fs.FileMode
		if n, _ := fmt.Sscanf(line, "Umask: %o", &m); n == 1 {
			return m
		}
	}
	return 0o022
}
