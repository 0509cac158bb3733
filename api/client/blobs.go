package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// StatBlob returns the size of a blob in bytes. A blob that the repository does not hold is api.ErrBlobUnknown.
func (c *Client) StatBlob(ctx context.Context, repo string, d identity.Digest) (int64, error) {
	resp, err := c.do(ctx, call{
		method: http.MethodHead, path: api.PathBlob(repo, d), repo: repo, missing: api.ErrBlobUnknown,
	}, http.StatusOK)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.ContentLength < 0 {
		return 0, notBlob(resp, "it states no size")
	}
	return resp.ContentLength, nil
}

// Blob opens n bytes of a blob from off. total is the size of the whole blob, which the answer must agree with. The
// reader gives exactly n bytes and then io.EOF, or an error: io.ErrUnexpectedEOF where the body ends early, ErrIdle
// where it stalls. It is not safe for concurrent use and must be closed.
//
// The errors are ErrRangeIgnored, ErrNotBlob, and api.ErrBlobUnknown where the repository does not hold the blob. The
// bytes are not hashed here, and nothing is retried, but for what a redirect led to: its link is used for as
// long as the registry says, and where it is refused the registry is asked anew, at last to send the bytes itself.
func (c *Client) Blob(ctx context.Context, repo string, d identity.Digest, off, n, total int64) (io.ReadCloser, error) {
	return c.blob(ctx, repo, d, off, n, total, 0)
}

// Whole opens a blob of size bytes from its start, as Blob does, where the first known bytes are here already and the
// server sends no parts: those come once more, but are no progress to Retry.
func (c *Client) Whole(ctx context.Context, repo string, d identity.Digest, known, size int64) (io.ReadCloser, error) {
	return c.blob(ctx, repo, d, 0, size, size, known)
}

func (c *Client) blob(ctx context.Context, repo string, d identity.Digest, off, n, total, known int64) (
	io.ReadCloser, error,
) {
	if off < 0 || n <= 0 || total-off < n {
		return nil, fmt.Errorf("blob %s: bytes %d to %d of %d asked for", d, off, off+n, total)
	}
	r := call{method: http.MethodGet, path: api.PathBlob(repo, d), repo: repo, missing: api.ErrBlobUnknown}
	r.header = map[string]string{}
	part := n < total
	if part {
		r.header["Range"] = fmt.Sprintf("bytes=%d-%d", off, off+n-1)
	}
	resp, err := c.read(ctx, r, d)
	if err != nil {
		return nil, err
	}
	if err := checkBlob(resp, part, off, n, total); err != nil {
		resp.Body.Close()
		return nil, fmt.Errorf("blob %s: %w", d, err)
	}
	return &body{rc: resp.Body, left: n, size: n, known: known, c: c, host: resp.Request.URL.Host}, nil
}

// Midstates returns the midstates of a blob in the form kiln.sha256-midstates.v1, as this registry answers itself: a
// redirect to another host is ErrNotBlob, and so is an answer of more than most bytes, which is not read further. They
// are not checked here. api.ErrMidstatesUnknown where it has none of the blob, api.ErrBlobUnknown where the caller may
// pull the blob from no repository. ErrSlow.
func (c *Client) Midstates(ctx context.Context, d identity.Digest, most int64) ([]byte, error) {
	ctx, done := within(ctx)
	defer done()
	resp, err := c.do(ctx, call{
		method: http.MethodGet, path: api.PathMidstates(d), missing: api.ErrMidstatesUnknown,
	}, http.StatusOK)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); {
	case resp.Request.URL.Host != c.base.Host:
		err = notBlob(resp, "midstates come from %s alone", c.base.Host)
	case t != api.MediaTypeMidstates:
		err = notBlob(resp, "it should be %s", api.MediaTypeMidstates)
	}
	var form []byte
	if err == nil {
		form, err = bounded(resp, most)
	}
	if err != nil {
		return nil, fmt.Errorf("midstates of %s: %w", d, err)
	}
	return form, nil
}

func checkBlob(resp *http.Response, part bool, off, n, total int64) error {
	switch e := encoded(resp); {
	case e != "":
		return notBlob(resp, "it is packed with content encoding %q, though none was asked for", printable(e))
	case isHTML(resp) && resp.ContentLength != n:
		return notBlob(resp, "it is an HTML page")
	case part && resp.StatusCode == http.StatusOK:
		return fmt.Errorf("%s: %w", resp.Request.URL.Host, ErrRangeIgnored)
	case resp.StatusCode == http.StatusPartialContent:
		want := fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, total)
		if got := resp.Header.Get("Content-Range"); got != want {
			return notBlob(resp, "it has range %q, want %q", printable(got), want)
		}
	}
	if resp.ContentLength >= 0 && resp.ContentLength != n {
		return notBlob(resp, "it has %d bytes, want %d", resp.ContentLength, n)
	}
	return nil
}

// body gives exactly the bytes that were asked for.
type body struct {
	rc         io.ReadCloser
	left, size int64
	known      int64 // bytes from the start that are no progress
	c          *Client
	host       string
}

func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, b.end()
	}
	n, err := b.rc.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	b.c.moved.Add(max(0, min(int64(n), b.size-b.left-b.known)))
	if err == io.EOF {
		err = nil
		if b.left > 0 {
			err = fmt.Errorf("%s: body ended after %d of %d bytes: %w", b.host, b.size-b.left, b.size, io.ErrUnexpectedEOF)
		}
	}
	return n, err
}

