package attach_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
)

// document is that of two shards with data and one without: the first on two devices, in every kind of handle.
func document(t testing.TB) attach.Document {
	t.Helper()
	shards := []identity.Shard{
		{Filename: "a.safetensors", Size: 132, Digest: identity.Sum([]byte("a"))},
		{Filename: "b.safetensors", Size: 116, Digest: identity.Sum([]byte("b"))},
		{Filename: "c.safetensors", Size: 100, Digest: identity.Sum([]byte("c"))},
	}
	m, err := identity.New(shards)
	if err != nil {
		t.Fatal(err)
	}
	zero, one := 0, 1
	return attach.Document{
		Version: 1, Type: attach.TypeWeights, Algorithm: identity.AggregateAlgorithm, Aggregate: m.Aggregate,
		Verification: attach.Verification{
			Method: attach.MethodFull, Completed: time.Date(2026, 12, 1, 3, 0, 0, 5, time.UTC), Bytes: 348,
		},
		Devices: []attach.Device{
			{Index: 0, UUID: "GPU-0", PCI: "0000:3b:00.0", Backend: "cuda"}, {Index: 2, UUID: "GPU-2", Backend: "cuda"},
		},
		Shards: []attach.Shard{
			{Name: "a.safetensors", Digest: shards[0].Digest, Size: 132, Data: 32, Device: 0,
				IPC: &attach.IPC{Kind: attach.KindVMM, Descriptor: &zero, Allocation: 4096, Offset: 64},
				Replicas: []attach.Replica{
					{Device: 2, IPC: &attach.IPC{Kind: attach.KindIPC, Handle: make([]byte, 64)}},
				}},
			{Name: "b.safetensors", Digest: shards[1].Digest, Size: 116, Data: 16, Device: 2,
				IPC: &attach.IPC{Kind: attach.KindFile, Descriptor: &one}},
			{Name: "c.safetensors", Digest: shards[2].Digest, Size: 100, Device: 2},
		},
		Tensors: []gpuload.Tensor{
			{Name: "t", DType: "F32", Shape: []uint64{2, 2}, NBytes: 16, Aligned: true},
			{Name: "u", DType: "U8", Shape: []uint64{3}, Offset: 16, NBytes: 3, Aligned: true},
			{Name: "v", DType: "BF16", Shape: []uint64{}, Offset: 19, NBytes: 2},
			{Name: "w", DType: "F64", Shape: []uint64{0, 1 << 52}, Shard: 2, Aligned: true},
		},
		Lease: &attach.Lease{ID: "x", Mode: attach.ModeZeroCopy}, Generation: 1,
	}
}

func encode(t testing.TB, d attach.Document) string {
	t.Helper()
	b, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestParse(t *testing.T) {
	leased := document(t)
	plain := document(t)
	plain.Lease = nil
	for i := range plain.Shards {
		plain.Shards[i].IPC = nil
		for j := range plain.Shards[i].Replicas {
			plain.Shards[i].Replicas[j].IPC = nil
		}
	}
	adapter := document(t)
	adapter.Type, adapter.Adapter = attach.TypeAdapter, &attach.Adapter{Digest: identity.Sum(nil), Name: "style"}
	adapter.Aggregate = identity.Aggregate(identity.Sum([]byte("some base")))
	for name, d := range map[string]attach.Document{"leased": leased, "plain": plain, "adapter": adapter} {
		got, err := attach.Parse([]byte(encode(t, d)))
		if err != nil || !reflect.DeepEqual(got, d) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, d)
		}
	}
}

// TestTwins: a tensor name in two shards means one thing only if the shards are the same file.
func TestTwins(t *testing.T) {
	d := document(t)
	d.Shards[1].Digest, d.Shards[1].Size, d.Shards[1].Data = d.Shards[0].Digest, d.Shards[0].Size, d.Shards[0].Data
	var shards []identity.Shard
	for _, s := range d.Shards {
		shards = append(shards, identity.Shard{Filename: s.Name, Size: uint64(s.Size), Digest: s.Digest})
	}
	m, err := identity.New(shards)
	if err != nil {
		t.Fatal(err)
	}
	d.Aggregate = m.Aggregate
	again := d.Tensors[0]
	again.Shard = 1
	d.Tensors = append(d.Tensors, again)
	if _, err := attach.Parse([]byte(encode(t, d))); err != nil {
		t.Errorf("two shards of the same bytes: %v", err)
	}
}

