package fetch_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
)

// TestSegments: a large file comes in several requests, each byte once.
func TestSegments(t *testing.T) {
	b, small := random(5*seg+12345, 1), random(1000, 2)
	p := newPlace(t, b, small)
	done, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b, small)
	blobs, _ := p.requests()
	if err != nil || done.Received != int64(len(b)+len(small)) || p.bytes() != done.Received || notes != "" {
		t.Errorf("%+v, %d bytes sent, %v\n%s", done, p.bytes(), err, notes)
	}
	if len(blobs) < 3 || p.opened.Load() > 8 {
		t.Errorf("%d requests over %d connections", len(blobs), p.opened.Load())
	}
}

// TestShares: each of two files has half of the connections.
func TestShares(t *testing.T) {
	const connections = 4
	a, b := random(5*seg, 1), random(5*seg, 2)
	p := newPlace(t, a, b)
	var begun atomic.Int32
	var ofA atomic.Int32 // of the first requests
	all := make(chan struct{})
	p.onBlob(func(_ http.ResponseWriter, r *http.Request, blob []byte) bool {
		n := begun.Add(1)
		if n <= connections && &blob[0] == &a[0] {
			ofA.Add(1)
		}
		if n == connections {
			close(all)
		}
		select { // nothing is answered before each connection is used
		case <-all:
		case <-r.Context().Done():
		}
		return false
	})
	if _, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{Jobs: connections}, nil, a, b); err != nil {
		t.Errorf("%v\n%s", err, notes)
	}
	if ofA.Load() != connections/2 {
		t.Errorf("%d of the first %d requests are for one of two files", ofA.Load(), connections)
	}
}

// TestOneBadSegment: bytes that do not match cost one segment, and the note says which and from whom.
func TestOneBadSegment(t *testing.T) {
	b := random(6*seg, 1)
	p := newPlace(t, b)
	bad := flipped(b, 3*seg+5)
	var told atomic.Bool
	p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		if from, to := rangeOf(r, len(b)); from <= 3*seg && 3*seg < to && !told.Swap(true) {
			serve(w, r, bad)
			return true
		}
		return false
	})
	done, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
	if err != nil || done.Received != int64(len(b)+seg) {
		t.Errorf("%d bytes for %d, %v", done.Received, len(b), err)
	}
	if !strings.Contains(notes, "segment 3,") || !strings.Contains(notes, p.host) {
		t.Errorf("notes: %s", notes)
	}
}

// TestDamagedAtRegistry: a segment that is never right ends in the verdict of the digest.
func TestDamagedAtRegistry(t *testing.T) {
	b := random(4*seg, 1)
	p := newPlace(t, b)
	bad := flipped(b, seg+5)
	p.onBlob(func(w http.ResponseWriter, r *http.Request, _ []byte) bool { serve(w, r, bad); return true })
	_, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
	var m *fetch.MismatchError
	if !errors.As(err, &m) || m.Got != identity.Sum(bad) || !strings.Contains(notes, "segment 1,") {
		t.Errorf("%v\n%s", err, notes)
	}
}

// TestLyingMidstates: whatever the registry says of midstates, right bytes come in and wrong ones do not.
func TestLyingMidstates(t *testing.T) {
	b := random(2*seg+7, 1)
	d := identity.Sum(b)
	other := flipped(b, seg+5)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/vnd.kiln.sha256-midstates.v1")
		w.Write(form(b))
	}))
	defer elsewhere.Close()
	good := form(b)
	tests := map[string]struct {
		form []byte
		want string // in the notes
	}{
		"forged":              {formOf(b, d, func(e []lanes.State) { e[1][7] ^= 1 }), "did not match again"},
		"self-consistent":     {formOf(other, d, nil), "did not match again"},
		"all forged":          {formOf(b, d, func(e []lanes.State) { e[0], e[1] = e[1], e[0] }), "did not match"},
		"truncated":           {good[:len(good)-40], "come in order"},
		"truncated to a head": {good[:60], "come in order"},
		"empty":               {[]byte{}, "come in order"},
		"noise":               {random(len(good), 9), "come in order"},
		"of another blob":     {form(other), "come in order"},
		"of another size":     {formOf(b[:2*seg], d, nil), "come in order"},
		"much too long":       {make([]byte, 9<<20), "come in order"},
		"absent":              {nil, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, b)
			p.forms[d] = tt.form
			_, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
			want := strings.Replace(tt.want, "come in", "comes in", 1)
			if err != nil || !strings.Contains(notes, want) || tt.want == "" && notes != "" {
				t.Errorf("%v\n%s", err, notes)
			}
			p.onBlob(func(w http.ResponseWriter, r *http.Request, _ []byte) bool { serve(w, r, other); return true })
			_, notes, err = get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
			var m *fetch.MismatchError
			if !errors.As(err, &m) || m.Got != identity.Sum(other) {
				t.Errorf("wrong bytes: %v\n%s", err, notes)
			}
		})
	}
}

