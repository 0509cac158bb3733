package resident

import (
	"crypto/rand"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
)

// attachable is what others can attach to: a base, or an adapter.
type attachable struct {
	document attach.Document // without a lease
	lease    func() ([]gpuload.Handle, func(), error)
}

// describe makes the document of weights that are published. adapter is nil for a base. ErrState when they no longer
// are.
func describe(w *gpuload.Resident, base identity.Aggregate, adapter *attach.Adapter, at time.Time,
) (attach.Document, error) {
	d := attach.Document{
		Version: attach.SchemaVersion, Type: attach.TypeWeights, Algorithm: identity.AggregateAlgorithm, Aggregate: base,
		Adapter: adapter, Tensors: w.Tensors(),
		Verification: attach.Verification{
			Method: attach.MethodFull, Completed: at.UTC(), Bytes: w.Stats().Bytes, ReadBack: w.Stats().ReadBack > 0,
		},
	}
	if adapter != nil {
		d.Type = attach.TypeAdapter
	}
	digests := w.Manifest().Shards
	for i, s := range w.Shards() {
		d.Shards = append(d.Shards, attach.Shard{
			Name: s.Name, Digest: digests[i].Digest, Size: s.Size, Data: s.Size - s.Data,
		})
	}
	handles, release, err := w.Lease()
	if err != nil {
		return d, err
	}
	defer release()
	placed := make([]bool, len(d.Shards))
	for _, h := range handles {
		s := &d.Shards[h.Shard]
		if placed[h.Shard] {
			s.Replicas = append(s.Replicas, attach.Replica{Device: h.Device})
		} else {
			s.Device, placed[h.Shard] = h.Device, true
		}
	}
	d.Devices = used(w.Devices(), handles)
	return d, d.Check()
}

// used are the devices that a handle names.
func used(devices []gpuload.Device, handles []gpuload.Handle) []attach.Device {
	list := []attach.Device{}
	for _, v := range devices {
		if slices.ContainsFunc(handles, func(h gpuload.Handle) bool { return h.Device == v.Index }) {
			list = append(list, attach.Device{Index: v.Index, UUID: v.UUID, PCI: v.PCI, Backend: v.Backend})
		}
	}
	return list
}

// granted is a document with its handles, and what keeps them valid.
type granted struct {
	document attach.Document
	files    []*os.File // the descriptors, in order; they belong to the target
	release  func()
}

// grant leases the weights.
func (a *attachable) grant(generation uint64) (*granted, error) {
	handles, release, err := a.lease()
	if err != nil {
		return nil, err
	}
	g := &granted{document: a.document, release: release}
	g.document.Generation = generation
	g.document.Lease = &attach.Lease{ID: rand.Text(), Mode: attach.ModeZeroCopy}
	g.document.Shards = slices.Clone(a.document.Shards)
	for i := range g.document.Shards {
		g.document.Shards[i].Replicas = slices.Clone(g.document.Shards[i].Replicas)
	}
	if err := g.fill(handles); err != nil {
		release()
		return nil, err
	}
	return g, nil
}

// fill puts each handle, which are in the order of shard and then of device, in its place.
func (g *granted) fill(handles []gpuload.Handle) error {
	before, replica := -1, 0
	for _, h := range handles {
		s := &g.document.Shards[h.Shard]
		at := &s.IPC
		if replica++; h.Shard != before {
			before, replica = h.Shard, 0
		} else {
			at = &s.Replicas[replica-1].IPC
		}
		if s.Data == 0 {
			continue
		}
		p := &attach.IPC{Kind: h.Kind}
		switch h.Kind {
		case attach.KindIPC:
			p.Handle = h.Raw
		case attach.KindFile, attach.KindVMM:
			n := len(g.files)
			p.Descriptor, p.Allocation = &n, h.Allocation
			g.files = append(g.files, h.File)
		default:
			return fmt.Errorf("nobody can attach to memory of the kind %q", h.Kind)
		}
		*at = p
	}
	return nil
}
