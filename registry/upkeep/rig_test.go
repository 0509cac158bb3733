package upkeep_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// wire makes the requests of the tests. The default client's connections are closed by every httptest.Server that is.
var wire = &http.Client{Transport: &http.Transport{}}

// rig is a registry on a real store and a real index, behind a real listener.
type rig struct {
	t      *testing.T
	dir    string
	clock  func() time.Time
	lease  time.Duration
	verify bool
	wrap   func(blobstore.Store) blobstore.Store // what the registry sees of the store; nil: the store
	engine func(index.KV) index.KV               // what the index sees of its engine; nil: the engine
	open   func() (blobstore.Engine, error)      // nil: a store in dir
	store  blobstore.Engine
	kv     index.KV
	ix     *index.Index
	reg    *registry.Registry
	http   *httptest.Server
	log    *syncBuffer
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// newRig starts a registry. set, if it is not nil, changes the rig before that.
func newRig(t *testing.T, set func(*rig)) *rig {
	t.Helper()
	r := &rig{t: t, dir: filepath.Join(t.TempDir(), "data"), log: new(syncBuffer)}
	if set != nil {
		set(r)
	}
	if r.open == nil {
		if err := fsstore.Init(r.dir); err != nil {
			t.Fatal(err)
		}
		r.open = func() (blobstore.Engine, error) { return fsstore.Open(r.dir, fsstore.Options{}) }
	} else if err := os.Mkdir(r.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r.start()
	t.Cleanup(r.stop)
	return r
}

func (r *rig) start() {
	r.t.Helper()
	ctx := context.Background()
	var err error
	if r.store, err = r.open(); err != nil {
		r.t.Fatal(err)
	}
	kv, err := boltkv.Open(filepath.Join(r.dir, "index.db"), boltkv.Options{})
	if err != nil {
		r.t.Fatal(err)
	}
	var engine index.KV = kv
	if r.engine != nil {
		engine = r.engine(engine)
	}
	r.kv = engine
	if r.ix, err = index.New(ctx, engine); err != nil {
		r.t.Fatal(err)
	}
	var seen blobstore.Store = r.store
	if r.wrap != nil {
		seen = r.wrap(seen)
	}
	r.reg, err = registry.New(registry.Config{
		Store: seen, Refs: r.store, Uploads: r.store, Index: r.ix, Access: access.Open(), Version: "test",
		Log: slog.New(slog.NewTextHandler(r.log, nil)), Clock: r.clock, Lease: r.lease, VerifyReads: r.verify,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.reg.Replay(ctx); err != nil {
		r.t.Fatal(err)
	}
	r.http = httptest.NewServer(r.reg)
}

func (r *rig) stop() {
	r.http.Close()
	if err := r.ix.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

// do sends a request that must be answered with a status, and returns the body.
func (r *rig) do(status int, method, path string, body []byte, header ...string) []byte {
	r.t.Helper()
	b, _ := r.ask(status, method, path, body, header...)
	return b
}

// location sends a request that opens an upload, and returns where it is.
func (r *rig) location(method, path string) string {
	r.t.Helper()
	_, h := r.ask(202, method, path, nil)
	return h.Get("Location")
}

func (r *rig) ask(status int, method, path string, body []byte, header ...string) ([]byte, http.Header) {
	r.t.Helper()
	req, err := http.NewRequest(method, r.http.URL+path, bytes.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := wire.Transport.RoundTrip(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	if resp.StatusCode != status {
		r.t.Fatalf("%s %s: got %d, want %d: %s", method, path, resp.StatusCode, status, b)
	}
	return b, resp.Header
}

// blob pushes a blob.
func (r *rig) blob(repo string, b []byte) identity.Digest {
	r.t.Helper()
	d := identity.Sum(b)
	r.do(201, "POST", "/v2/"+repo+"/blobs/uploads/?digest="+d.String(), b)
	return d
}

// stored returns the blobs that the store shows.
func (r *rig) stored() map[identity.Digest]blobstore.Info {
	r.t.Helper()
	found := map[identity.Digest]blobstore.Info{}
	for i, err := range r.store.List(context.Background(), identity.Digest{}) {
		if err != nil {
			r.t.Fatal(err)
		}
		found[i.Digest] = i
	}
	return found
}

// image makes a manifest with one layer, and pushes the blobs to a repository.
func (r *rig) image(repo string, layer []byte) (manifest []byte) {
	r.t.Helper()
	config, d := r.blob(repo, []byte("{}")), r.blob(repo, layer)
	return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":"application/vnd.oci.empty.v1+json",`+
		`"digest":%q,"size":2},"layers":[{"mediaType":"application/octet-stream","digest":%q,"size":%d}]}`,
		manifestType, config, d, len(layer))
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

func (r *rig) put(status int, repo, ref string, manifest []byte) {
	r.t.Helper()
	r.do(status, "PUT", "/v2/"+repo+"/manifests/"+ref, manifest, "Content-Type", manifestType)
}

// collect runs a collection that must work.
func (r *rig) collect(t upkeep.Terms) upkeep.Collection {
	r.t.Helper()
	did, err := r.reg.Collector().Collect(context.Background(), t)
	if err != nil {
		r.t.Fatal(err)
	}
	return did
}

// hands is a clock that is set by hand.
type hands struct{ ahead atomic.Int64 }

func (h *hands) clock() time.Time { return time.Now().Add(time.Duration(h.ahead.Load())) }

func (h *hands) forward(d time.Duration) { h.ahead.Add(int64(d)) }
