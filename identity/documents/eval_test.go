package documents

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

const hash = "sha256:6666666666666666666666666666666666666666666666666666666666666666"

// aRun is a run as Kiln's contract gives one.
const aRun = `{"suite_name":"math-smoke","adapter":null,"aggregation":{"kind":"single"},"metrics":{"num_examples":2,` +
	`"num_completions":2,"num_pass":1,"num_fail":1,"num_invalid":0,"num_error":0,"accuracy":0.5,"latency":{}},` +
	`"aggregated_outcomes":[{"example_id":"a","kind":"pass","score":1.0},{"example_id":"b","kind":"fail","score":0.0}],` +
	`"outcomes":[{"example_id":"a","completion_index":0,"generation_seed":"43","kind":"pass","score":1.0},` +
	` {"example_id":"b","completion_index":0,"generation_seed":44,"kind":"fail","score":0} ],` +
	`"started_at":"2026-07-14T12:00:00Z","finished_at":"2026-07-14T12:00:01Z","suite_hash":"` + hash + `"}`

const aReplay = `{"schema_version":1,"record_type":"kiln.eval-replay.v1","suite":{"name":"x","more":[]},` +
	`"effective_seed":"7","seed_derivation":"kiln.eval-seed.v1","resolved_thinking_budgets":[],"model_target":` +
	`{"adapter":"demo","adapter_content_sha256":"` + hash + `"},"scorer_identities":[],"raw_completions":[],` +
	`"suite_sha256":"` + hash + `","effective_generation_sha256":"` + hash + `","raw_completion_set_sha256":"` + hash +
	`","base_weight_manifest_sha256":"` + hash + `","record_sha256":"` + hash + `"}`

func withRun(t testing.TB, run string) []byte {
	return edit(t, example(t, "eval_result.json"), `"runs":[]`, `"runs":[`+run+`]`)
}

func TestEvalExamples(t *testing.T) {
	job, err := ParseEval(example(t, "eval_job.json"))
	if err != nil {
		t.Fatal(err)
	}
	if !job.Job || job.ID != "eval-1" || job.Suite != "smoke" || !slices.Equal(job.Adapters, []string{"", "demo"}) ||
		job.Submission != "compare" || *job.Seed != 17 || job.State != "cancelled" || !job.Final() || job.Accuracy != nil ||
		job.Submitted != "2026-01-02T03:04:05+00:00" || job.Finished != "2026-01-02T03:04:06+00:00" || job.Scores() != nil {
		t.Errorf("%+v", job)
	}
	result, err := ParseEval(example(t, "eval_result.json"))
	if err != nil {
		t.Fatal(err)
	}
	if result.Job || result.ID != "eval-1" || result.SeedDerivation != "kiln.eval-seed.v1" || *result.Seed != 17 {
		t.Errorf("%+v", result)
	}
}

// An eval has as many runs and adapters as somebody makes, not as many as fit into a text.
func TestEvalOfManyRuns(t *testing.T) {
	many := strings.Repeat(aRun+",", maxEvalRuns-1) + aRun
	if e, err := ParseEval(withRun(t, many)); err != nil || len(e.Runs) != maxEvalRuns {
		t.Error(err)
	}
	_, err := ParseEval(withRun(t, many+","+aRun))
	checkRefusal(t, err, RuleCount, "$.runs[4096]", "more than 4096 entries")
}

