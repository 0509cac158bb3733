package attach

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// handleBytes is the length of a CUDA IPC handle.
const handleBytes = 64

// Check says whether the document agrees with itself: see Parse.
func (d *Document) Check() error {
	for _, step := range []func() error{d.checkFixed, d.checkShards, d.checkIdentity, d.checkHandles, d.checkTensors} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (d *Document) checkFixed() error {
	switch {
	case d.Version != SchemaVersion:
		return fmt.Errorf("schema_version %d, want %d", d.Version, SchemaVersion)
	case d.Type != TypeWeights && d.Type != TypeAdapter:
		return fmt.Errorf("document_type %q, want %s or %s", d.Type, TypeWeights, TypeAdapter)
	case d.Algorithm != identity.AggregateAlgorithm:
		return fmt.Errorf("aggregate_algorithm %q, want %s", d.Algorithm, identity.AggregateAlgorithm)
	case d.Aggregate.IsZero():
		return errors.New("no aggregate")
	case (d.Type == TypeAdapter) != (d.Adapter != nil):
		return fmt.Errorf("a document of type %s, and adapter: %t", d.Type, d.Adapter != nil)
	case d.Adapter != nil && d.Adapter.Digest.IsZero():
		return errors.New("an adapter without a digest")
	case d.Verification.Method != MethodFull:
		return fmt.Errorf("verification by %q, want %s", d.Verification.Method, MethodFull)
	case d.Lease != nil && (d.Lease.ID == "" || d.Lease.Mode != ModeZeroCopy):
		return fmt.Errorf("lease %q of mode %q, want %s", d.Lease.ID, d.Lease.Mode, ModeZeroCopy)
	}
	return nil
}

// checkShards checks the devices, and each shard apart from its handles.
func (d *Document) checkShards() error {
	for i, v := range d.Devices {
		if slices.ContainsFunc(d.Devices[:i], func(o Device) bool { return o.Index == v.Index }) {
			return fmt.Errorf("device %d is there twice", v.Index)
		}
	}
	for _, s := range d.Shards {
		on := []int{s.Device}
		for _, p := range s.Replicas {
			if slices.Contains(on, p.Device) {
				return fmt.Errorf("shard %q is on device %d twice", s.Name, p.Device)
			}
			on = append(on, p.Device)
		}
		for _, index := range on {
			if _, ok := d.device(index); !ok {
				return fmt.Errorf("shard %q is on device %d, which is not listed", s.Name, index)
			}
		}
		if s.Data < 0 || s.Size < 8 || s.Data > s.Size-8 || s.Size > maxInteger {
			return fmt.Errorf("shard %q has %d bytes of data in a file of %d", s.Name, s.Data, s.Size)
		}
	}
	return nil
}

// checkIdentity sums the shards of a base anew.
func (d *Document) checkIdentity() error {
	shards := make([]identity.Shard, len(d.Shards))
	for i, s := range d.Shards {
		shards[i] = identity.Shard{Filename: s.Name, Size: uint64(s.Size), Digest: s.Digest}
	}
	m, err := identity.New(shards)
	if err == nil && d.Type == TypeWeights && m.Aggregate != d.Aggregate {
		err = fmt.Errorf("the aggregate is %s, that of the shards %s", d.Aggregate, m.Aggregate)
	}
	return err
}

// checkHandles checks that there is a handle wherever one must be, and none elsewhere.
func (d *Document) checkHandles() error {
	for _, s := range d.Shards {
		if s.Data == 0 && (s.IPC != nil || slices.ContainsFunc(s.Replicas, func(p Replica) bool { return p.IPC != nil })) {
			return fmt.Errorf("shard %q has a handle and no data", s.Name)
		}
	}
	next := 0
	return d.places(func(shard, _ int, at **IPC) error {
		s, p := d.Shards[shard], *at
		if p == nil || d.Lease == nil {
			if (p == nil) != (d.Lease == nil) {
				return fmt.Errorf("shard %q: lease: %t, handle: %t", s.Name, d.Lease != nil, p != nil)
			}
			return nil
		}
		if err := p.check(s.Data, next); err != nil {
			return fmt.Errorf("shard %q: %w", s.Name, err)
		}
		if p.Descriptor != nil {
			next++
		}
		return nil
	})
}

// check checks a handle of memory of which n bytes are to be used, where next is the number of the next descriptor.
func (p *IPC) check(n int64, next int) error {
	raw, vmm := p.Kind == KindIPC, p.Kind == KindVMM
	switch {
	case p.Kind != KindFile && !raw && !vmm:
		return fmt.Errorf("a handle of kind %q is not known here", p.Kind)
	case raw && len(p.Handle) != handleBytes, !raw && p.Handle != nil:
		return fmt.Errorf("a handle of kind %s with %d bytes", p.Kind, len(p.Handle))
	case raw != (p.Descriptor == nil):
		return fmt.Errorf("a handle of kind %s, and descriptor: %t", p.Kind, p.Descriptor != nil)
	case p.Descriptor != nil && *p.Descriptor != next:
		return fmt.Errorf("descriptor %d, want %d", *p.Descriptor, next)
	case p.Offset < 0 || p.Offset > maxInteger-n:
		return fmt.Errorf("offset %d", p.Offset)
	case vmm && p.Allocation-p.Offset < n, !vmm && p.Allocation != 0:
		return fmt.Errorf("a handle of kind %s for %d bytes at offset %d of %d", p.Kind, n, p.Offset, p.Allocation)
	}
	return nil
}

func (d *Document) checkTensors() error {
	first := make(map[string]gpuload.Tensor, len(d.Tensors))
	for _, t := range d.Tensors {
		if t.Shard < 0 || t.Shard >= len(d.Shards) {
			return fmt.Errorf("tensor %q is in shard %d of %d", t.Name, t.Shard, len(d.Shards))
		}
		if err := checkTensor(t, uint64(d.Shards[t.Shard].Data)); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		if o, ok := first[t.Name]; !ok {
			first[t.Name] = t
		} else if o.Shard == t.Shard {
			return fmt.Errorf("tensor %q is there twice", t.Name)
		} else if a, b := d.Shards[o.Shard], d.Shards[t.Shard]; a.Digest != b.Digest {
			return fmt.Errorf("tensor %q is in shard %q and in shard %q, which differ", t.Name, a.Name, b.Name)
		}
	}
	return nil
}

// checkTensor checks a tensor in a shard with so many bytes of data.
func checkTensor(t gpuload.Tensor, data uint64) error {
	width := safetensors.DType(t.DType).Bits()
	if width == 0 {
		return fmt.Errorf("dtype %q is not known here", t.DType)
	}
	size := width
	empty := slices.Contains(t.Shape, 0)
	for _, n := range t.Shape {
		high, low := bits.Mul64(size, n)
		if size = low; high != 0 && !empty {
			return fmt.Errorf("shape %v is too large", t.Shape)
		}
		if n > maxInteger {
			return fmt.Errorf("shape %v has a number that is not below 2^53", t.Shape)
		}
	}
	if empty {
		size = 0
	}
	switch {
	case size%8 != 0 || size/8 != t.NBytes:
		return fmt.Errorf("%d bytes for %s of shape %v", t.NBytes, t.DType, t.Shape)
	case t.Offset > data || t.NBytes > data-t.Offset:
		return fmt.Errorf("%d bytes at offset %d, its shard has %d", t.NBytes, t.Offset, data)
	case t.Aligned != (t.Offset%tensorAlignment == 0):
		return fmt.Errorf("offset %d, and aligned: %t", t.Offset, t.Aligned)
	}
	return nil
}
