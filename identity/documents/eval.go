package documents

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Eval is an eval job, as Kiln archives it, or an eval result, as GET /v1/eval/jobs/{id} answers. Empty texts and nil
// pointers mean that the document does not record it.
type Eval struct {
	Job            bool // the shape: a job, else a result
	ID             string
	State          string   // queued, running, completed, failed or cancelled
	Suite          string   // suite_name of a job; the runs of a result have their own
	Adapters       []string // of a job, by name; an empty name is the base
	Submission     string   // submission_kind of a job: on_demand, post_training or compare
	Shards         identity.Manifest
	Provenance     *Provenance
	Seed           *uint64 // effective_seed
	SeedDerivation string
	Accuracy       *float64 // headline_accuracy of a job
	Failure        string   // error
	TrainingJob    string   // source_training_job_id of a job
	Submitted      string
	Started        string
	Finished       string
	Runs           []Run
}

// Final says whether the job has come to its end.
func (e Eval) Final() bool {
	return e.State == "completed" || e.State == "failed" || e.State == "cancelled"
}

// Run is one suite that was run on the base, or on one adapter.
type Run struct {
	Suite            string
	SuiteHash        string // opaque
	Adapter          string // a name, and only a name; empty: the base itself
	Aggregation      string // kind: single, mean_at_k, pass_at_k, majority_at_k; empty: not recorded
	K                *uint64
	Started          string
	Finished         string
	GenerationHash   string // effective_generation_hash, opaque
	Examples, Passed *uint64
	Accuracy         *float64 // as the document states it
	Replay           *Replay
	Outcomes         Tally
	Aggregated       Tally  // of the aggregated outcomes, one for each example
	Raw              []byte // the run, as it stands
}

// Tally counts outcomes by kind.
type Tally struct{ Pass, Fail, Invalid, Error uint64 }

// Total is the number of outcomes.
func (t Tally) Total() uint64 { return t.Pass + t.Fail + t.Invalid + t.Error }

func (t *Tally) add(kind string) {
	switch kind {
	case "pass":
		t.Pass++
	case "fail":
		t.Fail++
	case "invalid":
		t.Invalid++
	case "error":
		t.Error++
	}
}

// ParseEval reads an eval job or result of schema version 2, told apart by their shape. Members that it does not know
// are ignored. The error is an *Error.
func ParseEval(data []byte) (Eval, error) {
	e := evalText{}
	if err := read(KindEval, MaxEval, data, e.read); err != nil {
		if old := oldEval(data); old != nil {
			return Eval{}, old
		}
		return Eval{}, err
	}
	return e.Eval, nil
}

// oldEval says so if a text that was refused is an eval of a version that is not read. Such a text fails on the missing
// members of the newer version otherwise, which helps nobody.
func oldEval(data []byte) error {
	has, version := false, uint32(0)
	err := read(KindEval, MaxEval, data, func(r reader) error {
		return r.lenient(seen(optional(field{Name: "schema_version", Read: func() (err error) {
			version, err = r.Uint32()
			return err
		}}), &has))
	})
	if err != nil || has && version == 2 {
		return nil
	}
	said := "is missing"
	if has {
		said = fmt.Sprintf("is %d", version)
	}
	return &Error{Kind: KindEval, Rule: RuleSchemaVersion, Path: "$.schema_version",
		Msg: said + ", only 2 is read: what an older eval measured is ambiguous, so run it again"}
}

// evalText is an eval as it stands in JSON, before its shape is known.
type evalText struct {
	Eval
	suite, adapters, submission, progress, submitted, finished, runs bool
}

