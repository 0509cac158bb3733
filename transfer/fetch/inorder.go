package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	extent   = 64 << 20 // bytes of one request while there are enough files to keep every connection busy
	partSize = 3 << 20  // bytes of one of the parallel requests for one file
	window   = 4        // such requests for one file at a time
	parts    = 4        // over all files: 12 MiB of buffers, whatever the sizes

	maxPassed = 8 // times the size of a file that may come in vain from a server that sends no parts
)

// inOrder fetches one file from its start to its end, and once more if it does not match. begun: some of what is there
// came in this try.
func (f *fetcher) inOrder(ctx context.Context, file File, begun bool) (err error) {
	p, err := file.area.Partial(file.Digest, file.Size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	have := p.Offset() + p.Behind()
	f.watch.Planned(file.Name, file.Size-have)
	if have > 0 && !begun {
		f.resumed.Add(have)
		f.note(file, "resumed at %d of %d bytes", have, file.Size)
	}
	from := f.registry()
	if have == 0 {
		from = f.pool.best(file.Digest)
	}
	for again := false; ; {
		d := download{f: f, file: file, p: p, have: have - p.Behind(), total: file.Size - have, from: from}
		if err := d.all(ctx); err != nil {
			return err
		}
		got, err := p.Finish()
		if err != nil {
			return err
		}
		if got == file.Digest {
			f.watch.Done(file.Name, file.Size-have)
			return nil
		}
		if err := p.Reset(); err != nil {
			return err
		}
		mismatch := &MismatchError{file.Name, file.Size, file.Digest, got}
		switch {
		case from.mirror && (d.mixed || d.from == from):
			d.distrust(from, mismatch)
			from = f.registry()
		case again:
			return mismatch
		default:
			again, from = true, f.registry()
			from.Client.Doubt(file.Digest)
			f.watch.Noted(file.Name, mismatch.Error()+"; fetching it anew")
		}
	}
}

// download is one file on its way in, in order.
type download struct {
	f       *fetcher
	file    File
	p       *staging.Partial
	have    int64   // bytes before the offset that did not come now
	total   int64   // bytes that were missing at first
	from    *source // who is asked
	whole   bool    // the source does not send parts
	passed  int64   // bytes that came once more, as it does not
	refused bool    // the registry refused a range once, and the file was begun anew
	mixed   bool    // a part came from a mirror, the rest did not
}

// distrust blames a mirror for a file that did not match.
func (d *download) distrust(s *source, err error) {
	if !d.mixed {
		d.f.blame(s, d.file, err)
		return
	}
	d.f.note(d.file, "a part of it came from mirror %s: %v; fetching it anew", s.Client.Host(), err)
}

func (d *download) all(ctx context.Context) error {
	for {
		end, err := d.next()
		if err != nil || d.p.Offset() == d.file.Size {
			return err
		}
		switch n := d.width(end - d.p.Offset()); {
		case d.whole:
			err = d.retry(ctx, func() error { return d.skip(ctx) })
		case n > 1:
			err = d.window(ctx, end, n)
		default:
			err = d.retry(ctx, func() error { return d.stream(ctx, end) })
		}
		if err != nil {
			err = d.other(ctx, err)
		}
		if err != nil {
			return err
		}
	}
}

// next returns the end of the next request, after what is there already.
func (d *download) next() (end int64, err error) {
	off := d.p.Offset()
	end, err = d.p.Take()
	d.have += d.p.Offset() - off
	return min(end, d.p.Offset()+extent), ours(err)
}

// other looks for another way after an error, and returns it if there is none.
func (d *download) other(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, client.ErrRangeIgnored) && !d.whole:
		d.whole = true
		d.f.note(d.file, "the server does not send parts; reading it from the start and passing over what is here")
	case d.from.mirror && !isOurs(ctx, err):
		d.f.blame(d.from, d.file, err)
		d.from, d.mixed, d.whole = d.f.registry(), d.p.Offset() > 0, false
	case status(err, http.StatusRequestedRangeNotSatisfiable) && !d.refused && d.p.Offset() > 0:
		d.refused = true
		d.f.note(d.file, "the server refused the rest; fetching it anew")
		return d.p.Reset()
	default:
		return err
	}
	return nil
}

