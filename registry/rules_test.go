package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/prune"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// restart starts the registry again with another configuration.
func (s *server) restart(with func(*registry.Config)) {
	s.t.Helper()
	s.stop()
	s.with = with
	s.start()
}

func TestReadOnly(t *testing.T) {
	s := newServer(t)
	_, d := s.base("team/model", "v1", "model", "a")
	blob := s.blob("team/model", []byte("x"))
	at := s.begin("team/model")
	s.want(202, "PATCH", at, []byte("half"))
	before := s.export()
	var ahead atomic.Int64
	s.clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	s.restart(func(c *registry.Config) { c.ReadOnly = true })
	for _, q := range []struct{ method, path, allow string }{
		{"POST", api.PathUploads("team/model"), ""},
		{"POST", api.PathUploads("team/model") + "?mount=" + blob.String(), ""},
		{"PATCH", at, "GET, HEAD"}, {"PUT", at + "?digest=" + blob.String(), "GET, HEAD"}, {"DELETE", at, "GET, HEAD"},
		{"DELETE", api.PathBlob("team/model", blob), "GET, HEAD"},
		{"PUT", api.PathManifest("team/model", "v2"), "GET, HEAD"},
		{"DELETE", api.PathManifest("team/model", "v1"), "GET, HEAD"},
	} {
		a := s.want(405, q.method, q.path, []byte("{}"), "Content-Type", manifestType)
		if allow, there := a.header["Allow"]; a.code() != api.CodeUnsupported || !there || allow[0] != q.allow ||
			!strings.Contains(string(a.body), "read-only") {
			t.Errorf("%s %s: %v", q.method, q.path, a)
		}
	}
	for _, path := range []string{
		api.PathReady, api.PathHealth, api.PathManifest("team/model", "v1"), api.PathBlob("team/model", blob), api.PathBases,
	} {
		s.want(200, "GET", path, nil)
	}
	s.want(200, "POST", api.PathCompare, fmt.Appendf(nil,
		`{"a":{"reference":"team/model:v1"},"b":{"reference":"team/model@%s"}}`, d))
	retention := prune.Retention{Repos: []string{"**"}, Kind: api.KindBase}
	untagged := func(prune.Manifest) error { return nil }
	if _, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), retention, untagged); err != nil { // nothing to do
		t.Error(err)
	}
	if _, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{}); !errors.Is(err, upkeep.ErrReadOnly) {
		t.Error("collect:", err)
	}
	s.reg.Collector().Run(t.Context(), time.Nanosecond, upkeep.Terms{}) // has nothing to do
	if _, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{DryRun: true}); err != nil {
		t.Error("dry run:", err)
	}
	cut(t, findBlob(t, s.dir, blob), []byte("y"))
	if did, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil || did.Damaged != 1 ||
		s.reg.Health().Quarantined != 0 {
		t.Errorf("scrub: %+v, %v", did, err)
	}
	ahead.Store(int64(1000 * time.Hour))
	if n, err := s.reg.Purge(t.Context()); n != 0 || err != nil {
		t.Error("purge:", n, err)
	}
	ahead.Store(0)
	if got := s.export(); got != before {
		t.Errorf("it changed:\n%s\n---\n%s", before, got)
	}
	s.restart(nil)
	a := s.want(204, "GET", at, nil)
	if a.header.Get("Range") != "0-3" {
		t.Error("the upload has not stayed:", a)
	}
	whole := []byte("half and half")
	s.want(201, "PUT", at+"?digest="+identity.Sum(whole).String(), whole[4:])
}

// A caller who may not is told that, whatever else.
func TestReadOnlyComesAfterRights(t *testing.T) {
	s := newServer(t)
	secrets := s.guard(map[string]string{"reader": "team/** pull"})
	s.restart(func(c *registry.Config) { c.ReadOnly = true })
	s.want(401, "POST", api.PathUploads("team/model"), nil)
	s.token = secrets["reader"]
	s.want(403, "POST", api.PathUploads("team/model"), nil)
}

func immutableTags(t *testing.T, patterns ...string) func(*registry.Config) {
	t.Helper()
	p, err := access.ParseTagPatterns(patterns)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *registry.Config) { c.Immutable = p }
}

