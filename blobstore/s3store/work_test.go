package s3store

import (
	"bytes"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// work is some of everything that a registry does with a store.
type work struct {
	*site
	st    *Store
	blobs [][]byte // that are to be there in the end
	refs  []blobstore.Ref
}

func newWork(s *site, st *Store) *work {
	w := &work{site: s, st: st, refs: []blobstore.Ref{ref(1), ref(2), ref(3), ref(4)}}
	for i, size := range []int{3000, 2000, partOf + 3000, partOf + 2000} {
		w.blobs = append(w.blobs, noise(uint64(i), size))
	}
	return w
}

// do does the work. Like the registry's clients it tries again what fails.
func (w *work) do() {
	w.Helper()
	w.retry("put refs", func() error { return w.put(w.refs[:1]...) })
	for i, how := range []pushing{{named: true}, {step: 700}, {named: true, step: partOf/2 + 1}, {}} {
		_, err := w.push(w.st, w.blobs[i], how)
		w.must(err)
	}
	w.retry("put refs", func() error { return w.put(w.refs[1:3]...) })
	w.retry("delete", w.deleteFirst)
	_, err := w.push(w.st, w.blobs[0], pushing{named: true})
	w.must(err)
	w.retry("abort", w.abortOne)
	w.retry("put refs", func() error { return w.put(w.refs[3:]...) })
	w.retry("sweep", func() error {
		_, err := w.st.Sweep(w.ctx, time.Now().Add(-time.Hour))
		return err
	})
}

// retry does something until it works.
func (w *work) retry(what string, do func() error) {
	w.Helper()
	var err error
	for range 12 {
		if err = do(); err == nil {
			return
		}
	}
	w.Fatalf("%s: %v", what, err)
}

func (w *work) put(refs ...blobstore.Ref) error {
	_, err := w.st.Put(w.ctx, refs...)
	return err
}

func (w *work) deleteFirst() error {
	i, err := w.st.Stat(w.ctx, identity.Sum(w.blobs[0]))
	if err == nil {
		err = w.st.Delete(w.ctx, i)
	}
	if errors.Is(err, blobstore.ErrNotFound) {
		return nil
	}
	return err
}

func (w *work) abortOne() error {
	u, err := w.st.Create(w.ctx, identity.Sum([]byte("never")), -1)
	if err != nil {
		return err
	}
	_, appended := u.Append(w.ctx, 0, bytes.NewReader(noise(9, partOf+1)))
	return errors.Join(appended, u.Abort(w.ctx))
}

// check checks, past the proxy, that all of it was done, and nothing else.
func (w *work) check() {
	w.Helper()
	past := w.past()
	for _, b := range w.blobs {
		w.holds(past, b)
	}
	if n := w.whole(); n != len(w.blobs) {
		w.Errorf("%d blobs, want %d", n, len(w.blobs))
	}
	got := compact(refs(w, past))
	if !reflect.DeepEqual(got, w.refs) {
		w.Errorf("refs %v, want %v", got, w.refs)
	}
	w.clean()
	for _, b := range w.blobs {
		w.holds(past, b)
	}
}

// compact drops refs that follow the same one, as those do of which a Put failed that had been carried out.
func compact(refs []blobstore.Ref) (kept []blobstore.Ref) {
	for _, r := range refs {
		if n := len(kept); n == 0 || r.Seq > kept[n-1].Seq {
			kept = append(kept, r)
		}
	}
	return kept
}

// TestWork: without a fault every try works at once, no object is copied by the server, and none is listed to see
// where an upload is.
func TestWork(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	w := newWork(s, s.open(Options{}))
	w.do()
	for op, n := range s.proxy.Counts() {
		switch op {
		case "CopyObject", "UploadPartCopy", "ListParts", "Other", "ListBuckets", "HeadBucket", "CreateBucket":
			t.Errorf("%d times %s", n, op)
		}
	}
	w.check()
}
