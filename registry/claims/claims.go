// Package claims compares what a manifest says about its base with what else a registry holds: its subject, the
// artifacts that statements name, and what was known of it before.
package claims

import (
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
// caller may look at it: of what he may not pull nothing is told, and the manifest stands for itself. So does one that
// is there already, as its subject came later. What contradicts it is noted then.
func Settle(ctx context.Context, ix *index.Index, p Push, f *classify.Finding) error {
	sees := p.Caller.Sees(p.Repo)
	was, stands, err := before(ctx, ix, p)
	if err != nil {
		return err
	}
	for _, err := range []error{
		Inherit(ctx, f, p.Repo, p.Manifest.Subject, Held(ix)), f.Stay(p.Manifest.Subject, was),
	} {
		if err != nil && (sees && !stands || !errors.Is(err, api.ErrManifestInvalid)) {
			return err
		}
		f.Note(err)
	}
	if !stands {
		if err := checkSubject(ctx, ix, p, *f); err != nil {
			return err
		}
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

// before returns what is known of the same manifest in the same repository, if it is there and has a subject.
func before(ctx context.Context, ix *index.Index, p Push) (was classify.Artifact, stands bool, err error) {
	if p.Manifest.Subject.IsZero() {
		return was, false, nil
	}
	rec, err := ix.Get(ctx, p.Repo, p.Digest.String())
	if errors.Is(err, index.ErrNotFound) {
		return was, false, nil
	}
	if err == nil {
		was, err = known(rec)
	}
	return was, err == nil, err
}

// known is what a record says of its manifest.
func known(rec index.Record) (a classify.Artifact, err error) {
	a = classify.Artifact{
		Kind: rec.Kind, State: rec.State, Packaging: rec.Packaging, Base: rec.Aggregate, Evidence: rec.Evidence,
	}
	if len(rec.Facts) > 0 {
		err = json.Unmarshal(rec.Facts, &a.Facts)
	}
	return a, err
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
	case !rec.Aggregate.IsZero() && rec.Aggregate != s.Base && !slices.Contains(rec.Bases, s.Base):
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

// LateOf yields what refers to a base and is bound to it less firmly than if it had come after it, and what names another
// base itself, which stays bound to that, with a note of the contradiction. Nobody may change the manifests of the
// repository meanwhile but whoever gets them.
func LateOf(ctx context.Context, ix *index.Index, base index.Record) iter.Seq2[Late, error] {
	return func(yield func(Late, error) bool) {
		if base.Kind != api.KindBase || base.Aggregate.IsZero() {
			return
		}
		for rec, err := range ix.Find(ctx, index.Query{Repo: base.Repo, Subject: base.Digest}) {
			var l Late
			changed := false
			if err == nil && !settled(rec, base.Aggregate) {
				l, changed, err = late(ctx, ix, rec, base)
			}
			if err == nil && !changed {
				continue
			}
			if !yield(l, err) || err != nil {
				return
			}
		}
	}
}

// settled says whether a record can gain nothing from a base that it refers to.
func settled(rec index.Record, base identity.Aggregate) bool {
	stands := rec.Evidence == api.EvidenceDocument || rec.Evidence == api.EvidenceAsserted
	return stands && rec.Aggregate == base
}

// late recalls what is known of an artifact, and adds to it what a base says to which it refers. changed says whether
// that is anything new.
func late(ctx context.Context, ix *index.Index, rec, base index.Record) (l Late, changed bool, err error) {
	a, err := known(rec)
	if err != nil {
		return l, false, err
	}
	l = Late{Record: rec, Finding: classify.Finding{Artifact: a}}
	err = l.Finding.From(base.Digest, base.Aggregate)
	switch {
	case errors.Is(err, api.ErrManifestInvalid) && a.Facts.Conflict != nil:
		return l, false, nil
	case errors.Is(err, api.ErrManifestInvalid):
		l.Finding.Note(err)
	case err != nil || l.Finding.Evidence == rec.Evidence:
		return l, false, err
	}
	if _, l.Body, err = ix.Manifest(ctx, rec.Repo, rec.Digest.String()); err == nil {
		l.Manifest, err = classify.ParseTaken(rec.MediaType, l.Body)
	}
	return l, true, err
}
