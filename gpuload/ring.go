package gpuload

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Sizes of the buffers. A copy to a device costs a few microseconds of calls, so its buffer is large; a hash works on
// pieces that stay in a core's cache.
const (
	DefaultChunk     = 16 << 20
	DefaultRing      = 3
	DefaultLanes     = 4
	DefaultMaxBuffer = 192 << 20
	DefaultReserve   = 256 << 20
	hashPiece        = 256 << 10
	pageSize         = 4096
	smallChunk       = 1 << 20 // chunks get this small before lanes are given up
)

// Options says how a load goes about its work. The zero value is the default.
type Options struct {
	ChunkBytes int64 // bytes of one buffer, rounded up to 4096; 0: DefaultChunk
	Ring       int   // buffers of one lane; 0: DefaultRing
	Lanes      int   // shards in work at once; 0: DefaultLanes or the number of CPUs, the smaller
	MaxBuffer  int64 // limit on Lanes × Ring × ChunkBytes, kept by making these smaller; 0: DefaultMaxBuffer
	Reserve    int64 // device memory to leave free; 0: DefaultReserve, negative: none

	Placement Placement    // nil: Spread
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
	o.Lanes = min(orDefault(o.Lanes, min(DefaultLanes, runtime.GOMAXPROCS(0))), len(p.Shards))
	o.Ring = orDefault(o.Ring, DefaultRing)
	if chunks := (largest + o.ChunkBytes - 1) / o.ChunkBytes; chunks < int64(o.Ring) {
		o.Ring = int(chunks)
	}
	for o.buffer() > o.MaxBuffer {
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
			return o, fmt.Errorf("load: %d bytes of buffers are too few, need %d: %w", o.MaxBuffer, o.buffer(), ErrMemory)
		}
	}
	if o.Reserve = orDefault(o.Reserve, DefaultReserve); o.Reserve < 0 {
		o.Reserve = 0
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

func newSlab(o Options, t Target) (*slab, error) {
	mem, err := mapBuffer(o.buffer())
	if err != nil {
		return nil, err
	}
	s := &slab{mem: mem, unpin: func() error { return nil }}
	if p, ok := t.(Pinner); ok {
		if unpin, err := p.Pin(mem); err != nil {
			o.notify("buffers are not pinned, copies are slower: %v", err)
		} else {
			s.unpin = unpin
		}
	}
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

// free gives the memory back. No copy may still read it.
func (s *slab) free() error {
	err := s.unpin()
	if e := unix.Munmap(s.mem); err == nil {
		err = e
	}
	return err
}
