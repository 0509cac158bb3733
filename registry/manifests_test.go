package registry_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

func TestManifestSizes(t *testing.T) { // RG-01
	s := newServer(t)
	of := func(n int) []byte {
		m := s.manifest("a", nil, map[string]any{"annotations": map[string]string{"pad": ""}})
		return bytes.Replace(m, []byte(`"pad":""`), []byte(`"pad":"`+strings.Repeat("p", n-len(m))+`"`), 1)
	}
	for _, n := range []int{4_000_000, api.MaxManifestBytes} {
		m := of(n)
		if a := s.put("a", "big", m); a.status != 201 {
			t.Fatal(n, a)
		}
		if a := s.want(200, "GET", api.PathManifest("a", "big"), nil); !bytes.Equal(a.body, m) {
			t.Fatal(n, "other bytes")
		}
	}
	for _, n := range []int{api.MaxManifestBytes + 1, 5 << 20} {
		if a := s.put("a", "bigger", of(n)); a.status != 413 || a.code() != api.CodeContentTooLarge {
			t.Fatal(n, a)
		}
	}
}

func TestManifestNeedsItsBlobs(t *testing.T) { // PU-10
	s := newServer(t)
	l := s.layer("a", api.MediaTypeWeight, "model.safetensors", safetensors("1"))
	other := s.layer("b", api.MediaTypeDoc, "README.md", []byte("only in b"))
	short := desc{
		"mediaType":   l["mediaType"],
		"digest":      l["digest"],
		"size":        l["size"].(int) - 1,
		"annotations": l["annotations"],
	}
	absent := desc{"mediaType": api.MediaTypeDoc, "digest": identity.Sum([]byte("never")).String(), "size": 5}
	for name, c := range map[string]struct {
		layers []desc
		code   api.Code
		digest any
	}{
		"absent":             {[]desc{l, absent}, api.CodeManifestBlobUnknown, absent["digest"]},
		"another repository": {[]desc{other}, api.CodeManifestBlobUnknown, other["digest"]},
		"wrong size":         {[]desc{short}, api.CodeSizeInvalid, short["digest"]},
		"two sizes":          {[]desc{l, short}, api.CodeSizeInvalid, short["digest"]},
	} {
		m := s.manifest("a", c.layers, nil)
		a := s.put("a", "v1", m)
		if a.status != 400 || a.code() != c.code ||
			!bytes.Contains(a.body, []byte(`"detail":{"digest":"`+c.digest.(string))) {
			t.Errorf("%s: %v", name, a)
		}
		s.want(404, "GET", api.PathManifest("a", identity.Sum(m).String()), nil)
		s.want(404, "GET", api.PathManifest("a", "v1"), nil)
	}
	if list := get[api.BaseList](s, api.PathBases); len(list.Bases) != 0 {
		t.Fatal("something was indexed:", list)
	}
	foreign := desc{
		"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
		"digest":    absent["digest"],
		"size":      5,
	}
	if a := s.put("a", "v1", s.manifest("a", []desc{foreign}, nil)); a.status != 201 {
		t.Error("a layer that may not be distributed was asked for:", a)
	}
	sparse := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"manifests":[{"mediaType":%q,"digest":%q,"size":5}]}`,
		v1.MediaTypeImageIndex, manifestType, absent["digest"])
	if a := s.do("PUT", api.PathManifest("a", "sparse"), []byte(sparse), "Content-Type",
		v1.MediaTypeImageIndex); a.status != 201 {
		t.Error("a sparse index was refused:", a)
	}
}

func TestClaimsAreChecked(t *testing.T) { // PU-17
	s := newServer(t)
	agg, baseDigest := s.base("team/model", "v1", "model", "a", "b")
	another, _ := s.base("team/model", "v2", "model", "c")
	l := s.layer("team/model", api.MediaTypeWeight, "model.safetensors", safetensors("x"))
	m := s.manifest(
		"team/model",
		[]desc{l},
		map[string]any{"annotations": map[string]string{api.AnnotationAggregate: agg.String()}},
	)
	a := s.put("team/model", "v3", m)
	if a.status != 400 || a.code() != api.CodeManifestInvalid ||
		!bytes.Contains(a.body, []byte(api.CodeAggregateConflict)) ||
		!bytes.Contains(a.body, []byte(agg.String())) {
		t.Fatal(a)
	}
	s.want(404, "GET", api.PathManifest("team/model", "v3"), nil)

	adapter := func(repo string, claim identity.Aggregate) []byte {
		l := s.layer(repo, api.MediaTypeWeight, "adapter_model.safetensors", safetensors("lora"))
		more := map[string]any{
			"artifactType": api.ArtifactTypeAdapter,
			"subject":      desc{"mediaType": manifestType, "digest": baseDigest.String(), "size": 1},
		}
		if !claim.IsZero() {
			more["annotations"] = map[string]string{api.AnnotationAggregate: claim.String()}
		}
		return s.manifest(repo, []desc{l}, more)
	}
	for _, repo := range []string{"team/model", "lab/adapters"} {
		if a := s.put(repo, "bad", adapter(repo, another)); a.status != 400 ||
			!bytes.Contains(a.body, []byte(api.CodeAggregateConflict)) {
			t.Errorf("%s: subject and annotation differ: %v", repo, a)
		}
	}
	for repo, claim := range map[string]identity.Aggregate{"team/model": {}, "lab/adapters": agg} {
		a := s.put(repo, "lora", adapter(repo, claim))
		if a.status != 201 || a.header.Get("OCI-Subject") != baseDigest.String() {
			t.Fatal(repo, a)
		}
	}
	list := get[api.ArtifactList](s, api.PathArtifacts(agg)+"?kind=adapter")
	if len(list.Artifacts) != 2 {
		t.Fatalf("%+v", list)
	}
	for _, x := range list.Artifacts {
		if x.Binding != (api.Binding{Aggregate: agg, Evidence: api.EvidenceAsserted, Held: true}) || x.Tags[0] != "lora" {
			t.Errorf("%+v", x)
		}
	}
	if list := get[api.ArtifactList](s, api.PathArtifacts(another)+"?kind=adapter"); len(list.Artifacts) != 0 {
		t.Errorf("%+v", list)
	}
	// IX-07: an adapter before its base.
	later, err := identity.New(
		[]identity.Shard{
			{Filename: "l-0.safetensors", Size: uint64(len(safetensors("later"))), Digest: identity.Sum(safetensors("later"))},
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	m = s.manifest("lab/early", []desc{}, map[string]any{"artifactType": api.ArtifactTypeAdapter,
		"annotations": map[string]string{api.AnnotationAggregate: later.Aggregate.String()}})
	if a := s.put("lab/early", "v1", m); a.status != 201 {
		t.Fatal(a)
	}
	for _, held := range []bool{false, true} {
		list := get[api.ArtifactList](s, api.PathArtifacts(later.Aggregate)+"?repo=lab/early")
		if len(list.Artifacts) != 1 || list.Artifacts[0].Binding.Held != held {
			t.Fatalf("held %v: %+v", held, list)
		}
		s.base("lab/later", "v1", "l", "later")
	}
}

func TestTags(t *testing.T) {
	s := newServer(t)
	if a := s.want(404, "GET", api.PathTags("a"), nil); a.code() != api.CodeNameUnknown {
		t.Fatal(a)
	}
	m1, m2 := s.manifest("a", nil, nil), s.manifest("a", nil, map[string]any{"annotations": map[string]string{"x": "y"}})
	d1, d2 := identity.Sum(m1), identity.Sum(m2)
	for _, tag := range []string{"b", "a", "d", "c"} {
		a := s.put("a", tag, m1)
		if a.status != 201 || a.header.Get("Location") != api.PathManifest("a", d1.String()) ||
			a.header.Get("Docker-Content-Digest") != d1.String() {
			t.Fatal(a)
		}
	}
	type page struct {
		Name string
		Tags []string
	}
	var seen []string
	for path, pages := api.PathTags("a")+"?n=3", 0; path != ""; pages++ {
		a := s.want(200, "GET", path, nil)
		var p page
		if err := json.Unmarshal(a.body, &p); err != nil || p.Name != "a" || pages > 1 {
			t.Fatal(a, err)
		}
		seen = append(seen, p.Tags...)
		path, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
	}
	if !slices.Equal(seen, []string{"a", "b", "c", "d"}) {
		t.Fatal(seen)
	}
	if p := get[page](s, api.PathTags("a")+"?n=0"); p.Tags == nil || len(p.Tags) != 0 {
		t.Fatal(p)
	}
	if p := get[page](s, api.PathTags("a")+"?last=b"); !slices.Equal(p.Tags, []string{"c", "d"}) {
		t.Fatal(p)
	}
	s.want(400, "GET", api.PathTags("a")+"?n=x", nil)
	a := s.want(201, "PUT", api.PathManifest("a", d2.String())+"?tag=b&tag=e", m2, "Content-Type", manifestType)
	if a.header.Get("OCI-Tag") != "b, e" {
		t.Fatal(a)
	}
	s.want(400, "PUT", api.PathManifest("a", d2.String())+"?tag=-b", m2, "Content-Type", manifestType)
	if a := s.want(400, "PUT", api.PathManifest("a", d1.String()), m2, "Content-Type",
		manifestType); a.code() != api.CodeDigestInvalid {
		t.Fatal(a)
	}
	if a := s.want(200, "GET", api.PathManifest("a", "b"), nil); !bytes.Equal(a.body, m2) {
		t.Fatal("the tag did not move")
	}
	s.want(202, "DELETE", api.PathManifest("a", "b"), nil)
	s.want(404, "GET", api.PathManifest("a", "b"), nil)
	s.want(404, "DELETE", api.PathManifest("a", "b"), nil)
	s.want(200, "GET", api.PathManifest("a", "e"), nil)
	s.want(202, "DELETE", api.PathManifest("a", d1.String()), nil)
	if p := get[page](s, api.PathTags("a")); !slices.Equal(p.Tags, []string{"e"}) {
		t.Fatal(p)
	}
}

// PU-15: the same push again writes nothing and gives the same answer.
func TestSamePushAgain(t *testing.T) {
	s := newServer(t)
	m := s.manifest("a", nil, nil)
	log := filepath.Join(s.dir, "refs.log")
	var size int64
	for i := range 3 {
		if a := s.put("a", "v1", m); a.status != 201 || a.header.Get("Docker-Content-Digest") != identity.Sum(m).String() {
			t.Fatal(a)
		}
		st, err := os.Stat(log)
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 && st.Size() != size {
			t.Fatal("the log grew")
		}
		size = st.Size()
	}
}

func TestReferrers(t *testing.T) {
	s := newServer(t)
	subject := identity.Sum([]byte("not there yet"))
	list := func(path string) (ds []v1.Descriptor, a answer) {
		a = s.want(200, "GET", path, nil)
		var x v1.Index
		if err := json.Unmarshal(a.body, &x); err != nil || x.SchemaVersion != 2 || x.MediaType != v1.MediaTypeImageIndex ||
			a.header.Get("Content-Type") != v1.MediaTypeImageIndex || x.Manifests == nil {
			t.Fatal(a, err)
		}
		return x.Manifests, a
	}
	if ds, _ := list(api.PathReferrers("a", subject)); len(ds) != 0 {
		t.Fatal(ds)
	}
	want := map[string]bool{}
	for i := range 5 {
		more := map[string]any{"subject": desc{"mediaType": manifestType, "digest": subject.String(), "size": 1},
			"annotations": map[string]string{"n": fmt.Sprint(i)}}
		if i%2 == 0 {
			more["artifactType"] = "application/vnd.example"
		}
		m := s.manifest("a", nil, more)
		if a := s.put("a", identity.Sum(m).String(), m); a.status != 201 || a.header.Get("OCI-Subject") != subject.String() {
			t.Fatal(a)
		}
		want[identity.Sum(m).String()] = true
	}
	seen := map[string]bool{}
	for path := api.PathReferrers("a", subject) + "?n=2"; path != ""; {
		ds, a := list(path)
		for _, d := range ds {
			if seen[string(d.Digest)] || !want[string(d.Digest)] || d.Annotations["n"] == "" || d.Size == 0 ||
				d.MediaType != manifestType {
				t.Fatal(d)
			}
			seen[string(d.Digest)] = true
		}
		path, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
	}
	if len(seen) != len(want) {
		t.Fatal(seen)
	}
	ds, a := list(api.PathReferrers("a", subject) + "?artifactType=application/vnd.example")
	if len(ds) != 3 || a.header.Get("OCI-Filters-Applied") != "artifactType" {
		t.Fatal(ds, a)
	}
	// Without a type of its own a manifest goes by its config's.
	if ds, _ := list(api.PathReferrers("a", subject) + "?artifactType=application/vnd.oci.empty.v1%2Bjson"); len(ds) != 2 {
		t.Fatal(ds)
	}
	if ds, _ := list(api.PathReferrers("b", subject)); len(ds) != 0 {
		t.Fatal(ds)
	}
	s.want(400, "GET", api.PathReferrers("a", subject)+"?after=zzz", nil)
	for d := range want {
		s.want(202, "DELETE", api.PathManifest("a", d), nil)
		break
	}
	if ds, _ := list(api.PathReferrers("a", subject)); len(ds) != 4 {
		t.Fatal(ds)
	}
}

// Every page of referrers is short enough for clients, whatever was asked for, and the filter goes on over the pages.
func TestPagesOfReferrers(t *testing.T) {
	s := newServer(t)
	subject := desc{"mediaType": manifestType, "digest": identity.Sum([]byte("subject")).String(), "size": 7}
	types := []string{"application/vnd.example.a", "application/vnd.example.b"}
	for i := range 8 {
		m := s.manifest("a", nil, map[string]any{"subject": subject, "artifactType": types[i%2],
			"annotations": map[string]string{"n": fmt.Sprint(i), "pad": strings.Repeat("p", 1_500_000)}})
		if a := s.put("a", fmt.Sprint("r", i), m); a.status != 201 {
			t.Fatal(a)
		}
	}
	walk := func(query string) (order []string, pages int) {
		path := api.PathReferrers("a", identity.Sum([]byte("subject"))) + query
		for ; path != ""; pages++ {
			a := s.want(200, "GET", path, nil)
			var x v1.Index
			if err := json.Unmarshal(a.body, &x); err != nil || len(a.body) > api.MaxManifestBytes {
				t.Fatalf("%s: %d bytes, %v", path, len(a.body), err)
			}
			filtered := strings.Contains(query, "artifactType")
			if filtered != (a.header.Get("OCI-Filters-Applied") == "artifactType") {
				t.Fatal(path, a.header)
			}
			for _, d := range x.Manifests {
				if filtered && d.ArtifactType != types[1] {
					t.Fatal(path, d.ArtifactType)
				}
				order = append(order, d.Annotations["n"])
			}
			path, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
		}
		return order, pages
	}
	for query, want := range map[string]struct {
		order []string
		pages int
	}{
		"?artifactType=" + types[1]:          {[]string{"7", "5", "3", "1"}, 2},
		"?artifactType=" + types[1] + "&n=1": {[]string{"7", "5", "3", "1"}, 4},
		"?artifactType=application/vnd.none": {nil, 1},
		"?n=1000":                            {[]string{"0", "1", "2", "3", "4", "5", "6", "7"}, 4},
		"?n=3":                               {[]string{"0", "1", "2", "3", "4", "5", "6", "7"}, 4},
	} {
		order, pages := walk(query)
		if !strings.Contains(query, "artifactType") {
			slices.Sort(order)
		}
		if !slices.Equal(order, want.order) || pages != want.pages {
			t.Errorf("%s: %v on %d pages, want %v on %d", query, order, pages, want.order, want.pages)
		}
	}
}

func TestConcurrentTagMoves(t *testing.T) {
	s := newServer(t)
	var ms [8][]byte
	for i := range ms {
		ms[i] = s.manifest("a", nil, map[string]any{"annotations": map[string]string{"n": fmt.Sprint(i)}})
	}
	var wg sync.WaitGroup
	for i := range ms {
		wg.Go(func() {
			for range 5 {
				if a := s.put("a", "v1", ms[i]); a.status != 201 {
					t.Errorf("%v", a)
				}
			}
		})
	}
	wg.Wait()
	before := s.want(200, "GET", api.PathManifest("a", "v1"), nil)
	rows := s.export()
	s.stop()
	if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
		t.Fatal(err)
	}
	s.start()
	if after := s.want(200, "GET", api.PathManifest("a", "v1"), nil); !bytes.Equal(before.body, after.body) {
		t.Fatal("a rebuilt index points the tag to another manifest")
	}
	if got := s.export(); got != rows {
		t.Fatalf("rebuilt index differs:\n%s\n---\n%s", rows, got)
	}
}

func TestPagesOfBases(t *testing.T) {
	s := newServer(t)
	for i := range 5 {
		s.base(fmt.Sprintf("r%d", i), "v1", "m", fmt.Sprint(i))
	}
	agg, _ := s.base("x1", "v1", "m", "0")
	s.base("x2", "v1", "m", "0")
	var seen []string
	for after := ""; ; {
		list := get[api.BaseList](s, api.PathBases+"?limit=2&after="+after)
		for _, b := range list.Bases {
			seen = append(seen, b.Aggregate.String())
		}
		if after = list.Next; after == "" {
			break
		}
	}
	if len(seen) != 5 || !slices.IsSorted(seen) {
		t.Fatal(seen)
	}
	var repos []string
	for after := ""; ; {
		base := get[api.Base](s, api.PathBase(agg)+"?limit=2&after="+after)
		for _, p := range base.Packagings {
			for _, m := range p.Manifests {
				repos = append(repos, m.Repository)
			}
		}
		if after = base.Next; after == "" {
			break
		}
	}
	if !slices.Equal(repos, []string{"r0", "x1", "x2"}) {
		t.Fatal(repos)
	}
	list := get[api.ArtifactList](s, api.PathArtifacts(agg)+"?limit=2")
	if len(list.Artifacts) != 2 || list.Next == "" || list.Artifacts[0].Kind != api.KindBase ||
		list.Artifacts[0].State != api.ContentDirect {
		t.Fatalf("%+v", list)
	}
	for _, bad := range []string{api.PathBases + "?limit=x", api.PathBases + "?after=x", api.PathBases + "/x",
		api.PathArtifacts(agg) + "?kind=x",
		api.PathArtifacts(agg) + "?after=x", api.PathArtifacts(agg) + "?repo=X",
		api.PathBaseManifest(agg) + "?digest=x", api.PathBase(agg) + "?after=!"} {
		if a := s.do("GET", bad, nil); a.status != 400 {
			t.Errorf("%s: %v", bad, a)
		}
	}
	none := identity.Aggregate(identity.Sum(nil))
	for _, path := range []string{api.PathBase(none), api.PathBaseManifest(none)} {
		if a := s.want(404, "GET", path, nil); a.code() != api.CodeAggregateUnknown {
			t.Error(a)
		}
	}
	if list := get[api.ArtifactList](s, api.PathArtifacts(none)); len(list.Artifacts) != 0 {
		t.Error(list)
	}
}

func TestCompare(t *testing.T) {
	s := newServer(t)
	a1, _ := s.base("a", "v1", "m", "1", "2")
	s.base("b", "v1", "n", "2", "1")
	a3, d3 := s.base("c", "v1", "n", "2", "3")
	given := s.want(200, "GET", api.PathBaseManifest(a3), nil).body
	compare := func(a, b string) (c api.Comparison) {
		t.Helper()
		r := s.want(200, "POST", api.PathCompare, []byte(`{"a":`+a+`,"b":`+b+`}`))
		if err := json.Unmarshal(r.body, &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	if c := compare(`{"reference":"a:v1"}`, `{"reference":"b:v1"}`); !c.Same || c.A.Aggregate != a1 || c.OnlyA != nil ||
		c.OnlyB != nil {
		t.Fatalf("%+v", c)
	}
	for _, other := range []string{`{"base_weight_shard_manifest":` + string(given) + `}`,
		`{"aggregate_sha256":"` + a3.String() + `"}`,
		`{"reference":"c@` + d3.String() + `"}`} {
		c := compare(`{"aggregate_sha256":"`+a1.String()+`"}`, other)
		if c.Same || len(c.OnlyA) != 1 || len(c.OnlyB) != 1 || c.OnlyA[0].Digest != identity.Sum(safetensors("1")) ||
			c.OnlyB[0].Digest != identity.Sum(safetensors("3")) {
			t.Fatalf("%s: %+v", other, c)
		}
	}
	wrong := strings.Replace(string(given), a3.String(), a1.String(), 1)
	for body, status := range map[string]int{
		`{}`: 400, `x`: 400, `{"a":{"reference":"a:v1"},"b":{}}`: 400,
		`{"a":{"reference":"a:v1","aggregate_sha256":"` + a1.String() + `"},"b":{"reference":"a:v1"}}`: 400,
		`{"a":{"reference":"a:v1"},"b":{"base_weight_shard_manifest":` + wrong + `}}`:                  400,
		`{"a":{"reference":"a:v1"},"b":{"reference":"a:v9"}}`:                                          404,
		`{"a":{"reference":"a:v1"},"b":{"aggregate_sha256":"` + identity.Sum(nil).String() + `"}}`:     404,
	} {
		if a := s.do("POST", api.PathCompare, []byte(body)); a.status != status {
			t.Errorf("%s: %v", body, a)
		}
	}
}

// A manifest may have more tags than one change may touch.
func TestManifestWithManyTagsIsDeleted(t *testing.T) {
	const repo, tags = "a", blobstore.MaxRefs + 66
	s := newServer(t)
	m := indexOf()
	d := identity.Sum(m)
	for at := 0; at < tags; at += 64 {
		q := make([]string, 0, 64)
		for i := at; i < min(at+64, tags); i++ {
			q = append(q, fmt.Sprint("tag=t", i))
		}
		s.want(201, "PUT", api.PathManifest(repo, d.String())+"?"+strings.Join(q, "&"), m, "Content-Type", indexType)
	}
	s.want(201, "PUT", api.PathManifest(repo, "other"), indexOf(identity.Sum(nil).String()), "Content-Type", indexType)
	s.want(202, "DELETE", api.PathManifest(repo, d.String()), nil)
	check := func() {
		t.Helper()
		s.want(404, "GET", api.PathManifest(repo, d.String()), nil)
		if n := strings.Count(s.export(), `"type":"tag"`); n != 1 {
			t.Errorf("%d tags are left", n)
		}
		s.want(200, "GET", api.PathManifest(repo, "other"), nil)
	}
	check()
	if err := s.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	check()
}
