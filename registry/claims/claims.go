// Package claims compares what a manifest says about its base with what else a registry holds: its subject, the
// artifacts that statements name, and what was known of it before.
package claims

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// Push is a manifest that somebody puts into a repository.
type Push struct {
	Caller   access.Caller
	Repo     string
	Digest   identity.Digest
	Manifest classify.Manifest
}

// BaseOf tells which base model a manifest of a repository is; zero: none, or it is not there.
type BaseOf func(ctx context.Context, repo string, d identity.Digest) (identity.Aggregate, error)

// Held returns the BaseOf of an index.
func Held(ix *index.Index) BaseOf {
	return func(ctx context.Context, repo string, d identity.Digest) (identity.Aggregate, error) {
		rec, err := ix.Get(ctx, repo, d.String())
		switch {
		case errors.Is(err, index.ErrNotFound):
			return identity.Aggregate{}, nil
		case err != nil || rec.Kind != api.KindBase:
			return identity.Aggregate{}, err
		}
		return rec.Aggregate, nil
	}
}

// Inherit adds to what was found of a manifest which base its subject is. ErrManifestInvalid, and f as it was, if it
// names another one itself.
func Inherit(ctx context.Context, f *classify.Finding, repo string, subject identity.Digest, of BaseOf) error {
	if subject.IsZero() {
		return nil
	}
	base, err := of(ctx, repo, subject)
	if err != nil {
		return err
	}
	return f.From(subject, base)
}

// Settle adds to what was found of a manifest what its repository says of it: which base its subject is, or was when
// the same manifest was put before. ErrManifestInvalid if any of that contradicts what the manifest says, as far as the
// caller may look at it: of what he may not pull nothing is told, and the manifest stands for itself.
func Settle(ctx context.Context, ix *index.Index, p Push, f *classify.Finding) error {
	sees := p.Caller.Sees(p.Repo)
	for _, add := range []func() error{
		func() error { return Inherit(ctx, f, p.Repo, p.Manifest.Subject, Held(ix)) },
		func() error { return remember(ctx, ix, p, f) },
	} {
		if err := add(); err != nil && (sees || !errors.Is(err, api.ErrManifestInvalid)) {
			return err
		}
	}
	if err := checkSubject(ctx, ix, p, *f); err != nil {
		return err
	}
	s := f.Facts.Statement
	switch {
	case f.Kind != api.KindStatement || s == nil:
		return nil
	case s.Type == api.StatementDerived:
		return checkDerived(ctx, ix, p.Caller, *s)
	case sees:
		return checkBind(ctx, ix, p.Repo, *f)
	}
	return nil
}

