package index_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/index/pgkv"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

// The world of the model test is small, so that names meet. Repository names try to run into one another's keys.
var (
	worldRepos  = []string{"a", "a-b", "a/b", "a/b-c", "b"}
	worldTags   = []string{"v1", "v10", "v2", "latest"}
	worldTypes  = []string{api.ArtifactTypeAdapter, api.ArtifactTypeEval, ""}
	worldKinds  = []api.Kind{"", api.KindAdapter, api.KindEval, api.KindStatement}
	worldTexts  = []string{"manifest 0", "manifest 1", "manifest 2", "manifest 3", "base 4", "base 5", "base 6"}
	worldNames  = []string{"", "", "x", "y"}
	worldBlobs  = sums("blob 0", "blob 1", "blob 2", "manifest 1")
	worldLists  = map[int][]string{2: {"manifest 0", "base 4"}, 3: {"manifest 2", "manifest 0", "manifest 2"}} // by text
	worldBases  = []identity.Manifest{shards("x.safetensors"), shards("a.safetensors", "b.safetensors")}
	worldIDs    = []string{"upload-1", "upload-2"}
	worldSecond = 40 // the clock of the test goes from 0 to this
)

func sums(texts ...string) (d []identity.Digest) {
	for _, s := range texts {
		d = append(d, identity.Sum([]byte(s)))
	}
	return d
}

func shards(names ...string) identity.Manifest {
	m := identity.Manifest{}
	for i, s := range names {
		m.Shards = append(m.Shards, identity.Shard{Filename: s, Size: uint64(i + 1), Digest: identity.Sum([]byte(s))})
		m.TotalSize += uint64(i + 1)
	}
	m.Aggregate = identity.Aggregate(identity.Sum([]byte(fmt.Sprint(names))))
	return m
}

// place is where an index lives through restarts and crashes.
type place interface {
	open() (index.KV, error)
	crash() error // go on from what is durable now, while the index is open
}

type boltPlace struct {
	dir   string
	count int
}

func (p *boltPlace) path() string { return filepath.Join(p.dir, fmt.Sprintf("index-%d.db", p.count)) }

func (p *boltPlace) open() (index.KV, error) { return boltkv.Open(p.path(), boltkv.Options{}) }

func (p *boltPlace) crash() error {
	b, err := os.ReadFile(p.path())
	if err != nil {
		return err
	}
	p.count++
	return os.WriteFile(p.path(), b, 0o600)
}

type memPlace struct{ disk *memkv.Disk }

func (p *memPlace) open() (index.KV, error) { return p.disk.Open(1) }

func (p *memPlace) crash() error {
	p.disk = p.disk.Copy()
	return nil
}

// pgPlace is a schema of a database.
type pgPlace struct {
	url   string
	count int
}

func (p *pgPlace) options() pgkv.Options {
	return pgkv.Options{Schema: fmt.Sprint("place_", p.count), Conns: 4}
}

func (p *pgPlace) open() (index.KV, error) {
	return pgkv.Open(context.Background(), p.url, p.options())
}

func (p *pgPlace) crash() error {
	ctx, was := context.Background(), p.options().Schema
	p.count++
	kv, err := p.open()
	if err != nil {
		return err
	}
	c, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return errors.Join(err, kv.Close())
	}
	_, err = c.Exec(ctx, fmt.Sprintf("insert into %s.kv select * from %s.kv", p.options().Schema, was))
	return errors.Join(err, c.Close(ctx), kv.Close())
}

// world is an index, what it must answer, and the changes on their way.
type world struct {
	place  place
	kv     index.KV
	ix     *index.Index
	model  *model
	sent   []index.Op // applied at least once
	held   []index.Op // numbered and not yet applied
	last   map[string]uint64
	second int
}

func TestModel(t *testing.T) {
	for _, c := range []struct {
		engine string
		checks string
		place  func() place
	}{
		{"memory", "150", func() place { return &memPlace{new(memkv.Disk)} }},
		{"bolt", "8", func() place { return &boltPlace{dir: t.TempDir()} }},
		{"postgres", "2", func() place { return &pgPlace{url: testpg.Shared(t).Database(t)} }},
	} {
		t.Run(c.engine, func(t *testing.T) {
			old := flag.Lookup("rapid.checks").Value.String()
			if old == "100" { // nobody asked for another number
				flag.Set("rapid.checks", c.checks)
				defer flag.Set("rapid.checks", old)
			}
			rapid.Check(t, func(r *rapid.T) {
				w := &world{place: c.place(), model: newModel(), last: map[string]uint64{}}
				w.open(r)
				defer func() { w.ix.Close() }()
				r.Repeat(w.actions())
				w.checkAll(r)
			})
		})
	}
}

