// Package adapting loads adapters onto the model that kiln-pull resident holds.
package adapting

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/holding"
	"github.com/kiln-registry/kiln-registry/gpuload/adapters"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// Flags are those of a holder for adapters. The zero value loads none at the start.
type Flags struct {
	names []string
	limit cli.Size
}

// Bind adds the flags to a command.
func (f *Flags) Bind(cmd *cobra.Command) {
	f.limit = adapters.DefaultLimit
	p := cmd.Flags()
	p.StringArrayVar(&f.names, "adapter", nil,
		"adapter to load onto the base before it is ready: digest, REF, DIR or name; may be repeated")
	p.Var(&f.limit, "max-adapters", "memory for adapters; those that nobody uses make room")
}

// Any says whether adapters are to be loaded at the start.
func (f *Flags) Any() bool { return len(f.names) > 0 }

// Onto has load, which brings a base, bring the adapters too, and whatever is asked for later. The base and the limit of
// o are filled in. After an error what it returns is still to be freed.
func (f *Flags) Onto(load func(context.Context) (resident.Held, error), o adapters.Options, note func(string),
) func(context.Context) (resident.Held, error) {
	return func(ctx context.Context) (resident.Held, error) {
		held, err := load(ctx)
		if err != nil {
			return held, err
		}
		o.Base, o.Limit = held.Weights.Manifest().Aggregate, int64(f.limit)
		held.Adapters = adapters.New(o)
		for _, name := range f.names {
			if name, err = Name(name); err != nil {
				return held, err
			}
			a, _, err := held.Adapters.Load(ctx, name)
			if err != nil {
				return held, Explain(err)
			}
			note(Line(a.Name, a.Digest.String(), a.Bytes, string(a.Evidence)))
		}
		return held, nil
	}
}

// Line says what was loaded, for people.
func Line(name, digest string, size int64, evidence string) string {
	if name == "" {
		name = "(no name)"
	}
	return "adapter " + name + " " + digest + ", " + cli.Bytes(size) + ", base stated by " + evidence
}

// Name is how a holder, which may run elsewhere, is told of an adapter: a folder by its absolute path.
func Name(text string) (string, error) {
	if holding.IsDir(text) {
		return filepath.Abs(text)
	}
	return text, nil
}

// codes are the exit codes of what a set of adapters refuses, and what to do.
var codes = []struct {
	err  error
	code int
	hint string
}{
	{adapters.ErrClosed, cli.CodeTryAgain, ""},
	{adapters.ErrName, cli.CodeUsage, "an adapter is named by sha256:… of its manifest, a REF, a DIR, or the name it has"},
	{adapters.ErrUnknown, cli.CodeNotFound, "kiln-pull find AGGREGATE --kind adapter lists those of a base"},
	{adapters.ErrSeveral, cli.CodeUsage, "kiln-pull find AGGREGATE --kind adapter lists them"},
	{adapters.ErrOtherBase, cli.CodeNo, "kiln-pull find REF --tree shows what is said of its base"},
	{adapters.ErrNoRoom, cli.CodeDevice, "--max-adapters bounds them all; adapters in use stay"},
	{adapters.ErrRefused, cli.CodeBadInput, ""},
	{adapters.ErrRegistry, cli.CodeUnreachable, ""},
}

// Explain gives an error of a set of adapters its exit code and hint. Any other error is returned as it is.
func Explain(err error) error {
	for _, x := range codes {
		if !errors.Is(err, x.err) {
			continue
		}
		if err = cli.Exit(x.code, err); x.hint != "" {
			err = cli.Hint(err, x.hint)
		}
		return err
	}
	return err
}
