package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// onePass is a registry that has a model, and what it sent of it.
type onePass struct {
	t    *testing.T
	host string
	ref  string
	base identity.Manifest

	mu    sync.Mutex
	sent  map[string]int64                                                             // by digest
	fault func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) // nil: none
}

// newOnePass pushes a model of two shards, one of them large enough to have midstates.
func newOnePass(t *testing.T) *onePass {
	dir := filepath.Join(t.TempDir(), "demo")
	put := func(name string, b []byte) identity.Shard {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o666); err != nil {
			t.Fatal(err)
		}
		return identity.Shard{Filename: name, Size: uint64(len(b)), Digest: identity.Sum(b)}
	}
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	put("config.json", []byte(`{"num_hidden_layers":3}`))
	put("model.safetensors.index.json",
		[]byte(`{"weight_map":{"t0":"model-00001-of-00002.safetensors","t1":"model-00002-of-00002.safetensors"}}`))
	var shards []identity.Shard
	for i, n := range []int{300_000, 34 << 20} {
		head := fmt.Sprintf(`{"t%d":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, i, n, n)
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
		data := make([]byte, n)
		rand.NewChaCha8([32]byte{byte(i)}).Read(data)
		shards = append(shards, put(fmt.Sprintf("model-0000%d-of-00002.safetensors", i+1), append(b, data...)))
	}
	o := &onePass{t: t, sent: map[string]int64{}}
	var err error
	if o.base, err = identity.New(shards); err != nil {
		t.Fatal(err)
	}
	reg := testregistry.New(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { o.serve(w, r, reg) }))
	t.Cleanup(server.Close)
	o.host = strings.TrimPrefix(server.URL, "http://")
	o.ref = o.host + "/team/demo:v1"
	ref, err := client.ParseReference(o.ref)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(o.host, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := transfer.Push(t.Context(), c, dir, ref, transfer.PushOptions{}); err != nil {
		t.Fatal(err)
	}
	return o
}

func (o *onePass) serve(w http.ResponseWriter, r *http.Request, to http.Handler) {
	_, digest, is := strings.Cut(r.URL.Path, "/blobs/")
	o.mu.Lock()
	fault := o.fault
	o.mu.Unlock()
	if r.Method == http.MethodGet && is {
		w = &meter{w, o, digest}
		if fault != nil {
			fault(w, r, digest, to)
			return
		}
	}
	to.ServeHTTP(w, r)
}

func (o *onePass) does(fault func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fault = fault
	clear(o.sent)
}

type meter struct {
	http.ResponseWriter
	o      *onePass
	digest string
}

func (m *meter) Write(b []byte) (int, error) {
	n, err := m.ResponseWriter.Write(b)
	m.o.mu.Lock()
	defer m.o.mu.Unlock()
	m.o.sent[m.digest] += int64(n)
	return n, err
}

// sentTimes fails if not each shard was sent so many times.
func (o *onePass) sentTimes(times int64) {
	o.t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.base.Shards {
		if n := o.sent[s.Digest.String()]; n != times*int64(s.Size) {
			o.t.Errorf("%s: %d bytes sent, it has %d", s.Filename, n, s.Size)
		}
	}
}

// holds runs kiln-pull resident until it holds the base, and returns what it announced.
func (o *onePass) holds(args ...string) (p *process) {
	o.t.Helper()
	p = startResident(o.t, append(args, "--device", "host", "--socket", "off")...)
	if got := p.identity(o.t); got == nil || *got != o.base.Summary() || p.Load == nil || p.Load.Buffer > 16<<20 {
		o.t.Errorf("%q: announced %+v, identity %+v", args, p.announcement, got)
	}
	if err := p.stop(); err != nil {
		o.t.Error(err)
	}
	return p
}

// fails runs kiln-pull resident, which must end with a code.
func (o *onePass) fails(code int, args ...string) error {
	o.t.Helper()
	args = append([]string{"resident", "--listen", "127.0.0.1:0", "--socket", "off", "--device", "host"}, args...)
	err := run(o.t.Context(), args, io.Discard, io.Discard)
	if cli.Code(err) != code {
		o.t.Errorf("%q: %v (code %d), want code %d", args, err, cli.Code(err), code)
	}
	return err
}

// empty fails if something is in a folder.
func empty(t *testing.T, dir string) {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil || len(found) > 0 {
		t.Errorf("in %s: %v, %v", dir, found, err)
	}
}

// TestResidentStream: a model comes straight into memory, each byte once, and nothing is on the disk.
func TestResidentStream(t *testing.T) {
	o := newOnePass(t)
	cache, temp := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("TMPDIR", temp)
	for _, args := range [][]string{{o.ref}, {o.base.Aggregate.String(), "--registry", o.host}} {
		o.does(nil)
		if p := o.holds(args...); p.Path != "" || p.Model != args[0] || p.Aggregate != o.base.Aggregate {
			t.Errorf("announced %+v", p.announcement)
		}
		o.sentTimes(1)
	}
	empty(t, cache)
	empty(t, temp)
	o.fails(cli.CodeNo, o.ref, "--expect", "sha256:"+strings.Repeat("1", 64))
}

// TestResidentStreamDebug: what config.json says is known without a folder.
func TestResidentStreamDebug(t *testing.T) {
	o := newOnePass(t)
	p := startResident(t, o.ref, "--debug-model-state", "--socket", "off")
	var body struct {
		Model struct {
			Layers int     `json:"num_layers"`
			Path   *string `json:"model_path"`
		} `json:"model"`
	}
	status := ask(t, p.URL+"/v1/debug/model-state", &body)
	if status != 200 || body.Model.Layers != 3 || body.Model.Path != nil {
		t.Errorf("%d %+v", status, body)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

// TestResidentDir: with --dir the same pass makes a folder that is as any that was pulled.
func TestResidentDir(t *testing.T) {
	o := newOnePass(t)
	parent := t.TempDir()
	dir, other := filepath.Join(parent, "m"), filepath.Join(parent, "other")
	o.does(nil)
	if p := o.holds(o.ref, "--dir", dir); p.Path != dir || p.Load.Disk == 0 {
		t.Errorf("announced %+v", p.announcement)
	}
	o.sentTimes(1)
	for _, args := range [][]string{{"verify", dir}, {"pull", o.ref, other, "--quiet"}} {
		var stderr bytes.Buffer
		if err := run(t.Context(), args, io.Discard, &stderr); err != nil {
			t.Fatalf("%q: %v\n%s", args, err, stderr.String())
		}
	}
	same(t, dir, other)
	o.does(nil)
	if p := o.holds(o.ref, "--dir", dir); p.Path != dir || p.Load.Disk != 0 { // it is there already
		t.Errorf("announced %+v", p.announcement)
	}
	o.sentTimes(0)
	lost := o.base.Shards[0]
	if err := os.Remove(filepath.Join(dir, lost.Filename)); err != nil {
		t.Fatal(err)
	}
	o.holds(o.ref, "--dir", dir) // only what is missing comes
	n, rest := o.sentOf(lost.Digest.String()), o.sentOf(o.base.Shards[1].Digest.String())
	if n != int64(lost.Size) || rest != 0 {
		t.Errorf("%d bytes of the lost shard sent, %d of the other", n, rest)
	}
	same(t, dir, other)
}

// same compares two folders that were pulled, and what lies beside them.
func same(t *testing.T, a, b string) {
	t.Helper()
	names := func(dir string) (all []string) {
		beside := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+".kiln")
		for _, top := range []string{dir, beside} {
			err := staging.Walk(top, func(name string, _ os.DirEntry) error {
				all = append(all, name)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	if x, y := names(a), names(b); !slices.Equal(x, y) {
		t.Errorf("%q, want %q", x, y)
	}
	known := func(dir string) staging.Record {
		k, err := staging.Known(dir)
		if err != nil || k.Complete == nil || k.Started != nil {
			t.Fatalf("%+v, %v", k, err)
		}
		return *k.Complete
	}
	x, y := known(a), known(b)
	if !x.Same(y) || x.Manifest != y.Manifest || x.Aggregate != y.Aggregate || x.Repository != y.Repository ||
		x.Verified.IsZero() {
		t.Errorf("%+v, want %+v", x, y)
	}
	for i, f := range x.Files {
		if y := y.Files[i]; f.Stat == nil || f.Stat.Size != y.Stat.Size {
			t.Errorf("%+v, want %+v", f, y)
		}
	}
}

// flip changes the last byte of each answer that has the last byte of a blob.
func flip(d identity.Digest, size uint64) func(http.ResponseWriter, *http.Request, string, http.Handler) {
	return func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) {
		part := r.Header.Get("Range")
		if digest == d.String() && (part == "" || strings.HasSuffix(part, fmt.Sprint("-", size-1))) {
			rec := httptest.NewRecorder()
			to.ServeHTTP(rec, r)
			b := rec.Body.Bytes()
			b[len(b)-1] ^= 1
			for k, v := range rec.Header() {
				w.Header()[k] = v
			}
			w.WriteHeader(rec.Code)
			w.Write(b)
			return
		}
		to.ServeHTTP(w, r)
	}
}

// TestResidentWrong: other bytes than the base states are neither held nor made a folder.
func TestResidentWrong(t *testing.T) {
	o := newOnePass(t)
	dir := ""
	for _, s := range o.base.Shards {
		dir = filepath.Join(t.TempDir(), "m")
		for _, args := range [][]string{{o.ref}, {o.ref, "--dir", dir}} {
			o.does(flip(s.Digest, s.Size))
			err := o.fails(cli.CodeNo, args...)
			for _, want := range []string{s.Filename, s.Digest.String(), o.host} {
				if err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%v lacks %q", err, want)
				}
			}
			if _, err := os.Lstat(dir); err == nil {
				t.Error("there is a folder")
			}
		}
	}
	o.does(nil) // what is left is not believed
	o.holds(o.ref, "--dir", dir)
	if err := run(t.Context(), []string{"verify", dir}, io.Discard, io.Discard); err != nil {
		t.Error(err)
	}
}

// TestResidentGone: a registry that lacks a shard half way leaves no folder, and what came is used.
func TestResidentGone(t *testing.T) {
	o := newOnePass(t)
	dir := filepath.Join(t.TempDir(), "m")
	s := o.base.Shards[1]
	o.does(func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) {
		if digest == s.Digest.String() && r.Header.Get("Range") != "bytes=0-65535" {
			if o.sentOf(digest) > 20<<20 {
				http.NotFound(w, r)
				return
			}
			w = &stopper{w, 20 << 20}
		}
		to.ServeHTTP(w, r)
	})
	o.fails(cli.CodeNotFound, o.ref, "--dir", dir)
	if _, err := os.Lstat(dir); err == nil {
		t.Error("there is a folder")
	}
	o.does(nil)
	if p := o.holds(o.ref, "--dir", dir); p.Path != dir {
		t.Errorf("announced %+v", p.announcement)
	}
	if n := o.sentOf(s.Digest.String()); n == 0 || n > 20<<20 {
		t.Errorf("%d bytes sent again", n)
	}
	if err := run(t.Context(), []string{"verify", dir}, io.Discard, io.Discard); err != nil {
		t.Error(err)
	}
}

func (o *onePass) sentOf(digest string) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.sent[digest]
}

// stopper ends the connection after n bytes.
type stopper struct {
	http.ResponseWriter
	n int
}

func (s *stopper) Write(b []byte) (int, error) {
	if len(b) > s.n {
		panic(http.ErrAbortHandler)
	}
	s.n -= len(b)
	return s.ResponseWriter.Write(b)
}

// TestResidentCache: with a cache a model is pulled through it, and the next time not received.
func TestResidentCache(t *testing.T) {
	o := newOnePass(t)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	cache := filepath.Join(t.TempDir(), "cache")
	o.does(nil)
	o.holds(o.ref, "--cache", cache)
	o.sentTimes(1)
	o.does(nil)
	o.holds(o.ref, "--cache", cache, "--dir", filepath.Join(t.TempDir(), "m"))
	o.sentTimes(0)
}

// TestResidentCancelled: an end while the model comes in leaves no folder.
func TestResidentCancelled(t *testing.T) {
	o := newOnePass(t)
	dir := filepath.Join(t.TempDir(), "m")
	ctx, cancel := context.WithCancel(t.Context())
	o.does(func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) {
		if digest == o.base.Shards[1].Digest.String() && r.Header.Get("Range") != "bytes=0-65535" {
			cancel()
			<-r.Context().Done()
			return
		}
		to.ServeHTTP(w, r)
	})
	args := []string{"resident", o.ref, "--dir", dir, "--listen", "127.0.0.1:0", "--socket", "off"}
	err := run(ctx, args, io.Discard, io.Discard)
	if err != nil && cli.Code(err) != cli.CodeTryAgain {
		t.Errorf("%v (code %d)", err, cli.Code(err))
	}
	if _, err := os.Lstat(dir); err == nil {
		t.Error("there is a folder")
	}
}

// TestResidentKilled: a process that is killed while the model comes in leaves no folder, and the next one uses what it
// has received.
func TestResidentKilled(t *testing.T) {
	o := newOnePass(t)
	dir := filepath.Join(t.TempDir(), "m")
	half := make(chan struct{})
	once := sync.OnceFunc(func() { close(half) })
	o.does(func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) {
		if digest == o.base.Shards[1].Digest.String() && r.Header.Get("Range") != "bytes=0-65535" {
			w = &blocker{&stopper{w, 20 << 20}, func() { once(); <-r.Context().Done() }}
		}
		to.ServeHTTP(w, r)
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Args = []string{
		"kiln-pull", "resident", o.ref, "--dir", dir, "--device", "host", "--listen", "127.0.0.1:0", "--socket", "off",
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-half
	if err := errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); err == nil {
		t.Error("there is a folder")
	}
	o.does(nil)
	o.holds(o.ref, "--dir", dir)
	if n := o.sentOf(o.base.Shards[1].Digest.String()); n == 0 || n >= int64(o.base.Shards[1].Size) {
		t.Errorf("%d bytes sent again", n)
	}
	if err := run(t.Context(), []string{"verify", dir}, io.Discard, io.Discard); err != nil {
		t.Error(err)
	}
}

func ignoreExit(err error) error {
	if x := (*exec.ExitError)(nil); errors.As(err, &x) {
		return nil
	}
	return err
}

// blocker calls full where stopper would end the connection.
type blocker struct {
	*stopper
	full func()
}

func (h *blocker) Write(b []byte) (int, error) {
	if len(b) > h.n {
		h.full()
	}
	return h.stopper.Write(b)
}

// TestResidentFull: a disk that fills up while the model comes in leaves no folder and nothing held. It needs the
// right to mount.
func TestResidentFull(t *testing.T) {
	o := newOnePass(t)
	small := t.TempDir()
	if err := unix.Mount("none", small, "tmpfs", 0, "size=48m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	})
	dir, filler := filepath.Join(small, "m"), filepath.Join(small, "filler")
	o.does(func(w http.ResponseWriter, r *http.Request, digest string, to http.Handler) {
		if digest == o.base.Shards[1].Digest.String() {
			if err := os.WriteFile(filler, make([]byte, 48<<20), 0o666); err == nil {
				t.Error("the disk is not full")
			}
		}
		to.ServeHTTP(w, r)
	})
	o.fails(cli.CodeDisk, o.ref, "--dir", dir)
	if _, err := os.Lstat(dir); err == nil {
		t.Error("there is a folder")
	}
	o.does(nil)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	o.holds(o.ref, "--dir", dir)
	if err := run(t.Context(), []string{"verify", dir}, io.Discard, io.Discard); err != nil {
		t.Error(err)
	}
}
