// Package answer puts the decisions of package resume on the wire: the registry and kiln-pull give the same answer to
// the same question.
package answer

import (
	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity/resume"
)

// Of is the answer about two bases, or about a base and what was made from one. Who gives it adds the question and what
// it is about.
func Of(a resume.Answer) api.Compatibility {
	out := api.Compatibility{Verdict: verdict(a.Verdict), Reasons: []string{a.Reason}, Evidence: api.Evidence(a.Evidence)}
	for _, o := range a.Others {
		put(&out, api.Compared{Name: o.Name, Verdict: verdict(o.Verdict), Reason: o.Reason})
	}
	return out
}

// OfReport is the answer whether a run can go on from a checkpoint. The steps that decide are the reasons. Who gives it
// adds the evidence of the checkpoint's base and what it is about.
func OfReport(r resume.Report) api.Compatibility {
	out := api.Compatibility{
		Question: api.QuestionResume, Verdict: verdict(r.Verdict), Failure: r.FirstFailure, Archival: r.Archival,
		Renamed: r.Renamed, Reasons: []string{},
	}
	for _, s := range r.Steps {
		step := api.Compared{Number: s.Number, Name: s.Name, Verdict: verdict(s.Verdict), Reason: s.Reason}
		out.Steps = append(out.Steps, step)
		put(&out, step)
		if s.Verdict == r.Verdict && r.Verdict != resume.Yes {
			out.Reasons = append(out.Reasons, s.Reason)
		}
	}
	return out
}

// put adds something to what was compared, or to what could not be.
func put(out *api.Compatibility, c api.Compared) {
	if c.Verdict == api.VerdictCannotTell {
		out.NotRecorded = append(out.NotRecorded, c)
	} else {
		out.Compared = append(out.Compared, c)
	}
}

func verdict(v resume.Verdict) string {
	switch v {
	case resume.Yes:
		return api.VerdictYes
	case resume.No:
		return api.VerdictNo
	}
	return api.VerdictCannotTell
}
