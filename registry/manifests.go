package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/claims"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

const (
	// maxTagParams is how many tags one PUT of a manifest may move.
	maxTagParams = 64
)

// Manifest returns a manifest of a repository, by tag or digest, with its exact bytes. ErrManifestUnknown.
func (r *Registry) Manifest(
	ctx context.Context, c access.Caller, repo string, ref api.Ref,
) (index.Record, []byte, error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return index.Record{}, nil, err
	}
	rec, b, err := r.ix.Manifest(ctx, repo, ref.String())
	return rec, b, unknownManifest(err, repo, ref)
}

func unknownManifest(err error, repo string, ref api.Ref) error {
	if errors.Is(err, index.ErrNotFound) {
		return api.Errorf(api.CodeManifestUnknown, "manifest %s is unknown to repository %s", ref, repo)
	}
	return err
}

// PutManifest puts a manifest into a repository and points tags to it; a ref that is a tag is one of them. The manifest
// is classified, and its record, durable and indexed on return, is what the registry derived. Putting again what is
// there changes nothing.
//
// ErrDigestInvalid if ref is a digest and not that of the body; ErrManifestInvalid if the manifest breaks a rule or
// contradicts itself or the bytes; ErrManifestBlobUnknown and ErrSizeInvalid if a blob is not held by this repository
// or has another size; ErrDenied if an immutable tag names another manifest, or this one by another type; ErrStoreFull.
func (r *Registry) PutManifest(
	ctx context.Context, c access.Caller, repo string, ref api.Ref, tags []string, contentType string, body []byte,
) (index.Record, error) {
	if err := c.Check(access.Push, repo); err != nil {
		return index.Record{}, err
	}
	d := identity.Sum(body)
	if ref.Tag != "" {
		tags = append(slices.Clone(tags), ref.Tag)
	} else if ref.Digest != d {
		return index.Record{}, api.Errorf(api.CodeDigestInvalid, "manifest is %s, not %s", d, ref.Digest)
	}
	m, err := classify.Parse(contentType, body)
	if err != nil {
		return index.Record{}, err
	}
	if err := r.catchUp(ctx); err != nil {
		return index.Record{}, err
	}
	defer r.locks.Hold(m.Refers()...)()
	if err := r.checkBlobs(ctx, repo, m); err != nil {
		return index.Record{}, err
	}
	defer r.inOrder(repo, d, m.Subject)()
	found, err := r.findPushed(ctx, m)
	var u unreadable
	if errors.As(err, &u) {
		r.scrubber.Unreadable(ctx, u.digest, u.err)
		return index.Record{}, cantRead(api.Missing{Digest: u.digest.String()})
	} else if err != nil {
		return index.Record{}, err
	}
	rec := index.Record{}
	hold := func() (release func()) { return r.holdTags(repo, tags) }
	err = r.decide(ctx, hold, func() (err error) {
		found := found
		push := claims.Push{Caller: c, Repo: repo, Digest: d, Manifest: m}
		if err := claims.Settle(ctx, r.ix, push, &found); err != nil {
			return err
		}
		rec, err = r.keepWhole(ctx, repo, m, body, found, tags)
		return err
	})
	return rec, err
}

// keepWhole keeps a manifest, and binds the artifacts that refer to it and came before it. If that ends in between the
// next replay goes on with it: what was found of a base says whether there is anything to go on with, and until all is
// done the index is not level with the refs behind it. It is a part of decide, with holdTags and inOrder.
func (r *Registry) keepWhole(
	ctx context.Context, repo string, m classify.Manifest, body []byte, f classify.Finding, tags []string,
) (rec index.Record, err error) {
	put, err := recordOf(repo, m, body, f)
	if err != nil {
		return rec, err
	}
	for _, err := range claims.LateOf(ctx, r.ix, put.Record) {
		if err != nil {
			return rec, err
		}
		f.Late = true
		break
	}
	kept, err := f.Encode(m)
	if err != nil {
		return rec, err
	}
	if !f.Late {
		return r.keep(ctx, put, kept, tags, false)
	}
	ctx = context.WithoutCancel(ctx)
	p := r.kept.begin()
	if rec, err = r.keep(ctx, put, kept, tags, true); err != nil {
		r.kept.end(p, true)
		return rec, err
	}
	err = r.adopt(ctx, rec)
	if r.kept.end(p, err == nil); err == nil {
		err = r.mark(ctx)
	}
	return rec, err
}

