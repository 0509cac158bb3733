package index_test

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

// unbound is an adapter that does not say from which base it was made.
func unbound(repo, text string, seq uint64) index.PutManifest {
	p := adapter(repo, text, seq, identity.Aggregate{})
	p.Evidence, p.Subject = api.EvidenceNone, identity.Digest{}
	return p
}

// bind is a statement that binds a manifest of that text to a base.
func bind(repo, text string, seq uint64, target string, base identity.Aggregate) index.PutManifest {
	p := unbound(repo, text, seq)
	p.Kind, p.ArtifactType = api.KindStatement, api.ArtifactTypeStatement
	p.Facts, _ = json.Marshal(api.Facts{Statement: &api.StatementFacts{
		Type: api.StatementBind, Target: identity.Sum([]byte(target)), Base: base,
	}})
	return p
}

// permutations yields every order of ops.
func permutations(ops []index.Op, yield func([]index.Op)) {
	var swap func(n int)
	swap = func(n int) {
		if n == len(ops) {
			yield(ops)
			return
		}
		for i := n; i < len(ops); i++ {
			ops[n], ops[i] = ops[i], ops[n]
			swap(n + 1)
			ops[n], ops[i] = ops[i], ops[n]
		}
	}
	swap(0)
}

// TestBindStatements applies an artifact, statements about it and their deletes in every order: the rows in the end are
// the same ones, and the artifact is listed under the bases that a statement of its own repository still gives it.
func TestBindStatements(t *testing.T) {
	a, b := aggregate("one"), aggregate("two")
	first, second := bind("a", "says one", 2, "adapter", a), bind("a", "says two", 3, "adapter", b)
	ops := []index.Op{
		unbound("a", "adapter", 1), first, second, bind("b", "elsewhere", 4, "adapter", aggregate("three")),
		index.DeleteManifest{Repo: "a", Digest: first.Digest, Seq: 5},
		index.PutTag{Repo: "a", Tag: "v1", Digest: identity.Sum([]byte("adapter")), Seq: 6},
	}
	var want []string
	permutations(ops, func(ops []index.Op) {
		kv := openMemory(t, new(memkv.Disk))
		ix := opened(t, kv)
		for _, o := range ops {
			apply(t, ix, o)
		}
		if want == nil {
			want = dump(t, kv)
			checkBound(t, ix, second.Digest)
		}
		if got := dump(t, kv); !slices.Equal(got, want) {
			equal(t, fmt.Sprint("rows after ", ops), got, want)
			t.FailNow()
		}
	})
}

// checkBound checks where the artifact of TestBindStatements is listed.
func checkBound(t *testing.T, ix *index.Index, by identity.Digest) {
	for text, n := range map[string]int{"one": 0, "two": 1, "three": 0} {
		p, err := ix.Listing(t.Context(), index.Query{Aggregate: aggregate(text), Kind: api.KindAdapter}, 10, nil)
		if err != nil || p.Rows != n {
			t.Errorf("base %s has %d artifacts (%v), want %d", text, p.Rows, err, n)
		}
		if n == 1 && !strings.Contains(string(p.JSON), `"source":"statement `+by.String()+`"`) {
			t.Errorf("base %s: %s", text, p.JSON)
		}
	}
	p, err := ix.Listing(t.Context(), index.Query{Unbound: true, Kind: api.KindAdapter}, 10, nil)
	if err != nil || p.Rows != 0 {
		t.Errorf("%d unbound (%v)", p.Rows, err)
	}
}

// TestManyBinds: only the newest statements about one manifest count, whichever of them the index got first, and an
// older one again when a newer one goes.
func TestManyBinds(t *testing.T) {
	var all []index.PutManifest
	for i := range 30 {
		s := bind("a", fmt.Sprint("statement ", i), uint64(i+2), "adapter", aggregate(fmt.Sprint(i)))
		s.Created = epoch.Add(time.Duration(i*7%30/3) * time.Minute) // three of each time
		all = append(all, s)
	}
	newest := slices.Clone(all)
	slices.SortFunc(newest, func(a, b index.PutManifest) int {
		return cmp.Or(b.Created.Compare(a.Created), a.Digest.Compare(b.Digest))
	})
	var rows []string
	for round := range 3 {
		kv := openMemory(t, new(memkv.Disk))
		ix := opened(t, kv)
		for i := range all {
			if i == 10*round {
				apply(t, ix, unbound("a", "adapter", 1))
			}
			apply(t, ix, all[(i*[]int{1, 29, 7}[round]+3)%30])
		}
		checkBinds(t, ix, newest[:16])
		if rows == nil {
			rows = dump(t, kv)
		}
		equal(t, "rows", dump(t, kv), rows)
		apply(t, ix, index.DeleteManifest{Repo: "a", Digest: newest[0].Digest, Seq: 40})
		checkBinds(t, ix, newest[1:17])
	}
}

