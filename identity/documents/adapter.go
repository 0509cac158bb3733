package documents

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

const adapterManifestType = "kiln_adapter_manifest"

// AdapterManifest is an adapter_manifest.json: it binds the files of a finished LoRA adapter by digest and says what
// they were made from. An empty text and a zero digest mean that the document does not record it.
type AdapterManifest struct {
	Name               string          // adapter_name
	Weights            identity.Digest // safetensors_hash: of the file Files.Model
	Config             identity.Digest // config_hash: of the file Files.Config
	Receipt            identity.Digest // receipt_hash: of the training receipt
	Parent             string          // parent_adapter: a name or a recorded path, never an identity
	ModelConfig        identity.Digest
	TrainingTemplate   identity.Digest
	Shards             identity.Manifest // base_weight_shard_manifest
	Provenance         *Provenance       // nil: not recorded
	Precision          *Precision        // nil: not recorded
	KilnCommit         string
	TrainingData       identity.Digest // training_data_hash
	TrainingDataSource string
	TrainingDataPath   string
	OpenEnv            []byte // openenv_training_data, an object as it stands
	Files              AdapterFiles
	shards             []byte // the text of Shards
}

// AdapterFiles are the names of an adapter's files, each one path component.
type AdapterFiles struct {
	Model, Config string
	Receipt       string // empty: none
}

// ParseAdapterManifest reads an adapter_manifest.json. Members that it does not know are ignored. It is stricter than
// Kiln's reader: version, type, digest forms and file names are checked. The error is an *Error.
func ParseAdapterManifest(data []byte) (AdapterManifest, error) {
	var m AdapterManifest
	if err := read(KindAdapterManifest, MaxDocument, data, m.read); err != nil {
		return AdapterManifest{}, err
	}
	return m, nil
}

func (m *AdapterManifest) read(r reader) error {
	err := r.lenient(
		r.version(1),
		r.constant("manifest_type", adapterManifestType),
		r.checked("adapter_name", RuleName, &m.Name, adapterName),
		r.digest("safetensors_hash", &m.Weights),
		r.digest("config_hash", &m.Config),
		optional(r.digest("receipt_hash", &m.Receipt)),
		optional(r.text("parent_adapter", &m.Parent)),
		optional(r.digest("model_config_hash", &m.ModelConfig)),
		optional(r.digest("training_chat_template_hash", &m.TrainingTemplate)),
		r.baseText(&m.Shards, &m.shards),
		r.provenanceField(&m.Provenance),
		optional(r.precisionField("training_precision", &m.Precision)),
		optional(r.text("kiln_commit", &m.KilnCommit)),
		optional(r.digest("training_data_hash", &m.TrainingData)),
		optional(r.text("training_data_source", &m.TrainingDataSource)),
		optional(r.text("training_data_path", &m.TrainingDataPath)),
		optional(r.openEnv("openenv_training_data", &m.OpenEnv)),
		r.in("files",
			r.checked("adapter_model", RuleName, &m.Files.Model, fileName),
			r.checked("adapter_config", RuleName, &m.Files.Config, fileName),
			optional(r.checked("train_receipt", RuleName, &m.Files.Receipt, fileName))))
	if err != nil {
		return err
	}
	return agree(
		named{"training_chat_template_hash", m.TrainingTemplate},
		m.Provenance.trainingTemplate("execution_provenance"))
}

// named is a digest with the place where it stands.
type named struct {
	path   string
	digest identity.Digest
}

// trainingTemplate is the training template that p records, if any. p stands at the given path.
func (p *Provenance) trainingTemplate(path string) named {
	return named{path + ".model.training_chat_template_sha256", p.Identities().TrainingTemplate}
}

// agree refuses two digests of one thing that differ. Those not recorded do not count.
func agree(all ...named) error {
	var first named
	for _, n := range all {
		switch {
		case n.digest.IsZero():
		case first.digest.IsZero():
			first = n
		case n.digest != first.digest:
			return fault(n.path, RuleAgreement, "is %v, but %s is %v", n.digest, first.path, first.digest)
		}
	}
	return nil
}

// openEnv is a record of OpenEnv training data, of which only the schema is checked.
func (r reader) openEnv(name string, to *[]byte) field {
	return field{Name: name, Read: func() (err error) {
		*to, err = r.span(func() error { return r.lenient(r.constant("schema", "kiln.openenv-training-data.v1")) })
		return err
	}}
}

// adapterName checks the contract's pattern for names of adapters.
func adapterName(s string) error {
	switch {
	case s == "":
		return errors.New("is empty")
	case s[0] == '.':
		return fmt.Errorf("%.80q starts with a dot", s)
	case strings.Contains(s, ".."):
		return fmt.Errorf("%.80q contains two dots in a row", s)
	case strings.ContainsAny(s, "/\\\x00"):
		return fmt.Errorf("%.80q contains a path separator", s)
	}
	return nil
}

