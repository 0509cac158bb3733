package index

import (
	"context"
	"encoding/json"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
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
	r, size, err := t.listed(row{repo: repo, digest: d})
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
