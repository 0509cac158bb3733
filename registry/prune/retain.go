package prune

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// Retention says which manifests may go: in each of some repositories those of a kind, but the newest of each name. A
// manifest that a tag names, that an index of its repository lists, or that another manifest of any repository refers
// to, by its subject or by what its documents name, never goes, nor a base of which anything is known to be made.
type Retention struct {
	Repos  []string // globs of repositories, as in the rules of access
	Kind   api.Kind
	Keep   int  // how many of the newest of a name stay in any case
	DryRun bool // change nothing
}

// Manifest is a manifest that went, or would, or that stays in a dry run.
type Manifest struct {
	Repository string          `json:"repository"`
	Name       string          `json:"name,omitempty"` // what it calls itself; empty: nothing
	Digest     identity.Digest `json:"digest"`
	Created    time.Time       `json:"created"`
	Bytes      int64           `json:"bytes,omitempty"` // of the blobs of one that goes, which others may share
	Kept       string          `json:"kept,omitempty"`  // why it stays; empty: it goes
}

// Retained counts the manifests that a retention was about.
type Retained struct {
	DryRun   bool  `json:"dry_run"`
	Found    int   `json:"found"`
	Newest   int   `json:"newest"`   // stay as they are new
	Referred int   `json:"referred"` // are old, and stay as something names them
	Retired  int   `json:"retired"`  // went, or would
	Bytes    int64 `json:"bytes"`    // of the blobs of those
}

// Query returns t in the form that the handler reads.
func (t Retention) Query() url.Values {
	return url.Values{
		"repo": t.Repos, "kind": {string(t.Kind)}, "keep": {strconv.Itoa(t.Keep)}, "dry-run": {strconv.FormatBool(t.DryRun)},
	}
}

// parseRetention reads a query, in which nothing may be left out.
func parseRetention(q url.Values) (t Retention, err error) {
	t.Repos, t.Kind = q["repo"], api.Kind(q.Get("kind"))
	if t.Keep, err = strconv.Atoi(q.Get("keep")); err != nil {
		return t, err
	}
	t.DryRun, err = strconv.ParseBool(q.Get("dry-run"))
	return t, err
}

// Retain deletes old manifests, repository by repository, and tells tell of each; in a dry run also of each that stays.
// Pushes to a repository wait while it is at work there. The bytes stay until blobs that nothing refers to are
// collected. ErrUnauthorized or ErrDenied for a caller who may not delete in one of the repositories, ErrNameUnknown if
// there is none of a name that is no glob, ErrParameterInvalid for what is neither, ErrUnavailable while the index is not
// level with the store; what it returns is true also with an error.
func (p *Pruner) Retain(
	ctx context.Context, c access.Caller, t Retention, tell func(Manifest) error,
) (Retained, error) {
	r := retaining{Pruner: p, terms: t, tell: tell, did: Retained{DryRun: t.DryRun}, referred: map[identity.Digest]string{}}
	repos, err := access.ParseRepositories(t.Repos)
	if err != nil {
		return r.did, api.Errorf(api.CodeParameterInvalid, "%v", err)
	}
	if err := p.Level(ctx); err != nil {
		return r.did, err
	}
	chosen, err := p.choose(ctx, c, repos)
	if err != nil {
		return r.did, err
	}
	for _, name := range t.Repos {
		if !strings.Contains(name, "*") && !slices.Contains(chosen, name) {
			return r.did, api.Errorf(api.CodeNameUnknown, "there is no repository %s", name)
		}
	}
	if err := r.prepare(ctx, chosen); err != nil {
		return r.did, err
	}
	for _, repo := range chosen {
		if err := p.Hold(ctx, repo, func() error { return r.repo(ctx, repo) }); err != nil {
			return r.did, fmt.Errorf("repository %s: %w", repo, err)
		}
	}
	return r.did, nil
}

