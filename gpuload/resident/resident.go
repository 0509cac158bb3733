// Package resident answers over HTTP for a base model that is held in memory: whether it is there, and which bytes it
// is, in the form in which Kiln's own server answers.
package resident

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// Limits on a connection. Answers are small: the largest is a manifest of 4096 shards, below 2 MB.
const (
	headerTimeout  = 10 * time.Second
	readTimeout    = 30 * time.Second
	writeTimeout   = time.Minute
	keepAlive      = 2 * time.Minute
	maxHeaderBytes = 32 << 10
)

// ErrPublic: the address can be reached from other machines, and nothing says who may ask.
var ErrPublic = errors.New("can be reached from other machines")

// Server answers for one model. Its fields are set before it is used. It is safe for concurrent use.
type Server struct {
	Version string
	Backend string       // what holds the weights; synthetic: nothing does
	Model   string       // what people call the model
	Debug   bool         // answer /v1/debug/model-state
	Gate    *access.Gate // who may ask for the debug state; nil: everyone
	Log     *slog.Logger // of connections that failed; nil: nowhere

	// Drain is how long requests and leases may last when the server stops.
	Drain time.Duration

	held   atomic.Pointer[Held] // nil while loading
	ending atomic.Bool
}

// Held is what was loaded.
type Held struct {
	Weights *gpuload.Resident // nil for a synthetic model
	Path    string            // of the model's folder; empty: none
	Config  Config            // from the folder's config.json
	At      time.Time         // when the last byte was checked
}

// Listen listens on a TCP address. Unless open says that everyone may ask, an address that is not this machine's alone
// is ErrPublic.
func Listen(ctx context.Context, addr string, open bool) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if tcp, ok := l.Addr().(*net.TCPAddr); !open && (!ok || !tcp.IP.IsLoopback()) {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", l.Addr(), ErrPublic), l.Close())
	}
	return l, nil
}

// Run answers on l from the start, not ready at first. It calls load, then loaded, and from then on is ready until ctx
// ends, which is no error. Before it returns it closes l and frees the weights. It returns the error of load, of loaded
// or of the listener.
func (s *Server) Run(ctx context.Context, l net.Listener, load func(context.Context) (Held, error),
	loaded func(Held) error,
) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	server, accepted := s.httpServer(), make(chan error, 1)
	go func() {
		err := server.Serve(l)
		stop(err)
		accepted <- err
	}()
	h, err := load(ctx)
	if err == nil {
		s.held.Store(&h)
		err = loaded(h)
	}
	if err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, s.stop(context.WithoutCancel(ctx), server, accepted, h.Weights))
}

// stop lets readiness fail first, then waits for requests, then for leases.
func (s *Server) stop(ctx context.Context, server *http.Server, accepted <-chan error, weights *gpuload.Resident,
) error {
	s.ending.Store(true)
	ctx, cancel := context.WithTimeout(ctx, s.Drain)
	defer cancel()
	err := server.Shutdown(ctx)
	if err != nil {
		err = errors.Join(fmt.Errorf("requests were cut off: %w", err), server.Close())
	}
	if e := <-accepted; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(fmt.Errorf("serve: %w", e), err)
	}
	if weights != nil {
		err = errors.Join(err, weights.Close(ctx))
	}
	return err
}

func (s *Server) httpServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &http.Server{
		Handler:           s,
		Protocols:         protocols,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
