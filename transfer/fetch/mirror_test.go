package fetch_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
)

// TestMirror: ranges of one file come from the registry and two mirrors at once; mirrors are asked for bytes alone, and
// with nothing that the registry is told.
func TestMirror(t *testing.T) {
	b, small := random(6*seg, 1), random(5000, 2)
	p, m, n := newPlace(t, b, small), newPlace(t, b, small), newPlace(t, b, small)
	o := client.Options{Token: "kiln_secret"}
	done, notes, err := get(t, target(t), p.source(o), fetch.Options{
		Mirrors: []fetch.Source{m.mirror(o), n.mirror(o)},
	}, nil, b, small)
	if err != nil || done.Received != int64(len(b)+len(small)) || notes != "" {
		t.Errorf("%+v, %v\n%s", done, err, notes)
	}
	for _, x := range []*place{p, m, n} {
		if x.bytes() == 0 {
			t.Error("a source was not used")
		}
	}
	for _, x := range []*place{m, n} {
		if _, others := x.requests(); len(others) > 0 {
			t.Errorf("a mirror was asked: %v", others)
		}
		for _, h := range x.seen {
			if h != "" {
				t.Errorf("a mirror was sent %q", h)
			}
		}
	}
	if p.seen[0] != "Bearer kiln_secret" {
		t.Errorf("the registry was sent %q", p.seen[0])
	}
}

// TestBadMirror: whatever a mirror does, the file is whole and right, and the mirror is blamed and let alone.
func TestBadMirror(t *testing.T) {
	b := random(5*seg, 1)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("asked elsewhere for %s", r.URL)
	}))
	defer elsewhere.Close()
	bad := flipped(b, 5, seg+5, 2*seg+5, 3*seg+5, 4*seg+5)
	answer := func(status int) func(http.ResponseWriter, *http.Request, []byte) bool {
		return func(w http.ResponseWriter, _ *http.Request, _ []byte) bool { w.WriteHeader(status); return true }
	}
	tests := map[string]struct {
		fault func(w http.ResponseWriter, r *http.Request, b []byte) bool
		want  string
		most  int // requests to it
	}{
		"lies": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			serve(w, r, bad)
			return true
		}, "is not asked any more: segment", 1},
		"redirects": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
			return true
		}, "redirected to another host", 1},
		"lacks it":          {answer(http.StatusNotFound), "does not have it", 1},
		"refuses":           {answer(http.StatusUnauthorized), "is not asked any more", 1},
		"is asked too much": {answer(http.StatusTooManyRequests), "it rests for 1s", 3},
		"fails":             {answer(http.StatusBadGateway), "it rests for 1s", 3},
		"dies": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			serve(&cutter{w, mib}, r, b)
			return true
		}, "it rests for 1s", 3},
		"sends all": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			r.Header.Del("Range")
			serve(&cutter{w, mib}, r, b)
			return true
		}, "does not send parts", 1},
		"sends a page": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			w.Header().Set("Content-Type", "text/html")
			w.Write([]byte("<html>log in</html>"))
			return true
		}, "HTML page", 1},
		"stalls": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			from, to := rangeOf(r, len(b))
			w.Header().Set("Content-Length", strconv.Itoa(to-from))
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, len(b)))
			w.WriteHeader(http.StatusPartialContent)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return true
		}, "it rests for 1s", 3},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p, m := newPlace(t, b), newPlace(t, b)
			m.onBlob(tt.fault)
			var o client.Options
			if name == "stalls" {
				o.IdleTimeout = 300 * time.Millisecond
			}
			done, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{
				Mirrors: []fetch.Source{m.mirror(o)},
			}, nil, b)
			if err != nil {
				t.Fatalf("%v\n%s", err, notes)
			}
			blobs, _ := m.requests()
			if n := len(blobs); n == 0 || n > tt.most {
				t.Errorf("the mirror was asked %d times", n)
			}
			if !strings.Contains(notes, tt.want) || tt.want != "" && !strings.Contains(notes, m.host) {
				t.Errorf("notes: %s", notes)
			}
			if p.bytes() < int64(len(b)) || done.Received > int64(len(b))+m.bytes() {
				t.Errorf("%d bytes from the registry, %d from the mirror, %+v", p.bytes(), m.bytes(), done)
			}
		})
	}
}

// TestMirrorGone: nobody listens there.
func TestMirrorGone(t *testing.T) {
	b := random(4*seg, 1)
	p, m := newPlace(t, b), newPlace(t, b)
	mirror := m.mirror(client.Options{})
	m.server.Close()
	o := fetch.Options{Mirrors: []fetch.Source{mirror}}
	if _, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, b); err != nil {
		t.Errorf("%v\n%s", err, notes)
	}
}

// TestRegistryFails: with the midstates at hand a mirror brings the rest.
func TestRegistryFails(t *testing.T) {
	b := random(6*seg, 1)
	p, m := newPlace(t, b), newPlace(t, b)
	var asked atomic.Int32
	p.onBlob(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
		if asked.Add(1) <= 2 {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	o := fetch.Options{Mirrors: []fetch.Source{m.mirror(client.Options{})}}
	done, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, b)
	if err != nil || done.Received != int64(len(b)) || m.bytes() == 0 {
		t.Errorf("%+v, %v\n%s", done, err, notes)
	}
}

// TestWholeFromMirror: without midstates a mirror may send a whole file, and its digest decides.
func TestWholeFromMirror(t *testing.T) {
	b := random(20*mib, 1)
	bad := flipped(b, 5)
	for name, tt := range map[string]struct {
		fault func(w http.ResponseWriter, r *http.Request, b []byte) bool
		want  string
	}{
		"honest": {nil, ""},
		"lies": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			serve(w, r, bad)
			return true
		}, "is not asked any more: f0: digest mismatch"},
		"lies and dies": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			serve(&cutter{w, 9 * mib}, r, bad)
			return true
		}, "a part of it came from mirror"},
		"dies": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			serve(&cutter{w, 9 * mib}, r, b)
			return true
		}, ""},
		"lacks it": {func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			w.WriteHeader(http.StatusNotFound)
			return true
		}, "does not have it"},
	} {
		t.Run(name, func(t *testing.T) {
			p, m := newPlace(t, b), newPlace(t, b)
			m.onBlob(tt.fault)
			o := fetch.Options{Jobs: 1, Mirrors: []fetch.Source{m.mirror(client.Options{})}}
			_, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, b)
			if err != nil || !strings.Contains(notes, tt.want) || m.bytes() == 0 && tt.want != "does not have it" {
				t.Errorf("%v, %d bytes from the mirror\n%s", err, m.bytes(), notes)
			}
		})
	}
	p, m := newPlace(t, b), newPlace(t, b)
	lie := func(w http.ResponseWriter, r *http.Request, _ []byte) bool { serve(w, r, bad); return true }
	m.onBlob(lie)
	p.onBlob(lie)
	o := fetch.Options{Mirrors: []fetch.Source{m.mirror(client.Options{})}}
	_, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, b)
	var wrong *fetch.MismatchError
	if !errors.As(err, &wrong) {
		t.Errorf("%v\n%s", err, notes)
	}
}
