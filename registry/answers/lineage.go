package answers

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// maxNamed is how many artifacts of one name are shown where a link is by name.
const maxNamed = 8

// Lineage says what an artifact names and what names it: the latter in pages of up to n, after a cursor, which is empty
// for the first; the former comes with the first page. An empty repo stands for any that the caller may pull from.
// ErrManifestUnknown.
func (d *Desk) Lineage(ctx context.Context, c access.Caller, of identity.Digest, repo, after string, n int) (
	out api.Lineage, err error,
) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return out, err
	}
	v := d.view(ctx, c)
	rec, err := v.manifest(of, repo)
	if err != nil {
		return out, err
	}
	about, err := v.artifact(rec)
	if err != nil {
		return out, err
	}
	bindings, err := v.bindings(rec)
	if err != nil {
		return out, err
	}
	out = api.Lineage{
		Artifact: *about, Bindings: about.Bindings, Parents: []api.Link{}, Children: []api.Link{}, NotProven: api.NotProven,
	}
	f, err := facts(rec)
	if err != nil {
		return out, err
	}
	parents, isParents := strings.CutPrefix(after, parentCursor)
	if after == "" {
		out.Parents, err = v.parents(rec, f, bindings)
	}
	if err == nil && (after == "" || isParents) {
		var links []api.Link
		links, out.NextParents, err = v.sources(rec, parents)
		out.Parents = append(out.Parents, links...)
	}
	if err != nil || isParents {
		return out, err
	}
	out.Children, out.Next, err = v.children(lookups(rec, f, bindings), rec, after, n)
	return out, err
}

// parents returns what an artifact names.
func (v *view) parents(rec index.Record, f api.Facts, bindings []api.Binding) (links []api.Link, err error) {
	links = []api.Link{}
	for _, l := range classify.Links(rec.Kind, f) {
		var more []api.Link
		switch {
		case l.Relation == api.RelationContent:
		case !l.Aggregate.IsZero():
			link := api.Link{Relation: l.Relation, Aggregate: l.Aggregate}
			link.Artifact, err = v.base(l.Aggregate)
			more = []api.Link{link}
		case l.Digest.IsZero():
			more, err = v.named(rec, l, bindings)
		case rec.Kind == api.KindStatement:
			more, err = v.stated(l)
		default:
			more, err = v.contained(rec, l, bindings)
		}
		if err != nil {
			return nil, err
		}
		links = append(links, more...)
	}
	if rec.Kind == api.KindAdapter && f.Receipt != nil {
		links = inside(links, api.Link{Relation: api.RelationReceipt, Digest: f.Receipt.Digest, Inside: true})
	}
	return links, nil
}

// What the cursors of parents begin with, and of those the ones of statements that name the manifest.
const (
	parentCursor   = "p."
	manifestCursor = "m."
)

// sources returns a page of what statements say from what a base was made: other bases, and adapters that were merged in.
// Those that name its bytes come first, then those that name its manifest.
func (v *view) sources(rec index.Record, after string) (links []api.Link, next string, err error) {
	if rec.Kind != api.KindBase {
		return nil, "", nil
	}
	after, named := strings.CutPrefix(after, manifestCursor)
	if !named && !rec.Aggregate.IsZero() {
		links, next, err = v.sourcesBy(index.AggregateTarget(rec.Aggregate), after)
		switch {
		case err != nil:
			return nil, "", err
		case next != "":
			return links, parentCursor + next, nil
		case len(links) >= maxStatements:
			return links, parentCursor + manifestCursor, nil
		}
		after = ""
	}
	more, next, err := v.sourcesBy(rec.Digest, after)
	if next != "" {
		next = parentCursor + manifestCursor + next
	}
	return append(links, more...), next, err
}

// sourcesBy is a page of what the statements about a target say.
func (v *view) sourcesBy(target identity.Digest, after string) (links []api.Link, next string, err error) {
	statements, next, err := v.Index.Records(v.ctx, index.Query{Target: target, Relation: api.RelationStatement,
		See: v.c.Sees, Next: v.c.Next, After: after}, maxStatements)
	if err != nil {
		return nil, "", err
	}
	for _, s := range statements {
		more, err := v.sourcesOf(s)
		if err != nil {
			return nil, "", err
		}
		links = append(links, more...)
	}
	return links, next, nil
}

