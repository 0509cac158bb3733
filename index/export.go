package index

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index/extsort"
)

// Row is one line of an export. Members that a tag lacks are empty.
type Row struct {
	Type         string             `json:"type"` // manifest or tag
	Repository   string             `json:"repository"`
	Tag          string             `json:"tag,omitempty"`
	Digest       identity.Digest    `json:"digest"`
	Seq          uint64             `json:"seq"`
	Created      time.Time          `json:"created,omitzero"`
	MediaType    string             `json:"media_type,omitempty"`
	Size         int64              `json:"size,omitempty"`
	ArtifactType string             `json:"artifact_type,omitempty"`
	Kind         api.Kind           `json:"kind,omitempty"`
	State        api.ContentState   `json:"content_state,omitempty"`
	Evidence     api.Evidence       `json:"evidence,omitempty"`
	Aggregate    identity.Aggregate `json:"aggregate_sha256,omitzero"`
	ShardCount   int                `json:"shard_count,omitempty"`
	TotalSize    uint64             `json:"total_size_bytes,omitempty"`
	Packaging    identity.Digest    `json:"packaging,omitzero"`
	Subject      identity.Digest    `json:"subject,omitzero"`
	Annotations  map[string]string  `json:"annotations,omitempty"`
	Name         string             `json:"name,omitempty"`
	Facts        json.RawMessage    `json:"facts,omitempty"`
	Links        []Link             `json:"links,omitempty"`  // in order
	Refers       []identity.Digest  `json:"refers,omitempty"` // in order of digest
}

// Export yields the acknowledged content: all manifests in order of repository and digest, then all tags in order of
// repository and tag. Two indexes that applied the same changes, in whatever order, yield the same rows. Leases,
// uploads, counters and the marks of deletes are left out.
func (ix *Index) Export(ctx context.Context) iter.Seq2[Row, error] {
	manifests := paged(ctx, ix, in(tableManifest), func(t tx, from []byte, p *page[Row]) error {
		return t.walk(from, after(in(tableManifest)), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			repo, d, found, err := recordKeyOf(k)
			if err == nil && found {
				var r Row
				var size int
				r, size, err = t.exportManifest(repo, d)
				p.add(r, size)
			}
			return after(in(tableManifest).text(repo).sum(d)), err
		})
	})
	tags := paged(ctx, ix, in(tableTag), func(t tx, from []byte, p *page[Row]) error {
		return t.walk(from, after(in(tableTag)), func(k, v []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			r := Row{Type: "tag", Repository: parts.text(), Tag: parts.rest()}
			b, err := unseal(k, v)
			if err != nil {
				return nil, err
			}
			to, err := decodeTag(b)
			r.Digest, r.Seq = to.digest, to.seq
			p.add(r, len(k)+len(v))
			return nil, err
		})
	})
	return func(yield func(Row, error) bool) {
		for _, rows := range []iter.Seq2[Row, error]{manifests, tags} {
			for r, err := range rows {
				if !yield(r, err) || err != nil {
					return
				}
			}
		}
	}
}

func (t tx) exportManifest(repo string, d identity.Digest) (Row, int, error) {
	r, size, err := t.listed(repo, d)
	if err != nil {
		return Row{}, 0, err
	}
	refers, err := t.refers(repo, d)
	return Row{
		Type: "manifest", Repository: r.Repo, Digest: r.Digest, Seq: r.Seq, Created: r.Created, MediaType: r.MediaType,
		Size: r.Size, ArtifactType: r.ArtifactType, Kind: r.Kind, State: r.State, Evidence: r.Evidence,
		Aggregate: r.Aggregate, ShardCount: r.ShardCount, TotalSize: r.TotalSize, Packaging: r.Packaging,
		Subject: r.Subject, Annotations: r.Annotations, Name: r.Name, Facts: r.Facts, Links: r.Links, Refers: refers,
	}, size + 32*len(refers), err
}

// Lack is a change that an index does not know, or not all of.
type Lack struct {
	Op  Op
	Why string // what is not there, or does not read back
}

