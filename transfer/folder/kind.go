package folder

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// KindError: a folder or a file is of another kind than the one that was asked for. It is a *safetensors.Error too.
type KindError struct {
	Path     string
	Is, Want api.Kind
}

// Error says what it is and what it is not.
func (e *KindError) Error() string {
	return fmt.Sprintf("%s holds %s, not %s (%s)", e.Path, named(e.Is), named(e.Want), e.code())
}

// Hint says what to do about it.
func (e *KindError) Hint() string {
	path := "FILE"
	if e.Is == api.KindBase || e.Is == api.KindAdapter || e.Is == api.KindCheckpoint {
		path = "DIR"
	}
	hint := fmt.Sprintf("kiln-push %s %s REF pushes it as what it is", e.Is, path)
	if e.Want == api.KindBase {
		return "where a base is asked for, name the folder of the base model; " + hint
	}
	return hint
}

// Unwrap returns the rule that is broken.
func (e *KindError) Unwrap() error {
	return &safetensors.Error{Code: e.code(), Msg: fmt.Sprintf("holds %s, not %s", named(e.Is), named(e.Want))}
}

func (e *KindError) code() string { return string(e.Is) + "_not_" + string(e.Want) }

func named(k api.Kind) string {
	switch k {
	case api.KindBase:
		return "a base model"
	case api.KindAdapter, api.KindEval:
		return "an " + string(k)
	}
	return "a " + string(k)
}

// CheckKind is a *KindError if what is at path is known to be of another kind.
func CheckKind(path string, want api.Kind) error {
	if _, err := os.Stat(path); err != nil {
		return nil
	}
	if is := KindOf(path); is != "" && is != want {
		return &KindError{Path: path, Is: is, Want: want}
	}
	return nil
}

// KindOf says of what kind the folder or file at a path is, by what its files are called or, of one JSON file, by the
// members that tell it; empty: that does not show. It is no check: that is the reader's. A folder with weights beside
// those of an adapter is a base, as it is to Kiln's loader.
func KindOf(path string) api.Kind {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return kindOfFolder(path)
	case err == nil && info.Mode().IsRegular():
		return kindOfFile(path)
	case strings.HasSuffix(filepath.Clean(path), documents.CheckpointSuffix):
		return api.KindCheckpoint
	}
	return ""
}

func kindOfFolder(dir string) api.Kind {
	has := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	}
	if has(documents.CheckpointFile) {
		return api.KindCheckpoint
	}
	if has(safetensors.IndexName) || has(safetensors.SingleName) {
		return api.KindBase
	}
	adapter := has(documents.AdapterConfigFile) || has(documents.AdapterWeightsFile)
	switch {
	case has(documents.AdapterManifestFile), adapter && !hasShards(dir):
		return api.KindAdapter
	case strings.HasSuffix(filepath.Clean(dir), documents.CheckpointSuffix):
		return api.KindCheckpoint
	case hasShards(dir):
		return api.KindBase
	}
	return ""
}

// hasShards says whether a folder has weights other than those of an adapter.
func hasShards(dir string) bool {
	found, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, d := range found {
		if filepath.Ext(d.Name()) == identity.Extension && d.Name() != documents.AdapterWeightsFile &&
			d.Name() != identity.Extension {
			return true
		}
	}
	return false
}

// manifests are the kinds that manifest_type tells.
var manifests = map[string]api.Kind{
	identity.ManifestType: api.KindBase, "kiln_adapter_manifest": api.KindAdapter,
	"kiln.training-checkpoint.v1": api.KindCheckpoint,
}

func kindOfFile(path string) api.Kind {
	switch filepath.Ext(path) {
	case ".jsonl":
		return api.KindEval
	case ".json":
	default:
		return ""
	}
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, documents.MaxDocument))
	var says struct {
		Manifest string          `json:"manifest_type"`
		Receipt  json.RawMessage `json:"receipt_type"`
		Job      json.RawMessage `json:"job_id"`
	}
	if err != nil || json.Unmarshal(b, &says) != nil {
		return ""
	}
	switch {
	case says.Receipt != nil:
		return api.KindReceipt
	case says.Job != nil:
		return api.KindEval
	}
	return manifests[says.Manifest]
}
