package transfer_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const mib = 1 << 20

func total(files map[string][]byte) (n int64) {
	for _, b := range files {
		n += int64(len(b))
	}
	return n
}

// interrupted makes a pull stop after n bytes of the blob b, as an interrupt by hand does.
func (s *site) interrupted(dir string, b []byte, n int) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	d := identity.Sum(b).String()
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) == d {
			r.Header.Del("Range")
			w = &cutter{w, n, func() { <-time.After(50 * time.Millisecond); cancel() }}
		}
		next.ServeHTTP(w, r)
	})
	o := s.options()
	o.Jobs = 1
	_, err := transfer.Pull(ctx, s.c, s.resolve("m", "v1"), dir, o)
	var fetch *transfer.FetchError
	if !errors.Is(err, context.Canceled) || errors.As(err, &fetch) {
		s.t.Fatalf("interrupted pull: %v", err)
	}
	s.nothingAt(dir)
	s.onBlob(nil)
}

func TestPull(t *testing.T) {
	s := newSite(t)
	files := model(3, 5*mib)
	d := s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "sub", "m")
	done := s.pull(dir, files)
	if done.Received != total(files) || done.Already || done.Record.Manifest != d || s.sent() != total(files) {
		t.Errorf("%+v, %d bytes sent", done, s.sent())
	}
	s.onBlob(nil)
	again := s.pull(dir, files)
	if !again.Already || s.requests() != 0 || !again.Record.Verified.Equal(done.Record.Verified) {
		t.Errorf("second pull: %+v, %d requests", again, s.requests())
	}
}

// TestResumePull: what was received is neither sent nor hashed again.
func TestResumePull(t *testing.T) {
	s := newSite(t)
	files := model(1, 10*mib)
	s.push("m", "v1", files)
	b := files["model-a.safetensors"]
	dir := filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, b, 6*mib)
	done := s.pull(dir, files)
	if done.Resumed == 0 || done.Resumed+s.sentOf(b) != int64(len(b)) {
		t.Errorf("resumed at %d, %d bytes of %d sent again", done.Resumed, s.sentOf(b), len(b))
	}
	if !strings.Contains(s.notes.String(), "resumed at") {
		t.Errorf("notes: %s", &s.notes)
	}
}

// TestRangeIgnored is PL-07.
func TestRangeIgnored(t *testing.T) {
	s := newSite(t)
	files := model(1, 10*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, files["model-a.safetensors"], 4*mib)
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		r.Header.Del("Range")
		next.ServeHTTP(w, r)
	})
	s.pull(dir, files)
	if !strings.Contains(s.notes.String(), "does not send parts") {
		t.Errorf("notes: %s", &s.notes)
	}
}

// TestCompletePartial is PL-10: all bytes are there, and the server has nothing more to send.
func TestCompletePartial(t *testing.T) {
	s := newSite(t)
	files := model(1, 6*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	var kept int64
	area, err := staging.Open(t.Context(), dir, staging.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range files {
		p, err := area.Partial(identity.Sum(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		n, err := p.Write(b)
		if kept += int64(n); err != nil || p.Close() != nil {
			t.Fatal(err)
		}
	}
	if err := area.Close(); err != nil {
		t.Fatal(err)
	}
	refuse := func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusRequestedRangeNotSatisfiable) }
	s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { refuse(w, r) })
	if done := s.pull(dir, files); done.Received != 0 || done.Resumed != kept {
		t.Errorf("%+v, want %d bytes resumed", done, kept)
	}
}

// TestRangeRefused: 416 to a partial that is not complete makes the file begin anew, once.
func TestRangeRefused(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(6*mib, 1)}
	s.push("m", "v1", files)
	refuse := func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusRequestedRangeNotSatisfiable) }
	dir := filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, files["model.safetensors"], 2*mib)
	s.onBlob(once(refuse))
	s.pull(dir, files)
	if !strings.Contains(s.notes.String(), "refused the rest") {
		t.Errorf("notes: %s", &s.notes)
	}
	dir = filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, files["model.safetensors"], 2*mib)
	s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { refuse(w, r) })
	if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options()); err == nil || s.requests() > 20 {
		t.Errorf("%v after %d requests", err, s.requests())
	}
	s.nothingAt(dir)
}