// choose returns the repositories that the globs mean, in all of which the caller may delete.
func (p *Pruner) choose(ctx context.Context, c access.Caller, repos access.Repositories) (chosen []string, err error) {
	for repo, err := range p.Index.Repos(ctx, "") {
		if err != nil {
			return nil, err
		}
		if !repos.Match(repo) {
			continue
		}
		if err := c.Check(access.Delete, repo); err != nil {
			return nil, err
		}
		chosen = append(chosen, repo)
	}
	return chosen, nil
}

// retireAtOnce is how many manifests go in one change.
const retireAtOnce = 256

// retaining is one retention.
type retaining struct {
	*Pruner
	terms Retention
	tell  func(Manifest) error
	did   Retained
	// referred are the manifests that may go, if all that refer to them are known, each with what refers to it; empty:
	// nothing does. One that is pushed or becomes old later is not in here, and stays.
	referred map[identity.Digest]string
}

// prepare finds out what refers to the manifests that may go, in all repositories.
func (r *retaining) prepare(ctx context.Context, chosen []string) error {
	for _, repo := range chosen {
		seen := map[string]int{}
		for rec, err := range r.Index.Find(ctx, index.Query{Repo: repo}) { // the newest first
			if err != nil {
				return err
			}
			if r.isOld(rec, seen) {
				r.referred[rec.Digest] = ""
			}
		}
	}
	if len(r.referred) == 0 {
		return nil
	}
	for repo, err := range r.Index.Repos(ctx, "") {
		if err != nil {
			return err
		}
		for rec, err := range r.Index.Find(ctx, index.Query{Repo: repo}) {
			if err != nil {
				return err
			}
			if why, old := r.referred[rec.Subject]; old && why == "" {
				r.referred[rec.Subject] = by(rec)
			}
		}
	}
	return nil
}

// by says what refers to a manifest.
func by(rec index.Record) string {
	return fmt.Sprintf("%s %s@%s refers to it", cmp.Or(string(rec.Kind), "manifest"), rec.Repo, rec.Digest)
}

// isOld says whether a record is of the kind and not among the newest of its name. seen counts those of each name.
func (r *retaining) isOld(rec index.Record, seen map[string]int) bool {
	if rec.Kind != r.terms.Kind {
		return false
	}
	seen[nameOf(rec)]++
	return seen[nameOf(rec)] > r.terms.Keep
}

// nameOf returns what a manifest calls itself, or nothing.
func nameOf(rec index.Record) string { return cmp.Or(rec.Name, rec.Annotations[v1.AnnotationTitle]) }

// contents are the digests by which others may link to an artifact: its manifest's, and its weights'.
func contents(rec index.Record) ([]identity.Digest, error) {
	all := []identity.Digest{rec.Digest}
	if len(rec.Facts) == 0 {
		return all, nil
	}
	var f api.Facts
	if err := json.Unmarshal(rec.Facts, &f); err != nil {
		return nil, fmt.Errorf("%w: facts of %s: %w", index.ErrDamaged, rec.Digest, err)
	}
	if f.Checkpoint != nil && !f.Checkpoint.Weights.IsZero() {
		all = append(all, f.Checkpoint.Weights)
	}
	if f.Adapter != nil && !f.Adapter.Weights.IsZero() {
		all = append(all, f.Adapter.Weights)
	}
	return all, nil
}

// linked says what links to an artifact; empty: nothing. Others of its kind count for nothing: they name what it names.
func (r *retaining) linked(ctx context.Context, rec index.Record) (string, error) {
	all, err := contents(rec)
	if err != nil {
		return "", err
	}
	for _, d := range all {
		for o, err := range r.Index.Find(ctx, index.Query{Target: d}) {
			if err != nil {
				return "", err
			}
			if o.Kind != rec.Kind {
				return by(o), nil
			}
		}
	}
	return "", nil
}

