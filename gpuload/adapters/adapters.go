// Package adapters holds adapters in memory beside the base model that they were made from. Each has an allocation and
// a publish gate of its own, so that the base is not touched when one comes or goes.
//
// An adapter is loaded only where it states the base that is held: by a full shard manifest among its documents, or by
// an assertion about it, never by a name. Its bytes are checked as those of a base are: against the digests of its
// manifest, and these against its documents.
package adapters

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// Limits.
const (
	DefaultLimit = 4 << 30 // bytes of adapters
	DefaultMost  = 256     // adapters
	MaxFile      = 1 << 20 // bytes of a document that is kept beside the weights
	maxLoads     = 4       // at a time
)

// The reasons that a caller tells apart with errors.Is.
var (
	ErrName      = errors.New("names no adapter")             // the text has no form that an adapter is named by
	ErrUnknown   = errors.New("no such adapter")              // is loaded, or held by the registry
	ErrSeveral   = errors.New("several adapters are meant")   // by one name
	ErrOtherBase = errors.New("not of the base that is held") // of another, of none that is stated, or that is disputed
	ErrRefused   = errors.New("the adapter is not whole")     // its files break a rule, or are others than they should be
	ErrRegistry  = errors.New("the registry gave no adapter") // it can't be reached, refused, or failed
	ErrInUse     = errors.New("somebody has it attached")
	ErrNoRoom    = errors.New("no room for the adapter")
	ErrClosed    = errors.New("the base is about to go")
)

// Options says how the adapters of a base are found and where they go.
type Options struct {
	Base identity.Aggregate // that is held
	// Target gives fresh memory for one adapter.
	Target func() (gpuload.Target, error)
	Dial   transfer.Dial
	// Registry is asked for digests and for names; empty: adapters are named by references and folders alone.
	Registry string
	Limit    int64           // bytes of all adapters; 0: DefaultLimit
	Most     int             // adapters; 0: DefaultMost
	Load     gpuload.Options // of each
}

// Adapter is one that is held.
type Adapter struct {
	Digest   identity.Digest    `json:"digest"`         // of its manifest; of a folder, the one that a push would give it
	Name     string             `json:"name,omitempty"` // a label that it gives itself; empty: none
	From     string             `json:"from"`           // the reference that names it, or a folder
	Base     identity.Aggregate `json:"aggregate_sha256"`
	Evidence documents.Evidence `json:"evidence"`  // what Base rests on: document or asserted
	StatedAt string             `json:"stated_at"` // where that stands
	Bytes    int64              `json:"size_bytes"`
	Files    []File             `json:"files"` // beside the weights
	Leases   int                `json:"leases"`
	LoadedAt time.Time          `json:"loaded_at"`
}

// File is a document of an adapter that is kept with it.
type File struct {
	Name   string          `json:"name"`
	Size   int64           `json:"size_bytes"`
	Digest identity.Digest `json:"sha256"`
}

// Set are the adapters of one base. Made by New; it is safe for concurrent use.
type Set struct {
	o     Options
	ctx   context.Context // ends with Close
	stop  context.CancelCauseFunc
	loads chan struct{} // a place for each that runs

	mu         sync.Mutex
	running    int           // loads and unloads
	idle       chan struct{} // closed when the set is closed and none runs
	slots      map[identity.Digest]*slot
	used       int64 // bytes of the slots, those that are on their way to be freed left out
	clock      uint64
	generation uint64
	changed    chan struct{} // closed, and made anew, with each generation
	closed     bool
}

// slot is the place of one adapter, from the moment that it was found until it is given up.
type slot struct {
	Adapter
	done    chan struct{} // closed when the load has ended; what follows is set then
	err     error
	weights *gpuload.Resident
	texts   map[string][]byte // of Files

	waiting  int // callers of Load, before done is closed
	cancel   context.CancelCauseFunc
	reserved bool   // its bytes are counted
	last     uint64 // when it was last loaded, attached or let go
}

// New returns the adapters of a base, of which there are none yet, at generation 1.
func New(o Options) *Set {
	o.Limit, o.Most = cmp.Or(o.Limit, DefaultLimit), cmp.Or(o.Most, DefaultMost)
	ctx, stop := context.WithCancelCause(context.Background())
	return &Set{o: o, ctx: ctx, stop: stop, loads: make(chan struct{}, maxLoads), slots: map[identity.Digest]*slot{},
		generation: 1, changed: make(chan struct{}), idle: make(chan struct{})}
}

// List returns the adapters that are loaded, in order of name.
func (s *Set) List() []Adapter {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []Adapter{}
	for _, x := range s.slots {
		if x.weights != nil {
			list = append(list, x.Adapter)
		}
	}
	slices.SortFunc(list, func(a, b Adapter) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Digest.String(), b.Digest.String()))
	})
	return list
}

// Generation counts from 1 the adapters that came and went.
func (s *Set) Generation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// Wait returns the generation once it is above after, ctx ended or the set was closed.
func (s *Set) Wait(ctx context.Context, after uint64) uint64 {
	for {
		s.mu.Lock()
		now, changed := s.generation, s.changed
		s.mu.Unlock()
		if now > after {
			return now
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return now
		case <-s.ctx.Done():
			return now
		}
	}
}

