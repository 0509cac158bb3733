package transfer_test

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	digest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// site is a registry on a disk, with a proxy in front of it that can do to requests what networks do.
type site struct {
	t     *testing.T
	host  string         // of the proxy
	c     *client.Client // of the proxy
	past  *client.Client // of the registry itself
	notes notes

	mu    sync.Mutex
	fault func(w http.ResponseWriter, r *http.Request, next http.Handler) // nil: none
	bytes map[string]int64                                                // of blobs, by digest, as the proxy sent them
	asked int                                                             // requests for blobs
}

type notes struct {
	mu   sync.Mutex
	text strings.Builder
}

func (n *notes) add(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text.WriteString(s + "\n")
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.String()
}

func newSite(t *testing.T) *site {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	s := &site{t: t, bytes: map[string]int64{}}
	origin := httptest.NewServer(testregistry.New(t))
	t.Cleanup(origin.Close)
	u, err := url.Parse(origin.URL)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	next := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(u) },
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, next) }))
	proxy.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	proxy.Start()
	t.Cleanup(proxy.Close)
	s.host = strings.TrimPrefix(proxy.URL, "http://")
	s.c = s.client(client.Options{})
	s.past, err = client.New(u.Host, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.past.Close)
	return s
}

func (s *site) client(o client.Options) *client.Client {
	s.t.Helper()
	if o.Backoff == 0 {
		o.Backoff = time.Millisecond
	}
	o.Notify = s.notes.add
	c, err := client.New(s.host, o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return c
}

func isBlob(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/v2/") && strings.Contains(r.URL.Path, "/blobs/sha256:")
}

func blobOf(r *http.Request) string { return r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:] }

func (s *site) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	s.mu.Lock()
	fault := s.fault
	if isBlob(r) {
		s.asked++
	}
	s.mu.Unlock()
	if isBlob(r) {
		w = &counter{w, s, blobOf(r)}
	}
	if fault == nil {
		next.ServeHTTP(w, r)
		return
	}
	fault(w, r, next)
}

type counter struct {
	http.ResponseWriter
	s    *site
	blob string
}

func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.bytes[c.blob] += int64(n)
	return n, err
}

// onBlob makes a fault of what happens to requests for blobs.
func (s *site) onBlob(f func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked, s.bytes = 0, map[string]int64{}
	if f == nil {
		s.fault = nil
		return
	}
	s.fault = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if isBlob(r) {
			f(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	}
}

func (s *site) sent() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.bytes {
		n += b
	}
	return n
}

func (s *site) sentOf(b []byte) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes[identity.Sum(b).String()]
}

func (s *site) requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// once lets only the first call of f act; the others go on to next.
func once(f http.HandlerFunc) func(w http.ResponseWriter, r *http.Request, next http.Handler) {
	var mu sync.Mutex
	done := false
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		mu.Lock()
		first := !done
		done = true
		mu.Unlock()
		if first {
			f(w, r)
			return
		}
		next.ServeHTTP(w, r)
	}
}

// cutter passes n bytes of a body on and then breaks the connection, after then.
type cutter struct {
	http.ResponseWriter
	n    int
	then func()
}

func (c *cutter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *cutter) Write(b []byte) (int, error) {
	if len(b) < c.n {
		c.n -= len(b)
		return c.ResponseWriter.Write(b)
	}
	c.ResponseWriter.Write(b[:c.n])
	http.NewResponseController(c.ResponseWriter).Flush()
	c.then()
	panic(http.ErrAbortHandler)
}

// model returns files of a model with that many shards of a size.
func model(shards, size int) map[string][]byte {
	files := map[string][]byte{
		"config.json": []byte(`{"model_type":"tiny"}`), "tokenizer/vocab.txt": []byte("a\nb\n"), "empty.txt": {},
	}
	var names []string
	for i := range shards {
		name := "model-" + string(rune('a'+i)) + ".safetensors"
		names = append(names, name)
		files[name] = shard(size, byte(i))
	}
	weights := map[string]string{}
	for _, n := range names {
		weights["w."+n] = n
	}
	b, err := json.Marshal(map[string]any{"weight_map": weights})
	if err != nil {
		panic(err)
	}
	files["model.safetensors.index.json"] = b
	return files
}

