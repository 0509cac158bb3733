package bucket

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// issuer gives out credentials over HTTP, in the forms of web identity, of the role of a machine and of a container.
type issuer struct {
	*httptest.Server
	token string // that it wants

	mu          sync.Mutex
	key, secret string
	expires     time.Time
	down        bool
	asked       int
}

func newIssuer(s *site) *issuer {
	i := &issuer{token: "a token of this test", key: s.server.AccessKey, secret: s.server.SecretKey}
	i.expires = time.Now().Add(time.Hour)
	i.Server = httptest.NewServer(i)
	s.Cleanup(i.Close)
	return i
}

func (i *issuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.down:
		http.Error(w, "not now", http.StatusServiceUnavailable)
	case r.Method == http.MethodPut:
		_, _ = io.WriteString(w, "session")
	case r.Method == http.MethodPost:
		if r.FormValue("WebIdentityToken") != i.token || r.FormValue("RoleArn") != "arn:aws:iam::1:role/kiln" {
			http.Error(w, "who is that", http.StatusForbidden)
			return
		}
		i.asked++
		fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
			<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>%s</AccessKeyId><SecretAccessKey>%s</SecretAccessKey>
			<Expiration>%s</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`,
			i.key, i.secret, i.expires.UTC().Format(time.RFC3339))
	case strings.HasSuffix(r.URL.Path, "/security-credentials/"):
		_, _ = io.WriteString(w, "kiln\n")
	default:
		if r.Header.Get("Authorization") != i.token && r.Header.Get("X-Aws-Ec2-Metadata-Token") != "session" {
			http.Error(w, "who is that", http.StatusForbidden)
			return
		}
		i.asked++
		_ = json.NewEncoder(w).Encode(map[string]any{ // what breaks here breaks the test
			"Code": "Success", "AccessKeyId": i.key, "SecretAccessKey": i.secret, "Expiration": i.expires.UTC(),
		})
	}
}

func (i *issuer) change(do func(i *issuer)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	do(i)
}

func (i *issuer) count() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.asked
}

// webIdentity makes the issuer the place where credentials come from.
func webIdentity(s *site, i *issuer) {
	token := filepath.Join(s.TempDir(), "token")
	s.must(os.WriteFile(token, []byte(i.token), 0o600))
	s.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", token)
	s.Setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/kiln")
	s.Setenv("AWS_ENDPOINT_URL_STS", i.URL)
}

// TestSources: credentials are found everywhere where they may be.
func TestSources(t *testing.T) {
	for name, set := range map[string]func(s *site, i *issuer){
		"environment": func(s *site, i *issuer) {
			s.Setenv("AWS_ACCESS_KEY_ID", i.key)
			s.Setenv("AWS_SECRET_ACCESS_KEY", i.secret)
		},
		"file": func(s *site, i *issuer) {
			path := filepath.Join(s.TempDir(), "credentials")
			s.must(os.WriteFile(path, fmt.Appendf(nil, "[default]\naws_access_key_id = x\naws_secret_access_key = y\n\n"+
				"[models]\naws_access_key_id = %s\naws_secret_access_key = %s\n", i.key, i.secret), 0o600))
			s.Setenv("AWS_SHARED_CREDENTIALS_FILE", path)
			s.Setenv("AWS_PROFILE", "models")
		},
		"web identity": webIdentity,
		"container": func(s *site, i *issuer) {
			s.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", i.URL+"/role")
			s.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", i.token)
		},
		"machine": func(s *site, i *issuer) {
			s.Setenv("AWS_EC2_METADATA_DISABLED", "")
			s.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", i.URL+"/")
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			i := newIssuer(s)
			alone(t)
			set(s, i)
			s.want("look", s.look(s.url("")), ErrAbsent)
		})
	}
}

// TestNoCredentials: a newcomer without any is told so, and the server is not asked.
func TestNoCredentials(t *testing.T) {
	s := newSite(t)
	alone(t)
	s.says("none", s.look(s.url("")), "s3://"+s.bucket+"/p: no credentials were found: set AWS_ACCESS_KEY_ID")

	t.Setenv("AWS_ACCESS_KEY_ID", "half")
	s.says("half", s.look(s.url("")), "no credentials were found")
	t.Setenv("AWS_ACCESS_KEY_ID", "")

	path := filepath.Join(t.TempDir(), "credentials")
	profile := "[default]\naws_access_key_id = x\naws_secret_access_key = " + wrongSecret + "\n"
	s.must(os.WriteFile(path, []byte(profile), 0o600))
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", path)
	t.Setenv("AWS_PROFILE", "models")
	s.says("no such profile", s.look(s.url("")), "no credentials were found", "credentials file: ", "models")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", path+"-none")

	t.Setenv("AWS_EC2_METADATA_DISABLED", "")
	l, err := net.Listen("tcp", "127.0.0.1:0") // which never answers
	s.must(err)
	defer l.Close()
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://"+l.Addr().String())
	s.says("silent machine", s.look(s.url("")), "no credentials were found", "role of the machine: ", "Timeout")
	s.must(l.Close())
	s.says("no machine", s.look(s.url("")), "no credentials were found", "connection refused")

	i := newIssuer(s)
	webIdentity(s, i)
	i.token = "another"
	s.says("not that identity", s.look(s.url("")), "no credentials were found", "web identity: ")
	if n := s.proxy.Count(); n != 0 {
		t.Errorf("the server was asked %d times", n)
	}
}

// TestRenewal: credentials are renewed when they have expired, by their own word or by the server's.
func TestRenewal(t *testing.T) {
	s := newSite(t)
	i := newIssuer(s)
	alone(t)
	webIdentity(s, i)
	b := s.dial(s.url("&region="+s.server.Region), Options{})
	get := func() error { _, err := b.Get(s.ctx, b.Key("x"), 1, nil); return err }
	for range 3 {
		s.want("get", get(), ErrAbsent)
	}
	if n := i.count(); n != 1 {
		t.Errorf("credentials were asked for %d times, want once", n)
	}

	for asked, code := range []string{"ExpiredToken", "ExpiredTokenException"} {
		s.proxy.On(tests3.First(1, tests3.Any), tests3.Answer(400, code))
		s.want("get with "+code, get(), ErrAbsent)
		if n := i.count(); n != asked+2 {
			t.Errorf("credentials were asked for %d times, want %d", n, asked+2)
		}
	}

	i.change(func(i *issuer) { i.down = true })
	s.proxy.On(tests3.First(1, tests3.Any), tests3.Answer(400, "ExpiredToken"))
	s.want("get with credentials that are good by their own word", get(), ErrAbsent)
	i.change(func(i *issuer) { i.down, i.expires = false, time.Now().Add(-time.Second) })
	s.proxy.On(tests3.First(1, tests3.Any), tests3.Answer(400, "ExpiredToken"))
	s.want("get", get(), ErrAbsent)
	before := i.count()
	s.want("get", get(), ErrAbsent)
	if n := i.count(); n != before+1 {
		t.Errorf("credentials that had expired were asked for %d times", n-before)
	}
	i.change(func(i *issuer) { i.down = true })
	err := get()
	s.want("get with credentials that have expired", err, blobstore.ErrUnavailable)
	s.says("get with credentials that have expired", err, "renewing them from the web identity failed")
	i.change(func(i *issuer) { i.down, i.expires = false, time.Now().Add(time.Hour) })
	s.want("get", get(), ErrAbsent)
}

// TestExpiredForGood: credentials that can't be renewed end in words, after some tries.
func TestExpiredForGood(t *testing.T) {
	s := newSite(t)
	s.proxy.On(tests3.Any, tests3.Answer(400, "ExpiredToken"))
	err := s.look(s.url("&region=" + s.server.Region))
	s.says("look", err, "does not know these credentials (ExpiredToken")
	if errors.Is(err, blobstore.ErrUnavailable) || s.proxy.Count() != Attempts {
		t.Errorf("%v after %d requests", err, s.proxy.Count())
	}
}