// fileName checks that a name is one plain path component.
func fileName(s string) error {
	switch {
	case s == "" || s == "." || s == "..":
		return fmt.Errorf("%q is no file name", s)
	case strings.ContainsAny(s, "/\\\x00"):
		return fmt.Errorf("%.80q must be a file name without a folder", s)
	}
	return nil
}

// Base returns what m says about the base: a full manifest or nothing.
func (m AdapterManifest) Base() Binding {
	return fullBinding(KindAdapterManifest, "$."+baseMember, m.Shards)
}

// Identities returns the other identities that m records.
func (m AdapterManifest) Identities() Identities {
	return Identities{ModelConfig: m.ModelConfig, TrainingTemplate: m.TrainingTemplate}.orElse(m.Provenance.Identities())
}

// CheckFiles compares m with the digests of the files beside it, by name. Every file that m names must be there and
// match, and what a loader would read instead of one must not be there: it goes by the usual names, whatever m says. The
// error is an *Error of rule RuleFileMissing, RuleFileDigest or RuleFileExtra.
func (m AdapterManifest) CheckFiles(files map[string]identity.Digest) error {
	if err := m.checkUsual(files); err != nil {
		return err
	}
	receipt := m.Files.Receipt
	if _, ok := files[ReceiptFile]; receipt == "" && ok {
		receipt = ReceiptFile // which is where Kiln looks for it
	}
	for _, f := range []struct {
		name, path string
		want       identity.Digest
		named      bool
	}{
		{m.Files.Config, "$.config_hash", m.Config, true},
		{m.Files.Model, "$.safetensors_hash", m.Weights, true},
		{receipt, "$.receipt_hash", m.Receipt, receipt != ""},
	} {
		got, ok := files[f.name]
		switch {
		case !f.named:
		case !ok:
			return &Error{Kind: KindAdapterManifest, Rule: RuleFileMissing, Path: "$.files",
				Msg: fmt.Sprintf("the file %q is not there", f.name)}
		case f.want.IsZero() && f.name == receipt: // not recorded
		case got != f.want:
			return &Error{Kind: KindAdapterManifest, Rule: RuleFileDigest, Path: f.path,
				Msg:  fmt.Sprintf("is %v, but the file %q has %v", f.want, f.name, got),
				Said: f.want.String(), Other: got.String(), OtherAt: f.name}
		}
	}
	return nil
}

// checkUsual refuses files that a loader reads and m does not name.
func (m AdapterManifest) checkUsual(files map[string]identity.Digest) error {
	for _, f := range []struct {
		member, named string
		usual         []string
	}{
		{"adapter_model", m.Files.Model, []string{AdapterWeightsFile, adapterPickleFile}},
		{"adapter_config", m.Files.Config, []string{AdapterConfigFile}},
	} {
		if f.named == f.usual[0] {
			continue
		}
		for _, name := range f.usual {
			if _, there := files[name]; there && name != f.named {
				return &Error{Kind: KindAdapterManifest, Rule: RuleFileExtra, Path: "$.files." + f.member,
					Msg: fmt.Sprintf("is %.80q, but there is a file %q, which is what loaders read", f.named, name)}
			}
		}
	}
	return nil
}

// adapterPickleFile is what PEFT loads where there is no AdapterWeightsFile.
const adapterPickleFile = "adapter_model.bin"

// CheckReceipt compares m with the receipt pushed beside it: its bytes, the base, the weights of the adapter, and
// that the run succeeded. Only what both record is compared. The error is an *Error of rule RuleFileDigest, RuleBaseConflict or RuleAgreement.
func (m AdapterManifest) CheckReceipt(r Receipt) error {
	if !m.Receipt.IsZero() && m.Receipt != r.Digest {
		return &Error{Kind: KindAdapterManifest, Rule: RuleFileDigest, Path: "$.receipt_hash",
			Msg:  fmt.Sprintf("is %v, but the receipt has %v", m.Receipt, r.Digest),
			Said: m.Receipt.String(), Other: r.Digest.String(), OtherAt: string(KindReceipt)}
	}
	if r.Status == StatusFailed { // Kiln writes m for a run that succeeded only
		return &Error{Kind: KindAdapterManifest, Rule: RuleAgreement, Path: "$.receipt_hash",
			Msg: "is of the receipt of a run that failed: such a run has no adapter manifest"}
	}
	if _, err := Join(r.Base(), m.Base()); err != nil {
		return err
	}
	if out := r.Output.Weights; !out.IsZero() && out != m.Weights {
		return &Error{Kind: KindAdapterManifest, Rule: RuleAgreement, Path: "$.safetensors_hash",
			Msg:  fmt.Sprintf("is %v, but the %s $.adapters.output.adapter_model_sha256 is %v", m.Weights, KindReceipt, out),
			Said: m.Weights.String(), Other: out.String(),
			OtherAt: string(KindReceipt) + " $.adapters.output.adapter_model_sha256"}
	}
	return nil
}

