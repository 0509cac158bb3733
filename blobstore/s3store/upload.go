package s3store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
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
		return nil, fmt.Errorf("%w: %d bytes to come, an object has at most %d", blobstore.ErrNoSpace, size, int64(bucket.MaxObject))
	}
	s := &session{st: st, id: rand.Text(), name: rand.Text(), hash: identity.NewHash()}
	h, err := s.hash.MarshalBinary()
	if err != nil {
		return nil, err
	}
	s.cur = state{Hint: hint, Announced: max(size, -1), Target: hint, Hash: h}
	if err := s.saveState(ctx); err != nil {
		return nil, err
	}
	return &upload{st: st, id: s.id}, nil
}

// Resume implements blobstore.Store. The upload goes on behind the last state that was saved: at the end of the last
// Append that returned, or of the last parts that one which was killed had saved.
func (st *Store) Resume(ctx context.Context, id string) (blobstore.Upload, error) {
	s, err := st.loadState(ctx, id)
	if errors.Is(err, blobstore.ErrDamaged) || s.Ended {
		var held *session
		if held, err = st.begin(ctx, id, false); err == nil { // which would have dropped it: it has been put right
			held.close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("resume upload %.80q: %w", id, err)
	}
	u := &upload{st: st, id: id}
	u.size.Store(s.Size)
	return u, nil
}

// Uploads implements blobstore.Uploads.
func (st *Store) Uploads(ctx context.Context) iter.Seq2[blobstore.UploadInfo, error] {
	return func(yield func(blobstore.UploadInfo, error) bool) {
		prefix := st.b.Key(uploadsName) + "/"
		for o, err := range st.b.List(ctx, prefix, "", 0) {
			i := blobstore.UploadInfo{ID: strings.TrimPrefix(o.Key, prefix), Touched: o.Modified}
			var s state
			if err == nil {
				s, err = st.loadState(ctx, i.ID)
				i.Hint, i.Size = s.Hint, s.Size
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

// publish stores, confirms and shows what was received, and removes what is left of the upload.
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
	if i, err = s.st.publish(ctx, want, s.copyName(), s.size.Load()); err != nil {
		return i, err
	}
	if i.Generation != s.copyName() {
		if err := s.st.removeCopy(ctx, want, s.copyName()); err != nil {
			return i, err
		}
	}
	return i, s.clear(ctx)
}

// Abort implements blobstore.Upload.
func (u *upload) Abort(ctx context.Context) error {
	s, err := u.begin(ctx, false)
	if errors.Is(err, blobstore.ErrUploadUnknown) {
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
