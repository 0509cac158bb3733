// Package resident answers over HTTP for a base model that is held in memory: whether it is there, and which bytes it
// is, in the form in which Kiln's own server answers.
package resident

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/adapters"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// Limits on a connection. Answers are small: the largest is a manifest of 4096 shards, below 2 MB.
const (
	headerTimeout  = 10 * time.Second
	readTimeout    = 30 * time.Second
	writeTimeout   = time.Minute
	keepAlive      = 2 * time.Minute
	goodbye        = time.Second // for answers when the server ends
	usualBeat      = 10 * time.Second
	maxHeaderBytes = 32 << 10
)

// PathMetrics is the path of the metrics.
const PathMetrics = "/metrics"

// ErrPublic: the address can be reached from other machines, and nothing says who may ask.
var ErrPublic = errors.New("can be reached from other machines")

// ErrLost: the device has lost what was published. It comes with the reason, which is gpuload.ErrUnreadable.
var ErrLost = errors.New("the device has lost the weights")

// Server answers for one model. Its fields are set before it is used. It is safe for concurrent use, and serves once.
type Server struct {
	Version string
	Backend string       // what holds the weights; synthetic: nothing does
	Model   string       // what people call the model
	Debug   bool         // answer /v1/debug/model-state
	Gate    *access.Gate // who may ask for the debug state; nil: everyone
	Log     *slog.Logger // of connections that failed; nil: nowhere

	// Socket is where other processes attach: the path of a socket, or a folder with a slash at its end, in which the
	// socket is named by the aggregate. Empty: nowhere.
	Socket  string
	Metrics http.Handler       // answers at PathMetrics; nil: nothing does
	Notify  func(state string) // is told how it stands, in the form of sd_notify; nil: nobody is

	// Alive fails when the device can't be used any more; nil: there is nothing to ask. It is asked every Beat while
	// weights are held, 0: every 10 seconds. With Watchdog, Notify is told WATCHDOG=1 each time that it does not fail.
	Alive    func(ctx context.Context) error
	Beat     time.Duration
	Watchdog bool

	// Drain is how long requests and leases may last when the server stops.
	Drain time.Duration

	held    atomic.Pointer[Held] // nil while loading
	ending  atomic.Bool
	damaged atomic.Pointer[attach.Error] // what an audit found
	lost    atomic.Bool                  // by the device

	socket   *localsock.Socket
	name     string // that the socket gets; empty: one made of the aggregate
	leases   leases
	auditing chan struct{}      // full while an audit runs
	released context.CancelFunc // ends Run
	fail     func(error)        // ends Run with an error
	freed    chan struct{}      // closed when the memory is free
	cutOff   int                // leases that were; to be read when freed is closed
	counts
}

// Held is what was loaded.
type Held struct {
	Weights  *gpuload.Resident // nil for a synthetic model
	Adapters *adapters.Set     // on these weights; nil: none are taken. Freed with them
	Path     string            // of the model's folder; empty: none
	Config   Config            // from the folder's config.json
	At       time.Time         // when the last byte was checked
	Socket   string            // path of the socket on which others attach; set by Run, empty: there is none

	base attachable
}

// Listen listens on a TCP address. Unless open says that everyone may ask, an address that is not this machine's
// alone is ErrPublic.
func Listen(ctx context.Context, addr string, open bool) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if tcp, ok := l.Addr().(*net.TCPAddr); !open && (!ok || !tcp.IP.IsLoopback()) {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", l.Addr(), ErrPublic), l.Close())
	}
	return l, nil
}

// Run answers on l from the start, not ready at first. It calls load, then loaded, and from then on is ready, and can
// be attached to, until ctx ends or somebody asks for the end, which are no errors. Before it returns it closes l and
// frees the weights. It returns the error of load, of loaded, of the socket or of the listener; ErrLost when the device
// has lost the weights, which ends it too.
func (s *Server) Run(ctx context.Context, l net.Listener, load func(context.Context) (Held, error),
	loaded func(Held) error,
) error {
	if err := s.listen(ctx); err != nil {
		return errors.Join(err, l.Close())
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	s.released, s.auditing = func() { stop(nil) }, make(chan struct{}, 1)
	s.freed = make(chan struct{})
	s.notify("STATUS=loading")
	run := &running{Server: s, stop: stop}
	s.fail = run.fail
	beats, calm := context.WithCancel(context.WithoutCancel(ctx))
	defer calm()
	run.calm = calm
	run.local, run.cut = context.WithCancelCause(context.WithoutCancel(ctx))
	run.serve(s.httpServer(), s.limit(l, maxProbes))
	h, err := load(ctx)
	if err == nil {
		err = s.publish(ctx, &h)
	}
	if err == nil {
		s.held.Store(&h)
		run.attachable(&h)
		s.notify("READY=1\nSTATUS=" + h.line())
		run.work.Go(func() { run.beat(beats) })
		err = loaded(h)
	}
	if err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, run.end(context.WithoutCancel(ctx), &h))
}

// line says for people what is held.
func (h *Held) line() string {
	if h.Weights == nil {
		return "holding no weights"
	}
	return "holding " + h.Weights.Manifest().Aggregate.String()
}

