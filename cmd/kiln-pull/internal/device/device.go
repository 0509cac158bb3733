// Package device is where kiln-pull holds weights: --device and --share on the command line.
package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// Choice is what --device and --share ask for, as Parse reads them.
type Choice struct {
	text  string
	kind  string // host, auto or cuda
	index int    // of the device
	share string // kind of the handles of a GPU's memory
}

const auto = "auto"

// Parse reads a device, which is host, auto, or cuda with an index, and the way by which others get at the memory of a
// GPU: cuda.KindIPC, cuda.KindVMM, or empty for the first. That of the host is always shared as a descriptor.
func Parse(text, share string) (Choice, error) {
	c := Choice{text: text, share: cmp.Or(share, cuda.KindIPC)}
	if c.share != cuda.KindIPC && c.share != cuda.KindVMM {
		return Choice{}, cli.Usagef("--share %q: want %s or %s", share, cuda.KindIPC, cuda.KindVMM)
	}
	var number string
	var numbered bool
	switch c.kind, number, numbered = strings.Cut(text, ":"); {
	case !numbered && (c.kind == hostmem.Backend || c.kind == auto || c.kind == cuda.Backend):
		return c, nil
	case numbered && c.kind == cuda.Backend:
		var err error
		if c.index, err = strconv.Atoi(number); err == nil && c.index >= 0 {
			return c, nil
		}
	}
	return Choice{}, cli.Usagef("--device %q: want host, cuda:N, or auto", text)
}

// Host says whether no GPU is asked for.
func (c Choice) Host() bool { return c.kind == hostmem.Backend }

// Same returns what gives fresh memory where Open gave some: backend is what it said.
func (c Choice) Same(backend string) func() (gpuload.Target, error) {
	return func() (gpuload.Target, error) {
		if backend == hostmem.Backend {
			return new(hostmem.Target), nil
		}
		return cuda.Open(c.index)
	}
}

// Open opens the device and says which it is. need makes it an error that auto finds no GPU. warn is told when auto takes
// the host although there is a driver: it does not work.
func (c Choice) Open(ctx context.Context, need bool, warn func(string)) (
	t gpuload.Target, backend, name string, err error,
) {
	if c.Host() {
		return new(hostmem.Target), hostmem.Backend, "host memory", nil
	}
	gpu, err := cuda.OpenShared(c.share, c.index)
	switch {
	case err == nil:
		devices, err := gpu.Devices(ctx)
		if err != nil {
			return nil, "", "", cli.Exit(cli.CodeDevice, errors.Join(err, gpu.Free()))
		}
		name = devices[0].Name
		if c.kind == auto {
			name += " (auto: the first GPU)"
		}
		return gpu, cuda.Backend, name, nil
	case c.kind == auto && !need && !errors.Is(err, errors.ErrUnsupported):
		if !errors.Is(err, cuda.ErrNone) {
			warn(fmt.Sprintf("the GPU can't be used, the weights go to host memory: %v", err))
		}
		return new(hostmem.Target), hostmem.Backend, fmt.Sprintf("host memory (auto: %v)", err), nil
	}
	err = cli.Exit(cli.CodeDevice, fmt.Errorf("--device %s: %w", c.text, err))
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, "", "", cli.Hint(err, "--share "+cuda.KindIPC+" works where processes share the PID namespace")
	}
	return nil, "", "", cli.Hint(err, "--device host holds the weights in the memory of the host")
}
