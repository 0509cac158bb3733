package transfer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// desk is a site whose uploads are watched.
type desk struct {
	*site
	dir  string // of the model
	seen *seen  // since the last onUpload
}

// seen is what a desk has seen of uploads. A request that an earlier test step left behind counts for that step.
type seen struct {
	mu        sync.Mutex
	bodies    []int64  // bytes that came with each PATCH, in order
	starts    []string // their Content-Range
	manifests int      // PUTs
}

func (s *seen) all() (bodies []int64, starts []string, manifests int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.bodies), slices.Clone(s.starts), s.manifests
}

func newDesk(t *testing.T, files map[string][]byte) *desk {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	d := &desk{site: newSite(t), dir: filepath.Join(t.TempDir(), "model")}
	writeModel(t, d.dir, files)
	d.onUpload(nil)
	return d
}

func writeModel(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	for name, b := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, b, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// onUpload counts what is sent, and makes a fault of what happens to requests for uploads.
func (d *desk) onUpload(f func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	now := new(seen)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = now
	d.fault = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") {
			now.mu.Lock()
			now.manifests++
			now.mu.Unlock()
		}
		r = r.WithContext(r.Context()) // a copy: a server that finds its body replaced waits for it
		upload := strings.Contains(r.URL.Path, "/blobs/uploads/")
		if upload && r.Method == http.MethodPatch {
			defer now.count(r)()
		}
		if f != nil && upload {
			f(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	}
}

type counted struct {
	io.ReadCloser
	n atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func (s *seen) count(r *http.Request) func() {
	body := &counted{ReadCloser: r.Body}
	r.Body = body
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.bodies = append(s.bodies, body.n.Load())
		s.starts = append(s.starts, r.Header.Get("Content-Range"))
	}
}

func (d *desk) received() (n int64) {
	bodies, _, _ := d.seen.all()
	for _, b := range bodies {
		n += b
	}
	return n
}

func (d *desk) manifests() int {
	_, _, n := d.seen.all()
	return n
}

func (d *desk) ref(tag string) client.Reference {
	return client.Reference{Host: d.host, Repo: "team/m", Tag: tag}
}

func (d *desk) pushDir(o transfer.PushOptions) (transfer.Pushed, error) {
	return transfer.Push(d.t.Context(), d.c, d.dir, d.ref("v1"), o)
}

func sizeOf(files map[string][]byte) (n int64) {
	for _, b := range files {
		n += int64(len(b))
	}
	return n
}

// flat is model without its sub-folder, which a push leaves behind.
func flat(shards, size int) map[string][]byte {
	files := model(shards, size)
	delete(files, "tokenizer/vocab.txt")
	files["README.md"] = []byte("# tiny\n")
	files["modeling_tiny.py"] = []byte("pass\n")
	return files
}

func TestPush(t *testing.T) {
	files := flat(3, 1<<20)
	d := newDesk(t, files)
	first, err := d.pushDir(transfer.PushOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if first.Sent < sizeOf(files) || d.received() != first.Sent {
		t.Errorf("sent %d, received %d of %d", first.Sent, d.received(), sizeOf(files))
	}
	checkArtifact(t, d, first, files)

	d.onUpload(nil)
	again, err := d.pushDir(transfer.PushOptions{})
	if err != nil || again.Digest != first.Digest || again.Identity != first.Identity {
		t.Errorf("pushed again: %+v, %v, first %+v", again, err, first)
	}
	if d.received() != 0 || again.Sent != 0 {
		t.Errorf("pushed again: sent %d, received %d", again.Sent, d.received())
	}

	// Another time, another place and other leftovers give the same manifest; other names give the same aggregate.
	d.dir = filepath.Join(t.TempDir(), "elsewhere")
	writeModel(t, d.dir, files)
	writeModel(t, d.dir, map[string][]byte{".cache/x.json": {}, "model-z.safetensors.incomplete": {1}, "pytorch_model.bin": {1}})
	os.Chtimes(filepath.Join(d.dir, "config.json"), time.Unix(1, 0), time.Unix(1, 0))
	if moved, err := d.pushDir(transfer.PushOptions{}); err != nil || moved.Digest != first.Digest {
		t.Errorf("pushed from elsewhere: %+v, %v, first %+v", moved, err, first)
	}
	os.Remove(filepath.Join(d.dir, safetensors.IndexName))
	os.Rename(filepath.Join(d.dir, "model-a.safetensors"), filepath.Join(d.dir, "renamed.safetensors"))
	renamed, err := d.pushDir(transfer.PushOptions{})
	if err != nil || renamed.Digest == first.Digest || renamed.Identity != first.Identity {
		t.Errorf("renamed: %+v, %v, first %+v", renamed, err, first)
	}
	base, err := d.c.Base(t.Context(), first.Identity.Aggregate)
	if err != nil || base.Identity != first.Identity || manifests(base) != 2 {
		t.Errorf("found %+v, %v", base, err)
	}
}

func manifests(b api.Base) (n int) {
	for _, p := range b.Packagings {
		n += len(p.Manifests)
	}
	return n
}

func checkArtifact(t *testing.T, d *desk, p transfer.Pushed, files map[string][]byte) {
	t.Helper()
	m, err := d.c.Manifest(t.Context(), "team/m", "v1")
	if err != nil || m.Digest != p.Digest || p.Reference != d.ref("v1").String()+"@"+p.Digest.String() {
		t.Fatalf("%s, %v, pushed %+v", m.Digest, err, p)
	}
	var doc v1.Manifest
	if err := json.Unmarshal(m.Bytes, &doc); err != nil {
		t.Fatal(err)
	}
	var names, kinds, digests []string
	for _, l := range doc.Layers {
		name := l.Annotations[v1.AnnotationTitle]
		if l.Annotations[api.AnnotationFilepath] != name || len(l.Annotations) != 2 {
			t.Errorf("annotations of a layer: %v", l.Annotations)
		}
		if want := identity.Sum(files[name]).String(); string(l.Digest) != want || l.Size != int64(len(files[name])) {
			t.Errorf("%s: %s of %d bytes", name, l.Digest, l.Size)
		}
		names, kinds, digests = append(names, name), append(kinds, l.MediaType), append(digests, string(l.Digest))
	}
	if want := []string{"config.json", "empty.txt", safetensors.IndexName, "model-a.safetensors", "model-b.safetensors",
		"model-c.safetensors", "modeling_tiny.py", "README.md"}; !slices.Equal(names, want) {
		t.Errorf("layers %q, want %q", names, want)
	}
	wantKinds := []string{api.MediaTypeWeightConfig, api.MediaTypeWeight, api.MediaTypeCode, api.MediaTypeDoc}
	if !slices.Equal(slices.Compact(kinds), wantKinds) {
		t.Errorf("types %q", kinds)
	}
	aggregate := doc.Annotations[api.AnnotationAggregate]
	if doc.ArtifactType != api.ArtifactTypeBase || doc.Config.MediaType != api.MediaTypeModelConfig ||
		doc.MediaType != v1.MediaTypeImageManifest || doc.Annotations[api.AnnotationKind] != "base" ||
		aggregate != p.Identity.Aggregate.String() || len(doc.Annotations) != 2 {
		t.Errorf("manifest %s", m.Bytes)
	}
	cd, err := identity.ParseDigest(string(doc.Config.Digest))
	if err != nil {
		t.Fatal(err)
	}
	body, err := d.c.Blob(t.Context(), "team/m", cd, 0, doc.Config.Size, doc.Config.Size)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	var config struct {
		ModelFS struct {
			Type    string
			DiffIDs []string `json:"diffIds"`
		}
		Config struct{ Format string }
	}
	if err := json.NewDecoder(body).Decode(&config); err != nil || config.ModelFS.Type != "layers" ||
		!slices.Equal(config.ModelFS.DiffIDs, digests) || config.Config.Format != "safetensors" {
		t.Errorf("config %+v, %v", config, err)
	}
}

func TestPushByDigest(t *testing.T) {
	d := newDesk(t, flat(1, 1<<10))
	p, err := transfer.Push(t.Context(), d.c, d.dir, d.ref(""), transfer.PushOptions{
		Annotations: map[string]string{v1.AnnotationRevision: "r1", api.AnnotationKind: "adapter"},
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.c.Manifest(t.Context(), "team/m", p.Digest.String())
	if err != nil || !bytes.Contains(m.Bytes, []byte(`"r1"`)) || !bytes.Contains(m.Bytes, []byte(`"dev.kiln.kind":"base"`)) {
		t.Errorf("%s, %v", m.Bytes, err)
	}
	if tags, err := d.c.Tags(t.Context(), "team/m", "", 0); err != nil || len(tags) != 0 {
		t.Errorf("tags %v, %v", tags, err)
	}
}

func TestPushSameShardTwice(t *testing.T) {
	b := shard(1<<20, 1)
	d := newDesk(t, map[string][]byte{"x-00001-of-00002.safetensors": b, "x-00002-of-00002.safetensors": b})
	p, err := d.pushDir(transfer.PushOptions{})
	if err != nil || p.Identity.ShardCount != 2 || p.Files != 2 {
		t.Fatalf("%+v, %v", p, err)
	}
	if n := d.received(); n < 1<<20 || n > 1<<20+4096 {
		t.Errorf("%d bytes were sent for one blob", n)
	}
}

// TestPushResumes ends the first push in the middle of a blob; the second, as another process would, goes on there.
func TestPushResumes(t *testing.T) {
	for name, lose := range map[string]bool{"goes on": false, "starts anew where the registry lost it": true} {
		t.Run(name, func(t *testing.T) { testResume(t, name, lose) })
	}
}

func testResume(t *testing.T, name string, lose bool) {
	const size = 8 << 20
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(size, 1)})
	ctx, kill := context.WithCancel(t.Context())
	var patching sync.WaitGroup // in which the server has the upload in use
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPatch {
			patching.Add(1)
			defer patching.Done()
			r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, size/2), killer{kill}))
		}
		next.ServeHTTP(w, r)
	})
	if _, err := transfer.Push(ctx, d.c, d.dir, d.ref("v1"), transfer.PushOptions{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("%s: first push: %v", name, err)
	}
	patching.Wait()
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if lose && r.Method == http.MethodGet {
			http.NotFound(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
	var told string
	p, err := d.pushDir(transfer.PushOptions{Watch: func(e transfer.Event) {
		if e.Step == transfer.Noted {
			told += e.Note
		}
	}})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	sent := d.received()
	if lose != (sent >= size) || lose == strings.Contains(told, "resumed at byte") {
		t.Errorf("%s: %d of %d bytes were sent, told %q", name, sent, size, told)
	}
	if b, err := d.c.Base(t.Context(), p.Identity.Aggregate); err != nil || b.Identity.TotalSize != size {
		t.Errorf("%s: %+v, %v", name, b, err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.Getenv("XDG_CACHE_HOME"), "kiln", "uploads", "*")); len(left) > 0 {
		t.Errorf("%s: still remembered: %v", name, left)
	}
}

// killer ends a push and breaks the connection.
type killer struct{ kill context.CancelFunc }

func (k killer) Read([]byte) (int, error) {
	k.kill()
	return 0, io.ErrUnexpectedEOF
}

// TestPushThroughFaults breaks connections and answers 503 now and then: what was acknowledged is not sent again.
func TestPushThroughFaults(t *testing.T) {
	const size = 8 << 20
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(size, 1)})
	n := 0
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		d.mu.Lock()
		n++
		turn := n
		d.mu.Unlock()
		switch {
		case turn%5 == 2:
			http.Error(w, "busy", http.StatusServiceUnavailable)
		case r.Method == http.MethodPatch && turn < 20:
			r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, size/4), killer{func() {}}))
			next.ServeHTTP(w, r)
		default:
			next.ServeHTTP(w, r)
		}
	})
	if _, err := d.pushDir(transfer.PushOptions{}); err != nil {
		t.Fatal(err)
	}
	var starts []int
	_, ranges, _ := d.seen.all()
	for _, s := range ranges {
		var from, to int
		if fmt.Sscanf(s, "%d-%d", &from, &to); to == size-1 {
			starts = append(starts, from)
		}
	}
	if !slices.IsSorted(starts) || len(starts) < 3 || starts[len(starts)-1] == 0 {
		t.Errorf("bodies started at %v", starts)
	}
}

