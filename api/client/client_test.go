package client

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dial returns a client of a server that answers with h.
func dial(t *testing.T, h http.HandlerFunc, o Options) *Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return dialURL(t, srv.URL, o)
}

func dialURL(t *testing.T, url string, o Options) *Client {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	_, host, _ := strings.Cut(url, "://")
	c, err := New(host, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestParseReference(t *testing.T) {
	ab := identity.Digest(bytes.Repeat([]byte{0xab}, 32))
	digest := "sha256:" + strings.Repeat("ab", 32)
	for s, want := range map[string]Reference{
		"localhost/a":                              {Host: "localhost", Repo: "a"},
		"127.0.0.1:5000/team/model:v1":             {Host: "127.0.0.1:5000", Repo: "team/model", Tag: "v1"},
		"[::1]:5000/m:x":                           {Host: "[::1]:5000", Repo: "m", Tag: "x"},
		"registry.example/a/b@" + digest:           {Host: "registry.example", Repo: "a/b", Digest: ab},
		"registry.example:80/a__b/c-d:T@" + digest: {Host: "registry.example:80", Repo: "a__b/c-d", Tag: "T", Digest: ab},
	} {
		got, err := ParseReference(s)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
		if got.String() != s {
			t.Errorf("%s: written back as %s", s, got)
		}
	}
	for _, s := range []string{
		"", "/", "a", "team/model:v1", "localhost", "localhost/", "localhost/A", "localhost/a:", "localhost/a:b:c", ":5000/a",
		"localhost:/a", "localhost/a//b", "localhost/a/../b", "localhost/a@", "localhost/a@sha256:ab", "http://localhost/a",
		"localhost/a@sha512:" + strings.Repeat("ab", 64), "localhost/" + strings.Repeat("a", 256), "localhost/a b", "a.b?c/d",
		"localhost/a@sha256:" + strings.Repeat("0", 64),
	} {
		if r, err := ParseReference(s); err == nil {
			t.Errorf("%q was read as %+v", s, r)
		}
	}
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1": true, "127.8.9.1:1": true, "[::1]": true, "[::1]:5000": true,
		"localhost.example": false, "128.0.0.1": false, "registry.example:5000": false, "[::2]:5000": false, "0.0.0.0:5000": false,
	} {
		if Loopback(host) != want {
			t.Errorf("Loopback(%q) = %t", host, !want)
		}
	}
}

var (
	content = []byte("0123456789abcdef")
	digest  = identity.Sum(content)
)

func TestBlob(t *testing.T) {
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.PathBlob("team/m", digest) || r.Header.Get("Accept-Encoding") != "identity" {
			t.Errorf("%s with Accept-Encoding %q", r.URL.Path, r.Header.Get("Accept-Encoding"))
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}, Options{})
	for _, span := range [][2]int64{{0, 16}, {0, 1}, {3, 5}, {15, 1}} {
		body, err := c.Blob(t.Context(), "team/m", digest, span[0], span[1], 16)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(body)
		if want := content[span[0] : span[0]+span[1]]; err != nil || !bytes.Equal(got, want) {
			t.Errorf("%v: got %q, %v, want %q", span, got, err, want)
		}
		body.Close()
	}
	if n, err := c.StatBlob(t.Context(), "team/m", digest); n != 16 || err != nil {
		t.Errorf("StatBlob: %d, %v", n, err)
	}
	for _, bad := range [][3]int64{{0, 0, 16}, {-1, 2, 16}, {0, 17, 16}, {16, 1, 16}} {
		if _, err := c.Blob(t.Context(), "team/m", digest, bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%v was asked for", bad)
		}
	}
}