// checkBinds checks which statements bind the artifact of TestManyBinds, and where it is listed.
func checkBinds(t *testing.T, ix *index.Index, want []index.PutManifest) {
	t.Helper()
	found, err := ix.Bindings(t.Context(), "a", identity.Sum([]byte("adapter")))
	if err != nil || len(found) != len(want) {
		t.Fatalf("%d bindings, %v", len(found), err)
	}
	for i, b := range found {
		equal(t, "statement", b.BoundBy, want[i].Digest)
	}
	listed := 0
	for i := range 30 {
		q := index.Query{Aggregate: aggregate(fmt.Sprint(i)), Kind: api.KindAdapter}
		p, err := ix.Listing(t.Context(), q, 10, nil)
		if err != nil {
			t.Fatal(err)
		}
		listed += p.Rows
	}
	equal(t, "listed under so many bases", listed, len(want))
}

// TestListingJSON: a row is what encoding an api.Artifact gives, member by member and in the same order, and what is long
// is left out.
func TestListingJSON(t *testing.T) {
	kv := openMemory(t, new(memkv.Disk))
	ix := opened(t, kv)
	a := shards("x.safetensors")
	p := adapter("a", "adapter", 2, a.Aggregate)
	p.Name, p.Annotations = "<name> & \u2028", map[string]string{"k": "v"}
	p.Facts, _ = json.Marshal(api.Facts{Name: p.Name, Legacy: true, Adapter: &api.AdapterFacts{Rank: 8}})
	long := adapter("b", "long", 2, a.Aggregate)
	long.Annotations = map[string]string{"k": strings.Repeat("v", 4<<20)}
	long.Facts, _ = json.Marshal(api.Facts{Source: strings.Repeat("s", 60<<10)})
	long.ArtifactType = strings.Repeat("t", 1<<20)
	ops := []index.Op{p, long}
	for i := range 40 {
		ops = append(ops, index.PutTag{Repo: "b", Tag: fmt.Sprintf("v%02d", i), Digest: long.Digest, Seq: 3})
	}
	apply(t, ix, ops...)
	for _, held := range []bool{false, true} {
		if held {
			apply(t, ix, base("c", "base", 1, a))
		}
		q := index.Query{Aggregate: a.Aggregate, Kind: api.KindAdapter}
		page, err := ix.Listing(t.Context(), q, 10, nil)
		if err != nil || page.Held != held || page.Rows != 2 || len(page.JSON) > 4<<10 {
			t.Fatalf("%d rows in %d bytes, held %v: %v", page.Rows, len(page.JSON), page.Held, err)
		}
		var list []api.Artifact
		if err := json.Unmarshal(slices.Concat([]byte("["), page.JSON, []byte("]")), &list); err != nil {
			t.Fatal(err)
		}
		again, err := json.Marshal(list)
		if err != nil || !bytes.Equal(again[1:len(again)-1], page.JSON) {
			t.Errorf("encoded again:\n%s, was\n%s", again, page.JSON)
		}
		small, large := list[0], list[1]
		if small.Binding.Held != held || small.Name != p.Name || small.Facts.Adapter.Rank != 8 || small.FactsOmitted {
			t.Errorf("%+v", small)
		}
		if !large.AnnotationsOmitted || !large.FactsOmitted || len(large.Tags) != 16 || !large.MoreTags ||
			len(large.ArtifactType) != 255 || large.Annotations != nil || large.Facts != nil {
			t.Errorf("%+v", large)
		}
	}
}

