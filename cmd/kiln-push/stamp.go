package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

func stampCommand() *cobra.Command {
	var flags cli.Flags
	var o artifact.StampOptions
	var base, registry string
	cmd := &cobra.Command{
		Use:   "stamp PATH --base DIR|REF|AGGREGATE",
		Short: "Write the base into the documents of an adapter, receipt or eval",
		Long: "Write the full manifest of the base into what was made from it. In the folder of an adapter, of any\n" +
			"trainer, that makes its adapter_manifest.json. In a train_receipt.json or an eval job or result it is put\n" +
			"in, and no other byte changes. What names another base or other files is left alone.",
		Example: "  kiln-push stamp out/sql --base models/base",
		Args:    cli.Args("PATH"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if base == "" {
				return cli.Usagef("stamp needs --base DIR|REF|AGGREGATE")
			}
			show := progress.New(flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
			s, err := stamp(cmd, &flags, args[0], base, registry, o, show)
			if err != nil {
				show.Abandon()
				return explainArtifact(err)
			}
			show.Close()
			warnAll(cmd.ErrOrStderr(), s.Warnings)
			return printStamped(cmd.OutOrStdout(), s, flags.JSON)
		},
	}
	flags.Bind(cmd)
	cmd.Flags().StringVar(&base, "base", "", "the base that it was made from: its folder, its REF or its aggregate")
	cmd.Flags().StringVar(&registry, "registry", cli.Registry(), "where the shards of an aggregate are asked for")
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the adapter (that of its folder)")
	cmd.Flags().BoolVar(&o.Force, "force", false, "write the manifest of an adapter anew, whatever it says")
	cmd.Flags().BoolVar(&o.FollowLinks, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	return cmd
}

// stamp writes the base that is named into what is at path.
func stamp(cmd *cobra.Command, flags *cli.Flags, path, base, registry string, o artifact.StampOptions,
	show *progress.Show,
) (s artifact.Stamped, err error) {
	ctx, dial := cmd.Context(), dialer(flags, show)
	b, err := artifact.FindModel(ctx, base, dial, folder.Options{FollowLinks: o.FollowLinks}, show.Watch)
	if err != nil {
		return s, err
	}
	if err := b.Learn(ctx, registry, dial); err != nil {
		return s, err
	}
	o.Watch = show.Watch
	return artifact.Stamp(ctx, path, *b.Manifest, o)
}

func printStamped(stdout io.Writer, s artifact.Stamped, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(stdout).Encode(struct {
			Event string `json:"event"`
			artifact.Stamped
		}{"stamped", s})
	}
	what := "stamped"
	if !s.Changed {
		what = "unchanged"
	}
	_, err := fmt.Fprintf(stdout, "%-9s %s\nbase      %s\n", what, client.Escape(s.Path), s.Aggregate)
	return err
}
