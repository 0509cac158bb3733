package s3store

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// A network may deliver a request twice, or long after its client gave it up.

func changes(r *http.Request) bool { return r.Method != http.MethodGet && r.Method != http.MethodHead }

// TestTwice: everything that changes something comes again when all is done, once in the same order, and once without
// what removes. Uploads may come to life by that; going on with them or dropping them harms nothing.
func TestTwice(t *testing.T) {
	t.Parallel()
	removes := func(r *http.Request) bool { return r.Method == http.MethodDelete }
	for name, match := range map[string]tests3.Match{
		"all": changes, "all but removals": but(removes, changes), "removals": removes,
		"states that are first": tests3.First(1, statePut),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			w := newWork(s, s.open(Options{}))
			var rec tests3.Recording
			s.proxy.On(match, tests3.Record(&rec))
			w.do()
			if len(rec.Replay()) == 0 {
				t.Fatal("nothing came twice")
			}
			for _, b := range w.blobs {
				w.holds(w.st, b)
			}
			for u, err := range w.st.Uploads(w.ctx) {
				w.must(err)
				up, err := w.st.Resume(w.ctx, u.ID)
				w.must(err)
				if _, err := up.Commit(w.ctx, u.Hint); err != nil && !errors.Is(err, blobstore.ErrUploadUnknown) &&
					!errors.Is(err, blobstore.ErrDigestMismatch) && !errors.Is(err, blobstore.ErrSizeMismatch) {
					t.Errorf("commit of an upload that came to life: %v", err)
				}
			}
			w.check()
		})
	}
}

// late is a request that the client gave up, on its way to the server.
type late struct{ tests3.Recording }

// keepBack takes all requests that match until the rule is off.
func (l *late) keepBack(s *site, match tests3.Match) *tests3.Rule {
	return s.proxy.On(match, tests3.Record(&l.Recording), reset)
}

// arrive delivers it, and returns how many tries of it were carried out.
func (l *late) arrive() (done int) {
	for _, status := range l.Replay() {
		if status < 300 {
			done++
		}
	}
	return done
}

// TestLateMarker: a marker that shows a copy comes when that copy was given up, or deleted.
func TestLateMarker(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"whole": 3000, "in parts": partOf + 3000} {
		for _, named := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newSite(t)
				st, b := s.open(Options{Tries: 2}), noise(1, size)
				d := identity.Sum(b)
				for range 2 { // once when there is no marker, and once when there is one that shows nothing
					testGivenUp(s, st, b, named)
				}
				for range 2 {
					testDeleted(s, st, b, named)
				}
				_, err := s.push(st, b, pushing{named: named})
				s.must(err)
				s.holds(st, b)
				_, err = st.Stat(s.ctx, d)
				s.must(err)
				s.clean()
			})
		}
	}
}

// testGivenUp: the upload was aborted before its marker arrives.
func testGivenUp(s *site, st *Store, b []byte, named bool) {
	var marker late
	d := identity.Sum(b)
	rule := marker.keepBack(s, markerPut)
	u, err := st.Create(s.ctx, pushing{named: named}.hint(d), -1)
	s.must(err)
	_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), d)
	s.want("finish", err, blobstore.ErrUnavailable)
	rule.Off()
	s.must(u.Abort(s.ctx))
	if n := marker.arrive(); n != 0 {
		s.Errorf("%d markers of a copy that is gone took their place", n)
	}
	_, err = st.Stat(s.ctx, d)
	s.want("stat", err, blobstore.ErrNotFound)
}

// testDeleted: the marker arrived, the blob was deleted, and the marker arrives again.
func testDeleted(s *site, st *Store, b []byte, named bool) {
	var rec tests3.Recording
	rule := s.proxy.On(markerPut, tests3.Record(&rec))
	i, err := s.push(st, b, pushing{named: named})
	s.must(err)
	rule.Off()
	s.must(st.Delete(s.ctx, i))
	rec.Replay()
	_, err = st.Stat(s.ctx, i.Digest)
	s.want("stat of what was deleted", err, blobstore.ErrNotFound)
	if n := s.whole(); n != 0 {
		s.Errorf("%d blobs are shown", n)
	}
}

