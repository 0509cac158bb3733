package gpuload_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// attempt plans and loads one file, and goes on with what NewPlan returned also after an error, as a careless caller
// would.
func attempt(t *testing.T, dir string, direct bool, want gpuload.Want) (f *devicetest.Faulty, err error) {
	t.Helper()
	src := open(t, dir, direct, nil)
	p, planned := gpuload.NewPlan(t.Context(), src, []string{"model.safetensors"}, want)
	f = &devicetest.Faulty{Target: &hostmem.Target{}}
	r, loaded := gpuload.Load(t.Context(), p, src, f, gpuload.Options{})
	if loaded == nil {
		t.Cleanup(func() { r.Close(context.Background()) })
	}
	if planned != nil && loaded == nil {
		t.Error("a plan that failed was loaded")
	}
	return f, planned
}

// wantFile asks for exactly the bytes of the file, and for nothing where no identity can be made of them.
func wantFile(t *testing.T, dir string) gpuload.Want {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	shard := identity.Shard{Filename: "model.safetensors", Size: uint64(len(b)), Digest: identity.Sum(b)}
	m, err := identity.New([]identity.Shard{shard})
	if err != nil {
		return gpuload.Want{}
	}
	return gpuload.Want{Manifest: &m, Aggregate: m.Aggregate}
}

// checkAttempt loads the only file of dir in every way: a file that is refused takes no memory, also when its digest is
// the one asked for.
func checkAttempt(t *testing.T, dir, code string) {
	t.Helper()
	for _, want := range []gpuload.Want{{}, wantFile(t, dir)} {
		for _, direct := range []bool{false, true} {
			f, err := attempt(t, dir, direct, want)
			if code == "" {
				if err != nil || f.Published != 1 {
					t.Errorf("%v, %d handles; want it loaded", err, f.Published)
				}
				continue
			}
			var e *safetensors.Error
			if !errors.As(err, &e) || e.Code != code || e.File != "model.safetensors" && code != gpuload.CodeNoTensors {
				t.Errorf("%v; want %s", err, code)
			}
			if f.Count("alloc") != 0 || f.Count("submit") != 0 || f.Count("pin") != 0 || f.Published != 0 {
				t.Errorf("%d allocations, %d pins, %d copies, %d handles of a file that was refused", f.Count("alloc"),
					f.Count("pin"), f.Count("submit"), f.Published)
			}
		}
	}
}

// TestFieldHeaders puts the files of the area safetensors through the loader.
func TestFieldHeaders(t *testing.T) {
	cases, ran := testenv.FieldCases(t), 0
	for id, c := range testenv.Expected(t, cases) {
		if !strings.HasPrefix(id, "ST-") {
			continue
		}
		ran++
		code := c.Code
		switch {
		case id == "ST-25":
			code = gpuload.CodeNoTensors
		case c.Verdict != "reject":
			code = ""
		}
		t.Run(id, func(t *testing.T) { checkAttempt(t, filepath.Join(cases, id), code) })
	}
	if ran < 30 {
		t.Errorf("only %d cases", ran)
	}
}

