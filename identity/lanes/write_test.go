package lanes

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
)

// TestMain runs the tests with the kernel that KILN_LANES names.
func TestMain(m *testing.M) {
	if err := Use(os.Getenv("KILN_LANES")); err != nil {
		fmt.Fprintln(os.Stderr, "error: KILN_LANES:", err)
		os.Exit(2)
	}
	os.Exit(m.Run())
}

// withEach runs a test with each kernel of this processor, and with the best one.
func withEach(t *testing.T, test func(t *testing.T)) {
	os.Getenv("KILN_LANES") // so that the go command does not show the results of another kernel again
	before := chosen.Load()
	t.Cleanup(func() { chosen.Store(before) })
	for _, name := range append(Kernels(), "") {
		if err := Use(name); err != nil {
			t.Fatal(err)
		}
		t.Run("kernel "+name, test)
	}
}

// between is a segment with edges in the middle of what is hashed together.
const between = 83 * 64

// kinds are those of streams.
var kinds = []string{"hash", "library", "recorder", "stream", "check", "buffer"}

// open returns a stream and a way to say whether exactly b was written to it.
func open(t testing.TB, kind string, b []byte) (io.Writer, func() error) {
	switch kind {
	case "hash":
		h := identity.NewHash()
		return h, func() error { return hashed(h, b) }
	case "library":
		h := sha256.New().(identity.Hash)
		return h, func() error { return hashed(h, b) }
	case "recorder":
		r := NewRecorder(between)
		return r, func() error {
			_, noted := r.Take()
			if want := record(t, between, b, 4096).Edge; len(noted) < len(want) || !slices.Equal(noted[:len(want)], want) {
				return fmt.Errorf("%d states noted, want %d", len(noted), len(want))
			}
			return hashed(r, b)
		}
	case "stream":
		s := record(t, between, b, 4096).Stream()
		return s, func() error {
			if bad := s.End(); bad != nil {
				return fmt.Errorf("segments %d fail", bad)
			}
			return nil
		}
	case "check":
		s, err := New(1<<20, int64(len(b)), identity.Sum(b), nil)
		if err != nil {
			t.Fatal(err)
		}
		c := s.Check(0)
		return c, c.Err
	}
	var got bytes.Buffer
	return &got, func() error {
		if !bytes.Equal(got.Bytes(), b) {
			return fmt.Errorf("%d bytes of %d", got.Len(), len(b))
		}
		return nil
	}
}

func hashed(h identity.Hash, b []byte) error {
	if got, want := identity.DigestOf(h), identity.Sum(b); got != want {
		return fmt.Errorf("sum %s, want %s", got, want)
	}
	return nil
}

// feed writes streams of random lengths in pieces of random lengths, some of them none, and checks each.
func feed(t testing.TB, r *rand.Rand, n, longest int) {
	t.Helper()
	data, to, end := make([][]byte, n), make([]io.Writer, n), make([]func() error, n)
	kind := make([]string, n)
	for i := range n {
		data[i] = random(r.Uint64(), r.IntN(longest+1))
		kind[i] = kinds[r.IntN(len(kinds))]
		to[i], end[i] = open(t, kind[i], data[i])
	}
	rest := slices.Clone(data)
	for left := true; left; {
		left = false
		var pieces []Piece
		for i := range rest {
			if r.IntN(8) == 0 && len(rest[i]) > 0 {
				left = true
				continue // this stream has nothing this time
			}
			m := min(len(rest[i]), r.IntN(3*worthwhile)<<r.IntN(4))
			pieces = append(pieces, Piece{to[i], rest[i][:m]})
			rest[i] = rest[i][m:]
			left = left || len(rest[i]) > 0
		}
		Write(pieces...)
	}
	for i := range n {
		if err := end[i](); err != nil {
			t.Errorf("stream %d of %d, a %s of %d bytes: %v", i, n, kind[i], len(data[i]), err)
		}
	}
}

func TestWrite(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for n := range 36 {
			feed(t, rand.New(rand.NewPCG(uint64(n), 1)), n, 60_000)
		}
	})
}