// TestBlobRefused gives answers that look like success and are not the blob.
func TestBlobRefused(t *testing.T) {
	page := []byte("<html>try again later</html>")
	for name, test := range map[string]struct {
		answer   func(w http.ResponseWriter, r *http.Request)
		off, n   int64
		want     error
		mentions string
	}{
		"page instead of the blob": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.Write(page)
		}, 0, 16, ErrNotBlob, "text/html"},
		"page of unknown length": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.(http.Flusher).Flush()
			w.Write(page)
		}, 0, 16, ErrNotBlob, "answered 200"},
		"packed by a proxy": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(content)
		}, 0, 16, ErrNotBlob, `"gzip"`},
		"other length": {func(w http.ResponseWriter, _ *http.Request) {
			w.Write(content[:15])
		}, 0, 16, ErrNotBlob, "15 bytes, want 16"},
		"whole blob for a part": {func(w http.ResponseWriter, _ *http.Request) {
			w.Write(content)
		}, 4, 8, ErrRangeIgnored, ""},
		"other part": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 0-7/16")
			w.WriteHeader(http.StatusPartialContent)
			w.Write(content[:8])
		}, 4, 8, ErrNotBlob, "bytes 0-7/16"},
		"part of another blob": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 4-11/32")
			w.WriteHeader(http.StatusPartialContent)
			w.Write(content[:8])
		}, 4, 8, ErrNotBlob, "bytes 4-11/32"},
		"longer than announced to be": {func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			w.Write(append(content, 'x'))
		}, 0, 16, ErrNotBlob, "longer than 16"},
		"ends early": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "16")
			w.Write(content[:9])
		}, 0, 16, io.ErrUnexpectedEOF, ""},
		"ends early, length unknown": {func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			w.Write(content[:9])
		}, 0, 16, io.ErrUnexpectedEOF, "9 of 16"},
		"not there": {func(w http.ResponseWriter, r *http.Request) {
			http.NotFound(w, r)
		}, 0, 16, api.ErrBlobUnknown, "404"},
	} {
		c := dial(t, test.answer, Options{})
		body, err := c.Blob(t.Context(), "m", digest, test.off, test.n, 16)
		if err == nil {
			_, err = io.ReadAll(body)
			body.Close()
		}
		if !errors.Is(err, test.want) || !strings.Contains(fmt.Sprint(err), test.mentions) {
			t.Errorf("%s: got %v, want %v mentioning %q", name, err, test.want, test.mentions)
		}
	}
}

func TestManifest(t *testing.T) {
	doc := []byte(`{"schemaVersion":2}`)
	for name, test := range map[string]struct {
		ref    string
		header map[string]string
		body   []byte
		want   error
	}{
		"by tag":             {"v1", map[string]string{"Docker-Content-Digest": identity.Sum(doc).String()}, doc, nil},
		"by digest":          {identity.Sum(doc).String(), nil, doc, nil},
		"wrong header":       {"v1", map[string]string{"Docker-Content-Digest": digest.String()}, doc, ErrMismatch},
		"wrong bytes":        {digest.String(), map[string]string{"Docker-Content-Digest": digest.String()}, doc, ErrMismatch},
		"page":               {"v1", map[string]string{"Content-Type": "text/html"}, doc, ErrNotBlob},
		"packed":             {"v1", map[string]string{"Content-Encoding": "br"}, doc, ErrNotBlob},
		"larger than may be": {"v1", nil, bytes.Repeat([]byte(" "), api.MaxManifestBytes+1), ErrNotBlob},
	} {
		c := dial(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			for k, v := range test.header {
				w.Header().Set(k, v)
			}
			w.Write(test.body)
		}, Options{})
		m, err := c.Manifest(t.Context(), "m", test.ref)
		if !errors.Is(err, test.want) {
			t.Errorf("%s: got %v, want %v", name, err, test.want)
		}
		if test.want == nil && (!bytes.Equal(m.Bytes, doc) || m.Digest != identity.Sum(doc)) {
			t.Errorf("%s: got %q as %s", name, m.Bytes, m.Digest)
		}
	}
}

// TestMidstatesRefused: midstates come from the registry itself, in one form and of bounded length.
func TestMidstatesRefused(t *testing.T) {
	elsewhere := quiet(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.MediaTypeMidstates)
		w.Write([]byte("forged"))
	}))
	elsewhere.Start()
	defer elsewhere.Close()
	for name, test := range map[string]struct {
		answer func(w http.ResponseWriter)
		want   error
	}{
		"whatever bytes": {func(w http.ResponseWriter) { w.Write([]byte("x")) }, nil},
		"cut": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "10")
			w.Write([]byte("x"))
		}, io.ErrUnexpectedEOF},
		"another type": {func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/plain") }, ErrNotBlob},
		"no such route": {func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
			api.ErrMidstatesUnknown},
		"elsewhere": {func(w http.ResponseWriter) {
			w.Header().Set("Location", elsewhere.URL)
			w.WriteHeader(http.StatusTemporaryRedirect)
		}, ErrNotBlob},
	} {
		c := dial(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", api.MediaTypeMidstates)
			test.answer(w)
		}, Options{})
		form, err := c.Midstates(t.Context(), digest, 1<<10)
		if !errors.Is(err, test.want) || (err == nil) != (string(form) == "x") {
			t.Errorf("%s: %.20q, %v, want %v", name, form, err, test.want)
		}
	}
}

