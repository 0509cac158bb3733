package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Upload is an open upload of one blob. It is not safe for concurrent use. After a failed Append its offset is not
// known until Refresh has asked for it.
type Upload struct {
	c        *Client
	repo     string
	location string
	offset   int64
	held     bool
}

// CreateUpload opens an upload. d and size are promises that let the registry check early, and let it find the blob in
// another repository that the caller may pull; a zero digest and a negative size promise nothing. Where the registry has
// found it, the upload is Held and there is nothing to send.
func (c *Client) CreateUpload(ctx context.Context, repo string, d identity.Digest, size int64) (*Upload, error) {
	r := call{
		method: http.MethodPost, path: api.PathUploads(repo), repo: repo, missing: api.ErrNameUnknown,
		header: map[string]string{},
	}
	if !d.IsZero() {
		r.header[api.HeaderExpectDigest] = d.String()
		r.query = url.Values{"mount": {d.String()}}
	}
	if size >= 0 {
		r.header[api.HeaderExpectSize] = strconv.FormatInt(size, 10)
	}
	resp, err := c.do(ctx, r, http.StatusAccepted, http.StatusCreated)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusCreated && !d.IsZero() {
		return &Upload{c: c, repo: repo, held: true}, checkDigestHeader(resp, d)
	}
	return c.upload(resp, repo)
}

// ResumeUpload opens an upload by the location that an earlier process kept, at the last byte that the registry holds.
// An upload that is gone is api.ErrBlobUploadUnknown.
func (c *Client) ResumeUpload(ctx context.Context, repo, location string) (*Upload, error) {
	resp, err := c.do(ctx, call{
		method: http.MethodGet, path: location, repo: repo, missing: api.ErrBlobUploadUnknown,
	}, http.StatusNoContent, http.StatusOK)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.Header.Get("Location") == "" {
		resp.Header.Set("Location", location)
	}
	u, err := c.upload(resp, repo)
	if err != nil {
		return nil, err
	}
	u.offset, err = received(resp)
	return u, err
}

func (c *Client) upload(resp *http.Response, repo string) (*Upload, error) {
	location := resp.Header.Get("Location")
	if location == "" {
		return nil, fmt.Errorf("%s opened an upload and gave no Location", resp.Request.URL.Host)
	}
	if _, err := c.resolve(location); err != nil {
		return nil, err
	}
	return &Upload{c: c, repo: repo, location: location}, nil
}

// received reads the Range header of an upload's status: "0-N" is N+1 bytes. Registries say "0-0" for none as well as
// for one, and none is the likelier.
func received(resp *http.Response) (int64, error) {
	v := strings.TrimPrefix(resp.Header.Get("Range"), "bytes=")
	if v == "" || v == "0-0" {
		return 0, nil
	}
	last, ok := strings.CutPrefix(v, "0-")
	n, err := strconv.ParseInt(last, 10, 64)
	if !ok || err != nil || n < 0 {
		return 0, fmt.Errorf("%s: bad Range %q of an upload", resp.Request.URL.Host, printable(v))
	}
	return n + 1, nil
}

// Location names the upload for ResumeUpload, also in another process.
func (u *Upload) Location() string { return u.location }

// Offset returns how many bytes the registry holds.
func (u *Upload) Offset() int64 { return u.offset }

// Held says that the registry has the blob in this repository already: there is no upload, and nothing is to be sent.
func (u *Upload) Held() bool { return u.held }

// Refresh asks the registry for the offset of an upload whose Append has failed. api.ErrBlobUploadUnknown.
func (u *Upload) Refresh(ctx context.Context) error {
	now, err := u.c.ResumeUpload(ctx, u.repo, u.location)
	if err != nil {
		return err
	}
	u.c.moved.Add(max(0, now.offset-u.offset))
	*u = *now
	return nil
}

// Append sends the next n bytes of r in one request. r is not read after Append returns. Where r is an io.Seeker, a
// request that the registry refused for want of a fresh token is sent again.
func (u *Upload) Append(ctx context.Context, r io.Reader, n int64) error {
	if n <= 0 {
		return nil
	}
	l := &lent{r: r, n: n, left: n}
	defer l.revoke()
	resp, err := u.c.do(ctx, call{
		method: http.MethodPatch, path: u.location, repo: u.repo, missing: api.ErrBlobUploadUnknown,
		header: map[string]string{
			"Content-Type":  "application/octet-stream",
			"Content-Range": fmt.Sprintf("%d-%d", u.offset, u.offset+n-1),
		},
		body: l, size: n, rewind: l.rewind(r),
	}, http.StatusAccepted)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	next, err := u.c.upload(resp, u.repo)
	if err != nil {
		return err
	}
	got, err := received(resp)
	if err != nil {
		return err
	}
	if want := u.offset + n; got != want && !(got == 0 && want == 1) {
		return fmt.Errorf("%s: upload is at byte %d after %d were sent", resp.Request.URL.Host, got, want)
	}
	u.location, u.offset = next.location, u.offset+n
	u.c.moved.Add(n)
	return nil
}

// Commit closes the upload as the blob d. The registry has hashed it and holds it durably when this returns nil.
func (u *Upload) Commit(ctx context.Context, d identity.Digest) error {
	resp, err := u.c.do(ctx, call{
		method: http.MethodPut, path: u.location, query: url.Values{"digest": {d.String()}}, repo: u.repo,
		missing: api.ErrBlobUploadUnknown, idle: commitIdle * u.c.idle,
	}, http.StatusCreated)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return checkDigestHeader(resp, d)
}

// Abort cancels the upload. One that is gone already is no error.
func (u *Upload) Abort(ctx context.Context) error {
	resp, err := u.c.do(ctx, call{method: http.MethodDelete, path: u.location, repo: u.repo},
		http.StatusNoContent, http.StatusNotFound, http.StatusAccepted, http.StatusOK)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func checkDigestHeader(resp *http.Response, d identity.Digest) error {
	if h := resp.Header.Get(api.HeaderContentDigest); h != "" && h != d.String() {
		return fmt.Errorf("%s names it %s, want %s: %w", resp.Request.URL.Host, printable(h), d, ErrMismatch)
	}
	return nil
}

// lent gives n bytes of a reader to net/http, which may go on reading after a request has failed, until revoke takes it
// back.
type lent struct {
	mu   sync.Mutex
	r    io.Reader
	n    int64 // bytes of one request
	left int64
}

func (l *lent) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.r == nil {
		return 0, io.ErrClosedPipe
	}
	if l.left == 0 {
		return 0, io.EOF
	}
	n, err := l.r.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	return n, err
}

func (l *lent) revoke() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.r = nil
}

// rewind returns how to start r anew, or nil if it can't be.
func (l *lent) rewind(r io.Reader) func() (io.Reader, error) {
	s, ok := r.(io.Seeker)
	if !ok {
		return nil
	}
	start, err := s.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil
	}
	return func() (io.Reader, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.left = l.n
		_, err := s.Seek(start, io.SeekStart)
		return l, err
	}
}
