//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Imported is a block that another process published, opened here. Its bytes can be changed by whoever has them open.
// It is safe for concurrent use.
type Imported struct {
	mu   sync.Mutex
	d    *device
	ptr  uint64
	size int64
}

// Import opens the handle of a block on the device with a UUID, in a process that is not the one that published it.
func Import(uuid string, h gpuload.Handle) (*Imported, error) {
	if h.Kind != KindIPC || len(h.Raw) != len(handle{}) && h.Size > 0 {
		return nil, fmt.Errorf("open a block: kind %q with %d bytes is no handle of CUDA", h.Kind, len(h.Raw))
	}
	if h.Size == 0 {
		return &Imported{}, nil
	}
	t, err := load()
	if err != nil {
		return nil, err
	}
	d, err := t.find(uuid)
	if err != nil {
		return nil, err
	}
	m := &Imported{d: d, size: h.Size}
	if err := d.enter(1); err != nil {
		return nil, errors.Join(fmt.Errorf("open a block on %s: %w", uuid, err), d.leave())
	}
	err = d.with(func() (err error) {
		m.ptr, err = d.open(handle(h.Raw))
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a block on %s: %w", uuid, err), d.leave())
	}
	return m, nil
}

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

// ReadAt implements io.ReaderAt by copies from the device.
func (m *Imported) ReadAt(b []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read a block at offset %d", off)
	}
	n := int(min(int64(len(b)), max(0, m.size-off)))
	if n > 0 {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.d == nil {
			return 0, errors.New("read a block that was closed")
		}
		if err := m.d.read(b[:n], m.ptr+uint64(off), m.d.streams[0]); err != nil {
			return 0, fmt.Errorf("read a block: %w", err)
		}
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// Close closes the handle. A second Close does nothing.
func (m *Imported) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.d == nil {
		return nil
	}
	err := m.d.with(func() error { return m.d.call("cuIpcCloseMemHandle", m.d.closeHandle, uintptr(m.ptr)) })
	err = errors.Join(err, m.d.leave())
	m.d = nil
	return err
}
