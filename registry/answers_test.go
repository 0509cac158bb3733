package registry_test

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore/memstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// inMemory is a server without a disk. It can't be stopped and started.
func inMemory(t *testing.T) *server {
	t.Helper()
	store := memstore.New()
	kv, err := new(memkv.Disk).Open(1)
	if err != nil {
		t.Fatal(err)
	}
	ix, err := index.New(t.Context(), kv)
	if err != nil {
		t.Fatal(err)
	}
	reg, err := registry.New(registry.Config{Store: store, Refs: store, Uploads: store, Index: ix, Access: access.Open(),
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := reg.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, ix: ix, reg: reg, http: httptest.NewServer(reg), log: new(bytes.Buffer)}
	t.Cleanup(s.http.Close)
	return s
}

// family is a base under two names, a base that was derived from it, and what was made of them.
type family struct {
	*server
	a, b                                             identity.Aggregate
	base, quant                                      identity.Digest
	sql, second, plain, checkpoint, legacy, old      identity.Digest
	eval, weak, receipt, bind, derive, unbound, rows identity.Digest
}

// kiln pushes an adapter as Kiln writes it, in a repository of its own, trained from other weights if they are given.
func (f *family) kiln(repo, name string, seed byte, start identity.Digest) identity.Digest {
	base := shardsOf(f.t, f.server, f.a)
	weights, config := testartifact.Weights(seed), testartifact.Config("example/base")
	receipt := testartifact.Receipt(name, identity.Sum(weights), base)
	if !start.IsZero() {
		with := fmt.Appendf(nil, `"base":{"adapter_model_sha256":%q}`, start)
		receipt = bytes.Replace(receipt, []byte(`"base":{}`), with, 1)
	}
	manifest, err := documents.NewAdapterManifest(name, identity.Sum(weights), identity.Sum(config),
		identity.Sum(receipt), *base).Document()
	if err != nil {
		f.t.Fatal(err)
	}
	return f.made(repo, name, api.ArtifactTypeAdapter, []desc{
		f.titled(repo, documents.AdapterManifestFile, manifest), f.titled(repo, documents.AdapterWeightsFile, weights),
		f.titled(repo, documents.AdapterConfigFile, config), f.titled(repo, documents.ReceiptFile, receipt),
	}, nil)
}

// statement pushes a statement.
func (f *family) statement(repo string, st documents.Statement) identity.Digest {
	st.Reason, st.By, st.At = cmp.Or(st.Reason, "seen"), "ana", "2026-01-02T03:04:05Z"
	b, err := st.Document()
	if err != nil {
		f.t.Fatal(err)
	}
	return f.made(repo, "statement", api.ArtifactTypeStatement, []desc{f.titled(repo, "statement.json", b)}, nil)
}

func grow(s *server) *family {
	s.t.Helper()
	f := &family{server: s}
	f.a, f.base = s.base("team/base", "v1", "model", "1", "2")
	s.base("lab/renamed", "v1", "other", "2", "1")
	f.b, f.quant = s.base("team/quant", "v1", "model", "3")
	base := shardsOf(s.t, s, f.a)
	f.sql = f.kiln("team/adapters", "sql", 1, identity.Digest{})
	f.second = f.kiln("lab/second", "sql2", 2, identity.Sum(testartifact.Weights(1)))
	f.receipt = s.made("team/receipts", "sql", "", []desc{s.titled("team/receipts", documents.ReceiptFile,
		testartifact.Receipt("sql", identity.Sum(testartifact.Weights(1)), base))}, nil)
	check := func(dir string, base *identity.Manifest, bare bool) []desc {
		dir = filepath.Join(s.t.TempDir(), dir+documents.CheckpointSuffix)
		if err := testartifact.Checkpoint(dir, 1, base, bare); err != nil {
			s.t.Fatal(err)
		}
		return s.files("team/run", dir)
	}
	f.checkpoint = s.made("team/run", "new", api.ArtifactTypeCheckpoint, check("a", base, false), nil)
	f.legacy = s.made("team/run", "legacy", api.ArtifactTypeCheckpoint, check("b", base, true), nil)
	f.old = s.made("team/run", "old", api.ArtifactTypeCheckpoint, check("c", nil, false), nil)
	run := `"finished_runs":[{"suite_name":"smoke","adapter":"sql","metrics":{"num_examples":4,"num_pass":3},` +
		`"outcomes":[],"started_at":"2026-01-02T03:04:05Z","finished_at":"2026-01-02T03:04:05Z","suite_hash":"h"%s}]`
	replay := fmt.Sprintf(`,"replay_record":{"record_type":"kiln.eval-replay.v1","model_target":{"adapter":"sql",`+
		`"adapter_content_sha256":%q},"suite_sha256":%[2]q,"effective_generation_sha256":%[2]q,`+
		`"raw_completion_set_sha256":%[2]q,"record_sha256":%[2]q}`, identity.Sum(testartifact.Weights(1)), identity.Sum(nil))
	with := func(id, more string) []byte {
		return bytes.Replace(testartifact.Eval(id, "sql", base), []byte(`"finished_runs":[]`), fmt.Appendf(nil, run, more), 1)
	}
	eval := func(repo, tag string, b []byte) identity.Digest {
		return s.made(repo, tag, api.ArtifactTypeEval, []desc{s.titled(repo, tag+".json", b)}, nil)
	}
	f.eval, f.weak = eval("team/evals", "e1", with("e1", replay)), eval("lab/evals", "e2", with("e2", ""))
	f.rows = s.made("lab/rows", "e3", api.ArtifactTypeEval,
		[]desc{s.titled("lab/rows", "e3.jsonl", testartifact.Row("1", base))}, nil)
	peft := s.t.TempDir()
	if err := testartifact.PEFT(peft, 7); err != nil {
		s.t.Fatal(err)
	}
	f.plain = s.made("lab/peft", "v1", "", s.files("lab/peft", peft), nil)
	f.unbound = s.made("lab/unbound", "v1", "", s.files("lab/unbound", peft), nil)
	if f.plain != f.unbound {
		s.t.Fatal("the same files are two manifests")
	}
	f.bind = f.statement("lab/peft", documents.Statement{Bind: &documents.Bind{Artifact: f.plain, Aggregate: f.a}})
	f.derive = f.statement("team/quant", documents.Statement{Derived: &documents.Derived{How: documents.Quantize,
		Target: documents.Subject{Aggregate: f.b}, Sources: []documents.Subject{{Aggregate: f.a}}}})
	return f
}

// everywhere runs a test on a server with files and bolt, and on one in memory.
func everywhere(t *testing.T, test func(t *testing.T, f *family)) {
	t.Run("disk", func(t *testing.T) { test(t, grow(newServer(t))) })
	t.Run("memory", func(t *testing.T) { test(t, grow(inMemory(t))) })
}

// pages reads all pages of a listing.
func (f *family) pages(path string, limit int) (all []api.Artifact) {
	f.t.Helper()
	for next := ""; ; {
		list := get[api.ArtifactList](f.server, fmt.Sprintf("%s&limit=%d&after=%s", path, limit, next))
		if !slices.Equal(list.NotProven, api.NotProven) {
			f.t.Errorf("%s: not_proven is %v", path, list.NotProven)
		}
		all = append(all, list.Artifacts...)
		if next = list.Next; next == "" {
			return all
		}
	}
}

// IX-07, IX-09, AD-01, AD-02.
func TestListingsOfWhatWasMade(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		of := api.PathArtifacts(f.a) + "?"
		day := time.Now().UTC()
		for path, want := range map[string][]identity.Digest{
			of + "kind=adapter":                             {f.plain, f.second, f.sql},
			of + "kind=adapter&repo=lab/second":             {f.second},
			of + "kind=adapter&name=sql":                    {f.sql},
			of + "kind=adapter&binding=document":            {f.second, f.sql},
			of + "kind=adapter&binding=asserted":            {f.plain},
			of + "kind=checkpoint&binding=aggregate-only":   {f.legacy},
			of + "kind=checkpoint":                          {f.legacy, f.checkpoint},
			of + "kind=eval":                                {f.weak, f.rows, f.eval},
			of + "kind=receipt":                             {f.receipt},
			of + "kind=statement":                           {f.bind},
			of + "name=e1":                                  {f.eval},
			of + "kind=adapter&since=2200-01-01":            {},
			of + "kind=receipt&since=2026-01-01T00:00:00Z":  {f.receipt},
			api.PathUnbound + "?unbound=true":               {f.unbound, f.old},
			api.PathUnbound + "?unbound=true&kind=adapter":  {f.unbound},
			api.PathUnbound + "?unbound=true&name=demo":     {f.old},
			api.PathUnbound + "?unbound=true&repo=team/run": {f.old},
			api.PathArtifacts(f.b) + "?kind=adapter":        {},
			api.PathArtifacts(f.b) + "?kind=statement":      {f.derive},
		} {
			for _, limit := range []int{1, 2, 100} {
				got := []identity.Digest{}
				for _, a := range f.pages(path, limit) {
					got = append(got, a.Digest)
					isPlain := a.Digest == f.plain && a.Repository == "lab/peft"
					if b := a.Binding; a.Kind != api.KindBase && b.Held == b.Aggregate.IsZero() ||
						isPlain && b.Source != "statement "+f.bind.String() {
						t.Errorf("%s: %+v", path, a)
					}
					if a.Created.After(day.Add(time.Hour)) || a.Facts == nil {
						t.Errorf("%s: %+v", path, a)
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("%s, %d a page:\n%v, want\n%v", path, limit, got, want)
				}
			}
		}
		for _, bad := range []string{of + "kind=lora", of + "binding=sure", of + "since=yesterday", of + "repo=A",
			of + "after=x", api.PathUnbound, api.PathUnbound + "?unbound=true&binding=none"} {
			if a := f.do("GET", bad, nil); a.status != 400 {
				t.Errorf("%s: %v", bad, a)
			}
		}
	})
}