func TestImmutableTags(t *testing.T) {
	s := newServer(t)
	s.restart(immutableTags(t, "team/**:v*"))
	one, two := s.manifest("team/model", nil, nil), s.manifest("team/model", nil, map[string]any{
		"annotations": map[string]string{"n": "2"}})
	d1, d2 := identity.Sum(one).String(), identity.Sum(two).String()
	refused := func(a answer, tag, digest string) {
		t.Helper()
		var e struct {
			Errors []struct{ Detail api.Immutable }
		}
		if err := json.Unmarshal(a.body, &e); err != nil || a.status != 403 || a.code() != api.CodeDenied ||
			e.Errors[0].Detail != (api.Immutable{Reason: api.CodeTagImmutable, Tag: tag, Digest: digest}) {
			t.Errorf("%v, %v", a, err)
		}
	}
	put := func(repo, ref string, m []byte) {
		t.Helper()
		if a := s.put(repo, ref, m); a.status != 201 {
			t.Fatal(a)
		}
	}
	put("team/model", "v1", one)
	put("team/model", "v1", one)
	put("team/model", "v1-too", one)
	refused(s.put("team/model", "v1", two), "v1", d1)
	put("team/model", "latest", one)
	put("team/model", "latest", two)
	// Of several tags all move, or none.
	refused(s.put("team/model", d2+"?tag=free&tag=v1", two), "v1", d1)
	s.want(404, "GET", api.PathManifest("team/model", "free"), nil)

	refused(s.want(403, "DELETE", api.PathManifest("team/model", "v1"), nil), "v1", d1)
	refused(s.want(403, "DELETE", api.PathManifest("team/model", d1), nil), "v1", d1)
	s.want(404, "DELETE", api.PathManifest("team/model", "v9"), nil)
	s.want(202, "DELETE", api.PathManifest("team/model", "latest"), nil)
	s.want(202, "DELETE", api.PathManifest("team/model", d2), nil)
	s.want(200, "GET", api.PathManifest("team/model", "v1"), nil)

	// What an immutable tag names through indexes stays too.
	leaf := s.manifest("team/list", nil, nil)
	put("team/list", identity.Sum(leaf).String(), leaf)
	inner := indexOf(identity.Sum(leaf).String())
	outer := indexOf(identity.Sum(inner).String())
	for ref, m := range map[string][]byte{"inner": inner, "v1": outer} {
		if a := s.do("PUT", api.PathManifest("team/list", ref), m, "Content-Type", indexType); a.status != 201 {
			t.Fatal(a)
		}
	}
	top := identity.Sum(outer).String()
	refused(s.want(403, "DELETE", api.PathManifest("team/list", identity.Sum(leaf).String()), nil), "v1", top)
	refused(s.want(403, "DELETE", api.PathManifest("team/list", identity.Sum(inner).String()), nil), "v1", top)
	s.want(202, "DELETE", api.PathManifest("team/list", "inner"), nil)

	// Elsewhere the same tags move.
	one = s.manifest("other", nil, nil)
	put("other", "v1", one)
	s.want(202, "DELETE", api.PathManifest("other", "v1"), nil)

	// The rule is no part of the content: without it the tag moves.
	s.restart(nil)
	put("team/model", "v1", s.manifest("team/model", nil, map[string]any{"annotations": map[string]string{"n": "3"}}))
}

// The same bytes may be a manifest of another type. What an immutable tag names, itself or through an index, keeps its
// type, by whatever reference it is put again.
func TestImmutableTagKeepsItsType(t *testing.T) {
	s := newServer(t)
	s.restart(immutableTags(t, "team/**:v*"))
	const docker = "application/vnd.docker.distribution.manifest.v2+json"
	for i, repo := range []string{"team/model", "team/list", "other"} {
		m := s.manifest(repo, nil, map[string]any{"mediaType": nil})
		m = bytes.Replace(m, []byte(`"mediaType":null,`), nil, 1)
		d := identity.Sum(m).String()
		ref, status := []string{"v1", d, "v1"}[i], []int{403, 403, 201}[i]
		if a := s.put(repo, ref, m); a.status != 201 {
			t.Fatal(a)
		}
		if i == 1 {
			s.want(201, "PUT", api.PathManifest(repo, "v1"), indexOf(d), "Content-Type", indexType)
		}
		for _, again := range []string{ref, d, "latest"} {
			a := s.want(status, "PUT", api.PathManifest(repo, again), m, "Content-Type", docker)
			if status == 403 && !strings.Contains(string(a.body), string(api.CodeTagImmutable)) {
				t.Error(a)
			}
		}
		if a := s.put(repo, ref, m); status == 403 && a.status != 201 {
			t.Error(a)
		}
		a := s.want(200, "GET", api.PathManifest(repo, d), nil)
		if status == 403 && a.header.Get("Content-Type") != manifestType {
			t.Error(a)
		}
	}
}

