package registry_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// ask posts a question.
func (f *family) ask(req api.CompatibilityRequest) (out api.Compatibility, a answer) {
	f.t.Helper()
	b, err := json.Marshal(req)
	if err != nil {
		f.t.Fatal(err)
	}
	a = f.do("POST", "/v1/compatibility", b)
	if a.status == 200 {
		if err := json.Unmarshal(a.body, &out); err != nil {
			f.t.Fatal(err)
		}
	}
	return out, a
}

// The four questions.
func same(a, b *api.Side) api.CompatibilityRequest {
	return api.CompatibilityRequest{Question: api.QuestionSameBase, Base: a, Other: b}
}

func trained(artifact string, base *api.Side) api.CompatibilityRequest {
	return api.CompatibilityRequest{Question: api.QuestionAdapter, Artifact: artifact, Base: base}
}

func used(artifact string, base *api.Side, run *int) api.CompatibilityRequest {
	return api.CompatibilityRequest{Question: api.QuestionEval, Artifact: artifact, Base: base, Run: run}
}

func resume(artifact string, base *api.Side, request []byte) api.CompatibilityRequest {
	return api.CompatibilityRequest{Question: api.QuestionResume, Artifact: artifact, Base: base, Request: request}
}

func TestCompatibility(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		a, b := &api.Side{Aggregate: f.a}, &api.Side{Reference: "team/quant:v1"}
		other := &api.Side{Aggregate: identity.Aggregate(identity.Sum([]byte("nowhere")))}
		request := []byte(`{"schema_version":1,"request_type":"kiln.resume-request.v1","training_kind":"sft",` +
			`"adapter_name":"demo"}`)
		wrong := bytes.Replace(request, []byte("demo"), []byte("else"), 1)
		for name, c := range map[string]struct {
			req     api.CompatibilityRequest
			verdict string
			says    string
		}{
			"same":         {same(a, &api.Side{Reference: "lab/renamed:v1"}), "yes", f.a.String()},
			"not the same": {same(a, b), "no", f.derive.String()},
			"not held":     {same(other, other), "yes", "not seen on both sides"},
			"trained":      {trained("team/adapters:sql", a), "yes", f.a.String()},
			"by digest":    {trained(f.sql.String(), a), "yes", `"model config"`},
			"from another": {trained(f.sql.String(), b), "no", `"derived_from"`},
			"from unheld":  {trained(f.sql.String(), other), "no", other.Aggregate.String()},
			"bound":        {trained("lab/peft:v1", a), "cannot_tell", f.bind.String()},
			"unbound":      {trained("lab/unbound:v1", a), "cannot_tell", "its name is no identity"},
			"no base":      {trained(f.sql.String(), nil), "cannot_tell", "no base was given"},
			"eval":         {used("team/evals:e1", a, new(int)), "yes", "adapter content"},
			"rows":         {used("lab/rows:e3", b, nil), "no", f.b.String()},
			"resume":       {resume("team/run:new", a, request), "no", "no execution provenance"},
			"other name":   {resume("team/run:new", a, wrong), "no", `"first_failure"`},
			"legacy":       {resume("team/run:legacy", a, request), "no", `"archival"`},
			"resume on b":  {resume(f.checkpoint.String(), b, nil), "no", f.b.String()},
		} {
			got, answer := f.ask(c.req)
			if got.Verdict != c.verdict || !strings.Contains(string(answer.body), c.says) || len(got.Reasons) == 0 ||
				got.Question != c.req.Question || !slices.Equal(got.NotProven, api.NotProven) {
				t.Errorf("%s: %v\nwant %s, %q", name, string(answer.body), c.verdict, c.says)
			}
			if got.Verdict == "yes" && len(got.Derived) > 0 {
				t.Errorf("%s: %+v", name, got)
			}
		}
		for name, req := range map[string]api.CompatibilityRequest{
			"no question": {},
			"one base":    {Question: "same_base_weights", Base: a},
			"two ways":    {Question: "same_base_weights", Base: a, Other: &api.Side{Aggregate: f.a, Reference: "a:b"}},
			"other kind":  {Question: "eval_used", Artifact: "team/adapters:sql", Base: a},
			"no such run": {Question: "eval_used", Artifact: "lab/rows:e3", Base: a, Run: new(int)},
			"bad request": {Question: "resume_exact", Artifact: "team/run:new", Base: a, Request: []byte(`{"a":1}`)},
			"no artifact": {Question: "resume_exact", Base: a},
			"no identities": {Question: "adapter_trained_from", Artifact: "team/adapters:sql",
				Identities: map[string]identity.Digest{"x": f.sql}},
		} {
			if _, a := f.ask(req); a.status != 400 {
				t.Errorf("%s: %v", name, a)
			}
		}
		if a := f.do("POST", "/v1/compatibility", []byte(`{"question":"same_base_weights","bse":{}}`)); a.status != 400 {
			t.Error(a)
		}
	})
}

