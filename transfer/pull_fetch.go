package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	extent   = 64 << 20 // bytes of one request while there are enough files to keep every worker busy
	segment  = 4 << 20  // bytes of one of the parallel requests for one file
	window   = 4        // such requests for one file at a time: 16 MiB in order
	segments = 6        // over all files: 24 MiB of buffers, whatever the sizes
)

// MismatchError: the bytes of a file do not hash to the digest that the artifact states.
type MismatchError struct {
	Name      string
	Size      int64
	Want, Got identity.Digest
}

// Error names the file, its size and both digests.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s: digest mismatch: want %s, got %s (%d bytes)", e.Name, e.Want, e.Got, e.Size)
}

// Is makes it a client.ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == client.ErrMismatch }

// FetchError says which files of an artifact were not received. The others are kept, verified, for the next try.
type FetchError struct {
	Failed []FailedFile
	Total  int // files of the artifact
}

// FailedFile is a file that was not received.
type FailedFile struct {
	Name string
	Err  error
}

// maxNamed bounds the files that a FetchError names.
const maxNamed = 5

// Error names the files with their reasons.
func (e *FetchError) Error() string {
	s := fmt.Sprintf("%d of %d files not received: ", len(e.Failed), e.Total)
	var text []string
	for i, f := range e.Failed {
		if i == maxNamed {
			text = append(text, fmt.Sprintf("and %d more", len(e.Failed)-i))
			break
		}
		text = append(text, f.Name+": "+strings.TrimPrefix(f.Err.Error(), f.Name+": "))
	}
	return s + strings.Join(text, "; ")
}

// Unwrap returns the reasons.
func (e *FetchError) Unwrap() (errs []error) {
	for _, f := range e.Failed {
		errs = append(errs, f.Err)
	}
	return errs
}

// errGaveUp: the file was not tried, or not to the end, as the server or the disk failed for another one.
var errGaveUp = errors.New("gave up after the failure of another file")

// fetcher downloads the files of one artifact into an area.
type fetcher struct {
	c     *client.Client
	repo  string
	area  *staging.Area
	jobs  int
	watch Watch

	large    atomic.Int64 // files of more than one segment that are not done
	buffers  chan []byte  // of one segment each
	received atomic.Int64
	resumed  atomic.Int64

	mu     sync.Mutex // guards failed
	failed []FailedFile
}

// fetch downloads files, of which no two have the same digest. One that fails does not end the others, unless the reason
// will meet them as well. If ctx ends, the error is its cause.
func (f *fetcher) fetch(ctx context.Context, files []staging.File) error {
	f.buffers = make(chan []byte, segments)
	for range segments {
		f.buffers <- nil
	}
	for _, file := range files {
		f.count(file, 1)
	}
	files = slices.Clone(files)
	slices.SortStableFunc(files, func(a, b staging.File) int { return cmp.Compare(b.Size, a.Size) })
	caller := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var g errgroup.Group
	g.SetLimit(f.jobs)
	for _, file := range files {
		g.Go(func() error {
			defer f.count(file, -1)
			err := context.Cause(ctx)
			if err == nil {
				err = f.file(ctx, file)
			}
			if errors.Is(err, context.Canceled) {
				err = context.Cause(ctx)
			}
			if err != nil {
				f.fail(file, err)
			}
			if meetsAll(err) {
				cancel(errGaveUp)
			}
			return nil
		})
	}
	_ = g.Wait() // the reasons are in failed
	switch {
	case len(f.failed) == 0:
		return nil
	case caller.Err() != nil:
		return context.Cause(caller)
	}
	slices.SortFunc(f.failed, func(a, b FailedFile) int {
		return cmp.Or(cmp.Compare(rank(a.Err), rank(b.Err)), cmp.Compare(a.Name, b.Name))
	})
	return &FetchError{Failed: f.failed}
}

// rank puts what went wrong before what was only not tried.
func rank(err error) int {
	if errors.Is(err, errGaveUp) {
		return 1
	}
	return 0
}

