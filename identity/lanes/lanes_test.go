package lanes

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
)

// small is a segment for tests: not a power of two, so that edges and pieces don't fall together.
const small = 19 * 64

// sizes are those of blobs that lie differently to the edges of segments.
func sizes(segment int) []int {
	return []int{0, 1, 63, 64, segment - 1, segment, segment + 1, 5*segment + 12345, 8 * segment}
}

func random(seed uint64, n int) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	b := make([]byte, n)
	rand.NewChaCha8(key).Read(b)
	return b
}

// record returns the midstates of b as a Recorder notes them that gets pieces of the given size.
func record(t testing.TB, segment int64, b []byte, piece int) *States {
	t.Helper()
	r := NewRecorder(segment)
	for rest := b; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
		if n, err := r.Write(rest[:min(piece, len(rest))]); err != nil || n != min(piece, len(rest)) {
			t.Fatalf("write: %d, %v", n, err)
		}
	}
	first, noted := r.Take()
	if first != 1 {
		t.Fatalf("the first state is of edge %d", first)
	}
	s, err := New(segment, int64(len(b)), identity.DigestOf(r), noted[:Edges(int64(len(b)), segment)])
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// segmentOf returns the bytes of segment i.
func segmentOf(s *States, b []byte, i int) []byte {
	off, n := s.Range(i)
	return b[off : off+n]
}

// failing returns the segments that don't pass, each checked for itself, in random order.
func failing(s *States, b []byte) (bad []int) {
	for _, i := range rand.Perm(s.Len()) {
		if err := s.Verify(i, segmentOf(s, b, i)); errors.Is(err, ErrMismatch) {
			bad = append(bad, i)
		} else if err != nil {
			panic(err)
		}
	}
	slices.Sort(bad)
	return bad
}

// streamed returns the segments that a Stream names, given pieces of random sizes.
func streamed(s *States, b []byte) []int {
	t := s.Stream()
	for len(b) > 0 {
		n := min(len(b), 1+rand.IntN(3*int(s.Segment)))
		t.Write(b[:n])
		b = b[n:]
	}
	return t.End()
}

// TestWhole: right bytes pass, each segment for itself and as a stream, however they came in.
func TestWhole(t *testing.T) {
	for _, segment := range []int{64, small, 4096} {
		for _, n := range sizes(segment) {
			b := random(1, n)
			var first *States
			for _, piece := range []int{1, 63, 64, segment - 1, segment, segment + 1, 3*segment + 5, n + 1} {
				s := record(t, int64(segment), b, piece)
				if first == nil {
					first = s
				}
				if s.Digest != identity.Digest(sha256.Sum256(b)) || !slices.Equal(s.Edge, first.Edge) {
					t.Errorf("segment %d, %d bytes in pieces of %d: other midstates", segment, n, piece)
				}
			}
			if want := max(1, (n+segment-1)/segment); first.Len() != want {
				t.Errorf("segment %d, %d bytes: %d segments, want %d", segment, n, first.Len(), want)
			}
			if bad := failing(first, b); bad != nil {
				t.Errorf("segment %d, %d bytes: segments %v did not pass", segment, n, bad)
			}
			if bad := streamed(first, b); bad != nil {
				t.Errorf("segment %d, %d bytes: the stream names %v", segment, n, bad)
			}
		}
	}
}

// TestSegmentSize runs the real size of segments once.
func TestSegmentSize(t *testing.T) {
	for _, n := range []int{SegmentSize - 1, SegmentSize, SegmentSize + 1, 5*SegmentSize + 12345} {
		b := random(2, n)
		s := record(t, SegmentSize, b, 256<<10)
		form, err := s.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if s, err = Parse(form); err != nil {
			t.Fatal(err)
		}
		if bad := failing(s, b); bad != nil {
			t.Errorf("%d bytes: segments %v did not pass", n, bad)
		}
		at := rand.IntN(n)
		b[at] ^= 1
		if bad := streamed(s, b); !slices.Equal(bad, []int{at / SegmentSize}) {
			t.Errorf("%d bytes, flipped at %d: the stream names %v", n, at, bad)
		}
	}
}

