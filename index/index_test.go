package index_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

// epoch is when the tests' first manifest was accepted.
var epoch = time.Date(2024, 5, 1, 12, 0, 0, 123456789, time.UTC)

// onEngines runs a test on an empty index of each engine.
func onEngines(t *testing.T, test func(t *testing.T, ix *index.Index)) {
	t.Run("bolt", func(t *testing.T) {
		kv, err := boltkv.Open(filepath.Join(t.TempDir(), "index.db"), boltkv.Options{})
		if err != nil {
			t.Fatal(err)
		}
		test(t, opened(t, kv))
	})
	t.Run("memory", func(t *testing.T) {
		kv, err := new(memkv.Disk).Open(1)
		if err != nil {
			t.Fatal(err)
		}
		test(t, opened(t, kv))
	})
}

func opened(t *testing.T, kv index.KV) *index.Index {
	t.Helper()
	ix, err := index.New(t.Context(), kv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ix.Close(); err != nil {
			t.Error(err)
		}
	})
	return ix
}

func apply(t *testing.T, ix *index.Index, ops ...index.Op) {
	t.Helper()
	if err := ix.Apply(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
}

// adapter is a manifest of an adapter; text makes its bytes.
func adapter(repo, text string, seq uint64, a identity.Aggregate) index.PutManifest {
	return index.PutManifest{
		Record: index.Record{
			Repo: repo, Digest: identity.Sum([]byte(text)), MediaType: "application/vnd.oci.image.manifest.v1+json",
			Size: int64(len(text)), ArtifactType: api.ArtifactTypeAdapter, Kind: api.KindAdapter, Aggregate: a,
			Evidence: api.EvidenceAsserted, Annotations: map[string]string{"text": text, "empty": ""},
			Seq: seq, Created: epoch.Add(time.Duration(seq) * time.Second),
		},
		Manifest: []byte(text),
		Refers:   []identity.Digest{identity.Sum([]byte("blob of " + text)), identity.Sum([]byte("config"))},
	}
}

func TestSmoke(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx := t.Context()
		agg := identity.Aggregate(identity.Sum([]byte("base")))
		seq, err := ix.NextSeq(ctx, "a/b")
		if err != nil {
			t.Fatal(err)
		}
		p := adapter("a/b", "one", seq, agg)
		apply(t, ix, p, index.PutTag{Repo: "a/b", Tag: "v1", Digest: p.Digest, Seq: seq}, index.Checkpoint{Position: 7})
		r, b, err := ix.Manifest(ctx, "a/b", "v1")
		if err != nil || string(b) != "one" || r.Digest != p.Digest {
			t.Fatal(r, b, err)
		}
		n := 0
		for r, err := range ix.Find(ctx, index.Query{Aggregate: agg}) {
			if err != nil || r.Digest != p.Digest {
				t.Fatal(err, r)
			}
			n++
		}
		if n != 1 {
			t.Fatal(n)
		}
		if _, err := ix.Get(ctx, "a/b", "v2"); !errors.Is(err, index.ErrNotFound) {
			t.Fatal(err)
		}
	})
}
