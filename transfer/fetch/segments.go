package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	maxRun   = 4 // segments of one request
	maxWrong = 2 // times that the registry may send bytes of one segment that do not match

	// A segment of which a damaged file lies there is asked for in requests of step bytes, the last one of lastStep: one
	// damaged byte costs 10 MiB on average, and 63 times in 64 no more than 15.75 MiB, which is 1/300 of 5 GB.
	step     = 4 << 20
	lastStep = 256 << 10
)

var (
	// errInOrder: midstates do not help with this file.
	errInOrder = errors.New("it comes in order")
	// errWrong: a mirror sent bytes that do not match.
	errWrong = errors.New("it sent bytes that do not match")
)

// segmented is one file on its way in, in segments.
type segmented struct {
	f      *fetcher
	file   File
	states *lanes.States
	segs   *staging.Segments
	total  int64 // bytes that were missing at first

	mu      sync.Mutex // guards the rest. A caller may hold the lock of the pool, and takes it first
	idle    []bool     // segments that are neither there nor on their way
	left    int        // segments that are not there
	running int        // requests under way
	wrong   map[int]int
	without map[*source]bool // sources that are not asked for this file
	cause   error            // why the registry is one of them
	got     int64            // bytes of this try
	told    int64
	changed chan struct{} // closed and replaced when a segment came or became idle, or a request ended
}

// inSegments fetches a file. errInOrder: what is there is kept, but midstates do not help any more.
func (f *fetcher) inSegments(ctx context.Context, file File, states *lanes.States) (err error) {
	segs, err := file.area.Segments(states)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, segs.Close()) }()
	have := segs.Have()
	if err := segs.Settle(ctx); err != nil {
		return ours(err)
	}
	if file.Damaged != "" {
		if err := f.adopt(ctx, segs, file); err != nil {
			return err
		}
	}
	d := &segmented{
		f: f, file: file, states: states, segs: segs, total: file.Size - segs.Have(),
		wrong: map[int]int{}, without: map[*source]bool{}, changed: make(chan struct{}),
	}
	for i := range states.Len() {
		idle := !segs.Passed(i)
		d.idle = append(d.idle, idle)
		if idle {
			d.left++
		}
	}
	f.watch.Planned(file.Name, d.total)
	if have > 0 {
		f.resumed.Add(have)
		f.note(file, "resumed at %d of %d bytes", have, file.Size)
	}
	if err := d.all(ctx); err != nil {
		return err
	}
	if err := segs.Finish(); err != nil {
		return ours(err)
	}
	f.area.KeepMidstates(states)
	f.watch.Done(file.Name, d.total)
	return nil
}

func (f *fetcher) adopt(ctx context.Context, segs *staging.Segments, file File) error {
	n, err := segs.Adopt(ctx, file.Damaged)
	if err != nil {
		return ours(err)
	}
	if f.adopted.Add(n); n > 0 {
		f.note(file, "%d of %d bytes of the damaged file are used", n, file.Size)
	}
	return nil
}

