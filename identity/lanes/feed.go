package lanes

import (
	"io"

	"github.com/kiln-registry/kiln-registry/identity/lanes/block"
)

// Feed is the place of a stream in a Pool whose writer need not know at once that a piece was hashed. While other Feeds
// are open, a piece is put off until there are as many as one kernel call takes, or until the next one of its own
// stream is there; then it waits for the others, but not longer than Pool.Soon says, and where that was in vain, less
// and less often. The stream of the only Feed of a Pool is written to at once, by its own Write, and never waits.
//
// A Feed is not safe for concurrent use; those of one Pool may be used at the same time.
type Feed struct {
	p   *Pool
	to  io.Writer
	put *job // the last piece, if it was put off

	skip int // so many pieces to come don't wait
	vain int // what skip was made after the last piece that waited in vain
}

// maxSkip is how many pieces in a row don't wait at most.
const maxSkip = 15

// Feed opens a place for a stream, which is one of those that a Piece names. Until Close or Flush the stream belongs to
// the Feed.
func (p *Pool) Feed(to io.Writer) *Feed {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.feeds++
	return &Feed{p: p, to: to}
}

// Write takes the next piece of the stream. If it returns true the piece is put off, and b must be left as it is until
// the next Write, Flush or Close returns.
func (f *Feed) Write(b []byte) (put bool) {
	if f.put == nil || !f.waits() || !f.wait() {
		f.Flush()
	}
	j, batch := f.p.offer(f.to, b)
	if j == nil {
		f.to.Write(b)
		return false
	}
	if batch != nil {
		run(batch)
		return false
	}
	f.put = j
	return true
}

// Flush returns when everything that was written to the Feed is written to the stream. It waits for no other piece.
func (f *Feed) Flush() {
	j := f.put
	if j == nil {
		return
	}
	f.put = nil
	if batch := f.p.take(j); batch != nil {
		run(batch)
		return
	}
	<-j.done
}

// Close is Flush, and gives up the place. The Feed can't be used afterwards. The pieces that are put off are hashed by
// it, if they are all that are to be had now.
func (f *Feed) Close() {
	f.Flush()
	if batch := f.p.leave(); batch != nil {
		run(batch)
	}
}

// waits says whether the last piece is to wait for others.
func (f *Feed) waits() bool {
	if f.p.Soon == nil || f.p.full() {
		return false
	}
	if f.skip > 0 {
		f.skip--
		return false
	}
	return true
}

// wait returns true once the piece that was put off was hashed with others, and false if that takes too long.
func (f *Feed) wait() bool {
	late := make(chan struct{})
	stop := f.p.Soon(func() { close(late) })
	select {
	case <-f.put.done:
		stop()
		f.put, f.vain = nil, 0
		return true
	case <-late:
		f.vain = min(2*f.vain+1, maxSkip)
		f.skip = f.vain
		return false
	}
}

// leave counts a Feed less, and returns the jobs that are to be run as no more can be expected.
func (p *Pool) leave() []*job {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.feeds--
	if n := len(p.waiting); n > 0 && n >= enough(kernel(), p.feeds) {
		return p.taken(p.waiting[n-1])
	}
	return nil
}

// full says whether as many pieces wait as one kernel call takes.
func (p *Pool) full() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting) >= enough(kernel(), p.feeds)
}

// offer returns no job if the piece is to be written at once, and the jobs that are to be run now if there are enough of
// them.
func (p *Pool) offer(to io.Writer, b []byte) (j *job, batch []*job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := kernel()
	if p.feeds == 1 && len(p.waiting) == 0 || len(b) < worthwhile || k.Take(block.Most) <= 1 {
		return nil, nil
	}
	j = p.add(to, b)
	if len(p.waiting) >= enough(k, p.feeds) {
		batch = p.taken(j)
	}
	return j, batch
}

// enough returns how many pieces one kernel call takes at most, where there are so many streams.
func enough(k block.Kernel, streams int) int {
	most := 1
	for n := 2; n <= min(streams, block.Most); n++ {
		most = max(most, k.Take(n))
	}
	return most
}
