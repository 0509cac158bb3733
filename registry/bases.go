package registry

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

const (
	// defaultPage is the page of a /v1 listing that a client gets that asks for none.
	defaultPage = 100
	// maxCompareBytes is the largest body of a comparison: two shard manifests of 4,096 long names.
	maxCompareBytes = 4 << 20
	// maxArtifactBytes is about how many bytes of annotations end a page of artifacts before it has the asked length.
	maxArtifactBytes = 4 << 20
	// maxNewest bounds the search for the newest packaging of a base.
	maxNewest = 10_000
)

// Bases lists up to n base models that the caller may pull, in order of aggregate, after one; zero means from the
// start.
func (r *Registry) Bases(ctx context.Context, c access.Caller, after identity.Aggregate, n int) (api.BaseList, error) {
	list := api.BaseList{Bases: []identity.Summary{}}
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return list, err
	}
	bad, err := r.unavailable(ctx)
	if err != nil {
		return list, err
	}
	for rec, err := range r.ix.Bases(ctx, after, c.Sees, c.Next) {
		if err != nil {
			return list, err
		}
		if len(list.Bases) == n {
			list.Next = list.Bases[n-1].Aggregate.String()
			break
		}
		list.Bases = append(list.Bases, summary(rec))
		shards, err := r.unavailableShards(ctx, rec, bad)
		if err != nil {
			return list, err
		}
		if len(shards) > 0 {
			if list.UnavailableShards == nil {
				list.UnavailableShards = map[identity.Aggregate]int{}
			}
			list.UnavailableShards[rec.Aggregate] = len(shards)
		}
	}
	return list, nil
}

// unavailable returns the blobs that are known to be damaged or missing; nil: none is.
func (r *Registry) unavailable(ctx context.Context) (bad map[identity.Digest]bool, err error) {
	missing, err := r.scrubber.Missing(ctx)
	if err != nil {
		return nil, err
	}
	aside := r.aside.list(r.store)
	if len(missing)+len(aside) == 0 {
		return nil, nil
	}
	bad = map[identity.Digest]bool{}
	for _, m := range missing {
		bad[m.Digest] = true
	}
	for _, d := range aside {
		bad[d] = true
	}
	return bad, nil
}

// unavailableShards returns the shards of a base that are among the bad blobs, in the order of its shards, each once.
func (r *Registry) unavailableShards(
	ctx context.Context, base index.Record, bad map[identity.Digest]bool,
) (found []identity.Digest, err error) {
	if len(bad) == 0 || base.Aggregate.IsZero() {
		return nil, nil
	}
	m, err := r.ix.Shards(ctx, base.Aggregate, base.Repo, base.Digest)
	if errors.Is(err, index.ErrNotFound) { // deleted meanwhile
		return nil, nil
	}
	seen := map[identity.Digest]bool{}
	for _, s := range m.Shards {
		if bad[s.Digest] && !seen[s.Digest] {
			seen[s.Digest] = true
			found = append(found, s.Digest)
		}
	}
	return found, err
}

func summary(rec index.Record) identity.Summary {
	return identity.Summary{
		ManifestType: identity.ManifestType, AggregateAlgorithm: identity.AggregateAlgorithm,
		Aggregate: rec.Aggregate, ShardCount: rec.ShardCount, TotalSize: rec.TotalSize,
	}
}

func unknownAggregate(a identity.Aggregate) error {
	return api.Errorf(api.CodeAggregateUnknown, "no base model of aggregate %s is held here", a)
}

// Base describes where the bytes of a base model are held, as far as the caller may pull them: a page of up to n
// manifests after a cursor, by packaging. ErrAggregateUnknown.
func (r *Registry) Base(
	ctx context.Context,
	c access.Caller,
	a identity.Aggregate,
	after string,
	n int,
) (api.Base, error) {
	var base api.Base
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return base, err
	}
	q := index.Query{Aggregate: a, Kind: api.KindBase, See: c.Sees, Next: c.Next, After: after}
	at := map[identity.Digest]int{}
	found, last, one := 0, "", index.Record{}
	for rec, err := range r.ix.Find(ctx, q) {
		if err != nil {
			return base, err
		}
		if found == n {
			base.Next = last
			break
		}
		held, err := r.held(ctx, rec)
		if err != nil {
			return base, err
		}
		i, ok := at[rec.Packaging]
		if !ok {
			i, at[rec.Packaging] = len(base.Packagings), len(base.Packagings)
			base.Packagings = append(base.Packagings, api.Packaging{ID: rec.Packaging})
		}
		base.Identity, base.Packagings[i].Manifests = summary(rec), append(base.Packagings[i].Manifests, held)
		found, last, one = found+1, index.Cursor(q, rec), rec
	}
	if found == 0 && after == "" {
		return base, unknownAggregate(a)
	}
	if base.Packagings == nil {
		base.Packagings = []api.Packaging{}
	}
	bad, err := r.unavailable(ctx)
	if err == nil {
		base.UnavailableShards, err = r.unavailableShards(ctx, one, bad)
	}
	return base, err
}

