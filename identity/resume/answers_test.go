package resume

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

func TestSameWeights(t *testing.T) {
	a, renamed, other := shards(t, "a.safetensors", 1), shards(t, "b.safetensors", 1), shards(t, "a.safetensors", 2)
	broken := a
	broken.TotalSize++
	for name, c := range map[string]struct {
		a, b Base
		want Verdict
		says string
	}{
		"same":      {Base{Manifest: a}, Base{Manifest: a}, Yes, "over the same 1 shards"},
		"renamed":   {Base{Manifest: a}, Base{Manifest: renamed}, Yes, a.Aggregate.String()},
		"summary":   {Base{Manifest: a}, Base{Summary: renamed.Summary()}, Yes, "not seen on both sides"},
		"aggregate": {Base{Summary: identity.Summary{Aggregate: a.Aggregate}}, Base{Manifest: a}, Yes, "not seen"},
		"other":     {Base{Manifest: a}, Base{Manifest: other}, No, other.Aggregate.String()},
		"unknown":   {Base{Manifest: a}, Base{}, CannotTell, "the second base has no known identity"},
		"none":      {Base{Absent: true}, Base{Manifest: a}, CannotTell, "the first base"},
		"broken":    {Base{Manifest: broken}, Base{Manifest: a}, CannotTell, "no valid manifest"},
		"contradicted": {Base{Manifest: a}, Base{Summary: identity.Summary{Aggregate: a.Aggregate, ShardCount: 7}},
			CannotTell, "7"},
	} {
		got := SameWeights(c.a, c.b)
		if got.Verdict != c.want || !strings.Contains(got.Reason, c.says) || got.NotProven != NotProven ||
			got.Question == "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func adapter(t testing.TB, edits ...string) documents.AdapterManifest {
	t.Helper()
	m, err := documents.ParseAdapterManifest(edit(t, example(t, "adapter_manifest.json"), edits...))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func receipt(t testing.TB, edits ...string) *documents.Receipt {
	t.Helper()
	r, err := documents.ParseReceipt(edit(t, example(t, "train_receipt.json"), edits...))
	if err != nil {
		t.Fatal(err)
	}
	return &r
}

func TestAdapterTrained(t *testing.T) {
	base, other := shards(t, "model.safetensors", 0x42), shards(t, "model.safetensors", 0x43)
	m := MadeAdapter(adapter(t), nil)
	text, _ := base.MarshalJSON()
	unbound := MadeAdapter(adapter(t, `"base_weight_shard_manifest":`+string(text), `"base_weight_shard_manifest":null`),
		nil)
	asserted := unbound
	asserted.Binding = documents.Binding{Evidence: documents.EvidenceAsserted, Aggregate: base.Aggregate,
		Kind: documents.KindStatement, Path: "$.bind"}
	bare := asserted
	bare.Binding.Evidence = documents.EvidenceAggregateOnly
	for name, c := range map[string]struct {
		made Made
		here Base
		want Verdict
		says string
	}{
		"same":           {m, Base{Manifest: base}, Yes, exampleBase},
		"renamed":        {m, Base{Manifest: shards(t, "x.safetensors", 0x42)}, Yes, exampleBase},
		"server":         {m, Base{Summary: base.Summary()}, Yes, "not seen"},
		"other":          {m, Base{Manifest: other}, No, other.Aggregate.String()},
		"nothing here":   {m, Base{}, CannotTell, "no base was given"},
		"unbound":        {unbound, Base{Manifest: base}, CannotTell, "its name is no identity"},
		"asserted":       {asserted, Base{Manifest: base}, CannotTell, "only asserted (statement $.bind)"},
		"asserted other": {asserted, Base{Manifest: other}, No, exampleBase},
		"bare":           {bare, Base{Manifest: base}, CannotTell, "does not record its shards"},
		"zero":           {Made{}, Base{Manifest: base}, CannotTell, "does not record"},
		"bad summary": {m, Base{Summary: identity.Summary{Aggregate: base.Aggregate, ManifestType: "x"}}, CannotTell,
			"valid"},
	} {
		got := AdapterTrained(c.made, Here{Base: c.here})
		if got.Verdict != c.want || !strings.Contains(got.Reason, c.says) || got.NotProven != NotProven ||
			len(got.Others) != 8 || got.Evidence == "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	// The receipt stands in for a manifest that names no base.
	fromReceipt := MadeAdapter(adapter(t, `"base_weight_shard_manifest":`+string(text),
		`"base_weight_shard_manifest":null`), receipt(t))
	if got := AdapterTrained(fromReceipt, Here{Base: Base{Manifest: base}}); got.Verdict != Yes ||
		fromReceipt.Binding.Kind != documents.KindReceipt {
		t.Errorf("%+v", got)
	}
}

func TestOthers(t *testing.T) {
	sum := func(c string) string { return "sha256:" + strings.Repeat(c, 64) }
	m := adapter(t, `"kiln_commit"`, `"execution_provenance":`+string(example(t, "provenance.json"))+`,"kiln_commit"`,
		`"training_data_hash":null`, `"training_data_hash":"`+sum("a")+`"`, `"parent_adapter":null`,
		`"parent_adapter":"first"`)
	here := Here{Identities: documents.Identities{ModelConfig: identity.Digest(shards(t, "a.safetensors", 1).Aggregate),
		TokenizerVocab: provenance(t).TokenizerVocab, ChatTemplate: identity.Sum(nil)}, Request: "training data " + sum("a")}
	got := AdapterTrained(MadeAdapter(m, nil), here)
	for i, want := range []struct {
		name    string
		verdict Verdict
		says    string
	}{
		{"model config", No, sum("3") + " in the artifact"}, {"tokenizer vocabulary", Yes, sum("4") + " in both"},
		{"tokenizer config", CannotTell, "not recorded here"}, {"chat template", CannotTell, "not recorded by the artifact"},
		{"training chat template", CannotTell, "not recorded on either side"}, {"execution provenance", CannotTell,
			"8cce7898"},
		{"request", Yes, sum("a")}, {"lineage", CannotTell, "first in the artifact"},
	} {
		c := got.Others[i]
		if c.Name != want.name || c.Verdict != want.verdict || !strings.Contains(c.Reason, want.says) {
			t.Errorf("%+v, want %+v", c, want)
		}
	}
	text, err := json.Marshal(got)
	if err != nil || !strings.Contains(string(text), `"not_proven"`) {
		t.Errorf("%s, %v", text, err)
	}
	r := receipt(t, `"base":{"path":null,"adapter_model_sha256":null`,
		`"base":{"path":null,"adapter_model_sha256":"`+sum("b")+`"`,
		`"sha256":null`, `"sha256":"`+sum("c")+`"`, `"path":null,"config_hash":null`,
		`"path":null,"config_hash":"`+sum("d")+`"`)
	made := MadeAdapter(adapter(t), r)
	if made.Lineage != sum("b") || made.Request != "training data "+sum("c") ||
		made.Identities.ModelConfig.String() != sum("d") {
		t.Errorf("%+v", made)
	}
}

func TestEvalUsed(t *testing.T) {
	e, err := documents.ParseEval(example(t, "eval_result.json"))
	if err != nil {
		t.Fatal(err)
	}
	base := shards(t, "model.safetensors", 0x42)
	got := EvalUsed(MadeEval(e, nil), Here{Base: Base{Manifest: base}, Request: "seed 17"})
	if got.Verdict != Yes || got.Question != "eval used these bytes" || got.Others[6].Verdict != Yes {
		t.Errorf("%+v", got)
	}
	if got := EvalUsed(MadeEval(e, nil), Here{Base: Base{Manifest: shards(t, "a.safetensors", 1)}}); got.Verdict != No {
		t.Errorf("%+v", got)
	}
	run := documents.Run{SuiteHash: "h", Adapter: "demo"}
	if made := MadeEval(e, &run); made.Request != `suite "h", seed 17` || made.Lineage != `adapter named "demo"` {
		t.Errorf("%+v", made)
	}
	run.Replay = &documents.Replay{AdapterContent: identity.Sum(nil)}
	e.Seed = nil
	if made := MadeEval(e, &run); made.Request != `suite "h"` ||
		made.Lineage != "adapter content "+identity.Sum(nil).String() {
		t.Errorf("%+v", made)
	}
}
