package classify

import (
	"encoding/json"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Limits on what is kept of documents, so that facts stay within MaxFacts.
const (
	MaxFacts  = 64 << 10 // bytes of the JSON
	maxRuns   = 64       // runs of an eval, and adapters of one
	maxLabel  = 255      // bytes of a name
	maxWords  = 512      // bytes of a text
	maxListed = 32       // texts of a list
	maxPacked = 8        // names of layers that are packed
	maxLinks  = 256
)

// Link is something that an artifact names.
type Link struct {
	Relation  string             // one of the relations of package api
	Digest    identity.Digest    // the content that is named: a blob's or a manifest's
	Aggregate identity.Aggregate // the base that is named
	Name      string             // the adapter that is named, among those of the same base: another one may be meant
}

// Links returns what an artifact of a kind names, as its facts have it: by content where they give it, else by name. A
// checkpoint gives both, as the content of its weights is seldom that of an adapter. An adapter and a receipt also name
// their own bytes, by which others name them.
func Links(kind api.Kind, f api.Facts) (links []Link) {
	add := func(l Link) {
		if len(links) < maxLinks && (!l.Digest.IsZero() || !l.Aggregate.IsZero() || l.Name != "") {
			links = append(links, l)
		}
	}
	if a := f.Adapter; a != nil {
		add(Link{Relation: api.RelationContent, Digest: a.Weights})
		add(Link{Relation: api.RelationReceipt, Digest: a.Receipt})
		if f.Receipt == nil || f.Receipt.Start.IsZero() {
			add(Link{Relation: api.RelationParent, Name: label(parentName(a.Parent))})
		}
	}
	if r := f.Receipt; r != nil {
		add(Link{Relation: api.RelationParent, Digest: r.Start})
		if kind == api.KindReceipt {
			add(Link{Relation: api.RelationContent, Digest: r.Digest})
			add(Link{Relation: api.RelationOutput, Digest: r.Output})
		}
	}
	if c := f.Checkpoint; c != nil {
		add(Link{Relation: api.RelationAdapter, Digest: c.Weights})
		add(Link{Relation: api.RelationAdapter, Name: f.Name})
	}
	if e := f.Eval; e != nil {
		evalLinks(e, add)
	}
	if s := f.Statement; s != nil {
		add(Link{Relation: api.RelationStatement, Digest: s.Target})
		add(Link{Relation: api.RelationStatement, Aggregate: s.To})
		for _, a := range s.From {
			add(Link{Relation: api.RelationDerived, Aggregate: a})
		}
		for _, d := range s.FromArtifacts {
			add(Link{Relation: api.RelationDerived, Digest: d})
		}
	}
	return links
}

// evalLinks adds the adapters of an eval, each once.
func evalLinks(e *api.EvalFacts, add func(Link)) {
	named := map[string]bool{}
	for _, r := range e.Runs {
		content, err := identity.ParseDigest(r.AdapterContent)
		if err != nil {
			content = identity.Digest{}
		}
		key := r.Adapter + "\x00" + r.AdapterContent
		switch {
		case r.Adapter == "" && content.IsZero() || named[key]:
		case content.IsZero():
			add(Link{Relation: api.RelationAdapter, Name: r.Adapter})
		default:
			add(Link{Relation: api.RelationAdapter, Digest: content, Name: r.Adapter})
		}
		named[key], named[r.Adapter] = true, true
	}
	for _, name := range e.Adapters {
		if name != "" && !named[name] {
			add(Link{Relation: api.RelationAdapter, Name: name})
		}
		named[name] = true
	}
}

// label returns a name as it is kept: cut, and without what could make a listing show something else. Equal names stay
// equal.
func label(s string) string { return cut(s, maxLabel) }

// words is label for a longer text.
func words(s string) string { return cut(s, maxWords) }

func cut(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if api.Control(r) {
			return utf8.RuneError
		}
		return r
	}, s)
	for len(s) > most {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}

// some returns the first texts of a list.
func some(list []string) (out []string) {
	for _, s := range list[:min(len(list), maxListed)] {
		out = append(out, label(s))
	}
	return out
}

// count is a number of things as answers give it.
func count(n uint64) int { return int(min(n, math.MaxInt32)) }

// bounded returns the facts without so many runs and texts of lists that they would be longer than MaxFacts.
func bounded(f api.Facts) api.Facts {
	for {
		b, err := json.Marshal(f)
		if err != nil || len(b) <= MaxFacts {
			return f
		}
		switch e, a := f.Eval, f.Adapter; {
		case e != nil && len(e.Runs) > 0:
			less := *e
			less.Runs = e.Runs[:len(e.Runs)/2]
			less.Omitted += len(e.Runs) - len(less.Runs)
			f.Eval = &less
		case e != nil && len(e.Adapters) > 0:
			less := *e
			less.Adapters = e.Adapters[:len(e.Adapters)/2]
			f.Eval = &less
		case a != nil && len(a.Modules)+len(a.Saved) > 0:
			less := *a
			less.Modules, less.Saved = a.Modules[:len(a.Modules)/2], a.Saved[:len(a.Saved)/2]
			f.Adapter = &less
		default:
			return f
		}
	}
}
