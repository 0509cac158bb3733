package server

import (
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/settings"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// configured is how serve finds the settings that its command line leaves out.
type configured struct {
	file   string
	print  bool
	strays []string // warnings about the environment
}

func (c *configured) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.file, settings.Config, "", "YAML file of settings, named like the flags; all else in it is refused")
	f.BoolVar(&c.print, settings.Print, false,
		"print each setting and where it came from, as a file for --config; then end")
}

// start serves with the settings of flags, environment and file, or prints them.
func (s *serving) start(cmd *cobra.Command, stderr io.Writer) error {
	set, err := settings.Read(cmd.Flags(), os.Environ())
	if err != nil {
		return err
	}
	if s.print {
		if _, err := home.ParsePlace("--store", s.At); err != nil {
			return set.Blame(err) // what is printed would have a secret in it that was put where none belongs
		}
		err := set.Write(cmd.OutOrStdout())
		_, bad := s.logging.open(stderr)
		return set.Blame(errors.Join(err, bad, s.check()))
	}
	s.Given, s.strays = set.Given("store"), set.Strays(os.Environ())
	return set.Blame(s.run(cmd.Context(), cmd.OutOrStdout(), stderr))
}

// limits are what a server refuses to whoever asks.
type limits struct {
	readOnly  bool
	patterns  []string
	immutable access.TagPatterns // set by check
}

func (l *limits) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&l.readOnly, "read-only", false, "refuse every push and delete, and remove nothing")
	f.StringSliceVar(&l.patterns, "immutable-tags", nil,
		"tags that are never moved or deleted once they are set, as team/**:v* (may be repeated)")
}

func (l *limits) check() (err error) {
	if l.immutable, err = access.ParseTagPatterns(l.patterns); err != nil {
		return cli.Hint(
			cli.Usagef("--immutable-tags: %w", err),
			"in a repository * is any text without /, and ** any components; in a tag * is any text",
		)
	}
	return nil
}
