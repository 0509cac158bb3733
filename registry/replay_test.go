package registry_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
)

func (s *server) export() string {
	s.t.Helper()
	var b bytes.Buffer
	if err := s.reg.Export(s.t.Context(), &b); err != nil {
		s.t.Fatal(err)
	}
	return b.String()
}

// fill makes something of everything that a rebuild has to bring back.
func (s *server) fill() {
	s.t.Helper()
	_, d := s.base("team/model", "v1", "m", "1", "2")
	s.base("team/model", "v2", "m", "3")
	s.base("team/model", "v1", "m", "4") // the tag moves
	s.base("lab/other", "v1", "x", "2", "1")
	l := s.layer("team/model", api.MediaTypeWeight, "adapter_model.safetensors", safetensors("lora"))
	m := s.manifest(
		"team/model",
		[]desc{l},
		map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1}},
	)
	if a := s.put("team/model", "lora", m); a.status != 201 {
		s.t.Fatal(a)
	}
	s.base("gone/model", "v1", "g", "5")
	_, g := s.base("gone/model", "v2", "g", "6")
	s.want(202, "DELETE", api.PathManifest("gone/model", "v1"), nil)
	s.want(202, "DELETE", api.PathManifest("gone/model", g.String()), nil)
	_, again := s.base("back/model", "v1", "b", "7")
	s.want(202, "DELETE", api.PathManifest("back/model", again.String()), nil)
	s.base("back/model", "v1", "b", "7")
}

func TestIndexIsRebuilt(t *testing.T) { // IX-04
	s := newServer(t)
	s.fill()
	want := s.export()
	if n := strings.Count(want, "\n"); n < 9 || !strings.Contains(want, `"evidence":"asserted"`) {
		t.Fatal(want)
	}
	check := func(how string) {
		t.Helper()
		if got := s.export(); got != want {
			t.Fatalf("%s: rows differ:\n%s\n---\n%s", how, want, got)
		}
	}
	s.stop()
	s.start()
	check("restart")
	if strings.Contains(s.log.String(), "brought level") {
		t.Error("a clean restart replayed something:\n", s.log)
	}
	s.stop()
	if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
		t.Fatal(err)
	}
	s.start()
	check("lost index")
	if !strings.Contains(s.log.String(), "brought level") {
		t.Error("a rebuild was not logged:\n", s.log)
	}
	admin := httptest.NewServer(s.reg.Admin())
	defer admin.Close()
	res, err := http.Post(admin.URL+"/reindex", "", nil)
	if err != nil || res.StatusCode != 200 {
		t.Fatal(res, err)
	}
	res.Body.Close()
	check("reindex of a running registry")
	res, err = wire.Get(admin.URL + "/export")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || string(b) != want {
		t.Fatal(err, string(b))
	}
	if _, d := s.base("team/model", "v9", "m", "9"); d.IsZero() { // numbers go on above the old ones
		t.Fatal()
	}
	s.want(200, "GET", api.PathManifest("team/model", "v9"), nil)
}

// What the store acknowledged but the index never heard of, as the process died in between, is there after a start.
func TestIndexCatchesUp(t *testing.T) {
	s := newServer(t)
	m := s.manifest("a", nil, nil)
	seq, err := s.ix.NextSeq(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	d := identity.Sum(m)
	ref := blobstore.Ref{
		Repo:      "a",
		Name:      d.String(),
		Seq:       seq,
		Digest:    d,
		MediaType: manifestType,
		Manifest:  m,
		Time:      time.Now(),
	}
	tag := ref
	tag.Name, tag.Manifest = "v1", nil
	if _, err := s.store.Put(t.Context(), ref, tag); err != nil {
		t.Fatal(err)
	}
	s.want(404, "GET", api.PathManifest("a", "v1"), nil)
	s.stop()
	s.start()
	s.want(200, "GET", api.PathManifest("a", "v1"), nil)
}

// A manifest whose blobs are gone was acknowledged all the same: a rebuild keeps it.
func TestRebuildWithoutBlobs(t *testing.T) {
	s := newServer(t)
	s.base("a", "v1", "m", "1")
	i, err := s.store.Stat(t.Context(), identity.Sum(safetensors("1")))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.Delete(t.Context(), i); err != nil {
		t.Fatal(err)
	}
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.want(200, "GET", api.PathManifest("a", "v1"), nil)
	if list := get[api.BaseList](s, api.PathBases); len(list.Bases) != 0 {
		t.Error("a base that can't be read is listed as held")
	}
	if !strings.Contains(s.log.String(), "without classification") {
		t.Error("nothing was said about it")
	}
}

// What an adapter's base is depends on what was there when the adapter came, also when the index is made anew.
func TestBaseThatCameAndWent(t *testing.T) {
	s := newServer(t)
	_, d := s.base("a", "v1", "m", "1")
	adapter := func(n string) {
		t.Helper()
		m := s.manifest("a", []desc{s.layer("a", api.MediaTypeWeight, "adapter_model.safetensors", safetensors(n))},
			map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1}})
		if a := s.put("a", n, m); a.status != 201 {
			t.Fatal(a)
		}
	}
	adapter("with")
	s.want(202, "DELETE", api.PathManifest("a", d.String()), nil)
	adapter("without")
	want := s.export()
	if strings.Count(want, `"evidence":"asserted"`) != 1 || strings.Count(want, `"evidence":"none"`) != 1 {
		t.Fatal(want)
	}
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.export(); got != want {
		t.Errorf("rows differ:\n%s\n---\n%s", want, got)
	}
}

