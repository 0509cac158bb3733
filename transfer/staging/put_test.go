package staging

import (
	"errors"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// taker takes the next bytes of a stream, as Partial and Segment do.
type taker interface {
	Put(b []byte) (int, error)
	Flush()
}

// putAll puts b out of two buffers, each of which is written to again as soon as that is allowed.
func putAll(to taker, r *rand.Rand, b []byte) error {
	var bufs [2][]byte
	for i := 0; len(b) > 0; i ^= 1 {
		n := min(len(b), 1+r.IntN(durable.PieceSize))
		bufs[i] = append(bufs[i][:0], b[:n]...)
		if _, err := to.Put(bufs[i]); err != nil {
			return err
		}
		clear(bufs[i^1])
		if r.IntN(16) == 0 {
			to.Flush()
			clear(bufs[i])
		}
		b = b[n:]
	}
	to.Flush()
	return nil
}

// TestPut: streams that are put at the same time have their own bytes hashed, whoever hashes them.
func TestPut(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	whole := random(3*seg + 1000)
	files := map[string][]byte{"x": whole, "p": random(5_000_003), "q": random(4_000_001)}
	if err := a.Begin(recordOf(files)); err != nil {
		t.Fatal(err)
	}
	segs := segments(t, a, midstates(t, whole))
	var wg sync.WaitGroup
	for i := range segs.states.Len() {
		wg.Go(func() {
			g, err := segs.Segment(i)
			if err != nil {
				t.Error(err)
				return
			}
			off, n := g.Offset()
			if err := errors.Join(putAll(g, rand.New(rand.NewPCG(1, uint64(i))), whole[off:off+n]), g.End()); err != nil {
				t.Errorf("segment %d: %v", i, err)
			}
		})
	}
	for i, name := range []string{"p", "q"} {
		wg.Go(func() {
			b := files[name]
			p, err := a.Partial(identity.Sum(b), int64(len(b)))
			if err != nil {
				t.Error(err)
				return
			}
			err = putAll(p, rand.New(rand.NewPCG(2, uint64(i))), b)
			got, ferr := p.Finish()
			if err := errors.Join(err, ferr, p.Close()); err != nil || got != identity.Sum(b) {
				t.Errorf("%s: %s, %v", name, got, err)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(segs.Finish(), segs.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Publish(recordOf(files), false); err != nil {
		t.Error(err)
	}
}

// TestPutIsKept: what was put and not flushed is there for whoever continues it.
func TestPutIsKept(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	b := random(1_000_000)
	if err := a.Begin(recordOf(map[string][]byte{"x": b})); err != nil {
		t.Fatal(err)
	}
	other, err := a.Partial(identity.Sum(nil), 10)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Put([]byte{1}); err != nil { // so that pieces are put off
		t.Fatal(err)
	}
	for to := 400_000; to < len(b); to += 300_000 {
		p, err := a.Partial(identity.Sum(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Put(b[p.Offset():to]); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	p, err := a.Partial(identity.Sum(b), int64(len(b)))
	if err != nil || p.Offset() != 700_000 {
		t.Fatalf("at %d, %v", p.Offset(), err)
	}
	if _, err := p.Write(b[p.Offset():]); err != nil {
		t.Fatal(err)
	}
	if got, err := p.Finish(); err != nil || got != identity.Sum(b) {
		t.Errorf("%s, %v", got, err)
	}
	if err := errors.Join(p.Close(), other.Close()); err != nil {
		t.Error(err)
	}
}
