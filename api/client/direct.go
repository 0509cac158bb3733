package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

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

// keep keeps the link to which an answer was redirected, if that was by one step of the registry, which said for how
// long it may be kept.
func (s *direct) keep(d identity.Digest, resp *http.Response, base *url.URL) {
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
	if s.through[d] {
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
func (c *Client) Doubt(d identity.Digest) bool { return c.direct.fresh(d) != "" && c.direct.pass(d) }

// read asks for a blob: by the link that the registry gave last, as long as it serves, else the registry, which may
// send the request on. What refuses a new link has the registry asked once more, to send the bytes itself.
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
	var s *StatusError
	if !errors.As(err, &s) || !s.Redirected || s.Status >= 500 || !c.direct.pass(d) {
		return nil, err
	}
	c.notify("%v; the registry is asked to send it itself", err)
	r.header[api.HeaderRedirect] = api.RedirectOff
	return c.do(ctx, r, http.StatusOK, http.StatusPartialContent)
}
