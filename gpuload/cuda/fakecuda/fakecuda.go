// Package fakecuda builds a stand-in for NVIDIA's driver library, so that tests go through the real binding on machines
// without a device. What it models and which faults it has is said in c/fakecuda.c and c/vmm.c. It is for tests only.
package fakecuda

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/ebitengine/purego"
)

//go:embed c
var source embed.FS

// WithoutVMM is an argument of Build: the library lacks the entry points of virtual memory management.
const WithoutVMM = "-DWITHOUT_VMM"

// Build compiles the library into dir and returns its path, for KILN_CUDA_LIB. It needs gcc.
func Build(dir string, with ...string) (string, error) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return "", errors.New("the stand-in for the CUDA driver is built by gcc, which is not on PATH: " +
			"apt-get install gcc libc6-dev")
	}
	code, lib := filepath.Join(dir, "c", "fakecuda.c"), filepath.Join(dir, "libfakecuda.so")
	if err := os.CopyFS(dir, source); err != nil {
		return "", err
	}
	args := append([]string{"-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o", lib, code}, with...)
	out, err := exec.Command(gcc, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the stand-in for the CUDA driver: %w\n%s", err, out)
	}
	return lib, nil
}

// Control sets the faults and reads the counters of a library that is loaded into this process. It is safe for
// concurrent use. Made by Load.
type Control struct {
	set   func(name string, value int64) int32
	get   func(name string) int64
	reset func()
}

// Load loads the library at path. Loading it again gives the same one.
func Load(path string) (*Control, error) {
	lib, err := purego.Dlopen(path, purego.RTLD_NOW)
	if err != nil {
		return nil, fmt.Errorf("load the stand-in for the CUDA driver: %w", err)
	}
	var c Control
	purego.RegisterLibFunc(&c.set, lib, "fakecuda_set")
	purego.RegisterLibFunc(&c.get, lib, "fakecuda_get")
	purego.RegisterLibFunc(&c.reset, lib, "fakecuda_reset")
	return &c, nil
}

// Set changes a setting or a counter, and panics if there is none of that name.
func (c *Control) Set(name string, value int64) {
	if c.set(name, value) == 0 {
		panic("fakecuda: no setting " + name)
	}
}

// Get returns a setting or a counter, -1 if there is none of that name.
func (c *Control) Get(name string) int64 { return c.get(name) }

// Reset gives all settings their first value and counts from 0 again. What is held stays held.
func (c *Control) Reset() { c.reset() }