// TestMidstatesLength: midstates are as long as the size of the blob allows, and not read further.
func TestMidstatesLength(t *testing.T) {
	const most = 1 << 10
	for n, want := range map[int]error{most: nil, most + 1: ErrNotBlob} {
		c := dial(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", api.MediaTypeMidstates)
			w.Write(make([]byte, n))
		}, Options{})
		if form, err := c.Midstates(t.Context(), digest, most); !errors.Is(err, want) || err == nil && len(form) != n {
			t.Errorf("%d bytes: got %d, %v", n, len(form), err)
		}
	}
}

func TestErrorBody(t *testing.T) {
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"errors":[{"code":"NAME_UNKNOWN","message":"no \u001b[31m\u009b\u202esuch\nthing"}]}`)
	}, Options{})
	_, err := c.Manifest(t.Context(), "m", "v1")
	if !errors.Is(err, api.ErrNameUnknown) || errors.Is(err, api.ErrManifestUnknown) {
		t.Errorf("the registry's code is lost: %v", err)
	}
	if s := err.Error(); !strings.Contains(s, "404") || !strings.HasSuffix(s, `no \u001b[31m\u009b\u202esuch thing`) {
		t.Errorf("message %q", s)
	}
}

func TestToken(t *testing.T) {
	t.Setenv("KILN_TOKEN", "from-environment")
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	os.WriteFile(file, []byte("from-file\n"), 0o600)
	var got string
	handler := func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		w.Header().Set("Content-Length", "1")
	}
	for want, o := range map[string]Options{
		"Bearer from-environment": {}, "Bearer from-file": {TokenFile: file}, "Bearer given": {Token: "given", TokenFile: file},
	} {
		if _, err := dial(t, handler, o).StatBlob(t.Context(), "m", digest); err != nil || got != want {
			t.Errorf("sent %q, want %q (%v)", got, want, err)
		}
	}
	os.WriteFile(file, []byte("two tokens"), 0o600)
	for _, o := range []Options{{TokenFile: file}, {TokenFile: filepath.Join(dir, "none")}, {CAFile: file}, {CAFile: dir}} {
		if _, err := New("localhost", o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

// TestTokenStaysHome redirects a read to another origin: the link is followed, the token is not sent along.
func TestTokenStaysHome(t *testing.T) {
	var leaked []string
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		leaked = append(leaked, r.Header["Authorization"]...)
		w.Write(content)
	}))
	defer elsewhere.Close()
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere.URL+"/signed", http.StatusTemporaryRedirect)
	}, Options{Token: "secret"})
	body, err := c.Blob(t.Context(), "m", digest, 0, 16, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if got, err := io.ReadAll(body); err != nil || !bytes.Equal(got, content) || len(leaked) > 0 {
		t.Errorf("got %q, %v; sent along: %q", got, err, leaked)
	}
	if _, err := c.CreateUpload(t.Context(), "m", digest, 16); err == nil || len(leaked) > 0 {
		t.Errorf("a write followed a redirect: %v, sent along: %q", err, leaked)
	}
	if _, err := c.Health(t.Context(), elsewhere.URL+"/health"); err == nil || len(leaked) > 0 {
		t.Errorf("health of another host: %v, sent along: %q", err, leaked)
	}
}

// TestAnonymous: a client that is told to give no name gives none, even if it is asked for one.
func TestAnonymous(t *testing.T) {
	var sent []string
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.Header.Get("Authorization"))
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
	}, Options{Anonymous: true, Token: "secret", TokenFile: "none"})
	config := fmt.Sprintf(`{"auths":{%q:{"auth":"YTpi"}}}`, c.Host())
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := c.Health(t.Context(), "/health")
	if !errors.Is(err, api.ErrUnauthorized) || len(sent) == 0 || strings.Join(sent, "") != "" {
		t.Errorf("sent %q, %v", sent, err)
	}
}

// TestExpiredLink answers like the target of a presigned link that has run out: the next call asks the registry anew.
func TestExpiredLink(t *testing.T) {
	links := 0
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("signature") == "1" {
			http.Error(w, "expired", http.StatusForbidden)
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	defer elsewhere.Close()
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		links++
		http.Redirect(w, r, fmt.Sprintf("%s/b?signature=%d", elsewhere.URL, links), http.StatusTemporaryRedirect)
	}, Options{Backoff: time.Millisecond})
	var got []byte
	err := c.Retry(t.Context(), "blob", func() error {
		body, err := c.Blob(t.Context(), "m", digest, 4, 8, 16)
		if err != nil {
			if strings.Contains(err.Error(), "signature") || !strings.Contains(err.Error(), "403") {
				t.Errorf("message %q", err)
			}
			return err
		}
		defer body.Close()
		got, err = io.ReadAll(body)
		return err
	})
	if err != nil || !bytes.Equal(got, content[4:12]) || links != 2 {
		t.Errorf("got %q, %v after %d links", got, err, links)
	}
}

// quiet is a server that is not started and does not log what its clients do wrong.
func quiet(h http.Handler) *httptest.Server {
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	return srv
}

func TestTLS(t *testing.T) {
	srv := quiet(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			http.Redirect(w, r, "http://"+r.Host+"/plain", http.StatusFound)
			return
		}
		fmt.Fprint(w, r.Proto)
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600)
	c := dialURL(t, srv.URL, Options{CAFile: ca})
	c.base.Scheme = "https" // loopback is plain HTTP by rule
	resp, err := c.do(t.Context(), call{method: http.MethodGet, path: "/"}, http.StatusOK)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(b) != "HTTP/1.1" {
		t.Errorf("spoke %s", b)
	}
	if _, err := c.Health(t.Context(), "/health"); err == nil || !strings.Contains(err.Error(), "plain HTTP") {
		t.Errorf("redirect to plain HTTP: %v", err)
	}
	untrusting := dialURL(t, srv.URL, Options{})
	untrusting.base.Scheme = "https"
	if _, err := untrusting.StatBlob(t.Context(), "m", digest); err == nil || Temporary(err) {
		t.Errorf("unknown certificate: %v", err)
	}
}

// TestDockerLogin logs in with what docker login has kept, over a basic and a bearer challenge.
func TestDockerLogin(t *testing.T) {
	var srv *httptest.Server
	scheme := "Basic"
	srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		basic := user == "ada" && password == "pw"
		switch {
		case r.URL.Path == "/token" && basic && r.URL.Query().Get("scope") == "repository:m:pull":
			io.WriteString(w, `{"token":"short-lived"}`)
		case scheme == "Basic" && basic, scheme == "Bearer" && r.Header.Get("Authorization") == "Bearer short-lived":
			w.Header().Set("Content-Length", "16")
		case scheme == "Basic":
			w.Header().Set("WWW-Authenticate", `Basic realm="kiln"`)
			w.WriteHeader(http.StatusUnauthorized)
		default:
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+srv.URL+`/token",service="kiln"`)
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	defer srv.Close()
	config := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, strings.TrimPrefix(srv.URL, "http://"),
		base64.StdEncoding.EncodeToString([]byte("ada:pw")))
	for _, scheme = range []string{"Basic", "Bearer"} {
		c := dialURL(t, srv.URL, Options{})
		if _, err := c.StatBlob(t.Context(), "m", digest); !errors.Is(err, api.ErrUnauthorized) || Temporary(err) {
			t.Errorf("%s, not logged in: %v", scheme, err)
		}
		c = dialURL(t, srv.URL, Options{})
		if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := c.StatBlob(t.Context(), "m", digest); err != nil || n != 16 {
			t.Errorf("%s: %d, %v", scheme, n, err)
		}
	}
}

