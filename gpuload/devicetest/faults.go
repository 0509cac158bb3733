package devicetest

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// ErrInjected is the error of a fault that a test put in.
var ErrInjected = errors.New("injected fault")

// Faulty is a target that fails where it is told to and counts what it is asked for. The numbers of operations count
// from 1; 0 is none. Its fields are set before the load.
type Faulty struct {
	gpuload.Target

	Room        int64 // free bytes that each device reports; 0: what the target says
	Split       int   // report so many devices, all of them the first one
	FailAlloc   int   // the number of the operation that fails
	FailSubmit  int
	FailToken   int
	DropCopy    int                    // this copy is not made, and only Wait reports it
	FailPublish bool                   // after the target has published
	FailPins    int                    // so many attempts to pin fail
	Flip        int                    // this copy arrives with a wrong bit
	Verify      bool                   // the load is to read everything back
	With        func(*gpuload.Options) // changes the options of the load; nil: nothing
	Late        int                    // copies are made only when so many are open, or the block is complete
	Before      func(op string, n int) // called before each operation

	mu        sync.Mutex
	cond      *sync.Cond
	count     map[string]int
	sizes     []int64
	sent      []int64
	open      []*lateCopy
	Overlaps  int // copies that were submitted from a buffer that another open copy reads
	Published int // handles that exist
	Asked     int64
	On        []int // the device of each block
}

func (f *Faulty) begin(op string) (n int) {
	f.mu.Lock()
	if f.count == nil {
		f.count, f.cond = map[string]int{}, sync.NewCond(&f.mu)
	}
	f.count[op]++
	n = f.count[op]
	f.mu.Unlock()
	if f.Before != nil {
		f.Before(op, n)
	}
	return n
}

// Count returns how often an operation was called: devices, alloc, pin, submit, wait, readback, publish, unpin, free;
// waited: how often wait has ended.
func (f *Faulty) Count(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count[op]
}

// Devices implements gpuload.Target.
func (f *Faulty) Devices(ctx context.Context) ([]gpuload.Device, error) {
	f.begin("devices")
	ds, err := f.Target.Devices(ctx)
	for len(ds) > 0 && len(ds) < f.Split {
		d := ds[0]
		d.Index = len(ds)
		ds = append(ds, d)
	}
	for i := range ds {
		if f.Room != 0 {
			ds[i].Free = f.Room
		}
	}
	return ds, err
}

// Alloc implements gpuload.Target.
func (f *Faulty) Alloc(ctx context.Context, device int, n int64) (gpuload.Block, error) {
	if f.begin("alloc") == f.FailAlloc {
		return 0, ErrInjected
	}
	f.mu.Lock()
	f.sizes, f.sent = append(f.sizes, n), append(f.sent, 0)
	f.Asked += n
	f.On = append(f.On, device)
	f.mu.Unlock()
	if f.Split > 0 {
		device = 0
	}
	return f.Target.Alloc(ctx, device, n)
}

// Submit implements gpuload.Target.
func (f *Faulty) Submit(ctx context.Context, buf []byte, b gpuload.Block, off int64) (gpuload.Token, error) {
	switch n := f.begin("submit"); {
	case n == f.FailSubmit:
		return nil, ErrInjected
	case n == f.DropCopy:
		return failing{nil}, nil
	case n == f.FailToken:
		return failing{ErrInjected}, nil
	case n == f.Flip:
		buf = slices.Clone(buf)
		buf[len(buf)/2] ^= 1
		return f.Target.Submit(ctx, buf, b, off)
	case f.Late == 0:
		return f.Target.Submit(ctx, buf, b, off)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &lateCopy{f: f, buf: buf, block: b, off: off}
	for _, o := range f.open {
		if &o.buf[0] == &buf[0] {
			f.Overlaps++
		}
	}
	f.open = append(f.open, c)
	f.sent[b] += int64(len(buf))
	f.cond.Broadcast()
	return c, nil
}

// Wait implements gpuload.Target.
func (f *Faulty) Wait(ctx context.Context) error {
	f.begin("wait")
	f.mu.Lock()
	open := slices.Clone(f.open)
	f.mu.Unlock()
	for _, c := range open {
		if err := c.run(ctx); err != nil {
			return err
		}
	}
	if f.DropCopy > 0 {
		return ErrInjected
	}
	err := f.Target.Wait(ctx)
	f.begin("waited")
	return err
}

// Publish implements gpuload.Target.
func (f *Faulty) Publish(ctx context.Context) ([]gpuload.Handle, error) {
	f.begin("publish")
	h, err := f.Target.Publish(ctx)
	if err == nil && f.FailPublish {
		return nil, ErrInjected
	}
	f.Published = len(h)
	return h, err
}

// Free implements gpuload.Target.
func (f *Faulty) Free() error {
	f.begin("free")
	f.Published = 0
	return f.Target.Free()
}

// Pin implements gpuload.Pinner, with a target that pins as with one that does not.
func (f *Faulty) Pin(buf []byte) (func() error, error) {
	if f.begin("pin") <= f.FailPins {
		return nil, ErrInjected
	}
	unpin := func() error { return nil }
	if p, ok := f.Target.(gpuload.Pinner); ok {
		var err error
		if unpin, err = p.Pin(buf); err != nil {
			return nil, err
		}
	}
	return func() error { f.begin("unpin"); return unpin() }, nil
}

// ReadBack implements gpuload.Reader if the target does.
func (f *Faulty) ReadBack(ctx context.Context, b gpuload.Block, off int64, buf []byte) error {
	f.begin("readback")
	if r, ok := f.Target.(gpuload.Reader); ok {
		return r.ReadBack(ctx, b, off, buf)
	}
	return errors.ErrUnsupported
}

type failing struct{ err error }

func (f failing) Wait(context.Context) error { return f.err }

// lateCopy reads its buffer when it is run, as a device does, not when it is submitted.
type lateCopy struct {
	f     *Faulty
	buf   []byte
	block gpuload.Block
	off   int64
}

// Wait makes the copy as late as a correct caller allows: when all of its buffers wait for copies, or when there is
// nothing more to come for the block.
func (c *lateCopy) Wait(ctx context.Context) error {
	f := c.f
	defer context.AfterFunc(ctx, f.cond.Broadcast)()
	f.mu.Lock()
	for ctx.Err() == nil && len(f.open) < f.Late && f.sent[c.block] < f.sizes[c.block] {
		f.cond.Wait()
	}
	f.mu.Unlock()
	for range 100 { // a caller that took the buffer back too early gets the time to spoil it
		runtime.Gosched()
	}
	return c.run(ctx)
}

func (c *lateCopy) run(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t, err := c.f.Target.Submit(ctx, c.buf, c.block, c.off)
	if err != nil {
		return err
	}
	c.f.mu.Lock()
	c.f.open = slices.DeleteFunc(c.f.open, func(o *lateCopy) bool { return o == c })
	c.f.mu.Unlock()
	return t.Wait(ctx)
}
