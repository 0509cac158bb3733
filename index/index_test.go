package index_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/index/pgkv"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

// epoch is when the tests' first manifest was accepted.
var epoch = time.Date(2024, 5, 1, 12, 0, 0, 123456789, time.UTC)

// onEngines runs a test on an empty index of each engine.
func onEngines(t *testing.T, test func(t *testing.T, ix *index.Index)) {
	t.Run("bolt", func(t *testing.T) { test(t, opened(t, openBolt(t))) })
	t.Run("memory", func(t *testing.T) { test(t, opened(t, openMemory(t, new(memkv.Disk)))) })
	t.Run("postgres", func(t *testing.T) { test(t, opened(t, openPostgres(t))) })
}

func TestMain(m *testing.M) { testpg.Main(m) }

func openPostgres(t testing.TB) *pgkv.KV {
	t.Helper()
	kv, err := pgkv.Open(t.Context(), testpg.Shared(t).Database(t), pgkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func openBolt(t testing.TB) *boltkv.KV {
	t.Helper()
	kv, err := boltkv.Open(filepath.Join(t.TempDir(), "index.db"), boltkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func openMemory(t testing.TB, d *memkv.Disk) *memkv.KV {
	t.Helper()
	kv, err := d.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func opened(t testing.TB, kv index.KV) *index.Index {
	t.Helper()
	ix, err := index.New(t.Context(), kv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ix.Close(); err != nil {
			t.Error(err)
		}
	})
	return ix
}

func apply(t testing.TB, ix *index.Index, ops ...index.Op) {
	t.Helper()
	if err := ix.Apply(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
}

func aggregate(text string) identity.Aggregate { return identity.Aggregate(identity.Sum([]byte(text))) }

// adapter is a manifest of an adapter; text makes its bytes.
func adapter(repo, text string, seq uint64, a identity.Aggregate) index.PutManifest {
	return index.PutManifest{
		Record: index.Record{
			Repo: repo, Digest: identity.Sum([]byte(text)), MediaType: "application/vnd.oci.image.manifest.v1+json",
			Size: int64(len(text)), ArtifactType: api.ArtifactTypeAdapter, Kind: api.KindAdapter, Aggregate: a,
			Evidence: api.EvidenceAsserted, Annotations: map[string]string{"text": text, "empty": ""},
			Seq: seq, Created: epoch.Add(time.Duration(seq) * time.Second),
		},
		Manifest: []byte(text),
		Refers:   sums("blob of "+text, "config"),
	}
}

// base is a manifest of a base model.
func base(repo, text string, seq uint64, m identity.Manifest) index.PutManifest {
	p := adapter(repo, text, seq, m.Aggregate)
	p.ArtifactType, p.Kind, p.State, p.Shards = api.ArtifactTypeBase, api.KindBase, api.ContentDirect, m
	p.ShardCount, p.TotalSize = len(m.Shards), m.TotalSize
	return p
}

// texts names the records of a listing by the bytes of their manifests.
func texts(t testing.TB, seq iter.Seq2[index.Record, error]) (found []string) {
	t.Helper()
	for _, r := range all(t, seq) {
		found = append(found, r.Repo+":"+r.Annotations["text"])
	}
	return found
}

// TestOneAggregateManyNames: the same bytes under several names are one base, its adapters are found whichever name
// they used and whether or not a base is held, and other bytes under an old name take nothing over.
func TestOneAggregateManyNames(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx := t.Context()
		v1, v2 := shards("v1.safetensors"), shards("v2.safetensors")
		early := adapter("farm/adapters", "before its base", 1, v1.Aggregate)
		apply(t, ix, early)
		equal(t, "no base", all(t, ix.Bases(ctx, identity.Aggregate{}, nil, nil)), nil)
		equal(t, "early", texts(t, ix.Find(ctx, index.Query{Aggregate: v1.Aggregate})),
			[]string{"farm/adapters:before its base"})

		apply(t, ix, base("old/name", "v1", 1, v1),
			index.PutTag{Repo: "old/name", Tag: "main", Digest: identity.Sum([]byte("v1")), Seq: 1})
		apply(t, ix, base("new/name", "v1", 1, v1), base("new/name", "v1 dressed otherwise", 2, v1))
		apply(t, ix, base("old/name", "v2", 2, v2),
			index.PutTag{Repo: "old/name", Tag: "main", Digest: identity.Sum([]byte("v2")), Seq: 2})
		apply(t, ix, adapter("farm/adapters", "late", 2, v1.Aggregate), adapter("farm/adapters", "of v2", 3, v2.Aggregate))

		equal(t, "all of v1", texts(t, ix.Find(ctx, index.Query{Aggregate: v1.Aggregate})), []string{
			"farm/adapters:late", "farm/adapters:before its base",
			"new/name:v1 dressed otherwise", "new/name:v1", "old/name:v1"})
		equal(t, "bases of v1", texts(t, ix.Find(ctx, index.Query{Aggregate: v1.Aggregate, Kind: api.KindBase})), []string{
			"new/name:v1 dressed otherwise", "new/name:v1", "old/name:v1"})
		equal(t, "all of v2", texts(t, ix.Find(ctx, index.Query{Aggregate: v2.Aggregate})),
			[]string{"farm/adapters:of v2", "old/name:v2"})
		bases := map[identity.Aggregate]string{}
		for _, r := range all(t, ix.Bases(ctx, identity.Aggregate{}, nil, nil)) {
			bases[r.Aggregate] = r.Annotations["text"]
		}
		equal(t, "bases", bases, map[identity.Aggregate]string{v1.Aggregate: "v1 dressed otherwise", v2.Aggregate: "v2"})
	})
}

func TestApplyRefuses(t *testing.T) {
	good := adapter("a", "text", 1, aggregate("base"))
	with := func(change func(*index.PutManifest)) index.PutManifest {
		p := good
		change(&p)
		return p
	}
	bad := map[string]index.Op{
		"no repository":    with(func(p *index.PutManifest) { p.Repo = "" }),
		"NUL in it":        with(func(p *index.PutManifest) { p.Repo = "a\x00b" }),
		"long repository":  with(func(p *index.PutManifest) { p.Repo = strings.Repeat("a", 256) }),
		"no number":        with(func(p *index.PutManifest) { p.Seq = 0 }),
		"no digest":        with(func(p *index.PutManifest) { p.Digest = identity.Digest{} }),
		"other bytes":      with(func(p *index.PutManifest) { p.Manifest = []byte("tex_") }),
		"other size":       with(func(p *index.PutManifest) { p.Size++ }),
		"no time":          with(func(p *index.PutManifest) { p.Created = time.Time{} }),
		"far time":         with(func(p *index.PutManifest) { p.Created = epoch.AddDate(400, 0, 0) }),
		"NUL in the kind":  with(func(p *index.PutManifest) { p.Kind = "a\x00" }),
		"other aggregate":  with(func(p *index.PutManifest) { p.Shards = shards("x.safetensors") }),
		"refers to zero":   with(func(p *index.PutManifest) { p.Refers = make([]identity.Digest, 1) }),
		"delete nothing":   index.DeleteManifest{Repo: "a", Seq: 2},
		"tag with a colon": index.PutTag{Repo: "a", Tag: "b:c", Digest: good.Digest, Seq: 2},
		"tag of nothing":   index.PutTag{Repo: "a", Tag: "b", Seq: 2},
		"no tag":           index.DeleteTag{Repo: "a", Seq: 2},
		"endless lease":    index.LinkBlob{Repo: "a", Digest: good.Digest},
		"unlink nothing":   index.UnlinkBlob{Repo: "a"},
		"no upload id":     index.PutUpload{Upload: index.Upload{Repo: "a", Expires: epoch}},
		"no upload":        index.DeleteUpload{},
	}
	onEngines(t, func(t *testing.T, ix *index.Index) {
		for name, op := range bad {
			err := ix.Apply(t.Context(), good, op)
			if err == nil || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v", name, err)
			}
		}
		equal(t, "export", all(t, ix.Export(t.Context())), nil)
	})
}

func TestAllOrNothing(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		p := adapter("a", "text", 1, aggregate("base"))
		apply(t, ix, p)
		before := all(t, ix.Export(t.Context()))
		err := ix.Apply(t.Context(), adapter("a", "other", 2, aggregate("base")),
			index.UnlinkBlob{Repo: "a", Digest: p.Refers[0]})
		if !errors.Is(err, index.ErrReferred) || !strings.Contains(err.Error(), p.Refers[0].String()) {
			t.Errorf("unlink: %v", err)
		}
		equal(t, "export", all(t, ix.Export(t.Context())), before)
	})
}

