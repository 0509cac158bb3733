package s3store

import (
	"io"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// endless reads as the same bytes over and over, from memory that is there already.
type endless struct {
	period []byte
	at     int
}

func (e *endless) Read(b []byte) (n int, err error) {
	for n < len(b) {
		m := copy(b[n:], e.period[e.at:])
		e.at = (e.at + m) % len(e.period)
		n += m
	}
	return n, nil
}

// allocated returns how many bytes do allocates, of which none are freed meanwhile. No other test runs.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// connections is what those to the server may take: less than a part.
const connections = 4 * mib

// grown is what the buffer of a first part was, before it had the size of a part: it grows with what comes.
const grown = 21 * pieceSize // 1, 4 and 16 pieces

// TestMemoryOfAnUpload: an upload of many parts allocates two of them, what the first grew from, and what requests
// take.
func TestMemoryOfAnUpload(t *testing.T) {
	const parts = 12
	size := int64(parts*partOf + 1)
	content := func() io.Reader { return io.LimitReader(&endless{period: noise(1, 4099)}, size) }
	h := identity.NewHash()
	if _, err := io.Copy(h, content()); err != nil {
		t.Fatal(err)
	}
	d := identity.DigestOf(h)
	for _, how := range []pushing{{named: true}, {}} {
		s := newSite(t)
		st := s.past()
		used := allocated(func() {
			u, err := st.Create(s.ctx, how.hint(d), -1)
			s.must(err)
			_, err = u.Finish(s.ctx, 0, content(), d)
			s.must(err)
		})
		if most := uint64(2*partOf + grown + connections); used > most {
			t.Errorf("named %v: %d bytes were allocated for %d parts of %d, at most %d were expected",
				how.named, used, parts, partOf, most)
		}
		testMemoryOfAReader(s, st, d)
	}
}

// testMemoryOfAReader: what reads a blob, whole or in part, takes a piece of memory.
func testMemoryOfAReader(s *site, st *Store, d identity.Digest) {
	i, err := st.Stat(s.ctx, d)
	s.must(err)
	for _, n := range []int64{-1, 3*partOf + 7} {
		var sink largest
		used := allocated(func() { s.must(copyRange(s, st, i, partOf-1, n, &sink)) })
		if most := uint64(pieceSize + connections/4); used > most {
			s.Errorf("reading %d bytes allocated %d, at most %d were expected", sink.total, used, most)
		}
		if want := i.Size - (partOf - 1); n < 0 && sink.total != want || n >= 0 && sink.total != n {
			s.Errorf("read %d bytes of %d", sink.total, want)
		}
		if sink.most > pieceSize {
			s.Errorf("%d bytes were written at a time", sink.most)
		}
	}
}

func copyRange(s *site, st *Store, i blobstore.Info, off, n int64, w io.Writer) error {
	r, err := st.Open(s.ctx, i, off, n)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = r.(io.WriterTo).WriteTo(w)
	return err
}

// largest remembers the largest write.
type largest struct {
	total int64
	most  int
}

func (l *largest) Write(b []byte) (int, error) {
	l.total, l.most = l.total+int64(len(b)), max(l.most, len(b))
	return len(b), nil
}
