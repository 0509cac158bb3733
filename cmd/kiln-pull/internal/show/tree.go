package show

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

const (
	maxDepth = 12  // of a tree
	maxNodes = 500 // of a tree
)

// Links returns what an artifact in a repository names and what names it. One that is not there is
// api.ErrManifestUnknown.
type Links func(ctx context.Context, repo string, d identity.Digest) (api.Lineage, error)

// The relations of what stands directly below a base in its tree. No lineage has them.
const (
	relationPackaging = "packaging" // the base itself, in one repository
	relationBase      = "base"      // artifact -> the base that it was made from
)

// Node is an artifact in a tree, or what a link names that is not held.
type Node struct {
	api.Link
	Repeated bool   `json:"repeated,omitempty"` // its own nodes are shown where it stands first
	Cut      bool   `json:"cut,omitempty"`      // it may have nodes that are not shown: the tree is deep or large enough
	Nodes    []Node `json:"nodes,omitempty"`
}

// Tree is the lineage of a base or of an artifact.
type Tree struct {
	Base     identity.Aggregate `json:"base_aggregate_sha256,omitzero"`
	Held     bool               `json:"base_held"`
	Artifact *api.Artifact      `json:"artifact,omitempty"` // nil: it is the tree of the base
	From     []Node             `json:"made_from"`          // each with what it was made from itself
	Uses     []Node             `json:"used_by"`            // each with what was made from it
	More     bool               `json:"more,omitempty"`     // there are artifacts that are not shown
	// Unavailable are the shards of bases in the tree that the registry knows to be damaged or missing: those bases can't
	// be pulled. Bases without any are not in it.
	Unavailable map[identity.Aggregate][]identity.Digest `json:"unavailable_shards,omitempty"`
}

// maxBases is how many bases of a tree are asked about.
const maxBases = 64

// Ask learns which bases of the tree can't be pulled. unavailable returns the shards of one that are damaged or missing.
func (t *Tree) Ask(unavailable func(identity.Aggregate) ([]identity.Digest, error)) error {
	asked := map[identity.Aggregate]bool{}
	var ask func(a identity.Aggregate, nodes []Node) error
	ask = func(a identity.Aggregate, nodes []Node) error {
		if !a.IsZero() && !asked[a] && len(asked) < maxBases {
			asked[a] = true
			shards, err := unavailable(a)
			if err != nil {
				return err
			}
			if len(shards) > 0 {
				if t.Unavailable == nil {
					t.Unavailable = map[identity.Aggregate][]identity.Digest{}
				}
				t.Unavailable[a] = shards
			}
		}
		for _, n := range nodes {
			if err := ask(n.Aggregate, n.Nodes); err != nil {
				return err
			}
		}
		return nil
	}
	err := errors.Join(ask(t.Base, t.From), ask(identity.Aggregate{}, t.Uses))
	if t.Artifact != nil {
		for _, b := range t.Artifact.Bindings {
			err = errors.Join(err, ask(b.Aggregate, nil))
		}
	}
	return err
}

// copied is an artifact in one repository. A copy in another one may have other links.
type copied struct {
	repo   string
	digest identity.Digest
}

func copyOf(x api.Artifact) copied { return copied{x.Repository, x.Digest} }

// walker grows a tree. Each artifact is asked for once.
type walker struct {
	ctx   context.Context
	links Links
	known map[copied]api.Lineage
	shown map[copied]bool
	nodes int
}

func newWalker(ctx context.Context, links Links) *walker {
	return &walker{ctx: ctx, links: links, known: map[copied]api.Lineage{}, shown: map[copied]bool{}}
}

