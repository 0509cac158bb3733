package registry_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// dial returns a client of the server.
func (s *server) dial(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.New(strings.TrimPrefix(s.http.URL, "http://"), client.Options{Token: s.token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// The same files are found to be the same thing, whichever tool pushed them.
func TestWhicheverToolPushed(t *testing.T) {
	s := newServer(t)
	a, _ := s.base("team/model", "v1", "model", "1")
	base := shardsOf(t, s, a)
	root := t.TempDir()
	adapter, check := filepath.Join(root, "sql"), filepath.Join(root, "a"+documents.CheckpointSuffix)
	plain, eval := filepath.Join(root, "plain"), filepath.Join(root, "e1.json")
	receipt := filepath.Join(root, "train_receipt.json")
	err := errors.Join(testartifact.Adapter(adapter, 1, base), testartifact.Checkpoint(check, 1, base, false),
		testartifact.PEFT(plain, 2), os.WriteFile(eval, testartifact.Eval("e1", "sql", base), 0o644),
		os.WriteFile(receipt, testartifact.Receipt("sql", identity.Sum(nil), base), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	c := s.dial(t)
	for kind, path := range map[api.Kind]string{
		api.KindAdapter: adapter, api.KindCheckpoint: check, api.KindEval: eval, api.KindReceipt: receipt, "plain": plain,
	} {
		is := kind
		if kind == "plain" {
			is = api.KindAdapter
		}
		read, err := artifact.Read(t.Context(), is, path, artifact.Options{})
		if err != nil {
			t.Fatal(err)
		}
		repo := "tools/" + string(kind)
		ref := client.Reference{Host: c.Host(), Repo: repo, Tag: "kiln"}
		if _, err := read.Push(t.Context(), c, ref, nil); err != nil {
			t.Fatal(err)
		}
		layers := s.files(repo, path)
		if is == api.KindEval || is == api.KindReceipt {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			layers = []desc{s.titled(repo, filepath.Base(path), b)}
		}
		var more map[string]any
		if is == api.KindEval { // of which nothing else says that it is one
			more = map[string]any{"annotations": map[string]string{api.AnnotationKind: "eval"}}
		}
		s.made(repo, "oras", "application/vnd.unknown.artifact.v1", layers, more)
		modctl := slices.Clone(layers)
		for i, l := range modctl {
			l = maps.Clone(l)
			l["mediaType"] = api.MediaTypeDoc
			l["annotations"] = map[string]string{
				api.AnnotationFilepath: l["annotations"].(map[string]string)[v1.AnnotationTitle]}
			modctl[i] = l
		}
		s.made(repo, "modctl", api.ArtifactTypeBase, modctl, map[string]any{"annotations": map[string]string{
			api.AnnotationKind: string(is)}})
		want, err := s.ix.Get(t.Context(), repo, "kiln")
		if err != nil || want.Kind != is || len(want.Facts) == 0 {
			t.Fatalf("%+v, %v", want, err)
		}
		for _, tag := range []string{"oras", "modctl"} {
			got, err := s.ix.Get(t.Context(), repo, tag)
			if err != nil || got.Kind != want.Kind || got.Aggregate != want.Aggregate || got.Evidence != want.Evidence ||
				!bytes.Equal(got.Facts, want.Facts) || !reflect.DeepEqual(got.Links, want.Links) || got.Name != want.Name {
				t.Errorf("%s by %s: %+v, want %+v, %v", kind, tag, got, want, err)
			}
		}
	}
}

// The field cases of adapters, pushed by a tool that checks nothing. What makes a folder a usable adapter is checked by
// kiln-push; the registry refuses what contradicts itself.
func TestAdapterCases(t *testing.T) {
	s := newServer(t)
	dir := testenv.FieldCases(t)
	facts := map[string]*api.AdapterFacts{}
	for name, refused := range map[string]bool{
		"AD-01": false, "AD-02": false, "AD-03": false, "AD-05": false, "AD-07": false, "AD-16": false, "AD-21": false,
		"AD-17/round1": false, "AD-17/round2": false, "AD-22": true, "AD-23": true,
	} {
		repo := strings.ToLower("cases/" + name)
		m := s.manifest(repo, s.files(repo, filepath.Join(dir, name)), nil)
		a := s.put(repo, "v1", m)
		if (a.status == 400) != refused || a.status != 201 && a.code() != api.CodeManifestInvalid {
			t.Errorf("%s: %v", name, a)
			continue
		}
		if refused {
			s.want(404, "GET", api.PathManifest(repo, "v1"), nil)
			continue
		}
		l := get[api.Lineage](s, api.PathLineage(identity.Sum(m)))
		hasManifest := slices.Contains([]string{"AD-01", "AD-07", "AD-16", "AD-21"}, name)
		want := api.EvidenceNone
		if hasManifest {
			want = api.EvidenceDocument
		}
		if l.Artifact.Binding.Evidence != want || l.Artifact.Binding.Held || l.Artifact.Facts.Legacy {
			t.Errorf("%s: %+v", name, l.Artifact)
		}
		facts[name] = l.Artifact.Facts.Adapter
	}
	if f := facts["AD-07"]; f == nil || !f.DoRA {
		t.Errorf("AD-07: %+v", f)
	}
	if f := facts["AD-05"]; f == nil || !strings.Contains(f.BaseText, "4bit") {
		t.Errorf("AD-05: %+v", f)
	}
	if f := facts["AD-21"]; f == nil || len(f.Modules) == 0 {
		t.Errorf("AD-21: %+v", f)
	}
}

// IX-10: what was made from the bytes that a tag named before is not shown for those that it names now.
func TestTagOfOtherBytes(t *testing.T) {
	s := newServer(t)
	old, _ := s.base("team/model", "v1", "model", "1")
	dir := filepath.Join(t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, shardsOf(t, s, old)); err != nil {
		t.Fatal(err)
	}
	s.made("lab/a", "v1", "", s.files("lab/a", dir), nil)
	now, _ := s.base("team/model", "v1", "model", "2")
	for a, want := range map[identity.Aggregate]int{old: 1, now: 0} {
		if list := get[api.ArtifactList](s, api.PathArtifacts(a)+"?kind=adapter"); len(list.Artifacts) != want {
			t.Errorf("%s: %+v", a, list)
		}
	}
}

// The client asks what the server answers.
func TestClientAsks(t *testing.T) {
	f := grow(newServer(t))
	c, ctx := f.dial(t), t.Context()
	list, err := c.Made(ctx, f.a, client.Filter{Kind: api.KindAdapter, Name: "sql", Binding: api.EvidenceDocument,
		Repo: "team/adapters", Since: time.Now().Add(-time.Hour)}, "", 10)
	if err != nil || len(list.Artifacts) != 1 || list.Artifacts[0].Digest != f.sql {
		t.Errorf("%+v, %v", list, err)
	}
	list, err = c.Unbound(ctx, client.Filter{}, "", 1)
	if err != nil || len(list.Artifacts) != 1 || list.Next == "" {
		t.Errorf("%+v, %v", list, err)
	}
	list, err = c.Unbound(ctx, client.Filter{}, list.Next, 10)
	if err != nil || len(list.Artifacts) != 1 || list.Next != "" {
		t.Errorf("%+v, %v", list, err)
	}
	l, err := c.Lineage(ctx, f.plain, "lab/unbound", "", 0)
	if err != nil || l.Artifact.Repository != "lab/unbound" || l.Artifact.Binding.Evidence != api.EvidenceNone {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := c.Lineage(ctx, identity.Sum([]byte("none")), "", "", 0); !errors.Is(err, api.ErrManifestUnknown) {
		t.Error(err)
	}
	rows, err := c.Evals(ctx, f.a)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for lines := bufio.NewScanner(rows); lines.Scan(); n++ {
		var row api.EvalRow
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil || row.Manifest == nil {
			t.Errorf("%s, %v", lines.Bytes(), err)
		}
	}
	if err := rows.Close(); err != nil || n != 3 {
		t.Errorf("%d rows, %v", n, err)
	}
	got, err := c.Compatibility(ctx, trained(f.sql.String(), &api.Side{Aggregate: f.a}))
	if err != nil || got.Verdict != api.VerdictYes {
		t.Errorf("%+v, %v", got, err)
	}
	diff, err := c.Compare(ctx, api.Side{Aggregate: f.a}, api.Side{Aggregate: f.b})
	if err != nil || diff.Same || len(diff.DerivedFrom) != 1 {
		t.Errorf("%+v, %v", diff, err)
	}
}
