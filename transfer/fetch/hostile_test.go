package fetch_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
)

// refuse answers with a status, and asks for a pause unless that is empty.
func refuse(w http.ResponseWriter, status int, after string) bool {
	if after != "" {
		w.Header().Set("Retry-After", after)
	}
	w.WriteHeader(status)
	return true
}

// TestMirrorIsLast: where the registry gives no bytes, and a mirror none that are of use, the pull ends with what the
// registry said, and the mirror is named.
func TestMirrorIsLast(t *testing.T) {
	large, small := random(3*seg, 1), random(2*mib, 2)
	for name, tt := range map[string]struct {
		registry int
		mirror   func(w http.ResponseWriter, r *http.Request, b []byte) bool
		b        []byte
		want     string
		most     int // requests to the mirror
	}{
		"rests for a day": {http.StatusNotFound, func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
			return refuse(w, http.StatusServiceUnavailable, "100000")
		}, large, "it wants to rest for 27h46m40s", 1},
		"is asked too much, until tomorrow": {http.StatusInternalServerError,
			func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
				return refuse(w, http.StatusTooManyRequests, time.Now().Add(24*time.Hour).UTC().Format(http.TimeFormat))
			}, large, "it wants to rest for", 1},
		"rests for a day, in order": {http.StatusNotFound, func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
			return refuse(w, http.StatusServiceUnavailable, "100000")
		}, small, "it wants to rest for", 1},
		"sends one byte": {http.StatusNotFound, func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			serve(&cutter{w, 1}, r, b)
			return true
		}, large, "is not asked any more", 3},
		"sends half a segment": {http.StatusNotFound, func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			serve(&cutter{w, seg / 2}, r, b)
			return true
		}, large, "is not asked any more", 9}, // over several connections at a time
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, m := newPlace(t, tt.b), newPlace(t, tt.b)
			p.onBlob(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool { return refuse(w, tt.registry, "") })
			m.onBlob(tt.mirror)
			o := fetch.Options{Mirrors: []fetch.Source{m.mirror(client.Options{})}}
			_, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, tt.b)
			if err == nil || !strings.Contains(err.Error(), http.StatusText(tt.registry)) {
				t.Errorf("got %v", err)
			}
			if blobs, _ := m.requests(); len(blobs) > tt.most {
				t.Errorf("the mirror was asked %d times", len(blobs))
			}
			if !strings.Contains(notes, "mirror "+m.host) || !strings.Contains(notes, tt.want) {
				t.Errorf("notes: %s", notes)
			}
		})
	}
}

// TestCrawlingMirror: a mirror that sends a byte now and then does not hold a pull up, not even the only connection.
func TestCrawlingMirror(t *testing.T) {
	for name, b := range map[string][]byte{"in segments": random(3*seg, 1), "in order": random(2*mib, 2)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, m := newPlace(t, b), newPlace(t, b)
			m.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
				serve(crawler{w, r}, r, b)
				return true
			})
			o := fetch.Options{Jobs: 1, Mirrors: []fetch.Source{m.mirror(client.Options{})}}
			_, notes, err := get(t, target(t), p.source(client.Options{}), o, nil, b)
			if err != nil || p.bytes() == 0 {
				t.Errorf("%d bytes of the registry, %v", p.bytes(), err)
			}
			blobs, _ := m.requests()
			if len(blobs) != 1 || !strings.Contains(notes, m.host) || !strings.Contains(notes, "it sends less than") {
				t.Errorf("the mirror was asked %d times\n%s", len(blobs), notes)
			}
		})
	}
}

// crawler sends a body byte by byte, as long as somebody listens.
type crawler struct {
	http.ResponseWriter
	r *http.Request
}

func (c crawler) Write(b []byte) (n int, err error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for ; n < len(b); n++ {
		if _, err := c.ResponseWriter.Write(b[n : n+1]); err != nil {
			return n, err
		}
		http.NewResponseController(c.ResponseWriter).Flush()
		select {
		case <-tick.C:
		case <-c.r.Context().Done():
			return n, c.r.Context().Err()
		}
	}
	return n, nil
}

// TestNoPartsBreaks: from a registry that sends no parts and breaks off, what is here comes a few times more at most.
func TestNoPartsBreaks(t *testing.T) {
	b := random(4*mib, 1)
	for name, more := range map[string]int{"always at the same place": 0, "a byte later each time": 1} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, b)
			var tries atomic.Int32
			p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
				if r.Header.Get("Range") == "" {
					w = &cutter{w, len(b)*9/10 + int(tries.Add(1))*more}
				}
				r.Header.Del("Range")
				serve(w, r, b)
				return true
			})
			_, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
			if n := tries.Load(); err == nil || n > 12 {
				t.Errorf("%d tries, %v\n%s", n, err, notes)
			}
		})
	}
}

// TestMidstatesRefused: midstates are asked for once, whatever the registry says to that, and nothing waits for them.
func TestMidstatesRefused(t *testing.T) {
	b := random(3*seg, 1)
	most := len(form(b))
	endless := func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", api.MediaTypeMidstates)
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, mib)); err != nil {
				break
			}
		}
		return true
	}
	var dropped atomic.Bool
	for name, tt := range map[string]struct {
		forge func(w http.ResponseWriter, r *http.Request) bool
		times int
		want  string
	}{
		"is asked too much": {func(w http.ResponseWriter, _ *http.Request) bool {
			return refuse(w, http.StatusTooManyRequests, "299")
		}, 1, "and it comes in order"},
		"fails": {func(w http.ResponseWriter, _ *http.Request) bool {
			return refuse(w, http.StatusInternalServerError, "")
		}, 1, "and it comes in order"},
		"never ends": {endless, 1, fmt.Sprintf("larger than %d bytes", most)},
		"drops the connection": {func(http.ResponseWriter, *http.Request) bool {
			panic(http.ErrAbortHandler)
		}, 2, "and it comes in order"},
		"drops it once": {func(http.ResponseWriter, *http.Request) bool {
			if !dropped.Swap(true) {
				panic(http.ErrAbortHandler)
			}
			return false
		}, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, b)
			p.onMidstates(tt.forge)
			var waits atomic.Int32
			from := p.source(client.Options{Notify: func(string) { waits.Add(1) }})
			_, notes, err := get(t, target(t), from, fetch.Options{}, nil, b)
			_, others := p.requests()
			if err != nil || len(others) != tt.times || waits.Load() > 0 {
				t.Errorf("asked %d times, %d waits, %v", len(others), waits.Load(), err)
			}
			if !strings.Contains(notes, tt.want) || tt.want == "" && notes != "" {
				t.Errorf("notes: %s", notes)
			}
		})
	}
}
