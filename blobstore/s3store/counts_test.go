package s3store

import (
	"bytes"
	"crypto/rand"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// asked returns what was asked of the server while do ran, location aside, which each client asks for once.
func (s *site) asked(do func()) map[tests3.Op]int {
	before := s.proxy.Counts()
	do()
	asked := map[tests3.Op]int{}
	for op, n := range s.proxy.Counts() {
		if n > before[op] && op != tests3.GetBucketLocation {
			asked[op] = n - before[op]
		}
	}
	return asked
}

func (s *site) asks(what string, want map[tests3.Op]int, do func()) {
	s.Helper()
	got := s.asked(do)
	if n := got[tests3.ListObjects]; n == want[tests3.ListObjects]+1 {
		got[tests3.ListObjects]-- // a last page may be empty
	}
	if !maps.Equal(got, want) {
		s.Errorf("%s: %v, want %v", what, got, want)
	}
}

// TestRequests: how many requests a push and a pull take.
func TestRequests(t *testing.T) {
	t.Parallel()
	type ops = map[tests3.Op]int
	s := newSite(t)
	st := s.open(Options{})
	finish := func(b []byte) func() {
		return func() {
			u, err := st.Create(s.ctx, identity.Sum(b), int64(len(b)))
			s.must(err)
			_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b))
			s.must(err)
			s.must(u.Abort(s.ctx)) // of the receipt, once it is not needed
		}
	}
	small, large := noise(1, 3000), noise(2, 3*partOf+7)
	s.asks("push of less than a part", ops{
		tests3.PutObject: 3, tests3.GetObject: 2, tests3.DeleteObject: 1, // state, bytes, marker; state, marker; state
	}, finish(small))
	s.asks("push of four parts", ops{
		tests3.CreateMultipartUpload: 1, tests3.UploadPart: 4, tests3.CompleteMultipartUpload: 1,
		// The state at first, when the parts begin, and as often as a process that is killed is not to lose more.
		tests3.PutObject: 4 + 1, tests3.GetObject: 2, tests3.DeleteObject: 1,
	}, finish(large))
	s.asks("pull of four parts", ops{tests3.GetObject: 2}, func() { s.holds(st, large) })
	s.asks("push of what is there", ops{ // the marker is put anew, too
		tests3.PutObject: 4, tests3.GetObject: 3, tests3.HeadObject: 1, tests3.DeleteObject: 2,
	}, finish(small))
	s.asks("delete", ops{tests3.GetObject: 2, tests3.PutObject: 1, tests3.DeleteObject: 2}, func() {
		i, err := st.Stat(s.ctx, identity.Sum(small))
		s.must(err)
		s.must(st.Delete(s.ctx, i))
	})
	s.asks("the first refs", ops{tests3.HeadObject: 1, tests3.PutObject: 1}, func() {
		_, err := st.Put(s.ctx, ref(1), ref(2))
		s.must(err)
	})
	s.asks("more refs", ops{tests3.PutObject: 1}, func() {
		_, err := st.Put(s.ctx, ref(3))
		s.must(err)
	})
}

// TestRequestsOfListings: listings and the log are read by the page. No blob takes a request of its own, and no object
// of the log more than one.
func TestRequestsOfListings(t *testing.T) {
	t.Parallel()
	const blobs, logged, page = 520, 1010, 1000
	s := newSite(t)
	past := s.past()
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := worker; n < blobs; n += 8 {
				putBlob(s, past, noise(uint64(n), 100))
			}
		})
	}
	var last, middle blobstore.Position
	for n := range logged {
		var err error
		last, err = past.Put(s.ctx, ref(n))
		s.must(err)
		if n == logged/2 {
			middle = last
		}
	}
	wg.Wait()
	st := s.open(Options{})
	s.asks("list", map[tests3.Op]int{tests3.ListObjects: 2*blobs/page + 1}, func() {
		n := 0
		for _, err := range st.List(s.ctx, identity.Digest{}) {
			s.must(err)
			n++
		}
		if n != blobs {
			t.Errorf("%d blobs are listed, want %d", n, blobs)
		}
	})
	s.asks("sweep", map[tests3.Op]int{tests3.ListObjects: 2*blobs/page + 4, tests3.ListMultipartUploads: 2}, func() {
		n, err := st.Sweep(s.ctx, time.Now().Add(time.Hour))
		if err != nil || n != 0 {
			t.Errorf("sweep removed %d, %v", n, err)
		}
	})
	for what, c := range map[string]struct {
		after       blobstore.Position
		refs, lists int
	}{
		"all refs": {0, logged, 2}, "half of the refs": {middle, logged - logged/2 - 1, 1},
		"refs after the last": {last, 0, 1},
	} {
		want := map[tests3.Op]int{tests3.ListObjects: c.lists}
		if c.refs > 0 {
			want[tests3.GetObject] = c.refs
		}
		s.asks(what, want, func() {
			n := 0
			for _, err := range st.Since(s.ctx, c.after) {
				s.must(err)
				n++
			}
			if n != c.refs {
				t.Errorf("%s: %d, want %d", what, n, c.refs)
			}
		})
	}
}

// putBlob puts the objects of a blob.
func putBlob(s *site, st *Store, b []byte) {
	d, name := identity.Sum(b), rand.Text()
	marker, err := seal(live{name, int64(len(b)), rand.Text()})
	s.must(err)
	for key, body := range map[string][]byte{st.blobKey(d, name): b, st.blobKey(d, liveName): marker} {
		if _, err := st.b.Put(s.ctx, key, body, bucket.Condition{Absent: true}); err != nil {
			s.Error(err)
		}
	}
}