// TestFilteredPages: a page ends after a bounded number of rows that were looked at, and its cursor goes on behind them
// and names no repository that the caller may not see.
func TestFilteredPages(t *testing.T) {
	ix := opened(t, openMemory(t, new(memkv.Disk)))
	ix.SetPage(100, 1<<20, 10)
	a := aggregate("base")
	var ops []index.Op
	for i := range 2000 {
		p := adapter("seen", fmt.Sprint(i), uint64(i+1), a)
		if i%4 == 0 {
			p.Repo = fmt.Sprintf("hidden-%d", i)
		}
		if i == 1001 {
			p.Evidence = api.EvidenceAggregateOnly
		}
		ops = append(ops, p)
	}
	apply(t, ix, ops...)
	q := index.Query{Aggregate: a, Evidence: api.EvidenceAggregateOnly, See: func(repo string) bool { return repo == "seen" }}
	pages, found := 1, 0
	for ; ; pages++ {
		p, err := ix.Listing(t.Context(), q, 10, nil)
		if err != nil {
			t.Fatal(err)
		}
		found += p.Rows
		if q.After = p.Next; q.After == "" {
			break
		}
		if k, err := base64.RawURLEncoding.DecodeString(q.After); err != nil || strings.Contains(string(k), "hidden-") {
			t.Errorf("cursor %q, %v", k, err)
		}
	}
	if found != 1 || pages < 1500/160 {
		t.Errorf("found %d in %d pages", found, pages)
	}
}

// TestSeeks: with Next a caller who may see few of very many repositories gets a page by a few seeks.
func TestSeeks(t *testing.T) {
	c := &counting{KV: openMemory(t, new(memkv.Disk))}
	ix := opened(t, c)
	a := aggregate("base")
	var ops []index.Op
	for i := range 3000 {
		ops = append(ops, adapter(fmt.Sprintf("r%04d", i), fmt.Sprint(i), uint64(i+1), a))
	}
	apply(t, ix, ops...)
	mine := []string{"r0007", "r1500", "r2999"}
	q := index.Query{
		Aggregate: a,
		See:       func(repo string) bool { return slices.Contains(mine, repo) },
		Next: func(repo string) (string, bool) {
			i, _ := slices.BinarySearch(mine, repo)
			if i == len(mine) {
				return "", false
			}
			return mine[i], true
		},
	}
	c.visited = 0
	p, err := ix.Listing(t.Context(), q, 100, nil)
	if err != nil || p.Rows != 3 || p.Next != "" || c.visited > 10 {
		t.Errorf("%d rows, next %q, by %d pairs: %v", p.Rows, p.Next, c.visited, err)
	}
}

// TestTargets: links by name and to a base are found from what they link to.
func TestTargets(t *testing.T) {
	ix := opened(t, openMemory(t, new(memkv.Disk)))
	a, b := aggregate("one"), aggregate("two")
	derived := unbound("a", "derived", 1)
	derived.Links = []index.Link{{Relation: api.RelationDerived, Target: index.AggregateTarget(a)},
		{Relation: api.RelationStatement, Target: index.AggregateTarget(b)}}
	named := adapter("b", "eval", 2, a)
	named.Links = []index.Link{{Relation: api.RelationAdapter, Target: index.NameTarget(a, "x")}}
	apply(t, ix, derived, named)
	for what, c := range map[string]struct {
		q    index.Query
		want []string
	}{
		"made of one":  {index.Query{Target: index.AggregateTarget(a), Relation: api.RelationDerived}, []string{"a:derived"}},
		"about two":    {index.Query{Target: index.AggregateTarget(b)}, []string{"a:derived"}},
		"by name":      {index.Query{Target: index.NameTarget(a, "x")}, []string{"b:eval"}},
		"another name": {index.Query{Target: index.NameTarget(a, "y")}, nil},
		"another base": {index.Query{Target: index.NameTarget(b, "x")}, nil},
	} {
		equal(t, what, texts(t, ix.Find(t.Context(), c.q)), c.want)
	}
}

