// Package hostmem is the target that holds weights in the memory of the host: one file without a name (memfd) for each
// shard, sealed against every write before anybody else can have it.
package hostmem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"golang.org/x/sys/unix"
)

// Backend is the name of this target in listings.
const Backend = "host"

// KindFile is the kind of the handles of this target.
const KindFile = "memfd"

// Chunk is the size of buffers that suits this target when files are read through the page cache: no call to a device
// has to be paid for, and the bytes are still in a processor's cache when they are hashed. BenchmarkLoad compares it.
const Chunk = 1 << 20

// seals are set on a block before it is published: it can't be written, made longer or shorter, and no seal can come
// off, not even by this process.
const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// Target is a gpuload.Target. The zero value is ready for one load.
type Target struct {
	mu        sync.RWMutex
	blocks    []block
	published bool
	freed     bool

	copies sync.WaitGroup
	failed atomic.Pointer[error] // the first copy that failed
}

// block is one allocation: before publication open for writing, after it for reading only.
type block struct {
	file *os.File
	size int64
}

// Devices returns the host's memory as one device, with what is available to this process now.
func (t *Target) Devices(context.Context) ([]gpuload.Device, error) {
	free, err := available(os.DirFS("/"))
	if err != nil {
		return nil, fmt.Errorf("read how much memory is available: %w", err)
	}
	return []gpuload.Device{{Name: "host memory", Backend: Backend, Free: free, Granularity: int64(os.Getpagesize())}}, nil
}

// Alloc makes a file of n bytes in memory. Its pages are taken as they are written.
func (t *Target) Alloc(_ context.Context, device int, n int64) (gpuload.Block, error) {
	if device != 0 {
		return 0, fmt.Errorf("allocate on device %d: the host is device 0", device)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.open(); err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	f, err := memfd(fmt.Sprintf("kiln-shard-%d", len(t.blocks)))
	if err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	if err := f.Truncate(n); err != nil {
		return 0, errors.Join(fmt.Errorf("allocate %d bytes: %w", n, err), f.Close())
	}
	t.blocks = append(t.blocks, block{f, n})
	return gpuload.Block(len(t.blocks) - 1), nil
}

func memfd(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // a kernel before 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), name), nil
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

// copying is the token of a copy that runs in a goroutine of its own.
type copying struct {
	done chan struct{} // closed when the copy is done
	err  error         // set before
}

// Wait implements gpuload.Token.
func (c *copying) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Submit starts a copy of buf. What the target refuses it refuses at once.
func (t *Target) Submit(_ context.Context, buf []byte, b gpuload.Block, off int64) (gpuload.Token, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	err := t.open()
	switch {
	case err != nil:
	case b < 0 || int(b) >= len(t.blocks):
		err = errors.New("no such block")
	case off < 0 || off > t.blocks[b].size || int64(len(buf)) > t.blocks[b].size-off:
		err = fmt.Errorf("%d bytes at offset %d do not fit in its %d", len(buf), off, t.blocks[b].size)
	}
	if err != nil {
		return nil, t.fail(b, err)
	}
	c, file := &copying{done: make(chan struct{})}, t.blocks[b].file
	t.copies.Go(func() {
		defer close(c.done)
		if _, err := file.WriteAt(buf, off); err != nil {
			c.err = t.fail(b, err)
		}
	})
	return c, nil
}

// fail keeps the first error of a copy.
func (t *Target) fail(b gpuload.Block, err error) error {
	err = fmt.Errorf("copy to block %d: %w", b, err)
	t.failed.CompareAndSwap(nil, &err)
	return err
}

// Wait returns when every copy is done, with the error of the first that failed.
func (t *Target) Wait(context.Context) error {
	t.copies.Wait()
	if err := t.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// ReadBack implements gpuload.Reader.
func (t *Target) ReadBack(_ context.Context, b gpuload.Block, off int64, buf []byte) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if b < 0 || int(b) >= len(t.blocks) {
		return fmt.Errorf("read back block %d: no such block", b)
	}
	if _, err := t.blocks[b].file.ReadAt(buf, off); err != nil {
		return fmt.Errorf("read back block %d: %w", b, err)
	}
	return nil
}

// Publish seals every block and opens it anew for reading only. A block that could not be sealed stops it, and the
// files that it had opened are closed.
func (t *Target) Publish(ctx context.Context) ([]gpuload.Handle, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := errors.Join(t.open(), t.Wait(ctx)); err != nil {
		return nil, err
	}
	handles := make([]gpuload.Handle, len(t.blocks))
	for i, b := range t.blocks {
		f, err := seal(b.file)
		if err != nil {
			for _, h := range handles[:i] {
				err = errors.Join(err, h.File.Close())
			}
			return nil, fmt.Errorf("seal block %d: %w", i, err)
		}
		handles[i] = gpuload.Handle{Kind: KindFile, Size: b.size, File: f}
	}
	var err error
	for i := range t.blocks {
		err = errors.Join(err, t.blocks[i].file.Close())
		t.blocks[i].file = handles[i].File
	}
	t.published = true
	if err != nil {
		return nil, err
	}
	return handles, nil
}

// seal forbids all change of f for good and returns a descriptor of it that can't write either.
func seal(f *os.File) (*os.File, error) {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, err
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// Free waits for the copies that run, and closes the files. Their memory is given back when no other process holds them.
func (t *Target) Free() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.copies.Wait()
	var err error
	for _, b := range t.blocks {
		err = errors.Join(err, b.file.Close())
	}
	t.blocks, t.freed = nil, true
	return err
}
