package index

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
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
	Type         string               `json:"type"` // manifest or tag
	Repository   string               `json:"repository"`
	Tag          string               `json:"tag,omitempty"`
	Digest       identity.Digest      `json:"digest"`
	Seq          uint64               `json:"seq"`
	Created      time.Time            `json:"created,omitzero"`
	MediaType    string               `json:"media_type,omitempty"`
	Size         int64                `json:"size,omitempty"`
	ArtifactType string               `json:"artifact_type,omitempty"`
	Kind         api.Kind             `json:"kind,omitempty"`
	State        api.ContentState     `json:"content_state,omitempty"`
	Evidence     api.Evidence         `json:"evidence,omitempty"`
	Aggregate    identity.Aggregate   `json:"aggregate_sha256,omitzero"`
	Bases        []identity.Aggregate `json:"further_bases,omitempty"`
	ShardCount   int                  `json:"shard_count,omitempty"`
	TotalSize    uint64               `json:"total_size_bytes,omitempty"`
	Packaging    identity.Digest      `json:"packaging,omitzero"`
	Subject      identity.Digest      `json:"subject,omitzero"`
	Annotations  map[string]string    `json:"annotations,omitempty"`
	Name         string               `json:"name,omitempty"`
	Facts        json.RawMessage      `json:"facts,omitempty"`
	Links        []Link               `json:"links,omitempty"`  // in order
	Refers       []identity.Digest    `json:"refers,omitempty"` // in order of digest
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
		Aggregate: r.Aggregate, Bases: r.Bases, ShardCount: r.ShardCount, TotalSize: r.TotalSize, Packaging: r.Packaging,
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
// numbers of its repositories. Nobody may use the index meanwhile. ErrNotEmpty, which changes nothing.
func (ix *Index) Import(ctx context.Context, dir string, entries iter.Seq2[Entry, error]) error {
	return ix.fill(ctx, dir, func(im *importing) error {
		for e, err := range entries {
			var ops []Op
			if err = cmp.Or(err, ctx.Err()); err == nil {
				ops, err = e.ops()
			}
			if err = cmp.Or(err, im.add(e.Repo, ops)); err != nil {
				return err
			}
		}
		return nil
	})
}

// ImportChanges is Import of changes with numbers, as they come to Apply: in any order, and more than once. dir takes
// twice the bytes of the changes more. It refuses those that Check does.
func (ix *Index) ImportChanges(ctx context.Context, dir string, ops iter.Seq2[Op, error]) error {
	return ix.fill(ctx, dir, func(im *importing) (err error) {
		l := latest{names: extsort.Sorter{Dir: dir}, groups: extsort.Sorter{Dir: dir}}
		defer func() { err = errors.Join(err, l.names.Close(), l.groups.Close()) }()
		for o, err := range ops {
			if err = cmp.Or(err, ctx.Err()); err == nil {
				err = l.add(o)
			}
			if err != nil {
				return err
			}
		}
		return l.each(ctx, im.add)
	})
}

// ErrNotEmpty is the error of an import into an index that holds something.
var ErrNotEmpty = errors.New("the index is not empty")

// fill has gather sort in the rows of an index that holds nothing, and puts them.
func (ix *Index) fill(ctx context.Context, dir string, gather func(*importing) error) error {
	if err := ix.checkEmpty(ctx); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	err := ix.kv.Update(ctx, func(x Txn) error { return tx{x}.store(stateKey(stateReset), nil) })
	if err == nil {
		err = ix.load(ctx, dir, gather)
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
			return nil, ErrNotEmpty
		})
	})
}

// importing is what an Import knows of the entries beside their rows.
type importing struct {
	sorter extsort.Sorter
	rows   scratch           // of one manifest
	last   map[string]uint64 // the highest number of each repository
	binds  []Record          // bind statements
}

