package show

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

const evil = "x\x1b[2J\u202e\nforged"

func digest(name string) identity.Digest { return identity.Sum([]byte(name)) }

func artifactOf(kind api.Kind, name string) api.Artifact {
	return api.Artifact{
		Held: api.Held{Repository: "team/" + name, Digest: digest(name), Tags: []string{"v1"}}, Kind: kind, Name: name,
		Binding: api.Binding{Aggregate: identity.Aggregate(digest("base")), Evidence: api.EvidenceDocument, Held: true},
	}
}

// world is a graph of artifacts, as a registry would answer about it.
type world map[identity.Digest]api.Lineage

func (w world) add(kind api.Kind, name string) {
	w[digest(name)] = api.Lineage{Artifact: artifactOf(kind, name)}
}

// link says that one artifact names another one.
func (w world) link(relation, from, to string, weak bool) {
	a, b := w[digest(from)], w[digest(to)]
	x, y := a.Artifact, b.Artifact
	a.Parents = append(a.Parents, api.Link{Relation: relation, Weak: weak, Artifact: &y})
	w[digest(from)] = a
	b = w[digest(to)] // which may be the same one
	b.Children = append(b.Children, api.Link{Relation: relation, Weak: weak, Artifact: &x})
	w[digest(to)] = b
}

func (w world) links(_ context.Context, _ string, d identity.Digest) (api.Lineage, error) {
	l, ok := w[d]
	if !ok {
		return l, api.ErrManifestUnknown
	}
	return l, nil
}

func (w world) list(names ...string) (all []api.Artifact) {
	for _, n := range names {
		all = append(all, w[digest(n)].Artifact)
	}
	return all
}

// lines are the lines of a tree, with each reference cut to its repository.
func lines(t *testing.T, tree Tree) string {
	t.Helper()
	var b bytes.Buffer
	if err := tree.Write(&b, "host:1", false); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	for from := strings.Index(text, "@sha256:"); from >= 0; from = strings.Index(text, "@sha256:") {
		text = text[:from] + text[from+len("@sha256:")+64:]
	}
	return strings.NewReplacer("host:1/", "", identity.Aggregate(digest("base")).String(), "BASE").Replace(text)
}

func family() world {
	w := world{}
	w.add(api.KindAdapter, "one")
	w.add(api.KindAdapter, "two")
	w.add(api.KindReceipt, "receipt")
	w.add(api.KindCheckpoint, "step")
	w.add(api.KindEval, "eval")
	w.link(api.RelationParent, "two", "one", true)
	w.link(api.RelationReceipt, "one", "receipt", false)
	w.link(api.RelationOutput, "receipt", "one", false)
	w.link(api.RelationAdapter, "step", "two", false)
	w.link(api.RelationAdapter, "eval", "two", true)
	return w
}