func (e *evalText) read(r reader) error {
	runs := func(i int) error {
		if i == maxEvalRuns {
			return r.tooMany(maxEvalRuns)
		}
		run, err := readRun(r)
		e.Runs = append(e.Runs, run)
		return err
	}
	var accuracy float64
	var hasAccuracy bool
	err := r.lenient(
		r.version(2),
		r.checked("job_id", RuleText, &e.ID, notBlank),
		r.oneOf("state", RuleValue, &e.State, "queued", "running", "completed", "failed", "cancelled"),
		r.base(&e.Shards),
		r.provenanceField(&e.Provenance),
		optional(r.decimal("effective_seed", &e.Seed)),
		optional(r.text("seed_derivation", &e.SeedDerivation)),
		seen(optional(r.text("suite_name", &e.Suite)), &e.suite),
		seen(optional(r.list("adapters", func(i int) error { return e.readAdapter(r, i) })), &e.adapters),
		seen(optional(r.oneOf("submission_kind", RuleValue, &e.Submission, "on_demand", "post_training", "compare")),
			&e.submission),
		seen(optional(r.object("progress", new([]byte))), &e.progress),
		seen(optional(r.list("finished_runs", runs)), &e.finished),
		seen(optional(r.list("runs", runs)), &e.runs),
		seen(optional(r.float("headline_accuracy", &accuracy)), &hasAccuracy),
		optional(r.text("error", &e.Failure)),
		optional(r.text("source_training_job_id", &e.TrainingJob)),
		seen(optional(r.text("submitted_at_iso", &e.Submitted)), &e.submitted),
		optional(r.text("started_at_iso", &e.Started)),
		optional(r.text("finished_at_iso", &e.Finished)))
	if err != nil {
		return err
	}
	if hasAccuracy {
		e.Accuracy = &accuracy
	}
	return e.shape()
}

// maxEvalRuns is how many runs an eval may have, and adapters.
const maxEvalRuns = 4096

func (r reader) tooMany(most int) error {
	return r.Fail(r.Offset(), RuleCount, "more than %d entries", most)
}

func (e *evalText) readAdapter(r reader, i int) (err error) {
	if i == maxEvalRuns {
		return r.tooMany(maxEvalRuns)
	}
	name := ""
	if r.Kind() == strictjson.Null {
		err = r.Skip()
	} else {
		name, err = r.String()
	}
	e.Adapters = append(e.Adapters, name)
	return err
}

// shape tells job from result, and checks that a job has what a job must have.
func (e *evalText) shape() error {
	switch {
	case e.finished == e.runs && e.runs:
		return fault("", RuleShape, "has finished_runs like a job and runs like a result")
	case !e.finished && !e.runs:
		return fault("", RuleShape, "has neither finished_runs like a job nor runs like a result")
	}
	e.Job = e.finished
	if !e.Job {
		return nil
	}
	for _, m := range []struct {
		name string
		has  bool
	}{
		{"suite_name", e.suite}, {"adapters", e.adapters}, {"submission_kind", e.submission}, {"progress", e.progress},
		{"submitted_at_iso", e.submitted},
	} {
		if !m.has {
			return fault(m.name, strictjson.RuleRequired, "is missing, which a job must have")
		}
	}
	return nil
}

func readRun(r reader) (Run, error) {
	var run Run
	var accuracy float64
	var hasAccuracy bool
	text, err := r.span(func() error {
		return r.lenient(
			r.text("suite_name", &run.Suite),
			optional(r.text("adapter", &run.Adapter)),
			optional(r.in("aggregation", r.text("kind", &run.Aggregation), r.whole("k", &run.K))),
			r.in("metrics",
				r.whole("num_examples", &run.Examples),
				r.whole("num_pass", &run.Passed),
				seen(optional(r.float("accuracy", &accuracy)), &hasAccuracy)),
			r.outcomes("outcomes", &run.Outcomes),
			optional(r.outcomes("aggregated_outcomes", &run.Aggregated)),
			r.text("started_at", &run.Started),
			r.text("finished_at", &run.Finished),
			r.text("suite_hash", &run.SuiteHash),
			optional(r.text("effective_generation_hash", &run.GenerationHash)),
			optional(field{Name: "replay_record", Read: func() (err error) { run.Replay, err = r.replay(); return err }}))
	})
	if hasAccuracy {
		run.Accuracy = &accuracy
	}
	run.Raw = text
	return run, err
}

