package resume

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

const exampleBase = "sha256:c62f9f56234c61c943716ae3b8783c851fb41a2551e31f17d15f1b0c346339b5"

func example(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "documents", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// edit makes each replacement where the old text stands, which must be one place.
func edit(t testing.TB, data []byte, edits ...string) []byte {
	t.Helper()
	for i := 0; i < len(edits); i += 2 {
		if n := bytes.Count(data, []byte(edits[i])); n != 1 {
			t.Fatalf("%q stands %d times in %s", edits[i], n, data)
		}
		data = bytes.Replace(data, []byte(edits[i]), []byte(edits[i+1]), 1)
	}
	return data
}

func checkpoint(t testing.TB, edits ...string) documents.Checkpoint {
	t.Helper()
	c, err := documents.ParseCheckpoint(edit(t, example(t, "checkpoint_manifest.json"), edits...))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func provenance(t testing.TB) *documents.Provenance {
	t.Helper()
	p, err := documents.ParseProvenance(example(t, "provenance.json"))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func shards(t testing.TB, name string, fill byte) identity.Manifest {
	t.Helper()
	m, err := identity.New([]identity.Shard{{Filename: name, Size: 11, Digest: [32]byte(bytes.Repeat([]byte{fill}, 32))}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// requestText is a request that repeats what a checkpoint says.
func requestText(t testing.TB, checkpoint []byte) []byte {
	t.Helper()
	var all struct {
		Training  json.RawMessage `json:"training_kind"`
		Adapter   json.RawMessage `json:"adapter_name"`
		Config    json.RawMessage `json:"effective_config"`
		Precision json.RawMessage `json:"precision_policy"`
		Data      json.RawMessage `json:"data"`
		Optimizer json.RawMessage `json:"optimizer"`
		Scheduler json.RawMessage `json:"scheduler"`
		RNG       json.RawMessage `json:"rng_states"`
		State     json.RawMessage `json:"state_files"`
		Auxiliary json.RawMessage `json:"auxiliary_state"`
		Progress  struct {
			Total json.RawMessage `json:"total_steps"`
			Order json.RawMessage `json:"data_order"`
		} `json:"progress"`
	}
	if err := json.Unmarshal(checkpoint, &all); err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(nil, `{"schema_version":1,"request_type":"kiln.resume-request.v1","seed":7,"training_kind":%s,`+
		`"adapter_name":%s,"effective_config":%s,"precision_policy":%s,"data":%s,"total_steps":%s,"data_order":%s,`+
		`"optimizer":%s,"scheduler":%s,"rng_states":%s,"state_files":%s,"execution_provenance":%s,"auxiliary_state":%s}`,
		all.Training, all.Adapter, all.Config, all.Precision, all.Data, all.Progress.Total, all.Progress.Order,
		all.Optimizer, all.Scheduler, all.RNG, all.State, example(t, "provenance.json"), all.Auxiliary)
}

func request(t testing.TB, text []byte, edits ...string) Request {
	t.Helper()
	q, err := ParseRequest(edit(t, text, edits...))
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// full is a request and a current side that agree with the example checkpoint in everything.
func full(t testing.TB, edits ...string) (documents.Checkpoint, Request, Current) {
	t.Helper()
	data := edit(t, example(t, "checkpoint_manifest.json"), edits...)
	c, err := documents.ParseCheckpoint(data)
	if err != nil {
		t.Fatal(err)
	}
	return c, request(t, requestText(t, data)),
		Current{Base: Base{Manifest: shards(t, "model.safetensors", 0x42)}, Provenance: provenance(t), FilesChecked: true}
}

// find returns the step of a name.
func find(t testing.TB, r Report, name string) Step {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no step %q in %+v", name, r)
	return Step{}
}

// checkReport checks what holds for every report.
func checkReport(t *testing.T, r Report) {
	t.Helper()
	want, first, last := Yes, "", 0
	for _, s := range r.Steps {
		if s.Reason == "" || strings.ContainsAny(s.Reason, "\n\r") || s.Name == "" || s.Number < last {
			t.Errorf("bad step %+v", s)
		}
		last = s.Number
		switch {
		case s.Verdict == No:
			if want != No {
				first = s.Name
			}
			want = No
		case s.Verdict == CannotTell && want == Yes:
			want = CannotTell
		case s.Verdict != Yes && s.Verdict != CannotTell:
			t.Errorf("bad verdict %+v", s)
		}
	}
	if r.Verdict != want || r.FirstFailure != first || r.NotProven != NotProven {
		t.Errorf("verdict %s at %q, want %s at %q", r.Verdict, r.FirstFailure, want, first)
	}
}

func TestDecideYes(t *testing.T) {
	c, q, now := full(t)
	r := Decide(c, q, now)
	checkReport(t, r)
	if r.Verdict != Yes || r.Archival != "" || r.Renamed != "" || len(r.Steps) != 18 {
		t.Errorf("%+v", r)
	}
	for _, s := range r.Steps {
		if s.Verdict != Yes {
			t.Errorf("%+v", s)
		}
	}
	text, err := json.Marshal(r)
	if err != nil || !bytes.Contains(text, []byte(`"not_proven":"The base manifest proves`)) {
		t.Errorf("%s, %v", text, err)
	}
}

// TestDecideBare asks with nothing but a base: the base passes, all that the request leaves out can't be told.
func TestDecideBare(t *testing.T) {
	r := Decide(checkpoint(t), Request{}, Current{Base: Base{Manifest: shards(t, "model.safetensors", 0x42)}})
	checkReport(t, r)
	for _, s := range r.Steps {
		want := CannotTell
		if s.Name == "base weights" || s.Name == "resident base" {
			want = Yes
		}
		if s.Verdict != want {
			t.Errorf("%+v, want %s", s, want)
		}
	}
	if r.Verdict != CannotTell {
		t.Errorf("%+v", r)
	}
}

func TestDecideNothing(t *testing.T) {
	r := Decide(checkpoint(t), Request{}, Current{})
	checkReport(t, r)
	for _, s := range r.Steps {
		if s.Verdict != CannotTell {
			t.Errorf("%+v", s)
		}
	}
}

// TestDecideRequest changes one member of the request: that step and no other says no, with both values.
func TestDecideRequest(t *testing.T) {
	for _, c := range []struct{ old, new, step, says string }{
		{`"seed":7,"training_kind"`, `"seed":"8","training_kind"`, "seed", "7 in the checkpoint, 8 in the request"},
		{`"training_kind":"sft"`, `"training_kind":"grpo"`, "training kind", "sft in the checkpoint, grpo in this run"},
		{`"adapter_name":"demo"`, `"adapter_name":"other"`, "adapter name", `"demo" in the checkpoint, "other"`},
		{`"effective_config":{"seed":7}`, `"effective_config":{"seed":7.0}`, "effective config",
			"effective_config.seed is 7 in the checkpoint, 7.0 in this run"},
		{`"effective_config":{"seed":7}`, `"effective_config":{"seed":7,"x":null}`, "effective config",
			"effective_config.x is not there in the checkpoint, null"},
		{`"parameter_dtype":"bf16"`, `"parameter_dtype":"f32"`, "precision policy", `parameter_dtype is "bf16"`},
		{`"mode":"round_to_nearest"`, `"mode":"stochastic"`, "precision policy", "stochastic_rounding.mode"},
		{`"item_count":2`, `"item_count":3`, "data identity", "with 3 items"},
		{`"content_sha256":"1`, `"content_sha256":"2`, "data identity", "2111"},
		{`"total_steps":2`, `"total_steps":3`, "total steps", "2 in the checkpoint, 3"},
		{`"kind":"sgd"`, `"kind":"muon"`, "optimizer", `"sgd" in the checkpoint, "muon"`},
		{`"hyperparameters":{}`, `"hyperparameters":{"lr":1e-3}`, "optimizer", "hyperparameters.lr"},
		{`"hyperparameters":{}`, `"hyperparameters":{},"state_file":"o"`, "optimizer", `"o"`},
		{`"step":1,"hyperparameters"`, `"step":2,"hyperparameters"`, "optimizer", "step"},
		{`"kind":"constant"`, `"kind":"cosine"`, "scheduler", "cosine"},
		{`"state":{}`, `"state":{"a":[1,2]}`, "scheduler", "scheduler.state.a"},
		{`"step":1,"state"`, `"step":0,"state"`, "scheduler", "step"},
		{`"position":0`, `"position":1`, "random number streams", "with seed 7 at 0"},
		{`"rng_states":{`, `"rng_states":{"b":{"algorithm":"x","seed":1,"position":0},`, "random number streams",
			`"b" is not there`},
		{`"lora-init"`, `"lora"`, "random number streams", `"lora" is not there in the checkpoint`},
		{`"adapter_parameters":"adapter.safetensors"`, `"adapter_parameters":"other.safetensors"`, "state files",
			`"adapter.safetensors" in the checkpoint, "other.safetensors"`},
		{`"loss_history":"sft_loop_state.json"`, `"ema_state":"e"`, "state files", "ema_state is none in the checkpoint"},
		{`"data_order":[1,0]`, `"data_order":[0,1]`, "progress and loop state", "item 0 of the data order is 1"},
		{`"data_order":[1,0]`, `"data_order":[1]`, "progress and loop state", "2 items in the checkpoint, 1"},
		{`"auxiliary_state":{`, `"auxiliary_state":{"x":1,`, "auxiliary state", "auxiliary_state.x"},
	} {
		cp, _, now := full(t)
		q := request(t, requestText(t, example(t, "checkpoint_manifest.json")), c.old, c.new)
		r := Decide(cp, q, now)
		checkReport(t, r)
		s := find(t, r, c.step)
		if r.Verdict != No || r.FirstFailure != c.step || s.Verdict != No || !strings.Contains(s.Reason, c.says) {
			t.Errorf("%s: first failure %q, %+v", c.new, r.FirstFailure, s)
		}
		for _, other := range r.Steps {
			if other.Name != c.step && other.Verdict != Yes {
				t.Errorf("%s: %+v", c.new, other)
			}
		}
	}
}

// TestDecideLeftOut leaves one member out: that step can't be told, and every other says yes.
func TestDecideLeftOut(t *testing.T) {
	for member, names := range map[string][]string{
		"seed": {"seed"}, "training_kind": {"training kind"}, "adapter_name": {"adapter name"},
		"effective_config": {"effective config"}, "precision_policy": {"precision policy"}, "data": {"data identity"},
		"total_steps": {"total steps"}, "data_order": {"progress and loop state"}, "optimizer": {"optimizer"},
		"scheduler": {"scheduler"}, "rng_states": {"random number streams"}, "state_files": {"state files"},
		"execution_provenance": nil, "auxiliary_state": {"auxiliary state"},
	} {
		var all map[string]json.RawMessage
		cp, _, now := full(t)
		if err := json.Unmarshal(requestText(t, example(t, "checkpoint_manifest.json")), &all); err != nil {
			t.Fatal(err)
		}
		for _, left := range []string{"absent", "null"} {
			delete(all, member)
			if left == "null" {
				all[member] = json.RawMessage("null")
			}
			text, err := json.Marshal(all)
			if err != nil {
				t.Fatal(err)
			}
			r := Decide(cp, request(t, text), now)
			checkReport(t, r)
			for _, s := range r.Steps {
				want := Yes
				for _, n := range names {
					if s.Name == n {
						want = CannotTell
					}
				}
				if s.Verdict != want {
					t.Errorf("%s %s: %+v, want %s", member, left, s, want)
				}
			}
		}
	}
}

// TestDecideStepLeftOut: an optimizer or a scheduler whose step is left out can't be told to be equal, unless something
// else of it says no.
func TestDecideStepLeftOut(t *testing.T) {
	for _, c := range []struct {
		old, new, step string
		want           Verdict
	}{
		{`"step":1,"hyperparameters":{}`, `"hyperparameters":{}`, "optimizer", CannotTell},
		{`"step":1,"hyperparameters":{}`, `"step":null,"hyperparameters":{}`, "optimizer", CannotTell},
		{`"step":1,"hyperparameters":{}`, `"hyperparameters":{"lr":1}`, "optimizer", No},
		{`"step":1,"state":{}`, `"state":{}`, "scheduler", CannotTell},
		{`"step":1,"state":{}`, `"state":{"a":1}`, "scheduler", No},
	} {
		cp, _, now := full(t)
		r := Decide(cp, request(t, requestText(t, example(t, "checkpoint_manifest.json")), c.old, c.new), now)
		checkReport(t, r)
		for _, s := range r.Steps {
			want := Yes
			if s.Name == c.step {
				want = c.want
			}
			if s.Verdict != want {
				t.Errorf("%s: %+v, want %s", c.new, s, want)
			}
		}
	}
}

// TestDecideSpelling repeats the checkpoint in other spellings that mean the same.
func TestDecideSpelling(t *testing.T) {
	c, _, now := full(t, `"effective_config":{"seed":7}`,
		`"effective_config":{"a":1.50,"b":-0.0,"c":18446744073709551615,"d":"é"}`)
	q := request(t, requestText(t, edit(t, example(t, "checkpoint_manifest.json"),
		`"effective_config":{"seed":7}`,
		"\"effective_config\":{ \"d\":\"\\u00e9\", \"c\" : 18446744073709551615,\"b\":0e5,\n\"a\":15E-1}")))
	if r := Decide(c, q, now); r.Verdict != Yes {
		t.Errorf("%+v", r)
	}
}

func TestDecideRenamed(t *testing.T) {
	c, q, now := full(t)
	now.Base = Base{Manifest: shards(t, "other.safetensors", 0x42)}
	for name, q := range map[string]Request{"full": q, "bare": {}} {
		r := Decide(c, q, now)
		checkReport(t, r)
		base, aux := find(t, r, "base weights"), find(t, r, "auxiliary state")
		if base.Verdict != Yes || !strings.Contains(base.Reason, "other file names") || aux.Verdict != No ||
			r.FirstFailure != "auxiliary state" || !strings.Contains(r.Renamed, "model.safetensors in the checkpoint and "+
			"other.safetensors here") || !strings.Contains(aux.Reason, "original names") {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

func TestDecideOtherBase(t *testing.T) {
	c, q, now := full(t)
	now.Base = Base{Manifest: shards(t, "model.safetensors", 0x43)}
	r := Decide(c, q, now)
	checkReport(t, r)
	base := find(t, r, "base weights")
	if base.Verdict != No || r.FirstFailure != "base weights" || !strings.Contains(base.Reason, exampleBase) ||
		!strings.Contains(base.Reason, now.Base.Manifest.Aggregate.String()) || find(t, r, "auxiliary state").Verdict != No ||
		find(t, r, "execution provenance").Verdict != Yes || r.Renamed != "" {
		t.Errorf("%+v", r)
	}
}

func TestDecideBaseSides(t *testing.T) {
	good := shards(t, "model.safetensors", 0x42)
	broken := good
	broken.TotalSize++
	summary := good.Summary()
	for name, c := range map[string]struct {
		base               Base
		resident, weights  Verdict
		weightsSays        string
		auxiliaryLeftOut   Verdict
		auxiliaryGivenAlso Verdict
	}{
		"manifest": {Base{Manifest: good}, Yes, Yes, "in both", CannotTell, Yes},
		"summary":  {Base{Summary: summary}, CannotTell, Yes, "not seen", CannotTell, Yes},
		"aggregate only": {Base{Summary: identity.Summary{Aggregate: good.Aggregate}}, CannotTell, Yes, "not seen",
			CannotTell, Yes},
		"other summary": {Base{Summary: shards(t, "a.safetensors", 1).Summary()}, CannotTell, No, exampleBase, No, No},
		"odd count": {Base{Summary: identity.Summary{Aggregate: good.Aggregate, ShardCount: 2, TotalSize: 11}},
			CannotTell, No, "2 shards", CannotTell, Yes},
		"odd size": {Base{Summary: identity.Summary{Aggregate: good.Aggregate, ShardCount: 1, TotalSize: 12}},
			CannotTell, No, "12 bytes", CannotTell, Yes},
		"other type": {Base{Summary: identity.Summary{ManifestType: "v2", Aggregate: good.Aggregate}}, No, No, "v2",
			CannotTell, Yes},
		"broken":  {Base{Manifest: broken}, No, No, "add up to 11", CannotTell, Yes},
		"absent":  {Base{Absent: true}, No, No, "no base identity", CannotTell, Yes},
		"unknown": {Base{}, CannotTell, CannotTell, "no base was given", CannotTell, Yes},
	} {
		cp, q, now := full(t)
		now.Base = c.base
		r := Decide(cp, q, now)
		checkReport(t, r)
		w := find(t, r, "base weights")
		if find(t, r, "resident base").Verdict != c.resident || w.Verdict != c.weights || !strings.Contains(w.Reason,
			c.weightsSays) ||
			find(t, r, "auxiliary state").Verdict != c.auxiliaryGivenAlso {
			t.Errorf("%s: %+v", name, r)
		}
		q.AuxiliaryState = nil
		if s := find(t, Decide(cp, q, now), "auxiliary state"); s.Verdict != c.auxiliaryLeftOut {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

func TestDecideLegacy(t *testing.T) {
	base := `"base_weight_shard_manifest":` + string(example(t, "base.json")) + `,`
	said := `"base_model_weights_sha256":"` + exampleBase + `",`
	for name, c := range map[string]struct {
		edits    []string
		says     string
		archival bool
	}{
		"bare aggregate": {[]string{base, ""}, "bare aggregate " + exampleBase, true},
		"null":           {[]string{base, `"base_weight_shard_manifest":null,`}, "bare aggregate", true},
		"nothing":        {[]string{base, "", said, ""}, "does not name its base", true},
		"no string":      {[]string{said, ""}, "lacks auxiliary_state.base_model_weights_sha256", false},
	} {
		cp, q, now := full(t, c.edits...)
		r := Decide(cp, q, now)
		checkReport(t, r)
		s := find(t, r, "base weights")
		if r.Verdict != No || r.FirstFailure != "base weights" || !strings.Contains(s.Reason, c.says) ||
			(r.Archival == Archival) != c.archival {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

func TestDecideProvenance(t *testing.T) {
	other := identity.Sum([]byte("other"))
	p := provenance(t)
	var without documents.Provenance = *p
	without.Digest = other
	for name, c := range map[string]struct {
		change    func(*documents.Checkpoint, *Request, *Current)
		resident  Verdict
		execution Verdict
		auxiliary Verdict
	}{
		"other": {func(_ *documents.Checkpoint, q *Request, now *Current) {
			q.Provenance, now.Provenance = nil,
				&without
		}, Yes, No, No},
		"disagree": {func(_ *documents.Checkpoint, _ *Request, now *Current) { now.Provenance = &without }, No, No, No},
		"digest": {func(_ *documents.Checkpoint, q *Request, now *Current) {
			q.Provenance, now.Provenance,
				now.ProvenanceDigest = nil, nil, p.Digest
		}, CannotTell, Yes, Yes},
		"digest and q": {func(_ *documents.Checkpoint, _ *Request, now *Current) {
			now.Provenance,
				now.ProvenanceDigest = nil, p.Digest
		}, Yes, Yes, Yes},
		"request only": {func(_ *documents.Checkpoint, _ *Request, now *Current) { now.Provenance = nil }, Yes, Yes, Yes},
		"neither": {func(_ *documents.Checkpoint, q *Request, now *Current) {
			q.Provenance, now.Provenance = nil,
				nil
		}, CannotTell, CannotTell, Yes},
		"no checkpoint": {func(c *documents.Checkpoint, _ *Request, _ *Current) { c.Aux.Provenance = nil }, Yes, No, Yes},
	} {
		cp, q, now := full(t)
		c.change(&cp, &q, &now)
		r := Decide(cp, q, now)
		checkReport(t, r)
		if find(t, r, "resident execution provenance").Verdict != c.resident ||
			find(t, r, "execution provenance").Verdict != c.execution || find(t, r, "auxiliary state").Verdict != c.auxiliary {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// grpo turns the example into a checkpoint of that kind.
var grpo = []string{`"training_kind":"sft"`, `"training_kind":"grpo"`}

func TestDecideGRPO(t *testing.T) {
	c, q, now := full(t, grpo...)
	r := Decide(c, q, now)
	checkReport(t, r)
	if r.Verdict != Yes || len(r.Steps) != 19 {
		t.Errorf("%+v", r)
	}
	q.Order = []uint64{0, 1}
	q.State = &documents.StateFiles{AdapterParameters: "adapter.safetensors", LossHistory: "x"}
	r = Decide(c, q, now)
	checkReport(t, r)
	if r.FirstFailure != "data order" || find(t, r, "state files").Verdict != No ||
		!strings.Contains(find(t, r, "state files").Reason, `"x"`) {
		t.Errorf("%+v", r)
	}
	q.AuxiliaryState = nil
	if s := find(t, Decide(c, q, now), "progress and loop state"); s.Verdict != CannotTell {
		t.Errorf("%+v", s)
	}
	c, q, now = full(t, append(grpo, `"epoch_index":0`, `"epoch_index":1`)...)
	if r := Decide(c, q, now); r.FirstFailure != "progress and loop state" {
		t.Errorf("%+v", r)
	}
}

func TestDecideProgress(t *testing.T) {
	for name, c := range map[string]struct {
		edits []string
		want  Verdict
		says  string
	}{
		"good":   {nil, Yes, "epoch 0 and cursor 1 give step 1"},
		"cursor": {[]string{`"cursor_in_epoch":1`, `"cursor_in_epoch":2`}, No, "another step than 1"},
		"epoch":  {[]string{`"epoch_index":0`, `"epoch_index":1`}, No, "outside the 1 epochs"},
		"two epochs": {[]string{`"total_steps":2,"epoch_index":0,"cursor_in_epoch":1`,
			`"total_steps":4,"epoch_index":1,"cursor_in_epoch":0`}, No, "another step"},
		"large epoch": {[]string{`"total_steps":2,"epoch_index":0`,
			`"total_steps":18446744073709551615,"epoch_index":9223372036854775806`}, No, "another step"},
		"opd": {[]string{`"training_kind":"sft"`, `"training_kind":"opd"`}, CannotTell, "opd is not known here"},
	} {
		cp, q, now := full(t, c.edits...)
		r := Decide(cp, q, now)
		checkReport(t, r)
		if s := find(t, r, "progress and loop state"); s.Verdict != c.want || !strings.Contains(s.Reason, c.says) {
			t.Errorf("%s: %+v", name, s)
		}
	}
	cp, q, now := full(t)
	now.FilesChecked = false
	r := Decide(cp, q, now)
	if r.Verdict != CannotTell || find(t, r, "checkpoint").Verdict != CannotTell ||
		find(t, r, "progress and loop state").Verdict != CannotTell {
		t.Errorf("%+v", r)
	}
	cp, q, now = full(t, `"lora-init"`, `"epoch-order"`)
	if s := find(t, Decide(cp, q, now), "seed"); s.Verdict != CannotTell || !strings.Contains(s.Reason, "lora-init") {
		t.Errorf("%+v", s)
	}
}

func TestDifference(t *testing.T) {
	for _, c := range []struct{ a, b, says string }{
		{`{}`, ` { } `, ""}, {`{"a":1,"b":[true,null]}`, `{"b":[ true , null ],"a":1}`, ""},
		{`1`, `1`, ""}, {`1`, `1.0`, "x is 1 in the checkpoint, 1.0 in this run"}, {`1.0`, `1e0`, ""}, {`0.1`, `1e-1`, ""},
		{`-0`, `0`, "x is -0"}, {`-0`, `-0.0`, ""}, {`0.0`, `-0.0`, ""}, {`-1`, `-1`, ""}, {`-1`, `-1.0`, "-1.0"},
		{`18446744073709551615`, `18446744073709551614`, "8446744073709551614"},
		{`9007199254740993`, `9007199254740992`, "9007199254740993"},
		{`18446744073709551616`, `18446744073709551617`, ""}, // beyond 64 bits both are the same float64
		{`-9223372036854775808`, `-9223372036854775807`, "-9223372036854775807"},
		{`1e999`, `1e999`, ""}, {`1e999`, `1e998`, "1e998"},
		{`"\u0041"`, `"A"`, ""}, {`"a"`, `"b"`, `x is "a"`}, {`"1"`, `1`, `x is "1" in the checkpoint, 1`},
		{`null`, `{}`, "x is null in the checkpoint, an object of 0 members"},
		{`{"a":null}`, `{}`, "x.a is null in the checkpoint, not there in this run"},
		{`{}`, `{"a b":[]}`, `x.a b is not there in the checkpoint, a list of 0`},
		{`[1,2]`, `[1]`, "x is a list of 2"}, {`[1,[2,{"c":3}]]`, `[1,[2,{"c":4}]]`, "x[1][1].c is 3"},
		{`[1,2]`, `[2,1]`, "x[0] is 1"}, {`true`, `false`, "x is true"},
		{`{"\n":1}`, `{"\n":2}`, `x."\n" is 1`},
	} {
		got := difference("x", []byte(c.a), []byte(c.b))
		if (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s and %s: %q, want %q", c.a, c.b, got, c.says)
		}
		if back := difference("x", []byte(c.b), []byte(c.a)); (back == "") != (got == "") {
			t.Errorf("%s and %s: not symmetric: %q", c.a, c.b, back)
		}
	}
}

func FuzzRequest(f *testing.F) {
	text := requestText(f, example(f, "checkpoint_manifest.json"))
	f.Add(text)
	f.Add([]byte(`{"request_type":"kiln.resume-request.v1","schema_version":1,"seed":"18446744073709551615","data_order":[]}`))
	f.Add(edit(f, text, `"training_kind":"sft"`, `"training_kind":"grpo"`, `"hyperparameters":{}`,
		`"hyperparameters":{"a":-0}`))
	cps := []documents.Checkpoint{checkpoint(f), checkpoint(f, grpo...)}
	base := shards(f, "other.safetensors", 0x42)
	f.Fuzz(func(t *testing.T, data []byte) {
		q, err := ParseRequest(data)
		if err != nil {
			var e *documents.Error
			if !errors.As(err, &e) || e.Rule == "" || strings.ContainsAny(err.Error(), "\n\r") {
				t.Fatalf("bad error %#v", err)
			}
			return
		}
		for _, cp := range cps {
			checkReport(t, Decide(cp, q, Current{Base: Base{Manifest: base}, FilesChecked: true}))
		}
	})
}

func FuzzDifference(f *testing.F) {
	for _, s := range []string{`{"a":[1,1.0,-0,"\u2028",null]}`, `{"a":[1,1e0,-0.0,"` + "\u2028" + `",null]}`, `[]`,
		`1e999`} {
		f.Add([]byte(s), []byte(`{"a":[1,1.0,0,"x",{}]}`))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if strictjson.Valid(a) != nil || strictjson.Valid(b) != nil {
			return
		}
		if d := difference("x", a, a); d != "" {
			t.Fatalf("%q differs from itself: %s", a, d)
		}
		one, two := difference("x", a, b), difference("x", b, a)
		if (one == "") != (two == "") || strings.ContainsAny(one, "\n\r") {
			t.Fatalf("%q and %q: %q, %q", a, b, one, two)
		}
	})
}
