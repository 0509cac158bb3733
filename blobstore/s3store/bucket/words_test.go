package bucket

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// look is the first request that a store makes.
func (s *site) look(url string) error {
	b, err := try(url, Options{})
	if err == nil {
		_, err = b.Get(s.ctx, b.Key("x"), 10, nil)
	}
	return err
}

// TestWords: what a real server refuses is said so that one can put it right.
func TestWords(t *testing.T) {
	s := newSite(t)
	at := "addressing=path&endpoint=http://" + s.proxy.Endpoint()
	s.want("look for what is not there", s.look(s.url("")), ErrAbsent)
	s.says("another bucket", s.look("s3://not-there/p?"+at),
		`there is no bucket "not-there" at `+s.proxy.Endpoint(), "make it first")
	s.says("another bucket, and a region", s.look("s3://not-there/p?region="+s.server.Region+"&"+at),
		`there is no bucket "not-there"`)
	elsewhere := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrAbsent) { // some servers are everywhere
			s.says("another region", err, `"`+s.bucket+`"`, `is not in region "mars-1"`, "put region=")
		}
	}
	elsewhere(s.look(s.url("&region=mars-1")))
	t.Setenv("AWS_REGION", "mars-1")
	elsewhere(s.look(s.url("")))
	s.want("the right region", s.look(s.url("&region="+s.server.Region)), ErrAbsent)
	t.Setenv("AWS_REGION", "")

	t.Setenv("AWS_SECRET_ACCESS_KEY", wrongSecret)
	s.says("another secret", s.look(s.url("")), "refuses the signature", "AWS_SECRET_ACCESS_KEY")
	t.Setenv("AWS_ACCESS_KEY_ID", "NOBODYKNOWS")
	s.says("another key", s.look(s.url("")), "does not know these credentials", "AWS_ACCESS_KEY_ID")
}

// TestDenied: which action was denied, and on what.
func TestDenied(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url("&region="+s.server.Region), Options{})
	s.proxy.On(tests3.Any, tests3.Answer(403, "AccessDenied"))
	key := b.Key("x")
	for what, c := range map[string]struct {
		ask  func() error
		says string
	}{
		"get":         {func() error { _, err := b.Get(s.ctx, key, 1, nil); return err }, "s3:GetObject"},
		"get missing": {func() error { _, err := b.Get(s.ctx, key, 1, nil); return err }, "and s3:ListBucket for obj"},
		"range":       {func() error { _, _, err := b.Range(s.ctx, key, 0, 1); return err }, "s3:GetObject"},
		"head":        {func() error { _, err := b.Head(s.ctx, key); return err }, "s3:GetObject"},
		"put":         {func() error { _, err := b.Put(s.ctx, key, nil, Condition{}); return err }, "s3:PutObject"},
		"remove":      {func() error { return b.Remove(s.ctx, key) }, "s3:DeleteObject"},
		"begin":       {func() error { _, err := b.Begin(s.ctx, key); return err }, "s3:PutObject"},
		"part":        {func() error { _, err := b.PutPart(s.ctx, key, "u", 1, []byte("x"), 0); return err }, "s3:PutObject"},
		"complete":    {func() error { _, err := b.Complete(s.ctx, key, "u", nil); return err }, "s3:PutObject"},
		"abort":       {func() error { return b.Abort(s.ctx, key, "u") }, "s3:AbortMultipartUpload"},
		"list": {func() error {
			for _, err := range b.List(s.ctx, key, "", 0) {
				return err
			}
			return nil
		}, "s3:ListBucket"},
		"multiparts": {func() error {
			for _, err := range b.Multiparts(s.ctx, key) {
				return err
			}
			return nil
		}, "s3:ListBucketMultipartUploads"},
	} {
		before := s.proxy.Count()
		s.says(what, c.ask(), "these credentials may not s3:", c.says, s.bucket+"/p/x")
		if n := s.proxy.Count() - before; n != 1 {
			t.Errorf("%s was asked %d times", what, n)
		}
	}
}

// TestSkew: a clock that is off is named with both times, and asking again is not tried (PU-18).
func TestSkew(t *testing.T) {
	s := newSite(t)
	there := time.Now().Add(20 * time.Minute).UTC().Truncate(time.Second)
	date := tests3.AnswerHeader("Date", there.Format(http.TimeFormat))
	s.proxy.On(tests3.Any, date, tests3.Answer(403, "RequestTimeTooSkewed"))
	err := s.look(s.url("&region=" + s.server.Region))
	s.says("look", err,
		"the clock of this machine says ", "and that of "+s.proxy.Endpoint()+" says ", " apart: set the wrong one right")
	if n := s.proxy.Count(); n != 1 {
		t.Errorf("the server was asked %d times", n)
	}
	// The second may have turned meanwhile.
	apart := func(d time.Duration) bool {
		return err != nil && strings.Contains(err.Error(), ", "+d.String()+" apart")
	}
	if m := 20 * time.Minute; !apart(m) && !apart(m-time.Second) && !apart(m-2*time.Second) {
		t.Errorf("%v: want 20 minutes", err)
	}
	if err != nil && !strings.Contains(err.Error(), there.Format("2006-01-02 15:")) {
		t.Errorf("%v: want the server's time, %v", err, there)
	}
}

// TestReach: how a server that can't be reached, or not so, is told.
func TestReach(t *testing.T) {
	s := newSite(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	s.must(err)
	closed := l.Addr().String()
	s.must(l.Close())
	err = s.look("s3://models?addressing=path&endpoint=http://" + closed)
	s.want("nobody listens", err, blobstore.ErrUnavailable)
	s.says("nobody listens", err, "s3://models at "+closed, "connection refused")
	err = s.look("s3://models?region=r&addressing=path&endpoint=http://" + closed)
	s.want("nobody listens", err, blobstore.ErrUnavailable)

	s.says("https to http", s.look("s3://models?endpoint=https://"+s.proxy.Endpoint()),
		s.proxy.Endpoint()+" speaks plain HTTP: put endpoint=http://"+s.proxy.Endpoint()+" into the URL")

	secure := tests3.NewTLSProxy(t, s.server.Endpoint())
	at := "s3://" + s.bucket + "?region=" + s.server.Region + "&addressing=path&endpoint="
	s.says("http to https", s.look(at+"http://"+secure.Endpoint()),
		secure.Endpoint()+" speaks HTTPS: put endpoint=https://"+secure.Endpoint()+" into the URL")
	s.says("no authority", s.look(at+"https://"+secure.Endpoint()), "does not trust", "put ca-file=PATH")
	if n := secure.Count(); n != 0 {
		t.Errorf("%d requests went to a server that is not trusted", n)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	s.must(os.WriteFile(ca, secure.CA(), 0o600))
	s.want("the right authority", s.look(at+"https://"+secure.Endpoint()+"&ca-file="+ca), ErrAbsent)
	s.says("no file", s.look(at+"https://"+secure.Endpoint()+"&ca-file="+ca+"x"), "read certificates", ca+"x")
	s.must(os.WriteFile(ca, []byte("junk"), 0o600))
	s.says("no certificate", s.look(at+"https://"+secure.Endpoint()+"&ca-file="+ca),
		"holds no certificate in PEM form", ca)
}