// keepable makes what is kept of a manifest: its record, and the text of what was found of it.
func keepable(
	repo string, m classify.Manifest, body []byte, f classify.Finding,
) (put index.PutManifest, kept string, err error) {
	if put, err = recordOf(repo, m, body, f); err == nil {
		kept, err = f.Encode(m)
	}
	return put, kept, err
}

// refOf is the ref of a manifest with what was found of it.
func refOf(put index.PutManifest, found string) blobstore.Ref {
	return blobstore.Ref{
		Repo: put.Repo, Name: put.Digest.String(), Seq: put.Seq, Digest: put.Digest, MediaType: put.MediaType,
		Manifest: put.Manifest, Time: put.Created, Finding: found,
	}
}

// keep makes a manifest, what was found of it and its tags durable, unless all of that is there and it need not be kept
// anew. It is a part of decide, with holdTags and inOrder.
func (r *Registry) keep(
	ctx context.Context, put index.PutManifest, found string, tags []string, anew bool,
) (index.Record, error) {
	put.Created = r.now()
	old, err := r.ix.Get(ctx, put.Repo, put.Digest.String())
	if err != nil && !errors.Is(err, index.ErrNotFound) {
		return old, err
	}
	known := err == nil && old.MediaType == put.MediaType && sameFinding(old, put.Record)
	if known {
		put.Created = old.Created
	}
	if err == nil && old.MediaType != put.MediaType && r.immutable.MatchRepo(put.Repo) {
		if err := r.checkKept(ctx, put.Repo, put.Digest); err != nil {
			return old, err
		}
	}
	for _, tag := range tags {
		at, err := r.ix.Get(ctx, put.Repo, tag)
		if err != nil && !errors.Is(err, index.ErrNotFound) {
			return old, err
		}
		if err == nil && at.Digest != put.Digest && r.immutable.Match(put.Repo, tag) {
			return old, immutable(put.Repo, tag, at.Digest)
		}
		known = known && err == nil && at.Digest == put.Digest
	}
	if known && !anew && !r.kept.behind() {
		return old, nil
	}
	err = r.change(ctx, put.Repo, func(seq uint64) ([]blobstore.Ref, []index.Op) {
		put.Seq = seq
		ref := refOf(put, found)
		refs, ops := []blobstore.Ref{ref}, []index.Op{put}
		ref.Manifest, ref.Finding, ref.Time = nil, "", r.now()
		for _, tag := range tags {
			ref.Name = tag
			refs = append(refs, ref)
			ops = append(ops, index.PutTag{Repo: put.Repo, Tag: tag, Digest: put.Digest, Seq: seq})
		}
		return refs, ops
	})
	return put.Record, err
}

// stripes are locks for any number of names. Two names may share one.
type stripes [256]sync.RWMutex

func stripeOf(name string) uint32 { return crc32.ChecksumIEEE([]byte(name)) % uint32(len(stripes{})) }

// holdTags keeps two puts of one immutable tag apart, and a put from those who have the repository to themselves, until
// release is called.
func (r *Registry) holdTags(repo string, tags []string) (release func()) {
	whole := &r.repos[stripeOf(repo)]
	whole.RLock()
	var held []uint32
	for _, tag := range tags {
		if r.immutable.Match(repo, tag) {
			held = append(held, stripeOf(repo+":"+tag))
		}
	}
	slices.Sort(held)
	held = slices.Compact(held)
	for _, i := range held {
		r.tags[i].Lock()
	}
	return func() {
		for _, i := range held {
			r.tags[i].Unlock()
		}
		whole.RUnlock()
	}
}

// orders are locks for manifests, so many that two pushes seldom meet.
type orders [4096]sync.RWMutex

// inOrder keeps others from changing a manifest and its subject, which may be zero, until release is called. What is
// derived from a subject is thereby derived of the same state when the refs are read again in the order of the store.
func (r *Registry) inOrder(repo string, d, subject identity.Digest) (release func()) {
	at := func(d identity.Digest) uint32 {
		return crc32.ChecksumIEEE([]byte(repo+":"+string(d[:]))) % uint32(len(r.orders))
	}
	own, of := at(d), at(subject)
	mine, its := &r.orders[own], &r.orders[of]
	switch {
	case subject.IsZero() || own == of:
		mine.Lock()
		return mine.Unlock
	case own < of:
		mine.Lock()
		its.RLock()
	default:
		its.RLock()
		mine.Lock()
	}
	return func() {
		mine.Unlock()
		its.RUnlock()
	}
}

