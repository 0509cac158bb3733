package staging

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// TestSpoilt: of a damaged segment only what was written is recorded as there, and the rest is right once the damage is
// written over. What an earlier pull had of it stays.
func TestSpoilt(t *testing.T) {
	b := random(4*seg + 7)
	damaged := bytes.Clone(b)
	damaged[2*seg+10<<20] ^= 1 // behind what is there already
	damaged[3*seg+77] ^= 1     // within it
	dir := t.TempDir()
	path := filepath.Join(dir, "damaged")
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	a := open(t, filepath.Join(dir, "m"), Options{})
	defer closeArea(t, a)
	f := segments(t, a, midstates(t, b))
	give(t, f, b, 2, 9<<20)
	give(t, f, b, 3, 1<<20)
	n, err := f.Adopt(t.Context(), path)
	if err != nil || n != 2*seg+7+15<<20 || f.Have() != 3*seg+7+9<<20 {
		t.Errorf("%d bytes of %d adopted, %d there, %v", n, len(b), f.Have(), err)
	}
	for i, want := range []bool{false, false, true, false, false} {
		if f.Spoilt(i) != want || f.Passed(i) == want {
			t.Errorf("segment %d: spoilt %t, passed %t", i, f.Spoilt(i), f.Passed(i))
		}
	}
	if err := f.close(); err != nil { // as if killed
		t.Fatal(err)
	}
	f = segments(t, a, midstates(t, b))
	if f.Have() != 3*seg+7+9<<20 || f.Spoilt(2) {
		t.Errorf("%d bytes are there after a kill", f.Have())
	}
	if n, err := f.Adopt(t.Context(), path); n != 0 || err != nil {
		t.Errorf("%d bytes adopted again, %v", n, err)
	}
	g, err := f.Segment(2)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1000)
	for i, c := range []struct{ to, spare int64 }{{10 << 20, 0}, {10<<20 + 1, 6<<20 - 1}} {
		off, _ := g.Offset()
		if _, err := g.Write(b[off : 2*seg+c.to]); err != nil {
			t.Fatal(err)
		}
		if n, err := g.Spare(buf); n != c.spare || err != nil {
			t.Errorf("step %d: %d bytes are spared, %v", i, n, err)
		}
	}
	if f.Spoilt(2) || !f.Passed(2) {
		t.Error("the segment did not pass")
	}
	finish(t, a, f, b)
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, damaged) {
		t.Errorf("the damaged file was changed, %v", err)
	}
}

