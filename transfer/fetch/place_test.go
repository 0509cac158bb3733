package fetch_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	mib = 1 << 20
	seg = lanes.SegmentSize
)

// place is a server of blobs, which may be told to misbehave.
type place struct {
	t      *testing.T
	server *httptest.Server
	host   string
	blobs  map[identity.Digest][]byte
	forms  map[identity.Digest][]byte // midstates
	opened atomic.Int32               // connections
	busy   sync.WaitGroup             // requests that are answered

	mu    sync.Mutex
	fault func(w http.ResponseWriter, r *http.Request, b []byte) bool // of a blob; says whether it answered
	forge func(w http.ResponseWriter, r *http.Request) bool           // of midstates; so does this
	sent  int64
	asked []string // method and path of each request
	seen  []string // Authorization of each request
}

func newPlace(t *testing.T, blobs ...[]byte) *place {
	t.Helper()
	p := &place{t: t, blobs: map[identity.Digest][]byte{}, forms: map[identity.Digest][]byte{}}
	for _, b := range blobs {
		p.blobs[identity.Sum(b)] = b
		p.forms[identity.Sum(b)] = form(b)
	}
	p.server = httptest.NewUnstartedServer(p)
	p.server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			p.opened.Add(1)
		}
	}
	p.server.Start()
	t.Cleanup(p.server.Close)
	p.host = strings.TrimPrefix(p.server.URL, "http://")
	return p
}

func (p *place) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.busy.Add(1)
	defer p.busy.Done()
	p.mu.Lock()
	p.asked = append(p.asked, r.Method+" "+r.URL.Path)
	p.seen = append(p.seen, r.Header.Get("Authorization"))
	fault, forge := p.fault, p.forge
	p.mu.Unlock()
	name, midstates := strings.CutSuffix(r.URL.Path, "/midstates")
	d, err := identity.ParseDigest(name[strings.LastIndexByte(name, '/')+1:])
	b, ok := p.blobs[d]
	switch {
	case err != nil || !ok:
		w.WriteHeader(http.StatusNotFound)
	case midstates && p.forms[d] == nil:
		w.WriteHeader(http.StatusNotFound)
	case midstates && forge != nil && forge(w, r):
	case midstates:
		w.Header().Set("Content-Type", api.MediaTypeMidstates)
		w.Write(p.forms[d])
	case fault != nil && fault(counter{w, p}, r, b):
	default:
		serve(counter{w, p}, r, b)
	}
}

func serve(w http.ResponseWriter, r *http.Request, b []byte) {
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
}

type counter struct {
	http.ResponseWriter
	p *place
}

func (c counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c counter) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.sent += int64(n)
	return n, err
}

func (p *place) onBlob(f func(w http.ResponseWriter, r *http.Request, b []byte) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault, p.sent, p.asked = f, 0, nil
}

func (p *place) onMidstates(f func(w http.ResponseWriter, r *http.Request) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forge = f
}

func (p *place) bytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent
}

// requests returns those for blobs, and for anything else.
func (p *place) requests() (blobs, others []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.asked {
		if strings.HasPrefix(a, "GET /v2/") && strings.Contains(a, "/blobs/") {
			blobs = append(blobs, a)
		} else {
			others = append(others, a)
		}
	}
	return blobs, others
}

// source returns a client of the place as the registry, and mirror one as a mirror.
func (p *place) source(o client.Options) fetch.Source {
	p.t.Helper()
	o.Backoff = time.Millisecond
	c, err := client.New(p.host, o)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(c.Close)
	return fetch.Source{Client: c, Repo: "m"}
}

func (p *place) mirror(o client.Options) fetch.Source {
	p.t.Helper()
	c, _, err := client.NewMirror(p.server.URL, o)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(c.Close)
	return fetch.Source{Client: c, Repo: "m"}
}

// form returns the midstates of b.
func form(b []byte) []byte {
	d := identity.Sum(b)
	if f, ok := made.Load(d); ok {
		return f.([]byte)
	}
	f := formOf(b, d, nil)
	made.Store(d, f)
	return f
}

