// Package api holds what travels between a Kiln registry and its clients: wire types, error codes and the path of every
// route. The wire types are the domain types; there is no second set.
package api

import (
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Kind says what an artifact is. It is the value of the manifest annotation dev.kiln.kind.
type Kind string

// The kinds of artifacts.
const (
	KindBase       Kind = "base"
	KindAdapter    Kind = "adapter"
	KindCheckpoint Kind = "checkpoint"
	KindEval       Kind = "eval"
	KindReceipt    Kind = "receipt"
	KindStatement  Kind = "statement"
)

// Known says whether k is one of the kinds above.
func (k Kind) Known() bool {
	switch k {
	case KindBase, KindAdapter, KindCheckpoint, KindEval, KindReceipt, KindStatement:
		return true
	}
	return false
}

// ContentState says how far the base shards that an artifact holds are known.
type ContentState string

// The content states.
const (
	ContentDirect     ContentState = "direct"     // from raw layers whose digest is the shard's digest
	ContentDerived    ContentState = "derived"    // from the members of tar layers, hashed by the registry
	ContentPending    ContentState = "pending"    // tar layers not yet read
	ContentIncomplete ContentState = "incomplete" // a shard is missing, or is no safetensors file
	ContentNone       ContentState = "none"       // no base shards: GGUF, or an adapter, or no model at all
)

// Evidence says what the link from an artifact to its base rests on. No word claims more than was checked.
type Evidence string

// The kinds of evidence, strongest first.
const (
	EvidenceSigned        Evidence = "signed"         // reserved
	EvidenceDocument      Evidence = "document"       // a valid full shard manifest inside the artifact
	EvidenceAsserted      Evidence = "asserted"       // subject, annotation, --base or a bind statement
	EvidenceAggregateOnly Evidence = "aggregate-only" // a bare aggregate string in a document
	EvidenceNone          Evidence = "none"
)

// Known says whether e is one of the kinds above.
func (e Evidence) Known() bool {
	switch e {
	case EvidenceSigned, EvidenceDocument, EvidenceAsserted, EvidenceAggregateOnly, EvidenceNone:
		return true
	}
	return false
}

// Names of media types, artifact types and annotations. Source: the artifact mapping of this project, which follows the
// CNCF model-spec where that has a type.
const (
	ArtifactTypeBase       = "application/vnd.cncf.model.manifest.v1+json"
	ArtifactTypeAdapter    = "application/vnd.kiln.adapter.v1+json"
	ArtifactTypeCheckpoint = "application/vnd.kiln.checkpoint.v1+json"
	ArtifactTypeEval       = "application/vnd.kiln.eval-result.v1+json"
	ArtifactTypeReceipt    = "application/vnd.kiln.train-receipt.v1+json"
	ArtifactTypeStatement  = "application/vnd.kiln.statement.v1+json"

	MediaTypeModelConfig  = "application/vnd.cncf.model.config.v1+json"
	MediaTypeWeight       = "application/vnd.cncf.model.weight.v1.raw"
	MediaTypeWeightConfig = "application/vnd.cncf.model.weight.config.v1.raw"
	MediaTypeCode         = "application/vnd.cncf.model.code.v1.raw"
	MediaTypeDoc          = "application/vnd.cncf.model.doc.v1.raw"
	MediaTypeMidstates    = "application/vnd.kiln.sha256-midstates.v1"

	AnnotationFilepath    = "org.cncf.model.filepath"
	AnnotationKind        = "dev.kiln.kind"
	AnnotationAggregate   = "dev.kiln.base-model-content.v1"
	AnnotationCNAIPath    = "org.cnai.model.filepath"
	AnnotationOrasUnpack  = "io.deis.oras.content.unpack"
	HeaderExpectDigest    = "Kiln-Expect-Digest" // on POST of an upload: the digest that the closing PUT will name
	HeaderExpectSize      = "Kiln-Expect-Size"   // on POST of an upload: its size in bytes
	HeaderRedirect        = "Kiln-Redirect"      // on GET of a blob: RedirectOff asks for its bytes, not where they are
	RedirectOff           = "off"                // as the value of HeaderRedirect
	HeaderContentDigest   = "Docker-Content-Digest"
	HeaderUploadUUID      = "Docker-Upload-UUID"
	HeaderSubject         = "OCI-Subject"
	HeaderFiltersApplied  = "OCI-Filters-Applied"
	HeaderRequestID       = "X-Request-Id" // of an answer: what the log calls the request; a client may choose it
	MaxManifestBytes      = 4 << 20        // largest manifest that is taken or read
	MaxIndexDocumentBytes = 64 << 20
)

// BaseList is the answer of GET /v1/bases: base models whose bytes the caller may pull, in order of aggregate.
type BaseList struct {
	Bases []identity.Summary `json:"bases"`
	// UnavailableShards counts, for each of these bases that has any, the shards of Base.UnavailableShards.
	UnavailableShards map[identity.Aggregate]int `json:"unavailable_shards,omitempty"`
	NotProven         []string                   `json:"not_proven,omitempty"` // see the variable of that name
	Next              string                     `json:"next,omitempty"`       // after= of the next page; empty: no more
}

// TagList is the answer of GET /v2/{name}/tags/list.
type TagList struct {
	Name string   `json:"name"`
	Tags []string `json:"tags"`
}

// Base is the answer of GET /v1/bases/{aggregate}.
type Base struct {
	Identity   identity.Summary `json:"base_weight_identity"`
	Packagings []Packaging      `json:"packagings"` // in the order in which the page holds them
	// UnavailableShards are those of the base that were found damaged or missing: the base can't be pulled until somebody
	// pushes them again.
	UnavailableShards []identity.Digest `json:"unavailable_shards,omitempty"`
	NotProven         []string          `json:"not_proven,omitempty"`
	Next              string            `json:"next,omitempty"`
}

// Packaging is one way in which the bytes of a base are dressed. Two manifests of one packaging have the same files
// beside the shards, under the same names; how the shards are called may differ, and with it the shard index.
type Packaging struct {
	ID        identity.Digest `json:"id"`        // over the names and digests of those files
	Manifests []Held          `json:"manifests"` // repository by repository, newest first in each
	// Packed is Facts.Packed of these manifests: where it is not empty they can't be pulled into a folder as they are.
	Packed []string `json:"packed,omitempty"`
}

// Held is one manifest in one repository.
type Held struct {
	Repository string          `json:"repository"`
	Digest     identity.Digest `json:"digest"`
	MediaType  string          `json:"media_type"`
	Tags       []string        `json:"tags"`
	MoreTags   bool            `json:"more_tags,omitempty"` // there are others; a listing of artifacts has the first 16
	Created    time.Time       `json:"created"`
}

// Binding says to which base an artifact belongs, and on what that rests.
type Binding struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"` // absent: no base is known
	Evidence  Evidence           `json:"evidence"`
	Source    string             `json:"source,omitempty"` // "statement sha256:…": a bind statement says so, not the artifact
	Held      bool               `json:"held"`             // this registry holds that base, and the caller may pull it
}

