package registry_test

import (
	"bufio"
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
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
)

const indexType = "application/vnd.oci.image.index.v1+json"

func indexOf(digests ...string) []byte {
	children := make([]string, len(digests))
	for i, d := range digests {
		children[i] = fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":7}`, manifestType, d)
	}
	return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"manifests":[%s]}`, indexType, strings.Join(children, ","))
}

// A manifest that names a blob without the repository holding it opens nothing: neither as the child of an index nor as
// a layer that may not be distributed.
func TestNamingABlobOpensNothing(t *testing.T) {
	s := newServer(t)
	secret := s.blob("secret/model", safetensors("1"))
	s.want(201, "PUT", api.PathManifest("mal/x", "evil"), indexOf(secret.String()), "Content-Type", indexType)
	s.want(404, "GET", api.PathBlob("mal/x", secret), nil)
	s.want(404, "HEAD", api.PathBlob("mal/x", secret), nil)

	const foreign = "application/vnd.oci.image.layer.nondistributable.v1.tar.raw"
	nowhere := identity.Sum([]byte("nowhere"))
	for i, l := range []desc{
		{"digest": secret.String(), "size": len(safetensors("1"))},
		{"digest": secret.String(), "size": int64(1<<63 - 1)},
		{"digest": nowhere.String(), "size": 20},
	} {
		l["mediaType"], l["annotations"] = foreign, map[string]string{api.AnnotationFilepath: "model.safetensors"}
		ref := fmt.Sprintf("evil%d", i)
		s.want(201, "PUT", api.PathManifest("mal/y", ref), s.manifest("mal/y", []desc{l}, nil), "Content-Type", manifestType)
	}
	s.want(404, "GET", api.PathBlob("mal/y", secret), nil)
	if a := s.want(200, "GET", "/v1/bases", nil); !strings.Contains(string(a.body), `"bases":[]`) {
		t.Errorf("a base was made of a blob that the repository does not hold: %s", a.body)
	}
}

// What the index would refuse is refused before the store keeps it, or no later start would get past it.
func TestNothingIsKeptThatTheIndexRefuses(t *testing.T) {
	s := newServer(t)
	zero := "sha256:" + strings.Repeat("0", 64)
	s.want(400, "PUT", api.PathManifest("team/x", "v1"), indexOf(zero), "Content-Type", indexType)
	s.base("team/model", "v1", "m", "1")
	before := s.export()
	s.stop()
	s.start()
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.export(); got != before {
		t.Errorf("export changed:\n%s\nwas\n%s", got, before)
	}
}

// Pushes that are under way while the index is rebuilt are in it afterwards, and so is all that came before.
func TestReindexBesidePushes(t *testing.T) {
	const before, beside = 300, 40
	s := newServer(t)
	for i := range before {
		s.want(201, "PUT", api.PathManifest("team/x", fmt.Sprint("a", i)), indexOf(), "Content-Type", indexType)
	}
	body := indexOf(identity.Sum([]byte("child")).String())
	var pushes []net.Conn
	for i := range beside { // admitted before the rebuild, and complete only while it runs
		pushes = append(pushes, s.half("PUT", api.PathManifest("team/y", fmt.Sprint("b", i)), len(body), body[:len(body)-1]))
	}
	done := make(chan error, 1)
	go func() { done <- s.reg.Reindex(t.Context()) }()
	for len(done) == 0 && s.do("GET", "/readyz", nil).status == 200 {
	}
	for _, c := range pushes {
		if _, err := c.Write(body[len(body)-1:]); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	acknowledged := before
	for _, c := range pushes {
		a, err := http.ReadResponse(bufio.NewReader(c), nil)
		switch {
		case err != nil:
			t.Fatal(err)
		case a.StatusCode == 201:
			acknowledged++
		case a.StatusCode != 503: // which is for those that were not admitted in time
			t.Fatal(a)
		}
	}
	if n := strings.Count(s.export(), `"type":"tag"`); n != acknowledged {
		t.Errorf("%d tags are left of %d", n, acknowledged)
	}
}

// A blob file that was cut short costs neither its model what is known of it, nor the store its service, when the index
// is made anew.
func TestTruncatedBlob(t *testing.T) {
	s := newServer(t)
	agg, d := s.base("team/model", "v1", "m", "1")
	s.base("team/other", "v1", "o", "2")
	m := s.want(200, "GET", api.PathManifest("team/model", d.String()), nil)
	good := safetensors("1")
	path := findBlob(t, s.dir, identity.Sum(good))
	for _, left := range []int{3, 0} {
		cut(t, path, good[:left])
		if err := s.reg.Reindex(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(200, "GET", api.PathManifest("team/model", d.String()), nil)
		s.want(200, "GET", api.PathManifest("team/other", "v1"), nil)
		s.want(200, "GET", api.PathBase(agg), nil)
	}
	cut(t, path, good)
	s.want(201, "PUT", api.PathManifest("team/model", "v1"), m.body, "Content-Type", manifestType)
	s.want(200, "GET", api.PathBase(agg), nil)
}

func findBlob(t *testing.T, dir string, d identity.Digest) (path string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		if filepath.Base(p) == d.Hex() {
			path = p
		}
		return err
	})
	if err != nil || path == "" {
		t.Fatalf("no file of blob %s: %v", d, err)
	}
	return path
}

func cut(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// Long annotations are left out of a page of artifacts, and do not make it large.
func TestArtifactPageIsBounded(t *testing.T) {
	s := newServer(t)
	agg, d := s.base("team/model", "v1", "m", "1")
	l := s.layer("team/model", api.MediaTypeWeight, "adapter_model.safetensors", safetensors("lora"))
	for i := range 5 {
		more := map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1},
			"annotations": map[string]string{"note": strings.Repeat("x", 1<<20), "n": fmt.Sprint(i)}}
		if a := s.put("team/model", fmt.Sprintf("a%d", i), s.manifest("team/model", []desc{l}, more)); a.status != 201 {
			t.Fatal(a)
		}
	}
	a := s.want(200, "GET", api.PathArtifacts(agg)+"?limit=1000&kind=adapter", nil)
	if n := bytes.Count(a.body, []byte(`"annotations_omitted":true`)); n != 5 || len(a.body) > 16<<10 {
		t.Errorf("%d artifacts in %d bytes", n, len(a.body))
	}
}

// A body of another length than its Content-Range says is refused, also where the length is not announced.
func TestChunkOfAnotherLength(t *testing.T) {
	s := newServer(t)
	for _, body := range []string{"ab", "abcdefghij"} {
		at := s.begin("team/model")
		if a := s.stream("PATCH", at, body, "Content-Range", "0-4"); a.status != 400 || a.code() != api.CodeSizeInvalid {
			t.Errorf("%d bytes as 0-4: %d %s", len(body), a.status, a.body)
		}
	}
	if a := s.stream("PATCH", s.begin("team/model"), "abcde", "Content-Range", "0-4"); a.status != 202 {
		t.Errorf("5 bytes as 0-4: %d %s", a.status, a.body)
	}
}

// stream sends a request without saying how long its body is.
func (s *server) stream(method, path, body string, header ...string) answer {
	s.t.Helper()
	r, w := io.Pipe()
	go func() {
		_, err := io.WriteString(w, body)
		w.CloseWithError(err)
	}()
	req, err := http.NewRequest(method, s.url(path), r)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return s.send(req)
}

// slowly connects with a small receive buffer, sends the head of a GET and returns the connection.
func (s *server) slowly(path string) net.Conn {
	s.t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		e := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 8<<10) })
		return errors.Join(e, err)
	}}
	c, err := d.Dial("tcp", strings.TrimPrefix(s.http.URL, "http://"))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path)
	return c
}

// A client that takes an answer slowly, but goes on taking, gets all of it, however long that takes: of a file, of one
// that is verified on its way, and of a manifest.
func TestSlowReaders(t *testing.T) {
	for _, verify := range []bool{false, true} {
		t.Run(fmt.Sprint("verify ", verify), func(t *testing.T) {
			s := newServer(t)
			s.stop()
			s.idle = 300 * time.Millisecond
			s.with = func(c *registry.Config) { c.VerifyReads = verify }
			s.start()
			m := s.manifest("a", nil, map[string]any{"x": strings.Repeat("y", 4<<20-1000)})
			if a := s.put("a", "v1", m); a.status != 201 {
				t.Fatal(a)
			}
			d := s.blob("a", bytes.Repeat([]byte("0123456789abcdef"), 1<<18))
			var readers sync.WaitGroup
			for path, want := range map[string]identity.Digest{
				api.PathBlob("a", d): d, api.PathManifest("a", "v1"): identity.Sum(m),
			} {
				c := s.slowly(path)
				readers.Go(func() {
					pace := time.NewTicker(s.idle / 15)
					defer pace.Stop()
					paced := readerFunc(func(b []byte) (int, error) {
						<-pace.C
						return io.ReadFull(c, b[:min(len(b), 32<<10)])
					})
					res, err := http.ReadResponse(bufio.NewReaderSize(paced, 32<<10), nil)
					if err != nil {
						t.Error(err)
						return
					}
					b, err := io.ReadAll(res.Body)
					if err != nil || identity.Sum(b) != want {
						t.Errorf("%s: %d bytes, %v", path, len(b), err)
					}
				})
			}
			readers.Wait()
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) {
	n, err := f(b)
	if err == io.ErrUnexpectedEOF {
		err = nil // the next one is the end
	}
	return n, err
}

// Large manifests that are sent at a trickle take no more than their share of memory. Small ones do not wait for them,
// and a large one only until the others have had theirs for the idle time.
func TestSlowManifests(t *testing.T) {
	s := newServer(t)
	s.stop()
	s.idle = 2 * time.Second
	s.start()
	large := s.manifest("a", nil, map[string]any{"x": strings.Repeat("y", 4<<20-1000)})
	pace := time.NewTicker(s.idle / 10)
	defer pace.Stop()
	var slow []net.Conn
	for range 12 { // of one caller, who gets half of the memory: four of them wait
		c := s.half("PUT", api.PathManifest("a", "slow"), 4<<20, large[:1<<10])
		defer c.Close()
		slow = append(slow, c)
	}
	trickle := func() {
		<-pace.C
		for _, c := range slow {
			c.Write([]byte("y")) // an error is that it was cut off
		}
	}
	for range 5 {
		trickle()
	}
	began := time.Now()
	small := s.manifest("a", nil, nil)
	if a := s.put("a", "small", small); a.status != 201 {
		t.Fatal(a)
	}
	if took := time.Since(began); took > s.idle/2 {
		t.Errorf("a small manifest waited for %v", took)
	}
	done := make(chan answer, 1)
	go func() { done <- s.put("a", "large", large) }()
	for len(done) == 0 {
		trickle()
	}
	if a := <-done; a.status != 201 {
		t.Fatal(a)
	}
}

// A document of any length arrives whole, whether its length is announced or not, and one that is too long is refused.
func TestLengthsOfDocuments(t *testing.T) {
	s := newServer(t)
	const most = api.MaxManifestBytes
	for _, size := range []int{300, 64<<10 - 1, 64 << 10, 64<<10 + 1, 128 << 10, 128<<10 + 1, 300_000, most, most + 1} {
		m := s.manifest("a", nil, map[string]any{"x": ""})
		m = s.manifest("a", nil, map[string]any{"x": strings.Repeat("y", max(size-len(m), 0))})
		want := 201
		if size > most {
			want = 413
		}
		a := s.put("a", "v1", m)
		b := s.stream("PUT", api.PathManifest("a", "v2"), string(m), "Content-Type", manifestType)
		if a.status != want || b.status != want {
			t.Fatalf("%d bytes: %v, %v", size, a, b)
		}
		if want != 201 {
			continue
		}
		for _, tag := range []string{"v1", "v2"} {
			a := s.want(200, "GET", api.PathManifest("a", tag), nil)
			h := s.want(200, "HEAD", api.PathManifest("a", tag), nil)
			if !bytes.Equal(a.body, m) || h.header.Get("Content-Length") != fmt.Sprint(len(m)) || len(h.body) != 0 {
				t.Errorf("%d bytes came back as %d: %v", len(m), len(a.body), h)
			}
		}
	}
}
