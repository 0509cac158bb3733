package documents

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Limits and names of checkpoints, all Kiln's.
const (
	CheckpointSuffix = ".kiln-checkpoint" // of the folder
	checkpointType   = "kiln.training-checkpoint.v1"
	incompleteFile   = ".incomplete" // in a folder that is still being written
	maxFiles         = 64
	maxIdentifier    = 255  // bytes
	maxPath          = 1024 // bytes
)

// The kinds of training that write checkpoints.
const (
	TrainingSFT          = "sft"
	TrainingGRPO         = "grpo"
	TrainingOPD          = "opd"
	TrainingDistillation = "capability-distillation"
)

// Role says what a checkpoint file holds.
type Role string

// The roles of checkpoint files.
const (
	RoleAdapterParameters   Role = "adapter-parameters"
	RoleOptimizerState      Role = "optimizer-state"
	RoleReferenceState      Role = "reference-state"
	RoleEMAState            Role = "ema-state"
	RoleRewardNormalization Role = "reward-normalization-state"
	RoleRNGState            Role = "rng-state"
	RoleDataOrder           Role = "data-order"
	RoleLossHistory         Role = "loss-history"
)

var roles = []string{string(RoleAdapterParameters), string(RoleOptimizerState), string(RoleReferenceState),
	string(RoleEMAState), string(RoleRewardNormalization), string(RoleRNGState), string(RoleDataOrder),
	string(RoleLossHistory)}

// Checkpoint is a checkpoint_manifest.json, the description of a folder that holds everything to continue a training
// run exactly. It is no serving adapter. Free-form members are kept as they stand.
type Checkpoint struct {
	ID              string // checkpoint_id
	Training        string // training_kind, one of the constants above
	Adapter         string // adapter_name
	Created         string // created_at, RFC 3339
	EffectiveConfig []byte // a JSON object
	Precision       *Precision
	Progress        Progress
	Data            Data
	RNG             map[string]RNG // rng_states
	Optimizer       Optimizer
	Scheduler       Scheduler
	State           StateFiles
	AuxiliaryState  []byte // a JSON object
	Files           map[string]File
	Aux             Auxiliary // what auxiliary_state records of identities
}

// Progress says how far a run is.
type Progress struct {
	GlobalStep, TotalSteps, Epoch, Cursor uint64
	Order                                 []uint64 // data_order: of the items in the epoch
}

// Data is the identity of the training data.
type Data struct {
	SourceKind string
	Content    identity.Digest // content_sha256
	Items      uint64          // item_count
}

// RNG is one stream of random numbers.
type RNG struct {
	Algorithm      string
	Seed, Position uint64
	StateFile      string // empty: none
}

// Optimizer is the optimizer of a run.
type Optimizer struct {
	Kind            string
	Step            uint64
	Hyperparameters []byte // a JSON object
	StateFile       string // empty: none
}

// Scheduler is the learning-rate scheduler of a run.
type Scheduler struct {
	Kind  string
	Step  uint64
	State []byte // a JSON object
}

// StateFiles names the files that hold state. An empty name means that there is none.
type StateFiles struct {
	AdapterParameters, OptimizerState, ReferenceState, EMAState, RewardNormalization, LossHistory string
}

// File is one file of a checkpoint.
type File struct {
	Role   Role
	Size   uint64 // bytes, may be 0
	Digest identity.Digest
}

// Auxiliary is what is read of auxiliary_state.
type Auxiliary struct {
	BaseAggregate identity.Aggregate // base_model_weights_sha256
	Shards        identity.Manifest  // base_weight_shard_manifest
	Provenance    *Provenance        // nil: not recorded
	recorded      Identities
}

// ParseCheckpoint reads a checkpoint_manifest.json and checks every rule that does not need the files. No other members
// are allowed. Beyond Kiln's rules, what auxiliary_state says about the base must be valid and agree. The error is an
// *Error.
func ParseCheckpoint(data []byte) (Checkpoint, error) {
	c := checkpoint{sums: map[string]string{}}
	err := read(KindCheckpoint, MaxDocument, data, func(r reader) error {
		if err := c.read(r); err != nil {
			return err
		}
		return c.check()
	})
	if e, ok := errors.AsType[*Error](err); ok && e.Rule == RuleBaseConflict {
		e.Said, e.Other = c.Aux.BaseAggregate.String(), c.Aux.Shards.Aggregate.String()
		e.OtherAt = string(KindCheckpoint) + " $.auxiliary_state." + baseMember + ".aggregate_sha256"
	}
	if err != nil {
		return Checkpoint{}, err
	}
	return c.Checkpoint, nil
}