// outcomes is a list of outcomes, which are checked and counted.
func (r reader) outcomes(name string, count *Tally) field {
	var id, kind string
	var seed *uint64
	fields := []field{
		r.text("example_id", &id),
		r.oneOf("kind", RuleValue, &kind, "pass", "fail", "invalid", "error"),
		optional(r.decimal("generation_seed", &seed)),
	}
	return r.list(name, func(int) error {
		err := r.lenient(fields...)
		count.add(kind)
		return err
	})
}

// Replay is what is read of a replay record (kiln.eval-replay.v1). Its digests are those of Kiln's own recipes over the
// suite and the completions; they are not recomputed. ManifestDigest is no aggregate.
type Replay struct {
	Adapter        string          // model_target.adapter; empty: the base itself
	AdapterContent identity.Digest // model_target.adapter_content_sha256; zero: the base itself
	Targeted       bool            // the record has a model_target
	Suite          identity.Digest // suite_sha256
	Generation     identity.Digest // effective_generation_sha256
	Completions    identity.Digest // raw_completion_set_sha256
	Provenance     identity.Digest // execution_provenance_sha256; zero: not recorded
	ManifestDigest identity.Digest // base_weight_manifest_sha256; zero: not recorded
	Record         identity.Digest // record_sha256
	Seed           *uint64         // effective_seed
}

func (r reader) replay() (*Replay, error) {
	p := new(Replay)
	err := r.Struct(
		optional(r.version(1)),
		r.constant("record_type", "kiln.eval-replay.v1"),
		optional(r.object("suite", new([]byte))),
		optional(r.skip("generation_override")),
		optional(r.decimal("effective_seed", &p.Seed)),
		optional(r.constant("seed_derivation", "kiln.eval-seed.v1")),
		optional(r.skip("resolved_thinking_budgets")),
		seen(optional(field{Name: "model_target", Read: func() (err error) {
			p.Adapter, p.AdapterContent, err = r.target()
			return err
		}}), &p.Targeted),
		optional(r.list("judge_targets", func(int) error { _, _, err := r.target(); return err })),
		optional(r.skip("scorer_identities")),
		optional(r.skip("raw_completions")),
		r.digest("suite_sha256", &p.Suite),
		r.digest("effective_generation_sha256", &p.Generation),
		r.digest("raw_completion_set_sha256", &p.Completions),
		optional(r.digest("execution_provenance_sha256", &p.Provenance)),
		optional(r.digest("base_weight_manifest_sha256", &p.ManifestDigest)),
		r.digest("record_sha256", &p.Record))
	return p, err
}

// target reads what was evaluated: the base, or an adapter with name and content.
func (r reader) target() (name string, content identity.Digest, err error) {
	at := r.Offset()
	var hasName, hasContent bool
	err = r.Struct(
		seen(optional(r.checked("adapter", RuleName, &name, notBlank)), &hasName),
		seen(optional(r.digest("adapter_content_sha256", &content)), &hasContent))
	if err == nil && hasName != hasContent {
		err = r.Fail(at, RuleAgreement, "must have both adapter and adapter_content_sha256, or neither for the base")
	}
	return name, content, err
}

// Base returns what e says about the base: a full manifest or nothing.
func (e Eval) Base() Binding { return fullBinding(KindEval, "$."+baseMember, e.Shards) }

// Identities returns the other identities that e records.
func (e Eval) Identities() Identities { return e.Provenance.Identities() }

