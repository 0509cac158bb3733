package classify

import (
	"errors"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// A document of a name of Kiln's is refused under every type that says that it is packed, and read under others.
func TestEncodedDocuments(t *testing.T) {
	bad := api.BadDocument{Reason: api.CodeDocumentInvalid, File: documents.AdapterManifestFile,
		Rule: documents.RuleFileKind}
	for mediaType, refused := range map[string]bool{
		"application/gzip": true, "application/x-gzip": true, "application/json+gzip": true,
		"application/JSON+GZIP": true, "application/vnd.x+gzip": true, "application/zstd": true,
		"application/vnd.kiln+zstd": true, "application/x-xz": true, "application/zip": true, "application/x-tar": true,
		"application/vnd.foo.tar": true, "application/VND.FOO.TAR": true, "application/gzip; level=9": true,
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
