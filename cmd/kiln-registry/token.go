package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

func tokenCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "token", Short: "Make tokens", Args: cobra.NoArgs}
	cmd.AddCommand(tokenCreateCommand())
	return cmd
}

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
hash of the secret. A running server takes the change with its next request.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
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
