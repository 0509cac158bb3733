// Package device is where kiln-pull holds weights: --device on the command line.
package device

import (
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

// Choice is what --device asks for, as Parse reads it.
type Choice struct {
	text  string
	kind  string // host, auto or cuda
	index int    // of the device
}

const auto = "auto"

// Parse reads host, auto, or cuda with the index of the device.
func Parse(text string) (Choice, error) {
	kind, number, numbered := strings.Cut(text, ":")
	switch {
	case !numbered && (kind == hostmem.Backend || kind == auto || kind == cuda.Backend):
		return Choice{text, kind, 0}, nil
	case kind == cuda.Backend:
		if index, err := strconv.Atoi(number); err == nil && index >= 0 {
			return Choice{text, kind, index}, nil
		}
	}
	return Choice{}, cli.Usagef("--device %q: want host, cuda:N, or auto", text)
}

// Host says whether no GPU is asked for.
func (c Choice) Host() bool { return c.kind == hostmem.Backend }

// Open opens the device and says which it is. need makes it an error that auto finds no GPU.
func (c Choice) Open(ctx context.Context, need bool) (t gpuload.Target, backend, name string, err error) {
	if c.Host() {
		return new(hostmem.Target), hostmem.Backend, "host memory", nil
	}
	gpu, err := cuda.Open(c.index)
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
	case c.kind == auto && !need:
		return new(hostmem.Target), hostmem.Backend, fmt.Sprintf("host memory (auto: %v)", err), nil
	}
	err = cli.Exit(cli.CodeDevice, fmt.Errorf("--device %s: %w", c.text, err))
	return nil, "", "", cli.Hint(err, "--device host holds the weights in the memory of the host")
}