// TestHeaderLies: what a header claims takes no memory before it is checked, of neither kind.
func TestHeaderLies(t *testing.T) {
	const tera = int64(1) << 40
	for _, c := range []struct {
		name, text string
		length     uint64 // 0: that of text
		size       int64  // of the file; what text does not fill is a hole
		code       string
	}{
		{"over the limit", "", 100_000_001, tera, safetensors.CodeHeaderTooLarge},
		{"largest number", "", 1<<64 - 1, tera, safetensors.CodeHeaderTooLarge},
		{"past the end", "{}", 90_000_000, 4096, safetensors.CodeHeaderExceeds},
		{"more data than there is", `{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}`, 0, 4096,
			safetensors.CodeTruncated},
		{"less data than there is", `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 0, tera,
			safetensors.CodeTrailingBytes},
		{"shape past 2^64", `{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,8]}}`, 0, 4096,
			safetensors.CodeSizeMismatch},
		{"offsets past 2^63", `{"a":{"dtype":"U8","shape":[0],"data_offsets":[9223372036854775808,9223372036854775808]}}`, 0,
			4096, safetensors.CodeOffsetGap},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if c.length == 0 {
				c.length = uint64(len(c.text))
			}
			path := filepath.Join(dir, "model.safetensors")
			write(t, path, append(binary.LittleEndian.AppendUint64(nil, c.length), c.text...))
			if err := os.Truncate(path, c.size); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			f, err := attempt(t, dir, false, gpuload.Want{})
			runtime.ReadMemStats(&after)
			var e *safetensors.Error
			if !errors.As(err, &e) || e.Code != c.code {
				t.Errorf("%v; want %s", err, c.code)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 || f.Count("alloc") != 0 {
				t.Errorf("took %d bytes and %d blocks", n, f.Count("alloc"))
			}
		})
	}
}

// opened is a source that notes which files are opened.
type opened struct {
	gpuload.Source
	mu    sync.Mutex
	names map[string]bool
}

func (s *opened) Open(ctx context.Context, name string) (gpuload.File, error) {
	s.mu.Lock()
	s.names[name] = true
	s.mu.Unlock()
	return s.Source.Open(ctx, name)
}

// TestFieldLoads are the cases of the area gpuload that this target can show. GL-05 is TestDirect, GL-10 is with the
// commands.
func TestFieldLoads(t *testing.T) {
	t.Run("GL-01", func(t *testing.T) {
		cases := testenv.FieldCases(t)
		dir, want := filepath.Join(cases, "ID-07"), testenv.Expected(t, cases)["ID-07"]
		src := &opened{Source: open(t, dir, false, nil), names: map[string]bool{}}
		r := load(t, src, dir, want.Shards, gpuload.Options{})
		if r.Manifest().Aggregate.String() != want.Aggregate || len(src.names) != len(want.Shards) {
			t.Errorf("aggregate %s, opened %v", r.Manifest().Aggregate, src.names)
		}
	})
	t.Run("GL-02", func(t *testing.T) {
		for start := range 16 {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "m.safetensors"), unaligned(start))
			for _, direct := range []bool{false, true} {
				r := load(t, open(t, dir, direct, nil), dir, []string{"m.safetensors"}, gpuload.Options{ChunkBytes: 4096})
				for _, row := range r.Tensors() {
					if row.Aligned != (row.Offset%16 == 0) {
						t.Errorf("start %d: %+v", start, row)
					}
				}
			}
		}
	})
	t.Run("GL-04", func(t *testing.T) {
		dir := folder(t, 32<<20)
		src, said := open(t, dir, false, nil), ""
		p, err := gpuload.NewPlan(t.Context(), src, shardNames(t, dir), gpuload.Want{})
		if err != nil {
			t.Fatal(err)
		}
		f := &devicetest.Faulty{Target: &hostmem.Target{}, FailPins: 1000}
		o := gpuload.Options{MaxBuffer: 1 << 20, Notify: func(line string) { said += line }}
		r, err := gpuload.Load(t.Context(), p, src, f, o)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(context.Background())
		if b := r.Stats().Buffer; b > 1<<20 || f.Count("pin") == 0 || !strings.Contains(said, "not pinned") {
			t.Errorf("%d bytes of buffers, %d pins were tried, said %q", b, f.Count("pin"), said)
		}
	})
	t.Run("GL-06", func(t *testing.T) {
		dir := folder(t, 3<<20)
		src := open(t, dir, false, nil)
		p, err := gpuload.NewPlan(t.Context(), src, shardNames(t, dir), gpuload.Want{})
		if err != nil {
			t.Fatal(err)
		}
		f := &devicetest.Faulty{Target: &hostmem.Target{}, Room: 2 << 20}
		_, err = gpuload.Load(t.Context(), p, src, f, gpuload.Options{Reserve: -1})
		if !errors.Is(err, gpuload.ErrMemory) || !strings.Contains(err.Error(), fmt.Sprint(3<<20)) ||
			!strings.Contains(err.Error(), fmt.Sprint(2<<20)) || f.Count("alloc")+f.Count("submit") != 0 {
			t.Errorf("%v, %d blocks, %d copies", err, f.Count("alloc"), f.Count("submit"))
		}
	})
	t.Run("GL-09", func(t *testing.T) {
		cases := testenv.FieldCases(t)
		for id, want := range map[string][]uint64{"ST-22": {4}, "ST-23": {0, 16}} {
			dir := filepath.Join(cases, id)
			r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{})
			var got []uint64
			for _, row := range r.Tensors() {
				got = append(got, row.NBytes)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %v bytes, want %v", id, got, want)
			}
		}
	})
	t.Run("GL-12", func(t *testing.T) {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "m.safetensors"), unaligned(5))
		r := load(t, open(t, dir, false, nil), dir, []string{"m.safetensors"}, gpuload.Options{VerifyDevice: true})
		byTensor(t, r, unaligned(5))
	})
}

// unaligned is a file whose data starts at an offset that is start modulo 16.
func unaligned(start int) []byte {
	text := `{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[9994],"data_offsets":[6,10000]}}`
	for (8+len(text))%16 != start {
		text += " "
	}
	b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	for i := range 10000 {
		b = append(b, byte(i*i>>3))
	}
	return b
}

// byTensor compares the digest of each tensor in memory with that of its range in the file.
func byTensor(t *testing.T, r *gpuload.Resident, file []byte) {
	t.Helper()
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	data := file[8+binary.LittleEndian.Uint64(file):]
	for _, row := range r.Tensors() {
		h := identity.NewHash()
		part := io.NewSectionReader(handles[row.Shard].File, int64(row.Offset), int64(row.NBytes))
		if _, err := io.Copy(h, part); err != nil {
			t.Fatal(err)
		}
		if got := identity.DigestOf(h); got != identity.Sum(data[row.Offset:row.Offset+row.NBytes]) {
			t.Errorf("tensor %s differs", row.Name)
		}
	}
	if n := r.Stats().ReadBack; n != int64(len(data)) {
		t.Errorf("read back %d bytes of %d", n, len(data))
	}
}
