package answers

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/answer"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// Compatibility answers one of the four questions. ErrParameterInvalid, ErrManifestUnknown.
func (d *Desk) Compatibility(ctx context.Context, c access.Caller, req api.CompatibilityRequest) (
	out api.Compatibility, err error,
) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return out, err
	}
	v := d.view(ctx, c)
	switch req.Question {
	case api.QuestionSameBase:
		out, err = v.sameBase(req)
	case api.QuestionAdapter, api.QuestionEval:
		out, err = v.madeFrom(req)
	case api.QuestionResume:
		out, err = v.resumes(req)
	default:
		err = api.Errorf(api.CodeParameterInvalid, "question %.80q: want %s, %s, %s or %s", req.Question,
			api.QuestionSameBase, api.QuestionAdapter, api.QuestionEval, api.QuestionResume)
	}
	out.Question, out.NotProven = req.Question, api.NotProven
	return out, err
}

// known returns what is known of a base that somebody names. One that is not held here is known by its aggregate.
func (v *view) known(s *api.Side) (resume.Base, error) {
	if s == nil {
		return resume.Base{}, nil
	}
	m, err := v.side(v.ctx, v.c, *s)
	if !s.Aggregate.IsZero() && (errors.Is(err, api.ErrAggregateUnknown) || errors.Is(err, index.ErrNotFound)) {
		return resume.Base{Summary: identity.Summary{Aggregate: s.Aggregate}}, nil
	}
	return resume.Base{Manifest: m}, err
}

func aggregateOf(b resume.Base) identity.Aggregate {
	if !b.Manifest.Aggregate.IsZero() {
		return b.Manifest.Aggregate
	}
	return b.Summary.Aggregate
}

// summarized is a base without the names of its files.
func summarized(b resume.Base) resume.Base {
	if b.Manifest.Aggregate.IsZero() {
		return b
	}
	return resume.Base{Summary: b.Manifest.Summary()}
}

func (v *view) sameBase(req api.CompatibilityRequest) (out api.Compatibility, err error) {
	if req.Base == nil || req.Other == nil {
		return out, api.Errorf(api.CodeParameterInvalid, "%s needs a base and an other", req.Question)
	}
	a, err := v.known(req.Base)
	if err != nil {
		return out, err
	}
	b, err := v.known(req.Other)
	if err != nil {
		return out, err
	}
	out = answer.Of(resume.SameWeights(a, b))
	out.Derived, out.MoreDerived, err = v.between(aggregateOf(a), aggregateOf(b))
	return out, err
}

// subject is the artifact that a question is about.
type subject struct {
	rec     index.Record
	facts   api.Facts
	docs    classify.Documents
	binding documents.Binding
	shown   *api.Artifact
	release func()
}

// treeWeight is for how many bytes of text each byte of a resume request counts, which is compared as a tree of values.
const treeWeight = 8

// subject finds the artifact of a question, and reads its documents. release is to be called also after an error.
func (v *view) subject(req api.CompatibilityRequest, kind api.Kind) (s subject, err error) {
	s.release = func() {}
	if digest, perr := identity.ParseDigest(req.Artifact); perr == nil {
		s.rec, err = v.manifest(digest, "")
	} else {
		s.rec, err = v.record(v.ctx, v.c, req.Artifact)
	}
	if err != nil {
		return s, err
	}
	if s.rec.Kind != kind {
		return s, api.Errorf(api.CodeParameterInvalid, "%s is of kind %q; %s is about artifacts of kind %s", req.Artifact,
			s.rec.Kind, req.Question, kind)
	}
	if s.shown, err = v.short(s.rec); err != nil {
		return s, err
	}
	s.docs, s.release, err = v.read(s.rec, func(text int64) int64 { return text + treeWeight*int64(len(req.Request)) })
	if err != nil {
		return s, err
	}
	if s.facts, err = v.said(s.rec); err == nil {
		s.binding = s.bound(identity.Aggregate{})
	}
	return s, err
}

// bases are those that the rows of an export name, if they are several.
func (s subject) bases() []api.EvalBase {
	if s.facts.Eval == nil {
		return nil
	}
	return s.facts.Eval.Bases
}

