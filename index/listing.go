package index

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	// What a row of an aggregate's listing holds at most; api.Artifact repeats these numbers.
	listedTags        = 16
	listedAnnotations = 2 << 10 // bytes of names and values
	listedFacts       = 4 << 10 // bytes
	listedType        = 255     // bytes of an artifact type; a longer one is cut

	// maxBinds is how many bind statements of one manifest count: the newest ones, of those of one time the ones of the
	// lowest digests.
	maxBinds = 16
)

// NameTarget is what a Link by name links to: the artifacts that call themselves so and were made from that base.
func NameTarget(base identity.Aggregate, name string) identity.Digest {
	return target("kiln.link.name.v1", base, name)
}

// AggregateTarget is what a Link to a base links to.
func AggregateTarget(base identity.Aggregate) identity.Digest {
	return target("kiln.link.base.v1", base, "")
}

func target(form string, base identity.Aggregate, name string) identity.Digest {
	text, _ := base.MarshalText() // never fails; empty for the zero aggregate
	b := append(append(make([]byte, 0, 128), form...), 0)
	return identity.Sum(append(append(append(b, text...), 0), name...))
}

// Binding is a base from which a manifest was made, as far as the index knows.
type Binding struct {
	Aggregate identity.Aggregate // zero: nothing says which base it is
	Evidence  api.Evidence
	BoundBy   identity.Digest // the bind statement that says so, of several the newest one; zero: its own
}

// Bindings returns the bases from which a manifest was made: those that it says itself, else those that the bind
// statements of its repository state, the newest statement first. None: it is a base, is of no kind, or is not there.
func (ix *Index) Bindings(ctx context.Context, repo string, d identity.Digest) (found []Binding, err error) {
	err = ix.view(ctx, func(t tx) error {
		r, held, err := t.record(repo, d)
		if err != nil || !held || r.Kind == api.KindBase {
			return err
		}
		found, err = t.bindings(r)
		return err
	})
	return found, err
}

// bindings returns under which aggregates a record is listed.
func (t tx) bindings(r Record) (found []Binding, err error) {
	if !r.Aggregate.IsZero() {
		found = []Binding{{Aggregate: r.Aggregate, Evidence: r.Evidence}}
		for _, a := range r.Bases {
			found = append(found, Binding{Aggregate: a, Evidence: r.Evidence})
		}
		return found, nil
	}
	if r.Kind == api.KindBase {
		return nil, nil
	}
	found, err = t.stated(r)
	if len(found) == 0 && r.Kind != "" {
		found = []Binding{{Evidence: api.EvidenceNone}}
	}
	return found, err
}

// stated returns what the bind statements that count say of a manifest, the newest first, each base once.
func (t tx) stated(r Record) (found []Binding, err error) {
	n, prefix := 0, manifestKey(r.Repo, r.Digest, partBinding)
	for k, v := range t.Range(prefix, after(prefix)) {
		b, err := unseal(k, v)
		if err != nil {
			return nil, err
		}
		base, err := decodeSums(b)
		if err != nil || len(base) != 1 || len(k) != len(prefix)+8+32 {
			return nil, errors.Join(err, fmt.Errorf("%w: malformed binding", ErrDamaged))
		}
		said := Binding{identity.Aggregate(base[0]), api.EvidenceAsserted, identity.Digest(k[len(prefix)+8:])}
		if !slices.ContainsFunc(found, func(b Binding) bool { return b.Aggregate == said.Aggregate }) {
			found = append(found, said)
		}
		if n++; n == maxBinds {
			break
		}
	}
	return found, nil
}

// Contradiction returns what a bind statement of its repository says of the base of a manifest that names another one
// itself: the newest one that does, of those that count. What the manifest says is stronger, and stands. nil: none does.
func (ix *Index) Contradiction(ctx context.Context, repo string, d identity.Digest) (c *api.Conflict, err error) {
	err = ix.view(ctx, func(t tx) error {
		r, held, err := t.record(repo, d)
		if err == nil && held {
			c, err = t.contradiction(r)
		}
		return err
	})
	return c, err
}

func (t tx) contradiction(r Record) (*api.Conflict, error) {
	if r.Aggregate.IsZero() || r.Kind == api.KindBase {
		return nil, nil
	}
	said, err := t.stated(r)
	for _, b := range said {
		if b.Aggregate == r.Aggregate || slices.Contains(r.Bases, b.Aggregate) {
			continue
		}
		var f api.Facts
		if len(r.Facts) > 0 {
			err = json.Unmarshal(r.Facts, &f)
		}
		return &api.Conflict{Reason: api.CodeAggregateConflict,
			Claimed: b.Aggregate.String(), ClaimedAt: "statement " + b.BoundBy.String(),
			Derived: r.Aggregate.String(), DerivedAt: cmp.Or(f.Source, "annotation "+api.AnnotationAggregate)}, err
	}
	return nil, err
}

