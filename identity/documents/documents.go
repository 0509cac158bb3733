// Package documents reads the Kiln documents that carry a base identity: adapter manifest, training receipt, checkpoint
// manifest, eval job and result, outcome rows, execution provenance; and this project's own statements.
//
// A reader is as strict as Kiln is, and stricter where a document could mean two things: member names count once and in
// exact letter case, at every depth; integers never pass through a float, and no number is beyond the range of one;
// digests are well-formed. Members that a
// lenient document may have beside the known ones are checked as JSON and otherwise ignored. An optional member that is
// null counts as absent. Nothing is ever written back: a parsed value is a view of the bytes as they were pushed, and
// its raw members are parts of them, not copies.
//
// A zero Digest or Aggregate in a parsed value means that the document does not record it.
//
// The package is pure: it reads no file, opens no connection and asks for no time. Values are safe for concurrent use
// as long as nobody changes them or the bytes they were read from.
package documents

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Names of the files that the documents stand in.
const (
	AdapterManifestFile = "adapter_manifest.json"
	AdapterConfigFile   = "adapter_config.json"
	AdapterWeightsFile  = "adapter_model.safetensors"
	ReceiptFile         = "train_receipt.json"
	CheckpointFile      = "checkpoint_manifest.json"
)

// Limits on a text, in bytes.
const (
	MaxDocument = identity.MaxDocument // every document but an eval; also one row of outcomes. Kiln's for a checkpoint
	MaxEval     = 64 << 20             // an eval job or result, which holds every completion; also a file of outcome rows
)

// Kind names a document in messages.
type Kind string

// The kinds of documents.
const (
	KindAdapterManifest Kind = "adapter manifest"
	KindAdapterConfig   Kind = "adapter config"
	KindReceipt         Kind = "train receipt"
	KindCheckpoint      Kind = "checkpoint manifest"
	KindEval            Kind = "eval" // a job or a result
	KindOutcomes        Kind = "eval outcomes"
	KindProvenance      Kind = "execution provenance"
	KindPrecision       Kind = "training precision"
	KindStatement       Kind = "statement"
)

// Rules that an Error names, beside those of the JSON reader (see identity.Error) and of the shard manifest, which are
// named as package identity does.
const (
	RuleInputSize     = identity.RuleInputSize
	RuleSchemaVersion = identity.RuleSchemaVersion
	RuleDigestForm    = identity.RuleDigestForm
	RuleDocumentType  = "document-type" // manifest_type, receipt_type and their like
	RuleValue         = "value"         // none of the values that the format allows
	RuleText          = "text"          // blank, too long, or with characters that the format forbids
	RuleName          = "name"          // an identifier, adapter name or file name that is not allowed
	RulePath          = "path"          // a file path that is not plain and relative
	RuleTimestamp     = "timestamp"     // not RFC 3339
	RuleCount         = "count"         // too many or too few entries
	RuleOrder         = "order"         // entries that must ascend do not
	RuleAgreement     = "agreement"     // two members of one document that must agree do not
	RulePermutation   = "permutation"   // data_order is no permutation of the items
	RuleRole          = "role"          // a state file that is not listed, or listed in another role
	RuleShape         = "shape"         // neither an eval job nor an eval result, or both
	RuleSelfDigest    = "self-digest"   // the digest that a document gives of itself is not its digest
	RuleFileMissing   = "file-missing"  // a file that a document names is not there
	RuleFileExtra     = "file-extra"    // a file that the document does not name
	RuleFileKind      = "file-kind"     // a link or device in place of a file, or a file with a second name
	RuleFileSize      = "file-size"
	RuleFileDigest    = "file-digest"
	RuleBaseConflict  = "base-conflict" // two claims about the base, and they differ
	RuleBases         = "bases"         // rows of too many bases in a file
)

