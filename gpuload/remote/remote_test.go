package remote_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/remote"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	kib   = 1 << 10
	small = "model-00001-of-00002.safetensors" // less than what is asked for with a header
	large = "model-00002-of-00002.safetensors" // with a header that is more
)

// shard returns a safetensors file with a header of so many bytes, of which most are blanks, and data.
func shard(header, data int) []byte {
	text := fmt.Sprintf(`{"t%d":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, data, data, data)
	b := binary.LittleEndian.AppendUint64(nil, uint64(header))
	b = append(b, text+strings.Repeat(" ", header-len(text))...)
	for r := rand.NewPCG(uint64(data), 0); len(b) < 8+header+data; {
		b = binary.LittleEndian.AppendUint64(b, r.Uint64())
	}
	return b[:8+header+data]
}

// world is a server of the blobs of a model, with a fault in each answer to a request that it is asked to have.
type world struct {
	t     *testing.T
	files map[string][]byte
	base  identity.Manifest
	url   string
	stop  func()

	mu    sync.Mutex
	fault fault            // nil: none
	sent  map[string]int64 // by file
	asked map[string]int
}

// fault answers the request number n for a file, maybe with the help of next.
type fault func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc)

func (w *world) does(f fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fault = f
}

// count returns the bytes that were sent of a file, and how often it was asked for.
func (w *world) count(file string) (sent int64, asked int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sent[file], w.asked[file]
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, sent: map[string]int64{}, asked: map[string]int{}}
	w.files = map[string][]byte{small: shard(200, 40*kib), large: shard(100*kib, 3000*kib)}
	var shards []identity.Shard
	for name, b := range w.files {
		shards = append(shards, identity.Shard{Filename: name, Size: uint64(len(b)), Digest: identity.Sum(b)})
	}
	var err error
	if w.base, err = identity.New(shards); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(w)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	w.url, w.stop = server.URL, sync.OnceFunc(server.Close)
	t.Cleanup(w.stop)
	return w
}

func (w *world) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	file := ""
	for _, s := range w.base.Shards {
		if strings.HasSuffix(r.URL.Path, s.Digest.String()) {
			file = s.Filename
		}
	}
	w.mu.Lock()
	w.asked[file]++
	b, fault, n := w.files[file], w.fault, w.asked[file]
	w.mu.Unlock()
	to = &counter{to, w, file}
	next := func(to http.ResponseWriter, r *http.Request) {
		http.ServeContent(to, r, "", time.Time{}, bytes.NewReader(b))
	}
	if fault != nil {
		fault(to, r, file, n, next)
		return
	}
	next(to, r)
}

type counter struct {
	http.ResponseWriter
	w    *world
	file string
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.sent[c.file] += int64(n)
	return n, err
}

// cutter passes n bytes on and ends the connection with what end does.
type cutter struct {
	http.ResponseWriter
	n   int
	end func()
}

func (c *cutter) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b[:min(len(b), c.n)])
	if c.n -= n; n < len(b) {
		c.ResponseWriter.(*counter).ResponseWriter.(http.Flusher).Flush()
		c.end()
		panic(http.ErrAbortHandler)
	}
	return n, err
}

func (w *world) client(o client.Options) *client.Client {
	w.t.Helper()
	o.Backoff = time.Millisecond
	c, err := client.New(strings.TrimPrefix(w.url, "http://"), o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	return c
}

// load plans and loads the base. between is called before the load.
func (w *world) load(ctx context.Context, c *client.Client, between func()) (*gpuload.Resident, error) {
	src := remote.New(c, "team/demo", w.base)
	p, err := gpuload.NewPlan(ctx, src, []string{small, large}, gpuload.Want{Manifest: &w.base})
	if err != nil {
		return nil, err
	}
	between()
	return gpuload.Load(ctx, p, src, new(hostmem.Target), gpuload.Options{ChunkBytes: 256 * kib})
}

// loads makes a load that must succeed, and checks what is in memory.
func (w *world) loads(c *client.Client) {
	w.t.Helper()
	r, err := w.load(w.t.Context(), c, func() {})
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.Close(context.Background())
	handles, release, err := r.Lease()
	if err != nil {
		w.t.Fatal(err)
	}
	defer release()
	for _, h := range handles {
		s := r.Shards()[h.Shard]
		got := make([]byte, h.Size)
		if _, err := h.File.ReadAt(got, 0); err != nil || !bytes.Equal(got, w.files[s.Name][s.Data:]) {
			w.t.Errorf("%s: other bytes are held (%v)", s.Name, err)
		}
	}
	if m := r.Manifest(); m.Aggregate != w.base.Aggregate {
		w.t.Errorf("aggregate %s", m.Aggregate)
	}
}

// once fails if not every byte was sent once.
func (w *world) once() {
	w.t.Helper()
	for name, b := range w.files {
		if sent, _ := w.count(name); sent != int64(len(b)) {
			w.t.Errorf("%s: %d bytes sent, it has %d", name, sent, len(b))
		}
	}
}

func TestOnce(t *testing.T) {
	w := newWorld(t)
	w.loads(w.client(client.Options{}))
	w.once()
	_, a := w.count(small)
	if _, b := w.count(large); a != 1 || b != 3 {
		t.Errorf("%d and %d requests", a, b)
	}
}

// TestCut: what is missing of an answer is asked for, and nothing else.
func TestCut(t *testing.T) {
	w := newWorld(t)
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		next(&cutter{to, 600*kib + 1, func() {}}, r)
	})
	w.loads(w.client(client.Options{}))
	w.once()
	if _, n := w.count(large); n != 7 {
		t.Errorf("%d requests", n)
	}
}

// TestStall: an answer that goes no further is given up, and the rest asked for.
func TestStall(t *testing.T) {
	w := newWorld(t)
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		next(&cutter{to, 1200*kib + 1, func() { <-r.Context().Done() }}, r)
	})
	w.loads(w.client(client.Options{IdleTimeout: 300 * time.Millisecond}))
	if _, n := w.count(large); n < 5 {
		t.Errorf("%d requests", n)
	}
}

// TestTrouble: a server that fails now and then is asked again.
func TestTrouble(t *testing.T) {
	w := newWorld(t)
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		if n%2 == 1 {
			to.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		next(to, r)
	})
	w.loads(w.client(client.Options{}))
	w.once()
}

func TestRedirect(t *testing.T) {
	w := newWorld(t)
	other := httptest.NewServer(http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		http.ServeContent(&counter{to, w, r.URL.Path[1:]}, r, "", time.Time{}, bytes.NewReader(w.files[r.URL.Path[1:]]))
	}))
	t.Cleanup(other.Close)
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		to.Header().Set("Location", other.URL+"/"+file)
		to.WriteHeader(http.StatusTemporaryRedirect)
	})
	w.loads(w.client(client.Options{}))
	w.once()
}

// TestNoParts: a server that knows no ranges sends a shard from its start, also after it broke off.
func TestNoParts(t *testing.T) {
	w := newWorld(t)
	broke := false
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		whole := r.Clone(r.Context())
		whole.Header.Del("Range")
		if file == large && r.Header.Get("Range") == "" && !broke && n > 4 {
			broke = true
			to = &cutter{to, 2000 * kib, func() {}}
		}
		next(to, whole)
	})
	w.loads(w.client(client.Options{}))
	if !broke {
		t.Error("it did not break off")
	}
}

// TestNoPartsEver: a server that knows no ranges and never gets to the end is given up.
func TestNoPartsEver(t *testing.T) {
	w := newWorld(t)
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		whole := r.Clone(r.Context())
		whole.Header.Del("Range")
		next(&cutter{to, 2000 * kib, func() {}}, whole)
	})
	if _, err := w.load(t.Context(), w.client(client.Options{}), func() {}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
}

// TestRefused: what can't become right ends the load with one line that names the shard, and leaves nothing.
func TestRefused(t *testing.T) {
	answer := func(status int) fault {
		return func(to http.ResponseWriter, _ *http.Request, _ string, _ int, _ http.HandlerFunc) {
			to.WriteHeader(status)
		}
	}
	gone := func(http.ResponseWriter, *http.Request, string, int, http.HandlerFunc) { panic(http.ErrAbortHandler) }
	longer := func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		r.Header.Del("Range")
		http.ServeContent(to, r, "", time.Time{}, bytes.NewReader(make([]byte, 4000*kib)))
	}
	for name, tt := range map[string]struct {
		planned, loaded fault
		want            error
		text            string
	}{
		"unknown when it is planned": {answer(404), nil, api.ErrBlobUnknown, "404"},
		"unknown when it is loaded":  {nil, answer(404), api.ErrBlobUnknown, large},
		"no such range":              {nil, answer(416), nil, "416"},
		"another range":              {nil, answer(206), client.ErrNotBlob, large},
		"denied":                     {answer(403), nil, api.ErrDenied, "403"},
		"longer":                     {longer, nil, client.ErrNotBlob, "answer is not the blob"},
		"longer when it is loaded":   {nil, longer, client.ErrNotBlob, "answer is not the blob"},
		"gone when it is planned":    {gone, nil, io.ErrUnexpectedEOF, "gave up after"},
		"gone when it is loaded":     {nil, gone, io.ErrUnexpectedEOF, large},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.does(tt.planned)
			c := w.client(client.Options{})
			_, err := w.load(t.Context(), c, func() {
				w.does(tt.loaded)
				c.Close()
			})
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) ||
				strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

// TestDown: the server is no more.
func TestDown(t *testing.T) {
	w := newWorld(t)
	c := w.client(client.Options{})
	_, err := w.load(t.Context(), c, w.stop)
	if err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("%v", err)
	}
}

// TestFlipped: other bytes than the base states are never held, whatever the server says of them.
func TestFlipped(t *testing.T) {
	for _, at := range []int{100*kib + 8, 3100*kib + 7} {
		w := newWorld(t)
		b := bytes.Clone(w.files[large])
		b[at] ^= 1
		w.files[large] = b
		_, err := w.load(t.Context(), w.client(client.Options{}), func() {})
		var e *gpuload.Error
		if !errors.As(err, &e) || !errors.Is(err, gpuload.ErrMismatch) || e.Shard != large ||
			e.Expected != w.base.Shards[1].Digest.String() || e.Got != identity.Sum(b).String() {
			t.Errorf("byte %d: %v", at, err)
		}
	}
}

// TestHeaderLies: a header that tells of more bytes than there are is refused before it is read.
func TestHeaderLies(t *testing.T) {
	for _, n := range []uint64{1 << 62, 3200 * kib, 2} {
		w := newWorld(t)
		b := bytes.Clone(w.files[large])
		binary.LittleEndian.PutUint64(b, n)
		w.files[large] = b
		_, err := w.load(t.Context(), w.client(client.Options{}), func() {})
		var e *safetensors.Error
		if sent, _ := w.count(large); !errors.As(err, &e) || !strings.Contains(err.Error(), large) || sent > 128*kib {
			t.Errorf("%d: %v, after %d bytes", n, err, sent)
		}
	}
}

// TestCancel ends a load while a shard comes in.
func TestCancel(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.does(func(to http.ResponseWriter, r *http.Request, file string, n int, next http.HandlerFunc) {
		next(&cutter{to, 1000 * kib, func() { cancel(); <-r.Context().Done() }}, r)
	})
	if _, err := w.load(ctx, w.client(client.Options{}), func() {}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// TestOther: a shard that is not of the base is not asked for.
func TestOther(t *testing.T) {
	w := newWorld(t)
	if _, err := remote.New(w.client(client.Options{}), "team/demo", w.base).Open(t.Context(), "other"); err == nil ||
		!strings.Contains(err.Error(), "none of that name") {
		t.Errorf("%v", err)
	}
}

// TestAnyOrder reads a shard at random: the first time, and once its header was read.
func TestAnyOrder(t *testing.T) {
	w := newWorld(t)
	want := bytes.NewReader(w.files[large])
	for _, again := range []bool{false, true} {
		src := remote.New(w.client(client.Options{}), "team/demo", w.base)
		if again {
			header(t, src)
		}
		f, err := src.Open(t.Context(), large)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 60 {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			off, n := r.Int64N(want.Size()+10), r.IntN(500*kib)
			a, b := make([]byte, n), make([]byte, n)
			gotN, gotErr := f.ReadAt(a, off)
			wantN, wantErr := want.ReadAt(b, off)
			if gotN != wantN || !bytes.Equal(a, b) || (gotErr == nil) != (wantErr == nil) && n > 0 {
				t.Fatalf("%d bytes at %d: %d, %v; want %d, %v", n, off, gotN, gotErr, wantN, wantErr)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func header(t *testing.T, src *remote.Source) {
	t.Helper()
	f, err := src.Open(t.Context(), large)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 8), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
