package storetest

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

func testRoundTrip(e *env) {
	for _, n := range []int{0, 1, 511, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20} {
		before := time.Now().Add(-time.Second)
		b := random(1, n)
		u := e.create(identity.Sum(b), int64(n))
		if n > 0 { // an upload of nothing needs no Append
			e.add(u, b)
		}
		i := e.commit(u, identity.Sum(b))
		if i.Created.Before(before) || i.Created.After(time.Now().Add(time.Second)) {
			e.Errorf("%d bytes: created %v, now is %v", n, i.Created, time.Now())
		}
		if again, err := e.st.Stat(e.ctx, i.Digest); err != nil || again.Generation != i.Generation {
			e.Errorf("%d bytes: commit said %+v, stat %+v, %v", n, i, again, err)
		}
		e.holds(b)
	}
	e.reopen(false)
	e.whole()
	if got := len(e.list(identity.Digest{})); got != 7 {
		e.Errorf("%d blobs after reopening, want 7", got)
	}
}

func testRanges(e *env) {
	b := random(2, 1<<20+17)
	i := e.put(b)
	size := int64(len(b))
	for _, r := range [][2]int64{
		{0, -1}, {0, 0}, {0, 1}, {5, 300 << 10}, {size - 1, 1}, {size, -1}, {size, 0}, {7, -1}, {size - 5, 100},
	} {
		off, n := r[0], r[1]
		want := b[off:]
		if n >= 0 {
			want = want[:min(n, int64(len(want)))]
		}
		e.sameRange(i, off, n, want)
	}
	for _, off := range []int64{-1, size + 1} {
		if _, err := e.st.Open(e.ctx, i, off, 1); err == nil {
			e.Errorf("open at %d of %d bytes: no error", off, size)
		}
	}
}

// sameRange reads a range in each way that a reader has.
func (e *env) sameRange(i blobstore.Info, off, n int64, want []byte) {
	e.Helper()
	for _, how := range []func(io.Writer, io.Reader) (int64, error){
		func(w io.Writer, r io.Reader) (int64, error) { return r.(io.WriterTo).WriteTo(w) },
		func(w io.Writer, r io.Reader) (int64, error) {
			return io.Copy(struct{ io.Writer }{w}, struct{ io.Reader }{r})
		},
		func(w io.Writer, r io.Reader) (int64, error) { return r.(io.WriterTo).WriteTo(struct{ io.Writer }{w}) },
	} {
		r, err := e.st.Open(e.ctx, i, off, n)
		e.must(err)
		var got bytes.Buffer
		m, err := how(&got, r)
		if err != nil || m != int64(len(want)) || !bytes.Equal(got.Bytes(), want) {
			e.Errorf("read %d at %d: %d bytes, error %v, right: %v", n, off, m, err, bytes.Equal(got.Bytes(), want))
		}
		e.must(r.Close())
	}
}

func testNotFound(e *env) {
	d := identity.Sum([]byte("not there"))
	e.lacks(d)
	e.lacks(identity.Digest{})
	e.want("delete", e.st.Delete(e.ctx, blobstore.Info{Digest: d}), blobstore.ErrNotFound)
	if got := e.list(identity.Digest{}); len(got) > 0 {
		e.Errorf("an empty store lists %v", got)
	}
}

func testList(e *env) {
	var all []identity.Digest
	for i := range 40 {
		all = append(all, e.put(random(uint64(i), 10)).Digest)
	}
	slices.SortFunc(all, identity.Digest.Compare)
	for i := -1; i < len(all); i++ {
		var after identity.Digest
		if i >= 0 {
			after = all[i]
		}
		var got []identity.Digest
		for _, info := range e.list(after) {
			got = append(got, info.Digest)
		}
		if !slices.Equal(got, all[i+1:]) {
			e.Fatalf("list after %d of %d: %d digests, want %d", i, len(all), len(got), len(all)-i-1)
		}
	}
	between := all[3]
	between[31]++ // almost surely no digest of a blob
	if got := e.list(between); len(got) != len(all)-4 {
		e.Errorf("list after a digest that is not there: %d, want %d", len(got), len(all)-4)
	}
	for i, err := range e.st.List(e.ctx, identity.Digest{}) { // stops early, and deletes what it is shown
		e.must(err)
		e.must(e.st.Delete(e.ctx, i))
		break
	}
	if got := e.list(identity.Digest{}); len(got) != len(all)-1 {
		e.Errorf("list after a delete: %d, want %d", len(got), len(all)-1)
	}
}

