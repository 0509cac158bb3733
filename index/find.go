package index

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// resolve finds the manifest of a tag or of a digest in text form.
func (t tx) resolve(repo, ref string) (r Record, err error) {
	d, err := identity.ParseDigest(ref)
	if err != nil {
		v, err := t.tag(repo, ref)
		if err != nil {
			return r, err
		}
		d = v.digest
	}
	r, found, err := t.record(repo, d)
	if err == nil && !found {
		err = fmt.Errorf("%s:%.140s: %w", repo, ref, ErrNotFound)
	}
	return r, err
}

// Get returns the manifest that a tag of a repository, or a digest in text form, names there. ErrNotFound.
func (ix *Index) Get(ctx context.Context, repo, ref string) (r Record, err error) {
	err = ix.view(ctx, func(t tx) (err error) {
		r, err = t.resolve(repo, ref)
		return err
	})
	return r, err
}

// Manifest is Get with the manifest's exact bytes, which hash to the record's digest. ErrNotFound, ErrDamaged.
func (ix *Index) Manifest(ctx context.Context, repo, ref string) (r Record, data []byte, err error) {
	err = ix.view(ctx, func(t tx) (err error) {
		if r, err = t.resolve(repo, ref); err != nil {
			return err
		}
		b, err := t.load(contentKey(r.Digest, partBytes))
		if err == nil && b == nil {
			err = fmt.Errorf("%w: no bytes of manifest %s", ErrDamaged, r.Digest)
		}
		data = bytes.Clone(b)
		return err
	})
	if err != nil {
		return Record{}, nil, err
	}
	if identity.Sum(data) != r.Digest {
		return Record{}, nil, fmt.Errorf("%w: manifest %s has other bytes", ErrDamaged, r.Digest)
	}
	return r, data, nil
}

// Shards returns the shard manifest of a base, from the manifest d of a repository whose aggregate is a. ErrNotFound
// also when d is no base or has another aggregate.
func (ix *Index) Shards(
	ctx context.Context, a identity.Aggregate, repo string, d identity.Digest,
) (m identity.Manifest, err error) {
	err = ix.view(ctx, func(t tx) error {
		r, found, err := t.record(repo, d)
		if err != nil {
			return err
		}
		b, err := t.load(contentKey(d, partShards))
		if err != nil {
			return err
		}
		if !found || r.Aggregate != a || b == nil {
			return fmt.Errorf("shards of %s in %s@%s: %w", a, repo, d, ErrNotFound)
		}
		m, err = decodeShards(b)
		return err
	})
	return m, err
}

// Tags yields the tags of a repository that come after a given one in byte order; empty: from the start.
func (ix *Index) Tags(ctx context.Context, repo, last string) iter.Seq2[string, error] {
	prefix := in(tableTag).text(repo)
	from := prefix
	if last != "" {
		from = append(tagKey(repo, last), 0)
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[string]) error {
		return t.walk(from, after(prefix), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			p.add(string(k[len(prefix):]), len(k))
			return nil, nil
		})
	})
}

// TagsOf returns the tags of a repository that point to a manifest, in byte order.
func (ix *Index) TagsOf(ctx context.Context, repo string, d identity.Digest) (tags []string, err error) {
	err = ix.view(ctx, func(t tx) error {
		tags = t.tagsOf(repo, d)
		return nil
	})
	return tags, err
}

// Repos yields the repositories that hold a manifest and come after a given one in byte order; empty: from the start.
func (ix *Index) Repos(ctx context.Context, last string) iter.Seq2[string, error] {
	from := []byte(in(tableRepo))
	if last != "" {
		from = after(in(tableRepo).text(last))
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[string]) error {
		return t.walk(from, after(in(tableRepo)), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			repo := split(k).text()
			p.add(repo, len(repo))
			return after(in(tableRepo).text(repo)), nil
		})
	})
}

// ManifestHolders yields the repositories that hold a manifest, in byte order.
func (ix *Index) ManifestHolders(ctx context.Context, d identity.Digest) iter.Seq2[string, error] {
	prefix := contentKey(d, partHolder)
	return paged(ctx, ix, prefix, func(t tx, from []byte, p *page[string]) error {
		return t.walk(from, after(prefix), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			parts.sum()
			parts.take(1)
			p.add(parts.text(), len(k))
			return nil, parts.err()
		})
	})
}

