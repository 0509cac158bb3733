// Package admin has the commands for those who look after a registry.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
)

// Commands are the commands of administrators. Where one is about what goes on, it has the server tell that runs on the
// store, or opens the store itself where none runs.
func Commands(stderr io.Writer) []*cobra.Command {
	return []*cobra.Command{
		tokenCommand(), exportCommand(stderr), reindexCommand(stderr), copyCommand(stderr), retainCommand(stderr),
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
			resp, err := s.Ask(cmd.Context(), http.MethodGet, "/export")
			switch {
			case err == nil:
				defer resp.Body.Close()
				return s.Copy(cmd.OutOrStdout(), resp)
			case !errors.Is(err, home.ErrNoServer):
				return err
			}
			return s.WithParts(cmd.Context(), stderr, func(p *home.Parts) error {
				return p.Registry.Export(cmd.Context(), cmd.OutOrStdout())
			})
		},
	}
	s.Bind(cmd)
	return cmd
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
