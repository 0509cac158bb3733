package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gorilla/mux"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

// handler parses a request, calls one operation, and writes its outcome.
type handler func(r *Registry, w *response, q *request) error

// route is one row of the route table. need is what the caller must be allowed to do, in the repository of the path
// or, if it has none, in any; it is asked before anything is parsed, and the operation asks again. known asks only
// that a token that is given is a good one, and nobody answers at any time and to anybody.
type route struct {
	methods string
	path    string
	need    access.Action
	handle  handler
}

const (
	nobody access.Action = ""
	known  access.Action = "known"
)

// routes is every route that there is.
var routes = []route{
	{"GET HEAD", "/health", nobody, (*Registry).getHealth},
	{"GET HEAD", "/v1/health", nobody, (*Registry).getHealth},
	{"GET HEAD", "/readyz", nobody, (*Registry).getReady},
	{"GET HEAD", "/metrics", nobody, (*Registry).getMetrics},

	{"GET HEAD", "/v2/", known, (*Registry).getPing},
	{"POST", "/v2/{name:.+}/blobs/uploads/", access.Push, (*Registry).postUpload},
	{"GET HEAD", "/v2/{name:.+}/blobs/uploads/{id}", access.Push, (*Registry).getUpload},
	{"PATCH", "/v2/{name:.+}/blobs/uploads/{id}", access.Push, (*Registry).patchUpload},
	{"PUT", "/v2/{name:.+}/blobs/uploads/{id}", access.Push, (*Registry).putUpload},
	{"DELETE", "/v2/{name:.+}/blobs/uploads/{id}", access.Push, (*Registry).deleteUpload},
	{"GET HEAD", "/v2/{name:.+}/blobs/{digest}", access.Pull, (*Registry).getBlob},
	{"DELETE", "/v2/{name:.+}/blobs/{digest}", access.Delete, (*Registry).deleteBlob},
	{"GET HEAD", "/v2/{name:.+}/manifests/{ref}", access.Pull, pulled((*Registry).getManifest)},
	{"PUT", "/v2/{name:.+}/manifests/{ref}", access.Push, (*Registry).putManifest},
	{"DELETE", "/v2/{name:.+}/manifests/{ref}", access.Delete, (*Registry).deleteManifest},
	{"GET HEAD", "/v2/{name:.+}/tags/list", access.Pull, pulled((*Registry).getTags)},
	{"GET HEAD", "/v2/{name:.+}/referrers/{digest}", access.Pull, pulled((*Registry).getReferrers)},

	{"GET HEAD", "/v1/openapi.yaml", access.Pull, (*Registry).getOpenAPI},
	{"GET HEAD", "/v1/bases", access.Pull, listed((*Registry).getBases)},
	{"GET HEAD", "/v1/bases/{aggregate}/artifacts", access.Pull, listed((*Registry).getArtifacts)},
	{"GET HEAD", "/v1/bases/{aggregate}/manifest", access.Pull, listed((*Registry).getBaseManifest)},
	{"GET HEAD", "/v1/bases/{aggregate}", access.Pull, listed((*Registry).getBase)},
	{"GET HEAD", "/v1/bases/{aggregate}/evals.jsonl", access.Pull, (*Registry).getEvals},
	{"GET HEAD", "/v1/blobs/{digest}/midstates", access.Pull, pulled((*Registry).getMidstates)},
	{"GET HEAD", "/v1/artifacts", access.Pull, listed((*Registry).getUnbound)},
	{"GET HEAD", "/v1/artifacts/{digest}/lineage", access.Pull, listed((*Registry).getLineage)},
	{"POST", "/v1/compare", access.Pull, (*Registry).postCompare},
	{"POST", "/v1/compatibility", access.Pull, (*Registry).postCompatibility},
}

// newRouter looks for a route among those that may match a path, as far as its ends tell: mux tries one after another.
func newRouter(r *Registry) http.Handler {
	words := map[ends]bool{}
	for _, rt := range routes {
		if e := endsOf(rt.path, nil); !strings.HasPrefix(e.last, "{") {
			words[e] = true
		}
	}
	routers := map[ends]http.Handler{}
	for _, rt := range routes {
		e := endsOf(rt.path, words)
		if routers[e] == nil {
			routers[e] = routerOf(r, func(path string) bool { return e.may(endsOf(path, words)) })
		}
	}
	none := routerOf(r, func(string) bool { return false })
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		path := req.URL.Path
		if req.URL.RawPath != "" {
			path = req.URL.EscapedPath() // as mux sees it; without a RawPath that has the same words
		}
		if h := routers[endsOf(path, words)]; h != nil {
			h.ServeHTTP(w, req)
			return
		}
		none.ServeHTTP(w, req)
	})
}