func FuzzWrite(f *testing.F) {
	for _, n := range []uint8{1, 2, 3, 4, 5, 16, 17} {
		f.Add(uint64(n), n, uint32(70_000))
	}
	f.Fuzz(func(t *testing.T, seed uint64, n uint8, longest uint32) {
		feed(t, rand.New(rand.NewPCG(seed, 2)), int(n%40), int(longest%300_000))
	})
}

// TestWriteEqual: pieces of one length are the case that everything is for, at lengths about those that matter.
func TestWriteEqual(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for _, n := range []int{2, 3, 4, 5, 8, 9, 15, 16, 17} {
			for _, size := range []int{0, 1, 64, worthwhile - 1, worthwhile, worthwhile + 1, 16 << 10, 256<<10 + 1} {
				bufs := Buffers(n, size)
				pieces := make([]Piece, n)
				for i := range pieces {
					copy(bufs[i], random(uint64(i), size))
					pieces[i] = Piece{identity.NewHash(), bufs[i]}
				}
				Write(pieces...)
				Write(pieces...)
				for i, p := range pieces {
					if d := identity.DigestOf(p.To.(identity.Hash)); d != identity.Sum(append(slices.Clone(bufs[i]), bufs[i]...)) {
						t.Errorf("stream %d of %d, twice %d bytes: sum %s", i, n, size, d)
					}
				}
			}
		}
	})
}

// TestStateInterchange: a state that was saved by the library or by sha256-simd goes on in lanes, and the other way.
func TestStateInterchange(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for _, at := range []int{0, 1, 63, 64, 5000, 8192} {
			b := random(uint64(at), 50_000)
			var pieces []Piece
			for i := range 4 {
				from, to := identity.NewHash(), sha256.New().(identity.Hash)
				if i%2 == 0 {
					from, to = to, from
				}
				from.Write(b[:at])
				move(t, from, to)
				pieces = append(pieces, Piece{to, b[at:45_000]})
			}
			Write(pieces...)
			for i, p := range pieces {
				back := identity.NewHash()
				if i < 2 {
					back = sha256.New().(identity.Hash)
				}
				move(t, p.To.(identity.Hash), back)
				back.Write(b[45_000:])
				if identity.DigestOf(back) != identity.Sum(b) {
					t.Errorf("stream %d, moved at %d: another sum", i, at)
				}
			}
		}
	})
}

func move(t *testing.T, from, to identity.Hash) {
	t.Helper()
	saved, err := from.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if err := to.UnmarshalBinary(saved); err != nil {
		t.Fatal(err)
	}
}

// TestChecksTogether: segments of one blob, in any order and several at once. Only those that are damaged fail.
func TestChecksTogether(t *testing.T) {
	const segment = 64 << 10
	withEach(t, func(t *testing.T) {
		b := random(7, 20*segment+777)
		s := record(t, segment, b, 1<<20)
		b[3*segment+5] ^= 1
		b[len(b)-1] ^= 1
		order := rand.Perm(s.Len())
		for group := range slices.Chunk(order, 16) {
			var pieces []Piece
			for _, i := range group {
				pieces = append(pieces, Piece{s.Check(i), segmentOf(s, b, i)})
			}
			Write(pieces...)
			for j, i := range group {
				damaged := i == 3 || i == 20
				if err := pieces[j].To.(*Check).Err(); (err != nil) != damaged {
					t.Errorf("segment %d: %v", i, err)
				}
			}
		}
	})
}

// counted is an identity.Hash that says what was written to it by its own Write.
type counted struct {
	identity.Hash
	written int
}

func (c *counted) Write(b []byte) (int, error) {
	c.written += len(b)
	return c.Hash.Write(b)
}

// TestLone: a lone stream's bytes all go through the Write of its own hash, which is the library's.
func TestLone(t *testing.T) {
	lone := &counted{Hash: identity.NewHash()}
	Write(Piece{lone, make([]byte, 1<<20)})
	var p Pool
	for range 4 {
		p.Write(lone, make([]byte, 1<<20))
	}
	if lone.written != 5<<20 {
		t.Errorf("%d bytes went through its own Write, want all", lone.written)
	}
	if path := reflect.TypeOf(identity.NewHash()).Elem().PkgPath(); !strings.Contains(path, "sha256") {
		t.Errorf("the hash of a stream is of %s", path)
	}
}

