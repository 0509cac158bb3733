package storetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing/iotest"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

func testResume(e *env) {
	b := random(10, 700<<10)
	cuts := []int{0, 1, 64, 256 << 10, 300 << 10, 300<<10 + 7, 650 << 10, len(b)}
	u := e.create(identity.Sum(b), int64(len(b)))
	id := u.ID()
	if id == "" || strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") != "" {
		e.Errorf("upload id %q", id)
	}
	for i, cut := range cuts[1:] {
		e.reopen(i%2 == 0)
		u = e.resume(id)
		if u.Size() != int64(cuts[i]) || u.ID() != id {
			e.Fatalf("resumed %s at %d, want %s at %d", u.ID(), u.Size(), id, cuts[i])
		}
		e.add(u, b[cuts[i]:cut])
	}
	e.lacks(identity.Sum(b))
	e.reopen(true)
	e.commit(e.resume(id), identity.Sum(b))
	e.holds(b)
	_, err := e.st.Resume(e.ctx, id)
	e.want("resume after commit", err, blobstore.ErrUploadUnknown)
	e.reopen(true)
	e.holds(b)
}

// testFinish: the last bytes come with the commit; if they don't all come, the upload goes on from there.
func testFinish(e *env) {
	b := random(19, 700<<10)
	d := identity.Sum(b)
	for _, before := range []int{0, 300 << 10, len(b)} {
		u := e.create(d, int64(len(b)))
		e.add(u, b[:before])
		_, err := u.Finish(e.ctx, int64(before)-1, bytes.NewReader(b), d)
		e.want("finish at a wrong offset", err, blobstore.ErrOffset)
		i, err := u.Finish(e.ctx, int64(before), bytes.NewReader(b[before:]), d)
		e.must(err)
		e.holds(b)
		e.must(u.Abort(e.ctx))
		e.holds(b)
		_, err = e.st.Resume(e.ctx, u.ID())
		e.want("resume after the end", err, blobstore.ErrUploadUnknown)
		e.must(e.st.Delete(e.ctx, i))
	}

	u := e.create(identity.Digest{}, -1)
	cause := errors.New("reader failed")
	_, err := u.Finish(e.ctx, 0, io.MultiReader(bytes.NewReader(b[:300<<10+1]), iotest.ErrReader(cause)), d)
	e.want("finish", err, cause)
	e.reopen(true)
	u = e.resume(u.ID())
	if u.Size() != 300<<10+1 {
		e.Errorf("%d bytes are left of the %d that came", u.Size(), 300<<10+1)
	}
	_, err = u.Finish(e.ctx, u.Size(), bytes.NewReader(b[u.Size():]), identity.Sum(b[1:]))
	e.want("finish", err, blobstore.ErrDigestMismatch)
	e.lacks(d)
	_, err = u.Finish(e.ctx, u.Size(), bytes.NewReader(nil), d)
	e.want("finish after the mismatch", err, blobstore.ErrUploadUnknown)
}

// testReceipt: an upload that has ended can be asked what it became, until Abort, in whichever process and with
// whichever handle.
func testReceipt(e *env) {
	for _, before := range []int{0, 1, 300 << 10, 700 << 10} {
		for _, hinted := range []bool{false, true} {
			for _, kill := range []bool{false, true} {
				e.receipt(before, hinted, kill)
			}
		}
	}
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
}

func (e *env) receipt(before int, hinted, kill bool) {
	e.Helper()
	b := random(21, 700<<10)
	d := identity.Sum(b)
	u := e.create(identity.Digest{}, -1)
	if hinted {
		e.must(u.Abort(e.ctx))
		u = e.create(d, int64(len(b)))
	}
	other := e.resume(u.ID())
	if before > 0 {
		e.add(u, b[:before])
	}
	i, err := u.Finish(e.ctx, int64(before), bytes.NewReader(b[before:]), d)
	e.must(err)
	e.ended(u, i)
	e.ended(other, i)
	_, err = other.Append(e.ctx, int64(before), bytes.NewReader(b))
	e.want("append where it was before its end", err, map[bool]error{
		false: blobstore.ErrOffset, true: blobstore.ErrUploadUnknown}[before == len(b)])
	for range 2 {
		e.reopen(kill)
		e.ended(e.resume(u.ID()), i)
	}
	_, err = e.resume(u.ID()).Commit(e.ctx, identity.Sum(b[1:]))
	e.want("commit of the receipt as something else", err, blobstore.ErrDigestMismatch)
	_, err = e.st.Resume(e.ctx, u.ID())
	e.want("resume after the mismatch", err, blobstore.ErrUploadUnknown)
	e.holds(b)
	e.must(e.st.Delete(e.ctx, i))
}

