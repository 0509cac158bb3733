package main

import (
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli/settings"
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
	f.BoolVar(&c.print, settings.Print, false, "print each setting and where it came from, as a file for --config; then end")
}

// start serves with the settings of flags, environment and file, or prints them.
func (s *serving) start(cmd *cobra.Command, stderr io.Writer) error {
	set, err := settings.Read(cmd.Flags(), os.Environ())
	if err != nil {
		return err
	}
	if s.print {
		err := set.Write(cmd.OutOrStdout())
		_, bad := s.logging.open(stderr)
		return set.Blame(errors.Join(err, bad, s.check()))
	}
	s.given, s.strays = set.Given("store"), set.Strays(os.Environ())
	return set.Blame(s.run(cmd.Context(), cmd.OutOrStdout(), stderr))
}
