package transfer_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// weights is one tensor of bytes.
type weights struct {
	name  string
	shape []int
	data  string
}

// pack makes a safetensors file, its tensors in the order given.
func pack(t *testing.T, meta map[string]string, tensors ...weights) []byte {
	t.Helper()
	header, data := map[string]any{}, ""
	for _, w := range tensors {
		header[w.name] = map[string]any{"dtype": "U8", "shape": w.shape, "data_offsets": []int{len(data), len(data) + len(w.data)}}
		data += w.data
	}
	if meta != nil {
		header["__metadata__"] = meta
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data...)
}

func folderOf(t *testing.T, files map[string][]byte) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "model")
	writeModel(t, dir, files)
	return dir
}

func compare(t *testing.T, a, b string) (transfer.Comparison, error) {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	dial := func(host string, registry bool) (*client.Client, error) {
		if health := strings.Contains(a+b, "://"); health == registry {
			t.Errorf("%s: named as a registry: %v", host, registry)
		}
		return client.New(host, client.Options{})
	}
	var sides [2]transfer.Side
	for i, name := range []string{a, b} {
		s, err := transfer.OpenSide(t.Context(), name, dial, folder.Options{}, nil)
		if err != nil {
			return transfer.Comparison{}, err
		}
		defer s.Close()
		sides[i] = s
	}
	return transfer.Compare(t.Context(), sides[0], sides[1])
}

