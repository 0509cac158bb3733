package artifact

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

const (
	pagesSaid = 100 // bounds the pages of a lineage that are read to find a statement
	maxBinds  = 16  // bind statements about an artifact that count: the newest ones of its repository
)

// Said finds a statement that says the same as a in the same words, apart from when, about what the manifest of a digest
// in a repository holds, and lies in that repository too. The zero Digest: there is none, a is no statement, or the
// registry keeps no lineage. Of the newest statements about an artifact all are looked at; of many thousands not. A bind
// statement is found only among those that count.
func (a *Artifact) Said(ctx context.Context, c *client.Client, repo string, about identity.Digest) (
	identity.Digest, error,
) {
	if a.said == nil || about.IsZero() {
		return identity.Digest{}, nil
	}
	pages, binds := 0, 0
	for page, err := range c.LineagePages(ctx, about, repo) {
		var answered *client.StatusError
		switch {
		case errors.As(err, &answered), errors.Is(err, api.ErrManifestUnknown), errors.Is(err, client.ErrNotBlob):
			return identity.Digest{}, nil
		case err != nil:
			return identity.Digest{}, err
		}
		for _, l := range page.Children {
			x := l.Artifact
			if x == nil || x.Kind != api.KindStatement || x.Repository != repo {
				continue
			}
			if !l.Base.IsZero() {
				binds++
			}
			if a.said.Bind != nil && binds > maxBinds {
				return identity.Digest{}, nil
			}
			if sameWords(*a.said, x.Facts) {
				return x.Digest, nil
			}
		}
		if pages++; pages == pagesSaid {
			break
		}
	}
	return identity.Digest{}, nil
}

// sameWords says whether facts are those of a statement, apart from when it was made.
func sameWords(s documents.Statement, facts *api.Facts) bool {
	if facts == nil || facts.Statement == nil {
		return false
	}
	want := api.StatementFacts{Reason: s.Reason, By: s.By}
	if b := s.Bind; b != nil {
		want.Type, want.Target, want.Base = api.StatementBind, b.Artifact, b.Aggregate
	}
	if d := s.Derived; d != nil {
		want.Type, want.How, want.Tool = api.StatementDerived, string(d.How), d.Tool
		want.Target, want.To = d.Target.Artifact, d.Target.Aggregate
		for _, s := range d.Sources {
			if s.Artifact.IsZero() {
				want.From = append(want.From, s.Aggregate)
			} else {
				want.FromArtifacts = append(want.FromArtifacts, s.Artifact)
			}
		}
	}
	return reflect.DeepEqual(want, *facts.Statement)
}

// StatementFile is the name of the one file of a statement.
const StatementFile = "statement.json"

// Words are what a statement rests on: who says it, when and why.
type Words struct {
	By, Reason string
	At         string // RFC 3339
}

// Bind is the statement that an artifact was made from base. It belongs into the repository of the artifact, of which
// it becomes a referrer, and leaves it as it is. An artifact that is a base or a statement, or that names
// another base in its annotations, is an *Error; a statement that breaks a rule is a *documents.Error.
func Bind(f Found, base Base, w Words) (*Artifact, error) {
	said := f.Annotations[api.AnnotationAggregate]
	switch {
	case f.Annotations[api.AnnotationKind] == string(api.KindBase):
		return nil, &Error{Code: CodeIsBase, Msg: f.Name + " is a base itself",
			Hint: "kiln-push derive says from which one a base was made"}
	case f.Annotations[api.AnnotationKind] == string(api.KindStatement), f.ArtifactType == api.ArtifactTypeStatement:
		return nil, &Error{Code: CodeIsStatement, Msg: f.Name + " is a statement, which was made from no base",
			Hint: "name the artifact that it is about; a wrong statement is withdrawn by deleting its manifest"}
	case said != "" && said != base.Aggregate.String():
		return nil, &Error{Code: CodeOtherBase, Msg: fmt.Sprintf("%s names %s in its annotation %s, but --base is %s", f.Name,
			said, api.AnnotationAggregate, base.Aggregate), Hint: "a statement does not overrule what an artifact says itself"}
	}
	s := f.Subject
	b := documents.Bind{Artifact: s.Digest, Aggregate: base.Aggregate}
	if base.Manifest != nil {
		b.Shards = *base.Manifest
	}
	a, err := statement(documents.Statement{Bind: &b, Reason: w.Reason, By: w.By, At: w.At})
	if err != nil {
		return nil, err
	}
	a.subject = s
	a.Base = documents.Binding{
		Evidence: documents.EvidenceAsserted, Aggregate: base.Aggregate, Kind: documents.KindStatement,
		Path: "$.bind.base_aggregate_sha256",
	}
	return a, nil
}

// Derive is the statement that target was made from sources, for the repository of into. Where target was named by a
// reference to the same repository, its manifest is the subject. tool may be empty. A statement that breaks a rule is a
// *documents.Error; a target that is a source too, and what is known to be no base, is an *Error. An adapter or a
// checkpoint may be a source of a merge.
func Derive(target Base, sources []Base, how documents.How, tool string, into client.Reference, w Words) (
	*Artifact, error,
) {
	d := documents.Derived{Target: target.document(), How: how, Tool: tool}
	if err := target.checkBase(false); err != nil {
		return nil, err
	}
	for _, s := range sources {
		if err := s.checkBase(how == documents.Merge); err != nil {
			return nil, err
		}
		if s.document() == d.Target {
			return nil, &Error{Code: CodeSameBase, Msg: fmt.Sprintf("%s and %s are the same: %s", target.Name, s.Name, d.Target),
				Hint: "a copy under other names is not derived: it has the same aggregate"}
		}
		d.Sources = append(d.Sources, s.document())
	}
	a, err := statement(documents.Statement{Derived: &d, Reason: w.Reason, By: w.By, At: w.At})
	if err != nil {
		return nil, err
	}
	if into.Host == target.Ref.Host && into.Repo == target.Ref.Repo {
		a.subject = target.Subject
	}
	if !target.Aggregate.IsZero() {
		a.Base = documents.Binding{
			Evidence: documents.EvidenceAsserted, Aggregate: target.Aggregate, Kind: documents.KindStatement,
			Path: "$.derived_from.target",
		}
	}
	return a, nil
}

// checkBase refuses what is known to be no base. merged says that it may have been merged into one.
func (b Base) checkBase(merged bool) error {
	switch b.Kind {
	case "", api.KindBase:
		return nil
	case api.KindAdapter, api.KindCheckpoint:
		if merged {
			return nil
		}
	}
	return &Error{Code: CodeNoBase, Msg: fmt.Sprintf("%s is of kind %s", b.Name, b.Kind),
		Hint: "a derived-from statement says from what a base was made: an adapter names its base when it is pushed"}
}

// document is how a statement names b.
func (b Base) document() documents.Subject {
	if b.Aggregate.IsZero() {
		return documents.Subject{Artifact: b.Subject.Digest}
	}
	return documents.Subject{Aggregate: b.Aggregate}
}

func statement(s documents.Statement) (*Artifact, error) {
	text, err := s.Document()
	if err != nil {
		return nil, err
	}
	a := &Artifact{Kind: api.KindStatement, Base: documents.Binding{Evidence: documents.EvidenceNone}, said: &s}
	a.parts = []part{{name: StatementFile, kind: folder.Doc, text: text}}
	a.hashTexts()
	return a, nil
}
