package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

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
	var base, registry, repo string
	cmd := &cobra.Command{
		Use:   "stamp PATH --base DIR|REF|AGGREGATE",
		Short: "Write the base into the documents of an adapter, receipt or eval",
		Long: "Write the full manifest of the base into what was made from it. In the folder of an adapter, of any\n" +
			"trainer, that makes its adapter_manifest.json. In a train_receipt.json or an eval job or result it is put\n" +
			"in, and no other byte changes. What names another base or other files is left alone.\n\n" +
			"The manifest has the names of the base's files, which an exact resume compares: those of the DIR or of the REF;\n" +
			"of an AGGREGATE those that it has in --repo or, without that, in whatever repository got it last.",
		Example: "  kiln-push stamp out/sql --base models/base",
		Args:    cli.Args("PATH"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if base == "" {
				return cli.Usagef("stamp needs --base DIR|REF|AGGREGATE")
			}
			show := progress.New(flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
			s, err := stamp(cmd, &flags, args[0], base, place{registry, repo}, o, show)
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
	cmd.Flags().StringVar(&repo, "repo", "", "the repository, or REPOSITORY:TAG or REPOSITORY@DIGEST, whose file names of an\n"+
		"aggregate are meant")
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the adapter (that of its folder)")
	cmd.Flags().BoolVar(&o.Force, "force", false, "write the manifest of an adapter anew, whatever it says")
	cmd.Flags().BoolVar(&o.FollowLinks, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	return cmd
}

// place is where the shards of an aggregate are asked for.
type place struct{ registry, repo string }

// stamp writes the base that is named into what is at path.
func stamp(cmd *cobra.Command, flags *cli.Flags, path, base string, at place, o artifact.StampOptions,
	show *progress.Show,
) (s artifact.Stamped, err error) {
	ctx, dial := cmd.Context(), dialer(flags, show)
	b, err := artifact.FindModel(ctx, base, dial, folder.Options{FollowLinks: o.FollowLinks}, show.Watch)
	if err != nil {
		return s, err
	}
	named := b.Manifest != nil // the base was given with its file names
	if named && at.repo != "" {
		return s, cli.Usagef("--repo goes with a --base that is an AGGREGATE; %.200q says itself what is meant", base)
	}
	several, err := b.Learn(ctx, at.registry, at.repo, dial)
	if err != nil {
		return s, err
	}
	o.Watch = show.Watch
	s, err = artifact.Stamp(ctx, path, *b.Manifest, o)
	if err == nil && several {
		s.Warnings = append(s.Warnings, artifact.Warning{Code: artifact.WarnNames, Message: "the names of the base's files are " +
			"those of the newest that " + strings.TrimSuffix(at.registry+" holds in "+at.repo, " in ") +
			": a REF, or --repo, as REPOSITORY:TAG too, says which are meant"})
	}
	return s, err
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
