package main

import (
	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
)

// commands lists the commands; each is in the file that its name begins with.
func commands() []*cobra.Command {
	return []*cobra.Command{
		pullCommand(), findCommand(), verifyCommand(), residentCommand(), checkAdapterCommand(), checkEvalCommand(),
		checkResumeCommand(), caching.Command(),
	}
}