func TestHealth(t *testing.T) {
	for body, good := range map[string]bool{
		`{"status":"ok","role":"registry","base_weight_identity":null,"unknown":[1]}`: true,
		`{"status":"ok","base_weight_identity":null,"note":{"Shard_Count":1}}`:        true,
		`{}`: false, `<html>`: false, ``: false, `[]`: false,
		`{"status":"ok","base_weight_identity":null,"base_weight_identity":null}`:  false,
		`{"status":"ok","Base_Weight_Identity":null}`:                              false,
		`{"status":"ok","note":{"a":1,"a":2}}`:                                     false,
		`{"status":"ok","base_weight_identity":{"shard_count":1,"shard_count":2}}`: false,
		`{"status":"ok","base_weight_identity":{"Shard_Count":2}}`:                 false,
		`{"status":"ok","base_weight_identity":{"shard_count":1.5}}`:               false,
	} {
		c := dial(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			io.WriteString(w, body)
		}, Options{})
		h, err := c.Health(t.Context(), "http://"+c.Host()+"/health")
		if good != (err == nil) || good && (h.Status != "ok" || h.BaseWeightIdentity != nil) {
			t.Errorf("%q: %+v, %v", body, h, err)
		}
	}
}

func TestUnreachable(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	c := dialURL(t, srv.URL, Options{Backoff: time.Millisecond})
	srv.Close()
	tries := 0
	err := c.Retry(context.Background(), "look", func() error {
		tries++
		_, err := c.StatBlob(context.Background(), "m", digest)
		return err
	})
	if tries != maxUnmet || !Temporary(err) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%d tries, %v", tries, err)
	}
}
