package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// collecting is what gc was asked for.
type collecting struct {
	home.Flags
	upkeep.Terms
	json bool
}

// minLease is the shortest lease without --force: what a client asks for by HEAD counts as just pushed only to within
// an hour.
const minLease = 2 * time.Hour

func gcCommand(stderr io.Writer) *cobra.Command {
	var c collecting
	cmd := &cobra.Command{
		Use: "gc", Short: "Give back the space of blobs that nothing refers to", Args: cobra.NoArgs,
		Long: `Give back the space of blobs that nothing refers to. Pushes and pulls go on meanwhile.

A blob goes when no manifest of any repository refers to it, none that is being pushed may need it, and it is older than
--grace. A running server does this itself once in --gc-interval. If more than --max-share of all blobs, or of their
bytes, would go, nothing does: that looks like an index that lacks something. --dry-run says what would go.

A blob that was pushed waits for its manifest as long as the server's --lease says, a week by default. --lease gives
those that wait a shorter time now. Choose one that is longer than a push takes: a push that needs a blob that went has
to send it again. What waits in a repository to which an upload is open stays; --force takes that too.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(); err != nil {
				return err
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), stderr)
		},
	}
	c.Flags.Bind(cmd)
	f := cmd.Flags()
	f.DurationVar(&c.Grace, "grace", upkeep.DefaultGrace, "how old a blob is at least when it goes")
	f.Float64Var(&c.MaxShare, "max-share", upkeep.DefaultMaxShare,
		"refuse if a larger share of the blobs or bytes would go")
	f.DurationVar(&c.Lease, "lease", 0, "how long a blob that was pushed waits for its manifest; 0: as was promised")
	f.BoolVar(&c.Force, "force", false, "whatever the share, and whatever a running push may need")
	f.BoolVar(&c.DryRun, "dry-run", false, "only say what would go")
	f.BoolVar(&c.json, "json", false, "print JSON, one object a line")
	return cmd
}

func (c *collecting) check() error {
	if c.Lease > 0 && c.Lease < minLease && !c.Force {
		return cli.Hint(
			cli.Usagef("--lease %s: a push that runs may need its blobs for longer: want %s or more", c.Lease, minLease),
			"--force, if no push runs",
		)
	}
	return cmp.Or(
		cli.NotNegative("--lease", c.Lease), cli.NotNegative("--grace", c.Grace),
		cli.Share("--max-share", c.MaxShare), c.Flags.Check(),
	)
}

// run has the server do it, or does it where none runs.
func (c *collecting) run(ctx context.Context, stdout, stderr io.Writer) error {
	show := collectShow{json: c.json, out: stdout, notes: stderr}
	o := upkeepOrder(http.MethodPost, "/collect?"+c.Query().Encode(), show.event)
	err := o.give(ctx, c.Home, stderr, func(p *home.Parts) error {
		return p.Registry.Collector().Tell(ctx, c.Terms, show.event)
	})
	switch {
	case errors.Is(err, upkeep.ErrTooMuch):
		return cli.Hint(cli.Exit(cli.CodeNo, err), "if that is right, run it with --force; --dry-run says what would go")
	case err == nil && show.failed > 0:
		return cli.Hint(cli.Exit(cli.CodeDisk, fmt.Errorf("%s could not be removed", cli.Count(int(show.failed), "blob"))),
			"the log of the server says why")
	}
	return upkeepError(err)
}

// collectShow writes what a collection tells.
type collectShow struct {
	json       bool
	out, notes io.Writer
	failed     int64
}

func (s *collectShow) event(e upkeep.Event) {
	if e.Collection != nil {
		s.failed = e.Collection.Failed
	}
	switch {
	case s.json:
		_ = json.NewEncoder(s.out).Encode(e) // as what is printed anywhere
	case e.Blob != nil:
		fmt.Fprintf(s.out, "%s\t%s\t%s\n", e.Blob.Digest, e.Blob.Created.UTC().Format(time.RFC3339), cli.Bytes(e.Blob.Size))
	case e.Collection != nil:
		fmt.Fprintln(s.notes, collected(e.Collection))
	}
}

// collected says in a line what a collection did.
func collected(c *upkeep.Collection) string {
	gone := upkeep.Amount{Blobs: c.Removed.Blobs + c.Aside.Blobs, Bytes: c.Removed.Bytes + c.Aside.Bytes}
	end := "removed"
	if c.DryRun {
		gone = upkeep.Amount{Blobs: c.Unused.Blobs + c.Aside.Blobs, Bytes: c.Unused.Bytes + c.Aside.Bytes}
		end = "would go"
	}
	text := fmt.Sprintf("%s found: %s in use, %s pushed and waiting for a manifest, %s too young; %s %s", amount(c.Found),
		amount(c.Held), amount(c.Leased), amount(c.Young), amount(gone), end)
	if c.Busy > 0 {
		text += fmt.Sprintf("; %d left for the next time, as they were being pushed", c.Busy)
	}
	if c.Swept > 0 {
		text += fmt.Sprintf("; %s of killed processes swept", cli.Count(c.Swept, "remnant"))
	}
	return text
}

func amount(a upkeep.Amount) string {
	return fmt.Sprintf("%s (%s)", cli.Count(int(a.Blobs), "blob"), cli.Bytes(a.Bytes))
}
