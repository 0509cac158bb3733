package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/registry"
)

// halting is a store that counts who has some of its blobs open, and lets them read only once it goes on.
type halting struct {
	blobstore.Store
	mu                sync.Mutex
	at                map[identity.Digest]bool
	now, most, opened int
	on                chan struct{}
}

func (h *halting) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	r, err := h.Store.Open(ctx, i, off, n)
	h.mu.Lock()
	halts := h.at[i.Digest]
	if halts && err == nil {
		h.now, h.opened = h.now+1, h.opened+1
		h.most = max(h.most, h.now)
	}
	h.mu.Unlock()
	if !halts || err != nil {
		return r, err
	}
	<-h.on
	return halted{r, h}, nil
}

func (h *halting) counts() (now, most, opened int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now, h.most, h.opened
}

// stop halts who opens these blobs from now on, and counts anew.
func (h *halting) stop(blobs ...identity.Digest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at, h.most, h.opened, h.on = map[identity.Digest]bool{}, 0, 0, make(chan struct{})
	for _, d := range blobs {
		h.at[d] = true
	}
}

type halted struct {
	io.ReadCloser
	of *halting
}

func (h halted) Close() error {
	h.of.mu.Lock()
	h.of.now--
	h.of.mu.Unlock()
	return h.ReadCloser.Close()
}

func newHalting(t *testing.T) (*server, *halting) {
	s, h := newServer(t), &halting{}
	s.stop()
	s.with = func(c *registry.Config) { h.Store, c.Store = c.Store, h }
	s.start()
	return s, h
}

// until waits for what is to become so.
func (s *server) until(what string, is func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("not so: %s; %d wait", what, s.reg.Waiting())
		}
	}
}

// padded is an adapter whose manifest has so many bytes more, and the digest of that.
func (s *server) padded(repo string, seed byte, bytesMore int) (manifest []byte, document identity.Digest) {
	s.t.Helper()
	dir := filepath.Join(s.t.TempDir(), "sql")
	if err := testartifact.Adapter(dir, seed, nil); err != nil {
		s.t.Fatal(err)
	}
	path := filepath.Join(dir, documents.AdapterManifestFile)
	text, err := os.ReadFile(path)
	if err != nil {
		s.t.Fatal(err)
	}
	text = append(text, bytes.Repeat([]byte(" "), bytesMore)...)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		s.t.Fatal(err)
	}
	return s.manifest(repo, s.files(repo, dir), nil), identity.Sum(text)
}

const largeDocument = 7 << 19 // of which one caller has one parsed at a time

// Of many questions about a large document few read it at a time, a bounded number wait, and the others are turned away
// at once. Who has gone waits no more and reads nothing. Meanwhile pushes go on.
func TestManyQuestions(t *testing.T) {
	s, h := newHalting(t)
	m, doc := s.padded("pub/a", 1, largeDocument)
	if a := s.put("pub/a", "t", m); a.status != 201 {
		t.Fatal(a)
	}
	a, _ := s.base("pub/base", "v1", "model", "1")
	question, err := json.Marshal(trained("pub/a:t", &api.Side{Aggregate: a}))
	if err != nil {
		t.Fatal(err)
	}
	h.stop(doc)
	const reading = 1
	turns := int64(registry.Turns())
	var all []net.Conn
	for range turns + registry.MaxOfOne {
		all = append(all, s.half("POST", "/v1/compatibility", len(question), question))
	}
	s.until("all but one wait", func() bool {
		now, _, _ := h.counts()
		return now == reading && s.reg.Waiting() == turns-reading+registry.MaxOfOne
	})
	if a := s.do("POST", "/v1/compatibility", question); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Error(a)
	}
	other, _ := s.padded("pub/b", 2, largeDocument)
	if a := s.put("pub/b", "t", other); a.status != 201 {
		t.Error(a)
	}
	for _, c := range all {
		c.Close()
	}
	s.until("nobody waits", func() bool { return s.reg.Waiting() == 0 })
	close(h.on)
	s.until("nobody reads", func() bool { now, _, _ := h.counts(); return now == 0 })
	if _, most, opened := h.counts(); most != reading || opened != reading {
		t.Errorf("%d at a time, %d in all", most, opened)
	}
	if a := s.do("POST", "/v1/compatibility", question); a.status != 200 {
		t.Error(a)
	}
}

// Of many pushes of large documents few are read at a time. Small ones do not wait for them, and questions neither.
func TestManyPushes(t *testing.T) {
	s, h := newHalting(t)
	known, _ := s.padded("pub/known", 100, largeDocument)
	if a := s.put("pub/known", "t", known); a.status != 201 {
		t.Fatal(a)
	}
	a, _ := s.base("pub/base", "v1", "model", "1")
	question, err := json.Marshal(trained("pub/known:t", &api.Side{Aggregate: a}))
	if err != nil {
		t.Fatal(err)
	}
	const pushes, reading = 12, 1
	manifests, docs := make([][]byte, pushes), make([]identity.Digest, pushes)
	for i := range pushes {
		manifests[i], docs[i] = s.padded("pub/a", byte(i+1), largeDocument+i)
	}
	small, _ := s.padded("pub/b", 101, 100)
	h.stop(docs...)
	var all []net.Conn
	for i, m := range manifests {
		all = append(all, s.half("PUT", api.PathManifest("pub/a", fmt.Sprintf("t%d", i)), len(m), m))
	}
	s.until("all but one wait", func() bool {
		now, _, _ := h.counts()
		return now == reading && s.reg.Waiting() == pushes-reading
	})
	if a := s.put("pub/b", "t", small); a.status != 201 {
		t.Error(a)
	}
	if a := s.do("POST", "/v1/compatibility", question); a.status != 200 {
		t.Error(a)
	}
	for _, c := range all[:pushes/2] {
		c.Close()
	}
	close(h.on)
	for i, c := range all[pushes/2:] {
		s.until("it is there", func() bool {
			return s.do("HEAD", api.PathManifest("pub/a", fmt.Sprintf("t%d", pushes/2+i)), nil).status == 200
		})
		c.Close()
	}
	if _, most, opened := h.counts(); most != reading || opened > pushes {
		t.Errorf("%d at a time, %d in all", most, opened)
	}
}

// Bodies of questions that are slow to come take nothing from pushes.
func TestSlowQuestions(t *testing.T) {
	s := newServer(t)
	m := s.manifest("pub/a", nil, map[string]any{"annotations": map[string]string{"x": strings.Repeat("x", 100_000)}})
	for range 20 { // of 6 MiB each
		defer s.half("POST", "/v1/compatibility", 6<<20, []byte("{")).Close()
	}
	s.until("some wait", func() bool { return s.reg.Waiting() == 15 })
	if a := s.put("pub/a", "t", m); a.status != 201 {
		t.Error(a)
	}
}
