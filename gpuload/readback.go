package gpuload

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
)

// readBack hashes every block again, from the device, and compares it with what was hashed before. Every copy is done.
func (l *loader) readBack(ctx context.Context, s *slab) error {
	r, ok := l.target.(Reader)
	if !ok {
		return fmt.Errorf("read the weights back: this target can't: %w", errors.ErrUnsupported)
	}
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for _, ring := range s.rings {
		g.Go(func() error {
			buf := <-ring
			defer func() { ring <- buf }()
			for i := next.Add(1) - 1; i < int64(len(l.blocks)); i = next.Add(1) - 1 {
				for _, b := range l.blocks[i] {
					if err := l.reread(ctx, r, int(i), b, buf.data); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// reread hashes the block b of shard i through buf.
func (l *loader) reread(ctx context.Context, r Reader, i int, b Block, buf []byte) error {
	s, h := l.plan.Shards[i], identity.NewHash()
	if err := h.UnmarshalBinary(s.head); err != nil {
		return fmt.Errorf("hash shard %s: %w", s.Name, err)
	}
	for off := s.Data; off < s.Size; {
		if ctx.Err() != nil {
			return stopped(ctx, s, off)
		}
		part := buf[:min(int64(len(buf)), s.Size-off)]
		if err := r.ReadBack(ctx, b, off-s.Data, part); err != nil {
			return &Error{Shard: s.Name, Offset: off, Err: deviceError(err)}
		}
		h.Write(part)
		off += int64(len(part))
	}
	l.back.Add(s.Size - s.Data)
	if got := identity.DigestOf(h); got != l.seen[i] {
		err := deviceError(errors.New("it holds other bytes than it was sent"))
		return &Error{s.Name, s.Size, l.seen[i].String(), got.String(), err}
	}
	return nil
}
