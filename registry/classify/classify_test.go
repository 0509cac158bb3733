package classify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

const imageType = "application/vnd.oci.image.manifest.v1+json"

// blobs holds blobs in memory, and counts the bytes that were read of each.
type blobs map[identity.Digest]*blob

type blob struct {
	b    []byte
	read int
}

func (s blobs) Open(_ context.Context, d identity.Digest, off, n int64) (io.ReadCloser, error) {
	e, ok := s[d]
	if !ok {
		return nil, errors.New("no such blob")
	}
	b := e.b[off:]
	if n >= 0 {
		b = b[:min(n, int64(len(b)))]
	}
	e.read += len(b)
	return io.NopCloser(bytes.NewReader(b)), nil
}

func (s blobs) add(b []byte) identity.Digest {
	d := identity.Sum(b)
	s[d] = &blob{b: b}
	return d
}

func tensors(seed string) []byte {
	head := `{"__metadata__":{"seed":"` + seed + `"}}`
	return append([]byte{byte(len(head)), 0, 0, 0, 0, 0, 0, 0}, head+"......"...)
}

type layer struct {
	mediaType, name string
	body            []byte
	notes           map[string]string // in place of both names
}

const (
	raw    = "application/vnd.cncf.model.weight.v1.raw"
	config = "application/vnd.cncf.model.weight.config.v1.raw"
	tarred = "application/vnd.oci.image.layer.v1.tar"
	gzip   = "application/vnd.oci.image.layer.v1.tar+gzip"
)

func (s blobs) manifest(artifactType string, notes map[string]string, layers ...layer) []byte {
	var descs []any
	for _, l := range layers {
		if l.notes == nil && l.name != "" {
			l.notes = map[string]string{"org.opencontainers.image.title": l.name}
		}
		descs = append(
			descs,
			map[string]any{
				"mediaType":   l.mediaType,
				"digest":      s.add(l.body).String(),
				"size":        len(l.body),
				"annotations": l.notes,
			},
		)
	}
	b, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": imageType, "artifactType": artifactType, "layers": descs, "annotations": notes,
		"config": map[string]any{
			"mediaType": "application/vnd.oci.empty.v1+json",
			"digest":    s.add([]byte("{}")).String(),
			"size":      2,
		},
	})
	if err != nil {
		panic(err)
	}
	return b
}

func (s blobs) classify(t *testing.T, body []byte) (Artifact, error) {
	t.Helper()
	m, err := Parse(imageType, body)
	if err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return Classify(t.Context(), s, m)
}

func indexOf(names ...string) []byte {
	m := map[string]string{}
	for i, n := range names {
		m[fmt.Sprintf("t%d", i)] = n
	}
	b, _ := json.Marshal(map[string]any{"weight_map": m})
	return b
}

