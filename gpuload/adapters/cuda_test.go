//go:build linux && (amd64 || arm64) && !nogpu

package adapters

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
)

var fake *fakecuda.Control

func init() {
	withDevice = func(run func() int) int {
		code, err := onFake(run)
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			code = 1
		}
		return code
	}
}

// onFake runs the tests with the stand-in as the driver library.
func onFake(run func() int) (code int, err error) {
	dir, err := os.MkdirTemp("", "fakecuda")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	lib, err := fakecuda.Build(dir)
	if err == nil {
		err = os.Setenv(cuda.EnvLibrary, lib)
	}
	if err == nil {
		fake, err = fakecuda.Load(lib)
	}
	if err != nil {
		return 1, err
	}
	return run(), nil
}

func onDevice() (gpuload.Target, error) { return cuda.Open(0) }

func deviceMemory(*testing.T) (n int64) {
	for _, name := range []string{"USED", "PINNED", "CONTEXTS", "STREAMS", "EVENTS"} {
		n += fake.Get(name)
	}
	return n
}

// TestLoadCUDA is TestLoad on a device.
func TestLoadCUDA(t *testing.T) { loads(t, newWorld(t), deviceMemory, onDevice) }

// TestDeviceFaults: a load that the device fails leaves nothing, and memory that others need is given up for it.
func TestDeviceFaults(t *testing.T) {
	w := newWorld(t)
	t.Cleanup(fake.Reset)
	a, b := w.made("a", 1, 5000), w.made("b", 2, 5000)
	s := w.set(func(o *Options) { o.Target, o.Load.VerifyDevice = onDevice, true })
	load(t, s, "a")
	before := deviceMemory(t)
	l := must(s.Attach(a.Digest))
	for _, tt := range []struct {
		fault, calls string
		want         error
	}{
		{"FAIL_ALLOC", "ALLOCS", ErrNoRoom},
		{"FAIL_IPC", "HANDLES", gpuload.ErrDevice},
		{"FLIP_COPY", "COPIES", gpuload.ErrDevice},
	} {
		fake.Set(tt.fault, fake.Get(tt.calls)+1)
		if _, _, err := s.Load(t.Context(), "b"); !errors.Is(err, tt.want) || errors.Is(err, ErrRegistry) {
			t.Errorf("%s: %v", tt.fault, err)
		}
		if len(s.List()) != 1 || deviceMemory(t) != before || s.Generation() != 2 {
			t.Errorf("%s: held %+v, %d bytes, %d before", tt.fault, s.List(), deviceMemory(t), before)
		}
	}
	fake.Reset()
	fake.Set("MEMORY", 3<<20) // one allocation of 2 MiB
	if _, _, err := s.Load(t.Context(), "b"); !errors.Is(err, ErrNoRoom) || len(s.List()) != 1 {
		t.Errorf("no room: %v, %+v", err, s.List())
	}
	l.Release()
	load(t, s, "b")
	if list := s.List(); len(list) != 1 || list[0].Digest != b.Digest {
		t.Errorf("held: %+v", list)
	}
	attached(t, s, b.Digest, data(2, 5000))
}