// refsThatFail keeps refs, or says so and does not, or the other way round.
type refsThatFail struct {
	blobstore.Refs
	lose, lie bool
}

func (f *refsThatFail) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	if f.lose {
		return 0, errors.New("disk on fire")
	}
	at, err := f.Refs.Put(ctx, refs...)
	if f.lie {
		return 0, errors.New("lost the answer")
	}
	return at, err
}

func TestFaultsOfTheStore(t *testing.T) {
	s := newServer(t)
	faulty := &refsThatFail{Refs: s.store}
	reg, err := registry.New(registry.Config{Store: s.store, Refs: faulty, Uploads: s.store, Index: s.ix, Access: s.gate,
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := reg.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.http.Config.Handler = reg
	put := func(n int, status int) {
		t.Helper()
		m := s.manifest("a", nil, map[string]any{"annotations": map[string]string{"n": fmt.Sprint(n)}})
		if a := s.put("a", fmt.Sprintf("v%d", n), m); a.status != status || status == 500 && a.code() != api.CodeInternal {
			t.Fatal(n, a)
		}
	}
	put(1, 201)
	faulty.lose = true
	put(2, 500)
	faulty.lose, faulty.lie = false, true
	put(3, 500)
	faulty.lie = false
	put(4, 201)
	s.want(404, "GET", api.PathManifest("a", "v2"), nil)
	s.stop()
	s.start()
	for n, status := range map[int]int{1: 200, 2: 404, 3: 200,
		4: 200} { // 3 is in the store: the checkpoint did not pass it
		s.want(status, "GET", api.PathManifest("a", fmt.Sprintf("v%d", n)), nil)
	}
}

func TestReadiness(t *testing.T) {
	s := newServer(t)
	reg, err := registry.New(registry.Config{Store: s.store, Refs: s.store, Uploads: s.store, Index: s.ix, Access: s.gate,
		Log: slog.New(slog.DiscardHandler), Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	s.http.Config.Handler = reg
	state := func(ready, health, other int) {
		t.Helper()
		s.want(ready, "GET", api.PathReady, nil)
		for _, path := range []string{api.PathHealth, api.PathHealthV1} {
			a := s.want(health, "GET", path, nil)
			for _, member := range []string{`"role":"registry"`, `"base_weight_identity":null`, `"version":"1.2.3"`,
				`"checks":[{`, `"status":`} {
				if !bytes.Contains(a.body, []byte(member)) {
					t.Errorf("%s lacks %s: %s", path, member, a.body)
				}
			}
		}
		if a := s.want(other, "GET", api.PathBases, nil); other == 503 &&
			(a.code() != api.CodeUnavailable || a.header.Get("Retry-After") == "") {
			t.Error(a)
		}
	}
	state(503, 503, 503)
	if err := reg.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	state(200, 200, 200)
	reg.Stop()
	state(503, 503, 200)
}

func TestConfigIsChecked(t *testing.T) {
	if _, err := registry.New(registry.Config{}); err == nil {
		t.Fatal("an empty config was taken")
	}
}
