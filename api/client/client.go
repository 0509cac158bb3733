// Package client speaks to a Kiln registry, and to any registry of the OCI distribution spec as far as that goes. It
// trusts no answer: what is asked for by digest is hashed or bounded, and a body that is not what was asked for is an
// error that names the host.
package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/errcode"

	"github.com/kiln-registry/kiln-registry/api"
)

const (
	piece       = 256 << 10 // bytes of one read or write of blob data; fits L2, see doc/performance.md
	defaultIdle = time.Minute
	commitIdle  = 10 // times the idle timeout: a registry may hash a whole blob before it answers a commit
	maxToken    = 64 << 10
	maxHops     = 5
)

// Options says how to reach a registry. The zero value is ready to use.
type Options struct {
	PlainHTTP   bool          // plain HTTP also to hosts that are not loopback
	Token       string        // bearer token for this host; empty: TokenFile, then $KILN_TOKEN, then the Docker config
	TokenFile   string        // file that holds the token
	Anonymous   bool          // send no token and no login, whatever the fields above and the environment hold
	CAFile      string        // PEM certificates to trust besides those of the system
	UserAgent   string        // empty: kiln
	IdleTimeout time.Duration // longest time in which no byte moves; zero: one minute. There is no total timeout
	Backoff     time.Duration // first wait between two tries; zero: half a second
	Notify      func(string)  // told of every wait and fallback, one line each; nil: nobody. Called from any goroutine
}

// Client speaks to one registry. It is safe for any number of goroutines.
type Client struct {
	base    *url.URL
	auth    *auth.Client
	token   string
	agent   string
	idle    time.Duration
	backoff time.Duration
	notify  func(format string, args ...any)
	pace    pace
	moved   atomic.Int64 // bytes of blobs that were received, or that a registry has said it holds
	met     atomic.Bool  // the host has answered at least once
	direct  direct
}

// New returns a client of the registry at host, which is a host or host:port. It opens no connection.
func New(host string, o Options) (*Client, error) {
	scheme := "https"
	if o.PlainHTTP || Loopback(host) {
		scheme = "http"
	}
	base, err := url.Parse(scheme + "://" + host + "/")
	if err != nil || base.Host != host || host == "" {
		return nil, fmt.Errorf("registry %q: not a host or host:port", host)
	}
	token, err := o.token()
	if err != nil {
		return nil, err
	}
	return open(base, token, checkRedirect, o)
}

// open returns a client of the registry at base, which sends it token unless that is empty.
func open(base *url.URL, token string, redirect func(*http.Request, []*http.Request) error, o Options) (*Client, error) {
	roots, err := trusted(o.CAFile)
	if err != nil {
		return nil, err
	}
	c := &Client{base: base, token: token, agent: "kiln", idle: defaultIdle, backoff: firstBackoff}
	if o.UserAgent != "" {
		c.agent = o.UserAgent
	}
	if o.IdleTimeout > 0 {
		c.idle = o.IdleTimeout
	}
	if o.Backoff > 0 {
		c.backoff = o.Backoff
	}
	c.notify = func(format string, args ...any) {
		if o.Notify != nil {
			o.Notify(fmt.Sprintf(format, args...))
		}
	}
	c.auth = &auth.Client{
		Client:   &http.Client{Transport: transport(roots), CheckRedirect: redirect},
		Cache:    auth.NewCache(),
		ClientID: "kiln",
	}
	if !o.Anonymous {
		c.auth.Credential = dockerCredentials()
	}
	return c, nil
}

// Host returns the host, or host:port, that the client was made for.
func (c *Client) Host() string { return c.base.Host }

// Close drops the idle connections. The client stays usable.
func (c *Client) Close() { c.auth.Client.CloseIdleConnections() }

func (o Options) token() (string, error) {
	if o.Anonymous {
		return "", nil
	}
	if o.Token != "" {
		return o.Token, nil
	}
	if o.TokenFile == "" {
		return os.Getenv("KILN_TOKEN"), nil
	}
	f, err := os.Open(o.TokenFile)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxToken))
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" || strings.ContainsAny(token, " \t\r\n") {
		return "", fmt.Errorf("token file %s: want one token on one line", o.TokenFile)
	}
	return token, nil
}

func trusted(caFile string) (*x509.CertPool, error) {
	if caFile == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("CA file: %w", err)
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("CA file %s: holds no PEM certificate", caFile)
	}
	return roots, nil
}

