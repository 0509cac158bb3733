package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/prune"
)

// purging is what purge was asked for.
type purging struct {
	home.Flags
	prune.Abandoned
	json bool
}

func purgeCommand(stderr io.Writer) *cobra.Command {
	var p purging
	cmd := &cobra.Command{
		Use: "purge", Short: "Drop uploads that nobody goes on with", Args: cobra.NoArgs,
		Long: `Drop uploads that nobody goes on with, and give back their space: those that got no byte for --older-than. One
that is in use right now stays. A client that goes on with one that was dropped sends that blob again. A running server
does this itself once an hour with uploads that were begun more than a week ago.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if p.ID != "" && !cmd.Flags().Changed("older-than") {
				p.OlderThan = 0
			}
			if err := p.check(); err != nil {
				return err
			}
			return p.run(cmd.Context(), cmd.OutOrStdout(), stderr)
		},
	}
	p.Flags.Bind(cmd)
	f := cmd.Flags()
	f.DurationVar(&p.OlderThan, "older-than", 24*time.Hour, "how long ago the last byte came at least; 0 with --id")
	f.StringSliceVar(&p.Repos, "repo", nil, "only uploads to this repository or glob, as team/**; may be repeated")
	f.StringVar(&p.ID, "id", "", "only this upload")
	f.BoolVar(&p.DryRun, "dry-run", false, "only say what would go")
	f.BoolVar(&p.json, "json", false, "print JSON, one object a line")
	return cmd
}

func (p *purging) check() error {
	if _, err := access.ParseRepositories(p.Repos); err != nil {
		return cli.Usagef("--repo: %w", err)
	}
	return cmp.Or(cli.NotNegative("--older-than", p.OlderThan), p.Flags.Check())
}

// run has the server do it, or does it where none runs.
func (p *purging) run(ctx context.Context, stdout, stderr io.Writer) error {
	show := purgeShow{json: p.json, out: stdout, notes: stderr}
	o := pruneOrder("/purge?"+p.Query().Encode(), show.event)
	return pruneError(o.give(ctx, p.Home, stderr, func(parts *home.Parts) error {
		return parts.Registry.Pruner().TellPurge(ctx, p.Abandoned, show.event)
	}))
}

// purgeShow writes what a purge tells.
type purgeShow struct {
	json       bool
	out, notes io.Writer
}

func (s purgeShow) event(e prune.Event) (err error) {
	switch {
	case s.json:
		return json.NewEncoder(s.out).Encode(e)
	case e.Upload != nil:
		u := e.Upload
		_, err = fmt.Fprintf(s.out, "%s\t%s\t%s\t%s\n", u.ID, cmp.Or(u.Repository, "-"), cli.Bytes(u.Bytes), u.Age())
	case e.Purged != nil:
		d := e.Purged
		end := "dropped"
		if d.DryRun {
			end = "would go"
		}
		_, err = fmt.Fprintf(s.notes, "%s found: %d too young, %d in use; %d (%s) %s\n", cli.Count(d.Found, "upload"),
			d.Young, d.Busy, d.Dropped, cli.Bytes(d.Bytes), end)
	}
	return err
}
