package bucket

import (
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
	// Attempts is how often a request is made, with growing random pauses of up to a second, if the server can't be
	// reached, is overloaded (429, 503 SlowDown) or fails (5xx).
	Attempts = 8
	// socketBuffer is the size of a connection's buffers. Larger reads and writes go past them.
	socketBuffer = 256 << 10
)

// Bucket makes requests to one bucket. It is safe for concurrent use.
type Bucket struct {
	Config
	core minio.Core
	skew *atomic.Int64 // nanoseconds that the server's clock was ahead of ours in its last refusal
	idle func()        // closes connections that nothing goes over
}

// Dial returns a Bucket, and makes no request yet. wrap, if set, stands between the client and the network; tries of
// zero means Attempts.
func Dial(c Config, wrap func(http.RoundTripper) http.RoundTripper, tries int) (*Bucket, error) {
	if tries == 0 {
		tries = Attempts
	}
	transport, err := newTransport(c)
	if err != nil {
		return nil, err
	}
	b := &Bucket{Config: c, skew: new(atomic.Int64), idle: transport.CloseIdleConnections}
	var rt http.RoundTripper = clockWatch{transport, b.skew}
	if wrap != nil {
		rt = wrap(rt)
	}
	core, err := minio.NewCore(c.Endpoint, &minio.Options{
		Creds:        credentials.New(&providers{all: chain(c.region())}),
		Secure:       !c.Insecure,
		Transport:    rt,
		Region:       c.region(),
		BucketLookup: c.addressing,
		MaxRetries:   tries,
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c, err)
	}
	b.core = *core
	return b, nil
}

// CloseIdle closes connections that nothing goes over.
func (b *Bucket) CloseIdle() { b.idle() }

func newTransport(c Config) (*http.Transport, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("%s: read certificates: %w", c, err)
		}
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: %s holds no certificate in PEM form", c, c.CAFile)
		}
	}
	d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			nc, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return watched{nc}, nil
		},
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 10 * time.Second,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     90 * time.Second,
		ReadBufferSize:      socketBuffer,
		WriteBufferSize:     socketBuffer,
		DisableCompression:  true,
	}, nil
}

// watched is a connection on which reads and writes fail once neither has made progress for a while. The two extend
// each other: an answer may be waited for while a body is still being sent.
type watched struct{ net.Conn }

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

func (w watched) extend() { _ = w.SetDeadline(time.Now().Add(stallLimit)) } // fails on a closed connection only

// clockWatch notes by how much the clock of a server that refuses a request differs from ours.
type clockWatch struct {
	http.RoundTripper
	skew *atomic.Int64
}

func (c clockWatch) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusForbidden {
		if at, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
			c.skew.Store(int64(time.Until(at)))
		}
	}
	return resp, err
}

// chain returns where credentials may come from. The last one knows web identity and the roles of containers and
// machines.
func chain(region string) []credentials.Provider {
	return []credentials.Provider{
		&credentials.EnvAWS{}, &credentials.EnvMinio{}, &credentials.FileAWSCredentials{}, &credentials.IAM{Region: region},
	}
}

// providers asks one provider after the other. Unlike the chain of minio-go it does not go on without credentials when
// there are none, and it says why each had none.
type providers struct {
	all     []credentials.Provider
	current credentials.Provider
}

var errNoCredentials = errors.New("no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, " +
	"or use a credentials file, web identity or an instance role")

// Retrieve implements credentials.Provider.
func (p *providers) Retrieve() (credentials.Value, error) { return p.RetrieveWithCredContext(nil) }

// RetrieveWithCredContext implements credentials.Provider.
func (p *providers) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	var why error
	for _, one := range p.all {
		v, err := one.RetrieveWithCredContext(cc)
		if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
			p.current = one
			return v, nil
		}
		why = err // the last one is the only one whose failure is not just an absence
	}
	if why == nil {
		return credentials.Value{}, errNoCredentials
	}
	return credentials.Value{}, fmt.Errorf("%w (%w)", errNoCredentials, why)
}

// IsExpired implements credentials.Provider.
func (p *providers) IsExpired() bool { return p.current == nil || p.current.IsExpired() }

// Pause waits before another try, longer with each, by a random part of a second at most. It returns the error of ctx.
func Pause(ctx context.Context, tries int) error {
	wait := time.Duration(rand.Int64N(int64(min(50*time.Millisecond<<min(tries, 5), time.Second))))
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
