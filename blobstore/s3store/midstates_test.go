package s3store

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/memstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// segmentOf is the size of a segment in these tests.
const segmentOf = 1 << 20

// segmented opens the store with segments that are smaller than parts.
func (s *site) segmented() *Store {
	s.Helper()
	st := s.open(Options{})
	st.segment = segmentOf
	return st
}

// checkMidstates says whether a copy has midstates, after checking the bytes b with them.
func (s *site) checkMidstates(st *Store, i blobstore.Info, b []byte) bool {
	s.Helper()
	form, err := st.Segments(s.ctx, i)
	if errors.Is(err, blobstore.ErrNotFound) {
		return false
	}
	s.must(err)
	states, err := lanes.ParseSegments(form, st.segment)
	s.must(err)
	stream := states.Stream()
	stream.Write(b)
	if bad := stream.End(); bad != nil {
		s.Errorf("segments %v do not pass", bad)
	}
	return true
}

// TestMidstatesInParts: midstates are recorded over all parts of an upload, also when it goes on in other processes, and
// left out where one of those did not record them.
func TestMidstatesInParts(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for name, c := range map[string]struct {
		announced bool
		steps     []int // bytes after which the process ends
		older     int   // which of these processes records none; 0: all do
		has       bool
	}{
		"at once":              {true, nil, 0, true},
		"not announced":        {false, nil, 0, true},
		"between parts":        {true, []int{partOf, 2 * partOf}, 0, true},
		"inside of parts":      {true, []int{segmentOf, partOf + 7, 2*partOf + segmentOf}, 0, true},
		"not announced, ended": {false, []int{1000, partOf + segmentOf - 1}, 0, true},
		"older at first":       {true, []int{segmentOf, partOf + 7}, 1, false},
		"older meanwhile":      {true, []int{segmentOf, partOf + 7}, 2, false},
		"older, no edge":       {true, []int{segmentOf - 1, partOf + 7}, 1, true},
	} {
		b, d, size := noise(7, 3*partOf+12345), identity.Digest{}, int64(-1)
		if c.announced {
			d, size = identity.Sum(b), int64(len(b))
		}
		st := s.segmented()
		u, err := st.Create(s.ctx, d, size)
		s.must(err)
		at := 0
		for n, to := range c.steps {
			if n+1 == c.older {
				st.segment = 1 << 40 // no edge is seen
			}
			u, err = st.Resume(s.ctx, u.ID())
			s.must(err)
			_, err = u.Append(s.ctx, int64(at), bytes.NewReader(b[at:to]))
			s.must(err)
			at, st = to, s.segmented()
		}
		u, err = st.Resume(s.ctx, u.ID())
		s.must(err)
		i, err := u.Finish(s.ctx, int64(at), bytes.NewReader(b[at:]), identity.Sum(b))
		s.must(err)
		s.must(u.Abort(s.ctx))
		if s.checkMidstates(st, i, b) != c.has {
			t.Errorf("%s: has midstates: %v", name, !c.has)
		}
		s.must(st.Delete(s.ctx, i))
		s.nothing(name)
	}
}

// nothing checks that there are no bytes and no midstates of any copy.
func (s *site) nothing(what string) {
	s.Helper()
	st := s.past()
	for o, err := range st.b.List(s.ctx, st.b.Key(blobsName)+"/", "", 0) {
		s.must(err)
		if keyCopy(o.Key) != liveName {
			s.Errorf("%s: %s is left behind", what, o.Key)
		}
	}
}

// TestMidstatesDamaged: what is no midstates of a copy is told from none, and replaced by what is kept later.
func TestMidstatesDamaged(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.segmented()
	b := noise(8, 3*segmentOf+1)
	i := s.upload(st, b)
	key := st.blobKey(i.Digest, i.Generation+midstatesMark)
	form, err := st.Segments(s.ctx, i)
	s.must(err)
	for _, spoiled := range [][]byte{{}, form[1:], form[:len(form)-1], append(bytes.Clone(form), 0)} {
		_, err := st.b.Put(s.ctx, key, spoiled, bucket.Condition{})
		s.must(err)
		if _, err := st.Segments(s.ctx, i); !errors.Is(err, blobstore.ErrMidstatesDamaged) {
			t.Errorf("%d bytes: %v", len(spoiled), err)
		}
		s.must(st.KeepSegments(s.ctx, i, form))
		if !s.checkMidstates(st, i, b) {
			t.Error("no midstates after they were kept")
		}
	}
}

// TestSweepMidstates: midstates are swept once their copy is gone, and those of a copy that is there are not.
func TestSweepMidstates(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.segmented()
	b, gone := noise(9, 3*segmentOf+1), noise(10, 2*segmentOf+1)
	i, was := s.upload(st, b), s.upload(st, gone)
	form, err := st.Segments(s.ctx, was)
	s.must(err)
	s.must(st.Delete(s.ctx, was))
	// As a process leaves them that was killed, or an older one that knew nothing of them.
	_, err = st.b.Put(s.ctx, st.blobKey(was.Digest, was.Generation+midstatesMark), form, bucket.Condition{})
	s.must(err)
	if n, err := st.Sweep(s.ctx, time.Now().Add(-time.Hour)); n != 0 || err != nil {
		t.Errorf("swept %d that are not old, %v", n, err)
	}
	if n, err := st.Sweep(s.ctx, time.Now().Add(time.Hour)); n != 1 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
	if !s.checkMidstates(st, i, b) {
		t.Error("the midstates of a copy that is there were swept")
	}
	s.must(st.Delete(s.ctx, i))
	s.nothing("after the sweep")
}

// TestCopyDerivesMidstates: a store that blobs are copied to records midstates as for any push, whether or not the other
// store has any.
func TestCopyDerivesMidstates(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	from := memstore.New()
	b := noise(11, 2*partOf+1)
	u, err := from.Create(s.ctx, identity.Sum(b), int64(len(b)))
	s.must(err)
	_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b)) // which has one segment there
	s.must(err)
	st := s.segmented()
	_, err = blobstore.Copy(context.WithoutCancel(s.ctx), st, from, blobstore.CopyOptions{})
	s.must(err)
	i, err := st.Stat(s.ctx, identity.Sum(b))
	s.must(err)
	if !s.checkMidstates(st, i, b) {
		t.Error("no midstates of what was copied")
	}
}
