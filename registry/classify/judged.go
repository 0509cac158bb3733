package classify

import (
	"errors"
	"io"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// eval reads an eval: a job or result, or outcome rows.
func (m *made) eval() error {
	f, err := m.files.one(api.KindEval, ".json", rowsExt)
	if err != nil {
		return err
	}
	m.kiln = true
	if path.Ext(f.name) == rowsExt {
		return m.rows(f)
	}
	e, err := readAs(m, f, documents.MaxEval, documents.ParseEval)
	if err != nil {
		return err
	}
	m.docs.Eval = &e
	m.Facts.Name, m.Facts.Created = label(e.ID), words(e.Finished)
	if m.Facts.Created == "" {
		m.Facts.Created = words(e.Submitted)
	}
	m.claims = append(m.claims, said(f.name, e.Base()))
	m.identify(e.Identities(), identity.Digest{}, nil)
	facts := &api.EvalFacts{State: e.State, Suite: label(e.Suite)}
	m.Facts.Eval = facts
	for _, name := range e.Adapters[:min(len(e.Adapters), maxRuns)] {
		facts.Adapters = append(facts.Adapters, label(name))
	}
	runs := Runs(e)
	facts.Omitted = len(runs) - min(len(runs), maxRuns)
	facts.Runs = runs[:len(runs)-facts.Omitted]
	return nil
}

// Runs returns a line for each run of an eval.
func Runs(e documents.Eval) (all []api.EvalRun) {
	for _, s := range e.Scores() {
		all = append(all, run(s))
	}
	return all
}

// run is a line of a table of evals.
func run(s documents.Score) api.EvalRun {
	r := api.EvalRun{
		Suite: label(s.Suite), SuiteHash: words(s.SuiteHash), Adapter: label(s.Adapter), Examples: count(s.Examples),
		Passed: count(s.Passed), Aggregation: label(s.Aggregation), K: count(s.K),
	}
	if !s.AdapterContent.IsZero() {
		r.AdapterContent = s.AdapterContent.String()
	}
	if s.Counted {
		r.Accuracy, r.Low, r.High = &s.Accuracy, &s.Low, &s.High
	}
	if s.Stated != nil && (!s.Counted || math.Abs(*s.Stated-s.Accuracy) > 5e-4) {
		r.Stated = s.Stated
	}
	if s.Seed != nil {
		r.Seed = strconv.FormatUint(*s.Seed, 10)
	}
	if t, err := time.Parse(time.RFC3339, s.Date); err == nil {
		r.Finished = t.UTC()
	}
	return r
}

// rows reads outcome rows, row by row. Of several bases the first one stands for all where something else claims one.
func (m *made) rows(f file) error {
	if f.Size > documents.MaxEval {
		return tooLarge(f, documents.MaxEval)
	}
	r, err := m.blobs.Open(m.ctx, f.Digest, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	h := identity.NewHash()
	o, err := documents.ReadOutcomes(io.TeeReader(r, h))
	if err == nil && identity.DigestOf(h) != f.Digest {
		err = errors.Join(ErrDamaged, errors.New(f.name))
	}
	if err != nil {
		return refused(f.name, err)
	}
	m.Facts.Name, m.Facts.Eval = label(strings.TrimSuffix(f.name, rowsExt)), &api.EvalFacts{
		Rows: count(o.Rows), Unbound: count(o.Unbound),
	}
	m.docs.Outcomes, m.Facts.Legacy = &o, o.Unbound > 0
	bases := o.Bases()
	if len(bases) > 0 {
		m.claims = append(m.claims, said(f.name, bases[0]))
	}
	for i, b := range bases {
		if rows, line := o.RowsOf(i); len(bases) > 1 {
			m.Facts.Eval.Bases = append(m.Facts.Eval.Bases, api.EvalBase{Aggregate: b.Aggregate, Rows: count(rows),
				Line: count(line)})
		}
	}
	return nil
}

// statement reads a statement. Beside what it says itself nothing binds it: its subject is what it is about.
func (m *made) statement() error {
	f, err := m.files.one(api.KindStatement, ".json")
	if err != nil {
		return err
	}
	s, err := readAs(m, f, documents.MaxDocument, documents.ParseStatement)
	if err != nil {
		return err
	}
	m.Facts.Created = words(s.At)
	facts := &api.StatementFacts{Reason: words(s.Reason), By: words(s.By)}
	m.Facts.Statement = facts
	if b := s.Bind; b != nil {
		facts.Type, facts.Target, facts.Base = api.StatementBind, b.Artifact, b.Aggregate
		m.claims = append(m.claims, claim{api.EvidenceAsserted, b.Aggregate, f.name + " $.bind.base_aggregate_sha256"})
		return nil
	}
	d := s.Derived
	facts.Type, facts.How, facts.Tool = api.StatementDerived, string(d.How), words(d.Tool)
	facts.Target, facts.To = d.Target.Artifact, d.Target.Aggregate
	for _, source := range d.Sources {
		if source.Aggregate.IsZero() {
			facts.FromArtifacts = append(facts.FromArtifacts, source.Artifact)
		} else {
			facts.From = append(facts.From, source.Aggregate)
		}
	}
	const at = " $.derived_from.target"
	switch {
	case !facts.To.IsZero():
		m.claims = append(m.claims, claim{api.EvidenceAsserted, facts.To, f.name + at})
	case !m.Claim.IsZero():
		return disagree(api.CodeAggregateConflict, m.Claim.String(), annotated(m.Claim).at, d.Target.String(), f.name+at)
	}
	return nil
}
