package resident_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/adapters"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// bench is a holder that takes adapters, and a registry to take them from.
type bench struct {
	*running
	attach.Client
	base identity.Manifest
	is   identity.Aggregate
	host string
}

func dial(host string, _ bool) (*client.Client, error) {
	return client.New(host, client.Options{Backoff: time.Millisecond})
}

// takesAdapters starts a holder. In front of the registry stands whatever wrap makes.
func takesAdapters(t *testing.T, wrap func(http.Handler) http.Handler, change func(*adapters.Options)) *bench {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	srv := httptest.NewServer(wrap(testregistry.New(t)))
	t.Cleanup(srv.Close)
	b := &bench{host: strings.TrimPrefix(srv.URL, "http://")}
	s := &resident.Server{Backend: "host", Model: "demo", Debug: true, Socket: filepath.Join(t.TempDir(), "s", "kiln.sock")}
	load := loadModel(t)
	b.running = start(t, s, func(ctx context.Context) (resident.Held, error) {
		h, err := load(ctx)
		if err != nil {
			return h, err
		}
		o := adapters.Options{Base: h.Weights.Manifest().Aggregate, Registry: b.host, Dial: dial,
			Load: gpuload.Options{Reserve: -1}, Target: func() (gpuload.Target, error) { return new(hostmem.Target), nil }}
		change(&o)
		h.Adapters = adapters.New(o)
		return h, nil
	})
	close(b.load)
	b.weights = <-b.held
	b.Client, b.base, b.is = attach.Client{Socket: s.Socket}, b.weights.Manifest(), b.weights.Manifest().Aggregate
	return b
}

func asIs(h http.Handler) http.Handler { return h }

func nothing(*adapters.Options) {}

// folder is an adapter of a base on disk.
func (b *bench) folder(t *testing.T, name string, seed byte, base *identity.Manifest) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := testartifact.Adapter(dir, seed, base); err != nil {
		t.Fatal(err)
	}
	return dir
}

