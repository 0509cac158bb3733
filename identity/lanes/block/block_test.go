package block

import (
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// start is the state before any byte: FIPS 180-4, 5.3.3.
var start = State{
	0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
}

// library takes a state through b by crypto/sha256.
func library(t testing.TB, s State, b []byte) State {
	t.Helper()
	saved := []byte("sha\x03")
	for _, word := range s {
		saved = binary.BigEndian.AppendUint32(saved, word)
	}
	h := sha256.New()
	if err := h.(encoding.BinaryUnmarshaler).UnmarshalBinary(append(saved, make([]byte, 72)...)); err != nil {
		t.Fatal(err)
	}
	h.Write(b)
	saved, err := h.(encoding.BinaryMarshaler).MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	for i := range s {
		s[i] = binary.BigEndian.Uint32(saved[4+4*i:])
	}
	return s
}

// counts are the numbers of streams that k's Run may be given.
func (k Kernel) counts() (ns []int) {
	for n := 2; n <= Most; n++ {
		if k.shani && n <= 4 || k.avx512 {
			ns = append(ns, n)
		}
	}
	return ns
}

func kernels(t testing.TB) map[string]Kernel {
	t.Helper()
	all := map[string]Kernel{"best": Best()}
	for _, name := range Names() {
		k, err := Named(name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = k
	}
	return all
}

// check runs k over buffers and compares with the library.
func check(t testing.TB, k Kernel, states []State, p [][]byte) {
	t.Helper()
	want := make([]State, len(p))
	for i := range p {
		want[i] = library(t, states[i], p[i])
	}
	k.Run(states, p)
	for i := range p {
		if states[i] != want[i] {
			t.Errorf("%+v: stream %d of %d, %d bytes: state %08x, want %08x", k, i, len(p), len(p[i]), states[i], want[i])
		}
	}
}

func random(seed uint64, n int) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	b := make([]byte, n)
	rand.NewChaCha8(key).Read(b)
	return b
}

func randomStates(seed uint64, n int) []State {
	states := slices.Repeat([]State{start}, n)
	b := random(seed, 32*n)
	for i := 1; i < n; i += 2 {
		for j := range states[i] {
			states[i][j] = binary.LittleEndian.Uint32(b[32*i+4*j:])
		}
	}
	return states
}

// TestRun: every kernel and number of streams, from states of all kinds, at aligned and odd addresses, over none, one
// and so many blocks that they take several calls.
func TestRun(t *testing.T) {
	for name, k := range kernels(t) {
		for _, n := range k.counts() {
			for _, blocks := range []int{0, 1, 2, 7, perTest} {
				for _, odd := range []int{0, 1, 31} {
					t.Run(fmt.Sprintf("%s/%d streams/%d blocks/%d", name, n, blocks, odd), func(t *testing.T) {
						b := random(uint64(n), n*(blocks*Size+odd)+odd)
						p := make([][]byte, n)
						for i := range p {
							p[i] = b[i*(blocks*Size+odd)+odd:][:blocks*Size]
						}
						check(t, k, randomStates(uint64(blocks), n), p)
					})
				}
			}
		}
	}
}

// perTest blocks are more than go through in one call.
const perTest = 64<<10/Size + 3

// TestBounds: nothing past the end of a buffer is read, and its bytes stay as they are: it ends where memory ends, and
// nobody may write to it.
func TestBounds(t *testing.T) {
	for _, k := range kernels(t) {
		for _, n := range k.counts() {
			p := make([][]byte, n)
			for i := range p {
				p[i] = guarded(t, random(uint64(i), 5*Size))
			}
			check(t, k, randomStates(1, n), p)
		}
	}
}

func TestNamed(t *testing.T) {
	for _, name := range []string{"x2", "X4", "x16 ", "avx512", "0"} {
		if k, err := Named(name); err == nil {
			t.Errorf("%q: %+v, no error", name, k)
		}
	}
	if k, err := Named(""); err != nil || k != Best() {
		t.Errorf("no name: %+v, %v", k, err)
	}
	for _, name := range []string{"x1", "x4", "x16"} {
		if _, err := Named(name); (err == nil) != slices.Contains(Names(), name) {
			t.Errorf("%s: %v, Names are %q", name, err, Names())
		}
	}
}

// TestTake: a kernel takes only as many streams as Run may be given, one is the library's, and no stream is left alone
// where another share would spare it that.
func TestTake(t *testing.T) {
	for _, k := range []Kernel{{}, {shani: true}, {avx512: true}, {shani: true, avx512: true}} {
		for n := 1; n <= 40; n++ {
			alone := 0
			for left := n; left > 0; {
				took := k.Take(left)
				if took < 1 || took > left || took > Most {
					t.Fatalf("%+v takes %d of %d", k, took, left)
				}
				if took == 1 {
					alone++
				} else if !slices.Contains(k.counts(), took) {
					t.Fatalf("%+v takes %d, which Run does not", k, took)
				}
				left -= took
			}
			if k != (Kernel{}) && n > 2 && alone > 0 {
				t.Errorf("%+v: %d of %d streams alone", k, alone, n)
			}
		}
	}
}

func TestRunRefuses(t *testing.T) {
	for what, run := range map[string]func(){
		"a part of a block": func() { Best().Run(make([]State, 2), [][]byte{make([]byte, 65), make([]byte, 65)}) },
		"two lengths":       func() { Best().Run(make([]State, 2), [][]byte{make([]byte, 64), make([]byte, 128)}) },
		"a state too few":   func() { Best().Run(make([]State, 1), [][]byte{make([]byte, 64), make([]byte, 64)}) },
		"no kernel":         func() { Kernel{}.Run(make([]State, 2), [][]byte{make([]byte, 64), make([]byte, 64)}) },
		"too many":          func() { Best().Run(make([]State, 17), slices.Repeat([][]byte{make([]byte, 64)}, 17)) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			run()
		}()
	}
}

// FuzzRun compares every kernel with the library, over buffers and states cut out of what comes.
func FuzzRun(f *testing.F) {
	f.Add(uint64(0), uint8(2), uint16(1), []byte{})
	f.Add(uint64(1), uint8(16), uint16(9), []byte("kiln"))
	f.Fuzz(func(t *testing.T, seed uint64, streams uint8, blocks uint16, b []byte) {
		n, size := 2+int(streams)%15, int(blocks)%300*Size
		odd := int(seed) & 63
		text := append(slices.Clone(b), random(seed, n*size+64)...)[odd:]
		p := make([][]byte, n)
		for i := range p {
			p[i] = text[i*size : (i+1)*size]
		}
		for _, k := range kernels(t) {
			if slices.Contains(k.counts(), n) {
				check(t, k, randomStates(seed, n), p)
			}
		}
	})
}

// BenchmarkRun is about bytes in the first caches: 16 KiB a stream.
func BenchmarkRun(b *testing.B) {
	const size = 16 << 10
	all := random(0, Most*(size+320))
	b.Run("library", func(b *testing.B) {
		b.SetBytes(size)
		for h := sha256.New(); b.Loop(); {
			h.Write(all[:size])
		}
	})
	for _, name := range Names() {
		k, err := Named(name)
		if err != nil {
			b.Fatal(err)
		}
		for _, n := range k.counts() {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(n * size))
				p := make([][]byte, n)
				for i := range p {
					p[i] = all[i*(size+320):][:size]
				}
				for states := make([]State, n); b.Loop(); {
					k.Run(states, p)
				}
			})
		}
	}
}