func (w *world) open(r *rapid.T) {
	var err error
	if w.kv, err = w.place.open(); err != nil {
		r.Fatal(err)
	}
	if w.ix, err = index.New(context.Background(), w.kv); err != nil {
		r.Fatal(err)
	}
	w.ix.SetPage(rapid.IntRange(1, 5).Draw(r, "rows"), 1<<20, rapid.IntRange(1, 9).Draw(r, "steps"))
}

func (w *world) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"push":            func(r *rapid.T) { w.send(r, w.push(r)...) },
		"push and hold":   func(r *rapid.T) { w.held = append(w.held, w.push(r)...) },
		"change":          func(r *rapid.T) { w.send(r, w.change(r)) },
		"change and hold": func(r *rapid.T) { w.held = append(w.held, w.change(r)) },
		"unnumbered":      func(r *rapid.T) { w.send(r, w.unnumbered(r), w.unnumbered(r)) },
		"release":         w.release,
		"replay":          w.replay,
		"purge":           w.purge,
		"tick":            func(*rapid.T) { w.second++ },
		"restart":         w.restart,
		"crash":           w.crash,
		"rebuild":         w.rebuild,
		"":                w.checkExport,
	}
}

func draw[T any](r *rapid.T, from []T, label string) T { return rapid.SampledFrom(from).Draw(r, label) }

func (w *world) seq(r *rapid.T, repo string) uint64 {
	n, err := w.ix.NextSeq(context.Background(), repo)
	if err != nil {
		r.Fatal(err)
	}
	if n <= w.last[repo] {
		r.Fatalf("%s: number %d after %d", repo, n, w.last[repo])
	}
	w.last[repo] = n
	return n
}

func (w *world) time(r *rapid.T, label string) time.Time {
	return epoch.Add(time.Duration(rapid.IntRange(0, worldSecond).Draw(r, label)) * time.Second)
}

// push is a manifest with up to two tags, all of one number.
func (w *world) push(r *rapid.T) (ops []index.Op) {
	i := rapid.IntRange(0, len(worldTexts)-1).Draw(r, "text")
	p := index.PutManifest{Manifest: []byte(worldTexts[i])}
	p.Record = index.Record{
		Repo: draw(r, worldRepos, "repo"), Digest: identity.Sum(p.Manifest), MediaType: "application/json",
		Size:         int64(len(p.Manifest)),
		ArtifactType: draw(r, worldTypes, "type"), State: api.ContentNone,
		Evidence: draw(r, []api.Evidence{api.EvidenceNone, api.EvidenceDocument}, "evidence"),
		Subject:  draw(r, append(sums(worldTexts[:2]...), identity.Digest{}), "subject"), Created: w.time(r, "created"),
		Kind:      draw(r, worldKinds, "kind"),
		Aggregate: draw(r, []identity.Aggregate{worldBases[0].Aggregate, worldBases[1].Aggregate, {}}, "aggregate"),
	}
	if i >= 4 {
		p.Shards = worldBases[i%2]
		p.Kind, p.State, p.Aggregate = api.KindBase, api.ContentDirect, p.Shards.Aggregate
		p.ShardCount, p.TotalSize, p.Packaging = len(p.Shards.Shards), p.Shards.TotalSize, identity.Sum([]byte("packaging"))
		p.Annotations = map[string]string{"b": worldTexts[i], "a": ""}
	}
	w.says(r, i, &p.Record)
	p.Refers = rapid.SliceOfN(rapid.SampledFrom(worldBlobs), 0, 4).Draw(r, "refers")
	p.Lists = sums(worldLists[i]...)
	p.Seq = w.seq(r, p.Repo)
	ops = append(ops, p)
	for range rapid.IntRange(0, 2).Draw(r, "tags") {
		ops = append(ops, index.PutTag{Repo: p.Repo, Tag: draw(r, worldTags, "tag"), Digest: p.Digest, Seq: p.Seq})
	}
	return ops
}

// links are what manifests of the world link to.
func links() []index.Link {
	var all []index.Link
	for _, to := range append(sums(worldTexts[:2]...), index.AggregateTarget(worldBases[0].Aggregate),
		index.NameTarget(worldBases[0].Aggregate, "x")) {
		all = append(all, index.Link{Relation: api.RelationAdapter, Target: to},
			index.Link{Relation: api.RelationParent, Target: to})
	}
	return all
}