// Lacks compares the index with changes that it should know. It returns those of which neither they themselves nor a
// later one of the same name is there, and those of a manifest or tag, as it stands, of which a row is missing that
// goes with it. Of a PutManifest it needs repository, digest, number, Refers and Lists. Ops without a number, and
// changes with a repository, tag or number that Apply refuses, are left out. It reads in one transaction: ask for
// some hundred at a time.
func (ix *Index) Lacks(ctx context.Context, ops ...Op) (lacking []Lack, err error) {
	err = ix.view(ctx, func(t tx) error {
		lacking = nil
		for _, o := range ops {
			n, ok := o.(numbered)
			if !ok || checkName(n.number()) != nil {
				continue
			}
			why, err := n.lacks(t)
			if errors.Is(err, ErrDamaged) {
				why, err = err.Error(), nil
			}
			if err != nil {
				return err
			}
			if why != "" {
				lacking = append(lacking, Lack{o, why})
			}
		}
		return nil
	})
	return lacking, err
}

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

// Entry is a manifest of a repository as it stands, with the tags that point to it.
type Entry struct {
	PutManifest
	Tags []PutTag
}

func (e Entry) ops() ([]Op, error) {
	ops := make([]Op, 1, 1+len(e.Tags))
	ops[0] = e.PutManifest
	for _, t := range e.Tags {
		if t.Repo != e.Repo || t.Digest != e.Digest {
			return nil, fmt.Errorf("tag %s:%s is of another manifest", t.Repo, t.Tag)
		}
		ops = append(ops, t)
	}
	return ops, Check(ops...)
}

// Packer is a Txn that can be told that its keys come in ascending order and nothing will come between them, so that it
// needs to leave no room.
type Packer interface{ Pack() }

// Load puts rows that come in ascending order of key into an engine, many in a transaction. After an error some of them
// may be there. each calls put with every row and returns its errors.
func Load(ctx context.Context, kv KV, each func(put func(key, value []byte) error) error) error {
	l := loading{ctx: ctx, kv: kv}
	if err := each(l.put); err != nil {
		return err
	}
	return l.flush()
}

const (
	loadRows  = 1 << 16
	loadBytes = 32 << 20
)

// loading is a transaction of Load on its way: keys and values in an arena, and where each ends.
type loading struct {
	ctx   context.Context
	kv    KV
	arena []byte
	ends  []int
}

func (l *loading) put(key, value []byte) error {
	l.arena = append(l.arena, key...)
	l.ends = append(l.ends, len(l.arena))
	l.arena = append(l.arena, value...)
	l.ends = append(l.ends, len(l.arena))
	if len(l.ends) < 2*loadRows && len(l.arena) < loadBytes {
		return nil
	}
	return l.flush()
}

func (l *loading) flush() error {
	err := l.kv.Update(l.ctx, func(x Txn) error {
		if p, ok := x.(Packer); ok {
			p.Pack()
		}
		at := 0
		for i := 0; i < len(l.ends); i += 2 {
			if err := x.Put(l.arena[at:l.ends[i]], l.arena[l.ends[i]:l.ends[i+1]]); err != nil {
				return err
			}
			at = l.ends[i+1]
		}
		return nil
	})
	l.arena, l.ends = l.arena[:0], l.ends[:0]
	return err
}

// Import fills an index that holds nothing. Its rows are those that Apply would make of the same entries, and are put in
// order of key, at a fraction of the cost and without room between them: dir is for temporary files of about the size
// of the index; empty: the system's folder for them. Each manifest of a repository comes once, and each tag. All is
// durable on return; after an error, or if it is interrupted and New opens it again, the index holds nothing but the
// numbers of its repositories. Nobody may use the index meanwhile.
func (ix *Index) Import(ctx context.Context, dir string, entries iter.Seq2[Entry, error]) error {
	if err := ix.checkEmpty(ctx); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	err := ix.kv.Update(ctx, func(x Txn) error { return tx{x}.store(stateKey(stateReset), nil) })
	if err == nil {
		err = ix.load(ctx, dir, entries)
	}
	if err != nil {
		return fmt.Errorf("import: %w", errors.Join(err, ix.Reset(context.WithoutCancel(ctx))))
	}
	return nil
}

