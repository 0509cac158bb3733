package blobstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Engine is a whole store, as one process has it open.
type Engine interface {
	Store
	Uploads
	Refs
	io.Closer
}

// ErrDiffers: the store that is copied to has refs of its own, so that it can't become a copy.
var ErrDiffers = errors.New("stores differ")

// CopyOptions are choices of Copy. The zero CopyOptions are the usual ones.
type CopyOptions struct {
	// Planned, if set, is told once what there is to copy, before the first byte. It costs one more listing of both.
	Planned func(blobs int, bytes int64)
	// Moved, if set, is told of a blob under way, and how many of its bytes were received. Like Copied and Damaged it is
	// called from several goroutines at a time, as often as once per piece.
	Moved func(i Info, bytes int64)
	// Copied, if set, is told of each blob once it is durable.
	Copied func(i Info)
	// Damaged, if set, is told of each blob that can't be read, or that does not hash to its digest. It is not copied.
	Damaged func(i Info, err error)
	// Refers, if set, returns which blobs the manifest of a ref refers to, so that those that are missing are found. Its
	// error ends Copy, after everything was copied.
	Refers func(r Ref) ([]identity.Digest, error)
	// Missing, if set, is told of each blob that a manifest refers to which was not deleted, and that src does not show
	// and dst does not hold.
	Missing func(m Missing)
	// Workers is how many blobs are copied at a time; 0 means 4.
	Workers int
}

// CopyResult is what one Copy did.
type CopyResult struct {
	Blobs   int   // copied
	Bytes   int64 // read from the source: less than those of the blobs where an earlier Copy was gone on with
	Present int   // blobs that were there already
	Damaged int   // blobs that were not copied, see CopyOptions
	Missing int   // blobs that were not there to be copied, see CopyOptions
	Refs    int   // copied; those that were there already are not counted
}

// Copy makes dst hold every blob and every ref of src, both of which nobody else may write to meanwhile. Each digest is
// checked on the way. Blobs come before refs, so that no ref of dst names a blob that is still to come.
//
// It can be called again after it was interrupted at any point: a blob that is there with the same size is not read
// again, and a blob that is there by half, an open upload whose hint is its digest, goes on from its size. Receipts of
// dst are dropped. ErrDiffers, before anything is copied, if the refs of dst are not the first refs of src. A damaged
// or missing blob of src is no error: dst has none then, and finds it missing as src does.
func Copy(ctx context.Context, dst, src Engine, o CopyOptions) (CopyResult, error) {
	c := &copying{dst: dst, src: src, o: o.complete(), damaged: map[identity.Digest]bool{}}
	after, err := c.common(ctx)
	if err != nil {
		return c.did, err
	}
	if err := c.prepare(ctx); err != nil {
		return c.did, err
	}
	if err := c.blobs(ctx); err != nil {
		return c.did, err
	}
	err = c.refs(ctx, after)
	if err == nil && c.o.Refers != nil {
		err = c.findMissing(ctx)
	}
	return c.did, err
}

func (o CopyOptions) complete() CopyOptions {
	if o.Moved == nil {
		o.Moved = func(Info, int64) {}
	}
	if o.Copied == nil {
		o.Copied = func(Info) {}
	}
	if o.Damaged == nil {
		o.Damaged = func(Info, error) {}
	}
	if o.Missing == nil {
		o.Missing = func(Missing) {}
	}
	if o.Workers <= 0 {
		o.Workers = 4
	}
	return o
}

// copying is one Copy.
type copying struct {
	dst, src Engine
	o        CopyOptions
	begun    map[identity.Digest]UploadInfo // open uploads of dst, by hint; the longest of each
	mu       sync.Mutex                     // guards did and damaged
	did      CopyResult
	damaged  map[identity.Digest]bool // blobs that were told of
}