// TestPushThroughGate has a proxy that lets no large body through.
func TestPushThroughGate(t *testing.T) {
	for _, status := range []int{http.StatusRequestEntityTooLarge, 524} {
		t.Run(fmt.Sprint(status), func(t *testing.T) { testGate(t, status) })
	}
}

func testGate(t *testing.T, status int) {
	const size, limit = 5 << 20, 1 << 20
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(size, 1)})
	var refused []int64
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.ContentLength > limit {
			d.mu.Lock()
			refused = append(refused, r.ContentLength)
			d.mu.Unlock()
			w.WriteHeader(status)
			return
		}
		next.ServeHTTP(w, r)
	})
	var told string
	_, err := d.pushDir(transfer.PushOptions{Watch: func(e transfer.Event) {
		if e.Step == transfer.Noted {
			told += e.Note
		}
	}})
	if err != nil {
		t.Fatalf("%d: %v", status, err)
	}
	if slices.Sort(refused); len(refused) == 0 || len(slices.Compact(slices.Clone(refused))) != len(refused) {
		t.Errorf("%d: refused bodies of %v", status, refused)
	}
	if !strings.Contains(told, fmt.Sprint(status)) || !strings.Contains(told, fmt.Sprint(size)) {
		t.Errorf("%d: told %q", status, told)
	}
}