// ended checks that an upload is the receipt of a blob.
func (e *env) ended(u blobstore.Upload, i blobstore.Info) {
	e.Helper()
	if u.Size() != i.Size {
		e.Errorf("receipt of %d bytes, the blob has %d", u.Size(), i.Size)
	}
	if got := e.uploads()[u.ID()]; got.Blob != i.Digest || got.Size != i.Size || time.Since(got.Touched) > time.Hour {
		e.Errorf("the receipt of %+v is listed as %+v", i, got)
	}
	for range 2 {
		n, err := u.Append(e.ctx, i.Size, bytes.NewReader(nil))
		e.must(err)
		_, err = u.Append(e.ctx, i.Size, strings.NewReader("more"))
		e.want("append to a receipt", err, blobstore.ErrUploadUnknown)
		if n != 0 || u.Size() != i.Size {
			e.Errorf("an append to a receipt kept %d bytes, size %d", n, u.Size())
		}
		_, err = u.Finish(e.ctx, i.Size, strings.NewReader("more"), i.Digest)
		e.want("finish with more than there is", err, blobstore.ErrUploadUnknown)
		_, err = u.Finish(e.ctx, i.Size-1, strings.NewReader("x"), i.Digest)
		e.want("finish at a wrong offset", err, blobstore.ErrOffset)
		again, err := u.Finish(e.ctx, i.Size, bytes.NewReader(nil), i.Digest)
		if err != nil || again.Digest != i.Digest || again.Size != i.Size || again.Generation != i.Generation {
			e.Fatalf("finish of a receipt: %+v, %v, was %+v", again, err, i)
		}
		again, err = u.Commit(e.ctx, i.Digest)
		if err != nil || again.Generation != i.Generation {
			e.Errorf("commit of a receipt: %+v, %v, was %+v", again, err, i)
		}
	}
}

// testReceiptOfAnotherCopy: the blob was there already, or others push it too, and it goes before the receipt does.
func testReceiptOfAnotherCopy(e *env) {
	b := random(22, 300<<10)
	d := identity.Sum(b)
	for _, hint := range []identity.Digest{{}, d} {
		e.put(b)
		u := e.create(hint, -1)
		e.add(u, b[:100<<10])
		i, err := u.Finish(e.ctx, 100<<10, bytes.NewReader(b[100<<10:]), d)
		e.must(err)
		for _, kill := range []bool{false, true} {
			e.ended(u, i)
			e.reopen(kill)
			u = e.resume(u.ID())
		}
		if i = e.put(b); e.uploads()[u.ID()].Blob != d {
			e.Error("the receipt is gone")
		}
		e.ended(u, i)
		e.must(u.Abort(e.ctx))
		e.must(u.Abort(e.ctx))
		e.reopen(true)
		e.holds(b)
		_, err = e.st.Resume(e.ctx, u.ID())
		e.want("resume after abort", err, blobstore.ErrUploadUnknown)

		second := e.create(hint, -1)
		if i, err = second.Finish(e.ctx, 0, bytes.NewReader(b), d); err != nil {
			e.Fatal(err)
		}
		third := e.resume(second.ID())
		e.must(e.st.Delete(e.ctx, i))
		_, err = second.Finish(e.ctx, int64(len(b)), bytes.NewReader(nil), d)
		e.want("finish after the blob went", err, blobstore.ErrUploadUnknown)
		e.must(third.Abort(e.ctx))
		e.lacks(d)
		if n := len(e.uploads()); n != 0 {
			e.Errorf("%d uploads left", n)
		}
	}
}

// testReceiptOfNothing: a blob of no bytes has a receipt as any other.
func testReceiptOfNothing(e *env) {
	u := e.create(identity.Digest{}, -1)
	i, err := u.Finish(e.ctx, 0, bytes.NewReader(nil), identity.Sum(nil))
	e.must(err)
	again, err := u.Finish(e.ctx, 0, bytes.NewReader(nil), identity.Sum(nil))
	if err != nil || again.Generation != i.Generation || e.uploads()[u.ID()].Blob != i.Digest {
		e.Errorf("finish again: %+v, %v, was %+v", again, err, i)
	}
	e.must(u.Abort(e.ctx))
	e.holds(nil)
}

func testOffset(e *env) {
	b := random(11, 1000)
	u := e.create(identity.Digest{}, -1)
	e.add(u, b[:500])
	for _, off := range []int64{-1, 0, 499, 501, 1 << 40} {
		n, err := u.Append(e.ctx, off, bytes.NewReader(b))
		e.want("append at a wrong offset", err, blobstore.ErrOffset)
		if n != 0 || u.Size() != 500 {
			e.Errorf("append at %d: kept %d, size %d", off, n, u.Size())
		}
	}
	other := e.resume(u.ID()) // another handle of the same upload
	e.add(other, b[500:900])
	_, err := u.Append(e.ctx, 500, bytes.NewReader(b[500:]))
	e.want("append where another handle has been", err, blobstore.ErrOffset)
	e.add(u, b[900:])
	e.commit(other, identity.Sum(b))
	e.holds(b)
}