func (f *fetcher) count(file staging.File, n int64) {
	if file.Size > segment {
		f.large.Add(n)
	}
}

func (f *fetcher) fail(file staging.File, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = append(f.failed, FailedFile{file.Name, err})
}

// meetsAll says whether an error is not about one file: the server failed after all tries, access is denied, the disk
// does not take any more, the area is lost.
func meetsAll(err error) bool {
	var s *client.StatusError
	if errors.As(err, &s) && (s.Status == http.StatusUnauthorized || s.Status == http.StatusForbidden) {
		return true
	}
	var no syscall.Errno
	return client.Temporary(err) || errors.Is(err, staging.ErrLost) || errors.As(err, &no)
}

// file downloads one file, and once more from the start if it does not match.
func (f *fetcher) file(ctx context.Context, file staging.File) (err error) {
	p, err := f.area.Partial(file.Digest, file.Size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	have := p.Offset()
	f.watch.tell(Event{Step: Planned, Phase: PhaseDownload, File: file.Name, Total: file.Size - have})
	if have > 0 {
		f.resumed.Add(have)
		note := fmt.Sprintf("%s: resumed at %d of %d bytes", file.Name, have, file.Size)
		f.watch.tell(Event{Step: Noted, File: file.Name, Note: note})
	}
	for again := false; ; again = true {
		d := download{f: f, file: file, p: p, have: have}
		if err := d.all(ctx); err != nil {
			return err
		}
		got, err := p.Finish()
		if err != nil {
			return err
		}
		if got == file.Digest {
			f.watch.tell(Event{
				Step: Done, Phase: PhaseDownload, File: file.Name, Bytes: file.Size - have, Total: file.Size - have,
			})
			return nil
		}
		if err := p.Reset(); err != nil {
			return err
		}
		mismatch := &MismatchError{file.Name, file.Size, file.Digest, got}
		if again {
			return mismatch
		}
		f.watch.tell(Event{Step: Noted, File: file.Name, Note: mismatch.Error() + "; fetching it anew"})
	}
}

// download is one file on its way in.
type download struct {
	f       *fetcher
	file    staging.File
	p       *staging.Partial
	have    int64 // bytes that were there at first
	whole   bool  // the server does not send parts
	refused bool  // the server refused a range once, and the file was begun anew
}

func (d *download) all(ctx context.Context) error {
	for d.p.Offset() < d.file.Size {
		end := min(d.file.Size, d.p.Offset()+extent)
		var err error
		switch n := d.width(end - d.p.Offset()); {
		case d.whole:
			err = d.retry(ctx, func() error { return d.skip(ctx) })
		case n > 1:
			err = d.window(ctx, end, n)
		default:
			err = d.retry(ctx, func() error { return d.stream(ctx, end) })
		}
		var s *client.StatusError
		switch {
		case err == nil:
		case errors.Is(err, client.ErrRangeIgnored) && !d.whole:
			d.whole = true
			d.note("the server does not send parts; reading it from the start and passing over what is here")
		case errors.As(err, &s) && s.Status == http.StatusRequestedRangeNotSatisfiable && !d.refused && d.p.Offset() > 0:
			d.refused = true
			d.note("the server refused the rest; fetching it anew")
			if err := d.p.Reset(); err != nil {
				return err
			}
		default:
			return err
		}
	}
	return nil
}

// width returns how many requests for n bytes of this file shall run at a time.
func (d *download) width(n int64) int {
	idle := d.f.jobs / int(max(1, d.f.large.Load()))
	return min(window, idle, int((n+segment-1)/segment))
}

func (d *download) retry(ctx context.Context, fn func() error) error {
	return d.f.c.Retry(ctx, d.file.Name, fn)
}

func (d *download) note(text string) {
	d.f.watch.tell(Event{Step: Noted, File: d.file.Name, Note: d.file.Name + ": " + text})
}

func (d *download) blob(ctx context.Context, off, end int64) (io.ReadCloser, error) {
	return d.f.c.Blob(ctx, d.f.repo, d.file.Digest, off, end-off, d.file.Size)
}

// stream reads one part with one request.
func (d *download) stream(ctx context.Context, end int64) error {
	rc, err := d.blob(ctx, d.p.Offset(), end)
	if err != nil {
		return err
	}
	defer rc.Close()
	return d.write(rc, end)
}

// skip reads the whole file and passes over what is there already.
func (d *download) skip(ctx context.Context) error {
	rc, err := d.blob(ctx, 0, d.file.Size)
	if err != nil {
		return err
	}
	defer rc.Close()
	if _, err := io.CopyN(io.Discard, rc, d.p.Offset()); err != nil {
		return d.short(err)
	}
	return d.write(rc, d.file.Size)
}

type piece [durable.PieceSize]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

// write takes a body up to the end of a part. What came before an error is kept.
func (d *download) write(r io.Reader, end int64) error {
	buf := pieces.Get().(*piece)
	defer pieces.Put(buf)
	for {
		n, err := fill(r, buf[:])
		if werr := d.put(buf[:n]); werr != nil {
			return werr
		}
		switch {
		case err == io.EOF && d.p.Offset() == end:
			return nil
		case err != nil:
			return d.short(err)
		}
	}
}

// fill is io.ReadFull, but does not replace the error of the reader.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
	}
	return n, err
}

