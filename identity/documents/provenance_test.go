package documents

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

func TestProvenanceExample(t *testing.T) {
	data := example(t, "provenance.json")
	p, err := ParseProvenance(data)
	if err != nil {
		t.Fatal(err)
	}
	fill := func(c string) identity.Digest { return digest(t, "sha256:"+strings.Repeat(c, 64)) }
	if p.Digest.String() != "sha256:8cce789875ba6cbc44db5c49b6b1071af898cb78e604f6fc31e866ae1d7d5b8d" ||
		p.KernelContract.String() != "sha256:9b91e91bb398f5ea176c8a54aeb34c163d2e21cfc02c61e095d5d9ca689b2a6a" ||
		p.Backend != "cuda" || p.Device != "cuda:0" || p.NumericalRuntime != fill("1") || p.Executable != fill("2") ||
		p.ModelConfig != fill("3") || p.TokenizerVocab != fill("4") || p.TokenizerConfig != fill("5") ||
		p.ServerConfig != fill("6") || p.ServerEnvironment != fill("7") || p.InferenceDtype != "bf16" ||
		p.TrainingPolicy != "cuda_native" || p.Target != "linux-x86_64" || p.PackageVersion != "0.4.1" ||
		p.KernelVersions["kiln-model"] != "0.4.1" || len(p.CompiledFeatures) != 2 || p.SourceDirty != nil ||
		p.GitCommit != "" || !p.SourceTree.IsZero() || string(p.Raw) != string(data) {
		t.Errorf("%+v", p)
	}
	if (*Provenance)(nil).Identities() != (Identities{}) {
		t.Error("an absent provenance records something")
	}
}

// signed is a provenance written out by hand: parts that are texts stand as JSON does. Both digests are computed over
// the hand-written bytes, without the code under test.
type signed struct {
	device, build, model, versions, features string
}

func (s signed) text() (contract, whole string) {
	sum := func(b string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(b))) }
	h := func(c string) string { return `"sha256:` + strings.Repeat(c, 64) + `"` }
	contract = sum(`["kiln.kernel-contract.v1",` + s.versions + `,` + s.features + `]`)
	body := `{"schema_version":1,"provenance_type":"kiln.execution-provenance.v1","backend":{"name":"rocm","device":` +
		s.device +
		`,"numerical_runtime_sha256":` + h("1") + `},"build":{"package_version":"0.4.1","target":"linux",` +
		`"executable_sha256":` + h("2") + s.build + `},"model":{"model_config_sha256":` + h("3") +
		`,"tokenizer_vocab_sha256":` + h("4") + `,"tokenizer_config_sha256":` + h("5") + s.model +
		`},"precision":{"inference_dtype":"bf16","training_policy":"native"},"kernels":{"contract_type":` +
		`"kiln.kernel-contract.v1","versions":` + s.versions + `,"compiled_features":` + s.features +
		`,"contract_sha256":"` + contract + `"},"configuration":{"effective_server_config_sha256":` + h("6") +
		`,"effective_environment_sha256":` + h("7") + `}`
	return contract, body + `,"provenance_sha256":"` + sum(body+"}") + `"}`
}

