package index

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Apply makes changes, all or none; they are durable on return. Changes with a sequence number may come in any order
// and more than once: of two changes of one name the one with the higher number holds, deletes included. It refuses
// ops that lack a repository, a digest or a number. ErrReferred (UnlinkBlob), ErrDamaged; after an error of the
// engine it is not known whether the changes were made, and the same Apply may be tried again.
func (ix *Index) Apply(ctx context.Context, ops ...Op) error {
	if err := Check(ops...); err != nil {
		return err
	}
	for _, o := range ops {
		if n, ok := o.(numbered); ok {
			ix.saw(n.number())
		}
	}
	return ix.kv.Update(ctx, func(x Txn) error {
		c := &change{tx: tx{x}}
		if err := c.prefetch(reads(ops)); err != nil {
			return err
		}
		for _, o := range ops {
			if n, ok := o.(numbered); ok {
				if err := c.raise(n.number()); err != nil {
					return err
				}
			}
			if err := o.apply(c); err != nil {
				return err
			}
		}
		return c.relist()
	})
}

// Check returns the error with which Apply would refuse the ops whatever the index holds: a change must pass it
// before it is kept for good.
func Check(ops ...Op) error {
	for _, o := range ops {
		if err := o.check(); err != nil {
			return fmt.Errorf("apply %T: %w", o, err)
		}
	}
	return nil
}

// numbered is an op that carries a sequence number of a repository.
type numbered interface {
	number() (repo string, seq uint64)
	lacks(t tx) (why string, err error) // part of Lacks
}

func (o PutManifest) number() (string, uint64)    { return o.Repo, o.Seq }
func (o DeleteManifest) number() (string, uint64) { return o.Repo, o.Seq }
func (o PutTag) number() (string, uint64)         { return o.Repo, o.Seq }
func (o DeleteTag) number() (string, uint64)      { return o.Repo, o.Seq }

func (o PutManifest) lacks(t tx) (why string, err error) {
	r, held, err := t.record(o.Repo, o.Digest)
	if err != nil {
		return "", err
	}
	switch {
	case held && r.Seq == o.Seq:
		return o.lacksRow(t, r)
	case held && r.Seq > o.Seq:
		return "", nil
	}
	if gone, err := t.number(manifestGoneKey(o.Repo, o.Digest)); err != nil || gone >= o.Seq {
		return "", err
	}
	return "the manifest", nil
}

// lacksRow looks for the rows that go with the record of the manifest, and reads those that have a value.
func (o PutManifest) lacksRow(t tx, r Record) (why string, err error) {
	bindings, err := t.bindings(r)
	if err != nil {
		return "", err
	}
	values, marks := []key{contentKey(r.Digest, partBytes)}, []key{contentKey(r.Digest, partHolder).text(r.Repo)}
	if len(o.Refers) > 0 {
		values = append(values, manifestKey(r.Repo, r.Digest, partRefers))
	}
	if len(o.Lists) > 0 {
		values = append(values, manifestKey(r.Repo, r.Digest, partLists))
	}
	if r.ShardCount > 0 {
		values = append(values, contentKey(r.Digest, partShards))
	}
	if target, _, ok := r.bound(); ok {
		values = append(values, r.bindingKey(target))
	}
	for k, b := range r.listings(bindings) {
		if b != nil {
			values = append(values, k)
		} else {
			marks = append(marks, k)
		}
	}
	for _, k := range values {
		if v, err := t.load(k); err != nil || v == nil {
			return fmt.Sprintf("a %q row of the manifest", k[:1]), err
		}
	}
	for _, k := range marks {
		if has, err := t.has(k); err != nil || !has {
			return fmt.Sprintf("a %q row of the manifest", k[:1]), err
		}
	}
	for _, b := range o.Refers {
		if has, err := t.has(blobKey(b, r.Repo).ascending(r.Seq).sum(r.Digest)); err != nil || !has {
			return "that the manifest refers to blob " + b.String(), err
		}
	}
	for _, c := range o.Lists {
		if has, err := t.has(listedKey(r.Repo, c).sum(r.Digest)); err != nil || !has {
			return "that the manifest lists " + c.String(), err
		}
	}
	return "", nil
}

