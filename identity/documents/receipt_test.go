package documents

import (
	"bytes"
	"fmt"
	"reflect"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

func TestReceiptExample(t *testing.T) {
	data := example(t, "train_receipt.json")
	r, err := ParseReceipt(data)
	if err != nil {
		t.Fatal(err)
	}
	if len(data) != 1693 ||
		r.Digest.String() != "sha256:ef7641123ce376b33e51ad8023aa4f54ee3fdee6b89d8f25759884e1161d0c15" {
		t.Errorf("%d bytes, %v", len(data), r.Digest)
	}
	if r.Name != "demo" || r.Produced != "2026-01-02T03:04:05Z" || r.Status != StatusSuccess || r.Mode != "sft" ||
		*r.Seed != 7 || r.Output.Path != "/adapters/demo" || *r.Output.Size != 13 || r.Parent.Size != nil ||
		r.Output.Weights != identity.Sum([]byte("adapter-bytes")) || r.KilnVersion != "0.4.1" ||
		r.TrainingDataSource != "jsonl_sft" || !r.TrainingData.IsZero() || r.Identities() != (Identities{}) {
		t.Errorf("%+v", r)
	}
}

func TestReceiptRefused(t *testing.T) {
	const doc = "train_receipt.json"
	sum := `"sha256:1111111111111111111111111111111111111111111111111111111111111111"`
	tokenizer := `"tokenizer":{"config_hash":null,"training_chat_template_hash":` + sum + `}`
	cases := []refused{
		{doc, `"receipt_type":"kiln_train_receipt"`, `"receipt_type":"x"`, RuleDocumentType, "$.receipt_type", ""},
		{doc, `{"schema_version":1,"receipt`, `{"schema_version":0,"receipt`, RuleSchemaVersion, "$.schema_version", "is 0"},
		{doc, `"demo"`, `" "`, RuleName, "$.adapter_name", "blank"},
		{doc, `"2026-01-02T03:04:05Z"`, `"yesterday"`, RuleTimestamp, "$.produced_at", "yesterday"},
		{doc, `"success"`, `"Success"`, RuleValue, "$.status", `"success" or "failed"`},
		{doc, `"success"`, `"failed"`, RuleAgreement, "$.failure_reason", "must say why"},
		{doc, `"failure_reason":null`, `"failure_reason":"oom"`, RuleAgreement, "$.failure_reason", "oom"},
		{doc, `"failure_reason":null`, `"failure_reason":""`, RuleAgreement, "$.failure_reason", ""},
		{doc, `"failure_reason":null`, `"failure_message":"x"`, RuleAgreement, "$.failure_message", ""},
		{doc, `"package_version":"0.4.1"`, `"package_version":null`, strictjson.RuleNotNull, "$.kiln.package_version", ""},
		{doc, `"path":null,"config_hash":null`, `"path":null,"config_hash":"abc"`, RuleDigestForm, "$.model.config_hash", ""},
		{doc, `"sha256":null`, `"sha256":"1111"`, RuleDigestForm, "$.training_data.sha256", ""},
		{doc, `"adapter_model_bytes":13`, `"adapter_model_bytes":18446744073709551616`, strictjson.RuleU64,
			"$.adapters.output.adapter_model_bytes", ""},
		{doc, `"seed":7`, `"seed":7.0`, strictjson.RuleInteger, "$.hyperparameters.seed", ""},
		{doc, `"seed":7`, `"seed":-1`, strictjson.RuleU64, "$.hyperparameters.seed", ""},
		{doc, `"mode":"sft",`, ``, strictjson.RuleRequired, "$.hyperparameters", `"mode"`},
		{doc, `"size_bytes":11`, `"size_bytes":0`, identity.RuleNonzeroSize, "$.model.base_weight_shard_manifest", ""},
		{doc, `"wall_clock_ms":1`, `"training_precision":{}`, strictjson.RuleRequired, "$.runtime.training_precision", ""},
		{doc, `"tokenizer":{"config_hash":null}`, tokenizer + `,"config_hashes":{"training_chat_template_hash":"sha256:` +
			`2222222222222222222222222222222222222222222222222222222222222222"}`, RuleAgreement,
			"$.config_hashes.training_chat_template_hash", "sha256:1111"},
	}
	for _, m := range []string{"echo", "data", "rewards", "token_counts", "runtime", "model", "kiln", "training_data"} {
		cases = append(cases, refused{doc, `"` + m + `":{`, `"x_` + m + `":{`, strictjson.RuleRequired, "$", m})
	}
	cases = append(cases, refused{doc, `,"config":{}`, ``, strictjson.RuleRequired, "$", `"config"`},
		refused{doc, `"lora_delta_norms":[]`, `"lora_delta_norms":{}`, strictjson.RuleType, "$.lora_delta_norms", ""},
		refused{doc, `"no_policy_loss":false`, `"no_policy_loss":0`, strictjson.RuleType, "$.no_policy_loss", ""})
	checkRefusals(t, cases)
	checkTaken(t, []taken{
		{doc, `"success","failure_reason":null`, `"failed","failure_reason":"oom","failure_message":"out of memory"`},
		{doc, `"success","failure_reason":null`, `"failed","failure_reason":"a code of tomorrow"`},
		{doc, `"failure_reason":null`, `"failure_message":null`},
		{doc, `"config":{}`, `"config":null`}, {doc, `"config":{}`, `"config":[1e3,-0,18446744073709551616]`},
		{doc, `"tokenizer":{"config_hash":null}`, tokenizer + `,"config_hashes":{"training_chat_template_hash":` + sum + `}`},
		{doc, `"seed":7`, `"seed":18446744073709551615`}, {doc, `"seed":7`, `"seed":null`},
		{doc, `"grpo":null`, `"grpo":{"reference_policy":"base"}`},
		{doc, `"path":null,"sha256"`, `"openenv":{"schema":"kiln.openenv-training-data.v1"},"sha256"`},
	})
}

func TestStamp(t *testing.T) {
	base := manifestOf(t, "model.safetensors", 0x42)
	text := string(example(t, "base.json"))
	member := `"base_weight_shard_manifest":` + text
	stamps := map[string]func([]byte, identity.Manifest) ([]byte, error){
		"train_receipt.json": StampReceipt, "eval_job.json": StampEval, "eval_result.json": StampEval,
		"adapter_manifest.json": StampAdapterManifest,
	}
	for doc, stamp := range stamps {
		data := example(t, doc)
		if got, err := stamp(data, base); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: stamped again: %v", doc, err)
		}
		_, err := stamp(data, manifestOf(t, "model.safetensors", 0x43))
		checkRefusal(t, err, RuleBaseConflict, "", exampleBase)
		null := edit(t, data, member, `"base_weight_shard_manifest":null`)
		if got, err := stamp(null, base); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: null replaced: %v\n%s", doc, err, got)
		}
		if _, err := stamp(data, identity.Manifest{}); err == nil {
			t.Errorf("%s: stamped with nothing", doc)
		}
		if _, err := stamp([]byte(`{}`), base); err == nil {
			t.Errorf("%s: stamped what it can't read", doc)
		}
	}
	for _, c := range []struct{ doc, old, new, want string }{
		{"train_receipt.json", `{"path":null,"config_hash":null,` + member + `}`, `{ }`, `{` + member + ` }`},
		{"train_receipt.json", `"config_hash":null,` + member, "\"config_hash\":null\r\n\t",
			"\"config_hash\":null," + member + "\r\n\t"},
		{"eval_result.json", member + `,"effective_seed":"17","seed_derivation":"kiln.eval-seed.v1","runs":[]`,
			"\n \"runs\" : [ ]\n", "\n \"runs\" : [ ]," + member + "\n"},
		{"train_receipt.json", member, `"base_weight_shard_manifest": null ,"z":1`,
			`"base_weight_shard_manifest": ` + text + ` ,"z":1`},
	} {
		data := example(t, c.doc)
		got, err := stamps[c.doc](edit(t, data, c.old, c.new), base)
		if want := edit(t, data, c.old, c.want); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v\n%s\n%s", c.doc, err, got, want)
		}
	}
}

