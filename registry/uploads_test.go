package registry_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// begin opens an upload and returns its location.
func (s *server) begin(repo string, header ...string) string {
	s.t.Helper()
	a := s.want(202, "POST", api.PathUploads(repo), nil, header...)
	if a.header.Get("Docker-Upload-UUID") == "" || a.header.Get("Range") != "0-0" {
		s.t.Fatal(a)
	}
	return a.header.Get("Location")
}

func TestEveryWayToUpload(t *testing.T) {
	s := newServer(t)
	body := []byte("0123456789")
	d := identity.Sum(body)
	ways := map[string]func(repo string) answer{
		"post and put": func(repo string) answer {
			return s.do("PUT", s.begin(repo)+"?digest="+d.String(), body)
		},
		"post only": func(repo string) answer {
			return s.do("POST", api.PathUploads(repo)+"?digest="+d.String(), body)
		},
		"stream": func(repo string) answer {
			at := s.begin(repo)
			if a := s.want(202, "PATCH", at, body); a.header.Get("Range") != "0-9" || a.header.Get("Location") != at {
				t.Error(a)
			}
			return s.do("PUT", at+"?digest="+d.String(), nil)
		},
		"chunks": func(repo string) answer {
			at := s.begin(repo)
			s.want(202, "PATCH", at, body[:3], "Content-Range", "0-2")
			s.want(202, "PATCH", at, body[3:7], "Content-Range", "3-6")
			if a := s.want(204, "GET", at, nil); a.header.Get("Range") != "0-6" || a.header.Get("Location") != at {
				t.Error(a)
			}
			return s.do("PUT", at+"?digest="+d.String(), body[7:], "Content-Range", "7-9")
		},
		"announced": func(repo string) answer {
			at := s.begin(repo, api.HeaderExpectDigest, d.String(), api.HeaderExpectSize, "10")
			s.want(202, "PATCH", at, body)
			return s.do("PUT", at+"?digest="+d.String(), nil)
		},
		"post with a digest and no body": func(repo string) answer {
			a := s.want(202, "POST", api.PathUploads(repo)+"?digest="+d.String(), nil)
			return s.do("PUT", a.header.Get("Location")+"?digest="+d.String(), body)
		},
	}
	n := 0
	for name, way := range ways {
		n++
		repo := fmt.Sprintf("way/%d", n)
		a := way(repo)
		if a.status != 201 || a.header.Get("Location") != api.PathBlob(repo, d) ||
			a.header.Get("Docker-Content-Digest") != d.String() {
			t.Errorf("%s: %v", name, a)
			continue
		}
		if got := s.want(200, "GET", api.PathBlob(repo, d), nil); !bytes.Equal(got.body, body) {
			t.Errorf("%s: %q", name, got.body)
		}
	}
	empty := identity.Sum(nil)
	s.want(201, "POST", api.PathUploads("e1")+"?digest="+empty.String(), nil)
	s.want(201, "PUT", s.begin("e2")+"?digest="+empty.String(), nil)
}