// hints say what to do about a broken rule.
var hints = map[string]string{
	strictjson.RuleSyntax:       "the text is damaged or was edited by hand: write it anew with its tool",
	strictjson.RuleUTF8:         "write it anew as UTF-8",
	strictjson.RuleDuplicate:    "keep one of the two",
	strictjson.RuleTrailing:     "remove what follows the document",
	strictjson.RuleDepth:        "flatten the value",
	strictjson.RuleUnknownField: "this format allows no other member: remove it, or use the version that has it",
	strictjson.RuleExactName:    "spell it as the format does",
	strictjson.RuleRequired:     "write the document anew with its tool",
	strictjson.RuleInteger:      "write it as plain digits",
	strictjson.RuleF64:          "write a number that a float64 can hold, or null",
	RuleInputSize:               "no tool writes one this large: check that it is the right file",
	RuleSchemaVersion:           "write it anew with a version that is read",
	RuleDocumentType:            "check that it is the right file",
	RuleShape:                   "take the archived job, or the answer of GET /v1/eval/jobs/{id}",
	RuleDigestForm:              "give the digest in the form of this member",
	RuleAgreement:               "one of the two was changed: take the document as its tool wrote it",
	RuleSelfDigest:              "the document was changed after it was written: take the original",
	RuleFileMissing:             "take every file that the document names",
	RuleFileExtra:               "take only the files that the document names",
	RuleFileKind:                "put an independent copy of the file in its place",
	RuleFileSize:                "the file was cut off or replaced: take the original",
	RuleFileDigest:              "the file was changed after the document was written: take the original",
	RuleBaseConflict:            "name the base that it was made from",
	RuleBases:                   "split the file by base",
}

// defaultHint is the hint of all other rules.
const defaultHint = "take the document as its tool wrote it"

// Error says why a document is refused: by which rule, at which place, with which values, and what to do.
type Error struct {
	Kind Kind
	Rule string // one of the rules above, or of package identity
	Path string // of the value, such as $.model.config_hash; "$" is the document itself
	Msg  string // what is wrong with it, with the values
	Err  error  // what the JSON reader said, if it was that
	// Where the value at Path and another one disagree, Said is that value, and Other the other one, which is at OtherAt:
	// a document with a path, or a file. Texts; all empty for every other fault.
	Said, Other, OtherAt string
}

// Error gives one line: document, place, fault, hint and rule.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s: %s; %s (%s)", e.Kind, e.Path, e.Msg, e.Hint(), e.Rule)
}

// Hint says what to do about it.
func (e *Error) Hint() string {
	if h, ok := hints[e.Rule]; ok {
		return h
	}
	return defaultHint
}

// Unwrap returns the error of the JSON reader, if any.
func (e *Error) Unwrap() error { return e.Err }

// Evidence says what a document proves about its base. The values are those of the registry's answers.
type Evidence string

// The kinds of evidence, strongest first.
const (
	EvidenceDocument      Evidence = "document"       // a valid full shard manifest inside the document
	EvidenceAsserted      Evidence = "asserted"       // a statement that somebody made about the artifact
	EvidenceAggregateOnly Evidence = "aggregate-only" // a bare aggregate, which nothing here can check
	EvidenceNone          Evidence = "none"
)

// strength orders the kinds of evidence.
func (e Evidence) strength() int {
	switch e {
	case EvidenceDocument:
		return 3
	case EvidenceAsserted:
		return 2
	case EvidenceAggregateOnly:
		return 1
	}
	return 0
}

// Binding is what one document says about the base that its artifact was made from.
type Binding struct {
	Evidence  Evidence
	Aggregate identity.Aggregate // zero: none
	Manifest  identity.Manifest  // the full manifest; zero unless the document holds one
	Kind      Kind               // the document that says so
	Path      string             // where in it, such as $.model.base_weight_shard_manifest
}

// Where names the place of the claim on one line.
func (b Binding) Where() string { return string(b.Kind) + " " + b.Path }

// fullBinding is the binding of a document that holds m, or none if m is zero.
func fullBinding(k Kind, path string, m identity.Manifest) Binding {
	b := Binding{Evidence: EvidenceNone, Kind: k, Path: path}
	if !m.Aggregate.IsZero() {
		b.Evidence, b.Aggregate, b.Manifest = EvidenceDocument, m.Aggregate, m
	}
	return b
}

