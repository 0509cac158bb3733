package bucket

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

const (
	// stallLimit is how long a request may make no progress in either direction before it is tried again.
	stallLimit = 30 * time.Second
	// patience is how long a small request may take in all, tries and pauses and everything, before the server counts as
	// not available; slowest is the number of bytes a second of a larger one that this allows for.
	patience = 30 * time.Second
	slowest  = 128 << 10
	// assemblyLimit is the same where a server may copy all bytes of an object before it says a word.
	assemblyLimit = 10 * time.Minute
	// Attempts is how often a request is made, with growing random pauses of up to a second, if the server can't be
	// reached, is overloaded (429, 503 SlowDown) or fails (5xx).
	Attempts  = 8
	pauseUnit = 50 * time.Millisecond
	// socketBuffer is the size of a connection's buffers. Larger reads and writes go past them.
	socketBuffer = 256 << 10
)

// Options are choices of Dial. The zero Options are the usual ones.
type Options struct {
	// Transport, if set, stands between the client and the network.
	Transport func(http.RoundTripper) http.RoundTripper
	// Tries is how often a request is made that fails for a reason that may pass. Zero means Attempts.
	Tries int
	// Stall, Assembly and Patience are other limits than the usual ones for a request without progress, for Complete, and
	// for a small request in all; Pause is another unit of Bucket.Pause.
	Stall, Assembly, Patience, Pause time.Duration
}

// Bucket makes requests to one bucket. It is safe for concurrent use.
type Bucket struct {
	Config
	core    minio.Core
	patient minio.Core    // for what a server may take long to answer
	skew    *atomic.Int64 // nanoseconds that the server's clock was ahead of ours in its last refusal
	idle    func()        // closes connections that nothing goes over
	pause   time.Duration
	limit   time.Duration // see patience
	creds   *credentials.Credentials
	links   signer
}

// bounded ends a request of so many bytes that takes too long in all.
func (b *Bucket) bounded(ctx context.Context, bytes int) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, b.limit+time.Duration(bytes)*time.Second/slowest)
}

// Dial returns a Bucket, and makes no request yet.
func Dial(c Config, o Options) (*Bucket, error) {
	pool, err := roots(c)
	if err != nil {
		return nil, err
	}
	usual, long := newTransport(pool, cmp.Or(o.Stall, stallLimit)), newTransport(pool, cmp.Or(o.Assembly, assemblyLimit))
	b := &Bucket{
		Config: c, skew: new(atomic.Int64), pause: cmp.Or(o.Pause, pauseUnit), limit: cmp.Or(o.Patience, patience),
		idle: func() {
			usual.CloseIdleConnections()
			long.CloseIdleConnections()
		},
	}
	b.creds = credentials.New(&providers{all: sources(c.region(), usual)})
	if b.core, err = b.client(usual, o); err != nil {
		return nil, err
	}
	b.patient, err = b.client(long, o)
	return b, err
}

func (b *Bucket) client(transport *http.Transport, o Options) (minio.Core, error) {
	var rt http.RoundTripper = refusals{transport, b.skew, b.creds.Expire}
	if o.Transport != nil {
		rt = o.Transport(rt)
	}
	core, err := minio.NewCore(b.Endpoint, &minio.Options{
		Creds:        b.creds,
		Secure:       !b.Insecure,
		Transport:    rt,
		Region:       b.region(),
		BucketLookup: b.addressing,
		MaxRetries:   cmp.Or(o.Tries, Attempts),
	})
	if err != nil {
		return minio.Core{}, fmt.Errorf("%s: %w", b, err)
	}
	return *core, nil
}

// CloseIdle closes connections that nothing goes over.
func (b *Bucket) CloseIdle() { b.idle() }

// roots returns the certificates that are trusted.
func roots(c Config) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil || c.CAFile == "" {
		return pool, err
	}
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("%s: read certificates: %w", c, err)
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: %s holds no certificate in PEM form", c, c.CAFile)
	}
	return pool, nil
}