func (s *Server) notify(state string) {
	if s.Notify != nil {
		s.Notify(state)
	}
}

// running is a server with its listeners.
type running struct {
	*Server
	stop    context.CancelCauseFunc
	local   context.Context // of requests on the socket
	cut     context.CancelCauseFunc
	calm    context.CancelFunc // ends beat
	servers []*http.Server
	work    sync.WaitGroup

	mu     sync.Mutex
	failed []error // what ended it
}

// serve answers on l until end. A listener that fails stops all.
func (r *running) serve(server *http.Server, l net.Listener) {
	r.servers = append(r.servers, server)
	r.work.Go(func() {
		err := server.Serve(l)
		if errors.Is(err, http.ErrServerClosed) {
			return
		}
		r.fail(fmt.Errorf("serve: %w", err))
	})
}

// fail ends all with an error.
func (r *running) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, err)
	r.stop(err)
}

// beat looks after the device, and tells who watches over this process that all is well, until ctx ends.
func (r *running) beat(ctx context.Context) {
	tick := time.NewTicker(cmp.Or(r.Beat, usualBeat))
	defer tick.Stop()
	for {
		var err error
		if r.Alive != nil {
			err = r.Alive(ctx)
		}
		lost := errors.Is(err, gpuload.ErrUnreadable)
		if lost {
			r.damage(err)
		} else if err != nil && ctx.Err() == nil {
			r.log().Warn("the device can't be asked", "err", err)
		}
		if r.Watchdog && (err == nil || lost) { // what is lost ends in order
			r.notify("WATCHDOG=1")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// attachable begins to serve the socket.
func (r *running) attachable(h *Held) {
	if h.Socket == "" {
		return
	}
	r.work.Go(func() { r.watch(r.local, h) })
	r.serve(r.localServer(r.local), r.limit(r.socket, maxConnections))
}

// end lets readiness fail first, tells those who are attached, then waits for leases, frees the weights, and gives
// answers a moment to arrive.
func (r *running) end(ctx context.Context, h *Held) (err error) {
	r.ending.Store(true)
	r.notify("STOPPING=1\nSTATUS=draining")
	r.leases.refuse()
	r.leases.tell(attach.Event{Kind: attach.EventDraining, Grace: r.Drain.Seconds()})
	r.cut(gpuload.ErrState)
	deadline := time.Now().Add(r.Drain)
	drain, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if r.cutOff = r.leases.drain(drain); r.cutOff > 0 {
		err = &cutOff{r.cutOff, r.Drain}
	}
	if h.Weights != nil {
		ctx, cancel := context.WithTimeout(ctx, time.Until(deadline)+goodbye) // for handlers that were cut off to return
		defer cancel()
		freed := errors.Join(h.closeAdapters(ctx), h.Weights.Close(ctx))
		if r.damaged.Load() == nil || !errors.Is(freed, gpuload.ErrUnreadable) { // else it was told before
			err = errors.Join(err, freed)
		}
	}
	close(r.freed)
	r.calm()
	r.hangUp(ctx)
	r.work.Wait()
	if r.socket != nil {
		err = errors.Join(err, r.socket.Close())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(errors.Join(r.failed...), err)
}

// hangUp ends the servers. Leases have ended before, so that only answers are on their way: those get a moment, silent
// and unfinished requests are cut off.
func (r *running) hangUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, goodbye)
	defer cancel()
	var work sync.WaitGroup
	for _, server := range r.servers {
		work.Go(func() {
			if server.Shutdown(ctx) != nil {
				_ = server.Close() // of listeners that are closed by now
			}
		})
	}
	work.Wait()
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

func (s *Server) httpServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Server{
		Handler:           s,
		Protocols:         protocols,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log().Handler(), slog.LevelDebug),
	}
}

// counts are what happened since the start.
type counts struct {
	attaches, audits atomic.Int64
	failures         atomic.Int64 // of audits
	refused          refusals
}

// refusals counts by code.
type refusals struct {
	mu sync.Mutex
	by map[string]int64
}

func (r *refusals) add(code string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by == nil {
		r.by = map[string]int64{}
	}
	r.by[code]++
}

// Snapshot is how a server stands, for metrics.
type Snapshot struct {
	Ready    bool
	Held     *attach.Status // nil while loading, and without weights
	Stats    gpuload.Stats  // of the load
	Attaches int64
	Audits   int64
	Failures int64            // audits that found other bytes than were published
	Refused  map[string]int64 // connections and requests, by code
}

// Snapshot says how the server stands now.
func (s *Server) Snapshot() Snapshot {
	status, _ := s.ready()
	snap := Snapshot{
		Ready: status == http.StatusOK, Attaches: s.attaches.Load(), Audits: s.audits.Load(), Failures: s.failures.Load(),
	}
	s.refused.mu.Lock()
	snap.Refused = maps.Clone(s.refused.by)
	s.refused.mu.Unlock()
	if h := s.held.Load(); h != nil && h.Weights != nil {
		held := s.Status(h)
		snap.Held, snap.Stats = &held, h.Weights.Stats()
	}
	return snap
}