// Join returns the strongest of several bindings of one artifact; without one, the zero of Evidence none. Two that name
// different bases are an *Error of rule RuleBaseConflict with both values and both places.
func Join(bindings ...Binding) (Binding, error) {
	best := Binding{Evidence: EvidenceNone}
	for _, b := range bindings {
		if !b.Aggregate.IsZero() && !best.Aggregate.IsZero() && b.Aggregate != best.Aggregate {
			return Binding{}, &Error{Kind: b.Kind, Rule: RuleBaseConflict, Path: b.Path, Msg: fmt.Sprintf(
				"the base is %v, but the %s names %v", b.Aggregate, best.Where(), best.Aggregate),
				Said: b.Aggregate.String(), Other: best.Aggregate.String(), OtherAt: best.Where()}
		}
		if b.Evidence.strength() > best.Evidence.strength() {
			best = b
		}
	}
	return best, nil
}

// Identities are the other identities that a document records, which a base manifest does not prove. Two documents
// agree on one if both record it with the same value. Kiln writes each by one recipe, wherever it stands.
type Identities struct {
	ModelConfig      identity.Digest
	TokenizerVocab   identity.Digest
	TokenizerConfig  identity.Digest
	ChatTemplate     identity.Digest // for inference
	TrainingTemplate identity.Digest // chat template for training
	Provenance       identity.Digest // provenance_sha256: backend, build, precision, kernels, configuration
}

// orElse fills what i does not record from o.
func (i Identities) orElse(o Identities) Identities {
	fill := func(to *identity.Digest, from identity.Digest) {
		if to.IsZero() {
			*to = from
		}
	}
	fill(&i.ModelConfig, o.ModelConfig)
	fill(&i.TokenizerVocab, o.TokenizerVocab)
	fill(&i.TokenizerConfig, o.TokenizerConfig)
	fill(&i.ChatTemplate, o.ChatTemplate)
	fill(&i.TrainingTemplate, o.TrainingTemplate)
	fill(&i.Provenance, o.Provenance)
	return i
}

// Read reads one JSON document of kind k with document, which reads its one value. Every error is an *Error. It is for
// formats of other packages that are read by the same rules.
func Read(k Kind, data []byte, document func(*strictjson.Reader) error) error {
	return read(k, MaxDocument, data, func(r reader) error { return document(r.Reader) })
}

func read(k Kind, limit int, data []byte, document func(reader) error) error {
	if len(data) > limit {
		return &Error{Kind: k, Rule: RuleInputSize, Path: "$",
			Msg: fmt.Sprintf("%d bytes, at most %d are read", len(data), limit)}
	}
	err := strictjson.Read(data, func(r *strictjson.Reader) error {
		r.Finite()
		return document(reader{r, data})
	})
	if err != nil {
		return refusal(k, data, err)
	}
	return nil
}

// refusal turns the error of reading data into an *Error.
func refusal(k Kind, data []byte, err error) error {
	j, ok := errors.AsType[*strictjson.Error](err)
	if !ok {
		return &Error{Kind: k, Rule: strictjson.RuleSyntax, Path: "$", Msg: err.Error(), Err: err}
	}
	e := &Error{Kind: k, Rule: j.Rule, Path: "$", Msg: j.Msg, Err: err}
	switch {
	case j.Path == "":
	case j.Path[0] == '[':
		e.Path += j.Path
	default:
		e.Path += "." + j.Path
	}
	if n := len(e.Path); n > maxShownPath {
		e.Path = strings.ToValidUTF8(e.Path[:maxShownPath/2]+"..."+e.Path[n-maxShownPath/2:], "")
	}
	switch line, column := position(data, j.Offset); {
	case j.Offset < 0:
	case k == KindOutcomes: // a row is one line; which, the path says
		e.Msg += fmt.Sprintf(", at column %d", column)
	default:
		e.Msg += fmt.Sprintf(", at line %d, column %d", line, column)
	}
	return e
}

// maxShownPath is how much of a path an error shows, in bytes.
const maxShownPath = 300

// position counts from 1; columns are bytes.
func position(data []byte, offset int) (line, column int) {
	before := data[:max(0, min(offset, len(data)))]
	return 1 + bytes.Count(before, []byte("\n")), len(before) - bytes.LastIndexByte(before, '\n')
}
