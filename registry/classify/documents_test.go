package classify

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// oras is the type that oras gives a file without one.
const oras = "application/vnd.oci.image.layer.v1.tar"

func baseOf(t testing.TB, seed byte) *identity.Manifest {
	t.Helper()
	m, err := identity.New([]identity.Shard{{Filename: "model.safetensors", Size: 11,
		Digest: identity.Sum([]byte{seed})}})
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

// layersOf makes a layer of every file in dir, named by its path.
func layersOf(t testing.TB, dir, mediaType string) (layers []layer) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		layers = append(layers, layer{mediaType, filepath.ToSlash(name), b, nil})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return layers
}

func adapterOf(t testing.TB, base *identity.Manifest) []layer {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, base); err != nil {
		t.Fatal(err)
	}
	return layersOf(t, dir, oras)
}

func checkpointOf(t testing.TB, base *identity.Manifest, bare bool) []layer {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a.kiln-checkpoint")
	if err := testartifact.Checkpoint(dir, 1, base, bare); err != nil {
		t.Fatal(err)
	}
	return layersOf(t, dir, oras)
}

func peftOf(t testing.TB) []layer {
	t.Helper()
	dir := t.TempDir()
	if err := testartifact.PEFT(dir, 1); err != nil {
		t.Fatal(err)
	}
	return layersOf(t, dir, oras)
}

func doc(name string, b []byte) []layer { return []layer{{"application/json", name, b, nil}} }