// width returns how many requests for n bytes of this file shall run at a time.
func (d *download) width(n int64) int {
	if d.from.mirror {
		return 1
	}
	idle := d.f.jobs / int(max(1, d.f.large.Load()))
	return min(window, idle, int((n+partSize-1)/partSize))
}

// retry calls fn until it succeeds, if it asks the registry. A mirror is asked once: there are others.
func (d *download) retry(ctx context.Context, fn func() error) error {
	if d.from.mirror {
		return fn()
	}
	return d.from.Client.Retry(ctx, d.file.Name, fn)
}

// blob opens a part with a connection of its own.
func (d *download) blob(ctx context.Context, off, end int64) (*body, error) {
	return d.open(ctx, func(s Source) (io.ReadCloser, error) {
		return s.Client.Blob(ctx, s.Repo, d.file.Digest, off, end-off, d.file.Size)
	})
}

// open asks who is asked, with a connection of its own. A mirror that rests is not waited for: errNoSource.
func (d *download) open(ctx context.Context, open func(Source) (io.ReadCloser, error)) (*body, error) {
	l, err := d.f.pool.take(ctx, func(s *source) bool {
		return s == d.from && !(s.mirror && s.rested.After(time.Now()))
	})
	if err != nil {
		return nil, err
	}
	l.instead = func(s *source) bool { return !s.mirror }
	r, err := d.f.read(ctx, l, open)
	if err != nil {
		l.end()
		return nil, err
	}
	return &body{r}, nil
}

// body is a reader that has a connection of its own.
type body struct{ *reader }

// Close gives the connection back.
func (b *body) Close() error {
	defer b.l.end()
	return b.reader.Close()
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
	if d.passed/maxPassed > d.file.Size {
		return fmt.Errorf("%s sends no parts, and broke off again and again: %d bytes of it came that were here before",
			d.from.Client.Host(), d.passed)
	}
	known := d.p.Offset()
	rc, err := d.open(ctx, func(s Source) (io.ReadCloser, error) {
		return s.Client.Whole(ctx, s.Repo, d.file.Digest, known, d.file.Size)
	})
	if err != nil {
		return err
	}
	defer rc.Close()
	n, err := io.CopyN(io.Discard, rc, known)
	d.passed += n
	if err != nil {
		return d.short(err)
	}
	return d.write(rc, d.file.Size)
}

// write takes a body up to the end of a part. What came before an error is kept.
func (d *download) write(r *body, end int64) error {
	p := <-d.f.pieces
	defer func() {
		d.p.Flush()
		d.f.pieces <- p
	}()
	for {
		buf := p.next()
		n, err := fill(r, buf)
		if werr := d.put(buf[:n]); werr != nil {
			return werr
		}
		switch {
		case err == io.EOF && d.p.Offset() == end:
			r.l.useful()
			return nil
		case err != nil:
			return d.short(err)
		}
	}
}

// short says how far a body came that ended too early.
func (d *download) short(err error) error { return short(d.p.Offset(), d.file.Size, err) }

func (d *download) put(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	n, err := d.p.Put(b)
	d.f.received.Add(int64(n))
	if done := d.p.Offset() - d.have; done > 0 {
		d.f.watch.Moved(d.file.Name, done, d.total)
	}
	return ours(err)
}

// part is one of several requests for a file that run at a time.
type part struct {
	buf  []byte // of partSize, from the fetcher
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
			to := min(end, next+partSize)
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

// buffer takes a buffer of one part. It waits for one only for the part that is next in order, so that files which hold
// buffers never wait for one another.
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
		buf = make([]byte, partSize)
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
			n, err := fill(rc, s.buf[s.got:to-from])
			if s.got += n; int64(s.got) < to-from {
				return short(from+int64(s.got), d.file.Size, err)
			}
			return nil
		})
	}()
	return s
}

// pieces takes the bytes of a part in the size that is cheapest to hash and write.
func (d *download) pieces(b []byte) error {
	defer d.p.Flush()
	for b := range slices.Chunk(b, durable.PieceSize) {
		if err := d.put(b); err != nil {
			return err
		}
	}
	return nil
}
