package answers

import (
	"context"
	"errors"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

const (
	// maxNewest bounds the search for the newest packaging of a base.
	maxNewest = 10_000
	// maxStatements is how many statements about a base one step reads, and one page shows.
	maxStatements = 256
	// maxLooked bounds how many statements about each of two bases are read for those about both.
	maxLooked = 40 * maxStatements
)

// unknownAggregate says that the caller sees no base of that aggregate.
func unknownAggregate(a identity.Aggregate) error {
	return api.Errorf(api.CodeAggregateUnknown, "no base model of aggregate %s is held here", a)
}

// Newest finds the newest base of an aggregate that the caller may pull, in one repository or as one manifest if those
// are given. ErrAggregateUnknown.
func (d *Desk) Newest(ctx context.Context, c access.Caller, a identity.Aggregate, repo string, only identity.Digest) (
	best index.Record, err error,
) {
	looked := 0
	q := index.Query{Aggregate: a, Kind: api.KindBase, Repo: repo, See: c.Sees, Next: c.Next}
	for rec, err := range d.Index.Find(ctx, q) {
		if err != nil {
			return best, err
		}
		if !only.IsZero() && rec.Digest != only {
			continue
		}
		if best.Repo == "" || rec.Created.After(best.Created) {
			best = rec
		}
		if looked++; looked == maxNewest {
			break
		}
	}
	if best.Repo == "" {
		return best, unknownAggregate(a)
	}
	return best, nil
}

// BaseManifest returns the full shard manifest of a base. Names of shards differ between packagings: repo and only
// choose one; where both are empty it is the newest that the caller may pull. ErrAggregateUnknown.
func (d *Desk) BaseManifest(ctx context.Context, c access.Caller, a identity.Aggregate, repo string,
	only identity.Digest,
) (identity.Manifest, error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return identity.Manifest{}, err
	}
	rec, err := d.Newest(ctx, c, a, repo, only)
	if err != nil {
		return identity.Manifest{}, err
	}
	return d.Index.Shards(ctx, a, rec.Repo, rec.Digest)
}

// Compare compares the content of two base models. ErrAggregateUnknown, ErrManifestUnknown, ErrParameterInvalid.
func (d *Desk) Compare(ctx context.Context, c access.Caller, req api.CompareRequest) (api.Comparison, error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return api.Comparison{}, err
	}
	a, err := d.side(ctx, c, req.A)
	if err != nil {
		return api.Comparison{}, err
	}
	b, err := d.side(ctx, c, req.B)
	if err != nil {
		return api.Comparison{}, err
	}
	diff := identity.Compare(a, b)
	out := api.Comparison{
		Same: a.SameContent(b), A: a.Summary(), B: b.Summary(), OnlyA: shards(diff.OnlyA), OnlyB: shards(diff.OnlyB),
		NotProven: api.NotProven,
	}
	if !out.Same {
		out.DerivedFrom, out.MoreDerived, err = d.view(ctx, c).between(a.Aggregate, b.Aggregate)
	}
	return out, err
}

func shards(in []identity.Shard) []api.Shard {
	var out []api.Shard
	for _, s := range in {
		out = append(out, api.Shard{Filename: s.Filename, Size: s.Size, Digest: s.Digest})
	}
	return out
}

// side returns the shard manifest that one side of a comparison stands for.
func (d *Desk) side(ctx context.Context, c access.Caller, s api.Side) (identity.Manifest, error) {
	given := 0
	for _, is := range []bool{!s.Aggregate.IsZero(), s.Manifest != nil, s.Reference != ""} {
		if is {
			given++
		}
	}
	switch {
	case given != 1:
		return identity.Manifest{}, api.Errorf(api.CodeParameterInvalid,
			"each side is one of an aggregate, a manifest and a reference")
	case s.Manifest != nil:
		return *s.Manifest, nil
	case s.Reference != "":
		return d.referred(ctx, c, s.Reference)
	}
	return d.BaseManifest(ctx, c, s.Aggregate, "", identity.Digest{})
}