// ends are elements of a path: the first one, the last one where a route that begins so has it as a word, else the one
// before.
type ends struct {
	first, last, before string
	word                bool
}

// endsOf returns the ends of a path, or of a route's; without words its last element, whatever it is.
func endsOf(path string, words map[ends]bool) ends {
	path, rooted := strings.CutPrefix(path, "/")
	if !rooted {
		return ends{}
	}
	first, _, _ := strings.Cut(path, "/")
	front, last := "", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		front, last = path[:i], path[i+1:]
	}
	if e := (ends{first: first, last: last, word: true}); words == nil || words[e] {
		return e
	}
	return ends{first: first, before: front[strings.LastIndexByte(front, '/')+1:]}
}

// may says whether a route with the ends rt may match a path with those of e.
func (e ends) may(rt ends) bool {
	return rt == e || e.word && !rt.word && rt.first == e.first
}

// routerOf has the routes of some paths, and answers everything else with errors.
func routerOf(r *Registry, has func(path string) bool) http.Handler {
	m := mux.NewRouter().UseEncodedPath().SkipClean(true)
	for _, rt := range routes {
		if has(rt.path) {
			m.HandleFunc(rt.path, r.serve(rt)).Methods(strings.Fields(rt.methods)...)
		}
	}
	m.NotFoundHandler = r.serve(route{need: nobody, handle: func(*Registry, *response, *request) error {
		return api.Errorf(api.CodeRouteUnknown, "")
	}})
	m.MethodNotAllowedHandler = r.serve(route{need: nobody, handle: func(_ *Registry, w *response, q *request) error {
		w.Header().Set("Allow", strings.Join(allowed(m, q.Request), ", "))
		return api.Errorf(api.CodeUnsupported, "")
	}})
	return m
}

// allowed returns the methods that a path has.
func allowed(m *mux.Router, r *http.Request) (methods []string) {
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"} {
		other := *r
		other.Method = method
		if match := (mux.RouteMatch{}); m.Match(&other, &match) && match.MatchErr == nil {
			methods = append(methods, method)
		}
	}
	return methods
}

// request is a request whose caller is known.
type request struct {
	*http.Request
	id     string
	caller access.Caller
	idle   time.Duration
	body   *bounds.Body
	query  url.Values // of the URL, once values has read it
	memory *memory
	loans  []*bounds.Loan  // to return when the request has been answered
	ctx    context.Context // what Context returns, once it has
}

// values returns the query of the URL. It must not be changed.
func (q *request) values() url.Values {
	if q.query == nil {
		q.query = q.URL.Query()
	}
	return q.query
}

// serve wraps a handler: it finds the caller, turns an error into an answer, logs and counts. Deadlines move with
// progress; there is none on a request as a whole.
func (r *Registry) serve(rt route) http.HandlerFunc {
	template := strings.ReplaceAll(rt.path, ":.+}", "}")
	return func(hw http.ResponseWriter, hr *http.Request) {
		began := time.Now()
		r.traffic.running.Add(1)
		defer r.traffic.running.Add(-1)
		w := &response{ResponseWriter: hw, control: http.NewResponseController(hw), idle: r.idle, sent: &r.traffic.sent}
		w.taken = func() (uint64, bool) { return bounds.Taken(hr.Context()) }
		q := &request{Request: hr, id: requestID(hr.Header.Get(api.HeaderRequestID)), idle: r.idle, memory: r.memory}
		q.body = &bounds.Body{From: hr.Body, Control: w.control, Idle: r.idle, Received: &r.traffic.received}
		defer q.giveBack()
		defer w.leavePlace()
		w.Header().Set(api.HeaderRequestID, q.id)
		ended := func(err error) {
			did := Served{template, q.Method, w.status, q.body.N, w.n, time.Since(began), err}
			r.record(q, did)
			if r.observe != nil {
				r.observe(did)
			}
		}
		defer func() {
			if p := recover(); p != nil {
				w.watchEnds()
				ended(panicked(p))
				panic(http.ErrAbortHandler) // which breaks the connection off and says nothing more
			}
		}()
		resets := r.resets.Load()
		err := r.admit(rt, q)
		if err == nil {
			err = r.refuseChange(rt, w, q)
		}
		if err == nil {
			err = cmp.Or(rt.handle(r, w, q), w.end())
		}
		if resets != r.resets.Load() && isUnknown(err) {
			err = errNotLevel // it was perhaps looked for in an index that had just been emptied
		}
		if err = q.blame(w, err); errors.Is(err, ErrClientGone) {
			w.status = cmp.Or(w.status, statusClientGone)
		} else if err != nil {
			r.refuse(w, q, err)
		}
		w.extend() // for what is still buffered
		ended(err)
	}
}