// Artifact is one artifact made from a base, or a base itself. Listings leave out what is long: the manifest has the
// annotations, and the artifact's own page the facts.
type Artifact struct {
	Held
	Kind               Kind              `json:"kind"` // empty: of no kind that this project knows
	State              ContentState      `json:"content_state"`
	ArtifactType       string            `json:"artifact_type"`
	Name               string            `json:"name,omitempty"` // what the artifact calls itself; a label, no identity
	Annotations        map[string]string `json:"annotations,omitempty"`
	AnnotationsOmitted bool              `json:"annotations_omitted,omitempty"` // they have more than 2 KiB
	Facts              *Facts            `json:"facts,omitempty"`
	FactsOmitted       bool              `json:"facts_omitted,omitempty"` // they have more than 4 KiB
	// Bases is under how many bases the artifact is listed, where that are several: the bind statements about it disagree,
	// or it has outcome rows of each.
	Bases int `json:"bases,omitempty"`
	// Bindings are all of them where there are several, Binding being the first. Of those that bind statements make none
	// holds more than another; those of outcome rows are all true. Listings, which list the artifact under each of those
	// bases, leave this and MoreBindings out.
	Bindings []Binding `json:"bindings,omitempty"`
	// MoreBindings: there are more bind statements about the artifact than the 16 newest, which count. All are children of
	// its lineage.
	MoreBindings bool `json:"more_bindings,omitempty"`
	// Binding is zero for a base: its own bytes say what it is. It is the last member: listings write the rest of a row
	// from one piece.
	Binding Binding `json:"binding,omitzero"`
}

