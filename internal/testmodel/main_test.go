package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestWrite checks that the folder is what a loader expects: each shard's header covers its data without a gap, and the
// index names every tensor and every shard.
func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	if err := run([]string{"-size", "1MB", "-shards", "3", dir}); err != nil {
		t.Fatal(err)
	}
	var index shardIndex
	readJSON(t, filepath.Join(dir, "model.safetensors.index.json"), &index)
	shards, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(shards) != 3 {
		t.Fatalf("%d shards, %v", len(shards), err)
	}
	var total int64
	for _, path := range shards {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		n := binary.LittleEndian.Uint64(data)
		var header map[string]struct {
			Shape   [2]int64 `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(data[8:8+n], &header); err != nil {
			t.Fatal(err)
		}
		delete(header, "__metadata__")
		var covered int64
		for name, e := range header {
			if e.Offsets[1]-e.Offsets[0] != 2*e.Shape[0]*e.Shape[1] {
				t.Errorf("%s: %+v does not fit its shape", name, e)
			}
			if index.WeightMap[name] != filepath.Base(path) {
				t.Errorf("index says %s is in %q", name, index.WeightMap[name])
			}
			covered += e.Offsets[1] - e.Offsets[0]
		}
		if covered != int64(len(data))-8-int64(n) || n%8 != 0 {
			t.Errorf("%s: tensors cover %d of %d bytes, header %d", path, covered, len(data), n)
		}
		total += covered
	}
	if total != index.Metadata["total_size"] || total < 990_000 || total > 1_000_000 {
		t.Errorf("total %d, index says %d", total, index.Metadata["total_size"])
	}
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestSame pins the bytes: the same flags give the same model, another seed another one.
func TestSame(t *testing.T) {
	sums := map[string][32]byte{}
	for name, seed := range map[string]string{"a": "1", "b": "1", "c": "2"} {
		dir := filepath.Join(t.TempDir(), name)
		if err := run([]string{"-size", "100KB", "-shards", "1", "-seed", seed, dir}); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, "model-00001-of-00001.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		sums[name] = sha256.Sum256(data)
	}
	if sums["a"] != sums["b"] || sums["a"] == sums["c"] {
		t.Errorf("sums %x", sums)
	}
}

func TestSize(t *testing.T) {
	for in, want := range map[string]int64{
		"300MB": 3e8, "1GiB": 1 << 30, "7": 7, "0": 0, "-1KB": 0, "1TB": 0, "9999999999GB": 0,
	} {
		if n, err := parseSize(in); n != want || (err == nil) != (want > 0) {
			t.Errorf("%s: %d, %v", in, n, err)
		}
	}
}
