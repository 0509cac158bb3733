package documents

import (
	"bytes"
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
)

const statementType = "kiln.statement.v1"

// maxSources is how many sources a derived-from statement may name.
const maxSources = 16

// How says in which way one model was made from others.
type How string

// The ways.
const (
	Quantize How = "quantize"
	Merge    How = "merge"
	Finetune How = "finetune"
)

// Statement is a document of this project (kiln.statement.v1) in which somebody says something about an artifact that
// the artifact does not say itself. It is strict: exactly these members, in any order.
//
//	{"schema_version": 1, "statement_type": "kiln.statement.v1",
//	 "bind": {
//	   "artifact": "sha256:…",                  the digest of the artifact's manifest
//	   "base_aggregate_sha256": "sha256:…",     the base that it was made from
//	   "base_weight_shard_manifest": {…}        optional: that base in full; its aggregate must be the same
//	 },
//	 "reason": "…", "made_by": "…", "made_at": "2026-01-02T03:04:05Z"}
//
//	{"schema_version": 1, "statement_type": "kiln.statement.v1",
//	 "derived_from": {
//	   "target": {"base_aggregate_sha256": "sha256:…"},
//	   "sources": [{"base_aggregate_sha256": "sha256:…"}, {"artifact": "sha256:…"}],
//	   "how": "quantize",                       or merge, or finetune
//	   "tool": "…"                              optional
//	 },
//	 "reason": "…", "made_by": "…", "made_at": "2026-01-02T03:04:05Z"}
//
// It has bind or derived_from, not both. Target and sources are each a base by aggregate or an artifact by digest.
// There are 1 to 16 sources, all different and none of them the target; more than one only for merge. Texts are 1 to
// 512 bytes without controls and without white space around; made_at is RFC 3339; no digest is all zeros.
//
// Exactly one of Bind and Derived is set.
type Statement struct {
	Bind    *Bind
	Derived *Derived
	Reason  string
	By      string // made_by: who says so
	At      string // made_at, RFC 3339
}

// Bind says that an artifact was made from a base.
type Bind struct {
	Artifact  identity.Digest // of the artifact's manifest
	Aggregate identity.Aggregate
	Shards    identity.Manifest // zero: not given
}

// Derived says that one model was made from others.
type Derived struct {
	Target  Subject
	Sources []Subject
	How     How
	Tool    string // empty: not given
}

// Subject is a base by its aggregate, or an artifact by the digest of its manifest. Exactly one is set.
type Subject struct {
	Aggregate identity.Aggregate
	Artifact  identity.Digest
}

// String names the subject on one line.
func (s Subject) String() string {
	if s.Artifact.IsZero() {
		return "base " + s.Aggregate.String()
	}
	return "artifact " + s.Artifact.String()
}

// ParseStatement reads a statement. The error is an *Error.
func ParseStatement(data []byte) (Statement, error) {
	var s Statement
	if err := read(KindStatement, MaxDocument, data, s.read); err != nil {
		return Statement{}, err
	}
	return s, nil
}

func (s *Statement) read(r reader) error {
	var b Bind
	var d Derived
	var isBind, isDerived bool
	err := r.Struct(
		r.version(1),
		r.constant("statement_type", statementType),
		seen(optional(field{Name: "bind", Read: func() error { return b.read(r) }}), &isBind),
		seen(optional(field{Name: "derived_from", Read: func() error { return d.read(r) }}), &isDerived),
		r.checked("reason", RuleText, &s.Reason, plainText),
		r.checked("made_by", RuleText, &s.By, plainText),
		r.checked("made_at", RuleTimestamp, &s.At, timestamp))
	switch {
	case err != nil:
		return err
	case isBind == isDerived:
		return fault("", RuleShape, "must have either bind or derived_from")
	case isBind:
		s.Bind = &b
		return b.check()
	}
	s.Derived = &d
	return d.check()
}

func (b *Bind) read(r reader) error {
	var aggregate identity.Digest
	err := r.Struct(
		r.named("artifact", &b.Artifact),
		r.named("base_aggregate_sha256", &aggregate),
		r.base(&b.Shards))
	b.Aggregate = identity.Aggregate(aggregate)
	return err
}

func (b *Bind) check() error {
	if full := b.Shards.Aggregate; !full.IsZero() && full != b.Aggregate {
		return fault("bind.base_aggregate_sha256", RuleBaseConflict, "is %v, but bind.%s.aggregate_sha256 is %v",
			b.Aggregate, baseMember, full)
	}
	return nil
}

