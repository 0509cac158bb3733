// Command kiln-registry is the server: a registry of model weights that finds them by their bytes.
package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/admin"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/server"
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
	root.AddCommand(server.Command(stderr))
	root.AddCommand(admin.Commands(stderr)...)
	root.AddCommand(cli.VersionCommand())
	return cli.Execute(ctx, root, args, stdout, stderr)
}
