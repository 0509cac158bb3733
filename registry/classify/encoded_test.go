package classify

import (
	"errors"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// A document of a name of Kiln's is refused under every type that says that it is packed, and read under others.
func TestEncodedDocuments(t *testing.T) {
	bad := api.BadDocument{Reason: api.CodeDocumentInvalid, File: documents.AdapterManifestFile,
		Rule: documents.RuleFileKind}
	for mediaType, refused := range map[string]bool{
		"application/gzip": true, "application/x-gzip": true, "application/json+gzip": true,
		"application/JSON+GZIP": true, "application/vnd.x+gzip": true, "application/zstd": true,
		"application/vnd.kiln+zstd": true, "application/x-xz": true, "application/zip": true, "application/x-tar": true,
		"application/vnd.foo.tar": true, "application/VND.FOO.TAR": true, "application/gzip; level=9": true, "application/json;+gzip": true,
		"application/json; encoding=gzip": true, "application/octet-stream; encoding=zstd": true,
		"application/vnd.cncf.model.doc.v1.raw;+gzip": true, "application/vnd.oci.image.layer.v1.tar; x=1": true,
		"application/vnd.oci.image.layer.v1.tar+gzip": true,
		"application/vnd.oci.image.layer.v1.tar":      false, "application/json": false, "application/JSON": false,
		"application/json; charset=utf-8": false, "application/vnd.zipper.config+json": false, "text/plain": false,
		"application/octet-stream": false,
	} {
		layers := adapterOf(t, baseOf(t, 1))
		for i := range layers {
			if layers[i].name == documents.AdapterManifestFile {
				layers[i].mediaType = mediaType
			}
		}
		s := blobs{}
		a, err := s.classify(t, s.manifest("", nil, layers...))
		switch e, ok := errors.AsType[*api.Error](err); {
		case !refused && (err != nil || a.Evidence != api.EvidenceDocument):
			t.Errorf("%s: %v, %v", mediaType, a, err)
		case refused && (!ok || e.Detail != any(bad)):
			t.Errorf("%s: %v", mediaType, err)
		}
	}
}

// What is one document is refused with a second one, wherever that lies, and with a layer that can't be read, as clients
// would not know what it is. The refusal names files and types.
func TestSoleDocuments(t *testing.T) {
	eval, row := testartifact.Eval("e", "sql", baseOf(t, 1)), testartifact.Row("1", baseOf(t, 1))
	receipt := testartifact.Receipt("sql", identity.Sum([]byte("w")), baseOf(t, 1))
	statement := bind(t, identity.Sum([]byte("x")), baseOf(t, 1).Aggregate)
	read := layer{"text/markdown", "README.md", []byte("x"), nil}
	as := func(mediaType, name string, b []byte) layer { return layer{mediaType, name, b, nil} }
	for name, c := range map[string]struct {
		artifactType string
		layers       []layer
		says         []string // none: it is taken
	}{
		"eval":      {api.ArtifactTypeEval, []layer{as("application/json", "e.json", eval), read}, nil},
		"rows":      {api.ArtifactTypeEval, []layer{as(oras, "e.jsonl", row), read}, nil},
		"receipt":   {api.ArtifactTypeReceipt, []layer{as(oras, "train_receipt.json", receipt), read}, nil},
		"statement": {api.ArtifactTypeStatement, []layer{as(oras, "s.json", statement), read}, nil},
		"empty layer": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval),
			as("application/vnd.oci.empty.v1+json", "", []byte("{}"))}, nil},

		"eval, packed": {api.ArtifactTypeEval, []layer{as("application/gzip", "e.json", eval)},
			[]string{"layers[0]: e.json is of media type \"application/gzip\""}},
		"eval and a packed one": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval),
			as("application/json;+gzip", "f.json", eval)},
			[]string{"layers[1]: f.json is of media type \"application/json;+gzip\""}},
		"eval and an archive": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval), as("application/x-tar", "f", row)},
			[]string{"f is of media type \"application/x-tar\""}},
		"eval and one in a folder": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval), as(oras, "sub/meta.json", row)},
			[]string{"of kind eval is one document, and this has 2", `"e.json" "sub/meta.json"`}},
		"eval and rows": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval), as(oras, "e.jsonl", row)},
			[]string{"this has 2", "e.jsonl"}},
		"eval without a name": {api.ArtifactTypeEval, []layer{as(oras, "e.json", eval), as("text/plain", "", row)},
			[]string{"layers[1]", "text/plain", "has a name"}},
		"receipt and a manifest": {api.ArtifactTypeReceipt, []layer{as(oras, "train_receipt.json", receipt),
			as(oras, "a/b.json", row)}, []string{"of kind receipt", "a/b.json"}},
		"statement, packed": {api.ArtifactTypeStatement, []layer{as("application/x+zstd", "s.json", statement)},
			[]string{"s.json is of media type \"application/x+zstd\""}},
	} {
		s := blobs{}
		_, err := s.classify(t, s.manifest(c.artifactType, nil, c.layers...))
		if (err == nil) != (c.says == nil) || err != nil && !errors.Is(err, api.ErrManifestInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		for _, says := range c.says {
			if err != nil && !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %v, want %s", name, err, says)
			}
		}
	}
}

// What nobody calls a receipt is none with a second document or a packed layer, and is taken.
func TestReceiptIsGuessed(t *testing.T) {
	receipt := layer{"application/json", "train_receipt.json", testartifact.Receipt("sql", identity.Digest{1}, nil), nil}
	for _, c := range []struct {
		beside layer
		kind   api.Kind
	}{
		{layer{"text/plain", "README.md", []byte("x"), nil}, api.KindReceipt},
		{layer{"application/json", "sub/other.json", []byte("{}"), nil}, ""},
		{layer{"application/gzip", "data", []byte("x"), nil}, ""},
	} {
		s := blobs{}
		if a, err := s.classify(t, s.manifest("", nil, receipt, c.beside)); err != nil || a.Kind != c.kind {
			t.Errorf("with %s: %q, %v", c.beside.name, a.Kind, err)
		}
	}
}

// Files that an artifact's own document names are refused by their type where they are packed.
func TestPackedFilesAreNamed(t *testing.T) {
	for file, c := range map[string]struct {
		layers []layer
		kind   string
	}{
		"adapter.safetensors":       {checkpointOf(t, baseOf(t, 1), false), api.ArtifactTypeCheckpoint},
		"adapter_model.safetensors": {adapterOf(t, baseOf(t, 1)), ""},
	} {
		for i, l := range c.layers {
			if l.name == file {
				c.layers[i].mediaType = "application/x+zstd"
			}
		}
		s := blobs{}
		_, err := s.classify(t, s.manifest(c.kind, nil, c.layers...))
		if want := file + ` is of media type "application/x+zstd"`; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
