// Package caching is the cache of kiln-pull on the command line.
package caching

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
)

// Env names the variable that stands in for --cache.
const Env = "KILN_CACHE"

// Bind adds --cache to a command.
func Bind(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "cache", os.Getenv(Env),
		"DIR of verified files, by digest, for all pulls of this machine; files are read-only links to it ($"+Env+")")
}

// Open opens the cache at dir; nil: dir is empty. note is told what it finds.
func Open(dir string, note func(string)) (*cache.Cache, error) {
	if dir == "" {
		return nil, nil
	}
	c, err := cache.Open(dir, cache.Options{Notify: note})
	return c, explain(err)
}

func explain(err error) error {
	switch {
	case errors.Is(err, cache.ErrForeign):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"name a folder of this user's; nobody else may write there: chmod go-w")
	case errors.Is(err, cache.ErrNone):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "a cache is what pull --cache DIR makes")
	}
	return err
}

// Command returns the cache command.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cache COMMAND", Short: "Check a cache of pulled files, and remove what is not needed from it",
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s: want a command: prune or verify", cmd.CommandPath())
			}
			return fmt.Errorf("unknown command %q for %q: want prune or verify", args[0], cmd.CommandPath())
		},
		// Cobra answers a command without RunE with its help and success, whatever it was asked.
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(pruneCommand(), verifyCommand())
	return cmd
}

// oneDir takes a DIR, or none where the environment names it.
func oneDir(_ *cobra.Command, args []string) error {
	switch {
	case len(args) > 1:
		return fmt.Errorf("got %d arguments, want DIR", len(args))
	case len(args) == 0 && os.Getenv(Env) == "":
		return fmt.Errorf("want DIR, or $%s", Env)
	}
	return nil
}

func open(args []string, note func(string)) (*cache.Cache, error) {
	dir := os.Getenv(Env)
	if len(args) > 0 {
		dir = args[0]
	}
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return nil, cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: no such folder", dir))
	}
	c, err := cache.OpenOld(dir, cache.Options{Notify: note})
	return c, explain(err)
}

type pruneFlags struct {
	cli.Flags
	options cache.PruneOptions
	max     cli.Size
}

func pruneCommand() *cobra.Command {
	var f pruneFlags
	cmd := &cobra.Command{
		Use:   "prune [DIR]",
		Short: "Remove what was not used for long, and what pulls that are gone left behind",
		Long: "Remove what was not used for long, and what pulls that are gone left behind.\n\n" +
			"A file that a pulled folder has as a link stays: removing it would free nothing. What a pull that is at work\n" +
			"receives stays too. Of the others go those that no pull used for --older and, until the rest takes no more\n" +
			"than --max-size, those that were not used for longest.",
		Example: "  kiln-pull cache prune /var/cache/kiln --older 720h --max-size 500GB --pulls /models",
		Args:    oneDir,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.prune(cmd.Context(), args, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Flags.Bind(cmd)
	cmd.Flags().DurationVar(&f.options.Older, "older", 720*time.Hour, "remove what was not used for that long; 0: nothing for that reason")
	cmd.Flags().Var(&f.max, "max-size", "bytes that files which no folder has may take, as 500GB; 0: any number")
	cmd.Flags().StringArrayVar(&f.options.Pulls, "pulls", nil,
		"FOLDER that models were pulled into: what interrupted pulls left there is removed too; may be repeated")
	return cmd
}

func (f *pruneFlags) prune(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if err := cli.NotNegative("--older", f.options.Older); err != nil {
		return err
	}
	f.options.Max = int64(f.max)
	show := progress.New(f.Flags, stdout, stderr)
	defer show.Close()
	c, err := open(args, show.Note)
	if err != nil {
		return err
	}
	p, err := c.Prune(ctx, f.options)
	if err != nil {
		return err
	}
	if f.JSON {
		return json.NewEncoder(stdout).Encode(struct {
			Event  string `json:"event"` // pruned
			Folder string `json:"folder"`
			cache.Pruned
		}{"pruned", c.Dir(), p})
	}
	t := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "removed\t%s, %s\n", files(p.Removed), cli.Bytes(p.RemovedBytes))
	fmt.Fprintf(t, "partial\t%s removed, %s; %d on their way in\n", files(p.Partials), cli.Bytes(p.PartialBytes), p.Busy)
	fmt.Fprintf(t, "kept\t%s, %s; of these %s, %s, are links of folders\n", files(p.Kept), cli.Bytes(p.KeptBytes),
		files(p.Linked), cli.Bytes(p.LinkedBytes))
	return t.Flush()
}

func verifyCommand() *cobra.Command {
	var f cli.Flags
	cmd := &cobra.Command{
		Use:   "verify [DIR]",
		Short: "Hash every file of a cache, and remove those that do not match",
		Args:  oneDir,
		RunE: func(cmd *cobra.Command, args []string) error {
			return verify(cmd.Context(), f, args, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Bind(cmd)
	return cmd
}

func verify(ctx context.Context, f cli.Flags, args []string, stdout, stderr io.Writer) error {
	show := progress.New(f, stdout, stderr)
	c, err := open(args, show.Note)
	if err != nil {
		show.Close()
		return err
	}
	v, err := c.Verify(ctx, cache.Checking{
		Moved: func(d identity.Digest, done, size int64) {
			step := transfer.Moved
			if done == 0 {
				step = transfer.Planned
			}
			show.Watch(transfer.Event{Step: step, Phase: transfer.PhaseVerify, File: d.Hex(), Bytes: done, Total: size})
		},
		Done: func(d identity.Digest, size int64) {
			show.Watch(transfer.Event{Step: transfer.Done, Phase: transfer.PhaseVerify, File: d.Hex(), Bytes: size, Total: size})
		},
	})
	show.Close()
	if err != nil {
		return err
	}
	if err := write(stdout, f.JSON, c.Dir(), v); err != nil {
		return err
	}
	if len(v.Dropped) > 0 {
		return cli.Silent(cli.CodeNo)
	}
	return nil
}

func write(w io.Writer, asJSON bool, dir string, v cache.Checked) error {
	if asJSON {
		if v.Dropped == nil {
			v.Dropped = []identity.Digest{}
		}
		return json.NewEncoder(w).Encode(struct {
			Event  string `json:"event"` // verified
			Folder string `json:"folder"`
			cache.Checked
		}{"verified", dir, v})
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "state\tverified at %s: %s, %s\n", time.Now().UTC().Format(time.RFC3339), files(v.Files), cli.Bytes(v.Bytes))
	for _, d := range v.Dropped {
		fmt.Fprintf(t, "removed\t%s: its bytes were others\n", d)
	}
	return t.Flush()
}

func files(n int) string {
	if n == 1 {
		return "1 file"
	}
	return fmt.Sprintf("%d files", n)
}
