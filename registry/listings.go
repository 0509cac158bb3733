package registry

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

const (
	// maxPage is the longest page of a listing, and the one that a client gets that asks for none.
	maxPage = 1000
	// maxReferrersBytes keeps a page of referrers within what clients read of an index.
	maxReferrersBytes = api.MaxManifestBytes - 64<<10
)

// Tags lists up to n tags of a repository, in byte order, after the tag last; empty means from the start. more says
// whether there are others. ErrNameUnknown if the repository holds nothing.
func (r *Registry) Tags(
	ctx context.Context,
	c access.Caller,
	repo, last string,
	n int,
) (tags []string, more bool, err error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return nil, false, err
	}
	tags = []string{}
	for tag, err := range r.ix.Tags(ctx, repo, last) {
		if err != nil {
			return nil, false, err
		}
		if len(tags) == n {
			return tags, n > 0, nil
		}
		tags = append(tags, tag)
	}
	if len(tags) > 0 {
		return tags, false, nil
	}
	return tags, false, r.checkHolds(ctx, repo)
}

// checkHolds returns ErrNameUnknown for a repository without a manifest.
func (r *Registry) checkHolds(ctx context.Context, repo string) error {
	for _, err := range r.ix.Find(ctx, index.Query{Repo: repo}) {
		return err
	}
	return api.Errorf(api.CodeNameUnknown, "repository %s is unknown", repo)
}

// Referrers lists manifests of a repository whose subject is d, of one artifact type unless that is empty: a page of up
// to n, after a cursor, which is empty for the first. next is the cursor of the following page, empty if there is none.
// A subject that nobody has put yet may have referrers.
func (r *Registry) Referrers(
	ctx context.Context,
	c access.Caller,
	repo string,
	d identity.Digest,
	artifactType, after string,
	n int,
) (page []v1.Descriptor, next string, err error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return nil, "", err
	}
	q := index.Query{Repo: repo, Subject: d, ArtifactType: artifactType, After: after}
	page = []v1.Descriptor{}
	size, last := 0, ""
	for rec, err := range r.ix.Find(ctx, q) {
		if err != nil {
			return nil, "", err
		}
		desc := v1.Descriptor{
			MediaType: rec.MediaType, Digest: digest.Digest(rec.Digest.String()), Size: rec.Size,
			ArtifactType: rec.ArtifactType, Annotations: rec.Annotations,
		}
		b, err := json.Marshal(desc)
		if err != nil {
			return nil, "", err
		}
		if size += len(b) + 1; len(page) == n || len(page) > 0 && size > maxReferrersBytes {
			return page, last, nil
		}
		page, last = append(page, desc), index.Cursor(q, rec)
	}
	return page, "", nil
}

func (r *Registry) getTags(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	n, err := q.number("n", maxPage, maxPage)
	if err != nil {
		return err
	}
	tags, more, err := r.Tags(q.Context(), q.caller, repo, q.URL.Query().Get("last"), n)
	if err != nil {
		return err
	}
	if more {
		w.next(api.PathTags(repo), url.Values{"n": {strconv.Itoa(n)}, "last": {tags[len(tags)-1]}})
	}
	return w.json(q, http.StatusOK, api.TagList{Name: repo, Tags: tags})
}

func (r *Registry) getReferrers(w *response, q *request) error {
	repo, d, err := q.repoDigest()
	if err != nil {
		return err
	}
	n, err := q.page("n", maxPage)
	if err != nil {
		return err
	}
	artifactType := q.URL.Query().Get("artifactType")
	page, next, err := r.Referrers(q.Context(), q.caller, repo, d, artifactType, q.URL.Query().Get("after"), n)
	if err != nil {
		return err
	}
	if artifactType != "" {
		w.Header().Set(api.HeaderFiltersApplied, "artifactType")
	}
	if next != "" {
		link := url.Values{"n": {strconv.Itoa(n)}, "after": {next}}
		if artifactType != "" {
			link.Set("artifactType", artifactType)
		}
		w.next(api.PathReferrers(repo, d), link)
	}
	b, err := json.Marshal(
		v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: page},
	)
	if err != nil {
		return err
	}
	return w.bytes(q, http.StatusOK, v1.MediaTypeImageIndex, b)
}