func TestTreeOfBase(t *testing.T) {
	w := family()
	tree, err := OfBase(t.Context(), identity.Aggregate(digest("base")), w.list("eval", "receipt", "step", "two", "one"),
		false, w.links)
	if err != nil {
		t.Fatal(err)
	}
	want := `base BASE (held)
  used by
    adapter team/one "one" v1
      parent_adapter: adapter team/two "two" v1 (weak: by name)
        adapter: checkpoint team/step "step" v1
        adapter: eval team/eval "eval" v1 (weak: by name)
      output: receipt team/receipt "receipt" v1
`
	if got := lines(t, tree); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestTreeOfArtifact(t *testing.T) {
	w := family()
	l := w[digest("two")]
	l.Parents = append(l.Parents, api.Link{Relation: api.RelationParent, Digest: digest("gone")},
		api.Link{Relation: api.RelationParent, Name: evil, Weak: true})
	w[digest("two")] = l
	tree, err := OfArtifact(t.Context(), "team/two", digest("two"), w.links)
	if err != nil {
		t.Fatal(err)
	}
	want := `adapter team/two "two" v1
  made from
    base BASE (held), evidence document
    parent_adapter: adapter team/one "one" v1 (weak: by name)
    parent_adapter: ` + digest("gone").String() + ` (not held)
    parent_adapter: "x\x1b[2J\u202e\nforged" (not held) (weak: by name)
  used by
    adapter: checkpoint team/step "step" v1
    adapter: eval team/eval "eval" v1 (weak: by name)
`
	if got := lines(t, tree); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	var b bytes.Buffer
	if err := tree.Write(&b, "host:1", true); err != nil {
		t.Fatal(err)
	}
	var back struct {
		Event string
		Tree
	}
	if err := json.Unmarshal(b.Bytes(), &back); err != nil || back.Event != "tree" || len(back.From) != 3 ||
		len(back.Uses) != 2 {
		t.Errorf("%v, %s", err, b.String())
	}
	if _, err := OfArtifact(t.Context(), "team/none", digest("none"), w.links); err == nil {
		t.Error("a tree of nothing")
	}
}

// TestTreeOfDerived: a base shows what it was made from, and what was made of it.
func TestTreeOfDerived(t *testing.T) {
	w := world{}
	w.add(api.KindBase, "small")
	w.add(api.KindBase, "large")
	l := w[digest("small")]
	large, gone := w[digest("large")].Artifact, identity.Aggregate(digest("gone"))
	l.Parents = []api.Link{
		{Relation: api.RelationDerived, How: "quantize", Artifact: &large},
		{Relation: api.RelationDerived, How: "merge", Aggregate: gone},
	}
	w[digest("small")] = l
	tree, err := OfBase(t.Context(), identity.Aggregate(digest("base")), w.list("small"), false, w.links)
	if err != nil {
		t.Fatal(err)
	}
	want := `base BASE (held)
  made from
    derived_from (quantize): base team/large "large" v1
    derived_from (merge): base ` + gone.String() + ` (not held)
  used by
    base team/small "small" v1
`
	if got := lines(t, tree); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestTreeEnds: cycles, depth and size have an end, and all that is listed is shown once.
func TestTreeEnds(t *testing.T) {
	w := world{}
	for _, n := range []string{"a", "b", "c", "self"} {
		w.add(api.KindAdapter, n)
	}
	w.link(api.RelationParent, "a", "b", false)
	w.link(api.RelationParent, "b", "c", false)
	w.link(api.RelationParent, "c", "a", false)
	w.link(api.RelationParent, "self", "self", false)
	tree, err := OfBase(t.Context(), identity.Aggregate(digest("base")), w.list("a", "b", "c", "self"), true, w.links)
	if err != nil {
		t.Fatal(err)
	}
	got := lines(t, tree)
	for _, n := range []string{"a", "b", "c", "self"} {
		if strings.Count(got, `"`+n+`" v1`+"\n") != 1 {
			t.Errorf("%s is not shown once:\n%s", n, got)
		}
	}
	if strings.Count(got, "(shown above)") != 2 || !strings.Contains(got, "others") {
		t.Error(got)
	}

	chain := world{}
	names := []string{"0"}
	chain.add(api.KindAdapter, "0")
	for i := 1; i < 40; i++ {
		n := fmt.Sprint(i)
		names = append(names, n)
		chain.add(api.KindAdapter, n)
		chain.link(api.RelationParent, n, names[i-1], false)
	}
	if tree, err = OfArtifact(t.Context(), "team/39", digest("39"), chain.links); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, tree); strings.Count(got, "parent_adapter") != maxDepth || !strings.Contains(got, "(... and on)") {
		t.Error(got)
	}
	if tree, err = OfBase(t.Context(), identity.Aggregate{}, chain.list(names...), false, chain.links); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, tree); strings.Count(got, "team/39 ") == 0 || !strings.Contains(got, "base not recorded") {
		t.Error(got)
	}

	wide := world{}
	wide.add(api.KindAdapter, "root")
	for i := range 3 * maxNodes {
		n := fmt.Sprint("leaf", i)
		wide.add(api.KindEval, n)
		wide.link(api.RelationAdapter, n, "root", false)
	}
	asked := 0
	links := func(ctx context.Context, repo string, d identity.Digest) (api.Lineage, error) {
		asked++
		return wide.links(ctx, repo, d)
	}
	_, err = OfArtifact(t.Context(), "team/root", digest("root"), links)
	if err != nil || asked > maxNodes+1 {
		t.Errorf("%v, asked %d times", err, asked)
	}
}

