package documents

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Types and limits of execution provenance.
const (
	provenanceType = "kiln.execution-provenance.v1"
	kernelType     = "kiln.kernel-contract.v1"
	maxKernels     = 64 // entries of versions, and of compiled_features
)

// Provenance is a kiln.execution-provenance.v1: process, build, device, precision, kernels and configuration behind
// some work. Both digests that it gives of itself were recomputed. It does not name base weights.
type Provenance struct {
	Digest            identity.Digest // provenance_sha256
	Backend           string
	Device            string
	NumericalRuntime  identity.Digest
	PackageVersion    string
	Target            string
	Executable        identity.Digest
	GitCommit         string          // empty: not recorded
	SourceTree        identity.Digest // zero: not recorded
	SourceDirty       *bool           // nil: not recorded
	ModelConfig       identity.Digest
	TokenizerVocab    identity.Digest
	TokenizerConfig   identity.Digest
	ChatTemplate      identity.Digest // zero: not recorded
	TrainingTemplate  identity.Digest // zero: not recorded
	InferenceDtype    string
	TrainingPolicy    string
	KernelVersions    map[string]string
	CompiledFeatures  []string
	KernelContract    identity.Digest // contract_sha256
	ServerConfig      identity.Digest
	ServerEnvironment identity.Digest
	Raw               []byte // the text of the document
}

// Identities returns the other identities that p records.
func (p *Provenance) Identities() Identities {
	if p == nil {
		return Identities{}
	}
	return Identities{p.ModelConfig, p.TokenizerVocab, p.TokenizerConfig, p.ChatTemplate, p.TrainingTemplate, p.Digest}
}

