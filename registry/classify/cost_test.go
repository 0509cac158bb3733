package classify_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// disk is what classification reads of a store on disk.
type disk struct{ *fsstore.Store }

func (d disk) Open(ctx context.Context, digest identity.Digest, off, n int64) (io.ReadCloser, error) {
	i, err := d.Stat(ctx, digest)
	if err != nil {
		return nil, err
	}
	return d.Store.Open(ctx, i, off, n)
}

// baseOf puts so many shards into a store, and returns the manifest of their base.
func baseOf(b *testing.B, store blobstore.Store, shards int) []byte {
	type desc = map[string]any
	layers := []desc{}
	for i := range shards {
		header := fmt.Appendf(nil, `{"t%06d":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}`, i)
		text := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), "12345678"...)
		d := identity.Sum(text)
		put(b, store, d, text)
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, shards)
		layers = append(layers, desc{"mediaType": "application/vnd.cncf.model.weight.v1.raw", "digest": d.String(),
			"size": len(text), "annotations": desc{"org.cncf.model.filepath": name, "org.opencontainers.image.title": name}})
	}
	text, err := json.Marshal(desc{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": layers[0], "layers": layers})
	if err != nil {
		b.Fatal(err)
	}
	return text
}

func put(b *testing.B, store blobstore.Store, d identity.Digest, text []byte) {
	u, err := store.Create(b.Context(), d, int64(len(text)))
	if err == nil {
		_, err = u.Append(b.Context(), 0, bytes.NewReader(text))
	}
	if err == nil {
		_, err = u.Commit(b.Context(), d)
	}
	if err != nil {
		b.Fatal(err)
	}
}

// What a base costs: the reading of its manifest, and what classification adds to that, of blobs that are only on disk and
// of those that came to this process.
func BenchmarkBase(b *testing.B) {
	for _, shards := range []int{1, 64, identity.MaxShards} {
		dir := filepath.Join(b.TempDir(), "data")
		if err := fsstore.Init(dir); err != nil {
			b.Fatal(err)
		}
		store, err := fsstore.Open(dir, fsstore.Options{})
		if err != nil {
			b.Fatal(err)
		}
		defer store.Close()
		text := baseOf(b, store, shards)
		m, err := classify.Parse("", text)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("parse/shards=%d", shards), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := classify.Parse("", text); err != nil {
					b.Fatal(err)
				}
			}
		})
		var heads classify.Heads
		for _, l := range m.Layers {
			var head classify.Head
			r, err := disk{store}.Open(b.Context(), l.Digest, 0, -1)
			if err == nil {
				_, err = io.ReadAll(head.Watch(r))
			}
			if err != nil {
				b.Fatal(err)
			}
			r.Close()
			heads.Note(l.Digest, l.Size, &head)
		}
		for name, blobs := range map[string]classify.Blobs{"read": disk{store}, "seen": heads.Over(disk{store})} {
			b.Run(fmt.Sprintf("classify/%s/shards=%d", name, shards), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					fresh := m
					fresh.Layers = slices.Clone(m.Layers) // whose files are found again
					if a, err := classify.Classify(b.Context(), blobs, fresh); err != nil || len(a.Shards.Shards) != shards {
						b.Fatal(a.State, err)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("keep/shards=%d", shards), func(b *testing.B) {
			b.ReportAllocs()
			a, err := classify.Classify(b.Context(), disk{store}, m)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := (classify.Finding{Artifact: a}).Encode(m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
