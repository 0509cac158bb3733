package lanes

import (
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity/lanes/block"
)

// Pool lets streams share cores that are written to by many goroutines: pieces that come while every core is busy are
// hashed together by the first goroutine that gets a core. Nothing waits for a piece that may come: there is no timer,
// and a stream whose pieces come alone is hashed by its own Write at once.
//
// The zero Pool is ready. Any number of goroutines may use one; a single stream is written to by one at a time.
type Pool struct {
	// Soon, if set, has the pieces of Feeds wait for others: it calls late in a goroutine of its own after some
	// milliseconds, unless stop is called before. It is set before the Pool is used.
	Soon func(late func()) (stop func() bool)

	mu      sync.Mutex
	last    io.Writer // the stream of the last piece that came
	feeds   int       // that are open
	waiting []*job
}

// job is a piece that waits for a core. Its fields but done are guarded by the Pool.
type job struct {
	Piece
	taken bool
	done  chan struct{} // closed after it was written
}

// Write writes b to a stream, which is one of those that a Piece names, and returns after that: b is the caller's
// again.
func (p *Pool) Write(to io.Writer, b []byte) {
	j := p.queue(to, b)
	if j == nil {
		to.Write(b)
		return
	}
	// Who is ready to run gets to queue its piece too. Where a core is free for everyone this returns at once.
	runtime.Gosched()
	batch := p.take(j)
	if batch == nil {
		<-j.done
		return
	}
	run(batch)
}

// run writes the pieces of jobs that were taken.
func run(batch []*job) {
	pieces := make([]Piece, len(batch))
	for i, j := range batch {
		pieces[i] = j.Piece
		defer close(j.done)
	}
	Write(pieces...)
}

// queue returns nil if the piece should be written at once, as no other stream is in the way of this one.
func (p *Pool) queue(to io.Writer, b []byte) *job {
	p.mu.Lock()
	defer p.mu.Unlock()
	alone := p.last == to || p.last == nil
	p.last = to
	if alone && len(p.waiting) == 0 || len(b) < worthwhile || kernel().Take(block.Most) <= 1 {
		return nil
	}
	return p.add(to, b)
}

// add has a piece wait. It is called with mu held, as taken is.
func (p *Pool) add(to io.Writer, b []byte) *job {
	j := &job{Piece: Piece{to, b}, done: make(chan struct{})}
	p.waiting = append(p.waiting, j)
	return j
}

// take returns as many jobs as are hashed at once, of which j is the last, or nil if another goroutine took j. What is
// left has goroutines of its own to take it, maybe on other cores.
func (p *Pool) take(j *job) []*job {
	p.mu.Lock()
	defer p.mu.Unlock()
	if j.taken {
		return nil
	}
	return p.taken(j)
}

func (p *Pool) taken(j *job) []*job {
	n := max(1, kernel().Take(len(p.waiting))) - 1
	p.waiting = slices.DeleteFunc(p.waiting, func(o *job) bool { return o == j })
	batch := append(slices.Clone(p.waiting[:n]), j)
	p.waiting = slices.Delete(p.waiting, 0, n)
	for _, j := range batch {
		j.taken = true
	}
	return batch
}