// Parents yields the manifests of a repository, indexes, that list a manifest, in order of digest. The manifest itself
// may be absent there.
func (ix *Index) Parents(ctx context.Context, repo string, d identity.Digest) iter.Seq2[identity.Digest, error] {
	prefix := listedKey(repo, d)
	return paged(ctx, ix, prefix, func(t tx, from []byte, p *page[identity.Digest]) error {
		return t.walk(from, after(prefix), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			parts.text()
			parts.sum()
			p.add(parts.sum(), len(k))
			return nil, parts.err()
		})
	})
}

// Find yields the records of a query. Records that stay in the index while it is walked, in however many steps, come
// exactly once; those that are put or deleted meanwhile may come or not. Where few of the rows pass the query's filters
// it looks at all others in between; Records gives up after a while. ErrCursor, and an error for a Query that mixes what
// does not go together.
func (ix *Index) Find(ctx context.Context, q Query) iter.Seq2[Record, error] {
	w, from, err := newWalk(q)
	if err != nil {
		return func(yield func(Record, error) bool) { yield(Record{}, err) }
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[Record]) error {
		return t.walk(from, after(w.prefix), func(k, v []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			jump, err := w.look(t, k, v)
			if err != nil || jump != nil || !w.wants() {
				return jump, err
			}
			rec, size, err := t.recordOf(w)
			p.add(rec, size)
			return nil, err
		})
	})
}

// check refuses what does not go together.
func (q Query) check() error {
	byBase := !q.Aggregate.IsZero() || q.Unbound
	ways := 0
	for _, is := range []bool{!q.Aggregate.IsZero(), q.Unbound, !q.Target.IsZero(), !q.Subject.IsZero()} {
		if is {
			ways++
		}
	}
	switch {
	case ways > 1:
		return errors.New("find: want one of an aggregate, what is unbound, a target and a subject")
	case q.Repo == "" && (ways == 0 || !q.Subject.IsZero()):
		return errors.New("find: want an aggregate, what is unbound, a target or a repository")
	case !byBase && (q.Kind != "" || q.Name != ""):
		return errors.New("find: a kind and a name go with an aggregate or what is unbound only")
	case q.Aggregate.IsZero() && q.Evidence != "":
		return errors.New("find: an evidence goes with an aggregate only")
	case q.Target.IsZero() && q.Relation != "":
		return errors.New("find: a relation goes with a target only")
	case q.Subject.IsZero() && q.ArtifactType != "":
		return errors.New("find: an artifact type goes with a subject only")
	}
	return nil
}

// prefix checks a query and returns that of the keys to walk.
func (q Query) prefix() (key, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	group := string(q.Kind)
	var k key
	switch {
	case !q.Target.IsZero():
		k, group = in(tableLink).sum(q.Target), q.Relation
	case !q.Subject.IsZero():
		k = in(tableSubject).text(q.Repo).sum(q.Subject)
		if q.ArtifactType != "" {
			k = k.sum(typeSum(q.ArtifactType))
		}
		return k, nil
	case q.Aggregate.IsZero() && !q.Unbound:
		return in(tableRepo).text(q.Repo), nil
	case q.Name != "":
		k = in(tableName).sum(NameTarget(q.Aggregate, q.Name))
	default:
		k = in(tableAggregate).sum(q.Aggregate)
	}
	if group != "" {
		if k = k.text(group); q.Repo != "" {
			k = k.text(q.Repo)
		}
	}
	return k, nil
}

// walk is a query on its way. It is used by one goroutine.
type walk struct {
	Query
	prefix key
	see    func([]byte) bool // nil: all
	since  uint64            // inverted; rows of a greater time are older
	row    row               // the last one that look read
	listed listed            // what look found that it lists
	copied []byte            // of unseal
	shown  bool              // the last row that look read is one that the caller may know of
}

// newWalk checks a query, and returns where it starts.
func newWalk(q Query) (w *walk, from []byte, err error) {
	w = &walk{Query: q, see: onceEach(q.See), since: ^uint64(0)}
	if w.prefix, err = q.prefix(); err != nil {
		return nil, nil, err
	}
	if !q.Since.IsZero() {
		if err := checkTime("since", q.Since); err != nil {
			return nil, nil, fmt.Errorf("find: %w", err)
		}
		w.since = ^ordered(q.Since)
	}
	if from = w.prefix; q.After != "" {
		from, err = q.start()
	}
	return w, from, err
}

// look reads a row into w.row, and what it lists into w.listed. It returns where to go on when the query does not want
// the row and others like it.
func (w *walk) look(t tx, k, v []byte) (jump []byte, err error) {
	if err = w.row.read(k); err != nil {
		return nil, err
	}
	if jump = w.jump(k); jump != nil {
		return jump, nil
	}
	switch k[0] {
	case tableAggregate:
		if v, err = w.unseal(k, v); err == nil {
			err = w.listed.decode(v)
		}
	case tableName:
		err = t.listedAs(w.Aggregate, &w.row, &w.listed)
	}
	return nil, err
}

