// Package device is where kiln-pull holds weights: --device, --placement and --share on the command line.
package device

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// Flags are those that say where weights go. The zero value is not ready: Bind has the defaults.
type Flags struct {
	device, placement, share string
	require                  bool
}

const (
	auto      = "auto"
	spread    = "spread"
	replicate = "replicate"
)

// Bind adds the flags to a command.
func (f *Flags) Bind(cmd *cobra.Command) {
	p := cmd.Flags()
	p.StringVar(&f.device, "device", auto,
		"where the weights go: host, cuda:N, a list cuda:0,cuda:1, cuda for all, or auto for the first GPU, else host")
	p.StringVar(&f.placement, "placement", spread,
		"what goes on which of several devices: "+spread+", each shard on one, or "+replicate+", all on each")
	p.StringVar(&f.share, "share", cuda.KindIPC, "how others get at the memory of a GPU: "+cuda.KindIPC+
		", or "+cuda.KindVMM+" where they don't share the PID namespace")
	p.BoolVar(&f.require, "require-gpu", false, "fail where --device auto finds no GPU")
}

// Choice is what the flags ask for.
type Choice struct {
	text      string
	kind      string // host, auto or cuda
	indices   []int  // of the devices; empty: all
	placement string
	share     string // kind of the handles of a GPU's memory
	require   bool
}

// Choice reads the flags. An error says which one can't be, and what it can be.
func (f *Flags) Choice() (Choice, error) {
	c := Choice{text: f.device, placement: f.placement, share: f.share, require: f.require}
	if c.share != cuda.KindIPC && c.share != cuda.KindVMM {
		return c, cli.Usagef("--share %q: want %s or %s", c.share, cuda.KindIPC, cuda.KindVMM)
	}
	if c.placement != spread && c.placement != replicate {
		return c, cli.Usagef("--placement %q: want %s or %s", c.placement, spread, replicate)
	}
	var err error
	switch c.text {
	case auto:
		c.kind, c.indices = auto, []int{0}
	case hostmem.Backend, cuda.Backend:
		c.kind = c.text
	default:
		c.kind = cuda.Backend
		c.indices, err = list(c.text)
	}
	switch one := c.kind == hostmem.Backend || len(c.indices) == 1; {
	case err != nil:
		return c, err
	case c.kind == hostmem.Backend && c.require:
		return c, cli.Usagef("--require-gpu asks for a GPU, --device host for none: want one of the two")
	case c.placement == replicate && one:
		return c, cli.Usagef("--placement replicate: --device %s is one device; want a list, or cuda for all", c.text)
	}
	return c, nil
}

// list reads devices cuda:N, each of them named once.
func list(text string) (indices []int, err error) {
	for name := range strings.SplitSeq(text, ",") {
		number, ok := strings.CutPrefix(name, cuda.Backend+":")
		i, err := strconv.Atoi(number)
		switch {
		case !ok || err != nil || i < 0 || number != strconv.Itoa(i):
			return nil, cli.Usagef("--device %q: want host, auto, cuda, cuda:N or a list cuda:0,cuda:1", text)
		case slices.Contains(indices, i):
			return nil, cli.Usagef("--device %q: cuda:%d is named twice", text, i)
		}
		indices = append(indices, i)
	}
	return indices, nil
}

// Placement is how shards go to several devices.
func (c Choice) Placement() gpuload.Placement {
	if c.placement == replicate {
		return gpuload.Replicate
	}
	return gpuload.Spread
}

// Same returns what gives fresh memory where Open gave some: backend is what it said.
func (c Choice) Same(backend string) func() (gpuload.Target, error) {
	return func() (gpuload.Target, error) {
		if backend == hostmem.Backend {
			return new(hostmem.Target), nil
		}
		return cuda.OpenShared(c.share, c.indices...)
	}
}

// Open opens the devices and says which they are. warn is told when auto takes the host although there is a driver: it
// does not work.
func (c Choice) Open(ctx context.Context, warn func(string)) (t gpuload.Target, backend, name string, err error) {
	if c.kind == hostmem.Backend {
		return new(hostmem.Target), hostmem.Backend, "host memory", nil
	}
	gpu, err := cuda.OpenShared(c.share, c.indices...)
	switch {
	case err == nil:
		devices, err := gpu.Devices(ctx)
		if err != nil {
			return nil, "", "", cli.Exit(cli.CodeDevice, errors.Join(err, gpu.Free()))
		}
		return gpu, cuda.Backend, c.name(devices), nil
	case c.kind == auto && !c.require && !errors.Is(err, errors.ErrUnsupported):
		if !errors.Is(err, cuda.ErrNone) {
			warn(fmt.Sprintf("the GPU can't be used, the weights go to host memory: %v", err))
		}
		return new(hostmem.Target), hostmem.Backend, fmt.Sprintf("host memory (auto: %v)", err), nil
	}
	err = cli.Exit(cli.CodeDevice, fmt.Errorf("--device %s: %w", c.text, err))
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, "", "", cli.Hint(err, "--share "+cuda.KindIPC+" works where processes share the PID namespace")
	}
	return nil, "", "", cli.Hint(err, hostHint(c.require))
}

// hostHint says how to hold the weights without a GPU.
func hostHint(require bool) string {
	if require {
		return "--device host without --require-gpu holds the weights in the memory of the host"
	}
	return "--device host holds the weights in the memory of the host"
}

// name says which devices were opened, and what goes where if there are several.
func (c Choice) name(devices []gpuload.Device) string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.Name
	}
	name := strings.Join(names, ", ")
	switch {
	case c.kind == auto:
		name += " (auto: the first GPU)"
	case len(devices) > 1:
		name += " (" + c.placement + ")"
	}
	return name
}
