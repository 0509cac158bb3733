package s3store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// Create implements blobstore.Store. An announced size that no bucket.Object can have is ErrNoSpace.
func (st *Store) Create(ctx context.Context, hint identity.Digest, size int64) (blobstore.Upload, error) {
	u, err := st.create(ctx, hint, size)
	if err != nil {
		return nil, fmt.Errorf("create upload: %w", err)
	}
	return u, nil
}

func (st *Store) create(ctx context.Context, hint identity.Digest, size int64) (*upload, error) {
	if size > bucket.MaxObject {
		return nil, fmt.Errorf("%w: %d bytes to come, an object has at most %d",
			blobstore.ErrNoSpace, size, int64(bucket.MaxObject))
	}
	s := &session{st: st, id: rand.Text(), name: rand.Text(), hash: lanes.NewRecorder(st.segment)}
	begin, err := s.point()
	if err != nil {
		return nil, err
	}
	s.cur = state{Hint: hint, Announced: max(size, -1), Target: hint}
	s.cur.reach(begin)
	if err := s.saveState(ctx); err != nil {
		return nil, err
	}
	return &upload{st: st, id: s.id}, nil
}

// Resume implements blobstore.Store. The upload goes on behind the last state that was saved: at the end of the last
// Append that returned, or of the last parts that one which was killed had saved.
func (st *Store) Resume(ctx context.Context, id string) (blobstore.Upload, error) {
	u := &upload{st: st, id: id}
	if err := u.resume(ctx); err != nil {
		return nil, fmt.Errorf("resume upload %.80q: %w", id, err)
	}
	return u, nil
}

func (u *upload) resume(ctx context.Context) error {
	s, o, err := u.st.readState(ctx, u.id)
	if damaged := errors.Is(err, blobstore.ErrDamaged); u.st.reading && (damaged || s.Ended) {
		return and(blobstore.ErrUploadUnknown, err)
	} else if damaged || s.Ended {
		var held *session
		if held, err = u.st.begin(ctx, u.id, false); err == nil { // which would have dropped it: it has been put right
			held.close()
		}
	}
	if err != nil {
		return err
	}
	u.size.Store(s.Size)
	r, err := u.st.findEnded(ctx, u.id, s, o.ETag)
	if err != nil || r == nil {
		return err
	}
	u.size.Store(r.size)
	_, err = u.st.Stat(ctx, r.digest)
	if errors.Is(err, blobstore.ErrNotFound) {
		err = blobstore.ErrUploadUnknown
		if !u.st.reading {
			err = and(err, u.Abort(ctx))
		}
	}
	return err
}

// Uploads implements blobstore.Uploads.
func (st *Store) Uploads(ctx context.Context) iter.Seq2[blobstore.UploadInfo, error] {
	return func(yield func(blobstore.UploadInfo, error) bool) {
		prefix := st.b.Key(uploadsName) + "/"
		for o, err := range st.b.List(ctx, prefix, "", 0) {
			i := blobstore.UploadInfo{ID: strings.TrimPrefix(o.Key, prefix), Touched: o.Modified}
			var s state
			if err == nil {
				s, err = st.describeUpload(ctx, &i)
			}
			switch {
			case errors.Is(err, blobstore.ErrUploadUnknown), s.Ended:
				continue
			case errors.Is(err, blobstore.ErrDamaged):
				err = nil // it is listed all the same: whoever resumes it is told
			case err != nil:
				yield(i, fmt.Errorf("list uploads: %w", err))
				return
			}
			if !yield(i, nil) {
				return
			}
		}
	}
}

// describeUpload fills in what the state of an upload says.
func (st *Store) describeUpload(ctx context.Context, i *blobstore.UploadInfo) (state, error) {
	s, o, err := st.readState(ctx, i.ID)
	if err != nil {
		return s, err
	}
	i.Hint, i.Size = s.Hint, s.Size
	r, err := st.findEnded(ctx, i.ID, s, o.ETag)
	if r != nil {
		i.Blob, i.Size = r.digest, r.size
	}
	return s, err
}

// upload is a handle: what an upload is stands in the bucket, so handles of one id need not know of each other.
type upload struct {
	st   *Store
	id   string
	size atomic.Int64 // when last seen
}

func (u *upload) ID() string { return u.id }

// Size returns the bytes received, also while an Append of this process runs, and else what this handle has last seen.
func (u *upload) Size() int64 {
	u.st.mu.Lock()
	s := u.st.active[u.id]
	u.st.mu.Unlock()
	if r := u.st.endedAs(u.id); r != nil {
		return r.size
	}
	if s != nil {
		return s.size.Load()
	}
	return u.size.Load()
}

// Append implements blobstore.Upload. It gives up when ctx ends, between two reads of r, and keeps what it has. It
// holds two parts in memory at most.
func (u *upload) Append(ctx context.Context, off int64, r io.Reader) (int64, error) {
	kept, err := u.append(ctx, off, r)
	if err != nil {
		err = fmt.Errorf("append to upload %s: %w", u.id, err)
	}
	return kept, err
}