// formOf returns midstates of b that name a digest, after change.
func formOf(b []byte, d identity.Digest, change func([]lanes.State)) []byte {
	r := lanes.NewRecorder(seg)
	r.Write(b)
	_, noted := r.Take()
	noted = noted[:lanes.Edges(int64(len(b)), seg)]
	if change != nil {
		change(noted)
	}
	s, err := lanes.New(seg, int64(len(b)), d, noted)
	if err != nil {
		panic(err)
	}
	f, err := s.MarshalBinary()
	if err != nil {
		panic(err)
	}
	return f
}

// seeded names what random returns.
type seeded struct {
	n    int
	seed uint64
}

var made sync.Map // what random and form returned

// random returns n bytes that are the same for the same seed, and are not to be changed.
func random(n int, seed uint64) []byte {
	if b, ok := made.Load(seeded{n, seed}); ok {
		return b.([]byte)
	}
	b := make([]byte, n)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	rand.NewChaCha8(key).Read(b)
	made.Store(seeded{n, seed}, b)
	return b
}

// notes is a Watch that keeps the notes and holds the rest to its promises.
type notes struct {
	mu   sync.Mutex
	text strings.Builder
	done map[string]int64
	bad  []string
}

// again is in the note that a file is tried anew.
var again = regexp.MustCompile("in order|anew|digest mismatch")

func (n *notes) Planned(string, int64) {}

func (n *notes) Moved(file string, done, total int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.done == nil {
		n.done = map[string]int64{}
	}
	if done < n.done[file] && !again.MatchString(n.text.String()) {
		n.bad = append(n.bad, fmt.Sprintf("%s: %d after %d", file, done, n.done[file]))
	}
	n.done[file] = done
}

func (n *notes) Done(string, int64) {}

func (n *notes) Noted(_, note string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text.WriteString(note + "\n")
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.String()
}

// files are those of a test, each with its own name.
func files(blobs ...[]byte) (all []fetch.File, r staging.Record) {
	for i, b := range blobs {
		f := staging.File{Name: fmt.Sprintf("f%d", i), Size: int64(len(b)), Digest: identity.Sum(b)}
		all = append(all, fetch.File{File: f})
		r.Files = append(r.Files, f)
	}
	return all, r
}

// get fetches blobs into a folder and says what came of it. The folder is whole and right, or not there.
func get(t *testing.T, dir string, from fetch.Source, o fetch.Options, all []fetch.File, blobs ...[]byte) (
	fetch.Result, string, error,
) {
	t.Helper()
	a, err := staging.Open(t.Context(), dir, staging.Options{Disk: fast})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}()
	list, record := files(blobs...)
	if all == nil {
		all = list
	}
	if err := a.Begin(record); err != nil {
		t.Fatal(err)
	}
	n := &notes{}
	if o.Jobs == 0 {
		o.Jobs = 8
	}
	o.Watch = n
	done, err := fetch.Files(t.Context(), a, from, all, o)
	if len(n.bad) > 0 {
		t.Errorf("progress fell: %v", n.bad)
	}
	if err != nil {
		if _, perr := a.Publish(record, false); !errors.Is(perr, staging.ErrUnverified) {
			t.Errorf("published after %v: %v", err, perr)
		}
		return done, n.String(), err
	}
	if _, err := a.Publish(record, false); err != nil {
		t.Fatal(err)
	}
	for i, b := range blobs {
		got, err := os.ReadFile(filepath.Join(dir, record.Files[i].Name))
		if err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s: not the bytes that were asked for, %v", record.Files[i].Name, err)
		}
	}
	return done, n.String(), nil
}

// fast is a disk that is not told to sync: nothing here is about what a power failure leaves.
var fast = durable.Disk{Fault: func(op durable.Op, _ string, do func() error) error {
	if op == durable.OpSync || op == durable.OpSyncDir {
		return nil
	}
	return do()
}}

func target(t *testing.T) string { return filepath.Join(t.TempDir(), "m") }

// rangeOf returns what a request asks for.
func rangeOf(r *http.Request, size int) (from, to int) {
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil {
		return 0, size
	}
	return from, to + 1
}

// flipped returns b with one bit flipped at each place.
func flipped(b []byte, at ...int) []byte {
	b = bytes.Clone(b)
	for _, i := range at {
		b[i] ^= 1
	}
	return b
}
