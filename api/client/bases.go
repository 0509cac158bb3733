package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

const (
	maxHealth = 4 << 20  // bounds the answer of a health check, in bytes
	maxState  = 16 << 20 // bounds a model state, which holds the full manifest of its base, in bytes

	answerTime = 30 * time.Second // bounds either, from the question to the last byte
)

// ErrSlow: a server's report about itself did not come whole in the time that such a small answer may take.
var ErrSlow = errors.New("the whole answer took too long")

// within bounds a question in time. The error is then ErrSlow.
func within(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, answerTime, fmt.Errorf("%w: more than %s", ErrSlow, answerTime))
}

// Bases lists at most limit base models that the caller may pull, in order of aggregate, from the one that follows
// after, which is empty or the Next of the page before. A limit of zero leaves the number to the registry.
func (c *Client) Bases(ctx context.Context, after string, limit int) (list api.BaseList, err error) {
	err = c.json(ctx, call{
		method: http.MethodGet, path: api.PathBases, query: paging("after", after, "limit", limit),
	}, &list)
	return list, err
}

// Base describes one base model: its summary and the first page of its packagings that the caller may pull. One that there
// is none of is api.ErrAggregateUnknown.
func (c *Client) Base(ctx context.Context, a identity.Aggregate) (api.Base, error) {
	return c.BasePage(ctx, a, "", 0)
}

// BasePage is Base for the page that follows after, which is empty or the Next of the page before; limit bounds the
// manifests on it, and zero leaves the number to the registry. One packaging may go on on the next page.
func (c *Client) BasePage(ctx context.Context, a identity.Aggregate, after string, limit int) (base api.Base, err error) {
	err = c.json(ctx, call{
		method: http.MethodGet, path: api.PathBase(a), missing: api.ErrAggregateUnknown,
		query: paging("after", after, "limit", limit),
	}, &base)
	if err == nil && base.Identity.Aggregate != a {
		err = fmt.Errorf("%s: asked for base %s, was told of %s: %w", c.Host(), a, base.Identity.Aggregate, ErrMismatch)
	}
	return base, err
}

// BaseManifest fetches the full shard manifest of a base model and checks it, its aggregate included.
func (c *Client) BaseManifest(ctx context.Context, a identity.Aggregate) (identity.Manifest, error) {
	var m identity.Manifest
	err := c.json(ctx, call{
		method: http.MethodGet, path: api.PathBaseManifest(a), missing: api.ErrAggregateUnknown,
	}, &m)
	if err == nil && m.Aggregate != a {
		err = fmt.Errorf("%s: asked for base %s, got the manifest of %s: %w", c.Host(), a, m.Aggregate, ErrMismatch)
	}
	return m, err
}

// Filter selects artifacts of a listing. The zero Filter selects all of them.
type Filter struct {
	Kind    api.Kind
	Name    string       // what they call themselves
	Since   time.Time    // when the registry accepted them at the earliest
	Binding api.Evidence // only what is bound by that; not for what is unbound
	Repo    string
}

