// Package admin has the commands for those who look after a registry.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/saved"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
)

// Commands are the commands of administrators. Where one is about what goes on, it has the server tell that runs on the
// store, or opens the store itself where none runs.
func Commands(stderr io.Writer) []*cobra.Command {
	return []*cobra.Command{
		tokenCommand(), exportCommand(stderr), indexCommand(stderr), reindexCommand(stderr), copyCommand(stderr), retainCommand(stderr),
		purgeCommand(stderr), gcCommand(stderr), scrubCommand(stderr),
	}
}

func exportCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	cmd := &cobra.Command{
		Use: "export", Short: "Print all manifests and tags, one JSON object a line", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			return export(cmd.Context(), s.Home, cmd.OutOrStdout(), stderr)
		},
	}
	s.Bind(cmd)
	return cmd
}

// export has the server write, or writes where none runs.
func export(ctx context.Context, h home.Home, stdout, stderr io.Writer) error {
	resp, err := h.Ask(ctx, http.MethodGet, "/export")
	switch {
	case err == nil:
		defer resp.Body.Close()
		return h.Copy(stdout, resp)
	case !errors.Is(err, home.ErrNoServer):
		return err
	}
	return h.WithParts(ctx, stderr, func(p *home.Parts) error { return p.Registry.Export(ctx, stdout) })
}

func indexCommand(stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use: "index COMMAND", Short: "Save the index, make it anew against what was saved, and shrink its file",
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s: want a command: export, import, compact", cmd.CommandPath())
			}
			return fmt.Errorf("unknown command %q for %q: want export, import or compact", args[0], cmd.CommandPath())
		},
		// Cobra answers a command without RunE with its help and success, whatever it was asked.
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(indexExportCommand(stderr), indexImportCommand(stderr), compactCommand(stderr))
	return cmd
}

func indexExportCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	cmd := &cobra.Command{
		Use: "export", Short: "Print all manifests and tags, and a last line that says so", Args: cobra.NoArgs,
		Long: `Print all manifests and tags, one JSON object a line, as kiln-registry export does, and a last line
{"type":"end","rows":N,"Kiln-End":"whole"}. It is not printed where lines are missing: so index import knows a file that
was cut off.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			out := saved.Writer{W: cmd.OutOrStdout()}
			if err := export(cmd.Context(), s.Home, &out, stderr); err != nil {
				return err
			}
			return out.End()
		},
	}
	s.Bind(cmd)
	return cmd
}

func indexImportCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	var replace bool
	cmd := &cobra.Command{
		Use: "import FILE", Short: "Make the index from the store, if that has all that an export has",
		Long: `Make the index from the store, and put it in place only if it has all that FILE has, which index export wrote.

The store is the truth: each row of the index is made of its record, as by reindex, and must be the row of FILE to the
byte. What was put, moved or deleted since FILE was written is in the index, too. If the store lacks a row of FILE, or a
row comes out otherwise, the command names it, changes nothing and exits with 1. A FILE that was cut off, or is not as
index export writes it, exits with 5.

It needs that no server runs. An index that is there is replaced only with --replace; open uploads, and blobs that wait
for their manifest, are taken over from it. A process that is killed leaves the index that was there.`,
		Args: cli.Args("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			return importIndex(cmd.Context(), s.Home, args[0], replace, cmd.OutOrStdout(), stderr)
		},
	}
	s.Bind(cmd)
	cmd.Flags().BoolVar(&replace, "replace", false, "replace the index that is there")
	return cmd
}

func compactCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	cmd := &cobra.Command{
		Use: "compact", Short: "Write the file of the index anew, without the room that it has left", Args: cobra.NoArgs,
		Long: `Write the file of the index anew, with full pages and none that is free. The copy is read back and compared before
it takes the place of the file; a process that is killed leaves the file that was there. It needs room for the copy, and
that no server runs.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			return compact(cmd.Context(), s.Home, cmd.OutOrStdout(), stderr)
		},
	}
	s.Bind(cmd)
	return cmd
}