// Many manifests for one immutable tag at once: one gets it.
func TestRaceForAnImmutableTag(t *testing.T) {
	s := newServer(t)
	s.restart(immutableTags(t, "**:v*"))
	var manifests [16][]byte
	for i := range manifests {
		manifests[i] = s.manifest("a", nil, map[string]any{"annotations": map[string]string{"n": fmt.Sprint(i)}})
	}
	for round := range 8 {
		tag := fmt.Sprintf("v%d", round)
		var wg sync.WaitGroup
		var winners [len(manifests)]bool
		for i, m := range manifests {
			wg.Go(func() {
				if a := s.put("a", tag, m); a.status == 201 {
					winners[i] = true
				} else if a.status != 403 {
					t.Error(a)
				}
			})
		}
		wg.Wait()
		var want [len(manifests)]bool
		got := s.want(200, "GET", api.PathManifest("a", tag), nil)
		want[slices.IndexFunc(manifests[:], func(m []byte) bool { return bytes.Equal(m, got.body) })] = true
		if winners != want {
			t.Fatalf("%s is %v, and got it have %v", tag, want, winners)
		}
	}
}

// A manifest is deleted while it gets an immutable tag: what was acknowledged of the tag holds.
func TestDeleteBesideAnImmutableTag(t *testing.T) {
	s := newServer(t)
	s.restart(immutableTags(t, "**:v*"))
	for round := range 200 {
		tag := fmt.Sprintf("v%d", round)
		m := s.manifest("a", nil, map[string]any{"annotations": map[string]string{"n": tag}})
		d := identity.Sum(m).String()
		if a := s.put("a", d, m); a.status != 201 {
			t.Fatal(a)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if a := s.put("a", tag, m); a.status != 201 {
				t.Error(a)
			}
		})
		wg.Go(func() {
			if a := s.do("DELETE", api.PathManifest("a", d), nil); a.status != 202 && a.status != 403 {
				t.Error(a)
			}
		})
		wg.Wait()
		s.want(200, "GET", api.PathManifest("a", tag), nil)
	}
}

