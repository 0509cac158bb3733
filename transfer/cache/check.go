package cache

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// Checked is what a check of a cache found.
type Checked struct {
	Files   int               `json:"files"` // that match
	Bytes   int64             `json:"size_bytes"`
	Dropped []identity.Digest `json:"dropped"` // that did not match, in ascending order; they are removed
}

// Checking says who is told how a check goes, from several goroutines at a time. Nil functions are not called.
type Checking struct {
	Moved func(d identity.Digest, done, size int64) // bytes of a file; first that none are done, for every file
	Done  func(d identity.Digest, size int64)
}

// Verify reads and hashes every file of the cache, several at a time, and removes those that do not match.
func (c *Cache) Verify(ctx context.Context, o Checking) (v Checked, err error) {
	files, err := c.list()
	if err != nil {
		return v, err
	}
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(b.size, a.size) })
	var mu sync.Mutex // guards v
	jobs := make([]*check, len(files))
	for i, f := range files {
		jobs[i] = &check{c: c, digest: f.digest, path: f.path}
		if o.Moved != nil {
			jobs[i].moved = func(n int64) { o.Moved(f.digest, n, f.size) }
			jobs[i].moved(0)
		}
		jobs[i].done = func(ok bool) {
			if o.Done != nil {
				o.Done(f.digest, f.size)
			}
			mu.Lock()
			defer mu.Unlock()
			if ok {
				v.Files, v.Bytes = v.Files+1, v.Bytes+f.size
			} else {
				v.Dropped = append(v.Dropped, f.digest)
			}
		}
	}
	err = hashing.Run(ctx, jobs, hashing.Options{})
	slices.SortFunc(v.Dropped, identity.Digest.Compare)
	return v, err
}

// again hashes a file and records it, or drops it if it does not match.
func (c *Cache) again(ctx context.Context, d identity.Digest, path string) (r record, ok bool, err error) {
	k := &check{c: c, digest: d, path: path}
	err = hashing.Run(ctx, []*check{k}, hashing.Options{})
	return k.record, k.ok, err
}

// errSpoilt: a file that came in part from an earlier process is not what it was then.
var errSpoilt = errors.New("its partial file was changed on the disk")

// arrived hashes a file that is about to get its name. errSpoilt.
func (c *Cache) arrived(ctx context.Context, d identity.Digest, path string) error {
	k := &check{c: c, digest: d, path: path, arriving: true}
	err := hashing.Run(ctx, []*check{k}, hashing.Options{})
	if err == nil && !k.ok {
		err = errSpoilt
	}
	return err
}

// check is a file that is hashed. What does not match is dropped.
type check struct {
	c        *Cache
	digest   identity.Digest
	path     string
	arriving bool // it does not lie in the cache yet: it is neither recorded nor dropped

	moved func(n int64) // bytes that were hashed; nil: not called
	done  func(ok bool) // called unless the file is gone or can't be read; nil: not called

	f      *os.File
	before fs.FileInfo
	hash   *lanes.Recorder
	record record
	ok     bool
}

// Open implements hashing.Job.
func (k *check) Open() (p hashing.Part, err error) {
	k.f, err = durable.OpenRegular(k.path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return p, hashing.ErrNothing
	}
	if err != nil {
		return p, err
	}
	if k.before, err = k.f.Stat(); err != nil {
		k.f.Close()
		return p, err
	}
	k.hash = lanes.NewRecorder(lanes.SegmentSize)
	return hashing.Part{File: k.f, End: -1, To: k.hash}, nil
}

// Moved implements hashing.Job.
func (k *check) Moved(n int64) {
	if k.moved != nil {
		k.moved(n)
	}
}

// Close implements hashing.Job.
func (k *check) Close(err error) error {
	defer k.f.Close()
	if err == nil {
		err = k.judge()
	}
	if err == nil && k.done != nil {
		k.done(k.ok)
	}
	return err
}

// judge says whether the bytes that were hashed are those of the file, and what they should be.
func (k *check) judge() error {
	now, err := k.f.Stat()
	switch there, lerr := os.Lstat(k.path); {
	case err != nil:
		return err
	case lerr != nil || !os.SameFile(there, now):
		return nil // dropped or replaced meanwhile
	case identity.DigestOf(k.hash) != k.digest, recordOf(k.before, time.Time{}) != recordOf(now, time.Time{}):
		if k.arriving {
			return nil
		}
		k.c.o.Notify("dropped from the cache: damaged: " + k.path)
		return k.c.drop(k.path)
	}
	if k.arriving {
		k.keepStates(now.Size())
		k.ok = true
		return nil
	}
	if now.Mode().Perm() != staging.Shared {
		if err := k.f.Chmod(staging.Shared); err != nil {
			return err
		}
	}
	k.keepStates(now.Size())
	k.record, err = k.c.keep(k.path, k.path)
	k.ok = err == nil
	return err
}

// keepStates keeps the midstates that were noted while the file was hashed.
func (k *check) keepStates(size int64) {
	_, noted := k.hash.Take()
	s, err := lanes.New(lanes.SegmentSize, size, k.digest, noted[:lanes.Edges(size, lanes.SegmentSize)])
	if err == nil {
		k.c.KeepMidstates(s)
	}
}

// leastStates is the size of a file up to which midstates are of no use.
const leastStates = 2 * lanes.SegmentSize

// KeepMidstates keeps those of a file that the cache has or is about to receive, for Midstates to give. They are a
// help: it is no error if they can't be kept.
func (c *Cache) KeepMidstates(s *lanes.States) {
	if s.Size <= leastStates {
		return
	}
	path := c.path(s.Digest)
	b, err := s.MarshalBinary()
	if err == nil {
		err = c.ready(path)
	}
	if err == nil {
		_ = c.disk().WriteFile(path+statesSuffix, b, 0o644)
	}
}

// Midstates returns those of a file with a digest and a size. Nil: there are none, or none that fit. They are worth
// what those of staging.Midstates are.
func (c *Cache) Midstates(d identity.Digest, size int64) *lanes.States {
	path := c.path(d) + statesSuffix
	if size <= leastStates || !c.Uses(d) || own(path, 0) != nil {
		return nil
	}
	f, err := durable.OpenRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, (lanes.Edges(size, lanes.SegmentSize)+8)*int64(len(lanes.State{}))))
	if err != nil {
		return nil
	}
	s, err := lanes.Parse(b)
	if err != nil || s.Digest != d || s.Size != size {
		return nil
	}
	return s
}
