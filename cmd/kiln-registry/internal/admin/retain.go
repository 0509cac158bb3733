package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/prune"
)

// retaining is what retain was asked for.
type retaining struct {
	home.Flags
	prune.Retention
	kind string
	yes  bool
	json bool
}

const kinds = "base, adapter, checkpoint, eval, receipt, statement"

func retainCommand(stderr io.Writer) *cobra.Command {
	var r retaining
	cmd := &cobra.Command{
		Use: "retain --keep N --repo PATTERN", Short: "Delete old checkpoints, all but the newest", Args: cobra.NoArgs,
		Long: `Delete old checkpoints: in each repository all but the --keep newest of each name. What a tag names stays, what
an index lists, and what another manifest refers to: an adapter, an eval, a statement. A base stays as long as anything
is known to be made from it. The name is the one that the artifact gives itself; those without one count together.

Without --yes it only says what would go, and why the others stay. The bytes are given back by the next collection:
kiln-registry gc.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.check(); err != nil {
				return err
			}
			return r.run(cmd.Context(), cmd.OutOrStdout(), stderr)
		},
	}
	r.Flags.Bind(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&r.Repos, "repo", nil, "repository or glob, as team/**; may be repeated (needed)")
	f.IntVar(&r.Keep, "keep", 0, "how many of the newest of a name stay in any case (needed)")
	f.StringVar(&r.kind, "kind", string(api.KindCheckpoint), "which manifests: "+kinds)
	f.BoolVar(&r.DryRun, "dry-run", false, "only say what would go, which is what it does without --yes")
	f.BoolVar(&r.yes, "yes", false, "delete")
	f.BoolVar(&r.json, "json", false, "print JSON, one object a line")
	for _, name := range []string{"repo", "keep"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // no such flag: a mistake in this function
		}
	}
	return cmd
}

func (r *retaining) check() error {
	r.Kind = api.Kind(r.kind)
	_, err := access.ParseRepositories(r.Repos)
	switch {
	case err != nil:
		return cli.Usagef("--repo: %w", err)
	case len(r.Repos) == 0:
		return cli.Usagef("--repo is empty")
	case r.Keep < 1:
		return cli.Usagef("--keep %d: want 1 or more", r.Keep)
	case !r.Kind.Known():
		return cli.Usagef("--kind %s: want one of %s", r.kind, kinds)
	case r.yes && r.DryRun:
		return cli.Usagef("--dry-run and --yes don't go together")
	}
	r.DryRun = !r.yes
	return r.Flags.Check()
}

// run has the server do it, or does it where none runs.
func (r *retaining) run(ctx context.Context, stdout, stderr io.Writer) error {
	show := retainShow{json: r.json, kind: r.kind, out: stdout, notes: stderr}
	o := pruneOrder("/retain?"+r.Query().Encode(), show.event)
	return pruneError(o.give(ctx, r.Home, stderr, func(p *home.Parts) error {
		return p.Registry.Pruner().TellRetain(ctx, r.Retention, show.event)
	}))
}

// retainShow writes what a retention tells.
type retainShow struct {
	json       bool
	kind       string
	out, notes io.Writer
}

func (s retainShow) event(e prune.Event) (err error) {
	switch {
	case s.json:
		return json.NewEncoder(s.out).Encode(e)
	case e.Manifest != nil:
		m := e.Manifest
		fate := "kept: " + m.Kept
		if m.Kept == "" {
			fate = "goes, " + cli.Bytes(m.Bytes)
		}
		_, err = fmt.Fprintf(s.out, "%s@%s\t%s\t%s\t%s\n", m.Repository, m.Digest, cmp.Or(m.Name, "-"),
			m.Created.UTC().Format(time.RFC3339), fate)
	case e.Retained != nil:
		d := e.Retained
		end := "deleted; kiln-registry gc gives the space back"
		if d.DryRun {
			end = "would go; --yes deletes them"
		}
		_, err = fmt.Fprintf(s.notes, "%s found: %d among the newest, %d that something refers to; %d (%s of blobs) %s\n",
			cli.Count(d.Found, s.kind), d.Newest, d.Referred, d.Retired, cli.Bytes(d.Bytes), end)
	}
	return err
}
