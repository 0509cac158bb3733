package gpuload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"golang.org/x/sys/unix"
)

// Plan is what is to be loaded: the shard files, each with a header that was found valid, and the tensors in them. Made
// by NewPlan; it may be loaded more than once.
type Plan struct {
	Shards  []Shard
	Tensors []Tensor // in the order of shard and offset
	Want    Want
}

// Want is what the bytes must turn out to be. The zero Want takes any bytes: their identity is then whatever was read.
type Want struct {
	Manifest  *identity.Manifest // nil: not known. Each shard must have the name, size and digest it has here
	Aggregate identity.Aggregate // zero: not asked for
}

// Shard is one file of a plan.
type Shard struct {
	Name string
	Size int64 // of the file
	Data int64 // offset in the file at which the tensors' bytes start; they go to offset 0 of the shard's block

	stamp  Stamp
	header []byte // the bytes before Data; they are read once
	hashed []byte // the saved state of a hash that has seen the header
}

// Tensor is one row of the table by which tensors are found in the blocks. Its bytes are those of the safetensors
// file, at the offset that the file's header gives.
type Tensor struct {
	Name    string   `json:"name"`
	DType   string   `json:"dtype"`
	Shape   []uint64 `json:"shape"` // empty for a scalar
	Shard   int      `json:"shard"` // index in the plan's shards
	Offset  uint64   `json:"offset"`
	NBytes  uint64   `json:"nbytes"` // 0 for a tensor without elements
	Aligned bool     `json:"aligned"`
}

// alignment is what kernels ask of a tensor's address; blocks start at a multiple of it. No element is larger.
const alignment = 16

// CodeNoTensors is the code of the safetensors.Error for shards that are valid and empty.
const CodeNoTensors = "no_tensors"

// NewPlan reads and checks the header of each named shard file and compares names and sizes with what is wanted. It
// takes no device memory. A file that is refused gives a *safetensors.Error, one that is not as wanted ErrMismatch.
func NewPlan(ctx context.Context, src Source, names []string, want Want) (Plan, error) {
	names = slices.Sorted(slices.Values(names))
	if err := want.names(names); err != nil {
		return Plan{}, err
	}
	p := Plan{Want: want, Shards: make([]Shard, 0, len(names))}
	for i, name := range names {
		if err := ctx.Err(); err != nil {
			return Plan{}, fmt.Errorf("plan the load of %s: %w", name, err)
		}
		s, tensors, err := planShard(ctx, src, name)
		if err != nil {
			return Plan{}, err
		}
		if m := want.Manifest; m != nil && m.Shards[i].Size != uint64(s.Size) {
			return Plan{}, &Error{name, s.Size, fmt.Sprint(m.Shards[i].Size, " bytes"), fmt.Sprint(s.Size), ErrMismatch}
		}
		p.Shards = append(p.Shards, s)
		p.Tensors = append(p.Tensors, table(i, tensors)...)
	}
	if len(p.Tensors) == 0 {
		return Plan{}, &safetensors.Error{Code: CodeNoTensors, Msg: "the shards hold no tensors, there is nothing to load"}
	}
	return p, nil
}

func (w Want) names(names []string) error {
	m := w.Manifest
	if m == nil {
		return nil
	}
	if err := m.Validate(); err != nil {
		return fmt.Errorf("plan the load: the wanted manifest: %w", err)
	}
	if a := w.Aggregate; !a.IsZero() && a != m.Aggregate {
		return fmt.Errorf("plan the load: %w: expected aggregate %s, the manifest has %s", ErrMismatch, a, m.Aggregate)
	}
	want := make([]string, len(m.Shards))
	for i, s := range m.Shards {
		want[i] = s.Filename
	}
	if slices.Equal(want, names) {
		return nil
	}
	for _, n := range want {
		if _, ok := slices.BinarySearch(names, n); !ok {
			return fmt.Errorf("plan the load: shard %s is missing: %w", n, ErrMismatch)
		}
	}
	for _, n := range names {
		if _, ok := slices.BinarySearch(want, n); !ok {
			return fmt.Errorf("plan the load: shard %s is not in the wanted manifest: %w", n, ErrMismatch)
		}
	}
	return fmt.Errorf("plan the load: a shard is named twice: %w", ErrMismatch)
}