// TestFlippedBit: one bit makes exactly its segment fail.
func TestFlippedBit(t *testing.T) {
	for _, n := range sizes(small) {
		b := random(3, n)
		s := record(t, small, b, 1000)
		for range min(50, n) {
			at := rand.IntN(n)
			b[at] ^= 1 << rand.IntN(8)
			want := []int{at / small}
			if bad := failing(s, b); !slices.Equal(bad, want) {
				t.Errorf("%d bytes, flipped at %d: segments %v failed, want %v", n, at, bad, want)
			}
			if bad := streamed(s, b); !slices.Equal(bad, want) {
				t.Errorf("%d bytes, flipped at %d: the stream names %v, want %v", n, at, bad, want)
			}
			b = random(3, n)
		}
	}
}

// TestSeveralDamaged: a stream names every damaged segment, also after the first.
func TestSeveralDamaged(t *testing.T) {
	b := random(4, 8*small+7)
	s := record(t, small, b, 1000)
	for _, i := range []int{1, 2, 5, 8} {
		b[i*small+3] ^= 0x10
	}
	if bad := streamed(s, b); !slices.Equal(bad, []int{1, 2, 5, 8}) {
		t.Errorf("the stream names %v", bad)
	}
}

// TestDamagedSoFar: a stream names a segment as soon as its last byte came.
func TestDamagedSoFar(t *testing.T) {
	b := random(4, 3*small)
	s := record(t, small, b, 1000)
	b[small] ^= 1
	stream := s.Stream()
	stream.Write(b[:2*small-1])
	if bad := stream.Damaged(); bad != nil {
		t.Errorf("%v before the segment came", bad)
	}
	stream.Write(b[2*small-1 : 2*small])
	if bad := stream.Damaged(); !slices.Equal(bad, []int{1}) {
		t.Errorf("%v when the segment came, want 1", bad)
	}
}

// TestWrongLength: bytes that are missing or too many don't pass, nor do those of a neighbour.
func TestWrongLength(t *testing.T) {
	for _, n := range sizes(small) {
		b := random(5, n)
		s := record(t, small, b, 1000)
		last := s.Len() - 1
		if bad := streamed(s, append(bytes.Clone(b), 0)); !slices.Equal(bad, []int{last}) {
			t.Errorf("%d bytes and one more: the stream names %v", n, bad)
		}
		for i := range s.Len() {
			seg := segmentOf(s, b, i)
			if err := s.Verify(i, append(bytes.Clone(seg), 0)); !errors.Is(err, ErrMismatch) {
				t.Errorf("%d bytes: segment %d with one byte more: %v", n, i, err)
			}
			if len(seg) == 0 {
				continue
			}
			if err := s.Verify(i, seg[:len(seg)-1]); !errors.Is(err, ErrMismatch) {
				t.Errorf("%d bytes: segment %d with one byte less: %v", n, i, err)
			}
			off, _ := s.Range(i)
			var want []int
			for j := i; j < s.Len(); j++ {
				want = append(want, j)
			}
			if bad := streamed(s, b[:int(off)+len(seg)-1]); !slices.Equal(bad, want) {
				t.Errorf("%d bytes, cut in segment %d: the stream names %v", n, i, bad)
			}
			if i > 0 && s.Verify(i, segmentOf(s, b, i-1)[:len(seg)]) == nil {
				t.Errorf("%d bytes: segment %d passes for segment %d", n, i-1, i)
			}
		}
	}
}