// TestAdoptFails: of a damaged file that could not be read or written to its end nothing is recorded that is not right.
func TestAdoptFails(t *testing.T) {
	b := random(3*seg + 7)
	damaged := bytes.Clone(b)
	damaged[seg] ^= 1
	dir := t.TempDir()
	path := filepath.Join(dir, "damaged")
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	a := open(t, filepath.Join(dir, "m"), Options{})
	defer closeArea(t, a)
	states := midstates(t, b)
	part := a.part(states.Digest)
	other := bytes.Clone(b)
	other[2*seg+5] ^= 1
	forged := midstates(t, other)
	forged.Digest = states.Digest
	failing := errors.New("the disk is sick")
	var writes, fail atomic.Int64
	a.disk.Fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpWrite && path == part && writes.Add(1) == fail.Load() {
			return failing
		}
		return do()
	}
	for _, n := range []int64{1, 40, 130, 170} { // of the pieces, 64 in a segment
		fail.Store(0)
		f := segments(t, a, forged)
		give(t, f, other, 2, -1) // taken for passed, until the states are others
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		f = segments(t, a, states)
		if err := f.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		writes.Store(0)
		fail.Store(n)
		if _, err := f.Adopt(t.Context(), path); !errors.Is(err, failing) {
			t.Errorf("write %d: %v", n, err)
		}
		if err := f.close(); err != nil { // as if killed
			t.Fatal(err)
		}
		f = segments(t, a, states)
		for i := range states.Len() {
			if f.Begun(i) {
				t.Errorf("write %d: a part of segment %d is recorded as there", n, i)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if err := a.drop(part); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBehind: what passed in segments is not written again in order, wherever it lies, and the digest has the last
// word.
func TestBehind(t *testing.T) {
	b := random(6*seg + 7)
	d := identity.Sum(b)
	states := midstates(t, b)
	for name, tt := range map[string]struct {
		there []int
		flip  int    // byte that is damaged afterwards; negative: none
		spans []span // that are to be written
	}{
		"some":           {[]int{0, 1, 3, 6}, -1, []span{{2 * seg, 3 * seg}, {4 * seg, 6 * seg}}},
		"not the first":  {[]int{1, 2, 5}, -1, []span{{0, seg}, {3 * seg, 5 * seg}, {6 * seg, 6*seg + 7}}},
		"all but one":    {[]int{0, 1, 2, 3, 4, 6}, -1, []span{{5 * seg, 6 * seg}}},
		"none":           {nil, -1, []span{{0, 6*seg + 7}}},
		"one is damaged": {[]int{0, 3}, 3*seg + 5, []span{{seg, 3 * seg}, {4 * seg, 6*seg + 7}}},
	} {
		t.Run(name, func(t *testing.T) {
			a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
			defer closeArea(t, a)
			f := segments(t, a, states)
			for _, i := range tt.there {
				give(t, f, b, i, -1)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if tt.flip >= 0 {
				flip(t, a.part(d), int64(tt.flip))
			}
			p, err := a.Partial(d, int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			missing := int64(0)
			for _, s := range tt.spans {
				missing += s.end - s.off
			}
			if got := int64(len(b)) - p.Offset() - p.Behind(); got != missing {
				t.Errorf("%d bytes are missing, want %d", got, missing)
			}
			wrote := inOrder(t, p, b, len(tt.spans))
			if !slices.Equal(wrote, tt.spans) {
				t.Errorf("written: %v, want %v", wrote, tt.spans)
			}
			got, err := p.Finish()
			if err != nil || (got == d) != (tt.flip < 0) {
				t.Fatalf("%s, %v", got, err)
			}
			if got != d {
				if err := p.Reset(); err != nil || p.Offset() != 0 || p.Behind() != 0 {
					t.Fatalf("%d and %d bytes are there after a reset, %v", p.Offset(), p.Behind(), err)
				}
				inOrder(t, p, b, 1)
				if got, err = p.Finish(); got != d || err != nil {
					t.Fatalf("%s, %v", got, err)
				}
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Publish(recordOf(map[string][]byte{"x": b}), false); err != nil {
				t.Fatal(err)
			}
			holds(t, a.target, map[string][]byte{"x": b})
		})
	}
}

// inOrder writes what is missing of b, at most so many parts, and returns them.
func inOrder(t *testing.T, p *Partial, b []byte, most int) (wrote []span) {
	t.Helper()
	for {
		end, err := p.Take()
		if err != nil {
			t.Fatal(err)
		}
		if p.Offset() == int64(len(b)) || len(wrote) == most {
			return wrote
		}
		wrote = append(wrote, span{p.Offset(), end})
		for part := range slices.Chunk(b[p.Offset():end], durable.PieceSize) {
			if _, err := p.Write(part); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var c [1]byte
	if _, err := f.ReadAt(c[:], at); err != nil {
		t.Fatal(err)
	}
	c[0] ^= 1
	if _, err := f.WriteAt(c[:], at); err != nil {
		t.Fatal(err)
	}
}

// TestBehindKill: whoever continues what came in order behind some segments has what was before the last offset that
// was saved, and nothing else.
func TestBehindKill(t *testing.T) {
	b := random(5*seg + 7)
	d := identity.Sum(b)
	a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
	defer closeArea(t, a)
	f := segments(t, a, midstates(t, b))
	for _, i := range []int{0, 2, 4} {
		give(t, f, b, i, -1)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	p, err := a.Partial(d, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if wrote := inOrder(t, p, b, 1); !slices.Equal(wrote, []span{{seg, 2 * seg}}) || p.Offset() != 3*seg {
		t.Errorf("written: %v, at %d", wrote, p.Offset())
	}
	if err := p.close(); err != nil { // as if killed
		t.Fatal(err)
	}
	p, err = a.Partial(d, int64(len(b)))
	if err != nil || p.Offset() != 2*seg || p.Behind() != 0 {
		t.Errorf("continued at %d, %d bytes behind it, %v", p.Offset(), p.Behind(), err)
	}
	inOrder(t, p, b, 1)
	if got, err := p.Finish(); got != d || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}
