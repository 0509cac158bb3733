package classify

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Rules numbers the rules of Classify. It is raised when they find something else in the same manifest and blobs: what
// was found by earlier ones is found again then, as far as the blobs are still there.
const Rules = 5

// Finding is what was found of a manifest when it was put. It is kept beside the manifest, as what it rests on, the
// blobs and the manifest of the subject, may be gone or damaged by the time that it is needed again.
type Finding struct {
	Artifact      // but for the Claim
	Rules    int  // by which it was found
	Late     bool // it is a base, and artifacts came before it that refer to it
}

// HasFacts says whether there is anything that documents say.
func (f Finding) HasFacts() bool { return !reflect.ValueOf(f.Facts).IsZero() }

// finding is the form in which a Finding is kept. Shards are the layers that are the shards, by number.
type finding struct {
	Rules     int                `json:"rules"`
	Kind      api.Kind           `json:"kind,omitempty"`
	State     api.ContentState   `json:"content_state"`
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"`
	Evidence  api.Evidence       `json:"evidence"`
	Packaging identity.Digest    `json:"packaging,omitzero"`
	Shards    []int              `json:"shards,omitempty"`
	Facts     api.Facts          `json:"facts,omitzero"`
	Late      bool               `json:"late,omitempty"`
}

// Encode returns the form in which the finding about m is kept: JSON.
func (f Finding) Encode(m Manifest) (string, error) {
	out := finding{f.Rules, f.Kind, f.State, f.Base, f.Evidence, f.Packaging, nil, f.Facts, f.Late}
	if len(f.Shards.Shards) > 0 {
		all, err := filesOf(m)
		if err != nil {
			return "", fmt.Errorf("keep what was found: %w", err)
		}
		for _, s := range f.Shards.Shards {
			l, ok := all[s.Filename]
			if !ok || l.Digest != s.Digest {
				return "", fmt.Errorf("keep what was found: shard %.80q is no layer of the manifest", s.Filename)
			}
			out.Shards = append(out.Shards, l.at)
		}
	}
	b, err := json.Marshal(out)
	return string(b), err
}

// ParseFinding reads what Encode made of a finding about m. It is an error if it can't be one about m.
func ParseFinding(m Manifest, kept string) (f Finding, err error) {
	var in finding
	if err := json.Unmarshal([]byte(kept), &in); err != nil {
		return f, err
	}
	f = Finding{
		Artifact: Artifact{Kind: in.Kind, State: in.State, Packaging: in.Packaging, Base: in.Aggregate,
			Evidence: in.Evidence, Facts: in.Facts},
		Rules: in.Rules, Late: in.Late,
	}
	if len(in.Shards) == 0 {
		return f, nil
	}
	shards := make([]identity.Shard, len(in.Shards))
	for i, at := range in.Shards {
		if at < 0 || at >= len(m.Layers) {
			return f, fmt.Errorf("shard %d is layer %d of %d", i, at, len(m.Layers))
		}
		l := m.Layers[at]
		shards[i] = identity.Shard{Filename: l.Name(), Size: uint64(l.Size), Digest: l.Digest}
	}
	if f.Shards, err = identity.New(shards); err != nil {
		return f, err
	}
	if f.Shards.Aggregate != f.Base {
		return f, errors.New("the shards have another aggregate")
	}
	return f, nil
}

// From notes the base of the subject that a manifest refers to, zero if it is none: it is one more claim about the base
// from which the artifact was made. What is a base itself, a statement about its subject, or of no kind, has none by
// it. A subject of another base than is claimed otherwise refuses the manifest, and changes nothing of f.
func (f *Finding) From(subject identity.Digest, base identity.Aggregate) error {
	if f.Kind == "" || f.Kind == api.KindBase || f.Kind == api.KindStatement || base.IsZero() {
		return nil
	}
	own := claim{f.Evidence, f.Base, f.Facts.Source}
	if own.at == "" {
		own.at = annotated(f.Base).at
	}
	best, err := strongest(f.beside(own, claim{api.EvidenceAsserted, base, "subject " + subject.String()})...)
	if err != nil {
		return err
	}
	f.Base, f.Evidence, f.Facts.Source = best.base, best.evidence, best.at
	return nil
}

// Note keeps what From refused, of a manifest that stands all the same: its subject came later than it did.
func (f *Finding) Note(refusal error) {
	e, ok := errors.AsType[*api.Error](refusal)
	if !ok {
		return
	}
	if c, ok := e.Detail.(api.Conflict); ok {
		f.Facts.Conflict = &c
		f.Facts = bounded(f.Facts)
	}
}

// Stay keeps what is known of the same manifest by its subject: that may be gone since, and what was acknowledged gets
// no weaker. The error is that of From.
func (f *Finding) Stay(subject identity.Digest, was Artifact) error {
	if subject.IsZero() || was.Kind != f.Kind {
		return nil
	}
	if c := was.Facts.Conflict; c != nil && was.Base == f.Base {
		f.Facts.Conflict = c
	}
	if was.Evidence != api.EvidenceAsserted || !stronger(was.Evidence, f.Evidence) {
		return nil
	}
	return f.From(subject, was.Base)
}