// says adds what an artifact says of itself. Half of the statements bind one of a few manifests, which may be anywhere or
// nowhere, and be statements too.
func (w *world) says(r *rapid.T, text int, rec *index.Record) {
	rec.Name = draw(r, worldNames, "name")
	rec.Links = rapid.SliceOfN(rapid.SampledFrom(links()), 0, 3).Draw(r, "links")
	if len(rec.Links) == 0 {
		rec.Links = nil
	}
	if base := draw(r, worldBases, "further base").Aggregate; rec.Kind != api.KindBase && !rec.Aggregate.IsZero() &&
		base != rec.Aggregate && rapid.Bool().Draw(r, "of two bases") {
		rec.Bases = []identity.Aggregate{base}
	}
	f := api.Facts{Name: rec.Name, Legacy: rapid.Bool().Draw(r, "legacy")}
	if rec.Kind == api.KindStatement {
		f.Statement = &api.StatementFacts{
			Type:   draw(r, []string{api.StatementBind, api.StatementBind, api.StatementDerived}, "statement"),
			Target: identity.Sum([]byte(draw(r, worldTexts, "target"))),
			Base:   draw(r, worldBases, "bound to").Aggregate,
		}
	}
	if text == 3 { // too much for a listing
		f.Source = strings.Repeat("long ", 1000)
		rec.Annotations = map[string]string{"c": f.Source[:2048]}
	}
	b, err := json.Marshal(f)
	if err != nil {
		r.Fatal(err)
	}
	rec.Facts = b
}

func (w *world) change(r *rapid.T) index.Op {
	repo, tag := draw(r, worldRepos, "repo"), draw(r, worldTags, "tag")
	d := identity.Sum([]byte(draw(r, worldTexts, "text")))
	switch draw(r, []string{"delete manifest", "put tag", "delete tag"}, "change") {
	case "delete manifest":
		return index.DeleteManifest{Repo: repo, Digest: d, Seq: w.seq(r, repo)}
	case "put tag":
		return index.PutTag{Repo: repo, Tag: tag, Digest: d, Seq: w.seq(r, repo)}
	}
	return index.DeleteTag{Repo: repo, Tag: tag, Seq: w.seq(r, repo)}
}

func (w *world) unnumbered(r *rapid.T) index.Op {
	repo, d, id := draw(r, worldRepos[:2], "repo"), draw(r, worldBlobs[2:], "blob"), draw(r, worldIDs, "id")
	switch draw(r, []string{"link", "unlink", "upload", "end upload", "checkpoint"}, "change") {
	case "link":
		return index.LinkBlob{Repo: repo, Digest: d, Size: 4, Until: w.time(r, "until")}
	case "unlink":
		return index.UnlinkBlob{Repo: repo, Digest: d}
	case "upload":
		return index.PutUpload{Upload: index.Upload{ID: id, Repo: repo, Caller: "somebody", Digest: d,
			Size: rapid.Int64Range(-1, 1<<40).Draw(r, "size"), Expires: w.time(r, "expires")}}
	case "end upload":
		return index.DeleteUpload{ID: id}
	}
	return index.Checkpoint{Position: rapid.Uint64Range(0, 9).Draw(r, "position")}
}

// send applies ops to the index and to the model, which must agree on whether they may be.
func (w *world) send(r *rapid.T, ops ...index.Op) {
	want := w.model.apply(ops...)
	if got := w.ix.Apply(context.Background(), ops...); !errors.Is(got, want) {
		r.Fatalf("apply %v: %v, want %v", ops, got, want)
	}
	for _, o := range ops {
		if sequenced(o) {
			w.sent = append(w.sent, o)
		}
	}
}

func sequenced(op index.Op) bool {
	switch op.(type) {
	case index.PutManifest, index.DeleteManifest, index.PutTag, index.DeleteTag:
		return true
	}
	return false
}

// release applies something that was held back.
func (w *world) release(r *rapid.T) {
	if len(w.held) == 0 {
		r.Skip("nothing is held")
	}
	i := rapid.IntRange(0, len(w.held)-1).Draw(r, "which")
	op := w.held[i]
	w.held = slices.Delete(w.held, i, i+1)
	w.send(r, op)
}

// replay applies again what was applied before.
func (w *world) replay(r *rapid.T) {
	if len(w.sent) == 0 {
		r.Skip("nothing was sent")
	}
	again := rapid.SliceOfN(rapid.SampledFrom(w.sent), 1, 5).Draw(r, "again")
	if err := errors.Join(w.model.apply(again...), w.ix.Apply(context.Background(), again...)); err != nil {
		r.Fatal(err)
	}
}

func (w *world) now() time.Time { return epoch.Add(time.Duration(w.second) * time.Second) }

