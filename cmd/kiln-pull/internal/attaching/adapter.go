package attaching

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/adapting"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

func adapterCommands() *cobra.Command {
	cmd := &cobra.Command{
		Use: "adapter COMMAND", Short: "Load and unload adapters on a model that kiln-pull resident holds",
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			const want = "load, unload or list"
			if len(args) == 0 {
				return fmt.Errorf("%s: want a command: %s", cmd.CommandPath(), want)
			}
			return fmt.Errorf("unknown command %q for %q: want %s", args[0], cmd.CommandPath(), want)
		},
		// Cobra answers a command without RunE with its help and success, whatever it was asked.
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(loadCommand(), unloadCommand(), listCommand())
	return cmd
}

// adapterCommand makes a command that takes an AGGREGATE and an ADAPTER.
func adapterCommand(short, long string,
	run func(ctx context.Context, f *flags, a identity.Aggregate, adapter string, stdout io.Writer) error,
) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Short: short, Long: short + ".\n\n" + long, Args: cli.Args("AGGREGATE", "ADAPTER"),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := aggregate(args[0])
			if err != nil {
				return err
			}
			ctx, cancel := f.bounded(cmd.Context())
			defer cancel()
			return explain(run(ctx, &f, a, args[1], cmd.OutOrStdout()))
		},
	}
	f.bind(cmd)
	return cmd
}

func loadCommand() *cobra.Command {
	cmd := adapterCommand("Load an adapter onto a base that is held",
		"The ADAPTER is named by the digest of its manifest, by a REF, by a DIR that holds it, or by the name that it\n"+
			"gives itself, if the holder's registry has one of that name for the base. It has to state the base that is\n"+
			"held, and every byte of it is checked before anybody can attach to it. Where there is no room, adapters that\n"+
			"nobody uses are unloaded. The base is not touched.\n\n"+
			"Exit codes besides: 1 it is of another base, states none, or what is said of its base disagrees; 2 several are\n"+
			"called so; 4 none is; 5 its files are not what they should be; 6 the registry failed; 8 no room.", load)
	cmd.Use = "load AGGREGATE ADAPTER"
	return cmd
}

func load(ctx context.Context, f *flags, a identity.Aggregate, adapter string, stdout io.Writer) error {
	name, err := adapting.Name(adapter)
	if err != nil {
		return err
	}
	l, err := f.client().Load(ctx, a, name)
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(stdout).Encode(l)
	}
	verb := "loaded"
	if l.Before {
		verb = "loaded before"
	}
	_, err = fmt.Fprintf(stdout, "%s: %s; generation %d\n", verb,
		client.Line(adapting.Line(l.Name, l.Digest.String(), l.Bytes, l.Evidence)), l.Generation)
	return err
}

func unloadCommand() *cobra.Command {
	cmd := adapterCommand("Unload an adapter from a base that is held",
		"The ADAPTER is named by the digest of its manifest, or by its name if one adapter that is loaded has it. While\n"+
			"somebody has it attached it stays: exit code 75. The base is not touched.", unload)
	cmd.Use = "unload AGGREGATE ADAPTER"
	return cmd
}

func unload(ctx context.Context, f *flags, a identity.Aggregate, adapter string, stdout io.Writer) error {
	d, err := f.loaded(ctx, a, adapter)
	if err == nil {
		err = f.client().Unload(ctx, a, d)
	}
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(stdout).Encode(struct {
			Unloaded identity.Digest `json:"unloaded"`
		}{d})
	}
	_, err = fmt.Fprintf(stdout, "unloaded: %s\n", d)
	return err
}

// loaded finds the adapter that a text names among those that are loaded.
func (f *flags) loaded(ctx context.Context, a identity.Aggregate, adapter string) (identity.Digest, error) {
	if d, err := identity.ParseDigest(adapter); err == nil {
		return d, nil
	}
	list, err := f.client().Adapters(ctx, a)
	if err != nil {
		return identity.Digest{}, err
	}
	var found []identity.Digest
	for _, x := range list {
		if x.Name == adapter && adapter != "" {
			found = append(found, x.Digest)
		}
	}
	switch len(found) {
	case 0:
		return identity.Digest{}, attach.Refuse(attach.CodeAdapterUnknown, "no adapter that is loaded is called %.200q",
			adapter)
	case 1:
		return found[0], nil
	}
	return identity.Digest{}, attach.Refuse(attach.CodeAdapterAmbiguous, "%d adapters are called %.200q: %v", len(found),
		adapter, found)
}

func listCommand() *cobra.Command {
	var f flags
	cmd := f.command("list", "List the adapters that are loaded on a base",
		"EVIDENCE says what states that an adapter is of the base: document, a full manifest of it among the adapter's\n"+
			"documents; asserted, somebody's statement.",
		func(ctx context.Context, a identity.Aggregate, stdout, _ io.Writer) error {
			ctx, cancel := f.bounded(ctx)
			defer cancel()
			list, err := f.client().Adapters(ctx, a)
			if err != nil {
				return err
			}
			if f.json {
				return json.NewEncoder(stdout).Encode(list)
			}
			return table(stdout, list)
		})
	return cmd
}

func table(stdout io.Writer, list []attach.LoadedAdapter) error {
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tDIGEST\tSIZE\tLEASES\tEVIDENCE\tFROM")
	for _, x := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\n", client.Line(x.Name), x.Digest, cli.Bytes(x.Bytes), x.Leases, x.Evidence,
			client.Line(x.From))
	}
	return w.Flush()
}
