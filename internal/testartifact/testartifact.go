// Package testartifact writes small artifacts that were made from a base, for the tests of other packages: adapters,
// checkpoints, receipts and evals whose documents fit their files.
package testartifact

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

type object = map[string]any

// Weights is a safetensors file of one LoRA pair, with content of its own for each seed.
func Weights(seed byte) []byte {
	const module = `"base_model.model.model.layers.0.self_attn.q_proj.lora_`
	header := `{` + module + `A.weight":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},` +
		module + `B.weight":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}`
	b := append([]byte{byte(len(header)), byte(len(header) >> 8), 0, 0, 0, 0, 0, 0}, header...)
	for range 16 {
		b = append(b, seed)
	}
	return b
}

// Config is the configuration that PEFT writes beside the weights. baseName is free text.
func Config(baseName string) []byte {
	return encode(object{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": []string{"q_proj"},
		"base_model_name_or_path": baseName})
}

// PEFT writes an adapter as PEFT saves it.
func PEFT(dir string, seed byte) error {
	return errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, documents.AdapterConfigFile), Config("example/base"), 0o644),
		os.WriteFile(filepath.Join(dir, documents.AdapterWeightsFile), Weights(seed), 0o644))
}

// Adapter writes an adapter as Kiln does: with its receipt and its manifest. A nil base is not recorded.
func Adapter(dir string, seed byte, base *identity.Manifest) error {
	if err := PEFT(dir, seed); err != nil {
		return err
	}
	name := filepath.Base(dir)
	receipt := Receipt(name, identity.Sum(Weights(seed)), base)
	m := documents.NewAdapterManifest(name, identity.Sum(Weights(seed)), identity.Sum(Config("example/base")),
		identity.Sum(receipt), of(base))
	text, err := m.Document()
	return errors.Join(err,
		os.WriteFile(filepath.Join(dir, documents.ReceiptFile), receipt, 0o644),
		os.WriteFile(filepath.Join(dir, documents.AdapterManifestFile), text, 0o644))
}

// Write writes a peft adapter, an adapter, a checkpoint, a bare checkpoint or a receipt to path, as kind says; known is
// false for any other kind.
func Write(kind, path string, seed byte, base *identity.Manifest) (known bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return true, err
	}
	switch kind {
	case "peft":
		return true, PEFT(path, seed)
	case "adapter":
		return true, Adapter(path, seed, base)
	case "checkpoint", "bare":
		return true, Checkpoint(path, seed, base, kind == "bare")
	case "receipt":
		return true, os.WriteFile(path, Receipt("demo", identity.Sum(Weights(seed)), base), 0o644)
	}
	return false, nil
}

func of(base *identity.Manifest) identity.Manifest {
	if base == nil {
		return identity.Manifest{}
	}
	return *base
}

// Receipt is the receipt of a run that made an adapter with the given weights. A nil base is not recorded.
func Receipt(name string, weights identity.Digest, base *identity.Manifest) []byte {
	model := object{"path": nil}
	if base != nil {
		model["base_weight_shard_manifest"] = base
	}
	return encode(object{
		"schema_version": 1, "receipt_type": "kiln_train_receipt", "adapter_name": name,
		"produced_at": "2026-01-02T03:04:05Z", "status": "success",
		"kiln": object{"package_version": "0.4.1"}, "model": model, "tokenizer": object{},
		"adapters":      object{"base": object{}, "output": object{"adapter_model_sha256": weights}},
		"training_data": object{"source": "jsonl_sft"}, "hyperparameters": object{"mode": "sft", "seed": 7},
		"echo": object{}, "data": object{}, "rewards": object{}, "token_counts": object{}, "runtime": object{},
		"no_policy_loss": false, "lora_delta_norms": []any{}, "config": object{},
	})
}

// Eval is an archived eval job that ran on the base and on an adapter. A nil base is not recorded.
func Eval(id, adapter string, base *identity.Manifest) []byte {
	job := object{
		"schema_version": 2, "job_id": id, "suite_name": "smoke", "adapters": []any{nil, adapter},
		"submission_kind": "compare", "state": "completed", "progress": object{}, "finished_runs": []any{},
		"submitted_at_iso": "2026-01-02T03:04:05Z", "error": nil,
	}
	if base != nil {
		job["base_weight_shard_manifest"] = base
	}
	return encode(job)
}