// checkpoint is a checkpoint as it stands in JSON, before the rules are checked.
type checkpoint struct {
	Checkpoint
	version uint32
	kind    string
	content string            // data.content_sha256
	sums    map[string]string // files.*.sha256
}

func (c *checkpoint) read(r reader) error {
	return r.Struct(
		field{Name: "schema_version", Read: func() (err error) { c.version, err = r.Uint32(); return err }},
		r.text("manifest_type", &c.kind),
		r.oneOf("checkpoint_kind", RuleValue, new(string), "resumable"),
		r.text("checkpoint_id", &c.ID),
		r.oneOf("training_kind", RuleValue, &c.Training, TrainingSFT, TrainingGRPO, TrainingOPD, TrainingDistillation),
		r.text("adapter_name", &c.Adapter),
		r.text("created_at", &c.Created),
		r.object("effective_config", &c.EffectiveConfig),
		r.precisionField("precision_policy", &c.Precision),
		field{Name: "progress", Read: func() error { return c.Progress.read(r) }},
		field{Name: "data", Read: func() error { return c.Data.read(r, &c.content) }},
		field{Name: "rng_states", Read: func() (err error) { c.RNG, err = readRNG(r); return err }},
		field{Name: "optimizer", Read: func() error { return c.Optimizer.read(r) }},
		field{Name: "scheduler", Read: func() error { return c.Scheduler.read(r) }},
		field{Name: "state_files", Read: func() error { return c.State.read(r) }},
		field{Name: "auxiliary_state", Read: func() (err error) {
			c.AuxiliaryState, err = r.span(func() error { return c.Aux.read(r) })
			return err
		}},
		field{Name: "files", Read: func() error { return c.readFiles(r) }})
}

func (p *Progress) read(r reader) error {
	return r.Struct(
		r.number("global_step", &p.GlobalStep), r.number("total_steps", &p.TotalSteps),
		r.number("epoch_index", &p.Epoch), r.number("cursor_in_epoch", &p.Cursor),
		r.list("data_order", func(int) error {
			v, err := r.Uint64()
			p.Order = append(p.Order, v)
			return err
		}))
}

func (d *Data) read(r reader, content *string) error {
	return r.Struct(
		r.text("source_kind", &d.SourceKind), r.text("content_sha256", content), r.number("item_count", &d.Items))
}

func readRNG(r reader) (map[string]RNG, error) {
	all := map[string]RNG{}
	err := r.Object(func(name string) error {
		var s RNG
		err := r.Struct(
			r.text("algorithm", &s.Algorithm), r.number("seed", &s.Seed), r.number("position", &s.Position),
			optional(r.checked("state_file", RulePath, &s.StateFile, relativePath)))
		all[name] = s
		return err
	})
	return all, err
}

func (o *Optimizer) read(r reader) error {
	return r.Struct(
		r.text("kind", &o.Kind), r.number("step", &o.Step), r.object("hyperparameters", &o.Hyperparameters),
		optional(r.checked("state_file", RulePath, &o.StateFile, relativePath)))
}

func (s *Scheduler) read(r reader) error {
	return r.Struct(r.text("kind", &s.Kind), r.number("step", &s.Step), r.object("state", &s.State))
}

func (s *StateFiles) read(r reader) error {
	return r.Struct(
		r.checked("adapter_parameters", RulePath, &s.AdapterParameters, relativePath),
		optional(r.checked("optimizer_state", RulePath, &s.OptimizerState, relativePath)),
		optional(r.checked("reference_state", RulePath, &s.ReferenceState, relativePath)),
		optional(r.checked("ema_state", RulePath, &s.EMAState, relativePath)),
		optional(r.checked("reward_normalization_state", RulePath, &s.RewardNormalization, relativePath)),
		optional(r.checked("loss_history", RulePath, &s.LossHistory, relativePath)))
}

func (c *checkpoint) readFiles(r reader) error {
	c.Files = map[string]File{}
	return r.Object(func(path string) error {
		var f File
		var role, sum string
		err := r.Struct(
			r.oneOf("role", RuleRole, &role, roles...), r.number("size_bytes", &f.Size), r.text("sha256", &sum))
		f.Role, c.sums[path] = Role(role), sum
		c.Files[path] = f
		return err
	})
}