func (r *Registry) held(ctx context.Context, rec index.Record) (api.Held, error) {
	tags, err := r.ix.TagsOf(ctx, rec.Repo, rec.Digest)
	if tags == nil {
		tags = []string{}
	}
	return api.Held{
		Repository: rec.Repo,
		Digest:     rec.Digest,
		MediaType:  rec.MediaType,
		Tags:       tags,
		Created:    rec.Created,
	}, err
}

// BaseManifest returns the full shard manifest of a base. Names of shards differ between packagings: repo and d choose
// one; where both are empty it is the newest that the caller may pull. ErrAggregateUnknown.
func (r *Registry) BaseManifest(
	ctx context.Context,
	c access.Caller,
	a identity.Aggregate,
	repo string,
	d identity.Digest,
) (identity.Manifest, error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return identity.Manifest{}, err
	}
	rec, err := r.newest(ctx, c, a, repo, d)
	if err != nil {
		return identity.Manifest{}, err
	}
	return r.ix.Shards(ctx, a, rec.Repo, rec.Digest)
}

// newest finds the newest base of an aggregate that the caller may pull, in one repository or as one manifest if those
// are given.
func (r *Registry) newest(
	ctx context.Context,
	c access.Caller,
	a identity.Aggregate,
	repo string,
	d identity.Digest,
) (best index.Record, err error) {
	looked := 0
	for rec, err := range r.ix.Find(ctx, index.Query{Aggregate: a, Kind: api.KindBase, Repo: repo, See: c.Sees, Next: c.Next}) {
		if err != nil {
			return best, err
		}
		if !d.IsZero() && rec.Digest != d {
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

// ArtifactQuery selects what was made from a base.
type ArtifactQuery struct {
	Kind  api.Kind // empty: every kind, the base itself included
	Repo  string   // empty: every repository that the caller may pull from
	After string   // cursor; empty: from the start
	N     int      // longest page
}

// Artifacts lists what was made from a base, whether that base is held here or not: repository by repository, newest
// first in each.
func (r *Registry) Artifacts(
	ctx context.Context,
	c access.Caller,
	a identity.Aggregate,
	aq ArtifactQuery,
) (api.ArtifactList, error) {
	list := api.ArtifactList{Artifacts: []api.Artifact{}}
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return list, err
	}
	base, err := r.newest(ctx, c, a, "", identity.Digest{})
	held := err == nil
	if err != nil && !errors.Is(err, api.ErrAggregateUnknown) {
		return list, err
	}
	bad, err := r.unavailable(ctx)
	if err == nil && held {
		list.UnavailableShards, err = r.unavailableShards(ctx, base, bad)
	}
	if err != nil {
		return list, err
	}
	q := index.Query{Aggregate: a, Kind: aq.Kind, Repo: aq.Repo, See: c.Sees, Next: c.Next, After: aq.After}
	size, last := 0, ""
	for rec, err := range r.ix.Find(ctx, q) {
		if err != nil {
			return list, err
		}
		for k, v := range rec.Annotations {
			size += len(k) + len(v)
		}
		if len(list.Artifacts) == aq.N || last != "" && size > maxArtifactBytes {
			list.Next = last
			break
		}
		h, err := r.held(ctx, rec)
		if err != nil {
			return list, err
		}
		art := api.Artifact{
			Held:         h,
			Kind:         rec.Kind,
			State:        rec.State,
			ArtifactType: rec.ArtifactType,
			Annotations:  rec.Annotations,
		}
		if rec.Kind != api.KindBase {
			art.Binding = api.Binding{Aggregate: rec.Aggregate, Evidence: rec.Evidence, Held: held}
		}
		list.Artifacts, last = append(list.Artifacts, art), index.Cursor(q, rec)
	}
	return list, nil
}

// Compare compares the content of two base models. ErrAggregateUnknown, ErrManifestUnknown, ErrParameterInvalid.
func (r *Registry) Compare(ctx context.Context, c access.Caller, req api.CompareRequest) (api.Comparison, error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return api.Comparison{}, err
	}
	a, err := r.side(ctx, c, req.A)
	if err != nil {
		return api.Comparison{}, err
	}
	b, err := r.side(ctx, c, req.B)
	if err != nil {
		return api.Comparison{}, err
	}
	diff := identity.Compare(a, b)
	return api.Comparison{
		Same:  a.SameContent(b),
		A:     a.Summary(),
		B:     b.Summary(),
		OnlyA: shards(diff.OnlyA),
		OnlyB: shards(diff.OnlyB),
	}, nil
}

func shards(in []identity.Shard) []api.Shard {
	var out []api.Shard
	for _, s := range in {
		out = append(out, api.Shard{Filename: s.Filename, Size: s.Size, Digest: s.Digest})
	}
	return out
}

func (r *Registry) side(ctx context.Context, c access.Caller, s api.Side) (identity.Manifest, error) {
	given := 0
	for _, is := range []bool{!s.Aggregate.IsZero(), s.Manifest != nil, s.Reference != ""} {
		if is {
			given++
		}
	}
	switch {
	case given != 1:
		return identity.Manifest{}, api.Errorf(
			api.CodeParameterInvalid,
			"each side is one of an aggregate, a manifest and a reference",
		)
	case s.Manifest != nil:
		return *s.Manifest, nil
	case s.Reference != "":
		return r.referred(ctx, c, s.Reference)
	}
	return r.BaseManifest(ctx, c, s.Aggregate, "", identity.Digest{})
}

// referred returns the shard manifest of repository:tag or repository@digest.
func (r *Registry) referred(ctx context.Context, c access.Caller, reference string) (identity.Manifest, error) {
	repo, ref, err := api.ParseReference(reference)
	if err != nil {
		return identity.Manifest{}, err
	}
	if err := c.Check(access.Pull, repo); err != nil {
		return identity.Manifest{}, err
	}
	rec, err := r.ix.Get(ctx, repo, ref.String())
	if err != nil {
		return identity.Manifest{}, unknownManifest(err, repo, ref)
	}
	if rec.Kind != api.KindBase || rec.Aggregate.IsZero() {
		return identity.Manifest{}, api.Errorf(api.CodeAggregateUnknown, "%s is no base model of known content", reference)
	}
	return r.ix.Shards(ctx, rec.Aggregate, repo, rec.Digest)
}

func (r *Registry) getBases(w *response, q *request) error {
	n, err := q.number("limit", defaultPage, maxPage)
	if err != nil {
		return err
	}
	var after identity.Aggregate
	if s := q.URL.Query().Get("after"); s != "" {
		if after, err = identity.ParseAggregate(s); err != nil {
			return api.Errorf(api.CodeParameterInvalid, "after: %v", err)
		}
	}
	list, err := r.Bases(q.Context(), q.caller, after, max(n, 1))
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, list)
}

