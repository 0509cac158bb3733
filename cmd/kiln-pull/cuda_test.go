//go:build linux && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/sdnotify"
)

// TestResidentCUDA holds a model on a device, which the stand-in for the driver has.
func TestResidentCUDA(t *testing.T) {
	fake := useFake(t)
	dir, m := residentModel(t)
	for _, args := range [][]string{{"--device", "auto", "--require-gpu"}, {"--device", "cuda:0", "--verify-device"}} {
		p := startResident(t, append([]string{dir}, args...)...)
		if got := p.identity(t); p.Backend != cuda.Backend || got == nil || *got != m.Summary() {
			t.Errorf("%q: announced %+v, identity %+v", args, p.announcement, got)
		}
		if fake.Get("USED") != 2*2<<20 || fake.Get("HANDLES") == 0 {
			t.Errorf("%q: %d bytes of the device, %d handles", args, fake.Get("USED"), fake.Get("HANDLES"))
		}
		if err := p.stop(); err != nil || fake.Get("CONTEXTS") != 0 || fake.Get("USED") != 0 {
			t.Errorf("%q: %v, %d contexts and %d bytes left", args, err, fake.Get("CONTEXTS"), fake.Get("USED"))
		}
	}
	if fake.Get("READS") != 2 {
		t.Errorf("%d reads of the device, want one for each shard", fake.Get("READS"))
	}
	fake.Set("FLIP_COPY", fake.Get("COPIES")+1)
	for _, tt := range []struct {
		args []string
		text string
	}{
		{[]string{"--device", "cuda:0", "--verify-device"}, "it holds other bytes"},
		{[]string{"--device", "cuda:7"}, "cuda:7"},
	} {
		var stdout, stderr bytes.Buffer
		err := run(t.Context(), append([]string{"resident", dir, "--listen", "127.0.0.1:0"}, tt.args...), &stdout, &stderr)
		if cli.Code(err) != cli.CodeDevice || !strings.Contains(err.Error(), tt.text) || fake.Get("CONTEXTS") != 0 {
			t.Errorf("%q: %v, %d contexts left", tt.args, err, fake.Get("CONTEXTS"))
		}
	}
	fake.Set("MEMORY", 1<<20)
	var stdout, stderr bytes.Buffer
	err := run(t.Context(), []string{"resident", dir, "--listen", "127.0.0.1:0"}, &stdout, &stderr)
	if cli.Code(err) != cli.CodeDevice || !strings.Contains(stderr.String(), "device: cuda:0 (Fake Accelerator) (auto") {
		t.Errorf("%v; stderr %q", err, stderr.String())
	}
}

// TestResidentDescriptors shares the memory of a device by file descriptors, which need no common PID namespace.
func TestResidentDescriptors(t *testing.T) {
	fake := useFake(t)
	dir, m := residentModel(t)
	folder := filepath.Join(t.TempDir(), "own")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(folder, "s")
	p := startResident(t, dir, "--device", "cuda:0", "--share", cuda.KindVMM, "--socket", socket)
	var stdout, stderr bytes.Buffer
	args := []string{"attach", "--check", "--socket", socket, m.Aggregate.String()}
	if err := run(t.Context(), args, &stdout, &stderr); err != nil || fake.Get("HANDLES") != 0 {
		t.Errorf("%v, %d handles of the other kind", err, fake.Get("HANDLES"))
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"CONTEXTS", "USED", "PHYSICAL", "RANGES"} {
		if n := fake.Get(name); n != 0 {
			t.Errorf("%s: %d left", name, n)
		}
	}
	fake.Set("NO_FD", 1)
	for _, on := range []string{"cuda:0", "auto"} {
		err := run(t.Context(), []string{"resident", dir, "--device", on, "--share", "vmm-fd"}, &stdout, &stderr)
		if cli.Code(err) != cli.CodeDevice || !strings.Contains(err.Error(), "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR") {
			t.Errorf("%s: %v", on, err)
		}
	}
	err := run(t.Context(), []string{"resident", dir, "--share", "x"}, &stdout, &stderr)
	if cli.Code(err) != cli.CodeUsage || !strings.Contains(err.Error(), "want cuda-ipc or vmm-fd") {
		t.Errorf("%v", err)
	}
}

// useFake makes a stand-in for the driver that only this test uses.
func useFake(t *testing.T) *fakecuda.Control {
	t.Helper()
	lib, err := fakecuda.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(cuda.EnvLibrary, lib)
	fake, err := fakecuda.Load(lib)
	if err != nil {
		t.Fatal(err)
	}
	return fake
}

// TestResidentDevices holds a model on two devices, in parts or as copies.
func TestResidentDevices(t *testing.T) {
	t.Setenv("FAKECUDA_DEVICES", "2")
	fake := useFake(t)
	dir, m := residentModel(t)
	shards := int64(len(m.Shards))
	for _, tt := range []struct {
		args   []string
		blocks int64
	}{
		{[]string{"--device", "cuda"}, shards},
		{[]string{"--device", "cuda:1,cuda:0", "--placement", "replicate"}, 2 * shards},
		{[]string{"--device", "cuda", "--placement", "replicate"}, 2 * shards},
		{[]string{"--device", "cuda:1"}, shards},
	} {
		p := startResident(t, append([]string{dir}, tt.args...)...)
		if got := p.identity(t); p.Backend != cuda.Backend || got == nil || *got != m.Summary() {
			t.Errorf("%q: announced %+v, identity %+v", tt.args, p.announcement, got)
		}
		if used := fake.Get("USED"); used != tt.blocks*2<<20 {
			t.Errorf("%q: %d bytes of the devices for %d shards", tt.args, used, shards)
		}
		if err := p.stop(); err != nil || fake.Get("CONTEXTS") != 0 {
			t.Errorf("%q: %v, %d contexts left", tt.args, err, fake.Get("CONTEXTS"))
		}
	}
	var stdout, stderr bytes.Buffer
	err := run(t.Context(), []string{"resident", dir, "--device", "cuda:0,cuda:2"}, &stdout, &stderr)
	if cli.Code(err) != cli.CodeDevice || !strings.Contains(err.Error(), "no CUDA device of index 2") {
		t.Errorf("%v", err)
	}
}