func (o DeleteManifest) lacks(t tx) (why string, err error) {
	if gone, err := t.number(manifestGoneKey(o.Repo, o.Digest)); err != nil || gone >= o.Seq {
		return "", err
	}
	return "that the manifest was deleted", nil
}

func (o PutTag) lacks(t tx) (why string, err error) { return t.lacksTag(o.Repo, o.Tag, o.Seq) }

func (o DeleteTag) lacks(t tx) (why string, err error) { return t.lacksTag(o.Repo, o.Tag, o.Seq) }

func (t tx) lacksTag(repo, tag string, seq uint64) (why string, err error) {
	if checkTag(tag) != nil {
		return "", nil
	}
	v, err := t.tag(repo, tag)
	switch {
	case err != nil:
		return "", err
	case v.seq < seq:
		return "the last change of the tag", nil
	case v.digest.IsZero():
		return "", nil
	}
	if has, err := t.has(manifestKey(repo, v.digest, partTag).rest(tag)); err != nil || has {
		return "", err
	}
	return "that the tag is one of " + v.digest.String(), nil
}

// raise keeps the numbers to be issued above seq.
func (t tx) raise(repo string, seq uint64) error {
	n, err := t.number(sequenceKey(repo))
	if err != nil || n >= seq {
		return err
	}
	return t.store(sequenceKey(repo), encodeNumber(seq))
}

// checkText refuses what can't be a part of a key. The grammars of names are the registry's business.
func checkText(what, s string) error {
	if s == "" {
		return fmt.Errorf("no %s", what)
	}
	if len(s) > maxText {
		return fmt.Errorf("%s %.40q… is longer than %d bytes", what, s, maxText)
	}
	for i := range len(s) {
		if s[i] < ' ' {
			return fmt.Errorf("%s %q has a control character", what, s)
		}
	}
	return nil
}

func checkTime(what string, t time.Time) error {
	if n := t.UnixNano(); t.IsZero() || !time.Unix(0, n).Equal(t) {
		return fmt.Errorf("%s %v is not a time between 1678 and 2262", what, t)
	}
	return nil
}

// maxSeq is more than NextSeq ever comes to: what has more was not issued by it, and would leave it nothing to issue.
const maxSeq = 1 << 62

func checkName(repo string, seq uint64) error {
	if seq == 0 || seq > maxSeq {
		return fmt.Errorf("sequence number %d is none that was issued", seq)
	}
	return checkText("repository", repo)
}

func checkDigest(d identity.Digest) error {
	if d.IsZero() {
		return errors.New("no digest")
	}
	return nil
}

func (o PutManifest) check() error {
	if err := cmp.Or(checkName(o.Repo, o.Seq), checkDigest(o.Digest), checkTime("created", o.Created)); err != nil {
		return err
	}
	if o.Kind != "" {
		if err := checkText("kind", string(o.Kind)); err != nil {
			return err
		}
	}
	if err := o.checkSays(); err != nil {
		return err
	}
	if int64(len(o.Manifest)) != o.Size || identity.Sum(o.Manifest) != o.Digest {
		return fmt.Errorf("%s is not the digest of the %d manifest bytes", o.Digest, len(o.Manifest))
	}
	if len(o.Shards.Shards) > 0 && o.Shards.Aggregate != o.Aggregate {
		return fmt.Errorf("shards have aggregate %s, the record has %s", o.Shards.Aggregate, o.Aggregate)
	}
	if slices.Contains(o.Refers, identity.Digest{}) {
		return errors.New("refers to a zero digest")
	}
	if slices.Contains(o.Lists, identity.Digest{}) {
		return errors.New("lists a zero digest")
	}
	return nil
}

// What a record says of an artifact is bounded.
const (
	maxName  = 1 << 10  // bytes
	maxFacts = 64 << 10 // bytes
	maxLinks = 256
	maxBases = 16
)