// unseal is that of codec.go. Where it is not long it copies key and value, since the CRC of many bytes at once takes
// less time than those of the two.
func (w *walk) unseal(k, v []byte) ([]byte, error) {
	n := len(v) - 4
	if n < 1 || n > 4<<10 {
		return unseal(k, v)
	}
	w.copied = append(append(slices.Grow(w.copied[:0], len(k)+n), k...), v[:n]...)
	if crc32.Checksum(w.copied, castagnoli) != binary.LittleEndian.Uint32(v[n:]) || v[0] != valueVersion {
		return unseal(k, v) // which says what is wrong
	}
	return w.copied[len(k)+1:], nil
}

// wants says whether the query wants a row that look returned.
func (w *walk) wants() bool {
	return w.Evidence == "" || string(w.listed.evidence) == string(w.Evidence)
}

// jump returns where to go on when the query does not want a row; nil: it wants it.
func (w *walk) jump(k []byte) []byte {
	r := &w.row
	grouped := k[0] == tableAggregate || k[0] == tableName || k[0] == tableLink
	w.shown = false
	group := key(k[: 34+len(r.group) : 34+len(r.group)]) // of such a key: table, 32 bytes, the group and its zero
	switch {
	case grouped && w.Repo != "" && string(r.repo) < w.Repo: // several groups are walked
		return group.text(w.Repo)
	case grouped && w.Repo != "" && string(r.repo) > w.Repo:
		return after(group)
	case w.see == nil || w.see(r.repo):
	case !grouped:
		return in(0xff) // the only repository is refused: behind every table
	default:
		return w.pass(group, string(r.repo))
	}
	w.shown = true
	if r.created > w.since {
		return after(k[:len(k)-rowEnd])
	}
	return nil
}

// pass returns where to go on behind a repository that is not to be seen.
func (w *walk) pass(group key, repo string) []byte {
	if w.Next != nil {
		next, found := w.Next(repo)
		if !found {
			return after(group)
		}
		if next > repo {
			return group.text(next)
		}
	}
	return after(group.text(repo))
}

// onceEach asks see once for a run of rows of one repository; nil: all are seen.
func onceEach(see func(string) bool) func([]byte) bool {
	if see == nil {
		return nil
	}
	last, verdict := "", false
	return func(repo []byte) bool {
		if string(repo) != last {
			last = string(repo)
			verdict = see(last)
		}
		return verdict
	}
}

// listedAs loads the row by aggregate of what another listing lists.
func (t tx) listedAs(a identity.Aggregate, r *row, l *listed) error {
	k := in(tableAggregate).sum(a).text(string(r.group)).text(string(r.repo)).ascending(r.created).sum(r.digest)
	b, err := t.load(k)
	if err != nil {
		return err
	}
	if b == nil {
		return fmt.Errorf("%w: %s@%s has a name and is not listed", ErrDamaged, r.repo, r.digest)
	}
	return l.decode(b)
}

// recordOf loads the record of the row that look read last, and the size of its value.
func (t tx) recordOf(w *walk) (Record, int, error) {
	rec, size, err := t.listed(string(w.row.repo), w.row.digest)
	if !w.Target.IsZero() {
		rec.Relation = string(w.row.group)
	}
	if l := &w.listed; !l.boundBy.IsZero() {
		rec.Aggregate, rec.Evidence, rec.BoundBy = w.Aggregate, api.Evidence(l.evidence), l.boundBy
	}
	return rec, size, err
}

// listed loads the record that a row is about, and the size of its value.
func (t tx) listed(repo string, d identity.Digest) (Record, int, error) {
	b, err := t.load(manifestKey(repo, d, partRecord))
	if err != nil {
		return Record{}, 0, err
	}
	if b == nil {
		return Record{}, 0, fmt.Errorf("%w: %s@%s is listed and not there", ErrDamaged, repo, d)
	}
	rec, err := decodeRecord(repo, d, b)
	return rec, len(b), err
}

// Cursor returns the After of a query that goes on behind r, a record that q's Find yielded.
func Cursor(q Query, r Record) string {
	k := r.repoKey()
	switch {
	case !q.Target.IsZero():
		k = r.linkKey(Link{r.Relation, q.Target})
	case !q.Subject.IsZero():
		k = r.subjectKey()
	case q.Name != "":
		k = r.nameKey(q.Aggregate)
	case !q.Aggregate.IsZero() || q.Unbound:
		k = r.aggregateKey(q.Aggregate)
	}
	return base64.RawURLEncoding.EncodeToString(k)
}

