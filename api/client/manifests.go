package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// accepted lists the manifests that a registry may answer with.
const accepted = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, " +
	"application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json"

// Manifest is a manifest as a registry holds it.
type Manifest struct {
	Digest    identity.Digest // SHA-256 of Bytes
	MediaType string
	Bytes     []byte
}

// Manifest fetches the manifest that ref, a tag or the text of a digest, names. Its bytes are hashed: where they differ
// from the digest asked for, or from the one that the registry states, it is ErrMismatch. One that does not exist is
// api.ErrManifestUnknown.
func (c *Client) Manifest(ctx context.Context, repo, ref string) (Manifest, error) {
	resp, err := c.do(ctx, call{
		method: http.MethodGet, path: api.PathManifest(repo, ref), repo: repo, missing: api.ErrManifestUnknown,
		header: map[string]string{"Accept": accepted},
	}, http.StatusOK)
	if err != nil {
		return Manifest{}, err
	}
	defer resp.Body.Close()
	b, err := bounded(resp, api.MaxManifestBytes)
	if err != nil {
		return Manifest{}, fmt.Errorf("manifest %s of %s: %w", ref, repo, err)
	}
	m := Manifest{Digest: identity.Sum(b), MediaType: resp.Header.Get("Content-Type"), Bytes: b}
	if d, err := identity.ParseDigest(ref); err == nil && d != m.Digest {
		return Manifest{}, fmt.Errorf("manifest %s of %s: %s sent bytes that hash to %s: %w",
			ref, repo, resp.Request.URL.Host, m.Digest, ErrMismatch)
	}
	if err := checkDigestHeader(resp, m.Digest); err != nil {
		return Manifest{}, fmt.Errorf("manifest %s of %s: %w", ref, repo, err)
	}
	return m, nil
}

// PutManifest stores a manifest under ref, a tag or the text of its digest, and returns its digest. It is durable when
// this returns. A manifest that names blobs which the repository lacks is api.ErrManifestBlobUnknown.
func (c *Client) PutManifest(ctx context.Context, repo, ref, mediaType string, b []byte) (identity.Digest, error) {
	d := identity.Sum(b)
	body := bytes.NewReader(b)
	resp, err := c.do(ctx, call{
		method: http.MethodPut, path: api.PathManifest(repo, ref), repo: repo, missing: api.ErrNameUnknown,
		header: map[string]string{"Content-Type": mediaType},
		body:   body, size: int64(len(b)), idle: commitIdle * c.idle,
		rewind: func() (io.Reader, error) { return bytes.NewReader(b), nil },
	}, http.StatusCreated)
	if err != nil {
		return d, err
	}
	defer resp.Body.Close()
	return d, checkDigestHeader(resp, d)
}

// Tags lists at most n tags of a repository that follow after in order; n of zero leaves the number to the registry.
// A page shorter than n need not be the last one: only an empty page is.
func (c *Client) Tags(ctx context.Context, repo, after string, n int) ([]string, error) {
	var page struct {
		Tags []string `json:"tags"`
	}
	err := c.json(ctx, call{
		method: http.MethodGet, path: api.PathTags(repo), repo: repo, missing: api.ErrNameUnknown,
		query: paging("last", after, "n", n),
	}, &page)
	return page.Tags, err
}

func paging(afterKey, after, limitKey string, n int) url.Values {
	q := url.Values{}
	if after != "" {
		q.Set(afterKey, after)
	}
	if n > 0 {
		q.Set(limitKey, strconv.Itoa(n))
	}
	return q
}

// bounded reads a document of at most limit bytes that must be neither a page nor packed.
func bounded(resp *http.Response, limit int64) ([]byte, error) {
	if e := encoded(resp); e != "" {
		return nil, notBlob(resp, "it is packed with content encoding %q, though none was asked for", printable(e))
	}
	if isHTML(resp) {
		return nil, notBlob(resp, "it is an HTML page")
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, notBlob(resp, "it is larger than %d bytes", limit)
	}
	if resp.ContentLength >= 0 && int64(len(b)) != resp.ContentLength {
		return nil, io.ErrUnexpectedEOF
	}
	return b, nil
}

// json reads a JSON document into v.
func (c *Client) json(ctx context.Context, r call, v any) error {
	resp, err := c.do(ctx, r, http.StatusOK)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := bounded(resp, api.MaxIndexDocumentBytes)
	if err != nil {
		return fmt.Errorf("%s %s: %w", r.method, r.path, err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s %s: answer of %s with content type %q: %w", r.method, strings.TrimSuffix(r.path, "/"),
			resp.Request.URL.Host, printable(resp.Header.Get("Content-Type")), err)
	}
	return nil
}
