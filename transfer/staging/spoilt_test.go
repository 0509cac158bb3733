package staging

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

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
