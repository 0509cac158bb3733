package index_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

// faultState is what the index holds before each operation of the fault grid.
func faultState() []index.Op {
	a := shards("x.safetensors")
	two, d := adapter("a", "two", 2, a.Aggregate), identity.Sum([]byte("two"))
	two.Subject = identity.Sum([]byte("one"))
	return []index.Op{
		base("a", "one", 1, a), two, base("b", "one", 1, a), loose("a", "loose", 1), bind("a", "says", 2, "loose", a.Aggregate),
		index.PutTag{Repo: "a", Tag: "v1", Digest: d, Seq: 2}, index.PutTag{Repo: "a", Tag: "v2", Digest: d, Seq: 2},
		index.LinkBlob{Repo: "a", Digest: identity.Sum([]byte("leased")), Until: epoch.Add(time.Hour)},
		index.PutUpload{Upload: index.Upload{ID: "open", Repo: "a", Expires: epoch}},
		index.Checkpoint{Position: 3},
	}
}

// loose is an artifact that has a name and links, and no base of its own.
func loose(repo, text string, seq uint64) index.PutManifest {
	p := unbound(repo, text, seq)
	p.Name, p.Facts = "x", []byte(`{"name":"x"}`)
	p.Links = []index.Link{{Relation: api.RelationParent, Target: identity.Sum([]byte("two"))}}
	return p
}