// held follows the base: it is gone when the last packaging is, and back when it is.
func TestHeldFollowsTheBase(t *testing.T) {
	s := newServer(t)
	want, err := identity.New([]identity.Shard{{Filename: "model-0.safetensors", Size: uint64(len(safetensors("1"))),
		Digest: identity.Sum(safetensors("1"))}})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, &want); err != nil {
		t.Fatal(err)
	}
	adapter := s.made("lab/a", "v1", "", s.files("lab/a", dir), nil)
	check := func(held bool) {
		t.Helper()
		list := get[api.ArtifactList](s, api.PathArtifacts(want.Aggregate)+"?kind=adapter")
		l := get[api.Lineage](s, api.PathLineage(adapter))
		if len(list.Artifacts) != 1 || list.Artifacts[0].Binding.Held != held || l.Artifact.Binding.Held != held ||
			l.Artifact.Binding.Evidence != api.EvidenceDocument {
			t.Errorf("held is not %t: %+v, %+v", held, list, l)
		}
	}
	check(false)
	agg, base := s.base("team/base", "v1", "model", "1")
	if agg != want.Aggregate {
		t.Fatal("another base")
	}
	check(true)
	s.want(202, "DELETE", api.PathManifest("team/base", base.String()), nil)
	check(false)
	s.base("lab/copy", "v1", "other", "1")
	check(true)
	// For a caller who may not pull the base it is not there.
	s.token = s.guard(map[string]string{"lab": "lab/a pull"})["lab"]
	check(false)
}

