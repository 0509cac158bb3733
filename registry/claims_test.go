package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/registry"
)

// plain is the manifest of an adapter without documents, about a subject.
func (s *server) plain(repo, seed string, subject identity.Digest, notes map[string]string) []byte {
	s.t.Helper()
	l := s.layer(repo, api.MediaTypeWeight, documents.AdapterWeightsFile, safetensors(seed))
	return s.manifest(repo, []desc{l}, map[string]any{"annotations": notes,
		"subject": desc{"mediaType": manifestType, "digest": subject.String(), "size": 1}})
}

// binding is what a manifest is bound to.
func (s *server) binding(repo string, m []byte) api.Binding {
	s.t.Helper()
	b := get[api.Lineage](s, api.PathLineage(identity.Sum(m))+"?repo="+repo).Artifact.Binding
	return api.Binding{Aggregate: b.Aggregate, Evidence: b.Evidence}
}

// What an artifact is made from is the same whether it or its base comes first, and in the order of the refs.
func TestArtifactBeforeItsBase(t *testing.T) {
	s := newServer(t)
	agg, base := s.base("src/model", "v1", "m", "1")
	body := s.want(200, "GET", api.PathManifest("src/model", "v1"), nil).body
	s.want(202, "DELETE", api.PathManifest("src/model", base.String()), nil) // so that nobody has it
	other, _ := s.base("src/other", "v1", "o", "2")
	asserted := api.Binding{Aggregate: agg, Evidence: api.EvidenceAsserted}
	s.layer("a", api.MediaTypeWeight, "m-0.safetensors", safetensors("1"))
	s.made("a", "bare", "", s.checkpoint("a", "bare", 1), nil) // of another base, and no subject

	var early [][]byte
	for i := range 3 {
		m := s.plain("a", fmt.Sprint("early", i), base, nil)
		early = append(early, m)
		if a := s.put("a", fmt.Sprint("early", i), m); a.status != 201 {
			t.Fatal(a)
		}
		if got := s.binding("a", m); got != (api.Binding{Evidence: api.EvidenceNone}) {
			t.Errorf("%+v", got)
		}
	}
	says := s.plain("a", "says", base, map[string]string{api.AnnotationAggregate: other.String()})
	signature := s.manifest("a", nil, map[string]any{"artifactType": "application/vnd.example.signature",
		"subject": desc{"mediaType": manifestType, "digest": base.String(), "size": 1}})
	for ref, m := range map[string][]byte{"says": says, "signature": signature} {
		if a := s.put("a", ref, m); a.status != 201 {
			t.Fatal(a)
		}
	}
	s.want(202, "DELETE", api.PathManifest("a", identity.Sum(early[2]).String()), nil)
	if a := s.put("a", "base", body); a.status != 201 {
		t.Fatal(a)
	}
	for _, m := range early[:2] {
		if got := s.binding("a", m); got != asserted {
			t.Errorf("%+v", got)
		}
	}
	s.want(404, "GET", api.PathManifest("a", identity.Sum(early[2]).String()), nil)
	list := get[api.ArtifactList](s, api.PathArtifacts(agg)+"?repo=a&kind=adapter")
	if len(list.Artifacts) != 2 || list.Artifacts[0].Tags[0] != "early1" || list.Artifacts[1].Tags[0] != "early0" {
		t.Errorf("%+v", list.Artifacts)
	}
	want := s.export()
	if s.reindexed("base after its artifacts") != want {
		t.Error("it changed")
	}
	for range 2 { // the base comes again, and changes nothing; then it is gone, and nothing is forgotten
		for _, m := range [][]byte{body, early[0], early[1]} {
			if a := s.put("a", identity.Sum(m).String(), m); a.status != 201 {
				t.Fatal(a)
			}
		}
		if got := s.export(); got != want {
			t.Errorf("it changed:\n%s\n---\n%s", want, got)
		}
		s.want(202, "DELETE", api.PathManifest("a", base.String()), nil)
		want = s.export()
		for _, m := range early[:2] {
			if a := s.put("a", identity.Sum(m).String(), m); a.status != 201 || s.binding("a", m) != asserted {
				t.Errorf("%v %+v", a, s.binding("a", m))
			}
		}
		if got := s.export(); got != want || s.reindexed("base gone") != want {
			t.Errorf("it changed:\n%s\n---\n%s", want, got)
		}
		if a := s.put("a", "base", body); a.status != 201 {
			t.Fatal(a)
		}
		want = s.export()
	}
}