// TestLacks takes away each row of an index in turn, and damages each value: all that comes from a change that is on
// record is missed.
func TestLacks(t *testing.T) {
	ctx := t.Context()
	lists := adapter("a", "lists", 5, aggregate("another"))
	lists.Lists = sums("one", "two")
	gone, d := adapter("b", "gone", 6, aggregate("another")), identity.Sum([]byte("two"))
	ops := append(faultState(), lists, gone, index.DeleteManifest{Repo: "b", Digest: gone.Digest, Seq: 7},
		index.PutTag{Repo: "a", Tag: "v3", Digest: d, Seq: 8}, index.DeleteTag{Repo: "a", Tag: "v3", Seq: 9},
		index.PutTag{Repo: "a", Tag: "v1", Digest: lists.Digest, Seq: 10})
	kv := openMemory(t, new(memkv.Disk))
	ix := opened(t, kv)
	lacks := func() []index.Lack {
		found, err := ix.Lacks(ctx, ops...)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := lacks(); len(found) != len(ops)-3 { // a lease, an upload and a position have no number
		t.Errorf("of an empty index: %+v", found)
	}
	apply(t, ix, ops...)
	if found := lacks(); len(found) > 0 {
		t.Errorf("%+v", found)
	}
	tables := map[byte]int{}
	rows := map[string]string{}
	if err := kv.View(ctx, func(x index.Txn) error {
		for k, v := range x.Range(nil, nil) {
			rows[string(k)] = string(v)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for key, value := range rows {
		if strings.Contains("elquwz", key[:1]) { // no ref brings these back
			continue
		}
		tables[key[0]]++
		write := func(x index.Txn) error { return x.Delete([]byte(key)) }
		for range 2 {
			if err := kv.Update(ctx, write); err != nil {
				t.Fatal(err)
			}
			if len(lacks()) == 0 {
				t.Errorf("not missed: %q", key)
			}
			if err := kv.Update(ctx, func(x index.Txn) error { return x.Put([]byte(key), []byte(value)) }); err != nil {
				t.Fatal(err)
			}
			if value == "" {
				break
			}
			write = func(x index.Txn) error { return x.Put([]byte(key), []byte(value[:len(value)-1]+"?")) }
		}
	}
	if found := lacks(); len(found) > 0 || len(tables) != 12 {
		t.Errorf("%+v, tables %v", found, tables)
	}
}

// faultOps are the operations of the grid, each with what it does to faultState.
func faultOps() map[string][]index.Op {
	a := shards("x.safetensors")
	d, leased := identity.Sum([]byte("two")), identity.Sum([]byte("leased"))
	return map[string][]index.Op{
		"new manifest":     {adapter("a", "three", 3, a.Aggregate)},
		"manifest again":   {adapter("a", "two", 3, a.Aggregate)},
		"base elsewhere":   {base("c", "one", 1, a)},
		"delete":           {index.DeleteManifest{Repo: "a", Digest: d, Seq: 3}},
		"delete of one":    {index.DeleteManifest{Repo: "b", Digest: identity.Sum([]byte("one")), Seq: 3}},
		"unbind":           {index.DeleteManifest{Repo: "a", Digest: identity.Sum([]byte("says")), Seq: 3}},
		"bind again":       {bind("a", "says too", 3, "loose", aggregate("another"))},
		"delete of bound":  {index.DeleteManifest{Repo: "a", Digest: identity.Sum([]byte("loose")), Seq: 3}},
		"tag of bound":     {index.PutTag{Repo: "a", Tag: "v3", Digest: identity.Sum([]byte("loose")), Seq: 3}},
		"new tag":          {index.PutTag{Repo: "a", Tag: "v3", Digest: d, Seq: 3}},
		"moved tag":        {index.PutTag{Repo: "a", Tag: "v1", Digest: identity.Sum([]byte("one")), Seq: 3}},
		"deleted tag":      {index.DeleteTag{Repo: "a", Tag: "v1", Seq: 3}},
		"new lease":        {index.LinkBlob{Repo: "b", Digest: leased, Until: epoch}},
		"longer lease":     {index.LinkBlob{Repo: "a", Digest: leased, Until: epoch.Add(2 * time.Hour)}},
		"unlink":           {index.UnlinkBlob{Repo: "a", Digest: leased}},
		"new upload":       {index.PutUpload{Upload: index.Upload{ID: "new", Repo: "a", Expires: epoch}}},
		"longer upload":    {index.PutUpload{Upload: index.Upload{ID: "open", Repo: "a", Expires: epoch.Add(1)}}},
		"end of an upload": {index.DeleteUpload{ID: "open"}},
		"checkpoint":       {index.Checkpoint{Position: 4}},
		"push": {adapter("a", "three", 3, a.Aggregate),
			index.PutTag{Repo: "a", Tag: "v1", Digest: identity.Sum([]byte("three")), Seq: 3},
			index.Checkpoint{Position: 4}},
	}
}

// dump returns all rows of an engine.
func dump(t interface{ Fatal(...any) }, kv index.KV) (rows []string) {
	err := kv.View(context.Background(), func(x index.Txn) error {
		rows = nil
		for k, v := range x.Range(nil, nil) {
			rows = append(rows, fmt.Sprintf("%q: %x", k, v))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// faulty opens an index on a copy of a disk whose n-th chance to fail is taken.
func faulty(t *testing.T, disk *memkv.Disk, n int, fault func(memkv.Point) memkv.Fault) (
	*index.Index, *memkv.KV, *int,
) {
	t.Helper()
	kv := openMemory(t, disk.Copy())
	ix := opened(t, kv)
	ix.SetPage(2, 1<<20, 3)
	chances := new(int)
	kv.Fail(func(p memkv.Point) memkv.Fault {
		f := fault(p)
		if f == memkv.None {
			return f
		}
		if *chances++; *chances != n+1 {
			return memkv.None
		}
		return f
	})
	return ix, kv, chances
}

func lost(memkv.Point) memkv.Fault { return memkv.Lost }

func persisted(p memkv.Point) memkv.Fault {
	if p == memkv.Commit {
		return memkv.Persisted
	}
	return memkv.None
}

func populated(t *testing.T) *memkv.Disk {
	t.Helper()
	disk := new(memkv.Disk)
	apply(t, opened(t, openMemory(t, disk)), faultState()...)
	return disk
}

// TestFaultGrid fails every operation at every point at which the engine can fail: what failed and was lost leaves
// nothing, what failed and was kept is whole, and trying again gives the same in the end.
func TestFaultGrid(t *testing.T) {
	disk := populated(t)
	for name, ops := range faultOps() {
		t.Run(name, func(t *testing.T) {
			ix, kv, _ := faulty(t, disk, -1, lost)
			before := dump(t, kv)
			apply(t, ix, ops...)
			after := dump(t, kv)
			for kind, fault := range map[string]func(memkv.Point) memkv.Fault{"lost": lost, "persisted": persisted} {
				want := before
				if kind == "persisted" {
					want = after
				}
				for n := 0; ; n++ {
					ix, kv, chances := faulty(t, disk, n, fault)
					err := ix.Apply(t.Context(), ops...)
					kv.Fail(nil)
					if *chances <= n {
						if n == 0 || err != nil {
							t.Errorf("%s: no chance to fail, %v", kind, err)
						}
						break
					}
					if !errors.Is(err, memkv.ErrInjected) {
						t.Errorf("%s %d: %v", kind, n, err)
					}
					equal(t, fmt.Sprintf("%s %d", kind, n), dump(t, kv), want)
					apply(t, ix, ops...)
					equal(t, fmt.Sprintf("%s %d, tried again", kind, n), dump(t, kv), after)
				}
			}
		})
	}
}

// TestFaultsInSteps fails what takes several transactions: trying again, also after a restart, reaches the same end.
func TestFaultsInSteps(t *testing.T) {
	for name, do := range map[string]func(ctx context.Context, ix *index.Index) error{
		"reset": func(ctx context.Context, ix *index.Index) error { return ix.Reset(ctx) },
		"empty": func(ctx context.Context, ix *index.Index) error { return ix.Empty(ctx, "kept") },
		"purge": func(ctx context.Context, ix *index.Index) error {
			_, err := ix.Purge(ctx, epoch.Add(3*time.Hour))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			disk := populated(t)
			ix, kv, _ := faulty(t, disk, -1, lost)
			if err := do(t.Context(), ix); err != nil {
				t.Fatal(err)
			}
			want := dump(t, kv)
			for _, fault := range []func(memkv.Point) memkv.Fault{lost, persisted} {
				for n := 0; ; n++ {
					ix, kv, chances := faulty(t, disk, n, fault)
					err := do(t.Context(), ix)
					if *chances <= n {
						break
					}
					if !errors.Is(err, memkv.ErrInjected) {
						t.Errorf("fault %d: %v", n, err)
					}
					kv.Fail(nil)
					if ix, err = index.New(t.Context(), kv); err != nil {
						t.Fatal(err)
					}
					if err := do(t.Context(), ix); err != nil {
						t.Errorf("fault %d, tried again: %v", n, err)
					}
					equal(t, fmt.Sprintf("after fault %d", n), dump(t, kv), want)
				}
			}
		})
	}
}

// TestFaultsInNumbers: no number is issued twice, whatever fails.
func TestFaultsInNumbers(t *testing.T) {
	disk := populated(t)
	for _, fault := range []func(memkv.Point) memkv.Fault{lost, persisted} {
		for n := range 40 {
			ix, kv, _ := faulty(t, disk, n, fault)
			last := uint64(2)
			for range 200 {
				seq, err := ix.NextSeq(t.Context(), "a")
				if err == nil && seq <= last {
					t.Errorf("number %d after %d", seq, last)
				}
				last = max(last, seq)
			}
			kv.Fail(nil)
			again := opened(t, kv)
			if seq, err := again.NextSeq(t.Context(), "a"); err != nil || seq <= last {
				t.Errorf("number %d (%v) after %d and a restart", seq, err, last)
			}
		}
	}
}

// TestNumbersAboveFailedOps: a number that an op carried is not issued, also when the op failed.
func TestNumbersAboveFailedOps(t *testing.T) {
	ix, kv, _ := faulty(t, populated(t), 0, func(p memkv.Point) memkv.Fault {
		if p == memkv.Commit {
			return memkv.Lost
		}
		return memkv.None
	})
	if err := ix.Apply(t.Context(), index.DeleteTag{Repo: "a", Tag: "v1", Seq: 1000}); !errors.Is(err, memkv.ErrInjected) {
		t.Fatal(err)
	}
	kv.Fail(nil)
	if seq, err := ix.NextSeq(t.Context(), "a"); err != nil || seq <= 1000 {
		t.Errorf("number %d, %v", seq, err)
	}
}

// questions asks everything of faultState and returns the answers, or the first error.
func questions(t *testing.T, ix *index.Index) (answers []string, err error) {
	ctx, a, d := t.Context(), shards("x.safetensors").Aggregate, identity.Sum([]byte("two"))
	note := func(answer any, e error) {
		if e != nil && err == nil {
			err = e
		}
		answers = append(answers, fmt.Sprintf("%+v", answer))
	}
	r, data, e := ix.Manifest(ctx, "a", "v1")
	note(r, e)
	note(data, nil)
	m, e := ix.Shards(ctx, a, "a", identity.Sum([]byte("one")))
	note(m, e)
	visible, e := ix.Visible(ctx, "a", identity.Sum([]byte("leased")), epoch)
	note(visible, e)
	used, e := ix.Uses(ctx, identity.Sum([]byte("leased")), epoch)
	note(used, e)
	u, e := ix.Upload(ctx, "open")
	note(u, e)
	position, e := ix.Checkpoint(ctx)
	note(position, e)
	tags, e := ix.TagsOf(ctx, "a", d)
	note(tags, e)
	for r, e := range ix.Find(ctx, index.Query{Aggregate: a}) {
		note(r, e)
	}
	for _, q := range []index.Query{{Aggregate: a}, {Aggregate: a, Name: "x"}, {Unbound: true}} {
		p, e := ix.Listing(ctx, q, 100, nil)
		note(string(p.JSON), e)
	}
	records, _, e := ix.Records(ctx, index.Query{Target: d}, 100)
	note(records, e)
	bindings, e := ix.Bindings(ctx, "a", identity.Sum([]byte("loose")))
	note(bindings, e)
	referrers := index.Query{Repo: "a", Subject: identity.Sum([]byte("one")), ArtifactType: api.ArtifactTypeAdapter}
	for r, e := range ix.Find(ctx, referrers) {
		note(r, e)
	}
	for r, e := range ix.Bases(ctx, identity.Aggregate{}, nil, nil) {
		note(r, e)
	}
	for tag, e := range ix.Tags(ctx, "a", "") {
		note(tag, e)
	}
	for repo, e := range ix.Repos(ctx, "") {
		note(repo, e)
	}
	for repo, e := range ix.Holders(ctx, identity.Sum([]byte("config")), epoch) {
		note(repo, e)
	}
	for u, e := range ix.ExpiredUploads(ctx, epoch) {
		note(u, e)
	}
	for row, e := range ix.Export(ctx) {
		note(row, e)
	}
	return answers, err
}

// TestFaultsInReads: a read that fails somewhere says so, it does not answer less.
func TestFaultsInReads(t *testing.T) {
	disk := populated(t)
	ix, _, _ := faulty(t, disk, -1, lost)
	want, err := questions(t, ix)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		ix, _, chances := faulty(t, disk, n, lost)
		got, err := questions(t, ix)
		if *chances <= n {
			equal(t, "no fault", got, want)
			break
		}
		if !errors.Is(err, memkv.ErrInjected) {
			t.Errorf("fault %d: %v", n, err)
		}
	}
}

// TestDamagedRows spoils every row in several ways: what is spoilt is never taken for an answer, and nothing panics.
func TestDamagedRows(t *testing.T) {
	disk := populated(t)
	whole := opened(t, openMemory(t, disk.Copy()))
	want, err := questions(t, whole)
	if err != nil {
		t.Fatal(err)
	}
	ways := map[string]func(v []byte) []byte{
		"flip":     func(v []byte) []byte { v[len(v)/2] ^= 4; return v },
		"shorten":  func(v []byte) []byte { return v[:len(v)-1] },
		"empty":    func(v []byte) []byte { return nil },
		"lengthen": func(v []byte) []byte { return append(v, 0) },
	}
	var keys [][]byte
	kv := openMemory(t, disk.Copy())
	err = kv.View(t.Context(), func(x index.Txn) error {
		keys = nil
		for k, v := range x.Range(nil, nil) {
			if len(v) > 0 {
				keys = append(keys, bytes.Clone(k))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for way, spoil := range ways {
		for _, k := range keys {
			kv := openMemory(t, disk.Copy())
			ix := opened(t, kv)
			err := kv.Update(t.Context(), func(x index.Txn) error {
				v, err := x.Get(k)
				if err != nil {
					return err
				}
				return x.Put(k, spoil(bytes.Clone(v)))
			})
			if err != nil {
				t.Fatal(err)
			}
			got, err := questions(t, ix)
			if err == nil {
				equal(t, fmt.Sprintf("%s %q", way, k), got, want)
			} else if !errors.Is(err, index.ErrDamaged) {
				t.Errorf("%s %q: %v", way, k, err)
			}
		}
	}
}

// TestFaultsInImport fails an import at every point at which the engine can fail: the index holds nothing then, or when
// it is opened again, and takes another import.
func TestFaultsInImport(t *testing.T) {
	ops := append(faultState(), bind("a", "says", 90, "adapter", aggregate("base")))
	ops = slices.DeleteFunc(ops, func(o index.Op) bool { return !sequenced(o) })
	whole := openMemory(t, new(memkv.Disk))
	apply(t, opened(t, whole), ops...)
	want := numberedRows(dump(t, whole))
	for kind, fault := range map[string]func(memkv.Point) memkv.Fault{"lost": lost, "persisted": persisted} {
		for n := 0; ; n++ {
			disk := new(memkv.Disk)
			opened(t, openMemory(t, disk))
			ix, kv, chances := faulty(t, disk, n, fault)
			err := ix.ImportChanges(t.Context(), t.TempDir(), each(ops))
			if *chances <= n {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			kv.Fail(nil)
			ix = opened(t, kv)
			if rows := numberedRows(dump(t, kv)); err != nil && len(rows) > 0 && !slices.Equal(rows, want) {
				t.Fatalf("%s, fault %d: %d rows: %v", kind, n, len(rows), err)
			} else if len(rows) > 0 {
				continue
			}
			if err := ix.ImportChanges(t.Context(), t.TempDir(), each(ops)); err != nil {
				t.Fatalf("%s, fault %d: again: %v", kind, n, err)
			}
			equal(t, "rows", numberedRows(dump(t, kv)), want)
		}
	}
}