// shard returns a valid safetensors file of size bytes.
func shard(size int, seed byte) []byte {
	const head = 256
	data := size - 8 - head
	text, err := json.Marshal(map[string]any{
		"w": map[string]any{"dtype": "U8", "shape": []int{data}, "data_offsets": []int{0, data}},
	})
	if err != nil {
		panic(err)
	}
	b := append([]byte{0, 1, 0, 0, 0, 0, 0, 0}, text...)
	b = append(b, bytes.Repeat([]byte{' '}, 8+head-len(b))...)
	body := make([]byte, data)
	rand.NewChaCha8([32]byte{seed, 7}).Read(body)
	return append(b, body...)
}

// push stores files as one base under a tag, past the proxy's faults, and returns the digest of its manifest.
func (s *site) push(repo, tag string, files map[string][]byte) identity.Digest {
	s.t.Helper()
	m := v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		ArtifactType: api.ArtifactTypeBase, Config: s.blob(repo, []byte("{}"), v1.MediaTypeEmptyJSON, ""),
	}
	for _, name := range sortedKeys(files) {
		m.Layers = append(m.Layers, s.blob(repo, files[name], api.MediaTypeWeight, name))
	}
	return s.manifest(repo, tag, m)
}

func (s *site) manifest(repo, tag string, m v1.Manifest) identity.Digest {
	s.t.Helper()
	b, err := json.Marshal(m)
	if err != nil {
		s.t.Fatal(err)
	}
	d, err := s.past.PutManifest(s.t.Context(), repo, tag, m.MediaType, b)
	if err != nil {
		s.t.Fatal(err)
	}
	return d
}

func (s *site) blob(repo string, b []byte, mediaType, name string) v1.Descriptor {
	s.t.Helper()
	d := identity.Sum(b)
	u, err := s.past.CreateUpload(s.t.Context(), repo, d, int64(len(b)))
	if err == nil && !u.Held() {
		if len(b) > 0 {
			err = u.Append(s.t.Context(), bytes.NewReader(b), int64(len(b)))
		}
		if err == nil {
			err = u.Commit(s.t.Context(), d)
		}
	}
	if err != nil {
		s.t.Fatal(err)
	}
	x := v1.Descriptor{MediaType: mediaType, Digest: digest.Digest(d.String()), Size: int64(len(b))}
	if name != "" {
		x.Annotations = map[string]string{v1.AnnotationTitle: name, api.AnnotationFilepath: name}
	}
	return x
}

// resolve asks past the proxy's faults.
func (s *site) resolve(repo, tag string) transfer.Plan {
	s.t.Helper()
	p, err := transfer.Resolve(s.t.Context(), s.past, client.Reference{Host: s.host, Repo: repo, Tag: tag})
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// options are those of a test: its notes are kept.
func (s *site) options() transfer.PullOptions {
	return transfer.PullOptions{
		Watch: func(e transfer.Event) {
			if e.Step == transfer.Noted {
				s.notes.add(e.Note)
			}
		},
		Staging: staging.Options{Beat: 50 * time.Millisecond},
	}
}

// pull must end well and leave exactly files at dir.
func (s *site) pull(dir string, files map[string][]byte) transfer.Pulled {
	s.t.Helper()
	done, err := transfer.Pull(s.t.Context(), s.c, s.resolve("m", "v1"), dir, s.options())
	if err != nil {
		s.t.Fatal(err)
	}
	s.holds(dir, files)
	return done
}

func (s *site) holds(dir string, files map[string][]byte) {
	s.t.Helper()
	n := 0
	err := staging.Walk(dir, func(name string, e fs.DirEntry) error {
		n++
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil && (!e.Type().IsRegular() || !bytes.Equal(b, files[name])) {
			s.t.Errorf("%s: not the bytes that were pushed", name)
		}
		return err
	})
	if err != nil || n != len(files) {
		s.t.Errorf("%d files of %d: %v", n, len(files), err)
	}
}

func (s *site) nothingAt(dir string) {
	s.t.Helper()
	if _, err := os.Lstat(dir); err == nil {
		s.t.Errorf("there is something at %s", dir)
	}
}

func sortedKeys(m map[string][]byte) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
