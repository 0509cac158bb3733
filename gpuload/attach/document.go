// Package attach is for a process that uses weights which another process of this machine holds: it asks for a base
// model by its aggregate, maps the memory that is there, and reads, hashes or copies nothing. doc/attach.md has the
// protocol.
//
// It opens host memory itself. Memory of a device it hands on as handles, to be opened by the package of that device.
package attach

import (
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// The fixed members of a document.
const (
	SchemaVersion   = 1
	TypeWeights     = "kiln.resident-weights.v1" // of a base model
	TypeAdapter     = "kiln.resident-adapter.v1"
	MethodFull      = "sha256-full" // every byte was hashed as it was loaded
	ModeZeroCopy    = "zero_copy"   // the memory is used where it is
	MaxDocument     = 256 << 20     // bytes of a document that is read
	MaxDescriptors  = 64            // in one message
	maxInteger      = 1<<53 - 1     // what every reader of JSON keeps
	tensorAlignment = 16            // bytes; see gpuload.Tensor
)

// The kinds of handles.
const (
	KindFile = "memfd"    // a descriptor of sealed host memory
	KindIPC  = "cuda-ipc" // 64 bytes for cuIpcOpenMemHandle
	KindVMM  = "vmm-fd"   // a descriptor for cuMemImportFromShareableHandle
)

// Document says what is held and how to get at it. One without a lease has no handles.
type Document struct {
	Version      int                `json:"schema_version"`
	Type         string             `json:"document_type"`
	Algorithm    string             `json:"aggregate_algorithm"`
	Aggregate    identity.Aggregate `json:"aggregate_sha256"` // of an adapter: the base that it was made for
	Adapter      *Adapter           `json:"adapter,omitempty"`
	Verification Verification       `json:"verification"`
	Devices      []Device           `json:"devices"`
	Shards       []Shard            `json:"shards"`
	Tensors      []gpuload.Tensor   `json:"tensors"`
	Lease        *Lease             `json:"lease"`
	Generation   uint64             `json:"generation"`
}

// Adapter names the artifact that an adapter's weights are from.
type Adapter struct {
	Digest identity.Digest `json:"digest"` // of its manifest
	Name   string          `json:"name"`   // for people
}

// Verification says what was checked before publication.
type Verification struct {
	Method    string    `json:"method"`
	Completed time.Time `json:"completed_at"`
	Bytes     int64     `json:"bytes"`     // that were hashed, headers included
	ReadBack  bool      `json:"read_back"` // they were read back from the device and hashed again
}

// Device is one place where shards are. A process finds it by its UUID: indices differ between processes.
type Device struct {
	Index   int    `json:"index"` // as the holder counts
	UUID    string `json:"uuid"`  // empty: the host
	PCI     string `json:"pci"`   // empty: not known
	Backend string `json:"backend"`
}

// Shard is one file of a base or an adapter. Its header is not in memory, only its data.
type Shard struct {
	Name     string          `json:"name"`
	Digest   identity.Digest `json:"sha256"`     // of the whole file
	Size     int64           `json:"size_bytes"` // of the whole file
	Data     int64           `json:"data_nbytes"`
	Device   int             `json:"device"`
	IPC      *IPC            `json:"ipc"` // nil: no data, or no lease
	Replicas []Replica       `json:"replicas,omitempty"`
}

// Replica is the data of a shard on a further device.
type Replica struct {
	Device int  `json:"device"`
	IPC    *IPC `json:"ipc"`
}

// IPC is a handle. Which members it has depends on the kind.
type IPC struct {
	Kind       string `json:"kind"`
	Handle     []byte `json:"handle,omitempty"`           // KindIPC
	Descriptor *int   `json:"descriptor,omitempty"`       // KindFile, KindVMM: counts from 0 in the order of the document
	Allocation int64  `json:"allocation_bytes,omitempty"` // KindVMM: of the memory behind the handle
	Offset     int64  `json:"offset"`                     // of the shard's data in that memory
}

// Lease is the right to use the handles: it lasts while the connection does.
type Lease struct {
	ID   string `json:"id"`
	Mode string `json:"mode"`
}

// places calls f for each place of each shard that has data, in the order of shard and then of device.
func (d *Document) places(f func(shard, device int, ipc **IPC) error) error {
	for i := range d.Shards {
		s := &d.Shards[i]
		if s.Data == 0 {
			continue
		}
		if err := f(i, s.Device, &s.IPC); err != nil {
			return err
		}
		for j := range s.Replicas {
			if err := f(i, s.Replicas[j].Device, &s.Replicas[j].IPC); err != nil {
				return err
			}
		}
	}
	return nil
}

// device returns a device by its index.
func (d *Document) device(index int) (Device, bool) {
	for _, v := range d.Devices {
		if v.Index == index {
			return v, true
		}
	}
	return Device{}, false
}
