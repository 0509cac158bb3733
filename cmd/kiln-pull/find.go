package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
)

const findPage = 100 // artifacts asked for at a time

type findFlags struct {
	cli.Flags
	registry, repo, kind string
}

func findCommand() *cobra.Command {
	var f findFlags
	cmd := &cobra.Command{
		Use:   "find AGGREGATE",
		Short: "List where a base is held, and what was made from it",
		Args:  cli.Args("AGGREGATE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, is, err := transfer.ParseAggregate(args[0])
			if !is {
				err = cli.Hint(cli.Usagef("%.200q is no aggregate", args[0]), "kiln-push identify DIR prints the aggregate of a folder")
			}
			if err != nil {
				return err
			}
			return f.find(cmd.Context(), a, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Bind(cmd)
	cmd.Flags().StringVar(&f.registry, "registry", cli.Registry(), "the registry to ask")
	cmd.Flags().StringVar(&f.repo, "repo", "", "only this repository")
	cmd.Flags().StringVar(&f.kind, "kind", "", "only this kind: base, adapter, checkpoint, eval, receipt or statement")
	return cmd
}

func (f *findFlags) find(ctx context.Context, a identity.Aggregate, stdout, stderr io.Writer) error {
	if f.kind != "" && !api.Kind(f.kind).Known() {
		return cli.Usagef("--kind %q: no such kind", f.kind)
	}
	c, err := f.Client(f.registry, func(s string) {
		if !f.Quiet {
			fmt.Fprintln(stderr, client.Line(s))
		}
	})
	if err != nil {
		return err
	}
	defer c.Close()
	out := newFindings(stdout, f.JSON)
	if f.kind == "" || f.kind == string(api.KindBase) {
		if err := f.packagings(ctx, c, a, out); err != nil && !errors.Is(err, api.ErrAggregateUnknown) {
			return err
		}
	}
	if f.kind != string(api.KindBase) {
		if err := f.artifacts(ctx, c, a, out); err != nil && !errors.Is(err, api.ErrAggregateUnknown) {
			return err
		}
	}
	if out.rows == 0 && len(out.elsewhere) > 0 {
		return &transfer.ElsewhereError{Aggregate: a, Repo: f.repo, Repositories: out.elsewhere}
	}
	if out.rows == 0 {
		err := fmt.Errorf("%s: nothing of %s that may be pulled", f.registry, a)
		return cli.Hint(cli.Exit(cli.CodeNotFound, err), unknownBase)
	}
	return out.flush()
}

func (f *findFlags) packagings(ctx context.Context, c *client.Client, a identity.Aggregate, out *findings) error {
	for page, err := range transfer.Pages(ctx, c, a) {
		if err != nil {
			return err
		}
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				if f.repo == "" || f.repo == h.Repository {
					out.base(page.Identity, p.ID, h)
				} else if !slices.Contains(out.elsewhere, h.Repository) && len(out.elsewhere) <= transfer.MaxElsewhere {
					out.elsewhere = append(out.elsewhere, h.Repository)
				}
			}
		}
		if err := out.flush(); err != nil {
			return err
		}
	}
	return nil
}

func (f *findFlags) artifacts(ctx context.Context, c *client.Client, a identity.Aggregate, out *findings) error {
	for page, err := range transfer.ArtifactPages(ctx, c, a, api.Kind(f.kind), f.repo, findPage) {
		if err != nil {
			return err
		}
		for _, x := range page.Artifacts {
			if x.Kind != api.KindBase {
				out.artifact(x)
			}
		}
		if err := out.flush(); err != nil {
			return err
		}
	}
	return nil
}

// findings writes a row as soon as its page is there: a listing has no bound.
type findings struct {
	rows  int
	json  *json.Encoder
	table *tabwriter.Writer
	err   error

	elsewhere []string // repositories that were not asked for and hold the base; a few of them
}

func newFindings(w io.Writer, asJSON bool) *findings {
	if asJSON {
		return &findings{json: json.NewEncoder(w)}
	}
	return &findings{table: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
}

// baseJSON is a line of find --json that names a base.
type baseJSON struct {
	Kind      api.Kind         `json:"kind"` // base
	Packaging identity.Digest  `json:"packaging"`
	Identity  identity.Summary `json:"base_weight_identity"`
	api.Held
}

func (o *findings) base(s identity.Summary, packaging identity.Digest, h api.Held) {
	o.head(func() string {
		return fmt.Sprintf("base %s: %s, %s", s.Aggregate, shards(s.ShardCount), cli.Bytes(int64(s.TotalSize)))
	})
	if o.json != nil {
		o.encode(baseJSON{api.KindBase, packaging, s, h})
		return
	}
	o.row(api.KindBase, h, "packaging "+packaging.Hex()[:12])
}

func shards(n int) string { return plural(n, "shard", "shards") }

func files(n int) string { return plural(n, "file", "files") }

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func (o *findings) artifact(x api.Artifact) {
	o.head(func() string { return "base " + x.Binding.Aggregate.String() + ": not held" })
	if o.json != nil {
		o.encode(x)
		return
	}
	o.row(x.Kind, x.Held, "evidence "+string(x.Binding.Evidence))
}

func (o *findings) head(title func() string) {
	if o.rows++; o.rows == 1 && o.table != nil {
		fmt.Fprintln(o.table, title())
		fmt.Fprintln(o.table, "KIND\tREPOSITORY\tTAGS\tDIGEST\tCREATED\tNOTE")
	}
}

func (o *findings) row(kind api.Kind, h api.Held, note string) {
	tags := strings.Join(h.Tags, ",")
	if tags == "" {
		tags = "-"
	}
	fmt.Fprintf(o.table, "%s\t%s\t%s\t%s\t%s\t%s\n", client.Escape(string(kind)), client.Escape(h.Repository),
		client.Escape(tags), h.Digest, h.Created.UTC().Format(time.RFC3339), client.Escape(note))
}

func (o *findings) encode(v any) {
	if o.err == nil {
		o.err = o.json.Encode(v)
	}
}

func (o *findings) flush() error {
	if o.table != nil {
		return o.table.Flush()
	}
	return o.err
}
