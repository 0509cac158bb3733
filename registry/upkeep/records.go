package upkeep

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// Names says what the manifest of a ref names: the blobs that it refers to, and the manifests that it lists.
type Names func(blobstore.Ref) (refers, lists []identity.Digest, err error)

// put returns the op that puts the manifest of a ref, as far as Lacks asks for it.
func (n Names) put(ref blobstore.Ref) (op index.PutManifest, err error) {
	op.Repo, op.Digest, op.Seq = ref.Repo, ref.Digest, ref.Seq
	op.Refers, op.Lists, err = n(ref)
	return op, err
}

// isManifest says whether a ref is a change of a manifest, and not of a tag.
func isManifest(ref blobstore.Ref) bool { return ref.Name == ref.Digest.String() }

// sift finds what the index knows no use of, some at a time, and tells apart what the refs of the store refer to. see
// is told of every blob.
func (r *collecting) sift(
	ctx context.Context, see func(blobstore.Info, use), take func(unused, claimed []blobstore.Info) error,
) error {
	round := cmp.Or(r.c.round, maxRound)
	for last, more := (identity.Digest{}), true; more; {
		var some []blobstore.Info
		more = false
		for i, err := range r.c.Store.List(ctx, last) {
			if err != nil {
				return err
			}
			if len(some) == round {
				more = true
				break
			}
			u, err := r.use(ctx, i)
			if err != nil {
				return err
			}
			if see(i, u); u == unused {
				some = append(some, i)
			}
			last = i.Digest
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		free, claimed, err := r.claimed(ctx, some)
		if err == nil {
			err = take(free, claimed)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// claimed tells apart which of some blobs the refs of the store refer to. ErrLacking if the index should have known.
func (r *collecting) claimed(ctx context.Context, some []blobstore.Info) (free, claimed []blobstore.Info, err error) {
	if len(some) == 0 {
		return nil, nil, nil
	}
	c := claims{c: r.c, of: make(map[identity.Digest]bool, len(some)), live: map[claim]uint64{}}
	for _, i := range some {
		c.of[i.Digest] = false
	}
	if err := c.find(ctx); err != nil {
		return nil, nil, err
	}
	for _, i := range some {
		if c.of[i.Digest] {
			claimed = append(claimed, i)
		} else {
			free = append(free, i)
		}
	}
	return free, claimed, nil
}

// claims are what the refs of a store refer to, of some blobs of which the index knows no use.
type claims struct {
	c    *Collector
	of   map[identity.Digest]bool // the blobs; true: a manifest refers to it
	live map[claim]uint64         // manifests that name one in their text, and the number of the last put
}

// claim stands for a manifest of a repository.
type claim [16]byte

func claimOf(ref blobstore.Ref) claim {
	h := sha256.New()
	h.Write(ref.Digest[:])
	h.Write([]byte(ref.Repo))
	return claim(h.Sum(nil))
}

// find reads the refs once where no manifest names one of the blobs, and else again, to see which one that is.
func (c *claims) find(ctx context.Context) error {
	if err := c.each(ctx, c.note); err != nil || len(c.live) == 0 {
		return err
	}
	if err := c.each(ctx, c.drop); err != nil || len(c.live) == 0 { // deletes that stand before the put
		return err
	}
	return c.each(ctx, func(ref blobstore.Ref) error { return c.judge(ctx, ref) })
}

// each calls see with all changes of manifests.
func (c *claims) each(ctx context.Context, see func(blobstore.Ref) error) error {
	for ref, err := range c.c.Refs.Since(ctx, 0) {
		if err == nil && isManifest(ref.Ref) {
			err = see(ref.Ref)
		}
		if err != nil {
			return fmt.Errorf("compare with the store's records: %w", err)
		}
	}
	return ctx.Err()
}

func (c *claims) note(ref blobstore.Ref) error {
	if ref.Deleted {
		return c.drop(ref)
	}
	if c.names(ref.Manifest) {
		of := claimOf(ref)
		c.live[of] = max(c.live[of], ref.Seq)
	}
	return nil
}

func (c *claims) drop(ref blobstore.Ref) error {
	if !ref.Deleted || len(c.live) == 0 {
		return nil
	}
	of := claimOf(ref)
	if put, ok := c.live[of]; ok && put <= ref.Seq {
		delete(c.live, of)
	}
	return nil
}

const (
	sumPrefix = "sha256:"
	sumLength = len(sumPrefix) + 2*sha256.Size
)

// names says whether one of the blobs is named anywhere in a manifest.
func (c *claims) names(manifest []byte) bool {
	if c.namedIn(manifest) {
		return true
	}
	if !bytes.Contains(manifest, []byte(`\u`)) {
		return false
	}
	for dec := json.NewDecoder(bytes.NewReader(manifest)); ; { // a digest may be written with escapes
		token, err := dec.Token()
		if err != nil {
			return false
		}
		if text, ok := token.(string); ok && c.namedIn([]byte(text)) {
			return true
		}
	}
}

func (c *claims) namedIn(text []byte) bool {
	for {
		at := bytes.Index(text, []byte(sumPrefix))
		if at < 0 || len(text)-at < sumLength {
			return false
		}
		text = text[at:]
		d, err := identity.ParseDigest(string(text[:sumLength]))
		if _, asked := c.of[d]; err == nil && asked {
			return true
		}
		text = text[len(sumPrefix):]
	}
}

// judge finds out whether a manifest that names one of the blobs refers to it, and whether the index has lost that. One
// that came while the refs were read, or was deleted since, is no loss.
func (c *claims) judge(ctx context.Context, ref blobstore.Ref) error {
	if ref.Deleted || len(ref.Manifest) == 0 || c.live[claimOf(ref)] != ref.Seq {
		return nil
	}
	put, err := c.c.Names.put(ref)
	if err != nil {
		return err
	}
	var blob identity.Digest
	for _, d := range put.Refers {
		if _, asked := c.of[d]; asked {
			c.of[d], blob = true, d
		}
	}
	if blob.IsZero() {
		return nil
	}
	release, ok := c.c.Locks.take(blob)
	if !ok { // whoever puts a manifest that refers to it has it until the index knows that
		return nil
	}
	defer release()
	leave, err := c.c.Enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	lacks, err := c.c.Index.Lacks(ctx, put)
	if err != nil || len(lacks) == 0 {
		return err
	}
	c.c.Log.Error("the index is damaged, nothing is collected: kiln-registry reindex makes it anew",
		"repository", ref.Repo, "manifest", ref.Digest.String(), "blob", blob.String(), "lacks", lacks[0].Why)
	why := fmt.Sprintf("%s: %s of %s, which refers to blob %s", lacks[0].Why, ref.Digest, ref.Repo, blob)
	noteLacking(ctx, c.c.Index, c.c.Log, c.c.Now(), why)
	return fmt.Errorf("%w: it lacks %s", ErrLacking, why)
}

// lackingNote keeps in the index what it was found to lack, until it is made anew.
const lackingNote = "lacking"

// Lacked is what an index was found to lack of what the store has on record.
type Lacked struct {
	Why   string    `json:"why"`
	Since time.Time `json:"since"`
}

// Lacking returns what an index was found to lack since it was made; nil: nothing.
func Lacking(ctx context.Context, ix *index.Index) (*Lacked, error) {
	l := new(Lacked)
	found, err := load(ctx, ix, lackingNote, l)
	if err != nil || !found {
		return nil, err
	}
	return l, nil
}

// noteLacking keeps in the index what it lacks; nothing: it was compared with all of the refs, and lacks nothing.
func noteLacking(ctx context.Context, ix *index.Index, log *slog.Logger, now time.Time, why string) {
	was, err := Lacking(ctx, ix)
	switch {
	case err == nil && why == "" && was != nil:
		err = ix.Apply(context.WithoutCancel(ctx), index.Note{Name: lackingNote})
	case err == nil && why != "":
		l := Lacked{why, now.UTC()}
		if was != nil {
			l.Since = was.Since
		}
		err = save(context.WithoutCancel(ctx), ix, lackingNote, l)
	}
	if err != nil && ctx.Err() == nil {
		log.Error("what the index lacks is not kept in mind", "error", err)
	}
}

// FromRecords is what a scrub found out by the refs of the store.
type FromRecords struct {
	// Records is what is wrong with the refs; empty: nothing, or they were not read yet.
	Records string `json:"records,omitempty"`
	// Lacking is what the index lacks of them; empty: nothing, or it was not compared yet.
	Lacking string `json:"lacking,omitempty"`
}

// Still runs do while no change is on its way from the store to the index, and the index has heard of all.
type Still func(ctx context.Context, do func() error) error

// records reads the refs of the store again, as a rebuild of the index would, and compares the index with them. The
// error says that this could not be done now.
func (s *Scrubber) records(ctx context.Context, p *pace) (found FromRecords, err error) {
	if s.Refs == nil {
		return found, nil
	}
	c := comparison{s: s}
	for ref, err := range s.Refs.Since(ctx, 0) {
		if err == nil {
			err = c.add(ctx, ref.Ref)
		}
		switch {
		case errors.Is(err, blobstore.ErrRefsDamaged):
			s.log.Error("records of manifests and tags damaged: an index could not be made anew from them", "error", err)
			return FromRecords{Records: err.Error(), Lacking: c.found()}, nil
		case err != nil:
			return found, err
		}
		if err := p.read(ctx, len(ref.Manifest)+len(ref.Finding)+len(ref.Name)); err != nil {
			return found, err
		}
	}
	if err := c.end(ctx); err != nil {
		return found, err
	}
	noteLacking(ctx, s.ix, s.log, s.now(), c.found())
	return FromRecords{Lacking: c.found()}, nil
}

const (
	comparedOps   = 512     // changes that the index is asked for at a time
	comparedBytes = 4 << 20 // of their manifests, unless one alone has more
	maxLacks      = 256     // after so many the comparison ends
	maxLackNames  = 16      // so many are logged
)

// comparison is a comparison of the index with the refs on its way.
type comparison struct {
	s       *Scrubber
	ops     []index.Op
	bytes   int
	suspect []index.Op // were not in the index, which may not have heard of them yet
	lacks   []index.Lack
}

func (c *comparison) add(ctx context.Context, ref blobstore.Ref) error {
	if c.s.Names == nil || len(c.lacks) >= maxLacks {
		return nil
	}
	op, err := c.op(ref)
	if err != nil {
		return err
	}
	c.ops, c.bytes = append(c.ops, op), c.bytes+len(ref.Manifest)
	if len(c.ops) < comparedOps && c.bytes < comparedBytes {
		return nil
	}
	return c.ask(ctx)
}

func (c *comparison) op(ref blobstore.Ref) (index.Op, error) {
	manifest := isManifest(ref)
	switch {
	case manifest && ref.Deleted:
		return index.DeleteManifest{Repo: ref.Repo, Digest: ref.Digest, Seq: ref.Seq}, nil
	case manifest:
		return c.s.Names.put(ref)
	case ref.Deleted:
		return index.DeleteTag{Repo: ref.Repo, Tag: ref.Name, Seq: ref.Seq}, nil
	}
	return index.PutTag{Repo: ref.Repo, Tag: ref.Name, Digest: ref.Digest, Seq: ref.Seq}, nil
}

func (c *comparison) ask(ctx context.Context) error {
	lacks, err := c.s.ix.Lacks(ctx, c.ops...)
	c.ops, c.bytes = c.ops[:0], 0
	if err != nil || len(lacks) == 0 {
		return err
	}
	for _, l := range lacks {
		c.suspect = append(c.suspect, l.Op)
	}
	if len(c.suspect) < maxLacks {
		return nil
	}
	return c.confirm(ctx)
}

// confirm asks again for what was not in the index.
func (c *comparison) confirm(ctx context.Context) error {
	if len(c.suspect) == 0 {
		return nil
	}
	err := c.s.Still(ctx, func() error {
		lacks, err := c.s.ix.Lacks(ctx, c.suspect...)
		c.lacks = append(c.lacks, lacks...)
		return err
	})
	c.suspect = nil
	return err
}

// end asks for the last ones, and logs what is lacking.
func (c *comparison) end(ctx context.Context) error {
	if err := cmp.Or(c.ask(ctx), c.confirm(ctx)); err != nil {
		return fmt.Errorf("compare the index with the store's records: %w", err)
	}
	for _, l := range c.lacks[:min(len(c.lacks), maxLackNames)] {
		repo, name, digest := named(l.Op)
		c.s.log.Error("the index lacks what is on record: kiln-registry reindex makes it anew", "repository", repo,
			"name", name, "digest", digest, "lacks", l.Why)
	}
	return nil
}

// found says in a line what the index lacks.
func (c *comparison) found() string {
	if len(c.lacks) == 0 {
		return ""
	}
	more, first := "", c.lacks[0]
	switch n := len(c.lacks); {
	case n >= maxLacks:
		more = fmt.Sprintf(", and at least %d other things", n-1)
	case n > 1:
		more = fmt.Sprintf(", and %d other things", n-1)
	}
	repo, name, _ := named(first.Op)
	return fmt.Sprintf("%s: %s of %s%s", first.Why, name, repo, more)
}

// named returns what an op of a comparison is about.
func named(o index.Op) (repo, name, digest string) {
	switch o := o.(type) {
	case index.PutManifest:
		return o.Repo, o.Digest.String(), o.Digest.String()
	case index.DeleteManifest:
		return o.Repo, o.Digest.String(), o.Digest.String()
	case index.PutTag:
		return o.Repo, o.Tag, o.Digest.String()
	case index.DeleteTag:
		return o.Repo, o.Tag, ""
	}
	return "", "", ""
}