// all keeps requests going until every segment is there.
func (d *segmented) all(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for ctx.Err() == nil && d.more(ctx) {
		l, err := d.f.pool.take(ctx, d.fits)
		if err != nil {
			cancel(d.reason(err))
			break
		}
		first, n := d.pick(l.s)
		if n == 0 {
			l.end()
			continue
		}
		l.instead = func(s *source) bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return d.may(s, first)
		}
		d.runs(1)
		wg.Go(func() {
			defer d.runs(-1)
			if err := d.run(ctx, l, first, n); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// runs counts requests that begin or end.
func (d *segmented) runs(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running += n
	d.wake()
}

// more waits until there is a segment to ask for, and a connection that is this file's share. It says no when all are
// there, or ctx ends.
func (d *segmented) more(ctx context.Context) bool {
	for {
		share := d.f.share()
		d.mu.Lock()
		left, ready, changed := d.left, d.anyIdle() && d.running < share, d.changed
		d.mu.Unlock()
		if left == 0 || ready {
			return left > 0
		}
		if waitFor(ctx, changed, 0) != nil {
			return false
		}
	}
}

func (d *segmented) anyIdle() bool {
	for _, idle := range d.idle {
		if idle {
			return true
		}
	}
	return false
}

// reason says why no source is left.
func (d *segmented) reason(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, errNoSource) && d.cause != nil {
		return d.cause
	}
	return err
}

// fits says whether a source is to be asked for a segment that is idle. The pool is locked.
func (d *segmented) fits(s *source) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, idle := range d.idle {
		if idle && d.may(s, i) {
			return true
		}
	}
	return false
}

// may says whether a source is to be asked for segment i: the registry, if it sent wrong bytes once, only where no mirror
// is left. Both locks are held.
func (d *segmented) may(s *source, i int) bool {
	if d.without[s] || s.lacks[d.file.Digest] {
		return false
	}
	if s.mirror || d.wrong[i] == 0 {
		return true
	}
	for _, o := range d.f.pool.sources {
		if o.mirror && !o.out && !d.without[o] && !o.lacks[d.file.Digest] {
			return false
		}
	}
	return true
}

// pick takes the segments that the next request to a source shall ask for.
func (d *segmented) pick(s *source) (first, n int) {
	d.f.pool.mu.Lock()
	defer d.f.pool.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	idle := 0
	for _, is := range d.idle {
		if is {
			idle++
		}
	}
	most := max(1, min(maxRun, int(s.rate*perRequest.Seconds()/lanes.SegmentSize), idle/d.f.jobs))
	for first < len(d.idle) && !(d.idle[first] && d.may(s, first)) {
		first++
	}
	for i := first; i < len(d.idle) && n < most && d.idle[i] && d.may(s, i); i++ {
		spoilt := d.segs.Spoilt(i)
		if n > 0 && (spoilt || d.segs.Begun(i)) {
			break
		}
		d.idle[i] = false
		if n++; spoilt {
			break
		}
	}
	return first, n
}

// run is one request under way, for segments next to end-1 of a file.
type run struct {
	d         *segmented
	l         *lease
	next, end int
	seg       *staging.Segment // number next; nil: it was not begun
}

// run asks for n segments. An error ends the file.
func (d *segmented) run(ctx context.Context, l *lease, first, n int) error {
	defer l.end()
	r := &run{d: d, l: l, next: first, end: first + n}
	defer r.leave()
	if l.s.mirror {
		return r.mirrored(ctx, r.try(ctx))
	}
	err := l.s.Client.Retry(ctx, d.file.Name, func() error { return r.try(ctx) })
	switch {
	case err == nil, isOurs(ctx, err), denied(err), errors.Is(err, errInOrder):
		return err
	case errors.Is(err, client.ErrRangeIgnored), status(err, http.StatusRequestedRangeNotSatisfiable):
		d.f.note(d.file, "%s does not send this part; the file comes in order", l.s.Client.Host())
		return errInOrder
	}
	d.exclude(l.s, err)
	return nil
}

// mirrored takes an error of a mirror.
func (r *run) mirrored(ctx context.Context, err error) error {
	if err == nil || isOurs(ctx, err) {
		return err
	}
	if errors.Is(err, client.ErrRangeIgnored) {
		r.d.f.note(r.d.file, "mirror %s does not send parts", r.l.s.Client.Host())
		r.d.exclude(r.l.s, nil)
		return nil
	}
	r.d.f.blame(r.l.s, r.d.file, err)
	return nil
}

// exclude ends the use of a source for this file.
func (d *segmented) exclude(s *source, cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.without[s] = true
	if cause != nil {
		d.cause = cause
	}
}

// leave gives back what did not come.
func (r *run) leave() {
	if r.seg != nil && r.l.s.mirror {
		r.seg.Drop()
		r.d.count(-r.seg.Bytes())
	} else if r.seg != nil {
		r.seg.Keep()
	}
	d := r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := r.next; i < r.end; i++ {
		d.idle[i] = true
	}
	d.wake()
}

func (d *segmented) wake() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// try asks for what did not come yet, and takes it as far as it comes.
func (r *run) try(ctx context.Context) error {
	if err := r.begin(); err != nil {
		return err
	}
	d := r.d
	if d.segs.Spoilt(r.next) {
		return r.steps(ctx)
	}
	off, _ := r.seg.Offset()
	last, n := d.states.Range(r.end - 1)
	if off == last+n { // all of it was there
		return r.ended()
	}
	rc, err := d.f.open(ctx, r.l, d.file, off, last+n)
	if err != nil {
		return err
	}
	defer rc.Close()
	for r.next < r.end {
		if err := r.begin(); err != nil {
			return err
		}
		off, left := r.seg.Offset()
		if err := r.copy(rc, off+left); err != nil {
			return err
		}
		if err := r.ended(); err != nil {
			return err
		}
	}
	return nil
}

// steps asks for a segment, the only one of the run, a part at a time, until what came and what lies behind it lead to
// its edge.
func (r *run) steps(ctx context.Context) error {
	for off, end := r.step(); off < end; off, end = r.step() {
		if err := r.fetch(ctx, off, end); err != nil {
			return err
		}
		if right, err := r.right(); right || err != nil {
			return ours(err)
		}
	}
	return r.ended()
}

// step returns which part of a segment comes next; off = end: none.
func (r *run) step() (off, end int64) {
	off, left := r.seg.Offset()
	done := r.seg.Bytes()
	n := min(left, step-done%step)
	if n == left && n > lastStep {
		n -= lastStep
	}
	return off, off + n
}

// fetch takes a part of a segment, with one request.
func (r *run) fetch(ctx context.Context, off, end int64) error {
	rc, err := r.d.f.open(ctx, r.l, r.d.file, off, end)
	if err != nil {
		return err
	}
	defer rc.Close()
	return r.copy(rc, end)
}

// right ends a segment if what lies behind the bytes that came is right.
func (r *run) right() (bool, error) {
	d := r.d
	p := <-d.f.pieces
	n, err := r.seg.Spare(p.next())
	d.f.pieces <- p
	if n == 0 || err != nil {
		return false, err
	}
	d.f.adopted.Add(n)
	d.count(n)
	r.seg = nil
	r.next++
	r.l.useful()
	d.came()
	return true, nil
}

func (r *run) begin() (err error) {
	if r.seg == nil {
		r.seg, err = r.d.segs.Segment(r.next)
	}
	return ours(err)
}

// copy takes the bytes of a segment up to an end.
func (r *run) copy(rc io.Reader, end int64) error {
	p := <-r.d.f.pieces
	defer func() {
		r.seg.Flush()
		r.d.f.pieces <- p
	}()
	for {
		off, _ := r.seg.Offset()
		left := end - off
		if left == 0 {
			return nil
		}
		buf := p.next()
		n, err := fill(rc, buf[:min(int64(len(buf)), left)])
		w, werr := r.seg.Put(buf[:n])
		r.d.f.received.Add(int64(w))
		r.d.count(int64(w))
		if werr != nil {
			return ours(werr)
		}
		if err != nil && int64(n) < left {
			return short(off+int64(n), r.d.file.Size, err)
		}
	}
}

// short says how far a body came that ended too early.
func short(off, size int64, err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%d of %d bytes received: %w", off, size, err)
}

// ended takes the verdict on a segment of which all bytes came.
func (r *run) ended() error {
	seg, i := r.seg, r.next
	err := seg.End()
	if err != nil && !errors.Is(err, lanes.ErrMismatch) {
		return ours(err)
	}
	r.seg = nil
	r.next++
	d := r.d
	if err != nil {
		d.count(-seg.Bytes())
		return r.bad(i, seg.Fresh())
	}
	r.l.useful()
	d.came()
	return nil
}

// came counts a segment that passed.
func (d *segmented) came() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left--
	d.wake()
}