// testFailingReader: what was received before the reader failed stays, and the upload goes on from there. A body that
// ends too early reports io.ErrUnexpectedEOF, which must not pass for its end.
func testFailingReader(e *env) {
	b := random(12, 600<<10)
	for _, cause := range []error{io.ErrUnexpectedEOF, io.ErrClosedPipe, errors.New("of no package")} {
		u := e.create(identity.Sum(b), int64(len(b)))
		sent := 300<<10 + 5
		n, err := u.Append(e.ctx, 0, io.MultiReader(bytes.NewReader(b[:sent]), iotest.ErrReader(cause)))
		e.want("append", err, cause)
		if n != int64(sent) || u.Size() != n {
			e.Errorf("kept %d of %d, size %d", n, sent, u.Size())
		}
		e.reopen(true)
		u = e.resume(u.ID())
		if u.Size() != n {
			e.Errorf("resumed at %d, want %d", u.Size(), n)
		}
		e.add(u, b[u.Size():])
		e.must(e.st.Delete(e.ctx, e.commit(u, identity.Sum(b))))
	}
}

func testCancel(e *env) {
	b := random(13, 1<<20)
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	u := e.create(identity.Digest{}, -1)
	r := io.TeeReader(bytes.NewReader(b), writerFunc(cancel))
	n, err := u.Append(ctx, 0, r)
	e.want("append under a context that ends", err, context.Canceled)
	if n == int64(len(b)) || u.Size() != n {
		e.Errorf("kept %d of %d, size %d", n, len(b), u.Size())
	}
	e.add(u, b[n:])
	e.commit(u, identity.Sum(b))
	e.holds(b)
}

type writerFunc func()

func (f writerFunc) Write(b []byte) (int, error) { f(); return len(b), nil }

func testAnnouncedSize(e *env) {
	b := random(14, 300<<10)
	d := identity.Sum(b)
	more := e.create(d, int64(len(b))-1)
	_, err := more.Append(e.ctx, 0, bytes.NewReader(b))
	e.want("append of more than announced", err, blobstore.ErrSizeMismatch)
	if more.Size() >= int64(len(b)) {
		e.Errorf("kept %d bytes, announced were %d", more.Size(), len(b)-1)
	}
	e.must(more.Abort(e.ctx))

	more = e.create(d, int64(len(b))-1)
	_, err = more.Finish(e.ctx, 0, bytes.NewReader(b), d)
	e.want("finish with more than announced", err, blobstore.ErrSizeMismatch)
	_, err = e.st.Resume(e.ctx, more.ID())
	e.want("resume after too much", err, blobstore.ErrUploadUnknown)

	less := e.create(d, int64(len(b))+1)
	e.add(less, b)
	_, err = less.Commit(e.ctx, d)
	e.want("commit of less than announced", err, blobstore.ErrSizeMismatch)
	e.lacks(d)
	_, err = e.st.Resume(e.ctx, less.ID())
	e.want("resume after the mismatch", err, blobstore.ErrUploadUnknown)
}

func testNoSpace(e *env) {
	_, err := e.st.Create(e.ctx, identity.Digest{}, 1<<60)
	e.want("create of more than any store holds", err, blobstore.ErrNoSpace)
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
}

// testFull: a store that fills up while an upload is at work keeps what was acknowledged of it and gives back the rest,
// and the upload goes on when there is room.
func testFull(e *env) {
	const acked = 1000
	b := random(18, 700<<10)
	d := identity.Sum(b)
	calls := map[string]func(u blobstore.Upload) error{
		"append": func(u blobstore.Upload) error {
			_, err := u.Append(e.ctx, acked, bytes.NewReader(b[acked:len(b)-1]))
			return err
		},
		"finish": func(u blobstore.Upload) error {
			_, err := u.Finish(e.ctx, acked, bytes.NewReader(b[acked:]), d)
			return err
		},
	}
	for name, call := range calls {
		for n, full := 1, true; full; n++ {
			u := e.create(d, int64(len(b)))
			e.add(u, b[:acked])
			e.medium.Fill(n)
			err := call(u)
			e.medium.Fill(0)
			if full = err != nil; full {
				e.want(name+" to a full store", err, blobstore.ErrNoSpace)
				e.afterFull(u, acked)
			}
			if u = e.resume(u.ID()); u.Size() < int64(len(b)) {
				e.add(u, b[u.Size():])
			}
			e.commit(u, d)
			e.holds(b)
		}
	}
}

