package resume

import (
	"errors"
	"strconv"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// KindRequest names a request in messages.
const KindRequest documents.Kind = "resume request"

const requestType = "kiln.resume-request.v1"

// Request is what a run says about itself that wants to continue from a checkpoint (kiln.resume-request.v1). Whatever
// it leaves out can't be compared, and the answer says so. It is strict: these members and no others, in any order; all
// but the first two may be absent or null, and mean what they mean in a checkpoint manifest.
//
//	{"schema_version": 1, "request_type": "kiln.resume-request.v1",
//	 "training_kind": "sft",
//	 "adapter_name": "demo",
//	 "seed": 7,                                a number, or a string of digits
//	 "effective_config": {…},
//	 "precision_policy": {"parameter_dtype": …, "optimizer_state_dtype": …, "activation_dtype": …,
//	                      "gradient_dtype": …, "stochastic_rounding": {…}},
//	 "data": {"source_kind": …, "content_sha256": "<64 hex>", "item_count": 2},
//	 "total_steps": 2,
//	 "data_order": [1, 0],
//	 "optimizer": {"kind": …, "hyperparameters": {…}, "step": 1, "state_file": …},    step may be left out; no state_file:
//	                                                                                  there is none
//	 "scheduler": {"kind": …, "state": {…}, "step": 1},                               step may be left out
//	 "rng_states": {"lora-init": {"algorithm": …, "seed": 7, "position": 0, "state_file": …}},
//	 "state_files": {"adapter_parameters": …, …},
//	 "execution_provenance": {…},              a whole kiln.execution-provenance.v1
//	 "auxiliary_state": {…}}
//
// Nil and the empty text mean that the request leaves it out.
type Request struct {
	Training        string
	Adapter         string
	Seed            *uint64
	EffectiveConfig []byte // a JSON object
	Precision       *documents.Precision
	Data            *documents.Data
	TotalSteps      *uint64
	Order           []uint64 // data_order; not nil if it is there
	Optimizer       *Optimizer
	Scheduler       *Scheduler
	RNG             map[string]documents.RNG
	State           *documents.StateFiles
	Provenance      *documents.Provenance
	AuxiliaryState  []byte // a JSON object
}

// Optimizer is the optimizer of a request.
type Optimizer struct {
	documents.Optimizer
	HasStep bool // the request gives the step
}

// Scheduler is the scheduler of a request.
type Scheduler struct {
	documents.Scheduler
	HasStep bool // the request gives the step
}

// ParseRequest reads a request. The error is a *documents.Error.
func ParseRequest(data []byte) (Request, error) {
	var q Request
	if err := documents.Read(KindRequest, data, func(r *strictjson.Reader) error { return q.read(r) }); err != nil {
		return Request{}, err
	}
	return q, nil
}

type field = strictjson.Field

func (q *Request) read(r *strictjson.Reader) error {
	return r.Struct(
		field{Name: "schema_version", Read: func() error { return version(r) }},
		field{Name: "request_type", Read: func() error { return constant(r, requestType) }},
		optional("training_kind", func() error { return training(r, &q.Training) }),
		optional("adapter_name", func() error { return notEmpty(r, &q.Adapter) }),
		optional("seed", func() (err error) { q.Seed, err = seed(r); return err }),
		optional("effective_config", func() (err error) { q.EffectiveConfig, err = object(r); return err }),
		optional("precision_policy", func() error { return nested(r, documents.ParsePrecision, &q.Precision) }),
		optional("data", func() (err error) { q.Data, err = readData(r); return err }),
		optional("total_steps", func() error {
			v, err := r.Uint64()
			q.TotalSteps = &v
			return err
		}),
		optional("data_order", func() (err error) { q.Order, err = readOrder(r); return err }),
		optional("optimizer", func() (err error) { q.Optimizer, err = readOptimizer(r); return err }),
		optional("scheduler", func() (err error) { q.Scheduler, err = readScheduler(r); return err }),
		optional("rng_states", func() (err error) { q.RNG, err = readRNG(r); return err }),
		optional("state_files", func() (err error) { q.State, err = readState(r); return err }),
		optional("execution_provenance", func() error { return nested(r, documents.ParseProvenance, &q.Provenance) }),
		optional("auxiliary_state", func() (err error) { q.AuxiliaryState, err = object(r); return err }))
}

func optional(name string, read func() error) field {
	return field{Name: name, Optional: true, Read: read}
}

func text(r *strictjson.Reader, name string, to *string) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.String(); return err }}
}

func number(r *strictjson.Reader, name string, to *uint64) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.Uint64(); return err }}
}

func free(r *strictjson.Reader, name string, to *[]byte) field {
	return field{Name: name, Read: func() (err error) { *to, err = object(r); return err }}
}

// maybe makes a member optional.
func maybe(f field) field {
	f.Optional = true
	return f
}

func version(r *strictjson.Reader) error {
	at := r.Offset()
	v, err := r.Uint32()
	if err == nil && v != 1 {
		err = r.Fail(at, documents.RuleSchemaVersion, "is %d, only 1 is read", v)
	}
	return err
}