// common returns the position in src after the refs that dst has as well. ErrDiffers if dst has others.
func (c *copying) common(ctx context.Context) (after Position, err error) {
	next, stop := iter.Pull2(c.src.Since(ctx, 0))
	defer stop()
	n := 0
	for held, err := range c.dst.Since(ctx, 0) {
		if err != nil {
			return 0, fmt.Errorf("copy to: %w", err)
		}
		n++
		ref, err, ok := next()
		switch {
		case err != nil:
			return 0, fmt.Errorf("copy from: %w", err)
		case !ok:
			return 0, fmt.Errorf("%w: ref %d, %s of %s, is only in the one to copy to", ErrDiffers, n, held.Name, held.Repo)
		}
		if same, err := sameRef(ref.Ref, held.Ref); err != nil {
			return 0, err
		} else if !same {
			return 0, fmt.Errorf("%w: ref %d is %s of %s in the one to copy from, and %s of %s in the other",
				ErrDiffers, n, ref.Name, ref.Repo, held.Name, held.Repo)
		}
		after = ref.After
	}
	return after, nil
}

func sameRef(a, b Ref) (bool, error) {
	x, err := EncodeRefs([]Ref{a})
	if err != nil {
		return false, err
	}
	y, err := EncodeRefs([]Ref{b})
	return bytes.Equal(x, y), err
}

// prepare finds what an earlier Copy began, and tells what is to be done.
func (c *copying) prepare(ctx context.Context) error {
	c.begun = map[identity.Digest]UploadInfo{}
	for u, err := range c.dst.Uploads(ctx) {
		if err != nil {
			return fmt.Errorf("copy to: %w", err)
		}
		if !u.Blob.IsZero() {
			if err := c.dropReceipt(ctx, u.ID); err != nil {
				return fmt.Errorf("copy to: %w", err)
			}
			continue
		}
		if best, ok := c.begun[u.Hint]; !u.Hint.IsZero() && (!ok || best.Size < u.Size) {
			c.begun[u.Hint] = u
		}
	}
	if c.o.Planned == nil {
		return nil
	}
	blobs, bytes := 0, int64(0)
	for i, err := range c.missing(ctx, new(int)) {
		if err != nil {
			return err
		}
		blobs, bytes = blobs+1, bytes+i.Size
	}
	c.o.Planned(blobs, bytes)
	return nil
}

// dropReceipt drops what an earlier Copy that was killed left of a blob that it had copied.
func (c *copying) dropReceipt(ctx context.Context, id string) error {
	u, err := c.dst.Resume(ctx, id)
	if errors.Is(err, ErrUploadUnknown) {
		return nil
	} else if err != nil {
		return err
	}
	return u.Abort(ctx)
}

// missing yields the blobs of src that dst does not hold with the same size, and counts the others. Both listings are
// in ascending order, and neither is kept.
func (c *copying) missing(ctx context.Context, present *int) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		next, stop := iter.Pull2(c.dst.List(ctx, identity.Digest{}))
		defer stop()
		held, err, more := next()
		for i, failed := range c.src.List(ctx, identity.Digest{}) {
			if failed != nil {
				yield(Info{}, fmt.Errorf("copy from: %w", failed))
				return
			}
			for more && err == nil && held.Digest.Compare(i.Digest) < 0 {
				held, err, more = next()
			}
			if err != nil {
				yield(Info{}, fmt.Errorf("copy to: %w", err))
				return
			}
			if more && held.Digest == i.Digest && held.Size == i.Size {
				*present++
			} else if !yield(i, nil) {
				return
			}
		}
	}
}

