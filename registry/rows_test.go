package registry_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// Rows of several bases are found under each of them, with what is of that base.
func TestRowsOfTwoBases(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		a, b := shardsOf(t, f.server, f.a), shardsOf(t, f.server, f.b)
		rows := slices.Concat(testartifact.Row("1", a), testartifact.Row("2", b), testartifact.Row("3", b))
		d := f.made("lab/both", "v1", api.ArtifactTypeEval, []desc{f.titled("lab/both", "both.jsonl", rows)}, nil)
		nowhere := identity.Aggregate(identity.Sum([]byte("nowhere")))
		ask := func() {
			for _, c := range []struct {
				base          identity.Aggregate
				rows          int
				verdict, says string
			}{
				{f.a, 1, api.VerdictYes, "rows of 2 bases: 1 of its 3 rows are of this one, the first in line 1"},
				{f.b, 2, api.VerdictYes, "rows of 2 bases: 2 of its 3 rows are of this one, the first in line 2"},
				{nowhere, 0, api.VerdictNo, "rows of 2 bases: 1 of " + f.a.String() + ", 2 of " + f.b.String()},
			} {
				at := slices.IndexFunc(f.pages(api.PathArtifacts(c.base)+"?kind=eval", 2), func(x api.Artifact) bool {
					return x.Digest == d && x.Bases == 2 && x.Binding.Aggregate == c.base && x.Binding.Held &&
						x.Binding.Evidence == api.EvidenceDocument
				})
				if (at >= 0) != (c.rows > 0) {
					t.Errorf("found under %s: %v", c.base, at >= 0)
				}
				seen := 0
				for line := range bytes.Lines(f.want(200, "GET", api.PathEvals(c.base), nil).body) {
					var row api.EvalRow
					if err := json.Unmarshal(line, &row); err != nil {
						t.Fatal(err)
					}
					if row.Digest != d {
						continue
					}
					if seen++; row.Rows != c.rows || row.Binding.Aggregate != c.base || row.Manifest == nil ||
						row.Manifest.Aggregate != c.base || len(row.Bindings) != 2 || row.Bindings[1].Aggregate != f.b {
						t.Errorf("%s", line)
					}
				}
				if seen != min(c.rows, 1) {
					t.Errorf("%d rows of evals of %s", seen, c.base)
				}
				got, answer := f.ask(used("lab/both:v1", &api.Side{Aggregate: c.base}, nil))
				if c.rows == 0 && !strings.Contains(got.Reasons[0], "(both.jsonl line 1 $.base_weight_shard_manifest)") {
					t.Error(answer)
				}
				if got.Verdict != c.verdict || len(got.Reasons) != 2 || !strings.Contains(got.Reasons[1], c.says) {
					t.Error(answer)
				}
			}
			l := get[api.Lineage](f.server, api.PathLineage(d))
			if x := l.Artifact; x.Bases != 2 || len(x.Bindings) != 2 || x.Bindings[0].Aggregate != f.a ||
				x.Bindings[1].Aggregate != f.b || !x.Bindings[1].Held || x.MoreBindings || len(x.Facts.Eval.Bases) != 2 {
				t.Errorf("%+v", l)
			}
		}
		ask()
		before := f.export()
		if !strings.Contains(before, `"further_bases":["`+f.b.String()) || f.reindexed("rows of two bases") != before {
			t.Error("another export")
		}
		ask()
		// A subject and a bind statement that name one of the two agree; one that names a third base is refused.
		f.made("team/quant", "both", api.ArtifactTypeEval, []desc{f.titled("team/quant", "both.jsonl", rows)},
			map[string]any{"subject": map[string]any{"mediaType": manifestType, "digest": f.quant, "size": 1}})
		f.statement("lab/both", documents.Statement{Bind: &documents.Bind{Artifact: d, Aggregate: f.b}})
		st, err := documents.Statement{Bind: &documents.Bind{Artifact: d, Aggregate: nowhere}, Reason: "r", By: "b",
			At: "2026-01-02T03:04:05Z"}.Document()
		if err != nil {
			t.Fatal(err)
		}
		m := f.manifest("lab/both", []desc{f.titled("lab/both", "s.json", st)},
			map[string]any{"artifactType": api.ArtifactTypeStatement})
		if a := f.put("lab/both", "s", m); a.status != 400 {
			t.Error(a)
		}
		ask()
		f.want(202, "DELETE", api.PathManifest("lab/both", d.String()), nil)
		for _, base := range []identity.Aggregate{f.a, f.b} {
			for _, x := range f.pages(api.PathArtifacts(base)+"?kind=eval", 10) {
				if x.Digest == d && x.Repository == "lab/both" {
					t.Errorf("still under %s", base)
				}
			}
		}
	})
}

// A row that names no base may have used any: then no base is ruled out, however many the other rows name.
func TestRowsWithoutBase(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		a, b := shardsOf(t, f.server, f.a), shardsOf(t, f.server, f.b)
		c, err := identity.New([]identity.Shard{{Filename: "c.safetensors", Size: 9, Digest: identity.Sum([]byte("c"))}})
		if err != nil {
			t.Fatal(err)
		}
		nowhere := &api.Side{Aggregate: identity.Aggregate(identity.Sum([]byte("nowhere")))}
		open := testartifact.Row("0", nil)
		of := func(all ...*identity.Manifest) (rows []byte) {
			for _, base := range all {
				rows = slices.Concat(rows, testartifact.Row("1", base), testartifact.Row("2", base))
			}
			return rows
		}
		for name, q := range map[string]struct {
			rows          []byte
			verdict, says string
		}{
			"three": {slices.Concat(of(a, b, &c), open), api.VerdictCannotTell, "1 of the 7 rows of the file name no base"},
			"one":   {slices.Concat(open, of(a), open), api.VerdictCannotTell, "2 of the 4 rows of the file name no base"},
			"bound": {of(a, b, &c), api.VerdictNo, "rows of 3 bases"},
		} {
			repo := "lab/" + name
			f.made(repo, "v1", api.ArtifactTypeEval, []desc{f.titled(repo, "o.jsonl", q.rows)}, nil)
			got, answer := f.ask(used(repo+":v1", nowhere, nil))
			if got.Verdict != q.verdict || !strings.Contains(strings.Join(got.Reasons, "\n"), q.says) || len(got.Derived) > 0 {
				t.Errorf("%s: %v", name, answer)
			}
		}
	})
}

// An eval about which bind statements disagree is no plain fact of either base: its rows have both bindings, with what
// says so.
func TestRowsOfDisputedEval(t *testing.T) {
	everywhere(t, func(t *testing.T, f *family) {
		d := f.made("lab/open", "v1", api.ArtifactTypeEval,
			[]desc{f.titled("lab/open", "e.json", testartifact.Eval("e", "sql", nil))}, nil)
		for _, base := range []identity.Aggregate{f.a, f.b} {
			f.statement("lab/open", documents.Statement{Bind: &documents.Bind{Artifact: d, Aggregate: base}})
		}
		for _, base := range []identity.Aggregate{f.a, f.b} {
			seen := 0
			for line := range bytes.Lines(f.want(200, "GET", api.PathEvals(base), nil).body) {
				var row api.EvalRow
				if err := json.Unmarshal(line, &row); err != nil {
					t.Fatal(err)
				}
				if row.Digest != d {
					continue
				}
				if seen++; len(row.Bindings) != 2 || row.Bindings[0].Source == "" || row.Bindings[1].Source == "" {
					t.Errorf("%s", line)
				}
			}
			if seen != 1 {
				t.Errorf("%d rows under %s", seen, base)
			}
		}
	})
}
