package gpuload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"golang.org/x/sync/errgroup"
)

// chunk is a part of a shard on its way through a lane. Its buffer has one user for the hash, one for the disk and one
// for each copy.
type chunk struct {
	buf    *buffer
	data   []byte
	off    int64 // in the file
	begun  time.Time
	tokens []Token
}

type aligned interface{ Align() int64 }

// stages are where a chunk goes at once. Each holds as many as there are buffers, so sending to it never blocks.
type stages struct{ hash, copy, disk chan chunk }

func newStages(ring int) stages {
	return stages{make(chan chunk, ring), make(chan chunk, ring), make(chan chunk, ring)}
}

func (s stages) close() {
	close(s.hash)
	close(s.copy)
	close(s.disk)
}

// shard sends one file through the stages of a lane and checks it. The stages stop together: the first error ends the
// others.
func (l *loader) shard(ctx context.Context, i int, ring chan *buffer) (err error) {
	s := l.plan.Shards[i]
	f, err := l.src.Open(ctx, s.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := s.unchanged(f, 0); err != nil {
		return err
	}
	kept, err := l.keep(s)
	if err != nil {
		return err
	}
	defer func() {
		if e := kept.Close(); err == nil {
			err = s.diskError(s.Size, e)
		}
	}()
	to := newStages(l.o.Ring)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer to.close()
		return l.readAll(gctx, i, f, ring, to)
	})
	g.Go(func() error { return l.hashAll(gctx, i, to.hash) })
	g.Go(func() error { return l.settle(gctx, s, to.copy) })
	g.Go(func() error { return l.keepAll(gctx, s, kept, to.disk) })
	if err := g.Wait(); err != nil {
		return err
	}
	if err := s.unchanged(f, s.Size); err != nil {
		return err
	}
	if err := l.check(i); err != nil {
		return err
	}
	defer l.disk.since(time.Now())
	return s.diskError(s.Size, kept.Commit(l.seen[i]))
}

// unchanged says whether f is the file of the plan, as it was then.
func (s Shard) unchanged(f File, off int64) error {
	switch now, err := f.Stamp(); {
	case err != nil:
		return &Error{Shard: s.Name, Offset: off, Err: err}
	case now.Size != s.Size:
		return &Error{s.Name, off, fmt.Sprint(s.Size, " bytes"), fmt.Sprint(now.Size), ErrChanged}
	case now != s.stamp:
		return &Error{Shard: s.Name, Offset: off, Err: ErrChanged}
	}
	return nil
}

// check compares the digest of a shard that was read to its end.
func (l *loader) check(i int) error {
	m, s, got := l.plan.Want.Manifest, l.plan.Shards[i], l.seen[i]
	if m != nil && m.Shards[i].Digest != got {
		return &Error{s.Name, s.Size, m.Shards[i].Digest.String(), got.String(), ErrMismatch}
	}
	return nil
}

// readAll fills buffers with the data of shard i in order, starts their copies, and passes them on.
func (l *loader) readAll(ctx context.Context, i int, f File, ring chan *buffer, to stages) error {
	s := l.plan.Shards[i]
	for off := s.Data; off < s.Size; {
		var buf *buffer
		select {
		case buf = <-ring:
		case <-ctx.Done():
			return stopped(ctx, s, off)
		}
		buf.refs.Store(int32(2 + len(l.blocks[i])))
		start := time.Now()
		data, err := readWindow(f, buf.data, off, s.Size-off)
		l.read.since(start)
		if err != nil {
			return &Error{s.Name, off + int64(len(data)), fmt.Sprint(s.Size, " bytes"), "fewer", err}
		}
		c := chunk{buf: buf, data: data, off: off, begun: time.Now()}
		for _, b := range l.blocks[i] {
			t, err := l.target.Submit(ctx, data, b, off-s.Data)
			if err != nil {
				return &Error{Shard: s.Name, Offset: off, Err: deviceError(err)}
			}
			c.tokens = append(c.tokens, t)
		}
		to.hash <- c
		to.copy <- c
		to.disk <- c
		off += int64(len(data))
	}
	return nil
}

