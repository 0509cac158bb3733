package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/claims"
	"github.com/kiln-registry/kiln-registry/registry/classify"
	"github.com/kiln-registry/kiln-registry/registry/prune"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// Export writes what the registry has acknowledged, one JSON object a line: all manifests, then all tags. ErrUnavailable,
// perhaps after some lines, if the index does not know all of it or is made anew meanwhile.
func (r *Registry) Export(ctx context.Context, w io.Writer) error {
	resets := r.resets.Load()
	if err := r.catchUp(ctx); err != nil {
		return err
	}
	enc := json.NewEncoder(w)
	for row, err := range r.ix.Export(ctx) {
		if r.resets.Load() != resets {
			return errNotLevel
		}
		if err == nil {
			err = enc.Encode(row)
		}
		if err != nil {
			return err
		}
	}
	if r.resets.Load() != resets { // what it lacked then was not yielded
		return errNotLevel
	}
	return nil
}

// newPruner returns what drops what somebody asks to be dropped from r.
func newPruner(r *Registry) *prune.Pruner {
	return &prune.Pruner{
		Index: r.ix, Uploads: r.uploads, Now: r.now, ReadOnly: r.readOnly, Level: r.catchUp,
		Hold: func(ctx context.Context, repo string, do func() error) error {
			return r.decide(ctx, func() (release func()) { return r.holdRepo(repo) }, do)
		},
		Delete: r.deleteOld, Drop: r.drop,
	}
}

// deleteOld deletes manifests of one repository that no tag names. It is a part of decide, with holdRepo.
func (r *Registry) deleteOld(ctx context.Context, old []index.Record) error {
	return r.change(ctx, old[0].Repo, func(seq uint64) (refs []blobstore.Ref, ops []index.Op) {
		for _, rec := range old {
			refs = append(refs, blobstore.Ref{Repo: rec.Repo, Name: rec.Digest.String(), Seq: seq, Deleted: true,
				Digest: rec.Digest, MediaType: rec.MediaType, Time: r.now()})
			ops = append(ops, index.DeleteManifest{Repo: rec.Repo, Digest: rec.Digest, Seq: seq})
		}
		return refs, ops
	})
}

// Replay brings the index level with the store and makes the registry ready. It classifies again what the index lacks,
// which after a loss of the index is everything.
func (r *Registry) Replay(ctx context.Context) error {
	r.writes.Lock()
	defer r.writes.Unlock()
	return r.replay(ctx)
}

// replay is Replay for those who hold writes.
func (r *Registry) replay(ctx context.Context) error {
	from, err := r.ix.Checkpoint(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	note, err := r.ix.Note(ctx, leftOutNote)
	if err != nil {
		return err
	}
	re := replay{r: r, at: blobstore.Position(from), bases: map[string]identity.Aggregate{}, leftOut: string(note),
		late: map[member]struct{}{}}
	if err = re.run(ctx); err == nil {
		err = re.finish(ctx)
	}
	if err != nil {
		return fmt.Errorf("bring the index level with the store: %w", err)
	}
	r.leftOut.Store(&re.leftOut)
	if re.n > 0 {
		r.log.Info("index brought level with the store", "from", from, "refs", re.n, "sorted", re.keptOnly,
			"took", time.Since(began))
	}
	r.replayed.Store(int64(re.n))
	r.indexed.Store(true)
	r.state.CompareAndSwap(starting, ready)
	return nil
}

// Replayed is what the last Replay or Reindex brought into the index.
type Replayed struct {
	Refs int `json:"refs"` // changes of manifests and tags
}

// Replayed returns what the last Replay or Reindex did.
func (r *Registry) Replayed() Replayed { return Replayed{int(r.replayed.Load())} }

// Reindex makes the index anew from the store. Before it touches the index it reads all that it needs of the store: if
// that can't be read, it changes nothing and the error is an ErrIndexStays. From then on the registry serves nothing
// until it ends. Open uploads and blobs that wait for a manifest are kept. ErrUnavailable if the registry is stopping.
func (r *Registry) Reindex(ctx context.Context) error {
	if err := r.checkRefs(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrIndexStays, err)
	}
	if !r.state.CompareAndSwap(ready, starting) && r.state.Load() == stopping {
		return api.Errorf(api.CodeUnavailable, "the registry is stopping")
	}
	r.indexed.Store(false)
	r.writes.Lock()
	defer r.writes.Unlock()
	r.indexed.Store(false) // a replay may have ended while this one waited
	r.resets.Add(1)
	if _, err := r.scrubber.Lost(ctx); err != nil { // so that it has them in mind
		r.log.Error("reindex", "error", err)
	}
	if err := r.ix.Empty(ctx, leaseNote); err != nil {
		return err
	}
	if err := r.replay(ctx); err != nil {
		return err
	}
	r.scrubber.Remember(ctx)
	return nil
}

