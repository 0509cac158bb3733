// Command kiln-push names models by their bytes and sends them to a registry.
package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:   "kiln-push",
		Short: "Name models by their bytes and send them to a registry",
		Long: "Name models by their bytes and send them to a registry.\n\n" +
			"A REF is host[:port]/repository[:tag].\n\n" + cli.ExitCodes,
		Version: cli.Version(),
		Args:    cobra.NoArgs,

		PersistentPreRunE: cli.NoEmpty(),
	}
	root.AddCommand(identifyCommand(), compareCommand(), baseCommand(), bindCommand(), deriveCommand(), stampCommand(),
		cli.VersionCommand())
	for _, is := range artifacts {
		root.AddCommand(artifactCommand(is))
	}
	cli.WithExitCodes(root)
	return cli.Execute(ctx, root, args, stdout, stderr)
}

// errInterrupted ends a command that begins anew when it is run again.
var errInterrupted = cli.Exit(cli.CodeTryAgain, errors.New("interrupted"))

// explain gives the errors of a model folder their exit codes and hints, for a command that has the flags of reading.
func explain(err error) error {
	var rule *safetensors.Error
	switch {
	case errors.Is(err, folder.ErrChanged):
		err = cli.Exit(cli.CodeBadInput, err)
		return cli.Hint(err, "let whatever writes there finish, or work from a private copy: --snapshot")
	case errors.As(err, &rule) && rule.Code == safetensors.CodeSymlink:
		return cli.Hint(err, followLinks)
	case errors.As(err, &rule) && rule.Code == safetensors.CodeNoShards:
		return cli.Hint(err, noShards)
	case errors.As(err, &rule) && rule.Code == safetensors.WarnFamilyIncomplete:
		return cli.Hint(err, "if that is the whole model, add --allow-incomplete-family")
	case errors.As(err, &rule) && rule.Code == safetensors.CodeUnknownDType:
		return cli.Hint(err, "kiln-push identify --any-dtype names such bytes; they are not pushed")
	}
	return explainPath(err)
}

// explainPath says what to do about a folder or a file that can't be read.
func explainPath(err error) error {
	var path *fs.PathError
	switch {
	case !errors.As(err, &path):
	case errors.Is(err, syscall.ENOTDIR):
		return cli.Hint(err, "a model is a folder: name the one that the file is in")
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENAMETOOLONG):
		return cli.Hint(err, "check the path, and from which folder the command is run")
	case errors.Is(err, fs.ErrPermission):
		return cli.Hint(err, "this user needs the right to read the folder and its files, and to write where a snapshot goes")
	}
	return err
}

const (
	noShards     = "name the folder that holds the model's *.safetensors files"
	manifestFile = "a file that stands for a base is a shard manifest: kiln-push identify --manifest DIR prints one"
)

const followLinks = "--follow-links reads what links lead to; a link that leads nowhere is a download that is not complete"

// reading are the flags for reading a model folder.
type reading struct {
	follow   bool
	snapshot bool
}

func (r *reading) bind(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&r.follow, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	cmd.Flags().BoolVar(&r.snapshot, "snapshot", false, "work from a private copy; what changes meanwhile does not matter")
}

// warn shows warnings, one line each.
func warn(stderr io.Writer, warnings []safetensors.Warning) {
	for _, w := range warnings {
		text := w.Message
		if w.Code == folder.WarnLinked {
			text += "; --follow-links takes what they lead to"
		}
		cli.Warn(stderr, "%s (%s)", text, w.Code)
	}
}
