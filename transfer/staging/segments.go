package staging

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Segments is one file on its way in whose segments come in any order, each checked against midstates as it is written.
// Which of them passed is kept for whoever continues it; only those that were not whole are hashed again. It is safe for
// concurrent use, but one segment is written by one goroutine at a time, and Close and Finish come when nobody writes.
type Segments struct {
	area   *Area
	states *lanes.States
	form   identity.Digest // SHA-256 of the midstates that the segments passed against
	path   string
	file   *durable.File

	mu     sync.Mutex // guards the rest
	state  *durable.File
	passed bits
	there  map[int]int64 // bytes that are written of segments that did not pass yet
	spoilt map[int]bool  // behind those, the rest of the segment is of a file that was adopted and does not match
	have   int64         // bytes of segments that passed
	synced int64         // what have was when the last background sync was begun
	sync   chan error    // holds the result of the background sync; nil: none was begun
}

// bits has one bit for each segment.
type bits []byte

func newBits(n int) bits      { return make(bits, (n+7)/8) }
func (b bits) has(i int) bool { return b[i/8]&(1<<(i%8)) != 0 }
func (b bits) set(i int)      { b[i/8] |= 1 << (i % 8) }

// in says whether other has all that b has, for as many.
func (b bits) in(other bits) bool {
	for i := range b {
		if len(b) != len(other) || b[i]&^other[i] != 0 {
			return false
		}
	}
	return true
}

// Segments opens the file that states are the midstates of: with what an earlier pull left of it, or with nothing. What
// came in order is checked again, segment by segment, as it is asked for. The disk space is taken at once where the
// filesystem can.
func (a *Area) Segments(states *lanes.States) (*Segments, error) {
	s := &Segments{area: a, states: states, path: a.part(states.Digest), spoilt: map[int]bool{}}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("open the partial file of %s: %w", states.Digest, err)
	}
	return s, nil
}

func (s *Segments) open() error {
	form, err := s.states.MarshalBinary()
	if err != nil {
		return err
	}
	s.form = identity.Sum(form)
	s.find()
	if s.have == 0 && len(s.there) == 0 {
		if err := s.area.drop(s.path); err != nil {
			return err
		}
	}
	// Modes follow the umask: this file is the one that will be published.
	if s.file, err = s.area.disk.OpenFile(s.path, os.O_RDWR|os.O_CREATE, 0o666); err != nil {
		return err
	}
	err = s.area.retire(s.path, s.stays)
	if err == nil {
		err = s.save()
	}
	if err == nil {
		err = s.file.Truncate(s.states.Size)
	}
	if err == nil {
		err = s.file.Reserve(s.states.Size)
	}
	if err != nil {
		err = errors.Join(err, s.close())
	}
	return err
}

// stays says whether all that a synced record tells of has passed, and so is not written again.
func (s *Segments) stays(record []byte) bool {
	var r segmentRecord
	return unseal(record, &r) && r.Size == s.states.Size && r.Midstates == s.form && r.Passed.in(s.passed)
}

// find takes over what the records of an earlier pull say.
func (s *Segments) find() {
	s.passed, s.there, s.have = newBits(s.states.Len()), map[int]int64{}, 0
	r := bestSegments(s.path, s.states.Size, s.area.boot)
	if r.Size == 0 {
		pt := bestPoint(s.path, s.states.Size, s.area.boot)
		for i := range s.states.Len() {
			if off, n := s.states.Range(i); off < pt.Offset {
				s.there[i] = min(n, pt.Offset-off)
			}
		}
		return
	}
	for _, o := range r.Open {
		if _, n := s.states.Range(o.Segment); o.Bytes > 0 && o.Bytes <= n {
			s.there[o.Segment] = o.Bytes
		}
	}
	for i := range s.states.Len() {
		_, n := s.states.Range(i)
		switch {
		case !r.Passed.has(i):
		case r.Midstates == s.form:
			s.passed.set(i)
			s.have += n
		default: // it passed against others: that says nothing
			s.there[i] = n
		}
	}
	s.synced = s.have
}

// Have returns the number of bytes that are there: of segments that passed, and of others that are begun.
func (s *Segments) Have() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes()
}

func (s *Segments) bytes() int64 {
	n := s.have
	for _, b := range s.there {
		n += b
	}
	return n
}

// Passed says whether segment i is there and right.
func (s *Segments) Passed(i int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.passed.has(i)
}

// Begun says whether some bytes of segment i are there, and it did not pass.
func (s *Segments) Begun(i int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.there[i] > 0
}

// Spoilt says whether segment i did not match in the file that was adopted, and may yet be right when only some of its
// bytes are written: see Segment.Spare.
func (s *Segments) Spoilt(i int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spoilt[i]
}

// Settle checks the segments of which all bytes are there but that did not pass yet, with no source but the disk.
func (s *Segments) Settle(ctx context.Context) error {
	return s.each(ctx, func(i int) error {
		if _, n := s.states.Range(i); !s.whole(i, n) {
			return nil
		}
		g, err := s.Segment(i)
		if err != nil {
			return err
		}
		return ignoreMismatch(g.End())
	})
}

