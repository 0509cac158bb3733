package resume

import (
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// Comparison is how another identity compares: yes, no, or cannot tell because one side does not record it.
type Comparison struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Reason  string  `json:"reason"`
}

// Answer answers one question about the bytes of a base.
type Answer struct {
	Question  string             `json:"question"`
	Verdict   Verdict            `json:"verdict"`
	Reason    string             `json:"reason"`
	Evidence  documents.Evidence `json:"evidence,omitempty"` // what the artifact's binding rests on
	Others    []Comparison       `json:"others,omitempty"`   // the other identities; they do not change the verdict
	NotProven string             `json:"not_proven"`
}

// Made is what an artifact records of what it was made from.
type Made struct {
	Binding    documents.Binding // of its document, or of all its claims joined
	Identities documents.Identities
	Request    string // what was asked for, such as data and mode, or suite and seed; empty: not recorded
	Lineage    string // what it comes from beside the base, such as its parent adapter; empty: not recorded
	// Rows and Unbound count the rows of an export of outcomes, and those of them that name no base.
	Rows, Unbound uint64
}

// MadeAdapter is what an adapter records. The receipt adds what the manifest leaves out; nil: there is none.
func MadeAdapter(m documents.AdapterManifest, receipt *documents.Receipt) Made {
	made := Made{Binding: m.Base(), Identities: m.Identities(), Lineage: m.Parent}
	data := m.TrainingData
	if r := receipt; r != nil {
		if made.Binding.Evidence != documents.EvidenceDocument {
			made.Binding = r.Base()
		}
		made.Identities = fill(made.Identities, r.Identities())
		if data.IsZero() {
			data = r.TrainingData
		}
		if !r.Parent.Weights.IsZero() {
			made.Lineage = r.Parent.Weights.String()
		}
	}
	if !data.IsZero() {
		made.Request = "training data " + data.String()
	}
	return made
}

// MadeEval is what an eval records, of one of its runs; nil: of the eval as a whole.
func MadeEval(e documents.Eval, run *documents.Run) Made {
	made := Made{Binding: e.Base(), Identities: e.Identities()}
	if e.Seed != nil {
		made.Request = fmt.Sprintf("seed %d", *e.Seed)
	}
	if run == nil {
		return made
	}
	if run.SuiteHash != "" {
		made.Request = joined("suite "+quote(run.SuiteHash), made.Request)
	}
	switch {
	case run.Replay != nil && !run.Replay.AdapterContent.IsZero():
		made.Lineage = "adapter content " + run.Replay.AdapterContent.String()
	case run.Adapter != "":
		made.Lineage = "adapter named " + quote(run.Adapter)
	}
	return made
}

func joined(a, b string) string {
	if b == "" {
		return a
	}
	return a + ", " + b
}

// fill returns a with what only b records.
func fill(a, b documents.Identities) documents.Identities {
	for _, n := range names {
		if to := n.of(&a); to.IsZero() {
			*to = *n.of(&b)
		}
	}
	return a
}

// names are the other identities in the order in which answers list them.
var names = []struct {
	name string
	of   func(*documents.Identities) *identity.Digest
}{
	{"model config", func(i *documents.Identities) *identity.Digest { return &i.ModelConfig }},
	{"tokenizer vocabulary", func(i *documents.Identities) *identity.Digest { return &i.TokenizerVocab }},
	{"tokenizer config", func(i *documents.Identities) *identity.Digest { return &i.TokenizerConfig }},
	{"chat template", func(i *documents.Identities) *identity.Digest { return &i.ChatTemplate }},
	{"training chat template", func(i *documents.Identities) *identity.Digest { return &i.TrainingTemplate }},
	{"execution provenance", func(i *documents.Identities) *identity.Digest { return &i.Provenance }},
}

// Here is what an artifact is compared with. Identities that are not known stay zero.
type Here struct {
	Base       Base
	Identities documents.Identities
	Request    string // to compare with that of the artifact; empty: not given
	Lineage    string // likewise
}