func (w *world) purge(r *rapid.T) {
	got, err := w.ix.Purge(context.Background(), w.now())
	if want := w.model.purge(w.now()); err != nil || got != want {
		r.Fatalf("purged %d leases (%v), want %d", got, err, want)
	}
}

func (w *world) restart(r *rapid.T) {
	if err := w.ix.Close(); err != nil {
		r.Fatal(err)
	}
	w.open(r)
}

func (w *world) crash(r *rapid.T) {
	if err := errors.Join(w.place.crash(), w.ix.Close()); err != nil {
		r.Fatal(err)
	}
	w.open(r)
}

// rebuild drops the index and applies what was sent in another order. That gives the very same rows.
func (w *world) rebuild(r *rapid.T) {
	before := numberedRows(dump(r, w.kv))
	if err := w.ix.Reset(context.Background()); err != nil {
		r.Fatal(err)
	}
	w.model = newModel()
	for _, op := range rapid.Permutation(w.sent).Draw(r, "order") {
		if err := errors.Join(w.model.apply(op), w.ix.Apply(context.Background(), op)); err != nil {
			r.Fatal(err)
		}
	}
	equal(r, "rows", numberedRows(dump(r, w.kv)), before)
}

// numberedRows leaves out the rows of leases, uploads and counters.
func numberedRows(rows []string) []string {
	return slices.DeleteFunc(rows, func(row string) bool { return strings.ContainsRune("lewuqz", rune(row[1])) })
}

// all collects a listing and fails on an error.
func all[T any](r interface{ Fatal(...any) }, seq iter.Seq2[T, error]) (items []T) {
	for item, err := range seq {
		if err != nil {
			r.Fatal(err)
		}
		items = append(items, item)
	}
	return items
}

func equal[T any](r interface{ Errorf(string, ...any) }, what string, got, want T) {
	if reflect.DeepEqual(want, got) { // quicker than the next line by far
		return
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		r.Errorf("%s (- want, + got):\n%s", what, diff)
	}
}

func (w *world) checkExport(r *rapid.T) {
	equal(r, "export", all(r, w.ix.Export(context.Background())), w.model.export())
	if lacks, err := w.ix.Lacks(context.Background(), w.sent...); err != nil || len(lacks) > 0 {
		r.Fatalf("%v, %+v", err, lacks)
	}
}

// checkImport imports what is held, and all changes that were sent, into other indexes, which have the same rows then:
// after the changes all of them, after what is held all but those that say what is gone and those of tags that point to
// nothing.
func (w *world) checkImport(r *rapid.T) {
	entries := rapid.Permutation(w.model.entries()).Draw(r, "entries")
	got := w.imported(r, func(ix *index.Index) error {
		return ix.Import(context.Background(), "", each(entries))
	})
	w.compareRows(r, got, "mtxy")
	var numbered []index.Op
	for _, op := range w.sent {
		if sequenced(op) {
			numbered = append(numbered, op)
		}
	}
	changes := rapid.Permutation(append(numbered, numbered[:len(numbered)/3]...)).Draw(r, "changes")
	got = w.imported(r, func(ix *index.Index) error {
		return ix.ImportChanges(context.Background(), "", each(changes))
	})
	w.compareRows(r, got, "")
}

func each[T any](all []T) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for _, e := range all {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// imported returns the rows of an index that something fills, once its records have been compared.
func (w *world) imported(r *rapid.T, fill func(*index.Index) error) map[string]bool {
	kv, err := new(memkv.Disk).Open(1)
	if err != nil {
		r.Fatal(err)
	}
	ix, err := index.New(context.Background(), kv)
	if err != nil {
		r.Fatal(err)
	}
	defer ix.Close()
	if err := fill(ix); err != nil {
		r.Fatal(err)
	}
	equal(r, "records of the import", manifests(all(r, ix.Export(context.Background()))), manifests(w.model.export()))
	held := map[string]bool{}
	for _, row := range numberedRows(dump(r, kv)) {
		held[row] = true
	}
	return held
}

// compareRows compares the rows of an import, but that those of some tables may be missing there.
func (w *world) compareRows(r *rapid.T, held map[string]bool, missing string) {
	for _, row := range numberedRows(dump(r, w.kv)) {
		if !held[row] && !strings.ContainsRune(missing, rune(row[1])) {
			r.Errorf("import lacks the row %.200s", row)
		}
		delete(held, row)
	}
	for row := range held {
		r.Errorf("import has the row %.200s", row)
	}
}

func manifests(rows []index.Row) []index.Row {
	return slices.DeleteFunc(rows, func(r index.Row) bool { return r.Type != "manifest" })
}