// hashAll hashes the shard, of which the header was hashed when it was planned.
func (l *loader) hashAll(ctx context.Context, i int, filled <-chan chunk) error {
	s, h := l.plan.Shards[i], identity.NewHash()
	if err := h.UnmarshalBinary(s.hashed); err != nil {
		return fmt.Errorf("hash shard %s: %w", s.Name, err)
	}
	l.progress(s.Name, s.Data)
	for c := range filled {
		start := time.Now()
		hash(&l.pool, h, c.data)
		l.hash.since(start)
		l.progress(s.Name, c.off+int64(len(c.data)))
		c.buf.release()
		if ctx.Err() != nil {
			return stopped(ctx, s, c.off)
		}
	}
	l.seen[i] = identity.DigestOf(h)
	return nil
}

// hash writes b to h in pieces, which are hashed together with those of other streams where every core is busy.
func hash(p *lanes.Pool, h identity.Hash, b []byte) {
	for part := range slices.Chunk(b, hashPiece) {
		p.Write(h, part)
	}
}

func (l *loader) progress(shard string, done int64) {
	if l.o.Progress != nil {
		l.o.Progress(shard, done)
	}
}

// settle waits for the copies in order. The time of a copy counts from the end of the one before it.
func (l *loader) settle(ctx context.Context, s Shard, sent <-chan chunk) error {
	var last time.Time
	for c := range sent {
		if c.begun.Before(last) {
			c.begun = last
		}
		for _, t := range c.tokens {
			if err := t.Wait(ctx); err != nil {
				if ctx.Err() != nil {
					return stopped(ctx, s, c.off)
				}
				return &Error{Shard: s.Name, Offset: c.off, Err: deviceError(err)}
			}
			c.buf.release()
		}
		l.copy.since(c.begun)
		last = time.Now()
	}
	return nil
}

// keep begins to keep a shard on the disk, where that is asked for.
func (l *loader) keep(s Shard) (Kept, error) {
	if l.o.Keep == nil {
		return unkept{}, nil
	}
	k, err := l.o.Keep.Keep(s.Name, s.Size)
	return k, s.diskError(0, err)
}

// unkept is a shard that nobody keeps.
type unkept struct{}

func (unkept) WriteAt(b []byte, _ int64) (int, error) { return len(b), nil }
func (unkept) Commit(identity.Digest) error           { return nil }
func (unkept) Close() error                           { return nil }

// keepAll writes the shard to the disk, the header first, which was read when the shard was planned.
func (l *loader) keepAll(ctx context.Context, s Shard, to Kept, filled <-chan chunk) error {
	write := func(b []byte, off int64) error {
		defer l.disk.since(time.Now())
		_, err := to.WriteAt(b, off)
		return s.diskError(off, err)
	}
	if err := write(s.header, 0); err != nil {
		return err
	}
	for c := range filled {
		if err := write(c.data, c.off); err != nil {
			return err
		}
		c.buf.release()
		if ctx.Err() != nil {
			return stopped(ctx, s, c.off)
		}
	}
	return nil
}

// diskError returns nil for nil.
func (s Shard) diskError(off int64, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Shard: s.Name, Offset: off, Err: fmt.Errorf("%w: %w", ErrDisk, err)}
}

func stopped(ctx context.Context, s Shard, off int64) error {
	return &Error{Shard: s.Name, Offset: off, Err: context.Cause(ctx)}
}

// readWindow reads up to n bytes of f from off into b and returns them. For a file that asks for alignment, what lies
// before off is read along and left out. A file that ends early gives what there was and ErrChanged.
func readWindow(f File, b []byte, off, n int64) ([]byte, error) {
	skew, end := int64(0), min(n, int64(len(b)))
	if a, ok := f.(aligned); ok {
		skew = off % a.Align()
		end = min(roundUp(skew+n, a.Align()), int64(len(b)))
	}
	m, err := f.ReadAt(b[:end], off-skew)
	data := b[min(skew, int64(m)):min(int64(m), skew+n)]
	switch {
	case int64(m) >= min(skew+n, end):
		return data, nil
	case err == nil, errors.Is(err, io.EOF):
		return data, ErrChanged
	}
	return data, err
}