func bind(t testing.TB, to identity.Digest, base identity.Aggregate) []byte {
	t.Helper()
	b, err := documents.Statement{Bind: &documents.Bind{Artifact: to, Aggregate: base}, Reason: "seen", By: "ana",
		At: "2026-01-02T03:04:05Z"}.Document()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What artifacts say is read from their documents, whatever the tool that pushed them calls the layers.
func TestDocuments(t *testing.T) {
	base := baseOf(t, 1)
	agg := base.Aggregate
	claim := map[string]string{api.AnnotationAggregate: agg.String()}
	target := identity.Sum([]byte("target"))
	rows := slices.Concat(testartifact.Row("1", base), testartifact.Row("2", base))
	deeper := func(layers []layer) []layer {
		const was = "state/loop.json"
		path := strings.Repeat("state/", 165) + was
		out := edited(t, layers, "checkpoint_manifest.json", was, path)
		out[slices.IndexFunc(out, func(l layer) bool { return l.name == was })].name = path
		return out
	}
	for name, c := range map[string]struct {
		artifactType string
		notes        map[string]string
		layers       []layer
		kind         api.Kind
		evidence     api.Evidence
		legacy       bool
		source, name string
	}{
		"adapter": {layers: adapterOf(t, base), kind: "adapter", evidence: "document",
			source: "adapter_manifest.json $.base_weight_shard_manifest", name: "sql"},
		"adapter and annotation": {layers: adapterOf(t, base), notes: claim, kind: "adapter", evidence: "document",
			source: "adapter_manifest.json $.base_weight_shard_manifest", name: "sql"},
		"legacy adapter": {layers: adapterOf(t, nil), kind: "adapter", evidence: "none", legacy: true, name: "sql"},
		"legacy adapter, annotated": {layers: adapterOf(t, nil), notes: claim, kind: "adapter", evidence: "asserted",
			legacy: true, source: "annotation dev.kiln.base-model-content.v1", name: "sql"},
		"PEFT": {layers: peftOf(t), kind: "adapter", evidence: "none"},
		"PEFT, annotated": {layers: peftOf(t), notes: claim, kind: "adapter", evidence: "asserted",
			source: "annotation dev.kiln.base-model-content.v1"},
		"checkpoint": {layers: checkpointOf(t, base, false), kind: "checkpoint", evidence: "document",
			source: "checkpoint_manifest.json $.auxiliary_state.base_weight_shard_manifest", name: "demo"},
		"checkpoint of long paths": {layers: deeper(checkpointOf(t, base, false)), kind: "checkpoint", evidence: "document",
			source: "checkpoint_manifest.json $.auxiliary_state.base_weight_shard_manifest", name: "demo"},
		"bare checkpoint": {layers: checkpointOf(t, base, true), kind: "checkpoint", evidence: "aggregate-only",
			legacy: true, source: "checkpoint_manifest.json $.auxiliary_state.base_model_weights_sha256", name: "demo"},
		"bare checkpoint, annotated": {layers: checkpointOf(t, base, true), notes: claim, kind: "checkpoint",
			evidence: "asserted", legacy: true, source: "annotation dev.kiln.base-model-content.v1", name: "demo"},
		"receipt": {layers: doc("train_receipt.json", testartifact.Receipt("demo", target, base)), kind: "receipt",
			evidence: "document", source: "train_receipt.json $.model.base_weight_shard_manifest", name: "demo"},
		"eval": {artifactType: api.ArtifactTypeEval, layers: doc("e1.json", testartifact.Eval("e1", "demo", base)),
			kind: "eval", evidence: "document", source: "e1.json $.base_weight_shard_manifest", name: "e1"},
		"legacy eval": {notes: map[string]string{api.AnnotationKind: "eval"},
			layers: doc("e1.json", testartifact.Eval("e1", "demo", nil)), kind: "eval", evidence: "none", legacy: true,
			name: "e1"},
		"eval that nobody calls one": {layers: doc("e1.json", testartifact.Eval("e1", "demo", base)), evidence: "none"},
		"no kind, annotated": {artifactType: "application/vnd.dev.cosign.artifact.sig.v1+json", notes: claim,
			layers: doc("sig.json", []byte("{}")), evidence: "none"},
		"rows": {artifactType: api.ArtifactTypeEval, layers: doc("e1.jsonl", rows), kind: "eval", evidence: "document",
			source: "e1.jsonl line 1 $.base_weight_shard_manifest", name: "e1"},
		"rows, one of no base": {artifactType: api.ArtifactTypeEval,
			layers: doc("e1.jsonl", slices.Concat(rows, testartifact.Row("3", nil))), kind: "eval", evidence: "aggregate-only",
			source: "e1.jsonl line 1 $.base_weight_shard_manifest", name: "e1", legacy: true},
		"bind": {artifactType: api.ArtifactTypeStatement, layers: doc("statement.json", bind(t, target, agg)),
			kind: "statement", evidence: "asserted", source: "statement.json $.bind.base_aggregate_sha256"},
	} {
		t.Run(name, func(t *testing.T) {
			s := blobs{}
			body := s.manifest(c.artifactType, c.notes, c.layers...)
			a, err := s.classify(t, body)
			if err != nil {
				t.Fatal(err)
			}
			want := identity.Aggregate{}
			if c.evidence != "none" {
				want = agg
			}
			if a.Kind != c.kind || a.Evidence != c.evidence || a.Base != want || a.Facts.Legacy != c.legacy ||
				a.Facts.Source != c.source || a.Facts.Name != c.name || c.evidence == "aggregate-only" &&
				a.Facts.Eval != nil && a.Facts.Eval.Unbound != 1 {
				t.Errorf("%+v", a)
			}
			m, err := Parse(imageType, body)
			if err != nil {
				t.Fatal(err)
			}
			f := Finding{Artifact: a, Rules: Rules}
			f.Claim = identity.Aggregate{}
			kept, err := f.Encode(m)
			back, perr := ParseFinding(m, kept)
			if err != nil || perr != nil || !reflect.DeepEqual(back, f) {
				t.Errorf("kept as %s: %+v, %v, %v", kept, back, err, perr)
			}
		})
	}
}

// edited returns the layers with a text replaced in one of the files.
func edited(t testing.TB, layers []layer, name, old, with string) []layer {
	t.Helper()
	out := slices.Clone(layers)
	for i, l := range out {
		if l.name == name {
			if !bytes.Contains(l.body, []byte(old)) {
				t.Fatalf("%s has no %s", name, old)
			}
			out[i].body = bytes.ReplaceAll(l.body, []byte(old), []byte(with))
		}
	}
	return out
}

// without returns the layers but for one.
func without(layers []layer, name string) []layer {
	return slices.DeleteFunc(slices.Clone(layers), func(l layer) bool { return l.name == name })
}

// A manifest of which two places disagree is refused, with both values and where they stand; so is a document that
// breaks a rule of its format. AD-22, AD-23.
func TestDisagreements(t *testing.T) {
	base, other := baseOf(t, 1), baseOf(t, 2)
	adapter, checkpoint := adapterOf(t, base), checkpointOf(t, base, false)
	claim := map[string]string{api.AnnotationAggregate: other.Aggregate.String()}
	weights, swapped := testartifact.Weights(1), testartifact.Weights(9)
	sum := func(b []byte) string { return identity.Sum(b).String() }
	a, b := base.Aggregate.String(), other.Aggregate.String()
	text := func(m *identity.Manifest) string {
		b, err := m.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	receipt := func(layers []layer) []byte {
		return layers[slices.IndexFunc(layers, func(l layer) bool { return l.name == "train_receipt.json" })].body
	}
	otherReceipt := testartifact.Receipt("sql", identity.Sum(weights), other)
	mixed := edited(t, adapter, "train_receipt.json", string(receipt(adapter)), string(otherReceipt))
	mixed = edited(t, mixed, "adapter_manifest.json", sum(receipt(adapter)), sum(otherReceipt))
	foreign := testartifact.Receipt("sql", identity.Sum(swapped), base)
	output := edited(t, adapter, "train_receipt.json", string(receipt(adapter)), string(foreign))
	output = edited(t, output, "adapter_manifest.json", sum(receipt(adapter)), sum(foreign))
	named := edited(t, adapter, "adapter_manifest.json", `"train_receipt.json"`, `"other.json"`)
	for i, l := range named {
		if l.name == "train_receipt.json" {
			named[i].name = "other.json"
		}
	}
	named = slices.Clip(named)
	renamed := func(layers []layer, from, to string, body []byte) []layer { // and something else under the usual name
		out := edited(t, layers, "adapter_manifest.json", `"`+from+`"`, `"`+to+`"`)
		i := slices.IndexFunc(out, func(l layer) bool { return l.name == from })
		other := out[i]
		out[i].name, other.body = to, body
		return append(out, other)
	}
	packed := func(layers []layer, name, mediaType string) []layer {
		out := slices.Clone(layers)
		out[slices.IndexFunc(out, func(l layer) bool { return l.name == name })].mediaType = mediaType
		return out
	}
	const ofBase, ofFile, ofDocument = api.CodeAggregateConflict, api.CodeDocumentConflict, api.CodeDocumentInvalid
	for name, c := range map[string]struct {
		artifactType string
		notes        map[string]string
		layers       []layer
		detail       any
	}{
		"annotation": {notes: claim, layers: adapter, detail: api.Conflict{Reason: ofBase, Claimed: b, Derived: a,
			ClaimedAt: "annotation dev.kiln.base-model-content.v1",
			DerivedAt: "adapter_manifest.json $.base_weight_shard_manifest"}},
		"receipt of another base": {layers: mixed, detail: api.Conflict{Reason: ofBase, Claimed: b, Derived: a,
			ClaimedAt: "train_receipt.json $.model.base_weight_shard_manifest",
			DerivedAt: "adapter_manifest.json $.base_weight_shard_manifest"}},
		"receipt of other weights": {layers: output, detail: api.Conflict{Reason: ofFile, Claimed: sum(weights),
			Derived: sum(swapped), ClaimedAt: "adapter_manifest.json $.safetensors_hash",
			DerivedAt: "train receipt $.adapters.output.adapter_model_sha256"}},
		"weights replaced": {layers: edited(t, adapter, "adapter_model.safetensors", string(weights), string(swapped)),
			detail: api.Conflict{Reason: ofFile, Claimed: sum(weights), Derived: sum(swapped),
				ClaimedAt: "adapter_manifest.json $.safetensors_hash", DerivedAt: "adapter_model.safetensors"}},
		"receipt edited": {layers: edited(t, adapter, "train_receipt.json", "0.4.1", "0.4.2"),
			detail: api.Conflict{Reason: ofFile, Claimed: sum(receipt(adapter)),
				Derived:   sum(bytes.ReplaceAll(receipt(adapter), []byte("0.4.1"), []byte("0.4.2"))),
				ClaimedAt: "adapter_manifest.json $.receipt_hash", DerivedAt: "train_receipt.json"}},
		"weights missing": {layers: without(adapter, "adapter_model.safetensors"), detail: api.BadDocument{
			Reason: ofDocument, File: "adapter_manifest.json", Path: "$.files", Rule: "file-missing"}},
		"weights that loaders read": {layers: renamed(adapter, "adapter_model.safetensors", "x.safetensors", swapped),
			detail: api.BadDocument{Reason: ofDocument, File: "adapter_manifest.json", Path: "$.files.adapter_model",
				Rule: "file-extra"}},
		"config that loaders read": {layers: renamed(adapter, "adapter_config.json", "x.json", []byte(`{"r":64}`)),
			detail: api.BadDocument{Reason: ofDocument, File: "adapter_manifest.json", Path: "$.files.adapter_config",
				Rule: "file-extra"}},
		"manifest encrypted": {layers: packed(adapter, "adapter_manifest.json", "application/x.encrypted+encrypted"),
			detail: api.BadDocument{Reason: ofDocument, File: "adapter_manifest.json", Rule: "file-kind"}},
		"config in an archive": {layers: packed(peftOf(t), "adapter_config.json", gzip),
			detail: api.BadDocument{Reason: ofDocument, File: "adapter_config.json", Rule: "file-kind"}},
		"receipt compressed": {layers: packed(doc("train_receipt.json", foreign), "train_receipt.json",
			"application/json+zstd"), detail: api.BadDocument{Reason: ofDocument, File: "train_receipt.json",
			Rule: "file-kind"}},
		"checkpoint manifest elsewhere": {layers: packed(checkpoint, "checkpoint_manifest.json",
			"application/vnd.oci.image.layer.nondistributable.v1.tar"), detail: api.BadDocument{Reason: ofDocument,
			File: "checkpoint_manifest.json", Rule: "file-kind"}},
		"config no JSON": {layers: append(without(peftOf(t), "adapter_config.json"),
			layer{oras, "adapter_config.json", []byte("{'r': 8,}"), nil}), detail: api.BadDocument{Reason: ofDocument,
			File: "adapter_config.json", Path: "$", Rule: "json-syntax"}},
		"PEFT receipt of other weights": {layers: append(peftOf(t), layer{oras, "train_receipt.json", foreign, nil}),
			detail: api.Conflict{Reason: ofFile, Claimed: sum(swapped), Derived: sum(weights),
				ClaimedAt: "train_receipt.json $.adapters.output.adapter_model_sha256",
				DerivedAt: "adapter_model.safetensors"}},
		"a second receipt": {layers: append(named, layer{oras, "train_receipt.json", otherReceipt, nil}),
			detail: api.Conflict{Reason: ofBase, Claimed: b, Derived: a,
				ClaimedAt: "train_receipt.json $.model.base_weight_shard_manifest",
				DerivedAt: "adapter_manifest.json $.base_weight_shard_manifest"}},
		"a second receipt of other weights": {layers: append(named, layer{oras, "train_receipt.json", foreign, nil}),
			detail: api.Conflict{Reason: ofFile, Claimed: sum(swapped), Derived: sum(weights),
				ClaimedAt: "train_receipt.json $.adapters.output.adapter_model_sha256",
				DerivedAt: "adapter_manifest.json $.safetensors_hash"}},
		"a second receipt that is none": {layers: append(named, layer{oras, "train_receipt.json", []byte("{}"), nil}),
			detail: api.BadDocument{Reason: ofDocument, File: "train_receipt.json", Path: "$", Rule: "required"}},
		"receipt with an adapter manifest": {artifactType: api.ArtifactTypeReceipt, layers: append(
			doc("train_receipt.json", otherReceipt), slices.DeleteFunc(slices.Clone(adapter), func(l layer) bool {
				return l.name != "adapter_manifest.json"
			})...), detail: api.BadDocument{Reason: ofDocument, Rule: "file-extra"}},
		"adapter with a checkpoint manifest": {artifactType: api.ArtifactTypeAdapter, layers: append(
			without(adapterOf(t, other), ""), slices.DeleteFunc(slices.Clone(checkpoint), func(l layer) bool {
				return l.name != "checkpoint_manifest.json"
			})...), detail: api.Conflict{Reason: ofBase, Claimed: a, Derived: b,
			ClaimedAt: "checkpoint_manifest.json $.auxiliary_state.base_weight_shard_manifest",
			DerivedAt: "adapter_manifest.json $.base_weight_shard_manifest"}},
		"checkpoint string": {layers: edited(t, checkpoint, "checkpoint_manifest.json",
			`"base_model_weights_sha256":"`+a, `"base_model_weights_sha256":"`+b), detail: api.Conflict{Reason: ofBase,
			Claimed: b, Derived: a, ClaimedAt: "checkpoint_manifest.json $.auxiliary_state.base_model_weights_sha256",
			DerivedAt: "checkpoint manifest $.auxiliary_state.base_weight_shard_manifest.aggregate_sha256"}},
		"checkpoint file": {layers: edited(t, checkpoint, "state/loop.json", "[1.0]", "[2.0]"), detail: api.Conflict{
			Reason: ofFile, Claimed: sum([]byte("[1.0]")), Derived: sum([]byte("[2.0]")),
			ClaimedAt: `checkpoint_manifest.json $.files["state/loop.json"].sha256`, DerivedAt: "state/loop.json"}},
		"checkpoint file longer": {layers: edited(t, checkpoint, "state/loop.json", "[1.0]", "[1.00]"),
			detail: api.Conflict{Reason: ofFile, Claimed: "5", Derived: "6",
				ClaimedAt: `checkpoint_manifest.json $.files["state/loop.json"].size_bytes`, DerivedAt: "state/loop.json"}},
		"checkpoint file missing": {layers: without(checkpoint, "rng.bin"), detail: api.BadDocument{Reason: ofDocument,
			File: "checkpoint_manifest.json", Path: "$.files", Rule: "file-missing"}},
		"checkpoint with more": {layers: append(slices.Clone(checkpoint), layer{oras, "README.md", nil, nil}),
			detail: api.BadDocument{Reason: ofDocument, File: "checkpoint_manifest.json", Path: "$.files",
				Rule: "file-extra"}},
		"checkpoint manifest of another base": {artifactType: api.ArtifactTypeCheckpoint,
			layers: edited(t, checkpoint, "checkpoint_manifest.json", text(base), text(other)), detail: api.Conflict{
				Reason: ofBase, Claimed: a, Derived: b,
				ClaimedAt: "checkpoint_manifest.json $.auxiliary_state.base_model_weights_sha256",
				DerivedAt: "checkpoint manifest $.auxiliary_state.base_weight_shard_manifest.aggregate_sha256"}},
		"checkpoint of no manifest": {artifactType: api.ArtifactTypeCheckpoint, layers: peftOf(t),
			detail: api.BadDocument{Reason: ofDocument, File: "checkpoint_manifest.json", Rule: "file-missing"}},
		"receipt of no document": {artifactType: api.ArtifactTypeReceipt, detail: api.BadDocument{Reason: ofDocument,
			File: "train_receipt.json", Rule: "file-missing"}},
		"eval of no document": {artifactType: api.ArtifactTypeEval, detail: api.BadDocument{Reason: ofDocument,
			Rule: "file-missing"}},
		"two evals": {artifactType: api.ArtifactTypeEval, layers: append(doc("a.json", testartifact.Eval("a", "", base)),
			doc("b.json", testartifact.Eval("b", "", base))...), detail: api.BadDocument{Reason: ofDocument,
			Rule: "file-extra"}},
		"eval of version 1": {artifactType: api.ArtifactTypeEval, layers: doc("a.json", bytes.Replace(
			testartifact.Eval("a", "", base), []byte(`"schema_version":2`), []byte(`"schema_version":1`), 1)),
			detail: api.BadDocument{Reason: ofDocument, File: "a.json", Path: "$.schema_version", Rule: "schema-version"}},
		"rows of another base": {artifactType: api.ArtifactTypeEval, notes: claim,
			layers: doc("a.jsonl", testartifact.Row("1", base)), detail: api.Conflict{Reason: ofBase,
				Claimed: b, Derived: a, ClaimedAt: "annotation dev.kiln.base-model-content.v1",
				DerivedAt: "a.jsonl line 1 $.base_weight_shard_manifest"}},
		"bind and annotation": {artifactType: api.ArtifactTypeStatement, notes: claim,
			layers: doc("s.json", bind(t, identity.Sum(weights), base.Aggregate)), detail: api.Conflict{Reason: ofBase,
				Claimed: b, Derived: a, ClaimedAt: "annotation dev.kiln.base-model-content.v1",
				DerivedAt: "s.json $.bind.base_aggregate_sha256"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := blobs{}
			got, err := s.classify(t, s.manifest(c.artifactType, c.notes, c.layers...))
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.CodeManifestInvalid || e.Detail != c.detail {
				t.Fatalf("%+v, %v, detail %+v\nwant %+v", got, err, detailOf(e), c.detail)
			}
			if d, ok := c.detail.(api.Conflict); ok {
				for _, part := range []string{d.Claimed, d.ClaimedAt, d.Derived, d.DerivedAt} {
					if !strings.Contains(e.Message, part) {
						t.Errorf("%q does not say %q", e.Message, part)
					}
				}
			}
		})
	}
}

func detailOf(e *api.Error) any {
	if e == nil {
		return nil
	}
	return e.Detail
}

// The base of the subject is one more claim.
func TestFromSubject(t *testing.T) {
	base, other := baseOf(t, 1).Aggregate, baseOf(t, 2).Aggregate
	subject := identity.Sum([]byte("subject"))
	of := func(kind api.Kind, e api.Evidence, a identity.Aggregate) Finding {
		return Finding{Artifact: Artifact{Kind: kind, Evidence: e, Base: a}}
	}
	for name, c := range map[string]struct {
		f        Finding
		evidence api.Evidence
		base     identity.Aggregate
		refused  bool
	}{
		"unbound":        {f: of("adapter", "none", identity.Aggregate{}), evidence: "asserted", base: base},
		"document":       {f: of("adapter", "document", base), evidence: "document", base: base},
		"aggregate only": {f: of("checkpoint", "aggregate-only", base), evidence: "asserted", base: base},
		"another":        {f: of("adapter", "document", other), refused: true},
		"annotation":     {f: of("adapter", "asserted", other), refused: true},
		"no kind":        {f: of("", "none", identity.Aggregate{}), evidence: "none"},
		"base":           {f: of("base", "none", other), evidence: "none", base: other},
		"statement":      {f: of("statement", "none", identity.Aggregate{}), evidence: "none"},
	} {
		err := c.f.From(subject, base)
		var e *api.Error
		switch {
		case c.refused && (!errors.As(err, &e) || e.Reason() != api.CodeAggregateConflict):
			t.Errorf("%s: %v", name, err)
		case !c.refused && (err != nil || c.f.Evidence != c.evidence || c.f.Base != c.base):
			t.Errorf("%s: %+v, %v", name, c.f, err)
		}
	}
}

// What documents say is kept within bounds, and every link once.
func TestFactsAreBounded(t *testing.T) {
	e := &api.EvalFacts{}
	for i := range maxRuns {
		e.Runs = append(e.Runs, api.EvalRun{Suite: strings.Repeat("<", 255), Adapter: fmt.Sprint(strings.Repeat("&", 250), i)})
		e.Adapters = append(e.Adapters, e.Runs[i].Adapter)
	}
	f := bounded(api.Facts{Name: strings.Repeat("<", 255), Eval: e})
	b, err := json.Marshal(f)
	if err != nil || len(b) > MaxFacts || len(f.Eval.Runs)+f.Eval.Omitted != maxRuns || len(f.Eval.Adapters) == 0 ||
		len(e.Runs) != maxRuns {
		t.Errorf("%d bytes, %d runs, %d omitted, %v", len(b), len(f.Eval.Runs), f.Eval.Omitted, err)
	}
	if links := Links(api.KindEval, api.Facts{Eval: e}); len(links) != maxRuns {
		t.Errorf("%d links", len(links))
	}
	if got := label("a\x00b\u202e" + strings.Repeat("é", 200)); len(got) > maxLabel || strings.Contains(got, "\x00") ||
		!strings.HasPrefix(got, "a\ufffdb\ufffdé") {
		t.Errorf("%q", got)
	}
}

func TestLinks(t *testing.T) {
	w, c, a0 := identity.Sum([]byte("w")), identity.Sum([]byte("c")), identity.Sum([]byte("r"))
	a, b := baseOf(t, 1).Aggregate, baseOf(t, 2).Aggregate
	for name, x := range map[string]struct {
		kind api.Kind
		f    api.Facts
		want []Link
	}{
		"adapter": {"adapter", api.Facts{Adapter: &api.AdapterFacts{Receipt: c, Parent: "/adapters/first"}},
			[]Link{{Relation: "receipt", Digest: c}, {Relation: "parent_adapter", Name: "first"}}},
		"adapter with receipt": {"adapter", api.Facts{Adapter: &api.AdapterFacts{Receipt: c, Parent: "first"},
			Receipt: &api.ReceiptFacts{Start: w, Output: c}},
			[]Link{{Relation: "receipt", Digest: c}, {Relation: "parent_adapter", Digest: w}}},
		"adapter of known weights": {"adapter", api.Facts{Adapter: &api.AdapterFacts{Weights: w}},
			[]Link{{Relation: "content", Digest: w}}},
		"receipt": {"receipt", api.Facts{Receipt: &api.ReceiptFacts{Digest: a0, Start: w, Output: c}},
			[]Link{{Relation: "parent_adapter", Digest: w}, {Relation: "content", Digest: a0},
				{Relation: "output", Digest: c}}},
		"checkpoint": {"checkpoint", api.Facts{Name: "demo", Checkpoint: &api.CheckpointFacts{Weights: w}},
			[]Link{{Relation: "adapter", Digest: w}, {Relation: "adapter", Name: "demo"}}},
		"eval": {"eval", api.Facts{Eval: &api.EvalFacts{Adapters: []string{"", "x", "y"}, Runs: []api.EvalRun{
			{}, {Adapter: "x", AdapterContent: w.String()}, {Adapter: "x", AdapterContent: w.String()}}}},
			[]Link{{Relation: "adapter", Digest: w, Name: "x"}, {Relation: "adapter", Name: "y"}}},
		"merge": {"statement", api.Facts{Statement: &api.StatementFacts{To: a, From: []identity.Aggregate{b},
			FromArtifacts: []identity.Digest{w}}}, []Link{{Relation: "statement", Aggregate: a},
			{Relation: "derived_from", Aggregate: b}, {Relation: "derived_from", Digest: w}}},
	} {
		if got := Links(x.kind, x.f); !reflect.DeepEqual(got, x.want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A document that the store has damaged is no reason to refuse anything, and never believed.
func TestDamagedDocument(t *testing.T) {
	layers := adapterOf(t, baseOf(t, 1))
	for _, damage := range []func(b []byte) []byte{
		func(b []byte) []byte { return b[:len(b)-1] },
		func(b []byte) []byte { return append([]byte{'['}, b[1:]...) },
	} {
		s := blobs{}
		body := s.manifest("", nil, layers...)
		for _, l := range layers {
			if l.name == documents.AdapterManifestFile {
				at := s[identity.Sum(l.body)]
				at.b = damage(at.b)
			}
		}
		if _, err := s.classify(t, body); !errors.Is(err, ErrDamaged) || errors.Is(err, api.ErrManifestInvalid) {
			t.Error(err)
		}
	}
}

// Whatever a document holds, it is refused or kept within bounds, and reads back as it was found.
func FuzzDocuments(f *testing.F) {
	base := baseOf(f, 1)
	seeds := map[string][]byte{"train_receipt.json": testartifact.Receipt("demo", identity.Sum(nil), base)}
	for _, l := range append(adapterOf(f, base), checkpointOf(f, base, true)...) {
		seeds[l.name] = l.body
	}
	for name, b := range seeds {
		f.Add(name, "", b)
	}
	f.Add("e.json", "eval", testartifact.Eval("e", "demo", base))
	f.Add("e.jsonl", "eval", testartifact.Row("1", base))
	f.Add("s.json", "statement", bind(f, identity.Sum(nil), base.Aggregate))
	f.Fuzz(func(t *testing.T, name, kind string, text []byte) {
		s := blobs{}
		var notes map[string]string
		if kind != "" {
			notes = map[string]string{api.AnnotationKind: kind}
		}
		m, err := Parse(imageType, s.manifest("", notes, layer{raw, name, text, nil}))
		if err != nil {
			return
		}
		a, err := Classify(t.Context(), s, m)
		if err != nil {
			if !errors.Is(err, api.ErrManifestInvalid) {
				t.Fatal(err)
			}
			return
		}
		found := Finding{Artifact: a, Rules: Rules}
		found.Claim = identity.Aggregate{}
		kept, err := found.Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParseFinding(m, kept)
		if err != nil || !reflect.DeepEqual(back, found) {
			t.Fatalf("%s: %+v, want %+v, %v", kept, back, found, err)
		}
		if b, err := json.Marshal(a.Facts); err != nil || len(b) > MaxFacts || len(a.Facts.Name) > maxLabel ||
			len(Links(a.Kind, a.Facts)) > maxLinks {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
	})
}

func BenchmarkClassifyAdapter(b *testing.B) {
	for _, shards := range []int{1, 64, identity.MaxShards} {
		b.Run(fmt.Sprintf("shards=%d", shards), func(b *testing.B) {
			var all []identity.Shard
			for i := range shards {
				all = append(all, identity.Shard{Filename: fmt.Sprintf("model-%05d.safetensors", i), Size: 11,
					Digest: identity.Sum([]byte(fmt.Sprint(i)))})
			}
			base, err := identity.New(all)
			if err != nil {
				b.Fatal(err)
			}
			s := blobs{}
			m, err := Parse(imageType, s.manifest(api.ArtifactTypeAdapter, nil, adapterOf(b, &base)...))
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := Classify(b.Context(), s, m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Rows of several bases are an eval of each, by the same evidence. What claims one of them agrees, and changes nothing.
func TestRowsOfTwoBases(t *testing.T) {
	one, two, third := baseOf(t, 1), baseOf(t, 2), baseOf(t, 3)
	rows := slices.Concat(testartifact.Row("1", one), testartifact.Row("2", two), testartifact.Row("3", one))
	for _, evidence := range []api.Evidence{api.EvidenceDocument, api.EvidenceAggregateOnly} {
		s := blobs{}
		classify := func(claimed identity.Aggregate) (Artifact, error) {
			notes := map[string]string{}
			if !claimed.IsZero() {
				notes[api.AnnotationAggregate] = claimed.String()
			}
			return s.classify(t, s.manifest(api.ArtifactTypeEval, notes, doc("e.jsonl", rows)...))
		}
		want := []api.EvalBase{{Aggregate: one.Aggregate, Rows: 2, Line: 1}, {Aggregate: two.Aggregate, Rows: 1, Line: 2}}
		for _, claimed := range []identity.Aggregate{{}, one.Aggregate, two.Aggregate} {
			a, err := classify(claimed)
			if err != nil || a.Base != one.Aggregate || !slices.Equal(a.Bases(), []identity.Aggregate{two.Aggregate}) ||
				a.Evidence != evidence || !reflect.DeepEqual(a.Facts.Eval.Bases, want) {
				t.Fatalf("%+v, %+v, %v", a, a.Facts.Eval, err)
			}
			f := Finding{Artifact: a}
			for _, base := range []identity.Aggregate{one.Aggregate, two.Aggregate} {
				if err := f.From(identity.Sum(nil), base); err != nil || !reflect.DeepEqual(f.Artifact, a) {
					t.Errorf("%+v, %v", f, err)
				}
			}
			if err := f.From(identity.Sum(nil), third.Aggregate); !errors.Is(err, api.ErrManifestInvalid) {
				t.Errorf("a subject of a third base: %v", err)
			}
		}
		if _, err := classify(third.Aggregate); !errors.Is(err, api.ErrManifestInvalid) {
			t.Errorf("an annotation of a third base: %v", err)
		}
		rows = append(rows, testartifact.Row("4", nil)...)
	}
}
