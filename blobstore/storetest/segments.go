package storetest

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// Segmented is implemented by a Medium whose stores record midstates of segments of another size than
// lanes.SegmentSize, so that small blobs have some.
type Segmented interface{ SegmentSize() int64 }

func (e *env) segmentSize() int64 {
	if s, ok := e.medium.(Segmented); ok {
		return s.SegmentSize()
	}
	return lanes.SegmentSize
}

// midstates returns those of a blob, after checking that the blob's bytes b pass with them. It returns nil if the store
// has none of this blob, or none at all.
func (e *env) midstates(i blobstore.Info, b []byte) *lanes.States {
	e.Helper()
	st, ok := e.st.(blobstore.Segments)
	if !ok {
		return nil
	}
	form, err := st.Segments(e.ctx, i)
	if errors.Is(err, blobstore.ErrNotFound) {
		return nil
	}
	e.must(err)
	s, err := lanes.ParseSegments(form, e.segmentSize())
	e.must(err)
	if s.Digest != i.Digest || s.Size != i.Size {
		e.Errorf("midstates of %s are of %s, %d bytes", i.Digest, s.Digest, s.Size)
	}
	stream := s.Stream()
	stream.Write(b)
	if bad := stream.End(); bad != nil {
		e.Errorf("midstates of %s, %d bytes: segments %v do not pass", i.Digest, len(b), bad)
	}
	return s
}

// testSegments: midstates are recorded however the bytes come in, also over the end of the process, of every blob that
// has an edge inside.
func testSegments(e *env) {
	segment := int(e.segmentSize())
	for _, n := range []int{0, 1, segment - 1, segment, segment + 1, 3 * segment, 5*segment + 12345} {
		for way, push := range map[string]func(b []byte) blobstore.Info{
			"put": e.put, "finished": e.finished, "resumed": e.resumed,
		} {
			b := random(40, n)
			i := push(b)
			s := e.midstates(i, b)
			if want := lanes.Edges(int64(n), int64(segment)); (s != nil) != (want > 0) {
				e.Errorf("%d bytes, %s: has midstates: %v, want %d of them", n, way, s != nil, want)
			}
			e.reopen(true)
			if (e.midstates(i, b) != nil) != (s != nil) {
				e.Errorf("%d bytes, %s: other midstates in the next process", n, way)
			}
			e.must(e.st.Delete(e.ctx, i))
			if e.midstates(i, b) != nil {
				e.Errorf("%d bytes, %s: there are midstates after the delete", n, way)
			}
		}
	}
}

// finished pushes b in one call.
func (e *env) finished(b []byte) blobstore.Info {
	e.Helper()
	u := e.create(identity.Sum(b), int64(len(b)))
	i, err := u.Finish(e.ctx, 0, bytes.NewReader(b), identity.Sum(b))
	e.must(err)
	e.must(u.Abort(e.ctx))
	return i
}

// resumed pushes b in pieces, with the end of the process between them. An edge lies at the end of a piece, and inside.
func (e *env) resumed(b []byte) blobstore.Info {
	e.Helper()
	id := e.create(identity.Sum(b), int64(len(b))).ID()
	segment := int(e.segmentSize())
	for at := 0; at < len(b); {
		to := min(len(b), at+segment/2+at/segment)
		if at == 0 {
			to = min(len(b), segment)
		}
		e.add(e.resume(id), b[at:to])
		e.reopen(at%2 == 0)
		at = to
	}
	return e.commit(e.resume(id), identity.Sum(b))
}

// testTogether: uploads that come in at the same time, in pieces of all sizes, over several calls and with some that
// break off, become what they should.
func testTogether(e *env) {
	const uploads = 9
	var all sync.WaitGroup
	var blobs [uploads][]byte
	for n := range blobs {
		blobs[n] = random(uint64(50+n), n*150_000+n)
		u := e.create(identity.Sum(blobs[n]), int64(len(blobs[n])))
		all.Go(func() {
			b := blobs[n]
			half := len(b) / 2
			_, err := u.Append(e.ctx, 0, io.MultiReader(bytes.NewReader(b[:half]), iotest.ErrReader(errBroken)))
			if !errors.Is(err, errBroken) {
				e.Errorf("upload %d that breaks off: %v", n, err)
			}
			at := u.Size()
			if i, err := u.Finish(e.ctx, at, bytes.NewReader(b[at:]), identity.Sum(b)); err != nil || i.Size != int64(len(b)) {
				e.Errorf("upload %d: %d bytes, %v", n, i.Size, err)
			}
			if err := u.Abort(e.ctx); err != nil { // of the receipt
				e.Errorf("upload %d: %v", n, err)
			}
		})
	}
	all.Wait()
	for _, b := range blobs {
		e.holds(b)
		i, err := e.st.Stat(e.ctx, identity.Sum(b))
		e.must(err)
		e.midstates(i, b)
	}
}

