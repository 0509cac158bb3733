//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Imported is a block that another process published, opened here. Its bytes can be changed by whoever has them open.
// It is safe for concurrent use.
type Imported struct {
	mu       sync.Mutex
	d        *device
	ptr      uint64
	size     int64
	mem      mapping // of KindVMM
	readOnly bool
	patience time.Duration // how long the device may take for a call
	closing  chan error    // gets how the end went; nil: Close was not called
}

// Import opens the handle of a block on the device with a UUID, in a process that is not the one that published it. The
// file of a handle stays with the caller, who may close it.
func Import(uuid string, h gpuload.Handle) (*Imported, error) {
	if err := checkHandle(h); err != nil {
		return nil, fmt.Errorf("open a block: %w", err)
	}
	if h.Size == 0 {
		return &Imported{readOnly: true}, nil
	}
	t, err := load()
	if err != nil {
		return nil, err
	}
	d, err := t.find(uuid)
	if err != nil {
		return nil, err
	}
	m := &Imported{d: d, size: h.Size, patience: patience}
	if err = d.enter(1); err == nil {
		err = d.with(func() error { return m.open(h) })
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a block on %s: %w", uuid, err), d.leave())
	}
	return m, nil
}

// checkHandle says whether a handle is of this backend and complete.
func checkHandle(h gpuload.Handle) error {
	switch {
	case h.Kind != KindIPC && h.Kind != KindVMM:
		return fmt.Errorf("kind %q is no handle of CUDA", h.Kind)
	case h.Size < 0:
		return fmt.Errorf("a block of %d bytes", h.Size)
	case h.Size == 0:
		return nil
	case h.Kind == KindIPC && len(h.Raw) != len(handle{}):
		return fmt.Errorf("a handle of %d bytes is no handle of CUDA, want %d", len(h.Raw), len(handle{}))
	case h.Kind == KindVMM && h.File == nil:
		return fmt.Errorf("kind %s without a file descriptor is no handle of CUDA", h.Kind)
	case h.Kind == KindVMM && h.Allocation < h.Size:
		return fmt.Errorf("a block of %d bytes in an allocation of %d is no handle of CUDA", h.Size, h.Allocation)
	}
	return nil
}

// open opens a handle. The context is current.
func (m *Imported) open(h gpuload.Handle) (err error) {
	if h.Kind == KindIPC {
		m.ptr, err = m.d.table.open(handle(h.Raw))
		return err
	}
	if err = m.d.canVMM(); err == nil {
		m.mem, m.readOnly, err = m.d.openShared(h.File, h.Allocation)
		m.ptr = m.mem.ptr
	}
	return err
}

// ReadOnly says that the driver keeps this process from writing to the block. Of KindIPC it is never kept, of KindVMM
// it is unless the driver refused a mapping for reading alone. The process that published the block can write to it.
func (m *Imported) ReadOnly() bool { return m.readOnly }

// find returns the device with a UUID: indices differ between processes.
func (t *table) find(uuid string) (*device, error) {
	ids, err := t.ids()
	if err != nil {
		return nil, err
	}
	for i, id := range ids {
		if d, err := t.describe(i, id); err != nil || d.uuid == uuid {
			return d, err
		}
	}
	return nil, fmt.Errorf("%w with the UUID %s", ErrNone, uuid)
}

// ReadAt implements io.ReaderAt by copies from the device. A device that has not read after half a minute is
// gpuload.ErrHung: b may be written to still, and stays in memory until that is done, if it is of Go.
func (m *Imported) ReadAt(b []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read a block at offset %d", off)
	}
	n := int(min(int64(len(b)), max(0, m.size-off)))
	if n > 0 {
		if err := m.read(b[:n], off); err != nil {
			return 0, fmt.Errorf("read a block: %w", err)
		}
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (m *Imported) read(b []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.d == nil || m.closing != nil {
		return errors.New("it was closed")
	}
	ctx, cancel := m.bounded()
	defer cancel()
	return m.noted(m.d.read(ctx, b, m.ptr+uint64(off), m.d.streams[0]))
}

// bounded returns a context that ends when the device takes too long.
func (m *Imported) bounded() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.Background(), m.patience, gpuload.ErrHung)
}

// noted waits less for a device that was found to be hung.
func (m *Imported) noted(err error) error {
	if errors.Is(err, gpuload.ErrHung) {
		m.patience = min(m.patience, time.Second)
	}
	return err
}

// Close closes the handle. After an end a second Close does nothing. A device that has not let go of the block after
// half a minute is gpuload.ErrHung: the block is then given back when the device goes on, or when the process ends, and
// another Close waits for it again.
func (m *Imported) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.d == nil {
		return nil
	}
	if m.closing == nil {
		m.closing = make(chan error, 1)
		go func() { m.closing <- m.end() }()
	}
	ctx, cancel := m.bounded()
	defer cancel()
	select {
	case err := <-m.closing:
		m.d = nil
		return err
	case <-ctx.Done():
		return fmt.Errorf("close a block: %w", m.noted(context.Cause(ctx)))
	}
}

// end gives all back, once no read is under way.
func (m *Imported) end() error {
	m.d.waiting.Wait()
	err := m.d.with(func() error {
		if m.mem.handle != 0 {
			return m.d.drop(m.mem)
		}
		return m.d.call("cuIpcCloseMemHandle", m.d.closeHandle, uintptr(m.ptr))
	})
	return errors.Join(err, m.d.leave())
}
