package lanes

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// TestFeedLone: the stream of the only Feed is written to at once, by its own Write.
func TestFeedLone(t *testing.T) {
	withEach(t, func(t *testing.T) {
		p := Pool{Soon: func(func()) func() bool { t.Error("it waits"); return func() bool { return true } }}
		other := p.Feed(identity.NewHash())
		other.Write(make([]byte, 1<<20))
		other.Close()
		lone := &counted{Hash: identity.NewHash()}
		f := p.Feed(lone)
		defer f.Close()
		for i := range 4 {
			if f.Write(make([]byte, 1<<20)) || lone.written != (i+1)<<20 {
				t.Fatalf("piece %d was put off: %d bytes are written", i, lone.written)
			}
		}
	})
}

// TestFeedShares: what is put off is hashed with the piece that makes a batch whole.
func TestFeedShares(t *testing.T) {
	if Width() == 1 {
		t.Log("streams don't share a core with this kernel")
		return
	}
	var p Pool
	var streams [4]counted
	var feeds [4]*Feed
	for i := range streams {
		streams[i].Hash = identity.NewHash()
		feeds[i] = p.Feed(&streams[i])
	}
	piece := make([]byte, 64<<10)
	for i := range feeds {
		if last := i == len(feeds)-1; feeds[i].Write(piece) == last {
			t.Errorf("piece %d: put off: %v", i, !last)
		}
	}
	for i := range streams {
		if streams[i].written > 0 {
			t.Errorf("%d bytes of stream %d went through its own Write", streams[i].written, i)
		}
		if err := hashed(&streams[i], piece); err != nil {
			t.Errorf("stream %d: %v", i, err)
		}
	}
}

// TestFeedEnds: a piece that was put off is hashed by Flush, and when the others have left.
func TestFeedEnds(t *testing.T) {
	if kernel().Take(2) == 1 {
		t.Log("two streams don't share a core with this kernel")
		return
	}
	var p Pool
	stream := &counted{Hash: identity.NewHash()}
	f, other := p.Feed(stream), p.Feed(identity.NewHash())
	piece := make([]byte, 64<<10)
	f.Write(piece)
	f.Flush()
	if stream.written != len(piece) {
		t.Errorf("%d bytes after Flush", stream.written)
	}
	f.Write(piece)
	other.Close()
	if stream.written != 2*len(piece) {
		t.Errorf("%d bytes after the other one has left", stream.written)
	}
	f.Close()
	if err := hashed(stream, make([]byte, 2*len(piece))); err != nil {
		t.Error(err)
	}
}

// TestFeeds: many goroutines, each with streams of its own, some of which end early.
func TestFeeds(t *testing.T) {
	withEach(t, func(t *testing.T) {
		p := Pool{Soon: func(late func()) func() bool { return time.AfterFunc(time.Millisecond, late).Stop }}
		var wg sync.WaitGroup
		for g := range 8 * runtime.GOMAXPROCS(0) {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(g), 4))
				for _, kind := range kinds {
					b := random(r.Uint64(), r.IntN(300_000))
					to, end := open(t, kind, b)
					feedAll(p.Feed(to), r, b)
					if err := end(); err != nil {
						t.Errorf("goroutine %d, a %s of %d bytes: %v", g, kind, len(b), err)
					}
				}
			})
		}
		wg.Wait()
		if p.feeds != 0 || len(p.waiting) > 0 {
			t.Errorf("%d feeds and %d pieces are left", p.feeds, len(p.waiting))
		}
	})
}

// feedAll writes b in pieces, out of two buffers.
func feedAll(f *Feed, r *rand.Rand, b []byte) {
	var buf, put []byte
	for len(b) > 0 {
		n := min(len(b), 1+r.IntN(64<<10))
		buf = append(buf[:0], b[:n]...)
		if held := f.Write(buf); held {
			buf, put = put, buf
		} else {
			clear(put) // it is the caller's again, as buf is
			clear(buf)
		}
		if r.IntN(16) == 0 {
			f.Flush()
			clear(put)
		}
		b = b[n:]
	}
	f.Close()
	clear(slices.Clip(put))
}
