package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

func identifyCommand() *cobra.Command {
	var r reading
	var manifest, asJSON, quiet, anyDType bool
	cmd := &cobra.Command{
		Use:   "identify DIR",
		Short: "Say what the bytes of a model are called",
		Long: "Say what the bytes of a model are called: the aggregate of its shards, chosen as Kiln's loader does.\n" +
			"Every header is checked. Nothing is written into DIR.",
		Args: cli.Args("DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			show := progress.New(cli.Flags{Quiet: quiet}, io.Discard, cmd.ErrOrStderr())
			o := folder.Options{FollowLinks: r.follow, AnyDType: anyDType}
			sum, err := identify(cmd.Context(), args[0], o, r.snapshot, show.Watch)
			if err != nil {
				show.Abandon()
				if cmd.Context().Err() != nil {
					return errInterrupted
				}
				return explain(err)
			}
			show.Close()
			warn(cmd.ErrOrStderr(), sum.Warnings)
			if manifest || asJSON {
				return printManifest(cmd.OutOrStdout(), sum.Manifest)
			}
			return printSummary(cmd.OutOrStdout(), sum.Manifest.Summary())
		},
	}
	r.bind(cmd)
	cmd.Flags().BoolVar(&manifest, "manifest", false, "print the full shard manifest, on one line")
	cmd.Flags().BoolVar(&asJSON, "json", false, "the same as --manifest")
	cmd.Flags().BoolVar(&anyDType, "any-dtype", false, "take tensors of an unknown dtype; the model can't be pushed")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "no progress on stderr")
	return cmd
}

func identify(ctx context.Context, dir string, o folder.Options, snapshot bool, w transfer.Watch) (
	sum folder.Sum, err error,
) {
	f, err := folder.Open(dir, o)
	if err != nil {
		return sum, err
	}
	if snapshot {
		copied, remove, err := f.Snapshot(ctx)
		if err != nil {
			return sum, err
		}
		sum, err = transfer.HashFolder(ctx, copied, w)
		return sum, errors.Join(err, remove())
	}
	return transfer.HashFolder(ctx, f, w)
}

func printManifest(stdout io.Writer, m identity.Manifest) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s\n", b)
	return err
}

func printSummary(stdout io.Writer, s identity.Summary) error {
	_, err := fmt.Fprintf(stdout, "%s\n%s\n", s.Aggregate, countOf(s))
	return err
}

// countOf says how much a base is.
func countOf(s identity.Summary) string {
	shards := "shards"
	if s.ShardCount == 1 {
		shards = "shard"
	}
	return fmt.Sprintf("%d %s, %d bytes, %s", s.ShardCount, shards, s.TotalSize, s.AggregateAlgorithm)
}
