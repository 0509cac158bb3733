package resume

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

func TestRequestRefused(t *testing.T) {
	text := requestText(t, example(t, "checkpoint_manifest.json"))
	for _, c := range []struct{ old, new, rule, path string }{
		{`{"schema_version":1,"request_type"`, `{"schema_version":2,"request_type"`, documents.RuleSchemaVersion,
			"$.schema_version"},
		{`"kiln.resume-request.v1"`, `"x"`, documents.RuleDocumentType, "$.request_type"},
		{`"request_type"`, `"extra":0,"request_type"`, strictjson.RuleUnknownField, "$.extra"},
		{`"request_type"`, `"Seed":0,"request_type"`, strictjson.RuleExactName, "$.Seed"},
		{`"seed":7,"tr`, `"seed":7.5,"tr`, strictjson.RuleInteger, "$.seed"},
		{`"seed":7,"tr`, `"seed":"-7","tr`, strictjson.RuleU64, "$.seed"},
		{`"seed":7,"tr`, `"seed":7,"seed":7,"tr`, strictjson.RuleDuplicate, "$"},
		{`"training_kind":"sft"`, `"training_kind":"SFT"`, documents.RuleValue, "$.training_kind"},
		{`"adapter_name":"demo"`, `"adapter_name":""`, documents.RuleText, "$.adapter_name"},
		{`"effective_config":{"seed":7}`, `"effective_config":7`, strictjson.RuleType, "$.effective_config"},
		{`"effective_config":{"seed":7}`, `"effective_config":{"a":{"b":1,"b":1}}`, strictjson.RuleDuplicate,
			"$.effective_config.a"},
		{`"effective_config":{"seed":7}`, `"effective_config":{"a":1e400}`, strictjson.RuleF64, "$.effective_config.a"},
		{`"parameter_dtype":"bf16"`, `"parameter_dtype":""`, documents.RuleText, "$.precision_policy.parameter_dtype"},
		{`"parameter_dtype":"bf16",`, ``, strictjson.RuleRequired, "$.precision_policy"},
		{`"content_sha256":"1`, `"content_sha256":"sha256:1`, documents.RuleDigestForm, "$.data.content_sha256"},
		{`"total_steps":2`, `"total_steps":-0`, strictjson.RuleU64, "$.total_steps"},
		{`"data_order":[1,0]`, `"data_order":[1,1e3]`, strictjson.RuleInteger, "$.data_order[1]"},
		{`"kind":"sgd",`, ``, strictjson.RuleRequired, "$.optimizer"},
		{`"position":0`, `"position":0,"x":1`, strictjson.RuleUnknownField, "$.rng_states.lora-init.x"},
		{`"adapter_parameters"`, `"adapter_Parameters"`, strictjson.RuleExactName, "$.state_files.adapter_Parameters"},
	} {
		_, err := ParseRequest(edit(t, text, c.old, c.new))
		checkRefusal(t, err, c.rule, c.path)
	}
	_, err := ParseRequest(bytes.Replace(text, []byte(`"cuda:0"`), []byte(`"cuda:1"`), 1))
	checkRefusal(t, err, documents.RuleSelfDigest, "$.execution_provenance.provenance_sha256")
	q, err := ParseRequest([]byte(`{"request_type":"kiln.resume-request.v1","schema_version":1}`))
	if err != nil || q.Order != nil || q.RNG != nil || q.Seed != nil {
		t.Errorf("%+v, %v", q, err)
	}
}

func checkRefusal(t *testing.T, err error, rule, path string) {
	t.Helper()
	var e *documents.Error
	if !errors.As(err, &e) || e.Rule != rule || e.Path != path || e.Kind != KindRequest ||
		strings.Count(err.Error(), "at line") > 1 || strings.ContainsAny(err.Error(), "\n") {
		t.Errorf("got %v, want %s at %s", err, rule, path)
	}
}