// record returns what repository:tag or repository@digest names. ErrManifestUnknown.
func (d *Desk) record(ctx context.Context, c access.Caller, reference string) (index.Record, error) {
	repo, ref, err := api.ParseReference(reference)
	if err != nil {
		return index.Record{}, err
	}
	if err := c.Check(access.Pull, repo); err != nil {
		return index.Record{}, err
	}
	rec, err := d.Index.Get(ctx, repo, ref.String())
	if errors.Is(err, index.ErrNotFound) {
		err = api.Errorf(api.CodeManifestUnknown, "manifest %s is unknown to repository %s", ref, repo)
	}
	return rec, err
}

// referred returns the shard manifest of repository:tag or repository@digest.
func (d *Desk) referred(ctx context.Context, c access.Caller, reference string) (identity.Manifest, error) {
	rec, err := d.record(ctx, c, reference)
	if err != nil {
		return identity.Manifest{}, err
	}
	if rec.Kind != api.KindBase || rec.Aggregate.IsZero() {
		return identity.Manifest{}, api.Errorf(api.CodeAggregateUnknown, "%s is no base model of known content", reference)
	}
	return d.Index.Shards(ctx, rec.Aggregate, rec.Repo, rec.Digest)
}

// between returns the statements that say that one of two bases was made from the other. more: not all statements about
// them were looked at, and there may be others.
func (v *view) between(a, b identity.Aggregate) (all []api.Derivation, more bool, err error) {
	if a.IsZero() || b.IsZero() || a == b {
		return nil, false, nil
	}
	for _, way := range [][2]identity.Aggregate{{a, b}, {b, a}} {
		found, cut, err := v.derived(way[0], way[1])
		if err != nil {
			return nil, false, err
		}
		all, more = append(all, found...), more || cut
	}
	return all, more, nil
}

// derived returns the statements that say that one base was made from another. It reads the statements about the one
// and those that name the other in turn, until it has all of either: so many about one of them hide nothing.
func (v *view) derived(to, from identity.Aggregate) (all []api.Derivation, more bool, err error) {
	made := index.Link{Relation: api.RelationStatement, Target: index.AggregateTarget(to)}
	source := index.Link{Relation: api.RelationDerived, Target: index.AggregateTarget(from)}
	walks := [2]statements{{is: made, has: source}, {is: source, has: made}}
	for looked := 0; looked < maxLooked; looked += maxStatements {
		for i := range walks {
			w := &walks[i]
			if err := v.walk(w); err != nil {
				return nil, false, err
			}
			if w.after == "" || len(w.found) >= maxStatements {
				all, err = derivations(w.found, to, from)
				return all, w.after != "", err
			}
		}
	}
	all, err = derivations(walks[0].found, to, from)
	return all, true, err
}

// statements are those with one link, of which those that have another too are looked for.
type statements struct {
	is, has index.Link
	after   string // where the walk goes on; empty: at the start, or at the end
	found   []index.Record
}

// walk reads some more of the statements.
func (v *view) walk(w *statements) error {
	read, next, err := v.Index.Records(v.ctx, index.Query{Target: w.is.Target, Relation: w.is.Relation, See: v.c.Sees,
		Next: v.c.Next, After: w.after}, maxStatements)
	for _, rec := range read {
		if slices.Contains(rec.Links, w.has) {
			w.found = append(w.found, rec)
		}
	}
	w.after = next
	return err
}

// derivations are what statements say about one source of a base.
func derivations(found []index.Record, to, from identity.Aggregate) (all []api.Derivation, err error) {
	for _, rec := range found {
		f, err := facts(rec)
		if err != nil {
			return nil, err
		}
		s := f.Statement
		if s == nil || s.Type != api.StatementDerived || s.To != to {
			continue
		}
		for _, source := range s.From {
			if source == from {
				all = append(all, api.Derivation{From: source, To: to, How: s.How, Tool: s.Tool, Reason: s.Reason, By: s.By,
					Repository: rec.Repo, Statement: rec.Digest})
			}
		}
	}
	return all, nil
}