// OfArtifact is the tree of one artifact in a repository: above it what it was made from, below it what was made from it.
func OfArtifact(ctx context.Context, repo string, d identity.Digest, links Links) (Tree, error) {
	up := newWalker(ctx, links)
	root, err := up.ask(copied{repo, d})
	if err != nil {
		return Tree{}, err
	}
	it := copyOf(root.Artifact)
	t := Tree{Artifact: &root.Artifact, Base: root.Artifact.Binding.Aggregate, Held: root.Artifact.Binding.Held}
	up.shown[it] = true
	if t.From, err = up.grow(root, above, 1); err != nil {
		return t, err
	}
	down := newWalker(ctx, links)
	down.known, down.shown[it] = up.known, true
	root.Parents, root.Children = slices.Clone(root.Parents), slices.Clone(root.Children)
	for _, x := range root.Parents { // what is inside is shown above, and not again where it was pushed by itself too
		if x.Inside && x.Artifact != nil {
			root.Children = slices.DeleteFunc(root.Children, func(c api.Link) bool {
				return c.Relation == api.RelationOutput && c.Artifact != nil && copyOf(*c.Artifact) == copyOf(*x.Artifact)
			})
		}
	}
	root.Parents = slices.DeleteFunc(root.Parents, func(x api.Link) bool { return x.Inside })
	t.Uses, err = down.grow(root, below, 1)
	return t, err
}

// OfBase is the tree of what was made from a base, of which all lists some; more says that there are others.
func OfBase(ctx context.Context, base identity.Aggregate, all []api.Artifact, more bool, links Links) (Tree, error) {
	t := Tree{Base: base, More: more || len(all) > maxNodes}
	all = all[:min(len(all), maxNodes)]
	w := newWalker(ctx, links)
	listed := map[copied]bool{}
	for _, x := range all {
		listed[copyOf(x)] = true
		t.Held = t.Held || x.Binding.Held
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b api.Artifact) int { return cmp.Compare(order[a.Kind], order[b.Kind]) })
	var first, rest []api.Artifact // rest lies below others or, in a cycle, below itself
	for _, x := range all {
		l, err := w.ask(copyOf(x))
		if err == nil && x.Kind == api.KindBase && t.From == nil { // all packagings of a base have the same sources
			t.From, err = newWalker(ctx, links).grow(l, above, 1)
		}
		if err != nil {
			return t, err
		}
		if slices.ContainsFunc(above(l), func(up api.Link) bool { return up.Artifact != nil && listed[copyOf(*up.Artifact)] }) {
			rest = append(rest, x)
		} else {
			first = append(first, x)
		}
	}
	for _, x := range append(first, rest...) {
		if w.shown[copyOf(x)] {
			continue
		}
		relation := relationBase
		if x.Kind == api.KindBase {
			relation = relationPackaging
		}
		n, err := w.node(api.Link{Relation: relation, Artifact: &x}, below, 1)
		if err != nil {
			return t, err
		}
		t.Uses = append(t.Uses, n)
	}
	return t, nil
}

// order is that of kinds in a tree: what others are made from comes first.
var order = map[api.Kind]int{
	api.KindBase: 0, api.KindAdapter: 1, api.KindCheckpoint: 2, api.KindEval: 3, api.KindReceipt: 4, api.KindStatement: 5,
}

// above are the links to what an artifact was made from. A receipt is named by its adapter, but comes after it, unless
// it is inside.
func above(l api.Lineage) (links []api.Link) {
	for _, p := range l.Parents {
		if p.Relation != api.RelationReceipt || p.Inside {
			links = append(links, p)
		}
	}
	for _, c := range l.Children {
		if c.Relation == api.RelationReceipt {
			links = append(links, c)
		}
	}
	return links
}

// below are the links to what was made from an artifact, or belongs to it.
func below(l api.Lineage) (links []api.Link) {
	for _, c := range l.Children {
		if c.Relation != api.RelationReceipt {
			links = append(links, c)
		}
	}
	for _, p := range l.Parents {
		if p.Relation == api.RelationReceipt {
			links = append(links, p)
		}
	}
	return links
}

// ask returns what is known of an artifact. One that is gone meanwhile has no links.
func (w *walker) ask(x copied) (api.Lineage, error) {
	if l, ok := w.known[x]; ok {
		return l, nil
	}
	l, err := w.links(w.ctx, x.repo, x.digest)
	if err != nil {
		return l, err
	}
	w.known[x] = l
	return l, nil
}