func (s *Segments) whole(i int, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.passed.has(i) && s.there[i] == n && n > 0
}

// maxSpoilt is how many segments of a damaged file may be Spoilt. One with more, or with more that are than are not, is
// another version of the file, and nothing of them is right.
const maxSpoilt = 16

// Adopt takes over the segments of another file that match, by copying: those that are missing here, or what is missing
// of them. Of one that does not match nothing is recorded as there, but it is Spoilt. A file of another size has none.
// It returns how many bytes it took.
func (s *Segments) Adopt(ctx context.Context, path string) (int64, error) {
	from, err := s.area.disk.OpenFile(path, os.O_RDONLY, 0)
	if errors.Is(err, durable.ErrNotRegular) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer from.Close()
	if size, err := from.Size(); err != nil || size != s.states.Size {
		return 0, err
	}
	before := s.Have()
	s.mu.Lock()
	err = s.save() // Settle may have dropped what the last record says is there
	s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	err = s.each(ctx, func(i int) error {
		if s.Passed(i) {
			return nil
		}
		return s.adopt(from, i)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spoilt) > min(maxSpoilt, s.states.Len()/2) {
		clear(s.spoilt)
	}
	return s.bytes() - before, err
}

func (s *Segments) adopt(from *durable.File, i int) error {
	g, err := s.Segment(i)
	if err != nil {
		return err
	}
	off, left := g.Offset()
	err = readPieces(from, off, left, func(b []byte) error {
		defer g.Flush()
		_, err := g.put(b)
		return err
	})
	switch {
	case err != nil:
		return err
	case g.check.Err() == nil:
		return s.passes(i, g.n)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spoilt[i] = true
	return nil
}

func ignoreMismatch(err error) error {
	if errors.Is(err, lanes.ErrMismatch) {
		return nil
	}
	return err
}

// each calls fn for every segment, on all processors, until one returns an error.
func (s *Segments) each(ctx context.Context, fn func(i int) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards the rest
	var failed error
	next := 0
	take := func(err error) (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		if failed == nil {
			failed = errors.Join(err, context.Cause(ctx))
		}
		next++
		return next - 1, failed == nil && next <= s.states.Len()
	}
	for range min(runtime.GOMAXPROCS(0), s.states.Len()) {
		wg.Go(func() {
			for i, ok := take(nil); ok; i, ok = take(fn(i)) {
			}
		})
	}
	wg.Wait()
	return failed
}

// readPieces reads n bytes from off, piece by piece. It is no error if the file ends before.
func readPieces(f *durable.File, off, n int64, fn func(b []byte) error) error {
	buf := pieces.Get().(*piece)
	defer pieces.Put(buf)
	return readBy(buf[:], f, off, n, fn)
}

// readBy is readPieces with a buffer of the caller.
func readBy(buf []byte, f *durable.File, off, n int64, fn func(b []byte) error) error {
	for end := off + n; off < end; {
		m, err := f.ReadAt(buf[:min(int64(len(buf)), end-off)], off)
		if ferr := fn(buf[:m]); ferr != nil {
			return ferr
		}
		if off += int64(m); m == 0 && err != nil {
			return ignoreEOF(err)
		}
	}
	return nil
}

func ignoreEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

type piece [durable.PieceSize]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

// passes notes that segment i is there and right.
func (s *Segments) passes(i int, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.passed.has(i) {
		s.passed.set(i)
		s.have += n
	}
	delete(s.there, i)
	delete(s.spoilt, i)
	err := s.save()
	if err == nil && s.have-s.synced >= syncEvery {
		err = s.background()
	}
	return err
}

// fails notes that all bytes of segment i were written, and do not match.
func (s *Segments) fails(i int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.there, i)
	delete(s.spoilt, i)
}

// save keeps a record that is good as long as the machine runs.
func (s *Segments) save() error {
	b, err := s.record(true).encode()
	if err == nil && s.state == nil {
		s.state, err = s.area.fresh(s.path)
	}
	if err == nil {
		_, err = s.state.WriteAt(b, 0)
	}
	return err
}

// background syncs what is there, then saves a record that says so, while more is written. One sync runs at a time.
func (s *Segments) background() error {
	if s.sync != nil {
		select {
		case err := <-s.sync:
			s.sync = nil
			if err != nil {
				return err
			}
		default:
			return nil
		}
	}
	b, err := s.record(false).encode()
	if err != nil {
		return err
	}
	s.synced = s.have
	s.sync = make(chan error, 1)
	go func(done chan<- error) { done <- syncWith(s.area.disk, s.file, s.path, b) }(s.sync)
	return nil
}

// syncWith syncs a partial file and then keeps a record of what is in it. After a sync that failed nobody knows what is
// on the disk: the record that counted on it is dropped.
func syncWith(d durable.Disk, f *durable.File, path string, record []byte) error {
	if err := f.Sync(); err != nil {
		return errors.Join(err, d.Remove(path+stateSuffix))
	}
	return d.WriteFile(path+syncedSuffix, record, 0o644)
}

func (s *Segments) wait() error {
	if s.sync == nil {
		return nil
	}
	err := <-s.sync
	s.sync = nil
	return err
}

// Finish syncs the file, whose segments must all have passed: then it has the digest of the midstates, and its area can
// publish it.
func (s *Segments) Finish() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.states.Len() {
		if !s.passed.has(i) {
			return fmt.Errorf("segment %d of %s: %w", i, s.states.Digest, ErrUnverified)
		}
	}
	b, err := s.record(false).encode()
	if err = errors.Join(err, s.wait()); err == nil {
		err = syncWith(s.area.disk, s.file, s.path, b)
	}
	if err == nil {
		s.area.verify(s.states.Digest)
	}
	return err
}

