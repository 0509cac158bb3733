package documents

import (
	"fmt"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Outcomes of a training run, as a receipt states them.
const (
	StatusSuccess = "success"
	StatusFailed  = "failed"
)

// Receipt is what is read of a train_receipt.json, the audit record of one training run. An empty text and a zero
// digest mean that the document does not record it.
type Receipt struct {
	Digest             identity.Digest // of the whole text, which is what receipt_hash names
	Name               string          // adapter_name
	Produced           string          // produced_at, RFC 3339
	Status             string          // StatusSuccess or StatusFailed
	FailureReason      string
	FailureMessage     string
	KilnCommit         string
	KilnVersion        string // kiln.package_version
	ModelPath          string
	ModelConfig        identity.Digest
	Shards             identity.Manifest // model.base_weight_shard_manifest
	Tokenizer          identity.Digest   // tokenizer.config_hash
	TokenizerConfig    identity.Digest   // tokenizer.tokenizer_config_hash
	ChatTemplate       identity.Digest
	TrainingTemplate   identity.Digest
	Parent             AdapterFile // adapters.base: the adapter that training started from
	Output             AdapterFile // adapters.output
	TrainingData       identity.Digest
	TrainingDataSource string
	TrainingDataPath   string
	Mode               string      // hyperparameters.mode
	Seed               *uint64     // hyperparameters.seed; nil: not recorded
	Provenance         *Provenance // runtime.execution_provenance; nil: not recorded
	Precision          *Precision  // runtime.training_precision; nil: not recorded
}

// AdapterFile is the weights file of an adapter, as a receipt records it.
type AdapterFile struct {
	Path    string // on the machine that trained
	Weights identity.Digest
	Size    *uint64 // nil: not recorded
}

// ParseReceipt reads a train_receipt.json. Members that it does not know are ignored. The error is an *Error.
func ParseReceipt(data []byte) (Receipt, error) {
	return ParseReceiptBeside(data, identity.Sum(data), nil)
}

// ParseReceiptBeside is ParseReceipt for a text whose digest is known, and that lies beside an adapter manifest; nil:
// beside none. A shard manifest that has the same text in both is not read again. What it returns is the same.
func ParseReceiptBeside(data []byte, digest identity.Digest, m *AdapterManifest) (Receipt, error) {
	if m == nil {
		m = &AdapterManifest{}
	}
	r := Receipt{Digest: digest}
	if err := read(KindReceipt, MaxDocument, data, func(in reader) error { return r.read(in, m) }); err != nil {
		return Receipt{}, err
	}
	return r, nil
}

func (m *Receipt) read(r reader, beside *AdapterManifest) error {
	var configTemplate identity.Digest
	var reason, message bool
	err := r.lenient(slices.Concat(
		[]field{
			r.version(1),
			r.constant("receipt_type", "kiln_train_receipt"),
			r.checked("adapter_name", RuleName, &m.Name, notBlank),
			r.checked("produced_at", RuleTimestamp, &m.Produced, timestamp),
			r.oneOf("status", RuleValue, &m.Status, StatusSuccess, StatusFailed),
			seen(optional(r.text("failure_reason", &m.FailureReason)), &reason),
			seen(optional(r.text("failure_message", &m.FailureMessage)), &message),
			optional(r.in("config_hashes", optional(r.digest("training_chat_template_hash", &configTemplate)))),
			r.boolean("no_policy_loss", new(bool)),
			r.list("lora_delta_norms", func(int) error { return r.Skip() }),
			r.skip("config"),
		},
		m.sections(r, beside), r.objects("echo", "data", "rewards", "token_counts"))...)
	if err != nil {
		return err
	}
	if err := m.checkStatus(reason, message); err != nil {
		return err
	}
	return agree(
		named{"tokenizer.training_chat_template_hash", m.TrainingTemplate},
		named{"config_hashes.training_chat_template_hash", configTemplate},
		m.Provenance.trainingTemplate("runtime.execution_provenance"))
}

// sections are the objects of a receipt of which something is read.
func (m *Receipt) sections(r reader, beside *AdapterManifest) []field {
	return []field{
		r.in("kiln",
			optional(r.text("git_commit", &m.KilnCommit)),
			r.text("package_version", &m.KilnVersion)),
		r.in("model",
			optional(r.text("path", &m.ModelPath)),
			optional(r.digest("config_hash", &m.ModelConfig)),
			r.baseBeside(&m.Shards, beside.Shards, beside.shards)),
		r.in("tokenizer",
			optional(r.digest("config_hash", &m.Tokenizer)),
			optional(r.digest("tokenizer_config_hash", &m.TokenizerConfig)),
			optional(r.digest("chat_template_hash", &m.ChatTemplate)),
			optional(r.digest("training_chat_template_hash", &m.TrainingTemplate))),
		r.in("adapters", r.adapterFile("base", &m.Parent), r.adapterFile("output", &m.Output)),
		r.in("training_data",
			r.text("source", &m.TrainingDataSource),
			optional(r.text("path", &m.TrainingDataPath)),
			optional(r.digest("sha256", &m.TrainingData)),
			optional(r.openEnv("openenv", new([]byte)))),
		r.in("hyperparameters",
			r.text("mode", &m.Mode),
			r.whole("seed", &m.Seed)),
		r.in("runtime",
			r.provenanceField(&m.Provenance),
			optional(r.precisionField("training_precision", &m.Precision))),
	}
}

func (r reader) adapterFile(name string, to *AdapterFile) field {
	return r.in(name,
		optional(r.text("path", &to.Path)),
		optional(r.digest("adapter_model_sha256", &to.Weights)),
		r.whole("adapter_model_bytes", &to.Size))
}

// objects are members that must be objects and are not read further.
func (r reader) objects(names ...string) []field {
	var fields []field
	for _, n := range names {
		fields = append(fields, r.object(n, new([]byte)))
	}
	return fields
}

// checkStatus checks that the outcome and its explanation fit. reason and message say what the receipt has.
func (m *Receipt) checkStatus(reason, message bool) error {
	switch {
	case m.Status == StatusFailed:
		if err := notBlank(m.FailureReason); err != nil {
			return fault("failure_reason", RuleAgreement, "a failed run must say why: %v", err)
		}
	case reason:
		return fault("failure_reason", RuleAgreement, "is %.80q, but $.status is %q", m.FailureReason, m.Status)
	case message:
		return fault("failure_message", RuleAgreement, "is %.80q, but $.status is %q", m.FailureMessage, m.Status)
	}
	return nil
}

// Base returns what m says about the base: a full manifest or nothing.
func (m Receipt) Base() Binding { return fullBinding(KindReceipt, "$.model."+baseMember, m.Shards) }

// Identities returns the other identities that m records.
func (m Receipt) Identities() Identities {
	return Identities{ModelConfig: m.ModelConfig, TokenizerConfig: m.TokenizerConfig, ChatTemplate: m.ChatTemplate,
		TrainingTemplate: m.TrainingTemplate}.orElse(m.Provenance.Identities())
}

// StampReceipt puts the full manifest of its base into a receipt, at the end of $.model, and changes no other byte; a
// null in its place is replaced. A document that holds the manifest of the same base is returned as it is. One that
// holds that of another base is an *Error of rule RuleBaseConflict, one that ParseReceipt refuses that *Error. The
// digest of a stamped document is another one: whatever names it must be written anew.
func StampReceipt(data []byte, base identity.Manifest) ([]byte, error) {
	return stamp(KindReceipt, ParseReceipt, data, base, "model")
}

// StampEval is StampReceipt for an eval job or result; the manifest goes to the end of the document.
func StampEval(data []byte, base identity.Manifest) ([]byte, error) {
	return stamp(KindEval, ParseEval, data, base)
}

// StampAdapterManifest is StampReceipt for an adapter manifest; the base goes to the end of the document.
func StampAdapterManifest(data []byte, base identity.Manifest) ([]byte, error) {
	return stamp(KindAdapterManifest, ParseAdapterManifest, data, base)
}

func stamp[T interface{ Base() Binding }](k Kind, parse func([]byte) (T, error), data []byte, base identity.Manifest,
	path ...string) ([]byte, error) {
	doc, err := parse(data)
	if err != nil {
		return nil, err
	}
	shards, err := base.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("stamp %s: %w", k, err)
	}
	has := doc.Base()
	given := Binding{Evidence: EvidenceAsserted, Aggregate: base.Aggregate, Kind: k, Path: has.Path}
	if _, err := Join(has, given); err != nil {
		return nil, err
	}
	if has.Evidence == EvidenceDocument {
		return data, nil
	}
	var at gap
	if err := read(k, MaxEval, data, func(r reader) error { return at.find(r, path) }); err != nil {
		return nil, err
	}
	if !at.null {
		shards = slices.Concat([]byte(at.comma+`"`+baseMember+`":`), shards)
	}
	out := slices.Concat(data[:at.from], shards, data[at.to:])
	if _, err := parse(out); err != nil {
		return nil, err
	}
	return out, nil
}

// gap is where a manifest goes in.
type gap struct {
	from, to int
	comma    string // what separates it from the member before
	null     bool   // the member is there, and null
}

// find finds the gap in the object at path.
func (g *gap) find(r reader, path []string) error {
	g.from = r.Offset() + 1 // after the brace, if the object is empty
	err := r.Object(func(name string) error {
		switch {
		case len(path) > 0 && name == path[0]:
			return g.find(r, path[1:])
		case len(path) > 0:
			return r.Skip()
		}
		at := r.Offset()
		null := name == baseMember && r.Kind() == strictjson.Null
		text, err := r.Raw()
		if !g.null {
			g.from, g.to, g.comma, g.null = at+len(text), at+len(text), ",", null
		}
		if null {
			g.from = at
		}
		return err
	})
	if g.to == 0 {
		g.to = g.from
	}
	return err
}