func (a *Auxiliary) read(r reader) error {
	var aggregate identity.Digest
	// The hashes below belong to the training code, which may write something else there one day.
	hash := func(name string, to *identity.Digest) field {
		return field{Name: name, Read: func() error {
			if r.Kind() != strictjson.String {
				return r.Skip()
			}
			s, err := r.String()
			*to, _ = identity.ParseDigest(s)
			return err
		}}
	}
	err := r.lenient(
		optional(r.named("base_model_weights_sha256", &aggregate)),
		r.base(&a.Shards),
		r.provenanceField(&a.Provenance),
		optional(hash("model_config_sha256", &a.recorded.ModelConfig)),
		optional(hash("tokenizer_config_sha256", &a.recorded.TokenizerConfig)),
		optional(hash("chat_template_sha256", &a.recorded.ChatTemplate)),
		optional(hash("training_chat_template_sha256", &a.recorded.TrainingTemplate)))
	a.BaseAggregate = identity.Aggregate(aggregate)
	return err
}

// Base returns what c says about the base: a full manifest, the bare aggregate of a legacy checkpoint, or nothing.
func (c Checkpoint) Base() Binding {
	b := fullBinding(KindCheckpoint, "$.auxiliary_state."+baseMember, c.Aux.Shards)
	if b.Evidence == EvidenceNone && !c.Aux.BaseAggregate.IsZero() {
		b.Evidence, b.Aggregate = EvidenceAggregateOnly, c.Aux.BaseAggregate
		b.Path = "$.auxiliary_state.base_model_weights_sha256"
	}
	return b
}

// Legacy says whether c names its base by the bare aggregate only. Such a checkpoint is archival: no run can continue
// from it exactly.
func (c Checkpoint) Legacy() bool { return c.Base().Evidence == EvidenceAggregateOnly }

// Identities returns the other identities that c records.
func (c Checkpoint) Identities() Identities {
	return c.Aux.recorded.orElse(c.Aux.Provenance.Identities())
}

// Seed is the seed that the run takes from the checkpoint, rng_states["lora-init"].seed, if that is recorded.
func (c Checkpoint) Seed() (seed uint64, ok bool) {
	s, ok := c.RNG["lora-init"]
	return s.Seed, ok
}

