package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/metrics"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// wire makes the requests of the tests. The default client's connections are closed by every httptest.Server that is.
var wire = &http.Client{Transport: &http.Transport{}}

// server is a registry with metrics, on a real store and a real index, behind a real listener.
type server struct {
	t   *testing.T
	reg *registry.Registry
	url string
}

func newServer(t *testing.T, m *metrics.Metrics) *server {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "data")
	if err := fsstore.Init(dir); err != nil {
		t.Fatal(err)
	}
	return serve(t, dir, m, false)
}

// serve opens a store that is there.
func serve(t *testing.T, dir string, m *metrics.Metrics, readOnly bool) *server {
	t.Helper()
	store, err := fsstore.Open(dir, fsstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	kv, err := boltkv.Open(filepath.Join(dir, "index.db"), boltkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	st := m.Store(store)
	ix, err := index.New(t.Context(), m.KV(kv))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ix.Close() })
	reg, err := registry.New(registry.Config{
		Store: st, Refs: st, Uploads: st, Index: ix, Access: access.Open(), Log: slog.New(slog.DiscardHandler),
		Observe: m.Observe, Metrics: m.Handler(), ReadOnly: readOnly,
	})
	if err != nil {
		t.Fatal(err)
	}
	m.Watch(reg)
	if err := reg.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(reg)
	t.Cleanup(web.Close)
	return &server{t, reg, web.URL}
}

func (s *server) do(method, path string, body []byte, header ...string) (*http.Response, []byte) {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := wire.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return res, b
}

// sample is one line of the metrics: name and labels as they stand there, and a value.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

var pair = regexp.MustCompile(`(\w+)="([^"]*)"`)

// read returns the text of the metrics, and what it says.
func (s *server) read() (text string, samples []sample) {
	s.t.Helper()
	res, b := s.do("GET", api.PathMetrics, nil, "Accept-Encoding", "gzip")
	if res.StatusCode != 200 || res.Header.Get("Content-Encoding") != "" {
		s.t.Fatalf("%d %v %s", res.StatusCode, res.Header, b)
	}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		end := strings.LastIndexByte(line, ' ')
		v, err := strconv.ParseFloat(strings.TrimSpace(line[end+1:]), 64)
		if err != nil {
			s.t.Fatalf("%q: %v", line, err)
		}
		name, labels, _ := strings.Cut(line[:end], "{")
		l := sample{name, map[string]string{}, v}
		for _, m := range pair.FindAllStringSubmatch(labels, -1) {
			l.labels[m[1]] = m[2]
		}
		samples = append(samples, l)
	}
	return string(b), samples
}

// value returns the value of the first sample of a name that has these labels, name=value; 0 if there is none.
func value(samples []sample, name string, labels ...string) float64 {
	for _, s := range samples {
		lacks := func(l string) bool {
			k, v, _ := strings.Cut(l, "=")
			return s.labels[k] != v
		}
		if s.name == name && !slices.ContainsFunc(labels, lacks) {
			return s.value
		}
	}
	return 0
}

const requests = "kiln_http_request_duration_seconds_count"

func quiet(store string) *metrics.Metrics {
	return metrics.New("test", store, slog.New(slog.DiscardHandler))
}

