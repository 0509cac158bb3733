package gpuload

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Sizes of the buffers. A copy to a device costs a few microseconds of calls, so its buffer is large; a hash works on
// pieces that stay in a core's cache. There are lanes also where cores are few: streams that share a core are hashed in
// less time than one after the other.
const (
	DefaultChunk     = 16 << 20
	DefaultRing      = 3
	DefaultLanes     = 4
	DefaultMaxBuffer = 192 << 20
	DefaultReserve   = 256 << 20
	hashPiece        = 256 << 10
	pageSize         = 4096
	smallChunk       = 1 << 20 // chunks get this small before lanes are given up
	smallRing        = 8       // buffers of one lane that are that small: three of them even out too little
	pinTries         = 4       // sizes of the buffers that are tried, each half of the one before
)

// Options says how a load goes about its work. The zero value is the default.
type Options struct {
	ChunkBytes int64 // bytes of one buffer, rounded up to 4096; 0: DefaultChunk
	Ring       int   // buffers of one lane; 0: DefaultRing, and 8 where a buffer has 1 MiB at most
	Lanes      int   // shards in work at once; 0: DefaultLanes
	MaxBuffer  int64 // limit on Lanes × Ring × ChunkBytes, pinned or not, kept by smaller ones; 0: DefaultMaxBuffer
	Reserve    int64 // device memory to leave free; 0: DefaultReserve, negative: none

	// VerifyDevice reads every byte back before publication and hashes it again, which finds bytes that were damaged on
	// the way to the device. A target that is no Reader fails.
	VerifyDevice bool

	Placement Placement    // nil: Spread
	Keep      Keeper       // keeps the bytes on a disk besides; nil: nobody does
	Notify    func(string) // lines for people, from the goroutine of Load; nil: none
	Observe   func(State)  // each state that the load enters, from the goroutine of Load; nil: none
	// Progress is told how many bytes of a shard are hashed, from several goroutines, after each buffer; nil: nobody is.
	Progress func(shard string, done int64)
}

// shaped fills in the defaults and makes the buffers no larger than the model and MaxBuffer need.
func (o Options) shaped(p Plan) (Options, error) {
	largest := int64(1)
	for _, s := range p.Shards {
		largest = max(largest, s.Size-s.Data)
	}
	o.MaxBuffer = orDefault(o.MaxBuffer, DefaultMaxBuffer)
	o.ChunkBytes = roundUp(min(orDefault(o.ChunkBytes, DefaultChunk), largest+directAlign), pageSize)
	o.Lanes = min(orDefault(o.Lanes, DefaultLanes), len(p.Shards))
	if o.Ring == 0 && o.ChunkBytes <= smallChunk {
		o.Ring = smallRing
	}
	o.Ring = orDefault(o.Ring, DefaultRing)
	if chunks := (largest + o.ChunkBytes - 1) / o.ChunkBytes; chunks < int64(o.Ring) {
		o.Ring = int(chunks)
	}
	if o.Reserve = orDefault(o.Reserve, DefaultReserve); o.Reserve < 0 {
		o.Reserve = 0
	}
	small, err := o.within(o.MaxBuffer)
	if err == nil && small.buffer() < o.buffer() {
		o.notify("buffers are %d bytes instead of %d: no more than %d are allowed", small.buffer(), o.buffer(), o.MaxBuffer)
	}
	return small, err
}

// MinBuffer is the least that Options.MaxBuffer can be, in bytes.
const MinBuffer = 2 * pageSize

// within makes the buffers no larger than limit in all.
func (o Options) within(limit int64) (Options, error) {
	for o.buffer() > limit {
		switch {
		case o.Ring > 2:
			o.Ring--
		case o.ChunkBytes > smallChunk:
			o.ChunkBytes = max(smallChunk, roundUp(o.ChunkBytes/2, pageSize))
		case o.Lanes > 1:
			o.Lanes--
		case o.ChunkBytes > pageSize:
			o.ChunkBytes = roundUp(o.ChunkBytes/2, pageSize)
		default:
			return o, fmt.Errorf("load: %d bytes of buffers are too few, need %d: %w", limit, o.buffer(), ErrMemory)
		}
	}
	return o, nil
}

