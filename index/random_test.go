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
	"pgregory.net/rapid"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
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

// checkImport imports what is held into another index, which has the same rows then, but for those that say what is gone
// and those of tags that point to nothing.
func (w *world) checkImport(r *rapid.T) {
	kv, err := new(memkv.Disk).Open(1)
	if err != nil {
		r.Fatal(err)
	}
	ix, err := index.New(context.Background(), kv)
	if err != nil {
		r.Fatal(err)
	}
	defer ix.Close()
	entries := rapid.Permutation(w.model.entries()).Draw(r, "entries")
	err = ix.Import(context.Background(), "", func(yield func(index.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	})
	if err != nil {
		r.Fatal(err)
	}
	held := map[string]bool{}
	for _, row := range numberedRows(dump(r, kv)) {
		held[row] = true
	}
	for _, row := range numberedRows(dump(r, w.kv)) {
		if !held[row] && !strings.ContainsRune("mtxy", rune(row[1])) {
			r.Errorf("import lacks the row %.200s", row)
		}
		delete(held, row)
	}
	for row := range held {
		r.Errorf("import has the row %.200s", row)
	}
	equal(r, "records of the import", manifests(all(r, ix.Export(context.Background()))), manifests(w.model.export()))
}

func manifests(rows []index.Row) []index.Row {
	return slices.DeleteFunc(rows, func(r index.Row) bool { return r.Type != "manifest" })
}

// checkAll asks every question.
func (w *world) checkAll(r *rapid.T) {
	w.checkImport(r)
	w.checkExport(r)
	w.checkNames(r)
	w.checkListings(r)
	w.checkBlobs(r)
	position, err := w.ix.Checkpoint(context.Background())
	if err != nil || position != w.model.checkpoint {
		r.Errorf("checkpoint %d (%v), want %d", position, err, w.model.checkpoint)
	}
	for _, id := range worldIDs {
		u, err := w.ix.Upload(context.Background(), id)
		if want, ok := w.model.uploads[id]; ok != (err == nil) || !ok && !errors.Is(err, index.ErrNotFound) {
			r.Errorf("upload %s: %v", id, err)
		} else {
			equal(r, "upload", u, want)
		}
	}
	equal(r, "expired uploads", all(r, w.ix.ExpiredUploads(context.Background(), w.now())), w.model.expired(w.now()))
}

func (w *world) checkNames(r *rapid.T) {
	ctx := context.Background()
	for _, repo := range worldRepos {
		refs := slices.Clone(worldTags)
		for _, d := range sums(worldTexts...) {
			refs = append(refs, d.String())
			bindings, err := w.ix.Bindings(ctx, repo, d)
			if err != nil {
				r.Fatal(err)
			}
			p, _ := w.model.manifest(repo, d)
			equal(r, "bindings of "+repo+"@"+d.String(), bindings, w.model.bindings(p))
			tags, err := w.ix.TagsOf(ctx, repo, d)
			if err != nil {
				r.Fatal(err)
			}
			equal(r, "tags of "+repo+"@"+d.String(), tags, w.model.tagsOf(repo, d))
			equal(r, "parents in "+repo+" of "+d.String(), all(r, w.ix.Parents(ctx, repo, d)), w.model.parents(repo, d))
		}
		for _, ref := range refs {
			want, ok := w.model.resolve(repo, ref)
			rec, data, err := w.ix.Manifest(ctx, repo, ref)
			same, errGet := w.ix.Get(ctx, repo, ref)
			if ok != (err == nil) || ok != (errGet == nil) || !ok && !errors.Is(err, index.ErrNotFound) {
				r.Fatalf("%s:%s: %v, %v; held %v", repo, ref, err, errGet, ok)
			}
			equal(r, ref, rec, want.Record)
			equal(r, ref, same, want.Record)
			equal(r, ref, string(data), string(want.Manifest))
			m, err := w.ix.Shards(ctx, want.Aggregate, repo, want.Digest)
			if (err == nil) != (len(want.Shards.Shards) > 0) {
				r.Errorf("shards of %s:%s: %v", repo, ref, err)
			}
			equal(r, "shards", m, want.Shards)
		}
		for _, last := range append([]string{"", "v", "w"}, worldTags...) {
			equal(r, "tags of "+repo, all(r, w.ix.Tags(ctx, repo, last)), w.model.tagsAfter(repo, last))
			equal(r, "repositories", all(r, w.ix.Repos(ctx, repo)), w.model.repos(repo))
		}
	}
	equal(r, "repositories", all(r, w.ix.Repos(ctx, "")), w.model.repos(""))
}

// next is what a caller gets who may see all but a/b: it passes by that one, and stops at a name that is none's before.
func next(repo string) (string, bool) {
	switch {
	case repo <= "a-c" || repo > "a/b":
		return repo, true
	case repo < "a/a":
		return "a/a", true
	}
	return "a/b-", true
}

func (w *world) queries() (qs []index.Query) {
	for _, q := range w.groups() {
		since := epoch.Add(time.Duration(worldSecond/2) * time.Second)
		refused := q
		refused.See = func(repo string) bool { return repo != "a/b" }
		quick := refused
		quick.Next, quick.Since = next, since
		none := refused
		none.See, none.Next = func(string) bool { return false }, func(string) (string, bool) { return "", false }
		qs = append(qs, q, refused, quick, none)
	}
	return qs
}

// groups are queries of every kind, for all to see.
func (w *world) groups() (qs []index.Query) {
	for _, repo := range append([]string{""}, worldRepos...) {
		for _, kind := range append([]api.Kind{api.KindBase}, worldKinds...) {
			for _, name := range worldNames[1:] {
				for _, base := range worldBases {
					for _, evidence := range []api.Evidence{"", api.EvidenceAsserted} {
						qs = append(qs, index.Query{Aggregate: base.Aggregate, Kind: kind, Repo: repo, Name: name, Evidence: evidence})
					}
				}
				qs = append(qs, index.Query{Unbound: true, Kind: kind, Repo: repo, Name: name})
			}
		}
		for _, l := range links() {
			qs = append(qs, index.Query{Target: l.Target, Relation: l.Relation, Repo: repo},
				index.Query{Target: l.Target, Repo: repo})
		}
		if repo == "" {
			continue
		}
		qs = append(qs, index.Query{Repo: repo})
		for _, subject := range sums(worldTexts[:2]...) {
			for _, artifactType := range worldTypes {
				qs = append(qs, index.Query{Repo: repo, Subject: subject, ArtifactType: artifactType})
			}
		}
	}
	return qs
}

func (w *world) checkListings(r *rapid.T) {
	ctx := context.Background()
	some := rapid.SliceOfN(rapid.SampledFrom(w.queries()), 200, 200).Draw(r, "queries")
	for i, q := range some {
		want := w.model.find(q)
		what := fmt.Sprintf("find %+v", q)
		equal(r, what, all(r, w.ix.Find(ctx, q)), want)
		var stepped []index.Record
		for step := 1 + i%3; ; {
			n := 0
			for rec, err := range w.ix.Find(ctx, q) {
				if err != nil {
					r.Fatal(err)
				}
				stepped = append(stepped, rec)
				if n++; n == step {
					break
				}
			}
			if n < step {
				break
			}
			q.After = index.Cursor(q, stepped[len(stepped)-1])
		}
		equal(r, what+" in steps", stepped, want)
		w.checkPages(r, q, 1+i%3, want)
	}
	everything, one := func(string) bool { return true }, func(repo string) bool { return repo == "a-b" }
	for _, see := range []func(string) bool{everything, one} {
		for _, last := range []identity.Aggregate{{}, worldBases[0].Aggregate, worldBases[1].Aggregate} {
			equal(r, "bases", all(r, w.ix.Bases(ctx, last, see, nil)), w.model.bases(last, see))
		}
	}
}

// checkPages reads a query as records and, where it is one by aggregate, as JSON, in pages of n.
func (w *world) checkPages(r *rapid.T, q index.Query, n int, want []index.Record) {
	ctx, what := context.Background(), fmt.Sprintf("pages of %+v", q)
	byBase := !q.Aggregate.IsZero() || q.Unbound
	held := !q.Aggregate.IsZero() && len(w.model.find(index.Query{Aggregate: q.Aggregate, Kind: api.KindBase, See: q.See})) > 0
	var found []index.Record
	var artifacts, asked []api.Artifact
	for _, rec := range want {
		asked = append(asked, w.model.artifact(rec, q.Unbound, held))
	}
	for q.After = ""; ; {
		records, next, err := w.ix.Records(ctx, q, n)
		if err != nil || len(records) > n || next != "" && next == q.After {
			r.Fatalf("%s: %d records, next %q (%v)", what, len(records), next, err)
		}
		found = append(found, records...)
		if byBase {
			p, err := w.ix.Listing(ctx, q, n, []byte("["))
			var page []api.Artifact
			if err := errors.Join(err, json.Unmarshal(append(p.JSON, ']'), &page)); err != nil || p.Next != next ||
				p.Rows != len(page) || p.Held != held {
				r.Fatalf("%s: listing %+v (%v), want next %q", what, p, err, next)
			}
			artifacts = append(artifacts, page...)
		}
		if q.After = next; next == "" {
			break
		}
	}
	equal(r, what, found, want)
	if byBase {
		equal(r, what+" as JSON", artifacts, asked)
	}
}

func (w *world) checkBlobs(r *rapid.T) {
	ctx := context.Background()
	referred := w.model.blobs(identity.Digest{})
	equal(r, "all blobs", all(r, w.ix.Blobs(ctx, identity.Digest{})), referred)
	of, err := w.ix.ReferredOf(ctx, worldBlobs)
	slices.SortFunc(of, identity.Digest.Compare)
	equal(r, "referred", of, referred)
	if err != nil {
		r.Error(err)
	}
	for _, d := range worldBlobs {
		var holders []string
		for _, repo := range worldRepos {
			want := w.model.visible(repo, d, w.now())
			if want {
				holders = append(holders, repo)
			}
			if got, err := w.ix.Visible(ctx, repo, d, w.now()); err != nil || got != want {
				r.Errorf("%s visible in %s: %v (%v), want %v", d, repo, got, err, want)
			}
		}
		equal(r, "referrers", all(r, w.ix.BlobReferrers(ctx, d)), w.model.referrers(d))
		equal(r, "blobs", all(r, w.ix.Blobs(ctx, d)), w.model.blobs(d))
		equal(r, "holders", all(r, w.ix.Holders(ctx, d, w.now())), holders)
		if got, err := w.ix.Uses(ctx, d, w.now()); err != nil || got != (len(holders) > 0) {
			r.Errorf("%s used: %v (%v), want %v", d, got, err, len(holders) > 0)
		}
	}
}