func planShard(ctx context.Context, src Source, name string) (s Shard, tensors []safetensors.Tensor, err error) {
	f, err := src.Open(ctx, name)
	if err != nil {
		return s, nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	stamp, err := f.Stamp()
	if err != nil {
		return s, nil, err
	}
	head, b, err := readHeader(f, stamp.Size)
	if err != nil {
		return s, nil, safetensors.InFile(name, err)
	}
	h := identity.NewHash()
	h.Write(b)
	s = Shard{Name: name, Size: stamp.Size, Data: int64(len(b)), stamp: stamp, header: b}
	s.hashed, err = h.MarshalBinary()
	return s, head.Tensors, err
}

// readHeader reads the header of a file of size bytes once, checks it, and returns its bytes too, the length in front
// included.
func readHeader(f File, size int64) (head safetensors.Header, b []byte, err error) {
	var prefix [8]byte
	if err := readAt(f, prefix[:min(size, 8)], 0); err != nil {
		return head, nil, err
	}
	n, err := safetensors.HeaderLen(prefix, size)
	if err != nil {
		_, err = safetensors.Read(wholeReads{f}, size) // knows more of what else the file may be
		return head, nil, err
	}
	b = make([]byte, len(prefix)+int(n))
	copy(b, prefix[:])
	if err := readAt(f, b[len(prefix):], int64(len(prefix))); err != nil {
		return head, nil, err
	}
	head, err = safetensors.ParseHeader(prefix, b[len(prefix):], size)
	return head, b, err
}

// wholeReads reads through readAt.
type wholeReads struct{ File }

func (r wholeReads) ReadAt(b []byte, off int64) (int, error) {
	if err := readAt(r.File, b, off); err != nil {
		return 0, err
	}
	return len(b), nil
}

// readAt fills b from off, through a buffer of its own when the file asks for alignment.
func readAt(f File, b []byte, off int64) error {
	if _, ok := f.(aligned); !ok {
		_, err := io.ReadFull(io.NewSectionReader(f, off, int64(len(b))), b)
		return err
	}
	w, err := mapBuffer(roundUp(int64(len(b)), pageSize) + pageSize)
	if err != nil {
		return err
	}
	got, err := readWindow(f, w, off, int64(len(b)))
	copy(b, got)
	return errors.Join(err, unix.Munmap(w))
}

func table(shard int, tensors []safetensors.Tensor) []Tensor {
	rows := make([]Tensor, len(tensors))
	for i, t := range tensors {
		rows[i] = Tensor{
			Name: t.Name, DType: string(t.DType), Shape: t.Shape, Shard: shard, Offset: t.Begin, NBytes: t.End - t.Begin,
			Aligned: t.Begin%alignment == 0,
		}
		if rows[i].Shape == nil {
			rows[i].Shape = []uint64{}
		}
	}
	slices.SortStableFunc(rows, func(a, b Tensor) int { return cmp.Compare(a.Offset, b.Offset) })
	return rows
}

// Placement says on which devices the data of each shard goes: one list for each of sizes, in order. A shard on several
// devices is read and hashed once. It does not have to check that all fits.
type Placement func(sizes []int64, devices []Device) ([][]int, error)

// Spread puts each shard on one device, the largest first, always on the device with most memory left.
func Spread(sizes []int64, devices []Device) ([][]int, error) {
	if len(devices) == 0 {
		return nil, errors.New("there is no device")
	}
	free := make([]int64, len(devices))
	for i, d := range devices {
		free[i] = d.Free
	}
	on := make([][]int, len(sizes))
	for _, i := range descending(sizes) {
		best := 0
		for d := range free {
			if free[d] > free[best] {
				best = d
			}
		}
		on[i] = []int{devices[best].Index}
		free[best] -= sizes[i]
	}
	return on, nil
}

// Replicate puts each shard on every device.
func Replicate(sizes []int64, devices []Device) ([][]int, error) {
	if len(devices) == 0 {
		return nil, errors.New("there is no device")
	}
	all := make([]int, len(devices))
	for i, d := range devices {
		all[i] = d.Index
	}
	return slices.Repeat([][]int{all}, len(sizes)), nil
}

func descending(sizes []int64) []int {
	order := make([]int, len(sizes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(sizes[b], sizes[a]) })
	return order
}

// place chooses the devices and checks that each has room for what it gets and the reserve.
func (p Plan) place(devices []Device, o Options) ([][]int, error) {
	sizes := make([]int64, len(p.Shards))
	for i, s := range p.Shards {
		sizes[i] = s.Size - s.Data
	}
	placement := o.Placement
	if placement == nil {
		placement = Spread
	}
	on, err := placement(sizes, devices)
	if err != nil {
		return nil, fmt.Errorf("load: place the shards: %w", err)
	}
	if len(on) != len(sizes) {
		return nil, fmt.Errorf("load: place the shards: %d places for %d shards", len(on), len(sizes))
	}
	for _, d := range devices {
		need := int64(0)
		for i, n := range sizes {
			if slices.Contains(on[i], d.Index) {
				need += roundUp(n, max(1, d.Granularity))
			}
		}
		if need > 0 && need+o.Reserve > d.Free {
			return nil, fmt.Errorf("load: %w on %s: need %d bytes and %d in reserve, %d are free", ErrMemory, d.Name, need,
				o.Reserve, d.Free)
		}
	}
	return on, nil
}
