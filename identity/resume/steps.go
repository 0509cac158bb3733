package resume

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

func (d decision) loads() (Verdict, string) {
	if !d.FilesChecked {
		return CannotTell, "the manifest keeps every rule, but the files of the checkpoint were not checked against it"
	}
	return Yes, fmt.Sprintf("the manifest of %s keeps every rule, and the %d files match it", d.c.ID, len(d.c.Files))
}

func (d decision) seed() (Verdict, string) {
	seed, ok := d.c.Seed()
	switch {
	case !ok:
		return CannotTell, `the checkpoint records no stream "lora-init", from which the seed is taken`
	case d.q.Seed == nil:
		return leftOut("the seed")
	case *d.q.Seed != seed:
		return No, fmt.Sprintf("the seed is %d in the checkpoint, %d in the request", seed, *d.q.Seed)
	}
	return Yes, fmt.Sprintf("the seed is %d in both", seed)
}

func (d decision) residentBase() (Verdict, string) {
	fault := d.Base.check()
	switch {
	case d.Base.Absent:
		return No, "the server says that it has no base identity, which exact resume needs"
	case d.Base.aggregate().IsZero():
		return CannotTell, "no base was given to resume on"
	case fault != "":
		return No, "the manifest of this base is not valid: " + fault
	case !d.Base.full() && d.Base.Summary.ShardCount == 0:
		return CannotTell, fmt.Sprintf("only the aggregate of this base is known: %v", d.Base.Summary.Aggregate)
	case !d.Base.full():
		return CannotTell, fmt.Sprintf("only the summary of this base is known: %v, %d shards, %d bytes",
			d.Base.Summary.Aggregate, d.Base.Summary.ShardCount, d.Base.Summary.TotalSize)
	}
	return Yes, fmt.Sprintf("the manifest of this base is valid: %v, %d shards", d.Base.Manifest.Aggregate,
		len(d.Base.Manifest.Shards))
}

// runs is the digest of this run's execution provenance, zero if it is not known, and where it comes from.
func (d decision) runs() (identity.Digest, string) {
	switch {
	case d.Provenance != nil:
		return d.Provenance.Digest, "the resident server"
	case !d.ProvenanceDigest.IsZero():
		return d.ProvenanceDigest, "the resident server's summary"
	case d.q.Provenance != nil:
		return d.q.Provenance.Digest, "the request"
	}
	return identity.Digest{}, ""
}

func (d decision) residentProvenance() (Verdict, string) {
	runs, from := d.runs()
	switch {
	case d.q.Provenance != nil && d.q.Provenance.Digest != runs:
		return No, fmt.Sprintf("the execution provenance is %v in the request, %v in %s", d.q.Provenance.Digest, runs, from)
	case runs.IsZero():
		return CannotTell, "the execution provenance of this run was not given"
	case d.Provenance == nil && d.q.Provenance == nil:
		return CannotTell, fmt.Sprintf("only the digest of the execution provenance is known: %v", runs)
	}
	return Yes, fmt.Sprintf("the execution provenance of %s is valid: %v", from, runs)
}

func (d decision) training() (Verdict, string) {
	if d.q.Training == "" {
		return leftOut("the training kind")
	}
	return compare("the training kind", d.c.Training, d.q.Training)
}

func (d decision) adapter() (Verdict, string) {
	if d.q.Adapter == "" {
		return leftOut("the adapter name")
	}
	return compare("the adapter name", quote(d.c.Adapter), quote(d.q.Adapter))
}

func (d decision) config() (Verdict, string) {
	if d.q.EffectiveConfig == nil {
		return leftOut("the effective config")
	}
	return same("the effective config", difference("effective_config", d.c.EffectiveConfig, d.q.EffectiveConfig))
}

func (d decision) precision() (Verdict, string) {
	if d.q.Precision == nil {
		return leftOut("the precision policy")
	}
	return same("the precision policy", difference("precision_policy", d.c.Precision.Raw, d.q.Precision.Raw))
}

