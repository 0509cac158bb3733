package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/answers"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// The bodies of questions are read strictly at every depth.
func TestQuestionsAreReadStrictly(t *testing.T) {
	f := grow(inMemory(t))
	shards, err := json.Marshal(shardsOf(t, f.server, f.a))
	if err != nil {
		t.Fatal(err)
	}
	side := fmt.Sprintf(`{"aggregate_sha256":%q}`, f.a)
	full := `{"base_weight_shard_manifest":` + string(shards) + `}`
	compare := func(a, b string) string { return `{"a":` + a + `,"b":` + b + `}` }
	same := func(a, b string) string {
		return `{"question":"same_base_weights","base":` + a + `,"other":` + b + `}`
	}
	for path, body := range map[string]func(a, b string) string{api.PathCompare: compare, api.PathCompatibility: same} {
		f.want(200, "POST", path, []byte(body(side, full)+"\n"))
		f.want(200, "POST", path, []byte(body(side, strings.Replace(side, "{", `{"reference":null,`, 1))))
		good := body(side, side)
		for _, bad := range []string{
			good + "}", good + " {}", "\ufeff" + good,
			strings.Replace(good, "{", `{"x":1,`, 1), body(side, `{"Reference":"a:b"}`),
			body(side, side[:len(side)-1]+","+side[1:]), body(side, side[:len(side)-1]+`,"x":1}`), body(side, "{}"),
			body(side, strings.Replace(full, `"shards"`, `"Shards"`, 1)), body(side, strings.Replace(side, "sha256:", "", 1)),
			body(side, strings.ToUpper(side)), good[:len(good)-1] + `,"b":` + side + `,"other":` + side + `}`, "[]", "", "null",
		} {
			if a := f.do("POST", path, []byte(bad)); a.status != 400 || a.code() != api.CodeParameterInvalid {
				t.Errorf("%s\n%v", bad, a)
			}
		}
	}
	for _, bad := range []string{`"identities":{"tokenizer":%q,"tokenizer":%[1]q}`, `"identities":{"tokenizer":1}`,
		`"run":-1`, `"run":1.0`, `"run":true`, `"Work":"x"`, `"request":{"a":1,"a":2}`} {
		if strings.Contains(bad, "%") {
			bad = fmt.Sprintf(bad, f.sql)
		}
		body := fmt.Sprintf(`{"question":"adapter_trained_from","artifact":%q,%s}`, f.sql, bad)
		if a := f.do("POST", api.PathCompatibility, []byte(body)); a.status != 400 {
			t.Errorf("%s\n%v", body, a)
		}
	}
}

// A question has no members of others, and what it lacks of its own can't be told.
func TestMembersOfQuestions(t *testing.T) {
	s := newServer(t)
	base, _, request := s.resumable()
	a := base.Aggregate.String()
	const side = `"base":{"aggregate_sha256":%q}`
	artifact, digest := `"artifact":"team/run:v1"`, identity.Sum([]byte("x")).String()
	for question, refused := range map[string]map[string]string{
		"same_base_weights": {
			"artifact": artifact, "run": `"run":0`, "work": `"work":"x"`, "lineage": `"lineage":"x"`,
			"request": `"request":` + string(request), "identities.tokenizer": `"identities":{"tokenizer":"` + digest + `"}`,
		},
		"adapter_trained_from": {"request": `"request":{}`, "other": fmt.Sprintf(`"other":{"aggregate_sha256":%q}`, a),
			"run": `"run":0`},
		"eval_used": {"request": `"request":{}`, "other": `"other":{}`},
		"resume_exact": {"work": `"work":"x"`, "run": `"run":1`, "lineage": `"lineage":"x"`,
			"identities.tokenizer": `"identities":{"tokenizer":"` + digest + `"}`},
	} {
		for member, text := range refused {
			if question != "same_base_weights" {
				text += "," + artifact
			}
			body := fmt.Sprintf(`{"question":%q,`+side+`,%s}`, question, a, text)
			got := s.do("POST", api.PathCompatibility, []byte(body))
			says := member + " is no member of the question " + question
			if got.status != 400 || !strings.Contains(string(got.body), says) {
				t.Errorf("%s: %v", body, got)
			}
		}
	}
	f := &family{server: s}
	got, answer := f.ask(resume("team/run:v1", &api.Side{Aggregate: base.Aggregate}, nil))
	passed := 0
	for _, step := range got.Steps {
		if step.Verdict == api.VerdictYes {
			passed++
		}
	}
	if got.Verdict != api.VerdictCannotTell || passed == 0 || passed == len(got.Steps) {
		t.Error(answer)
	}
	zeros := fmt.Sprintf(`{"question":"same_base_weights",`+side+`,"other":{"aggregate_sha256":%q}}`,
		identity.Aggregate{}.String(), a)
	if got := s.do("POST", api.PathCompatibility, []byte(zeros)); got.status != 400 ||
		!strings.Contains(string(got.body), "zeros name no base") {
		t.Error(got)
	}
}

