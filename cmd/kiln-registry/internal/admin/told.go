package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/prune"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// order is something that a server is asked to do and tells of, one E a line.
type order[E any] struct {
	method, path string
	see          func(E) error                  // gets to know what comes of it
	end          func(E) (over bool, err error) // whether a line is the last one, and the error that it carries
}

// give has the server that runs on a home carry out the order, or does work itself where none runs. What is worth a
// line of a log goes to stderr.
func (o order[E]) give(ctx context.Context, h home.Home, stderr io.Writer, work func(*home.Parts) error) error {
	resp, err := h.Ask(ctx, o.method, o.path)
	switch {
	case err == nil:
		defer resp.Body.Close()
		return o.told(ctx, h, resp.Body)
	case !errors.Is(err, home.ErrNoServer):
		return err
	}
	return h.WithParts(ctx, stderr, work)
}

// told reads what the server tells. It must come to an end, or say why it does not.
func (o order[E]) told(ctx context.Context, h home.Home, body io.Reader) error {
	for dec := json.NewDecoder(body); ; {
		var e E
		err := dec.Decode(&e)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return h.NotAsked(err)
		}
		if over, err := o.end(e); over || err != nil {
			return err
		}
		if err := o.see(e); err != nil {
			return err
		}
	}
}

// upkeepOrder is an order to what upkeep.Handler serves.
func upkeepOrder(method, path string, see func(upkeep.Event)) order[upkeep.Event] {
	return order[upkeep.Event]{
		method: method, path: path,
		see: func(e upkeep.Event) error { see(e); return nil },
		end: func(e upkeep.Event) (bool, error) {
			if e.Error != nil {
				return true, e.Error
			}
			return e.End, nil
		},
	}
}

// pruneOrder is an order to what prune.Pruner's Handler serves.
func pruneOrder(path string, see func(prune.Event) error) order[prune.Event] {
	return order[prune.Event]{
		method: "POST", path: path, see: see,
		end: func(e prune.Event) (bool, error) {
			if e.Error != nil {
				return true, e.Error
			}
			return e.End, nil
		},
	}
}

// upkeepError gives an error of upkeep its exit code.
func upkeepError(err error) error {
	switch {
	case errors.Is(err, upkeep.ErrRunning), errors.Is(err, upkeep.ErrNotLevel):
		return cli.Exit(cli.CodeTryAgain, err)
	case errors.Is(err, upkeep.ErrLacking):
		return cli.Hint(cli.Exit(cli.CodeDisk, err), "no blob and no record is lost: "+
			"look at the disk and the memory of this machine")
	case errors.Is(err, upkeep.ErrReadOnly):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), readOnlyHint)
	}
	return err
}

const readOnlyHint = "it was started with --read-only"

// pruneError gives an error of prune its exit code.
func pruneError(err error) error {
	var refused *api.Error
	switch {
	case !errors.As(err, &refused):
		return err
	case errors.Is(err, api.ErrUnavailable):
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), "run it again soon")
	case errors.Is(err, api.ErrUnsupported):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), readOnlyHint)
	case errors.Is(err, api.ErrNameUnknown), errors.Is(err, api.ErrBlobUploadUnknown):
		return cli.Hint(cli.Exit(cli.CodeNotFound, err), "check the name; a glob, as team/**, may match nothing")
	}
	return cli.Hint(cli.Exit(cli.CodeUsage, err), "the log of the server may say more")
}
