package resident

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// Limits of the socket.
const (
	maxConnections = 4096 // requests and leases
	maxProbes      = 256  // connections of the address for probes, which any user of the machine can open
	maxWait        = 30 * time.Second
)

// route answers a request about what is held. An *attach.Error is the answer; any other error is a fault of this side.
type route func(w http.ResponseWriter, r *http.Request, h *Held) error

// routes are those of the socket. {aggregate} was found to be that of what is held.
func (s *Server) routes() map[string]route {
	const base = "/v1/resident/{aggregate}"
	all := map[string]route{
		"GET /v1/resident":                        s.status,
		"GET " + base:                             s.base,
		"DELETE " + base:                          s.end,
		"POST " + base + "/audit":                 s.audit,
		"GET " + base + "/generation":             s.generations,
		"GET " + base + "/shards/{sha256}/header": s.header,
	}
	s.adapterRoutes(base, all)
	return all
}

// local makes the handler of the socket.
func (s *Server) local() http.Handler {
	mux := http.NewServeMux()
	for pattern, f := range s.routes() {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, f) })
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.answer(w, r, func(http.ResponseWriter, *http.Request, *Held) error {
			return attach.Refuse(attach.CodeUnknown, "no such request: %s %.200s", r.Method, r.URL.Path)
		})
	})
	return mux
}

// answer checks who asks and for what, and makes an error the answer.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, f route) {
	h := s.held.Load()
	err := s.mayAsk(r, h)
	if err == nil {
		err = f(w, r, h)
	}
	if err == nil {
		return
	}
	var e *attach.Error
	switch {
	case errors.Is(err, gpuload.ErrUnreadable):
		s.damage(err)
		err = s.damaged.Load()
	case errors.As(err, &e) && e.Code == attach.CodeDamaged:
	case errors.Is(err, gpuload.ErrState), r.Context().Err() != nil && s.ending.Load():
		err = attach.Refuse(attach.CodeDraining, "it is about to end")
	}
	if !errors.As(err, &e) {
		e = attach.Refuse(attach.CodeFailed, "%v", err)
	}
	s.refused.add(e.Code)
	if e.Code == attach.CodeOtherUser {
		w.Header().Set("Connection", "close")
	}
	write(w, e.Status(), e)
}

func (s *Server) mayAsk(r *http.Request, h *Held) error {
	p := r.Context().Value(peerKey{}).(peer)
	if p.err != nil {
		return p.err
	}
	if me := os.Geteuid(); p.uid != me && p.uid != 0 {
		return attach.Refuse(attach.CodeOtherUser, "user ID %d is not %d, which holds the weights, and not 0", p.uid, me)
	}
	text := r.PathValue("aggregate")
	if text == "" {
		return nil
	}
	a, err := identity.ParseAggregate(text)
	if err != nil {
		return attach.Refuse(attach.CodeBadRequest, "%v", err)
	}
	if held := h.Weights.Manifest().Aggregate; a != held {
		return attach.Refuse(attach.CodeOtherBase, "held is %s, asked for was %s", held, a)
	}
	return nil
}

func (s *Server) status(w http.ResponseWriter, _ *http.Request, h *Held) error {
	write(w, http.StatusOK, s.Status(h))
	return nil
}

// Status says what h is and what became of it.
func (s *Server) Status(h *Held) attach.Status {
	d, state := h.base.document, h.Weights.State()
	if s.ending.Load() && state == gpuload.Published {
		state = gpuload.Draining // of leases, which come first
	}
	return attach.Status{
		Aggregate: d.Aggregate, Model: s.Model, Backend: s.Backend, State: state, Damaged: s.damaged.Load() != nil,
		Shards: len(d.Shards), Tensors: len(d.Tensors), Bytes: d.Verification.Bytes, Devices: d.Devices,
		Leases: s.leases.count(), Generation: h.generation(), Adapters: h.adapters(), Process: os.Getpid(),
	}
}

func (s *Server) base(w http.ResponseWriter, r *http.Request, h *Held) error {
	return s.attach(w, r, &h.base)
}

// end begins the end of the process, as a signal does, and answers at once or, if the request asks for that, when the
// memory is free.
func (s *Server) end(w http.ResponseWriter, r *http.Request, _ *Held) error {
	answer := attach.Released{State: gpuload.Draining}
	if r.URL.Query().Get("wait") == "1" {
		s.released()
		<-s.freed
		answer = attach.Released{State: gpuload.Freed, CutOff: s.cutOff}
	}
	write(w, http.StatusOK, answer)
	s.released()
	return nil
}

// header answers with the bytes of a shard that are not in its memory.
func (s *Server) header(w http.ResponseWriter, r *http.Request, h *Held) error {
	return header(w, r, h.Weights)
}

// header answers with the header of the shard of weights that the path names.
func header(w http.ResponseWriter, r *http.Request, weights *gpuload.Resident) error {
	d, err := identity.ParseDigest(r.PathValue("sha256"))
	if err != nil {
		return attach.Refuse(attach.CodeBadRequest, "%v", err)
	}
	for i, shard := range weights.Manifest().Shards {
		if shard.Digest == d {
			writeBytes(w, "application/octet-stream", http.StatusOK, weights.Header(i))
			return nil
		}
	}
	return attach.Refuse(attach.CodeUnknown, "no shard has the digest %s", d)
}