func TestQueriesThatMakeNoSense(t *testing.T) {
	a, d := aggregate("base"), identity.Sum([]byte("subject"))
	onEngines(t, func(t *testing.T, ix *index.Index) {
		for _, q := range []index.Query{
			{}, {Kind: api.KindAdapter}, {Aggregate: a, Subject: d, Repo: "a"}, {Repo: "a", Kind: api.KindAdapter},
			{Repo: "a", ArtifactType: "t"}, {Subject: d}, {Aggregate: a, ArtifactType: "t"},
		} {
			var errs []error
			for _, err := range ix.Find(t.Context(), q) {
				errs = append(errs, err)
			}
			if len(errs) != 1 || errs[0] == nil {
				t.Errorf("%+v: %v", q, errs)
			}
		}
	})
}

func TestCursor(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx := t.Context()
		a := aggregate("base")
		q := index.Query{Aggregate: a}
		for seq := range uint64(5) {
			apply(t, ix, adapter("a", fmt.Sprint(seq+1), seq+1, a))
		}
		records := all(t, ix.Find(ctx, q))
		q.After = index.Cursor(q, records[1])
		apply(t, ix, index.DeleteManifest{Repo: "a", Digest: records[1].Digest, Seq: 6}, adapter("a", "newer", 7, a))
		equal(t, "behind a deleted one", texts(t, ix.Find(ctx, q)), []string{"a:3", "a:2", "a:1"})
		for _, q := range []index.Query{
			{Aggregate: aggregate("another"), After: q.After}, {Repo: "a", After: q.After},
			{Aggregate: a, After: "%"}, {Aggregate: a, After: "YQ"}, {Aggregate: a, After: q.After + "AAAA"},
			{Aggregate: a, After: q.After[:len(q.After)-4]}, {Aggregate: a, Kind: api.KindBase, After: q.After},
		} {
			for _, err := range ix.Find(ctx, q) {
				if !errors.Is(err, index.ErrCursor) {
					t.Errorf("cursor %q: %v", q.After, err)
				}
			}
		}
	})
}