// changes begins the next generation. The caller holds mu.
func (s *Set) changes() {
	s.generation++
	close(s.changed)
	s.changed = make(chan struct{})
}

// Lease keeps an adapter in memory until Release is called.
type Lease struct {
	Adapter Adapter
	Weights *gpuload.Resident
	Handles []gpuload.Handle // see gpuload.Resident.Lease
	release func()
}

// Release ends the lease. A second call does nothing.
func (l *Lease) Release() { l.release() }

// Attach leases an adapter that is loaded. ErrUnknown, ErrClosed.
func (s *Set) Attach(d identity.Digest) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.find(d)
	if err != nil {
		return nil, fmt.Errorf("attach to adapter %s: %w", d, err)
	}
	handles, release, err := x.weights.Lease()
	if err != nil {
		return nil, fmt.Errorf("attach to adapter %s: %w", d, err)
	}
	x.Leases++
	s.touch(x)
	return &Lease{x.Adapter, x.weights, handles, sync.OnceFunc(func() {
		s.mu.Lock()
		x.Leases--
		s.touch(x)
		s.mu.Unlock()
		release()
	})}, nil
}

// Show returns an adapter that is loaded, without a lease. ErrUnknown, ErrClosed.
func (s *Set) Show(d identity.Digest) (Adapter, *gpuload.Resident, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.find(d)
	if err != nil {
		return Adapter{}, nil, fmt.Errorf("adapter %s: %w", d, err)
	}
	return x.Adapter, x.weights, nil
}

// Text returns a document of an adapter that is loaded. It must not be changed. ErrUnknown, ErrClosed.
func (s *Set) Text(d identity.Digest, name string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.find(d)
	if err != nil {
		return nil, fmt.Errorf("adapter %s: %w", d, err)
	}
	if _, ok := x.texts[name]; !ok {
		return nil, fmt.Errorf("adapter %s keeps no file %.200q, only %q: %w", d, name,
			slices.Sorted(maps.Keys(x.texts)), ErrUnknown)
	}
	return x.texts[name], nil
}

// find returns a slot that is loaded. The caller holds mu.
func (s *Set) find(d identity.Digest) (*slot, error) {
	if s.closed {
		return nil, ErrClosed
	}
	x := s.slots[d]
	if x == nil || x.weights == nil {
		return nil, fmt.Errorf("%w is loaded", ErrUnknown)
	}
	return x, nil
}

func (s *Set) touch(x *slot) {
	s.clock++
	x.last = s.clock
}

// Unload frees an adapter that nobody has attached. ErrUnknown, ErrInUse, ErrClosed; any other error says that it is
// gone, but that memory may be left.
func (s *Set) Unload(d identity.Digest) error {
	s.mu.Lock()
	x, err := s.find(d)
	if err == nil && x.Leases > 0 {
		err = fmt.Errorf("%w: %d leases", ErrInUse, x.Leases)
	}
	if err == nil {
		s.drop(x)
		s.running++
	}
	s.mu.Unlock()
	if err == nil {
		err = x.weights.Close(context.Background())
		s.ended()
	}
	if err != nil {
		return fmt.Errorf("unload adapter %s: %w", d, err)
	}
	return nil
}

// drop forgets a slot that is loaded. The caller holds mu, and frees the memory.
func (s *Set) drop(x *slot) {
	delete(s.slots, x.Digest)
	s.used -= x.Bytes
	s.changes()
}

// ended counts one load or unload less.
func (s *Set) ended() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running--; s.closed && s.running == 0 {
		close(s.idle)
	}
}

// Audit reads every adapter back and hashes it again. What is unloaded meanwhile does not count. See
// gpuload.Resident.Audit.
func (s *Set) Audit(ctx context.Context) error {
	for _, a := range s.List() {
		l, err := s.Attach(a.Digest)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err == nil {
			err = l.Weights.Audit(ctx, nil)
			l.Release()
		}
		if err != nil {
			return fmt.Errorf("adapter %s: %w", a.Digest, err)
		}
	}
	return nil
}

// Close ends the loads that run, takes no new ones, waits until nobody has an adapter attached or ctx ends, and frees
// all of them in either case. An error says that leases were left or that freeing failed. A second Close does nothing.
func (s *Set) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	if s.running == 0 {
		close(s.idle)
	}
	s.mu.Unlock()
	s.stop(ErrClosed)
	var err error
	select {
	case <-s.idle:
	case <-ctx.Done():
		err = fmt.Errorf("a load did not end: %w", context.Cause(ctx))
	}
	s.mu.Lock()
	left := slices.DeleteFunc(slices.Collect(maps.Values(s.slots)), func(x *slot) bool { return x.weights == nil })
	s.slots, s.used = nil, 0
	s.mu.Unlock()
	freed := make(chan error)
	for _, x := range left {
		go func() { freed <- x.weights.Close(ctx) }()
	}
	for range left {
		err = errors.Join(err, <-freed)
	}
	return err
}
