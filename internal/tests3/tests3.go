// Package tests3 runs a real S3 server for the tests of other packages, and a Proxy in front of it that breaks chosen
// requests. Only tests import it.
//
// The server is versitygw, which `make test` builds into .tools/bin. The environment may choose another one:
//
//	KILN_TEST_S3=weed                SeaweedFS, which `make test S3=weed` builds
//	KILN_TEST_S3_ENDPOINT=HOST:PORT  a server that runs already and speaks plain HTTP, or several, separated by commas;
//	                                 with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (else us-east-1)
//
// A server that cannot be had fails the test; nothing is skipped.
package tests3

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kiln-registry/kiln-registry/internal/testproc"
)

// Server is a running S3 service: one or more endpoints over the same buckets. Any number of goroutines may use it.
type Server struct {
	AccessKey, SecretKey, Region string

	endpoints []string
	root      string   // the folder of the buckets; empty when objects are not plain files that we can reach
	dir       string   // everything that goes with the server; empty when it is not ours
	strays    []string // files that a process may leave elsewhere
	private   bool     // ends with the test, buckets and all
	processes []*process
}

// New starts a server with one endpoint. It ends with the test, which shows its log if it failed.
func New(t testing.TB) *Server { return forTest(t, 1, "") }

// NewVirtualHost is New for requests whose Host is BUCKET.domain; path-style works too. domain need not resolve where
// the client's transport dials Endpoint by itself, or takes a Proxy as its HTTP proxy. An external endpoint can't be
// told its domain, so this server is always one of our own.
func NewVirtualHost(t testing.TB, domain string) *Server { return forTest(t, 1, domain) }

// NewPair is New with two endpoints: two processes on the same data, neither of which knows of the other. An external
// endpoint that stands alone is named twice.
func NewPair(t testing.TB) *Server { return forTest(t, 2, "") }

func forTest(t testing.TB, endpoints int, domain string) *Server {
	t.Helper()
	s, err := start(t, endpoints, domain)
	if err != nil {
		t.Fatal(err)
	}
	s.private = len(s.processes) > 0
	t.Cleanup(s.stop)
	s.logIfFailed(t)
	return s
}

// shared is the server that the tests of one process have in common.
var shared struct {
	sync.Mutex
	inMain bool
	server *Server
	err    error
}

// Shared returns the server with one endpoint that all tests of the process share. The first call starts it, M ends it.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	switch {
	case !shared.inMain:
		t.Fatal("tests3.Shared: nothing would end the server (hint: func TestMain(m *testing.M) { tests3.Main(m) })")
	case shared.server == nil && shared.err == nil:
		shared.server, shared.err = start(t, 1, "")
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	shared.server.logIfFailed(t)
	return shared.server
}

// M runs tests and then ends the server that they shared.
type M struct{ *testing.M }

// Run returns the exit code of the tests.
func (m M) Run() int {
	shared.Lock()
	shared.inMain = true
	shared.Unlock()
	defer func() {
		if shared.server != nil {
			shared.server.stop()
		}
	}()
	return m.M.Run()
}

// Main is the whole TestMain of a package that uses Shared.
func Main(m *testing.M) { os.Exit(M{m}.Run()) }

// Endpoint returns the first endpoint as HOST:PORT. It speaks plain HTTP and wants path-style requests.
func (s *Server) Endpoint() string { return s.endpoints[0] }

// Endpoints returns every endpoint.
func (s *Server) Endpoints() []string { return s.endpoints }

// Dir returns the folder in which object KEY of bucket B is the plain file B/KEY. It is false for a server that keeps
// objects otherwise.
func (s *Server) Dir() (string, bool) { return s.root, s.root != "" }

// Client returns a client of the first endpoint that keeps no connection open and makes one attempt a request.
func (s *Server) Client(t testing.TB) *minio.Client {
	t.Helper()
	c, err := s.client(s.endpoints[0])
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *Server) client(endpoint string) (*minio.Client, error) {
	return minio.New(endpoint, &minio.Options{
		Creds:        credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""),
		Region:       s.Region,
		BucketLookup: minio.BucketLookupPath,
		Transport:    &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		MaxRetries:   1,
	})
}

// Bucket makes an empty bucket of a name not used before. It goes with the test, and everything in it.
func (s *Server) Bucket(t testing.TB) string {
	t.Helper()
	c, name := s.Client(t), "kiln-test-"+strings.ToLower(rand.Text()[:16])
	if err := c.MakeBucket(t.Context(), name, minio.MakeBucketOptions{Region: s.Region}); err != nil {
		t.Fatalf("making bucket %s on %s: %v", name, s.Endpoint(), err)
	}
	if !s.private {
		t.Cleanup(func() {
			if err := empty(c, name); err != nil {
				t.Errorf("removing bucket %s from %s: %v", name, s.Endpoint(), err)
			}
		})
	}
	return name
}