// TestForgedState: a wrong state is never accepted: the segments at both sides of it fail.
func TestForgedState(t *testing.T) {
	for _, n := range sizes(small) {
		b := random(6, n)
		s := record(t, small, b, 1000)
		for range 50 {
			if len(s.Edge) == 0 {
				break
			}
			k := rand.IntN(len(s.Edge))
			right := s.Edge[k]
			s.Edge[k][rand.IntN(32)] ^= 1 << rand.IntN(8)
			if bad := failing(s, b); !slices.Equal(bad, []int{k, k + 1}) {
				t.Errorf("%d bytes, state %d forged: segments %v failed", n, k, bad)
			}
			if bad := streamed(s, b); !slices.Equal(bad, []int{k, k + 1}) {
				t.Errorf("%d bytes, state %d forged: the stream names %v", n, k, bad)
			}
			s.Edge[k] = right
		}
	}
}

// TestSelfConsistentForgery: other bytes with their own midstates are refused at the digest.
func TestSelfConsistentForgery(t *testing.T) {
	for _, n := range sizes(small)[1:] {
		b := random(7, n)
		right := record(t, small, b, 1000)
		for range 20 {
			b[rand.IntN(n)] ^= 1
			forged := record(t, small, b, 1000)
			if forged.Digest = right.Digest; forged.Digest == identity.Sum(b) {
				continue // flipped back
			}
			if bad := failing(forged, b); !slices.Equal(bad, []int{forged.Len() - 1}) {
				t.Errorf("%d bytes: segments %v failed, want the last", n, bad)
			}
		}
	}
}

// TestAtOnce checks the segments of one blob in many goroutines.
func TestAtOnce(t *testing.T) {
	b := random(8, 40*small+1)
	s := record(t, small, b, 1000)
	b[17*small] ^= 1
	errs := make([]error, s.Len())
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = s.Verify(i, segmentOf(s, b, i)) })
	}
	wg.Wait()
	for i, err := range errs {
		if (i == 17) != errors.Is(err, ErrMismatch) {
			t.Errorf("segment %d: %v", i, err)
		}
	}
}

// TestResume: a recorder goes on from a saved state, its own or that of a plain hash of either implementation, and
// notes the edges after it.
func TestResume(t *testing.T) {
	b := random(9, 5*small+777)
	whole := record(t, small, b, 1000)
	for cut := 0; cut <= len(b); cut += 31 {
		mine := NewRecorder(small)
		mine.Write(b[:cut])
		first, before := mine.Take()
		for name, h := range map[string]identity.Hash{
			"a recorder": mine, "the plain hash": plain(b[:cut], identity.NewHash()),
			"the standard hash": plain(b[:cut], sha256.New().(identity.Hash)),
		} {
			saved, err := h.MarshalBinary()
			if err != nil {
				t.Fatal(err)
			}
			r := NewRecorder(small)
			r.Write(b[:3*small]) // of no account
			if err := r.UnmarshalBinary(saved); err != nil {
				t.Fatal(err)
			}
			r.Write(b[cut:])
			next, after := r.Take()
			if first != 1 || next != int64(len(before))+1 || identity.DigestOf(r) != whole.Digest {
				t.Fatalf("%s at %d: states from %d and %d, digest %s", name, cut, first, next, identity.DigestOf(r))
			}
			if !slices.Equal(slices.Concat(before, after), whole.Edge) {
				t.Fatalf("%s at %d: other midstates", name, cut)
			}
		}
	}
}

func plain(b []byte, h identity.Hash) identity.Hash {
	h.Write(b)
	return h
}

// TestBothHashes: the state is the same one in the standard library's hash and in the one that this project uses, and
// each goes on from it.
func TestBothHashes(t *testing.T) {
	b := random(10, 3*small+5)
	s := record(t, small, b, 100)
	ours := func() identity.Hash { return identity.NewHash() }
	std := func() identity.Hash { return sha256.New().(identity.Hash) }
	for i, make := range []func() identity.Hash{ours, std} {
		for k, state := range s.Edge {
			if got := stateOf(plain(b[:(k+1)*small], make())); got != state {
				t.Errorf("hash %d has another state at edge %d", i, k+1)
			}
			h := make()
			if err := setState(h, state, int64(k+1)*small); err != nil {
				t.Fatal(err)
			}
			h.Write(b[(k+1)*small:])
			if identity.DigestOf(h) != s.Digest {
				t.Errorf("hash %d does not go on from edge %d", i, k+1)
			}
		}
	}
	r := &Recorder{Hash: std(), segment: small, first: 1}
	r.Write(b)
	if _, noted := r.Take(); !slices.Equal(noted, s.Edge) {
		t.Error("a recorder of the standard hash notes other states")
	}
}