// check checks the rules in Kiln's order, and then what auxiliary_state says about the base.
func (c *checkpoint) check() error {
	switch {
	case c.version != 1:
		return fault("schema_version", RuleSchemaVersion, "is %d, only 1 is read", c.version)
	case c.kind != checkpointType:
		return fault("manifest_type", RuleDocumentType, "is %.80q, must be %q", c.kind, checkpointType)
	}
	for _, f := range []struct {
		path, rule string
		check      func(string) error
		value      string
	}{
		{"checkpoint_id", RuleName, identifier, c.ID},
		{"adapter_name", RuleName, identifier, c.Adapter},
		{"created_at", RuleTimestamp, timestamp, c.Created},
	} {
		if err := f.check(f.value); err != nil {
			return fault(f.path, f.rule, "%v", err)
		}
	}
	for _, check := range []func() error{
		c.checkProgress, c.checkContracts, c.checkRNG, c.checkFiles, c.checkRoles, c.checkBase,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *checkpoint) checkProgress() error {
	p, n := c.Progress, uint64(len(c.Progress.Order))
	switch {
	case p.GlobalStep > p.TotalSteps:
		return fault("progress.global_step", RuleAgreement, "is %d, more than total_steps %d", p.GlobalStep, p.TotalSteps)
	case p.Cursor > n:
		return fault("progress.cursor_in_epoch", RuleAgreement, "is %d, more than the %d items of data_order", p.Cursor, n)
	case p.GlobalStep < p.TotalSteps && n == 0:
		return fault("progress.data_order", RuleCount, "is empty, but %d of %d steps are still to come",
			p.TotalSteps-p.GlobalStep, p.TotalSteps)
	case c.Data.Items == 0:
		return fault("data.item_count", RuleCount, "is 0, must be at least 1")
	case n > 0 && n != c.Data.Items:
		return fault("progress.data_order", RuleCount, "has %d items, but data.item_count is %d", n, c.Data.Items)
	}
	met := make([]bool, n)
	for i, item := range p.Order {
		switch {
		case item >= n:
			return fault(fmt.Sprintf("progress.data_order[%d]", i), RulePermutation, "is %d, must be less than %d", item, n)
		case met[item]:
			return fault(fmt.Sprintf("progress.data_order[%d]", i), RulePermutation, "is %d, which came before", item)
		}
		met[item] = true
	}
	return nil
}

// checkContracts checks data identity, optimizer and scheduler.
func (c *checkpoint) checkContracts() error {
	var err error
	if c.Data.Content, err = bareDigest(c.content); err != nil {
		return fault("data.content_sha256", RuleDigestForm, "%v", err)
	}
	for _, f := range [][2]string{
		{"data.source_kind", c.Data.SourceKind}, {"optimizer.kind", c.Optimizer.Kind}, {"scheduler.kind", c.Scheduler.Kind},
	} {
		if err := notBlank(f[1]); err != nil {
			return fault(f[0], RuleText, "%v", err)
		}
	}
	for _, f := range []struct {
		path string
		step uint64
	}{{"optimizer.step", c.Optimizer.Step}, {"scheduler.step", c.Scheduler.Step}} {
		if f.step != c.Progress.GlobalStep {
			return fault(f.path, RuleAgreement, "is %d, but progress.global_step is %d", f.step, c.Progress.GlobalStep)
		}
	}
	return nil
}

func (c *checkpoint) checkRNG() error {
	for _, name := range slices.Sorted(maps.Keys(c.RNG)) {
		s, at := c.RNG[name], fmt.Sprintf("rng_states[%.80q]", name)
		if err := identifier(name); err != nil {
			return fault(at, RuleName, "%v", err)
		}
		if err := notBlank(s.Algorithm); err != nil {
			return fault(at+".algorithm", RuleText, "%v", err)
		}
	}
	return nil
}

func (c *checkpoint) checkFiles() error {
	if n := len(c.Files); n < 1 || n > maxFiles {
		return fault("files", RuleCount, "%d files, must be 1 to %d", n, maxFiles)
	}
	for _, path := range slices.Sorted(maps.Keys(c.Files)) {
		at := fmt.Sprintf("files[%.80q]", path)
		if err := relativePath(path); err != nil {
			return fault(at, RulePath, "%v", err)
		}
		for dir := parent(path); dir != ""; dir = parent(dir) {
			if _, ok := c.Files[dir]; ok {
				return fault(at, RulePath, "%.80q is listed as a file, so nothing can be below it", dir)
			}
		}
		d, err := bareDigest(c.sums[path])
		if err != nil {
			return fault(at+".sha256", RuleDigestForm, "%v", err)
		}
		f := c.Files[path]
		f.Digest = d
		c.Files[path] = f
	}
	return nil
}

// parent is the folder that a path lies in, empty at the top.
func parent(path string) string { return path[:max(strings.LastIndexByte(path, '/'), 0)] }

// checkRoles checks that every state file is listed in the role it is named for.
func (c *checkpoint) checkRoles() error {
	type use struct {
		path, file string
		role       Role
	}
	uses := []use{
		{"state_files.adapter_parameters", c.State.AdapterParameters, RoleAdapterParameters},
		{"state_files.optimizer_state", c.State.OptimizerState, RoleOptimizerState},
		{"state_files.reference_state", c.State.ReferenceState, RoleReferenceState},
		{"state_files.ema_state", c.State.EMAState, RoleEMAState},
		{"state_files.reward_normalization_state", c.State.RewardNormalization, RoleRewardNormalization},
		{"state_files.loss_history", c.State.LossHistory, RoleLossHistory},
		{"optimizer.state_file", c.Optimizer.StateFile, RoleOptimizerState},
	}
	for _, name := range slices.Sorted(maps.Keys(c.RNG)) {
		uses = append(uses, use{fmt.Sprintf("rng_states[%q].state_file", name), c.RNG[name].StateFile, RoleRNGState})
	}
	for _, u := range uses {
		f, ok := c.Files[u.file]
		switch {
		case u.file == "": // none
		case !ok:
			return fault(u.path, RuleRole, "is %.80q, which $.files does not list", u.file)
		case f.Role != u.role:
			return fault(u.path, RuleRole, "is %.80q, which $.files lists as %s instead of %s", u.file, f.Role, u.role)
		}
	}
	if c.Optimizer.StateFile != c.State.OptimizerState {
		return fault("optimizer.state_file", RuleAgreement, "is %.80q, but state_files.optimizer_state is %.80q",
			c.Optimizer.StateFile, c.State.OptimizerState)
	}
	return nil
}

// checkBase checks that the bare aggregate and the full manifest name one base.
func (c *checkpoint) checkBase() error {
	said, shards := c.Aux.BaseAggregate, c.Aux.Shards.Aggregate
	if said.IsZero() || shards.IsZero() || said == shards {
		return nil
	}
	return fault("auxiliary_state.base_model_weights_sha256", RuleBaseConflict,
		"is %v, but auxiliary_state.%s.aggregate_sha256 is %v", said, baseMember, shards)
}

// Mode is what kind of entry a folder has, links not followed.
type Mode byte

// The kinds of entries.
const (
	Regular Mode = iota
	Directory
	Symlink
	Special // a device, a pipe, a socket
)

// String names the kind as messages do.
func (m Mode) String() string {
	return [...]string{"a regular file", "a folder", "a symbolic link", "a special file"}[m]
}

// Entry is one entry below a checkpoint folder.
type Entry struct {
	Path   string // relative to the folder, with forward slashes
	Mode   Mode
	Links  uint64 // hard links of a regular file; 1 where files come from a registry
	Size   uint64 // bytes, of a regular file
	Digest identity.Digest
}

// CheckCheckpointFolder checks what Kiln checks of a checkpoint folder before it reads the manifest, in its order: the
// name, the folder itself, whether it is complete, and the manifest file. After it follow ParseCheckpoint and
// Checkpoint.CheckFiles. name is the last component of the path. Digests are not looked at. The error is an *Error.
func CheckCheckpointFolder(name string, mode Mode, entries []Entry) error {
	switch {
	case !utf8.ValidString(name) || !strings.HasSuffix(name, CheckpointSuffix):
		return folderFault(RuleName, "the folder %.80q must have a name that ends with %s", name, CheckpointSuffix)
	case mode != Directory:
		return folderFault(RuleFileKind, "%.80q is %v, must be a folder", name, mode)
	}
	have := byPath(entries)
	if _, ok := have[incompleteFile]; ok {
		return folderFault(RuleFileExtra, "%s is there: the folder was not written to its end", incompleteFile)
	}
	m, ok := have[CheckpointFile]
	if !ok {
		return folderFault(RuleFileMissing, "%s is not there: this is no checkpoint", CheckpointFile)
	}
	if err := checkRegular(m); err != nil {
		return err
	}
	if m.Size > MaxDocument {
		return folderFault(RuleInputSize, "%s has %d bytes, at most %d are read", CheckpointFile, m.Size, MaxDocument)
	}
	return nil
}

// CheckFiles checks the files of the folder against c, in Kiln's order: nothing but folders and regular files, exactly
// the listed files and the manifest, then for each file that it has one name, its size and its digest. The error is an
// *Error.
func (c Checkpoint) CheckFiles(entries []Entry) error {
	have := byPath(entries)
	for _, path := range slices.Sorted(maps.Keys(have)) {
		e := have[path]
		_, listed := c.Files[path]
		switch {
		case e.Mode == Directory && !listed:
		case e.Mode != Regular:
			return folderFault(RuleFileKind, "%.200q is %v, must be %v", path, e.Mode, Regular)
		case !listed && path != CheckpointFile:
			return folderFault(RuleFileExtra, "the file %.200q is not listed", path)
		}
	}
	paths := slices.Sorted(maps.Keys(c.Files))
	for _, path := range append([]string{CheckpointFile}, paths...) {
		if _, ok := have[path]; !ok {
			return folderFault(RuleFileMissing, "the file %.200q is not there", path)
		}
	}
	for _, path := range paths {
		if err := c.Files[path].check(have[path]); err != nil {
			return err
		}
	}
	return nil
}

func (f File) check(e Entry) error {
	if err := checkRegular(e); err != nil {
		return err
	}
	switch {
	case e.Size != f.Size:
		return &Error{Kind: KindCheckpoint, Rule: RuleFileSize, Path: fmt.Sprintf("$.files[%.200q].size_bytes", e.Path),
			Msg:  fmt.Sprintf("the file %.200q has %d bytes, must have %d", e.Path, e.Size, f.Size),
			Said: strconv.FormatUint(f.Size, 10), Other: strconv.FormatUint(e.Size, 10), OtherAt: e.Path}
	case e.Digest != f.Digest:
		return &Error{Kind: KindCheckpoint, Rule: RuleFileDigest, Path: fmt.Sprintf("$.files[%.200q].sha256", e.Path),
			Msg:  fmt.Sprintf("the file %.200q has %v, must have %v", e.Path, e.Digest, f.Digest),
			Said: f.Digest.String(), Other: e.Digest.String(), OtherAt: e.Path}
	}
	return nil
}

// checkRegular checks that e is a regular file with one name.
func checkRegular(e Entry) error {
	if e.Mode != Regular {
		return folderFault(RuleFileKind, "%.200q is %v, must be %v", e.Path, e.Mode, Regular)
	}
	if e.Links != 1 {
		return folderFault(RuleFileKind, "the file %.200q has %d hard links, must have 1", e.Path, e.Links)
	}
	return nil
}

func byPath(entries []Entry) map[string]Entry {
	m := make(map[string]Entry, len(entries))
	for _, e := range entries {
		m[e.Path] = e
	}
	return m
}

func folderFault(rule, format string, args ...any) error {
	return &Error{Kind: KindCheckpoint, Rule: rule, Path: "$.files", Msg: fmt.Sprintf(format, args...)}
}