func (d decision) data() (Verdict, string) {
	if d.q.Data == nil {
		return leftOut("the data identity")
	}
	show := func(x documents.Data) string {
		return fmt.Sprintf("%s %s with %d items", quote(x.SourceKind), x.Content.Hex(), x.Items)
	}
	return compare("the training data", show(d.c.Data), show(*d.q.Data))
}

func (d decision) totalSteps() (Verdict, string) {
	if d.q.TotalSteps == nil {
		return leftOut("the total number of steps")
	}
	return compare("the total number of steps", decimal(d.c.Progress.TotalSteps), decimal(*d.q.TotalSteps))
}

func (d decision) order() (Verdict, string) {
	if d.q.Order == nil {
		return leftOut("the data order")
	}
	a, b := d.c.Progress.Order, d.q.Order
	if len(a) != len(b) {
		return No, fmt.Sprintf("the data order has %d items in the checkpoint, %d in this run", len(a), len(b))
	}
	for i := range a {
		if a[i] != b[i] {
			return No, fmt.Sprintf("item %d of the data order is %d in the checkpoint, %d in this run", i, a[i], b[i])
		}
	}
	return Yes, fmt.Sprintf("the order of the %d items is equal in both", len(a))
}

func (d decision) optimizer() (Verdict, string) {
	q := d.q.Optimizer
	if q == nil {
		return leftOut("the optimizer")
	}
	c := d.c.Optimizer
	switch {
	case c.Kind != q.Kind:
		return compare("the kind of optimizer", quote(c.Kind), quote(q.Kind))
	case q.HasStep && c.Step != q.Step:
		return compare("the step of the optimizer", decimal(c.Step), decimal(q.Step))
	case c.StateFile != q.StateFile:
		return compare("the state file of the optimizer", fileName(c.StateFile), fileName(q.StateFile))
	}
	return stepped("the optimizer", difference("optimizer.hyperparameters", c.Hyperparameters, q.Hyperparameters), q.HasStep)
}

func (d decision) scheduler() (Verdict, string) {
	q := d.q.Scheduler
	if q == nil {
		return leftOut("the scheduler")
	}
	c := d.c.Scheduler
	switch {
	case c.Kind != q.Kind:
		return compare("the kind of scheduler", quote(c.Kind), quote(q.Kind))
	case q.HasStep && c.Step != q.Step:
		return compare("the step of the scheduler", decimal(c.Step), decimal(q.Step))
	}
	return stepped("the scheduler", difference("scheduler.state", c.State, q.State), q.HasStep)
}

// stepped is same for what has a step, which the request may leave out.
func stepped(what, difference string, hasStep bool) (Verdict, string) {
	if difference == "" && !hasStep {
		return leftOut("the step of " + what)
	}
	return same(what, difference)
}

func (d decision) rng() (Verdict, string) {
	if d.q.RNG == nil {
		return leftOut("the random number streams")
	}
	all := maps.Clone(d.c.RNG)
	if all == nil {
		all = map[string]documents.RNG{}
	}
	maps.Copy(all, d.q.RNG)
	show := func(m map[string]documents.RNG, name string) string {
		s, ok := m[name]
		if !ok {
			return "not there"
		}
		return fmt.Sprintf("%s with seed %d at %d, state file %s", quote(s.Algorithm), s.Seed, s.Position,
			fileName(s.StateFile))
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a, inCheckpoint := d.c.RNG[name]
		b, inRun := d.q.RNG[name]
		if a != b || inCheckpoint != inRun {
			return compare("the random number stream "+quote(name), show(d.c.RNG, name), show(d.q.RNG, name))
		}
	}
	return Yes, fmt.Sprintf("the %d random number streams are equal in both", len(all))
}