func TestEvalRefused(t *testing.T) {
	const job, result = "eval_job.json", "eval_result.json"
	checkRefusals(t, []refused{
		{job, `{"schema_version":2`, `{"schema_version":1`, RuleSchemaVersion, "$.schema_version", "run it again"},
		{job, `{"schema_version":2,`, `{`, RuleSchemaVersion, "$.schema_version", "is missing"},
		{job, `{"schema_version":2,"job_id":"eval-1"`, `{"schema_version":1`, RuleSchemaVersion, "$.schema_version",
			"ambiguous"},
		{job, `{"schema_version":2`, `{"schema_version":2.0`, strictjson.RuleInteger, "$.schema_version", ""},
		{job, `{"schema_version":2`, `{"schema_version":"2"`, strictjson.RuleType, "$.schema_version", ""},
		{job, `"eval-1"`, `" "`, RuleText, "$.job_id", ""},
		{job, `"cancelled"`, `"done"`, RuleValue, "$.state", ""},
		{job, `"finished_runs":[]`, `"x":[]`, RuleShape, "$", "neither"},
		{job, `"finished_runs":[]`, `"finished_runs":[],"runs":[]`, RuleShape, "$", "like a job and"},
		{job, `"finished_runs":[]`, `"runs":null`, RuleShape, "$", "neither"},
		{job, `"suite_name":"smoke",`, ``, strictjson.RuleRequired, "$.suite_name", ""},
		{job, `"adapters":[null,"demo"],`, ``, strictjson.RuleRequired, "$.adapters", ""},
		{job, `[null,"demo"]`, `[0]`, strictjson.RuleType, "$.adapters[0]", ""},
		{job, `"submission_kind":"compare"`, `"submission_kind":"x"`, RuleValue, "$.submission_kind", "on_demand"},
		{job, `"progress":{`, `"progres":{`, strictjson.RuleRequired, "$.progress", ""},
		{job, `"submitted_at_iso":"2026-01-02T03:04:05+00:00"`, `"submitted_at_iso":null`, strictjson.RuleRequired,
			"$.submitted_at_iso", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":"18446744073709551616"`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":"+17"`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":""`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":"1_7"`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":"-0"`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":-0`, strictjson.RuleU64, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":1e3`, strictjson.RuleInteger, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"effective_seed":true`, strictjson.RuleType, "$.effective_seed", ""},
		{job, `"effective_seed":"17"`, `"Effective_seed":"17"`, strictjson.RuleExactName, "", ""},
		{job, `"headline_accuracy":null`, `"headline_accuracy":1e400`, strictjson.RuleF64, "$.headline_accuracy",
			"out of range"},
		{job, `"size_bytes":11`, `"size_bytes":10`, identity.RuleTotal, "$.base_weight_shard_manifest", ""},
		{result, `"runs":[]`, `"runs":[{}]`, strictjson.RuleRequired, "$.runs[0]", ""},
		{result, `"runs":[]`, `"execution_provenance":{"schema_version":1},"runs":[]`, strictjson.RuleRequired,
			"$.execution_provenance", ""},
	})
	checkTaken(t, []taken{
		{job, `"effective_seed":"17"`, `"effective_seed":18446744073709551615`},
		{job, `"effective_seed":"17"`, `"effective_seed":"18446744073709551615"`},
		{job, `"effective_seed":"17",`, ``}, {job, `"error":null`, `"error":"boom","post_eval_gate":{"x":1}`},
		{job, `"headline_accuracy":null`, `"headline_accuracy":1e-3`},
		{result, `"runs":[]`, `"runs":[],"progress":null,"replay_verdict":{"status":"matched"}`},
		{result, `"completed"`, `"running"`},
	})
	if _, err := ParseEval([]byte(`{"schema_version":2,"job_id":"a","state":"queued","runs":[]}`)); err != nil {
		t.Error(err)
	}
}

func TestRuns(t *testing.T) {
	e, err := ParseEval(withRun(t, aRun))
	if err != nil {
		t.Fatal(err)
	}
	run := e.Runs[0]
	if run.Suite != "math-smoke" || run.SuiteHash != hash || run.Adapter != "" || run.Aggregation != "single" ||
		run.K != nil ||
		*run.Examples != 2 || *run.Passed != 1 || *run.Accuracy != 0.5 || run.Outcomes != (Tally{Pass: 1, Fail: 1}) ||
		run.Aggregated.Total() != 2 || string(run.Raw) != aRun || run.Replay != nil {
		t.Errorf("%+v", run)
	}
	replayed := strings.Replace(aRun, `"adapter":null`, `"adapter":"demo","replay_record":`+aReplay, 1)
	e, err = ParseEval(withRun(t, replayed+","+aRun))
	if err != nil {
		t.Fatal(err)
	}
	p := e.Runs[0].Replay
	if p.Adapter != "demo" || p.AdapterContent.String() != hash || !p.Targeted || *p.Seed != 7 || !p.Provenance.IsZero() ||
		p.ManifestDigest.String() != hash {
		t.Errorf("%+v", p)
	}
	scores := e.Scores()
	if len(scores) != 2 || scores[0].AdapterContent.String() != hash || !scores[1].AdapterContent.IsZero() ||
		scores[0].Adapter != "demo" || scores[0].Date != "2026-07-14T12:00:01Z" || *scores[0].Seed != 17 ||
		scores[0].Suite != "math-smoke" || scores[0].SuiteHash != hash || scores[0].Job != "eval-1" {
		t.Errorf("%+v", scores)
	}
}

func TestRunsRefused(t *testing.T) {
	for _, c := range []struct{ old, new, rule, path string }{
		{`"suite_name":"math-smoke",`, ``, strictjson.RuleRequired, "$.runs[0]"},
		{`"suite_hash"`, `"suite_hsah"`, strictjson.RuleRequired, "$.runs[0]"},
		{`"metrics":{`, `"metrics":[],"x":{`, strictjson.RuleType, "$.runs[0].metrics"},
		{`"num_pass":1`, `"num_pass":1.0`, strictjson.RuleInteger, "$.runs[0].metrics.num_pass"},
		{`"kind":"pass","score":1.0},` + ` {`, `"kind":"Pass","score":1.0},` + ` {`, RuleValue, "$.runs[0].outcomes[0].kind"},
		{`"generation_seed":44`, `"generation_seed":4.4`, strictjson.RuleInteger, "$.runs[0].outcomes[1].generation_seed"},
		{`"generation_seed":"43"`, `"generation_seed":"4 3"`, strictjson.RuleU64, "$.runs[0].outcomes[0].generation_seed"},
		{`"score":0}`, `"score":0,"metadata":{"a":1,"a":2}}`, strictjson.RuleDuplicate, "$.runs[0].outcomes[1].metadata"},
		{`{"kind":"single"}`, `{}`, strictjson.RuleRequired, "$.runs[0].aggregation"},
	} {
		_, err := ParseEval(withRun(t, string(edit(t, []byte(aRun), c.old, c.new))))
		checkRefusal(t, err, c.rule, c.path, "")
	}
	for _, c := range []struct{ old, new, rule, path string }{
		{`"kiln.eval-replay.v1"`, `"x"`, RuleDocumentType, "record_type"},
		{`{"schema_version":1,"record`, `{"schema_version":2,"record`, RuleSchemaVersion, "schema_version"},
		{`"kiln.eval-seed.v1"`, `"v2"`, RuleDocumentType, "seed_derivation"},
		{`"suite":{`, `"extra":1,"suite":{`, strictjson.RuleUnknownField, "extra"},
		{`"adapter":"demo",`, ``, RuleAgreement, "model_target"},
		{`,"adapter_content_sha256":"` + hash + `"`, ``, RuleAgreement, "model_target"},
		{`"adapter":"demo"`, `"adapter":""`, RuleName, "model_target.adapter"},
		{`"adapter":"demo"`, `"adapter":"demo","x":1`, strictjson.RuleUnknownField, "model_target.x"},
		{`"record_sha256":"sha256:`, `"record_sha256":"`, RuleDigestForm, "record_sha256"},
		{`"scorer_identities"`, `"judge_targets":[{"adapter":"j"}],"scorer_identities"`, RuleAgreement, "judge_targets[0]"},
	} {
		replay := edit(t, []byte(aReplay), c.old, c.new)
		_, err := ParseEval(withRun(t, strings.Replace(aRun, `"adapter":null`, `"replay_record":`+string(replay), 1)))
		checkRefusal(t, err, c.rule, "$.runs[0].replay_record."+c.path, "")
	}
	// The base as target has neither name nor content.
	base := strings.Replace(aReplay, `{"adapter":"demo","adapter_content_sha256":"`+hash+`"}`, `{}`, 1)
	if _, err := ParseEval(withRun(t, strings.Replace(aRun, `"adapter":null`, `"replay_record":`+base, 1))); err != nil {
		t.Error(err)
	}
}

func TestScoresCount(t *testing.T) {
	for _, c := range []struct {
		old, new         string
		examples, passed uint64
	}{
		{`"x"`, `"x"`, 2, 1},
		{`"num_examples":2,`, ``, 2, 1},                    // from the aggregated outcomes
		{`"num_pass":1`, `"num_pass":9`, 2, 1},             // metrics that can't be
		{`"num_examples":2`, `"num_examples":10`, 10, 1},   // metrics count first
		{`"num_examples":2`, `"num_examples":null`, 2, 1},  // absent
		{`"num_pass":1`, `"num_pass":0`, 2, 0},             //
		{`"aggregated_outcomes"`, `"aggregated"`, 2, 1},    // from the metrics
		{`"num_examples":2,"num_c`, `"nc":0,"num_c`, 2, 1}, //
	} {
		run := strings.Replace(aRun, c.old, c.new, 1)
		e, err := ParseEval(withRun(t, run))
		if err != nil {
			t.Fatal(err)
		}
		s := e.Scores()[0]
		if s.Examples != c.examples || s.Passed != c.passed || s.Accuracy != float64(c.passed)/float64(c.examples) {
			t.Errorf("%s: %+v", c.new, s)
		}
	}
	tries := strings.Replace(aRun, `"num_pass":1,`, ``, 1)
	tries = strings.Replace(tries, `{"kind":"single"}`, `{"kind":"pass_at_k","k":4}`, 1)
	tries = strings.Replace(tries, `"aggregated_outcomes"`, `"aggregated"`, 1)
	before, rest, _ := strings.Cut(tries, `"outcomes":[`)
	_, after, _ := strings.Cut(rest, `],"started_at"`)
	tries = before + `"outcomes":[],"started_at"` + after
	if e, err := ParseEval(withRun(t, tries)); err != nil {
		t.Error(err)
	} else if s := e.Scores()[0]; s.Aggregation != "pass_at_k" || s.K != 4 || s.Counted || s.Examples != 2 {
		t.Errorf("%+v", s)
	}
	bare := strings.Replace(aRun, `"num_examples":2,`, ``, 1)
	bare = strings.Replace(bare, `"aggregated_outcomes"`, `"aggregated"`, 1)
	if e, err := ParseEval(withRun(t, bare)); err != nil || e.Scores()[0].Examples != 2 || e.Scores()[0].Passed != 1 {
		t.Errorf("from the outcomes: %v", err)
	}
}

// TestWilson compares with Newcombe 1998, table I, method 3, which gives four digits, and with the limits.
func TestWilson(t *testing.T) {
	for _, c := range []struct {
		passed, n uint64
		low, high float64
	}{
		{81, 263, 0.2553, 0.3662}, {15, 148, 0.0624, 0.1605}, {0, 20, 0, 0.1611}, {1, 29, 0.0061, 0.1718},
		{0, 0, 0, 1}, {20, 20, 0.8389, 1}, {1, 1, 0.2065, 1},
	} {
		low, high := Wilson(c.passed, c.n)
		if math.Abs(low-c.low) > 5e-5 || math.Abs(high-c.high) > 5e-5 {
			t.Errorf("%d of %d: %f to %f, want %f to %f", c.passed, c.n, low, high, c.low, c.high)
		}
	}
}

func row(t testing.TB, m identity.Manifest, more string) string {
	t.Helper()
	b, err := m.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	return `{"base_weight_shard_manifest":` + string(b) + more + "}"
}

func TestOutcomes(t *testing.T) {
	one, two := manifestOf(t, "a.safetensors", 1), manifestOf(t, "a.safetensors", 2)
	renamed := manifestOf(t, "b.safetensors", 1)
	a := row(t, one, `,"kind":"pass","\u2028":{"x":[1,2]}`)
	for _, c := range []struct {
		text          string
		rows, unbound uint64
		bases         int
	}{
		{a, 1, 0, 1}, {a + "\n", 1, 0, 1}, {"\n\n" + a + "\r\n\r\n" + a + "\r\n \t\n", 2, 0, 1},
		{a + "\n" + row(t, two, ""), 2, 0, 2}, {a + "\n" + row(t, renamed, "") + "\n" + a, 3, 0, 1},
		{a + "\n{}\n" + `{"base_weight_shard_manifest":null}` + "\n" + a, 4, 2, 1}, {`{"x":1}`, 1, 1, 0},
	} {
		o, err := ParseOutcomes([]byte(c.text))
		if err != nil || o.Rows != c.rows || o.Unbound != c.unbound || len(o.Shards) != c.bases || len(o.Bases()) != c.bases {
			t.Errorf("%q: %+v, %v", c.text, o, err)
		}
	}
	o, err := ParseOutcomes([]byte("{}\n" + a + "\n" + row(t, two, "")))
	if err != nil {
		t.Fatal(err)
	}
	weak := o.Bases()
	if weak[0].Evidence != EvidenceAggregateOnly || weak[0].Aggregate != one.Aggregate ||
		len(weak[0].Manifest.Shards) > 0 || weak[1].Evidence != EvidenceAggregateOnly {
		t.Errorf("with a row that names no base: %+v", weak)
	}
	if o, err = ParseOutcomes([]byte("\n" + a + "\n" + row(t, two, ""))); err != nil {
		t.Fatal(err)
	}
	b := o.Bases()
	if b[0].Aggregate != one.Aggregate || b[0].Path != "line 2 $.base_weight_shard_manifest" ||
		b[1].Where() != "eval outcomes line 3 $.base_weight_shard_manifest" || b[1].Evidence != EvidenceDocument {
		t.Errorf("%+v", b)
	}
	for _, c := range []struct{ text, rule, path string }{
		{"", RuleCount, "$"}, {"\n \n", RuleCount, "$"},
		{a + "\n[]", strictjson.RuleType, "line 2 $"},
		{a + "\n" + a + "{}", strictjson.RuleTrailing, "line 2 $"},
		{a + "\n\n" + strings.Replace(a, `"size_bytes":11`, `"size_bytes":12`, 1), identity.RuleTotal,
			"line 3 $.base_weight_shard_manifest"},
		{a + "\n" + strings.Replace(a, `"kind"`, `"kind":0,"kind"`, 1), strictjson.RuleDuplicate, "line 2 $"},
		{a + "\n" + strings.Replace(a, `"x"`, `"x":0,"x"`, 1), strictjson.RuleDuplicate, "line 2 $." + `"\u2028"`},
		{strings.Replace(a, `{`, "{\n", 1), strictjson.RuleSyntax, "line 1 $"},
		{"\xef\xbb\xbf" + a, strictjson.RuleSyntax, "line 1 $"},
		{a + "\n\"\xff\"", strictjson.RuleUTF8, "line 2 $"},
		{a + "\n\u00a0" + a, strictjson.RuleSyntax, "line 2 $"},
		{`{"Base_weight_shard_manifest":0}`, strictjson.RuleExactName, "line 1 $.Base_weight_shard_manifest"},
		{a + "\n" + strings.Repeat(" ", MaxDocument+2), RuleInputSize, "line 2 $"},
		{a + "\n" + `{"x":[` + strings.Repeat(`{"":0},`, 1<<18) + `0]}`, strictjson.RuleMembers, "line 2 $.x[262143]"},
	} {
		_, err := ParseOutcomes([]byte(c.text))
		checkRefusal(t, err, c.rule, c.path, "")
	}
}

// Rows of several bases are told apart, with the number of rows of each and the line of its first.
func TestOutcomesOfTwoBases(t *testing.T) {
	one, two := manifestOf(t, "a.safetensors", 1), manifestOf(t, "a.safetensors", 2)
	a, b := row(t, one, ""), row(t, two, "")
	text := strings.Join([]string{a, "", a, b, b, row(t, manifestOf(t, "b.safetensors", 1), "")}, "\n")
	for _, unbound := range []string{"", "\n{}"} {
		o, err := ParseOutcomes([]byte(text + unbound))
		if err != nil || len(o.Shards) != 2 {
			t.Fatalf("%+v, %v", o, err)
		}
		for i, want := range []struct {
			base       identity.Manifest
			rows, line uint64
		}{{one, 3, 1}, {two, 2, 4}} {
			rows, line := o.RowsOf(i)
			said := o.Bases()[i]
			if rows != want.rows || line != want.line || said.Aggregate != want.base.Aggregate ||
				said.Path != fmt.Sprintf("line %d $.base_weight_shard_manifest", line) ||
				(said.Evidence == EvidenceDocument) != (unbound == "") {
				t.Errorf("%d: %d rows from %d on, %+v", i, rows, line, said)
			}
		}
	}
}

func TestOutcomesLimits(t *testing.T) {
	var lines []string
	for i := range 17 {
		lines = append(lines, row(t, manifestOf(t, "a.safetensors", byte(i)), ""))
	}
	if o, err := ParseOutcomes([]byte(strings.Join(lines[:16], "\n"))); err != nil || len(o.Shards) != 16 {
		t.Errorf("16 bases: %v", err)
	}
	_, err := ParseOutcomes([]byte(strings.Join(lines, "\n")))
	checkRefusal(t, err, RuleBases, "line 17 $.base_weight_shard_manifest", "the rows name more than 16 bases; split the file")
	broken := errors.New("broken")
	if _, err := ReadOutcomes(io.MultiReader(strings.NewReader("{}\n"), iotest.ErrReader(broken))); !errors.Is(err,
		broken) {
		t.Errorf("got %v", err)
	}
}

func FuzzEval(f *testing.F) {
	addExamples(f, "eval_job.json", "eval_result.json")
	f.Add(withRun(f, aRun))
	f.Add(withRun(f, strings.Replace(aRun, `"adapter":null`, `"replay_record":`+aReplay, 1)))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := ParseEval(data)
		if !checkFuzz(t, data, err) {
			return
		}
		for _, s := range e.Scores() {
			if !(0 <= s.Low && s.Low <= s.Accuracy && s.Accuracy <= s.High && s.High <= 1) && s.Examples > 0 {
				t.Fatalf("%+v", s)
			}
		}
		for _, run := range e.Runs {
			if !json.Valid(run.Raw) {
				t.Fatalf("%+v", run)
			}
		}
	})
}

func FuzzOutcomes(f *testing.F) {
	one, two := manifestOf(f, "a.safetensors", 1), manifestOf(f, "a.safetensors", 2)
	f.Add([]byte(row(f, one, "") + "\r\n\n" + row(f, two, `,"x":[]`) + "\n{}"))
	f.Add([]byte(fmt.Sprint("\n\n", row(f, one, ""))))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := ParseOutcomes(data)
		if err != nil {
			checkFuzz(t, data, err)
			return
		}
		if o.Rows < o.Unbound || o.Rows-o.Unbound < uint64(len(o.Shards)) {
			t.Fatalf("%+v", o)
		}
		for _, m := range o.Shards {
			if err := m.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
