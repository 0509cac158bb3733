// Package answers answers questions about what was made from a base: which artifacts there are, what they were made
// from and what was made from them, and whether two things were made from the same bytes.
//
// Every question has the caller as an argument, and every answer shows only what that caller may pull: what is hidden
// counts as not there. Answers are made of the index, and of the documents inside artifacts where they are asked about.
package answers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// Desk answers questions. It is safe for concurrent use.
type Desk struct {
	Index *index.Index
	Blobs Blobs
	// Admit waits until a text of that many bytes may be held in memory, and parsed. release says that it is no more; it
	// is to be called also after an error, such as that of ctx.
	Admit func(ctx context.Context, size int64) (release func(), err error)
}

// Blobs are those of a store.
type Blobs interface {
	classify.Blobs
	Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error)
}

// Filter selects artifacts.
type Filter struct {
	Aggregate identity.Aggregate // of the base that they were made from; zero: those of which nothing says that
	Kind      api.Kind           // empty: every kind, the base itself included
	Name      string             // what they call themselves; empty: whatever that is
	Since     time.Time          // when they were accepted at the earliest; zero: whenever
	Evidence  api.Evidence       // only what is bound by that; empty: by whatever
	Repo      string             // empty: every repository that the caller may pull from
	After     string             // Next of the page before; empty: from the start
}

// Artifacts appends a page of up to n artifacts to buf, as JSON with commas between.
func (d *Desk) Artifacts(ctx context.Context, c access.Caller, f Filter, n int, buf []byte) (index.Page, error) {
	see, next := c.Filter()
	if f.Evidence == api.EvidenceNone { // what has no binding is unbound, or a base
		held, err := d.Index.Holds(ctx, f.Aggregate, see, next)
		return index.Page{JSON: buf, Held: held}, err
	}
	return d.Index.Listing(ctx, index.Query{
		Aggregate: f.Aggregate, Unbound: f.Aggregate.IsZero(), Kind: f.Kind, Name: f.Name, Since: f.Since,
		Evidence: f.Evidence, Repo: f.Repo, See: see, Next: next, After: f.After,
	}, n, buf)
}

const (
	// What an artifact in a list of links shows at most, as listings do; see api.Artifact.
	maxTags        = 16
	maxAnnotations = 2 << 10
	maxFacts       = 4 << 10

	maxBinds = 16 // bind statements about one artifact that the index counts
)

// view is what one caller sees while one question is answered.
type view struct {
	*Desk
	ctx  context.Context
	c    access.Caller
	held map[identity.Aggregate]bool
}

func (d *Desk) view(ctx context.Context, c access.Caller) *view {
	return &view{d, ctx, c, map[identity.Aggregate]bool{}}
}

// holds says whether the caller may pull a base of that aggregate.
func (v *view) holds(a identity.Aggregate) (bool, error) {
	if a.IsZero() {
		return false, nil
	}
	held, known := v.held[a]
	if known {
		return held, nil
	}
	held, err := v.Index.Holds(v.ctx, a, v.c.Sees, v.c.Next)
	v.held[a] = held
	return held, err
}

// facts returns what the documents of an artifact say.
func facts(rec index.Record) (f api.Facts, err error) {
	if len(rec.Facts) == 0 {
		return f, nil
	}
	if err = json.Unmarshal(rec.Facts, &f); err != nil {
		err = fmt.Errorf("%w: facts of %s@%s: %w", index.ErrDamaged, rec.Repo, rec.Digest, err)
	}
	return f, err
}

// said is facts, with what a bind statement contradicts of that, if nothing else does.
func (v *view) said(rec index.Record) (api.Facts, error) {
	f, err := facts(rec)
	if err == nil && f.Conflict == nil {
		f.Conflict, err = v.Index.Contradiction(v.ctx, rec.Repo, rec.Digest)
	}
	return f, err
}

// bindings returns to which bases an artifact is bound, the first one first; none for a base.
func (v *view) bindings(rec index.Record) (all []api.Binding, err error) {
	if rec.Kind == api.KindBase {
		return nil, nil
	}
	found, err := v.Index.Bindings(v.ctx, rec.Repo, rec.Digest)
	if err != nil {
		return nil, err
	}
	for _, b := range found {
		out := api.Binding{Aggregate: b.Aggregate, Evidence: b.Evidence}
		if !b.BoundBy.IsZero() {
			out.Source = "statement " + b.BoundBy.String()
		}
		if out.Held, err = v.holds(b.Aggregate); err != nil {
			return nil, err
		}
		all = append(all, out)
	}
	if len(all) == 0 {
		all = []api.Binding{{Evidence: api.EvidenceNone}}
	}
	return all, nil
}

