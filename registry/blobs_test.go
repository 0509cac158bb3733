package registry_test

import (
	"bytes"
	"crypto/sha512"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
)

func TestBlobHeadAndGetAgree(t *testing.T) { // RG-12
	s := newServer(t)
	body := []byte("0123456789")
	d := s.blob("a/b", body)
	m := s.manifest("a/b", nil, nil)
	if a := s.put("a/b", "v1", m); a.status != 201 {
		t.Fatal(a)
	}
	for path, want := range map[string][]byte{api.PathBlob("a/b", d): body, api.PathManifest("a/b", "v1"): m,
		api.PathManifest("a/b", identity.Sum(m).String()): m} {
		head, full := s.want(200, "HEAD", path, nil), s.want(200, "GET", path, nil)
		if len(head.body) != 0 || !bytes.Equal(full.body, want) {
			t.Errorf("%s: HEAD has %d bytes, GET %q", path, len(head.body), full.body)
		}
		for _, h := range []string{"Content-Length", "Content-Type", "Docker-Content-Digest", "ETag", "Accept-Ranges"} {
			if head.header.Get(h) != full.header.Get(h) {
				t.Errorf("%s: %s differs: %q, %q", path, h, head.header.Get(h), full.header.Get(h))
			}
		}
		if got := full.header.Get("Docker-Content-Digest"); got != identity.Sum(want).String() {
			t.Errorf("%s: digest %s", path, got)
		}
		if full.header.Get("Content-Encoding") != "" {
			t.Error("encoded")
		}
		if a := s.want(304, "GET", path, nil, "If-None-Match", full.header.Get("ETag")); len(a.body) != 0 {
			t.Error(a)
		}
	}
	zipped := s.want(200, "GET", api.PathBlob("a/b", d), nil, "Accept-Encoding", "gzip")
	if zipped.header.Get("Content-Encoding") != "" || !bytes.Equal(zipped.body, body) {
		t.Error("encoded when asked")
	}
}

func TestRanges(t *testing.T) { // RG-10, RG-11
	s := newServer(t)
	body := []byte("0123456789")
	path := api.PathBlob("a", s.blob("a", body))
	for spec, want := range map[string]string{
		"bytes=0-3": "206 0-3 0123", "bytes=2-": "206 2-9 23456789", "bytes=-3": "206 7-9 789", "bytes=8-100": "206 8-9 89",
		"bytes=-100": "206 0-9 0123456789", "Bytes = 1-1": "206 1-1 1", "bytes=0-99999999999999999999": "206 0-9 0123456789",
		"bytes=10-": "416", "bytes=10-20": "416", "bytes=-0": "416", "bytes=9-3": "416", "bytes=99999999999999999999-": "416",
		"bytes=0-1,5-6": "200", "bytes=": "200", "bytes=-": "200", "bytes=a-b": "200", "lines=0-1": "200", "bytes=1": "200",
		"bytes=+1-2": "200", "bytes=--1": "200", "": "200",
	} {
		a := s.do("GET", path, nil, "Range", spec)
		got := fmt.Sprint(a.status)
		switch a.status {
		case http.StatusPartialContent:
			r, total, _ := strings.Cut(strings.TrimPrefix(a.header.Get("Content-Range"), "bytes "), "/")
			if total != "10" {
				t.Errorf("%q: Content-Range %q", spec, a.header.Get("Content-Range"))
			}
			got += " " + r + " " + string(a.body)
		case http.StatusOK:
			if !bytes.Equal(a.body, body) {
				t.Errorf("%q: %q", spec, a.body)
			}
		case http.StatusRequestedRangeNotSatisfiable:
			if a.header.Get("Content-Range") != "bytes */10" || a.code() != api.CodeRangeInvalid {
				t.Errorf("%q: %v", spec, a)
			}
		}
		if got != want {
			t.Errorf("%q: got %q, want %q", spec, got, want)
		}
	}
	if a := s.do("GET", path, nil, "Range", "bytes=0-1", "If-Range", `"other"`); a.status != 200 {
		t.Error("a range of other content was followed", a)
	}
	if a := s.do("GET", api.PathBlob("a", s.blob("a", nil)), nil, "Range", "bytes=0-"); a.status != 416 {
		t.Error("a range of nothing:", a)
	}
}

