// Package hashing reads files, or parts of them, once and in order, and hashes several of them at a time on each core.
//
// Each core has one goroutine, which reads a piece of each of a few streams and hashes these pieces together. After each
// round the streams are shared out anew, so no core is idle while another has two of them. What the page cache lacks
// is read past it, in larger pieces, where the filesystem can: that costs less and leaves the cache to others.
package hashing

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// Part is what is read of a file, and what hashes it.
type Part struct {
	File *os.File
	Off  int64
	End  int64     // negative: the end of the file
	To   io.Writer // as in lanes.Piece
}

// ErrNothing, which Open may return, says that a stream has nothing to read.
var ErrNothing = errors.New("there is nothing to read")

// Job is one stream. Its methods are called one after the other, from any goroutine.
type Job interface {
	// Open is called when the turn of the stream comes. After an error nothing else is called. It ends Run, but for
	// ErrNothing.
	Open() (Part, error)

	// Moved says how many bytes of the part have been hashed.
	Moved(n int64)

	// Close is called after the last byte with nil, or with the reason why there are no more. A file that ends before
	// the part does is no reason. What it returns ends Run.
	Close(err error) error
}

// Options says how to work. The zero value is ready to use.
type Options struct {
	Cores   int        // that hash at a time; zero: all
	Streams func() int // how many a core has at a time, at most; nil: as many as are of use. It may be asked at any time
}

// Run works on jobs, those first that come first, and returns when all that were opened are closed. The first error of a
// job, or the cause of the end of ctx, ends it early. Its memory is 4 MiB a core.
func Run[J Job](ctx context.Context, jobs []J, o Options) error {
	if len(jobs) == 0 {
		return nil
	}
	c := newCrew(ctx, len(jobs), o)
	c.fresh = func() Job {
		j := jobs[0]
		jobs = jobs[1:]
		return j
	}
	var wg sync.WaitGroup
	for range c.cores {
		wg.Go(c.work)
	}
	wg.Wait()
	return c.failed
}

// crew is one Run under way.
type crew struct {
	ctx     context.Context
	cores   int
	streams func() int // of a core, at most

	mu      sync.Mutex // guards the rest
	changed *sync.Cond
	waiting int        // jobs that were not begun
	fresh   func() Job // takes the next of them
	open    int        // streams that were begun and are not at their end
	ready   []*stream  // those of them that no core has in hand
	failed  error
}

func newCrew(ctx context.Context, jobs int, o Options) *crew {
	c := &crew{ctx: ctx, cores: o.Cores, streams: o.Streams, waiting: jobs}
	if c.cores <= 0 {
		c.cores = runtime.GOMAXPROCS(0)
	}
	if c.streams == nil {
		c.streams = lanes.Width
	}
	c.cores = min(c.cores, jobs)
	c.changed = sync.NewCond(&c.mu)
	return c
}

// work is what each core does.
func (c *crew) work() {
	var b buffers
	defer b.free()
	for mine := c.turn(nil); len(mine) > 0; mine = c.turn(mine) {
		if err := b.split(len(mine)); err != nil {
			c.fail(err)
		} else {
			round(mine, &b)
		}
	}
}

// turn takes back what a core had and returns its share of the streams that there are, and nothing when all is done or
// failed. Others are woken only where something is left for them: a last stream stays with its core.
func (c *crew) turn(had []*stream) []*stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.give(had)
	for {
		if err := context.Cause(c.ctx); err != nil && c.failed == nil {
			c.failed = err
		}
		if c.failed != nil {
			c.stop()
			return nil
		}
		if mine := c.share(); len(mine) > 0 || c.open == 0 {
			if len(c.ready) > 0 || c.waiting > 0 || c.open == 0 {
				c.changed.Broadcast()
			}
			return mine
		}
		c.changed.Wait()
	}
}

// share takes an equal part of all streams for one core: of those that are open first, which were long without one.
func (c *crew) share() []*stream {
	most := max(1, min(c.streams(), lanes.Width()))
	begin := max(0, min(c.waiting, c.cores*most-c.open))
	n := min((c.open+begin+c.cores-1)/c.cores, most)
	have := min(n, len(c.ready))
	mine := append(make([]*stream, 0, n), c.ready[:have]...)
	c.ready = c.ready[have:]
	for range min(n-have, begin) {
		mine = append(mine, &stream{job: c.fresh()})
		c.waiting--
		c.open++
	}
	return mine
}

// stop closes what is open and in nobody's hands.
func (c *crew) stop() {
	for _, s := range c.ready {
		s.end(c.failed)
	}
	c.open -= len(c.ready)
	c.ready, c.waiting = nil, 0
	c.changed.Broadcast()
}

func (c *crew) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed == nil {
		c.failed = err
	}
}

// give returns the streams that a core had.
func (c *crew) give(had []*stream) {
	for _, s := range had {
		if s.job != nil {
			c.ready = append(c.ready, s)
			continue
		}
		c.open--
		if c.failed == nil {
			c.failed = s.err
		}
	}
}

// round takes each stream a piece further. What is read past the page cache is asked for at once: nobody reads ahead.
func round(mine []*stream, b *buffers) {
	pieces := make([]lanes.Piece, 0, len(mine))
	var reads sync.WaitGroup
	for i, s := range mine {
		if s.past == nil {
			s.next(b.of[i])
		} else {
			reads.Go(func() { s.next(b.of[i]) })
		}
	}
	reads.Wait()
	for _, s := range mine {
		if len(s.piece) > 0 {
			pieces = append(pieces, lanes.Piece{To: s.To, Data: s.piece})
		}
	}
	lanes.Write(pieces...)
	for _, s := range mine {
		if len(s.piece) > 0 {
			s.job.Moved(s.Off - s.from)
		}
		if s.err != nil {
			s.end(s.err)
		}
	}
}
