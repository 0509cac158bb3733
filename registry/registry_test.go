package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// wire makes the requests of the tests. The default client's connections are closed by every httptest.Server that is.
var wire = &http.Client{Transport: &http.Transport{}}

// server is a registry on a real store and a real index, behind a real listener.
type server struct {
	t     *testing.T
	dir   string
	gate  *access.Gate
	idle  time.Duration
	clock func() time.Time
	disk  durable.Disk
	store *fsstore.Store
	ix    *index.Index
	reg   *registry.Registry
	http  *httptest.Server
	log   *bytes.Buffer
	token string        // sent with every request if set
	ended chan struct{} // gets one for each request that ended, as long as there is room
	with  func(*registry.Config)
}

func newServer(t *testing.T) *server {
	t.Helper()
	t.Parallel()
	s := &server{t: t, dir: filepath.Join(t.TempDir(), "data"), gate: access.Open(), log: new(bytes.Buffer)}
	if err := fsstore.Init(s.dir); err != nil {
		t.Fatal(err)
	}
	s.start()
	t.Cleanup(func() {
		if s.http != nil {
			s.stop()
		}
	})
	return s
}

func (s *server) start() {
	s.t.Helper()
	ctx := context.Background()
	var err error
	if s.store, err = fsstore.Open(s.dir, fsstore.Options{Disk: s.disk}); err != nil {
		s.t.Fatal(err)
	}
	kv, err := boltkv.Open(filepath.Join(s.dir, "index.db"), boltkv.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	if s.ix, err = index.New(ctx, kv); err != nil {
		s.t.Fatal(err)
	}
	c := registry.Config{
		Store: s.store, Refs: s.store, Uploads: s.store, Index: s.ix, Access: s.gate, Version: "test",
		Log: slog.New(slog.NewTextHandler(s.log, nil)), IdleTimeout: s.idle, Clock: s.clock,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "x 1\n") }),
	}
	if s.with != nil {
		s.with(&c)
	}
	if s.reg, err = registry.New(c); err != nil {
		s.t.Fatal(err)
	}
	if err := s.reg.Replay(ctx); err != nil {
		s.t.Fatal(err)
	}
	s.ended = make(chan struct{}, 1000)
	s.http = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.reg.ServeHTTP(w, r)
		select {
		case s.ended <- struct{}{}:
		default:
		}
	}))
	s.http.Config.ConnContext = bounds.WithConn
	s.http.Start()
}

func (s *server) stop() {
	s.t.Helper()
	s.http.Close()
	if err := s.ix.Close(); err != nil {
		s.t.Error(err)
	}
	if err := s.store.Close(); err != nil {
		s.t.Error(err)
	}
	s.http = nil
}

// answer is an answer that was read whole.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// code returns the code of an error's answer.
func (a answer) code() api.Code {
	var e api.Errors
	if json.Unmarshal(a.body, &e) != nil || len(e.Errors) == 0 {
		return ""
	}
	return e.Errors[0].Code
}

func (a answer) String() string { return fmt.Sprintf("%d %v %.300s", a.status, a.header, a.body) }

// do sends a request. header is pairs of name and value.
func (s *server) do(method, path string, body []byte, header ...string) answer {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url(path), bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	if s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	return s.send(req)
}