func TestDigestTricks(t *testing.T) { // RG-14
	s := newServer(t)
	upper := "sha256:" + strings.ToUpper(identity.Sum(nil).Hex())
	for _, d := range []string{upper, "sha256:..", "sha256:", "sha512:" + strings.Repeat("ab", 64), "md5:abc",
		"sha256:" + strings.Repeat("a", 32<<10),
		"sha256%3A..%2F..", "sha256:" + strings.Repeat("a", 63) + "g"} {
		for _, path := range []string{"/v2/a/blobs/" + d, "/v2/a/referrers/" + d} {
			if a := s.do("GET", path, nil); a.status != 400 || a.code() != api.CodeDigestInvalid {
				t.Errorf("%.60s: %v", path, a)
			}
		}
	}
	for _, name := range []string{"A", "a..b", "-a", "a/_b"} {
		if a := s.do("GET", "/v2/"+name+"/tags/list", nil); a.status != 400 || a.code() != api.CodeNameInvalid {
			t.Errorf("%s: %v", name, a)
		}
	}
	d := s.blob("a/b", []byte("x"))
	if a := s.do("GET", "/v2/a%2Fb/blobs/sha256%3A"+d.Hex(), nil); a.status != 200 {
		t.Errorf("an escaped path: %v", a)
	}
}

// sha512 is refused by every route that takes a digest, with 400 and nothing else done: an upload that was to be closed
// by one can still be closed by its sha256.
func TestSHA512IsRefused(t *testing.T) {
	s := newServer(t)
	body := []byte("0123456789")
	d := fmt.Sprintf("sha512:%x", sha512.Sum512(body))
	at := s.begin("a")
	s.want(202, "PATCH", at, body)
	for _, q := range [][2]string{
		{"GET", "/v2/a/blobs/"}, {"HEAD", "/v2/a/blobs/"}, {"DELETE", "/v2/a/blobs/"}, {"GET", "/v2/a/referrers/"},
		{"GET", "/v2/a/manifests/"}, {"HEAD", "/v2/a/manifests/"}, {"DELETE", "/v2/a/manifests/"},
		{"PUT", "/v2/a/manifests/"}, {"PUT", at + "?digest="}, {"POST", api.PathUploads("a") + "?digest="},
		{"POST", api.PathUploads("a") + "?mount="}, {"POST", api.PathUploads("a") + "?from=b&mount="},
	} {
		if a := s.want(400, q[0], q[1]+d, nil); q[0] != "HEAD" && a.code() != api.CodeDigestInvalid {
			t.Errorf("%s %s: %v", q[0], q[1], a)
		}
	}
	layer := desc{"mediaType": api.MediaTypeDoc, "digest": d, "size": len(body)}
	if a := s.put("a", "v1", s.manifest("a", []desc{layer}, nil)); a.status != 400 || a.code() != api.CodeManifestInvalid {
		t.Error(a)
	}
	s.want(201, "PUT", at+"?digest="+identity.Sum(body).String(), nil)
}

func TestBlobOfAnotherRepository(t *testing.T) {
	s := newServer(t)
	d := s.blob("a", []byte("x"))
	if a := s.do("GET", api.PathBlob("b", d), nil); a.status != 404 || a.code() != api.CodeBlobUnknown {
		t.Fatal("a digest alone opened a blob:", a)
	}
	for _, q := range []string{"?mount=" + d.String() + "&from=a", "?mount=" + d.String()} {
		repo := fmt.Sprintf("c%d", len(q))
		a := s.want(201, "POST", api.PathUploads(repo)+q, nil)
		if a.header.Get("Location") != api.PathBlob(repo, d) || a.header.Get("Docker-Content-Digest") != d.String() {
			t.Fatal(a)
		}
		s.want(200, "GET", api.PathBlob(repo, d), nil)
	}
	// What can't be mounted opens an upload.
	missing := identity.Sum([]byte("never"))
	for _, q := range []string{"?mount=" + missing.String() + "&from=a", "?mount=" + d.String() + "&from=none",
		"?mount=" + missing.String(),
		"?mount=" + d.String() + "&from=No/Name"} {
		if a := s.want(202, "POST", api.PathUploads("e")+q, nil); a.header.Get("Location") == "" {
			t.Fatal(a)
		}
	}
	if a := s.want(400, "POST", api.PathUploads("e")+"?mount=sha256:x", nil); a.code() != api.CodeDigestInvalid {
		t.Fatal(a)
	}
}