// ErrClientGone is the error of a request whose client went away, or took nothing for too long, before the answer was
// sent.
var ErrClientGone = errors.New("client is gone")

// statusClientGone stands for the status of an answer that was never begun as the client was gone. nginx calls it so.
const statusClientGone = 499

// blame makes an error one of ErrClientGone if it comes of the client's going away: a store that was told to stop, or a
// connection that takes no more of an answer.
func (q *request) blame(w *response, err error) error {
	switch {
	case err == nil:
		return nil
	case q.Context().Err() != nil && errors.Is(err, context.Canceled),
		w.status != 0 && isConnection(err) && !errors.Is(err, blobstore.ErrUnavailable): // that is the store's connection
		return fmt.Errorf("%w: %w", ErrClientGone, err)
	}
	return err
}

// isConnection says whether the connection failed on which an answer was sent, or its request's context ended with it.
func isConnection(err error) bool {
	for _, is := range []error{
		syscall.EPIPE, syscall.ECONNRESET, os.ErrDeadlineExceeded, net.ErrClosed, context.Canceled,
	} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// ErrPanic is the error of a request whose answer a fault of this program broke off.
var ErrPanic = errors.New("panic")

// panicked makes an error of what was recovered, with the place that it came from.
func panicked(p any) error {
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		return err
	}
	return fmt.Errorf("%w: %v\n%s", ErrPanic, p, debug.Stack())
}

// isUnknown says whether a request was refused as something was not found.
func isUnknown(err error) bool {
	if err == nil {
		return false
	}
	e := asAPI(err)
	return e.Status() == http.StatusNotFound && e.Code != api.CodeRouteUnknown || e.Code == api.CodeManifestBlobUnknown
}

// refuseChange refuses what would change something, if the registry is read-only.
func (r *Registry) refuseChange(rt route, w *response, q *request) error {
	changes := rt.need == access.Push || rt.need == access.Delete
	if !r.readOnly || !changes || q.Method == http.MethodGet || q.Method == http.MethodHead {
		return nil
	}
	reads := ""
	if slices.ContainsFunc(routes, func(o route) bool { return o.path == rt.path && o.methods == "GET HEAD" }) {
		reads = "GET, HEAD"
	}
	w.Header().Set("Allow", reads)
	return errReadOnly
}

var errReadOnly = api.Errorf(api.CodeUnsupported, "this registry is read-only: it takes no pushes and no deletes").
	With(api.Refusal{Reason: api.CodeReadOnly})

// admit finds out who the caller is, and turns away whoever may not use the route.
func (r *Registry) admit(rt route, q *request) (err error) {
	if rt.need == nobody {
		return nil
	}
	if !r.indexed.Load() {
		return errNotLevel
	}
	if q.caller, err = r.access.Caller(q.Request); err != nil || rt.need == known {
		return err
	}
	if _, ok := mux.Vars(q.Request)["name"]; !ok {
		return q.caller.CheckAnywhere(rt.need)
	}
	repo, err := q.repo()
	if err != nil {
		return err
	}
	return q.caller.Check(rt.need, repo)
}

// refuse answers with an error. Once an answer has begun, all that is left is to break it off.
func (r *Registry) refuse(w *response, q *request, err error) {
	if w.status != 0 {
		return
	}
	e := asAPI(err)
	switch e.Code {
	case api.CodeUnauthorized:
		w.Header().Set("WWW-Authenticate", `Basic realm="kiln"`)
	case api.CodeUnavailable, api.CodeUploadBusy, api.CodeTooManyRequests:
		w.Header().Set("Retry-After", "1")
	}
	for _, h := range []string{"Content-Length", "Content-Range", "Accept-Ranges", "ETag", "Docker-Content-Digest"} {
		if h != "Content-Range" || e.Code != api.CodeRangeInvalid {
			w.Header().Del(h)
		}
	}
	if e.Code == api.CodeInternal {
		e = api.Errorf(e.Code, "the registry failed; its log says how, at request %s", q.id)
	}
	w.json(q, e.Status(), api.Errors{Errors: []*api.Error{e}})
}