func (r *Registry) getBase(w *response, q *request) error {
	a, err := q.aggregate()
	if err != nil {
		return err
	}
	n, err := q.number("limit", maxPage, maxPage)
	if err != nil {
		return err
	}
	base, err := r.Base(q.Context(), q.caller, a, q.URL.Query().Get("after"), max(n, 1))
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, base)
}

func (r *Registry) getBaseManifest(w *response, q *request) error {
	a, err := q.aggregate()
	if err != nil {
		return err
	}
	repo, err := q.repoParam()
	if err != nil {
		return err
	}
	var d identity.Digest
	if s := q.URL.Query().Get("digest"); s != "" {
		if d, err = api.ParseDigest(s); err != nil {
			return err
		}
	}
	m, err := r.BaseManifest(q.Context(), q.caller, a, repo, d)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, m)
}

// repoParam returns the repository of the query, or nothing.
func (q *request) repoParam() (string, error) {
	repo := q.URL.Query().Get("repo")
	if repo == "" {
		return "", nil
	}
	return repo, api.CheckRepo(repo)
}

func (r *Registry) getArtifacts(w *response, q *request) error {
	a, err := q.aggregate()
	if err != nil {
		return err
	}
	aq := ArtifactQuery{Kind: api.Kind(q.URL.Query().Get("kind")), After: q.URL.Query().Get("after")}
	if aq.Repo, err = q.repoParam(); err != nil {
		return err
	}
	if aq.Kind != "" && !aq.Kind.Known() {
		return api.Errorf(api.CodeParameterInvalid, "kind=%.80q is no kind", aq.Kind)
	}
	n, err := q.number("limit", defaultPage, maxPage)
	if err != nil {
		return err
	}
	aq.N = max(n, 1)
	list, err := r.Artifacts(q.Context(), q.caller, a, aq)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, list)
}

func (r *Registry) postCompare(w *response, q *request) error {
	b, err := q.document(maxCompareBytes)
	if err != nil {
		return err
	}
	var req api.CompareRequest
	if err := json.Unmarshal(b, &req); err != nil {
		return api.Errorf(api.CodeParameterInvalid, "body: %v", err)
	}
	c, err := r.Compare(q.Context(), q.caller, req)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, c)
}