// TestTagMovesBetween is PL-11: a partial is of a digest, not of a name.
func TestTagMovesBetween(t *testing.T) {
	s := newSite(t)
	files := model(1, 6*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, files["model-a.safetensors"], 2*mib)
	files["model-a.safetensors"] = shard(6*mib, 99)
	s.push("m", "v1", files)
	if done := s.pull(dir, files); done.Resumed >= mib {
		t.Errorf("%d bytes of the old content were kept", done.Resumed)
	}
}

// TestTagMovesDuring is PL-26.
func TestTagMovesDuring(t *testing.T) {
	s := newSite(t)
	files := model(1, 6*mib)
	first := s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	other := model(2, mib)
	s.push("m", "v1", other)
	dir := filepath.Join(t.TempDir(), "m")
	done, err := transfer.Pull(t.Context(), s.c, plan, dir, s.options())
	if err != nil || done.Record.Manifest != first || !strings.Contains(plan.Reference(), first.String()) {
		t.Fatalf("%v, %v", done.Record.Manifest, err)
	}
	s.holds(dir, files)
}

// TestNotTheBlob: PL-12 and PL-14, and a body of another length.
func TestNotTheBlob(t *testing.T) {
	page := []byte("<html>please log in</html>")
	tests := map[string]struct {
		answer func(w http.ResponseWriter, b []byte)
		want   string
	}{
		"error page": {func(w http.ResponseWriter, b []byte) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.Write(page)
		}, "text/html"},
		"error page of the right length": {func(w http.ResponseWriter, b []byte) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.Write(append(page, bytes.Repeat([]byte{' '}, len(b)-len(page))...))
		}, "text/html"},
		"packed": {func(w http.ResponseWriter, b []byte) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			z.Write(b)
			z.Close()
		}, "gzip"},
		"longer": {func(w http.ResponseWriter, b []byte) {
			w.Write(append(bytes.Clone(b), 0))
		}, "longer"},
	}
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(mib, 1)}
	b := files["model.safetensors"]
	s.push("m", "v1", files)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "m")
			s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
				http.NewResponseController(w).Flush() // no length is announced
				tt.answer(w, b)
			})
			if name != "longer" {
				s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { tt.answer(w, b) })
			}
			_, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options())
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "model.safetensors") {
				t.Errorf("got %v", err)
			}
			s.nothingAt(dir)
			s.onBlob(nil)
			s.pull(dir, files)
		})
	}
}

// TestLinkExpires is PL-15: the target of a redirect refuses in the middle.
func TestLinkExpires(t *testing.T) {
	s := newSite(t)
	files := model(1, 14*mib)
	s.push("m", "v1", files)
	b := files["model-a.safetensors"]
	var given, served atomic.Int64
	cdn := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n := served.Add(1); n == 3 || n == 4 {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, "<Error>Request has expired</Error>")
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	}))
	t.Cleanup(cdn.Close)
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) != identity.Sum(b).String() {
			next.ServeHTTP(w, r)
			return
		}
		http.Redirect(w, r, fmt.Sprintf("%s/?signature=%d", cdn.URL, given.Add(1)), http.StatusTemporaryRedirect)
	})
	s.pull(filepath.Join(t.TempDir(), "m"), files)
	if given.Load() < 6 {
		t.Errorf("%d redirects were asked for", given.Load())
	}
}

// TestDenied: the registry itself refuses; that is final.
func TestDenied(t *testing.T) {
	s := newSite(t)
	s.push("m", "v1", model(2, mib))
	s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { w.WriteHeader(http.StatusForbidden) })
	dir := filepath.Join(t.TempDir(), "m")
	o := s.options()
	o.Jobs = 1
	_, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o)
	if !errors.Is(err, api.ErrDenied) || s.requests() != 1 {
		t.Errorf("%v after %d requests", err, s.requests())
	}
	s.nothingAt(dir)
}

