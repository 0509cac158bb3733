//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Target is a gpuload.Target on one or more devices, with one allocation for each block. Made by Open.
type Target struct {
	devices []*device // by place, not by index

	mu        sync.RWMutex // held for reading during copies
	blocks    []block
	pins      []uintptr // where pinned buffers start
	published bool
	freed     bool

	failed atomic.Pointer[error] // the first copy that failed
}

type block struct {
	d      *device
	ptr    uint64 // 0: the block has no bytes
	size   int64
	stream uintptr
}

// Open loads the driver and returns a target on the devices of these indices; none means all of them. It fails with
// ErrNone where there is no driver or no device.
func Open(indices ...int) (*Target, error) {
	t, err := load()
	if err != nil {
		return nil, err
	}
	ids, err := t.ids()
	if err != nil {
		return nil, err
	}
	if len(indices) == 0 {
		for i := range ids {
			indices = append(indices, i)
		}
	}
	target := new(Target)
	for _, i := range indices {
		if i < 0 || i >= len(ids) {
			err = fmt.Errorf("cuda:%d: %w of this index, the driver finds %d", i, ErrNone, len(ids))
		} else {
			err = target.add(t, i, ids[i])
		}
		if err != nil {
			return nil, errors.Join(err, target.Free())
		}
	}
	return target, nil
}

func (t *Target) add(driver *table, index int, id int32) error {
	d, err := driver.describe(index, id)
	if err == nil {
		t.devices = append(t.devices, d)
		err = d.enter(streamsPerDevice)
	}
	if err != nil {
		return fmt.Errorf("open cuda:%d: %w", index, err)
	}
	return nil
}

// Devices lists the devices that the target was opened on.
func (t *Target) Devices(context.Context) ([]gpuload.Device, error) {
	list := make([]gpuload.Device, len(t.devices))
	for i, d := range t.devices {
		var err error
		if list[i], err = d.info(); err != nil {
			return nil, fmt.Errorf("cuda:%d: %w", d.index, err)
		}
	}
	return list, nil
}

// Alloc takes n bytes on a device, rounded up to 2 MiB so that a handle shows nothing else.
func (t *Target) Alloc(_ context.Context, device int, n int64) (gpuload.Block, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.open(); err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	for _, d := range t.devices {
		if d.index != device {
			continue
		}
		b := block{d: d, size: n, stream: d.streams[d.nextLane%len(d.streams)]}
		d.nextLane++
		if n > 0 {
			err := d.with(func() (err error) {
				b.ptr, err = out[uint64](d.table, "cuMemAlloc", d.alloc, uintptr((n+granularity-1)/granularity*granularity), 0)
				return err
			})
			if err != nil {
				return 0, fmt.Errorf("allocate %d bytes on cuda:%d: %w", n, device, err)
			}
		}
		t.blocks = append(t.blocks, b)
		return gpuload.Block(len(t.blocks) - 1), nil
	}
	return 0, fmt.Errorf("allocate on cuda:%d: the target was not opened on it", device)
}

// open says whether the target still takes memory and bytes.
func (t *Target) open() error {
	switch {
	case t.freed:
		return errors.New("the target was freed")
	case t.published:
		return errors.New("the target was published")
	}
	return nil
}

// block returns a block that has n bytes from off on.
func (t *Target) block(b gpuload.Block, off int64, n int) (block, error) {
	if b < 0 || int(b) >= len(t.blocks) {
		return block{}, errors.New("no such block")
	}
	if size := t.blocks[b].size; off < 0 || off > size || int64(n) > size-off {
		return block{}, fmt.Errorf("%d bytes at offset %d do not fit in its %d", n, off, size)
	}
	return t.blocks[b], nil
}

// Pin registers buf with the driver, for all devices. Free unregisters what is left; unpin then does nothing.
func (t *Target) Pin(buf []byte) (unpin func() error, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.freed {
		return nil, fmt.Errorf("pin %d bytes: the target was freed", len(buf))
	}
	var at uintptr
	d := t.devices[0]
	err = d.with(func() (err error) {
		at, err = d.register(buf)
		return err
	})
	if err != nil {
		return nil, err
	}
	t.pins = append(t.pins, at)
	return func() error { return t.unpin(at) }, nil
}

func (t *Target) unpin(at uintptr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.pins, at)
	if i < 0 {
		return nil
	}
	t.pins = slices.Delete(t.pins, i, i+1)
	return t.devices[0].unregister(at)
}

