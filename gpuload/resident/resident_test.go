package resident_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// loadModel loads a model of two small shards into host memory.
func loadModel(t *testing.T) func(context.Context) (resident.Held, error) {
	t.Helper()
	dir := t.TempDir()
	names := []string{"a.safetensors", "b.safetensors"}
	for i, name := range names {
		head := `{"` + name[:1] + `":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
		if err := os.WriteFile(filepath.Join(dir, name), append(b, 1, 2, 3, byte(i)), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	load := loadFolder(dir, names)
	return func(ctx context.Context) (resident.Held, error) {
		h, err := load(ctx)
		layers := uint64(32)
		h.Path, h.Config = "/models/demo", resident.Config{Layers: &layers}
		return h, err
	}
}

// loadFolder loads files of a folder into host memory.
func loadFolder(dir string, names []string) func(context.Context) (resident.Held, error) {
	return func(ctx context.Context) (h resident.Held, err error) {
		src, err := gpuload.OpenDir(dir, false, nil)
		if err != nil {
			return h, err
		}
		defer src.Close()
		p, err := gpuload.NewPlan(ctx, src, names, gpuload.Want{})
		if err != nil {
			return h, err
		}
		h.At = time.Now()
		h.Weights, err = gpuload.Load(ctx, p, src, &hostmem.Target{}, gpuload.Options{})
		return h, err
	}
}

// running is a server under test.
type running struct {
	url  string
	stop func() error // ends it and waits
	wait func() error // returns what Run returned
	load chan struct{}
	held chan *gpuload.Resident

	weights *gpuload.Resident // set by attached
}

// start runs s. The load begins when load is closed; held gives what was loaded.
func start(t *testing.T, s *resident.Server, load func(context.Context) (resident.Held, error)) *running {
	t.Helper()
	s.Drain = 10 * time.Second
	l, err := resident.Listen(t.Context(), "127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{url: "http://" + l.Addr().String(), load: make(chan struct{}), held: make(chan *gpuload.Resident, 1)}
	ended := make(chan error, 1)
	go func() {
		ended <- s.Run(ctx, l, func(ctx context.Context) (resident.Held, error) {
			select {
			case <-r.load:
				return load(ctx)
			case <-ctx.Done():
				return resident.Held{}, context.Cause(ctx)
			}
		}, func(h resident.Held) error { r.held <- h.Weights; return nil })
	}()
	r.wait = sync.OnceValue(func() error { return <-ended })
	r.stop = func() error {
		cancel()
		return r.wait()
	}
	t.Cleanup(func() {
		r.stop()
		http.DefaultClient.CloseIdleConnections()
	})
	return r
}

type answer struct {
	status int
	header http.Header
	body   string
	json   map[string]any
}

func (r *running) ask(t *testing.T, method, path, token string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := answer{status: resp.StatusCode, header: resp.Header, body: string(b)}
	if resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("%s %s: content type %q", method, path, resp.Header.Get("Content-Type"))
	}
	if err := json.Unmarshal(b, &a.json); err != nil && method != http.MethodHead {
		t.Errorf("%s %s: %v in %q", method, path, err, b)
	}
	return a
}

func TestHealth(t *testing.T) {
	s := &resident.Server{Version: "v1", Backend: "host", Model: "demo"}
	r := start(t, s, loadModel(t))
	for _, path := range []string{"/health", "/v1/health"} {
		want := `{"status":"degraded","version":"v1","role":"resident","backend":"host","model":"demo",` +
			`"base_weight_identity":null,"checks":[{"name":"model_loaded","pass":false},{"name":"accepting_requests","pass":true}]}` + "\n"
		if a := r.ask(t, "GET", path, ""); a.status != 503 || a.body != want {
			t.Errorf("%s while loading: %d %s", path, a.status, a.body)
		}
	}
	if a := r.ask(t, "GET", "/readyz", ""); a.status != 503 {
		t.Errorf("ready while loading: %d %s", a.status, a.body)
	}
	close(r.load)
	m := (<-r.held).Manifest()
	for _, path := range []string{"/health", "/v1/health"} {
		want := `{"status":"ok","version":"v1","role":"resident","backend":"host","model":"demo",` +
			`"base_weight_identity":{"manifest_type":"kiln.base-weight-shards.v1","aggregate_algorithm":"kiln.base-model-content.v1",` +
			`"aggregate_sha256":"` + m.Aggregate.String() + `","shard_count":2,"total_size_bytes":130},` +
			`"checks":[{"name":"model_loaded","pass":true},{"name":"accepting_requests","pass":true}]}` + "\n"
		if a := r.ask(t, "GET", path, ""); a.status != 200 || a.body != want {
			t.Errorf("%s: %d %s\nwant %s", path, a.status, a.body, want)
		}
		if a := r.ask(t, "HEAD", path, ""); a.status != 200 || a.body != "" {
			t.Errorf("HEAD %s: %d %q", path, a.status, a.body)
		}
	}
	if a := r.ask(t, "GET", "/readyz", ""); a.status != 200 || a.json["ready"] != true {
		t.Errorf("not ready after loading: %d %s", a.status, a.body)
	}
	c, err := client.New(strings.TrimPrefix(r.url, "http://"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	h, err := c.Health(t.Context(), r.url+"/health")
	if err != nil || h.BaseWeightIdentity == nil || *h.BaseWeightIdentity != m.Summary() {
		t.Errorf("the client reads %+v, %v", h, err)
	}
}

func TestSynthetic(t *testing.T) {
	r := start(t, &resident.Server{Backend: "synthetic", Debug: true},
		func(context.Context) (resident.Held, error) { return resident.Held{}, nil })
	close(r.load)
	if w := <-r.held; w != nil {
		t.Fatal("a synthetic model has weights")
	}
	a := r.ask(t, "GET", "/health", "")
	if id, there := a.json["base_weight_identity"]; a.status != 200 || !there || id != nil || a.json["backend"] != "synthetic" {
		t.Errorf("%d %s", a.status, a.body)
	}
	a = r.ask(t, "GET", "/v1/debug/model-state", "")
	model := a.json["model"].(map[string]any)
	if m, there := model["base_weight_shard_manifest"]; a.status != 200 || !there || m != nil {
		t.Errorf("%d %s", a.status, a.body)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

func TestModelState(t *testing.T) {
	r := start(t, &resident.Server{Backend: "host", Model: "demo", Debug: true}, loadModel(t))
	if a := r.ask(t, "GET", "/v1/debug/model-state", ""); a.status != 200 || !strings.Contains(a.body, `"state":"loading"`) {
		t.Errorf("while loading: %d %s", a.status, a.body)
	}
	close(r.load)
	m := (<-r.held).Manifest()
	a := r.ask(t, "GET", "/v1/debug/model-state", "")
	var body struct {
		Model struct {
			Path     string          `json:"path"`
			Served   string          `json:"served_model_id"`
			Layers   int             `json:"num_layers"`
			Manifest json.RawMessage `json:"base_weight_shard_manifest"`
		} `json:"model"`
		Resident struct {
			State        string `json:"state"`
			Tensors      int    `json:"tensors"`
			Verification struct {
				Method string `json:"method"`
			} `json:"verification"`
		} `json:"resident"`
	}
	if err := json.Unmarshal([]byte(a.body), &body); err != nil || a.status != 200 {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}
	got, err := identity.Parse(body.Model.Manifest)
	if err != nil || got.Aggregate != m.Aggregate || !slices.Equal(got.Shards, m.Shards) {
		t.Errorf("manifest %s: %v", body.Model.Manifest, err)
	}
	if body.Model.Path != "/models/demo" || body.Model.Served != "demo" || body.Model.Layers != 32 ||
		body.Resident.State != "published" || body.Resident.Tensors != 2 || body.Resident.Verification.Method != "sha256-full" {
		t.Errorf("%s", a.body)
	}
	for _, member := range []string{"execution_provenance", "num_kv_heads", "backend_runtime"} {
		if _, there := a.json["model"].(map[string]any)[member]; !there {
			t.Errorf("no member %s in %s", member, a.body)
		}
	}
}

func TestModelStateDisabled(t *testing.T) {
	s := &resident.Server{}
	r := start(t, s, loadModel(t))
	a := r.ask(t, "GET", "/v1/debug/model-state", "")
	want := `{"error":"debug endpoint disabled","enable_with":"` + resident.EnableWith + `"}` + "\n"
	if a.status != 403 || a.body != want {
		t.Errorf("%d %s", a.status, a.body)
	}
	for value, want := range map[string]bool{
		"1": true, "true": true, "yes": true, "on": true, "On": true, " TRUE ": true,
		"": false, "0": false, "false": false, "2": false, "off": false,
	} {
		if resident.DebugEnabled(value) != want {
			t.Errorf("KILN_DEBUG_ENDPOINTS=%q enables: %v", value, !want)
		}
	}
}

func TestModelStateNeedsToken(t *testing.T) {
	may, mayHash := access.NewSecret()
	not, notHash := access.NewSecret()
	text, err := access.File{Version: access.FileVersion, Tokens: []access.Token{
		{Name: "ops", SHA256: mayHash, Allow: []access.Rule{{Repositories: []string{"**"}, Actions: []access.Action{access.Pull}}}},
		{Name: "ci", SHA256: notHash, Allow: []access.Rule{{Repositories: []string{"**"}, Actions: []access.Action{access.Push}}}},
	}}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tokens.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	gate, err := access.Load(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, &resident.Server{Debug: true, Gate: gate}, loadModel(t))
	close(r.load)
	<-r.held
	for name, tt := range map[string]struct {
		token  string
		status int
	}{"none": {"", 401}, "wrong": {"kiln_wrong", 401}, "push only": {not, 403}, "pull": {may, 200}} {
		a := r.ask(t, "GET", "/v1/debug/model-state", tt.token)
		if challenged := a.header.Get("WWW-Authenticate") != ""; a.status != tt.status || challenged != (a.status == 401) {
			t.Errorf("%s: %d, challenged: %v, %s", name, a.status, challenged, a.body)
		}
		if manifest := strings.Contains(a.body, "shards"); manifest != (a.status == 200) {
			t.Errorf("%s: %d with %s", name, a.status, a.body)
		}
	}
	if a := r.ask(t, "GET", "/health", ""); a.status != 200 {
		t.Errorf("health needs a token: %d", a.status)
	}
}

func TestUnknown(t *testing.T) {
	r := start(t, &resident.Server{}, loadModel(t))
	for _, tt := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/", 404}, {"GET", "/health/", 404}, {"GET", "/v1/debug", 404}, {"POST", "/nothing", 404}, {"GET", "//health", 404},
		{"POST", "/health", 405}, {"DELETE", "/readyz", 405}, {"PUT", "/v1/debug/model-state", 405},
	} {
		a := r.ask(t, tt.method, tt.path, "")
		if a.status != tt.status || a.json["error"] == "" || (a.header.Get("Allow") != "") != (tt.status == 405) {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, a.status, a.body)
		}
	}
}

func TestListen(t *testing.T) {
	for addr, public := range map[string]bool{
		"127.0.0.1:0": false, "localhost:0": false, "0.0.0.0:0": true, ":0": true,
	} {
		l, err := resident.Listen(t.Context(), addr, false)
		if errors.Is(err, resident.ErrPublic) != public || (err == nil) == public {
			t.Errorf("%s: %v", addr, err)
		}
		if err == nil {
			l.Close()
		}
		if l, err = resident.Listen(t.Context(), addr, true); err != nil {
			t.Errorf("%s, open to everyone: %v", addr, err)
		} else {
			l.Close()
		}
	}
	if _, err := resident.Listen(t.Context(), "nonsense", false); err == nil {
		t.Error("listens on nonsense")
	}
}

func TestFailedLoad(t *testing.T) {
	bad := errors.New("bad bytes")
	r := start(t, &resident.Server{}, func(context.Context) (resident.Held, error) { return resident.Held{}, bad })
	close(r.load)
	if err := r.wait(); !errors.Is(err, bad) {
		t.Errorf("%v, want %v", err, bad)
	}
	if conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://")); err == nil {
		conn.Close()
		t.Error("still listens after a failed load")
	}
}

func TestStopWhileLoading(t *testing.T) {
	r := start(t, &resident.Server{}, loadModel(t))
	r.ask(t, "GET", "/health", "")
	if err := r.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
}

// TestDrain holds a lease while the server stops: the weights stay until it is released.
func TestDrain(t *testing.T) {
	s := &resident.Server{}
	r := start(t, s, loadModel(t))
	close(r.load)
	weights := <-r.held
	handles, release, err := weights.Lease()
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error)
	go func() { stopped <- r.stop() }()
	for weights.State() == gpuload.Published {
		runtime.Gosched()
	}
	b := make([]byte, 4)
	if _, err := handles[1].File.ReadAt(b, 0); err != nil || b[3] != 1 {
		t.Errorf("read of leased weights: %v, %v", b, err)
	}
	release()
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if weights.State() != gpuload.Freed {
		t.Errorf("state %s", weights.State())
	}
}

func TestListenerFails(t *testing.T) {
	l, err := resident.Listen(t.Context(), "127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	s := &resident.Server{Drain: time.Second}
	err = s.Run(t.Context(), l, loadModel(t), func(resident.Held) error { return nil })
	if !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v, want %v", err, net.ErrClosed)
	}
}

func TestConfig(t *testing.T) {
	for text, want := range map[string]string{
		`{"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":1,"max_position_embeddings":512}`: "2 4 1 512",
		`{"num_hidden_layers":2,"num_attention_heads":4}`:                                                       "2 4 4 null",
		`{"num_hidden_layers":"x","num_attention_heads":4}`:                                                     "null 4 4 null",
		`{"text_config":{"num_hidden_layers":7}}`:                                                               "7 null null null",
		`[`: "null null null null",
	} {
		b, err := json.Marshal(resident.ParseConfig([]byte(text)))
		if err != nil {
			t.Fatal(err)
		}
		v := strings.Fields(want)
		want := `{"num_layers":` + v[0] + `,"num_attention_heads":` + v[1] + `,"num_kv_heads":` + v[2] +
			`,"max_position_embeddings":` + v[3] + `}`
		if string(b) != want {
			t.Errorf("%s: %s, want %s", text, b, want)
		}
	}
}
