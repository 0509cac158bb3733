package documents

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// exampleFiles are the files that the example of an adapter is about.
func exampleFiles(t testing.TB) map[string]identity.Digest {
	return map[string]identity.Digest{
		"adapter_config.json":       identity.Sum([]byte(`{"r":8,"lora_alpha":16.0,"target_modules":["q_proj"]}`)),
		"adapter_model.safetensors": identity.Sum([]byte(`adapter-bytes`)),
		"train_receipt.json":        identity.Sum(example(t, "train_receipt.json")),
	}
}

func TestAdapterManifestExample(t *testing.T) {
	m, err := ParseAdapterManifest(example(t, "adapter_manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "demo" || m.Parent != "" || m.TrainingDataSource != "jsonl_sft" || m.Provenance != nil ||
		m.Weights.String() != "sha256:cd06a2d3968bd0a5ed8d1a66b3bb8f27a0b58d2f99d9b3921a2f9ed778d489a3" ||
		m.Config.String() != "sha256:feb2054f03b6b39cc640647511c19a8add3441db7f86c1be5013bfe58acc883e" ||
		m.Receipt.String() != "sha256:ef7641123ce376b33e51ad8023aa4f54ee3fdee6b89d8f25759884e1161d0c15" {
		t.Errorf("%+v", m)
	}
	if err := m.CheckFiles(exampleFiles(t)); err != nil {
		t.Error(err)
	}
	r, err := ParseReceipt(example(t, "train_receipt.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.CheckReceipt(r); err != nil {
		t.Error(err)
	}
	if text, err := m.Document(); err != nil || !bytes.Equal(text, example(t, "adapter_manifest.json")) {
		t.Errorf("written anew: %v\n%s", err, text)
	}
}

func TestAdapterManifestRefused(t *testing.T) {
	const doc = "adapter_manifest.json"
	const sum = `"sha256:cd06a2d3968bd0a5ed8d1a66b3bb8f27a0b58d2f99d9b3921a2f9ed778d489a3"`
	checkRefusals(t, []refused{
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"schema_version":2,"manifest_type":"kiln_`, RuleSchemaVersion,
			"$.schema_version", "is 2, only 1 is read"},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"schema_version":4294967297,"manifest_type":"kiln_`,
			strictjson.RuleU32, "$.schema_version", ""},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"schema_version":1.0,"manifest_type":"kiln_`,
			strictjson.RuleInteger, "$.schema_version", "1.0"},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"schema_version":-0,"manifest_type":"kiln_`,
			strictjson.RuleU32, "$.schema_version", ""},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"schema_version":1e3,"manifest_type":"kiln_`,
			strictjson.RuleInteger, "", ""},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"Schema_Version":1,"manifest_type":"kiln_`,
			strictjson.RuleExactName, "", `must be spelled "schema_version"`},
		{doc, `{"schema_version":1,"manifest_type":"kiln_`, `{"manifest_type":"kiln_`, strictjson.RuleRequired, "$",
			`member "schema_version" missing`},
		{doc, `"kiln_adapter_manifest"`, `"kiln-adapter-manifest"`, RuleDocumentType, "$.manifest_type", "must be"},
		{doc, `"demo"`, `""`, RuleName, "$.adapter_name", "is empty"},
		{doc, `"demo"`, `".demo"`, RuleName, "$.adapter_name", "dot"},
		{doc, `"demo"`, `"a..b"`, RuleName, "$.adapter_name", "two dots"},
		{doc, `"demo"`, `"a/b"`, RuleName, "$.adapter_name", "separator"},
		{doc, `"demo"`, `"a\\b"`, RuleName, "$.adapter_name", "separator"},
		{doc, `"demo"`, `null`, strictjson.RuleNotNull, "$.adapter_name", ""},
		{doc, sum, strings.ToUpper(sum), RuleDigestForm, "$.safetensors_hash", ""},
		{doc, sum, strings.Replace(sum, "sha256:", "", 1), RuleDigestForm, "$.safetensors_hash", "sha256:"},
		{doc, `"receipt_hash":"sha256:`, `"receipt_hash":"sha512:`, RuleDigestForm, "$.receipt_hash", ""},
		{doc, `"model_config_hash":null`, `"model_config_hash":"x"`, RuleDigestForm, "$.model_config_hash", ""},
		{doc, `"kiln_commit":null`, `"kiln_commit":5`, strictjson.RuleType, "$.kiln_commit", "a string"},
		{doc, `"adapter_model":"adapter_model`, `"adapter_model":"../adapter_model`, RuleName, "$.files.adapter_model",
			"folder"},
		{doc, `"train_receipt":"train_receipt.json"`, `"train_receipt":".."`, RuleName, "$.files.train_receipt", ""},
		{doc, `"size_bytes":11`, `"size_bytes":12`, identity.RuleTotal, "$.base_weight_shard_manifest", "add up to 12"},
		{doc, `"filename":"model.safetensors"`, `"filename":"a/model.safetensors"`, identity.RuleFilename,
			"$.base_weight_shard_manifest", "shards[0]"},
		{doc, `"size_bytes":11`, `"size_bytes":1.5`, strictjson.RuleInteger,
			"$.base_weight_shard_manifest.shards[0].size_bytes", "at line 1"},
		{doc, `"base_weight_shard_manifest"`, `"base_weight_Shard_manifest"`, strictjson.RuleExactName, "", ""},
		{doc, `"kiln_commit":null`, `"openenv_training_data":{"schema":"other"}`, RuleDocumentType,
			"$.openenv_training_data.schema", ""},
		{doc, `"kiln_commit":null`, `"training_precision":{"parameter_dtype":" "}`, RuleText,
			"$.training_precision.parameter_dtype", "blank"},
		{doc, `"kiln_commit":null`, `"execution_provenance":{}`, strictjson.RuleRequired, "$.execution_provenance", ""},
	})
	checkTaken(t, []taken{
		{doc, `"kiln_commit":null`, `"kiln_commit":"abc","replay":{"a":[1,{"b":null}]},"\u2028":"<>&` + "\x7f" + `"`},
		{doc, `"kiln_commit":null,`, ``},
		{doc, `"receipt_hash"`, `"training_chat_template_hash":null,"receipt_hash"`},
		{doc, `"kiln_commit":null`, `"openenv_training_data":{"schema":"kiln.openenv-training-data.v1","x":1}`},
	})
}