// end makes sure that nothing follows the bytes of a body whose length was not announced.
func (b *body) end() error {
	var one [1]byte
	n, err := io.ReadFull(b.rc, one[:])
	if n > 0 {
		return fmt.Errorf("%s: %w: it is longer than %d bytes", b.host, ErrNotBlob, b.size)
	}
	return err
}

func (b *body) Close() error { return b.rc.Close() }

// Mount makes a blob of the repository from visible in repo and says whether the registry did so. Where it would rather
// have the bytes, that upload is cancelled.
func (c *Client) Mount(ctx context.Context, repo, from string, d identity.Digest) (bool, error) {
	resp, err := c.do(ctx, call{
		method: http.MethodPost, path: api.PathUploads(repo), repo: repo,
		query: url.Values{"mount": {d.String()}, "from": {from}}, missing: api.ErrNameUnknown,
	}, http.StatusCreated, http.StatusAccepted)
	if err != nil {
		return false, err
	}
	resp.Body.Close()
	if resp.StatusCode == http.StatusCreated {
		return true, nil
	}
	u, err := c.upload(resp, repo)
	if err != nil {
		return false, err
	}
	return false, u.Abort(ctx)
}

// direct keeps the links to which the registry has sent reads of blobs on, for as long as it said that they serve.
type direct struct {
	mu      sync.Mutex // guards the rest
	links   map[identity.Digest]link
	through map[identity.Digest]bool // blobs that the registry is asked to send itself
	never   bool                     // it is asked so for all; set before the first use
}

type link struct {
	url   string
	until time.Time
}

func (s *direct) fresh(d identity.Digest) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.links[d]; time.Now().Before(l.until) {
		return l.url
	}
	return ""
}

// sent says whether a blob was read last by a link, also one that has ended since.
func (s *direct) sent(d identity.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, by := s.links[d]
	return by
}

// keep keeps the link to which an answer was redirected, if that was by one step of the registry, which said for how
// long it may be kept.
func (s *direct) keep(d identity.Digest, resp *http.Response, base *url.URL) {
	s.forget(d)
	by := resp.Request.Response
	if by == nil || by.Request.Response != nil || by.Request.URL.Host != base.Host || resp.Request.URL.Host == base.Host {
		return
	}
	age := 0
	for _, word := range strings.Split(by.Header.Get("Cache-Control"), ",") {
		if text, ok := strings.CutPrefix(strings.TrimSpace(word), "max-age="); ok {
			age, _ = strconv.Atoi(text) // 0 for what is no number
		}
	}
	if age <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.links == nil {
		s.links = map[identity.Digest]link{}
	}
	s.links[d] = link{resp.Request.URL.String(), time.Now().Add(time.Duration(age) * time.Second)}
}

func (s *direct) forget(d identity.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.links, d)
}

// pass has the registry asked to send a blob itself from now on, and says whether that is new.
func (s *direct) pass(d identity.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.never || s.through[d] {
		return false
	}
	if s.through == nil {
		s.through = map[identity.Digest]bool{}
	}
	delete(s.links, d)
	s.through[d] = true
	return true
}

func (s *direct) passed(d identity.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.never || s.through[d]
}

// Doubt has the registry asked to send a blob itself, if it has sent reads of it on, as what came did not match. It
// says whether that is news: else those bytes were the registry's own, or it is asked already.
func (c *Client) Doubt(d identity.Digest) bool { return c.direct.sent(d) && c.direct.pass(d) }

// read asks for a blob: by the link that the registry gave last, as long as it serves, else the registry, which may
// send the request on. If what it names then refuses, or can't be reached from here, the registry is asked once more, to
// send the bytes itself.
func (c *Client) read(ctx context.Context, r call, d identity.Digest) (*http.Response, error) {
	if to := c.direct.fresh(d); to != "" {
		at := r
		at.path, at.straight = to, true
		resp, err := c.do(ctx, at, http.StatusOK, http.StatusPartialContent)
		if err == nil || ctx.Err() != nil {
			return resp, err
		}
		c.direct.forget(d)
	}
	if c.direct.passed(d) {
		r.header[api.HeaderRedirect] = api.RedirectOff
	}
	resp, err := c.do(ctx, r, http.StatusOK, http.StatusPartialContent)
	if err == nil {
		c.direct.keep(d, resp, c.base)
		return resp, nil
	}
	if ctx.Err() != nil || !refusedAway(err) || !c.direct.pass(d) {
		return nil, err
	}
	c.notify("%v; the registry is asked to send it itself", err)
	r.header[api.HeaderRedirect] = api.RedirectOff
	return c.do(ctx, r, http.StatusOK, http.StatusPartialContent)
}

// awayError is the failure of a request that was sent on to another host and got no answer there.
type awayError struct {
	host string
	err  error
}

func (e *awayError) Error() string { return "sent on to " + e.host + ": " + e.err.Error() }

func (e *awayError) Unwrap() error { return e.err }

// away makes cause an awayError if the request for u, which failed with err, had been sent on to another host.
func away(err error, u *url.URL, cause error) error {
	if at, is := errors.AsType[*url.Error](err); is {
		if to, err := url.Parse(at.URL); err == nil && to.Host != u.Host {
			return &awayError{to.Host, cause}
		}
	}
	return cause
}

// refusedAway says whether what the registry has sent a request on to is not there for this client. That it is
// overloaded is no reason.
func refusedAway(err error) bool {
	if s, is := errors.AsType[*StatusError](err); is {
		return s.Redirected && s.Status < 500
	}
	_, is := errors.AsType[*awayError](err)
	return is
}