// An artifact that names another base than a subject that comes later stays bound to the one that it names, and every
// answer about it tells of the contradiction: also one of an index that was made anew, and when the subject is gone.
func TestSubjectThatComesLaterDisagrees(t *testing.T) {
	s := newServer(t)
	a, base := s.base("src/model", "v1", "m", "1")
	body := s.want(200, "GET", api.PathManifest("src/model", "v1"), nil).body
	b, _ := s.base("src/other", "v1", "o", "2")
	dir := filepath.Join(s.t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, shardsOf(t, s, b)); err != nil {
		t.Fatal(err)
	}
	s.want(202, "DELETE", api.PathManifest("src/model", base.String()), nil) // so that nobody has it
	s.layer("a", api.MediaTypeWeight, "m-0.safetensors", safetensors("1"))
	subject := map[string]any{"subject": desc{"mediaType": manifestType, "digest": base.String(), "size": 1}}
	documented := s.manifest("a", s.files("a", dir), subject)
	annotated := s.plain("a", "noted", base, map[string]string{api.AnnotationAggregate: b.String()})
	early := []struct {
		text     []byte
		evidence api.Evidence
		at       string
	}{
		{documented, api.EvidenceDocument, "adapter_manifest.json $.base_weight_shard_manifest"},
		{annotated, api.EvidenceAsserted, "annotation " + api.AnnotationAggregate},
	}
	for _, m := range early {
		if got := s.put("a", identity.Sum(m.text).String(), m.text); got.status != 201 {
			t.Fatal(got)
		}
	}
	push := func(what string) (export string) {
		t.Helper()
		for _, m := range early {
			if got := s.put("a", identity.Sum(m.text).String(), m.text); got.status != 201 {
				t.Errorf("%s: %v", what, got)
			}
			if got := s.binding("a", m.text); got != (api.Binding{Aggregate: b, Evidence: m.evidence}) {
				t.Errorf("%s: %+v", what, got)
			}
			want := api.Conflict{Reason: api.CodeAggregateConflict, Claimed: a.String(), ClaimedAt: "subject " + base.String(),
				Derived: b.String(), DerivedAt: m.at}
			got := get[api.Lineage](s, api.PathLineage(identity.Sum(m.text))).Artifact.Facts
			if got == nil || got.Conflict == nil || *got.Conflict != want {
				t.Errorf("%s: %+v", what, got)
			}
			asked := s.want(200, "POST", api.PathCompatibility, fmt.Appendf(nil,
				`{"question":"adapter_trained_from","artifact":%q,"base":{"aggregate_sha256":%q}}`, identity.Sum(m.text), b)).body
			if !bytes.Contains(asked, []byte("conflict: "+want.ClaimedAt+" is of "+want.Claimed)) {
				t.Errorf("%s: %s", what, asked)
			}
		}
		for _, x := range get[api.ArtifactList](s, api.PathArtifacts(b)+"?kind=adapter").Artifacts {
			if x.Facts == nil || x.Facts.Conflict == nil {
				t.Errorf("%s: %+v", what, x)
			}
		}
		if got := get[api.ArtifactList](s, api.PathArtifacts(a)+"?kind=adapter"); len(got.Artifacts) > 0 {
			t.Errorf("%s: %+v", what, got)
		}
		return s.export()
	}
	if got := s.put("a", "base", body); got.status != 201 {
		t.Fatal(got)
	}
	want := s.export()
	if push("again") != want || s.reindexed("subject later") != want || push("made anew") != want {
		t.Error("it changed")
	}
	other := s.plain("a", "other", base, map[string]string{api.AnnotationAggregate: b.String()})
	if got := s.put("a", "other", other); got.status != 400 {
		t.Errorf("a new one: %v", got)
	}
	s.want(202, "DELETE", api.PathManifest("a", base.String()), nil)
	want = push("subject gone")
	if s.reindexed("subject gone") != want {
		t.Error("it changed")
	}
}