// TestParseRefuses changes one place of a document that is right.
func TestParseRefuses(t *testing.T) {
	right := encode(t, document(t))
	sum := document(t).Shards[0].Digest.String()
	for _, tt := range []struct{ from, to, says string }{
		{`"generation":1`, `"generation":1,"extra":1`, "extra"},
		{`"mode":"zero_copy"`, `"mode":"zero_copy","expires_s":30`, "expires_s"},
		{`"aligned":false`, `"aligned":false,"x":null`, "x"},
		{`"generation":1`, `"generation":1,"generation":1`, "generation"},
		{`"generation":1`, `"Generation":1`, "Generation"},
		{`"generation":1`, `"generation":1.0`, "generation"},
		{`"generation":1`, `"generation":9007199254740992`, "2^53"},
		{`"generation":1`, `"generation":-1`, "generation"},
		{`"generation":1`, `"generation":"1"`, "generation"},
		{`,"generation":1`, ``, "generation"},
		{`"schema_version":1`, `"schema_version":2`, "schema_version"},
		{`weights.v1`, `weights.v2`, "document_type"},
		{`weights.v1`, `WEIGHTS.v1`, "document_type"},
		{attach.TypeWeights, attach.TypeAdapter, "adapter"},
		{`"verification"`, `"adapter":{"digest":"` + sum + `","name":""},"verification"`, "adapter"},
		{`kiln.base-model-content.v1`, `kiln.base-model-content.v9`, "aggregate_algorithm"},
		{`sha256-full`, `receipt`, "receipt"},
		{`2026-12-01T`, `2026-13-01T`, "completed_at"},
		{`zero_copy`, `drain`, "drain"},
		{sum, strings.ToUpper(sum), "sha256"},
		{sum, strings.TrimPrefix(sum, "sha256:"), "sha256"},
		{sum, identity.Sum([]byte("other")).String(), "that of the shards"},
		{`"size_bytes":132`, `"size_bytes":133`, "that of the shards"},
		{`"a.safetensors"`, `"b.safetensors"`, "b.safetensors"},
		{`"a.safetensors"`, `"../a"`, "../a"},
		{`"data_nbytes":32`, `"data_nbytes":125`, "125 bytes of data"},
		{`"data_nbytes":32`, `"data_nbytes":18`, "its shard has 18"},
		{`"data_nbytes":32`, `"data_nbytes":9007199254740991`, "bytes of data"},
		{`"data_nbytes":16`, `"data_nbytes":0`, "no data"},
		{`"data_nbytes":0`, `"data_nbytes":8`, "c.safetensors"},
		{`"index":2`, `"index":0`, "twice"},
		{`"index":2`, `"index":7`, "not listed"},
		{`"replicas":[{"device":2`, `"replicas":[{"device":0`, "twice"},
		{`"kind":"cuda-ipc"`, `"kind":"hip-ipc"`, "hip-ipc"},
		{`"kind":"cuda-ipc"`, `"kind":"memfd"`, "memfd"},
		{`"kind":"memfd"`, `"kind":"cuda-ipc"`, "cuda-ipc"},
		{`"handle":"AAAA`, `"handle":"AA`, "handle"},
		{`"handle":"AAAA`, `"handle":"`, "61 bytes"},
		{`"allocation_bytes":4096`, `"allocation_bytes":95`, "of 95"},
		{`"allocation_bytes":4096,"offset":64`, `"allocation_bytes":4096,"offset":9007199254740991`, "offset"},
		{`"kind":"memfd",`, `"kind":"memfd","allocation_bytes":1,`, "memfd"},
		{`"descriptor":1`, `"descriptor":0`, "descriptor 0"},
		{`"descriptor":1`, `"descriptor":2`, "descriptor 2"},
		{`"descriptor":1`, `"descriptor":4294967296`, "descriptor"},
		{`"lease":{"id":"x","mode":"zero_copy"}`, `"lease":null`, "lease"},
		{`"id":"x"`, `"id":""`, "lease"},
		{`"ipc":{"kind":"memfd","descriptor":1,"offset":0}`, `"ipc":null`, "b.safetensors"},
		{`"dtype":"F32"`, `"dtype":"F33"`, "F33"},
		{`"dtype":"F32"`, `"dtype":"F64"`, "16 bytes for F64"},
		{`"shape":[2,2]`, `"shape":[2,3]`, "16 bytes for F32"},
		{`"shape":[2,2]`, `"shape":[4294967296,4294967296]`, "too large"},
		{`"shape":[2,2]`, `"shape":null`, "shape"},
		{`"offset":16,"nbytes":3`, `"offset":30,"nbytes":3`, "its shard has 32"},
		{`"offset":16,"nbytes":3`, `"offset":9007199254740991,"nbytes":3`, "its shard has 32"},
		{`"aligned":false`, `"aligned":true`, "aligned"},
		{`"name":"w"`, `"name":"t"`, "which differ"},
		{`"name":"u"`, `"name":"t"`, "twice"},
		{`"shard":2`, `"shard":3`, "shard 3 of 3"},
		{`{"schema`, `[{"schema`, ""}, {`"generation":1}`, `"generation":1} 1`, ""}, {`"generation":1}`, `"generation":1`, ""},
	} {
		text := strings.Replace(right, tt.from, tt.to, 1)
		if text == right {
			t.Errorf("%s is not in the document", tt.from)
		}
		d, err := attach.Parse([]byte(text))
		if !errors.Is(err, attach.ErrDocument) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s instead of %s: %+v, %v; want an error about %q", tt.to, tt.from, d, err, tt.says)
		}
	}
}

// FuzzParse checks that what is accepted is the same when it is written and read again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(encode(f, document(f))))
	f.Add([]byte(`{"schema_version":1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := attach.Parse(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Errorf("%q is not one line", err)
			}
			return
		}
		again, err := attach.Parse([]byte(encode(t, d)))
		if err != nil || !reflect.DeepEqual(again, d) {
			t.Errorf("%+v is %+v when read again: %v", d, again, err)
		}
	})
}
