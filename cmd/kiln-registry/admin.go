package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// errNoServer: nobody listens on the administration socket.
var errNoServer = errors.New("no server runs on this store")

// ask sends a request to the server that runs on a home. errNoServer, also if the one that runs has another store.
func (h home) ask(ctx context.Context, method, path string) (*http.Response, error) {
	if o, err := h.owner(); err != nil || o.At != "" && o.At != h.address() {
		return nil, errNoServer
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // nothing else is asked
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", h.file(socketFile))
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://kiln-registry"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, h.notAsked(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // best effort: the status is the error
		return nil, fmt.Errorf("server: %s: %s", resp.Status, strings.TrimSpace(string(text)))
	}
	return resp, nil
}

// notAsked tells why the administration socket gave no answer.
func (h home) notAsked(err error) error {
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
		return errNoServer
	}
	return cli.Hint(
		cli.Exit(cli.CodeTryAgain, fmt.Errorf("store %s: the server did not answer to the end: %w", h, err)),
		"it may have stopped: run the command again, and look into its log if that does not help",
	)
}

func exportCommand(stderr io.Writer) *cobra.Command {
	var s store
	cmd := &cobra.Command{
		Use: "export", Short: "Print all manifests and tags, one JSON object a line", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return err
			}
			resp, err := s.ask(cmd.Context(), http.MethodGet, "/export")
			switch {
			case err == nil:
				defer resp.Body.Close()
				_, err = io.Copy(cmd.OutOrStdout(), resp.Body)
				return err
			case !errors.Is(err, errNoServer):
				return err
			}
			return s.withParts(cmd.Context(), false, stderr, func(p *parts) error {
				if err := p.reg.Replay(cmd.Context()); err != nil {
					return s.notReplayed(err)
				}
				return p.reg.Export(cmd.Context(), cmd.OutOrStdout())
			})
		},
	}
	s.bind(cmd)
	return cmd
}

func reindexCommand(stderr io.Writer) *cobra.Command {
	var s store
	cmd := &cobra.Command{
		Use: "reindex", Short: "Make the index anew from the store", Args: cobra.NoArgs,
		Long: `Make the index anew from the store: every acknowledged manifest, tag and delete is in it again. Open
uploads are forgotten. A running server does it itself and answers 503 meanwhile.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return err
			}
			resp, err := s.ask(cmd.Context(), http.MethodPost, "/reindex")
			if err == nil {
				return resp.Body.Close()
			}
			if !errors.Is(err, errNoServer) {
				return err
			}
			return s.withParts(cmd.Context(), true, stderr, func(p *parts) error {
				if err := p.reg.Replay(cmd.Context()); err != nil {
					return s.notReplayed(err)
				}
				return os.RemoveAll(s.file(oldIndex))
			})
		},
	}
	s.bind(cmd)
	return cmd
}

// withParts opens what no server runs on.
func (h home) withParts(ctx context.Context, fresh bool, stderr io.Writer, work func(*parts) error) error {
	o := opening{home: h, gate: access.Open(), log: slog.New(slog.NewTextHandler(stderr, nil)), fresh: fresh}
	p, err := o.open(ctx)
	if err != nil {
		return err
	}
	return errors.Join(work(p), p.close())
}
