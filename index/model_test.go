package index_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// model is what an index must answer, computed in the plainest way: it keeps the last change of every name, and every
// question walks all of them.
type model struct {
	puts       map[name]index.PutManifest
	gone       map[name]uint64 // last delete of a manifest
	tags       map[tagName]tagChange
	leases     map[name]time.Time
	uploads    map[string]index.Upload
	checkpoint uint64
}

type name struct {
	repo   string
	digest identity.Digest
}

type tagName struct{ repo, tag string }

type tagChange struct {
	seq    uint64
	digest identity.Digest // zero: deleted
}

func newModel() *model {
	return &model{
		puts: map[name]index.PutManifest{}, gone: map[name]uint64{}, tags: map[tagName]tagChange{},
		leases: map[name]time.Time{}, uploads: map[string]index.Upload{},
	}
}

func (m *model) clone() *model {
	return &model{
		maps.Clone(m.puts), maps.Clone(m.gone), maps.Clone(m.tags), maps.Clone(m.leases), maps.Clone(m.uploads), m.checkpoint,
	}
}

// apply makes changes, all or none.
func (m *model) apply(ops ...index.Op) error {
	next := m.clone()
	for _, o := range ops {
		if err := next.one(o); err != nil {
			return err
		}
	}
	*m = *next
	return nil
}

func (m *model) one(op index.Op) error {
	switch o := op.(type) {
	case index.PutManifest:
		if k := (name{o.Repo, o.Digest}); o.Seq > m.puts[k].Seq {
			o.Links = slices.Clone(o.Links)
			slices.SortFunc(o.Links, func(a, b index.Link) int {
				return cmp.Or(cmp.Compare(a.Relation, b.Relation), a.Target.Compare(b.Target))
			})
			o.Links = slices.Compact(o.Links)
			m.puts[k] = o
		}
	case index.DeleteManifest:
		k := name{o.Repo, o.Digest}
		m.gone[k] = max(m.gone[k], o.Seq)
	case index.PutTag:
		m.setTag(tagName{o.Repo, o.Tag}, tagChange{o.Seq, o.Digest})
	case index.DeleteTag:
		m.setTag(tagName{o.Repo, o.Tag}, tagChange{o.Seq, identity.Digest{}})
	case index.LinkBlob:
		if k := (name{o.Repo, o.Digest}); m.leases[k].Before(o.Until) {
			m.leases[k] = o.Until
		}
	case index.UnlinkBlob:
		if m.referred(o.Repo, o.Digest) {
			return index.ErrReferred
		}
		delete(m.leases, name{o.Repo, o.Digest})
	case index.PutUpload:
		m.uploads[o.ID] = o.Upload
	case index.DeleteUpload:
		delete(m.uploads, o.ID)
	case index.Checkpoint:
		m.checkpoint = max(m.checkpoint, o.Position)
	default:
		return errors.New("the model knows no such op")
	}
	return nil
}

func (m *model) setTag(k tagName, c tagChange) {
	if c.seq > m.tags[k].seq {
		m.tags[k] = c
	}
}

func (m *model) manifest(repo string, d identity.Digest) (index.PutManifest, bool) {
	p, ok := m.puts[name{repo, d}]
	if !ok || p.Seq <= m.gone[name{repo, d}] {
		return index.PutManifest{}, false
	}
	return p, true
}

func (m *model) tag(repo, tag string) (identity.Digest, bool) {
	c := m.tags[tagName{repo, tag}]
	return c.digest, !c.digest.IsZero() && c.seq > m.gone[name{repo, c.digest}]
}

func (m *model) resolve(repo, ref string) (index.PutManifest, bool) {
	d, err := identity.ParseDigest(ref)
	if err != nil {
		to, ok := m.tag(repo, ref)
		if !ok {
			return index.PutManifest{}, false
		}
		d = to
	}
	return m.manifest(repo, d)
}

// live returns the manifests that are held, in order of repository and digest.
func (m *model) live() (held []index.PutManifest) {
	for k := range m.puts {
		if p, ok := m.manifest(k.repo, k.digest); ok {
			held = append(held, p)
		}
	}
	slices.SortFunc(held, func(a, b index.PutManifest) int {
		return cmp.Or(cmp.Compare(a.Repo, b.Repo), a.Digest.Compare(b.Digest))
	})
	return held
}