func newTransport(roots *x509.CertPool, stall time.Duration) *http.Transport {
	d := net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			nc, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return watched{nc, stall}, nil
		},
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 10 * time.Second,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     90 * time.Second,
		ReadBufferSize:      socketBuffer,
		WriteBufferSize:     socketBuffer,
		DisableCompression:  true,
	}
}

// watched is a connection on which reads and writes fail once neither has made progress for a while. The two extend
// each other: an answer may be waited for while a body is still being sent.
type watched struct {
	net.Conn
	stall time.Duration
}

func (w watched) Read(b []byte) (int, error) {
	w.extend()
	return w.Conn.Read(b)
}

func (w watched) Write(b []byte) (int, error) {
	w.extend()
	n, err := w.Conn.Write(b)
	w.extend()
	return n, err
}

// ReadFrom implements io.ReaderFrom for the body of a request: one that lies in memory goes out without being copied.
func (w watched) ReadFrom(r io.Reader) (int64, error) {
	if l, ok := r.(*io.LimitedReader); ok {
		if from, ok := l.R.(io.WriterTo); ok {
			n, err := from.WriteTo(&inPieces{w, l.N})
			l.N -= n
			return n, err
		}
	}
	return io.Copy(struct{ io.Writer }{w}, r)
}

// inPieces writes what is large in pieces, so that each of them is progress, and no more than its length.
type inPieces struct {
	w    io.Writer
	left int64
}

func (p *inPieces) Write(b []byte) (n int, err error) {
	if int64(len(b)) > p.left {
		return 0, http.ErrContentLength
	}
	for n < len(b) && err == nil {
		var m int
		m, err = p.w.Write(b[n:min(len(b), n+socketBuffer)])
		n += m
	}
	p.left -= int64(n)
	return n, err
}

func (w watched) extend() { _ = w.SetDeadline(time.Now().Add(w.stall)) } // fails on a closed connection only

// maxListing is more than any page of a listing has.
const maxListing = 16 << 20

// capped is a body that ends with an error where it goes on for too long.
type capped struct {
	io.ReadCloser
	left int64
}

func (c *capped) Read(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, fmt.Errorf("the page of a listing has more than %d bytes", maxListing)
	}
	n, err := c.ReadCloser.Read(b[:min(int64(len(b)), c.left)])
	c.left -= int64(n)
	return n, err
}

// refusals looks at what a server answers when it refuses a request, and at why it can't be reached.
type refusals struct {
	http.RoundTripper
	skew    *atomic.Int64 // by how much the server's clock differs from ours
	expired func()        // is told that the server no longer takes the credentials
}

func (f refusals) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := f.RoundTripper.RoundTrip(req)
	if err != nil {
		// minio-go knows by its type, bare, that trying again is of no use.
		if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
			return nil, unknown
		}
		return nil, err
	}
	if query := req.URL.Query(); query.Has("list-type") || query.Has("uploads") {
		resp.Body = &capped{resp.Body, maxListing}
	}
	if resp.StatusCode != http.StatusForbidden && resp.StatusCode != http.StatusBadRequest {
		return resp, nil
	}
	if at, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		f.skew.Store(int64(time.Until(at)))
	}
	const enough = 64 << 10
	body, err := io.ReadAll(io.LimitReader(resp.Body, enough))
	if bytes.Contains(body, []byte("<Code>ExpiredToken")) {
		f.expired()
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(body), failing{err}, resp.Body), resp.Body}
	return resp, nil
}

// failing reads as an error, or as nothing if there is none.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, cmp.Or(f.err, io.EOF) }

// Pause waits before another try, longer with each, by a random part of a second at most. It returns the error of ctx.
func (b *Bucket) Pause(ctx context.Context, tries int) error {
	wait := time.Duration(rand.Int64N(int64(min(b.pause<<min(tries, 5), time.Second))))
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
