package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// upkeepError gives an error of upkeep its exit code.
func upkeepError(err error) error {
	switch {
	case errors.Is(err, upkeep.ErrRunning), errors.Is(err, upkeep.ErrNotLevel):
		return cli.Exit(cli.CodeTryAgain, err)
	case errors.Is(err, upkeep.ErrReadOnly):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "it was started with --read-only")
	}
	return err
}

// tell has the server that runs on a home do what path asks for, or does work itself where none runs. see gets to know
// what comes of it.
func tell(
	ctx context.Context, h home.Home, method, path string, stderr io.Writer, see func(upkeep.Event), work func(*home.Parts) error,
) error {
	resp, err := h.Ask(ctx, method, path)
	switch {
	case err == nil:
		defer resp.Body.Close()
		return told(ctx, h, resp.Body, see)
	case !errors.Is(err, home.ErrNoServer):
		return err
	}
	return h.WithParts(ctx, false, stderr, work)
}

// told reads what the server tells. It must come to an end, or say why it does not.
func told(ctx context.Context, h home.Home, body io.Reader, see func(upkeep.Event)) error {
	for dec := json.NewDecoder(body); ; {
		var e upkeep.Event
		switch err := dec.Decode(&e); {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return h.NotAsked(err)
		case e.Error != nil:
			return e.Error
		case e.End:
			return nil
		}
		see(e)
	}
}