// start returns the key behind the row that After stands for.
func (q Query) start() ([]byte, error) {
	k, err := base64.RawURLEncoding.DecodeString(q.After)
	prefix, _ := q.prefix()
	if err != nil || len(k) > maxKey || !bytes.HasPrefix(k, prefix) {
		return nil, fmt.Errorf("%.80q: %w", q.After, ErrCursor)
	}
	if err := new(row).read(k); err != nil {
		return nil, fmt.Errorf("%.80q: %w", q.After, ErrCursor)
	}
	return append(k, 0), nil
}

// Bases yields the base models of which see lets a manifest be seen (nil: every one), in order of aggregate and after a
// given one: for each the newest such manifest. See Query for see and next: it costs one seek for each repository that
// holds the base, or for each answer of next.
func (ix *Index) Bases(
	ctx context.Context, last identity.Aggregate, see func(string) bool, next func(string) (string, bool),
) iter.Seq2[Record, error] {
	from := after(in(tableAggregate).sum(last)) // behind what is unbound, if last is zero
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[Record]) error {
		return t.walk(from, after(in(tableAggregate)), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			a := identity.Aggregate(split(k).sum())
			of, bases := in(tableAggregate).sum(a), in(tableAggregate).sum(a).text(string(api.KindBase))
			if bytes.Compare(k, bases) < 0 {
				return bases, nil
			}
			r, found, err := t.newest(Query{Aggregate: a, Kind: api.KindBase, See: see, Next: next}, &p.steps)
			if err != nil || !found {
				return after(of), err
			}
			rec, size, err := t.listed(string(r.repo), r.digest)
			p.add(rec, size)
			return after(of), err
		})
	})
}

// newest returns the newest row that a query for one kind of an aggregate wants.
func (t tx) newest(q Query, steps *int) (best row, found bool, err error) {
	w, from, err := newWalk(q)
	if err != nil {
		return best, false, err
	}
	err = t.walk(from, after(w.prefix), func(k, _ []byte) ([]byte, error) {
		*steps++
		if err := w.row.read(k); err != nil {
			return nil, err
		}
		if jump := w.jump(k); jump != nil {
			return jump, nil
		}
		if !found || w.row.created < best.created {
			best, found = w.row, true
		}
		return after(k[:len(k)-rowEnd]), nil // the others of the repository are older
	})
	return best, found, err
}

var errStop = errors.New("stop the walk")

// walk visits the pairs with from <= key < to. visit returns the key to go on from, nil meaning the next one, which it
// must not place behind; errStop ends the walk without an error.
func (t tx) walk(from, to []byte, visit func(k, v []byte) ([]byte, error)) error {
	var jump []byte
	var err error
	step := func(k, v []byte) bool { // made once: there may be many jumps
		jump, err = visit(k, v)
		return jump == nil && err == nil
	}
	for from != nil {
		jump = nil
		t.Range(from, to)(step)
		switch from = jump; {
		case err == errStop:
			return nil
		case err != nil:
			return err
		case from != nil && to != nil && bytes.Compare(from, to) >= 0:
			return nil
		}
	}
	return nil
}

// limits bound one page of a listing, which is read in one transaction, and what is dropped in one.
type limits struct {
	rows  int // items
	bytes int // of their values
	steps int // keys visited
}

// page collects the items of one transaction.
type page[T any] struct {
	limits limits
	items  []T
	bytes  int
	steps  int
	next   []byte // where the next page starts; nil: there is none
}

func (p *page[T]) add(item T, size int) {
	p.items = append(p.items, item)
	p.bytes += size
}

// step counts a visited key; when the page is full it makes k the start of the next one and returns errStop.
func (p *page[T]) step(k []byte) error {
	if len(p.items) >= p.limits.rows || p.bytes >= p.limits.bytes || p.steps >= p.limits.steps {
		p.next = bytes.Clone(k)
		return errStop
	}
	p.steps++
	return nil
}

// paged yields the items that read collects, page after page. No transaction is open while the caller has an item.
func paged[T any](
	ctx context.Context, ix *Index, from []byte, read func(t tx, from []byte, p *page[T]) error,
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for at := from; at != nil; {
			var p page[T]
			err := ix.view(ctx, func(t tx) error {
				p = page[T]{limits: ix.limits}
				return read(t, at, &p)
			})
			if err != nil {
				yield(*new(T), err)
				return
			}
			for _, item := range p.items {
				if !yield(item, nil) {
					return
				}
			}
			at = p.next
		}
	}
}
