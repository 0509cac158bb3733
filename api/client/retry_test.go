package client

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

func fresh(t *testing.T) *Client {
	t.Helper()
	c, err := New("localhost", Options{Token: "none"})
	if err != nil {
		t.Fatal(err)
	}
	c.met.Store(true)
	return c
}

func TestRetryAfterIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, start := fresh(t), time.Now()
		var asked atomic.Bool
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				err := c.Retry(t.Context(), "blob", func() error {
					if since := time.Since(start); since > 0 && since < 7*time.Second {
						t.Errorf("asked again after %s", since)
					}
					if asked.CompareAndSwap(false, true) {
						return &StatusError{Status: http.StatusTooManyRequests, RetryAfter: 7 * time.Second}
					}
					if time.Since(start) == 0 {
						return io.ErrUnexpectedEOF
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("took %s", took)
		}
	})
}

// TestRetryTellsOnce: workers that wait for one host at a time say so once.
func TestRetryTellsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told atomic.Int64
		c, err := New("localhost", Options{Token: "none", Notify: func(string) { told.Add(1) }})
		if err != nil {
			t.Fatal(err)
		}
		c.met.Store(true)
		start := time.Now()
		var wg, met sync.WaitGroup
		met.Add(8)
		for range 8 {
			wg.Go(func() {
				err := c.Retry(t.Context(), "blob", func() error {
					if time.Since(start) > 0 {
						return nil
					}
					met.Done()
					met.Wait() // all fail at the same time
					return &StatusError{Status: http.StatusServiceUnavailable, RetryAfter: 3 * time.Second}
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := told.Load(); n != 1 {
			t.Errorf("told %d times", n)
		}
	})
}

func TestRetryEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, start := fresh(t), time.Now()
		var requests atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				err := c.Retry(t.Context(), "blob", func() error {
					requests.Add(1)
					return &StatusError{Status: http.StatusServiceUnavailable}
				})
				var s *StatusError
				if !errors.As(err, &s) || s.Status != http.StatusServiceUnavailable {
					t.Errorf("last error is lost: %v", err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(start); requests.Load() != 8*maxTries || took > time.Minute || took < 10*time.Second {
			t.Errorf("%d requests in %s", requests.Load(), took)
		}
	})
}

func TestRetryProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, tries := fresh(t), 0
		err := c.Retry(t.Context(), "blob", func() error {
			if tries++; tries == 50 {
				return nil
			}
			c.moved.Add(1)
			return io.ErrUnexpectedEOF
		})
		if err != nil || tries != 50 {
			t.Errorf("%d tries with progress: %v", tries, err)
		}
		tries = 0
		err = c.Retry(t.Context(), "blob", func() error { tries++; c.moved.Add(1); return io.ErrUnexpectedEOF })
		if err == nil || tries != maxAll {
			t.Errorf("%d tries with endless progress: %v", tries, err)
		}
		for _, final := range []error{io.ErrShortWrite, &StatusError{Status: 404}, &StatusError{Status: 403}, context.Canceled} {
			tries = 0
			if err := c.Retry(t.Context(), "x", func() error { tries++; return final }); tries != 1 || !errors.Is(err, final) {
				t.Errorf("%v: %d tries, %v", final, tries, err)
			}
		}
		hour := &StatusError{Status: 429, RetryAfter: time.Hour}
		tries = 0
		if err := c.Retry(t.Context(), "x", func() error { tries++; return hour }); tries != 1 || err == nil {
			t.Errorf("Retry-After of an hour: %d tries, %v", tries, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		start := time.Now()
		if err := c.Retry(ctx, "x", func() error { return io.ErrUnexpectedEOF }); err == nil || time.Since(start) > time.Second {
			t.Errorf("cancelled after 100 ms, returned %v after %s", err, time.Since(start))
		}
	})
}

// TestOnce: what can be done without is tried once, or twice if a connection dropped, and lets nobody wait; but it waits
// where others were asked to.
func TestOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tt := range []struct {
			err   error
			tries int
		}{
			{nil, 1}, {io.EOF, 2}, {io.ErrUnexpectedEOF, 2}, {ErrIdle, 1}, {context.Canceled, 1},
			{&StatusError{Status: http.StatusTooManyRequests, RetryAfter: time.Minute}, 1},
			{&StatusError{Status: http.StatusServiceUnavailable, Err: io.EOF}, 1},
		} {
			c, tries, start := fresh(t), 0, time.Now()
			err := c.Once(t.Context(), func() error { tries++; return tt.err })
			if !errors.Is(err, tt.err) || tries != tt.tries || c.pace.left() > 0 || time.Since(start) > time.Second {
				t.Errorf("%v: %d tries in %s, %v", tt.err, tries, time.Since(start), err)
			}
		}
		c, start := fresh(t), time.Now()
		c.pace.hold(start.Add(7 * time.Second))
		err := c.Once(t.Context(), func() error { return nil })
		if err != nil || time.Since(start) < 7*time.Second {
			t.Errorf("asked after %s, %v", time.Since(start), err)
		}
	})
}