// bound is what binds the artifact to its base, with the full manifest where a document has it: of several that its rows
// name to the one that is asked about, else to the first.
func (s subject) bound(asked identity.Aggregate) documents.Binding {
	b, where := s.shown.Binding, s.facts.Source
	if b.Source != "" {
		where = b.Source
	}
	for _, other := range s.bases() {
		if at := strings.LastIndex(where, " line "); at > 0 && other.Aggregate == asked {
			_, member, _ := strings.Cut(where[at+len(" line "):], " ")
			b.Aggregate, where = asked, strings.TrimSpace(fmt.Sprintf("%s line %d %s", where[:at], other.Line, member))
		}
	}
	kind, path, _ := strings.Cut(where, " ")
	return documents.Binding{Evidence: documents.Evidence(b.Evidence), Aggregate: b.Aggregate,
		Manifest: s.docs.Shards(b.Aggregate), Kind: documents.Kind(kind), Path: path}
}

// several says of which bases an export has rows; empty: it is one.
func (s subject) several(asked identity.Aggregate) string {
	var each []string
	for _, b := range s.bases() {
		if b.Aggregate == asked {
			return fmt.Sprintf("the file has rows of %d bases: %d of its %d rows are of this one, the first in line %d",
				len(s.bases()), b.Rows, s.facts.Eval.Rows, b.Line)
		}
		each = append(each, fmt.Sprintf("%d of %s", b.Rows, b.Aggregate))
	}
	if each == nil {
		return ""
	}
	return fmt.Sprintf("the file has rows of %d bases: %s", len(each), strings.Join(each, ", "))
}

// disputed says why what bind statements say of the artifact's base decides nothing; empty: it needs none, or those that
// count agree.
func (s subject) disputed() string {
	all := s.shown.Bindings
	if len(all) == 0 || all[0].Source == "" { // its own
		return ""
	}
	var says []string
	for _, b := range all {
		says = append(says, fmt.Sprintf("%s says %s", b.Source, b.Aggregate))
	}
	which := "bind statements"
	if s.shown.MoreBindings {
		which = fmt.Sprintf("the %d newest bind statements", maxBinds)
	}
	return "the artifact does not record its base, and " + which + " disagree about it: " + strings.Join(says, ", ")
}

// contradicted says what contradicts the artifact about its base, and does not count beside that; empty: nothing does.
func (s subject) contradicted() string {
	c := s.facts.Conflict
	if c == nil {
		return ""
	}
	return fmt.Sprintf("conflict: %s is of %s; what the artifact says counts: %s, by %s", c.ClaimedAt, c.Claimed, c.Derived,
		c.DerivedAt)
}

// madeFrom answers whether an adapter was trained from the bytes of a base, or an eval used them.
func (v *view) madeFrom(req api.CompatibilityRequest) (out api.Compatibility, err error) {
	kind := api.KindAdapter
	if req.Question == api.QuestionEval {
		kind = api.KindEval
	}
	s, err := v.subject(req, kind)
	defer s.release()
	if err != nil {
		return out, err
	}
	here := resume.Here{Request: req.Work, Lineage: req.Lineage}
	if here.Base, err = v.known(req.Base); err != nil {
		return out, err
	}
	asked := aggregateOf(here.Base)
	s.binding = s.bound(asked)
	if here.Identities, err = identities(req.Identities); err != nil {
		return out, err
	}
	if kind == api.KindEval {
		made, err := s.eval(req.Run)
		if err != nil {
			return out, err
		}
		out = answer.Of(resume.EvalUsed(made, here))
	} else {
		made := resume.Made{}
		switch {
		case s.docs.Adapter != nil:
			made = resume.MadeAdapter(*s.docs.Adapter, s.docs.Receipt)
		case s.docs.Receipt != nil:
			made = resume.MadeAdapter(documents.AdapterManifest{}, s.docs.Receipt)
		}
		made.Binding = s.binding
		out = answer.Of(resume.AdapterTrained(made, here))
	}
	out.Artifact = s.shown
	if reason := s.several(asked); reason != "" {
		out.Reasons = append(out.Reasons, reason)
	}
	if reason := s.contradicted(); reason != "" {
		out.Reasons = append(out.Reasons, reason)
	}
	if reason := s.disputed(); reason != "" {
		out.Verdict, out.Reasons, out.Evidence = api.VerdictCannotTell, []string{reason}, api.EvidenceAsserted
	}
	if out.Verdict == api.VerdictNo {
		out.Derived, out.MoreDerived, err = v.between(s.binding.Aggregate, asked)
	}
	return out, err
}