// TestPagesAmongPushes reads a listing in small pages while others push and delete in it: what was there before and
// stays comes once.
func TestPagesAmongPushes(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		const n = 400
		ctx, a := t.Context(), aggregate("base")
		var ops []index.Op
		for seq := uint64(1); seq <= n; seq++ {
			ops = append(ops, adapter(fmt.Sprintf("repo-%d", seq%3), fmt.Sprint("old ", seq), seq, a))
		}
		apply(t, ix, ops...)
		seen := map[string]int{}
		q := index.Query{Aggregate: a, Kind: api.KindAdapter}
		for page := uint64(1); ; page++ {
			var last index.Record
			rows := 0
			for r, err := range ix.Find(ctx, q) {
				if err != nil {
					t.Fatal(err)
				}
				seen[r.Annotations["text"]]++
				last = r
				if rows++; rows == 7 {
					break
				}
			}
			if rows < 7 {
				break
			}
			q.After = index.Cursor(q, last)
			apply(t, ix, adapter(fmt.Sprintf("repo-%d", page%3), fmt.Sprint("new ", page), n+page, a),
				index.DeleteManifest{Repo: last.Repo, Digest: last.Digest, Seq: 2*n + page})
		}
		for seq := 1; seq <= n; seq++ {
			if k := fmt.Sprint("old ", seq); seen[k] != 1 {
				t.Errorf("%s came %d times", k, seen[k])
			}
		}
	})
}

