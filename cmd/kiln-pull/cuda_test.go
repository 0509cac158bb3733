//go:build linux && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// TestResidentCUDA holds a model on a device, which the stand-in for the driver has.
func TestResidentCUDA(t *testing.T) {
	lib, err := fakecuda.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(cuda.EnvLibrary, lib)
	fake, err := fakecuda.Load(lib)
	if err != nil {
		t.Fatal(err)
	}
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
	err = run(t.Context(), []string{"resident", dir, "--listen", "127.0.0.1:0"}, &stdout, &stderr)
	if cli.Code(err) != cli.CodeDevice || !strings.Contains(stderr.String(), "device: cuda:0 (Fake Accelerator) (auto") {
		t.Errorf("%v; stderr %q", err, stderr.String())
	}
}