// empty removes a bucket with its objects and open uploads. A bucket that is gone already is no error.
func empty(c *minio.Client, bucket string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if there, err := c.BucketExists(ctx, bucket); err != nil || !there {
		return err
	}
	core := minio.Core{Client: c}
	for {
		open, err := core.ListMultipartUploads(ctx, bucket, "", "", "", "", 1000)
		if err != nil {
			return err
		}
		for _, u := range open.Uploads {
			if err := core.AbortMultipartUpload(ctx, bucket, u.Key, u.UploadID); err != nil {
				return err
			}
		}
		if !open.IsTruncated {
			break
		}
	}
	objects := c.ListObjects(ctx, bucket, minio.ListObjectsOptions{Recursive: true})
	for bad := range c.RemoveObjects(ctx, bucket, objects, minio.RemoveObjectsOptions{}) {
		return bad.Err
	}
	return c.RemoveBucket(ctx, bucket)
}

// start starts the server that the environment asks for.
func start(t testing.TB, endpoints int, domain string) (*Server, error) {
	if external := os.Getenv("KILN_TEST_S3_ENDPOINT"); external != "" && domain == "" {
		return outside(external, endpoints)
	}
	s := &Server{AccessKey: rand.Text(), SecretKey: rand.Text(), Region: "eu-central-1"}
	var run func(t testing.TB, s *Server, endpoints int, domain string) error
	switch kind := os.Getenv("KILN_TEST_S3"); kind {
	case "", "versitygw":
		run = versitygw
	case "weed":
		run = weed
	default:
		return nil, fmt.Errorf("no S3 server called %q (hint: KILN_TEST_S3 is versitygw or weed)", kind)
	}
	var err error
	if s.dir, err = os.MkdirTemp("", "kiln-test-s3-"); err != nil {
		return nil, err
	}
	if err := run(t, s, endpoints, domain); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

// outside describes a server that somebody else runs.
func outside(list string, endpoints int) (*Server, error) {
	s := &Server{
		AccessKey: os.Getenv("AWS_ACCESS_KEY_ID"), SecretKey: os.Getenv("AWS_SECRET_ACCESS_KEY"),
		Region: os.Getenv("AWS_REGION"), endpoints: strings.Split(list, ","),
	}
	if s.Region == "" {
		s.Region = "us-east-1"
	}
	if s.AccessKey == "" || s.SecretKey == "" {
		return nil, errors.New("KILN_TEST_S3_ENDPOINT also needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	}
	for _, e := range s.endpoints {
		if strings.Contains(e, "/") {
			return nil, fmt.Errorf("KILN_TEST_S3_ENDPOINT: %q is not HOST:PORT; it must speak plain HTTP", e)
		}
	}
	for len(s.endpoints) < endpoints {
		s.endpoints = append(s.endpoints, s.endpoints[0])
	}
	return s, nil
}

// listen has run start a process on n free ports and waits until the first answers as ours. It tries again when the
// process ends, as it does when somebody else takes a port first.
func (s *Server) listen(n int, run func(ports []string) (*process, error)) error {
	var last error
	for range 5 {
		ports, err := testproc.FreePorts(n)
		if err != nil {
			return err
		}
		p, err := run(ports)
		if err != nil {
			return err
		}
		s.processes = append(s.processes, p)
		endpoint := "127.0.0.1:" + ports[0]
		if last = s.await(p, endpoint); last == nil {
			s.endpoints = append(s.endpoints, endpoint)
			return nil
		}
		if !p.Ended() {
			break
		}
	}
	return last
}

// await returns when the endpoint takes our credentials, and an error with the end of the log when it will not.
func (s *Server) await(p *process, endpoint string) error {
	c, err := s.client(endpoint)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err = c.ListBuckets(ctx); err == nil && !p.Ended() {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.Done:
			return fmt.Errorf("%s ended before it answered: %w; it said:\n%s", p.name, p.Err, p.logged(0))
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer on %s: %w; it said:\n%s", p.name, endpoint, err, p.logged(0))
		}
	}
}

// stop ends the processes and removes what they kept.
func (s *Server) stop() {
	for i := len(s.processes) - 1; i >= 0; i-- {
		s.processes[i].stop()
	}
	for _, path := range append(s.strays, s.dir) {
		_ = os.RemoveAll(path) // nothing, for an empty path
	}
}

// logIfFailed shows what the processes log from now on, when the test has failed.
func (s *Server) logIfFailed(t testing.TB) {
	from := make([]int64, len(s.processes))
	for i, p := range s.processes {
		from[i] = p.logSize()
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for i, p := range s.processes {
			t.Logf("log of %s:\n%s", p.name, p.logged(from[i]))
		}
	})
}

// tool returns the absolute path of a program in .tools/bin.
func tool(root, name, hint string) (string, error) {
	path := filepath.Join(root, ".tools", "bin", name)
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return "", fmt.Errorf("no S3 server: %s is missing (hint: %s builds it)", path, hint)
	}
	return path, nil
}

// tail returns the last lines of r after offset from, at most 8 KiB.
func tail(r io.ReaderAt, from, size int64) string {
	const most = 8 << 10
	b := make([]byte, min(most, max(0, size-from)))
	n, _ := r.ReadAt(b, size-int64(len(b)))
	b = b[:n]
	if size-from > most {
		_, b, _ = bytes.Cut(b, []byte("\n"))
	}
	return string(b)
}