// dockerCredentials asks the Docker config and its helpers, and reads them at the first challenge only: an open
// registry works where there is no home folder or a broken config.
func dockerCredentials() auth.CredentialFunc {
	open := sync.OnceValues(func() (auth.CredentialFunc, error) {
		store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
		if err != nil {
			return nil, fmt.Errorf("docker config: %w", err)
		}
		return credentials.Credential(store), nil
	})
	return func(ctx context.Context, hostport string) (auth.Credential, error) {
		credential, err := open()
		if err != nil {
			return auth.EmptyCredential, err
		}
		return credential(ctx, hostport)
	}
}

// transport speaks HTTP/1.1 only, since HTTP/2 costs several times the CPU on large bodies, and never unpacks a body:
// a digest is over the bytes as they are stored.
func transport(roots *x509.CertPool) *http.Transport {
	d := &net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second}
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return conn{c}, nil
		},
		TLSClientConfig:       &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   15 * time.Second,
		ExpectContinueTimeout: time.Second,
		MaxIdleConnsPerHost:   64, // the most that kiln-pull opens
		IdleConnTimeout:       90 * time.Second,
		WriteBufferSize:       piece,
		DisableCompression:    true,
		Protocols:             new(http.Protocols),
	}
	t.Protocols.SetHTTP1(true)
	return t
}

// conn gives net/http its request bodies in pieces; without it they go out in 32 KiB steps.
type conn struct{ net.Conn }

var pieces = sync.Pool{New: func() any { return new([piece]byte) }}

func (c conn) ReadFrom(r io.Reader) (int64, error) {
	buf := pieces.Get().(*[piece]byte)
	defer pieces.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{c.Conn}, struct{ io.Reader }{r}, buf[:])
}

// checkRedirect follows reads only and never from TLS to plain HTTP. That the token stays at its own origin is seen to
// by auth.Client, which drops it on every hop to another scheme, host or port.
func checkRedirect(req *http.Request, via []*http.Request) error {
	switch first := via[0]; {
	case len(via) > maxHops:
		return fmt.Errorf("more than %d redirects", maxHops)
	case first.Method != http.MethodGet && first.Method != http.MethodHead:
		return http.ErrUseLastResponse
	case via[len(via)-1].URL.Scheme == "https" && req.URL.Scheme != "https":
		return fmt.Errorf("redirect from TLS to plain HTTP at %s refused", req.URL.Host)
	}
	return nil
}

// call is one request. path is relative to the registry, or a whole URL where a registry or a caller named one.
type call struct {
	method, path string
	query        url.Values
	repo         string // with a write, the repository that the token must reach
	header       map[string]string
	body         io.Reader
	rewind       func() (io.Reader, error) // starts body anew, for a second try with a fresh token; nil: it can't be
	size         int64                     // of body
	idle         time.Duration
	missing      error // what a bare 404 means here
	straight     bool  // path is a link that needs no login, and gets none
}

// do sends one request and returns the answer if its status is one of want; any other is a *StatusError. The body must
// be closed. It fails with ErrIdle when no byte moves for the idle timeout, in the request, the wait or the answer.
func (c *Client) do(ctx context.Context, r call, want ...int) (*http.Response, error) {
	u, err := c.resolve(r.path)
	if err != nil {
		return nil, err
	}
	if r.query != nil {
		q := u.Query()
		for k, v := range r.query {
			q[k] = v
		}
		u.RawQuery = q.Encode()
	}
	ctx, watch := newWatch(ctx, max(c.idle, r.idle), u.Host)
	resp, err := c.send(ctx, r, u, watch)
	if err != nil {
		defer watch.stop()
		if s := refusedLogin(err, r, u); s != nil {
			return nil, s
		}
		return nil, fmt.Errorf("%s %s: %w", r.method, trimQuery(u), away(err, u, watch.cause(plain(err))))
	}
	c.met.Store(true)
	resp.Body = &watched{ReadCloser: resp.Body, watch: watch}
	for _, w := range want {
		if resp.StatusCode == w {
			return resp, nil
		}
	}
	defer resp.Body.Close()
	return nil, newStatusError(resp, r, c.base)
}

func (c *Client) resolve(path string) (*url.URL, error) {
	u, err := c.base.Parse(path)
	if err != nil {
		return nil, fmt.Errorf("registry %s: bad URL %.200q: %w", c.base.Host, path, err)
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("registry %s: bad URL %.200q: not HTTP", c.base.Host, path)
	}
	return u, nil
}