// Score is one line of a table of evals.
type Score struct {
	Job            string
	Suite          string
	SuiteHash      string
	Adapter        string          // empty: the base itself
	AdapterContent identity.Digest // zero: known by name only, which is a weak link
	Aggregation    string          // how the tries at one example make its verdict; empty: not recorded
	K              uint64          // tries at one example; 0: not recorded
	Examples       uint64          // independent examples
	Passed         uint64
	Counted        bool     // how many passed is recorded, of one example at least
	Accuracy       float64  // Passed / Examples; 0 if it was not counted
	Low, High      float64  // the 95 % Wilson interval of Accuracy
	Stated         *float64 // the accuracy that the document states; nil: none
	Seed           *uint64
	Date           string // when the run finished
}

// Scores returns one line for each run, in the order of the document.
func (e Eval) Scores() []Score {
	var all []Score
	for _, run := range e.Runs {
		s := Score{Job: e.ID, Suite: run.Suite, SuiteHash: run.SuiteHash, Adapter: run.Adapter, Stated: run.Accuracy,
			Seed: e.Seed, Date: run.Finished, Aggregation: run.Aggregation}
		if run.K != nil {
			s.K = *run.K
		}
		if run.Replay != nil {
			s.AdapterContent = run.Replay.AdapterContent
		}
		s.Examples, s.Passed = run.counted()
		if s.Counted = s.Examples > 0; s.Counted {
			s.Accuracy = float64(s.Passed) / float64(s.Examples)
		}
		s.Low, s.High = Wilson(s.Passed, s.Examples)
		if !s.Counted && run.Examples != nil {
			s.Examples = *run.Examples
		}
		all = append(all, s)
	}
	return all
}

// counted returns how many independent examples the run has, and how many of them passed: as the metrics state it, else
// as the outcomes give it.
func (r Run) counted() (examples, passed uint64) {
	switch {
	case r.Examples != nil && r.Passed != nil && *r.Passed <= *r.Examples:
		return *r.Examples, *r.Passed
	case r.Aggregated.Total() > 0:
		return r.Aggregated.Total(), r.Aggregated.Pass
	}
	return r.Outcomes.Total(), r.Outcomes.Pass
}

// Wilson returns the 95 % Wilson score interval of passed out of n, from 0 to 1. Without examples it is 0 to 1: nothing
// is known.
func Wilson(passed, n uint64) (low, high float64) {
	if n == 0 {
		return 0, 1
	}
	const z = 1.959963984540054 // the 97.5 % point of the normal distribution
	p, m := float64(passed)/float64(n), float64(n)
	centre := p + z*z/(2*m)
	margin := z * math.Sqrt((p*(1-p)+z*z/(4*m))/m)
	scale := 1 + z*z/m
	return max(0, (centre-margin)/scale), min(1, (centre+margin)/scale)
}

const (
	maxBases      = 16      // that the rows of one outcome file may name
	maxRowMembers = 1 << 18 // of all objects of one row: some sixty times those of a manifest of 4,096 shards
)

// Outcomes is what is read of a file of outcome rows, one JSON object a line.
type Outcomes struct {
	Rows    uint64
	Unbound uint64              // rows without a full manifest
	Shards  []identity.Manifest // of the bases that the rows name, in the order of their first row
	first   []uint64            // the line of each
	rows    []uint64            // the number of rows of each
	at      int                 // the one that the last manifest names
}

// ParseOutcomes is ReadOutcomes for a text in memory.
func ParseOutcomes(data []byte) (Outcomes, error) { return ReadOutcomes(bytes.NewReader(data)) }

