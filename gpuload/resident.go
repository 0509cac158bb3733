package gpuload

import (
	"context"
	"fmt"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
)

// State is where a load stands. The first four lead to Failed or to the next; only Published has handles.
type State string

// The states, in order.
const (
	Planned    State = "planned"
	Allocating State = "allocating"
	Loading    State = "loading"
	Verifying  State = "verifying"
	Published  State = "published"
	Draining   State = "draining"
	Freed      State = "freed"
	Failed     State = "failed"
)

// Resident is a base model in memory whose every byte was checked. Close gives the memory back. It is safe for concurrent
// use.
type Resident struct {
	manifest identity.Manifest
	plan     Plan
	stats    Stats
	target   Target
	devices  []Device
	blocks   blocks
	options  Options
	handles  []Handle

	mu     sync.Mutex
	state  State
	leases int
	idle   chan struct{} // closed when draining and no lease is left
}

// Manifest returns the identity of the bytes, made from what was read and hashed.
func (r *Resident) Manifest() identity.Manifest { return r.manifest }

// Shards returns the shards in the order of the manifest. They must not be changed.
func (r *Resident) Shards() []Shard { return r.plan.Shards }

// Header returns the bytes of a shard's file that are not in its blocks: those before its data. They must not be changed.
func (r *Resident) Header(shard int) []byte { return r.plan.Shards[shard].header }

// Tensors returns the table of tensors. It must not be changed.
func (r *Resident) Tensors() []Tensor { return r.plan.Tensors }

// Devices returns the devices of the target as they were before the load. Each handle names one of them by its index.
// They must not be changed.
func (r *Resident) Devices() []Device { return r.devices }

// Stats says how the load went.
func (r *Resident) Stats() Stats { return r.stats }

// State returns Published, Draining or Freed.
func (r *Resident) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// Lease returns the handles of the blocks, in order of shard and then of device, and keeps them valid until release is
// called. The handles must not be closed or changed. Once Close was called it gives ErrState.
func (r *Resident) Lease() (handles []Handle, release func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != Published {
		return nil, nil, fmt.Errorf("lease weights that are %s: %w", r.state, ErrState)
	}
	r.leases++
	return r.handles, sync.OnceFunc(r.release), nil
}

func (r *Resident) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leases--; r.leases == 0 && r.state == Draining {
		close(r.idle)
	}
}

// Close gives out no more leases, waits until all are released or ctx ends, and frees the memory in either case. An
// error says that leases were left or that freeing failed. A second Close does nothing.
func (r *Resident) Close(ctx context.Context) error {
	r.mu.Lock()
	if r.state != Published {
		r.mu.Unlock()
		return nil
	}
	r.state, r.idle = Draining, make(chan struct{})
	if r.leases == 0 {
		close(r.idle)
	}
	r.mu.Unlock()

	var left error
	select {
	case <-r.idle:
	case <-ctx.Done():
		select {
		case <-r.idle: // which was so, too
		default:
			left = fmt.Errorf("drain: weights were freed while leased: %w", context.Cause(ctx))
		}
	}
	err := r.target.Free()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state, r.handles = Freed, nil
	if err != nil {
		return fmt.Errorf("free the weights: %w", err)
	}
	return left
}