// holdRepo keeps everybody else from putting manifests and tags into a repository until release is called.
func (r *Registry) holdRepo(repo string) (release func()) {
	whole := &r.repos[stripeOf(repo)]
	whole.Lock()
	return whole.Unlock
}

func immutable(repo, tag string, d identity.Digest) error {
	return api.Errorf(api.CodeDenied, "tag %s of %s is immutable, and names %s", tag, repo, d).
		With(api.Immutable{Reason: api.CodeTagImmutable, Tag: tag, Digest: d.String()})
}

// checkDelete refuses to delete an immutable tag, or a manifest that one keeps: it names it, or an index that lists it.
func (r *Registry) checkDelete(ctx context.Context, repo string, ref api.Ref, d identity.Digest) error {
	if ref.Tag != "" {
		if r.immutable.Match(repo, ref.Tag) {
			return immutable(repo, ref.Tag, d)
		}
		return nil
	}
	return r.checkKept(ctx, repo, d)
}

// checkKept refuses what would change a manifest that an immutable tag names, itself or by an index that lists it.
func (r *Registry) checkKept(ctx context.Context, repo string, d identity.Digest) error {
	seen := map[identity.Digest]bool{d: true}
	for todo := []identity.Digest{d}; len(todo) > 0; todo = todo[1:] {
		at := todo[0]
		tags, err := r.ix.TagsOf(ctx, repo, at)
		if err != nil {
			return err
		}
		for _, tag := range tags {
			if r.immutable.Match(repo, tag) {
				return immutable(repo, tag, at)
			}
		}
		for parent, err := range r.ix.Parents(ctx, repo, at) {
			if err != nil {
				return err
			}
			if !seen[parent] {
				seen[parent] = true
				todo = append(todo, parent)
			}
		}
	}
	return nil
}

// sameFinding says whether a manifest was found to be the same as before. It may not be: when blobs were missing and
// have come back.
func sameFinding(a, b index.Record) bool {
	return a.Kind == b.Kind && a.State == b.State && a.Aggregate == b.Aggregate && a.Evidence == b.Evidence &&
		a.Packaging == b.Packaging && bytes.Equal(a.Facts, b.Facts)
}

// change makes a change of one repository: durable in the store first, then in the index. It is a part of decide.
func (r *Registry) change(ctx context.Context, repo string, make func(seq uint64) ([]blobstore.Ref, []index.Op)) error {
	if r.readOnly {
		return errReadOnly
	}
	ctx = context.WithoutCancel(ctx) // once the store has it, the index gets it
	seq, err := r.ix.NextSeq(ctx, repo)
	if err != nil {
		return err
	}
	refs, ops := make(seq)
	if err := index.Check(ops...); err != nil {
		return err
	}
	p := r.kept.begin()
	at, err := r.refs.Put(ctx, refs...)
	if err == nil {
		err = r.ix.Apply(ctx, append(ops, index.Checkpoint{Position: uint64(r.kept.reach(p, at))})...)
	}
	r.kept.end(p, err == nil)
	return err
}

// checkBlobs checks that the repository holds what the manifest refers to, with the sizes that it states. The children
// of an index may be absent: a sparse index is a valid one.
func (r *Registry) checkBlobs(ctx context.Context, repo string, m classify.Manifest) error {
	sizes := map[identity.Digest]int64{}
	for _, d := range m.Blobs() {
		missing := api.Missing{Digest: d.Digest.String(), Name: d.Name()}
		size, checked := sizes[d.Digest]
		if !checked {
			i, err := r.usableBlob(ctx, repo, d.Digest)
			switch {
			case errors.Is(err, blobstore.ErrQuarantined):
				return api.Errorf(api.CodeManifestBlobUnknown, "blob %s%s is damaged here and was set aside: push it again",
					d.Digest, quoted(missing.Name)).With(missing)
			case errors.Is(err, errUnusable):
				return cantRead(missing)
			case errors.Is(asAPI(err), api.ErrBlobUnknown) && err != nil:
				return api.Errorf(api.CodeManifestBlobUnknown, "blob %s%s is unknown to repository %s", d.Digest,
					quoted(missing.Name), repo).With(missing)
			case err != nil:
				return err
			}
			size, sizes[d.Digest] = i.Size, i.Size
		}
		if d.Size != size {
			return api.Errorf(api.CodeSizeInvalid, "blob %s%s has %d bytes, but its descriptor says %d", d.Digest,
				quoted(missing.Name), size, d.Size).With(missing)
		}
	}
	return nil
}

