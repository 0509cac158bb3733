// Command kiln-registry is the server: a registry of model weights that finds them by their bytes.
package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:     "kiln-registry",
		Short:   "A registry of model weights that finds them by their bytes",
		Version: cli.Version(),
		Args:    cobra.NoArgs,
	}
	root.AddCommand(serveCommand(stderr), tokenCommand(), exportCommand(stderr), reindexCommand(stderr), versionCommand())
	return cli.Execute(ctx, root, args, stdout, stderr)
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), cli.Version())
			return err
		},
	}
}
