package adapters

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// withDevice runs the tests with whatever device there is.
var withDevice = func(run func() int) int { return run() }

func TestMain(m *testing.M) {
	os.Exit(withDevice(func() int {
		code := m.Run()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		return code
	}))
}

// world is a registry that holds a base and what was made from it, and that base in memory.
type world struct {
	t     *testing.T
	host  string
	c     *client.Client
	dir   string
	base  identity.Manifest
	held  *gpuload.Resident
	opens atomic.Int64 // targets

	// spoil has one byte of a blob be another; stall keeps the answer back until the channel is closed.
	spoil atomic.Pointer[identity.Digest]
	stall atomic.Pointer[stalled]
	blobs atomic.Int64 // GETs of the bytes of blobs
}

type stalled struct {
	digest  identity.Digest
	reached chan struct{} // gets one for each request
	until   chan struct{}
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	w := &world{t: t, dir: t.TempDir()}
	next := testregistry.New(t)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.serve(next, rw, r) }))
	t.Cleanup(srv.Close)
	w.host = strings.TrimPrefix(srv.URL, "http://")
	w.c = must(w.dial(w.host, true))
	t.Cleanup(w.c.Close)
	base := filepath.Join(w.dir, "base")
	files(t, base, map[string][]byte{"model.safetensors": weights(200, 300_000), "config.json": []byte("{}")})
	w.push(base, "team/base")
	src := must(gpuload.OpenDir(base, false, nil))
	defer src.Close()
	plan := must(gpuload.NewPlan(t.Context(), src, []string{"model.safetensors"}, gpuload.Want{}))
	w.held = must(gpuload.Load(t.Context(), plan, src, new(hostmem.Target), gpuload.Options{Reserve: -1}))
	w.base = w.held.Manifest()
	t.Cleanup(func() { w.held.Close(context.Background()) })
	return w
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// serve is the registry, with the faults of a network before it.
func (w *world) serve(next http.Handler, rw http.ResponseWriter, r *http.Request) {
	_, blob, is := strings.Cut(r.URL.Path, "/blobs/")
	if !is || r.Method != http.MethodGet {
		next.ServeHTTP(rw, r)
		return
	}
	w.blobs.Add(1)
	if s := w.stall.Load(); s != nil && s.digest.String() == blob {
		s.reached <- struct{}{}
		select {
		case <-s.until:
		case <-r.Context().Done():
			return
		}
	}
	if d := w.spoil.Load(); d != nil && d.String() == blob {
		rw = &spoiling{ResponseWriter: rw}
	}
	next.ServeHTTP(rw, r)
}

// spoiling changes the last byte of every write of some length.
type spoiling struct{ http.ResponseWriter }

func (s *spoiling) Write(b []byte) (int, error) {
	if len(b) > 1000 {
		b = bytes.Clone(b)
		b[len(b)-1] ^= 1
	}
	return s.ResponseWriter.Write(b)
}

func (w *world) dial(host string, _ bool) (*client.Client, error) {
	return client.New(host, client.Options{Backoff: time.Millisecond})
}

