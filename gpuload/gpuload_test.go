package gpuload_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// folder writes a model of one shard per data size and returns its path.
func folder(t testing.TB, sizes ...int) string {
	t.Helper()
	dir := t.TempDir()
	for i, n := range sizes {
		data := make([]byte, n)
		if _, err := rand.NewChaCha8([32]byte{byte(i)}).Read(data); err != nil {
			t.Fatal(err)
		}
		head := fmt.Sprintf(`{"t%d":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, i, n, n)
		b := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
		write(t, filepath.Join(dir, fmt.Sprintf("model-%05d.safetensors", i)), append(append(b, head...), data...))
	}
	return dir
}

func write(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, dir string, direct bool, notify func(string)) *gpuload.Dir {
	t.Helper()
	d, err := gpuload.OpenDir(dir, direct, notify)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func shardNames(t testing.TB, dir string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	return paths
}

// load loads all shards of a folder into host memory and checks every byte of it.
func load(t *testing.T, src gpuload.Source, dir string, names []string, o gpuload.Options) *gpuload.Resident {
	t.Helper()
	p, err := gpuload.NewPlan(t.Context(), src, names, gpuload.Want{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := gpuload.Load(t.Context(), p, src, &hostmem.Target{}, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(context.Background()) })
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for i, s := range p.Shards {
		want, err := os.ReadFile(filepath.Join(dir, s.Name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(io.NewSectionReader(handles[i].File, 0, 1<<40))
		if err != nil || !bytes.Equal(got, want[s.Data:]) {
			t.Errorf("%s: the bytes in memory differ from the file (%v)", s.Name, err)
		}
		if d := r.Manifest().Shards[i].Digest; d != identity.Sum(want) {
			t.Errorf("%s: digest %s, want %s", s.Name, d, identity.Sum(want))
		}
	}
	return r
}

// TestFieldCases loads what a package of shards can be in the field: every file that is accepted, and its exact bytes;
// no file that is refused.
func TestFieldCases(t *testing.T) {
	cases := testenv.FieldCases(t)
	for id, want := range testenv.Expected(t, cases) {
		if want.Kind != "st" && want.Kind != "dir" {
			continue
		}
		t.Run(id, func(t *testing.T) {
			dir := filepath.Join(cases, id)
			names := want.Shards
			if want.Kind == "st" {
				names = shardNames(t, dir)
			}
			if want.Kind == "dir" && want.Aggregate == "" {
				return // the selection refuses these
			}
			src := open(t, dir, false, nil)
			p, err := gpuload.NewPlan(t.Context(), src, names, gpuload.Want{})
			switch {
			case want.Verdict == "reject":
				if err == nil {
					t.Errorf("planned, want %s", want.Code)
				}
			case err != nil && strings.Contains(err.Error(), "nothing to load"):
			case err != nil:
				t.Error(err)
			case want.Aggregate != "":
				r := load(t, src, dir, names, gpuload.Options{})
				if got := r.Manifest().Aggregate.String(); got != want.Aggregate {
					t.Errorf("aggregate %s, want %s", got, want.Aggregate)
				}
				held(t, r, p)
			}
		})
	}
}

// held checks that the memory taken is that of the planned shards and no more.
func held(t *testing.T, r *gpuload.Resident, p gpuload.Plan) {
	t.Helper()
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for i, s := range p.Shards {
		if handles[i].Size != s.Size-s.Data {
			t.Errorf("%s takes %d bytes, its data has %d", s.Name, handles[i].Size, s.Size-s.Data)
		}
	}
	if len(handles) != len(p.Shards) {
		t.Errorf("%d blocks for %d shards", len(handles), len(p.Shards))
	}
}

func TestTable(t *testing.T) {
	dir := t.TempDir()
	head := `{"b":{"dtype":"F32","shape":[],"data_offsets":[16,20]},` +
		`"e":{"dtype":"F16","shape":[0,7],"data_offsets":[0,0]},` +
		`"a":{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]},"c":{"dtype":"U8","shape":[3],"data_offsets":[20,23]}}`
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
	write(t, filepath.Join(dir, "m.safetensors"), append(append(b, head...), make([]byte, 23)...))
	r := load(t, open(t, dir, false, nil), dir, []string{"m.safetensors"}, gpuload.Options{})
	want := []gpuload.Tensor{
		{Name: "e", DType: "F16", Shape: []uint64{0, 7}, Aligned: true},
		{Name: "a", DType: "BF16", Shape: []uint64{2, 4}, NBytes: 16, Aligned: true},
		{Name: "b", DType: "F32", Shape: []uint64{}, Offset: 16, NBytes: 4, Aligned: true},
		{Name: "c", DType: "U8", Shape: []uint64{3}, Offset: 20, NBytes: 3},
	}
	got := r.Tensors()
	if len(got) != len(want) {
		t.Fatalf("%d tensors, want %d", len(got), len(want))
	}
	for i := range want {
		if g, w := fmt.Sprintf("%+v", got[i]), fmt.Sprintf("%+v", want[i]); g != w {
			t.Errorf("row %d: %s, want %s", i, g, w)
		}
	}
}

// TestNoElements loads a shard whose only tensor has no bytes.
func TestNoElements(t *testing.T) {
	dir := folder(t, 0, 10)
	load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{})
}

func TestNothingToLoad(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "m.safetensors"), append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, "{}"...))
	_, err := gpuload.NewPlan(t.Context(), open(t, dir, false, nil), []string{"m.safetensors"}, gpuload.Want{})
	if err == nil || !strings.Contains(err.Error(), "nothing to load") {
		t.Errorf("%v; want that there is nothing to load", err)
	}
}

// TestSmallBuffers loads shards that are many times larger than all buffers together.
func TestSmallBuffers(t *testing.T) {
	dir := folder(t, 8<<20, 3<<20, 1)
	for _, limit := range []int64{8192, 100000, 1 << 20} {
		var said []string
		r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{
			MaxBuffer: limit, Notify: func(line string) { said = append(said, line) },
		})
		if b := r.Stats().Buffer; b > limit || len(said) != 1 || !strings.Contains(said[0], fmt.Sprint(limit, " are allowed")) {
			t.Errorf("%d bytes of buffers, at most %d were allowed; said %q", b, limit, said)
		}
	}
	p, err := gpuload.NewPlan(t.Context(), open(t, dir, false, nil), shardNames(t, dir), gpuload.Want{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = gpuload.Load(t.Context(), p, open(t, dir, false, nil), &hostmem.Target{}, gpuload.Options{MaxBuffer: 100})
	if !errors.Is(err, gpuload.ErrMemory) {
		t.Errorf("%v, want %v", err, gpuload.ErrMemory)
	}
}

// TestBufferBound checks the bound of the documentation on a model that would like more.
func TestBufferBound(t *testing.T) {
	dir := folder(t, 4<<20, 4<<20)
	o := gpuload.Options{ChunkBytes: 1 << 20, Lanes: 2, Ring: 3}
	r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), o)
	if b := r.Stats().Buffer; b != 2*3<<20 {
		t.Errorf("%d bytes of buffers", b)
	}
	small := folder(t, 100)
	r = load(t, open(t, small, false, nil), small, shardNames(t, small), gpuload.Options{})
	if b := r.Stats().Buffer; b > 16384 {
		t.Errorf("%d bytes of buffers for a model of 100", b)
	}
}

// TestReadOnce counts the bytes that the kernel hands out and what the progress counter says.
func TestReadOnce(t *testing.T) {
	dir := folder(t, 300000, 70001)
	src := &countingSource{Source: open(t, dir, false, nil)}
	var mu sync.Mutex
	done := map[string]int64{}
	r := load(t, src, dir, shardNames(t, dir), gpuload.Options{ChunkBytes: 8192, Progress: func(shard string, n int64) {
		mu.Lock()
		defer mu.Unlock()
		if n <= done[shard] {
			t.Errorf("%s: %d bytes after %d", shard, n, done[shard])
		}
		done[shard] = n
	}})
	if n := src.n.Load(); n != int64(r.Manifest().TotalSize) {
		t.Errorf("%d bytes read of %d", n, r.Manifest().TotalSize)
	}
	for _, s := range r.Manifest().Shards {
		if done[s.Filename] != int64(s.Size) {
			t.Errorf("%s: progress ended at %d of %d bytes", s.Filename, done[s.Filename], s.Size)
		}
	}
}

type countingSource struct {
	gpuload.Source
	n atomic.Int64
}

type countingFile struct {
	gpuload.File
	n *atomic.Int64
}

func (s *countingSource) Open(ctx context.Context, name string) (gpuload.File, error) {
	f, err := s.Source.Open(ctx, name)
	return countingFile{f, &s.n}, err
}

func (f countingFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(b, off)
	f.n.Add(int64(n))
	return n, err
}

// TestDirect reads past the page cache where the filesystem can, and else says so once and reads all the same.
func TestDirect(t *testing.T) {
	dir := folder(t, 300000, 0, 70001, 4096*3)
	names := shardNames(t, dir)
	for _, chunk := range []int64{4096, 12288, 1 << 20} {
		var said []string
		src := open(t, dir, true, func(line string) { said = append(said, line) })
		load(t, src, dir, names, gpuload.Options{ChunkBytes: chunk, Lanes: 1})
		f, err := src.Open(t.Context(), names[0])
		if err != nil {
			t.Fatal(err)
		}
		_, direct := f.(interface{ Align() int64 })
		if f.Close(); direct == (len(said) > 0) || len(said) > 1 {
			t.Errorf("direct: %v, said %q", direct, said)
		}
	}
	// No kernel reads /proc past the cache.
	var said []string
	src := open(t, "/proc/self", true, func(line string) { said = append(said, line) })
	for range 2 {
		f, err := src.Open(t.Context(), "limits")
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 5)
		if n, err := f.ReadAt(b, 0); string(b[:n]) != "Limit" || len(said) != 1 {
			t.Errorf("read %q (%v), said %q", b[:n], err, said)
		}
		f.Close()
	}
}

func TestRefusedFiles(t *testing.T) {
	dir := folder(t, 10)
	if err := errors.Join(os.Symlink("model-00000.safetensors", filepath.Join(dir, "link.safetensors")),
		os.Mkdir(filepath.Join(dir, "dir.safetensors"), 0o777),
		unix.Mkfifo(filepath.Join(dir, "pipe.safetensors"), 0o666)); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "text.safetensors"), []byte("<!DOCTYPE html><html>not found</html>"))
	src := open(t, dir, false, nil)
	for name, want := range map[string]string{
		"link.safetensors": "symbolic link", "dir.safetensors": "no regular file", "pipe.safetensors": "no regular file",
		"none.safetensors": "no such file", "text.safetensors": "html_page",
	} {
		_, err := gpuload.NewPlan(t.Context(), src, []string{name}, gpuload.Want{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v; want %q", name, err, want)
		}
	}
	var bad *safetensors.Error
	if _, err := gpuload.NewPlan(t.Context(), src, []string{"text.safetensors"}, gpuload.Want{}); !errors.As(err, &bad) {
		t.Errorf("%v has no code", err)
	}
	if _, err := gpuload.OpenDir(filepath.Join(dir, "text.safetensors"), false, nil); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("%v, want %v", err, unix.ENOTDIR)
	}
	// The folder itself may be reached through a link.
	link := filepath.Join(t.TempDir(), "model")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	load(t, open(t, link, false, nil), link, []string{"model-00000.safetensors"}, gpuload.Options{})
}

func TestWant(t *testing.T) {
	dir := folder(t, 10, 20)
	src, names := open(t, dir, false, nil), shardNames(t, dir)
	m := load(t, src, dir, names, gpuload.Options{}).Manifest()
	other := m
	other.Aggregate[0] ^= 1
	for what, tt := range map[string]struct {
		names []string
		want  gpuload.Want
	}{
		"too few shards":  {names[:1], gpuload.Want{Manifest: &m}},
		"too many shards": {append(slices.Clone(names), "x.safetensors"), gpuload.Want{Manifest: &m}},
		"other aggregate": {names, gpuload.Want{Manifest: &m, Aggregate: other.Aggregate}},
	} {
		if _, err := gpuload.NewPlan(t.Context(), src, tt.names, tt.want); !errors.Is(err, gpuload.ErrMismatch) {
			t.Errorf("%s: %v, want %v", what, err, gpuload.ErrMismatch)
		}
	}
	if _, err := gpuload.NewPlan(t.Context(), src, names, gpuload.Want{Manifest: &other}); err == nil {
		t.Error("a manifest that is not valid was taken")
	}
	if _, err := gpuload.NewPlan(t.Context(), src, names, gpuload.Want{Manifest: &m, Aggregate: m.Aggregate}); err != nil {
		t.Error(err)
	}
}

func TestSpread(t *testing.T) {
	devices := []gpuload.Device{{Index: 4, Free: 100}, {Index: 7, Free: 90}}
	got, err := gpuload.Spread([]int64{10, 60, 50, 5}, devices)
	if want := [][]int{{4}, {4}, {7}, {7}}; err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := gpuload.Spread([]int64{1}, nil); err == nil {
		t.Error("spread over no devices")
	}
}

func TestPlacementOfTooFew(t *testing.T) {
	dir := folder(t, 10, 20)
	src := open(t, dir, false, nil)
	p, err := gpuload.NewPlan(t.Context(), src, shardNames(t, dir), gpuload.Want{})
	if err != nil {
		t.Fatal(err)
	}
	o := gpuload.Options{Placement: func([]int64, []gpuload.Device) ([][]int, error) { return [][]int{{0}}, nil }}
	if _, err := gpuload.Load(t.Context(), p, src, &hostmem.Target{}, o); err == nil {
		t.Error("loaded with a place for one shard of two")
	}
}

func TestDrain(t *testing.T) {
	dir := folder(t, 10)
	r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{})
	_, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- r.Close(t.Context()) }()
	for r.State() != gpuload.Draining {
	}
	if _, _, err := r.Lease(); !errors.Is(err, gpuload.ErrState) {
		t.Errorf("leased while draining: %v", err)
	}
	select {
	case err := <-done:
		t.Fatalf("freed while leased: %v", err)
	default:
	}
	release()
	release()
	if err := <-done; err != nil || r.State() != gpuload.Freed {
		t.Errorf("%v, state %s", err, r.State())
	}
	if _, _, err := r.Lease(); !errors.Is(err, gpuload.ErrState) {
		t.Errorf("leased after it was freed: %v", err)
	}
}

// TestDrainNothing closes weights that nobody has leased when there is no time to wait.
func TestDrainNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := folder(t, 10)
	for range 20 { // which way a select goes is chance
		r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{})
		if err := r.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDrainGivesUp(t *testing.T) {
	dir := folder(t, 10)
	r := load(t, open(t, dir, false, nil), dir, shardNames(t, dir), gpuload.Options{})
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	file := handles[0].File
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if _, err := file.Stat(); err == nil {
		t.Error("the memory is still open")
	}
	if err := r.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestStatsLine(t *testing.T) {
	for limit, s := range map[string]gpuload.Stats{
		"read": {Bytes: 3e9, Elapsed: 2e9, Read: 4e9, Hash: 2e9, Copy: 1e9, Lanes: 2, Buffer: 96 << 20},
		"hash": {Bytes: 3e9, Elapsed: 2e9, Read: 1e9, Hash: 2e9, Copy: 1e9, Lanes: 2},
		"copy": {Bytes: 3e9, Elapsed: 2e9, Read: 1e9, Hash: 2e9, Copy: 3e9, Lanes: 2},
		"disk": {Bytes: 3e9, Elapsed: 2e9, Read: 1e9, Hash: 2e9, Copy: 3e9, Disk: 4e9, Lanes: 2},
		"none": {},
	} {
		line := s.String()
		if limit == "none" {
			limit = "hash"
		}
		if !strings.Contains(line, "limit: "+limit) || strings.Contains(line, "NaN") || strings.Contains(line, "\n") {
			t.Errorf("%q, want the limit to be %s", line, limit)
		}
	}
	line := gpuload.Stats{Bytes: 3e9, Elapsed: 2e9, Read: 4e9, Hash: 2e9, Copy: 1e9, Lanes: 2, Buffer: 96e6}.String()
	want := "3000.0 MB in 2.000 s, 1.50 GB/s; limit: read (busy: read 100%, hash 50%, copy 25%); " +
		"2 lanes, 96.0 MB of buffers"
	if line != want {
		t.Errorf("%q, want %q", line, want)
	}
	line = gpuload.Stats{Elapsed: 2e9, Read: 2e9, Lanes: 1, Stage: "network"}.String()
	if want := "limit: network (busy: network 100%,"; !strings.Contains(line, want) || !strings.Contains(line, "1 lane,") {
		t.Errorf("%q lacks %q", line, want)
	}
	line = gpuload.Stats{Bytes: 3e9, Elapsed: 2e9, Hash: 1e9, Disk: 3e9, Lanes: 2}.String()
	if want := "limit: disk (busy: read 0%, hash 25%, copy 0%, disk 75%)"; !strings.Contains(line, want) {
		t.Errorf("%q, want %q", line, want)
	}
}
