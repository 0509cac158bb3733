package documents

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

func exampleCheckpoint(t testing.TB) Checkpoint {
	t.Helper()
	c, err := ParseCheckpoint(example(t, "checkpoint_manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCheckpointExample(t *testing.T) {
	c := exampleCheckpoint(t)
	seed, ok := c.Seed()
	if c.ID != "sft-step-00000001" || c.Training != TrainingSFT || c.Adapter != "demo" || !ok || seed != 7 ||
		c.Created != "2026-01-02T03:04:05+00:00" || string(c.EffectiveConfig) != `{"seed":7}` ||
		c.Progress.GlobalStep != 1 || c.Progress.TotalSteps != 2 || c.Progress.Cursor != 1 ||
		!slices.Equal(c.Progress.Order, []uint64{1, 0}) || c.Data.Items != 2 ||
		c.Data.Content.Hex() != strings.Repeat("1", 64) || c.Optimizer.Kind != "sgd" || c.Scheduler.Kind != "constant" ||
		c.State.AdapterParameters != "adapter.safetensors" || c.State.LossHistory != "sft_loop_state.json" ||
		c.Files["adapter.safetensors"].Digest != identity.Sum([]byte("adapter")) || len(c.Files) != 2 || c.Legacy() ||
		c.Precision.Parameters != "bf16" || !bytes.HasPrefix(c.AuxiliaryState, []byte(`{"base_model_weights_sha256"`)) ||
		c.Identities().Provenance.String() != "sha256:8cce789875ba6cbc44db5c49b6b1071af898cb78e604f6fc31e866ae1d7d5b8d" {
		t.Errorf("%+v", c)
	}
}

func TestLegacyCheckpoint(t *testing.T) {
	data := edit(t, example(t, "checkpoint_manifest.json"),
		`"base_weight_shard_manifest":`+string(example(t, "base.json"))+`,`, "")
	c, err := ParseCheckpoint(data)
	if err != nil {
		t.Fatal(err)
	}
	b := c.Base()
	if !c.Legacy() || b.Evidence != EvidenceAggregateOnly || b.Aggregate.String() != exampleBase ||
		b.Path != "$.auxiliary_state.base_model_weights_sha256" || len(b.Manifest.Shards) > 0 {
		t.Errorf("%+v", b)
	}
	c, err = ParseCheckpoint(edit(t, data, `"base_model_weights_sha256":"`+exampleBase+`",`, ""))
	if err != nil || c.Legacy() || c.Base().Evidence != EvidenceNone {
		t.Errorf("%+v, %v", c.Base(), err)
	}
}

func TestCheckpointHashes(t *testing.T) {
	sum := "sha256:" + strings.Repeat("e", 64)
	c, err := ParseCheckpoint(edit(t, example(t, "checkpoint_manifest.json"), `"auxiliary_state":{`,
		`"auxiliary_state":{"model_config_sha256":"`+sum+`","tokenizer_config_sha256":null,"chat_template_sha256":["x"],`+
			`"training_chat_template_sha256":"not one","route":{"\u2028":"<>&`+"\x7f"+`"},`))
	if err != nil {
		t.Fatal(err)
	}
	i := c.Identities()
	if i.ModelConfig.String() != sum || i.TokenizerConfig.Hex() != strings.Repeat("5", 64) || !i.ChatTemplate.IsZero() {
		t.Errorf("%+v", i)
	}
}

func TestCheckpointRefused(t *testing.T) {
	const doc = "checkpoint_manifest.json"
	const sum = "ae1eae1d76e5b7c865c4122ce366a08025842566d2d96c75cc13e6353a73db0d"
	checkRefusals(t, []refused{
		{doc, `{"schema_version":1,"manifest_type":"kiln.training`, `{"schema_version":3,"manifest_type":"kiln.training`,
			RuleSchemaVersion, "$.schema_version", "is 3"},
		{doc, `"kiln.training-checkpoint.v1"`, `"kiln.training-checkpoint.v2"`, RuleDocumentType, "$.manifest_type", ""},
		{doc, `"resumable"`, `"archival"`, RuleValue, "$.checkpoint_kind", `"resumable"`},
		{doc, `"training_kind":"sft"`, `"training_kind":"dpo"`, RuleValue, "$.training_kind", "capability-distillation"},
		{doc, `"checkpoint_id":"sft-step-00000001"`, `"checkpoint_id":""`, RuleName, "$.checkpoint_id", "0 bytes"},
		{doc, `"checkpoint_id":"sft-step-00000001"`, `"checkpoint_id":"` + strings.Repeat("a", 256) + `"`, RuleName, "",
			"256"},
		{doc, `"adapter_name":"demo"`, `"adapter_name":"démo"`, RuleName, "$.adapter_name", "only A-Z"},
		{doc, `"adapter_name":"demo"`, `"adapter_name":"a b"`, RuleName, "$.adapter_name", ""},
		{doc, `"2026-01-02T03:04:05+00:00"`, `"2026-01-02"`, RuleTimestamp, "$.created_at", ""},
		{doc, `{"schema_version":1,"manifest_type":"kiln.training`,
			`{"x":0,"schema_version":1,"manifest_type":"kiln.training`,
			strictjson.RuleUnknownField, "$.x", ""},
		{doc, `"effective_config":{"seed":7}`, `"effective_config":[7]`, strictjson.RuleType, "$.effective_config", ""},
		{doc, `"effective_config":{"seed":7}`, `"effective_config":null`, strictjson.RuleNotNull, "$.effective_config", ""},
		{doc, `"effective_config":{"seed":7}`, `"effective_config":{"a":{"b":[{"c":1,"c":2}]}}`, strictjson.RuleDuplicate,
			"$.effective_config.a.b[0]", ""},
		{doc, `"parameter_dtype":"bf16"`, `"parameter_dtype":""`, RuleText, "$.precision_policy.parameter_dtype", ""},
		{doc, `"global_step":1`, `"global_step":3`, RuleAgreement, "$.progress.global_step", "more than total_steps 2"},
		{doc, `"global_step":1`, `"global_step":1.0`, strictjson.RuleInteger, "$.progress.global_step", ""},
		{doc, `"global_step":1`, `"global_step":18446744073709551616`, strictjson.RuleU64, "$.progress.global_step", ""},
		{doc, `"cursor_in_epoch":1`, `"cursor_in_epoch":3`, RuleAgreement, "$.progress.cursor_in_epoch", "2 items"},
		{doc, `"cursor_in_epoch":1,"data_order":[1,0]`, `"cursor_in_epoch":0,"data_order":[]`, RuleCount,
			"$.progress.data_order", "1 of 2 steps"},
		{doc, `"item_count":2`, `"item_count":0`, RuleCount, "$.data.item_count", ""},
		{doc, `"item_count":2`, `"item_count":3`, RuleCount, "$.progress.data_order", "item_count is 3"},
		{doc, `[1,0]`, `[1,1]`, RulePermutation, "$.progress.data_order[1]", "came before"},
		{doc, `[1,0]`, `[1,2]`, RulePermutation, "$.progress.data_order[1]", "less than 2"},
		{doc, `[1,0]`, `[1,18446744073709551615]`, RulePermutation, "$.progress.data_order[1]", ""},
		{doc, `[1,0]`, `[1,-0]`, strictjson.RuleU64, "$.progress.data_order[1]", ""},
		{doc, `"content_sha256":"1111`, `"content_sha256":"sha256:1111`, RuleDigestForm, "$.data.content_sha256",
			"without a prefix"},
		{doc, `"content_sha256":"1111`, `"content_sha256":"AAAA`, RuleDigestForm, "$.data.content_sha256", ""},
		{doc, `"source_kind":"sft-valid-example-order-v1"`, `"source_kind":" "`, RuleText, "$.data.source_kind", "blank"},
		{doc, `"kind":"sgd"`, `"kind":""`, RuleText, "$.optimizer.kind", ""},
		{doc, `"kind":"constant"`, `"kind":"\t"`, RuleText, "$.scheduler.kind", ""},
		{doc, `"step":1,"hyperparameters"`, `"step":2,"hyperparameters"`, RuleAgreement, "$.optimizer.step",
			"global_step is 1"},
		{doc, `"step":1,"state"`, `"step":0,"state"`, RuleAgreement, "$.scheduler.step", "global_step is 1"},
		{doc, `"hyperparameters":{}`, `"hyperparameters":0`, strictjson.RuleType, "$.optimizer.hyperparameters", ""},
		{doc, `"lora-init"`, `"lora init"`, RuleName, `$.rng_states["lora init"]`, ""},
		{doc, `"kiln.seeded-lora-init.v1"`, `""`, RuleText, `$.rng_states["lora-init"].algorithm`, ""},
		{doc, `"position":0`, `"position":0,"state_file":"rng.bin"`, RuleRole, `$.rng_states["lora-init"].state_file`,
			"does not list"},
		{doc, `"position":0`, `"position":0,"state_file":"adapter.safetensors"`, RuleRole, "", "instead of rng-state"},
		{doc, `"adapter_parameters":"adapter.safetensors"`, `"adapter_parameters":""`, RulePath,
			"$.state_files.adapter_parameters", ""},
		{doc, `"adapter_parameters":"adapter.safetensors"`, `"adapter_parameters":"x"`, RuleRole, "", "does not list"},
		{doc, `"loss_history":"sft_loop_state.json"`, `"ema_state":"sft_loop_state.json"`, RuleRole,
			"$.state_files.ema_state", "loss-history instead of ema-state"},
		{doc, `"role":"loss-history"`, `"role":"Loss-History"`, RuleRole, "", "must be"},
		{doc, `"loss_history":"sft_loop_state.json"`, `"optimizer_state":"sft_loop_state.json"`, RuleRole, "",
			"optimizer-state"},
		{doc, `"size_bytes":7`, `"size_bytes":-7`, strictjson.RuleU64, "$.files.adapter.safetensors.size_bytes", ""},
		{doc, sum, "sha256:" + sum, RuleDigestForm, `$.files["adapter.safetensors"].sha256`, ""},
		{doc, `"auxiliary_state":{"base_model_weights_sha256":"sha256:c6`,
			`"auxiliary_state":{"base_model_weights_sha256":"sha256:c7`,
			RuleBaseConflict, "$.auxiliary_state.base_model_weights_sha256", exampleBase},
		{doc, `"auxiliary_state":{"base_model_weights_sha256":"sha256:c6`,
			`"auxiliary_state":{"base_model_weights_sha256":"c6`,
			RuleDigestForm, "$.auxiliary_state.base_model_weights_sha256", ""},
		{doc, `"base_model_weights_sha256":"` + exampleBase, `"base_model_weights_sha256":"sha256:` +
			strings.Repeat("0", 64), RuleValue, "$.auxiliary_state.base_model_weights_sha256", "all zeros"},
		{doc, `"size_bytes":11`, `"size_bytes":11,"x":0`, strictjson.RuleUnknownField,
			"$.auxiliary_state.base_weight_shard_manifest.shards[0].x", ""},
		{doc, `"cuda:0"`, `"cuda:9"`, RuleSelfDigest, "$.auxiliary_state.execution_provenance.provenance_sha256", ""},
		{doc, `"auxiliary_state":{`, `"auxiliary_state":{"z":[{"y":{"x":1,"x":1}}],`, strictjson.RuleDuplicate,
			"$.auxiliary_state.z[0].y", "twice"},
		{doc, `"auxiliary_state":{`, `"auxiliary_state":{"z":` + strings.Repeat("[", 126), strictjson.RuleDepth, "", ""},
		{doc, `"effective_config":{"seed":7}`, `"effective_config":{"a":[1e400]}`, strictjson.RuleF64,
			"$.effective_config.a[0]", "out of range"},
		{doc, `"auxiliary_state":{`, `"auxiliary_state":{"z":-1e999,`, strictjson.RuleF64, "$.auxiliary_state.z", ""},
	})
	checkTaken(t, []taken{
		{doc, `"auxiliary_state":{`, `"auxiliary_state":{"z":` + strings.Repeat("[", 125) + strings.Repeat("]", 125) + `,`},
		{doc, `"cursor_in_epoch":1,"data_order":[1,0]`, `"cursor_in_epoch":2,"data_order":[0,1]`},
		{doc, `"total_steps":2,"epoch_index":0,"cursor_in_epoch":1,"data_order":[1,0]`,
			`"total_steps":1,"epoch_index":9,"cursor_in_epoch":0,"data_order":[]`},
		{doc, `"loss_history":"sft_loop_state.json"`, `"ema_state":null`},
		{doc, `"size_bytes":7`, `"size_bytes":0`},
		{doc, `"rng_states":{`,
			`"rng_states":{"b":{"algorithm":"x","seed":18446744073709551615,"position":0,"state_file":null},`},
	})
}

// TestCheckpointPaths puts every path in the place of a listed file and of its use.
func TestCheckpointPaths(t *testing.T) {
	for path, good := range map[string]bool{
		"a": true, "a/b/c.bin": true, "a..b": true, ".hidden": true, "a/checkpoint_manifest.json": true, "é": true,
		strings.Repeat("a", 1024): true, "...": true,
		"": false, "/a": false, "a/": false, "a//b": false, ".": false, "..": false, "./a": false, "a/../b": false,
		"a/./b": false, `a\\b`: false, `a\u0000b`: false, "checkpoint_manifest.json": false, ".incomplete": false,
		".incomplete/x": false, "checkpoint_manifest.json/x": false, "a/.incomplete": true, ".incomplete2/x": true,
		strings.Repeat("a", 1025): false,
	} {
		data := bytes.ReplaceAll(example(t, "checkpoint_manifest.json"), []byte("adapter.safetensors"), []byte(path))
		_, err := ParseCheckpoint(data)
		if good && err != nil {
			t.Errorf("%.40q: %v", path, err)
		} else if !good {
			checkRefusal(t, err, RulePath, "", "")
		}
	}
	_, err := ParseCheckpoint(bytes.ReplaceAll(example(t, "checkpoint_manifest.json"), []byte("adapter.safetensors"),
		[]byte("sft_loop_state.json/x")))
	checkRefusal(t, err, RulePath, "", "below it")
}

func TestCheckpointFileCount(t *testing.T) {
	with := func(n int) []byte {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"f%d":{"role":"data-order","size_bytes":0,"sha256":"%s"},`, i, strings.Repeat("0", 64))
		}
		return edit(t, example(t, "checkpoint_manifest.json"), `"files":{`, `"files":{`+b.String())
	}
	if _, err := ParseCheckpoint(with(62)); err != nil {
		t.Error(err)
	}
	_, err := ParseCheckpoint(with(63))
	checkRefusal(t, err, RuleCount, "$.files", "65 files")
	data := example(t, "checkpoint_manifest.json")
	_, err = ParseCheckpoint(append(data[:bytes.Index(data, []byte(`"files":{`))], `"files":{}}`...))
	checkRefusal(t, err, RuleCount, "$.files", "0 files")
}

// TestCheckpointOptimizerState checks that both places name the same file.
func TestCheckpointOptimizerState(t *testing.T) {
	data := edit(t, example(t, "checkpoint_manifest.json"), `"files":{`,
		`"files":{"o":{"role":"optimizer-state","size_bytes":0,"sha256":"`+strings.Repeat("0", 64)+`"},`+
			`"p":{"role":"optimizer-state","size_bytes":0,"sha256":"`+strings.Repeat("0", 64)+`"},`)
	inState := edit(t, data, `"loss_history"`, `"optimizer_state":"o","loss_history"`)
	_, err := ParseCheckpoint(inState)
	checkRefusal(t, err, RuleAgreement, "$.optimizer.state_file", "")
	_, err = ParseCheckpoint(edit(t, data, `"hyperparameters":{}`, `"hyperparameters":{},"state_file":"o"`))
	checkRefusal(t, err, RuleAgreement, "$.optimizer.state_file", "")
	_, err = ParseCheckpoint(edit(t, inState, `"hyperparameters":{}`, `"hyperparameters":{},"state_file":"p"`))
	checkRefusal(t, err, RuleAgreement, "$.optimizer.state_file", "")
	c, err := ParseCheckpoint(edit(t, inState, `"hyperparameters":{}`, `"hyperparameters":{},"state_file":"o"`))
	if err != nil || c.Optimizer.StateFile != "o" || c.State.OptimizerState != "o" {
		t.Errorf("%+v, %v", c.Optimizer, err)
	}
}

// TestCheckpointOrder breaks several rules at once: Kiln's order decides which is named.
func TestCheckpointOrder(t *testing.T) {
	data := example(t, "checkpoint_manifest.json")
	for _, e := range [][2]string{
		{`{"schema_version":1,"manifest_type":"kiln.training`, `{"schema_version":2,"manifest_type":"Kiln.training`},
		{`"checkpoint_id":"sft`, `"checkpoint_id":" sft`}, {`"adapter_name":"demo"`, `"adapter_name":""`},
		{`"created_at":"2`, `"created_at":"x2`}, {`"global_step":1`, `"global_step":3`}, {`[1,0]`, `[1,1]`},
		{`"content_sha256":"1`, `"content_sha256":"x`}, {`"lora-init"`, `"lora init"`},
		{`"files":{"adapter.safetensors"`, `"files":{"/adapter.safetensors"`},
	} {
		data = edit(t, data, e[0], e[1])
	}
	for _, step := range []struct{ rule, path, old, new string }{
		{RuleSchemaVersion, "$.schema_version", `{"schema_version":2`, `{"schema_version":1`},
		{RuleDocumentType, "$.manifest_type", `"Kiln.training`, `"kiln.training`},
		{RuleName, "$.checkpoint_id", `" sft`, `"sft`},
		{RuleName, "$.adapter_name", `"adapter_name":""`, `"adapter_name":"demo"`},
		{RuleTimestamp, "$.created_at", `"x2`, `"2`},
		{RuleAgreement, "$.progress.global_step", `"global_step":3`, `"global_step":1`},
		{RulePermutation, "$.progress.data_order[1]", `[1,1]`, `[1,0]`},
		{RuleDigestForm, "$.data.content_sha256", `"content_sha256":"x`, `"content_sha256":"1`},
		{RuleName, `$.rng_states["lora init"]`, `"lora init"`, `"lora-init"`},
		{RulePath, `$.files["/adapter.safetensors"]`, `"/adapter`, `"adapter`},
	} {
		_, err := ParseCheckpoint(data)
		checkRefusal(t, err, step.rule, step.path, "")
		data = edit(t, data, step.old, step.new)
	}
	if _, err := ParseCheckpoint(data); err != nil {
		t.Error(err)
	}
}

// folder is the example's folder.
func folder() []Entry {
	return []Entry{
		{"checkpoint_manifest.json", Regular, 1, 3104, identity.Digest{}},
		{"adapter.safetensors", Regular, 1, 7, identity.Sum([]byte("adapter"))},
		{"sft_loop_state.json", Regular, 1, 5, identity.Sum([]byte("[1.0]"))},
	}
}

func TestCheckpointFolder(t *testing.T) {
	c := exampleCheckpoint(t)
	load := func(name string, mode Mode, entries []Entry) error {
		if err := CheckCheckpointFolder(name, mode, entries); err != nil {
			return err
		}
		return c.CheckFiles(entries)
	}
	const name = "demo-checkpoint-step-00000001.kiln-checkpoint"
	if err := load(name, Directory, append(folder(), Entry{Path: "empty", Mode: Directory})); err != nil {
		t.Error(err)
	}
	checkRefusal(t, load("demo", Directory, folder()), RuleName, "", "must have a name that ends")
	checkRefusal(t, load("\xff.kiln-checkpoint", Directory, folder()), RuleName, "", "")
	checkRefusal(t, load(name, Symlink, folder()), RuleFileKind, "", "a symbolic link, must be a folder")
	for _, c := range []struct {
		change func([]Entry) []Entry
		rule   string
		says   string
	}{
		{func(e []Entry) []Entry { return append(e, Entry{".incomplete", Regular, 1, 0, identity.Sum(nil)}) }, RuleFileExtra,
			"not written to its end"},
		{func(e []Entry) []Entry { return e[1:] }, RuleFileMissing, "no checkpoint"},
		{func(e []Entry) []Entry { e[0].Mode = Symlink; return e }, RuleFileKind, "symbolic link"},
		{func(e []Entry) []Entry { e[0].Links = 2; return e }, RuleFileKind, "2 hard links"},
		{func(e []Entry) []Entry { e[0].Size = MaxDocument; return e }, "", ""},
		{func(e []Entry) []Entry { e[0].Size = MaxDocument + 1; return e }, RuleInputSize, ""},
		{func(e []Entry) []Entry { return e[:2] }, RuleFileMissing, "sft_loop_state.json"},
		{func(e []Entry) []Entry { return append(e, Entry{"x\ny", Regular, 1, 0, identity.Sum(nil)}) }, RuleFileExtra,
			`x\ny`},
		{func(e []Entry) []Entry { return append(e, Entry{Path: "link", Mode: Symlink}) }, RuleFileKind, "link"},
		{func(e []Entry) []Entry { return append(e, Entry{Path: "pipe", Mode: Special}) }, RuleFileKind, "special"},
		{func(e []Entry) []Entry { e[1].Mode = Directory; return e }, RuleFileKind, "a folder"},
		{func(e []Entry) []Entry { e[2].Links = 2; return e }, RuleFileKind, "must have 1"},
		{func(e []Entry) []Entry { e[1].Size = 8; return e }, RuleFileSize, "8 bytes, must have 7"},
		{func(e []Entry) []Entry { e[2].Digest = identity.Sum(nil); return e }, RuleFileDigest, "c2272c0a"},
	} {
		err := load(name, Directory, c.change(folder()))
		if c.rule == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		checkRefusal(t, err, c.rule, "", c.says)
	}
}

func FuzzCheckpoint(f *testing.F) {
	addExamples(f, "checkpoint_manifest.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseCheckpoint(data)
		if !checkFuzz(t, data, err) {
			return
		}
		entries := []Entry{{Path: CheckpointFile, Links: 1}}
		for path, file := range c.Files {
			entries = append(entries, Entry{path, Regular, 1, file.Size, file.Digest})
		}
		if err := c.CheckFiles(entries); err != nil {
			t.Fatalf("%v: %q", err, data)
		}
	})
}