func TestAdapterManifestProvenance(t *testing.T) {
	data := example(t, "adapter_manifest.json")
	with := edit(t, data, `"kiln_commit"`, `"execution_provenance":`+string(example(t,
		"provenance.json"))+`,"kiln_commit"`)
	m, err := ParseAdapterManifest(with)
	if err != nil || m.Provenance == nil || m.Identities().Provenance != m.Provenance.Digest ||
		m.Identities().ModelConfig.String() != "sha256:"+strings.Repeat("3", 64) {
		t.Fatalf("%+v, %v", m, err)
	}
	if text, err := m.Document(); err != nil || !bytes.Equal(text, with) {
		t.Errorf("written anew: %v\n%s", err, text)
	}
	_, err = ParseAdapterManifest(edit(t, with, `"cuda:0"`, `"cuda:1"`))
	checkRefusal(t, err, RuleSelfDigest, "$.execution_provenance.provenance_sha256", "8cce7898")
}

func TestAdapterFilesChecked(t *testing.T) {
	m, err := ParseAdapterManifest(example(t, "adapter_manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"adapter_config.json": "$.config_hash", "adapter_model.safetensors": "$.safetensors_hash",
		"train_receipt.json": "$.receipt_hash",
	} {
		files := exampleFiles(t)
		files[name] = identity.Sum([]byte("other"))
		checkRefusal(t, m.CheckFiles(files), RuleFileDigest, path, identity.Sum([]byte("other")).String())
		delete(files, name)
		checkRefusal(t, m.CheckFiles(files), RuleFileMissing, "$.files", name)
	}
	for _, name := range []string{"adapter_model.safetensors", "adapter_model.bin"} {
		other, files := m, exampleFiles(t)
		other.Files.Model, files["x.safetensors"] = "x.safetensors", m.Weights
		delete(files, "adapter_model.safetensors")
		if err := other.CheckFiles(files); err != nil {
			t.Error(err)
		}
		files[name] = m.Weights
		checkRefusal(t, other.CheckFiles(files), RuleFileExtra, "$.files.adapter_model", name)
	}
	unnamed := m
	unnamed.Files.Receipt = ""
	files := exampleFiles(t)
	files["train_receipt.json"] = identity.Sum(nil)
	checkRefusal(t, unnamed.CheckFiles(files), RuleFileDigest, "$.receipt_hash", "train_receipt.json")
	delete(files, "train_receipt.json")
	if err := unnamed.CheckFiles(files); err != nil {
		t.Error(err)
	}
	unnamed.Receipt = identity.Digest{}
	if err := unnamed.CheckFiles(exampleFiles(t)); err != nil {
		t.Error(err)
	}
}

func TestAdapterAgainstReceipt(t *testing.T) {
	m, err := ParseAdapterManifest(example(t, "adapter_manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	read := func(edits ...string) Receipt {
		data := example(t, "train_receipt.json")
		for i := 0; i < len(edits); i += 2 {
			data = edit(t, data, edits[i], edits[i+1])
		}
		r, err := ParseReceipt(data)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := read(`"wall_clock_ms":1`, `"wall_clock_ms":2`)
	checkRefusal(t, m.CheckReceipt(r), RuleFileDigest, "$.receipt_hash", r.Digest.String())
	m.Receipt = identity.Digest{}
	if err := m.CheckReceipt(r); err != nil {
		t.Error(err)
	}
	other := manifestOf(t, "model.safetensors", 9)
	text, _ := other.MarshalJSON()
	checkRefusal(t, m.CheckReceipt(read(string(example(t, "base.json")), string(text))), RuleBaseConflict,
		"$.base_weight_shard_manifest", other.Aggregate.String())
	failed := read(`"status":"success","failure_reason":null`, `"status":"failed","failure_reason":"oom"`)
	checkRefusal(t, m.CheckReceipt(failed), RuleAgreement, "$.receipt_hash", "a run that failed")
	checkRefusal(t, m.CheckReceipt(read("cd06a2d3", "cd06a2d4")), RuleAgreement, "$.safetensors_hash", "cd06a2d4")
	if err := m.CheckReceipt(read(string(example(t, "base.json")), "null")); err != nil {
		t.Error(err)
	}
}

func TestNewAdapterManifest(t *testing.T) {
	files := exampleFiles(t)
	base := manifestOf(t, "model.safetensors", 0x42)
	m := NewAdapterManifest("demo", files[AdapterWeightsFile], files[AdapterConfigFile], files[ReceiptFile], base)
	m.TrainingDataSource = "jsonl_sft"
	text, err := m.Document()
	if err != nil || !bytes.Equal(text, example(t, "adapter_manifest.json")) {
		t.Fatalf("%v\n%s", err, text)
	}
	m = NewAdapterManifest("a \"quoted\" \u2028 <name>&", files[AdapterWeightsFile], files[AdapterConfigFile],
		identity.Digest{}, identity.Manifest{})
	m.Parent = "parent"
	text, err = m.Document()
	if err != nil || !bytes.Contains(text, []byte("\"a \\\"quoted\\\" \u2028 <name>&\"")) {
		t.Fatalf("%v\n%s", err, text)
	}
	if again, err := ParseAdapterManifest(text); err != nil || !reflect.DeepEqual(again, m) {
		t.Errorf("%v\n%+v\n%+v", err, again, m)
	}
	for _, bad := range []func(*AdapterManifest){
		func(m *AdapterManifest) { m.Name = "../x" },
		func(m *AdapterManifest) { m.Files.Model = "" },
		func(m *AdapterManifest) { m.Shards = base; m.Shards.TotalSize++ },
		func(m *AdapterManifest) { m.Name = "\xff" },
	} {
		c := m
		bad(&c)
		if text, err := c.Document(); err == nil {
			t.Errorf("wrote %s", text)
		}
	}
}

func TestAdapterConfig(t *testing.T) {
	c, err := ParseAdapterConfig(example(t, "adapter_config.json"))
	if err != nil || c.Type != "LORA" || *c.Rank != 8 || *c.Alpha != 16 || c.BaseName != "" || c.DoRA ||
		!slices.Equal(c.TargetModules, []string{"q_proj"}) || c.SavedModules != nil {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = ParseAdapterConfig([]byte(`{"target_modules":"all-linear","use_dora":true,"modules_to_save":["lm_head"]}`))
	if err != nil || !c.DoRA || c.Rank != nil || c.Alpha != nil || len(c.SavedModules) != 1 || len(c.TargetModules) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	checkRefusals(t, []refused{
		{"adapter_config.json", `"r":8`, `"r":8.0`, strictjson.RuleInteger, "$.r", ""},
		{"adapter_config.json", `"lora_alpha":16.0`, `"lora_alpha":1e999`, strictjson.RuleF64, "$.lora_alpha",
			"out of range"},
		{"adapter_config.json", `"lora_alpha":16.0`, `"lora_alpha":NaN`, strictjson.RuleSyntax, "", "line 1, column"},
		{"adapter_config.json", `["q_proj"]`, `[1]`, strictjson.RuleType, "$.target_modules[0]", ""},
	})
}

// TestFieldAdapters runs the field cases of adapters as far as documents decide them.
func TestFieldAdapters(t *testing.T) {
	dir := testenv.FieldCases(t)
	ran := 0
	for id, c := range testenv.Expected(t, dir) {
		if c.Kind != "adapter" {
			continue
		}
		config, err := os.ReadFile(filepath.Join(dir, id, AdapterConfigFile))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		parsed, err := ParseAdapterConfig(config)
		if c.Code == "config_not_json" {
			checkRefusal(t, err, strictjson.RuleSyntax, "$", "at line 1, column 1")
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
		if parsed.DoRA != (c.Code == "dora") || (len(parsed.SavedModules) > 0) != (c.Code == "vocab_resized") {
			t.Errorf("%s: %+v", id, parsed)
		}
		text, err := os.ReadFile(filepath.Join(dir, id, AdapterManifestFile))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		ran++
		m, err := ParseAdapterManifest(text)
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		weights, err := os.ReadFile(filepath.Join(dir, id, AdapterWeightsFile))
		if err != nil {
			t.Fatal(err)
		}
		err = m.CheckFiles(map[string]identity.Digest{
			AdapterConfigFile: identity.Sum(config), AdapterWeightsFile: identity.Sum(weights)})
		if c.Code == "adapter_digest_mismatch" {
			checkRefusal(t, err, RuleFileDigest, "$.safetensors_hash", identity.Sum(weights).String())
		} else if err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if ran < 4 {
		t.Errorf("only %d manifests", ran)
	}
}

func FuzzAdapterManifest(f *testing.F) {
	addExamples(f, "adapter_manifest.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseAdapterManifest(data)
		if !checkFuzz(t, data, err) {
			return
		}
		text, err := m.Document()
		if err != nil {
			t.Fatalf("%v: %q", err, data)
		}
		again, err := ParseAdapterManifest(text)
		if err != nil || again.Base().Aggregate != m.Base().Aggregate || again.Name != m.Name || again.Files != m.Files {
			t.Fatalf("%v: %q gave %q", err, data, text)
		}
	})
}

func FuzzAdapterConfig(f *testing.F) {
	addExamples(f, "adapter_config.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := ParseAdapterConfig(data)
		checkFuzz(t, data, err)
	})
}
