package registry_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/registry"
)

// stopping is an index engine that lets nobody read while it is stopped, and counts who wants to.
type stopping struct {
	index.KV
	mu    sync.Mutex
	wants int
	on    chan struct{} // nil: it goes on
}

func (k *stopping) View(ctx context.Context, fn func(index.Txn) error) error {
	k.mu.Lock()
	on := k.on
	if on != nil {
		k.wants++
	}
	k.mu.Unlock()
	if on != nil {
		<-on
	}
	return k.KV.View(ctx, fn)
}

// stop stops who reads from now on until go on is called; pass lets through who comes then.
func (k *stopping) stop() (goOn, pass func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	on := make(chan struct{})
	k.wants, k.on = 0, on
	pass = func() {
		k.mu.Lock()
		k.on = nil
		k.mu.Unlock()
	}
	return func() { pass(); close(on) }, pass
}

func (k *stopping) wanted() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.wants
}

// newStopping returns a server over such an index, with the tokens of two who may do everything.
func newStopping(t *testing.T) (s *server, k *stopping, greedy, other string) {
	s, k = newServer(t), &stopping{}
	s.with = func(c *registry.Config) {
		if err := c.Index.Close(); err != nil {
			t.Fatal(err)
		}
		kv, err := boltkv.Open(filepath.Join(s.dir, "index.db"), boltkv.Options{})
		if err != nil {
			t.Fatal(err)
		}
		k.KV = kv
		if c.Index, err = index.New(t.Context(), k); err != nil {
			t.Fatal(err)
		}
		s.ix = c.Index
	}
	secrets := s.guard(map[string]string{"greedy": "** pull,push,delete", "other": "** pull,push,delete"})
	return s, k, secrets["greedy"], secrets["other"]
}

func (s *server) get(path string) net.Conn {
	s.t.Helper()
	return s.half("GET", path, 0, nil)
}

// statuses reads the answers on connections, and counts them by status.
func statuses(t *testing.T, all []net.Conn) map[int]int {
	t.Helper()
	n := map[int]int{}
	for _, c := range all {
		a, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if n[a.StatusCode]++; a.StatusCode == 503 && a.Header.Get("Retry-After") == "" {
			t.Error("503 without Retry-After")
		}
		c.Close()
	}
	return n
}

// However many listings one caller asks for, a few are made at a time, so many wait, and the next one is told to come
// again. Nobody else waits for them: neither other listings nor pulls, not even his own. Who goes away waits no more.
func TestManyListings(t *testing.T) {
	s, k, greedy, other := newStopping(t)
	s.token = other
	agg, d := s.base("team/model", "v1", "m", "1")
	pulls := []string{api.PathManifest("team/model", "v1"), api.PathTags("team/model"), api.PathReferrers("team/model", d)}
	listings := []string{api.PathBases, api.PathArtifacts(agg), api.PathBase(agg), api.PathLineage(d),
		api.PathBaseManifest(agg), api.PathEvals(agg), "/v1/artifacts?unbound=true"}
	goOn, pass := k.stop()
	s.token = greedy
	var all []net.Conn
	for range registry.Turns() + registry.MaxListingsOfOne {
		all = append(all, s.get(api.PathLineage(d)))
	}
	s.until("all wait", func() bool {
		return k.wanted() == registry.Turns() && s.reg.Waiting() == registry.MaxListingsOfOne
	})
	if a := s.do("GET", api.PathBases, nil); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Error(a)
	}
	pass()
	for _, path := range pulls {
		s.want(200, "GET", path, nil)
		s.want(200, "HEAD", path, nil)
	}
	s.token = other
	for _, path := range append(listings, pulls...) {
		s.want(200, "GET", path, nil)
	}
	if n := s.reg.Waiting(); n != registry.MaxListingsOfOne {
		t.Errorf("%d wait", n)
	}
	half := len(all) / 2
	for _, c := range all[half:] {
		c.Close()
	}
	s.until("half are gone", func() bool { return s.reg.Waiting() == int64(half-registry.Turns()) })
	goOn()
	if n := statuses(t, all[:half]); n[200] != half {
		t.Errorf("%v of %d", n, half)
	}
}