func quoted(name string) string {
	if name == "" {
		return ""
	}
	return fmt.Sprintf(" (%.80q)", name)
}

// find says what a manifest is, from the manifest and the blobs it names. With what its repository says of it, see
// claims.Settle, that is all that is found of it.
func (r *Registry) find(ctx context.Context, m classify.Manifest) (classify.Finding, error) {
	loan, err := r.memory.chores.Wait(ctx, "", parsedSize*m.TextSize())
	if err != nil {
		return classify.Finding{}, err
	}
	defer loan.Return()
	return findIn(ctx, held{r.store}, m)
}

// findPushed is find for a request to put the manifest, whose blobs were seen to be there. ErrUnavailable.
func (r *Registry) findPushed(ctx context.Context, m classify.Manifest) (classify.Finding, error) {
	loan, err := r.memory.pushes.read(ctx, m.TextSize())
	if err != nil {
		return classify.Finding{}, err
	}
	defer loan.Return()
	return findIn(ctx, r.heads.Over(held{r.store}), m)
}

func findIn(ctx context.Context, b classify.Blobs, m classify.Manifest) (classify.Finding, error) {
	a, err := classify.Classify(ctx, b, m)
	a.Claim = identity.Aggregate{} // what it comes to is in the rest
	return classify.Finding{Artifact: a, Rules: classify.Rules}, err
}

// keptFinding returns what the store has kept of what was found of a manifest.
func (r *Registry) keptFinding(ref blobstore.Ref, m classify.Manifest) (f classify.Finding, kept bool) {
	if ref.Finding == "" {
		return f, false
	}
	f, err := classify.ParseFinding(m, ref.Finding)
	if err != nil {
		r.log.Error("what was found of a manifest does not read back: it is found again", "repository", ref.Repo,
			"digest", ref.Digest.String(), "error", err)
	}
	return f, err == nil
}

// recordOf makes the record of a manifest of what was found of it.
func recordOf(repo string, m classify.Manifest, body []byte, f classify.Finding) (index.PutManifest, error) {
	put := index.PutManifest{
		Record: index.Record{
			Repo: repo, Digest: identity.Sum(body), MediaType: m.MediaType, Size: int64(len(body)),
			ArtifactType: m.ReferrerType(), Annotations: m.Annotations, Subject: m.Subject,
			Kind: f.Kind, State: f.State, Packaging: f.Packaging, Aggregate: f.Base, Bases: f.Bases(),
			Evidence:   f.Evidence,
			ShardCount: len(f.Shards.Shards), TotalSize: f.Shards.TotalSize, Name: f.Facts.Name, Links: linksOf(f),
		},
		Manifest: body, Refers: m.Refers(), Lists: m.Lists(), Shards: f.Shards,
	}
	var err error
	if f.HasFacts() {
		put.Facts, err = json.Marshal(f.Facts)
	}
	return put, err
}

// linksOf returns the links of an artifact as the index keeps them. One by name alone is among what was made from the
// same base; where that is not known it means nothing.
func linksOf(f classify.Finding) (links []index.Link) {
	for _, l := range classify.Links(f.Kind, f.Facts) {
		if !l.Digest.IsZero() {
			links = append(links, index.Link{Relation: l.Relation, Target: l.Digest})
		}
		if !l.Aggregate.IsZero() {
			links = append(links, index.Link{Relation: l.Relation, Target: index.AggregateTarget(l.Aggregate)})
		}
		if l.Name != "" && !f.Base.IsZero() {
			links = append(links, index.Link{Relation: l.Relation, Target: index.NameTarget(f.Base, l.Name)})
		}
	}
	return links
}

// DeleteManifest drops a tag, or a manifest with the tags that point to it, from a repository. ErrManifestUnknown;
// ErrDenied for an immutable tag and for what one keeps.
func (r *Registry) DeleteManifest(ctx context.Context, c access.Caller, repo string, ref api.Ref) error {
	if err := c.Check(access.Delete, repo); err != nil {
		return err
	}
	hold := func() (release func()) { return func() {} }
	if ref.Tag == "" {
		defer r.inOrder(repo, ref.Digest, identity.Digest{})()
	}
	if ref.Tag == "" || r.immutable.MatchRepo(repo) {
		hold = func() (release func()) { return r.holdRepo(repo) }
	}
	return r.decide(ctx, hold, func() error { return r.deleteNow(ctx, repo, ref) })
}