// push makes a folder a base in a repository.
func (w *world) push(dir, repo string) transfer.Pushed {
	w.t.Helper()
	p, err := transfer.Push(w.t.Context(), w.c, dir, client.Reference{Host: w.host, Repo: repo, Tag: "v1"},
		transfer.PushOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// adapter writes a folder as Kiln does, of n bytes of weights. A nil base is not recorded.
func (w *world) adapter(name string, seed byte, n int, base *identity.Manifest) string {
	w.t.Helper()
	dir := filepath.Join(w.dir, fmt.Sprint(name, "-", seed), name)
	text, config := weights(seed, n), testartifact.Config("example/base")
	var none identity.Digest
	m := documents.NewAdapterManifest(name, identity.Sum(text), identity.Sum(config), none, identity.Manifest{})
	if base != nil {
		m.Shards = *base
	}
	files(w.t, dir, map[string][]byte{documents.AdapterWeightsFile: text, documents.AdapterConfigFile: config,
		documents.AdapterManifestFile: must(m.Document())})
	return dir
}

// send pushes the folder of an adapter to a repository.
func (w *world) send(dir, repo string, base artifact.Base) artifact.Pushed {
	w.t.Helper()
	a, err := artifact.Read(w.t.Context(), api.KindAdapter, dir, artifact.Options{Legacy: true, Base: base})
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := a.Push(w.t.Context(), w.c, client.Reference{Host: w.host, Repo: repo, Tag: filepath.Base(dir)}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// made is an adapter of the base in the registry, of n bytes of weights.
func (w *world) made(name string, seed byte, n int) artifact.Pushed {
	w.t.Helper()
	return w.send(w.adapter(name, seed, n, &w.base), "team/"+name, artifact.Base{})
}

// bind states in the registry that an artifact was made from a base.
func (w *world) bind(repo string, d identity.Digest, base identity.Aggregate, by string) {
	w.t.Helper()
	ctx := w.t.Context()
	f := must(artifact.FindManifest(ctx, w.c, client.Reference{Host: w.host, Repo: repo, Digest: d}))
	words := artifact.Words{By: by, Reason: "a test", At: "2026-01-02T03:04:05Z"}
	a := must(artifact.Bind(f, artifact.Base{Aggregate: base}, words))
	must(a.Push(ctx, w.c, client.Reference{Host: w.host, Repo: repo}, nil))
}

func files(t *testing.T, dir string, all map[string][]byte) {
	t.Helper()
	err := os.MkdirAll(dir, 0o755)
	for name, b := range all {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), b, 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// weights is a safetensors file of one LoRA pair with n bytes of tensors, n even.
func weights(seed byte, n int) []byte {
	const module = `"base_model.model.model.layers.0.self_attn.q_proj.lora_`
	header := fmt.Sprintf(`{%sA.weight":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[2]d]},`+
		`%[1]sB.weight":{"dtype":"U8","shape":[%[2]d],"data_offsets":[%[2]d,%[3]d]}}`, module, n/2, n)
	b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	for i := range n {
		b = append(b, seed+byte(i)+byte(i>>8))
	}
	return b
}

// data are the bytes of the tensors of such a file.
func data(seed byte, n int) []byte {
	b := weights(seed, n)
	return b[len(b)-n:]
}

// set is a set of adapters of the base, closed when the test ends.
func (w *world) set(change ...func(*Options)) *Set {
	o := Options{Base: w.base.Aggregate, Registry: w.host, Dial: w.dial, Load: gpuload.Options{Reserve: -1},
		Target: func() (gpuload.Target, error) { w.opens.Add(1); return new(hostmem.Target), nil }}
	for _, f := range change {
		f(&o)
	}
	s := New(o)
	w.t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			w.t.Error(err)
		}
	})
	return s
}

// content reads what a lease gives: of the host the bytes, and of a device the digests of what it holds.
func content(t *testing.T, l *Lease) []byte {
	t.Helper()
	if err := l.Weights.Audit(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if l.Handles[0].Kind != hostmem.KindFile {
		return nil
	}
	return bytesOf(l)
}

// bytesOf are those that the host holds.
func bytesOf(l *Lease) []byte {
	h := l.Handles[0]
	return must(io.ReadAll(io.NewSectionReader(h.File, 0, h.Size)))
}

// attached checks that an adapter can be attached and holds these bytes.
func attached(t *testing.T, s *Set, d identity.Digest, want []byte) {
	t.Helper()
	l, err := s.Attach(d)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if got := content(t, l); got != nil && !bytes.Equal(got, want) {
		t.Error("the adapter holds other bytes")
	}
	if n := l.Weights.Tensors()[1].NBytes; n != uint64(len(want)/2) || l.Adapter.Digest != d {
		t.Errorf("%+v, %d bytes", l.Adapter, n)
	}
}

// memory is what all files in memory of this process have.
func memory(t *testing.T) (n int64) {
	t.Helper()
	for _, e := range must(os.ReadDir("/proc/self/fd")) {
		path := filepath.Join("/proc/self/fd", e.Name())
		if to, err := os.Readlink(path); err == nil && strings.HasPrefix(to, "/memfd:kiln-") {
			n += must(os.Stat(path)).Size() + 1
		}
	}
	return n
}
