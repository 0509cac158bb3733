package index

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"iter"
	"time"

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
// exactly once; those that are put or deleted meanwhile may come or not. ErrCursor, and an error for a Query that mixes
// what does not go together.
func (ix *Index) Find(ctx context.Context, q Query) iter.Seq2[Record, error] {
	prefix, err := q.prefix()
	from := []byte(prefix)
	if err == nil && q.After != "" {
		from, err = q.start()
	}
	if err != nil {
		return func(yield func(Record, error) bool) { yield(Record{}, err) }
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[Record]) error {
		see := onceEach(q.See)
		return t.walk(from, after(prefix), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			row, err := q.row(k)
			if err != nil {
				return nil, err
			}
			if jump := q.jump(row, see); jump != nil {
				return jump, nil
			}
			r, size, err := t.listed(row)
			p.add(r, size)
			return nil, err
		})
	})
}

// row is what a key of a listing says.
type row struct {
	kind, repo string
	created    uint64 // inverted
	digest     identity.Digest
}

// prefix checks a query and returns that of the keys to walk.
func (q Query) prefix() (key, error) {
	byAggregate := !q.Aggregate.IsZero()
	switch {
	case !byAggregate && q.Repo == "":
		return nil, errors.New("find: want an aggregate or a repository")
	case byAggregate && !q.Subject.IsZero():
		return nil, errors.New("find: want an aggregate or a subject, not both")
	case !byAggregate && q.Kind != "":
		return nil, errors.New("find: a kind goes with an aggregate only")
	case q.Subject.IsZero() && q.ArtifactType != "":
		return nil, errors.New("find: an artifact type goes with a subject only")
	}
	switch {
	case byAggregate && q.Kind != "" && q.Repo != "":
		return in(tableAggregate).sum(q.Aggregate).text(string(q.Kind)).text(q.Repo), nil
	case byAggregate && q.Kind != "":
		return in(tableAggregate).sum(q.Aggregate).text(string(q.Kind)), nil
	case byAggregate:
		return in(tableAggregate).sum(q.Aggregate), nil
	case q.Subject.IsZero():
		return in(tableRepo).text(q.Repo), nil
	case q.ArtifactType == "":
		return in(tableSubject).text(q.Repo).sum(q.Subject), nil
	}
	return in(tableSubject).text(q.Repo).sum(q.Subject).sum(typeSum(q.ArtifactType)), nil
}

// row reads a key of the table that the query walks.
func (q Query) row(k []byte) (r row, err error) {
	p := split(k)
	switch k[0] {
	case tableAggregate:
		p.sum()
		r.kind, r.repo = p.text(), p.text()
	case tableSubject:
		r.repo = p.text()
		p.sum()
		p.sum()
	case tableRepo:
		r.repo = p.text()
	}
	r.created, r.digest = p.time(), p.sum()
	return r, p.err()
}

// jump returns where to go on when the query does not want a row; nil: it wants it.
func (q Query) jump(r row, see func(string) bool) []byte {
	of := in(tableAggregate).sum(q.Aggregate).text(r.kind)
	switch {
	case q.Repo != "" && r.repo < q.Repo: // several kinds are walked
		return of.text(q.Repo)
	case q.Repo != "" && r.repo > q.Repo:
		return after(of)
	case see(r.repo):
		return nil
	case q.Aggregate.IsZero():
		return in(0xff) // the only repository is refused: behind every table
	}
	return after(of.text(r.repo))
}

// onceEach asks see once for a run of rows of one repository.
func onceEach(see func(string) bool) func(string) bool {
	if see == nil {
		return func(string) bool { return true }
	}
	last, verdict := "", false
	return func(repo string) bool {
		if repo != last {
			last, verdict = repo, see(repo)
		}
		return verdict
	}
}

// listed loads the record of a listing's row, and the size of its value.
func (t tx) listed(r row) (Record, int, error) {
	b, err := t.load(manifestKey(r.repo, r.digest, partRecord))
	if err != nil {
		return Record{}, 0, err
	}
	if b == nil {
		return Record{}, 0, fmt.Errorf("%w: %s@%s is listed and not there", ErrDamaged, r.repo, r.digest)
	}
	rec, err := decodeRecord(r.repo, r.digest, b)
	return rec, len(b), err
}

// Cursor returns the After of a query that goes on behind r, a record that q's Find yielded.
func Cursor(q Query, r Record) string {
	k := r.repoKey()
	if !q.Aggregate.IsZero() {
		k = r.aggregateKey()
	} else if !q.Subject.IsZero() {
		k = r.subjectKey()
	}
	return base64.RawURLEncoding.EncodeToString(k)
}

// start returns the key behind the one that After stands for.
func (q Query) start() ([]byte, error) {
	k, err := base64.RawURLEncoding.DecodeString(q.After)
	prefix, _ := q.prefix()
	if err != nil || len(k) > maxKey || !bytes.HasPrefix(k, prefix) {
		return nil, fmt.Errorf("%.80q: %w", q.After, ErrCursor)
	}
	if _, err := q.row(k); err != nil {
		return nil, fmt.Errorf("%.80q: %w", q.After, ErrCursor)
	}
	return append(k, 0), nil
}

// Bases yields the base models of which see lets a manifest be seen (nil: every one), in order of aggregate and after a
// given one: for each the newest such manifest. It costs one seek per repository that holds the base.
func (ix *Index) Bases(
	ctx context.Context, last identity.Aggregate, see func(repo string) bool,
) iter.Seq2[Record, error] {
	from := []byte(in(tableAggregate))
	if !last.IsZero() {
		from = after(in(tableAggregate).sum(last))
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[Record]) error {
		return t.walk(from, after(in(tableAggregate)), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			of := in(tableAggregate).sum(parts.sum())
			bases := append(bytes.Clone(of), key(nil).text(string(api.KindBase))...)
			if bytes.Compare(k, bases) < 0 {
				return bases, nil
			}
			r, found, err := t.newest(bases, onceEach(see), &p.steps)
			if err != nil || !found {
				return after(of), err
			}
			rec, size, err := t.listed(r)
			p.add(rec, size)
			return after(of), err
		})
	})
}

// newest returns the newest row of a listing whose next part is the repository.
func (t tx) newest(prefix key, see func(string) bool, steps *int) (best row, found bool, err error) {
	q := Query{}
	err = t.walk(prefix, after(prefix), func(k, _ []byte) ([]byte, error) {
		*steps++
		r, err := q.row(k)
		if err != nil {
			return nil, err
		}
		if see(r.repo) && (!found || r.created < best.created) {
			best, found = r, true
		}
		return after(append(bytes.Clone(prefix), key(nil).text(r.repo)...)), nil
	})
	return best, found, err
}

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
			repo, d, found, err := recordOf(k)
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
	r, size, err := t.listed(row{repo: repo, digest: d})
	if err != nil {
		return Row{}, 0, err
	}
	refers, err := t.refers(repo, d)
	return Row{
		Type: "manifest", Repository: r.Repo, Digest: r.Digest, Seq: r.Seq, Created: r.Created, MediaType: r.MediaType,
		Size: r.Size, ArtifactType: r.ArtifactType, Kind: r.Kind, State: r.State, Evidence: r.Evidence,
		Aggregate: r.Aggregate, ShardCount: r.ShardCount, TotalSize: r.TotalSize, Packaging: r.Packaging,
		Subject: r.Subject, Annotations: r.Annotations, Refers: refers,
	}, size + 32*len(refers), err
}