func TestRows(t *testing.T) {
	base := identity.Aggregate(digest("base"))
	x := artifactOf(api.KindEval, "e")
	x.Name, x.Tags, x.MoreTags = evil, []string{evil}, true
	x.Facts = &api.Facts{Eval: &api.EvalFacts{Adapters: []string{"", "known", evil}, Runs: []api.EvalRun{
		{Adapter: "known", AdapterContent: "sha256:1"}, {Adapter: evil},
	}}}
	x.Binding.Held, x.Created = false, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	bound := artifactOf(api.KindAdapter, "bound")
	bound.Binding.Evidence, bound.Binding.Source = api.EvidenceAsserted, "statement "+digest("s").String()
	bound.Facts = &api.Facts{Adapter: &api.AdapterFacts{Parent: "p"}}
	old := artifactOf(api.KindCheckpoint, "old")
	old.Binding.Evidence = api.EvidenceAggregateOnly
	if Archive(x) || !Archive(old) || !Archive(api.Artifact{Facts: &api.Facts{Legacy: true}}) {
		t.Error("archives are not told apart")
	}
	write := func(asJSON bool) string {
		var b bytes.Buffer
		o := NewRows(&b, "host:1", asJSON)
		o.Base(identity.Summary{Aggregate: base, ShardCount: 2, TotalSize: 3000}, digest("p"), x.Held)
		o.Artifact(x)
		o.Artifact(bound)
		o.Archives()
		o.Artifact(old)
		if err := o.Flush(); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	got := write(false)
	if strings.ContainsFunc(strings.ReplaceAll(got, "\n", ""), api.Control) || strings.Contains(got, "\nforged") {
		t.Errorf("%q", got)
	}
	for _, want := range []string{
		"base " + base.String() + ": 2 shards, 3 kB\nKIND ", "packaging " + digest("p").Hex()[:12],
		`x\u001b[2J\u202e\u000aforged,...`, "document  not held  2026-01-02T03:04:05Z  on adapter \"known\", ",
		`forged" (weak: by name)`, "asserted  ",
		"by statement sha256:" + digest("s").Hex()[:12] + "; from adapter \"p\" (weak: by name)",
		"\n\narchives: ", "aggregate-only  held",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	for i, line := range strings.Split(strings.TrimSpace(write(true)), "\n") {
		var row struct {
			Reference string
			Archive   bool
			Binding   api.Binding
		}
		if err := json.Unmarshal([]byte(line), &row); err != nil || !strings.HasPrefix(row.Reference, "host:1/team/") ||
			row.Archive != (i == 3) {
			t.Errorf("%d: %v %s", i, err, line)
		}
	}
}

func TestScores(t *testing.T) {
	half, low, high := 0.5, 0.095, 0.905
	x := artifactOf(api.KindEval, "e")
	x.Created = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	day := func(d int) time.Time { return time.Date(2026, 1, d, 0, 0, 0, 0, time.UTC) }
	run := func(suite, adapter string, at time.Time) api.EvalRun {
		return api.EvalRun{Suite: suite, SuiteHash: "0123456789abcdef", Adapter: adapter, Examples: 4, Passed: 2,
			Accuracy: &half, Low: &low, High: &high, Seed: "17", Finished: at}
	}
	known := run("smoke", "known", day(3))
	known.AdapterContent = "sha256:" + strings.Repeat("ab", 32)
	x.Facts = &api.Facts{Eval: &api.EvalFacts{Runs: []api.EvalRun{
		run("smoke", "demo", day(1)), run("smoke", "demo", day(2)), run("smoke", "", day(1)), known,
		{Suite: evil, Examples: 0}, run("arc", "demo", day(1)),
	}}}
	scores := ScoresOf("host:1", x, Adapter{})
	if n := len(ScoresOf("host:1", x, Adapter{Name: "demo"})); n != 3 || len(scores) != 6 ||
		ScoresOf("h", api.Artifact{}, Adapter{}) != nil {
		t.Errorf("%d and %d scores", n, len(scores))
	}
	x.Facts.Eval.Omitted = 36
	var left bytes.Buffer
	for _, asJSON := range []bool{false, true} {
		if err := WriteOmitted(&left, []Omitted{OmittedOf("host:1", x)}, asJSON); err != nil {
			t.Fatal(err)
		}
	}
	if got := left.String(); !strings.HasPrefix(got, "left out: 36 runs of host:1/team/e@") ||
		!strings.Contains(got, `"runs_omitted":36}`) {
		t.Error(got)
	}
	Sort(scores)
	var b bytes.Buffer
	if err := WriteScores(&b, scores, false); err != nil {
		t.Fatal(err)
	}
	got := b.String()
	var rows [][]string
	for _, line := range strings.Split(strings.TrimSpace(got), "\n") {
		rows = append(rows, strings.Fields(line))
	}
	for i, want := range []string{"SUITE", "arc", "smoke", "smoke", "smoke", "smoke", `x\u001b[2J\u202e\u000aforged`} {
		if rows[i][0] != want {
			t.Errorf("row %d is %q", i, rows[i])
		}
	}
	for _, want := range []string{
		"smoke", "012345678 9", "base", `"demo" (weak: by name)`, `"known" abababababab`, "50.0%", "9.5% to 90.5%",
		"2026-01-02", "document", "host:1/team/e@" + digest("e").String(),
	} {
		if want = strings.ReplaceAll(want, "012345678 9", "0123456789ab "); !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Index(got, "2026-01-02") > strings.LastIndex(got, "2026-01-01") || !strings.Contains(got, "2026-03-01") {
		t.Error(got)
	}
	b.Reset()
	if err := WriteScores(&b, scores, true); err != nil || strings.Count(b.String(), "\n") != 6 ||
		strings.Count(b.String(), `"weak":true`) != 3 {
		t.Errorf("%v %s", err, b.String())
	}
}

// What a reader must know of a row: that statements or a subject speak of another base, and how many bases rows name.
func TestNotes(t *testing.T) {
	stated, rows, subject := artifactOf(api.KindAdapter, "s"), artifactOf(api.KindEval, "r"), artifactOf(api.KindAdapter, "c")
	stated.Binding.Evidence, stated.Binding.Source, stated.Bases = api.EvidenceAsserted, "statement "+digest("x").String(), 3
	rows.Bases = 2
	subject.Facts = &api.Facts{Conflict: &api.Conflict{Claimed: "sha256:a", ClaimedAt: "annotation", Derived: evil,
		DerivedAt: "subject sha256:b"}}
	var b bytes.Buffer
	out := NewRows(&b, "host:1", false)
	for _, x := range []api.Artifact{stated, rows, subject} {
		out.Artifact(x)
	}
	tree := Tree{Artifact: &subject, Uses: []Node{{Link: api.Link{Artifact: &stated}}}}
	if err := errors.Join(out.Flush(), tree.Write(&b, "host:1", false)); err != nil {
		t.Fatal(err)
	}
	got := b.String()
	for _, want := range []string{
		"asserted  ?     ", "cannot tell: bind statements disagree about its base: they name 3\n", "  rows of 2 bases\n",
		"  conflict: subject sha256:b is of x", "forged, but annotation says sha256:a\n", "(its subject is of another base)",
		"\n    conflict: subject sha256:b is of", `(its base can't be told)`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "\nforged") || strings.Contains(got, "\x1b") {
		t.Errorf("%q", got)
	}
}

// A score says how it was counted, and what the document states instead; an adapter is itself by its bytes alone.
func TestHowScoresAreCounted(t *testing.T) {
	half, most := 0.5, 0.9
	x := artifactOf(api.KindEval, "e")
	weights := digest("weights")
	x.Facts = &api.Facts{Eval: &api.EvalFacts{Runs: []api.EvalRun{
		{Suite: "a", Adapter: "sql", AdapterContent: weights.String(), Aggregation: "pass_at_k", K: 4, Examples: 10, Passed: 5,
			Accuracy: &half, Stated: &most},
		{Suite: "b", Adapter: "sql", AdapterContent: digest("others").String(), Aggregation: "single", Examples: 10, Stated: &half},
	}}}
	var b bytes.Buffer
	if err := WriteScores(&b, ScoresOf("host:1", x, Adapter{Name: "sql", Weights: weights}), false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`"sql" ` + weights.Hex()[:12] + " ", "  pass_at_k k=4  50.0% (stated: 90.0%)  ",
		`"sql" (weak: by name; it records content ` + digest("others").Hex()[:12] + ")  single  ",
		"  50.0% stated, not counted  -  ", "  10  ",
	} {
		squeezed := strings.Join(strings.Fields(b.String()), "  ")
		if !strings.Contains(squeezed, strings.Join(strings.Fields(want), "  ")) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if all := ScoresOf("host:1", x, Adapter{}); all[0].Weak || all[1].Weak {
		t.Errorf("%+v", all)
	}
}