func (d decision) stateFiles() (Verdict, string) {
	if d.q.State == nil {
		return leftOut("the state files")
	}
	a, b := d.c.State, *d.q.State
	for _, f := range []struct{ name, checkpoint, run string }{
		{"adapter_parameters", a.AdapterParameters, b.AdapterParameters},
		{"optimizer_state", a.OptimizerState, b.OptimizerState},
		{"reference_state", a.ReferenceState, b.ReferenceState},
		{"ema_state", a.EMAState, b.EMAState},
		{"reward_normalization_state", a.RewardNormalization, b.RewardNormalization},
		{"loss_history", a.LossHistory, b.LossHistory},
	} {
		if f.checkpoint != f.run {
			return compare("the state file "+f.name, fileName(f.checkpoint), fileName(f.run))
		}
	}
	return Yes, "the state files are equal in both"
}

// base compares the bytes of the weights. File names do not count here.
func (d decision) base() (Verdict, string) {
	was, said := d.c.Aux.Shards, d.c.Aux.BaseAggregate
	is, fault := d.Base.aggregate(), d.Base.check()
	switch {
	case was.Aggregate.IsZero() && !said.IsZero():
		return No, fmt.Sprintf("the checkpoint names its base by the bare aggregate %v; exact resume needs the digest of "+
			"every shard (auxiliary_state.base_weight_shard_manifest)", said)
	case was.Aggregate.IsZero():
		return No, "the checkpoint does not name its base; exact resume needs the digest of every shard " +
			"(auxiliary_state.base_weight_shard_manifest)"
	case said.IsZero():
		return No, fmt.Sprintf("the checkpoint lacks auxiliary_state.base_model_weights_sha256, which must repeat the "+
			"aggregate %v of its shard manifest", was.Aggregate)
	case said != was.Aggregate:
		return No, fmt.Sprintf("the checkpoint's aggregate %v differs from that of its shard manifest, %v", said,
			was.Aggregate)
	case d.Base.Absent:
		return No, fmt.Sprintf("the checkpoint's base is %v, and the server says that it has no base identity", was.Aggregate)
	case is.IsZero():
		return CannotTell, fmt.Sprintf("the checkpoint's base is %v, and no base was given to compare with", was.Aggregate)
	case fault != "":
		return No, "this base has no valid shard manifest: " + fault
	case is != was.Aggregate:
		return No, fmt.Sprintf("the base weights are %v in the checkpoint, %v here", was.Aggregate, is)
	}
	return d.equalBase(was)
}

// equalBase is the answer where the aggregates are equal.
func (d decision) equalBase(was identity.Manifest) (Verdict, string) {
	if s := d.Base.Summary; !d.Base.full() {
		if want := was.Summary(); !sameCounts(s, want) {
			return No, fmt.Sprintf("the aggregate %v is that of %d shards with %d bytes in the checkpoint, but this base says "+
				"%d shards with %d bytes", s.Aggregate, want.ShardCount, want.TotalSize, s.ShardCount, s.TotalSize)
		}
		return Yes, fmt.Sprintf("the aggregate %v is equal in both; the shards of this base were not seen", s.Aggregate)
	}
	if d.renamed() != "" {
		return Yes, fmt.Sprintf("the base weights are %v in both, under other file names", was.Aggregate)
	}
	return Yes, fmt.Sprintf("the base weights are %v in both", was.Aggregate)
}

func (d decision) provenance() (Verdict, string) {
	runs, from := d.runs()
	switch was := d.c.Aux.Provenance; {
	case was == nil:
		return No, "the checkpoint has no execution provenance, which exact resume needs"
	case runs.IsZero():
		return CannotTell, fmt.Sprintf("the execution provenance is %v in the checkpoint; that of this run was not given",
			was.Digest)
	case was.Digest != runs:
		return No, fmt.Sprintf("the execution provenance is %v in the checkpoint, %v in %s", was.Digest, runs, from)
	}
	return Yes, fmt.Sprintf("the execution provenance is %v in both", runs)
}

