package made_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/made"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// world is a registry with a base, and a folder.
type world struct {
	host  string
	dir   string
	model string
	base  identity.Manifest
	c     *client.Client
}

func dial(host string, _ bool) (*client.Client, error) { return client.New(host, client.Options{}) }

// writeModel writes a model of one shard.
func writeModel(t *testing.T, dir, shard, content string) {
	t.Helper()
	header := `{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
	b := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header+content...)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, shard), b, 0o644)); err != nil {
		t.Fatal(err)
	}
}

func newWorld(t *testing.T) world {
	t.Helper()
	t.Setenv("HOME", t.TempDir())
	srv := httptest.NewServer(testregistry.New(t))
	t.Cleanup(srv.Close)
	w := world{host: strings.TrimPrefix(srv.URL, "http://"), dir: t.TempDir()}
	var err error
	if w.c, err = client.New(w.host, client.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.c.Close)
	w.model = filepath.Join(w.dir, "model")
	writeModel(t, w.model, "model.safetensors", "0123")
	w.push(t, w.model, "team/model")
	h, err := made.OpenHere(t.Context(), w.model, dial, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.base = h.Base.Manifest
	return w
}

func (w world) push(t *testing.T, dir, repo string) transfer.Pushed {
	t.Helper()
	pushed, err := transfer.Push(t.Context(), w.c, dir, client.Reference{Host: w.host, Repo: repo, Tag: "v1"},
		transfer.PushOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pushed
}

// send pushes what was made from a base and resolves it again.
func (w world) send(t *testing.T, kind api.Kind, path, repo string) transfer.Plan {
	t.Helper()
	a, err := artifact.Read(t.Context(), kind, path, artifact.Options{Legacy: true})
	if err != nil {
		t.Fatal(err)
	}
	ref := client.Reference{Host: w.host, Repo: repo, Tag: "v1"}
	if _, err := a.Push(t.Context(), w.c, ref, nil); err != nil {
		t.Fatal(err)
	}
	plan, err := transfer.Resolve(t.Context(), w.c, ref)
	if err != nil {
		t.Fatal(err)
	}
	if plan.Kind != kind {
		t.Errorf("%s is of kind %q", repo, plan.Kind)
	}
	return plan
}

func (w world) path(name string) string { return filepath.Join(w.dir, name) }

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestSame: a folder and the artifact that was pushed from it are read as the same.
func TestSame(t *testing.T) {
	w := newWorld(t)
	if err := errors.Join(
		testartifact.Adapter(w.path("sql"), 1, &w.base), testartifact.PEFT(w.path("peft"), 2),
		testartifact.Adapter(w.path("unbound"), 3, nil),
		testartifact.Checkpoint(w.path("a.kiln-checkpoint"), 1, &w.base, false),
		testartifact.Checkpoint(w.path("b.kiln-checkpoint"), 1, &w.base, true),
	); err != nil {
		t.Fatal(err)
	}
	write(t, w.path("receipt.json"), testartifact.Receipt("r", identity.Sum(nil), &w.base))
	write(t, w.path("eval.json"), testartifact.Eval("e", "sql", &w.base))
	write(t, w.path("rows.jsonl"), testartifact.Row("1", &w.base))
	write(t, w.path("mixed.jsonl"), append(testartifact.Row("1", &w.base), testartifact.Row("2", nil)...))
	for _, c := range []struct {
		kind     api.Kind
		path     string
		name     string
		evidence documents.Evidence
		legacy   bool
	}{
		{api.KindAdapter, "sql", "sql", documents.EvidenceDocument, false},
		{api.KindAdapter, "peft", "", documents.EvidenceNone, false},
		{api.KindAdapter, "unbound", "unbound", documents.EvidenceNone, true},
		{api.KindCheckpoint, "a.kiln-checkpoint", "demo", documents.EvidenceDocument, false},
		{api.KindCheckpoint, "b.kiln-checkpoint", "demo", documents.EvidenceAggregateOnly, true},
		{api.KindReceipt, "receipt.json", "r", documents.EvidenceDocument, false},
		{api.KindEval, "eval.json", "e", documents.EvidenceDocument, false},
		{api.KindEval, "rows.jsonl", "rows", documents.EvidenceDocument, false},
		{api.KindEval, "mixed.jsonl", "mixed", documents.EvidenceAggregateOnly, true},
	} {
		plan := w.send(t, c.kind, w.path(c.path), "made/"+strings.ToLower(strings.ReplaceAll(c.path, ".", "-")))
		far, err := made.Read(t.Context(), w.c, plan)
		if err != nil {
			t.Errorf("%s: %v", c.path, err)
			continue
		}
		near, err := made.Open(t.Context(), c.kind, w.path(c.path), dial, nil)
		if err != nil {
			t.Errorf("%s: %v", c.path, err)
			continue
		}
		for _, a := range []made.Artifact{far, near} {
			if a.Kind != c.kind || a.Name != c.name || a.Binding().Evidence != c.evidence || a.Legacy != c.legacy ||
				(a.Checkpoint != nil) != (c.kind == api.KindCheckpoint) ||
				a.Aggregate().IsZero() != (c.evidence == documents.EvidenceNone) {
				t.Errorf("%s: %+v", c.path, a)
			}
		}
		if near.Checked == far.Checked || near.Binding().Where() != far.Binding().Where() {
			t.Errorf("%s: %q, %q", c.path, near.Binding().Where(), far.Binding().Where())
		}
	}
}

// TestRowsOfTwoBases: outcome rows of several bases are an eval of each.
func TestRowsOfTwoBases(t *testing.T) {
	w := newWorld(t)
	second, third := w.path("second"), w.path("third")
	for _, dir := range []string{second, third} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeModel(t, second, "model.safetensors", "4567")
	writeModel(t, third, "model.safetensors", "89ab")
	var here []made.Here
	for _, dir := range []string{w.model, second, third} {
		h, err := made.OpenHere(t.Context(), dir, dial, nil)
		if err != nil {
			t.Fatal(err)
		}
		here = append(here, h)
	}
	write(t, w.path("both.jsonl"), append(testartifact.Row("1", &w.base), testartifact.Row("2", &here[1].Base.Manifest)...))
	far, err := made.Read(t.Context(), w.c, w.send(t, api.KindEval, w.path("both.jsonl"), "made/both"))
	if err != nil {
		t.Fatal(err)
	}
	near, err := made.Open(t.Context(), api.KindEval, w.path("both.jsonl"), dial, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []made.Artifact{far, near} {
		for i, want := range []resume.Verdict{resume.Yes, resume.Yes, resume.No} {
			if got := made.Compare(a, here[i]); got.Verdict != want || got.Evidence != documents.EvidenceDocument {
				t.Errorf("%s, base %d: %+v", a.Reference, i, got)
			}
		}
	}
	// A row that names none may have used any.
	write(t, w.path("open.jsonl"), append(testartifact.Row("1", &w.base), testartifact.Row("2", nil)...))
	a, err := made.Open(t.Context(), api.KindEval, w.path("open.jsonl"), dial, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, h := range here {
		if got := made.Compare(a, h); got.Verdict != resume.CannotTell {
			t.Errorf("a row without a base, base %d: %+v", i, got)
		}
	}
	// The one that is named, of several, becomes what the manifest claims.
	for i, refused := range []bool{false, false, true} {
		_, err := artifact.Read(t.Context(), api.KindEval, w.path("both.jsonl"),
			artifact.Options{Base: artifact.Base{Aggregate: here[i].Aggregate()}})
		if (err != nil) != refused {
			t.Errorf("--base %d: %v", i, err)
		}
	}
}

// TestClaims: every claim about the base is held against every other one.
func TestClaims(t *testing.T) {
	w := newWorld(t)
	err := errors.Join(testartifact.Adapter(w.path("sql"), 1, &w.base), testartifact.PEFT(w.path("peft"), 2))
	if err != nil {
		t.Fatal(err)
	}
	sql := w.send(t, api.KindAdapter, w.path("sql"), "team/model")
	peft := w.send(t, api.KindAdapter, w.path("peft"), "team/model")
	base, err := transfer.ResolveAggregate(t.Context(), w.c, w.base.Aggregate, "")
	if err != nil {
		t.Fatal(err)
	}
	other := identity.Aggregate(identity.Sum([]byte("other")))
	for name, c := range map[string]struct {
		plan transfer.Plan
		says func(*transfer.Plan)
		want documents.Evidence
		err  string
	}{
		"document":             {sql, func(p *transfer.Plan) {}, documents.EvidenceDocument, ""},
		"annotation":           {peft, func(p *transfer.Plan) { p.Claim = other.String() }, documents.EvidenceAsserted, ""},
		"subject":              {peft, func(p *transfer.Plan) { p.Subject = base.Manifest }, documents.EvidenceAsserted, ""},
		"subject is no base":   {peft, func(p *transfer.Plan) { p.Subject = sql.Manifest }, documents.EvidenceNone, ""},
		"subject is not there": {peft, func(p *transfer.Plan) { p.Subject = identity.Sum(nil) }, documents.EvidenceNone, ""},
		"other annotation":     {sql, func(p *transfer.Plan) { p.Claim = other.String() }, "", "(base-conflict)"},
		"annotation and subject": {peft, func(p *transfer.Plan) {
			p.Claim, p.Subject = other.String(), base.Manifest
		}, documents.EvidenceAsserted, ""},
		"odd annotation": {peft, func(p *transfer.Plan) { p.Claim = "x" }, "", api.AnnotationAggregate},
		"file":           {sql, func(p *transfer.Plan) { p.Files = exchange(p) }, "", "(file-digest)"},
	} {
		c.says(&c.plan)
		a, err := made.Read(t.Context(), w.c, c.plan)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil || a.Binding().Evidence != c.want {
			t.Errorf("%s: %+v, %v", name, a.Binding(), err)
		}
		if conflict := name == "annotation and subject"; conflict != (a.Conflict != "") || conflict && a.Aggregate() != other {
			t.Errorf("%s: %s, %q", name, a.Aggregate(), a.Conflict)
		}
	}
	if _, err := made.Read(t.Context(), w.c, base); !errors.Is(err, made.ErrNotMade) {
		t.Errorf("a base: %v", err)
	}
}

// TestNoLineage: registries that keep no lineage, whatever they answer, have no word about what says its base itself.
func TestNoLineage(t *testing.T) {
	w := newWorld(t)
	if err := testartifact.Adapter(w.path("sql"), 1, &w.base); err != nil {
		t.Fatal(err)
	}
	plan := w.send(t, api.KindAdapter, w.path("sql"), "team/model")
	to := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: w.host})
	for name, answer := range map[string]http.HandlerFunc{
		"not found": http.NotFound,
		"refused":   func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusForbidden) },
		"another":   func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write([]byte(`{}`)) },
		"page": func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/html")
			_, _ = rw.Write([]byte("<html>log in</html>"))
		},
	} {
		mux := http.NewServeMux()
		mux.Handle("/v2/", to)
		mux.Handle("/v1/", answer)
		srv := httptest.NewServer(mux)
		defer srv.Close()
		c, err := client.New(strings.TrimPrefix(srv.URL, "http://"), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		a, err := made.Read(t.Context(), c, plan)
		if err != nil || a.Conflict != "" || a.Disputed != "" || a.Aggregate() != w.base.Aggregate {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}

// exchange gives the weights another digest.
func exchange(p *transfer.Plan) (files []staging.File) {
	for _, f := range p.Files {
		if f.Name == documents.AdapterWeightsFile {
			f.Digest = identity.Sum([]byte("others"))
		}
		files = append(files, f)
	}
	return files
}

func TestOpen(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		text string
		is   error
	}{
		{w.host + "/team/model:v1", made.ErrNotMade}, {w.host + "/team/none:v1", api.ErrManifestUnknown},
		{"nowhere", fs.ErrNotExist}, {w.host + "/team/model", transfer.ErrNoTag},
	} {
		if _, err := made.Open(t.Context(), api.KindAdapter, c.text, dial, nil); !errors.Is(err, c.is) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}

func TestOpenHere(t *testing.T) {
	w := newWorld(t)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
			_, _ = rw.Write([]byte(`{"status":"ok","base_weight_identity":null}`))
		default:
			http.NotFound(rw, r)
		}
	}))
	defer srv.Close()
	for _, text := range []string{w.model, w.host + "/team/model:v1", w.base.Aggregate.String()} {
		h, err := made.OpenHere(t.Context(), text, dial, nil)
		if err != nil || h.Aggregate() != w.base.Aggregate || h.Name != text {
			t.Errorf("%s: %+v, %v", text, h, err)
		}
	}
	state := http.NewServeMux()
	answers := map[string]any{"/health": api.Health{Status: "ok", BaseWeightIdentity: new(w.base.Summary())}}
	for _, path := range []string{"/health", "/v1/debug/model-state"} {
		state.HandleFunc(path, func(rw http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(rw).Encode(answers[path]) })
	}
	full := httptest.NewServer(state)
	defer full.Close()
	answers["/v1/debug/model-state"] = map[string]any{"model": map[string]any{"base_weight_shard_manifest": w.base}}
	h, err := made.OpenHere(t.Context(), full.URL, dial, nil)
	if err != nil || len(h.Base.Manifest.Shards) != 1 || h.Provenance != nil {
		t.Errorf("%+v, %v", h, err)
	}
	other, err := identity.New([]identity.Shard{{Filename: "x.safetensors", Size: 1}})
	if err != nil {
		t.Fatal(err)
	}
	answers["/v1/debug/model-state"] = map[string]any{"model": map[string]any{"base_weight_shard_manifest": other}}
	if _, err := made.OpenHere(t.Context(), full.URL, dial, nil); err == nil || !strings.Contains(err.Error(), "which") {
		t.Errorf("two answers of one server: %v", err)
	}
	lie := w.base.Summary()
	lie.ShardCount++
	answers["/health"] = api.Health{Status: "ok", BaseWeightIdentity: &lie}
	answers["/v1/debug/model-state"] = map[string]any{"model": map[string]any{"base_weight_shard_manifest": w.base}}
	if _, err := made.OpenHere(t.Context(), full.URL, dial, nil); err == nil || !strings.Contains(err.Error(), "wrong") {
		t.Errorf("two counts of one server: %v", err)
	}
	h, err = made.OpenHere(t.Context(), srv.URL, dial, nil)
	if err != nil || !h.Base.Absent || !h.Aggregate().IsZero() {
		t.Errorf("%+v, %v", h, err)
	}
	if answer := made.Compare(made.Artifact{Kind: api.KindEval}, h); answer.Verdict != resume.CannotTell {
		t.Errorf("%+v", answer)
	}
	if _, err := made.OpenHere(t.Context(), srv.URL+"/other", dial, nil); err == nil {
		t.Error("another path is a health check")
	}
}

// TestOneDocument: an eval and a receipt are one document, as it is; else it is not read, and the files are named.
func TestOneDocument(t *testing.T) {
	w := newWorld(t)
	write(t, w.path("eval.json"), testartifact.Eval("e", "sql", &w.base))
	write(t, w.path("train_receipt.json"), testartifact.Receipt("r", identity.Sum(nil), &w.base))
	for kind, name := range map[api.Kind]string{api.KindEval: "eval.json", api.KindReceipt: "train_receipt.json"} {
		plan := w.send(t, kind, w.path(name), "team/"+string(kind))
		if _, err := made.Read(t.Context(), w.c, plan); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		two := plan
		two.Files = append(slices.Clone(plan.Files), staging.File{Name: "a.json"})
		_, err := made.Read(t.Context(), w.c, two)
		if !errors.Is(err, made.ErrDocuments) || !strings.Contains(err.Error(), "a.json") ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: two documents: %v", kind, err)
		}
		plan.Encoded = []string{name}
		if _, err = made.Read(t.Context(), w.c, plan); !errors.Is(err, made.ErrDocuments) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: encoded: %v", kind, err)
		}
	}
}
