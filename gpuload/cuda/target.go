//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Target is a gpuload.Target on one or more devices, with one allocation for each block. Made by Open.
type Target struct {
	kind     string        // of its handles
	devices  []*device     // by place, not by index
	patience time.Duration // how long the device may take for what can't be cancelled

	mu        sync.RWMutex // held for reading during copies
	blocks    []block
	files     []*os.File // of handles
	pins      []uintptr  // where pinned buffers start
	published bool
	freed     bool

	failed atomic.Pointer[error] // the first copy that failed
}

type block struct {
	d      *device
	ptr    uint64 // 0: the block has no bytes
	size   int64
	stream uintptr
	mem    mapping // of KindVMM
}

// patience is far more than a device that is at work needs for the copies of all buffers of a load.
const patience = 30 * time.Second

// Open is OpenShared with KindIPC.
func Open(indices ...int) (*Target, error) { return OpenShared(KindIPC, indices...) }

// OpenShared loads the driver and returns a target on the devices of these indices, none means all of them, which gives
// out its blocks by handles of the kind. It fails with ErrNone where there is no driver or no device, and with
// errors.ErrUnsupported where driver or device lack what KindVMM needs.
func OpenShared(kind string, indices ...int) (*Target, error) {
	if kind != KindIPC && kind != KindVMM {
		return nil, fmt.Errorf("share device memory as %q: want %s or %s", kind, KindIPC, KindVMM)
	}
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
	target := &Target{kind: kind, patience: patience}
	for _, i := range indices {
		if i < 0 || i >= len(ids) {
			err = fmt.Errorf("%w of index %d, the driver finds %d", ErrNone, i, len(ids))
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
	if err == nil && t.kind == KindVMM {
		err = d.with(d.useVMM)
	}
	if err != nil {
		return fmt.Errorf("open cuda:%d: %w", index, err)
	}
	return nil
}

// Devices lists the devices that the target was opened on. It may also be called while others use the target, and says
// then whether the devices can still be used: one that does not answer within half a minute is gpuload.ErrHung.
func (t *Target) Devices(ctx context.Context) ([]gpuload.Device, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ctx, cancel := context.WithTimeoutCause(ctx, t.patience, gpuload.ErrHung)
	defer cancel()
	list := make([]gpuload.Device, len(t.devices))
	for i, d := range t.devices {
		var err error
		if list[i], err = d.info(ctx); err != nil {
			return nil, fmt.Errorf("cuda:%d: %w", d.index, err)
		}
	}
	return list, nil
}

// Alloc takes n bytes on a device, rounded up so that a handle shows nothing else.
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
			if err := d.with(func() error { return b.take(t.kind) }); err != nil {
				return 0, fmt.Errorf("allocate %d bytes on cuda:%d: %w", n, device, err)
			}
		}
		t.blocks = append(t.blocks, b)
		return gpuload.Block(len(t.blocks) - 1), nil
	}
	return 0, fmt.Errorf("allocate on cuda:%d: the target was not opened on it", device)
}

// take gives the block its memory. The context is current.
func (b *block) take(kind string) (err error) {
	n := b.allocation()
	if kind == KindIPC {
		b.ptr, err = out[uint64](b.d.table, "cuMemAlloc", b.d.alloc, uintptr(n), 0)
		return err
	}
	b.mem, err = b.d.create(n)
	b.ptr = b.mem.ptr
	return err
}