// TestNoTransactionWhileCallerReads changes the index from inside every listing, as a slow client makes happen: a
// transaction that stayed open would stop bolt from using freed pages again, and the file would grow.
func TestNoTransactionWhileCallerReads(t *testing.T) {
	c := &counting{KV: openBolt(t)}
	ix := opened(t, c)
	ix.SetPage(2, 1<<20, 4)
	ctx, a := t.Context(), aggregate("base")
	seq := uint64(0)
	change := func() {
		if c.open != 0 {
			t.Errorf("%d views are open", c.open)
		}
		seq++
		apply(t, ix, base("a", fmt.Sprint(seq%5), seq, shards("x.safetensors")), index.PutTag{
			Repo: "a", Tag: fmt.Sprint("v", seq%5), Digest: identity.Sum([]byte(fmt.Sprint(seq % 5))), Seq: seq},
			index.LinkBlob{Repo: "a", Digest: identity.Sum([]byte("leased")), Until: epoch},
			index.PutUpload{Upload: index.Upload{ID: fmt.Sprint(seq % 5), Repo: "a", Expires: epoch}})
	}
	for range 10 {
		change()
	}
	walk(ix.Find(ctx, index.Query{Repo: "a"}), change)
	walk(ix.Find(ctx, index.Query{Aggregate: a}), change)
	walk(ix.Bases(ctx, identity.Aggregate{}, nil, nil), change)
	walk(ix.Tags(ctx, "a", ""), change)
	walk(ix.Repos(ctx, ""), change)
	walk(ix.Holders(ctx, identity.Sum([]byte("config")), epoch), change)
	walk(ix.ExpiredUploads(ctx, epoch), change)
	walk(ix.Export(ctx), change)
	if seq < 20 {
		t.Errorf("only %d changes were made", seq)
	}
}

func walk[T any](seq iter.Seq2[T, error], change func()) {
	n := 0
	for range seq {
		if n++; n > 50 {
			return // every change may put something before the reader
		}
		change()
	}
}

// counting counts what transactions do.
type counting struct {
	index.KV
	reads, writes, visited int
	open                   int // views
	most                   int // pairs visited in one view
}

type countingTxn struct {
	index.Txn
	c *counting
}

func (c *counting) View(ctx context.Context, fn func(index.Txn) error) error {
	c.open++
	visited := c.visited
	defer func() {
		c.open--
		c.most = max(c.most, c.visited-visited)
	}()
	return c.KV.View(ctx, func(x index.Txn) error { return fn(countingTxn{x, c}) })
}

func (c *counting) Update(ctx context.Context, fn func(index.Txn) error) error {
	return c.KV.Update(ctx, func(x index.Txn) error { return fn(countingTxn{x, c}) })
}

func (t countingTxn) Get(k []byte) ([]byte, error) {
	t.c.reads++
	return t.Txn.Get(k)
}

func (t countingTxn) Put(k, v []byte) error {
	t.c.writes++
	return t.Txn.Put(k, v)
}

func (t countingTxn) Range(from, to []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func([]byte, []byte) bool) {
		t.c.reads++
		for k, v := range t.Txn.Range(from, to) {
			if t.c.visited++; !yield(k, v) {
				return
			}
		}
	}
}

func (c *counting) during(do func()) counting {
	was := *c
	do()
	return counting{reads: c.reads - was.reads, writes: c.writes - was.writes, visited: c.visited - was.visited}
}