func TestDeleteBlob(t *testing.T) {
	s := newServer(t)
	s.want(404, "DELETE", api.PathBlob("a", identity.Sum([]byte("x"))), nil)
	d := s.blob("a", []byte("x"))
	s.blob("b", []byte("x"))
	s.want(202, "DELETE", api.PathBlob("a", d), nil)
	s.want(404, "HEAD", api.PathBlob("a", d), nil)
	s.want(200, "GET", api.PathBlob("b", d), nil)
	l := s.layer("a", api.MediaTypeDoc, "README.md", []byte("y"))
	m := s.manifest("a", []desc{l}, nil)
	if a := s.put("a", "v1", m); a.status != 201 {
		t.Fatal(a)
	}
	y := identity.Sum([]byte("y"))
	if a := s.want(409, "DELETE", api.PathBlob("a", y), nil); a.code() != api.CodeBlobReferred {
		t.Fatal(a)
	}
	s.want(202, "DELETE", api.PathManifest("a", identity.Sum(m).String()), nil)
	s.want(202, "DELETE", api.PathBlob("a", y), nil)
	s.want(404, "GET", api.PathBlob("a", y), nil)
}

func TestUnknownRoutes(t *testing.T) {
	s := newServer(t)
	for _, path := range []string{"/", "/v2", "/v1/", "/v2/a/other/x", "//health", "/v2/../health"} {
		if a := s.do("GET", path, nil); a.status != 404 || a.code() != api.CodeRouteUnknown {
			t.Errorf("%s: %v", path, a)
		}
	}
	a := s.want(405, "POST", api.PathManifest("a", "v1"), nil)
	if a.code() != api.CodeUnsupported || a.header.Get("Allow") != "GET, HEAD, PUT, DELETE" {
		t.Error(a)
	}
}

