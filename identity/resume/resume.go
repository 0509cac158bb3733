// Package resume answers the four questions of Kiln's compatibility contract from documents alone: do two bases have
// the same weights, was an adapter trained from these bytes, did an eval use these bytes, can a run continue exactly
// from a checkpoint. Every answer is yes, no or cannot tell, with its reason and the values that led to it. A yes never
// rests on anything that was not compared.
//
// The package is pure: it reads no file, opens no connection, asks for no time, and touches no device. Values are safe
// for concurrent use as long as nobody changes them.
package resume

import (
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// NotProven says what a base manifest does not prove. Every answer about a base repeats it.
var NotProven = "The base manifest proves the bytes of the weights and nothing else: not " +
	listed(identity.NotProven) + "."

// listed gives things as a part of a sentence.
func listed(things []string) string {
	last := len(things) - 1
	return "the " + strings.Join(things[:last], ", the ") + " or the " + things[last]
}

// Archival says what a checkpoint without a full shard manifest is good for.
const Archival = "This checkpoint is kept as an archive. It can't be resumed from exactly, it is no serving adapter, " +
	"and its weights are not offered for a restore on their own."

// Verdict is one of the three answers.
type Verdict string

// The answers.
const (
	Yes        Verdict = "yes"
	No         Verdict = "no"
	CannotTell Verdict = "cannot-tell" // something that the answer needs is not recorded, or was not given
)

// Base is what is known of a base to compare with. The zero Base means that nothing is.
type Base struct {
	Manifest identity.Manifest // of a folder or a registry; zero: only the summary is known
	Summary  identity.Summary  // of a server's health answer, or only an aggregate; counts of 0 are not known
	Absent   bool              // a server says that it has no base identity
}

// aggregate is the aggregate of b, zero if it is not known.
func (b Base) aggregate() identity.Aggregate {
	if b.full() {
		return b.Manifest.Aggregate
	}
	return b.Summary.Aggregate
}

// full says whether the shards are known.
func (b Base) full() bool { return len(b.Manifest.Shards) > 0 || !b.Manifest.Aggregate.IsZero() }

// summary is the bounded form of b.
func (b Base) summary() identity.Summary {
	if b.full() {
		return b.Manifest.Summary()
	}
	return b.Summary
}

// sameCounts says whether two summaries of one aggregate agree on how many shards and bytes it has, as far as known.
func sameCounts(a, b identity.Summary) bool {
	return (a.ShardCount == b.ShardCount || a.ShardCount == 0 || b.ShardCount == 0) &&
		(a.TotalSize == b.TotalSize || a.TotalSize == 0 || b.TotalSize == 0)
}

// check says what is wrong with b itself, "" if nothing is.
func (b Base) check() string {
	if b.full() {
		if err := b.Manifest.Validate(); err != nil {
			return err.Error()
		}
		return ""
	}
	for _, f := range [][2]string{
		{b.Summary.ManifestType, identity.ManifestType}, {b.Summary.AggregateAlgorithm, identity.AggregateAlgorithm},
	} {
		if f[0] != "" && f[0] != f[1] {
			return fmt.Sprintf("the summary is of type %.80q, only %q is known", f[0], f[1])
		}
	}
	return ""
}

// Step is one step of the exact-resume decision.
type Step struct {
	Number  int     `json:"number"` // 1 to 7, as in Kiln's order; several steps may share one
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Reason  string  `json:"reason"` // one sentence with the values
}

// Report is the exact-resume decision.
type Report struct {
	Verdict      Verdict `json:"verdict"`                 // no if any step says no; yes if all say yes
	FirstFailure string  `json:"first_failure,omitempty"` // name of the first step that says no
	Steps        []Step  `json:"steps"`                   // all of them, in Kiln's order
	Archival     string  `json:"archival,omitempty"`      // the sentence of that name, for such a checkpoint
	Renamed      string  `json:"renamed,omitempty"`       // what to do about a base with other file names
	NotProven    string  `json:"not_proven"`
}

// Current is the side that wants to continue, beside what its request says.
type Current struct {
	Base             Base
	Provenance       *documents.Provenance // of the resident server; nil: not known
	ProvenanceDigest identity.Digest       // of its summary, where the record itself is not known
	FilesChecked     bool                  // the checkpoint's files were checked: CheckCheckpointFolder, CheckFiles
}

// decision is what the steps look at.
type decision struct {
	c documents.Checkpoint
	q Request
	Current
}

// steps are the steps of the decision in Kiln's order. Where only is set, they are those of that kind of training. Kiln
// compares the state files of GRPO alone; here a yes rests on them whatever the training was.
var steps = []struct {
	number int
	name   string
	only   string
	decide func(decision) (Verdict, string)
}{
	{1, "checkpoint", "", decision.loads},
	{1, "seed", "", decision.seed},
	{2, "resident base", "", decision.residentBase},
	{2, "resident execution provenance", "", decision.residentProvenance},
	{3, "training kind", "", decision.training},
	{3, "adapter name", "", decision.adapter},
	{3, "effective config", "", decision.config},
	{3, "precision policy", "", decision.precision},
	{3, "data identity", "", decision.data},
	{3, "total steps", "", decision.totalSteps},
	{3, "data order", documents.TrainingGRPO, decision.order},
	{3, "optimizer", "", decision.optimizer},
	{3, "scheduler", "", decision.scheduler},
	{3, "random number streams", "", decision.rng},
	{3, "state files", "", decision.stateFiles},
	{4, "base weights", "", decision.base},
	{5, "execution provenance", "", decision.provenance},
	{6, "auxiliary state", "", decision.auxiliary},
	{7, "progress and loop state", "", decision.progress},
}

// Decide says whether a run can continue exactly from a checkpoint: the steps of Kiln's own decision, in its order. The
// steps after the first failure are reported as well. c must come from documents.ParseCheckpoint.
func Decide(c documents.Checkpoint, q Request, now Current) Report {
	d := decision{c, q, now}
	r := Report{Verdict: Yes, NotProven: NotProven}
	for _, s := range steps {
		if s.only != "" && s.only != c.Training {
			continue
		}
		verdict, reason := s.decide(d)
		r.Steps = append(r.Steps, Step{s.number, s.name, verdict, reason})
		switch {
		case verdict == No:
			if r.Verdict != No {
				r.FirstFailure = s.name
			}
			r.Verdict = No
		case verdict == CannotTell && r.Verdict == Yes:
			r.Verdict = CannotTell
		}
	}
	if c.Base().Evidence != documents.EvidenceDocument {
		r.Archival = Archival
	}
	r.Renamed = d.renamed()
	return r
}

// renamed says what to do if the base has the checkpoint's bytes under other file names, "" if it has not.
func (d decision) renamed() string {
	was, is := d.c.Aux.Shards, d.Base.Manifest
	if !d.Base.full() || was.Aggregate.IsZero() || !was.SameContent(is) {
		return ""
	}
	for i := range min(len(was.Shards), len(is.Shards)) {
		if a, b := was.Shards[i], is.Shards[i]; a != b {
			return fmt.Sprintf("The base has the same bytes under other file names: shard %d is %s in the checkpoint and %s "+
				"here. Kiln compares the names as a part of auxiliary_state, so pull the base under its original names.",
				i+1, a.Filename, b.Filename)
		}
	}
	return ""
}

// leftOut is the answer where the request does not say.
func leftOut(what string) (Verdict, string) {
	return CannotTell, "the request leaves " + what + " out"
}

// compare is the answer for two texts of one thing.
func compare(what, checkpoint, run string) (Verdict, string) {
	if checkpoint == run {
		return Yes, fmt.Sprintf("%s is %s in both", what, run)
	}
	return No, fmt.Sprintf("%s is %s in the checkpoint, %s in this run", what, checkpoint, run)
}

// same is the answer for a JSON value: the first difference, or that there is none.
func same(what, difference string) (Verdict, string) {
	if difference == "" {
		return Yes, what + " is equal in both"
	}
	return No, difference
}