// TestResidentBroken: auto takes the host for a driver that does not work, and says so although it is to be quiet.
func TestResidentBroken(t *testing.T) {
	fake := useFake(t)
	dir, _ := residentModel(t)
	const warning = "warning: the GPU can't be used, the weights go to host memory: start the CUDA driver: cuInit"
	for _, tt := range []struct {
		code int64
		warn bool
	}{{999, true}, {100, false}} { // 100: no device, as on any machine without one
		fake.Set("INIT", tt.code)
		p := startResident(t, dir, "--quiet", "--socket", "off")
		if err := p.stop(); err != nil || p.Backend != "host" {
			t.Errorf("%d: %v, on %s", tt.code, err, p.Backend)
		}
		if strings.Contains(p.said(), warning) != tt.warn {
			t.Errorf("%d: said %q", tt.code, p.said())
		}
	}
}

// TestResidentSticky: an error after which the device's context is of no more use ends a load, whenever the driver tells
// of it; what was held is given back.
func TestResidentSticky(t *testing.T) {
	fake := useFake(t)
	dir, _ := residentModel(t)
	var stdout, stderr bytes.Buffer
	for at := range int64(3) {
		fake.Reset()
		fake.Set("FAIL_COPY", 2)
		fake.Set("FAIL_AT", at)
		err := run(t.Context(), []string{"resident", dir, "--device", "cuda:0"}, &stdout, &stderr)
		if cli.Code(err) != cli.CodeDevice || !strings.Contains(err.Error(), "700") || fake.Get("CONTEXTS") != 0 {
			t.Errorf("%d: %v, %d contexts left", at, err, fake.Get("CONTEXTS"))
		}
	}
}

// TestResidentLost: when the device loses what is held, the holder tells who is attached and ends by itself, with the
// exit code of a device that failed; whether an audit finds it, or an adapter that is loaded.
func TestResidentLost(t *testing.T) {
	lib, err := fakecuda.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, m := residentModel(t)
	base, adapter := m.Aggregate.String(), adapterOf(t, 1, &m)
	ended := func(h *keeper, a *attach.Attachment) {
		t.Helper()
		for _, want := range []string{attach.EventDamaged, attach.EventDraining} {
			if e := <-a.Events(); e.Kind != want {
				t.Errorf("event %+v, want %s", e, want)
			}
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		code, said := h.code(), h.stderr.String()
		if code != cli.CodeDevice || !strings.Contains(said, "error: the device has lost the weights: ") ||
			!strings.Contains(said, "hint: only a new process") || strings.Count(said, "error: ") != 1 {
			t.Errorf("exit code %d\n%s", code, said)
		}
		if _, err := os.Lstat(h.Socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the name is left: %v", err)
		}
	}
	broken := func(faults ...string) (*keeper, *attach.Attachment) {
		t.Helper()
		h := hold(t, append(faults, cuda.EnvLibrary+"="+lib), dir, socketIn(t), "--device", "cuda:0")
		a, err := h.client.Attach(t.Context(), m.Aggregate)
		if err != nil {
			t.Fatal(err)
		}
		return h, a
	}
	h, a := broken("FAKECUDA_FAIL_READ=1")
	h.ends(t, nil, cli.CodeNo, attach.CodeDamaged, "audit", base)
	ended(h, a)
	h, a = broken("FAKECUDA_FAIL_COPY=3") // after the two of the base
	h.ends(t, nil, cli.CodeNo, attach.CodeDamaged, "adapter", "load", base, adapter)
	ended(h, a)
}

// TestResidentNoticesLoss: the holder looks after the device by itself.
func TestResidentNoticesLoss(t *testing.T) {
	t.Setenv(sdnotify.EnvWatchdog, "2000") // look each millisecond
	fake := useFake(t)
	dir, m := residentModel(t)
	socket := socketIn(t)
	p := startResident(t, dir, "--device", "cuda:0", "--share", cuda.KindVMM, "--socket", socket)
	a, err := attach.Client{Socket: socket}.Attach(t.Context(), m.Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	b, err := cuda.Import(a.Blocks[0].Device.UUID, a.Blocks[0].Handle)
	if err != nil {
		t.Fatal(err)
	}
	fake.Set("FAIL_AT", 1)
	fake.Set("FAIL_READ", 1)
	if _, err := b.ReadAt(make([]byte, 1), 0); !errors.Is(err, gpuload.ErrUnreadable) {
		t.Errorf("read: %v", err)
	}
	for _, want := range []string{attach.EventDamaged, attach.EventDraining} {
		if e := <-a.Events(); e.Kind != want {
			t.Errorf("event %+v, want %s", e, want)
		}
	}
	_ = b.Close() // of a device that is lost
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := p.wait(); cli.Code(err) != cli.CodeDevice || !errors.Is(err, resident.ErrLost) ||
		strings.Contains(err.Error(), "\n") || fake.Get("CONTEXTS") != 0 {
		t.Errorf("%v, %d contexts left", err, fake.Get("CONTEXTS"))
	}
}