// A bind statement does not overrule what an artifact says itself, and is none about a base.
func TestBindStatements(t *testing.T) {
	f := grow(newServer(t))
	put := func(repo string, of identity.Digest, base identity.Aggregate) answer {
		b, err := documents.Statement{Bind: &documents.Bind{Artifact: of, Aggregate: base}, Reason: "r", By: "b",
			At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		m := f.manifest(repo, []desc{f.titled(repo, "s.json", b)}, map[string]any{"artifactType": api.ArtifactTypeStatement})
		return f.put(repo, "s", m)
	}
	if a := put("team/adapters", f.sql, f.b); a.status != 400 || !bytes.Contains(a.body, []byte(f.a.String())) ||
		!bytes.Contains(a.body, []byte(`"derived_at":"artifact `+f.sql.String())) {
		t.Error(a)
	}
	if a := put("team/base", f.base, f.b); a.status != 400 {
		t.Error(a)
	}
	if a := put("team/adapters", f.sql, f.a); a.status != 201 {
		t.Error(a)
	}
	early := identity.Sum([]byte("to come"))
	if a := put("lab/early", early, f.a); a.status != 201 {
		t.Error(a)
	}
	l := get[api.Lineage](f.server, api.PathLineage(f.sql))
	if l.Artifact.Binding.Evidence != api.EvidenceDocument || l.Artifact.Binding.Source != "" {
		t.Errorf("%+v", l.Artifact)
	}
	// Without its statement the artifact is bound to nothing, and with it again.
	path := api.PathManifest("lab/peft", f.bind.String())
	statement := f.want(200, "GET", path, nil).body
	f.want(202, "DELETE", path, nil)
	bound := func() api.Binding {
		return get[api.Lineage](f.server, api.PathLineage(f.plain)+"?repo=lab/peft").Artifact.Binding
	}
	if b := bound(); b.Evidence != api.EvidenceNone || !b.Aggregate.IsZero() || b.Held {
		t.Errorf("%+v", b)
	}
	f.want(201, "PUT", path, statement, "Content-Type", manifestType)
	if b := bound(); b.Evidence != api.EvidenceAsserted || b.Aggregate != f.a || !b.Held {
		t.Errorf("%+v", b)
	}
	before := f.export()
	if f.reindexed("with statements") != before {
		t.Error("it changed")
	}
}

// edge is a link in short.
func edge(l api.Link) string {
	out := l.Relation
	if l.Weak {
		out += " weakly " + l.Name
	}
	if l.Inside {
		out += " inside"
	}
	if l.Artifact != nil {
		out += " " + l.Artifact.Repository
	}
	return out
}

func edges(links []api.Link) []string {
	out := []string{}
	for _, l := range links {
		out = append(out, edge(l))
	}
	slices.Sort(out)
	return out
}

// AD-17, IX-15.
func TestLineage(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		_, merged := f.server.base("lab/merged", "v1", "model", "4")
		merge := f.statement("lab/merge", documents.Statement{Derived: &documents.Derived{How: documents.Merge,
			Target:  documents.Subject{Artifact: merged},
			Sources: []documents.Subject{{Aggregate: f.a}, {Artifact: f.sql}}}})
		for name, c := range map[string]struct {
			of                identity.Digest
			query             string
			parents, children []string
		}{
			"adapter": {of: f.sql, parents: []string{"receipt inside team/receipts"}, children: []string{"adapter team/evals",
				"adapter team/run", "adapter team/run", "adapter team/run", "adapter weakly sql lab/evals",
				"derived_from lab/merged", "output team/receipts", "parent_adapter lab/second"}},
			"adapter on it": {of: f.second, parents: []string{"parent_adapter team/adapters", "receipt inside"},
				children: []string{}},
			"merged": {of: merged, parents: []string{"derived_from lab/renamed", "derived_from team/adapters"},
				children: []string{"statement lab/merge"}},
			"checkpoint": {of: f.checkpoint, parents: []string{"adapter team/adapters", "adapter weakly demo"},
				children: []string{}},
			"eval":         {of: f.eval, parents: []string{"adapter team/adapters"}, children: []string{}},
			"eval by name": {of: f.weak, parents: []string{"adapter weakly sql team/adapters"}, children: []string{}},
			"receipt": {of: f.receipt, parents: []string{"output team/adapters"},
				children: []string{"receipt team/adapters"}},
			"bind statement": {of: f.bind, parents: []string{"statement lab/peft"}, children: []string{}},
			"bound": {of: f.plain, query: "?repo=lab/peft", parents: []string{},
				children: []string{"statement lab/peft"}},
			"derive statement": {of: f.derive, parents: []string{"derived_from lab/renamed", "statement team/quant"},
				children: []string{}},
			"merge statement": {of: merge, parents: []string{"derived_from lab/renamed", "derived_from team/adapters",
				"statement lab/merged"}, children: []string{}},
			"derived base": {of: f.quant, parents: []string{"derived_from lab/renamed"},
				children: []string{"statement team/quant"}},
			"source": {of: f.base, parents: []string{}, children: []string{"derived_from lab/merged",
				"derived_from team/quant"}},
		} {
			for _, limit := range []int{1, 3, 100} {
				var children []api.Link
				l := get[api.Lineage](f.server, fmt.Sprintf("%s%s&limit=%d", api.PathLineage(c.of), or(c.query, "?"), limit))
				parents := l.Parents
				children = l.Children
				for l.Next != "" {
					l = get[api.Lineage](f.server, fmt.Sprintf("%s%s&limit=%d&after=%s", api.PathLineage(c.of),
						or(c.query, "?"), limit, l.Next))
					if children = append(children, l.Children...); len(l.Parents) > 0 || len(l.Children) > limit {
						t.Errorf("%s: %+v", name, l)
					}
				}
				if got := edges(parents); !slices.Equal(got, c.parents) {
					t.Errorf("%s: parents %q, want %q", name, got, c.parents)
				}
				if got := edges(children); !slices.Equal(got, c.children) {
					t.Errorf("%s, %d a page: children %q, want %q", name, limit, got, c.children)
				}
				if l.Artifact.Digest != c.of || !slices.Equal(l.NotProven, api.NotProven) {
					t.Errorf("%s: %+v", name, l)
				}
			}
		}
		l := get[api.Lineage](f.server, api.PathLineage(f.quant))
		if p := l.Parents[0]; p.Aggregate != f.a || p.Statement != f.derive || p.How != "quantize" {
			t.Errorf("%+v", p)
		}
		if a := f.do("GET", api.PathLineage(identity.Sum([]byte("none"))), nil); a.code() != api.CodeManifestUnknown {
			t.Error(a)
		}
		for _, bad := range []string{"?after=x", "?after=99.", "?after=0.x", "?repo=A", "?limit=x"} {
			if a := f.do("GET", api.PathLineage(f.sql)+bad, nil); a.status != 400 {
				t.Errorf("%s: %v", bad, a)
			}
		}
	})
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// Every row of the evals of a base stands by itself.
func TestEvalRows(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		asserted := f.made("lab/old", "v1", api.ArtifactTypeEval, []desc{f.titled("lab/old", "o.json",
			testartifact.Eval("o", "sql", nil))}, map[string]any{"annotations": map[string]string{
			api.AnnotationAggregate: f.a.String()}})
		a := f.want(200, "GET", api.PathEvals(f.a), nil)
		got := map[identity.Digest]api.EvalRow{}
		lines := bufio.NewScanner(bytes.NewReader(a.body))
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var row api.EvalRow
			if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
				t.Fatal(err)
			}
			if row.Manifest == nil || row.Manifest.Aggregate != f.a || row.Manifest.Validate() != nil ||
				row.Binding.Aggregate != f.a || !row.Binding.Held || !slices.Equal(row.NotProven, api.NotProven) {
				t.Errorf("%s", lines.Bytes())
			}
			got[row.Digest] = row
		}
		if len(got) != 4 || got[f.rows].Rows != 1 || got[asserted].Binding.Evidence != "asserted" || !got[asserted].Legacy {
			t.Fatalf("%+v", got)
		}
		r := got[f.eval].Run
		if r == nil || r.Examples != 4 || r.Passed != 3 || *r.Accuracy != 0.75 || *r.Low > 0.31 || *r.High < 0.95 ||
			r.AdapterContent == "" || r.Seed != "" || r.Finished.IsZero() {
			t.Errorf("%+v", r)
		}
		if a := f.want(200, "GET", api.PathEvals(f.b), nil); len(a.body) > 0 {
			t.Error(a)
		}
	})
}