// checkSays checks what an artifact says of itself.
func (r Record) checkSays() error {
	switch {
	case len(r.Name) > maxName:
		return fmt.Errorf("name %.40q… has more than %d bytes", r.Name, maxName)
	case len(r.Facts) > maxFacts:
		return fmt.Errorf("facts have %d bytes, more than %d", len(r.Facts), maxFacts)
	case len(r.Facts) > 0 && !json.Valid(r.Facts):
		return errors.New("facts are no JSON")
	case len(r.Links) > maxLinks:
		return fmt.Errorf("%d links, more than %d", len(r.Links), maxLinks)
	case !r.BoundBy.IsZero() || r.Relation != "":
		return errors.New("a record of a listing can't be put")
	case len(r.Bases) > maxBases:
		return fmt.Errorf("%d further bases, more than %d", len(r.Bases), maxBases)
	case len(r.Bases) > 0 && (r.Kind == api.KindBase || r.Aggregate.IsZero()):
		return errors.New("further bases go with what was made from a base")
	}
	for i, a := range r.Bases {
		if a.IsZero() || a == r.Aggregate || slices.Contains(r.Bases[:i], a) {
			return fmt.Errorf("further base %s is none, or named twice", a)
		}
	}
	for _, l := range r.Links {
		if err := cmp.Or(checkText("relation", l.Relation), checkDigest(l.Target)); err != nil {
			return fmt.Errorf("link: %w", err)
		}
	}
	return nil
}

func (o PutManifest) apply(t *change) error {
	gone, err := t.number(manifestGoneKey(o.Repo, o.Digest))
	if err != nil || o.Seq <= gone {
		return err
	}
	old, held, err := t.record(o.Repo, o.Digest)
	if err != nil || held && o.Seq <= old.Seq {
		return err
	}
	if err := t.touch(o.Repo, o.Digest); err != nil {
		return err
	}
	if held {
		if err := t.unbind(old); err != nil {
			return err
		}
	} else if err := t.list(o.Repo, o.Digest, o.Lists); err != nil {
		return err
	}
	if err := t.hold(o); err != nil { // also again: that it is a base may have been found only now
		return err
	}
	o.Links = sortedLinks(o.Links)
	if err := t.store(manifestKey(o.Repo, o.Digest, partRecord), encodeRecord(o.Record)); err != nil {
		return err
	}
	if err := t.bind(o.Record); err != nil {
		return err
	}
	return t.refer(o.Repo, o.Digest, old.Seq, o.Seq, o.Refers)
}

// hold keeps what is the same in every repository that holds the manifest.
func (t tx) hold(o PutManifest) error {
	if err := t.mark(contentKey(o.Digest, partHolder).text(o.Repo)); err != nil {
		return err
	}
	contents := contentKey(o.Digest, partBytes)
	if has, err := t.has(contents); err != nil {
		return err
	} else if !has {
		if err := t.store(contents, o.Manifest); err != nil {
			return err
		}
	}
	shards := contentKey(o.Digest, partShards)
	if has, err := t.has(shards); err != nil || has || len(o.Shards.Shards) == 0 {
		return err
	}
	return t.store(shards, encodeShards(o.Shards))
}

// release drops what hold kept when no other repository holds the manifest.
func (t tx) release(repo string, d identity.Digest) error {
	if err := t.Delete(contentKey(d, partHolder).text(repo)); err != nil {
		return err
	}
	if t.any(contentKey(d, partHolder)) {
		return nil
	}
	if err := t.Delete(contentKey(d, partBytes)); err != nil {
		return err
	}
	return t.Delete(contentKey(d, partShards))
}

// list notes which manifests an index lists.
func (t tx) list(repo string, d identity.Digest, lists []identity.Digest) error {
	if len(lists) == 0 {
		return nil
	}
	lists = sorted(lists)
	for _, child := range lists {
		if err := t.mark(listedKey(repo, child).sum(d)); err != nil {
			return err
		}
	}
	return t.store(manifestKey(repo, d, partLists), encodeSums(lists))
}

