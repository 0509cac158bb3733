package bucket

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

func TestMain(m *testing.M) {
	minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, 8*time.Millisecond
	tests3.Main(m)
}

// site is an empty bucket with a proxy before it.
type site struct {
	*testing.T
	ctx    context.Context
	server *tests3.Server
	proxy  *tests3.Proxy
	bucket string
}

// newSite changes the environment, so that its test can't be parallel to others.
func newSite(t *testing.T) *site {
	t.Helper()
	server := tests3.Shared(t)
	alone(t)
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	return &site{t, t.Context(), server, tests3.NewProxy(t, server.Endpoint()), server.Bucket(t)}
}

// alone leaves the environment without credentials and without places where some might be.
func alone(t *testing.T) {
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if strings.HasPrefix(name, "AWS_") || strings.HasPrefix(name, "MINIO_") {
			t.Setenv(name, "")
		}
	}
	none := filepath.Join(t.TempDir(), "none")
	for name, value := range map[string]string{
		"HOME": none, "AWS_SHARED_CREDENTIALS_FILE": none, "AWS_CONFIG_FILE": none, "AWS_EC2_METADATA_DISABLED": "true",
	} {
		t.Setenv(name, value)
	}
}

// url is that of the bucket, through the proxy, with more parameters.
func (s *site) url(more string) string {
	return "s3://" + s.bucket + "/p?addressing=path&endpoint=http://" + s.proxy.Endpoint() + more
}

func (s *site) dial(url string, o Options) *Bucket {
	s.Helper()
	b, err := try(url, o)
	s.must(err)
	return b
}

func try(url string, o Options) (*Bucket, error) {
	c, err := Parse(url)
	if err != nil {
		return nil, err
	}
	o.Pause = cmp.Or(o.Pause, time.Millisecond)
	return Dial(c, o)
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *site) want(what string, err, want error) {
	s.Helper()
	if !errors.Is(err, want) {
		s.Errorf("%s: error %v, want %v", what, err, want)
	}
}

// says checks the words of an error, and that they give no secret away.
func (s *site) says(what string, err error, words ...string) {
	s.Helper()
	if err == nil {
		s.Errorf("%s: no error", what)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			s.Errorf("%s: %q does not say %q", what, err, w)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		s.Errorf("%s: more than one line: %q", what, err)
	}
	for _, secret := range []string{s.server.SecretKey, os.Getenv("AWS_SECRET_ACCESS_KEY"), wrongSecret} {
		if secret != "" && strings.Contains(err.Error(), secret) {
			s.Errorf("%s: a secret is in %q", what, err)
		}
	}
}

const wrongSecret = "wrongwrongwrongwrong"