// deleteNow is a part of decide. For a manifest, and where tags may be immutable, it has holdRepo, so that no tag moves
// meanwhile, and for a manifest inOrder. Tags that are too many for one change go first: the manifest stays until none
// of them is left.
func (r *Registry) deleteNow(ctx context.Context, repo string, ref api.Ref) error {
	rec, err := r.ix.Get(ctx, repo, ref.String())
	if err != nil {
		return unknownManifest(err, repo, ref)
	}
	if r.immutable.MatchRepo(repo) {
		if err := r.checkDelete(ctx, repo, ref, rec.Digest); err != nil {
			return err
		}
	}
	tags := []string{ref.Tag}
	if ref.Tag == "" {
		if tags, err = r.ix.TagsOf(ctx, repo, rec.Digest); err != nil {
			return err
		}
	}
	for len(tags) >= blobstore.MaxRefs {
		if err := r.dropRefs(ctx, rec, false, tags[:blobstore.MaxRefs]); err != nil {
			return err
		}
		tags = tags[blobstore.MaxRefs:]
	}
	return r.dropRefs(ctx, rec, ref.Tag == "", tags)
}

// dropRefs deletes tags, and with them the manifest itself if it is to go too.
func (r *Registry) dropRefs(ctx context.Context, rec index.Record, itself bool, tags []string) error {
	return r.change(ctx, rec.Repo, func(seq uint64) (refs []blobstore.Ref, ops []index.Op) {
		gone := blobstore.Ref{
			Repo:      rec.Repo,
			Seq:       seq,
			Deleted:   true,
			Digest:    rec.Digest,
			MediaType: rec.MediaType,
			Time:      r.now(),
		}
		if itself {
			gone.Name = rec.Digest.String()
			refs = append(refs, gone)
			ops = append(ops, index.DeleteManifest{Repo: rec.Repo, Digest: rec.Digest, Seq: seq})
		}
		for _, tag := range tags {
			gone.Name = tag
			refs = append(refs, gone)
			ops = append(ops, index.DeleteTag{Repo: rec.Repo, Tag: tag, Seq: seq})
		}
		return refs, ops
	})
}

func (q *request) repoRef() (string, api.Ref, error) {
	repo, err := q.repo()
	if err != nil {
		return "", api.Ref{}, err
	}
	ref, err := api.ParseRef(q.param("ref"))
	return repo, ref, err
}

func (r *Registry) getManifest(w *response, q *request) error {
	repo, ref, err := q.repoRef()
	if err != nil {
		return err
	}
	rec, b, err := r.Manifest(q.Context(), q.caller, repo, ref)
	if err != nil {
		return err
	}
	if !rec.Subject.IsZero() {
		w.Header().Set(api.HeaderSubject, rec.Subject.String())
	}
	w.Header().Set("Content-Type", rec.MediaType)
	if w.unchanged(q, rec.Digest) {
		return nil
	}
	size, b := len(b), beginning(b)
	return r.sendManifest(w, q, rec, b, size)
}

func (r *Registry) putManifest(w *response, q *request) error {
	repo, ref, err := q.repoRef()
	if err != nil {
		return err
	}
	tags := q.URL.Query()["tag"]
	if len(tags) > maxTagParams {
		return api.Errorf(api.CodeTagInvalid, "%d tags in one request, at most %d are taken", len(tags), maxTagParams)
	}
	for _, t := range tags {
		if err := api.CheckTag(t); err != nil {
			return err
		}
	}
	body, err := q.document(api.MaxManifestBytes, q.memory.pushes)
	if err != nil {
		return err
	}
	rec, err := r.PutManifest(q.Context(), q.caller, repo, ref, tags, q.Header.Get("Content-Type"), body)
	if err != nil {
		return err
	}
	if !rec.Subject.IsZero() {
		w.Header().Set(api.HeaderSubject, rec.Subject.String())
	}
	if len(tags) > 0 {
		w.Header().Set("OCI-Tag", strings.Join(tags, ", "))
	}
	w.created(api.PathManifest(repo, rec.Digest.String()), rec.Digest)
	return nil
}

func (r *Registry) deleteManifest(w *response, q *request) error {
	repo, ref, err := q.repoRef()
	if err != nil {
		return err
	}
	if err := r.DeleteManifest(q.Context(), q.caller, repo, ref); err != nil {
		return err
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}
