package api

import (
	"encoding/json"

	"github.com/kiln-registry/kiln-registry/identity"
)

// NotProven are the things that a base manifest does not prove, as every answer about a base repeats.
var NotProven = identity.NotProven

// Derivation is a statement that one base was made from others, which explains why their bytes differ and makes them no
// more the same.
type Derivation struct {
	From       identity.Aggregate `json:"from"`
	To         identity.Aggregate `json:"to"`
	How        string             `json:"how"` // quantize, merge or finetune
	Tool       string             `json:"tool,omitempty"`
	Reason     string             `json:"reason,omitempty"`
	By         string             `json:"by,omitempty"` // who says so, as they call themselves
	Repository string             `json:"repository"`   // of the statement
	Statement  identity.Digest    `json:"statement"`    // its manifest
}

// EvalRow is a line of GET /v1/bases/{aggregate}/evals.jsonl: one run of an eval that used the base, or, of an eval
// without any, the eval. The last row of an eval with more than MaxEvalRuns has no run and says how many are left out.
type EvalRow struct {
	Repository string          `json:"repository"`
	Digest     identity.Digest `json:"digest"` // of the manifest
	Name       string          `json:"name,omitempty"`
	State      string          `json:"state,omitempty"`
	Rows       int             `json:"rows,omitempty"` // of an export of outcomes, those of this base
	Legacy     bool            `json:"legacy,omitempty"`
	Run        *EvalRun        `json:"run,omitempty"`
	Omitted    int             `json:"runs_omitted,omitempty"` // runs of the eval that no row has
	Binding    Binding         `json:"binding"`
	// Bindings are all those of the eval where there are several, as in an Artifact: if bind statements make them, it can't
	// be told which base it used, and Source says so in each.
	Bindings []Binding `json:"bindings,omitempty"`
	// Unavailable: the eval is damaged or missing here, and this is what was found when it was pushed.
	Unavailable bool `json:"document_unavailable,omitempty"`
	// Manifest is the full manifest of the base as the eval has it, else that of a base of this aggregate that is held
	// here; absent: neither.
	Manifest *identity.Manifest `json:"base_weight_shard_manifest,omitempty"`
	// ManifestOmitted: it has more than MaxRowShards shards, and stands in the first row of this eval on this page.
	ManifestOmitted bool     `json:"base_weight_shard_manifest_omitted,omitempty"`
	NotProven       []string `json:"not_proven"`
}

// Limits of the rows of evals.
const (
	MaxEvalRuns  = 1000 // runs of one eval
	MaxRowShards = 256  // shards of a manifest that every row repeats
)

// The questions of POST /v1/compatibility.
const (
	QuestionSameBase = "same_base_weights"
	QuestionAdapter  = "adapter_trained_from"
	QuestionEval     = "eval_used"
	QuestionResume   = "resume_exact"
)

// CompatibilityRequest is the body of POST /v1/compatibility.
type CompatibilityRequest struct {
	Question string `json:"question"`
	// Artifact is the adapter, eval or checkpoint: repository:tag or repository@digest of this registry, or the digest of
	// a manifest alone. For same_base_weights it is left out.
	Artifact string `json:"artifact,omitempty"`
	// Base is the base to compare with. An aggregate need not be held here.
	Base *Side `json:"base,omitempty"`
	// Other is the second base of same_base_weights.
	Other *Side `json:"other,omitempty"`
	// Run is the number of one run of an eval, from 0; absent: the eval as a whole.
	Run *int `json:"run,omitempty"`
	// Identities are the other identities of this side, by the names of Facts.Identities.
	Identities map[string]identity.Digest `json:"identities,omitempty"`
	// Work and Lineage are compared with those of an adapter or eval, which an answer shows.
	Work    string `json:"work,omitempty"`
	Lineage string `json:"lineage,omitempty"`
	// Request is a kiln.resume-request.v1 of at most MaxResumeRequest bytes, for resume_exact. What it leaves out can't be
	// compared.
	Request json.RawMessage `json:"request,omitempty"`
}

// MaxResumeRequest is how many bytes a resume request may have. One of the largest shard manifest, with 4,096 shards,
// and an order of 50,000 items has less; what is configured in practice has some KiB.
const MaxResumeRequest = 2 << 20

// The verdicts of Compatibility and its parts.
const (
	VerdictYes        = "yes"
	VerdictNo         = "no"
	VerdictCannotTell = "cannot_tell" // something that the answer needs is not recorded, or was not given
)

// Compatibility is the answer of POST /v1/compatibility.
type Compatibility struct {
	Question    string       `json:"question"`
	Verdict     string       `json:"verdict"`
	Reasons     []string     `json:"reasons"`            // what the verdict rests on
	Evidence    Evidence     `json:"evidence,omitempty"` // what the artifact's binding rests on
	Artifact    *Artifact    `json:"artifact,omitempty"` // that the answer is about
	Compared    []Compared   `json:"compared,omitempty"` // what both sides record
	NotRecorded []Compared   `json:"not_recorded,omitempty"`
	Steps       []Compared   `json:"steps,omitempty"`             // of resume_exact, all of them in their order
	Failure     string       `json:"first_failure,omitempty"`     // name of the first step that says no
	Archival    string       `json:"archival,omitempty"`          // what such a checkpoint is good for
	Renamed     string       `json:"renamed,omitempty"`           // what to do about a base with other file names
	Derived     []Derivation `json:"derived_from,omitempty"`      // statements that link the two bases
	MoreDerived bool         `json:"more_derived_from,omitempty"` // there may be others: see Comparison
	NotProven   []string     `json:"not_proven"`
}

// Compared is one thing that was compared, or could not be.
type Compared struct {
	Number  int    `json:"number,omitempty"` // of a step; several may share one
	Name    string `json:"name"`
	Verdict string `json:"verdict"`
	Reason  string `json:"reason"`
}