// bindings are the bases from which a held manifest was made.
func (m *model) bindings(p index.PutManifest) (found []index.Binding) {
	if p.Kind == api.KindBase {
		return nil
	}
	if !p.Aggregate.IsZero() {
		for _, a := range append([]identity.Aggregate{p.Aggregate}, p.Bases...) {
			found = append(found, index.Binding{Aggregate: a, Evidence: p.Evidence})
		}
		return found
	}
	found = m.stated(p)
	if found == nil && p.Kind != "" {
		found = []index.Binding{{Evidence: api.EvidenceNone}}
	}
	return found
}

// stated is what bind statements say of a held manifest.
func (m *model) stated(p index.PutManifest) (found []index.Binding) {
	live := m.live() // in order of digest in a repository
	slices.SortStableFunc(live, func(a, b index.PutManifest) int { return b.Created.Compare(a.Created) })
	for _, o := range live {
		s := statement(o)
		known := slices.ContainsFunc(found, func(b index.Binding) bool { return b.Aggregate == s.Base })
		if o.Repo == p.Repo && s.Type == api.StatementBind && s.Target == p.Digest && !known {
			found = append(found, index.Binding{Aggregate: s.Base, Evidence: api.EvidenceAsserted, BoundBy: o.Digest})
		}
	}
	return found
}

// contradiction is that of an Index.
func (m *model) contradiction(p index.PutManifest) *api.Conflict {
	if p.Kind == api.KindBase || p.Aggregate.IsZero() {
		return nil
	}
	var f api.Facts
	if len(p.Facts) > 0 {
		json.Unmarshal(p.Facts, &f)
	}
	for _, b := range m.stated(p) {
		if b.Aggregate != p.Aggregate && !slices.Contains(p.Bases, b.Aggregate) {
			return &api.Conflict{Reason: api.CodeAggregateConflict,
				Claimed: b.Aggregate.String(), ClaimedAt: "statement " + b.BoundBy.String(),
				Derived: p.Aggregate.String(), DerivedAt: cmp.Or(f.Source, "annotation "+api.AnnotationAggregate)}
		}
	}
	return nil
}

// contradicted are the facts of a held manifest with what contradicts it.
func (m *model) contradicted(p index.PutManifest) []byte {
	c := m.contradiction(p)
	if c == nil {
		return p.Facts
	}
	var f api.Facts
	if len(p.Facts) > 0 {
		json.Unmarshal(p.Facts, &f)
	}
	f.Conflict = c
	b, _ := json.Marshal(f)
	return b
}

func statement(p index.PutManifest) (s api.StatementFacts) {
	var f api.Facts
	if json.Unmarshal(p.Facts, &f) == nil && f.Statement != nil && p.Kind == api.KindStatement {
		s = *f.Statement
	}
	return s
}

// listings are the records of a query's way through the index, before its filters.
func (m *model) listings(q index.Query) (found []index.Record) {
	for _, p := range m.live() {
		switch {
		case !q.Target.IsZero():
			for _, l := range p.Links {
				if r := p.Record; l.Target == q.Target && (q.Relation == "" || q.Relation == l.Relation) {
					r.Relation = l.Relation
					found = append(found, r)
				}
			}
		case q.Aggregate.IsZero() && !q.Unbound || p.Kind == api.KindBase && p.Aggregate == q.Aggregate && !q.Unbound:
			found = append(found, p.Record)
		default:
			for _, b := range m.bindings(p) {
				if r := p.Record; b.Aggregate == q.Aggregate {
					if !b.BoundBy.IsZero() {
						r.Aggregate, r.Evidence, r.BoundBy = b.Aggregate, b.Evidence, b.BoundBy
					}
					found = append(found, r)
				}
			}
		}
	}
	return found
}