// TestRetryAfter is PL-17: all workers share the wait.
func TestRetryAfter(t *testing.T) {
	for name, value := range map[string]func() string{
		"seconds": func() string { return "1" },
		"date":    func() string { return time.Now().Add(2 * time.Second).UTC().Format(http.TimeFormat) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			files := model(6, 100_000)
			s.push("m", "v1", files)
			var mu sync.Mutex
			var told, next time.Time
			s.onBlob(func(w http.ResponseWriter, r *http.Request, h http.Handler) {
				mu.Lock()
				first := told.IsZero()
				if first {
					told = time.Now()
				} else if next.IsZero() && time.Since(told) > 100*time.Millisecond {
					next = time.Now()
				}
				mu.Unlock()
				if first {
					w.Header().Set("Retry-After", value())
					w.WriteHeader(http.StatusTooManyRequests)
					return
				}
				h.ServeHTTP(w, r)
			})
			o := s.options()
			o.Jobs = 1
			dir := filepath.Join(t.TempDir(), "m")
			if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o); err != nil {
				t.Fatal(err)
			}
			s.holds(dir, files)
			if next.Sub(told) < 900*time.Millisecond {
				t.Errorf("asked again after %s", next.Sub(told))
			}
		})
	}
}

// TestAlways503 is PL-18.
func TestAlways503(t *testing.T) {
	s := newSite(t)
	s.push("m", "v1", model(20, 10_000))
	plan := s.resolve("m", "v1")
	s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	dir := filepath.Join(t.TempDir(), "m")
	_, err := transfer.Pull(t.Context(), s.c, plan, dir, s.options())
	if err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("got %v", err)
	}
	if s.requests() > 8*8 {
		t.Errorf("%d requests", s.requests())
	}
	s.nothingAt(dir)
}

// TestStall is PL-19: half of the bytes and then nothing.
func TestStall(t *testing.T) {
	s := newSite(t)
	files := model(1, 3*mib)
	s.push("m", "v1", files)
	d := identity.Sum(files["model-a.safetensors"]).String()
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	var stalled atomic.Bool
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) == d && !stalled.Swap(true) {
			w = &cutter{w, mib, func() {
				select {
				case <-stop:
				case <-r.Context().Done():
				}
			}}
		}
		next.ServeHTTP(w, r)
	})
	c := s.client(client.Options{IdleTimeout: 300 * time.Millisecond})
	dir := filepath.Join(t.TempDir(), "m")
	if _, err := transfer.Pull(t.Context(), c, s.resolve("m", "v1"), dir, s.options()); err != nil {
		t.Fatal(err)
	}
	s.holds(dir, files)
	if !strings.Contains(s.notes.String(), "no byte moved") {
		t.Errorf("notes: %s", &s.notes)
	}
}

// TestSlow: a transfer that moves is not cut, however long it takes.
func TestSlow(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(1000, 1)}
	s.push("m", "v1", files)
	s.onBlob(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		b := files["model.safetensors"]
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		for len(b) > 0 {
			w.Write(b[:100])
			http.NewResponseController(w).Flush()
			b = b[100:]
			<-time.After(50 * time.Millisecond)
		}
	})
	c := s.client(client.Options{IdleTimeout: 250 * time.Millisecond})
	dir := filepath.Join(t.TempDir(), "m")
	if _, err := transfer.Pull(t.Context(), c, s.resolve("m", "v1"), dir, s.options()); err != nil {
		t.Fatal(err)
	}
	if s.requests() != 1 {
		t.Errorf("%d requests", s.requests())
	}
}

