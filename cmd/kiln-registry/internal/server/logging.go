package server

import (
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// logging is where and how the log goes.
type logging struct{ format, level string }

func (l *logging) bind(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.format, "log-format", "text", "text or json")
	cmd.Flags().StringVar(&l.level, "log-level", "info", "debug (every request), info, warn or error")
}

func (l *logging) open(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, cli.Usagef("--log-level %s: want debug, info, warn or error", l.level)
	}
	o := &slog.HandlerOptions{Level: level}
	switch l.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, cli.Usagef("--log-format %s: want text or json", l.format)
}
