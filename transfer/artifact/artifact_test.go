package artifact_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// desk is a registry that counts what is sent to it, and a client of it.
type desk struct {
	t         *testing.T
	c         *client.Client
	manifests atomic.Int64 // PUTs
	received  atomic.Int64 // bytes of blobs
	onBody    atomic.Pointer[func()]
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	d := &desk{t: t}
	next := testregistry.New(t)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") {
			d.manifests.Add(1)
		}
		r = r.WithContext(r.Context())
		r.Body = counted{r.Body, d}
		next.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	c, err := client.New(strings.TrimPrefix(srv.URL, "http://"), client.Options{Backoff: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	d.c = c
	return d
}

type counted struct {
	io.ReadCloser
	d *desk
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.d.received.Add(int64(n))
	if f := c.d.onBody.Load(); f != nil && n > 0 {
		(*f)()
	}
	return n, err
}

func (d *desk) ref(tag string) client.Reference {
	return client.Reference{Host: d.c.Host(), Repo: "team/a", Tag: tag}
}

func (d *desk) push(kind api.Kind, path string, o artifact.Options) (artifact.Pushed, error) {
	a, err := artifact.Read(d.t.Context(), kind, path, o)
	if err != nil {
		return artifact.Pushed{}, err
	}
	foretold, err := a.Manifest()
	if err != nil {
		return artifact.Pushed{}, err
	}
	p, err := a.Push(d.t.Context(), d.c, d.ref("v1"), o.Watch)
	if err == nil && p.Digest != foretold {
		d.t.Errorf("pushed as %s, foretold %s", p.Digest, foretold)
	}
	return p, err
}

func base(t *testing.T) *identity.Manifest {
	t.Helper()
	shard := identity.Shard{Filename: "model.safetensors", Size: 11, Digest: identity.Sum([]byte("base"))}
	m, err := identity.New([]identity.Shard{shard})
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

// TestPush: the same files give the same manifest from anywhere, and are found by the base, which is not there.
func TestPush(t *testing.T) {
	d, b := newDesk(t), base(t)
	dir := filepath.Join(t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, 1, b); err != nil {
		t.Fatal(err)
	}
	first, err := d.push(api.KindAdapter, dir, artifact.Options{})
	if err != nil || first.Sent == 0 || first.Files != 4 || first.Base.Aggregate != b.Aggregate {
		t.Fatalf("%+v, %v", first, err)
	}
	elsewhere := filepath.Join(t.TempDir(), "sql")
	if err := testartifact.Adapter(elsewhere, 1, b); err != nil {
		t.Fatal(err)
	}
	os.Chtimes(filepath.Join(elsewhere, documents.AdapterConfigFile), time.Unix(1, 0), time.Unix(1, 0))
	again, err := d.push(api.KindAdapter, elsewhere, artifact.Options{})
	if err != nil || again.Digest != first.Digest || again.Sent != 0 {
		t.Errorf("pushed again: %+v, %v", again, err)
	}
	list, err := d.c.Made(t.Context(), b.Aggregate, client.Filter{Kind: api.KindAdapter}, "", 0)
	if all := list.Artifacts; err != nil || len(all) != 1 || all[0].Digest != first.Digest || all[0].Binding.Held {
		t.Errorf("found %+v, %v", list, err)
	}
}

// TestCheckpoint: what was pushed comes back as a checkpoint that can be pushed.
func TestCheckpoint(t *testing.T) {
	d, b := newDesk(t), base(t)
	dir := filepath.Join(t.TempDir(), "a"+documents.CheckpointSuffix)
	if err := testartifact.Checkpoint(dir, 1, b, false); err != nil {
		t.Fatal(err)
	}
	first, err := d.push(api.KindCheckpoint, dir, artifact.Options{})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := transfer.Resolve(t.Context(), d.c, d.ref("v1"))
	if err != nil {
		t.Fatal(err)
	}
	back := filepath.Join(t.TempDir(), "b"+documents.CheckpointSuffix)
	if _, err := transfer.Pull(t.Context(), d.c, plan, back, transfer.PullOptions{}); err != nil {
		t.Fatal(err)
	}
	again, err := d.push(api.KindCheckpoint, back, artifact.Options{})
	if err != nil || again.Digest != first.Digest || again.Sent != 0 {
		t.Errorf("%+v, %v, first %+v", again, err, first)
	}
}

// TestResume breaks a push off in the middle of a large file. The next one goes on from there.
func TestResume(t *testing.T) {
	const size = 24 << 20
	d, b := newDesk(t), base(t)
	dir := filepath.Join(t.TempDir(), "a"+documents.CheckpointSuffix)
	weights := make([]byte, size)
	weights[0] = 1
	if err := testartifact.Checkpoint(dir, 1, b, false); err != nil {
		t.Fatal(err)
	}
	replace(t, dir, "adapter.safetensors", weights)
	a, err := artifact.Read(t.Context(), api.KindCheckpoint, dir, artifact.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop := func() {
		if d.received.Load() > size/2 {
			cancel()
		}
	}
	d.onBody.Store(&stop)
	if _, err := a.Push(ctx, d.c, d.ref("v1"), nil); !errors.Is(err, context.Canceled) || d.manifests.Load() > 0 {
		t.Fatalf("broken off: %v, %d manifests", err, d.manifests.Load())
	}
	d.onBody.Store(nil)
	d.received.Store(0)
	var mu sync.Mutex
	var notes string
	pushed, err := d.push(api.KindCheckpoint, dir, artifact.Options{Watch: func(e transfer.Event) {
		mu.Lock()
		defer mu.Unlock()
		notes += e.Note + "\n"
	}})
	if err != nil || pushed.Sent > size*3/4 || !strings.Contains(notes, "upload resumed at byte ") {
		t.Errorf("gone on with: %+v, %v, %q", pushed, err, notes)
	}
	if d.received.Load() > size*3/4 {
		t.Errorf("%d of %d bytes came again", d.received.Load(), size)
	}
}

// replace puts other bytes into a file of a checkpoint, and into its manifest.
func replace(t *testing.T, dir, name string, b []byte) {
	t.Helper()
	path, manifest := filepath.Join(dir, name), filepath.Join(dir, documents.CheckpointFile)
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	said := func(b []byte) string {
		return fmt.Sprintf(`"sha256":"%s","size_bytes":%d`, identity.Sum(b).Hex(), len(b))
	}
	if !strings.Contains(string(text), said(old)) {
		t.Fatalf("%s does not say %s", text, said(old))
	}
	text = []byte(strings.Replace(string(text), said(old), said(b), 1))
	if err := errors.Join(os.WriteFile(path, b, 0o644), os.WriteFile(manifest, text, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// TestChanged changes a file between the checks and the sending: no manifest is put.
func TestChanged(t *testing.T) {
	d, b := newDesk(t), base(t)
	dir := filepath.Join(t.TempDir(), "a"+documents.CheckpointSuffix)
	if err := testartifact.Checkpoint(dir, 1, b, false); err != nil {
		t.Fatal(err)
	}
	a, err := artifact.Read(t.Context(), api.KindCheckpoint, dir, artifact.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "adapter.safetensors"), testartifact.Weights(2), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = a.Push(t.Context(), d.c, d.ref("v1"), nil)
	if !errors.Is(err, folder.ErrChanged) || d.manifests.Load() > 0 {
		t.Errorf("%v, %d manifests", err, d.manifests.Load())
	}
}

// TestOddFiles puts what is no regular file in the place of each file of an artifact. Nothing waits for a pipe, and
// every refusal names the file.
func TestOddFiles(t *testing.T) {
	b := base(t)
	odd := map[string]func(path string) error{
		"pipe":    func(path string) error { return unix.Mkfifo(path, 0o644) },
		"folder":  func(path string) error { return os.Mkdir(path, 0o755) },
		"no link": func(path string) error { return os.Symlink("nowhere", path) },
		"circle":  func(path string) error { return os.Symlink(filepath.Base(path), path) },
	}
	makers := map[api.Kind]func(dir string) error{
		api.KindAdapter:    func(dir string) error { return testartifact.Adapter(dir, 1, b) },
		api.KindCheckpoint: func(dir string) error { return testartifact.Checkpoint(dir, 1, b, false) },
	}
	files := map[api.Kind][]string{
		api.KindAdapter: {documents.AdapterConfigFile, documents.AdapterWeightsFile, documents.AdapterManifestFile,
			documents.ReceiptFile},
		api.KindCheckpoint: {documents.CheckpointFile, "adapter.safetensors", "state/loop.json"},
	}
	for kind, make := range makers {
		for _, name := range files[kind] {
			for what, put := range odd {
				dir := filepath.Join(t.TempDir(), "a"+documents.CheckpointSuffix)
				path := filepath.Join(dir, name)
				if err := errors.Join(make(dir), os.Remove(path), put(path)); err != nil {
					t.Fatal(err)
				}
				for _, follow := range []bool{false, true} {
					_, err := artifact.Read(t.Context(), kind, dir, artifact.Options{FollowLinks: follow})
					if err == nil || !strings.Contains(err.Error(), name) {
						t.Errorf("%s: a %s in place of %s, links followed: %v: %v", kind, what, name, follow, err)
					}
				}
			}
		}
	}
	for _, kind := range []api.Kind{api.KindReceipt, api.KindEval} {
		for what, put := range odd {
			path := filepath.Join(t.TempDir(), "x.json")
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			for _, follow := range []bool{false, true} {
				_, err := artifact.Read(t.Context(), kind, path, artifact.Options{FollowLinks: follow})
				if err == nil || !strings.Contains(err.Error(), "x.json") {
					t.Errorf("%s: a %s, links followed: %v: %v", kind, what, follow, err)
				}
			}
		}
	}
}

// TestLargeRows: outcome rows that a registry would refuse for their size are not read.
func TestLargeRows(t *testing.T) {
	for size, large := range map[int64]bool{documents.MaxEval: false, documents.MaxEval + 1: true} {
		path := filepath.Join(t.TempDir(), "rows.jsonl")
		if err := errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, size)); err != nil {
			t.Fatal(err)
		}
		_, err := artifact.Read(t.Context(), api.KindEval, path, artifact.Options{Legacy: true})
		var refused *artifact.Error
		if is := errors.As(err, &refused) && refused.Code == artifact.CodeTooLarge; is != large || is && refused.Hint == "" {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// TestManyFiles: a folder with more than a checkpoint can hold is refused before it is listed to its end.
func TestManyFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a"+documents.CheckpointSuffix)
	if err := testartifact.Checkpoint(dir, 1, base(t), false); err != nil {
		t.Fatal(err)
	}
	for i := range 5000 {
		if err := os.WriteFile(filepath.Join(dir, "state", fmt.Sprint(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	_, err := artifact.Read(t.Context(), api.KindCheckpoint, dir, artifact.Options{})
	var refused *artifact.Error
	if !errors.As(err, &refused) || refused.Code != artifact.CodeTooManyFiles {
		t.Errorf("%v", err)
	}
}