// eval is what an eval records, of one of its runs or as a whole.
func (s subject) eval(run *int) (made resume.Made, err error) {
	runs := 0
	if s.docs.Eval != nil {
		runs = len(s.docs.Eval.Runs)
	}
	switch {
	case run != nil && (*run < 0 || *run >= runs):
		return made, api.Errorf(api.CodeParameterInvalid, "run %d: the eval has %d, from 0", *run, runs)
	case run != nil:
		made = resume.MadeEval(*s.docs.Eval, &s.docs.Eval.Runs[*run])
	case s.docs.Eval != nil:
		made = resume.MadeEval(*s.docs.Eval, nil)
	}
	if e := s.facts.Eval; e != nil {
		made.Rows, made.Unbound = uint64(e.Rows), uint64(e.Unbound)
	}
	made.Binding = s.binding
	return made, nil
}

// identities reads the other identities that a request gives.
func identities(given map[string]identity.Digest) (i documents.Identities, err error) {
	for name, d := range given {
		switch name {
		case api.IdentityModelConfig:
			i.ModelConfig = d
		case api.IdentityTokenizer:
			i.TokenizerVocab = d
		case api.IdentityTokenizerConfig:
			i.TokenizerConfig = d
		case api.IdentityChatTemplate:
			i.ChatTemplate = d
		case api.IdentityTrainingTemplate:
			i.TrainingTemplate = d
		case api.IdentityProvenance:
			i.Provenance = d
		default:
			return i, api.Errorf(api.CodeParameterInvalid, "identities: %.80q is none that is compared", name)
		}
	}
	return i, nil
}

// resumes answers whether a run can go on exactly from a checkpoint.
func (v *view) resumes(req api.CompatibilityRequest) (out api.Compatibility, err error) {
	if len(req.Request) > api.MaxResumeRequest {
		return out, api.Errorf(api.CodeContentTooLarge, "request has %d bytes, at most %d are taken", len(req.Request),
			api.MaxResumeRequest)
	}
	s, err := v.subject(req, api.KindCheckpoint)
	defer s.release()
	if err != nil {
		return out, err
	}
	if s.docs.Checkpoint == nil {
		return out, api.Errorf(api.CodeParameterInvalid, "%s has no checkpoint manifest", req.Artifact)
	}
	var q resume.Request
	if len(req.Request) > 0 && string(req.Request) != "null" {
		if q, err = resume.ParseRequest(req.Request); err != nil {
			return out, api.Errorf(api.CodeParameterInvalid, "%v", err)
		}
	}
	lost, err := v.lost(s.rec)
	if err != nil {
		return out, err
	}
	now := resume.Current{FilesChecked: lost == ""} // they were when the manifest was put
	if now.Base, err = v.known(req.Base); err != nil {
		return out, err
	}
	if req.Base != nil && !req.Base.Aggregate.IsZero() { // which is no packaging: nobody named files
		now.Base = summarized(now.Base)
	}
	i, err := identities(req.Identities)
	if err != nil {
		return out, err
	}
	now.ProvenanceDigest = i.Provenance
	report := resume.Decide(*s.docs.Checkpoint, q, now)
	for i, step := range report.Steps {
		if lost != "" && step.Name == stepFiles && step.Verdict == resume.CannotTell {
			report.Steps[i].Reason = lost
		}
	}
	out = answer.OfReport(report)
	if reason := s.contradicted(); reason != "" {
		out.Reasons = append(out.Reasons, reason)
	}
	out.Artifact, out.Evidence = s.shown, s.shown.Binding.Evidence
	out.Derived, out.MoreDerived, err = v.between(s.binding.Aggregate, aggregateOf(now.Base))
	return out, err
}

// stepFiles is the step of a decision that says whether the files of a checkpoint are as its manifest says.
const stepFiles = "checkpoint"

// lost says which file of an artifact the store does not have as it was pushed; empty: it has them all, as far as it
// knows.
func (v *view) lost(rec index.Record) (string, error) {
	m, err := v.taken(rec)
	if err != nil {
		return "", err
	}
	for _, d := range m.Refers() {
		switch _, err := v.Blobs.Stat(v.ctx, d); {
		case errors.Is(err, blobstore.ErrQuarantined), errors.Is(err, blobstore.ErrDamaged):
			return fmt.Sprintf("the manifest keeps every rule, but the file with digest %s is damaged here: it can't be "+
				"resumed from until that is pushed again", d), nil
		case errors.Is(err, blobstore.ErrNotFound):
			return fmt.Sprintf("the manifest keeps every rule, but the file with digest %s is missing here: it can't be "+
				"resumed from until that is pushed again", d), nil
		case err != nil:
			return "", err
		}
	}
	return "", nil
}
