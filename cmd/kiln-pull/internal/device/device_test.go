//go:build linux && (amd64 || arm64) && !nogpu

package device

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

func choose(t *testing.T, args string) (Choice, error) {
	t.Helper()
	var f Flags
	cmd := new(cobra.Command)
	f.Bind(cmd)
	if err := cmd.ParseFlags(strings.Fields(args)); err != nil {
		t.Fatal(err)
	}
	return f.Choice()
}

// TestOpen opens what is asked for, of two devices, and says what that is and which shards go where.
func TestOpen(t *testing.T) {
	lib, err := fakecuda.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(cuda.EnvLibrary, lib)
	t.Setenv("FAKECUDA_DEVICES", "2")
	fake, err := fakecuda.Load(lib)
	if err != nil {
		t.Fatal(err)
	}
	const first, second = "cuda:0 (Fake Accelerator)", "cuda:1 (Fake Accelerator)"
	for _, tt := range []struct {
		args    string
		name    string
		devices int
		each    int // devices that have a shard
	}{
		{"", first + " (auto: the first GPU)", 1, 1},
		{"--require-gpu", first + " (auto: the first GPU)", 1, 1},
		{"--device host", "host memory", 1, 1},
		{"--device cuda:1", second, 1, 1},
		{"--device cuda", first + ", " + second + " (spread)", 2, 1},
		{"--device cuda:1,cuda:0", second + ", " + first + " (spread)", 2, 1},
		{"--device cuda --placement replicate", first + ", " + second + " (replicate)", 2, 2},
		{"--device cuda --share vmm-fd", first + ", " + second + " (spread)", 2, 1},
	} {
		c, err := choose(t, tt.args)
		if err != nil {
			t.Fatal(err)
		}
		target, backend, name, err := c.Open(t.Context(), func(line string) { t.Errorf("%q: warned of %q", tt.args, line) })
		if err != nil {
			t.Fatal(err)
		}
		again, err := c.Same(backend)()
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range []gpuload.Target{target, again} {
			devices, err := target.Devices(t.Context())
			if err != nil || len(devices) != tt.devices || name != tt.name {
				t.Errorf("%q: %q, devices %+v (%v); want %q", tt.args, name, devices, err, tt.name)
			}
			on, err := c.Placement()([]int64{1, 1}, devices)
			if err != nil || len(on[0]) != tt.each || len(on[1]) != tt.each {
				t.Errorf("%q: shards on %v (%v)", tt.args, on, err)
			}
			if err := target.Free(); err != nil {
				t.Error(err)
			}
		}
	}
	if n := fake.Get("CONTEXTS"); n != 0 {
		t.Errorf("%d contexts left", n)
	}
	c, err := choose(t, "--device cuda:0,cuda:2")
	if err != nil {
		t.Fatal(err)
	}
	_, _, _, err = c.Open(t.Context(), nil)
	if cli.Code(err) != cli.CodeDevice || !strings.Contains(err.Error(), "cuda:2: no CUDA device of index 2") ||
		fake.Get("CONTEXTS") != 0 {
		t.Errorf("%v, %d contexts left", err, fake.Get("CONTEXTS"))
	}
}

// TestNoDriver: the reason is there on whatever threads the driver is looked for, and the hint is one that can be
// followed with the flags as they are.
func TestNoDriver(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "none.so")
	t.Setenv(cuda.EnvLibrary, lib)
	for args, hint := range map[string]string{
		"--device cuda": "hint: --device host holds",
		"--require-gpu": "hint: --device host without --require-gpu holds",
	} {
		c, err := choose(t, args)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				_, _, _, err := c.Open(context.Background(), nil)
				var out bytes.Buffer
				cli.Report(&out, err)
				if !strings.Contains(out.String(), lib) || !strings.Contains(out.String(), hint) {
					t.Errorf("%q: %q; want %q", args, out.String(), hint)
				}
			})
		}
		wg.Wait()
	}
}

// TestRefused: what can't be is refused before a device is opened, in one line that says what can.
func TestRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--device disk":                             "cuda:N",
		"--device cuda:":                            "cuda:N",
		"--device cuda:-1":                          "cuda:N",
		"--device cuda:+1":                          "cuda:N",
		"--device cuda:01":                          "cuda:N",
		"--device cuda:0,host":                      "cuda:N",
		"--device cuda:0,":                          "cuda:N",
		"--device cuda:0,cuda:0":                    "cuda:0 is named twice",
		"--placement x":                             "want spread or replicate",
		"--share x":                                 "want cuda-ipc or vmm-fd",
		"--device host --require-gpu":               "want one of the two",
		"--device host --placement replicate":       "host is one device",
		"--device cuda:3 --placement replicate":     "cuda:3 is one device",
		"--require-gpu=false --placement replicate": "auto is one device",
	} {
		_, err := choose(t, args)
		if cli.Code(err) != cli.CodeUsage || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v; want %q", args, err, want)
		}
	}
}
