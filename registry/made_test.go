package registry_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// files uploads the files in a folder as oras does: as plain layers with titles.
func (s *server) files(repo, dir string) (layers []desc) {
	s.t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		layers = append(layers, s.titled(repo, filepath.ToSlash(name), b))
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return layers
}

// titled uploads a file and returns its descriptor, as oras makes it.
func (s *server) titled(repo, name string, b []byte) desc {
	s.t.Helper()
	return desc{"mediaType": v1.MediaTypeImageLayer, "digest": s.blob(repo, b).String(), "size": len(b),
		"annotations": map[string]string{v1.AnnotationTitle: name}}
}

// checkpoint uploads the files of a checkpoint of an adapter of that name, of no known base.
func (s *server) checkpoint(repo, name string, seed byte) []desc {
	s.t.Helper()
	dir := filepath.Join(s.t.TempDir(), "a.kiln-checkpoint")
	path := filepath.Join(dir, documents.CheckpointFile)
	err := testartifact.Checkpoint(dir, seed, nil, false)
	b, rerr := os.ReadFile(path)
	b = bytes.Replace(b, []byte(`"adapter_name":"demo"`), []byte(`"adapter_name":"`+name+`"`), 1)
	if err := errors.Join(err, rerr, os.WriteFile(path, b, 0o644)); err != nil {
		s.t.Fatal(err)
	}
	return s.files(repo, dir)
}

// made puts a manifest that must be taken.
func (s *server) made(repo, tag, artifactType string, layers []desc, more map[string]any) identity.Digest {
	s.t.Helper()
	all := map[string]any{}
	if artifactType != "" {
		all["artifactType"] = artifactType
	}
	for k, v := range more {
		all[k] = v
	}
	m := s.manifest(repo, layers, all)
	if a := s.put(repo, tag, m); a.status != 201 {
		s.t.Fatalf("put %s:%s: %v", repo, tag, a)
	}
	return identity.Sum(m)
}

// shardsOf is the shard manifest of the base that server.base pushes.
func shardsOf(t testing.TB, s *server, a identity.Aggregate) *identity.Manifest {
	t.Helper()
	m := get[identity.Manifest](s, api.PathBaseManifest(a))
	return &m
}

// What documents say is found when a manifest is put, and stays known when the documents are gone and the index is made
// anew.
func TestWhatDocumentsSayOutlivesThem(t *testing.T) {
	s := newServer(t)
	a, _ := s.base("team/model", "v1", "model", "1")
	base := shardsOf(t, s, a)
	dir := filepath.Join(s.t.TempDir(), "sql")
	check := filepath.Join(s.t.TempDir(), "a.kiln-checkpoint")
	err := errors.Join(testartifact.Adapter(dir, 1, base), testartifact.Checkpoint(check, 1, base, true))
	if err != nil {
		t.Fatal(err)
	}
	eval := testartifact.Eval("e1", "sql", base)
	adapter := s.made("lab/a", "v1", "", s.files("lab/a", dir), nil)
	s.made("lab/b", "v1", "", s.files("lab/b", check), nil)
	s.made("lab/c", "v1", api.ArtifactTypeEval, []desc{s.titled("lab/c", "e1.json", eval)}, nil)
	list := get[api.ArtifactList](s, api.PathArtifacts(a))
	want := map[api.Kind]api.Evidence{"adapter": "document", "checkpoint": "aggregate-only", "eval": "document", "base": ""}
	for _, x := range list.Artifacts {
		if x.Binding.Evidence != want[x.Kind] || x.Kind != api.KindBase && (!x.Binding.Held || x.Binding.Aggregate != a) {
			t.Errorf("%+v", x)
		}
		delete(want, x.Kind)
	}
	if len(want) > 0 {
		t.Errorf("not found: %v in %+v", want, list)
	}
	before := s.reindexed("with everything there")
	s.remove(eval)
	if err := fs.WalkDir(os.DirFS(dir), ".", func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			b, err := os.ReadFile(filepath.Join(dir, path))
			s.remove(b)
			return err
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if after := s.reindexed("without the documents"); after != before {
		t.Error("what was found is gone")
	}
	rec, err := s.ix.Get(t.Context(), "lab/a", adapter.String())
	if err != nil || rec.Name != "sql" || len(rec.Facts) == 0 || len(rec.Links) != 2 {
		t.Errorf("%+v, %v", rec, err)
	}
}

// A manifest whose documents disagree is refused, and nothing of it is there.
func TestDisagreementIsRefused(t *testing.T) {
	s := newServer(t)
	a, base := s.base("team/model", "v1", "model", "1")
	b, _ := s.base("team/model", "v2", "model", "2")
	dir := filepath.Join(s.t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, shardsOf(t, s, b)); err != nil {
		t.Fatal(err)
	}
	layers := s.files("team/model", dir)
	subject := map[string]any{"subject": desc{"mediaType": manifestType, "digest": base.String(), "size": 1}}
	m := s.manifest("team/model", layers, subject)
	got := s.put("team/model", "sql", m)
	var e api.Errors
	if err := json.Unmarshal(got.body, &e); err != nil || got.status != 400 || len(e.Errors) != 1 {
		t.Fatal(got)
	}
	detail, _ := e.Errors[0].Detail.(map[string]any)
	want := map[string]any{"reason": "AGGREGATE_CONFLICT", "claimed": a.String(), "derived": b.String(),
		"claimed_at": "subject " + base.String(), "derived_at": "adapter_manifest.json $.base_weight_shard_manifest"}
	if !maps.Equal(detail, want) || e.Errors[0].Code != api.CodeManifestInvalid {
		t.Errorf("%+v", e.Errors[0])
	}
	s.want(404, "GET", api.PathManifest("team/model", "sql"), nil)
	if list := get[api.ArtifactList](s, api.PathArtifacts(b)+"?kind=adapter"); len(list.Artifacts) > 0 {
		t.Errorf("%+v", list)
	}
}

// A manifest of the same files, of which it packs one, is another packaging and says so, also in an index that is made
// anew: whoever takes the newest of each packaging need not take it.
func TestPackedPackaging(t *testing.T) {
	s := newServer(t)
	shard := s.layer("team/model", api.MediaTypeWeight, "model.safetensors", safetensors("1"))
	var all []identity.Digest
	for i, mediaType := range []string{"application/json", "application/vnd.x+zstd", "application/octet-stream"} {
		config := s.layer("team/model", mediaType, "config.json", []byte("{}"))
		all = append(all, s.made("team/model", fmt.Sprint("v", i), api.ArtifactTypeBase, []desc{shard, config}, nil))
	}
	for range 2 {
		list := get[api.BaseList](s, api.PathBases)
		base := get[api.Base](s, api.PathBase(list.Bases[0].Aggregate))
		got := map[identity.Digest]api.Packaging{}
		for _, p := range base.Packagings {
			for _, m := range p.Manifests {
				got[m.Digest] = p
			}
		}
		plain, packed := got[all[0]], got[all[1]]
		if len(base.Packagings) != 2 || plain.ID != got[all[2]].ID || len(plain.Packed) > 0 ||
			!slices.Equal(packed.Packed, []string{"config.json"}) {
			t.Errorf("%+v", base)
		}
		if l := get[api.Lineage](s, api.PathLineage(all[1])); l.Artifact.Facts == nil ||
			!slices.Equal(l.Artifact.Facts.Packed, packed.Packed) {
			t.Errorf("%+v", l)
		}
		if err := s.reg.Reindex(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