// TestMidstatesElsewhere: midstates are those of the registry itself, not of where it sends the client.
func TestMidstatesElsewhere(t *testing.T) {
	b := random(3*seg, 1)
	asked := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = true
		w.Header().Set("Content-Type", "application/vnd.kiln.sha256-midstates.v1")
		w.Write(form(b))
	}))
	t.Cleanup(elsewhere.Close)
	p := newPlace(t, b)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/midstates") {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
			return
		}
		p.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	c, err := client.New(strings.TrimPrefix(front.URL, "http://"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	_, notes, err := get(t, target(t), fetch.Source{Client: c, Repo: "m"}, fetch.Options{}, nil, b)
	if err != nil || !strings.Contains(notes, "can't be had") {
		t.Errorf("%v, asked elsewhere: %v\n%s", err, asked, notes)
	}
}

// TestNoParts: a registry that sends whole files only.
func TestNoParts(t *testing.T) {
	b := random(3*seg, 1)
	p := newPlace(t, b)
	p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		r.Header.Del("Range")
		serve(w, r, b)
		return true
	})
	_, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
	if err != nil || !strings.Contains(notes, "does not send parts") {
		t.Errorf("%v\n%s", err, notes)
	}
}

// TestBreaks: requests that break off go on where they were; nothing comes twice.
func TestBreaks(t *testing.T) {
	b := random(4*seg, 1)
	p := newPlace(t, b)
	p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		serve(&cutter{w, 7 * mib}, r, b)
		return true
	})
	done, _, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
	if err != nil || done.Received != int64(len(b)) {
		t.Errorf("%d bytes for %d, %v", done.Received, len(b), err)
	}
}

// cutter passes n bytes of a body on and then breaks the connection.
type cutter struct {
	http.ResponseWriter
	n int
}

func (c *cutter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *cutter) Write(b []byte) (int, error) {
	if len(b) < c.n {
		c.n -= len(b)
		return c.ResponseWriter.Write(b)
	}
	c.ResponseWriter.Write(b[:c.n])
	http.NewResponseController(c.ResponseWriter).Flush()
	panic(http.ErrAbortHandler)
}

// TestOverload: a registry that is asked too much is asked again, and less.
func TestOverload(t *testing.T) {
	b := random(4*seg, 1)
	p := newPlace(t, b)
	var refused atomic.Int32
	p.onBlob(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
		if refused.Add(1) > 5 {
			return false
		}
		w.WriteHeader(http.StatusTooManyRequests)
		return true
	})
	done, _, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
	if err != nil || done.Received != int64(len(b)) {
		t.Errorf("%+v, %v", done, err)
	}
}

// TestRate: all connections together hold to the limit, as the data that came says, not the time.
func TestRate(t *testing.T) {
	b := random(100_000, 1)
	p := newPlace(t, b)
	if _, _, err := get(t, target(t), p.source(client.Options{}), fetch.Options{Rate: 1_000_000}, nil, b); err != nil {
		t.Error(err)
	}
}

// TestAlwaysFails: a registry that never gives bytes ends the pull, after not too many tries, with what it said.
func TestAlwaysFails(t *testing.T) {
	b := random(3*seg, 1)
	for status, most := range map[int]int{http.StatusServiceUnavailable: 60, http.StatusForbidden: 4, http.StatusNotFound: 4} {
		p := newPlace(t, b)
		p.onBlob(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool { w.WriteHeader(status); return true })
		_, notes, err := get(t, target(t), p.source(client.Options{}), fetch.Options{}, nil, b)
		blobs, _ := p.requests()
		if err == nil || !strings.Contains(err.Error(), http.StatusText(status)) || len(blobs) > most {
			t.Errorf("%d: %v after %d requests\n%s", status, err, len(blobs), notes)
		}
	}
}
