// Package memstore is a store in memory that checks itself: it hashes again what it hands out, keeps nothing that a
// caller could change later, and can be told to fail. It is for tests, which it shows that what runs on one store runs
// on any.
package memstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// Op names a change of the store for Store.Fault.
type Op string

// The changes of a store.
const (
	OpCreate   Op = "create"
	OpAppend   Op = "append"
	OpCommit   Op = "commit"
	OpAbort    Op = "abort"
	OpDelete   Op = "delete"
	OpSetAside Op = "set aside"
	OpKeep     Op = "keep midstates"
	OpPut      Op = "put refs"
)

// Capacity is the number of bytes that a Store holds, all blobs and uploads together.
const Capacity = 1 << 40

// Store is a store in memory. It implements blobstore.Store, Uploads, Refs, Quarantine and Segments.
type Store struct {
	// Fault, if set, stands in for every change: it may call do and return its error (no fault), return an error without
	// calling do (failed and lost), or call do and return an error all the same (failed but persisted). It is set before
	// the store is used.
	Fault func(op Op, do func() error) error

	mu     sync.Mutex
	closed bool
	*content
}

// content is what outlives a Store.
type content struct {
	blobs   map[identity.Digest]*blob
	aside   map[identity.Digest]*aside
	uploads map[string]*session
	refs    []placed
	copies  int   // generations given out
	segment int64 // lanes.SegmentSize, smaller in tests
}

type blob struct {
	blobstore.Info
	data      []byte
	midstates []byte // nil if the blob has one segment
}

type aside struct {
	blobstore.AsideInfo
	data []byte
}

type session struct {
	blob      blobstore.Info // what it became; zero: it is open, and else it has no data
	data      []byte
	hash      *lanes.Recorder // of data
	hint      identity.Digest
	announced int64
	touched   time.Time
	busy      bool
}

type placed struct {
	blobstore.Ref
	sum identity.Digest // of the manifest, when it was put
}

var (
	_ blobstore.Store      = (*Store)(nil)
	_ blobstore.Uploads    = (*Store)(nil)
	_ blobstore.Refs       = (*Store)(nil)
	_ blobstore.Quarantine = (*Store)(nil)
	_ blobstore.Segments   = (*Store)(nil)

	errClosed = errors.New("store is closed")
)

// New returns an empty store.
func New() *Store {
	return &Store{content: &content{
		blobs:   map[identity.Digest]*blob{},
		aside:   map[identity.Digest]*aside{},
		uploads: map[string]*session{},
		segment: lanes.SegmentSize,
	}}
}

// Close makes every later call fail. What the store holds can be opened again.
func (st *Store) Close() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.closed = true
	return nil
}

// Reopen closes st, as the death of its process would, and returns another store with the same content.
func (st *Store) Reopen() *Store {
	st.Close()
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, s := range st.uploads {
		s.busy = false
	}
	c := *st.content
	return &Store{Fault: st.Fault, content: &c}
}

// do runs a change under the lock, and through Fault.
func (st *Store) do(op Op, change func() error) error {
	locked := func() error {
		st.mu.Lock()
		defer st.mu.Unlock()
		if st.closed {
			return errClosed
		}
		return change()
	}
	if st.Fault == nil {
		return locked()
	}
	return st.Fault(op, locked)
}

// view runs fn under the lock.
func (st *Store) view(ctx context.Context, fn func() error) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return errClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return fn()
}

// Check hashes everything again and says what is not as it should be.
func (st *Store) Check() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	var errs []error
	for d, b := range st.blobs {
		if b.Digest != d || identity.Sum(b.data) != d || b.Size != int64(len(b.data)) {
			errs = append(errs, fmt.Errorf("%w: blob %s", blobstore.ErrDamaged, d))
		}
		if err := b.checkMidstates(st.segment); err != nil {
			errs = append(errs, fmt.Errorf("%w: midstates of blob %s: %w", blobstore.ErrDamaged, d, err))
		}
		if st.aside[d] != nil {
			errs = append(errs, fmt.Errorf("%w: blob %s is shown and set aside", blobstore.ErrDamaged, d))
		}
	}
	for id, s := range st.uploads {
		if s.blob == (blobstore.Info{}) && identity.DigestOf(s.hash) != identity.Sum(s.data) {
			errs = append(errs, fmt.Errorf("%w: hash state of upload %s", blobstore.ErrDamaged, id))
		}
	}
	for i, r := range st.refs {
		if identity.Sum(r.Manifest) != r.sum {
			errs = append(errs, fmt.Errorf("%w: manifest of ref %d", blobstore.ErrDamaged, i))
		}
	}
	return errors.Join(errs...)
}

// Stat implements blobstore.Store.
func (st *Store) Stat(ctx context.Context, d identity.Digest) (i blobstore.Info, err error) {
	err = st.view(ctx, func() error {
		b := st.blobs[d]
		if b == nil {
			return st.absent("stat", blobstore.Info{Digest: d})
		}
		i = b.Info
		return nil
	})
	return i, err
}

