package s3store

import (
	"bytes"
	"io"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
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

// TestPartMemory: many uploads at a time come to their end with the memory of few, and take no more.
func TestPartMemory(t *testing.T) {
	s := newSite(t)
	const all = 3 * partOf
	st := openAt(t, s.direct, Options{PartMemory: all})
	var wg sync.WaitGroup
	for n := range 12 {
		b := noise(uint64(n), []int{3*partOf + 7, partOf / 2, 2 * partOf, 1000}[n%4])
		wg.Go(func() {
			how := pushing{named: n%3 == 0}
			u, err := st.Create(s.ctx, how.hint(identity.Sum(b)), how.size(b))
			if err == nil {
				_, err = u.Finish(s.ctx, 0, watched{bytes.NewReader(b), s, st}, identity.Sum(b))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if st.memory.left != all || len(st.memory.line) != 0 {
		t.Errorf("%d bytes of %d are left in the end, %d wait", st.memory.left, all, len(st.memory.line))
	}
	s.whole()
}

// watched looks at each read how much memory the parts have in buffers.
type watched struct {
	io.Reader
	s  *site
	st *Store
}

func (w watched) Read(b []byte) (int, error) {
	w.st.memory.mu.Lock()
	left := w.st.memory.left
	w.st.memory.mu.Unlock()
	if left < 0 {
		w.s.Errorf("%d bytes too many are taken", -left)
	}
	return w.Reader.Read(b)
}

// TestPartMemoryUsedUp: where uploads that stand still have all the memory, others are told so after a while, keep what
// they sent, and go on when there is some again. What is small is not in their way.
func TestPartMemoryUsedUp(t *testing.T) {
	s := newSite(t)
	st := openAt(t, s.direct, Options{PartMemory: 2 * partOf, patience: time.Millisecond})
	var wg sync.WaitGroup
	var ends []*io.PipeWriter
	for n := range 2 {
		b := noise(uint64(n), 2<<20)
		u, err := st.Create(s.ctx, identity.Digest{}, -1)
		s.must(err)
		r, w := io.Pipe()
		ends = append(ends, w)
		wg.Go(func() {
			if _, err := u.Append(s.ctx, 0, r); err != nil {
				t.Error(err)
			}
		})
		_, err = w.Write(b) // returns when it is read
		s.must(err)
	}
	b, small := noise(9, 3<<20), noise(10, 300<<10)
	u, err := st.Create(s.ctx, identity.Sum(b), int64(len(b)))
	s.must(err)
	_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b))
	s.want("finish without memory", err, blobstore.ErrUnavailable)
	kept := u.Size()
	if kept < 500<<10 {
		t.Errorf("%d bytes are kept", kept)
	}
	s.upload(st, small)
	for _, w := range ends {
		s.must(w.Close())
	}
	wg.Wait()
	_, err = u.Finish(s.ctx, kept, bytes.NewReader(b[kept:]), identity.Sum(b))
	s.must(err)
	s.holds(st, b)
	s.holds(st, small)
}

// TestAnnouncedMuch: what is announced takes no memory until it comes.
func TestAnnouncedMuch(t *testing.T) {
	s := newSite(t)
	st := s.past()
	for _, size := range []int64{1<<63 - 1, bucket.MaxObject + 1} {
		_, err := st.Create(s.ctx, identity.Digest{}, size)
		s.want("create", err, blobstore.ErrNoSpace)
	}
	used := allocated(func() {
		for range 8 {
			u, err := st.Create(s.ctx, identity.Digest{}, bucket.MaxObject)
			s.must(err)
			_, err = u.Append(s.ctx, 0, bytes.NewReader(make([]byte, 1000)))
			s.must(err)
		}
	})
	if used > 8*(pieceSize+connections/4) {
		t.Errorf("%d bytes were allocated for 8 uploads of 1000 bytes each", used)
	}
}
