package registry

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/answers"
)

const (
	// defaultPage is the page of a /v1 listing that a client gets that asks for none.
	defaultPage = 100
	// maxCompareBytes is the largest body of a comparison: two shard manifests of 4,096 long names.
	maxCompareBytes = 4 << 20
	// maxQuestionBytes is the largest body of a question about compatibility: two such manifests and a resume request.
	maxQuestionBytes = maxCompareBytes + api.MaxResumeRequest
	// maxKept is the largest page of artifacts, in bytes, whose memory is kept for the next one.
	maxKept = 1 << 20
)

// pages holds the memory of pages of artifacts that were sent: a page each time anew would be most of what a listing
// costs.
var pages = sync.Pool{New: func() any { return new([]byte) }}

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
	list.NotProven = api.NotProven
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

// unavailable returns the blobs that are known to be damaged, missing or unreadable; nil: none is.
func (r *Registry) unavailable(ctx context.Context) (bad map[identity.Digest]bool, err error) {
	lost, err := r.scrubber.Lost(ctx)
	if err != nil {
		return nil, err
	}
	aside := r.aside.list(r.store)
	if len(lost)+len(aside) == 0 {
		return nil, nil
	}
	bad = map[identity.Digest]bool{}
	for _, l := range lost {
		bad[l.Digest] = true
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
			base.Packagings = append(base.Packagings, api.Packaging{ID: rec.Packaging, Packed: packedOf(rec)})
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

// packedOf returns the layers of a base that are no files as they are.
func packedOf(base index.Record) []string {
	var f api.Facts
	if len(base.Facts) == 0 || json.Unmarshal(base.Facts, &f) != nil { // which the registry wrote
		return nil
	}
	return f.Packed
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

// BaseManifest is that of answers.Desk.
func (r *Registry) BaseManifest(
	ctx context.Context, c access.Caller, a identity.Aggregate, repo string, d identity.Digest,
) (identity.Manifest, error) {
	return r.desk.BaseManifest(ctx, c, a, repo, d)
}

// Artifacts lists what was made from a base, whether that base is held here or not, or what nothing binds to one: kind
// by kind, repository by repository, newest first in each. The answer is an api.ArtifactList as JSON, appended to buf.
func (r *Registry) Artifacts(
	ctx context.Context, c access.Caller, f answers.Filter, n int, buf []byte,
) ([]byte, error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return nil, err
	}
	page, err := r.desk.Artifacts(ctx, c, f, n, append(buf, `{"artifacts":[`...))
	if err != nil {
		return nil, err
	}
	out := append(page.JSON, ']')
	bad, err := r.unavailable(ctx)
	if err == nil && page.Held && len(bad) > 0 {
		out, err = r.appendUnavailable(ctx, c, f.Aggregate, bad, out)
	}
	if err != nil {
		return nil, err
	}
	out = append(append(out, `,"not_proven":`...), notProven...)
	if page.Next != "" {
		out = append(append(append(out, `,"next":"`...), page.Next...), '"') // a cursor needs no escapes
	}
	return append(out, '}'), nil
}

// notProven is the JSON of api.NotProven.
var notProven, _ = json.Marshal(api.NotProven) // a list of texts always has one

// appendUnavailable appends the shards of a base that are in bad, as a member of an api.ArtifactList, if there are any.
func (r *Registry) appendUnavailable(
	ctx context.Context, c access.Caller, a identity.Aggregate, bad map[identity.Digest]bool, out []byte,
) ([]byte, error) {
	shards, err := r.unavailableOf(ctx, c, a, bad)
	if err != nil || len(shards) == 0 {
		return out, err
	}
	b, err := json.Marshal(shards)
	return append(append(out, `,"unavailable_shards":`...), b...), err
}

// unavailableOf is unavailableShards of the newest base of an aggregate.
func (r *Registry) unavailableOf(
	ctx context.Context, c access.Caller, a identity.Aggregate, bad map[identity.Digest]bool,
) ([]identity.Digest, error) {
	base, err := r.desk.Newest(ctx, c, a, "", identity.Digest{})
	if errors.Is(err, api.ErrAggregateUnknown) { // deleted meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return r.unavailableShards(ctx, base, bad)
}

// base returns the aggregate of the path. None is all zeros: that stands for what has none.
func (q *request) base() (identity.Aggregate, error) {
	a, err := q.aggregate()
	if err == nil && a.IsZero() {
		err = api.Errorf(api.CodeParameterInvalid, "aggregate: no base has the aggregate %s", q.param("aggregate"))
	}
	return a, err
}

func (r *Registry) getBases(w *response, q *request) error {
	n, err := q.page("limit", defaultPage)
	if err != nil {
		return err
	}
	var after identity.Aggregate
	if s := q.URL.Query().Get("after"); s != "" {
		if after, err = identity.ParseAggregate(s); err != nil {
			return api.Errorf(api.CodeParameterInvalid, "after=%.80q is no cursor of this listing", s)
		}
	}
	list, err := r.Bases(q.Context(), q.caller, after, n)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, list)
}

func (r *Registry) getBase(w *response, q *request) error {
	a, err := q.base()
	if err != nil {
		return err
	}
	n, err := q.page("limit", maxPage)
	if err != nil {
		return err
	}
	base, err := r.Base(q.Context(), q.caller, a, q.URL.Query().Get("after"), n)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, base)
}

func (r *Registry) getBaseManifest(w *response, q *request) error {
	a, err := q.base()
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
	repo := q.values().Get("repo")
	if repo == "" {
		return "", nil
	}
	return repo, api.CheckRepo(repo)
}

func (r *Registry) getArtifacts(w *response, q *request) error {
	a, err := q.base()
	if err != nil {
		return err
	}
	return r.writeArtifacts(w, q, answers.Filter{Aggregate: a})
}

// getUnbound lists the artifacts of which nothing says from which base they were made.
func (r *Registry) getUnbound(w *response, q *request) error {
	if q.URL.Query().Get("unbound") != "true" {
		return api.Errorf(api.CodeParameterInvalid, "only unbound=true is listed here: what was made from a base is at %s",
			"/v1/bases/{aggregate}/artifacts")
	}
	return r.writeArtifacts(w, q, answers.Filter{})
}

// writeArtifacts answers with a page of what the query selects of f.
func (r *Registry) writeArtifacts(w *response, q *request, f answers.Filter) (err error) {
	query := q.values()
	f.Kind, f.Name, f.After = api.Kind(query.Get("kind")), query.Get("name"), query.Get("after")
	f.Evidence = api.Evidence(query.Get("binding"))
	if f.Repo, err = q.repoParam(); err != nil {
		return err
	}
	switch {
	case f.Kind != "" && !f.Kind.Known():
		return api.Errorf(api.CodeParameterInvalid, "kind=%.80q is no kind", f.Kind)
	case f.Evidence != "" && !f.Evidence.Known():
		return api.Errorf(api.CodeParameterInvalid, "binding=%.80q is no evidence", f.Evidence)
	case f.Evidence != "" && f.Aggregate.IsZero():
		return api.Errorf(api.CodeParameterInvalid, "what is unbound has no binding to choose by")
	}
	if f.Since, err = q.since(); err != nil {
		return err
	}
	n, err := q.page("limit", defaultPage)
	if err != nil {
		return err
	}
	buf := pages.Get().(*[]byte)
	defer pages.Put(buf)
	b, err := r.Artifacts(q.Context(), q.caller, f, n, (*buf)[:0])
	if err != nil {
		return err
	}
	if b = append(b, '\n'); cap(b) <= maxKept {
		*buf = b
	}
	return w.bytes(q, http.StatusOK, "application/json", b)
}

// since returns the time of the query from which on artifacts are listed: a moment, or a day in UTC.
func (q *request) since() (t time.Time, err error) {
	s := q.values().Get("since")
	if s == "" {
		return t, nil
	}
	if t, err = time.Parse(time.RFC3339, s); err != nil {
		t, err = time.Parse(time.DateOnly, s)
	}
	if err != nil || t.Year() < 1970 || t.Year() > 2200 {
		return t, api.Errorf(api.CodeParameterInvalid, "since=%.80q: want a time such as 2026-01-31T12:00:00Z or a day", s)
	}
	return t, nil
}

func (r *Registry) getLineage(w *response, q *request) error {
	d, err := api.ParseDigest(q.param("digest"))
	if err != nil {
		return err
	}
	repo, err := q.repoParam()
	if err != nil {
		return err
	}
	n, err := q.page("limit", defaultPage)
	if err != nil {
		return err
	}
	l, err := r.desk.Lineage(q.Context(), q.caller, d, repo, q.URL.Query().Get("after"), n)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, l)
}

