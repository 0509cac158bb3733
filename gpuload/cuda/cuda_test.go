//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/gpuload/devicetest"
)

// envRead makes the test program another process that reads a block, see writeBlock; envMake one that makes it.
const (
	envRead = "KILN_TEST_READ_BLOCK"
	envMake = "KILN_TEST_MAKE_BLOCK"
)

var fake *fakecuda.Control

func TestMain(m *testing.M) {
	for env, run := range map[string]func(string) error{envRead: writeBlock, envMake: makeBlock} {
		if arg := os.Getenv(env); arg != "" {
			if err := run(arg); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	code, err := withFake(func() int {
		code := m.Run()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		return code
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		code = 1
	}
	os.Exit(code)
}

// withFake runs the tests with the stand-in as the driver library.
func withFake(run func() int) (code int, err error) {
	dir, err := os.MkdirTemp("", "fakecuda")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	lib, err := fakecuda.Build(dir)
	if err != nil {
		return 1, err
	}
	for name, value := range map[string]string{EnvLibrary: lib, "FAKECUDA_LAZY": "1", "FAKECUDA_DEVICES": "2"} {
		if err := os.Setenv(name, value); err != nil {
			return 1, err
		}
	}
	if fake, err = fakecuda.Load(lib); err != nil {
		return 1, err
	}
	return run(), nil
}

// writeBlock opens a block and writes what it holds to stdout. A descriptor comes over the socket that is descriptor 3.
func writeBlock(block string) (err error) {
	var uuid, raw string
	var h gpuload.Handle
	if _, err := fmt.Sscan(block, &uuid, &h.Kind, &h.Size, &h.Allocation, &raw); err != nil {
		return err
	}
	if h.Kind == KindVMM {
		if h.File, err = receive(3); err != nil {
			return err
		}
	} else if h.Raw, err = hex.DecodeString(strings.TrimSuffix(raw, ".")); err != nil {
		return err
	}
	b, err := Import(uuid, h)
	if err != nil {
		return err
	}
	if h.File != nil {
		err = h.File.Close()
	}
	if _, e := io.Copy(os.Stdout, io.NewSectionReader(b, 0, 1<<40)); e != nil {
		return e
	}
	return errors.Join(err, b.Close())
}

// elsewhere returns what another process reads of a block.
func elsewhere(t testing.TB, h gpuload.Handle) []byte {
	t.Helper()
	opens := h.Kind == KindIPC && len(h.Raw) == 64 || h.Kind == KindVMM && h.File != nil && h.Allocation >= h.Size
	if !opens && (h.Size > 0 || h.Kind != KindIPC && h.Kind != KindVMM) {
		t.Fatalf("handle %+v", h)
	}
	if h.Size == 0 {
		return nil
	}
	cmd := exec.Command(os.Args[0])
	block := fmt.Sprintf("%s=%s %s %d %d %x.", envRead, uuidOf(t, h.Device), h.Kind, h.Size, h.Allocation, h.Raw)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", block)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if h.File != nil {
		ours, theirs := socketPair(t)
		cmd.ExtraFiles = []*os.File{theirs}
		if err := send(ours, h.File); err != nil {
			t.Fatal(err)
		}
	}
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("another process: %v: %s", err, stderr.Bytes())
	}
	return out
}

func uuidOf(t testing.TB, index int) string {
	t.Helper()
	target := open(t, index)
	ds, err := target.Devices(t.Context())
	if err = errors.Join(err, target.Free()); err != nil {
		t.Fatal(err)
	}
	return ds[0].UUID
}

func open(t testing.TB, indices ...int) *Target {
	t.Helper()
	target, err := Open(indices...)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

// held adds up what the driver holds for this process, counting a thing without a size as one byte.
func held(testing.TB) (n int64) {
	for _, name := range []string{"USED", "PINNED", "CONTEXTS", "STREAMS", "EVENTS", "RANGES", "PHYSICAL"} {
		n += fake.Get(name)
	}
	return n
}

func breaks(t testing.TB, f devicetest.Fault) {
	fake.Reset()
	t.Cleanup(fake.Reset)
	for name, n := range map[string]int{
		"FAIL_ALLOC": f.Alloc, "FAIL_COPY": f.Copy, "FAIL_IPC": f.Handle, "FLIP_COPY": f.Flip, "FAIL_PIN": f.Pin,
		"FAIL_AT": int(f.At),
	} {
		fake.Set(name, int64(n))
	}
	if f.NoPins {
		fake.Set("PIN_LIMIT", 0)
	}
}

func subject(indices ...int) devicetest.Subject {
	return devicetest.Subject{
		New:  func(t testing.TB) gpuload.Target { return open(t, indices...) },
		Read: elsewhere, Held: held, Break: breaks,
	}
}

// TestTarget runs the suite with copies that are made as late as the driver may.
func TestTarget(t *testing.T) { devicetest.Run(t, subject(0)) }

// TestTargetOfTwoDevices runs it with copies that are made at once, spread over two devices.
func TestTargetOfTwoDevices(t *testing.T) {
	fake.Reset()
	fake.Set("LAZY", 0)
	t.Cleanup(fake.Reset)
	devicetest.Run(t, subject(0, 1))
}

// TestPinnedCopies loads and reads back without a copy from memory that is not pinned.
func TestPinnedCopies(t *testing.T) {
	fake.Reset()
	target := open(t, 0)
	defer target.Free()
	ctx, buf := t.Context(), make([]byte, 1<<16)
	unpin, err := target.Pin(buf)
	if err != nil {
		t.Fatal(err)
	}
	fill(t, target, buf[:1<<15])
	if err := target.ReadBack(ctx, 0, 0, buf[1<<15:]); err != nil || !bytes.Equal(buf[:1<<15], buf[1<<15:]) {
		t.Errorf("read back other bytes (%v)", err)
	}
	if n := fake.Get("UNPINNED"); n != 0 {
		t.Errorf("%d copies from memory that is not pinned", n)
	}
	if err := unpin(); err != nil {
		t.Fatal(err)
	}
	if err := target.ReadBack(ctx, 0, 0, buf); err == nil {
		t.Error("read back more than the block has")
	}
	if err := target.ReadBack(ctx, 0, 1<<14, buf[:1<<14]); err != nil || fake.Get("UNPINNED") != 1 {
		t.Errorf("%v, %d copies to memory that is not pinned", err, fake.Get("UNPINNED"))
	}
}

// fill makes a block of the given bytes.
func fill(t *testing.T, target *Target, b []byte) {
	t.Helper()
	ctx := t.Context()
	to, err := target.Alloc(ctx, target.devices[0].index, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := target.Submit(ctx, b, to, 0)
	if err == nil {
		err = errors.Join(tok.Wait(ctx), target.Wait(ctx))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestDevices(t *testing.T) {
	target := open(t)
	defer target.Free()
	ds, err := target.Devices(t.Context())
	if err != nil || len(ds) != 2 {
		t.Fatalf("%+v, %v", ds, err)
	}
	want := gpuload.Device{
		Index: 1, Name: "cuda:1 (Fake Accelerator)", Backend: "cuda", Free: 1 << 30, Granularity: 2 << 20,
		UUID: "GPU-00112233-4455-6677-8899-aabbccddee01", PCI: "0000:3c:00.0",
	}
	if ds[1] != want {
		t.Errorf("%+v, want %+v", ds[1], want)
	}
	if _, err := target.Alloc(t.Context(), 1, 1); err != nil {
		t.Error(err)
	}
	if ds, err = target.Devices(t.Context()); err != nil || ds[1].Free != 1022<<20 || ds[0].Free != 1<<30 {
		t.Errorf("%+v after one byte was taken (%v)", ds, err)
	}
	for _, i := range []int{-1, 2} {
		if _, err := Open(i); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), fmt.Sprint("index ", i)) {
			t.Errorf("cuda:%d: %v", i, err)
		}
	}
	if held(t) != 1+4+1+4+(2<<20) {
		t.Errorf("%d held", held(t))
	}
}

// TestContext: a call on a thread without a context is refused, which with never lets happen.
func TestContext(t *testing.T) {
	target := open(t, 0)
	defer target.Free()
	d := target.devices[0]
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.call("cuCtxSetCurrent", d.setCurrent, 0); err != nil {
		t.Fatal(err)
	}
	_, err := out[uint64](d.table, "cuMemAlloc", d.alloc, 1<<20, 0)
	var e *Error
	if !errors.As(err, &e) || e.Code != 201 || e.Name != "CUDA_ERROR_INVALID_CONTEXT" {
		t.Errorf("allocated without a context: %v", err)
	}
	if err := d.with(func() error { _, err := d.memory(); return err }); err != nil {
		t.Error(err)
	}
}

// TestThread: other goroutines take every thread that is not held while fn waits; fn keeps its own.
func TestThread(t *testing.T) {
	target := open(t, 0)
	defer target.Free()
	err := target.devices[0].with(func() error {
		for range 10 {
			first, done := syscall.Gettid(), make(chan struct{})
			var locked, ended sync.WaitGroup
			for range 32 {
				locked.Add(1)
				ended.Go(func() {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
					locked.Done()
					<-done
				})
			}
			locked.Wait()
			now := syscall.Gettid()
			close(done)
			ended.Wait()
			if now != first {
				return fmt.Errorf("thread %d, was %d", now, first)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestSameProcess(t *testing.T) {
	before := fake.Get("HANDLES")
	target := open(t, 0)
	defer target.Free()
	fill(t, target, []byte("bytes"))
	hs, err := target.Publish(t.Context())
	if err != nil || fake.Get("HANDLES") != before+1 {
		t.Fatalf("%d handles, %v", fake.Get("HANDLES"), err)
	}
	uuid := uuidOf(t, 0)
	var e *Error
	if _, err := Import(uuid, hs[0]); !errors.As(err, &e) || e.Code != 201 {
		t.Errorf("opened in the process that published it: %v", err)
	}
	for what, h := range map[string]gpuload.Handle{
		"kind": {Kind: "memfd", Size: 5, Raw: hs[0].Raw}, "short": {Kind: KindIPC, Size: 5, Raw: hs[0].Raw[:63]},
	} {
		if _, err := Import(uuid, h); err == nil || !strings.Contains(err.Error(), "no handle") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Import("GPU-x", hs[0]); !errors.Is(err, ErrNone) {
		t.Errorf("opened on a device that is not there: %v", err)
	}
	empty, err := Import(uuid, gpuload.Handle{Kind: KindIPC})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := empty.ReadAt(make([]byte, 1), 0); n != 0 || err != io.EOF || empty.Close() != nil {
		t.Errorf("%d bytes of an empty block, %v", n, err)
	}
	if _, err := target.Submit(t.Context(), []byte("x"), 0, 0); err == nil {
		t.Error("copied to a published block")
	}
	if b := make([]byte, 5); target.ReadBack(t.Context(), 0, 0, b) != nil || string(b) != "bytes" {
		t.Errorf("read back %q after publication", b)
	}
}

func TestErrors(t *testing.T) {
	fake.Reset()
	target := open(t, 0)
	defer target.Free()
	_, err := target.Alloc(t.Context(), 0, 2<<30)
	want := "allocate 2147483648 bytes on cuda:0: cuMemAlloc: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)"
	if !errors.Is(err, gpuload.ErrMemory) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if text := (&Error{Call: "cuX", Code: 9}).Error(); text != "cuX: error 9" {
		t.Error(text)
	}
	if _, err := target.Alloc(t.Context(), 1, 1); err == nil {
		t.Error("allocated on a device that the target was not opened on")
	}
}

// TestFree gives everything back while another target keeps the context, which then does not end.
func TestFree(t *testing.T) {
	fake.Reset()
	other := open(t, 0)
	defer other.Free()
	before := held(t)
	target, buf := open(t, 0), make([]byte, 4096)
	if _, err := target.Pin(buf); err != nil {
		t.Fatal(err)
	}
	fill(t, target, buf)
	for range 2 {
		if err := target.Free(); err != nil || held(t) != before {
			t.Errorf("%d held, %d before: %v", held(t), before, err)
		}
	}
	if _, err := target.Pin(buf); err == nil {
		t.Error("pinned after it was freed")
	}
}

// TestCancelled frees while copies are open: none may read its buffer any more.
func TestCancelled(t *testing.T) {
	fake.Reset()
	before := held(t)
	target := open(t, 0)
	buf := make([]byte, 1<<20)
	unpin, err := target.Pin(buf)
	if err != nil {
		t.Fatal(err)
	}
	to, err := target.Alloc(t.Context(), 0, int64(len(buf)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	tok, err := target.Submit(ctx, buf, to, 0)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := tok.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := target.synchronise(t.Context()); err != nil {
		t.Error(err)
	}
	if err := errors.Join(unpin(), target.Free()); err != nil || held(t) != before {
		t.Errorf("%d held, %d before: %v", held(t), before, err)
	}
}

func TestLibraries(t *testing.T) {
	if names, err := libraries("", true); err != nil || len(names) != 2 {
		t.Error(names, err)
	}
	if names, err := libraries("/x.so", false); err != nil || len(names) != 1 || names[0] != "/x.so" {
		t.Error(names, err)
	}
	if _, err := libraries("/x.so", true); err == nil {
		t.Error("a program with the rights of another user takes the library that its caller names")
	}
}

// TestFill fills tables from a library that lacks an entry.
func TestFill(t *testing.T) {
	lib := library(t, "int one(void) { return 0; } int two_v1(void) { return 0; }")
	var one, two, three uintptr
	entries := []entry{
		{&one, false, []string{"one"}}, {&two, false, []string{"two_v2", "two_v1"}}, {&three, true, []string{"three"}},
	}
	if err := fillTable(lib, entries); err != nil || one == 0 || two == 0 || three != 0 {
		t.Errorf("%x %x %x, %v", one, two, three, err)
	}
	entries[2].optional = false
	if err := fillTable(lib, entries); err == nil || !strings.Contains(err.Error(), "no three") {
		t.Errorf("%v; want the entry that is missing", err)
	}
}

func library(t *testing.T, code string) uintptr {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.c"), []byte(code), 0o666); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", dir+"/x.so", dir+"/x.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lib, err := openLibrary([]string{filepath.Join(dir, "none.so"), filepath.Join(dir, "x.so")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openLibrary([]string{filepath.Join(dir, "none.so")}); !errors.Is(err, ErrNone) {
		t.Errorf("%v, want %v", err, ErrNone)
	}
	return lib
}
