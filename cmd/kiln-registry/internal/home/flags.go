package home

import (
	"context"
	"errors"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/settings"
)

// DefaultStore is the folder that is used, and made, where none is named.
const DefaultStore = "kiln-data"

const defaultState = "kiln-state"

// Flags are what the flags say about where a registry keeps things.
type Flags struct {
	At       string // as it was given
	stateDir string
	Given    bool // somebody named the store, so that it is not the default
	Init     bool // make the place a store first
	Home          // set by Check
}

// Bind adds the flags. What the command line does not say of them is looked for in the environment.
func (s *Flags) Bind(cmd *cobra.Command) {
	f := cmd.Flags()
	cmd.PreRunE = func(*cobra.Command, []string) error {
		_, err := settings.Environment(f, os.Environ(), "store", "state-dir")
		return err
	}
	f.StringVar(&s.At, "store", DefaultStore, "where everything is: "+PlaceForms)
	f.StringVar(&s.stateDir, "state-dir", "",
		"folder of the index, which is made anew if it is lost (default: --store, or ./"+defaultState+" if that is a bucket)")
}

// Check refuses what is no place, or no folder for the state of one.
func (s *Flags) Check() error {
	p, err := ParsePlace("--store", s.At)
	if err != nil {
		return cli.Hint(err, "name the folder or the bucket, or leave --store out for ./"+DefaultStore)
	}
	s.Home, err = newHome(p, s.stateDir)
	return err
}

// Prepare makes a store where that was asked for: by --init, or by a first start on the default folder.
func (s *Flags) Prepare(ctx context.Context) error {
	first := false
	if !s.Given {
		_, err := os.Lstat(s.Folder)
		first = errors.Is(err, fs.ErrNotExist)
	}
	if !first && !s.Init {
		return nil
	}
	return s.Make(ctx)
}
