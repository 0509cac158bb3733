// Package fetch brings files, named by their digests, from a registry and mirrors of it into a staging area: over as
// many connections as bring more, from whoever is fastest, and never believed before they are hashed.
//
// Where the registry has the midstates of a file, it comes in segments, in any order and from several sources at once.
// Each is checked as it is written; one that does not match costs that segment, and tells who sent it. One that is
// damaged on the disk comes from its start, in steps, up to where the rest that lies there is right. Midstates are asked
// of the registry alone, and decide nothing: where they do not fit what comes, the file comes in order, and its digest
// has the last word. A file without midstates comes in order, from one source.
package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// Source is a place that has files by digest.
type Source struct {
	Client *client.Client
	Repo   string
}

// Options says how to fetch.
type Options struct {
	Jobs    int      // files and connections at a time, at most
	Rate    int64    // bytes a second over all connections, at most; zero: no bound
	Mirrors []Source // what they send is checked as everything is; they are asked for nothing but bytes of files
	Watch   Watch
}

// Watch is told how files come in, from several goroutines at a time, as often as once per piece. It must not block for
// long.
type Watch interface {
	Planned(file string, total int64)     // so many bytes of a file are missing
	Moved(file string, done, total int64) // of those; done never falls
	Done(file string, total int64)
	Noted(file, note string) // for people; file is empty where the note is about a source
}

// File is one to fetch.
type File struct {
	staging.File
	Damaged string // path of a file whose right segments are used; empty: there is none
	// Place, if set, is called when the turn of the file comes, and calls fetch with the area that it shall go to: again,
	// if it likes, after an error, or not at all, if it has the file. Nil: the area of the others.
	Place func(ctx context.Context, fetch func(area *staging.Area) error) error

	area *staging.Area
}

// Result says where the bytes came from.
type Result struct {
	Received int64 // from sources, also those that did not match
	Resumed  int64 // from an earlier try
	Adopted  int64 // from damaged files
}

// fetcher fetches the files of one artifact into an area.
type fetcher struct {
	area  *staging.Area
	pool  *pool
	limit *limiter
	jobs  int
	watch Watch

	large    atomic.Int64 // files of more than one part that are not done
	pieces   chan *pair   // one for every connection
	buffers  chan []byte  // of one part each
	received atomic.Int64
	resumed  atomic.Int64
	adopted  atomic.Int64

	mu     sync.Mutex // guards failed
	failed []FailedFile
}

// Files fetches files, of which no two have the same digest, into an area that can then publish them. One that fails
// does not end the others, unless the reason will meet them as well. The error is an *Error; if ctx ends, it is its
// cause.
func Files(ctx context.Context, area *staging.Area, registry Source, files []File, o Options) (Result, error) {
	f := &fetcher{
		area: area, pool: newPool(registry, o.Mirrors, o.Jobs), limit: newLimiter(o.Rate), jobs: o.Jobs, watch: o.Watch,
		pieces: make(chan *pair, o.Jobs), buffers: make(chan []byte, parts),
	}
	for b := range slices.Chunk(lanes.Buffers(2*o.Jobs, durable.PieceSize), 2) {
		f.pieces <- (*pair)(b)
	}
	for range parts {
		f.buffers <- nil
	}
	err := f.fetch(ctx, files)
	return Result{f.received.Load(), f.resumed.Load(), f.adopted.Load()}, err
}

func (f *fetcher) fetch(ctx context.Context, files []File) error {
	for _, file := range files {
		f.count(file, 1)
	}
	files = slices.Clone(files)
	slices.SortStableFunc(files, func(a, b File) int { return cmp.Compare(b.Size, a.Size) })
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
				err = f.place(ctx, file)
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
	return &Error{Failed: f.failed, Total: len(files)}
}

func (f *fetcher) count(file File, n int64) {
	if file.Size > partSize {
		f.large.Add(n)
	}
}

func (f *fetcher) fail(file File, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = append(f.failed, FailedFile{file.Name, err})
}

func (f *fetcher) note(file File, format string, args ...any) {
	f.watch.Noted(file.Name, file.Name+": "+fmt.Sprintf(format, args...))
}