// sourcesOf are the links from what was made to what a derived-from statement says that it was made from.
func (v *view) sourcesOf(statement index.Record) (links []api.Link, err error) {
	f, err := facts(statement)
	if err != nil || f.Statement == nil || f.Statement.Type != api.StatementDerived {
		return nil, err
	}
	link := stating(api.Link{Relation: api.RelationDerived}, statement, *f.Statement)
	for _, a := range f.Statement.From {
		link.Aggregate = a
		if link.Artifact, err = v.base(a); err != nil {
			return nil, err
		}
		links = append(links, link)
	}
	link.Aggregate = identity.Aggregate{}
	for _, d := range f.Statement.FromArtifacts {
		link.Digest = d
		if link.Artifact, err = v.look(d); err != nil {
			return nil, err
		}
		links = append(links, link)
	}
	return links, nil
}

// stating adds to a link what the statement that makes it says.
func stating(l api.Link, statement index.Record, s api.StatementFacts) api.Link {
	l.Statement, l.How, l.By, l.Reason, l.Base = statement.Digest, s.How, s.By, s.Reason, s.Base
	return l
}

// inside notes among links that what is named lies inside of the artifact that names it.
func inside(links []api.Link, it api.Link) []api.Link {
	for i, l := range links {
		if l.Relation == it.Relation && l.Digest == it.Digest {
			links[i].Inside = true
			return links
		}
	}
	return append(links, it)
}

// stated is a link of a statement to a manifest.
func (v *view) stated(l classify.Link) ([]api.Link, error) {
	about, err := v.look(l.Digest)
	return []api.Link{{Relation: l.Relation, Digest: l.Digest, Artifact: about}}, err
}

// look describes a manifest; nil: the caller sees none of that digest.
func (v *view) look(d identity.Digest) (*api.Artifact, error) {
	rec, err := v.manifest(d, "")
	if errors.Is(err, api.ErrManifestUnknown) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return v.short(rec)
}

// contained is a link to the bytes of an artifact. Where nobody holds them here and there is a name too, those of that
// name are shown beside it.
func (v *view) contained(rec index.Record, l classify.Link, bindings []api.Binding) ([]api.Link, error) {
	link := api.Link{Relation: l.Relation, Digest: l.Digest, Name: l.Name}
	found, err := v.first(index.Query{Target: l.Digest, Relation: api.RelationContent})
	if err != nil {
		return nil, err
	}
	if found != nil {
		link.Artifact, err = v.short(*found)
		return []api.Link{link}, err
	}
	if l.Name == "" {
		return []api.Link{link}, nil
	}
	named, err := v.named(rec, l, bindings)
	return append([]api.Link{link}, named...), err
}

// named are the adapters that a name may mean: those of that name which were made from the same base.
func (v *view) named(rec index.Record, l classify.Link, bindings []api.Binding) (links []api.Link, err error) {
	weak := api.Link{Relation: l.Relation, Weak: true, Name: l.Name}
	for _, b := range bindings {
		if b.Aggregate.IsZero() {
			continue
		}
		found, _, err := v.Index.Records(v.ctx, index.Query{Aggregate: b.Aggregate, Kind: api.KindAdapter, Name: l.Name,
			See: v.c.Sees, Next: v.c.Next}, maxNamed)
		if err != nil {
			return nil, err
		}
		for _, other := range found {
			if other.Digest == rec.Digest {
				continue
			}
			link := weak
			if link.Artifact, err = v.short(other); err != nil {
				return nil, err
			}
			links = append(links, link)
		}
	}
	if len(links) == 0 {
		links = []api.Link{weak}
	}
	return links, nil
}

// lookup is one way in which others name an artifact.
type lookup struct {
	target   identity.Digest
	relation string
	weak     bool
	instead  []identity.Digest // who names one of these by the same relation names it strongly
}