func TestWhatIsCounted(t *testing.T) {
	s := newServer(t, quiet("folder"))
	body := bytes.Repeat([]byte("x"), 3<<20)
	d := identity.Sum(body)
	s.do("POST", api.PathUploads("secret-team/model")+"?digest="+d.String(), body)
	s.do("GET", api.PathBlob("secret-team/model", d), nil)
	s.do("POST", api.PathUploads("secret-team/model"), nil)
	empty := identity.Sum([]byte("{}"))
	s.do("POST", api.PathUploads("secret-team/model")+"?digest="+empty.String(), []byte("{}"))
	m := fmt.Sprintf(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":%q,"size":2},`+
		`"layers":[]}`, empty)
	if res, b := s.do("PUT", api.PathManifest("secret-team/model", "v1"), []byte(m),
		"Content-Type", "application/vnd.oci.image.manifest.v1+json"); res.StatusCode != 201 {
		t.Fatalf("%d %s", res.StatusCode, b)
	}
	if _, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil {
		t.Fatal(err)
	}
	text, f := s.read()
	for _, c := range []struct {
		at, most float64
		name     string
		labels   []string
	}{
		{1, 1, "kiln_info", []string{"store=folder", "version=test"}},
		{1, 1, "kiln_ready", nil},
		{3 << 20, 3<<20 + 1e4, "kiln_http_received_bytes_total", nil},
		{3 << 20, 3<<20 + 1e4, "kiln_http_sent_bytes_total", nil},
		{1, 1, "kiln_http_requests_running", nil}, // this one
		{1, 1, requests, []string{"route=/v2/{name}/blobs/{digest}", "method=GET", "class=2xx"}},
		{3, 3, requests, []string{"route=/v2/{name}/blobs/uploads/", "method=POST", "class=2xx"}},
		{1, 1, "kiln_uploads_open", nil},
		{1, 1e9, "kiln_refs_position", nil},
		{value(f, "kiln_refs_position"), value(f, "kiln_refs_position"), "kiln_index_position", nil},
		{5, 1e6, "kiln_index_duration_seconds_count", []string{"transaction=view"}},
		{3, 1e6, "kiln_index_duration_seconds_count", []string{"transaction=update"}},
		{1e9, 1e11, "kiln_gc_last_end_timestamp_seconds", nil},
		{1, 1, "kiln_gc_last_blobs", []string{"state=held"}},
		{3 << 20, 3 << 20, "kiln_gc_last_bytes", []string{"state=leased"}},
		{1, 1, "kiln_gc_runs_total", []string{"result=ended"}},
		{0, 0, "kiln_gc_runs_total", []string{"result=failed"}},
		{0, 0, "kiln_gc_removed_blobs_total", nil},
		{2, 100, "kiln_scrub_read_blobs_total", nil},
		{1e9, 1e11, "kiln_scrub_end_timestamp_seconds", nil},
		{2, 100, "kiln_scrub_blobs", nil},
		{0, 0, "kiln_scrub_findings_total", []string{"verdict=damaged"}},
		{0, 0, "kiln_scrub_midstates_total", nil},
		{0, 0, "kiln_unusable_blobs", []string{"verdict=damaged"}},
		{0, 0, "kiln_unusable_blobs", []string{"verdict=unreadable"}},
		{1e6, 1e15, "process_resident_memory_bytes", nil},
		{1, 1e6, "go_goroutines", nil},
	} {
		if got := value(f, c.name, c.labels...); got < c.at || got > c.most {
			t.Errorf("%s %v: %v, want %v to %v", c.name, c.labels, got, c.at, c.most)
		}
	}
	if n := strings.Count(text, "\nkiln_unusable_blobs{verdict="); n != 2 {
		t.Errorf("unusable blobs have %d samples, want 2", n)
	}
	if strings.Contains(text, "secret") {
		t.Error("a repository is named")
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if err != nil {
		t.Error(err)
	}
}

// A damaged blob of a registry that changes nothing stays where it is, and is counted as such.
func TestDamagedInPlace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := fsstore.Init(dir); err != nil {
		t.Fatal(err)
	}
	body := []byte("right")
	d := identity.Sum(body)
	t.Run("push", func(t *testing.T) {
		s := serve(t, dir, quiet("folder"), false)
		if res, b := s.do("POST", api.PathUploads("team/model")+"?digest="+d.String(), body); res.StatusCode != 201 {
			t.Fatalf("%d %s", res.StatusCode, b)
		}
	})
	path := filepath.Join(dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("wrong"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := serve(t, dir, quiet("folder"), true)
	if _, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil {
		t.Fatal(err)
	}
	_, f := s.read()
	for name, want := range map[string]float64{"damaged": 1, "unreadable": 0} {
		if got := value(f, "kiln_unusable_blobs", "verdict="+name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// The number of series does not grow with what clients ask for.
func TestLabelsAreBounded(t *testing.T) {
	s := newServer(t, quiet("s3"))
	random := rand.New(rand.NewPCG(1, 2))
	pieces := []string{
		"v2", "v1", "secret", "blobs", "manifests", "uploads", "tags", "list", "referrers", "bases", "health",
		"sha256:" + strings.Repeat("0", 64), "%2e", "..", "",
	}
	methods := []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "X%d"}
	asked := map[string]bool{}
	for i := range 1000 {
		var path strings.Builder
		for range 1 + random.IntN(6) {
			path.WriteString("/" + pieces[random.IntN(len(pieces))])
		}
		fmt.Fprintf(&path, "%d", i)
		method := strings.ReplaceAll(methods[random.IntN(len(methods))], "%d", fmt.Sprint(i))
		s.do(method, path.String(), nil)
		asked[path.String()] = true
	}
	if len(asked) != 1000 {
		t.Fatal("only", len(asked), "paths")
	}
	text, f := s.read()
	if strings.Contains(text, "secret") || strings.Contains(text, "PROPFIND") {
		t.Error("what a client sent is a label")
	}
	values := map[string]map[string]bool{}
	series := 0
	for _, l := range f {
		if !strings.HasPrefix(l.name, "kiln_") {
			continue
		}
		series++
		for k, v := range l.labels {
			if values[k] == nil {
				values[k] = map[string]bool{}
			}
			values[k][v] = true
		}
	}
	for label, most := range map[string]int{"route": 30, "method": 7, "class": 6, "reason": 11, "op": 19} {
		if n := len(values[label]); n == 0 || n > most {
			t.Errorf("%s has %d values: %v", label, n, values[label])
		}
	}
	if series > 1000 {
		t.Errorf("%d series", series)
	}
}

func TestFailures(t *testing.T) {
	m := quiet("folder")
	s := newServer(t, m)
	for _, d := range []registry.Served{
		{Status: 503, Err: fmt.Errorf("read: %w", blobstore.ErrUnavailable)}, {Status: 507, Err: api.ErrStoreFull},
		{Status: 507, Err: blobstore.ErrNoSpace}, {Status: 500, Err: fmt.Errorf("x")}, {Status: 404, Err: api.ErrBlobUnknown},
		{Status: 499, Err: fmt.Errorf("%w: x", registry.ErrClientGone)}, {Status: 200},
		{Status: 206, Err: fmt.Errorf("%w: write", registry.ErrClientGone)}, {Status: 200, Err: fmt.Errorf("disk")}, {Status: 404, Err: blobstore.ErrQuarantined},
		{Status: 200, Err: fmt.Errorf("in the middle: %w", blobstore.ErrDamaged)}, {Status: 0, Method: "\xff"},
		{Method: "GET", Err: fmt.Errorf("%w: x", registry.ErrPanic)},
	} {
		m.Observe(d)
	}
	_, f := s.read()
	for reason, want := range map[string]float64{"store_unavailable": 1, "store_full": 2, "other": 2, "client_gone": 2, "blob_damaged": 1,
		"store_damaged": 1, "index_damaged": 0, "panic": 1} {
		if got := value(f, "kiln_request_failures_total", "reason="+reason); got != want {
			t.Errorf("%s: %v, want %v", reason, got, want)
		}
	}
	if n := value(f, "kiln_store_errors_total", "op=read"); n != 2 {
		t.Error("blobs that broke off on their way:", n)
	}
	if n := value(f, requests, "class=none", "method=other"); n != 1 {
		t.Error("a request without a status:", n)
	}
}

// brokenStore fails at everything, in a way that is its own fault or not.
type brokenStore struct {
	blobstore.Engine
	err error
}

func (b brokenStore) Stat(context.Context, identity.Digest) (blobstore.Info, error) {
	return blobstore.Info{}, b.err
}

// What a store fails at is counted, and not what it rightly says no to, nor what its caller gave up.
func TestStoreErrors(t *testing.T) {
	m := quiet("folder")
	s := newServer(t, m)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx context.Context
		err error
	}{
		{t.Context(), fmt.Errorf("x: %w", blobstore.ErrUnavailable)}, {t.Context(), errors.New("disk")}, {t.Context(), nil},
		{t.Context(), blobstore.ErrNotFound}, {t.Context(), blobstore.ErrQuarantined}, {ended, context.Canceled},
	} {
		if _, err := m.Store(brokenStore{err: c.err}).Stat(c.ctx, identity.Digest{}); err != c.err {
			t.Error(err)
		}
	}
	_, f := s.read()
	for op, want := range map[string]float64{"stat": 2, "open": 0, "commit": 0, "put_refs": 0, "sweep": 0} {
		if got := value(f, "kiln_store_errors_total", "op="+op); got != want {
			t.Errorf("%s: %v, want %v", op, got, want)
		}
	}
}

// A store that is counted has the parts that it had.
func TestStoreKeepsItsParts(t *testing.T) {
	dir := t.TempDir()
	if err := fsstore.Init(dir); err != nil {
		t.Fatal(err)
	}
	store, err := fsstore.Open(dir, fsstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	st := quiet("folder").Store(store)
	_, aside := st.(blobstore.Quarantine)
	_, segments := st.(blobstore.Segments)
	_, counted := st.(*fsstore.Store)
	_, losses := st.(blobstore.Losses)
	if !aside || !segments || !losses || counted {
		t.Error("a folder:", aside, segments, losses, counted)
	}
	st = quiet("s3").Store(new(s3store.Store))
	_, aside = st.(blobstore.Quarantine)
	_, segments = st.(blobstore.Segments)
	_, sweeps := st.(blobstore.Sweeper)
	_, links := st.(blobstore.Linker)
	_, counted = st.(*s3store.Store)
	_, losses = st.(blobstore.Losses)
	if !aside || !segments || !sweeps || !links || !losses || counted {
		t.Error("a bucket:", aside, segments, sweeps, links, losses, counted)
	}
}

func BenchmarkObserve(b *testing.B) {
	m := quiet("folder")
	d := registry.Served{Route: "/v2/{name}/blobs/{digest}", Method: "GET", Status: 200, Took: 1e6}
	for b.Loop() {
		m.Observe(d)
	}
}