// ErrIndexStays is the error of a Reindex that has changed nothing: what it needs of the store can't be read.
var ErrIndexStays = errors.New("the index stays as it is")

// checkRefs reads what an index would be made of.
func (r *Registry) checkRefs(ctx context.Context) error {
	for ref, err := range r.refs.Since(ctx, 0) {
		if err == nil && !ref.Deleted && ref.Name == ref.Digest.String() {
			err = r.checkRef(ctx, ref.Ref)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Registry) checkRef(ctx context.Context, ref blobstore.Ref) error {
	m, err := parseTaken(ref)
	if err != nil {
		return err
	}
	if was, kept := r.keptFinding(ref, m); kept && was.Rules >= classify.Rules {
		return nil
	}
	if _, err := r.find(ctx, m); err != nil && !isLost(err) {
		return fmt.Errorf("%s %s: %w", ref.Repo, ref.Name, err)
	}
	return nil
}

// TakeOver gives an index that was made anew what no store has: the open uploads, and the blobs that wait for a
// manifest, as an earlier index of the same store knows them. What does not read back there is left out.
func (r *Registry) TakeOver(ctx context.Context, old *index.Index) error {
	var ops []index.Op
	put := func(op index.Op) error {
		if ops = append(ops, op); len(ops) < replayOps {
			return nil
		}
		err := r.ix.Apply(ctx, ops...)
		ops = ops[:0]
		return err
	}
	for l, err := range old.LinkBlobs(ctx) {
		if err = cmp.Or(err, put(l)); err != nil {
			return err
		}
	}
	for u, err := range old.ExpiredUploads(ctx, r.now().Add(2*uploadTTL)) { // none stays longer
		if err = cmp.Or(err, put(index.PutUpload{Upload: u})); err != nil {
			return err
		}
	}
	length, err := old.Note(ctx, leaseNote)
	if err != nil {
		return err
	}
	return r.ix.Apply(ctx, append(ops, index.Note{Name: leaseNote, Value: length})...)
}

// replay turns refs back into changes of the index, in batches.
type replay struct {
	r     *Registry
	ops   []index.Op
	bytes int
	bases map[string]identity.Aggregate // by repository and digest: of the batch, which the index does not know yet
	at    blobstore.Position
	n     int
	// leftOut names a ref that the index could not take, of this or an earlier start; empty: there is none.
	leftOut string
	unsaid  bool // the index does not have it yet
	// late are the bases of which the store says that artifacts came before them, and hold a position before the first.
	late map[member]struct{}
	hold blobstore.Position
	// keptOnly refuses, by errFindAgain, what the index or the blobs would be asked about.
	keptOnly bool
}

// member is a manifest of a repository.
type member struct {
	repo   string
	digest identity.Digest
}

// leftOutNote keeps leftOut in the index: what such a ref refers to must not be collected.
const leftOutNote = "left-out"

// The size of a batch.
const (
	replayOps   = 512
	replayBytes = 8 << 20
	// adoptMost and adoptBytes are the most that one change adopts: artifacts, and about so many bytes of manifests.
	adoptMost, adoptBytes = 256, 4 << 20
)

// run brings what is behind at into the index.
func (re *replay) run(ctx context.Context) error {
	sorted, err := re.sorted(ctx)
	if err != nil {
		return err
	}
	if !sorted {
		for ref, err := range re.r.refs.Since(ctx, re.at) {
			if err == nil {
				err = re.add(ctx, ref)
			}
			if err != nil {
				return err
			}
		}
	}
	return re.flush(ctx)
}

// adopt binds the artifacts that refer to a base and came before it, as if they had come after it. It is a part of
// decide, with holdTags, and inOrder of the base, without which nobody changes them; or of replay.
func (r *Registry) adopt(ctx context.Context, base index.Record) error {
	var puts []index.PutManifest
	var found []string
	size := 0
	flush := func() error {
		if len(puts) == 0 {
			return nil
		}
		err := r.change(ctx, base.Repo, func(seq uint64) (refs []blobstore.Ref, ops []index.Op) {
			for i, put := range puts {
				put.Seq = seq
				refs, ops = append(refs, refOf(put, found[i])), append(ops, put)
			}
			return refs, ops
		})
		puts, found, size = nil, nil, 0
		return err
	}
	for late, err := range claims.LateOf(ctx, r.ix, base) {
		if err != nil {
			return err
		}
		put, kept, err := keepable(base.Repo, late.Manifest, late.Body, late.Finding)
		if err != nil {
			return err
		}
		put.Created = late.Record.Created
		puts, found, size = append(puts, put), append(found, kept), size+len(put.Manifest)
		if len(puts) == adoptMost || size >= adoptBytes {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// mark tells the index how far it is level with the store.
func (r *Registry) mark(ctx context.Context) error {
	p := r.kept.begin()
	defer r.kept.end(p, true)
	return r.ix.Apply(ctx, index.Checkpoint{Position: uint64(r.kept.reach(p, 0))})
}

// finish binds what is not bound yet to the bases that artifacts came before: a process that put one ended in between.
// Where that fails, the index stays level up to the first of them only, so that the next replay tries again.
func (re *replay) finish(ctx context.Context) error {
	r := re.r
	if len(re.late) == 0 {
		r.kept.start(re.at)
		return nil
	}
	r.kept.start(re.hold)
	p := r.kept.begin()
	r.kept.reach(p, re.at)
	for base := range re.late {
		rec, err := r.ix.Get(ctx, base.repo, base.digest.String())
		if errors.Is(err, index.ErrNotFound) {
			continue
		}
		if err == nil {
			err = r.adopt(ctx, rec)
		}
		if err != nil {
			r.log.Error("not all artifacts that came before their base are bound to it: the next start tries again",
				"repository", base.repo, "base", base.digest.String(), "error", err)
			return ctx.Err()
		}
	}
	r.kept.end(p, true)
	return r.mark(ctx)
}

// errFindAgain: what was found of a manifest is not known, or by earlier rules, and found again while the index fills.
var errFindAgain = errors.New("what was found of a manifest is to be found again")

// sorted fills an index that holds nothing from a store of many refs, in order of its rows, at a fraction of the cost of
// Apply. It does nothing where that can't be.
func (re *replay) sorted(ctx context.Context) (done bool, err error) {
	if re.at > 0 {
		return false, nil
	}
	n := 0
	for _, err := range re.r.refs.Since(ctx, 0) {
		if n++; err != nil || n > replayOps {
			break
		}
	}
	if n <= replayOps { // an error is met again
		return false, nil
	}
	all := *re
	all.keptOnly = true
	err = re.r.ix.ImportChanges(ctx, re.r.tempDir, all.changes(ctx))
	if errors.Is(err, index.ErrNotEmpty) || errors.Is(err, errFindAgain) {
		return false, nil
	}
	all.unsaid = true // how far it is
	*re = all
	return err == nil, err
}

// changes yields all refs of the store as changes of the index.
func (re *replay) changes(ctx context.Context) iter.Seq2[index.Op, error] {
	return func(yield func(index.Op, error) bool) {
		for ref, err := range re.r.refs.Since(ctx, re.at) {
			var op index.Op
			if err == nil {
				op, err = re.take(ctx, ref)
			}
			clear(re.bases)
			if err == nil && op == nil {
				continue
			}
			if !yield(op, err) || err != nil {
				return
			}
		}
	}
}

// take turns a ref into a change; nil: it is left out.
func (re *replay) take(ctx context.Context, ref blobstore.PlacedRef) (index.Op, error) {
	op, err := re.op(ctx, ref.Ref)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", ref.Repo, ref.Name, err)
	}
	re.at = ref.After
	re.n++
	if err := index.Check(op); err != nil {
		// One record must not keep the whole store from being served.
		re.r.log.Error("ref left out of the index", "repository", ref.Repo, "name", ref.Name, "error", err)
		re.leftOut, re.unsaid = fmt.Sprintf("%.80q of %.80q", ref.Name, ref.Repo), true
		return nil, nil
	}
	return op, nil
}

func (re *replay) add(ctx context.Context, ref blobstore.PlacedRef) error {
	op, err := re.take(ctx, ref)
	if err != nil || op == nil {
		return err
	}
	re.ops, re.bytes = append(re.ops, op), re.bytes+len(ref.Manifest)
	if len(re.ops) < replayOps && re.bytes < replayBytes {
		return nil
	}
	return re.flush(ctx)
}

func (re *replay) flush(ctx context.Context) error {
	if len(re.ops) == 0 && !re.unsaid {
		return nil
	}
	level := re.at
	if len(re.late) > 0 {
		level = re.hold
	}
	err := re.r.ix.Apply(ctx, append(re.ops, index.Checkpoint{Position: uint64(level)},
		index.Note{Name: leftOutNote, Value: []byte(re.leftOut)})...)
	re.ops, re.bytes, re.unsaid = re.ops[:0], 0, false
	clear(re.bases)
	return err
}

func (re *replay) op(ctx context.Context, ref blobstore.Ref) (index.Op, error) {
	isTag := ref.Name != ref.Digest.String()
	switch {
	case ref.Deleted && isTag:
		return index.DeleteTag{Repo: ref.Repo, Tag: ref.Name, Seq: ref.Seq}, nil
	case ref.Deleted:
		re.bases[ref.Repo+"\x00"+ref.Digest.String()] = identity.Aggregate{}
		return index.DeleteManifest{Repo: ref.Repo, Digest: ref.Digest, Seq: ref.Seq}, nil
	case isTag:
		return index.PutTag{Repo: ref.Repo, Tag: ref.Name, Digest: ref.Digest, Seq: ref.Seq}, nil
	}
	return re.manifest(ctx, ref)
}

// manifest recalls what is known of a manifest.
func (re *replay) manifest(ctx context.Context, ref blobstore.Ref) (index.Op, error) {
	m, err := parseTaken(ref)
	if err != nil {
		return nil, err
	}
	var put index.PutManifest
	was, kept := re.r.keptFinding(ref, m)
	if kept && was.Rules >= classify.Rules {
		put, err = recordOf(ref.Repo, m, ref.Manifest, was)
	} else if re.keptOnly {
		err = errFindAgain
	} else {
		put, err = re.r.recall(ctx, ref, m, re.baseOf)
	}
	if err != nil {
		return nil, err
	}
	if was.Late {
		if len(re.late) == 0 {
			re.hold = re.at
		}
		re.late[member{ref.Repo, put.Digest}] = struct{}{}
	}
	re.bases[ref.Repo+"\x00"+put.Digest.String()] = identity.Aggregate{}
	if put.Kind == api.KindBase {
		re.bases[ref.Repo+"\x00"+put.Digest.String()] = put.Aggregate
	}
	put.Seq, put.Created = ref.Seq, ref.Time
	return put, nil
}

func parseTaken(ref blobstore.Ref) (classify.Manifest, error) {
	m, err := classify.ParseTaken(ref.MediaType, ref.Manifest)
	if err != nil {
		err = fmt.Errorf("%w: %s of %s was taken and does not parse: %w", blobstore.ErrDamaged, ref.Digest, ref.Repo, err)
	}
	return m, err
}

// recall makes the record of a manifest that was put before: of what was found then. Where the store has kept nothing of
// that, or the rules have changed, it is found again. One that can't be classified any more, as its blobs are gone or
// the rules have become stricter, is kept all the same: it was acknowledged.
func (r *Registry) recall(
	ctx context.Context, ref blobstore.Ref, m classify.Manifest,
	baseOf claims.BaseOf,
) (index.PutManifest, error) {
	was, kept := r.keptFinding(ref, m)
	if kept && was.Rules >= classify.Rules {
		return recordOf(ref.Repo, m, ref.Manifest, was)
	}
	found, err := r.find(ctx, m)
	if err == nil {
		err = claims.Inherit(ctx, &found, ref.Repo, m.Subject, baseOf)
	}
	if err == nil && kept {
		err = found.Stay(m.Subject, was.Artifact) // its subject may be gone
	}
	lost := isLost(err)
	switch {
	case lost && kept:
		found = was
	case lost:
		r.log.Warn("manifest kept without classification", "repository", ref.Repo, "digest", ref.Digest.String(),
			"error", err)
		found = classify.Finding{Artifact: classify.Artifact{State: api.ContentIncomplete, Evidence: api.EvidenceNone}}
	case err != nil:
		return index.PutManifest{}, err
	}
	return recordOf(ref.Repo, m, ref.Manifest, found)
}

// isLost says whether a manifest can't be classified any more, as its blobs are gone or the rules have become stricter.
func isLost(err error) bool {
	return errors.Is(err, blobstore.ErrNotFound) || errors.Is(err, blobstore.ErrDamaged) ||
		errors.Is(err, classify.ErrDamaged) || errors.Is(err, api.ErrManifestInvalid)
}

// baseOf is that of the index once the batch is in it.
func (re *replay) baseOf(ctx context.Context, repo string, d identity.Digest) (identity.Aggregate, error) {
	if a, ok := re.bases[repo+"\x00"+d.String()]; ok {
		return a, nil
	}
	return claims.Held(re.r.ix)(ctx, repo, d)
}

// Admin returns the handler of the administration socket. It asks nobody who they are: whoever can open the socket may
// do everything.
//
//	GET  /export   what Export writes, with EndTrailer
//	POST /reindex  Reindex; answers when it has ended, with Replayed
//	GET  /health   Health
//	POST /retain, POST /purge  what prune.Pruner's Handler has
//
// and what upkeep.Handler has.
func (r *Registry) Admin() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("GET /export", r.answerExport)
	m.HandleFunc("POST /reindex", r.answerReindex)
	m.HandleFunc("GET /health", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(r.Health()) // it fails where the reader is gone
	})
	m.Handle("POST /retain", r.pruner.Handler())
	m.Handle("POST /purge", r.pruner.Handler())
	m.Handle("/", upkeep.Handler(r.collector, r.scrubber))
	return m
}

// EndTrailer is a trailer of an answer of the administration socket that says how it ended: EndWhole, or the status and
// the reason of a failure for which lines are missing. Without it the answer was cut off.
const (
	EndTrailer = "Kiln-End"
	EndWhole   = "whole"
)

func (r *Registry) answerExport(w http.ResponseWriter, q *http.Request) {
	if err := r.catchUp(q.Context()); err != nil {
		http.Error(w, err.Error(), r.failed("export", err))
		return
	}
	w.Header().Set("Content-Type", "application/jsonl")
	w.Header().Set("Trailer", EndTrailer)
	end := EndWhole
	if err := r.Export(q.Context(), w); err != nil {
		end = fmt.Sprint(r.failed("export", err), " ", strings.Join(strings.Fields(err.Error()), " "))
	}
	w.Header().Set(EndTrailer, end)
}

func (r *Registry) answerReindex(w http.ResponseWriter, q *http.Request) {
	if err := r.Reindex(context.WithoutCancel(q.Context())); err != nil {
		http.Error(w, err.Error(), r.failed("reindex", err))
		return
	}
	_ = json.NewEncoder(w).Encode(r.Replayed()) // it fails where the reader is gone
}

// failed logs what an administrator asked for in vain. It returns 503 for what may go well soon, 502 if the place of the
// store does not answer, 409 if the store is damaged and nothing was changed, else 500.
func (r *Registry) failed(what string, err error) (status int) {
	if errors.Is(err, api.ErrUnavailable) {
		return http.StatusServiceUnavailable
	}
	r.log.Error(what, "error", err)
	switch {
	case errors.Is(err, blobstore.ErrUnavailable):
		return http.StatusBadGateway
	case errors.Is(err, ErrIndexStays) && errors.Is(err, blobstore.ErrDamaged):
		return http.StatusConflict
	}
	return http.StatusInternalServerError
}
