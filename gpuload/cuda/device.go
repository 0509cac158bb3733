//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// granularity is what an allocation is rounded up to. The driver hands out memory in blocks of this size, and a handle
// lets others see the whole block.
const granularity = 2 << 20

// streamsPerDevice lets the copies of several lanes be under way at once.
const streamsPerDevice = 4

// device is one device with its primary context, which is the one that other libraries of the process use too.
type device struct {
	*table
	index    int
	id       int32
	name     string
	uuid     string
	pci      string
	context  uintptr
	streams  []uintptr
	nextLane int

	granularity int64 // what an allocation is rounded up to

	waiting sync.WaitGroup // calls that are waiting for the device

	mu     sync.Mutex
	events []uintptr // all
	idle   []uintptr // those of them that nobody waits for
}

// ids lists the devices that the driver shows to this process.
func (t *table) ids() ([]int32, error) {
	n, err := out[int32](t, "cuDeviceGetCount", t.deviceCount, 0, 0)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, fmt.Errorf("%w: the driver finds none", ErrNone)
	}
	ids := make([]int32, n)
	for i := range ids {
		if ids[i], err = out[int32](t, "cuDeviceGet", t.device, uintptr(i), 0); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// describe returns a device by its index, without a context.
func (t *table) describe(index int, id int32) (*device, error) {
	name, err := t.deviceText("cuDeviceGetName", t.deviceName, id)
	if err != nil {
		return nil, err
	}
	uuid, err := out[[16]byte](t, "cuDeviceGetUuid", t.deviceUUID, uintptr(id), 0)
	if err != nil {
		return nil, err
	}
	d := &device{table: t, index: index, id: id, name: name, uuid: uuidText(uuid), granularity: granularity}
	if t.devicePCI != 0 {
		if d.pci, err = t.deviceText("cuDeviceGetPCIBusId", t.devicePCI, id); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// uuidText writes a UUID as nvidia-smi does.
func uuidText(u [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// enter retains the primary context and makes n streams in it.
func (d *device) enter(n int) (err error) {
	if d.context, err = out[uintptr](d.table, "cuDevicePrimaryCtxRetain", d.retain, uintptr(d.id), 0); err != nil {
		return err
	}
	return d.with(func() error {
		for range n {
			s, err := out[uintptr](d.table, "cuStreamCreate", d.streamCreate, streamNonBlocking, 0)
			if err != nil {
				return err
			}
			d.streams = append(d.streams, s)
		}
		return nil
	})
}

// leave ends events and streams, of which none is at work, and releases the context. When nobody else in the process
// has retained it, all that it held is freed, also after an error that makes the context useless.
func (d *device) leave() error {
	if d.context == 0 {
		return nil
	}
	err := d.with(func() (err error) {
		for _, e := range d.events {
			err = errors.Join(err, d.call("cuEventDestroy", d.eventDestroy, e))
		}
		for _, s := range d.streams {
			err = errors.Join(err, d.call("cuStreamDestroy", d.streamDestroy, s))
		}
		return err
	})
	d.context, d.streams, d.events, d.idle = 0, nil, nil, nil
	return errors.Join(err, d.call("cuDevicePrimaryCtxRelease", d.release, uintptr(d.id)))
}

// with runs fn on a thread that it has for itself, with the context current. All calls that need a context are made so.
func (d *device) with(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.call("cuCtxSetCurrent", d.setCurrent, d.context); err != nil {
		return err
	}
	return fn()
}

// record puts an event behind the work of a stream. The context is current.
func (d *device) record(stream uintptr) (event uintptr, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.idle); n > 0 {
		event, d.idle = d.idle[n-1], d.idle[:n-1]
	} else {
		if event, err = out[uintptr](d.table, "cuEventCreate", d.eventCreate, eventFlags, 0); err != nil {
			return 0, err
		}
		d.events = append(d.events, event)
	}
	return event, d.call("cuEventRecord", d.eventRecord, event, stream)
}

// await runs fn, which waits for the device, with the context current. When ctx ends first it returns why, and fn goes
// on by itself: the driver can't be told to stop.
func (d *device) await(ctx context.Context, fn func() error) error {
	if ctx.Done() == nil {
		return d.with(fn)
	}
	done := make(chan error, 1)
	d.waiting.Go(func() { done <- d.with(fn) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// wait waits for an event, which must not be used again if that succeeds.
func (d *device) wait(ctx context.Context, event uintptr) error {
	return d.await(ctx, func() error {
		if err := d.call("cuEventSynchronize", d.eventSync, event); err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.idle = append(d.idle, event)
		return nil
	})
}

// read copies from the device and waits for the whole stream. When ctx ends first, buf may be written to still.
func (d *device) read(ctx context.Context, buf []byte, from uint64, stream uintptr) error {
	return d.await(ctx, func() error {
		defer runtime.KeepAlive(buf)
		if err := d.toHost(buf, from, stream); err != nil {
			return err
		}
		return d.call("cuStreamSynchronize", d.streamSync, stream)
	})
}

func (d *device) unregister(at uintptr) error {
	return d.with(func() error { return d.call("cuMemHostUnregister", d.unpin, at) })
}

func (d *device) info(ctx context.Context) (gpuload.Device, error) {
	var free atomic.Uint64 // which is written to also after the end of ctx
	err := d.await(ctx, func() error {
		n, err := d.memory()
		free.Store(n)
		return err
	})
	return gpuload.Device{
		Index: d.index, Name: fmt.Sprintf("cuda:%d (%s)", d.index, strings.TrimSpace(d.name)), Backend: Backend,
		Free: int64(free.Load()), Granularity: d.granularity, UUID: d.uuid, PCI: strings.ToLower(d.pci),
	}, err
}
