//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
)

// TestTargetOfDescriptors runs the suite on memory that is created apart from its address.
func TestTargetOfDescriptors(t *testing.T) {
	for name, tt := range map[string]struct {
		lazy    int64
		indices []int
	}{"late": {1, []int{0}}, "two devices": {0, []int{0, 1}}} {
		t.Run(name, func(t *testing.T) {
			fake.Reset()
			fake.Set("LAZY", tt.lazy)
			t.Cleanup(fake.Reset)
			s := subject(tt.indices...)
			s.New = func(t testing.TB) gpuload.Target { return openVMM(t, tt.indices...) }
			s.Break = func(t testing.TB, f devicetest.Fault) {
				breaks(t, f)
				fake.Set("FAIL_VMM", int64(vmmCall(len(tt.indices), f)))
			}
			devicetest.Run(t, s)
		})
	}
}

// vmmCall is the number of the call by which a target fails as a fault says: it makes 3 for each device when it is
// opened, then 4 for each allocation of the three.
func vmmCall(devices int, f devicetest.Fault) int {
	switch {
	case f.Alloc > 0:
		return 3*devices + 4*(f.Alloc-1) + 1
	case f.Handle > 0:
		return 3*devices + 4*3 + f.Handle
	}
	return 0
}

func openVMM(t testing.TB, indices ...int) *Target {
	t.Helper()
	target, err := OpenShared(KindVMM, indices...)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestLayouts(t *testing.T) {
	var p memProp
	var a memAccess
	got := []uintptr{
		unsafe.Sizeof(p), unsafe.Offsetof(p.handles), unsafe.Offsetof(p.location), unsafe.Offsetof(p.win32),
		unsafe.Offsetof(p.compression), unsafe.Offsetof(p.rdma), unsafe.Offsetof(p.usage),
		unsafe.Sizeof(a), unsafe.Offsetof(a.flags), unsafe.Offsetof(a.location.id),
	}
	if want := []uintptr{32, 4, 8, 16, 24, 25, 26, 12, 8, 4}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func socketPair(t testing.TB) (ours, theirs *os.File) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs = os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

// send sends a descriptor over a socket, with one byte.
func send(socket, f *os.File) error {
	return syscall.Sendmsg(int(socket.Fd()), []byte("f"), syscall.UnixRights(int(f.Fd())), nil, 0)
}

// receive takes a descriptor from the socket that is descriptor fd.
func receive(fd int) (*os.File, error) {
	socket := os.NewFile(uintptr(fd), "socket")
	defer socket.Close()
	c, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	b, oob := make([]byte, 1), make([]byte, syscall.CmsgSpace(4))
	_, n, _, _, err := c.(*net.UnixConn).ReadMsgUnix(b, oob)
	if err != nil {
		return nil, err
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("%d messages of control: %w", len(messages), err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "block"), nil
}

// makeBlock publishes a block that holds text, sends its descriptor over the socket that is descriptor 3, and ends
// without giving anything back.
func makeBlock(text string) error {
	target, err := OpenShared(KindVMM, 0)
	if err != nil {
		return err
	}
	ctx := context.Background()
	b, err := target.Alloc(ctx, 0, int64(len(text)))
	if err != nil {
		return err
	}
	if _, err = target.Submit(ctx, []byte(text), b, 0); err != nil {
		return err
	}
	hs, err := target.Publish(ctx)
	if err != nil {
		return err
	}
	return send(os.NewFile(3, "socket"), hs[0].File)
}

// TestDescriptorOutlives opens a block whose maker has ended.
func TestDescriptorOutlives(t *testing.T) {
	fake.Reset()
	before := held(t)
	ours, theirs := socketPair(t)
	cmd := exec.Command(os.Args[0])
	cmd.ExtraFiles, cmd.Env = []*os.File{theirs}, append(os.Environ(), "GORACE=atexit_sleep_ms=0", envMake+"=bytes")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	fd, err := syscall.Dup(int(ours.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	f, err := receive(fd)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Import(uuidOf(t, 0), gpuload.Handle{Kind: KindVMM, Size: 5, Allocation: granularity, File: f})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(io.NewSectionReader(m, 0, 100))
	if err != nil || string(b) != "bytes" || !m.ReadOnly() {
		t.Errorf("%q, %v, only for reading: %v", b, err, m.ReadOnly())
	}
	for range 2 {
		if err := m.Close(); err != nil || held(t) != before {
			t.Errorf("%d held, %d before: %v", held(t), before, err)
		}
	}
}

// shared publishes one block of a page and returns its handle with the target.
func shared() (*Target, gpuload.Handle, error) {
	ctx := context.Background()
	target, err := OpenShared(KindVMM, 0)
	if err != nil {
		return nil, gpuload.Handle{}, err
	}
	b, err := target.Alloc(ctx, 0, 4096)
	var hs []gpuload.Handle
	if err == nil {
		_, err = target.Submit(ctx, bytes.Repeat([]byte("x"), 4096), b, 0)
	}
	if err == nil {
		hs, err = target.Publish(ctx)
	}
	if err != nil {
		return nil, gpuload.Handle{}, errors.Join(err, target.Free())
	}
	return target, hs[0], nil
}

// fails fails each call of run in turn, until it works: what was taken before is given back each time. It returns how
// many calls there are.
func fails(t *testing.T, run func() error) (calls int) {
	t.Helper()
	before, files := held(t), openFiles(t)
	for n := int64(1); ; n++ {
		fake.Reset()
		fake.Set("FAIL_VMM", n)
		err := run()
		if err != nil && (!errors.Is(err, gpuload.ErrMemory) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("call %d: %v", n, err)
		}
		if held(t) != before || openFiles(t) != files {
			t.Errorf("call %d: %d held, %d before; %d files, %d before", n, held(t), before, openFiles(t), files)
		}
		if fake.Get("VMM") < n {
			return int(n - 1)
		}
	}
}

// TestDescriptorFaults fails each call by which a block is published, and each by which it is opened.
func TestDescriptorFaults(t *testing.T) {
	t.Cleanup(fake.Reset)
	n := fails(t, func() error {
		target, _, err := shared()
		if err != nil {
			return err
		}
		return target.Free()
	})
	if n != 3+4+1 {
		t.Errorf("%d calls to publish", n)
	}
	fake.Reset()
	target, h, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	uuid := uuidOf(t, 0)
	n = fails(t, func() error {
		m, err := Import(uuid, h)
		if err != nil {
			return err
		}
		return m.Close()
	})
	if n != 2+4 {
		t.Errorf("%d calls to open", n)
	}
	if err := target.Free(); err != nil {
		t.Error(err)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestReadOnly: whoever opens a descriptor can't write to the block, unless the driver knows no such access.
func TestReadOnly(t *testing.T) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	target, h, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	defer target.Free()
	uuid := uuidOf(t, 0)
	write := func(m *Imported) error {
		return m.d.with(func() error {
			if err := m.d.toDevice(m.ptr, []byte("y"), m.d.streams[0]); err != nil {
				return err
			}
			return m.d.call("cuStreamSynchronize", m.d.streamSync, m.d.streams[0])
		})
	}
	fake.Set("NO_READ_ONLY", 1)
	m, err := Import(uuid, h)
	if err != nil || m.ReadOnly() {
		t.Fatalf("opened for reading only by a driver that can't: %v", err)
	}
	if err := errors.Join(write(m), m.Close()); err != nil {
		t.Error(err)
	}
	fake.Set("NO_READ_ONLY", 0)
	if m, err = Import(uuid, h); err != nil || !m.ReadOnly() {
		t.Fatal(err)
	}
	var e *Error
	if err := write(m); !errors.As(err, &e) || e.Code != 700 {
		t.Errorf("%v after a write to a block that is open for reading", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func TestDescriptorUnsupported(t *testing.T) {
	t.Cleanup(fake.Reset)
	before := held(t)
	refused := func(text string) {
		t.Helper()
		_, err := OpenShared(KindVMM, 0)
		if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), text) || held(t) != before {
			t.Errorf("%v, %d held; want %q", err, held(t)-before, text)
		}
	}
	for name, text := range map[string]string{
		"NO_VMM": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
		"NO_FD":  "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
	} {
		fake.Reset()
		fake.Set(name, 1)
		refused(text)
	}
	fake.Reset()
	lib, err := fakecuda.Build(t.TempDir(), fakecuda.WithoutVMM)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(EnvLibrary, lib)
	refused("no cuDeviceGetAttribute")
	if err := open(t, 0).Free(); err != nil {
		t.Error(err)
	}
	if _, err := OpenShared("memfd"); err == nil || !strings.Contains(err.Error(), KindVMM) {
		t.Errorf("%v; want the kinds that there are", err)
	}
}

func TestGranularity(t *testing.T) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	fake.Set("GRANULARITY", 4<<20)
	target, h, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	defer target.Free()
	if ds, err := target.Devices(t.Context()); err != nil || ds[0].Granularity != 4<<20 || h.Allocation != 4<<20 {
		t.Errorf("%+v, %d bytes allocated, %v", ds, h.Allocation, err)
	}
}

func TestBadHandles(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	uuid := uuidOf(t, 0)
	for what, h := range map[string]gpuload.Handle{
		"a file of another kind": {Kind: KindVMM, Size: 5, Allocation: granularity, File: f},
		"no file":                {Kind: KindVMM, Size: 5, Allocation: granularity},
		"a small allocation":     {Kind: KindVMM, Size: 5, Allocation: 4, File: f},
		"a size below 0":         {Kind: KindVMM, Size: -1, Allocation: granularity, File: f},
	} {
		before := held(t)
		if _, err := Import(uuid, h); err == nil || held(t) != before {
			t.Errorf("%s: %v, %d held", what, err, held(t)-before)
		}
	}
}

// TestHung cancels a copy that never ends: neither the wait nor what follows it waits for ever.
func TestHung(t *testing.T) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	before := held(t)
	target, buf := open(t, 0), make([]byte, 4096)
	target.patience = 10 * time.Millisecond
	if _, err := target.Pin(buf); err != nil {
		t.Fatal(err)
	}
	fill(t, target, buf)
	fake.Set("HANG", 1)
	ctx, cancel := context.WithCancel(t.Context())
	tok, err := target.Submit(ctx, buf, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(target.patience, cancel)
	if err := tok.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if err := target.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if err := target.ReadBack(t.Context(), 0, 0, buf); !errors.Is(err, gpuload.ErrHung) {
		t.Errorf("read back: %v, want %v", err, gpuload.ErrHung)
	}
	for range 2 {
		if err := target.Free(); !errors.Is(err, gpuload.ErrHung) {
			t.Errorf("free: %v, want %v", err, gpuload.ErrHung)
		}
	}
	fake.Set("HANG", 0)
	target.patience = patience
	if err := target.Free(); err != nil || held(t) != before {
		t.Errorf("%d held, %d before: %v", held(t), before, err)
	}
}

// TestHungBlock reads a block of another process from a device that does not answer: neither the read nor the end waits
// for ever, what is read to stays in memory, and when the device goes on all is given back.
func TestHungBlock(t *testing.T) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	target, h, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	uuid, before := uuidOf(t, 0), held(t)
	m, err := Import(uuid, h)
	if err != nil {
		t.Fatal(err)
	}
	m.patience = 10 * time.Millisecond
	fake.Set("HANG", 1)
	freed, other := make(chan string, 2), new([4096]byte)
	func() {
		buf := new([4096]byte)
		runtime.AddCleanup(buf, func(s string) { freed <- s }, "what is read to")
		if n, err := m.ReadAt(buf[:], 0); n != 0 || !errors.Is(err, gpuload.ErrHung) {
			t.Errorf("read %d bytes: %v, want %v", n, err, gpuload.ErrHung)
		}
	}()
	runtime.AddCleanup(other, func(s string) { freed <- s }, "other")
	runtime.KeepAlive(other)
	if got := collected(freed); got != "other" {
		t.Errorf("%s was collected first", got)
	}
	for range 2 {
		if err := m.Close(); !errors.Is(err, gpuload.ErrHung) {
			t.Errorf("close: %v, want %v", err, gpuload.ErrHung)
		}
	}
	if _, err := m.ReadAt(make([]byte, 1), 0); err == nil || errors.Is(err, gpuload.ErrHung) {
		t.Errorf("read after the end: %v", err)
	}
	fake.Set("HANG", 0)
	m.patience = patience
	for range 2 {
		if err := m.Close(); err != nil || held(t) != before {
			t.Errorf("%d held, %d before: %v", held(t), before, err)
		}
	}
	if got := collected(freed); got != "what is read to" {
		t.Errorf("%s was collected", got)
	}
	if err := target.Free(); err != nil {
		t.Error(err)
	}
}

// collected collects garbage until something says that it was.
func collected(freed <-chan string) string {
	for {
		runtime.GC()
		select {
		case s := <-freed:
			return s
		default:
		}
	}
}

// TestSticky fails a read of published blocks: the error is reported, by what follows too, and all is given back.
func TestSticky(t *testing.T) {
	for _, kind := range []string{KindIPC, KindVMM} {
		fake.Reset()
		t.Cleanup(fake.Reset)
		before := held(t)
		target, err := OpenShared(kind, 0)
		if err != nil {
			t.Fatal(err)
		}
		fill(t, target, []byte("bytes"))
		if _, err := target.Publish(t.Context()); err != nil {
			t.Fatal(err)
		}
		fake.Set("FAIL_AT", 1)
		fake.Set("FAIL_READ", 1)
		var e *Error
		if err := target.ReadBack(t.Context(), 0, 0, make([]byte, 5)); !errors.As(err, &e) || e.Code != 700 {
			t.Errorf("%s: read back: %v", kind, err)
		}
		if _, err := target.Devices(t.Context()); !errors.As(err, &e) {
			t.Errorf("%s: devices: %v", kind, err)
		}
		if err := target.Free(); !errors.As(err, &e) || held(t) != before {
			t.Errorf("%s: free: %v, %d held, %d before", kind, err, held(t), before)
		}
	}
}

// TestHungLoad cancels a load whose copies never end: it returns, and the device may go on reading its buffers.
func TestHungLoad(t *testing.T) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	before := held(t)
	dir := t.TempDir()
	head := `{"t":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]}}`
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
	if err := os.WriteFile(filepath.Join(dir, "m.safetensors"), append(file, make([]byte, 1<<16)...), 0o666); err != nil {
		t.Fatal(err)
	}
	src, err := gpuload.OpenDir(dir, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	p, err := gpuload.NewPlan(t.Context(), src, []string{"m.safetensors"}, gpuload.Want{})
	if err != nil {
		t.Fatal(err)
	}
	target := openVMM(t, 0)
	target.patience = 10 * time.Millisecond
	fake.Set("HANG", 1)
	ctx, cancel := context.WithCancel(t.Context())
	_, err = gpuload.Load(ctx, p, src, target, gpuload.Options{ChunkBytes: 4096, Progress: func(_ string, done int64) {
		if done > p.Shards[0].Data { // a copy was submitted
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || !errors.Is(err, gpuload.ErrHung) {
		t.Errorf("%v, want %v and %v", err, context.Canceled, gpuload.ErrHung)
	}
	fake.Set("HANG", 0)
	target.patience = patience
	if err := target.Free(); err != nil || held(t) != before || fake.Get("UNPINNED") != 0 {
		t.Errorf("%d held, %d before: %v", held(t), before, err)
	}
}
