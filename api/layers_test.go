package api

import (
	"strings"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

func TestLayerName(t *testing.T) {
	component := strings.Repeat("a", 255)
	deep := strings.Repeat(component[:204]+"/", 5)[:MaxFilePath]
	for name, notes := range map[string]map[string]string{
		"":          {},
		"a":         {AnnotationFilepath: "a", v1.AnnotationTitle: "a", AnnotationCNAIPath: "b"},
		"x/y.json":  {v1.AnnotationTitle: "x/y.json"},
		"c":         {AnnotationCNAIPath: "c"},
		"..a/b..":   {AnnotationFilepath: "..a/b.."},
		"größe.txt": {AnnotationFilepath: "größe.txt"},
		deep:        {v1.AnnotationTitle: deep},
	} {
		if got, err := LayerName(notes); got != name || err != nil {
			t.Errorf("%v: %q, %v", notes, got, err)
		}
	}
	if got, err := LayerName(map[string]string{AnnotationFilepath: "a", v1.AnnotationTitle: "b"}); got != "" || err == nil {
		t.Errorf("two names give %q", got)
	}
	for _, bad := range []string{"/a", "..", "a/../b", "./a", "a//b", "a/", `a\b`, "a\x00", "a\n", "a\x1b[1m", "a\u009b", "a\u202e",
		"a\xff", strings.Repeat("a", 256), deep + "b",
		component + "a/b"} {
		if got, err := LayerName(map[string]string{AnnotationFilepath: bad}); got != "" || err == nil {
			t.Errorf("%q is taken as %q", bad, got)
		}
	}
}

func TestEncoded(t *testing.T) {
	for mediaType, encoded := range map[string]bool{
		"application/gzip": true, "application/x-gzip": true, "application/JSON+GZIP": true, "application/vnd.x+zstd": true,
		"application/json;+gzip": true, "application/json; encoding=\"zstd\"": true, "application/gzip; level=9": true,
		"application/vnd.foo.tar": true, v1.MediaTypeImageLayer: true, "application/x.encrypted": true,
		"application/json": false, "application/json; charset=utf-8": false, "application/vnd.zipper.config+json": false,
		"application/octet-stream": false, "text/plain": false, "": false,
	} {
		if Encoded(mediaType) != encoded {
			t.Errorf("%q: %v", mediaType, !encoded)
		}
	}
}