// Close keeps what is there for whoever continues it.
func (s *Segments) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.wait()
	if err == nil {
		err = s.save()
	}
	return errors.Join(err, s.close())
}

func (s *Segments) close() error {
	err := s.file.Close()
	if s.state != nil {
		err = errors.Join(err, s.state.Close())
		s.state = nil
	}
	return err
}

// Segment is one segment under way. It is not safe for concurrent use.
type Segment struct {
	s      *Segments
	i      int
	off, n int64 // of the segment
	at     int64 // bytes of it that are written
	from   int64 // of these, how many were there when it was opened
	saved  int64
	check  *lanes.Check
	coming coming // to check
}

// Segment opens segment i for writing where it was left; what is there of it is read and hashed.
func (s *Segments) Segment(i int) (*Segment, error) {
	off, n := s.states.Range(i)
	s.mu.Lock()
	g := &Segment{s: s, i: i, off: off, n: n, from: s.there[i], check: s.states.Check(i),
		coming: coming{hashes: s.area.hashes}}
	passed := s.passed.has(i)
	s.mu.Unlock()
	if passed {
		return nil, fmt.Errorf("segment %d of %s is there already", i, s.states.Digest)
	}
	err := readPieces(s.file, off, g.from, func(b []byte) error {
		g.at += int64(len(b))
		s.area.hash(g.check, b)
		return nil
	})
	g.from, g.saved = g.at, g.at
	return g, err
}

// Offset returns where in the file the next byte of the segment goes, and how many are missing.
func (g *Segment) Offset() (off, left int64) { return g.off + g.at, g.n - g.at }

// Fresh says whether every byte came from those who wrote to g since it was opened.
func (g *Segment) Fresh() bool { return g.from == 0 }

// Write adds b. ErrLost: another pull took the area over.
func (g *Segment) Write(b []byte) (n int, err error) {
	defer g.Flush()
	return g.Put(b)
}

// Put is Write, but b may be hashed later, with bytes of other files: until the next Put, Write, Flush or End returns it
// must stay as it is. After the last Put comes one of them.
func (g *Segment) Put(b []byte) (n int, err error) {
	n, err = g.put(b)
	if err == nil && g.at-g.saved >= saveEvery && g.at < g.n {
		g.Keep()
		g.s.mu.Lock()
		defer g.s.mu.Unlock()
		err = g.s.save()
	}
	return n, err
}

// put is Put, but nothing is recorded.
func (g *Segment) put(b []byte) (n int, err error) {
	if err := g.s.area.Held(); err != nil {
		return 0, err
	}
	if int64(len(b)) > g.n-g.at {
		return 0, fmt.Errorf("more than the %d bytes of segment %d", g.n, g.i)
	}
	n, err = g.s.file.WriteAt(b, g.off+g.at)
	g.coming.write(g.check, b[:n])
	g.at += int64(n)
	return n, err
}

// Flush returns when all that was put is hashed.
func (g *Segment) Flush() { g.coming.flush() }

// End checks the segment, and records that it passed. lanes.ErrMismatch: it is dropped, to be written from its start.
func (g *Segment) End() error {
	g.Flush()
	if err := g.check.Err(); err != nil {
		g.s.fails(g.i)
		return err
	}
	return g.s.passes(g.i, g.n)
}

// Spare returns how many bytes of a segment that was Spoilt need not be written, as what lies there is right: then it
// passed, and nothing is to be done with it any more. Zero: they must be, for all that is known by now. The rest is
// read into buf, piece by piece.
func (g *Segment) Spare(buf []byte) (n int64, err error) {
	off, left := g.Offset()
	if left == 0 {
		return 0, nil
	}
	g.Flush()
	check := g.check.Clone()
	err = readBy(buf, g.s.file, off, left, func(b []byte) error {
		g.s.area.hash(check, b)
		return nil
	})
	if err != nil || check.Err() != nil {
		return 0, err
	}
	return left, g.s.passes(g.i, g.n)
}

// Keep leaves what is written of a segment that does not end now for whoever opens it next.
func (g *Segment) Keep() {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	g.s.there[g.i], g.saved = g.at, g.at
}

// Drop forgets what is written of the segment.
func (g *Segment) Drop() {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	delete(g.s.there, g.i)
}

// Bytes returns how many bytes of the segment are there.
func (g *Segment) Bytes() int64 { return g.at }