func TestRetain(t *testing.T) {
	s := newServer(t)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s.clock = func() time.Time { now = now.Add(time.Second); return now }
	s.restart(nil)
	size := int64(0) // of the blobs of each
	checkpoint := func(repo string, n int, more map[string]any) identity.Digest {
		t.Helper()
		all := map[string]any{"artifactType": api.ArtifactTypeCheckpoint, "annotations": map[string]string{
			"n": fmt.Sprint(n), api.AnnotationKind: string(api.KindCheckpoint)}}
		maps.Copy(all, more)
		layers := s.checkpoint(repo, "demo", byte(n))
		size = 2 // of the config
		for _, l := range layers {
			size += int64(l["size"].(int))
		}
		m := s.manifest(repo, layers, all)
		d := identity.Sum(m)
		if a := s.put(repo, d.String(), m); a.status != 201 {
			t.Fatal(a)
		}
		return d
	}
	subject := func(d identity.Digest) map[string]any {
		return map[string]any{"subject": desc{"mediaType": manifestType, "digest": d.String(), "size": 1}}
	}
	var all []identity.Digest
	for n := range 8 {
		all = append(all, checkpoint("team/run", n, nil))
	}
	// 0 is tagged, 1 has a referrer, 2 is in an index; 3 and 4 are old; 5, 6 and 7 are the newest.
	s.want(201, "PUT", api.PathManifest("team/run", "best"), s.want(200, "GET",
		api.PathManifest("team/run", all[0].String()), nil).body, "Content-Type", manifestType)
	eval := s.manifest("team/run", nil, subject(all[1]))
	if a := s.put("team/run", "eval", eval); a.status != 201 {
		t.Fatal(a)
	}
	list := indexOf(all[2].String())
	s.want(201, "PUT", api.PathManifest("team/run", "list"), list, "Content-Type", indexType)
	checkpoint("other/run", 1, nil)
	checkpoint("other/run", 2, nil)
	before := s.export()

	var gone []identity.Digest
	var kept map[identity.Digest]string
	retain := func(dry bool, c access.Caller) (prune.Retained, error) {
		gone, kept = nil, map[identity.Digest]string{}
		return s.reg.Pruner().Retain(t.Context(), c, prune.Retention{
			Repos: []string{"team/**"}, Kind: api.KindCheckpoint, Keep: 3, DryRun: dry,
		}, func(r prune.Manifest) error {
			if r.Kept != "" {
				kept[r.Digest] = r.Kept
				return nil
			}
			if r.Repository != "team/run" || r.Bytes != size || r.Created.IsZero() {
				t.Errorf("%+v", r)
			}
			gone = append(gone, r.Digest)
			return nil
		})
	}
	want := prune.Retained{DryRun: true, Found: 8, Newest: 3, Referred: 3, Retired: 2, Bytes: 2 * size}
	goes := []identity.Digest{all[4], all[3]}
	if did, err := retain(true, access.Everyone()); err != nil || did != want || !slices.Equal(gone, goes) {
		t.Fatalf("%+v, %v, %v", did, err, gone)
	}
	for d, why := range map[identity.Digest]string{
		all[0]: "tag best", all[1]: fmt.Sprintf("manifest team/run@%s refers to it", identity.Sum(eval)),
		all[2]: fmt.Sprintf("index %s lists it", identity.Sum(list)), all[7]: "among the newest 3",
	} {
		if kept[d] != why || len(kept) != 6 {
			t.Errorf("%s is kept as %q, want %q; %d are", d, kept[d], why, len(kept))
		}
	}
	if _, err := retain(false, access.Caller{}); err == nil || s.export() != before {
		t.Fatal("a dry run, or a caller without rights, changed something:", err)
	}
	want.DryRun = false
	if did, err := retain(false, access.Everyone()); err != nil || did != want || !slices.Equal(gone, goes) {
		t.Fatalf("%+v, %v, %v", did, err, gone)
	}
	for i, d := range all {
		status := 200
		if i == 3 || i == 4 {
			status = 404
		}
		s.want(status, "GET", api.PathManifest("team/run", d.String()), nil)
	}
	if _, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), prune.Retention{Repos: []string{"A"}}, nil); err == nil {
		t.Error("a glob that is none was taken")
	}
	if did, err := retain(false, access.Everyone()); err != nil || did.Retired != 0 {
		t.Errorf("again: %+v, %v", did, err)
	}
	after := s.export()
	if err := s.reg.Reindex(t.Context()); err != nil || s.export() != after {
		t.Error("an index made anew is another one:", err)
	}
	s.restart(func(c *registry.Config) { c.ReadOnly = true })
	if _, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), prune.Retention{
		Repos: []string{"**"}, Kind: api.KindCheckpoint,
	}, func(prune.Manifest) error { return nil }); err == nil || s.export() != after {
		t.Error("a read-only registry let something go:", err)
	}
}

// The newest of each name stay, and what a manifest of another repository refers to.
func TestRetainByName(t *testing.T) {
	s := newServer(t)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s.clock = func() time.Time { now = now.Add(time.Second); return now }
	s.restart(nil)
	checkpoint := func(repo, name string, n int) (d identity.Digest) {
		t.Helper()
		notes := map[string]string{"n": fmt.Sprint(n), api.AnnotationKind: string(api.KindCheckpoint)}
		m := s.manifest(repo, s.checkpoint(repo, name, 1), map[string]any{"artifactType": api.ArtifactTypeCheckpoint,
			"annotations": notes})
		if a := s.put(repo, identity.Sum(m).String(), m); a.status != 201 {
			t.Fatal(a)
		}
		return identity.Sum(m)
	}
	red := []identity.Digest{checkpoint("team/run", "red", 1), checkpoint("team/run", "red", 2)}
	none := []identity.Digest{checkpoint("team/run", "none", 3), checkpoint("team/run", "none", 4)}
	blue := []identity.Digest{
		checkpoint("team/run", "blue", 5), checkpoint("team/run", "blue", 6), checkpoint("team/run", "blue", 7),
	}
	checkpoint("team/other", "red", 8)
	adapter := s.manifest("lab/adapters", nil, map[string]any{
		"artifactType": api.ArtifactTypeAdapter, "annotations": map[string]string{api.AnnotationKind: string(api.KindAdapter)},
		"subject": desc{"mediaType": manifestType, "digest": blue[0].String(), "size": 1},
	})
	if a := s.put("lab/adapters", "v1", adapter); a.status != 201 {
		t.Fatal(a)
	}
	var gone []identity.Digest
	retention := prune.Retention{Repos: []string{"team/**"}, Kind: api.KindCheckpoint, Keep: 1}
	tell := func(m prune.Manifest) error {
		gone = append(gone, m.Digest)
		return nil
	}
	did, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), retention, tell)
	want := []identity.Digest{blue[1], none[0], red[0]}
	if err != nil || !slices.Equal(gone, want) || did.Found != 8 || did.Newest != 4 || did.Referred != 1 {
		t.Errorf("%+v, %v: %v, want %v", did, err, gone, want)
	}
	retention.Repos = []string{"team/run", "team/nosuch"}
	if _, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), retention, tell); !errors.Is(err, api.ErrNameUnknown) {
		t.Error("a repository that there is not:", err)
	}
}