// TestTruncated: a body that ends early is continued; one that never has a byte is an error that says so.
func TestTruncated(t *testing.T) {
	s := newSite(t)
	files := model(1, 6*mib)
	s.push("m", "v1", files)
	b := files["model-a.safetensors"]
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(&cutter{w, 700_000, func() {}}, r)
	})
	s.pull(filepath.Join(t.TempDir(), "m"), files)
	if s.sentOf(b) != int64(len(b)) {
		t.Errorf("%d bytes sent for %d", s.sentOf(b), len(b))
	}
	plan := s.resolve("m", "v1")
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		w.WriteHeader(http.StatusOK)
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	dir := filepath.Join(t.TempDir(), "m")
	o := s.options()
	o.Jobs = 1
	if _, err := transfer.Pull(t.Context(), s.c, plan, dir, o); err == nil || !strings.Contains(err.Error(), "0 of") {
		t.Errorf("pulled from nothing: %v", err)
	}
	s.nothingAt(dir)
}

// TestCorrupt: bytes of the right number that are not the right ones.
func TestCorrupt(t *testing.T) {
	s := newSite(t)
	files := model(2, 6*mib)
	s.push("m", "v1", files)
	name := "model-b.safetensors"
	b := files[name]
	bad := bytes.Clone(b)
	bad[5*mib] ^= 1
	corrupt := func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(bad))
	}
	const again = "fetching it anew"
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) == identity.Sum(b).String() && !strings.Contains(s.notes.String(), again) {
			corrupt(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
	s.pull(filepath.Join(t.TempDir(), "m"), files)
	if !strings.Contains(s.notes.String(), again) {
		t.Errorf("notes: %s", &s.notes)
	}
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) == identity.Sum(b).String() {
			corrupt(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
	dir := filepath.Join(t.TempDir(), "m")
	_, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options())
	var mismatch *transfer.MismatchError
	if !errors.As(err, &mismatch) || !errors.Is(err, client.ErrMismatch) {
		t.Fatalf("got %v", err)
	}
	want := transfer.MismatchError{Name: name, Size: 6 * mib, Want: identity.Sum(b), Got: identity.Sum(bad)}
	if *mismatch != want {
		t.Errorf("got %+v, want %+v", *mismatch, want)
	}
	s.nothingAt(dir)
	s.onBlob(nil)
	s.pull(dir, files)
	if s.sent() != int64(len(b)) {
		t.Errorf("the retry fetched %d bytes, want only the shard's %d", s.sent(), len(b))
	}
}

// TestOneMissing is PL-31.
func TestOneMissing(t *testing.T) {
	s := newSite(t)
	files := model(4, mib)
	s.push("m", "v1", files)
	name := "model-c.safetensors"
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if blobOf(r) == identity.Sum(files[name]).String() {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		next.ServeHTTP(w, r)
	})
	dir := filepath.Join(t.TempDir(), "m")
	_, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options())
	var fetch *transfer.FetchError
	if !errors.As(err, &fetch) || len(fetch.Failed) != 1 || fetch.Failed[0].Name != name || fetch.Total != len(files) ||
		!errors.Is(err, api.ErrBlobUnknown) {
		t.Fatalf("got %v", err)
	}
	s.nothingAt(dir)
	s.onBlob(nil)
	s.pull(dir, files)
	if s.sent() != mib {
		t.Errorf("the retry fetched %d bytes", s.sent())
	}
}

// TestWrongHeader is PL-29: the bytes decide, and a header that says otherwise is refused.
func TestWrongHeader(t *testing.T) {
	s := newSite(t)
	s.push("m", "v1", model(1, mib))
	s.mu.Lock()
	s.fault = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(headerWriter{w}, r)
	}
	s.mu.Unlock()
	_, err := transfer.Resolve(t.Context(), s.c, client.Reference{Host: s.host, Repo: "m", Tag: "v1"})
	if !errors.Is(err, client.ErrMismatch) {
		t.Errorf("got %v", err)
	}
}

type headerWriter struct{ http.ResponseWriter }

func (h headerWriter) Unwrap() http.ResponseWriter { return h.ResponseWriter }

func (h headerWriter) WriteHeader(status int) {
	h.Header().Set(api.HeaderContentDigest, identity.Sum([]byte("x")).String())
	h.ResponseWriter.WriteHeader(status)
}