// Pulls of one caller wait for one another, however many they are, and no other caller's do.
func TestManyPulls(t *testing.T) {
	s, k, greedy, other := newStopping(t)
	s.token = other
	s.base("team/model", "v1", "m", "1")
	path := api.PathManifest("team/model", "v1")
	goOn, pass := k.stop()
	s.token = greedy
	var all []net.Conn
	for range registry.Turns() + 500 {
		all = append(all, s.get(path))
	}
	s.until("all wait", func() bool { return k.wanted() == registry.Turns() && s.reg.Waiting() == 500 })
	pass()
	s.token = other
	s.want(200, "GET", path, nil)
	s.want(200, "GET", api.PathBases, nil)
	if s.reg.Waiting() != 500 {
		t.Error(s.reg.Waiting(), "wait")
	}
	goOn()
	if n := statuses(t, all); n[200] != len(all) {
		t.Error(n)
	}
}

// Callers who take all places in line leave one to somebody who has none: the newest of theirs is told to come again.
func TestFullLine(t *testing.T) {
	s, h := newHalting(t)
	m, doc := s.padded("pub/a", 1, 0)
	if a := s.put("pub/a", "t", m); a.status != 201 {
		t.Fatal(a)
	}
	tokens := map[string]string{"last": "** pull"}
	for i := range 4 {
		tokens[fmt.Sprint("t", i)] = "** pull"
	}
	secrets := s.guard(tokens)
	question := fmt.Appendf(nil, `{"question":"adapter_trained_from","artifact":"pub/a:t","base":{"aggregate_sha256":%q}}`,
		identity.Sum([]byte("base")))
	h.stop(doc)
	var all []net.Conn
	ask := func(name string, n int) {
		s.token = secrets[name]
		for range n {
			all = append(all, s.half("POST", api.PathCompatibility, len(question), question))
		}
	}
	early := 0 // requests that have ended
	wait := func(what string) {
		s.until(what, func() bool {
			for len(s.ended) > 0 {
				<-s.ended
				early++
			}
			now, _, _ := h.counts()
			return s.reg.Waiting() == 4*registry.MaxOfOne && early+now+4*registry.MaxOfOne == len(all)
		})
	}
	for len(s.ended) > 0 {
		<-s.ended
	}
	for i := range 4 {
		ask(fmt.Sprint("t", i), registry.Turns()+registry.MaxOfOne)
	}
	wait("all places are taken")
	before := len(all)
	ask("last", 1)
	wait("one made room")
	close(h.on)
	if n := statuses(t, all[before:]); n[200] != 1 {
		t.Errorf("who came last: %v", n)
	}
	if n := statuses(t, all[:before]); n[503] != early || n[200] != before-early {
		t.Errorf("who was there: %v, %d ended early", n, early)
	}
}

// Bodies of one caller that are slow to come take no more than half of the memory for such: whoever else sends one is
// answered while they are still on their way.
func TestSlowBodiesOfOne(t *testing.T) {
	s := newServer(t)
	secrets := s.guard(map[string]string{"greedy": "** pull,push", "other": "** pull,push"})
	s.token = secrets["greedy"]
	const slow = 60
	for range slow {
		defer s.half("PUT", api.PathManifest("a", "slow"), 4<<20, []byte("{")).Close()
		defer s.half("POST", api.PathCompatibility, 2<<20, []byte("{")).Close()
	}
	s.until("most of them wait", func() bool { return s.reg.Waiting() == 2*slow-8-16 })
	s.token = secrets["other"]
	m := s.manifest("b", nil, map[string]any{"annotations": map[string]string{"x": strings.Repeat("x", 100_000)}})
	if a := s.put("b", "v1", m); a.status != 201 {
		t.Error(a)
	}
	question := fmt.Appendf(nil, `{"question":"same_base_weights","base":{"reference":"b:v1"},"other":{"reference":%q}}`,
		strings.Repeat("x", 100_000))
	if a := s.do("POST", api.PathCompatibility, question); a.status != 404 && a.status != 400 {
		t.Error(a)
	}
	if n := s.reg.Waiting(); n != 2*slow-8-16 {
		t.Errorf("%d wait", n)
	}
}