func (u *upload) append(ctx context.Context, off int64, r io.Reader) (int64, error) {
	s, err := u.begin(ctx, true)
	if err != nil {
		return 0, err
	}
	defer u.end(s)
	if err := s.begins(off); err != nil {
		return 0, err
	}
	if s.ended != nil {
		return 0, blobstore.AtEnd(r, s.ended.digest)
	}
	if err = s.receive(ctx, r); err == nil {
		s.sendLast(ctx)
	}
	if saved := s.save(ctx); saved != nil {
		err = and(err, saved)
	}
	return s.size.Load() - off, u.lost(ctx, s, err)
}

func (u *upload) begin(ctx context.Context, bytes bool) (*session, error) {
	s, err := u.st.begin(ctx, u.id, bytes)
	if err == nil {
		u.size.Store(s.size.Load())
	}
	return s, err
}

func (u *upload) end(s *session) {
	u.size.Store(s.size.Load())
	s.close()
}

// lost drops an upload whose parts the server no longer has, as a rule of the bucket may have it.
func (u *upload) lost(ctx context.Context, s *session, err error) error {
	if !errors.Is(err, bucket.ErrNoUpload) && !errors.Is(err, bucket.ErrParts) {
		return err
	}
	return fmt.Errorf("%w: dropped: %w", blobstore.ErrUploadUnknown, and(err, s.drop(ctx)))
}

// Commit implements blobstore.Upload. An announced digest or size that does not come true is a mismatch.
func (u *upload) Commit(ctx context.Context, want identity.Digest) (blobstore.Info, error) {
	s, err := u.begin(ctx, true)
	var i blobstore.Info
	if err == nil {
		defer u.end(s)
		i, err = u.commit(ctx, s, want)
	}
	if err != nil {
		return blobstore.Info{}, fmt.Errorf("commit upload %s: %w", u.id, err)
	}
	return i, nil
}

// Finish implements blobstore.Upload. What is less than a part goes into the bucket once.
func (u *upload) Finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	s, err := u.begin(ctx, true)
	var i blobstore.Info
	if err == nil {
		defer u.end(s)
		if err = s.begins(off); err == nil {
			i, err = u.finish(ctx, s, r, want)
		}
	}
	if err != nil {
		return blobstore.Info{}, fmt.Errorf("finish upload %s: %w", u.id, err)
	}
	return i, nil
}

func (u *upload) finish(ctx context.Context, s *session, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	if s.ended != nil {
		if err := blobstore.AtEnd(r, s.ended.digest); err != nil {
			return blobstore.Info{}, err
		}
		return s.again(ctx, want)
	}
	if s.cur.Hint.IsZero() && s.cur.Multipart == "" {
		s.cur.Target = want
	}
	err := s.receive(ctx, r)
	s.wait()
	switch {
	case errors.Is(err, blobstore.ErrSizeMismatch):
		return blobstore.Info{}, and(err, s.drop(ctx))
	case err != nil || s.failed != nil:
		return blobstore.Info{}, u.lost(ctx, s, and(err, s.save(ctx)))
	}
	return u.commit(ctx, s, want)
}

// commit makes an upload that has all its bytes a blob.
func (u *upload) commit(ctx context.Context, s *session, want identity.Digest) (blobstore.Info, error) {
	if s.ended != nil {
		return s.again(ctx, want)
	}
	if err := s.check(want); err != nil {
		return blobstore.Info{}, and(err, s.drop(ctx))
	}
	i, err := s.publish(ctx, want)
	if err != nil {
		u.size.Store(s.size.Load())
		return blobstore.Info{}, u.lost(ctx, s, and(err, s.save(ctx)))
	}
	return i, nil
}

// again is the end of an upload that has ended already.
func (s *session) again(ctx context.Context, want identity.Digest) (blobstore.Info, error) {
	if got := s.ended.digest; got != want {
		err := fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
		return blobstore.Info{}, and(err, s.drop(ctx))
	}
	i, err := s.st.rely(ctx, want)
	if errors.Is(err, blobstore.ErrNotFound) {
		err = and(blobstore.ErrUploadUnknown, s.drop(ctx))
	}
	return i, err
}

// publish stores, confirms and shows what was received. What is left of the upload stays as its receipt.
func (s *session) publish(ctx context.Context, want identity.Digest) (i blobstore.Info, err error) {
	ctx = context.WithoutCancel(ctx)
	if err := s.st.change(ctx); err != nil {
		return i, err
	}
	if err := s.store(ctx, want); err != nil {
		return i, err
	}
	if s.cur.Unnamed {
		if _, err := s.st.b.Put(ctx, s.st.blobKey(want, s.copyName()), nil, bucket.Condition{}); err != nil {
			return i, err
		}
	}
	s.putMidstates(ctx, want)
	if i, err = s.st.publish(ctx, want, s.copyName(), s.size.Load()); err != nil {
		return i, err
	}
	if i.Generation != s.copyName() {
		if s.saved.Size > 0 { // else nothing was acknowledged that the receipt has to make up for
			s.cur.Became, s.cur.Whole = want, i.Size
			if err := s.saveState(ctx); err != nil {
				return i, err
			}
		}
		if err := s.st.removeCopy(ctx, want, s.copyName(), s.size.Load()); err != nil {
			return i, err
		}
	}
	s.st.setEnded(s.id, &receipt{want, i.Size, s.saved.clone(), s.etag})
	return i, nil
}