// TestFlatCost: a push does the same reads and writes into an empty repository and a full one, and a repository that
// the caller may not see costs a listing one seek.
func TestFlatCost(t *testing.T) {
	c := &counting{KV: openBolt(t)}
	ix := opened(t, c)
	ctx, a := t.Context(), aggregate("base")
	push := func(seq uint64) func() {
		p := adapter("full", fmt.Sprint(seq), seq, a)
		p.Subject = identity.Sum([]byte("subject"))
		return func() { apply(t, ix, p, index.PutTag{Repo: "full", Tag: fmt.Sprint(seq), Digest: p.Digest, Seq: seq}) }
	}
	first := c.during(push(1))
	var ops []index.Op
	for seq := uint64(2); seq < 3000; seq++ {
		ops = append(ops, adapter("full", fmt.Sprint(seq), seq, a))
	}
	ops = append(ops, base("open", "open base", 1, identity.Manifest{Aggregate: a}), adapter("open", "open", 2, a))
	apply(t, ix, ops...)
	last := c.during(push(3000))
	if last != first || last.visited > 2 {
		t.Errorf("the first push cost %+v, the last %+v", first, last)
	}

	see := func(repo string) bool { return repo == "open" }
	for name, list := range map[string]func() []index.Record{
		"find": func() []index.Record {
			return all(t, ix.Find(ctx, index.Query{Aggregate: a, Kind: api.KindAdapter, See: see}))
		},
		"bases": func() []index.Record { return all(t, ix.Bases(ctx, identity.Aggregate{}, see, nil)) },
	} {
		found := 0
		cost := c.during(func() { found = len(list()) })
		if found != 1 || cost.visited > 6 || cost.reads > 6 {
			t.Errorf("%s found %d at a cost of %+v", name, found, cost)
		}
	}
	seventh := index.DeleteManifest{Repo: "full", Digest: identity.Sum([]byte("7")), Seq: 4000}
	cost := c.during(func() { apply(t, ix, seventh) })
	if cost.visited > 2 {
		t.Errorf("a delete cost %+v", cost)
	}
}

// TestSteps: a listing that finds nothing to show does not walk for ever in one transaction.
func TestSteps(t *testing.T) {
	c := &counting{KV: openMemory(t, new(memkv.Disk))}
	ix := opened(t, c)
	ix.SetPage(100, 1<<20, 10)
	m := shards("x.safetensors")
	for i := range 60 {
		repo := fmt.Sprint("repo-", i)
		apply(t, ix, base(repo, "base", 1, m), adapter(repo, "adapter", 2, aggregate(repo)),
			index.LinkBlob{Repo: repo, Digest: identity.Sum([]byte("leased")), Until: epoch})
	}
	none := func(string) bool { return false }
	equal(t, "find", all(t, ix.Find(t.Context(), index.Query{Aggregate: m.Aggregate, See: none})), nil)
	equal(t, "bases", len(all(t, ix.Bases(t.Context(), aggregate(""), nil, nil))) <= 1, true)
	equal(t, "holders", all(t, ix.Holders(t.Context(), identity.Sum([]byte("leased")), epoch)), nil)
	if c.most > 62 { // the repositories of one base are looked at together
		t.Errorf("one view visited %d keys", c.most)
	}
	c.most = 0
	equal(t, "find", all(t, ix.Find(t.Context(), index.Query{Aggregate: m.Aggregate, See: none})), nil)
	if c.most > 11 {
		t.Errorf("one view of Find visited %d keys", c.most)
	}
}

