package classify

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// What was found reads back as it was, and never as something about another manifest.
func TestFindingIsKept(t *testing.T) {
	s := blobs{}
	body := s.manifest("", nil, layer{raw, "README.md", []byte("x"), nil}, layer{raw, "b.safetensors", tensors("1"), nil},
		layer{raw, "a.safetensors", tensors("2"), nil})
	m, err := Parse(imageType, body)
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.classify(t, body)
	if err != nil {
		t.Fatal(err)
	}
	f := Finding{Artifact: a, Rules: 7}
	kept, err := f.Encode(m)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := ParseFinding(m, kept); err != nil || !reflect.DeepEqual(back, f) {
		t.Errorf("%s: %+v, %v", kept, back, err)
	}
	fewer, other := m, m
	fewer.Layers = m.Layers[:2]
	other.Layers = []Descriptor{m.Layers[0], m.Layers[0], m.Layers[2]}
	for name, about := range map[string]Manifest{"fewer layers": fewer, "other layers": other} {
		if _, err := ParseFinding(about, kept); err == nil {
			t.Errorf("%s: read", name)
		}
		if _, err := f.Encode(about); err == nil {
			t.Errorf("%s: kept", name)
		}
	}
	for _, bad := range []string{
		"", "{", strings.Replace(kept, "[2,1]", "[-1]", 1), strings.Replace(kept, "[2,1]", "[2]", 1),
	} {
		if _, err := ParseFinding(m, bad); err == nil {
			t.Errorf("%q: read", bad)
		}
	}
	none := Finding{Artifact: Artifact{Kind: api.KindAdapter, State: api.ContentNone,
		Base: identity.Aggregate(identity.Sum(nil)), Evidence: api.EvidenceAsserted}}
	if kept, err = none.Encode(m); err != nil {
		t.Fatal(err)
	}
	if back, err := ParseFinding(m, kept); err != nil || !reflect.DeepEqual(back, none) {
		t.Errorf("%s: %+v, %v", kept, back, err)
	}
}

func FuzzParseFinding(f *testing.F) {
	s := blobs{}
	m, err := Parse(imageType, s.manifest("", nil, layer{raw, "a.safetensors", tensors("1"), nil}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(`{"rules":1,"kind":"base","content_state":"direct","evidence":"none","shards":[0]}`)
	f.Fuzz(func(t *testing.T, kept string) {
		got, err := ParseFinding(m, kept)
		if err != nil {
			return
		}
		if _, err := got.Encode(m); err != nil {
			t.Fatal(err)
		}
	})
}