func TestBadUploads(t *testing.T) {
	s := newServer(t)
	body := []byte("0123456789")
	d, other := identity.Sum(body), identity.Sum([]byte("other"))
	code := func(what string, a answer, status int, want api.Code) {
		t.Helper()
		if a.status != status || a.code() != want {
			t.Errorf("%s: got %v, want %d %s", what, a, status, want)
		}
	}
	at := s.begin("a")
	code("digest mismatch", s.do("PUT", at+"?digest="+other.String(), body), 400, api.CodeDigestInvalid)
	code("after it", s.do("GET", at, nil), 404, api.CodeBlobUploadUnknown)
	s.want(404, "GET", api.PathBlob("a", other), nil)
	s.want(404, "GET", api.PathBlob("a", d), nil)
	code(
		"post only, mismatch",
		s.do("POST", api.PathUploads("a")+"?digest="+other.String(), body),
		400,
		api.CodeDigestInvalid,
	)
	code("sha512", s.do("PUT", s.begin("a")+"?digest=sha512:"+strings.Repeat("ab", 64), body), 400, api.CodeDigestInvalid)
	code("no digest", s.do("PUT", s.begin("a"), body), 400, api.CodeDigestInvalid)
	code(
		"announced sha512",
		s.do("POST", api.PathUploads("a"), nil, api.HeaderExpectDigest, "sha512:ab"),
		400,
		api.CodeDigestInvalid,
	)
	code("announced size", s.do("POST", api.PathUploads("a"), nil, api.HeaderExpectSize, "-3"), 400, api.CodeSizeInvalid)
	at = s.begin("a", api.HeaderExpectSize, "9")
	code("longer than announced", s.do("PATCH", at, body), 400, api.CodeSizeInvalid)
	s.want(202, "PATCH", at, body[:8])
	code(
		"shorter than announced",
		s.do("PUT", at+"?digest="+identity.Sum(body[:8]).String(), nil),
		400,
		api.CodeSizeInvalid,
	)
	at = s.begin("a", api.HeaderExpectDigest, d.String())
	code("another than announced", s.do("PUT", at+"?digest="+other.String(), []byte("other")), 400, api.CodeDigestInvalid)
	at = s.begin("a")
	code("Content-Range", s.do("PATCH", at, body, "Content-Range", "junk"), 400, api.CodeBlobUploadInvalid)
	code("range and length", s.do("PATCH", at, body, "Content-Range", "0-3"), 400, api.CodeSizeInvalid)
	for _, id := range []string{"x", "..", "%2e%2e%2fLOCK", strings.Repeat("0", 32)} {
		code("unknown upload "+id, s.do("GET", api.PathUploads("a")+id, nil), 404, api.CodeBlobUploadUnknown)
	}
	code(
		"another repository",
		s.do("PATCH", api.PathUpload("b", at[len(api.PathUploads("a")):]), body),
		404,
		api.CodeBlobUploadUnknown,
	)
	s.want(204, "DELETE", at, nil)
	code("after cancel", s.do("PATCH", at, body), 404, api.CodeBlobUploadUnknown)
}

func TestChunkOutOfOrder(t *testing.T) { // PU-06
	s := newServer(t)
	body := bytes.Repeat([]byte("x"), 200)
	at := s.begin("a")
	s.want(202, "PATCH", at, body[:50], "Content-Range", "0-49")
	for method, q := range map[string]string{"PATCH": "", "PUT": "?digest=" + identity.Sum(body).String()} {
		a := s.want(416, method, at+q, body[100:], "Content-Range", "100-199")
		if a.header.Get("Range") != "0-49" || a.header.Get("Location") != at || a.code() != api.CodeRangeInvalid {
			t.Error(a)
		}
		s.want(416, method, at+q, body[:50], "Content-Range", "0-49")
	}
	s.want(202, "PATCH", at, body[50:], "Content-Range", "50-199")
	s.want(201, "PUT", at+"?digest="+identity.Sum(body).String(), nil)
}

func TestTwoPushersOfOneBlob(t *testing.T) { // PU-03
	s := newServer(t)
	for round := range 50 {
		body := bytes.Repeat([]byte{byte(round)}, 10_000)
		d := identity.Sum(body)
		var wg sync.WaitGroup
		for range 2 {
			at := s.begin("a")
			wg.Go(func() {
				if a := s.do("PUT", at+"?digest="+d.String(), body); a.status != 201 {
					t.Errorf("round %d: %v", round, a)
				}
			})
		}
		wg.Wait()
		if a := s.want(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(a.body, body) {
			t.Fatal("other bytes")
		}
	}
}

// half sends the head of a request and some of its body, and leaves the connection open.
func (s *server) half(method, path string, announced int, body []byte) net.Conn {
	s.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(s.http.URL, "http://"))
	if err != nil {
		s.t.Fatal(err)
	}
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", method, path, announced)
	if s.token != "" {
		fmt.Fprintf(c, "Authorization: Bearer %s\r\n", s.token)
	}
	fmt.Fprint(c, "\r\n")
	c.Write(body)
	return c
}

// received waits until the upload has n bytes.
func (s *server) received(at string, n int) {
	s.t.Helper()
	want := fmt.Sprintf("0-%d", n-1)
	var a answer
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		if a = s.do("GET", at, nil); a.status == 204 && a.header.Get("Range") == want {
			return
		}
	}
	s.t.Fatalf("upload never had %d bytes, but %v\n%s", n, a, s.log)
}