// place fetches one file into the area where it shall be.
func (f *fetcher) place(ctx context.Context, file File) error {
	fetch := func(area *staging.Area) error {
		file.area = area
		return f.file(ctx, file)
	}
	if file.Place == nil {
		return fetch(f.area)
	}
	return file.Place(ctx, fetch)
}

// file fetches one file: in segments if that can be, else in order.
func (f *fetcher) file(ctx context.Context, file File) error {
	states := f.midstates(ctx, file)
	if states != nil {
		if err := f.inSegments(ctx, file, states); !errors.Is(err, errInOrder) {
			return err
		}
	}
	return f.inOrder(ctx, file, states != nil)
}

// midstates asks the registry for those of a file. Nil: it has none, or none that fit.
func (f *fetcher) midstates(ctx context.Context, file File) *lanes.States {
	if file.Size <= 2*lanes.SegmentSize { // none are recorded
		return nil
	}
	c := f.registry().Client
	var form []byte
	err := c.Once(ctx, func() (err error) {
		form, err = c.Midstates(ctx, file.Digest, lanes.FormSize(file.Size))
		return err
	})
	if err != nil {
		if !errors.Is(err, api.ErrMidstatesUnknown) && !status(err, http.StatusNotFound) && ctx.Err() == nil {
			f.note(file, "its midstates can't be had, and it comes in order: %v", err)
		}
		return nil
	}
	states, err := lanes.Parse(form)
	if err == nil && (states.Digest != file.Digest || states.Size != file.Size) {
		err = fmt.Errorf("they are those of %s, %d bytes", states.Digest, states.Size)
	}
	if err != nil {
		f.note(file, "its midstates from %s are none, and it comes in order: %v", c.Host(), err)
		return nil
	}
	return states
}

// share returns how many connections one large file may have, at least one: while there are others they are better used
// there, as writes to one file wait for one another.
func (f *fetcher) share() int {
	files := max(1, int(f.large.Load()))
	return max(1, (f.pool.room()+files-1)/files)
}

func (f *fetcher) registry() *source { return f.pool.sources[0] }

// open asks the source of a lease for a part of a file. The lease stays the caller's.
func (f *fetcher) open(ctx context.Context, l *lease, file File, off, end int64) (*reader, error) {
	return f.read(ctx, l, func(s Source) (io.ReadCloser, error) {
		return s.Client.Blob(ctx, s.Repo, file.Digest, off, end-off, file.Size)
	})
}

// read opens something of the source of a lease.
func (f *fetcher) read(ctx context.Context, l *lease, open func(Source) (io.ReadCloser, error)) (*reader, error) {
	rc, err := open(l.s.Source)
	if err != nil {
		if overload(err) {
			l.back()
		}
		return nil, err
	}
	return &reader{ReadCloser: rc, ctx: ctx, f: f, l: l}, nil
}

// blame draws the consequences of what a mirror did instead of sending bytes of a file.
func (f *fetcher) blame(s *source, file File, err error) {
	host := s.Client.Host()
	switch {
	case errors.Is(err, errSlow):
		f.note(file, "mirror %s: %v; it is asked for less", host, err)
	case errors.Is(err, errCrawl):
		f.note(file, "mirror %s: %v; another source is tried", host, err)
	case errors.Is(err, errNoSource): // it was blamed already
	case status(err, http.StatusNotFound):
		if f.pool.lack(s, file.Digest) {
			f.note(file, "mirror %s does not have it", host)
		}
	case client.Temporary(err):
		switch rest, last := f.pool.fault(s, asked(err)); {
		case last && asked(err) > maxRest:
			f.note(file, "mirror %s is not asked any more, as it wants to rest for %s: %v", host, asked(err), err)
		case last:
			f.note(file, "mirror %s is not asked any more: %v", host, err)
		case rest > 0:
			f.note(file, "mirror %s: %v; it rests for %s", host, err, rest)
		}
	default:
		if f.pool.drop(s) {
			f.note(file, "mirror %s is not asked any more: %v", host, err)
		}
	}
}

const perRequest = 2 * time.Second // of bytes, at the rate of the source: one request is neither too short nor too long
