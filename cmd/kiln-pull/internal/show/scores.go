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
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// Score is one suite that was run on one model.
type Score struct {
	api.EvalRun
	Weak      bool      `json:"weak,omitempty"` // the adapter is known by name only: another one may be meant
	Evidence  string    `json:"evidence"`       // what the eval's base rests on
	Eval      string    `json:"eval"`           // its reference
	Name      string    `json:"name,omitempty"` // what the eval calls itself
	Published time.Time `json:"pushed_at,omitzero"`
}

// ScoresOf returns the scores of an eval. Of is the name of an adapter, to return only the runs on that; empty: all.
func ScoresOf(registry string, x api.Artifact, of string) (scores []Score) {
	if x.Facts == nil || x.Facts.Eval == nil {
		return nil
	}
	for _, r := range x.Facts.Eval.Runs {
		scores = append(scores, RowOf(registry, x, &r, of)...)
	}
	return scores
}

// RowOf returns the score of one run of an eval, if there is a run and, where of names an adapter, it is on that.
func RowOf(registry string, x api.Artifact, r *api.EvalRun, of string) []Score {
	if r == nil || of != "" && r.Adapter != of {
		return nil
	}
	return []Score{{
		EvalRun: *r, Weak: r.Adapter != "" && r.AdapterContent == "", Evidence: string(x.Binding.Evidence),
		Eval: Reference(registry, x.Held), Name: x.Name, Published: x.Created,
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
	case s.Weak:
		return fmt.Sprintf("%q (weak: by name)", s.Adapter)
	}
	return fmt.Sprintf("%q %s", s.Adapter, cut(strings.TrimPrefix(s.AdapterContent, "sha256:"), 12))
}

func cut(s string, n int) string { return s[:min(n, len(s))] }

// Sort orders scores so that those which can be compared stand together: by suite and its content, then by model, the
// newest first.
func Sort(scores []Score) {
	slices.SortFunc(scores, func(a, b Score) int {
		return cmp.Or(cmp.Compare(a.Suite, b.Suite), cmp.Compare(a.SuiteHash, b.SuiteHash), cmp.Compare(a.Adapter, b.Adapter),
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
	fmt.Fprintln(t, "SUITE\tCONTENT\tMODEL\tACCURACY\t95% INTERVAL\tEXAMPLES\tSEED\tDATE\tEVIDENCE\tEVAL")
	for _, s := range scores {
		accuracy, interval := "-", "-"
		if s.Accuracy != nil {
			accuracy = percent(*s.Accuracy)
		}
		if s.Low != nil && s.High != nil {
			interval = percent(*s.Low) + " to " + percent(*s.High)
		}
		cells := []string{
			s.Suite, cut(s.SuiteHash, 12), s.model(), accuracy, interval, fmt.Sprint(s.Examples), s.Seed,
			s.date().UTC().Format(time.DateOnly), s.Evidence, s.Eval,
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