func (c *Client) send(ctx context.Context, r call, u *url.URL, watch *watch) (*http.Response, error) {
	if r.repo != "" {
		actions := []string{auth.ActionPull}
		if r.method != http.MethodGet && r.method != http.MethodHead {
			actions = append(actions, auth.ActionPush)
		}
		ctx = auth.AppendScopesForHost(ctx, u.Host, auth.ScopeRepository(r.repo, actions...))
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if r.body != nil && r.size > 0 {
		req.ContentLength = r.size
		req.Body = io.NopCloser(watch.reader(r.body))
		if r.rewind != nil {
			req.GetBody = func() (io.ReadCloser, error) {
				body, err := r.rewind()
				return io.NopCloser(watch.reader(body)), err
			}
		}
		if r.size > 1<<20 {
			req.Header.Set("Expect", "100-continue")
		}
	}
	req.Header.Set("User-Agent", c.agent)
	req.Header.Set("Accept-Encoding", "identity")
	for k, v := range r.header {
		req.Header.Set(k, v)
	}
	if r.straight {
		return c.auth.Client.Do(req)
	}
	if c.token != "" && u.Scheme == c.base.Scheme && u.Host == c.base.Host {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	return c.auth.Do(req)
}

// refusedLogin is the answer of a registry that asked for a login when there is none to give, or when the place that
// hands out tokens refuses the one there is. It is nil for every other error.
func refusedLogin(err error, r call, u *url.URL) error {
	s := &StatusError{
		Host: u.Host, Method: r.method, Path: u.EscapedPath(), Status: http.StatusUnauthorized, Err: api.ErrUnauthorized,
	}
	var answer *errcode.ErrorResponse
	switch {
	case errors.Is(err, auth.ErrBasicCredentialNotFound):
		return s
	case errors.As(err, &answer) && answer.StatusCode == http.StatusUnauthorized:
		return s
	case errors.As(err, &answer) && answer.StatusCode == http.StatusForbidden:
		s.Status, s.Err = http.StatusForbidden, api.ErrDenied
		return s
	}
	return nil
}

// plain takes the URL, which may hold the signature of a presigned link, out of an error of net/http.
func plain(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

func trimQuery(u *url.URL) string { return u.Scheme + "://" + u.Host + u.EscapedPath() }

// ErrIdle: no byte moved for the idle timeout.
var ErrIdle = errors.New("no byte moved")

// watch ends a request when nothing moves. Every byte read from the request's body or from the answer winds it up.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	idle   time.Duration
}

func newWatch(ctx context.Context, idle time.Duration, host string) (context.Context, *watch) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{ctx: ctx, cancel: cancel, idle: idle}
	w.timer = time.AfterFunc(idle, func() { cancel(fmt.Errorf("%s: %w for %s", host, ErrIdle, idle)) })
	return ctx, w
}

func (w *watch) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// cause replaces the error of a cancelled request by what cancelled it.
func (w *watch) cause(err error) error {
	if err != nil && err != io.EOF && w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	return err
}

func (w *watch) read(r io.Reader, p []byte) (int, error) {
	n, err := r.Read(p)
	if n > 0 {
		w.timer.Reset(w.idle)
	}
	return n, w.cause(err)
}

// reader winds the watch up with every read of a request's body.
func (w *watch) reader(r io.Reader) io.Reader { return watchedReader{r, w} }

type watchedReader struct {
	r io.Reader
	w *watch
}

func (r watchedReader) Read(p []byte) (int, error) { return r.w.read(r.r, p) }

// watched is the body of an answer.
type watched struct {
	io.ReadCloser
	watch *watch
}

// Read gives up when no byte comes for the idle timeout. The time between two reads is the caller's.
func (b *watched) Read(p []byte) (int, error) {
	b.watch.timer.Reset(b.watch.idle)
	n, err := b.watch.read(b.ReadCloser, p)
	b.watch.timer.Stop()
	return n, err
}

func (b *watched) Close() error {
	defer b.watch.stop()
	return b.ReadCloser.Close()
}

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
	if err == nil {
		c.direct.never = true
	}
	return c, repo, err
}

func sameHost(req *http.Request, via []*http.Request) error {
	if first := via[0].URL; req.URL.Host != first.Host || req.URL.Scheme != first.Scheme {
		return fmt.Errorf("%w, %s", ErrRedirected, printable(req.URL.Host))
	}
	return checkRedirect(req, via)
}