// repo is called by Hold.
func (r *retaining) repo(ctx context.Context, repo string) error {
	var old []index.Record
	seen := map[string]int{}
	for rec, err := range r.Index.Find(ctx, index.Query{Repo: repo}) { // the newest first
		if err != nil {
			return err
		}
		if rec.Kind != r.terms.Kind {
			continue
		}
		r.did.Found++
		why := fmt.Sprintf("among the newest %d", r.terms.Keep)
		if !r.isOld(rec, seen) {
			r.did.Newest++
		} else if why, err = r.reason(ctx, rec); err != nil {
			return err
		} else if why != "" {
			r.did.Referred++
		} else {
			old = append(old, rec)
			continue
		}
		if err := r.stays(rec, why); err != nil {
			return err
		}
	}
	for some := range slices.Chunk(old, retireAtOnce) {
		if err := r.retire(ctx, some); err != nil {
			return err
		}
	}
	return nil
}

func (r *retaining) stays(rec index.Record, why string) error {
	if !r.terms.DryRun {
		return nil
	}
	m := manifestOf(rec)
	m.Kept = why
	return r.tell(m)
}

func manifestOf(rec index.Record) Manifest {
	return Manifest{Repository: rec.Repo, Name: nameOf(rec), Digest: rec.Digest, Created: rec.Created}
}

// reason says why an old manifest stays; empty: it does not.
func (r *retaining) reason(ctx context.Context, rec index.Record) (string, error) {
	tags, err := r.Index.TagsOf(ctx, rec.Repo, rec.Digest)
	switch {
	case err != nil:
		return "", err
	case len(tags) == 1:
		return "tag " + tags[0], nil
	case len(tags) > 1:
		return fmt.Sprintf("tag %s and %d more", tags[0], len(tags)-1), nil
	}
	for list, err := range r.Index.Parents(ctx, rec.Repo, rec.Digest) {
		return fmt.Sprintf("index %s lists it", list), err
	}
	why, known := r.referred[rec.Digest]
	switch {
	case why != "":
		return why, nil
	case !known:
		return "became old while this ran", nil
	}
	for o, err := range r.Index.Find(ctx, index.Query{Repo: rec.Repo, Subject: rec.Digest}) { // since prepare
		return by(o), err
	}
	if why, err = r.linked(ctx, rec); err != nil || why != "" {
		return why, err
	}
	return r.reasonOfBase(ctx, rec)
}

// reasonOfBase says what is made of a base; empty: nothing that is known, or it is no base.
func (r *retaining) reasonOfBase(ctx context.Context, rec index.Record) (string, error) {
	if rec.Kind != api.KindBase || rec.Aggregate.IsZero() {
		return "", nil
	}
	for o, err := range r.Index.Find(ctx, index.Query{Aggregate: rec.Aggregate}) {
		if err != nil {
			return "", err
		}
		if o.Kind != api.KindBase {
			return fmt.Sprintf("%s %s@%s is made of it", cmp.Or(string(o.Kind), "manifest"), o.Repo, o.Digest), nil
		}
	}
	return "", nil
}

// retire deletes manifests of one repository that nothing names.
func (r *retaining) retire(ctx context.Context, old []index.Record) error {
	rows := make([]Manifest, len(old))
	for i, rec := range old {
		_, body, err := r.Index.Manifest(ctx, rec.Repo, rec.Digest.String())
		if err != nil {
			return err
		}
		m, err := classify.ParseTaken(rec.MediaType, body)
		if err != nil {
			return fmt.Errorf("manifest %s: %w", rec.Digest, err)
		}
		rows[i] = manifestOf(rec)
		for _, b := range m.Blobs() {
			rows[i].Bytes += b.Size
		}
	}
	if !r.terms.DryRun {
		if err := r.Delete(ctx, old); err != nil {
			return err
		}
	}
	for _, row := range rows {
		r.did.Retired, r.did.Bytes = r.did.Retired+1, r.did.Bytes+row.Bytes
		if err := r.tell(row); err != nil {
			return err
		}
	}
	return nil
}
