package tests3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// site is a bucket of the shared server, seen directly and through a proxy.
type site struct {
	*testing.T
	bucket          string
	proxy           *Proxy
	direct, proxied *minio.Client
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := Shared(t)
	p := NewProxy(t, s.Endpoint())
	c, err := s.client(p.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	return &site{t, s.Bucket(t), p, s.Client(t), c}
}

// try puts b through the proxy.
func (s *site) try(key string, b []byte) error {
	return s.tryIn(s.Context(), key, b)
}

func (s *site) tryIn(ctx context.Context, key string, b []byte) error {
	core, sum := minio.Core{Client: s.proxied}, sha256.Sum256(b)
	_, err := core.PutObject(ctx, s.bucket, key, bytes.NewReader(b), int64(len(b)), "", hex.EncodeToString(sum[:]),
		minio.PutObjectOptions{DisableContentSha256: true}) // not in chunks, as it knows the sum
	return err
}

// read gets an object through the proxy, with what came before an error.
func (s *site) read(key string) ([]byte, error) {
	core := minio.Core{Client: s.proxied}
	r, _, _, err := core.GetObject(s.Context(), s.bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// holds fails the test unless S3 has exactly b under key, or nothing when b is nil.
func (s *site) holds(key string, b []byte) {
	s.Helper()
	if b != nil {
		if got := get(s.T, s.direct, s.bucket, key); !bytes.Equal(got, b) {
			s.Errorf("%s holds %d bytes, not the %d expected", key, len(got), len(b))
		}
		return
	}
	_, err := s.direct.StatObject(s.Context(), s.bucket, key, minio.StatObjectOptions{})
	if minio.ToErrorResponse(err).Code != minio.NoSuchKey {
		s.Errorf("%s should not be there: %v", key, err)
	}
}

// broken reports whether err says that the connection broke, and not that S3 answered.
func broken(err error) bool { return err != nil && minio.ToErrorResponse(err).StatusCode == 0 }

var big = bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB

func TestForward(t *testing.T) {
	s := newSite(t)
	for _, key := range []string{"plain", "a b/c+d%2F=&?#~;:@!$'()*,ü", "blobs/00/x"} {
		if err := s.try(key, big); err != nil {
			t.Fatalf("put %q: %v", key, err)
		}
		s.holds(key, big)
		if got, err := s.read(key); err != nil || !bytes.Equal(got, big) {
			t.Errorf("get %q: %d bytes, %v", key, len(got), err)
		}
	}
	if err := s.try("empty", nil); err != nil {
		t.Error(err)
	}
	core := minio.Core{Client: s.proxied}
	id, err := core.NewMultipartUpload(t.Context(), s.bucket, "multi", minio.PutObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	part, err := core.PutObjectPart(t.Context(), s.bucket, "multi", id, 1, bytes.NewReader(big), int64(len(big)),
		minio.PutObjectPartOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := core.ListObjectParts(t.Context(), s.bucket, "multi", id, 0, 10); err != nil {
		t.Error(err)
	}
	done := []minio.CompletePart{{PartNumber: 1, ETag: part.ETag}}
	_, err = core.CompleteMultipartUpload(t.Context(), s.bucket, "multi", id, done, minio.PutObjectOptions{})
	if err != nil {
		t.Error(err)
	}
	s.holds("multi", big)
	for op, want := range map[Op]int{
		PutObject: 4, GetObject: 3, CreateMultipartUpload: 1, UploadPart: 1, ListParts: 1, CompleteMultipartUpload: 1,
	} {
		if got := s.proxy.Count(op); got != want {
			t.Errorf("%s counted %d times, want %d", op, got, want)
		}
	}
	if got := s.proxy.Count(); got != 11 {
		t.Errorf("%d requests in all, want 11: %v", got, s.proxy.Counts())
	}
}

func TestTLS(t *testing.T) {
	s := Shared(t)
	p := NewTLSProxy(t, s.Endpoint())
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(p.CA()) {
		t.Fatal("no certificate")
	}
	for _, known := range []*x509.CertPool{pool, x509.NewCertPool()} {
		c, err := minio.New(p.Endpoint(), &minio.Options{
			Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Region: s.Region, Secure: true, MaxRetries: 1,
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: known}, DisableKeepAlives: true},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.ListBuckets(t.Context()); (err == nil) != (known == pool) {
			t.Errorf("certificate known: %v, error: %v", known == pool, err)
		}
	}
}

func TestAnswer(t *testing.T) {
	s := newSite(t)
	for _, want := range []struct {
		status int
		code   string
	}{
		{500, "InternalError"}, {503, "SlowDown"}, {429, "TooManyRequests"}, {403, "RequestTimeTooSkewed"},
		{403, "AccessDenied"}, {404, "NoSuchBucket"}, {400, "AuthorizationHeaderMalformed"},
	} {
		s.proxy.On(First(1, Is(PutObject)), Answer(want.status, want.code))
		got := minio.ToErrorResponse(s.try(want.code, big))
		if got.StatusCode != want.status || got.Code != want.code || got.Resource != "/"+s.bucket+"/"+want.code {
			t.Errorf("%v: the client sees %+v", want, got)
		}
		s.holds(want.code, nil)
	}
	s.proxy.On(First(1, Is(HeadObject)), AnswerHeader("Retry-After", "7"), Answer(503, "SlowDown"))
	_, err := s.proxied.StatObject(t.Context(), s.bucket, "x", minio.StatObjectOptions{})
	if minio.ToErrorResponse(err).StatusCode != 503 {
		t.Errorf("HEAD: %v", err)
	}
}

func TestPersisted(t *testing.T) {
	s := newSite(t)
	s.proxy.On(First(1, Any), Persisted(Answer(500, "InternalError")))
	if got := minio.ToErrorResponse(s.try("a", big)); got.Code != "InternalError" {
		t.Errorf("the client sees %+v", got)
	}
	s.holds("a", big)
	s.proxy.On(First(1, Any), Persisted(Reset()))
	if err := s.try("b", big); !broken(err) {
		t.Errorf("the client sees %v", err)
	}
	s.holds("b", big)
}

func TestReset(t *testing.T) {
	s := newSite(t)
	s.proxy.On(Is(PutObject), Reset())
	if err := s.try("a", []byte("small")); !broken(err) {
		t.Errorf("the client sees %v", err)
	}
	s.holds("a", nil)
}

func TestCut(t *testing.T) {
	s := newSite(t)
	r := s.proxy.On(Is(PutObject), CutRequest(100_000))
	if err := s.try("a", big); err == nil {
		t.Error("a cut request succeeded")
	}
	s.holds("a", nil)
	if err := s.try("b", big[:100_000]); err != nil {
		t.Errorf("a body that ends at the cut: %v", err)
	}
	r.Off()
	if err := s.try("a", big); err != nil || r.Hits() != 2 {
		t.Errorf("after the rule is off: %v, %d hits", err, r.Hits())
	}
	for _, n := range []int64{0, 1, 100_000} {
		s.proxy.On(First(1, Is(GetObject)), CutAnswer(n))
		got, err := s.read("a")
		if err == nil || int64(len(got)) > n || !bytes.HasPrefix(big, got) {
			t.Errorf("cut at %d: %d bytes, %v", n, len(got), err)
		}
	}
	s.proxy.On(First(1, Is(GetObject)), CutAnswer(1<<20))
	if got, err := s.read("a"); err != nil || !bytes.Equal(got, big) {
		t.Errorf("cut at the end: %d bytes, %v", len(got), err)
	}
}

func TestFlip(t *testing.T) {
	s := newSite(t)
	for _, n := range []int64{0, 70_001, 1<<20 - 1} {
		s.proxy.On(First(1, Is(PutObject)), FlipRequest(n))
		if err := s.try("a", big); err == nil {
			t.Errorf("S3 took a body with byte %d changed", n)
		}
		s.holds("a", nil)
	}
	put(t, s.direct, s.bucket, "a", big)
	for _, n := range []int{0, 70_001, 1<<20 - 1} {
		s.proxy.On(First(1, Is(GetObject)), FlipAnswer(int64(n)))
		got, err := s.read("a")
		if err != nil || len(got) != len(big) || got[n] != big[n]^1 {
			t.Fatalf("byte %d: %d bytes, %v", n, len(got), err)
		}
		if got[n] ^= 1; !bytes.Equal(got, big) {
			t.Errorf("more than byte %d changed", n)
		}
	}
}

func TestStall(t *testing.T) {
	for name, fault := range map[string]func(*Gate) Fault{
		"request": Stall,
		"body":    func(g *Gate) Fault { return StallRequest(100_000, g) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			shut, gate := NewGate(), NewGate()
			s.proxy.On(First(1, Any), fault(shut))
			s.proxy.On(First(1, Is(PutObject)), fault(gate))
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-shut.Reached()
				cancel()
			}()
			if err := s.tryIn(ctx, "a", big); !errors.Is(err, context.Canceled) {
				t.Errorf("the client that gave up sees %v", err)
			}
			s.holds("a", nil)
			go func() {
				<-gate.Reached()
				s.holds("b", nil)
				gate.Open()
			}()
			if err := s.try("b", big); err != nil {
				t.Errorf("the client that waited sees %v", err)
			}
			s.holds("b", big)
		})
	}
}

func TestStallAnswer(t *testing.T) {
	s := newSite(t)
	put(t, s.direct, s.bucket, "a", big)
	core, gate := minio.Core{Client: s.proxied}, NewGate()
	s.proxy.On(First(1, Is(GetObject)), StallAnswer(100_000, gate))
	r, _, _, err := core.GetObject(t.Context(), s.bucket, "a", minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got := make([]byte, 100_000)
	if _, err := io.ReadFull(r, got); err != nil {
		t.Fatalf("what comes before the stall: %v", err)
	}
	<-gate.Reached()
	gate.Open()
	rest, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(append(got, rest...), big) {
		t.Errorf("after the gate opened: %d bytes, %v", len(rest), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	shut := NewGate()
	s.proxy.On(Is(GetObject), StallAnswer(10, shut))
	left, _, _, err := core.GetObject(ctx, s.bucket, "a", minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	<-shut.Reached()
	cancel()
	if _, err := io.ReadAll(left); !errors.Is(err, context.Canceled) {
		t.Errorf("the client that gave up sees %v", err)
	}
}

func TestLies(t *testing.T) {
	s := newSite(t)
	put(t, s.direct, s.bucket, "a", big)
	s.proxy.On(Is(HeadObject), AnswerHeader("ETag", `"00000000000000000000000000000000"`))
	info, err := s.proxied.StatObject(t.Context(), s.bucket, "a", minio.StatObjectOptions{})
	if err != nil || info.ETag != strings.Repeat("0", 32) || info.Size != int64(len(big)) {
		t.Errorf("HEAD: %+v, %v", info, err)
	}
	s.proxy.On(Is(GetObject), AnswerHeader("Accept-Ranges", ""), EditAnswer(func(h http.Header, b []byte) []byte {
		h.Set("X-Amz-Meta-Size", h.Get("Content-Length"))
		return append(b, "more"...)
	}))
	core := minio.Core{Client: s.proxied}
	r, _, h, err := core.GetObject(t.Context(), s.bucket, "a", minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got, err := io.ReadAll(r)
	if err != nil || string(got) != string(big)+"more" ||
		h.Get("X-Amz-Meta-Size") != "1048576" || h.Get("Accept-Ranges") != "" {
		t.Errorf("GET: %d bytes, %v, %v", len(got), h, err)
	}
}

func TestReplay(t *testing.T) {
	s := newSite(t)
	var late, twice Recording
	s.proxy.On(At("/late", Is(PutObject)), Record(&late), Reset())
	s.proxy.On(At("/twice", First(1, Is(PutObject))), Record(&twice))
	if err := s.try("late", big); err == nil {
		t.Error("the client was told that the request arrived")
	}
	s.holds("late", nil)
	for range 2 {
		if got := late.Replay(); len(got) != 1 || got[0] != 200 {
			t.Errorf("replay: status %v", got)
		}
		s.holds("late", big)
	}
	for _, b := range [][]byte{big, []byte("newer")} {
		if err := s.try("twice", b); err != nil {
			t.Error(err)
		}
		s.holds("twice", b)
	}
	if got := twice.Replay(); len(got) != 1 || got[0] != 200 {
		t.Errorf("replay: status %v", got)
	}
	s.holds("twice", big)
	if got := s.proxy.Count(PutObject); got != 3 {
		t.Errorf("%d requests counted, want 3", got)
	}
}

func TestRules(t *testing.T) {
	s := newSite(t)
	second := s.proxy.On(Nth(2, Is(PutObject)), Answer(500, "InternalError"))
	oldest := s.proxy.On(At("/x", Any), Answer(503, "SlowDown"))
	rest := s.proxy.On(First(2, Any), Answer(403, "AccessDenied"))
	var got []string
	for _, key := range []string{"x", "y", "z", "x", "z", "z"} {
		got = append(got, minio.ToErrorResponse(s.try(key, big)).Code)
	}
	want := "SlowDown InternalError AccessDenied SlowDown AccessDenied "
	if strings.Join(got, " ") != want {
		t.Errorf("answers %q, want %q", got, want)
	}
	if second.Hits() != 1 || oldest.Hits() != 2 || rest.Hits() != 2 || s.proxy.Count(PutObject, GetObject) != 6 {
		t.Errorf("hits %d %d %d, %d requests", second.Hits(), oldest.Hits(), rest.Hits(), s.proxy.Count())
	}
}