// grow returns the nodes in one direction from an artifact.
func (w *walker) grow(l api.Lineage, way func(api.Lineage) []api.Link, depth int) (nodes []Node, err error) {
	links := way(l)
	slices.SortStableFunc(links, func(a, b api.Link) int {
		return cmp.Or(cmp.Compare(kindOf(a), kindOf(b)), cmp.Compare(a.Relation, b.Relation))
	})
	type said struct {
		artifact  copied
		statement identity.Digest
	}
	at := map[said]int{}
	for _, x := range links {
		if x.Artifact != nil {
			if x.Inside && w.shown[copyOf(*x.Artifact)] {
				continue // a receipt is shown, and now the adapter that contains it
			}
			is := said{copyOf(*x.Artifact), x.Statement}
			if i, twice := at[is]; twice { // in two relations: one node, as strong as the stronger
				nodes[i].Weak = nodes[i].Weak && x.Weak
				continue
			}
			at[is] = len(nodes)
		}
		n, err := w.node(x, way, depth)
		if err != nil {
			return nodes, err
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

func kindOf(l api.Link) int {
	if l.Artifact == nil {
		return len(order)
	}
	return order[l.Artifact.Kind]
}

// node returns the node of a link, with those beyond it.
func (w *walker) node(x api.Link, way func(api.Lineage) []api.Link, depth int) (n Node, err error) {
	n.Link = x
	w.nodes++
	switch {
	case x.Artifact == nil, x.Inside: // what is inside has no links but those of what contains it
		return n, nil
	case w.shown[copyOf(*x.Artifact)]:
		n.Repeated = true
		return n, nil
	case depth == maxDepth || w.nodes >= maxNodes:
		n.Cut = true
		return n, nil
	}
	w.shown[copyOf(*x.Artifact)] = true
	l, err := w.ask(copyOf(*x.Artifact))
	if err != nil {
		return n, err
	}
	n.Nodes, err = w.grow(l, way, depth+1)
	return n, err
}

// Write writes the tree: indented for people, or as one JSON object.
func (t Tree) Write(w io.Writer, registry string, asJSON bool) error {
	if asJSON {
		t.From, t.Uses = append([]Node{}, t.From...), append([]Node{}, t.Uses...) // lists, also where they are empty
		return json.NewEncoder(w).Encode(struct {
			Event string `json:"event"` // tree
			Tree
		}{"tree", t})
	}
	p := printer{w: w, registry: registry, unavailable: t.Unavailable}
	if t.Artifact == nil {
		p.line(0, t.base(api.Binding{Aggregate: t.Base, Held: t.Held}))
		p.section("made from", nil, t.From)
		p.section("used by", nil, t.Uses)
	} else {
		p.line(0, p.name(api.Link{Artifact: t.Artifact}))
		p.section("made from", t.bases(), t.From)
		if c := conflict(*t.Artifact); c != "" {
			p.line(2, c)
		}
		p.section("used by", nil, t.Uses)
	}
	if t.More {
		p.line(1, fmt.Sprintf("... and others: only %d are shown", maxNodes))
	}
	return p.err
}

// base is a base on a line.
func (t Tree) base(b api.Binding) string {
	if b.Aggregate.IsZero() {
		return "base not recorded"
	}
	return fmt.Sprintf("base %s (%s%s)", b.Aggregate, held(b), lost(t.Unavailable[b.Aggregate]))
}

// bases says of the artifact from which base it was made, or from which ones its outcome rows were.
func (t Tree) bases() (lines []string) {
	x := *t.Artifact
	if disputed := made.Disputed(x); disputed != "" {
		return []string{"base can't be told: " + disputed}
	}
	all := x.Bindings
	if len(all) == 0 {
		all = []api.Binding{x.Binding}
	}
	for _, b := range all {
		lines = append(lines, fmt.Sprintf("%s, evidence %s%s", t.base(b), b.Evidence, rowsOf(x, b.Aggregate)))
	}
	return lines
}

// rowsOf says how many of the outcome rows of several bases are of one.
func rowsOf(x api.Artifact, base identity.Aggregate) string {
	if x.Facts == nil || x.Facts.Eval == nil {
		return ""
	}
	for _, b := range x.Facts.Eval.Bases {
		if b.Aggregate == base {
			return fmt.Sprintf(", %d of %s", b.Rows, cli.Count(x.Facts.Eval.Rows, "row"))
		}
	}
	return ""
}

type printer struct {
	w        io.Writer
	registry string
	err      error

	unavailable map[identity.Aggregate][]identity.Digest // shards of bases
}

func (p *printer) line(depth int, text string) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, "%s%s\n", strings.Repeat("  ", depth), client.Escape(text))
	}
}