// stopped fails while a server runs on a home.
func stopped(ctx context.Context, h home.Home) error {
	resp, err := h.Ask(ctx, http.MethodGet, "/health")
	switch {
	case errors.Is(err, home.ErrNoServer):
		return nil
	case err != nil:
		return err
	}
	return cli.Hint(
		errors.Join(cli.Exit(cli.CodeTryAgain, errors.New("a server runs on this store, and has its index open")),
			resp.Body.Close()),
		"stop it, run this again, and start it again",
	)
}

func compact(ctx context.Context, h home.Home, stdout, stderr io.Writer) error {
	if err := stopped(ctx, h); err != nil {
		return err
	}
	was, is, err := h.Compact(ctx, func(line string) { cli.Warn(stderr, "%s", line) })
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "the index had %s and has %s\n", cli.Bytes(was), cli.Bytes(is))
	return err
}

func importIndex(ctx context.Context, h home.Home, name string, replace bool, stdout, stderr io.Writer) error {
	f, err := saved.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Check(); err != nil { // before anything is made
		return err
	}
	if err := stopped(ctx, h); err != nil {
		return err
	}
	if _, err := os.Lstat(h.File(home.IndexFile)); err == nil && !replace {
		return cli.Hint(cli.Usagef("there is an index: %s", h.File(home.IndexFile)),
			"--replace puts the imported one in its place")
	}
	var did saved.Compared
	o := home.Opening{Home: h, Fresh: true, Agree: func(ctx context.Context, ix *index.Index) (err error) {
		did, err = f.Compare(ctx, ix)
		return err
	}}
	return o.Do(ctx, stderr, func(*home.Parts) error {
		_, err := fmt.Fprintf(stdout, "the index has %s of %s as they are there, and %s since\n",
			cli.Count(did.Same, "row"), name, cli.Count(did.Since, "change"))
		return err
	})
}

func reindexCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	var acceptLoss bool
	cmd := &cobra.Command{
		Use: "reindex", Short: "Make the index anew from the store", Args: cobra.NoArgs,
		Long: `Make the index anew from the store: every acknowledged manifest, tag and delete is in it again. Open uploads,
and blobs that wait for their manifest, are taken over from the old index if that can be read. A running server does it
itself and answers 503 meanwhile.

If the store's own records of manifests and tags are damaged, it refuses and changes nothing: a server goes on to serve
from the index that is there. --accept-loss goes on with what is left of them, and says what was left out. The damaged
records are kept aside, and so is the old index, which knows what was left out. It needs that no server runs.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			return reindex(cmd.Context(), s.Home, acceptLoss, cmd.OutOrStdout(), stderr)
		},
	}
	s.Bind(cmd)
	cmd.Flags().BoolVar(&acceptLoss, "accept-loss", false, "go on with what is left of damaged records")
	return cmd
}

var errRecordsRead = errors.New("a server runs on this store, so that its records could be read")

// reindex has the server do it, or does it where none runs, and says what came of it.
func reindex(ctx context.Context, h home.Home, acceptLoss bool, stdout, stderr io.Writer) error {
	method, path := http.MethodPost, "/reindex"
	if acceptLoss {
		method, path = http.MethodGet, "/health" // only to learn whether one runs
	}
	resp, err := h.Ask(ctx, method, path)
	switch {
	case err == nil && acceptLoss:
		return cli.Hint(
			errors.Join(cli.Exit(cli.CodeTryAgain, errRecordsRead), resp.Body.Close()),
			"stop it first, or leave --accept-loss out",
		)
	case err == nil:
		defer resp.Body.Close()
		var did registry.Replayed
		if err := json.NewDecoder(resp.Body).Decode(&did); err != nil {
			return h.NotAsked(err)
		}
		_, err = fmt.Fprintln(stdout, "the server made the index anew from", cli.Count(did.Refs, "ref"))
		return err
	case !errors.Is(err, home.ErrNoServer):
		return err
	}
	o := home.Opening{Home: h, Fresh: true, AcceptLoss: acceptLoss}
	return o.Do(ctx, stderr, func(p *home.Parts) error {
		_, err := fmt.Fprintln(stdout, "the index was made anew from", cli.Count(p.Registry.Replayed().Refs, "ref"))
		return err
	})
}
