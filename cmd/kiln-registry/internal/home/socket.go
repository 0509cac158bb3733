package home

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// ErrNoServer: nobody listens on the administration socket.
var ErrNoServer = errors.New("no server runs on this store")

// Ask sends a request to the server that runs on a home. ErrNoServer, also if the one that runs has another store.
func (h Home) Ask(ctx context.Context, method, path string) (*http.Response, error) {
	if o, err := h.owner(); err != nil || o.At != "" && o.At != h.Address() {
		return nil, ErrNoServer
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // nothing else is asked
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", h.File(SocketFile))
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://kiln-registry"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, h.NotAsked(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // best effort: the status is the error
		return nil, refused(resp, strings.TrimSpace(string(text)))
	}
	return resp, nil
}

// refused is the error of a server that does not do what it was asked.
func refused(resp *http.Response, text string) error {
	err := fmt.Errorf("the server refused: %s", cmp.Or(text, resp.Status))
	switch resp.StatusCode {
	case http.StatusServiceUnavailable:
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), "run it again when the server is ready, or when it has ended")
	case http.StatusNotFound:
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "the server is of another version: restart it with this one")
	}
	return err
}

// NotAsked tells why the administration socket gave no answer.
func (h Home) NotAsked(err error) error {
	var op *net.OpError
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, os.ErrPermission):
		return cli.Hint(
			cli.Exit(cli.CodeDisk, fmt.Errorf("store %s: %w", h, err)),
			"the store belongs to another user: run this as the user that runs the registry",
		)
	case errors.As(err, &op) && op.Op == "dial":
		return ErrNoServer
	}
	return cli.Hint(
		cli.Exit(cli.CodeTryAgain, fmt.Errorf("store %s: the server did not answer to the end: %w", h, err)),
		"it may have stopped: run the command again, and look into its log if that does not help",
	)
}

// WithParts opens what no server runs on and does work, once the index is level with the store. What is worth a line of
// a log goes to stderr.
func (h Home) WithParts(ctx context.Context, stderr io.Writer, work func(*Parts) error) error {
	return Opening{Home: h}.Do(ctx, stderr, work)
}

// Do is WithParts in another way than the usual one.
func (o Opening) Do(ctx context.Context, stderr io.Writer, work func(*Parts) error) error {
	o.Config = registry.Config{Access: access.Open(), Log: slog.New(slog.NewTextHandler(stderr, nil))}
	p, err := o.Open(ctx)
	if err != nil {
		return err
	}
	if err = o.NotReplayed(p.Registry.Replay(ctx)); err == nil {
		err = work(p)
	}
	return errors.Join(err, p.Close())
}