func TestProvenanceDigests(t *testing.T) {
	plain := signed{device: `"rocm:0"`, versions: `{"k":"1"}`, features: `[]`}
	edit := func(f func(*signed)) signed { s := plain; f(&s); return s }
	h := `"sha256:` + strings.Repeat("0", 64) + `"`
	for name, s := range map[string]signed{
		"plain":      plain,
		"escapes":    edit(func(s *signed) { s.device = `"a\"b\\c/d"` }),
		"html":       edit(func(s *signed) { s.device = `"<a>&'b'"` }),
		"separators": edit(func(s *signed) { s.device = "\"a\u2028b\u2029c\"" }),
		"beyond":     edit(func(s *signed) { s.device = "\"é 漢 \U0001f600\"" }),
		"512 bytes":  edit(func(s *signed) { s.device = `"` + strings.Repeat("x", 512) + `"` }),
		"all options": edit(func(s *signed) {
			s.build = `,"git_commit":"abc","source_tree_sha256":` + h + `,"source_dirty":false`
			s.model = `,"chat_template_sha256":` + h + `,"training_chat_template_sha256":` + h
		}),
		"sorted maps": edit(func(s *signed) { s.versions, s.features = `{"A":"3","a":"1","b":"2"}`, `["A","a","b","é"]` }),
		"64 versions": edit(func(s *signed) { s.versions = many(64, true) }),
		"64 features": edit(func(s *signed) { s.features = many(64, false) }),
	} {
		contract, text := s.text()
		p, err := ParseProvenance([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if p.KernelContract.String() != contract || !strings.Contains(text, `"`+p.Digest.String()+`"`) {
			t.Errorf("%s: got %v, %v", name, p.KernelContract, p.Digest)
		}
	}
	// Other spellings of the same document: they give the same digests.
	_, text := plain.text()
	for _, other := range []string{
		strings.Replace(text, `"rocm:0"`, `"r\u006fcm:0"`, 1),
		strings.Replace(text, `{"schema_version":1,`, "{ \"schema_version\" : 1 ,\n", 1),
		strings.Replace(text, `"executable_sha256"`, `"git_commit":null,"source_dirty":null,"executable_sha256"`, 1),
		strings.Replace(strings.Replace(text, `"name":"rocm",`, ``, 1), `"device":"rocm:0"`,
			`"device":"rocm:0","name":"rocm"`, 1),
	} {
		if _, err := ParseProvenance([]byte(other)); err != nil {
			t.Errorf("%v\n%s", err, other)
		}
	}
}

// many is a map or a list of n entries in ascending order.
func many(n int, isMap bool) string {
	var parts []string
	for i := range n {
		s := fmt.Sprintf(`"k%03d"`, i)
		if isMap {
			s += `:"1"`
		}
		parts = append(parts, s)
	}
	if isMap {
		return "{" + strings.Join(parts, ",") + "}"
	}
	return "[" + strings.Join(parts, ",") + "]"
}

func TestProvenanceRefused(t *testing.T) {
	const doc = "provenance.json"
	checkRefusals(t, []refused{
		{doc, `{"schema_version":1`, `{"schema_version":2`, RuleSchemaVersion, "$.schema_version", "is 2"},
		{doc, `"kiln.execution-provenance.v1"`, `"x"`, RuleDocumentType, "$.provenance_type", ""},
		{doc, `{"schema_version":1`, `{"extra":0,"schema_version":1`, strictjson.RuleUnknownField, "$.extra", ""},
		{doc, `"backend":{"name"`, `"backend":{"x":0,"name"`, strictjson.RuleUnknownField, "$.backend.x", ""},
		{doc, `"backend":{"name"`, `"backend":{"Name"`, strictjson.RuleExactName, "$.backend.Name", ""},
		{doc, `"name":"cuda",`, ``, strictjson.RuleRequired, "$.backend", `"name"`},
		{doc, `"name":"cuda"`, `"name":""`, RuleText, "$.backend.name", "empty"},
		{doc, `"name":"cuda"`, `"name":" cuda"`, RuleText, "$.backend.name", "white space"},
		{doc, `"name":"cuda"`, "\"name\":\"cuda\u2028\"", RuleText, "$.backend.name", "white space"},
		{doc, `"name":"cuda"`, "\"name\":\"cu\x7fda\"", RuleText, "$.backend.name", "control"},
		{doc, `"name":"cuda"`, `"name":"cu\u0085da"`, RuleText, "$.backend.name", "control"},
		{doc, `"name":"cuda"`, `"name":"` + strings.Repeat("x", 513) + `"`, RuleText, "$.backend.name", "513 bytes"},
		{doc, `"executable_sha256":"sha256:`, `"executable_sha256":"`, RuleDigestForm, "$.build.executable_sha256", ""},
		{doc, `"target":"linux-x86_64"`, `"target":"linux-x86_64","git_commit":" "`, RuleText, "$.build.git_commit", ""},
		{doc, `"target":"linux-x86_64"`, `"target":"linux-x86_64","source_dirty":"no"`, strictjson.RuleType,
			"$.build.source_dirty", ""},
		{doc, `"target":"linux-x86_64"`, `"target":"linux-x86_64","source_dirty":true`, RuleSelfDigest,
			"$.provenance_sha256", "gives"},
		{doc, `"kiln.kernel-contract.v1"`, `"kiln.kernel-contract.v2"`, RuleDocumentType, "$.kernels.contract_type", ""},
		{doc, `{"kiln-model":"0.4.1"}`, `{}`, RuleCount, "$.kernels.versions", "0 entries"},
		{doc, `{"kiln-model":"0.4.1"}`, many(65, true), RuleCount, "$.kernels.versions", "65 entries"},
		{doc, `["cuda","cuda-archs=sm_90"]`, many(65, false), RuleCount, "$.kernels.compiled_features", "65 entries"},
		{doc, `{"kiln-model":"0.4.1"}`, `{"":"1"}`, RuleText, "$.kernels.versions", ""},
		{doc, `{"kiln-model":"0.4.1"}`, `{"k":""}`, RuleText, `$.kernels.versions["k"]`, ""},
		{doc, `["cuda","cuda-archs=sm_90"]`, `["b","a"]`, RuleOrder, "$.kernels.compiled_features[1]", "ascending"},
		{doc, `["cuda","cuda-archs=sm_90"]`, `["a","a"]`, RuleOrder, "$.kernels.compiled_features[1]", "repeats"},
		{doc, `["cuda","cuda-archs=sm_90"]`, `["a"," b"]`, RuleText, "$.kernels.compiled_features[1]", ""},
		{doc, `["cuda","cuda-archs=sm_90"]`, `["cuda"]`, RuleSelfDigest, "$.kernels.contract_sha256", "9b91e91b"},
		{doc, `"cuda:0"`, `"cuda:1"`, RuleSelfDigest, "$.provenance_sha256", "8cce7898"},
		{doc, `"provenance_sha256":"sha256:`, `"provenance_sha256":"SHA256:`, RuleDigestForm, "$.provenance_sha256", ""},
	})
}

func TestPrecision(t *testing.T) {
	const good = `{"parameter_dtype":"bf16","optimizer_state_dtype":"none","activation_dtype":"f32",` +
		`"gradient_dtype":"f32","stochastic_rounding":{"mode":"round_to_nearest"}}`
	p, err := ParsePrecision([]byte(good))
	if err != nil || p.Parameters != "bf16" || p.OptimizerState != "none" || p.Activations != "f32" ||
		p.Gradients != "f32" || string(p.StochasticRounding) != `{"mode":"round_to_nearest"}` || string(p.Raw) != good {
		t.Errorf("%+v, %v", p, err)
	}
	for _, c := range []struct{ old, new, rule, path string }{
		{`"bf16"`, `"\u3000"`, RuleText, "$.parameter_dtype"},
		{`"gradient_dtype":"f32",`, ``, strictjson.RuleRequired, "$"},
		{`{"mode":"round_to_nearest"}`, `[]`, strictjson.RuleType, "$.stochastic_rounding"},
		{`{"mode":"round_to_nearest"}`, `{"a":{"b":1,"b":1}}`, strictjson.RuleDuplicate, "$.stochastic_rounding.a"},
		{`{"parameter_dtype"`, `{"x":1,"parameter_dtype"`, strictjson.RuleUnknownField, "$.x"},
	} {
		_, err := ParsePrecision(edit(t, []byte(good), c.old, c.new))
		checkRefusal(t, err, c.rule, c.path, "")
	}
}

func FuzzProvenance(f *testing.F) {
	addExamples(f, "provenance.json")
	for _, device := range []string{`"a\"\\b<>&"`, "\"\u2028x\"", `"\ud83d\ude00"`} {
		_, text := signed{device: device, versions: `{"k":"1"}`, features: `["a"]`}.text()
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := ParseProvenance(data)
		if !checkFuzz(t, data, err) {
			return
		}
		again, err := ParseProvenance(p.Raw)
		if err != nil || again.Digest != p.Digest {
			t.Fatalf("%v: %q gave %q", err, data, p.Raw)
		}
	})
}

func FuzzPrecision(f *testing.F) {
	f.Add([]byte(`{"parameter_dtype":"bf16","optimizer_state_dtype":"none","activation_dtype":"f32",` +
		`"gradient_dtype":"f32","stochastic_rounding":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := ParsePrecision(data)
		checkFuzz(t, data, err)
	})
}
