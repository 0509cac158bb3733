package s3store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
)

// partMin is the size of the smallest part that is sent, but the last.
const partMin = 16 << 20

// partSize returns how large part n is, counted from 0, of an upload that was announced with a size. Parts of one
// upload are equal then and 9,000 suffice. Where nothing was announced (a negative size) they grow after the first
// 2,000, so that 10,000 reach the largest object.
func partSize(n int, announced, smallest int64) int64 {
	const step = 168 << 10
	if announced < 0 {
		return smallest + max(0, int64(n)-2000)*step
	}
	const unit = 1 << 20
	return max(smallest, (announced/9000+unit)/unit*unit)
}

// partSize returns how large the part is that is being filled.
func (s *session) partSize() int64 { return partSize(s.n, s.cur.Announced, s.st.partMin) }

// send stores a part, which ends at size where the hash state is h, and now and then saves the state.
func (s *session) send(ctx context.Context, b []byte, crc uint32, size int64, h []byte) error {
	if err := s.multipart(ctx); err != nil {
		return err
	}
	p, err := s.sendPart(ctx, b, crc)
	if err != nil {
		return err
	}
	s.cur.Parts = append(s.cur.Parts, p)
	s.cur.Parted, s.cur.Size, s.cur.Tails, s.cur.Hash = size, size, nil, h
	if s.cur.Size-s.saved.Size < s.st.saveEvery {
		return nil
	}
	return s.saveState(ctx)
}

// sendLast sends buf as the last part if everything that was announced is there, so that it needs no tail, which a Commit
// would have to fetch again. What goes wrong is in failed.
func (s *session) sendLast(ctx context.Context) {
	s.wait()
	complete, kept := s.size.Load() == s.cur.Announced, s.size.Load() == s.cur.Size
	if s.failed != nil || !complete || kept || s.cur.Multipart == "" {
		return
	}
	h, err := s.hash.MarshalBinary()
	if err == nil {
		err = s.send(context.WithoutCancel(ctx), s.buf, s.crc, s.size.Load(), h)
	}
	if err != nil {
		s.failed = err
		return
	}
	s.buf, s.crc = s.buf[:0], 0
	s.n++
}

// multipart begins a multipart upload, unless there is one, and notes it in the state.
func (s *session) multipart(ctx context.Context) error {
	if err := s.st.change(ctx); err != nil {
		return err
	}
	if s.cur.Multipart != "" {
		return nil
	}
	s.cur.Unnamed = s.cur.Target.IsZero()
	id, err := s.st.b.Begin(ctx, s.copyKey())
	if err != nil {
		return err
	}
	s.cur.Multipart = id
	return s.saveState(ctx)
}

// sendPart stores the next part.
func (s *session) sendPart(ctx context.Context, b []byte, crc uint32) (bucket.Part, error) {
	n := len(s.cur.Parts) + 1
	if n > bucket.MaxParts {
		return bucket.Part{}, fmt.Errorf("%w: more than %d parts", blobstore.ErrNoSpace, bucket.MaxParts)
	}
	return s.st.b.PutPart(ctx, s.copyKey(), s.cur.Multipart, n, b, crc)
}

// store makes the bytes of the upload, which hash to want, an object and returns once the server has confirmed them.
func (s *session) store(ctx context.Context, want identity.Digest) error {
	s.cur.Target = want
	if err := s.saveState(ctx); err != nil { // so that whoever drops the upload knows where the object is
		return err
	}
	if s.cur.Multipart == "" {
		return s.storeSmall(ctx, want)
	}
	err := s.complete(ctx, want)
	if err == nil {
		return nil
	}
	// An earlier try may have completed it.
	if failed := s.confirm(ctx, want); failed == nil || !errors.Is(failed, bucket.ErrParts) {
		return failed
	}
	return err
}

// storeSmall stores what is less than a part, in one request that the server checks by the blob's own digest.
func (s *session) storeSmall(ctx context.Context, want identity.Digest) error {
	if err := s.st.change(ctx); err != nil {
		return err
	}
	confirmed, err := s.st.b.PutVerified(ctx, s.copyKey(), s.buf, want)
	if err != nil || confirmed {
		return err
	}
	return s.readBack(ctx, want)
}

// complete sends the last part and makes an object of all of them.
func (s *session) complete(ctx context.Context, want identity.Digest) error {
	parts := s.parts()
	if len(s.buf) > 0 {
		last, err := s.sendPart(ctx, s.buf, s.crc)
		if err != nil {
			return err
		}
		parts[len(parts)-1] = last
	}
	checksum, err := s.st.b.Complete(ctx, s.copyKey(), s.cur.Multipart, parts)
	if err != nil || checksum == bucket.Checksum(parts) {
		return err
	}
	return s.confirm(ctx, want)
}

// parts returns all parts, the last one without its ETag if it is still in buf.
func (s *session) parts() []bucket.Part {
	parts := slices.Clone(s.cur.Parts)
	if len(s.buf) > 0 {
		parts = append(parts, bucket.Part{CRC: s.crc})
	}
	return parts
}

// confirm checks that the object is there and is what was sent, by the checksum that the server keeps or by reading it.
func (s *session) confirm(ctx context.Context, want identity.Digest) error {
	e, err := s.st.b.Head(ctx, s.copyKey())
	if errors.Is(err, bucket.ErrAbsent) {
		return bucket.ErrParts
	} else if err != nil {
		return err
	}
	sent := bucket.Checksum(s.parts())
	switch {
	case e.Size != s.size.Load():
		return fmt.Errorf("%w: %s has %d bytes, sent were %d", bucket.ErrParts, s.copyKey(), e.Size, s.size.Load())
	case e.CRC32C == sent:
		return nil
	case e.CRC32C != "":
		return fmt.Errorf("%w: it keeps CRC-32C %s, sent was %s", bucket.ErrParts, e.CRC32C, sent)
	}
	return s.readBack(ctx, want)
}

// readBack hashes the stored object: for servers that do not confirm what they stored.
func (s *session) readBack(ctx context.Context, want identity.Digest) error {
	r, err := s.st.openRange(ctx, blobstore.Info{Digest: want, Size: s.size.Load(), Generation: s.copyName()}, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	h := identity.NewHash()
	if _, err := io.Copy(h, r); err != nil {
		return err
	}
	if got := identity.DigestOf(h); got != want {
		return fmt.Errorf("%w: %s reads as %s", bucket.ErrParts, s.copyKey(), got)
	}
	return nil
}
