package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

func compareCommand() *cobra.Command {
	var flags cli.Flags
	var follow bool
	var registry string
	cmd := &cobra.Command{
		Use:   "compare A B",
		Short: "Say whether two models have the same bytes",
		Long: "Say whether two models have the same bytes, whatever their files are called. Each side is a directory, a\n" +
			"file with a shard manifest, a REF, an aggregate (sha256:…), or the http://…/health of a resident model.\n" +
			"Exit code 0: the same; 1: different; 2: could not tell. Different sides whose bytes can be had are compared tensor by tensor.",
		Args: cli.Args("A", "B"),
		RunE: func(cmd *cobra.Command, args []string) error {
			show := progress.New(cli.Flags{Quiet: flags.Quiet || flags.JSON}, io.Discard, cmd.ErrOrStderr())
			c, err := compare(cmd.Context(), args[0], args[1], registry, &flags, folder.Options{FollowLinks: follow}, show)
			if err != nil {
				show.Abandon()
				if cmd.Context().Err() != nil {
					return errInterrupted
				}
				return cli.Exit(cli.CodeUsage, explainCompare(err))
			}
			show.Close()
			return printComparison(cmd.OutOrStdout(), c, flags.JSON)
		},
	}
	flags.Bind(cmd)
	cmd.Flags().StringVar(&registry, "registry", cli.Registry(), "where the shards of an aggregate are asked for")
	cmd.Flags().BoolVar(&follow, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	return cmd
}

// explainCompare adds hints that name only what compare has.
func explainCompare(err error) error {
	var rule *safetensors.Error
	var odd *transfer.AggregateError
	var health *transfer.HealthError
	var manifest *identity.Error
	switch {
	case errors.As(err, &health) && cli.Code(err) == cli.CodeUnreachable:
		return cli.Hint(err, "check the address, and that the model is resident there (kiln-pull resident)")
	case errors.As(err, &odd):
		return cli.Hint(err, odd.Hint())
	case errors.Is(err, folder.ErrChanged):
		return cli.Hint(err, "let whatever writes there finish; kiln-push identify --snapshot works from a private copy")
	case errors.As(err, &rule) && rule.Code == safetensors.CodeSymlink:
		return cli.Hint(err, followLinks)
	case errors.As(err, &rule) && rule.Code == safetensors.CodeNoShards:
		return cli.Hint(err, noShards)
	case errors.As(err, &manifest):
		return cli.Hint(err, manifestFile)
	}
	return explainPath(err)
}

func compare(ctx context.Context, a, b, registry string, flags *cli.Flags, o folder.Options, show *progress.Show) (
	c transfer.Comparison, err error,
) {
	dial := func(host string, named bool) (*client.Client, error) {
		if named || host == registry {
			return flags.Client(host, show.Note)
		}
		return flags.Stranger(host, show.Note)
	}
	var sides [2]transfer.Side
	for i, name := range []string{a, b} {
		if sides[i], err = transfer.OpenSide(ctx, name, dial, o, show.Watch); err != nil {
			return c, err
		}
		defer sides[i].Close()
	}
	if sides[0].Summary.Aggregate != sides[1].Summary.Aggregate {
		for i := range sides { // the shards are for the explanation: that they can't be had is no error
			if sides[i].Manifest == nil {
				sides[i].Learn(ctx, registry, dial)
			}
		}
	}
	if c, err = transfer.Compare(ctx, sides[0], sides[1]); err == nil && !c.Same {
		hosts := []string{sides[0].Registry, sides[1].Registry, registry}
		c.Derived = transfer.DerivedFrom(ctx, hosts, dial, c.A.Aggregate, c.B.Aggregate)
	}
	return c, err
}

// comparison is the JSON form of a comparison.
type comparison struct {
	transfer.Comparison
	OnlyA []api.Shard `json:"only_a,omitempty"`
	OnlyB []api.Shard `json:"only_b,omitempty"`
}

func printComparison(stdout io.Writer, c transfer.Comparison, asJSON bool) (err error) {
	if asJSON {
		err = json.NewEncoder(stdout).Encode(comparison{c, wire(c.OnlyA), wire(c.OnlyB)})
	} else {
		err = writeComparison(stdout, c)
	}
	if err == nil && !c.Same {
		return cli.Silent(cli.CodeNo)
	}
	return err
}

func wire(shards []identity.Shard) (out []api.Shard) {
	for _, s := range shards {
		out = append(out, api.Shard{Filename: s.Filename, Size: s.Size, Digest: s.Digest})
	}
	return out
}

func writeComparison(stdout io.Writer, c transfer.Comparison) error {
	if c.Same {
		_, err := fmt.Fprintf(stdout, "same: %s\n", c.A.Aggregate)
		return err
	}
	_, err := fmt.Fprintf(stdout, "different\nA: %s\nB: %s\n", side(c.A), side(c.B))
	for _, line := range c.Lines() {
		_, e := fmt.Fprintf(stdout, "differs; %s\n", client.Escape(line))
		err = errors.Join(err, e)
	}
	for _, list := range []struct {
		name   string
		shards []identity.Shard
	}{{"A", c.OnlyA}, {"B", c.OnlyB}} {
		for _, s := range list.shards {
			_, e := fmt.Fprintf(stdout, "only %s: %s %d bytes %s\n", list.name, s.Digest, s.Size, s.Filename)
			err = errors.Join(err, e)
		}
	}
	switch {
	case c.SameTensors != nil && *c.SameTensors:
		_, e := fmt.Fprintln(stdout, "every tensor is equal by content; only the packaging differs (files or headers)")
		err = errors.Join(err, e)
	case c.TensorReason != "":
		_, e := fmt.Fprintf(stdout, "tensors: %s\n", c.TensorReason)
		err = errors.Join(err, e)
	}
	return err
}

func side(s identity.Summary) string {
	if s.ShardCount == 0 {
		return s.Aggregate.String()
	}
	return s.Aggregate.String() + " " + countOf(s)
}