// section writes nodes below a title, which is left out if there is nothing below it.
func (p *printer) section(title string, first []string, nodes []Node) {
	if len(first)+len(nodes) == 0 {
		return
	}
	p.line(1, title)
	for _, text := range first {
		p.line(2, text)
	}
	p.nodes(2, nodes)
}

func (p *printer) nodes(depth int, nodes []Node) {
	for _, n := range nodes {
		text := p.name(n.Link)
		switch {
		case n.Inside && n.Artifact == nil:
			text = fmt.Sprintf("%s inside: %s", n.Relation, n.Digest)
		case n.Inside:
			text = fmt.Sprintf("%s inside: %s, also pushed by itself: %s", n.Relation, n.Digest, text)
		case n.Relation == relationBase, n.Relation == relationPackaging: // which is all that stands there
		case n.How != "":
			text = n.Relation + " (" + n.How + "): " + text
		case n.Relation != "":
			text = n.Relation + ": " + text
		}
		text += stated(n.Link)
		if n.Weak {
			text += " (weak: by name)"
		}
		if is := lost(p.unavailable[n.Aggregate]); is != "" {
			text += " (" + strings.TrimPrefix(is, "; ") + ")"
		}
		switch {
		case n.Repeated:
			text += " (shown above)"
		case n.Cut:
			text += " (... and on)"
		}
		p.line(depth, text)
		p.nodes(depth+1, n.Nodes)
	}
}

// stated is what the statement says that makes a link, or that the link leads to: who says it, what and why.
func stated(l api.Link) string {
	var says []string
	switch {
	case l.Artifact != nil && l.Artifact.Digest == l.Statement:
	case !l.Statement.IsZero():
		says = append(says, "says statement "+shortened(l.Statement.String()))
	}
	base, by, reason := l.Base, l.By, l.Reason
	if x := l.Artifact; x != nil && x.Facts != nil && x.Facts.Statement != nil {
		base, by, reason = x.Facts.Statement.Base, x.Facts.Statement.By, x.Facts.Statement.Reason
	}
	if !base.IsZero() {
		says = append(says, "binds to base "+base.String())
	}
	if by != "" {
		says = append(says, fmt.Sprintf("by %q", by))
	}
	if reason != "" {
		says = append(says, fmt.Sprintf("reason %q", reason))
	}
	if len(says) == 0 {
		return ""
	}
	return " (" + strings.Join(says, "; ") + ")"
}

// name is a node on one line.
func (p *printer) name(l api.Link) string {
	switch x := l.Artifact; {
	case x == nil && !l.Aggregate.IsZero():
		return fmt.Sprintf("base %s (not held)", l.Aggregate)
	case x == nil && !l.Digest.IsZero():
		return fmt.Sprintf("%s (not held)", l.Digest)
	case x == nil:
		return fmt.Sprintf("%q (not held)", l.Name)
	default:
		kind := string(x.Kind)
		if kind == "" {
			kind = "artifact"
		}
		text := kind + " " + Reference(p.registry, x.Held)
		if x.Name != "" {
			text += fmt.Sprintf(" %q", x.Name)
		}
		if len(x.Tags) > 0 {
			text += " " + strings.Join(x.Tags, ",")
		}
		if Archive(*x) {
			text += " (archive)"
		}
		if made.Disputed(*x) != "" {
			text += " (its base can't be told)"
		}
		switch {
		case conflict(*x) == "":
		case strings.HasPrefix(x.Facts.Conflict.ClaimedAt, "statement "):
			text += " (a statement names another base)"
		default:
			text += " (its subject is of another base)"
		}
		return text
	}
}
