package devicetest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// model is a folder of shard files, with what is in them.
type model struct {
	dir   string
	files map[string][]byte
}

// shardFile returns a safetensors file whose tensors have the given numbers of bytes, filled from seed, and whose data
// starts at an offset that is start modulo 16.
func shardFile(seed uint64, start int, tensors ...int) []byte {
	type row struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	head, end := map[string]row{}, 0
	for i, n := range tensors {
		head[fmt.Sprintf("seed%d.t%d", seed, i)] = row{"U8", []int{n}, [2]int{end, end + n}}
		end += n
	}
	text, err := json.Marshal(head)
	if err != nil {
		panic(err) // maps of numbers always have a text
	}
	for (8+len(text))%16 != start {
		text = append(text, ' ')
	}
	return seal(text, randomBytes(seed, end))
}

// seal puts the length in front of a header and the data behind it.
func seal(header, data []byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, 0, n+8)
	for r := rand.NewPCG(seed, 0); len(b) < n; {
		b = binary.LittleEndian.AppendUint64(b, r.Uint64())
	}
	return b[:n]
}

// newModel writes three shards of different sizes, of some dozen chunks each.
func newModel(t testing.TB) *model {
	return writeModel(t, map[string][]byte{
		"model-00001-of-00003.safetensors": shardFile(1, 0, 70000, 256, 30000),
		"model-00002-of-00003.safetensors": shardFile(2, 8, 150000),
		"model-00003-of-00003.safetensors": shardFile(3, 1, 4096, 4096, 90001),
	})
}

func writeModel(t testing.TB, files map[string][]byte) *model {
	m := &model{t.TempDir(), files}
	for name, b := range files {
		m.write(t, name, b)
	}
	return m
}

func (m *model) write(t testing.TB, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, name), b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func (m *model) names() []string {
	var names []string
	for n := range m.files {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// manifest is the identity of what the files should hold.
func (m *model) manifest(t testing.TB) identity.Manifest {
	t.Helper()
	var shards []identity.Shard
	for name, b := range m.files {
		shards = append(shards, identity.Shard{Filename: name, Size: uint64(len(b)), Digest: identity.Sum(b)})
	}
	man, err := identity.New(shards)
	if err != nil {
		t.Fatal(err)
	}
	return man
}

func (m *model) source(t testing.TB) *gpuload.Dir {
	t.Helper()
	d, err := gpuload.OpenDir(m.dir, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// data returns the bytes of a shard's tensors.
func (m *model) data(name string) []byte {
	b := m.files[name]
	return b[8+binary.LittleEndian.Uint64(b):]
}

// source is a gpuload.Source that does something at each read of data.
type source struct {
	gpuload.Source
	read func(name string, b []byte, off int64, under gpuload.File) (int, error)
}

func (s source) Open(ctx context.Context, name string) (gpuload.File, error) {
	f, err := s.Source.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	return file{f, s, strings.Clone(name)}, nil
}

type file struct {
	gpuload.File
	s    source
	name string
}

func (f file) ReadAt(b []byte, off int64) (int, error) { return f.s.read(f.name, b, off, f.File) }

// counting adds up the bytes that are read of each file.
func counting(under gpuload.Source, read map[string]int64) gpuload.Source {
	var mu sync.Mutex
	return source{under, func(name string, b []byte, off int64, f gpuload.File) (int, error) {
		n, err := f.ReadAt(b, off)
		mu.Lock()
		defer mu.Unlock()
		read[name] += int64(n)
		return n, err
	}}
}

// slow gives others a turn after every 512 bytes.
func slow(under gpuload.Source) gpuload.Source {
	return source{under, func(_ string, b []byte, off int64, f gpuload.File) (n int, err error) {
		for n < len(b) && err == nil {
			var k int
			k, err = f.ReadAt(b[n:min(len(b), n+512)], off+int64(n))
			n += k
			runtime.Gosched()
		}
		return n, err
	}}
}

// Shards writes shards of size random bytes beside their headers, for benchmarks, and returns their folder and names.
func Shards(b *testing.B, shards, size int) (dir string, names []string) {
	b.Helper()
	dir = b.TempDir()
	data := make([]byte, size)
	for i := range shards {
		if _, err := rand.NewChaCha8([32]byte{byte(i)}).Read(data); err != nil {
			b.Fatal(err)
		}
		head := fmt.Sprintf(`{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, size, size)
		text := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
		names = append(names, fmt.Sprintf("m%d.safetensors", i))
		if err := os.WriteFile(filepath.Join(dir, names[i]), append(text, data...), 0o666); err != nil {
			b.Fatal(err)
		}
	}
	return dir, names
}
