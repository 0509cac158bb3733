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
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
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
		return nil, h.refused(resp.StatusCode, strings.TrimSpace(string(text)))
	}
	return resp, nil
}

// refused is the error of a server that does not do what it was asked.
func (h Home) refused(status int, text string) error {
	err := fmt.Errorf("the server refused: %s", cmp.Or(text, http.StatusText(status)))
	switch status {
	case http.StatusServiceUnavailable:
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), "run it again when the server is ready, or when it has ended")
	case http.StatusNotFound:
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "the server is of another version: restart it with this one")
	case http.StatusConflict:
		return h.recordsDamaged(err)
	case http.StatusBadGateway:
		return cli.Hint(cli.Exit(cli.CodeUnreachable, err), "check the endpoint and that its server runs; then try again")
	case http.StatusInternalServerError:
		return cli.Hint(cli.Exit(cli.CodeDisk, err), "the log of the server may say more")
	}
	return err
}

// recordsDamaged says what can be done when an index can't be made from what is in the store, and there is one.
func (h Home) recordsDamaged(err error) error {
	return cli.Hint(cli.Exit(cli.CodeDisk, err), "nothing was changed, and a server goes on to serve from the index that is "+
		"there: put back what is damaged from a backup; without one, copy the artifacts to another registry, stop the server "+
		"and run "+h.Command("reindex --accept-loss"))
}

// Copy writes an answer that ends with registry.EndTrailer, and fails unless it is whole.
func (h Home) Copy(w io.Writer, resp *http.Response) error {
	from := &body{Reader: resp.Body}
	if _, err := io.Copy(w, from); from.err != nil {
		return h.NotAsked(from.err)
	} else if err != nil {
		return err
	}
	status, text, _ := strings.Cut(resp.Trailer.Get(registry.EndTrailer), " ")
	if status == registry.EndWhole {
		return nil
	}
	if code, err := strconv.Atoi(status); err == nil {
		return h.refused(code, text)
	}
	return h.NotAsked(io.ErrUnexpectedEOF)
}

// body notes how reading failed.
type body struct {
	io.Reader
	err error
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err != io.EOF {
		b.err = err
	}
	return n, err
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
	err = p.Registry.Replay(ctx)
	switch {
	case o.Fresh && errors.Is(err, blobstore.ErrDamaged):
		err = o.recordsDamaged(err)
	default:
		err = o.NotReplayed(err)
	}
	if err == nil && o.Agree != nil {
		err = o.Agree(ctx, p.ix)
	}
	if err == nil && o.Fresh {
		err = p.exchange(ctx, o)
	}
	if err != nil && o.Fresh {
		err = errors.Join(err, p.discard())
	}
	if err == nil {
		err = work(p)
	}
	return errors.Join(err, p.Close())
}