// allocation is the size of the memory that the block has for itself.
func (b *block) allocation() int64 {
	return (b.size + b.d.granularity - 1) / b.d.granularity * b.d.granularity
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

// Wait waits for the event. When ctx ends first the device may read the buffer still, until Free.
func (k token) Wait(ctx context.Context) error {
	if k.t == nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := k.d.wait(ctx, k.event)
	if err != nil && ctx.Err() == nil {
		return k.t.fail(err)
	}
	return err
}

// Wait synchronises every stream, and fails with the first copy that did.
func (t *Target) Wait(ctx context.Context) error {
	err := t.synchronise(ctx)
	if first := t.failed.Load(); first != nil {
		return *first
	}
	if err != nil && ctx.Err() == nil {
		return t.fail(err)
	}
	return err
}

// synchronise waits for all streams, also for those behind one that failed, and returns the first error.
func (t *Target) synchronise(ctx context.Context) (first error) {
	for _, d := range t.devices {
		for _, s := range d.streams {
			err := d.await(ctx, func() error { return d.call("cuStreamSynchronize", d.streamSync, s) })
			if first == nil && err != nil {
				first = fmt.Errorf("cuda:%d: %w", d.index, err)
			}
		}
	}
	return first
}

// ReadBack implements gpuload.Reader. It notices the end of ctx before it reads; a device that has not read after half
// a minute is gpuload.ErrHung.
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
		ctx, cancel := t.bounded()
		defer cancel()
		err = from.d.read(ctx, buf, from.ptr+uint64(off), from.stream)
	}
	if err != nil {
		return fmt.Errorf("read back block %d: %w", b, err)
	}
	return nil
}

// bounded returns a context that ends when the device takes too long.
func (t *Target) bounded() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.Background(), t.patience, gpuload.ErrHung)
}

// Publish makes a handle for each block once every stream is synchronised. That of a block without bytes opens nothing.
func (t *Target) Publish(ctx context.Context) (_ []gpuload.Handle, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.open(); err != nil {
		return nil, err
	}
	if err := t.Wait(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.closeFiles())
		}
	}()
	handles := make([]gpuload.Handle, len(t.blocks))
	for i, b := range t.blocks {
		handles[i] = gpuload.Handle{Kind: t.kind, Device: b.d.index, Size: b.size}
		if b.ptr == 0 {
			continue
		}
		if err := b.d.with(func() error { return t.share(b, &handles[i]) }); err != nil {
			return nil, fmt.Errorf("make the handle of block %d: %w", i, err)
		}
	}
	t.published = true
	return handles, nil
}

// share completes the handle of a block. The context is current.
func (t *Target) share(b block, h *gpuload.Handle) error {
	if t.kind == KindIPC {
		raw, err := out[handle](b.d.table, "cuIpcGetMemHandle", b.d.exportHandle, uintptr(b.ptr), 0)
		h.Raw = raw[:]
		return err
	}
	f, err := b.d.export(b.mem)
	if err != nil {
		return err
	}
	t.files = append(t.files, f)
	h.File, h.Allocation = f, b.allocation()
	return nil
}

func (t *Target) closeFiles() (err error) {
	for _, f := range t.files {
		err = errors.Join(err, f.Close())
	}
	t.files = nil
	return err
}

// Free synchronises every stream and frees all. After an error that made the context useless its memory is freed with
// the context; an error that was returned before is not returned again. A device that does not end its copies within
// half a minute is gpuload.ErrHung: its memory is then given back when the process ends, or by another Free.
func (t *Target) Free() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.freed = true
	known := t.broken()
	ctx, cancel := t.bounded()
	defer cancel()
	err := t.synchronise(ctx)
	if errors.Is(err, gpuload.ErrHung) {
		t.patience = min(t.patience, time.Second)
		return errors.Join(err, t.closeFiles())
	}
	for _, d := range t.devices {
		d.waiting.Wait() // they wait for no more than the streams do
	}
	if known {
		err = nil
	}
	useless := known || err != nil
	for _, at := range t.pins {
		if e := t.devices[0].unregister(at); !useless {
			err = errors.Join(err, e)
		}
	}
	if e := t.closeFiles(); !useless {
		err = errors.Join(err, e)
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
	return b.d.with(func() error {
		if b.mem.handle != 0 {
			return b.d.drop(b.mem)
		}
		return b.d.call("cuMemFree", b.d.table.free, uintptr(b.ptr))
	})
}