func TestRetainOfBases(t *testing.T) {
	s := newServer(t)
	const repo = "team/model"
	agg, used := s.base(repo, "t", "model", "a")
	_, unused := s.base(repo, "t", "model", "b")
	s.base(repo, "t", "model", "c")
	adapter := s.manifest("lab/adapters", nil, map[string]any{"artifactType": api.ArtifactTypeAdapter,
		"annotations": map[string]string{api.AnnotationAggregate: agg.String()}})
	if a := s.put("lab/adapters", "v1", adapter); a.status != 201 {
		t.Fatal(a)
	}
	var gone []identity.Digest
	retention := prune.Retention{Repos: []string{"**"}, Kind: api.KindBase}
	did, err := s.reg.Pruner().Retain(t.Context(), access.Everyone(), retention, func(r prune.Manifest) error {
		gone = append(gone, r.Digest)
		return nil
	})
	if err != nil || !slices.Equal(gone, []identity.Digest{unused}) || did.Referred != 2 {
		t.Errorf("%+v, %v, %v", did, err, gone)
	}
	s.want(200, "GET", api.PathManifest(repo, used.String()), nil)
}

func TestRequestIDs(t *testing.T) {
	s := newServer(t)
	for given, kept := range map[string]bool{
		"abc-DEF_1.2": true, strings.Repeat("a", 64): true, "": false, strings.Repeat("a", 65): false, "a b": false,
		"a=1": false, "ä": false, "a\tb": false,
	} {
		a := s.want(404, "GET", "/v2/a/manifests/v1", nil, "X-Request-Id", given)
		if got := a.header.Get("X-Request-Id"); (got == given) != kept || got == "" || len(got) > 64 {
			t.Errorf("%q: %q", given, got)
		}
	}
	one, two := s.want(200, "GET", "/v2/", nil), s.want(404, "GET", "/no/such", nil)
	if a, b := one.header.Get("X-Request-Id"), two.header.Get("X-Request-Id"); a == b || a == "" || b == "" {
		t.Errorf("%q, %q", a, b)
	}
	s.want(202, "POST", api.PathUploads("a"), nil, "X-Request-Id", "the-one")
	s.stop() // waits for the log
	if !strings.Contains(s.log.String(), "id=the-one method=POST path=/v2/a/blobs/uploads/ status=202") {
		t.Error(s.log)
	}
}

