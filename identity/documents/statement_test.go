package documents

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

func TestStatementExamples(t *testing.T) {
	for _, doc := range []string{"bind.json", "derived_from.json"} {
		data := example(t, doc)
		s, err := ParseStatement(data)
		if err != nil {
			t.Fatalf("%s: %v", doc, err)
		}
		text, err := s.Document()
		if err != nil || !bytes.Equal(text, data) {
			t.Errorf("%s: %v\n%s", doc, err, text)
		}
		b := s.Base()
		if (s.Bind != nil) != (doc == "bind.json") || (s.Derived == nil) != (s.Bind != nil) || s.By != "ops" {
			t.Errorf("%s: %+v", doc, s)
		}
		if s.Bind != nil && (b.Evidence != EvidenceAsserted || b.Aggregate.String() != exampleBase ||
			len(b.Manifest.Shards) != 1) ||
			s.Bind == nil && (b.Evidence != EvidenceNone || !b.Aggregate.IsZero()) {
			t.Errorf("%s: %+v", doc, b)
		}
	}
}

func TestStatementRefused(t *testing.T) {
	zeros := "sha256:" + strings.Repeat("0", 64)
	ones := "sha256:" + strings.Repeat("1", 64)
	const source = `{"base_aggregate_sha256":"` + exampleBase + `"}`
	checkRefusals(t, []refused{
		{"bind.json", `{"schema_version":1,"st`, `{"schema_version":2,"st`, RuleSchemaVersion, "$.schema_version", ""},
		{"bind.json", `"kiln.statement.v1"`, `"kiln.statement.v2"`, RuleDocumentType, "$.statement_type", ""},
		{"bind.json", `"reason":"`, `"x":0,"reason":"`, strictjson.RuleUnknownField, "$.x", ""},
		{"bind.json", `"reason":"trained before manifests were written"`, `"reason":""`, RuleText, "$.reason", ""},
		{"bind.json", `"made_by":"ops"`, `"made_by":"o\nps"`, RuleText, "$.made_by", "control"},
		{"bind.json", `"made_at":"2026-01-02T03:04:05Z"`, `"made_at":"now"`, RuleTimestamp, "$.made_at", ""},
		{"bind.json", `"bind":{`, `"Bind":{`, strictjson.RuleExactName, "", ""},
		{"bind.json", `{"schema_version":1,"st`, `{"derived_from":{"target":{"artifact":"` + ones + `"},"sources":[` +
			source +
			`],"how":"merge"},"schema_version":1,"st`, RuleShape, "$", "either"},
		{"bind.json", ones, zeros, RuleValue, "$.bind.artifact", "zeros"},
		{"bind.json", `"base_aggregate_sha256":"sha256:c62f`, `"base_aggregate_sha256":"sha256:c63f`, RuleBaseConflict,
			"$.bind.base_aggregate_sha256", exampleBase},
		{"bind.json", `"base_aggregate_sha256":"sha256:c62f`, `"base_aggregate_sha256":"c62f`, RuleDigestForm, "", ""},
		{"derived_from.json", `"how":"merge"`, `"how":"distil"`, RuleValue, "$.derived_from.how", "quantize"},
		{"derived_from.json", `"how":"merge"`, `"how":"quantize"`, RuleCount, "$.derived_from.sources", "only merge"},
		{"derived_from.json", `[` + source + `,{"artifact":"` + ones + `"}]`, `[]`, RuleCount, "$.derived_from.sources", ""},
		{"derived_from.json", `[` + source, `[` + source + `,` + source, RuleValue, "$.derived_from.sources[1]", "base " +
			exampleBase},
		{"derived_from.json", source, `{}`, RuleShape, "$.derived_from.sources[0]", "either"},
		{"derived_from.json", source, `{"artifact":"` + zeros + `"}`, RuleValue, "$.derived_from.sources[0].artifact", "zeros"},
		{"derived_from.json", source, `{"base_aggregate_sha256":"` + zeros + `","artifact":"` + ones + `"}`, RuleValue,
			"$.derived_from.sources[0].base_aggregate_sha256", "zeros"},
		{"derived_from.json", `{"artifact":"`, `{"base_aggregate_sha256":"` + exampleBase + `","artifact":"`, RuleShape,
			"$.derived_from.sources[1]", ""},
		{"derived_from.json", source,
			`{"base_aggregate_sha256":"sha256:813979f1d3dd938e49874427651a97344cd1af5409e75aceaa741707616cd7a5"}`,
			RuleValue, "$.derived_from.sources[0]", "target"},
		{"derived_from.json", `"tool":"mergekit 0.1"`, `"tool":""`, RuleText, "$.derived_from.tool", ""},
		{"derived_from.json", `"reason":"the adapter was merged in",`, ``, strictjson.RuleRequired, "$", `"reason"`},
	})
	checkTaken(t, []taken{
		{"derived_from.json", `,"tool":"mergekit 0.1"`, ``}, {"derived_from.json", `"tool":"mergekit 0.1"`, `"tool":null`},
		{"bind.json", `"reason":"trained`, `"derived_from":null,"reason":"trained`},
	})
}

func TestNewStatement(t *testing.T) {
	base := manifestOf(t, "a.safetensors", 1)
	digest := identity.Sum([]byte("x"))
	for name, s := range map[string]Statement{
		"bind": {Bind: &Bind{Artifact: digest, Aggregate: base.Aggregate}, Reason: "a <b> & \u2028 \"c\"", By: "é",
			At: "2026-01-02T03:04:05Z"},
		"quantize": {Derived: &Derived{Target: Subject{Aggregate: base.Aggregate}, Sources: []Subject{{Artifact: digest}},
			How: Quantize}, Reason: "r", By: "b", At: "2026-01-02T03:04:05Z"},
	} {
		text, err := s.Document()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if again, err := ParseStatement(text); err != nil || !reflect.DeepEqual(again, s) {
			t.Errorf("%s: %v\n%+v\n%+v", name, err, again, s)
		}
	}
	good := Statement{Bind: &Bind{Artifact: digest, Aggregate: base.Aggregate}, Reason: "r", By: "b",
		At: "2026-01-02T03:04:05Z"}
	for name, bad := range map[string]func(*Statement){
		"nothing":  func(s *Statement) { s.Bind = nil },
		"both":     func(s *Statement) { s.Derived = &Derived{} },
		"reason":   func(s *Statement) { s.Reason = " x" },
		"conflict": func(s *Statement) { s.Bind = &Bind{digest, aggregate(t, exampleBase), base} },
		"invalid": func(s *Statement) {
			s.Bind = &Bind{digest, base.Aggregate, identity.Manifest{Aggregate: base.Aggregate}}
		},
		"two subjects": func(s *Statement) {
			s.Bind = nil
			s.Derived = &Derived{Target: Subject{base.Aggregate, digest}, Sources: []Subject{{Artifact: digest}}, How: Merge}
		},
		"not UTF-8": func(s *Statement) { s.By = "\xff" },
	} {
		s := good
		bad(&s)
		if text, err := s.Document(); err == nil {
			t.Errorf("%s: wrote %s", name, text)
		}
	}
}

func FuzzStatement(f *testing.F) {
	addExamples(f, "bind.json", "derived_from.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := ParseStatement(data)
		if !checkFuzz(t, data, err) {
			return
		}
		text, err := s.Document()
		if err != nil {
			t.Fatalf("%v: %q", err, data)
		}
		again, err := ParseStatement(text)
		if err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%v: %q gave %q", err, data, text)
		}
	})
}