// damage changes a byte of a stored blob.
func (s *server) damage(d identity.Digest, at int) {
	s.t.Helper()
	path := filepath.Join(s.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
	b, err := os.ReadFile(path)
	if err == nil {
		b[at] ^= 1
		err = os.Chmod(path, 0o644)
	}
	if err == nil {
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// TestVerifyReads: a blob that is sent whole, as a range or not, breaks off before its end if it is damaged. Ranges that
// leave something out are not verified, and without VerifyReads nothing is.
func TestVerifyReads(t *testing.T) {
	s := newServer(t)
	large := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	good, bad, small := s.blob("a", large), s.blob("a", append(large, 'x')), s.blob("a", []byte("small"))
	s.damage(bad, 1000)
	s.damage(small, 1)
	s.want(200, "GET", api.PathBlob("a", bad), nil)

	s.restart(func(c *registry.Config) { c.VerifyReads = true })
	if a := s.want(200, "GET", api.PathBlob("a", good), nil); !bytes.Equal(a.body, large) {
		t.Error("other bytes")
	}
	s.want(200, "GET", api.PathBlob("a", s.blob("a", nil)), nil)
	s.want(206, "GET", api.PathBlob("a", good), nil, "Range", "bytes=0-")
	s.want(206, "GET", api.PathBlob("a", bad), nil, "Range", "bytes=1-")
	s.want(500, "GET", api.PathBlob("a", small), nil, "Range", "bytes=-5")
	s.want(200, "HEAD", api.PathBlob("a", bad), nil)
	if a := s.want(500, "GET", api.PathBlob("a", small), nil); a.code() != api.CodeInternal {
		t.Error(a)
	}
	for span, status := range map[string]int{"": 200, "bytes=0-": 206, "bytes=-9999999": 206} {
		req, err := http.NewRequest("GET", s.url(api.PathBlob("a", bad)), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Range", span)
		resp, err := wire.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if !errors.Is(err, io.ErrUnexpectedEOF) || resp.StatusCode != status || len(b) > len(large) {
			t.Errorf("%q: %d, %d bytes of %d, %v", span, resp.StatusCode, len(b), len(large)+1, err)
		}
	}
}

// A file that is empty, and does not say that it was not so, is no blob but the empty one, whether reads are verified or
// not. Whoever pushes it again heals it.
func TestEmptiedBlob(t *testing.T) {
	s := newServer(t)
	for _, verify := range []bool{true, false} {
		s.restart(func(c *registry.Config) { c.VerifyReads = verify })
		empty, d := s.blob("a", nil), s.blob("a", []byte("not empty"))
		path := filepath.Join(s.dir, "blobs/sha256", d.Hex()[:2], d.Hex())
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o444); err != nil { // without the note of its size
			t.Fatal(err)
		}
		for _, method := range []string{"GET", "HEAD"} {
			s.want(404, method, api.PathBlob("a", d), nil)
			s.want(404, method, api.PathBlob("a", d), nil, "Range", "bytes=0-")
			s.want(200, method, api.PathBlob("a", empty), nil)
		}
		s.blob("a", []byte("not empty"))
		s.want(200, "GET", api.PathBlob("a", d), nil)
	}
}

// A client that missed the answer to the last request of an upload, as the server ended before it was sent, may send that
// one again for an hour. It opens nothing: the blob must be in that repository.
func TestCloseAgain(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	s.stop()
	s.clock = func() time.Time { return now }
	s.start()
	secrets := s.guard(map[string]string{"one": "a pull,push", "two": "* pull,push", "reader": "a pull"})
	s.token = secrets["one"]
	body := []byte("closed")
	d := identity.Sum(body)
	at := s.begin("a")
	s.want(201, "PUT", at+"?digest="+d.String(), body)
	s.restart(nil)
	for _, again := range [][]byte{body, nil} {
		a := s.want(201, "PUT", at+"?digest="+d.String(), again)
		if a.header.Get("Location") != api.PathBlob("a", d) || a.header.Get(api.HeaderContentDigest) != d.String() {
			t.Error(a)
		}
	}
	s.want(404, "PUT", at+"?digest="+identity.Sum([]byte("other")).String(), nil)
	s.want(404, "PATCH", at, body)
	s.want(404, "GET", at, nil)
	open := s.begin("a")
	s.token = secrets["two"]
	s.want(404, "PUT", strings.Replace(at, "/a/", "/b/", 1)+"?digest="+d.String(), nil)
	s.want(404, "PUT", open+"?digest="+d.String(), nil)
	s.token = secrets["reader"]
	s.want(403, "PUT", at+"?digest="+d.String(), nil)
	s.token = secrets["one"]
	now = now.Add(61 * time.Minute)
	s.want(404, "PUT", at+"?digest="+d.String(), nil)
}

// TestHeadRenewsLease: a HEAD by a caller who may push keeps a blob in its repository when it was pushed, or
// asked for, more than an hour ago. Nothing else that only reads does.
func TestHeadRenewsLease(t *testing.T) {
	s := newServer(t)
	start := time.Now()
	now := start
	s.stop()
	s.clock = func() time.Time { return now }
	s.start()
	d := s.blob("a", []byte("x"))
	secrets := s.guard(map[string]string{"reader": "a pull", "writer": "a pull,push"})
	day := 24 * time.Hour
	check := func(when, method, caller string, days int) {
		t.Helper()
		s.token = secrets[caller]
		s.want(200, method, api.PathBlob("a", d), nil)
		until, err := s.ix.LinkedUntil(t.Context(), "a", d)
		if want := start.Add(time.Duration(days) * day); err != nil || !until.Equal(want) {
			t.Errorf("%s: until %v, %v; want %v", when, until, err, want)
		}
	}
	now = start.Add(59 * time.Minute)
	check("early", "HEAD", "writer", 7)
	now = start.Add(4 * day)
	check("GET", "GET", "writer", 7)
	check("a HEAD of one who may only pull", "HEAD", "reader", 7)
	check("HEAD", "HEAD", "writer", 11)
	s.want(404, "HEAD", api.PathBlob("a", identity.Sum([]byte("unknown"))), nil)

	// A blob that a manifest refers to is kept as well: the manifest may be deleted before the next one comes.
	m := s.manifest("a", nil, nil)
	if a := s.put("a", "v1", m); a.status != 201 {
		t.Fatal(a)
	}
	d = identity.Sum([]byte("{}"))
	now = start.Add(100 * day)
	check("after its lease", "GET", "writer", 11)
	check("after its lease", "HEAD", "writer", 107)
}

// A blob whose file was cut is not served with less than it has, in no way; whoever pushes it again heals it, and until
// then a scrub sets it aside.
func TestCutBlob(t *testing.T) {
	s := newServer(t)
	body := bytes.Repeat([]byte("0123456789abcdef"), 10_000)
	d := s.blob("a", body)
	path := filepath.Join(s.dir, "blobs/sha256", d.Hex()[:2], d.Hex())
	for _, size := range []int64{100, 0, 1 << 20} {
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		for _, method := range []string{"HEAD", "GET"} {
			if a := s.do(method, api.PathBlob("a", d), nil, "Range", "bytes=0-9"); a.status != 404 {
				t.Errorf("%d bytes: %s: %v", size, method, a)
			}
		}
		s.blob("a", body)
		if got := s.want(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(got.body, body) {
			t.Fatal("other bytes")
		}
	}
}
