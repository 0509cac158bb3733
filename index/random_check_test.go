package index_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

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
			contradiction, err := w.ix.Contradiction(ctx, repo, d)
			if err != nil {
				r.Fatal(err)
			}
			equal(r, "contradiction of "+repo+"@"+d.String(), contradiction, w.model.contradiction(p))
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
		asked = append(asked, w.model.artifact(rec, q.Aggregate, held))
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
