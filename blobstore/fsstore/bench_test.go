package fsstore

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// source gives n bytes out of a buffer that does not fit the caches.
type source struct {
	b []byte
	n int64
}

func (s *source) Read(b []byte) (int, error) {
	if s.n == 0 {
		return 0, io.EOF
	}
	at := int(s.n) % (len(s.b) / 2)
	n := copy(b[:min(int64(len(b)), s.n)], s.b[at:])
	s.n -= int64(n)
	return n, nil
}

func cpu() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkAppend compares the CPU time of Append with that of the plain loop that does the same read, hash, write and
// sync. The ratio is the median over the rounds, which alternate.
func BenchmarkAppend(b *testing.B) {
	const size = 512 << 20
	dir := filepath.Join(b.TempDir(), "store")
	if err := Init(dir); err != nil {
		b.Fatal(err)
	}
	st, err := Open(dir, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer st.Close()
	buf := make([]byte, 64<<20)
	var ours, plain, ratios []float64
	for b.Loop() {
		o := cpuPerGB(b, size, func() error { return appendOnce(b, st, &source{buf, size}) })
		p := cpuPerGB(b, size, func() error { return plainLoop(filepath.Join(dir, "plain"), &source{buf, size}) })
		ours, plain, ratios = append(ours, o), append(plain, p), append(ratios, o/p)
	}
	b.ReportMetric(median(ours), "cpu-s/GB")
	b.ReportMetric(median(plain), "plain-cpu-s/GB")
	b.ReportMetric(median(ratios), "ratio")
}

func cpuPerGB(b *testing.B, size int64, fn func() error) float64 {
	start := cpu()
	if err := fn(); err != nil {
		b.Fatal(err)
	}
	return (cpu() - start).Seconds() / float64(size) * 1e9
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

func appendOnce(b *testing.B, st *Store, s *source) error {
	u, err := st.Create(b.Context(), identity.Digest{}, s.n)
	if err != nil {
		return err
	}
	if _, err := u.Append(b.Context(), 0, s); err != nil {
		return err
	}
	return u.Abort(b.Context())
}

func plainLoop(path string, s *source) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer os.Remove(path)
	defer f.Close()
	h := identity.NewHash()
	piece := make([]byte, durable.PieceSize)
	for {
		n, err := io.ReadFull(s, piece)
		h.Write(piece[:n])
		if _, err := f.Write(piece[:n]); err != nil {
			return err
		}
		if err != nil {
			return f.Sync()
		}
	}
}

// BenchmarkPut measures Puts of one small manifest by so many writers at once.
func BenchmarkPut(b *testing.B) {
	for _, writers := range []int{1, 16, 128} {
		b.Run(fmt.Sprint(writers), func(b *testing.B) {
			dir := filepath.Join(b.TempDir(), "store")
			if err := Init(dir); err != nil {
				b.Fatal(err)
			}
			st, err := Open(dir, Options{})
			if err != nil {
				b.Fatal(err)
			}
			defer st.Close()
			manifest := make([]byte, 1000)
			var wg sync.WaitGroup
			for b.Loop() {
				for w := range writers {
					wg.Go(func() {
						ref := blobstore.Ref{Repo: "r", Seq: uint64(w), Manifest: manifest}
						if _, err := st.Put(b.Context(), ref); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
			}
			b.ReportMetric(float64(b.N*writers)/b.Elapsed().Seconds(), "puts/s")
		})
	}
}