// Cursors that no listing gave are refused in the same words, and names of a query that nobody knows mean nothing.
func TestCursorsAndUnknownNames(t *testing.T) {
	s := newServer(t)
	agg, d := s.base("team/model", "v1", "m", "1")
	for _, path := range []string{api.PathArtifacts(agg), api.PathBases, api.PathBase(agg), api.PathLineage(d),
		api.PathEvals(agg)} {
		if a := s.do("GET", path+"?after=xxx", nil); a.status != 400 ||
			!strings.Contains(string(a.body), "is no cursor of this listing") {
			t.Errorf("%s: %v", path, a)
		}
		s.want(200, "GET", path+"?whatever=1", nil)
	}
}

// storeOf are the blobs of a store, as package answers reads them.
type storeOf struct{ blobstore.Store }

func (s storeOf) Open(ctx context.Context, d identity.Digest, off, n int64) (io.ReadCloser, error) {
	i, err := s.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	return s.Store.Open(ctx, i, off, n)
}

// A resume request has bounds, and waits for its turn by what comparing it takes.
func TestResumeRequestIsWeighed(t *testing.T) {
	s := newServer(t)
	base, _, request := s.resumable()
	f := &family{server: s}
	padded := func(size int) []byte {
		with := bytes.Replace(request, []byte(`"effective_config":{`), []byte(`"effective_config":{"a":[`), 1)
		zeros := bytes.Repeat([]byte("0,"), (size-len(with)-6)/2)
		at := bytes.Index(with, []byte(`{"a":[`)) + 6
		return slices.Concat(with[:at], zeros, []byte("0],"), with[at:])
	}
	if _, a := f.ask(resume("team/run:v1", nil, padded(3<<20))); a.status != 413 || a.code() != api.CodeContentTooLarge {
		t.Error(a)
	}
	if got, a := f.ask(resume("team/run:v1", nil, padded(2<<20))); got.Failure != "effective config" {
		t.Error(a)
	}
	var weights []int64
	desk := answers.Desk{Index: s.ix, Blobs: storeOf{s.store}, Admit: func(_ context.Context, n int64) (func(), error) {
		weights = append(weights, n)
		return func() {}, nil
	}}
	caller, err := access.Open().Caller(httptest.NewRequest("GET", "/", nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, request := range [][]byte{request, padded(100 << 10)} {
		_, err := desk.Compatibility(t.Context(), caller, resume("team/run:v1", &api.Side{Manifest: &base}, request))
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(weights) != 2 || weights[0] > 64<<10 || weights[1] <= 800<<10 {
		t.Errorf("%d", weights)
	}
}

// Whether the files match is not known of files that are damaged or missing here.
func TestResumeWithoutTheFiles(t *testing.T) {
	s := newServer(t)
	base, _, request := s.resumable()
	f := &family{server: s}
	lost := func(file string, how string) {
		t.Helper()
		got, a := f.ask(resume("team/run:v1", &api.Side{Manifest: &base}, request))
		if got.Verdict != api.VerdictCannotTell || len(got.Reasons) == 0 ||
			!strings.Contains(got.Reasons[0], identity.Sum([]byte(file)).String()+" is "+how) {
			t.Errorf("%s: %v", how, a)
		}
	}
	s.damage(identity.Sum([]byte("adapter")), 2)
	if did, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil || did.Damaged != 1 {
		t.Fatalf("%+v, %v", did, err)
	}
	lost("adapter", "damaged here")
	s.blob("team/run", []byte("adapter"))
	if got, a := f.ask(resume("team/run:v1", &api.Side{Manifest: &base}, request)); got.Verdict != api.VerdictYes {
		t.Error(a)
	}
	s.remove([]byte("[1.0]"))
	lost("[1.0]", "missing here")
}

// An aggregate has no file names: none are compared.
func TestResumeOnABareAggregate(t *testing.T) {
	s := newServer(t)
	a, _ := s.base("team/base", "v1", "other", "1", "2")
	renamed := shardsOf(t, s, a)
	own := *renamed
	own.Shards = slices.Clone(own.Shards)
	for i := range own.Shards {
		own.Shards[i].Filename = strings.Replace(own.Shards[i].Filename, "other", "model", 1)
	}
	dir := t.TempDir() + "/x" + documents.CheckpointSuffix
	if err := testartifact.Checkpoint(dir, 1, &own, false); err != nil {
		t.Fatal(err)
	}
	s.made("team/run", "v1", api.ArtifactTypeCheckpoint, s.files("team/run", dir), nil)
	f := &family{server: s}
	step := func(base *api.Side) api.Compared {
		t.Helper()
		got, a := f.ask(resume("team/run:v1", base, nil))
		for _, step := range got.Steps {
			if step.Name == "auxiliary state" {
				return step
			}
		}
		t.Fatal(a)
		return api.Compared{}
	}
	if got := step(&api.Side{Reference: "team/base:v1"}); got.Verdict != api.VerdictNo {
		t.Errorf("%+v", got)
	}
	if got := step(&api.Side{Aggregate: a}); got.Verdict != api.VerdictCannotTell {
		t.Errorf("%+v", got)
	}
}

// many is a base that is held nowhere.
func many(t *testing.T, shards int) *identity.Manifest {
	t.Helper()
	var all []identity.Shard
	for i := range shards {
		name := fmt.Sprintf("%s-%05d.safetensors", strings.Repeat("model", 20), i)
		all = append(all, identity.Shard{Filename: name, Size: 100, Digest: identity.Sum([]byte(name))})
	}
	m, err := identity.New(all)
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

// The evals of a base come in pages that have a bound, whatever an eval holds, and say what they leave out.
func TestEvalPages(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		const runs = api.MaxEvalRuns + 200
		base := many(t, 2000)
		run := `{"suite_name":"s%d","adapter":"sql","metrics":{"num_examples":4,"num_pass":3},"outcomes":[],` +
			`"started_at":"2026-01-02T03:04:05Z","finished_at":"2026-01-02T03:04:05Z","suite_hash":"h"}`
		var all []string
		for i := range runs {
			all = append(all, fmt.Sprintf(run, i))
		}
		with := func(id string, base *identity.Manifest) []byte {
			return bytes.Replace(testartifact.Eval(id, "sql", base), []byte(`"finished_runs":[]`),
				[]byte(`"finished_runs":[`+strings.Join(all, ",")+`]`), 1)
		}
		large := f.made("lab/many", "v1", api.ArtifactTypeEval, []desc{f.titled("lab/many", "m.json", with("m", base))}, nil)
		asserted := f.made("lab/few", "v1", api.ArtifactTypeEval, []desc{f.titled("lab/few", "f.json", with("f", nil))},
			map[string]any{"annotations": map[string]string{api.AnnotationAggregate: base.Aggregate.String()}})
		for _, limit := range []int{300, 1000} {
			got, omitted := map[identity.Digest]map[string]bool{large: {}, asserted: {}}, map[identity.Digest]int{}
			path := fmt.Sprintf("%s?limit=%d", api.PathEvals(base.Aggregate), limit)
			for path != "" {
				a := f.want(200, "GET", path, nil)
				lines := bytes.SplitAfter(a.body, []byte("\n"))
				if len(lines)-1 > limit || len(a.body) > 3<<20 {
					t.Errorf("a page has %d rows, %d bytes", len(lines)-1, len(a.body))
				}
				if n := bytes.Count(a.body, []byte(`"base_weight_shard_manifest":`)); n > 1 {
					t.Fatalf("%d manifests on a page", n)
				}
				for i, line := range lines[:len(lines)-1] {
					var row api.EvalRow
					if err := json.Unmarshal(line, &row); err != nil {
						t.Fatal(err)
					}
					if row.Digest == large && (row.Manifest == nil) != row.ManifestOmitted || i == 0 && row.ManifestOmitted {
						t.Fatalf("row %d: %.300s", i, line)
					}
					if omitted[row.Digest] += row.Omitted; row.Run != nil {
						if got[row.Digest][row.Run.Suite] {
							t.Fatalf("twice: %.300s", line)
						}
						got[row.Digest][row.Run.Suite] = true
					}
				}
				path, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
			}
			if len(got[large]) != api.MaxEvalRuns || omitted[large] != runs-api.MaxEvalRuns ||
				len(got[asserted]) != 64 || omitted[asserted] != runs-64 {
				t.Errorf("%d a page: %d, %d rows; omitted %v", limit, len(got[large]), len(got[asserted]), omitted)
			}
		}
		rows, err := f.dial(t).Evals(t.Context(), base.Aggregate)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(rows)
		if n := bytes.Count(body, []byte("\n")); err != nil || n != api.MaxEvalRuns+1+64+1 || rows.Close() != nil {
			t.Errorf("the client has %d rows, %v", n, err)
		}
		for _, bad := range []string{"?after=x", "?after=1.2", "?after=1.x.y", "?after=-1.x.", "?limit=x"} {
			if a := f.do("GET", api.PathEvals(f.a)+bad, nil); a.status != 400 {
				t.Errorf("%s: %v", bad, a)
			}
		}
	})
}

// A page of evals ends at a number of bytes, too.
func TestEvalPagesAreShort(t *testing.T) {
	f := grow(inMemory(t))
	base := many(t, api.MaxRowShards)
	const evals = 60
	for i := range evals {
		name := fmt.Sprint("e", i)
		f.made("lab/evals", name, api.ArtifactTypeEval,
			[]desc{f.titled("lab/evals", name+".json", testartifact.Eval(name, "sql", base))}, nil)
	}
	rows, pages := 0, 0
	for path := api.PathEvals(base.Aggregate); path != ""; pages++ {
		a := f.want(200, "GET", path, nil)
		rows += bytes.Count(a.body, []byte(`"base_weight_shard_manifest":`))
		if len(a.body) > 2<<20+100<<10 {
			t.Errorf("a page has %d bytes", len(a.body))
		}
		path, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
	}
	if rows != evals || pages < 2 {
		t.Errorf("%d rows on %d pages", rows, pages)
	}
}

// No base has the aggregate that stands for none, and a base has no binding.
func TestNoBase(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		zero := api.PathBases + "/sha256:" + strings.Repeat("0", 64)
		for _, path := range []string{zero, zero + "/manifest", zero + "/artifacts", zero + "/evals.jsonl"} {
			if a := f.do("GET", path, nil); a.status != 400 || a.code() != api.CodeParameterInvalid {
				t.Errorf("%s: %v", path, a)
			}
		}
		if all := f.pages(api.PathArtifacts(f.a)+"?binding=none", 10); len(all) > 0 {
			t.Errorf("%+v", all)
		}
	})
}