// TestLateHiding: what hides a copy comes when it was hidden long since, and another one is shown.
func TestLateHiding(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st, b := s.open(Options{Tries: 2}), noise(1, 3000)
	i, err := s.push(st, b, pushing{})
	s.must(err)
	var hiding, removal late
	rules := []*tests3.Rule{hiding.keepBack(s, markerPut), removal.keepBack(s, bytesGone)}
	s.want("delete", st.Delete(s.ctx, i), blobstore.ErrUnavailable)
	rules[0].Off()
	s.want("delete", st.Delete(s.ctx, i), blobstore.ErrUnavailable)
	rules[1].Off()
	_, err = s.push(st, b, pushing{})
	s.must(err)
	if n := hiding.arrive(); n != 0 {
		t.Errorf("%d late markers took their place", n)
	}
	if n := removal.arrive(); n == 0 {
		t.Error("the bytes of the first copy were not removed late")
	}
	s.holds(st, b)
	s.clean()
	s.holds(st, b)
}

// TestLateBytes: bytes come when nobody needs them any more. They are never shown, and Sweep finds them.
func TestLateBytes(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st, b := s.open(Options{Tries: 2}), noise(1, 3000)
	var lost, more late
	rules := []*tests3.Rule{lost.keepBack(s, bytesPut), more.keepBack(s, tailPut)}
	u, err := st.Create(s.ctx, identity.Sum(b), -1)
	s.must(err)
	_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b))
	s.want("finish", err, blobstore.ErrUnavailable)
	for _, r := range rules {
		r.Off()
	}
	s.must(u.Abort(s.ctx))
	if lost.arrive() == 0 || more.arrive() == 0 {
		t.Error("no bytes came late")
	}
	if n := s.whole(); n != 0 {
		t.Errorf("%d blobs are shown", n)
	}
	removed, err := st.Sweep(s.ctx, time.Now().Add(time.Hour))
	if err != nil || removed < 2 {
		t.Errorf("sweep removed %d, %v", removed, err)
	}
	s.clean()
}

// TestLatePart: a part of an earlier try comes after that of a later one. The server refuses to put it together with
// the others, or keeps the right one.
func TestLatePart(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{Tries: 2})
	b := noise(1, 2*partOf+10)
	var part late
	u, err := st.Create(s.ctx, identity.Digest{}, -1)
	s.must(err)
	_, err = u.Append(s.ctx, 0, bytes.NewReader(b[:partOf+5]))
	s.must(err)
	rule := part.keepBack(s, tests3.First(2, partPut))
	// The second part ends here at first, and then it goes on.
	_, err = u.Commit(s.ctx, identity.Sum(b[:partOf+5]))
	s.want("commit", err, blobstore.ErrUnavailable)
	rule.Off()
	arrived := 0
	s.proxy.On(tests3.First(1, complete), func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			arrived = part.arrive()
			next.ServeHTTP(w, r)
		})
	})
	rest := bytes.NewReader(b[u.Size():])
	_, err = u.Finish(s.ctx, u.Size(), rest, identity.Sum(b))
	if arrived == 0 {
		t.Error("no part came late")
	}
	if n := s.whole(); err == nil && n != 1 || err != nil && (n != 0 || !errors.Is(err, blobstore.ErrUploadUnknown)) {
		t.Errorf("finish with another part in the place of one: %v, and %d blobs are shown", err, n)
	}
	_, err = s.push(st, b, pushing{})
	s.must(err)
	if part.arrive() != 0 {
		t.Error("a part arrived that belongs to nothing")
	}
	s.holds(st, b)
	s.clean()
}

// TestLateRefs: refs come whose client was told that they could not be kept. They take a number of their own or none.
func TestLateRefs(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{Tries: 2})
	_, err := st.Put(s.ctx, ref(1))
	s.must(err)
	var before, after late
	rule := before.keepBack(s, refsPut)
	_, err = st.Put(s.ctx, ref(2))
	s.want("put", err, blobstore.ErrUnavailable)
	rule.Off()
	if n := before.arrive(); n != 1 {
		t.Errorf("%d of the late refs were kept, want 1", n)
	}
	_, err = st.Put(s.ctx, ref(3))
	s.must(err)
	rule = after.keepBack(s, refsPut)
	_, err = st.Put(s.ctx, ref(4))
	s.want("put", err, blobstore.ErrUnavailable)
	rule.Off()
	position, err := st.Put(s.ctx, ref(5))
	s.must(err)
	if n := after.arrive(); n != 0 {
		t.Errorf("%d refs came late into a place that was taken", n)
	}
	for _, st := range []*Store{st, s.past()} {
		var seqs []uint64
		for _, r := range refs(t, st) {
			seqs = append(seqs, r.Seq)
		}
		if want := []uint64{1, 2, 3, 5}; !slices.Equal(seqs, want) {
			t.Errorf("refs %v, want %v", seqs, want)
		}
		for r, err := range st.Since(s.ctx, position) {
			t.Errorf("after the last one: %v, %v", r, err)
		}
	}
}