// auxiliary compares auxiliary_state whole. It holds the shard manifest with its file names and the execution
// provenance, so what differs there differs here, whatever the request says.
func (d decision) auxiliary() (Verdict, string) {
	runs, _ := d.runs()
	is, was := d.Base.aggregate(), d.c.Base().Aggregate
	switch {
	case !is.IsZero() && !was.IsZero() && is != was:
		return No, fmt.Sprintf("auxiliary_state holds the base %v in the checkpoint, %v in this run", was, is)
	case d.renamed() != "":
		return No, "auxiliary_state holds the shard manifest with its file names, and they differ: " + d.renamed()
	case d.c.Aux.Provenance != nil && !runs.IsZero() && d.c.Aux.Provenance.Digest != runs:
		return No, fmt.Sprintf("auxiliary_state holds the execution provenance %v in the checkpoint, %v in this run",
			d.c.Aux.Provenance.Digest, runs)
	case d.q.AuxiliaryState == nil && !d.Base.full() && !is.IsZero():
		return CannotTell, "the request leaves auxiliary_state out; to be equal it needs the base under its original file " +
			"names, which the summary of this base does not show"
	case d.q.AuxiliaryState == nil:
		return leftOut("auxiliary_state")
	}
	return same("auxiliary_state", difference("auxiliary_state", d.c.AuxiliaryState, d.q.AuxiliaryState))
}

// progress checks what Kiln checks last, as far as the manifest holds it. The loop state itself stands in a file.
func (d decision) progress() (Verdict, string) {
	switch d.c.Training {
	case documents.TrainingSFT:
		return d.progressSFT()
	case documents.TrainingGRPO:
		return d.progressGRPO()
	}
	return CannotTell, "how Kiln compares the loop state of " + d.c.Training + " is not known here"
}

// loopFile is what is said about the loop state, which is not read here.
const loopFile = "the loop-state file is as the trainer wrote it"

func (d decision) progressSFT() (Verdict, string) {
	p, items := d.c.Progress, d.c.Data.Items
	epochs := p.TotalSteps / items
	if p.Epoch >= epochs {
		return No, fmt.Sprintf("epoch %d is outside the %d epochs of %d steps over %d items", p.Epoch, epochs, p.TotalSteps,
			items)
	}
	carry, before := bits.Mul64(p.Epoch, items)
	implied, over := bits.Add64(before, p.Cursor, 0)
	if carry != 0 || over != 0 || implied != p.GlobalStep {
		return No, fmt.Sprintf("epoch %d and cursor %d over %d items imply another step than %d", p.Epoch, p.Cursor, items,
			p.GlobalStep)
	}
	if v, reason := d.order(); v != Yes {
		return v, reason
	}
	if !d.FilesChecked {
		return CannotTell, "the loop-state file was not checked"
	}
	return Yes, fmt.Sprintf("epoch %d and cursor %d give step %d, the data order is equal in both, and %s", p.Epoch,
		p.Cursor,
		p.GlobalStep, loopFile)
}

func (d decision) progressGRPO() (Verdict, string) {
	switch p := d.c.Progress; {
	case p.Epoch != 0 || p.Cursor != p.GlobalStep:
		return No, fmt.Sprintf("epoch %d and cursor %d imply another step than %d", p.Epoch, p.Cursor, p.GlobalStep)
	case d.q.EffectiveConfig == nil || d.q.AuxiliaryState == nil || d.q.State == nil:
		return CannotTell, "route and EMA cadence can't be compared: the request leaves effective_config, state_files or " +
			"auxiliary_state out"
	case !d.FilesChecked:
		return CannotTell, "the loop-state file was not checked"
	}
	return Yes, fmt.Sprintf("the cursor is at step %d, route and EMA cadence are compared above, and %s",
		d.c.Progress.GlobalStep,
		loopFile)
}

func quote(s string) string { return fmt.Sprintf("%.80q", s) }

// fileName names a state file, which may be none.
func fileName(s string) string {
	if s == "" {
		return "none"
	}
	return quote(s)
}

func decimal(v uint64) string { return strconv.FormatUint(v, 10) }