// ParseProvenance reads an execution provenance and recomputes contract_sha256 and provenance_sha256. The error is an
// *Error.
func ParseProvenance(data []byte) (*Provenance, error) {
	var p *Provenance
	err := read(KindProvenance, MaxDocument, data, func(r reader) (err error) {
		p, err = r.provenance()
		return err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// provenanceField is an optional execution provenance.
func (r reader) provenanceField(to **Provenance) field {
	return field{Name: "execution_provenance", Optional: true, Read: func() (err error) {
		*to, err = r.provenance()
		return err
	}}
}

// The forms of the members of a provenance.
const (
	aText = iota
	aDigest
	aFlag
)

// member is one member of a provenance whose value is a single text, digest or flag.
type member struct {
	object, name string
	form         int
	optional     bool
}

func (m member) path() string { return m.object + "." + m.name }

// members are in the order in which they are hashed. The object kernels stands between precision and configuration.
var members = []member{
	{"backend", "name", aText, false},
	{"backend", "device", aText, false},
	{"backend", "numerical_runtime_sha256", aDigest, false},
	{"build", "package_version", aText, false},
	{"build", "target", aText, false},
	{"build", "executable_sha256", aDigest, false},
	{"build", "git_commit", aText, true},
	{"build", "source_tree_sha256", aDigest, true},
	{"build", "source_dirty", aFlag, true},
	{"model", "model_config_sha256", aDigest, false},
	{"model", "tokenizer_vocab_sha256", aDigest, false},
	{"model", "tokenizer_config_sha256", aDigest, false},
	{"model", "chat_template_sha256", aDigest, true},
	{"model", "training_chat_template_sha256", aDigest, true},
	{"precision", "inference_dtype", aText, false},
	{"precision", "training_policy", aText, false},
	{"configuration", "effective_server_config_sha256", aDigest, false},
	{"configuration", "effective_environment_sha256", aDigest, false},
}

// execution is a provenance as it stands in JSON, before the rules are checked.
type execution struct {
	version                  uint32
	kind                     string
	values                   map[string]string // by path; a flag as true or false
	kernels                  string            // contract_type
	versions                 map[string]string
	features                 []string
	kernelDigest, ownDigest  string
	kernelDigestOf, digestOf identity.Digest // recomputed
}

func (r reader) provenance() (*Provenance, error) {
	e := execution{values: map[string]string{}, versions: map[string]string{}}
	text, err := r.span(func() error { return e.read(r) })
	if err != nil {
		return nil, err
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	return e.view(text), nil
}

func (e *execution) read(r reader) error {
	return r.Struct(
		field{Name: "schema_version", Read: func() (err error) { e.version, err = r.Uint32(); return err }},
		r.text("provenance_type", &e.kind),
		e.object(r, "backend"), e.object(r, "build"), e.object(r, "model"), e.object(r, "precision"),
		r.exactly("kernels",
			r.text("contract_type", &e.kernels),
			field{Name: "versions", Read: func() error {
				return r.Object(func(name string) (err error) { e.versions[name], err = r.String(); return err })
			}},
			r.list("compiled_features", func(int) error {
				s, err := r.String()
				e.features = append(e.features, s)
				return err
			}),
			r.text("contract_sha256", &e.kernelDigest)),
		e.object(r, "configuration"),
		r.text("provenance_sha256", &e.ownDigest))
}

// object is the object of the given name with its members.
func (e *execution) object(r reader, name string) field {
	var fields []field
	for _, m := range members {
		if m.object != name {
			continue
		}
		fields = append(fields, field{Name: m.name, Optional: m.optional, Read: func() (err error) {
			if m.form == aFlag {
				flag, err := r.Bool()
				e.values[m.path()] = fmt.Sprint(flag)
				return err
			}
			e.values[m.path()], err = r.String()
			return err
		}})
	}
	return r.exactly(name, fields...)
}

// check checks the rules in Kiln's order.
func (e *execution) check() error {
	if e.version != 1 {
		return fault("schema_version", RuleSchemaVersion, "is %d, only 1 is read", e.version)
	}
	if e.kind != provenanceType {
		return fault("provenance_type", RuleDocumentType, "is %.80q, must be %q", e.kind, provenanceType)
	}
	for _, pass := range []struct {
		form     int
		optional bool
	}{{aText, false}, {aText, true}, {aDigest, false}, {aDigest, true}} {
		for _, m := range members {
			if m.form != pass.form || m.optional != pass.optional {
				continue
			}
			if err := e.checkMember(m); err != nil {
				return err
			}
		}
	}
	if err := e.checkKernels(); err != nil {
		return err
	}
	e.digestOf = identity.Sum(e.appendIdentity(nil))
	return checkSelf("provenance_sha256", e.ownDigest, e.digestOf)
}

func (e *execution) checkMember(m member) error {
	s, ok := e.values[m.path()]
	if !ok {
		return nil
	}
	if m.form == aDigest {
		if _, err := identity.ParseDigest(s); err != nil {
			return fault(m.path(), RuleDigestForm, "%v", err)
		}
		return nil
	}
	if err := plainText(s); err != nil {
		return fault(m.path(), RuleText, "%v", err)
	}
	return nil
}

func (e *execution) checkKernels() error {
	if e.kernels != kernelType {
		return fault("kernels.contract_type", RuleDocumentType, "is %.80q, must be %q", e.kernels, kernelType)
	}
	if n := len(e.versions); n < 1 || n > maxKernels {
		return fault("kernels.versions", RuleCount, "%d entries, must be 1 to %d", n, maxKernels)
	}
	if n := len(e.features); n > maxKernels {
		return fault("kernels.compiled_features", RuleCount, "%d entries, at most %d are allowed", n, maxKernels)
	}
	for _, name := range slices.Sorted(maps.Keys(e.versions)) {
		if err := plainText(name); err != nil {
			return fault("kernels.versions", RuleText, "a name %v", err)
		}
		if err := plainText(e.versions[name]); err != nil {
			return fault(fmt.Sprintf("kernels.versions[%q]", name), RuleText, "%v", err)
		}
	}
	for i, f := range e.features {
		if err := plainText(f); err != nil {
			return fault(fmt.Sprintf("kernels.compiled_features[%d]", i), RuleText, "%v", err)
		}
	}
	for i, f := range e.features {
		if i > 0 && e.features[i-1] >= f {
			return fault(fmt.Sprintf("kernels.compiled_features[%d]", i), RuleOrder,
				"%.80q comes after %.80q, must be in ascending byte order without repeats", f, e.features[i-1])
		}
	}
	e.kernelDigestOf = identity.Sum(e.appendContract(nil))
	return checkSelf("kernels.contract_sha256", e.kernelDigest, e.kernelDigestOf)
}

// checkSelf compares the digest that a document gives of itself with the recomputed one.
func checkSelf(path, said string, got identity.Digest) error {
	d, err := identity.ParseDigest(said)
	if err != nil {
		return fault(path, RuleDigestForm, "%v", err)
	}
	if d != got {
		return fault(path, RuleSelfDigest, "is %v, the document gives %v", d, got)
	}
	return nil
}

// appendContract appends what contract_sha256 is the digest of.
func (e *execution) appendContract(b []byte) []byte {
	b = append(appendString(append(b, '['), e.kernels), ',')
	b = append(e.appendVersions(b), ',')
	return append(e.appendFeatures(b), ']')
}

func (e *execution) appendVersions(b []byte) []byte {
	b = append(b, '{')
	for i, name := range slices.Sorted(maps.Keys(e.versions)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(append(appendString(b, name), ':'), e.versions[name])
	}
	return append(b, '}')
}

func (e *execution) appendFeatures(b []byte) []byte {
	b = append(b, '[')
	for i, f := range e.features {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, f)
	}
	return append(b, ']')
}

// appendIdentity appends what provenance_sha256 is the digest of: every member but itself, compact, in fixed order,
// options that are absent left out.
func (e *execution) appendIdentity(b []byte) []byte {
	b = append(b, `{"schema_version":1`...)
	b = appendText(b, "provenance_type", e.kind)
	for _, object := range []string{"backend", "build", "model", "precision"} {
		b = e.appendObject(b, object)
	}
	b = appendString(append(b, `,"kernels":{"contract_type":`...), e.kernels)
	b = e.appendVersions(appendMember(b, "versions"))
	b = e.appendFeatures(appendMember(b, "compiled_features"))
	b = append(appendText(b, "contract_sha256", e.kernelDigest), '}')
	return append(e.appendObject(b, "configuration"), '}')
}

// appendObject appends the object of the given name and its members that are there.
func (e *execution) appendObject(b []byte, object string) []byte {
	b = append(appendMember(b, object), '{')
	first := true
	for _, m := range members {
		v, ok := e.values[m.path()]
		if m.object != object || !ok {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(appendString(b, m.name), ':')
		if m.form == aFlag {
			b = append(b, v...)
		} else {
			b = appendString(b, v)
		}
	}
	return append(b, '}')
}

// view returns the checked document for others to read.
func (e *execution) view(text []byte) *Provenance {
	get := func(path string) string { return e.values[path] }
	digest := func(path string) identity.Digest {
		d, _ := identity.ParseDigest(e.values[path]) // checked; absent: zero
		return d
	}
	p := &Provenance{
		Digest: e.digestOf, Raw: text,
		Backend: get("backend.name"), Device: get("backend.device"),
		NumericalRuntime: digest("backend.numerical_runtime_sha256"),
		PackageVersion:   get("build.package_version"), Target: get("build.target"),
		Executable: digest("build.executable_sha256"), GitCommit: get("build.git_commit"),
		SourceTree:       digest("build.source_tree_sha256"),
		ModelConfig:      digest("model.model_config_sha256"),
		TokenizerVocab:   digest("model.tokenizer_vocab_sha256"),
		TokenizerConfig:  digest("model.tokenizer_config_sha256"),
		ChatTemplate:     digest("model.chat_template_sha256"),
		TrainingTemplate: digest("model.training_chat_template_sha256"),
		InferenceDtype:   get("precision.inference_dtype"), TrainingPolicy: get("precision.training_policy"),
		KernelVersions: e.versions, CompiledFeatures: e.features, KernelContract: e.kernelDigestOf,
		ServerConfig:      digest("configuration.effective_server_config_sha256"),
		ServerEnvironment: digest("configuration.effective_environment_sha256"),
	}
	if v := get("build.source_dirty"); v != "" {
		dirty := v == "true"
		p.SourceDirty = &dirty
	}
	return p
}

// Precision is the precision policy of a training run. All members but the last are texts that are not blank.
type Precision struct {
	Parameters         string // parameter_dtype
	OptimizerState     string // optimizer_state_dtype
	Activations        string // activation_dtype
	Gradients          string // gradient_dtype
	StochasticRounding []byte // a JSON object, as it stands
	Raw                []byte // the text of the document
}

// ParsePrecision reads a precision policy. The error is an *Error.
func ParsePrecision(data []byte) (*Precision, error) {
	var p *Precision
	err := read(KindPrecision, MaxDocument, data, func(r reader) (err error) {
		p, err = r.precision()
		return err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// precisionField is a precision policy under the given name.
func (r reader) precisionField(name string, to **Precision) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.precision(); return err }}
}

func (r reader) precision() (*Precision, error) {
	p := new(Precision)
	var err error
	p.Raw, err = r.span(func() error {
		return r.Struct(
			r.checked("parameter_dtype", RuleText, &p.Parameters, notBlank),
			r.checked("optimizer_state_dtype", RuleText, &p.OptimizerState, notBlank),
			r.checked("activation_dtype", RuleText, &p.Activations, notBlank),
			r.checked("gradient_dtype", RuleText, &p.Gradients, notBlank),
			r.object("stochastic_rounding", &p.StochasticRounding))
	})
	return p, err
}