// remember keeps what is known of the same manifest by its subject.
func remember(ctx context.Context, ix *index.Index, p Push, f *classify.Finding) error {
	if p.Manifest.Subject.IsZero() {
		return nil
	}
	was, err := ix.Get(ctx, p.Repo, p.Digest.String())
	if errors.Is(err, index.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Stay(p.Manifest.Subject, classify.Artifact{Kind: was.Kind, Base: was.Aggregate, Evidence: was.Evidence})
}

// checkSubject refuses a manifest that names another base than its subject is, wherever the caller may look at that.
func checkSubject(ctx context.Context, ix *index.Index, p Push, f classify.Finding) error {
	subject := p.Manifest.Subject
	if f.Kind == api.KindBase || f.Base.IsZero() || subject.IsZero() {
		return nil
	}
	for rec, err := range seen(ctx, ix, p.Caller, subject) {
		if err != nil {
			return err
		}
		if rec.Kind == api.KindBase && !rec.Aggregate.IsZero() {
			return f.From(subject, rec.Aggregate)
		}
	}
	return nil
}

// seen yields the records of a manifest in the repositories that a caller may pull from.
func seen(ctx context.Context, ix *index.Index, c access.Caller, d identity.Digest) iter.Seq2[index.Record, error] {
	return func(yield func(index.Record, error) bool) {
		for repo, err := range ix.ManifestHolders(ctx, d) {
			if err == nil && !c.Sees(repo) {
				continue
			}
			var rec index.Record
			if err == nil {
				rec, err = ix.Get(ctx, repo, d.String())
			}
			if errors.Is(err, index.ErrNotFound) { // deleted meanwhile
				continue
			}
			if !yield(rec, err) || err != nil {
				return
			}
		}
	}
}

// checkBind refuses a bind statement about an artifact of its repository that is a base, or that names another one
// itself. One that comes before its artifact is taken: what an artifact says itself is stronger.
func checkBind(ctx context.Context, ix *index.Index, repo string, f classify.Finding) error {
	s := f.Facts.Statement
	rec, err := ix.Get(ctx, repo, s.Target.String())
	switch {
	case errors.Is(err, index.ErrNotFound):
		return nil
	case err != nil:
		return err
	case rec.Kind == api.KindBase:
		return api.Errorf(api.CodeManifestInvalid, "%s is a base itself: a bind statement is about what was made from one",
			s.Target)
	case !rec.Aggregate.IsZero() && rec.Aggregate != s.Base:
		return classify.Disagree(f.Facts.Source, s.Base, "artifact "+s.Target.String(), rec.Aggregate)
	}
	return nil
}

// checkDerived refuses a derived-from statement about what is known to be no base, wherever the caller may look at it.
// An adapter or a checkpoint may be a source: it was merged in.
func checkDerived(ctx context.Context, ix *index.Index, c access.Caller, s api.StatementFacts) error {
	named := s.FromArtifacts
	if !s.Target.IsZero() {
		named = slices.Concat([]identity.Digest{s.Target}, named)
	}
	for _, d := range named {
		kind, err := kindOf(ctx, ix, c, d)
		merged := s.How == string(documents.Merge) && d != s.Target
		switch {
		case err != nil:
			return err
		case kind == "" || kind == api.KindBase:
		case merged && (kind == api.KindAdapter || kind == api.KindCheckpoint):
		default:
			return api.Errorf(api.CodeManifestInvalid, "%s is of kind %s: a derived-from statement says from what a base was "+
				"made", d, kind)
		}
	}
	return nil
}

// kindOf returns the kind of a manifest, empty if the caller sees none of a kind that is known.
func kindOf(ctx context.Context, ix *index.Index, c access.Caller, d identity.Digest) (api.Kind, error) {
	for rec, err := range seen(ctx, ix, c, d) {
		if err != nil || rec.Kind != "" {
			return rec.Kind, err
		}
	}
	return "", nil
}

// Late is an artifact that refers to a base and came before it.
type Late struct {
	Record   index.Record
	Manifest classify.Manifest
	Body     []byte
	Finding  classify.Finding // with what the base says, by rules that are not known
}

// LateOf yields what refers to a base and is bound to it less firmly than if it had come after it. One that names
// another base itself stays as it is. Nobody may change the manifests of the repository meanwhile but whoever gets them.
func LateOf(ctx context.Context, ix *index.Index, base index.Record) iter.Seq2[Late, error] {
	return func(yield func(Late, error) bool) {
		if base.Kind != api.KindBase || base.Aggregate.IsZero() {
			return
		}
		for rec, err := range ix.Find(ctx, index.Query{Repo: base.Repo, Subject: base.Digest}) {
			var l Late
			stands := err == nil && (rec.Evidence == api.EvidenceDocument || rec.Evidence == api.EvidenceAsserted)
			if stands {
				continue
			}
			if err == nil {
				l, err = late(ctx, ix, rec)
			}
			if err == nil {
				err = l.Finding.From(base.Digest, base.Aggregate)
			}
			if errors.Is(err, api.ErrManifestInvalid) || err == nil && l.Finding.Evidence == rec.Evidence {
				continue
			}
			if !yield(l, err) || err != nil {
				return
			}
		}
	}
}

// late recalls what is known of an artifact.
func late(ctx context.Context, ix *index.Index, rec index.Record) (l Late, err error) {
	_, body, err := ix.Manifest(ctx, rec.Repo, rec.Digest.String())
	if err != nil {
		return l, err
	}
	l = Late{Record: rec, Body: body, Finding: classify.Finding{Artifact: classify.Artifact{
		Kind: rec.Kind, State: rec.State, Packaging: rec.Packaging, Base: rec.Aggregate, Evidence: rec.Evidence,
	}}}
	if len(rec.Facts) > 0 {
		err = json.Unmarshal(rec.Facts, &l.Finding.Facts)
	}
	m, perr := classify.ParseTaken(rec.MediaType, body)
	l.Manifest = m
	return l, cmp.Or(err, perr)
}