// Submit starts a copy on the stream of the block.
func (t *Target) Submit(_ context.Context, buf []byte, b gpuload.Block, off int64) (gpuload.Token, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	err := t.open()
	var to block
	if err == nil {
		to, err = t.block(b, off, len(buf))
	}
	var done token
	if err == nil && len(buf) > 0 {
		done = token{t: t, d: to.d}
		err = to.d.with(func() error {
			if err := to.d.toDevice(to.ptr+uint64(off), buf, to.stream); err != nil {
				return err
			}
			done.event, err = to.d.record(to.stream)
			return err
		})
	}
	if err != nil {
		return nil, t.fail(fmt.Errorf("copy to block %d: %w", b, err))
	}
	return done, nil
}

// fail keeps the first error of a copy.
func (t *Target) fail(err error) error {
	t.failed.CompareAndSwap(nil, &err)
	return err
}

// token is an event behind a copy. The zero token is done.
type token struct {
	t     *Target
	d     *device
	event uintptr
}

// Wait waits for the event. It notices the end of ctx before it waits, not while the device is at work.
func (k token) Wait(ctx context.Context) error {
	if k.t == nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := k.d.wait(k.event); err != nil {
		return k.t.fail(err)
	}
	return nil
}

// Wait synchronises every stream, and fails with the first copy that did.
func (t *Target) Wait(context.Context) error {
	err := t.synchronise()
	if first := t.failed.Load(); first != nil {
		return *first
	}
	if err != nil {
		return t.fail(err)
	}
	return nil
}

// synchronise waits for all streams, also for those behind one that failed, and returns the first error.
func (t *Target) synchronise() (first error) {
	for _, d := range t.devices {
		for _, s := range d.streams {
			err := d.with(func() error { return d.call("cuStreamSynchronize", d.streamSync, s) })
			if first == nil && err != nil {
				first = fmt.Errorf("cuda:%d: %w", d.index, err)
			}
		}
	}
	return first
}

// ReadBack implements gpuload.Reader.
func (t *Target) ReadBack(ctx context.Context, b gpuload.Block, off int64, buf []byte) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.freed {
		return errors.New("read back: the target was freed")
	}
	from, err := t.block(b, off, len(buf))
	if err == nil && len(buf) > 0 {
		err = from.d.read(buf, from.ptr+uint64(off), from.stream)
	}
	if err != nil {
		return fmt.Errorf("read back block %d: %w", b, err)
	}
	return nil
}

// Publish makes a handle for each block once every stream is synchronised. A block without bytes has none.
func (t *Target) Publish(ctx context.Context) ([]gpuload.Handle, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.open(); err != nil {
		return nil, err
	}
	if err := t.Wait(ctx); err != nil {
		return nil, err
	}
	handles := make([]gpuload.Handle, len(t.blocks))
	for i, b := range t.blocks {
		handles[i] = gpuload.Handle{Kind: KindIPC, Device: b.d.index, Size: b.size}
		if b.ptr == 0 {
			continue
		}
		var raw handle
		err := b.d.with(func() (err error) {
			raw, err = out[handle](b.d.table, "cuIpcGetMemHandle", b.d.exportHandle, uintptr(b.ptr), 0)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("make the handle of block %d: %w", i, err)
		}
		handles[i].Raw = raw[:]
	}
	t.published = true
	return handles, nil
}

// Free synchronises every stream and frees all. After an error that made the context useless its memory is freed with
// the context; an error that was returned before is not returned again.
func (t *Target) Free() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.freed {
		return nil
	}
	t.freed = true
	known := t.broken()
	err := t.synchronise()
	if known {
		err = nil
	}
	useless := known || err != nil
	for _, at := range t.pins {
		if e := t.devices[0].unregister(at); !useless {
			err = errors.Join(err, e)
		}
	}
	for _, b := range t.blocks {
		if e := b.free(); !useless {
			err = errors.Join(err, e)
		}
	}
	for _, d := range t.devices {
		if e := d.leave(); !useless {
			err = errors.Join(err, e)
		}
	}
	t.blocks, t.pins, t.devices = nil, nil, nil
	return err
}

// broken says that the driver has reported an error of a copy.
func (t *Target) broken() bool {
	var e *Error
	first := t.failed.Load()
	return first != nil && errors.As(*first, &e)
}

func (b block) free() error {
	if b.ptr == 0 {
		return nil
	}
	return b.d.with(func() error { return b.d.call("cuMemFree", b.d.table.free, uintptr(b.ptr)) })
}