// SameWeights says whether two bases have the same multiset of shard bytes, whatever the files are called.
func SameWeights(a, b Base) Answer {
	out := Answer{Question: "same base weights", Verdict: CannotTell, NotProven: NotProven}
	x, y := a.aggregate(), b.aggregate()
	for _, side := range []struct {
		name string
		b    Base
	}{{"first", a}, {"second", b}} {
		if fault := side.b.check(); fault != "" {
			out.Reason = fmt.Sprintf("the %s base has no valid manifest: %s", side.name, fault)
			return out
		}
		if side.b.aggregate().IsZero() {
			out.Reason = fmt.Sprintf("the %s base has no known identity", side.name)
			return out
		}
	}
	out.Verdict, out.Reason = No, fmt.Sprintf("the aggregate is %v in the first, %v in the second", x, y)
	if x == y {
		out.Verdict, out.Reason = sameBase(a, b)
	}
	return out
}

// sameBase is the answer where both aggregates are equal.
func sameBase(a, b Base) (Verdict, string) {
	x, y := a.summary(), b.summary()
	switch {
	case !sameCounts(x, y):
		return CannotTell,
			fmt.Sprintf("both name the aggregate %v, but one says %d shards with %d bytes and the other %d with %d",
				x.Aggregate, x.ShardCount, x.TotalSize, y.ShardCount, y.TotalSize)
	case !a.full() || !b.full():
		return Yes, fmt.Sprintf("the aggregate is %v in both; the shards were not seen on both sides", x.Aggregate)
	}
	return Yes, fmt.Sprintf("the aggregate is %v in both, over the same %d shards", x.Aggregate, x.ShardCount)
}

// AdapterTrained says whether an adapter was trained from these bytes.
func AdapterTrained(adapter Made, here Here) Answer {
	return made("adapter trained from these bytes", adapter, here)
}

// EvalUsed says whether an eval used these bytes.
func EvalUsed(eval Made, here Here) Answer { return made("eval used these bytes", eval, here) }

func made(question string, m Made, here Here) Answer {
	out := Answer{Question: question, Evidence: m.Binding.Evidence, NotProven: NotProven}
	if out.Evidence == "" {
		out.Evidence = documents.EvidenceNone
	}
	if out.Verdict, out.Reason = fromBase(m.Binding, here.Base); out.Verdict == No && m.Unbound > 0 && m.Unbound < m.Rows {
		out.Verdict, out.Reason = CannotTell, fmt.Sprintf(
			"%d of the %d rows of the file name no base, and may have used this one; no other row has", m.Unbound, m.Rows)
	}
	for _, n := range names {
		text := func(i *documents.Identities) string {
			if d := n.of(i); !d.IsZero() {
				return d.String()
			}
			return ""
		}
		out.Others = append(out.Others, other(n.name, text(&m.Identities), text(&here.Identities)))
	}
	out.Others = append(out.Others, other("request", m.Request, here.Request), other("lineage", m.Lineage, here.Lineage))
	return out
}

// fromBase compares the base that an artifact names with the one at hand.
func fromBase(b documents.Binding, here Base) (Verdict, string) {
	is, fault := here.aggregate(), here.check()
	switch {
	case b.Aggregate.IsZero():
		return CannotTell, "the artifact does not record its base; its name is no identity"
	case is.IsZero():
		return CannotTell, fmt.Sprintf("the artifact's base is %v, and no base was given to compare with", b.Aggregate)
	case fault != "":
		return CannotTell, "this base has no valid manifest: " + fault
	case is != b.Aggregate:
		return No, fmt.Sprintf("the artifact's base is %v (%s), this base is %v", b.Aggregate, b.Where(), is)
	case b.Evidence == documents.EvidenceAsserted:
		return CannotTell, fmt.Sprintf("the base is %v in both, but for the artifact that is only asserted (%s)", is,
			b.Where())
	case b.Evidence != documents.EvidenceDocument:
		return CannotTell, fmt.Sprintf("the base is %v in both, but the artifact, or a row of it, does not record its shards (%s)",
			is, b.Where())
	}
	return sameBase(Base{Manifest: b.Manifest}, here)
}

// other compares another identity where both sides record it.
func other(name, artifact, here string) Comparison {
	c := Comparison{Name: name, Verdict: CannotTell}
	switch {
	case artifact == "" && here == "":
		c.Reason = "not recorded on either side"
	case artifact == "":
		c.Reason = fmt.Sprintf("not recorded by the artifact; %s here", here)
	case here == "":
		c.Reason = fmt.Sprintf("%s in the artifact; not recorded here", artifact)
	case artifact == here:
		c.Verdict, c.Reason = Yes, fmt.Sprintf("%s in both", artifact)
	default:
		c.Verdict, c.Reason = No, fmt.Sprintf("%s in the artifact, %s here", artifact, here)
	}
	return c
}