func (m *model) find(q index.Query) (found []index.Record) {
	for _, r := range m.listings(q) {
		ok := q.Repo == "" || r.Repo == q.Repo
		ok = ok && (q.Kind == "" || r.Kind == q.Kind) && (q.Name == "" || r.Name == q.Name)
		ok = ok && (q.Evidence == "" || r.Evidence == q.Evidence) && !r.Created.Before(q.Since)
		ok = ok && (q.Subject.IsZero() || r.Subject == q.Subject)
		ok = ok && (q.ArtifactType == "" || r.ArtifactType == q.ArtifactType)
		if ok && (q.See == nil || q.See(r.Repo)) {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b index.Record) int {
		first := 0
		if !q.Aggregate.IsZero() || q.Unbound {
			first = cmp.Compare(a.Kind, b.Kind)
		} else if !q.Subject.IsZero() {
			first = identity.Sum([]byte(a.ArtifactType)).Compare(identity.Sum([]byte(b.ArtifactType)))
		}
		return cmp.Or(first, cmp.Compare(a.Relation, b.Relation), cmp.Compare(a.Repo, b.Repo), b.Created.Compare(a.Created),
			a.Digest.Compare(b.Digest))
	})
	return found
}

// artifact is a record of a listing by aggregate, as a caller gets it who may see the base, or not.
func (m *model) artifact(r index.Record, base identity.Aggregate, held bool) api.Artifact {
	tags := m.tagsOf(r.Repo, r.Digest)
	a := api.Artifact{
		Held: api.Held{Repository: r.Repo, Digest: r.Digest, MediaType: r.MediaType, Created: r.Created,
			Tags: append([]string{}, tags[:min(16, len(tags))]...), MoreTags: len(tags) > 16},
		Kind: r.Kind, State: r.State, ArtifactType: r.ArtifactType, Name: r.Name,
	}
	p, _ := m.manifest(r.Repo, r.Digest)
	r.Facts = m.contradicted(p)
	size := 0
	for k, v := range r.Annotations {
		size += len(k) + len(v)
	}
	if a.AnnotationsOmitted = size > 2048; !a.AnnotationsOmitted {
		a.Annotations = r.Annotations
	}
	if a.FactsOmitted = len(r.Facts) > 4096; !a.FactsOmitted && len(r.Facts) > 0 {
		a.Facts = new(api.Facts)
		json.Unmarshal(r.Facts, a.Facts)
	}
	switch {
	case base.IsZero():
		a.Binding.Evidence = api.EvidenceNone
	case r.Kind != api.KindBase:
		a.Binding = api.Binding{Aggregate: base, Evidence: r.Evidence, Held: held}
		if !r.BoundBy.IsZero() {
			a.Binding.Source = "statement " + r.BoundBy.String()
		}
	}
	if len(m.bindings(p)) > 1 {
		a.Bases = len(m.bindings(p))
	}
	return a
}

func (m *model) bases(last identity.Aggregate, see func(string) bool) (found []index.Record) {
	newest := map[identity.Aggregate]index.Record{}
	for _, p := range m.live() {
		best, ok := newest[p.Aggregate]
		asked := p.Kind == api.KindBase && !p.Aggregate.IsZero() && string(p.Aggregate[:]) > string(last[:]) && see(p.Repo)
		same := p.Created.Equal(best.Created) && p.Repo == best.Repo
		if asked && (!ok || p.Created.After(best.Created) || same && p.Digest.Compare(best.Digest) < 0) {
			newest[p.Aggregate] = p.Record
		}
	}
	found = slices.Collect(maps.Values(newest))
	slices.SortFunc(found, func(a, b index.Record) int {
		return strings.Compare(string(a.Aggregate[:]), string(b.Aggregate[:]))
	})
	return found
}

func (m *model) tagsOf(repo string, d identity.Digest) (tags []string) {
	for k := range m.tags {
		if to, ok := m.tag(k.repo, k.tag); ok && k.repo == repo && to == d {
			tags = append(tags, k.tag)
		}
	}
	slices.Sort(tags)
	return tags
}

// entries are what is held, for an import.
func (m *model) entries() (all []index.Entry) {
	for _, p := range m.live() {
		e := index.Entry{PutManifest: p}
		for _, tag := range m.tagsOf(p.Repo, p.Digest) {
			seq := m.tags[tagName{p.Repo, tag}].seq
			e.Tags = append(e.Tags, index.PutTag{Repo: p.Repo, Tag: tag, Digest: p.Digest, Seq: seq})
		}
		all = append(all, e)
	}
	return all
}