// dropList forgets what list noted.
func (t tx) dropList(repo string, d identity.Digest) error {
	b, err := t.load(manifestKey(repo, d, partLists))
	if err != nil || b == nil {
		return err
	}
	lists, err := decodeSums(b)
	if err != nil {
		return err
	}
	for _, child := range lists {
		if err := t.Delete(listedKey(repo, child).sum(d)); err != nil {
			return err
		}
	}
	return t.Delete(manifestKey(repo, d, partLists))
}

// sorted returns digests in ascending order, each once.
func sorted(ds []identity.Digest) []identity.Digest {
	ds = slices.Clone(ds)
	slices.SortFunc(ds, identity.Digest.Compare)
	return slices.Compact(ds)
}

// sortedLinks returns links in order of relation and target, each once.
func sortedLinks(links []Link) []Link {
	links = slices.Clone(links)
	slices.SortFunc(links, func(a, b Link) int {
		return cmp.Or(cmp.Compare(a.Relation, b.Relation), a.Target.Compare(b.Target))
	})
	return slices.Compact(links)
}

// refer makes refers the digests that a manifest refers to, in place of those it had. Their rows have the number of the
// manifest's last put, which was and is now.
func (t tx) refer(repo string, d identity.Digest, was, now uint64, refers []identity.Digest) error {
	old, err := t.refers(repo, d)
	if err != nil {
		return err
	}
	for _, b := range old {
		if err := t.Delete(blobKey(b, repo).ascending(was).sum(d)); err != nil {
			return err
		}
	}
	refers = sorted(refers)
	for _, b := range refers {
		if err := t.mark(blobKey(b, repo).ascending(now).sum(d)); err != nil {
			return err
		}
	}
	if len(refers) == 0 {
		return t.Delete(manifestKey(repo, d, partRefers))
	}
	return t.store(manifestKey(repo, d, partRefers), encodeSums(refers))
}

// refers returns what a manifest refers to, in order.
func (t tx) refers(repo string, d identity.Digest) ([]identity.Digest, error) {
	b, err := t.load(manifestKey(repo, d, partRefers))
	if err != nil {
		return nil, err
	}
	return decodeSums(b)
}

func (t tx) record(repo string, d identity.Digest) (r Record, found bool, err error) {
	b, err := t.load(manifestKey(repo, d, partRecord))
	if err != nil || b == nil {
		return r, false, err
	}
	r, err = decodeRecord(repo, d, b)
	return r, err == nil, err
}

func (o DeleteManifest) check() error {
	return cmp.Or(checkName(o.Repo, o.Seq), checkDigest(o.Digest))
}

// The number of a manifest's last delete is kept for good: a tag that was put before it stays gone, in whatever order
// the put of the tag, the delete and a later put of the manifest arrive.
func (o DeleteManifest) apply(t *change) error {
	gone, err := t.number(manifestGoneKey(o.Repo, o.Digest))
	if err != nil || o.Seq <= gone {
		return err
	}
	if err := t.store(manifestGoneKey(o.Repo, o.Digest), encodeNumber(o.Seq)); err != nil {
		return err
	}
	if err := t.dropTagsOf(o); err != nil {
		return err
	}
	old, held, err := t.record(o.Repo, o.Digest)
	if err != nil || !held || old.Seq > o.Seq {
		return err
	}
	if err := cmp.Or(t.touch(o.Repo, o.Digest), t.unbind(old)); err != nil {
		return err
	}
	if err := t.refer(o.Repo, o.Digest, old.Seq, 0, nil); err != nil {
		return err
	}
	if err := t.dropList(o.Repo, o.Digest); err != nil {
		return err
	}
	if err := t.Delete(manifestKey(o.Repo, o.Digest, partRecord)); err != nil {
		return err
	}
	return t.release(o.Repo, o.Digest)
}