// What many statements say hides nothing that others say.
func TestManyDerivations(t *testing.T) {
	f := grow(inMemory(t))
	derived := func(repo string, i int, from, to identity.Aggregate) {
		b, err := documents.Statement{Derived: &documents.Derived{How: documents.Quantize,
			Target: documents.Subject{Aggregate: to}, Sources: []documents.Subject{{Aggregate: from}}}, Reason: "r", By: "b",
			At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		f.made(repo, fmt.Sprint("s", i), api.ArtifactTypeStatement, []desc{f.titled(repo, "s.json", b)}, nil)
	}
	const noise = 600
	for i := range noise {
		derived("lab/noise", i, identity.Aggregate(identity.Sum(fmt.Append(nil, i))), f.b)
	}
	for i := range 300 {
		derived("lab/other", i, f.a, identity.Aggregate(identity.Sum(fmt.Append(nil, i))))
	}
	body := fmt.Sprintf(`{"a":{"aggregate_sha256":%q},"b":{"aggregate_sha256":%q}}`, f.a, f.b)
	var c api.Comparison
	if err := json.Unmarshal(f.want(200, "POST", api.PathCompare, []byte(body)).body, &c); err != nil {
		t.Fatal(err)
	}
	if len(c.DerivedFrom) != 1 || c.DerivedFrom[0].Statement != f.derive || c.MoreDerived {
		t.Errorf("%+v", c)
	}
	got, a := f.ask(same(&api.Side{Aggregate: f.b}, &api.Side{Aggregate: f.a}))
	if len(got.Derived) != 1 || got.Derived[0].Statement != f.derive || got.MoreDerived {
		t.Error(a)
	}
	seen, pages := map[identity.Aggregate]bool{}, 0
	l := get[api.Lineage](f.server, api.PathLineage(f.quant))
	children := len(l.Children)
	for ; ; pages++ {
		for _, p := range l.Parents {
			seen[p.Aggregate] = true
		}
		if l.NextParents == "" {
			break
		}
		l = get[api.Lineage](f.server, api.PathLineage(f.quant)+"?after="+l.NextParents)
		if len(l.Children) > 0 || l.Next != "" {
			t.Errorf("%+v", l)
		}
	}
	if len(seen) != noise+1 || !seen[f.a] || pages == 0 || children == 0 {
		t.Errorf("%d sources on %d pages", len(seen), pages)
	}
	// So many about the pair itself are cut with a sign.
	for i := range 600 {
		derived(fmt.Sprint("lab/pair", i), i, f.a, f.b)
	}
	got, a = f.ask(same(&api.Side{Aggregate: f.b}, &api.Side{Aggregate: f.a}))
	if len(got.Derived) < 256 || !got.MoreDerived {
		t.Error(a)
	}
}

// Bind statements that disagree decide nothing, and an answer names them.
func TestBindStatementsThatDisagree(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		bind := func(i int, base identity.Aggregate) identity.Digest {
			return f.statement("lab/peft", documents.Statement{Reason: fmt.Sprint("reason ", i),
				Bind: &documents.Bind{Artifact: f.plain, Aggregate: base}})
		}
		other := bind(0, f.b)
		bases := 0 // that the last row which was found says
		find := func(a identity.Aggregate) bool {
			return slices.ContainsFunc(f.pages(api.PathArtifacts(a)+"?kind=adapter", 10), func(a api.Artifact) bool {
				bases = a.Bases
				return a.Digest == f.plain && a.Repository == "lab/peft"
			})
		}
		if !find(f.a) || !find(f.b) || bases != 2 {
			t.Errorf("not found under both, or it is said to be under %d", bases)
		}
		nowhere := identity.Aggregate(identity.Sum([]byte("nowhere")))
		for _, base := range []identity.Aggregate{f.a, f.b, nowhere} {
			got, a := f.ask(trained("lab/peft:v1", &api.Side{Aggregate: base}))
			if got.Verdict != api.VerdictCannotTell || len(got.Reasons) != 1 || len(got.Artifact.Bindings) != 2 ||
				!strings.Contains(got.Reasons[0], f.bind.String()) || !strings.Contains(got.Reasons[0], other.String()) {
				t.Error(a)
			}
		}
		l := get[api.Lineage](f.server, api.PathLineage(f.plain)+"?repo=lab/peft")
		if len(l.Artifact.Bindings) != 2 || l.Artifact.Bases != 2 || l.Artifact.MoreBindings {
			t.Errorf("%+v", l)
		}
		for i := range 20 {
			bind(i, identity.Aggregate(identity.Sum(fmt.Append(nil, i))))
		}
		got, a := f.ask(trained("lab/peft:v1", &api.Side{Aggregate: nowhere}))
		if got.Verdict != api.VerdictCannotTell || !got.Artifact.MoreBindings || len(got.Artifact.Bindings) != 16 ||
			!strings.Contains(got.Reasons[0], "the 16 newest bind statements disagree") {
			t.Error(a)
		}
		l = get[api.Lineage](f.server, api.PathLineage(f.plain)+"?repo=lab/peft")
		if !l.Artifact.MoreBindings || len(l.Children) < 22 {
			t.Errorf("%+v", l)
		}
		// Once the 16 newest agree they decide, whatever the others say.
		for i := range 16 {
			bind(100+i, f.b)
		}
		for base, says := range map[identity.Aggregate]string{f.b: " in both, but for the artifact", f.a: f.b.String()} {
			got, a = f.ask(trained("lab/peft:v1", &api.Side{Aggregate: base}))
			if got.Verdict == api.VerdictNo != (base == f.a) || !strings.Contains(got.Reasons[0], says) ||
				!got.Artifact.MoreBindings || got.Artifact.Binding.Aggregate != f.b {
				t.Error(a)
			}
		}
		if find(f.a) || !find(f.b) || bases != 0 {
			t.Error("found under a base that no statement which counts names")
		}
	})
}
