package gpuload

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// blocks are the blocks of each shard of a plan, one for each device that has it.
type blocks [][]Block

// name says of each handle which shard it is.
func (b blocks) name(handles []Handle) {
	for i := range b {
		for _, block := range b[i] {
			handles[block].Shard = i
		}
	}
}

// readBack hashes every block again through the buffers of s and compares it with the digest of its shard. No copy is
// open. It returns how many bytes were read.
func (b blocks) readBack(ctx context.Context, t Target, p Plan, want []identity.Digest, s *slab) (int64, error) {
	r, ok := t.(Reader)
	if !ok {
		return 0, fmt.Errorf("read the weights back: this target can't: %w", errors.ErrUnsupported)
	}
	var next, read atomic.Int64
	var pool lanes.Pool
	g, ctx := errgroup.WithContext(ctx)
	for _, ring := range s.rings {
		g.Go(func() error {
			buf := <-ring
			defer func() { ring <- buf }()
			for i := next.Add(1) - 1; i < int64(len(b)); i = next.Add(1) - 1 {
				for _, block := range b[i] {
					if err := p.Shards[i].reread(ctx, r, block, want[i], buf.data, &pool); err != nil {
						return err
					}
					read.Add(p.Shards[i].Size - p.Shards[i].Data)
				}
			}
			return nil
		})
	}
	err := g.Wait()
	return read.Load(), err
}

// reread hashes the shard anew, its data from block b through buf.
func (s Shard) reread(
	ctx context.Context, r Reader, b Block, want identity.Digest, buf []byte, pool *lanes.Pool,
) error {
	h := identity.NewHash()
	if err := h.UnmarshalBinary(s.hashed); err != nil {
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
		hash(pool, h, part)
		off += int64(len(part))
	}
	if got := identity.DigestOf(h); got != want {
		err := deviceError(errors.New("it holds other bytes than it was given"))
		return &Error{s.Name, s.Size, want.String(), got.String(), err}
	}
	return nil
}

// Audit reads every block back and hashes it again: whoever has a block of a device open can change it. It fails with
// an *Error, ErrDevice, for a shard whose bytes are others now, and with ErrState when the weights are not published.
// They are leased meanwhile. notify, which may be nil, is told when buffers can't be pinned.
func (r *Resident) Audit(ctx context.Context, notify func(string)) (err error) {
	_, release, err := r.Lease()
	if err != nil {
		return err
	}
	defer release()
	o := r.options
	o.Notify = notify
	s, _, err := newSlab(o, r.target)
	if err != nil {
		return err
	}
	defer func() { err = s.end(err) }()
	want := make([]identity.Digest, len(r.manifest.Shards))
	for i, s := range r.manifest.Shards {
		want[i] = s.Digest
	}
	if _, err = r.blocks.readBack(ctx, r.target, r.plan, want, s); err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}