var errBroken = errors.New("broken off")

// testSegmentsOfCopy: midstates are asked for by copy.
func testSegmentsOfCopy(e *env) {
	b := random(41, int(e.segmentSize())+1)
	first := e.put(b)
	e.must(e.st.Delete(e.ctx, first))
	second := e.put(b)
	if e.midstates(second, b) == nil {
		e.Error("no midstates of the second copy")
	}
	_, err := e.st.(blobstore.Segments).Segments(e.ctx, first)
	e.want("midstates of the first copy", err, blobstore.ErrNotFound)
	_, err = e.st.(blobstore.Segments).Segments(e.ctx, blobstore.Info{Digest: identity.Sum([]byte("not there"))})
	e.want("midstates of nothing", err, blobstore.ErrNotFound)
}

// testKeepSegments: midstates can be kept later, of a copy that is shown and if they may be those of it. They outlive the
// process, and don't outlive the copy.
func testKeepSegments(e *env) {
	sg := e.st.(blobstore.Segments)
	segment := e.segmentSize()
	b, other := random(42, int(3*segment+5)), random(43, int(3*segment+5))
	i, one := e.put(b), e.put(random(44, int(segment)))
	right, wrong := e.form(b, i.Digest), e.form(other, i.Digest)
	for what, form := range map[string][]byte{
		"nothing": nil, "a part": right[:len(right)-1], "more": append(bytes.Clone(right), 0),
		"those of another digest": e.form(b, identity.Sum(other)), "those of another size": e.form(b[1:], i.Digest),
	} {
		err := sg.KeepSegments(e.ctx, i, form)
		e.want("keep "+what, err, blobstore.ErrMidstatesDamaged)
		e.want("keep "+what, err, blobstore.ErrDamaged)
	}
	e.want("keep those of one segment", sg.KeepSegments(e.ctx, one, e.form(random(44, int(segment)), one.Digest)),
		blobstore.ErrMidstatesDamaged)
	for _, form := range [][]byte{wrong, right} { // which the store can't tell apart
		e.must(sg.KeepSegments(e.ctx, i, form))
		e.reopen(true)
		sg = e.st.(blobstore.Segments)
		got, err := sg.Segments(e.ctx, i)
		e.must(err)
		if !bytes.Equal(got, form) {
			e.Error("other midstates in the next process than were kept")
		}
	}
	e.must(e.st.Delete(e.ctx, i))
	e.want("keep those of a copy that is gone", sg.KeepSegments(e.ctx, i, right), blobstore.ErrNotFound)
	second := e.put(b)
	e.want("keep those of the first copy", sg.KeepSegments(e.ctx, i, right), blobstore.ErrNotFound)
	if e.midstates(second, b) == nil {
		e.Error("no midstates of the second copy")
	}
	if q, ok := e.st.(blobstore.Quarantine); ok {
		e.must(q.SetAside(e.ctx, second, "it has to be"))
		_, err := sg.Segments(e.ctx, second)
		e.want("midstates of what is set aside", err, blobstore.ErrQuarantined)
		e.want("keep those of what is set aside", sg.KeepSegments(e.ctx, second, right), blobstore.ErrQuarantined)
	}
}

// form returns the midstates that b has, said to be those of d.
func (e *env) form(b []byte, d identity.Digest) []byte {
	e.Helper()
	h := lanes.NewRecorder(e.segmentSize())
	h.Write(b)
	_, noted := h.Take()
	s, err := lanes.New(e.segmentSize(), int64(len(b)), d, noted[:lanes.Edges(int64(len(b)), e.segmentSize())])
	e.must(err)
	form, err := s.MarshalBinary()
	e.must(err)
	return form
}
