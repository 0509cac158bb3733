//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"errors"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
)

const benchShard = 64 << 20

// BenchmarkLoad compares a load to a device, whose copies take time but no processor, with reading and hashing alone.
func BenchmarkLoad(b *testing.B) {
	dir, names := devicetest.Shards(b, 4, benchShard)
	src, err := gpuload.OpenDir(dir, false, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer src.Close()
	fake.Reset()
	fake.Set("LAZY", 0)
	fake.Set("NO_BYTES", 1)
	b.Cleanup(fake.Reset)
	for _, bench := range []struct {
		name      string
		bandwidth int64
	}{{"read+hash", 0}, {"25GB", 25e9}, {"2GB", 2e9}} {
		b.Run(bench.name, func(b *testing.B) {
			fake.Set("BANDWIDTH", bench.bandwidth)
			b.SetBytes(int64(len(names)) * benchShard)
			for b.Loop() {
				var target gpuload.Target = new(hostmem.Discard)
				if bench.bandwidth > 0 {
					target = open(b, 0)
				}
				p, err := gpuload.NewPlan(b.Context(), src, names, gpuload.Want{})
				if err != nil {
					b.Fatal(err)
				}
				r, err := gpuload.Load(b.Context(), p, src, target, gpuload.Options{})
				if err == nil {
					err = r.Close(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkCopy measures the calls that each chunk costs: start a copy, wait for it.
func BenchmarkCopy(b *testing.B) {
	fake.Reset()
	target, buf := open(b, 0), make([]byte, 4096)
	_, err1 := target.Pin(buf)
	to, err2 := target.Alloc(b.Context(), 0, int64(len(buf)))
	if err := errors.Join(err1, err2); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		tok, err := target.Submit(b.Context(), buf, to, 0)
		if err == nil {
			err = tok.Wait(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	if err := target.Free(); err != nil {
		b.Fatal(err)
	}
}