// getEvals sends a page of rows once it is read: nobody who reads slowly holds more than that page.
func (r *Registry) getEvals(w *response, q *request) error {
	a, err := q.base()
	if err != nil {
		return err
	}
	n, err := q.page("limit", maxPage)
	if err != nil {
		return err
	}
	if err := q.turn(w, q.memory.asked); err != nil {
		return err
	}
	buf := pages.Get().(*[]byte)
	defer pages.Put(buf)
	b, next, err := r.desk.Evals(q.Context(), q.caller, a, q.values().Get("after"), n, *buf)
	if err != nil {
		return err
	}
	if cap(b) <= maxKept {
		*buf = b
	}
	if next != "" {
		w.next(api.PathEvals(a), url.Values{"limit": {strconv.Itoa(n)}, "after": {next}})
	}
	return w.bytes(q, http.StatusOK, "application/jsonl", b)
}

func (r *Registry) postCompatibility(w *response, q *request) error {
	b, err := q.document(maxQuestionBytes, q.memory.questions)
	if err != nil {
		return err
	}
	if err := q.turn(w, q.memory.asked); err != nil {
		return err
	}
	req, err := answers.ParseCompatibility(b)
	if err != nil {
		return err
	}
	answer, err := r.desk.Compatibility(q.Context(), q.caller, req)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, answer)
}

func (r *Registry) postCompare(w *response, q *request) error {
	b, err := q.document(maxCompareBytes, q.memory.questions)
	if err != nil {
		return err
	}
	if err := q.turn(w, q.memory.asked); err != nil {
		return err
	}
	req, err := answers.ParseCompare(b)
	if err != nil {
		return err
	}
	c, err := r.desk.Compare(q.Context(), q.caller, req)
	if err != nil {
		return err
	}
	return w.json(q, http.StatusOK, c)
}