// Abort implements blobstore.Upload.
func (u *upload) Abort(ctx context.Context) error {
	s, err := u.begin(ctx, false)
	if errors.Is(err, blobstore.ErrUploadUnknown) {
		u.st.setEnded(u.id, nil)
		return nil
	}
	if err == nil {
		defer u.end(s)
		err = s.drop(ctx)
	}
	if err != nil {
		return fmt.Errorf("abort upload %s: %w", u.id, err)
	}
	return nil
}

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

// fill reads a piece into buf, or as much as there is room for in the part or is still to come.
func (s *session) fill(ctx context.Context, r io.Reader, room int64) (n int, err error) {
	want := int(min(pieceSize, room, s.partSize()-int64(len(s.buf))))
	if err := s.grow(ctx, want); err != nil {
		return 0, err
	}
	n, err = blobstore.Fill(r, s.buf[len(s.buf):len(s.buf)+want])
	s.buf = s.buf[:len(s.buf)+n]
	return n, err
}

// grow makes room for n more bytes in buf. The first part grows with what comes, as an announcement alone must not take
// memory; those after it take all at once. blobstore.ErrUnavailable.
func (s *session) grow(ctx context.Context, n int) error {
	if cap(s.buf)-len(s.buf) >= n {
		return nil
	}
	size := s.wholePart()
	if s.n == 0 {
		size = min(size, max(pieceSize, 4*int64(cap(s.buf)), int64(len(s.buf)+n)))
	}
	if err := s.reserve(ctx, size, s.wholePart()); err != nil {
		return err
	}
	if cap(s.buf)-len(s.buf) >= n { // it was waited for
		return nil
	}
	var b []byte
	switch {
	case size == s.st.partMin:
		b = *s.st.parts.Get().(*[]byte)
	default:
		b = make([]byte, 0, size)
	}
	s.buf = append(b, s.buf...)
	return nil
}

// wholePart returns how much buf will hold at most.
func (s *session) wholePart() int64 {
	size := s.partSize()
	if a := s.cur.Announced; a >= 0 {
		size = min(size, a-s.size.Load()+int64(len(s.buf)))
	}
	return size
}

// reserve takes memory for buf, which is to hold size bytes, and whole when it is full. Beyond a little it takes at once
// what the whole needs, so that no upload waits for more while it keeps others waiting. Where there is not enough, the
// buffer of the part on its way is waited for, or else one of another upload.
func (s *session) reserve(ctx context.Context, size, whole int64) error {
	m := &s.st.memory
	need := min(whole, m.all)
	if size <= uncounted || s.taken > 0 { // it takes no more for parts that grow a little
		return nil
	}
	if s.sending != nil { // and so buf is empty
		if m.take(ctx, need, 0) {
			s.taken = need
			return nil
		}
		if s.wait(); s.failed != nil {
			return s.failed
		}
		s.buf, s.taken, s.next, s.takenNext = s.next[:0], s.takenNext, nil, 0
		if !m.wanted() && s.taken >= need {
			return nil
		}
		m.give(s.taken) // the others have their turn first
		s.buf, s.taken = nil, 0
	}
	if !m.take(ctx, need, s.st.patience) {
		if err := ctx.Err(); err != nil {
			return err
		}
		return fmt.Errorf("%w: other uploads use all of the %d bytes of memory for parts", blobstore.ErrUnavailable, m.all)
	}
	s.taken = need
	return nil
}

// send stores a part, and now and then saves the state.
func (s *session) send(ctx context.Context, b []byte, crc uint32, end point) error {
	if err := s.multipart(ctx); err != nil {
		return err
	}
	p, err := s.sendPart(ctx, b, crc)
	if err != nil {
		return err
	}
	s.cur.Parts = append(s.cur.Parts, p)
	s.cur.Parted, s.cur.Tails = end.size, nil
	s.cur.reach(end)
	if s.cur.Size-s.saved.Size < s.st.saveEvery {
		return nil
	}
	return s.saveState(ctx)
}

// sendLast sends buf as the last part if everything that was announced is there, so that it needs no tail, which a
// Commit would have to fetch again. What goes wrong is in failed.
func (s *session) sendLast(ctx context.Context) {
	s.wait()
	complete, kept := s.size.Load() == s.cur.Announced, s.size.Load() == s.cur.Size
	if s.failed != nil || !complete || kept || s.cur.Multipart == "" {
		return
	}
	end, err := s.point()
	if err == nil {
		err = s.send(context.WithoutCancel(ctx), s.buf, s.crc, end)
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
