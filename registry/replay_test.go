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
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/classify"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
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
	s.base("a", "v0", "m", "0")
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
	before := s.log.Len()
	s.start()
	s.want(200, "GET", api.PathManifest("a", "v1"), nil)
	if said := s.log.String()[before:]; !strings.Contains(said, "brought level") || !strings.Contains(said, "refs=2") {
		t.Error("the log does not say what was repaired:\n", said)
	}
	s.stop()
	before = s.log.Len()
	s.start()
	if said := s.log.String()[before:]; strings.Contains(said, "brought level") {
		t.Error("it was repaired twice:\n", said)
	}
}

// writes calls a function with each write.
type writes func()

func (w writes) Write(b []byte) (int, error) {
	w()
	return len(b), nil
}

// An export has all lines or is an error: while the index is not level, and when it is made anew under it.
func TestExportIsWhole(t *testing.T) {
	s := newServer(t)
	s.fill()
	want := strings.Count(s.export(), "\n")
	for at := range want + 2 {
		n := 0
		err := s.reg.Export(t.Context(), writes(func() {
			if n++; n == at+1 {
				if err := s.reg.Reindex(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}))
		if again := at < want; again != errors.Is(err, api.ErrUnavailable) || !again && n != want {
			t.Errorf("made anew at line %d: %v after %d of %d", at, err, n, want)
		}
	}
	var config registry.Config
	s.restart(func(c *registry.Config) { config = *c })
	reg, err := registry.New(config) // not replayed
	if err != nil {
		t.Fatal(err)
	}
	admin := httptest.NewServer(reg.Admin())
	defer admin.Close()
	ask := func() (*http.Response, string) {
		t.Helper()
		res, err := wire.Get(admin.URL + "/export")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res, string(b)
	}
	if res, b := ask(); res.StatusCode != 503 || !strings.Contains(b, "try again soon") {
		t.Error(res, b)
	}
	if err := reg.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	if res, b := ask(); res.Trailer.Get(registry.EndTrailer) != registry.EndWhole || strings.Count(b, "\n") != want {
		t.Error(res, b)
	}
}

// A reindex that can't be done changes nothing, and the registry goes on.
func TestReindexRefused(t *testing.T) {
	s := newServer(t)
	s.fill()
	want := s.export()
	log, err := os.OpenFile(filepath.Join(s.dir, "refs.log"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	was := make([]byte, 6)
	if _, err := log.ReadAt(was, 3000); err != nil {
		t.Fatal(err)
	}
	if _, err := log.WriteAt([]byte("damage"), 3000); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		err := s.reg.Reindex(t.Context())
		if !errors.Is(err, registry.ErrIndexStays) || !errors.Is(err, blobstore.ErrRefsDamaged) || s.export() != want {
			t.Error(err)
		}
	}
	s.base("team/model", "v10", "m", "10")
	s.want(200, "GET", "/readyz", nil)
	if _, err := log.WriteAt(was, 3000); err != nil {
		t.Fatal(err)
	}
	s.reindexed("put back")
}

// A blob that waits for its manifest, and an open upload, outlive a reindex.
func TestReindexKeepsPushes(t *testing.T) {
	s := newServer(t)
	s.blob("a", []byte("waits"))
	path := api.PathBlob("a", identity.Sum([]byte("waits")))
	open := s.want(202, "POST", api.PathUploads("a"), nil).header.Get("Location")
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.want(200, "HEAD", path, nil)
	s.want(202, "PATCH", open, []byte("x"))
	s.stop()
	s.start()
	s.want(200, "HEAD", path, nil)
	s.want(201, "PUT", open+"?digest="+identity.Sum([]byte("x")).String(), nil)
}

// reindexed fails unless the index comes out the same when it is made anew, and returns what it exports.
func (s *server) reindexed(how string) string {
	s.t.Helper()
	want := s.export()
	if err := s.reg.Reindex(s.t.Context()); err != nil {
		s.t.Fatal(how, err)
	}
	if got := s.export(); got != want {
		s.t.Errorf("%s: rows differ:\n%s\n---\n%s", how, want, got)
	}
	return want
}

// remove removes a blob's file behind the store's back.
func (s *server) remove(b []byte) {
	s.t.Helper()
	if err := os.Remove(findBlob(s.t, s.dir, identity.Sum(b))); err != nil {
		s.t.Fatal(err)
	}
}

// What was found of a manifest when it was put stays known when what it rests on has gone: its base was deleted and
// collected, or its shards are in quarantine or missing.
func TestFindingsOutliveBlobs(t *testing.T) {
	s := newServer(t)
	var ahead atomic.Int64
	s.clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	s.restart(nil)
	_, d := s.base("a", "v1", "m", "1", "2")
	s.base("b", "v1", "m", "3", "4")
	weights := s.layer("a", api.MediaTypeWeight, "adapter_model.safetensors", safetensors("lora"))
	adapter := s.manifest("a", []desc{weights},
		map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1}})
	if a := s.put("a", "lora", adapter); a.status != 201 {
		t.Fatal(a)
	}
	s.want(202, "DELETE", api.PathManifest("a", d.String()), nil)
	ahead.Store(int64(30 * 24 * time.Hour))
	did, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
	if err != nil || did.Removed.Blobs != 2 {
		t.Fatalf("%+v, %v", did, err)
	}
	if rows := s.reindexed("base deleted and collected"); strings.Count(rows, `"evidence":"asserted"`) != 1 {
		t.Error(rows)
	}
	cut(t, findBlob(t, s.dir, identity.Sum(safetensors("3"))), []byte("y"))
	s.reindexed("shard damaged")
	if did, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil || did.Damaged != 1 {
		t.Fatalf("%+v, %v", did, err)
	}
	s.reindexed("shard in quarantine")
	s.remove(safetensors("4"))
	if rows := s.reindexed("shard missing"); strings.Count(rows, `"content_state":"direct"`) != 1 {
		t.Error(rows)
	}
	if strings.Contains(s.log.String(), "without classification") {
		t.Error(s.log)
	}
}

// findings are refs of which what was found of manifests is kept in another form.
type findings struct {
	blobstore.Refs
	form func(string) string
}

func (f findings) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	for i := range refs {
		if refs[i].Finding != "" {
			refs[i].Finding = f.form(refs[i].Finding)
		}
	}
	return f.Refs.Put(ctx, refs...)
}