func TestLeases(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx, d := t.Context(), identity.Sum([]byte("blob"))
		link := func(seconds time.Duration) index.LinkBlob {
			return index.LinkBlob{Repo: "a", Digest: d, Size: 4, Until: epoch.Add(seconds * time.Second)}
		}
		apply(t, ix, link(20), link(10)) // the shorter one changes nothing
		for _, c := range []struct {
			now     time.Duration
			visible bool
		}{{0, true}, {19, true}, {20, false}, {30, false}} {
			now := epoch.Add(c.now * time.Second)
			got, err := ix.Visible(ctx, "a", d, now)
			used, errUsed := ix.Uses(ctx, d, now)
			if got != c.visible || used != c.visible || err != nil || errUsed != nil {
				t.Errorf("after %d s: visible %v, used %v, want %v (%v, %v)", c.now, got, used, c.visible, err, errUsed)
			}
		}
		for _, c := range []struct {
			now    time.Duration
			purged int
		}{{19, 0}, {20, 1}, {20, 0}} {
			if n, err := ix.Purge(ctx, epoch.Add(c.now*time.Second)); n != c.purged || err != nil {
				t.Errorf("after %d s: purged %d (%v), want %d", c.now, n, err, c.purged)
			}
		}
		apply(t, ix, link(50), index.UnlinkBlob{Repo: "a", Digest: d}, index.UnlinkBlob{Repo: "a", Digest: d})
		if visible, err := ix.Visible(ctx, "a", d, epoch); visible || err != nil {
			t.Errorf("visible %v (%v) after it was unlinked", visible, err)
		}
		if n, err := ix.Purge(ctx, epoch.Add(time.Hour)); n != 0 || err != nil {
			t.Errorf("purged %d (%v) after it was unlinked", n, err)
		}
	})
}

// TestHolders: a repository whose lease has ended holds a blob as long as a manifest refers to it, and comes once.
func TestHolders(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		d, a := identity.Sum([]byte("config")), aggregate("base")
		for i, repo := range []string{"a", "a-b", "b"} {
			apply(t, ix, index.LinkBlob{Repo: repo, Digest: d, Until: epoch.Add(time.Duration(i) * time.Minute)})
		}
		apply(t, ix, adapter("a", "x", 1, a), adapter("b", "x", 1, a), adapter("c", "x", 1, a))
		for minutes, want := range [][]string{{"a", "a-b", "b", "c"}, {"a", "b", "c"}, {"a", "b", "c"}} {
			equal(t, "holders", all(t, ix.Holders(t.Context(), d, epoch.Add(time.Duration(minutes)*time.Minute))), want)
		}
	})
}

func TestUploads(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx := t.Context()
		u := index.Upload{ID: "id", Repo: "a", Caller: "somebody", Size: -1, Expires: epoch}
		later := u
		later.Expires, later.Size, later.Digest = epoch.Add(time.Minute), 7, identity.Sum([]byte("blob"))
		apply(t, ix, index.PutUpload{Upload: u}, index.PutUpload{Upload: later}, index.PutUpload{Upload: later})
		equal(t, "expired too early", all(t, ix.ExpiredUploads(ctx, epoch)), nil)
		equal(t, "expired", all(t, ix.ExpiredUploads(ctx, later.Expires)), []index.Upload{later})
		got, err := ix.Upload(ctx, "id")
		equal(t, "upload", got, later)
		apply(t, ix, index.DeleteUpload{ID: "id"}, index.DeleteUpload{ID: "id"})
		if _, gone := ix.Upload(ctx, "id"); err != nil || !errors.Is(gone, index.ErrNotFound) {
			t.Errorf("%v, then %v", err, gone)
		}
		equal(t, "expired after its end", all(t, ix.ExpiredUploads(ctx, epoch.AddDate(1, 0, 0))), nil)
	})
}

// TestBigRecords: a page is bounded in bytes, not only in rows.
func TestBigRecords(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		a := aggregate("base")
		var want []string
		for seq := uint64(6); seq > 0; seq-- {
			p := adapter("a", fmt.Sprint(seq), seq, a)
			p.Annotations["padding"] = strings.Repeat("x", 1<<19)
			apply(t, ix, p)
			want = append(want, "a:"+fmt.Sprint(seq))
		}
		equal(t, "big", texts(t, ix.Find(t.Context(), index.Query{Aggregate: a})), want)
	})
}