// bad gives a segment back that did not match, and blames who sent it, unless a part of it was there before.
func (r *run) bad(i int, blame bool) error {
	d, host := r.d, r.l.s.Client.Host()
	off, n := d.states.Range(i)
	d.mu.Lock()
	d.idle[i] = true
	if blame && !r.l.s.mirror && !r.l.s.Client.Doubt(d.file.Digest) {
		d.wrong[i]++
	}
	times := d.wrong[i]
	d.wake()
	d.mu.Unlock()
	what := fmt.Sprintf("segment %d, %d bytes at %d", i, n, off)
	switch {
	case !blame:
		d.f.note(d.file, "%s: what was here did not match; fetching it anew", what)
	case r.l.s.mirror:
		return fmt.Errorf("%s: %w the registry's midstates", what, errWrong)
	case times >= maxWrong:
		d.f.note(d.file, "%s, from %s did not match again; the file comes in order, and its digest decides", what, host)
		return errInOrder
	default:
		d.f.note(d.file, "%s, from %s did not match; fetching it anew", what, host)
	}
	return nil
}

// count adds bytes that came, or takes back those that did not match.
func (d *segmented) count(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.got += n
	if d.got > d.told {
		d.told = d.got
		d.f.watch.Moved(d.file.Name, d.told, d.total)
	}
}
