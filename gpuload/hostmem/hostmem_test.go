package hostmem_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTarget(t *testing.T) {
	devicetest.Run(t, devicetest.Subject{
		New:  func(testing.TB) gpuload.Target { return &hostmem.Target{} },
		Read: readSealed,
		Held: held,
	})
}

func TestDiscard(t *testing.T) {
	devicetest.Run(t, devicetest.Subject{
		New:  func(testing.TB) gpuload.Target { return &hostmem.Discard{} },
		Held: held,
	})
}

// held returns the bytes of all files in memory that this process has open, and counts an empty one as one byte.
func held(t testing.TB) (n int64) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range open {
		path := filepath.Join("/proc/self/fd", e.Name())
		if to, err := os.Readlink(path); err != nil || !strings.HasPrefix(to, "/memfd:kiln-") {
			continue
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		n += st.Size() + 1
	}
	return n
}

// readSealed reads a published block the way another process would, after trying to spoil it in every way.
func readSealed(t testing.TB, h gpuload.Handle) []byte {
	t.Helper()
	if h.Kind != hostmem.KindFile {
		t.Fatalf("kind %q", h.Kind)
	}
	spoil(t, h)
	b, err := io.ReadAll(io.NewSectionReader(h.File, 0, 1<<40))
	if err != nil {
		t.Fatal(err)
	}
	if h.Size > 0 {
		shared, err := unix.Mmap(int(h.File.Fd()), 0, int(h.Size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(shared)
		if string(shared) != string(b) {
			t.Error("a mapping shows other bytes than a read")
		}
	}
	return b
}

func spoil(t testing.TB, h gpuload.Handle) {
	t.Helper()
	if _, err := h.File.WriteAt([]byte{1}, 0); err == nil {
		t.Error("a published block was written through its handle")
	}
	if flags, err := unix.FcntlInt(h.File.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
		t.Errorf("the handle is open with flags %#x, want for reading only (%v)", flags, err)
	}
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", h.File.Fd()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := again.WriteAt([]byte{1}, 0); h.Size > 0 && err == nil {
		t.Error("a published block was written after it was opened anew")
	}
	for _, size := range []int64{h.Size + 1, h.Size - 1} {
		if err := again.Truncate(size); size >= 0 && err == nil {
			t.Errorf("a published block of %d bytes was cut or made longer to %d", h.Size, size)
		}
	}
	if _, err := unix.Mmap(int(again.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != syscall.EPERM {
		t.Errorf("map a published block for writing: %v, want %v", err, syscall.EPERM)
	}
}

func TestLateWritesRefused(t *testing.T) {
	ctx, target := t.Context(), &hostmem.Target{}
	defer target.Free()
	b, err := target.Alloc(ctx, 0, 10)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := target.Publish(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := target.Submit(ctx, []byte{1}, b, 0); err == nil {
		t.Error("copied to a published block")
	}
	if _, err := target.Alloc(ctx, 0, 1); err == nil {
		t.Error("allocated after publication")
	}
	if _, err := (&hostmem.Target{}).Alloc(ctx, 1, 1); err == nil {
		t.Error("allocated on a second device of the host")
	}
}
