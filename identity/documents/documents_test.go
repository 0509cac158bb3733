package documents

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// The aggregate of the examples' base.
const exampleBase = "sha256:c62f9f56234c61c943716ae3b8783c851fb41a2551e31f17d15f1b0c346339b5"

// parsers reads each example with its reader.
var parsers = map[string]func([]byte) (any, error){
	"adapter_manifest.json":    func(b []byte) (any, error) { return ParseAdapterManifest(b) },
	"train_receipt.json":       func(b []byte) (any, error) { return ParseReceipt(b) },
	"checkpoint_manifest.json": func(b []byte) (any, error) { return ParseCheckpoint(b) },
	"provenance.json":          func(b []byte) (any, error) { return ParseProvenance(b) },
	"eval_job.json":            func(b []byte) (any, error) { return ParseEval(b) },
	"eval_result.json":         func(b []byte) (any, error) { return ParseEval(b) },
	"adapter_config.json":      func(b []byte) (any, error) { return ParseAdapterConfig(b) },
	"bind.json":                func(b []byte) (any, error) { return ParseStatement(b) },
	"derived_from.json":        func(b []byte) (any, error) { return ParseStatement(b) },
}

func example(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// edit replaces the one place where old stands.
func edit(t testing.TB, data []byte, old, new string) []byte {
	t.Helper()
	if n := bytes.Count(data, []byte(old)); n != 1 {
		t.Fatalf("%q stands %d times in %s", old, n, data)
	}
	return bytes.Replace(data, []byte(old), []byte(new), 1)
}

func aggregate(t testing.TB, s string) identity.Aggregate {
	t.Helper()
	a, err := identity.ParseAggregate(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func digest(t testing.TB, s string) identity.Digest { return identity.Digest(aggregate(t, s)) }

// manifestOf is the manifest of one shard.
func manifestOf(t testing.TB, name string, fill byte) identity.Manifest {
	t.Helper()
	m, err := identity.New([]identity.Shard{{Filename: name, Size: 11, Digest: [32]byte(bytes.Repeat([]byte{fill}, 32))}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// checkRefusal checks that err is an *Error that says what it must, on one line.
func checkRefusal(t *testing.T, err error, rule, path, says string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("got %v, want rule %s", err, rule)
		return
	}
	text := e.Error()
	if e.Rule != rule || path != "" && e.Path != path || !strings.Contains(text, says) {
		t.Errorf("got %q, want rule %s at %s saying %q", text, rule, path, says)
	}
	if e.Kind == "" || e.Msg == "" || e.Hint() == "" || strings.ContainsAny(text, "\n\r\x00\u2028") ||
		!strings.HasPrefix(text, string(e.Kind)+": ") || !strings.HasSuffix(text, "("+e.Rule+")") {
		t.Errorf("bad text %q", text)
	}
}

// refused is a document that a reader refuses.
type refused struct {
	doc, old, new    string
	rule, path, says string
}

func checkRefusals(t *testing.T, cases []refused) {
	t.Helper()
	for _, c := range cases {
		_, err := parsers[c.doc](edit(t, example(t, c.doc), c.old, c.new))
		if err == nil {
			t.Errorf("%s with %q was taken", c.doc, c.new)
			continue
		}
		checkRefusal(t, err, c.rule, c.path, c.says)
	}
}

// taken is a document that a reader takes.
type taken struct{ doc, old, new string }

func checkTaken(t *testing.T, cases []taken) {
	t.Helper()
	for _, c := range cases {
		if _, err := parsers[c.doc](edit(t, example(t, c.doc), c.old, c.new)); err != nil {
			t.Errorf("%s with %q: %v", c.doc, c.new, err)
		}
	}
}

// TestBaseOfExamples checks the binding that each example gives.
func TestBaseOfExamples(t *testing.T) {
	for doc, path := range map[string]string{
		"adapter_manifest.json":    "$.base_weight_shard_manifest",
		"train_receipt.json":       "$.model.base_weight_shard_manifest",
		"checkpoint_manifest.json": "$.auxiliary_state.base_weight_shard_manifest",
		"eval_job.json":            "$.base_weight_shard_manifest",
		"eval_result.json":         "$.base_weight_shard_manifest",
	} {
		data := example(t, doc)
		got, err := parsers[doc](data)
		if err != nil {
			t.Errorf("%s: %v", doc, err)
			continue
		}
		b := got.(interface{ Base() Binding }).Base()
		if b.Evidence != EvidenceDocument || b.Aggregate.String() != exampleBase || b.Path != path ||
			len(b.Manifest.Shards) != 1 || b.Manifest.Shards[0].Filename != "model.safetensors" {
			t.Errorf("%s: %+v", doc, b)
		}
		for _, without := range []string{"null", ""} {
			old := `"base_weight_shard_manifest":` + string(example(t, "base.json"))
			new := `"base_weight_shard_manifest":null`
			if without == "" {
				new = `"x_unknown":0`
			}
			got, err := parsers[doc](edit(t, data, old, new))
			if err != nil {
				t.Errorf("%s without a manifest: %v", doc, err)
				continue
			}
			want := EvidenceNone
			if doc == "checkpoint_manifest.json" {
				want = EvidenceAggregateOnly
			}
			b := got.(interface{ Base() Binding }).Base()
			if b.Evidence != want || len(b.Manifest.Shards) > 0 || b.Aggregate.IsZero() != (want == EvidenceNone) {
				t.Errorf("%s without a manifest: %+v", doc, b)
			}
		}
	}
}

// vector is one case of the shared identity vectors.
type vector struct {
	ID, Input string
	Base64    string `json:"input_base64"`
	Expect    struct {
		Verdict, Rule string
		Aggregate     string `json:"aggregate_sha256"`
	}
}

func vectors(t testing.TB) []vector {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(testenv.Cases(t), "identity-vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all struct{ Cases []vector }
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	if len(all.Cases) < 90 {
		t.Fatalf("only %d vectors", len(all.Cases))
	}
	return all.Cases
}

// TestVectorsInside puts each identity vector into each document: what is refused alone is refused inside, by the same
// rule, and what is taken gives the same aggregate.
func TestVectorsInside(t *testing.T) {
	outer := map[string]bool{ // rules about the whole text, which is another one here
		"no-trailing-data": true, "json-syntax": true, "utf-8": true, "input-size": true, "type": true,
	}
	base := `"base_weight_shard_manifest":` + string(example(t, "base.json"))
	ran := 0
	for _, doc := range []string{"adapter_manifest.json", "train_receipt.json", "checkpoint_manifest.json",
		"eval_job.json"} {
		data := example(t, doc)
		if doc == "checkpoint_manifest.json" {
			data = edit(t, data, `"base_model_weights_sha256":"`+exampleBase+`",`, "")
		}
		for _, v := range vectors(t) {
			input := []byte(v.Input)
			if v.Base64 != "" {
				input, _ = base64.StdEncoding.DecodeString(v.Base64)
			}
			if len(input) == 0 || string(bytes.TrimSpace(input)) == "null" { // generated, or absent inside
				continue
			}
			ran++
			got, err := parsers[doc](edit(t, data, base, `"base_weight_shard_manifest":`+string(input)))
			if v.Expect.Verdict == "valid" {
				if err != nil {
					t.Errorf("%s in %s: %v", v.ID, doc, err)
				} else if b := got.(interface{ Base() Binding }).Base(); b.Aggregate.String() != v.Expect.Aggregate {
					t.Errorf("%s in %s: %v", v.ID, doc, b.Aggregate)
				}
				continue
			}
			var e *Error
			if !errors.As(err, &e) || e.Rule != v.Expect.Rule && !outer[v.Expect.Rule] {
				t.Errorf("%s in %s: got %v, want %s", v.ID, doc, err, v.Expect.Rule)
			} else if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Errorf("%s in %s: %q", v.ID, doc, err)
			}
		}
	}
	if ran < 4*80 {
		t.Errorf("only %d cases ran", ran)
	}
}

// TestDuplicatesAtEveryDepth gives the first member of every object of every example a twin.
func TestDuplicatesAtEveryDepth(t *testing.T) {
	for doc, parse := range parsers {
		data := example(t, doc)
		ran := 0
		for at, c := range data {
			if c != '{' || at+1 == len(data) || data[at+1] != '"' {
				continue
			}
			name := data[at+1 : at+2+bytes.IndexByte(data[at+2:], '"')+1]
			ran++
			twin := slices.Concat(data[:at+1], name, []byte(`:null,`), data[at+1:])
			_, err := parse(twin)
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%s: member %s twice: %v", doc, name, err)
			} else if e.Rule != strictjson.RuleDuplicate && e.Rule != strictjson.RuleNotNull {
				t.Errorf("%s: member %s twice: %v", doc, name, err)
			}
			// The second one last, so that the first is read before the fault is met.
			end := at + matching(data[at:])
			_, err = parse(slices.Concat(data[:end], []byte(","), name, []byte(":0"), data[end:]))
			checkRefusal(t, err, strictjson.RuleDuplicate, "", "twice in one object")
		}
		if ran < 1 {
			t.Errorf("%s: no object", doc)
		}
	}
}

// matching is the offset of the brace that closes the object at the start of b. No string of the examples holds one.
func matching(b []byte) int {
	depth := 0
	for i, c := range b {
		switch c {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// TestHostile gives every reader what a decoder may choke on.
func TestHostile(t *testing.T) {
	full := map[string]bool{"train_receipt.json": true, "checkpoint_manifest.json": true} // the others with less
	closed := []string{"checkpoint_manifest.json", "provenance.json", "bind.json", "derived_from.json"}
	for doc, parse := range parsers {
		data := example(t, doc)
		size := 64 << 10
		if full[doc] {
			size = MaxDocument
		}
		tooDeep := strictjson.RuleDepth
		if slices.Contains(closed, doc) {
			tooDeep = strictjson.RuleUnknownField
		}
		for _, c := range []struct {
			data []byte
			rule string
		}{
			{bytes.Repeat([]byte(`{"a":[`), size)[:size], tooDeep},
			{slices.Concat([]byte(`{"`), bytes.Repeat([]byte("é n"), 1<<20), []byte(`":1e999999999x}`)), ""},
			{bytes.Repeat([]byte{'['}, size), strictjson.RuleType},
			{nil, strictjson.RuleSyntax},
			{[]byte("null"), strictjson.RuleNotNull},
			{[]byte("[]"), strictjson.RuleType},
			{append([]byte("\xef\xbb\xbf"), data...), strictjson.RuleSyntax},
			{append(bytes.Clone(data), " {}"...), strictjson.RuleTrailing},
			{append(bytes.Clone(data), 0), strictjson.RuleTrailing},
			{slices.Concat([]byte(`{"x":"`+"\xff"+`",`), data[1:]), strictjson.RuleUTF8},
			{slices.Concat([]byte(`{"\ud800":0,`), data[1:]), strictjson.RuleUTF8},
		} {
			_, err := parse(c.data)
			if checkFuzz(t, c.data, err) {
				t.Errorf("%s: took %.80q", doc, c.data)
			} else if c.rule != "" {
				checkRefusal(t, err, c.rule, "", "")
			}
		}
	}
}

func TestSizeLimit(t *testing.T) {
	spaces := bytes.Repeat([]byte(" "), MaxEval)
	for doc, parse := range parsers {
		data, limit := example(t, doc), MaxDocument
		if strings.HasPrefix(doc, "eval") {
			limit = MaxEval
		}
		over := append(data, spaces[:limit-len(data)+1]...)
		_, err := parse(over)
		checkRefusal(t, err, RuleInputSize, "$", "at most")
		if doc != "checkpoint_manifest.json" && doc != "eval_result.json" { // one for each limit
			continue
		}
		if _, err := parse(over[:limit]); err != nil {
			t.Errorf("%s with %d bytes: %v", doc, limit, err)
		}
	}
}

func TestJoin(t *testing.T) {
	one, two := manifestOf(t, "a.safetensors", 1), manifestOf(t, "a.safetensors", 2)
	none := Binding{Evidence: EvidenceNone}
	bare := Binding{Evidence: EvidenceAggregateOnly, Aggregate: one.Aggregate, Kind: KindCheckpoint, Path: "$.x"}
	said := Binding{Evidence: EvidenceAsserted, Aggregate: one.Aggregate, Kind: KindStatement, Path: "$.y"}
	full := fullBinding(KindReceipt, "$.z", one)
	other := fullBinding(KindEval, "$.w", two)
	for _, c := range []struct {
		in   []Binding
		want Evidence
	}{
		{nil, EvidenceNone}, {[]Binding{none}, EvidenceNone}, {[]Binding{none, bare}, EvidenceAggregateOnly},
		{[]Binding{bare, said, none}, EvidenceAsserted}, {[]Binding{full, said, bare}, EvidenceDocument},
	} {
		got, err := Join(c.in...)
		if err != nil || got.Evidence != c.want || got.Aggregate.IsZero() != (c.want == EvidenceNone) {
			t.Errorf("%v: %+v, %v", c.in, got, err)
		}
	}
	for _, in := range [][]Binding{{bare, other}, {none, full, other}, {other, said}} {
		_, err := Join(in...)
		checkRefusal(t, err, RuleBaseConflict, "", one.Aggregate.String())
		checkRefusal(t, err, RuleBaseConflict, "", two.Aggregate.String())
	}
}

func TestTimestamps(t *testing.T) {
	for _, good := range []string{
		"2026-01-02T03:04:05Z", "2026-01-02t03:04:05z", "2026-01-02 03:04:05+00:00", "2026-01-02T03:04:05.123456789-11:30",
		"2024-02-29T00:00:00Z", "2000-02-29T23:59:60Z", "0001-12-31T00:00:00Z",
	} {
		if err := timestamp(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{
		"", "2026-01-02", "2026-01-02T03:04:05", "2026-01-02T03:04Z", "2026-13-02T03:04:05Z", "2026-00-02T03:04:05Z",
		"2026-01-32T03:04:05Z", "2026-04-31T03:04:05Z", "2025-02-29T00:00:00Z", "1900-02-29T00:00:00Z",
		"2026-01-02T24:04:05Z", "2026-01-02T03:60:05Z", "2026-01-02T03:04:61Z", "2026-01-02T03:04:05.Z",
		"2026-01-02T03:04:05+0000", "2026-01-02T03:04:05+24:00", "2026-01-02T03:04:05+00:60", "2026-01-02T03:04:05 Z",
		"2026-01-02T03:04:05Z ", " 2026-01-02T03:04:05Z", "+026-01-02T03:04:05Z", "2026-01-02T03:04:05z\n",
	} {
		if timestamp(bad) == nil {
			t.Errorf("took %q", bad)
		}
	}
}

// checkFuzz checks what holds for every text, and says whether it was taken.
func checkFuzz(t *testing.T, data []byte, err error) bool {
	t.Helper()
	if err == nil {
		if !json.Valid(data) {
			t.Fatalf("took what is no JSON: %q", data)
		}
		return true
	}
	var e *Error
	if !errors.As(err, &e) || e.Kind == "" || e.Rule == "" || e.Msg == "" || !strings.Contains(e.Path, "$") {
		t.Fatalf("bad error %#v", err)
	}
	if text := err.Error(); strings.ContainsAny(text, "\n\r\x00") || len(text) > 2000 {
		t.Fatalf("bad text %q", text)
	}
	return false
}

// addExamples seeds a fuzz target with the examples.
func addExamples(f *testing.F, names ...string) {
	for _, n := range names {
		data := example(f, n)
		f.Add(data)
		f.Add(bytes.ReplaceAll(data, []byte(`null`), []byte(`"x"`)))
	}
	f.Add([]byte(`{"schema_version":1e0}`))
	f.Add([]byte(`{"a":{"\u2028":-0,"<>&":"` + "\x7f" + `"}}`))
}