// TestTooMuchSaid: what would not fit is refused before it is kept.
func TestTooMuchSaid(t *testing.T) {
	for what, change := range map[string]func(*index.PutManifest){
		"name":          func(p *index.PutManifest) { p.Name = strings.Repeat("n", 1025) },
		"facts":         func(p *index.PutManifest) { p.Facts = []byte(`"` + strings.Repeat("f", 64<<10) + `"`) },
		"no JSON":       func(p *index.PutManifest) { p.Facts = []byte("{") },
		"links":         func(p *index.PutManifest) { p.Links = make([]index.Link, 257) },
		"zero link":     func(p *index.PutManifest) { p.Links = []index.Link{{Relation: "r"}} },
		"a listed one":  func(p *index.PutManifest) { p.BoundBy = p.Digest },
		"with relation": func(p *index.PutManifest) { p.Relation = "r" },
	} {
		p := unbound("a", "x", 1)
		change(&p)
		if index.Check(p) == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// TestWrongQueries: what does not go together is an error.
func TestWrongQueries(t *testing.T) {
	ix := opened(t, openMemory(t, new(memkv.Disk)))
	a, d := aggregate("base"), identity.Sum(nil)
	for _, q := range []index.Query{
		{}, {Aggregate: a, Unbound: true}, {Aggregate: a, Target: d}, {Target: d, Subject: d, Repo: "a"}, {Subject: d},
		{Unbound: true, Evidence: api.EvidenceNone}, {Target: d, Kind: api.KindEval}, {Target: d, Name: "x"},
		{Repo: "a", Name: "x"}, {Aggregate: a, Relation: "r"}, {Aggregate: a, ArtifactType: "t"},
		{Aggregate: a, Since: time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		if _, _, err := ix.Records(t.Context(), q, 1); err == nil {
			t.Errorf("%+v is taken", q)
		}
	}
	for _, q := range []index.Query{{Repo: "a"}, {Target: d}} {
		if _, err := ix.Listing(t.Context(), q, 1, nil); err == nil {
			t.Errorf("listing of %+v is taken", q)
		}
	}
	if a := reflect.TypeFor[api.Artifact](); a.Field(a.NumField()-1).Name != "Binding" {
		t.Error("Binding is not the last member of an api.Artifact")
	}
}

// farm yields so many adapters, each in a repository and under a tag of its own, and a statement that binds the first.
func farm(n int, a identity.Aggregate) iter.Seq2[index.Entry, error] {
	return func(yield func(index.Entry, error) bool) {
		for i := range n {
			p := adapter(fmt.Sprintf("farm/%05d", i*7919%n), fmt.Sprint("adapter ", i), uint64(i+1), a)
			if i == 0 {
				p.Aggregate, p.Evidence = identity.Aggregate{}, api.EvidenceNone
				s := index.Entry{PutManifest: bind(p.Repo, "says", 2, "adapter 0", a)}
				if !yield(s, nil) {
					return
				}
			}
			tag := index.PutTag{Repo: p.Repo, Tag: "v1", Digest: p.Digest, Seq: p.Seq}
			if !yield(index.Entry{PutManifest: p, Tags: []index.PutTag{tag}}, nil) {
				return
			}
		}
	}
}

// TestImport: an import has the rows of an Apply, in a file that is hardly larger than they are, and so has a copy of a
// file that grew by pushes.
func TestImport(t *testing.T) {
	const n = 5000
	a := aggregate("base")
	applied, imported := openBolt(t), openBolt(t)
	one, two := opened(t, applied), opened(t, imported)
	var batch []index.Op
	for e := range farm(n, a) {
		ops := []index.Op{e.PutManifest}
		for _, tag := range e.Tags {
			ops = append(ops, tag)
		}
		batch = append(batch, ops...)
		if e.Seq%10 == 0 {
			apply(t, one, batch...)
			batch = nil
		}
	}
	apply(t, one, batch...)
	if err := two.Import(t.Context(), t.TempDir(), farm(n, a)); err != nil {
		t.Fatal(err)
	}
	rows := dump(t, applied)
	equal(t, "rows", dump(t, imported), rows)
	if seq, err := two.NextSeq(t.Context(), "farm/00000"); err != nil || seq <= 1 {
		t.Errorf("number %d, %v", seq, err)
	}
	compact := filepath.Join(t.TempDir(), "compact.db")
	if err := applied.CopyTo(t.Context(), compact); err != nil {
		t.Fatal(err)
	}
	if err := applied.CopyTo(t.Context(), compact); !errors.Is(err, fs.ErrExist) {
		t.Errorf("copy over a file: %v", err)
	}
	copied, err := boltkv.Open(compact, boltkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "rows of the copy", dump(t, copied), rows)
	if err := copied.Close(); err != nil {
		t.Fatal(err)
	}
	_, bytes := content(t, imported)
	for what, path := range map[string]string{"import": imported.Path(), "copy": compact} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if ratio := float64(info.Size()) / float64(bytes); ratio > 2 {
			t.Errorf("%s: %d bytes for %d of keys and values, %.2f times as many", what, info.Size(), bytes, ratio)
		}
	}
}

// content counts the rows of an engine, and the bytes of their keys and values.
func content(t testing.TB, kv index.KV) (rows, bytes int) {
	err := kv.View(t.Context(), func(x index.Txn) error {
		rows, bytes = 0, 0
		for k, v := range x.Range(nil, nil) {
			rows++
			bytes += len(k) + len(v)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows, bytes
}

// TestImportRefused: an import that can't be leaves an empty index, which takes another one.
func TestImportRefused(t *testing.T) {
	kv := openMemory(t, new(memkv.Disk))
	ix := opened(t, kv)
	a := aggregate("base")
	broken := errors.New("no more")
	wrong := adapter("a", "x", 1, a)
	for what, entries := range map[string][]index.Entry{
		"twice":          {{PutManifest: wrong}, {PutManifest: wrong}},
		"another's tag":  {{PutManifest: wrong, Tags: []index.PutTag{{Repo: "b", Tag: "v1", Digest: wrong.Digest, Seq: 1}}}},
		"not acceptable": {{PutManifest: adapter("", "x", 1, a)}},
		"broken off":     {{PutManifest: wrong}, {}},
	} {
		err := ix.Import(t.Context(), t.TempDir(), func(yield func(index.Entry, error) bool) {
			for _, e := range entries {
				err := error(nil)
				if e.Repo == "" && what == "broken off" {
					err = broken
				}
				if !yield(e, err) {
					return
				}
			}
		})
		if err == nil || what == "broken off" && !errors.Is(err, broken) {
			t.Errorf("%s: %v", what, err)
		}
		equal(t, what, all(t, ix.Export(t.Context())), nil)
	}
	if err := ix.Import(t.Context(), "", farm(10, a)); err != nil {
		t.Fatal(err)
	}
	if err := ix.Import(t.Context(), "", farm(10, a)); err == nil || len(all(t, ix.Export(t.Context()))) != 21 {
		t.Errorf("import into an index that holds something: %v", err)
	}
}

// TestPagesTellNothing: what lies in repositories that are not to be seen changes neither a page nor its cursor.
func TestPagesTellNothing(t *testing.T) {
	a := aggregate("base")
	walk := func(hidden ...index.Op) (said []string) {
		ix := opened(t, openMemory(t, new(memkv.Disk)))
		ix.SetPage(100, 1<<20, 3)
		checkpoint := adapter("pub/c", "checkpoint", 2, a)
		checkpoint.Kind = api.KindCheckpoint
		ops := []index.Op{adapter("pub/a", "one", 1, a), checkpoint}
		for i := range 150 {
			p := adapter("pub/d", fmt.Sprint("d", i), uint64(i+3), a)
			p.Evidence = api.EvidenceAggregateOnly
			ops = append(ops, p)
		}
		apply(t, ix, append(ops, hidden...)...)
		for _, f := range []index.Query{{}, {Kind: api.KindAdapter}, {Kind: api.KindCheckpoint},
			{Evidence: api.EvidenceAsserted}, {Since: epoch.Add(100 * time.Second)}, {Repo: "pub/a"}} {
			f.Aggregate, f.See = a, func(repo string) bool { return strings.HasPrefix(repo, "pub/") }
			for _, next := range []func(string) (string, bool){nil, func(repo string) (string, bool) {
				return "pub/", repo < "pub/"
			}} {
				for q := f; ; {
					q.Next = next
					p, err := ix.Listing(t.Context(), q, 1, nil)
					if err != nil {
						t.Fatal(err)
					}
					said = append(said, fmt.Sprintf("%s %q", p.JSON, p.Next))
					if q.After = p.Next; q.After == "" {
						break
					}
				}
			}
		}
		return said
	}
	none := walk()
	for what, repos := range map[string][]string{"before": {"aaa/x"}, "after": {"zzz/x"}, "both": {"aaa/x", "zzz/x", "pua/y"}} {
		var hidden []index.Op
		for i, kind := range []api.Kind{api.KindAdapter, api.KindCheckpoint, api.KindEval} {
			for j, repo := range repos {
				for n := range 70 {
					p := adapter(repo, fmt.Sprint("hidden", i, n), uint64(100*i+10*j+n+1000), a)
					p.Kind = kind
					hidden = append(hidden, p)
				}
			}
		}
		equal(t, what, walk(hidden...), none)
	}
}