// outcomes is the one place where an error of a part of the registry becomes an error of the API.
var outcomes = []struct {
	err     error
	code    api.Code
	message string // empty: the usual one of the code
}{
	{blobstore.ErrQuarantined, api.CodeBlobUnknown, "the bytes of this blob are damaged and were set aside; " +
		"pushing them again heals it"},
	{errUnusable, api.CodeBlobUnknown, "the bytes of this blob can't be read here; pushing them again heals it"},
	{errUnreadable, api.CodeUnavailable, "the registry failed to read a blob; its log says how"},
	{blobstore.ErrNotFound, api.CodeBlobUnknown, ""},
	{blobstore.ErrUploadUnknown, api.CodeBlobUploadUnknown, ""},
	{blobstore.ErrUploadBusy, api.CodeUploadBusy, ""},
	{blobstore.ErrOffset, api.CodeRangeInvalid, ""},
	{blobstore.ErrDigestMismatch, api.CodeDigestInvalid, ""},
	{blobstore.ErrSizeMismatch, api.CodeSizeInvalid, ""},
	{blobstore.ErrNoSpace, api.CodeStoreFull, ""},
	{blobstore.ErrUnavailable, api.CodeUnavailable, ""},
	{blobstore.ErrInUse, api.CodeUnavailable, ""},
	{syscall.ENOSPC, api.CodeStoreFull, ""},
	{syscall.EDQUOT, api.CodeStoreFull, ""},
	{index.ErrNotFound, api.CodeManifestUnknown, ""},
	{index.ErrReferred, api.CodeBlobReferred, ""},
	{index.ErrCursor, api.CodeParameterInvalid, "after is no cursor of this listing"},
}

func asAPI(err error) *api.Error {
	var e *api.Error
	if errors.As(err, &e) {
		return e
	}
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			e := api.Errorf(o.code, "")
			e.Message = cmp.Or(o.message, e.Message)
			return e
		}
	}
	return api.AsError(err)
}

// record logs a request once: panics, failures of the registry and answers that it broke off as errors, changes and
// clients that went away as information, the rest for debugging. Not to be ready is no failure.
func (r *Registry) record(q *request, did Served) {
	level := slog.LevelDebug
	failed := did.Err != nil && did.Status >= 500 && !errors.Is(did.Err, api.ErrUnavailable)
	brokeOff := did.Err != nil && did.Status >= 200 && did.Status < 300
	switch {
	case errors.Is(did.Err, ErrClientGone):
		level = slog.LevelInfo
	case errors.Is(did.Err, ErrPanic), failed, brokeOff:
		level = slog.LevelError
	case q.Method != http.MethodGet && q.Method != http.MethodHead:
		level = slog.LevelInfo
	}
	if !r.log.Enabled(q.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("id", q.id), slog.String("method", did.Method), slog.String("path", q.URL.Path),
		slog.Int("status", did.Status), slog.String("caller", q.caller.Name), slog.Int64("in", did.In),
		slog.Int64("out", did.Out), slog.Duration("took", did.Took),
	}
	if did.Err != nil {
		attrs = append(attrs, slog.String("error", did.Err.Error()))
	}
	r.log.LogAttrs(context.WithoutCancel(q.Context()), level, "request", attrs...)
}

// param returns an element of the path, decoded.
func (q *request) param(name string) string {
	raw := mux.Vars(q.Request)[name]
	if s, err := url.PathUnescape(raw); err == nil {
		return s
	}
	return raw
}

func (q *request) repo() (string, error) {
	name := q.param("name")
	return name, api.CheckRepo(name)
}

// repoDigest returns the repository and the digest of the path.
func (q *request) repoDigest() (string, identity.Digest, error) {
	repo, err := q.repo()
	if err != nil {
		return "", identity.Digest{}, err
	}
	d, err := api.ParseDigest(q.param("digest"))
	return repo, d, err
}