// TestKnownIsNoProgress: bytes that a server without parts sends once more start no count anew.
func TestKnownIsNoProgress(t *testing.T) {
	c := dial(t, func(w http.ResponseWriter, r *http.Request) { w.Write(content) }, Options{})
	size := int64(len(content))
	for _, known := range []int64{0, 5, size} {
		before := c.moved.Load()
		body, err := c.Whole(t.Context(), "m", digest, known, size)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(iotest.OneByteReader(body))
		if err != nil || int64(len(got)) != size || c.moved.Load()-before != size-known {
			t.Errorf("%d known: %d bytes, %d of them progress, %v", known, len(got), c.moved.Load()-before, err)
		}
		body.Close()
	}
}

func TestParseRetryAfter(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for v, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, "-3": 0, "soon": 0, "0": 0, "Sun, 01 Mar 2026 12:00:09 GMT": 9 * time.Second,
		"Sun, 01 Mar 2026 11:00:00 GMT": 0, "99999999999999999999": 0,
	} {
		if got := parseRetryAfter(v, now); got != want {
			t.Errorf("%q: %s, want %s", v, got, want)
		}
	}
}

// pipes is a network in memory, whose time a synctest bubble can move.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p pipes) Close() error   { close(p.closed); return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	a, b := net.Pipe()
	p.conns <- b
	return conn{a}, nil
}

// TestSlow: a report that comes byte by byte has an end, though bytes keep moving.
func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pipes{make(chan net.Conn), make(chan struct{})}
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				w.Write([]byte(" "))
				w.(http.Flusher).Flush()
				select {
				case <-r.Context().Done():
				case <-time.After(time.Second): // of the bubble
				}
			}
		})}
		done := make(chan error)
		go func() { done <- srv.Serve(p) }()
		c := fresh(t)
		c.auth.Client.Transport.(*http.Transport).DialContext = p.dial
		if _, err := c.Health(t.Context(), "/health"); !errors.Is(err, ErrSlow) {
			t.Errorf("health: %v", err)
		}
		if _, err := c.ModelState(t.Context(), "/v1/debug/model-state"); !errors.Is(err, ErrSlow) {
			t.Errorf("model state: %v", err)
		}
		c.Close()
		srv.Close()
		<-done
	})
}

// TestIdle cuts a transfer that stalls, in either direction, and lets one alone that is merely slow.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, end := pipes{make(chan net.Conn), make(chan struct{})}, make(chan struct{})
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.Method == http.MethodPatch: // takes nothing
				<-end
				return
			case strings.HasPrefix(r.URL.Path, "/v2/silent/"):
				<-r.Context().Done()
				return
			}
			w.Header().Set("Content-Length", "16")
			for i := range content {
				if i == 8 && strings.HasPrefix(r.URL.Path, "/v2/stalls/") {
					<-r.Context().Done()
					return
				}
				w.Write(content[i : i+1])
				w.(http.Flusher).Flush()
				time.Sleep(50 * time.Second) // of the bubble
			}
		})}
		done := make(chan error)
		go func() { done <- srv.Serve(p) }()
		c := fresh(t)
		transport := c.auth.Client.Transport.(*http.Transport)
		transport.DialContext = p.dial

		for repo, wantBytes := range map[string]int{"slow": 16, "stalls": 8, "silent": 0} {
			start, got := time.Now(), []byte(nil)
			body, err := c.Blob(t.Context(), repo, digest, 0, 16, 16)
			if err == nil {
				got, err = io.ReadAll(body)
				body.Close()
			}
			idle := errors.Is(err, ErrIdle) && Temporary(err)
			if len(got) != wantBytes || (wantBytes == 16) != (err == nil) || err != nil && !idle {
				t.Errorf("%s: %d bytes in %s, %v", repo, len(got), time.Since(start), err)
			}
		}
		u := &Upload{c: c, repo: "m", location: "/v2/m/blobs/uploads/1"}
		if err := u.Append(t.Context(), strings.NewReader(strings.Repeat("x", 2<<20)), 2<<20); !errors.Is(err, ErrIdle) {
			t.Errorf("upload: %v", err)
		}
		c.Close()
		close(end)
		srv.Close()
		<-done
	})
}