func TestServed(t *testing.T) {
	s := newServer(t)
	var mu sync.Mutex
	served := map[string]registry.Served{}
	s.restart(func(c *registry.Config) {
		c.Observe = func(d registry.Served) {
			mu.Lock()
			defer mu.Unlock()
			served[d.Method+" "+d.Route] = d
		}
	})
	body := bytes.Repeat([]byte("x"), 1000)
	d := s.blob("team/model", body)
	s.want(200, "GET", api.PathBlob("team/model", d), nil)
	s.want(404, "GET", api.PathManifest("team/model", "v1"), nil)
	s.want(405, "DELETE", "/readyz", nil)
	s.want(404, "OPTIONS", "/nowhere", nil)
	s.want(200, "GET", "/metrics", nil)
	s.stop()
	for key, want := range map[string]registry.Served{
		"PUT /v2/{name}/blobs/uploads/{id}": {Status: 201, In: 1000},
		"GET /v2/{name}/blobs/{digest}":     {Status: 200, Out: 1000},
		"GET /v2/{name}/manifests/{ref}":    {Status: 404},
		"DELETE ":                           {Status: 405},
		"OPTIONS ":                          {Status: 404},
		"GET /metrics":                      {Status: 200, Out: 4},
	} {
		got := served[key]
		if got.Status != want.Status || got.In != want.In || want.Status == 200 && got.Out != want.Out || got.Took <= 0 ||
			(got.Err != nil) != (got.Status >= 400) {
			t.Errorf("%s: %+v", key, got)
		}
	}
	s.start()
	s.restart(func(c *registry.Config) { c.Metrics = nil })
	if a := s.want(404, "GET", "/metrics", nil); a.code() != api.CodeRouteUnknown {
		t.Error(a)
	}
}

// Requests that were admitted before the index was emptied decide nothing by what they miss in it.
func TestRulesHoldWhileTheIndexIsMadeAnew(t *testing.T) {
	const repo = "team/model"
	everybody := access.Everyone()
	for what, ask := range map[string]func(s *server, kept, other []byte) error{
		"move": func(s *server, _, other []byte) error {
			_, err := s.reg.PutManifest(s.t.Context(), everybody, repo, api.Ref{Tag: "v1"}, nil, indexType, other)
			return err
		},
		"delete": func(s *server, kept, _ []byte) error {
			return s.reg.DeleteManifest(s.t.Context(), everybody, repo, api.Ref{Digest: identity.Sum(kept)})
		},
		"retain": func(s *server, _, _ []byte) error {
			retention := prune.Retention{Repos: []string{"**"}}
			_, err := s.reg.Pruner().Retain(s.t.Context(), everybody, retention, func(prune.Manifest) error { return nil })
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := newServer(t)
			refs := &refsThatWait{Refs: s.store, goOn: make(chan struct{})}
			s.restart(func(c *registry.Config) {
				immutableTags(t, "team/**:v*")(c)
				refs.Refs, c.Refs = s.store, refs
			})
			kept, other := indexOf(), indexOf(identity.Sum(nil).String())
			s.want(201, "PUT", api.PathManifest(repo, "v1"), kept, "Content-Type", indexType)
			refs.reached = make(chan struct{})
			reindexed, asked := make(chan error, 1), make(chan error, 1)
			go func() { reindexed <- s.reg.Reindex(context.WithoutCancel(t.Context())) }()
			<-refs.reached // they are read to see that they can be
			refs.goOn <- struct{}{}
			<-refs.reached // the index is empty
			go func() { asked <- ask(s, kept, other) }()
			var err error
			select {
			case err = <-asked:
				close(refs.goOn)
			case <-time.After(time.Second): // it waits for the index
				close(refs.goOn)
				err = <-asked
			}
			if !errors.Is(err, api.ErrUnavailable) {
				t.Error("it was done, or refused for another reason:", err)
			}
			if err := <-reindexed; err != nil {
				t.Fatal(err)
			}
			if a := s.want(200, "GET", api.PathManifest(repo, "v1"), nil); !bytes.Equal(a.body, kept) {
				t.Errorf("the tag moved: %s", a.body)
			}
		})
	}
}

// A registry that stops while its index is being made anew goes on to refuse what needs the whole of it.
func TestStopWhileTheIndexIsMadeAnew(t *testing.T) {
	s := newServer(t)
	refs := &refsThatWait{goOn: make(chan struct{})}
	s.restart(func(c *registry.Config) { refs.Refs, c.Refs = s.store, refs })
	s.base("team/model", "v1", "m", "1")
	refs.reached = make(chan struct{})
	reindexed := make(chan error, 1)
	go func() { reindexed <- s.reg.Reindex(context.WithoutCancel(t.Context())) }()
	<-refs.reached
	refs.goOn <- struct{}{} // they can be read
	<-refs.reached
	s.reg.Stop()
	s.want(503, "GET", api.PathManifest("team/model", "v1"), nil)
	close(refs.goOn)
	if err := <-reindexed; err != nil {
		t.Fatal(err)
	}
	s.want(200, "GET", api.PathManifest("team/model", "v1"), nil)
}