func TestDroppedClientAndRestart(t *testing.T) {
	s := newServer(t)
	body := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	d := identity.Sum(body)
	at := s.begin("a", api.HeaderExpectDigest, d.String(), api.HeaderExpectSize, fmt.Sprint(len(body)))
	c := s.half("PATCH", at, len(body), body[:700_001])
	c.Close()
	s.received(at, 700_001)
	s.stop()
	s.start()
	a := s.want(204, "GET", at, nil)
	if a.header.Get("Range") != "0-700000" {
		t.Fatal(a)
	}
	s.want(202, "PATCH", at, body[700_001:], "Content-Range", fmt.Sprintf("700001-%d", len(body)-1))
	s.want(201, "PUT", at+"?digest="+d.String(), nil)
	if got := s.want(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(got.body, body) {
		t.Fatal("other bytes")
	}
}

func TestUploadInUse(t *testing.T) {
	s := newServer(t)
	at := s.begin("a")
	c := s.half("PATCH", at, 1<<20, make([]byte, 600_000))
	defer c.Close()
	s.received(at, 512<<10) // whole pieces are stored as they come
	for method, path := range map[string]string{"PATCH": at, "DELETE": at,
		"PUT": at + "?digest=" + identity.Sum(nil).String()} {
		a := s.do(method, path, nil)
		if a.status != 429 || a.code() != api.CodeUploadBusy || a.header.Get("Retry-After") == "" {
			t.Errorf("%s: %v", method, a)
		}
	}
}

// A client that stops in the middle is cut off after the idle time, and what came is kept. One that goes on slowly is
// not cut off, however long the whole takes.
func TestIdleClients(t *testing.T) {
	s := newServer(t)
	s.stop()
	s.idle = 500 * time.Millisecond
	s.start()
	at := s.begin("a")
	c := s.half("PATCH", at, 1000, make([]byte, 10))
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadAll(c); err != nil {
		t.Fatal("the connection was not closed:", err)
	}
	s.received(at, 10)

	slow := s.begin("a")
	pr, pw := io.Pipe()
	go func() {
		pace := time.NewTicker(s.idle / 5)
		defer pace.Stop()
		for range 8 {
			<-pace.C
			pw.Write(make([]byte, 5))
		}
		pw.Close()
	}()
	req, _ := http.NewRequest("PATCH", s.url(slow), pr)
	res, err := wire.Transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 202 || res.Header.Get("Range") != "0-39" {
		t.Fatal(res.StatusCode, res.Header)
	}

	big := bytes.Repeat([]byte("x"), 32<<20)
	d := s.blob("a", big)
	for len(s.ended) > 0 {
		<-s.ended
	}
	stuck := s.half("GET", api.PathBlob("a", d), 0, nil)
	defer stuck.Close()
	select {
	case <-s.ended:
	case <-time.After(10 * time.Second):
		t.Fatal("a reader that stopped is still waited for")
	}
	stuck.SetDeadline(time.Now().Add(10 * time.Second))
	got, _ := io.Copy(io.Discard, stuck)
	if got >= int64(len(big)) {
		t.Fatal("a reader that stopped was waited for")
	}
}

// RG-06: a full disk refuses the upload, and gives back what was not acknowledged of it; what is there is still served.
func TestDiskFull(t *testing.T) {
	s := newServer(t)
	old := s.blob("a", []byte("old"))
	m := s.manifest("a", nil, nil)
	if a := s.put("a", "v1", m); a.status != 201 {
		t.Fatal(a)
	}
	s.http.Close()
	s.ix.Close()
	s.store.Close()
	var full atomic.Bool
	s.disk = durable.Disk{Fault: func(op durable.Op, path string, do func() error) error {
		if full.Load() && op == durable.OpWrite {
			return fmt.Errorf("write %s: %w", path, syscall.ENOSPC)
		}
		return do()
	}}
	s.start()
	at := s.begin("a")
	s.want(202, "PATCH", at, []byte("some"))
	full.Store(true)
	a := s.do("PATCH", at, make([]byte, 1<<20))
	if a.status != 507 || a.code() != api.CodeStoreFull {
		t.Fatal(a)
	}
	if a := s.want(204, "GET", at, nil); a.header.Get("Range") != "0-3" {
		t.Error("of the upload is left: ", a)
	}
	if a := s.put("a", "v2", m); a.status != 507 {
		t.Fatal(a)
	}
	s.want(200, "GET", api.PathBlob("a", old), nil)
	s.want(200, "GET", api.PathManifest("a", "v1"), nil)
	full.Store(false)
	s.want(404, "GET", api.PathManifest("a", "v2"), nil)
	if a := s.put("a", "v2", m); a.status != 201 {
		t.Fatal(a)
	}
	if !strings.Contains(s.log.String(), "no space left") {
		t.Errorf("the log does not say why:\n%s", s.log)
	}
}

func TestPurge(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	s.stop()
	s.clock = func() time.Time { return now }
	s.start()
	at := s.begin("a")
	s.want(202, "PATCH", at, []byte("x"))
	if n, err := s.reg.Purge(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	now = now.Add(8 * 24 * time.Hour)
	s.want(404, "GET", at, nil)
	if n, err := s.reg.Purge(t.Context()); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	for u, err := range s.store.Uploads(t.Context()) {
		t.Fatal("left over", u, err)
	}
}

// The largest numbers that a Content-Range can have, where nothing else says how long the body is.
func TestRangeThatNoBodyHas(t *testing.T) {
	s := newServer(t)
	at := s.begin("a")
	for _, spec := range []string{
		"0-9223372036854775807", "9223372036854775807-9223372036854775807", "0-99999999999999999999",
		"1-9223372036854775807",
	} {
		for _, method := range []string{"PATCH", "PUT"} {
			path := at
			if method == "PUT" {
				path += "?digest=" + identity.Sum([]byte("hello")).String()
			}
			if a := s.stream(method, path, "hello", "Content-Range", spec); a.status != 400 ||
				a.code() != api.CodeBlobUploadInvalid {
				t.Errorf("%s %s: %v", method, spec, a)
			}
		}
	}
	s.want(202, "PATCH", at, []byte("hello"))
}

// A process that is killed after the store has made an upload a blob, and before the index knows it, keeps what was
// acknowledged: the client finds all its bytes there, and closes the upload again.
func TestKilledBeforeTheLink(t *testing.T) {
	s := newServer(t)
	body := bytes.Repeat([]byte("0123456789abcdef"), 10_000)
	d := identity.Sum(body)
	for n, header := range [][]string{
		nil, {api.HeaderExpectDigest, d.String(), api.HeaderExpectSize, fmt.Sprint(len(body))},
	} {
		repo := fmt.Sprint("repo", n)
		at := s.begin(repo, header...)
		s.want(202, "PATCH", at, body[:100_000])
		s.stop()
		s.finishInStore(at[len(api.PathUploads(repo)):], body[100_000:], d)
		s.start()
		for range 2 {
			a := s.want(204, "GET", at, nil)
			if a.header.Get("Range") != fmt.Sprintf("0-%d", len(body)-1) {
				t.Fatal(a)
			}
		}
		s.want(404, "GET", api.PathBlob(repo, d), nil)
		rest := []string{"Content-Range", fmt.Sprintf("100000-%d", len(body)-1)}
		a := s.want(416, "PUT", at+"?digest="+d.String(), body[100_000:], rest...)
		if a.header.Get("Range") != fmt.Sprintf("0-%d", len(body)-1) {
			t.Fatal(a)
		}
		s.want(201, "PUT", at+"?digest="+d.String(), nil)
		if got := s.want(200, "GET", api.PathBlob(repo, d), nil); !bytes.Equal(got.body, body) {
			t.Fatal("other bytes")
		}
		s.want(404, "GET", at, nil)
	}
	for u, err := range s.store.Uploads(t.Context()) {
		t.Error("left over", u, err)
	}
}

// finishInStore makes an upload a blob, as a registry does whose process is killed right then.
func (s *server) finishInStore(id string, rest []byte, d identity.Digest) {
	s.t.Helper()
	st, err := fsstore.Open(s.dir, fsstore.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	u, err := st.Resume(s.t.Context(), id)
	if err == nil {
		_, err = u.Finish(s.t.Context(), u.Size(), bytes.NewReader(rest), d)
	}
	if err = errors.Join(err, st.Close()); err != nil {
		s.t.Fatal(err)
	}
}

// Receipts that nobody asks for are purged, and the blobs stay.
func TestPurgeOfReceipts(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	at := s.begin("a")
	s.want(202, "PATCH", at, []byte("some"))
	s.stop()
	d := identity.Sum([]byte("something"))
	s.finishInStore(at[len(api.PathUploads("a")):], []byte("thing"), d)
	s.clock = func() time.Time { return now }
	s.start()
	if n, err := s.reg.Purge(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	now = now.Add(8 * 24 * time.Hour)
	if n, err := s.reg.Purge(t.Context()); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	for u, err := range s.store.Uploads(t.Context()) {
		t.Fatal("left over", u, err)
	}
	if _, err := s.store.Stat(t.Context(), d); err != nil {
		t.Error(err)
	}
}

// An upload that goes while the registry has it in use is not said to be there.
func TestUploadThatVanished(t *testing.T) {
	s := newServer(t)
	at := s.begin("a")
	s.want(202, "PATCH", at, []byte("some"))
	id := at[len(api.PathUploads("a")):]
	for _, ext := range []string{".data", ".state"} {
		if err := os.Remove(filepath.Join(s.dir, "uploads", id+ext)); err != nil {
			t.Fatal(err)
		}
	}
	if a := s.do("PATCH", at, []byte("more")); a.status != 404 || a.code() != api.CodeBlobUploadUnknown {
		t.Error(a)
	}
	if a := s.do("GET", at, nil); a.status != 404 || a.code() != api.CodeBlobUploadUnknown {
		t.Error(a)
	}
}

// A collection spares what an upload became that nobody has heard of yet, also without a grace period.
func TestReceiptIsNotCollected(t *testing.T) {
	s := newServer(t)
	at := s.begin("a")
	s.want(202, "PATCH", at, []byte("some"))
	s.stop()
	d := identity.Sum([]byte("something"))
	s.finishInStore(at[len(api.PathUploads("a")):], []byte("thing"), d)
	s.clock = func() time.Time { return time.Now().Add(time.Minute) }
	s.start()
	collect := func(removed int64) {
		t.Helper()
		did, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
		if err != nil || did.Removed.Blobs != removed {
			t.Fatal(did, err)
		}
	}
	collect(0)
	s.want(201, "PUT", at+"?digest="+d.String(), nil)
	s.want(200, "GET", api.PathBlob("a", d), nil)
	s.want(202, "DELETE", api.PathBlob("a", d), nil)
	collect(1)
}

// TestSmallDisk fills a disk with a push in chunks: what was acknowledged stays, also over a restart, the chunk for
// which there was no room takes none, and the push goes on when there is room again.
func TestSmallDisk(t *testing.T) {
	const chunk, size = 1 << 20, 24
	s := newServer(t)
	s.stop()
	s.dir = filepath.Join(tmpfs(t, size), "data")
	if err := fsstore.Init(s.dir); err != nil {
		t.Fatal(err)
	}
	s.start()
	t.Cleanup(func() { // before the disk goes
		if s.http != nil {
			s.stop()
		}
	})
	filler := s.begin("a")
	s.want(202, "PATCH", filler, make([]byte, 8*chunk))
	data := bytes.Repeat([]byte("0123456789abcdef"), size*chunk/16)
	at, acked := s.begin("a"), 0
	send := func() answer { return s.do("PATCH", at, data[acked:acked+chunk]) }
	a := send()
	for ; a.status == 202; a = send() {
		acked += chunk
	}
	if a.status != 507 || a.code() != api.CodeStoreFull || acked == 0 {
		t.Fatal(acked, a)
	}
	free := freeOf(t, s.dir)
	big := s.do("PATCH", at, data[acked:])
	if big.status != 507 || freeOf(t, s.dir) < free {
		t.Errorf("after a large chunk %d bytes are free, before it were %d: %v", freeOf(t, s.dir), free, big)
	}
	if a := s.do("PUT", at+"?digest="+identity.Sum(data).String(), data[acked:]); a.status != 507 || freeOf(t, s.dir) < free {
		t.Errorf("after a PUT %d bytes are free, before it were %d: %v", freeOf(t, s.dir), free, a)
	}
	holds := fmt.Sprintf("0-%d", acked-1)
	if a := s.want(204, "GET", at, nil); a.header.Get("Range") != holds {
		t.Errorf("after the disk was full: Range %s, want %s", a.header.Get("Range"), holds)
	}
	s.stop()
	s.start()
	if a := s.want(204, "GET", at, nil); a.header.Get("Range") != holds {
		t.Errorf("after a restart: Range %s, want %s", a.header.Get("Range"), holds)
	}
	s.want(204, "DELETE", filler, nil)
	acked += chunk
	s.want(202, "PATCH", at, data[acked-chunk:acked])
	d := identity.Sum(data[:acked])
	s.want(201, "PUT", at+"?digest="+d.String(), nil)
	if a := s.want(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(a.body, data[:acked]) {
		t.Error("the blob is not what was sent")
	}
}

// tmpfs mounts a file system of a size in MiB.
func tmpfs(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", size)); err != nil {
		t.Fatalf("mount a tmpfs: %v (this test needs the right to mount: run it as root)", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func freeOf(t *testing.T, dir string) int64 {
	t.Helper()
	n, err := durable.Free(dir)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