// json answers with a document.
func (w *response) json(q *request, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	return w.bytes(q, status, "application/json", append(b, '\n'))
}

// bytes answers with a document as it is; a HEAD gets its length only.
func (w *response) bytes(q *request, status int, contentType string, b []byte) error {
	w.describe(contentType, len(b))
	if q.Method == http.MethodHead {
		w.WriteHeader(status)
		return nil
	}
	q.giveBack() // what was parsed has become the answer
	if len(b) > smallDocument {
		if w.loan = q.memory.answers.Try(q.who(), int64(len(b))); w.loan == nil {
			return errMuch // to wait would take the memory already
		}
		q.loans = append(q.loans, w.loan)
	}
	w.WriteHeader(status)
	_, err := w.Write(b)
	return err
}

// describe sets the headers of a document of n bytes.
func (w *response) describe(contentType string, n int) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(n))
}

// next adds the link to the next page of a listing.
func (w *response) next(path string, query url.Values) {
	w.Header().Set("Link", fmt.Sprintf("<%s?%s>; rel=\"next\"", path, query.Encode()))
}

// memory is what all requests together may hold in memory of documents that are not small, and of answers that are
// being made.
type memory struct {
	pushes    parsing        // of manifests that are put
	questions parsing        // of /v1
	chores    *bounds.Budget // documents that are read again without a request
	answers   *bounds.Budget // answers on their way to clients
	// Turns at making answers: those of one sort wait for no others.
	reads    *bounds.Budget // of /v2, and of what a pull reads of /v1
	listings *bounds.Budget // of /v1
	asked    *bounds.Budget // questions that are answered of documents
}

// parsing is what requests of one sort may hold of texts while they are parsed: those of one sort wait for no others.
// Whoever waits for one of these may have what stands above it, and never what stands below.
type parsing struct {
	arriving  *bounds.Entry // bodies on their way here
	bodies    *bounds.Entry // of the requests themselves
	documents *bounds.Entry // in blobs
	idle      time.Duration
}

func newParsing(idle time.Duration) parsing {
	is := bounds.Limits{Size: budget, Part: 1, Waiting: maxWaiting, OfOne: maxOfOne}
	entry := func() *bounds.Entry { return bounds.NewEntry(is, parsedSize*smallDocument) }
	return parsing{bounds.NewEntry(is, 0), entry(), entry(), idle}
}

// read waits until documents of size bytes of text may be read. errMuch.
func (p parsing) read(ctx context.Context, size int64) (*bounds.Loan, error) {
	return wait(ctx, p.idle, p.documents, parsedSize*size)
}

// admit is read for a question.
func (m *memory) admit(ctx context.Context, size int64) (release func(), err error) {
	loan, err := m.questions.read(ctx, size)
	return loan.Return, err
}

// lender is a *bounds.Budget or *bounds.Entry.
type lender interface {
	Wait(ctx context.Context, name string, n int64) (*bounds.Loan, error)
}

// wait waits for n for the idle time. errMuch.
func wait(ctx context.Context, idle time.Duration, of lender, n int64) (*bounds.Loan, error) {
	limited, cancel := context.WithTimeout(ctx, idle)
	defer cancel()
	loan, err := of.Wait(limited, bounds.Caller(ctx), n)
	if err != nil {
		return nil, cmp.Or(ctx.Err(), error(errMuch))
	}
	return loan, nil
}

// turn waits until an answer of a sort may be made: a few are at a time. The request leaves its place with the first byte
// of the answer. errMuch.
func (q *request) turn(w *response, of *bounds.Budget) error {
	place := of.Try(q.who(), 1)
	if place == nil {
		var err error
		if place, err = wait(q.Context(), q.idle, of, 1); err != nil {
			return err
		}
	}
	w.leave = place.Return
	return nil
}

