package hostmem_test

import (
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
)

const benchShard = 64 << 20

func benchLoad(b *testing.B, dir string, names []string, target func() gpuload.Target, o gpuload.Options) {
	b.Helper()
	src, err := gpuload.OpenDir(dir, false, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer src.Close()
	p, err := gpuload.NewPlan(b.Context(), src, names, gpuload.Want{})
	if err != nil {
		b.Fatal(err)
	}
	r, err := gpuload.Load(b.Context(), p, src, target(), o)
	if err != nil {
		b.Fatal(err)
	}
	if err := r.Close(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkLoad compares one pass with its parts: reading and hashing only, and hashing first and then copying.
func BenchmarkLoad(b *testing.B) {
	dir, names := devicetest.Shards(b, 4, benchShard)
	host := func() gpuload.Target { return &hostmem.Target{} }
	discard := func() gpuload.Target { return &hostmem.Discard{} }
	for _, bench := range []struct {
		name string
		run  func(*testing.B)
	}{
		{"read+hash", func(b *testing.B) {
			benchLoad(b, dir, names, discard, gpuload.Options{ChunkBytes: hostmem.Chunk})
		}},
		{"one-pass", func(b *testing.B) { benchLoad(b, dir, names, host, gpuload.Options{ChunkBytes: hostmem.Chunk}) }},
		{"one-pass/4MiB", func(b *testing.B) { benchLoad(b, dir, names, host, gpuload.Options{ChunkBytes: 4 << 20}) }},
		{"one-pass/16MiB", func(b *testing.B) { benchLoad(b, dir, names, host, gpuload.Options{ChunkBytes: 16 << 20}) }},
		{"one-pass/lane", func(b *testing.B) {
			benchLoad(b, dir, names, host, gpuload.Options{ChunkBytes: hostmem.Chunk, Lanes: 1})
		}},
		{"two-passes", func(b *testing.B) {
			benchLoad(b, dir, names, discard, gpuload.Options{ChunkBytes: hostmem.Chunk})
			for _, name := range names {
				copyFile(b, filepath.Join(dir, name))
			}
		}},
		{"sha256", func(b *testing.B) {
			for _, name := range names {
				hashFile(b, filepath.Join(dir, name))
			}
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.SetBytes(int64(len(names)) * benchShard)
			before := cpuTime(b)
			for b.Loop() {
				bench.run(b)
			}
			gigabytes := float64(b.N) * float64(len(names)) * benchShard / 1e9
			b.ReportMetric((cpuTime(b)-before)/gigabytes, "cpu-s/GB")
		})
	}
}

// cpuTime returns the user and system time of this process in seconds: what counts on a machine that others use too.
func cpuTime(b *testing.B) float64 {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// copyFile brings a file into memory without a look at its bytes.
func copyFile(b *testing.B, path string) {
	b.Helper()
	t := &hostmem.Target{}
	defer t.Free()
	block, err := t.Alloc(b.Context(), 0, benchShard)
	if err != nil {
		b.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for off := int64(0); off < benchShard; off += int64(len(buf)) {
		if _, err := io.ReadFull(f, buf); err != nil {
			b.Fatal(err)
		}
		copied, err := t.Submit(b.Context(), buf, block, off)
		if err != nil {
			b.Fatal(err)
		}
		if err := copied.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func hashFile(b *testing.B, path string) {
	b.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if _, err := io.CopyBuffer(sha256.New(), f, make([]byte, 256<<10)); err != nil {
		b.Fatal(err)
	}
}