// TestPushGateClosed ends where nothing at all is let through.
func TestPushGateClosed(t *testing.T) {
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(5<<20, 1)})
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPatch {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		}
		next.ServeHTTP(w, r)
	})
	_, err := d.pushDir(transfer.PushOptions{})
	var s *client.StatusError
	if !errors.As(err, &s) || s.Status != http.StatusRequestEntityTooLarge || !strings.Contains(err.Error(), "model.safetensors") {
		t.Errorf("got %v", err)
	}
}

// TestPushChangedFile changes a file after it was hashed: nothing of the model may appear.
func TestPushChangedFile(t *testing.T) {
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(1<<20, 1)})
	path := filepath.Join(d.dir, "model.safetensors")
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPost {
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				t.Error(err)
				return
			}
			f.WriteString("x")
			f.Close()
		}
		next.ServeHTTP(w, r)
	})
	_, err := d.pushDir(transfer.PushOptions{})
	if !errors.Is(err, folder.ErrChanged) || !strings.Contains(err.Error(), "model.safetensors") || d.manifests() > 0 {
		t.Errorf("got %v, %d manifests", err, d.manifests())
	}
}

// TestPushSnapshot changes the folder all the time; a push from a snapshot does not mind, and leaves nothing behind.
func TestPushSnapshot(t *testing.T) {
	files := map[string][]byte{"model.safetensors": shard(1<<20, 1), "config.json": []byte("{}")}
	d := newDesk(t, files)
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if err := os.WriteFile(filepath.Join(d.dir, "model.safetensors"), []byte("other"), 0o644); err != nil {
			t.Error(err)
		}
		next.ServeHTTP(w, r)
	})
	p, err := d.pushDir(transfer.PushOptions{Snapshot: true})
	if err != nil || p.Identity.TotalSize != 1<<20 {
		t.Errorf("%+v, %v", p, err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(d.dir), ".kiln*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestPushDamagedOnTheWay flips a bit between here and there. The registry refuses, and that is not tried again.
func TestPushDamagedOnTheWay(t *testing.T) {
	d := newDesk(t, map[string][]byte{"model.safetensors": shard(1<<20, 1)})
	d.onUpload(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPatch {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			b[len(b)/2] ^= 1
			r.Body = io.NopCloser(bytes.NewReader(b))
		}
		next.ServeHTTP(w, r)
	})
	_, err := d.pushDir(transfer.PushOptions{})
	bodies, _, _ := d.seen.all()
	if !errors.Is(err, api.ErrDigestInvalid) || d.manifests() > 0 || len(bodies) != 1 {
		t.Errorf("got %v after %d bodies, %d manifests", err, len(bodies), d.manifests())
	}
}

func TestPushRefused(t *testing.T) {
	d := newDesk(t, map[string][]byte{
		"x-00001-of-00003.safetensors": shard(1<<10, 1), "x-00003-of-00003.safetensors": shard(1<<10, 3),
	})
	var rule *safetensors.Error
	if _, err := d.pushDir(transfer.PushOptions{}); !errors.As(err, &rule) || rule.Code != safetensors.WarnFamilyIncomplete ||
		!strings.Contains(err.Error(), "x-00002-of-00003.safetensors") || d.received() > 0 {
		t.Errorf("incomplete family: %v", err)
	}
	if p, err := d.pushDir(transfer.PushOptions{AllowIncompleteFamily: true}); err != nil || len(p.Warnings) != 1 {
		t.Errorf("asked for: %+v, %v", p, err)
	}
	writeModel(t, d.dir, map[string][]byte{"x-00002-of-00003.safetensors": []byte("version https://git-lfs.github.com/spec/v1\n")})
	d.onUpload(nil)
	if _, err := d.pushDir(transfer.PushOptions{}); !errors.As(err, &rule) || rule.Code != safetensors.CodeLFSPointer || d.manifests() > 0 {
		t.Errorf("pointer: %v, %d manifests", err, d.manifests())
	}
}

// TestPushUnpullable: what a pull would refuse is not sent.
func TestPushUnpullable(t *testing.T) {
	d := newDesk(t, map[string][]byte{"model\u202e.safetensors": shard(1<<10, 1)})
	var rule *safetensors.Error
	_, err := d.pushDir(transfer.PushOptions{})
	if !errors.As(err, &rule) || rule.Code != safetensors.CodeNotPortableName || d.received() > 0 {
		t.Errorf("got %v, %d bytes sent", err, d.received())
	}
}

func TestPushDenied(t *testing.T) {
	denied := newDesk(t, map[string][]byte{"model.safetensors": shard(1<<10, 1)})
	denied.onUpload(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { w.WriteHeader(http.StatusForbidden) })
	if _, err := denied.pushDir(transfer.PushOptions{}); !errors.Is(err, api.ErrDenied) {
		t.Errorf("denied: %v", err)
	}
}

func TestPushTwoAtOnce(t *testing.T) {
	d := newDesk(t, flat(2, 4<<20))
	var wg sync.WaitGroup
	var digests [2]identity.Digest
	for i := range digests {
		wg.Go(func() {
			c := d.client(client.Options{Backoff: 20 * time.Millisecond})
			p, err := transfer.Push(t.Context(), c, d.dir, d.ref("v1"), transfer.PushOptions{})
			if err != nil {
				t.Error(err)
			}
			digests[i] = p.Digest
		})
	}
	wg.Wait()
	if digests[0] != digests[1] {
		t.Errorf("digests %v", digests)
	}
}
