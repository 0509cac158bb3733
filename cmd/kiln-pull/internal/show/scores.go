package show

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

// Score is one suite that was run on one model.
type Score struct {
	api.EvalRun
	Weak      bool      `json:"weak,omitempty"` // that it was this adapter is known by name only: another may be meant
	Evidence  string    `json:"evidence"`       // what the eval's base rests on
	Eval      string    `json:"eval"`           // its reference
	Name      string    `json:"name,omitempty"` // what the eval calls itself
	Published time.Time `json:"pushed_at,omitzero"`
	Disputed  string    `json:"disputed,omitempty"` // why statements about the eval's base decide nothing
}

// Adapter is the adapter whose scores are wanted. The zero Adapter is every one, and the base.
type Adapter struct {
	Name    string
	Weights identity.Digest // zero: not known
}

// ScoresOf returns the scores of an eval: all, or those of the runs on an adapter.
func ScoresOf(registry string, x api.Artifact, of Adapter) (scores []Score) {
	if x.Facts == nil || x.Facts.Eval == nil {
		return nil
	}
	for _, r := range x.Facts.Eval.Runs {
		scores = append(scores, RowOf(registry, x, &r, of)...)
	}
	return scores
}

// RowOf returns the score of one run of an eval, if there is a run and, where of names an adapter, it is on one of that
// name. It is weak where the run does not record the bytes of the adapter or, if one is wanted, those are not its weights.
func RowOf(registry string, x api.Artifact, r *api.EvalRun, of Adapter) []Score {
	if r == nil || of.Name != "" && r.Adapter != of.Name {
		return nil
	}
	weak := r.Adapter != "" && r.AdapterContent == "" ||
		of.Name != "" && (of.Weights.IsZero() || r.AdapterContent != of.Weights.String())
	return []Score{{
		EvalRun: *r, Weak: weak, Evidence: string(x.Binding.Evidence),
		Eval: Reference(registry, x.Held), Name: x.Name, Published: x.Created,
		Disputed: made.Disputed(x),
	}}
}

// EventOmitted is the event of Omitted.
const EventOmitted = "runs_omitted"

// Omitted says of an eval that the registry keeps more runs of it than it lists.
type Omitted struct {
	Event string `json:"event"` // runs_omitted
	Eval  string `json:"eval"`  // its reference
	Runs  int    `json:"runs_omitted"`
}

// OmittedOf says how many runs of an eval have no score in ScoresOf, whatever adapter they were on.
func OmittedOf(registry string, x api.Artifact) Omitted {
	o := Omitted{Event: EventOmitted, Eval: Reference(registry, x.Held)}
	if x.Facts != nil && x.Facts.Eval != nil {
		o.Runs = x.Facts.Eval.Omitted
	}
	return o
}

// WriteOmitted writes what a table leaves out, below it.
func WriteOmitted(w io.Writer, all []Omitted, asJSON bool) (err error) {
	for _, o := range all {
		if asJSON {
			err = errors.Join(err, json.NewEncoder(w).Encode(o))
			continue
		}
		_, e := fmt.Fprintf(w, "left out: %s of %s, which has too many; pull it to see them\n", cli.Count(o.Runs, "run"),
			client.Escape(o.Eval))
		err = errors.Join(err, e)
	}
	return err
}

// date is when a run finished or, where that is not recorded, when its eval was pushed.
func (s Score) date() time.Time {
	if !s.Finished.IsZero() {
		return s.Finished
	}
	return s.Published
}

// model names what a suite was run on.
func (s Score) model() string {
	switch {
	case s.Adapter == "":
		return "base"
	case s.Weak && s.AdapterContent != "":
		return fmt.Sprintf("%q (weak: by name; it records content %s)", s.Adapter, content(s.AdapterContent))
	case s.Weak:
		return fmt.Sprintf("%q (weak: by name)", s.Adapter)
	}
	return fmt.Sprintf("%q %s", s.Adapter, content(s.AdapterContent))
}

// aggregation says how the tries at one example make its verdict.
func (s Score) aggregation() string {
	if s.K == 0 {
		return s.Aggregation
	}
	return fmt.Sprintf("%s k=%d", s.Aggregation, s.K)
}

// accuracy is what the counts come to, and what the document states where that is something else.
func (s Score) accuracy() string {
	switch {
	case s.Accuracy == nil && s.Stated == nil:
		return ""
	case s.Accuracy == nil:
		return percent(*s.Stated) + " stated, not counted"
	case s.Stated != nil:
		return fmt.Sprintf("%s (stated: %s)", percent(*s.Accuracy), percent(*s.Stated))
	}
	return percent(*s.Accuracy)
}

// evidence is what the eval's base rests on, and that it can't be told where that is so.
func (s Score) evidence() string {
	if s.Disputed != "" {
		return s.Evidence + "; cannot tell: " + s.Disputed
	}
	return s.Evidence
}

// content is the beginning of a digest.
func content(digest string) string { return cut(strings.TrimPrefix(digest, "sha256:"), 12) }

func cut(s string, n int) string { return s[:min(n, len(s))] }

// Sort orders scores so that those which can be compared stand together: by suite, its content and how tries make a
// verdict, then by model, the newest first.
func Sort(scores []Score) {
	slices.SortFunc(scores, func(a, b Score) int {
		return cmp.Or(cmp.Compare(a.Suite, b.Suite), cmp.Compare(a.SuiteHash, b.SuiteHash),
			cmp.Compare(a.Aggregation, b.Aggregation), cmp.Compare(a.K, b.K), cmp.Compare(a.Adapter, b.Adapter),
			cmp.Compare(a.AdapterContent, b.AdapterContent), b.date().Compare(a.date()), cmp.Compare(a.Eval, b.Eval))
	})
}

// WriteScores writes sorted scores: as a table, or one JSON object a line.
func WriteScores(w io.Writer, scores []Score, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		for _, s := range scores {
			if err := e.Encode(s); err != nil {
				return err
			}
		}
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SUITE\tCONTENT\tMODEL\tAGGREGATION\tACCURACY\t95% INTERVAL\tEXAMPLES\tSEED\tDATE\tEVIDENCE\tEVAL")
	for _, s := range scores {
		interval := "-"
		if s.Low != nil && s.High != nil {
			interval = percent(*s.Low) + " to " + percent(*s.High)
		}
		cells := []string{
			s.Suite, cut(s.SuiteHash, 12), s.model(), s.aggregation(), s.accuracy(), interval, fmt.Sprint(s.Examples), s.Seed,
			s.date().UTC().Format(time.DateOnly), s.evidence(), s.Eval,
		}
		for i, c := range cells {
			if cells[i] = client.Escape(c); c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

func percent(v float64) string { return fmt.Sprintf("%.1f%%", 100*v) }
