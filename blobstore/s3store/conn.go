package s3store

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

const (
	// stallLimit is how long a request may make no progress in either direction before it is tried again.
	stallLimit = 30 * time.Second
	// attempts is how often a request is made, with growing random pauses of up to a second, if the server can't be
	// reached, is overloaded (429, 503 SlowDown) or fails (5xx).
	attempts = 8
	// socketBuffer is the size of a connection's buffers. Larger reads and writes go past them.
	socketBuffer = 256 << 10
)

// conn makes requests to one bucket.
type conn struct {
	minio.Core
	Config
	skew *atomic.Int64 // nanoseconds that the server's clock was ahead of ours in its last refusal
	idle func()        // closes connections that nothing goes over
}

// dial returns a connection, which makes no request yet. wrap, if set, stands between the client and the network; tries
// of zero means the usual number.
func dial(c Config, wrap func(http.RoundTripper) http.RoundTripper, tries int) (*conn, error) {
	if tries == 0 {
		tries = attempts
	}
	transport, err := newTransport(c)
	if err != nil {
		return nil, err
	}
	s := &conn{Config: c, skew: new(atomic.Int64), idle: transport.CloseIdleConnections}
	var rt http.RoundTripper = clockWatch{transport, s.skew}
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
	s.Core = *core
	return s, nil
}

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

// What a server answers and callers of conn act upon.
var (
	errAbsent   = errors.New("no such object")
	errNoUpload = errors.New("no such multipart upload")
	errConflict = errors.New("the object was changed meanwhile")
	errParts    = errors.New("the server no longer has the parts as they were sent")
)

// action is what a request does, in the words of a bucket's policy.
type action string

const (
	getObject   action = "s3:GetObject"
	putObject   action = "s3:PutObject"
	delObject   action = "s3:DeleteObject"
	listBucket  action = "s3:ListBucket"
	abortUpload action = "s3:AbortMultipartUpload"
	listUploads action = "s3:ListBucketMultipartUploads"
)

// explain makes the error of a request to key one that says what to do, or one to act upon.
func (c *conn) explain(a action, key string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if errors.Is(err, errNoCredentials) {
		return fmt.Errorf("%s: %w", c, err)
	}
	var e minio.ErrorResponse
	if !errors.As(err, &e) {
		return fmt.Errorf("%w: %s at %s: %w", blobstore.ErrUnavailable, c, c.Endpoint, err)
	}
	switch e.Code {
	case "NoSuchKey":
		return fmt.Errorf("%s: %w", key, errAbsent)
	case "NoSuchUpload":
		return fmt.Errorf("%s: %w", key, errNoUpload)
	case "PreconditionFailed", "ConditionalRequestConflict", "OperationAborted":
		return fmt.Errorf("%s: %w", key, errConflict)
	case "InvalidPart", "InvalidPartOrder", "EntityTooSmall":
		return fmt.Errorf("%s: %w: %s", key, errParts, e.Message)
	case "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded":
		return fmt.Errorf("%w: %s: %s", blobstore.ErrNoSpace, c, e.Message)
	}
	if refused := c.refused(a, key, e); refused != nil {
		return refused
	}
	switch {
	case e.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s: %w", key, errAbsent)
	case e.StatusCode == http.StatusPreconditionFailed || e.StatusCode == http.StatusConflict:
		return fmt.Errorf("%s: %w", key, errConflict)
	case e.StatusCode >= 500 || e.StatusCode == http.StatusTooManyRequests:
		return fmt.Errorf("%w: %s at %s: %d %s: %s",
			blobstore.ErrUnavailable, a, c.Endpoint, e.StatusCode, e.Code, e.Message)
	}
	return fmt.Errorf("%s on %s/%s: %d %s: %w", a, c, key, e.StatusCode, e.Code, err)
}

// refused explains what only the one who runs the registry can put right.
func (c *conn) refused(a action, key string, e minio.ErrorResponse) error {
	switch e.Code {
	case "NoSuchBucket":
		return fmt.Errorf("there is no bucket %q at %s: make it first, or check the name and the endpoint",
			c.Bucket, c.Endpoint)
	case "AccessDenied", "AllAccessDisabled":
		return fmt.Errorf("these credentials may not %s on %s/%s: a policy must allow it (%s)", a, c, key, e.Message)
	case "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "InvalidClientTokenId":
		return fmt.Errorf("%s does not know these credentials (%s: %s): check AWS_ACCESS_KEY_ID and its kin",
			c.Endpoint, e.Code, e.Message)
	case "SignatureDoesNotMatch":
		return fmt.Errorf("%s refuses the signature: AWS_SECRET_ACCESS_KEY is not that of AWS_ACCESS_KEY_ID, "+
			"or a proxy changes requests", c.Endpoint)
	case "RequestTimeTooSkewed":
		now := time.Now()
		return fmt.Errorf("the clock of this machine is off: it says %s, %s says %s: set it right",
			now.UTC().Format(time.DateTime), c.Endpoint, now.Add(time.Duration(c.skew.Load())).UTC().Format(time.DateTime))
	case "PermanentRedirect", "AuthorizationHeaderMalformed", "InvalidRegion", "IllegalLocationConstraintException":
		return fmt.Errorf("bucket %q at %s is not in region %q: put region=%s into the URL of the store (%s)",
			c.Bucket, c.Endpoint, c.region(), cmp.Or(e.Region, "…"), e.Message)
	}
	return nil
}

// pause waits before another try, longer with each, by a random part of a second at most. It returns the error of ctx.
func pause(ctx context.Context, tries int) error {
	wait := time.Duration(rand.Int64N(int64(min(50*time.Millisecond<<min(tries, 5), time.Second))))
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