// who tells callers apart: by name, those without one by the address that they come from.
func (q *request) who() string {
	if q.caller.Name != "" {
		return q.caller.Name
	}
	return bounds.Origin(q.RemoteAddr)
}

// Context returns the context of the request, which says on whose behalf it is.
func (q *request) Context() context.Context {
	if q.ctx == nil {
		q.ctx = bounds.WithCaller(q.Request.Context(), q.who())
	}
	return q.ctx
}

const (
	// smallDocument is the size in bytes up to which a document takes nothing of a budget.
	smallDocument = 64 << 10
	// budget is the size in bytes of a budget.
	budget = 64 << 20
	// parsedSize is by how much more a document takes that was parsed than its bytes: so much in the worst case.
	parsedSize = 8
	// maxWaiting is how many requests may wait for one thing, and maxOfOne how many of one caller. Whoever comes then is
	// turned away at once.
	maxWaiting = 256
	maxOfOne   = maxWaiting / 4
	// maxListings and maxReads are maxWaiting of listings, and of what pulls read, of one caller also: those who share a
	// token may be many.
	maxListings, maxReads = 4 * maxWaiting, 64 * maxWaiting
	// minPlaces is how many answers of a sort may be made at once where there are few processors. It takes no waiting for
	// others.
	minPlaces = 4
	// placesPart leaves a quarter of the places to others.
	placesPart = 3
)

func newMemory(idle time.Duration) *memory {
	places := func(waiting, ofOne int) *bounds.Budget {
		return bounds.NewBudget(bounds.Limits{Size: int64(max(minPlaces, runtime.GOMAXPROCS(0))), Part: placesPart,
			Waiting: waiting, OfOne: ofOne})
	}
	return &memory{
		pushes: newParsing(idle), questions: newParsing(idle),
		chores:  bounds.NewBudget(bounds.Limits{Size: budget, Waiting: maxReads, OfOne: maxReads}),
		answers: bounds.NewBudget(bounds.Limits{Size: 2 * budget, Part: 1}),
		reads:   places(maxReads, maxReads), listings: places(maxListings, maxListings/4),
		asked: places(maxWaiting, maxOfOne),
	}
}

// errMuch: the memory for documents is taken.
var errMuch = api.Errorf(api.CodeUnavailable, "many documents are being read; try again soon")

// borrow waits for n bytes until the request has been answered. errMuch.
func (q *request) borrow(e *bounds.Entry, n int64) (*bounds.Loan, error) {
	l, err := wait(q.Context(), q.idle, e, n)
	q.loans = append(q.loans, l)
	return l, err
}

// giveBack returns what was borrowed.
func (q *request) giveBack() {
	for _, l := range q.loans {
		l.Return()
	}
	q.loans = nil
}

// document reads the body of at most limit bytes, which is to be parsed. What it takes of memory is the request's until
// it has been answered.
func (q *request) document(limit int64, as parsing) ([]byte, error) {
	if q.ContentLength > limit {
		// Many clients look for an answer only once they have sent the body.
		_, _ = io.CopyN(io.Discard, q.body, min(q.ContentLength, 4*limit))
		return nil, api.Errorf(api.CodeContentTooLarge, "body has %d bytes, at most %d are taken", q.ContentLength, limit)
	}
	b, err := q.read(limit, as)
	switch {
	case errors.Is(err, errMuch):
		_, _ = io.CopyN(io.Discard, q.body, limit)
		return nil, err
	case errors.Is(err, bounds.ErrOverdue):
		return nil, errMuch
	case err != nil:
		return nil, api.Errorf(api.CodeParameterInvalid, "read body: %v", err)
	case int64(len(b)) > limit:
		return nil, api.Errorf(api.CodeContentTooLarge, "body has more than %d bytes", limit)
	}
	_, err = q.borrow(as.bodies, parsedSize*int64(len(b)))
	return b, err
}

