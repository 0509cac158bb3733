package client

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
)

// ErrRedirected: a mirror sent a request on to another host, which is not followed.
var ErrRedirected = errors.New("redirected to another host")

const mirrorIdle = 15 * time.Second // there are other sources to turn to

// NewMirror returns a client of a registry that only blobs are asked of, and the repository that its address names,
// empty: none. The address is host[:port] or an http or https URL, with or without a repository as its path; a bare host
// is spoken to as New does.
//
// No token of o or of the environment goes to a mirror: those are the registry's. Only a login that the Docker config
// holds for the mirror's own host is used, and none over plain HTTP but on loopback. No redirect to another host is
// followed: ErrRedirected. An IdleTimeout of zero is 15 seconds.
func NewMirror(address string, o Options) (*Client, string, error) {
	bad := func(why string) (*Client, string, error) {
		return nil, "", fmt.Errorf("mirror %.200q: %s", address, why)
	}
	text := address
	if !strings.Contains(text, "://") {
		scheme := "https://"
		host, _, _ := strings.Cut(text, "/")
		if o.PlainHTTP || Loopback(host) {
			scheme = "http://"
		}
		text = scheme + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return bad("want host[:port][/repository] or an http or https URL")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return bad("want no login, query or fragment")
	}
	repo := strings.Trim(u.Path, "/")
	if repo != "" {
		if err := api.CheckRepo(repo); err != nil {
			return bad(err.Error())
		}
	}
	base := &url.URL{Scheme: u.Scheme, Host: u.Host, Path: "/"}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = mirrorIdle
	}
	o.Anonymous = o.Anonymous || u.Scheme == "http" && !Loopback(u.Host)
	c, err := open(base, "", sameHost, o)
	return c, repo, err
}

func sameHost(req *http.Request, via []*http.Request) error {
	if first := via[0].URL; req.URL.Host != first.Host || req.URL.Scheme != first.Scheme {
		return fmt.Errorf("%w, %s", ErrRedirected, printable(req.URL.Host))
	}
	return checkRedirect(req, via)
}