// contradicted adds to the facts of a record, as its listing rows show them, what contradicts it, unless they have that.
func (t tx) contradicted(r Record) (Record, error) {
	c, err := t.contradiction(r)
	if c == nil || err != nil {
		return r, err
	}
	var f api.Facts
	if len(r.Facts) > 0 {
		err = json.Unmarshal(r.Facts, &f)
	}
	if err == nil && f.Conflict == nil {
		f.Conflict = c
		r.Facts, err = json.Marshal(f)
	}
	return r, err
}

// bound returns which manifest of its repository a bind statement is about, and from which base it says that was made.
func (r Record) bound() (target identity.Digest, base identity.Aggregate, ok bool) {
	if r.Kind != api.KindStatement || len(r.Facts) == 0 {
		return target, base, false
	}
	var f api.Facts
	if err := json.Unmarshal(r.Facts, &f); err != nil || f.Statement == nil || f.Statement.Type != api.StatementBind {
		return target, base, false
	}
	s := f.Statement
	return s.Target, s.Base, !s.Target.IsZero() && !s.Base.IsZero()
}

// change is the transaction of one Apply. At its end the listing rows of all that it touched are made anew, from what
// they depend on: the record, its tags, and the bind statements about it.
type change struct {
	tx
	touched []touched
	at      map[name]bool // those of touched
}

type name struct {
	repo   string
	digest identity.Digest
}

// touched is a manifest and the keys of the listing rows that it had.
type touched struct {
	name
	keys []key
}

// touch is to be called before what the listing rows of a manifest depend on is changed.
func (c *change) touch(repo string, d identity.Digest) error {
	n := name{repo, d}
	if c.at[n] {
		return nil
	}
	if c.at == nil {
		c.at = map[name]bool{}
	}
	c.at[n] = true
	r, held, err := c.record(repo, d)
	if err != nil {
		return err
	}
	var keys []key
	if held {
		bindings, err := c.bindings(r)
		if err != nil {
			return err
		}
		for k := range r.listings(bindings) {
			keys = append(keys, k)
		}
	}
	c.touched = append(c.touched, touched{n, keys})
	return nil
}

// bind adds what a bind statement says to its target, which may not be there yet.
func (c *change) bind(r Record) error {
	target, base, ok := r.bound()
	if !ok {
		return nil
	}
	if err := c.touch(r.Repo, target); err != nil {
		return err
	}
	return c.store(r.bindingKey(target), encodeSums([]identity.Digest{identity.Digest(base)}))
}

// unbind takes back what bind added.
func (c *change) unbind(r Record) error {
	target, _, ok := r.bound()
	if !ok {
		return nil
	}
	if err := c.touch(r.Repo, target); err != nil {
		return err
	}
	return c.Delete(r.bindingKey(target))
}

// relist makes the listing rows of what was touched anew.
func (c *change) relist() error {
	for _, was := range c.touched {
		if err := c.relistOne(was); err != nil {
			return err
		}
	}
	return nil
}

