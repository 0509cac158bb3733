package s3store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
	tib = 1 << 40
)

// TestPartSize: 10,000 parts reach every size that an object can have, none but the last is too small for the server,
// and a blob of more than the 5 GiB that one request can store or copy is one of many parts.
func TestPartSize(t *testing.T) {
	const smallest, largest = 5 * mib, 5 * gib // of S3
	plan := func(announced, size int64) (parts int) {
		for at := int64(0); at < size; parts++ {
			p := partSize(parts, announced, partMin)
			if p < smallest || p > largest {
				t.Fatalf("part %d of %d announced bytes has %d", parts, announced, p)
			}
			at += p
		}
		return parts
	}
	for _, c := range []struct {
		size  int64
		parts int
	}{
		{0, 0}, {1, 1}, {16 * mib, 1}, {16*mib + 1, 2}, {5*gib + 300*mib, 339}, {130 * gib, 8320},
		{1 * tib, 8963}, {bucket.MaxObject - 1, 8993}, {bucket.MaxObject, 8993},
	} {
		if got := plan(c.size, c.size); got != c.parts {
			t.Errorf("%d announced bytes go into %d parts, want %d", c.size, got, c.parts)
		}
		if got := plan(-1, c.size); got > bucket.MaxParts {
			t.Errorf("%d bytes that were not announced take %d parts", c.size, got)
		}
	}
	for n := range bucket.MaxParts {
		if partSize(n, -1, partMin) > partSize(n+1, -1, partMin) {
			t.Fatalf("part %d is larger than the next one", n)
		}
	}
}

// TestCuts sends blobs of sizes around those of parts in requests that end around the ends of parts, each to another
// process.
func TestCuts(t *testing.T) {
	t.Parallel()
	const p = partOf
	cuts := []int{1, 1000, 1001, p - 1, p, p + 1, p + 2*pieceSize, 2*p - 3, 2 * p, 2*p + 1}
	for _, size := range []int{0, 1, p - 1, p, p + 1, 2 * p, 2*p + 5} {
		for _, named := range []bool{true, false} {
			for _, finish := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d named %v finish %v", size, named, finish), func(t *testing.T) {
					t.Parallel()
					testCut(newSite(t), noise(1, size), cuts, pushing{named: named}, finish)
				})
			}
		}
	}
}

func testCut(s *site, b []byte, cuts []int, how pushing, finish bool) {
	d := identity.Sum(b)
	stores := [2]*Store{s.open(Options{}), s.open(Options{})}
	u, err := stores[0].Create(s.ctx, how.hint(d), how.size(b))
	s.must(err)
	for n, cut := range cuts {
		if cut >= len(b) {
			break
		}
		u, err = stores[n%2].Resume(s.ctx, u.ID())
		s.must(err)
		off := u.Size()
		kept, err := u.Append(s.ctx, off, bytes.NewReader(b[off:cut]))
		s.must(err)
		if off+kept != int64(cut) || u.Size() != int64(cut) {
			s.Fatalf("append up to %d: kept %d of it, size is %d", cut, off+kept, u.Size())
		}
	}
	u, err = stores[1].Resume(s.ctx, u.ID())
	s.must(err)
	rest := bytes.NewReader(b[u.Size():])
	if finish {
		_, err = u.Finish(s.ctx, u.Size(), rest, d)
	} else {
		_, err = u.Append(s.ctx, u.Size(), rest)
		s.must(err)
		_, err = u.Commit(s.ctx, d)
	}
	s.must(err)
	s.holds(stores[0], b)
	u, err = stores[0].Resume(s.ctx, u.ID())
	s.must(err)
	if again, err := u.Commit(s.ctx, d); err != nil || u.Size() != int64(len(b)) || again.Size != u.Size() {
		s.Errorf("the receipt has %d bytes, of %d, and is of %+v, %v", u.Size(), len(b), again, err)
	}
	s.clean()
}

// TestTails: what small requests bring is put together again, also when they go on for longer than a part.
func TestTails(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{})
	b := noise(2, partOf+700*kib)
	i, err := s.push(st, b, pushing{step: 433 * kib})
	s.must(err)
	if i.Size != int64(len(b)) {
		t.Errorf("%+v of %d bytes", i, len(b))
	}
	s.holds(st, b)
	for up, err := range st.Uploads(s.ctx) {
		s.must(err)
		u, err := st.Resume(s.ctx, up.ID)
		s.must(err)
		s.must(u.Abort(s.ctx))
	}
	for o, err := range st.b.List(s.ctx, st.b.Key(tailsName), "", 0) {
		t.Errorf("%s is left although its bytes are elsewhere: %v", o.Key, err)
	}
	s.clean()
}

// TestSecondThoughts: a client names one digest, fails, and comes again with another. Where the bytes are already under
// the first name it has to start again.
func TestSecondThoughts(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1000, partOf + 1000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			st := s.open(Options{})
			b, cause := noise(3, size), errors.New("the client went away")
			u, err := st.Create(s.ctx, identity.Digest{}, -1)
			s.must(err)
			broken := io.MultiReader(bytes.NewReader(b[:size-500]), iotest.ErrReader(cause))
			_, err = u.Finish(s.ctx, 0, broken, identity.Sum([]byte("another")))
			s.want("finish", err, cause)
			u, err = st.Resume(s.ctx, u.ID())
			s.must(err)
			if u.Size() != int64(size-500) {
				t.Errorf("%d bytes are left of %d", u.Size(), size-500)
			}
			_, err = u.Finish(s.ctx, u.Size(), bytes.NewReader(b[u.Size():]), identity.Sum(b))
			if size > partOf {
				s.want("finish under another name", err, blobstore.ErrDigestMismatch)
				_, err = s.push(st, b, pushing{})
			}
			s.must(err)
			s.holds(st, b)
			s.clean()
		})
	}
}

// TestAfterAFailedCommit: a client whose commit found no server sends more, and asks for what it has then.
func TestAfterAFailedCommit(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{})
	b := noise(4, 5000)
	u, err := st.Create(s.ctx, identity.Digest{}, -1)
	s.must(err)
	_, err = u.Append(s.ctx, 0, bytes.NewReader(b[:4000]))
	s.must(err)
	away := s.proxy.On(markerPut, reset)
	_, err = u.Commit(s.ctx, identity.Sum(b[:4000]))
	s.want("commit without a server", err, blobstore.ErrUnavailable)
	away.Off()
	_, err = u.Append(s.ctx, 4000, bytes.NewReader(b[4000:]))
	s.must(err)
	_, err = u.Commit(s.ctx, identity.Sum(b))
	s.must(err)
	s.holds(st, b)
	if n := s.whole(); n != 1 {
		t.Errorf("%d blobs, want 1", n)
	}
	s.clean()
}