func (f Filter) query(after string, limit int) url.Values {
	q := paging("after", after, "limit", limit)
	for name, value := range map[string]string{
		"kind": string(f.Kind), "name": f.Name, "binding": string(f.Binding), "repo": f.Repo,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if !f.Since.IsZero() {
		q.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return q
}

// Made lists at most limit artifacts made from a base, whether that is held there or not, and the base itself: kind by
// kind, repository by repository, newest first in each. after is empty or the Next of the page before. A page may be
// short, or empty, and still have a Next.
func (c *Client) Made(ctx context.Context, a identity.Aggregate, f Filter, after string, limit int) (
	list api.ArtifactList, err error,
) {
	err = c.json(ctx, call{method: http.MethodGet, path: api.PathArtifacts(a), query: f.query(after, limit)}, &list)
	return list, err
}

// Unbound is Made for the artifacts of which nothing says from which base they were made.
func (c *Client) Unbound(ctx context.Context, f Filter, after string, limit int) (list api.ArtifactList, err error) {
	q := f.query(after, limit)
	q.Set("unbound", "true")
	err = c.json(ctx, call{method: http.MethodGet, path: api.PathUnbound, query: q}, &list)
	return list, err
}

// Lineage says what the artifact of a manifest was made from, and lists at most limit things that name it. An empty repo
// is any that the caller may pull from; after is empty or the Next of the page before, and only the first page has the
// parents. One that there is none of is api.ErrManifestUnknown.
func (c *Client) Lineage(ctx context.Context, d identity.Digest, repo, after string, limit int) (
	l api.Lineage, err error,
) {
	q := paging("after", after, "limit", limit)
	if repo != "" {
		q.Set("repo", repo)
	}
	err = c.json(ctx, call{
		method: http.MethodGet, path: api.PathLineage(d), query: q, missing: api.ErrManifestUnknown,
	}, &l)
	if err == nil && l.Artifact.Digest != d {
		err = fmt.Errorf("%s: asked for %s, was told of %s: %w", c.Host(), d, l.Artifact.Digest, ErrMismatch)
	}
	return l, err
}

// Evals opens the rows of the evals of a base, one JSON object a line: api.EvalRow. They are fetched page by page as they
// are read. The caller closes them. Reading ends with an error where a page could not be had.
func (c *Client) Evals(ctx context.Context, a identity.Aggregate) (io.ReadCloser, error) {
	r := &evalRows{open: func(query url.Values) (*http.Response, error) {
		return c.do(ctx, call{method: http.MethodGet, path: api.PathEvals(a), query: query}, http.StatusOK)
	}}
	if err := r.turn(nil); err != nil {
		return nil, err
	}
	return r, nil
}

// evalRows reads the pages of a table of evals one after the other.
type evalRows struct {
	open func(query url.Values) (*http.Response, error)
	page io.ReadCloser
	next url.Values // query of the page that follows; nil: there is none
}

// turn opens a page.
func (r *evalRows) turn(query url.Values) error {
	resp, err := r.open(query)
	if err != nil {
		return err
	}
	r.page, r.next = resp.Body, nil
	if link, rel, _ := strings.Cut(resp.Header.Get("Link"), ">;"); strings.TrimSpace(rel) == `rel="next"` {
		to, err := url.Parse(strings.TrimPrefix(link, "<"))
		if err != nil {
			return errors.Join(fmt.Errorf("link to the next page: %w", err), r.page.Close())
		}
		r.next = to.Query()
	}
	return nil
}

// Read implements io.Reader.
func (r *evalRows) Read(b []byte) (int, error) {
	for {
		n, err := r.page.Read(b)
		if n > 0 || err != io.EOF || r.next == nil {
			if r.next != nil && err == io.EOF {
				err = nil
			}
			return n, err
		}
		next := r.next
		if err := errors.Join(r.page.Close(), r.turn(next)); err != nil {
			return 0, err
		}
	}
}

// Close implements io.Closer.
func (r *evalRows) Close() error { return r.page.Close() }

// Compatibility asks the registry one of the four questions.
func (c *Client) Compatibility(ctx context.Context, req api.CompatibilityRequest) (answer api.Compatibility, err error) {
	err = c.ask(ctx, api.PathCompatibility, api.ErrManifestUnknown, req, &answer)
	return answer, err
}

// ask posts a question.
func (c *Client) ask(ctx context.Context, path string, missing error, question, answer any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	return c.json(ctx, call{
		method: http.MethodPost, path: path, missing: missing,
		header: map[string]string{"Content-Type": "application/json"},
		body:   bytes.NewReader(body), size: int64(len(body)),
		rewind: func() (io.Reader, error) { return bytes.NewReader(body), nil },
	}, answer)
}

// Compare asks the registry whether two bases are the same multiset of shard bytes.
func (c *Client) Compare(ctx context.Context, a, b api.Side) (answer api.Comparison, err error) {
	err = c.ask(ctx, api.PathCompare, api.ErrAggregateUnknown, api.CompareRequest{A: a, B: b}, &answer)
	return answer, err
}

// Health asks any address that ends in /health what it serves, be it the registry's, a resident model's or another
// server's that speaks the same form. The token goes only to the client's own registry. A server that says it is
// degraded, with 503, has answered. A report that two readers could take for two things is an error: with a member twice
// in one object, or one of the identity in other letter case. ErrSlow.
func (c *Client) Health(ctx context.Context, url string) (h api.Health, err error) {
	ctx, done := within(ctx)
	defer done()
	resp, err := c.do(ctx, call{method: http.MethodGet, path: url}, http.StatusOK, http.StatusServiceUnavailable)
	if err != nil {
		return h, err
	}
	defer resp.Body.Close()
	b, err := bounded(resp, maxHealth)
	if err == nil {
		err = strictjson.Read(b, func(r *strictjson.Reader) error { return r.Object(exactly(r, identityMember)) })
	}
	if err == nil {
		err = json.Unmarshal(b, &h)
	}
	if err == nil && h.Status == "" {
		err = fmt.Errorf("no status")
	}
	if err != nil {
		return h, fmt.Errorf("%s: answer %s is no health report: %w", url, strconv.Itoa(resp.StatusCode), err)
	}
	return h, nil
}

// ModelState is what a server says of its model where its debug answers are enabled.
type ModelState struct {
	Manifest   *identity.Manifest // nil: it has no base identity
	Provenance []byte             // of its execution, an unchecked kiln.execution-provenance.v1; nil: not recorded
}

// ModelState asks any address that ends in /v1/debug/model-state. It gets no token but at the client's own registry.
// Servers refuse with 403 while the answer is not enabled: that is a *StatusError. The manifest is checked. ErrSlow.
func (c *Client) ModelState(ctx context.Context, url string) (m ModelState, err error) {
	ctx, done := within(ctx)
	defer done()
	resp, err := c.do(ctx, call{method: http.MethodGet, path: url}, http.StatusOK)
	if err != nil {
		return m, err
	}
	defer resp.Body.Close()
	var state struct {
		Model struct {
			Manifest   *identity.Manifest `json:"base_weight_shard_manifest"`
			Provenance json.RawMessage    `json:"execution_provenance"`
		} `json:"model"`
	}
	b, err := bounded(resp, maxState)
	if err == nil {
		err = strictjson.Read(b, func(r *strictjson.Reader) error { return r.Skip() })
	}
	if err == nil {
		err = json.Unmarshal(b, &state)
	}
	if err != nil {
		return m, fmt.Errorf("%s: the answer is no model state: %w", url, err)
	}
	if p := state.Model.Provenance; len(p) > 0 && string(p) != "null" {
		m.Provenance = p
	}
	m.Manifest = state.Model.Manifest
	return m, nil
}

// identityMember is the member of a health report that names a base.
const identityMember = "base_weight_identity"

// exactly reads a member of an object and refuses another spelling of names. The identity is read in the same way.
func exactly(r *strictjson.Reader, names ...string) func(name string) error {
	return func(name string) error {
		for _, want := range names {
			if name != want && strings.EqualFold(name, want) {
				return r.Fail(r.Offset(), strictjson.RuleExactName, "member %.80q must be spelled %q", name, want)
			}
		}
		if name == identityMember && r.Kind() == strictjson.Object {
			return r.Object(exactly(r, "manifest_type", "aggregate_algorithm", "aggregate_sha256", "shard_count",
				"total_size_bytes"))
		}
		return r.Skip()
	}
}

// maxPages ends a listing that goes on for ever: a million entries with the pages of a registry of this project.
const maxPages = 10_000

// ErrListing: a server's listing can't be read to its end.
var ErrListing = errors.New("the listing does not end")

// BasePages yields what a registry says about a base, page by page. ErrListing.
func (c *Client) BasePages(ctx context.Context, a identity.Aggregate) iter.Seq2[api.Base, error] {
	return pages(ctx, c, a.String(), func(after string) (page api.Base, next string, items int, err error) {
		page, err = c.BasePage(ctx, a, after, 0)
		for _, p := range page.Packagings {
			items += len(p.Manifests)
		}
		return page, page.Next, items, err
	})
}

// ArtifactPages yields what a registry says was made from a base or, where that is zero, has no base that is known,
// page by page of at most limit. Pages may be empty. ErrListing.
func (c *Client) ArtifactPages(ctx context.Context, a identity.Aggregate, f Filter, limit int) (
	all iter.Seq2[api.ArtifactList, error],
) {
	return pages(ctx, c, a.String(), func(after string) (page api.ArtifactList, next string, items int, err error) {
		if a.IsZero() {
			page, err = c.Unbound(ctx, f, after, limit)
		} else {
			page, err = c.Made(ctx, a, f, after, limit)
		}
		return page, page.Next, mayBeEmpty, err
	})
}

// LineagePages yields what an artifact was made from and what names it, page by page: first all that names it, then the
// further pages of what it was made from. ErrListing.
func (c *Client) LineagePages(ctx context.Context, d identity.Digest, repo string) iter.Seq2[api.Lineage, error] {
	parents := "" // where those go on
	return pages(ctx, c, d.String(), func(after string) (page api.Lineage, next string, items int, err error) {
		page, err = c.Lineage(ctx, d, repo, after, 0)
		parents = cmp.Or(page.NextParents, parents)
		if next = page.Next; next == "" && err == nil {
			next, parents = parents, ""
		}
		return page, next, mayBeEmpty, err
	})
}

// mayBeEmpty is the number of items of a page that need not have any.
const mayBeEmpty = -1

// pages follows the cursors of a listing: fetch returns the page after one, the next cursor, and the number of items on
// the page. The last pair has an error, or else a page that no other one follows.
func pages[T any](
	ctx context.Context, c *Client, what string, fetch func(after string) (page T, next string, items int, err error),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		seen := map[identity.Digest]bool{} // cursors, of any length
		for after, n := "", 1; ; n++ {
			var page T
			var next string
			var items int
			err := c.Retry(ctx, what, func() (err error) {
				page, next, items, err = fetch(after)
				return err
			})
			if err == nil && next != "" {
				err = goesOn(seen, next, items, n)
			}
			if err != nil {
				err = fmt.Errorf("page %d of %s: %w", n, c.Host(), err)
			}
			if !yield(page, err) || err != nil || next == "" {
				return
			}
			after = next
		}
	}
}

// goesOn says why the page after the nth, at the cursor next, would lead nowhere.
func goesOn(seen map[identity.Digest]bool, next string, items, n int) error {
	cursor := identity.Sum([]byte(next))
	switch {
	case items == 0:
		return fmt.Errorf("%w: an empty page names %.80q as the next one", ErrListing, next)
	case seen[cursor]:
		return fmt.Errorf("%w: %.80q is named as the next page twice", ErrListing, next)
	case n == maxPages:
		return fmt.Errorf("%w: more than %d pages", ErrListing, maxPages)
	}
	seen[cursor] = true
	return nil
}