func testDelete(e *env) {
	b := random(3, 1000)
	first := e.put(b)
	open, err := e.st.Open(e.ctx, first, 0, -1)
	e.must(err)
	defer open.Close()

	e.want("delete of another generation", e.st.Delete(e.ctx, blobstore.Info{Digest: first.Digest, Generation: "x"}),
		blobstore.ErrNotFound)
	e.holds(b)
	e.must(e.st.Delete(e.ctx, first))
	e.lacks(first.Digest)
	e.want("second delete", e.st.Delete(e.ctx, first), blobstore.ErrNotFound)
	if got, err := io.ReadAll(open); err != nil || !bytes.Equal(got, b) {
		e.Errorf("a reader that was open: %d bytes, %v", len(got), err)
	}

	second := e.put(b)
	if second.Generation == first.Generation {
		e.Errorf("both copies are generation %s", first.Generation)
	}
	e.want("delete of the first copy", e.st.Delete(e.ctx, first), blobstore.ErrNotFound)
	_, err = e.st.Open(e.ctx, first, 0, -1)
	e.want("open of the first copy", err, blobstore.ErrNotFound)
	e.holds(b)
	e.reopen(true)
	e.holds(b)
	e.must(e.st.Delete(e.ctx, second))
	e.reopen(true)
	e.lacks(first.Digest)
}

// testKeepsOneCopy: of what is pushed again one copy stays, the first or the last. A reader of the other one goes on,
// and who deletes the other one leaves this one.
func testKeepsOneCopy(e *env) {
	b := random(4, 5000)
	first := e.put(b)
	open, err := e.st.Open(e.ctx, first, 0, -1)
	e.must(err)
	defer open.Close()
	second := e.put(b)
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
	if now, err := e.st.Stat(e.ctx, first.Digest); err != nil || now.Generation != second.Generation {
		e.Errorf("stat says %+v, %v, commit said %+v", now, err, second)
	}
	if got, err := io.ReadAll(open); err != nil || !bytes.Equal(got, b) {
		e.Errorf("a reader that was open: %d bytes, %v", len(got), err)
	}
	if second.Generation != first.Generation {
		e.want("delete of the copy that was replaced", e.st.Delete(e.ctx, first), blobstore.ErrNotFound)
		_, err := e.st.Open(e.ctx, first, 0, -1)
		e.want("open of the copy that was replaced", err, blobstore.ErrNotFound)
	}
	for _, kill := range []bool{false, true} {
		e.holds(b)
		if n := len(e.list(identity.Digest{})); n != 1 {
			e.Errorf("%d blobs", n)
		}
		e.reopen(kill)
	}
}

func testTwoPushers(e *env) {
	for round := range uint64(50) {
		b := random(round, 3000)
		var infos [2]blobstore.Info
		var errs [2]error
		var wg sync.WaitGroup
		for i := range 2 {
			u := e.create(identity.Digest{}, -1)
			wg.Go(func() {
				if _, errs[i] = u.Append(e.ctx, 0, bytes.NewReader(b)); errs[i] == nil {
					infos[i], errs[i] = u.Commit(e.ctx, identity.Sum(b))
				}
				errs[i] = errors.Join(errs[i], u.Abort(e.ctx))
			})
		}
		wg.Wait()
		e.must(errs[0])
		e.must(errs[1])
		now, err := e.st.Stat(e.ctx, identity.Sum(b))
		if err != nil || now.Generation != infos[0].Generation && now.Generation != infos[1].Generation {
			e.Fatalf("round %d: copies %v and %v, shown is %v, %v", round, infos[0], infos[1], now, err)
		}
		e.holds(b)
	}
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
	if n := len(e.list(identity.Digest{})); n != 50 {
		e.Errorf("%d blobs, want 50", n)
	}
}