// ReadOutcomes reads outcome rows: a JSON object on each line that is not empty. The manifest of every row is checked;
// all other members are opaque. Memory does not grow with the number of rows, and a row has at most MaxDocument bytes
// and maxRowMembers members. An error of src is returned as it is;
// every other one is an *Error, whose path starts with the line.
func ReadOutcomes(src io.Reader) (Outcomes, error) {
	var o Outcomes
	lines := bufio.NewScanner(src)
	lines.Buffer(make([]byte, 0, 64<<10), MaxDocument+1)
	var last []byte // the manifest of the row before, which most rows repeat byte for byte
	n := uint64(0)
	for lines.Scan() {
		n++
		line := bytes.Trim(lines.Bytes(), " \t\r")
		if len(line) == 0 {
			continue
		}
		text, err := o.row(n, line, last)
		if err != nil {
			return Outcomes{}, atLine(err, n)
		}
		if text != nil {
			last = append(last[:0], text...)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return Outcomes{}, atLine(&Error{Kind: KindOutcomes, Rule: RuleInputSize, Path: "$",
			Msg: fmt.Sprintf("more than %d bytes", MaxDocument)}, n+1)
	case err != nil:
		return Outcomes{}, err
	case o.Rows == 0:
		return Outcomes{}, &Error{Kind: KindOutcomes, Rule: RuleCount, Path: "$", Msg: "there is no row"}
	}
	return o, nil
}

// row reads one row and returns the text of its manifest, nil if it has none.
func (o *Outcomes) row(n uint64, line, last []byte) (text []byte, err error) {
	var shards identity.Manifest
	err = read(KindOutcomes, MaxDocument, line, func(r reader) error {
		r.Limit(maxRowMembers)
		return r.lenient(field{Name: baseMember, Optional: true, Read: func() (err error) {
			at := r.Offset()
			if text, err = r.Raw(); err != nil || bytes.Equal(text, last) {
				return err
			}
			shards, err = identity.Parse(text)
			return inner(at, err)
		}})
	})
	if err != nil {
		return nil, err
	}
	o.Rows++
	if text == nil {
		o.Unbound++
		return nil, nil
	}
	return text, o.add(n, shards)
}

// add notes the base of a row, the one of the last manifest for a zero manifest.
func (o *Outcomes) add(n uint64, shards identity.Manifest) error {
	if !shards.Aggregate.IsZero() {
		o.at = slices.IndexFunc(o.Shards, shards.SameContent)
	}
	switch {
	case o.at >= 0:
		o.rows[o.at]++
		return nil
	case len(o.Shards) == maxBases:
		return &Error{Kind: KindOutcomes, Rule: RuleBases, Path: "$." + baseMember,
			Msg: fmt.Sprintf("the rows name more than %d bases", maxBases)}
	}
	o.at = len(o.Shards)
	o.Shards, o.first, o.rows = append(o.Shards, shards), append(o.first, n), append(o.rows, 1)
	return nil
}

// RowsOf returns how many rows name the base of Shards[i], and the line of the first of them.
func (o Outcomes) RowsOf(i int) (rows, line uint64) { return o.rows[i], o.first[i] }

// atLine puts the line in front of the path.
func atLine(err error, n uint64) error {
	if e, ok := errors.AsType[*Error](err); ok {
		e.Path = fmt.Sprintf("line %d %s", n, e.Path)
	}
	return err
}

// Bases returns one binding for each base that the rows name, empty if no row names one. A file is as strong as its
// weakest row: where some rows hold no full manifest, what the others name is a bare aggregate for the file.
func (o Outcomes) Bases() []Binding {
	var all []Binding
	for i, s := range o.Shards {
		b := fullBinding(KindOutcomes, fmt.Sprintf("line %d $.%s", o.first[i], baseMember), s)
		if o.Unbound > 0 {
			b.Evidence, b.Manifest = EvidenceAggregateOnly, identity.Manifest{}
		}
		all = append(all, b)
	}
	return all
}

// Of returns the binding to a base that the rows name, else that to the first of them. named is false if no row names
// any.
func (o Outcomes) Of(base identity.Aggregate) (b Binding, named bool) {
	all := o.Bases()
	for _, b := range all {
		if b.Aggregate == base {
			return b, true
		}
	}
	if len(all) == 0 {
		return Binding{Evidence: EvidenceNone}, false
	}
	return all[0], true
}