func (s *server) send(req *http.Request) answer {
	s.t.Helper()
	res, err := wire.Transport.RoundTrip(req)
	if err != nil {
		s.t.Fatalf("%s %s: %v", req.Method, req.URL, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", req.Method, req.URL, err)
	}
	return answer{res.StatusCode, res.Header, b}
}

func (s *server) url(path string) string {
	if strings.HasPrefix(path, "/") {
		return s.http.URL + path
	}
	return path
}

// want sends a request that must be answered with a status.
func (s *server) want(status int, method, path string, body []byte, header ...string) answer {
	s.t.Helper()
	a := s.do(method, path, body, header...)
	if a.status != status {
		s.t.Fatalf("%s %s: got %v, want %d", method, path, a, status)
	}
	return a
}

// blob uploads a blob with POST and PUT.
func (s *server) blob(repo string, b []byte) identity.Digest {
	s.t.Helper()
	d := identity.Sum(b)
	a := s.want(202, "POST", api.PathUploads(repo), nil)
	s.want(201, "PUT", a.header.Get("Location")+"?digest="+d.String(), b)
	return d
}

// safetensors makes a small valid file that differs by seed.
func safetensors(seed string) []byte {
	data := identity.Sum([]byte(seed))
	head := `{"w":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}}`
	b := []byte{byte(len(head)), 0, 0, 0, 0, 0, 0, 0}
	return append(append(b, head...), data[:]...)
}

type desc map[string]any

// layer uploads a file and returns its descriptor.
func (s *server) layer(repo, mediaType, name string, b []byte) desc {
	d := s.blob(repo, b)
	return desc{"mediaType": mediaType, "digest": d.String(), "size": len(b),
		"annotations": map[string]string{"org.opencontainers.image.title": name, "org.cncf.model.filepath": name}}
}

// manifest makes an image manifest with an empty config, which it uploads.
func (s *server) manifest(repo string, layers []desc, more map[string]any) []byte {
	s.t.Helper()
	if layers == nil {
		layers = []desc{}
	}
	config := s.blob(repo, []byte("{}"))
	m := map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": desc{"mediaType": "application/vnd.oci.empty.v1+json", "digest": config.String(), "size": 2},
		"layers": layers,
	}
	maps.Copy(m, more)
	b, err := json.Marshal(m)
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

func (s *server) put(repo, ref string, m []byte) answer {
	s.t.Helper()
	return s.do("PUT", api.PathManifest(repo, ref), m, "Content-Type", manifestType)
}

// base pushes a base of shards named by prefix, and returns its aggregate and manifest digest.
func (s *server) base(repo, tag, prefix string, seeds ...string) (identity.Aggregate, identity.Digest) {
	s.t.Helper()
	var layers []desc
	var shards []identity.Shard
	for i, seed := range seeds {
		b := safetensors(seed)
		name := fmt.Sprintf("%s-%d.safetensors", prefix, i)
		layers = append(layers, s.layer(repo, api.MediaTypeWeight, name, b))
		shards = append(shards, identity.Shard{Filename: name, Size: uint64(len(b)), Digest: identity.Sum(b)})
	}
	want, err := identity.New(shards)
	if err != nil {
		s.t.Fatal(err)
	}
	m := s.manifest(repo, layers, map[string]any{"artifactType": api.ArtifactTypeBase})
	if a := s.put(repo, tag, m); a.status != 201 {
		s.t.Fatalf("put: %v", a)
	}
	return want.Aggregate, identity.Sum(m)
}

// get reads a JSON answer.
func get[T any](s *server, path string) (v T) {
	s.t.Helper()
	a := s.want(200, "GET", path, nil)
	if err := json.Unmarshal(a.body, &v); err != nil {
		s.t.Fatalf("%s: %v in %s", path, err, a.body)
	}
	return v
}

func TestFindByBytes(t *testing.T) {
	s := newServer(t)
	agg, one := s.base("team/model", "v1", "model", "a", "b", "c")
	agg2, two := s.base("lab/other-name", "v7", "weights", "c", "a", "b")
	if agg != agg2 {
		t.Fatal("the same bytes have two aggregates")
	}
	base := get[api.Base](s, api.PathBase(agg))
	if base.Identity.Aggregate != agg || base.Identity.ShardCount != 3 || len(base.Packagings) != 1 {
		t.Fatalf("base: %+v", base)
	}
	held := base.Packagings[0].Manifests
	if len(held) != 2 || held[0].Digest != two || held[1].Digest != one || held[1].Tags[0] != "v1" {
		t.Fatalf("held: %+v", held)
	}
	list := get[api.BaseList](s, api.PathBases)
	if len(list.Bases) != 1 || list.Bases[0].Aggregate != agg || list.Next != "" {
		t.Fatalf("bases: %+v", list)
	}
	m := get[identity.Manifest](s, api.PathBaseManifest(agg)+"?repo=team/model")
	if m.Aggregate != agg || m.Shards[0].Filename != "model-0.safetensors" {
		t.Fatalf("manifest: %+v", m)
	}
	if m := get[identity.Manifest](s, api.PathBaseManifest(agg)); m.Shards[0].Filename != "weights-0.safetensors" {
		t.Fatalf("default is not the newest: %+v", m)
	}
	if a := s.want(404, "GET", api.PathBaseManifest(agg)+"?repo=no/such", nil); a.code() != api.CodeAggregateUnknown {
		t.Fatal(a)
	}
}

// A fault of the program is told to whoever runs it, and breaks off the one answer.
func TestPanicIsLoggedAndCounted(t *testing.T) {
	s := newServer(t)
	seen := make(chan registry.Served, 2)
	s.restart(func(c *registry.Config) {
		c.Observe = func(did registry.Served) { seen <- did }
		c.Metrics = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("out of cheese") })
	})
	if res, err := wire.Get(s.http.URL + api.PathMetrics); err == nil {
		res.Body.Close()
		t.Error("it was answered:", res)
	}
	if did := <-seen; !errors.Is(did.Err, registry.ErrPanic) || did.Route != api.PathMetrics {
		t.Errorf("%+v", did)
	}
	s.want(200, "GET", api.PathReady, nil)
	s.stop()
	for _, word := range []string{"level=ERROR", "method=GET", "path=/metrics", "out of cheese", "registry_test.go:"} {
		if !strings.Contains(s.log.String(), word) {
			t.Errorf("no %q in the log:\n%s", word, s.log)
		}
	}
}
