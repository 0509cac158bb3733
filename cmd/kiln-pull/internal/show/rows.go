// Package show is how kiln-pull shows what a registry says: rows of findings, the tree of a lineage, the table of
// evals; for people, and as JSON for programs. Names come from strangers: none of them can act on a terminal or forge a
// row.
package show

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

// Rows writes findings as they come: a listing has no bound. It is not safe for concurrent use.
type Rows struct {
	Count int // rows written so far
	// Unavailable are the shards of the base that the registry knows to be damaged or missing there. It is set before the
	// first row.
	Unavailable []identity.Digest

	registry string // host of the references
	json     *json.Encoder
	table    *tabwriter.Writer
	archives bool // those come now, and their title is not yet written
	pending  int  // rows of the table that are not written yet: they get their widths together
	err      error
}

// aligned is how many rows of a table get their widths together. More are written in several such blocks.
const aligned = 1000

// NewRows returns Rows that write to w what the registry at a host says.
func NewRows(w io.Writer, registry string, asJSON bool) *Rows {
	if asJSON {
		return &Rows{registry: registry, json: json.NewEncoder(w)}
	}
	return &Rows{registry: registry, table: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
}

// Base writes a manifest that holds a base.
func (o *Rows) Base(s identity.Summary, packaging identity.Digest, h api.Held) {
	o.head(func() string {
		return fmt.Sprintf("base %s: %s, %s", s.Aggregate, cli.Count(s.ShardCount, "shard"), cli.Bytes(int64(s.TotalSize))) +
			o.unavailable()
	})
	if o.json != nil {
		o.encode(struct {
			Kind      api.Kind         `json:"kind"`
			Packaging identity.Digest  `json:"packaging"`
			Identity  identity.Summary `json:"base_weight_identity"`
			Reference string           `json:"reference"`
			api.Held
			Unavailable []identity.Digest `json:"unavailable_shards,omitempty"`
		}{api.KindBase, packaging, s, Reference(o.registry, h), h, o.Unavailable})
		return
	}
	o.row(api.KindBase, h, "", "bytes", "held", "packaging "+packaging.Hex()[:12]+o.unavailable())
}

// unavailable says that the base can't be pulled, if it can't.
func (o *Rows) unavailable() string { return lost(o.Unavailable) }

// lost says that a base with such shards can't be pulled; nothing where there are none.
func lost(unavailable []identity.Digest) string {
	if n := len(unavailable); n > 0 {
		return fmt.Sprintf("; can't be pulled: %s damaged or missing", cli.Count(n, "shard"))
	}
	return ""
}

// Artifact writes an artifact that was made from a base.
func (o *Rows) Artifact(x api.Artifact) {
	o.head(func() string {
		if made.Disputed(x) != "" {
			return "the base can't be told"
		}
		if x.Binding.Aggregate.IsZero() {
			return "no base recorded"
		}
		return fmt.Sprintf("base %s: %s", x.Binding.Aggregate, held(x.Binding)) + o.unavailable()
	})
	if o.json != nil {
		o.encode(struct {
			api.Artifact
			Reference string `json:"reference"`
			Archive   bool   `json:"archive,omitempty"`  // nothing can resume from it exactly, or be shown to run on its base
			Disputed  string `json:"disputed,omitempty"` // why statements about its base decide nothing
		}{x, Reference(o.registry, x.Held), Archive(x), made.Disputed(x)})
		return
	}
	base := held(x.Binding)
	if made.Disputed(x) != "" {
		base = "?"
	}
	o.row(x.Kind, x.Held, x.Name, string(x.Binding.Evidence), base, note(x))
}

// Archives begins the rows of archives, which are listed apart.
func (o *Rows) Archives() { o.archives = true }

// Archive says whether an artifact is a Kiln record without the full manifest of its base.
func Archive(x api.Artifact) bool {
	return x.Binding.Evidence == api.EvidenceAggregateOnly || x.Facts != nil && x.Facts.Legacy
}

// Reference is the text that names exactly one manifest of a repository.
func Reference(registry string, h api.Held) string {
	return client.Reference{Host: registry, Repo: h.Repository, Digest: h.Digest}.String()
}

func held(b api.Binding) string {
	switch {
	case b.Aggregate.IsZero():
		return "-"
	case b.Held:
		return "held"
	}
	return "not held"
}

// note is what else a row says: links that are no more than names among it.
func note(x api.Artifact) string {
	var notes []string
	if disputed := made.Disputed(x); disputed != "" {
		notes = append(notes, "cannot tell: "+disputed)
	} else if x.Binding.Source != "" {
		notes = append(notes, "by "+shortened(x.Binding.Source))
	}
	if n := max(x.Bases, len(x.Bindings)); n > 1 && made.Disputed(x) == "" {
		text := fmt.Sprintf("rows of %d bases", n)
		for _, b := range x.Bindings {
			text += ", " + shortened(b.Aggregate.String())
		}
		notes = append(notes, text)
	}
	if x.MoreBindings && made.Disputed(x) == "" {
		notes = append(notes, "older statements about its base do not count")
	}
	if c := conflict(x); c != "" {
		notes = append(notes, c)
	}
	f := x.Facts
	switch {
	case f == nil:
	case f.Adapter != nil && f.Adapter.Parent != "":
		notes = append(notes, fmt.Sprintf("from adapter %q (weak: by name)", f.Adapter.Parent))
	case f.Eval != nil:
		if names := onAdapters(*f.Eval); len(names) > 0 {
			notes = append(notes, fmt.Sprintf("on adapter %s", strings.Join(names, ", ")))
		}
	case f.Statement != nil:
		notes = append(notes, fmt.Sprintf("%s, says %q", f.Statement.Type, f.Statement.By))
	}
	return strings.Join(notes, "; ")
}

// conflict says that the subject of an artifact, or a bind statement about it, names another base than the artifact does;
// empty: none does.
func conflict(x api.Artifact) string {
	if x.Facts == nil || x.Facts.Conflict == nil {
		return ""
	}
	c := x.Facts.Conflict
	return fmt.Sprintf("conflict: %s is of %s, but %s says %s", c.DerivedAt, c.Derived, c.ClaimedAt, c.Claimed)
}

// maxNames is how many names of adapters a row has.
const maxNames = 4

// onAdapters names the adapters that an eval ran on, and marks those that it knows by name only.
func onAdapters(e api.EvalFacts) (names []string) {
	strong := map[string]bool{}
	for _, r := range e.Runs {
		strong[r.Adapter] = strong[r.Adapter] || r.AdapterContent != ""
	}
	for _, name := range e.Adapters {
		switch {
		case name == "":
			continue
		case len(names) == maxNames:
			return append(names, "and more")
		case strong[name]:
			names = append(names, fmt.Sprintf("%q", name))
		default:
			names = append(names, fmt.Sprintf("%q (weak: by name)", name))
		}
	}
	return names
}

// shortened cuts the digest in a text of a kind and a digest.
func shortened(s string) string {
	what, digest, ok := strings.Cut(s, "sha256:")
	if !ok || len(digest) < 12 {
		return s
	}
	return what + "sha256:" + digest[:12]
}

const header = "KIND\tREFERENCE\tTAGS\tNAME\tEVIDENCE\tBASE\tCREATED\tNOTE"

func (o *Rows) head(title func() string) {
	if o.Count++; o.table == nil {
		return
	}
	if o.Count == 1 {
		fmt.Fprintln(o.table, title())
	}
	if o.archives {
		fmt.Fprintln(o.table, "\narchives: Kiln records without the full manifest of their base")
	}
	if o.Count == 1 || o.archives {
		fmt.Fprintln(o.table, header)
	}
	o.archives = false
}

func (o *Rows) row(kind api.Kind, h api.Held, name, evidence, base, note string) {
	tags := strings.Join(h.Tags, ",")
	if h.MoreTags {
		tags += ",..."
	}
	cells := []string{string(kind), Reference(o.registry, h), tags, name, evidence, base, moment(h.Created), note}
	for i, c := range cells {
		if cells[i] = client.Escape(c); c == "" {
			cells[i] = "-"
		}
	}
	fmt.Fprintln(o.table, strings.Join(cells, "\t"))
	o.pending++
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

func (o *Rows) encode(v any) {
	if o.err == nil {
		o.err = o.json.Encode(v)
	}
}

// Page ends a page of a listing: enough rows are written.
func (o *Rows) Page() error {
	if o.table != nil && o.pending < aligned {
		return nil
	}
	return o.Flush()
}

// Flush writes all rows.
func (o *Rows) Flush() error {
	o.pending = 0

	if o.table != nil {
		return o.table.Flush()
	}
	return o.err
}