func TestCompareFolders(t *testing.T) {
	a, b, c := weights{"a", []int{2, 3}, "aaaaaa"}, weights{"b", []int{4}, "bbbb"}, weights{"c", []int{0}, ""}
	dir := folderOf(t, map[string][]byte{"x-1.safetensors": pack(t, nil, a, c), "x-2.safetensors": pack(t, nil, b)})
	for name, test := range map[string]struct {
		files          map[string][]byte
		same, tensors  bool
		onlyA, onlyB   int
		reason, differ string
	}{
		"other names, other metadata beside": {
			files: map[string][]byte{"y.safetensors": pack(t, nil, b), "z.safetensors": pack(t, nil, a, c), "config.json": {}},
			same:  true, tensors: true,
		},
		"one file instead of two": {
			files: map[string][]byte{"model.safetensors": pack(t, nil, b, a, c)}, tensors: true, onlyA: 2, onlyB: 1,
		},
		"header metadata": {
			files:   map[string][]byte{"x-1.safetensors": pack(t, map[string]string{"format": "pt"}, a, c), "x-2.safetensors": pack(t, nil, b)},
			tensors: true, onlyA: 1, onlyB: 1,
		},
		"one byte of one tensor": {
			files:  map[string][]byte{"x-1.safetensors": pack(t, nil, a, c), "x-2.safetensors": pack(t, nil, weights{"b", []int{4}, "bbbB"})},
			reason: `1 tensor differs: "b"`, onlyA: 1, onlyB: 1,
		},
		"same bytes, other shape": {
			files:  map[string][]byte{"x-1.safetensors": pack(t, nil, weights{"a", []int{3, 2}, "aaaaaa"}, c), "x-2.safetensors": pack(t, nil, b)},
			reason: `1 tensor differs: "a"`, onlyA: 1, onlyB: 1,
		},
		"contents of two tensors swapped": {
			files: map[string][]byte{"model.safetensors": pack(t, nil, weights{"a", []int{2, 3}, "aaaaaa"}, c,
				weights{"b", []int{4}, "aaaa"})},
			reason: `1 tensor differs: "b"`, onlyA: 2, onlyB: 1,
		},
		"one tensor more": {
			files:  map[string][]byte{"x-1.safetensors": pack(t, nil, a, c), "x-2.safetensors": pack(t, nil, b, weights{"d", []int{1}, "d"})},
			reason: `1 tensor differs: "d"`, onlyA: 1, onlyB: 1,
		},
		"a shard twice": {
			files: map[string][]byte{"x-1.safetensors": pack(t, nil, a, c), "x-2.safetensors": pack(t, nil, b), "x-3.safetensors": pack(t, nil, b)},
			onlyB: 1, reason: `1 tensor differs: "b"`,
		},
	} {
		got, err := compare(t, dir, folderOf(t, test.files))
		if err != nil || got.Same != test.same || got.SameTensors == nil || *got.SameTensors != test.tensors || len(got.OnlyA) != test.onlyA ||
			len(got.OnlyB) != test.onlyB || got.TensorReason != test.reason {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestCompareReferences(t *testing.T) {
	s := newSite(t)
	a, b := weights{"a", []int{1 << 20}, strings.Repeat("a", 1<<20)}, weights{"b", []int{3}, "bbb"}
	split := map[string][]byte{"m-1.safetensors": pack(t, nil, a), "m-2.safetensors": pack(t, nil, b)}
	s.push("team/m", "split", split)
	s.push("team/m", "one", map[string][]byte{"model.safetensors": pack(t, nil, a, b)})
	s.push("team/m", "none", map[string][]byte{"config.json": []byte("{}")})
	ref := func(tag string) string { return s.host + "/team/m:" + tag }

	dir := folderOf(t, split)
	if got, err := compare(t, dir, ref("split")); err != nil || !got.Same {
		t.Errorf("folder and reference: %+v, %v", got, err)
	}
	if got, err := compare(t, dir, ref("one")); err != nil || got.Same || got.SameTensors == nil || !*got.SameTensors {
		t.Errorf("folder and repackaged reference: %+v, %v", got, err)
	}
	// The connection breaks in the middle of a blob; what was read of it stays read.
	s.onBlob(once(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "999999")
		panic(http.ErrAbortHandler)
	}))
	if got, err := compare(t, ref("one"), ref("split")); err != nil || got.Same || got.SameTensors == nil || !*got.SameTensors {
		t.Errorf("two references: %+v, %v", got, err)
	}
	if _, err := compare(t, ref("none"), dir); !errors.Is(err, transfer.ErrNoIdentity) {
		t.Errorf("artifact without weights: %v", err)
	}
	if _, err := compare(t, ref("gone"), dir); !errors.Is(err, api.ErrManifestUnknown) {
		t.Errorf("reference to nothing: %v", err)
	}
}

func TestCompareSides(t *testing.T) {
	dir := folderOf(t, map[string][]byte{"model.safetensors": shard(1<<12, 1)})
	other := folderOf(t, map[string][]byte{"model.safetensors": shard(1<<12, 2)})
	f, err := folder.Open(dir, folder.Options{})
	if err != nil {
		t.Fatal(err)
	}
	sum, err := f.Sum(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := json.Marshal(sum.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "manifest.json")
	if err := os.WriteFile(file, doc, 0o644); err != nil {
		t.Fatal(err)
	}
	var answer any
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { json.NewEncoder(w).Encode(answer) }))
	defer srv.Close()
	health := srv.URL + "/health"
	serving := func(s *identity.Summary) { answer = api.Health{Status: "ok", Role: "resident", BaseWeightIdentity: s} }
	summary := sum.Manifest.Summary()
	serving(&summary)

	for _, name := range []string{dir, file, summary.Aggregate.String(), health} {
		if got, err := compare(t, dir, name); err != nil || !got.Same {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if got, err := compare(t, name, other); err != nil || got.Same || (got.SameTensors == nil) != (name != dir) ||
			got.TensorReason == "" {
			t.Errorf("%s against another: %+v, %v", name, got, err)
		}
	}
	lying := summary
	lying.TotalSize++
	serving(&lying)
	if _, err := compare(t, dir, health); err == nil || !strings.Contains(err.Error(), "one of them is wrong") {
		t.Errorf("one aggregate, two sizes: %v", err)
	}
	for name, change := range map[string]func(*identity.Summary){
		"manifest_type":       func(s *identity.Summary) { s.ManifestType = "other" },
		"aggregate_algorithm": func(s *identity.Summary) { s.AggregateAlgorithm += "\x1b" },
		"aggregate_sha256":    func(s *identity.Summary) { s.Aggregate = identity.Aggregate{} },
		"shard_count is 0":    func(s *identity.Summary) { s.ShardCount = 0 },
		"shard_count is -1":   func(s *identity.Summary) { s.ShardCount = -1 },
		"shard_count is 4097": func(s *identity.Summary) { s.ShardCount = 4097 },
		"total_size_bytes":    func(s *identity.Summary) { s.TotalSize = 0 },
	} {
		odd := summary
		change(&odd)
		serving(&odd)
		if _, err := compare(t, other, health); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	serving(nil)
	if _, err := compare(t, dir, health); !errors.Is(err, transfer.ErrNoIdentity) {
		t.Errorf("nothing resident: %v", err)
	}
	answer = "hello"
	bad := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(bad, append(doc, '{'), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{health, bad, "none", "sha256:ab", "", "localhost/", srv.URL} {
		if got, err := compare(t, dir, name); err == nil {
			t.Errorf("%q: %+v", name, got)
		}
	}
	if _, err := compare(t, dir, bad); !errors.As(err, new(*identity.Error)) {
		t.Errorf("bad manifest: %v", err)
	}
	if err := os.WriteFile(filepath.Join(other, "model.safetensors"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := compare(t, dir, other); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("bad folder: %v", err)
	}
}