func (o Options) buffer() int64 { return int64(o.Lanes) * int64(o.Ring) * o.ChunkBytes }

func (o Options) notify(format string, args ...any) {
	if o.Notify != nil {
		o.Notify(fmt.Sprintf(format, args...))
	}
}

func orDefault[T int | int64](v, d T) T {
	if v == 0 {
		return d
	}
	return v
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// mapBuffer returns n bytes that start on a page and that the garbage collector does not count.
func mapBuffer(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of buffers: %w", n, err)
	}
	return b, nil
}

// buffer is one part of the slab. It goes home when the last of its users has released it.
type buffer struct {
	data []byte
	refs atomic.Int32
	home chan<- *buffer
}

func (b *buffer) release() {
	if b.refs.Add(-1) == 0 {
		b.home <- b
	}
}

// slab is the memory of all rings, taken once for a load.
type slab struct {
	mem   []byte
	unpin func() error
	rings []chan *buffer // one for each lane
}

// newSlab takes the memory, pinned if the target pins, and returns it with the sizes that it has. Where so much can't
// be pinned it takes less, down to an eighth, and at last memory that is not pinned.
func newSlab(o Options, t Target) (*slab, Options, error) {
	p, ok := t.(Pinner)
	if !ok {
		s, err := mapSlab(o)
		return s, o, err
	}
	small, tries, why := lockable(o)
	for range tries {
		s, err := mapSlab(small)
		if err != nil {
			return nil, o, err
		}
		if s.unpin, err = p.Pin(s.mem); err == nil {
			if why != nil {
				o.notify("buffers are %d bytes instead of %d: %v", small.buffer(), o.buffer(), why)
			}
			return s, small, nil
		}
		s.unpin, why = nothing, err
		if err := s.free(); err != nil {
			return nil, o, err
		}
		if small, err = small.within(small.buffer() / 2); err != nil {
			break
		}
	}
	o.notify("buffers are not pinned, copies are slower: %v", why)
	s, err := mapSlab(o)
	return s, o, err
}

// lockable makes the buffers no larger than what this process may lock in memory, and says why. Without CAP_IPC_LOCK
// that is RLIMIT_MEMLOCK; where it is too small for buffers that are of use, none is tried.
func lockable(o Options) (small Options, tries int, why error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit)
	if err != nil || limit.Cur >= uint64(o.buffer()) || mayLock() {
		return o, pinTries, nil
	}
	why = fmt.Errorf("this process may lock %d bytes (ulimit -l)", limit.Cur)
	if small, err = o.within(int64(limit.Cur)); err != nil || small.ChunkBytes < min(o.ChunkBytes, smallChunk) {
		return o, 0, why
	}
	return small, pinTries, why
}

// mayLock says whether the process has CAP_IPC_LOCK, for which RLIMIT_MEMLOCK does not count.
func mayLock() bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&h, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0
}

func nothing() error { return nil }

// mapSlab takes memory and parts it into rings.
func mapSlab(o Options) (*slab, error) {
	mem, err := mapBuffer(o.buffer())
	if err != nil {
		return nil, err
	}
	s := &slab{mem: mem, unpin: nothing}
	for range o.Lanes {
		ring := make(chan *buffer, o.Ring)
		for range o.Ring {
			ring <- &buffer{data: mem[:o.ChunkBytes:o.ChunkBytes], home: ring}
			mem = mem[o.ChunkBytes:]
		}
		s.rings = append(s.rings, ring)
	}
	return s, nil
}

// end gives the memory back after a use that ended with err, unless a device may use it still.
func (s *slab) end(err error) error {
	if errors.Is(err, ErrHung) {
		return err
	}
	return errors.Join(err, s.free())
}

// free gives the memory back. No copy may still read it.
func (s *slab) free() error {
	err := s.unpin()
	if e := unix.Munmap(s.mem); err == nil {
		err = e
	}
	return err
}