// afterFull checks that an upload has as many bytes as were acknowledged, in this process and in the next one.
func (e *env) afterFull(u blobstore.Upload, acked int64) {
	e.Helper()
	for range 2 {
		if got := u.Size(); got != acked {
			e.Fatalf("an upload of which %d bytes were acknowledged has %d after the store was full", acked, got)
		}
		e.reopen(true)
		u = e.resume(u.ID())
	}
}

func testMismatch(e *env) {
	b := random(15, 1000)
	right, wrong := identity.Sum(b), identity.Sum([]byte("other"))
	for _, c := range []struct{ hint, ask identity.Digest }{
		{right, wrong}, {identity.Digest{}, wrong}, {wrong, right}, {wrong, wrong},
	} {
		u := e.create(c.hint, -1)
		e.add(u, b)
		_, err := u.Commit(e.ctx, c.ask)
		e.want("commit", err, blobstore.ErrDigestMismatch)
		e.lacks(right)
		e.lacks(wrong)
		_, err = u.Append(e.ctx, 1000, bytes.NewReader(b))
		e.want("append after the mismatch", err, blobstore.ErrUploadUnknown)
	}
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
}

func testAbort(e *env) {
	b := random(16, 1000)
	u := e.create(identity.Digest{}, -1)
	e.add(u, b)
	e.must(u.Abort(e.ctx))
	e.must(u.Abort(e.ctx))
	_, err := u.Commit(e.ctx, identity.Sum(b))
	e.want("commit after abort", err, blobstore.ErrUploadUnknown)
	_, err = e.st.Resume(e.ctx, u.ID())
	e.want("resume after abort", err, blobstore.ErrUploadUnknown)
	e.lacks(identity.Sum(b))
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
	done := e.create(identity.Digest{}, -1)
	e.add(done, b)
	e.commit(done, identity.Sum(b))
	e.must(done.Abort(e.ctx))
	e.holds(b)
}

func testUnknownUpload(e *env) {
	e.put([]byte("something"))
	for _, id := range []string{"", ".", "..", "x", "../refs", "../blobs/sha256", strings.Repeat("0", 32),
		strings.Repeat("a", 5000), "00000000000000000000000000000000/../..", "\x00"} {
		_, err := e.st.Resume(e.ctx, id)
		e.want("resume of an id that never was", err, blobstore.ErrUploadUnknown)
	}
}

// testBusy holds an Append in the middle, with a reader that waits, and tries everything else.
func testBusy(e *env) {
	b := random(17, 1200<<10)
	u := e.create(identity.Digest{}, int64(len(b)))
	r, w := io.Pipe()
	result := make(chan error, 1)
	go func() {
		_, err := u.Append(e.ctx, 0, r)
		result <- err
	}()
	_, err := w.Write(b[:1<<20]) // returns when it is read
	e.must(err)

	other := e.resume(u.ID())
	_, err = other.Append(e.ctx, other.Size(), bytes.NewReader(nil))
	e.want("append meanwhile", err, blobstore.ErrUploadBusy)
	_, err = u.Commit(e.ctx, identity.Sum(b))
	e.want("commit meanwhile", err, blobstore.ErrUploadBusy)
	e.want("abort meanwhile", other.Abort(e.ctx), blobstore.ErrUploadBusy)
	if n := other.Size(); n < 512<<10 || n > 1<<20 {
		e.Errorf("size is %d while 1 MiB was read", n)
	}
	if _, ok := e.uploads()[u.ID()]; !ok {
		e.Error("the upload is not listed while it is busy")
	}
	_, err = w.Write(b[1<<20:])
	e.must(err)
	e.must(w.Close())
	e.must(<-result)
	e.commit(other, identity.Sum(b))
	e.holds(b)
}

func testUploads(e *env) {
	before := time.Now().Add(-time.Second)
	sizes := map[string]int64{}
	for i := range 5 {
		u := e.create(identity.Digest{byte(i)}, -1)
		e.add(u, random(18, i*100))
		sizes[u.ID()] = int64(i * 100)
	}
	e.reopen(true)
	found := e.uploads()
	for id, size := range sizes {
		u := found[id]
		if u.Hint != (identity.Digest{byte(size / 100)}) {
			e.Errorf("upload %s of %d bytes is to become %s", id, size, u.Hint)
		}
		if u.Size != size || u.Touched.Before(before) || u.Touched.After(time.Now().Add(time.Second)) {
			e.Errorf("upload %s: %+v, want %d bytes, touched just now", id, u, size)
		}
	}
	if len(found) != len(sizes) {
		e.Errorf("%d uploads, want %d", len(found), len(sizes))
	}
	for id := range found {
		e.must(e.resume(id).Abort(e.ctx))
	}
	if n := len(e.uploads()); n != 0 {
		e.Errorf("%d uploads left", n)
	}
}
