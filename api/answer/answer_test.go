package answer_test

import (
	"reflect"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/answer"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
)

func TestOf(t *testing.T) {
	got := answer.Of(resume.Answer{Verdict: resume.No, Reason: "other bytes", Evidence: documents.EvidenceDocument,
		Others: []resume.Comparison{
			{Name: "a", Verdict: resume.Yes, Reason: "same"}, {Name: "b", Verdict: resume.CannotTell, Reason: "not there"},
		}})
	want := api.Compatibility{Verdict: api.VerdictNo, Reasons: []string{"other bytes"}, Evidence: api.EvidenceDocument,
		Compared:    []api.Compared{{Name: "a", Verdict: api.VerdictYes, Reason: "same"}},
		NotRecorded: []api.Compared{{Name: "b", Verdict: api.VerdictCannotTell, Reason: "not there"}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestOfReport: only the steps that decide are reasons, and none where all agree.
func TestOfReport(t *testing.T) {
	steps := []resume.Step{
		{Number: 1, Name: "a", Verdict: resume.Yes, Reason: "same"}, {Number: 2, Name: "b", Verdict: resume.No, Reason: "differs"},
		{Number: 3, Name: "c", Verdict: resume.CannotTell, Reason: "not there"},
	}
	got := answer.OfReport(resume.Report{Verdict: resume.No, FirstFailure: "b", Steps: steps})
	if got.Question != api.QuestionResume || got.Verdict != api.VerdictNo || got.Failure != "b" || len(got.Steps) != 3 ||
		len(got.Compared) != 2 || len(got.NotRecorded) != 1 || !reflect.DeepEqual(got.Reasons, []string{"differs"}) {
		t.Errorf("%+v", got)
	}
	got = answer.OfReport(resume.Report{Verdict: resume.Yes, Steps: steps[:1]})
	if got.Reasons == nil || len(got.Reasons) != 0 || got.Verdict != api.VerdictYes {
		t.Errorf("%+v", got)
	}
}
