package s3store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// partOf is the size of a part in these tests: the smallest that servers take.
const partOf = 5 << 20

// site is an empty store in a bucket of its own, with a proxy before it.
type site struct {
	testing.TB
	ctx    context.Context
	direct Config // past the proxy
	proxy  *tests3.Proxy
	via    Config // through the proxy
	rounds int    // of a client that pushes, before it gives up
}

func newSite(t testing.TB) *site {
	t.Helper()
	direct := place(t)
	p := tests3.NewProxy(t, direct.Endpoint)
	via := direct
	via.Endpoint = p.Endpoint()
	return &site{t, t.Context(), direct, p, via, 12}
}

// open opens the store through the proxy, with small parts.
func (s *site) open(o Options) *Store {
	s.Helper()
	return openAt(s, s.via, o)
}

// past opens the store past the proxy.
func (s *site) past() *Store {
	s.Helper()
	return openAt(s, s.direct, Options{})
}

func openAt(t testing.TB, c Config, o Options) *Store {
	t.Helper()
	o.limits.Pause = time.Millisecond
	st, err := Open(t.Context(), c, o)
	if err != nil {
		t.Fatal(err)
	}
	st.partMin, st.saveEvery = partOf, 2*partOf
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return st
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *site) want(what string, err, want error) {
	s.Helper()
	if !errors.Is(err, want) {
		s.Errorf("%s: error %v, want %v", what, err, want)
	}
}

// noise returns n bytes that depend on n and seed.
func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	period := b[:min(n, 4099)] // prime, so that no two pieces are the same
	rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%d %d", seed, n))).Read(period)
	for at := len(period); at < n; {
		at += copy(b[at:], b[:at])
	}
	return b
}

// push sends b to the store as the registry's clients do: it looks whether the blob is there, goes on where the upload
// ends, starts again when the upload is unknown, and gives up in the end.
func (s *site) push(st *Store, b []byte, how pushing) (i blobstore.Info, err error) {
	s.Helper()
	d, id := identity.Sum(b), ""
	for range s.rounds {
		if i, err = st.Stat(s.ctx, d); err == nil {
			return i, nil
		}
		if id == "" {
			var u blobstore.Upload
			if u, err = st.Create(s.ctx, how.hint(d), how.size(b)); err != nil {
				continue
			}
			id = u.ID()
		}
		i, err = s.send(st, id, b, how)
		switch {
		case err == nil:
			return i, nil
		case errors.Is(err, blobstore.ErrUploadUnknown):
			id = ""
		case errors.Is(err, blobstore.ErrDigestMismatch), errors.Is(err, blobstore.ErrSizeMismatch):
			s.Errorf("the right bytes are refused: %v", err)
			return i, err
		}
	}
	return i, err
}

// pushing is how a client pushes.
type pushing struct {
	named bool // it says digest and size at first
	step  int  // it appends so many bytes at a time; 0: it sends all in the request that finishes
}

func (p pushing) hint(d identity.Digest) identity.Digest {
	if p.named {
		return d
	}
	return identity.Digest{}
}

func (p pushing) size(b []byte) int64 {
	if p.named {
		return int64(len(b))
	}
	return -1
}

// send goes on with an upload to its end.
func (s *site) send(st *Store, id string, b []byte, how pushing) (i blobstore.Info, err error) {
	u, err := st.Resume(s.ctx, id)
	if err != nil {
		return i, err
	}
	for how.step > 0 && u.Size() < int64(len(b)) {
		off := u.Size()
		piece := b[off:min(len(b), int(off)+how.step)]
		n, err := u.Append(s.ctx, off, bytes.NewReader(piece))
		if err != nil {
			return i, err
		} else if n != int64(len(piece)) || u.Size() != off+n {
			return i, fmt.Errorf("append of %d bytes at %d kept %d, size is %d", len(piece), off, n, u.Size())
		}
	}
	if how.step > 0 {
		return u.Commit(s.ctx, identity.Sum(b))
	}
	return u.Finish(s.ctx, u.Size(), bytes.NewReader(b[u.Size():]), identity.Sum(b))
}

func readAll(ctx context.Context, st *Store, i blobstore.Info) ([]byte, error) {
	r, err := st.Open(ctx, i, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := bytes.NewBuffer(make([]byte, 0, i.Size+bytes.MinRead))
	_, err = b.ReadFrom(struct{ io.Reader }{r})
	return b.Bytes(), err
}

// holds checks that b is a blob of the store.
func (s *site) holds(st *Store, b []byte) {
	s.Helper()
	i, err := st.Stat(s.ctx, identity.Sum(b))
	s.must(err)
	got, err := readAll(s.ctx, st, i)
	if err != nil || i.Size != int64(len(b)) || !bytes.Equal(got, b) {
		s.Errorf("blob %s of %d bytes: %d other bytes, %v", i.Digest, i.Size, len(got), err)
	}
}

// whole checks, past the proxy, that every blob that is shown is what its name says, and returns how many there are.
func (s *site) whole() (blobs int) {
	s.Helper()
	st := s.past()
	for i, err := range st.List(s.ctx, identity.Digest{}) {
		s.must(err)
		blobs++
		seen, err := st.Stat(s.ctx, i.Digest)
		b, unread := readAll(s.ctx, st, i)
		if err != nil || unread != nil || seen != i || identity.Sum(b) != i.Digest || int64(len(b)) != i.Size {
			s.Errorf("blob %+v is shown as %+v, %v, and reads as %d bytes of %s, %v",
				i, seen, err, len(b), identity.Sum(b), unread)
		}
	}
	return blobs
}

// clean checks, past the proxy, that after a sweep nothing is left but what an open upload or a blob needs, and no
// open upload.
func (s *site) clean() {
	s.Helper()
	st := s.past()
	for u, err := range st.Uploads(s.ctx) {
		s.must(err)
		up, err := st.Resume(s.ctx, u.ID)
		if err == nil {
			err = up.Abort(s.ctx)
		}
		if err != nil && !errors.Is(err, blobstore.ErrUploadUnknown) {
			s.Error(err)
		}
	}
	(&medium{Config: s.direct}).Check(s)
	for range s.past().Uploads(s.ctx) {
		s.Error("an upload is left")
	}
}

// refs returns what the log holds.
func refs(t testing.TB, st *Store) (all []blobstore.Ref) {
	t.Helper()
	for r, err := range st.Since(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r.Ref)
	}
	return all
}

// ref returns a ref of its own kind.
func ref(seq int) blobstore.Ref {
	m := fmt.Appendf(nil, `{"manifest":%d}`, seq)
	return blobstore.Ref{
		Repo: "team/model", Name: fmt.Sprint("v", seq), Seq: uint64(seq), Digest: identity.Sum(m),
		MediaType: "application/vnd.oci.image.manifest.v1+json", Manifest: m, Time: time.Unix(int64(seq), 5).UTC(),
	}
}
