package folder_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// TestKindOf: what is no base is told by its names, and none of it is opened as one.
func TestKindOf(t *testing.T) {
	for name, c := range map[string]struct {
		files []string
		is    api.Kind
	}{
		"nothing":                 {nil, ""},
		"base":                    {[]string{"a.safetensors"}, api.KindBase},
		"base by index":           {[]string{"model.safetensors.index.json"}, api.KindBase},
		"adapter":                 {[]string{"adapter_config.json", "adapter_model.safetensors"}, api.KindAdapter},
		"adapter without config":  {[]string{"adapter_model.safetensors"}, api.KindAdapter},
		"adapter without weights": {[]string{"adapter_config.json"}, api.KindAdapter},
		"adapter, other name":     {[]string{"adapter_manifest.json", "lora.safetensors"}, api.KindAdapter},
		"adapter beside base": {[]string{"adapter_config.json", "adapter_model.safetensors", "model.safetensors"},
			api.KindBase},
		"stray config":      {[]string{"adapter_config.json", "x-00001-of-00001.safetensors"}, api.KindBase},
		"checkpoint":        {[]string{"checkpoint_manifest.json", "adapter.safetensors"}, api.KindCheckpoint},
		"a.kiln-checkpoint": {[]string{"adapter.safetensors"}, api.KindCheckpoint},
	} {
		dir := filepath.Join(t.TempDir(), name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range c.files {
			if err := os.WriteFile(filepath.Join(dir, f), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if is := folder.KindOf(dir); is != c.is {
			t.Errorf("%s: %q, want %q", name, is, c.is)
		}
		_, err := folder.Open(dir, folder.Options{})
		var wrong *folder.KindError
		var rule *safetensors.Error
		if told := errors.As(err, &wrong); told != (c.is == api.KindAdapter || c.is == api.KindCheckpoint) {
			t.Errorf("%s: opened as a base: %v", name, err)
		} else if told && (!errors.As(err, &rule) || wrong.Hint() == "" || wrong.Path != dir) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if is := folder.KindOf("nowhere.kiln-checkpoint/"); is != api.KindCheckpoint {
		t.Errorf("a checkpoint that is not there: %q", is)
	}
}

// TestKindOfFile: a document is told by its members.
func TestKindOfFile(t *testing.T) {
	for text, is := range map[string]api.Kind{
		`{"manifest_type":"kiln.base-weight-shards.v1"}`:  api.KindBase,
		`{"manifest_type":"kiln_adapter_manifest"}`:       api.KindAdapter,
		`{"manifest_type":"kiln.training-checkpoint.v1"}`: api.KindCheckpoint,
		`{"receipt_type":"kiln_train_receipt"}`:           api.KindReceipt,
		`{"job_id":"eval-1"}`:                             api.KindEval,
		`{}`:                                              "",
		`[`:                                               "",
	} {
		path := filepath.Join(t.TempDir(), "x.json")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := folder.KindOf(path); got != is {
			t.Errorf("%s: %q, want %q", text, got, is)
		}
	}
}