// An eval whose document is gone is still in the table, as it was found.
func TestEvalRowsWithoutTheDocument(t *testing.T) {
	f := grow(newServer(t))
	base := shardsOf(t, f.server, f.a)
	f.remove(testartifact.Row("1", base))
	f.reindexed("without an eval")
	a := f.want(200, "GET", api.PathEvals(f.a), nil)
	if bytes.Count(a.body, []byte("\n")) != 3 || bytes.Count(a.body, []byte(`"document_unavailable":true`)) != 1 ||
		bytes.Count(a.body, []byte(`"base_weight_shard_manifest"`)) != 3 {
		t.Error(a)
	}
	if _, a := f.ask(used("lab/rows:e3", &api.Side{Aggregate: f.a}, nil)); a.status != 404 ||
		a.code() != api.CodeBlobUnknown {
		t.Error(a)
	}
}

// Who may see one repository learns nothing of the others, from no answer.
func TestAnswersShowOnlyWhatMayBePulled(t *testing.T) {
	f := grow(newServer(t))
	secrets := f.guard(map[string]string{"second": "lab/second pull", "quant": "team/quant pull",
		"weak": "lab/evals pull"})
	f.token = secrets["second"]
	// What its own documents say is not hidden: only the weights that it was trained from.
	own := map[string]bool{f.second.String(): true, f.a.String(): true,
		identity.Sum(testartifact.Weights(1)).String(): true}
	hidden := func(a answer) {
		t.Helper()
		for name, d := range map[string]string{"base": f.base.String(), "quant": f.quant.String(), "sql": f.sql.String(),
			"eval": f.eval.String(), "receipt": f.receipt.String(), "checkpoint": f.checkpoint.String(), "b": f.b.String(),
			"bind": f.bind.String(), "derive": f.derive.String(), "plain": f.plain.String(), "a repository": `"team/`,
			"another": `"lab/evals`, "a third": "lab/renamed", "a holder": `"held":true`} {
			if !own[d] && bytes.Contains(a.body, []byte(d)) {
				t.Errorf("%s is told of in %s", name, a.body)
			}
		}
	}
	for _, path := range []string{
		api.PathArtifacts(f.a), api.PathArtifacts(f.a) + "?repo=team/adapters", api.PathArtifacts(f.a) + "?name=sql",
		api.PathUnbound + "?unbound=true", api.PathLineage(f.second), api.PathEvals(f.a),
	} {
		hidden(f.want(200, "GET", path, nil))
	}
	l := get[api.Lineage](f.server, api.PathLineage(f.second))
	if got := edges(l.Parents); !slices.Equal(got, []string{"parent_adapter", "receipt inside"}) || len(l.Children) > 0 {
		t.Errorf("%q, %+v", got, l.Children)
	}
	// What is hidden is answered for as what is not there.
	for _, d := range []identity.Digest{f.sql, f.base, f.derive, f.bind, f.eval, f.plain} {
		there := f.want(404, "GET", api.PathLineage(d), nil)
		absent := f.want(404, "GET", api.PathLineage(identity.Sum([]byte("absent"))), nil)
		if strings.ReplaceAll(string(there.body), d.String(), "") !=
			strings.ReplaceAll(string(absent.body), identity.Sum([]byte("absent")).String(), "") {
			t.Errorf("%s\n%s", there.body, absent.body)
		}
		if a := f.do("GET", api.PathLineage(d)+"?repo=team/adapters", nil); a.status != 403 {
			t.Error(a)
		}
		if _, a := f.ask(api.CompatibilityRequest{Question: "adapter_trained_from", Artifact: d.String()}); a.status != 404 {
			t.Error(a)
		}
	}
	a, b := &api.Side{Aggregate: f.a}, &api.Side{Aggregate: f.b}
	for _, req := range []api.CompatibilityRequest{
		{Question: "same_base_weights", Base: a, Other: b},
		{Question: "adapter_trained_from", Artifact: "lab/second:sql2", Base: b},
	} {
		got, _ := f.ask(req)
		if got.Verdict != api.VerdictNo || len(got.Derived) > 0 {
			t.Errorf("%+v", got)
		}
	}
	if _, a := f.ask(api.CompatibilityRequest{Question: "same_base_weights", Base: &api.Side{Reference: "team/base:v1"},
		Other: b}); a.status != 403 {
		t.Error(a)
	}
	// The statement alone is seen, and not the base that it names.
	f.token = secrets["quant"]
	l = get[api.Lineage](f.server, api.PathLineage(f.quant))
	if got := edges(l.Parents); !slices.Equal(got, []string{"derived_from"}) || l.Parents[0].Aggregate != f.a {
		t.Errorf("%+v", l.Parents)
	}
	// By name nobody is found who is not seen.
	f.token = secrets["weak"]
	l = get[api.Lineage](f.server, api.PathLineage(f.weak))
	if got := edges(l.Parents); !slices.Equal(got, []string{"adapter weakly sql"}) {
		t.Errorf("%+v", l.Parents)
	}
	if a := f.want(200, "GET", api.PathEvals(f.a), nil); bytes.Count(a.body, []byte("\n")) != 1 ||
		!bytes.Contains(a.body, []byte(`"base_weight_shard_manifest"`)) || bytes.Contains(a.body, []byte(`"held":true`)) {
		t.Error(a)
	}
}