func (c *change) relistOne(was touched) error {
	if err := c.prefetch(was.keys); err != nil {
		return err
	}
	old := make(map[string]bool, len(was.keys))
	for _, k := range was.keys {
		old[string(k)] = true
	}
	r, held, err := c.record(was.repo, was.digest)
	if err != nil {
		return err
	}
	var bindings []Binding
	if held {
		if bindings, err = c.bindings(r); err != nil {
			return err
		}
		if r, err = c.contradicted(r); err != nil {
			return err
		}
	}
	var tags []string
	var more bool
	if len(bindings) > 0 {
		tags, more = c.someTags(r.Repo, r.Digest)
	}
	for k, b := range r.listings(bindings) {
		had := old[string(k)]
		delete(old, string(k))
		var value []byte
		if b != nil {
			body, err := encodeListed(r, *b, len(bindings), tags, more)
			if err != nil {
				return err
			}
			value = seal(k, body)
		}
		if err := c.replace(k, value, had); err != nil {
			return err
		}
	}
	for _, k := range was.keys {
		if !old[string(k)] {
			continue
		}
		if err := c.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// replace puts a row unless it is there as it is to be.
func (c *change) replace(k key, value []byte, had bool) error {
	if had {
		is, err := c.Get(k)
		if err != nil || is != nil && bytes.Equal(is, value) {
			return err
		}
	}
	return c.Put(k, value)
}

// someTags returns the first tags that point to a manifest, and whether there are others.
func (t tx) someTags(repo string, d identity.Digest) (tags []string, more bool) {
	tags = []string{}
	prefix := manifestKey(repo, d, partTag)
	for k := range t.Range(prefix, after(prefix)) {
		if len(tags) == listedTags {
			return tags, true
		}
		tags = append(tags, string(k[len(prefix):]))
	}
	return tags, false
}

// listings yields the keys of the listing rows of a record. Those by aggregate, under which its bindings list it, have a
// value, and come with their binding.
func (r Record) listings(bindings []Binding) iter.Seq2[key, *Binding] {
	return func(yield func(key, *Binding) bool) {
		if r.Repo == "" || !yield(r.repoKey(), nil) {
			return
		}
		if !r.Subject.IsZero() && !yield(r.subjectKey(), nil) {
			return
		}
		for i, b := range bindings {
			if !yield(r.aggregateKey(b.Aggregate), &bindings[i]) {
				return
			}
			if r.Name != "" && !yield(r.nameKey(b.Aggregate), nil) {
				return
			}
		}
		for _, l := range r.Links {
			if !yield(r.linkKey(l), nil) {
				return
			}
		}
	}
}

// wireArtifact is api.Artifact with facts that are encoded already. Its JSON ends with notHeld if it has a binding.
type wireArtifact struct {
	api.Held
	Kind               api.Kind          `json:"kind"`
	State              api.ContentState  `json:"content_state"`
	ArtifactType       string            `json:"artifact_type"`
	Name               string            `json:"name,omitempty"`
	Annotations        map[string]string `json:"annotations,omitempty"`
	AnnotationsOmitted bool              `json:"annotations_omitted,omitempty"`
	Facts              json.RawMessage   `json:"facts,omitempty"`
	FactsOmitted       bool              `json:"facts_omitted,omitempty"`
	Bases              int               `json:"bases,omitempty"`
	Binding            *api.Binding      `json:"binding,omitempty"`
}

const (
	notHeld = `false}}`
	isHeld  = `true}}`
)

// wireOf is what the row of r shows under b, one of its bases.
func wireOf(r Record, b Binding, bases int, tags []string, more bool) wireArtifact {
	a := wireArtifact{
		Held: api.Held{Repository: r.Repo, Digest: r.Digest, MediaType: r.MediaType, Tags: tags, MoreTags: more,
			Created: r.Created},
		Kind: r.Kind, State: r.State, ArtifactType: r.ArtifactType[:min(listedType, len(r.ArtifactType))], Name: r.Name,
	}
	size := 0
	for k, v := range r.Annotations {
		size += len(k) + len(v)
	}
	if a.AnnotationsOmitted = size > listedAnnotations; !a.AnnotationsOmitted {
		a.Annotations = r.Annotations
	}
	if a.FactsOmitted = len(r.Facts) > listedFacts; !a.FactsOmitted {
		a.Facts = r.Facts
	}
	if bases > 1 {
		a.Bases = bases
	}
	if r.Kind != api.KindBase {
		a.Binding = &api.Binding{Aggregate: b.Aggregate, Evidence: b.Evidence}
		if !b.BoundBy.IsZero() {
			a.Binding.Source = "statement " + b.BoundBy.String()
		}
	}
	return a
}

const (
	// maxPageBytes are about the bytes that end a page before it has the rows that were asked for.
	maxPageBytes = 4 << 20
	// maxLooks is how many rows of the caller's repositories are looked at for one page, in limits.steps of an index: a
	// filter that few of them pass ends it early.
	maxLooks = 16
)

// Page is a page of a listing.
type Page struct {
	JSON []byte // the api.Artifact values as JSON, with commas between
	Rows int    // how many they are
	Held bool   // the query's See lets a base of the query's Aggregate be seen
	Next string // After of the following page; empty: there is none
}

// Listing appends a page of up to n artifacts of an Aggregate or Unbound query to buf, as JSON. Where its bytes or the
// rows that were looked at are many the page ends early, even with no row, and has a Next: so only an empty Next says
// that there is no more. Rows that stay in the index from the first page to the last come exactly once. ErrCursor.
func (ix *Index) Listing(ctx context.Context, q Query, n int, buf []byte) (p Page, err error) {
	if q.Aggregate.IsZero() && !q.Unbound {
		return p, errors.New("listing: want an aggregate, or what is unbound")
	}
	p.JSON = buf
	first := func(t tx) error {
		bases := Query{Aggregate: q.Aggregate, Kind: api.KindBase, See: q.See, Next: q.Next}
		if q.Aggregate.IsZero() {
			return nil
		}
		if q.See == nil {
			prefix, err := bases.prefix()
			p.Held = err == nil && t.any(prefix)
			return err
		}
		w, from, err := newWalk(bases)
		if err != nil {
			return err
		}
		var more []byte
		if p.Held, more, err = t.holds(w, from, ix.limits.steps); err == nil && more != nil {
			err = errMore
		}
		return err
	}
	take := func(_ tx, w *walk) (int, error) {
		before := len(p.JSON)
		if p.Rows++; p.Rows > 1 {
			p.JSON = append(p.JSON, ',')
		}
		p.JSON = w.listed.appendTo(p.JSON, p.Held)
		return len(p.JSON) - before, nil
	}
	if p.Next, err = ix.page(ctx, q, n, first, take); err == errMore {
		if p.Held, err = ix.Holds(ctx, q.Aggregate, q.See, q.Next); err == nil {
			p.Next, err = ix.page(ctx, q, n, nil, take)
		}
	}
	return p, err
}

// errMore: a question takes more than one transaction.
var errMore = errors.New("more steps than one transaction has")

// Records is Listing for any query, with records as Find yields them.
func (ix *Index) Records(ctx context.Context, q Query, n int) (records []Record, next string, err error) {
	next, err = ix.page(ctx, q, n, nil, func(t tx, w *walk) (int, error) {
		rec, size, err := t.recordOf(w)
		records = append(records, rec)
		return size, err
	})
	return records, next, err
}

// page has take read up to n rows of a query, once first has used the transaction, and returns where the next page starts.
// Where a page ends, and whether another one follows, is the same whatever lies in repositories that are not to be seen:
// those it passes by, however many there are.
func (ix *Index) page(
	ctx context.Context, q Query, n int, first func(tx) error, take func(tx, *walk) (int, error),
) (string, error) {
	w, from, err := newWalk(q)
	if err != nil {
		return "", err
	}
	p := paging{walk: w, most: max(n, 1), looks: maxLooks * ix.limits.steps, take: take}
	for {
		p.steps, p.next = ix.limits.steps, nil
		err := ix.view(ctx, func(t tx) error {
			if first != nil {
				if err := first(t); err != nil {
					return err
				}
			}
			err := t.walk(from, after(w.prefix), func(k, v []byte) ([]byte, error) { return p.visit(t, k, v) })
			p.at = bytes.Clone(p.at)
			return err
		})
		switch {
		case err != nil:
			return "", err
		case p.full:
			return base64.RawURLEncoding.EncodeToString(p.at), nil
		case p.next == nil:
			return "", nil
		}
		from, first = p.next, nil
	}
}

// paging is a page on its way.
type paging struct {
	*walk
	take       func(tx, *walk) (int, error)
	most       int    // rows
	rows, size int    // taken so far, with their bytes
	full       bool   // and there is another row that the caller may know of
	at         []byte // the last row of those that was looked at; in a transaction perhaps a key of it
	looks      int    // left at such rows
	steps      int    // left in this transaction
	next       []byte // where the next transaction goes on; nil: there is none
}

// visit looks at one row, as the walk of a transaction has it.
func (p *paging) visit(t tx, k, v []byte) ([]byte, error) {
	if p.steps == 0 {
		p.next = bytes.Clone(k)
		return nil, errStop
	}
	p.steps--
	jump, err := p.look(t, k, v)
	if err != nil || !p.shown {
		return jump, err
	}
	wanted := jump == nil && p.wants()
	if p.looks == 0 || wanted && (p.rows == p.most || p.rows > 0 && p.size >= maxPageBytes) {
		p.full = true
		return nil, errStop
	}
	if wanted {
		size, err := p.take(t, p.walk)
		if err != nil {
			return nil, err
		}
		p.rows, p.size = p.rows+1, p.size+size
	}
	p.looks--
	p.at = k
	return jump, nil
}

// Holds says whether see lets a base of the aggregate be seen. See Query for see and next, which may be nil.
func (ix *Index) Holds(
	ctx context.Context, a identity.Aggregate, see func(string) bool, next func(string) (string, bool),
) (held bool, err error) {
	w, from, err := newWalk(Query{Aggregate: a, Kind: api.KindBase, See: see, Next: next})
	for err == nil && from != nil {
		err = ix.view(ctx, func(t tx) (err error) {
			held, from, err = t.holds(w, from, ix.limits.steps)
			return err
		})
	}
	return held, err
}

// holds says whether a walk from a key on comes to a row that can be seen. Where that takes more steps it returns the key
// to go on from.
func (t tx) holds(w *walk, from []byte, steps int) (held bool, next []byte, err error) {
	err = t.walk(from, after(w.prefix), func(k, v []byte) ([]byte, error) {
		if steps == 0 {
			next = bytes.Clone(k)
			return nil, errStop
		}
		steps--
		jump, err := w.look(t, k, v)
		if err != nil || jump != nil {
			return jump, err
		}
		held = true
		return nil, errStop
	})
	return held, next, err
}