func TestUse(t *testing.T) {
	before := chosen.Load()
	t.Cleanup(func() { chosen.Store(before) })
	err := Use("x7")
	if err == nil || strings.Contains(err.Error(), "\n") || chosen.Load() != before {
		t.Errorf("x7: %v", err)
	}
	if !slices.Contains(Kernels(), "x1") {
		t.Errorf("kernels: %q", Kernels())
	}
}

func TestSameStreamTwice(t *testing.T) {
	if len(Kernels()) == 1 {
		t.Log("nothing is shared on this processor")
		return
	}
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	if err := Use(""); err != nil {
		t.Fatal(err)
	}
	h := identity.NewHash()
	Write(Piece{identity.NewHash(), nil}, Piece{h, nil}, Piece{h, nil})
}

func TestBuffers(t *testing.T) {
	for _, size := range []int{0, 1, 4096, 256 << 10} {
		bufs := Buffers(16, size)
		for i, b := range bufs {
			if len(b) != size || cap(b) != size {
				t.Errorf("buffer %d: %d bytes of %d", i, len(b), cap(b))
			}
		}
		if len(bufs) != 16 {
			t.Errorf("%d buffers", len(bufs))
		}
	}
}

// TestPool: many goroutines, more than there are cores, each with streams of its own.
func TestPool(t *testing.T) {
	withEach(t, func(t *testing.T) {
		var p Pool
		var wg sync.WaitGroup
		for g := range 8 * runtime.GOMAXPROCS(0) {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(g), 3))
				for _, kind := range kinds {
					b := random(r.Uint64(), r.IntN(300_000))
					to, end := open(t, kind, b)
					for rest := b; len(rest) > 0; {
						n := min(len(rest), 1+r.IntN(64<<10))
						piece := slices.Clone(rest[:n])
						p.Write(to, piece)
						clear(piece) // it is the caller's again
						rest = rest[n:]
					}
					if err := end(); err != nil {
						t.Errorf("goroutine %d, a %s of %d bytes: %v", g, kind, len(b), err)
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestPoolShares: streams that want the one core at the same time are hashed together on it.
func TestPoolShares(t *testing.T) {
	if kernel().Take(8) == 1 {
		t.Log("streams don't share a core with this kernel")
		return
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var p Pool
	var wg sync.WaitGroup
	var streams [8]counted
	for i := range streams {
		streams[i].Hash = identity.NewHash()
		wg.Go(func() {
			for range 8 {
				p.Write(&streams[i], make([]byte, 64<<10))
			}
		})
	}
	wg.Wait()
	alone := 0
	for i := range streams {
		alone += streams[i].written
		if err := hashed(&streams[i], make([]byte, 512<<10)); err != nil {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if alone == len(streams)*512<<10 {
		t.Error("all bytes went through the streams' own Write")
	}
}

// BenchmarkWrite is about pieces as files are read: 256 KiB each, in Buffers.
func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8, 16} {
		b.Run(fmt.Sprintf("%d streams", n), func(b *testing.B) {
			const size = 256 << 10
			pieces := make([]Piece, n)
			for i, buf := range Buffers(n, size) {
				pieces[i] = Piece{identity.NewHash(), buf}
			}
			b.SetBytes(int64(n * size))
			b.ReportAllocs()
			for b.Loop() {
				Write(pieces...)
			}
		})
	}
}

func ExampleWrite() {
	first, second := identity.NewHash(), identity.NewHash()
	Write(Piece{first, []byte("one")}, Piece{second, []byte("another")})
	Write(Piece{first, []byte(" stream")}, Piece{second, []byte(" one")})
	fmt.Println(identity.DigestOf(first) == identity.Sum([]byte("one stream")))
	fmt.Println(identity.DigestOf(second) == identity.Sum([]byte("another one")))
	// Output:
	// true
	// true
}