// lookups are the ways in which others may name a record.
func lookups(rec index.Record, f api.Facts, bindings []api.Binding) (all []lookup) {
	strong := func(target identity.Digest, relations ...string) {
		for _, r := range relations {
			if !target.IsZero() {
				all = append(all, lookup{target: target, relation: r})
			}
		}
	}
	strong(rec.Digest, api.RelationStatement, api.RelationDerived)
	if rec.Kind == api.KindBase && !rec.Aggregate.IsZero() {
		strong(index.AggregateTarget(rec.Aggregate), api.RelationStatement, api.RelationDerived)
	}
	var weights identity.Digest
	if f.Adapter != nil {
		weights = f.Adapter.Weights
		strong(weights, api.RelationParent, api.RelationOutput, api.RelationAdapter)
	}
	if rec.Kind == api.KindReceipt && f.Receipt != nil {
		strong(f.Receipt.Digest, api.RelationReceipt)
	}
	if rec.Kind != api.KindAdapter || rec.Name == "" {
		return all
	}
	for _, b := range bindings {
		for _, r := range []string{api.RelationParent, api.RelationAdapter} {
			if !b.Aggregate.IsZero() {
				all = append(all, lookup{index.NameTarget(b.Aggregate, rec.Name), r, true, []identity.Digest{weights}})
			}
		}
	}
	return all
}

// children returns a page of what names a record. The cursor is the number of a lookup and the cursor in that.
func (v *view) children(ways []lookup, rec index.Record, after string, n int) (
	links []api.Link, next string, err error,
) {
	links = []api.Link{}
	number, at, _ := strings.Cut(after, ".")
	start := 0
	if after != "" {
		if start, err = strconv.Atoi(number); err != nil || start < 0 || start >= len(ways) {
			return nil, "", api.Errorf(api.CodeParameterInvalid, "after=%.80q is no cursor of this listing", after)
		}
	}
	for i := start; i < len(ways); i++ {
		if len(links) == n {
			return links, strconv.Itoa(i) + ".", nil
		}
		w := ways[i]
		found, more, err := v.Index.Records(v.ctx, index.Query{Target: w.target, Relation: w.relation, See: v.c.Sees,
			Next: v.c.Next, After: at}, n-len(links))
		if err != nil {
			return nil, "", err
		}
		at = ""
		for _, child := range found {
			if child.Digest == rec.Digest || w.strongly(child) {
				continue
			}
			link, err := v.child(w, rec, child)
			if err != nil {
				return nil, "", err
			}
			links = append(links, link)
		}
		if more != "" {
			return links, strconv.Itoa(i) + "." + more, nil
		}
	}
	return links, "", nil
}

// strongly says whether a record that was found by a name names the content, too.
func (w lookup) strongly(rec index.Record) bool {
	return w.weak && slices.ContainsFunc(rec.Links, func(l index.Link) bool {
		return l.Relation == w.relation && slices.Contains(w.instead, l.Target)
	})
}

// child is the link from a record to what names it.
func (v *view) child(w lookup, rec, child index.Record) (link api.Link, err error) {
	link = api.Link{Relation: w.relation, Weak: w.weak, Digest: child.Digest}
	if w.weak {
		link.Name = rec.Name
	}
	if child.Kind != api.KindStatement {
		link.Artifact, err = v.short(child)
		return link, err
	}
	link.Statement = child.Digest
	f, err := facts(child)
	if err != nil {
		return link, err
	}
	s := f.Statement
	if s != nil {
		link = stating(link, child, *s)
	}
	switch { // it is not a derived-from statement that was made from the record, but what that is about
	case s == nil || w.relation != api.RelationDerived:
		link.Artifact, err = v.short(child)
		return link, err
	case s.To.IsZero():
		link.Digest = s.Target
		link.Artifact, err = v.look(s.Target)
		return link, err
	}
	link.Digest, link.Aggregate = s.Target, s.To
	link.Artifact, err = v.base(s.To)
	return link, err
}