// A caller who may push and not pull learns nothing of what is there: what he pushes stands for itself.
func TestPushAloneTellsNothing(t *testing.T) {
	s := newServer(t)
	agg, base := s.base("team/model", "v1", "m", "1")
	other, _ := s.base("team/other", "v1", "o", "2")
	s.plain("team/model", "mine", base, nil) // so that its blobs are there
	mine := s.plain("team/model", "mine", base, map[string]string{api.AnnotationAggregate: other.String()})
	statement := func(of identity.Digest) []byte {
		b, err := documents.Statement{Bind: &documents.Bind{Artifact: of, Aggregate: other}, Reason: "r", By: "b",
			At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		return s.manifest("team/model", []desc{s.titled("team/model", "s.json", b)},
			map[string]any{"artifactType": api.ArtifactTypeStatement})
	}
	bound := s.plain("team/model", "bound", base, nil)
	if a := s.put("team/model", "bound", bound); a.status != 201 {
		t.Fatal(a)
	}
	all := map[string][]byte{"annotation": mine, "of base": statement(base), "of adapter": statement(identity.Sum(bound))}
	for name, m := range all {
		if a := s.put("team/model", "x", m); a.status != 400 {
			t.Errorf("%s: %v", name, a)
		}
	}
	secrets := s.guard(map[string]string{"writer": "team/model push", "both": "team/model pull,push"})
	for name, m := range all {
		s.token = secrets["both"]
		if a := s.put("team/model", "x", m); a.status != 400 {
			t.Errorf("%s: %v", name, a)
		}
		s.token = secrets["writer"]
		if a := s.put("team/model", "x", m); a.status != 201 || bytes.Contains(a.body, []byte(agg.String())) {
			t.Errorf("%s: %v", name, a)
		}
	}
	s.token = secrets["both"]
	if got := s.binding("team/model", mine); got != (api.Binding{Aggregate: other, Evidence: api.EvidenceAsserted}) {
		t.Errorf("%+v", got)
	}
	if got := s.binding("team/model", bound); got != (api.Binding{Aggregate: agg, Evidence: api.EvidenceAsserted}) {
		t.Errorf("%+v", got)
	}
}

// A derived-from statement is about bases: what is known to be none is no target, and a source only of a merge.
func TestDerivedIsAboutBases(t *testing.T) {
	s := newServer(t)
	agg, base := s.base("team/model", "v1", "m", "1")
	_, int4 := s.base("team/int4", "v1", "o", "2")
	adapter := s.made("team/adapters", "a", "", []desc{s.layer("team/adapters", api.MediaTypeWeight,
		documents.AdapterWeightsFile, safetensors("a"))}, nil)
	gguf := s.made("team/gguf", "g", "", []desc{s.titled("team/gguf", "model.gguf", []byte("GGUF"))}, nil)
	eval := s.made("team/evals", "e", api.ArtifactTypeEval, []desc{s.titled("team/evals", "e.json",
		testartifact.Eval("e", "", nil))}, nil)
	of := func(d identity.Digest) documents.Subject { return documents.Subject{Artifact: d} }
	whole := documents.Subject{Aggregate: agg}
	from := func(target identity.Digest, how documents.How, sources ...documents.Subject) documents.Derived {
		return documents.Derived{Target: of(target), Sources: sources, How: how}
	}
	for name, c := range map[string]struct {
		d    documents.Derived
		good bool
	}{
		"base":              {from(int4, documents.Quantize, of(base)), true},
		"of no kind":        {from(gguf, documents.Quantize, whole), true},
		"nowhere":           {from(identity.Sum(nil), documents.Merge, whole), true},
		"adapter merged in": {from(int4, documents.Merge, whole, of(adapter)), true},
		"adapter":           {from(adapter, documents.Finetune, whole), false},
		"of an adapter":     {from(int4, documents.Quantize, of(adapter)), false},
		"of an eval":        {from(int4, documents.Merge, of(eval)), false},
	} {
		b, err := documents.Statement{Derived: &c.d, Reason: "r", By: "b", At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		m := s.manifest("team/statements", []desc{s.titled("team/statements", "s.json", b)},
			map[string]any{"artifactType": api.ArtifactTypeStatement})
		a := s.put("team/statements", "s", m)
		if c.good && a.status != 201 || !c.good && (a.status != 400 || !strings.Contains(a.String(), "is of kind")) {
			t.Errorf("%s: %v", name, a)
		}
	}
}

// cutRefs are refs that end after so many puts, as those of a process that is killed.
type cutRefs struct {
	blobstore.Refs
	left atomic.Int64
}

func (c *cutRefs) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	if c.left.Add(-1) < 0 {
		return 0, blobstore.ErrUnavailable
	}
	return c.Refs.Put(ctx, refs...)
}

// A base and the artifacts that came before it are bound to each other or not there, whenever the process ends: the
// next start finishes what was begun, with the index that it left, and with one that is made anew.
func TestBaseCutWhileItIsPut(t *testing.T) {
	s := newServer(t)
	agg, base := s.base("src/model", "v1", "m", "1")
	body := s.want(200, "GET", api.PathManifest("src/model", "v1"), nil).body
	const early = 9 // of a MiB each, so that one change does not adopt them all
	for _, lost := range []bool{false, true} {
		for puts, whole := int64(0), false; !whole; puts++ {
			repo := fmt.Sprintf("%t/%d", lost, puts)
			s.layer(repo, api.MediaTypeWeight, "m-0.safetensors", safetensors("1"))
			s.manifest(repo, nil, nil)
			for i := range early {
				m := s.plain(repo, fmt.Sprint("early", i), base, map[string]string{"x": strings.Repeat("x", 1<<20)})
				if a := s.put(repo, fmt.Sprint("early", i), m); a.status != 201 {
					t.Fatal(a)
				}
			}
			refs := new(cutRefs)
			s.restart(func(c *registry.Config) {
				refs.Refs = c.Refs
				c.Refs = refs
			})
			refs.left.Store(puts)
			whole = s.put(repo, "base", body).status == 201
			if whole && puts < 4 || puts > 4 {
				t.Fatalf("put whole: %v, by %d changes", whole, puts)
			}
			s.stop()
			if lost {
				if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
					t.Fatal(err)
				}
			}
			s.with = nil
			s.start()
			there := s.do("GET", api.PathManifest(repo, base.String()), nil).status == 200
			n := len(get[api.ArtifactList](s, api.PathArtifacts(agg)+"?kind=adapter&repo="+repo).Artifacts)
			if there != (puts > 0) || n != map[bool]int{true: early}[there] {
				t.Errorf("%s: the base is there: %v, and bound to it are %d", repo, there, n)
			}
			s.reindexed(repo)
			if store, index, err := s.reg.Positions(t.Context()); store != index || err != nil {
				t.Errorf("%s: level up to %d of %d, %v", repo, index, store, err)
			}
		}
	}
}

