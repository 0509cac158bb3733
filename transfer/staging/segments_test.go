package staging

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const seg = lanes.SegmentSize

// midstates returns those of b.
func midstates(t *testing.T, b []byte) *lanes.States {
	t.Helper()
	r := lanes.NewRecorder(seg)
	r.Write(b)
	_, noted := r.Take()
	s, err := lanes.New(seg, int64(len(b)), identity.DigestOf(r), noted[:lanes.Edges(int64(len(b)), seg)])
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func segments(t *testing.T, a *Area, s *lanes.States) *Segments {
	t.Helper()
	f, err := a.Segments(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// give writes n bytes of segment i of b, in pieces, from where it was left; n of -1: to its end, which must pass.
func give(t *testing.T, f *Segments, b []byte, i, n int) {
	t.Helper()
	g, err := f.Segment(i)
	if err != nil {
		t.Fatal(err)
	}
	off, left := g.Offset()
	if n < 0 {
		n = int(left)
	}
	for p := range slices.Chunk(b[off:int(off)+n], durable.PieceSize) {
		if _, err := g.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if int64(n) < left {
		g.Keep()
	} else if err := g.End(); err != nil {
		t.Fatal(err)
	}
}

func finish(t *testing.T, a *Area, f *Segments, b []byte) {
	t.Helper()
	if err := errors.Join(f.Finish(), f.Close()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(a.part(identity.Sum(b)))
	if err != nil || !bytes.Equal(got, b) {
		t.Fatalf("not the bytes that were written, %v", err)
	}
	if _, err := a.Publish(recordOf(map[string][]byte{"x": b}), false); err != nil {
		t.Fatal(err)
	}
}

// TestSegmentsResume: segments that passed are kept; after a restart of the machine those that were synced.
func TestSegmentsResume(t *testing.T) {
	b := random(6*seg + 1000)
	for name, tt := range map[string]struct {
		boot string
		kill bool
		want int64 // bytes that are there
	}{
		"closed":                    {"one", false, 5*seg + 9<<20},
		"killed":                    {"one", true, 5*seg + 8<<20},
		"killed, machine restarted": {"two", true, 4 * seg},
		"closed, machine restarted": {"two", false, 4 * seg},
	} {
		t.Run(name, func(t *testing.T) {
			target := filepath.Join(t.TempDir(), "m")
			a := open(t, target, Options{Disk: durable.Disk{Boot: "one"}})
			states := midstates(t, b)
			f := segments(t, a, states)
			for _, i := range []int{5, 2, 0, 3} {
				give(t, f, b, i, -1)
			}
			if err := f.wait(); err != nil { // the background sync of the four
				t.Fatal(err)
			}
			give(t, f, b, 1, -1)
			give(t, f, b, 4, 9<<20)
			var err error
			if tt.kill {
				err = f.close()
			} else {
				err = f.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			closeArea(t, a)
			a = open(t, target, Options{Disk: durable.Disk{Boot: tt.boot}})
			defer closeArea(t, a)
			f = segments(t, a, states)
			if f.Have() != tt.want {
				t.Errorf("%d bytes are there, want %d", f.Have(), tt.want)
			}
			for i := range states.Len() {
				if !f.Passed(i) {
					give(t, f, b, i, -1)
				}
			}
			finish(t, a, f, b)
		})
	}
}

// TestSegmentsDistrust: what could have changed since is not taken for passed.
func TestSegmentsDistrust(t *testing.T) {
	b := random(2*seg + 7)
	for name, damage := range map[string]func(part string) error{
		"cut short":       func(part string) error { return os.Truncate(part, 100) },
		"longer":          func(part string) error { return os.Truncate(part, 3*seg) },
		"second name":     func(part string) error { return os.Link(part, part+"x") },
		"gone":            os.Remove,
		"symbolic link":   func(part string) error { return errors.Join(os.Rename(part, part+"x"), os.Symlink(part+"x", part)) },
		"record cut":      func(part string) error { return os.Truncate(part+stateSuffix, 700) },
		"record nonsense": func(part string) error { return os.WriteFile(part+stateSuffix, make([]byte, 4000), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
			defer closeArea(t, a)
			states := midstates(t, b)
			f := segments(t, a, states)
			give(t, f, b, 1, -1)
			give(t, f, b, 0, 100)
			if err := errors.Join(f.Close(), damage(a.part(states.Digest))); err != nil {
				t.Fatal(err)
			}
			f = segments(t, a, states)
			if f.Have() != 0 {
				t.Errorf("%d bytes are taken for there", f.Have())
			}
			for i := range states.Len() {
				give(t, f, b, i, -1)
			}
			finish(t, a, f, b)
		})
	}
}

// TestSegmentsBad: a segment that does not match is written again, and nothing is published before.
func TestSegmentsBad(t *testing.T) {
	b := random(2*seg + 7)
	a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
	defer closeArea(t, a)
	f := segments(t, a, midstates(t, b))
	bad := bytes.Clone(b)
	bad[seg+5] ^= 1
	give(t, f, b, 0, -1)
	give(t, f, b, 2, -1)
	g, err := f.Segment(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Write(bad[seg : 2*seg]); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Write([]byte{0}); err == nil {
		t.Error("a byte of the next segment was taken")
	}
	if err := g.End(); !errors.Is(err, lanes.ErrMismatch) {
		t.Errorf("got %v", err)
	}
	if err := f.Finish(); !errors.Is(err, ErrUnverified) {
		t.Errorf("finished: %v", err)
	}
	if _, err := a.Publish(recordOf(map[string][]byte{"x": b}), false); !errors.Is(err, ErrUnverified) {
		t.Errorf("published: %v", err)
	}
	if _, err := f.Segment(0); err == nil {
		t.Error("a segment that passed is open to writers")
	}
	give(t, f, b, 1, -1)
	finish(t, a, f, b)
}

// TestOtherMidstates: segments that passed against other midstates are hashed again, and those that match stay.
func TestOtherMidstates(t *testing.T) {
	b := random(3*seg + 7)
	other := bytes.Clone(b)
	other[seg+5] ^= 1
	a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
	defer closeArea(t, a)
	states := midstates(t, b)
	forged := midstates(t, other)
	forged.Digest = states.Digest
	f := segments(t, a, forged)
	for i := range 3 {
		give(t, f, other, i, -1)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f = segments(t, a, states)
	if err := f.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !f.Passed(0) || f.Passed(1) || !f.Passed(2) {
		t.Error("want exactly the segment to go that holds other bytes")
	}
	if f.Have() != 2*seg {
		t.Errorf("%d bytes are there", f.Have())
	}
	for i := range 4 {
		if !f.Passed(i) {
			give(t, f, b, i, -1)
		}
	}
	finish(t, a, f, b)
}

// TestOrderAndSegments: a file that came in order is continued in segments, and the other way round; what was kept in
// one way is never believed after bytes came in the other.
func TestOrderAndSegments(t *testing.T) {
	b := random(6 * seg)
	d := identity.Sum(b)
	states := midstates(t, b)
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{Disk: durable.Disk{Boot: "one"}})
	p, err := a.Partial(d, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	write := func(to int) {
		t.Helper()
		for p.Offset() < int64(to) {
			if _, err := p.Write(b[p.Offset():min(int64(to), p.Offset()+durable.PieceSize)]); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(4*seg + 1000) // with a point that is synced
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	f := segments(t, a, states)
	if f.Have() != 4*seg+1000 {
		t.Errorf("%d bytes are there", f.Have())
	}
	if err := f.Settle(t.Context()); err != nil || !f.Passed(3) || f.Passed(4) {
		t.Fatalf("settle: %v", err)
	}
	give(t, f, b, 5, -1)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if r := bestPoint(a.part(d), int64(len(b)), "two"); r.Offset != 0 {
		t.Errorf("the point at %d is still there", r.Offset)
	}
	if p, err = a.Partial(d, int64(len(b))); err != nil {
		t.Fatal(err)
	}
	if p.Offset() != 4*seg {
		t.Errorf("in order from %d", p.Offset())
	}
	for _, boot := range []string{"one", "two"} {
		if r := bestSegments(a.part(d), int64(len(b)), boot); r.Size != 0 {
			t.Errorf("the segments are still there: %d bytes", r.have())
		}
	}
	write(len(b))
	if got, err := p.Finish(); got != d || err != nil {
		t.Fatal(got, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	closeArea(t, a)
}

// TestAdoptSegments: of a damaged file the segments that match are copied; it is not changed.
func TestAdoptSegments(t *testing.T) {
	b := random(5*seg + 7)
	damaged := bytes.Clone(b)
	damaged[2*seg+77] ^= 1
	dir := t.TempDir()
	path := filepath.Join(dir, "damaged")
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	a := open(t, filepath.Join(dir, "m"), Options{})
	defer closeArea(t, a)
	f := segments(t, a, midstates(t, b))
	n, err := f.Adopt(t.Context(), path)
	if err != nil || n != int64(len(b))-seg {
		t.Errorf("%d bytes of %d adopted, %v", n, len(b), err)
	}
	short := filepath.Join(dir, "short")
	if err := os.WriteFile(short, b[:seg], 0o644); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Adopt(t.Context(), short); n != 0 || err != nil {
		t.Errorf("%d bytes of a short file, %v", n, err)
	}
	give(t, f, b, 2, -1)
	finish(t, a, f, b)
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, damaged) {
		t.Errorf("the damaged file was changed, %v", err)
	}
}

// adopt offers the file at path to an area that wants b.
func adopt(t *testing.T, a *Area, path string, b []byte) (bool, error) {
	t.Helper()
	ok, err := a.Adopt(t.Context(), []Found{{File{Name: "x", Size: int64(len(b)), Digest: identity.Sum(b)}, path}}, nil)
	return err == nil && ok[0], err
}

// TestAdoptByMidstates: those beside the target let the segments of a file be hashed side by side, and nothing else.
func TestAdoptByMidstates(t *testing.T) {
	b := random(3*seg + 7)
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	right := midstates(t, b)
	wrong := *right
	wrong.Edge = slices.Clone(right.Edge)
	wrong.Edge[1][0] ^= 1
	for i, c := range []struct {
		states *lanes.States
		flip   int // byte that is damaged; negative: none
		want   bool
	}{{right, -1, true}, {right, 2 * seg, false}, {&wrong, -1, false}, {nil, -1, true}, {nil, 0, false}} {
		there := bytes.Clone(b)
		if c.flip >= 0 {
			there[c.flip] ^= 1
		}
		if err := os.WriteFile(path, there, 0o644); err != nil {
			t.Fatal(err)
		}
		a := open(t, filepath.Join(dir, "m"), Options{})
		if err := os.RemoveAll(filepath.Join(a.dir, statesName)); err != nil {
			t.Fatal(err)
		}
		if c.states != nil {
			a.KeepMidstates(c.states)
		}
		if got, err := adopt(t, a, path, b); got != c.want || err != nil {
			t.Errorf("case %d: %t, %v", i, got, err)
		}
		if left, err := filepath.Glob(filepath.Join(a.dir, partsPrefix+"*", "*")); err != nil || (len(left) == 1) != c.want {
			t.Errorf("case %d: %q are left", i, left)
		}
		if err := a.drop(a.part(right.Digest)); err != nil {
			t.Fatal(err)
		}
		closeArea(t, a)
	}
}

// TestSyncFails: after a sync that failed nothing is taken for there that counted on it.
func TestSyncFails(t *testing.T) {
	b := random(6 * seg)
	states := midstates(t, b)
	target := filepath.Join(t.TempDir(), "m")
	failing := errors.New("the disk is sick")
	a := open(t, target, Options{})
	a.disk.Fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSync && path == a.part(states.Digest) {
			return failing
		}
		return do()
	}
	f := segments(t, a, states)
	for i := range 4 {
		give(t, f, b, i, -1)
	}
	if err := f.Close(); !errors.Is(err, failing) {
		t.Errorf("got %v", err)
	}
	small := b[:1000]
	a.disk.Fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSync && path == a.part(identity.Sum(small)) {
			return failing
		}
		return do()
	}
	p, err := a.Partial(identity.Sum(small), 1000)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Write(small); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Finish(); !errors.Is(err, failing) {
		t.Errorf("got %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	closeArea(t, a)
	a = open(t, target, Options{})
	defer closeArea(t, a)
	if p, err = a.Partial(identity.Sum(small), 1000); err != nil || p.Offset() != 0 {
		t.Errorf("in order: continues after a sync that failed, %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if f = segments(t, a, states); f.Have() != 0 {
		t.Errorf("%d bytes are taken for there", f.Have())
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestSegmentFaults fails each change of the disk once, lost or persisted. What a later pull makes of what was left is
// whole and right, and nothing was published before.
func TestSegmentFaults(t *testing.T) {
	b := random(4*seg + 7)
	states := midstates(t, b)
	failing := errors.New("the disk is sick")
	// run takes the segments in a given order, as far as it comes, and counts the changes that may fail.
	run := func(target string, fail int, persisted bool) (ops int, err error) {
		var mu sync.Mutex
		writes := 0
		disk := durable.Disk{Fault: func(op durable.Op, path string, do func() error) error {
			mu.Lock()
			if op == durable.OpWrite && path == filepath.Join(filepath.Dir(path), states.Digest.Hex()) {
				writes++
			}
			skip := writes%200 != 1 && op == durable.OpWrite // most pieces are alike
			if !skip {
				ops++
			}
			hit := !skip && ops == fail
			mu.Unlock()
			switch {
			case (op == durable.OpSync || op == durable.OpSyncDir) && !hit:
				return nil // the power does not fail here
			case !hit:
				return do()
			case persisted:
				return errors.Join(do(), failing)
			}
			return failing
		}}
		a, err := Open(t.Context(), target, Options{Disk: disk})
		if err != nil {
			return ops, err
		}
		defer func() { err = errors.Join(err, a.Close()) }()
		if err := a.Begin(recordOf(map[string][]byte{"x": b})); err != nil {
			return ops, err
		}
		f, err := a.Segments(states)
		if err != nil {
			return ops, err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		for _, i := range []int{4, 1, 0, 3, 2} {
			if f.Passed(i) {
				continue
			}
			g, err := f.Segment(i)
			if err != nil {
				return ops, err
			}
			off, left := g.Offset()
			for p := range slices.Chunk(b[off:off+left], durable.PieceSize) {
				if _, err := g.Write(p); err != nil {
					return ops, err
				}
			}
			if err := g.End(); err != nil {
				return ops, err
			}
		}
		if err := f.Finish(); err != nil {
			return ops, err
		}
		_, err = a.Publish(recordOf(map[string][]byte{"x": b}), false)
		return ops, err
	}
	all, err := run(filepath.Join(t.TempDir(), "m"), -1, false)
	if err != nil || all < 10 {
		t.Fatalf("%d changes, %v", all, err)
	}
	for fail := 1; fail <= all; fail++ {
		for _, persisted := range []bool{false, true} {
			dir := t.TempDir()
			target := filepath.Join(dir, "m")
			_, failed := run(target, fail, persisted)
			if _, err := os.Lstat(target); err == nil {
				holds(t, target, map[string][]byte{"x": b})
			}
			if failed == nil {
				continue
			}
			if _, err := os.Lstat(target); err != nil {
				if _, err := run(target, -1, false); err != nil {
					t.Fatalf("change %d, persisted %v: afterwards: %v", fail, persisted, err)
				}
				holds(t, target, map[string][]byte{"x": b})
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}
	}
}
