package api

import (
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Facts are what the documents inside an artifact say about it, read when its manifest was pushed. The registry checked
// the documents against each other and against the bytes of the files that they name; beyond that they are claims of
// whoever wrote them. Names are labels, never identities. A member that the artifact does not record is absent.
type Facts struct {
	// Name is what the artifact calls itself: of an adapter, checkpoint or receipt the adapter's name, of an eval its id.
	Name string `json:"name,omitempty"`
	// Legacy: it is a Kiln record without a full shard manifest of its base, which is kept as an archive only.
	Legacy bool   `json:"legacy,omitempty"`
	Source string `json:"source,omitempty"` // file and JSON path of the strongest claim about the base
	// Conflict: the subject that the artifact refers to, in its repository, is of another base than the artifact itself
	// names, and came later; or a bind statement there, which came earlier, names another one. In the other order the
	// later of the two was refused. Nothing binds the artifact to that other base.
	Conflict *Conflict `json:"conflict,omitempty"`
	Created  string    `json:"recorded_at,omitempty"`
	// Packed, of a base: the first 8 layers that are no files as they are, by name or as layers[N]: archives, what is
	// compressed, what has no name.
	Packed []string `json:"packed,omitempty"`

	Adapter    *AdapterFacts    `json:"adapter,omitempty"`
	Checkpoint *CheckpointFacts `json:"checkpoint,omitempty"`
	Receipt    *ReceiptFacts    `json:"receipt,omitempty"`
	Eval       *EvalFacts       `json:"eval,omitempty"`
	Statement  *StatementFacts  `json:"statement,omitempty"`

	// Identities are the other things that the result depends on and that a base's shards do not prove, as text, by the
	// names below.
	Identities map[string]string `json:"identities,omitempty"`
}

// The names of Facts.Identities.
const (
	IdentityModelConfig      = "model_config"
	IdentityTokenizer        = "tokenizer"
	IdentityTokenizerConfig  = "tokenizer_config"
	IdentityChatTemplate     = "chat_template"
	IdentityTrainingTemplate = "training_chat_template"
	IdentityProvenance       = "execution_provenance"
	IdentityTrainingData     = "training_data"
	IdentityPrecision        = "training_precision"
)

// AdapterFacts are those of an adapter_manifest.json or, where there is none, of an adapter_config.json.
type AdapterFacts struct {
	Weights  identity.Digest `json:"weights_sha256,omitzero"` // of adapter_model.safetensors
	Config   identity.Digest `json:"config_sha256,omitzero"`
	Receipt  identity.Digest `json:"receipt_sha256,omitzero"`
	Parent   string          `json:"parent_adapter,omitempty"` // name or path of the adapter that training began from
	BaseText string          `json:"base_model_name_or_path,omitempty"`
	Type     string          `json:"peft_type,omitempty"`
	Rank     int             `json:"rank,omitempty"`
	DoRA     bool            `json:"use_dora,omitempty"`        // some servers can't serve those
	Modules  []string        `json:"target_modules,omitempty"`  // the first 32
	Saved    []string        `json:"modules_to_save,omitempty"` // the first 32: layers that are in it whole
	Stated   bool            `json:"kiln_manifest,omitempty"`   // it has an adapter_manifest.json
}

// CheckpointFacts are those of a checkpoint_manifest.json.
type CheckpointFacts struct {
	ID           string          `json:"checkpoint_id"`
	TrainingKind string          `json:"training_kind"`
	Step         uint64          `json:"global_step"`
	Steps        uint64          `json:"total_steps"`
	Weights      identity.Digest `json:"adapter_parameters_sha256,omitzero"`
}

// ReceiptFacts are those of a train_receipt.json.
type ReceiptFacts struct {
	Digest identity.Digest `json:"receipt_sha256,omitzero"` // of the document
	Status string          `json:"status"`                  // success or failed
	Mode   string          `json:"mode,omitempty"`
	Output identity.Digest `json:"output_weights_sha256,omitzero"` // of the adapter that came out
	Start  identity.Digest `json:"base_weights_sha256,omitzero"`   // of the adapter that training began from
}

// EvalFacts are those of an eval archive, an eval result or the rows of an export.
type EvalFacts struct {
	State    string   `json:"state,omitempty"`
	Suite    string   `json:"suite,omitempty"`        // of a job; the runs have their own
	Adapters []string `json:"adapters,omitempty"`     // the first 64 names; empty text: the base alone
	Rows     int      `json:"rows,omitempty"`         // of an export of outcomes
	Unbound  int      `json:"rows_unbound,omitempty"` // of those, the ones that hold no full manifest of their base
	// Bases are those that the rows of an export name, in the order of their first rows, where there are several: at most
	// 16. The artifact is listed under each.
	Bases   []EvalBase `json:"bases,omitempty"`
	Runs    []EvalRun  `json:"runs,omitempty"`
	Omitted int        `json:"runs_omitted,omitempty"` // runs beyond the 64 that are kept
}

// EvalBase is one base of several that the rows of an export name.
type EvalBase struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256"`
	Rows      int                `json:"rows"`       // that name it
	Line      int                `json:"first_line"` // of the first of these, from 1
}