// A bind statement that came before its artifact, and names another base than the document in that, refuses nobody's
// push and binds nothing: the document counts, and every answer tells of the statement, until that is gone.
func TestStatementThatCameFirstDisagrees(t *testing.T) {
	s := newServer(t)
	a, _ := s.base("src/model", "v1", "m", "1")
	b, _ := s.base("src/other", "v1", "o", "2")
	dir := filepath.Join(s.t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, shardsOf(t, s, b)); err != nil {
		t.Fatal(err)
	}
	adapter := s.manifest("a", s.files("a", dir), nil)
	d := identity.Sum(adapter)
	bind := func() (statement identity.Digest, status int) {
		t.Helper()
		text, err := documents.Statement{Bind: &documents.Bind{Artifact: d, Aggregate: a}, Reason: "r", By: "b",
			At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		m := s.manifest("a", []desc{s.titled("a", "s.json", text)}, map[string]any{"artifactType": api.ArtifactTypeStatement})
		return identity.Sum(m), s.put("a", "statement", m).status
	}
	look := func() (c []*api.Conflict, text string) {
		t.Helper()
		if got := s.binding("a", adapter); got != (api.Binding{Aggregate: b, Evidence: api.EvidenceDocument}) {
			t.Errorf("%+v", got)
		}
		if got := get[api.ArtifactList](s, api.PathArtifacts(a)+"?kind=adapter"); len(got.Artifacts) > 0 {
			t.Errorf("%+v", got)
		}
		rows := s.want(200, "GET", api.PathArtifacts(b)+"?kind=adapter", nil).body
		lineage := s.want(200, "GET", api.PathLineage(d), nil).body
		var list api.ArtifactList
		var l api.Lineage
		if err := errors.Join(json.Unmarshal(rows, &list), json.Unmarshal(lineage, &l)); err != nil || len(list.Artifacts) != 1 {
			t.Fatalf("%v %s", err, rows)
		}
		asked := s.want(200, "POST", api.PathCompatibility, fmt.Appendf(nil,
			`{"question":"adapter_trained_from","artifact":%q,"base":{"aggregate_sha256":%q}}`, d, b)).body
		var answer api.Compatibility
		if err := json.Unmarshal(asked, &answer); err != nil || answer.Verdict != api.VerdictYes {
			t.Errorf("%v %s", err, asked)
		}
		return []*api.Conflict{list.Artifacts[0].Facts.Conflict, l.Artifact.Facts.Conflict},
			string(rows) + string(lineage) + string(asked)
	}
	statement, status := bind()
	if put := s.put("a", "adapter", adapter); put.status != 201 || status != 201 {
		t.Fatal(put, status)
	}
	want := api.Conflict{Reason: api.CodeAggregateConflict, Claimed: a.String(),
		ClaimedAt: "statement " + statement.String(), Derived: b.String(),
		DerivedAt: "adapter_manifest.json $.base_weight_shard_manifest"}
	conflicts, text := look()
	for _, c := range conflicts {
		if c == nil || *c != want {
			t.Errorf("%+v", c)
		}
	}
	if !strings.Contains(text, "conflict: "+want.ClaimedAt) {
		t.Errorf("%s", text)
	}
	s.reindexed("statement first")
	if _, again := look(); again != text {
		t.Errorf("made anew:\n%s\nwas\n%s", again, text)
	}
	s.want(202, "DELETE", api.PathManifest("a", statement.String()), nil)
	if conflicts, text = look(); conflicts[0] != nil || conflicts[1] != nil || strings.Contains(text, "conflict") {
		t.Errorf("the statement is gone: %s", text)
	}
	if _, status := bind(); status != 400 {
		t.Errorf("a statement that comes later: %d", status)
	}
}