// push makes it one of the registry.
func (b *bench) push(t *testing.T, dir string) artifact.Pushed {
	t.Helper()
	a, err := artifact.Read(t.Context(), api.KindAdapter, dir, artifact.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := dial(b.host, true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, err := a.Push(t.Context(), c, client.Reference{Host: b.host, Repo: "team/" + filepath.Base(dir), Tag: "v1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// code checks which code an error has.
func code(t *testing.T, what string, err error, want string) {
	t.Helper()
	if !errors.Is(err, attach.Refuse(want, "")) {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
}

func TestAdapters(t *testing.T) {
	b, ctx := takesAdapters(t, asIs, nothing), t.Context()
	dir := b.folder(t, "sql", 7, &b.base)
	p := b.push(t, dir)
	base, err := b.Attach(ctx, b.is)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	generation := uint64(1)
	for i, name := range []string{"sql", p.Digest.String(), p.Reference, dir} {
		l, err := b.Load(ctx, b.is, name)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		generation++
		if l.Digest != p.Digest || l.Name != "sql" || l.Before || l.Generation != generation || len(l.Files) != 2 ||
			l.Evidence != "document" || l.From == "" || l.StatedAt == "" || l.Bytes < 16 {
			t.Errorf("%s: %+v", name, l)
		}
		if e := <-base.Events(); e.Kind != attach.EventGeneration || e.Generation != generation {
			t.Errorf("%s: event %+v", name, e)
		}
		b.use(t, p.Digest, dir)
		if l, err = b.Load(ctx, b.is, name); err != nil || !l.Before || l.Generation != generation {
			t.Errorf("%s again: %+v, %v", name, l, err)
		}
		if a := b.ask(t, "GET", "/v1/debug/model-state", ""); !strings.Contains(a.body, `"loaded_adapters":["sql"]`) {
			t.Errorf("debug state: %s", a.body)
		}
		if err := b.Unload(ctx, b.is, p.Digest); err != nil {
			t.Error(err)
		}
		generation++
		if e := <-base.Events(); e.Generation != generation {
			t.Errorf("%d: event %+v", i, e)
		}
	}
	code(t, "unloaded", b.Unload(ctx, b.is, p.Digest), attach.CodeAdapterUnknown)
	_, err = b.AttachAdapter(ctx, b.is, p.Digest)
	code(t, "gone", err, attach.CodeAdapterUnknown)
	if list, err := b.Adapters(ctx, b.is); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	for i, tensor := range base.Document.Tensors {
		if got, want := string(base.Bytes(tensor)), string([]byte{1, 2, 3, byte(i)}); got != want {
			t.Errorf("the base has other bytes: %q", got)
		}
	}
}

// use attaches to an adapter and reads what is kept with it.
func (b *bench) use(t *testing.T, d identity.Digest, dir string) {
	t.Helper()
	ctx := t.Context()
	a, err := b.AttachAdapter(ctx, b.is, d)
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Blocks) != 1 || string(a.Blocks[0].Data) != strings.Repeat("\x07", 16) || a.Document.Adapter.Name != "sql" {
		t.Errorf("%+v, %q", a.Document.Adapter, a.Blocks[0].Data)
	}
	code(t, "in use", b.Unload(ctx, b.is, d), attach.CodeAdapterInUse)
	if list, err := b.Adapters(ctx, b.is); err != nil || len(list) != 1 || list[0].Leases != 1 || list[0].Digest != d {
		t.Errorf("%+v, %v", list, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	for s, err := b.Status(ctx); err != nil || s.Adapters[0].Leases > 0; s, err = b.Status(ctx) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{documents.AdapterConfigFile, documents.AdapterManifestFile} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := b.AdapterFile(ctx, b.is, d, name); err != nil || string(got) != string(want) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"none", "../../x", documents.AdapterWeightsFile} {
		_, err = b.AdapterFile(ctx, b.is, d, name)
		code(t, name, err, attach.CodeAdapterUnknown)
	}
	if found, err := b.Audit(ctx, b.is); err != nil || found.Aggregate != b.is {
		t.Errorf("audit: %+v, %v", found, err)
	}
}

// TestAdapterCodes: each refusal has its code and its status, and nothing comes of it.
func TestAdapterCodes(t *testing.T) {
	few := func(o *adapters.Options) { o.Most = 1 }
	b, ctx := takesAdapters(t, asIs, few), t.Context()
	other, err := identity.New([]identity.Shard{{Filename: "x.safetensors", Size: 1}})
	if err != nil {
		t.Fatal(err)
	}
	b.push(t, b.folder(t, "twin", 1, &b.base))
	second := filepath.Join(t.TempDir(), "second", "twin")
	if err := testartifact.Adapter(second, 2, &b.base); err != nil {
		t.Fatal(err)
	}
	b.push(t, second)
	spoilt := b.folder(t, "spoilt", 4, &b.base)
	if err := os.WriteFile(filepath.Join(spoilt, documents.AdapterWeightsFile), testartifact.Weights(5), 0o666); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ adapter, code string }{
		"no name":         {"", attach.CodeBadRequest},
		"unknown":         {"nobody", attach.CodeAdapterUnknown},
		"of another base": {b.folder(t, "far", 3, &other), attach.CodeAdapterOtherBase},
		"states none":     {b.folder(t, "none", 3, nil), attach.CodeAdapterOtherBase},
		"several":         {"twin", attach.CodeAdapterAmbiguous},
		"other bytes":     {spoilt, attach.CodeAdapterRefused},
		"nobody answers":  {"127.0.0.1:1/team/sql:v1", attach.CodeAdapterRegistry},
	} {
		_, err := b.Load(ctx, b.is, tt.adapter)
		code(t, name, err, tt.code)
	}
	_, err = b.Load(ctx, other.Aggregate, second)
	code(t, "another base is held", err, attach.CodeOtherBase)
	if g, err := b.Status(ctx); err != nil || g.Generation != 1 {
		t.Errorf("%+v, %v", g, err)
	}
	for body, status := range map[string]int{"": 400, "{}": 400, `{"adapter":1}`: 400, `{"adapter":"a","adapter":"b"}`: 400,
		`{"adapter":"a","b":1}`: 400, `{"adapter":"nobody"}`: 404, `{"adapter":"` + strings.Repeat("x", 70_000) + `"}`: 400} {
		if got := b.post(t, body); got != status {
			t.Errorf("%.40s: status %d, want %d", body, got, status)
		}
	}
	l, err := b.Load(ctx, b.is, second)
	if err != nil {
		t.Fatal(err)
	}
	a, err := b.AttachAdapter(ctx, b.is, l.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	_, err = b.Load(ctx, b.is, b.folder(t, "more", 9, &b.base))
	code(t, "no room", err, attach.CodeNoMemory)
	now, err := b.Generation(ctx, b.is, l.Generation-1)
	if err != nil || now != l.Generation {
		t.Errorf("generation %d, %v", now, err)
	}
}

// post sends a body as it is.
func (b *bench) post(t *testing.T, body string) int {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", b.Socket)
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://x"+attach.PathAdapters(b.is),
		strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Error(err)
	}
	return resp.StatusCode
}

// TestAdaptersEnd: a load whose client has gone leaves nothing; with the base go all adapters, and the loads that run.
func TestAdaptersEnd(t *testing.T) {
	reached, stuck := make(chan struct{}, 100), make(chan struct{})
	weights := identity.Sum(testartifact.Weights(8)).String()
	b := takesAdapters(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, weights) {
				reached <- struct{}{}
				select {
				case <-stuck:
				case <-r.Context().Done():
				}
				return
			}
			h.ServeHTTP(w, r)
		})
	}, nothing)
	defer close(stuck)
	b.push(t, b.folder(t, "slow", 8, &b.base))
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { _, err := b.Load(ctx, b.is, "slow"); ended <- err }()
	<-reached
	leave()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("who left got %v", err)
	}
	fast := b.folder(t, "fast", 9, &b.base)
	l, err := b.Load(t.Context(), b.is, fast)
	if err != nil {
		t.Fatal(err)
	}
	a, err := b.AttachAdapter(t.Context(), b.is, l.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	go func() { _, err := b.Load(t.Context(), b.is, "slow"); ended <- err }()
	<-reached
	stopped := make(chan error)
	go func() { stopped <- b.stop() }()
	if e := <-a.Events(); e.Kind != attach.EventDraining {
		t.Errorf("event %+v", e)
	}
	code(t, "the load that ran", <-ended, attach.CodeDraining)
	if got := string(a.Blocks[0].Data); got != strings.Repeat("\x09", 16) {
		t.Errorf("a lease holds %q", got)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if s := b.weights.State(); s != gpuload.Freed {
		t.Errorf("the base is %s", s)
	}
}