// EvalRun is one suite on one model.
type EvalRun struct {
	Suite          string    `json:"suite"`
	SuiteHash      string    `json:"suite_hash,omitempty"`
	Adapter        string    `json:"adapter,omitempty"` // name; empty: the base alone
	AdapterContent string    `json:"adapter_content_sha256,omitempty"`
	Aggregation    string    `json:"aggregation,omitempty"` // how tries make a verdict: single, mean_at_k, pass_at_k, majority_at_k
	K              int       `json:"k,omitempty"`           // tries at one example
	Examples       int       `json:"examples"`
	Passed         int       `json:"passed"`
	Accuracy       *float64  `json:"accuracy,omitempty"`        // passed of examples; absent: it is not recorded how many passed
	Stated         *float64  `json:"accuracy_stated,omitempty"` // by the document, where it is none or another than that
	Low            *float64  `json:"accuracy_low,omitempty"`
	High           *float64  `json:"accuracy_high,omitempty"` // Wilson score interval, 95 %
	Seed           string    `json:"seed,omitempty"`
	Finished       time.Time `json:"finished_at,omitzero"`
}

// StatementFacts are those of a statement that someone made about other content.
type StatementFacts struct {
	Type   string             `json:"type"`            // StatementBind or StatementDerived
	Target identity.Digest    `json:"target,omitzero"` // the manifest that it is about; of derived-from, unless To says it
	Base   identity.Aggregate `json:"base,omitzero"`   // of a bind: the base that it is bound to
	To     identity.Aggregate `json:"to,omitzero"`     // of derived-from: the base that was made
	// From and FromArtifacts are what it was made from, by base and by manifest: several only of a merge.
	From          []identity.Aggregate `json:"from,omitempty"`
	FromArtifacts []identity.Digest    `json:"from_artifacts,omitempty"`
	How           string               `json:"how,omitempty"` // quantize, merge or finetune
	Tool          string               `json:"tool,omitempty"`
	Reason        string               `json:"reason,omitempty"`
	By            string               `json:"by,omitempty"` // who says so, as they call themselves
}

// The types of statements.
const (
	StatementBind    = "bind"
	StatementDerived = "derived-from"
)

// Link is one edge of a lineage.
type Link struct {
	Relation  string             `json:"relation"`                  // one of the relations below
	Weak      bool               `json:"weak,omitempty"`            // by name only: another artifact may be meant
	Name      string             `json:"name,omitempty"`            // the name, where the link is one by name
	Digest    identity.Digest    `json:"digest,omitzero"`           // the content that is named, or of a child its manifest
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"` // the base that is named, where it is one
	Statement identity.Digest    `json:"statement,omitzero"`        // the manifest of the statement that says so
	How       string             `json:"how,omitempty"`             // of derived_from: quantize, merge or finetune
	Base      identity.Aggregate `json:"base,omitzero"`             // to which a bind statement binds
	By        string             `json:"by,omitempty"`              // who makes the statement, as they call themselves
	Reason    string             `json:"reason,omitempty"`          // that the statement gives
	Inside    bool               `json:"inside,omitempty"`          // what is named is a file of the one that names it
	Artifact  *Artifact          `json:"artifact,omitempty"`        // absent: no artifact here, as far as the caller may see
}

// The relations of a lineage, from the one that names to the one that is named.
const (
	RelationParent    = "parent_adapter" // adapter or receipt -> the adapter that training began from
	RelationReceipt   = "receipt"        // adapter -> its receipt
	RelationOutput    = "output"         // receipt -> the adapter that came out
	RelationAdapter   = "adapter"        // checkpoint or eval -> the adapter
	RelationStatement = "statement"      // statement -> what it is about
	RelationDerived   = "derived_from"   // base -> base
	RelationContent   = "content"        // adapter or receipt -> its own bytes; of the index, no answer has it
)

// Lineage is the answer of GET /v1/artifacts/{digest}/lineage.
type Lineage struct {
	Artifact  Artifact  `json:"artifact"`
	Bindings  []Binding `json:"bindings,omitempty"` // those of Artifact
	Parents   []Link    `json:"parents"`            // what it names; empty on later pages of Children
	Children  []Link    `json:"children"`           // what names it
	NotProven []string  `json:"not_proven"`
	Next      string    `json:"next,omitempty"` // of Children
	// NextParents is passed as after, too: for the next page of Parents, without Children. It is there where many
	// statements say from what a base was made.
	NextParents string `json:"next_parents,omitempty"`
}