// ArtifactList is the answer of GET /v1/bases/{aggregate}/artifacts and GET /v1/artifacts?unbound=true.
type ArtifactList struct {
	Artifacts         []Artifact        `json:"artifacts"`
	UnavailableShards []identity.Digest `json:"unavailable_shards,omitempty"` // of the base; see Base
	NotProven         []string          `json:"not_proven,omitempty"`
	Next              string            `json:"next,omitempty"`
}

// Side is one side of a comparison. Exactly one member is set.
type Side struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"`
	Manifest  *identity.Manifest `json:"base_weight_shard_manifest,omitempty"`
	Reference string             `json:"reference,omitempty"` // repository:tag or repository@digest of this registry
}

// CompareRequest is the body of POST /v1/compare.
type CompareRequest struct {
	A Side `json:"a"`
	B Side `json:"b"`
}

// Comparison is the answer of POST /v1/compare.
type Comparison struct {
	Same  bool             `json:"same"` // the same multiset of shard bytes
	A     identity.Summary `json:"a"`
	B     identity.Summary `json:"b"`
	OnlyA []Shard          `json:"only_a,omitempty"` // shards whose bytes the other side lacks
	OnlyB []Shard          `json:"only_b,omitempty"`
	// DerivedFrom are statements that the caller may see and that say that one of two different bases was made from the
	// other.
	DerivedFrom []Derivation `json:"derived_from,omitempty"`
	MoreDerived bool         `json:"more_derived_from,omitempty"` // there may be others: not all statements were looked at
	NotProven   []string     `json:"not_proven,omitempty"`
}

// Shard is a shard on the wire, as it stands in a shard manifest.
type Shard struct {
	Filename string          `json:"filename"`
	Size     uint64          `json:"size_bytes"`
	Digest   identity.Digest `json:"sha256"`
}

// Health is the answer of GET /health and /v1/health of the registry and of a resident model.
type Health struct {
	Status             string            `json:"status"` // ok, degraded, maintenance
	Version            string            `json:"version"`
	Role               string            `json:"role"` // registry or resident
	Backend            string            `json:"backend,omitempty"`
	Model              string            `json:"model,omitempty"`
	BaseWeightIdentity *identity.Summary `json:"base_weight_identity"` // null: none is loaded
	Checks             []Check           `json:"checks"`
	Quarantined        int               `json:"quarantined_blobs,omitempty"` // damaged, and not served until pushed again
	Missing            int               `json:"missing_blobs,omitempty"`     // referred to, and gone until pushed again
	Unreadable         int               `json:"unreadable_blobs,omitempty"`  // the store has them, and fails to read them
	Damaged            int               `json:"damaged_blobs,omitempty"`     // damaged, and could not be quarantined

	// ExecutionIdentity is what a server that runs the model says of process, build, device and kernels; nil: nothing.
	ExecutionIdentity *ExecutionIdentity `json:"execution_identity,omitempty"`
}

// ExecutionIdentity is the part of a kiln.execution-provenance.v1 summary that can be compared. It is a digest in its
// prefixed form; empty or any other text: not known.
type ExecutionIdentity struct {
	Provenance string `json:"provenance_sha256"`
}

// Check is one condition of health.
type Check struct {
	Name string `json:"name"`
	Pass bool   `json:"pass"`
}