// short says how far a body came that ended too early.
func (d *download) short(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%d of %d bytes received: %w", d.p.Offset(), d.file.Size, err)
}

func (d *download) put(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	n, err := d.p.Write(b)
	d.f.received.Add(int64(n))
	if done := d.p.Offset() - d.have; done > 0 {
		d.f.watch.tell(Event{Step: Moved, Phase: PhaseDownload, File: d.file.Name, Bytes: done, Total: d.file.Size - d.have})
	}
	return err
}

// part is one of several requests for a file that run at a time.
type part struct {
	buf  []byte // of one segment, from the fetcher
	got  int
	err  error
	done chan struct{}
}

// window reads up to end with several requests at a time and takes their bytes in order.
func (d *download) window(ctx context.Context, end int64, width int) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var queue []*part
	defer func() {
		cancel()
		for _, s := range queue {
			<-s.done
			d.f.buffers <- s.buf
		}
	}()
	for next := d.p.Offset(); d.p.Offset() < end; {
		for next < end && len(queue) < width {
			buf, ok := d.f.buffer(ctx, len(queue) == 0)
			if !ok {
				break
			}
			to := min(end, next+segment)
			queue = append(queue, d.start(ctx, buf, next, to))
			next = to
		}
		if len(queue) == 0 {
			return context.Cause(ctx)
		}
		head := queue[0]
		<-head.done
		if err := errors.Join(d.pieces(head.buf[:head.got]), head.err); err != nil {
			return err
		}
		d.f.buffers <- head.buf
		queue = queue[1:]
	}
	return nil
}

// buffer takes a buffer of one segment. It waits for one only for the part that is next in order, so that files which
// hold buffers never wait for one another.
func (f *fetcher) buffer(ctx context.Context, wait bool) (buf []byte, ok bool) {
	select {
	case buf = <-f.buffers:
	default:
		if !wait {
			return nil, false
		}
		select {
		case buf = <-f.buffers:
		case <-ctx.Done():
			return nil, false
		}
	}
	if buf == nil {
		buf = make([]byte, segment)
	}
	return buf, true
}

func (d *download) start(ctx context.Context, buf []byte, from, to int64) *part {
	s := &part{buf: buf, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.err = d.retry(ctx, func() error {
			rc, err := d.blob(ctx, from+int64(s.got), to)
			if err != nil {
				return err
			}
			defer rc.Close()
			n, err := io.ReadFull(rc, s.buf[s.got:to-from])
			if s.got += n; err != nil {
				return d.short(err)
			}
			return nil
		})
	}()
	return s
}

// pieces takes the bytes of a part in the size that is cheapest to hash and write.
func (d *download) pieces(b []byte) error {
	for b := range slices.Chunk(b, durable.PieceSize) {
		if err := d.put(b); err != nil {
			return err
		}
	}
	return nil
}