// Open implements blobstore.Store. It hashes the whole blob.
func (st *Store) Open(ctx context.Context, i blobstore.Info, off, n int64) (r io.ReadCloser, err error) {
	d := i.Digest
	err = st.view(ctx, func() error {
		b := st.blobs[d]
		switch {
		case b == nil || b.Generation != i.Generation:
			return st.absent("open", i)
		case identity.Sum(b.data) != d:
			return fmt.Errorf("open blob %s: %w", d, blobstore.ErrDamaged)
		case off < 0 || off > b.Size:
			return fmt.Errorf("open blob %s: offset %d is outside of its %d bytes", d, off, b.Size)
		case n < 0 || n > b.Size-off:
			n = b.Size - off
		}
		r = reader{bytes.NewReader(b.data[off : off+n])}
		return nil
	})
	return r, err
}

type reader struct{ *bytes.Reader }

func (reader) Close() error { return nil }

// absent makes the error for a copy that is not shown.
func (st *Store) absent(what string, i blobstore.Info) error {
	err := blobstore.ErrNotFound
	if st.aside[i.Digest] != nil {
		err = blobstore.ErrQuarantined
	}
	return fmt.Errorf("%s blob %s, generation %q: %w", what, i.Digest, i.Generation, err)
}

// Delete implements blobstore.Store. It also removes a copy that was set aside.
func (st *Store) Delete(ctx context.Context, i blobstore.Info) error {
	return st.do(OpDelete, func() error {
		if a := st.aside[i.Digest]; a != nil && a.Generation == i.Generation {
			delete(st.aside, i.Digest)
			return nil
		}
		if b := st.blobs[i.Digest]; b == nil || b.Generation != i.Generation {
			return st.absent("delete", i)
		}
		delete(st.blobs, i.Digest)
		return nil
	})
}

// List implements blobstore.Store.
func (st *Store) List(ctx context.Context, after identity.Digest) iter.Seq2[blobstore.Info, error] {
	return func(yield func(blobstore.Info, error) bool) {
		var found []blobstore.Info
		err := st.view(ctx, func() error {
			for d, b := range st.blobs {
				if after.IsZero() || d.Compare(after) > 0 {
					found = append(found, b.Info)
				}
			}
			return nil
		})
		slices.SortFunc(found, func(a, b blobstore.Info) int { return a.Digest.Compare(b.Digest) })
		yieldAll(found, err, yield)
	}
}

func yieldAll[T any](found []T, err error, yield func(T, error) bool) {
	for _, f := range found {
		if !yield(f, nil) {
			return
		}
	}
	if err != nil {
		var zero T
		yield(zero, err)
	}
}

// Uploads implements blobstore.Uploads.
func (st *Store) Uploads(ctx context.Context) iter.Seq2[blobstore.UploadInfo, error] {
	return func(yield func(blobstore.UploadInfo, error) bool) {
		var found []blobstore.UploadInfo
		err := st.view(ctx, func() error {
			for _, id := range slices.Collect(maps.Keys(st.uploads)) {
				s := st.uploads[id]
				found = append(found, blobstore.UploadInfo{
					ID: id, Hint: s.hint, Size: s.size(), Touched: s.touched, Blob: s.blob.Digest,
				})
			}
			return nil
		})
		yieldAll(found, err, yield)
	}
}

// Put implements blobstore.Refs.
func (st *Store) Put(ctx context.Context, refs ...blobstore.Ref) (p blobstore.Position, err error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	err = st.do(OpPut, func() error {
		for _, r := range refs {
			r.Manifest = bytes.Clone(r.Manifest)
			st.refs = append(st.refs, placed{r, identity.Sum(r.Manifest)})
		}
		p = blobstore.Position(len(st.refs))
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	return p, nil
}

// Since implements blobstore.Refs.
func (st *Store) Since(ctx context.Context, after blobstore.Position) iter.Seq2[blobstore.PlacedRef, error] {
	return func(yield func(blobstore.PlacedRef, error) bool) {
		var found []placed
		err := st.view(ctx, func() error {
			if after > blobstore.Position(len(st.refs)) {
				return fmt.Errorf("read refs: %w: there are %d, asked for were those after %d",
					blobstore.ErrRefsDamaged, len(st.refs), after)
			}
			found = slices.Clone(st.refs[after:])
			return nil
		})
		for i, r := range found {
			if err == nil && identity.Sum(r.Manifest) != r.sum {
				err = fmt.Errorf("read refs: %w: a manifest was changed", blobstore.ErrRefsDamaged)
			}
			r.Manifest = bytes.Clone(r.Manifest)
			if err != nil || !yield(blobstore.PlacedRef{Ref: r.Ref, After: after + blobstore.Position(i) + 1}, nil) {
				break
			}
		}
		if err != nil {
			yield(blobstore.PlacedRef{}, err)
		}
	}
}

func (st *Store) newInfo(d identity.Digest, size int64) blobstore.Info {
	st.copies++
	return blobstore.Info{Digest: d, Size: size, Created: time.Now(), Generation: strconv.Itoa(st.copies)}
}

func newID() string { return rand.Text() }
