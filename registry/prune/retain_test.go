package prune_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/prune"
)

// rig is a pruner over an index.
type rig struct {
	t   *testing.T
	ix  *index.Index
	n   uint64
	was time.Time
}

func newRig(t *testing.T) *rig {
	kv, err := new(memkv.Disk).Open(1)
	if err != nil {
		t.Fatal(err)
	}
	ix, err := index.New(t.Context(), kv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ix.Close() })
	return &rig{t: t, ix: ix, was: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
}

// put puts a manifest, later than the one before.
func (r *rig) put(rec index.Record, facts *api.Facts) identity.Digest {
	r.t.Helper()
	r.n++
	body := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":`+
		`{"mediaType":"application/vnd.oci.empty.v1+json","digest":"%s","size":2},"layers":[],"annotations":{"n":"%d"}}`,
		identity.Sum([]byte("{}")), r.n)
	if facts != nil {
		b, err := json.Marshal(facts)
		if err != nil {
			r.t.Fatal(err)
		}
		rec.Facts = b
	}
	rec.MediaType, rec.Digest, rec.Size = "application/vnd.oci.image.manifest.v1+json", identity.Sum(body), int64(len(body))
	rec.Seq, rec.Created = r.n, r.was.Add(time.Duration(r.n)*time.Second)
	rec.State, rec.Evidence = api.ContentIncomplete, api.EvidenceNone
	if err := r.ix.Apply(r.t.Context(), index.PutManifest{Record: rec, Manifest: body}); err != nil {
		r.t.Fatal(err)
	}
	return rec.Digest
}

// retain returns which manifests would go, and why each of the others stays.
func (r *rig) retain(t prune.Retention) (gone []identity.Digest, kept map[identity.Digest]string) {
	r.t.Helper()
	p := prune.Pruner{
		Index: r.ix, Now: time.Now,
		Level: func(context.Context) error { return nil },
		Hold:  func(_ context.Context, _ string, do func() error) error { return do() },
	}
	t.DryRun, kept = true, map[identity.Digest]string{}
	_, err := p.Retain(r.t.Context(), access.Everyone(), t, func(m prune.Manifest) error {
		if m.Kept == "" {
			gone = append(gone, m.Digest)
		} else {
			kept[m.Digest] = m.Kept
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return gone, kept
}

// The name of an artifact is the one in its documents, and what the documents of others link to stays.
func TestRetainByDocuments(t *testing.T) {
	r := newRig(t)
	checkpoint := func(name, weights string) identity.Digest {
		return r.put(index.Record{Repo: "team/run", Kind: api.KindCheckpoint, Name: name},
			&api.Facts{Name: name, Checkpoint: &api.CheckpointFacts{Weights: identity.Sum([]byte(weights))}})
	}
	link := func(repo string, kind api.Kind, relation string, target identity.Digest) identity.Digest {
		return r.put(index.Record{Repo: repo, Kind: kind, Links: []index.Link{{Relation: relation, Target: target}}}, nil)
	}
	red := []identity.Digest{checkpoint("red", "a"), checkpoint("red", "b"), checkpoint("red", "c"), checkpoint("red", "d")}
	blue := []identity.Digest{checkpoint("blue", "e"), checkpoint("blue", "f")}
	adapter := link("lab/adapters", api.KindAdapter, api.RelationParent, identity.Sum([]byte("a")))
	statement := link("lab/words", api.KindStatement, api.RelationStatement, red[1])
	link("team/run", api.KindCheckpoint, api.RelationAdapter, identity.Sum([]byte("e"))) // of their own kind
	gone, kept := r.retain(prune.Retention{Repos: []string{"team/run"}, Kind: api.KindCheckpoint, Keep: 1})
	if want := []identity.Digest{blue[0], red[2]}; !slices.Equal(gone, want) {
		t.Errorf("%v go, want %v", gone, want)
	}
	for d, why := range map[identity.Digest]string{
		red[0]: "adapter lab/adapters@" + adapter.String(), red[1]: "statement lab/words@" + statement.String(),
		red[3]: "among the newest 1", blue[1]: "among the newest 1",
	} {
		if !strings.HasPrefix(kept[d], why) {
			t.Errorf("%s: %q, want %q", d, kept[d], why)
		}
	}
}
