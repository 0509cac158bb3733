package registry_test

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// Whoever asks for a base is told which of its shards can't be had now.
func TestUnavailableShards(t *testing.T) {
	s := newServer(t)
	agg, _ := s.base("team/model", "v1", "m", "1", "2", "2", "3")
	s.base("lab/copy", "v1", "x", "3", "2", "1", "2")
	other, _ := s.base("team/other", "v1", "m", "4")
	adapter := s.manifest("lab/adapters", nil, map[string]any{"artifactType": api.ArtifactTypeAdapter,
		"annotations": map[string]string{api.AnnotationAggregate: agg.String()}})
	if a := s.put("lab/adapters", "v1", adapter); a.status != 201 {
		t.Fatal(a)
	}
	want := func(when string, shards ...identity.Digest) {
		t.Helper()
		base := get[api.Base](s, api.PathBase(agg))
		list := get[api.ArtifactList](s, api.PathArtifacts(agg))
		bases := get[api.BaseList](s, api.PathBases)
		for _, got := range [][]identity.Digest{base.UnavailableShards, list.UnavailableShards} {
			got = slices.Clone(got)
			slices.SortFunc(got, identity.Digest.Compare)
			if !slices.Equal(got, shards) {
				t.Errorf("%s: %v, want %v", when, got, shards)
			}
		}
		if len(list.Artifacts) != 3 || len(bases.Bases) != 2 || bases.UnavailableShards[agg] != len(shards) ||
			bases.UnavailableShards[other] != 0 {
			t.Errorf("%s: %+v, %+v", when, list, bases)
		}
		raw := string(s.want(200, "GET", api.PathBases, nil).body)
		if len(shards) > 0 != strings.Contains(raw, `"unavailable_shards":{"`+agg.String()+`":`) {
			t.Errorf("%s: %s", when, raw)
		}
		if get[api.Base](s, api.PathBase(other)).UnavailableShards != nil {
			t.Errorf("%s: another base lacks shards too", when)
		}
	}
	want("all there")
	damaged, missing := identity.Sum(safetensors("1")), identity.Sum(safetensors("2"))
	cut(t, findBlob(t, s.dir, damaged), []byte("y"))
	s.remove(safetensors("2"))
	if did, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil || did.Damaged+did.Missing != 2 {
		t.Fatalf("%+v, %v", did, err)
	}
	both := []identity.Digest{damaged, missing}
	slices.SortFunc(both, identity.Digest.Compare)
	want("scrubbed", both...)
	s.blob("team/model", safetensors("1"))
	want("one is back", missing)
	s.blob("team/model", safetensors("2"))
	want("both are back")
}

// counted is a store that counts how often its quarantine is listed.
type counted struct {
	blobstore.Store
	blobstore.Quarantine
	lists atomic.Int64
}

func (c *counted) Aside(ctx context.Context) iter.Seq2[blobstore.AsideInfo, error] {
	c.lists.Add(1)
	return c.Quarantine.Aside(ctx)
}

// The quarantine is listed again only when something in it may have changed, not after each push.
func TestQuarantineIsSeldomListed(t *testing.T) {
	s := newServer(t)
	store := new(counted)
	s.restart(func(c *registry.Config) {
		store.Store, store.Quarantine = c.Store, c.Store.(blobstore.Quarantine)
		c.Store = store
	})
	agg, _ := s.base("team/model", "v1", "m", "1", "2")
	cut(t, findBlob(t, s.dir, identity.Sum(safetensors("1"))), []byte("y"))
	if _, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil {
		t.Fatal(err)
	}
	want := func(bad, lists int) {
		t.Helper()
		for i := range 5 {
			s.blob("team/model", fmt.Append(nil, i))
			if n := len(get[api.Base](s, api.PathBase(agg)).UnavailableShards); n != bad || s.reg.Health().Quarantined != bad {
				t.Errorf("%d, want %d", n, bad)
			}
		}
		if n := store.lists.Load(); n != int64(lists) {
			t.Errorf("listed %d times, want %d", n, lists)
		}
	}
	want(1, 1)
	s.blob("team/model", safetensors("1"))
	want(0, 2)
}