// Document gives the text of m: compact, members in Kiln's order. Optional members that m does not record are null or
// left out, as Kiln does. A manifest that ParseAdapterManifest would refuse is an error. Equal manifests give equal
// texts.
func (m AdapterManifest) Document() ([]byte, error) {
	b := append([]byte(`{"schema_version":1`), `,"manifest_type":"`+adapterManifestType+`"`...)
	b = appendText(b, "adapter_name", m.Name)
	b = appendText(b, "safetensors_hash", m.Weights.String())
	b = appendText(b, "config_hash", m.Config.String())
	b = appendNullable(b, "receipt_hash", digestText(m.Receipt))
	b = appendNullable(b, "parent_adapter", m.Parent)
	b = appendNullable(b, "model_config_hash", digestText(m.ModelConfig))
	if !m.TrainingTemplate.IsZero() {
		b = appendText(b, "training_chat_template_hash", m.TrainingTemplate.String())
	}
	if !m.Shards.Aggregate.IsZero() {
		shards, err := m.Shards.MarshalJSON()
		if err != nil {
			return nil, fmt.Errorf("write adapter manifest: %w", err)
		}
		b = append(appendMember(b, baseMember), shards...)
	}
	if m.Provenance != nil {
		b = append(appendMember(b, "execution_provenance"), m.Provenance.Raw...)
	}
	if m.Precision != nil {
		b = append(appendMember(b, "training_precision"), m.Precision.Raw...)
	}
	b = appendNullable(b, "kiln_commit", m.KilnCommit)
	b = appendNullable(b, "training_data_hash", digestText(m.TrainingData))
	b = appendNullable(b, "training_data_source", m.TrainingDataSource)
	b = appendNullable(b, "training_data_path", m.TrainingDataPath)
	if m.OpenEnv != nil {
		b = append(appendMember(b, "openenv_training_data"), m.OpenEnv...)
	}
	b = append(appendMember(b, "files"), `{"adapter_model":`...)
	b = appendText(appendString(b, m.Files.Model), "adapter_config", m.Files.Config)
	b = append(appendNullable(b, "train_receipt", m.Files.Receipt), "}}"...)
	if _, err := ParseAdapterManifest(b); err != nil {
		return nil, err
	}
	return b, nil
}

// NewAdapterManifest returns the manifest of an adapter with the usual file names, whichever trainer made it. A zero
// receipt means that there is none. Fill in what else is known, then call Document.
func NewAdapterManifest(name string, weights, config, receipt identity.Digest, base identity.Manifest) AdapterManifest {
	m := AdapterManifest{Name: name, Weights: weights, Config: config, Receipt: receipt, Shards: base,
		Files: AdapterFiles{Model: AdapterWeightsFile, Config: AdapterConfigFile}}
	if !receipt.IsZero() {
		m.Files.Receipt = ReceiptFile
	}
	return m
}

// AdapterConfig is what listings show of a PEFT adapter_config.json. Nothing of it is an identity.
type AdapterConfig struct {
	Type          string   // peft_type
	Rank          *uint64  // r; nil: not recorded
	Alpha         *float64 // lora_alpha; nil: not recorded
	TargetModules []string // a single text stands as one entry: a pattern, or a word such as all-linear
	SavedModules  []string // modules_to_save: layers that are in the adapter whole
	DoRA          bool     // use_dora
	BaseName      string   // base_model_name_or_path: free text for people, never to be used as identity
}

// ParseAdapterConfig reads a PEFT adapter_config.json. Members that it does not know are ignored. The error is an
// *Error.
func ParseAdapterConfig(data []byte) (AdapterConfig, error) {
	var c AdapterConfig
	var alpha float64
	var hasAlpha bool
	err := read(KindAdapterConfig, MaxDocument, data, func(r reader) error {
		return r.lenient(
			optional(r.text("peft_type", &c.Type)),
			r.whole("r", &c.Rank),
			seen(optional(r.float("lora_alpha", &alpha)), &hasAlpha),
			optional(r.words("target_modules", &c.TargetModules)),
			optional(r.words("modules_to_save", &c.SavedModules)),
			optional(r.boolean("use_dora", &c.DoRA)),
			optional(r.text("base_model_name_or_path", &c.BaseName)))
	})
	if err != nil {
		return AdapterConfig{}, err
	}
	if hasAlpha {
		c.Alpha = &alpha
	}
	return c, nil
}

// words is a list of strings, or one string.
func (r reader) words(name string, to *[]string) field {
	one := func(int) error {
		s, err := r.String()
		*to = append(*to, s)
		return err
	}
	return field{Name: name, Read: func() error {
		if r.Kind() == strictjson.String {
			return one(0)
		}
		return r.Array(one)
	}}
}