func (ix *Index) load(ctx context.Context, dir string, gather func(*importing) error) (err error) {
	im := importing{sorter: extsort.Sorter{Dir: dir}, last: map[string]uint64{}, rows: scratch{}}
	defer func() { err = errors.Join(err, im.sorter.Close()) }()
	if err := gather(&im); err != nil {
		return err
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

// add sorts in the rows of changes of one repository that no other change of it has to do with, but for bind statements.
func (im *importing) add(repo string, ops []Op) error {
	clear(im.rows)
	c := &change{tx: tx{im.rows}}
	for _, o := range ops {
		if err := o.apply(c); err != nil {
			return err
		}
		_, seq := o.(numbered).number()
		im.last[repo] = max(im.last[repo], seq)
	}
	if err := c.relist(); err != nil {
		return err
	}
	for _, o := range ops {
		p, ok := o.(PutManifest)
		if !ok || im.rows[string(manifestKey(p.Repo, p.Digest, partRecord))] == nil { // it was deleted since
			continue
		}
		if target, _, ok := p.bound(); ok {
			im.binds = append(im.binds, p.Record)
			delete(im.rows, string(p.bindingKey(target)))
		}
	}
	for k, v := range im.rows {
		if err := im.sorter.Add([]byte(k), v); err != nil {
			return err
		}
	}
	return nil
}

// latest finds the last change of each name, and brings those of a manifest and of its tags together.
type latest struct {
	names  extsort.Sorter // changes by name and number; puts and deletes of a manifest apart
	groups extsort.Sorter // the last ones by manifest, in the order in which they are applied
}

// Parts of what groups have of a manifest, in that order.
const (
	partGone   byte = iota // number
	partPut                // the put
	partPoints             // tag: number
)

func (l *latest) add(o Op) error {
	if err := Check(o); err != nil {
		return err
	}
	k := in(tableManifest)
	switch o := o.(type) {
	case PutManifest:
		return l.names.Add(k.text(o.Repo).sum(o.Digest).part(partPut).ascending(o.Seq), encodePut(o))
	case DeleteManifest:
		return l.names.Add(k.text(o.Repo).sum(o.Digest).part(partGone).ascending(o.Seq), nil)
	case PutTag:
		return l.names.Add(tagKey(o.Repo, o.Tag).text("").ascending(o.Seq), o.Digest[:])
	case DeleteTag:
		return l.names.Add(tagKey(o.Repo, o.Tag).text("").ascending(o.Seq), nil)
	}
	return fmt.Errorf("import %T: it has no number", o)
}

// each calls add with the last changes of each manifest and of the tags that point to it, and of each other tag.
func (l *latest) each(ctx context.Context, add func(repo string, ops []Op) error) error {
	if err := l.group(ctx, add); err != nil {
		return err
	}
	var at name
	var ops []Op
	err := l.groups.Each(func(k, v []byte) error {
		p := split(k)
		n := name{p.text(), p.sum()}
		if n != at {
			if err := cmp.Or(ctx.Err(), add(at.repo, ops)); err != nil {
				return err
			}
			at, ops = n, ops[:0]
		}
		switch part := p.take(1)[0]; part {
		case partGone:
			ops = append(ops, DeleteManifest{n.repo, n.digest, binary.BigEndian.Uint64(v)})
		case partPut:
			put, err := decodePut(n.repo, n.digest, v)
			if err != nil {
				return err
			}
			ops = append(ops, put)
		case partPoints:
			ops = append(ops, PutTag{n.repo, p.rest(), n.digest, binary.BigEndian.Uint64(v)})
		}
		return p.err()
	})
	return cmp.Or(err, add(at.repo, ops))
}

// group takes the last change of each name.
func (l *latest) group(ctx context.Context, add func(repo string, ops []Op) error) error {
	var key, value []byte // of the change before
	take := func() error {
		if key == nil {
			return nil
		}
		name, seq := key[:len(key)-8], key[len(key)-8:]
		p := split(name)
		repo := p.text()
		switch {
		case name[0] == tableTag && len(value) == 0:
			return add(repo, []Op{DeleteTag{repo, p.text(), binary.BigEndian.Uint64(seq)}})
		case name[0] == tableTag:
			to := in(tableManifest).text(repo).sum(identity.Digest(value)).part(partPoints).rest(p.text())
			return l.groups.Add(to, seq)
		case name[len(name)-1] == partGone:
			return l.groups.Add(name, seq)
		}
		return l.groups.Add(name, value)
	}
	err := l.names.Each(func(k, v []byte) error {
		if len(k) != len(key) || !bytes.Equal(k[:len(k)-8], key[:len(k)-8]) {
			if err := cmp.Or(ctx.Err(), take()); err != nil {
				return err
			}
		}
		key, value = append(key[:0], k...), append(value[:0], v...)
		return nil
	})
	return cmp.Or(err, take())
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
