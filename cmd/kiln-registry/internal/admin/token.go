package admin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

func tokenCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token COMMAND", Short: "Make tokens", DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s: want a command: create", cmd.CommandPath())
			}
			return fmt.Errorf("unknown command %q for %q: want create", args[0], cmd.CommandPath())
		},
		// Cobra answers a command without RunE with its help and success, whatever it was asked.
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(tokenCreateCommand())
	return cmd
}

// maxExpires bounds --expires, so that a slip of the finger is not a token for ever.
const maxExpires = 100 * 365 * 24 * time.Hour

// newToken is what token create was asked for.
type newToken struct {
	file    string
	repos   []string
	actions []string
	expires time.Duration
}

func tokenCreateCommand() *cobra.Command {
	var t newToken
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Add a token to a token file and print its secret, once",
		Long: `Add a token to a token file, which is made if it is absent, and print its secret. The file holds only the
hash of the secret. A running server takes the new token at once.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := t.check(); err != nil {
				return err
			}
			secret, err := t.create(args[0], time.Now())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&t.file, "token-file", "", "the token file (needed)")
	f.StringSliceVar(
		&t.repos,
		"repo",
		nil,
		"repository or glob that the token is for: team/* one level, team/** any depth (needed)",
	)
	f.StringSliceVar(&t.actions, "allow", []string{"pull"}, "pull, push, delete")
	f.DurationVar(&t.expires, "expires", 0, "how long the token is valid; 0: for ever")
	for _, name := range []string{"token-file", "repo"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // no such flag: a mistake in this function
		}
	}
	return cmd
}

// check refuses what is no token file and no time to live.
func (t *newToken) check() error {
	if t.expires != 0 && (t.expires < time.Second || t.expires > maxExpires) {
		return cli.Hint(
			cli.Usagef("--expires %s: want 1s to %.0fh, or 0 for a token that never expires", t.expires, maxExpires.Hours()),
			"--expires 720h is 30 days",
		)
	}
	if t.file == "" {
		return cli.Hint(cli.Usagef("--token-file is empty"), "name a file, as --token-file tokens.yaml")
	}
	folder := filepath.Dir(t.file)
	if _, err := os.Stat(folder); errors.Is(err, fs.ErrNotExist) {
		return cli.Hint(
			cli.Exit(cli.CodeNotFound, fmt.Errorf("token file %s: there is no folder %s", t.file, folder)),
			"check --token-file; a missing folder is not made, as its name may be a slip",
		)
	}
	return nil
}

func (t *newToken) create(name string, now time.Time) (secret string, err error) {
	file := access.File{Version: access.FileVersion}
	b, err := os.ReadFile(t.file)
	switch {
	case err == nil:
		if file, err = access.ParseFile(b); err != nil {
			return "", cli.Exit(cli.CodeBadInput, fmt.Errorf("token file %s: %w", t.file, err))
		}
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	if slices.ContainsFunc(file.Tokens, func(o access.Token) bool { return o.Name == name }) {
		return "", cli.Usagef("token file %s has a token of the name %q already", t.file, name)
	}
	rule := access.Rule{Repositories: t.repos}
	for _, a := range t.actions {
		rule.Actions = append(rule.Actions, access.Action(a))
	}
	secret, sum := access.NewSecret()
	token := access.Token{Name: name, SHA256: sum, Allow: []access.Rule{rule}}
	if t.expires > 0 {
		token.Expires = now.Add(t.expires).UTC().Truncate(time.Second)
	}
	file.Tokens = append(file.Tokens, token)
	if b, err = file.Marshal(); err != nil {
		return "", err
	}
	if _, err := access.ParseFile(b); err != nil {
		return "", cli.Exit(cli.CodeUsage, err)
	}
	var disk durable.Disk
	return secret, disk.WriteFile(t.file, b, 0o600)
}