// audit reads everything back, one request at a time. Other bytes than were published end all new attaches; an audit
// that could not be made says nothing of the bytes.
func (s *Server) audit(w http.ResponseWriter, r *http.Request, h *Held) error {
	ctx := r.Context()
	select {
	case s.auditing <- struct{}{}:
		defer func() { <-s.auditing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	start := time.Now()
	s.audits.Add(1)
	err := h.Weights.Audit(ctx, nil)
	if err == nil {
		err = h.auditAdapters(ctx)
	}
	switch {
	case isDamage(err):
		s.failures.Add(1)
		s.damage(err)
	case err != nil:
		return err
	}
	if e := s.damaged.Load(); e != nil {
		return e
	}
	d := h.base.document
	write(w, http.StatusOK, attach.Audited{
		Aggregate: d.Aggregate, Bytes: d.Verification.Bytes, Seconds: time.Since(start).Seconds(),
	})
	return nil
}

// isDamage says whether an audit found other bytes than were published, or a device has lost them.
func isDamage(err error) bool {
	e, is := errors.AsType[*gpuload.Error](err)
	return is && (e.Got != "" || errors.Is(err, gpuload.ErrUnreadable))
}

// damage ends all new attaches, and readiness. Where the device has lost what the process has there, which nothing but
// its end heals, it also ends the server.
func (s *Server) damage(err error) {
	lost := errors.Is(err, gpuload.ErrUnreadable)
	e := attach.Refuse(attach.CodeDamaged, "the weights are not what was published: %v", err)
	if lost {
		e = attach.Refuse(attach.CodeDamaged, "%v: %v", ErrLost, err)
	}
	if s.damaged.CompareAndSwap(nil, e) {
		s.leases.tell(attach.Event{Kind: attach.EventDamaged})
	}
	if lost && !s.lost.Swap(true) {
		s.fail(fmt.Errorf("%w: %w", ErrLost, err))
	}
}

// generations waits for a generation above a number.
func (s *Server) generations(w http.ResponseWriter, r *http.Request, h *Held) error {
	after, err := strconv.ParseUint(r.URL.Query().Get("after"), 10, 64)
	if err != nil {
		return attach.Refuse(attach.CodeBadRequest, "after: want a number")
	}
	ctx, cancel := context.WithTimeout(r.Context(), maxWait)
	defer cancel()
	now := h.wait(ctx, after)
	if r.Context().Err() != nil {
		return context.Cause(r.Context())
	}
	write(w, http.StatusOK, struct {
		Generation uint64 `json:"generation"`
	}{now})
	return nil
}

// watch tells those who are attached of each generation until ctx ends.
func (s *Server) watch(ctx context.Context, h *Held) {
	for last := h.generation(); ; {
		now := h.wait(ctx, last)
		if ctx.Err() != nil {
			return
		}
		if last != now {
			last = now
			s.leases.tell(attach.Event{Kind: attach.EventGeneration, Generation: now})
		}
	}
}

// peer is a connection and who is at the other end.
type peer struct {
	conn *connection
	uid  int
	err  error
}

type peerKey struct{}

// localServer serves the socket. Its requests end with ctx. There is no limit on the time that a request takes.
func (s *Server) localServer(ctx context.Context) *http.Server {
	server := s.httpServer()
	server.Handler, server.ReadTimeout, server.WriteTimeout = s.local(), 0, 0
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		conn := c.(*connection)
		uid, err := localsock.Peer(conn)
		return context.WithValue(ctx, peerKey{}, peer{conn, uid, err})
	}
	return server
}

// listen binds the socket under a hidden name.
func (s *Server) listen(ctx context.Context) error {
	if s.Socket == "" {
		return nil
	}
	folder, name := filepath.Split(s.Socket)
	if folder == "" {
		folder = "."
	}
	longest := name
	if name == "" {
		longest = attach.SocketName(identity.Aggregate{})
	}
	if err := localsock.CheckPath(filepath.Join(folder, longest)); err != nil {
		return err
	}
	l, err := localsock.Listen(ctx, folder)
	if err != nil {
		return err
	}
	if name != "" {
		if err := l.Free(name); err != nil {
			return errors.Join(err, l.Close())
		}
	}
	s.socket, s.name = l, name
	return nil
}

// publish makes what was loaded something that others can attach to, and gives the socket its name.
func (s *Server) publish(ctx context.Context, h *Held) (err error) {
	if h.Weights == nil {
		return nil
	}
	a := h.Weights.Manifest().Aggregate
	h.base.lease = h.Weights.Lease
	if h.base.document, err = describe(h.Weights, a, nil, h.At); err != nil {
		return fmt.Errorf("describe the weights: %w", err)
	}
	if s.socket == nil {
		return nil
	}
	name := s.name
	if name == "" {
		name = attach.SocketName(a)
	}
	if err := s.socket.Publish(ctx, name); err != nil {
		return err
	}
	h.Socket = s.socket.Path()
	return nil
}
