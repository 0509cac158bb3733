package registry

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

const (
	// maxPage is the longest page of a listing, and the one that a client gets that asks for none.
	maxPage = 1000
	// maxReferrersBytes keeps a page of referrers within what clients read of an index.
	maxReferrersBytes = api.MaxManifestBytes - 64<<10
)

// Tags lists up to n tags of a repository, in byte order, after the tag last; empty means from the start. more says
// whether there are others. ErrNameUnknown if the repository holds nothing.
func (r *Registry) Tags(
	ctx context.Context,
	c access.Caller,
	repo, last string,
	n int,
) (tags []string, more bool, err error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return nil, false, err
	}
	tags = []string{}
	for tag, err := range r.ix.Tags(ctx, repo, last) {
		if err != nil {
			return nil, false, err
		}
		if len(tags) == n {
			return tags, n > 0, nil
		}
		tags = append(tags, tag)
	}
	if len(tags) > 0 {
		return tags, false, nil
	}
	return tags, false, r.checkHolds(ctx, repo)
}

// checkHolds returns ErrNameUnknown for a repository without a manifest.
func (r *Registry) checkHolds(ctx context.Context, repo string) error {
	for _, err := range r.ix.Find(ctx, index.Query{Repo: repo}) {
		return err
	}
	return api.Errorf(api.CodeNameUnknown, "repository %s is unknown", repo)
}

// Referrers lists manifests of a repository whose subject is d, of one artifact type unless that is empty: a page of up
// to n, after a cursor, which is empty for the first. next is the cursor of the following page, empty if there is none.
// A subject that nobody has put yet may have referrers.
func (r *Registry) Referrers(
	ctx context.Context,
	c access.Caller,
	repo string,
	d identity.Digest,
	artifactType, after string,
	n int,
) (page []v1.Descriptor, next string, err error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return nil, "", err
	}
	q := index.Query{Repo: repo, Subject: d, ArtifactType: artifactType, After: after}
	page = []v1.Descriptor{}
	size, last := 0, ""
	for rec, err := range r.ix.Find(ctx, q) {
		if err != nil {
			return nil, "", err
		}
		desc := v1.Descriptor{
			MediaType: rec.MediaType, Digest: digest.Digest(rec.Digest.String()), Size: rec.Size,
			ArtifactType: rec.ArtifactType, Annotations: rec.Annotations,
		}
		b, err := json.Marshal(desc)
		if err != nil {
			return nil, "", err
		}
		if size += len(b) + 1; len(page) == n || len(page) > 0 && size > maxReferrersBytes {
			return page, last, nil
		}
		page, last = append(page, desc), index.Cursor(q, rec)
	}
	return page, "", nil
}

func (r *Registry) getTags(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	n, err := q.number("n", maxPage, maxPage)
	if err != nil {
		return err
	}
	tags, more, err := r.Tags(q.Context(), q.caller, repo, q.URL.Query().Get("last"), n)
	if err != nil {
		return err
	}
	if more {
		w.next(api.PathTags(repo), url.Values{"n": {strconv.Itoa(n)}, "last": {tags[len(tags)-1]}})
	}
	return w.json(q, http.StatusOK, api.TagList{Name: repo, Tags: tags})
}

func (r *Registry) getReferrers(w *response, q *request) error {
	repo, d, err := q.repoDigest()
	if err != nil {
		return err
	}
	n, err := q.number("n", maxPage, maxPage)
	if err != nil {
		return err
	}
	artifactType := q.URL.Query().Get("artifactType")
	page, next, err := r.Referrers(q.Context(), q.caller, repo, d, artifactType, q.URL.Query().Get("after"), max(n, 1))
	if err != nil {
		return err
	}
	if artifactType != "" {
		w.Header().Set(api.HeaderFiltersApplied, "artifactType")
	}
	if next != "" {
		link := url.Values{"n": {strconv.Itoa(max(n, 1))}, "after": {next}}
		if artifactType != "" {
			link.Set("artifactType", artifactType)
		}
		w.next(api.PathReferrers(repo, d), link)
	}
	b, err := json.Marshal(
		v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: page},
	)
	if err != nil {
		return err
	}
	return w.bytes(q, http.StatusOK, v1.MediaTypeImageIndex, b)
}
