package memstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// Create implements blobstore.Store.
func (st *Store) Create(ctx context.Context, hint identity.Digest, size int64) (blobstore.Upload, error) {
	u := &upload{st: st, id: newID()}
	err := st.do(OpCreate, func() error {
		if size > Capacity {
			return fmt.Errorf("%w: %d bytes to come, %d bytes in all", blobstore.ErrNoSpace, size, int64(Capacity))
		}
		st.uploads[u.id] = &session{
			hash: lanes.NewRecorder(st.segment), hint: hint, announced: max(size, -1), touched: time.Now(),
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("create upload: %w", err)
	}
	return u, nil
}

// Resume implements blobstore.Store.
func (st *Store) Resume(ctx context.Context, id string) (blobstore.Upload, error) {
	err := st.view(ctx, func() error {
		if !st.open(st.uploads[id]) {
			delete(st.uploads, id)
			return fmt.Errorf("resume upload %s: %w", id, blobstore.ErrUploadUnknown)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &upload{st: st, id: id}, nil
}

// open says whether an upload may be gone on with: it has not ended, or the blob that it became is there.
func (st *Store) open(s *session) bool {
	return s != nil && (s.blob == (blobstore.Info{}) || st.blobs[s.blob.Digest] != nil)
}

func (s *session) size() int64 { return s.blob.Size + int64(len(s.data)) }

type upload struct {
	st   *Store
	id   string
	size int64 // when last seen; guarded by st.mu
}

func (u *upload) ID() string { return u.id }

func (u *upload) Size() int64 {
	u.st.mu.Lock()
	defer u.st.mu.Unlock()
	if s := u.st.uploads[u.id]; s != nil {
		u.size = s.size()
	}
	return u.size
}

// take makes the upload busy until give.
func (u *upload) take(ctx context.Context) (s *session, err error) {
	err = u.st.view(ctx, func() error {
		s = u.st.uploads[u.id]
		switch {
		case !u.st.open(s):
			delete(u.st.uploads, u.id)
			return blobstore.ErrUploadUnknown
		case s.busy:
			return blobstore.ErrUploadBusy
		}
		s.busy = true
		return nil
	})
	return s, err
}

func (u *upload) give(s *session) {
	u.st.mu.Lock()
	defer u.st.mu.Unlock()
	s.busy = false
}

func (u *upload) fail(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s upload %s: %w", what, u.id, err)
}

// Append implements blobstore.Upload.
func (u *upload) Append(ctx context.Context, off int64, r io.Reader) (kept int64, err error) {
	s, err := u.take(ctx)
	if err != nil {
		return 0, u.fail("append to", err)
	}
	defer u.give(s)
	if has := u.Size(); off != has {
		return 0, u.fail("append to", fmt.Errorf("%w: it has %d bytes, not %d", blobstore.ErrOffset, has, off))
	}
	if d := s.blob.Digest; !d.IsZero() {
		return 0, u.fail("append to", blobstore.AtEnd(r, d))
	}
	for err == nil {
		piece := make([]byte, 64<<10)
		n, rerr := r.Read(piece)
		var m int64
		m, err = u.keep(s, piece[:n])
		if kept += m; err == nil && rerr == io.EOF {
			return kept, nil
		}
		err = errors.Join(err, rerr, ctx.Err())
	}
	if errors.Is(err, blobstore.ErrNoSpace) {
		u.back(s, off)
		kept = 0
	}
	return kept, u.fail("append to", err)
}

// keep stores b, or as much of it as was announced.
func (u *upload) keep(s *session, b []byte) (kept int64, err error) {
	err = u.st.do(OpAppend, func() (err error) {
		if room := s.announced - int64(len(s.data)); s.announced >= 0 && int64(len(b)) > room {
			err = fmt.Errorf("%w: more than the announced %d bytes", blobstore.ErrSizeMismatch, s.announced)
			b = b[:room]
		}
		s.data = append(s.data, b...)
		s.hash.Write(b)
		s.touched = time.Now()
		kept = int64(len(b))
		return err
	})
	return kept, err
}

// back gives up what came after the first off bytes.
func (u *upload) back(s *session, off int64) {
	u.st.mu.Lock()
	defer u.st.mu.Unlock()
	s.data = s.data[:off]
	s.hash = lanes.NewRecorder(u.st.segment)
	s.hash.Write(s.data)
}

// Commit implements blobstore.Upload.
func (u *upload) Commit(ctx context.Context, want identity.Digest) (i blobstore.Info, err error) {
	s, err := u.take(ctx)
	if err != nil {
		return i, u.fail("commit", err)
	}
	defer u.give(s)
	u.Size()
	err = u.st.do(OpCommit, func() error {
		if err := s.check(want); err != nil {
			delete(u.st.uploads, u.id)
			return err
		}
		if s.blob == (blobstore.Info{}) {
			if i, err = u.st.show(want, s); err != nil {
				return err
			}
			s.blob, s.data, s.hash, s.touched = i, nil, nil, time.Now()
		}
		if !u.st.open(s) {
			delete(u.st.uploads, u.id)
			return blobstore.ErrUploadUnknown
		}
		i = u.st.blobs[want].Info
		return nil
	})
	if err != nil {
		return blobstore.Info{}, u.fail("commit", err)
	}
	return i, nil
}

// show makes a session that has all its bytes the blob d, in place of the one that is there.
func (st *Store) show(d identity.Digest, s *session) (blobstore.Info, error) {
	midstates, err := s.midstates(d, st.segment)
	if err != nil {
		return blobstore.Info{}, err
	}
	b := &blob{st.newInfo(d, int64(len(s.data))), s.data, midstates}
	st.blobs[d] = b
	delete(st.aside, d)
	return b.Info, nil
}

// Finish implements blobstore.Upload.
func (u *upload) Finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	if _, err := u.Append(ctx, off, r); errors.Is(err, blobstore.ErrSizeMismatch) {
		return blobstore.Info{}, errors.Join(err, u.Abort(ctx))
	} else if err != nil {
		return blobstore.Info{}, err
	}
	return u.Commit(ctx, want)
}

func (s *session) check(want identity.Digest) error {
	if got := s.blob.Digest; !got.IsZero() {
		if got != want {
			return fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
		}
		return nil
	}
	got := identity.DigestOf(s.hash)
	switch {
	case got != identity.Sum(s.data):
		return fmt.Errorf("%w: the hash state is not that of the bytes", blobstore.ErrDamaged)
	case s.announced >= 0 && s.announced != int64(len(s.data)):
		return fmt.Errorf("%w: received %d bytes, announced were %d", blobstore.ErrSizeMismatch, len(s.data), s.announced)
	case got != want:
		return fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
	case !s.hint.IsZero() && s.hint != want:
		return fmt.Errorf("%w: announced was %s, asked for %s", blobstore.ErrDigestMismatch, s.hint, want)
	}
	return nil
}

// Abort implements blobstore.Upload.
func (u *upload) Abort(ctx context.Context) error {
	s, err := u.take(ctx)
	if errors.Is(err, blobstore.ErrUploadUnknown) {
		return nil
	} else if err != nil {
		return u.fail("abort", err)
	}
	defer u.give(s)
	u.Size()
	return u.fail("abort", u.st.do(OpAbort, func() error { delete(u.st.uploads, u.id); return nil }))
}
