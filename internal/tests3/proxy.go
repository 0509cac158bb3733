package tests3

import (
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Proxy stands in front of an endpoint, counts the requests and breaks those that it was told to. It forwards the rest
// as they are, each exactly once; the Host that the client signed stays, so S3 finds every signature right.
type Proxy struct {
	upstream  string
	server    *httptest.Server
	transport *http.Transport
	ended     <-chan struct{}

	mu     sync.Mutex
	rules  []*Rule
	counts map[Op]int
}

// NewProxy returns a proxy on loopback before endpoint, which speaks plain HTTP. It ends with the test, and so does
// every request that it still holds.
func NewProxy(t testing.TB, endpoint string) *Proxy {
	return newProxy(t, endpoint, (*httptest.Server).Start)
}

// NewTLSProxy is NewProxy, but clients have to speak TLS and trust CA.
func NewTLSProxy(t testing.TB, endpoint string) *Proxy {
	return newProxy(t, endpoint, (*httptest.Server).StartTLS)
}

func newProxy(t testing.TB, endpoint string, start func(*httptest.Server)) *Proxy {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		upstream: endpoint,
		ended:    ctx.Done(),
		// A connection for each request: on a kept one the transport may send a request again by itself.
		transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		counts:    map[Op]int{},
	}
	p.server = httptest.NewUnstartedServer(p)
	p.server.Config.BaseContext = func(net.Listener) context.Context { return ctx }
	p.server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if s, ok := c.(interface{ NetConn() net.Conn }); ok {
			c = s.NetConn()
		}
		return context.WithValue(ctx, origin{}, origin{p, c.(*net.TCPConn)})
	}
	p.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	start(p.server)
	t.Cleanup(func() {
		cancel()
		p.server.Close()
	})
	return p
}

// Endpoint returns the HOST:PORT of the proxy.
func (p *Proxy) Endpoint() string { return p.server.Listener.Addr().String() }

// CA returns the certificate that a client of a TLS proxy has to trust, in PEM.
func (p *Proxy) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.server.Certificate().Raw})
}

// Count returns how many requests for these operations have arrived, broken ones too. Without operations it counts all.
func (p *Proxy) Count(ops ...Op) (n int) {
	for op, count := range p.Counts() {
		if len(ops) == 0 {
			n += count
		}
		for _, o := range ops {
			if o == op {
				n += count
			}
		}
	}
	return n
}

// Counts returns how many requests have arrived for each operation.
func (p *Proxy) Counts() map[Op]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.counts)
}

// Rule is a fault that waits for its requests.
type Rule struct {
	proxy  *Proxy
	match  Match
	faults []Fault
	hits   int
}

// On breaks the requests that match. With several faults the first is the outermost: it sees the request first and the
// answer last. Where several rules match, the oldest decides. First and Nth limit how often a rule acts.
func (p *Proxy) On(match Match, faults ...Fault) *Rule {
	r := &Rule{proxy: p, match: match, faults: faults}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, r)
	return r
}

// Hits returns how many requests the rule has taken.
func (r *Rule) Hits() int {
	r.proxy.mu.Lock()
	defer r.proxy.mu.Unlock()
	return r.hits
}

// Off ends the rule. Requests that it holds stay held.
func (r *Rule) Off() {
	r.proxy.mu.Lock()
	defer r.proxy.mu.Unlock()
	r.match = func(*http.Request) bool { return false }
}

// ServeHTTP handles one request.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var h http.Handler = http.HandlerFunc(p.forward)
	faults := p.arrived(r)
	for i := len(faults) - 1; i >= 0; i-- {
		h = faults[i](h)
	}
	h.ServeHTTP(w, r)
}

// arrived counts the request and returns what has to go wrong with it.
func (p *Proxy) arrived(r *http.Request) []Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts[OpOf(r)]++
	for _, rule := range p.rules {
		if rule.match(r) {
			rule.hits++
			return rule.faults
		}
	}
	return nil
}

// forward sends the request on and the answer back. Where either breaks, the client's connection is reset.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request) {
	resp, err := p.send(r)
	if err != nil {
		reset(w, r)
	}
	defer resp.Body.Close()
	resp.Header.Del("Connection") // it is about the connection between us and S3
	maps.Copy(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(w, resp.Body); err != nil {
		reset(w, r)
	}
}

func (p *Proxy) send(r *http.Request) (*http.Response, error) {
	out := r.Clone(r.Context())
	out.URL, out.RequestURI = p.target(r), ""
	if r.Header.Get("User-Agent") == "" {
		out.Header.Set("User-Agent", "") // else the transport adds its own
	}
	return p.transport.RoundTrip(out)
}

// target returns the upstream URL with path and query exactly as the client wrote them.
func (p *Proxy) target(r *http.Request) *url.URL {
	path, query, asked := strings.Cut(r.RequestURI, "?")
	if r.URL.IsAbs() { // as clients write it that take us for a forward proxy
		path = strings.TrimPrefix(path, r.URL.Scheme+"://"+r.URL.Host)
	}
	return &url.URL{Scheme: "http", Host: p.upstream, Opaque: path, RawQuery: query, ForceQuery: asked && query == ""}
}

// origin says through what a request came. It is its own key in the context of the request.
type origin struct {
	proxy *Proxy
	conn  *net.TCPConn
}

func originOf(r *http.Request) origin { return r.Context().Value(origin{}).(origin) }

// reset breaks the client's connection so that it sees "connection reset by peer", after what w has flushed. It does
// not return.
func reset(w http.ResponseWriter, r *http.Request) {
	_ = originOf(r).conn.SetLinger(0)
	panic(http.ErrAbortHandler)
}

// gone reports whether the client has closed its side. The request's context does not tell while there is a body to
// read.
func gone(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	var left bool
	err = raw.Control(func(fd uintptr) {
		f := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(f, 0)
		left = n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return left || err != nil
}