func TestReset(t *testing.T) {
	r := NewRecorder(small)
	r.Write(random(11, 2*small))
	r.Reset()
	b := random(12, 2*small+1)
	r.Write(b)
	first, noted := r.Take()
	want := record(t, small, b, 1000)
	if first != 1 || !slices.Equal(noted, want.Edge) || identity.DigestOf(r) != want.Digest {
		t.Error("a recorder that was reset notes something else")
	}
}

func TestRefusedStates(t *testing.T) {
	saved, err := identity.NewHash().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	negative := bytes.Clone(saved)
	negative[len(negative)-8] = 0x80
	for _, bad := range [][]byte{nil, saved[:50], negative, []byte("sha\x02")} {
		if err := NewRecorder(small).UnmarshalBinary(bad); err == nil {
			t.Errorf("restored a state of %d bytes", len(bad))
		}
	}
	for _, segment := range []int64{0, -64, 63, 65} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a recorder with segments of %d bytes", segment)
				}
			}()
			NewRecorder(segment)
		}()
	}
}

// BenchmarkRecorder compares hashing with and without a recorder; the difference is what recording costs.
func BenchmarkRecorder(b *testing.B) {
	piece := random(13, 256<<10)
	for name, h := range map[string]identity.Hash{"plain": identity.NewHash(), "recorder": NewRecorder(SegmentSize)} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(piece)))
			for b.Loop() {
				h.Write(piece)
			}
		})
	}
}

// BenchmarkStream is the check of a blob in order, in segments of the real size.
func BenchmarkStream(b *testing.B) {
	blob := random(14, 4*SegmentSize)
	s := record(b, SegmentSize, blob, 256<<10)
	b.SetBytes(int64(len(blob)))
	for b.Loop() {
		if bad := streamed(s, blob); bad != nil {
			b.Fatal(bad)
		}
	}
}

func ExampleStates_Verify() {
	blob := bytes.Repeat([]byte("weights "), 1000)
	r := NewRecorder(4096)
	r.Write(blob)
	_, noted := r.Take()
	s, err := New(4096, int64(len(blob)), identity.DigestOf(r), noted)
	if err != nil {
		panic(err)
	}
	blob[5000] ^= 1
	fmt.Println(s.Verify(0, blob[:4096]))
	fmt.Println(s.Verify(1, blob[4096:]))
	// Output:
	// <nil>
	// segment 1, 3904 bytes at 4096: bytes and midstates do not match
}

// TestClone: a check and its clone go on from the same place, each by itself.
func TestClone(t *testing.T) {
	b := random(1, 3*4096+7)
	s := record(t, 4096, b, 1000)
	for i := range s.Len() {
		part := segmentOf(s, b, i)
		for _, at := range []int{0, 1, len(part) / 2, len(part)} {
			c := s.Check(i)
			c.Write(part[:at])
			wrong, right := c.Clone(), c.Clone()
			right.Write(part[at:])
			rest := bytes.Clone(part[at:])
			if len(rest) > 0 {
				rest[0] ^= 1
			}
			wrong.Write(rest)
			if err := right.Err(); err != nil {
				t.Errorf("segment %d, cloned at %d: %v", i, at, err)
			}
			if at < len(part) && wrong.Err() == nil {
				t.Errorf("segment %d, cloned at %d: damaged bytes passed", i, at)
			}
			c.Write(part[at:])
			if err := c.Err(); err != nil {
				t.Errorf("segment %d after its clones: %v", i, err)
			}
		}
	}
}