// A manifest of more annotations than are taken now is refused, and stays if it was taken before.
func TestRebuildBeyondLimits(t *testing.T) {
	s := newServer(t)
	notes := map[string]string{}
	for i := range classify.MaxAnnotations + 1 {
		notes[fmt.Sprintf("%x", i)] = ""
	}
	m := s.manifest("a", nil, map[string]any{"annotations": notes})
	if a := s.put("a", "v1", m); a.status != 400 || a.code() != api.CodeManifestInvalid ||
		!strings.Contains(string(a.body), "more than 65536 annotations") {
		t.Fatal(a)
	}
	d := identity.Sum(m)
	ref := blobstore.Ref{
		Repo: "a", Name: d.String(), Seq: 1, Digest: d, MediaType: manifestType, Manifest: m, Time: time.Now(),
	}
	if _, err := s.store.Put(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	s.stop()
	s.start()
	s.want(200, "GET", api.PathManifest("a", d.String()), nil)
}

// A manifest of which nothing was kept, by an earlier version or as the record is of no use, is classified again. If its
// blobs are gone it is kept all the same, and found to be what it is when the blobs are back.
func TestRebuildWithoutFindings(t *testing.T) {
	for name, form := range map[string]func(string) string{
		"none":    func(string) string { return "" },
		"torn":    func(f string) string { return f[1:] },
		"foreign": func(f string) string { return strings.Replace(f, `"shards":[0]`, `"shards":[1]`, 1) },
		"other": func(f string) string { // of the base, the aggregate's text comes first
			before, after, _ := strings.Cut(f, "sha256:")
			return before + "sha256:" + after[1:64] + after[:1] + after[64:]
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.restart(func(c *registry.Config) { c.Refs = findings{c.Refs, form} })
			agg, d := s.base("a", "v1", "m", "1")
			if rows := s.reindexed("blobs there"); !strings.Contains(rows, `"content_state":"direct"`) {
				t.Error(rows)
			}
			m := s.want(200, "GET", api.PathManifest("a", d.String()), nil)
			s.remove(safetensors("1"))
			if err := s.reg.Reindex(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.want(200, "GET", api.PathManifest("a", "v1"), nil)
			s.want(404, "GET", api.PathBase(agg), nil)
			if !strings.Contains(s.log.String(), "without classification") {
				t.Error("nothing was said about it")
			}
			s.blob("a", safetensors("1"))
			s.want(201, "PUT", api.PathManifest("a", "v1"), m.body, "Content-Type", manifestType)
			s.want(200, "GET", api.PathBase(agg), nil)
		})
	}
}

// What was found by other rules is found again where the blobs are there, and holds where they are not.
func TestRebuildByOtherRules(t *testing.T) {
	s := newServer(t)
	s.restart(func(c *registry.Config) {
		c.Refs = findings{c.Refs, func(f string) string {
			f = strings.Replace(f, fmt.Sprintf(`"rules":%d`, classify.Rules), `"rules":0`, 1)
			return strings.Replace(f, `"kind":"base"`, `"kind":"checkpoint"`, 1)
		}}
	})
	agg, d := s.base("a", "v1", "m", "1")
	weights := s.layer("a", api.MediaTypeWeight, "adapter_model.safetensors", safetensors("lora"))
	adapter := s.manifest("a", []desc{weights},
		map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1}})
	if a := s.put("a", "lora", adapter); a.status != 201 {
		t.Fatal(a)
	}
	if rows := s.reindexed("blobs there"); !strings.Contains(rows, `"kind":"base"`) {
		t.Error(rows)
	}
	s.remove(safetensors("1"))
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	rows := s.export()
	if !strings.Contains(rows, `"kind":"checkpoint"`) || strings.Count(rows, agg.String()) != 2 ||
		!strings.Contains(rows, `"evidence":"asserted"`) {
		t.Error(rows)
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

// A record with a number that no registry issued is left out, with a line in the log, and its repository goes on.
func TestRefOfImpossibleNumber(t *testing.T) {
	s := newServer(t)
	s.base("a", "v0", "m", "0")
	for _, seq := range []uint64{1<<64 - 1, 1<<62 + 1} {
		ref := blobstore.Ref{Repo: "a", Name: "bad", Seq: seq, Digest: identity.Sum([]byte("x")), Time: time.Now()}
		if _, err := s.store.Put(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	s.stop()
	s.start()
	if log := s.log.String(); strings.Count(log, "ref left out of the index") != 2 ||
		!strings.Contains(log, "sequence number 18446744073709551615 is none that was issued") {
		t.Error(log)
	}
	s.base("a", "v1", "m", "1")
	s.want(200, "GET", api.PathManifest("a", "v1"), nil)
	s.want(404, "GET", api.PathManifest("a", "bad"), nil)
}