func TestKindsAndStates(t *testing.T) {
	one, two := tensors("1"), tensors("2")
	zeros := make([]byte, 64)
	archive := append([]byte("model.safetensors"), make([]byte, 500)...)
	for name, c := range map[string]struct {
		artifactType string
		notes        map[string]string
		layers       []layer
		kind         api.Kind
		state        api.ContentState
		shards       int
	}{
		"single": {layers: []layer{{raw, "model.safetensors", one, nil}, {raw, "extra.safetensors", two, nil}},
			kind: "base", state: "direct", shards: 1},
		"top level only": {layers: []layer{{raw, "a.safetensors", one, nil}, {raw, "sub/b.safetensors", two, nil}},
			kind: "base", state: "direct", shards: 1},
		"index": {layers: []layer{{config, "model.safetensors.index.json", indexOf("a.safetensors", "b.safetensors"), nil},
			{raw, "a.safetensors", one, nil}, {raw, "b.safetensors", two, nil}, {raw, "consolidated.safetensors", zeros, nil}},
			kind: "base", state: "direct", shards: 2},
		"index pushed as tar by name": {layers: []layer{{tarred, "model.safetensors.index.json",
			indexOf("a.safetensors"), nil},
			{tarred, "a.safetensors", one, nil}}, kind: "base", state: "direct", shards: 1},
		"index names more": {layers: []layer{{config, "model.safetensors.index.json", indexOf("a.safetensors",
			"b.safetensors"), nil},
			{raw, "a.safetensors", one, nil}}, kind: "base", state: "incomplete"},
		"index is no JSON": {layers: []layer{{config, "model.safetensors.index.json", []byte("<html>"), nil},
			{raw, "a.safetensors", one, nil}}, kind: "base", state: "incomplete"},
		"mislabelled tar": {layers: []layer{{tarred, "model.safetensors", archive, nil}}, kind: "base", state: "pending"},
		"zeros": {layers: []layer{{raw, "a.safetensors", zeros, nil}, {raw, "b.safetensors", one, nil}},
			kind: "base", state: "incomplete"},
		"too short": {layers: []layer{{raw, "model.safetensors", []byte("\x02\x00\x00\x00\x00\x00\x00\x00{"),
			nil}}, kind: "base", state: "incomplete"},
		"gzip": {layers: []layer{{gzip, "model.safetensors", one, nil}}, kind: "base", state: "pending"},
		"folder": {layers: []layer{{gzip, "", one, map[string]string{"org.opencontainers.image.title": "model",
			"io.deis.oras.content.unpack": "true"}}}, state: "pending"},
		"container image": {layers: []layer{{gzip, "", one, nil}}, state: "pending"},
		"gguf":            {layers: []layer{{raw, "model.gguf", one, nil}}, state: "none"},
		"nothing":         {state: "none"},
		"adapter by file": {layers: []layer{{raw, "adapter_model.safetensors", one, nil}}, kind: "adapter", state: "none"},
		"adapter by config": {layers: []layer{{config, "adapter_config.json", []byte("{}"), nil}, {raw,
			"model.safetensors", one, nil}},
			kind: "adapter", state: "none"},
		"adapter by type": {artifactType: api.ArtifactTypeAdapter, layers: []layer{{raw, "model.safetensors",
			one, nil}}, kind: "adapter", state: "none"},
		"adapter by note": {artifactType: api.ArtifactTypeBase,
			notes: map[string]string{api.AnnotationKind: "adapter"}, layers: []layer{{raw, "model.safetensors", one,
				nil}}, kind: "adapter", state: "none"},
		"type and note agree": {artifactType: api.ArtifactTypeAdapter,
			notes: map[string]string{api.AnnotationKind: "adapter"}, kind: "adapter", state: "none"},
		"base by note with PEFT": {notes: map[string]string{api.AnnotationKind: "base"}, layers: []layer{{config,
			"sub/adapter_config.json", []byte("{}"), nil}, {raw, "model.safetensors", one, nil}}, kind: "base",
			state: "direct", shards: 1},
		"model car type": {layers: []layer{{"application/vnd.docker.ai.safetensors", "model.safetensors", one,
			nil}}, kind: "base", state: "direct", shards: 1},
		"modctl names": {layers: []layer{{raw, "", one, map[string]string{"org.cncf.model.filepath": "model.safetensors"}}},
			kind: "base", state: "direct", shards: 1},
		"old modctl names": {layers: []layer{{raw, "", one,
			map[string]string{"org.cnai.model.filepath": "model.safetensors"}}},
			kind: "base", state: "direct", shards: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := blobs{}
			a, err := s.classify(t, s.manifest(c.artifactType, c.notes, c.layers...))
			if err != nil {
				t.Fatal(err)
			}
			if a.Kind != c.kind || a.State != c.state || len(a.Shards.Shards) != c.shards {
				t.Errorf("got %q %q %d shards, want %q %q %d", a.Kind, a.State, len(a.Shards.Shards), c.kind, c.state, c.shards)
			}
			if (a.State == api.ContentDirect) == a.Shards.Aggregate.IsZero() {
				t.Errorf("state %s with aggregate %s", a.State, a.Shards.Aggregate)
			}
			if b := s[identity.Sum(one)]; b != nil && b.read > 9 {
				t.Errorf("%d bytes of weights were read", b.read)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	one := tensors("1")
	title := func(name string) layer {
		return layer{raw, "", one, map[string]string{"org.opencontainers.image.title": name}}
	}
	other := identity.Aggregate(identity.Sum([]byte("another"))).String()
	for name, c := range map[string]struct {
		artifactType string
		notes        map[string]string
		layers       []layer
	}{
		"absolute": {layers: []layer{title("/etc/passwd")}}, "parent": {layers: []layer{title("../x")}},
		"inner parent": {layers: []layer{title("a/../../x")}},
		"backslash":    {layers: []layer{title(`a\b`)}}, "nul": {layers: []layer{title("a\x00b")}},
		"dot":          {layers: []layer{title("./a")}},
		"double slash": {layers: []layer{title("a//b")}}, "trailing slash": {layers: []layer{title("a/")}},
		"long": {layers: []layer{title(strings.Repeat("n", 256))}}, "twice": {layers: []layer{title("a"), title("a")}},
		"two names": {layers: []layer{{raw, "", one, map[string]string{"org.opencontainers.image.title": "a",
			"org.cncf.model.filepath": "b"}}}},
		"other aggregate": {notes: map[string]string{api.AnnotationAggregate: other},
			layers: []layer{title("model.safetensors")}},
		"claim of nothing": {notes: map[string]string{api.AnnotationAggregate: other, api.AnnotationKind: "base"},
			layers: []layer{
				{config, "model.safetensors.index.json", indexOf("a.safetensors"), nil}, title("b.safetensors")}},
		"aggregate of zeros": {notes: map[string]string{api.AnnotationAggregate: "sha256:" + strings.Repeat("0", 64)},
			layers: []layer{title("adapter_model.safetensors")}},
		"no aggregate":      {notes: map[string]string{api.AnnotationAggregate: "sha256:XYZ"}},
		"unknown kind":      {notes: map[string]string{api.AnnotationKind: "lora"}},
		"two kinds":         {artifactType: api.ArtifactTypeEval, notes: map[string]string{api.AnnotationKind: "base"}},
		"base of no shards": {notes: map[string]string{api.AnnotationKind: "base"}, layers: []layer{title("model.gguf")}},
	} {
		s := blobs{}
		if a, err := s.classify(t, s.manifest(c.artifactType, c.notes, c.layers...)); !errors.Is(
			err,
			api.ErrManifestInvalid,
		) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}

// An index is nothing that was made from a base, whatever it says.
func TestIndexIsUnbound(t *testing.T) {
	s := blobs{}
	m, err := Parse("", fmt.Appendf(nil,
		`{"schemaVersion":2,"mediaType":%q,"manifests":[],"annotations":{%q:%q}}`, v1.MediaTypeImageIndex, api.AnnotationAggregate, identity.Sum([]byte("base"))))
	if err != nil {
		t.Fatal(err)
	}
	if a, err := Classify(t.Context(), s, m); err != nil || !a.Base.IsZero() || a.Evidence != api.EvidenceNone {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestConflictNamesBothValues(t *testing.T) {
	s := blobs{}
	other := identity.Aggregate(identity.Sum([]byte("another"))).String()
	_, err := s.classify(
		t,
		s.manifest("", map[string]string{api.AnnotationAggregate: other}, layer{raw, "model.safetensors", tensors("1"), nil}),
	)
	want, _ := identity.New(
		[]identity.Shard{
			{Filename: "model.safetensors", Size: uint64(len(tensors("1"))), Digest: identity.Sum(tensors("1"))},
		},
	)
	var e *api.Error
	if !errors.As(err, &e) ||
		e.Detail != (api.Conflict{Reason: "AGGREGATE_CONFLICT", Claimed: other, Derived: want.Aggregate.String(),
			ClaimedAt: "annotation " + api.AnnotationAggregate, DerivedAt: "the shards"}) {
		t.Fatalf("%+v", e)
	}
}

func TestPackagingLeavesShardNamesOut(t *testing.T) {
	s := blobs{}
	of := func(layers ...layer) identity.Digest {
		a, err := s.classify(t, s.manifest("", nil, layers...))
		if err != nil || a.State != api.ContentDirect {
			t.Fatalf("%+v, %v", a, err)
		}
		return a.Packaging
	}
	tokenizer := layer{config, "tokenizer.json", []byte("{}"), nil}
	a := of(
		layer{raw, "a.safetensors", tensors("1"), nil},
		tokenizer,
		layer{config, indexName, indexOf("a.safetensors"), nil},
	)
	b := of(
		tokenizer,
		layer{raw, "b.safetensors", tensors("1"), nil},
		layer{config, indexName, indexOf("b.safetensors"), nil},
	)
	c := of(layer{raw, "a.safetensors", tensors("1"), nil}, layer{config, "tokenizer.json", []byte("{ }"), nil})
	d := of(layer{raw, "a.safetensors", tensors("1"), nil}, layer{config, "tokeniser.json", []byte("{}"), nil})
	if a != b || a == c || a == d || c == d {
		t.Fatal(a, b, c, d)
	}
}

// Whoever packs a file of a base, or adds a layer without a name, makes another packaging, which says what it is.
func TestPackedPackagings(t *testing.T) {
	const name = "tokenizer.json"
	seen := map[identity.Digest]string{}
	with := func(mediaType, name string, notes map[string]string) (packaging identity.Digest, packed []string) {
		t.Helper()
		s := blobs{}
		a, err := s.classify(t, s.manifest("", nil, layer{raw, "a.safetensors", tensors("1"), nil},
			layer{mediaType, name, []byte("{}"), notes}))
		if err != nil || a.State != api.ContentDirect {
			t.Fatalf("%+v, %v", a, err)
		}
		return a.Packaging, a.Facts.Packed
	}
	plain, packed := with(config, name, nil)
	if len(packed) > 0 {
		t.Error(packed)
	}
	for _, mediaType := range []string{"application/json", raw, tarred, "application/octet-stream"} {
		if id, packed := with(mediaType, name, nil); id != plain || len(packed) > 0 {
			t.Errorf("%s: another packaging, %q", mediaType, packed)
		}
	}
	seen[plain] = "as it is"
	unpack := map[string]string{api.AnnotationOrasUnpack: "true", api.AnnotationFilepath: name}
	for _, c := range []struct {
		mediaType, name, packed string
		notes                   map[string]string
	}{
		{"application/vnd.x+zstd", name, name, nil}, {"application/json;+gzip", name, name, nil},
		{gzip, name, name, nil}, {tarred, "", name, unpack}, {config, "", "layers[1]", nil}, {tarred, "", "layers[1]", nil},
		{"application/vnd.kitops.modelkit.docs.v1.raw", name, name, nil},
	} {
		id, packed := with(c.mediaType, c.name, c.notes)
		if was := seen[id]; was != "" || len(packed) != 1 || packed[0] != c.packed {
			t.Errorf("%+v: %q, %v", c, was, packed)
		}
		seen[id] = c.mediaType
	}
	if _, packed := with("application/vnd.oci.empty.v1+json", "", nil); len(packed) > 0 {
		t.Error(packed)
	}
}

func TestUnreadableBlobIsNoVerdict(t *testing.T) {
	s := blobs{}
	body := s.manifest("", nil, layer{raw, "model.safetensors", tensors("1"), nil})
	delete(s, identity.Sum(tensors("1")))
	if _, err := s.classify(t, body); err == nil || errors.Is(err, api.ErrManifestInvalid) {
		t.Fatal(err)
	}
}

func TestParseIsStrict(t *testing.T) {
	s := blobs{}
	good := string(s.manifest("", nil, layer{raw, "a", []byte("x"), nil}))
	if _, err := Parse(imageType+"; charset=utf-8", []byte(good)); err != nil {
		t.Fatal(err)
	}
	if _, err := Parse("", []byte(good)); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"empty": "", "array": "[]", "duplicate": strings.Replace(good, `"schemaVersion":2`,
			`"schemaVersion":2,"schemaVersion":2`, 1),
		"duplicate deep": strings.Replace(good, `"size":2`, `"size":3,"size":2`, 1), "trailing": good + "{}",
		"version":       strings.Replace(good, `"schemaVersion":2`, `"schemaVersion":1`, 1),
		"no version":    strings.Replace(good, `,"schemaVersion":2`, ``, 1),
		"negative size": strings.Replace(good, `"size":2`, `"size":-2`, 1), "float size": strings.Replace(good,
			`"size":2`, `"size":2.0`, 1),
		"no size": strings.Replace(good, `,"size":2`, ``, 1), "sha512": strings.Replace(good, `"digest":"sha256:`,
			`"digest":"sha512:`, 1),
		"other case": strings.Replace(good, `"config"`, `"Config"`, 1), "both": strings.Replace(good, `"layers"`,
			`"manifests":[],"layers"`, 1),
		"media type": strings.Replace(good, imageType, "application/vnd.oci.image.index.v1+json", 1),
	} {
		if _, err := Parse(imageType, []byte(bad)); !errors.Is(err, api.ErrManifestInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Parse("text/html", []byte(strings.Replace(good, imageType, "text/html", 1))); err == nil {
		t.Error("a page was taken")
	}
	// A member in other letter case is another member, and must not stand in for the real one.
	m, err := Parse(imageType, []byte(strings.Replace(good, `"layers"`, `"Layers":[],"layers"`, 1)))
	if err != nil || len(m.Layers) != 1 {
		t.Error(m, err)
	}
}

// SE-04: four megabytes of nested arrays are refused, and take little memory.
func TestNestedManifest(t *testing.T) {
	bomb := []byte(`{"schemaVersion":2,"x":` + strings.Repeat("[", 2<<20) + strings.Repeat("]", 2<<20) + "}")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := Parse(imageType, bomb); !errors.Is(err, api.ErrManifestInvalid) {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > uint64(len(bomb)) {
		t.Errorf("%d bytes were allocated for one of %d", took, len(bomb))
	}
}

// filled is a manifest of nearly the largest size: between head and tail stands item, with its number, again and again.
func filled(head, tail string, item func(i int) string) []byte {
	var b strings.Builder
	b.WriteString(`{"schemaVersion":2,"config":{"mediaType":"a","digest":"` + someDigest + `","size":2},` + head)
	for i := 0; b.Len() < api.MaxManifestBytes-len(tail)-2000; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(item(i))
	}
	b.WriteString(tail)
	return []byte(b.String())
}

var someDigest = identity.Sum(nil).String()

// SE-04: a manifest that is made to take memory is refused, or takes it in proportion to its size.
func TestManifestBombs(t *testing.T) {
	layer := `{"mediaType":"a","size":1,"digest":"` + someDigest + `"`
	short := func(i int) string { return fmt.Sprintf(`"%x":""`, i) }
	many := func(n int) string {
		var names []string
		for i := range n {
			names = append(names, short(i))
		}
		return "{" + strings.Join(names, ",") + "}"
	}
	nine, more := many(9), many(17)
	noted := func(int) string { return layer + `,"annotations":` + more + `}` }
	for name, c := range map[string]struct {
		head, tail string
		item       func(int) string
		taken      bool
	}{
		"annotations":         {`"layers":[],"annotations":{`, `}}`, short, false},
		"of one layer":        {`"layers":[` + layer + `,"annotations":{`, `}}]}`, short, false},
		"of all layers":       {`"layers":[`, `]}`, noted, false},
		"unknown members":     {`"layers":[],"x":{`, `}}`, short, false},
		"of the manifest":     {`"layers":[],`, `}`, short, false},
		"objects":             {`"layers":[],"x":[`, `]}`, func(int) string { return nine }, false},
		"larger objects":      {`"layers":[],"x":[`, `]}`, func(int) string { return more }, false},
		"layers":              {`"layers":[`, `]}`, func(int) string { return layer + `}` }, true},
		"layers with a note":  {`"layers":[`, `]}`, func(int) string { return layer + `,"annotations":{"":""}}` }, true},
		"numbers":             {`"layers":[],"x":[`, `]}`, func(int) string { return "1" }, true},
		"one long annotation": {`"layers":[],"annotations":{"a":"`, `"}}`, func(int) string { return "aaaaaaaa" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			bomb := filled(c.head, c.tail, c.item)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := Parse(imageType, bomb)
			runtime.ReadMemStats(&after)
			if (err == nil) != c.taken || err != nil && !errors.Is(err, api.ErrManifestInvalid) {
				t.Error(err)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took > 32<<20 {
				t.Errorf("%d bytes were allocated for one of %d", took, len(bomb))
			}
			if _, err := ParseTaken(imageType, bomb); err != nil {
				t.Errorf("if it was taken before: %v", err)
			}
		})
	}
}

// The largest manifests that tools write, as far as they may be stored at all, are taken.
func TestDenseManifestsAreTaken(t *testing.T) {
	file := func(i int) string {
		return fmt.Sprintf(`{"mediaType":"application/vnd.cncf.model.weight.v1.raw","digest":%q,"size":4294967296,`+
			`"annotations":{"org.cncf.model.filepath":"m-%[2]d.safetensors",`+
			`"org.opencontainers.image.title":"m-%[2]d.safetensors",`+
			`"org.cncf.model.file.mediatype.untested":"true","org.cncf.model.file.metadata+json":"{\"name\":\"m-%[2]d\",`+
			`\"mode\":420,\"uid\":0,\"gid\":0,\"size\":4294967296,\"mtime\":\"2026-01-01T00:00:00Z\",\"typeflag\":48}"}}`,
			someDigest, i)
	}
	if _, err := Parse(imageType, filled(`"layers":[`, `]}`, file)); err != nil {
		t.Error("layers:", err)
	}
	child := func(int) string {
		return `{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"` + someDigest + `","size":1234,` +
			`"annotations":{"vnd.docker.reference.digest":"` + someDigest + `",` +
			`"vnd.docker.reference.type":"attestation-manifest"},` +
			`"platform":{"architecture":"amd64","os":"linux","os.version":"1","variant":"v2"}}`
	}
	list := filled(`"manifests":[`, `]}`, child)
	list = bytes.Replace(list, []byte(`"config":{"mediaType":"a","digest":"`+someDigest+`","size":2},`), nil, 1)
	if _, err := Parse("application/vnd.oci.image.index.v1+json", list); err != nil {
		t.Error("children:", err)
	}
}

func TestLargeManifestIsLinear(t *testing.T) {
	s := blobs{}
	var layers []layer
	for i := range identity.MaxShards {
		layers = append(layers, layer{raw, fmt.Sprintf("m-%04d.safetensors", i), tensors(fmt.Sprint(i)), nil})
	}
	body := s.manifest("", nil, layers...)
	a, err := s.classify(t, body)
	if err != nil || len(a.Shards.Shards) != identity.MaxShards {
		t.Fatal(len(a.Shards.Shards), err)
	}
}

func FuzzParse(f *testing.F) {
	s := blobs{}
	f.Add(
		s.manifest(api.ArtifactTypeBase, map[string]string{"a": "b"}, layer{raw, "model.safetensors", tensors("1"), nil}),
	)
	f.Add([]byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) > 1<<16 {
			return // longer than the fuzzer needs
		}
		m, err := Parse("", body)
		if err != nil {
			return
		}
		for _, d := range append(m.Blobs(), m.Children...) {
			if d.Size < 0 || d.Digest.IsZero() && !bytes.Contains(body, []byte(strings.Repeat("0", 64))) {
				t.Fatalf("%+v", d)
			}
		}
		if _, err := Classify(context.Background(), blobs{}, m); err != nil && !errors.Is(err, api.ErrManifestInvalid) &&
			!strings.Contains(err.Error(), "no such blob") {
			t.Fatal(err)
		}
	})
}