func (ix *Index) checkEmpty(ctx context.Context) error {
	return ix.view(ctx, func(t tx) error {
		return t.walk([]byte{}, nil, func(k, _ []byte) ([]byte, error) {
			switch {
			case k[0] == tableSequence:
				return after([]byte{tableSequence}), nil
			case bytes.Equal(k, stateKey(stateFormat)):
				return nil, nil
			}
			return nil, errors.New("the index is not empty")
		})
	})
}

// importing is what an Import knows of the entries beside their rows.
type importing struct {
	sorter extsort.Sorter
	last   map[string]uint64 // the highest number of each repository
	binds  []Record          // bind statements
}

func (ix *Index) load(ctx context.Context, dir string, entries iter.Seq2[Entry, error]) (err error) {
	im := importing{sorter: extsort.Sorter{Dir: dir}, last: map[string]uint64{}}
	defer func() { err = errors.Join(err, im.sorter.Close()) }()
	rows := scratch{}
	for e, err := range entries {
		if err == nil {
			err = cmp.Or(ctx.Err(), im.add(rows, e))
		}
		if err != nil {
			return err
		}
	}
	var last []byte
	err = Load(ctx, ix.kv, func(put func(key, value []byte) error) error {
		return im.sorter.Each(func(k, v []byte) error {
			if bytes.Equal(k, last) {
				if k[0] == tableContent { // several repositories hold it
					return nil
				}
				return fmt.Errorf("a manifest or tag comes twice, by its row %q", k)
			}
			last = append(last[:0], k...)
			return put(k, v)
		})
	})
	if err != nil {
		return err
	}
	return ix.finish(ctx, &im)
}

// add sorts in the rows of an entry.
func (im *importing) add(rows scratch, e Entry) error {
	ops, err := e.ops()
	if err != nil {
		return err
	}
	clear(rows)
	c := &change{tx: tx{rows}}
	for _, o := range ops {
		if err := o.apply(c); err != nil {
			return err
		}
		_, seq := o.(numbered).number()
		im.last[e.Repo] = max(im.last[e.Repo], seq)
	}
	if err := c.relist(); err != nil {
		return err
	}
	if target, _, ok := e.bound(); ok {
		im.binds = append(im.binds, e.Record)
		delete(rows, string(e.bindingKey(target)))
	}
	for k, v := range rows {
		if err := im.sorter.Add([]byte(k), v); err != nil {
			return err
		}
	}
	return nil
}

// finish adds what depends on several entries, and ends the import.
func (ix *Index) finish(ctx context.Context, im *importing) error {
	repos := slices.Sorted(maps.Keys(im.last))
	for batch := range slices.Chunk(repos, ix.limits.steps) {
		err := ix.kv.Update(ctx, func(x Txn) error {
			for _, repo := range batch {
				if err := (tx{x}).raise(repo, im.last[repo]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for batch := range slices.Chunk(im.binds, ix.limits.steps) {
		err := ix.kv.Update(ctx, func(x Txn) error {
			c := &change{tx: tx{x}}
			for _, r := range batch {
				if err := c.bind(r); err != nil {
					return err
				}
			}
			return c.relist()
		})
		if err != nil {
			return err
		}
	}
	for repo, seq := range im.last {
		ix.saw(repo, seq)
	}
	return ix.kv.Update(ctx, func(x Txn) error { return x.Delete(stateKey(stateReset)) })
}

// scratch is a Txn of a few rows, which are in memory only.
type scratch map[string][]byte

// Get implements Txn.
func (s scratch) Get(k []byte) ([]byte, error) { return s[string(k)], nil }

// Put implements Txn.
func (s scratch) Put(k, v []byte) error {
	s[string(k)] = append(make([]byte, 0, len(v)), v...)
	return nil
}

// Delete implements Txn.
func (s scratch) Delete(k []byte) error {
	delete(s, string(k))
	return nil
}

// Range implements Txn.
func (s scratch) Range(from, to []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(k, v []byte) bool) {
		var keys []string
		for k := range s {
			if k >= string(from) && (to == nil || k < string(to)) {
				keys = append(keys, k)
			}
		}
		slices.Sort(keys)
		for _, k := range keys {
			if !yield([]byte(k), s[k]) {
				return
			}
		}
	}
}