func (t *change) dropTagsOf(o DeleteManifest) error {
	for _, tag := range t.tagsOf(o.Repo, o.Digest) {
		was, err := t.tag(o.Repo, tag)
		if err != nil {
			return err
		}
		if was.seq > o.Seq {
			continue
		}
		if err := t.dropTag(o.Repo, tag, was, was.seq); err != nil {
			return err
		}
	}
	return nil
}

// tagsOf returns the tags that point to a manifest, in byte order.
func (t tx) tagsOf(repo string, d identity.Digest) (tags []string) {
	prefix := manifestKey(repo, d, partTag)
	for k := range t.Range(prefix, after(prefix)) {
		tags = append(tags, string(bytes.TrimPrefix(k, prefix)))
	}
	return tags
}

// tag returns where a tag points to; a zero digest means nowhere. seq is the last change of the tag, or 0.
func (t tx) tag(repo, tag string) (v tagValue, err error) {
	b, err := t.load(tagKey(repo, tag))
	if err == nil && b == nil {
		v.seq, err = t.number(tagGoneKey(repo, tag))
		return v, err
	}
	if err != nil {
		return v, err
	}
	return decodeTag(b)
}

// dropTag removes a tag; what was put up to seq stays gone.
func (t *change) dropTag(repo, tag string, was tagValue, seq uint64) error {
	if !was.digest.IsZero() {
		if err := cmp.Or(t.touch(repo, was.digest), t.Delete(manifestKey(repo, was.digest, partTag).rest(tag))); err != nil {
			return err
		}
		if err := t.Delete(tagKey(repo, tag)); err != nil {
			return err
		}
	}
	return t.store(tagGoneKey(repo, tag), encodeNumber(seq))
}

func checkTag(tag string) error {
	if slices.Contains([]byte(tag), ':') {
		return fmt.Errorf("tag %q has a colon", tag)
	}
	return checkText("tag", tag)
}

func (o PutTag) check() error {
	return cmp.Or(checkName(o.Repo, o.Seq), checkTag(o.Tag), checkDigest(o.Digest))
}

func (o PutTag) apply(t *change) error {
	was, err := t.tag(o.Repo, o.Tag)
	if err != nil || o.Seq <= was.seq {
		return err
	}
	gone, err := t.number(manifestGoneKey(o.Repo, o.Digest))
	if err != nil {
		return err
	}
	if o.Seq <= gone {
		return t.dropTag(o.Repo, o.Tag, was, o.Seq)
	}
	if err := t.touch(o.Repo, o.Digest); err != nil {
		return err
	}
	if !was.digest.IsZero() {
		old := manifestKey(o.Repo, was.digest, partTag).rest(o.Tag)
		if err := cmp.Or(t.touch(o.Repo, was.digest), t.Delete(old)); err != nil {
			return err
		}
	} else if err := t.Delete(tagGoneKey(o.Repo, o.Tag)); err != nil {
		return err
	}
	if err := t.store(tagKey(o.Repo, o.Tag), tagValue{o.Digest, o.Seq}.encode()); err != nil {
		return err
	}
	return t.mark(manifestKey(o.Repo, o.Digest, partTag).rest(o.Tag))
}

func (o DeleteTag) check() error { return cmp.Or(checkName(o.Repo, o.Seq), checkTag(o.Tag)) }

func (o DeleteTag) apply(t *change) error {
	was, err := t.tag(o.Repo, o.Tag)
	if err != nil || o.Seq <= was.seq {
		return err
	}
	return t.dropTag(o.Repo, o.Tag, was, o.Seq)
}

func (o Checkpoint) check() error { return nil }

func (o Checkpoint) apply(t *change) error {
	n, err := t.number(stateKey(stateCheckpoint))
	if err != nil || o.Position <= n {
		return err
	}
	return t.store(stateKey(stateCheckpoint), encodeNumber(o.Position))
}

func (o Note) check() error { return checkText("name of a note", o.Name) }

func (o Note) apply(t *change) error {
	if len(o.Value) == 0 {
		return t.Delete(stateKey(stateNote + o.Name))
	}
	return t.store(stateKey(stateNote+o.Name), o.Value)
}