func (d *Derived) read(r reader) error {
	var how string
	err := r.Struct(
		field{Name: "target", Read: func() error { return d.Target.read(r) }},
		r.list("sources", func(int) error {
			var s Subject
			err := s.read(r)
			d.Sources = append(d.Sources, s)
			return err
		}),
		r.oneOf("how", RuleValue, &how, string(Quantize), string(Merge), string(Finetune)),
		optional(r.checked("tool", RuleText, &d.Tool, plainText)))
	d.How = How(how)
	return err
}

func (s *Subject) read(r reader) error {
	at := r.Offset()
	var aggregate identity.Digest
	err := r.Struct(
		optional(r.named("base_aggregate_sha256", &aggregate)),
		optional(r.named("artifact", &s.Artifact)))
	s.Aggregate = identity.Aggregate(aggregate)
	if err == nil && s.Aggregate.IsZero() == s.Artifact.IsZero() {
		err = r.Fail(at, RuleShape, "must have either base_aggregate_sha256 or artifact")
	}
	return err
}

func (d *Derived) check() error {
	n := len(d.Sources)
	switch {
	case n < 1 || n > maxSources:
		return fault("derived_from.sources", RuleCount, "%d sources, must be 1 to %d", n, maxSources)
	case n > 1 && d.How != Merge:
		return fault("derived_from.sources", RuleCount, "%d sources, but only %s has more than one", n, Merge)
	}
	met := map[Subject]bool{d.Target: true}
	for i, s := range d.Sources {
		if met[s] {
			return fault(fmt.Sprintf("derived_from.sources[%d]", i), RuleValue, "%v is the target or an earlier source", s)
		}
		met[s] = true
	}
	return nil
}

// Base returns what a bind statement says about the base of the artifact that it names; a derived-from statement says
// nothing about one.
func (s Statement) Base() Binding {
	b := Binding{Evidence: EvidenceNone, Kind: KindStatement, Path: "$.bind.base_aggregate_sha256"}
	if s.Bind != nil {
		b.Evidence, b.Aggregate, b.Manifest = EvidenceAsserted, s.Bind.Aggregate, s.Bind.Shards
	}
	return b
}

// Document gives the canonical text of s: compact, members in the order above. Equal statements give equal texts. One
// that ParseStatement would refuse is an error.
func (s Statement) Document() ([]byte, error) {
	b := []byte(`{"schema_version":1,"statement_type":"` + statementType + `"`)
	var err error
	if s.Bind != nil {
		b, err = s.Bind.append(b)
	}
	if s.Derived != nil {
		b = s.Derived.append(b)
	}
	if err != nil {
		return nil, fmt.Errorf("write statement: %w", err)
	}
	b = appendText(b, "reason", s.Reason)
	b = appendText(b, "made_by", s.By)
	b = append(appendText(b, "made_at", s.At), '}')
	if _, err := ParseStatement(b); err != nil {
		return nil, err
	}
	return b, nil
}

func (b *Bind) append(to []byte) ([]byte, error) {
	to = appendString(append(appendMember(to, "bind"), `{"artifact":`...), b.Artifact.String())
	to = appendText(to, "base_aggregate_sha256", b.Aggregate.String())
	if !b.Shards.Aggregate.IsZero() {
		shards, err := b.Shards.MarshalJSON()
		if err != nil {
			return nil, err
		}
		to = append(appendMember(to, baseMember), shards...)
	}
	return append(to, '}'), nil
}

func (d *Derived) append(to []byte) []byte {
	to = d.Target.append(append(appendMember(to, "derived_from"), `{"target":`...))
	to = append(appendMember(to, "sources"), '[')
	for i, s := range d.Sources {
		if i > 0 {
			to = append(to, ',')
		}
		to = s.append(to)
	}
	to = appendText(append(to, ']'), "how", string(d.How))
	if d.Tool != "" {
		to = appendText(to, "tool", d.Tool)
	}
	return append(to, '}')
}

// append writes what is set: reading it back refuses none, and both.
func (s Subject) append(to []byte) []byte {
	text := []byte{}
	if !s.Aggregate.IsZero() {
		text = appendText(text, "base_aggregate_sha256", s.Aggregate.String())
	}
	if !s.Artifact.IsZero() {
		text = appendText(text, "artifact", s.Artifact.String())
	}
	return append(append(append(to, '{'), bytes.TrimPrefix(text, []byte(","))...), '}')
}
