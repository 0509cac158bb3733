package classify

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// A text that is too large is not read.
func TestLargeDocuments(t *testing.T) {
	s := blobs{}
	m, err := Parse(imageType, s.manifest(api.ArtifactTypeEval, nil, doc("e.json", []byte("{}"))...))
	if err != nil {
		t.Fatal(err)
	}
	m.Layers = slices.Clone(m.Layers) // what a parsed manifest has is not to be changed
	m.Layers[0].Size = documents.MaxEval + 1
	var e *api.Error
	if _, err := Classify(t.Context(), s, m); !errors.As(err, &e) || e.Detail != (api.BadDocument{
		Reason: "DOCUMENT_INVALID", File: "e.json", Rule: "input-size"}) {
		t.Error(err, e)
	}
	if m.TextSize() != 0 {
		t.Error(m.TextSize())
	}
	m.Layers[0].Size = 5 << 20
	if m.TextSize() != 5<<20 {
		t.Error(m.TextSize())
	}
}

// Whatever file may be read as a text counts as one, by whatever name.
func TestTextSize(t *testing.T) {
	const large = 5 << 20
	for name, c := range map[string]struct {
		artifactType, file string
		size               int64
		counts             bool
	}{
		"rows":                  {api.ArtifactTypeEval, "rows.jsonl", large, true},
		"many rows":             {api.ArtifactTypeEval, "rows.jsonl", documents.MaxEval, true},
		"config":                {api.ArtifactTypeAdapter, "c.bin", large, true},
		"receipt":               {api.ArtifactTypeAdapter, "receipt", large, true},
		"optimizer":             {api.ArtifactTypeAdapter, "optimizer.pt", documents.MaxDocument + 1, false},
		"weights":               {api.ArtifactTypeAdapter, "adapter_model.safetensors", large, false},
		"in a folder":           {api.ArtifactTypeAdapter, "sub/c.json", large, false},
		"adapter of receipt":    {api.ArtifactTypeReceipt, documents.AdapterManifestFile, large, true},
		"receipt of checkpoint": {api.ArtifactTypeCheckpoint, documents.ReceiptFile, large, true},
		"statement":             {api.ArtifactTypeStatement, "s.json", large, true},
	} {
		s := blobs{}
		m, err := Parse(imageType, s.manifest(c.artifactType, nil, doc(c.file, []byte("{}"))...))
		if err != nil {
			t.Fatal(err)
		}
		m.Layers[0].Size = c.size
		if got := m.TextSize(); (got == c.size) != c.counts || !c.counts && got != 0 {
			t.Errorf("%s: %d", name, got)
		}
	}
}

// A manifest calls its config and its receipt as it likes, but not as weights are called.
func TestNamedDocuments(t *testing.T) {
	base := baseOf(t, 1)
	adapter := adapterOf(t, base)
	renamed := func(old, to string) []layer {
		out := edited(t, adapter, documents.AdapterManifestFile, `"`+old+`"`, `"`+to+`"`)
		for i, l := range out {
			if l.name == old {
				out[i].name = to
			}
		}
		return out
	}
	for _, name := range []string{documents.AdapterConfigFile, documents.ReceiptFile} {
		s := blobs{}
		if a, err := s.classify(t, s.manifest("", nil, renamed(name, "c.bin")...)); err != nil || a.Evidence != "document" ||
			a.Facts.Adapter.Rank == 0 || a.Facts.Receipt == nil {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		_, err := s.classify(t, s.manifest("", nil, renamed(name, "c.safetensors")...))
		if e, ok := errors.AsType[*api.Error](err); !ok || !strings.Contains(e.Message, `"c.safetensors" is no name`) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