// manyBind says whether more bind statements of its repository are about a record than the index counts. Where it is
// hard to tell, for all the other statements about it, it says so, too.
func (v *view) manyBind(rec index.Record) (bool, error) {
	found, next, err := v.Index.Records(v.ctx, index.Query{Target: rec.Digest, Relation: api.RelationStatement,
		Repo: rec.Repo}, maxStatements)
	n := 0
	for _, s := range found {
		f, err := facts(s)
		if err != nil {
			return false, err
		}
		if f.Statement != nil && f.Statement.Type == api.StatementBind {
			n++
		}
	}
	return n > maxBinds || next != "", err
}

// artifact describes a record whole.
func (v *view) artifact(rec index.Record) (*api.Artifact, error) {
	tags, err := v.Index.TagsOf(v.ctx, rec.Repo, rec.Digest)
	if err != nil {
		return nil, err
	}
	f, err := v.said(rec)
	if err != nil {
		return nil, err
	}
	bindings, err := v.bindings(rec)
	if err != nil {
		return nil, err
	}
	a := &api.Artifact{
		Held: api.Held{Repository: rec.Repo, Digest: rec.Digest, MediaType: rec.MediaType, Created: rec.Created,
			Tags: append([]string{}, tags[:min(len(tags), maxTags)]...), MoreTags: len(tags) > maxTags},
		Kind: rec.Kind, State: rec.State, ArtifactType: rec.ArtifactType, Name: rec.Name, Annotations: rec.Annotations,
	}
	if len(rec.Facts) > 0 || f.Conflict != nil {
		a.Facts = &f
	}
	if len(bindings) > 0 {
		a.Binding = bindings[0]
	}
	if len(bindings) > 1 {
		a.Bindings, a.Bases = bindings, len(bindings)
	}
	if a.Binding.Source != "" {
		a.MoreBindings, err = v.manyBind(rec)
	}
	return a, err
}

// short is artifact without what is long.
func (v *view) short(rec index.Record) (*api.Artifact, error) {
	a, err := v.artifact(rec)
	if err != nil {
		return nil, err
	}
	size := 0
	for k, v := range a.Annotations {
		size += len(k) + len(v)
	}
	if size > maxAnnotations {
		a.Annotations, a.AnnotationsOmitted = nil, true
	}
	if len(rec.Facts) > maxFacts {
		a.Facts, a.FactsOmitted = nil, true
	}
	return a, nil
}

// manifest finds a manifest by its digest, in a repository or, if that is empty, in the first one that the caller may
// pull from. ErrManifestUnknown.
func (v *view) manifest(d identity.Digest, repo string) (rec index.Record, err error) {
	unknown := api.Errorf(api.CodeManifestUnknown, "manifest %s is unknown here", d)
	if repo != "" {
		if err := v.c.Check(access.Pull, repo); err != nil {
			return rec, err
		}
		rec, err = v.Index.Get(v.ctx, repo, d.String())
		if errors.Is(err, index.ErrNotFound) {
			err = unknown
		}
		return rec, err
	}
	for repo, err := range v.Index.ManifestHolders(v.ctx, d) {
		if err != nil {
			return rec, err
		}
		if !v.c.Sees(repo) {
			continue
		}
		rec, err := v.Index.Get(v.ctx, repo, d.String())
		if !errors.Is(err, index.ErrNotFound) { // deleted meanwhile
			return rec, err
		}
	}
	return rec, unknown
}

// first returns the first record of a query, as far as the caller sees; nil: there is none.
func (v *view) first(q index.Query) (*index.Record, error) {
	q.See, q.Next = v.c.Sees, v.c.Next
	for rec, err := range v.Index.Find(v.ctx, q) {
		if err != nil {
			return nil, err
		}
		return &rec, nil
	}
	return nil, nil
}

// base describes a base of that aggregate; nil: the caller sees none.
func (v *view) base(a identity.Aggregate) (*api.Artifact, error) {
	rec, err := v.first(index.Query{Aggregate: a, Kind: api.KindBase})
	if rec == nil || err != nil {
		return nil, err
	}
	return v.short(*rec)
}