// read reads the body, or the first limit + 1 bytes of a longer one.
func (q *request) read(limit int64, as parsing) (_ []byte, err error) {
	var b bytes.Buffer
	size := q.ContentLength
	if size < 0 || size > smallDocument {
		if size < 0 { // it is not known, and may be small
			if _, err := io.CopyN(&b, q.body, smallDocument); err != nil {
				return b.Bytes(), ended(err)
			}
			size = limit
		}
		if q.body.Held, err = q.borrow(as.arriving, size); err != nil {
			return nil, err
		}
	}
	b.Grow(int(size) - b.Len() + bytes.MinRead)
	_, err = b.ReadFrom(io.LimitReader(q.body, limit+1-int64(b.Len())))
	return b.Bytes(), err
}

// ended is nil for the end of a body.
func ended(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

// pulled and listed let a handler make its answer when it is its turn, which it leaves with the first byte of the answer.
func pulled(h handler) handler { return inTurn(h, func(m *memory) *bounds.Budget { return m.reads }) }
func listed(h handler) handler {
	return inTurn(h, func(m *memory) *bounds.Budget { return m.listings })
}

func inTurn(h handler, of func(*memory) *bounds.Budget) handler {
	return func(r *Registry, w *response, q *request) error {
		if err := q.turn(w, of(q.memory)); err != nil {
			return err
		}
		defer w.leavePlace()
		return h(r, w, q)
	}
}

// leavePlace says that the answer has been made.
func (w *response) leavePlace() {
	if w.leave != nil {
		w.leave()
		w.leave = nil
	}
}

// manifestPiece is how much of a large manifest is held in memory while it is sent.
const manifestPiece = 128 << 10

// sendManifest answers with a manifest of size bytes, of which b are the first. Of a large one, what the client has still
// to take is not held in memory.
func (r *Registry) sendManifest(w *response, q *request, rec index.Record, b []byte, size int) error {
	w.describe(rec.MediaType, size)
	if q.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil
	}
	for rest := size; ; {
		n, err := w.Write(b)
		if rest -= n; err != nil || rest == 0 {
			return err
		}
		n, err = r.ix.ManifestPart(q.Context(), rec.Digest, size-rest, b)
		if b = b[:n]; err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("%w: manifest %s ends %d bytes early", index.ErrDamaged, rec.Digest, rest)
		}
	}
}

// beginning returns the first bytes of a manifest, of which b is all, so many as are to be held in memory at a time.
func beginning(b []byte) []byte {
	if len(b) <= manifestPiece {
		return b
	}
	return bytes.Clone(b[:manifestPiece])
}

func (r *Registry) getPing(w *response, q *request) error {
	// A caller without a name is told to authenticate even where anonymous pulls are allowed: clients decide with this
	// request whether to send what they have.
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	if !r.access.Open() && q.caller.Name == "" {
		return api.Errorf(api.CodeUnauthorized, "")
	}
	return w.json(q, http.StatusOK, struct{}{})
}

func (r *Registry) getHealth(w *response, q *request) error {
	h := r.Health()
	status := http.StatusOK
	if h.Status == "maintenance" {
		status = http.StatusServiceUnavailable
	}
	return w.json(q, status, h)
}

func (r *Registry) getReady(w *response, q *request) error {
	if s := r.state.Load(); s != ready {
		return api.Errorf(api.CodeUnavailable, "%s", map[int32]string{starting: "starting", stopping: "stopping"}[s])
	}
	return w.json(q, http.StatusOK, struct {
		Ready bool `json:"ready"`
	}{true})
}

// getMetrics answers with the metrics, where they are to be served here.
func (r *Registry) getMetrics(w *response, q *request) error {
	if r.metrics == nil {
		return api.Errorf(api.CodeRouteUnknown, "")
	}
	r.metrics.ServeHTTP(w, q.Request)
	return nil
}

func (r *Registry) getOpenAPI(w *response, q *request) error {
	return w.bytes(q, http.StatusOK, "application/yaml", api.OpenAPI())
}