func FuzzReceipt(f *testing.F) {
	addExamples(f, "train_receipt.json")
	m, err := ParseAdapterManifest(example(f, "adapter_manifest.json"))
	if err != nil || !bytes.Contains(example(f, "train_receipt.json"), m.shards) {
		f.Fatal("the examples do not share a base", err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := ParseReceipt(data)
		beside, berr := ParseReceiptBeside(data, identity.Sum(data), &m)
		if !reflect.DeepEqual(beside, r) || fmt.Sprint(berr) != fmt.Sprint(err) {
			t.Fatalf("beside an adapter manifest %v, %v; alone %v, %v", beside, berr, r, err)
		}
		if checkFuzz(t, data, err) && r.Digest != identity.Sum(data) {
			t.Fatal("wrong digest")
		}
	})
}

// FuzzStamp checks that a stamp adds one run of bytes, or replaces a null, and that the base is found after it.
func FuzzStamp(f *testing.F) {
	for _, doc := range []string{"train_receipt.json", "eval_result.json", "adapter_manifest.json"} {
		data := example(f, doc)
		member := `"base_weight_shard_manifest":` + string(example(f, "base.json"))
		f.Add(data)
		f.Add(edit(f, data, member, `"base_weight_shard_manifest" : null`))
		f.Add(edit(f, data, member, "\n\"z\":{\"base_weight_shard_manifest\":{}}\t"))
	}
	base := manifestOf(f, "model.safetensors", 0x42)
	f.Fuzz(func(t *testing.T, data []byte) {
		for i, stamp := range []func([]byte, identity.Manifest) ([]byte, error){StampReceipt, StampEval,
			StampAdapterManifest} {
			out, err := stamp(data, base)
			if err != nil {
				continue
			}
			var b Binding
			switch i {
			case 0:
				r, err := ParseReceipt(out)
				b, _ = Join(r.Base(), b)
				checkFuzz(t, out, err)
			case 1:
				e, err := ParseEval(out)
				b, _ = Join(e.Base(), b)
				checkFuzz(t, out, err)
			case 2:
				m, err := ParseAdapterManifest(out)
				b, _ = Join(m.Base(), b)
				checkFuzz(t, out, err)
			}
			if b.Evidence != EvidenceDocument || b.Aggregate != base.Aggregate {
				t.Fatalf("%+v: %q", b, out)
			}
			head := 0
			for head < len(data) && data[head] == out[head] {
				head++
			}
			tail := 0
			for tail < len(data)-head && data[len(data)-1-tail] == out[len(out)-1-tail] {
				tail++
			}
			if rest := string(data[head : len(data)-tail]); rest != "" && rest != "null" {
				t.Fatalf("changed %q in %q", rest, data)
			}
		}
	})
}