func (q *request) aggregate() (identity.Aggregate, error) {
	a, err := identity.ParseAggregate(q.param("aggregate"))
	if err != nil {
		return a, api.Errorf(api.CodeParameterInvalid, "aggregate: %v", err)
	}
	return a, nil
}

// number returns a number of the query: def if it is absent, most if it is larger.
func (q *request) number(name string, def, most int) (int, error) {
	s := q.values().Get(name)
	if s == "" {
		return def, nil
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, api.Errorf(api.CodeParameterInvalid, "%s=%.40q is not a number", name, s)
	}
	return int(min(n, uint64(most))), nil
}

// page reads how long a page is asked to be: def unless the query says so, at least 1 and at most maxPage.
func (q *request) page(name string, def int) (int, error) {
	n, err := q.number(name, def, maxPage)
	return max(n, 1), err
}

// window is how much of a blob is given to the connection at a time. The kernel sends a window without copying it.
const window = 1 << 20

// response is the writer of an answer. It gives the client another idle period with each piece, and, where it can be
// seen, whenever the client took anything of one. It keeps the io.ReaderFrom of the connection usable, so that files are
// sent by the kernel.
type response struct {
	http.ResponseWriter
	control *http.ResponseController
	idle    time.Duration
	sent    *atomic.Int64 // over all answers
	status  int
	n       int64

	extended time.Time // when extend last moved the deadline

	taken   func() (n uint64, known bool) // what the client took of this connection; nil: nobody knows
	unwatch func()                        // not nil while it is watched what the client takes
	loan    *bounds.Loan                  // for what is sent from memory
	overdue atomic.Bool                   // the client is cut off
	leave   func()                        // not nil while the answer is being made: frees its place
}

// extends is the part of an idle period for which extend leaves the deadline as it is: to move it costs more than to look
// at the clock.
const extends = 256

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *response) extend() {
	now := time.Now()
	if now.Sub(w.extended) < w.idle/extends || w.overdue.Load() {
		return
	}
	w.extended = now
	_ = w.control.SetWriteDeadline(now.Add(w.idle)) // not every ResponseWriter has deadlines
}

// unwatched is how much may be written at once without watching: connections take that at once, or nearly so.
const unwatched = 32 << 10

// watch begins to look several times in an idle period what the client took. A piece may be on its way for much longer:
// what counts is that the client takes something of it.
func (w *response) watch() {
	if w.unwatch != nil || w.taken == nil {
		return
	}
	last := uint64(0)
	w.unwatch = bounds.Watch(w.idle/8, func() {
		if w.loan.Overdue(w.idle) {
			w.overdue.Store(true)
			_ = w.control.SetWriteDeadline(time.Unix(1, 0))
		} else if n, known := w.taken(); known && n > last {
			last = n
			_ = w.control.SetWriteDeadline(time.Now().Add(w.idle))
		}
	})
}

// end sends what is still buffered of an answer that is watched, and watches it no more.
func (w *response) end() (err error) {
	if w.unwatch != nil {
		w.extend()
		err = w.control.Flush()
	}
	w.watchEnds()
	return err
}

func (w *response) watchEnds() {
	if w.unwatch != nil {
		w.unwatch()
		w.unwatch = nil
	}
}

func (w *response) WriteHeader(status int) {
	w.leavePlace()
	w.status = status
	w.extend()
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.extend()
	if len(b) > unwatched {
		w.watch()
	}
	n, err := w.ResponseWriter.Write(b)
	w.n += int64(n)
	w.sent.Add(int64(n))
	return n, err
}

// ReadFrom implements io.ReaderFrom. Of a reader with a limit it passes on windows with a limit: that is the form which
// the connection recognises as a file to send.
func (w *response) ReadFrom(src io.Reader) (total int64, err error) {
	to, ok := w.ResponseWriter.(io.ReaderFrom)
	limited, isLimited := src.(*io.LimitedReader)
	if !ok || !isLimited {
		return io.Copy(struct{ io.Writer }{w}, src)
	}
	if limited.N > unwatched {
		w.watch()
	}
	for limited.N > 0 {
		part := io.LimitedReader{R: limited.R, N: min(limited.N, window)}
		w.extend()
		n, err := to.ReadFrom(&part)
		total += n
		limited.N -= n
		w.n += n
		w.sent.Add(n)
		if err != nil || n == 0 {
			return total, err
		}
	}
	return total, nil
}
