package redirect_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/redirect"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

func TestMain(m *testing.M) { tests3.Main(m) }

// site is a registry on a real bucket, which clients reach through a proxy and the registry does not.
type site struct {
	*testing.T
	store *s3store.Store
	reg   *registry.Registry
	proxy *tests3.Proxy
	url   string
	log   bytes.Buffer
}

func newSite(t *testing.T, rules redirect.Rules, with ...func(*registry.Config)) *site {
	t.Helper()
	s3 := tests3.Shared(t)
	t.Setenv("AWS_ACCESS_KEY_ID", s3.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3.SecretKey)
	s := &site{T: t, proxy: tests3.NewProxy(t, s3.Endpoint())}
	place, err := s3store.Parse(fmt.Sprintf("s3://%s/p?addressing=path&region=%s&endpoint=http://%s&public=http://%s",
		s3.Bucket(t), s3.Region, s3.Endpoint(), s.proxy.Endpoint()))
	s.must(err)
	s.must(s3store.Init(t.Context(), place))
	s.store, err = s3store.Open(t.Context(), place, s3store.Options{})
	s.must(err)
	t.Cleanup(func() { s.store.Close() })
	kv, err := new(memkv.Disk).Open(1)
	s.must(err)
	ix, err := index.New(t.Context(), kv)
	s.must(err)
	c := registry.Config{
		Store: s.store, Refs: s.store, Uploads: s.store, Index: ix, Access: access.Open(), Redirect: &rules,
		Log: slog.New(slog.NewJSONHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range with {
		f(&c)
	}
	r, err := registry.New(c)
	s.must(err)
	s.must(r.Replay(t.Context()))
	s.reg = r
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// ask makes one request and follows nothing.
func (s *site) ask(method, url string, body []byte, header ...string) (*http.Response, []byte) {
	s.Helper()
	req, err := http.NewRequestWithContext(s.Context(), method, url, bytes.NewReader(body))
	s.must(err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	s.must(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	s.must(err)
	return resp, b
}

func (s *site) push(b []byte) (path string) {
	s.Helper()
	d := identity.Sum(b)
	resp, text := s.ask("POST", s.url+api.PathUploads("m")+"?digest="+d.String(), b)
	if resp.StatusCode != http.StatusCreated {
		s.Fatalf("push: %d %s", resp.StatusCode, text)
	}
	return s.url + api.PathBlob("m", d)
}

func (s *site) status(want int, method, url string, header ...string) *http.Response {
	s.Helper()
	resp, b := s.ask(method, url, nil, header...)
	if resp.StatusCode != want {
		s.Fatalf("%s: %d, want %d: %.100q", method, resp.StatusCode, want, b)
	}
	return resp
}

var (
	all  = redirect.Rules{TTL: 30 * time.Minute, MinSize: 16}
	blob = []byte("the bytes of a blob that is large enough to be sent on")
)

// TestSentOn: whole blobs and ranges come from the bucket by one URL, which is in no log.
func TestSentOn(t *testing.T) {
	s := newSite(t, all)
	path := s.push(blob)
	before := s.proxy.Count()
	first := s.status(307, "GET", path)
	to := first.Header.Get("Location")
	if !strings.HasPrefix(to, "http://"+s.proxy.Endpoint()+"/") || s.proxy.Count() != before {
		t.Fatalf("sent on to %.40s, %d requests", to, s.proxy.Count()-before)
	}
	second, body := s.ask("GET", path, nil, "Range", "bytes=4-8")
	h := second.Header
	if second.StatusCode != 307 || h.Get("Location") != to || h.Get("Content-Range")+h.Get("Accept-Ranges") != "" ||
		h.Get("Referrer-Policy") != "no-referrer" || h.Get(api.HeaderContentDigest) != identity.Sum(blob).String() ||
		strings.Contains(string(body), "http") || len(body) > 100 {
		t.Errorf("%d %v %q", second.StatusCode, h, body)
	}
	age := 0
	if _, err := fmt.Sscanf(h.Get("Cache-Control"), "private, max-age=%d", &age); err != nil || age > 1800 || age < 1700 {
		t.Errorf("Cache-Control: %s", h.Get("Cache-Control"))
	}
	whole, got := s.ask("GET", to, nil)
	part, some := s.ask("GET", to, nil, "Range", "bytes=4-8")
	if whole.StatusCode != 200 || !bytes.Equal(got, blob) || part.StatusCode != 206 || string(some) != string(blob[4:9]) ||
		whole.Header.Get("Content-Type") != "application/octet-stream" ||
		part.Header.Get("Content-Range") != fmt.Sprintf("bytes 4-8/%d", len(blob)) {
		t.Errorf("%d %q %v, %d %q %v", whole.StatusCode, got, whole.Header, part.StatusCode, some, part.Header)
	}
	other := strings.Replace(to, identity.Sum(blob).Hex()[:8], "00000000", 1)
	if resp, _ := s.ask("GET", other, nil); resp.StatusCode < 400 {
		t.Errorf("another key: %d", resp.StatusCode)
	}
	if resp, _ := s.ask("PUT", to, blob); resp.StatusCode < 400 {
		t.Errorf("a write by the link: %d", resp.StatusCode)
	}
	if text := s.log.String(); !strings.Contains(text, `"status":307`) || strings.Contains(text, "X-Amz") {
		t.Errorf("log: %.300s", text)
	}
	if l := fmt.Sprintf("%v %+v %#v %s %q", blobstore.Link{URL: to}, blobstore.Link{URL: to}, blobstore.Link{URL: to},
		blobstore.Link{URL: to}, blobstore.Link{URL: to}); strings.Contains(l, "http") {
		t.Error("a printed link says its URL")
	}
}

// TestOras: an unmodified client follows by itself.
func TestOras(t *testing.T) {
	s := newSite(t, all)
	s.push(blob)
	file := filepath.Join(t.TempDir(), "blob")
	cmd := exec.CommandContext(t.Context(), filepath.Join(testenv.Root(t), ".tools/bin/oras"), "blob", "fetch",
		"--plain-http", "--output", file, strings.TrimPrefix(s.url, "http://")+"/m@"+identity.Sum(blob).String())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, blob) || s.proxy.Count(tests3.GetObject) == 0 {
		t.Errorf("%q, %v, %d reads of the bucket", got, err, s.proxy.Count(tests3.GetObject))
	}
}

// TestNotSentOn: who asks otherwise, or for something else, gets the answer of the registry.
func TestNotSentOn(t *testing.T) {
	s := newSite(t, all)
	path, small := s.push(blob), s.push([]byte("small"))
	s.status(200, "HEAD", path)
	s.status(200, "GET", small)
	s.status(200, "GET", path, api.HeaderRedirect, api.RedirectOff)
	s.status(206, "GET", path, api.HeaderRedirect, api.RedirectOff, "Range", "bytes=1-2")
	s.status(416, "GET", path, "Range", "bytes=1000-")
	s.status(304, "GET", path, "If-None-Match", `"`+identity.Sum(blob).String()+`"`)
	i, err := s.store.Stat(t.Context(), identity.Sum(blob))
	s.must(err)
	s.status(307, "GET", path)
	s.must(s.store.SetAside(t.Context(), i, "a test"))
	s.status(404, "GET", path) // though a link is kept

	far := all
	far.Networks = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	s = newSite(t, far)
	s.status(200, "GET", s.push(blob), "X-Forwarded-For", "10.1.1.1")
	far.Networks = append(far.Networks, netip.MustParsePrefix("127.0.0.0/8"))
	s = newSite(t, far)
	s.status(307, "GET", s.push(blob))

	s = newSite(t, all, func(c *registry.Config) { c.VerifyReads = true })
	path = s.push(blob)
	s.status(200, "GET", path)
	s.status(307, "GET", path, "Range", "bytes=1-2")
}

// TestCollected: what nobody refers to stays until the last link to it has ended, and after a start until none of an
// earlier process can serve.
func TestCollected(t *testing.T) {
	now := time.Now().Add(time.Second - all.TTL - redirect.Skew) // so that the link is given by the store's clock
	s := newSite(t, all, func(c *registry.Config) {
		c.Clock, c.Lease = func() time.Time { return now }, time.Minute
	})
	other := []byte("another blob that nobody asks for")
	s.push(blob)
	s.push(other)
	collected := func(want int64) {
		t.Helper()
		did, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
		if err != nil || did.Removed.Blobs != want {
			t.Errorf("%v: %+v, want %d removed", err, did, want)
		}
	}
	now = now.Add(all.TTL + redirect.Skew - time.Second)
	collected(0)
	linked, alone := s.push(blob), s.push(other) // visible again
	s.status(307, "GET", linked)
	now = now.Add(2 * time.Minute) // the leases are over
	collected(1)
	s.status(404, "HEAD", alone)
	now = now.Add(all.TTL + redirect.Skew)
	collected(1)
}

// TestClient: the project's client asks the registry once for all ranges of a blob, and goes on through it where the
// bucket can't be read by links.
func TestClient(t *testing.T) {
	s := newSite(t, all)
	s.push(blob)
	c, err := client.New(strings.TrimPrefix(s.url, "http://"), client.Options{Token: "secret"})
	s.must(err)
	t.Cleanup(c.Close)
	read := func() {
		t.Helper()
		for off := range int64(len(blob)) {
			body, err := c.Blob(t.Context(), "m", identity.Sum(blob), off, 1, int64(len(blob)))
			s.must(err)
			got, err := io.ReadAll(body)
			body.Close()
			if err != nil || string(got) != string(blob[off:off+1]) {
				t.Fatalf("byte %d: %q, %v", off, got, err)
			}
		}
	}
	read()
	if n := strings.Count(s.log.String(), `"status":307`); n != 1 || s.proxy.Count(tests3.GetObject) != len(blob) {
		t.Errorf("%d redirects, %d reads of the bucket", n, s.proxy.Count(tests3.GetObject))
	}
	s.proxy.On(tests3.Any, tests3.Answer(403, "RequestTimeTooSkewed"))
	read()
	if n := s.proxy.Count(tests3.GetObject) - len(blob); n != 2 {
		t.Errorf("the bucket was asked %d more times, want once by each link", n)
	}
}