// blobs copies what is missing, some at a time. The first error ends it; what was received of the others stays.
func (c *copying) blobs(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	todo := make(chan Info)
	var workers sync.WaitGroup
	for range c.o.Workers {
		workers.Go(func() {
			for i := range todo {
				if err := c.blob(ctx, i); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	err := c.feed(ctx, todo)
	close(todo)
	workers.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (c *copying) feed(ctx context.Context, todo chan<- Info) error {
	for i, err := range c.missing(ctx, &c.did.Present) {
		if err != nil {
			return err
		}
		select {
		case todo <- i:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// blob copies one blob. That it is damaged in src is told, and no error.
func (c *copying) blob(ctx context.Context, i Info) error {
	err := c.goOn(ctx, i)
	if useless(err) {
		err = c.anew(ctx, i)
	}
	var bad *damage
	switch {
	case err == nil:
		c.count(func(did *CopyResult) { did.Blobs++ })
		c.o.Copied(i)
	case errors.As(err, &bad):
		c.count(func(did *CopyResult) {
			did.Damaged++
			c.damaged[i.Digest] = true
		})
		c.o.Damaged(i, bad.err)
	default:
		return fmt.Errorf("copy blob %s: %w", i.Digest, err)
	}
	return nil
}

func (c *copying) count(change func(*CopyResult)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.did)
}

// damage is what is wrong with a blob of src.
type damage struct{ err error }

func (d *damage) Error() string { return d.err.Error() }

// useless says of the error of an upload that was there before that it is not the start of the blob.
func useless(err error) bool {
	return errors.Is(err, ErrUploadUnknown) || errors.Is(err, ErrUploadBusy) || mismatch(err)
}

func mismatch(err error) bool {
	return errors.Is(err, ErrDigestMismatch) || errors.Is(err, ErrSizeMismatch)
}

// goOn brings an upload to its end that was begun before. ErrUploadUnknown if there is none.
func (c *copying) goOn(ctx context.Context, i Info) error {
	begun, ok := c.begun[i.Digest]
	if !ok || begun.Size > i.Size {
		return ErrUploadUnknown
	}
	u, err := c.dst.Resume(ctx, begun.ID)
	if err != nil {
		return err
	}
	if u.Size() > i.Size {
		return ErrUploadUnknown
	}
	return c.send(ctx, u, i)
}

func (c *copying) anew(ctx context.Context, i Info) error {
	u, err := c.dst.Create(ctx, i.Digest, i.Size)
	if err != nil {
		return err
	}
	if err = c.send(ctx, u, i); mismatch(err) {
		return &damage{err}
	}
	return err
}

// send sends what an upload lacks of a blob, and commits it.
func (c *copying) send(ctx context.Context, u Upload, i Info) error {
	off := u.Size()
	from, err := c.src.Open(ctx, i, off, -1)
	if err != nil {
		return c.unreadable(ctx, u, err)
	}
	defer from.Close()
	r := &sourceReader{r: from, at: off, moved: func(at int64) { c.o.Moved(i, at) }}
	got, err := u.Finish(ctx, off, r, i.Digest)
	c.count(func(did *CopyResult) { did.Bytes += r.at - off })
	switch {
	case r.err != nil:
		return c.unreadable(ctx, u, r.err)
	case err != nil:
		return err
	case got.Size != i.Size:
		return fmt.Errorf("%w: the one that is there already has %d bytes, not %d", ErrDamaged, got.Size, i.Size)
	}
	return u.Abort(ctx) // of the receipt
}

// unreadable is for an error of src: unless src as a whole has failed, the blob is given up.
func (c *copying) unreadable(ctx context.Context, u Upload, err error) error {
	if ctx.Err() != nil || errors.Is(err, ErrUnavailable) {
		return err
	}
	if failed := u.Abort(ctx); failed != nil {
		return failed
	}
	return &damage{err}
}

// sourceReader reads a blob of src, and remembers the error that it ended with, so that it is not taken for one of dst.
type sourceReader struct {
	r     io.Reader
	at    int64
	err   error
	moved func(at int64)
}

func (s *sourceReader) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if s.at += int64(n); n > 0 {
		s.moved(s.at)
	}
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// A group of refs that are put together is full when it has one of these.
const (
	copyRefs      = 1024
	copyRefsBytes = 1 << 20
)

// refs copies the refs of src after a position.
func (c *copying) refs(ctx context.Context, after Position) error {
	var group []Ref
	size := 0
	for ref, err := range c.src.Since(ctx, after) {
		if err != nil {
			return fmt.Errorf("copy from: %w", err)
		}
		group, size = append(group, ref.Ref), size+len(ref.Manifest)
		if len(group) < copyRefs && size < copyRefsBytes {
			continue
		}
		if err := c.put(ctx, group); err != nil {
			return err
		}
		group, size = nil, 0
	}
	return c.put(ctx, group)
}

func (c *copying) put(ctx context.Context, group []Ref) error {
	if len(group) == 0 {
		return nil
	}
	if _, err := c.dst.Put(ctx, group...); err != nil {
		return fmt.Errorf("copy to: %w", err)
	}
	c.did.Refs += len(group)
	return nil
}