func constant(r *strictjson.Reader, want string) error {
	at := r.Offset()
	s, err := r.String()
	if err == nil && s != want {
		err = r.Fail(at, documents.RuleDocumentType, "is %.80q, must be %q", s, want)
	}
	return err
}

func training(r *strictjson.Reader, to *string) (err error) {
	at := r.Offset()
	if *to, err = r.String(); err != nil {
		return err
	}
	switch *to {
	case documents.TrainingSFT, documents.TrainingGRPO, documents.TrainingOPD, documents.TrainingDistillation:
		return nil
	}
	return r.Fail(at, documents.RuleValue, "is %.80q, must be sft, grpo, opd or capability-distillation", *to)
}

// notEmpty reads a text for which "" means that it is left out, so it can't be given as "".
func notEmpty(r *strictjson.Reader, to *string) (err error) {
	at := r.Offset()
	if *to, err = r.String(); err == nil && *to == "" {
		err = r.Fail(at, documents.RuleText, "is empty: leave it out instead")
	}
	return err
}

func seed(r *strictjson.Reader) (*uint64, error) {
	at := r.Offset()
	if r.Kind() != strictjson.String {
		v, err := r.Uint64()
		return &v, err
	}
	s, err := r.String()
	if err != nil {
		return nil, err
	}
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return nil, r.Fail(at, strictjson.RuleU64, "want an integer from 0 to 2^64-1 in decimal digits, got %.40q", s)
	}
	return &v, nil
}

func object(r *strictjson.Reader) ([]byte, error) {
	if r.Kind() != strictjson.Object {
		return nil, r.Object(nil) // which says what is there instead
	}
	return r.Raw()
}

// nested reads a value with the reader of a document of its own.
func nested[T any](r *strictjson.Reader, parse func([]byte) (T, error), to *T) error {
	at := r.Offset()
	data, err := r.Raw()
	if err != nil {
		return err
	}
	if *to, err = parse(data); err == nil {
		return nil
	}
	e, ok := errors.AsType[*strictjson.Error](err)
	if !ok {
		return r.Fail(at, documents.RuleValue, "%v", err)
	}
	if e.Offset >= 0 {
		at += e.Offset
	}
	return &strictjson.Error{Rule: e.Rule, Offset: at, Path: e.Path, Msg: e.Msg}
}

func readData(r *strictjson.Reader) (*documents.Data, error) {
	d := new(documents.Data)
	return d, r.Struct(text(r, "source_kind", &d.SourceKind), number(r, "item_count", &d.Items),
		field{Name: "content_sha256", Read: func() error {
			at := r.Offset()
			s, err := r.String()
			if err != nil {
				return err
			}
			if d.Content, err = identity.ParseDigest("sha256:" + s); err != nil {
				return r.Fail(at, documents.RuleDigestForm, "%.80q: want 64 lowercase hex digits without a prefix", s)
			}
			return nil
		}})
}

func readOrder(r *strictjson.Reader) ([]uint64, error) {
	order := []uint64{}
	err := r.Array(func(int) error {
		v, err := r.Uint64()
		order = append(order, v)
		return err
	})
	return order, err
}

func readOptimizer(r *strictjson.Reader) (*Optimizer, error) {
	o := new(Optimizer)
	return o, r.Struct(text(r, "kind", &o.Kind), free(r, "hyperparameters", &o.Hyperparameters),
		maybe(text(r, "state_file", &o.StateFile)), step(r, &o.Step, &o.HasStep))
}

func readScheduler(r *strictjson.Reader) (*Scheduler, error) {
	s := new(Scheduler)
	return s, r.Struct(text(r, "kind", &s.Kind), free(r, "state", &s.State), step(r, &s.Step, &s.HasStep))
}

func step(r *strictjson.Reader, to *uint64, has *bool) field {
	return optional("step", func() (err error) {
		*has = true
		*to, err = r.Uint64()
		return err
	})
}

func readRNG(r *strictjson.Reader) (map[string]documents.RNG, error) {
	all := map[string]documents.RNG{}
	err := r.Object(func(name string) error {
		var s documents.RNG
		err := r.Struct(text(r, "algorithm", &s.Algorithm), number(r, "seed", &s.Seed), number(r, "position", &s.Position),
			maybe(text(r, "state_file", &s.StateFile)))
		all[name] = s
		return err
	})
	return all, err
}

func readState(r *strictjson.Reader) (*documents.StateFiles, error) {
	s := new(documents.StateFiles)
	return s, r.Struct(text(r, "adapter_parameters", &s.AdapterParameters),
		maybe(text(r, "optimizer_state", &s.OptimizerState)), maybe(text(r, "reference_state", &s.ReferenceState)),
		maybe(text(r, "ema_state", &s.EMAState)),
		maybe(text(r, "reward_normalization_state", &s.RewardNormalization)),
		maybe(text(r, "loss_history", &s.LossHistory)))
}