func (m *model) tagsAfter(repo, last string) (tags []string) {
	for k := range m.tags {
		if _, ok := m.tag(k.repo, k.tag); ok && k.repo == repo && k.tag > last {
			tags = append(tags, k.tag)
		}
	}
	slices.Sort(tags)
	return tags
}

func (m *model) repos(last string) (repos []string) {
	for _, p := range m.live() {
		if p.Repo > last {
			repos = append(repos, p.Repo)
		}
	}
	return slices.Compact(repos)
}

func (m *model) referred(repo string, d identity.Digest) bool {
	return slices.ContainsFunc(m.live(), func(p index.PutManifest) bool {
		return p.Repo == repo && slices.Contains(p.Refers, d)
	})
}

func (m *model) blobs(last identity.Digest) (found []identity.Digest) {
	for _, p := range m.live() {
		for _, d := range p.Refers {
			if d.Compare(last) > 0 {
				found = append(found, d)
			}
		}
	}
	slices.SortFunc(found, identity.Digest.Compare)
	return slices.Compact(found)
}

// referrers are in order of repository and number.
func (m *model) referrers(d identity.Digest) (found []index.Referrer) {
	live := m.live()
	slices.SortStableFunc(live, func(a, b index.PutManifest) int {
		return cmp.Or(cmp.Compare(a.Repo, b.Repo), cmp.Compare(a.Seq, b.Seq))
	})
	for _, p := range live {
		if slices.Contains(p.Refers, d) {
			found = append(found, index.Referrer{Repository: p.Repo, Digest: p.Digest})
		}
	}
	return found
}

func (m *model) parents(repo string, d identity.Digest) (found []identity.Digest) {
	for _, p := range m.live() {
		if p.Repo == repo && slices.Contains(p.Lists, d) {
			found = append(found, p.Digest)
		}
	}
	return found
}

func (m *model) visible(repo string, d identity.Digest, now time.Time) bool {
	return m.referred(repo, d) || m.leases[name{repo, d}].After(now)
}

func (m *model) expired(now time.Time) (expired []index.Upload) {
	for _, u := range m.uploads {
		if !u.Expires.After(now) {
			expired = append(expired, u)
		}
	}
	slices.SortFunc(expired, func(a, b index.Upload) int {
		return cmp.Or(a.Expires.Compare(b.Expires), cmp.Compare(a.ID, b.ID))
	})
	return expired
}

func (m *model) purge(now time.Time) int {
	before := len(m.leases)
	maps.DeleteFunc(m.leases, func(_ name, until time.Time) bool { return !until.After(now) })
	return before - len(m.leases)
}

func (m *model) export() (rows []index.Row) {
	for _, p := range m.live() {
		refers := slices.Clone(p.Refers)
		slices.SortFunc(refers, identity.Digest.Compare)
		rows = append(rows, index.Row{
			Type: "manifest", Repository: p.Repo, Digest: p.Digest, Seq: p.Seq, Created: p.Created, MediaType: p.MediaType,
			Size: p.Size, ArtifactType: p.ArtifactType, Kind: p.Kind, State: p.State, Evidence: p.Evidence,
			Aggregate: p.Aggregate, Bases: p.Bases, ShardCount: p.ShardCount, TotalSize: p.TotalSize, Packaging: p.Packaging,
			Subject: p.Subject, Annotations: p.Annotations, Refers: slices.Compact(refers),
			Name: p.Name, Facts: p.Facts, Links: p.Links,
		})
	}
	byName := func(a, b tagName) int { return cmp.Or(cmp.Compare(a.repo, b.repo), cmp.Compare(a.tag, b.tag)) }
	for _, k := range slices.SortedFunc(maps.Keys(m.tags), byName) {
		if d, ok := m.tag(k.repo, k.tag); ok {
			rows = append(rows, index.Row{Type: "tag", Repository: k.repo, Tag: k.tag, Digest: d, Seq: m.tags[k].seq})
		}
	}
	return rows
}
