// Package admin has the commands for those who look after a registry.
package admin

import (
	"errors"
	"io"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
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
				_, err = io.Copy(cmd.OutOrStdout(), resp.Body)
				return err
			case !errors.Is(err, home.ErrNoServer):
				return err
			}
			return s.WithParts(cmd.Context(), false, stderr, func(p *home.Parts) error {
				return p.Registry.Export(cmd.Context(), cmd.OutOrStdout())
			})
		},
	}
	s.Bind(cmd)
	return cmd
}

func reindexCommand(stderr io.Writer) *cobra.Command {
	var s home.Flags
	cmd := &cobra.Command{
		Use: "reindex", Short: "Make the index anew from the store", Args: cobra.NoArgs,
		Long: `Make the index anew from the store: every acknowledged manifest, tag and delete is in it again. Open
uploads are forgotten. A running server does it itself and answers 503 meanwhile.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.Check(); err != nil {
				return err
			}
			resp, err := s.Ask(cmd.Context(), http.MethodPost, "/reindex")
			if err == nil {
				return resp.Body.Close()
			}
			if !errors.Is(err, home.ErrNoServer) {
				return err
			}
			return s.WithParts(cmd.Context(), true, stderr, func(*home.Parts) error { return s.DropOld() })
		},
	}
	s.Bind(cmd)
	return cmd
}