// Row is one row of exported outcomes. A nil base is not recorded.
func Row(id string, base *identity.Manifest) []byte {
	row := object{"example_id": id}
	if base != nil {
		row["base_weight_shard_manifest"] = base
	}
	return append(encode(row), '\n')
}

// Checkpoint writes a training checkpoint into dir, whose name must end with .kiln-checkpoint: its manifest and three
// files, one of them in a folder and one empty. With bare, only the aggregate of the base is recorded; a nil base is
// not recorded at all.
func Checkpoint(dir string, seed byte, base *identity.Manifest, bare bool) error {
	files := map[string][]byte{"adapter.safetensors": Weights(seed), "state/loop.json": []byte("[1.0]"), "rng.bin": {}}
	roles := map[string]documents.Role{"adapter.safetensors": documents.RoleAdapterParameters,
		"state/loop.json": documents.RoleLossHistory, "rng.bin": documents.RoleRNGState}
	listed := object{}
	for name, b := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, b, 0o644)); err != nil {
			return err
		}
		listed[name] = object{"role": roles[name], "size_bytes": len(b), "sha256": identity.Sum(b).Hex()}
	}
	auxiliary := object{}
	if base != nil {
		auxiliary["base_model_weights_sha256"] = base.Aggregate
	}
	if base != nil && !bare {
		auxiliary["base_weight_shard_manifest"] = base
	}
	manifest := encode(object{
		"schema_version": 1, "manifest_type": "kiln.training-checkpoint.v1", "checkpoint_kind": "resumable",
		"checkpoint_id": "sft-step-00000001", "training_kind": "sft", "adapter_name": "demo",
		"created_at": "2026-01-02T03:04:05Z", "effective_config": object{},
		"precision_policy": object{"parameter_dtype": "bf16", "optimizer_state_dtype": "none", "activation_dtype": "f32",
			"gradient_dtype": "f32", "stochastic_rounding": object{}},
		"progress": object{"global_step": 1, "total_steps": 2, "epoch_index": 0, "cursor_in_epoch": 1,
			"data_order": []int{1, 0}},
		"data":            object{"source_kind": "sft", "content_sha256": identity.Sum(nil).Hex(), "item_count": 2},
		"rng_states":      object{"lora-init": object{"algorithm": "a", "seed": 7, "position": 0, "state_file": "rng.bin"}},
		"optimizer":       object{"kind": "sgd", "step": 1, "hyperparameters": object{}},
		"scheduler":       object{"kind": "constant", "step": 1, "state": object{}},
		"state_files":     object{"adapter_parameters": "adapter.safetensors", "loss_history": "state/loop.json"},
		"auxiliary_state": auxiliary, "files": listed,
	})
	return os.WriteFile(filepath.Join(dir, documents.CheckpointFile), manifest, 0o644)
}

// Provenance puts an execution provenance into a checkpoint, and returns the request of a run that is the same in every
// respect.
func Provenance(dir string, provenance []byte) (request []byte, err error) {
	path := filepath.Join(dir, documents.CheckpointFile)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var c, auxiliary, progress map[string]json.RawMessage
	err = errors.Join(json.Unmarshal(text, &c), json.Unmarshal(c["auxiliary_state"], &auxiliary),
		json.Unmarshal(c["progress"], &progress))
	if err != nil {
		return nil, err
	}
	auxiliary["execution_provenance"] = provenance
	c["auxiliary_state"] = encode(auxiliary)
	wanted := object{
		"schema_version": 1, "request_type": "kiln.resume-request.v1", "seed": 7,
		"execution_provenance": json.RawMessage(provenance),
		"total_steps":          progress["total_steps"], "data_order": progress["data_order"],
	}
	for _, same := range []string{"training_kind", "adapter_name", "effective_config", "precision_policy", "data",
		"optimizer", "scheduler", "rng_states", "state_files", "auxiliary_state"} {
		wanted[same] = c[same]
	}
	return encode(wanted), os.WriteFile(path, encode(c), 0o644)
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode %v: %v", v, err))
	}
	return b
}