// resumable pushes a checkpoint to team/run:v1, and returns its base, the layers of its files, and a request that may
// resume from it.
func (s *server) resumable() (base identity.Manifest, files []desc, request []byte) {
	s.t.Helper()
	example := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("../identity/documents/testdata", name))
		if err != nil {
			s.t.Fatal(err)
		}
		return bytes.TrimSpace(b)
	}
	text := example("checkpoint_manifest.json")
	files = []desc{
		s.titled("team/run", "adapter.safetensors", []byte("adapter")),
		s.titled("team/run", "sft_loop_state.json", []byte("[1.0]")),
		s.titled("team/run", documents.CheckpointFile, text)}
	s.made("team/run", "v1", api.ArtifactTypeCheckpoint, files, nil)
	var c map[string]any
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&c); err != nil {
		s.t.Fatal(err)
	}
	q := map[string]any{"schema_version": 1, "request_type": "kiln.resume-request.v1", "seed": 7,
		"execution_provenance": json.RawMessage(example("provenance.json"))}
	for _, name := range []string{"training_kind", "adapter_name", "effective_config", "precision_policy", "data",
		"optimizer", "scheduler", "rng_states", "state_files", "auxiliary_state"} {
		q[name] = c[name]
	}
	progress := c["progress"].(map[string]any)
	q["total_steps"], q["data_order"] = progress["total_steps"], progress["data_order"]
	request, err := json.Marshal(q)
	if err == nil {
		base, err = identity.Parse(example("base.json"))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return base, files, request
}

// A run may go on if everything was compared and is equal. What the request leaves out can't be told.
func TestResumeExactly(t *testing.T) {
	s := newServer(t)
	base, _, request := s.resumable()
	f := &family{server: s}
	ask := func(request []byte) api.Compatibility {
		t.Helper()
		got, a := f.ask(resume("team/run:v1", &api.Side{Manifest: &base}, request))
		if a.status != 200 {
			t.Fatal(a)
		}
		return got
	}
	if got := ask(request); got.Verdict != api.VerdictYes || len(got.Steps) < 7 || len(got.NotRecorded) > 0 {
		t.Errorf("%+v", got)
	}
	if got := ask(nil); got.Verdict != api.VerdictCannotTell || len(got.Compared) == 0 || len(got.NotRecorded) == 0 ||
		len(got.Reasons) != len(got.NotRecorded) {
		t.Errorf("bare: %+v", got)
	}
	if got := ask(bytes.Replace(request, []byte(`"total_steps":2`), []byte(`"total_steps":3`), 1)); got.Failure == "" ||
		got.Verdict != api.VerdictNo || len(got.Reasons) != 1 {
		t.Errorf("%+v", got)
	}
}

// Two bases that differ are never the same, whatever a statement says; the answer shows it.
func TestCompareShowsDerivations(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		for _, sides := range [][2]identity.Aggregate{{f.a, f.b}, {f.b, f.a}} {
			body := fmt.Sprintf(`{"a":{"aggregate_sha256":%q},"b":{"aggregate_sha256":%q}}`, sides[0], sides[1])
			var c api.Comparison
			if err := json.Unmarshal(f.want(200, "POST", api.PathCompare, []byte(body)).body, &c); err != nil {
				t.Fatal(err)
			}
			want := api.Derivation{From: f.a, To: f.b, How: "quantize", Reason: "seen", By: "ana", Repository: "team/quant",
				Statement: f.derive}
			if c.Same || len(c.DerivedFrom) != 1 || c.DerivedFrom[0] != want || !slices.Equal(c.NotProven, api.NotProven) {
				t.Errorf("%+v", c)
			}
		}
	})
}
